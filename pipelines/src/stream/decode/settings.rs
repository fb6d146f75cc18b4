//! What messages hold, and which columns are made of them.

use std::{collections::HashSet, fmt, path::PathBuf, str::FromStr, sync::Arc};

use arrow::datatypes::{DataType, TimeUnit};

use super::{avro::RegistrySettings, pointer::Pointer};
use crate::stream::StreamError;

/// Longer texts are rejected, unless set otherwise.
pub const MAX_TEXT_BYTES: usize = 8 << 20;
/// Name of the column of texts.
pub const TEXT: &str = "text";
/// Name of the column of whole messages.
pub const MESSAGE: &str = "message";
/// Names that a column of the user cannot have: columns of ours, and the folders `topic=…/partition=…`, which readers of the
/// dataset show as columns. Readers such as DuckDB ignore the case of names.
const RESERVED: [&str; 12] = [
    "_topic",
    "_partition",
    "_offset",
    "_timestamp",
    "_key",
    "_headers",
    "topic",
    "partition",
    "embedding",
    "tokens",
    "truncated",
    "error",
];

/// What the value of a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// The text itself, in UTF-8.
    #[default]
    Text,
    /// A JSON document.
    Json,
    /// An Avro datum.
    Avro,
}

/// How the schema of an Avro datum is found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AvroSchemas {
    /// Confluent's framing: byte 0, the id of the schema in a registry, the datum.
    Registry(RegistrySettings),
    /// Avro's single-object encoding: `C3 01`, the fingerprint of the schema in this file, the datum.
    SingleObject(PathBuf),
    /// The datum alone, of the schema in this file.
    Raw(PathBuf),
}

/// Type of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColumnType {
    /// A string; numbers and booleans as they are written.
    String,
    /// An integer of 64 bits.
    Int64,
    /// An integer of 32 bits.
    Int32,
    /// A float of 64 bits.
    Float64,
    /// A float of 32 bits.
    Float32,
    /// A boolean.
    Bool,
    /// An instant in microseconds, UTC: RFC 3339 with its zone, or a number of milliseconds since 1970.
    Timestamp,
    /// A day: `YYYY-MM-DD`.
    Date,
    /// Any value, as JSON.
    Json,
}

/// A column of the user: `name=/pointer:type`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColumnSpec {
    /// Its name.
    pub name: Arc<str>,
    /// Where its values are.
    pub pointer: Pointer,
    /// Its type.
    pub kind: ColumnType,
}

/// Columns beside the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Columns {
    /// These; possibly none.
    Listed(Vec<ColumnSpec>),
    /// The whole message as JSON in the column `message`.
    All,
}

impl Default for Columns {
    fn default() -> Self {
        Self::Listed(Vec::new())
    }
}

/// How keys are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Keys {
    /// Not at all.
    #[default]
    Drop,
    /// As bytes.
    Binary,
    /// As strings. A key that is not UTF-8 rejects its message.
    Text,
}

/// How messages are decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecodeSettings {
    /// What the value is.
    pub format: Format,
    /// Pointer to the text, in JSON and Avro. Default: `/text`.
    pub text_path: Option<Pointer>,
    /// Columns beside the text.
    pub columns: Columns,
    /// Whether the text is kept in the column `text`.
    pub keep_text: bool,
    /// The column `_key`.
    pub keys: Keys,
    /// Whether headers are kept in the column `_headers`.
    pub headers: bool,
    /// A longer text rejects its message.
    pub max_text_bytes: usize,
    /// Schemas, for Avro.
    pub schemas: Option<AvroSchemas>,
}

impl Default for DecodeSettings {
    fn default() -> Self {
        Self {
            format: Format::default(),
            text_path: None,
            columns: Columns::default(),
            keep_text: true,
            keys: Keys::default(),
            headers: false,
            max_text_bytes: MAX_TEXT_BYTES,
            schemas: None,
        }
    }
}

impl DecodeSettings {
    /// What determines the texts and the values of columns: the format, and where they are in a message. Their names and
    /// types are in the schema.
    pub fn identity(&self) -> Vec<(String, String)> {
        let mut pairs = vec![("format".to_owned(), format!("{:?}", self.format).to_lowercase())];
        if self.format != Format::Text {
            let path = self.text_path.as_ref().map_or_else(|| format!("/{TEXT}"), ToString::to_string);
            pairs.push(("text-path".to_owned(), path));
        }
        if let Columns::Listed(columns) = &self.columns {
            let place = |column: &ColumnSpec| (format!("place of column {}", column.name), column.pointer.to_string());
            pairs.extend(columns.iter().map(place));
        }
        pairs
    }

    /// Checks that the settings fit each other.
    ///
    /// # Errors
    /// What does not fit, and what to do instead.
    pub fn check(&self) -> Result<(), StreamError> {
        let has_columns = self.columns != Columns::default();
        match self.format {
            Format::Text if has_columns => {
                return Err(refuse("--columns needs --format json or avro", "a message of format text is one text"));
            }
            Format::Text if self.text_path.is_some() => {
                return Err(refuse("--text-path needs --format json or avro", "a message of format text is one text"));
            }
            Format::Avro if self.schemas.is_none() => {
                return Err(refuse("--format avro needs schemas", "give --schema-registry URL or --avro-schema FILE"));
            }
            Format::Text | Format::Json if self.schemas.is_some() => {
                return Err(refuse("schemas are given, and the format is not avro", "give --format avro"));
            }
            _ => {}
        }
        if self.max_text_bytes == 0 {
            return Err(refuse("the maximum length of a text is 0", "give at least 1 byte"));
        }
        self.check_names()
    }

