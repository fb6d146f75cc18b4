//! The passes over the gates and the outputs of a step, dropout, and mixes of layers, as kernels of a GPU, or on the CPU for tests of the
//! same code.
//!
//! libtorch's own operations need more than ten kernels where these are two, and each reads and writes memory: launching them takes a
//! GPU longer than the products of the step. The text of the kernels (`cell.h` and `reduction.h` for inference, `training.h`,
//! `kernels.cu`) is compiled when a model is put on a GPU, by the NVRTC that comes with libtorch (`cuda.rs`).

pub(super) mod cuda;

pub(super) use cuda::Usage;

use std::{ffi::c_void, ptr};

use tch::{Device, Kind, Tensor};

use super::{DeviceError, dropout::DropoutNumbers};

/// Who computes the passes.
#[derive(Debug, Clone, Copy)]
pub(super) enum CellKernels {
    /// Kernels of a GPU.
    Cuda(&'static cuda::Module),
    /// The same code on the CPU.
    Host,
}

/// `Gates` of `cell.h`.
#[repr(C)]
#[derive(Debug)]
struct GatesArguments {
    sums: *const c_void,
    inputs: *const c_void,
    places: *const c_void,
    bias: *const c_void,
    state: *mut c_void,
    start: *const c_void,
    begins: *const c_void,
    out: *mut c_void,
    rows: i64,
    width: i64,
    cells: i64,
    words: i64,
    all: i64,
    clip: f32,
}

/// `Outputs` of `cell.h`.
#[repr(C)]
#[derive(Debug)]
struct OutputsArguments {
    projected: *const c_void,
    input: *const c_void,
    next: *mut c_void,
    y: *mut c_void,
    start: *const c_void,
    begins: *const c_void,
    rows: i64,
    next_rows: i64,
    all: i64,
    columns: i64,
    size: i64,
    clip: f32,
}

/// `KeptGates` of `training.h`.
#[repr(C)]
#[derive(Debug)]
struct KeptGatesArguments {
    gates: *mut c_void,
    bias: *const c_void,
    before: *const c_void,
    after: *mut c_void,
    out: *mut c_void,
    rows: i64,
    all: i64,
    cells: i64,
    clip: f32,
}

/// `GateGradients` of `training.h`.
#[repr(C)]
#[derive(Debug)]
struct GateGradientsArguments {
    gates: *mut c_void,
    before: *const c_void,
    after: *const c_void,
    out: *const c_void,
    state: *mut c_void,
    rows: i64,
    all: i64,
    cells: i64,
    clip: f32,
}

/// `OutputGradients` of `training.h`.
#[repr(C)]
#[derive(Debug)]
struct OutputGradientsArguments {
    y: *const c_void,
    next: *const c_void,
    projected: *const c_void,
    to: *mut c_void,
    rows: i64,
    all: i64,
    size: i64,
    clip: f32,
}

/// `Dropping` of `training.h`.
#[repr(C)]
#[derive(Debug)]
struct DroppingArguments {
    packed: *const c_void,
    factors: *mut c_void,
    tokens: i64,
    all: i64,
    width: i64,
    positions: i64,
    below: u64,
    key: [u32; 2],
    step: u32,
    first_row: u32,
    purposes: [u32; 2],
    kept: f32,
}

/// `MOST_TERMS` of `reduction.h`.
pub(super) const MOST_TERMS: usize = 8;

/// `Mixes` of `reduction.h`.
#[repr(C)]
#[derive(Debug)]
struct MixesArguments {
    layers: [*const c_void; MOST_TERMS],
    factors: [f32; MOST_TERMS],
    tokens: *const c_void,
    ends: *const c_void,
    out: *mut c_void,
    terms: i64,
    count: i64,
    all: i64,
    size: i64,
    rows: i64,
    columns: i64,
}

/// What becomes of the mixes of tokens.
#[derive(Debug, Clone, Copy)]
pub(super) enum Reduction {
    /// They are the result, in float32.
    Tokens,
    /// Their sum over each sentence, in float64.
    Sum,
    /// Their maximum over each sentence, in float64: NaN where one is NaN.
    Max,
}

/// Tensors of a mix of layers; all are contiguous.
pub(super) struct Mixes<'t> {
    /// Layers `[2, R, P]` and their factors: from one to [`MOST_TERMS`].
    pub(super) terms: &'t [(&'t Tensor, f32)],
    /// `[2, N]`: packed row of the forward and of the backward half of each token.
    pub(super) tokens: &'t Tensor,
    /// `[S]`: one past the last token of each sentence.
    pub(super) ends: &'t Tensor,
    /// `[N, W]` or `[S, W]`: `2P` columns are written.
    pub(super) out: &'t Tensor,
    /// The first one.
    pub(super) column: usize,
}

