//! Sentences to windows of fixed size, one direction at a time (bilm-tf `bilm/data.py`, `_get_batch`). Pure: no tensors.
//!
//! A row of a window continues the row of the window before it. A row that has read its sentence takes the next one from
//! the common source, also in the middle of a window; rows are filled one after the other. There is no padding.
//!
//! The forward direction reads `<S> w1 .. wn` and predicts `w1 .. wn </S>`; the backward one reads `</S> wn .. w1` and
//! predicts `wn .. w1 <S>`.

use std::{collections::HashMap, fmt, ops::Range, sync::Arc};

use serde::{Deserialize, Serialize};

use super::window::Stream;
use crate::chars::{BEGIN_SENTENCE_TOKEN, END_SENTENCE_TOKEN};

/// Sentences without boundaries, one after the other. They share a few allocations: the threads of a run share one allocator, for
/// whose lock they would wait.
#[derive(Debug, Default)]
pub struct SentenceList {
    /// All tokens, one after the other.
    text: String,
    /// For each token the byte in `text` at which it ends, and its id in the vocabulary. Together, because sentences are read in a
    /// random order, from memory that is in no cache.
    tokens: Vec<(u32, u32)>,
    /// Number of the token before which each sentence ends.
    lasts: Vec<u32>,
}

impl SentenceList {
    /// Appends a token, and its id in the vocabulary, to the sentence that has not ended.
    pub fn push(&mut self, token: &str, id: u32) {
        self.text.push_str(token);
        self.tokens.push((self.text.len() as u32, id));
    }

    /// Ends the sentence.
    pub fn end(&mut self) {
        self.lasts.push(self.tokens.len() as u32);
    }

    /// Number of sentences that have ended.
    pub fn len(&self) -> usize {
        self.lasts.len()
    }

    /// Whether no sentence has ended.
    pub fn is_empty(&self) -> bool {
        self.lasts.is_empty()
    }

    /// A sentence by its number. `None` if there are fewer.
    pub fn sentence(self: &Arc<Self>, number: usize) -> Option<Sentence> {
        let end = *self.lasts.get(number)?;
        let start = number.checked_sub(1).map_or(0, |before| self.lasts[before]);
        Some(Sentence { list: Arc::clone(self), tokens: start..end })
    }
}

/// The tokens of a sentence without boundaries, in the order of the text. Cheap to clone.
#[derive(Clone, Serialize, Deserialize)]
#[serde(into = "StoredSentence", from = "StoredSentence")]
pub struct Sentence {
    list: Arc<SentenceList>,
    /// Numbers of its tokens.
    tokens: Range<u32>,
}

impl Sentence {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The tokens in the order of the text.
    pub fn tokens(&self) -> impl Iterator<Item = &str> {
        (0..self.len()).map(|i| self.token(i).0)
    }

    /// A token, and its id in the vocabulary.
    fn token(&self, i: usize) -> (&str, u32) {
        let (list, i) = (&self.list, self.tokens.start as usize + i);
        let start = if i == 0 { 0 } else { list.tokens[i - 1].0 as usize };
        let (end, id) = list.tokens[i];
        (&list.text[start..end as usize], id)
    }
}

/// A sentence of these tokens, and their ids in the vocabulary.
impl<'t> FromIterator<(&'t str, u32)> for Sentence {
    fn from_iter<I: IntoIterator<Item = (&'t str, u32)>>(tokens: I) -> Self {
        let mut list = SentenceList::default();
        tokens.into_iter().for_each(|(token, id)| list.push(token, id));
        list.end();
        let tokens = 0..list.tokens.len() as u32;
        Self { list: Arc::new(list), tokens }
    }
}

impl PartialEq for Sentence {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && (0..self.len()).all(|i| self.token(i) == other.token(i))
    }
}

impl Eq for Sentence {}

impl fmt::Debug for Sentence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries((0..self.len()).map(|i| self.token(i))).finish()
    }
}

/// What is stored of a sentence.
#[derive(Serialize, Deserialize)]
struct StoredSentence {
    text: String,
    ends: Vec<u32>,
    ids: Vec<u32>,
}

impl From<Sentence> for StoredSentence {
    fn from(sentence: Sentence) -> Self {
        let mut stored = Self { text: String::new(), ends: Vec::new(), ids: Vec::new() };
        for (token, id) in (0..sentence.len()).map(|i| sentence.token(i)) {
            stored.text.push_str(token);
            stored.ends.push(stored.text.len() as u32);
            stored.ids.push(id);
        }
        stored
    }
}

impl From<StoredSentence> for Sentence {
    fn from(StoredSentence { text, ends, ids }: StoredSentence) -> Self {
        let list = SentenceList { text, lasts: vec![ids.len() as u32], tokens: ends.into_iter().zip(ids).collect() };
        Self { tokens: 0..list.tokens.len() as u32, list: Arc::new(list) }
    }
}

