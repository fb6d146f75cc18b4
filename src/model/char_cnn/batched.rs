//! The token layer in libtorch's operations, for any device and number format. Words are grouped by length, and the words of a group have
//! the windows that the longest of them needs.

use tch::{Device, Kind, Tensor};

use super::{WordIds, positions};
use crate::{
    model::{
        DeviceError,
        packing::MIN_WIDTH,
        parameters::NamedTensors,
        scalar_ops,
        tensors::{self, Change},
    },
    options::{Activation, ModelOptions},
};

/// Maximum number of values on the left side of one product, which bounds memory; on a GPU large products are the fast ones.
const MAX_PRODUCT_VALUES: usize = 1 << 19;
const MAX_PRODUCT_VALUES_DEVICE: usize = 1 << 23;

#[derive(Debug)]
pub(crate) struct BatchedCnn {
    embedding: Tensor, // [262, C], row 0 is zeros; in float32 or float64
    kind: Kind,
    convolutions: Vec<Convolution>,
    activation: Activation,
    highways: Vec<Linear>,      // [F, 2F]: transform, then carry
    projection: Option<Linear>, // [F, P]
    embedding_dim: usize,
    max_characters: usize,
    device: Device,
}

#[derive(Debug)]
struct Convolution {
    width: usize,
    linear: Linear, // [w * C, n]
}

#[derive(Debug)]
struct Linear {
    weight: Tensor, // [in, out], at least `tensors::MIN_COLUMNS` wide
    bias: Tensor,   // [out], likewise
    out: i64,
}

impl Linear {
    fn new(weight: Tensor, bias: Tensor) -> Result<Self, DeviceError> {
        let out = bias.size()[0];
        Ok(Self { weight: tensors::with_enough_columns(weight)?, bias: tensors::with_enough_columns(bias)?, out })
    }

    /// `x W + b`
    fn forward(&self, x: &Tensor) -> Result<Tensor, DeviceError> {
        tensors::first_columns(self.bias.f_addmm(x, &self.weight)?, self.out)
    }

    fn map<E>(&self, change: &mut Change<'_, E>) -> Result<Self, E> {
        Ok(Self { weight: change(&self.weight)?, bias: change(&self.bias)?, out: self.out })
    }
}

/// The number format in which many terms of this one are added.
fn wide(kind: Kind) -> Kind {
    if kind == Kind::Double { kind } else { Kind::Float }
}

impl BatchedCnn {
    pub(super) fn new(
        options: &ModelOptions,
        source: &dyn NamedTensors,
        kind: Kind,
        device: Device,
    ) -> Result<Self, DeviceError> {
        let load = |name: &str| -> Result<Tensor, DeviceError> {
            Ok(source.tensor(name)?.f_to_device(device)?.f_to_kind(kind)?)
        };
        let cnn = &options.char_cnn;
        let mut convolutions = Vec::with_capacity(cnn.filters.len());
        for (i, filter) in cnn.filters.iter().enumerate() {
            let rows = (filter.width * cnn.embedding_dim) as i64;
            let weight = load(&format!("CNN/W_cnn_{i}"))?.f_reshape([rows, filter.n as i64])?; // [1, w, C, n]
            let linear = Linear::new(weight, load(&format!("CNN/b_cnn_{i}"))?)?;
            convolutions.push(Convolution { width: filter.width, linear });
        }
        let mut highways = Vec::with_capacity(cnn.n_highway);
        for layer in 0..cnn.n_highway {
            let (weight, bias) = super::highway(load, layer)?;
            highways.push(Linear::new(weight, bias)?);
        }
        let projection = match options.has_char_projection() {
            true => Some(Linear::new(load("CNN_proj/W_proj")?, load("CNN_proj/b_proj")?)?),
            false => None,
        };
        Ok(Self {
            embedding: super::embedding(|name| Ok(source.tensor(name)?.f_to_device(device)?.f_to_kind(wide(kind))?))?,
            kind,
            convolutions,
            activation: cnn.activation,
            highways,
            projection,
            embedding_dim: cnn.embedding_dim,
            max_characters: cnn.max_characters_per_token,
            device,
        })
    }

    /// As [`CharCnn::map`](super::CharCnn::map).
    pub(super) fn map<E>(&self, change: &mut Change<'_, E>) -> Result<Self, E> {
        let embedding = change(&self.embedding)?;
        let mut convolutions = Vec::with_capacity(self.convolutions.len());
        for convolution in &self.convolutions {
            convolutions.push(Convolution { width: convolution.width, linear: convolution.linear.map(change)? });
        }
        let highways = self.highways.iter().map(|highway| highway.map(change)).collect::<Result<_, _>>()?;
        let projection = self.projection.as_ref().map(|projection| projection.map(change)).transpose()?;
        Ok(Self { embedding, convolutions, highways, projection, ..*self })
    }

