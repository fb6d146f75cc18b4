//! Hive partitions: columns whose values are in the names of folders, as in `year=2024/month=7/a.parquet`.
//!
//! Pure functions over names. [`of_folders`] splits the folders of one file into keys and values, [`fields`] infers the
//! columns of all files, and [`value`] is the value of one file as an array of one row.
//!
//! Names and values are those of Hive, Spark and DuckDB: a folder with `=` is a partition, characters are percent-encoded, and
//! `__HIVE_DEFAULT_PARTITION__` is NULL. The first `=` ends the key, as in Spark and DataFusion, which does not encode `=` in
//! the values that COPY writes; DuckDB takes no folder with a second one for a partition. Types are those of DuckDB without its
//! times: BIGINT, DATE or VARCHAR. A type is inferred only if it loses nothing, so `01` stays a string.

use std::sync::Arc;

use arrow::{
    array::{ArrayRef, StringArray},
    datatypes::{DataType, Field},
    error::ArrowError,
};
use chrono::NaiveDate;

use super::rows::convert;

/// The value that stands for NULL.
pub(crate) const NULL: &str = "__HIVE_DEFAULT_PARTITION__";

/// The partition that one folder names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    /// Name of the column.
    pub key: String,
    /// Its value as it is written, decoded; `None` for NULL.
    pub value: Option<String>,
}

impl Partition {
    /// The partition that a folder with this name is; `None` for any other folder.
    pub fn of_folder(name: &str) -> Option<Self> {
        let (key, value) = name.split_once('=').filter(|(key, _)| !key.is_empty())?;
        let value = (value != NULL).then(|| decoded(value));
        Some(Self { key: decoded(key), value })
    }
}

/// The partitions of a file in these folders, the outermost first. Of two folders with the same key the outer one counts,
/// as in DuckDB.
pub fn of_folders<'n>(folders: impl IntoIterator<Item = &'n str>) -> Vec<Partition> {
    let mut partitions = Vec::<Partition>::new();
    for partition in folders.into_iter().filter_map(Partition::of_folder) {
        if partitions.iter().all(|known| known.key != partition.key) {
            partitions.push(partition);
        }
    }
    partitions
}

/// The columns of files with these partitions, in the order in which they are first seen: BIGINT (Int64) if all values are
/// integers, DATE (Date32) if all are dates, otherwise VARCHAR (Utf8). NULL fits every type. A file that lacks a key has
/// NULL there.
pub fn fields<'f>(files: impl IntoIterator<Item = &'f [Partition]>) -> Vec<Field> {
    let mut columns = Vec::<(&str, Vec<&str>)>::new();
    for Partition { key, value } in files.into_iter().flatten() {
        let place = columns.iter().position(|(name, _)| name == key).unwrap_or_else(|| {
            columns.push((key, Vec::new()));
            columns.len() - 1
        });
        // Thousands of files have few values.
        if let Some(value) = value.as_deref().filter(|value| columns[place].1.last() != Some(value)) {
            columns[place].1.push(value);
        }
    }
    columns.into_iter().map(|(name, values)| Field::new(name, type_of(&values), true)).collect()
}

fn type_of(values: &[&str]) -> DataType {
    let all = |is_it: fn(&str) -> bool| !values.is_empty() && values.iter().all(|value| is_it(value));
    match () {
        () if all(is_integer) => DataType::Int64,
        () if all(is_date) => DataType::Date32,
        () => DataType::Utf8,
    }
}

fn is_integer(value: &str) -> bool {
    value.parse::<i64>().is_ok_and(|number| number.to_string() == value)
}

fn is_date(value: &str) -> bool {
    const FORMAT: &str = "%Y-%m-%d";
    NaiveDate::parse_from_str(value, FORMAT).is_ok_and(|date| date.format(FORMAT).to_string() == value)
}

/// A value as an array of one row. `kind` is a type that [`fields`] returned, or a wider one.
///
/// # Errors
/// [`ArrowError`] when the value does not fit `kind` without loss.
pub fn value(value: Option<&str>, kind: &DataType) -> Result<ArrayRef, ArrowError> {
    let written: ArrayRef = Arc::new(StringArray::from(vec![value]));
    convert(&written, kind)
}

