//! Settings of the engine: devices, threads, batch size, cache, precision.

use crate::model::{BiLm, DeviceChoice, DeviceName, Precision};

/// How the engine uses the machine. None of these settings changes a result on a given device and precision, but for rounding on GPUs.
#[derive(Debug, Clone, PartialEq)]
pub struct EmbedderSettings {
    /// Devices to run on.
    pub devices: Vec<DeviceChoice>,
    /// OS threads on the CPU, each with its own batch; `None`: one per core.
    pub threads: Option<usize>,
    /// Padded tokens of one batch: rows x steps. A larger batch is faster up to a point and takes more memory. `None`:
    /// 8,192 for a CPU core, 65,536 for a GPU.
    pub batch_tokens: Option<usize>,
    /// Maximum size in bytes of the word cache, which all CPU cores share. An entry holds a word, its vector (`4P` bytes) and about 100
    /// bytes of overhead. On a GPU each lane has a cache of this size in the memory of the device. 0 disables the cache.
    pub cache_bytes: usize,
    /// Tokens that may wait in the queue, padding not counted, before callers have to wait. A request is accepted as a
    /// whole below this bound, so the queue may exceed it by one request.
    pub queue_tokens: usize,
    /// Number format on the device. libtorch has one switch for TF32: while a model computes in `tf32`, no other one of the process may
    /// compute in `f32` on a GPU.
    pub precision: Precision,
}

impl Default for EmbedderSettings {
    fn default() -> Self {
        Self {
            devices: vec![DeviceChoice::Auto],
            threads: None,
            batch_tokens: None,
            cache_bytes: 256 << 20,
            queue_tokens: 1 << 20,
            precision: Precision::F32,
        }
    }
}

/// Sizes of a batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct BatchLimits {
    /// Padded tokens.
    pub(super) tokens: usize,
    /// Rows beyond which the products of a step become no faster.
    pub(super) rows: usize,
}

/// With 256 rows the products of the largest published model run as fast as with 512; with 64 they take a quarter
/// longer (measured on Zen 3).
const CPU_BATCH: BatchLimits = BatchLimits { tokens: 8192, rows: 256 };
/// A GPU needs more rows to hide the time for reading the weights and for launching the kernels of a step.
const GPU_BATCH: BatchLimits = BatchLimits { tokens: 65_536, rows: 1024 };

impl BatchLimits {
    pub(super) fn new(settings: &EmbedderSettings, models: &[BiLm]) -> Self {
        let on_gpu = models.iter().any(|model| model.device() != DeviceName::Cpu);
        let default = if on_gpu { GPU_BATCH } else { CPU_BATCH };
        Self { tokens: settings.batch_tokens.unwrap_or(default.tokens), rows: default.rows }
    }
}

/// Lanes of a GPU: while it computes the batch of one, another prepares the next batch, and a third one reads results. A lane takes
/// about as long for both as the GPU for the fastest published sizes and precisions.
pub(super) const GPU_LANES: usize = 3;

/// The device of each lane: a CPU has `threads` lanes (`None`: one per core), a GPU has three.
pub fn lanes(devices: &[DeviceName], threads: Option<usize>) -> Vec<DeviceName> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let on_cpu = threads.unwrap_or(cores).max(1);
    devices
        .iter()
        .flat_map(|device| match device {
            DeviceName::Cpu => vec![DeviceName::Cpu; on_cpu],
            DeviceName::Cuda(_) => vec![*device; GPU_LANES],
        })
        .collect()
}
