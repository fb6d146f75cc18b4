//! Recomputes rows of an output and compares: is this file what this model makes of these texts?
//!
//! Footers are compared with each other, rows of files with the manifest beside them, and of a sample of rows
//! everything that the model decides: numbers by their bits first, then words, offsets, `truncated` and `error`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use arrow::{
    array::{Array, ArrayRef, AsArray, Float32Array, RecordBatch, StructArray, UInt64Array},
    compute::{cast, concat, take},
    datatypes::DataType,
};
use elmo::{
    ColumnEmbedder, Elmo, EmbedSpec, EmbeddedColumns,
    mix::ScalarMix,
    spec::{Layers, Level, ListType, OnError, SpecError, StateMode},
};
use serde::Serialize;

use super::inspect::{Beside, ManifestCheck, Output, OutputFile, broken, next_rows, rows_of, shown, vectors_of_row};
use crate::{
    bulk::manifest::{InputRecord, Job},
    error::{Error, Result},
    report::table,
    source::{self, InputFile, Plan, Request, Rows, STDIN, Slice},
    stores::{Location, Stores},
};

/// Rows with a mismatch that a report names.
const SHOWN_ROWS: usize = 10;
/// Beginning of the error of a row whose bytes are no UTF-8.
const NOT_UTF8: &str = "not UTF-8";

/// What to recompute.
#[derive(Debug, Clone)]
pub struct Verify {
    /// A file or folder of a bulk job.
    pub output: String,
    /// Rows to recompute.
    pub sample: usize,
    /// Which rows are picked.
    pub seed: u64,
    /// Column with the texts, in the output or else in the inputs of the job; `None`: the one that the manifest names,
    /// or `text` where there is no manifest.
    pub column: Option<String>,
    /// The scalar mix that the job used, where it used one.
    pub mix: Option<ScalarMix>,
}

/// A way in which a row of an output is not what the model makes of its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Mismatch {
    /// Vectors on one side, NULL on the other.
    Null,
    /// Another number of vectors, or vectors of another width.
    Shape,
    /// NaN or infinite numbers that do not come out again.
    NotFinite,
    /// Another word of a token.
    Token,
    /// Another first byte of a token.
    Start,
    /// Another end of a token.
    End,
    /// Another sentence of a token.
    Sentence,
    /// Another value of `truncated`.
    Truncated,
    /// Another value of `error`.
    Error,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Null => "vectors or NULL",
            Self::Shape => "number or width of vectors",
            Self::NotFinite => "NaN or infinite numbers",
            Self::Token => "token",
            Self::Start => "start",
            Self::End => "end",
            Self::Sentence => "sentence",
            Self::Truncated => "truncated",
            Self::Error => "error",
        })
    }
}

/// A row with a mismatch.
#[derive(Debug, Clone, Serialize)]
pub struct MismatchedRow {
    /// Row of the output, from 0, all files counted through.
    pub row: u64,
    /// What differs.
    pub what: Vec<Mismatch>,
}

impl fmt::Display for MismatchedRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what: Vec<String> = self.what.iter().map(ToString::to_string).collect();
        write!(f, "row {}: {}", self.row, what.join(", "))
    }
}

/// How the comparison went.
#[derive(Debug, Clone, Default, Serialize)]
pub struct VerifyReport {
    /// Rows of the output.
    pub rows: u64,
    /// Rows that were picked.
    pub sampled: usize,
    /// Vectors compared.
    pub vectors: u64,
    /// Largest absolute difference of a number; of numbers whose difference is one.
    pub largest_difference: f32,
    /// Row of the output with that difference; `None` when there is no difference.
    pub largest_difference_row: Option<u64>,
    /// Rows that are equal in everything, vectors to the last bit, NULL rows counted in.
    pub bit_equal_rows: usize,
    /// Rows with a mismatch of any kind.
    pub mismatched_rows: usize,
    /// Rows with a mismatch, by its kind.
    pub mismatches: BTreeMap<Mismatch, usize>,
    /// The first rows with a mismatch.
    pub first_mismatches: Vec<MismatchedRow>,
    /// Picked rows that were not UTF-8: their vector is NULL, and the kept text is not what the job read.
    pub not_recomputed: usize,
    /// What the manifest says of the files; `None` when there is none beside them.
    pub manifest: Option<ManifestCheck>,
}

