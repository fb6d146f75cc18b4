//! How fast this machine embeds, and what share of its own matrix products that is.
//!
//! Tokens per second say little about a program: they follow the machine. So the ceiling is measured in the same run,
//! before and after, with the same libtorch, the same number of threads and the shapes of the same model.

use std::{collections::BTreeMap, fmt, fs, path::Path, sync::Arc, time::Instant};

use arrow::array::{ArrayRef, StringArray};
use elmo::{
    ColumnEmbedder, Elmo, EmbedSpec, EmbedderMetrics, ModelData, ModelOptions, PendingColumns,
    model::matmul_ceiling,
    weights::{Tensor, Weights},
};
use serde::Serialize;

use crate::{
    cli::{BenchArgs, Size, block_on, print, print_json},
    error::{Error, Result},
    report::count,
    stores::Stores,
};

/// Seconds for each of the two measurements of the ceiling.
const CEILING_SECONDS: f64 = 1.5;
/// Bytes of text that are handed in at once; two such windows are under way.
const WINDOW_BYTES: usize = 1 << 20;
/// Bytes of text before measuring: about four thousand tokens.
const WARM_UP_BYTES: usize = 20_000;
/// Share of the ceiling that is reckoned with when the amount of text is chosen.
const LIKELY_SHARE: f64 = 0.75;
/// Rows of the built-in text.
const BUILT_IN_ROWS: usize = 8192;

/// What was measured.
#[derive(Debug, Clone, Serialize)]
pub struct BenchReport {
    /// The model.
    pub model: String,
    /// Devices, one name per thread of the engine.
    pub devices: Vec<String>,
    /// OS threads on the CPU.
    pub threads: usize,
    /// Seconds measured.
    pub seconds: f64,
    /// Rows embedded.
    pub rows: u64,
    /// Sentences embedded.
    pub sentences: u64,
    /// Tokens embedded.
    pub tokens: u64,
    /// Tokens per second.
    pub tokens_per_second: f64,
    /// Share of the computed rows that are no token.
    pub padding: f64,
    /// Share of the tokens whose word was in the cache.
    pub cache_hits: f64,
    /// Matrix products that real tokens need, per second, in 1e9 operations.
    pub gflops: f64,
    /// Rate of libtorch's own product on the shapes of the model, mean of before and after.
    pub ceiling_gflops: f64,
    /// The same before and after: how steady the machine was.
    pub ceilings: [f64; 2],
    /// `gflops / ceiling_gflops`.
    pub share_of_ceiling: f64,
    /// Share of the time in which devices worked.
    pub device_busy: f64,
    /// The engine alone: `gflops` over the seconds that devices worked, as a share of the ceiling.
    pub device_share_of_ceiling: f64,
}

/// Measures and prints the report.
pub fn run(args: &BenchArgs) -> Result<()> {
    let data = match (args.size, args.model.spec_if_given()) {
        (Some(size), _) => of_size(size)?,
        (None, Some(_)) => block_on(async { args.model.open(&Stores::from_env()).await })?,
        (None, None) => of_size(Size::Small)?,
    };
    let texts = match &args.text {
        Some(path) => read_texts(path)?,
        None => built_in_texts(),
    };
    let report = measure(args, data, &texts)?;
    match args.json {
        true => print_json(&report),
        false => print(&report.to_string()),
    }
}

fn measure(args: &BenchArgs, data: ModelData, texts: &[String]) -> Result<BenchReport> {
    let (options, name) = (data.options.clone(), data.name.clone());
    let settings = args.engine.settings();
    let threads = settings.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let elmo = Elmo::from_data(data, &settings)?;
    let columns = ColumnEmbedder::new(&elmo, EmbedSpec::default())?;
    let mut texts = texts.iter().cycle();
    // So that threads, pages and the word cache are there as in a running job.
    let (warm_up, warm_up_bytes) = window(&mut texts, WARM_UP_BYTES);
    columns.embed(&warm_up)?;
    let ceiling = || matmul_ceiling(&options, threads, CEILING_SECONDS).map_err(|e| Error::Elmo(e.into()));
    let before = ceiling()?;
    // How much text lasts about so long: batches cannot be stopped half way, so it is decided beforehand.
    let gflop_per_byte = elmo.embedder().metrics().gflop / warm_up_bytes as f64;
    let bytes = (LIKELY_SHARE * before / gflop_per_byte * args.seconds as f64) as usize;
    let (first, started) = (elmo.embedder().metrics(), Instant::now());
    let rows = embed(&columns, &mut texts, bytes)?;
    let (last, seconds) = (elmo.embedder().metrics(), started.elapsed().as_secs_f64());
    let after = ceiling()?;
    let devices = elmo.devices().iter().map(ToString::to_string).collect();
    let lanes = if elmo.devices().iter().all(|d| d.to_string() == "cpu") { threads } else { elmo.devices().len() };
    Ok(report(name, devices, lanes, &first, &last, seconds, rows, [before, after]))
}

/// The next texts of about `bytes`, one at least, and their bytes.
fn window(texts: &mut dyn Iterator<Item = &String>, bytes: usize) -> (ArrayRef, usize) {
    let (mut taken, mut so_far) = (Vec::new(), 0);
    while so_far < bytes.max(1)
        && let Some(text) = texts.next()
    {
        taken.push(text);
        so_far += text.len() + 1; // empty ones end too
    }
    (Arc::new(StringArray::from_iter_values(taken)), so_far)
}

