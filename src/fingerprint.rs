//! skeleton
use std::fmt;
/// identity of a model
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Fingerprint(String);
impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
