//! The start state of a sentence: zeros, the constant state `warm`, or state `carry` from the sentence before.
//!
//! The biLM was trained on text without gaps between sentences, so it saw a zero state at the very beginning only.
//! AllenNLP carries the state from batch to batch, so that a vector depends on its neighbours. State `warm` has neither
//! drawback: it is not zero, and it is a constant of the model.

use std::sync::{Mutex, OnceLock, PoisonError};

use sha2::{Digest, Sha256};

use crate::{
    chars,
    engine::{Recipe, Sentence, StartStates, Vectors, Words, reduce_in_order},
    model::{BiLm, DeviceError, StartState},
};

/// The text that is read to compute state `warm` of a model that came without one, tokens separated by spaces. Any change of it
/// changes every `warm` vector.
const WARM_UP: [&str; 6] = [
    "The ferry leaves the harbour at half past six , and the last bus to the village waits for it .",
    "Most of the passengers are on their way home from work ; a few have come to see the island .",
    "\" Is this seat taken ? \" asked a woman with two heavy bags .",
    "Nobody answered at first , because the engine was so loud .",
    "Then a boy moved his coat , smiled , and pointed at the empty place beside him .",
    "It had rained all day , but now the clouds were breaking over the hills in the west .",
];

/// Maximum number of passes over the text. The state contracts, so a few passes are enough.
const MAX_PASSES: usize = 20;
/// The state has converged when a pass changes no number by more than this.
const TOLERANCE: f64 = 1e-6;

/// State `warm` as numbers, the same for every device of a process.
#[derive(Debug, Clone)]
pub(crate) struct WarmState {
    pub(crate) numbers: Vec<f32>,
    /// Twelve hexadecimal digits, part of the identity of outputs. They are a hash of the numbers if these came with
    /// the model, otherwise of the recipe by which they are computed: the numbers differ by rounding between kinds of
    /// CPU.
    pub(crate) digest: String,
}

impl WarmState {
    /// The numbers that came with a model.
    fn stored(numbers: Vec<f32>) -> Self {
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        Self { digest: digest(&bytes), numbers }
    }

    fn of_english(model: &BiLm) -> Result<Self, DeviceError> {
        let text: Vec<Vec<&str>> = WARM_UP.iter().map(|sentence| sentence.split(' ').collect()).collect();
        let recipe = format!("{}\n{MAX_PASSES} {TOLERANCE}", WARM_UP.join("\n"));
        Ok(Self { numbers: Self::compute(model, &text)?, digest: digest(recipe.as_bytes()) })
    }

    /// The numbers after reading a text repeatedly, carrying the state, until it converges.
    ///
    /// As in training (bilm-tf `data.py` `_get_batch`), the token that closes a sentence is not read: the forward
    /// direction goes from the last word of a sentence to the next `<S>`, the backward direction from the first word to
    /// `</S>`.
    pub(crate) fn compute(model: &BiLm, text: &[Vec<impl AsRef<str>>]) -> Result<Vec<f32>, DeviceError> {
        let mut state = model.zero_state()?;
        let mut moved = f64::INFINITY;
        for _ in 0..MAX_PASSES {
            let before = state.share();
            for sentence in text.iter().filter(|sentence| !sentence.is_empty()) {
                state = read(model, sentence, &state)?;
            }
            moved = state.distance(&before)?;
            if moved <= TOLERANCE {
                break;
            }
        }
        if moved > TOLERANCE {
            tracing::warn!(
                passes = MAX_PASSES,
                moved,
                "the warm state of this model does not converge; the state after the last pass is used"
            );
        }
        state.numbers()
    }
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().take(6).map(|b| format!("{b:02x}")).collect()
}

/// The state after the last word of a sentence; its opening boundary is read first.
fn read(model: &BiLm, sentence: &[impl AsRef<str>], state: &StartState) -> Result<StartState, DeviceError> {
    let words: Vec<&str> = sentence.iter().map(AsRef::as_ref).collect();
    let table = model.token_vectors(&words)?;
    let ids = (0..words.len() as i64).collect();
    let start = model.after_boundaries(state)?;
    let last = model.run(&table, &[ids], &start, true)?.into_last()?;
    let missing = || DeviceError::internal("no state was captured");
    last.ok_or_else(missing)?.into_constant()
}

/// The start states of one model, for every lane.
#[derive(Debug, Default)]
pub(crate) struct Starts {
    warm: OnceLock<WarmState>,
    /// Held while state `warm` is computed, so that it is computed once.
    computing: Mutex<()>,
}

