//! What the functions over one text share: `elmo_embed`, `elmo_tokens`, `try_elmo_embed`.
//!
//! They are plain synchronous functions: a call hands its rows to the embedder that all queries share and waits. That is
//! right wherever DataFusion evaluates an expression (CASE, joins, sort keys, aggregates), which an asynchronous function
//! is not. The planner rules ([`crate::plan`]) lift most calls out into an operator that does not block.

use std::sync::Arc;

use datafusion::{
    arrow::{
        array::{Array, ArrayRef, StructArray},
        datatypes::{DataType, Field, FieldRef, Fields},
    },
    common::{ScalarValue, internal_err},
    error::{DataFusionError, Result},
    logical_expr::{ColumnarValue, Expr, ReturnFieldArgs, ScalarFunctionArgs, Signature, Volatility},
};
use elmo::{
    ColumnEmbedder, EmbeddedColumns,
    lm_head::{LmHeadError, SOFTMAX, VOCAB},
    spec::{Level, OnError},
    surprisal::{Scorer, perplexity_type, surprisal_type},
};

use crate::{
    ModelFailed, Models,
    args::{self, EmbedOptions, Shape},
};

/// What comes out per text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// A vector.
    Vector,
    /// The list of tokens with their vectors.
    Tokens,
    /// A vector, or why there is none.
    Checked,
    /// The list of tokens with their surprisals.
    Surprisal,
    /// One score of a language model.
    Perplexity,
}

impl Kind {
    /// Every kind, by the name that travels.
    #[cfg(feature = "codec")]
    pub(crate) const NAMED: [(&str, Self); 5] = [
        ("vector", Self::Vector),
        ("tokens", Self::Tokens),
        ("checked", Self::Checked),
        ("surprisal", Self::Surprisal),
        ("perplexity", Self::Perplexity),
    ];

    /// Whether it needs an LM head.
    pub(crate) fn is_score(self) -> bool {
        matches!(self, Self::Surprisal | Self::Perplexity)
    }

    fn level(self) -> Level {
        match self {
            Self::Vector | Self::Checked => Level::Sentence,
            Self::Tokens | Self::Surprisal | Self::Perplexity => Level::Token,
        }
    }
}

/// A function over one text, with the models it may use.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct TextFunction {
    pub(crate) shape: Shape,
    pub(crate) kind: Kind,
    pub(crate) models: Models,
    pub(crate) signature: Signature,
}

impl TextFunction {
    pub(crate) fn new(shape: Shape, kind: Kind, models: Models) -> Self {
        // Immutable: the weights never change, so equal texts have equal vectors. DataFusion may then compute a repeated
        // call once.
        Self { shape, kind, models, signature: signature(&shape, Volatility::Immutable) }
    }

    /// The same function for a call on a literal: DataFusion would evaluate it when it plans the query, and EXPLAIN
    /// would run the model. It is answered once for all rows nevertheless.
    pub(crate) fn at_run_time(&self) -> Self {
        Self { signature: signature(&self.shape, Volatility::Volatile), ..self.clone() }
    }

    pub(crate) fn is_at_run_time(&self) -> bool {
        self.signature.volatility == Volatility::Volatile
    }

    pub(crate) fn coerce(&self, types: &[DataType]) -> Result<Vec<DataType>> {
        let (texts, options) = self.shape.split(types)?;
        let texts = texts.iter().zip(self.shape.parameters);
        let texts = texts.map(|(kind, parameter)| args::coerce_text(&self.shape, parameter, kind));
        texts.chain(options.iter().map(|kind| Ok(kind.clone()))).collect()
    }

    /// The field of the result; described models are asked, none is opened.
    pub(crate) fn field(&self, args: &ReturnFieldArgs) -> Result<FieldRef> {
        let (_, options) = self.shape.split(args.scalar_arguments)?;
        let call = self.call(options)?;
        Ok(Arc::new(call.field(&self.models)?.with_name(self.shape.name)))
    }

    /// What a call with these options asks for.
    pub(crate) fn call(&self, options: &[Option<&ScalarValue>]) -> Result<Call> {
        let mut options = EmbedOptions::parse(&self.shape, self.kind.level(), options)?;
        if self.kind == Kind::Checked {
            options.spec.on_error = OnError::Null;
        }
        if self.kind.is_score() {
            options.spec = Scorer::spec(&options.spec);
        }
        Ok(Call { function: self.shape.name, kind: self.kind, options })
    }

