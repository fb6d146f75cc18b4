//! Texts of many megabytes, embedded piece by piece.

use crate::{
    columns::{
        cutter::{Cut, Cutter, MAX_TOKEN_BYTES, check_size, placed, vectors_too_large},
        embedded::ColumnStats,
        setup::{Setup, push_all},
        vectors::{Outcome, Place, TokenRow, words_of_text},
    },
    engine::{Cost, EngineError, Sentence, Vectors},
    error::Result,
    pooling::Joiner,
    row_error::RowError,
    text,
};

/// Sentences of a piece.
const PIECE_SENTENCES: usize = 2048;

/// A text of which a bounded number of sentences is in memory at any time.
pub(super) struct HugeText<'r> {
    setup: &'r Setup,
    text: &'r str,
    sentences: Box<dyn Iterator<Item = Vec<text::Token>> + Send + 'r>,
    /// `None` at level `token`.
    joiner: Option<Joiner>,
    /// Token vectors so far, at level `token`.
    tokens: TokenRow,
    /// Where the tokens of the piece are that the engine computes.
    places: Vec<Place>,
    /// Index of the next sentence.
    sentence: u32,
    /// Tokens of the text so far.
    n_tokens: usize,
    cost: Cost,
    error: Option<RowError>,
    /// Counts of sentences, tokens and truncated rows; complete when the text is finished.
    stats: ColumnStats,
}

/// A huge text that was embedded.
pub(super) struct HugeRow {
    pub(super) outcome: Outcome,
    pub(super) stats: ColumnStats,
    pub(super) tokens: usize,
    pub(super) cost: Cost,
}

impl<'r> HugeText<'r> {
    pub(super) fn new(setup: &'r Setup, text: &'r str) -> Self {
        Self {
            setup,
            text,
            sentences: Box::new(text::sentences(text, setup.spec.tokenizer, setup.spec.sentences)),
            joiner: setup.joiner(),
            tokens: TokenRow::default(),
            places: Vec::new(),
            sentence: 0,
            n_tokens: 0,
            cost: Cost::default(),
            error: check_size(text, setup.spec.sentences).err(),
            stats: ColumnStats::default(),
        }
    }

    /// Sentences to compute next; `None` at the end of the text and after an error.
    pub(super) fn next_piece(&mut self) -> Option<Vec<Sentence>> {
        if self.error.is_some() {
            return None;
        }
        let mut cutter = Cutter::new(self.setup, false);
        let mut cut = Cut::from_sentence(self.sentence);
        while cutter.sentences.len() < PIECE_SENTENCES {
            let Some(tokens) = self.sentences.next() else { break };
            if let Err(error) = cutter.sentence(&placed(self.text, &tokens), &mut cut) {
                self.error = Some(error);
                return None;
            }
        }
        self.sentence = cut.sentence;
        self.n_tokens += cut.tokens;
        self.places = cut.places;
        self.stats.truncated |= usize::from(cut.truncated);
        self.stats.sentences += cutter.sentences.len();
        self.stats.tokens += cutter.sentences.iter().map(|s| s.words.len()).sum::<usize>();
        (!cutter.sentences.is_empty()).then_some(cutter.sentences)
    }

    /// Adds the vectors of the piece.
    pub(super) fn add(&mut self, answers: Vec<Result<Vectors, EngineError>>, cost: Cost) -> Result<()> {
        self.cost += cost;
        let mut sentences = Vec::with_capacity(answers.len());
        for answer in answers {
            match answer {
                Ok(vectors) => sentences.push(vectors),
                Err(error) if error.is_out_of_memory() => self.error = Some(out_of_memory(&error)),
                Err(error) => return Err(error.into()),
            }
        }
        let places = std::mem::take(&mut self.places);
        if let Some(joiner) = &mut self.joiner {
            push_all(joiner, sentences);
            return Ok(());
        }
        let words = words_of_text(self.text, &places);
        let values = self.setup.finish_vector(values_of(sentences));
        self.tokens.append(TokenRow { words, places, values });
        if self.tokens.values.len() * size_of::<f32>() > MAX_TOKEN_BYTES {
            self.error = Some(vectors_too_large());
        }
        Ok(())
    }

    pub(super) fn finish(self) -> HugeRow {
        let mut stats = self.stats;
        let outcome = match (self.error, self.joiner) {
            (Some(error), _) => Outcome::Bad(error),
            (None, Some(joiner)) => self.setup.pooled(joiner),
            (None, None) => Outcome::Tokens(self.tokens),
        };
        stats.errors += usize::from(matches!(outcome, Outcome::Bad(_)));
        stats.empty += usize::from(stats.sentences == 0 && stats.errors == 0);
        HugeRow { outcome, stats, tokens: self.n_tokens, cost: self.cost }
    }
}

/// Values of token vectors, one sentence after the other.
pub(super) fn values_of(sentences: Vec<Vectors>) -> Vec<f32> {
    let mut values = Vec::new();
    for sentence in sentences {
        if let Vectors::Tokens(tokens) = sentence {
            values.extend(tokens);
        }
    }
    values
}

/// The error of a row with a sentence that exceeds the memory of the device by itself.
pub(super) fn out_of_memory(error: &EngineError) -> RowError {
    RowError::OutOfMemory { message: error.to_string() }
}
