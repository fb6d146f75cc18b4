//! Whether the process is alive, and whether it is ready.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

use crate::stream::clock;

/// What probes ask for. Alive: the thread that polls the broker polls. Ready: there is nothing left to wait for.
#[derive(Debug)]
pub struct Health {
    /// Times are milliseconds since this one.
    epoch: Instant,
    /// How long the polling thread may be silent.
    limit: Duration,
    /// When the polling thread polled last, plus 1; 0 while there is none.
    polled: AtomicU64,
    model: AtomicBool,
    store: AtomicBool,
    assigned: AtomicBool,
    stopping: AtomicBool,
}

impl Health {
    /// A process that has just started. It is alive until its polling thread has been silent for `limit`.
    pub fn new(limit: Duration) -> Self {
        Self {
            epoch: clock::now(),
            limit,
            polled: AtomicU64::new(0),
            model: AtomicBool::new(false),
            store: AtomicBool::new(false),
            assigned: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
        }
    }

    /// The polling thread polled.
    pub fn polled(&self) {
        self.polled.store(self.now() + 1, Relaxed);
    }

    /// The polling thread ended as it should.
    pub fn poll_ended(&self) {
        self.polled.store(0, Relaxed);
    }

    /// The model is loaded.
    pub fn model_loaded(&self) {
        self.model.store(true, Relaxed);
    }

    /// The store, or the output topic, was found to work.
    pub fn store_probed(&self) {
        self.store.store(true, Relaxed);
    }

    /// The group has given this process an assignment, which is empty when there are more processes than partitions.
    pub fn assigned(&self) {
        self.assigned.store(true, Relaxed);
    }

    /// The process finishes its work and ends.
    pub fn stopping(&self) {
        self.stopping.store(true, Relaxed);
    }

    /// Whether the process finishes its work.
    #[cfg(test)]
    pub(in crate::stream) fn is_stopping(&self) -> bool {
        self.stopping.load(Relaxed)
    }

    /// Whether the process is alive.
    ///
    /// # Errors
    /// What is wrong, in one line.
    pub fn live(&self) -> Result<(), String> {
        let polled = self.polled.load(Relaxed);
        if polled == 0 {
            return Ok(());
        }
        let silent = Duration::from_millis((self.now() + 1).saturating_sub(polled));
        match silent > self.limit {
            true => Err(format!("the broker was last polled {} s ago", silent.as_secs())),
            false => Ok(()),
        }
    }

    /// Whether the process works.
    ///
    /// # Errors
    /// What it waits for, in one line.
    pub fn ready(&self) -> Result<(), String> {
        let waits = [
            (self.stopping.load(Relaxed), "the process is stopping"),
            (!self.model.load(Relaxed), "the model is not loaded yet"),
            (!self.store.load(Relaxed), "the output is not probed yet"),
            (!self.assigned.load(Relaxed), "the group has not assigned partitions yet"),
        ];
        match waits.iter().find(|(waits, _)| *waits) {
            Some((_, reason)) => Err((*reason).to_owned()),
            None => self.live(),
        }
    }

    fn now(&self) -> u64 {
        let since = clock::now().saturating_duration_since(self.epoch);
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_step_by_step() {
        let health = Health::new(Duration::from_secs(3600));
        let steps: [fn(&Health); 4] = [Health::model_loaded, Health::store_probed, Health::assigned, Health::stopping];
        let answers = steps.map(|step| {
            let answer = health.ready();
            step(&health);
            answer.map_err(|reason| reason.split(' ').nth(1).unwrap().to_owned())
        });
        assert_eq!(answers, [Err("model".into()), Err("output".into()), Err("group".into()), Ok(())]);
        assert_eq!((health.ready(), health.live()), (Err("the process is stopping".to_owned()), Ok(())));
    }

    #[test]
    fn a_silent_thread_is_not_alive() {
        let health = Health::new(Duration::from_millis(10));
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(health.live(), Ok(()), "it may still load the model");
        health.polled();
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!(health.live(), Err("the broker was last polled 0 s ago".to_owned()));
        health.poll_ended();
        assert_eq!(health.live(), Ok(()));
    }
}
