//! skeleton
use thiserror::Error;
/// error
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OptionsError {}
/// options
#[derive(Debug, Clone, PartialEq)]
pub struct ModelOptions {
    /// lstm
    pub lstm: LstmOptions,
    /// cnn
    pub char_cnn: CharCnnOptions,
}
/// lstm
#[derive(Debug, Clone, PartialEq)]
pub struct LstmOptions {
    /// D
    pub dim: usize,
    /// P
    pub projection_dim: usize,
    /// L
    pub n_layers: usize,
    /// clip
    pub cell_clip: Option<f64>,
    /// clip
    pub proj_clip: Option<f64>,
    /// skip
    pub use_skip_connections: bool,
}
/// cnn
#[derive(Debug, Clone, PartialEq)]
pub struct CharCnnOptions {
    /// act
    pub activation: Activation,
    /// filters
    pub filters: Vec<Filter>,
    /// highway
    pub n_highway: usize,
    /// C
    pub embedding_dim: usize,
    /// chars
    pub n_characters: Option<usize>,
    /// M
    pub max_characters_per_token: usize,
}
/// activation
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// relu
    Relu,
    /// tanh
    Tanh,
}
/// filter
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Filter {
    /// width
    pub width: usize,
    /// n
    pub n: usize,
}
/// spec
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// name
    pub name: String,
    /// shape
    pub shape: Vec<usize>,
}
impl ModelOptions {
    /// parse
    pub fn from_json(_bytes: &[u8], _origin: &str) -> Result<Self, OptionsError> {
        todo!()
    }
    /// json
    pub fn canonical_json(&self) -> String {
        todo!()
    }
    /// json
    pub fn to_json_pretty(&self) -> String {
        todo!()
    }
    /// F
    pub fn n_filters(&self) -> usize {
        self.char_cnn.filters.iter().map(|f| f.n).sum()
    }
    /// 2P
    pub fn width(&self) -> usize {
        2 * self.lstm.projection_dim
    }
    /// L + 1
    pub fn n_layers_out(&self) -> usize {
        self.lstm.n_layers + 1
    }
    /// plan
    pub fn weight_plan(&self) -> Vec<TensorSpec> {
        todo!()
    }
}
