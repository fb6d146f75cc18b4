//! The sentences of one direction, read ahead by a thread of its own.
//!
//! While a shard is read, the next ones are opened and their first rows are decoded. So a shard in a store far away costs time only
//! if it is read slower than it is used.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
};

use elmo::train::{Sentence, SentenceList};
use serde::{Deserialize, Serialize};
use tokio::{
    runtime::Handle,
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinHandle,
};

use super::{
    Corpus,
    blocks::{Block, Blocks},
    order::Shuffler,
};
use crate::{
    error::{Error, Result},
    source::{self, Position, Rows, Slice},
};

/// Parts of a full block: blocks that are full together may wait. One more is being read, and one is being used.
const ROOM: u32 = 1000;
/// Shards that are opened before they are read.
const AHEAD: usize = 2;

/// The next sentence of a direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::train) struct StreamPosition {
    pub(in crate::train) epoch: u32,
    /// Number of the shard in the order of the epoch.
    pub(in crate::train) shard: usize,
    /// Number of the block in the shard.
    pub(in crate::train) block: u64,
    /// Row of the shard with which the block begins.
    pub(in crate::train) row: u64,
    /// Sentences of the block, in their random order, that were taken.
    pub(in crate::train) taken: usize,
}

/// How often the corpus is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::train) enum Passes {
    One,
    Endless,
}

/// A block and the order of its sentences.
struct Ready {
    at: StreamPosition,
    sentences: Arc<SentenceList>,
    order: Vec<u32>,
    /// Its part of the room, until it is used.
    room: Option<OwnedSemaphorePermit>,
}

/// The room for blocks that wait. Without it, a reader ends.
struct Room(Arc<Semaphore>);

impl Drop for Room {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The sentences of one direction.
pub(in crate::train) struct Sentences {
    /// `None` at the end of a single pass.
    blocks: Receiver<Result<Option<Ready>>>,
    has_ended: bool,
    current: Option<Ready>,
    at: StreamPosition,
    _room: Room,
}

impl Sentences {
    /// Begins to read. Must be called within the runtime.
    ///
    /// # Errors
    /// [`Error::Failed`] when the system refuses a thread.
    pub(in crate::train) fn start(
        corpus: &Arc<Corpus>,
        direction: u8,
        from: StreamPosition,
        passes: Passes,
    ) -> Result<Self> {
        let (send, blocks) = channel();
        let room = Room(Arc::new(Semaphore::new(ROOM as usize)));
        let reader = Reader {
            shuffler: Shuffler { order: corpus.order, seed: corpus.seed, direction },
            corpus: Arc::clone(corpus),
            passes,
            at: StreamPosition { taken: 0, ..from },
            order: (0, Vec::new()),
            ahead: VecDeque::new(),
            opened: None,
            send,
            room: Arc::clone(&room.0),
        };
        let runtime = Handle::current();
        let name = if direction == 0 { "elmo forward" } else { "elmo backward" };
        let thread = thread::Builder::new().name(name.to_owned());
        let spawned = thread.spawn(move || runtime.block_on(reader.run()));
        spawned.map_err(|e| Error::Failed(format!("cannot start a thread that reads the corpus: {e}")))?;
        Ok(Self { blocks, has_ended: false, current: None, at: from, _room: room })
    }

    /// The next sentence; `None` at the end of a single pass.
    ///
    /// # Errors
    /// Those of the corpus, for good.
    pub(in crate::train) fn next(&mut self) -> Result<Option<Sentence>> {
        while !self.has_ended {
            if let Some(ready) = &self.current
                && let Some(&index) = ready.order.get(self.at.taken)
            {
                self.at.taken += 1;
                return Ok(ready.sentences.sentence(index as usize));
            }
            let died = |_| Error::Failed("the thread that reads the corpus has died".to_owned());
            let Some(mut ready) = self.blocks.recv().map_err(died)?? else {
                self.has_ended = true;
                break;
            };
            drop(ready.room.take());
            let is_first = self.current.is_none();
            // A resumed run has taken some sentences of its first block.
            let taken =
                if is_first && ready.at == (StreamPosition { taken: 0, ..self.at }) { self.at.taken } else { 0 };
            self.at = StreamPosition { taken, ..ready.at };
            self.current = Some(ready);
        }
        Ok(None)
    }

