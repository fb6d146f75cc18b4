//! The number of texts that a query embeds, as the engine counts them.

use std::sync::Arc;

use arrow::{
    array::{ArrayRef, Int64Array, RecordBatch, StringArray},
    util::pretty::pretty_format_batches,
};
use datafusion::prelude::{SessionConfig, SessionContext};
use elmo::Elmo;
use elmo_udfs::Models;

const ROWS: i64 = 100_000;
/// One in a thousand is NULL.
const NULLS: u64 = 100;

/// `id, grp = id % 10, text` with `texts` distinct texts of one sentence each.
fn table(texts: i64) -> RecordBatch {
    let ids = || 0..ROWS;
    let text = |id: i64| (texts < ROWS || id % 1000 != 7).then(|| format!("t{}", id % texts));
    let id: ArrayRef = Arc::new(Int64Array::from_iter_values(ids()));
    let grp: ArrayRef = Arc::new(Int64Array::from_iter_values(ids().map(|id| id % 10)));
    let text: ArrayRef = Arc::new(ids().map(text).collect::<StringArray>());
    RecordBatch::try_from_iter_with_nullable([("id", id, false), ("grp", grp, false), ("text", text, true)]).unwrap()
}

/// A session with an empty cache.
fn session(elmo: &Elmo, table: &RecordBatch, rules: bool) -> SessionContext {
    let config = SessionConfig::new().with_target_partitions(4);
    let session = elmo_udfs::session_with_config(&Models::from(elmo.clone()), config);
    session.register_batch("t", table.clone()).unwrap();
    let state = session.state_ref();
    state.write().config_mut().options_mut().set("elmo.rules", &rules.to_string()).unwrap();
    session
}

/// The number of texts that the model embedded.
async fn embedded(elmo: &Elmo, session: &SessionContext, query: &str) -> u64 {
    let before = elmo.embedder().metrics().sentences;
    let batches = elmo_udfs::sql(session, query).await.unwrap().collect().await;
    drop(batches.unwrap_or_else(|e| panic!("{query}: {e}")));
    elmo.embedder().metrics().sentences - before
}

async fn plan(session: &SessionContext, query: &str) -> String {
    let explained = elmo_udfs::sql(session, &format!("EXPLAIN {query}")).await.unwrap().collect().await.unwrap();
    pretty_format_batches(&explained).unwrap().to_string()
}

