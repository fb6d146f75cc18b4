//! The distinct words that a window reads.

use std::{fmt, sync::Arc};

/// Words, each by its id or, outside the vocabulary, as text. Copying words of the vocabulary touches no reference counts: the thread
/// that makes windows and those that read them would contend for the count of each frequent word.
#[derive(Clone, Default)]
pub struct Words {
    /// Words of the vocabulary by id.
    vocabulary: Arc<[Arc<str>]>,
    /// For each word its id; or, counted from the size of the vocabulary, its number in `others`.
    ids: Vec<u32>,
    /// Words that are not in the vocabulary.
    others: Vec<Arc<str>>,
}

impl Words {
    /// No words, with space for `capacity` of them.
    pub(super) fn with_capacity(vocabulary: Arc<[Arc<str>]>, capacity: usize) -> Self {
        Self { vocabulary, ids: Vec::with_capacity(capacity), others: Vec::new() }
    }

    /// Appends the word of the vocabulary with this id.
    pub(super) fn push_word(&mut self, id: u32) {
        self.ids.push(id);
    }

    /// Appends a word that is not in the vocabulary.
    pub(super) fn push_other(&mut self, word: Arc<str>) {
        self.ids.push((self.vocabulary.len() + self.others.len()) as u32);
        self.others.push(word);
    }

    /// Number of words.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there is no word.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Word `i`.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn word(&self, i: usize) -> &str {
        match self.other(i) {
            Some(other) => other,
            None => &self.vocabulary[self.ids[i] as usize],
        }
    }

    /// All words.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        (0..self.len()).map(|i| self.word(i))
    }

    /// The words with these numbers.
    pub(super) fn select(&self, numbers: impl ExactSizeIterator<Item = usize>) -> Self {
        let mut selected = Self::with_capacity(Arc::clone(&self.vocabulary), numbers.len());
        for i in numbers {
            match self.other(i) {
                Some(other) => selected.push_other(Arc::clone(other)),
                None => selected.push_word(self.ids[i]),
            }
        }
        selected
    }

    /// Word `i`, if it is not in the vocabulary.
    fn other(&self, i: usize) -> Option<&Arc<str>> {
        (self.ids[i] as usize).checked_sub(self.vocabulary.len()).map(|other| &self.others[other])
    }
}

/// Words without a vocabulary.
impl<'w> FromIterator<&'w str> for Words {
    fn from_iter<I: IntoIterator<Item = &'w str>>(words: I) -> Self {
        let mut all = Self::default();
        words.into_iter().for_each(|word| all.push_other(Arc::from(word)));
        all
    }
}

/// Compares texts.
impl PartialEq for Words {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for Words {}

impl fmt::Debug for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand.
    #[test]
    fn words_by_id_and_as_text() {
        let mut words = Words::with_capacity(["a", "b"].map(Arc::from).into(), 4);
        words.push_word(1);
        words.push_other(Arc::from("x"));
        words.push_word(0);
        words.push_other(Arc::from("y"));
        assert_eq!((words.len(), words.iter().collect::<String>()), (4, "bxay".to_owned()));
        assert_eq!(words.select([3, 2, 3].into_iter()), ["y", "a", "y"].into_iter().collect());
        assert_eq!(words, ["b", "x", "a", "y"].into_iter().collect());
        assert_ne!(words, ["b", "x", "a"].into_iter().collect());
        assert!(Words::default().is_empty() && words.select([].into_iter()).is_empty());
    }
}
