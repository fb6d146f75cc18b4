//! Every function against direct calls of the embedder, or against numbers calculated by hand.

use std::sync::{Arc, Mutex};

use arrow::{
    array::{Array, ArrayRef, AsArray, RecordBatch, StringArray},
    compute::cast,
    datatypes::{DataType, Field, Float32Type, Int64Type, UInt32Type},
};
use elmo::{
    ColumnEmbedder, Elmo, EmbedSpec, ModelData,
    mix::ScalarMix,
    spec::{Layers, Level, Normalize},
};
use elmo_udfs::{Card, ModelError, ModelSource, Models};

use super::{column, direct, tiny};

const TEXTS: [Option<&str>; 5] =
    [Some("The bank didn't open. We left."), None, Some(""), Some("She sat on the bank"), Some("Zwei Wörter")];

fn texts() -> ArrayRef {
    Arc::new(StringArray::from(TEXTS.to_vec()))
}

fn session(rules: bool) -> datafusion::prelude::SessionContext {
    let session = elmo_udfs::session(&Models::from(tiny().clone()));
    let id: ArrayRef = Arc::new(arrow::array::Int64Array::from_iter_values(0..TEXTS.len() as i64));
    session
        .register_batch(
            "t",
            RecordBatch::try_from_iter_with_nullable([("id", id, false), ("text", texts(), true)]).unwrap(),
        )
        .unwrap();
    session.state_ref().write().config_mut().options_mut().set("elmo.rules", &rules.to_string()).unwrap();
    session
}

async fn with_and_without_rules(query: &str) -> ArrayRef {
    let on = column(&session(true), query).await;
    let off = column(&session(false), query).await;
    assert_eq!(on.to_data(), off.to_data(), "{query}");
    on
}

async fn planning_error(query: &str) -> String {
    match elmo_udfs::sql(&session(true), query).await {
        Err(error) => error.strip_backtrace(),
        Ok(frame) => frame.into_optimized_plan().expect_err(query).strip_backtrace(),
    }
}

fn tokens() -> ArrayRef {
    direct(EmbedSpec { level: Level::Token, ..EmbedSpec::default() }, &texts())
}

fn vector(column: &ArrayRef, row: usize) -> Vec<f32> {
    column.as_fixed_size_list().value(row).as_primitive::<Float32Type>().values().to_vec()
}

fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    (dot(a, b) / (dot(a, a).sqrt() * dot(b, b).sqrt())) as f32
}

#[tokio::test]
async fn tokens_are_those_of_the_embedder() {
    let found = with_and_without_rules("SELECT elmo_tokens(text) FROM t ORDER BY id").await;
    assert_eq!(found.to_data(), tokens().to_data());
    let words = with_and_without_rules(
        "SELECT token FROM (SELECT id, unnest(elmo_tokens(text))['token'] AS token FROM t WHERE id = 0)",
    )
    .await;
    let words: Vec<_> = words.as_string::<i32>().iter().flatten().map(str::to_owned).collect();
    // Moses tokens.
    assert_eq!(words, ["The", "bank", "didn", "'t", "open", ".", "We", "left", "."]);
}

#[tokio::test]
async fn a_word_is_the_mean_of_its_tokens() {
    let all = tokens();
    let first = all.as_list::<i32>().value(0);
    let vectors = ArrayRef::clone(first.as_struct().column_by_name("embedding").unwrap());
    // `bank` is at bytes 4..8, `didn't` at 9..15 in two tokens.
    let bank = with_and_without_rules("SELECT elmo_word(text, 4, 8) FROM t WHERE id = 0").await;
    assert_eq!(vector(&bank, 0), vector(&vectors, 1));
    let didnt = with_and_without_rules("SELECT elmo_word(text, 9, 15) FROM t WHERE id = 0").await;
    let (didn, t) = (vector(&vectors, 2), vector(&vectors, 3));
    let mean: Vec<f32> = didn.iter().zip(&t).map(|(a, b)| ((f64::from(*a) + f64::from(*b)) / 2.0) as f32).collect();
    assert_eq!(vector(&didnt, 0), mean);
    // No token at these offsets, or no text.
    let none = with_and_without_rules("SELECT elmo_word(text, 1000, 1001) FROM t ORDER BY id").await;
    assert_eq!(none.logical_null_count(), TEXTS.len());
    let span = with_and_without_rules(
        "SELECT elmo_span(tokens, 4, 8) FROM (SELECT elmo_tokens(text) AS tokens FROM t WHERE id = 0)",
    )
    .await;
    assert_eq!(vector(&span, 0), vector(&vectors, 1));
}

