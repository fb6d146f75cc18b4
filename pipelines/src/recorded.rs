//! The settings that a Parquet file records of a column of vectors: in the metadata of its field, and, as far as all columns
//! share them, in the footer.

use std::collections::{BTreeMap, HashMap};

use arrow::datatypes::Field;

/// The `elmo.*` pairs of a footer or a field.
pub(crate) type Pairs = BTreeMap<String, String>;

/// The state at the beginning of a sentence. A warm state has its digest behind a colon in footers only, because fields are
/// made before the model is opened.
pub(crate) const STATE: &str = "elmo.state";
/// Only columns of vectors have it.
const LAYERS: &str = "elmo.layers";

/// Settings without which vectors are not described. A field without `normalize` or `max_tokens` has their defaults, so that
/// they must not get lost.
const OF_VECTORS: [&str; 5] = ["elmo.fingerprint", LAYERS, "elmo.max_tokens", "elmo.normalize", "elmo.pooling"];

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

/// Whether a footer contradicts none of the settings of a field.
pub(crate) fn is_about(footer: &HashMap<String, String>, field: &Field) -> bool {
    let agrees = |key: &String, own: &String| match footer.get(key) {
        Some(shared) => shared == own || (key == STATE && is_kind_of(own, shared)),
        None => true,
    };
    field.metadata().iter().all(|(key, own)| !key.starts_with("elmo.") || agrees(key, own))
}

/// The metadata of a column that has these fields in two files: what they have in common. Nothing if they differ in more than
/// settings that a file may lack, such as the version of elmo.
pub(crate) fn common_metadata(one: &Field, other: &Field) -> HashMap<String, String> {
    let (one, other) = (one.metadata(), other.metadata());
    let differs = |key: &String| one.get(key) != other.get(key);
    let may_differ = |key: &String| key.starts_with("elmo.") && !OF_VECTORS.contains(&key.as_str());
    if one.keys().chain(other.keys()).any(|key| differs(key) && !may_differ(key)) {
        return HashMap::new();
    }
    let common = one.iter().filter(|(key, _)| !differs(key));
    common.map(|(key, value)| (key.clone(), value.clone())).collect()
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

    fn field(list: &[(&str, &str)]) -> Field {
        Field::new("e", DataType::Int64, true).with_metadata(pairs(list).into_iter().collect())
    }

    fn settings(own: &[(&str, &str)], footer: &[(&str, &str)]) -> Pairs {
        of_column(&field(own), &pairs(footer))
    }

    /// By hand.
    #[test]
    fn a_footer_about_another_column() {
        let about =
            |own: &[(&str, &str)], footer: &[(&str, &str)]| is_about(&pairs(footer).into_iter().collect(), &field(own));
        assert!(about(&[("elmo.layers", "top"), ("x", "1")], &[("elmo.state", "zero"), ("x", "2")]));
        assert!(about(&[(STATE, "warm")], &[(STATE, "warm:1f")]));
        assert!(!about(&[("elmo.layers", "top")], &[("elmo.layers", "average")]));
        assert!(!about(&[(STATE, "zero")], &[(STATE, "warm:1f")]));
    }

    /// By hand.
    #[test]
    fn columns_of_several_files() {
        let common = |one: &[(&str, &str)], other: &[(&str, &str)]| -> Pairs {
            common_metadata(&field(one), &field(other)).into_iter().collect()
        };
        let (top, one, two) = (("elmo.layers", "top"), ("elmo.version", "1"), ("elmo.version", "2"));
        assert_eq!(common(&[top, one], &[top, two]), pairs(&[top]));
        assert_eq!(common(&[top, one], &[top]), pairs(&[top]));
        assert_eq!(common(&[top], &[("elmo.layers", "average")]), Pairs::new());
        assert_eq!(common(&[top], &[top, ("elmo.normalize", "l2")]), Pairs::new());
        assert_eq!(common(&[("x", "1"), ("y", "1")], &[("x", "1"), ("y", "2")]), Pairs::new());
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
