//! State that the lanes and handles of an engine share.

use std::{fmt, sync::Mutex};

use super::{
    metrics::EmbedderMetrics,
    queue::Queue,
    settings::{BatchLimits, EmbedderSettings},
};
use crate::{
    model::{BiLm, DeviceError, DeviceName, StartState},
    planner::Planner,
    word_cache::WordCache,
};

/// The constant states from which sentences start, for every lane.
pub(crate) trait StartStates: Send + Sync + fmt::Debug {
    /// The state before the boundary token is read: the warm state, or zeros.
    fn state(&self, model: &BiLm, warm: bool) -> Result<StartState, DeviceError>;
}

/// What all lanes and handles share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) queue: Queue,
    pub(super) cache: WordCache,
    pub(super) starts: Box<dyn StartStates>,
    pub(super) metrics: Mutex<EmbedderMetrics>,
    pub(super) tokens_at_once: usize,
    /// Bytes of token vectors that each lane keeps on its device; `None`: all lanes share `cache`.
    pub(super) device_cache: Option<usize>,
}

impl Shared {
    pub(super) fn new(models: &[BiLm], settings: &EmbedderSettings, starts: Box<dyn StartStates>) -> Self {
        let limits = BatchLimits::new(settings, models);
        let planner = Planner::new(limits.tokens, limits.rows, models.len());
        Self {
            queue: Queue::new(planner, settings.queue_tokens, models.len()),
            cache: WordCache::new(settings.cache_bytes, models.first().map_or(1, BiLm::projection_dim)),
            starts,
            metrics: Mutex::default(),
            tokens_at_once: limits.tokens.saturating_mul(models.len()),
            device_cache: models.iter().any(|model| model.device() != DeviceName::Cpu).then_some(settings.cache_bytes),
        }
    }
}