/// The vectors of the settings of `elmo embed --normalize l2 --max-tokens 3`, on sentence and on token level.
#[tokio::test]
async fn normalize_and_max_tokens_are_those_of_the_embedder() {
    let spec = EmbedSpec { normalize: Normalize::L2, max_tokens: 3, ..EmbedSpec::default() };
    let options = "normalize => 'l2', max_tokens => 3";
    for (function, level) in [("elmo_embed", Level::Sentence), ("elmo_tokens", Level::Token)] {
        let found = with_and_without_rules(&format!("SELECT {function}(text, {options}) FROM t ORDER BY id")).await;
        assert_eq!(found.to_data(), direct(EmbedSpec { level, ..spec.clone() }, &texts()).to_data(), "{function}");
    }
}

fn mix(scalars: &[f32]) -> ScalarMix {
    ScalarMix { scalars: scalars.to_vec(), gamma: 0.9, layer_norm: false }
}

/// A model with a mix in its folder, and two mixes by name, of which one has a scalar too few.
fn mixed() -> Models {
    let data = ModelData { mix: Some(mix(&[2.0, 0.0, -1.0])), ..ModelData::tiny() };
    let own = Elmo::from_data(data, &elmo::EmbedderSettings::default()).unwrap();
    let models = [("tiny".to_owned(), tiny().clone()), ("own".to_owned(), own)];
    let models = Models::new("tiny", models).with_mix("sentiment", mix(&[-0.5, 1.2, 0.3])).unwrap();
    models.with_mix("short", mix(&[1.0, 2.0])).unwrap()
}

#[tokio::test]
async fn a_scalar_mix_by_name_is_that_of_the_embedder() {
    let session = elmo_udfs::session(&mixed());
    let table = RecordBatch::try_from_iter_with_nullable([("text", texts(), true)]).unwrap();
    session.register_batch("t", table).unwrap();
    for (options, scalars) in [
        ("layers => 'sentiment'", [-0.5, 1.2, 0.3]),
        ("layers => 'sentiment', model => 'own'", [-0.5, 1.2, 0.3]),
        ("layers => 'mix', model => 'own'", [2.0, 0.0, -1.0]),
    ] {
        for (function, level) in [("elmo_embed", Level::Sentence), ("elmo_tokens", Level::Token)] {
            let query = format!("SELECT {function}(text, {options}) FROM t");
            let spec = EmbedSpec { level, layers: Layers::Mix(mix(&scalars)), ..EmbedSpec::default() };
            assert_eq!(column(&session, &query).await.to_data(), direct(spec, &texts()).to_data(), "{query}");
            let frame = elmo_udfs::sql(&session, &query).await.unwrap();
            let digest = format!("mix:{}", mix(&scalars).digest());
            assert_eq!(frame.schema().field(0).metadata()["elmo.layers"], digest, "{query}");
        }
    }
    for (options, expected) in [
        (
            "layers => 'mix'",
            "layers: the model tiny has no scalar mix of its own (mix.json in its folder); other scalar mixes are \
             sentiment, short",
        ),
        ("layers => 'short'", "layers: the mix has 2 scalars; this model has 3 layers"),
        (
            "layers => 'long'",
            "layers: unknown value \"long\"; legal values are average, top, token, 0, 1, 2, all, sentiment, short",
        ),
        ("layers => 'sentimental'", "all, sentiment, short; did you mean sentiment?"),
        // The model has a mix of its own.
        ("layers => 'nix', model => 'own'", "all, mix, sentiment, short; did you mean mix?"),
        ("layers => 'mix', model => 'none'", "model: no model \"none\"; known models: own, tiny"),
    ] {
        let query = format!("SELECT elmo_embed(text, {options}) FROM t");
        let frame = elmo_udfs::sql(&session, &query).await;
        let error = frame.and_then(|frame| frame.into_optimized_plan()).unwrap_err().strip_backtrace();
        assert!(error.contains(expected), "{options}: {error}");
    }
}

