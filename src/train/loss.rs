//! The loss of one direction, and its derivatives, without a graph: logits exist for a few rows at a time.
//!
//! With `x` the top outputs `[N, P]`, the loss of a row is `ln(sum over classes of exp(logit)) - logit of the target`.
//!
//! ```text
//! full softmax      classes: all words     logit = x W[k] + b[k]
//! sampled softmax   classes: the target    logit = x W[k] + b[k] - ln(expected count of k)
//!                   and the negatives      (a negative that is the target of a row is left out of that row)
//! ```
//!
//! `W [V, P]` and `b [V]` are shared by both directions. With several replicas, each has negatives of its own: the classes
//! of a process are those of its replicas, one after the other, and a row has those of its own replica.

use std::{collections::HashMap, ops::Range, sync::Arc};

use tch::{Device, Kind, Tensor};

use super::{
    TrainError,
    sampler::{LogUniform, Negatives},
};
use crate::model::{DeviceError, kernels, tensors};

/// Logits of one block of rows on a CPU (2 MiB in float32, so that they stay in the cache), and on a GPU.
const BLOCK: (usize, usize) = (1 << 19, 1 << 26);
/// Minimum rows of a block.
const MIN_BLOCK_ROWS: usize = 32;
/// A logit whose exponential is 0 beside any other one. Minus infinity would make a row of nothing else undefined.
const NO_LOGIT: f64 = -1e30;
/// Words of one product in the evaluation of the full softmax.
const COLUMNS: i64 = 32_768;

/// `W [V, P]` and `b [V]`.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) weight: Tensor,
    pub(super) bias: Tensor,
}

impl Output {
    pub(super) fn share(&self) -> Self {
        Self { weight: self.weight.shallow_clone(), bias: self.bias.shallow_clone() }
    }

    pub(super) fn words(&self) -> usize {
        self.bias.size().first().map_or(0, |&words| words as usize)
    }

    /// In the number format of a computation.
    pub(super) fn to_kind(&self, kind: Kind) -> Result<Self, DeviceError> {
        Ok(Self { weight: self.weight.f_to_kind(kind)?, bias: self.bias.f_to_kind(kind)? })
    }

    /// Views of `n` rows.
    fn narrow(&self, first: usize, n: usize) -> Result<Self, DeviceError> {
        let narrow = |t: &Tensor| t.f_narrow(0, first as i64, n as i64);
        Ok(Self { weight: narrow(&self.weight)?, bias: narrow(&self.bias)? })
    }

    /// The rows of some words.
    fn rows(&self, words: &Tensor) -> Result<Self, DeviceError> {
        Ok(Self { weight: self.weight.f_index_select(0, words)?, bias: self.bias.f_index_select(0, words)? })
    }
}

/// The loss of one direction in one step.
#[derive(Debug)]
pub(super) struct Head {
    /// Target of each row `[N]`.
    targets: Vec<i64>,
    /// In the order of their rows, which are all rows.
    segments: Vec<Segment>,
    /// Number of the classes of this process, also where this is a part of its rows.
    classes: usize,
    /// Ids of the classes, if they are not all words.
    ids: Option<Ids>,
}

/// Ids of classes; those of several replicas may repeat.
#[derive(Debug, Clone)]
struct Ids {
    /// Of this process.
    own: Arc<[i64]>,
    /// Of all processes.
    all: Arc<[i64]>,
}

/// The negatives of a replica, and what follows from them without the parameters.
#[derive(Debug, Clone)]
pub(super) struct Drawn {
    /// Rows of this process that have them. Without any, the replica belongs to other processes.
    rows: Range<usize>,
    ids: Vec<i64>,
    /// Column of each negative.
    columns: Arc<HashMap<i64, i64>>,
    /// Logarithms of the expected counts of the negatives.
    logarithms: Vec<f64>,
    /// Those of the targets of `rows`.
    corrections: Vec<f64>,
}

