//! The models that SQL may name. A model is described when a query that names it is planned, and put on its devices when
//! the first row is embedded: EXPLAIN and PREPARE touch no device.

use std::{
    collections::BTreeMap,
    fmt,
    hash::{Hash, Hasher},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use elmo::{
    ColumnEmbedder, ColumnLayout, Elmo, EmbedSpec, Fingerprint, ModelOptions,
    embedder::Precision,
    lm_head::{SOFTMAX, VOCAB},
};

use crate::plan::memo::Memo;

/// Why a model cannot be described or opened, in words for the user.
pub type ModelError = Box<dyn std::error::Error + Send + Sync>;

/// A model that a query needs at run time, and that is not there, cannot be opened, or is another one: in
/// [`datafusion::error::DataFusionError::External`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFailed(
    /// A sentence for the user.
    pub String,
);

impl fmt::Display for ModelFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ModelFailed {}

/// What planning needs to know of a model, and `elmo_models()` shows.
#[derive(Debug, Clone)]
pub struct Card {
    /// Shape of the model.
    pub options: ModelOptions,
    /// Its identity.
    pub fingerprint: Fingerprint,
    /// The weights are random numbers.
    pub untrained: bool,
    /// It is a language model, whose vocabulary and softmax lie beside its weights: [`Elmo::lm_head_digest`]. Empty when
    /// they are there and cannot be read, which is an error where they are needed.
    pub lm_head: Option<String>,
    /// Where it comes from: a directory, a URL, or `built in`.
    pub location: String,
}

impl From<&Elmo> for Card {
    fn from(elmo: &Elmo) -> Self {
        Self {
            options: elmo.options().clone(),
            fingerprint: elmo.fingerprint().clone(),
            untrained: elmo.is_untrained(),
            lm_head: elmo.lm_head_digest().unwrap_or_else(|_| Some(String::new())),
            location: elmo.name().to_owned(),
        }
    }
}

/// A model that is opened when it is needed.
pub trait ModelSource: fmt::Debug + Send + Sync {
    /// Describes the model; touches no device. Asked once, when the first query names the model.
    ///
    /// # Errors
    /// A sentence for the user.
    fn describe(&self) -> Result<Card, ModelError>;

    /// What names the model to other processes, if anything does: a URL, or a path that they have too.
    fn address(&self) -> Option<String> {
        None
    }

    /// The precision that vectors are to have; another process refuses to give others.
    fn precision(&self) -> Precision {
        Precision::F32
    }

    /// Who opens the model, if that is another process than the one that plans.
    fn place(&self) -> Option<String> {
        None
    }

    /// Puts the model on its devices. Asked when the first row is to be embedded, and again only after an error.
    ///
    /// # Errors
    /// A sentence for the user.
    fn open(&self) -> Result<Elmo, ModelError>;
}

impl ModelSource for Elmo {
    fn describe(&self) -> Result<Card, ModelError> {
        Ok(self.into())
    }

    fn open(&self) -> Result<Elmo, ModelError> {
        Ok(self.clone())
    }

    fn precision(&self) -> Precision {
        Self::precision(self)
    }
}

/// Models by name; one of them is meant when a query names none. Cheap to clone; clones share what they opened and the
/// vectors that they remember.
#[derive(Debug, Clone)]
pub struct Models {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    default: String,
    by_name: BTreeMap<String, Entry>,
    memo: Arc<Memo>,
}

#[derive(Debug)]
struct Entry {
    source: Arc<dyn ModelSource>,
    card: Mutex<Option<Arc<Card>>>,
    elmo: Mutex<Option<Elmo>>,
    /// A query asks for the same few settings with every batch; checking them against the model once is enough.
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
    /// Several models that are open; `default` is the name of the one meant when a query names none. Whether there is
    /// such a one is seen when a query is planned.
    #[must_use]
    pub fn new(default: impl Into<String>, models: impl IntoIterator<Item = (String, Elmo)>) -> Self {
        Self::lazy(default, models.into_iter().map(|(name, elmo)| (name, Arc::new(elmo) as Arc<dyn ModelSource>)))
    }

    /// Several models that are opened when the first row is embedded with them.
    #[must_use]
    pub fn lazy(default: impl Into<String>, models: impl IntoIterator<Item = (String, Arc<dyn ModelSource>)>) -> Self {
        let entry =
            |source| Entry { source, card: Mutex::default(), elmo: Mutex::default(), embedders: Mutex::default() };
        let by_name = models.into_iter().map(|(name, source)| (name, entry(source))).collect();
        Self { inner: Arc::new(Inner { default: default.into(), by_name, memo: Arc::default() }) }
    }

