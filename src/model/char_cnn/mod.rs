//! Words to token vectors: character CNN, highway layers, projection (bilm-tf `bilm/model.py`).
//!
//! A token vector does not depend on the context, so it is computed once per distinct word ([`crate::word_cache`]).
//! Each convolution is one product over the windows of its width. Windows that lie wholly in a word's padding all have
//! the same value, so all of them but one are left out: the maximum over positions is the same number.
//!
//! | token layer | where |
//! |---|---|
//! | `fused.rs` | inference on a CPU in float32 and with products of 8-bit integers: our own products and passes |
//! | `batched.rs` | everything else, in libtorch's operations: gradients flow through this one only |

mod batched;
mod fused;

use tch::{Device, Kind, Tensor};

use self::{batched::BatchedCnn, fused::FusedCnn};
use super::{DeviceError, Precision, parameters::NamedTensors, tensors::Change};
use crate::{
    chars,
    options::{Filter, ModelOptions},
};

/// The token layer of a model.
#[derive(Debug)]
pub(crate) enum CharCnn {
    Batched(BatchedCnn),
    Fused(FusedCnn),
}

impl CharCnn {
    /// Derives it from `char_embed` and the tensors of `CNN*`, in libtorch's operations.
    pub(crate) fn batched(
        options: &ModelOptions,
        source: &dyn NamedTensors,
        kind: Kind,
        device: Device,
    ) -> Result<Self, DeviceError> {
        Ok(Self::Batched(BatchedCnn::new(options, source, kind, device)?))
    }

    /// Derives it in our own products, in float32 or, above the convolutions, in 8-bit integers.
    pub(crate) fn fused(
        options: &ModelOptions,
        source: &dyn NamedTensors,
        precision: Precision,
    ) -> Result<Self, DeviceError> {
        Ok(Self::Fused(FusedCnn::new(options, source, precision)?))
    }

    /// The same with every tensor changed, always in the same order.
    pub(crate) fn map<E>(&self, change: &mut Change<'_, E>) -> Result<Self, E> {
        Ok(match self {
            Self::Batched(cnn) => Self::Batched(cnn.map(change)?),
            Self::Fused(cnn) => Self::Fused(cnn.map(change)?),
        })
    }

    /// Token vectors `[U, P]` of at least one word, in the order of the words.
    pub(crate) fn forward(&self, words: &WordIds) -> Result<Tensor, DeviceError> {
        match self {
            Self::Batched(cnn) => cnn.forward(words),
            Self::Fused(cnn) => cnn.forward(words),
        }
    }
}

/// Words as character ids: `[U, M]`, and how many of the `M` places each word uses.
#[derive(Debug, Default)]
pub(crate) struct WordIds {
    ids: Vec<i32>,
    used: Vec<usize>,
}

impl WordIds {
    pub(crate) fn new<'w>(words: impl IntoIterator<Item = &'w str>, max_characters: usize) -> Self {
        let mut all = Self::default();
        for word in words {
            let start = all.ids.len();
            all.ids.resize(start + max_characters, 0);
            all.used.push(chars::char_ids(word, max_characters, &mut all.ids[start..]));
        }
        all
    }

    fn len(&self) -> usize {
        self.used.len()
    }
}

/// The vectors of the file's characters after one of zeros, which is that of the padding: `[262, C]`
fn embedding(load: impl Fn(&str) -> Result<Tensor, DeviceError>) -> Result<Tensor, DeviceError> {
    let characters = load("char_embed")?;
    let padding = characters.f_narrow(0, 0, 1)?.f_zeros_like()?;
    Ok(Tensor::f_cat(&[padding, characters], 0)?)
}

/// Weights `[F, 2F]` and bias `[2F]` of a highway layer: transform, then carry.
fn highway(load: impl Fn(&str) -> Result<Tensor, DeviceError>, layer: usize) -> Result<(Tensor, Tensor), DeviceError> {
    let both = |what: &str, dim: i64| -> Result<Tensor, DeviceError> {
        let transform = load(&format!("CNN_high_{layer}/{what}_transform"))?;
        let carry = load(&format!("CNN_high_{layer}/{what}_carry"))?;
        Ok(Tensor::f_cat(&[transform, carry], dim)?)
    };
    Ok((both("W", 1)?, both("b", 0)?))
}

/// Number of windows of `width` that words of at most `used` of `max` characters need: all that touch the word, and one that lies
/// wholly in the padding where there is such a window.
fn positions(width: usize, used: usize, max: usize) -> usize {
    (max - width + 1).min(used + 1)
}

/// Floating point operations of the products for one word that uses `used` characters.
pub(crate) fn flop(options: &ModelOptions, used: usize) -> f64 {
    let cnn = &options.char_cnn;
    let product = |k: usize, n: usize, times: usize| 2.0 * (times * k * n) as f64;
    let of = |filter: &Filter| {
        let windows = positions(filter.width, used, cnn.max_characters_per_token);
        product(filter.width * cnn.embedding_dim, filter.n, windows)
    };
    let filters = options.n_filters();
    let projection = if options.has_char_projection() { product(filters, options.lstm.projection_dim, 1) } else { 0.0 };
    cnn.filters.iter().map(of).sum::<f64>() + product(filters, 2 * filters, cnn.n_highway) + projection
}
