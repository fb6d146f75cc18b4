//! Sentences to windows of fixed size, one direction at a time (bilm-tf `bilm/data.py`, `_get_batch`). Pure: no tensors.
//!
//! A row of a window continues the row of the window before it. A row that has read its sentence takes the next one from
//! the common source, also in the middle of a window; rows are filled one after the other. There is no padding.
//!
//! The forward direction reads `<S> w1 .. wn` and predicts `w1 .. wn </S>`; the backward one reads `</S> wn .. w1` and
//! predicts `wn .. w1 <S>`.

use serde::{Deserialize, Serialize};

use super::{
    places::Places,
    sentence::{Sentence, Symbol},
    window::Stream,
};
use crate::chars::{BEGIN_SENTENCE_TOKEN, END_SENTENCE_TOKEN};

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
    fn symbol(&self, i: usize, direction: Direction, boundaries: Boundaries) -> Symbol<'_> {
        let n = self.sentence.len();
        let in_text = match direction {
            Direction::Forward => i,
            Direction::Backward => n + 1 - i,
        };
        match in_text {
            0 => Symbol::Other(BEGIN_SENTENCE_TOKEN, boundaries.begin),
            past if past == n + 1 => Symbol::Other(END_SENTENCE_TOKEN, boundaries.end),
            token => self.sentence.symbol(token - 1),
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

    /// The next window, or `None` when the source ends before the window is full; what was read for that window is dropped, as in
    /// bilm-tf. Inputs are indices into the words that [`Places::finish`] returns, which is called when all directions of the window
    /// are there. `places` has the vocabulary of the sentences.
    ///
    /// # Errors
    /// Those of the source. Then the packer must not be used any more, as part of a window was read.
    pub fn next_window<E>(
        &mut self,
        places: &mut Places,
        mut source: impl FnMut() -> Result<Option<Sentence>, E>,
    ) -> Result<Option<Stream>, E> {
        let cells = self.rows.len() * self.positions;
        let mut stream = Stream { inputs: Vec::with_capacity(cells), targets: Vec::with_capacity(cells) };
        for row in &mut self.rows {
            let mut left = self.positions;
            while left > 0 {
                if row.as_ref().is_none_or(Unfinished::is_finished) {
                    let Some(sentence) = source()? else { return Ok(None) };
                    self.taken += 1;
                    *row = Some(Unfinished { sentence, read: 0 });
                }
                let Some(current) = row else { break };
                let symbol = |i| current.symbol(i, self.direction, self.boundaries);
                let last = current.sentence.len().min(current.read + left - 1);
                let mut input = symbol(current.read);
                for i in current.read..=last {
                    let next = symbol(i + 1);
                    stream.inputs.push(places.of(input));
                    stream.targets.push(next.id());
                    input = next;
                }
                left -= last + 1 - current.read;
                current.read = last + 1;
            }
        }
        Ok(Some(stream))
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, convert::Infallible, sync::Arc};

    use super::{
        super::{sentence::SentenceList, window::Window},
        *,
    };

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
            let words = places.finish();
            let inputs: Vec<&str> = stream.inputs.iter().map(|&input| words.word(input as usize)).collect();
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

    /// Sentences with ids give the windows of sentences with text, in both directions, also after both packers were stored and restored
    /// after any window. By hand: 24 words in 10 sentences are 34 predictions, which fill five windows of six.
    #[test]
    fn words_with_ids_are_those_with_text() {
        let vocabulary: Arc<[Arc<str>]> = ["<S>", "</S>", "<UNK>", "a", "b", "c"].map(Arc::from).into();
        let id = |word: &str| vocabulary.iter().position(|known| **known == *word).map(|id| id as u32);
        let text = ["a b x c", "", "<UNK> x y", "</S> a y", "b", "c c <S> z a b", "x", "a b c", "y z", "c"];
        let mut list = SentenceList::new(Arc::clone(&vocabulary));
        for sentence in text {
            for word in sentence.split_whitespace() {
                match id(word) {
                    Some(id) => list.push_word(id),
                    None => list.push_other(word, 2),
                }
            }
            list.end();
        }
        let list = Arc::new(list);
        let with_text = |n: usize| {
            let words = text.get(n)?.split_whitespace();
            Some(words.map(|word| (word, id(word).unwrap_or(2))).collect::<Sentence>())
        };
        let all = |sentence: &dyn Fn(usize) -> Option<Sentence>, mut places: Places, stored_after: Option<usize>| {
            let mut packers = [Direction::Forward, Direction::Backward].map(|d| Packer::new(d, BOUNDARIES, 2, 3));
            let mut found = Vec::new();
            loop {
                let streams = packers.each_mut().map(|packer| {
                    let mut next = packer.taken() as usize;
                    packer.next_window(&mut places, || {
                        next += 1;
                        Ok::<_, Infallible>(sentence(next - 1))
                    })
                });
                let [Ok(Some(forward)), Ok(Some(backward))] = streams else { return found };
                found.push(Window::of_streams(places.finish(), [forward, backward], 2));
                if stored_after == Some(found.len()) {
                    packers = serde_json::from_str(&serde_json::to_string(&packers).unwrap()).unwrap();
                }
            }
        };
        let expected = all(&with_text, Places::default(), None);
        assert_eq!(expected.len(), 5);
        for window in &expected {
            assert_eq!(window.words.iter().collect::<HashSet<_>>().len(), window.words.len(), "{window:?}");
        }
        for stored_after in (1..=5).map(Some).chain([None]) {
            let by_id = |n| list.sentence(n);
            assert_eq!(all(&by_id, Places::new(Arc::clone(&vocabulary)), stored_after), expected, "{stored_after:?}");
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
            assert!(one.sentence.shares(&other.sentence));
        }
    }

    #[test]
    fn an_error_of_the_source_is_returned() {
        let mut packer = Packer::new(Direction::Forward, BOUNDARIES, 1, 1);
        assert_eq!(packer.next_window(&mut Places::default(), || Err("broken")), Err("broken"));
    }
}