/// Tensors of the gates of a step; all are contiguous.
pub(super) struct Gates<'t> {
    /// `[2, w, 4D]`: before bias and non-linearities.
    pub(super) sums: &'t Tensor,
    /// Input products that are not in `sums`.
    pub(super) inputs: Option<InputProducts<'t>>,
    /// `[2, 4D]` float32.
    pub(super) bias: &'t Tensor,
    /// `[2, W, D]` float32, changed in place.
    pub(super) state: &'t Tensor,
    /// `[2, D]` float32: the state in which a sentence begins.
    pub(super) start: &'t Tensor,
    /// `[w]`: not 0 where a sentence begins.
    pub(super) begins: Option<Tensor>,
    /// `[2, w, D]`: written.
    pub(super) out: &'t Tensor,
}

/// The input products of words, of which rows of a step read one each; all tensors are contiguous.
pub(super) struct InputProducts<'t> {
    /// `[2, U, 4D]`, of the kind of the gates.
    pub(super) products: &'t Tensor,
    /// `[2, R]`: the word of each packed row.
    pub(super) places: &'t Tensor,
    /// First packed row of the step.
    pub(super) offset: usize,
}

/// Tensors of the outputs of a step.
pub(super) struct Outputs<'t> {
    /// `[2, w, P]`, contiguous.
    pub(super) projected: &'t Tensor,
    /// `[2, R, 2P]`, contiguous: the input of each packed row, and the previous output, which is written for the next step; or `[2, R, P]`:
    /// the previous output alone.
    pub(super) rows: &'t Tensor,
    /// Whether the input, which `rows` then has, is added to the output.
    pub(super) residual: bool,
    /// First packed row of the step, and that of the next one with its number of rows.
    pub(super) offset: usize,
    pub(super) next: Option<(usize, usize)>,
    /// `[2, R, P]`, contiguous: written.
    pub(super) y: &'t Tensor,
    /// `[2, P]`: the output before a sentence begins.
    pub(super) start: &'t Tensor,
    /// `[w of the next step]`: not 0 where a sentence begins there.
    pub(super) begins: Option<Tensor>,
}

/// Tensors of the gates of a step of training; all are contiguous.
pub(super) struct KeptGates<'t> {
    /// `[2, R, 4D]`: before bias and non-linearities in the rows of this step, where they become the gates.
    pub(super) gates: &'t Tensor,
    /// `[2, 4D]` float32.
    pub(super) bias: &'t Tensor,
    /// `[2, W, D]` float32: the state before the step.
    pub(super) before: &'t Tensor,
    /// `[2, W, D]` float32: the state after it, written.
    pub(super) after: &'t Tensor,
    /// `[2, R, D]`: written in the rows of this step.
    pub(super) out: &'t Tensor,
    /// First packed row of the step.
    pub(super) offset: usize,
}

/// Tensors of the derivatives of a step by its gates; all are contiguous.
pub(super) struct GateGradients<'t> {
    /// `[2, R, 4D]`: gates in the rows of this step, where they become derivatives before bias and non-linearities.
    pub(super) gates: &'t Tensor,
    /// `[2, W, D]` float32: the state before the step.
    pub(super) before: &'t Tensor,
    /// `[2, W, D]` float32: the state after it.
    pub(super) after: &'t Tensor,
    /// `[2, W, D]`: derivatives by the output of the cells.
    pub(super) out: &'t Tensor,
    /// `[2, W, D]` float32: derivatives by the state after the step, which become those by the state before it.
    pub(super) state: &'t Tensor,
    /// First packed row of the step.
    pub(super) offset: usize,
}

