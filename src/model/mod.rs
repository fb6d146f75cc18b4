//! The biLM on libtorch: the only home of `tch` in this crate.
//!
//! ```text
//! words --char_cnn--> token table [U, P] --batch--> input [2, R, P] --lstm--> layers [L+1][2, R, P]
//! ```
//!
//! `U` distinct words, `R` packed rows (`packing.rs`), `P` projection, `D` cells, `C` character
//! embedding, `F` filters, `M` characters of a token; the leading 2 are the forward and the backward
//! direction.
//!
//! | file | what it has |
//! |---|---|
//! | `device_table.rs` | a table of token vectors that stays on the device |
//! | `parameters.rs` | the named tensors that everything is derived from |
//! | `bilm.rs` | the model: words to a table, a table and a batch to layers |
//! | `char_cnn/`, `lstm/` | its two halves |
//! | `batch.rs`, `packing.rs`, `indices.rs` | which token each row of a step reads |
//! | `start_state.rs` | the state in which sentences start, and the one in which they end |
//! | `dropout.rs` | where training drops values |
//! | `traced.rs` | training: forward and backward without libtorch's graph |
//! | `activations.rs`, `reduction.rs` | the layers, on the device and read back; what is computed of them on the device |
//! | `kernels.rs`, `cell/` | our own passes over memory on CPUs and GPUs |
//! | `device.rs`, `mkl.rs`, `precision.rs`, `tf32.rs`, `tensors.rs`, `error.rs` | libtorch and the machine |
//! | `products.rs`, `panels.rs`, `codes.rs` | products with weights that are packed once, on CPUs: in float32, and in 8-bit integers |
//! | `softmax.rs` | the LM head |
//! | `self_test.rs` | checks and speed of the machine |

mod activations;
mod batch;
mod bilm;
mod cell;
mod char_cnn;
mod codes;
mod device;
mod device_table;
mod dropout;
mod error;
mod indices;
pub(crate) mod kernels;
mod lstm;
mod mkl;
pub(crate) mod packing;
mod panels;
mod parameters;
mod precision;
mod products;
mod reduction;
pub(crate) mod scalar_ops;
mod self_test;
mod softmax;
pub(crate) mod start_state;
pub(crate) mod tensors;
mod tf32;
mod traced;
mod word_parts;

pub use activations::{Activations, LayerValues};
pub use batch::PackedBatch;
pub use bilm::BiLm;
pub(crate) use bilm::Cut;
pub use device::{
    DeviceChoice, DeviceName, cuda_devices, libtorch_version, parse_devices, resolve_devices, set_up_cpu,
};
pub(crate) use device_table::DeviceTable;
pub(crate) use dropout::DropoutRows;
pub use dropout::{Dropout, DropoutNumbers, NoDropout};
pub use error::DeviceError;
pub use parameters::Parameters;
pub use precision::Precision;
pub(crate) use reduction::{Mixing, Selection};
pub use self_test::{SelfTest, compare, libtorch_ceiling, matmul_ceiling, self_test};
pub use softmax::Softmax;
pub use start_state::StartState;
