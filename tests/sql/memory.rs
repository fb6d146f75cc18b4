//! Queries whose memory is limited: the same rows as without a limit, or an error that names a limit that suffices.

use std::sync::Arc;

use arrow::{
    array::{ArrayRef, BinaryArray, Int64Array, RecordBatch, StringArray},
    compute::concat_batches,
};
use datafusion::{
    execution::{
        memory_pool::{FairSpillPool, MemoryPool, UnboundedMemoryPool},
        runtime_env::RuntimeEnvBuilder,
        session_state::SessionStateBuilder,
    },
    prelude::{SessionConfig, SessionContext},
};
use elmo_udfs::{ElmoSession, Models};
use futures::StreamExt;

use super::tiny;

/// A session over a table `t (id, text)`, whose operators share `pool`.
fn session(pool: &Arc<dyn MemoryPool>, texts: ArrayRef) -> SessionContext {
    let runtime = RuntimeEnvBuilder::new().with_memory_pool(Arc::clone(pool)).build_arc().unwrap();
    let mut config = SessionConfig::new().with_batch_size(256).with_target_partitions(1);
    config.options_mut().execution.sort_spill_reservation_bytes = 256 << 10;
    let builder = SessionStateBuilder::new().with_config(config).with_runtime_env(runtime).with_default_features();
    let session = SessionContext::new_with_state(builder.with_elmo(&Models::from(tiny().clone())).build());
    let id: ArrayRef = Arc::new(Int64Array::from_iter_values(0..texts.len() as i64));
    let rows = RecordBatch::try_from_iter_with_nullable([("id", id, false), ("text", texts, true)]).unwrap();
    session.register_batch("t", rows).unwrap();
    session
}

fn set(session: &SessionContext, key: &str, value: &str) {
    session.state_ref().write().config_mut().options_mut().set(key, value).unwrap();
}

fn fair(bytes: usize) -> Arc<dyn MemoryPool> {
    Arc::new(FairSpillPool::new(bytes))
}

/// Texts of 20 to 200 words, some of which occur twice.
fn texts(rows: usize) -> ArrayRef {
    let text = |i: usize| format!("{} {}", i % (rows - rows / 10), "word ".repeat(20 + 20 * (i % 10)));
    Arc::new((0..rows).map(|i| Some(text(i))).collect::<StringArray>())
}

async fn run(session: &SessionContext, query: &str) -> Result<RecordBatch, String> {
    let frame = elmo_udfs::sql(session, query).await.unwrap();
    let schema = Arc::new(frame.schema().as_arrow().clone());
    let batches = frame.collect().await.map_err(|e| e.strip_backtrace())?;
    Ok(concat_batches(&schema, &batches).unwrap())
}

async fn unlimited(texts: &ArrayRef, query: &str) -> RecordBatch {
    let pool: Arc<dyn MemoryPool> = Arc::new(UnboundedMemoryPool::default());
    run(&session(&pool, Arc::clone(texts)), query).await.unwrap()
}

/// The vectors of the query take 26 MB. The largest row takes 154 kB, which an estimate counts twice.
#[tokio::test]
async fn a_small_pool_gives_the_same_rows() {
    let texts = texts(300);
    let query = "SELECT id, elmo_tokens(text, layers => 'all') AS k, elmo_embed(text) AS e FROM t";
    let expected = unlimited(&texts, query).await;
    for (megabytes, cache_mb) in [(1, 256), (1, 0), (4, 256), (64, 1)] {
        let pool = fair(megabytes << 20);
        let session = session(&pool, Arc::clone(&texts));
        set(&session, "elmo.cache_mb", &cache_mb.to_string());
        for _ in 0..2 {
            assert_eq!(run(&session, query).await.unwrap(), expected, "{megabytes} {cache_mb}");
            // Only the cache remains, and it takes at most an eighth of the limit.
            let most = (cache_mb << 20).min((megabytes << 20) / 8);
            assert!(pool.reserved() <= most, "{megabytes} {cache_mb}: {}", pool.reserved());
        }
    }
}

/// A sort that fills its share of the pool spills, and does not take the memory that the next chunk needs.
#[tokio::test]
async fn an_operator_that_spills_leaves_memory_for_the_next_chunk() {
    let short: ArrayRef = Arc::new((0..12_000).map(|i| Some(format!("text {i}"))).collect::<StringArray>());
    let query = "SELECT id, e FROM (SELECT id, elmo_embed(text) AS e FROM t) ORDER BY e[1], id";
    let pool = fair(3 << 20);
    let session = session(&pool, Arc::clone(&short));
    set(&session, "elmo.cache_mb", "0");
    assert_eq!(run(&session, query).await.unwrap(), unlimited(&short, query).await);
    assert_eq!(pool.reserved(), 0);
}

#[tokio::test]
async fn memory_is_released_after_an_error_and_by_a_cancelled_query() {
    let pool = fair(64 << 20);
    let session = session(&pool, texts(3000));
    set(&session, "elmo.cache_mb", "0");
    let frame = elmo_udfs::sql(&session, "SELECT id, elmo_tokens(text) AS k FROM t").await.unwrap();
    let mut stream = frame.execute_stream().await.unwrap();
    assert!(stream.next().await.unwrap().is_ok());
    assert!(pool.reserved() > 0);
    drop(stream);
    assert_eq!(pool.reserved(), 0);

    let mut bytes: Vec<&[u8]> = vec![b"text"; 2000];
    bytes[1500] = b"\xff";
    let session = self::session(&pool, Arc::new(BinaryArray::from(bytes)));
    set(&session, "elmo.cache_mb", "0");
    let error = run(&session, "SELECT id, elmo_tokens(text) AS k FROM t").await.unwrap_err();
    assert!(error.contains("row 1500"), "{error}");
    assert_eq!(pool.reserved(), 0);
}

/// By hand: 5,000 words with vectors of 3 * 64 numbers are 3.8 MB, which an estimate counts twice.
#[tokio::test]
async fn too_little_memory_for_one_row_is_an_error_that_names_a_limit_that_suffices() {
    let long: ArrayRef = Arc::new(StringArray::from(vec!["word ".repeat(5000)]));
    let query = "SELECT id, elmo_tokens(text, layers => 'all') AS k FROM t";
    let error = run(&session(&fair(2 << 20), Arc::clone(&long)), query).await.unwrap_err();
    let (_, limit) = error.split_once("raise --memory-limit (datafusion.runtime.memory_limit) to at least ").unwrap();
    let limit: usize = limit.strip_suffix("MB").unwrap().parse().unwrap();
    assert!((7..16).contains(&limit), "{error}");
    let found = run(&session(&fair(limit << 20), Arc::clone(&long)), query).await.unwrap();
    assert_eq!(found, unlimited(&long, query).await);
}
