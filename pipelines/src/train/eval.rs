//! `elmo eval`: the perplexity of a text under any model with an LM head, measured in two ways.
//!
//! *Carried state*: the text is read window by window, and states are carried from window to window, as a training run
//! measures it ([`HeldOut`]). *Sentence by sentence*: every sentence begins in the start state of the model, as the SQL
//! functions score it ([`Scorer`]).

use std::{
    fmt,
    sync::{Arc, atomic::AtomicBool},
};

use arrow::array::{Array, ArrayRef};
use elmo::{
    ColumnEmbedder, Elmo, EmbedSpec, EmbedderSettings, ModelData,
    lm_head::{LmHeadData, LmHeadError},
    model::{DeviceName, resolve_devices},
    spec::OnError,
    surprisal::{Scorer, TextScore},
    train::{Evaluated, Evaluation, Group, Resources, TrainError},
};
use futures::{StreamExt, TryStreamExt, stream};
use serde::Serialize;
use tokio::{runtime::Handle, task::spawn_blocking};

use super::{
    corpus::{Corpus, Hashes, Order, Reading, Shards, Survey, Wanted},
    error::TrainFault,
    held_out::HeldOut,
    words::Words,
};
use crate::{
    error::{Error, Result},
    report::{Progress, Snapshot, count, table},
    source::{Position, Rows, row_bytes},
    stores::Stores,
};

/// Bytes of the vectors of rows that are scored together, estimated.
const VECTOR_BYTES: u64 = 16 << 20;
/// Bytes of English text per token, with the space.
const BYTES_PER_TOKEN: u64 = 5;
/// Groups of rows that are scored at the same time.
const IN_FLIGHT: usize = 4;

/// A text to measure, and the model.
#[derive(Debug)]
pub struct EvalJob {
    /// Files, folders, patterns and URLs of the text.
    pub inputs: Vec<String>,
    /// Column of texts, or of lists of tokens.
    pub column: String,
    /// Rows that are no text are left out.
    pub skip_bad_rows: bool,
    /// The model, with an LM head.
    pub model: ModelData,
    /// How texts become sentences, and the state in which a sentence begins.
    pub spec: EmbedSpec,
    /// Devices, threads and precision. The carried state is measured on the first device.
    pub engine: EmbedderSettings,
}

/// Both figures of a text.
#[derive(Debug, Clone, Serialize)]
pub struct EvalReport {
    /// Name of the model.
    pub model: String,
    /// Its fingerprint.
    pub fingerprint: String,
    /// Words of its vocabulary.
    pub words: usize,
    /// Files of the text.
    pub files: usize,
    /// How texts were cut into tokens.
    pub tokenizer: String,
    /// Whether texts were cut into sentences.
    pub sentence_mode: String,
    /// Sentences.
    pub sentences: u64,
    /// Tokens.
    pub tokens: u64,
    /// Tokens that are not in the vocabulary.
    pub unknown: u64,
    /// Rows that are no text and were left out.
    pub bad_rows: u64,
    /// With states carried from sentence to sentence.
    pub carried: Perplexity,
    /// With every sentence read from the start state.
    pub by_sentence: Perplexity,
    /// The start state.
    pub state: String,
}

/// A perplexity.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Perplexity {
    /// Geometric mean of both directions.
    pub perplexity: f64,
    /// Forward.
    pub perplexity_forward: f64,
    /// Backward.
    pub perplexity_backward: f64,
    /// Predictions of each direction: tokens, and one boundary per sentence.
    pub predictions: u64,
}

impl From<Evaluated> for Perplexity {
    fn from(sums: Evaluated) -> Self {
        Self {
            perplexity: sums.perplexity(),
            perplexity_forward: sums.perplexity_of(0),
            perplexity_backward: sums.perplexity_of(1),
            predictions: sums.tokens,
        }
    }
}

/// Reports how much of the text was read: each figure reads every sentence.
#[derive(Clone)]
struct Watched {
    progress: Arc<dyn Progress>,
    sentences: u64,
    predictions: u64,
}

impl Watched {
    /// So many figures are complete, and one has so many predictions.
    fn update(&self, figures: u64, predictions: u64) {
        let done = (self.sentences as f64 * predictions as f64 / self.predictions.max(1) as f64) as u64;
        self.progress.update(&Snapshot {
            rows: figures * self.sentences + done.min(self.sentences),
            rows_total: Some(2 * self.sentences),
            tokens: figures * self.predictions + predictions,
            padded_tokens: figures * self.predictions + predictions,
            ..Snapshot::default()
        });
    }
}

