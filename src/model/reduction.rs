//! Token vectors of a batch on the device: gathered sentence by sentence, mixed, and summed over sentences, so that only results are
//! downloaded.
//!
//! The rows of a sentence are reduced in its own order, one after the other, so a result does not depend on other sentences.
//!
//! Kernels of our own read the layers once and write the result. libtorch's operations, which have the same arithmetic, go through memory
//! some 15 times: they serve where there are no kernels, and for normalised layers.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::{
    Activations, DeviceError,
    cell::{CellKernels, MOST_TERMS, Mixes, Reduction},
    scalar_ops,
    tensors::{self, OnHost},
};

/// How layers make an output vector.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Mixing<'m> {
    /// `sum factor_k * layer_k` over pairs of layer and factor.
    Sum(&'m [(usize, f32)]),
    /// All layers, one after the other.
    All,
    /// Each layer normalised by mean and variance of all values of the sentence's `tokens`, then summed with `factors`.
    Normalized { factors: &'m [f32], tokens: &'m [Range<usize>], epsilon: f64 },
}

/// Tokens of a batch: those of each sentence follow each other.
#[derive(Debug)]
pub(crate) struct Selection {
    /// Sentence, and the tokens whose forward and whose backward half make a vector.
    pub(crate) tokens: Vec<(usize, usize, usize)>,
    /// Sentences of the batch, and the number of their selected tokens.
    pub(crate) sentences: Vec<(usize, usize)>,
}

impl Mixing<'_> {
    /// The sums of layers that make a vector, one after the other; `None` if it is more than sums of a few.
    fn sums(self, n_layers: usize) -> Option<Vec<Vec<(usize, f32)>>> {
        let sums = match self {
            Self::Sum(factors) => vec![factors.to_vec()],
            Self::All => (0..n_layers).map(|layer| vec![(layer, 1.0)]).collect(),
            Self::Normalized { .. } => return None,
        };
        sums.iter().all(|terms| (1..=MOST_TERMS).contains(&terms.len())).then_some(sums)
    }
}

/// Vectors of the tokens of a [`Selection`], on the device.
#[derive(Debug)]
pub(crate) enum Selected<'a> {
    /// Computed, `[N, W]` float32.
    Values { values: Tensor, segments: Segments },
    /// What kernels compute them from.
    Mixes(MixedLayers<'a>),
}

/// Sums of layers, for selected tokens.
#[derive(Debug)]
pub(crate) struct MixedLayers<'a> {
    kernels: CellKernels,
    layers: &'a [Tensor],
    /// Layer and factor of each term.
    sums: Vec<Vec<(usize, f32)>>,
    /// `[2, N]`, as in [`Mixes`].
    tokens: Tensor,
    /// `[S]`
    ends: Tensor,
}

impl MixedLayers<'_> {
    /// `[N, W]` or `[S, W]`
    fn reduced(&self, reduction: Reduction) -> Result<Tensor, DeviceError> {
        let (rows, kind) = match reduction {
            Reduction::Tokens => (self.tokens.size()[1], Kind::Float),
            Reduction::Sum | Reduction::Max => (self.ends.size()[0], Kind::Double),
        };
        let width = self.layers[0].size().last().map_or(0, |&half| 2 * half);
        let out = Tensor::f_empty([rows, width * self.sums.len() as i64], (kind, self.tokens.device()))?;
        for (place, sum) in self.sums.iter().enumerate() {
            let terms: Vec<(&Tensor, f32)> = sum.iter().map(|&(layer, factor)| (&self.layers[layer], factor)).collect();
            let column = place * width as usize;
            let mixes = Mixes { terms: &terms, tokens: &self.tokens, ends: &self.ends, out: &out, column };
            self.kernels.mix(reduction, &mixes)?;
        }
        Ok(out)
    }
}