impl Drawn {
    /// For rows of this process, whose targets are `targets`, and a vocabulary of so many words.
    ///
    /// # Errors
    /// [`TrainError::Recipe`] when a negative is not one of the words, or repeats.
    pub(super) fn new(
        words: usize,
        targets: &[u32],
        rows: Range<usize>,
        Negatives { ids, tries }: Negatives,
    ) -> Result<Self, TrainError> {
        let known = |id: &i64| usize::try_from(*id).is_ok_and(|id| id < words);
        let is_own = !rows.is_empty();
        // What belongs to other processes is needed for its ids alone.
        let columns: HashMap<i64, i64> = if is_own { ids.iter().copied().zip(0..).collect() } else { HashMap::new() };
        if is_own && columns.len() != ids.len() || !ids.iter().all(known) {
            return Err(TrainError::Recipe("negatives must be distinct words of the vocabulary".to_owned()));
        }
        let distribution = LogUniform::new(words);
        let logarithm = |id: i64| distribution.expected_count(id, ids.len(), tries).ln();
        let logarithms = if is_own { ids.iter().copied().map(logarithm).collect() } else { Vec::new() };
        let targets = if is_own { &targets[rows.clone()] } else { &[] };
        let corrections = targets.iter().map(|&target| logarithm(i64::from(target))).collect();
        Ok(Self { rows, columns: Arc::new(columns), logarithms, corrections, ids })
    }
}

/// Rows with the same classes.
#[derive(Debug)]
struct Segment {
    rows: Range<usize>,
    /// Place of the first class among those of the process.
    first: usize,
    /// All words, or the negatives with the logarithm of their expected count subtracted from the bias.
    classes: Output,
    sampled: Option<Sampled>,
    /// Factor of the derivatives.
    scale: f64,
}

/// What only the sampled softmax has.
#[derive(Debug)]
struct Sampled {
    /// All words.
    all: Output,
    /// Column of each negative.
    columns: Arc<HashMap<i64, i64>>,
    /// Logarithm of the expected count of each row's target `[N]`.
    corrections: Vec<f64>,
}

impl Sampled {
    /// Weights `[n, P]` and corrected biases `[n]` of the targets of rows from `first` on, and their logits `[n, 1]`.
    fn own(&self, x: &Tensor, targets: &[i64], first: usize) -> Result<(Output, Tensor), DeviceError> {
        let own = self.all.rows(&tensors::index(targets, x.device())?)?;
        let corrections = &self.corrections[first..first + targets.len()];
        let bias = own.bias.f_sub(&numbers(corrections, own.bias.kind(), x.device())?)?;
        let own = Output { weight: own.weight, bias }.to_kind(x.kind())?;
        let products = x.f_mul(&own.weight)?.f_sum_dim_intlist([1_i64].as_slice(), true, exact_kind(x.kind()))?;
        let logits = products.f_add(&own.bias.f_unsqueeze(1)?)?;
        Ok((own, logits))
    }
}

/// Loss of some rows of a direction, and the derivatives of the scaled mean loss.
#[derive(Debug)]
pub(super) struct HeadGradients {
    /// Sum over the rows, not scaled; one number of float64 on the device.
    pub(super) loss: Tensor,
    /// `[n, P]`
    pub(super) x: Tensor,
    /// Of the classes: `[K, P]`, `[K]`.
    pub(super) classes: Output,
    /// Of the targets of each row, `[n, P]`, `[n]`; only the sampled softmax has them.
    pub(super) targets: Option<Output>,
}

impl Head {
    /// The full softmax. `scale` is the factor of the derivatives: those of the mean have 1 / N.
    pub(super) fn full(output: &Output, targets: &[u32], scale: f64, kind: Kind) -> Result<Self, DeviceError> {
        let targets = wide(targets);
        let classes = output.to_kind(kind)?;
        let segment = Segment { rows: 0..targets.len(), first: 0, classes, sampled: None, scale };
        Ok(Self { targets, segments: vec![segment], classes: output.words(), ids: None })
    }