    pub(crate) fn invoke(&self, args: &ScalarFunctionArgs) -> Result<ColumnarValue> {
        let (texts, options) = self.shape.split(&args.args)?;
        let literals: Vec<_> = options.iter().map(literal).collect();
        self.call(&literals)?.evaluate(&self.models, &texts[0])
    }
}

pub(crate) fn signature(shape: &Shape, volatility: Volatility) -> Signature {
    let mut signature = Signature::user_defined(volatility);
    signature.parameter_names = Some(shape.parameters.iter().map(ToString::to_string).collect());
    signature
}

pub(crate) fn literal(value: &ColumnarValue) -> Option<&ScalarValue> {
    match value {
        ColumnarValue::Scalar(value) => Some(value),
        ColumnarValue::Array(_) => None,
    }
}

/// Whether the first so many arguments of a call are the same for all rows.
pub(crate) fn is_constant(args: &[Expr], columns: usize) -> bool {
    !args.iter().take(columns).any(|arg| arg.any_column_refs() || arg.contains_outer() || has_placeholder(arg))
}

fn has_placeholder(expr: &Expr) -> bool {
    use datafusion::common::tree_node::TreeNode;
    expr.exists(|e| Ok(matches!(e, Expr::Placeholder(_)))).unwrap_or(true)
}

/// What one call asks of the embedder.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Call {
    /// For messages.
    pub(crate) function: &'static str,
    pub(crate) kind: Kind,
    pub(crate) options: EmbedOptions,
}

impl Call {
    /// Opens the model, if need be.
    pub(crate) fn embedder(&self, models: &Models) -> Result<ColumnEmbedder> {
        let made = models.embedder(self.options.model.as_deref(), &self.options.spec);
        made.map_err(|reason| self.model_failed(reason))
    }

    fn model_failed(&self, reason: String) -> DataFusionError {
        DataFusionError::External(Box::new(ModelFailed(format!("{}: {reason}", self.function))))
    }

    /// Everything that decides what comes out for a text.
    pub(crate) fn identity(&self, models: &Models) -> String {
        let model = self.options.model.as_deref().unwrap_or_else(|| models.default_name());
        format!("{:?} {model:?} {:?}", self.kind, self.options.spec)
    }

