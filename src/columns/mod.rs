//! Columns of text in, columns of vectors out: the interface that SQL, bulk jobs and streams share.
//!
//! Rows out are rows in, in order. [`OnError`](crate::spec::OnError) decides whether a row that cannot be embedded is
//! NULL with a reason, left out, or an error. Other rows are not affected.
//!
//! ```text
//! Arrow column --rows--> texts --cutter--> sentences --engine--> vectors --request--> Arrow columns
//!                                 huge texts: sentence by sentence --huge--^
//! ```

mod cutter;
mod embedded;
mod embedder;
mod huge;
mod layout;
mod request;
mod rows;
mod sentences;
mod setup;
#[cfg(test)]
mod tests;
mod vectors;

pub use cutter::count_sentences;
pub use embedded::{ColumnStats, EmbeddedColumns, PendingColumns};
pub use embedder::{ColumnEmbedder, SCHEMA_VERSION};
pub use layout::ColumnLayout;
pub(crate) use rows::{Row, Rows};
pub use sentences::{Tokens, for_each_sentence, for_each_text};
