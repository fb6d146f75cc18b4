//! Runs a job whose parts are computed by other processes; this one reads no row and publishes what they have written.
//!
//! ```text
//! count the rows of all files   so that the first row of each part is known
//! compute parts                 several at once, by whoever is free
//! publish them in order         as a job in one process does: the manifest never has gaps
//! ```

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use futures::{
    StreamExt, TryStreamExt,
    future::{BoxFuture, FutureExt, Shared},
    stream::{self, FuturesUnordered},
};

use super::{
    manifest::{Manifest, Part, PartEntry},
    run::{MAX_NAMED, Run},
    unit::{Unit, UnitDone},
};
use crate::{
    crash::bulk as crash,
    error::{Error, Result},
    source::{Mark, Position, SentPlan, SourceError},
};

/// Interval of progress updates.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);
/// Limit of unpublished units, as a multiple of those that run at a time.
const AHEAD: usize = 4;

/// Unpublished files that are deleted at the same time.
const DISCARDS: usize = 32;

/// Other processes that compute parts.
#[async_trait]
pub trait Units: Send + Sync {
    /// How many units they compute at once.
    fn at_once(&self) -> usize;

    /// Number of rows of the only file of a plan, and where some of them begin.
    ///
    /// # Errors
    /// As [`super::run()`], also if no process is left.
    async fn count(&self, plan: SentPlan) -> Result<(u64, Vec<Mark>)>;

    /// Computes a part. A unit that is lost with its process is given to another one. What is written of it is deleted unless it is
    /// returned.
    ///
    /// # Errors
    /// As [`super::run()`], also if no process is left.
    async fn run(&self, unit: &Unit, done: &UnitProgress) -> Result<Computed>;
}

/// A part that was computed.
pub struct Computed {
    /// What was written.
    pub done: UnitDone,
    /// As long as this is kept, the other process keeps what it has written. It deletes what was not published then.
    pub kept: Box<dyn Send>,
}

impl fmt::Debug for Computed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Computed").field("done", &self.done).finish_non_exhaustive()
    }
}

/// How far a unit is.
#[derive(Debug, Default)]
pub struct UnitProgress {
    /// Rows that are computed.
    pub rows: AtomicU64,
    /// Tokens given to the biLM for them.
    pub tokens: AtomicU64,
}

/// A part that is to be computed.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Todo {
    number: usize,
    start: Position,
    /// The last known start of a row in the file of `start` that is not after `start`.
    mark: Option<Mark>,
    /// Files that have its rows, and the row after it.
    files: Range<usize>,
    /// Where it must end, if that is known: at this row, or, `None`, behind all rows.
    next: Option<Option<Position>>,
}

/// A unit that ended.
struct Ended {
    todo: Todo,
    computed: Result<Computed>,
}

/// Running units, and completed ones that wait for earlier ones.
struct Window<'u> {
    todo: VecDeque<Todo>,
    /// Numbers of the units that have begun and are not published, in order.
    begun: VecDeque<usize>,
    running: FuturesUnordered<BoxFuture<'u, Ended>>,
    progress: BTreeMap<usize, Arc<UnitProgress>>,
    ended: BTreeMap<usize, Ended>,
}

impl<'j> Run<'j> {
    /// As [`Run::run`], by other processes.
    pub(super) async fn elsewhere(
        &mut self,
        units: &dyn Units,
        manifest: &mut Manifest,
        stop: &Shared<impl Future<Output = ()>>,
    ) -> Result<()> {
        self.seen.rows = self.resumed().rows_in;
        // Where a part begins may be known only when the one before it is restored.
        loop {
            let damaged = self.damaged(manifest);
            if damaged.is_empty() {
                break;
            }
            self.compute(units, damaged, manifest, stop).await?;
        }
        if let Some(from) = manifest.position() {
            let todo = tokio::select! {
                biased;
                () = stop.clone() => return Err(self.interrupted(manifest.durable_totals().rows_in)),
                todo = self.todo(units, manifest.parts().len(), from) => todo?,
            };
            self.seen.rows_total = Some(manifest.durable_totals().rows_in + todo.1);
            self.compute(units, todo.0, manifest, stop).await?;
        }
        crash::before_done();
        Ok(manifest.finish().await?)
    }

