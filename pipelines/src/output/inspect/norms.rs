//! Minimum, maximum and median of the norms of all vectors, in bounded memory.

/// Norms kept for the median.
const MAX_KEPT: usize = 1 << 21;

/// Norms seen so far. For the median, every `step`-th norm is kept; the step doubles when too many are.
#[derive(Debug)]
pub(super) struct Norms {
    seen: u64,
    step: u64,
    kept: Vec<f32>,
    pub(super) min: f32,
    pub(super) max: f32,
}

impl Default for Norms {
    fn default() -> Self {
        Self { seen: 0, step: 1, kept: Vec::new(), min: f32::INFINITY, max: f32::NEG_INFINITY }
    }
}

impl Norms {
    pub(super) fn add(&mut self, norm: f32) {
        if self.seen.is_multiple_of(self.step) {
            self.kept.push(norm);
        }
        self.seen += 1;
        (self.min, self.max) = (self.min.min(norm), self.max.max(norm));
        if self.kept.len() > MAX_KEPT {
            self.keep_every_second();
        }
    }

    fn keep_every_second(&mut self) {
        let mut place = 0;
        self.kept.retain(|_| {
            place += 1;
            place % 2 == 1
        });
        self.step *= 2;
    }

    /// The median of the kept norms; `None` when there are none.
    pub(super) fn median(&mut self) -> Option<f32> {
        let middle = self.kept.len() / 2;
        (!self.kept.is_empty()).then(|| *self.kept.select_nth_unstable_by(middle, f32::total_cmp).1)
    }
}
