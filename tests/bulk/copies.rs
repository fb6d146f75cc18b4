//! COPY to a folder of an object store, through SQL as a library.

use std::{
    io::{self, Write},
    sync::{Arc, Mutex},
};

use elmo_pipelines::{
    report::Silent,
    sql::{Expanded, Format, OutputOptions, Settings, Sql},
    stores::Stores,
};
use futures::TryStreamExt;
use object_store::{ObjectStore, memory::InMemory, path::Path};

use crate::faulty::{Fault, Faulty, Plan};

#[derive(Clone, Default)]
struct Buffer(Arc<Mutex<Vec<u8>>>);

impl Write for Buffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The result of the last statement as CSV.
async fn sql(store: &Arc<dyn ObjectStore>, text: &str) -> Result<String, elmo_pipelines::Error> {
    let stores = Stores::with_settings([]);
    stores.insert("memory://copies", Arc::clone(store));
    let settings = Settings {
        models: Vec::new(),
        mixes: Vec::new(),
        offline: true,
        engine: Default::default(),
        remote: None,
        memory_limit: None,
    };
    let (sql, out) = (Sql::new(settings, &stores)?, Buffer::default());
    for statement in sql.parse(text)? {
        out.0.lock().unwrap().clear();
        let options = OutputOptions { format: Format::Csv, max_rows: 100, expanded: Expanded::Off, width: None };
        sql.run(statement, options, &Silent, Box::new(out.clone())).await?;
    }
    let shown = out.0.lock().unwrap().clone();
    Ok(String::from_utf8(shown).unwrap())
}

async fn names(store: &InMemory) -> Vec<String> {
    let listed: Vec<_> = store.list(Some(&Path::from("out"))).try_collect().await.unwrap();
    listed.into_iter().map(|file| file.location.to_string()).collect()
}

fn copy(rows: &str, options: &str) -> String {
    format!("COPY (SELECT value AS n, value % 2 AS p FROM {rows}) TO 'memory://copies/out/' STORED AS CSV {options}")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_folder_of_a_store_is_refused_appended_to_or_overwritten() {
    let memory = Arc::new(InMemory::new());
    let store: Arc<dyn ObjectStore> = Arc::<InMemory>::clone(&memory);
    // Sums by Gauss.
    let sum = async || sql(&store, "SELECT sum(n) AS s FROM 'memory://copies/out/'").await.unwrap();
    sql(&store, &copy("range(0, 10)", "PARTITIONED BY (p)")).await.unwrap();
    let first = names(&memory).await;
    assert_eq!((first.len(), sum().await.as_str()), (2, "s\n45\n"));
    let refused = sql(&store, &copy("range(0, 10)", "PARTITIONED BY (p)")).await.unwrap_err();
    let expected = "memory://copies/out/: COPY writes to an empty folder, and 2 files lie in this one";
    assert_eq!((refused.to_string().as_str(), names(&memory).await), (expected, first.clone()));
    sql(&store, &copy("range(0, 10)", "PARTITIONED BY (p) OPTIONS (append true)")).await.unwrap();
    assert_eq!((names(&memory).await.len(), sum().await.as_str()), (4, "s\n90\n"));
    let before = names(&memory).await;
    let failing = copy("(SELECT 1 / (value - 9) AS value FROM range(0, 10))", "OPTIONS (overwrite true)");
    sql(&store, &failing).await.unwrap_err();
    assert_eq!(names(&memory).await, before);
    sql(&store, &copy("range(0, 4)", "OPTIONS (overwrite true)")).await.unwrap();
    assert_eq!((names(&memory).await.len(), sum().await.as_str()), (1, "s\n6\n"));
}

/// Whichever request fails, the old rows or the new ones are all there.
#[tokio::test(flavor = "multi_thread")]
async fn no_row_is_lost_when_a_store_fails_while_a_folder_is_overwritten() {
    let mut outcomes = Vec::new();
    for failing in 0..12 {
        let memory = Arc::new(InMemory::new());
        let fine: Arc<dyn ObjectStore> = Arc::<InMemory>::clone(&memory);
        sql(&fine, &copy("range(0, 10)", "PARTITIONED BY (p)")).await.unwrap();
        let old = names(&memory).await;
        let plan: Plan = Arc::new(move |request| if request == failing { Fault::Before } else { Fault::None });
        let faulty: Arc<dyn ObjectStore> = Arc::new(Faulty::new(&memory, plan));
        let overwritten = sql(&faulty, &copy("range(10, 14)", "PARTITIONED BY (p) OPTIONS (overwrite true)")).await;
        let now = names(&memory).await;
        let (kept, added) = (old.iter().filter(|file| now.contains(file)).count(), now.len());
        // Two files of each kind.
        match &overwritten {
            Ok(_) => assert_eq!((kept, added), (0, 2), "request {failing}"),
            Err(error) if error.to_string().contains("the new files are complete") => {
                assert!(kept > 0 && added == kept + 2, "request {failing}: {now:?}");
                // The remedy.
                sql(&fine, &copy("range(10, 14)", "PARTITIONED BY (p) OPTIONS (overwrite true)")).await.unwrap();
                let sum = sql(&fine, "SELECT sum(n) AS s FROM 'memory://copies/out/'").await.unwrap();
                assert_eq!(sum, "s\n46\n");
            }
            Err(_) => assert_eq!(now, old, "request {failing}"),
        }
        outcomes.push(overwritten.map(drop).map_err(|error| error.to_string()));
    }
    // All three happened.
    let complete = |error: &String| error.contains("the new files are complete");
    assert!(outcomes.iter().any(Result::is_ok), "{outcomes:?}");
    assert!(outcomes.iter().any(|outcome| outcome.as_ref().is_err_and(complete)), "{outcomes:?}");
    assert!(outcomes.iter().any(|outcome| outcome.as_ref().is_err_and(|error| !complete(error))), "{outcomes:?}");
}
