//! `elmo_embed` in SQL against direct calls of the embedder: the same rows with the same bits.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod calls;
mod exec;
mod functions;
mod memory;
#[path = "../queries.rs"]
mod queries;
mod random;
mod reference;
mod slt;
#[path = "../common/statements.rs"]
mod statements;

use std::sync::{Arc, OnceLock};

use arrow::{
    array::{Array, ArrayRef, AsArray, BinaryArray, DictionaryArray, LargeStringArray, ListArray, RecordBatch},
    array::{StringArray, StringViewArray},
    compute::concat_batches,
    datatypes::{DataType, Field, Int32Type},
};
use datafusion::{common::ScalarValue, prelude::SessionContext};
use elmo::{
    ColumnEmbedder, Elmo, EmbedSpec,
    spec::{Layers, Pooling, SentenceMode, TokenizerKind},
};
use elmo_udfs::Models;

fn tiny() -> &'static Elmo {
    static TINY: OnceLock<Elmo> = OnceLock::new();
    TINY.get_or_init(|| Elmo::tiny().unwrap())
}

const TEXTS: [Option<&str>; 6] = [
    Some("The soup was cold. The bread was not."),
    None,
    Some(""),
    Some("Best noodles."),
    Some(" \t"),
    Some("naïve 🎉"),
];

/// A session with the functions and a table `t (text)`.
fn session(texts: ArrayRef) -> SessionContext {
    let mut context = SessionContext::new();
    elmo_udfs::register_all(&mut context, &Models::from(tiny().clone())).unwrap();
    context.register_batch("t", RecordBatch::try_from_iter_with_nullable([("text", texts, true)]).unwrap()).unwrap();
    context
}

fn texts() -> ArrayRef {
    Arc::new(StringArray::from(TEXTS.to_vec()))
}

/// All rows of the first column of a query.
async fn column(context: &SessionContext, query: &str) -> ArrayRef {
    let batches = elmo_udfs::sql(context, query).await.unwrap().collect().await.unwrap();
    let all = concat_batches(&batches[0].schema(), &batches).unwrap();
    ArrayRef::clone(all.column(0))
}

async fn error_of(query: &str) -> String {
    let context = session(texts());
    match elmo_udfs::sql(&context, query).await {
        // Planning includes the optimiser, but not execution.
        Ok(frame) => frame.into_optimized_plan().expect_err(query).strip_backtrace(),
        Err(error) => error.strip_backtrace(),
    }
}

fn direct(spec: EmbedSpec, column: &ArrayRef) -> ArrayRef {
    ColumnEmbedder::new(tiny(), spec).unwrap().embed(column).unwrap().vectors
}

/// Equal types, NULLs and bits.
fn assert_same(sql: &ArrayRef, direct: &ArrayRef) {
    assert_eq!(sql.data_type(), direct.data_type());
    assert_eq!(sql.to_data(), direct.to_data());
}

#[tokio::test]
async fn every_string_encoding_gives_the_vectors_of_the_embedder() {
    let expected = direct(EmbedSpec::default(), &texts());
    let bytes: Vec<Option<&[u8]>> = TEXTS.iter().map(|text| text.map(str::as_bytes)).collect();
    let columns: [ArrayRef; 5] = [
        texts(),
        Arc::new(LargeStringArray::from(TEXTS.to_vec())),
        Arc::new(StringViewArray::from(TEXTS.to_vec())),
        Arc::new(TEXTS.into_iter().collect::<DictionaryArray<Int32Type>>()),
        Arc::new(BinaryArray::from(bytes)),
    ];
    for texts in columns {
        let kind = texts.data_type().clone();
        let vectors = column(&session(texts), "SELECT elmo_embed(text) FROM t").await;
        assert_eq!(vectors.logical_null_count(), 3, "NULL, empty and blank have no vector: {kind}");
        assert_same(&vectors, &expected);
    }
}

