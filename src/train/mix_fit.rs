//! Fits a scalar mix and a linear head to labelled vectors of a frozen biLM.
//!
//! ```text
//! h_t = gamma * sum_k softmax(s)_k * layer_k(t)        Peters et al. 2018, equation 1
//! logits = W dropout(h) + b                            h: of a token, or the maximum over the tokens of a text
//! loss = mean cross-entropy + lambda * sum_k s_k^2     lambda: the L2 term of bilm-tf's `weight_layers`
//! ```
//!
//! Everything is computed in float64 by one thread, with gradients by hand: the bits depend on the seed alone. The vectors
//! are float32, as inference computes them, and are read from wherever they are in the order of the batches.

use std::{
    io,
    sync::atomic::{AtomicBool, Ordering},
};

use super::random::{Purpose, Random};
use crate::mix::ScalarMix;

/// Sums of a dot product that are computed side by side.
const SUMS: usize = 8;
/// Adam (Kingma and Ba 2015).
const BETAS: [f64; 2] = [0.9, 0.999];
const EPSILON: f64 = 1e-8;
/// What the random numbers of [`Purpose::Mix`] are for.
const ORDER: u8 = 0;
const DROPOUT: u8 = 1;
const INITIAL: u8 = 2;

/// Where the vectors are: a vector has all layers one after the other, layer 0 first.
pub trait LayerVectors: Sync {
    /// Replaces `into` with `count` vectors from number `first` on.
    ///
    /// # Errors
    /// Those of the disk.
    fn read(&self, first: u64, count: usize, into: &mut Vec<f32>) -> io::Result<()>;
}

/// Consecutive vectors and their labels: a label for each of them, or one label of their maximum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Labelled {
    /// Number of the first vector.
    pub first: u64,
    /// Number of vectors.
    pub vectors: usize,
    /// Numbers of classes.
    pub labels: Vec<u32>,
}

/// Which layers the head reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MixLayers {
    /// All, with weights that are learned.
    Learned,
    /// One, as it is: a baseline.
    One(usize),
}

/// How a head and the weights of a mix are learned, whatever the data.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MixSettings {
    /// Probability with which a value of the mixed vector is dropped.
    pub dropout: f64,
    /// Factor of the sum of the squared scalars in the loss.
    pub l2: f64,
    /// Learning rate of Adam.
    pub learning_rate: f64,
    /// Examples of a batch.
    pub batch: usize,
    /// Most passes.
    pub epochs: usize,
    /// Passes without a better score after which the fit ends.
    pub patience: usize,
}

/// How a mix is fitted.
#[derive(Debug, Clone, PartialEq)]
pub struct MixRecipe {
    /// Layers of a vector.
    pub n_layers: usize,
    /// Values of a layer.
    pub width: usize,
    /// Classes.
    pub classes: usize,
    /// Which layers.
    pub layers: MixLayers,
    /// Labels are those of the maximum over the vectors of an example, not of each vector.
    pub maximum: bool,
    /// How the head and the weights are learned.
    pub settings: MixSettings,
    /// Seed of initial values, order and dropout.
    pub seed: u64,
}

/// A mix and a head.
#[derive(Debug, Clone, PartialEq)]
pub struct MixHead {
    /// One per layer, before the softmax.
    pub scalars: Vec<f64>,
    /// Scale of the mixed vector.
    pub gamma: f64,
    /// `W [classes, width]`
    pub weight: Vec<f64>,
    /// `b [classes]`
    pub bias: Vec<f64>,
}

impl MixRecipe {
    fn check(&self) -> io::Result<()> {
        let is_layer = |layer: usize| layer < self.n_layers;
        let layers = match self.layers {
            MixLayers::Learned => self.n_layers > 0,
            MixLayers::One(layer) => is_layer(layer),
        };
        if !layers {
            return Err(invalid(format!("layers {:?} of a model with {} layers", self.layers, self.n_layers)));
        }
        for (name, number) in [("width", self.width), ("classes", self.classes), ("batch", self.settings.batch)] {
            if number == 0 {
                return Err(invalid(format!("{name} is 0; it must be at least 1")));
            }
        }
        Ok(())
    }

