//! What the processes tell each other beside the exchanges, through the key-value store: who they are, that they are alive, that
//! one of them reads or writes files, and why one has failed.
//!
//! A thread makes all calls of the store, so that one that does not answer holds nobody up.

use std::{
    fmt,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicI64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{Cause, CollectiveError};

/// A number that grows while a process reads or writes files.
const WORK: &str = "work";
/// The first failure.
const FAULT: &str = "fault";
/// The number of processes that have left.
const LEFT: &str = "left";
/// Keys per process: its host name, its heartbeats, and the number of exchanges that it has begun.
const HERE: &str = "here";
const BEATS: &str = "beats";
const BEGUN: &str = "begun";
/// Maximum time between two requests to the store.
const BEAT: Duration = Duration::from_secs(1);
/// How long a process waits for news and signs of life, and process 0 for the others to leave.
const PATIENCE: Duration = Duration::from_secs(2);
/// Checks of the heartbeats of the others before one counts as silent: a slow machine delays heartbeats and checks alike.
const LOOKS: usize = 4;
/// Maximum time for these checks, and for process 0 to wait until the others have checked and left.
const LONGEST_LOOK: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(10);
/// Maximum number of processes that are named in an error.
const MOST_NAMES: usize = 8;
/// Maximum size in bytes of the text of a failure.
pub(super) const LONGEST: usize = 4000;

/// A key-value store. Its calls may block.
pub(super) trait Notes: Send + Sync + 'static {
    /// Adds to a number, which is 0 at first, and returns the sum.
    fn add(&self, key: &str, number: i64) -> Result<i64, CollectiveError>;
    /// Sets a value, unless there is one.
    fn first(&self, key: &str, value: &[u8]) -> Result<(), CollectiveError>;
    /// A value, if there is one.
    fn peek(&self, key: &str) -> Result<Option<Vec<u8>>, CollectiveError>;
}

/// The notice board, as a process sees it.
pub(super) struct Board(Arc<Shared>);

struct Shared {
    notes: Box<dyn Notes>,
    rank: usize,
    size: usize,
    /// The store runs in process 0, not in a program of its own.
    has_server: bool,
    beat: Duration,
    /// Parts of this process that read or write files.
    busy: Arc<AtomicUsize>,
    /// Exchanges in which this process waits: then it is not busy.
    waiting: Arc<AtomicUsize>,
    /// Exchanges that this process has begun.
    begun: AtomicI64,
    /// Names of the machines of all processes.
    hosts: OnceLock<Vec<String>>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// The sum of the work of all processes, and when another one was last seen to add to it.
    work: i64,
    worked: Instant,
    /// The failure of another process.
    cause: Option<Cause>,
    /// Why this process fails, to be told to the others.
    own: Option<String>,
    /// Questions to the thread, and how many of them it has answered.
    asked: u64,
    answered: u64,
    is_leaving: bool,
    /// What is known of the others since somebody has asked for signs of life.
    signs: Option<Signs>,
    /// Nobody has the board any more.
    is_dropped: bool,
    /// The thread has ended, because this process has left or the store does not work.
    has_ended: bool,
}

/// What the processes were seen to do, by rank.
#[derive(Debug, Clone, Default)]
struct Signs {
    /// Their first and their last counts of beats.
    beats: Vec<(i64, i64)>,
    /// Exchanges that they have begun.
    begun: Vec<i64>,
    looks: usize,
}

impl Signs {
    fn see(&mut self, beats: &[i64], begun: Vec<i64>) {
        self.looks += 1;
        if self.beats.is_empty() {
            self.beats = beats.iter().map(|&count| (count, count)).collect();
        }
        self.beats.iter_mut().zip(beats).for_each(|((_, last), count)| *last = *count);
        self.begun = begun;
    }

    /// Number of processes that were not seen to live.
    fn silent(&self) -> usize {
        self.beats.iter().filter(|(first, last)| first == last).count()
    }
}

/// Processes that others wait for, if it is known which.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Missing {
    /// They give no sign of life.
    pub(super) silent: Vec<usize>,
    /// They live, and have not begun the exchange in which this process waits.
    pub(super) behind: Vec<usize>,
}

/// While the value lives, this process reads or writes files, and the others wait for it.
#[derive(Debug, Default)]
pub struct Busy(Option<Arc<AtomicUsize>>);

