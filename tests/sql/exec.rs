//! Execution of the operator: any number of rows, queries and threads, insufficient memory, and cancelled queries.

use std::{sync::Arc, time::Duration};

use arrow::{
    array::{Array, ArrayRef, AsArray, BinaryArray, DictionaryArray, Int64Array, RecordBatch, StringArray},
    compute::{cast, concat, concat_batches},
    datatypes::{DataType, Float32Type, Float64Type, Int8Type, Int32Type, Int64Type},
    util::pretty::pretty_format_batches,
};
use datafusion::{
    datasource::MemTable,
    physical_plan::{ExecutionPlanProperties, displayable},
    prelude::{SessionConfig, SessionContext},
};
use elmo::{EmbedSpec, spec::Level};
use elmo_udfs::Models;
use futures::StreamExt;

use super::{direct, tiny};

fn session() -> SessionContext {
    elmo_udfs::session(&Models::from(tiny().clone()))
}

fn register(session: &SessionContext, texts: ArrayRef) {
    let id: ArrayRef = Arc::new(Int64Array::from_iter_values(0..texts.len() as i64));
    let rows = RecordBatch::try_from_iter_with_nullable([("id", id, false), ("text", texts, true)]).unwrap();
    session.deregister_table("t").unwrap();
    session.register_batch("t", rows).unwrap();
}

async fn rows(session: &SessionContext, query: &str) -> RecordBatch {
    let frame = elmo_udfs::sql(session, query).await.unwrap();
    let schema = Arc::new(frame.schema().as_arrow().clone());
    let batches = frame.collect().await.unwrap_or_else(|e| panic!("{query}: {e}"));
    concat_batches(&schema, &batches).unwrap()
}

fn texts(count: usize) -> ArrayRef {
    let text = |i: usize| (i % 5 != 3).then(|| format!("row {} of {}", i % 700, "words ".repeat(i % 4)));
    Arc::new((0..count).map(text).collect::<StringArray>())
}

#[tokio::test]
async fn any_number_of_rows_in_any_encoding() {
    let session = session();
    let query = "SELECT id, elmo_embed(text) AS e, elmo_tokens(text) AS k FROM t";
    for count in [0, 1, 2, 8191, 8192, 8193] {
        let texts = texts(count);
        register(&session, Arc::clone(&texts));
        let found = rows(&session, query).await;
        assert_eq!(found.num_rows(), count);
        assert_eq!(found["id"].as_primitive::<Int64Type>().values().to_vec(), (0..count as i64).collect::<Vec<_>>());
        assert_eq!(&found["e"], &direct(EmbedSpec::default(), &texts), "{count}");
        let tokens = direct(EmbedSpec { level: Level::Token, ..EmbedSpec::default() }, &texts);
        assert_eq!(&found["k"], &tokens, "{count}");
    }
    let words = texts(300);
    let dictionary: DictionaryArray<Int32Type> = words.as_string::<i32>().iter().collect();
    let encoded: [ArrayRef; 3] = [words.slice(17, 200), Arc::new(dictionary), Arc::new(StringArray::new_null(50))];
    for texts in encoded {
        register(&session, Arc::clone(&texts));
        let found = rows(&session, "SELECT elmo_embed(text) AS e FROM t").await;
        assert_eq!(&found["e"], &direct(EmbedSpec::default(), &texts));
    }
}

