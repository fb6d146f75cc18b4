//! What is in an output: schema, rows, the model that made it, and whether the vectors look like vectors.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use arrow::{
    array::{Array, ArrayRef, AsArray, Float32Array, RecordBatch},
    datatypes::{DataType, Float32Type, SchemaRef},
};
use futures::TryStreamExt;
use object_store::ObjectStoreExt;
use parquet::{
    arrow::{ParquetRecordBatchStreamBuilder, async_reader::ParquetRecordBatchStream},
    errors::ParquetError,
};
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::{
    bulk::manifest::{self, Counts, Job, ManifestError, PartEntry},
    error::{Error, Result},
    report::{bytes, count, table},
    source::parquet::contain,
    stores::{
        Location, StoreError, Stores,
        file::{StoreFile, cause},
    },
};

/// Rows that are read at once.
const BATCH_ROWS: usize = 1024;
/// Problems that one sentence names.
const SHOWN: usize = 3;

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
    /// What the manifest says of the files; `None` when there is none beside them.
    pub manifest: Option<ManifestCheck>,
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
///
/// # Errors
/// [`Error::Store`] when the address is wrong or the store fails, [`Error::Input`] when there is no Parquet file or one
/// cannot be read, [`Error::Check`] when the files were not all made by the same model with the same settings,
/// [`Error::Manifest`] when an entry of the manifest beside them cannot be parsed.
pub async fn inspect(address: &str, stores: &Stores) -> Result<InspectReport> {
    let output = Output::open(address, stores).await?;
    let mut norms = Norms::default();
    let mut report = InspectReport {
        files: output.files.len(),
        bytes: output.files.iter().map(|file| file.bytes).sum(),
        row_groups: output.files.iter().map(|file| file.row_groups).sum(),
        manifest: output.check().await?,
        columns: output.columns,
        made_by: output.made_by,
        ..InspectReport::default()
    };
    for file in &output.files {
        let mut rows = rows_of(&file.location).await?;
        while let Some(batch) = next_rows(&mut rows, &file.location).await? {
            add(&mut report, &batch, &mut norms);
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

/// An output before any of its rows is read.
#[derive(Debug)]
pub(crate) struct Output {
    /// In order; their footers agree.
    pub(crate) files: Vec<OutputFile>,
    /// Columns and their types.
    pub(crate) columns: Vec<(String, String)>,
    /// `elmo.*` pairs of the footers.
    pub(crate) made_by: BTreeMap<String, String>,
    /// The manifest of the folder.
    pub(crate) beside: Option<Beside>,
}

/// One file of an output.
#[derive(Debug)]
pub(crate) struct OutputFile {
    pub(crate) location: Location,
    pub(crate) bytes: u64,
    pub(crate) rows: u64,
    pub(crate) row_groups: usize,
}

/// The manifest that lies beside the files of an output.
#[derive(Debug)]
pub(crate) struct Beside {
    pub(crate) job: Job,
    parts: Vec<PartEntry>,
    /// The totals, when the job has ended.
    done: Option<Counts>,
    /// All files of the output were asked for, not one of them.
    whole: bool,
}

/// A manifest held against the files beside it.
#[derive(Debug, Clone, Default, Serialize)]
pub struct ManifestCheck {
    /// The job has ended; a single file is complete once it is entered.
    pub complete: bool,
    /// What does not fit, a line each.
    pub problems: Vec<String>,
}

impl Output {
    /// Reads the footers and the manifest.
    pub(crate) async fn open(address: &str, stores: &Stores) -> Result<Self> {
        let mut output = Self { files: Vec::new(), columns: Vec::new(), made_by: BTreeMap::new(), beside: None };
        for (location, bytes) in parquet_files(address, stores).await? {
            output.add(location, bytes).await?;
        }
        let asked = stores.locate(address)?;
        let whole = output.files.iter().all(|file| file.location.path != asked.path);
        let folder = match whole {
            true => asked,
            false => asked.at(asked.path.parent().unwrap_or_default()),
        };
        output.beside = Beside::read(&folder, whole).await?;
        Ok(output)
    }

    async fn add(&mut self, location: Location, bytes: u64) -> Result<()> {
        let opened = open(&location).await?;
        let (made_by, columns) = (footer(&opened), columns(opened.schema()));
        match self.files.first() {
            None => (self.made_by, self.columns) = (made_by, columns),
            Some(first) => {
                let differs = || unlike(&self.made_by, &made_by).or_else(|| unlike_columns(&self.columns, &columns));
                if let Some(difference) = differs() {
                    return Err(Error::Check(format!(
                        "{location}: not made like {}: {difference}; one output has one model and one set of settings",
                        first.name()
                    )));
                }
            }
        }
        let metadata = opened.metadata();
        let rows = u64::try_from(metadata.file_metadata().num_rows()).unwrap_or(0);
        let row_groups = metadata.num_row_groups();
        self.files.push(OutputFile { location, bytes, rows, row_groups });
        Ok(())
    }

    /// Holds the manifest against the files, which are read for their hashes; `None` when there is none.
    pub(crate) async fn check(&self) -> Result<Option<ManifestCheck>> {
        let Some(beside) = self.beside.as_ref() else { return Ok(None) };
        let mut problems = Vec::new();
        for file in &self.files {
            problems.extend(beside.problem_of(file).await?);
        }
        if beside.whole {
            problems.extend(beside.missing(&self.files));
        }
        problems.extend(beside.wrong_total());
        problems.extend(beside.wrong_settings(&self.made_by));
        Ok(Some(ManifestCheck { complete: beside.done.is_some() || !beside.whole, problems }))
    }
}

impl OutputFile {
    /// Its name in the folder.
    pub(crate) fn name(&self) -> &str {
        self.location.path.filename().unwrap_or_default()
    }
}

impl Beside {
    async fn read(folder: &Location, whole: bool) -> Result<Option<Self>> {
        // Servers answer in many ways when something is not there.
        if folder.is_http() {
            return Ok(None);
        }
        let Some((job, parts)) = manifest::read(folder).await? else { return Ok(None) };
        let done = totals(folder).await?;
        Ok(Some(Self { job, parts, done, whole }))
    }

    /// The entry of a file.
    pub(crate) fn entry(&self, file: &OutputFile) -> Option<&PartEntry> {
        self.parts.iter().find(|part| part.file == file.name())
    }

    async fn problem_of(&self, file: &OutputFile) -> Result<Option<String>> {
        let (name, rows) = (file.name(), file.rows);
        let Some(entry) = self.entry(file) else {
            // What is written and not entered yet is no part: the job writes it again.
            let is_open = self.whole && self.done.is_none();
            return Ok((!is_open).then(|| format!("{name} is not in the manifest")));
        };
        if entry.counts.rows_out != rows {
            return Ok(Some(format!("{name} holds {rows} rows, by the manifest {}", entry.counts.rows_out)));
        }
        let is_same = entry.bytes == file.bytes && entry.sha256 == sha256(&file.location).await?;
        Ok((!is_same).then(|| format!("{name} holds other bytes than were written")))
    }

    /// Parts that are in the manifest and nowhere else.
    fn missing(&self, files: &[OutputFile]) -> Vec<String> {
        let there: BTreeSet<&str> = files.iter().map(OutputFile::name).collect();
        let gone = self.parts.iter().filter(|part| !there.contains(part.file.as_str()));
        gone.map(|part| format!("{} is in the manifest, and not there", part.file)).collect()
    }

    /// Entries that were lost, the last ones for example.
    fn wrong_total(&self) -> Option<String> {
        let total = self.done.as_ref()?.rows_out;
        let entered: u64 = self.parts.iter().map(|part| part.counts.rows_out).sum();
        (entered != total).then(|| format!("the manifest has entries for {entered} rows of {total}"))
    }

    fn wrong_settings(&self, made_by: &BTreeMap<String, String>) -> Option<String> {
        let settings = self.job.settings.iter().filter(|(key, _)| key.starts_with("elmo."));
        let settings: BTreeMap<String, String> = settings.map(|(key, value)| (key.clone(), value.clone())).collect();
        unlike(&settings, made_by).map(|difference| format!("the footers are not as the manifest says: {difference}"))
    }
}

/// SHA-256 of a file, hexadecimal.
async fn sha256(location: &Location) -> Result<String> {
    let failed = |e| StoreError::request("read", location, e);
    let mut body = location.store.get(&location.path).await.map_err(failed)?.into_stream();
    let mut hash = Sha256::new();
    while let Some(bytes) = body.try_next().await.map_err(failed)? {
        hash.update(&bytes);
    }
    Ok(format!("{:x}", hash.finalize()))
}

/// The totals of a job that has ended.
async fn totals(folder: &Location) -> Result<Option<Counts>> {
    let file = folder.child(manifest::FOLDER).child("done.json");
    let Some(bytes) = file.get().await? else { return Ok(None) };
    let broken = |e: serde_json::Error| ManifestError::Broken { file: file.to_string(), reason: e.to_string() };
    let totals: Counts = serde_json::from_slice(&bytes).map_err(broken)?;
    Ok(Some(totals))
}

impl ManifestCheck {
    /// What does not fit, in one sentence; `None` when all does.
    pub fn failure(&self) -> Option<String> {
        let first: Vec<&str> = self.problems.iter().take(SHOWN).map(String::as_str).collect();
        let more = match self.problems.len() - first.len() {
            0 => String::new(),
            more => format!(", and {more} more"),
        };
        (!first.is_empty()).then(|| format!("the files are not those of the manifest: {}{more}", first.join(", ")))
    }

    /// Lines of a report.
    pub(crate) fn lines(&self) -> Vec<(&'static str, String)> {
        let state = if self.complete { "complete" } else { "the job is not finished" };
        let problems = self.problems.iter().map(|problem| ("manifest", problem.clone()));
        [("manifest", state.to_owned())].into_iter().chain(problems).collect()
    }
}

/// The Parquet files that an address means, in order, with their sizes.
pub(crate) async fn parquet_files(address: &str, stores: &Stores) -> Result<Vec<(Location, u64)>> {
    let location = stores.locate(address)?;
    // A folder may have such a name too.
    if address.ends_with(".parquet")
        && let Some(meta) = location.head().await?
    {
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
    let file = StoreFile { store: Arc::clone(&location.store), path: location.path.clone(), size };
    contain(ParquetRecordBatchStreamBuilder::new(file)).await.map_err(|e| unreadable(location, e))
}

/// Begins to read the rows of a file.
pub(crate) async fn rows_of(location: &Location) -> Result<ParquetRecordBatchStream<StoreFile>> {
    open(location).await?.with_batch_size(BATCH_ROWS).build().map_err(|e| unreadable(location, e))
}

/// The next rows of a file; `None` at its end.
pub(crate) async fn next_rows(
    rows: &mut ParquetRecordBatchStream<StoreFile>,
    location: &Location,
) -> Result<Option<RecordBatch>> {
    contain(rows.try_next()).await.map_err(|e| unreadable(location, e))
}

/// A store that failed is no damaged file.
fn unreadable(location: &Location, error: ParquetError) -> Error {
    match cause(error) {
        Ok(source) => StoreError::request("read", location, *source).into(),
        Err(reason) => broken(location, &reason),
    }
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
fn footer(opened: &Opened) -> BTreeMap<String, String> {
    let pairs = opened.metadata().file_metadata().key_value_metadata();
    pairs
        .into_iter()
        .flatten()
        .filter(|pair| pair.key.starts_with("elmo."))
        .map(|pair| (pair.key.clone(), pair.value.clone().unwrap_or_default()))
        .collect()
}

/// The first difference between the `elmo.*` pairs of two footers, in words. A patch release resumes what another one began, so the
/// version may differ.
fn unlike(there: &BTreeMap<String, String>, here: &BTreeMap<String, String>) -> Option<String> {
    let mut keys = there.keys().chain(here.keys()).filter(|key| *key != "elmo.version");
    let key = keys.find(|key| there.get(*key) != here.get(*key))?;
    Some(format!("{key} is {}, there {}", shown(here.get(key)), shown(there.get(key))))
}

/// A value of a footer as a message shows it: the options of a model would fill a screen.
pub(crate) fn shown(value: Option<&String>) -> String {
    match value {
        None => "not set".to_owned(),
        Some(value) if value.chars().count() > 80 => format!("{:?}…", value.chars().take(40).collect::<String>()),
        Some(value) => format!("{value:?}"),
    }
}

fn unlike_columns(there: &[(String, String)], here: &[(String, String)]) -> Option<String> {
    let list = |columns: &[(String, String)]| {
        let columns: Vec<String> = columns.iter().map(|(name, kind)| format!("{name}: {kind}")).collect();
        columns.join(", ")
    };
    (there != here).then(|| format!("the columns are {}, there {}", list(here), list(there)))
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
    let schema = batch.schema();
    let named = schema.index_of("embedding").or_else(|_| schema.index_of("tokens")).ok();
    // What SQL writes has any name; its fields say what they are.
    let holds_vectors = |at: usize| Some(at) == named || schema.field(at).metadata().contains_key("elmo.layers");
    for (_, column) in batch.columns().iter().enumerate().filter(|(at, _)| holds_vectors(*at)) {
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
    if !values.iter().all(|v| v.is_finite()) {
        vectors.not_finite += 1;
        return;
    }
    let norm = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    // Of numbers that are finite, the norm need not be a float32.
    norms.add(norm.min(f64::from(f32::MAX)) as f32);
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
        DataType::FixedSizeList(_, _) | DataType::List(_) => vectors_of(&inner),
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
        if let Some(manifest) = &self.manifest {
            rows.extend(manifest.lines());
        }
        rows.extend(self.columns.iter().map(|(name, kind)| ("column", format!("{name}: {kind}"))));
        rows.extend(self.made_by.iter().map(|(key, value)| (key.as_str(), value.clone())));
        if self.made_by.is_empty() {
            rows.push(("made by", "unknown; nothing of elmo in the footers".to_owned()));
        }
        f.write_str(&table(&rows))
    }
}

impl InspectReport {
    /// What is wrong with the output, in one sentence; `None` when nothing is. A job that is not finished is no fault.
    pub fn failure(&self) -> Option<String> {
        let not_finite = self.vectors.not_finite;
        let numbers = (not_finite > 0).then(|| format!("{not_finite} vectors hold a NaN or an infinite number"));
        let files = self.manifest.as_ref().and_then(ManifestCheck::failure);
        let failures: Vec<String> = numbers.into_iter().chain(files).collect();
        (!failures.is_empty()).then(|| failures.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_that_fails_is_no_damaged_file() {
        let location = Stores::with_settings([]).locate("/folder/part.parquet").unwrap();
        let down = object_store::Error::Generic { store: "S3", source: "503".into() };
        let error = unreadable(&location, ParquetError::External(Box::new(down)));
        assert!(error.module::<StoreError>().is_some(), "{error}");
        let error = unreadable(&location, ParquetError::General("no magic number".into()));
        assert!(matches!(error, Error::Input { .. }), "{error}");
    }
}
