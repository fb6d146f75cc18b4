//! Labelled texts: rows with a text and a label, in the files that `elmo embed` reads.

use std::sync::Arc;

use arrow::{
    array::{Array, ArrayRef, AsArray, StringArray},
    compute::{CastOptions, cast_with_options},
    datatypes::{DataType, Field},
    error::ArrowError,
};

use super::dataset::{Dataset, Labels, PART_BYTES, Place, at};
use crate::{
    error::{Error, Result},
    source::{self, Keep, KeptTypes, Plan, Position, Request, Rows, row_bytes},
    stores::{Location, Stores},
};

/// Reads rows with a text, or a list of tokens, in `column` and a label in `label`.
///
/// # Errors
/// [`SourceError`](crate::source::SourceError) for files that cannot be read, lack a column or would be replaced by `output`,
/// [`Error::Input`] with its row for a row without text or without label, and for files without rows.
pub(super) async fn read(
    stores: &Stores,
    inputs: &[String],
    output: &Location,
    column: &str,
    label: &str,
    labels: &mut Labels,
) -> Result<Dataset> {
    if column == label {
        return Err(Error::usage(format!("--column and --label are both {label}"), "name two columns"));
    }
    let files = source::list(stores, inputs, None).await?;
    source::check_kept(&files, output)?;
    let names: Vec<String> = files.iter().map(ToString::to_string).collect();
    let keep = Keep::Columns(vec![label.to_owned()]);
    let request = Request { keep, types: KeptTypes::Strings, ..Request::texts(column) };
    let plan = Arc::new(Plan::resolve(files, &request).await?);
    let mut rows = Rows::new(plan, Position::default());
    let mut data = Dataset { files: names, ..Dataset::default() };
    while let Some(slice) = rows.next().await? {
        let Position { file, row } = slice.start;
        let refuse = |index: usize, reason: &str| at(&data.files, Place::Row { file, row: row + index as u64 }, reason);
        let texts = checked(&slice.text, &text_type(&slice.text)).map_err(|(index, reason)| refuse(index, &reason))?;
        if let Some(index) = (0..texts.len()).find(|index| is_blank(&texts, *index)) {
            return Err(refuse(index, "there is no text"));
        }
        let names = checked(slice.kept.column(0), &DataType::Utf8).map_err(|(index, reason)| refuse(index, &reason))?;
        let names: &StringArray = names.as_string();
        for (index, name) in names.iter().enumerate() {
            let name = name.map(str::trim).filter(|name| !name.is_empty());
            let name = name.ok_or_else(|| refuse(index, &format!("there is no label in column {label}")))?;
            data.labels.push(vec![labels.number(name)]);
            data.places.push(Place::Row { file, row: row + index as u64 });
        }
        data.parts.extend(parts(&texts));
    }
    match data.len() {
        0 => Err(data.empty("row")),
        _ => Ok(data),
    }
}

/// The type in which texts are held.
fn text_type(column: &ArrayRef) -> DataType {
    match column.data_type() {
        DataType::List(_) | DataType::LargeList(_) | DataType::FixedSizeList(_, _) | DataType::ListView(_) => {
            DataType::List(Arc::new(Field::new_list_field(DataType::Utf8, true)))
        }
        _ => DataType::Utf8,
    }
}

/// Casts a column; the first row that has no such value, and why.
fn checked(column: &ArrayRef, kind: &DataType) -> Result<ArrayRef, (usize, String)> {
    let cast =
        |column: &dyn Array| cast_with_options(column, kind, &CastOptions { safe: false, ..CastOptions::default() });
    let fails = |index: usize| -> Option<ArrowError> { cast(&column.slice(index, 1)).err() };
    cast(column).map_err(|whole| {
        let first = (0..column.len()).find_map(|index| fails(index).map(|error| (index, error)));
        let (index, error) = first.unwrap_or((0, whole));
        (index, error.to_string())
    })
}

/// Whether a row has nothing that the model could read.
fn is_blank(texts: &ArrayRef, index: usize) -> bool {
    if texts.is_null(index) {
        return true;
    }
    let blank = |texts: &StringArray, index: usize| texts.is_null(index) || texts.value(index).trim().is_empty();
    match texts.data_type() {
        DataType::List(_) => {
            let tokens = texts.as_list::<i32>().value(index);
            (0..tokens.len()).all(|token| blank(tokens.as_string(), token))
        }
        _ => blank(texts.as_string(), index),
    }
}

/// Cuts texts into parts of about [`PART_BYTES`], at least a row each.
fn parts(texts: &ArrayRef) -> Vec<ArrayRef> {
    let mut sizes = vec![0; texts.len()];
    row_bytes(texts, &mut sizes);
    let (mut parts, mut first, mut bytes) = (Vec::new(), 0, 0);
    for (row, size) in sizes.iter().enumerate() {
        bytes += size;
        if bytes >= PART_BYTES as u64 {
            parts.push(texts.slice(first, row + 1 - first));
            (first, bytes) = (row + 1, 0);
        }
    }
    if first < texts.len() {
        parts.push(texts.slice(first, texts.len() - first));
    }
    parts
}