impl VerifyReport {
    /// What is wrong with the output, in one sentence; `None` when every picked row is what the model makes of its
    /// text, but for rounding on another device, and the files are those of the manifest.
    pub fn failure(&self, tolerance: f32) -> Option<String> {
        let manifest = self.manifest.as_ref();
        let failures = [
            manifest.and_then(ManifestCheck::failure),
            manifest.filter(|check| !check.complete).map(|_| {
                "the job that writes the output is not finished; run its elmo embed again to finish it".to_owned()
            }),
            self.mismatch_failure(),
            self.number_failure(tolerance),
        ];
        let failures: Vec<String> = failures.into_iter().flatten().collect();
        (!failures.is_empty()).then(|| failures.join("; "))
    }

    fn mismatch_failure(&self) -> Option<String> {
        let first: Vec<String> = self.first_mismatches.iter().take(3).map(ToString::to_string).collect();
        let (rows, sampled) = (self.mismatched_rows, self.sampled);
        (rows > 0).then(|| {
            format!(
                "{rows} of {sampled} rows are not what this model makes of their texts ({}): the output or the texts \
                 were changed, or another version of elmo made it",
                first.join("; ")
            )
        })
    }

    fn number_failure(&self, tolerance: f32) -> Option<String> {
        if self.largest_difference > tolerance {
            let row = self.largest_difference_row.map(|row| format!(" in row {row}")).unwrap_or_default();
            return Some(format!(
                "numbers differ by up to {:e}{row}, more than the tolerance of {tolerance:e}: the output or the texts \
                 were changed, or another kind of device made it, for which a larger --tolerance is right",
                self.largest_difference
            ));
        }
        // What is left then is the sign of zeros.
        let told = self.bit_equal_rows + self.mismatched_rows + self.not_recomputed;
        let unequal = self.sampled.saturating_sub(told);
        (tolerance <= 0.0 && unequal > 0)
            .then(|| format!("{unequal} rows are not equal to the bit, which a tolerance of 0 asks for"))
    }

    fn add(&mut self, row: u64, compared: Compared) {
        self.vectors += compared.vectors;
        if compared.largest > self.largest_difference {
            self.largest_difference = compared.largest;
            self.largest_difference_row = Some(row);
        }
        if compared.mismatches.is_empty() {
            self.bit_equal_rows += usize::from(!compared.bits_differ);
            return;
        }
        self.mismatched_rows += 1;
        for mismatch in &compared.mismatches {
            *self.mismatches.entry(*mismatch).or_default() += 1;
        }
        if self.first_mismatches.len() < SHOWN_ROWS {
            self.first_mismatches.push(MismatchedRow { row, what: compared.mismatches.into_iter().collect() });
        }
    }
}

impl fmt::Display for VerifyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows = vec![
            ("rows", self.rows.to_string()),
            ("recomputed", self.sampled.saturating_sub(self.not_recomputed).to_string()),
            ("vectors compared", self.vectors.to_string()),
            ("equal to the bit", format!("{} rows", self.bit_equal_rows)),
            ("largest difference", format!("{:e}", self.largest_difference)),
            ("mismatched rows", self.mismatched_rows.to_string()),
        ];
        rows.extend(self.mismatches.iter().map(|(what, n)| ("differing rows", format!("{n} in {what}"))));
        rows.extend(self.first_mismatches.iter().map(|row| ("mismatch", row.to_string())));
        if self.not_recomputed > 0 {
            rows.push(("not UTF-8", format!("{} rows, not recomputed", self.not_recomputed)));
        }
        if let Some(manifest) = &self.manifest {
            rows.extend(manifest.lines());
        }
        f.write_str(&table(&rows))
    }
}