/// Ids of the boundaries in the vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boundaries {
    /// Of `<S>`.
    pub begin: u32,
    /// Of `</S>`.
    pub end: u32,
}

/// The direction in which sentences are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// From the first token to the last.
    Forward,
    /// From the last token to the first.
    Backward,
}

/// A sentence that a row reads. Copies of a packer, of which every window has one, share it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Unfinished {
    sentence: Sentence,
    /// Symbols of it that were read, of `n + 1`.
    read: usize,
}

impl Unfinished {
    /// Symbol `i` of `n + 2`, boundaries included, in reading order.
    fn symbol(&self, i: usize, direction: Direction, boundaries: Boundaries) -> (&str, u32) {
        let n = self.sentence.len();
        let in_text = match direction {
            Direction::Forward => i,
            Direction::Backward => n + 1 - i,
        };
        match in_text {
            0 => (BEGIN_SENTENCE_TOKEN, boundaries.begin),
            past if past == n + 1 => (END_SENTENCE_TOKEN, boundaries.end),
            token => self.sentence.token(token - 1),
        }
    }

    fn is_finished(&self) -> bool {
        self.read > self.sentence.len()
    }

    /// The part that is still read, and the symbols of it that were: the last one is the input of the next prediction.
    fn rest(&self, direction: Direction) -> Rest {
        let n = self.sentence.len();
        let dropped = self.read.saturating_sub(1);
        let kept = match direction {
            Direction::Forward => dropped..n,
            Direction::Backward => 0..n.saturating_sub(dropped),
        };
        Rest { sentence: kept.map(|i| self.sentence.token(i)).collect(), read: self.read - dropped }
    }
}

/// What is stored of a sentence that a row reads.
#[derive(Serialize, Deserialize)]
struct Rest {
    sentence: Sentence,
    read: usize,
}

/// What is stored of a packer.
#[derive(Serialize, Deserialize)]
struct Stored {
    direction: Direction,
    boundaries: Boundaries,
    positions: usize,
    rows: Vec<Option<Rest>>,
    taken: u64,
}

impl From<Packer> for Stored {
    fn from(packer: Packer) -> Self {
        let Packer { direction, boundaries, positions, rows, taken } = packer;
        let rows = rows.iter().map(|row| row.as_ref().map(|row| row.rest(direction))).collect();
        Self { direction, boundaries, positions, rows, taken }
    }
}

impl From<Stored> for Packer {
    fn from(stored: Stored) -> Self {
        let Stored { direction, boundaries, positions, rows, taken } = stored;
        let row = |Rest { sentence, read }| Unfinished { sentence, read };
        let rows = rows.into_iter().map(|rest| rest.map(row)).collect();
        Self { direction, boundaries, positions, rows, taken }
    }
}

/// Fills the windows of one direction. Serialised, it is all that resuming needs beside the position of the source: what
/// was read of a sentence is left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Stored", from = "Stored")]
pub struct Packer {
    direction: Direction,
    boundaries: Boundaries,
    positions: usize,
    rows: Vec<Option<Unfinished>>,
    /// Sentences taken from the source.
    taken: u64,
}

impl Packer {
    /// Windows of `rows` rows of `positions` tokens.
    pub fn new(direction: Direction, boundaries: Boundaries, rows: usize, positions: usize) -> Self {
        Self { direction, boundaries, positions, rows: vec![None; rows], taken: 0 }
    }

    /// Sentences taken from the source: where the source goes on after a restart.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Tokens that no window has held yet: those of unfinished sentences.
    pub fn pending(&self) -> usize {
        self.rows.iter().flatten().map(|row| row.sentence.len() + 1 - row.read).sum()
    }

    /// The next window, or `None` when the source ends before the window is full; what was read for that window is
    /// dropped, as in bilm-tf.
    ///
    /// # Errors
    /// Those of the source. Then the packer must not be used any more, as part of a window was read.
    pub fn next_window<E>(
        &mut self,
        places: &mut Places,
        mut source: impl FnMut() -> Result<Option<Sentence>, E>,
    ) -> Result<Option<Stream>, E> {
        let cells = self.rows.len() * self.positions;
        let mut stream = Stream {
            words: Vec::with_capacity(cells / 2),
            inputs: Vec::with_capacity(cells),
            targets: Vec::with_capacity(cells),
        };
        places.begin();
        for row in &mut self.rows {
            let mut left = self.positions;
            while left > 0 {
                if row.as_ref().is_none_or(Unfinished::is_finished) {
                    let Some(sentence) = source()? else { return Ok(None) };
                    self.taken += 1;
                    *row = Some(Unfinished { sentence, read: 0 });
                }
                let Some(current) = row else { break };
                while left > 0 && !current.is_finished() {
                    let (input, id) = current.symbol(current.read, self.direction, self.boundaries);
                    let (_, target) = current.symbol(current.read + 1, self.direction, self.boundaries);
                    stream.inputs.push(places.of(input, id, &mut stream.words));
                    stream.targets.push(target);
                    current.read += 1;
                    left -= 1;
                }
            }
        }
        Ok(Some(stream))
    }
}

