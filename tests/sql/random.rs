//! Random queries: the planner rules do not change the rows, and never increase the number of embedded texts.

use std::sync::Arc;

use arrow::{
    array::{ArrayRef, Int64Array, RecordBatch, StringArray},
    util::pretty::pretty_format_batches_with_schema,
};
use datafusion::{
    error::DataFusionError,
    prelude::{SessionConfig, SessionContext},
};
use elmo::Elmo;
use elmo_udfs::Models;

use crate::queries::{is_ordered, query};

/// The number of queries.
const QUERIES: u64 = 100;

fn table() -> RecordBatch {
    let words = ["cold", "soup", "the bank", "warm bread", "river", "it's"];
    let text = |id: i64| (id % 11 != 3).then(|| format!("{} {}", words[id as usize % 6], words[id as usize % 4]));
    let id: ArrayRef = Arc::new(Int64Array::from_iter_values(0..40));
    let grp: ArrayRef = Arc::new(Int64Array::from_iter_values((0..40).map(|id| id % 4)));
    let text: ArrayRef = Arc::new((0..40).map(text).collect::<StringArray>());
    RecordBatch::try_from_iter_with_nullable([("id", id, false), ("grp", grp, false), ("text", text, true)]).unwrap()
}

fn session(elmo: &Elmo, rules: bool) -> SessionContext {
    let config = SessionConfig::new().with_target_partitions(3).with_batch_size(16);
    let session = elmo_udfs::session_with_config(&Models::from(elmo.clone()), config);
    session.register_batch("t", table()).unwrap();
    session.state_ref().write().config_mut().options_mut().set("elmo.rules", &rules.to_string()).unwrap();
    session
}

