//! What an options file of bilm-tf says about training, beside the sizes of the model.

use std::collections::BTreeMap;

use elmo::{
    ModelOptions,
    train::{Classes, Recipe},
};
use serde::{Deserialize, de::IgnoredAny};

use crate::error::{Error, Result};

/// An options file.
#[derive(Debug, Clone, PartialEq)]
pub struct OptionsFile {
    /// Sizes and switches of the model.
    pub model: ModelOptions,
    /// What it says about training.
    training: Training,
    /// Name, for errors.
    origin: String,
    /// Keys that seem to be misspelt.
    remarks: Vec<String>,
}

/// Edits after which a key is taken for another one that is misspelt.
const MISSPELT: usize = 2;
/// The keys of [`Training`].
const KEYS: [&str; 9] = [
    "dropout",
    "learning_rate",
    "all_clip_norm_val",
    "batch_size",
    "unroll_steps",
    "n_epochs",
    "n_tokens_vocab",
    "n_negative_samples_batch",
    "sample_softmax",
];

/// The keys of bilm-tf's `bilm/training.py`. Others are ignored, among them `n_train_tokens`: tokens are counted.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
struct Training {
    dropout: Option<f64>,
    learning_rate: Option<f64>,
    all_clip_norm_val: Option<f64>,
    batch_size: Option<usize>,
    unroll_steps: Option<usize>,
    n_epochs: Option<f64>,
    n_tokens_vocab: Option<usize>,
    n_negative_samples_batch: Option<usize>,
    sample_softmax: Option<bool>,
}

impl Training {
    /// Refuses values that no run can have, also where an option replaces them.
    fn check(&self, origin: &str) -> Result<()> {
        let wrong = |key: &str, value: f64, should: &str| {
            Err(Error::usage(
                format!("{origin}: `{key}` is {value}; it must be {should}"),
                "correct the value, or remove the key: then the option of this command, or its default, is used",
            ))
        };
        for (key, value) in [("batch_size", self.batch_size), ("unroll_steps", self.unroll_steps)] {
            if value == Some(0) {
                return wrong(key, 0.0, "at least 1");
            }
        }
        let positive = [
            ("n_epochs", self.n_epochs),
            ("learning_rate", self.learning_rate),
            ("all_clip_norm_val", self.all_clip_norm_val),
        ];
        for (key, value) in positive {
            if let Some(value) = value.filter(|value| *value <= 0.0) {
                return wrong(key, value, "above 0");
            }
        }
        match self.dropout.filter(|dropout| !(0.0..1.0).contains(dropout)) {
            Some(dropout) => wrong("dropout", dropout, "from 0 to below 1"),
            None => Ok(()),
        }
    }
}

/// The key for which another one was probably meant. Files have many keys that are ignored, so only similar ones are worth a
/// remark.
fn meant(key: &str) -> Option<&'static str> {
    let is_near = |known: &&str| strsim::damerau_levenshtein(key, known) <= MISSPELT;
    if KEYS.contains(&key) { None } else { KEYS.into_iter().find(is_near) }
}

impl OptionsFile {
    /// Parses a file; `origin` names it in errors.
    ///
    /// # Errors
    /// [`elmo::Error::Options`] when the model cannot be run, [`Error::Usage`] when a value for training has a wrong type or is out of
    /// range.
    pub fn parse(bytes: &[u8], origin: &str) -> Result<Self> {
        let model = ModelOptions::from_json(bytes, origin).map_err(elmo::Error::from)?;
        let training: Training = elmo::json::from_slice(bytes).map_err(|reason| {
            Error::usage(format!("{origin}: {reason}"), "the keys for training are numbers, as bilm-tf has them")
        })?;
        training.check(origin)?;
        let keys: BTreeMap<String, IgnoredAny> = elmo::json::from_slice(bytes).unwrap_or_default();
        let remark = |key: &String| {
            meant(key).map(|known| format!("{origin}: the key `{key}` is ignored; did you mean `{known}`?"))
        };
        let remarks = keys.keys().filter_map(remark).collect();
        Ok(Self { model, training, origin: origin.to_owned(), remarks })
    }

    /// Remarks on the file that do not keep a run from beginning.
    pub fn remarks(&self) -> &[String] {
        &self.remarks
    }

    /// Name of the file, for errors.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// Sets what the file says about the step.
    pub fn apply(&self, recipe: &mut Recipe) {
        let file = &self.training;
        recipe.dropout = file.dropout.unwrap_or(recipe.dropout);
        recipe.learning_rate = file.learning_rate.unwrap_or(recipe.learning_rate);
        recipe.clip_norm = file.all_clip_norm_val.or(recipe.clip_norm);
        recipe.rows = file.batch_size.unwrap_or(recipe.rows);
        recipe.positions = file.unroll_steps.unwrap_or(recipe.positions);
        recipe.classes = match (file.sample_softmax, file.n_negative_samples_batch) {
            (Some(false), _) => Classes::Full,
            // As bilm-tf: also for a small vocabulary.
            (Some(true), samples) => match (samples, recipe.classes) {
                (Some(samples), _) | (None, Classes::Auto(samples)) => Classes::Sampled(samples),
                (None, given) => given,
            },
            (None, Some(samples)) => Classes::Auto(samples),
            (None, None) => recipe.classes,
        };
    }

