//! The models that SQL may name. A model is described when a query that names it is planned, and loaded onto its
//! devices when the first row is embedded: EXPLAIN and PREPARE touch no device.

mod source;

use std::{
    collections::BTreeMap,
    hash::{Hash, Hasher},
    sync::{Arc, Mutex},
};

use datafusion::{common::plan_datafusion_err, error::DataFusionError};
use elmo::{
    ColumnEmbedder, ColumnLayout, Elmo, EmbedSpec,
    lm_head::{SOFTMAX, VOCAB},
    mix::ScalarMix,
    spec::Layers,
};

pub use self::source::{Card, ModelError, ModelFailed, ModelSource};
use crate::{cache::Caches, sync::lock};

/// A set of models by name, one of which is the default, and of scalar mixes by name. Cheap to clone: clones share the
/// open models and the cache.
#[derive(Debug, Clone)]
pub struct Models {
    inner: Arc<Inner>,
    mixes: Arc<BTreeMap<String, ScalarMix>>,
}

#[derive(Debug)]
struct Inner {
    default: String,
    by_name: BTreeMap<String, Entry>,
    caches: Caches,
}

#[derive(Debug)]
struct Entry {
    source: Arc<dyn ModelSource>,
    card: Mutex<Option<Arc<Card>>>,
    elmo: Mutex<Option<Elmo>>,
    /// Embedders by settings. A query uses the same few settings for every batch, and checking them against the model
    /// once is enough.
    embedders: Mutex<Vec<(EmbedSpec, ColumnEmbedder)>>,
}

impl From<Elmo> for Models {
    /// One model, under its own name.
    fn from(elmo: Elmo) -> Self {
        let name = elmo.name().to_owned();
        Self::new(name.clone(), [(name, elmo)])
    }
}

impl Models {
    /// A set of open models. `default` names the model of calls without the option `model`; planning such a call fails
    /// if the set has no model of that name.
    #[must_use]
    pub fn new(default: impl Into<String>, models: impl IntoIterator<Item = (String, Elmo)>) -> Self {
        Self::lazy(default, models.into_iter().map(|(name, elmo)| (name, Arc::new(elmo) as Arc<dyn ModelSource>)))
    }

    /// A set of models, each of which is opened when the first row is embedded with it.
    #[must_use]
    pub fn lazy(default: impl Into<String>, models: impl IntoIterator<Item = (String, Arc<dyn ModelSource>)>) -> Self {
        let entry =
            |source| Entry { source, card: Mutex::default(), elmo: Mutex::default(), embedders: Mutex::default() };
        let by_name = models.into_iter().map(|(name, source)| (name, entry(source))).collect();
        let inner = Inner { default: default.into(), by_name, caches: Caches::default() };
        Self { inner: Arc::new(inner), mixes: Arc::default() }
    }

    /// The same models, and a scalar mix that SQL can name: `elmo_embed(text, layers => 'NAME')`.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use elmo::{Elmo, mix::ScalarMix};
    /// use elmo_udfs::Models;
    ///
    /// let mix = ScalarMix::from_json(br#"{"scalars": [-0.5, 1.2, 0.3], "gamma": 0.9}"#, "sentiment.json")?;
    /// let models = Models::from(Elmo::tiny()?).with_mix("sentiment", mix)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// A message for the user: the name is empty, a built-in value of `layers`, or the name of another mix. Whether the
    /// mix has as many scalars as a model has layers is checked when a query is planned.
    pub fn with_mix(mut self, name: impl Into<String>, mix: ScalarMix) -> Result<Self, String> {
        let name = name.into();
        Layers::check_mix_name(&name).map_err(|reason| reason.to_string())?;
        if self.mixes.contains_key(&name) {
            return Err(format!("two scalar mixes are named {name}"));
        }
        Arc::make_mut(&mut self.mixes).insert(name, mix);
        Ok(self)
    }

    /// The scalar mix of this name.
    pub(crate) fn mix(&self, name: &str) -> Option<&ScalarMix> {
        self.mixes.get(name)
    }

    /// The scalar mixes and their names, sorted by name.
    pub(crate) fn mixes(&self) -> impl Iterator<Item = (&str, &ScalarMix)> {
        self.mixes.iter().map(|(name, mix)| (name.as_str(), mix))
    }

    /// The names of the scalar mixes, sorted.
    pub(crate) fn mix_names(&self) -> impl Iterator<Item = &str> {
        self.mixes.keys().map(String::as_str)
    }

    /// The scalar mix in the model's own folder, for a call of `function`.
    ///
    /// # Errors
    /// As [`Models::card_for`], and a planning error when the model has no mix.
    pub(crate) fn mix_of_model(&self, function: &str, model: Option<&str>) -> Result<ScalarMix, DataFusionError> {
        let card = self.card_for(function, model)?;
        card.mix.clone().ok_or_else(|| {
            let model = model.unwrap_or_else(|| self.default_name());
            let named: Vec<&str> = self.mix_names().collect();
            let others = match named.as_slice() {
                [] => "there are no other scalar mixes".to_owned(),
                named => format!("other scalar mixes are {}", named.join(", ")),
            };
            plan_datafusion_err!(
                "{function}: layers: the model {model} has no scalar mix of its own (mix.json in its folder); {others}"
            )
        })
    }

    /// The name of the default model.
    pub fn default_name(&self) -> &str {
        &self.inner.default
    }