/// Ten batches of 100 texts: keys of 8 bits are sufficient for one batch, but not for two. The dictionary is the text
/// that is embedded, and then a column that the operator only passes on.
#[tokio::test]
async fn batches_whose_dictionaries_overflow_when_concatenated() {
    let config = SessionConfig::new().with_target_partitions(1);
    let session = elmo_udfs::session_with_config(&Models::from(tiny().clone()), config);
    let texts = |word: &str| (0..1000).map(|n| Some(format!("{word}{n}"))).collect::<StringArray>();
    let rows = texts("row ");
    let batch = |first: usize| {
        let text: DictionaryArray<Int8Type> = rows.slice(first, 100).iter().collect();
        let (id, text): (ArrayRef, ArrayRef) =
            (Arc::new(Int64Array::from_iter_values(first as i64..first as i64 + 100)), Arc::new(text));
        RecordBatch::try_from_iter_with_nullable([("id", id, false), ("text", text, true)]).unwrap()
    };
    let batches: Vec<RecordBatch> = (0..1000).step_by(100).map(batch).collect();
    let kind = batches[0]["text"].data_type().clone();
    session.register_table("t", Arc::new(MemTable::try_new(batches[0].schema(), vec![batches]).unwrap())).unwrap();
    for (query, embedded) in [
        ("SELECT id, text, elmo_embed(text) AS e FROM t", texts("row ")),
        ("SELECT id, text, elmo_embed(concat('x', id)) AS e FROM t", texts("x")),
    ] {
        let found = elmo_udfs::sql(&session, query).await.unwrap().collect().await.unwrap();
        assert!(found.iter().all(|batch| batch["text"].data_type() == &kind), "{query}");
        let column = |name: &str, kind: &DataType| {
            let parts: Vec<ArrayRef> = found.iter().map(|batch| cast(&batch[name], kind).unwrap()).collect();
            concat(&parts.iter().map(AsRef::as_ref).collect::<Vec<&dyn Array>>()).unwrap()
        };
        let ids = column("id", &DataType::Int64);
        assert_eq!(ids.as_primitive::<Int64Type>().values().to_vec(), (0..1000).collect::<Vec<i64>>());
        assert_eq!(column("text", &DataType::Utf8).as_string::<i32>(), &rows);
        let embedded: ArrayRef = Arc::new(embedded);
        let expected = direct(EmbedSpec::default(), &embedded);
        assert_eq!(&column("e", expected.data_type()), &expected, "{query}");
    }
}

#[tokio::test]
async fn explain_analyze_shows_metrics() {
    let session = session();
    register(&session, texts(1000));
    let analyzed = rows(&session, "EXPLAIN ANALYZE SELECT id, elmo_embed(text) FROM t WHERE id < 800").await;
    let analyzed = pretty_format_batches(&[analyzed]).unwrap().to_string();
    let line = analyzed.lines().find(|line| line.contains("EmbedExec: elmo_embed(t.text) as __elmo_")).unwrap();
    // Expected: the distinct texts that are not NULL, from a set of the standard library.
    let distinct: std::collections::BTreeSet<_> =
        texts(800).as_string::<i32>().iter().flatten().map(str::to_owned).collect();
    assert!(line.contains(&format!("rows_embedded={}", distinct.len())), "{line}");
    assert!(line.contains("output_rows=800"), "{line}");
    for metric in ["tokens=", "padding_ratio=", "cache_hits=", "dedup_hits=", "queue_time=", "device_time="] {
        assert!(line.contains(metric), "{metric}: {line}");
    }
}

/// By hand: two texts have 600 tokens, more than the 512 that `on_long => 'error'` allows, and two are not UTF-8; one of
/// them occurs twice.
#[tokio::test]
async fn explain_analyze_counts_failed_texts_by_reason() {
    let session = session();
    let [long, longer] = ["word ".repeat(600), format!("a {}", "word ".repeat(600))];
    let texts: [&[u8]; 7] = [b"one", long.as_bytes(), b"\xff", b"two", longer.as_bytes(), b"\xff", b"a \xff"];
    register(&session, Arc::new(BinaryArray::from(texts.to_vec())));
    let counted = async |call: &str| {
        // Every query starts with an empty cache.
        elmo_udfs::functions::scalar(&Models::from(tiny().clone())).into_iter().for_each(|f| session.register_udf(f));
        let analyzed = rows(&session, &format!("EXPLAIN ANALYZE SELECT id, {call} FROM t")).await;
        let shown = pretty_format_batches(&[analyzed]).unwrap().to_string();
        let metrics = shown.lines().find(|line| line.contains("EmbedExec: ")).unwrap().to_owned();
        let counts = metrics.split([',', '[', ']']).map(str::trim).filter(|m| m.starts_with("rows_"));
        counts.map(str::to_owned).collect::<Vec<_>>()
    };
    for call in ["try_elmo_embed(text, on_long => 'error')", "elmo_embed(text, on_long => 'error', on_error => 'null')"]
    {
        let counts = ["rows_embedded=2", "rows_failed_not_utf8=2", "rows_failed_too_many_tokens=2"];
        assert_eq!(counted(call).await, counts, "{call}");
    }
    let counts = ["rows_embedded=4", "rows_failed_not_utf8=2"];
    assert_eq!(counted("elmo_embed(text, on_error => 'null')").await, counts);
}

