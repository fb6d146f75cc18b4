//! The token layer with our own products and passes: on CPU, in float32 or with products of 8-bit integers above the convolutions; no
//! gradients. A word is read by itself, with the windows that it needs.

use tch::{Kind, Tensor};

use super::{WordIds, positions};
use crate::{
    model::{
        DeviceError, Precision,
        codes::Buffer,
        kernels,
        panels::{self, Rows},
        parameters::NamedTensors,
        products::{self, Weights},
        tensors::{self, Change, FLOAT_ON_HOST},
    },
    options::{Activation, Filter, ModelOptions},
};

/// Most words that share the products above the convolutions.
const GROUP_WORDS: usize = 256;
/// Most numbers of the characters of a group, which bounds memory: 64 MiB.
const GROUP_NUMBERS: usize = 1 << 24;

#[derive(Debug)]
pub(crate) struct FusedCnn {
    embedding: Tensor, // [262, C], row 0 is zeros
    convolutions: Vec<Convolution>,
    activation: Activation,
    highways: Vec<Dense>,      // [F, 2F]: transform, then carry
    projection: Option<Dense>, // [F, P]
    embedding_dim: usize,
    max_characters: usize,
    features: usize, // F
}

#[derive(Debug)]
struct Convolution {
    width: usize,
    weight: Tensor, // panels of [w * C, n]
    bias: Tensor,   // [n]
}

/// A product of the layers above the convolutions.
#[derive(Debug)]
struct Dense {
    weights: Weights, // [in, out]
    bias: Tensor,     // [out]
}

impl Dense {
    fn new(weights: &Tensor, bias: &Tensor, precision: Precision) -> Result<Self, DeviceError> {
        Ok(Self { weights: Weights::new(weights, precision)?, bias: bias.f_contiguous()? })
    }

    fn map<E>(&self, change: &mut Change<'_, E>) -> Result<Self, E> {
        Ok(Self { weights: self.weights.map(change)?, bias: change(&self.bias)? })
    }

    /// `x W + b`: `[w, in] -> [w, out]`
    fn forward(&self, x: &Tensor, buffer: &mut Buffer) -> Result<Tensor, DeviceError> {
        let (rows, k) = x.size2()?;
        let mut out = Tensor::f_empty([rows, self.bias.size()[0]], FLOAT_ON_HOST)?;
        // SAFETY: `out` is new, `x` belongs to the caller, and nothing writes to the weights while a model computes.
        let (x, bias, out_values) =
            unsafe { (tensors::values(x), tensors::values(&self.bias), tensors::values_mut(&mut out)) };
        let x = self.weights.left(x, k as usize, buffer);
        products::multiply(x, self.weights.panels(), Some(bias), out_values);
        Ok(out)
    }
}

impl FusedCnn {
    pub(super) fn new(
        options: &ModelOptions,
        source: &dyn NamedTensors,
        precision: Precision,
    ) -> Result<Self, DeviceError> {
        let load = |name: &str| Ok::<_, DeviceError>(source.tensor(name)?.f_to_kind(Kind::Float)?);
        let cnn = &options.char_cnn;
        let convolution = |(i, filter): (usize, &Filter)| {
            let rows = (filter.width * cnn.embedding_dim) as i64;
            let weight = load(&format!("CNN/W_cnn_{i}"))?.f_reshape([rows, filter.n as i64])?; // [1, w, C, n]
            let bias = load(&format!("CNN/b_cnn_{i}"))?.f_contiguous()?;
            Ok(Convolution { width: filter.width, weight: panels::cut(&weight)?, bias })
        };
        let highway = |layer: usize| {
            let (weight, bias) = super::highway(load, layer)?;
            Dense::new(&weight, &bias, precision)
        };
        let projection = match options.has_char_projection() {
            true => Some(Dense::new(&load("CNN_proj/W_proj")?, &load("CNN_proj/b_proj")?, precision)?),
            false => None,
        };
        Ok(Self {
            embedding: super::embedding(load)?,
            convolutions: cnn.filters.iter().enumerate().map(convolution).collect::<Result<_, DeviceError>>()?,
            activation: cnn.activation,
            highways: (0..cnn.n_highway).map(highway).collect::<Result<_, _>>()?,
            projection,
            embedding_dim: cnn.embedding_dim,
            max_characters: cnn.max_characters_per_token,
            features: options.n_filters(),
        })
    }

