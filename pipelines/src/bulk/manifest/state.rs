//! The state of an output, as a dry run reports it.

use serde::Serialize;

use super::{
    FOLDER, Job, ManifestError, PARTIAL, check_folder,
    entry::{Counts, Part},
    existing::{Existing, Start},
    overwrite,
};
use crate::{source::Position, stores::Location};

/// The state of an output before a job runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "lowercase")]
pub enum OutputState {
    /// The output is empty.
    New,
    /// Files of an earlier job, which would be removed.
    Overwritten,
    /// Parts of the same job, which would be resumed.
    Begun {
        /// Input rows that are durable: in parts, and those of the open part that were saved.
        rows: u64,
    },
    /// All parts.
    Complete,
}

/// Determines the state of an output as [`Manifest::open`](super::Manifest::open) does, but neither acquires the lock nor
/// changes anything. Inputs with another version are not compared by content.
///
/// # Errors
/// As [`Manifest::open`](super::Manifest::open), except that the lock is not checked.
pub async fn output_state(output: &Location, job: &Job, overwrite: bool) -> Result<OutputState, ManifestError> {
    Ok(survey(output, job, overwrite).await?.state)
}

/// The state of an output, and the inputs that are still to be compared.
pub(in crate::bulk) struct Survey {
    pub(in crate::bulk) state: OutputState,
    pub(in crate::bulk) parts: Vec<Part>,
    /// Indices of inputs whose content has to be compared.
    pub(in crate::bulk) changed_inputs: Vec<usize>,
    /// Saved rows of the open part.
    pub(in crate::bulk) saved: Option<Saved>,
}

/// Rows of the open part that an interrupted run may have saved.
pub(in crate::bulk) struct Saved {
    /// Where they are.
    pub(in crate::bulk) location: Location,
    /// The first row of the part.
    pub(in crate::bulk) start: Position,
    /// SHA-256 of the job, hexadecimal.
    pub(in crate::bulk) job: String,
}

/// As [`output_state`], with the parts.
pub(in crate::bulk) async fn survey(output: &Location, job: &Job, overwrite: bool) -> Result<Survey, ManifestError> {
    let without_parts = |state| Survey { state, parts: Vec::new(), changed_inputs: Vec::new(), saved: None };
    check_folder(output)?;
    let existing = Existing::read(output, &output.child(FOLDER)).await?;
    if overwrite && (existing.has_manifest() || !existing.files.is_empty()) {
        return overwrite::own_parts(output, &existing, job).await.map(|_| without_parts(OutputState::Overwritten));
    }
    let Start::Resume { parts, continuation, .. } = existing.start(job).await? else {
        return Ok(without_parts(OutputState::New));
    };
    let is_last = parts.last().and_then(Part::entry).is_some_and(|part| part.last);
    let state = if is_last && parts.iter().all(Part::is_durable) {
        OutputState::Complete
    } else {
        let durable = parts.iter().filter(|part| part.is_durable()).filter_map(Part::entry);
        OutputState::Begun { rows: durable.collect::<Counts>().rows_in }
    };
    // What was computed under another record of the job is not used.
    let is_usable = existing.has_partial && existing.job.as_ref() == Some(&continuation.job);
    let next = parts.last().map_or(Some(Position::default()), |part| part.entry().map(|entry| entry.end));
    let location = output.child(FOLDER).child(PARTIAL);
    let saved = next.filter(|_| is_usable).map(|start| Saved { location, start, job: continuation.job.digest() });
    Ok(Survey { state, parts, changed_inputs: continuation.changed, saved })
}