impl Activations {
    /// The vectors of the selected tokens.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has no room or libtorch fails.
    pub(crate) fn select(&self, selection: &Selection, mixing: Mixing<'_>) -> Result<Selected<'_>, DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        let lengths: Vec<usize> = selection.sentences.iter().map(|(_, length)| *length).collect();
        let tokens = selection.tokens.iter().copied();
        if let Some((kernels, sums)) = self.kernels().zip(mixing.sums(self.n_layers())) {
            let (tokens, ends) = tokens_and_ends(self, tokens, &lengths)?;
            return Ok(Selected::Mixes(MixedLayers { kernels, layers: self.layers(), sums, tokens, ends }));
        }
        let rows = Rows::new(self, tokens)?;
        let segments = Segments::new(&lengths, self.torch_device())?;
        let values = match mixing {
            Mixing::Sum(factors) => rows.of(&self.mixed(factors)?)?,
            Mixing::All => {
                let layers = (0..self.n_layers()).map(|layer| rows.of(&self.mixed(&[(layer, 1.0)])?));
                Tensor::f_cat(&layers.collect::<Result<Vec<_>, _>>()?, 1)?
            }
            Mixing::Normalized { factors, tokens, epsilon } => {
                let of_statistics =
                    selection.sentences.iter().map(|(sentence, _)| (*sentence, tokens[*sentence].clone()));
                let statistics = Statistics::new(self, of_statistics.collect(), epsilon)?;
                let terms = factors.iter().enumerate().map(|(layer, factor)| {
                    let layer = self.mixed(&[(layer, 1.0)])?;
                    let (mean, scale) = statistics.of(&layer)?;
                    let centred = rows.of(&layer)?.f_to_kind(Kind::Double)?.f_sub(&segments.spread(&mean)?)?;
                    scalar_ops::mul(&centred.f_mul(&segments.spread(&scale)?)?, f64::from(*factor))
                });
                tensors::sum(terms)?.f_to_kind(Kind::Float)?
            }
        };
        Ok(Selected::Values { values, segments })
    }
}

impl Selected<'_> {
    /// The vectors as they are, one after the other.
    ///
    /// # Errors
    /// [`DeviceError`] when the device or the host has no room or libtorch fails.
    pub(crate) fn vectors(self) -> Result<OnHost<f32>, DeviceError> {
        OnHost::new(match self {
            Self::Values { values, .. } => values,
            Self::Mixes(layers) => layers.reduced(Reduction::Tokens)?,
        })
    }

    /// The sum of each sentence, in float64; zeros for one without selected tokens.
    ///
    /// # Errors
    /// As [`Selected::vectors`].
    pub(crate) fn sums(&self) -> Result<OnHost<f64>, DeviceError> {
        OnHost::new(match self {
            Self::Values { values, segments } => segments.reduce(&values.f_to_kind(Kind::Double)?, "sum", 0.0)?,
            Self::Mixes(layers) => layers.reduced(Reduction::Sum)?,
        })
    }

    /// The maximum of each sentence, NaN where a value is NaN; negative infinity for one without selected tokens.
    ///
    /// # Errors
    /// As [`Selected::vectors`].
    pub(crate) fn maxima(&self) -> Result<OnHost<f64>, DeviceError> {
        OnHost::new(match self {
            Self::Values { values, segments } => {
                segments.reduce(&values.f_to_kind(Kind::Double)?, "max", f64::NEG_INFINITY)?
            }
            Self::Mixes(layers) => layers.reduced(Reduction::Max)?,
        })
    }
}

/// Packed rows of the forward halves of tokens, and after them those of the backward halves.
fn packed_rows(activations: &Activations, tokens: impl Iterator<Item = (usize, usize, usize)>) -> Vec<i64> {
    let packings = activations.packings();
    let (mut rows, mut backward) = (Vec::new(), Vec::new());
    for (sentence, of_forward, of_backward) in tokens {
        rows.push(packings.of(0).forward(sentence, of_forward) as i64);
        backward.push(packings.of(1).backward(sentence, of_backward) as i64);
    }
    rows.append(&mut backward);
    rows
}

/// Packed rows of tokens `[2, N]`, and where their sentences end `[S]`, in one upload, because each is a copy and a call.
fn tokens_and_ends(
    activations: &Activations,
    tokens: impl Iterator<Item = (usize, usize, usize)>,
    lengths: &[usize],
) -> Result<(Tensor, Tensor), DeviceError> {
    let mut numbers = packed_rows(activations, tokens);
    let (rows, sentences) = (numbers.len() as i64, lengths.len() as i64);
    numbers.extend(lengths.iter().scan(0, |end, &length| {
        *end += length as i64;
        Some(*end)
    }));
    let numbers = tensors::index(&numbers, activations.torch_device())?;
    let [tokens, ends] = tensors::split(&numbers, [rows, sentences], 0)?;
    Ok((tokens.f_view([2, rows / 2])?, ends))
}

/// Packed rows of tokens in each direction, on the device.
struct Rows([Tensor; 2]);

impl Rows {
    fn new(
        activations: &Activations,
        tokens: impl Iterator<Item = (usize, usize, usize)>,
    ) -> Result<Self, DeviceError> {
        let rows = packed_rows(activations, tokens);
        let count = rows.len() as i64 / 2;
        let rows = tensors::index(&rows, activations.torch_device())?;
        Ok(Self(tensors::split(&rows, [count, count], 0)?))
    }