    /// The sampled softmax, with the negatives of all replicas in their order.
    pub(super) fn sampled(
        output: &Output,
        targets: &[u32],
        drawn: &[Drawn],
        scale: f64,
        kind: Kind,
    ) -> Result<Self, DeviceError> {
        let targets = wide(targets);
        let ids = |drawn: &mut dyn Iterator<Item = &Drawn>| -> Arc<[i64]> {
            drawn.flat_map(|drawn| drawn.ids.iter().copied()).collect()
        };
        let is_own = |drawn: &&Drawn| !drawn.rows.is_empty();
        let own = ids(&mut drawn.iter().filter(is_own));
        let all = if drawn.iter().all(|drawn| is_own(&drawn)) { Arc::clone(&own) } else { ids(&mut drawn.iter()) };
        let (mut segments, mut classes) = (Vec::new(), 0);
        for drawn in drawn.iter().filter(is_own) {
            segments.push(Segment::sampled(output, classes, drawn, (scale, kind))?);
            classes += drawn.ids.len();
        }
        Ok(Self { targets, segments, classes, ids: Some(Ids { own, all }) })
    }

    /// Another handle on the same tensors, for rows `first..first + n` of this process.
    pub(super) fn part(&self, first: usize, n: usize) -> Self {
        let rows = first..first + n;
        Self {
            segments: self.segments.iter().filter_map(|segment| segment.part(&rows)).collect(),
            targets: self.targets[rows].to_vec(),
            classes: self.classes,
            ids: self.ids.clone(),
        }
    }

    /// Ids of the classes of this process, if they are not all words.
    pub(super) fn ids(&self) -> Option<&[i64]> {
        self.ids.as_ref().map(|ids| &*ids.own)
    }

    /// Ids of the classes of all processes, if they are not all words.
    pub(super) fn ids_of_all(&self) -> Option<&[i64]> {
        self.ids.as_ref().map(|ids| &*ids.all)
    }

    /// Target of each row.
    pub(super) fn targets(&self) -> &[i64] {
        &self.targets
    }

    /// Loss and derivatives for the top outputs `x [N, P]` of all rows of this part.
    pub(super) fn gradients(&self, x: &Tensor) -> Result<HeadGradients, DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        let (device, exact, classes) = (x.device(), exact_kind(x.kind()), self.classes as i64);
        let zeros = |shape: &[i64]| Tensor::f_zeros(shape, (exact, device));
        let classes = Output { weight: zeros(&[classes, x.size()[1]])?, bias: zeros(&[classes])? };
        let (mut losses, mut xs, mut weights, mut biases) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for segment in &self.segments {
            let mut sums = classes.narrow(segment.first, segment.classes.words())?;
            for rows in segment.blocks(device) {
                let x = x.f_narrow(0, rows.start as i64, rows.len() as i64)?;
                let targets = &self.targets[rows.clone()];
                let first = rows.start - segment.rows.start;
                let block = match x.device() == Device::Cpu && x.kind() == Kind::Float {
                    true => segment.host_block(&x, targets, first)?,
                    false => segment.block(&x, targets, first)?,
                };
                losses.push(block.loss);
                accumulate_product(&mut sums.weight, &block.p, &x)?;
                let _ = sums.bias.f_add_(&block.p.f_sum_dim_intlist([0_i64].as_slice(), false, exact)?)?;
                xs.push(block.x);
                if let Some(Output { weight, bias }) = block.target {
                    weights.push(weight);
                    biases.push(bias);
                }
            }
        }
        let targets = match weights.is_empty() {
            true => None,
            false => Some(Output { weight: Tensor::f_cat(&weights, 0)?, bias: Tensor::f_cat(&biases, 0)? }),
        };
        let loss = Tensor::f_stack(&losses, 0)?.f_sum(Kind::Double)?;
        Ok(HeadGradients { loss, x: Tensor::f_cat(&xs, 0)?, classes, targets })
    }
}

