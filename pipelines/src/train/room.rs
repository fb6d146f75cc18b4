//! The memory that a run needs, estimated from its sizes before anything is allocated. Pure.
//!
//! With `B` parameters of the biLM, `B'` of its LSTM layers, `S = V (P + 1)` of the softmax, of which the rows of a process use
//! `C = r K (P + 1)` in a step (with `r` replicas, which have negatives of their own) and all rows `C''`, and `k` numbers of the
//! optimiser for each parameter:
//!
//! ```text
//! state       (1 + k) (B + S)
//! step        the larger one of
//!   lanes     B + B' + 2 C                         weights of the step, sums over lanes
//!             words                                of all lanes
//!             n (B' + 2 C + LSTM + logits)         lanes that are computed at once
//!             B' + 2 C                             a lane that waits for an earlier one, with several threads
//!   the end   4 B + 2 C''                          weights of the step, sums, and gradients on their way to the parameters
//! words       U sum over filters of p (w C' + n')  a word of six bytes has windows at 9 places, see below
//!             U 8 F                                for each highway layer
//! LSTM        2 N layers (6 D + 3 P)               N tokens of a lane; 7 D + 5 P on a GPU, 9 D + 4 P with libtorch's graph
//! logits      2 K N                                at most a block of them
//! program     300 MiB, and 40 MiB for each thread  on a CPU: libtorch, buffers of MKL, text; measured
//! ```
//!
//! `U` is a third of the tokens of both directions: fewer words are different in most texts. The words of a lane's share are sorted
//! by their length and computed in `g` groups, in which every word has the places of the longest one. So `p` is `9 (1 + 1 / g)`.
//! What is refused does not fit, as far as texts are usual. A checkpoint is a copy of the state in the memory of the host, also when
//! a run resumes from one. benches/RESULTS.md compares estimates with measurements.

use elmo::{
    ModelOptions,
    model::{DeviceName, Precision},
    train::{Optimizer, Recipe},
};

/// Places of the windows of a word of six bytes and its two marks.
const PLACES: usize = 9;
/// Most values on the left side of a product of the char CNN, as in its module.
const GROUP: usize = 1 << 19;
/// Logits of a block, on a CPU and on a GPU, and its least rows.
const LOGITS: (usize, usize) = (1 << 19, 1 << 26);
const LEAST_ROWS: usize = 32;
/// Bytes of the program, and of each thread, on a CPU.
const PROGRAM: u64 = 300 << 20;
const THREAD: u64 = 40 << 20;
/// Bytes of a process on a CPU before it knows what it computes.
pub(super) const OF_A_PROCESS: u64 = PROGRAM + THREAD;

/// What a process computes.
pub(super) struct Load<'r> {
    pub(super) options: &'r ModelOptions,
    pub(super) recipe: &'r Recipe,
    /// Words of the vocabulary.
    pub(super) words: usize,
    /// Negatives; `None`: all words.
    pub(super) samples: Option<usize>,
    /// Replicas that the rows of this process belong to.
    pub(super) replicas: usize,
    pub(super) device: DeviceName,
    pub(super) threads: usize,
    /// Rows that are computed at a time.
    pub(super) rows: usize,
}

/// Bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Room {
    /// Parameters and the state of the optimiser.
    pub(super) state: u64,
    /// Gradients and activations of a step.
    pub(super) step: u64,
    /// The program itself, on a CPU.
    pub(super) program: u64,
}

impl Room {
    pub(super) fn of(load: &Load<'_>) -> Self {
        let wide = |numbers: f64, bytes: usize| (numbers * bytes as f64) as u64;
        let (exact, computed) = match load.recipe.precision {
            Precision::F64 => (8, 8),
            // Training refuses 8-bit integers and float16.
            Precision::F32 | Precision::Tf32 | Precision::Int8 => (4, 4),
            Precision::Bf16 | Precision::F16 => (4, 2),
        };
        let slots = match load.recipe.optimizer {
            Optimizer::Adagrad { .. } => 1,
            Optimizer::AdamW { .. } => 2,
        };
        let state = (1 + slots) as f64 * (load.of_model() + load.of_softmax(load.words));
        let (lanes, activations) = load.of_lanes();
        let during = wide(lanes, exact).saturating_add(wide(activations, computed));
        let program = match load.device {
            DeviceName::Cpu => PROGRAM + load.threads.clamp(1, load.lanes()) as u64 * THREAD,
            DeviceName::Cuda(_) => 0,
        };
        Self { state: wide(state, exact), step: during.max(wide(load.of_end(), exact)), program }
    }

