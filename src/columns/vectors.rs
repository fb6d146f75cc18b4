//! Arrow columns of vectors: their types, and how arrays are built from the outcome of each row.

use std::{collections::HashMap, sync::Arc};

use arrow::{
    array::{ArrayRef, FixedSizeListArray, Float32Array, ListArray, StringBuilder, StructArray, UInt32Array},
    buffer::{NullBuffer, OffsetBuffer},
    datatypes::{DataType, Field, FieldRef, Fields},
};
use half::{bf16, f16};

use crate::{
    error::Result,
    row_error::RowError,
    spec::{FloatRounding, Level, ListType},
};

/// The type of the vector column.
#[derive(Debug, Clone)]
pub(super) struct VectorType {
    /// Values of one layer: `2P`.
    pub(super) layer: usize,
    /// Layers one after the other in a vector: 1, or `L + 1`.
    pub(super) stacked: usize,
    pub(super) level: Level,
    pub(super) list_type: ListType,
    pub(super) float: FloatRounding,
    /// Model and settings that made the vectors; part of the field as well as of the file.
    pub(super) field_metadata: Vec<(String, String)>,
}

/// One token of the output.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) start: u32,
    pub(super) end: u32,
    /// Index of the sentence in its text.
    pub(super) sentence: u32,
    /// `<S>` or `</S>`; `None` for a token, which is `text[start..end]`.
    pub(super) boundary: Option<&'static str>,
}

/// The result of a row.
#[derive(Debug)]
pub(super) enum Outcome {
    /// A NULL text, or a text without tokens at level `sentence`.
    Null,
    Pooled(Vec<f32>),
    Tokens(TokenRow),
    Bad(RowError),
}

impl Outcome {
    /// Bytes of the words of a token row.
    fn word_bytes(&self) -> usize {
        match self {
            Self::Tokens(row) => row.words.iter().map(|word| word.len()).sum(),
            Self::Null | Self::Pooled(_) | Self::Bad(_) => 0,
        }
    }
}

/// The tokens of one row.
#[derive(Debug, Default)]
pub(super) struct TokenRow {
    pub(super) words: Vec<Box<str>>,
    pub(super) places: Vec<Place>,
    /// One vector per token, one after the other.
    pub(super) values: Vec<f32>,
}

impl TokenRow {
    pub(super) fn append(&mut self, next: Self) {
        self.words.extend(next.words);
        self.places.extend(next.places);
        self.values.extend(next.values);
    }
}

/// The tokens as written in `text`, boundaries by their names.
pub(super) fn words_of_text(text: &str, places: &[Place]) -> Vec<Box<str>> {
    let word = |place: &Place| place.boundary.unwrap_or_else(|| &text[place.start as usize..place.end as usize]);
    places.iter().map(|place| word(place).into()).collect()
}

impl VectorType {
    /// Values of one vector.
    pub(super) fn width(&self) -> usize {
        self.layer * self.stacked
    }

    fn item(&self) -> FieldRef {
        Arc::new(Field::new("item", DataType::Float32, false))
    }

    fn vector(&self) -> DataType {
        match self.list_type {
            ListType::Fixed => DataType::FixedSizeList(self.item(), self.width() as i32),
            ListType::List => DataType::List(self.item()),
        }
    }

