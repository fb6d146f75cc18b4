//! The Parquet encoder by itself, the bound of a job whose model costs nothing.

use std::{thread, time::Instant};

use arrow::{array::RecordBatch, datatypes::SchemaRef};
use parquet::errors::ParquetError;

use crate::{
    error::{Error, Result},
    sink::{Codec, Encoder, Encoding},
};

/// Size of a file.
pub(super) const FILE_BYTES: u64 = 128 << 20;
/// Size of a row group before encoding.
pub(super) const ROW_GROUP_BYTES: u64 = 64 << 20;

/// Rows per second that all cores encode, a file each, when they do nothing else.
pub(super) fn rows_per_second(batches: &[RecordBatch], schema: &SchemaRef, rows: usize) -> Result<f64> {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let (of_thread, started) = (rows.div_ceil(threads), Instant::now());
    let encoded: Result<Vec<()>, _> = thread::scope(|scope| {
        let spawn = |_| thread::Builder::new().spawn_scoped(scope, || encode(batches, schema, of_thread));
        let workers = (0..threads).map(spawn).collect::<Result<Vec<_>, _>>()?;
        let died = |_| ParquetError::General("a thread died".to_owned());
        workers.into_iter().map(|worker| worker.join().map_err(died)?).collect()
    });
    encoded.map_err(|e| Error::Failed(format!("the rows were not encoded: {e}")))?;
    Ok((of_thread * threads) as f64 / started.elapsed().as_secs_f64())
}

/// Encodes `rows` rows, into files of [`FILE_BYTES`] that are in memory.
fn encode(batches: &[RecordBatch], schema: &SchemaRef, rows: usize) -> Result<(), ParquetError> {
    let encoding = Encoding { vectors: "embedding".into(), codec: Codec::default(), row_group_bytes: ROW_GROUP_BYTES };
    let (mut left, mut batches) = (rows, batches.iter().cycle());
    while left > 0 {
        let mut encoder = Encoder::new(Vec::new(), schema, &encoding)?;
        while left > 0 && encoder.bytes() < FILE_BYTES {
            let Some(batch) = batches.next() else { return Ok(()) };
            let batch = batch.slice(0, left.min(batch.num_rows()));
            left -= batch.num_rows();
            for unit in encoder.push(&batch) {
                encoder.encode(&unit)?;
            }
        }
        encoder.finish(&[])?;
    }
    Ok(())
}

/// Seconds of CPU time of this process.
pub(super) fn cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writing.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
