//! What each exact saving of the engine is worth on this machine: one batch, with it and without it.
//!
//! One thread, one batch of real sentences, the same numbers every time; only the way to them differs.
//!
//! Two savings of the engine cannot be told apart from it, as there is no other way to compute in it, and none will be
//! built only to be slower: the input halves of the LSTMs, which are one product before the time loop instead of one in
//! every step, and the two directions, whose steps are one product of both.

use std::{fmt, time::Instant};

use elmo::{
    ModelData,
    model::{BiLm, DeviceError, DeviceName, StartState},
    spec::{SentenceMode, TokenizerKind},
    text::tokenize,
};
use serde::Serialize;

use crate::{
    error::{Error, Result},
    report::table,
};

/// Tokens of the batch.
const TOKENS: usize = 2048;
/// Rows of the batch.
const ROWS: usize = 64;

/// How many times faster a batch is with a saving than without it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Savings {
    /// Seconds of the batch with everything.
    pub seconds: f64,
    /// The token layer for each distinct word once, against for every token.
    pub distinct_words: f64,
    /// Token vectors from the cache, against computed for the distinct words of the batch.
    pub word_cache: f64,
    /// Sentences side by side, one after the other in rows of one length, against one at a time.
    pub batch: f64,
    /// The same against a row for each sentence, shorter ones leaving as they end.
    pub chained_rows: f64,
    /// A row for each sentence, shorter ones leaving as they end, against all staying as long as the longest.
    pub finished_rows: f64,
    /// Our own passes over the gates, against libtorch's operations.
    pub fused_gates: f64,
}

impl fmt::Display for Savings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let times = |factor: f64| format!("{factor:.2} times as fast");
        f.write_str(&table(&[
            ("one batch, one thread", format!("{:.2} s for {TOKENS} tokens", self.seconds)),
            ("distinct words once", times(self.distinct_words)),
            ("words from the cache", times(self.word_cache)),
            ("sentences in batches", times(self.batch)),
            ("several in a row", times(self.chained_rows)),
            ("finished rows leave", times(self.finished_rows)),
            ("fused gates", times(self.fused_gates)),
        ]))
    }
}

/// Measures on the CPU.
///
/// # Errors
/// [`Error::Elmo`] when libtorch fails.
pub(super) fn measure(data: &ModelData, texts: &[String]) -> Result<Savings> {
    let failed = |error: DeviceError| Error::from(elmo::Error::from(error));
    let batch = Sentences::of(texts);
    let model = BiLm::new(&data.options, &data.weights, DeviceName::Cpu, Default::default()).map_err(failed)?;
    let factors = batch.compare(&model).map_err(failed)?;
    drop(model);
    let torch = BiLm::with_torch_operations(&data.options, &data.weights, DeviceName::Cpu, Default::default());
    let torch = torch.map_err(failed)?;
    let torch = batch.on(&torch).and_then(|run| run.time_rows(&batch.ids, batch.chained())).map_err(failed)?;
    Ok(Savings { fused_gates: torch / factors.seconds, ..factors })
}

/// The sentences of a batch, as words and as indices into the distinct ones.
struct Sentences {
    words: Vec<String>,
    distinct: Vec<String>,
    ids: Vec<Vec<i64>>,
}

impl Sentences {
    fn of(texts: &[String]) -> Self {
        let (mut words, mut lengths) = (Vec::new(), Vec::new());
        for text in texts.iter().cycle().take(TOKENS) {
            for sentence in tokenize(text, TokenizerKind::Moses, SentenceMode::Split) {
                if words.len() < TOKENS {
                    lengths.push(sentence.len());
                    words.extend(sentence.iter().map(|token| token.read(text).to_owned()));
                }
            }
        }
        let mut distinct = words.clone();
        distinct.sort_unstable();
        distinct.dedup();
        let mut all = words.iter().map(|word| distinct.binary_search(word).unwrap_or_default() as i64);
        let ids = lengths.into_iter().map(|n| all.by_ref().take(n).collect()).collect();
        Self { words, distinct, ids }
    }

    fn on<'b>(&'b self, model: &'b BiLm) -> std::result::Result<Run<'b>, DeviceError> {
        let table = model.token_vectors(&borrowed(&self.distinct))?;
        let start = model.after_boundaries(&model.zero_state()?)?;
        Ok(Run { model, batch: self, table, start })
    }

