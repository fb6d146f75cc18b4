//! One call of a function over a text: its options, the field of its result, and its evaluation.

use std::sync::Arc;

use datafusion::{
    arrow::{
        array::{Array, ArrayRef, StructArray},
        datatypes::{DataType, Field, Fields},
    },
    common::{ScalarValue, internal_err},
    error::{DataFusionError, Result},
    logical_expr::ColumnarValue,
};
use elmo::{
    ColumnEmbedder, EmbeddedColumns,
    lm_head::{LmHeadError, SOFTMAX, VOCAB},
    spec::Level,
    surprisal::{Scored, Scorer, perplexity_type, surprisal_type},
};

use crate::{
    args::EmbedOptions,
    models::{ModelFailed, Models},
};

/// What a function returns per text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// A vector.
    Vector,
    /// The list of tokens with their vectors.
    Tokens,
    /// A struct of a vector and the error that prevented it.
    Checked,
    /// The list of tokens with their surprisals.
    Surprisal,
    /// The perplexity of the text.
    Perplexity,
}

impl Kind {
    /// Every kind, by its name in serialised plans.
    #[cfg(feature = "codec")]
    pub(crate) const NAMED: [(&str, Self); 5] = [
        ("vector", Self::Vector),
        ("tokens", Self::Tokens),
        ("checked", Self::Checked),
        ("surprisal", Self::Surprisal),
        ("perplexity", Self::Perplexity),
    ];

    /// Whether it needs the model's LM head.
    pub(crate) fn is_score(self) -> bool {
        matches!(self, Self::Surprisal | Self::Perplexity)
    }

    pub(crate) fn level(self) -> Level {
        match self {
            Self::Vector | Self::Checked => Level::Sentence,
            Self::Tokens | Self::Surprisal | Self::Perplexity => Level::Token,
        }
    }
}

/// A call with its options.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Call {
    /// The name of the function, for error messages.
    pub(crate) function: &'static str,
    pub(crate) kind: Kind,
    pub(crate) options: EmbedOptions,
}

impl Call {
    /// The embedder that evaluates the call. Opens the model if necessary.
    pub(crate) fn embedder(&self, models: &Models) -> Result<ColumnEmbedder> {
        let embedder = models.embedder(self.options.model.as_deref(), &self.options.spec);
        embedder.map_err(|reason| self.model_failed(reason))
    }

    fn model_failed(&self, reason: String) -> DataFusionError {
        DataFusionError::External(Box::new(ModelFailed(format!("{}: {reason}", self.function))))
    }

    /// A key of everything that determines the result for a text.
    pub(crate) fn cache_key(&self, models: &Models) -> String {
        let model = self.options.model.as_deref().unwrap_or_else(|| models.default_name());
        format!("{:?} {model:?} {:?}", self.kind, self.options.spec)
    }

    /// The field of the result. It is nullable, as a blank text has no vector.
    ///
    /// # Errors
    /// A planning error when there is no such model or it does not support the options. [`ModelFailed`] when the model
    /// cannot be described.
    pub(crate) fn field(&self, models: &Models) -> Result<Field> {
        let failed = |reason: String| DataFusionError::Plan(format!("{}: {reason}", self.function));
        let model = self.options.model.as_deref();
        let card = models.card_for(self.function, model)?;
        let layout = models.layout(model, &self.options.spec).map_err(failed)?;
        let Some(vectors) = layout.fields().into_iter().next() else {
            return internal_err!("a layout without a vector field");
        };
        let metadata = vectors.metadata().clone().into_iter().chain(self.options.metadata());
        let vectors = vectors.with_metadata(metadata.collect());
        let scores = |data_type| {
            let fingerprint = [("elmo.fingerprint".to_owned(), card.fingerprint.to_string())];
            Field::new(self.function, data_type, true).with_metadata(fingerprint.into())
        };
        if self.kind.is_score() {
            let name = model.unwrap_or_else(|| models.default_name());
            match card.lm_head.as_deref() {
                None => return Err(failed(LmHeadError::Missing(name.to_owned()).to_string())),
                Some("") => {
                    let location = &card.location;
                    return Err(failed(format!(
                        "the LM head of {name} cannot be read: {VOCAB} or {SOFTMAX} in {location}"
                    )));
                }
                Some(_) => {}
            }
        }
        Ok(match self.kind {
            Kind::Vector | Kind::Tokens => vectors,
            Kind::Surprisal => scores(surprisal_type()),
            Kind::Perplexity => scores(perplexity_type()),
            Kind::Checked => {
                let metadata = vectors.metadata().iter().filter(|(key, _)| key.starts_with("elmo."));
                let metadata = metadata.map(|(key, value)| (key.clone(), value.clone())).collect();
                Field::new_struct(self.function, checked_fields(vectors), true).with_metadata(metadata)
            }
        })
    }