impl Busy {
    fn one_of(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Some(Arc::clone(count)))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        if let Some(count) = &self.0 {
            count.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl fmt::Debug for Board {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Board").field("rank", &self.0.rank).field("size", &self.0.size).finish_non_exhaustive()
    }
}

impl Board {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the system refuses it.
    pub(super) fn start(
        notes: impl Notes,
        (rank, size): (usize, usize),
        has_server: bool,
        limit: Duration,
    ) -> std::io::Result<Self> {
        let state = State {
            work: 0,
            worked: Instant::now(),
            cause: None,
            own: None,
            asked: 0,
            answered: 0,
            is_leaving: false,
            signs: None,
            is_dropped: false,
            has_ended: false,
        };
        let shared = Arc::new(Shared {
            notes: Box::new(notes),
            rank,
            size,
            has_server,
            beat: BEAT.min(limit / 4),
            busy: Arc::default(),
            waiting: Arc::default(),
            begun: AtomicI64::new(0),
            hosts: OnceLock::new(),
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let of_thread = Arc::clone(&shared);
        thread::Builder::new().name("elmo board".to_owned()).spawn(move || of_thread.run())?;
        Ok(Self(shared))
    }

    /// As long as the value lives, the others wait for this process.
    pub(super) fn busy(&self) -> Busy {
        Busy::one_of(&self.0.busy)
    }

    /// An exchange begins. As long as the value lives, this process waits for the others.
    pub(super) fn waiting(&self) -> Busy {
        self.0.begun.fetch_add(1, Ordering::Relaxed);
        Busy::one_of(&self.0.waiting)
    }

    /// Says that this process is there, on this host, and waits for all others, for a time that has begun.
    ///
    /// # Errors
    /// The failure of another process, or those that have not come within the time limit.
    pub(super) fn roll_call(&self, host: &str, began: Instant, limit: Duration) -> Result<(), String> {
        let (shared, mut pause) = (&self.0, PAUSE);
        let key = |rank: usize| format!("{HERE}/{rank}");
        let told = |error: CollectiveError| error.reason;
        shared.notes.first(&key(shared.rank), host.as_bytes()).map_err(told)?;
        let mut hosts: Vec<Option<String>> = vec![None; shared.size];
        loop {
            for (rank, place) in hosts.iter_mut().enumerate().filter(|(_, place)| place.is_none()) {
                let found = shared.notes.peek(&key(rank)).map_err(told)?;
                *place = found.map(|name| String::from_utf8_lossy(&name).into_owned());
            }
            let missing: Vec<usize> = (0..shared.size).filter(|&rank| hosts[rank].is_none()).collect();
            if missing.is_empty() {
                let _ = shared.hosts.set(hosts.into_iter().flatten().collect());
                return Ok(());
            }
            if let Some(cause) = self.cause() {
                return Err(cause.to_string());
            }
            if began.elapsed() > limit {
                return Err(not_here(&missing, &hosts, limit));
            }
            thread::sleep(pause);
            pause = (2 * pause).min(BEAT);
        }
    }

    /// Looks for those that this process waits for, which takes some seconds.
    pub(super) fn missing(&self) -> Missing {
        drop(self.0.ask(|state| state.signs = Some(Signs::default())));
        let started = Instant::now();
        let is_looking = |state: &State| {
            let looks = state.signs.as_ref().map_or(0, |signs| signs.looks);
            let passed = started.elapsed();
            !state.has_ended && (passed < PATIENCE || ((1..LOOKS).contains(&looks) && passed < LONGEST_LOOK))
        };
        while is_looking(&self.0.state()) {
            thread::sleep(PAUSE);
        }
        let state = self.0.state();
        let signs = state.signs.clone().unwrap_or_default();
        let others = (0..self.0.size).filter(|&rank| rank != self.0.rank);
        if state.is_leaving {
            return Missing::default();
        }
        if state.has_ended || signs.beats.is_empty() {
            // The store does not answer.
            let silent = others.filter(|&rank| rank == 0 && self.0.has_server).collect();
            return Missing { silent, behind: Vec::new() };
        }
        let own = self.0.begun.load(Ordering::Relaxed);
        let (silent, alive): (Vec<_>, Vec<_>) = others.partition(|&rank| signs.beats[rank].0 == signs.beats[rank].1);
        Missing { silent, behind: alive.into_iter().filter(|&rank| signs.begun[rank] < own).collect() }
    }

    /// Says of processes that others wait for what is known; `None` when nothing is.
    pub(super) fn describe(&self, missing: &Missing) -> Option<String> {
        let names = |ranks: &[usize]| listed(ranks.iter().map(|&rank| self.name(rank)).collect());
        let parts =
            [(&missing.silent, "no sign of life from "), (&missing.behind, "alive, but not yet in this exchange: ")];
        let parts = parts.into_iter().filter(|(ranks, _)| !ranks.is_empty());
        let text = parts.map(|(ranks, what)| format!("{what}{}", names(ranks))).collect::<Vec<_>>().join("; ");
        Some(text).filter(|text| !text.is_empty())
    }

    /// A process with the name of its machine.
    fn name(&self, rank: usize) -> String {
        match self.0.hosts.get().and_then(|hosts| hosts.get(rank)) {
            Some(host) => format!("process {rank} on {host}"),
            None => format!("process {rank}"),
        }
    }

    /// When another process was last seen to be busy.
    pub(super) fn worked(&self) -> Instant {
        self.0.state().worked
    }

    /// The failure of another process, if it is known here already.
    pub(super) fn cause(&self) -> Option<Cause> {
        self.0.state().cause.clone()
    }

    /// Asks whether another process has failed.
    pub(super) fn look(&self) -> Option<Cause> {
        let state = self.0.ask(|_| ());
        let goal = state.asked;
        self.0.until(state, |state| state.answered >= goal).cause.clone()
    }

    /// Waits for what a process says that is known to have failed.
    pub(super) fn expect(&self) -> Option<Cause> {
        let started = Instant::now();
        loop {
            let found = self.look();
            if found.is_some() || self.0.state().has_ended || started.elapsed() > PATIENCE {
                return found;
            }
            thread::sleep(PAUSE);
        }
    }

    /// Tells the others why this process fails. What the first one tells is the cause.
    pub(super) fn fail(&self, reason: &str) {
        let state = self.0.ask(|state| state.own = Some(reason.to_owned()));
        let goal = state.asked;
        drop(self.0.until(state, |state| state.answered >= goal));
    }

    /// Nothing follows. The process with the store waits until the others have left, for a while.
    pub(super) fn leave(&self) {
        let state = self.0.ask(|state| state.is_leaving = true);
        drop(self.0.within(LONGEST_LOOK + PATIENCE, state, |_| false));
    }
}

impl Drop for Board {
    /// The thread drops the store when it ends. If it waits for an answer, it is left behind.
    fn drop(&mut self) {
        let state = self.0.ask(|state| state.is_dropped = true);
        drop(self.0.until(state, |_| false));
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the thread for something.
    fn ask(&self, what: impl FnOnce(&mut State)) -> MutexGuard<'_, State> {
        let mut state = self.state();
        what(&mut state);
        state.asked += 1;
        self.changed.notify_all();
        state
    }

    /// Waits until something is so or the thread has ended, at most a little longer than the thread may wait itself.
    fn until<'a>(&self, state: MutexGuard<'a, State>, is_so: impl Fn(&State) -> bool) -> MutexGuard<'a, State> {
        self.within(PATIENCE + BEAT, state, is_so)
    }

