//! Models that SQL names: found and described when a query names them, put on devices when the first row is embedded.

use std::{
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
};

use elmo::{Elmo, EmbedderSettings, ModelData, embedder::Precision};
use elmo_udfs::{Card, ModelError, ModelSource};
use tokio::runtime::Handle;

use super::{Cache, Fingerprints, ModelFiles, ModelSpec, Models, warn_untrained};
use crate::{error::Result, stores::Stores};

/// A model by where it is.
pub(crate) struct LazyModel {
    pub(crate) spec: ModelSpec,
    pub(crate) offline: bool,
    pub(crate) stores: Stores,
    pub(crate) settings: EmbedderSettings,
    /// Where fetching waits.
    pub(crate) runtime: Handle,
    /// Others open the model: what is to be said of it is said when it is described.
    pub(crate) elsewhere: bool,
    /// Weights that were read to describe the model, for the one who opens it.
    pub(crate) read: Mutex<Option<ModelData>>,
}

impl fmt::Debug for LazyModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LazyModel({})", self.spec)
    }
}

impl ModelSource for LazyModel {
    fn describe(&self) -> Result<Card, ModelError> {
        let (files, cache) = self.locate()?;
        let fingerprints = Fingerprints::new(&cache);
        if let Some((options, fingerprint)) = fingerprints.known(&files) {
            let (lm_head, location) = (files.lm_head().is_some(), self.spec.to_string());
            return Ok(Card { options, fingerprint, untrained: false, lm_head, location });
        }
        let data = self.data(&files, &fingerprints)?;
        if self.elsewhere {
            warn_untrained(&data);
        }
        let card = Card {
            options: data.options.clone(),
            fingerprint: data.fingerprint.clone(),
            untrained: data.untrained,
            lm_head: data.lm_head.is_some(),
            location: self.spec.to_string(),
        };
        *self.read() = (!self.elsewhere).then_some(data);
        Ok(card)
    }

    fn address(&self) -> Option<String> {
        Some(self.spec.address())
    }

    fn precision(&self) -> Precision {
        self.settings.precision
    }

    fn open(&self) -> Result<Elmo, ModelError> {
        let read = self.read().take();
        let data = match read {
            Some(data) => data,
            None => {
                let (files, cache) = self.locate()?;
                self.data(&files, &Fingerprints::new(&cache))?
            }
        };
        warn_untrained(&data);
        Ok(Elmo::from_data(data, &self.settings)?)
    }
}

impl LazyModel {
    /// The files on this machine, fetched where need be. DataFusion plans on threads of the runtime, which must not wait
    /// for it themselves.
    fn locate(&self) -> Result<(ModelFiles, Cache), ModelError> {
        let cache = Cache::from_env();
        let found = std::thread::scope(|scope| {
            let models = Models { stores: &self.stores, cache: &cache, offline: self.offline };
            scope.spawn(move || self.runtime.block_on(models.locate(&self.spec))).join()
        });
        let files = found.map_err(|_| "looking for the model failed")??;
        Ok((files, cache))
    }

    /// Plain data, valid even if somebody died over it.
    fn read(&self) -> MutexGuard<'_, Option<ModelData>> {
        self.read.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the model, and notes what it is: a note that was wrong is right the next time.
    fn data(&self, files: &ModelFiles, fingerprints: &Fingerprints) -> Result<ModelData, ModelError> {
        let data = files.read(&self.spec)?;
        if !data.untrained {
            fingerprints.remember(files, &data.options, &data.fingerprint);
        }
        Ok(data)
    }
}
