//! What a machine can do: [`doctor`] checks an installation, [`bench`] measures speed, [`sizes`] has the published model
//! sizes that both use.

pub mod bench;
pub mod doctor;
pub mod sizes;