/// Recomputes a sample of an output's rows with `elmo`.
///
/// # Errors
/// [`Error::Store`] or [`Error::Input`] when the output cannot be read, is not elmo's or names settings that cannot be,
/// or an input changed since the job read it;
/// [`Error::Check`] when files were not made alike, by another model, with other settings than the footer says or in
/// state `carry`, lack the column of vectors, or do not fit the manifest so that their texts are not known;
/// [`Error::Usage`] when the model has another precision, or the mix or the texts are not at hand; [`Error::Source`] or
/// [`Error::Manifest`] when the inputs or the manifest of the job cannot be read again; [`Error::Elmo`] when the footer
/// names settings that this model cannot do, or the device fails. Rows that differ are no error.
pub async fn verify(job: &Verify, elmo: &Elmo, stores: &Stores) -> Result<VerifyReport> {
    let output = Output::open(&job.output, stores).await?;
    let columns = embedder(&output.made_by, job, elmo).map_err(|error| in_footer(&output, error))?;
    let rows: u64 = output.files.iter().map(|file| file.rows).sum();
    let picked = pick(rows, job.sample, job.seed);
    let manifest = output.check().await?;
    let mut report = VerifyReport { rows, sampled: picked.len(), manifest, ..VerifyReport::default() };
    if picked.is_empty() {
        return Ok(report);
    }
    let texts = Texts::find(job, &output, stores).await?;
    let mut first = 0;
    for file in &output.files {
        let here = within(&picked, first, file.rows);
        if !here.is_empty() {
            compare_file(&columns, file, (first, &here), &texts, &mut report).await?;
        }
        first += file.rows;
    }
    Ok(report)
}

/// Settings that cannot be are the file's fault: nobody typed them.
fn in_footer(output: &Output, error: Error) -> Error {
    let (Some(elmo::Error::Spec(reason)), Some(file)) = (error.module(), output.files.first()) else { return error };
    Error::Input {
        file: file.location.to_string(),
        row: None,
        reason: format!("its footer names settings that cannot be: {reason}"),
        help: Some("give the output of elmo embed, as it was written".into()),
    }
}

/// An embedder with the settings that the footer names.
fn embedder(made_by: &BTreeMap<String, String>, job: &Verify, elmo: &Elmo) -> Result<ColumnEmbedder> {
    let get = |key: &str| made_by.get(&format!("elmo.{key}")).map(String::as_str);
    let there = get("fingerprint").ok_or_else(|| Error::Input {
        file: job.output.clone(),
        row: None,
        reason: "no elmo.fingerprint in the footer: not made by elmo".into(),
        help: Some("give the output of elmo embed".into()),
    })?;
    if there != elmo.fingerprint().to_string() {
        return Err(Error::Check(format!(
            "made by another model: fingerprint {there}, this model has {}",
            elmo.fingerprint()
        )));
    }
    let precision = elmo.precision().to_string();
    if let Some(there) = get("precision").filter(|there| *there != precision) {
        return Err(Error::usage(
            format!("the output was made with --precision {there}, and with {precision} other numbers come out"),
            format!("add --precision {there}"),
        ));
    }
    let columns = ColumnEmbedder::new(elmo, spec_of(&get, job)?)?;
    check_settings(made_by, &columns)?;
    Ok(columns)
}

/// Refuses settings that are not those of the footer, such as another mix or another warm state.
fn check_settings(made_by: &BTreeMap<String, String>, columns: &ColumnEmbedder) -> Result<()> {
    for (key, here) in columns.metadata() {
        let there = made_by.get(&key);
        // Another version may well come to the same.
        if key != "elmo.version" && there.is_some_and(|there| *there != here) {
            let (there, here) = (shown(there), shown(Some(&here)));
            return Err(Error::Check(format!("the files say that {key} is {there}, but here it would be {here}")));
        }
    }
    Ok(())
}

