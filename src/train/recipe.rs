//! The settings of a run that determine its numbers.

use super::{TrainError, optimizer::Optimizer, schedule::Schedule};
use crate::{model::Precision, options::ModelOptions};

/// Samples of the published models, per direction.
const BILM_SAMPLES: usize = 8192;
/// Rows of a product below which it is slow.
const ROWS_OF_A_LANE: usize = 32;

/// Which classes the softmax of training has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Classes {
    /// All words.
    Full,
    /// The target and so many negatives; fewer than there are words.
    Sampled(usize),
    /// All words of a vocabulary of less than twice so many, and otherwise so many negatives. Drawing most of a
    /// vocabulary saves little, and its loss is only an estimate.
    Auto(usize),
}

impl Classes {
    /// Negatives for a vocabulary of so many words; `None` for the full softmax.
    pub fn samples(self, words: usize) -> Option<usize> {
        match self {
            Self::Full => None,
            Self::Sampled(samples) => Some(samples),
            Self::Auto(samples) => (words >= samples.saturating_mul(2)).then_some(samples),
        }
    }
}

/// The settings of a run that determine its numbers, beside the model and the data.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipe {
    /// Seed of all random numbers.
    pub seed: u64,
    /// Rows of a window, those of all processes together.
    pub rows: usize,
    /// Tokens of each row of a window; gradients end at its beginning.
    pub positions: usize,
    /// Probability with which dropout sets a value to 0.
    pub dropout: f64,
    /// Classes of the softmax.
    pub classes: Classes,
    /// The loss is multiplied by it before gradients are taken: bilm-tf has the number of positions here.
    pub gradient_scale: f64,
    /// Limit of the norm of all gradients together.
    pub clip_norm: Option<f64>,
    /// The optimiser.
    pub optimizer: Optimizer,
    /// Learning rate.
    pub learning_rate: f64,
    /// How the learning rate changes.
    pub schedule: Schedule,
    /// Number format of the computation. Parameters are float64 with [`Precision::F64`] and float32 otherwise.
    /// [`Precision::Tf32`] is for GPUs, and holds for all products of the process.
    pub precision: Precision,
    /// Groups of rows of a process that are computed one by one, in parallel on a CPU; their gradients are added in order.
    /// Bits depend on it, but not on the number of threads. On a GPU it divides the memory for activations of the LSTM.
    pub lanes: usize,
}

impl Recipe {
    /// Negatives of the published models in each direction.
    pub const BILM_SAMPLES: usize = BILM_SAMPLES;

    /// The recipe of the published models on one GPU (they were trained on three, with 128 rows each).
    pub fn bilm() -> Self {
        Self {
            seed: 0,
            rows: 128,
            positions: 20,
            dropout: 0.1,
            classes: Classes::Auto(BILM_SAMPLES),
            gradient_scale: 20.0,
            clip_norm: Some(10.0),
            optimizer: Optimizer::BILM,
            learning_rate: 0.2,
            schedule: Schedule::Constant,
            precision: Precision::F32,
            lanes: 128 / ROWS_OF_A_LANE,
        }
    }

    /// What is wrong with this recipe for a vocabulary of so many words.
    pub(super) fn check(&self, options: &ModelOptions, words: usize) -> Result<(), TrainError> {
        let wrong = |text: String| Err(TrainError::Recipe(text));
        let positive = |name: &str, value: f64| match value.is_finite() && value > 0.0 {
            true => Ok(()),
            false => Err(TrainError::Recipe(format!("{name} is {value}, not a positive number"))),
        };
        if self.rows == 0 || self.positions == 0 {
            return wrong(format!("a window of {} rows of {} tokens is empty", self.rows, self.positions));
        }
        if self.lanes == 0 || self.lanes > self.rows {
            return wrong(format!("{} lanes for {} rows; there must be 1 to {0}", self.lanes, self.rows));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return wrong(format!("dropout is {}, not a probability below 1", self.dropout));
        }
        positive("gradient_scale", self.gradient_scale)?;
        positive("learning_rate", self.learning_rate)?;
        self.clip_norm.map_or(Ok(()), |clip| positive("clip_norm", clip))?;
        if words < 3 {
            return wrong(format!("a vocabulary of {words} words; every vocabulary has <S>, </S> and <UNK>"));
        }
        match self.classes.samples(words) {
            Some(0) => wrong("0 negatives".to_owned()),
            Some(samples) if samples >= words => wrong(format!(
                "{samples} negatives from a vocabulary of {words} words; use the full softmax, or fewer negatives"
            )),
            _ if options.lstm.n_layers > 127 => wrong("more than 127 layers".to_owned()),
            _ => Ok(()),
        }
    }
}
