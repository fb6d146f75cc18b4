//! Caches of embedded texts, shared by all queries over one set of models.

mod constants;
mod key;
mod vectors;

use std::sync::Arc;

pub(crate) use self::{
    constants::ConstantCache,
    vectors::{Lookup, Submission, VectorCache},
};

/// The caches of one set of models.
#[derive(Debug, Default)]
pub(crate) struct Caches {
    /// Results for the texts of columns.
    pub(crate) vectors: Arc<VectorCache>,
    /// Results for constant texts.
    pub(crate) constants: ConstantCache,
}
