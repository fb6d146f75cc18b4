//! State that the lanes and handles of an engine share.

use std::{fmt, sync::Mutex};

use super::{
    metrics::EmbedderMetrics,
    queue::Queue,
    settings::{BatchLimits, EmbedderSettings, GPU_LANES},
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
    /// Bytes of token vectors that each lane of a GPU keeps there.
    pub(super) device_cache: usize,
    /// Lanes of the CPU do so too, for tests; otherwise they share `cache`.
    pub(super) all_on_device: bool,
}

impl Shared {
    pub(super) fn new(models: &[BiLm], settings: &EmbedderSettings, starts: Box<dyn StartStates>) -> Self {
        let limits = BatchLimits::new(settings, models);
        let lanes_per_device = lanes_per_device(models);
        // Lanes of one GPU take turns: smaller batches for each would only make more of them.
        let planner = Planner::new(limits.tokens, limits.rows, models.len().div_ceil(lanes_per_device));
        Self {
            queue: Queue::new(planner, settings.queue_tokens, (models.len(), lanes_per_device)),
            cache: WordCache::new(settings.cache_bytes, models.first().map_or(1, BiLm::projection_dim)),
            starts,
            metrics: Mutex::default(),
            tokens_at_once: limits.tokens.saturating_mul(models.len()),
            device_cache: settings.cache_bytes,
            all_on_device: false,
        }
    }
}

fn lanes_per_device(models: &[BiLm]) -> usize {
    if models.iter().any(|model| model.device() != DeviceName::Cpu) { GPU_LANES } else { 1 }
}
