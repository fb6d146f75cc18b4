//! Single values of JSON as they are written.

use std::borrow::Cow;

/// A JSON value that is no array and no object.
#[derive(Debug, PartialEq)]
pub(super) enum Scalar<'j> {
    Null,
    /// The contents of a string.
    String(Cow<'j, str>),
    /// A number or boolean, as it is written.
    Other(&'j str),
}

impl<'j> Scalar<'j> {
    /// The value that valid JSON, without blanks around it, is; `None` for an array or an object.
    pub(super) fn of(json: &'j str) -> Option<Self> {
        match json.as_bytes().first()? {
            b'{' | b'[' => None,
            b'n' => Some(Self::Null),
            b'"' => {
                let inner = json.get(1..json.len() - 1)?;
                match inner.as_bytes().contains(&b'\\') {
                    false => Some(Self::String(Cow::Borrowed(inner))),
                    true => serde_json::from_str(json).ok().map(|text| Self::String(Cow::Owned(text))),
                }
            }
            _ => Some(Self::Other(json)),
        }
    }
}
