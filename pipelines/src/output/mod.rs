//! What is in an output, and whether it is what its model makes of its texts.
//!
//! [`inspect`] reads the Parquet files of a folder and the manifest beside them; [`verify`] embeds a sample of the rows
//! again and compares the vectors.

pub mod inspect;
pub mod verify;
