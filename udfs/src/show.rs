//! `SHOW FUNCTIONS`. DataFusion's joins functions with lists of argument types, and so leaves out all whose arguments are of
//! no fixed type: ours, which take options by name, and many of its own.

use datafusion::{
    common::Result,
    prelude::{DataFrame, SessionContext},
    sql::{
        parser::Statement,
        sqlparser::ast::{ShowStatementFilter, Statement as Sql},
    },
};

/// The condition on names of a `SHOW FUNCTIONS`; `None` for other statements.
pub(crate) fn functions(statement: &Statement) -> Option<String> {
    let Statement::Statement(statement) = statement else { return None };
    match statement.as_ref() {
        Sql::ShowFunctions { filter: Some(ShowStatementFilter::Like(like)) } => {
            Some(format!("routine_name LIKE '{}'", like.replace('\'', "''")))
        }
        Sql::ShowFunctions { .. } => Some("true".to_owned()),
        _ => None,
    }
}

/// The functions that DataFusion lists, and those that it leaves out.
///
/// # Errors
/// When the information schema is switched off.
pub(crate) async fn complete(context: &SessionContext, listed: DataFrame, condition: &str) -> Result<DataFrame> {
    let left_out = format!(
        "SELECT DISTINCT routine_name AS function_name, data_type AS return_type, NULL AS parameters, \
         NULL AS parameter_types, function_type, description, syntax_example \
         FROM information_schema.routines WHERE {condition} AND function_type <> 'TABLE' AND routine_name NOT IN \
         (SELECT specific_name FROM information_schema.parameters WHERE parameter_mode = 'OUT')"
    );
    listed.union(context.sql(&left_out).await?)
}
