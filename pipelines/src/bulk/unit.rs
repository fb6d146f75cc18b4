//! A part that another process computes and writes, but does not publish.
//!
//! Its bytes are those that this process would write: the other one runs the same code, from the same row. A unit has all that the
//! other process needs besides the stage, so one that is lost with its process can be given to another.

use std::{ops::Range, sync::Arc};

use arrow::datatypes::{Schema, SchemaRef};
use futures::future::FutureExt;
use serde::{Deserialize, Serialize};

use super::{
    feed::{End, Until},
    manifest::Counts,
    part::{Filled, check_unchanged},
    partial::OpenPart,
    prepare::Parts,
    run::Run,
};
use crate::{
    error::Result,
    report::Progress,
    sink::{Codec, PartWriter, Staged},
    source::{Mark, Plan, Position, SentPlan},
    stage::Stage,
    stores::{Location, Stores, UploadId},
};

/// A part to be computed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unit {
    /// Number of the part.
    pub number: usize,
    /// Its first row, in the files of `plan`.
    start: Position,
    /// Where a row of the first file begins that is not after `start`.
    mark: Option<Mark>,
    /// The files that have its rows and the one after it.
    plan: SentPlan,
    /// The address of the part.
    file: String,
    /// Input rows of all parts but the last one.
    part_rows: u64,
    limit: Option<u64>,
    window_rows: usize,
    codec: Codec,
    row_group_bytes: u64,
}

/// A part that was computed and waits to be published.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnitDone {
    /// The row after its last one, in the files of the unit.
    pub(super) end: Position,
    /// Whether no row follows.
    pub(super) last: bool,
    pub(super) counts: Counts,
    pub(super) rows_digest: Option<String>,
    pub(super) staged: Staged,
    pub(super) bytes: u64,
    pub(super) sha256: String,
    /// Where the first malformed rows are.
    pub(super) malformed_rows: Vec<String>,
}

impl Unit {
    /// The part with this number, whose first row is `start` of file `files.start`. `mark` may say where a row of that file begins
    /// that is not after it.
    ///
    /// # Errors
    /// [`Error::Usage`](crate::Error::Usage) for standard input, which no other process can read.
    pub(super) fn new(
        parts: &Parts,
        (number, start): (usize, Position),
        mark: Option<Mark>,
        files: Range<usize>,
        part: &Location,
    ) -> Result<Self> {
        Ok(Self {
            number,
            start: Position { file: 0, ..start },
            mark,
            plan: SentPlan::new(&parts.plan, files)?,
            file: part.address(),
            part_rows: parts.part_rows,
            limit: parts.limit,
            window_rows: parts.window_rows,
            codec: parts.codec,
            row_group_bytes: parts.row_group_bytes,
        })
    }

    /// The part as an object of this process's stores.
    ///
    /// # Errors
    /// [`StoreError`](crate::stores::StoreError) when its store cannot be set up.
    pub fn location(&self, stores: &Stores) -> Result<Location> {
        Ok(stores.locate(&self.file)?)
    }

    /// Deletes what an attempt may have written that ended without an answer. If that fails, it stays hidden, or its chunks stay in
    /// the store.
    pub async fn discard(&self, stores: &Stores, attempt: u32, upload: Option<UploadId>) {
        match self.location(stores) {
            Ok(part) => Staged::of_attempt(&part, attempt, upload).discard(&part).await,
            Err(error) => tracing::warn!(file = self.file, %error, "an unfinished file could not be deleted"),
        }
    }

    /// Computes the part and writes it, without its name. `begun` gets the id of the upload before any byte is sent. When the future
    /// is dropped, the caller [discards](Unit::discard) the attempt. At most `memory` bytes of rows are in flight, or one chunk.
    ///
    /// # Errors
    /// As [`super::run()`].
    pub async fn run(
        &self,
        stage: &dyn Stage,
        stores: &Stores,
        (attempt, memory): (u32, u64),
        progress: &dyn Progress,
        begun: impl FnOnce(UploadId),
    ) -> Result<UnitDone> {
        let plan = Arc::new(self.plan.received(stores)?);
        let schema = output_schema(&plan, stage);
        let mut run = Run::of_unit(stage, self.parts(plan, &schema), progress, memory);
        let location = self.location(stores)?;
        let (writer, upload) = PartWriter::staged(location, &schema, &run.encoding(), attempt).await?;
        upload.map(begun);
        let never = std::future::pending::<()>().shared();
        let mut feed = run.feed(run.chunker_at(self.start, self.mark), (self.number, 0), Until::ThisPart);
        let mut open = OpenPart::new(writer, self.start, String::new());
        let filled = match run.fill(&mut feed, &mut open, &never).await {
            Ok(Filled::Complete(end)) => check_unchanged(&run.parts.plan, self.start, end.end).await.map(|()| end),
            Ok(Filled::Nothing | Filled::Stopped(_)) => Err(run.interrupted(0)),
            Err(error) => Err(error),
        };
        let End { end, last } = match filled {
            Ok(end) => end,
            Err(error) => {
                open.writer.abort().await;
                return Err(error);
            }
        };
        let (written, staged) = open.writer.stage(&stage.metadata()).await?;
        Ok(UnitDone {
            end,
            last,
            counts: open.counts,
            rows_digest: open.digest.value(),
            staged,
            bytes: written.bytes,
            sha256: written.sha256,
            malformed_rows: run.malformed_rows,
        })
    }

    fn parts(&self, plan: Arc<Plan>, schema: &SchemaRef) -> Parts {
        Parts {
            plan,
            schema: Arc::clone(schema),
            part_rows: self.part_rows,
            limit: self.limit,
            window_rows: self.window_rows,
            codec: self.codec,
            row_group_bytes: self.row_group_bytes,
        }
    }
}

/// The kept columns, and those that the stage adds.
pub(super) fn output_schema(plan: &Plan, stage: &dyn Stage) -> SchemaRef {
    let kept = plan.kept().fields().iter().map(|field| field.as_ref().clone());
    Arc::new(Schema::new(kept.chain(stage.fields()).collect::<Vec<_>>()))
}