    /// Passes over the corpus, if the file names them.
    pub fn epochs(&self) -> Option<f64> {
        self.training.n_epochs
    }

    /// Words that the vocabulary should have, and the name of this file.
    pub fn words(&self) -> Option<(usize, String)> {
        self.training.n_tokens_vocab.map(|words| (words, self.origin.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The file of a model that can be run, with one more key.
    fn with(key: &str, value: impl Into<serde_json::Value>) -> Result<OptionsFile> {
        let mut document: serde_json::Value =
            serde_json::from_str(&elmo::ModelData::tiny().options.canonical_json()).unwrap();
        document[key] = value.into();
        OptionsFile::parse(document.to_string().as_bytes(), "o.json")
    }

    #[test]
    fn values_out_of_range_are_refused_with_key_and_file() {
        for (key, value, expected) in [
            ("n_epochs", -1.0, "o.json: `n_epochs` is -1; it must be above 0"),
            ("n_epochs", 0.0, "o.json: `n_epochs` is 0; it must be above 0"),
            ("learning_rate", 0.0, "o.json: `learning_rate` is 0; it must be above 0"),
            ("all_clip_norm_val", -0.5, "o.json: `all_clip_norm_val` is -0.5; it must be above 0"),
            ("dropout", 1.0, "o.json: `dropout` is 1; it must be from 0 to below 1"),
        ] {
            assert_eq!(with(key, value).unwrap_err().to_string(), expected);
        }
        for key in ["batch_size", "unroll_steps"] {
            assert_eq!(with(key, 0).unwrap_err().to_string(), format!("o.json: `{key}` is 0; it must be at least 1"));
            assert!(with(key, 1).is_ok() && with(key, -1).is_err());
        }
    }

    /// Others are those of the published `options.json` and of the recipe, and one that nothing is similar to.
    #[test]
    fn a_misspelt_key_is_worth_a_remark() {
        let remarks = |key: &str| with(key, 1).unwrap().remarks().to_vec();
        assert_eq!(remarks("dropuot"), ["o.json: the key `dropuot` is ignored; did you mean `dropout`?"]);
        assert_eq!(remarks("n_epoch"), ["o.json: the key `n_epoch` is ignored; did you mean `n_epochs`?"]);
        for key in ["n_train_tokens", "bidirectional", "batch_size", "remark"] {
            assert!(remarks(key).is_empty(), "{key}");
        }
    }

    /// [`KEYS`] are those that are read: any of them is refused with a value of a wrong type.
    #[test]
    fn all_keys_are_known() {
        for key in KEYS {
            assert!(with(key, "much").is_err(), "{key}");
        }
    }

    #[test]
    fn keys_for_training_are_those_of_bilm_tf() {
        let mut document: serde_json::Value =
            serde_json::from_str(&elmo::ModelData::tiny().options.canonical_json()).unwrap();
        let plain = OptionsFile::parse(document.to_string().as_bytes(), "plain").unwrap();
        let mut recipe = Recipe::bilm();
        plain.apply(&mut recipe);
        assert_eq!((recipe, plain.epochs()), (Recipe::bilm(), None));
        for (key, value) in [("dropout", 0.0), ("learning_rate", 0.1), ("all_clip_norm_val", 5.0), ("n_epochs", 3.0)] {
            document[key] = value.into();
        }
        document["batch_size"] = 7.into();
        document["unroll_steps"] = 9.into();
        document["n_tokens_vocab"] = 50.into();
        document["n_negative_samples_batch"] = 11.into();
        let file = OptionsFile::parse(document.to_string().as_bytes(), "file").unwrap();
        let mut recipe = Recipe::bilm();
        file.apply(&mut recipe);
        let expected = Recipe {
            dropout: 0.0,
            learning_rate: 0.1,
            clip_norm: Some(5.0),
            rows: 7,
            positions: 9,
            classes: Classes::Auto(11),
            ..Recipe::bilm()
        };
        assert_eq!((recipe, file.epochs()), (expected, Some(3.0)));
        assert_eq!(file.words(), Some((50, "file".to_owned())));
        document["sample_softmax"] = false.into();
        let mut recipe = Recipe::bilm();
        OptionsFile::parse(document.to_string().as_bytes(), "file").unwrap().apply(&mut recipe);
        assert_eq!(recipe.classes, Classes::Full);
        document["sample_softmax"] = true.into();
        let mut recipe = Recipe::bilm();
        OptionsFile::parse(document.to_string().as_bytes(), "file").unwrap().apply(&mut recipe);
        assert_eq!(recipe.classes, Classes::Sampled(11));
        document["dropout"] = "much".into();
        assert!(OptionsFile::parse(document.to_string().as_bytes(), "file").is_err());
    }
}
