//! Everything that moves rows through ELMo.
pub mod source;
mod store_file;
pub mod stores;
