//! The protobuf messages. Enums are sent as strings, as the command line and SQL spell them.

use std::{fmt::Display, str::FromStr};

use datafusion::common::{DataFusionError, Result, plan_datafusion_err};
use datafusion_proto::protobuf::{PhysicalExprNode, Schema};
use elmo::{EmbedSpec, mix::ScalarMix, spec::Layers};
use prost::Message;

use super::frame::read;

/// The operator that embeds, without its input.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct EmbedNode {
    #[prost(string, tag = "1")]
    pub(super) version: String,
    /// The columns that the operator adds. Together with `version`, the part of the message that other versions can
    /// read.
    #[prost(message, optional, tag = "2")]
    pub(super) fields: Option<Schema>,
    #[prost(bool, tag = "3")]
    pub(super) stops_early: bool,
    #[prost(message, repeated, tag = "4")]
    pub(super) calls: Vec<CallNode>,
    #[prost(message, repeated, tag = "5")]
    pub(super) models: Vec<ModelNode>,
}

/// An embedding call.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct CallNode {
    #[prost(string, tag = "1")]
    pub(super) function: String,
    #[prost(string, tag = "2")]
    pub(super) kind: String,
    #[prost(string, optional, tag = "3")]
    pub(super) model: Option<String>,
    #[prost(message, optional, tag = "4")]
    pub(super) spec: Option<SpecNode>,
    #[prost(string, tag = "5")]
    pub(super) display: String,
    #[prost(message, optional, tag = "6")]
    pub(super) text: Option<PhysicalExprNode>,
    /// Indices into [`EmbedNode::models`].
    #[prost(uint32, repeated, tag = "7")]
    pub(super) models: Vec<u32>,
}

/// A function of this crate.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct FunctionNode {
    #[prost(string, tag = "1")]
    pub(super) version: String,
    #[prost(string, tag = "2")]
    pub(super) name: String,
    #[prost(bool, tag = "3")]
    pub(super) volatile: bool,
    #[prost(message, repeated, tag = "4")]
    pub(super) models: Vec<ModelNode>,
    /// The scalar mixes that the option `layers` may name.
    #[prost(message, repeated, tag = "5")]
    pub(super) mixes: Vec<NamedMixNode>,
}

/// A model: its address, and its description when the query was planned.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ModelNode {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) address: String,
    #[prost(string, tag = "3")]
    pub(super) options: String,
    #[prost(string, tag = "4")]
    pub(super) fingerprint: String,
    #[prost(bool, tag = "5")]
    pub(super) untrained: bool,
    #[prost(bool, tag = "6")]
    pub(super) is_default: bool,
    /// The address without secrets.
    #[prost(string, tag = "7")]
    pub(super) location: String,
    /// The precision of the vectors.
    #[prost(string, tag = "8")]
    pub(super) precision: String,
    /// The digest of the LM head, for calls that need it. Tag 9 was used by an earlier version.
    #[prost(string, optional, tag = "10")]
    pub(super) lm_head: Option<String>,
    /// The scalar mix in the model's folder.
    #[prost(message, optional, tag = "11")]
    pub(super) mix: Option<MixNode>,
}

/// An [`EmbedSpec`].
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct SpecNode {
    #[prost(string, tag = "1")]
    pub(super) level: String,
    /// A name or a number, or `mix` if the field `mix` is set.
    #[prost(string, tag = "2")]
    pub(super) layers: String,
    #[prost(message, optional, tag = "3")]
    pub(super) mix: Option<MixNode>,
    #[prost(string, tag = "4")]
    pub(super) pooling: String,
    #[prost(string, tag = "5")]
    pub(super) tokenizer: String,
    #[prost(string, tag = "6")]
    pub(super) sentences: String,
    #[prost(bool, tag = "7")]
    pub(super) boundaries: bool,
    #[prost(string, tag = "8")]
    pub(super) normalize: String,
    #[prost(string, tag = "9")]
    pub(super) state: String,
    /// Set if the state is `carry`.
    #[prost(uint64, optional, tag = "10")]
    pub(super) batch_rows: Option<u64>,
    #[prost(string, tag = "11")]
    pub(super) on_long: String,
    #[prost(uint64, tag = "12")]
    pub(super) max_tokens: u64,
    #[prost(string, tag = "13")]
    pub(super) on_error: String,
    #[prost(string, tag = "14")]
    pub(super) float: String,
    #[prost(string, tag = "15")]
    pub(super) list_type: String,
}

