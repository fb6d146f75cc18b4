//! The settings of a run that determine its numbers.

use std::ops::Range;

use super::{TrainError, optimizer::Optimizer, schedule::Schedule};
use crate::{model::Precision, options::ModelOptions};

/// Samples of the published models, per direction.
const BILM_SAMPLES: usize = 8192;
/// Rows of a product below which it is slow.
const ROWS_OF_A_LANE: usize = 32;

/// Replicas of a window: their number is 16 bits of the counter of random numbers.
const MOST_REPLICAS: usize = 1 << 16;

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
    /// Rows of a replica, which share negatives: `bilm-tf` draws them for each GPU. `None`, or as many as the window has: all.
    pub replica_rows: Option<usize>,
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
            replica_rows: None,
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

    fn rows_of_a_replica(&self) -> usize {
        self.replica_rows.unwrap_or(self.rows).min(self.rows)
    }

    /// The replicas that some rows of the window belong to.
    pub fn replicas_of(&self, rows: &Range<usize>) -> Range<usize> {
        let of_each = self.rows_of_a_replica();
        rows.start / of_each..rows.end.div_ceil(of_each)
    }

    /// Which of some rows of the window belong to a replica, counted from the first of them.
    pub(super) fn rows_of(&self, replica: usize, rows: &Range<usize>) -> Range<usize> {
        let of_each = self.rows_of_a_replica();
        let (start, end) = ((replica * of_each).max(rows.start), ((replica + 1) * of_each).min(rows.end));
        start - rows.start..end.max(start) - rows.start
    }

    /// What is wrong with this recipe for a vocabulary of so many words.
    pub(super) fn check(&self, options: &ModelOptions, words: usize) -> Result<(), TrainError> {
        let wrong = |text: String| Err(TrainError::Recipe(text));
        let positive = |name: &str, value: f64| match value.is_finite() && value > 0.0 {
            true => Ok(()),
            false => Err(TrainError::Recipe(format!("{name} is {value}, not a positive number"))),
        };
        if self.precision == crate::model::Precision::F16 {
            return wrong("training in f16, whose gradients would need a scale; use bf16".to_owned());
        }
        if self.rows == 0 || self.positions == 0 {
            return wrong(format!("a window of {} rows of {} tokens is empty", self.rows, self.positions));
        }
        if self.replica_rows == Some(0) || !self.rows.is_multiple_of(self.rows_of_a_replica()) {
            let of_each = self.replica_rows.unwrap_or_default();
            return wrong(format!(
                "replicas of {of_each} rows, which do not divide the {} rows of a window",
                self.rows
            ));
        }
        if self.replicas_of(&(0..self.rows)).len() > MOST_REPLICAS {
            return wrong(format!("more than {MOST_REPLICAS} replicas"));
        }
        if self.lanes == 0 || self.lanes > self.rows {
            return wrong(format!("{} lanes for {} rows; there must be 1 to {1}", self.lanes, self.rows));
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

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: 12 rows in replicas of 4; three processes, and two whose border is in a replica.
    #[test]
    fn rows_of_replicas() {
        let recipe = Recipe { rows: 12, replica_rows: Some(4), ..Recipe::bilm() };
        assert_eq!([0..12, 4..8, 0..6, 6..12].map(|rows| recipe.replicas_of(&rows)), [0..3, 1..2, 0..2, 1..3]);
        let of = |rows: Range<usize>| [0, 1, 2].map(|replica| recipe.rows_of(replica, &rows));
        assert_eq!(of(0..12), [0..4, 4..8, 8..12]);
        assert_eq!(of(6..12), [0..0, 0..2, 2..6]);
        let [first, second, third] = of(0..4);
        assert!(first == (0..4) && second.is_empty() && third.is_empty());
        for replica_rows in [None, Some(12), Some(128)] {
            let recipe = Recipe { replica_rows, ..recipe.clone() };
            assert_eq!((recipe.replicas_of(&(0..12)), recipe.rows_of(0, &(3..7))), (0..1, 0..4));
        }
    }

    #[test]
    fn replicas_that_do_not_divide_a_window_are_refused() {
        let options = crate::tiny::options();
        for (rows, of_each, part) in
            [(128, 0, "replicas of 0 rows"), (128, 48, "do not divide the 128 rows"), (1 << 17, 1, "more than 65536")]
        {
            let recipe = Recipe { rows, replica_rows: Some(of_each), ..Recipe::bilm() };
            assert!(recipe.check(&options, 9).unwrap_err().to_string().contains(part), "{rows}, {of_each}");
        }
    }
}
