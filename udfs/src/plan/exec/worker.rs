//! Embeds the texts of one chunk: looks them up in the cache, submits the rest to the engine, and collects the results.

use std::{collections::HashMap, sync::Arc};

use datafusion::{
    arrow::{
        array::{ArrayRef, UInt64Array, new_empty_array},
        compute::take,
    },
    common::{DataFusionError, Result, exec_datafusion_err, runtime::SpawnedTask},
    execution::memory_pool::MemoryReservation,
};
use futures::future::try_join_all;

use super::{
    call::BoundCall,
    chunk::{ChunkColumn, null_value},
    metrics::EmbedMetrics,
};
use crate::cache::{Lookup, Submission};

/// What the chunks of a partition share.
#[derive(Clone)]
pub(super) struct ChunkWorker {
    pub(super) calls: Arc<Vec<BoundCall>>,
    pub(super) cache_bytes: usize,
    /// The consumer of the memory pool that cached vectors belong to. Reserves nothing itself.
    pub(super) cache_memory: Arc<MemoryReservation>,
    pub(super) metrics: EmbedMetrics,
    pub(super) partition: usize,
}

impl ChunkWorker {
    /// The result columns of a chunk. `texts` has one array per call; `first_row` is the number of the chunk's first
    /// row in its partition.
    pub(super) async fn embed(self, texts: Vec<ArrayRef>, first_row: usize) -> Result<Vec<ChunkColumn>> {
        let calls = self.calls.iter().zip(&texts);
        try_join_all(calls.map(|(call, text)| self.column(call, text, first_row))).await
    }

    async fn column(&self, call: &BoundCall, text: &ArrayRef, first_row: usize) -> Result<ChunkColumn> {
        let cache = &call.models.caches().vectors;
        let lookup = cache.look_up(&call.call.cache_key(&call.models), text, self.cache_bytes)?;
        let Lookup { locations, submissions, own, own_rows, duplicates, hits } = lookup;
        self.metrics.dedup_hits.add(duplicates);
        self.metrics.cache_hits.add(hits);
        let results = self.compute(call, text, own_rows.values(), first_row).await?;
        own.publish(Arc::clone(&results), &self.cache_memory);
        let mut arrays = vec![results];
        let mut locations: Vec<Option<(usize, usize)>> =
            locations.into_iter().map(|location| location.map(|(array, row)| (array as usize, row as usize))).collect();
        for (index, submission) in submissions.iter().enumerate().skip(1) {
            arrays.push(self.wait_for(call, text, first_row, (index, submission), &mut locations).await?);
        }
        let null = (arrays.len(), 0);
        arrays.push(null_value(call.field.data_type())?);
        Ok(ChunkColumn { arrays, locations: locations.into_iter().map(|location| location.unwrap_or(null)).collect() })
    }

    /// The results of another chunk's submission. If that was cancelled or failed, computes its texts here.
    async fn wait_for(
        &self,
        call: &BoundCall,
        text: &ArrayRef,
        first_row: usize,
        (index, submission): (usize, &Arc<Submission>),
        locations: &mut [Option<(usize, usize)>],
    ) -> Result<ArrayRef> {
        if let Some(results) = submission.completed().await {
            return Ok(results);
        }
        let mut rows: Vec<u64> = Vec::new();
        let mut new_rows: HashMap<usize, usize> = HashMap::new();
        for (row, location) in locations.iter_mut().enumerate() {
            if let Some((array, index_in_array)) = location
                && *array == index
            {
                *index_in_array = *new_rows.entry(*index_in_array).or_insert_with(|| {
                    rows.push(row as u64);
                    rows.len() - 1
                });
            }
        }
        self.compute(call, text, &rows, first_row).await
    }

    /// Evaluates a call for some rows of a chunk.
    async fn compute(&self, call: &BoundCall, text: &ArrayRef, rows: &[u64], first_row: usize) -> Result<ArrayRef> {
        if rows.is_empty() {
            return Ok(new_empty_array(call.field.data_type()));
        }
        let texts = take(text, &UInt64Array::from(rows.to_vec()), None)?;
        let embedder = call.embedder().await?;
        let failed = |error| self.failed(call, error, rows, first_row);
        let pending = embedder.submit_async(&texts).await.map_err(failed)?;
        let embedded = pending.await.map_err(failed)?;
        self.metrics.add(&embedded);
        if !call.call.kind.is_score() {
            return call.call.column(&call.models, &texts, embedded);
        }
        // The softmax over the vocabulary takes longer than the biLM.
        let call = call.clone();
        let scored = SpawnedTask::spawn_blocking(move || call.call.column(&call.models, &texts, embedded)).join().await;
        scored.map_err(|e| exec_datafusion_err!("texts were not scored: {e}"))?
    }

    /// Adds the row's number in its partition to the error of a row.
    fn failed(&self, call: &BoundCall, error: elmo::Error, rows: &[u64], first_row: usize) -> DataFusionError {
        let elmo::Error::Row { row, reason } = error else { return call.call.failed(error) };
        let row = rows.get(row).map_or(first_row, |row| first_row + *row as usize);
        let message = match self.partition {
            0 => format!("row {row}: {reason}"),
            partition => format!("row {row} of partition {partition}: {reason}"),
        };
        let reason = elmo::RowError::reported(reason.label(), message);
        call.call.failed(elmo::Error::Row { row, reason })
    }
}
