//! Names of parts and of their manifest entries.
//!
//! ```text
//! part-00001-1a2b3c4d.parquet   part 1 of a job whose settings have the fingerprint 1a2b3c4d…
//! part-00001.json               its manifest entry
//! ```
//!
//! Because of the fingerprint, a part never replaces one that was made with other settings. Outputs of format 1 have
//! part names without it.
//!
//! Parts are numbered with five digits. From 100,000 on a letter gives the number of digits (`a` six, `b` seven, …), so
//! that names sort as their numbers do: `part-99999`, `part-a100000`, …, `part-a999999`, `part-b1000000`.

/// Digits of the fingerprint in a name.
pub(super) const FINGERPRINT_DIGITS: usize = 8;

/// Name of the file of part `part`. `fingerprint` is [`Job::fingerprint`](super::Job::fingerprint).
pub fn part_name(part: usize, fingerprint: Option<&str>) -> String {
    match fingerprint {
        Some(fingerprint) => format!("{}-{fingerprint}.parquet", stem(part)),
        None => format!("{}.parquet", stem(part)),
    }
}

/// Name of the manifest entry of part `part`.
pub(super) fn entry_name(part: usize) -> String {
    format!("{}.json", stem(part))
}

/// A name of this scheme.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PartName<'n> {
    pub(super) number: usize,
    pub(super) fingerprint: Option<&'n str>,
}

/// Parses the name of a part. Names of other programs, such as `part-00000-….snappy.parquet`, are not of this scheme.
pub(super) fn parse_part(name: &str) -> Option<PartName<'_>> {
    let own = name.strip_suffix(".parquet")?;
    if let Some(number) = parse_stem(own) {
        return Some(PartName { number, fingerprint: None });
    }
    let (stem, fingerprint) = own.rsplit_once('-')?;
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let is_fingerprint = fingerprint.len() == FINGERPRINT_DIGITS && fingerprint.bytes().all(is_digit);
    let number = parse_stem(stem).filter(|_| is_fingerprint)?;
    Some(PartName { number, fingerprint: Some(fingerprint) })
}

/// Parses the name of a manifest entry.
pub(super) fn parse_entry(name: &str) -> Option<usize> {
    parse_stem(name.strip_suffix(".json")?)
}

fn stem(part: usize) -> String {
    let more = part.checked_ilog10().unwrap_or_default().saturating_sub(4);
    let letter = (b'a'..=b'z').nth(more.saturating_sub(1) as usize).filter(|_| more > 0);
    format!("part-{}{part:05}", letter.map(char::from).map(String::from).unwrap_or_default())
}

fn parse_stem(name: &str) -> Option<usize> {
    let digits = name.strip_prefix("part-")?.trim_start_matches(|c: char| c.is_ascii_lowercase());
    digits.parse().ok().filter(|number| stem(*number) == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_sort_as_numbers_do() {
        let numbers =
            [0, 9, 10, 99_998, 99_999, 100_000, 100_001, 999_999, 1_000_000, 9_999_999, 10_000_000, usize::MAX];
        for fingerprint in [None, Some("1a2b3c4d"), Some("12345678")] {
            let names = numbers.map(|number| part_name(number, fingerprint));
            assert!(names.is_sorted(), "{names:?}");
            let parsed = names.each_ref().map(|name| parse_part(name));
            assert_eq!(parsed, numbers.map(|number| Some(PartName { number, fingerprint })));
        }
        // As the documentation of this module has them.
        assert_eq!(
            [0, 99_999, 100_000, 1_000_000].map(|number| part_name(number, None)),
            ["part-00000.parquet", "part-99999.parquet", "part-a100000.parquet", "part-b1000000.parquet"]
        );
        assert_eq!(part_name(1, Some("1a2b3c4d")), "part-00001-1a2b3c4d.parquet");
        assert_eq!((entry_name(1).as_str(), parse_entry("part-00001.json")), ("part-00001.json", Some(1)));
    }

    #[test]
    fn names_of_others_are_not_parsed() {
        for name in [
            "part-0.parquet",
            "part-100000.parquet",
            "part-b100000.parquet",
            "part-a00001.parquet",
            "part-+0001.parquet",
            "part-.parquet",
            "part-00001.json",
            "part-00001-x",
            "part-00001-1a2b3c4.parquet",
            "part-00001-1A2B3C4D.parquet",
            "part-0-1a2b3c4d.parquet",
            "part-00000-5c1e3f0a-c000.snappy.parquet",
        ] {
            assert_eq!(parse_part(name), None, "{name}");
        }
        assert_eq!(parse_entry("part-00001-1a2b3c4d.json"), None);
    }
}
