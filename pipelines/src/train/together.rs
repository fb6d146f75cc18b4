//! What the processes of a run agree on: whether all of them succeeded, and what only process 0 knows.
//!
//! All processes make the same calls in the same order. So a process that fails tells the others at the next call, instead of
//! leaving them to wait.

use elmo::train::{Cause, Group, TrainError};
use serde::{Serialize, de::DeserializeOwned};

use super::error::TrainFault;
use crate::{
    error::{Error, Result},
    redact::redact,
};

/// What a process wants to do next. The greatest one of all processes is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Wish {
    GoOn,
    Fail,
    /// A signal: it comes before a failure, which can be repeated.
    Stop,
}

/// What all processes do, and the first one that wanted it.
pub(super) fn agree(group: &Group, wish: Wish) -> Result<(Wish, usize)> {
    let wishes = group.gather(&[wish as i64]).map_err(lost)?;
    let of = |wish: Wish| wishes.iter().position(|other| *other == [wish as i64]);
    let found = [Wish::Stop, Wish::Fail].into_iter().find_map(|wish| of(wish).map(|rank| (wish, rank)));
    Ok(found.unwrap_or((Wish::GoOn, 0)))
}

/// The outcome of this process, unless another one has failed. Of several that have failed in the same way, process 0 says
/// why.
pub(super) fn together<T>(group: &Group, outcome: Result<T>) -> Result<T> {
    if group.is_single() {
        return outcome;
    }
    let wish = if outcome.is_ok() { Wish::GoOn } else { Wish::Fail };
    match agree(group, wish) {
        Ok((Wish::GoOn, _)) => outcome,
        Ok((_, rank)) if rank == group.rank() => outcome,
        Ok((_, rank)) if outcome.is_ok() || rank == 0 => Err(elsewhere(rank)),
        Ok(_) => outcome,
        // The first error is the cause.
        Err(error) => outcome.and(Err(error)),
    }
}

/// What process 0 has, in all processes.
pub(super) fn shared<T: Serialize + DeserializeOwned>(group: &Group, own: T) -> Result<T> {
    if group.is_single() {
        return Ok(own);
    }
    let wrong = |e: serde_json::Error| Error::Failed(format!("what process 0 has sent cannot be read: {e}"));
    let bytes = if group.is_first() { serde_json::to_vec(&own).map_err(wrong)? } else { Vec::new() };
    serde_json::from_slice(&group.broadcast_bytes(bytes).map_err(lost)?).map_err(wrong)
}

/// The error of a process whose run has failed elsewhere.
pub(super) fn elsewhere(rank: usize) -> Error {
    TrainFault::Elsewhere { rank, reason: None }.into()
}

/// Ends the exchange with the others: in order if all have come to the same end. Otherwise this process says why it fails, or
/// hears why another one has.
pub(super) fn concluded<T>(group: &Group, outcome: Result<T>) -> Result<T> {
    let Err(error) = outcome else {
        group.finish();
        return outcome;
    };
    let cause = match error.module() {
        Some(TrainFault::Interrupted { .. }) => {
            group.finish();
            return Err(error);
        }
        Some(TrainFault::Elsewhere { .. }) => group.cause(),
        Some(TrainFault::Step(TrainError::Collective(error))) => error.cause.clone(),
        _ => {
            group.fail(&redact(&error.to_string()));
            return Err(error);
        }
    };
    group.abandon();
    Err(cause.map_or(error, |Cause { rank, reason }| TrainFault::Elsewhere { rank, reason: Some(reason) }.into()))
}

fn lost(error: elmo::train::CollectiveError) -> Error {
    TrainFault::Step(TrainError::Collective(error)).into()
}
