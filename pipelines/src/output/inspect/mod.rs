//! `elmo inspect`: counts of an output: files, rows, columns, vectors and their norms, or scores.

mod norms;
mod scores;

use std::{collections::BTreeMap, fmt};

use arrow::array::{Array, AsArray, RecordBatch};
use serde::Serialize;

use self::norms::Norms;
pub use self::scores::Scores;
use super::{
    chain::{self, Offsets},
    manifest::ManifestCheck,
    opened::Output,
    parquet::{next_batch, read_rows},
    vectors::vectors_of,
};
use crate::{
    error::{Error, Result},
    report::{bytes, count, table},
    scores::LEVEL,
    stores::{Location, Stores},
    stream::chain::{ChainCheck, ChainProblem},
};

/// The contents of an output.
#[derive(Debug, Clone, Default, Serialize)]
pub struct InspectReport {
    /// Number of files.
    pub files: usize,
    /// Bytes of all files.
    pub bytes: u64,
    /// Rows of all files.
    pub rows: u64,
    /// Row groups of all files.
    pub row_groups: usize,
    /// Columns and their types.
    pub columns: Vec<(String, String)>,
    /// The `elmo.*` pairs of the footers: model and settings.
    pub made_by: BTreeMap<String, String>,
    /// Statistics of the vectors.
    pub vectors: Vectors,
    /// Statistics of the scores; `None` for an output of vectors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scores: Option<Scores>,
    /// Rows with an error.
    pub errors: u64,
    /// Rows with a truncated sentence.
    pub truncated: u64,
    /// The files compared with the manifest; `None` without a manifest.
    pub manifest: Option<ManifestCheck>,
    /// The objects of a stream compared with each other; `None` for other outputs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chain: Option<ChainCheck>,
}

/// Statistics of all vectors of an output; at token level, of all tokens.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Vectors {
    /// Number of vectors.
    pub count: u64,
    /// Dimensions of a vector.
    pub width: usize,
    /// Rows without a vector.
    pub null_rows: u64,
    /// Vectors whose numbers are all zero.
    pub zero: u64,
    /// Vectors with a NaN or an infinite number.
    pub not_finite: u64,
    /// Smallest Euclidean norm.
    pub norm_min: f32,
    /// Median norm; estimated from evenly spaced vectors when there are more than two million.
    pub norm_median: f32,
    /// Largest norm.
    pub norm_max: f32,
}

/// Reads a Parquet file, or every Parquet file of a folder.
///
/// # Errors
/// [`StoreError`](crate::stores::StoreError) when the address is wrong or the store fails, [`Error::Input`] when there
/// is no Parquet file or one cannot be read, [`Error::Check`] when the files were made by different models or with
/// different settings, [`ManifestError`](crate::bulk::manifest::ManifestError) when an entry of the manifest cannot be
/// parsed. Files that do not match the manifest are not an error here: see [`InspectReport::error`].
pub async fn inspect(address: &str, stores: &Stores) -> Result<InspectReport> {
    let output = Output::open(address, stores).await?;
    let mut norms = Norms::default();
    let mut report = InspectReport {
        files: output.files.len(),
        bytes: output.files.iter().map(|file| file.bytes).sum(),
        row_groups: output.files.iter().map(|file| file.row_groups).sum(),
        manifest: output.check().await?,
        chain: chain::check(&output).await?,
        scores: output.footer.pairs.contains_key(LEVEL).then(Scores::default),
        columns: output.footer.columns,
        made_by: output.footer.pairs,
        ..InspectReport::default()
    };
    for file in &output.files {
        let mut rows = read_rows(&file.location).await?;
        let mut offsets = file.span.as_ref().and_then(|span| span.as_ref().ok()).map(Offsets::new);
        while let Some(batch) = next_batch(&mut rows, &file.location).await? {
            let wrong = offsets.as_mut().and_then(|offsets| offsets.check(&batch));
            report.add_wrong_offset(&file.location, wrong);
            report.add(&batch, &mut norms);
        }
    }
    if let Some(scores) = &mut report.scores {
        scores.finish(&mut norms);
    } else if let Some(median) = norms.median() {
        report.vectors.norm_min = norms.min;
        report.vectors.norm_median = median;
        report.vectors.norm_max = norms.max;
    }
    Ok(report)
}

