//! Measures how fast this machine embeds, relative to its matrix products.
//!
//! Tokens per second depend on the machine. So the speed of the matrix products alone, the ceiling, is measured in the
//! same run before and after embedding, with the same number of threads and the shapes of the same model.

pub mod bulk;
mod constant;
pub mod drift;
mod encoder;
mod input;
mod savings;
#[cfg(feature = "kafka")]
pub mod stream;

use std::{fmt, sync::Arc, time::Instant};

use arrow::{
    array::{ArrayRef, AsArray, StringArray},
    compute::cast,
    datatypes::DataType,
};
use elmo::{
    ColumnEmbedder, Elmo, EmbedSpec, EmbedderMetrics, EmbedderSettings, ModelData, PendingColumns,
    model::matmul_ceiling,
};
use serde::Serialize;

pub use self::savings::Savings;
use super::fastest::{self, Speed};
use crate::{
    error::{Error, Result},
    report::{count, table},
    source::{self, Plan, Position, Request, Rows},
    stores::Stores,
};

/// Duration of each of the two measurements of the ceiling.
const CEILING_SECONDS: f64 = 1.5;
/// How long the products of each precision are measured, for a comparison.
const PRECISION_SECONDS: f64 = 0.4;
/// Bytes of text per submission; two submissions are in flight.
const SUBMISSION_BYTES: usize = 1 << 20;
/// Bytes of text for warming up: about two thousand tokens.
const WARM_UP_BYTES: usize = 10_000;
/// Expected share of the ceiling, to choose the amount of text.
const EXPECTED_SHARE: f64 = 0.75;
/// Average bytes of text per token.
const BYTES_PER_TOKEN: usize = 5;
/// Maximum bytes of text to read.
const MAX_TEXT_BYTES: usize = 256 << 20;
/// Rows of the built-in text.
const BUILT_IN_ROWS: usize = 8192;

/// The result of a measurement.
#[derive(Debug, Clone, Serialize)]
pub struct BenchReport {
    /// Name of the model.
    pub model: String,
    /// Devices of the model, each named once: `cpu` is all of its cores.
    pub devices: Vec<String>,
    /// Threads of the engine: one for each CPU core, two for each GPU.
    pub threads: usize,
    /// Duration in seconds.
    pub seconds: f64,
    /// Rows embedded.
    pub rows: u64,
    /// Sentences embedded.
    pub sentences: u64,
    /// Tokens embedded.
    pub tokens: u64,
    /// Tokens per second.
    pub tokens_per_second: f64,
    /// Share of the computed rows that are padding.
    pub padding: f64,
    /// Share of the looked-up words that were in the cache.
    pub cache_hits: f64,
    /// Words computed by the character CNN, as a share of the tokens: 1 without the cache and without deduplication in
    /// a batch.
    pub words_computed: f64,
    /// Operations of matrix products for tokens other than padding, in 1e9 per second. A product that several tokens share counts once.
    pub gflops: f64,
    /// Speed of libtorch's matrix products with the shapes of the model, mean of both measurements.
    pub ceiling_gflops: f64,
    /// Both measurements, before and after: they show how steady the machine was.
    pub ceilings: [f64; 2],
    /// `gflops / ceiling_gflops`.
    pub share_of_ceiling: f64,
    /// Share of the time in which the threads of the engine had a batch; on a GPU both may wait for it.
    pub device_busy: f64,
    /// `gflops` over the seconds in which devices computed, as a share of the ceiling: the engine alone.
    pub device_share_of_ceiling: f64,
    /// The speed of matrix products in each precision of these devices.
    pub precisions: Vec<Speed>,
    /// The speed-up of each optimisation, if requested.
    pub savings: Option<Savings>,
}

/// What to measure.
#[derive(Debug)]
pub struct Bench {
    /// The model.
    pub data: ModelData,
    /// Devices, precision, threads.
    pub settings: EmbedderSettings,
    /// Address of a file whose column `text` is embedded; `None` for the built-in reviews.
    pub text: Option<String>,
    /// Duration of the measurement in seconds, after warming up.
    pub seconds: usize,
    /// Also measure the speed-up of each optimisation.
    pub savings: bool,
}