    /// What the host must have: on a CPU the larger one of a step and of the copy that is a checkpoint.
    pub(super) fn on_host(self) -> u64 {
        self.state.saturating_add(self.step.max(self.state)).saturating_add(self.program)
    }

    /// What a GPU must have.
    pub(super) fn on_device(self) -> u64 {
        self.state.saturating_add(self.step)
    }
}

/// Rows that the LSTM layers compute at least in a step.
const LEAST_WIDTH: usize = 16;

impl Load<'_> {
    fn of_model(&self) -> f64 {
        self.options.parameters() as f64
    }

    fn of_softmax(&self, classes: usize) -> f64 {
        classes as f64 * (self.options.lstm.projection_dim + 1) as f64
    }

    /// Classes of a row.
    fn classes(&self) -> usize {
        self.samples.unwrap_or(self.words)
    }

    /// Classes of the rows of so many replicas.
    fn classes_of(&self, replicas: usize) -> usize {
        self.samples.map_or(self.words, |samples| replicas * samples)
    }

    /// Lanes whose tensors are in memory together.
    fn lanes_at_once(&self) -> usize {
        match self.device {
            DeviceName::Cpu => self.threads.clamp(1, self.lanes()),
            DeviceName::Cuda(_) => 1,
        }
    }

    fn lanes(&self) -> usize {
        self.recipe.lanes.clamp(1, self.rows.max(1))
    }

    /// Tokens of a lane in each direction.
    fn tokens_of_lane(&self) -> usize {
        self.rows.div_ceil(self.lanes()) * self.recipe.positions
    }

    /// Parameters of the LSTM layers.
    fn of_stacks(&self) -> f64 {
        let lstm = &self.options.lstm;
        let of_cells = 4 * lstm.dim * (2 * lstm.projection_dim + 1) + lstm.dim * lstm.projection_dim;
        (2 * lstm.n_layers * of_cells) as f64
    }

    /// Weights and gradients while lanes are computed, and activations.
    fn of_lanes(&self) -> (f64, f64) {
        let of_lane = self.of_stacks() + 2.0 * self.of_softmax(self.classes_of(self.replicas));
        let n = self.lanes_at_once();
        let waiting = if n > 1 { 1 } else { 0 };
        let gradients = self.of_model() + (1 + n + waiting) as f64 * of_lane;
        (gradients, self.of_words() + n as f64 * (self.of_lstm() + self.of_logits()))
    }

    /// Weights and gradients when those of the parameters are made from the sums.
    fn of_end(&self) -> f64 {
        let replicas = self.recipe.replicas_of(&(0..self.recipe.rows)).len();
        4.0 * self.of_model() + 2.0 * self.of_softmax(self.classes_of(replicas))
    }

    /// Activations of the token layer for all words.
    fn of_words(&self) -> f64 {
        let cnn = &self.options.char_cnn;
        let different = (2 * self.rows * self.recipe.positions / 3).min(self.words);
        let widest = cnn.filters.iter().map(|filter| filter.width).max().unwrap_or(1) * cnn.embedding_dim;
        let of_lane = different as f64 / self.lanes() as f64;
        let groups = (of_lane * (PLACES * widest) as f64 / GROUP as f64).max(1.0);
        let of_filter = |width: usize, n: usize| {
            let places = (PLACES as f64 * (1.0 + 1.0 / groups))
                .min((cnn.max_characters_per_token + 1).saturating_sub(width) as f64);
            places * (width * cnn.embedding_dim + n) as f64
        };
        let of_filters: f64 = cnn.filters.iter().map(|filter| of_filter(filter.width, filter.n)).sum();
        different as f64 * (of_filters + (8 * cnn.n_highway * self.options.n_filters()) as f64)
    }

    /// Activations of the LSTM layers of a lane.
    fn of_lstm(&self) -> f64 {
        let lstm = &self.options.lstm;
        let (d, p) = match (self.device, self.recipe.precision) {
            (DeviceName::Cpu, Precision::F32) => (6, 3),
            // Cells are float32, which is two numbers of bfloat16.
            (device @ DeviceName::Cuda(_), Precision::F32 | Precision::Tf32 | Precision::Bf16)
                if device.kernels(self.recipe.precision) == Some(Ok(())) =>
            {
                (7, 5)
            }
            _ => (9, 4),
        };
        let of_token = 2 * lstm.n_layers * (d * lstm.dim + p * lstm.projection_dim);
        let rows = self.rows.div_ceil(self.lanes()).max(LEAST_WIDTH);
        (rows * self.recipe.positions) as f64 * of_token as f64
    }

    /// Logits of a lane.
    fn of_logits(&self) -> f64 {
        let block = if self.device == DeviceName::Cpu { LOGITS.0 } else { LOGITS.1 };
        let most = block.max(LEAST_ROWS * self.classes());
        2.0 * (self.classes() as f64 * self.tokens_of_lane() as f64).min(most as f64)
    }
}

