//! The check of a stream's dataset: whether its objects hold every offset once.

use arrow::{
    array::{AsArray, RecordBatch},
    datatypes::Int64Type,
};

use super::opened::Output;
use crate::{
    error::Result,
    stream::chain::{ChainCheck, ChainProblem, Span, tiling::by_partition},
};

/// The column with the offsets of messages.
const OFFSET: &str = "_offset";

/// Checks the objects of an output by their footers; `None` for an output of another kind.
pub(super) async fn check(output: &Output) -> Result<Option<ChainCheck>> {
    if output.stream.is_none() && output.files.iter().all(|file| file.span.is_none()) {
        return Ok(None);
    }
    let mut check = ChainCheck::default();
    check.problems.extend(output.unnamed.iter().map(|file| ChainProblem::Unnamed { file: file.clone() }));
    let mut spans = Vec::<Span>::new();
    for file in &output.files {
        let name = file.location.to_string();
        match &file.span {
            None => check.problems.push(ChainProblem::Unnamed { file: name }),
            Some(Err(reason)) => check.problems.push(ChainProblem::Footer { file: name, reason: reason.clone() }),
            Some(Ok(span)) => {
                if span.rows != file.rows {
                    check.problems.push(ChainProblem::Rows { file: name, found: file.rows, expected: span.rows });
                }
                spans.push(span.clone());
            }
        }
    }
    for (partition, spans) in by_partition(spans) {
        let (mut genesis, mut head) = (None, None);
        if let Some(stream) = &output.stream {
            (genesis, head) = stream.ends(&partition).await?;
            if genesis.is_none() {
                check.problems.push(ChainProblem::NoGenesis { partition: partition.clone() });
            }
        }
        // One file of a folder says nothing about the others.
        match output.is_folder {
            true => check.add(&partition, spans, genesis, head),
            false => check.add(&partition, spans, None, None),
        }
    }
    Ok(Some(check))
}

/// The offsets of the rows of one object, which go up.
pub(super) struct Offsets<'s> {
    span: &'s Span,
    next: i64,
    is_wrong: bool,
}

impl<'s> Offsets<'s> {
    pub(super) fn new(span: &'s Span) -> Self {
        Self { span, next: span.start, is_wrong: false }
    }

    /// Checks the next rows; returns the first offset that is out of order or outside the range of the object.
    pub(super) fn check(&mut self, rows: &RecordBatch) -> Option<i64> {
        let offsets = rows.column_by_name(OFFSET)?.as_primitive_opt::<Int64Type>()?;
        for offset in offsets.values().iter().copied().filter(|_| !self.is_wrong) {
            if offset < self.next || offset >= self.span.end {
                self.is_wrong = true;
                return Some(offset);
            }
            self.next = offset + 1;
        }
        None
    }
}
