//! `elmo cluster`: workers as separate processes on loopback. Results are compared byte by byte with those of a single process.

use std::{
    fs,
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use arrow::array::RecordBatch;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use crate::{
    node::Node,
    place::{Ended, Place},
    queries::{is_ordered, query},
};

/// Workers of one thread each.
pub(crate) struct Cluster {
    pub(crate) workers: Vec<Node>,
    /// Their addresses, as clients are given them.
    pub(crate) list: String,
}

impl Cluster {
    pub(crate) fn start(place: &Place, workers: usize) -> Self {
        let worker = |_| Node::start(place.elmo(), "cluster worker --bind 127.0.0.1:0 --threads 1");
        let workers: Vec<Node> = (0..workers).map(worker).collect();
        let list = workers.iter().map(|worker| worker.address.as_str()).collect::<Vec<_>>().join(",");
        Self { workers, list }
    }

    /// Runs `elmo sql` on the cluster.
    pub(crate) fn sql(&self, place: &Place, words: &[&str]) -> Ended {
        sql(place, &[&self.flags(), words].concat())
    }

    fn flags(&self) -> [&str; 2] {
        ["--cluster", &self.list]
    }
}

pub(crate) fn sql(place: &Place, words: &[&str]) -> Ended {
    // The model of the tests, also where a test does not name it.
    let output = place.elmo().env("ELMO_MODEL", "tiny").args(["sql", "-q"]).args(words).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ended { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
}

/// The key-value pairs in the footer of a Parquet file.
type Footer = Vec<(String, Option<String>)>;

/// The rows of a Parquet file, its footer, and the metadata of its columns.
fn parquet(place: &Place, name: &str) -> (Vec<RecordBatch>, Footer, String) {
    let reader = ParquetRecordBatchReaderBuilder::try_new(fs::File::open(place.path(name)).unwrap()).unwrap();
    let metadata = reader.metadata();
    let said = metadata.file_metadata().key_value_metadata().cloned().unwrap_or_default();
    let mut said: Vec<_> = said.into_iter().map(|pair| (pair.key, pair.value)).collect();
    said.sort();
    let groups = format!("{:?}", metadata.row_groups().iter().map(|group| group.columns()).collect::<Vec<_>>());
    (reader.build().unwrap().collect::<Result<_, _>>().unwrap(), said, groups)
}

/// JSON lines with distinct texts, from a linear congruential generator.
pub(crate) fn texts(rows: usize, words: usize) -> String {
    let mut state = 1_u64;
    let mut word = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let letters = b"etaoinshrdlu";
        let letter = |n: u64| letters[((state >> (8 + 4 * n)) % 12) as usize] as char;
        (0..2 + (state >> 60) % 6).map(letter).collect::<String>()
    };
    let mut line = |id| {
        let text: Vec<String> = (0..words).map(|_| word()).collect();
        format!("{{\"id\": {id}, \"text\": \"{}.\"}}\n", text.join(" "))
    };
    (0..rows).map(&mut line).collect()
}

/// Statements of every kind: scans, sorts, limits, groups, joins, subqueries, windows, unions, in-memory tables, text
/// files.
const STATEMENTS: [&str; 51] = [
    "SELECT id, elmo_embed(text) AS v FROM 'reviews.jsonl'",
    "SELECT id, elmo_embed(text) AS v FROM 'reviews.jsonl' WHERE lang = 'en' ORDER BY id DESC LIMIT 10",
    "SELECT id % 3 AS g, count(*), elmo_centroid(elmo_embed(text)) FROM 'reviews.jsonl' GROUP BY 1 ORDER BY 1",
    "SELECT a.id, b.id, elmo_similarity(a.text, b.text) AS s FROM 'reviews.jsonl' a JOIN 'reviews.jsonl' b \
     ON a.id = b.id + 1 ORDER BY s DESC, 1 LIMIT 5",
    "SELECT id, elmo_tokens(text, layers => 'all') FROM 'reviews.jsonl' WHERE id < 5 ORDER BY id",
    "SELECT id, elmo_word(text, 0, 3), try_elmo_embed(text) FROM 'reviews.jsonl' WHERE id < 9 ORDER BY id",
    "SELECT id, elmo_word(text, 'the'), elmo_words(text, 'the', normalize => 'l2'), \
     elmo_word(text, strpos(text, 'was') - 1, strpos(text, 'was') + 2, unit => 'characters', max_tokens => 9) \
     FROM 'reviews.jsonl' WHERE id < 9 ORDER BY id",
    "SELECT id, CASE WHEN id % 2 = 0 THEN elmo_embed(text, state => 'warm') END FROM 'reviews.jsonl' ORDER BY id",
    "SELECT elmo_embed('It rained.')",
    "CREATE TABLE t AS SELECT id, text FROM 'reviews.jsonl'; SELECT id, elmo_embed(text) FROM t ORDER BY id",
    "SELECT id FROM 'reviews.jsonl' WHERE id NOT IN (SELECT id FROM 'reviews.jsonl' WHERE id > 7) ORDER BY id",
    "SELECT id, row_number() OVER (ORDER BY elmo_embed(text)[1], id) FROM 'reviews.jsonl' ORDER BY id",
    "SELECT id FROM 'reviews.jsonl' WHERE elmo_embed(text)[1] < (SELECT avg(elmo_embed(text)[1]) FROM 'reviews.jsonl') \
     ORDER BY id",
    "SELECT text, elmo_embed(text) FROM 'lines/*.txt' ORDER BY text",
    "SELECT count(*) FROM 'lines/*.txt'",
    "SELECT id, elmo_embed(text) FROM 'reviews.jsonl' UNION ALL SELECT -1, elmo_embed(text) FROM 'lines/*.txt' ORDER BY 1, 2",
    // Filters of outer joins that use a column which nothing else needs; sorts below unions.
    "SELECT count(*), count(i), count(j) FROM (SELECT a.id AS i, b.id AS j FROM 'reviews.jsonl' a \
     FULL JOIN 'reviews.jsonl' b ON a.id = b.id + 1 AND a.lang = 'en')",
    "SELECT a.id, b.id FROM 'reviews.jsonl' a RIGHT JOIN 'many.t' b ON a.id = b.id AND b.text > a.text ORDER BY 2, 1",
    "SELECT id FROM 'many.t' UNION ALL SELECT id FROM 'reviews.jsonl' ORDER BY 1",
    "SELECT id, elmo_embed(text)[1] FROM 'many.t' WHERE id < 50 UNION ALL SELECT id, 1.0 FROM 'reviews.jsonl' ORDER BY 1, 2",
    "SELECT v.id, elmo_cosine(v.v, elmo_embed('A good book.')) FROM (SELECT id, elmo_embed(text) AS v FROM 'many.t') v \
     WHERE v.id < 40 ORDER BY v.id",
    "SHOW FUNCTIONS LIKE 'elmo_l%'",
    // Joins without an equality must return each unmatched row of the left side once.
    "SELECT count(*), count(b.id) FROM 'reviews.jsonl' a LEFT JOIN 'large.jsonl' b ON a.id > b.id + 1000000",
    "SELECT count(*) FROM 'reviews.jsonl' a WHERE EXISTS (SELECT 1 FROM 'large.jsonl' b WHERE b.id < a.id + 1000000)",
    // A build side that is collected, and has a single partition.
    "SELECT a.id, v.y FROM (VALUES (1, 'x'), (2, 'y'), (7000, 'z')) v (x, y) LEFT JOIN 'reviews.jsonl' a ON a.id = v.x ORDER BY 2",
    "SELECT count(*) FROM (VALUES (1), (2), (7000)) v (x) LEFT JOIN 'reviews.jsonl' a ON a.id = v.x",
    "SELECT count(*) FROM 'reviews.jsonl' a FULL JOIN (SELECT max(id) AS id FROM 'many.t') b USING (id)",
    "SET datafusion.optimizer.hash_join_single_partition_threshold = 9999999; \
     SELECT count(*) FROM (VALUES (1), (2), (7000)) v (x) LEFT JOIN 'reviews.jsonl' a ON a.id = v.x",
    "SELECT kind, elmo_centroid(e) FROM (SELECT id, 'mean' AS kind, elmo_embed(text) AS e FROM 'reviews.jsonl' \
     UNION ALL SELECT id, 'top', elmo_embed(text, layers => 'top') FROM 'many.t' WHERE id < 20) GROUP BY kind ORDER BY 1",
    // Limits of in-memory rows, in one chunk and in several.
    "SELECT elmo_embed(column1)[1] FROM (VALUES ('a'), ('b'), ('c')) LIMIT 2",
    "CREATE TABLE u AS SELECT id, text FROM 'large.jsonl'; SELECT count(v) FROM (SELECT elmo_embed(text) AS v FROM u LIMIT 3)",
    // Branches of a union without files, and a table function of which no column is read.
    "SELECT count(*), min(id) FROM (SELECT id FROM 'large.jsonl' UNION ALL SELECT 7 UNION ALL SELECT max(id) FROM 'many.t')",
    "SELECT count(*) FROM (SELECT id FROM 'large.jsonl' UNION ALL SELECT value FROM range(0, 5) UNION ALL SELECT 8)",
    // A deep expression.
    "SELECT sum(id + id - id + id - id + id - id + id - id + id - id + id - id + id - id + id - id + id - id + id - id + id \
     - id + id - id + id - id + id - id + id - id + id - id + id - id + id - id + id - id + id - id + id - id + id - id \
     + id - id + id - id + id - id + id - id + id - id + id - id + id - id + id - id + id - id + id - id + id - id + id \
     - id + id - id + id - id + id - id + id - id + id - id + id - id + id - id + id - id + id - id) FROM 'reviews.jsonl'",
    // Properties of windows, sorts, limits and groups that are lost on the way to a worker.
    "SELECT id, sum(id) FILTER (WHERE id % 2 = 0) OVER () AS s FROM 'reviews.jsonl' ORDER BY id LIMIT 3",
    "SELECT id, lag(text) IGNORE NULLS OVER (ORDER BY id), first_value(text) IGNORE NULLS OVER (ORDER BY id DESC) \
     FROM 'reviews.jsonl' ORDER BY id",
    "SELECT id, lag(id) OVER (PARTITION BY lang ORDER BY id), lag(id) OVER (PARTITION BY lang ORDER BY id DESC) \
     FROM 'reviews.jsonl' ORDER BY id",
    "SELECT DISTINCT id FROM 'sorted/' ORDER BY id LIMIT 5",
    "SELECT id, count(*), min(elmo_embed(text)[1]) FROM 'sorted/' GROUP BY id ORDER BY id LIMIT 5",
    "SELECT count(*) FROM 'reviews.jsonl' GROUP BY GROUPING SETS ((), ())",
    "SELECT q.r, b.id FROM 'large.jsonl' b JOIN (SELECT id, id % 3 AS g, row_number() OVER (ORDER BY id) AS r \
     FROM 'reviews.jsonl') q ON b.id % 5 = q.g ORDER BY q.r, b.id LIMIT 100",
    "SELECT count(*) FROM (SELECT DISTINCT id % 5 FROM 'large.jsonl') g CROSS JOIN (SELECT id FROM 'sorted/' LIMIT 5) l",
    "SELECT count(*), sum(id) FROM (SELECT b.id FROM (SELECT id % 9 AS g, count(*) AS c FROM 'large.jsonl' GROUP BY 1) a \
     CROSS JOIN (SELECT id FROM 'reviews.jsonl') b UNION ALL SELECT id FROM 'sorted/')",
    "SELECT count(*) FROM 'large.jsonl' a JOIN 'reviews.jsonl' b ON a.id % 7 = b.id JOIN 'many.t' c ON a.id % 7 = c.id \
     WHERE a.id % 7 = a.id % 11",
    "WITH RECURSIVE c AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM c WHERE n < 4) \
     SELECT n, elmo_embed(text)[1] FROM c JOIN 'reviews.jsonl' ON id = n ORDER BY n",
    "SELECT id, elmo_embed(text)[1] AS e FROM 'large.jsonl' WHERE elmo_embed(text)[2] > 0.01 ORDER BY e DESC, id LIMIT 7",
    "SELECT elmo_embed('It rained.')[1] FROM (VALUES (1), (2)) UNION ALL SELECT id FROM 'many.t' WHERE id = 3 ORDER BY 1",
    // DataFusion does not serialise the compression of files.
    "SELECT id, elmo_embed(text)[1] FROM 'packed.csv.gz' ORDER BY id",
    "SELECT count(*), sum(id), min(text) FROM 'packed.jsonl.gz'",
    "SELECT a.id, b.text FROM 'packed/*.ndjson.zst' a JOIN 'packed.csv.gz' b USING (id) ORDER BY id",
    "SET elmo.rules = false; SELECT id, elmo_embed(text, pooling => 'max') FROM 'reviews.jsonl' ORDER BY id LIMIT 3",
];

#[test]
fn a_cluster_returns_what_one_process_returns() {
    let place = Place::new();
    write_files(&place);
    let cluster = Cluster::start(&place, 3);
    compare_statements(&place, &cluster);
    // A file of 900 KiB is split, and all workers embed.
    let large = ["--format", "csv", "-c", "SELECT count(*), elmo_centroid(elmo_embed(text)) FROM 'large.jsonl'"];
    assert_eq!(cluster.sql(&place, &large).out, sql(&place, &large).out);
    for worker in &cluster.workers {
        assert!(worker.stderr().contains("this model is untrained"), "{}", worker.stderr());
    }
    // Vectors keep their type, encoding and footer. The order of pairs in the footer may differ.
    let copy =
        |name| format!("COPY (SELECT id, elmo_embed(text) AS v FROM 'reviews.jsonl' ORDER BY id) TO '{name}.parquet'");
    assert_eq!(cluster.sql(&place, &["-c", &copy("there")]).code, Some(0));
    assert_eq!(sql(&place, &["-c", &copy("here")]).code, Some(0));
    assert_eq!(parquet(&place, "there.parquet"), parquet(&place, "here.parquet"));
    // A table is truncated, with a note.
    let words = ["--cluster", &cluster.list, "--max-rows", "2", "-c", "SELECT id FROM 'reviews.jsonl'"];
    let shown = place.elmo().arg("sql").args(words).output().unwrap();
    let err = String::from_utf8(shown.stderr).unwrap();
    assert!(err.contains("only the first 2 rows are shown; use --max-rows for more"), "{err}");
    // EXPLAIN ANALYZE shows the operator's metrics of all rows; EXPLAIN shows what runs where.
    let analysed = cluster.sql(&place, &["-c", "EXPLAIN ANALYZE SELECT elmo_embed(text || '!') FROM 'large.jsonl'"]);
    let embedded = analysed.out.lines().find(|line| line.contains("EmbedExec")).unwrap_or_default();
    // What the workers have told is what the client's progress shows.
    let told = analysed.out.lines().find(|line| line.contains("ClusterExec")).unwrap_or_default();
    assert!(told.contains("rows_embedded=5.50 K"), "{told}");
    assert!(embedded.contains("padding_ratio") && embedded.contains("output_rows=5.50 K"), "{analysed:?}");
    let last = "EXPLAIN SELECT id, elmo_embed(text) FROM 'large.jsonl' WHERE id > 9 ORDER BY id DESC LIMIT 2";
    let explained = cluster.sql(&place, &["-c", last]).out;
    let at = |words: &str| explained.find(words).unwrap_or_else(|| panic!("{words}: {explained}"));
    let physical = at("physical_plan");
    let places = [
        "RowsExec",
        "ClusterExec: workers=3",
        "SortPreservingMergeExec",
        "StageExec",
        "SortExec: TopK",
        "DataSourceExec",
    ];
    let places = places.map(at);
    assert!(physical < places[0] && places.is_sorted(), "{explained}");
    // Rows are in file order, also with a subquery. Ids are numbered in that order.
    let ordered = "SELECT id FROM (SELECT id, elmo_embed(text)[1] AS v FROM 'large.jsonl' \
                   WHERE id > (SELECT min(id) FROM 'large.jsonl')) WHERE v IS NOT NULL";
    let ids = cluster.sql(&place, &["--format", "csv", "-c", ordered]).out;
    let ids: Vec<u32> = ids.lines().skip(1).map(|id| id.parse().unwrap()).collect();
    assert!(ids.len() > 5000 && ids.is_sorted(), "{} rows", ids.len());
    let explained = sql(
        &place,
        &["-c", "SET datafusion.optimizer.repartition_file_min_size = 1000", "-c", &format!("EXPLAIN {ordered}")],
    );
    let explained = explained.out;
    assert!(explained.contains("InOrderExec"), "{explained}");
    random_queries(&place, &cluster);
    statements_that_run_in_the_client(&place, &cluster);
    bulk_jobs(&place, &cluster);
    errors(&place, &cluster);
}

/// The files of [`STATEMENTS`].
fn write_files(place: &Place) {
    place.write("lines/a.txt", "One line.\nTwo lines.\n");
    place.write("lines/b.txt", "Another file.\n\nThree lines.\n");
    place.write("many.jsonl", texts(1500, 30));
    place.write("large.jsonl", texts(5500, 30));
    for packed in ["packed.csv.gz", "packed.jsonl.gz", "packed/a.ndjson.zst", "packed/b.ndjson.zst"] {
        let copy = format!("COPY (SELECT id, text FROM 'reviews.jsonl') TO '{packed}'");
        assert_eq!(sql(place, &["-c", &copy]).code, Some(0));
    }
    let sorted = |part| {
        format!("COPY (SELECT id, text FROM 'many.jsonl' WHERE id % 3 = {part} ORDER BY id) TO 'sorted/{part}.parquet'")
    };
    assert_eq!(sql(place, &["-c", &[0, 1, 2].map(sorted).join("; ")]).code, Some(0));
}

/// [`STATEMENTS`] on a cluster and in one process.
fn compare_statements(place: &Place, cluster: &Cluster) {
    // One process for all statements. If something differs, one process per statement.
    let words = |statements: &[&str]| -> Vec<String> {
        let each = statements.iter().flat_map(|statement| ["-c".to_owned(), statement.replace("many.t", "many.jsonl")]);
        ["--format".to_owned(), "csv".to_owned()].into_iter().chain(each).collect()
    };
    let both = |statements: &[&str]| {
        let words = words(statements);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        (cluster.sql(place, &words), sql(place, &words))
    };
    let (there, here) = both(&STATEMENTS);
    if (there.code, &there.out) != (Some(0), &here.out) {
        for statement in STATEMENTS {
            let (there, here) = both(&[statement]);
            assert_eq!((there.code, there.err.as_str()), (Some(0), ""), "{statement}");
            assert_eq!(there.out, here.out, "{statement}");
        }
        panic!("each statement on its own gives the same result");
    }
    assert_eq!((here.code, here.out.lines().count() > 1000), (Some(0), true), "{}", here.err);
}

/// Random queries over several files.
fn random_queries(place: &Place, cluster: &Cluster) {
    let words = ["cold soup", "the bank", "warm bread", "river", "it's cold", "bank"];
    for file in 0..4 {
        let row = |id: usize| {
            let text = if id % 11 == 3 { "null".to_owned() } else { format!("\"{}\"", words[id % words.len()]) };
            format!("{{\"id\": {id}, \"grp\": {}, \"text\": {text}}}\n", id % 4)
        };
        place.write(&format!("rows/{file}.jsonl"), (10 * file..10 * file + 10).map(row).collect::<String>());
    }
    let statements = |seeds: &[u64]| -> Vec<String> {
        let each = seeds.iter().flat_map(|seed| [format!("SELECT 'seed {seed}' AS mark"), query(*seed)]);
        let first = ["SET datafusion.execution.batch_size = 16", "CREATE VIEW t AS SELECT * FROM 'rows/*.jsonl'"];
        first.map(str::to_owned).into_iter().chain(each).flat_map(|statement| ["-c".to_owned(), statement]).collect()
    };
    let run = |seeds: &[u64], there: &[&str]| {
        let statements = statements(seeds);
        let statements: Vec<&str> = statements.iter().map(String::as_str).collect();
        sql(place, &[there, &["--format", "csv"], statements.as_slice()].concat())
    };
    let last = |ended: &Ended| ended.out.lines().rev().find_map(|line| line.strip_prefix("seed ")?.parse::<u64>().ok());
    let answers = |ended: &Ended, seeds: &[u64]| -> Vec<Vec<String>> {
        let parts = ended.out.split("mark\nseed ").skip(1);
        let lines = |(part, seed): (&str, &u64)| {
            let mut lines: Vec<String> = part.lines().skip(1).map(str::to_owned).collect();
            if !is_ordered(&query(*seed)) {
                lines.sort();
            }
            lines
        };
        parts.zip(seeds).map(lines).collect()
    };
    // Other seeds, or more: `SEEDS=1000..5000`.
    let range = std::env::var("SEEDS").unwrap_or("0..10".to_owned());
    let (first, behind) = range.split_once("..").unwrap();
    let mut seeds: Vec<u64> = (first.parse().unwrap()..behind.parse().unwrap()).collect();
    let all = seeds.len();
    // DataFusion cannot plan every subquery.
    let mut here = run(&seeds, &[]);
    while here.code != Some(0) {
        let refused = last(&here).unwrap();
        seeds.retain(|seed| *seed != refused);
        assert!(all - seeds.len() <= all / 10, "seed {refused}: {}", here.err);
        here = run(&seeds, &[]);
    }
    let there = run(&seeds, &cluster.flags());
    assert_eq!((there.code, there.err.as_str()), (Some(0), ""), "seed {:?}", last(&there));
    let (here, there) = (answers(&here, &seeds), answers(&there, &seeds));
    assert_eq!((here.len(), there.len()), (seeds.len(), seeds.len()));
    for ((here, there), seed) in here.into_iter().zip(there).zip(&seeds) {
        assert_eq!(there, here, "seed {seed}: {}", query(*seed));
    }
}

/// Statements whose scans, limits or expressions cannot be serialised without loss, and so run in the client.
fn statements_that_run_in_the_client(place: &Place, cluster: &Cluster) {
    place.write("semicolons.csv", "n;1;2;");
    // Larger than the minimum size to split.
    let rows = (0..30_000).map(|n| format!("{{\"n\": {n}, \"text\": \"Word {}.\"}}", n % 50)).collect::<Vec<_>>();
    place.write("array.json", format!("[{}]", rows.join(", ")));
    let made = place.shell(
        "elmo sql -q --format arrow -c \"SELECT id, text FROM 'reviews.jsonl'\" > stream.arrow; \
        elmo sql -q --format csv -c \"SELECT id, text FROM 'large.jsonl'\" | gzip -c > packed.bin",
    );
    assert_eq!(made.code, Some(0), "{made:?}");
    let deep = format!("SELECT sum(id{}) FROM 'large.jsonl'", " + id - id".repeat(600));
    let statements = [
        "CREATE EXTERNAL TABLE a (n TEXT) STORED AS CSV LOCATION 'semicolons.csv' OPTIONS ('format.terminator' ';'); \
         SELECT count(*), max(n) FROM a",
        "CREATE EXTERNAL TABLE b STORED AS CSV LOCATION 'packed.bin' OPTIONS ('format.compression' 'gzip'); \
         SELECT count(*), sum(id) FROM b WHERE id > 8 AND elmo_embed(text)[1] IS NOT NULL",
        "CREATE EXTERNAL TABLE c STORED AS JSON LOCATION 'array.json' OPTIONS ('format.newline_delimited' 'false'); \
         SELECT count(*), min(elmo_embed(text)[1]) FROM c WHERE n % 7 = 0",
        // Workers would find that this one is an array.
        "SELECT count(*), min(elmo_embed(text)[1]) FROM 'array.json' WHERE n % 7 = 0",
        "SELECT id, elmo_embed(text)[1] FROM 'stream.arrow' ORDER BY id",
        "SELECT r.id, elmo_embed(r.text)[1] FROM 'reviews.jsonl' r, information_schema.tables ORDER BY id",
        "SELECT id, elmo_embed(text)[1] FROM 'reviews.jsonl' LIMIT 4294967297",
        "SELECT id, elmo_embed(text)[1] FROM 'large.jsonl' OFFSET 4294967296",
        "SET datafusion.execution.time_zone = '+08:00'; \
         SELECT CAST('2026-01-0' || (1 + id % 9) AS TIMESTAMP WITH TIME ZONE) AS t, min(elmo_embed(text)[1]) FROM 'large.jsonl' GROUP BY 1 ORDER BY 1",
        "SELECT file_row_index() AS n, elmo_embed(text)[1] FROM 'sorted/0.parquet' ORDER BY n",
        "SET datafusion.execution.batch_size = 1000; \
         CREATE TABLE d AS SELECT id, arrow_cast('k' || (id / 1000 * 50 + id % 50), 'Dictionary(Int8, Utf8)') AS k, text FROM 'large.jsonl'; \
         SELECT count(k), count(DISTINCT id), min(e), max(e) FROM (SELECT id, k, elmo_embed(text)[1] AS e FROM d)",
        &deep,
    ];
    for statement in statements {
        let words = ["--format", "csv", "-c", statement];
        let (there, here) = (cluster.sql(place, &words), sql(place, &words));
        assert_eq!((there.code, &there.out, here.code), (Some(0), &here.out, Some(0)), "{statement}: {there:?}");
    }
}

/// The files of a bulk job are identical to those of a single process, which can resume a job of the cluster.
fn bulk_jobs(place: &Place, cluster: &Cluster) {
    let address = &cluster.list;
    let job = "embed -q --model tiny --input many.jsonl --keep id --rows-per-file 400";
    for (name, settings) in [
        ("plain", ""),
        ("tokens", "--level token --layers all --boundaries --list-type list"),
        ("bad", "--on-long error --max-tokens 29 --on-error skip --state warm"),
    ] {
        let there = place.run(&format!("{job} {settings} --output {name}-there --cluster {address} --json"));
        let here = place.run(&format!("{job} {settings} --output {name}-here --json"));
        assert_eq!(there.code, here.code, "{name}: {there:?}");
        for counted in ["rows_in", "rows_out", "tokens", "sentences", "errors", "skipped", "empty", "nulls"] {
            assert_eq!(there.json()[counted], here.json()[counted], "{name}: {counted}");
        }
        for part in 0..4 {
            let read = |end| fs::read(place.path(&place.part(&format!("{name}-{end}"), part))).unwrap();
            assert!(read("there") == read("here"), "{name}: part {part}");
        }
    }
    // A trial ends at the same row.
    for (end, cluster) in [("there", format!("--cluster {address}")), ("here", String::new())] {
        let trial = place.exits(&format!("{job} --limit 500 --output trial-{end} --json {cluster}"), 0).json();
        assert_eq!((trial["rows_out"].as_u64(), trial["parts"].as_u64()), (Some(500), Some(2)));
    }
    let read = |end| fs::read(place.path(&place.part(&format!("trial-{end}"), 1))).unwrap();
    assert!(read("there") == read("here"));
    // A single process recreates a missing part.
    fs::remove_file(place.path(&place.part("plain-there", 2))).unwrap();
    place.exits(&format!("{job} --output plain-there"), 0);
    let read = |end| fs::read(place.path(&place.part(&format!("plain-{end}"), 2))).unwrap();
    assert!(read("there") == read("here"));
    let failed = place.exits(&format!("{job} --max-tokens 29 --on-long error --output no --cluster {address}"), 3);
    let alone = place.exits(&format!("{job} --max-tokens 29 --on-long error --output no"), 3);
    assert_eq!(failed.err, alone.err);
    let carried = "--state carry --batch-rows 4 --sentences off --on-long truncate";
    let carried = place.exits(&format!("{job} --output no --cluster {address} {carried}"), 2);
    assert!(carried.err.contains("state carry needs all rows in one process"), "{carried:?}");
    // The model is reported as untrained once, after all checks.
    let loud = format!("embed --model tiny --input many.jsonl --cluster {address}");
    for (words, exit) in
        [("--column nothing --output no", 3), ("--output plain-there", 2), ("--input none.txt --output no", 3)]
    {
        let refused = place.exits(&format!("{loud} {words}"), exit);
        assert!(!refused.err.contains("untrained"), "{words}: {refused:?}");
    }
    for words in ["--output loud", "--output dry --dry-run"] {
        let done = place.exits(&format!("{loud} {words}"), 0);
        assert_eq!(done.err.matches("untrained").count(), 1, "{words}: {done:?}");
    }
}

/// Messages and exit codes of errors are those of a single process.
fn errors(place: &Place, cluster: &Cluster) {
    let address = &cluster.list;
    let same = [
        "SELECT elmo_embed(text, layers => 9) FROM 'reviews.jsonl'",
        "SELECT elmo_embed(text, on_long => 'error', sentences => 'off') FROM 'long.jsonl'",
        "SELECT 1 / (id - 7) FROM 'reviews.jsonl'",
        "SELECT elmo_embed(text) FROM 'nothing.jsonl'",
        "SELECT elmo_embed(text) FROM 'latin1.txt'",
        "SELECT elmo_embed(text) FROM 'torn.csv.gz'",
        "SELECT elmo_embed(text) FROM 'torn.jsonl.gz'",
        "SELECT count(text) FROM 'broken/*.jsonl' WHERE id > 8",
        // The value that a function rejects is not shown, so it does not matter which row fails first.
        "SELECT count(to_time(text)) FROM 'large.jsonl' WHERE id > 8",
        // A scalar subquery of several rows is an error; a rewrite to a join would hide it.
        "SELECT count(*) FROM 'reviews.jsonl' WHERE id > (SELECT id FROM 'large.jsonl')",
    ];
    let packed = place.shell(
        "gzip -c reviews.jsonl | head -c 2000 > torn.jsonl.gz; \
        (echo text; seq 9999) | gzip -c | head -c 9000 > torn.csv.gz",
    );
    assert_eq!(packed.code, Some(0), "{packed:?}");
    fs::create_dir(place.path("broken")).unwrap();
    let rows = fs::read_to_string(place.path("large.jsonl")).unwrap();
    place.write("broken/a.jsonl", &rows);
    place.write("broken/b.jsonl", format!("{rows}{{\"id\": \"secret\", \"text\": \"\"}}\n"));
    place.write("latin1.txt", b"fine\nna\xefve\n");
    place.write("long.jsonl", format!("{{\"text\": \"b\"}}\n{{\"text\": \"{}\"}}\n", "a ".repeat(600)));
    for statement in same {
        let (there, here) = (cluster.sql(place, &["-c", statement]), sql(place, &["-c", statement]));
        assert_eq!((there.code, there.err), (here.code, here.err), "{statement}");
    }
    let says = |ended: Ended, code: i32, words: &str| {
        assert_eq!(ended.code, Some(code), "{ended:?}");
        assert!(ended.err.contains(words), "{words}: {ended:?}");
    };
    let query = "SELECT elmo_embed(text) FROM 'reviews.jsonl' LIMIT 1";
    says(cluster.sql(place, &["--precision", "bf16", "-c", query]), 4, "computes in f32, and the query asks for bf16");
    let embed = format!("embed -q --model tiny --input reviews.jsonl --output no --cluster {address} --precision bf16");
    says(place.run(&embed), 4, "start all with the same --precision");
    // Workers check the fingerprint that the client planned with. Here the client's cached fingerprint is wrong.
    place.exits("model convert tiny other --to safetensors", 0);
    let weights = place.path("other/weights.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, &bytes).unwrap();
    // Fingerprints of files written within the last seconds are not cached.
    thread::sleep(Duration::from_secs(4));
    let fingerprint =
        ["--model", "other", "--format", "csv", "-c", "SELECT fingerprint FROM elmo_models() WHERE is_default"];
    let fingerprint = sql(place, &fingerprint).out.lines().nth(1).unwrap().to_owned();
    let query = ["--model", "other", "--format", "csv", "-c", "SELECT id, elmo_embed(text) FROM 'reviews.jsonl'"];
    assert_eq!(cluster.sql(place, &query).out, sql(place, &query).out);
    let note = fs::read_dir(place.path("cache/models/fingerprints")).unwrap().next().unwrap().unwrap().path();
    let wrong = fs::read_to_string(&note).unwrap().replace(&fingerprint, &"0".repeat(64));
    fs::write(&note, wrong).unwrap();
    let planned = format!("its fingerprint is {fingerprint}, and the query was planned with {}", "0".repeat(64));
    says(cluster.sql(place, &query), 4, &planned);
}

/// `SELECT` with spaces that [`Node::spawn`] does not divide.
fn one_word(query: &str) -> String {
    query.replace(' ', "/**/")
}

#[test]
fn a_worker_that_is_killed_or_stands_still_costs_no_answer() {
    let place = Place::new();
    // 1.5 MB: the file is split.
    place.write("many.jsonl", texts(3000, 80));
    // An aggregate of a scan; then calls above a join of two scans with aggregates.
    for (signal, query) in [
        ("-KILL", "SELECT count(*) AS n, sum(id) AS s, elmo_centroid(elmo_embed(text)) AS c FROM 'many.jsonl'"),
        (
            "-STOP",
            "SELECT count(*) AS n, sum(id) AS s, elmo_centroid(elmo_embed(concat(m, k))) AS c FROM \
             (SELECT id, min(text) AS m FROM 'many.jsonl' WHERE elmo_embed(text)[1] IS NOT NULL GROUP BY id) a \
             JOIN (SELECT id, max(id % 5) AS k FROM 'many.jsonl' GROUP BY id) b USING (id)",
        ),
    ] {
        let mut cluster = Cluster::start(&place, 2);
        let words = ["--format", "csv", "-c", query];
        let here = sql(&place, &words);
        let mut command = place.elmo();
        command.args(["sql", "-q", "--model", "tiny", "--cluster", &cluster.list]).args(words);
        let asked = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // A worker opens the model when it runs the first task.
        cluster.workers[1].wait_for("this model is untrained");
        cluster.workers[1].signal(signal);
        let there = asked.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&there.stderr), "");
        assert_eq!(String::from_utf8_lossy(&there.stdout), here.out);
        // The other worker answers the next query, and ends on SIGTERM.
        assert_eq!(cluster.sql(&place, &words).out, here.out);
        cluster.workers[1].signal("-KILL");
        let worker = &mut cluster.workers[0];
        worker.signal("-TERM");
        assert_eq!(worker.wait(), Some(0), "{}", worker.stderr());
    }
}