/// Expected values: those of [`mixed`].
#[tokio::test]
async fn mixes_are_listed() {
    let session = elmo_udfs::session(&mixed());
    let query = "SELECT name, model, CAST(scalars AS VARCHAR) AS scalars, gamma, layer_norm FROM elmo_mixes()";
    let rows = elmo_udfs::sql(&session, query).await.unwrap().collect().await.unwrap();
    let expected = "\
+-----------+-------+------------------+-------+------------+
| name      | model | scalars          | gamma | layer_norm |
+-----------+-------+------------------+-------+------------+
| sentiment |       | [-0.5, 1.2, 0.3] | 0.9   | false      |
| short     |       | [1.0, 2.0]       | 0.9   | false      |
| mix       | own   | [2.0, 0.0, -1.0] | 0.9   | false      |
+-----------+-------+------------------+-------+------------+";
    assert_eq!(arrow::util::pretty::pretty_format_batches(&rows).unwrap().to_string(), expected);
    let arguments = elmo_udfs::sql(&session, "SELECT * FROM elmo_mixes(1)").await.unwrap_err().to_string();
    assert!(arguments.contains("elmo_mixes takes no arguments"), "{arguments}");
}

#[test]
fn a_scalar_mix_needs_a_name_of_its_own() {
    for (name, expected) in [
        ("", "is empty"),
        ("average", "cannot be named \"average\", which is a built-in value of layers"),
        ("mix", "built-in value"),
        ("17", "built-in value"),
        ("short", "two scalar mixes are named short"),
    ] {
        let error = mixed().with_mix(name, mix(&[0.0])).unwrap_err();
        assert!(error.contains(expected), "{name}: {error}");
    }
}

#[tokio::test]
async fn try_elmo_embed_never_fails_the_query() {
    let long: String = (0..600).map(|i| format!("w{i} ")).collect();
    let session = session(true);
    let texts: ArrayRef = Arc::new(StringArray::from(vec![Some("fine"), Some(long.as_str()), None, Some(" ")]));
    session.register_batch("long", RecordBatch::try_from_iter_with_nullable([("text", texts, true)]).unwrap()).unwrap();
    let found = column(&session, "SELECT try_elmo_embed(text, on_long => 'error', sentences => 'off') FROM long").await;
    let found = found.as_struct();
    let get = |name: &str| ArrayRef::clone(found.column_by_name(name).unwrap());
    assert!(found.is_null(2) && found.null_count() == 1);
    assert_eq!(
        get("error").as_string::<i32>().iter().map(|e| e.is_some()).collect::<Vec<_>>(),
        [false, true, false, false]
    );
    assert!(get("error").as_string::<i32>().value(1).contains("600 tokens"));
    assert_eq!((0..4).map(|row| get("embedding").is_valid(row)).collect::<Vec<_>>(), [true, false, false, false]);
    assert_eq!(get("tokens").as_primitive::<UInt32Type>().values().to_vec(), [1, 0, 0, 0]);
    let cut = column(
        &session,
        "SELECT try_elmo_embed(text, on_long => 'truncate', sentences => 'off')['truncated'] FROM long",
    )
    .await;
    assert!(cut.as_boolean().value(1) && !cut.as_boolean().value(0));
    // elmo_embed fails, and the error names the row.
    for query in [
        "SELECT elmo_embed(text, on_long => 'error', sentences => 'off') FROM long",
        "SELECT elmo_embed(text, on_long => 'error', sentences => 'off', on_error => 'null') FROM long",
    ] {
        let frame = elmo_udfs::sql(&session, query).await.unwrap();
        match frame.collect().await {
            Ok(_) => assert!(query.contains("'null'")),
            Err(error) => assert!(error.strip_backtrace().contains("row 1: a sentence of 600 tokens"), "{error}"),
        }
    }
}