    /// Lost and damaged parts whose first row is known: at least one, if there are any.
    fn damaged(&self, manifest: &Manifest) -> Vec<Todo> {
        let files = self.parts.plan.files().len();
        let todo = |number| {
            let start = manifest.start_of(number)?;
            let entry = manifest.parts()[number].entry();
            let next = manifest.parts().get(number + 1).and_then(Part::entry).map(|next| next.start);
            let end = entry.map(|entry| entry.end).or(next);
            let last = end.map_or(files, |end| (end.file + 1).min(files));
            Some(Todo { number, start, mark: None, files: start.file..last.max(start.file), next: None })
        };
        manifest.damaged().into_iter().filter_map(todo).collect()
    }

    /// The parts from part `number` on, which begins at `from`, and the number of their rows.
    async fn todo(&self, units: &dyn Units, number: usize, from: Position) -> Result<(Vec<Todo>, u64)> {
        let files = self.parts.plan.files().len();
        let counts = (from.file..files).map(|file| async move {
            let plan = SentPlan::new(&self.parts.plan, file..file + 1)?;
            units.count(plan).await
        });
        let mut counts = std::pin::pin!(stream::iter(counts).buffered(units.at_once().max(1)));
        let limit = self.parts.rows_left(number);
        let (mut rows, mut marks, mut total) = (Vec::new(), Vec::new(), 0_u64);
        while limit.is_none_or(|limit| total < from.row.saturating_add(limit))
            && let Some((count, of_file)) = counts.try_next().await?
        {
            total += count;
            rows.push(count);
            marks.push(of_file);
        }
        let left = total.saturating_sub(from.row).min(limit.unwrap_or(u64::MAX));
        let is_limited = limit.is_some_and(|limit| limit <= left);
        let mut parts = divide(&rows, (number, from), (self.parts.part_rows, left), (files, is_limited));
        for part in &mut parts {
            let of_file = marks.get(part.start.file - from.file).map(Vec::as_slice).unwrap_or_default();
            let after = of_file.partition_point(|mark| mark.row <= part.start.row);
            part.mark = after.checked_sub(1).map(|before| of_file[before]);
        }
        Ok((parts, left))
    }

    /// Has parts computed and publishes them in order.
    async fn compute(
        &mut self,
        units: &dyn Units,
        todo: Vec<Todo>,
        manifest: &mut Manifest,
        stop: &Shared<impl Future<Output = ()>>,
    ) -> Result<()> {
        let mut window = Window {
            todo: todo.into(),
            begun: VecDeque::new(),
            running: FuturesUnordered::new(),
            progress: BTreeMap::new(),
            ended: BTreeMap::new(),
        };
        let outcome = self.publish_all(units, &mut window, manifest, stop).await;
        // Those under way delete what they have written.
        drop(window.running);
        let ended = window.ended.into_iter().filter_map(|(number, ended)| Some((number, ended.computed.ok()?)));
        let discarded = ended.map(|(number, computed)| {
            let part = manifest.part(number);
            async move { computed.done.staged.discard(&part).await }
        });
        stream::iter(discarded).for_each_concurrent(DISCARDS, |discarded| discarded).await;
        outcome
    }