fn spec_of<'a>(get: &impl Fn(&str) -> Option<&'a str>, job: &Verify) -> Result<EmbedSpec> {
    fn word<T: std::str::FromStr<Err = SpecError>>(value: Option<&str>, default: T) -> Result<T> {
        value.map_or(Ok(default), |v| v.parse().map_err(|e: SpecError| elmo::Error::from(e).into()))
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
    let mut picked = BTreeSet::new();
    let mut state = seed;
    while picked.len() < sample {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        picked.insert((state >> 16) % rows);
    }
    picked.into_iter().collect()
}

/// Those of the ascending `rows` that lie in the `count` rows from `first` on, counted from there.
fn within(rows: &[u64], first: u64, count: u64) -> Vec<u64> {
    rows.iter().filter(|row| (first..first + count).contains(*row)).map(|row| row - first).collect()
}

/// Compares the picked rows `here` of a file whose first row is the output's row `first`: batch by batch, as the vectors
/// of all of them may be more than memory holds.
async fn compare_file(
    columns: &ColumnEmbedder,
    file: &OutputFile,
    (first, here): (u64, &[u64]),
    texts: &Texts<'_>,
    report: &mut VerifyReport,
) -> Result<()> {
    let mut texts = texts.of_file(file)?;
    let mut rows = rows_of(&file.location).await?;
    let (last, mut read) = (here.last().copied().unwrap_or(0), 0_u64);
    while read <= last {
        let batch = next_rows(&mut rows, &file.location).await?;
        let batch = batch.ok_or_else(|| broken(&file.location, &"fewer rows than its footer says"))?;
        let count = batch.num_rows() as u64;
        let places = within(here, read, count);
        if !places.is_empty() {
            let picked: Vec<u64> = places.iter().map(|place| read + place).collect();
            let found = take_rows(&batch, places)?;
            let texts = texts.of_rows(&found, &picked).await?;
            let rows = picked.iter().map(|row| first + row).collect();
            compare(columns, &Sample { rows, found, texts }, report).await?;
        }
        read += count;
    }
    Ok(())
}

/// Picked rows of one file, and their texts.
struct Sample {
    /// Their numbers in the output.
    rows: Vec<u64>,
    found: RecordBatch,
    texts: ArrayRef,
}

impl Sample {
    /// Whether a row was embedded, or rather not, from bytes that its kept text lost: what is no UTF-8 is kept as
    /// U+FFFD, and that is a text like any other.
    fn lost_bytes(&self, row: usize) -> bool {
        let error = self.found.column_by_name("error").and_then(|column| column.as_string_opt::<i32>());
        let is_said = error.is_some_and(|error| error.is_valid(row) && error.value(row).starts_with(NOT_UTF8));
        is_said && string_at(&self.texts, row).is_some_and(|text| text.contains(char::REPLACEMENT_CHARACTER))
    }
}

/// The string in a row of a column of strings.
fn string_at(column: &ArrayRef, row: usize) -> Option<&str> {
    if column.is_null(row) {
        return None;
    }
    match column.data_type() {
        DataType::Utf8 => Some(column.as_string::<i32>().value(row)),
        DataType::LargeUtf8 => Some(column.as_string::<i64>().value(row)),
        DataType::Utf8View => Some(column.as_string_view().value(row)),
        _ => None,
    }
}

fn take_rows(batch: &RecordBatch, rows: Vec<u64>) -> Result<RecordBatch> {
    let rows = UInt64Array::from(rows);
    let columns = batch.columns().iter().map(|column| take(column, &rows, None)).collect::<Result<_, _>>();
    let taken = columns.and_then(|columns| RecordBatch::try_new(batch.schema(), columns));
    Ok(taken.map_err(elmo::Error::from)?)
}

/// Where the texts of rows come from.
enum Texts<'o> {
    /// A column of the output.
    Kept(String),
    /// The inputs of the job, read again.
    Again { plan: Arc<Plan>, beside: &'o Beside },
}

impl<'o> Texts<'o> {
    async fn find(job: &Verify, output: &'o Output, stores: &Stores) -> Result<Self> {
        let beside = output.beside.as_ref();
        // The output may keep a column `text` that is not the one which was embedded.
        let of_job = beside.and_then(|beside| beside.job.settings.get("column"));
        let column = job.column.as_ref().or(of_job).cloned().unwrap_or_else(|| "text".to_owned());
        if output.columns.iter().any(|(name, _)| *name == column) {
            return Ok(Self::Kept(column));
        }
        let Some(beside) = beside else {
            return Err(no_texts(&column, "there is no manifest beside it that names the inputs of the job"));
        };
        let plan = inputs_again(&beside.job, &column, stores).await?;
        Ok(Self::Again { plan: Arc::new(plan), beside })
    }

    /// The texts of one file.
    fn of_file(&self, file: &OutputFile) -> Result<FileTexts<'_>> {
        let (plan, beside) = match self {
            Self::Kept(column) => return Ok(FileTexts::Kept { location: file.location.clone(), column }),
            Self::Again { plan, beside } => (plan, beside),
        };
        let unknown = |why: &str| Error::Check(format!("{}: {why}, so its texts are not known", file.location));
        let part = beside.entry(file).ok_or_else(|| unknown("not in the manifest of the job"))?;
        if part.counts.skipped > 0 {
            return Err(unknown("rows were skipped and the texts not kept"));
        }
        if part.counts.rows_out != file.rows {
            let why = format!("holds {} rows, by the manifest {}", file.rows, part.counts.rows_out);
            return Err(unknown(&why));
        }
        Ok(FileTexts::Again { rows: Box::new(Rows::new(Arc::clone(plan), part.start)), read: 0, slice: None })
    }
}

