//! The models of a worker. A model is opened when the first row of a plan needs it, and stays open.

use std::{
    collections::HashMap,
    fmt,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use elmo::{Elmo, EmbedderSettings, Fingerprint};
use elmo_udfs::{
    ModelError, ModelSource,
    codec::{ModelHost, SentModel},
};
use tokio::runtime::Handle;

use super::{live::Live, worker::WorkerSettings};
use crate::{
    models::{LazyModel, ModelSpec, Warn},
    stores::Stores,
};

/// The models of this process, by address and fingerprint.
pub(super) struct WorkerModels {
    /// The worker's name in error messages.
    name: String,
    offline: bool,
    stores: Stores,
    engine: EmbedderSettings,
    runtime: Handle,
    live: Arc<Live>,
    models: Mutex<HashMap<(String, Fingerprint), Slot>>,
}

/// A model, locked while it is being opened.
type Slot = Arc<Mutex<Option<Elmo>>>;

impl fmt::Debug for WorkerModels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl WorkerModels {
    pub(super) fn new(settings: &WorkerSettings, address: SocketAddr, stores: &Stores, live: Arc<Live>) -> Self {
        Self {
            name: format!("the worker at {address}"),
            offline: settings.offline,
            stores: stores.clone(),
            engine: settings.engine.clone(),
            runtime: Handle::current(),
            live,
            models: Mutex::default(),
        }
    }

    fn models(&self) -> MutexGuard<'_, HashMap<(String, Fingerprint), Slot>> {
        self.models.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ModelHost for WorkerModels {
    fn open(&self, model: &SentModel) -> Result<Elmo, ModelError> {
        let key = (model.address.clone(), model.card.fingerprint.clone());
        let slot = Arc::clone(self.models().entry(key.clone()).or_default());
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        // The fingerprint does not cover the LM head, which may have been added or replaced since the model was opened.
        let expected = &model.card.lm_head;
        let has_head = |elmo: &&Elmo| expected.is_none() || elmo.lm_head_digest().is_ok_and(|head| head == *expected);
        if let Some(elmo) = slot.as_ref().filter(has_head) {
            return Ok(elmo.clone());
        }
        let lazy = LazyModel {
            spec: ModelSpec::from_address(&model.address)?,
            offline: self.offline,
            stores: self.stores.clone(),
            settings: self.engine.clone(),
            runtime: self.runtime.clone(),
            warn: Warn::OnOpen,
            read: Mutex::default(),
        };
        let opened = lazy.open()?;
        if opened.fingerprint() == &model.card.fingerprint {
            *slot = Some(opened.clone());
            self.live.opened(&model.address);
            // Drops earlier models of this address. Running tasks hold clones of theirs.
            self.models().retain(|(address, fingerprint), _| *address != key.0 || *fingerprint == key.1);
        }
        Ok(opened)
    }

    fn name(&self) -> String {
        self.name.clone()
    }
}
