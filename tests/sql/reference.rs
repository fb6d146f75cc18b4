//! The reference of the functions, docs/functions.md: generated from their documentation, and checked to be up to date.

use std::fmt::Write;

use datafusion::logical_expr::Documentation;
use elmo_udfs::{Models, functions};

use super::tiny;

/// Read at run time: several clones may share a target folder.
fn path() -> std::path::PathBuf {
    std::path::Path::new(&std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("../docs/functions.md")
}

fn page() -> String {
    let models = Models::from(tiny().clone());
    let (scalar, aggregate) = (functions::scalar(&models), functions::aggregate());
    let mut page =
        "# SQL functions\n\nGenerated from the code by `UPDATE_DOCS=1 cargo test --test sql reference`.\n".to_owned();
    for function in &scalar {
        add(&mut page, function.name(), function.documentation());
    }
    for function in &aggregate {
        add(&mut page, function.name(), function.documentation());
    }
    page.push_str(
        "\n## elmo_models\n\nReturns a table of the models that queries may name, one row each: `name`, `is_default`, `is_open`, \
         `fingerprint`, `dimension`, `layers`, `lm_head`, `untrained`, `location`. Does not open the models.\n\n\
         ```sql\nSELECT * FROM elmo_models();\n```\n\n## elmo_functions\n\nReturns a table of these functions, one row each: `name`, \
         `kind`, `syntax`, `description`.\n\n```sql\nSELECT name, syntax FROM elmo_functions();\n```\n",
    );
    page
}

fn add(page: &mut String, name: &str, documentation: Option<&Documentation>) {
    let documentation = documentation.unwrap_or_else(|| panic!("{name} has no documentation"));
    write!(page, "\n## {name}\n\n{}\n\n```sql\n{}\n```\n", documentation.description, documentation.syntax_example)
        .unwrap();
    if let Some(arguments) = &documentation.arguments {
        page.push_str("\n| argument | |\n|---|---|\n");
        for (argument, description) in arguments {
            writeln!(page, "| `{argument}` | {} |", description.replace('|', "\\|")).unwrap();
        }
    }
    if let Some(example) = &documentation.sql_example {
        page.push('\n');
        for line in example.trim().lines() {
            writeln!(page, "{}", line.strip_prefix("> ").unwrap_or(line)).unwrap();
        }
    }
}

#[test]
fn the_reference_is_up_to_date() {
    let page = page();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path(), &page).unwrap();
    }
    let current = std::fs::read_to_string(path()).unwrap_or_default();
    assert!(current == page, "docs/functions.md is not up to date: run with UPDATE_DOCS=1");
}

/// Runs the examples of the reference.
#[tokio::test]
async fn the_examples_of_the_reference_run() {
    // A model with an LM head, so that all functions work.
    let models = Models::from(crate::slt::narrow());
    let session = elmo_udfs::session(&models);
    let rows =
        "(VALUES (1, 'good', 'The soup was cold.'), (2, 'bad', NULL), (3, 'good', 'A bank.')) AS v (id, label, text)";
    for table in ["reviews", "ascii_reviews"] {
        let create = format!("CREATE TABLE {table} AS SELECT * FROM {rows}");
        elmo_udfs::sql(&session, &create).await.unwrap().collect().await.unwrap();
    }
    let (scalar, aggregate) = (functions::scalar(&models), functions::aggregate());
    let documented = scalar.iter().map(|f| f.documentation()).chain(aggregate.iter().map(|f| f.documentation()));
    let mut examples = 0;
    for example in documented.filter_map(|documentation| documentation?.sql_example.as_ref()) {
        let query: String = example.lines().filter_map(|line| line.strip_prefix("> ")).collect();
        let done = elmo_udfs::sql(&session, query.trim_end_matches(';')).await.unwrap().collect().await;
        done.unwrap_or_else(|e| panic!("{query}: {e}"));
        examples += 1;
    }
    assert_eq!(examples, scalar.len() + aggregate.len(), "a function without an example");
}