/// Measures a text.
///
/// # Errors
/// [`LmHeadError::Missing`] in [`elmo::Error::LmHead`] when the model has no LM head; those of the source;
/// [`Error::Input`] for a row that is no text, or when there is no sentence; [`elmo::Error`] when a device fails.
pub async fn eval(job: EvalJob, stores: &Stores, progress: Arc<dyn Progress>) -> Result<EvalReport> {
    let files = job.model.lm_head.clone();
    let files = files.ok_or_else(|| elmo::Error::from(LmHeadError::Missing(job.model.name.clone())))?;
    let head = files.read(job.model.options.lstm.projection_dim)?;
    let words = Arc::new(Words::of_list(head.words().to_vec()));
    let (corpus, survey) = text(&job, stores, &words).await?;
    let held_out = HeldOut::new(Arc::clone(&corpus), &words, survey.shards.clone(), &survey.lengths);
    let EvalJob { model, spec, engine, .. } = job;
    let (name, fingerprint) = (model.name.clone(), model.fingerprint.to_string());
    let watched = Watched { progress, sentences: survey.sentences(), predictions: survey.predictions() };
    watched.update(0, 0);
    let (carried, model) = carried(held_out, model, head, &engine, watched.clone()).await?;
    let loaded = spawn_blocking(move || Elmo::from_data(model, &engine)).await.map_err(died)??;
    let score = by_sentence(&corpus, &loaded, &spec, &watched).await?;
    let by_sentence = Evaluated { log_probability: score.log_probability, tokens: score.predictions };
    Ok(EvalReport {
        model: name,
        fingerprint,
        words: words.len(),
        files: survey.shards.len(),
        tokenizer: spec.tokenizer.to_string(),
        sentence_mode: spec.sentences.to_string(),
        sentences: survey.sentences(),
        tokens: survey.tokens(),
        unknown: survey.unknown(),
        bad_rows: survey.bad_rows(),
        carried: carried.into(),
        by_sentence: by_sentence.into(),
        state: spec.state.to_string(),
    })
}

/// The text, and what is in it.
async fn text(job: &EvalJob, stores: &Stores, words: &Arc<Words>) -> Result<(Arc<Corpus>, Survey)> {
    let EmbedSpec { tokenizer, sentences, .. } = job.spec;
    let shards = Shards {
        inputs: &job.inputs,
        run: None,
        column: &job.column,
        // Nothing is shuffled, so the size of a block is that of a step of the reader.
        reading: Reading { tokenizer, sentences, block_sentences: 1 << 16 },
        order: Order::Bilm,
        seed: 0,
        skip_bad_rows: job.skip_bad_rows,
    };
    let corpus = Arc::new(Corpus::open(stores, shards, words).await?);
    let wanted = Wanted { hashes: Hashes::None, lengths: true };
    let survey = corpus.survey(&wanted, &[], threads(&job.engine)).await?;
    Ok((corpus, survey))
}

