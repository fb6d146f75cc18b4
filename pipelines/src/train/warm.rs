//! The start state `warm` of a trained model, computed from its own text.

use std::sync::Arc;

use elmo::{Elmo, EmbedderSettings, ModelData, engine::DeviceChoice, train::Sentence};

use super::corpus::{Corpus, Passes, Sentences, StreamPosition};
use crate::error::Result;

/// Sentences that are read to compute the state.
const SENTENCES: usize = 6;
/// Their tokens, where there are such sentences: a shorter one may be a heading, and a longer one a text that was not split
/// into sentences.
const TOKENS: std::ops::RangeInclusive<usize> = 5..=40;
/// Sentences among which they are looked for.
const AMONG: usize = 10_000;

/// The first sentences of usual length, in the order in which the run reads them; without any, the first ones, of which the
/// first 40 tokens are read. Never empty, because a corpus has sentences. Must be called within the runtime.
///
/// # Errors
/// Those of the corpus.
pub(super) fn sentences(corpus: &Arc<Corpus>) -> Result<Vec<Vec<String>>> {
    let mut read = Sentences::start(corpus, 0, StreamPosition::default(), Passes::One)?;
    let (mut usual, mut others) = (Vec::new(), Vec::new());
    for _ in 0..AMONG {
        let Some(sentence) = read.next()?.filter(|_| usual.len() < SENTENCES) else { break };
        let found = if TOKENS.contains(&sentence.len()) { &mut usual } else { &mut others };
        if found.len() < SENTENCES {
            found.push(beginning(&sentence));
        }
    }
    Ok(if usual.is_empty() { others } else { usual })
}

fn beginning(sentence: &Sentence) -> Vec<String> {
    sentence.tokens().take(*TOKENS.end()).map(str::to_owned).collect()
}

/// The state of a model after reading these sentences, in float32: on the CPU, because the products of a GPU have the number
/// format of the run.
///
/// # Errors
/// Those of the CPU.
pub(super) fn state(model: &ModelData, text: &[Vec<String>]) -> Result<Vec<f32>> {
    // One thread computes it, and there are no vectors to cache.
    let settings = EmbedderSettings {
        devices: vec![DeviceChoice::Cpu],
        threads: Some(1),
        cache_bytes: 0,
        ..EmbedderSettings::default()
    };
    Ok(Elmo::from_data(model.clone(), &settings)?.state_after(text)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::{
        Order,
        corpus::{Reading, Shards},
        words::Words,
    };
    use elmo::spec::{SentenceMode, TokenizerKind};

    /// The text of a corpus with these lines, in the order of the file.
    async fn text_of(lines: &[String]) -> Vec<Vec<String>> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.txt"), lines.join("\n")).unwrap();
        let reading =
            Reading { tokenizer: TokenizerKind::Whitespace, sentences: SentenceMode::Off, block_sentences: 100 };
        let words = Arc::new(Words::of_list(["<S>", "</S>", "<UNK>", "w1"].map(str::to_owned).to_vec()));
        let inputs = [folder.path().display().to_string()];
        let shards = Shards {
            inputs: &inputs,
            run: None,
            column: "text",
            reading,
            order: Order::Bilm,
            seed: 0,
            skip_bad_rows: false,
        };
        let stores = crate::stores::Stores::with_settings([]);
        let corpus = Arc::new(Corpus::open(&stores, shards, &words).await.unwrap());
        tokio::task::spawn_blocking(move || sentences(&corpus).unwrap()).await.unwrap()
    }

    fn line(tokens: usize) -> String {
        (0..tokens).map(|n| format!("w{n}")).collect::<Vec<_>>().join(" ")
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn every_corpus_has_a_text() {
        let lengths = |text: Vec<Vec<String>>| text.iter().map(Vec::len).collect::<Vec<_>>();
        // Sentences of usual length are preferred, also to earlier ones; their number is limited.
        let usual: Vec<String> = [3, 50, 6, 2, 40, 41, 5, 7, 8, 9, 10].map(line).to_vec();
        assert_eq!(lengths(text_of(&usual).await), [6, 40, 5, 7, 8, 9]);
        // Documents as lines: their beginnings.
        let documents = text_of(&[300, 41, 1000].map(line)).await;
        assert_eq!(documents, vec![documents[0].clone(); 3]);
        assert_eq!(documents[0].join(" "), line(40));
        // One word on each line.
        assert_eq!(text_of(&vec!["w1".to_owned(); 9]).await, vec![vec!["w1".to_owned()]; 6]);
        assert_eq!(text_of(&["w1".to_owned()]).await, [["w1"]]);
    }
}
