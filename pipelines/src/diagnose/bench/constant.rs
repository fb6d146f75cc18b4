//! The model, replaced by a constant vector: what is left is everything that a job does beside the model.

use std::sync::Arc;

use arrow::{
    array::{Array, ArrayRef, BooleanArray, FixedSizeListArray, Float32Array, StringArray},
    buffer::ScalarBuffer,
    datatypes::{DataType, Field, FieldRef},
};
use async_trait::async_trait;
use elmo::{EmbedSpec, EmbeddedColumns, columns::count_sentences, engine::Cost, spec::OnError};

use crate::stage::{Pending, Stage};

/// Cuts texts into sentences and tokens as an embedder does, and gives each the same vector.
#[derive(Debug, Clone)]
pub(super) struct Constant {
    spec: EmbedSpec,
    item: FieldRef,
    width: i32,
    /// [`SHARED`] times the vector: columns of up to so many rows share them, so that no time is spent on copies.
    numbers: ScalarBuffer<f32>,
}

/// Rows that cost no memory of their own.
const SHARED: usize = 8192;

impl Constant {
    /// Vectors of `width` numbers.
    pub(super) fn new(width: u16) -> Self {
        let item = Arc::new(Field::new("item", DataType::Float32, false));
        let spec = EmbedSpec { on_error: OnError::Null, ..EmbedSpec::default() };
        // Different numbers, as in a vector of a model.
        let numbers: Vec<f32> = (0..width).map(|index| (f32::from(index) + 0.5).sin()).collect();
        Self { spec, item, width: width.into(), numbers: numbers.repeat(SHARED).into() }
    }

    /// The columns of `texts`.
    ///
    /// # Errors
    /// [`elmo::Error`] when the column holds no text, or too many rows.
    pub(super) fn embed(&self, texts: &ArrayRef) -> elmo::Result<EmbeddedColumns> {
        let rows = texts.len();
        let length = rows * self.numbers.len() / SHARED;
        let numbers = match rows <= SHARED {
            true => self.numbers.slice(0, length),
            false => self.numbers.iter().copied().cycle().take(length).collect(),
        };
        let numbers = Float32Array::new(numbers, None);
        let nulls = texts.logical_nulls().filter(|nulls| nulls.null_count() > 0);
        let vectors = FixedSizeListArray::try_new(Arc::clone(&self.item), self.width, Arc::new(numbers), nulls)?;
        Ok(EmbeddedColumns {
            vectors: Arc::new(vectors),
            truncated: BooleanArray::from(vec![false; rows]),
            error: StringArray::new_null(rows),
            row_errors: Vec::new(),
            tokens: vec![0; rows].into(),
            keep: None,
            stats: count_sentences(texts, &self.spec)?,
            cost: Cost::default(),
        })
    }
}

#[async_trait]
impl Stage for Constant {
    fn spec(&self) -> &EmbedSpec {
        &self.spec
    }

    fn fields(&self) -> Vec<Field> {
        vec![
            Field::new("embedding", DataType::FixedSizeList(Arc::clone(&self.item), self.width), true),
            Field::new("truncated", DataType::Boolean, false),
            Field::new("error", DataType::Utf8, true),
        ]
    }

    fn metadata(&self) -> Vec<(String, String)> {
        vec![("elmo.fingerprint".into(), "constant".into())]
    }

    /// On a thread of its own, as [`EmbedStage`](crate::stage::EmbedStage).
    async fn submit(&self, texts: &ArrayRef) -> elmo::Result<Pending> {
        let (constant, texts) = (self.clone(), Arc::clone(texts));
        let done = tokio::task::spawn_blocking(move || constant.embed(&texts)).await;
        let done = done.unwrap_or(Err(elmo::Error::Closed));
        Ok(Box::pin(async { done }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_has_the_vector_and_no_text_has_none() {
        let texts: ArrayRef = Arc::new(StringArray::from(vec![Some("a"), None, Some("b")]));
        let stage = Constant::new(3);
        let columns = stage.embed(&texts).unwrap();
        let vectors = columns.vectors.as_any().downcast_ref::<FixedSizeListArray>().unwrap();
        assert_eq!(
            (vectors.len(), vectors.is_null(1), vectors.value(0).to_data() == vectors.value(2).to_data()),
            (3, true, true)
        );
        assert_eq!(stage.fields()[0].data_type(), vectors.data_type());
        let stats = columns.stats;
        assert_eq!((stats.rows, stats.nulls, stats.sentences, stats.tokens), (3, 1, 2, 2));
    }
}
