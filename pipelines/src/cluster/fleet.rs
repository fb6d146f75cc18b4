//! The workers of a bulk job: which of them is free, which was lost, and which is back.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::sync::Notify;
use url::Url;

use super::{
    error::ClusterError,
    members::{Member, Workers},
    peers::{Peers, name_of},
};

/// Units that a worker computes at once: the next one is read while one is embedded.
const UNITS: usize = 2;
/// How long a worker that was lost gets no units, the first time and at most.
const BACK_OFF: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];
/// Interval at which the list of workers is read again.
const LIST_INTERVAL: Duration = Duration::from_secs(30);
/// Interval of looks for a free worker, when nothing else happens.
const LOOK: Duration = Duration::from_secs(1);
/// How long a job goes on without any worker.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// See the module.
pub(super) struct Fleet {
    workers: Workers,
    pub(super) peers: Arc<Peers>,
    crew: Mutex<Crew>,
    /// Something has changed.
    changed: Notify,
    attempts: AtomicU32,
}

struct Crew {
    seats: Vec<Seat>,
    asked: Instant,
    /// When a worker was last there.
    alive: Instant,
}

/// A worker.
struct Seat {
    member: Member,
    units: usize,
    /// No units before then.
    lost_until: Option<Instant>,
    losses: u32,
}

impl Seat {
    fn new(member: Member) -> Self {
        Self { member, units: 0, lost_until: None, losses: 0 }
    }

    fn lose(&mut self, now: Instant) {
        self.lost_until = Some(now + BACK_OFF[0].saturating_mul(1 << self.losses.min(5)).min(BACK_OFF[1]));
        self.losses += 1;
    }
}

/// A unit's place at a worker.
pub(super) struct Place<'f> {
    fleet: &'f Fleet,
    pub(super) url: Url,
    pub(super) id: String,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if let Some(seat) = self.fleet.crew().seats.iter_mut().find(|seat| seat.member.greeting.id == self.id) {
            seat.units = seat.units.saturating_sub(1);
        }
        self.fleet.changed.notify_waiters();
    }
}

impl Fleet {
    /// Asks all workers, now and from now on.
    ///
    /// # Errors
    /// [`ClusterError::NoWorkers`] if none answers, [`ClusterError::Refused`] if one refuses.
    pub(super) async fn new(workers: Workers, peers: Arc<Peers>) -> Result<Arc<Self>, ClusterError> {
        let members = workers.members(&peers).await?;
        let seats = members.iter().cloned().map(Seat::new).collect();
        let now = Instant::now();
        let crew = Mutex::new(Crew { seats, asked: now, alive: now });
        let first = uuid::Uuid::new_v4().as_fields().0;
        let fleet = Arc::new(Self { workers, peers, crew, changed: Notify::new(), attempts: AtomicU32::new(first) });
        tokio::spawn(watch(Arc::downgrade(&fleet)));
        Ok(fleet)
    }

    fn crew(&self) -> MutexGuard<'_, Crew> {
        self.crew.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Units that all workers compute at once.
    pub(super) fn at_once(&self) -> usize {
        let crew = self.crew();
        UNITS * crew.seats.iter().filter(|seat| seat.lost_until.is_none()).count().max(1)
    }

    /// A number for the next attempt at a unit.
    pub(super) fn attempt(&self) -> u32 {
        self.attempts.fetch_add(1, Ordering::Relaxed)
    }

