//! Words to token vectors: character CNN, highway layers, projection (bilm-tf `bilm/model.py`).
//!
//! A token vector does not depend on the context, so it is computed once per distinct word ([`crate::word_cache`]).
//! Each convolution is one product over the windows of its width. Windows that lie wholly in a word's padding all have
//! the same value, so words are grouped by length and all such windows but one are left out: the maximum over positions
//! is the same number.

use tch::{Device, Kind, Tensor};

use super::{
    DeviceError,
    int8::{self, Codes},
    kernels,
    packing::MIN_WIDTH,
    parameters::NamedTensors,
    scalar_ops, tensors,
    tensors::Change,
};
use crate::{
    chars,
    options::{Activation, ModelOptions},
};

/// Maximum number of values on the left side of one product, which bounds memory; on a GPU large products are the fast ones.
const MAX_PRODUCT_VALUES: usize = 1 << 19;
const MAX_PRODUCT_VALUES_DEVICE: usize = 1 << 23;

#[derive(Debug)]
pub(crate) struct CharCnn {
    embedding: Tensor, // [262, C], row 0 is zeros
    convolutions: Vec<Convolution>,
    activation: Activation,
    highways: Vec<Dense>,      // [F, 2F]: transform, then carry
    projection: Option<Dense>, // [F, P]
    embedding_dim: usize,
    max_characters: usize,
    /// Use our own passes over memory instead of libtorch's operations; no gradients.
    fused: bool,
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

    fn shape(&self) -> (i64, i64) {
        (self.weight.size()[0], self.out)
    }
}

/// A product of the layers above the convolutions.
#[derive(Debug)]
enum Dense {
    Float(Linear),
    Int8 { weight: Codes, bias: Tensor },
}

impl Dense {
    /// In 8-bit integers if `codes` gives their largest.
    fn new(weight: Tensor, bias: Tensor, codes: Option<i64>) -> Result<Self, DeviceError> {
        Ok(match codes {
            Some(largest) => Self::Int8 { weight: Codes::new(&weight, largest)?, bias },
            None => Self::Float(Linear::new(weight, bias)?),
        })
    }

    /// `x W + b`
    fn forward(&self, x: &Tensor) -> Result<Tensor, DeviceError> {
        match self {
            Self::Float(linear) => linear.forward(x),
            Self::Int8 { weight, bias } => {
                let (sums, scales) = int8::product(x, weight)?;
                let mut out = Tensor::f_empty(sums.size(), (Kind::Float, Device::Cpu))?;
                // SAFETY: `out` and `sums` are new, and the weights are not changed.
                unsafe {
                    let (columns, bias) = (tensors::values(&weight.scales), tensors::values(bias));
                    let out = tensors::values_mut(&mut out);
                    kernels::rescale(tensors::values(&sums), &scales, columns, bias, out, f32::INFINITY);
                }
                Ok(out)
            }
        }
    }

    fn map<E>(&self, change: &mut Change<'_, E>) -> Result<Self, E> {
        Ok(match self {
            Self::Float(linear) => Self::Float(linear.map(change)?),
            Self::Int8 { weight, bias } => Self::Int8 { weight: weight.map(change)?, bias: change(bias)? },
        })
    }