    fn check_example(&self, example: &Labelled) -> io::Result<()> {
        let expected = if self.maximum { usize::from(example.vectors > 0) } else { example.vectors };
        if example.labels.len() != expected {
            return Err(invalid(format!(
                "the example at vector {} has {} labels for {} vectors; expected {expected}",
                example.first,
                example.labels.len(),
                example.vectors
            )));
        }
        match example.labels.iter().find(|label| **label as usize >= self.classes) {
            Some(label) => Err(invalid(format!(
                "the example at vector {} has label {label}; there are {} classes, numbered from 0",
                example.first, self.classes
            ))),
            None => Ok(()),
        }
    }
}

fn invalid(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, reason)
}

fn is_better(score: f64, than: f64) -> bool {
    score > than || (than.is_nan() && !score.is_nan())
}

/// The best head of a fit.
#[derive(Debug, Clone, PartialEq)]
pub struct MixFit {
    /// With scalars and gamma rounded to float32, as in `mix.json`.
    pub head: MixHead,
    /// Weights of the layers.
    pub weights: Vec<f64>,
    /// The pass after which it was the best, from 1.
    pub epoch: usize,
    /// Its classes of the dev examples, computed with the rounded mix.
    pub predictions: Vec<Vec<u32>>,
}

impl MixFit {
    /// Whether all numbers of mix and head are finite.
    pub fn is_finite(&self) -> bool {
        let MixHead { scalars, gamma, weight, bias } = &self.head;
        scalars.iter().chain([gamma]).chain(weight).chain(bias).all(|number| number.is_finite())
    }

    /// The content of `mix.json`.
    pub fn mix(&self, layer_norm: bool) -> ScalarMix {
        // A single layer has the weights 0 and 1, which are the softmax of these.
        let is_one = self.weights.iter().filter(|weight| **weight != 0.0).count() == 1;
        let of_one = |weight: &f64| if *weight == 0.0 { -1000.0 } else { 0.0 };
        let scalars = match is_one {
            true => self.weights.iter().map(of_one).collect(),
            false => self.head.scalars.iter().map(|&s| s as f32).collect(),
        };
        ScalarMix { scalars, gamma: self.head.gamma as f32, layer_norm }
    }
}

/// Examples, and where their vectors are.
#[derive(Clone, Copy)]
pub struct MixData<'d> {
    /// The vectors.
    pub vectors: &'d dyn LayerVectors,
    /// The examples.
    pub examples: &'d [Labelled],
}

impl std::fmt::Debug for MixData<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MixData").field("examples", &self.examples.len()).finish_non_exhaustive()
    }
}

/// Weights of the layers.
fn softmax(scalars: &[f64]) -> Vec<f64> {
    let largest = scalars.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let powers: Vec<f64> = scalars.iter().map(|s| (s - largest).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|p| p / sum).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<SUMS>(), b.as_chunks::<SUMS>());
    let mut sums = [0.0; SUMS];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..SUMS {
            sums[lane] += a[lane] * b[lane];
        }
    }
    sums.iter().sum::<f64>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f64>()
}

/// As [`dot`], with values of a layer.
fn dot_layer(a: &[f64], layer: &[f32]) -> f64 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<SUMS>(), layer.as_chunks::<SUMS>());
    let mut sums = [0.0; SUMS];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..SUMS {
            sums[lane] += a[lane] * f64::from(b[lane]);
        }
    }
    sums.iter().sum::<f64>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * f64::from(*b)).sum::<f64>()
}

/// `to += factor * from`
fn add_scaled(to: &mut [f64], factor: f64, from: &[f64]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from);
}

/// Gradients of a batch: the derivative of the sum of losses.
#[derive(Debug, Clone, PartialEq)]
struct Gradients {
    /// By the factor of each layer.
    factors: Vec<f64>,
    weight: Vec<f64>,
    bias: Vec<f64>,
}

/// Vectors that the computation reuses.
#[derive(Debug, Default)]
struct Scratch {
    /// Mixed vector.
    mixed: Vec<f64>,
    /// Number of the vector whose value is the maximum, by dimension.
    largest: Vec<usize>,
    mask: Vec<f64>,
    dropped: Vec<f64>,
    logits: Vec<f64>,
    /// Derivative by the mixed vector.
    slope: Vec<f64>,
}

impl MixHead {
    /// Equal weights, and a head of Glorot's uniform distribution.
    fn initial(recipe: &MixRecipe) -> Self {
        let bound = (6.0 / (recipe.width + recipe.classes) as f64).sqrt();
        let mut random = Random::new(recipe.seed, Purpose::Mix(INITIAL), 0, 0, 0);
        let count = recipe.width * recipe.classes;
        Self {
            scalars: vec![0.0; recipe.n_layers],
            gamma: 1.0,
            weight: (0..count).map(|_| (2.0 * random.uniform() - 1.0) * bound).collect(),
            bias: vec![0.0; recipe.classes],
        }
    }