    /// As [`CharCnn::forward`](super::CharCnn::forward).
    pub(super) fn forward(&self, words: &WordIds) -> Result<Tensor, DeviceError> {
        let mut order: Vec<usize> = (0..words.len()).collect();
        order.sort_by_key(|&w| words.used[w]);
        let mut parts = Vec::new();
        let mut rest = order.as_slice();
        while !rest.is_empty() {
            let (group, after) = rest.split_at(self.group_len(rest, words));
            parts.push(self.group(group, words)?);
            rest = after;
        }
        let mut place = vec![0; order.len()];
        for (i, &word) in order.iter().enumerate() {
            place[word] = i as i64;
        }
        Ok(Tensor::f_cat(&parts, 0)?.f_index_select(0, &tensors::index(&place, self.device)?)?)
    }

    /// Number of words of `rest` (shortest first) that share the next products.
    fn group_len(&self, rest: &[usize], words: &WordIds) -> usize {
        let widest = self.convolutions.iter().map(|c| c.width).max().unwrap_or(1) * self.embedding_dim;
        let most = if self.device == Device::Cpu { MAX_PRODUCT_VALUES } else { MAX_PRODUCT_VALUES_DEVICE };
        let fits = |n: &usize| n * positions(1, words.used[rest[n - 1]], self.max_characters) * widest <= most;
        (1..=rest.len()).take_while(|n| *n <= MIN_WIDTH || fits(n)).last().unwrap_or(rest.len())
    }

    /// Token vectors of words of similar length: `[G, P]`.
    fn group(&self, group: &[usize], words: &WordIds) -> Result<Tensor, DeviceError> {
        let m = self.max_characters;
        let rows = group.len().max(MIN_WIDTH);
        let mut ids = vec![0_i32; rows * m];
        for (row, &word) in group.iter().enumerate() {
            ids[row * m..(row + 1) * m].copy_from_slice(&words.ids[word * m..(word + 1) * m]);
        }
        let longest = group.iter().map(|&w| words.used[w]).max().unwrap_or(0);
        let ids = tensors::uploaded(&Tensor::f_from_slice(&ids)?, self.device)?;
        // [G * M, C] -> [G, M * C]
        let characters = self.characters(&ids)?.f_view([rows as i64, (m * self.embedding_dim) as i64])?;
        let mut features = Vec::with_capacity(self.convolutions.len());
        for convolution in &self.convolutions {
            features.push(self.convolve(convolution, &characters, rows, longest)?);
        }
        let x = Tensor::f_cat(&features, 1)?; // [G, F]
        let mut x = match self.activation {
            Activation::Relu => x.f_relu()?,
            Activation::Tanh => x.f_tanh()?,
        };
        for highway in &self.highways {
            x = Self::highway(highway, &x)?;
        }
        if let Some(projection) = &self.projection {
            x = projection.forward(&x)?; // [G, P]
        }
        Ok(x.f_narrow(0, 0, group.len() as i64)?)
    }

    /// Embeddings of characters `[n] -> [n, C]`. The gradient of a character has a term for each place where it is, many thousands, so
    /// they are added in float32 or float64.
    fn characters(&self, ids: &Tensor) -> Result<Tensor, DeviceError> {
        let embeddings = match self.device {
            Device::Cpu => self.embedding.f_index_select(0, ids)?,
            // The backward pass of this one sorts the terms by character; in that of the other one, thousands of threads wait for each row.
            _ => Tensor::f_embedding(&self.embedding, ids, -1, false, false)?,
        };
        Ok(embeddings.f_to_kind(self.kind)?)
    }

    /// One filter width: product over windows, maximum over positions. `[G, M * C] -> [G, n]`
    fn convolve(
        &self,
        convolution: &Convolution,
        characters: &Tensor,
        rows: usize,
        longest: usize,
    ) -> Result<Tensor, DeviceError> {
        let c = self.embedding_dim;
        let positions = positions(convolution.width, longest, self.max_characters);
        let window = (convolution.width * c) as i64;
        // A window is `width * C` neighbouring numbers, so all windows are a view with overlapping rows.
        let windows = characters
            .f_narrow(1, 0, ((positions + convolution.width - 1) * c) as i64)?
            .f_unfold(1, window, c as i64)? // [G, positions, w * C]
            .f_reshape([(rows * positions) as i64, window])?;
        let products = windows.f_matmul(&convolution.linear.weight)?; // [G * positions, n]
        let highest = products.f_view([rows as i64, positions as i64, -1])?.f_amax([1_i64].as_slice(), false)?;
        // Rounding is monotone: the largest sum is the sum of the largest product.
        tensors::first_columns(highest.f_add(&convolution.linear.bias)?, convolution.linear.out)
    }

    /// `g * relu(x Wt + bt) + (1 - g) * x` with `g = sigmoid(x Wc + bc)`. `[G, F]`
    fn highway(highway: &Linear, x: &Tensor) -> Result<Tensor, DeviceError> {
        let product = highway.forward(x)?; // [G, 2F]
        let f = x.size()[1];
        let [transform, carry] = tensors::split(&product, [f, f], 1)?;
        let gate = carry.f_sigmoid()?;
        let kept = scalar_ops::add(&gate.f_neg()?, 1.0)?.f_mul(x)?;
        Ok(gate.f_mul(&transform.f_relu()?)?.f_add(&kept)?)
    }
}