/// Decodes `%20`. What is no code stays as it is, and so does a name whose bytes are not UTF-8.
fn decoded(name: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), name.as_bytes());
    while let [first, after @ ..] = rest {
        let code = after.first_chunk::<2>().filter(|_| *first == b'%').and_then(|digits| byte_of(*digits));
        bytes.push(code.unwrap_or(*first));
        rest = if code.is_some() { &after[2..] } else { after };
    }
    String::from_utf8(bytes).unwrap_or_else(|_| name.to_owned())
}

fn byte_of(digits: [u8; 2]) -> Option<u8> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    Some(digit(digits[0])? << 4 | digit(digits[1])?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(paths: &[&str]) -> Vec<Vec<Partition>> {
        paths.iter().map(|path| of_folders(path.split('/'))).collect()
    }

    /// The types that DuckDB 2.0 gives for the same folders (`read_csv('**/*.csv', hive_partitioning = true)`), with one
    /// exception: DuckDB takes `2024-1-3` for a date.
    #[test]
    fn types_are_those_of_duckdb() {
        use DataType::{Date32, Int64, Utf8};
        let cases: [(&[&str], DataType); 20] = [
            (&["d=2024", "d=2023"], Int64),
            (&["d=01", "d=2"], Utf8),
            (&["d=+1"], Utf8),
            (&["d=-1", "d=2"], Int64),
            (&["d=9223372036854775807", "d=-9223372036854775808"], Int64),
            (&["d=9223372036854775808"], Utf8),
            (&["d=1.5"], Utf8),
            (&["d=1e3"], Utf8),
            (&["d=00"], Utf8),
            (&["d=true"], Utf8),
            (&["d=2024-01-31"], Date32),
            (&["d=2024-02-30"], Utf8),
            (&["d=2024%2F02%2F03"], Utf8),
            (&["d=2024-01-31", "d=5"], Utf8),
            (&["d=5", "d=a"], Utf8),
            (&["d=__HIVE_DEFAULT_PARTITION__", "d=5"], Int64),
            (&["d=__HIVE_DEFAULT_PARTITION__", "d=2024-01-01"], Date32),
            (&["d=__HIVE_DEFAULT_PARTITION__"], Utf8),
            (&["d=", "d=5"], Utf8),
            (&["d=2024-1-3"], Utf8),
        ];
        for (paths, expected) in cases {
            let files = files(paths);
            let found = fields(files.iter().map(Vec::as_slice));
            assert_eq!(found, [Field::new("d", expected.clone(), true)], "{paths:?}");
            for file in &files {
                let array = value(file[0].value.as_deref(), &expected).unwrap();
                assert_eq!(array.len() - array.null_count(), usize::from(file[0].value.is_some()));
            }
        }
    }

    #[test]
    fn keys_and_values_of_folders() {
        let shown = |path: &str| -> Vec<(String, Option<String>)> {
            of_folders(path.split('/')).into_iter().map(|partition| (partition.key, partition.value)).collect()
        };
        let pair = |key: &str, value: &str| (key.to_owned(), Some(value.to_owned()));
        assert_eq!(shown("year=2024/raw/month=01"), [pair("year", "2024"), pair("month", "01")]);
        assert_eq!(shown("d=a%20b%2Fc/e=a+b"), [pair("d", "a b/c"), pair("e", "a+b")]);
        assert_eq!(shown("a%3Db=%c3%A9"), [pair("a=b", "é")]);
        assert_eq!(
            shown("d=100%/e=%zz/f=%FF/g=%4"),
            [pair("d", "100%"), pair("e", "%zz"), pair("f", "%FF"), pair("g", "%4")]
        );
        assert_eq!(shown("a=1/a=2"), [pair("a", "1")]);
        // Spark: PartitioningUtils.parsePartitionColumn takes the first `=`.
        assert_eq!(shown("a=b=c/d==/=1/plain"), [pair("a", "b=c"), pair("d", "=")]);
        assert_eq!(shown("d=__HIVE_DEFAULT_PARTITION__"), [("d".to_owned(), None)]);
    }

    #[test]
    fn columns_come_in_the_order_in_which_they_are_seen() {
        let files = files(&["a=1/b=x", "plain", "c=2024-01-01/a=2"]);
        let found = fields(files.iter().map(Vec::as_slice));
        let expected = [("a", DataType::Int64), ("b", DataType::Utf8), ("c", DataType::Date32)];
        assert_eq!(found, expected.map(|(name, kind)| Field::new(name, kind, true)));
    }
}
