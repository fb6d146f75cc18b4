//! ELMo: exact, deterministic, batched inference of the character-based biLM (Peters et al. 2018).
//!
//! ```no_run
//! use std::sync::Arc;
//! use arrow::array::{ArrayRef, StringArray};
//! use elmo::{ColumnEmbedder, Elmo};
//!
//! let elmo = Elmo::open("models/original")?;
//! let columns = ColumnEmbedder::new(&elmo, elmo.spec())?;
//! let texts: ArrayRef = Arc::new(StringArray::from(vec!["The bank was steep.", "The bank was shut."]));
//! let vectors = columns.embed(&texts)?.vectors; // FixedSizeList<Float32, 1024>, two rows
//! # Ok::<(), elmo::Error>(())
//! ```
//!
//! The steps from a text to its vector, and their modules:
//!
//! | step | module |
//! |---|---|
//! | Arrow column to texts, and vectors to Arrow columns | [`columns`] |
//! | text to sentences, tokens with byte offsets, windows | [`text`] |
//! | queue of all callers, device threads, results in order | [`engine`] |
//! | waiting sentences to batches | `planner` |
//! | token to character ids | [`chars`] |
//! | distinct words to token vectors, and a cache of them | [`model`], `word_cache` |
//! | two LSTM stacks | [`model`] |
//! | layers to one vector per token, tokens to one vector per text | [`mix`], `pooling` |
//! | similarity and distance of two vectors | [`measure`] |
//! | one training step, and held-out perplexity | [`train`] |
//!
//! A model on its devices is an [`Elmo`]. Its files are [`options`] and [`weights`]; [`model_dir`] finds and writes
//! them, and its [`fingerprint`] identifies it. With an [`lm_head`] it is a language model, and [`surprisal`] scores
//! texts. What a caller may choose is in [`spec`]. Errors are in [`error`]; those of a single row in [`row_error`].
//!
//! Modules depend on each other in one direction only. This crate does not depend on SQL, Kafka, object stores or
//! Parquet.

mod built_in;
pub mod chars;
pub mod columns;
mod elmo;
pub mod engine;
pub mod error;
mod file_kind;
mod files;
pub mod fingerprint;
pub mod json;
pub mod lm_head;
pub mod measure;
mod messages;
pub mod mix;
pub mod model;
pub mod model_dir;
pub mod options;
mod planner;
mod pooling;
pub mod row_error;
pub mod spec;
mod states;
pub mod surprisal;
pub mod text;
mod tiny;
pub mod train;
pub mod weights;
mod word_cache;

pub use built_in::{BuiltIn, BuiltInFile};
pub use columns::{ColumnEmbedder, ColumnLayout, ColumnStats, EmbeddedColumns, PendingColumns};
pub use elmo::Elmo;
pub use engine::{Embedder, EmbedderMetrics, EmbedderSettings};
pub use error::{Error, ErrorKind, Result};
pub use fingerprint::Fingerprint;
pub use model_dir::ModelData;
pub use options::ModelOptions;
pub use row_error::RowError;
pub use spec::EmbedSpec;