/// A [`ScalarMix`].
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct MixNode {
    #[prost(float, repeated, tag = "1")]
    pub(super) scalars: Vec<f32>,
    #[prost(float, tag = "2")]
    pub(super) gamma: f32,
    #[prost(bool, tag = "3")]
    pub(super) layer_norm: bool,
}

/// A scalar mix with the name by which SQL knows it.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct NamedMixNode {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(message, optional, tag = "2")]
    pub(super) mix: Option<MixNode>,
}

impl From<&ScalarMix> for MixNode {
    fn from(mix: &ScalarMix) -> Self {
        Self { scalars: mix.scalars.clone(), gamma: mix.gamma, layer_norm: mix.layer_norm }
    }
}

impl From<&MixNode> for ScalarMix {
    fn from(node: &MixNode) -> Self {
        Self { scalars: node.scalars.clone(), gamma: node.gamma, layer_norm: node.layer_norm }
    }
}

impl From<&EmbedSpec> for SpecNode {
    fn from(spec: &EmbedSpec) -> Self {
        let mix = match &spec.layers {
            Layers::Mix(mix) => Some(mix.into()),
            _ => None,
        };
        Self {
            level: spec.level.to_string(),
            layers: if mix.is_some() { "mix".to_owned() } else { spec.layers.to_string() },
            mix,
            pooling: spec.pooling.to_string(),
            tokenizer: spec.tokenizer.to_string(),
            sentences: spec.sentences.to_string(),
            boundaries: spec.boundaries,
            normalize: spec.normalize.to_string(),
            state: spec.state.to_string(),
            batch_rows: spec.batch_rows.map(|rows| rows as u64),
            on_long: spec.on_long.to_string(),
            max_tokens: spec.max_tokens as u64,
            on_error: spec.on_error.to_string(),
            float: spec.float.to_string(),
            list_type: spec.list_type.to_string(),
        }
    }
}

impl TryFrom<&SpecNode> for EmbedSpec {
    type Error = DataFusionError;

    fn try_from(node: &SpecNode) -> Result<Self> {
        let layers = match &node.mix {
            Some(mix) => Layers::Mix(mix.into()),
            None => parse(&node.layers)?,
        };
        Ok(Self {
            level: parse(&node.level)?,
            layers,
            pooling: parse(&node.pooling)?,
            tokenizer: parse(&node.tokenizer)?,
            sentences: parse(&node.sentences)?,
            boundaries: node.boundaries,
            normalize: parse(&node.normalize)?,
            state: parse(&node.state)?,
            batch_rows: node.batch_rows.map(|rows| rows as usize),
            on_long: parse(&node.on_long)?,
            max_tokens: node.max_tokens as usize,
            on_error: parse(&node.on_error)?,
            float: parse(&node.float)?,
            list_type: parse(&node.list_type)?,
        })
    }
}

/// Parses a value that is sent as a string.
pub(super) fn parse<T: FromStr<Err: Display>>(value: &str) -> Result<T> {
    value.parse().map_err(|e| plan_datafusion_err!("a plan of elmo cannot be deserialised: {e}"))
}

/// Serialises settings.
#[must_use]
pub fn spec_to_bytes(spec: &EmbedSpec) -> Vec<u8> {
    SpecNode::from(spec).encode_to_vec()
}

/// Deserialises the result of [`spec_to_bytes`].
///
/// # Errors
/// When the bytes are invalid or of another version.
pub fn spec_from_bytes(bytes: &[u8]) -> Result<EmbedSpec> {
    (&read::<SpecNode>(bytes)?).try_into()
}