/// Units of a bulk job go to other workers when theirs is killed, stands still, or ends; one that comes back gets units again. The
/// files are those of one process to the byte, and nothing else is left in the folder.
#[test]
fn a_bulk_job_survives_its_workers() {
    let place = Place::new();
    place.write("many.jsonl", texts(40_000, 20));
    let job = "embed -q --model tiny --input many.jsonl --keep id --rows-per-file 2000";
    place.exits(&format!("{job} --output here"), 0);
    let mut cluster = Cluster::start(&place, 3);
    let words = format!("{job} --output there --cluster {}", cluster.list);
    let mut client = Node::spawn(place.elmo(), &words);
    cluster.workers[2].wait_for("this model is untrained");
    cluster.workers[2].signal("-KILL");
    cluster.workers[1].signal("-STOP");
    thread::sleep(Duration::from_secs(2));
    cluster.workers[1].signal("-CONT");
    assert_eq!(client.wait(), Some(0), "{}", client.stderr());
    let names = |folder: &str| -> Vec<String> {
        let names = fs::read_dir(place.path(folder)).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    };
    assert_eq!(names("there"), names("here"));
    for name in names("here").iter().filter(|name| name.ends_with("parquet")) {
        let read = |folder: &str| fs::read(place.path(&format!("{folder}/{name}"))).unwrap();
        assert!(read("there") == read("here"), "{name}");
    }
    // The client is interrupted, and then killed; the last run finishes on one worker.
    for (signal, code) in [("-INT", Some(130)), ("-KILL", None)] {
        let words = format!("{job} --output again --cluster {}", cluster.list);
        let mut client = Node::spawn(place.elmo(), &words);
        let (begun, since) = (place.path("again/_elmo/part-00000.json"), Instant::now());
        while !begun.exists() {
            assert!(since.elapsed() < Duration::from_secs(60), "{}", client.stderr());
            thread::sleep(Duration::from_millis(20));
        }
        client.signal(signal);
        assert_eq!(client.wait(), code, "{}", client.stderr());
    }
    cluster.workers[0].signal("-TERM");
    assert_eq!(cluster.workers[0].wait(), Some(0), "{}", cluster.workers[0].stderr());
    place.exits(&format!("{job} --output again --cluster {}", cluster.list), 0);
    assert_eq!(names("again"), names("here"));
    for name in names("here").iter().filter(|name| name.ends_with("parquet")) {
        let read = |folder: &str| fs::read(place.path(&format!("{folder}/{name}"))).unwrap();
        assert!(read("again") == read("here"), "{name}");
    }
    place.exits("verify again --model tiny", 0);
    // Entries of consecutive parts are lost, and a worker that was killed has left a file.
    let worker = Node::start(place.elmo(), "cluster worker --bind 127.0.0.1:0 --threads 1");
    for part in 3..6 {
        fs::remove_file(place.path(&format!("again/_elmo/part-{part:05}.json"))).unwrap();
    }
    let left = place.path(&format!("again/.{}.staged-7", names("here")[2]));
    fs::write(&left, "unfinished").unwrap();
    let words = format!("{job} --output again --cluster {}", worker.address);
    place.exits(&words, 0);
    assert!(!left.exists());
    assert_eq!(names("again"), names("here"));
    fs::write(&left, "unfinished").unwrap();
    place.exits(&format!("{words} --overwrite"), 0);
    assert_eq!(names("again"), names("here"));
    for name in names("here").iter().filter(|name| name.ends_with("parquet")) {
        let read = |folder: &str| fs::read(place.path(&format!("{folder}/{name}"))).unwrap();
        assert!(read("again") == read("here"), "{name}");
    }
}

