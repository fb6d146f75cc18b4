//! Faults that tests inject into lanes.

use std::{fmt, sync::Arc};

use super::job::Job;
use crate::model::DeviceError;

/// Methods that tests override to make a device fail; the default methods do nothing.
pub(super) trait Hook: Send + Sync {
    /// Called before a batch runs.
    fn on_batch(&self, _lane: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Called before the check of a device.
    fn on_check(&self, _lane: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Called by a lane that takes a batch, outside of every `catch_unwind` and with the queue locked.
    fn on_take(&self) {}
}

/// The faults of one engine.
#[derive(Clone, Default)]
pub(super) struct Faults(pub(super) Option<Arc<dyn Hook>>);

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Faults").field(&self.0.is_some()).finish()
    }
}

impl Faults {
    /// Besides the hook: a batch that holds the word `room-for-N` fails as if the device had no room for more than `N`
    /// sentences.
    pub(super) fn on_batch(&self, lane: usize, jobs: &[Job]) -> Result<(), DeviceError> {
        let words = jobs.iter().flat_map(|job| job.sentence.words.iter());
        let room = words.filter_map(|word| word.strip_prefix("room-for-")?.parse().ok()).min();
        if room.is_some_and(|room: usize| jobs.len() > room) {
            return Err(DeviceError::OutOfMemory { message: "injected".to_owned() });
        }
        self.0.as_ref().map_or(Ok(()), |hook| hook.on_batch(lane))
    }

    pub(super) fn on_check(&self, lane: usize) -> Result<(), DeviceError> {
        self.0.as_ref().map_or(Ok(()), |hook| hook.on_check(lane))
    }

    pub(super) fn on_take(&self) {
        if let Some(hook) = &self.0 {
            hook.on_take();
        }
    }
}
