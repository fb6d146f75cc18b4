//! Where a sentence starts from: nothing, a warmed-up constant, or what the sentence before left behind.
//!
//! The biLM was trained on text packed end to end, so it never saw a zero state in the middle of its
//! training; AllenNLP carried state from batch to batch, which made vectors depend on their neighbours.
//! `warm` keeps the one without the other: a constant of the model.

use std::sync::{Mutex, OnceLock, PoisonError};

use sha2::{Digest, Sha256};

use crate::{
    chars,
    embedder::{Recipe, Sentence, StartStates, Vectors, reduce_in_order},
    model::{BiLm, DeviceError, StartState},
};

/// The text that warms a model up, tokens separated by spaces. Changing a letter changes every `warm` vector.
const WARM_UP: [&str; 6] = [
    "The ferry leaves the harbour at half past six , and the last bus to the village waits for it .",
    "Most of the passengers are on their way home from work ; a few have come to see the island .",
    "\" Is this seat taken ? \" asked a woman with two heavy bags .",
    "Nobody answered at first , because the engine was so loud .",
    "Then a boy moved his coat , smiled , and pointed at the empty place beside him .",
    "It had rained all day , but now the clouds were breaking over the hills in the west .",
];

/// Passes over [`WARM_UP`] at the most; the state contracts, so a few are enough.
const MOST_PASSES: usize = 20;
/// Passes end when no number of the state moved by more than this.
const SETTLED: f64 = 1e-6;

/// A warmed-up start state as numbers, the same for every device of a process.
#[derive(Debug, Clone)]
pub(crate) struct WarmState {
    pub(crate) numbers: Vec<f32>,
    /// Twelve hexadecimal digits over the numbers where they came with the model, otherwise over the recipe by which
    /// they are computed (the numbers of another kind of CPU differ by rounding); stands in the identity of outputs.
    pub(crate) digest: String,
}

impl WarmState {
    /// The numbers that came with a model.
    fn stored(numbers: Vec<f32>) -> Self {
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        Self { digest: digest(&bytes), numbers }
    }

    /// Reads [`WARM_UP`] again and again, carrying the state, until it settles.
    ///
    /// As in training (bilm-tf `data.py` `_get_batch`), the token that closes a sentence is never read: the
    /// forward direction goes from a sentence's last word to the next `<S>`, the backward direction from the
    /// first word to `</S>`.
    pub(crate) fn compute(model: &BiLm) -> Result<Self, DeviceError> {
        let mut state = model.zero_state()?;
        let mut moved = f64::INFINITY;
        for _ in 0..MOST_PASSES {
            let before = state.share();
            for sentence in WARM_UP {
                state = read(model, sentence, &state)?;
            }
            moved = state.distance(&before)?;
            if moved <= SETTLED {
                break;
            }
        }
        if moved > SETTLED {
            tracing::warn!(
                passes = MOST_PASSES,
                moved,
                "the warm state of this model does not settle; it is used as it is"
            );
        }
        let recipe = format!("{}\n{MOST_PASSES} {SETTLED}", WARM_UP.join("\n"));
        Ok(Self { numbers: state.numbers()?, digest: digest(recipe.as_bytes()) })
    }
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().take(6).map(|b| format!("{b:02x}")).collect()
}

/// One sentence, its opening boundary included; the state after its last word.
fn read(model: &BiLm, sentence: &str, state: &StartState) -> Result<StartState, DeviceError> {
    let words: Vec<&str> = sentence.split(' ').collect();
    let table = model.token_vectors(&words)?;
    let ids = (0..words.len() as i64).collect();
    let start = model.after_boundaries(state)?;
    let last = model.run(&table, &[ids], &start, true)?.into_last()?;
    let missing = || DeviceError::Torch { message: "no state was captured".to_owned() };
    last.ok_or_else(missing)?.into_constant()
}

/// The start states of one model, for every device thread.
#[derive(Debug, Default)]
pub(crate) struct Starts {
    warm: OnceLock<WarmState>,
    /// Held while the warm state is computed, so that it is computed once.
    computing: Mutex<()>,
}

impl Starts {
    /// With the numbers that came with the model, if any.
    pub(crate) fn new(warm: Option<Vec<f32>>) -> Self {
        let starts = Self::default();
        if let Some(numbers) = warm {
            let _ = starts.warm.set(WarmState::stored(numbers));
        }
        starts
    }

    pub(crate) fn warm(&self, model: &BiLm) -> Result<&WarmState, DeviceError> {
        let _one_at_a_time = self.computing.lock().unwrap_or_else(PoisonError::into_inner);
        if self.warm.get().is_none() {
            let state = WarmState::compute(model)?;
            let _ = self.warm.set(state);
        }
        self.warm.get().ok_or_else(|| DeviceError::Torch { message: "no warm state".to_owned() })
    }
}

impl StartStates for std::sync::Arc<Starts> {
    fn state(&self, model: &BiLm, warm: bool) -> Result<StartState, DeviceError> {
        if warm { model.state_from_numbers(&self.warm(model)?.numbers) } else { model.zero_state() }
    }
}

/// State `carry`: batches of a fixed number of rows in the order of the input, each row starting where the
/// same row of the batch before ended (AllenNLP `ElmoLstm`, `stateful=True`).
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

    /// Runs one batch, boundaries always included; an empty sentence runs as `<S> </S>` and moves its row's
    /// state, as in AllenNLP. `sentences` hold their boundary words already.
    pub(crate) fn run(&mut self, sentences: &[Sentence], recipe: &Recipe) -> Result<Vec<Vectors>, DeviceError> {
        let mut words: Vec<&str> = sentences.iter().flat_map(|s| s.words.iter()).collect();
        words.sort_unstable();
        words.dedup();
        let table = self.model.token_vectors(&words)?;
        let ids: Vec<Vec<i64>> = sentences
            .iter()
            .map(|s| s.words.iter().map(|w| words.binary_search(&w).unwrap_or_default() as i64).collect())
            .collect();
        let activations = self.model.run(&table, &ids, &self.state, true)?;
        let answers = reduce_in_order(&activations, sentences, recipe)?;
        if let Some(last) = activations.into_last()? {
            self.state = self.state.replaced_by(&last)?;
        }
        Ok(answers)
    }
}

/// A sentence's words between its boundaries.
pub(crate) fn with_boundaries(words: impl IntoIterator<Item = impl AsRef<str>>) -> crate::embedder::Words {
    let mut all = crate::embedder::Words::default();
    all.push(chars::BEGIN_SENTENCE_TOKEN);
    words.into_iter().for_each(|w| all.push(w.as_ref()));
    all.push(chars::END_SENTENCE_TOKEN);
    all
}
