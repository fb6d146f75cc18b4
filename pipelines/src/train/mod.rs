//! Trains a biLM: the corpus, the vocabulary. The step of the model itself is in the library's `train` module.
//!
//! ```text
//! vocab/     counts the words of a corpus: `vocab.txt`, counts, statistics
//! ```

pub mod vocab;
