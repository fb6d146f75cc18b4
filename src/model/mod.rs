//! skeleton
use thiserror::Error;
/// error
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeviceError {}
