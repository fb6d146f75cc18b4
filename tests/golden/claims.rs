//! Properties of the model on which the fast engine relies, shown on the reference.

use elmo::options::{Activation, CharCnnOptions, Filter, LstmOptions, ModelOptions};

use crate::reference::{
    BACKWARD, FORWARD, LstmState, Reference,
    seeded::{seeded_state, seeded_weights},
    vectors,
};

const SENTENCE: [&str; 6] = ["One", "word", "after", "<S>", "another", "."];

fn options() -> ModelOptions {
    ModelOptions {
        text: Default::default(),
        lstm: LstmOptions {
            dim: 10,
            projection_dim: 6,
            n_layers: 3,
            cell_clip: Some(3.0),
            proj_clip: Some(3.0),
            use_skip_connections: true,
        },
        char_cnn: CharCnnOptions {
            activation: Activation::Relu,
            filters: vec![Filter { width: 1, n: 4 }, Filter { width: 2, n: 6 }, Filter { width: 3, n: 5 }],
            n_highway: 1,
            embedding_dim: 4,
            n_characters: None,
            max_characters_per_token: 50,
        },
    }
}

/// State after the token that each direction reads first: forward `<S>`, backward `</S>`.
fn after_first_boundary(reference: &Reference, start: &LstmState) -> LstmState {
    let boundaries = reference.token_vectors::<&str>(&[]);
    let forward = reference.read(FORWARD, &boundaries[..1], start);
    let backward = reference.read(BACKWARD, &boundaries[1..], start);
    LstmState([forward.end, backward.end])
}

/// A sentence of n words needs n steps, not n + 2: from a constant start the state after the first boundary is a
/// constant of the model, and no result was read after the second.
#[test]
fn n_steps_suffice_from_a_constant_start() {
    let options = options();
    let weights = seeded_weights(&options, 1, 1.0);
    let reference = Reference::new(&options, &weights);
    for start in [reference.zero_state(), seeded_state(&options, 1)] {
        let inner = after_first_boundary(&reference, &start);
        let words = &reference.token_vectors(&SENTENCE)[1..=SENTENCE.len()];
        let expected = reference.sentence(&SENTENCE, &start, false).layers;
        let forward = reference.read(FORWARD, words, &inner).outputs;
        let backward = reference.read(BACKWARD, words, &inner).outputs;
        for (k, layer) in expected.iter().enumerate().skip(1) {
            let halves = forward[k - 1].iter().zip(&backward[k - 1]);
            let found: Vec<f64> = halves.flat_map(|(f, b)| [f.as_slice(), b].concat()).collect();
            assert_eq!(&found, layer, "layer {k}, to the bit");
        }
    }
}

/// The token layer sees no neighbours, so it may be cached by word.
#[test]
fn token_layer_is_a_function_of_the_word() {
    let options = options();
    let weights = seeded_weights(&options, 2, 1.0);
    let reference = Reference::new(&options, &weights);
    let together = vectors::token(&reference.layers(&SENTENCE));
    let alone: Vec<f64> = SENTENCE.iter().flat_map(|word| vectors::token(&reference.layers(&[word]))).collect();
    assert_eq!(together, alone);
}

/// A word is its first 48 bytes; what follows has no influence.
#[test]
fn words_that_differ_after_48_bytes_are_equal() {
    let options = options();
    let weights = seeded_weights(&options, 3, 1.0);
    let reference = Reference::new(&options, &weights);
    let word = "a".repeat(47);
    // U+00E9 and U+00E8 begin with the same byte, which is the 48th.
    let cut = |tail: &str| reference.layers(&[format!("{word}{tail}")]);
    assert_eq!(cut("\u{e9}"), cut("\u{e8}xyz"));
    assert_ne!(cut("\u{e9}"), cut("b"));
}

/// A sentence from a carried state is the sentence from that state given: carrying adds nothing else.
/// The end of an empty sentence is the end of `<S> </S>`.
#[test]
fn the_end_of_one_sentence_is_the_start_of_the_next() {
    let options = options();
    let weights = seeded_weights(&options, 4, 1.0);
    let reference = Reference::new(&options, &weights);
    let carried = crate::reference::StartState::Carry;
    let run = reference.run(&[vec![vec!["first"]], vec![vec![]], vec![SENTENCE.to_vec()]], &carried, false);

    let mut state = reference.sentence(&["first"], &reference.zero_state(), false).end;
    let after_first = state.clone();
    state = reference.sentence::<&str>(&[], &state, false).end;
    assert_ne!(state, after_first, "an empty sentence changes the state");
    assert_eq!(run[2][0], reference.sentence(&SENTENCE, &state, false).layers);
}

/// Without a projection the clip of the projection has no effect.
#[test]
fn projection_clip_needs_a_projection() {
    let mut options = options();
    options.lstm.dim = options.lstm.projection_dim;
    options.lstm.proj_clip = Some(0.01);
    let weights = seeded_weights(&options, 5, 1.0);
    let clipped = Reference::new(&options, &weights).layers(&SENTENCE);
    let unclipped = ModelOptions { lstm: LstmOptions { proj_clip: None, ..options.lstm.clone() }, ..options.clone() };
    assert_eq!(clipped, Reference::new(&unclipped, &weights).layers(&SENTENCE));
}

/// AllenNLP adds the forget gate's 1 to the float32 bias, TensorFlow at run time. The rounded bias moves outputs
/// by about 2e-8, far below every tolerance here: an engine may do either.
#[test]
fn where_the_forget_bias_is_added_hardly_matters() {
    let options = options();
    let weights = seeded_weights(&options, 6, 1.0);
    let mut rounded = weights.clone();
    for (name, tensor) in weights.iter().filter(|(name, _)| name.ends_with("LSTMCell/B")) {
        let d = options.lstm.dim;
        let mut tensor = tensor.clone();
        // b + 1 in float32, and 1 off again, which is exact.
        tensor.data[2 * d..3 * d].iter_mut().for_each(|b| *b = (*b + 1.0) - 1.0);
        rounded.insert(name.to_owned(), tensor);
    }
    let exact = vectors::top(&Reference::new(&options, &weights).layers(&SENTENCE));
    let moved = vectors::top(&Reference::new(&options, &rounded).layers(&SENTENCE));
    let gap = exact.iter().zip(&moved).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    println!("forget bias in float32: {gap:.1e}");
    assert!(gap > 0.0 && gap < 1e-7, "{gap:e}");
}

/// The plain average is the scalar mix with equal scalars, whatever they are; a very small scalar leaves a layer out.
#[test]
fn average_and_single_layers_are_mixes() {
    let options = options();
    let weights = seeded_weights(&options, 7, 1.0);
    let layers = Reference::new(&options, &weights).layers(&SENTENCE);
    let near = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-14);
    assert!(near(&vectors::average(&layers), &vectors::mix(&layers, &[0.25; 4], 1.0, false)));
    assert!(near(&layers[2], &vectors::mix(&layers, &[-9e10, -9e10, 0.0, -9e10], 1.0, false)));
}
