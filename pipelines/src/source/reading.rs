//! How inputs are read where their names do not tell.

use std::{collections::BTreeMap, fmt, str::FromStr};

use elmo::spec::SpecError;
use serde::{Deserialize, Serialize};

use super::Format;

/// Options for reading the inputs of a job, the same for all inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Reading {
    /// The format; `None` to derive it from the name of each file.
    pub format: Option<Format>,
    /// The cell delimiter of CSV and TSV; `None` for the default, a comma or a tab.
    pub delimiter: Option<Delimiter>,
    /// Whether CSV and TSV have no header line; columns are then named `column_1`, `column_2` and so on.
    pub no_header: bool,
    /// The policy for malformed rows.
    pub malformed: OnMalformed,
}

/// The setting of a job for [`Reading::format`].
const FORMAT: &str = "input-format";
const DELIMITER: &str = "delimiter";
const NO_HEADER: &str = "no-header";

impl Reading {
    /// The settings that are part of the identity of a job: those that differ from the default. The policy for malformed
    /// rows is recorded apart, as it may change until there is such a row.
    pub fn settings(&self) -> Vec<(String, String)> {
        let format = self.format.map(|format| (FORMAT, format.word().to_owned()));
        let delimiter = self.delimiter.map(|delimiter| (DELIMITER, delimiter.to_string()));
        let no_header = self.no_header.then(|| (NO_HEADER, "true".to_owned()));
        [format, delimiter, no_header].into_iter().flatten().map(|(key, value)| (key.to_owned(), value)).collect()
    }

    /// The reading of a job with these settings. Unknown values are those of no version, and ignored.
    pub fn of_settings(settings: &BTreeMap<String, String>) -> Self {
        let value = |key: &str| settings.get(key);
        Self {
            format: value(FORMAT).and_then(|word| Format::from_word(word)),
            delimiter: value(DELIMITER).and_then(|word| word.parse().ok()),
            no_header: value(NO_HEADER).is_some(),
            malformed: settings.get(OnMalformed::SETTING).and_then(|word| word.parse().ok()).unwrap_or_default(),
        }
    }

    /// The cells of a file of `format`.
    pub(super) fn cells(&self, format: Format) -> Cells {
        let usual = if format == Format::Tsv { b'\t' } else { b',' };
        Cells { delimiter: self.delimiter.map_or(usual, |delimiter| delimiter.0), header: !self.no_header }
    }
}

/// How lines of CSV and TSV are divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cells {
    pub(super) delimiter: u8,
    /// Whether the first line holds the names of the columns.
    pub(super) header: bool,
}

/// A character that separates cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delimiter(u8);

impl FromStr for Delimiter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "\\t" | "tab" | "\t" => Ok(Self(b'\t')),
            "\"" | "\n" | "\r" => Err("a quotation mark or a line end cannot separate cells".to_owned()),
            _ => match text.as_bytes() {
                [byte] if byte.is_ascii() => Ok(Self(*byte)),
                _ => Err("it must be one ASCII character, or \\t for a tab".to_owned()),
            },
        }
    }
}

impl fmt::Display for Delimiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            b'\t' => f.write_str("\\t"),
            byte => write!(f, "{}", char::from(byte)),
        }
    }
}

/// What happens to a row that is not valid in its format: a CSV row with another number of cells than the first line has or
/// with bytes that are not UTF-8, a line of JSON that is not one object. A value of another type than its column's is
/// no such row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum OnMalformed {
    /// It ends the job.
    #[default]
    Fail,
    /// It is left out and counted.
    Skip,
}

impl OnMalformed {
    /// The legal words.
    pub const WORDS: &'static [&'static str] = &["fail", "skip"];
    /// The setting of a job.
    pub const SETTING: &'static str = "on-malformed";

    /// The word for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Fail => "fail",
            Self::Skip => "skip",
        }
    }
}

impl FromStr for OnMalformed {
    type Err = SpecError;

    fn from_str(word: &str) -> Result<Self, SpecError> {
        match word {
            "fail" => Ok(Self::Fail),
            "skip" => Ok(Self::Skip),
            _ => Err(SpecError::Value { option: "on-malformed", value: word.to_owned(), legal: Self::WORDS.to_vec() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_separate_cells() {
        for (text, byte) in [(";", b';'), ("|", b'|'), ("\\t", b'\t'), ("tab", b'\t'), ("\t", b'\t'), (" ", b' ')] {
            assert_eq!(text.parse(), Ok(Delimiter(byte)));
        }
        for wrong in ["", "\"", "\n", "\r", ";;", "é", "\\n"] {
            wrong.parse::<Delimiter>().unwrap_err();
        }
    }

    #[test]
    fn the_settings_of_a_job_are_how_it_read() {
        let readings = [
            Reading::default(),
            Reading { format: Some(Format::Tsv), ..Reading::default() },
            Reading { delimiter: Some(Delimiter(b'\t')), no_header: true, ..Reading::default() },
        ];
        for reading in readings {
            assert_eq!(Reading::of_settings(&reading.settings().into_iter().collect()), reading);
        }
        assert!(Reading::default().settings().is_empty());
    }
}
