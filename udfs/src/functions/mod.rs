//! One SQL function, one file.

pub mod elmo_embed;

/// Names of the functions that take the options of [`elmo_embed`].
pub const NAMES: [&str; 1] = [elmo_embed::NAME];
