//! What one thread computes: the biLM and its loss for some rows of a window, forward and backward.

use std::{ops::Range, sync::Arc};

use tch::Tensor;

use super::{
    draws::{Draws, LaneDropout},
    loss::{Head, HeadGradients},
};
use crate::model::{BiLm, DeviceError, PackedBatch, StartState, tensors};

/// The work of one lane in one step; all tensors are handles of its own.
pub(super) struct Lane {
    pub(super) model: BiLm,
    /// Leaves of the LSTM layers.
    pub(super) leaves: Vec<Tensor>,
    /// Token vectors of the window `[U, P]`, without a graph.
    pub(super) table: Tensor,
    /// Per direction and row: indices into the table.
    pub(super) inputs: [Vec<Vec<i64>>; 2],
    pub(super) heads: [Head; 2],
    pub(super) start: StartState,
    pub(super) draws: Arc<dyn Draws>,
    pub(super) dropout: f64,
    /// Rows of this lane, numbered over the window of all processes.
    pub(super) rows: Range<usize>,
    pub(super) positions: usize,
}

/// What a lane gives back.
pub(super) struct LaneGradients {
    pub(super) heads: [HeadGradients; 2],
    /// Of the token vectors `[U, P]`.
    pub(super) table: Tensor,
    /// Of the leaves of the LSTM layers.
    pub(super) leaves: Vec<Tensor>,
    /// State after the window.
    pub(super) last: StartState,
}

impl Lane {
    pub(super) fn run(self) -> Result<LaneGradients, DeviceError> {
        let batch = PackedBatch::of_directions([&self.inputs[0], &self.inputs[1]])?;
        let (draws, rows) = (Arc::clone(&self.draws), self.rows.clone());
        let dropout = LaneDropout::new(&*draws, self.dropout, rows, self.positions, &batch);
        if self.model.can_trace(&batch) { self.trace(&batch, &dropout) } else { self.graph(&batch, &dropout) }
    }

    /// Through libtorch's graph.
    fn graph(self, batch: &PackedBatch, dropout: &LaneDropout<'_>) -> Result<LaneGradients, DeviceError> {
        let table = self.table.f_detach()?.f_set_requires_grad(true)?;
        let activations = self.model.forward(&table, batch, &self.start, dropout, true)?;
        let top = activations.n_layers() - 1;
        let outputs = [activations.tokens(top, 0)?, activations.tokens(top, 1)?]; // of [N, P]
        let forward = self.heads[0].gradients(&outputs[0].f_detach()?)?;
        let backward = self.heads[1].gradients(&outputs[1].f_detach()?)?;
        let last = activations.into_last()?.ok_or_else(|| DeviceError::internal("no state was captured"))?.detach()?;
        let ends = [product(&outputs[0], &forward.x)?, product(&outputs[1], &backward.x)?];
        let inputs: Vec<&Tensor> = std::iter::once(&table).chain(&self.leaves).collect();
        let mut gradients = Tensor::f_run_backward(&ends, &inputs, false, false)?.into_iter();
        let table = gradients.next().ok_or_else(|| DeviceError::internal("no gradient of the token vectors"))?;
        Ok(LaneGradients { heads: [forward, backward], table, leaves: gradients.collect(), last })
    }

    /// The same with passes of our own.
    fn trace(self, batch: &PackedBatch, dropout: &LaneDropout<'_>) -> Result<LaneGradients, DeviceError> {
        let trace = self.model.trace(&self.table, batch, &self.start, dropout)?;
        let top = trace.top.f_zeros_like()?; // [2, R, P]
        let head = |direction: usize| -> Result<HeadGradients, DeviceError> {
            let rows = tensors::index(&batch.rows(direction), trace.top.device())?;
            let outputs = trace.top.f_select(0, direction as i64)?.f_index_select(0, &rows)?; // [N, P]
            let gradients = self.heads[direction].gradients(&outputs)?;
            let _ = top.f_select(0, direction as i64)?.f_index_copy_(0, &rows, &gradients.x)?;
            Ok(gradients)
        };
        let heads = [head(0)?, head(1)?];
        let last = trace.last.share();
        let gradients = self.model.backward(trace, top, dropout)?;
        Ok(LaneGradients { heads, table: gradients.table, leaves: gradients.layers, last })
    }
}

/// The sum of products of two tensors of one shape: its derivative by `outputs` is `gradients`. libtorch's own way to
/// begin a backward pass with given derivatives is not in tch.
pub(super) fn product(outputs: &Tensor, gradients: &Tensor) -> Result<Tensor, DeviceError> {
    let gradients = gradients.f_to_kind(outputs.kind())?;
    Ok(outputs.f_reshape([-1])?.f_dot(&gradients.f_reshape([-1])?)?)
}
