//! Numbers in JSON that are read back bit for bit: as text, which the standard library parses exactly.

use serde::{Deserialize, Deserializer, Serializer, de::Error};

pub(in crate::train) fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&value.to_string())
}

pub(in crate::train) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
}
