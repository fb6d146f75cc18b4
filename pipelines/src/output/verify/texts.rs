//! Where the texts of an output's rows come from: a kept column, or the inputs of the job.

use std::sync::Arc;

use arrow::{
    array::{Array, ArrayRef, RecordBatch, UInt64Array},
    compute::{concat, take},
};

use super::sample::within;
use crate::{
    bulk::{
        columns_setting,
        manifest::{InputRecord, Job},
        rows_are_unchanged,
    },
    error::{Error, Result},
    output::{
        manifest::Manifest,
        opened::{Output, OutputFile},
        parquet::unreadable,
    },
    source::{self, InputFile, Keep, KeptTypes, Plan, Reading, Request, Rows, STDIN, Slice, SourceError, types},
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
    /// Finds the texts: in `column`, or in the one that the job read. The last `added` columns are not kept ones.
    pub(super) async fn find(column: Option<&str>, output: &'o Output, added: usize, stores: &Stores) -> Result<Self> {
        let manifest = output.manifest.as_ref();
        // The output may keep a column `text` that is not the one which was embedded.
        let of_job = manifest.and_then(|manifest| manifest.job().settings.get("column")).map(String::as_str);
        let column = column.or(of_job).unwrap_or("text");
        if output.footer.columns.iter().any(|(name, _)| name == column) {
            return Ok(Self::Kept(column.to_owned()));
        }
        let Some(manifest) = manifest else {
            let reason = match output.files.iter().any(|file| file.span.is_some()) {
                true => "a stream does not read its messages again: elmo inspect checks everything but the numbers",
                false => "there is no manifest beside it that names the inputs of the job",
            };
            return Err(no_texts(column, reason));
        };
        let kept = output.footer.columns.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>();
        let kept = kept[..kept.len().saturating_sub(added)].to_vec();
        let plan = open_inputs(manifest, column, &kept, stores).await?;
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
                let texts = texts.ok_or_else(|| unreadable(location, &format!("no column {column:?}")))?;
                return match source::is_text(texts.data_type()) {
                    true => Ok(texts),
                    false => {
                        let found = types::shown(texts.data_type());
                        let (file, column) = (location.to_string(), (*column).to_owned());
                        Err(SourceError::NotText { file, column, found }.into())
                    }
                };
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

/// The inputs of the job, if they hold the rows that it read: as for a job that is resumed, another version of a file is
/// compared by content.
async fn open_inputs(manifest: &Manifest, column: &str, kept: &[&str], stores: &Stores) -> Result<Plan> {
    let job = manifest.job();
    if job.inputs.iter().any(|input| input.file == STDIN) {
        return Err(no_texts(column, "the texts came from standard input and were not kept"));
    }
    let names: Vec<String> = job.inputs.iter().map(|input| input.file.clone()).collect();
    let reading = Reading::of_settings(&job.settings);
    let files = source::listing(stores, &names, None, reading).await?.files;
    let found: Vec<InputRecord> = files.iter().map(InputRecord::from).collect();
    let changed = job.changed_inputs(&found);
    let is_same = match &changed {
        None => false,
        Some(changed) if changed.is_empty() => true,
        Some(changed) => match as_read(job, &files, kept).await? {
            Some(plan) => rows_are_unchanged(&Arc::new(plan), manifest.entries(), changed).await?,
            None => false,
        },
    };
    match is_same {
        true => Ok(Plan::resolve(files, &Request::texts(column)).await?),
        false => Err(changed_since(job, &found)),
    }
}

/// The rows as the job read them, with the kept columns in their types, because the digests are of all these; `None` when
/// the files have no such columns any more.
async fn as_read(job: &Job, files: &[InputFile], kept: &[&str]) -> Result<Option<Plan>> {
    let (Some(column), Some(columns)) = (job.settings.get("column"), job.settings.get("columns")) else {
        return Ok(None);
    };
    let keep = Keep::Columns(kept.iter().map(ToString::to_string).collect());
    for types in [KeptTypes::Guess, KeptTypes::Strings] {
        let request = Request { keep: keep.clone(), types, ..Request::texts(column) };
        let plan = Plan::resolve(files.to_vec(), &request).await?;
        let rest = columns.strip_prefix(&columns_setting(plan.kept()));
        if rest.is_some_and(|rest| kept.is_empty() || rest.starts_with(", ")) {
            return Ok(Some(plan));
        }
    }
    Ok(None)
}

fn changed_since(job: &Job, found: &[InputRecord]) -> Error {
    let changed = job.inputs.iter().find(|input| !found.contains(*input));
    Error::Input {
        file: changed.map(|input| input.file.clone()).unwrap_or_default(),
        row: None,
        reason: "changed since the job read it, so the texts of the output's rows are not known".into(),
        help: Some("restore the file, or embed again with --keep all".into()),
    }
}
