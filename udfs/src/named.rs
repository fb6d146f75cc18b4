//! Named options with gaps: `elmo_embed(text, pooling => 'max')` becomes `elmo_embed(text, NULL, 'max')`.
//!
//! DataFusion resolves names to positions by itself, but refuses a call whose positions have a gap. So the gaps are
//! filled in the parsed statement, before DataFusion plans it. Unknown names, names given twice, and values without a
//! name after named ones are left as they are: DataFusion's own errors about them are good.

use std::ops::ControlFlow;

use datafusion::sql::{
    parser::{CopyToSource, Statement},
    sqlparser::ast::{
        Expr, Function, FunctionArg, FunctionArgExpr, FunctionArgumentList, FunctionArguments, Ident, Value,
        visit_expressions_mut,
    },
};

use crate::{args::Shape, functions};

/// Fills the gaps in every call of ours in a statement.
pub(crate) fn fill_gaps(statement: &mut Statement) {
    let mut visit = |expression: &mut Expr| -> ControlFlow<()> {
        if let Expr::Function(function) = expression {
            fill_call(function);
        }
        ControlFlow::Continue(())
    };
    // The closure never breaks off, so there is nothing to look at in what it returns.
    let _ = match statement {
        Statement::Statement(statement) => visit_expressions_mut(statement.as_mut(), &mut visit),
        Statement::CopyTo(copy) => match &mut copy.source {
            CopyToSource::Query(query) => visit_expressions_mut(query.as_mut(), &mut visit),
            CopyToSource::Relation(_) => ControlFlow::Continue(()),
        },
        Statement::Explain(explain) => {
            fill_gaps(&mut explain.statement);
            ControlFlow::Continue(())
        }
        _ => ControlFlow::Continue(()),
    };
}

fn fill_call(function: &mut Function) {
    let Some(shape) = shape_of(function) else { return };
    if let FunctionArguments::List(list) = &mut function.args
        && let Some(positions) = positions(list, &shape)
    {
        list.args = positions.into_iter().map(|value| FunctionArg::Unnamed(value.unwrap_or_else(null))).collect();
    }
}

/// The shape of a function of ours that takes options.
pub(crate) fn shape_of(function: &Function) -> Option<Shape> {
    let name = function.name.to_string().to_lowercase();
    functions::SHAPES.into_iter().find(|shape| shape.name == name)
}

/// Values by position up to the last one given; `None` when a name is unknown, twice there, or before a nameless value.
fn positions(list: &FunctionArgumentList, shape: &Shape) -> Option<Vec<Option<FunctionArgExpr>>> {
    let mut values: Vec<Option<FunctionArgExpr>> = Vec::new();
    let mut named = false;
    for (place, argument) in list.args.iter().enumerate() {
        let (place, value) = match split(argument)? {
            (Some(name), value) => (shape.parameters.iter().position(|p| p.eq_ignore_ascii_case(&name.value))?, value),
            (None, value) => (place, value),
        };
        let is_named = !matches!(argument, FunctionArg::Unnamed(_));
        if named && !is_named {
            return None;
        }
        named = is_named;
        values.resize(values.len().max(place + 1), None);
        if values[place].replace(value.clone()).is_some() {
            return None;
        }
    }
    // A column that is missing is not filled up: DataFusion says so.
    let missing = values.iter().take(shape.columns).any(Option::is_none);
    (!missing).then_some(values)
}

fn split(argument: &FunctionArg) -> Option<(Option<&Ident>, &FunctionArgExpr)> {
    match argument {
        FunctionArg::Unnamed(value) => Some((None, value)),
        FunctionArg::Named { name, arg, .. } => Some((Some(name), arg)),
        FunctionArg::ExprNamed { name: Expr::Identifier(name), arg, .. } => Some((Some(name), arg)),
        FunctionArg::ExprNamed { .. } => None,
    }
}

pub(crate) fn null() -> FunctionArgExpr {
    FunctionArgExpr::Expr(Expr::Value(Value::Null.into()))
}
