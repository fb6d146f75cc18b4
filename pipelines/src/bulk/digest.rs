//! Digest of the rows that a part was made of, so that a copied or moved input is recognised by its content.
//!
//! Every row is encoded by [`arrow::row`], the text first, then the kept columns. The digest is a chain: `d' = SHA-256(d ||
//! row)`, from 32 zeros on. So it depends on the rows and their order only, not on how they were read, and it continues
//! from a saved value.

use arrow::{
    array::ArrayRef,
    error::ArrowError,
    row::{RowConverter, SortField},
};
use sha2::{Digest, Sha256};

use crate::source::Slice;

/// Names the encoding of rows. A digest with another prefix cannot be compared.
const PREFIX: &str = "rows1:";

/// Digest of consecutive rows.
pub(super) struct RowDigest {
    state: State,
}

enum State {
    /// The types of the columns are not known yet.
    Empty([u8; 32]),
    Rows(RowConverter, [u8; 32]),
    /// Rows of these types cannot be encoded, or the rows before them had no digest.
    Unsupported,
}

impl RowDigest {
    /// Digest of no rows.
    pub(super) fn new() -> Self {
        Self { state: State::Empty([0; 32]) }
    }

    /// Continues from [`value`](Self::value).
    pub(super) fn from_value(value: Option<&str>) -> Self {
        let state = value.and_then(parse).map_or(State::Unsupported, State::Empty);
        Self { state }
    }

    /// Appends rows, all of which have the same columns.
    pub(super) fn update(&mut self, slice: &Slice) -> Result<(), ArrowError> {
        let columns: Vec<ArrayRef> =
            std::iter::once(&slice.text).chain(slice.kept.columns()).map(ArrayRef::clone).collect();
        if let State::Empty(digest) = self.state {
            self.state = State::for_columns(&columns, digest)?;
        }
        if let State::Rows(converter, digest) = &mut self.state {
            for row in &converter.convert_columns(&columns)? {
                *digest = Sha256::new_with_prefix(*digest).chain_update(row.as_ref()).finalize().into();
            }
        }
        Ok(())
    }

    /// The digest as it is recorded; `None` when the rows cannot be encoded.
    pub(super) fn value(&self) -> Option<String> {
        let (State::Empty(digest) | State::Rows(_, digest)) = &self.state else { return None };
        let digits = digest.iter().map(|byte| format!("{byte:02x}"));
        Some(PREFIX.chars().map(String::from).chain(digits).collect())
    }
}

impl State {
    fn for_columns(columns: &[ArrayRef], digest: [u8; 32]) -> Result<Self, ArrowError> {
        let fields: Vec<SortField> = columns.iter().map(|c| SortField::new(c.data_type().clone())).collect();
        match RowConverter::supports_fields(&fields) {
            true => Ok(Self::Rows(RowConverter::new(fields)?, digest)),
            false => Ok(Self::Unsupported),
        }
    }
}

fn parse(value: &str) -> Option<[u8; 32]> {
    let digits = value.strip_prefix(PREFIX).filter(|digits| digits.len() == 64 && digits.is_ascii())?;
    let mut digest = [0; 32];
    for (byte, at) in digest.iter_mut().zip((0..64).step_by(2)) {
        *byte = u8::from_str_radix(&digits[at..at + 2], 16).ok()?;
    }
    Some(digest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Position;
    use arrow::array::{DictionaryArray, Int64Array, RecordBatch, StringArray};
    use std::sync::Arc;

    fn slice(texts: Vec<Option<&str>>, ids: Vec<i64>) -> Slice {
        let kept = RecordBatch::try_from_iter([("id", Arc::new(Int64Array::from(ids)) as ArrayRef)]).unwrap();
        let text = Arc::new(StringArray::from(texts));
        Slice { start: Position::default(), text, kept, malformed: Vec::new() }
    }

    fn digest(slices: &[Slice]) -> String {
        let mut digest = RowDigest::new();
        slices.iter().for_each(|slice| digest.update(slice).unwrap());
        digest.value().unwrap()
    }

    #[test]
    fn a_digest_depends_on_rows_and_their_order_alone() {
        let all = || slice(vec![Some("a"), None, Some(""), Some("b")], vec![1, 2, 3, 4]);
        let expected = digest(&[all()]);
        for cut in 0..4 {
            assert_eq!(digest(&[all().slice(0, cut), all().slice(cut, 4 - cut)]), expected);
            let mut first = RowDigest::new();
            first.update(&all().slice(0, cut)).unwrap();
            let mut rest = RowDigest::from_value(first.value().as_deref());
            rest.update(&all().slice(cut, 4 - cut)).unwrap();
            assert_eq!(rest.value(), Some(expected.clone()));
        }
        for other in [
            slice(vec![Some("a"), Some(""), None, Some("b")], vec![1, 2, 3, 4]),
            slice(vec![Some("a"), None, Some(""), Some("b")], vec![1, 2, 3, 5]),
            slice(vec![Some("a"), None, Some("")], vec![1, 2, 3]),
        ] {
            assert_ne!(digest(&[other]), expected);
        }
        let encoded: DictionaryArray<arrow::datatypes::Int8Type> = vec!["a", "b", "a"].into_iter().collect();
        let plain = slice(vec![Some("a"), Some("b"), Some("a")], vec![1, 2, 3]);
        let encoded = Slice { text: Arc::new(encoded), ..plain.clone() };
        assert_eq!(digest(&[encoded]), digest(&[plain]), "one text in two encodings");
    }

    /// The encoding must not change from one version of Arrow to the next, as digests are recorded. Expected by hand from
    /// the documentation of `arrow::row`: a string is 0x02, then blocks of 8 bytes, zero padded, each followed by 0xff or,
    /// the last, by its length; an `Int64` is 0x01, then the big-endian bytes with the sign bit flipped.
    /// `{ head -c 32 /dev/zero; printf '\2a\0\0\0\0\0\0\0\1\1\200\0\0\0\0\0\0\1'; } | sha256sum`
    #[test]
    fn the_digest_is_the_documented_one() {
        assert_eq!(
            digest(&[slice(vec![Some("a")], vec![1])]),
            "rows1:4c98979341f8f6e6cb97b5e6eed60a258e92d3b56acc086cb87ffdf14583e6c8"
        );
        assert_eq!(RowDigest::from_value(Some("rows2:00")).value(), None);
    }
}
