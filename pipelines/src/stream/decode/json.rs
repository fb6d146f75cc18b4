//! Decodes messages of JSON and of plain text, one by one.

use std::{borrow::Cow, sync::Arc};

use arrow::array::StringBuilder;

use super::{
    Body,
    cells::Cells,
    pick::Picker,
    pointer::Pointer,
    rejection::Rejection,
    settings::{ColumnSpec, ColumnType, Columns, DecodeSettings, MESSAGE, TEXT},
    unescape::Scalar,
};
use crate::{source::escapes::Escapes, stream::Messages};

/// The columns of the user: those of the list, or one for whole messages.
pub(super) fn specs(columns: &Columns) -> Vec<ColumnSpec> {
    let whole = || Pointer::parse("").unwrap_or_else(|_| unreachable!("a valid pointer"));
    match columns {
        Columns::Listed(listed) => listed.clone(),
        Columns::All => vec![ColumnSpec { name: MESSAGE.into(), pointer: whole(), kind: ColumnType::Json }],
    }
}

/// A value as UTF-8.
pub(super) fn utf8(value: Option<&[u8]>) -> Result<&str, Rejection> {
    let value = value.ok_or(Rejection::Tombstone)?;
    str::from_utf8(value).map_err(|e| Rejection::NotUtf8 { valid_up_to: e.valid_up_to(), bytes: value.len() })
}

/// The text, unless it is too long.
pub(super) fn of_length(text: &str, max: usize) -> Result<&str, Rejection> {
    match text.len() > max {
        true => Err(Rejection::TextTooLarge { bytes: text.len(), max }),
        false => Ok(text),
    }
}

/// Decodes messages that are texts.
pub(super) fn texts(messages: &Messages, max_bytes: usize) -> Body {
    let (mut texts, mut bad) = (StringBuilder::new(), Vec::new());
    for (row, message) in messages.iter().enumerate() {
        match utf8(message.value).and_then(|text| of_length(text, max_bytes)) {
            Ok(text) => texts.append_value(text),
            Err(rejection) => {
                texts.append_null();
                bad.push((row, rejection));
            }
        }
    }
    Body { texts: texts.finish(), columns: Vec::new(), bad }
}

/// Decodes messages that are JSON documents.
#[derive(Debug)]
pub(super) struct Json {
    picker: Picker,
    /// Number of the text among what is picked.
    text: usize,
    text_path: Arc<str>,
    columns: Vec<Column>,
    max_text_bytes: usize,
}

#[derive(Debug)]
struct Column {
    /// Its number among what is picked.
    number: usize,
    name: Arc<str>,
    kind: ColumnType,
}

impl Json {
    pub(super) fn new(settings: &DecodeSettings) -> Self {
        let (text, specs) = (settings.text_pointer(), specs(&settings.columns));
        let pointers: Vec<&Pointer> = std::iter::once(&text).chain(specs.iter().map(|spec| &spec.pointer)).collect();
        let (picker, numbers) = Picker::new(&pointers);
        let column = |(spec, number): (&ColumnSpec, &usize)| Column {
            number: *number,
            name: Arc::clone(&spec.name),
            kind: spec.kind,
        };
        Self {
            picker,
            text: numbers[0],
            text_path: text.to_string().into(),
            columns: specs.iter().zip(&numbers[1..]).map(column).collect(),
            max_text_bytes: settings.max_text_bytes,
        }
    }

    pub(super) fn decode(&self, messages: &Messages) -> Body {
        let mut cells: Vec<Cells> = self.columns.iter().map(|column| Cells::new(column.kind)).collect();
        let (mut texts, mut bad) = (StringBuilder::new(), Vec::new());
        for (row, message) in messages.iter().enumerate() {
            let text = utf8(message.value).map(|json| Escapes::rewritten(json.as_bytes()));
            if let Err(rejection) = text.and_then(|json| self.row(&json, &mut cells, &mut texts)) {
                bad.push((row, rejection));
                texts.append_null();
            }
            for unfilled in cells.iter_mut().filter(|cells| cells.len() == row) {
                unfilled.push_null();
            }
        }
        Body { texts: texts.finish(), columns: cells.into_iter().map(Cells::finish).collect(), bad }
    }

    /// Adds the values of a message: its text only if nothing is wrong with it, and its columns as far as they are right.
    fn row(&self, json: &[u8], cells: &mut [Cells], texts: &mut StringBuilder) -> Result<(), Rejection> {
        // What replaces escapes is UTF-8 too.
        let json = utf8(Some(json))?;
        let mut picked = Vec::new();
        self.picker.pick(json, &mut picked).map_err(|error| bad_json(&error))?;
        let mut wrong = None;
        for (column, cells) in self.columns.iter().zip(cells) {
            match picked[column.number] {
                None => cells.push_null(),
                Some(json) if cells.push_json(json) => {}
                Some(_) => wrong = wrong.or(Some(column)),
            }
        }
        let text = self.text(picked[self.text])?;
        if let Some(column) = wrong {
            return Err(Rejection::WrongType { column: Arc::clone(&column.name), expected: column.kind.name() });
        }
        texts.append_option(text);
        Ok(())
    }

    /// The text that a value is; `None` for `null`.
    fn text<'j>(&self, json: Option<&'j str>) -> Result<Option<Cow<'j, str>>, Rejection> {
        let json = json.ok_or_else(|| Rejection::NoText { path: Arc::clone(&self.text_path) })?;
        let text = match Scalar::of(json) {
            Some(Scalar::Null) => return Ok(None),
            Some(Scalar::String(text)) => text,
            Some(Scalar::Other(written)) => Cow::Borrowed(written),
            None => return Err(Rejection::WrongType { column: TEXT.into(), expected: ColumnType::String.name() }),
        };
        of_length(&text, self.max_text_bytes)?;
        Ok(Some(text))
    }
}

/// serde_json's messages about syntax contain no data; its position is a byte of the message, or of a line of it.
fn bad_json(error: &serde_json::Error) -> Rejection {
    Rejection::BadJson { reason: error.to_string().replace(" at line 1 column", " at byte") }
}