/// Tensors of the derivatives of a step by its projected outputs; all are contiguous.
pub(super) struct OutputGradients<'t> {
    /// `[2, R, P]`: derivatives by the output of the layer.
    pub(super) y: &'t Tensor,
    /// `[2, W, P]`: by what the next step reads.
    pub(super) next: Option<&'t Tensor>,
    /// `[2, W, P]`: what the clip bounds.
    pub(super) projected: &'t Tensor,
    /// `[2, R, P]`: written in the rows of this step.
    pub(super) to: &'t Tensor,
    /// First packed row of the step.
    pub(super) offset: usize,
}

/// Where dropout applies, and its random numbers.
pub(super) struct Dropping<'t> {
    /// `[2, N]`: packed row of each token, row by row of the window.
    pub(super) packed: &'t Tensor,
    /// `[2, R, P]`: written in the rows of tokens.
    pub(super) factors: &'t Tensor,
    /// Tokens of a row of the window.
    pub(super) positions: usize,
    /// Number of the first row.
    pub(super) first_row: u32,
    /// Factor of values that are kept.
    pub(super) kept: f32,
    pub(super) numbers: DropoutNumbers,
}

impl CellKernels {
    /// The kernels of a device for a use and a number format; `None` on a CPU, and where NVRTC does not work: then libtorch's operations
    /// serve.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the device has no room for them.
    pub(super) fn of(device: Device, usage: Usage, kind: Kind) -> Result<Option<Self>, DeviceError> {
        match device {
            Device::Cuda(number) => Ok(cuda::module(number, usage, kind)?.ok().map(Self::Cuda)),
            _ => Ok(None),
        }
    }

    /// `c = clip(sigmoid(f) c + sigmoid(i) tanh(j))`, and `sigmoid(o) tanh(c)`. Without a bound, `clip` is infinite.
    pub(super) fn cell(self, gates: &Gates<'_>, clip: f32) -> Result<(), DeviceError> {
        let [_, rows, cells] = gates.out.size3()?.into();
        let inputs = gates.inputs.as_ref();
        let arguments = GatesArguments {
            sums: pointer(gates.sums),
            inputs: inputs.map_or(ptr::null_mut(), |inputs| pointer(inputs.products)),
            places: inputs.map_or(ptr::null_mut(), |inputs| element(inputs.places, inputs.offset)),
            bias: pointer(gates.bias),
            state: pointer(gates.state),
            start: pointer(gates.start),
            begins: gates.begins.as_ref().map_or(ptr::null(), |begins| pointer(begins).cast_const()),
            out: pointer(gates.out),
            rows,
            width: gates.state.size()[1],
            cells,
            words: inputs.map_or(0, |inputs| inputs.products.size()[1]),
            all: inputs.map_or(0, |inputs| inputs.places.size()[1]),
            clip,
        };
        // SAFETY: every pointer is to a contiguous tensor of the size that `cell.h` states, and places are within the products.
        unsafe { self.run("lstm_cell", gates.out.kind(), [rows, cells], (&raw const arguments).cast()) }
    }

    /// `h = clip(projected)` to the next step, and with the input, if it is added, to `y`.
    pub(super) fn outputs(self, step: &Outputs<'_>, clip: f32) -> Result<(), DeviceError> {
        let [_, rows, size] = step.projected.size3()?.into();
        let [_, _, columns] = step.rows.size3()?.into();
        debug_assert!(!step.residual || columns == 2 * size, "an input that is added is in `rows`");
        // `next` is addressed by rows of this step: the same row of the next one lies that much further.
        let (next, next_rows) = step.next.unwrap_or((0, 0));
        let arguments = OutputsArguments {
            projected: pointer(step.projected),
            input: if step.residual { row_of(step.rows, step.offset) } else { ptr::null_mut() },
            next: element(step.rows, (next + 1) * columns as usize - size as usize),
            y: row_of(step.y, step.offset),
            start: pointer(step.start),
            begins: step.begins.as_ref().map_or(ptr::null(), |begins| pointer(begins).cast_const()),
            rows,
            next_rows: next_rows as i64,
            all: step.y.size()[1],
            columns,
            size,
            clip,
        };
        // SAFETY: as in `cell`; rows of steps are within `R`.
        unsafe { self.run("lstm_output", step.projected.kind(), [rows, size], (&raw const arguments).cast()) }
    }