impl Segment {
    /// The sampled softmax of the rows of a replica, whose classes begin at `first`.
    fn sampled(output: &Output, first: usize, drawn: &Drawn, (scale, kind): (f64, Kind)) -> Result<Self, DeviceError> {
        let device = output.weight.device();
        let Output { weight, bias } = output.rows(&tensors::index(&drawn.ids, device)?)?;
        let bias = bias.f_sub(&numbers(&drawn.logarithms, bias.kind(), device)?)?;
        let classes = Output { weight, bias }.to_kind(kind)?;
        let (columns, corrections) = (Arc::clone(&drawn.columns), drawn.corrections.clone());
        let sampled = Sampled { all: output.share(), columns, corrections };
        Ok(Self { rows: drawn.rows.clone(), first, classes, sampled: Some(sampled), scale })
    }

    /// The same for those of some rows that it has, counted from the first of them; `None` if it has none.
    fn part(&self, rows: &Range<usize>) -> Option<Self> {
        let (start, end) = (self.rows.start.max(rows.start), self.rows.end.min(rows.end));
        let sampled = |s: &Sampled| Sampled {
            all: s.all.share(),
            columns: Arc::clone(&s.columns),
            corrections: s.corrections[start - self.rows.start..end - self.rows.start].to_vec(),
        };
        (start < end).then(|| Self {
            rows: start - rows.start..end - rows.start,
            first: self.first,
            classes: self.classes.share(),
            sampled: self.sampled.as_ref().map(sampled),
            scale: self.scale,
        })
    }

    /// Rows whose logits exist at the same time.
    fn blocks(&self, device: Device) -> impl Iterator<Item = Range<usize>> + use<> {
        let block = if device == Device::Cpu { BLOCK.0 } else { BLOCK.1 };
        let (n, end) = ((block / self.classes.words().max(1)).max(MIN_BLOCK_ROWS), self.rows.end);
        self.rows.clone().step_by(n).map(move |first| first..end.min(first + n))
    }

    /// Loss and derivatives of rows from `first` of this segment on.
    fn block(&self, x: &Tensor, targets: &[i64], first: usize) -> Result<Block, DeviceError> {
        let logits = self.classes.bias.f_addmm(x, &self.classes.weight.f_tr()?)?; // [n, K]
        match &self.sampled {
            None => self.full_block(x, &logits, targets),
            Some(sampled) => self.sampled_block(sampled, x, logits, targets, first),
        }
    }

    /// As `block`, with a pass of our own over the logits: libtorch needs nine.
    fn host_block(&self, x: &Tensor, targets: &[i64], first: usize) -> Result<Block, DeviceError> {
        let mut p = self.classes.bias.f_addmm(x, &self.classes.weight.f_tr()?)?; // [n, K]
        let own = self.sampled.as_ref().map(|sampled| sampled.own(x, targets, first)).transpose()?;
        let own_logits = own.as_ref().map(|(_, logits)| tensors::download(logits)).transpose()?;
        let (scale, mut loss, mut own_p) = (self.scale as f32, 0.0, Vec::with_capacity(targets.len()));
        // SAFETY: the result of a product that nothing else refers to.
        let rows = unsafe { tensors::values_mut(&mut p) }.chunks_exact_mut(self.classes.words());
        for (row, (logits, target)) in rows.zip(targets).enumerate() {
            match (&self.sampled, &own_logits) {
                (Some(sampled), Some(own)) => {
                    let hit = sampled.columns.get(target).map(|&column| column as usize);
                    if let Some(hit) = hit {
                        logits[hit] = f32::NEG_INFINITY;
                    }
                    let total = kernels::softmax(logits, Some(own[row]), scale);
                    if let Some(hit) = hit {
                        logits[hit] = 0.0;
                    }
                    let logarithm = f64::from(own[row]) - total;
                    loss -= logarithm;
                    own_p.push((self.scale * logarithm.exp_m1()) as f32);
                }
                _ => {
                    let target = *target as usize;
                    let logit = f64::from(logits[target]);
                    loss -= logit - kernels::softmax(logits, None, scale);
                    logits[target] -= scale;
                }
            }
        }
        let dx = p.f_mm(&self.classes.weight)?;
        let loss = Tensor::from(loss);
        let Some((own, _)) = own else { return Ok(Block { loss, x: dx, p, target: None }) };
        let bias = Tensor::f_from_slice(&own_p)?;
        let column = bias.f_unsqueeze(1)?;
        let dx = dx.f_add(&column.f_mul(&own.weight)?)?;
        Ok(Block { loss, x: dx, p, target: Some(Output { weight: column.f_mul(x)?, bias }) })
    }

