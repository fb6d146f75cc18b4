//! How sentences of different lengths share one batch without padding. Pure: no tensors here.
//!
//! Sentences become *rows*, longest first. Time step `t` holds only the rows that still have a token
//! there: a prefix, because rows are sorted. The steps lie one after the other, so a whole layer is
//! one matrix of `packed_rows` rows:
//!
//! ```text
//!            row 0  row 1  row 2
//! step 0  |  a1     b1     c1           sentences a b c of 3, 2 and 1 tokens
//! step 1  |  a2     b2
//! step 2  |  a3
//! ```
//!
//! The backward direction has the same steps and reads each row from its own last token. No step is
//! narrower than [`MIN_WIDTH`]: products of fewer rows may take another kernel and give other bits.

/// Narrowest matrix product that the model runs, in rows.
///
/// libtorch multiplies small matrices with other kernels, whose sums differ in the last bit; from 16
/// rows on, a row's result was the same at every height on every CPU we measured. The self-test
/// (`self_test.rs`) checks it on the machine at hand.
pub(crate) const MIN_WIDTH: usize = 16;

/// One time step of a packed batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step {
    /// First packed row.
    pub(crate) offset: usize,
    /// Rows that have a token at this step.
    pub(crate) live: usize,
    /// Rows that the step computes: `live`, filled up to [`MIN_WIDTH`].
    pub(crate) width: usize,
}

/// A run of steps whose input product is computed at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// First step.
    pub(crate) first: usize,
    /// One past the last step.
    pub(crate) end: usize,
    /// First packed row.
    pub(crate) offset: usize,
    /// Packed rows.
    pub(crate) rows: usize,
}

/// Where each token of a batch lies in the packed matrices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Packing {
    /// Row -> sentence, longest sentence first; equal lengths keep their order.
    order: Vec<usize>,
    /// Sentence -> row.
    row_of: Vec<usize>,
    /// Sentence -> tokens.
    lengths: Vec<usize>,
    steps: Vec<Step>,
}

impl Packing {
    /// Packs sentences of `lengths` tokens; every length is at least 1.
    pub(crate) fn new(lengths: &[usize]) -> Self {
        debug_assert!(lengths.iter().all(|&n| n > 0), "a sentence without tokens has nothing to pack");
        let mut order: Vec<usize> = (0..lengths.len()).collect();
        order.sort_by_key(|&s| std::cmp::Reverse(lengths[s]));
        let mut row_of = vec![0; lengths.len()];
        for (row, &sentence) in order.iter().enumerate() {
            row_of[sentence] = row;
        }
        let longest = order.first().map_or(0, |&s| lengths[s]);
        let mut steps = Vec::with_capacity(longest);
        let (mut live, mut offset) = (lengths.len(), 0);
        for t in 0..longest {
            while live > 0 && lengths[order[live - 1]] <= t {
                live -= 1;
            }
            let width = live.max(MIN_WIDTH);
            steps.push(Step { offset, live, width });
            offset += width;
        }
        Self { order, row_of, lengths: lengths.to_vec(), steps }
    }

    pub(crate) fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Sentences of the batch.
    pub(crate) fn sentences(&self) -> usize {
        self.lengths.len()
    }

    /// Rows of the widest step: what state tensors need.
    pub(crate) fn width(&self) -> usize {
        self.steps.first().map_or(0, |s| s.width)
    }

    /// Rows of a packed matrix.
    pub(crate) fn packed_rows(&self) -> usize {
        self.steps.last().map_or(0, |s| s.offset + s.width)
    }

    /// Sentence of a row.
    pub(crate) fn sentence_at(&self, row: usize) -> usize {
        self.order[row]
    }

    /// Packed row at which the forward direction reads token `i` of a sentence.
    pub(crate) fn forward(&self, sentence: usize, i: usize) -> usize {
        self.steps[i].offset + self.row_of[sentence]
    }

    /// Packed row at which the backward direction reads token `i` of a sentence.
    pub(crate) fn backward(&self, sentence: usize, i: usize) -> usize {
        self.forward(sentence, self.lengths[sentence] - 1 - i)
    }

    /// Cuts the steps into chunks of at least `rows` packed rows (the last may be smaller).
    pub(crate) fn chunks(&self, rows: usize) -> Vec<Chunk> {
        let mut chunks = Vec::new();
        let mut first = 0;
        while first < self.steps.len() {
            let offset = self.steps[first].offset;
            let mut end = first;
            let mut filled = 0;
            while end < self.steps.len() && filled < rows {
                filled += self.steps[end].width;
                end += 1;
            }
            chunks.push(Chunk { first, end, offset, rows: filled });
            first = end;
        }
        chunks
    }

    /// For each direction and packed row, the index in `token_ids` (one slice per sentence) that the row reads.
    /// Rows that only fill a step up read `filler`.
    pub(crate) fn gather(&self, token_ids: &[Vec<i64>], filler: i64) -> [Vec<i64>; 2] {
        let mut index = [vec![filler; self.packed_rows()], vec![filler; self.packed_rows()]];
        for (sentence, ids) in token_ids.iter().enumerate() {
            for (i, &id) in ids.iter().enumerate() {
                index[0][self.forward(sentence, i)] = id;
                index[1][self.backward(sentence, i)] = id;
            }
        }
        index
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_of_the_module_documentation() {
        // a, b, c of 3, 2 and 1 tokens, given in another order; drawn by hand above.
        let packing = Packing::new(&[1, 3, 2]);
        let [c, a, b] = [0, 1, 2];
        assert_eq!(packing.steps().iter().map(|s| s.live).collect::<Vec<_>>(), [3, 2, 1]);
        assert_eq!(packing.forward(a, 2), 2 * MIN_WIDTH);
        assert_eq!(packing.forward(b, 1), MIN_WIDTH + 1);
        assert_eq!(packing.forward(c, 0), 2);
        assert_eq!(packing.backward(a, 2), 0);
        assert_eq!(packing.backward(b, 0), MIN_WIDTH + 1);
    }

    #[test]
    fn every_token_has_its_own_place_and_chunks_tile_the_steps() {
        for lengths in [vec![1], vec![5; 40], vec![7, 1, 1, 30, 2, 2, 19], (1..60).collect::<Vec<_>>()] {
            let packing = Packing::new(&lengths);
            let ids: Vec<Vec<i64>> = lengths.iter().map(|&n| vec![1; n]).collect();
            let total: usize = lengths.iter().sum();
            for direction in packing.gather(&ids, 0) {
                assert_eq!(direction.iter().filter(|&&id| id == 1).count(), total);
            }
            let mut next = 0;
            for chunk in packing.chunks(64) {
                assert_eq!(chunk.first, next);
                next = chunk.end;
            }
            assert_eq!(next, packing.steps().len());
            assert!(packing.steps().iter().all(|s| s.width >= MIN_WIDTH));
        }
    }
}
