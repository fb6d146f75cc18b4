//! What a bulk job would do: inputs, rows, tokens, size and time, without writing anything.

use std::{fmt, sync::Arc, time::Instant};

use arrow::array::Array;
use serde::Serialize;

use crate::{
    bulk::{BulkJob, prepare},
    error::Result,
    report::{bytes, count, duration},
    source::{Position, Rows, row_bytes},
    stage::Stage,
    stores::Stores,
};

/// Rows that are embedded to learn tokens per row and tokens per second.
const SAMPLE_ROWS: usize = 512;

/// What a job would do.
#[derive(Debug, Clone, Serialize)]
pub struct DryRun {
    /// Files that would be read.
    pub files: usize,
    /// Rows of all files; every one was read for it.
    pub rows: u64,
    /// Bytes of text.
    pub text_bytes: u64,
    /// Tokens, estimated from a sample.
    pub tokens: u64,
    /// Bytes of vectors before packing, estimated.
    pub vector_bytes: u64,
    /// Part files.
    pub parts: u64,
    /// Seconds, estimated from the pace of the sample.
    pub seconds: f64,
    /// Columns of the output.
    pub columns: Vec<String>,
}

/// Reads the inputs and embeds a small sample.
pub async fn dry_run(job: &BulkJob, stage: &dyn Stage, stores: &Stores) -> Result<DryRun> {
    let prepared = prepare(job, stage, stores).await?;
    let files = prepared.plan.files().len();
    let mut reader = Rows::new(Arc::clone(&prepared.plan), Position::default());
    let (mut rows, mut text_bytes) = (0, 0);
    let mut sample = None;
    while let Some(slice) = reader.next().await? {
        let mut sizes = vec![0; slice.len()];
        row_bytes(&slice.text, &mut sizes);
        rows += slice.len() as u64;
        text_bytes += sizes.iter().sum::<u64>();
        sample.get_or_insert_with(|| slice.text.slice(0, slice.text.len().min(SAMPLE_ROWS)));
    }
    let (mut tokens_per_row, mut seconds_per_token) = (0.0, 0.0);
    if let Some(sample) = sample {
        let started = Instant::now();
        let stats = stage.submit(&sample).await?.await?.stats;
        tokens_per_row = stats.tokens as f64 / sample.len().max(1) as f64;
        seconds_per_token = started.elapsed().as_secs_f64() / stats.tokens.max(1) as f64;
    }
    let tokens = tokens_per_row * rows as f64;
    let vectors = if stage.spec().level == elmo::spec::Level::Token { tokens } else { rows as f64 };
    let columns = prepared.schema.fields().iter().map(|f| f.name().clone()).collect();
    Ok(DryRun {
        files,
        rows,
        text_bytes,
        tokens: tokens as u64,
        vector_bytes: (vectors * 4.0 * stage.width() as f64) as u64,
        parts: rows.div_ceil(job.rows_per_file).max(1),
        seconds: tokens * seconds_per_token,
        columns,
    })
}

impl fmt::Display for DryRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&crate::cli::table(&[
            ("files", count(self.files as u64)),
            ("rows", count(self.rows)),
            ("text", bytes(self.text_bytes)),
            ("tokens", format!("about {}", count(self.tokens))),
            ("vectors", format!("about {} before packing, in {} files", bytes(self.vector_bytes), count(self.parts))),
            ("time", format!("about {}", duration(std::time::Duration::from_secs_f64(self.seconds.min(1e9))))),
            ("columns", self.columns.join(", ")),
        ]))
    }
}
