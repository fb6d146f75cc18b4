//! Cuts rows into sentences of at most `max_tokens` tokens, and notes where their tokens are in the text.

use std::ops::Range;

use arrow::array::ArrayRef;

use crate::{
    chars::{BEGIN_SENTENCE_TOKEN, END_SENTENCE_TOKEN},
    columns::{
        embedded::ColumnStats,
        rows::{Row, Rows},
        setup::Setup,
        vectors::Place,
    },
    engine::{Sentence, Words},
    row_error::RowError,
    spec::{EmbedSpec, Level, OnLong, SentenceMode},
    states::with_boundaries,
    text::{self, windows::windows},
};

/// Texts of more bytes are embedded piece by piece, so that a huge cell needs no more memory than its pieces.
const HUGE_TEXT: usize = 1 << 20;
/// Maximum size in bytes of a sentence. With sentences off a text of any size is one sentence, whose tokens are all in
/// memory at once.
const MAX_SENTENCE_BYTES: usize = 8 << 20;
/// Maximum size in bytes of the token vectors of one row.
pub(super) const MAX_TOKEN_BYTES: usize = 256 << 20;

/// A token as the model reads it, and its first and last byte in the text.
type PlacedToken<'t> = (&'t str, u32, u32);

/// What a row asks of the engine.
pub(super) enum RowPlan {
    Null,
    /// `sentences[first..first + count]`, and at level `token` where their kept tokens are in the text.
    Sentences {
        first: usize,
        count: usize,
        places: Vec<Place>,
        truncated: bool,
        tokens: usize,
    },
    /// A text to be embedded piece by piece.
    Huge,
    Bad(RowError),
}

/// Cuts rows into sentences.
pub(super) struct Cutter<'s> {
    spec: &'s EmbedSpec,
    /// Maximum number of tokens of a row whose vectors are returned.
    max_row_tokens: usize,
    /// State `carry`: every row is one sentence with its boundaries, empty rows too.
    carried: bool,
    /// The sentences of all rows so far.
    pub(super) sentences: Vec<Sentence>,
}

/// What was found in one row, or in a piece of a huge text.
pub(super) struct Cut {
    /// Where the kept tokens are; only at level `token`.
    pub(super) places: Vec<Place>,
    /// Number of kept tokens, with boundaries.
    kept: usize,
    pub(super) truncated: bool,
    /// Index of the next sentence in the text.
    pub(super) sentence: u32,
    pub(super) tokens: usize,
}

impl Cut {
    /// An empty result, whose next sentence has this index in the text.
    pub(super) fn from_sentence(sentence: u32) -> Self {
        Self { places: Vec::new(), kept: 0, truncated: false, sentence, tokens: 0 }
    }