    async fn publish_all<'u>(
        &mut self,
        units: &'u dyn Units,
        window: &mut Window<'u>,
        manifest: &mut Manifest,
        stop: &Shared<impl Future<Output = ()>>,
    ) -> Result<()> {
        // When an interrupted job no longer waits.
        let mut until: Option<Instant> = None;
        loop {
            while until.is_none() && window.has_room(units.at_once().max(1)) {
                let Some(todo) = window.todo.pop_front() else { break };
                let (first, part) = ((todo.number, todo.start), manifest.part(todo.number));
                let unit = Unit::new(&self.parts, first, todo.mark, todo.files.clone(), &part)?;
                window.begin(units, unit, todo);
            }
            while let Some(Ended { todo, computed }) = window.next_in_order() {
                let Computed { done, kept } = computed?;
                self.publish(todo, done, manifest).await?;
                drop(kept);
            }
            if window.running.is_empty() && (window.todo.is_empty() || until.is_some()) {
                break;
            }
            tokio::select! {
                biased;
                () = stop.clone(), if until.is_none() => until = Some(Instant::now() + self.grace),
                Some(ended) = window.running.next() => window.end(ended),
                () = tokio::time::sleep(PROGRESS_INTERVAL) => {}
            }
            self.report(window, manifest);
            if until.is_some_and(|until| until <= Instant::now()) {
                break;
            }
        }
        // An interruption while the last parts were computed has cut off nothing.
        match window.todo.is_empty() && window.begun.is_empty() {
            true => Ok(()),
            false => Err(self.interrupted(manifest.durable_totals().rows_in)),
        }
    }

    fn report(&mut self, window: &Window<'_>, manifest: &Manifest) {
        let under_way = |number: &dyn Fn(&UnitProgress) -> &AtomicU64| -> u64 {
            window.progress.values().map(|unit| number(unit).load(Ordering::Relaxed)).sum()
        };
        let (before, durable) = (self.resumed(), manifest.durable_totals());
        self.seen.rows = durable.rows_in.max(before.rows_in) + under_way(&|unit| &unit.rows);
        self.seen.tokens = durable.tokens.saturating_sub(before.tokens) + under_way(&|unit| &unit.tokens);
        self.seen.padded_tokens = self.seen.tokens;
        self.progress.update(&self.seen);
    }

    /// Publishes a part, for the first time or again, and writes its entry.
    async fn publish(&mut self, todo: Todo, done: UnitDone, manifest: &mut Manifest) -> Result<()> {
        let Todo { number, start, files, next, .. } = todo;
        let UnitDone { last, counts, rows_digest, staged, bytes, sha256, .. } = done;
        let (part, file) = (manifest.part(number), manifest.part_file(number));
        let end = Position { file: files.start + done.end.file, ..done.end };
        let prepared = match next {
            Some(next) if next.map_or(!last, |next| last || next != end) => Err(self.changed(end)),
            _ => manifest.prepare(number, end, rows_digest.as_deref()).await.map_err(Error::from),
        };
        if let Err(error) = prepared {
            staged.discard(&part).await;
            return Err(error);
        }
        staged.publish(&part, manifest.fence()).await?;
        crash::after_upload_before_manifest();
        manifest.hold_published(&file).await?;
        let named = MAX_NAMED.saturating_sub(self.malformed_rows.len());
        self.malformed_rows.extend(done.malformed_rows.into_iter().take(named));
        let entry = PartEntry { file, start, end, last, bytes, sha256, rows_digest, counts };
        if number < manifest.parts().len() {
            return self.restore(manifest, number, entry).await;
        }
        manifest.append(entry).await?;
        crash::after_manifest();
        Ok(manifest.remove_partial().await?)
    }

    /// A file has other rows than when they were counted.
    fn changed(&self, at: Position) -> Error {
        let file = self.parts.plan.files().nth(at.file).or(self.parts.plan.files().last());
        SourceError::Changed { file: file.map(ToString::to_string).unwrap_or_default() }.into()
    }
}

impl<'u> Window<'u> {
    fn has_room(&self, at_once: usize) -> bool {
        // After an error no later unit is of use.
        self.running.len() < at_once
            && self.begun.len() < AHEAD * at_once
            && self.ended.values().all(|ended| ended.computed.is_ok())
    }

    fn begin(&mut self, units: &'u dyn Units, unit: Unit, todo: Todo) {
        let progress = Arc::new(UnitProgress::default());
        self.begun.push_back(todo.number);
        self.progress.insert(todo.number, Arc::clone(&progress));
        self.running.push(
            async move {
                let computed = units.run(&unit, &progress).await;
                Ended { todo, computed }
            }
            .boxed(),
        );
    }

