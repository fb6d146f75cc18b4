//! Prepares a job before any row is read: determines inputs, columns, rows per part, and the job's identity.

use std::{collections::BTreeMap, sync::Arc};

use arrow::datatypes::{Schema, SchemaRef};

use super::{
    BulkJob,
    manifest::{InputRecord, Job},
    unit::output_schema,
};
use crate::{
    error::{Error, Result},
    sink::Codec,
    source::{self, InputFile, OnMalformed, Plan, Request},
    stage::Stage,
    stores::{Location, Stores},
};

/// Size of the vectors of a part by default, in bytes.
const PART_BYTES: u64 = 128 << 20;
/// Assumed tokens of a row, for the default number of rows of a part.
const TOKENS_PER_ROW: u64 = 32;

/// A job whose inputs and columns are known.
#[derive(Debug)]
pub struct Prepared {
    /// Files and columns to read.
    pub plan: Arc<Plan>,
    /// Files of input folders that are not read.
    pub left_out: u64,
    /// Columns of the output.
    pub schema: SchemaRef,
    /// Folder of the output.
    pub output: Location,
    /// Input rows of one part.
    pub part_rows: u64,
    /// Input rows of all parts, if not all are read.
    pub limit: Option<u64>,
    /// Identity of the job, as the manifest records it.
    pub job: Job,
}

/// Lists the inputs, infers their schemas, and determines the columns of the output. Reads no rows and writes nothing.
///
/// # Errors
/// [`StoreError`](crate::stores::StoreError) when the output's address is invalid or its store cannot be set up,
/// [`Error::Usage`] when it is an http(s) URL, [`SourceError`](source::SourceError) when inputs do not exist, cannot be
/// read, lack a column or disagree about one.
pub async fn prepare(job: &BulkJob, stage: &dyn Stage, stores: &Stores) -> Result<Prepared> {
    let output = stores.locate(&job.output)?;
    if output.is_http() {
        return Err(Error::usage("the output is an http(s) URL", "write to a path, s3://, gs:// or az://"));
    }
    let listing = source::listing(stores, &job.inputs, Some(&output), job.reading).await?;
    check_reading(job, &listing.files)?;
    let fields = stage.fields();
    let request = Request {
        column: job.column.clone(),
        id: job.id.clone(),
        keep: job.keep.clone(),
        reserved: fields.iter().map(|field| field.name().clone()).collect(),
        types: job.types,
        infer_rows: job.infer_rows,
    };
    let plan = Plan::resolve(listing.files, &request).await?;
    let schema = output_schema(&plan, stage);
    let inputs = plan.files().map(InputRecord::from).collect();
    let part_rows = part_rows(job, stage);
    let settings = settings(job, stage, &schema, part_rows);
    let (plan, left_out) = (Arc::new(plan), listing.left_out.len() as u64);
    let limit = job.limit;
    Ok(Prepared { plan, left_out, schema, output, part_rows, limit, job: Job::new(settings, inputs) })
}

/// Rejects options for cells where no input has any: they would be part of the job's identity and do nothing.
fn check_reading(job: &BulkJob, files: &[InputFile]) -> Result<()> {
    let is_set = job.reading.delimiter.is_some() || job.reading.no_header;
    match is_set && !files.is_empty() && files.iter().all(|file| !file.format.has_cells()) {
        true => Err(Error::usage(
            "--delimiter and --no-header are for CSV and TSV, and no input is of these formats",
            "leave them out, or name the format with --input-format csv",
        )),
        false => Ok(()),
    }
}

/// How the rows of a job are divided into parts, and how parts are computed and written.
#[derive(Debug, Clone)]
pub(super) struct Parts {
    pub(super) plan: Arc<Plan>,
    /// Columns of the output.
    pub(super) schema: SchemaRef,
    /// Input rows of one part.
    pub(super) part_rows: u64,
    /// Input rows of all parts, if not all are read.
    pub(super) limit: Option<u64>,
    /// Maximum number of rows of a chunk.
    pub(super) window_rows: usize,
    pub(super) codec: Codec,
    pub(super) row_group_bytes: u64,
}

impl Parts {
    pub(super) fn new(job: &BulkJob, prepared: &Prepared) -> Self {
        Self {
            plan: Arc::clone(&prepared.plan),
            schema: Arc::clone(&prepared.schema),
            part_rows: prepared.part_rows,
            limit: prepared.limit,
            window_rows: job.window_rows,
            codec: job.codec,
            row_group_bytes: job.row_group_bytes,
        }
    }

    /// Number of input files.
    pub(super) fn files(&self) -> usize {
        self.plan.files().len()
    }

    /// Whether the input can be read a second time: standard input cannot.
    pub(super) fn is_repeatable(&self) -> bool {
        self.plan.files().all(|file| file.location.is_some())
    }

    /// Input rows of part `number`.
    pub(super) fn rows_of(&self, number: usize) -> u64 {
        self.rows_left(number).map_or(self.part_rows, |left| left.min(self.part_rows))
    }

    /// Whether no row may follow part `number`.
    pub(super) fn ends_with(&self, number: usize) -> bool {
        self.rows_left(number).is_some_and(|left| left <= self.part_rows)
    }

    /// Rows from part `number` on, if there is a limit. All parts but the last one have the same number of rows.
    pub(super) fn rows_left(&self, number: usize) -> Option<u64> {
        let before = self.part_rows.saturating_mul(number as u64);
        self.limit.map(|limit| limit.saturating_sub(before))
    }
}

/// Rows of a part. State `carry` needs a whole number of batches, because the vectors depend on where batches end.
fn part_rows(job: &BulkJob, stage: &dyn Stage) -> u64 {
    let spec = stage.spec();
    let row_bytes = stage.output_bytes(1, TOKENS_PER_ROW);
    let rows = job.rows_per_file.unwrap_or((PART_BYTES / row_bytes).clamp(1024, 1 << 20)).max(1);
    let batch = spec.batch_rows.unwrap_or(1).max(1) as u64;
    rows.div_ceil(batch).checked_mul(batch).unwrap_or(u64::MAX / batch * batch)
}

/// Every setting that changes the bytes of the output.
fn settings(job: &BulkJob, stage: &dyn Stage, schema: &Schema, part_rows: u64) -> BTreeMap<String, String> {
    let mut settings: BTreeMap<String, String> = stage.metadata().into_iter().collect();
    let spec = stage.spec();
    settings.extend(job.reading.settings());
    if job.reading.malformed == OnMalformed::Skip {
        settings.insert(OnMalformed::SETTING.to_owned(), job.reading.malformed.word().to_owned());
    }
    settings.extend(job.limit.map(|limit| ("limit".to_owned(), limit.to_string())));
    settings.extend([
        ("column".to_owned(), job.column.clone()),
        ("columns".to_owned(), columns_setting(schema)),
        ("compression".to_owned(), job.codec.as_str().to_owned()),
        ("device".to_owned(), stage.device()),
        ("on-error".to_owned(), spec.on_error.to_string()),
        ("row-group-mb".to_owned(), format!("{}", job.row_group_bytes as f64 / f64::from(1 << 20))),
        ("rows-per-file".to_owned(), part_rows.to_string()),
    ]);
    settings
}

/// Columns and their types, as the manifest records them.
pub(crate) fn columns_setting(schema: &Schema) -> String {
    let columns: Vec<String> = schema.fields().iter().map(|f| format!("{}: {}", f.name(), f.data_type())).collect();
    columns.join(", ")
}