#[tokio::test]
async fn measures_between_vectors() {
    let embedded = ColumnEmbedder::new(tiny(), EmbedSpec::default()).unwrap().embed(&texts()).unwrap().vectors;
    let (a, b) = (vector(&embedded, 0), vector(&embedded, 3));
    let expected = cosine(&a, &b);
    for query in [
        "SELECT elmo_cosine(elmo_embed(x.text), elmo_embed(y.text)) FROM t x JOIN t y ON x.id = 0 AND y.id = 3",
        "SELECT elmo_similarity(x.text, y.text) FROM t x JOIN t y ON x.id = 0 AND y.id = 3",
        "SELECT elmo_similarity(text, 'She sat on the bank') FROM t WHERE id = 0",
        "SELECT elmo_similarity('The bank didn''t open. We left.', 'She sat on the bank')",
    ] {
        let found = with_and_without_rules(query).await;
        assert_eq!(found.as_primitive::<Float32Type>().value(0), expected, "{query}");
    }
    let nulls = with_and_without_rules("SELECT elmo_similarity(text, 'bank') FROM t ORDER BY id").await;
    assert_eq!(nulls.null_count(), 2, "NULL and blank texts have no vector");
    // By hand: (3, 4) and (4, 3).
    let pair = "make_array(CAST(3 AS FLOAT), CAST(4 AS FLOAT)), make_array(CAST(4 AS FLOAT), CAST(3 AS FLOAT))";
    for (name, value) in [("dot", 24.0), ("cosine", 0.96), ("l2", 2.0_f32.sqrt())] {
        let found = with_and_without_rules(&format!("SELECT elmo_{name}({pair})")).await;
        assert_eq!(found.as_primitive::<Float32Type>().value(0), value, "{name}");
    }
}

#[tokio::test]
async fn a_centroid_is_the_mean_in_doubles() {
    let embedded = ColumnEmbedder::new(tiny(), EmbedSpec::default()).unwrap().embed(&texts()).unwrap().vectors;
    let rows: Vec<Vec<f32>> = [0, 3, 4].map(|row| vector(&embedded, row)).to_vec();
    let mean = |rows: &[Vec<f32>]| -> Vec<f32> {
        (0..rows[0].len())
            .map(|i| (rows.iter().map(|row| f64::from(row[i])).sum::<f64>() / rows.len() as f64) as f32)
            .collect()
    };
    let all = with_and_without_rules("SELECT elmo_centroid(elmo_embed(text)) FROM t").await;
    assert_eq!(vector(&all, 0), mean(&rows));
    let grouped =
        with_and_without_rules("SELECT elmo_centroid(elmo_embed(text)) FROM t GROUP BY id % 2 ORDER BY id % 2").await;
    assert_eq!(vector(&grouped, 0), mean(&[rows[0].clone(), rows[2].clone()]));
    assert_eq!(vector(&grouped, 1), rows[1]);
    assert_eq!(
        with_and_without_rules("SELECT elmo_centroid(elmo_embed(text)) FROM t WHERE text = ''")
            .await
            .logical_null_count(),
        1
    );
    let framed = with_and_without_rules(
        "SELECT elmo_centroid(e) OVER (ORDER BY id ROWS BETWEEN 1 PRECEDING AND CURRENT ROW) \
         FROM (SELECT id, elmo_embed(text) AS e FROM t) ORDER BY id",
    )
    .await;
    assert_eq!(vector(&framed, 4), mean(&rows[1..]));
    let count = with_and_without_rules(
        "SELECT count(elmo_centroid) FROM (SELECT elmo_centroid(elmo_embed(text)) AS elmo_centroid FROM t GROUP BY id)",
    )
    .await;
    assert_eq!(count.as_primitive::<Int64Type>().value(0), 3);
}

