//! How sentences of different lengths share one batch without padding. Pure: no tensors here.
//!
//! A *row* holds one sentence, or several one after the other. Rows are sorted by their number of tokens, longest
//! first. Time step `t` computes only the rows that still have a token there: a prefix, because rows are sorted. The
//! steps are stored one after the other, so a whole layer is one matrix of `packed_rows` rows:
//!
//! ```text
//!            row 0  row 1  row 2
//! step 0  |  a1     b1     c1           sentences a b c d of 3, 2, 1 and 1 tokens; d begins in row 1 at step 2,
//! step 1  |  a2     b2                  from a start state of its own
//! step 2  |  a3     d1
//! ```
//!
//! The backward direction has the same steps and reads each sentence from its own last token. Directions that read
//! different sentences have a [`Packing`] each, aligned to common steps ([`Packings`]). Where products of fewer than [`MIN_WIDTH`]
//! rows take another kernel with other bits, no step is narrower.

use std::{ops::Range, sync::Arc};

/// Minimum number of rows of a step whose products are libtorch's.
///
/// libtorch multiplies small matrices with other kernels, whose sums differ in the last bit. From 16 rows on, a row's
/// result was the same at every height on every CPU that we measured. Training, other formats than float32 and int8 on a CPU, and GPUs
/// have this minimum; our own products of a CPU do not need one.
pub(crate) const MIN_WIDTH: usize = crate::planner::MIN_ROWS;

/// One time step of a packed batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step {
    /// First packed row.
    pub(crate) offset: usize,
    /// Rows that have a token at this step.
    pub(crate) live: usize,
    /// Rows that the step computes: the `live` ones, and others whose results nothing reads.
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

/// Where each token of a batch is stored in the packed matrices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Packing {
    /// The sentences of each row, in the order they run; the row with the most tokens first. The sort is stable.
    rows: Vec<Vec<usize>>,
    /// Sentence -> row and first step.
    places: Vec<(usize, usize)>,
    /// Sentence -> tokens.
    lengths: Vec<usize>,
    steps: Vec<Step>,
    /// Step -> rows in which a sentence begins after another one ended.
    begins: Vec<Vec<i64>>,
}

impl Packing {
    /// Packs sentences of `lengths` tokens, one a row; every length is at least 1. No step has fewer than `min_width` rows.
    pub(crate) fn new(lengths: &[usize], min_width: usize) -> Self {
        Self::chained(lengths, (0..lengths.len()).map(|sentence| vec![sentence]).collect(), min_width)
    }

