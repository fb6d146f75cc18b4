//! Sentences as training reads them: ids of words, and the text of words that have none.

use std::{fmt, ops::Range, sync::Arc};

use serde::{Deserialize, Serialize};

/// A word as it is stored, and read.
#[derive(Debug, Clone, Copy)]
pub(super) enum Symbol<'s> {
    /// A word of the vocabulary, by its id.
    Word(u32),
    /// A word with its text, and the id under which it is predicted.
    Other(&'s str, u32),
}

impl Symbol<'_> {
    pub(super) fn id(self) -> u32 {
        match self {
            Self::Word(id) | Self::Other(_, id) => id,
        }
    }
}

/// Sentences without boundaries, one after the other. They share a few allocations: the threads of a run share one allocator, for
/// whose lock they would wait. A word of the vocabulary takes four bytes, because sentences are read in a random order, from memory
/// that is in no cache.
#[derive(Debug, Default)]
pub struct SentenceList {
    /// Words of the vocabulary by id.
    vocabulary: Arc<[Arc<str>]>,
    /// For each token the id of a word of the vocabulary; or, counted from the size of the vocabulary, the number of one of
    /// `others`.
    tokens: Vec<u32>,
    /// Texts of the words that are not in the vocabulary, one after the other.
    text: String,
    /// For each of them the byte in `text` at which it ends, and the id under which it is predicted.
    others: Vec<(u32, u32)>,
    /// Number of the token before which each sentence ends.
    lasts: Vec<u32>,
}

impl SentenceList {
    /// An empty list, of sentences with the words of a vocabulary.
    pub fn new(vocabulary: Arc<[Arc<str>]>) -> Self {
        Self { vocabulary, ..Self::default() }
    }

    /// Appends a word to the sentence that has not ended, by its id, which must be one of the vocabulary.
    pub fn push_word(&mut self, id: u32) {
        debug_assert!((id as usize) < self.vocabulary.len(), "{id} of {}", self.vocabulary.len());
        self.tokens.push(id);
    }

    /// Appends a word that is not in the vocabulary, and the id under which it is predicted, to the sentence that has not ended.
    pub fn push_other(&mut self, word: &str, id: u32) {
        self.tokens.push((self.vocabulary.len() + self.others.len()) as u32);
        self.text.push_str(word);
        self.others.push((self.text.len() as u32, id));
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

    /// Token `i`.
    pub(super) fn symbol(&self, i: usize) -> Symbol<'_> {
        let list = &self.list;
        let token = list.tokens[self.tokens.start as usize + i];
        let Some(other) = (token as usize).checked_sub(list.vocabulary.len()) else { return Symbol::Word(token) };
        let start = other.checked_sub(1).map_or(0, |before| list.others[before].0);
        let (end, id) = list.others[other];
        Symbol::Other(&list.text[start as usize..end as usize], id)
    }

    /// Token `i`, and its id in the vocabulary.
    pub(super) fn token(&self, i: usize) -> (&str, u32) {
        match self.symbol(i) {
            Symbol::Word(id) => (&self.list.vocabulary[id as usize], id),
            Symbol::Other(word, id) => (word, id),
        }
    }

    /// Whether copies of a sentence share its text.
    #[cfg(test)]
    pub(super) fn shares(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.list, &other.list)
    }
}

/// A sentence of these tokens, and their ids in the vocabulary.
impl<'t> FromIterator<(&'t str, u32)> for Sentence {
    fn from_iter<I: IntoIterator<Item = (&'t str, u32)>>(tokens: I) -> Self {
        let mut list = SentenceList::default();
        tokens.into_iter().for_each(|(token, id)| list.push_other(token, id));
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

/// What is stored of a sentence: it can be read without its vocabulary.
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
        let others: Vec<_> = ends.into_iter().zip(ids).collect();
        let n = others.len() as u32;
        let list = SentenceList { text, others, tokens: (0..n).collect(), lasts: vec![n], ..SentenceList::default() };
        Self { tokens: 0..n, list: Arc::new(list) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand. A sentence of a list is stored as if it were alone, whether its words are in the vocabulary or not.
    #[test]
    fn sentences_of_a_list() {
        let mut list = SentenceList::new(["a", "b", "e"].map(Arc::from).into());
        [0, 1].into_iter().for_each(|id| list.push_word(id));
        list.push_other("c", 7);
        list.end();
        list.end();
        list.push_other("d", 7);
        list.push_word(2);
        list.end();
        let list = Arc::new(list);
        let tokens = |number| list.sentence(number).map(|found| found.tokens().map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(
            (list.len(), tokens(0).unwrap().concat(), tokens(1), tokens(3)),
            (3, "abc".into(), Some(vec![]), None)
        );
        let last = list.sentence(2).unwrap();
        assert_eq!(last, [("d", 7), ("e", 2)].into_iter().collect());
        let stored = r#"{"text":"de","ends":[1,2],"ids":[7,2]}"#;
        assert_eq!(serde_json::to_string(&last).unwrap(), stored);
        assert_eq!(serde_json::from_str::<Sentence>(stored).unwrap(), last);
    }
}
