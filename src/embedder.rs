//! skeleton
use crate::spec::SpecError;
use std::str::FromStr;
/// device
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceChoice {
    /// best
    Auto,
    /// cpu
    Cpu,
    /// `cuda` (all) or `cuda:N`
    Cuda(Option<usize>),
}
/// Parses `auto`, `cpu`, `cuda`, `cuda:0,1`.
pub fn parse_devices(_s: &str) -> Result<Vec<DeviceChoice>, SpecError> {
    todo!()
}
/// precision
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// f32
    F32,
    /// bf16
    Bf16,
}
impl FromStr for Precision {
    type Err = SpecError;
    fn from_str(_s: &str) -> Result<Self, SpecError> {
        todo!()
    }
}
/// settings
#[derive(Debug, Clone)]
pub struct EmbedderSettings {
    /// devices
    pub devices: Vec<DeviceChoice>,
    /// CPU threads
    pub threads: Option<usize>,
    /// padded tokens of one batch
    pub batch_tokens: usize,
    /// bytes of the word cache
    pub cache_bytes: usize,
    /// tokens that may wait before callers are made to
    pub queue_tokens: usize,
    /// precision
    pub precision: Precision,
}
impl Default for EmbedderSettings {
    fn default() -> Self {
        Self {
            devices: vec![DeviceChoice::Auto],
            threads: None,
            batch_tokens: 4096,
            cache_bytes: 256 << 20,
            queue_tokens: 1 << 20,
            precision: Precision::F32,
        }
    }
}
/// counters
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EmbedderMetrics {
    /// sentences (or windows) run
    pub sentences: u64,
    /// real tokens run
    pub tokens: u64,
    /// tokens of the packed batches, with the rows that only fill a step up
    pub padded_tokens: u64,
    /// batches
    pub batches: u64,
    /// words found in the cache
    pub cache_hits: u64,
    /// words computed
    pub cache_misses: u64,
    /// seconds that devices were busy, summed over devices
    pub device_seconds: f64,
    /// seconds that sentences waited, summed
    pub queue_seconds: f64,
    /// floating point operations of matrix products, in 1e9
    pub gflop: f64,
    /// batches split because a device ran out of memory
    pub oom_splits: u64,
}
/// handle
#[derive(Debug, Clone)]
pub struct Embedder {}
impl Embedder {
    /// counters since the start
    pub fn metrics(&self) -> EmbedderMetrics {
        todo!()
    }
    /// drains and stops
    pub fn close(&self) {
        todo!()
    }
}
