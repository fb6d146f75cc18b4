//! Models of an SQL session: described when a query names them, loaded onto devices when the first row is embedded.

use std::{
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
};

use elmo::{Elmo, EmbedderSettings, ModelData, engine::Precision, lm_head::LmHeadFiles};
use elmo_udfs::{Card, ModelError, ModelSource};
use tokio::runtime::{Handle, RuntimeFlavor};

use super::{Models, cache::Cache, files::ModelFiles, fingerprints::Fingerprints, spec::ModelSpec, warn_untrained};
use crate::{error::Result, stores::Stores};

/// A model that is opened when it is needed.
pub(crate) struct LazyModel {
    pub(crate) spec: ModelSpec,
    pub(crate) offline: bool,
    pub(crate) stores: Stores,
    pub(crate) settings: EmbedderSettings,
    /// Runs requests to stores.
    pub(crate) runtime: Handle,
    pub(crate) warn: Warn,
    /// The model if it was read to describe it, for the later call of `open`.
    pub(crate) read: Mutex<Option<ModelData>>,
}

/// When a model is reported to be untrained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Warn {
    /// When this process opens it.
    OnOpen,
    /// When it is described: other processes open it.
    OnDescribe,
    /// Never: other processes open it, and a bulk job reports it after its checks.
    #[cfg(feature = "cluster")]
    Never,
}

impl fmt::Debug for LazyModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LazyModel({})", self.spec)
    }
}

impl ModelSource for LazyModel {
    fn describe(&self) -> Result<Card, ModelError> {
        blocking(|| self.card())
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
        if data.untrained {
            warn_untrained();
        }
        Ok(Elmo::from_data(data, &self.settings)?)
    }
}

/// The digest of an LM head; empty when it cannot be read.
fn head_digest(head: Option<LmHeadFiles>) -> Option<String> {
    head.map(|head| head.digest().unwrap_or_default())
}

/// Runs blocking work on a thread of the runtime, where DataFusion plans queries. `block_in_place` hands the tasks of
/// that thread to others: one of them may be reading the response that the work waits for.
fn blocking<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        _ => work(),
    }
}

impl LazyModel {
    fn card(&self) -> Result<Card, ModelError> {
        let (files, cache) = self.locate()?;
        let fingerprints = Fingerprints::new(&cache);
        if let Some((options, fingerprint)) = fingerprints.known(&files) {
            let (lm_head, location) = (head_digest(files.lm_head()), self.spec.to_string());
            let mix = files.mix(&self.spec, &options)?;
            return Ok(Card { options, fingerprint, untrained: false, lm_head, mix, location });
        }
        let data = self.data(&files, &fingerprints)?;
        if self.warn == Warn::OnDescribe && data.untrained {
            warn_untrained();
        }
        let card = Card {
            options: data.options.clone(),
            fingerprint: data.fingerprint.clone(),
            untrained: data.untrained,
            lm_head: head_digest(data.lm_head.clone()),
            mix: data.mix.clone(),
            location: self.spec.to_string(),
        };
        *self.read() = (self.warn == Warn::OnOpen).then_some(data);
        Ok(card)
    }

    /// The local files, which are fetched if necessary.
    fn locate(&self) -> Result<(ModelFiles, Cache), ModelError> {
        let cache = Cache::from_env();
        let models = Models { stores: &self.stores, cache: &cache, offline: self.offline };
        let found = blocking(|| {
            std::thread::scope(|scope| scope.spawn(|| self.runtime.block_on(models.locate(&self.spec))).join())
        });
        let files = found.map_err(|_| "looking for the model failed")??;
        Ok((files, cache))
    }

    /// A poisoned lock is locked as well: the data is valid at any time.
    fn read(&self) -> MutexGuard<'_, Option<ModelData>> {
        self.read.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the model and records its fingerprint, which replaces a wrong record.
    fn data(&self, files: &ModelFiles, fingerprints: &Fingerprints) -> Result<ModelData, ModelError> {
        let data = files.read(&self.spec)?;
        if !data.untrained {
            fingerprints.remember(files, &data.options, &data.fingerprint);
        }
        Ok(data)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::TcpListener,
        sync::mpsc,
        time::Duration,
    };

    use super::*;

    /// The only thread of a runtime describes a model, which takes a response that the same runtime has to read.
    #[test]
    fn a_thread_of_the_runtime_may_look_for_a_model_on_a_server() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}/model", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let _ = stream.read(&mut [0; 4096]);
                let _ = stream.write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            }
        });
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
            let model = LazyModel {
                spec: ModelSpec::from_address(&address).unwrap(),
                offline: false,
                stores: Stores::with_settings([("allow_http".to_owned(), "true".to_owned())]),
                settings: EmbedderSettings::default(),
                runtime: runtime.handle().clone(),
                warn: Warn::OnOpen,
                read: Mutex::default(),
            };
            let described = runtime.spawn(async move { model.describe().unwrap_err().to_string() });
            tell.send(runtime.block_on(described).unwrap()).unwrap();
        });
        let error = told.recv_timeout(Duration::from_secs(60)).expect("the runtime waits for itself");
        assert!(error.contains("404") || error.contains("no model"), "{error}");
    }
}