    /// As `cell`, keeping the gates and every state.
    pub(super) fn cell_kept(self, step: &KeptGates<'_>, clip: f32) -> Result<(), DeviceError> {
        let [_, rows, cells] = step.after.size3()?.into();
        let arguments = KeptGatesArguments {
            gates: row_of(step.gates, step.offset),
            bias: pointer(step.bias),
            before: pointer(step.before),
            after: pointer(step.after),
            out: row_of(step.out, step.offset),
            rows,
            all: step.gates.size()[1],
            cells,
            clip,
        };
        // SAFETY: every pointer is to a contiguous tensor of the size that `training.h` states.
        unsafe { self.run("lstm_cell_kept", step.gates.kind(), [rows, cells], (&raw const arguments).cast()) }
    }

    /// Derivatives of [`CellKernels::cell_kept`].
    pub(super) fn cell_backward(self, step: &GateGradients<'_>, clip: f32) -> Result<(), DeviceError> {
        let [_, rows, cells] = step.state.size3()?.into();
        let arguments = GateGradientsArguments {
            gates: row_of(step.gates, step.offset),
            before: pointer(step.before),
            after: pointer(step.after),
            out: pointer(step.out),
            state: pointer(step.state),
            rows,
            all: step.gates.size()[1],
            cells,
            clip,
        };
        // SAFETY: as in `cell_kept`.
        unsafe { self.run("lstm_cell_backward", step.gates.kind(), [rows, cells], (&raw const arguments).cast()) }
    }

    /// Derivatives of [`CellKernels::outputs`]: sums of those by both readers of an output, 0 where the clip bounded it.
    pub(super) fn output_backward(self, step: &OutputGradients<'_>, clip: f32) -> Result<(), DeviceError> {
        let [_, rows, size] = step.projected.size3()?.into();
        let arguments = OutputGradientsArguments {
            y: row_of(step.y, step.offset),
            next: step.next.map_or(ptr::null(), |next| pointer(next).cast_const()),
            projected: pointer(step.projected),
            to: row_of(step.to, step.offset),
            rows,
            all: step.y.size()[1],
            size,
            clip,
        };
        // SAFETY: as in `cell_kept`.
        unsafe { self.run("lstm_output_backward", step.to.kind(), [rows, size], (&raw const arguments).cast()) }
    }

    /// Factors of dropout, for the rows of tokens.
    pub(super) fn dropout(self, dropping: &Dropping<'_>) -> Result<(), DeviceError> {
        let [_, all, width] = dropping.factors.size3()?.into();
        let (tokens, numbers) = (dropping.packed.size()[1], dropping.numbers);
        let arguments = DroppingArguments {
            packed: pointer(dropping.packed),
            factors: pointer(dropping.factors),
            tokens,
            all,
            width,
            positions: dropping.positions as i64,
            below: numbers.below,
            key: numbers.key,
            step: numbers.step,
            first_row: dropping.first_row,
            purposes: numbers.purposes,
            kept: dropping.kept,
        };
        // SAFETY: as in `cell_kept`; every packed row is one of `factors`.
        unsafe { self.run("dropout", dropping.factors.kind(), [tokens, width], (&raw const arguments).cast()) }
    }

