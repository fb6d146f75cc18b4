//! What is in an output: schema, rows, the model that made it, and whether the vectors look like vectors.

use std::{collections::BTreeMap, fmt};

use arrow::{
    array::{Array, ArrayRef, AsArray, Float32Array, RecordBatch},
    datatypes::{DataType, Float32Type, SchemaRef},
};
use futures::StreamExt;
use parquet::arrow::ParquetRecordBatchStreamBuilder;
use serde::Serialize;

use crate::{
    error::{Error, Result},
    report::{bytes, count},
    store_file::StoreFile,
    stores::{Location, Stores},
};

/// Rows that are read at once.
const BATCH_ROWS: usize = 1024;

/// What is in an output.
#[derive(Debug, Clone, Default, Serialize)]
pub struct InspectReport {
    /// Files, in order.
    pub files: usize,
    /// Bytes of all files.
    pub bytes: u64,
    /// Rows of all files.
    pub rows: u64,
    /// Row groups of all files.
    pub row_groups: usize,
    /// Columns and their types.
    pub columns: Vec<(String, String)>,
    /// `elmo.*` pairs of the footers.
    pub made_by: BTreeMap<String, String>,
    /// The vectors.
    pub vectors: Vectors,
    /// Rows with an error.
    pub errors: u64,
    /// Rows with a cut sentence.
    pub truncated: u64,
}

/// Statistics over all vectors of an output; at token level over all tokens.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Vectors {
    /// Vectors.
    pub count: u64,
    /// Numbers in one.
    pub width: usize,
    /// Rows without one.
    pub null_rows: u64,
    /// Vectors of zeros only.
    pub zero: u64,
    /// Vectors with a NaN or an infinite number.
    pub not_finite: u64,
    /// Smallest Euclidean norm.
    pub norm_min: f32,
    /// Median norm; of evenly spaced vectors where there are more than two million.
    pub norm_median: f32,
    /// Largest norm.
    pub norm_max: f32,
}

/// Reads a file or every Parquet file of a folder.
pub async fn inspect(address: &str, stores: &Stores) -> Result<InspectReport> {
    let mut report = InspectReport::default();
    let mut norms = Norms::default();
    for (location, size) in parquet_files(address, stores).await? {
        let opened = open(&location).await?;
        report.files += 1;
        report.bytes += size;
        report.row_groups += opened.metadata().num_row_groups();
        describe(&mut report, &location, &opened)?;
        let mut rows = opened.with_batch_size(BATCH_ROWS).build().map_err(|e| broken(&location, &e))?;
        while let Some(batch) = rows.next().await {
            add(&mut report, &batch.map_err(|e| broken(&location, &e))?, &mut norms);
        }
    }
    if norms.seen > 0 {
        report.vectors.norm_min = norms.min;
        report.vectors.norm_median = norms.median();
        report.vectors.norm_max = norms.max;
    }
    Ok(report)
}

/// Norms that are kept for the median.
const NORMS: usize = 1 << 21;

/// Least, most, and the median of evenly spaced ones, so that an output of any size fits.
#[derive(Debug)]
struct Norms {
    seen: u64,
    /// Every so many are kept.
    step: u64,
    kept: Vec<f32>,
    min: f32,
    max: f32,
}

impl Default for Norms {
    fn default() -> Self {
        Self { seen: 0, step: 1, kept: Vec::new(), min: f32::INFINITY, max: f32::NEG_INFINITY }
    }
}

impl Norms {
    fn add(&mut self, norm: f32) {
        if self.seen.is_multiple_of(self.step) {
            self.kept.push(norm);
        }
        self.seen += 1;
        (self.min, self.max) = (self.min.min(norm), self.max.max(norm));
        if self.kept.len() > NORMS {
            let mut place = 0;
            self.kept.retain(|_| {
                place += 1;
                place % 2 == 1
            });
            self.step *= 2;
        }
    }

    fn median(&mut self) -> f32 {
        let middle = self.kept.len() / 2;
        *self.kept.select_nth_unstable_by(middle, f32::total_cmp).1
    }
}

pub(crate) type Opened = ParquetRecordBatchStreamBuilder<StoreFile>;

/// The Parquet files that an address means, in order, with their sizes.
pub(crate) async fn parquet_files(address: &str, stores: &Stores) -> Result<Vec<(Location, u64)>> {
    let location = stores.locate(address)?;
    if let Some(meta) = location.head().await.ok().flatten().filter(|_| address.ends_with(".parquet")) {
        return Ok(vec![(location, meta.size)]);
    }
    let files = location.children().await?.into_iter();
    let files: Vec<(Location, u64)> = files
        .filter(|meta| meta.location.as_ref().ends_with(".parquet"))
        .map(|meta| (location.at(meta.location.clone()), meta.size))
        .collect();
    if files.is_empty() {
        return Err(Error::Input {
            file: location.to_string(),
            row: None,
            reason: "no Parquet file here".into(),
            help: Some("give a .parquet file or the folder that --output named".into()),
        });
    }
    Ok(files)
}

