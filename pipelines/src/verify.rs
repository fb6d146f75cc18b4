//! Recomputes rows of an output and compares: is this file what this model makes of these texts?

use std::{collections::BTreeMap, fmt, sync::Arc};

use arrow::array::{Array, ArrayRef, RecordBatch, UInt64Array};
use arrow::compute::take;
use elmo::{
    ColumnEmbedder, Elmo, EmbedSpec,
    mix::ScalarMix,
    spec::{Layers, Level, ListType, OnError, SpecError, StateMode},
};
use futures::StreamExt;
use serde::Serialize;

use crate::{
    error::{Error, Result},
    inspect::{broken, footer, open, parquet_files, vectors_of_row},
    manifest,
    source::{self, Keep, Plan, Position, Request, Rows},
    stores::{Location, Stores},
};

/// What to recompute.
#[derive(Debug, Clone)]
pub struct Verify {
    /// A file or folder of a bulk job.
    pub output: String,
    /// Rows to recompute.
    pub sample: usize,
    /// Which rows are picked.
    pub seed: u64,
    /// Column of the output with the texts; taken from the inputs of the job when it was not kept.
    pub column: String,
    /// The scalar mix that the job used, where it used one.
    pub mix: Option<ScalarMix>,
}

/// How the comparison went.
#[derive(Debug, Clone, Default, Serialize)]
pub struct VerifyReport {
    /// Rows of the output.
    pub rows: u64,
    /// Rows that were recomputed.
    pub sampled: usize,
    /// Vectors compared.
    pub vectors: u64,
    /// Largest absolute difference of a number.
    pub largest_difference: f32,
    /// Rows whose vectors are equal to the last bit, NULL rows counted in.
    pub bit_equal_rows: usize,
    /// Rows that have vectors on one side only, or another number of tokens.
    pub mismatched_rows: usize,
}

impl VerifyReport {
    /// Whether every sampled row is what the model makes of its text, but for rounding on another device.
    pub fn holds(&self, tolerance: f32) -> bool {
        self.mismatched_rows == 0 && self.largest_difference <= tolerance
    }
}

impl fmt::Display for VerifyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&crate::cli::table(&[
            ("rows", self.rows.to_string()),
            ("recomputed", self.sampled.to_string()),
            ("vectors compared", self.vectors.to_string()),
            ("equal to the bit", format!("{} rows", self.bit_equal_rows)),
            ("largest difference", format!("{:e}", self.largest_difference)),
            ("mismatched rows", self.mismatched_rows.to_string()),
        ]))
    }
}

/// Recomputes a sample of an output's rows with `elmo`.
pub async fn verify(job: &Verify, elmo: &Elmo, stores: &Stores) -> Result<VerifyReport> {
    let files = parquet_files(&job.output, stores).await?;
    let mut counts = Vec::with_capacity(files.len());
    let mut made_by = BTreeMap::new();
    for (location, _) in &files {
        let opened = open(location).await?;
        counts.push(opened.metadata().file_metadata().num_rows().max(0) as u64);
        made_by = footer(&opened);
    }
    let columns = embedder(&made_by, job, elmo)?;
    let rows: u64 = counts.iter().sum();
    let picked = pick(rows, job.sample, job.seed);
    let mut report = VerifyReport { rows, sampled: picked.len(), ..VerifyReport::default() };
    let mut first = 0;
    for ((location, _), count) in files.iter().zip(counts) {
        let here: Vec<u64> =
            picked.iter().filter(|row| (first..first + count).contains(*row)).map(|row| row - first).collect();
        if !here.is_empty() {
            let found = read_rows(location, &here).await?;
            let texts = texts(job, stores, location, &found, &here).await?;
            compare(&columns, &found, &texts, &mut report).await?;
        }
        first += count;
    }
    Ok(report)
}