    /// Where the next sentence is.
    pub(in crate::train) fn position(&self) -> StreamPosition {
        self.at
    }
}

/// Reads blocks and puts their sentences in order.
struct Reader {
    corpus: Arc<Corpus>,
    shuffler: Shuffler,
    passes: Passes,
    /// Where the next block begins.
    at: StreamPosition,
    /// The shards of an epoch in their order.
    order: (u32, Vec<usize>),
    /// The next shards.
    ahead: VecDeque<Opening>,
    /// Where the last of them is.
    opened: Option<StreamPosition>,
    send: Sender<Result<Option<Ready>>>,
    room: Arc<Semaphore>,
}

/// A shard that is being opened; dropping it ends that.
struct Opening {
    at: StreamPosition,
    task: JoinHandle<Result<Opened>>,
}

impl Drop for Opening {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A shard whose first rows are there.
struct Opened {
    number: usize,
    rows: Rows,
    first: Option<Slice>,
}

impl Opened {
    /// Opens a shard to read it from a row.
    async fn new(corpus: Arc<Corpus>, number: usize, row: u64) -> Result<Self> {
        check_unchanged(&corpus, number).await?;
        let mut rows = Rows::new(corpus.shard(number)?, Position { file: 0, row });
        let first = rows.next().await?;
        Ok(Self { number, rows, first })
    }

    async fn next(&mut self) -> Result<Option<Slice>> {
        match self.first.take() {
            Some(first) => Ok(Some(first)),
            None => Ok(self.rows.next().await?),
        }
    }
}

/// Nobody receives any more.
struct Gone;

impl Reader {
    async fn run(mut self) {
        let last = match self.read().await {
            Ok(Err(Gone)) => return,
            Ok(Ok(())) => Ok(None),
            Err(error) => Err(error),
        };
        let _ = self.send.send(last);
    }

    /// Reads shard after shard, to the end of a single pass.
    async fn read(&mut self) -> Result<Result<(), Gone>> {
        loop {
            self.open_ahead();
            let Some(mut next) = self.ahead.pop_front() else { return Ok(Ok(())) };
            let opened = (&mut next.task).await;
            let opened = opened.map_err(|e| Error::Failed(format!("a task that opens a shard died: {e}")))??;
            self.open_ahead();
            self.at = next.at;
            if self.shard(opened).await?.is_err() {
                return Ok(Err(Gone));
            }
        }
    }

    /// Begins to open the next shards.
    fn open_ahead(&mut self) {
        while self.ahead.len() < AHEAD {
            let next = match self.opened {
                None => Some(self.at),
                Some(last) => self.after(last),
            };
            let Some(at) = next else { return };
            self.opened = Some(at);
            if let Some(shard) = self.shard_of(at) {
                let task = tokio::spawn(Opened::new(Arc::clone(&self.corpus), shard, at.row));
                self.ahead.push_back(Opening { at, task });
            }
        }
    }

    /// The shard at a position.
    fn shard_of(&mut self, at: StreamPosition) -> Option<usize> {
        if self.order.0 != at.epoch || self.order.1.is_empty() {
            self.order = (at.epoch, self.shuffler.shards(at.epoch, self.corpus.files().len()));
        }
        self.order.1.get(at.shard).copied()
    }

    /// The beginning of the shard after another one; `None` at the end of a single pass.
    fn after(&self, StreamPosition { epoch, shard, .. }: StreamPosition) -> Option<StreamPosition> {
        match shard + 1 < self.corpus.files().len() {
            true => Some(StreamPosition { epoch, shard: shard + 1, ..StreamPosition::default() }),
            false if self.passes == Passes::Endless => {
                Some(StreamPosition { epoch: epoch + 1, ..StreamPosition::default() })
            }
            false => None,
        }
    }

    /// The rest of a shard.
    async fn shard(&mut self, mut opened: Opened) -> Result<Result<(), Gone>> {
        let (corpus, shard) = (Arc::clone(&self.corpus), opened.number);
        let mut blocks = Blocks::new(corpus.reading, &corpus.words).starting_at(self.at.row);
        while let Some(slice) = opened.next().await? {
            let mut full = Vec::new();
            let bad = blocks.add(slice.start.row, &slice.text, |block| full.push(block))?;
            if !bad.is_empty() || !full.is_empty() {
                check_unchanged(&corpus, shard).await?;
            }
            corpus.check_rows(shard, slice.start.row, &bad)?;
            for block in full {
                if self.send(shard, block).await.is_err() {
                    return Ok(Err(Gone));
                }
            }
        }
        check_unchanged(&corpus, shard).await?;
        match blocks.finish() {
            Some(block) => Ok(self.send(shard, block).await),
            None => Ok(Ok(())),
        }
    }