    /// The names of all models, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.inner.by_name.keys().map(String::as_str)
    }

    /// The description of a model. Opens nothing.
    ///
    /// # Errors
    /// A message for the user: the set has no such model, or it cannot be described.
    pub fn card(&self, name: Option<&str>) -> Result<Arc<Card>, String> {
        let entry = self.entry(name)?;
        let mut card = lock(&entry.card);
        if let Some(card) = card.as_ref() {
            return Ok(Arc::clone(card));
        }
        let described = Arc::new(entry.source.describe().map_err(|e| e.to_string())?);
        *card = Some(Arc::clone(&described));
        Ok(described)
    }

    /// The description of a model for a call of `function`. Opens nothing.
    ///
    /// # Errors
    /// A planning error when there is no such model. [`ModelFailed`] when the model cannot be described.
    pub(crate) fn card_for(&self, function: &str, name: Option<&str>) -> Result<Arc<Card>, DataFusionError> {
        self.card(name).map_err(|reason| {
            let reason = format!("{function}: {reason}");
            match self.entry(name) {
                Ok(_) => DataFusionError::External(Box::new(ModelFailed(reason))),
                Err(_) => DataFusionError::Plan(reason),
            }
        })
    }

    /// The source and the description of a model that has been described.
    #[cfg(feature = "codec")]
    pub(crate) fn described(&self, name: &str) -> Option<(&dyn ModelSource, Arc<Card>)> {
        let entry = self.inner.by_name.get(name)?;
        lock(&entry.card).clone().map(|card| (entry.source.as_ref(), card))
    }

    /// Whether a model is open. Does not block: a model that is being opened is not open.
    pub fn is_open(&self, name: &str) -> bool {
        self.inner.by_name.get(name).is_some_and(|entry| entry.elmo.try_lock().is_ok_and(|elmo| elmo.is_some()))
    }

    /// The columns that a model gives with these settings. Opens nothing.
    ///
    /// # Errors
    /// As [`Models::card`], and when the model does not support the settings.
    pub(crate) fn layout(&self, name: Option<&str>, spec: &EmbedSpec) -> Result<ColumnLayout, String> {
        let card = self.card(name)?;
        ColumnLayout::new(&card.options, &card.fingerprint, spec).map_err(|e| e.to_string())
    }

    /// The embedder of a model with these settings. Opens the model if necessary.
    ///
    /// # Errors
    /// A message for the user: the set has no such model, the model cannot be opened, or does not support the settings.
    pub(crate) fn embedder(&self, name: Option<&str>, spec: &EmbedSpec) -> Result<ColumnEmbedder, String> {
        let entry = self.entry(name)?;
        let elmo = self.open(name)?;
        let mut embedders = lock(&entry.embedders);
        if let Some((_, embedder)) = embedders.iter().find(|(other, _)| other == spec) {
            return Ok(embedder.clone());
        }
        let embedder = ColumnEmbedder::new(&elmo, spec.clone()).map_err(|e| e.to_string())?;
        embedders.push((spec.clone(), embedder.clone()));
        Ok(embedder)
    }

    /// Opens a model, unless it is open.
    pub(crate) fn open(&self, name: Option<&str>) -> Result<Elmo, String> {
        let entry = self.entry(name)?;
        // Locked while the model is opened: of several queries that need it, one opens it and the others wait.
        let mut elmo = lock(&entry.elmo);
        if let Some(elmo) = elmo.as_ref() {
            return Ok(elmo.clone());
        }
        let opened = entry.source.open().map_err(|e| e.to_string())?;
        let card = self.card(name)?;
        if &card.fingerprint != opened.fingerprint() {
            let (card, now) = (&card.fingerprint, opened.fingerprint());
            return Err(format!("the model changed since it was described: fingerprint {card} then, {now} now"));
        }
        *elmo = Some(opened.clone());
        Ok(opened)
    }

    /// Opens a model and checks that its LM head is the one that was described: the fingerprint does not cover it.
    pub(crate) fn open_with_head(&self, name: Option<&str>) -> Result<Elmo, String> {
        let (elmo, card, entry) = (self.open(name)?, self.card(name)?, self.entry(name)?);
        let digest = elmo.lm_head().map(|head| head.digest().map(str::to_owned));
        if digest.as_ref().is_ok_and(|digest| *digest == card.lm_head) {
            return Ok(elmo);
        }
        // Close the model, so that the next query reads the files again: they may have been repaired by then.
        lock(&entry.embedders).clear();
        *lock(&entry.elmo) = None;
        digest.map_err(|e| e.to_string())?;
        Err(format!(
            "the LM head in {}{} is not the one that the query was planned with: {VOCAB} or {SOFTMAX} differs",
            card.location,
            entry.source.process().map_or_else(String::new, |process| format!(", as read by {process},")),
        ))
    }

    /// The caches of all queries over these models.
    pub(crate) fn caches(&self) -> &Caches {
        &self.inner.caches
    }

    fn entry(&self, name: Option<&str>) -> Result<&Entry, String> {
        let name = name.unwrap_or(&self.inner.default);
        self.inner.by_name.get(name).ok_or_else(|| {
            let names: Vec<&str> = self.names().collect();
            format!("model: no model {name:?}; known models: {}", names.join(", "))
        })
    }
}

/// DataFusion compares functions to evaluate equal calls once. Only clones are equal: comparing descriptions would read
/// the weights.
impl PartialEq for Models {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner) && self.mixes == other.mixes
    }
}

// `Eq` is sound because the numbers of a mix are never NaN.
impl Eq for Models {}

impl Hash for Models {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Arc::as_ptr(&self.inner).hash(state);
    }
}
