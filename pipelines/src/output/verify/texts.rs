//! Where the texts of an output's rows come from: a kept column, or the inputs of the job.

use std::sync::Arc;

use arrow::{
    array::{Array, ArrayRef, RecordBatch, UInt64Array},
    compute::{concat, take},
};

use super::sample::within;
use crate::{
    bulk::manifest::{InputRecord, Job},
    error::{Error, Result},
    output::{
        manifest::Manifest,
        opened::{Output, OutputFile},
        parquet::unreadable,
    },
    source::{self, InputFile, Plan, Reading, Request, Rows, STDIN, Slice},
    stores::{Location, Stores},
};

/// Where the texts of an output come from.
pub(super) enum Texts<'o> {
    /// A column of the output.
    Kept(String),
    /// The inputs of the job, read again.
    Inputs { plan: Arc<Plan>, manifest: &'o Manifest },
}

impl<'o> Texts<'o> {
    /// Finds the texts: in `column`, or in the one that the job embedded.
    pub(super) async fn find(column: Option<&str>, output: &'o Output, stores: &Stores) -> Result<Self> {
        let manifest = output.manifest.as_ref();
        // The output may keep a column `text` that is not the one which was embedded.
        let of_job = manifest.and_then(|manifest| manifest.job.settings.get("column")).map(String::as_str);
        let column = column.or(of_job).unwrap_or("text");
        if output.footer.columns.iter().any(|(name, _)| name == column) {
            return Ok(Self::Kept(column.to_owned()));
        }
        let Some(manifest) = manifest else {
            return Err(no_texts(column, "there is no manifest beside it that names the inputs of the job"));
        };
        let plan = open_inputs(&manifest.job, column, stores).await?;
        Ok(Self::Inputs { plan: Arc::new(plan), manifest })
    }

    /// The texts of one file.
    pub(super) fn of_file(&self, file: &OutputFile) -> Result<FileTexts<'_>> {
        let (plan, manifest) = match self {
            Self::Kept(column) => return Ok(FileTexts::Kept { location: file.location.clone(), column }),
            Self::Inputs { plan, manifest } => (plan, manifest),
        };
        let unknown = |why: &str| Error::check(format!("{}: {why}, so its texts are not known", file.location));
        let part = manifest.entry(file).ok_or_else(|| unknown("not in the manifest of the job"))?;
        if part.counts.skipped > 0 || part.counts.malformed > 0 {
            return Err(unknown("rows were skipped and the texts not kept"));
        }
        if part.counts.rows_out != file.rows {
            let why = format!("has {} rows, but its entry in the manifest says {}", file.rows, part.counts.rows_out);
            return Err(unknown(&why));
        }
        Ok(FileTexts::Inputs { rows: Box::new(Rows::new(Arc::clone(plan), part.start)), read: 0, slice: None })
    }
}

/// The texts of one file of the output, in its order.
pub(super) enum FileTexts<'t> {
    Kept {
        location: Location,
        column: &'t str,
    },
    Inputs {
        rows: Box<Rows>,
        /// Rows of the file before `slice`.
        read: u64,
        slice: Option<Slice>,
    },
}

impl FileTexts<'_> {
    /// The texts of the rows `wanted` of the file, whose columns are `found`. Rows ascend from call to call.
    pub(super) async fn of_rows(&mut self, found: &RecordBatch, wanted: &[u64]) -> Result<ArrayRef> {
        let (rows, read, slice) = match self {
            Self::Kept { location, column } => {
                let texts = found.column_by_name(column).map(Arc::clone);
                return texts.ok_or_else(|| unreadable(location, &format!("no column {column:?}")));
            }
            Self::Inputs { rows, read, slice } => (rows, read, slice),
        };
        let mut parts = Vec::<ArrayRef>::new();
        let last = wanted.last().copied().unwrap_or(0);
        loop {
            if let Some(slice) = slice.as_ref() {
                let picked = within(wanted, *read, slice.len() as u64);
                if !picked.is_empty() {
                    parts.push(take(&slice.text, &UInt64Array::from(picked), None).map_err(elmo::Error::from)?);
                }
            }
            let end = *read + slice.as_ref().map_or(0, |slice| slice.len() as u64);
            if last < end {
                break;
            }
            let short = || Error::check("the inputs of the job have fewer rows than the output: they were changed");
            *slice = Some(rows.next().await?.ok_or_else(short)?);
            *read = end;
        }
        let parts: Vec<&dyn Array> = parts.iter().map(AsRef::as_ref).collect();
        Ok(concat(&parts).map_err(elmo::Error::from)?)
    }
}

fn no_texts(column: &str, reason: &str) -> Error {
    Error::usage(
        format!("the output has no column {column:?}, and {reason}"),
        "name the column of the output that holds the texts with --column, or verify where the inputs of the job are",
    )
}

/// The inputs of the job, if they have not changed.
async fn open_inputs(job: &Job, column: &str, stores: &Stores) -> Result<Plan> {
    if job.inputs.iter().any(|input| input.file == STDIN) {
        return Err(no_texts(column, "the texts came from standard input and were not kept"));
    }
    let names: Vec<String> = job.inputs.iter().map(|input| input.file.clone()).collect();
    let reading = Reading::of_settings(&job.settings);
    let files = source::listing(stores, &names, None, reading).await?.files;
    check_unchanged(&job.inputs, &files)?;
    Ok(Plan::resolve(files, &Request::texts(column)).await?)
}

fn check_unchanged(recorded: &[InputRecord], found: &[InputFile]) -> Result<()> {
    let found: Vec<InputRecord> = found.iter().map(InputRecord::from).collect();
    match recorded.iter().find(|input| !found.contains(*input)) {
        None => Ok(()),
        Some(input) => Err(Error::Input {
            file: input.file.clone(),
            row: None,
            reason: "changed since the job read it, so the texts of the output's rows are not known".into(),
            help: Some("restore the file, including its modification time, or embed again with --keep all".into()),
        }),
    }
}
