//! Helpers for rewriting parsed statements.

use std::ops::ControlFlow;

use datafusion::sql::{
    parser::{CopyToSource, Statement},
    sqlparser::ast::{Expr, Function, FunctionArgExpr, Value, VisitMut, VisitorMut},
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
    let name = function.name.to_string().to_lowercase();
    functions::PARAMETERS.into_iter().find(|parameters| parameters.function == name)
}

/// The literal NULL as an argument.
pub(super) fn null() -> FunctionArgExpr {
    FunctionArgExpr::Expr(Expr::Value(Value::Null.into()))
}