#[test]
fn workers_and_clients_report_errors() {
    let place = Place::new();
    let everywhere = place.exits("cluster worker --bind 0.0.0.0:0", 2);
    assert!(everywhere.err.contains("anybody who reaches this address could read files"), "{everywhere:?}");
    let nobody = place.exits(&format!("sql -q --cluster 127.0.0.1:1 -c {}", one_word("SELECT elmo_embed('a')")), 5);
    assert!(nobody.err.contains("none of the workers answers: 127.0.0.1:1"), "{nobody:?}");
    place.exits("embed -q --model tiny --input reviews.jsonl --output no --cluster 127.0.0.1:1", 5);
    let wrong = place.exits("sql -q --cluster localhost -c SELECT/**/1", 2);
    assert!(wrong.err.contains("is not HOST:PORT"), "{wrong:?}");
    let cluster = Cluster::start(&place, 1);
    let taken = place.exits(&format!("cluster worker --bind {}", cluster.list), 2);
    assert!(taken.err.contains("cannot listen at"), "{taken:?}");
    // A list in a file, with a worker that is not there.
    place.write("workers", format!("# mine\n\n{}\n127.0.0.1:1\n", cluster.list));
    let mut command = place.elmo();
    command.args(["sql", "--model", "tiny", "--cluster", "workers", "-c", "SELECT elmo_embed('a') IS NULL"]);
    let answer = command.output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&answer.stdout), String::from_utf8_lossy(&answer.stderr));
    assert!(answer.status.success() && out.contains("false"), "{out}{err}");
    assert!(err.contains("going on without a worker: 127.0.0.1:1"), "{err}");
    // A worker that lacks the model, as its working directory differs.
    fs::create_dir(place.path("elsewhere")).unwrap();
    let mut command = place.elmo();
    command.current_dir(place.path("elsewhere"));
    let other = Node::start(command, "cluster worker --bind 127.0.0.1:0 --threads 1");
    place.exits("model convert tiny here --to safetensors", 0);
    let words = ["--model", "/proc/self/cwd/here", "-c", "SELECT elmo_embed(text) FROM 'reviews.jsonl' LIMIT 1"];
    let lost = sql(&place, &[["--cluster", &other.address].as_slice(), &words].concat());
    assert_eq!(lost.code, Some(4), "{lost:?}");
    assert!(lost.err.contains("cannot open the model here: no model /proc/self/cwd/here"), "{lost:?}");
}

