//! English words that keep their full stop: the list of the Moses tools, in byte order.

/// Words that always keep it.
const ALWAYS: [&str; 102] = [
    "A", "Adj", "Adm", "Adv", "Apr", "Asst", "Aug", "B", "Bart", "Bldg", "Brig", "Bros", "C", "Capt", "Cmdr", "Col",
    "Comdr", "Con", "Corp", "Cpl", "D", "DR", "Dec", "Dr", "Drs", "E", "Ens", "F", "Feb", "G", "Gen", "Gov", "H",
    "Hon", "Hosp", "Hr", "I", "Insp", "J", "Jan", "Jul", "Jun", "K", "L", "Lt", "M", "MM", "MR", "MRS", "MS", "Maj",
    "Mar", "Messrs", "Mlle", "Mme", "Mr", "Mrs", "Ms", "Msgr", "N", "Nos", "Nov", "Nr", "O", "Oct", "Op", "Ord", "P",
    "Pfc", "Ph", "Prof", "Pvt", "Q", "R", "Rep", "Reps", "Res", "Rev", "Rs", "Rt", "S", "Sen", "Sens", "Sep", "Sfc",
    "Sgt", "Sr", "St", "Supt", "Surg", "T", "U", "V", "W", "X", "Y", "Z", "e.g", "i.e", "rev", "v", "vs",
];

/// Words that keep it before a number: `No. 7`.
const BEFORE_NUMBER: [&str; 3] = ["Art", "No", "pp"];

/// Whether `word`, given by its characters without the full stop, always keeps it.
pub(super) fn keeps_period(word: impl Iterator<Item = char> + Clone) -> bool {
    contains(&ALWAYS, word)
}

/// Whether `word` keeps its full stop when a number follows.
pub(super) fn keeps_period_before_number(word: impl Iterator<Item = char> + Clone) -> bool {
    contains(&BEFORE_NUMBER, word)
}

fn contains(sorted: &[&str], word: impl Iterator<Item = char> + Clone) -> bool {
    sorted.binary_search_by(|entry| entry.chars().cmp(word.clone())).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lists_are_sorted() {
        assert!(ALWAYS.is_sorted() && BEFORE_NUMBER.is_sorted());
        assert!(keeps_period("Dr".chars()) && !keeps_period("Drum".chars()) && !keeps_period("".chars()));
        assert!(keeps_period_before_number("No".chars()) && !keeps_period("No".chars()));
    }
}