    /// The name of the model that is meant when a query names none.
    pub fn default_name(&self) -> &str {
        &self.inner.default
    }

    /// The names of all models, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.inner.by_name.keys().map(String::as_str)
    }

    /// Whether there is a model of this name.
    pub(crate) fn has(&self, name: Option<&str>) -> bool {
        self.entry(name).is_ok()
    }

    /// What is known of a model without opening it.
    ///
    /// # Errors
    /// A sentence for the user: no such model, or it cannot be described.
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

    /// Where a model that a query has named before comes from, and what is known of it.
    #[cfg(feature = "codec")]
    pub(crate) fn known(&self, name: &str) -> Option<(&dyn ModelSource, Arc<Card>)> {
        let entry = self.inner.by_name.get(name)?;
        lock(&entry.card).clone().map(|card| (entry.source.as_ref(), card))
    }

    /// Whether a model is on its devices by now.
    pub fn is_open(&self, name: &str) -> bool {
        // While somebody opens it, it is not open, and nobody is to wait here.
        self.inner.by_name.get(name).is_some_and(|entry| entry.elmo.try_lock().is_ok_and(|elmo| elmo.is_some()))
    }

    /// The columns of these settings; opens nothing.
    ///
    /// # Errors
    /// As [`Models::card`], and settings that the model cannot do.
    pub(crate) fn layout(&self, name: Option<&str>, spec: &EmbedSpec) -> Result<ColumnLayout, String> {
        let card = self.card(name)?;
        ColumnLayout::new(&card.options, &card.fingerprint, spec).map_err(|e| e.to_string())
    }

    /// An embedder for these settings, made once; opens the model if need be.
    ///
    /// # Errors
    /// A sentence for the user: no such model, it cannot be opened, or settings that it cannot do.
    pub(crate) fn embedder(&self, name: Option<&str>, spec: &EmbedSpec) -> Result<ColumnEmbedder, String> {
        let entry = self.entry(name)?;
        let elmo = self.open(name)?;
        let mut made = lock(&entry.embedders);
        if let Some((_, embedder)) = made.iter().find(|(there, _)| there == spec) {
            return Ok(embedder.clone());
        }
        let embedder = ColumnEmbedder::new(&elmo, spec.clone()).map_err(|e| e.to_string())?;
        made.push((spec.clone(), embedder.clone()));
        Ok(embedder)
    }

    /// Opens a model, if it is not open yet.
    pub(crate) fn open(&self, name: Option<&str>) -> Result<Elmo, String> {
        let entry = self.entry(name)?;
        // Held while it opens: of two queries that come first, one opens it and the other waits.
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

    /// The same of a model that scores: its LM head is no part of the fingerprint.
    pub(crate) fn open_with_head(&self, name: Option<&str>) -> Result<Elmo, String> {
        let (elmo, card, entry) = (self.open(name)?, self.card(name)?, self.entry(name)?);
        let found = elmo.lm_head().map(|head| head.digest().map(str::to_owned));
        if found.as_ref().is_ok_and(|mark| *mark == card.lm_head) {
            return Ok(elmo);
        }
        // Whoever asks next looks at the files again: they may have been put right by then.
        lock(&entry.embedders).clear();
        *lock(&entry.elmo) = None;
        found.map_err(|e| e.to_string())?;
        Err(format!(
            "{} another LM head at {} than the query was planned with: {VOCAB} or {SOFTMAX} beside the weights differ",
            entry.source.place().map_or_else(|| "there is".to_owned(), |place| format!("{place} has")),
            card.location,
        ))
    }

    /// The vectors that were computed lately.
    pub(crate) fn memo(&self) -> &Arc<Memo> {
        &self.inner.memo
    }

    fn entry(&self, name: Option<&str>) -> Result<&Entry, String> {
        let name = name.unwrap_or(&self.inner.default);
        self.inner.by_name.get(name).ok_or_else(|| {
            let names: Vec<&str> = self.names().collect();
            format!("model: no model {name:?}; there are {}", names.join(", "))
        })
    }
}

/// A poisoned lock means that a thread died while it held plain data that is valid at any time.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// DataFusion compares functions, to compute equal calls once. Clones are the same models; to describe others, only to
/// compare them, would read their weights.
impl PartialEq for Models {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl Eq for Models {}

impl Hash for Models {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Arc::as_ptr(&self.inner).hash(state);
    }
}