    async fn send(&mut self, shard: usize, block: Block) -> Result<(), Gone> {
        let at = StreamPosition { row: block.row, ..self.at };
        let order = self.shuffler.sentences(at.epoch, shard, at.block, block.sentences.len());
        self.at.block += 1;
        let room = (f64::from(ROOM) * block.fullness(self.corpus.reading.block_sentences)).ceil() as u32;
        let room = Arc::clone(&self.room).acquire_many_owned(room.clamp(1, ROOM)).await.map_err(|_| Gone)?;
        let ready = Ready { at, sentences: Arc::new(block.sentences), order, room: Some(room) };
        self.send.send(Ok(Some(ready))).map_err(|_| Gone)
    }
}

/// Refuses a shard that is no longer what was surveyed. Checked after a block was read and before it is used, so that no step is
/// made with other text.
async fn check_unchanged(corpus: &Corpus, shard: usize) -> Result<()> {
    Ok(source::check_unchanged(corpus.files().get(shard).into_iter()).await?)
}

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, fs, time::Duration};

    use elmo::spec::{SentenceMode, TokenizerKind};
    use futures::FutureExt;
    use object_store::{ObjectStoreExt, path::Path};
    use tokio::{sync::watch, time::timeout};

    use super::*;
    use crate::{
        stores::{
            Stores,
            hooked::{Asked, Hooked},
        },
        train::{
            Order,
            corpus::{Reading, Shards},
            words::Words,
        },
    };

    /// Shards of 0, 1, 9 and 30 sentences of one word each; every word occurs once.
    fn shards() -> (tempfile::TempDir, Vec<String>) {
        let folder = tempfile::tempdir().unwrap();
        let mut all = vec!["<S>".to_owned(), "</S>".to_owned(), "<UNK>".to_owned()];
        for (shard, sentences) in [0, 1, 9, 30].into_iter().enumerate() {
            let words: Vec<String> = (0..sentences).map(|n| format!("w{shard}-{n}")).collect();
            fs::write(folder.path().join(format!("{shard}.txt")), words.join("\n\n")).unwrap();
            all.extend(words);
        }
        (folder, all)
    }

    async fn corpus(folder: &tempfile::TempDir, words: &[String], order: Order) -> Arc<Corpus> {
        let reading =
            Reading { tokenizer: TokenizerKind::Whitespace, sentences: SentenceMode::Off, block_sentences: 4 };
        let inputs = [folder.path().display().to_string()];
        let shards =
            Shards { inputs: &inputs, run: None, column: "text", reading, order, seed: 5, skip_bad_rows: false };
        let words = Arc::new(Words::of_list(words.to_vec()));
        Arc::new(Corpus::open(&Stores::with_settings([]), shards, &words).await.unwrap())
    }

    fn take(sentences: &mut Sentences, n: usize) -> Vec<Sentence> {
        (0..n).map(|_| sentences.next().unwrap().unwrap()).collect()
    }