    /// The factor of each layer.
    fn factors(&self, layers: MixLayers) -> Vec<f64> {
        match layers {
            MixLayers::Learned => softmax(&self.scalars).iter().map(|weight| self.gamma * weight).collect(),
            MixLayers::One(one) => (0..self.scalars.len()).map(|layer| f64::from(u8::from(layer == one))).collect(),
        }
    }

    /// Computes `scratch.logits` of a mixed vector, with `scratch.mask` on it if there is one.
    fn logits(&self, scratch: &mut Scratch) {
        let Scratch { mixed, mask, dropped, logits, .. } = scratch;
        dropped.clear();
        match mask.is_empty() {
            true => dropped.extend_from_slice(mixed),
            false => dropped.extend(mixed.iter().zip(mask.iter()).map(|(value, kept)| value * kept)),
        }
        logits.clear();
        let rows = self.weight.chunks_exact(dropped.len());
        logits.extend(rows.zip(&self.bias).map(|(row, bias)| dot(row, dropped) + bias));
    }

    /// The loss of `scratch.logits`. Adds to the gradients and leaves the derivative by the mixed vector in `scratch.slope`.
    fn backward(&self, label: u32, scratch: &mut Scratch, gradients: &mut Gradients) -> f64 {
        let Scratch { mask, dropped, logits, slope, .. } = scratch;
        let probabilities = softmax(logits);
        let width = dropped.len();
        slope.clear();
        slope.resize(width, 0.0);
        for (class, probability) in probabilities.iter().enumerate() {
            let error = probability - f64::from(u8::from(class as u32 == label));
            gradients.bias[class] += error;
            let row = class * width..(class + 1) * width;
            add_scaled(&mut gradients.weight[row.clone()], error, dropped);
            add_scaled(slope, error, &self.weight[row]);
        }
        if !mask.is_empty() {
            slope.iter_mut().zip(mask.iter()).for_each(|(slope, kept)| *slope *= kept);
        }
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum = logits.iter().map(|logit| (logit - largest).exp()).sum::<f64>().ln() + largest;
        sum - logits.get(label as usize).copied().unwrap_or(f64::NAN)
    }

    fn predicted(&self, scratch: &mut Scratch) -> u32 {
        scratch.mask.clear();
        self.logits(scratch);
        let best = scratch.logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
        best.map_or(0, |(class, _)| class as u32)
    }
}

/// The vectors of an example under the factors of a head.
struct Mixed<'v> {
    vectors: &'v [f32],
    factors: &'v [f64],
    width: usize,
}

impl Mixed<'_> {
    fn layer(&self, vector: usize, layer: usize) -> &[f32] {
        let at = (vector * self.factors.len() + layer) * self.width;
        &self.vectors[at..at + self.width]
    }

    /// Mixes one vector.
    fn mix(&self, vector: usize, into: &mut Vec<f64>) {
        into.clear();
        into.resize(self.width, 0.0);
        for (layer, factor) in self.factors.iter().enumerate().filter(|(_, factor)| **factor != 0.0) {
            into.iter_mut().zip(self.layer(vector, layer)).for_each(|(to, from)| *to += factor * f64::from(*from));
        }
    }

    /// The maximum over the first `count` vectors.
    fn maximum(&self, count: usize, scratch: &mut Scratch) {
        let mut one = Vec::new();
        scratch.mixed.clear();
        scratch.mixed.resize(self.width, f64::NEG_INFINITY);
        scratch.largest.clear();
        scratch.largest.resize(self.width, 0);
        for vector in 0..count {
            self.mix(vector, &mut one);
            let best = scratch.mixed.iter_mut().zip(&mut scratch.largest);
            for ((best, place), value) in best.zip(&one) {
                if value > best {
                    (*best, *place) = (*value, vector);
                }
            }
        }
    }
}

/// What a pass over examples needs.
struct Pass<'p> {
    recipe: &'p MixRecipe,
    head: &'p MixHead,
    factors: Vec<f64>,
}

impl<'p> Pass<'p> {
    fn new(recipe: &'p MixRecipe, head: &'p MixHead) -> Self {
        Self { recipe, head, factors: head.factors(recipe.layers) }
    }