/// Ctrl-C ends the work on the workers.
#[test]
fn an_interrupted_query_leaves_nothing_running() {
    let place = Place::new();
    place.write("many.jsonl", texts(12000, 80));
    let cluster = Cluster::start(&place, 1);
    let query = one_word("SELECT elmo_embed(text) FROM 'many.jsonl'");
    for signal in ["-INT", "-KILL"] {
        // A table would be cut after 100 rows.
        let words = format!("sql --format csv --model tiny --cluster {} -c {query}", cluster.list);
        let mut client = Node::spawn(place.elmo(), &words);
        wait_for_tasks(&place, &cluster, &|tasks| tasks > 0);
        client.signal(signal);
        client.wait();
        wait_for_tasks(&place, &cluster, &|tasks| tasks == 0);
    }
}

/// Waits until the number of tasks of the first worker is as it should be.
pub(crate) fn wait_for_tasks(place: &Place, cluster: &Cluster, is_right: &dyn Fn(u64) -> bool) {
    let began = Instant::now();
    loop {
        let status = place.exits(&format!("cluster status --json {}", cluster.list), 0).json();
        let tasks = status[0]["tasks"].as_u64().unwrap();
        if is_right(tasks) {
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(30), "{tasks} tasks");
        thread::sleep(Duration::from_millis(20));
    }
}

