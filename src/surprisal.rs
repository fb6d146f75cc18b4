//! The biLM as a language model: surprisal of tokens and perplexity of texts.
//!
//! The forward direction predicts a token from the tokens before it, the backward direction from those after it. Both
//! read one sentence with its boundaries. Surprisal is `-log2 p`, in bits. Perplexity is `exp(mean of -ln p)` over the
//! tokens of a text and one boundary per sentence (forward the end, backward the beginning); that of both directions
//! together is their geometric mean (`bilm-tf`, `bilm/training.py`, `test`). Probabilities are those of the full
//! softmax.

use std::sync::Arc;

use arrow::{
    array::{Array, ArrayRef, AsArray, BooleanArray, Float32Array, Float64Array, ListArray, StructArray, UInt32Array},
    buffer::NullBuffer,
    datatypes::{DataType, Field, FieldRef, Fields, Float32Type, UInt32Type},
};

use crate::{
    columns::{EmbeddedColumns, Row, Rows},
    elmo::Elmo,
    error::Result,
    lm_head::LmHead,
    spec::{EmbedSpec, Layers, Level, Normalize},
    text,
};

/// Scores the columns of an embedder with the settings of [`Scorer::spec`].
#[derive(Debug, Clone)]
pub struct Scorer {
    head: Arc<LmHead>,
    spec: EmbedSpec,
    /// `P`
    width: usize,
}

/// The scores of some texts.
#[derive(Debug)]
pub struct Scored {
    /// Tokens and boundaries of each text.
    tokens: ListArray,
    scores: Scores,
}

/// Logarithms of probabilities, one per token and boundary. NaN for what is not predicted: `<S>` forward and `</S>`
/// backward.
#[derive(Debug)]
struct Scores {
    forward: Vec<f32>,
    backward: Vec<f32>,
    known: Vec<bool>,
    /// False for `<S>` and `</S>`.
    is_token: Vec<bool>,
}

/// Sums over a text, or over several.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct TextScore {
    /// Sum of the natural logarithms of the probabilities, forward and backward.
    pub log_probability: [f64; 2],
    /// Predictions of each direction: the tokens, and one boundary per sentence.
    pub predictions: u64,
    /// Tokens.
    pub tokens: u64,
    /// Tokens that are not in the vocabulary.
    pub unknown: u64,
}

impl Scorer {
    /// A scorer for a model; loads its LM head unless it is loaded already.
    ///
    /// # Errors
    /// [`crate::error::Error::LmHead`] when the model has none, and as [`crate::lm_head::LmHeadFiles::read`].
    pub fn new(elmo: &Elmo, spec: &EmbedSpec) -> Result<Self> {
        Ok(Self { head: elmo.lm_head()?, spec: Self::spec(spec), width: elmo.options().lstm.projection_dim })
    }

    /// The settings of the embedder whose columns are scored: the top layer of every token and boundary.
    pub fn spec(spec: &EmbedSpec) -> EmbedSpec {
        EmbedSpec {
            level: Level::Token,
            layers: Layers::Top,
            boundaries: true,
            normalize: Normalize::Off,
            list_type: crate::spec::ListType::Fixed,
            float: crate::spec::FloatRounding::F32,
            ..spec.clone()
        }
    }

    /// Scores texts by their embedded columns.
    ///
    /// # Errors
    /// [`crate::error::Error::Device`] when the device fails.
    pub fn score(&self, texts: &ArrayRef, embedded: &EmbeddedColumns) -> Result<Scored> {
        let tokens = embedded.vectors.as_list::<i32>().clone();
        let scores = self.scores(texts, &tokens)?;
        Ok(Scored { tokens, scores })
    }