impl Starts {
    /// `warm` are the numbers that came with the model, if any.
    pub(crate) fn new(warm: Option<Vec<f32>>) -> Self {
        let starts = Self::default();
        if let Some(numbers) = warm {
            let _ = starts.warm.set(WarmState::stored(numbers));
        }
        starts
    }

    pub(crate) fn warm(&self, model: &BiLm) -> Result<&WarmState, DeviceError> {
        let _one_at_a_time = self.computing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(state) = self.warm.get() {
            return Ok(state);
        }
        let state = WarmState::of_english(model)?;
        Ok(self.warm.get_or_init(|| state))
    }
}

impl StartStates for std::sync::Arc<Starts> {
    fn state(&self, model: &BiLm, warm: bool) -> Result<StartState, DeviceError> {
        if warm { model.state_from_numbers(&self.warm(model)?.numbers) } else { model.zero_state() }
    }
}

/// State `carry`: batches of a fixed number of rows in the order of the input, where each row starts from the state
/// that the same row of the previous batch ended with (AllenNLP `ElmoLstm`, `stateful=True`).
#[derive(Debug)]
pub(crate) struct Carry {
    model: BiLm,
    state: StartState,
}

impl Carry {
    pub(crate) fn new(model: BiLm) -> Result<Self, DeviceError> {
        let state = model.zero_state()?;
        Ok(Self { model, state })
    }

    /// Runs batches of `batch_rows` sentences from the carried state; returns their results and the state after them.
    /// The carried state stays as it is until [`Carry::commit`].
    ///
    /// The words of a sentence include its boundaries. An empty sentence runs as `<S> </S>` and changes the state of
    /// its row, as in AllenNLP.
    pub(crate) fn run(
        &self,
        sentences: &[Sentence],
        batch_rows: usize,
        recipe: &Recipe,
    ) -> Result<(Vec<Vectors>, StartState), DeviceError> {
        let mut state = self.state.share();
        let mut vectors = Vec::with_capacity(sentences.len());
        for batch in sentences.chunks(batch_rows) {
            vectors.extend(self.run_batch(batch, recipe, &mut state)?);
        }
        Ok((vectors, state))
    }

    /// Makes `state` the one that the next run starts from.
    pub(crate) fn commit(&mut self, state: StartState) {
        self.state = state;
    }

    fn run_batch(
        &self,
        sentences: &[Sentence],
        recipe: &Recipe,
        state: &mut StartState,
    ) -> Result<Vec<Vectors>, DeviceError> {
        #[cfg(test)]
        faults::on_batch()?;
        let mut words: Vec<&str> = sentences.iter().flat_map(|s| s.words.iter()).collect();
        words.sort_unstable();
        words.dedup();
        let table = self.model.token_vectors(&words)?; // [U, P]
        let ids: Vec<Vec<i64>> = sentences
            .iter()
            .map(|s| s.words.iter().map(|w| words.binary_search(&w).unwrap_or_default() as i64).collect())
            .collect();
        let activations = self.model.run(&table, &ids, state, true)?;
        let vectors = reduce_in_order(&activations, sentences, recipe)?;
        if let Some(last) = activations.into_last()? {
            *state = state.replaced_by(&last)?;
        }
        Ok(vectors)
    }
}

/// The words of a sentence between its boundaries.
pub(crate) fn with_boundaries(words: impl IntoIterator<Item = impl AsRef<str>>) -> Words {
    let mut all = Words::default();
    all.push(chars::BEGIN_SENTENCE_TOKEN);
    words.into_iter().for_each(|w| all.push(w.as_ref()));
    all.push(chars::END_SENTENCE_TOKEN);
    all
}

/// Faults that tests inject into state `carry`.
#[cfg(test)]
pub(crate) mod faults {
    use std::cell::Cell;

    use super::DeviceError;

    thread_local! {
        /// Batches of this thread until one fails.
        static BATCHES_LEFT: Cell<Option<usize>> = const { Cell::new(None) };
    }

    /// After `n` more batches on this thread, one batch fails.
    pub(crate) fn fail_after(n: usize) {
        BATCHES_LEFT.set(Some(n));
    }

    pub(super) fn on_batch() -> Result<(), DeviceError> {
        match BATCHES_LEFT.take() {
            Some(0) => Err(DeviceError::OutOfMemory { message: "injected".to_owned() }),
            left => {
                BATCHES_LEFT.set(left.map(|n| n - 1));
                Ok(())
            }
        }
    }
}
