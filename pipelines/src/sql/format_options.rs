//! Checks the OPTIONS of COPY and CREATE EXTERNAL TABLE. DataFusion's errors name no legal option, and it ignores all options
//! of Arrow and Avro.

use datafusion::{
    common::config::{ConfigFileType, TableOptions},
    error::DataFusionError,
    sql::sqlparser::ast::Value,
};

use super::{error::message, nearest::nearest};
use crate::error::{Error, Result};

/// A statement with OPTIONS.
pub(super) struct Options<'a> {
    /// How messages call it.
    pub(super) statement: &'static str,
    /// The file type, in upper case.
    pub(super) file_type: &'a str,
    /// Legal options that are not those of the format.
    pub(super) others: &'static [&'static str],
    pub(super) given: &'a [(String, Value)],
}

impl Options<'_> {
    /// Checks names and values.
    ///
    /// # Errors
    /// [`Error::Usage`] that names the nearest and all legal options, or the legal values.
    pub(super) fn check(&self) -> Result<()> {
        let mut table = self.table_options();
        for (key, value) in self.given {
            let key = key.to_lowercase();
            let of_format = if key.contains('.') { key.strip_prefix("format.") } else { Some(key.as_str()) };
            match (of_format, &mut table) {
                _ if self.others.contains(&key.as_str()) => {}
                (Some(name), Some(table)) => {
                    // A value that is no string, number or boolean is rejected by DataFusion.
                    let set = text_of(value).map(|text| table.set(&format!("format.{name}"), &text));
                    set.unwrap_or(Ok(())).map_err(|error| self.rejected(name, &error))?;
                }
                (name, _) => return Err(self.unknown(name.unwrap_or(&key))),
            }
        }
        Ok(())
    }

    /// DataFusion's settings of the format; `None` for a format without any.
    fn table_options(&self) -> Option<TableOptions> {
        let format = match self.file_type {
            "CSV" | "TSV" => ConfigFileType::CSV,
            "JSON" => ConfigFileType::JSON,
            "PARQUET" => ConfigFileType::PARQUET,
            _ => return None,
        };
        let mut options = TableOptions::default();
        options.set_config_format(format);
        Some(options)
    }

    fn rejected(&self, name: &str, error: &DataFusionError) -> Error {
        let base = name.split("::").next().unwrap_or(name);
        if !self.legal().iter().any(|legal| legal == base) {
            return self.unknown(name);
        }
        // The value is one of the statement, and no row's.
        let reason = match error.find_root() {
            DataFusionError::External(inner) => inner.to_string(),
            other => message(other).into_owned(),
        };
        let text = format!("{} … OPTIONS: {name}: {reason}", self.statement);
        let help = match base {
            "compression" => {
                Some("legal compressions are gzip, zstd, bzip2, xz and uncompressed; FROM reads gzip and zstd")
            }
            _ if ["bool", "`true`"].iter().any(|boolean| reason.contains(boolean)) => Some("it is true or false"),
            _ if reason.contains("u8") => Some("it is one ASCII character, such as ';'"),
            _ if ["usize", "u32", "u64"].iter().any(|number| reason.contains(number)) => Some("it is a whole number"),
            _ => None,
        };
        Error::Usage { message: text, help: help.map(str::to_owned) }
    }

    fn unknown(&self, name: &str) -> Error {
        let text = format!("{} … OPTIONS: {} has no option {name:?}", self.statement, self.file_type);
        let legal = self.legal();
        if legal.is_empty() {
            return Error::usage(text, format!("leave out the options; {} has none", self.file_type));
        }
        let base = name.split("::").next().unwrap_or(name);
        let nearest = nearest(base, legal.iter().map(String::as_str));
        let nearest = nearest.map(|nearest| format!("did you mean {nearest}? ")).unwrap_or_default();
        Error::usage(text, format!("{nearest}legal options are {}", legal.join(", ")))
    }

    /// The names of all legal options.
    fn legal(&self) -> Vec<String> {
        let entries = self.table_options().map(|options| options.entries()).unwrap_or_default();
        let of_format = entries.iter().filter_map(|entry| entry.key.strip_prefix("format.")).map(str::to_owned);
        let mut legal: Vec<String> = self.others.iter().map(|name| (*name).to_owned()).chain(of_format).collect();
        if self.file_type == "PARQUET" {
            legal.push("metadata".to_owned());
        }
        legal.sort();
        legal
    }
}

fn text_of(value: &Value) -> Option<String> {
    match value {
        Value::Number(..) | Value::Boolean(_) => Some(value.to_string()),
        other => other.clone().into_string(),
    }
}
