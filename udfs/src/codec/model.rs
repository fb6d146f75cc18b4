//! Models in serialised plans: their addresses and descriptions, and how the receiving process opens them.

use std::fmt;

use datafusion::common::{Result, internal_datafusion_err, plan_datafusion_err};
use elmo::{ModelOptions, engine::Precision, mix::ScalarMix};
use prost::Message;

use super::{
    frame::read,
    message::{MixNode, ModelNode, NamedMixNode, parse},
};
use crate::models::{Card, ModelError, ModelSource, Models};

/// A model that a serialised plan names.
#[derive(Debug, Clone)]
pub struct SentModel {
    /// The model's name in the query.
    pub name: String,
    /// The model's address: see [`ModelSource::address`].
    pub address: String,
    /// The description of the model when the query was planned.
    pub card: Card,
    /// The precision of the vectors.
    pub precision: Precision,
}

impl SentModel {
    /// Describes a model for workers. Does not open it.
    ///
    /// # Errors
    /// When the model cannot be described, or has no address because this program opened it.
    pub fn of(name: &str, source: &dyn ModelSource) -> Result<Self> {
        let card = source.describe().map_err(|e| plan_datafusion_err!("{e}"))?;
        Self::described(name, source, card)
    }

    fn described(name: &str, source: &dyn ModelSource, card: Card) -> Result<Self> {
        let address = source.address().ok_or_else(|| {
            plan_datafusion_err!("the model {name} was opened by this program, and has no address for workers")
        })?;
        Ok(Self { name: name.to_owned(), address, card, precision: source.precision() })
    }

    /// Opens the model in the process `host`, and compares it with the description.
    ///
    /// # Errors
    /// A message for the user: the model is missing, cannot be opened, has changed, or has another precision.
    pub fn open(&self, host: &dyn ModelHost) -> Result<elmo::Elmo, ModelError> {
        let Self { name, card, precision, .. } = self;
        let here = host.name();
        let elmo = host.open(self).map_err(|e| format!("{here} cannot open the model {name}: {e}"))?;
        if elmo.fingerprint() != &card.fingerprint {
            let (location, found, planned) = (&card.location, elmo.fingerprint(), &card.fingerprint);
            return Err(format!(
                "{here} has another model at {location}: its fingerprint is {found}, and the query was planned with \
                 {planned}"
            )
            .into());
        }
        if elmo.precision() != *precision {
            let found = elmo.precision();
            return Err(format!(
                "{here} computes in {found}, and the query asks for {precision}: start all with the same --precision"
            )
            .into());
        }
        Ok(elmo)
    }

    /// Serialises the model.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        self.to_node(true).encode_to_vec()
    }

    /// Deserialises the result of [`SentModel::to_bytes`].
    ///
    /// # Errors
    /// When the bytes are invalid or of another version.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        Self::from_node(&read(bytes)?)
    }

    pub(super) fn to_node(&self, is_default: bool) -> ModelNode {
        let Self { name, address, card, precision } = self;
        ModelNode {
            name: name.clone(),
            address: address.clone(),
            options: card.options.to_json(),
            fingerprint: card.fingerprint.to_string(),
            untrained: card.untrained,
            lm_head: card.lm_head.clone(),
            is_default,
            location: card.location.clone(),
            precision: precision.to_string(),
            mix: card.mix.as_ref().map(MixNode::from),
        }
    }

    pub(super) fn from_node(node: &ModelNode) -> Result<Self> {
        let options = ModelOptions::from_json(node.options.as_bytes(), &node.address);
        let fingerprint = node.fingerprint.parse().map_err(|e| internal_datafusion_err!("{}: {e}", node.address))?;
        let card = Card {
            options: options.map_err(|e| internal_datafusion_err!("{e}"))?,
            fingerprint,
            untrained: node.untrained,
            lm_head: node.lm_head.clone(),
            mix: node.mix.as_ref().map(ScalarMix::from),
            location: node.location.clone(),
        };
        let precision = parse(&node.precision)?;
        Ok(Self { name: node.name.clone(), address: node.address.clone(), card, precision })
    }
}

/// The models of a function that have been described, because queries named them; with `only`, just that model. The LM
/// head is omitted for functions that do not need it, so that a change of the LM head does not affect them.
pub(super) fn sent_models(models: &Models, only: Option<&str>, needs_lm_head: bool) -> Result<Vec<ModelNode>> {
    let names = models.names().filter(|name| only.is_none_or(|only| only == *name));
    let described = names.filter_map(|name| models.described(name).map(|(source, card)| (name, source, card)));
    let nodes = described.map(|(name, source, card)| {
        let model = SentModel::described(name, source, card.as_ref().clone())?;
        let node = model.to_node(name == models.default_name());
        Ok(ModelNode { lm_head: node.lm_head.filter(|_| needs_lm_head), ..node })
    });
    nodes.collect()
}

/// The scalar mixes that calls of a function may name.
pub(super) fn sent_mixes(models: &Models) -> Vec<NamedMixNode> {
    let named = models.mix_names().filter_map(|name| models.mix(name).map(|mix| (name, mix)));
    named.map(|(name, mix)| NamedMixNode { name: name.to_owned(), mix: Some(mix.into()) }).collect()
}

/// A process that receives plans, and opens the models that they name.
pub trait ModelHost: fmt::Debug + Send + Sync {
    /// Opens a model. Called before the first row is embedded, and again only after an error.
    ///
    /// # Errors
    /// A message for the user: the model is missing, cannot be opened, or has changed.
    fn open(&self, model: &SentModel) -> Result<elmo::Elmo, ModelError>;

    /// The name of the process in error messages, such as `the worker at 10.0.0.7:50051`.
    fn name(&self) -> String;
}

/// The host of a process that sends plans or passes them on, and opens no models.
#[derive(Debug)]
pub struct NoModels(
    /// The name of the process in error messages.
    pub &'static str,
);

impl ModelHost for NoModels {
    fn open(&self, model: &SentModel) -> Result<elmo::Elmo, ModelError> {
        Err(format!("{} opens no models, and was asked for {}", self.0, model.name).into())
    }

    fn name(&self) -> String {
        self.0.to_owned()
    }
}
