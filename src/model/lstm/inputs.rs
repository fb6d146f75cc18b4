//! What one direction of a layer reads, for `fused.rs`. In the first layer the input of a token is the vector of its word, so a word that
//! occurs several times in a batch needs one input product only.

use std::{borrow::Cow, cmp::Reverse, ops::Range};

use crate::model::{packing::Step, products::Place};

/// Steps are joined until they have so many inputs of their own, whose products are computed at once: with fewer, each step would read
/// all weights of the input for a few rows.
const PART_ROWS: usize = 32;
/// With fewer repeated words, a product for them reads all weights of the input for a few rows too.
const FEWEST_REPEATED: usize = PART_ROWS;
/// At least one of so many products has to be saved, as the step then reads gates from memory that would otherwise stay in registers.
const PRODUCTS_PER_SAVED: usize = 8;
/// Memory for the input products of repeated words.
const SHARED_BYTES: usize = 16 << 20;

/// The inputs of one direction: those that several tokens share, and the others.
pub(super) struct Inputs<'x> {
    /// Inputs of repeated words, `[S, in]`.
    shared: Vec<f32>,
    /// The other inputs, `[O, in]`, in the order of the packed rows.
    own: Cow<'x, [f32]>,
    /// Numbers of an input.
    width: usize,
    parts: Vec<Part>,
    /// Packed row -> its input product: a shared one (matrix 0), or one of its part (matrix 1).
    places: Vec<Place>,
}

/// A run of steps. The input products of their own inputs are computed at once.
pub(super) struct Part {
    pub(super) steps: Range<usize>,
    /// Rows of [`Inputs::own`].
    own: Range<usize>,
}

impl<'x> Inputs<'x> {
    /// From the inputs `[R, in]` of packed rows. Rows with the same number in `words`, if given, have the same input. A product has `columns`
    /// columns.
    pub(super) fn new(x: &'x [f32], width: usize, words: Option<&[i64]>, steps: &[Step], columns: usize) -> Self {
        let words = words.unwrap_or_default();
        let repeated = repeated(words, SHARED_BYTES / (size_of::<f32>() * columns));
        let mut of_word = vec![None; repeated.iter().max().map_or(0, |&word| word + 1)];
        (0..).zip(&repeated).for_each(|(shared, &word)| of_word[word] = Some(shared));
        let shared_row = |row: usize| -> Option<usize> { *of_word.get(*words.get(row)? as usize)? };

        let rows_of = |step: &Step| step.offset..step.offset + step.width;
        let own_rows = |step: &Step| rows_of(step).filter(|&row| shared_row(row).is_none()).count();
        let mut inputs = Self {
            shared: vec![0.0; repeated.len() * width],
            own: Cow::Borrowed(if repeated.is_empty() { x } else { &[] }),
            width,
            parts: parts(steps.iter().map(own_rows)),
            places: Vec::with_capacity(x.len() / width),
        };
        let mut unread = vec![true; repeated.len()];
        for part in &inputs.parts {
            let mut own = 0;
            for row in steps[part.steps.clone()].iter().flat_map(rows_of) {
                let input = &x[row * width..][..width];
                match shared_row(row) {
                    Some(shared) => {
                        inputs.places.push(Place::new(0, shared));
                        if std::mem::take(&mut unread[shared]) {
                            inputs.shared[shared * width..][..width].copy_from_slice(input);
                        }
                    }
                    None => {
                        inputs.places.push(Place::new(1, own));
                        own += 1;
                        if !repeated.is_empty() {
                            inputs.own.to_mut().extend_from_slice(input);
                        }
                    }
                }
            }
        }
        inputs
    }

    /// Inputs that several tokens share, `[S, in]`.
    pub(super) fn shared(&self) -> &[f32] {
        &self.shared
    }

    /// Number of these.
    pub(super) fn shared_count(&self) -> usize {
        self.shared.len() / self.width
    }

    /// The other inputs of a part, `[o, in]`.
    pub(super) fn own(&self, part: &Part) -> &[f32] {
        &self.own[part.own.start * self.width..part.own.end * self.width]
    }

    pub(super) fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Row of the input product of each packed row of a step.
    pub(super) fn places(&self, step: &Step) -> &[Place] {
        &self.places[step.offset..][..step.width]
    }

    /// Input products that are not computed, as another token has the same.
    pub(super) fn saved(&self) -> usize {
        let own = self.own.len() / self.width;
        self.places.len() - own - self.shared_count()
    }
}

/// Steps, of which each has so many inputs of its own, in parts. A step with enough inputs is a part by itself, because then only one
/// panel of their gates is in memory at a time.
fn parts(own_inputs: impl Iterator<Item = usize>) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    for (t, count) in own_inputs.enumerate() {
        match parts.last_mut() {
            Some(part) if part.own.len() < PART_ROWS && count < PART_ROWS => {
                part.steps.end += 1;
                part.own.end += count;
            }
            last => {
                let first = last.map_or(0, |part| part.own.end);
                parts.push(Part { steps: t..t + 1, own: first..first + count });
            }
        }
    }
    parts
}

