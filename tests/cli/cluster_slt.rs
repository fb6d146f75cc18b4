//! The files of SQL statements, `tests/sql/slt/*.slt`, on three workers. Their tables are read from three Parquet files each, so that
//! queries that embed are divided over the workers. Results are those that the files expect of one process.

use std::{
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
};

use arrow::{array::RecordBatch, compute::concat_batches, datatypes::Schema};
use async_trait::async_trait;
use datafusion::error::{DataFusionError, Result};
use elmo_pipelines::{
    cluster::{Cluster as Client, Credentials},
    sql::{Settings, Sql},
    stores::Stores,
};
use parquet::arrow::ArrowWriter;
use sqllogictest::{AsyncDB, DBOutput, DefaultColumnType as Kind, Record, Runner, parse_file, strict_column_validator};

use crate::{
    cluster::Cluster,
    place::Place,
    statements::{as_written, files, kind, rows, save_narrow},
};

/// Files of a table.
const PARTS: usize = 3;
/// Statements with these words are about this process, and not run: its plans, how many texts it embeds, and its models.
const OF_ONE_PROCESS: [&str; 3] = ["EXPLAIN ", "CALLS ", "elmo_models()"];
/// Tables in one file: errors name a row of a batch, which ends with the file.
const WHOLE: [&str; 2] = ["long", "bytes"];
/// Tables that statements change stay in memory.
const CHANGED: [&str; 3] = ["written", "embedded", "changed"];

/// The session of a file, whose queries run on workers.
struct Database {
    sql: Sql,
    /// Where its tables are.
    folder: PathBuf,
}

impl Database {
    async fn answer(&self, statement: &str) -> Result<DBOutput<Kind>> {
        let frame = elmo_udfs::sql(self.sql.context(), statement).await?;
        let types: Vec<Kind> = frame.schema().fields().iter().map(|field| kind(field.data_type())).collect();
        let batches = frame.collect().await?;
        if !types.is_empty() {
            return Ok(DBOutput::Rows { types, rows: rows(&batches)? });
        }
        if let Some(table) = created(statement).filter(|table| !CHANGED.contains(table)) {
            self.store(table).await?;
        }
        Ok(DBOutput::StatementComplete(0))
    }

    /// Replaces a table in memory by one of files.
    async fn store(&self, table: &str) -> Result<()> {
        let frame = self.sql.context().table(table).await?;
        let schema = Arc::new(Schema::clone(frame.schema().as_arrow()));
        let all = concat_batches(&schema, &frame.collect().await?)?;
        let folder = self.folder.join(table);
        std::fs::create_dir_all(&folder)?;
        let parts = if WHOLE.contains(&table) { 1 } else { PARTS };
        for part in 0..parts {
            let (start, end) = (part * all.num_rows() / parts, (part + 1) * all.num_rows() / parts);
            write(&folder.join(format!("{part}.parquet")), &all.slice(start, end - start))?;
        }
        let create = format!("CREATE EXTERNAL TABLE {table} STORED AS PARQUET LOCATION '{}/'", folder.display());
        for statement in [format!("DROP TABLE {table}"), create] {
            elmo_udfs::sql(self.sql.context(), &statement).await?;
        }
        Ok(())
    }
}

fn write(path: &Path, rows: &RecordBatch) -> Result<()> {
    let mut writer = ArrowWriter::try_new(File::create(path)?, rows.schema(), None)?;
    writer.write(rows)?;
    writer.close()?;
    Ok(())
}

/// The name of the table that a statement creates.
fn created(statement: &str) -> Option<&str> {
    statement.strip_prefix("CREATE TABLE ")?.split([' ', '(']).next()
}

fn statement(record: &Record<Kind>) -> Option<&str> {
    match record {
        Record::Statement { sql, .. } | Record::Query { sql, .. } => Some(sql),
        _ => None,
    }
}

#[async_trait]
impl AsyncDB for Database {
    type Error = DataFusionError;
    type ColumnType = Kind;

    async fn run(&mut self, statement: &str) -> Result<DBOutput<Kind>> {
        self.answer(statement).await
    }

    async fn shutdown(&mut self) {}
}

#[tokio::test(flavor = "multi_thread")]
async fn every_statement_has_its_expected_result_on_workers() {
    let place = Place::new();
    save_narrow(&place.path("narrow"), 0.0);
    let cluster = Cluster::start(&place, 3);
    let (mut failed, mut count) = (Vec::new(), 0);
    for file in files() {
        let name = file.file_stem().unwrap().to_string_lossy().into_owned();
        let mut runner = Runner::new(|| async {
            let models = [("tiny", "tiny".to_owned()), ("narrow", place.path("narrow").display().to_string())];
            let settings = Settings {
                models: models.map(|(name, model)| (name.to_owned(), model.parse().unwrap())).into(),
                mixes: Vec::new(),
                offline: true,
                engine: elmo::EmbedderSettings::default(),
                remote: Some(Arc::new(Client::new(cluster.list.parse().unwrap(), &Credentials::default()).unwrap())),
                memory_limit: None,
            };
            Ok(Database { sql: Sql::new(settings, &Stores::with_settings([])).unwrap(), folder: place.path(&name) })
        });
        runner.add_label("rules_on");
        runner.with_normalizer(as_written);
        runner.with_column_validator(strict_column_validator);
        for record in parse_file::<Kind>(&file).unwrap() {
            if statement(&record).is_some_and(|sql| OF_ONE_PROCESS.iter().any(|word| sql.contains(word))) {
                continue;
            }
            if let Err(error) = runner.run_async(record.clone()).await {
                failed.push(error.to_string());
            }
            count += usize::from(statement(&record).is_some());
        }
    }
    // All of them have embedded.
    for worker in &cluster.workers {
        assert!(worker.stderr().contains("this model is untrained"), "{}", worker.stderr());
    }
    assert!(failed.is_empty(), "{} of {count} failed\n\n{}", failed.len(), failed.join("\n"));
}