    /// As [`Shared::until`], at most for this long.
    fn within<'a>(
        &self,
        limit: Duration,
        state: MutexGuard<'a, State>,
        is_so: impl Fn(&State) -> bool,
    ) -> MutexGuard<'a, State> {
        let goes_on = |state: &mut State| !state.has_ended && !is_so(state);
        let waited = self.changed.wait_timeout_while(state, limit, goes_on);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn run(&self) {
        while self.round().is_ok_and(|goes_on| goes_on) {}
        self.state().has_ended = true;
        self.changed.notify_all();
    }

    /// Waits for a question, or until it is time; returns whether anything follows.
    fn round(&self) -> Result<bool, CollectiveError> {
        let (asked, own, is_leaving) = {
            let is_idle = |state: &mut State| state.asked == state.answered;
            let waited = self.changed.wait_timeout_while(self.state(), self.beat, is_idle);
            let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if state.is_dropped {
                return Ok(false);
            }
            (state.asked, state.own.take(), state.is_leaving)
        };
        if let Some(reason) = own {
            self.notes.first(FAULT, note(self.rank, &reason).as_bytes())?;
        }
        if is_leaving {
            return self.farewell().map(|()| false);
        }
        let is_busy = self.busy.load(Ordering::Relaxed) > 0 && self.waiting.load(Ordering::Relaxed) == 0;
        let work = self.notes.add(WORK, i64::from(is_busy))?;
        self.sign_of_life()?;
        let fault = self.notes.peek(FAULT)?.and_then(|note| cause(&note)).filter(|cause| cause.rank != self.rank);
        let mut state = self.state();
        if work > state.work + i64::from(is_busy) {
            state.worked = Instant::now();
        }
        (state.work, state.answered) = (work, asked);
        state.cause = state.cause.take().or(fault);
        self.changed.notify_all();
        Ok(true)
    }

