//! What the files of SQL statements, `tests/sql/slt/*.slt`, need wherever they run: the second model that they name, and how their
//! expected results are written.

use std::path::{Path, PathBuf};

use arrow::{
    array::{Array, ArrayRef, AsArray, RecordBatch},
    datatypes::DataType,
    util::display::array_value_to_string,
};
use datafusion::error::Result;
use elmo::{
    ModelData,
    lm_head::LmHeadData,
    model_dir::WeightsFormat,
    weights::{Tensor, Weights},
};
use sqllogictest::DefaultColumnType as Kind;

/// Vectors of at most this length are shown in full. Of longer ones, two numbers and the length are shown.
const MAX_SHOWN: usize = 4;

/// Saves the model `narrow`: half the width of the built-in one, and weights from a formula. `constant` is added to all logits, which
/// changes the file of the LM head but no probability.
pub(crate) fn save_narrow(dir: &Path, constant: f32) {
    let mut options = ModelData::tiny().options;
    options.lstm.projection_dim /= 2;
    let mut weights = Weights::default();
    for spec in options.weight_plan() {
        let data = (0..spec.len()).map(|i| (i * 31 % 101) as f32 / 505.0 - 0.1).collect();
        weights.insert(spec.name, Tensor { shape: spec.shape, data });
    }
    // A softmax with zero weights: probabilities are always those of `PROBABILITIES`.
    let words = PROBABILITIES.iter().map(|(word, _)| (*word).to_owned()).collect();
    let weight =
        Tensor { shape: vec![5, options.lstm.projection_dim], data: vec![0.0; 5 * options.lstm.projection_dim] };
    let bias = Tensor { shape: vec![5], data: PROBABILITIES.iter().map(|(_, p)| p.ln() + constant).collect() };
    ModelData::new(options, weights, "narrow").unwrap().save(dir, WeightsFormat::Safetensors).unwrap();
    LmHeadData::new(words, weight, bias).unwrap().save(dir).unwrap();
}

/// The vocabulary of `narrow`: surprisals of 1, 2, 3, 4 and 4 bits.
const PROBABILITIES: [(&str, f32); 5] =
    [("rain", 0.5), ("wind", 0.25), ("</S>", 0.125), ("<S>", 0.0625), ("<UNK>", 0.0625)];

pub(crate) fn kind(data_type: &DataType) -> Kind {
    match data_type {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => Kind::Text,
        number if number.is_integer() => Kind::Integer,
        number if number.is_floating() => Kind::FloatingPoint,
        _ => Kind::Any,
    }
}

/// The result of a query.
pub(crate) fn rows(batches: &[RecordBatch]) -> Result<Vec<Vec<String>>> {
    let mut rows = Vec::new();
    for batch in batches {
        for row in 0..batch.num_rows() {
            rows.extend(lines(batch, row)?);
        }
    }
    Ok(rows)
}

/// A row, followed by the lines of multi-line values, such as plans.
fn lines(batch: &RecordBatch, row: usize) -> Result<Vec<Vec<String>>> {
    let mut lines = vec![Vec::new()];
    for column in batch.columns() {
        let shown = cell(column, row)?;
        match shown.contains('\n') {
            true => lines.extend(shown.lines().map(|line| vec![line.to_owned()])),
            false => lines[0].push(shown),
        }
    }
    lines.retain(|line| !line.is_empty());
    Ok(lines)
}

/// A value as it is written in a file. Numbers are rounded to four decimals, which are the same on every processor.
fn cell(column: &ArrayRef, row: usize) -> Result<String> {
    if column.logical_nulls().is_some_and(|nulls| nulls.is_null(row)) {
        return Ok("NULL".to_owned());
    }
    Ok(match column.data_type() {
        DataType::FixedSizeList(..) => list(&column.as_fixed_size_list().value(row))?,
        DataType::List(_) => list(&column.as_list::<i32>().value(row))?,
        DataType::Struct(fields) => {
            let columns = fields.iter().zip(column.as_struct().columns());
            let members = columns.map(|(field, column)| Ok(format!("{}: {}", field.name(), cell(column, row)?)));
            format!("{{{}}}", members.collect::<Result<Vec<_>>>()?.join(", "))
        }
        data_type => {
            let shown = array_value_to_string(column, row)?;
            match shown.parse::<f64>() {
                // Adding 0 converts -0 to 0.
                Ok(number) if data_type.is_floating() => ((number * 1e4).round() / 1e4 + 0.0).to_string(),
                _ if shown.is_empty() => "(empty)".to_owned(),
                _ => shown,
            }
        }
    })
}

fn list(items: &ArrayRef) -> Result<String> {
    let shown = match items.data_type().is_floating() && items.len() > MAX_SHOWN {
        true => 2,
        false => items.len(),
    };
    let mut cells = (0..shown).map(|item| cell(items, item)).collect::<Result<Vec<_>>>()?;
    if shown < items.len() {
        cells.push(format!("… {}", items.len()));
    }
    Ok(format!("[{}]", cells.join(", ")))
}

/// Keeps leading spaces, which are part of a plan.
#[allow(clippy::ptr_arg, reason = "the type that the runner expects")]
pub(crate) fn as_written(line: &String) -> String {
    line.trim_end().to_owned()
}

/// The files, in the order of their names.
pub(crate) fn files() -> Vec<PathBuf> {
    // Read at run time: several clones may share a target folder.
    let folder = Path::new(&std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("../tests/sql/slt");
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "slt"));
    files.sort();
    files
}
