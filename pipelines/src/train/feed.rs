//! Windows, made ahead of the step by threads of their own, so that the step never waits for the corpus.
//!
//! ```text
//! reader (forward)  --blocks--> packer --windows--> step
//! reader (backward) --blocks-->
//! ```

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use elmo::train::{Boundaries, Direction, Packer, Places, Window};
use serde::{Deserialize, Serialize};

use super::corpus::{Corpus, Passes, Sentences, StreamPosition};
use crate::error::{Error, Result};

/// Windows that wait for the step.
const WAITING: usize = 8;

/// Where a direction stands between two windows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StreamState {
    /// The next sentence.
    pub(super) position: StreamPosition,
    /// The unfinished sentences.
    packer: Packer,
}

impl StreamState {
    /// Both directions at the beginning of a corpus.
    pub(super) fn begin(boundaries: Boundaries, rows: usize, positions: usize) -> [Self; 2] {
        [Direction::Forward, Direction::Backward].map(|direction| Self {
            position: StreamPosition::default(),
            packer: Packer::new(direction, boundaries, rows, positions),
        })
    }
}

/// A window, and where both directions stand after it.
#[derive(Debug)]
pub(super) struct Fed {
    pub(super) window: Window,
    pub(super) after: [StreamState; 2],
}

/// Windows in order.
pub(super) struct Feed {
    /// `None` at the end of a single pass.
    windows: Receiver<Result<Option<Fed>>>,
    /// How long the step has waited.
    pub(super) waited: Duration,
}

impl Feed {
    /// Begins to read both directions. Must be called within the runtime.
    ///
    /// # Errors
    /// [`Error::Failed`] when the system refuses a thread.
    pub(super) fn start(corpus: &Arc<Corpus>, from: [StreamState; 2], rows: usize, passes: Passes) -> Result<Self> {
        let sentences = |direction: u8, from: &StreamState| Sentences::start(corpus, direction, from.position, passes);
        let sources = [sentences(0, &from[0])?, sentences(1, &from[1])?];
        let (send, windows) = sync_channel(WAITING);
        let packers = from.map(|state| state.packer);
        let packing = Packing { sources, packers, places: Places::new(Arc::clone(corpus.words.list())), rows, send };
        let spawned = thread::Builder::new().name("elmo packer".to_owned()).spawn(move || packing.run());
        spawned.map_err(|e| Error::Failed(format!("cannot start a thread that makes windows: {e}")))?;
        Ok(Self { windows, waited: Duration::ZERO })
    }

    /// The next window; `None` when a single pass has no full one left.
    ///
    /// # Errors
    /// Those of the corpus.
    pub(super) fn next(&mut self) -> Result<Option<Fed>> {
        let started = Instant::now();
        let next = self.windows.recv();
        self.waited += started.elapsed();
        next.map_err(|_| Error::Failed("the thread that makes windows has died".to_owned()))?
    }
}

/// The thread that fills windows.
struct Packing {
    sources: [Sentences; 2],
    packers: [Packer; 2],
    places: Places,
    rows: usize,
    send: SyncSender<Result<Option<Fed>>>,
}

impl Packing {
    fn run(mut self) {
        loop {
            let next = self.next();
            let is_last = !matches!(next, Ok(Some(_)));
            // Nobody receives after the end of the run.
            if self.send.send(next).is_err() || is_last {
                return;
            }
        }
    }

    fn next(&mut self) -> Result<Option<Fed>> {
        let [forward, backward] = &mut self.sources;
        let places = &mut self.places;
        let Some(ahead) = self.packers[0].next_window(places, || forward.next())? else { return Ok(None) };
        let Some(back) = self.packers[1].next_window(places, || backward.next())? else { return Ok(None) };
        let window = Window::of_streams(places.finish(), [ahead, back], self.rows);
        let after = [0, 1].map(|direction| StreamState {
            position: self.sources[direction].position(),
            packer: self.packers[direction].clone(),
        });
        Ok(Some(Fed { window, after }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The thread ends without a last message only when it panics.
    #[test]
    fn a_packer_that_dies_is_not_the_end_of_the_text() {
        let (send, windows) = sync_channel(1);
        let mut feed = Feed { windows, waited: Duration::ZERO };
        drop(send);
        assert!(feed.next().unwrap_err().to_string().contains("has died"));
    }
}