    /// Packs sentences of `lengths` tokens in `rows`; every sentence is in one row, and every row has one.
    pub(crate) fn chained(lengths: &[usize], mut rows: Vec<Vec<usize>>, min_width: usize) -> Self {
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
        Self { steps: steps(&totals, min_width), rows, places, lengths: lengths.to_vec(), begins }
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

    /// Whether no row holds more than one sentence.
    pub(crate) fn is_one_per_row(&self) -> bool {
        self.rows.len() == self.lengths.len()
    }

    /// Rows in which a sentence begins at step `t` after another one ended.
    pub(crate) fn begins(&self, t: usize) -> &[i64] {
        &self.begins[t]
    }

    /// For each packed row, 1 where a sentence begins after another one ended and 0 elsewhere; empty if none does.
    pub(crate) fn marks(&self) -> Vec<i64> {
        if self.begins.iter().all(Vec::is_empty) {
            return Vec::new();
        }
        let mut marks = vec![0; self.packed_rows()];
        for (step, rows) in self.steps.iter().zip(&self.begins) {
            rows.iter().for_each(|&row| marks[step.offset + row as usize] = 1);
        }
        marks
    }

    /// Rows whose last token is read at step `t`.
    pub(crate) fn ends(&self, t: usize) -> Range<usize> {
        self.steps.get(t + 1).map_or(0, |next| next.live)..self.steps[t].live
    }

    /// Packed row of the last token of each row, where rows hold one sentence each.
    pub(crate) fn last_rows(&self) -> Vec<i64> {
        (0..self.rows.len()).map(|row| self.backward(self.sentence_at(row), 0) as i64).collect()
    }

    /// Packed row of each token in reading order, sentence by sentence.
    pub(crate) fn rows_in_order(&self) -> Vec<i64> {
        let of_sentence = |sentence: usize| (0..self.lengths[sentence]).map(move |i| self.forward(sentence, i) as i64);
        (0..self.sentences()).flat_map(of_sentence).collect()
    }

    /// Row of each sentence.
    pub(crate) fn row_of_each(&self) -> Vec<i64> {
        self.places.iter().map(|&(row, _)| row as i64).collect()
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
    /// Rows without a token read `filler`.
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

    /// Widens the steps to those of `other`, and adds steps without a token where `other` has more.
    fn align_with(&mut self, other: &Self) {
        let mut offset = 0;
        for t in 0..self.steps.len().max(other.steps.len()) {
            let at = |packing: &Self| packing.steps.get(t).map_or((0, 0), |step| (step.live, step.width));
            let ((live, width), (_, other_width)) = (at(self), at(other));
            let step = Step { offset, live, width: width.max(other_width) };
            offset += step.width;
            match self.steps.get_mut(t) {
                Some(narrow) => *narrow = step,
                None => self.steps.push(step),
            }
        }
        self.begins.resize(self.steps.len(), Vec::new());
    }
}

/// The packings of both directions, with the same steps but for the rows that have a token.
#[derive(Debug, Clone)]
pub(crate) struct Packings([Arc<Packing>; 2]);

impl Packings {
    /// Both directions read the same sentences.
    pub(crate) fn alike(packing: Packing) -> Self {
        let packing = Arc::new(packing);
        Self([Arc::clone(&packing), packing])
    }

    /// Each direction reads sentences of its own. Where the lengths of rows differ between the directions, steps
    /// compute rows for the shorter direction that nothing reads.
    pub(crate) fn aligned(mut forward: Packing, mut backward: Packing) -> Self {
        forward.align_with(&backward);
        backward.align_with(&forward);
        if forward == backward { Self::alike(forward) } else { Self([Arc::new(forward), Arc::new(backward)]) }
    }

    /// The packing of direction 0 (forward) or 1 (backward).
    pub(crate) fn of(&self, direction: usize) -> &Packing {
        &self.0[direction]
    }

    /// Offsets and widths of the steps, which both directions share; `live` is that of the forward direction.
    pub(crate) fn steps(&self) -> &[Step] {
        self.0[0].steps()
    }

    /// As [`Packing::width`].
    pub(crate) fn width(&self) -> usize {
        self.0[0].width()
    }

    /// As [`Packing::packed_rows`].
    pub(crate) fn packed_rows(&self) -> usize {
        self.0[0].packed_rows()
    }

    /// Tokens of both directions.
    pub(crate) fn tokens(&self) -> usize {
        self.0.iter().flat_map(|packing| packing.steps()).map(|step| step.live).sum()
    }

    /// As [`Packing::chunks`].
    pub(crate) fn chunks(&self, rows: usize) -> Vec<Chunk> {
        self.0[0].chunks(rows)
    }

    /// Some rows of each direction.
    pub(crate) fn each(&self, rows: impl Fn(&Packing) -> Vec<i64>) -> [Vec<i64>; 2] {
        [rows(&self.0[0]), rows(&self.0[1])]
    }
}

/// The steps of rows with so many tokens, most first.
fn steps(tokens: &[usize], min_width: usize) -> Vec<Step> {
    let longest = tokens.first().copied().unwrap_or(0);
    let mut steps = Vec::with_capacity(longest);
    let (mut live, mut offset) = (tokens.len(), 0);
    for t in 0..longest {
        while live > 0 && tokens[live - 1] <= t {
            live -= 1;
        }
        let width = live.max(min_width);
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
        let packing = Packing::chained(&[1, 3, 2, 1], vec![vec![c], vec![a], vec![b, d]], MIN_WIDTH);
        assert_eq!(packing.steps().iter().map(|s| s.live).collect::<Vec<_>>(), [3, 2, 2]);
        assert_eq!(packing.forward(a, 2), 2 * MIN_WIDTH);
        assert_eq!(packing.forward(b, 1), MIN_WIDTH + 1);
        assert_eq!(packing.forward(d, 0), 2 * MIN_WIDTH + 1);
        assert_eq!(packing.forward(c, 0), 2);
        assert_eq!(packing.backward(a, 2), 0);
        assert_eq!(packing.backward(b, 0), MIN_WIDTH + 1);
        assert_eq!((0..3).map(|t| packing.begins(t).to_vec()).collect::<Vec<_>>(), [vec![], vec![], vec![1]]);
    }

    #[test]
    fn directions_of_different_lengths_share_their_steps() {
        // 20 rows of 1 token beside 3 rows of 2, 1 and 1: by hand, steps of 20 and of MIN_WIDTH rows.
        let packings = Packings::aligned(Packing::new(&[1; 20], MIN_WIDTH), Packing::new(&[1, 2, 1], MIN_WIDTH));
        let steps =
            |direction: usize| -> Vec<_> { packings.of(direction).steps().iter().map(|s| (s.live, s.width)).collect() };
        assert_eq!(steps(0), [(20, 20), (0, MIN_WIDTH)]);
        assert_eq!(steps(1), [(3, 20), (1, MIN_WIDTH)]);
        assert_eq!(packings.packed_rows(), 20 + MIN_WIDTH);
        assert_eq!(packings.of(1).rows_in_order(), [1, 0, 20, 2]); // sentence 1, the longest, is row 0
        assert_eq!((packings.of(0).ends(0), packings.of(0).ends(1)), (0..20, 0..0));
        assert_eq!((packings.of(1).ends(0), packings.of(1).ends(1)), (1..3, 0..1));
        assert!(packings.of(0).begins(1).is_empty());
    }

    fn in_rows(sentences: usize, each: usize) -> Vec<Vec<usize>> {
        (0..sentences).collect::<Vec<_>>().chunks(each).map(<[usize]>::to_vec).collect()
    }

    #[test]
    fn every_token_has_its_own_place_and_chunks_tile_the_steps() {
        for lengths in [vec![1], vec![5; 40], vec![7, 1, 1, 30, 2, 2, 19], (1..60).collect::<Vec<_>>()] {
            for (min_width, each) in [(MIN_WIDTH, 1), (MIN_WIDTH, 3), (1, 1), (1, 3)] {
                let packing = Packing::chained(&lengths, in_rows(lengths.len(), each), min_width);
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
                assert!(packing.steps().iter().all(|s| s.width == s.live.max(min_width)));
            }
        }
    }
}