    /// Evaluates the call for a column, or for a constant. The result for a constant is cached and returned as a
    /// scalar.
    pub(crate) fn evaluate(&self, models: &Models, text: &ColumnarValue) -> Result<ColumnarValue> {
        match text {
            ColumnarValue::Array(column) => Ok(ColumnarValue::Array(self.embed(models, column)?)),
            ColumnarValue::Scalar(text) => {
                let text = text.to_array()?;
                let constants = &models.caches().constants;
                let vector = constants.get_or_compute(&self.cache_key(models), &text, || self.embed(models, &text))?;
                Ok(ColumnarValue::Scalar(ScalarValue::try_from_array(&vector, 0)?))
            }
        }
    }

    /// Evaluates the call for a column, and blocks until the result is ready.
    pub(crate) fn embed(&self, models: &Models, column: &ArrayRef) -> Result<ArrayRef> {
        let embedded = self.embedder(models)?.embed(column).map_err(|e| self.failed(e))?;
        self.column(models, column, embedded)
    }

    /// Scores texts with the model's LM head, which is read on first use.
    fn scorer(&self, models: &Models) -> Result<Scorer> {
        let elmo = models.open_with_head(self.options.model.as_deref());
        let scorer = elmo.and_then(|elmo| Scorer::new(&elmo, &self.options.spec).map_err(|e| e.to_string()));
        scorer.map_err(|reason| self.model_failed(reason))
    }

    fn scored(
        &self,
        models: &Models,
        text: &ArrayRef,
        embedded: &EmbeddedColumns,
        column: fn(&Scored) -> elmo::Result<ArrayRef>,
    ) -> Result<ArrayRef> {
        let scored = self.scorer(models)?.score(text, embedded);
        scored.and_then(|scored| column(&scored)).map_err(|e| self.failed(e))
    }

    /// The result for embedded texts. Blocks for a long time if the result is a score.
    pub(crate) fn column(&self, models: &Models, text: &ArrayRef, embedded: EmbeddedColumns) -> Result<ArrayRef> {
        match self.kind {
            Kind::Vector | Kind::Tokens => return Ok(embedded.vectors),
            Kind::Surprisal => return self.scored(models, text, &embedded, Scored::surprisals),
            Kind::Perplexity => return self.scored(models, text, &embedded, Scored::perplexities),
            Kind::Checked => {}
        }
        let field = self.field(models)?;
        let DataType::Struct(fields) = field.data_type() else { return internal_err!("not a struct") };
        let columns: Vec<ArrayRef> =
            vec![embedded.vectors, Arc::new(embedded.error), Arc::new(embedded.truncated), Arc::new(embedded.tokens)];
        Ok(Arc::new(StructArray::try_new(fields.clone(), columns, text.logical_nulls())?))
    }

    /// Converts an error of the engine. The reason of a row's error may contain its row number, if the caller knows it.
    pub(crate) fn failed(&self, error: elmo::Error) -> DataFusionError {
        match error {
            elmo::Error::Row { reason, .. } => DataFusionError::Execution(format!(
                "{}: a text cannot be embedded: {reason}; use on_error => 'null' to get NULL instead, or \
                 try_elmo_embed to get the reason",
                self.function
            )),
            error => DataFusionError::External(Box::new(error)),
        }
    }
}

fn checked_fields(vectors: Field) -> Fields {
    Fields::from(vec![
        vectors.with_name("embedding"),
        Field::new("error", DataType::Utf8, true),
        Field::new("truncated", DataType::Boolean, false),
        Field::new("tokens", DataType::UInt32, false),
    ])
}