    /// Derivatives of the logits: probability minus 1 at the target, times the scale.
    fn full_block(&self, x: &Tensor, logits: &Tensor, targets: &[i64]) -> Result<Block, DeviceError> {
        let exact = exact_kind(x.kind());
        let targets = tensors::index(targets, x.device())?.f_unsqueeze(1)?; // [n, 1]
        let mut logarithms = logits.f_log_softmax(1, exact)?;
        let loss = logarithms.f_gather(1, &targets, false)?.f_sum(Kind::Double)?.f_neg()?;
        let mut p = logarithms.f_exp_()?;
        let minus_one = Tensor::f_ones(targets.size(), (exact, x.device()))?.f_neg()?;
        let _ = p.f_scatter_add_(1, &targets, &minus_one)?;
        let p = p.f_mul_scalar_(self.scale)?.f_to_kind(x.kind())?;
        Ok(Block { loss, x: p.f_mm(&self.classes.weight)?, p, target: None })
    }

    fn sampled_block(
        &self,
        sampled: &Sampled,
        x: &Tensor,
        logits: Tensor,
        targets: &[i64],
        first: usize,
    ) -> Result<Block, DeviceError> {
        let (kind, exact) = (x.kind(), exact_kind(x.kind()));
        let (own, own_logits) = sampled.own(x, targets, first)?;
        self.leave_out_hits(sampled, &logits, targets)?;
        // With `s` the logarithm of the sum of the exponentials of the negatives' logits and `o` the target's logit, the target has the
        // probability sigmoid(o - s), and each negative its softmax among the negatives times sigmoid(s - o). A column for the target
        // would leave rows that no product of a GPU reads at full speed.
        let mut p = logits.f_log_softmax(1, exact)?; // [n, K]
        let largest = |t: &Tensor| t.f_amax([1_i64].as_slice(), true)?.f_to_kind(exact);
        let s = largest(&logits)?.f_sub(&largest(&p)?)?; // [n, 1]
        let own_logits = own_logits.f_to_kind(exact)?;
        // NaN where the target's logit is infinite, which would be a probability of 1; 0 elsewhere.
        let finite = own_logits.f_sub(&own_logits)?;
        let difference = s.f_sub(&own_logits)?.f_add(&finite)?;
        let others = difference.f_sigmoid()?; // all negatives together
        let loss = difference.f_neg()?.f_log_sigmoid()?.f_sum(Kind::Double)?.f_neg()?;
        let others = others.f_mul_scalar(self.scale)?;
        let p = p.f_exp_()?.f_mul_(&others)?.f_to_kind(kind)?;
        let own_p = others.f_neg()?.f_to_kind(kind)?;
        let dx = p.f_mm(&self.classes.weight)?.f_add(&own_p.f_mul(&own.weight)?)?;
        let target =
            Output { weight: own_p.f_mul(x)?.f_to_kind(exact)?, bias: own_p.f_squeeze_dim(1)?.f_to_kind(exact)? };
        Ok(Block { loss, x: dx, p, target: Some(target) })
    }

    /// Negatives that are the target of a row get probability 0 in it: `logits [n, K]`.
    fn leave_out_hits(&self, sampled: &Sampled, logits: &Tensor, targets: &[i64]) -> Result<(), DeviceError> {
        let width = self.classes.words() as i64;
        let hit = |(row, target): (i64, &i64)| sampled.columns.get(target).map(|column| row * width + column);
        let hits: Vec<i64> = (0..).zip(targets).filter_map(hit).collect();
        if !hits.is_empty() {
            let hits = tensors::index(&hits, logits.device())?;
            let _ = logits.f_view([-1])?.f_index_fill_(0, &hits, NO_LOGIT)?;
        }
        Ok(())
    }
}

