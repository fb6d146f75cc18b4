//! `elmo_functions()`: a table of the functions of this crate, one row each.

use std::sync::Arc;

use datafusion::{
    arrow::{
        array::{ArrayRef, RecordBatch, StringArray},
        datatypes::{DataType, Field, Schema},
    },
    catalog::{MemTable, TableFunctionArgs, TableFunctionImpl, TableProvider},
    common::plan_err,
    error::Result,
    logical_expr::Documentation,
};

use super::{
    elmo_mixes, elmo_models,
    registry::{aggregate, scalar},
};
use crate::models::Models;

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
            (elmo_models::NAME, "The models that queries of this session may name."),
            (elmo_mixes::NAME, "The scalar mixes that queries of this session may name."),
            (NAME, "The functions that elmo adds to the session."),
        ] {
            rows.push(vec![name.to_owned(), "table".to_owned(), format!("{name}()"), description.to_owned()]);
        }
        rows.sort();
        string_table(&["name", "kind", "syntax", "description"], &rows)
    }
}

/// A table in memory whose columns are strings.
fn string_table(names: &[&str], rows: &[Vec<String>]) -> Result<Arc<dyn TableProvider>> {
    let fields: Vec<Field> = names.iter().map(|name| Field::new(*name, DataType::Utf8, false)).collect();
    let column = |n: usize| Arc::new(rows.iter().map(|row| Some(row[n].as_str())).collect::<StringArray>()) as ArrayRef;
    let schema = Arc::new(Schema::new(fields));
    let rows = RecordBatch::try_new(Arc::clone(&schema), (0..names.len()).map(column).collect())?;
    Ok(Arc::new(MemTable::try_new(schema, vec![vec![rows]])?))
}