    /// The longest next into the shortest row: rows of nearly one length.
    fn chained(&self) -> Vec<Vec<usize>> {
        let mut order: Vec<usize> = (0..self.ids.len()).collect();
        order.sort_by_key(|&i| std::cmp::Reverse(self.ids[i].len()));
        let mut rows = vec![(0, Vec::new()); ROWS.min(self.ids.len()).max(1)];
        for i in order {
            if let Some((length, row)) = rows.iter_mut().min_by_key(|(length, _)| *length) {
                *length += self.ids[i].len();
                row.push(i);
            }
        }
        rows.into_iter().map(|(_, row)| row).filter(|row| !row.is_empty()).collect()
    }

    /// Every sentence as long as the longest: what padding computes.
    fn padded(&self) -> Vec<Vec<i64>> {
        let longest = self.ids.iter().map(Vec::len).max().unwrap_or(0);
        let fill = |ids: &Vec<i64>| ids.iter().copied().chain(std::iter::repeat(0)).take(longest).collect();
        self.ids.iter().map(fill).collect()
    }

    fn compare(&self, model: &BiLm) -> std::result::Result<Savings, DeviceError> {
        let run = self.on(model)?;
        let layers = run.time_rows(&self.ids, self.chained())?;
        let distinct = run.time_words(&self.distinct)?;
        let every = run.time_words(&self.words)?;
        let own_rows: Vec<Vec<usize>> = (0..self.ids.len()).map(|i| vec![i]).collect();
        let apart = run.time_rows(&self.ids, own_rows.clone())?;
        let padded = run.time_rows(&self.padded(), own_rows)?;
        let alone = run.time_alone()?;
        Ok(Savings {
            seconds: layers,
            distinct_words: (layers + every) / (layers + distinct),
            word_cache: (layers + distinct) / layers,
            batch: alone / layers,
            chained_rows: apart / layers,
            finished_rows: padded / apart,
            fused_gates: 1.0,
        })
    }
}

fn borrowed(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

/// A batch on a model.
struct Run<'b> {
    model: &'b BiLm,
    batch: &'b Sentences,
    table: Vec<f32>,
    start: StartState,
}

impl Run<'_> {
    fn time_words(&self, words: &[String]) -> std::result::Result<f64, DeviceError> {
        shortest(|| self.model.token_vectors(&borrowed(words)).map(drop))
    }

    fn time_rows(&self, ids: &[Vec<i64>], rows: Vec<Vec<usize>>) -> std::result::Result<f64, DeviceError> {
        shortest(|| self.model.run_in_rows(&self.table, ids, rows.clone(), &self.start).map(drop))
    }

    fn time_alone(&self) -> std::result::Result<f64, DeviceError> {
        shortest(|| {
            for sentence in &self.batch.ids {
                let alone = std::slice::from_ref(sentence);
                self.model.run_in_rows(&self.table, alone, vec![vec![0]], &self.start)?;
            }
            Ok(())
        })
    }
}

/// Seconds of the faster of two runs: what disturbs a run only makes it longer.
fn shortest(mut run: impl FnMut() -> std::result::Result<(), DeviceError>) -> std::result::Result<f64, DeviceError> {
    let mut shortest = f64::INFINITY;
    for _ in 0..2 {
        let started = Instant::now();
        run()?;
        shortest = shortest.min(started.elapsed().as_secs_f64());
    }
    Ok(shortest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sentence_is_in_one_row() {
        let batch = Sentences::of(&["It rained. We stayed in, and read.".to_owned(), "Nobody came.".to_owned()]);
        assert_eq!(batch.ids.iter().map(Vec::len).sum::<usize>(), batch.words.len());
        let mut all = batch.chained().concat();
        all.sort_unstable();
        assert_eq!(all, (0..batch.ids.len()).collect::<Vec<_>>());
        let words: Vec<&str> = batch.ids[0].iter().map(|&id| batch.distinct[id as usize].as_str()).collect();
        assert_eq!(words, ["It", "rained", "."]);
        // By hand: "We stayed in, and read." has seven tokens.
        assert!(batch.padded().iter().all(|ids| ids.len() == 7), "{:?}", batch.padded());
    }

    #[test]
    fn factors_are_numbers() {
        let savings = measure(&ModelData::tiny(), &["It rained. We stayed in.".to_owned()]).unwrap();
        let all = [
            savings.seconds,
            savings.distinct_words,
            savings.batch,
            savings.chained_rows,
            savings.finished_rows,
            savings.fused_gates,
        ];
        assert!(all.iter().all(|factor| factor.is_finite() && *factor > 0.0), "{savings:?}");
    }
}