/// The texts of one file of the output, in its order.
enum FileTexts<'t> {
    Kept {
        location: Location,
        column: &'t str,
    },
    Again {
        rows: Box<Rows>,
        /// Rows of the file before `slice`.
        read: u64,
        slice: Option<Slice>,
    },
}

impl FileTexts<'_> {
    /// The texts of `rows` of the file, which are `found`; each call asks for later rows than the one before.
    async fn of_rows(&mut self, found: &RecordBatch, wanted: &[u64]) -> Result<ArrayRef> {
        let (rows, read, slice) = match self {
            Self::Kept { location, column } => {
                let texts = found.column_by_name(column).map(Arc::clone);
                return texts.ok_or_else(|| broken(location, &format!("no column {column:?}")));
            }
            Self::Again { rows, read, slice } => (rows, read, slice),
        };
        let mut parts = Vec::<ArrayRef>::new();
        let last = wanted.last().copied().unwrap_or(0);
        loop {
            if let Some(slice) = slice.as_ref() {
                let here = within(wanted, *read, slice.len() as u64);
                if !here.is_empty() {
                    parts.push(take(&slice.text, &UInt64Array::from(here), None).map_err(elmo::Error::from)?);
                }
            }
            let end = *read + slice.as_ref().map_or(0, |slice| slice.len() as u64);
            if last < end {
                break;
            }
            let short = || Error::Check("the inputs of the job have fewer rows than the output: changed since".into());
            *slice = Some(rows.next().await?.ok_or_else(short)?);
            *read = end;
        }
        let parts: Vec<&dyn Array> = parts.iter().map(AsRef::as_ref).collect();
        Ok(concat(&parts).map_err(elmo::Error::from)?)
    }
}

fn no_texts(column: &str, reason: &str) -> Error {
    Error::usage(
        format!("the output does not hold column {column:?}, and {reason}"),
        "name the column of the output that holds the texts with --column, or verify where the inputs of the job are",
    )
}