    /// `arrow.fixed_shape_tensor` with its dimensions named: pyarrow refuses a file whose `dim_names` is null,
    /// which is what arrow-rs writes by itself when no names are given.
    fn embedding(&self, nullable: bool) -> Field {
        let mut metadata: HashMap<String, String> = self.field_metadata.iter().cloned().collect();
        if self.list_type == ListType::Fixed {
            let shape = if self.stacked > 1 {
                format!(r#"{{"shape":[{},{}],"dim_names":["layer","dim"]}}"#, self.stacked, self.layer)
            } else {
                format!(r#"{{"shape":[{}],"dim_names":["dim"]}}"#, self.layer)
            };
            metadata.insert("ARROW:extension:name".to_owned(), "arrow.fixed_shape_tensor".to_owned());
            metadata.insert("ARROW:extension:metadata".to_owned(), shape);
        }
        Field::new("embedding", self.vector(), nullable).with_metadata(metadata)
    }

    fn token_fields(&self) -> Fields {
        Fields::from(vec![
            Field::new("token", DataType::Utf8, false),
            Field::new("start", DataType::UInt32, false),
            Field::new("end", DataType::UInt32, false),
            Field::new("sentence", DataType::UInt32, false),
            self.embedding(false),
        ])
    }

    fn token_item(&self) -> FieldRef {
        Arc::new(Field::new("item", DataType::Struct(self.token_fields()), false))
    }

    /// The vector field, then `truncated` and `error`.
    pub(super) fn fields(&self) -> Vec<Field> {
        let vectors = match self.level {
            Level::Sentence => self.embedding(true),
            Level::Token => {
                let metadata: HashMap<String, String> = self.field_metadata.iter().cloned().collect();
                Field::new("tokens", DataType::List(self.token_item()), true).with_metadata(metadata)
            }
        };
        vec![vectors, Field::new("truncated", DataType::Boolean, false), Field::new("error", DataType::Utf8, true)]
    }

    /// The Arrow array of vectors that are stored one after the other. The values of a NULL vector are zeros.
    fn array(&self, values: Vec<f32>, rows: usize, valid: Option<NullBuffer>) -> Result<ArrayRef> {
        let values = Arc::new(Float32Array::from(values));
        Ok(match self.list_type {
            ListType::Fixed => Arc::new(FixedSizeListArray::try_new_with_length(
                self.item(),
                self.width() as i32,
                values,
                valid,
                rows,
            )?),
            ListType::List => {
                offset(rows.saturating_mul(self.width()))?;
                let offsets = OffsetBuffer::from_repeated_length(self.width(), rows);
                Arc::new(ListArray::try_new(self.item(), offsets, values, valid)?)
            }
        })
    }
}

/// Checks that a 32-bit offset of Arrow can hold `n`.
fn offset(n: usize) -> Result<()> {
    match i32::try_from(n) {
        Ok(_) => Ok(()),
        Err(_) => Err(arrow::error::ArrowError::OffsetOverflowError(n).into()),
    }
}

/// Builds the array of all rows, in their order. Rows with an error are NULL.
pub(super) fn build(vector_type: &VectorType, outcomes: Vec<Outcome>) -> Result<ArrayRef> {
    match vector_type.level {
        Level::Sentence => sentence_array(vector_type, outcomes),
        Level::Token => token_array(vector_type, outcomes),
    }
}

fn sentence_array(vector_type: &VectorType, outcomes: Vec<Outcome>) -> Result<ArrayRef> {
    let rows = outcomes.len();
    let valid: Vec<bool> = outcomes.iter().map(|o| matches!(o, Outcome::Pooled(_))).collect();
    let mut values = vec![0.0; rows * vector_type.width()];
    for (outcome, place) in outcomes.into_iter().zip(values.chunks_exact_mut(vector_type.width())) {
        if let Outcome::Pooled(vector) = outcome {
            place.copy_from_slice(&vector);
        }
    }
    vector_type.array(values, rows, Some(NullBuffer::from(valid)))
}

fn token_array(vector_type: &VectorType, outcomes: Vec<Outcome>) -> Result<ArrayRef> {
    let valid: Vec<bool> = outcomes.iter().map(|o| matches!(o, Outcome::Tokens(_))).collect();
    let lengths: Vec<usize> = outcomes
        .iter()
        .map(|o| match o {
            Outcome::Tokens(row) => row.places.len(),
            _ => 0,
        })
        .collect();
    let total: usize = lengths.iter().sum();
    offset(total)?;
    offset(outcomes.iter().map(Outcome::word_bytes).sum())?;
    let (mut starts, mut ends, mut sentences) = (Vec::new(), Vec::new(), Vec::new());
    let mut words = StringBuilder::new();
    let mut values = Vec::with_capacity(total * vector_type.width());
    for outcome in outcomes {
        let Outcome::Tokens(row) = outcome else { continue };
        for (word, place) in row.words.iter().zip(&row.places) {
            words.append_value(word);
            starts.push(place.start);
            ends.push(place.end);
            sentences.push(place.sentence);
        }
        values.extend(row.values);
    }
    let columns: Vec<ArrayRef> = vec![
        Arc::new(words.finish()),
        Arc::new(UInt32Array::from(starts)),
        Arc::new(UInt32Array::from(ends)),
        Arc::new(UInt32Array::from(sentences)),
        vector_type.array(values, total, None)?,
    ];
    let tokens = StructArray::try_new_with_length(vector_type.token_fields(), columns, None, total)?;
    let offsets = OffsetBuffer::from_lengths(lengths);
    let list = ListArray::try_new(vector_type.token_item(), offsets, Arc::new(tokens), Some(NullBuffer::from(valid)))?;
    Ok(Arc::new(list))
}

/// Rounds to values that a narrower format can represent. They stay float32 and compress better.
pub(super) fn round(values: &mut [f32], float: FloatRounding) {
    match float {
        FloatRounding::F32 => {}
        FloatRounding::F16Rounded => values.iter_mut().for_each(|v| *v = f16::from_f32(*v).to_f32()),
        FloatRounding::Bf16Rounded => values.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32()),
    }
}
