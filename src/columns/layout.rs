//! The columns of a model with given settings. They follow from its options, before any weights are loaded.

use arrow::datatypes::Field;

use crate::{
    columns::vectors::VectorType,
    engine::Output,
    error::Result,
    fingerprint::Fingerprint,
    options::ModelOptions,
    spec::{EmbedSpec, Layers, Level, SpecError},
};

/// Names, types and metadata of the columns of a model with some settings.
#[derive(Debug, Clone)]
pub struct ColumnLayout {
    pub(super) vector_type: VectorType,
    pub(super) output: Output,
}

impl ColumnLayout {
    /// Checks `spec` against itself and the model; uses no device.
    ///
    /// # Errors
    /// [`Error::Spec`](crate::error::Error::Spec) when settings exclude each other, the model has no such layer, or the
    /// mix is for another number of layers.
    pub fn new(options: &ModelOptions, fingerprint: &Fingerprint, spec: &EmbedSpec) -> Result<Self> {
        spec.check()?;
        let n_layers = options.n_layers_out();
        let output = output_of(&spec.layers, n_layers)?;
        let vector_type = VectorType {
            layer: options.width(),
            stacked: if output == Output::All { n_layers } else { 1 },
            level: spec.level,
            list_type: spec.list_type,
            float: spec.float,
            field_metadata: vec![
                ("elmo.fingerprint".to_owned(), fingerprint.to_string()),
                ("elmo.layers".to_owned(), spec.layers.to_string()),
                ("elmo.pooling".to_owned(), pooling_word(spec)),
            ],
        };
        Ok(Self { vector_type, output })
    }

    /// Values of one vector: `2P`, times the layers with `layers all`.
    pub fn width(&self) -> usize {
        self.vector_type.width()
    }

    /// The vector field (`embedding` or `tokens`), then `truncated` and `error`.
    pub fn fields(&self) -> Vec<Field> {
        self.vector_type.fields()
    }
}

fn pooling_word(spec: &EmbedSpec) -> String {
    match spec.level {
        Level::Sentence => spec.pooling.to_string(),
        Level::Token => "none".to_owned(),
    }
}

fn output_of(layers: &Layers, n_layers: usize) -> Result<Output> {
    let one = |k: usize| Output::Combined(vec![(k, 1.0)]);
    match layers {
        Layers::Average => Ok(Output::Combined((0..n_layers).map(|k| (k, 1.0 / n_layers as f32)).collect())),
        Layers::Top => Ok(one(n_layers - 1)),
        Layers::One(k) if *k < n_layers => Ok(one(*k)),
        Layers::One(k) => Err(SpecError::Conflict(format!(
            "layers: no layer {k}; this model has layers 0 (token) to {}",
            n_layers - 1
        ))
        .into()),
        Layers::All => Ok(Output::All),
        Layers::Mix(mix) if mix.scalars.len() != n_layers => Err(SpecError::Conflict(format!(
            "layers: the mix has {} scalars; this model has {n_layers} layers",
            mix.scalars.len()
        ))
        .into()),
        Layers::Mix(mix) => {
            let factors: Vec<f32> = mix.factors().into_iter().map(|f| f as f32).collect();
            if mix.layer_norm {
                return Ok(Output::Normalized(factors));
            }
            Ok(Output::Combined(factors.into_iter().enumerate().collect()))
        }
    }
}