/// With a token, and certificates that are made here.
#[test]
fn only_those_with_the_token_and_the_certificate_authority_are_served() {
    let place = Place::new();
    let made = place.shell(
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=elmo-ca -keyout ca.key -out ca.pem && \
         openssl req -newkey rsa:2048 -nodes -subj /CN=worker -keyout worker.key -out worker.csr && \
         printf 'subjectAltName=DNS:localhost,IP:127.0.0.1' > names && \
         openssl x509 -req -in worker.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names -out worker.pem && \
         openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=other -keyout other.key -out other.pem",
    );
    assert_eq!(made.code, Some(0), "{made:?}");
    place.write("token", "open sesame\n");
    place.write("wrong", "open barley\n");
    place.write("empty", "\n");
    let own = "--token-file token --tls-ca ca.pem";
    let worker = |_| {
        let words =
            format!("cluster worker --bind 127.0.0.1:0 --threads 1 {own} --tls-cert worker.pem --tls-key worker.key");
        Node::start(place.elmo(), &words)
    };
    let workers: Vec<Node> = (0..2).map(worker).collect();
    let list = workers.iter().map(|worker| worker.address.as_str()).collect::<Vec<_>>().join(",");
    place.write("many.jsonl", texts(5500, 30));
    // Rows also go from worker to worker.
    let query = one_word(
        "SELECT k, count(*), sum(e) FROM (SELECT id % 7 AS k, elmo_embed(text)[1] AS e FROM 'many.jsonl') GROUP BY k ORDER BY k",
    );
    let here = place.exits(&format!("sql -q --model tiny --format csv -c {query}"), 0);
    let there = place.exits(&format!("sql -q --model tiny --format csv --cluster {list} {own} -c {query}"), 0);
    assert_eq!(there.out, here.out);
    let job = format!("embed -q --model tiny --input many.jsonl --rows-per-file 1000 --cluster {list}");
    place.exits(&format!("{job} {own} --output out"), 0);
    for (words, code, reason) in [
        ("", 5, "none of the workers answers"),
        ("--tls-ca ca.pem", 2, "it asks for a token; give --token-file"),
        ("--tls-ca ca.pem --token-file wrong", 2, "wrong token; give --token-file"),
        ("--tls-ca ca.pem --token-file empty", 2, "the token is empty"),
        ("--tls-ca other.pem --token-file token", 5, "certificate"),
        ("--tls-ca nothing.pem --token-file token", 5, "nothing.pem"),
        ("--tls-ca token --token-file token", 2, "token: has no certificate"),
    ] {
        for command in [format!("{job} --output no"), format!("sql -q --cluster {list} -c {query}")] {
            let refused = place.run(&format!("{command} {words}"));
            assert!(refused.code != Some(0) && refused.err.contains(reason), "{words}: {refused:?}");
            assert_eq!(refused.code, Some(code), "{words}: {refused:?}");
            assert!(!refused.err.contains("sesame") && !refused.err.contains("barley"), "{refused:?}");
        }
    }
    for worker in workers {
        assert!(!worker.stderr().contains("sesame"), "{}", worker.stderr());
    }
}