    /// A mix of layers for tokens, or what becomes of it for sentences.
    pub(super) fn mix(self, reduction: Reduction, mixes: &Mixes<'_>) -> Result<(), DeviceError> {
        let pass = match reduction {
            Reduction::Tokens => "mix",
            Reduction::Sum => "mix_sum",
            Reduction::Max => "mix_max",
        };
        let (Some((layer, _)), true) = (mixes.terms.first(), mixes.terms.len() <= MOST_TERMS) else {
            return Err(DeviceError::internal(format!("a mix of {} terms", mixes.terms.len())));
        };
        let [_, all, size] = layer.size3()?.into();
        let [rows, columns] = mixes.out.size2()?.into();
        let (mut layers, mut factors) = ([ptr::null::<c_void>(); MOST_TERMS], [0.0; MOST_TERMS]);
        for (place, (layer, factor)) in mixes.terms.iter().enumerate() {
            (layers[place], factors[place]) = (pointer(layer), *factor);
        }
        let arguments = MixesArguments {
            layers,
            factors,
            tokens: pointer(mixes.tokens),
            ends: pointer(mixes.ends),
            out: element(mixes.out, mixes.column),
            terms: mixes.terms.len() as i64,
            count: mixes.tokens.size()[1],
            all,
            size,
            rows,
            columns,
        };
        // SAFETY: every pointer is to a contiguous tensor of the size that `reduction.h` states, and `out` has the type of the pass; rows of
        // tokens are within `R`, and ends within `N`.
        unsafe { self.run(pass, layer.kind(), [rows, size], (&raw const arguments).cast()) }
    }

    /// # Safety
    /// `arguments` are those of the pass, and their pointers are valid for it.
    unsafe fn run(
        self,
        pass: &'static str,
        kind: Kind,
        [rows, columns]: [i64; 2],
        arguments: *const c_void,
    ) -> Result<(), DeviceError> {
        // A GPU refuses a grid without rows.
        if rows == 0 {
            return Ok(());
        }
        // Numbers in one access to memory; rows are aligned to them if their length is.
        let together = if columns % 4 == 0 { 4 } else { 1 };
        // SAFETY: as the caller promises.
        match self {
            Self::Cuda(module) => unsafe { module.launch(pass, kind, together, [rows, columns], arguments) },
            Self::Host => unsafe { run_on_host(pass, kind, together, arguments) },
        }
    }
}

fn pointer(tensor: &Tensor) -> *mut c_void {
    debug_assert!(tensor.is_contiguous(), "the kernels compute addresses of contiguous tensors");
    let is_index = tensor.kind() == Kind::Int64;
    let at_once = if !is_index && tensor.size().last().is_some_and(|columns| columns % 4 == 0) { 4 } else { 1 };
    let bytes = at_once * tensor.kind().elt_size_in_bytes();
    debug_assert!(tensor.data_ptr().addr().is_multiple_of(bytes), "an access is to up to four numbers");
    tensor.data_ptr()
}

/// The first direction of `t` `[2, R, columns]`, from a packed row on.
fn row_of(t: &Tensor, row: usize) -> *mut c_void {
    let columns = t.size().last().map_or(0, |&columns| columns as usize);
    element(t, row * columns)
}

/// From a number of `t` on.
fn element(t: &Tensor, number: usize) -> *mut c_void {
    // SAFETY: within the tensor, as every step is.
    unsafe { pointer(t).byte_add(number * t.kind().elt_size_in_bytes()) }
}

/// Declares the passes of `host.cpp`, and finds one by its name.
macro_rules! passes_on_host {
    ($($pass:literal: $f32_1:ident $f32_4:ident $bf16_1:ident $bf16_4:ident,)*) => {
        unsafe extern "C" {
            $(
                fn $f32_1(arguments: *const c_void);
                fn $f32_4(arguments: *const c_void);
                fn $bf16_1(arguments: *const c_void);
                fn $bf16_4(arguments: *const c_void);
            )*
        }

        /// # Safety
        /// As [`CellKernels::run`].
        unsafe fn run_on_host(pass: &str, kind: Kind, together: i64, arguments: *const c_void) -> Result<(), DeviceError> {
            let function = match (pass, kind, together) {
                $(
                    ($pass, Kind::Float, 1) => $f32_1,
                    ($pass, Kind::Float, _) => $f32_4,
                    ($pass, Kind::BFloat16, 1) => $bf16_1,
                    ($pass, Kind::BFloat16, _) => $bf16_4,
                )*
                _ => return Err(DeviceError::internal(format!("{pass} of {kind:?} is for GPUs"))),
            };
            // SAFETY: as the caller promises.
            unsafe { function(arguments) }
            Ok(())
        }
    };
}

