//! Which words the first layer of a GPU multiplies at once. Pure: no tensors here.
//!
//! The input of this layer is the vector of a word, so all tokens of a word have the same input product. The steps of a batch are cut
//! into parts, and the words of a part are multiplied once, before its first step. Every token takes its product from there, also that
//! of a word that occurs once: a product that is rounded to 16 bits before the other one is added has other digits than one that is not,
//! and those of a token may not depend on other tokens.

use std::ops::Range;

use super::{
    batch::FILLER,
    packing::{MIN_WIDTH, Step},
};

/// The words of a batch in parts, and where its tokens find them.
#[derive(Debug)]
pub(crate) struct WordParts {
    pub(crate) parts: Vec<WordPart>,
    /// Per direction and packed row: which word of its part the row reads.
    pub(crate) places: [Vec<i64>; 2],
    /// Words of all parts and both directions, each of which is one product.
    pub(crate) products: usize,
}

/// A run of steps, and the words that are read in it.
#[derive(Debug)]
pub(crate) struct WordPart {
    pub(crate) steps: Range<usize>,
    /// Of each direction, as rows of the token table. Both have the same number, one of [`height`], filled up with words that no row reads.
    pub(crate) words: [Vec<i64>; 2],
}

/// Above this number of words, the height of a product is a multiple of it.
const TALL: usize = 1024;

/// Rows of the padded product of `words` words. There are few different heights: products of one height reuse the same memory, and a GPU selects
/// its kernel, and so the last bits of a product, by the height.
fn height(words: usize) -> usize {
    if words > TALL { words.next_multiple_of(TALL) } else { words.max(MIN_WIDTH).next_power_of_two() }
}

impl WordParts {
    /// For packed rows that read `ids` of the token table. A part has as many steps as are certain to have at most `most` words, and at least one.
    pub(crate) fn new(ids: &[Vec<i64>; 2], steps: &[Step], most: usize) -> Self {
        let table_rows = ids.iter().flatten().max().map_or(0, |&id| id as usize + 1);
        let mut directions = ids.each_ref().map(|ids| Direction::new(ids, table_rows));
        let (mut parts, mut products, mut first) = (Vec::new(), 0, 0);
        for (t, step) in steps.iter().enumerate() {
            directions.iter_mut().for_each(|direction| direction.read(step));
            let counts = directions.each_ref().map(|direction| direction.words.len());
            let count = counts[0].max(counts[1]);
            if steps.get(t + 1).is_none_or(|next| count + next.width > most) {
                let words = directions.each_mut().map(|direction| direction.take_words(height(count)));
                parts.push(WordPart { steps: first..t + 1, words });
                products += counts[0] + counts[1];
                first = t + 1;
            }
        }
        Self { parts, places: directions.map(|direction| direction.places), products }
    }
}

/// One direction while its steps are read.
struct Direction<'b> {
    /// Per packed row.
    ids: &'b [i64],
    /// Words of the present part, in the order in which they came.
    words: Vec<i64>,
    /// Row of the token table -> place in `words`.
    place_of: Vec<Option<u32>>,
    places: Vec<i64>,
}

impl<'b> Direction<'b> {
    fn new(ids: &'b [i64], table_rows: usize) -> Self {
        Self { ids, words: Vec::new(), place_of: vec![None; table_rows], places: Vec::with_capacity(ids.len()) }
    }

    fn read(&mut self, step: &Step) {
        for &word in &self.ids[step.offset..step.offset + step.width] {
            let place = *self.place_of[word as usize].get_or_insert_with(|| {
                self.words.push(word);
                self.words.len() as u32 - 1
            });
            self.places.push(i64::from(place));
        }
    }