/// Runs a measurement.
///
/// # Errors
/// [`SourceError`](source::SourceError) or [`Error::Input`] when the text cannot be read or is empty,
/// [`elmo::Error`] when a device fails.
pub async fn run(bench: Bench) -> Result<BenchReport> {
    let texts = match &bench.text {
        Some(address) => read_texts(address, MAX_TEXT_BYTES).await?,
        None => built_in_texts(),
    };
    let savings = if bench.savings { Some(savings::measure(&bench.data, &texts)?) } else { None };
    Ok(BenchReport { savings, ..measure(bench, &texts)? })
}

fn measure(bench: Bench, texts: &[String]) -> Result<BenchReport> {
    let Bench { data, settings, seconds: duration, .. } = bench;
    let (options, name) = (data.options.clone(), data.name.clone());
    let elmo = Elmo::from_data(data, &settings)?;
    let columns = ColumnEmbedder::new(&elmo, EmbedSpec::default())?;
    let mut texts = texts.iter().cycle();
    let lanes = elmo::engine::lanes(elmo.devices(), settings.threads);
    // Starts threads, touches memory and fills the word cache, as in a running job.
    let (warm_up, warm_up_bytes) = take_texts(&mut texts, WARM_UP_BYTES);
    columns.embed(&warm_up)?;
    let gflop_per_byte = elmo.embedder().metrics().gflop / warm_up_bytes as f64;
    let ceiling = || {
        let rate = matmul_ceiling(&options, &lanes, settings.precision, CEILING_SECONDS);
        rate.map_err(elmo::Error::from)
    };
    let before = ceiling()?;
    // Batches cannot be interrupted, so the amount of text for the duration is estimated in advance.
    let expected = EXPECTED_SHARE * before / gflop_per_byte;
    let bytes = duration as f64 * pace(&columns, &mut texts, expected)?;
    let (first, started) = (elmo.embedder().metrics(), Instant::now());
    let rows = embed(&columns, &mut texts, bytes as usize)?;
    let (last, seconds) = (elmo.embedder().metrics(), started.elapsed().as_secs_f64());
    let after = ceiling()?;
    let precisions = fastest::measure(&options, &lanes, PRECISION_SECONDS)?;
    let devices = elmo.devices().iter().map(ToString::to_string).collect();
    let report = report(name, devices, lanes.len(), &first, &last, seconds, rows, [before, after]);
    Ok(BenchReport { precisions, ..report })
}

/// Estimates the bytes per second. If `expected` bytes fill batches, they are embedded and timed, because with a small
/// model matrix products do not dominate. Fewer bytes would not fill a batch.
fn pace(columns: &ColumnEmbedder, texts: &mut dyn Iterator<Item = &String>, expected: f64) -> Result<f64> {
    if expected < (2 * columns.tokens_at_once() * BYTES_PER_TOKEN) as f64 {
        return Ok(expected);
    }
    let (trial, bytes) = take_texts(texts, (expected as usize).min(SUBMISSION_BYTES));
    let started = Instant::now();
    columns.embed(&trial)?;
    Ok(bytes as f64 / started.elapsed().as_secs_f64())
}

/// At least one text, and more up to about `bytes`; and their bytes.
fn take_texts(texts: &mut dyn Iterator<Item = &String>, bytes: usize) -> (ArrayRef, usize) {
    let (mut taken, mut total) = (Vec::new(), 0);
    while total < bytes.max(1)
        && let Some(text) = texts.next()
    {
        taken.push(text);
        total += text.len() + 1; // so that empty texts count
    }
    (Arc::new(StringArray::from_iter_values(taken)), total)
}

/// Embeds about `bytes` of text with two submissions in flight. Returns the number of rows.
fn embed(columns: &ColumnEmbedder, texts: &mut dyn Iterator<Item = &String>, bytes: usize) -> Result<u64> {
    let (mut rows, mut left) = (0, bytes);
    let mut in_flight = None;
    loop {
        let (next, taken) = take_texts(texts, left.min(SUBMISSION_BYTES));
        if let Some(pending) = in_flight.replace(columns.submit(&next)?) {
            rows += PendingColumns::wait(pending)?.stats.rows as u64;
        }
        if taken >= left {
            break;
        }
        left -= taken;
    }
    if let Some(pending) = in_flight {
        rows += pending.wait()?.stats.rows as u64;
    }
    Ok(rows)
}