    /// Inputs and outputs.
    fn shape(&self) -> (i64, i64) {
        match self {
            Self::Float(linear) => linear.shape(),
            Self::Int8 { weight, bias } => (weight.codes.size()[0], bias.size()[0]),
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

impl CharCnn {
    /// Derives the token layer from `char_embed` and the tensors of `CNN*`. `codes` is the largest code of its weights in 8 bits.
    pub(crate) fn new(
        options: &ModelOptions,
        source: &dyn NamedTensors,
        kind: Kind,
        device: Device,
        fused: bool,
        codes: Option<i64>,
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
        for k in 0..cnn.n_highway {
            let both = |what: &str, dim: i64| -> Result<Tensor, DeviceError> {
                let transform = load(&format!("CNN_high_{k}/{what}_transform"))?;
                let carry = load(&format!("CNN_high_{k}/{what}_carry"))?;
                Ok(Tensor::f_cat(&[transform, carry], dim)?)
            };
            highways.push(Dense::new(both("W", 1)?, both("b", 0)?, codes)?);
        }
        let projection = match options.has_char_projection() {
            true => Some(Dense::new(load("CNN_proj/W_proj")?, load("CNN_proj/b_proj")?, codes)?),
            false => None,
        };
        let zero_row = Tensor::f_zeros([1, cnn.embedding_dim as i64], (kind, device))?;
        Ok(Self {
            embedding: Tensor::f_cat(&[zero_row, load("char_embed")?], 0)?,
            convolutions,
            activation: cnn.activation,
            highways,
            projection,
            embedding_dim: cnn.embedding_dim,
            max_characters: cnn.max_characters_per_token,
            fused,
            device,
        })
    }

    /// The same with every tensor changed, always in the same order.
    pub(crate) fn map<E>(&self, change: &mut Change<'_, E>) -> Result<Self, E> {
        let embedding = change(&self.embedding)?;
        let mut convolutions = Vec::with_capacity(self.convolutions.len());
        for convolution in &self.convolutions {
            convolutions.push(Convolution { width: convolution.width, linear: convolution.linear.map(change)? });
        }
        let highways = self.highways.iter().map(|highway| highway.map(change)).collect::<Result<_, _>>()?;
        let projection = self.projection.as_ref().map(|projection| projection.map(change)).transpose()?;
        Ok(Self { embedding, convolutions, highways, projection, ..*self })
    }

    /// Token vectors `[U, P]` of at least one word, in the order of the words.
    pub(crate) fn forward(&self, words: &WordIds) -> Result<Tensor, DeviceError> {
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
        let fits = |n: &usize| n * self.positions(1, words.used[rest[n - 1]]) * widest <= most;
        (1..=rest.len()).take_while(|n| *n <= MIN_WIDTH || fits(n)).last().unwrap_or(rest.len())
    }

    /// Number of windows of `width` that words of at most `used` characters need: all that touch the word, and one that
    /// lies wholly in the padding where there is such a window.
    fn positions(&self, width: usize, used: usize) -> usize {
        (self.max_characters - width + 1).min(used + 1)
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
        let characters =
            self.embedding.f_index_select(0, &ids)?.f_view([rows as i64, (m * self.embedding_dim) as i64])?;
        let mut features = Vec::with_capacity(self.convolutions.len());
        for convolution in &self.convolutions {
            features.push(self.convolve(convolution, &characters, rows, longest)?);
        }
        let mut x = Tensor::f_cat(&features, 1)?; // [G, F]
        self.activate(&mut x)?;
        for highway in &self.highways {
            self.highway(highway, &mut x)?;
        }
        if let Some(projection) = &self.projection {
            x = projection.forward(&x)?; // [G, P]
        }
        Ok(x.f_narrow(0, 0, group.len() as i64)?)
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
        let positions = self.positions(convolution.width, longest);
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

    fn activate(&self, x: &mut Tensor) -> Result<(), DeviceError> {
        match (self.activation, self.fused) {
            (Activation::Relu, _) => *x = x.f_relu()?,
            // SAFETY: `x` is the result of a concatenation that nothing else refers to.
            (Activation::Tanh, true) => kernels::tanh_in_place(unsafe { tensors::values_mut(x) }),
            (Activation::Tanh, false) => *x = x.f_tanh()?,
        }
        Ok(())
    }

    /// `g * relu(x Wt + bt) + (1 - g) * x` with `g = sigmoid(x Wc + bc)`, in place. `[G, F]`
    fn highway(&self, highway: &Dense, x: &mut Tensor) -> Result<(), DeviceError> {
        let product = highway.forward(x)?; // [G, 2F]
        let f = x.size()[1];
        if self.fused {
            // SAFETY: `product` and `x` are results of two operations that nothing else refers to.
            let (product, x) = unsafe { (tensors::values(&product), tensors::values_mut(x)) };
            kernels::highway(product, x, f as usize);
            return Ok(());
        }
        let [transform, carry] = tensors::split(&product, [f, f], 1)?;
        let gate = carry.f_sigmoid()?;
        let kept = scalar_ops::add(&gate.f_neg()?, 1.0)?.f_mul(x)?;
        *x = gate.f_mul(&transform.f_relu()?)?.f_add(&kept)?;
        Ok(())
    }

    /// Floating point operations of the products for one word that uses `used` characters.
    pub(crate) fn flop(&self, used: usize) -> f64 {
        let product = |(k, n): (i64, i64), times: usize| 2.0 * (times as f64) * k as f64 * n as f64;
        let convolutions: f64 =
            self.convolutions.iter().map(|c| product(c.linear.shape(), self.positions(c.width, used))).sum();
        let rest: f64 = self.highways.iter().chain(&self.projection).map(|dense| product(dense.shape(), 1)).sum();
        convolutions + rest
    }
}
