//! The reference of the functions, docs/functions.md: generated from their documentation, and checked to be up to date.

use std::fmt::Write;

use arrow::datatypes::DataType;
use datafusion::logical_expr::Documentation;
use elmo_udfs::{Models, functions};

use super::tiny;

/// Read at run time: several clones may share a target folder.
fn path() -> std::path::PathBuf {
    std::path::Path::new(&std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("../docs/functions.md")
}

const HEAD: &str = "# SQL functions

Generated from the code by `UPDATE_DOCS=1 cargo test --test sql reference`.

Types are those of Arrow. D is the dimension of the model, times the number of its layers with `layers => 'all'`.

## Options

The functions over texts have the options that their sections list, by name and in any order:
`elmo_embed(text, pooling => 'max', layers => 'top')`. Options are literals, which are read when the query is planned. NULL
selects the default.

| option | |
|---|---|
";

const TABLES: &str = "
## elmo_models

Returns a table of the models that queries may name, one row each: `name: Utf8`, `is_default: Boolean`, `is_open: Boolean`,
`fingerprint: Utf8`, `dimension: UInt32`, `layers: UInt32`, `lm_head: Boolean`, `untrained: Boolean`, `location: Utf8`,
`tokenizer: Utf8`, `sentences: Utf8`, `state: Utf8`. The last three are the defaults of these options for the model. Does not open
the models.

```sql
SELECT * FROM elmo_models();
```

## elmo_mixes

Returns a table of the scalar mixes that the option `layers` may name, one row each: `name: Utf8`, `model: Utf8`,
`scalars: List<Float32>`, `gamma: Float32`, `layer_norm: Boolean`. `model` is NULL, except for the mix that a model has in its
own folder: its name is `mix`, and only calls with this model may use it. Does not open the models.

```sql
SELECT * FROM elmo_mixes();
```

## elmo_functions

Returns a table of these functions, one row each: `name`, `kind`, `syntax`, `description`, all of them `Utf8`.

```sql
SELECT name, syntax FROM elmo_functions();
```
";

fn page() -> String {
    let models = Models::from(tiny().clone());
    let (scalar, aggregate) = (functions::scalar(&models), functions::aggregate());
    let mut page = HEAD.to_owned();
    functions::OPTIONS.iter().for_each(|(name, description)| add_row(&mut page, name, description));
    for function in &scalar {
        add(&mut page, function.name(), function.documentation());
    }
    for function in &aggregate {
        add(&mut page, function.name(), function.documentation());
    }
    page + TABLES
}

fn add(page: &mut String, name: &str, documentation: Option<&Documentation>) {
    let documentation = documentation.unwrap_or_else(|| panic!("{name} has no documentation"));
    // The options follow the arguments.
    let form =
        |form: &str| form.split_once(" [,").map_or(form.to_owned(), |(columns, _)| format!("{columns} [, options])"));
    let syntax = documentation.syntax_example.split(" or ").map(form).collect::<Vec<_>>().join("\n");
    write!(page, "\n## {name}\n\n{}\n\n```sql\n{syntax}\n```\n", documentation.description).unwrap();
    let arguments = documentation.arguments.as_ref().unwrap_or_else(|| panic!("{name} has no arguments"));
    page.push_str("\n| argument | |\n|---|---|\n");
    let is_option = |argument: &str| functions::OPTIONS.iter().any(|(option, _)| *option == argument);
    for (argument, description) in arguments.iter().filter(|(argument, _)| !is_option(argument)) {
        add_row(page, argument, description);
    }
    let options: Vec<_> = arguments.iter().filter(|(argument, _)| is_option(argument)).collect();
    if !options.is_empty() {
        let named: Vec<_> = options.iter().map(|(option, _)| format!("`{option}`")).collect();
        write!(page, "\n[Options](#options): {}.\n", named.join(", ")).unwrap();
    }
    if let Some(example) = &documentation.sql_example {
        page.push('\n');
        for line in example.trim().lines() {
            writeln!(page, "{}", line.strip_prefix("> ").unwrap_or(line)).unwrap();
        }
    }
}

fn add_row(page: &mut String, name: &str, description: &str) {
    writeln!(page, "| `{name}` | {} |", description.replace('|', "\\|")).unwrap();
}

/// A type as the reference writes it.
fn shown(data_type: &DataType) -> String {
    match data_type {
        DataType::FixedSizeList(item, _) => format!("FixedSizeList<{}, D>", shown(item.data_type())),
        DataType::List(item) => format!("List<{}>", shown(item.data_type())),
        DataType::Struct(fields) => {
            let fields: Vec<_> = fields.iter().map(|f| format!("{}: {}", f.name(), shown(f.data_type()))).collect();
            format!("Struct<{}>", fields.join(", "))
        }
        other => other.to_string(),
    }
}

/// The types of results are those that DataFusion plans.
#[tokio::test]
async fn the_reference_names_the_types_of_results() {
    let models = Models::from(crate::slt::narrow());
    let session = elmo_udfs::session(&models);
    let calls = [
        "elmo_embed('a')",
        "elmo_tokens('a')",
        "elmo_word('a', 'a')",
        "elmo_word('a', 0, 1)",
        "elmo_words('a', 'a')",
        "try_elmo_embed('a')",
        "elmo_similarity('a', 'b')",
        "elmo_surprisal('a')",
        "elmo_perplexity('a')",
        "elmo_cosine(elmo_embed('a'), elmo_embed('b'))",
        "elmo_dot(elmo_embed('a'), elmo_embed('b'))",
        "elmo_l2(elmo_embed('a'), elmo_embed('b'))",
        "elmo_span(elmo_tokens('a'), 0, 1)",
        "elmo_centroid(elmo_embed('a'))",
    ];
    let page = page();
    let mut named = std::collections::BTreeSet::new();
    for call in calls {
        let frame = elmo_udfs::sql(&session, &format!("SELECT {call}")).await.unwrap();
        let expected = format!("`{}`", shown(frame.schema().field(0).data_type()));
        let name = call.split('(').next().unwrap();
        let section = page.split("\n## ").find(|section| section.starts_with(&format!("{name}\n"))).unwrap();
        let description = section.split("```").next().unwrap();
        assert!(description.contains(&expected), "{name}: {expected} is not in {description}");
        assert!(description.contains("Return") && description.contains("NULL"), "{name}: {description}");
        named.insert(name);
    }
    assert_eq!(named.len(), functions::scalar(&models).len() + functions::aggregate().len(), "{named:?}");
    for table in ["elmo_models", "elmo_mixes", "elmo_functions"] {
        let frame = elmo_udfs::sql(&session, &format!("SELECT * FROM {table}()")).await.unwrap();
        let section = page.split("\n## ").find(|section| section.starts_with(&format!("{table}\n"))).unwrap();
        for field in frame.schema().fields() {
            let (typed, untyped) =
                (format!("`{}: {}`", field.name(), shown(field.data_type())), format!("`{}`", field.name()));
            let all_utf8 = section.contains("all of them `Utf8`") && field.data_type() == &DataType::Utf8;
            assert!(section.contains(&typed) || (all_utf8 && section.contains(&untyped)), "{table}: {typed}");
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
    let create = format!("CREATE TABLE reviews AS SELECT * FROM {rows}");
    elmo_udfs::sql(&session, &create).await.unwrap().collect().await.unwrap();
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
