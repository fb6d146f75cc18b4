//! Where a model comes from: its description, which planning needs, and how it is opened.

use std::fmt;

use elmo::{Elmo, Fingerprint, ModelOptions, engine::Precision, mix::ScalarMix};

/// Why a model cannot be described or opened. The message is shown to the user.
pub type ModelError = Box<dyn std::error::Error + Send + Sync>;

/// A model that a query needs at run time is missing, cannot be opened, or has changed. Wrapped in
/// [`datafusion::error::DataFusionError::External`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFailed(
    /// A message for the user.
    pub String,
);

impl fmt::Display for ModelFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ModelFailed {}

/// The description of a model: what planning needs to know, and what `elmo_models()` shows.
#[derive(Debug, Clone)]
pub struct Card {
    /// The model's options: its dimensions and layers.
    pub options: ModelOptions,
    /// The digest of the model's options and weights.
    pub fingerprint: Fingerprint,
    /// Whether the weights are random numbers.
    pub untrained: bool,
    /// The digest of the LM head, the vocabulary and softmax beside the weights: [`Elmo::lm_head_digest`]. `None` without
    /// an LM head. Empty when its files exist but cannot be read, which is an error only for calls that need it.
    pub lm_head: Option<String>,
    /// The scalar mix in the model's folder, if there is one.
    pub mix: Option<ScalarMix>,
    /// Where the model comes from: a directory, a URL without secrets, or `built in`.
    pub location: String,
}

impl From<&Elmo> for Card {
    fn from(elmo: &Elmo) -> Self {
        Self {
            options: elmo.options().clone(),
            fingerprint: elmo.fingerprint().clone(),
            untrained: elmo.is_untrained(),
            lm_head: elmo.lm_head_digest().unwrap_or_else(|_| Some(String::new())),
            mix: elmo.mix().cloned(),
            location: elmo.name().to_owned(),
        }
    }
}

/// A model that is opened on demand.
pub trait ModelSource: fmt::Debug + Send + Sync {
    /// Describes the model without touching a device. Called once, when the first query that names the model is
    /// planned.
    ///
    /// # Errors
    /// A message for the user.
    fn describe(&self) -> Result<Card, ModelError>;

    /// The address by which other processes find the model: a URL, or a path that they share. `None` if there is none.
    fn address(&self) -> Option<String> {
        None
    }

    /// The precision of the vectors. A process with another precision refuses to run the plan.
    fn precision(&self) -> Precision {
        Precision::F32
    }

    /// The process that opens the model, if it is not the one that plans the query.
    fn process(&self) -> Option<String> {
        None
    }

    /// Loads the model onto its devices. Called before the first row is embedded, and again only after an error.
    ///
    /// # Errors
    /// A message for the user.
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