    /// Waits for a worker that is free, one with the fewest units. Those in `avoid` get it only if there is no other.
    ///
    /// # Errors
    /// [`ClusterError::NoWorkers`] if no worker was there for [`PATIENCE`]; those of the list.
    pub(super) async fn place(&self, avoid: &[String]) -> Result<Place<'_>, ClusterError> {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if let Some(place) = self.free(avoid) {
                return Ok(place);
            }
            if self.crew().alive.elapsed() > PATIENCE {
                let reasons = format!("none was there for {} s", PATIENCE.as_secs());
                return Err(ClusterError::NoWorkers { reasons });
            }
            let _ = tokio::time::timeout(LOOK, changed).await;
        }
    }

    fn free(&self, avoid: &[String]) -> Option<Place<'_>> {
        let mut crew = self.crew();
        let is_alone =
            !crew.seats.iter().any(|seat| seat.lost_until.is_none() && !avoid.contains(&seat.member.greeting.id));
        let free = crew.seats.iter_mut().filter(|seat| {
            seat.lost_until.is_none() && seat.units < UNITS && (is_alone || !avoid.contains(&seat.member.greeting.id))
        });
        let seat = free.min_by_key(|seat| seat.units)?;
        seat.units += 1;
        let (url, id) = (seat.member.url.clone(), seat.member.greeting.id.clone());
        crew.alive = Instant::now();
        Some(Place { fleet: self, url, id })
    }

    /// Notes that a worker was lost, or is about to end.
    pub(super) fn lost(&self, place: &Place<'_>, reason: &str) {
        let mut crew = self.crew();
        let Some(seat) = crew.seats.iter_mut().find(|seat| seat.member.greeting.id == place.id) else { return };
        if seat.lost_until.is_none() {
            tracing::warn!("the worker at {} was lost: {reason}", name_of(&place.url));
            seat.lose(Instant::now());
            // Up to now there was one.
            crew.alive = Instant::now();
        }
    }

    /// Notes that a worker has computed something.
    pub(super) fn worked(&self, place: &Place<'_>) {
        if let Some(seat) = self.crew().seats.iter_mut().find(|seat| seat.member.greeting.id == place.id) {
            seat.losses = 0;
        }
    }

    /// Asks all workers again if one that was lost may be back, or the list may have changed.
    async fn refresh(&self) {
        {
            let mut crew = self.crew();
            let now = Instant::now();
            let may_be_back = crew.seats.iter().any(|seat| seat.lost_until.is_some_and(|until| until <= now));
            let is_old = now - crew.asked > LIST_INTERVAL;
            if crew.seats.iter().any(|seat| seat.lost_until.is_none()) {
                crew.alive = now;
            }
            if !(may_be_back || is_old) {
                return;
            }
            crew.asked = now;
        }
        let answers = match self.workers.ask(&self.peers, false).await {
            Ok(answers) => answers,
            Err(reason) => return tracing::warn!("the workers cannot be listed again: {reason}"),
        };
        let mut members = Vec::new();
        for (url, answer) in answers {
            match answer {
                Ok(greeting) if greeting.stopping => {}
                Ok(greeting) => members.push(Member { url, greeting }),
                // It is known to be lost.
                Err(ClusterError::Lost { .. }) => {}
                Err(refused) => tracing::warn!("going on without a worker: {refused}"),
            }
        }
        let mut crew = self.crew();
        let now = Instant::now();
        for member in &members {
            match crew.seats.iter_mut().find(|seat| seat.member.greeting.id == member.greeting.id) {
                Some(seat) => {
                    if seat.lost_until.is_some_and(|until| until <= now) {
                        tracing::info!("the worker at {} is back", name_of(&member.url));
                        seat.lost_until = None;
                    }
                }
                None => {
                    tracing::info!("the worker at {} has joined", name_of(&member.url));
                    crew.seats.push(Seat::new(member.clone()));
                }
            }
        }
        for seat in &mut crew.seats {
            if seat.lost_until.is_some_and(|until| until <= now) {
                seat.lose(now);
            }
        }
        // One that was restarted at the same address is another worker.
        crew.seats.retain(|seat| {
            seat.lost_until.is_none()
                || members.iter().any(|member| member.greeting.id == seat.member.greeting.id)
                || !members.iter().any(|member| member.url == seat.member.url)
        });
        drop(crew);
        self.changed.notify_waiters();
    }
}

/// Looks after the workers as long as the job goes on.
async fn watch(fleet: Weak<Fleet>) {
    loop {
        tokio::time::sleep(LOOK).await;
        let Some(fleet) = fleet.upgrade() else { return };
        fleet.refresh().await;
    }
}
