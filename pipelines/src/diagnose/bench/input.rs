//! Files of short texts in every format that a bulk job reads.

use std::{
    fs::File,
    io::{BufWriter, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

use arrow::{
    array::{AsArray, Int64Array, RecordBatch, StringArray},
    datatypes::{DataType, Field, Int64Type, Schema, SchemaRef},
    ipc::writer::FileWriter,
};
use elmo::{
    spec::{SentenceMode, TokenizerKind},
    text,
};
use parquet::arrow::ArrowWriter;

use crate::{
    error::{Error, Result},
    source::Format,
};

/// The formats that are measured. TSV is read as CSV is.
pub(super) const FORMATS: [(Format, &str); 5] = [
    (Format::Parquet, "parquet"),
    (Format::Arrow, "arrow"),
    (Format::Csv, "csv"),
    (Format::Json, "jsonl"),
    (Format::Text, "txt"),
];
/// Rows of a batch that is written at once.
const BATCH_ROWS: usize = 8192;

/// Sentences of the built-in reviews.
pub(super) fn short_texts() -> Vec<String> {
    let sentences = |review: String| {
        let cut = text::tokenize(&review, TokenizerKind::Whitespace, SentenceMode::Split);
        let span = |tokens: Vec<text::Token>| Some(review[tokens.first()?.start..tokens.last()?.end].to_owned());
        cut.into_iter().filter_map(span).collect::<Vec<_>>()
    };
    crate::demo::texts().into_iter().flat_map(sentences).collect()
}

/// Writes a file with the columns `id` and `text`; of lines of text only the text. Returns its path.
pub(super) fn write(folder: &Path, (format, extension): (Format, &str), rows: usize) -> Result<PathBuf> {
    let path = folder.join(format!("input.{extension}"));
    let file = File::create(&path).map_err(|e| Error::io(&path, e))?;
    let (texts, mut out) = (short_texts(), BufWriter::new(file));
    let batches = (0..rows).step_by(BATCH_ROWS).map(|first| batch(&texts, first, BATCH_ROWS.min(rows - first)));
    match format {
        Format::Parquet => parquet(batches, &mut out),
        Format::Arrow => arrow(batches, &mut out),
        Format::Csv | Format::Tsv | Format::Json | Format::Text => {
            lines(batches, format, &mut out).map_err(|e| Error::io(&path, e))
        }
    }?;
    out.flush().map_err(|e| Error::io(&path, e))?;
    Ok(path)
}

fn schema() -> SchemaRef {
    let fields = vec![Field::new("id", DataType::Int64, false), Field::new("text", DataType::Utf8, false)];
    Arc::new(Schema::new(fields))
}

fn batch(texts: &[String], first: usize, rows: usize) -> Result<RecordBatch> {
    let ids = Int64Array::from_iter_values((first..first + rows).map(|row| row as i64));
    let texts = StringArray::from_iter_values(texts.iter().cycle().skip(first % texts.len()).take(rows));
    Ok(RecordBatch::try_new(schema(), vec![Arc::new(ids), Arc::new(texts)]).map_err(elmo::Error::from)?)
}

fn parquet(batches: impl Iterator<Item = Result<RecordBatch>>, out: &mut (impl Write + Send)) -> Result<()> {
    let failed = |e| Error::Failed(format!("the input was not written: {e}"));
    let mut writer = ArrowWriter::try_new(out, schema(), None).map_err(failed)?;
    for batch in batches {
        writer.write(&batch?).map_err(failed)?;
    }
    writer.close().map(drop).map_err(failed)
}

fn arrow(batches: impl Iterator<Item = Result<RecordBatch>>, out: &mut impl Write) -> Result<()> {
    let mut writer = FileWriter::try_new(out, &schema()).map_err(elmo::Error::from)?;
    for batch in batches {
        writer.write(&batch?).map_err(elmo::Error::from)?;
    }
    Ok(writer.finish().map_err(elmo::Error::from)?)
}

fn lines(
    batches: impl Iterator<Item = Result<RecordBatch>>,
    format: Format,
    out: &mut impl Write,
) -> std::io::Result<()> {
    if format == Format::Csv {
        writeln!(out, "id,text")?;
    }
    for batch in batches {
        let batch = batch.map_err(std::io::Error::other)?;
        let ids = batch.column(0).as_primitive::<Int64Type>().values();
        for (id, text) in ids.iter().zip(batch.column(1).as_string::<i32>().iter().flatten()) {
            match format {
                Format::Csv => writeln!(out, "{id},\"{}\"", text.replace('"', "\"\""))?,
                Format::Json => writeln!(out, "{{\"id\": {id}, \"text\": {}}}", serde_json::Value::from(text))?,
                _ => writeln!(out, "{text}")?,
            }
        }
    }
    Ok(())
}
