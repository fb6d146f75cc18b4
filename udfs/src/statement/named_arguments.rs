//! Named options with gaps: `elmo_embed(text, pooling => 'max')` becomes `elmo_embed(text, NULL, 'max')`.
//!
//! DataFusion resolves names to positions, but rejects a call with gaps between the positions. Gaps are filled in the
//! parsed statement, before DataFusion plans it. Wrong names and orders are reported here, because DataFusion's errors do
//! not name the function, and it knows only one of the forms of `elmo_word`. Missing columns are reported when the call is
//! planned.

use std::ops::ControlFlow;

use datafusion::{
    common::{Result, plan_err, utils::datafusion_strsim::normalized_levenshtein},
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
/// When a call has an unknown or a repeated name, or a positional argument after a named one.
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
    let mut values = by_position(list, &parameters).map_err(|reason| format!("{}: {reason}", parameters.function))?;
    if let Some(name) = missing(&values, &parameters) {
        // With one argument, the form of elmo_word is not known.
        return if is_by_word && list.args.len() > 1 { Err(needs(&parameters, name)) } else { Ok(()) };
    }
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

/// The first column that was not given.
fn missing(values: &[Option<FunctionArgExpr>], parameters: &Parameters) -> Option<&'static str> {
    let is_missing = |index: &usize| values.get(*index).is_none_or(Option::is_none);
    (0..parameters.columns).find(is_missing).map(|index| parameters.names[index])
}

fn needs(parameters: &Parameters, column: &str) -> String {
    let (function, names) = (parameters.function, parameters.names.join(", "));
    format!("{function} needs {column}: {function}({names})")
}

/// The arguments by position, up to the last one given.
///
/// # Errors
/// When a name is unknown or given twice, or a positional argument follows a named one.
fn by_position(list: &FunctionArgumentList, parameters: &Parameters) -> Result<Vec<Option<FunctionArgExpr>>, String> {
    let mut values: Vec<Option<FunctionArgExpr>> = Vec::new();
    let mut after_named = false;
    for (index, argument) in list.args.iter().enumerate() {
        let (position, value) = match split(argument)? {
            (Some(name), value) => {
                let position = parameters.names.iter().position(|other| other.eq_ignore_ascii_case(&name.value));
                (position.ok_or_else(|| unknown(&name.value, parameters))?, value)
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
    Ok(values)
}

/// Similarity from which a name is suggested, 0 to 1.
const SIMILAR: f64 = 0.5;

fn unknown(name: &str, parameters: &Parameters) -> String {
    let similarity = |other: &str| normalized_levenshtein(&name.to_lowercase(), other);
    let rated = parameters.names.iter().map(|other| (similarity(other), other)).filter(|(rate, _)| *rate >= SIMILAR);
    let nearest = rated.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, other)| format!("; did you mean {other}?"));
    let legal = parameters.names.join(", ");
    format!("unknown parameter {name:?}; legal names are {legal}{}", nearest.unwrap_or_default())
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