    /// Notes where the tokens `keep` of a sentence are, and its boundaries if they are kept too.
    fn place(&mut self, tokens: &[PlacedToken<'_>], keep: Range<usize>, begin: bool, end: bool) {
        let sentence = self.sentence;
        if begin {
            self.places.push(self.boundary(tokens, BEGIN_SENTENCE_TOKEN));
        }
        let kept = tokens[keep].iter();
        self.places.extend(kept.map(|&(_, start, end)| Place { start, end, sentence, boundary: None }));
        if end {
            self.places.push(self.boundary(tokens, END_SENTENCE_TOKEN));
        }
    }

    /// A boundary is at the edge of its sentence and covers no byte of the text.
    fn boundary(&self, tokens: &[PlacedToken<'_>], word: &'static str) -> Place {
        let at = if word == BEGIN_SENTENCE_TOKEN {
            tokens.first().map_or(0, |t| t.1)
        } else {
            tokens.last().map_or(0, |t| t.2)
        };
        Place { start: at, end: at, sentence: self.sentence, boundary: Some(word) }
    }
}

impl<'s> Cutter<'s> {
    pub(super) fn new(setup: &'s Setup, carried: bool) -> Self {
        let max_row_tokens = match setup.spec.level {
            Level::Sentence => usize::MAX,
            Level::Token => MAX_TOKEN_BYTES / (size_of::<f32>() * setup.vector_type.width()),
        };
        Self { max_row_tokens, carried, ..Self::without_model(&setup.spec) }
    }

    /// Rows of any number of tokens, each from the same start state.
    fn without_model(spec: &'s EmbedSpec) -> Self {
        Self { spec, max_row_tokens: usize::MAX, carried: false, sentences: Vec::new() }
    }

    /// Cuts all rows.
    pub(super) fn rows(mut self, rows: &Rows) -> (Vec<RowPlan>, Vec<Sentence>, ColumnStats) {
        let mut stats = ColumnStats { rows: rows.len(), ..ColumnStats::default() };
        let mut tokenizer = text::Cutter::new(self.spec.tokenizer, self.spec.sentences);
        let plans = (0..rows.len()).map(|i| self.row(&rows.get(i), &mut tokenizer, &mut stats)).collect();
        stats.sentences = self.sentences.len();
        stats.tokens = self.sentences.iter().map(|s| s.words.len()).sum();
        (plans, self.sentences, stats)
    }

    /// Cuts one row and adds its sentences.
    fn row(&mut self, row: &Row<'_>, tokenizer: &mut text::Cutter, stats: &mut ColumnStats) -> RowPlan {
        let first = self.sentences.len();
        let mut cut = Cut::from_sentence(0);
        let done = match row {
            Row::Null => {
                stats.nulls += 1;
                if self.carried {
                    self.push_carried(&[], &mut cut);
                }
                return RowPlan::Null;
            }
            Row::Bad(error) => Err(error.clone()),
            Row::Text(text) if text.len() > HUGE_TEXT && !self.carried => return RowPlan::Huge,
            Row::Text(text) => self.text(text, tokenizer, &mut cut),
            Row::Tokens(tokens) => self.tokens(tokens, &mut cut),
        };
        if let Err(error) = done {
            self.sentences.truncate(first);
            if self.carried {
                self.push_carried(&[], &mut cut);
            }
            stats.errors += 1;
            return RowPlan::Bad(error);
        }
        stats.empty += usize::from(cut.kept == 0);
        stats.truncated += usize::from(cut.truncated);
        let count = self.sentences.len() - first;
        RowPlan::Sentences { first, count, places: cut.places, truncated: cut.truncated, tokens: cut.tokens }
    }

    fn text(&mut self, text: &str, tokenizer: &mut text::Cutter, cut: &mut Cut) -> Result<(), RowError> {
        check_size(text, self.spec.sentences)?;
        tokenizer.try_cut(text, |tokens| self.sentence(&placed(text, tokens), cut))?;
        if cut.sentence == 0 && self.carried {
            self.push_carried(&[], cut);
        }
        Ok(())
    }

    /// A list of tokens is one sentence; offsets count in the tokens joined by single spaces.
    fn tokens(&mut self, tokens: &[&str], cut: &mut Cut) -> Result<(), RowError> {
        let mut start = 0_usize;
        let mut placed = Vec::with_capacity(tokens.len());
        for token in tokens {
            let end = start + token.len();
            if end > MAX_SENTENCE_BYTES {
                return Err(RowError::TokenListTooLarge { max_mib: MAX_SENTENCE_BYTES >> 20 });
            }
            placed.push((*token, start as u32, end as u32));
            start = end + 1;
        }
        if placed.is_empty() {
            if self.carried {
                self.push_carried(&[], cut);
            }
            return Ok(());
        }
        self.sentence(&placed, cut)
    }

    /// Adds one sentence of a row, in windows if it is too long.
    pub(super) fn sentence(&mut self, tokens: &[PlacedToken<'_>], cut: &mut Cut) -> Result<(), RowError> {
        let max_tokens = self.spec.max_tokens;
        let mut tokens = tokens;
        if tokens.len() > max_tokens {
            match self.spec.on_long {
                OnLong::Window => {}
                OnLong::Truncate => {
                    tokens = &tokens[..max_tokens];
                    cut.truncated = true;
                }
                OnLong::Error => return Err(RowError::TooManyTokens { tokens: tokens.len(), max_tokens }),
            }
        }
        cut.tokens += tokens.len();
        if cut.tokens > self.max_row_tokens {
            return Err(vectors_too_large());
        }
        if self.carried {
            self.push_carried(tokens, cut);
        } else {
            self.push_windows(tokens, cut);
        }
        cut.sentence += 1;
        Ok(())
    }

    fn push_windows(&mut self, tokens: &[PlacedToken<'_>], cut: &mut Cut) {
        let boundaries = self.spec.boundaries;
        for window in windows(tokens.len(), self.spec.max_tokens) {
            let of_window = &tokens[window.range.clone()];
            let mut words =
                Words::with_capacity(of_window.len(), of_window.iter().map(|(word, _, _)| word.len()).sum());
            of_window.iter().for_each(|(word, _, _)| words.push(word));
            let (first, last) = (window.keep.start == 0, window.keep.end == tokens.len());
            // With boundaries the engine puts `<S>` at index 0. Only the outermost windows keep theirs.
            let shift = usize::from(boundaries);
            let from = window.keep.start - window.range.start + shift - usize::from(boundaries && first);
            let to = window.keep.end - window.range.start + shift + usize::from(boundaries && last);
            if self.spec.level == Level::Token {
                cut.place(tokens, window.keep, boundaries && first, boundaries && last);
            }
            cut.kept += to - from;
            self.sentences.push(Sentence { words, keep: from..to });
        }
    }

    /// In state `carry` the words of a sentence include its boundaries.
    fn push_carried(&mut self, tokens: &[PlacedToken<'_>], cut: &mut Cut) {
        let words = with_boundaries(tokens.iter().map(|(word, _, _)| word));
        let n = words.len();
        let boundaries = self.spec.boundaries;
        if self.spec.level == Level::Token {
            cut.place(tokens, 0..tokens.len(), boundaries, boundaries);
        }
        let keep = if boundaries { 0..n } else { 1..n - 1 };
        cut.kept += keep.len();
        self.sentences.push(Sentence { words, keep });
    }
}

/// The tokens of a sentence with their places in `text`.
pub(super) fn placed<'t>(text: &'t str, tokens: &'t [text::Token]) -> Vec<PlacedToken<'t>> {
    tokens.iter().map(|t| (t.read(text), t.start as u32, t.end as u32)).collect()
}

/// Cuts a column into sentences as an embedder with these settings does before it runs the model, and counts them. For benchmarks of
/// everything but the model.
///
/// # Errors
/// [`Error::Column`](crate::Error::Column) when the column holds no text.
pub fn count_sentences(column: &ArrayRef, spec: &EmbedSpec) -> crate::error::Result<ColumnStats> {
    Ok(Cutter::without_model(spec).rows(&Rows::new(column)?).2)
}

/// Checks that byte offsets can count the text, and that a sentence can be tokenised in one piece.
pub(super) fn check_size(text: &str, sentences: SentenceMode) -> Result<(), RowError> {
    let bytes = text.len();
    if u32::try_from(bytes).is_err() {
        return Err(RowError::TextTooLarge { bytes });
    }
    if sentences == SentenceMode::Off && bytes > MAX_SENTENCE_BYTES {
        return Err(RowError::SentenceTooLarge { bytes, max_mib: MAX_SENTENCE_BYTES >> 20 });
    }
    Ok(())
}

pub(super) fn vectors_too_large() -> RowError {
    RowError::VectorsTooLarge { max_mib: MAX_TOKEN_BYTES >> 20 }
}
