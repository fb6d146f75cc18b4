//! Files of SQL statements and their expected results, `slt/*.slt`.
//!
//! Each file runs twice, with and without the planner rules, and results must be the same. Plans and the number of
//! embedded texts differ; such records are marked `onlyif rules_on` or `onlyif rules_off`.
//!
//! `UPDATE_SLT=1 cargo test --test sql slt` rewrites the expected results. If a number or a plan changed, the comment
//! above it says how to check the new one.

use std::path::Path;

use arrow::array::RecordBatch;
use async_trait::async_trait;
use datafusion::{
    error::{DataFusionError, Result},
    prelude::{SessionConfig, SessionContext},
};
use elmo::{Elmo, EmbedderSettings, ModelData};
use elmo_udfs::{Models, functions};
use sqllogictest::{
    AsyncDB, Condition, DBOutput, DefaultColumnType as Kind, Record, Runner, default_validator, parse_file,
    strict_column_validator,
};

use crate::statements::{as_written, files, kind, rows, save_narrow};

/// The labels that `onlyif` may name.
const LABELS: [&str; 2] = ["rules_on", "rules_off"];
/// `CALLS query` returns two numbers: the rows of the query, and the texts that were embedded for them with an empty
/// cache.
const CALLS: &str = "CALLS ";

/// The session of a file.
struct Database {
    session: SessionContext,
    tiny: Elmo,
    narrow: Elmo,
}

impl Database {
    async fn open(tiny: Elmo, narrow: Elmo, label: &str) -> Result<Self> {
        // Plans show the number of partitions, which must not depend on the number of cores.
        let config = SessionConfig::new().with_target_partitions(4).with_information_schema(true);
        let session = elmo_udfs::session_with_config(&models(&tiny, &narrow), config);
        let rules = format!("SET elmo.rules = {}", label == "rules_on");
        elmo_udfs::sql(&session, &rules).await?;
        Ok(Self { session, tiny, narrow })
    }

    /// Registers the functions again, over the same models with an empty cache.
    fn clear_cache(&self) {
        for function in functions::scalar(&models(&self.tiny, &self.narrow)) {
            self.session.register_udf(function);
        }
    }

    async fn answer(&self, statement: &str) -> Result<DBOutput<Kind>> {
        let frame = elmo_udfs::sql(&self.session, statement).await?;
        let types: Vec<Kind> = frame.schema().fields().iter().map(|field| kind(field.data_type())).collect();
        let batches = frame.collect().await?;
        if types.is_empty() {
            return Ok(DBOutput::StatementComplete(0));
        }
        Ok(DBOutput::Rows { types, rows: rows(&batches)? })
    }

    async fn calls(&self, query: &str) -> Result<DBOutput<Kind>> {
        self.clear_cache();
        let before = self.tiny.embedder().metrics().sentences;
        let batches = elmo_udfs::sql(&self.session, query).await?.collect().await?;
        let rows: usize = batches.iter().map(RecordBatch::num_rows).sum();
        let texts = self.tiny.embedder().metrics().sentences - before;
        Ok(DBOutput::Rows { types: vec![Kind::Integer; 2], rows: vec![vec![rows.to_string(), texts.to_string()]] })
    }
}

#[async_trait]
impl AsyncDB for Database {
    type Error = DataFusionError;
    type ColumnType = Kind;

    async fn run(&mut self, statement: &str) -> Result<DBOutput<Kind>> {
        match statement.strip_prefix(CALLS) {
            Some(query) => self.calls(query).await,
            None => self.answer(statement).await,
        }
    }

    async fn shutdown(&mut self) {}
}

fn models(tiny: &Elmo, narrow: &Elmo) -> Models {
    Models::new("tiny", [("tiny".to_owned(), tiny.clone()), ("narrow".to_owned(), narrow.clone())])
}

/// A second model with vectors of half the width, and weights from a formula.
pub(crate) fn narrow() -> Elmo {
    narrow_with(0.0)
}

/// The same with a constant added to all logits, which changes the file of the LM head but no probability.
pub(crate) fn narrow_with(constant: f32) -> Elmo {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("narrow");
    save_narrow(&dir, constant);
    let narrow = Elmo::from_data(ModelData::open(&dir).unwrap(), &EmbedderSettings::default()).unwrap();
    // Read the files before the folder is removed.
    narrow.lm_head().unwrap();
    narrow
}

async fn update(file: &Path, tiny: &Elmo, narrow: &Elmo) {
    for label in LABELS {
        let mut runner = Runner::new(|| Database::open(tiny.clone(), narrow.clone(), label));
        runner.add_label(label);
        runner.update_test_file(file, " ", default_validator, as_written, strict_column_validator).await.unwrap();
    }
}

/// All records of a file that fail.
async fn check(records: &[Record<Kind>], tiny: &Elmo, narrow: &Elmo) -> Vec<String> {
    let mut failed = Vec::new();
    for label in LABELS {
        let mut runner = Runner::new(|| Database::open(tiny.clone(), narrow.clone(), label));
        runner.add_label(label);
        runner.with_normalizer(as_written);
        runner.with_column_validator(strict_column_validator);
        for record in records {
            if let Err(error) = runner.run_async(record.clone()).await {
                failed.push(format!("{label}: {error}"));
            }
        }
    }
    failed
}

#[tokio::test(flavor = "multi_thread")]
async fn every_statement_has_its_expected_result() {
    let (tiny, narrow) = (Elmo::tiny().unwrap(), narrow());
    let mut failed = Vec::new();
    for file in files() {
        if std::env::var_os("UPDATE_SLT").is_some() {
            update(&file, &tiny, &narrow).await;
        }
        failed.extend(check(&parse_file(&file).unwrap(), &tiny, &narrow).await);
    }
    assert!(failed.is_empty(), "{} failed\n\n{}", failed.len(), failed.join("\n"));
}

/// A record with an unknown label would be skipped silently.
#[test]
fn files_name_no_other_labels() {
    for file in files() {
        for record in parse_file::<Kind>(&file).unwrap() {
            if let Record::Condition(condition) = record {
                let known = matches!(&condition, Condition::OnlyIf { label } if LABELS.contains(&label.as_str()));
                assert!(known, "{}: {condition:?}", file.display());
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_expectation_fails_with_and_without_the_rules() {
    let (tiny, narrow) = (Elmo::tiny().unwrap(), narrow());
    for wrong in [
        "query I\nSELECT 1\n----\n2",
        "query T\nSELECT 1\n----\n1",
        "query T\nSELECT 'a\n  b'\n----\na\nb",
        "statement error planning: a reason\nSELECT elmo_embed()",
        "statement error\nSELECT 1",
    ] {
        let failed = check(&sqllogictest::parse(wrong).unwrap(), &tiny, &narrow).await;
        assert_eq!(failed.len(), 2, "{wrong}: {failed:?}");
    }
}
