//! Diagnoses of a machine: [`doctor`] checks the installation, [`bench`](mod@bench) measures speed. Both use the published model
//! [`sizes`].

pub mod bench;
pub mod doctor;
pub mod fastest;
pub mod sizes;