    fn scores(&self, texts: &ArrayRef, tokens: &ListArray) -> Result<Scores> {
        let items = tokens.values().as_struct();
        let rows = Rows::new(texts)?;
        let mut known = vec![true; items.len()];
        let mut ids = vec![0; items.len()];
        let (mut places, mut is_token) = (Vec::new(), vec![false; items.len()]);
        for row in 0..tokens.len() {
            let (from, to) = range(tokens, row);
            is_token[from..to].fill(true);
            let first = places.len();
            places.extend(of_sentences(numbers(items, 3), from, to));
            for &(first, last) in &places[first..] {
                (is_token[first], is_token[last]) = (false, false);
                (ids[first], ids[last]) = (self.head.begin(), self.head.end());
            }
            let words = (from..to).filter(|&at| is_token[at]);
            self.look_up(&rows.get(row), items, words, &mut ids, &mut known);
        }
        let vectors = items.column(4).as_fixed_size_list();
        let vectors = vectors.values().as_primitive::<Float32Type>().values();
        let state = |at: usize, half: usize| {
            let start = (2 * at + half) * self.width;
            &vectors[start..start + self.width]
        };
        // (token that is predicted, token from whose state it is predicted, direction)
        let forward = places.iter().flat_map(|&(first, last)| (first + 1..=last).map(|here| (here, here - 1, 0)));
        let backward = places.iter().flat_map(|&(first, last)| (first..last).map(|here| (here, here + 1, 1)));
        let predictions: Vec<(usize, usize, usize)> = forward.chain(backward).collect();
        let states: Vec<f32> = predictions.iter().flat_map(|&(_, from, half)| state(from, half)).copied().collect();
        let targets: Vec<i64> = predictions.iter().map(|&(here, ..)| ids[here]).collect();
        let logs = self.head.log_probabilities(&states, &targets)?;
        let nothing = || vec![f32::NAN; items.len()];
        let mut scores = Scores { forward: nothing(), backward: nothing(), known, is_token };
        for (log, (here, _, half)) in logs.into_iter().zip(predictions) {
            let direction = if half == 1 { &mut scores.backward } else { &mut scores.forward };
            direction[here] = log;
        }
        Ok(scores)
    }

    /// Looks up the ids of the words of a row as the model reads them, which may differ from how they are written.
    fn look_up(
        &self,
        row: &Row<'_>,
        items: &StructArray,
        tokens: impl Iterator<Item = usize>,
        ids: &mut [i64],
        known: &mut [bool],
    ) {
        let starts = numbers(items, 1);
        let written = items.column(0).as_string::<i32>();
        let mut set = |at: usize, word: &str| (ids[at], known[at]) = self.head.id(word);
        let Row::Text(text) = row else {
            tokens.for_each(|at| set(at, written.value(at)));
            return;
        };
        let mut read = text::sentences(text, self.spec.tokenizer, self.spec.sentences).flatten();
        for at in tokens {
            match read.find(|token| token.start == starts[at] as usize) {
                Some(token) => set(at, token.read(text)),
                None => set(at, written.value(at)),
            }
        }
    }
}

impl Scored {
    /// Surprisals of the tokens of every row, of type [`surprisal_type`]; NULL for a NULL text and a row with an error.
    ///
    /// # Errors
    /// [`crate::error::Error::Arrow`] when there are more tokens than Arrow's offsets can count.
    pub fn surprisals(&self) -> Result<ArrayRef> {
        let Self { tokens, scores } = self;
        let items = tokens.values().as_struct();
        let is_token = BooleanArray::from(scores.is_token.clone());
        let bits = |logs: &[f32]| -> ArrayRef {
            Arc::new(logs.iter().map(|log| -log / std::f32::consts::LN_2).collect::<Float32Array>())
        };
        let mut columns: Vec<ArrayRef> = (0..4).map(|at| Arc::clone(items.column(at))).collect();
        columns.extend([bits(&scores.forward), bits(&scores.backward)]);
        columns.push(Arc::new(BooleanArray::from(scores.known.clone())));
        let kept = columns.iter().map(|column| arrow::compute::filter(column, &is_token));
        let items = StructArray::try_new(surprisal_fields(), kept.collect::<std::result::Result<_, _>>()?, None)?;
        let mut lengths = Vec::with_capacity(tokens.len());
        for row in 0..tokens.len() {
            let (from, to) = range(tokens, row);
            lengths.push(is_token.slice(from, to - from).true_count());
        }
        let offsets = arrow::buffer::OffsetBuffer::from_lengths(lengths);
        Ok(Arc::new(ListArray::try_new(surprisal_item(), offsets, Arc::new(items), tokens.nulls().cloned())?))
    }

    /// Perplexity of every row, of type [`perplexity_type`]; NULL for a row without tokens or with an error.
    ///
    /// # Errors
    /// None, unless Arrow refuses columns of these types.
    pub fn perplexities(&self) -> Result<ArrayRef> {
        let rows = self.rows();
        let number = |of: fn(&TextScore) -> f64| -> ArrayRef {
            Arc::new(rows.iter().map(|row| row.as_ref().map(of)).collect::<Float64Array>())
        };
        let n = |of: fn(&TextScore) -> u64| -> ArrayRef {
            Arc::new(rows.iter().map(|row| row.as_ref().map(|row| of(row) as u32)).collect::<UInt32Array>())
        };
        let columns: Vec<ArrayRef> = vec![
            number(TextScore::perplexity),
            number(|row| row.perplexity_of(0)),
            number(|row| row.perplexity_of(1)),
            n(|row| row.tokens),
            n(|row| row.unknown),
        ];
        let valid: NullBuffer = rows.iter().map(Option::is_some).collect();
        Ok(Arc::new(StructArray::try_new(perplexity_fields(), columns, Some(valid))?))
    }