#[tokio::test]
async fn a_query_that_stops_early_embeds_one_batch() {
    let elmo = elmo::Elmo::tiny().unwrap();
    let config = SessionConfig::new().with_target_partitions(1);
    let session = elmo_udfs::session_with_config(&Models::from(elmo.clone()), config);
    let texts: ArrayRef = Arc::new((0..50_000).map(|i| Some(format!("text {i}"))).collect::<StringArray>());
    register(&session, texts);
    let found = rows(&session, "SELECT id FROM t WHERE elmo_embed(text)[1] IS NOT NULL LIMIT 10").await;
    assert_eq!(found.num_rows(), 10);
    // DataFusion alone would embed one batch.
    assert!(elmo.embedder().metrics().sentences <= 8192, "{:?}", elmo.embedder().metrics());
}

/// Concurrent queries over one set of models, some of which are cancelled. All queries end, and those that are not
/// cancelled return the right rows.
async fn concurrent_queries(queries: usize, rounds: usize) {
    let models = Models::from(tiny().clone());
    let words = texts(120);
    let expected = direct(EmbedSpec::default(), &words);
    for round in 0..rounds {
        let run = |n: usize| {
            let (models, words, expected) = (models.clone(), Arc::clone(&words), Arc::clone(&expected));
            async move {
                let config = SessionConfig::new().with_batch_size(16).with_target_partitions(2);
                let session = elmo_udfs::session_with_config(&models, config);
                let cache = if round % 2 == 0 { "256" } else { "0" };
                session.state_ref().write().config_mut().options_mut().set("elmo.cache_mb", cache).unwrap();
                register(&session, words);
                let query = match n % 3 {
                    0 => "SELECT id, elmo_embed(text) AS e FROM t",
                    1 => "SELECT id, e FROM (SELECT id, elmo_embed(text) AS e FROM t) ORDER BY id",
                    _ => {
                        "SELECT id, CASE WHEN true THEN elmo_embed(text) END AS e FROM t WHERE elmo_embed(text)[1] < 9 OR true"
                    }
                };
                let mut stream = elmo_udfs::sql(&session, query).await.unwrap().execute_stream().await.unwrap();
                let cancel = (round + n) % 4 == 1;
                let mut batches = Vec::new();
                while let Some(batch) = stream.next().await {
                    batches.push(batch.unwrap());
                    if cancel {
                        return;
                    }
                }
                let found = concat_batches(&stream.schema(), &batches).unwrap();
                let order = arrow::compute::sort_to_indices(&found["id"], None, None).unwrap();
                assert_eq!(&arrow::compute::take(&found["e"], &order, None).unwrap(), &expected, "{query}");
            }
        };
        let all = futures::future::join_all((0..queries).map(|n| tokio::spawn(run(n))));
        // The timeout detects a deadlock. It is not a measurement.
        let ended = tokio::time::timeout(Duration::from_secs(120), all).await.expect("queries wait for each other");
        ended.into_iter().for_each(|query| query.unwrap());
    }
}

