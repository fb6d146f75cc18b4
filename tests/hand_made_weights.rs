//! Weights built in memory, which no reader has checked.

use elmo::{
    Error, Fingerprint,
    error::ErrorKind,
    model::{BiLm, DeviceName, Precision},
    options::ModelOptions,
    weights::{Tensor, Weights},
};

use crate::reference::seeded::seeded_weights;

/// `F` is 8, and `P` as given: with 8 there is no projection after the char CNN.
fn options(projection_dim: usize) -> ModelOptions {
    let json = format!(
        r#"{{"lstm": {{"use_skip_connections": true, "projection_dim": {projection_dim}, "dim": 9, "n_layers": 1}},
            "char_cnn": {{"activation": "relu", "n_highway": 1, "filters": [[1, 3], [2, 5]],
            "embedding": {{"dim": 16}}, "max_characters_per_token": 10}}}}"#
    );
    ModelOptions::from_json(json.as_bytes(), "by hand").unwrap()
}

fn opened(options: &ModelOptions, weights: &Weights) -> Result<BiLm, Error> {
    Ok(BiLm::new(options, weights, DeviceName::Cpu, Precision::F32)?)
}

#[test]
fn tensors_that_do_not_match_the_options_are_errors_of_the_model() {
    let options = options(6);
    let seeded = seeded_weights(&options, 3, 1.0);
    let tensor = |shape: &[usize], values: usize| Some(Tensor { shape: shape.to_vec(), data: vec![0.5; values] });
    let w_0 = "RNN_1/RNN/MultiRNNCell/Cell0/LSTMCell/W_0"; // [6 + 6, 36]
    for (name, tensor, words) in [
        ("char_embed", tensor(&[261, 16], 0), "shape [261, 16] and 0 values"),
        ("char_embed", tensor(&[16, 261], 16 * 261), "require [261, 16]"),
        ("char_embed", tensor(&[], 1), "require [261, 16]"),
        ("CNN/b_cnn_1", tensor(&[5], 4), "shape [5] and 4 values"),
        ("CNN_proj/W_proj", tensor(&[8, 7], 56), "require [8, 6]"),
        (w_0, tensor(&[12, 36], 12 * 36 - 1), "431 values"),
        (w_0, tensor(&[6, 36], 6 * 36), "require [12, 36]"),
        (w_0, None, "lack"),
    ] {
        let mut weights = seeded.clone();
        weights.remove(name);
        if let Some(tensor) = tensor {
            weights.insert(name.to_owned(), tensor);
        }
        let error = opened(&options, &weights).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Model, "{error}");
        let message = error.to_string();
        assert!(message.contains(&format!("`{name}`")) && message.contains(words), "{message}");
    }
}

/// The fingerprint covers the tensors of the plan only, so no other tensor may change a vector.
#[test]
fn a_projection_that_the_options_do_not_have_is_not_applied() {
    let options = options(8);
    let weights = seeded_weights(&options, 3, 1.0);
    let mut more = weights.clone();
    more.insert("CNN_proj/W_proj".to_owned(), Tensor { shape: vec![8, 8], data: vec![0.25; 64] });
    more.insert("CNN_proj/b_proj".to_owned(), Tensor { shape: vec![8], data: vec![1.0; 8] });
    assert_eq!(Fingerprint::of(&options, &weights), Fingerprint::of(&options, &more));
    let vectors = |weights| opened(&options, weights).unwrap().token_vectors(&["bank", "river"]).unwrap();
    assert_eq!(vectors(&weights), vectors(&more));
}
