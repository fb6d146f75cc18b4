//! The settings that a Parquet file records of a column of vectors: in the metadata of its field, and, as far as all columns
//! share them, in the footer.

use std::collections::BTreeMap;

use arrow::datatypes::Field;

/// The `elmo.*` pairs of a footer or a field.
pub(crate) type Pairs = BTreeMap<String, String>;

/// The state at the beginning of a sentence. A warm state has its digest behind a colon in footers only, because fields are
/// made before the model is opened.
pub(crate) const STATE: &str = "elmo.state";
/// Only columns of vectors have it.
const LAYERS: &str = "elmo.layers";

/// Whether a column holds vectors of a model.
pub(crate) fn holds_vectors(field: &Field) -> bool {
    field.metadata().contains_key(LAYERS)
}

/// The settings of a column of vectors. Those of its field take precedence over those of the footer.
pub(crate) fn of_column<'p>(field: &Field, footer: impl IntoIterator<Item = (&'p String, &'p String)>) -> Pairs {
    let copied = |(key, value): (&String, &String)| (key.clone(), value.clone());
    let mut settings: Pairs = footer.into_iter().filter(|(key, _)| key.starts_with("elmo.")).map(copied).collect();
    for (key, value) in field.metadata().iter().filter(|(key, _)| key.starts_with("elmo.")) {
        let has_digest = key == STATE && settings.get(key).is_some_and(|state| is_kind_of(value, state));
        if !has_digest {
            settings.insert(key.clone(), value.clone());
        }
    }
    settings
}

/// Whether `kind` is a state without what follows its colon, such as `warm` of `warm:DIGEST`.
pub(crate) fn is_kind_of(kind: &str, state: &str) -> bool {
    state.split(':').next() == Some(kind)
}

#[cfg(test)]
mod tests {
    use arrow::datatypes::DataType;

    use super::*;

    fn pairs(list: &[(&str, &str)]) -> Pairs {
        list.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn settings(field: &[(&str, &str)], footer: &[(&str, &str)]) -> Pairs {
        let field = Field::new("e", DataType::Int64, true).with_metadata(pairs(field).into_iter().collect());
        of_column(&field, &pairs(footer))
    }

    /// By hand.
    #[test]
    fn the_field_takes_precedence() {
        let own = settings(
            &[("elmo.layers", "top"), ("ARROW:extension:name", "x")],
            &[("elmo.layers", "average"), ("elmo.tokenizer", "words"), ("other", "y")],
        );
        assert_eq!(own, pairs(&[("elmo.layers", "top"), ("elmo.tokenizer", "words")]));
    }

    /// By hand.
    #[test]
    fn the_digest_of_a_warm_state_is_kept() {
        let state = |field: &str, footer: &str| settings(&[(STATE, field)], &[(STATE, footer)])[STATE].clone();
        assert_eq!(state("warm", "warm:1f"), "warm:1f");
        assert_eq!(state("warm:2a", "warm:1f"), "warm:2a");
        assert_eq!(state("zero", "warm:1f"), "zero");
    }
}