/// Expected: the vectors of the same texts and words as plain strings.
#[tokio::test]
async fn texts_may_be_run_end_encoded() {
    let (ends, values) = (Field::new("run_ends", DataType::Int32, false), Field::new("values", DataType::Utf8, true));
    let runs = DataType::RunEndEncoded(ends.into(), values.into());
    let words: ArrayRef = Arc::new(StringArray::from_iter(TEXTS.iter().map(|_| Some("bank"))));
    let (runs_of_texts, runs_of_words) = (cast(&texts(), &runs).unwrap(), cast(&words, &runs).unwrap());
    for rules in [true, false] {
        let session = session(rules);
        let columns = [
            ("text", texts(), true),
            ("word", Arc::clone(&words), true),
            ("texts", Arc::clone(&runs_of_texts), true),
            ("words", Arc::clone(&runs_of_words), true),
        ];
        session.register_batch("r", RecordBatch::try_from_iter_with_nullable(columns).unwrap()).unwrap();
        for (plain, of_runs) in [
            ("elmo_embed(text)", "elmo_embed(texts)"),
            ("elmo_word(text, word)", "elmo_word(texts, words)"),
            ("elmo_words(text, word)", "elmo_words(texts, words)"),
            ("elmo_word(text, 4, 8, unit => 'characters')", "elmo_word(texts, 4, 8, unit => 'characters')"),
            ("elmo_similarity(text, word)", "elmo_similarity(texts, words)"),
        ] {
            let expected = column(&session, &format!("SELECT {plain} FROM r")).await;
            let found = column(&session, &format!("SELECT {of_runs} FROM r")).await;
            assert_eq!(found.to_data(), expected.to_data(), "{of_runs}");
        }
    }
}

#[tokio::test]
async fn invalid_arguments_are_planning_errors() {
    for (query, expected) in [
        (
            "SELECT elmo_cosine(elmo_embed(text), elmo_embed(text, layers => 'all')) FROM t",
            "dimensions cannot be compared",
        ),
        ("SELECT elmo_dot(text, text) FROM t", "a vector is a list of numbers"),
        ("SELECT elmo_centroid(text) FROM t", "a vector is a list of fixed size"),
        ("SELECT elmo_tokens(text, pooling => 'max') FROM t", "pooling"),
        ("SELECT elmo_tokens(text, layers => 'highest') FROM t", "legal values are average"),
        ("SELECT elmo_word(text, 1.5, 4) FROM t", "start is an integer"),
        ("SELECT elmo_word(text) FROM t", "elmo_word needs a word, or a start and an end"),
        ("SELECT elmo_word(text, end => 4) FROM t", "Missing required parameter 'start'"),
        ("SELECT elmo_similarity(text, id) FROM t", "text_b is a string"),
        ("SELECT elmo_similarity(text, text, model => 'none') FROM t", "no model \"none\"; known models: tiny"),
        ("SELECT try_elmo_embed(text, layers => 9) FROM t", "no layer 9"),
        ("SELECT elmo_span(text, 0, 1) FROM t", "tokens must be the result of elmo_tokens"),
        (
            "SELECT elmo_span(make_array(named_struct('start', 0, 'end', 4, 'embedding', elmo_embed('x'))), 0, 4)",
            "tokens must be the result of elmo_tokens",
        ),
    ] {
        let error = planning_error(query).await;
        assert!(error.contains(expected), "{query}: {error}");
    }
}

