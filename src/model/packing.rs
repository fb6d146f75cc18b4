//! How sentences of different lengths share one batch without padding. Pure: no tensors here.
//!
//! Sentences lie in *rows*, one after the other where a row holds several; rows are sorted by their tokens, longest
//! first. Time step `t` holds only the rows that still have a token there: a prefix, because rows are sorted. The steps
//! lie one after the other, so a whole layer is one matrix of `packed_rows` rows:
//!
//! ```text
//!            row 0  row 1  row 2
//! step 0  |  a1     b1     c1           sentences a b c d of 3, 2, 1 and 1 tokens; d begins in row 1 at step 2,
//! step 1  |  a2     b2                  from a start state of its own
//! step 2  |  a3     d1
//! ```
//!
//! The backward direction has the same steps and reads each sentence from its own last token. No step is narrower than
//! [`MIN_WIDTH`]: products of fewer rows may take another kernel and give other bits.

/// Narrowest matrix product that the model runs, in rows.
///
/// libtorch multiplies small matrices with other kernels, whose sums differ in the last bit; from 16
/// rows on, a row's result was the same at every height on every CPU we measured. The self-test
/// (`self_test.rs`) checks it on the machine at hand.
pub(crate) const MIN_WIDTH: usize = crate::planner::MIN_ROWS;

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
    /// The sentences of each row, in the order they run; the row of most tokens first, equal ones keep their order.
    rows: Vec<Vec<usize>>,
    /// Sentence -> row and first step.
    places: Vec<(usize, usize)>,
    /// Sentence -> tokens.
    lengths: Vec<usize>,
    steps: Vec<Step>,
    /// Step -> rows in which another sentence begins after one that ended.
    begins: Vec<Vec<i64>>,
}

impl Packing {
    /// Packs sentences of `lengths` tokens, one a row; every length is at least 1.
    pub(crate) fn new(lengths: &[usize]) -> Self {
        Self::chained(lengths, (0..lengths.len()).map(|sentence| vec![sentence]).collect())
    }

    /// Packs sentences of `lengths` tokens in `rows`; every sentence is in one row.
    pub(crate) fn chained(lengths: &[usize], mut rows: Vec<Vec<usize>>) -> Self {
        debug_assert!(lengths.iter().all(|&n| n > 0), "a sentence without tokens has nothing to pack");
        let tokens = |row: &Vec<usize>| row.iter().map(|&sentence| lengths[sentence]).sum::<usize>();
        rows.sort_by_key(|row| std::cmp::Reverse(tokens(row)));
        let longest = rows.first().map_or(0, tokens);
        let mut places = vec![(0, 0); lengths.len()];
        let mut begins = vec![Vec::new(); longest];
        for (row, sentences) in rows.iter().enumerate() {
            let mut step = 0;
            for &sentence in sentences {
                places[sentence] = (row, step);
                if step > 0 {
                    begins[step].push(row as i64);
                }
                step += lengths[sentence];
            }
        }
        let totals: Vec<usize> = rows.iter().map(tokens).collect();
        Self { steps: steps(&totals), rows, places, lengths: lengths.to_vec(), begins }
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

    /// First sentence of a row.
    pub(crate) fn sentence_at(&self, row: usize) -> usize {
        self.rows[row][0]
    }

    /// Rows in which a sentence begins at step `t` where another one ended.
    pub(crate) fn begins(&self, t: usize) -> &[i64] {
        &self.begins[t]
    }

    /// Packed row at which the forward direction reads token `i` of a sentence.
    pub(crate) fn forward(&self, sentence: usize, i: usize) -> usize {
        let (row, first) = self.places[sentence];
        self.steps[first + i].offset + row
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

/// The steps of rows with so many tokens, most first.
fn steps(tokens: &[usize]) -> Vec<Step> {
    let longest = tokens.first().copied().unwrap_or(0);
    let mut steps = Vec::with_capacity(longest);
    let (mut live, mut offset) = (tokens.len(), 0);
    for t in 0..longest {
        while live > 0 && tokens[live - 1] <= t {
            live -= 1;
        }
        let width = live.max(MIN_WIDTH);
        steps.push(Step { offset, live, width });
        offset += width;
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_of_the_module_documentation() {
        // a, b, c, d of 3, 2, 1 and 1 tokens, given in another order; drawn by hand above.
        let [c, a, b, d] = [0, 1, 2, 3];
        let packing = Packing::chained(&[1, 3, 2, 1], vec![vec![c], vec![a], vec![b, d]]);
        assert_eq!(packing.steps().iter().map(|s| s.live).collect::<Vec<_>>(), [3, 2, 2]);
        assert_eq!(packing.forward(a, 2), 2 * MIN_WIDTH);
        assert_eq!(packing.forward(b, 1), MIN_WIDTH + 1);
        assert_eq!(packing.forward(d, 0), 2 * MIN_WIDTH + 1);
        assert_eq!(packing.forward(c, 0), 2);
        assert_eq!(packing.backward(a, 2), 0);
        assert_eq!(packing.backward(b, 0), MIN_WIDTH + 1);
        assert_eq!((0..3).map(|t| packing.begins(t).to_vec()).collect::<Vec<_>>(), [vec![], vec![], vec![1]]);
    }

    fn in_rows(sentences: usize, each: usize) -> Vec<Vec<usize>> {
        (0..sentences).collect::<Vec<_>>().chunks(each).map(<[usize]>::to_vec).collect()
    }

    #[test]
    fn every_token_has_its_own_place_and_chunks_tile_the_steps() {
        for lengths in [vec![1], vec![5; 40], vec![7, 1, 1, 30, 2, 2, 19], (1..60).collect::<Vec<_>>()] {
            for packing in [Packing::new(&lengths), Packing::chained(&lengths, in_rows(lengths.len(), 3))] {
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
}