/// The rows of a query as text, sorted unless the query has an order, and the number of texts that were embedded.
async fn answer(query: &str, rules: bool) -> (Result<Vec<String>, String>, u64) {
    // A model of its own: a query that stops early may still be embedding texts when the next one starts.
    let elmo = Elmo::tiny().unwrap();
    let rows = async {
        let frame = elmo_udfs::sql(&session(&elmo, rules), query).await?;
        let schema = Arc::clone(frame.schema().inner());
        Ok((schema, frame.collect().await?))
    };
    let rows = rows.await.map_err(|e: DataFusionError| e.strip_backtrace()).map(|(schema, batches)| {
        let shown = pretty_format_batches_with_schema(schema, &batches).unwrap().to_string();
        let mut lines: Vec<String> = shown.lines().map(|line| line.split_whitespace().collect::<String>()).collect();
        if !is_ordered(query) {
            lines.sort();
        }
        lines.dedup_by(|a, b| a == b && a.starts_with('+'));
        lines
    });
    (rows, elmo.embedder().metrics().sentences)
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_change_no_row_and_embed_no_more_texts() {
    let (mut saved, mut rejected, mut failed) = (0, 0, Vec::new());
    // `SEEDS=1000..5000` selects other queries.
    let range = std::env::var("SEEDS").unwrap_or(format!("0..{QUERIES}"));
    let (first, end) = range.split_once("..").unwrap();
    let seeds = first.parse::<u64>().unwrap()..end.parse().unwrap();
    for seed in seeds.clone() {
        let query = query(seed);
        let (on, off) = (answer(&query, true).await, answer(&query, false).await);
        rejected += u64::from(on.0.is_err() && on.0 == off.0);
        if on.0 != off.0 {
            let (on, off) = (on.0.map(|rows| rows.join("\n")), off.0.map(|rows| rows.join("\n")));
            failed.push(format!("seed {seed}: {query}\non:\n{}\noff:\n{}", show(on), show(off)));
        } else if on.1 > off.1 {
            let explain = format!("EXPLAIN {query}");
            let plans = [answer(&explain, true).await.0, answer(&explain, false).await.0];
            let [with, without] = plans.map(|plan| show(plan.map(|lines| lines.join("\n"))));
            let (n, m) = (on.1, off.1);
            failed.push(format!("seed {seed}: {query}\n{n} texts, without the rules {m}\n{with}\n{without}"));
        }
        saved += off.1.saturating_sub(on.1);
    }
    assert!(failed.is_empty(), "{} of {range} failed\n{}", failed.len(), failed[..failed.len().min(3)].join("\n\n"));
    assert!(saved > 0);
    // DataFusion cannot plan every subquery.
    assert!(rejected * 20 <= seeds.end - seeds.start, "{rejected} were rejected");
}

fn show(rows: Result<String, String>) -> String {
    rows.unwrap_or_else(|error| format!("error: {error}"))
}

/// Queries that are rarely generated. Each was a defect once.
#[tokio::test(flavor = "multi_thread")]
async fn rules_change_no_row_of_odd_queries() {
    let mut failed = Vec::new();
    for query in [
        // Names that are equal without their aliases.
        "SELECT a, b, max(e[1]) FROM (SELECT text AS a, text AS b, elmo_embed(text) AS e FROM t) GROUP BY a, b",
        "SELECT sum(a), sum(b), max(e[1]) FROM (SELECT id AS a, id AS b, elmo_embed(text) e FROM t)",
        "SELECT e1[1], e2[1] FROM (SELECT elmo_embed(text) e1, elmo_embed(text) e2 FROM t) GROUP BY e1, e2",
        "SELECT b, row_number() OVER (ORDER BY id), e[1] \
         FROM (SELECT id, row_number() OVER (ORDER BY id) AS b, elmo_embed(text) e FROM t)",
        "SELECT grp, id % 2 AS odd, max(e[1]) FROM (SELECT *, elmo_embed(text) e FROM t) GROUP BY ROLLUP (grp, odd)",
        "SELECT a, b, max(e[1]) FROM (SELECT text AS a, text AS b, elmo_embed(text) AS e FROM t) GROUP BY GROUPING SETS ((a), (b))",
        "SELECT a, b, max(e[1]) FROM (SELECT text AS a, text AS b, elmo_embed(text) AS e FROM t) GROUP BY CUBE (a, b)",
        "SELECT x, y, count(*) FROM (SELECT CAST(elmo_embed(text)[1] AS DOUBLE) AS x, elmo_embed(text)[1] AS y FROM t) GROUP BY x, y",
        // Join conditions and keys over vectors.
        "SELECT l.id, r.id FROM (SELECT id, grp, elmo_embed(text) e FROM t) l LEFT JOIN t r ON l.grp = r.grp AND l.e[1] > r.id",
        "SELECT id FROM (SELECT id, grp, elmo_embed(text) e FROM t) l WHERE EXISTS \
         (SELECT 1 FROM t u WHERE u.grp = l.grp AND l.e[1] * 100 > u.id)",
        "SELECT a.id FROM t a WHERE NOT EXISTS \
         (SELECT 1 FROM t b WHERE b.grp = a.grp AND b.id < a.id AND elmo_similarity(a.text, b.text) > 0.9)",
        "SELECT a.id FROM t a WHERE EXISTS (SELECT 1 FROM t b WHERE b.grp = a.id AND elmo_similarity(a.text, b.text) > 0.9)",
        "SELECT a.id, b.id FROM t a LEFT JOIN t b ON a.id = b.grp + 7 AND elmo_similarity(a.text, b.text) > 0.9",
        "SELECT a.id, b.id FROM t a RIGHT JOIN t b ON a.id = b.grp + 7 AND elmo_similarity(a.text, b.text) > 0.9",
        "SELECT a.id, b.id, elmo_embed(a.text)[1] FROM t a FULL JOIN t b ON a.id = b.grp + 7 AND elmo_similarity(a.text, b.text) > 0.9",
        "SELECT a.id, b.id FROM t a LEFT JOIN t b ON a.id = b.grp + 7 AND (b.id > 20 OR elmo_similarity(a.text, b.text) > 0.9)",
        "SELECT a.id FROM t a WHERE a.grp = 3 OR EXISTS \
         (SELECT 1 FROM t b WHERE b.grp = a.id AND elmo_similarity(a.text, b.text) > 0.9)",
        "SELECT mark FROM (SELECT id AS mark, grp, text FROM t) a WHERE grp = 3 OR EXISTS \
         (SELECT 1 FROM t b WHERE b.grp = a.mark AND elmo_similarity(a.text, b.text) > 0.9) OR EXISTS \
         (SELECT 1 FROM t c WHERE c.id = a.grp AND elmo_similarity(a.text, c.text) < 0.1)",
        "SELECT a.id FROM t a WHERE a.grp NOT IN (SELECT b.id FROM t b WHERE elmo_similarity(a.text, b.text) > 0.9)",
        "SELECT a.id FROM t a WHERE a.id < 10 AND 0.9 > ANY (SELECT elmo_similarity(a.text, b.text) FROM t b WHERE b.id < a.id)",
        "SELECT a.id, b.id FROM t a LEFT JOIN (SELECT * FROM t ORDER BY id LIMIT 3) b ON a.grp = b.grp AND elmo_similarity(a.text, b.text) > 0.9",
        "SELECT a.id, b.id FROM t a JOIN t b ON elmo_embed(a.text) = elmo_embed(b.text)",
        "SELECT a.id, b.id FROM t a JOIN t b ON elmo_embed(a.text)[1] < elmo_embed(b.text)[1] AND a.id < 5",
        "SELECT a.id FROM t a FULL JOIN (SELECT id, coalesce(elmo_embed(text)[1], 0.0) s FROM t) b ON a.id = b.id + 3 WHERE b.s IS NULL",
        // Calls that are needed once, or must not be evaluated.
        "SELECT s, s + 1 FROM (SELECT CASE WHEN grp = 1 THEN elmo_embed(text)[2] END s, id FROM t) ORDER BY s, id",
        "SELECT s FROM (SELECT id, CASE WHEN elmo_embed(text)[1] > 0 THEN elmo_embed(concat(text, '!'))[1] END AS s FROM t) ORDER BY s, id",
        "SELECT id, CASE WHEN id = 0 THEN NULL WHEN 10 / id > 1 THEN elmo_embed(text)[1] END FROM t",
        "SELECT id, CASE WHEN id = 0 THEN NULL WHEN 10 / id > 1 THEN elmo_embed(text)[1] WHEN 100 / id > 1 THEN elmo_embed(text)[2] END FROM t",
        "SELECT elmo_embed(CASE WHEN k = 1 THEN text ELSE 'none' END)[1] FROM (SELECT 2 AS k, text FROM t)",
        "SELECT CASE WHEN elmo_embed(text)[1] > -100 AND elmo_embed(concat(text, 'a'))[1] > 100 \
         AND elmo_embed(concat(text, 'b'))[1] > 0 THEN 1 END FROM t",
        "SELECT id, random() < -1.0 AND elmo_embed(text)[1] > 0 FROM t",
        "SELECT CASE id WHEN 0 THEN elmo_embed(text)[1] WHEN 1 THEN elmo_embed(text)[2] WHEN 2 THEN elmo_embed(text)[3] \
         WHEN 3 THEN elmo_embed(text)[4] WHEN 4 THEN elmo_embed(text)[5] WHEN 5 THEN elmo_embed(text)[6] \
         WHEN 6 THEN elmo_embed(text)[7] WHEN 7 THEN elmo_embed(text)[8] WHEN 8 THEN elmo_embed(text)[9] \
         WHEN 9 THEN elmo_embed(text)[10] WHEN 10 THEN elmo_embed(text)[11] WHEN 11 THEN elmo_embed(text)[12] \
         WHEN 12 THEN elmo_embed(text)[13] WHEN 13 THEN elmo_embed(text)[14] WHEN 14 THEN elmo_embed(text)[15] END FROM t",
        // Constants beside columns.
        "SELECT id, elmo_similarity(text, 'cold soup') s FROM t ORDER BY id DESC LIMIT 10",
        "SELECT id, random() >= 0.0, elmo_embed(text)[1] + random() * 0.0 IS NULL FROM t ORDER BY id LIMIT 4",
        // Shapes of plans.
        "SELECT id, (SELECT max(elmo_embed(u.text)[1]) FROM t u WHERE u.grp = t.grp) FROM t",
        "SELECT id FROM t WHERE elmo_embed(text)[1] > (SELECT avg(elmo_embed(text)[1]) FROM t)",
        "WITH RECURSIVE r(n, s) AS (SELECT 0, 'a' UNION ALL SELECT n + 1, concat(s, ' a') FROM r WHERE n < 3) \
         SELECT n, elmo_embed(s)[1] FROM r",
        "SELECT id, token FROM (SELECT id, unnest(elmo_tokens(text))['token'] AS token FROM t) ORDER BY id, token LIMIT 9",
        "SELECT DISTINCT elmo_embed(text)[1] FROM t",
        "SELECT count(DISTINCT elmo_embed(text)[1]) FROM t",
        "SELECT id FROM t WHERE id NOT IN (SELECT id FROM t WHERE elmo_embed(text)[1] > 0)",
        "(SELECT id, elmo_embed(text)[1] FROM t) EXCEPT (SELECT id, elmo_embed(text)[1] FROM t WHERE grp = 1)",
        "SELECT id FROM t ORDER BY elmo_embed(text)[1] DESC NULLS LAST, id LIMIT 3",
        "SELECT x.* FROM (SELECT *, elmo_embed(text)[1] AS s FROM t LIMIT 0) x",
        // Volatile functions: equal expressions have different values.
        "SELECT a = b FROM (SELECT a, sum(random()) OVER () b, e FROM (SELECT sum(random()) OVER () a, elmo_embed(text) e FROM t)) \
         WHERE e IS NOT NULL",
        "SELECT a = b, e[1] FROM (SELECT random() a, random() b, elmo_embed(text) e FROM t) GROUP BY a, b, e ORDER BY e[1]",
        "SELECT a = b, x FROM (SELECT sum(random()) a, max(elmo_embed(text)[1]) x FROM t) CROSS JOIN (SELECT sum(random()) b FROM t)",
        // The value of one row per group.
        "SELECT grp, first_value(id ORDER BY a, b, id), max(e[1]) FROM (SELECT id, grp, text AS a, text AS b, elmo_embed(text) AS e FROM t) \
         GROUP BY grp",
        "SELECT DISTINCT ON (grp) id, grp, elmo_embed(text)[1] FROM t ORDER BY grp, id DESC",
        "SELECT DISTINCT ON (grp) text, e[1], e[2] + id FROM (SELECT *, elmo_embed(text) AS e FROM t) ORDER BY grp, e[1], id",
        "SELECT DISTINCT ON (id % 3) id, elmo_similarity(text, concat('soup ', id)) FROM t ORDER BY id % 3, text NULLS FIRST, id",
        "SELECT DISTINCT ON (grp) CASE WHEN id > 1 THEN elmo_embed(text)[1] ELSE -id END FROM t ORDER BY grp, id",
        "SELECT DISTINCT ON (grp) grp, coalesce(elmo_embed(text)[1], 5.0) FROM t WHERE id % 11 = 3 ORDER BY grp, id",
        "SELECT grp, first_value(elmo_embed(text)[1] ORDER BY id) IGNORE NULLS, last_value(elmo_embed(text)[1] ORDER BY id) \
         FROM t GROUP BY grp",
        "SELECT grp, first_value(coalesce(elmo_embed(text)[1], 5.0) ORDER BY id) FILTER (WHERE id > 38) FROM t GROUP BY grp",
        "SELECT first_value(coalesce(elmo_embed(text)[1], 5.0) ORDER BY id) FROM t WHERE id < 0",
        "SELECT grp, first_value(coalesce(elmo_embed(text)[1], 5.0) ORDER BY id) FROM t WHERE id < 0 GROUP BY ROLLUP (grp)",
        "SELECT grp, first_value(elmo_embed(text)[1] ORDER BY elmo_embed(text)[2], id), max(elmo_embed(text)[1]) FROM t GROUP BY grp",
        "SELECT elmo_embed(text)[1] > 0, first_value(elmo_embed(text)[2] ORDER BY id) FROM t GROUP BY 1",
    ] {
        let (on, off) = (answer(query, true).await, answer(query, false).await);
        let same = match (&on.0, &off.0) {
            (Ok(on), Ok(off)) => on == off,
            (Err(on), Err(off)) => on == off,
            _ => false,
        };
        if !same || on.1 > off.1 {
            let plan = answer(&format!("EXPLAIN {query}"), true).await.0;
            let [n, m] = [on.1, off.1];
            let [on, off, plan] = [on.0, off.0, plan].map(|rows| show(rows.map(|rows| rows.join("\n"))));
            failed.push(format!("{query}\n{n} texts, without the rules {m}\non:\n{on}\noff:\n{off}\n{plan}"));
        }
    }
    assert!(failed.is_empty(), "{} failed\n{}", failed.len(), failed.join("\n\n"));
}