/// The inputs of the job, when they are what they were.
async fn inputs_again(job: &Job, column: &str, stores: &Stores) -> Result<Plan> {
    if job.inputs.iter().any(|input| input.file == STDIN) {
        return Err(no_texts(column, "the texts came from standard input and were not kept"));
    }
    let names: Vec<String> = job.inputs.iter().map(|input| input.file.clone()).collect();
    let files = source::list(stores, &names, None).await?;
    unchanged(&job.inputs, &files)?;
    Ok(Plan::resolve(files, &Request::texts(column)).await?)
}

fn unchanged(then: &[InputRecord], now: &[InputFile]) -> Result<()> {
    let now: Vec<InputRecord> = now.iter().map(InputRecord::from).collect();
    match then.iter().find(|input| !now.contains(*input)) {
        None => Ok(()),
        Some(input) => Err(Error::Input {
            file: input.file.clone(),
            row: None,
            reason: "changed since the job read it, so the texts of the output's rows are not known".into(),
            help: Some("put it back as it was, its time included, or embed again with --keep all".into()),
        }),
    }
}

/// How one row compares.
#[derive(Debug, Default)]
struct Compared {
    vectors: u64,
    bits_differ: bool,
    /// Largest difference that is a finite number.
    largest: f32,
    mismatches: BTreeSet<Mismatch>,
}

async fn compare(columns: &ColumnEmbedder, sample: &Sample, report: &mut VerifyReport) -> Result<()> {
    let again = columns.submit_async(&sample.texts).await?.await?;
    let name = columns.fields().first().map(|field| field.name().clone()).unwrap_or_default();
    let found = sample.found.column_by_name(&name);
    let missing = || Error::Check(format!("the output has no column {name:?}, which elmo embed writes"));
    let found = found.ok_or_else(missing)?;
    let pair = Pair::new(found, &sample.found, again);
    for (place, row) in sample.rows.iter().enumerate() {
        if found.is_null(place) && sample.lost_bytes(place) {
            report.not_recomputed += 1;
        } else {
            report.add(*row, pair.row(place));
        }
    }
    Ok(())
}

/// The columns of an output, and what comes out again.
struct Pair<'o> {
    found: &'o ArrayRef,
    again: ArrayRef,
    /// `truncated` and `error`, where the output has them.
    beside: Vec<(Mismatch, Twice)>,
}

impl<'o> Pair<'o> {
    fn new(found: &'o ArrayRef, rows: &RecordBatch, again: EmbeddedColumns) -> Self {
        let beside: [(&str, Mismatch, ArrayRef); 2] = [
            ("truncated", Mismatch::Truncated, Arc::new(again.truncated)),
            ("error", Mismatch::Error, Arc::new(again.error)),
        ];
        let beside = beside.into_iter().filter_map(|(name, mismatch, again)| {
            rows.column_by_name(name).map(|found| (mismatch, Twice::new(found, again)))
        });
        Self { found, again: again.vectors, beside: beside.collect() }
    }

    fn row(&self, row: usize) -> Compared {
        let mut compared = Compared::default();
        match (self.found.is_valid(row), self.again.is_valid(row)) {
            (true, true) => self.compare_vectors(row, &mut compared),
            (false, false) => {}
            _ => {
                compared.mismatches.insert(Mismatch::Null);
            }
        }
        let unequal = self.beside.iter().filter(|(_, column)| !column.is_equal(row));
        compared.mismatches.extend(unequal.map(|(mismatch, _)| *mismatch));
        compared
    }

    fn compare_vectors(&self, row: usize, compared: &mut Compared) {
        let (found, again) = (vectors_of_row(self.found, row), vectors_of_row(&self.again, row));
        let widths = |vectors: &[Float32Array]| vectors.iter().map(Float32Array::len).collect::<Vec<usize>>();
        if widths(&found) != widths(&again) || found.iter().any(|vector| vector.null_count() > 0) {
            compared.mismatches.insert(Mismatch::Shape);
            return;
        }
        for (found, again) in found.iter().zip(&again) {
            compared.vectors += 1;
            compare_numbers(found.values(), again.values(), compared);
        }
        if let (Some(found), Some(again)) = (tokens_of_row(self.found, row), tokens_of_row(&self.again, row)) {
            compared.mismatches.extend(unequal_columns(&found, &again));
        }
    }
}

