//! The models of an executor. A model is opened when the first row of a plan needs it, and stays open.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use elmo::{Elmo, EmbedderSettings, Fingerprint};
use elmo_udfs::{
    ModelError, ModelSource,
    codec::{ModelHost, SentModel},
};
use tokio::runtime::Handle;

use crate::{
    models::{LazyModel, ModelSpec, Warn},
    stores::Stores,
};

/// The models of this process, by address and fingerprint.
pub(super) struct ExecutorModels {
    /// The executor's name in error messages.
    pub(super) name: String,
    pub(super) offline: bool,
    pub(super) stores: Stores,
    pub(super) engine: EmbedderSettings,
    pub(super) runtime: Handle,
    pub(super) models: Mutex<HashMap<(String, Fingerprint), Slot>>,
}

/// A model, locked while it is being opened.
pub(super) type Slot = Arc<Mutex<Option<Elmo>>>;

impl fmt::Debug for ExecutorModels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl ExecutorModels {
    fn models(&self) -> MutexGuard<'_, HashMap<(String, Fingerprint), Slot>> {
        self.models.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ModelHost for ExecutorModels {
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
            // Drops earlier models of this address. Running tasks hold clones of theirs.
            self.models().retain(|(address, fingerprint), _| *address != key.0 || *fingerprint == key.1);
        }
        Ok(opened)
    }

    fn name(&self) -> String {
        self.name.clone()
    }

    /// Ballista discards the reason if a plan cannot be decoded.
    fn fails_late(&self) -> bool {
        true
    }
}
