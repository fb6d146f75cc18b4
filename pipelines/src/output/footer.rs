//! The footer of a Parquet file: the columns, and the `elmo.*` pairs that name the model and the settings.

use arrow::datatypes::{DataType, SchemaRef};

use super::parquet::OpenFile;
use crate::recorded::{Pairs, holds_vectors, of_column};

/// Longest value that a message shows in full, in characters. The options of a model would fill a screen.
const MAX_SHOWN: usize = 80;

/// The columns and `elmo.*` pairs of a file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Footer {
    /// Columns and their types.
    pub(super) columns: Vec<(String, String)>,
    pub(super) pairs: Pairs,
    /// The settings of each column of vectors.
    pub(super) vectors: Vec<(String, Pairs)>,
}

impl Footer {
    pub(super) fn of(file: &OpenFile) -> Self {
        let pairs = file.metadata().file_metadata().key_value_metadata();
        let pairs = pairs.into_iter().flatten().filter(|pair| pair.key.starts_with("elmo."));
        let pairs: Pairs = pairs.map(|pair| (pair.key.clone(), pair.value.clone().unwrap_or_default())).collect();
        let vectors = file.schema().fields().iter().filter(|field| holds_vectors(field));
        let vectors = vectors.map(|field| (field.name().clone(), of_column(field, &pairs))).collect();
        Self { columns: columns(file.schema()), pairs, vectors }
    }

    /// The first difference between this footer and that of another file.
    pub(super) fn difference(&self, found: &Self) -> Option<String> {
        if let Some(difference) = pairs_difference(&self.pairs, &found.pairs) {
            return Some(difference);
        }
        let list = |columns: &[(String, String)]| {
            let columns: Vec<String> = columns.iter().map(|(name, kind)| format!("{name}: {kind}")).collect();
            columns.join(", ")
        };
        if self.columns != found.columns {
            return Some(format!("the columns are {} instead of {}", list(&found.columns), list(&self.columns)));
        }
        self.vectors_difference(found)
    }

    /// The first difference between the settings of two columns of the same name.
    fn vectors_difference(&self, found: &Self) -> Option<String> {
        let mut columns = self.vectors.iter().zip(&found.vectors).filter(|((one, _), (other, _))| one == other);
        columns.find_map(|((column, expected), (_, found))| {
            pairs_difference(expected, found).map(|difference| format!("column {column}: {difference}"))
        })
    }
}

/// The first pair in which two footers differ. A patch release resumes what another one began, so the version may differ.
pub(super) fn pairs_difference(expected: &Pairs, found: &Pairs) -> Option<String> {
    let mut keys = expected.keys().chain(found.keys()).filter(|key| *key != "elmo.version");
    let key = keys.find(|key| expected.get(*key) != found.get(*key))?;
    Some(format!("{key} is {} instead of {}", shown(found.get(key)), shown(expected.get(key))))
}

/// A value of a footer, shortened for a message.
pub(super) fn shown(value: Option<&String>) -> String {
    match value {
        None => "not set".to_owned(),
        Some(value) if value.chars().count() > MAX_SHOWN => {
            format!("{:?}…", value.chars().take(MAX_SHOWN / 2).collect::<String>())
        }
        Some(value) => format!("{value:?}"),
    }
}

fn columns(schema: &SchemaRef) -> Vec<(String, String)> {
    schema.fields().iter().map(|field| (field.name().clone(), type_name(field.data_type()))).collect()
}

/// A short name of a type: `Float32[64]` for a fixed-size list.
fn type_name(kind: &DataType) -> String {
    match kind {
        DataType::FixedSizeList(item, n) => format!("{}[{n}]", type_name(item.data_type())),
        DataType::List(item) => format!("list of {}", type_name(item.data_type())),
        DataType::Struct(fields) => {
            let fields: Vec<String> =
                fields.iter().map(|f| format!("{} {}", f.name(), type_name(f.data_type()))).collect();
            format!("({})", fields.join(", "))
        }
        other => other.to_string(),
    }
}