#[tokio::test]
async fn concurrent_queries_on_one_thread() {
    for queries in [1, 2, 8] {
        concurrent_queries(queries, 60).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn concurrent_queries_on_several_threads() {
    for queries in [1, 2, 8] {
        concurrent_queries(queries, 60).await;
    }
}

#[test]
fn an_abandoned_query_does_not_block_another_runtime() {
    let models = Models::from(tiny().clone());
    let session = elmo_udfs::session_with_config(&models, SessionConfig::new().with_batch_size(64));
    register(&session, texts(5000));
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let query = "SELECT id, elmo_embed(text) FROM t";
    let abandoned = runtime();
    let mut stream = abandoned.block_on(async {
        let mut stream = elmo_udfs::sql(&session, query).await.unwrap().execute_stream().await.unwrap();
        assert!(stream.next().await.unwrap().is_ok());
        stream
    });
    // Its chunks are running, but their runtime makes no progress.
    let other = runtime().block_on(async { rows(&session, query).await });
    assert_eq!(other.num_rows(), 5000);
    assert!(abandoned.block_on(stream.next()).is_some());
}

/// Rows have the order of the query, also if an expression over a vector is computed above the sort, with several
/// batches and partitions.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_order_of_a_sort_below_the_operator_is_preserved() {
    let config = SessionConfig::new().with_batch_size(7).with_target_partitions(4);
    let session = elmo_udfs::session_with_config(&Models::from(tiny().clone()), config);
    let rows = "SELECT (value * 37) % 101 AS id, concat('text ', value) AS text FROM generate_series(1, 100)";
    elmo_udfs::sql(&session, &format!("CREATE TABLE t AS {rows}")).await.unwrap().collect().await.unwrap();
    // The sort key is an output column, determines one, or is not an output column.
    for (query, column) in [
        ("SELECT id, elmo_embed(text)[1] + 1 AS x FROM t ORDER BY id", 0),
        ("SELECT x, id FROM (SELECT elmo_embed(text)[1] * 2 AS x, id FROM t) ORDER BY id", 1),
        ("SELECT elmo_embed(text)[1] - 1 AS x, -id AS minus FROM t ORDER BY id DESC", 1),
        ("SELECT elmo_dot(elmo_embed(text), elmo_embed('a')), upper(text), id FROM t ORDER BY id LIMIT 60 OFFSET 3", 2),
    ] {
        let batches = elmo_udfs::sql(&session, query).await.unwrap().collect().await.unwrap();
        let ids: Vec<i64> = batches
            .iter()
            .flat_map(|batch| batch.column(column).as_primitive::<Int64Type>().values().to_vec())
            .collect();
        assert!(ids.len() >= 60 && ids.is_sorted(), "{query}: {ids:?}");
    }
    let set_rules = |rules: &str| format!("SET elmo.rules = {rules}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.csv");
    for query in [
        "SELECT round(elmo_embed(text)[1], 4) AS x FROM t ORDER BY id".to_owned(),
        // The root of the plan is a ScalarSubqueryExec.
        "SELECT round(elmo_embed(text)[1], 4) AS x FROM t WHERE id > (SELECT avg(id) FROM t) ORDER BY id".to_owned(),
        format!("COPY (SELECT round(elmo_embed(text)[1], 4) AS x FROM t ORDER BY id) TO '{}'", file.display()),
    ] {
        let mut answers = Vec::new();
        for rules in ["true", "false"] {
            elmo_udfs::sql(&session, &set_rules(rules)).await.unwrap().collect().await.unwrap();
            let batches = elmo_udfs::sql(&session, &query).await.unwrap().collect().await.unwrap();
            let all = concat_batches(&batches[0].schema(), &batches).unwrap();
            answers.push((ArrayRef::clone(all.column(0)), std::fs::read_to_string(&file).ok()));
        }
        assert_eq!(&answers[0], &answers[1], "{query}");
    }
}

/// VALUES of many rows with calls, bare NULLs and other expressions: rows keep their order, in one partition.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_values_keep_their_order() {
    let session = session();
    let texts: ArrayRef = Arc::new((0..2000).map(|n| Some(format!("text {n}"))).collect::<StringArray>());
    let row = |n: usize| match n % 3 {
        0 => format!("({n}, elmo_embed('text {n}')[1])"),
        1 => format!("({n}, NULL)"),
        _ => format!("({n}, elmo_embed('text {n}')[1] * 2)"),
    };
    let values = (0..2000).map(row).collect::<Vec<_>>().join(", ");
    let vectors = direct(EmbedSpec::default(), &texts);
    let numbers = vectors.as_fixed_size_list().values().as_primitive::<Float32Type>();
    let first = |n: usize| f64::from(numbers.value(n * vectors.as_fixed_size_list().value_length() as usize));
    let expected: Vec<Option<f64>> = (0..2000).map(|n| [Some(first(n)), None, Some(2.0 * first(n))][n % 3]).collect();
    let query = format!("SELECT column1, column2 FROM (VALUES {values})");
    for rules in ["true", "false"] {
        elmo_udfs::sql(&session, &format!("SET elmo.rules = {rules}")).await.unwrap().collect().await.unwrap();
        let found = rows(&session, &query).await;
        assert_eq!(found["column1"].as_primitive::<Int64Type>().values().to_vec(), (0..2000).collect::<Vec<i64>>());
        let values = cast(&found["column2"], &DataType::Float64).unwrap();
        assert_eq!(values.as_primitive::<Float64Type>().iter().collect::<Vec<_>>(), expected, "rules {rules}");
        let plan = elmo_udfs::sql(&session, &query).await.unwrap().create_physical_plan().await.unwrap();
        assert_eq!(plan.output_partitioning().partition_count(), 1, "rules {rules}");
    }
}

