//! Texts in, vectors out: the library without SQL, files or a command line.
//!
//!     cargo run --example embed_texts
//!
//! Embeds the same word in two senses. Its vectors differ, because each depends on the sentence. The built-in model is
//! small; use `Elmo::open("DIR")` for a model of your own.

use std::sync::Arc;

use arrow::{
    array::{Array, ArrayRef, AsArray, StringArray},
    datatypes::Float32Type,
};
use elmo::{
    ColumnEmbedder, Elmo, EmbedSpec,
    spec::{Level, Pooling},
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let elmo = Elmo::books()?;
    let texts: ArrayRef = Arc::new(StringArray::from(vec![
        Some("She sat on the bank and watched the river."),
        Some("He took the money to the bank."),
        None,
    ]));

    // One vector per text.
    let spec = EmbedSpec { pooling: Pooling::Max, ..elmo.spec() };
    let embedded = ColumnEmbedder::new(&elmo, spec)?.embed(&texts)?;
    println!("{} vectors of type {}", embedded.vectors.len(), embedded.vectors.data_type());
    assert!(embedded.vectors.is_null(2), "NULL in, NULL out");

    // One vector per token, with its offsets in the text.
    let spec = EmbedSpec { level: Level::Token, ..elmo.spec() };
    let tokens = ColumnEmbedder::new(&elmo, spec)?.embed(&texts)?.vectors;
    let banks: Vec<Vec<f32>> = (0..2).filter_map(|row| word(&tokens, row, "bank")).collect();
    let dot: f32 = banks[0].iter().zip(&banks[1]).map(|(a, b)| a * b).sum();
    let norm = |v: &[f32]| v.iter().map(|x| x * x).sum::<f32>().sqrt();
    println!("cosine of bank and bank: {:.3}", dot / norm(&banks[0]) / norm(&banks[1]));
    Ok(())
}

/// The vector of the first token `wanted` of a row.
fn word(tokens: &ArrayRef, row: usize, wanted: &str) -> Option<Vec<f32>> {
    let row = tokens.as_list::<i32>().value(row);
    let row = row.as_struct();
    let words = row.column_by_name("token")?.as_string::<i32>().clone();
    let place = words.iter().position(|word| word == Some(wanted))?;
    let vector = row.column_by_name("embedding")?.as_fixed_size_list().value(place);
    Some(vector.as_primitive::<Float32Type>().values().to_vec())
}
