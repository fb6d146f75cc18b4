//! `elmo_functions()`: the functions of this crate, a row each.

use std::sync::Arc;

use datafusion::{
    catalog::{TableFunctionArgs, TableFunctionImpl, TableProvider},
    common::plan_err,
    error::Result,
    logical_expr::Documentation,
};

use super::{aggregate, elmo_models::table_of_strings, scalar};
use crate::Models;

/// The name in SQL.
pub const NAME: &str = "elmo_functions";

/// The table function: `name, kind, syntax, description`.
#[derive(Debug)]
pub struct ElmoFunctions(Models);

impl ElmoFunctions {
    /// The functions over these models.
    #[must_use]
    pub fn new(models: Models) -> Self {
        Self(models)
    }
}

impl TableFunctionImpl for ElmoFunctions {
    fn call_with_args(&self, args: TableFunctionArgs) -> Result<Arc<dyn TableProvider>> {
        if !args.exprs().is_empty() {
            return plan_err!("{NAME} takes no arguments");
        }
        let row = |name: &str, kind: &str, documentation: Option<&Documentation>| {
            let of = |get: fn(&Documentation) -> &String| documentation.map(get).cloned().unwrap_or_default();
            vec![name.to_owned(), kind.to_owned(), of(|d| &d.syntax_example), of(|d| &d.description)]
        };
        let mut rows: Vec<Vec<String>> =
            scalar(&self.0).iter().map(|function| row(function.name(), "scalar", function.documentation())).collect();
        rows.extend(aggregate().iter().map(|function| row(function.name(), "aggregate", function.documentation())));
        for (name, description) in [
            (super::elmo_models::NAME, "The models that this session may name."),
            (NAME, "The functions that elmo adds."),
        ] {
            rows.push(vec![name.to_owned(), "table".to_owned(), format!("{name}()"), description.to_owned()]);
        }
        rows.sort();
        table_of_strings(&["name", "kind", "syntax", "description"], &rows)
    }
}