passes_on_host! {
    "lstm_cell": elmo_lstm_cell_f32_1 elmo_lstm_cell_f32_4 elmo_lstm_cell_bf16_1 elmo_lstm_cell_bf16_4,
    "lstm_output": elmo_lstm_output_f32_1 elmo_lstm_output_f32_4 elmo_lstm_output_bf16_1 elmo_lstm_output_bf16_4,
    "lstm_cell_kept":
        elmo_lstm_cell_kept_f32_1 elmo_lstm_cell_kept_f32_4 elmo_lstm_cell_kept_bf16_1 elmo_lstm_cell_kept_bf16_4,
    "lstm_cell_backward":
        elmo_lstm_cell_backward_f32_1 elmo_lstm_cell_backward_f32_4
        elmo_lstm_cell_backward_bf16_1 elmo_lstm_cell_backward_bf16_4,
    "lstm_output_backward":
        elmo_lstm_output_backward_f32_1 elmo_lstm_output_backward_f32_4
        elmo_lstm_output_backward_bf16_1 elmo_lstm_output_backward_bf16_4,
    "mix": elmo_mix_f32_1 elmo_mix_f32_4 elmo_mix_bf16_1 elmo_mix_bf16_4,
    "mix_sum": elmo_mix_sum_f32_1 elmo_mix_sum_f32_4 elmo_mix_sum_bf16_1 elmo_mix_sum_bf16_4,
    "mix_max": elmo_mix_max_f32_1 elmo_mix_max_f32_4 elmo_mix_max_bf16_1 elmo_mix_max_bf16_4,
    "dropout": elmo_dropout_f32_1 elmo_dropout_f32_4 elmo_dropout_bf16_1 elmo_dropout_bf16_4,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tensors;

    fn random(shape: &[i64], kind: Kind, scale: f64) -> Tensor {
        (Tensor::randn(shape, (Kind::Float, Device::Cpu)) * scale).to_kind(kind)
    }

    fn bits(tensor: &Tensor) -> Vec<f32> {
        Vec::try_from(tensor.to_kind(Kind::Float).reshape([-1])).unwrap()
    }

    /// Largest difference; a NaN in one of them only is infinitely far.
    fn distance(one: &Tensor, other: &Tensor) -> f32 {
        let gap = |(a, b): (&f32, &f32)| match (a.is_nan(), b.is_nan()) {
            (true, true) => 0.0,
            (false, false) if a == b => 0.0,
            (false, false) => (a - b).abs(),
            _ => f32::INFINITY,
        };
        bits(one).iter().zip(&bits(other)).map(gap).fold(0.0, f32::max)
    }

    /// Expected: libtorch's operations in float64, rounded once.
    #[test]
    fn the_cell_is_that_of_libtorch_operations() {
        tch::manual_seed(3);
        let (rows, width) = (3, 5);
        // Of packed rows, those of the step are the third and the next two.
        let places = Tensor::from_slice(&[9_i64, 9, 1, 0, 1, 9, 9, 9, 3, 2, 0, 9]).view([2, 6]);
        let [forward, backward] = [[1_i64, 0, 1], [3, 2, 0]].map(|places| Tensor::from_slice(&places));
        for (kind, near) in [(Kind::Float, 2e-6), (Kind::BFloat16, 8e-3)] {
            for (cells, has_inputs) in [(7, false), (7, true), (8, false), (8, true)] {
                let sums = random(&[2, rows, 4 * cells], kind, 2.0);
                let _ = sums.select(0, 0).select(0, 1).narrow(0, 2, 1).fill_(f64::NAN);
                let _ = sums.select(0, 1).select(0, 2).narrow(0, 1, 1).fill_(f64::INFINITY);
                let (bias, start) = (random(&[2, 4 * cells], Kind::Float, 1.0), random(&[2, cells], Kind::Float, 1.0));
                let state = random(&[2, width, cells], Kind::Float, 2.0);
                let before = state.copy();
                let out = Tensor::zeros([2, rows, cells], (kind, Device::Cpu));
                let begins = Tensor::from_slice(&[0_i64, 1, 0]);
                let products = random(&[2, 4, 4 * cells], kind, 2.0);
                let inputs = InputProducts { products: &products, places: &places, offset: 2 };
                let gates = Gates {
                    sums: &sums,
                    inputs: has_inputs.then_some(inputs),
                    bias: &bias,
                    state: &state,
                    start: &start,
                    begins: Some(begins.shallow_clone()),
                    out: &out,
                };
                CellKernels::Host.cell(&gates, 1.5).unwrap();

                let mut z = sums.to_kind(Kind::Double) + bias.to_kind(Kind::Double).unsqueeze(1);
                if has_inputs {
                    let of = |direction, places| products.select(0, direction).index_select(0, places);
                    z += Tensor::stack(&[of(0, &forward), of(1, &backward)], 0).to_kind(Kind::Double);
                }
                let [i, j, f, o] = tensors::split(&z, [cells; 4], 2).unwrap();
                let read = before.to_kind(Kind::Double).narrow(1, 0, rows);
                let begun = begins.to_kind(Kind::Bool).reshape([1, rows, 1]);
                let read = start.to_kind(Kind::Double).unsqueeze(1).where_self(&begun, &read);
                let c = (f.sigmoid() * read + i.sigmoid() * j.tanh()).clamp(-1.5, 1.5);
                let expected = o.sigmoid() * c.tanh();
                assert!(distance(&state.narrow(1, 0, rows), &c) <= 2e-6, "{kind:?}, {cells} cells");
                assert!(distance(&out, &expected) <= near, "{kind:?}, {cells} cells");
                let (kept, others) = (state.narrow(1, rows, width - rows), before.narrow(1, rows, width - rows));
                assert_eq!(kept, others, "rows that have ended");
            }
        }
    }

    /// Expected: libtorch's operations, with every bit: bounding is exact, and a sum is rounded once, to the nearest.
    #[test]
    fn outputs_are_those_of_libtorch_operations() {
        tch::manual_seed(4);
        let (rows, next_rows, all, offset) = (4, 3, 9, 2);
        for kind in [Kind::Float, Kind::BFloat16] {
            for size in [6, 8] {
                for (residual, has_input) in [(false, false), (false, true), (true, true)] {
                    let projected = random(&[2, rows, size], kind, 2.0);
                    let _ = projected.select(0, 1).select(0, 0).narrow(0, 0, 1).fill_(f64::NAN);
                    let before = random(&[2, all, 2 * size], kind, 1.0);
                    let [input, previous] = tensors::split(&before, [size, size], 2).unwrap();
                    let packed = if has_input { before.copy() } else { previous.copy() };
                    let y = Tensor::zeros([2, all, size], (kind, Device::Cpu));
                    let start = random(&[2, size], kind, 1.0);
                    let begins = Tensor::from_slice(&[0_i64, 0, 1]);
                    let step = Outputs {
                        projected: &projected,
                        rows: &packed,
                        residual,
                        offset,
                        next: Some((offset + rows as usize, next_rows as usize)),
                        y: &y,
                        start: &start,
                        begins: Some(begins.shallow_clone()),
                    };
                    CellKernels::Host.outputs(&step, 1.25).unwrap();

                    let h = projected.clamp(-1.25, 1.25);
                    let input = input.narrow(1, offset as i64, rows);
                    let added = (h.to_kind(Kind::Float) + input.to_kind(Kind::Float)).to_kind(kind);
                    let expected = if residual { added } else { h.shallow_clone() };
                    let written = y.narrow(1, offset as i64, rows);
                    assert_eq!(distance(&written, &expected), 0.0, "{kind:?}, {size}, {residual}");
                    let begun = begins.to_kind(Kind::Bool).reshape([1, next_rows, 1]);
                    let read = start.unsqueeze(1).where_self(&begun, &h.narrow(1, 0, next_rows));
                    let expected = previous.copy();
                    expected.narrow(1, offset as i64 + rows, next_rows).copy_(&read);
                    let expected = if has_input {
                        let same = &tensors::split(&before, [size, size], 2).unwrap()[0];
                        Tensor::cat(&[same, &expected], 2)
                    } else {
                        expected
                    };
                    assert_eq!(distance(&packed, &expected), 0.0, "{kind:?}, {size}, {residual}");
                    assert_eq!(f64::try_from(y.narrow(1, 0, 2).abs().sum(Kind::Float)).unwrap(), 0.0, "other rows");
                }
            }
        }
    }
}
