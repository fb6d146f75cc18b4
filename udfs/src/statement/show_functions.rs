//! `SHOW FUNCTIONS`. DataFusion joins the list of functions with the list of their argument types, and so omits all
//! functions without fixed argument types: those of this crate, and many of its own.

use datafusion::{
    common::Result,
    prelude::{DataFrame, SessionContext},
    sql::{
        parser::Statement,
        sqlparser::ast::{ShowStatementFilter, Statement as Sql},
    },
};

/// The condition of a `SHOW FUNCTIONS` on the names, as SQL. `None` for other statements.
pub(super) fn filter(statement: &Statement) -> Option<String> {
    let Statement::Statement(statement) = statement else { return None };
    match statement.as_ref() {
        Sql::ShowFunctions { filter: Some(ShowStatementFilter::Like(like)) } => {
            Some(format!("routine_name LIKE '{}'", like.replace('\'', "''")))
        }
        Sql::ShowFunctions { .. } => Some("true".to_owned()),
        _ => None,
    }
}

/// Adds the functions that DataFusion omits.
///
/// # Errors
/// When the information schema is disabled.
pub(super) async fn add_missing(context: &SessionContext, listed: DataFrame, filter: &str) -> Result<DataFrame> {
    let missing = format!(
        "SELECT DISTINCT routine_name AS function_name, data_type AS return_type, NULL AS parameters, \
         NULL AS parameter_types, function_type, description, syntax_example \
         FROM information_schema.routines WHERE {filter} AND function_type <> 'TABLE' AND routine_name NOT IN \
         (SELECT specific_name FROM information_schema.parameters WHERE parameter_mode = 'OUT')"
    );
    listed.union(context.sql(&missing).await?)
}
