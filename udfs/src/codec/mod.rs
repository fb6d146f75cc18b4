//! Serialisation of physical plans with this crate's operator and functions, for the workers of a cluster.
//!
//! An operator or a function is sent together with the models that the query named: their addresses, and their
//! descriptions at planning time. The receiving process opens a model when it embeds the first row, and compares it
//! with the description. The fields of results are sent too: DataFusion sends only the type of a function's result.

mod frame;
mod function;
mod message;
mod model;
mod operator;
mod physical;
#[cfg(test)]
mod tests;
mod version;

pub use self::{
    message::{spec_from_bytes, spec_to_bytes},
    model::{ModelHost, NoModels, SentModel},
    physical::ElmoCodec,
    version::{VERSION, other_version},
};