    /// Sums over every row; `None` for a row without tokens or with an error.
    pub fn rows(&self) -> Vec<Option<TextScore>> {
        (0..self.tokens.len()).map(|row| self.row(row)).collect()
    }

    fn row(&self, row: usize) -> Option<TextScore> {
        let Scores { forward, backward, known, is_token } = &self.scores;
        let (from, to) = range(&self.tokens, row);
        let n = (from..to).filter(|&at| is_token[at]).count();
        if self.tokens.is_null(row) || n == 0 {
            return None;
        }
        let predicted = |logs: &[f32]| -> (f64, u64) {
            let predicted = logs[from..to].iter().filter(|log| !log.is_nan());
            predicted.fold((0.0, 0), |(sum, n), log| (sum + f64::from(*log), n + 1))
        };
        let ((forward, predictions), (backward, _)) = (predicted(forward), predicted(backward));
        let unknown = (from..to).filter(|&at| is_token[at] && !known[at]).count();
        let log_probability = [forward, backward];
        Some(TextScore { log_probability, predictions, tokens: n as u64, unknown: unknown as u64 })
    }
}

impl TextScore {
    /// Adds the sums of another text.
    pub fn add(&mut self, other: Self) {
        self.log_probability[0] += other.log_probability[0];
        self.log_probability[1] += other.log_probability[1];
        self.predictions += other.predictions;
        self.tokens += other.tokens;
        self.unknown += other.unknown;
    }

    /// Perplexity of a direction (0 is forward).
    pub fn perplexity_of(&self, direction: usize) -> f64 {
        self.mean(direction).exp()
    }

    /// Geometric mean of both directions' perplexities.
    pub fn perplexity(&self) -> f64 {
        f64::midpoint(self.mean(0), self.mean(1)).exp()
    }

    fn mean(&self, direction: usize) -> f64 {
        -self.log_probability[direction] / self.predictions.max(1) as f64
    }
}

/// First and last token of each sentence in `from..to`, which are its boundaries.
fn of_sentences(sentences: &[u32], from: usize, to: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut at = from;
    std::iter::from_fn(move || {
        let first = at;
        while at < to && sentences[at] == sentences[first] {
            at += 1;
        }
        (first < to).then(|| (first, at - 1))
    })
}

fn range(tokens: &ListArray, row: usize) -> (usize, usize) {
    let offsets = tokens.value_offsets();
    (offsets[row] as usize, offsets[row + 1] as usize)
}

fn numbers(items: &StructArray, column: usize) -> &[u32] {
    items.column(column).as_primitive::<UInt32Type>().values()
}

fn surprisal_fields() -> Fields {
    Fields::from(vec![
        Field::new("token", DataType::Utf8, false),
        Field::new("start", DataType::UInt32, false),
        Field::new("end", DataType::UInt32, false),
        Field::new("sentence", DataType::UInt32, false),
        Field::new("forward", DataType::Float32, false),
        Field::new("backward", DataType::Float32, false),
        Field::new("known", DataType::Boolean, false),
    ])
}

fn surprisal_item() -> FieldRef {
    Arc::new(Field::new("item", DataType::Struct(surprisal_fields()), false))
}

fn perplexity_fields() -> Fields {
    Fields::from(vec![
        Field::new("average", DataType::Float64, true),
        Field::new("forward", DataType::Float64, true),
        Field::new("backward", DataType::Float64, true),
        Field::new("tokens", DataType::UInt32, true),
        Field::new("unknown", DataType::UInt32, true),
    ])
}

/// `List<Struct<token: Utf8, start: UInt32, end: UInt32, sentence: UInt32, forward: Float32, backward: Float32, known:
/// Boolean>>`: places as those of token vectors, surprisals in bits, whether the word is in the vocabulary.
#[must_use]
pub fn surprisal_type() -> DataType {
    DataType::List(surprisal_item())
}

/// `Struct<average: Float64, forward: Float64, backward: Float64, tokens: UInt32, unknown: UInt32>`: `average` is the
/// geometric mean of both directions, `unknown` counts tokens that are not in the vocabulary.
#[must_use]
pub fn perplexity_type() -> DataType {
    DataType::Struct(perplexity_fields())
}