    /// Tells the others that this process lives and how far it is, and asks the same of them if somebody wants to know.
    fn sign_of_life(&self) -> Result<(), CollectiveError> {
        let count = |key: &str, rank: usize, number: i64| self.notes.add(&format!("{key}/{rank}"), number);
        let known = count(BEGUN, self.rank, 0)?;
        count(BEGUN, self.rank, self.begun.load(Ordering::Relaxed) - known)?;
        count(BEATS, self.rank, 1)?;
        if self.state().signs.is_none() {
            return Ok(());
        }
        let all = |key| (0..self.size).map(|rank| count(key, rank, 0)).collect::<Result<Vec<_>, _>>();
        let (beats, begun) = (all(BEATS)?, all(BEGUN)?);
        if let Some(signs) = &mut self.state().signs {
            signs.see(&beats, begun);
        }
        Ok(())
    }

    fn farewell(&self) -> Result<(), CollectiveError> {
        let mut left = self.notes.add(LEFT, 1)?;
        let started = Instant::now();
        let is_server = self.has_server && self.rank == 0;
        let others = self.size - self.state().signs.as_ref().map_or(0, Signs::silent);
        while is_server && left < others as i64 && started.elapsed() < LONGEST_LOOK {
            thread::sleep(PAUSE);
            left = self.notes.add(LEFT, 0)?;
        }
        Ok(())
    }
}

/// Who has not come, and who has.
fn not_here(missing: &[usize], hosts: &[Option<String>], limit: Duration) -> String {
    let name = |(rank, host): (usize, &Option<String>)| host.as_ref().map(|host| format!("process {rank} on {host}"));
    let here: Vec<String> = hosts.iter().enumerate().filter_map(name).collect();
    let (who, have) = (listed(missing.iter().map(|rank| format!("process {rank}")).collect()), has(missing.len()));
    format!("{who} {have} not joined within {} s; those that have: {}", limit.as_secs(), listed(here))
}

fn has(n: usize) -> &'static str {
    if n == 1 { "has" } else { "have" }
}

/// The first names of a list.
fn listed(mut names: Vec<String>) -> String {
    let more = names.len().saturating_sub(MOST_NAMES);
    names.truncate(MOST_NAMES);
    let names = names.join(", ");
    if more == 0 { names } else { format!("{names} and {more} more") }
}

/// The text of a failure in the store.
fn note(rank: usize, reason: &str) -> String {
    let note = format!("{rank}\n{reason}");
    note[..note.floor_char_boundary(LONGEST)].to_owned()
}

fn cause(note: &[u8]) -> Option<Cause> {
    let (rank, reason) = std::str::from_utf8(note).ok()?.split_once('\n')?;
    Some(Cause { rank: rank.parse().ok()?, reason: reason.to_owned() })
}

