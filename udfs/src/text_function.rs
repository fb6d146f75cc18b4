//! A function over one text, such as `elmo_embed`, `elmo_tokens` and `try_elmo_embed`.
//!
//! These are plain synchronous functions: a call submits its rows to the embedder, which all queries share, and blocks
//! until they are done. So a call works wherever DataFusion evaluates an expression: in CASE, joins, sort keys and
//! aggregates. DataFusion's asynchronous functions do not. The planner rules move most calls into an operator that does
//! not block: see the module `plan`.

use std::sync::Arc;

use datafusion::{
    arrow::datatypes::{DataType, FieldRef},
    common::{ScalarValue, tree_node::TreeNode},
    error::Result,
    logical_expr::{ColumnarValue, Expr, ReturnFieldArgs, ScalarFunctionArgs, Signature, Volatility},
};
use elmo::{spec::OnError, surprisal::Scorer};

use crate::{
    args::{EmbedOptions, Parameters, coerce_text, literal_value},
    call::{Call, Kind},
    models::Models,
};

/// A function over one text, with the models that it may use.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct TextFunction {
    pub(crate) parameters: Parameters,
    pub(crate) kind: Kind,
    pub(crate) models: Models,
    pub(crate) signature: Signature,
}

impl TextFunction {
    pub(crate) fn new(parameters: Parameters, kind: Kind, models: Models) -> Self {
        // Immutable: the weights never change, so equal texts have equal results, and DataFusion may evaluate a
        // repeated call once.
        Self { parameters, kind, models, signature: parameters.signature(Volatility::Immutable) }
    }

    /// The same function, declared volatile. DataFusion does not fold volatile calls into constants when it plans a
    /// query, so EXPLAIN does not run the model. A constant is nevertheless embedded once for all rows.
    pub(crate) fn volatile(&self) -> Self {
        Self { signature: self.parameters.signature(Volatility::Volatile), ..self.clone() }
    }

    pub(crate) fn is_volatile(&self) -> bool {
        self.signature.volatility == Volatility::Volatile
    }

    pub(crate) fn coerce(&self, types: &[DataType]) -> Result<Vec<DataType>> {
        let (texts, options) = self.parameters.split(types)?;
        let texts = texts.iter().zip(self.parameters.names);
        let texts = texts.map(|(data_type, name)| coerce_text(&self.parameters, name, data_type));
        texts.chain(options.iter().map(|data_type| Ok(data_type.clone()))).collect()
    }

    /// The field of the result. Describes the model, but does not open it.
    pub(crate) fn field(&self, args: &ReturnFieldArgs) -> Result<FieldRef> {
        let (_, options) = self.parameters.split(args.scalar_arguments)?;
        let call = self.call(options)?;
        Ok(Arc::new(call.field(&self.models)?.with_name(self.parameters.function)))
    }

    /// The call with these options.
    pub(crate) fn call(&self, options: &[Option<&ScalarValue>]) -> Result<Call> {
        let mut options = EmbedOptions::parse(&self.parameters, self.kind.level(), &self.models, options)?;
        if self.kind == Kind::Checked {
            options.spec.on_error = OnError::Null;
        }
        if self.kind.is_score() {
            options.spec = Scorer::spec(&options.spec);
        }
        Ok(Call { function: self.parameters.function, kind: self.kind, options })
    }

    pub(crate) fn invoke(&self, args: &ScalarFunctionArgs) -> Result<ColumnarValue> {
        let (texts, options) = self.parameters.split(&args.args)?;
        let literals: Vec<_> = options.iter().map(literal_value).collect();
        self.call(&literals)?.evaluate(&self.models, &texts[0])
    }
}

/// Whether the first `columns` arguments of a call have the same values for all rows.
pub(crate) fn is_constant(args: &[Expr], columns: usize) -> bool {
    !args.iter().take(columns).any(|arg| arg.any_column_refs() || arg.contains_outer() || has_placeholder(arg))
}

fn has_placeholder(expr: &Expr) -> bool {
    expr.exists(|e| Ok(matches!(e, Expr::Placeholder(_)))).unwrap_or(true)
}

/// The methods of [`datafusion::logical_expr::ScalarUDFImpl`] for a struct whose only field is a [`TextFunction`]. The
/// static `DOCUMENTATION` is its documentation.
macro_rules! text_function {
    () => {
        fn name(&self) -> &str {
            self.0.parameters.function
        }

        fn signature(&self) -> &datafusion::logical_expr::Signature {
            &self.0.signature
        }

        fn return_type(
            &self,
            _: &[datafusion::arrow::datatypes::DataType],
        ) -> datafusion::error::Result<datafusion::arrow::datatypes::DataType> {
            datafusion::common::internal_err!("the type depends on the options: see return_field_from_args")
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

        /// Other optimiser rules may have made the text constant. The result must not be computed by constant folding.
        fn simplify(
            &self,
            args: Vec<datafusion::logical_expr::Expr>,
            _: &datafusion::logical_expr::simplify::SimplifyContext,
        ) -> datafusion::error::Result<datafusion::logical_expr::simplify::ExprSimplifyResult> {
            use datafusion::logical_expr::{ScalarUDF, simplify::ExprSimplifyResult};
            if self.0.is_volatile() || !crate::text_function::is_constant(&args, self.0.parameters.columns) {
                return Ok(ExprSimplifyResult::Original(args));
            }
            Ok(ExprSimplifyResult::Simplified(ScalarUDF::new_from_impl(Self(self.0.volatile())).call(args)))
        }

        fn documentation(&self) -> Option<&datafusion::logical_expr::Documentation> {
            Some(&DOCUMENTATION)
        }
    };
}
pub(crate) use text_function;