    /// The sum of the losses of an example; adds its gradients. `mask` draws a dropout mask for each of its labels.
    fn example(
        &self,
        vectors: &[f32],
        example: &Labelled,
        mask: &mut impl FnMut(&mut Vec<f64>),
        scratch: &mut Scratch,
        gradients: &mut Gradients,
    ) -> f64 {
        let mixed = Mixed { vectors, factors: &self.factors, width: self.recipe.width };
        let mut loss = 0.0;
        for (place, &label) in example.labels.iter().enumerate() {
            match self.recipe.maximum {
                true => mixed.maximum(example.vectors, scratch),
                false => mixed.mix(place, &mut scratch.mixed),
            }
            mask(&mut scratch.mask);
            self.head.logits(scratch);
            loss += self.head.backward(label, scratch, gradients);
            if self.recipe.layers == MixLayers::Learned {
                self.add_by_factor(&mixed, place, scratch, gradients);
            }
        }
        loss
    }

    /// Adds the derivatives by the factors of the layers.
    fn add_by_factor(&self, mixed: &Mixed<'_>, place: usize, scratch: &Scratch, gradients: &mut Gradients) {
        for (layer, gradient) in gradients.factors.iter_mut().enumerate() {
            *gradient += match self.recipe.maximum {
                false => dot_layer(&scratch.slope, mixed.layer(place, layer)),
                true => (scratch.slope.iter().zip(&scratch.largest).enumerate())
                    .map(|(k, (slope, vector))| slope * f64::from(mixed.layer(*vector, layer)[k]))
                    .sum(),
            };
        }
    }

    fn predict(&self, vectors: &[f32], example: &Labelled, scratch: &mut Scratch) -> Vec<u32> {
        let mixed = Mixed { vectors, factors: &self.factors, width: self.recipe.width };
        let mut classes = Vec::with_capacity(example.labels.len());
        for place in 0..example.labels.len() {
            match self.recipe.maximum {
                true => mixed.maximum(example.vectors, scratch),
                false => mixed.mix(place, &mut scratch.mixed),
            }
            classes.push(self.head.predicted(scratch));
        }
        classes
    }
}

impl Gradients {
    fn zero(recipe: &MixRecipe) -> Self {
        Self {
            factors: vec![0.0; recipe.n_layers],
            weight: vec![0.0; recipe.width * recipe.classes],
            bias: vec![0.0; recipe.classes],
        }
    }

    /// Derivatives of `loss / labels + lambda * sum s^2` by scalars, gamma, weight and bias, in one vector. Those of what is
    /// not learned are 0.
    fn finish(self, recipe: &MixRecipe, head: &MixHead, labels: usize) -> Vec<f64> {
        let n = labels.max(1) as f64;
        let mut all = Vec::with_capacity(head.len());
        match recipe.layers {
            MixLayers::One(_) => all.resize(recipe.n_layers + 1, 0.0),
            MixLayers::Learned => {
                let weights = softmax(&head.scalars);
                let mean: f64 = weights.iter().zip(&self.factors).map(|(w, g)| w * g).sum();
                let by_scalar = weights.iter().zip(&self.factors).zip(&head.scalars);
                all.extend(by_scalar.map(|((w, g), s)| head.gamma * w * (g - mean) / n + 2.0 * recipe.settings.l2 * s));
                all.push(mean / n);
            }
        }
        all.extend(self.weight.iter().chain(&self.bias).map(|gradient| gradient / n));
        all
    }
}

impl MixHead {
    fn len(&self) -> usize {
        self.scalars.len() + 1 + self.weight.len() + self.bias.len()
    }

    /// All parameters, in the order of [`Gradients::finish`].
    fn parameters(&mut self) -> impl Iterator<Item = &mut f64> {
        let Self { scalars, gamma, weight, bias } = self;
        scalars.iter_mut().chain(std::iter::once(gamma)).chain(weight).chain(bias)
    }

    /// With the numbers that `mix.json` can hold.
    fn rounded(mut self) -> Self {
        let round = |number: &mut f64| *number = f64::from(*number as f32);
        self.scalars.iter_mut().for_each(round);
        round(&mut self.gamma);
        self
    }
}

/// The state of Adam.
#[derive(Debug)]
struct Adam {
    means: Vec<f64>,
    squares: Vec<f64>,
    step: i32,
}