/// A block of rows.
struct Block {
    loss: Tensor,
    /// Derivatives of the logits of the classes `[n, K]`.
    p: Tensor,
    /// Derivatives of the outputs `[n, P]`.
    x: Tensor,
    /// Derivatives of the rows of the targets.
    target: Option<Output>,
}

/// Kind of sums: bfloat16 has too few digits for them.
pub(super) fn exact_kind(kind: Kind) -> Kind {
    if kind == Kind::BFloat16 { Kind::Float } else { kind }
}

/// `sum += p^T x`
fn accumulate_product(sum: &mut Tensor, p: &Tensor, x: &Tensor) -> Result<(), DeviceError> {
    let p = p.f_tr()?;
    let _ = match p.kind() == sum.kind() {
        true => sum.f_addmm_(&p, x)?,
        false => sum.f_add_(&p.f_mm(x)?)?,
    };
    Ok(())
}

fn wide(targets: &[u32]) -> Vec<i64> {
    targets.iter().map(|&target| i64::from(target)).collect()
}

fn numbers(values: &[f64], kind: Kind, device: Device) -> Result<Tensor, DeviceError> {
    tensors::uploaded(&Tensor::f_from_slice(values)?.f_to_kind(kind)?, device)
}

/// Rows of a block of [`log_probabilities`].
pub(super) fn block_rows(device: Device) -> usize {
    if device == Device::Cpu { 64 } else { 1024 }
}

