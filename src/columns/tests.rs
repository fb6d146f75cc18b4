//! Columns on devices that fail.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, StringArray};

use crate::{
    columns::ColumnEmbedder,
    elmo::Elmo,
    error::Error,
    spec::{EmbedSpec, OnError, OnLong, SentenceMode, StateMode, TokenizerKind},
    states::faults::fail_after,
};

fn rows_of(embedder: &ColumnEmbedder, texts: &[&str]) -> (Vec<Vec<f32>>, Vec<Option<String>>) {
    let column: ArrayRef = Arc::new(StringArray::from(texts.to_vec()));
    let done = embedder.embed(&column).unwrap();
    let vectors = done.vectors.as_fixed_size_list();
    let vector = |i: usize| match vectors.is_valid(i) {
        true => vectors.value(i).as_primitive::<arrow::datatypes::Float32Type>().values().to_vec(),
        false => Vec::new(),
    };
    let errors = done.error.iter().map(|reason| reason.map(str::to_owned)).collect();
    ((0..texts.len()).map(vector).collect(), errors)
}

#[test]
fn a_batch_without_room_is_split_and_a_row_without_room_is_that_rows_error() {
    let elmo = Elmo::tiny().unwrap();
    let spec = EmbedSpec { on_error: OnError::Null, tokenizer: TokenizerKind::Whitespace, ..EmbedSpec::default() };
    let embedder = ColumnEmbedder::new(&elmo, spec).unwrap();
    let mut texts: Vec<String> = (0..40).map(|i| format!("row {i} {}", "of words ".repeat(i % 7))).collect();
    texts[11] += " room-for-3";
    texts[30] += " room-for-0";
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let (together, errors) = rows_of(&embedder, &texts);
    assert!(elmo.embedder().metrics().oom_splits > 0);
    for (i, text) in texts.iter().enumerate() {
        if i == 30 {
            assert!(errors[i].as_deref().is_some_and(|reason| reason.contains("max-tokens")), "{errors:?}");
            assert!(together[i].is_empty());
            continue;
        }
        assert_eq!(errors[i], None);
        assert!(rows_of(&embedder, &[text]).0[0] == together[i], "row {i} has other bits alone");
    }
}

/// In each case one column of three batches fails, is submitted again, and has the vectors that it has without a
/// failure.
#[test]
fn a_column_that_fails_leaves_the_carried_state_as_it_was() {
    let elmo = Elmo::tiny().unwrap();
    let spec = EmbedSpec {
        state: StateMode::Carry,
        batch_rows: Some(2),
        sentences: SentenceMode::Off,
        on_long: OnLong::Truncate,
        ..EmbedSpec::default()
    };
    let columns: [&[&str]; 2] = [&["a b", "c", "d e f", "g", "h i", "j"], &["k l", "m", "n", "o p", "q", "r s t"]];
    let healthy = ColumnEmbedder::new(&elmo, spec.clone()).unwrap();
    let expected: Vec<_> = columns.iter().map(|texts| rows_of(&healthy, texts).0).collect();
    for failing in 0..3 {
        let embedder = ColumnEmbedder::new(&elmo, spec.clone()).unwrap();
        assert!(rows_of(&embedder, columns[0]).0 == expected[0]);
        fail_after(failing);
        let column: ArrayRef = Arc::new(StringArray::from(columns[1].to_vec()));
        assert!(matches!(embedder.embed(&column), Err(Error::Device(_))), "batch {failing}");
        assert!(rows_of(&embedder, columns[1]).0 == expected[1], "batch {failing}");
    }
}