/// Bits first: the difference of two NaN is no number, and neither is that of a NaN and anything else.
fn compare_numbers(found: &[f32], again: &[f32], compared: &mut Compared) {
    for (x, y) in found.iter().zip(again) {
        if x.to_bits() == y.to_bits() {
            continue;
        }
        compared.bits_differ = true;
        let difference = (x - y).abs();
        if difference.is_finite() {
            compared.largest = compared.largest.max(difference);
        } else {
            compared.mismatches.insert(Mismatch::NotFinite);
        }
    }
}

/// The tokens of a row that is not NULL, where there are any columns of tokens.
fn tokens_of_row(column: &ArrayRef, row: usize) -> Option<StructArray> {
    let tokens = column.as_list_opt::<i32>()?.value(row);
    tokens.as_struct_opt().cloned()
}

/// What differs in the tokens of one row, vectors left out.
fn unequal_columns(found: &StructArray, again: &StructArray) -> Vec<Mismatch> {
    let columns = [
        ("token", Mismatch::Token),
        ("start", Mismatch::Start),
        ("end", Mismatch::End),
        ("sentence", Mismatch::Sentence),
    ];
    let unequal = columns.into_iter().filter(|(name, _)| {
        let columns = found.column_by_name(name).zip(again.column_by_name(name));
        !columns.is_some_and(|(found, again)| Twice::new(found, Arc::clone(again)).all_equal())
    });
    unequal.map(|(_, mismatch)| mismatch).collect()
}

/// A column of the output beside what comes out again.
struct Twice {
    /// In the type of `again`, as other writers have other types of strings; `None` where it is of no such type.
    found: Option<ArrayRef>,
    again: ArrayRef,
}

impl Twice {
    fn new(found: &ArrayRef, again: ArrayRef) -> Self {
        Self { found: cast(found, again.data_type()).ok(), again }
    }

    fn is_equal(&self, row: usize) -> bool {
        self.found.as_ref().is_some_and(|found| found.slice(row, 1).to_data() == self.again.slice(row, 1).to_data())
    }

    fn all_equal(&self) -> bool {
        self.found.as_ref().is_some_and(|found| found.to_data() == self.again.to_data())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compared(found: &[f32], again: &[f32]) -> Compared {
        let mut compared = Compared::default();
        compare_numbers(found, again, &mut compared);
        compared
    }

    #[test]
    fn bits_come_first() {
        let same = compared(&[f32::NAN, 1.0], &[f32::NAN, 1.0]);
        assert!(!same.bits_differ && same.mismatches.is_empty());
        for (found, again) in [(f32::NAN, 1.0), (1.0, f32::NAN), (f32::INFINITY, 1.0), (f32::MAX, f32::MIN)] {
            let unlike = compared(&[found, 1.0], &[again, 0.5]);
            assert_eq!(unlike.mismatches, BTreeSet::from([Mismatch::NotFinite]), "{found} {again}");
            assert_eq!(unlike.largest, 0.5);
        }
    }

    #[test]
    fn a_tolerance_of_zero_asks_for_equal_bits() {
        let mut report = VerifyReport { sampled: 1, ..VerifyReport::default() };
        report.add(0, compared(&[-0.0], &[0.0]));
        assert_eq!(report.failure(1e-5), None);
        assert!(report.failure(0.0).is_some());
    }

    #[test]
    fn samples_are_rows() {
        assert_eq!(pick(3, 5, 0), [0, 1, 2]);
        let picked = pick(1000, 999, 7);
        assert_eq!(picked.len(), 999);
        assert!(picked.is_sorted() && picked.iter().all(|row| *row < 1000));
        assert_eq!(within(&picked, 1000, 10), [0_u64; 0]);
        assert_eq!(within(&[3, 5, 9], 4, 5), [1]);
    }
}
