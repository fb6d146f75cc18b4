//! Compares the columns of `elmo score`.

use arrow::{
    array::{Array, ArrayRef, AsArray, StructArray},
    compute::cast,
    datatypes::{DataType, Float32Type, Float64Type},
};
use elmo::surprisal::{perplexity_type, surprisal_type};

use super::{
    compare::{compare_numbers, tokens_of_row, unequal_columns},
    report::{Compared, Mismatch},
};

/// The counts beside a perplexity.
const COUNTS: [&str; 2] = ["tokens", "unknown"];

/// Whether a recomputed column holds scores.
pub(super) fn are_scores(column: &ArrayRef) -> bool {
    let kind = column.data_type();
    *kind == perplexity_type() || *kind == surprisal_type()
}

/// Compares a row that is NULL in neither column.
pub(super) fn compare(found: &ArrayRef, recomputed: &ArrayRef, row: usize, compared: &mut Compared) {
    let rows = match recomputed.as_struct_opt() {
        Some(recomputed) => found.as_struct_opt().map(|found| (found.slice(row, 1), recomputed.slice(row, 1))),
        None => tokens_of_row(found, row).zip(tokens_of_row(recomputed, row)),
    };
    match rows {
        Some((found, recomputed)) if found.len() == recomputed.len() => compare_items(&found, &recomputed, compared),
        _ => {
            compared.mismatches.insert(Mismatch::Shape);
        }
    }
}

/// Compares a perplexity, or the surprisals of the tokens of a text.
fn compare_items(found: &StructArray, recomputed: &StructArray, compared: &mut Compared) {
    compared.scores += recomputed.len() as u64;
    compared.mismatches.extend(unequal_columns(found, recomputed));
    for (field, recomputed) in recomputed.fields().iter().zip(recomputed.columns()) {
        let column = found.column_by_name(field.name());
        // Other writers have other types.
        let column = column.and_then(|column| cast(column, recomputed.data_type()).ok());
        let Some(found) = column.filter(|column| column.null_count() == 0) else {
            compared.mismatches.insert(Mismatch::Shape);
            continue;
        };
        match recomputed.data_type() {
            DataType::Float32 => {
                let numbers = |column: &ArrayRef| column.as_primitive::<Float32Type>().values().clone();
                compare_numbers(&numbers(&found), &numbers(recomputed), compared);
            }
            DataType::Float64 => compare_perplexities(&found, recomputed, compared),
            DataType::UInt32 if COUNTS.contains(&field.name().as_str()) && found.to_data() != recomputed.to_data() => {
                compared.mismatches.insert(Mismatch::Tokens);
            }
            // The columns that tokens have at token level too.
            _ => {}
        }
    }
}

/// Perplexities may be large, so their logarithms are subtracted: these are means of the numbers that the model computes.
fn compare_perplexities(found: &ArrayRef, recomputed: &ArrayRef, compared: &mut Compared) {
    let numbers = |column: &ArrayRef| column.as_primitive::<Float64Type>().values().clone();
    for (x, y) in numbers(found).iter().zip(numbers(recomputed).iter()) {
        if x.to_bits() == y.to_bits() {
            continue;
        }
        compared.bits_differ = true;
        let difference = (x.ln() - y.ln()).abs() as f32;
        if difference.is_finite() {
            compared.largest = compared.largest.max(difference);
        } else {
            compared.mismatches.insert(Mismatch::NotFinite);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, sync::Arc};

    use arrow::array::{Float64Array, UInt32Array};

    use super::*;

    fn perplexity(average: f64, tokens: u32) -> ArrayRef {
        let DataType::Struct(fields) = perplexity_type() else { panic!("not a struct") };
        let number = |value: f64| Arc::new(Float64Array::from(vec![value])) as ArrayRef;
        let count = |value: u32| Arc::new(UInt32Array::from(vec![value])) as ArrayRef;
        let columns = vec![number(average), number(3.0), number(4.0), count(tokens), count(1)];
        Arc::new(StructArray::new(fields, columns, None))
    }

    fn compared(found: &ArrayRef, recomputed: &ArrayRef) -> Compared {
        let mut compared = Compared::default();
        compare(found, recomputed, 0, &mut compared);
        compared
    }

    /// By hand: ln 2e6 - ln 1e6 = ln 2.
    #[test]
    fn perplexities_are_compared_by_their_logarithms() {
        let same = compared(&perplexity(5.0, 7), &perplexity(5.0, 7));
        assert!(same.mismatches.is_empty() && !same.bits_differ && same.scores == 1);
        let other = compared(&perplexity(2e6, 7), &perplexity(1e6, 7));
        assert!(other.bits_differ && (other.largest - std::f32::consts::LN_2).abs() < 1e-6, "{other:?}");
        assert!(other.mismatches.is_empty());
        assert_eq!(compared(&perplexity(5.0, 8), &perplexity(5.0, 7)).mismatches, BTreeSet::from([Mismatch::Tokens]));
        let infinite = compared(&perplexity(f64::INFINITY, 7), &perplexity(5.0, 7));
        assert_eq!(infinite.mismatches, BTreeSet::from([Mismatch::NotFinite]));
        let text: ArrayRef = Arc::new(UInt32Array::from(vec![1]));
        assert_eq!(compared(&text, &perplexity(5.0, 7)).mismatches, BTreeSet::from([Mismatch::Shape]));
    }
}
