//! The names of a session for completion: tables with their columns, functions with their options, settings, models.

use datafusion::{
    common::tree_node::TreeNodeRecursion,
    logical_expr::{Documentation, LogicalPlan},
};

use crate::sql::Sql;

/// The names that a statement may use.
#[derive(Debug, Clone, Default)]
pub struct Names {
    pub(super) tables: Vec<Table>,
    /// Columns of the files that were queried.
    pub(super) file_columns: Vec<String>,
    pub(super) functions: Vec<Function>,
    pub(super) table_functions: Vec<String>,
    pub(super) settings: Vec<String>,
    pub(super) models: Vec<String>,
}

impl Names {
    /// Whether the user has created no table or view yet.
    pub fn has_no_table(&self) -> bool {
        self.tables.is_empty()
    }
}

/// A table and its columns.
#[derive(Debug, Clone)]
pub(super) struct Table {
    pub(super) name: String,
    pub(super) columns: Vec<String>,
}

/// A function and its named options.
#[derive(Debug, Clone)]
pub(super) struct Function {
    pub(super) name: String,
    pub(super) options: Vec<Choice>,
}

/// A named option and its legal values, as far as they are words.
#[derive(Debug, Clone)]
pub(super) struct Choice {
    pub(super) name: String,
    pub(super) values: Vec<String>,
}

/// The schema of DataFusion's own views.
const INFORMATION_SCHEMA: &str = "information_schema";

impl Sql {
    /// The names for completion.
    pub async fn names(&self) -> Names {
        let state = self.context.state();
        let scalar = state.scalar_functions().iter().map(|(name, function)| (name, function.documentation()));
        let aggregate = state.aggregate_functions().iter().map(|(name, function)| (name, function.documentation()));
        let window = state.window_functions().iter().map(|(name, function)| (name, function.documentation()));
        let functions = scalar.chain(aggregate).chain(window);
        let functions =
            functions.map(|(name, docs)| Function { name: name.clone(), options: docs.map_or_else(Vec::new, options) });
        Names {
            functions: functions.collect(),
            tables: self.tables().await,
            file_columns: self.file_columns.lock().iter().cloned().collect(),
            table_functions: state.table_functions().keys().cloned().collect(),
            settings: state.config_options().entries().into_iter().map(|entry| entry.key).collect(),
            models: self.models.to_vec(),
        }
    }

    /// The tables and views of the user.
    async fn tables(&self) -> Vec<Table> {
        let mut tables = Vec::new();
        for catalog in self.context.catalog_names() {
            let Some(catalog) = self.context.catalog(&catalog) else { continue };
            for name in catalog.schema_names().into_iter().filter(|name| name != INFORMATION_SCHEMA) {
                let Some(schema) = catalog.schema(&name) else { continue };
                for name in schema.table_names() {
                    let columns = match schema.table(&name).await {
                        Ok(Some(table)) => table.schema().fields().iter().map(|field| field.name().clone()).collect(),
                        _ => Vec::new(),
                    };
                    tables.push(Table { name, columns });
                }
            }
        }
        tables
    }

    /// Remembers the columns of the files that a plan reads.
    pub(in crate::sql) fn remember_columns(&self, plan: &LogicalPlan) {
        let mut columns = self.file_columns.lock();
        let visited = plan.apply_with_subqueries(|plan| {
            if let LogicalPlan::TableScan(scan) = plan {
                columns.extend(scan.source.schema().fields().iter().map(|field| field.name().clone()));
            }
            Ok(TreeNodeRecursion::Continue)
        });
        // The closure does not fail.
        drop(visited);
    }
}

/// The named options of a function: arguments that its syntax shows with `=>`.
fn options(documentation: &Documentation) -> Vec<Choice> {
    let arguments = documentation.arguments.iter().flatten();
    let named = arguments.filter(|(name, _)| documentation.syntax_example.contains(&format!("{name} =>")));
    named.map(|(name, meaning)| Choice { name: name.clone(), values: words(meaning) }).collect()
}

/// The words in single quotes inside backticks: `` `'mean'` ``.
fn words(meaning: &str) -> Vec<String> {
    let quoted = meaning.split("`'").skip(1).filter_map(|rest| rest.split_once("'`"));
    quoted.map(|(word, _)| word.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use elmo::spec::Pooling;

    use super::*;

    /// The expected values are those that the parser of the option accepts.
    #[test]
    fn options_have_the_values_that_the_parser_accepts() {
        let functions = elmo_udfs::functions::scalar(&elmo_udfs::Models::lazy("", []));
        let embed = functions.iter().find(|function| function.name() == "elmo_embed").unwrap();
        let options = options(embed.documentation().unwrap());
        let names: Vec<&str> = options.iter().map(|option| option.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "layers",
                "pooling",
                "model",
                "tokenizer",
                "sentences",
                "state",
                "on_long",
                "on_error",
                "normalize",
                "max_tokens"
            ]
        );
        let pooling = &options[1].values;
        assert!(!pooling.is_empty() && pooling.iter().all(|value| value.parse::<Pooling>().is_ok()), "{pooling:?}");
    }
}