/// A nested loop join that compares vectors uses all partitions, though its table is one batch. Expected: all pairs in a
/// loop.
#[tokio::test(flavor = "multi_thread")]
async fn joins_on_vectors_use_all_partitions() {
    let config = SessionConfig::new().with_target_partitions(4);
    let session = elmo_udfs::session_with_config(&Models::from(tiny().clone()), config);
    register(&session, texts(700));
    session.sql("CREATE TABLE v AS SELECT id, elmo_embed(text) AS e FROM t").await.unwrap().collect().await.unwrap();
    let query = "SELECT a.id AS a, b.id AS b FROM v a JOIN v b ON a.id < b.id AND elmo_dot(a.e, b.e) > 4.0";
    let plan = elmo_udfs::sql(&session, query).await.unwrap().create_physical_plan().await.unwrap();
    assert_eq!(plan.output_partitioning().partition_count(), 4, "{}", displayable(plan.as_ref()).indent(false));
    let found = rows(&session, &format!("{query} ORDER BY a, b")).await;
    let vectors = rows(&session, "SELECT e FROM v ORDER BY id").await;
    let vectors = vectors["e"].as_fixed_size_list().clone();
    let dot = |a: usize, b: usize| -> f64 {
        let numbers = |row: usize| vectors.value(row).as_primitive::<Float32Type>().values().to_vec();
        numbers(a).iter().zip(numbers(b)).map(|(a, b)| f64::from(*a) * f64::from(b)).sum()
    };
    let pairs = (0..700).flat_map(|a| (a + 1..700).map(move |b| (a, b)));
    let valid = |row: usize| !vectors.is_null(row);
    let expected: Vec<(i64, i64)> =
        pairs.filter(|(a, b)| valid(*a) && valid(*b) && dot(*a, *b) > 4.0).map(|(a, b)| (a as i64, b as i64)).collect();
    let column = |name: &str| found[name].as_primitive::<Int64Type>().values().to_vec();
    assert!(!expected.is_empty());
    assert_eq!(column("a").into_iter().zip(column("b")).collect::<Vec<_>>(), expected);
}
