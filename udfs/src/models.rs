//! The models that SQL may name, each on its devices.

use std::{
    collections::BTreeMap,
    hash::{Hash, Hasher},
    sync::{Arc, Mutex, PoisonError},
};

use elmo::{ColumnEmbedder, Elmo, EmbedSpec};

/// Models by name; one of them is meant when a query names none. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Models {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    default: String,
    by_name: BTreeMap<String, Elmo>,
    /// A query asks for the same few settings with every batch; checking them against the model once is enough.
    embedders: Mutex<Vec<(String, EmbedSpec, ColumnEmbedder)>>,
}

impl From<Elmo> for Models {
    /// One model, under its own name.
    fn from(elmo: Elmo) -> Self {
        let name = elmo.name().to_owned();
        Self::new(name.clone(), [(name, elmo)])
    }
}

impl Models {
    /// Several models; `default` is the name of the one meant when a query names none. Whether there is such a one is
    /// seen when a query is planned.
    #[must_use]
    pub fn new(default: impl Into<String>, models: impl IntoIterator<Item = (String, Elmo)>) -> Self {
        let by_name = models.into_iter().collect();
        Self { inner: Arc::new(Inner { default: default.into(), by_name, embedders: Mutex::default() }) }
    }

    /// An embedder for these settings, made once.
    ///
    /// # Errors
    /// A sentence for the user: no such model, or settings that the model cannot do.
    pub(crate) fn embedder(&self, model: Option<&str>, spec: &EmbedSpec) -> Result<ColumnEmbedder, String> {
        let name = model.unwrap_or(&self.inner.default);
        let elmo = self.inner.by_name.get(name).ok_or_else(|| self.no_such(name))?;
        let mut made = self.inner.embedders.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, _, embedder)) = made.iter().find(|(n, s, _)| n == name && s == spec) {
            return Ok(embedder.clone());
        }
        let embedder = ColumnEmbedder::new(elmo, spec.clone()).map_err(|e| e.to_string())?;
        made.push((name.to_owned(), spec.clone(), embedder.clone()));
        Ok(embedder)
    }

    fn no_such(&self, name: &str) -> String {
        let names: Vec<&str> = self.inner.by_name.keys().map(String::as_str).collect();
        format!("model: no model {name:?}; there are {}", names.join(", "))
    }

    /// What makes two sets of models the same: DataFusion compares functions, to compute equal calls once.
    fn identity(&self) -> impl Iterator<Item = (&str, &str)> {
        let models = self.inner.by_name.iter();
        std::iter::once(("", self.inner.default.as_str()))
            .chain(models.map(|(name, elmo)| (name.as_str(), elmo.fingerprint().as_str())))
    }
}

impl PartialEq for Models {
    fn eq(&self, other: &Self) -> bool {
        self.identity().eq(other.identity())
    }
}

impl Eq for Models {}

impl Hash for Models {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.identity().for_each(|pair| pair.hash(state));
    }
}
