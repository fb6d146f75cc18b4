//! The input of the two directions: sentences in packed rows.

use super::{
    DeviceError,
    packing::{MIN_WIDTH, Packing, Packings},
};

/// What each direction of the biLM reads in one batch: sequences of tokens, packed into rows, each token an index into
/// a table of token vectors (`[U, P]`, [`BiLm::token_table`](super::BiLm::token_table)).
#[derive(Debug)]
pub struct PackedBatch {
    packings: Packings,
    /// Per direction and packed row: an index into the token table.
    ids: [Vec<i64>; 2],
}

/// Index that packed rows without a token read. Nothing reads what comes of it.
pub(super) const FILLER: i64 = 0;

impl PackedBatch {
    /// Both directions read the same sentences, one per row. Ids are in the order of the text: the backward direction
    /// reads each sentence from its last token.
    ///
    /// # Errors
    /// [`DeviceError::InvalidBatch`] when there is no sentence or one has no token.
    pub fn of_sentences(sentences: &[Vec<i64>]) -> Result<Self, DeviceError> {
        Self::of_sentences_in(sentences, MIN_WIDTH)
    }

    /// As [`PackedBatch::of_sentences`], in steps of at least `min_width` rows.
    pub(crate) fn of_sentences_in(sentences: &[Vec<i64>], min_width: usize) -> Result<Self, DeviceError> {
        let packing = Packing::new(&lengths(sentences)?, min_width);
        Ok(Self { ids: packing.gather(sentences, FILLER), packings: Packings::alike(packing) })
    }

    /// As [`PackedBatch::of_sentences`], with several sentences in a row, one after the other: `rows` holds every index
    /// into `sentences` once. Rows of about equal numbers of tokens leave no padding.
    ///
    /// # Errors
    /// [`DeviceError::InvalidBatch`] also when a sentence is in no row or in two, or a row has none.
    pub fn of_rows(sentences: &[Vec<i64>], rows: Vec<Vec<usize>>) -> Result<Self, DeviceError> {
        Self::of_rows_in(sentences, rows, MIN_WIDTH)
    }

    /// As [`PackedBatch::of_rows`], in steps of at least `min_width` rows.
    pub(crate) fn of_rows_in(
        sentences: &[Vec<i64>],
        rows: Vec<Vec<usize>>,
        min_width: usize,
    ) -> Result<Self, DeviceError> {
        let mut places = rows.concat();
        places.sort_unstable();
        if !places.into_iter().eq(0..sentences.len()) {
            return Err(DeviceError::InvalidBatch { reason: "every sentence must be in one row" });
        }
        if rows.iter().any(Vec::is_empty) {
            return Err(DeviceError::InvalidBatch { reason: "every row must have a sentence" });
        }
        let packing = Packing::chained(&lengths(sentences)?, rows, min_width);
        Ok(Self { ids: packing.gather(sentences, FILLER), packings: Packings::alike(packing) })
    }

    /// Each direction reads sequences of its own, one per row: `sequences` are those of the forward and of the backward
    /// direction. Ids are in reading order: either direction reads a sequence from its first id to its last.
    ///
    /// This is what training reads: windows of two independent streams, with the state carried from window to window.
    ///
    /// # Errors
    /// [`DeviceError::InvalidBatch`] when a direction has no sequence, one has no token, or the directions differ in
    /// the number of sequences.
    pub fn of_directions(sequences: [&[Vec<i64>]; 2]) -> Result<Self, DeviceError> {
        let [forward, backward] = sequences;
        if forward.len() != backward.len() {
            return Err(DeviceError::InvalidBatch { reason: "both directions must have the same number of rows" });
        }
        let packing = |sequences: &[Vec<i64>]| Ok::<_, DeviceError>(Packing::new(&lengths(sequences)?, MIN_WIDTH));
        let packings = Packings::aligned(packing(forward)?, packing(backward)?);
        // Reading order is the order of the forward direction.
        let [forward, _] = packings.of(0).gather(forward, FILLER);
        let [backward, _] = packings.of(1).gather(backward, FILLER);
        Ok(Self { ids: [forward, backward], packings })
    }

    /// Packed row of each token of a direction (0 is forward, 1 backward): sequence by sequence in the order in which
    /// they were given, each in reading order.
    pub fn rows(&self, direction: usize) -> Vec<i64> {
        self.packings.of(direction).rows_in_order()
    }

    /// Rows of a layer, `R` in `[2, R, P]`: the tokens of a direction, and rows that nothing reads.
    pub fn packed_rows(&self) -> usize {
        self.packings.packed_rows()
    }

    /// Whether every index is that of a row of a table of so many.
    pub(crate) fn is_within(&self, table_rows: i64) -> bool {
        self.ids.iter().flatten().all(|id| (0..table_rows).contains(id))
    }

    pub(crate) fn packings(&self) -> &Packings {
        &self.packings
    }

    /// Per direction and packed row: an index into the token table.
    pub(crate) fn ids(&self) -> &[Vec<i64>; 2] {
        &self.ids
    }
}

/// Tokens of each sequence.
fn lengths(sequences: &[Vec<i64>]) -> Result<Vec<usize>, DeviceError> {
    if sequences.is_empty() || sequences.iter().any(Vec::is_empty) {
        return Err(DeviceError::InvalidBatch { reason: "a batch needs a sentence, and each sentence a token" });
    }
    Ok(sequences.iter().map(Vec::len).collect())
}