    fn end(&mut self, ended: Ended) {
        self.ended.insert(ended.todo.number, ended);
    }

    /// The unit that is to be published next, if it has ended.
    fn next_in_order(&mut self) -> Option<Ended> {
        let ended = self.ended.remove(self.begun.front()?)?;
        self.begun.pop_front();
        self.progress.remove(&ended.todo.number);
        Some(ended)
    }
}

/// Divides `left` rows into parts of `part_rows`. `counts` has the rows of the files from that of the first row `from` on. There is
/// always one part. `files` is the number of all files, and `is_limited` says that rows after the last part are not read.
fn divide(
    counts: &[u64],
    (number, from): (usize, Position),
    (part_rows, left): (u64, u64),
    (files, is_limited): (usize, bool),
) -> Vec<Todo> {
    let ends: Vec<u64> = counts
        .iter()
        .scan(0, |sum, count| {
            *sum += count;
            Some(*sum)
        })
        .collect();
    // The position of a row, counted from the first row of the first file in `counts`.
    let position = |row: u64| {
        let file = ends.partition_point(|end| *end <= row);
        let before = file.checked_sub(1).map_or(0, |before| ends[before]);
        Position { file: from.file + file, row: row - before }
    };
    let parts = left.div_ceil(part_rows.max(1)).max(1);
    let mut start = from;
    let mut all = Vec::new();
    for part in 1..=parts {
        let is_last = part == parts;
        let next = (!is_last).then(|| position(from.row + part * part_rows));
        let until = match next {
            Some(next) => next.file + 1,
            None if is_limited => position((from.row + left).saturating_sub(1)).file + 1,
            None => files,
        };
        // Behind the last file there is nothing to read.
        let files = start.file..until.clamp(start.file, files.max(start.file));
        all.push(Todo { number: number + all.len(), start, mark: None, files, next: Some(next) });
        start = next.unwrap_or(start);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(file: usize, row: u64) -> Position {
        Position { file, row }
    }

    fn todo(number: usize, start: Position, files: Range<usize>, next: Option<Position>) -> Todo {
        Todo { number, start, mark: None, files, next: Some(next) }
    }

    /// By hand: files of 5, 0, 3 and 0 rows.
    #[test]
    fn rows_are_divided_into_parts() {
        let counts = [5, 0, 3, 0];
        let whole = divide(&counts, (0, at(0, 0)), (3, 8), (4, false));
        let expected = [
            todo(0, at(0, 0), 0..1, Some(at(0, 3))),
            todo(1, at(0, 3), 0..3, Some(at(2, 1))),
            todo(2, at(2, 1), 2..4, None),
        ];
        assert_eq!(whole, expected);
        // From the second part on.
        assert_eq!(divide(&counts, (1, at(0, 3)), (3, 5), (4, false)), expected[1..]);
        assert_eq!(divide(&counts[2..], (2, at(2, 1)), (3, 2), (4, false)), expected[2..]);
        // A part that ends with its file begins the next one in the file that has a row.
        let by_five = divide(&counts, (0, at(0, 0)), (5, 8), (4, false));
        assert_eq!(by_five, [todo(0, at(0, 0), 0..3, Some(at(2, 0))), todo(1, at(2, 0), 2..4, None)]);
        // Four rows alone: the last two files are not counted.
        let limited = divide(&counts[..1], (0, at(0, 0)), (3, 4), (4, true));
        assert_eq!(limited, [todo(0, at(0, 0), 0..1, Some(at(0, 3))), todo(1, at(0, 3), 0..1, None)]);
        // No rows make one part.
        assert_eq!(divide(&[0, 0], (0, at(0, 0)), (3, 0), (2, false)), [todo(0, at(0, 0), 0..2, None)]);
        assert_eq!(divide(&[], (0, at(0, 0)), (3, 0), (0, false)), [todo(0, at(0, 0), 0..0, None)]);
        assert_eq!(divide(&[5], (0, at(0, 0)), (3, 0), (1, true)), [todo(0, at(0, 0), 0..1, None)]);
    }
}
