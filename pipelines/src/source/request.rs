//! Which columns a job reads, as the user asks for them.

/// The input columns that are copied to the output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Keep {
    /// Every column of every file; NULL in the rows of files that lack it.
    All,
    /// None, except the one that `--id` names.
    None,
    /// These; each file must have them.
    Columns(Vec<String>),
}

impl std::str::FromStr for Keep {
    type Err = std::convert::Infallible;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        Ok(match s {
            "all" => Self::All,
            "none" => Self::None,
            names => Self::Columns(names.split(',').map(|name| name.trim().to_owned()).collect()),
        })
    }
}

/// The types of kept columns of CSV and JSON files.
///
/// In either case the first rows determine the columns of a JSON file and the keys of its objects; see [`InferRows`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KeptTypes {
    /// Inferred from the first rows: numbers, dates or booleans if that loses nothing; `007` is a string. A later
    /// value that does not fit is an error with its row.
    #[default]
    Guess,
    /// Strings, as they are written; lists and objects of JSON keep their shape.
    Strings,
}

impl KeptTypes {
    /// The legal words.
    pub const WORDS: &'static [&'static str] = &["guess", "string"];
}

impl std::str::FromStr for KeptTypes {
    type Err = elmo::spec::SpecError;

    fn from_str(word: &str) -> Result<Self, Self::Err> {
        match word {
            "guess" => Ok(Self::Guess),
            "string" => Ok(Self::Strings),
            _ => Err(elmo::spec::SpecError::Value {
                option: "types",
                value: word.to_owned(),
                legal: Self::WORDS.to_vec(),
            }),
        }
    }
}

/// Of how many rows of each CSV and JSON file the columns and types are inferred. A key of JSON that only later rows have
/// ends the job when all columns are kept: it would be lost.
///
/// All rows of JSON are read twice, in bounded memory. Of CSV, whose columns are those of the first line, at most the rows
/// in the first 64 MiB count, and of standard input those in the first MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InferRows(pub Option<usize>);

impl Default for InferRows {
    /// As in DuckDB.
    fn default() -> Self {
        Self(Some(20_480))
    }
}

impl std::str::FromStr for InferRows {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = || text.replace('_', "").parse::<usize>().ok().filter(|rows| *rows > 0);
        match text {
            "all" => Ok(Self(None)),
            _ => number().map(|rows| Self(Some(rows))).ok_or_else(|| "it must be a number of rows, or all".to_owned()),
        }
    }
}

impl std::fmt::Display for InferRows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(rows) => rows.fmt(f),
            None => f.write_str("all"),
        }
    }
}

/// What the job wants from its input.
#[derive(Debug, Clone)]
pub struct Request {
    /// The column to embed.
    pub column: String,
    /// A column that is kept in any case, as the first of the output.
    pub id: Option<String>,
    /// The other columns to keep.
    pub keep: Keep,
    /// Names of columns that the job adds, which a kept column must not have.
    pub reserved: Vec<String>,
    /// Types of kept columns of CSV and JSON files.
    pub types: KeptTypes,
    /// Rows of CSV and JSON files from which columns and types are inferred.
    pub infer_rows: InferRows,
}

impl Request {
    /// The column of texts alone.
    pub fn texts(column: impl Into<String>) -> Self {
        let (id, reserved) = (None, Vec::new());
        Self {
            column: column.into(),
            id,
            keep: Keep::None,
            reserved,
            types: KeptTypes::default(),
            infer_rows: InferRows::default(),
        }
    }
}
