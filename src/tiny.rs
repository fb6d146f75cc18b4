//! The built-in model `tiny`: options and pseudo-random weights, the same bits on every machine.

use crate::{
    options::{Activation, CharCnnOptions, Filter, LstmOptions, ModelOptions, TensorSpec, TextOptions},
    weights::{Tensor, Weights},
};

/// Description of the built-in model, for messages.
pub const TINY_DESCRIPTION: &str = "\
tiny: a small ELMo biLM that is built into the program. Its weights are pseudo-random numbers and were \
never trained, so its vectors have no meaning. It is for tests and demonstrations; use a trained model \
for real work.";

/// Fingerprint of the built-in model, by which copies on disk are recognised.
pub(crate) const FINGERPRINT: &str = "614868f547313f266ecbf93f49eae4784dc8424deea34d11f05a49af46808f3e";

/// Options of the built-in model: the architecture of the published models (two highway layers, two LSTM layers in each
/// direction with projection, residual and clips) with 0.9 MB of weights.
pub(crate) fn options() -> ModelOptions {
    let filters = [(1, 4), (2, 8), (3, 16), (4, 32), (5, 64)];
    ModelOptions {
        text: TextOptions::default(),
        lstm: LstmOptions {
            dim: 128,
            projection_dim: 32,
            n_layers: 2,
            cell_clip: Some(3.0),
            proj_clip: Some(3.0),
            use_skip_connections: true,
        },
        char_cnn: CharCnnOptions {
            activation: Activation::Relu,
            filters: filters.into_iter().map(|(width, n)| Filter { width, n }).collect(),
            n_highway: 2,
            embedding_dim: 16,
            n_characters: Some(262),
            max_characters_per_token: 50,
        },
    }
}

/// Uniform numbers. Each tensor has a generator of its own, seeded with its index in the plan.
pub(crate) fn weights(options: &ModelOptions) -> Weights {
    let mut weights = Weights::default();
    for (seed, spec) in options.weight_plan().into_iter().enumerate() {
        let data = tensor(&spec, seed as u64);
        weights.insert(spec.name, Tensor { shape: spec.shape, data });
    }
    weights
}

fn tensor(spec: &TensorSpec, seed: u64) -> Vec<f32> {
    let (centre, step) = range(spec);
    let mut random = SplitMix64(seed);
    // 24 bits as an integer in -2^23..2^23: exact in float32, as are the powers of two.
    (0..spec.len()).map(|_| centre + ((random.next() >> 40) as i32 - (1 << 23)) as f32 * step).collect()
}

/// Centre and step of the values of a tensor: `centre - 2^23 * step ..= centre + 2^23 * step`.
///
/// All are powers of two, so that no rounding differs between machines. The spans were chosen so that all three layers
/// of English text have a root mean square between 0.4 and 0.8 and clips rarely apply.
fn range(spec: &TensorSpec) -> (f32, f32) {
    let last = spec.name.rsplit('/').next().unwrap_or_default();
    let (centre, span) = match last {
        "char_embed" => (0.0, 1.0),
        // As at the start of training, a highway layer is nearly the identity.
        "b_carry" => (-2.0, 0.0),
        "W_carry" | "W_transform" => (0.0, 0.125),
        // With relu, a channel is active for few words only.
        name if name.starts_with("b_cnn") => (-0.5, 0.0),
        "W_0" => (0.0, 0.5),
        name if name.starts_with('W') => (0.0, 0.25),
        _ => (0.0, 0.0625),
    };
    (centre, span / 8_388_608.0)
}

/// SplitMix64 (Steele, Lea and Flood): integers only, so that it is the same on every machine.
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