#[tokio::test]
async fn columns_keep_names_types_and_metadata() {
    for query in [
        "SELECT id, elmo_embed(text) FROM t ORDER BY id LIMIT 2",
        "SELECT *, elmo_embed(text) AS e, elmo_tokens(text, layers => 'all') FROM t WHERE elmo_embed(text)[1] IS NOT NULL",
        "SELECT x.id, y.* FROM t x LEFT JOIN (SELECT id, elmo_embed(text) e FROM t) y USING (id)",
        "SELECT grp, elmo_centroid(elmo_embed(text)) c FROM (SELECT id % 2 AS grp, text FROM t) GROUP BY grp",
    ] {
        let schema = |rules: bool| async move {
            let frame = elmo_udfs::sql(&session(rules), query).await.unwrap();
            let planned = frame.schema().as_arrow().clone();
            let batches = frame.collect().await.unwrap();
            for batch in &batches {
                for (field, planned) in batch.schema().fields().iter().zip(planned.fields()) {
                    assert_eq!((field.name(), field.data_type()), (planned.name(), planned.data_type()), "{query}");
                    assert_eq!(field.metadata(), planned.metadata(), "{query}");
                }
            }
            planned
        };
        let (on, off) = (schema(true).await, schema(false).await);
        assert_eq!(on, off, "{query}");
        let vectors = on.fields().iter().filter(|f| matches!(f.data_type(), DataType::FixedSizeList(..)));
        for vector in vectors {
            assert_eq!(vector.metadata()["ARROW:extension:name"], "arrow.fixed_shape_tensor", "{query}");
            assert_eq!(vector.metadata()["elmo.fingerprint"], tiny().fingerprint().to_string(), "{query}");
        }
    }
}

#[tokio::test]
async fn table_functions_list_models_and_functions() {
    let session = session(true);
    let models =
        elmo_udfs::sql(&session, "SELECT name, is_default, is_open, dimension, layers, untrained FROM elmo_models()");
    let models = models.await.unwrap().collect().await.unwrap();
    assert_eq!(models[0]["name"].as_string::<i32>().value(0), "tiny");
    let flags = ["is_default", "is_open", "untrained"].map(|name| models[0][name].as_boolean().value(0));
    assert_eq!(flags, [true, false, true], "described, but nothing was embedded yet");
    let width = u32::try_from(tiny().options().width()).unwrap();
    assert_eq!(models[0]["dimension"].as_primitive::<UInt32Type>().value(0), width);
    column(&session, "SELECT elmo_embed(text) FROM t").await;
    assert!(column(&session, "SELECT is_open FROM elmo_models()").await.as_boolean().value(0));
    let names = column(&session, "SELECT name FROM elmo_functions() ORDER BY name").await;
    let names: Vec<_> = names.as_string::<i32>().iter().flatten().map(str::to_owned).collect();
    assert_eq!(names, elmo_udfs::functions::NAMES);
    let bare = "SELECT count(*) FROM elmo_functions() WHERE length(description) < 20 OR syntax = ''";
    assert_eq!(column(&session, bare).await.as_primitive::<Int64Type>().value(0), 0);
}

/// A model whose LM head differs from its description when it is opened for the first time. `process` opens it.
#[derive(Debug)]
struct Replaced {
    described: Elmo,
    first: Mutex<Option<Elmo>>,
    process: Option<String>,
}

impl ModelSource for Replaced {
    fn describe(&self) -> Result<Card, ModelError> {
        Ok(Card::from(&self.described))
    }

    fn process(&self) -> Option<String> {
        self.process.clone()
    }

    fn open(&self) -> Result<Elmo, ModelError> {
        Ok(self.first.lock().unwrap().take().unwrap_or_else(|| self.described.clone()))
    }
}

#[tokio::test]
async fn a_changed_lm_head_is_an_error() {
    for (process, expected) in [(None, "the LM head in "), (Some("the worker"), ", as read by the worker,")] {
        let model = Replaced {
            described: super::slt::narrow(),
            first: Mutex::new(Some(super::slt::narrow_with(1.0))),
            process: process.map(str::to_owned),
        };
        let model = Arc::new(model) as Arc<dyn ModelSource>;
        let session = elmo_udfs::session(&Models::lazy("narrow", [("narrow".to_owned(), model)]));
        let run = |query: &'static str| {
            let session = session.clone();
            async move { elmo_udfs::sql(&session, query).await.unwrap().collect().await }
        };
        // Vectors do not need the LM head.
        assert_eq!(run("SELECT elmo_embed('rain')").await.unwrap()[0].num_rows(), 1);
        let error = run("SELECT elmo_surprisal('rain')").await.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(error.contains(" is not the one that the query was planned with"), "{error}");
        // The next query reads the files again.
        assert_eq!(run("SELECT elmo_perplexity('rain')").await.unwrap()[0].num_rows(), 1);
    }
}