impl Adam {
    fn new(n: usize) -> Self {
        Self { means: vec![0.0; n], squares: vec![0.0; n], step: 0 }
    }

    fn update(&mut self, head: &mut MixHead, gradients: &[f64], rate: f64) {
        self.step = self.step.saturating_add(1);
        let [by_mean, by_square] = BETAS.map(|beta| 1.0 - beta.powi(self.step));
        let state = self.means.iter_mut().zip(&mut self.squares);
        for ((parameter, gradient), (mean, square)) in head.parameters().zip(gradients).zip(state) {
            *mean = BETAS[0] * *mean + (1.0 - BETAS[0]) * gradient;
            *square = BETAS[1] * *square + (1.0 - BETAS[1]) * gradient * gradient;
            *parameter -= rate * (*mean / by_mean) / ((*square / by_square).sqrt() + EPSILON);
        }
    }
}

/// Fits a mix and a head. After each pass, `score` rates the classes of the dev examples, and `each_epoch` hears number and
/// score; the head with the best score is returned, the first of equals. `None` when `stopped` was set before the end.
///
/// A score that is not a number is worse than any other.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] for a recipe or an example that no fit can have, and those of reading the vectors.
pub fn fit_mix(
    recipe: &MixRecipe,
    train: MixData<'_>,
    dev: MixData<'_>,
    score: &dyn Fn(&[Vec<u32>]) -> f64,
    each_epoch: &dyn Fn(usize, f64),
    stopped: &AtomicBool,
) -> io::Result<Option<MixFit>> {
    recipe.check()?;
    for data in [train, dev] {
        data.examples.iter().try_for_each(|example| recipe.check_example(example))?;
    }
    let mut fitting = Fitting {
        recipe,
        head: MixHead::initial(recipe),
        adam: Adam::new(0),
        scratch: Scratch::default(),
        vectors: Vec::new(),
        step: 0,
        stopped,
    };
    fitting.adam = Adam::new(fitting.head.len());
    let mut best: Option<(f64, usize, MixHead)> = None;
    for epoch in 1..=recipe.settings.epochs {
        fitting.epoch(train, epoch)?;
        let head = fitting.head.clone().rounded();
        let classes = fitting.predict(&head, dev)?;
        if stopped.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let rated = score(&classes);
        each_epoch(epoch, rated);
        match &best {
            Some((highest, at, _)) if !is_better(rated, *highest) => {
                if epoch - at >= recipe.settings.patience {
                    break;
                }
            }
            _ => best = Some((rated, epoch, head)),
        }
    }
    let Some((_, epoch, head)) = best else { return Ok(None) };
    let predictions = fitting.predict(&head, dev)?;
    let weights = match recipe.layers {
        MixLayers::Learned => softmax(&head.scalars),
        MixLayers::One(_) => head.factors(recipe.layers),
    };
    Ok(Some(MixFit { head, weights, epoch, predictions }))
}

/// A fit that is being made.
struct Fitting<'f> {
    recipe: &'f MixRecipe,
    head: MixHead,
    adam: Adam,
    scratch: Scratch,
    vectors: Vec<f32>,
    step: u32,
    stopped: &'f AtomicBool,
}

