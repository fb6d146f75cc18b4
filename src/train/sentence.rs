//! Sentences as vocabulary ids, with the text of words outside the vocabulary.

use std::{fmt, ops::Range, sync::Arc};

use serde::{Deserialize, Serialize};

/// A token of a sentence.
#[derive(Debug, Clone, Copy)]
pub(super) enum Symbol<'s> {
    /// A word of the vocabulary, by its id.
    Word(u32),
    /// A word held as text, with its id as a target: outside the vocabulary, or of a list without a vocabulary.
    Other(&'s str, u32),
}

impl Symbol<'_> {
    pub(super) fn id(self) -> u32 {
        match self {
            Self::Word(id) | Self::Other(_, id) => id,
        }
    }
}

/// Sentences without boundaries. All sentences share a few allocations, because the threads of a run contend for the lock of one malloc
/// arena. A word of the vocabulary takes four bytes, because reading sentences in random order misses the CPU caches.
#[derive(Debug, Default)]
pub struct SentenceList {
    /// Words of the vocabulary by id.
    vocabulary: Arc<[Arc<str>]>,
    /// For each token the id of a word of the vocabulary; or, counted from the size of the vocabulary, the number of one of
    /// `others`.
    tokens: Vec<u32>,
    /// Texts of the words that are not in the vocabulary, one after the other.
    text: String,
    /// For each of them the byte in `text` at which it ends, and its id as a target.
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

    /// Appends a word by its text to the sentence that has not ended. `id` is its id as a target, `<UNK>` for unknown words.
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
#[serde(into = "StoredSentence", try_from = "StoredSentence")]
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

impl TryFrom<StoredSentence> for Sentence {
    type Error = &'static str;

    fn try_from(StoredSentence { text, ends, ids }: StoredSentence) -> Result<Self, Self::Error> {
        if ends.len() != ids.len() {
            return Err("a stored sentence has another number of ends than of ids");
        }
        if !ends.is_sorted() || !ends.iter().all(|&end| text.is_char_boundary(end as usize)) {
            return Err("a token of a stored sentence does not end at a character of its text");
        }
        let n = ids.len() as u32;
        let others = ends.into_iter().zip(ids).collect();
        let list = SentenceList { text, others, tokens: (0..n).collect(), lasts: vec![n], ..SentenceList::default() };
        Ok(Self { tokens: 0..n, list: Arc::new(list) })
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

    #[test]
    fn stored_sentences_that_do_not_fit_their_text_are_refused() {
        for (stored, reason) in [
            (r#"{"text":"de","ends":[1],"ids":[7,2]}"#, "number of ends"),
            (r#"{"text":"de","ends":[1,3],"ids":[7,2]}"#, "does not end"),
            (r#"{"text":"de","ends":[2,1],"ids":[7,2]}"#, "does not end"),
            (r#"{"text":"é","ends":[1,2],"ids":[7,2]}"#, "does not end"),
        ] {
            let error = serde_json::from_str::<Sentence>(stored).unwrap_err().to_string();
            assert!(error.contains(reason), "{stored}: {error}");
        }
    }
}