/// An embedder with the settings that the footer names.
fn embedder(made_by: &BTreeMap<String, String>, job: &Verify, elmo: &Elmo) -> Result<ColumnEmbedder> {
    let get = |key: &str| made_by.get(&format!("elmo.{key}")).map(String::as_str);
    let there = get("fingerprint")
        .ok_or_else(|| Error::Check("the files hold no elmo.fingerprint: not made by elmo".into()))?;
    if there != elmo.fingerprint().to_string() {
        return Err(Error::Check(format!(
            "made by another model: fingerprint {there}, this model has {}",
            elmo.fingerprint()
        )));
    }
    let spec = spec_of(&get, job)?;
    Ok(ColumnEmbedder::new(elmo, spec)?)
}

fn spec_of<'a>(get: &impl Fn(&str) -> Option<&'a str>, job: &Verify) -> Result<EmbedSpec> {
    fn word<T: std::str::FromStr<Err = SpecError>>(value: Option<&str>, default: T) -> Result<T> {
        value.map_or(Ok(default), |v| v.parse().map_err(|e: SpecError| Error::Elmo(e.into())))
    }
    let default = EmbedSpec::default();
    let state = get("state").map(|state| state.split(':').next().unwrap_or(state));
    if state == Some("carry") {
        return Err(Error::Check(
            "state carry depends on all rows before; run elmo embed again and compare files".into(),
        ));
    }
    let layers = match (get("layers"), &job.mix) {
        (Some(word), Some(mix)) if word.starts_with("mix:") => Layers::Mix(mix.clone()),
        (Some(word), None) if word.starts_with("mix:") => {
            return Err(Error::usage("the output was made with a scalar mix", "give it with --layers FILE"));
        }
        (layers, _) => word(layers, default.layers)?,
    };
    let level = word(get("level"), default.level)?;
    Ok(EmbedSpec {
        level,
        layers,
        pooling: if level == Level::Token { default.pooling } else { word(get("pooling"), default.pooling)? },
        tokenizer: word(get("tokenizer"), default.tokenizer)?,
        sentences: word(get("sentences"), default.sentences)?,
        boundaries: get("boundaries") == Some("true"),
        normalize: word(get("normalize"), default.normalize)?,
        state: word(state, StateMode::Zero)?,
        on_long: word(get("on_long"), default.on_long)?,
        max_tokens: get("max_tokens").and_then(|n| n.parse().ok()).unwrap_or(default.max_tokens),
        on_error: OnError::Null,
        float: word(get("float"), default.float)?,
        list_type: ListType::Fixed,
        batch_rows: None,
    })
}

/// Distinct rows in ascending order, spread by a linear congruential generator from `seed`.
fn pick(rows: u64, sample: usize, seed: u64) -> Vec<u64> {
    if rows <= sample as u64 {
        return (0..rows).collect();
    }
    let mut picked = std::collections::BTreeSet::new();
    let mut state = seed;
    while picked.len() < sample {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        picked.insert((state >> 16) % rows);
    }
    picked.into_iter().collect()
}

/// The given rows of one file, ascending.
async fn read_rows(location: &Location, wanted: &[u64]) -> Result<RecordBatch> {
    let mut rows = open(location).await?.with_batch_size(1024).build().map_err(|e| broken(location, &e))?;
    let (mut first, mut parts) = (0_u64, Vec::new());
    while let Some(batch) = rows.next().await {
        let batch = batch.map_err(|e| broken(location, &e))?;
        let here = take_rows(&batch, first, wanted)?;
        first += batch.num_rows() as u64;
        parts.push(here);
    }
    let schema = parts.first().map(RecordBatch::schema).ok_or_else(|| broken(location, &"no rows"))?;
    Ok(arrow::compute::concat_batches(&schema, &parts).map_err(elmo::Error::from)?)
}

fn take_rows(batch: &RecordBatch, first: u64, wanted: &[u64]) -> Result<RecordBatch> {
    let end = first + batch.num_rows() as u64;
    let here: UInt64Array = wanted.iter().filter(|row| (first..end).contains(*row)).map(|row| row - first).collect();
    let columns = batch.columns().iter().map(|column| take(column, &here, None)).collect::<Result<_, _>>();
    let taken = columns.and_then(|columns| RecordBatch::try_new(batch.schema(), columns));
    Ok(taken.map_err(elmo::Error::from)?)
}

