//! The sentences of one direction, read ahead by a thread of its own.

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
};

use elmo::train::Sentence;
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;

use super::{
    Corpus,
    blocks::{Block, Blocks},
    order::Shuffler,
};
use crate::{
    error::{Error, Result},
    source::{self, Position, Rows},
};

/// Blocks that wait. One more is being read, and one is being used.
const WAITING: usize = 1;

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
    sentences: Vec<Sentence>,
    order: Vec<u32>,
}

/// The sentences of one direction.
pub(in crate::train) struct Sentences {
    /// `None` at the end of a single pass.
    blocks: Receiver<Result<Option<Ready>>>,
    has_ended: bool,
    current: Option<Ready>,
    at: StreamPosition,
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
        let (send, blocks) = sync_channel(WAITING);
        let reader = Reader {
            shuffler: Shuffler { order: corpus.order, seed: corpus.seed, direction },
            corpus: Arc::clone(corpus),
            passes,
            at: StreamPosition { taken: 0, ..from },
            send,
        };
        let runtime = Handle::current();
        let name = if direction == 0 { "elmo forward" } else { "elmo backward" };
        let thread = thread::Builder::new().name(name.to_owned());
        let spawned = thread.spawn(move || runtime.block_on(reader.run()));
        spawned.map_err(|e| Error::Failed(format!("cannot start a thread that reads the corpus: {e}")))?;
        Ok(Self { blocks, has_ended: false, current: None, at: from })
    }

    /// The next sentence; `None` at the end of a single pass.
    ///
    /// # Errors
    /// Those of the corpus, for good.
    pub(in crate::train) fn next(&mut self) -> Result<Option<Sentence>> {
        while !self.has_ended {
            if let Some(ready) = &mut self.current
                && let Some(&index) = ready.order.get(self.at.taken)
            {
                self.at.taken += 1;
                return Ok(ready.sentences.get_mut(index as usize).map(std::mem::take));
            }
            let died = |_| Error::Failed("the thread that reads the corpus has died".to_owned());
            let Some(ready) = self.blocks.recv().map_err(died)?? else {
                self.has_ended = true;
                break;
            };
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
    send: SyncSender<Result<Option<Ready>>>,
}

/// Nobody receives any more.
struct Gone;

impl Reader {
    async fn run(mut self) {
        loop {
            match self.epoch().await {
                Ok(Ok(())) if self.passes == Passes::Endless => {}
                Ok(Err(Gone)) => return,
                Ok(Ok(())) => {
                    let _ = self.send.send(Ok(None));
                    return;
                }
                Err(error) => {
                    let _ = self.send.send(Err(error));
                    return;
                }
            }
        }
    }

    /// The rest of an epoch.
    async fn epoch(&mut self) -> Result<Result<(), Gone>> {
        let shards = self.shuffler.shards(self.at.epoch, self.corpus.files().len());
        while let Some(&shard) = shards.get(self.at.shard) {
            if self.shard(shard).await?.is_err() {
                return Ok(Err(Gone));
            }
            self.at = StreamPosition { epoch: self.at.epoch, shard: self.at.shard + 1, ..StreamPosition::default() };
        }
        self.at = StreamPosition { epoch: self.at.epoch + 1, ..StreamPosition::default() };
        Ok(Ok(()))
    }

    /// The rest of a shard.
    async fn shard(&mut self, shard: usize) -> Result<Result<(), Gone>> {
        let corpus = Arc::clone(&self.corpus);
        self.check_unchanged(shard).await?;
        let mut rows = Rows::new(corpus.shard(shard)?, Position { file: 0, row: self.at.row });
        let mut blocks = Blocks::new(corpus.reading, &corpus.words).starting_at(self.at.row);
        while let Some(slice) = rows.next().await? {
            let mut full = Vec::new();
            let bad = blocks.add(slice.start.row, &slice.text, |block| full.push(block))?;
            if !bad.is_empty() || !full.is_empty() {
                self.check_unchanged(shard).await?;
            }
            corpus.check_rows(shard, slice.start.row, &bad)?;
            for block in full {
                if self.send(shard, block).is_err() {
                    return Ok(Err(Gone));
                }
            }
        }
        self.check_unchanged(shard).await?;
        Ok(blocks.finish().map_or(Ok(()), |block| self.send(shard, block)))
    }

    /// Refuses a shard that is no longer what was surveyed. Checked after a block was read and before it is used, so that
    /// no step is made with other text.
    async fn check_unchanged(&self, shard: usize) -> Result<()> {
        Ok(source::check_unchanged(self.corpus.files().get(shard).into_iter()).await?)
    }

    fn send(&mut self, shard: usize, block: Block) -> Result<(), Gone> {
        let at = StreamPosition { row: block.row, ..self.at };
        let order = self.shuffler.sentences(at.epoch, shard, at.block, block.sentences.len());
        self.at.block += 1;
        self.send.send(Ok(Some(Ready { at, sentences: block.sentences, order }))).map_err(|_| Gone)
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, fs};

    use elmo::spec::{SentenceMode, TokenizerKind};

    use super::*;
    use crate::{
        stores::Stores,
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
        let shards = Shards { inputs: &inputs, column: "text", reading, order, seed: 5, skip_bad_rows: false };
        let words = Arc::new(Words::of_list(words.to_vec()));
        Arc::new(Corpus::open(&Stores::with_settings([]), shards, &words).await.unwrap())
    }

    fn take(sentences: &mut Sentences, n: usize) -> Vec<Sentence> {
        (0..n).map(|_| sentences.next().unwrap().unwrap()).collect()
    }

    /// The sentence of one word.
    fn sentence(word: &str, id: usize) -> Sentence {
        let mut sentence = Sentence::default();
        sentence.push(word, id as u32);
        sentence
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

    /// The thread ends without a last message only when it panics.
    #[test]
    fn a_reader_that_dies_is_not_the_end_of_the_text() {
        let (send, blocks) = sync_channel(1);
        let at = StreamPosition::default();
        let mut sentences = Sentences { blocks, has_ended: false, current: None, at };
        drop(send);
        assert!(sentences.next().unwrap_err().to_string().contains("has died"));
    }
}
