//! Reads JSON lines with a field `text`; prints for each a line of its sentences: `[[start, end, [token, ...]], ...]`.
//!
//! `cargo run --example tokenize [moses|words|whitespace] < TEXTS.jsonl`

use std::io::{BufRead, Write, stdin, stdout};

use elmo::{
    spec::{SentenceMode, TokenizerKind},
    text::{Token, tokenize},
};
use serde_json::{Value, json};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let kind = std::env::args().nth(1).map_or(Ok(TokenizerKind::Moses), |word| word.parse())?;
    let mut out = std::io::BufWriter::new(stdout().lock());
    for line in stdin().lock().lines() {
        let row: Value = serde_json::from_str(&line?)?;
        let text = row["text"].as_str().ok_or("a line without text")?;
        let sentences = tokenize(text, kind, SentenceMode::Split);
        let sentences: Vec<Value> = sentences.iter().map(|sentence| describe(text, sentence)).collect();
        writeln!(out, "{}", Value::from(sentences))?;
    }
    Ok(())
}

fn describe(text: &str, sentence: &[Token]) -> Value {
    let start = sentence.first().map(|token| token.start);
    let end = sentence.last().map(|token| token.end);
    let tokens: Vec<&str> = sentence.iter().map(|token| token.read(text)).collect();
    json!([start, end, tokens])
}
