//! Named options with gaps: `elmo_embed(text, pooling => 'max')` becomes `elmo_embed(text, NULL, 'max')`.
//!
//! DataFusion resolves names to positions, but rejects a call with gaps between the positions. Gaps are filled in the
//! parsed statement, before DataFusion plans it. Unknown names, duplicate names and positional arguments after named
//! ones are left to DataFusion, which reports them.

use std::ops::ControlFlow;

use datafusion::sql::{
    parser::Statement,
    sqlparser::ast::{
        Expr, Function, FunctionArg, FunctionArgExpr, FunctionArgumentList, FunctionArguments, Ident, VisitorMut,
    },
};

use super::ast::{null, parameters_of, visit};
use crate::args::Parameters;

/// Fills the gaps in all calls of this crate's functions in a statement.
pub(super) fn fill_gaps(statement: &mut Statement) {
    visit(statement, &mut Calls);
}

struct Calls;

impl VisitorMut for Calls {
    type Break = ();

    fn post_visit_expr(&mut self, expression: &mut Expr) -> ControlFlow<()> {
        if let Expr::Function(function) = expression {
            fill_call(function);
        }
        ControlFlow::Continue(())
    }
}

fn fill_call(function: &mut Function) {
    let Some(parameters) = parameters_of(function) else { return };
    if let FunctionArguments::List(list) = &mut function.args
        && let Some(values) = by_position(list, &parameters)
    {
        list.args = values.into_iter().map(|value| FunctionArg::Unnamed(value.unwrap_or_else(null))).collect();
    }
}

/// The arguments by position, up to the last one given. `None` when a name is unknown or given twice, a positional
/// argument follows a named one, or a column is missing.
fn by_position(list: &FunctionArgumentList, parameters: &Parameters) -> Option<Vec<Option<FunctionArgExpr>>> {
    let mut values: Vec<Option<FunctionArgExpr>> = Vec::new();
    let mut after_named = false;
    for (index, argument) in list.args.iter().enumerate() {
        let (position, value) = match split(argument)? {
            (Some(name), value) => {
                (parameters.names.iter().position(|other| other.eq_ignore_ascii_case(&name.value))?, value)
            }
            (None, value) => (index, value),
        };
        let is_named = !matches!(argument, FunctionArg::Unnamed(_));
        if after_named && !is_named {
            return None;
        }
        after_named = is_named;
        values.resize(values.len().max(position + 1), None);
        if values[position].replace(value.clone()).is_some() {
            return None;
        }
    }
    let column_is_missing = values.iter().take(parameters.columns).any(Option::is_none);
    (!column_is_missing).then_some(values)
}

/// The name of an argument, if it has one, and its value.
fn split(argument: &FunctionArg) -> Option<(Option<&Ident>, &FunctionArgExpr)> {
    match argument {
        FunctionArg::Unnamed(value) => Some((None, value)),
        FunctionArg::Named { name, arg, .. } => Some((Some(name), arg)),
        FunctionArg::ExprNamed { name: Expr::Identifier(name), arg, .. } => Some((Some(name), arg)),
        FunctionArg::ExprNamed { .. } => None,
    }
}