#[cfg(test)]
pub(super) use self::tests::Memory;

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    type Values = BTreeMap<String, Vec<u8>>;

    /// A store in memory, which does not answer while its number is above 0.
    #[derive(Clone, Default)]
    pub(in super::super) struct Memory(Arc<(Mutex<Values>, AtomicUsize)>);

    impl Memory {
        fn values(&self) -> MutexGuard<'_, Values> {
            while self.0.1.load(Ordering::Relaxed) > 0 {
                thread::sleep(PAUSE);
            }
            self.0.0.lock().unwrap()
        }
    }

    impl Notes for Memory {
        fn add(&self, key: &str, number: i64) -> Result<i64, CollectiveError> {
            let mut values = self.values();
            let sum = values.get(key).map_or(0, |value| i64::from_le_bytes(value[..].try_into().unwrap())) + number;
            values.insert(key.to_owned(), sum.to_le_bytes().to_vec());
            Ok(sum)
        }

        fn first(&self, key: &str, value: &[u8]) -> Result<(), CollectiveError> {
            self.values().entry(key.to_owned()).or_insert_with(|| value.to_vec());
            Ok(())
        }

        fn peek(&self, key: &str) -> Result<Option<Vec<u8>>, CollectiveError> {
            Ok(self.values().get(key).cloned())
        }
    }

    fn boards(size: usize) -> (Memory, Vec<Board>) {
        let notes = Memory::default();
        let start = |rank| Board::start(notes.clone(), (rank, size), true, Duration::from_millis(200)).unwrap();
        (notes.clone(), (0..size).map(start).collect())
    }

    #[test]
    fn the_first_failure_is_the_cause_for_all_others() {
        let (_, boards) = boards(3);
        assert_eq!(boards[0].look(), None);
        boards[1].fail("out of memory");
        boards[2].fail("the connection was closed");
        let cause = Some(Cause { rank: 1, reason: "out of memory".to_owned() });
        assert_eq!((boards[0].look(), boards[2].expect(), boards[1].look()), (cause.clone(), cause, None));
    }

    /// One that waits for others is not seen to work, and no process sees itself.
    #[test]
    fn only_a_process_that_works_is_seen_to_work() {
        let (_, boards) = boards(2);
        let at_first = [boards[0].worked(), boards[1].worked()];
        let waiting = boards[0].waiting();
        let _busy = boards[0].busy();
        thread::sleep(Duration::from_millis(300));
        assert_eq!(boards[1].worked(), at_first[1]);
        drop(waiting);
        let started = Instant::now();
        while boards[1].worked() == at_first[1] {
            assert!(started.elapsed() < Duration::from_secs(30), "the work was not seen");
            thread::sleep(PAUSE);
        }
        assert_eq!(boards[0].worked(), at_first[0]);
    }

    #[test]
    fn a_store_that_does_not_answer_holds_nobody_up() {
        let (notes, boards) = boards(2);
        notes.0.1.store(1, Ordering::Relaxed);
        boards[0].fail("a reason");
        notes.0.1.store(0, Ordering::Relaxed);
        assert_eq!(boards[1].expect().map(|cause| cause.rank), Some(0));
    }

    #[test]
    fn those_that_do_not_come_are_named_with_those_that_do() {
        let (_, boards) = boards(4);
        let call =
            |board: &Board, host: &'static str| board.roll_call(host, Instant::now(), Duration::ZERO).unwrap_err();
        let first = call(&boards[0], "node-a");
        assert_eq!(
            first,
            "process 1, process 2, process 3 have not joined within 0 s; those that have: process 0 on node-a"
        );
        let second = call(&boards[3], "node-b");
        assert!(second.starts_with("process 1, process 2 have not joined"), "{second}");
        assert!(second.ends_with("process 0 on node-a, process 3 on node-b"), "{second}");
        let notes = &boards[0].0.notes;
        ["1", "2"].into_iter().for_each(|rank| notes.first(&format!("{HERE}/{rank}"), b"node-c").unwrap());
        boards[0].roll_call("node-a", Instant::now(), Duration::ZERO).unwrap();
        assert_eq!((boards[0].name(2), boards[3].name(2)), ("process 2 on node-c".to_owned(), "process 2".to_owned()));
        assert_eq!(listed((0..20).map(|n| n.to_string()).collect()), "0, 1, 2, 3, 4, 5, 6, 7 and 12 more");
    }

    /// One has ended without a word, and one lives, but does something else.
    #[test]
    fn those_that_others_wait_for_are_told_from_those_that_wait_too() {
        let (_, mut boards) = boards(4);
        boards[1].fail("only to post the count"); // one exchange fewer than the others
        for rank in [0, 2, 3] {
            drop(boards[rank].waiting());
            boards[rank].look();
        }
        drop(boards.pop());
        let missing = boards[0].missing();
        assert_eq!(missing, Missing { silent: vec![3], behind: vec![1] });
        let text = "no sign of life from process 3; alive, but not yet in this exchange: process 1";
        assert_eq!(boards[0].describe(&missing).unwrap(), text);
        assert_eq!(boards[0].describe(&Missing::default()), None);
    }

    #[test]
    fn without_the_store_process_0_is_missing() {
        let (notes, boards) = boards(2);
        notes.0.1.store(1, Ordering::Relaxed);
        let missing = boards[1].missing();
        notes.0.1.store(0, Ordering::Relaxed);
        assert_eq!(missing, Missing { silent: vec![0], behind: vec![] });
    }

    #[test]
    fn process_0_waits_for_the_others_to_leave() {
        let (notes, mut boards) = boards(2);
        let second = boards.pop().unwrap();
        let first = boards.pop().unwrap();
        let leaving = thread::spawn(move || first.leave());
        second.leave();
        leaving.join().unwrap();
        assert_eq!(notes.add(LEFT, 0).unwrap(), 2);
    }

    #[test]
    fn a_long_reason_is_cut_between_characters() {
        let cut = note(3, &"ä".repeat(LONGEST));
        assert!(cut.len() <= LONGEST && cut.starts_with("3\nää"));
        assert_eq!(cause(b"12\na\nb"), Some(Cause { rank: 12, reason: "a\nb".to_owned() }));
        assert_eq!((cause(b"x\na"), cause(b"1"), cause(b"\xff\na")), (None, None, None));
    }
}