#[tokio::test]
async fn a_list_of_tokens_is_one_sentence() {
    let whole =
        EmbedSpec { tokenizer: TokenizerKind::Whitespace, sentences: SentenceMode::Off, ..EmbedSpec::default() };
    let text: ArrayRef = Arc::new(StringArray::from(vec!["The soup . was cold ."]));
    let expected = direct(whole, &text);
    let tokens = StringArray::from(vec!["The", "soup", ".", "was", "cold", "."]);
    let item = Arc::new(Field::new_list_field(DataType::Utf8, true));
    let offsets = arrow::buffer::OffsetBuffer::from_lengths([tokens.len()]);
    let lists: ArrayRef = Arc::new(ListArray::new(item, offsets, Arc::new(tokens), None));
    assert_same(&column(&session(lists), "SELECT elmo_embed(text) FROM t").await, &expected);
}

#[tokio::test]
async fn options_by_position_by_name_and_with_gaps() {
    let max = EmbedSpec { pooling: Pooling::Max, ..EmbedSpec::default() };
    let top_max = EmbedSpec { layers: Layers::Top, ..max.clone() };
    let cases = [
        ("elmo_embed(text, 'top', 'max')", top_max.clone()),
        ("elmo_embed(text, pooling => 'max', layers => 'top')", top_max.clone()),
        ("ELMO_EMBED(pooling => 'max', text => text)", max.clone()),
        ("elmo_embed(text, NULL, 'max')", max.clone()),
        ("elmo_embed(text, pooling => 'max', on_error => 'null', layers => NULL)", max),
        ("elmo_embed(text, layers => 1)", EmbedSpec { layers: Layers::One(1), ..EmbedSpec::default() }),
        ("elmo_embed(text, layers => 'all')", EmbedSpec { layers: Layers::All, ..EmbedSpec::default() }),
        ("elmo_embed(text, model => 'tiny')", EmbedSpec::default()),
    ];
    let context = session(texts());
    for (call, spec) in cases {
        let vectors = column(&context, &format!("SELECT {call} FROM t")).await;
        assert_eq!(vectors.to_data(), direct(spec, &texts()).to_data(), "{call}");
    }
}