impl InspectReport {
    /// The faults of the output: vectors that are not finite, files that do not match the manifest, objects of a stream
    /// that do not follow one another. An unfinished job is no fault.
    pub fn error(&self) -> Option<Error> {
        let not_finite = self.vectors.not_finite;
        let numbers = (not_finite > 0).then(|| format!("{not_finite} vectors contain a NaN or an infinite number"));
        let scores = self.scores.as_ref().map_or(0, |scores| scores.not_finite);
        let scores = (scores > 0).then(|| format!("{scores} perplexities are NaN or infinite"));
        let manifest = self.manifest.as_ref();
        let chain = self.chain.as_ref();
        let failures =
            [numbers, scores, manifest.and_then(ManifestCheck::failure), chain.and_then(ChainCheck::failure)];
        let failures: Vec<String> = failures.into_iter().flatten().collect();
        let help = manifest.and_then(ManifestCheck::help).or_else(|| chain.and_then(ChainCheck::help));
        (!failures.is_empty()).then(|| Error::Check { message: failures.join("; "), help })
    }

    fn add_wrong_offset(&mut self, file: &Location, offset: Option<i64>) {
        let problem = offset.map(|offset| ChainProblem::Offsets { file: file.to_string(), offset });
        if let (Some(chain), Some(problem)) = (&mut self.chain, problem) {
            chain.problems.push(problem);
        }
    }

    fn add(&mut self, batch: &RecordBatch, norms: &mut Norms) {
        self.rows += batch.num_rows() as u64;
        if let Some(errors) = batch.column_by_name("error") {
            self.errors += (errors.len() - errors.logical_null_count()) as u64;
        }
        if let Some(truncated) = batch.column_by_name("truncated").and_then(|c| c.as_boolean_opt().cloned()) {
            self.truncated += truncated.true_count() as u64;
        }
        if let Some(scores) = &mut self.scores {
            scores.add(batch, norms);
            return;
        }
        let schema = batch.schema();
        let named = schema.index_of("embedding").or_else(|_| schema.index_of("tokens")).ok();
        // SQL gives columns any name; the metadata of the field marks those with vectors.
        let has_vectors = |at: usize| Some(at) == named || schema.field(at).metadata().contains_key("elmo.layers");
        for (_, column) in batch.columns().iter().enumerate().filter(|(at, _)| has_vectors(*at)) {
            self.vectors.null_rows += column.null_count() as u64;
            for vector in vectors_of(column) {
                self.vectors.add(vector.values(), norms);
            }
        }
    }
}

impl Vectors {
    fn add(&mut self, values: &[f32], norms: &mut Norms) {
        self.count += 1;
        self.width = values.len();
        self.zero += u64::from(values.iter().all(|v| *v == 0.0));
        if !values.iter().all(|v| v.is_finite()) {
            self.not_finite += 1;
            return;
        }
        let norm = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
        // The norm of finite numbers may exceed the range of float32.
        norms.add(norm.min(f64::from(f32::MAX)) as f32);
    }
}

impl Vectors {
    fn lines(&self) -> Vec<(&'static str, String)> {
        vec![
            ("vectors", format!("{} of {} dimensions", count(self.count), self.width)),
            ("norms", format!("{:.4} to {:.4}, median {:.4}", self.norm_min, self.norm_max, self.norm_median)),
            ("NULL rows", count(self.null_rows)),
            ("zero vectors", count(self.zero)),
            ("NaN or infinite", count(self.not_finite)),
        ]
    }
}

impl fmt::Display for InspectReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows = vec![
            ("files", format!("{}, {}, {} row groups", count(self.files as u64), bytes(self.bytes), self.row_groups)),
            ("rows", count(self.rows)),
        ];
        rows.extend(self.scores.as_ref().map_or_else(|| self.vectors.lines(), Scores::lines));
        rows.push(("truncated rows", count(self.truncated)));
        rows.push(("rows with an error", count(self.errors)));
        if let Some(manifest) = &self.manifest {
            rows.extend(manifest.lines());
        }
        let chain = self.chain.as_ref().map(ChainCheck::lines).unwrap_or_default();
        rows.extend(chain.iter().map(|(key, line)| (key.as_str(), line.clone())));
        rows.extend(self.columns.iter().map(|(name, kind)| ("column", format!("{name}: {kind}"))));
        rows.extend(self.made_by.iter().map(|(key, value)| (key.as_str(), value.clone())));
        if self.made_by.is_empty() {
            rows.push(("made by", "unknown: the footers have no elmo.* pairs".to_owned()));
        }
        f.write_str(&table(&rows))
    }
}
