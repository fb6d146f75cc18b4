//! NULL beside calls in a column of VALUES: `VALUES (1, elmo_embed('a')), (2, NULL)`.
//!
//! DataFusion refuses it: a vector's field says which model it is of, and NULL does not. Before it plans the statement,
//! NULL becomes `elmo_embed(NULL)`, with the options of the call.

use std::ops::ControlFlow;

use datafusion::sql::{
    parser::{CopyToSource, Statement},
    sqlparser::ast::{Expr, FunctionArg, FunctionArguments, Query, SetExpr, Value, Values, VisitMut, VisitorMut},
};

use crate::named::{null, shape_of};

/// Says of which call a NULL is, in every VALUES of a statement. Comes behind [`crate::named::fill_gaps`].
pub(crate) fn say_of_what(statement: &mut Statement) {
    // The visitor never breaks off, so there is nothing to look at in what it returns.
    let _ = match statement {
        Statement::Statement(statement) => statement.visit(&mut Nulls),
        Statement::CopyTo(copy) => match &mut copy.source {
            CopyToSource::Query(query) => query.visit(&mut Nulls),
            CopyToSource::Relation(_) => ControlFlow::Continue(()),
        },
        Statement::Explain(explain) => {
            say_of_what(&mut explain.statement);
            ControlFlow::Continue(())
        }
        _ => ControlFlow::Continue(()),
    };
}

struct Nulls;

impl VisitorMut for Nulls {
    type Break = ();

    fn pre_visit_query(&mut self, query: &mut Query) -> ControlFlow<()> {
        if let SetExpr::Values(values) = query.body.as_mut() {
            complete(values);
        }
        ControlFlow::Continue(())
    }
}

fn complete(values: &mut Values) {
    let columns = values.rows.first().map_or(0, |row| row.content.len());
    for place in 0..columns {
        let Some(null) = values.rows.iter().filter_map(|row| row.content.get(place)).find_map(of_null) else {
            continue;
        };
        for cell in values.rows.iter_mut().filter_map(|row| row.content.get_mut(place)) {
            if matches!(cell, Expr::Value(value) if value.value == Value::Null) {
                *cell = null.clone();
            }
        }
    }
}

/// The call of ours that a cell is, with NULL for its columns.
fn of_null(cell: &Expr) -> Option<Expr> {
    let Expr::Function(function) = cell else { return None };
    let shape = shape_of(function)?;
    let mut function = function.clone();
    let FunctionArguments::List(list) = &mut function.args else { return None };
    if list.args.iter().any(|arg| !matches!(arg, FunctionArg::Unnamed(_))) {
        return None;
    }
    list.args.iter_mut().take(shape.columns).for_each(|arg| *arg = FunctionArg::Unnamed(null()));
    Some(Expr::Function(function))
}