/// Natural logarithms of the probabilities of `targets [N]` after `x [N, P]` by the full softmax, as float64; without a
/// graph, in blocks of rows and of words.
pub(super) fn log_probabilities(output: &Output, x: &Tensor, targets: &[u32]) -> Result<Vec<f64>, DeviceError> {
    let _no_gradients = tch::no_grad_guard();
    let (words, mut all) = (output.words() as i64, Vec::with_capacity(targets.len()));
    let rows = block_rows(x.device());
    for (block, targets) in targets.chunks(rows).enumerate() {
        let x = x.f_narrow(0, (block * rows) as i64, targets.len() as i64)?;
        let mut sums = Vec::new(); // of [n]
        for first in (0..words).step_by(COLUMNS as usize) {
            let n = COLUMNS.min(words - first);
            let (weight, bias) = (output.weight.f_narrow(0, first, n)?, output.bias.f_narrow(0, first, n)?);
            sums.push(bias.f_addmm(&x, &weight.f_tr()?)?.f_logsumexp(&[1][..], false)?);
        }
        let total = Tensor::f_stack(&sums, 1)?.f_logsumexp(&[1][..], false)?; // [n]
        let targets: Vec<i64> = targets.iter().map(|&target| i64::from(target)).collect();
        let own = output.rows(&tensors::index(&targets, x.device())?)?;
        let chosen = x.f_mul(&own.weight)?.f_sum_dim_intlist([1_i64].as_slice(), false, x.kind())?.f_add(&own.bias)?;
        let logarithms = chosen.f_sub(&total)?.f_to_kind(Kind::Double)?.f_to_device(Device::Cpu)?;
        all.extend(Vec::<f64>::try_from(logarithms)?);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CPU: (Kind, Device) = (Kind::Double, Device::Cpu);

    fn wave(shape: &[i64], seed: f64) -> Tensor {
        (Tensor::arange(shape.iter().product::<i64>(), CPU) * 12.9898 + seed).sin().reshape(shape)
    }

    fn output(words: i64, width: i64) -> Output {
        Output { weight: wave(&[words, width], 0.3), bias: wave(&[words], 0.7) }
    }

    fn values(t: &Tensor) -> Vec<f64> {
        Vec::try_from(t.reshape([-1])).unwrap()
    }

    /// Expected: the definition, in plain loops. There are more words than in one product, and more rows than in a block.
    #[test]
    fn log_probabilities_are_those_of_the_definition() {
        let (words, width, n) = (COLUMNS + 321, 3, 70);
        let (output, x) = (output(words, width), wave(&[n, width], 0.1) * 3.0);
        let targets: Vec<u32> = (0..n).map(|i| (i * 7919 % words) as u32).collect();
        let found = log_probabilities(&output, &x, &targets).unwrap();
        let (weight, bias, x) = (values(&output.weight), values(&output.bias), values(&x));
        for row in [0, 1, 63, 64, 69] {
            let logit = |word: usize| -> f64 {
                let products = (0..3).map(|k| x[3 * row + k] * weight[3 * word + k]);
                products.sum::<f64>() + bias[word]
            };
            let total: f64 = (0..words as usize).map(|word| logit(word).exp()).sum();
            let expected = logit(targets[row] as usize) - total.ln();
            assert!((found[row] - expected).abs() < 1e-11, "{row}: {}, not {expected}", found[row]);
        }
    }

    /// Words of the softmax of `gradients_are_those_of_the_definition`.
    const WORDS: i64 = 40;

    type Replica = (Range<usize>, Negatives);

    fn drawn(rows: Range<usize>, ids: &[i64], tries: u64) -> Replica {
        (rows, Negatives { ids: ids.to_vec(), tries })
    }

    fn sampled(output: &Output, targets: &[u32], all: &[Replica], scale: f64, kind: Kind) -> Result<Head, TrainError> {
        let of = |(rows, negatives): &Replica| Drawn::new(output.words(), targets, rows.clone(), negatives.clone());
        Ok(Head::sampled(output, targets, &all.iter().map(of).collect::<Result<Vec<_>, _>>()?, scale, kind)?)
    }

    /// Logits of all words; those of other words than the classes of a row are -infinity.
    fn logits(output: &Output, x: &Tensor, targets: &[u32], drawn: &[Replica]) -> Tensor {
        let all = x.mm(&output.weight.tr()) + &output.bias; // [n, V]
        let sampled = |(rows, Negatives { ids, tries }): &Replica| {
            let distribution = LogUniform::new(WORDS as usize);
            let counts: Vec<f64> =
                (0..WORDS).map(|id| distribution.expected_count(id, ids.len(), *tries).ln()).collect();
            let absent = |row: usize, word: i64| !ids.contains(&word) && i64::from(targets[row]) != word;
            let mask = rows.clone().flat_map(|row| (0..WORDS).map(move |word| absent(row, word)));
            let mask = Tensor::from_slice(&mask.collect::<Vec<_>>()).reshape([rows.len() as i64, WORDS]);
            let logits = all.narrow(0, rows.start as i64, rows.len() as i64) - Tensor::from_slice(&counts);
            logits.masked_fill(&mask, f64::NEG_INFINITY)
        };
        let segments: Vec<_> = drawn.iter().map(sampled).collect();
        if segments.is_empty() { all } else { Tensor::cat(&segments, 0) }
    }

    /// Loss and derivatives of the definition, by libtorch's graph, for blocks of one and of several products: with all words,
    /// with negatives, and with two replicas whose border is in the second lane.
    #[test]
    fn gradients_are_those_of_the_definition() {
        let (width, n, scale) = (3, 50, 0.7);
        let targets: Vec<u32> = (0..n).map(|i| (i * i % 37) as u32).collect();
        let one = [drawn(0..50, &[0, 1, 2, 4, 36, 39, 9], 11)];
        let two = [drawn(0..30, &[0, 1, 2, 4, 36, 39, 9], 11), drawn(30..50, &[1, 25, 0, 16, 7], 6)];
        for (negatives, kind, tolerance) in [
            (&[][..], Kind::Double, 1e-13),
            (&one, Kind::Double, 1e-13),
            (&two, Kind::Double, 1e-13),
            (&two, Kind::Float, 2e-6),
        ] {
            let leaf = |t: Tensor| t.set_requires_grad(true);
            let output = Output { weight: leaf(output(WORDS, width).weight), bias: leaf(output(WORDS, width).bias) };
            let x = leaf(wave(&[n, width], 0.1) * 2.0);
            let ids = Tensor::from_slice(&targets.iter().map(|&t| i64::from(t)).collect::<Vec<_>>()).unsqueeze(1);
            let logarithms = logits(&output, &x, &targets, negatives).log_softmax(1, Kind::Double);
            let loss = -logarithms.gather(1, &ids, false).sum(Kind::Double);
            let expected = Tensor::run_backward(&[&loss * scale], &[&x, &output.weight, &output.bias], false, false);
            let head = match negatives {
                [] => Head::full(&output, &targets, scale, kind).unwrap(),
                drawn => sampled(&output, &targets, drawn, scale, kind).unwrap(),
            };
            // Rows 0..20 and 20..50 in lanes of their own.
            let (mut weight, mut bias) = (output.weight.zeros_like(), output.bias.zeros_like());
            let (mut total, mut xs) = (0.0, Vec::new());
            for (first, rows) in [(0, 20), (20, 30)] {
                let part = head.part(first, rows);
                let found = part.gradients(&x.narrow(0, first as i64, rows as i64).detach().to_kind(kind)).unwrap();
                total += f64::try_from(found.loss).unwrap();
                xs.push(found.x.to_kind(Kind::Double));
                let _no_gradients = tch::no_grad_guard();
                let all: Vec<i64> = (0..WORDS).collect();
                let mut add = |ids: &[i64], of: &Output| {
                    let ids = Tensor::from_slice(ids);
                    let _ = weight.index_add_(0, &ids, &of.weight.to_kind(Kind::Double));
                    let _ = bias.index_add_(0, &ids, &of.bias.to_kind(Kind::Double));
                };
                add(part.ids().unwrap_or(&all), &found.classes);
                found.targets.iter().for_each(|own| add(part.targets(), own));
            }
            let what = format!("{} replicas, {kind:?}", negatives.len());
            assert!((total - f64::try_from(loss).unwrap()).abs() < 10.0 * tolerance * total, "{what}");
            for (found, expected) in [Tensor::cat(&xs, 0), weight, bias].iter().zip(&expected) {
                let gap = f64::try_from((found - expected).abs().max()).unwrap();
                assert!(gap < tolerance, "{what}: {gap:e}");
            }
        }
    }

    /// By hand: infinity minus infinity. A probability of 1 would hide that the model is broken.
    #[test]
    fn an_infinite_logit_of_a_target_is_no_loss() {
        for kind in [Kind::Double, Kind::Float, Kind::BFloat16] {
            let output = output(WORDS, 3).to_kind(exact_kind(kind)).unwrap();
            let _ = output.bias.narrow(0, 5, 1).fill_(f64::INFINITY);
            let head = sampled(&output, &[5, 3], &[drawn(0..2, &[1, 2], 3)], 1.0, kind).unwrap();
            let found = head.gradients(&wave(&[2, 3], 0.1).to_kind(kind)).unwrap();
            assert!(f64::try_from(found.loss).unwrap().is_nan(), "{kind:?}");
        }
    }

    /// By hand: of three replicas, two belong to this process.
    #[test]
    fn the_classes_of_a_process_are_those_of_its_replicas() {
        let all = [drawn(0..0, &[5, 6], 2), drawn(0..1, &[7, 1], 2), drawn(1..3, &[1, 2], 2)];
        let head = sampled(&output(WORDS, 3), &[3, 4, 5], &all, 1.0, Kind::Double).unwrap();
        assert_eq!((head.ids().unwrap(), head.ids_of_all().unwrap()), (&[7, 1, 1, 2][..], &[5, 6, 7, 1, 1, 2][..]));
    }

    #[test]
    fn negatives_that_repeat_or_are_no_words_are_refused() {
        for ids in [vec![1, 2, 1], vec![1, 40], vec![-1]] {
            let head = sampled(&output(WORDS, 3), &[0], &[drawn(0..1, &ids, 9)], 1.0, Kind::Double);
            assert!(head.unwrap_err().to_string().contains("distinct words"));
        }
    }
}