#[tokio::test]
async fn gaps_are_filled_inside_explain_copy_and_subqueries() {
    let context = session(texts());
    let inner = "SELECT elmo_embed(text, pooling => 'max') AS e FROM t";
    let folder = std::env::temp_dir().join(format!("elmo-sql-{}", std::process::id()));
    let target = folder.join("out.parquet").display().to_string();
    for query in [
        format!("EXPLAIN {inner}"),
        format!("SELECT e FROM ({inner}) WHERE e IS NOT NULL"),
        format!("WITH c AS ({inner}) SELECT count(*) FROM c"),
        format!("COPY ({inner}) TO '{target}' STORED AS PARQUET"),
    ] {
        elmo_udfs::sql(&context, &query).await.unwrap().collect().await.unwrap();
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[tokio::test]
async fn the_field_has_dimension_and_model_before_a_row_is_read() {
    let context = session(texts());
    let query = "SELECT elmo_embed(text, layers => 'all') AS e FROM t";
    let plan = elmo_udfs::sql(&context, query).await.unwrap();
    let field = std::sync::Arc::clone(plan.schema().field(0));
    let width = tiny().options().width();
    let layers = tiny().options().n_layers_out();
    assert!(matches!(field.data_type(), DataType::FixedSizeList(item, n)
        if *n as usize == layers * width && item.data_type() == &DataType::Float32));
    let metadata = field.metadata();
    assert_eq!(metadata["elmo.fingerprint"], tiny().fingerprint().to_string());
    assert_eq!(metadata["elmo.layers"], "all");
    assert_eq!(metadata["ARROW:extension:name"], "arrow.fixed_shape_tensor");
    let shape = format!(r#"{{"shape":[{layers},{width}],"dim_names":["layer","dim"]}}"#);
    assert_eq!(metadata["ARROW:extension:metadata"], shape);
}

#[tokio::test]
async fn invalid_options_are_planning_errors_that_list_the_legal_values() {
    let cases = [
        (
            "elmo_embed(text, pooling => 'median')",
            "pooling: unknown value \"median\"; legal values are mean, max, first, last, ends",
        ),
        ("elmo_embed(text, layers => 9)", "9"),
        ("elmo_embed(text, state => 'carry')", "legal values are zero, warm"),
        ("elmo_embed(text, on_error => 'skip')", "legal values are fail, null"),
        ("elmo_embed(text, model => 'large')", "no model \"large\"; known models: tiny"),
        ("elmo_embed(text, pooling => text)", "pooling must be a literal"),
        ("elmo_embed(text, pooling => 1.5)", "pooling is a string, not Float64"),
        ("elmo_embed(text, pool => 'max')", "did you mean pooling?"),
        ("elmo_embed(text, pooling => 'max', pooling => 'max')", "elmo_embed: pooling is given twice"),
        ("elmo_embed()", "needs a text"),
        ("elmo_embed(42)", "text is a string, a binary, or a list of tokens, not Int64"),
    ];
    for (call, expected) in cases {
        let error = error_of(&format!("SELECT {call} FROM t")).await;
        assert!(error.contains(expected), "{call}: {error}");
    }
}

#[tokio::test]
async fn a_literal_is_embedded_once_for_all_rows() {
    // A model of its own, as other tests change the counts of the shared one.
    let elmo = Elmo::tiny().unwrap();
    let mut context = SessionContext::new();
    elmo_udfs::register_all(&mut context, &Models::from(elmo.clone())).unwrap();
    let rows: ArrayRef = Arc::new(StringArray::from(vec!["x"; 1000]));
    context.register_batch("t", RecordBatch::try_from_iter([("text", rows)]).unwrap()).unwrap();
    let vectors = column(&context, "SELECT elmo_embed('The soup was cold.') FROM t").await;
    assert_eq!(vectors.len(), 1000);
    assert_eq!(elmo.embedder().metrics().sentences, 1);
    let one: ArrayRef = Arc::new(StringArray::from(vec!["The soup was cold."]));
    let expected = ScalarValue::try_from_array(&direct(EmbedSpec::default(), &one), 0).unwrap();
    assert_eq!(ScalarValue::try_from_array(&vectors, 999).unwrap(), expected);
}

#[tokio::test]
async fn nulls_and_empty_columns() {
    let context = session(texts());
    for query in ["SELECT elmo_embed(NULL)", "SELECT elmo_embed(CAST(NULL AS VARCHAR)) FROM t LIMIT 1"] {
        assert!(column(&context, query).await.is_null(0), "{query}");
    }
    let none: ArrayRef = Arc::new(StringArray::from(Vec::<&str>::new()));
    let rows = elmo_udfs::sql(&session(none), "SELECT elmo_embed(text) FROM t").await.unwrap().count().await.unwrap();
    assert_eq!(rows, 0);
}

#[tokio::test]
async fn a_case_embeds_only_the_rows_of_its_branch() {
    let elmo = Elmo::tiny().unwrap();
    let mut context = SessionContext::new();
    elmo_udfs::register_all(&mut context, &Models::from(elmo.clone())).unwrap();
    let rows: ArrayRef = Arc::new(StringArray::from(vec!["one word", "two words", "one thing", "two things"]));
    context.register_batch("t", RecordBatch::try_from_iter([("text", rows)]).unwrap()).unwrap();
    let query = "SELECT CASE WHEN text LIKE 'one%' THEN elmo_embed(text) END FROM t";
    let vectors = column(&context, query).await;
    assert_eq!((0..4).map(|row| vectors.is_null(row)).collect::<Vec<_>>(), [false, true, false, true]);
    assert_eq!(elmo.embedder().metrics().sentences, 2);
}

#[tokio::test]
async fn the_information_schema_documents_the_function() {
    let mut config = datafusion::prelude::SessionConfig::new();
    config.options_mut().catalog.information_schema = true;
    let mut context = SessionContext::new_with_config(config);
    elmo_udfs::register_all(&mut context, &Models::from(tiny().clone())).unwrap();
    let function = elmo_udfs::functions::scalar(&Models::from(tiny().clone())).remove(0);
    let documented = function.documentation().unwrap();
    let arguments = documented.arguments.as_ref().unwrap();
    let names: Vec<&str> = arguments.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        Some(names),
        function.signature().parameter_names.as_ref().map(|p| p.iter().map(String::as_str).collect())
    );
    let described =
        column(&context, "SELECT description FROM information_schema.routines WHERE routine_name = 'elmo_embed'").await;
    let described = arrow::compute::cast(&described, &DataType::Utf8).unwrap();
    assert!(described.as_string::<i32>().value(0).contains("ELMo vector"));
}