/// The `most` most frequent of the words that occur more than once, if these are enough and save enough products.
fn repeated(words: &[i64], most: usize) -> Vec<usize> {
    if words.len() < 2 * FEWEST_REPEATED {
        return Vec::new();
    }
    let mut uses = vec![0_usize; words.iter().max().map_or(0, |&word| word as usize + 1)];
    words.iter().for_each(|&word| uses[word as usize] += 1);
    let mut repeated: Vec<usize> = (0..uses.len()).filter(|&word| uses[word] > 1).collect();
    repeated.sort_by_key(|&word| Reverse(uses[word]));
    repeated.truncate(most);
    let saved: usize = repeated.iter().map(|&word| uses[word] - 1).sum();
    if repeated.len() < FEWEST_REPEATED || saved * PRODUCTS_PER_SAVED < words.len() { Vec::new() } else { repeated }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;
    use crate::model::packing::Packing;

    /// Inputs of two numbers that say which word they belong to.
    fn inputs_of(words: &[i64]) -> Vec<f32> {
        words.iter().flat_map(|&word| [word as f32, -(word as f32)]).collect()
    }

    /// The input that each packed row reads, as the time loop finds it.
    fn found(inputs: &Inputs<'_>, steps: &[Step]) -> Vec<f32> {
        let mut found = Vec::new();
        for part in inputs.parts() {
            let products = [inputs.shared(), inputs.own(part)];
            for place in steps[part.steps.clone()].iter().flat_map(|step| inputs.places(step)) {
                found.extend_from_slice(&products[place.matrix()][place.row() * 2..][..2]);
            }
        }
        found
    }

    proptest! {
        /// Expected: every row reads its own input; steps are in parts in their order, and joined only while they have few inputs of their
        /// own; a product that is shared is computed once.
        #[test]
        fn every_row_finds_its_input(
            lengths in prop::collection::vec(1_usize..12, 1..120),
            vocabulary in 1_i64..200,
            most in prop_oneof![Just(usize::MAX), 0_usize..60],
            known in any::<bool>(),
        ) {
            let packing = Packing::new(&lengths, 1);
            let words: Vec<i64> =
                (0..packing.packed_rows() as i64).map(|row| (row * row + row / 3) % vocabulary).collect();
            let x = inputs_of(&words);
            let columns = SHARED_BYTES / size_of::<f32>() / most.clamp(1, 1000);
            let inputs = Inputs::new(&x, 2, known.then_some(&words), packing.steps(), columns);
            prop_assert_eq!(&found(&inputs, packing.steps()), &x);

            let steps: Vec<usize> = inputs.parts().iter().flat_map(|part| part.steps.clone()).collect();
            prop_assert_eq!(steps, (0..packing.steps().len()).collect::<Vec<_>>());
            let own_rows = |steps: &[Step]| {
                steps.iter().flat_map(|step| inputs.places(step)).filter(|place| place.matrix() == 1).count()
            };
            for (i, part) in inputs.parts().iter().enumerate() {
                let steps = &packing.steps()[part.steps.clone()];
                let all_but_last = own_rows(&steps[..steps.len() - 1]);
                prop_assert_eq!(inputs.own(part).len() / 2, own_rows(steps));
                prop_assert!(all_but_last < PART_ROWS && (steps.len() == 1 || own_rows(steps) < 2 * PART_ROWS));
                let next = packing.steps().get(part.steps.end).map(|next| own_rows(std::slice::from_ref(next)));
                let is_full = own_rows(steps) >= PART_ROWS || next.is_some_and(|next| next >= PART_ROWS);
                prop_assert!(is_full || i + 1 == inputs.parts().len());
            }

            let word_of = |input: &[f32]| input[0] as i64;
            let uses = |word: i64| words.iter().filter(|&&other| other == word).count();
            let shared: HashSet<i64> = inputs.shared().chunks(2).map(word_of).collect();
            prop_assert_eq!(shared.len(), inputs.shared_count());
            prop_assert!(shared.len() * columns * size_of::<f32>() <= SHARED_BYTES);
            prop_assert!(shared.iter().all(|&word| uses(word) > 1));
            let computed: usize = inputs.parts().iter().map(|part| inputs.own(part).len() / 2).sum::<usize>() + shared.len();
            prop_assert_eq!(inputs.saved(), words.len() - computed);
            if !shared.is_empty() && most == usize::MAX {
                prop_assert_eq!(computed, words.iter().collect::<HashSet<_>>().len());
            }
            prop_assert!(known || inputs.saved() == 0);
        }
    }

    /// Words `0..40`, of which word `w` occurs `2 + w` times. Expected: the last ones, most frequent first.
    #[test]
    fn the_most_frequent_words_share_a_product() {
        let words: Vec<i64> = (0..40).flat_map(|word| vec![word; 2 + word as usize]).collect();
        assert_eq!(repeated(&words, 35), (5..40).rev().collect::<Vec<_>>());
        assert_eq!(repeated(&words, 1000).len(), 40);
        assert_eq!(repeated(&words, FEWEST_REPEATED - 1), Vec::<usize>::new());
        assert_eq!(repeated(&(0..1000).collect::<Vec<_>>(), 1000), Vec::<usize>::new());
        assert_eq!(repeated(&[], 1000), Vec::<usize>::new());
    }

    /// 40 words twice each and others once. Expected: they save 40 products, which is an eighth of 320.
    #[test]
    fn words_that_save_few_products_do_not_share() {
        let with_others = |others: i64| (0..40).chain(0..40).chain(40..40 + others).collect::<Vec<_>>();
        assert_eq!(repeated(&with_others(240), 1000).len(), 40);
        assert_eq!(repeated(&with_others(241), 1000).len(), 0);
    }
}