/// DataFusion lists only functions with fixed argument types.
#[tokio::test]
async fn show_functions_lists_each_function_once() {
    let session = session(true);
    session
        .state_ref()
        .write()
        .config_mut()
        .options_mut()
        .set("datafusion.catalog.information_schema", "true")
        .unwrap();
    let names = async |query: &str| {
        let batches = elmo_udfs::sql(&session, query).await.unwrap().collect().await.unwrap();
        let names = batches.iter().flat_map(|batch| batch.column(0).as_string::<i32>().iter().flatten());
        let mut names: Vec<String> = names.map(str::to_owned).collect();
        names.sort();
        names
    };
    let shown = names("SHOW FUNCTIONS").await;
    let mut all = names("SELECT DISTINCT routine_name FROM information_schema.routines").await;
    let mut once = shown.clone();
    once.dedup();
    assert_eq!(once, all);
    all.retain(|name| name.contains("elmo"));
    assert_eq!(names("SHOW FUNCTIONS LIKE '%elmo%'").await, all);
    assert_eq!(names("SELECT name FROM elmo_functions()").await, all);
}

#[tokio::test]
async fn calls_in_rust_equal_calls_in_sql() {
    use datafusion::prelude::{col, lit};
    use elmo_udfs::functions::{
        elmo_centroid, elmo_cosine, elmo_embed, elmo_word, elmo_word_at, elmo_words, with_options,
    };
    let models = Models::from(tiny().clone());
    let session = session(true);
    let max = with_options(elmo_embed(&models, col("text")), &[("pooling", "max")]).unwrap();
    let near = elmo_cosine(max, elmo_embed(&models, lit("a bank")));
    let word = elmo_word(&models, col("text"), lit("bank"));
    let top = with_options(word.clone(), &[("layers", "top")]).unwrap();
    let warm = with_options(top, &[("state", "warm")]).unwrap();
    let words = with_options(elmo_words(&models, col("text"), lit("bank")), &[("normalize", "l2")]).unwrap();
    let at = elmo_word_at(&models, col("text"), lit(4), lit(8));
    let cut = with_options(at.clone(), &[("max_tokens", "3"), ("unit", "characters")]).unwrap();
    let calls = [("near", near), ("word", word), ("warm", warm), ("words", words), ("at", at), ("cut", cut)];
    let calls = calls.map(|(name, call)| call.alias(name));
    let columns: Vec<_> = [col("id")].into_iter().chain(calls).collect();
    let frame = session.table("t").await.unwrap().select(columns).unwrap();
    let rows = frame.sort(vec![col("id").sort(true, true)]).unwrap().collect().await.unwrap();
    for (name, call) in [
        ("near", "elmo_cosine(elmo_embed(text, pooling => 'max'), elmo_embed('a bank'))"),
        ("word", "elmo_word(text, 'bank')"),
        ("warm", "elmo_word(text, 'bank', layers => 'top', state => 'warm')"),
        ("words", "elmo_words(text, 'bank', normalize => 'l2')"),
        ("at", "elmo_word(text, 4, 8)"),
        ("cut", "elmo_word(text, 4, 8, max_tokens => 3, unit => 'characters')"),
    ] {
        let sql = with_and_without_rules(&format!("SELECT {call} FROM t ORDER BY id")).await;
        assert_eq!(&rows[0][name], &sql, "{name}");
    }
    let frame = session.table("t").await.unwrap();
    let centroid = frame.aggregate(vec![], vec![elmo_centroid(elmo_embed(&models, col("text"))).alias("c")]).unwrap();
    let found = centroid.collect().await.unwrap();
    assert_eq!(&found[0]["c"], &with_and_without_rules("SELECT elmo_centroid(elmo_embed(text)) FROM t").await);
    let error = with_options(elmo_embed(&models, col("text")), &[("poling", "max")]).unwrap_err();
    assert!(error.strip_backtrace().contains("no option \"poling\"; known options: layers, pooling"), "{error}");
}