    /// The result's field, named as the embedder names it: always nullable, as a blank text has no vector.
    ///
    /// # Errors
    /// A planning error: no model of that name, or options that it cannot do. [`ModelFailed`]: it cannot be described.
    pub(crate) fn field(&self, models: &Models) -> Result<Field> {
        let failed = |reason: String| DataFusionError::Plan(format!("{}: {reason}", self.function));
        let model = self.options.model.as_deref();
        let card = models.card(model).map_err(|reason| match models.has(model) {
            true => self.model_failed(reason),
            false => failed(reason),
        })?;
        let layout = models.layout(model, &self.options.spec).map_err(failed)?;
        let Some(vectors) = layout.fields().into_iter().next() else {
            return internal_err!("a layout without a vector field");
        };
        let scores = |kind| {
            let fingerprint = [("elmo.fingerprint".to_owned(), card.fingerprint.to_string())];
            Field::new(self.function, kind, true).with_metadata(fingerprint.into())
        };
        if self.kind.is_score() {
            let name = model.unwrap_or_else(|| models.default_name());
            match card.lm_head.as_deref() {
                None => return Err(failed(LmHeadError::Missing(name.to_owned()).to_string())),
                Some("") => {
                    let place = &card.location;
                    return Err(failed(format!(
                        "the LM head of {name} cannot be read: {VOCAB} or {SOFTMAX} in {place}"
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

    /// Embeds a column, or one text for all rows: that once for all batches, to be handed on as one value.
    pub(crate) fn evaluate(&self, models: &Models, text: &ColumnarValue) -> Result<ColumnarValue> {
        match text {
            ColumnarValue::Array(column) => Ok(ColumnarValue::Array(self.embed(models, column)?)),
            ColumnarValue::Scalar(text) => {
                let text = text.to_array()?;
                let vector = models.memo().constant(&self.identity(models), &text, || self.embed(models, &text))?;
                Ok(ColumnarValue::Scalar(ScalarValue::try_from_array(&vector, 0)?))
            }
        }
    }

    /// Embeds a column and waits.
    pub(crate) fn embed(&self, models: &Models, column: &ArrayRef) -> Result<ArrayRef> {
        let embedded = self.embedder(models)?.embed(column).map_err(|e| self.failed(e))?;
        self.column(models, column, embedded)
    }

    /// Scores with the model's LM head, which is read when the first text is scored.
    fn scorer(&self, models: &Models) -> Result<Scorer> {
        let elmo = models.open_with_head(self.options.model.as_deref());
        let scorer = elmo.and_then(|elmo| Scorer::new(&elmo, &self.options.spec).map_err(|e| e.to_string()));
        scorer.map_err(|reason| self.model_failed(reason))
    }

    /// The column of the result; takes long where it is scores.
    pub(crate) fn column(&self, models: &Models, text: &ArrayRef, embedded: EmbeddedColumns) -> Result<ArrayRef> {
        match self.kind {
            Kind::Vector | Kind::Tokens => return Ok(embedded.vectors),
            Kind::Surprisal => return self.scorer(models)?.surprisals(text, &embedded).map_err(|e| self.failed(e)),
            Kind::Perplexity => return self.scorer(models)?.perplexities(text, &embedded).map_err(|e| self.failed(e)),
            Kind::Checked => {}
        }
        let field = self.field(models)?;
        let DataType::Struct(fields) = field.data_type() else { return internal_err!("not a struct") };
        let columns: Vec<ArrayRef> =
            vec![embedded.vectors, Arc::new(embedded.error), Arc::new(embedded.truncated), Arc::new(embedded.tokens)];
        Ok(Arc::new(StructArray::try_new(fields.clone(), columns, text.logical_nulls())?))
    }

    /// An error of the engine; a row that cannot be embedded is named by its place in the batch, as a plan knows no
    /// other.
    pub(crate) fn failed(&self, error: elmo::Error) -> DataFusionError {
        match error {
            elmo::Error::Row { reason, .. } => DataFusionError::Execution(format!(
                "{}: a text cannot be embedded: {reason}; on_error => 'null' gives NULL for it, try_elmo_embed the reason",
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

/// The methods of [`datafusion::logical_expr::ScalarUDFImpl`] for a struct whose only field is a [`TextFunction`].
macro_rules! text_function {
    () => {
        fn name(&self) -> &str {
            self.0.shape.name
        }

        fn signature(&self) -> &datafusion::logical_expr::Signature {
            &self.0.signature
        }

        fn return_type(
            &self,
            _: &[datafusion::arrow::datatypes::DataType],
        ) -> datafusion::error::Result<datafusion::arrow::datatypes::DataType> {
            datafusion::common::internal_err!("the type depends on the options; return_field_from_args says it")
        }

        fn coerce_types(
            &self,
            types: &[datafusion::arrow::datatypes::DataType],
        ) -> datafusion::error::Result<Vec<datafusion::arrow::datatypes::DataType>> {
            self.0.coerce(types)
        }

        fn return_field_from_args(
            &self,
            args: datafusion::logical_expr::ReturnFieldArgs,
        ) -> datafusion::error::Result<datafusion::arrow::datatypes::FieldRef> {
            self.0.field(&args)
        }

        fn invoke_with_args(
            &self,
            args: datafusion::logical_expr::ScalarFunctionArgs,
        ) -> datafusion::error::Result<datafusion::logical_expr::ColumnarValue> {
            self.0.invoke(&args)
        }

        /// A text that has become constant must not be embedded when the query is planned.
        fn simplify(
            &self,
            args: Vec<datafusion::logical_expr::Expr>,
            _: &datafusion::logical_expr::simplify::SimplifyContext,
        ) -> datafusion::error::Result<datafusion::logical_expr::simplify::ExprSimplifyResult> {
            use datafusion::logical_expr::{ScalarUDF, simplify::ExprSimplifyResult};
            if self.0.is_at_run_time() || !crate::text_function::is_constant(&args, self.0.shape.columns) {
                return Ok(ExprSimplifyResult::Original(args));
            }
            Ok(ExprSimplifyResult::Simplified(ScalarUDF::new_from_impl(Self(self.0.at_run_time())).call(args)))
        }

        fn documentation(&self) -> Option<&datafusion::logical_expr::Documentation> {
            self.doc()
        }
    };
}
pub(crate) use text_function;