pub(crate) async fn open(location: &Location) -> Result<Opened> {
    let size = location.head().await?.ok_or_else(|| broken(location, &"no such file"))?.size;
    let file = StoreFile { store: std::sync::Arc::clone(&location.store), path: location.path.clone(), size };
    ParquetRecordBatchStreamBuilder::new(file).await.map_err(|e| broken(location, &e))
}

pub(crate) fn broken(location: &Location, error: &dyn fmt::Display) -> Error {
    Error::Input {
        file: location.to_string(),
        row: None,
        reason: format!("not a readable Parquet file: {error}"),
        help: None,
    }
}

/// The `elmo.*` pairs of a footer.
pub(crate) fn footer(opened: &Opened) -> BTreeMap<String, String> {
    let pairs = opened.metadata().file_metadata().key_value_metadata();
    pairs
        .into_iter()
        .flatten()
        .filter(|pair| pair.key.starts_with("elmo."))
        .map(|pair| (pair.key.clone(), pair.value.clone().unwrap_or_default()))
        .collect()
}

fn describe(report: &mut InspectReport, location: &Location, opened: &Opened) -> Result<()> {
    let made_by = footer(opened);
    if report.files > 1 && made_by != report.made_by {
        return Err(Error::Check(format!(
            "{location}: made by another model or with other settings than the files before"
        )));
    }
    report.made_by = made_by;
    report.columns = columns(opened.schema());
    Ok(())
}

fn columns(schema: &SchemaRef) -> Vec<(String, String)> {
    schema.fields().iter().map(|field| (field.name().clone(), short(field.data_type()))).collect()
}

/// A type in a few words.
fn short(kind: &DataType) -> String {
    match kind {
        DataType::FixedSizeList(item, n) => format!("{}[{n}]", short(item.data_type())),
        DataType::List(item) => format!("list of {}", short(item.data_type())),
        DataType::Struct(fields) => {
            let fields: Vec<String> = fields.iter().map(|f| format!("{} {}", f.name(), short(f.data_type()))).collect();
            format!("({})", fields.join(", "))
        }
        other => other.to_string(),
    }
}

fn add(report: &mut InspectReport, batch: &RecordBatch, norms: &mut Norms) {
    report.rows += batch.num_rows() as u64;
    if let Some(errors) = batch.column_by_name("error") {
        report.errors += (errors.len() - errors.null_count()) as u64;
    }
    if let Some(truncated) = batch.column_by_name("truncated").and_then(|c| c.as_boolean_opt().cloned()) {
        report.truncated += truncated.true_count() as u64;
    }
    if let Some(column) = batch.column_by_name("embedding").or_else(|| batch.column_by_name("tokens")) {
        report.vectors.null_rows += column.null_count() as u64;
        for vector in vectors_of(column) {
            count_vector(&mut report.vectors, vector.values(), norms);
        }
    }
}

fn count_vector(vectors: &mut Vectors, values: &[f32], norms: &mut Norms) {
    vectors.count += 1;
    vectors.width = values.len();
    vectors.zero += u64::from(values.iter().all(|v| *v == 0.0));
    let norm = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt() as f32;
    match norm.is_finite() {
        true => norms.add(norm),
        false => vectors.not_finite += 1,
    }
}

/// Every vector in a column: of its rows, or of the tokens in its rows.
pub(crate) fn vectors_of(column: &ArrayRef) -> Vec<Float32Array> {
    (0..column.len()).filter(|&row| column.is_valid(row)).flat_map(|row| vectors_of_row(column, row)).collect()
}

/// The vectors of one row that is not NULL.
pub(crate) fn vectors_of_row(column: &ArrayRef, row: usize) -> Vec<Float32Array> {
    let inner = match column.data_type() {
        DataType::FixedSizeList(_, _) => column.as_fixed_size_list().value(row),
        DataType::List(_) => column.as_list::<i32>().value(row),
        _ => return Vec::new(),
    };
    match inner.data_type() {
        DataType::Float32 => vec![inner.as_primitive::<Float32Type>().clone()],
        DataType::Struct(_) => inner.as_struct().column_by_name("embedding").map(vectors_of).unwrap_or_default(),
        _ => Vec::new(),
    }
}

impl fmt::Display for InspectReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let vectors = &self.vectors;
        let mut rows = vec![
            ("files", format!("{}, {}, {} row groups", count(self.files as u64), bytes(self.bytes), self.row_groups)),
            ("rows", count(self.rows)),
            ("vectors", format!("{} of {} numbers", count(vectors.count), vectors.width)),
            ("norms", format!("{:.4} to {:.4}, median {:.4}", vectors.norm_min, vectors.norm_max, vectors.norm_median)),
            ("NULL rows", count(vectors.null_rows)),
            ("zero vectors", count(vectors.zero)),
            ("NaN or infinite", count(vectors.not_finite)),
            ("truncated rows", count(self.truncated)),
            ("rows with an error", count(self.errors)),
        ];
        rows.extend(self.columns.iter().map(|(name, kind)| ("column", format!("{name}: {kind}"))));
        rows.extend(self.made_by.iter().map(|(key, value)| (key.as_str(), value.clone())));
        f.write_str(&crate::cli::table(&rows))
    }
}

impl InspectReport {
    /// No NaN, no infinite number.
    pub fn is_sound(&self) -> bool {
        self.vectors.not_finite == 0
    }
}
