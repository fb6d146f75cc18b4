//! `\df`: explains a function, or lists functions.

use datafusion::logical_expr::Documentation;

use super::super::nearest::did_you_mean;
use crate::{
    error::{Error, Result},
    sql::{
        Sql,
        text::{width, wrap},
    },
};

/// The answer to `\df`.
#[derive(Debug, PartialEq, Eq)]
pub enum FunctionHelp {
    /// The explanation of a function.
    One(String),
    /// A statement that lists functions.
    Several(String),
}

/// Functions by kind, as `\df` lists them. DataFusion lists those of elmo too, some without a description.
const LIST: &str = "SELECT name, kind, description FROM elmo_functions()";
const OTHERS: &str = "SELECT DISTINCT routine_name AS name, lower(function_type) AS kind, description \
                      FROM information_schema.routines WHERE routine_name NOT IN (SELECT name FROM elmo_functions())";

impl Sql {
    /// Explains a function in lines of up to `columns` characters, or lists those whose names contain `name`; without a
    /// name, those of elmo.
    ///
    /// # Errors
    /// [`Error::Usage`] if there is none.
    pub fn function_help(&self, name: Option<&str>, columns: usize) -> Result<FunctionHelp> {
        let Some(name) = name else { return Ok(FunctionHelp::Several(LIST.to_owned())) };
        let name = name.trim_end_matches(['(', ')']).to_lowercase();
        if let Some(documentation) = self.documentation(&name) {
            return Ok(FunctionHelp::One(explain(&documentation, columns)));
        }
        let known = self.function_names();
        match known.iter().any(|known| known.contains(&name)) {
            true => {
                let like = format!("contains(name, '{}')", name.replace('\'', "''"));
                Ok(FunctionHelp::Several(format!(
                    "SELECT * FROM ({LIST} UNION ALL {OTHERS}) WHERE {like} ORDER BY name"
                )))
            }
            false => {
                let nearest = did_you_mean(&name, known.iter().map(String::as_str));
                Err(Error::usage(format!("no function {name}{nearest}"), "SHOW FUNCTIONS lists all"))
            }
        }
    }

    fn documentation(&self, name: &str) -> Option<Documentation> {
        let state = self.context.state();
        let scalar = state.scalar_functions().get(name).and_then(|function| function.documentation());
        let aggregate = || state.aggregate_functions().get(name).and_then(|function| function.documentation());
        let window = || state.window_functions().get(name).and_then(|function| function.documentation());
        scalar.or_else(aggregate).or_else(window).cloned()
    }

    fn function_names(&self) -> Vec<String> {
        let state = self.context.state();
        let names = state.scalar_functions().keys().chain(state.aggregate_functions().keys());
        names.chain(state.window_functions().keys()).chain(state.table_functions().keys()).cloned().collect()
    }
}

/// Syntax, description, arguments and an example.
fn explain(documentation: &Documentation, columns: usize) -> String {
    let arguments = documentation.arguments.as_deref().unwrap_or_default();
    let indent = 4 + arguments.iter().map(|(name, _)| width(name)).max().unwrap_or(0);
    let mut text = paragraph(&documentation.syntax_example, 4, columns).trim_start().to_owned() + "\n";
    text.push_str(&paragraph(&plain(&documentation.description), 0, columns));
    if !arguments.is_empty() {
        text.push('\n');
    }
    for (name, meaning) in arguments {
        let lines = paragraph(&plain(meaning), indent, columns);
        text.push_str(&format!("  {name:0$}{1}", indent - 2, lines.trim_start()));
    }
    if let Some(example) = &documentation.sql_example {
        text.push_str("\nExample\n");
        for line in example.lines().filter(|line| !line.starts_with("```")) {
            text.push_str(&format!("  {line}\n"));
        }
    }
    text
}

/// Lines with an indentation.
fn paragraph(text: &str, indent: usize, columns: usize) -> String {
    let blank = " ".repeat(indent);
    let lines = wrap(text, columns.saturating_sub(indent).max(20));
    lines.into_iter().map(|line| format!("{blank}{line}\n")).collect()
}

/// Markdown without its marks for code.
fn plain(text: &str) -> String {
    text.replace('`', "")
}

#[cfg(test)]
mod tests {
    use datafusion::logical_expr::DocSection;

    use super::*;

    // Written by hand.
    #[test]
    fn a_function_is_explained() {
        let documentation =
            Documentation::builder(DocSection::default(), "Returns the `first` of its arguments.", "f(a [, how => ])")
                .with_argument("a", "A text of any length, in any encoding.")
                .with_argument("how", "`'fast'` (default) or `'slow'`.")
                .with_sql_example("```sql\n> SELECT f('x');\n```")
                .build();
        let expected = "\
f(a [, how => ])

Returns the first of its
arguments.

  a    A text of any
       length, in any
       encoding.
  how  'fast' (default) or
       'slow'.

Example
  > SELECT f('x');
";
        assert_eq!(explain(&documentation, 27), expected);
    }
}