fn threads(engine: &EmbedderSettings) -> usize {
    engine.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Reads the text with carried states; returns the model for other uses.
async fn carried(
    held_out: HeldOut,
    model: ModelData,
    head: LmHeadData,
    engine: &EmbedderSettings,
    watched: Watched,
) -> Result<(Evaluated, ModelData)> {
    let devices = resolve_devices(&engine.devices).map_err(elmo::Error::from)?;
    let device = devices.first().copied().unwrap_or(DeviceName::Cpu);
    let resources = Resources { device, threads: threads(engine), ..Resources::default() };
    let (precision, runtime) = (engine.precision, Handle::current());
    let measured = spawn_blocking(move || {
        let _entered = runtime.enter();
        let evaluation = Evaluation::of_model(&model, &head, precision, resources, held_out.rows());
        let evaluation = evaluation.map_err(|error| of_device(TrainFault::Step(error)))?;
        let read = |predictions| watched.update(0, predictions);
        let sums = held_out.read(evaluation, &Group::default(), &AtomicBool::new(false), read).map_err(as_of_device)?;
        Ok((sums.unwrap_or_default(), model))
    });
    measured.await.map_err(died)?
}

/// The advice on a step that fails is not for a measurement.
fn as_of_device(error: Error) -> Error {
    match error.module() {
        Some(TrainFault::Step(TrainError::Device(device))) => elmo::Error::from(device.clone()).into(),
        _ => error,
    }
}

fn of_device(fault: TrainFault) -> Error {
    as_of_device(fault.into())
}

fn died(error: tokio::task::JoinError) -> Error {
    Error::Failed(format!("the thread that measures died: {error}"))
}

/// Scores every sentence by itself.
async fn by_sentence(corpus: &Corpus, elmo: &Elmo, spec: &EmbedSpec, watched: &Watched) -> Result<TextScore> {
    // Rows that are no text were refused before, unless they are to be left out.
    let spec = EmbedSpec { on_error: OnError::Null, ..Scorer::spec(spec) };
    let (columns, scorer) = (ColumnEmbedder::new(elmo, spec.clone())?, Arc::new(Scorer::new(elmo, &spec)?));
    let bytes = VECTOR_BYTES * BYTES_PER_TOKEN / (4 * columns.width().max(1) as u64);
    let mut total = TextScore::default();
    for number in 0..corpus.files().len() {
        let rows = Rows::new(corpus.shard(number)?, Position::default());
        let slices = stream::try_unfold(rows, |mut rows| async move {
            Ok::<_, Error>(rows.next().await?.map(|slice| (slice.text, rows)))
        });
        let groups = slices.map_ok(|text| stream::iter(groups(&text, bytes)).map(Ok)).try_flatten();
        let score = |texts: ArrayRef| score(columns.clone(), Arc::clone(&scorer), texts);
        let mut scores = std::pin::pin!(groups.map_ok(score).try_buffered(IN_FLIGHT));
        while let Some(score) = scores.try_next().await? {
            total.add(score);
            watched.update(1, total.predictions);
        }
    }
    Ok(total)
}

/// Rows that are scored together, of about so many bytes each.
fn groups(text: &ArrayRef, bytes: u64) -> Vec<ArrayRef> {
    let mut sizes = vec![0; text.len()];
    row_bytes(text, &mut sizes);
    let (mut groups, mut first, mut sum) = (Vec::new(), 0, 0);
    for (row, size) in sizes.into_iter().enumerate() {
        sum += size;
        if sum >= bytes || row + 1 == text.len() {
            groups.push(text.slice(first, row + 1 - first));
            (first, sum) = (row + 1, 0);
        }
    }
    groups
}

/// Sums over some rows. On threads of their own: both the embedder's queue and the softmax block.
async fn score(columns: ColumnEmbedder, scorer: Arc<Scorer>, texts: ArrayRef) -> Result<TextScore> {
    let embedded = columns.submit_async(&texts).await?.await?;
    let scored = spawn_blocking(move || scorer.score(&texts, &embedded)).await.map_err(died)??;
    let mut total = TextScore::default();
    scored.rows().into_iter().flatten().for_each(|row| total.add(row));
    Ok(total)
}

impl fmt::Display for EvalReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = 100.0 * self.unknown as f64 / self.tokens.max(1) as f64;
        let mut rows = vec![
            ("model", format!("{}, {} words", self.model, count(self.words as u64))),
            ("read with", format!("--tokenizer {} --sentences {}", self.tokenizer, self.sentence_mode)),
            ("text", format!("{} files, {} sentences", count(self.files as u64), count(self.sentences))),
            (
                "tokens",
                format!("{}, {} ({percent:.2} %) not in the vocabulary", count(self.tokens), count(self.unknown)),
            ),
        ];
        if self.bad_rows > 0 {
            rows.push(("rows left out", count(self.bad_rows)));
        }
        rows.push(("carried state", self.carried.to_string()));
        rows.push(("sentence by sentence", format!("{}, from state {}", self.by_sentence, self.state)));
        f.write_str(&table(&rows))
    }
}

impl fmt::Display for Perplexity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { perplexity, perplexity_forward, perplexity_backward, predictions } = self;
        write!(
            f,
            "perplexity {perplexity:.3} (forward {perplexity_forward:.3}, backward {perplexity_backward:.3}) on {} predictions \
             in each direction",
            count(*predictions)
        )
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{AsArray, StringArray};

    use super::*;

    #[test]
    fn groups_have_all_rows_in_order() {
        let texts: ArrayRef =
            Arc::new(StringArray::from(vec![Some("aaaa"), None, Some("b"), Some(""), Some("cccccc")]));
        for (bytes, expected) in [(1, vec![1, 2, 2]), (4, vec![1, 4]), (5, vec![3, 2]), (100, vec![5])] {
            let groups = groups(&texts, bytes);
            assert_eq!(groups.iter().map(Array::len).collect::<Vec<_>>(), expected, "{bytes}");
            let rows: Vec<Option<&str>> = groups.iter().flat_map(|group| group.as_string::<i32>().iter()).collect();
            assert_eq!(rows, texts.as_string::<i32>().iter().collect::<Vec<_>>());
        }
    }
}
