//! Measures the speed-up of each optimisation of the engine: one batch of sentences on one thread, with it and without
//! it. Every way computes the same numbers.
//!
//! One optimisation is not measured, because the engine cannot compute without it: weights that are packed once.

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

/// The time of a batch without an optimisation, divided by its time with it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Savings {
    /// Seconds of the batch with all optimisations.
    pub seconds: f64,
    /// The token layer computed once per distinct word, relative to once per token.
    pub distinct_words: f64,
    /// Token layers from the word cache, relative to computing those of the distinct words.
    pub word_cache: f64,
    /// The input product of the first LSTM layer once per repeated word, relative to once per token.
    pub input_products: f64,
    /// Sentences in a batch of rows of similar length, relative to one sentence at a time.
    pub batch: f64,
    /// Several sentences per row, relative to one sentence per row without padding.
    pub chained_rows: f64,
    /// One sentence per row without padding, relative to padding all rows to the longest with one word, which shares its input product.
    pub finished_rows: f64,
    /// Our products with the pass over the gates in them, relative to the operations of libtorch; neither shares input products.
    pub fused_gates: f64,
}

impl fmt::Display for Savings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let times = |factor: f64| format!("{factor:.2} times as fast");
        f.write_str(&table(&[
            ("one batch, one thread", format!("{:.2} s for {TOKENS} tokens", self.seconds)),
            ("deduplicated words", times(self.distinct_words)),
            ("word cache", times(self.word_cache)),
            ("input products of repeated words", times(self.input_products)),
            ("batches", times(self.batch)),
            ("several sentences per row", times(self.chained_rows)),
            ("no padding", times(self.finished_rows)),
            ("fused gates", times(self.fused_gates)),
        ]))
    }
}

/// Measures all optimisations on the CPU.
///
/// # Errors
/// [`elmo::Error`] when libtorch fails.
pub(super) fn measure(data: &ModelData, texts: &[String]) -> Result<Savings> {
    let failed = |error: DeviceError| Error::from(elmo::Error::from(error));
    let batch = Sentences::of(texts);
    let model = BiLm::new(&data.options, &data.weights, DeviceName::Cpu, Default::default()).map_err(failed)?;
    let factors = batch.compare(&model).map_err(failed)?;
    drop(model);
    let torch = BiLm::with_torch_operations(&data.options, &data.weights, DeviceName::Cpu, Default::default());
    let torch = torch.map_err(failed)?;
    let torch = batch.on(&torch).and_then(|run| run.time_rows(&batch.ids, batch.chained())).map_err(failed)?;
    Ok(Savings { fused_gates: torch / (factors.seconds * factors.input_products), ..factors })
}

/// The sentences of a batch, as words and as indices of distinct words.
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

    /// Assigns sentences to rows of similar length: the longest sentence left goes to the shortest row.
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

    /// The same sentences, as if no word occurred twice, and the rows of a table that they read then.
    fn unshared(&self, table: &[f32]) -> (Vec<Vec<i64>>, Vec<f32>) {
        let width = table.len() / self.distinct.len().max(1);
        let vector = |&id: &i64| &table[id as usize * width..][..width];
        let every = self.ids.iter().flatten().flat_map(vector).copied().collect();
        let mut next = 0..;
        (self.ids.iter().map(|ids| next.by_ref().take(ids.len()).collect()).collect(), every)
    }

    /// Every sentence padded to the longest.
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
        let (ids, table) = self.unshared(&run.table);
        let unshared = Run { table, ..run }.time_rows(&ids, self.chained())?;
        Ok(Savings {
            seconds: layers,
            distinct_words: (layers + every) / (layers + distinct),
            word_cache: (layers + distinct) / layers,
            input_products: unshared / layers,
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

/// A batch and a model to run it.
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

/// Seconds of the faster of two runs, because disturbances only make a run slower.
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
    fn every_token_gets_a_row_of_its_own() {
        let batch = Sentences { words: Vec::new(), distinct: vec![String::new(); 2], ids: vec![vec![1, 0], vec![1]] };
        let expected = (vec![vec![0, 1], vec![2]], vec![3.0, 4.0, 1.0, 2.0, 3.0, 4.0]);
        assert_eq!(batch.unshared(&[1.0, 2.0, 3.0, 4.0]), expected);
    }

    #[test]
    fn factors_are_numbers() {
        let savings = measure(&ModelData::tiny(), &["It rained. We stayed in.".to_owned()]).unwrap();
        let all = [
            savings.seconds,
            savings.distinct_words,
            savings.input_products,
            savings.batch,
            savings.chained_rows,
            savings.finished_rows,
            savings.fused_gates,
        ];
        assert!(all.iter().all(|factor| factor.is_finite() && *factor > 0.0), "{savings:?}");
    }
}
