//! Named options with gaps: `elmo_embed(text, pooling => 'max')` becomes `elmo_embed(text, NULL, 'max')`.
//!
//! DataFusion resolves names to positions, but rejects a call with gaps between the positions. Gaps are filled in the
//! parsed statement, before DataFusion plans it. Unknown names, duplicate names and positional arguments after named
//! ones are left to DataFusion, which reports them, except in `elmo_word(text, word)`.

use std::ops::ControlFlow;

use datafusion::{
    common::{Result, plan_err},
    sql::{
        parser::Statement,
        sqlparser::ast::{
            Expr, Function, FunctionArg, FunctionArgExpr, FunctionArgumentList, FunctionArguments, Ident, VisitorMut,
        },
    },
};

use super::ast::{is_null, null, null_string, parameters_of, visit};
use crate::{args::Parameters, functions::elmo_word::BY_WORD};

/// Fills the gaps in all calls of this crate's functions in a statement.
///
/// # Errors
/// When a call `elmo_word(text, word)` is wrong: DataFusion knows only the names of the other form.
pub(super) fn fill_gaps(statement: &mut Statement) -> Result<()> {
    let mut calls = Calls { error: None };
    visit(statement, &mut calls);
    calls.error.map_or(Ok(()), |reason| plan_err!("{reason}"))
}

struct Calls {
    /// The first error.
    error: Option<String>,
}

impl VisitorMut for Calls {
    type Break = ();

    fn post_visit_expr(&mut self, expression: &mut Expr) -> ControlFlow<()> {
        if let Expr::Function(function) = expression
            && let Err(reason) = fill_call(function)
        {
            self.error.get_or_insert(reason);
        }
        ControlFlow::Continue(())
    }
}

fn fill_call(function: &mut Function) -> Result<(), String> {
    let Some(parameters) = parameters_of(function) else { return Ok(()) };
    let FunctionArguments::List(list) = &mut function.args else { return Ok(()) };
    let is_by_word = parameters == BY_WORD;
    match by_position(list, &parameters) {
        Ok(mut values) => {
            // An untyped NULL could be the start of a range as well.
            if let Some(Some(word)) = values.get_mut(1)
                && is_by_word
                && is_null(word)
            {
                *word = null_string();
            }
            list.args = values.into_iter().map(|value| FunctionArg::Unnamed(value.unwrap_or_else(null))).collect();
            Ok(())
        }
        Err(reason) if is_by_word && list.args.len() > 1 => Err(format!("{}: {reason}", parameters.function)),
        // DataFusion reports it.
        Err(_) => Ok(()),
    }
}

/// The arguments by position, up to the last one given.
///
/// # Errors
/// When a name is unknown or given twice, a positional argument follows a named one, or a column is missing.
fn by_position(list: &FunctionArgumentList, parameters: &Parameters) -> Result<Vec<Option<FunctionArgExpr>>, String> {
    let mut values: Vec<Option<FunctionArgExpr>> = Vec::new();
    let mut after_named = false;
    for (index, argument) in list.args.iter().enumerate() {
        let (position, value) = match split(argument)? {
            (Some(name), value) => {
                let position = parameters.names.iter().position(|other| other.eq_ignore_ascii_case(&name.value));
                let legal = || parameters.names.join(", ");
                (position.ok_or_else(|| format!("no parameter {:?}; there are {}", name.value, legal()))?, value)
            }
            (None, value) => (index, value),
        };
        let is_named = !matches!(argument, FunctionArg::Unnamed(_));
        if after_named && !is_named {
            return Err("a positional argument follows a named one".to_owned());
        }
        after_named = is_named;
        values.resize(values.len().max(position + 1), None);
        if values[position].replace(value.clone()).is_some() {
            let name = parameters.names.get(position).unwrap_or(&"an argument");
            return Err(format!("{name} is given twice"));
        }
    }
    let is_missing = |(index, _): &(usize, _)| values.get(*index).is_none_or(Option::is_none);
    match parameters.names[..parameters.columns].iter().enumerate().find(is_missing) {
        Some((_, name)) => Err(format!("there is no {name}")),
        None => Ok(values),
    }
}

/// The name of an argument, if it has one, and its value.
fn split(argument: &FunctionArg) -> Result<(Option<&Ident>, &FunctionArgExpr), String> {
    match argument {
        FunctionArg::Unnamed(value) => Ok((None, value)),
        FunctionArg::Named { name, arg, .. } => Ok((Some(name), arg)),
        FunctionArg::ExprNamed { name: Expr::Identifier(name), arg, .. } => Ok((Some(name), arg)),
        FunctionArg::ExprNamed { name, .. } => Err(format!("{name} is not the name of a parameter")),
    }
}
