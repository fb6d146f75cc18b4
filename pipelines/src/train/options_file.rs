//! What an options file of bilm-tf says about training, beside the sizes of the model.

use elmo::{
    ModelOptions,
    train::{Classes, Recipe},
};
use serde::Deserialize;

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
}

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

impl OptionsFile {
    /// Parses a file; `origin` names it in errors.
    ///
    /// # Errors
    /// [`elmo::Error::Options`] when the model cannot be run, [`Error::Usage`] when a value for training has a wrong type.
    pub fn parse(bytes: &[u8], origin: &str) -> Result<Self> {
        let model = ModelOptions::from_json(bytes, origin).map_err(elmo::Error::from)?;
        let training = elmo::json::from_slice(bytes).map_err(|reason| {
            Error::usage(format!("{origin}: {reason}"), "the keys for training are numbers, as bilm-tf has them")
        })?;
        Ok(Self { model, training, origin: origin.to_owned() })
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