#[allow(clippy::too_many_arguments)] // each is a measurement
fn report(
    model: String,
    devices: Vec<String>,
    threads: usize,
    first: &EmbedderMetrics,
    last: &EmbedderMetrics,
    seconds: f64,
    rows: u64,
    ceilings: [f64; 2],
) -> BenchReport {
    let tokens = last.tokens - first.tokens;
    let padded = last.padded_tokens - first.padded_tokens;
    let device_seconds = last.device_seconds - first.device_seconds;
    let gflop = last.gflop - first.gflop;
    let hits = (last.cache_hits - first.cache_hits) as f64;
    let looked_up = hits + (last.cache_misses - first.cache_misses) as f64;
    let ceiling = f64::midpoint(ceilings[0], ceilings[1]);
    BenchReport {
        model,
        devices,
        threads,
        seconds,
        rows,
        sentences: last.sentences - first.sentences,
        tokens,
        tokens_per_second: tokens as f64 / seconds,
        padding: 1.0 - tokens as f64 / padded.max(1) as f64,
        cache_hits: hits / looked_up.max(1.0),
        words_computed: (last.words_computed - first.words_computed) as f64 / tokens.max(1) as f64,
        gflops: gflop / seconds,
        ceiling_gflops: ceiling,
        ceilings,
        share_of_ceiling: gflop / seconds / ceiling,
        device_busy: device_seconds / (seconds * threads as f64),
        device_share_of_ceiling: gflop / (device_seconds / threads as f64) / ceiling,
        precisions: Vec::new(),
        savings: None,
    }
}

impl fmt::Display for BenchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |share: f64| format!("{:.1} %", 100.0 * share);
        f.write_str(&table(&[
            ("model", self.model.clone()),
            ("devices", format!("{}, {} threads", self.devices.join(" "), self.threads)),
            ("rows", format!("{} in {:.1} s", count(self.rows), self.seconds)),
            ("tokens/s", count(self.tokens_per_second as u64)),
            ("padding", percent(self.padding)),
            ("word cache hits", percent(self.cache_hits)),
            ("words computed", format!("{} of the tokens", percent(self.words_computed))),
            ("GFLOP/s", format!("{:.1}", self.gflops)),
            (
                "matmul ceiling",
                format!("{:.1} ({:.1} before, {:.1} after)", self.ceiling_gflops, self.ceilings[0], self.ceilings[1]),
            ),
            ("share of ceiling", percent(self.share_of_ceiling)),
            ("devices busy", percent(self.device_busy)),
            ("share while busy", percent(self.device_share_of_ceiling)),
            ("fastest precision", fastest::text(&self.precisions)),
        ]))?;
        self.savings.as_ref().map_or(Ok(()), |savings| write!(f, "\n{savings}"))
    }
}

/// The column `text` of a file, up to this many bytes.
async fn read_texts(address: &str, max_bytes: usize) -> Result<Vec<String>> {
    let files = source::list(&Stores::from_env(), &[address.to_owned()], None).await?;
    let request = Request::texts("text");
    let mut rows = Rows::new(Arc::new(Plan::resolve(files, &request).await?), Position::default());
    let (mut texts, mut bytes) = (Vec::new(), 0);
    while bytes < max_bytes
        && let Some(slice) = rows.next().await?
    {
        let column = cast(&slice.text, &DataType::LargeUtf8).map_err(elmo::Error::from)?;
        for text in column.as_string::<i64>().iter().flatten().filter(|text| !text.trim().is_empty()) {
            bytes += text.len();
            texts.push(text.to_owned());
        }
    }
    match texts.is_empty() {
        true => {
            Err(Error::Input { file: address.to_owned(), row: None, reason: "it contains no text".into(), help: None })
        }
        false => Ok(texts),
    }
}

/// The reviews of the demo, repeated. They have few distinct words, so the word cache has more hits than with real
/// text.
fn built_in_texts() -> Vec<String> {
    let reviews = crate::demo::texts();
    reviews.iter().cycle().take(BUILT_IN_ROWS).cloned().collect()
}