/// The texts of sampled rows: kept in the output, or read again from the inputs of the job.
async fn texts(job: &Verify, stores: &Stores, file: &Location, found: &RecordBatch, rows: &[u64]) -> Result<ArrayRef> {
    if let Some(column) = found.column_by_name(&job.column) {
        return Ok(Arc::clone(column));
    }
    let no_texts = |reason: &str| {
        Error::usage(
            format!("the output does not hold column {:?}, and {reason}", job.column),
            "name the column with --column, or verify where the inputs of the job are",
        )
    };
    let folder = stores.locate(job.output.trim_end_matches(".parquet"))?;
    let Some((then, parts)) = manifest::look(&folder).await? else {
        return Err(no_texts("there is no manifest beside it"));
    };
    let name = file.path.filename().unwrap_or_default();
    let part = parts
        .into_iter()
        .find(|part| part.file == name)
        .ok_or_else(|| no_texts("the manifest does not know the file"))?;
    if part.counts.skipped > 0 {
        return Err(no_texts("rows were skipped, so rows of input and output do not correspond"));
    }
    let names: Vec<String> = then.inputs.iter().map(|input| input.file.clone()).collect();
    let files = source::list(stores, &names, None).await?;
    let column = then.settings.get("column").cloned().unwrap_or_else(|| job.column.clone());
    let request = Request { column, id: None, keep: Keep::None, reserved: Vec::new() };
    let plan = Arc::new(Plan::resolve(files, &request).await?);
    read_texts(plan, part.start, rows).await
}

async fn read_texts(plan: Arc<Plan>, start: Position, wanted: &[u64]) -> Result<ArrayRef> {
    let mut rows = Rows::new(plan, start);
    let (mut first, mut parts) = (0_u64, Vec::<ArrayRef>::new());
    let last = wanted.last().copied().unwrap_or(0);
    while first <= last
        && let Some(slice) = rows.next().await?
    {
        let end = first + slice.len() as u64;
        let here: UInt64Array =
            wanted.iter().filter(|row| (first..end).contains(*row)).map(|row| row - first).collect();
        parts.push(take(&slice.text, &here, None).map_err(elmo::Error::from)?);
        first = end;
    }
    let parts: Vec<&dyn Array> = parts.iter().map(AsRef::as_ref).collect();
    Ok(arrow::compute::concat(&parts).map_err(elmo::Error::from)?)
}

async fn compare(
    columns: &ColumnEmbedder,
    found: &RecordBatch,
    texts: &ArrayRef,
    report: &mut VerifyReport,
) -> Result<()> {
    let again = columns.submit_async(texts).await?.await?;
    let name = columns.fields().first().map(|f| f.name().clone()).unwrap_or_default();
    let there =
        found.column_by_name(&name).ok_or_else(|| Error::Check(format!("the output has no column {name:?}")))?;
    for row in 0..there.len() {
        let (a, b) = (row_vectors(there, row), row_vectors(&again.vectors, row));
        if a.as_ref().map(Vec::len) != b.as_ref().map(Vec::len) {
            report.mismatched_rows += 1;
            continue;
        }
        let mut equal = true;
        for (a, b) in a.iter().flatten().zip(b.iter().flatten()) {
            report.vectors += 1;
            for (x, y) in a.values().iter().zip(b.values()) {
                equal &= x.to_bits() == y.to_bits();
                report.largest_difference = report.largest_difference.max((x - y).abs());
            }
        }
        report.bit_equal_rows += usize::from(equal);
    }
    Ok(())
}

fn row_vectors(column: &ArrayRef, row: usize) -> Option<Vec<arrow::array::Float32Array>> {
    column.is_valid(row).then(|| vectors_of_row(column, row))
}