/// Queries for which DataFusion 55 alone would embed more rows.
#[tokio::test(flavor = "multi_thread")]
async fn only_needed_texts_are_embedded() {
    let elmo = Elmo::tiny().unwrap();
    let (table, real) = (table(ROWS), ROWS as u64 - NULLS);
    // Only rows with grp = 7 have NULL texts.
    let cases = [
        ("SELECT id, elmo_embed(text) FROM t ORDER BY id DESC LIMIT 10", 10),
        ("SELECT id, e FROM (SELECT id, elmo_embed(text) e FROM t) ORDER BY id DESC LIMIT 10", 10),
        ("SELECT id, elmo_embed(text) FROM t ORDER BY id LIMIT 10 OFFSET 50", 10),
        ("SELECT id, elmo_embed(text) FROM t WHERE elmo_embed(text)[1] > 0.0", real),
        ("SELECT id, e FROM (SELECT id, elmo_embed(text) e FROM t) WHERE e[1] > 0.0", real),
        ("SELECT id FROM t WHERE grp = 3 OR elmo_embed(text)[1] > 0.0", 90_000 - NULLS),
        (
            "WITH c AS (SELECT id, elmo_embed(text) e FROM t) \
             SELECT a.id, elmo_cosine(a.e, b.e) FROM c a JOIN c b ON a.id = b.id",
            real,
        ),
        (
            "WITH c AS (SELECT id, elmo_embed(text) e FROM t) \
             SELECT a.id FROM c a JOIN c b ON a.id = b.id WHERE a.e[1] > 0.0 AND b.e[2] > 0.0",
            real,
        ),
        ("SELECT id FROM t ORDER BY elmo_embed(text)[1] LIMIT 5", real),
        ("SELECT id, row_number() OVER (PARTITION BY grp ORDER BY elmo_embed(text)[1]) FROM t", real),
        ("SELECT id, elmo_embed(text) FROM t WHERE grp = 3", 10_000),
        // Includes the row with id 7.
        ("SELECT id, elmo_embed(text) FROM t LIMIT 10", 9),
        ("SELECT id, elmo_embed(text) FROM t WHERE grp = 3 LIMIT 10", 10),
        ("SELECT id, CASE WHEN grp = 1 THEN elmo_embed(text)[2] END FROM t", 10_000),
        ("SELECT id, coalesce(grp, elmo_embed(text)[2]) FROM t", 0),
        ("SELECT id FROM (SELECT id, elmo_embed(text) e FROM t)", 0),
        ("SELECT count(*) FROM (SELECT id, elmo_embed(text) e FROM t)", 0),
        ("SELECT elmo_embed(text)[1], elmo_embed(text)[2] FROM t", real),
        ("SELECT id, elmo_embed('hello') FROM t", 1),
        ("SELECT id, elmo_similarity(text, 'hello') s FROM t WHERE grp = 2 ORDER BY s DESC LIMIT 5", 10_001),
        ("SELECT avg(elmo_embed(text)[1]), avg(elmo_embed(text)[2]), min(elmo_embed(text)[3]) FROM t", real),
        ("SELECT avg(elmo_embed(text)[1]) FILTER (WHERE grp = 1) FROM t", 10_000),
        (
            "SELECT array_agg(id ORDER BY v) FILTER (WHERE grp = 1) FROM (SELECT id, grp, elmo_embed(text)[1] v FROM t)",
            10_000,
        ),
        ("SELECT id, (grp = 2 AND elmo_embed(text)[1] > 0.0) FROM t", 10_000),
        ("SELECT id, elmo_embed(text) FROM t WHERE id IN (SELECT id FROM t WHERE grp = 1 LIMIT 7)", 7),
    ];
    for (query, expected) in cases {
        let ours = session(&elmo, &table, true);
        let counted = embedded(&elmo, &ours, query).await;
        assert_eq!(counted, expected, "{query}\n{}", plan(&ours, query).await);
    }
}