/// Embeds about `bytes` of text, two windows under way; returns the rows.
fn embed(columns: &ColumnEmbedder, texts: &mut dyn Iterator<Item = &String>, bytes: usize) -> Result<u64> {
    let (mut rows, mut left) = (0, bytes);
    let mut under_way = None;
    loop {
        let (next, taken) = window(texts, left.min(WINDOW_BYTES));
        if let Some(pending) = under_way.replace(columns.submit(&next)?) {
            rows += PendingColumns::wait(pending)?.stats.rows as u64;
        }
        if taken >= left {
            break;
        }
        left -= taken;
    }
    if let Some(pending) = under_way {
        rows += pending.wait()?.stats.rows as u64;
    }
    Ok(rows)
}

#[allow(clippy::too_many_arguments)] // every one is a measured number of its own
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
        gflops: gflop / seconds,
        ceiling_gflops: ceiling,
        ceilings,
        share_of_ceiling: gflop / seconds / ceiling,
        device_busy: device_seconds / (seconds * threads as f64),
        device_share_of_ceiling: gflop / (device_seconds / threads as f64) / ceiling,
    }
}

impl fmt::Display for BenchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |share: f64| format!("{:.1} %", 100.0 * share);
        f.write_str(&crate::cli::table(&[
            ("model", self.model.clone()),
            ("devices", format!("{}, {} threads", self.devices.join(" "), self.threads)),
            ("rows", format!("{} in {:.1} s", count(self.rows), self.seconds)),
            ("tokens/s", count(self.tokens_per_second as u64)),
            ("padding", percent(self.padding)),
            ("word cache hits", percent(self.cache_hits)),
            ("GFLOP/s", format!("{:.1}", self.gflops)),
            (
                "matmul ceiling",
                format!("{:.1} ({:.1} before, {:.1} after)", self.ceiling_gflops, self.ceilings[0], self.ceilings[1]),
            ),
            ("share of ceiling", percent(self.share_of_ceiling)),
            ("devices busy", percent(self.device_busy)),
            ("share while busy", percent(self.device_share_of_ceiling)),
        ]))
    }
}

/// A model of a published size with random weights: speed does not depend on them.
fn of_size(size: Size) -> Result<ModelData> {
    let (dim, projection, highways, name) = match size {
        Size::Tiny => return Ok(ModelData::tiny()),
        Size::Small => (1024, 128, 1, "small, random weights"),
        Size::Medium => (2048, 256, 1, "medium, random weights"),
        Size::Original => (4096, 512, 2, "original, random weights"),
    };
    let json = format!(
        r#"{{"lstm": {{"use_skip_connections": true, "projection_dim": {projection}, "cell_clip": 3, "proj_clip": 3,
            "dim": {dim}, "n_layers": 2}}, "char_cnn": {{"activation": "relu", "n_highway": {highways},
            "filters": [[1, 32], [2, 32], [3, 64], [4, 128], [5, 256], [6, 512], [7, 1024]],
            "embedding": {{"dim": 16}}, "n_characters": 262, "max_characters_per_token": 50}}}}"#
    );
    let options = ModelOptions::from_json(json.as_bytes(), name).map_err(|e| Error::Elmo(e.into()))?;
    let mut weights = Weights::default();
    for spec in options.weight_plan() {
        let fan_in: usize = spec.shape[..spec.shape.len() - 1].iter().product::<usize>().max(1);
        let bound = (3.0 / fan_in as f32).sqrt();
        let data = random(spec.len(), bound);
        weights.insert(spec.name, Tensor { shape: spec.shape, data });
    }
    Ok(ModelData::new(options, weights, name)?)
}

/// Uniform numbers in `[-bound, bound)` by a linear congruential generator.
fn random(n: usize, bound: f32) -> Vec<f32> {
    let mut state = n as u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * bound
    };
    (0..n).map(|_| next()).collect()
}

fn read_texts(path: &Path) -> Result<Vec<String>> {
    let text = fs::read_to_string(path).map_err(|e| Error::io(path, e))?;
    let json = path.extension().is_some_and(|e| e == "jsonl" || e == "ndjson");
    let wrong = |row: usize, reason: &str| Error::Input {
        file: path.display().to_string(),
        row: Some(row as u64),
        reason: reason.to_owned(),
        help: Some("a .jsonl file needs a string column text".into()),
    };
    let mut texts = Vec::new();
    for (row, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        if !json {
            texts.push(line.to_owned());
            continue;
        }
        let value: BTreeMap<String, serde_json::Value> =
            serde_json::from_str(line).map_err(|e| wrong(row, &e.to_string()))?;
        let text = value.get("text").and_then(|v| v.as_str()).ok_or_else(|| wrong(row, "no column text"))?;
        texts.push(text.to_owned());
    }
    if texts.is_empty() {
        return Err(Error::Input {
            file: path.display().to_string(),
            row: None,
            reason: "no text in it".into(),
            help: None,
        });
    }
    Ok(texts)
}

/// The reviews of the demo, again and again: few distinct words, so cache hits flatter; give --text for real figures.
fn built_in_texts() -> Vec<String> {
    let reviews = crate::demo::texts();
    reviews.iter().cycle().take(BUILT_IN_ROWS).cloned().collect()
}
