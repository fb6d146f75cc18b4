//! Bare NULLs beside embedding calls in VALUES: `VALUES (1, elmo_embed('a')), (2, NULL)`.
//!
//! DataFusion rejects them: the field of a vector names its model, and the field of NULL does not. Before DataFusion
//! plans the statement, NULL is replaced by `elmo_embed(NULL)` with the options of the call.

use std::ops::ControlFlow;

use datafusion::sql::{
    parser::Statement,
    sqlparser::ast::{Expr, FunctionArg, FunctionArguments, Query, SetExpr, Value, Values, VisitorMut},
};

use super::ast::{null, parameters_of, visit};

/// Gives the NULLs beside calls the type of the call, in all VALUES of a statement. Run it after
/// [`fill_gaps`](super::named_arguments::fill_gaps).
pub(super) fn type_nulls(statement: &mut Statement) {
    visit(statement, &mut Queries);
}

struct Queries;

impl VisitorMut for Queries {
    type Break = ();

    fn pre_visit_query(&mut self, query: &mut Query) -> ControlFlow<()> {
        if let SetExpr::Values(values) = query.body.as_mut() {
            type_columns(values);
        }
        ControlFlow::Continue(())
    }
}

fn type_columns(values: &mut Values) {
    let columns = values.rows.first().map_or(0, |row| row.content.len());
    for column in 0..columns {
        let cells = values.rows.iter().filter_map(|row| row.content.get(column));
        let Some(typed_null) = cells.into_iter().find_map(call_on_null) else { continue };
        for cell in values.rows.iter_mut().filter_map(|row| row.content.get_mut(column)) {
            if matches!(cell, Expr::Value(value) if value.value == Value::Null) {
                *cell = typed_null.clone();
            }
        }
    }
}

/// If a cell is a call of this crate's functions, the same call with NULL for its texts.
fn call_on_null(cell: &Expr) -> Option<Expr> {
    let Expr::Function(function) = cell else { return None };
    let parameters = parameters_of(function)?;
    let mut function = function.clone();
    let FunctionArguments::List(list) = &mut function.args else { return None };
    if list.args.iter().any(|arg| !matches!(arg, FunctionArg::Unnamed(_))) {
        return None;
    }
    list.args.iter_mut().take(parameters.texts()).for_each(|arg| *arg = FunctionArg::Unnamed(null()));
    Some(Expr::Function(function))
}
