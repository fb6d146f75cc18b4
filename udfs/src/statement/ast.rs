//! Helpers for rewriting parsed statements.

use std::ops::ControlFlow;

use datafusion::sql::{
    parser::{CopyToSource, Statement},
    sqlparser::ast::{
        CastKind, DataType, Expr, Function, FunctionArg, FunctionArgExpr, FunctionArguments, Value, VisitMut,
        VisitorMut,
    },
};

use crate::{args::Parameters, functions};

/// Visits the syntax tree of a statement.
pub(super) fn visit(statement: &mut Statement, visitor: &mut impl VisitorMut<Break = ()>) {
    // The visitors of this crate never break, so the result carries no information.
    let _ = match statement {
        Statement::Statement(statement) => statement.visit(visitor),
        Statement::CopyTo(copy) => match &mut copy.source {
            CopyToSource::Query(query) => query.visit(visitor),
            CopyToSource::Relation(_) => ControlFlow::Continue(()),
        },
        Statement::Explain(explain) => {
            visit(&mut explain.statement, visitor);
            ControlFlow::Continue(())
        }
        _ => ControlFlow::Continue(()),
    };
}

/// The parameters of a call, if the function is one of this crate that has options.
pub(super) fn parameters_of(function: &Function) -> Option<Parameters> {
    let FunctionArguments::List(list) = &function.args else { return None };
    functions::parameters(&function.name.to_string().to_lowercase(), is_by_word(&list.args))
}

/// Whether a call of `elmo_word` has the form `elmo_word(text, word)`, as far as its syntax tells.
fn is_by_word(args: &[FunctionArg]) -> bool {
    let is_named = |names: &[&str]| args.iter().filter_map(name_of).any(|n| names.contains(&n.to_lowercase().as_str()));
    let positional: Vec<_> = args.iter().take_while(|arg| matches!(arg, FunctionArg::Unnamed(_))).collect();
    let is_text = |index: usize| positional.get(index).is_some_and(|arg| is_string(arg));
    is_named(&["word"]) || !is_named(&["start", "end"]) && (positional.len() < 3 || is_text(1) || is_text(2))
}

fn is_string(arg: &FunctionArg) -> bool {
    let FunctionArg::Unnamed(FunctionArgExpr::Expr(Expr::Value(value))) = arg else { return false };
    matches!(value.value, Value::SingleQuotedString(_))
}

/// The name of an argument, if it has one.
pub(super) fn name_of(arg: &FunctionArg) -> Option<&str> {
    match arg {
        FunctionArg::Named { name, .. } | FunctionArg::ExprNamed { name: Expr::Identifier(name), .. } => {
            Some(&name.value)
        }
        _ => None,
    }
}

/// The literal NULL as an argument.
pub(super) fn null() -> FunctionArgExpr {
    FunctionArgExpr::Expr(Expr::Value(Value::Null.into()))
}

/// Whether an argument is the literal NULL.
pub(super) fn is_null(arg: &FunctionArgExpr) -> bool {
    matches!(arg, FunctionArgExpr::Expr(Expr::Value(value)) if value.value == Value::Null)
}

/// `CAST(NULL AS VARCHAR)` as an argument.
pub(super) fn null_string() -> FunctionArgExpr {
    FunctionArgExpr::Expr(Expr::Cast {
        kind: CastKind::Cast,
        expr: Box::new(Expr::Value(Value::Null.into())),
        data_type: DataType::Varchar(None),
        array: false,
        format: None,
    })
}
