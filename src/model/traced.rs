//! Forward and backward pass of the LSTM stacks without libtorch's graph, for training: in float32 on a CPU, in float32 and bfloat16 on a
//! GPU.

use tch::{Kind, Tensor};

use super::{
    BiLm, DeviceError, Dropout, PackedBatch, StartState,
    lstm::Kept,
    packing::{Packing, Packings},
    start_state::OTHER_MODEL,
    tensors,
};

/// A forward pass, and what its backward pass needs.
pub(crate) struct Trace {
    /// Outputs of the top layer `[2, R, P]` in packed rows, after dropout.
    pub(crate) top: Tensor,
    /// State after the window, row `b` for sequence `b`.
    pub(crate) last: StartState,
    kept: Vec<Kept>,
    ids: [Tensor; 2],
    words: i64,
}

/// Derivatives of what a [`Trace`] came from.
pub(crate) struct TraceGradients {
    /// Of the table of token vectors `[U, P]`.
    pub(crate) table: Tensor,
    /// Of the tensors of the LSTM layers.
    pub(crate) layers: Vec<Tensor>,
}

impl BiLm {
    /// Whether [`BiLm::trace`] can run this batch: every row has the same number of tokens.
    pub(crate) fn can_trace(&self, batch: &PackedBatch) -> bool {
        let even = |packing: &Packing| {
            let steps = packing.steps();
            packing.is_one_per_row() && steps.iter().all(|step| step.live == steps[0].live)
        };
        let layers = self.layers();
        let has_passes = layers.len() == self.state_shape().layers && layers.iter().all(|layer| layer.can_trace());
        has_passes && even(batch.packings().of(0)) && even(batch.packings().of(1))
    }

    /// As [`BiLm::forward`] with the state captured, for a batch that [`BiLm::can_trace`].
    ///
    /// # Errors
    /// As [`BiLm::forward`].
    pub(crate) fn trace(
        &self,
        table: &Tensor,
        batch: &PackedBatch,
        start: &StartState,
        dropout: &dyn Dropout,
    ) -> Result<Trace, DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        self.choose_precision();
        let words = table.size().first().copied().unwrap_or(0);
        if !batch.is_within(words) {
            return Err(DeviceError::InvalidBatch { reason: "an index of the batch is not in the token table" });
        }
        if !start.is_of(self.state_shape()) {
            return Err(DeviceError::InvalidBatch { reason: OTHER_MODEL });
        }
        let packings = batch.packings();
        let [forward, backward] = batch.ids();
        let ids = [tensors::index(forward, table.device())?, tensors::index(backward, table.device())?];
        let read = |ids: &Tensor| table.f_index_select(0, ids); // [R, P]
        let mut x = dropout.apply(0, Tensor::f_stack(&[read(&ids[0])?, read(&ids[1])?], 0)?)?; // [2, R, P]
        let mut kept = Vec::with_capacity(self.layers().len());
        for (k, (layer, start)) in self.layers().iter().zip(start.in_packed_rows(packings)?).enumerate() {
            let (y, of_layer) = layer.forward_kept(x, &start)?;
            kept.push(of_layer);
            x = dropout.apply(k + 1, y)?;
        }
        let last = last_states(&kept, packings)?;
        Ok(Trace { top: x, last, kept, ids, words })
    }

    /// The derivatives of a loss from those by the top outputs `[2, R, P]`. Dropout multiplies each value by a factor, so
    /// it is applied to derivatives as it was to values.
    ///
    /// # Errors
    /// [`DeviceError`] when the host has no room or libtorch fails.
    pub(crate) fn backward(
        &self,
        trace: Trace,
        top: Tensor,
        dropout: &dyn Dropout,
    ) -> Result<TraceGradients, DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        self.choose_precision();
        let mut layers = Vec::new(); // the top layer's first, each reversed
        let mut gradient = top;
        for (k, (layer, kept)) in self.layers().iter().zip(trace.kept).enumerate().rev() {
            gradient = dropout.apply(k + 1, gradient)?;
            let (dx, of_tensors) = layer.backward(kept, &gradient)?;
            gradient = dx;
            layers.extend(of_tensors.into_iter().rev());
        }
        layers.reverse();
        let gradient = dropout.apply(0, gradient)?;
        // A frequent word has thousands of terms, which bfloat16 could not add.
        let kind = if gradient.kind() == Kind::BFloat16 { Kind::Float } else { gradient.kind() };
        let gradient = gradient.f_to_kind(kind)?;
        let mut table = Tensor::f_zeros([trace.words, gradient.size()[2]], (kind, gradient.device()))?;
        for (direction, ids) in (0..).zip(&trace.ids) {
            let _ = table.f_index_add_(0, ids, &gradient.f_select(0, direction)?)?;
        }
        Ok(TraceGradients { table, layers })
    }
}

/// The states of all layers, without rows that nothing reads.
fn last_states(kept: &[Kept], packings: &Packings) -> Result<StartState, DeviceError> {
    let layers = kept.iter().map(Kept::last).collect::<Result<_, _>>()?;
    StartState::per_sentence(layers).in_order_of_sentences(packings)
}

#[cfg(test)]
#[path = "traced_tests.rs"]
mod traced_tests;
