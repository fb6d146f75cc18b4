//! ELMo: exact, deterministic, batched inference of the character-based biLM.
pub mod chars;
pub mod columns;
pub mod embedder;
pub mod error;
pub mod fingerprint;
pub mod mix;
pub mod model;
pub mod model_dir;
pub mod options;
pub mod spec;
pub mod weights;

pub use columns::{ColumnEmbedder, EmbeddedColumns, PendingColumns};
pub use embedder::{Embedder, EmbedderSettings};
pub use error::{Error, ErrorKind, Result};
pub use model_dir::ModelData;
pub use spec::EmbedSpec;

/// A model on its devices.
#[derive(Debug, Clone)]
pub struct Elmo {}
impl Elmo {
    /// Opens a model directory with default settings.
    pub fn open(_dir: impl AsRef<std::path::Path>) -> Result<Self> {
        todo!()
    }
    /// Puts a model on devices.
    pub fn from_data(_data: ModelData, _settings: EmbedderSettings) -> Result<Self> {
        todo!()
    }
    /// The model.
    pub fn data(&self) -> &ModelData {
        todo!()
    }
    /// The handle.
    pub fn embedder(&self) -> &Embedder {
        todo!()
    }
}