/// Where words stand among the distinct ones of a window, from window to window: a packer that uses it again neither hashes nor
/// copies the words of the vocabulary.
#[derive(Debug, Default)]
pub struct Places {
    /// Number of the window.
    window: u64,
    /// By id.
    first: Vec<Option<First>>,
    /// The others of this window that have the id of a word in `first`: all words outside the vocabulary have the same.
    others: HashMap<Arc<str>, u32>,
}

/// The first word with an id.
#[derive(Debug)]
struct First {
    word: Arc<str>,
    /// The last window that has it, and its place there.
    window: u64,
    place: u32,
}

impl Places {
    /// Begins a window.
    fn begin(&mut self) {
        self.window += 1;
        self.others.clear();
    }

    /// The index of a word among the distinct ones of the window, to which it is added if it is new.
    fn of(&mut self, word: &str, id: u32, words: &mut Vec<Arc<str>>) -> u32 {
        let (id, next) = (id as usize, words.len() as u32);
        if id >= self.first.len() {
            self.first.resize_with(id + 1, || None);
        }
        let first = self.first[id].get_or_insert_with(|| First { word: word.into(), window: 0, place: 0 });
        if *first.word == *word {
            if first.window != self.window {
                (first.window, first.place) = (self.window, next);
                words.push(Arc::clone(&first.word));
            }
            return first.place;
        }
        if let Some(&place) = self.others.get(word) {
            return place;
        }
        let word = Arc::<str>::from(word);
        words.push(Arc::clone(&word));
        self.others.insert(word, next);
        next
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    const BOUNDARIES: Boundaries = Boundaries { begin: 0, end: 1 };

    /// Tokens are letters; their ids are 10 for `a`, 11 for `b` and so on.
    fn sentence(letters: &str) -> Sentence {
        let tokens = letters.char_indices();
        tokens.map(|(i, c)| (&letters[i..i + 1], u32::from(c) - u32::from('a') + 10)).collect()
    }

    fn windows(packer: &mut Packer, sentences: &[&str]) -> Vec<(String, Vec<u32>)> {
        let mut source = sentences.iter();
        let mut next = || Ok::<_, Infallible>(source.next().map(|letters| sentence(letters)));
        let mut all = Vec::new();
        let mut places = Places::default();
        while let Ok(Some(stream)) = packer.next_window(&mut places, &mut next) {
            let inputs: Vec<&str> = stream.inputs.iter().map(|&input| &*stream.words[input as usize]).collect();
            let rows: Vec<String> = inputs.chunks(packer.positions).map(|row| row.join(" ")).collect();
            all.push((rows.join(" | "), stream.targets));
        }
        all
    }

    /// By hand: sentences abc, de, (empty), f, ghijk, l in two rows of three tokens.
    const SENTENCES: [&str; 6] = ["abc", "de", "", "f", "ghijk", "l"];

    #[test]
    fn forward_windows_made_by_hand() {
        let mut packer = Packer::new(Direction::Forward, BOUNDARIES, 2, 3);
        let expected = [
            // Row 0 reads <S> a b of abc; row 1 reads <S> d e.
            ("<S> a b | <S> d e".to_owned(), vec![10, 11, 12, 13, 14, 1]),
            // Row 0 goes on with c and takes the empty sentence, then f; row 1 takes ghijk.
            ("c <S> <S> | <S> g h".to_owned(), vec![1, 1, 15, 16, 17, 18]),
            // Row 0 goes on with f and takes l.
            ("f <S> l | i j k".to_owned(), vec![1, 21, 1, 19, 20, 1]),
        ];
        assert_eq!(windows(&mut packer, &SENTENCES), expected);
        assert_eq!((packer.taken(), packer.pending()), (6, 0));
    }

    #[test]
    fn backward_windows_made_by_hand() {
        let mut packer = Packer::new(Direction::Backward, BOUNDARIES, 2, 3);
        let expected = [
            ("</S> c b | </S> e d".to_owned(), vec![12, 11, 10, 14, 13, 0]),
            ("a </S> </S> | </S> k j".to_owned(), vec![0, 0, 15, 20, 19, 18]),
            ("f </S> l | i h g".to_owned(), vec![0, 21, 0, 17, 16, 0]),
        ];
        assert_eq!(windows(&mut packer, &SENTENCES), expected);
    }

    /// A packer that was stored between any two windows goes on with the same windows.
    #[test]
    fn a_stored_packer_goes_on() {
        let all = ["abcdefg", "h", "ij", "", "klmno", "pq", "r", "st", "uvwxyz", "a", "b"];
        let whole = windows(&mut Packer::new(Direction::Forward, BOUNDARIES, 3, 2), &all);
        for stop in 0..whole.len() {
            let mut first = Packer::new(Direction::Forward, BOUNDARIES, 3, 2);
            let mut source = all.iter();
            let mut next = || Ok::<_, Infallible>(source.next().map(|letters| sentence(letters)));
            let mut places = Places::default();
            (0..stop).for_each(|_| drop(first.next_window(&mut places, &mut next)));
            let mut second: Packer = serde_json::from_str(&serde_json::to_string(&first).unwrap()).unwrap();
            assert_eq!(windows(&mut second, &all[first.taken() as usize..]), whole[stop..]);
        }
    }

    /// By hand: of 26 letters, `x y z` are left after 24 windows of one token: `<S>` and 23 letters were inputs, and the last
    /// target, `x`, is the next input. Backwards, `c b a` are left.
    #[test]
    fn what_was_read_of_a_long_sentence_is_not_stored() {
        for (direction, left) in [(Direction::Forward, "xyz"), (Direction::Backward, "abc")] {
            let mut packer = Packer::new(direction, BOUNDARIES, 1, 1);
            let mut next = || Ok::<_, Infallible>(Some(sentence("abcdefghijklmnopqrstuvwxyz")));
            let mut places = Places::default();
            (0..24).for_each(|_| drop(packer.next_window(&mut places, &mut next)));
            let stored = serde_json::to_value(&packer).unwrap();
            assert_eq!(stored["rows"][0]["sentence"]["text"], left, "{stored}");
            // Stored again, it is the same, and a copy has no text of its own.
            let restored: Packer = serde_json::from_value(stored.clone()).unwrap();
            assert_eq!(serde_json::to_value(&restored).unwrap(), stored);
            assert_eq!(restored.pending(), packer.pending());
            let (one, other) = (packer.rows[0].clone().unwrap(), packer.clone().rows[0].clone().unwrap());
            assert!(Arc::ptr_eq(&one.sentence.list, &other.sentence.list));
        }
    }

    /// By hand: words outside the vocabulary have id 2, and each of them is a word of its own, whichever came first.
    #[test]
    fn words_with_one_id_are_different_words() {
        let id = |token: &'static str| (token, if token == "a" { 3 } else { 2 });
        let source = [["x", "y", "a"], ["y", "a", "x"], ["z", "z", "a"]]
            .map(|tokens| tokens.into_iter().map(id).collect::<Sentence>());
        let mut source = source.into_iter();
        let (mut packer, mut places) = (Packer::new(Direction::Forward, BOUNDARIES, 1, 4), Places::default());
        let mut next = || {
            let stream = packer.next_window(&mut places, || Ok::<_, Infallible>(source.next())).unwrap().unwrap();
            (stream.words.iter().map(|word| word.to_string()).collect::<Vec<_>>(), stream.inputs)
        };
        assert_eq!(next(), (["<S>", "x", "y", "a"].map(str::to_owned).to_vec(), vec![0, 1, 2, 3]));
        assert_eq!(next(), (["<S>", "y", "a", "x"].map(str::to_owned).to_vec(), vec![0, 1, 2, 3]));
        assert_eq!(next(), (["<S>", "z", "a"].map(str::to_owned).to_vec(), vec![0, 1, 1, 2]));
    }

    /// By hand. A sentence of a list is stored as if it were alone.
    #[test]
    fn sentences_of_a_list() {
        let mut list = SentenceList::default();
        for letters in ["abc", "", "de"] {
            sentence(letters).tokens().for_each(|token| list.push(token, 7));
            list.end();
        }
        let list = Arc::new(list);
        let tokens = |number| list.sentence(number).map(|found| found.tokens().map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(
            (list.len(), tokens(0).unwrap().concat(), tokens(1), tokens(3)),
            (3, "abc".into(), Some(vec![]), None)
        );
        let last = list.sentence(2).unwrap();
        assert_eq!(last, [("d", 7), ("e", 7)].into_iter().collect());
        let stored = r#"{"text":"de","ends":[1,2],"ids":[7,7]}"#;
        assert_eq!(serde_json::to_string(&last).unwrap(), stored);
        assert_eq!(serde_json::from_str::<Sentence>(stored).unwrap(), last);
    }

    #[test]
    fn an_error_of_the_source_is_returned() {
        let mut packer = Packer::new(Direction::Forward, BOUNDARIES, 1, 1);
        assert_eq!(packer.next_window(&mut Places::default(), || Err("broken")), Err("broken"));
    }
}