    fn check_names(&self) -> Result<(), StreamError> {
        let Columns::Listed(columns) = &self.columns else { return Ok(()) };
        let mut seen: HashSet<String> = HashSet::new();
        if self.keep_text {
            seen.insert(TEXT.to_owned());
        }
        for column in columns {
            let name = column.name.to_ascii_lowercase();
            if RESERVED.contains(&name.as_str()) {
                let message = format!("--columns: the name {:?} is taken by the output", column.name);
                return Err(refuse(message, format!("choose another; taken are {}", RESERVED.join(", "))));
            }
            if !seen.insert(name) {
                let help = match column.name.eq_ignore_ascii_case(TEXT) && self.keep_text {
                    true => "the text is kept as the column `text` already",
                    false => "give each column a name of its own; upper and lower case do not count",
                };
                return Err(refuse(format!("--columns: the name {:?} stands twice", column.name), help));
            }
        }
        Ok(())
    }

    /// Where the text is.
    pub(super) fn text_pointer(&self) -> Pointer {
        let default = || Pointer::parse("/text").unwrap_or_else(|_| unreachable!("a valid pointer"));
        self.text_path.clone().unwrap_or_else(default)
    }
}

fn refuse(message: impl Into<String>, help: impl Into<String>) -> StreamError {
    StreamError::Settings { message: message.into(), help: Some(help.into()) }
}

/// Every value that an option takes, by name.
fn by_name<T: Copy>(what: &str, name: &str, all: &[(&'static str, T)]) -> Result<T, String> {
    let legal = || all.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    let found = all.iter().find(|(legal, _)| *legal == name);
    found.map(|(_, value)| *value).ok_or_else(|| format!("{name:?} is no {what}; possible are {}", legal()))
}

impl FromStr for Format {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        by_name("format", name, &[("text", Self::Text), ("json", Self::Json), ("avro", Self::Avro)])
    }
}

impl ColumnType {
    const ALL: [(&'static str, Self); 9] = [
        ("string", Self::String),
        ("int64", Self::Int64),
        ("int32", Self::Int32),
        ("float64", Self::Float64),
        ("float32", Self::Float32),
        ("bool", Self::Bool),
        ("timestamp", Self::Timestamp),
        ("date", Self::Date),
        ("json", Self::Json),
    ];

    /// Its name in `--columns`.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| name)
    }

    /// Its Arrow type.
    pub fn data_type(self) -> DataType {
        match self {
            Self::String | Self::Json => DataType::Utf8,
            Self::Int64 => DataType::Int64,
            Self::Int32 => DataType::Int32,
            Self::Float64 => DataType::Float64,
            Self::Float32 => DataType::Float32,
            Self::Bool => DataType::Boolean,
            Self::Timestamp => DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into())),
            Self::Date => DataType::Date32,
        }
    }
}

impl FromStr for ColumnType {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        by_name("type", name, &Self::ALL)
    }
}

impl fmt::Display for ColumnType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ColumnSpec {
    type Err = String;

    /// Parses `name=/pointer:type`. The type is what follows the last colon; without one it is `string`.
    fn from_str(written: &str) -> Result<Self, String> {
        let shape = "write name=/pointer:type, for example stars=/rating/stars:int32";
        let Some((name, rest)) = written.split_once('=') else {
            return Err(format!("{written:?} is no column; {shape}"));
        };
        let name = name.trim();
        if name.is_empty() {
            return Err(format!("{written:?} has no name; {shape}"));
        }
        let (pointer, kind) = match rest.rsplit_once(':') {
            Some((pointer, kind)) => (pointer, kind.trim().parse().map_err(|e| format!("column {name:?}: {e}"))?),
            None => (rest, ColumnType::String),
        };
        let pointer = Pointer::parse(pointer.trim()).map_err(|e| format!("column {name:?}: {e}"))?;
        Ok(Self { name: name.into(), pointer, kind })
    }
}

impl FromStr for Columns {
    type Err = String;

    /// Parses `all`, or columns with commas between them. A backslash before a comma makes it a part of the column, and two
    /// backslashes are one.
    fn from_str(written: &str) -> Result<Self, String> {
        match written.trim() {
            "all" => Ok(Self::All),
            "" => Ok(Self::default()),
            listed => split(listed).iter().map(|column| column.parse()).collect::<Result<_, _>>().map(Self::Listed),
        }
    }
}

/// What is between the commas that no backslash precedes.
fn split(listed: &str) -> Vec<String> {
    let (mut all, mut column) = (Vec::new(), String::new());
    let mut characters = listed.chars().peekable();
    while let Some(character) = characters.next() {
        match character {
            '\\' => column.push(characters.next_if(|next| [',', '\\'].contains(next)).unwrap_or(character)),
            ',' => all.push(std::mem::take(&mut column)),
            other => column.push(other),
        }
    }
    all.push(column);
    all
}

impl FromStr for Keys {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        by_name("way to keep keys", name, &[("none", Self::Drop), ("binary", Self::Binary), ("text", Self::Text)])
    }
}