    /// The sentence of one word.
    fn sentence(word: &str, id: usize) -> Sentence {
        [(word, id as u32)].into_iter().collect()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_epoch_has_every_sentence_once_in_an_order_of_its_own() {
        let (folder, words) = shards();
        let corpus = corpus(&folder, &words, Order::Shuffle).await;
        let expected: Vec<Sentence> = words.iter().enumerate().skip(3).map(|(id, word)| sentence(word, id)).collect();
        let mut orders = HashSet::new();
        for direction in [0, 1] {
            let start = |from| Sentences::start(&corpus, direction, from, Passes::Endless).unwrap();
            let mut endless = start(StreamPosition::default());
            for epoch in 0..3 {
                let found = take(&mut endless, 40);
                assert_eq!(endless.position().epoch, epoch);
                assert!(orders.insert(serde_json::to_string(&found).unwrap()), "{direction}, {epoch}");
                assert!(found.len() == expected.len() && expected.iter().all(|sentence| found.contains(sentence)));
            }
            // From the beginning, and after any sentence, the same sentences come again.
            let mut again = start(StreamPosition::default());
            let whole = take(&mut again, 90);
            let mut second = start(StreamPosition::default());
            for stop in 0..=50 {
                assert_eq!(take(&mut start(second.position()), 40), whole[stop..stop + 40], "after {stop}");
                second.next().unwrap();
            }
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_single_pass_in_the_order_of_bilm_is_that_of_the_files() {
        let (folder, words) = shards();
        let corpus = corpus(&folder, &words, Order::Bilm).await;
        let mut sentences = Sentences::start(&corpus, 1, StreamPosition::default(), Passes::One).unwrap();
        for (id, word) in words.iter().enumerate().skip(3) {
            assert_eq!(sentences.next().unwrap(), Some(sentence(word, id)));
        }
        assert_eq!(sentences.next().unwrap(), None);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_shard_that_breaks_is_an_error_of_the_stream() {
        let (folder, words) = shards();
        let corpus = corpus(&folder, &words, Order::Bilm).await;
        fs::write(folder.path().join("2.txt"), b"fine\n\xff\n").unwrap();
        let mut sentences = Sentences::start(&corpus, 0, StreamPosition::default(), Passes::Endless).unwrap();
        let mut error = None;
        for _ in 0..40 {
            match sentences.next() {
                Ok(_) => {}
                Err(e) => {
                    error = Some(e.to_string());
                    break;
                }
            }
        }
        assert!(error.unwrap().contains("2.txt"));
    }

    /// A shard that is overwritten by longer text with the same beginning, after it was listed.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_shard_that_changes_during_a_run_is_an_error_before_its_text_is_used() {
        let (folder, words) = shards();
        let corpus = corpus(&folder, &words, Order::Bilm).await;
        let mut sentences = Sentences::start(&corpus, 0, StreamPosition::default(), Passes::Endless).unwrap();
        take(&mut sentences, 40);
        let path = folder.path().join("3.txt");
        fs::write(&path, fs::read_to_string(&path).unwrap() + "\nmore\n").unwrap();
        // What was read before may still come, at most to the end of the second epoch.
        let outcome = (0..120).try_for_each(|_| sentences.next().map(drop));
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("3.txt") && error.contains("changed"), "{error}");
    }

    /// The store answers a request for shard `N` only when shard `N + 1` is requested too. Otherwise the first request would never be
    /// answered: the time limit only turns a wait into a failure.
    #[tokio::test(flavor = "multi_thread")]
    async fn the_next_shard_is_requested_before_the_present_one_has_been_read() {
        const SHARDS: usize = 4;
        // Numbers of the shards that were requested.
        let requested = Arc::new(watch::channel(Vec::<usize>::new()).0);
        let log = Arc::clone(&requested);
        let store = Arc::new(Hooked::new(move |asked, path| {
            let (log, is_read) = (Arc::clone(&log), asked == Asked::Read);
            async move {
                let number = path.filename().and_then(|name| name.strip_suffix(".txt")?.parse::<usize>().ok());
                if let Some(number) = number.filter(|_| is_read) {
                    log.send_if_modified(|all| {
                        let is_new = !all.contains(&number);
                        all.extend(is_new.then_some(number));
                        is_new
                    });
                    let is_free = |all: &Vec<usize>| number + 1 == SHARDS || all.contains(&(number + 1));
                    log.subscribe().wait_for(is_free).await.unwrap();
                }
                Ok(())
            }
            .boxed()
        }));
        let mut words = ["<S>", "</S>", "<UNK>"].map(str::to_owned).to_vec();
        for shard in 0..SHARDS {
            let of_shard: Vec<String> = (0..9).map(|n| format!("w{shard}-{n}")).collect();
            let path = Path::from(format!("corpus/{shard}.txt"));
            store.inner.put(&path, of_shard.join("\n").into()).await.unwrap();
            words.extend(of_shard);
        }
        let stores = Stores::with_settings([]);
        stores.insert("memory://slow", Arc::<Hooked>::clone(&store));
        let reading =
            Reading { tokenizer: TokenizerKind::Whitespace, sentences: SentenceMode::Off, block_sentences: 4 };
        let inputs = ["memory://slow/corpus".to_owned()];
        let shards = Shards {
            inputs: &inputs,
            run: None,
            column: "text",
            reading,
            order: Order::Bilm,
            seed: 5,
            skip_bad_rows: false,
        };
        let list = Arc::new(Words::of_list(words.clone()));
        let opened = timeout(Duration::from_secs(60), Corpus::open(&stores, shards, &list)).await;
        let corpus = Arc::new(opened.expect("listing reads no shard").unwrap());
        let mut sentences = Sentences::start(&corpus, 0, StreamPosition::default(), Passes::One).unwrap();
        let read = tokio::task::spawn_blocking(move || take(&mut sentences, 9 * SHARDS));
        let read = timeout(Duration::from_secs(60), read).await.expect("the next shard was never requested").unwrap();
        let expected = words.iter().enumerate().skip(3).map(|(id, word)| sentence(word, id));
        assert!(read.into_iter().eq(expected));
        // Two shards are opened at a time, so neighbours may change places.
        let mut all = requested.borrow().clone();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..SHARDS));
    }

    /// The thread ends without a last message only when it panics.
    #[test]
    fn a_reader_that_dies_is_not_the_end_of_the_text() {
        let (send, blocks) = channel();
        let (at, room) = (StreamPosition::default(), Room(Arc::new(Semaphore::new(1))));
        let mut sentences = Sentences { blocks, has_ended: false, current: None, at, _room: room };
        drop(send);
        assert!(sentences.next().unwrap_err().to_string().contains("has died"));
    }
}