    /// The words of the part that ends here, filled up to `count`.
    fn take_words(&mut self, count: usize) -> Vec<i64> {
        let mut words = std::mem::take(&mut self.words);
        words.iter().for_each(|&word| self.place_of[word as usize] = None);
        words.resize(count, FILLER);
        words
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;
    use crate::model::packing::Packing;

    proptest! {
        /// Expected: every row finds its own word; parts follow each other; in a part a direction has a word once; parts have at most
        /// `most` words unless they are one step, and another step might have too many.
        #[test]
        fn every_row_finds_its_word(
            lengths in prop::collection::vec(1_usize..12, 1..120),
            vocabulary in 1_i64..200,
            most in prop_oneof![Just(usize::MAX), 0_usize..100],
        ) {
            let packing = Packing::new(&lengths, MIN_WIDTH);
            let steps = packing.steps();
            let id = |row: i64, direction: i64| (row * row + row / (3 + direction)) % vocabulary;
            let ids = [0, 1].map(|direction| (0..packing.packed_rows() as i64).map(|row| id(row, direction)).collect());
            let found = WordParts::new(&ids, steps, most);

            let of_parts: Vec<usize> = found.parts.iter().flat_map(|part| part.steps.clone()).collect();
            prop_assert_eq!(of_parts, (0..steps.len()).collect::<Vec<_>>());
            let distinct = |direction: usize, steps: &[Step]| {
                let words = steps.iter().flat_map(|step| &ids[direction][step.offset..step.offset + step.width]);
                words.collect::<HashSet<_>>().len()
            };
            let mut products = 0;
            for (i, part) in found.parts.iter().enumerate() {
                let of_part = &steps[part.steps.clone()];
                let counts = [0, 1].map(|direction| distinct(direction, of_part));
                let count = counts[0].max(counts[1]);
                for (direction, words) in part.words.iter().enumerate() {
                    prop_assert_eq!(words.len(), height(count));
                    prop_assert!(words[counts[direction]..].iter().all(|&word| word == FILLER));
                    let rows = of_part[0].offset..of_part.last().map_or(0, |step| step.offset + step.width);
                    let read = found.places[direction][rows.clone()].iter().map(|&place| words[place as usize]);
                    prop_assert_eq!(read.collect::<Vec<_>>(), &ids[direction][rows]);
                }
                prop_assert!(count <= most || of_part.len() == 1);
                let next = found.parts.get(i + 1).map(|next| steps[next.steps.start].width);
                prop_assert!(next.is_none_or(|next| count + next > most));
                products += counts[0] + counts[1];
            }
            prop_assert_eq!(found.products, products);
        }
    }

    #[test]
    fn products_have_few_heights() {
        let heights = [0, 1, 16, 17, 33, 512, 513, 1024, 1025, 2048, 2049, 15_771].map(height);
        assert_eq!(heights, [16, 16, 16, 32, 64, 512, 1024, 1024, 2048, 2048, 3072, 16_384]);
    }

    /// Rows of 16; both directions read word 7 throughout, the backward one in the second step 16 others. By hand.
    #[test]
    fn words_of_both_directions_are_as_many() {
        let packing = Packing::new(&[2; MIN_WIDTH], MIN_WIDTH);
        let forward = vec![7; 2 * MIN_WIDTH];
        let backward: Vec<i64> = [vec![7; MIN_WIDTH], (10..10 + MIN_WIDTH as i64).collect()].concat();
        let found = WordParts::new(&[forward, backward.clone()], packing.steps(), 100);
        let [part] = found.parts.as_slice() else { panic!("one part was expected") };
        // 17 words become 32.
        assert_eq!(part.words[0], [&[7][..], &[FILLER; 31]].concat());
        assert_eq!(part.words[1], [&[7][..], &backward[MIN_WIDTH..], &[FILLER; 15]].concat());
        assert_eq!(found.places[0], [0; 2 * MIN_WIDTH]);
        assert_eq!(found.places[1], [vec![0; MIN_WIDTH], (1..=MIN_WIDTH as i64).collect()].concat());
        assert_eq!(found.products, 1 + (1 + MIN_WIDTH));
    }
}
