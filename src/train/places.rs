//! The distinct words of a window.

use std::{collections::HashMap, sync::Arc};

use super::{sentence::Symbol, words::Words};

/// Indices of the distinct words of a window. Reused for each window, so that words of the vocabulary are neither hashed nor copied.
#[derive(Debug, Default)]
pub struct Places {
    /// Words of the vocabulary by id.
    vocabulary: Arc<[Arc<str>]>,
    /// By id: number of the last window that has the word, and its place there.
    known: Vec<(u32, u32)>,
    /// Number of the window, from 1.
    window: u32,
    /// Places of the words of this window that are not in the vocabulary.
    others: HashMap<Arc<str>, u32>,
    /// The distinct words of this window.
    words: Words,
}

impl Places {
    /// For sentences of a [`SentenceList`](super::SentenceList) with this vocabulary, and sentences that hold all of their text.
    pub fn new(vocabulary: Arc<[Arc<str>]>) -> Self {
        let words = Words::with_capacity(Arc::clone(&vocabulary), 0);
        Self { known: vec![(0, 0); vocabulary.len()], vocabulary, window: 1, words, ..Self::default() }
    }

    /// Ends the window, and returns its distinct words.
    pub fn finish(&mut self) -> Words {
        self.window = self.window.checked_add(1).unwrap_or_else(|| {
            self.known.fill((0, 0));
            1
        });
        self.others.clear();
        let next = Words::with_capacity(Arc::clone(&self.vocabulary), self.words.len());
        std::mem::replace(&mut self.words, next)
    }

    /// The index of a word among the distinct ones of the window, to which it is added if it is new.
    pub(super) fn of(&mut self, symbol: Symbol<'_>) -> u32 {
        match symbol {
            Symbol::Word(id) => self.known(id),
            Symbol::Other(word, id) if self.vocabulary.get(id as usize).is_some_and(|known| **known == *word) => {
                self.known(id)
            }
            Symbol::Other(word, _) => self.other(word),
        }
    }

    fn known(&mut self, id: u32) -> u32 {
        let (window, place) = &mut self.known[id as usize];
        if *window != self.window {
            (*window, *place) = (self.window, self.words.len() as u32);
            self.words.push_word(id);
        }
        *place
    }

    fn other(&mut self, word: &str) -> u32 {
        if let Some(&place) = self.others.get(word) {
            return place;
        }
        let (word, place) = (Arc::<str>::from(word), self.words.len() as u32);
        self.words.push_other(Arc::clone(&word));
        self.others.insert(word, place);
        place
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: a word is the same one whether its sentence has its text, as after a restart, or its id; words outside the
    /// vocabulary have id 1, and each of them is a word of its own.
    #[test]
    fn words_of_two_windows() {
        let mut places = Places::new(["a", "<UNK>", "b"].map(Arc::from).into());
        let mut window = |symbols: &[Symbol<'_>]| {
            let found: Vec<u32> = symbols.iter().map(|symbol| places.of(*symbol)).collect();
            (found, places.finish())
        };
        let (b, b_again, unknown) = (Symbol::Word(2), Symbol::Other("b", 2), Symbol::Word(1));
        let (x, y, z) = (Symbol::Other("x", 1), Symbol::Other("y", 1), Symbol::Other("z", 1));
        let expected = (vec![0, 1, 0, 2, 1, 3], ["b", "x", "<UNK>", "y"].into_iter().collect());
        assert_eq!(window(&[b, x, b_again, unknown, x, y]), expected);
        let expected = (vec![0, 1, 1, 2], ["y", "b", "z"].into_iter().collect());
        assert_eq!(window(&[y, b_again, b, z]), expected);
    }

    /// After the window number wraps around, words of the first windows do not count as words of this one.
    #[test]
    fn the_window_number_wraps_around() {
        let mut places = Places::new(["a", "b"].map(Arc::from).into());
        places.of(Symbol::Word(1));
        places.finish();
        places.window = u32::MAX;
        places.of(Symbol::Word(0));
        assert_eq!(places.finish().len(), 1);
        assert_eq!((places.window, places.of(Symbol::Word(1)), places.of(Symbol::Word(0))), (1, 0, 1));
        assert_eq!(places.finish(), ["b", "a"].into_iter().collect());
    }
}