/// Without the cache, so by the plan alone.
#[tokio::test(flavor = "multi_thread")]
async fn no_plan_computes_a_vector_twice() {
    let elmo = Elmo::tiny().unwrap();
    let (table, real) = (table(ROWS), ROWS as u64 - NULLS);
    let cases = [
        "SELECT id, elmo_embed(text) FROM t WHERE elmo_embed(text)[1] > 0.0",
        "SELECT id, e FROM (SELECT id, elmo_embed(text) e FROM t) WHERE e[1] > 0.0",
        "SELECT id, elmo_embed(text) FROM t WHERE elmo_embed(text)[1] > 0.0 AND elmo_embed(text)[2] > 0.0 ORDER BY id",
        "SELECT id, elmo_embed(text) FROM t ORDER BY elmo_embed(text)[1]",
        "SELECT id, elmo_embed(text), row_number() OVER (ORDER BY elmo_embed(text)[1]) FROM t",
        "SELECT id, e FROM (SELECT id, grp, elmo_embed(text) e FROM t WHERE elmo_embed(text)[1] > 0.0) WHERE grp = 3",
        "SELECT max(elmo_embed(text)[2]) FROM t WHERE elmo_embed(text)[1] > 0.0",
        "SELECT a.id, elmo_embed(a.text) FROM t a JOIN t b ON a.id = b.id WHERE elmo_embed(a.text)[1] > 0.0",
        "SELECT a.id, elmo_embed(a.text) FROM t a LEFT JOIN t b ON a.id = b.id WHERE elmo_embed(a.text)[1] > 0.0",
    ];
    for query in cases {
        let ours = session(&elmo, &table, true);
        ours.state_ref().write().config_mut().options_mut().set("elmo.cache_mb", "0").unwrap();
        let counted = embedded(&elmo, &ours, query).await;
        assert!(counted <= real, "{counted}: {query}\n{}", plan(&ours, query).await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_texts_are_embedded_once() {
    let elmo = Elmo::tiny().unwrap();
    let table = table(1000);
    let counted = embedded(&elmo, &session(&elmo, &table, true), "SELECT id, elmo_embed(text) FROM t").await;
    assert_eq!(counted, 1000);
}

#[tokio::test(flavor = "multi_thread")]
async fn planning_embeds_nothing() {
    let elmo = Elmo::tiny().unwrap();
    let table = table(1000);
    for rules in [true, false] {
        let session = session(&elmo, &table, rules);
        for query in [
            "EXPLAIN SELECT elmo_embed('hello')",
            "EXPLAIN SELECT id, elmo_similarity('a', 'b') FROM t",
            "EXPLAIN SELECT elmo_embed(x) FROM (SELECT 'hello' AS x)",
            "EXPLAIN SELECT elmo_word('a b', 0, 1), elmo_tokens('a b'), try_elmo_embed('a')",
            "EXPLAIN VALUES (1, elmo_embed('x')), (2, elmo_embed('y'))",
            "EXPLAIN SELECT * FROM (VALUES (1, elmo_embed('x'))) v (id, e) WHERE id = 1",
            "PREPARE p AS SELECT elmo_embed('hello')",
            "PREPARE q(VARCHAR) AS SELECT elmo_embed($1)",
        ] {
            assert_eq!(embedded(&elmo, &session, query).await, 0, "{query}, rules {rules}");
        }
        assert_eq!(embedded(&elmo, &session, "EXECUTE q('hello')").await, 1, "rules {rules}");
        let values = "VALUES (1, elmo_embed('here')), (2, elmo_embed('there'))";
        assert_eq!(embedded(&elmo, &session, values).await, 2, "rules {rules}");
    }
}

/// Calls in the conditions of joins other than inner ones are computed by the operator, once per row with a partner, and not
/// by the join, once per pair. Expected: the distinct texts with a partner, by hand.
#[tokio::test(flavor = "multi_thread")]
async fn conditions_of_joins_embed_each_text_once() {
    let elmo = Elmo::tiny().unwrap();
    let table = table(ROWS).slice(0, 1000);
    // 1,000 rows without a NULL but row 7, in ten groups; rows 0 to 9 have a partner in `b.grp = a.id`, and then all rows
    // of b have one.
    let near = "elmo_similarity(a.text, b.text) > 0.99";
    let cases = [
        (
            format!(
                "SELECT id FROM t a WHERE NOT EXISTS (SELECT 1 FROM t b WHERE b.grp = a.grp AND b.id < a.id AND {near})"
            ),
            999,
        ),
        (format!("SELECT id FROM t a WHERE EXISTS (SELECT 1 FROM t b WHERE b.id = a.grp AND {near})"), 999),
        (format!("SELECT a.id, b.id FROM t a LEFT JOIN t b ON b.id = a.id - 990 AND {near}"), 19),
        (format!("SELECT a.id, b.id FROM t a RIGHT JOIN t b ON b.id = a.id - 990 AND {near}"), 19),
        (format!("SELECT a.id, b.id FROM t a FULL JOIN t b ON b.id = a.id - 990 AND {near}"), 19),
        (
            format!("SELECT id FROM t a WHERE id = 3 OR EXISTS (SELECT 1 FROM t b WHERE b.id = a.id - 990 AND {near})"),
            19,
        ),
    ];
    for (query, expected) in cases {
        let session = session(&elmo, &table, true);
        assert_eq!(embedded(&elmo, &session, &query).await, expected, "{query}\n{}", plan(&session, &query).await);
        let plan = plan(&session, &query).await;
        let joins = plan.lines().filter(|line| line.contains("JoinExec"));
        assert!(joins.clone().count() > 0 && joins.clone().all(|join| !join.contains("elmo_embed(")), "{plan}");
    }
}
