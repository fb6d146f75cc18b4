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

/// Logarithms of probabilities, one per token and boundary. NaN for what is not predicted: `<S>` forward and `</S>`
/// backward.
struct Scores {
    forward: Vec<f32>,
    backward: Vec<f32>,
    known: Vec<bool>,
    /// False for `<S>` and `</S>`.
    is_token: Vec<bool>,
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

    /// Surprisals of the tokens of every row, of type [`surprisal_type`]; NULL for a NULL text and a row with an error.
    ///
    /// # Errors
    /// [`crate::error::Error::Device`] when the device fails.
    pub fn surprisals(&self, texts: &ArrayRef, embedded: &EmbeddedColumns) -> Result<ArrayRef> {
        let tokens = embedded.vectors.as_list::<i32>();
        let scores = self.scores(texts, tokens)?;
        let items = tokens.values().as_struct();
        let is_token = BooleanArray::from(scores.is_token);
        let bits = |logs: &[f32]| -> ArrayRef {
            Arc::new(logs.iter().map(|log| -log / std::f32::consts::LN_2).collect::<Float32Array>())
        };
        let mut columns: Vec<ArrayRef> = (0..4).map(|at| Arc::clone(items.column(at))).collect();
        columns.extend([bits(&scores.forward), bits(&scores.backward)]);
        columns.push(Arc::new(BooleanArray::from(scores.known)));
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
    /// [`crate::error::Error::Device`] when the device fails.
    pub fn perplexities(&self, texts: &ArrayRef, embedded: &EmbeddedColumns) -> Result<ArrayRef> {
        let tokens = embedded.vectors.as_list::<i32>();
        let scores = self.scores(texts, tokens)?;
        let (mut forward, mut backward, mut both) = (Vec::new(), Vec::new(), Vec::new());
        let (mut counts, mut unknown, mut valid) = (Vec::new(), Vec::new(), Vec::new());
        for row in 0..tokens.len() {
            let (from, to) = range(tokens, row);
            let mean = |logs: &[f32]| {
                let predicted = logs[from..to].iter().filter(|log| !log.is_nan());
                let (sum, n) = predicted.fold((0.0, 0_usize), |(sum, n), log| (sum - f64::from(*log), n + 1));
                sum / n.max(1) as f64
            };
            let is_token = |at: &usize| scores.is_token[*at];
            let n = (from..to).filter(is_token).count();
            let (f, b) = (mean(&scores.forward), mean(&scores.backward));
            let has_tokens = tokens.is_valid(row) && n > 0;
            let some = |number: f64| has_tokens.then(|| number.exp());
            forward.push(some(f));
            backward.push(some(b));
            both.push(some(f64::midpoint(f, b)));
            counts.push(has_tokens.then_some(n as u32));
            let n_unknown = (from..to).filter(|at| is_token(at) && !scores.known[*at]).count();
            unknown.push(has_tokens.then_some(n_unknown as u32));
            valid.push(has_tokens);
        }
        let columns: Vec<ArrayRef> = vec![
            Arc::new(Float64Array::from(both)),
            Arc::new(Float64Array::from(forward)),
            Arc::new(Float64Array::from(backward)),
            Arc::new(UInt32Array::from(counts)),
            Arc::new(UInt32Array::from(unknown)),
        ];
        Ok(Arc::new(StructArray::try_new(perplexity_fields(), columns, Some(NullBuffer::from(valid)))?))
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