    /// As [`CharCnn::map`](super::CharCnn::map).
    pub(super) fn map<E>(&self, change: &mut Change<'_, E>) -> Result<Self, E> {
        let embedding = change(&self.embedding)?;
        let mut convolutions = Vec::with_capacity(self.convolutions.len());
        for Convolution { width, weight, bias } in &self.convolutions {
            convolutions.push(Convolution { width: *width, weight: change(weight)?, bias: change(bias)? });
        }
        let highways = self.highways.iter().map(|highway| highway.map(change)).collect::<Result<_, _>>()?;
        let projection = self.projection.as_ref().map(|projection| projection.map(change)).transpose()?;
        Ok(Self { embedding, convolutions, highways, projection, ..*self })
    }

    /// As [`CharCnn::forward`](super::CharCnn::forward).
    pub(super) fn forward(&self, words: &WordIds) -> Result<Tensor, DeviceError> {
        let most = (GROUP_NUMBERS / (self.max_characters * self.embedding_dim)).clamp(1, GROUP_WORDS);
        let groups = words.ids.chunks(most * self.max_characters).zip(words.used.chunks(most));
        let parts = groups.map(|(ids, used)| self.group(ids, used)).collect::<Result<Vec<_>, _>>()?;
        Ok(Tensor::f_cat(&parts, 0)?)
    }

    /// Token vectors of some words: `[G, P]`.
    fn group(&self, ids: &[i32], used: &[usize]) -> Result<Tensor, DeviceError> {
        let mut x = Tensor::f_empty([used.len() as i64, self.features as i64], FLOAT_ON_HOST)?;
        // SAFETY: a new tensor.
        self.convolve(ids, used, unsafe { tensors::values_mut(&mut x) });
        let mut buffer = Buffer::default();
        for highway in &self.highways {
            let product = highway.forward(&x, &mut buffer)?; // [G, 2F]
            // SAFETY: `product` and `x` are new tensors.
            let (product, x) = unsafe { (tensors::values(&product), tensors::values_mut(&mut x)) };
            kernels::highway(product, x, self.features);
        }
        match &self.projection {
            Some(projection) => projection.forward(&x, &mut buffer),
            None => Ok(x),
        }
    }

    /// All filter widths, one after the other, and the activation: `[G, F]`
    fn convolve(&self, ids: &[i32], used: &[usize], out: &mut [f32]) {
        let (c, m) = (self.embedding_dim, self.max_characters);
        // SAFETY: nothing writes to the weights while a model computes.
        let embedding: &[f32] = unsafe { tensors::values(&self.embedding) };
        let mut characters = vec![0.0; ids.len() * c]; // [G, M * C]
        for (character, &id) in characters.chunks_exact_mut(c).zip(ids) {
            character.copy_from_slice(&embedding[id as usize * c..][..c]);
        }
        let mut first = 0;
        for Convolution { width, weight, bias } in &self.convolutions {
            // A window is `width * C` neighbouring numbers, so that windows are rows which overlap.
            let windows = |(word, &used)| Rows::windows(word, c, width * c, positions(*width, used, m));
            let words: Vec<Rows<'_>> = characters.chunks_exact(m * c).zip(used).map(windows).collect();
            // SAFETY: as above.
            let (weight, bias) = unsafe { (tensors::values(weight), tensors::values::<f32>(bias)) };
            panels::highest(&words, weight, bias, &mut out[first..], self.features);
            first += bias.len();
        }
        match self.activation {
            Activation::Relu => kernels::relu_in_place(out),
            Activation::Tanh => kernels::tanh_in_place(out),
        }
    }
}