    /// `[2, R, P] -> [N, 2P]`
    fn of(&self, layer: &Tensor) -> Result<Tensor, DeviceError> {
        let [forward, backward] = tensors::unbound(layer)?;
        let [of_forward, of_backward] = &self.0;
        Ok(Tensor::f_cat(&[forward.f_index_select(0, of_forward)?, backward.f_index_select(0, of_backward)?], 1)?)
    }
}

/// Consecutive rows of a matrix that belong together.
#[derive(Debug)]
pub(crate) struct Segments {
    /// `[S]`
    lengths: Tensor,
    /// `[N]`: the segment of each row.
    of_rows: Tensor,
}

impl Segments {
    fn new(lengths: &[usize], device: Device) -> Result<Self, DeviceError> {
        let of_rows = lengths.iter().enumerate().flat_map(|(segment, &length)| std::iter::repeat_n(segment, length));
        let numbers: Vec<i64> = lengths.iter().copied().chain(of_rows).map(|number| number as i64).collect();
        let (segments, all) = (lengths.len() as i64, numbers.len() as i64);
        let [lengths, of_rows] = tensors::split(&tensors::index(&numbers, device)?, [segments, all - segments], 0)?;
        Ok(Self { lengths, of_rows })
    }

    /// `[N, W] -> [S, W]`
    fn reduce(&self, rows: &Tensor, reduction: &str, initial: f64) -> Result<Tensor, DeviceError> {
        scalar_ops::segment_reduce(&rows.f_contiguous()?, reduction, &self.lengths, initial)
    }

    /// `[S, W] -> [N, W]`
    fn spread(&self, segments: &Tensor) -> Result<Tensor, DeviceError> {
        Ok(segments.f_index_select(0, &self.of_rows)?)
    }
}

/// Of which values the statistics of a sentence are taken.
struct Statistics {
    rows: Rows,
    segments: Segments,
    /// `[S, 1]` float64: tokens, at least 1, and 1 where there is none.
    counts: Tensor,
    none: Tensor,
    epsilon: f64,
}

impl Statistics {
    fn new(
        activations: &Activations,
        sentences: Vec<(usize, Range<usize>)>,
        epsilon: f64,
    ) -> Result<Self, DeviceError> {
        let device = activations.torch_device();
        let lengths: Vec<usize> = sentences.iter().map(|(_, tokens)| tokens.len()).collect();
        let tokens = sentences.into_iter().flat_map(|(sentence, tokens)| tokens.map(move |i| (sentence, i, i)));
        let column = |number: &dyn Fn(usize) -> f64| -> Result<Tensor, DeviceError> {
            let numbers: Vec<f64> = lengths.iter().map(|&length| number(length)).collect();
            Ok(tensors::uploaded(&Tensor::f_from_slice(&numbers)?, device)?.f_unsqueeze(1)?)
        };
        let counts = column(&|length| length.max(1) as f64)?;
        let none = column(&|length| if length == 0 { 1.0 } else { 0.0 })?;
        let (rows, segments) = (Rows::new(activations, tokens)?, Segments::new(&lengths, device)?);
        Ok(Self { rows, segments, counts, none, epsilon })
    }

    /// Mean and inverse standard deviation of each sentence, `[S, 1]` float64: 0 and 1 for one without tokens.
    fn of(&self, layer: &Tensor) -> Result<(Tensor, Tensor), DeviceError> {
        let values = self.rows.of(layer)?.f_to_kind(Kind::Double)?; // [M, 2P]
        let width = values.size().last().copied().unwrap_or(1) as f64;
        let mean_of = |values: &Tensor| -> Result<Tensor, DeviceError> {
            let of_tokens = values.f_sum_dim_intlist([1_i64].as_slice(), true, Kind::Double)?; // [M, 1]
            let sums = self.segments.reduce(&of_tokens, "sum", 0.0)?;
            scalar_ops::mul(&sums.f_div(&self.counts)?, 1.0 / width)
        };
        let mean = mean_of(&values)?;
        let centred = values.f_sub(&self.segments.spread(&mean)?)?;
        let variance = mean_of(&centred.f_mul(&centred)?)?;
        let scale = scalar_ops::add(&variance, self.epsilon)?.f_rsqrt()?;
        // Without tokens the variance is 0.
        let kept = scalar_ops::add(&scalar_ops::mul(&self.none, -1.0)?, 1.0)?;
        Ok((mean, scale.f_mul(&kept)?.f_add(&self.none)?))
    }
}
