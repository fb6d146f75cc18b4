//! Files of SQL statements and their expected results, `slt/*.slt`.
//!
//! Each file runs twice, with and without the planner rules, and results must be the same. Plans and the number of
//! embedded texts differ; such records are marked `onlyif rules_on` or `onlyif rules_off`.
//!
//! `UPDATE_SLT=1 cargo test --test sql slt` rewrites the expected results. If a number or a plan changed, the comment
//! above it says how to check the new one.

use std::path::{Path, PathBuf};

use arrow::{
    array::{Array, ArrayRef, AsArray, RecordBatch},
    datatypes::DataType,
    util::display::array_value_to_string,
};
use async_trait::async_trait;
use datafusion::{
    error::{DataFusionError, Result},
    prelude::{SessionConfig, SessionContext},
};
use elmo::{
    Elmo, EmbedderSettings, ModelData,
    lm_head::LmHeadData,
    model_dir::WeightsFormat,
    weights::{Tensor, Weights},
};
use elmo_udfs::{Models, functions};
use sqllogictest::{
    AsyncDB, Condition, DBOutput, DefaultColumnType as Kind, Record, Runner, default_validator, parse_file,
    strict_column_validator,
};

/// The labels that `onlyif` may name.
const LABELS: [&str; 2] = ["rules_on", "rules_off"];
/// `CALLS query` returns two numbers: the rows of the query, and the texts that were embedded for them with an empty
/// cache.
const CALLS: &str = "CALLS ";
/// Vectors of at most this length are shown in full. Of longer ones, two numbers and the length are shown.
const MAX_SHOWN: usize = 4;

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
        let mut rows = Vec::new();
        for batch in &batches {
            for row in 0..batch.num_rows() {
                rows.extend(lines(batch, row)?);
            }
        }
        Ok(DBOutput::Rows { types, rows })
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
    let mut options = ModelData::tiny().options;
    options.lstm.projection_dim /= 2;
    let mut weights = Weights::default();
    for spec in options.weight_plan() {
        let data = (0..spec.len()).map(|i| (i * 31 % 101) as f32 / 505.0 - 0.1).collect();
        weights.insert(spec.name, Tensor { shape: spec.shape, data });
    }
    // A softmax with zero weights: probabilities are always those of `PROBABILITIES`.
    let words = PROBABILITIES.iter().map(|(word, _)| (*word).to_owned()).collect();
    let weight =
        Tensor { shape: vec![5, options.lstm.projection_dim], data: vec![0.0; 5 * options.lstm.projection_dim] };
    let bias = Tensor { shape: vec![5], data: PROBABILITIES.iter().map(|(_, p)| p.ln() + constant).collect() };
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("narrow");
    ModelData::new(options, weights, "narrow").unwrap().save(&dir, WeightsFormat::Safetensors).unwrap();
    LmHeadData::new(words, weight, bias).unwrap().save(&dir).unwrap();
    let narrow = Elmo::from_data(ModelData::open(&dir).unwrap(), &EmbedderSettings::default()).unwrap();
    // Read the files before the folder is removed.
    narrow.lm_head().unwrap();
    narrow
}

/// The vocabulary of `narrow`: surprisals of 1, 2, 3, 4 and 4 bits.
const PROBABILITIES: [(&str, f32); 5] =
    [("rain", 0.5), ("wind", 0.25), ("</S>", 0.125), ("<S>", 0.0625), ("<UNK>", 0.0625)];

fn kind(data_type: &DataType) -> Kind {
    match data_type {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => Kind::Text,
        number if number.is_integer() => Kind::Integer,
        number if number.is_floating() => Kind::FloatingPoint,
        _ => Kind::Any,
    }
}

/// A row, followed by the lines of multi-line values, such as plans.
fn lines(batch: &RecordBatch, row: usize) -> Result<Vec<Vec<String>>> {
    let mut lines = vec![Vec::new()];
    for column in batch.columns() {
        let shown = cell(column, row)?;
        match shown.contains('\n') {
            true => lines.extend(shown.lines().map(|line| vec![line.to_owned()])),
            false => lines[0].push(shown),
        }
    }
    lines.retain(|line| !line.is_empty());
    Ok(lines)
}

/// A value as it is written in a file. Numbers are rounded to four decimals, which are the same on every processor.
fn cell(column: &ArrayRef, row: usize) -> Result<String> {
    if column.logical_nulls().is_some_and(|nulls| nulls.is_null(row)) {
        return Ok("NULL".to_owned());
    }
    Ok(match column.data_type() {
        DataType::FixedSizeList(..) => list(&column.as_fixed_size_list().value(row))?,
        DataType::List(_) => list(&column.as_list::<i32>().value(row))?,
        DataType::Struct(fields) => {
            let columns = fields.iter().zip(column.as_struct().columns());
            let members = columns.map(|(field, column)| Ok(format!("{}: {}", field.name(), cell(column, row)?)));
            format!("{{{}}}", members.collect::<Result<Vec<_>>>()?.join(", "))
        }
        data_type => {
            let shown = array_value_to_string(column, row)?;
            match shown.parse::<f64>() {
                // Adding 0 converts -0 to 0.
                Ok(number) if data_type.is_floating() => ((number * 1e4).round() / 1e4 + 0.0).to_string(),
                _ if shown.is_empty() => "(empty)".to_owned(),
                _ => shown,
            }
        }
    })
}

fn list(items: &ArrayRef) -> Result<String> {
    let shown = match items.data_type().is_floating() && items.len() > MAX_SHOWN {
        true => 2,
        false => items.len(),
    };
    let mut cells = (0..shown).map(|item| cell(items, item)).collect::<Result<Vec<_>>>()?;
    if shown < items.len() {
        cells.push(format!("… {}", items.len()));
    }
    Ok(format!("[{}]", cells.join(", ")))
}

/// Keeps leading spaces, which are part of a plan.
#[allow(clippy::ptr_arg, reason = "the type that the runner expects")]
fn as_written(line: &String) -> String {
    line.trim_end().to_owned()
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

fn files() -> Vec<PathBuf> {
    // Read at run time: several clones may share a target folder.
    let folder = Path::new(&std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("../tests/sql/slt");
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "slt"));
    files.sort();
    files
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