impl Fitting<'_> {
    /// A pass over the training examples in random order.
    fn epoch(&mut self, train: MixData<'_>, epoch: usize) -> io::Result<()> {
        let mut order: Vec<usize> = (0..train.examples.len()).collect();
        Random::new(self.recipe.seed, Purpose::Mix(ORDER), epoch as u32, 0, 0).shuffle(&mut order);
        for batch in order.chunks(self.recipe.settings.batch.max(1)) {
            if self.stopped.load(Ordering::Relaxed) {
                return Ok(());
            }
            self.step(train, batch)?;
        }
        Ok(())
    }

    fn step(&mut self, train: MixData<'_>, batch: &[usize]) -> io::Result<()> {
        self.step += 1;
        let Self { recipe, head, scratch, vectors, step, .. } = self;
        let mut gradients = Gradients::zero(recipe);
        let mut random = Random::new(recipe.seed, Purpose::Mix(DROPOUT), *step, 0, 0);
        let mut mask = |mask: &mut Vec<f64>| {
            mask.clear();
            let dropout = recipe.settings.dropout;
            if dropout > 0.0 {
                mask.resize(recipe.width, 0.0);
                random.drop_values(dropout, 1.0 / (1.0 - dropout), mask);
            }
        };
        let (pass, mut labels) = (Pass::new(recipe, head), 0);
        for &index in batch {
            let example = &train.examples[index];
            labels += example.labels.len();
            train.vectors.read(example.first, example.vectors, vectors)?;
            pass.example(vectors, example, &mut mask, scratch, &mut gradients);
        }
        let gradients = gradients.finish(recipe, head, labels);
        self.adam.update(&mut self.head, &gradients, self.recipe.settings.learning_rate);
        Ok(())
    }

    fn predict(&mut self, head: &MixHead, dev: MixData<'_>) -> io::Result<Vec<Vec<u32>>> {
        let pass = Pass::new(self.recipe, head);
        let mut all = Vec::with_capacity(dev.examples.len());
        for example in dev.examples {
            if self.stopped.load(Ordering::Relaxed) {
                break;
            }
            dev.vectors.read(example.first, example.vectors, &mut self.vectors)?;
            all.push(pass.predict(&self.vectors, example, &mut self.scratch));
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct InMemory {
        values: Vec<f32>,
        stride: usize,
    }

    impl LayerVectors for InMemory {
        fn read(&self, first: u64, count: usize, into: &mut Vec<f32>) -> io::Result<()> {
            into.clear();
            let from = first as usize * self.stride;
            into.extend_from_slice(&self.values[from..from + count * self.stride]);
            Ok(())
        }
    }

    fn recipe() -> MixRecipe {
        MixRecipe {
            n_layers: 3,
            width: 5,
            classes: 4,
            layers: MixLayers::Learned,
            maximum: false,
            settings: MixSettings { dropout: 0.0, l2: 0.01, learning_rate: 0.05, batch: 8, epochs: 30, patience: 30 },
            seed: 7,
        }
    }

    fn values(n: usize, seed: u64) -> Vec<f32> {
        let mut random = Random::new(seed, Purpose::InitialValues, 0, 0, 99);
        (0..n).map(|_| random.normal() as f32).collect()
    }

    /// The loss as equation 1 and the definition of cross-entropy say it, without the code above.
    fn plain_loss(recipe: &MixRecipe, head: &MixHead, vectors: &[f32], examples: &[Labelled], mask: &[f64]) -> f64 {
        let powers: Vec<f64> = head.scalars.iter().map(|s| s.exp()).collect();
        let sum: f64 = powers.iter().sum();
        let (mut loss, mut labels) = (0.0, 0.0);
        for example in examples {
            let mixed: Vec<Vec<f64>> = (0..example.vectors)
                .map(|t| {
                    let value = |k: usize, layer: usize| {
                        f64::from(vectors[((example.first as usize + t) * recipe.n_layers + layer) * recipe.width + k])
                    };
                    let one = |k| (0..recipe.n_layers).map(|l| powers[l] / sum * value(k, l)).sum::<f64>() * head.gamma;
                    (0..recipe.width).map(one).collect()
                })
                .collect();
            for (t, &label) in example.labels.iter().enumerate() {
                let h = |k: usize| match recipe.maximum {
                    true => mixed.iter().map(|v| v[k]).fold(f64::NEG_INFINITY, f64::max),
                    false => mixed[t][k],
                };
                let logit = |c: usize| {
                    head.bias[c]
                        + (0..recipe.width).map(|k| head.weight[c * recipe.width + k] * h(k) * mask[k]).sum::<f64>()
                };
                let all: f64 = (0..recipe.classes).map(|c| logit(c).exp()).sum();
                loss += all.ln() - logit(label as usize);
                labels += 1.0;
            }
        }
        loss / labels + recipe.settings.l2 * head.scalars.iter().map(|s| s * s).sum::<f64>()
    }

    /// Central differences of the plain loss, in float64.
    #[test]
    fn gradients_are_those_of_the_definition() {
        for (maximum, dropout) in [(false, false), (true, false), (false, true), (true, true)] {
            let recipe = MixRecipe { maximum, ..recipe() };
            let vectors = values(6 * 15, 3);
            let labels = |many: &[u32], one: u32| if maximum { vec![one] } else { many.to_vec() };
            let examples = [
                Labelled { first: 0, vectors: 4, labels: labels(&[0, 3, 1, 1], 2) },
                Labelled { first: 4, vectors: 2, labels: labels(&[2, 0], 0) },
            ];
            let mask = if dropout { vec![0.0, 1.25, 1.25, 1.25, 0.0] } else { vec![1.0; 5] };
            let mut head = MixHead::initial(&recipe);
            head.scalars = vec![0.3, -0.8, 0.1];
            head.gamma = 1.7;
            let mut gradients = Gradients::zero(&recipe);
            let mut draw = |to: &mut Vec<f64>| to.clone_from(&mask);
            let (pass, mut scratch) = (Pass::new(&recipe, &head), Scratch::default());
            let mut loss = 0.0;
            for example in &examples {
                let from = example.first as usize * 15;
                let own = &vectors[from..from + example.vectors * 15];
                loss += pass.example(own, example, &mut draw, &mut scratch, &mut gradients);
            }
            let labels = examples.iter().map(|e| e.labels.len()).sum::<usize>();
            let plain = |head: &MixHead| plain_loss(&recipe, head, &vectors, &examples, &mask);
            let penalty = recipe.settings.l2 * head.scalars.iter().map(|s| s * s).sum::<f64>();
            assert!((loss / labels as f64 + penalty - plain(&head)).abs() < 1e-12);
            let found = gradients.finish(&recipe, &head, labels);
            assert_eq!(found.len(), 3 + 1 + 20 + 4);
            const STEP: f64 = 1e-6;
            for (place, found) in found.iter().enumerate() {
                let moved = |by: f64| {
                    let mut head = head.clone();
                    *head.parameters().nth(place).unwrap() += by;
                    plain(&head)
                };
                let expected = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
                assert!((found - expected).abs() < 1e-8, "{place}: {found}, not {expected} ({maximum}, {dropout})");
            }
        }
    }

    /// Layers of noise, and the class in the sign of one layer's first value.
    fn carried_by(layer: usize, n: usize, seed: u64) -> (InMemory, Vec<Labelled>) {
        let values = values(n * 15, seed);
        let examples = (0..n).map(|i| {
            let label = u32::from(values[i * 15 + layer * 5] > 0.0);
            Labelled { first: i as u64, vectors: 1, labels: vec![label] }
        });
        let examples = examples.collect();
        (InMemory { values, stride: 15 }, examples)
    }

    fn accuracy(examples: &[Labelled], classes: &[Vec<u32>]) -> f64 {
        let right = examples.iter().zip(classes).filter(|(example, classes)| example.labels == **classes).count();
        right as f64 / examples.len() as f64
    }

    fn fitted(recipe: &MixRecipe, layer: usize) -> MixFit {
        let ((train, train_examples), (dev, dev_examples)) = (carried_by(layer, 600, 1), carried_by(layer, 200, 2));
        let train = MixData { vectors: &train, examples: &train_examples };
        let score = |classes: &[Vec<u32>]| accuracy(&dev_examples, classes);
        let dev = MixData { vectors: &dev, examples: &dev_examples };
        fit_mix(recipe, train, dev, &score, &|_, _| {}, &AtomicBool::new(false)).unwrap().unwrap()
    }

    #[test]
    fn the_layer_that_carries_the_label_gets_the_weight() {
        for layer in 0..3 {
            let recipe = MixRecipe {
                classes: 2,
                settings: MixSettings { l2: 0.0, patience: 60, epochs: 60, dropout: 0.1, ..recipe().settings },
                ..recipe()
            };
            let found = fitted(&recipe, layer);
            assert!(found.weights[layer] > 0.9, "layer {layer}: {:?}", found.weights);
            let mix = found.mix(false);
            let factors = mix.factors();
            assert!((factors[layer] / factors.iter().sum::<f64>() - found.weights[layer]).abs() < 1e-7);
            // Another layer alone cannot know the label: half of the coin's tosses.
            let other = fitted(&MixRecipe { layers: MixLayers::One((layer + 1) % 3), ..recipe.clone() }, layer);
            let one = fitted(&MixRecipe { layers: MixLayers::One(layer), ..recipe }, layer);
            let (_, examples) = carried_by(layer, 200, 2);
            assert!(accuracy(&examples, &one.predictions) > 0.95);
            assert!(accuracy(&examples, &other.predictions) < 0.65);
        }
    }

    /// Without l2 nothing holds the scalars; with much of it the weights stay equal.
    #[test]
    fn l2_keeps_the_weights_equal() {
        let found =
            fitted(&MixRecipe { classes: 2, settings: MixSettings { l2: 100.0, ..recipe().settings }, ..recipe() }, 1);
        assert!(found.weights.iter().all(|weight| (weight - 1.0 / 3.0).abs() < 0.02), "{:?}", found.weights);
    }

    #[test]
    fn a_seed_gives_the_same_bits_again_and_another_one_does_not() {
        let recipe = MixRecipe {
            classes: 2,
            settings: MixSettings { dropout: 0.2, epochs: 3, ..recipe().settings },
            ..recipe()
        };
        assert_eq!(fitted(&recipe, 1), fitted(&recipe, 1));
        assert_ne!(fitted(&recipe, 1).head, fitted(&MixRecipe { seed: 8, ..recipe.clone() }, 1).head);
    }

    #[test]
    fn a_fit_that_is_stopped_has_no_result() {
        let (vectors, examples) = carried_by(0, 20, 1);
        let data = MixData { vectors: &vectors, examples: &examples };
        let recipe = MixRecipe { classes: 2, ..recipe() };
        let found = fit_mix(&recipe, data, data, &|_| 0.0, &|_, _| {}, &AtomicBool::new(true)).unwrap();
        assert_eq!(found, None);
    }

    /// By hand: the softmax of the scalars must be the weights of the layer alone.
    #[test]
    fn the_mix_of_one_layer_is_that_layer() {
        let (vectors, examples) = carried_by(1, 20, 1);
        let data = MixData { vectors: &vectors, examples: &examples };
        let recipe = MixRecipe {
            classes: 2,
            layers: MixLayers::One(1),
            settings: MixSettings { epochs: 1, ..recipe().settings },
            ..recipe()
        };
        let fit = fit_mix(&recipe, data, data, &|_| 0.0, &|_, _| {}, &AtomicBool::new(false)).unwrap().unwrap();
        let mix = fit.mix(false);
        let scalars: Vec<f64> = mix.scalars.iter().map(|s| f64::from(*s)).collect();
        assert_eq!((softmax(&scalars), mix.gamma), (vec![0.0, 1.0, 0.0], 1.0));
    }

    #[test]
    fn what_cannot_be_fitted_is_an_error_and_no_score_is_the_worst() {
        let (vectors, examples) = carried_by(0, 20, 1);
        let data = MixData { vectors: &vectors, examples: &examples };
        let good = MixRecipe { classes: 2, settings: MixSettings { epochs: 2, ..recipe().settings }, ..recipe() };
        let error = |recipe: &MixRecipe, examples: &[Labelled]| {
            let other = MixData { vectors: &vectors, examples };
            fit_mix(recipe, other, data, &|_| 0.0, &|_, _| {}, &AtomicBool::new(false)).unwrap_err().to_string()
        };
        let one = |vectors, labels| [Labelled { first: 3, vectors, labels }];
        for (recipe, examples, says) in [
            (&good, &one(1, vec![2]), "the example at vector 3 has label 2; there are 2 classes"),
            (&good, &one(2, vec![0]), "has 1 labels for 2 vectors; expected 2"),
            (&MixRecipe { maximum: true, ..good.clone() }, &one(0, vec![0]), "expected 0"),
            (&MixRecipe { width: 0, ..good.clone() }, &one(1, vec![0]), "width is 0"),
            (&MixRecipe { layers: MixLayers::One(3), ..good.clone() }, &one(1, vec![0]), "a model with 3 layers"),
        ] {
            let error = error(recipe, examples);
            assert!(error.contains(says), "no {says:?} in {error:?}");
        }
        let calls = std::cell::Cell::new(0);
        let nan_first = |_: &[Vec<u32>]| {
            calls.set(calls.get() + 1);
            if calls.get() == 1 { f64::NAN } else { 0.5 }
        };
        let fit = fit_mix(&good, data, data, &nan_first, &|_, _| {}, &AtomicBool::new(false)).unwrap().unwrap();
        assert_eq!(fit.epoch, 2);
        assert!(fit.is_finite());
        // By hand: the first step of Adam changes a parameter by the rate, and a scalar of 1e300 is no float32.
        let settings = MixSettings { learning_rate: 1e300, ..good.settings };
        let wild = MixRecipe { settings, ..good };
        let fit = fit_mix(&wild, data, data, &|_| 0.0, &|_, _| {}, &AtomicBool::new(false)).unwrap().unwrap();
        assert!(!fit.is_finite(), "{fit:?}");
    }
}