#[cfg(test)]
mod tests {
    use elmo::options::PublishedSize;

    use super::*;

    /// By hand, from the sizes of the small model, and 129 parameters for each of 10,000 words. A window of 128 x 20 has 5,120
    /// tokens, of which 1,706 are taken for different words: 426 in the share of a lane, which are one group.
    #[test]
    fn the_estimate_is_the_formula() {
        let options = PublishedSize::Small.options();
        let recipe = Recipe::bilm();
        let load = |threads, rows, device| {
            Room::of(&Load {
                options: &options,
                recipe: &recipe,
                words: 10_000,
                samples: None,
                replicas: 1,
                device,
                threads,
                rows,
            })
        };
        let found = load(1, 128, DeviceName::Cpu);
        let (model, softmax) = (options.parameters(), 1_290_000);
        assert_eq!(found.state, 2 * 4 * (model + softmax));
        let of_stacks = 2 * 2 * (4 * 1024 * (2 * 128 + 1) + 1024 * 128);
        // Windows of 1 to 7 characters of 16 numbers, at 18 places; one highway layer of 2,048.
        let of_word = 18 * (16 * 28 + 2048) + 8 * 2048;
        let of_lstm = 640 * 2 * 2 * (6 * 1024 + 3 * 128);
        let of_lane = of_stacks + 2 * softmax;
        let activations = of_lstm + 2 * (1 << 19);
        assert_eq!(found.step, 4 * (model + 2 * of_lane + 1706 * of_word + activations));
        assert_eq!(found.program, 340 << 20);
        assert_eq!(found.on_host(), found.state + found.step.max(found.state) + found.program);
        // More threads compute more lanes at once, and one may wait; fewer rows need less.
        let more = load(4, 128, DeviceName::Cpu);
        assert_eq!(more.step - found.step, 4 * (4 * of_lane + 3 * activations));
        assert_eq!(load(9, 128, DeviceName::Cpu), more);
        assert!(load(1, 16, DeviceName::Cpu).step < found.step);
        // With few rows, gradients take more than activations.
        assert_eq!(load(1, 4, DeviceName::Cpu).step, 4 * (4 * model + 2 * softmax));
        let device = load(4, 128, DeviceName::Cuda(0));
        assert_eq!((device.state, device.on_device(), device.program), (found.state, device.state + device.step, 0));
    }

    /// Largest resident memory of dry runs on text of the `books` corpus, in MiB, as benches/RESULTS.md lists it: (lanes, threads,
    /// rows, words, measured) at the small size with all words. Estimates are at most an eighth off.
    #[test]
    fn the_estimate_is_near_what_was_measured() {
        let options = PublishedSize::Small.options();
        for (lanes, threads, rows, words, measured) in [
            (4, 1, 128, 10_000, 1032),
            (4, 2, 128, 10_000, 1262),
            (1, 1, 128, 10_000, 1100),
            (2, 2, 128, 10_000, 1135),
            (8, 2, 128, 10_000, 1176),
            (8, 8, 128, 10_000, 1923),
            (1, 1, 32, 10_000, 770),
            (4, 2, 128, 30_000, 1340),
        ] {
            let recipe = Recipe { lanes, ..Recipe::bilm() };
            let (device, samples) = (DeviceName::Cpu, None);
            let load = Load { options: &options, recipe: &recipe, words, samples, replicas: 1, device, threads, rows };
            let estimate = (Room::of(&load).on_host() >> 20) as f64;
            let ratio = estimate / f64::from(measured);
            assert!((0.875..1.125).contains(&ratio), "{lanes} lanes, {threads} threads: {estimate}, not {measured}");
        }
    }
}
