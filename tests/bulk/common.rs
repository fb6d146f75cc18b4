//! A stage without a model, and a folder to work in.

use std::{
    collections::BTreeMap,
    fs,
    future::pending,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use arrow::{
    array::{Array, ArrayRef, AsArray, BooleanArray, FixedSizeListArray, RecordBatch, StringArray},
    compute::{cast, concat_batches},
    datatypes::{DataType, Field, Float32Type},
};
use async_trait::async_trait;
use elmo::{ColumnEmbedder, ColumnStats, Elmo, EmbedSpec, EmbeddedColumns, spec::OnError};
use elmo_pipelines::{
    Result,
    bulk::{self, BulkJob, BulkReport},
    report::Silent,
    sink::Codec,
    source::{InferRows, Keep, KeptTypes, Reading},
    stage::{EmbedStage, Pending, Stage},
    stores::Stores,
};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use tempfile::TempDir;
use tokio::sync::Semaphore;

/// Numbers in a vector of [`Hashing`].
pub(crate) const WIDTH: usize = 8;

/// The vector of a text is made of the FNV-1a hash of its bytes, NULL for NULL and for bytes that are no UTF-8.
#[derive(Debug, Default)]
pub(crate) struct Hashing {
    pub(crate) spec: EmbedSpec,
    /// Never answers: a device that hangs.
    pub(crate) stuck: bool,
    /// Columns are built on tasks of their own, each with a permit, which it gives back after 10 ms.
    pub(crate) built: Option<Arc<Semaphore>>,
    /// Rows that were given to it.
    pub(crate) rows: AtomicUsize,
}

/// The numbers that [`Hashing`] gives for a text.
pub(crate) fn hashed(text: &[u8]) -> Vec<f32> {
    let fnv = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    let hash = text.iter().fold(0xcbf2_9ce4_8422_2325, fnv);
    hash.to_le_bytes().map(|byte| f32::from(byte) / 256.0).to_vec()
}

#[async_trait]
impl Stage for Hashing {
    fn spec(&self) -> &EmbedSpec {
        &self.spec
    }

    fn fields(&self) -> Vec<Field> {
        let item = Field::new("item", DataType::Float32, false);
        let vector = DataType::FixedSizeList(Arc::new(item), WIDTH as i32);
        vec![
            Field::new("embedding", vector, true),
            Field::new("truncated", DataType::Boolean, false),
            Field::new("error", DataType::Utf8, true),
        ]
    }

    fn metadata(&self) -> Vec<(String, String)> {
        vec![("elmo.fingerprint".into(), "hashing".into())]
    }

    async fn submit(&self, texts: &ArrayRef) -> elmo::Result<Pending> {
        self.rows.fetch_add(texts.len(), Ordering::SeqCst);
        if self.stuck {
            return Ok(Box::pin(pending()));
        }
        let done = embed(texts, self.spec.on_error);
        if let Some(built) = &self.built {
            let built = Arc::clone(built);
            let building = tokio::spawn(async move {
                let _turn = built.acquire().await.unwrap();
                tokio::time::sleep(Duration::from_millis(10)).await;
                done
            });
            return Ok(Box::pin(async { building.await.unwrap() }));
        }
        // As from a device: not at once.
        Ok(Box::pin(async {
            tokio::task::yield_now().await;
            done
        }))
    }
}

fn embed(texts: &ArrayRef, on_error: OnError) -> elmo::Result<EmbeddedColumns> {
    let bytes = cast(texts, &DataType::LargeBinary).unwrap();
    let bytes = bytes.as_binary::<i64>();
    let broken = |i: usize| bytes.is_valid(i) && std::str::from_utf8(bytes.value(i)).is_err();
    if let Some(row) = (0..bytes.len()).find(|&i| broken(i)).filter(|_| on_error == OnError::Fail) {
        return Err(elmo::Error::Row { row, reason: "not UTF-8".into() });
    }
    let fine = |i: usize| bytes.is_valid(i) && !broken(i);
    let vector = |i: usize| fine(i).then(|| hashed(bytes.value(i)).into_iter().map(Some));
    let vectors =
        FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>((0..bytes.len()).map(vector), WIDTH as i32);
    let (_, size, values, nulls) = vectors.into_parts();
    let item = Arc::new(Field::new("item", DataType::Float32, false));
    let vectors = Arc::new(FixedSizeListArray::new(item, size, without_nulls(&values), nulls));
    let error: StringArray = (0..bytes.len()).map(|i| broken(i).then_some("not UTF-8")).collect();
    let errors = error.len() - error.null_count();
    let skip = on_error == OnError::Skip && errors > 0;
    Ok(EmbeddedColumns {
        vectors,
        truncated: BooleanArray::from(vec![false; bytes.len()]),
        keep: skip.then(|| (0..bytes.len()).map(|i| Some(!broken(i))).collect()),
        error,
        row_errors: (0..bytes.len()).filter(|&i| broken(i)).map(|i| (i, "not UTF-8".into())).collect(),
        tokens: vec![0; bytes.len()].into(),
        stats: ColumnStats { rows: bytes.len(), nulls: bytes.null_count(), errors, ..ColumnStats::default() },
        cost: elmo::engine::Cost::default(),
    })
}

fn without_nulls(values: &ArrayRef) -> ArrayRef {
    let values = values.as_primitive::<Float32Type>();
    Arc::new(values.iter().map(Option::unwrap_or_default).collect::<arrow::array::Float32Array>())
}

/// The built-in model.
pub(crate) fn tiny(spec: EmbedSpec) -> Arc<EmbedStage> {
    let columns = ColumnEmbedder::new(&Elmo::tiny().unwrap(), spec).unwrap();
    let width = columns.width();
    EmbedStage::new(columns, width)
}

/// A folder of its own for each test.
pub(crate) struct Place(TempDir);

impl Place {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    /// A job on files of this folder.
    pub(crate) fn job(&self, input: &str, output: &str) -> BulkJob {
        job(&self.path(input).display().to_string(), &self.path(output).display().to_string())
    }

    pub(crate) fn rows(&self, output: &str) -> RecordBatch {
        let files = parts(&self.path(output)).into_values();
        let batches: Vec<RecordBatch> = files.flat_map(|bytes| read(bytes.into())).collect();
        concat_batches(&batches[0].schema(), &batches).unwrap()
    }
}

/// A job with small parts and windows.
pub(crate) fn job(input: &str, output: &str) -> BulkJob {
    BulkJob {
        inputs: vec![input.to_owned()],
        output: output.to_owned(),
        column: "text".into(),
        id: None,
        keep: Keep::All,
        types: KeptTypes::default(),
        // So that small files have later rows.
        infer_rows: InferRows(Some(1000)),
        reading: Reading::default(),
        limit: None,
        rows_per_file: Some(10),
        row_group_bytes: 64 << 20,
        codec: Codec::Zstd,
        window_rows: 4,
        overwrite: false,
        check: false,
        grace: Duration::from_secs(1),
    }
}

/// Runs a job to its end.
pub(crate) async fn run(job: &BulkJob, stage: &dyn Stage, stores: &Stores) -> Result<BulkReport> {
    bulk::run(job, stage, stores, pending(), &Silent).await
}

/// Runs a job on the local disk with hashed vectors.
pub(crate) async fn run_local(job: &BulkJob) -> Result<BulkReport> {
    run(job, &Hashing::default(), &Stores::with_settings([])).await
}

pub(crate) fn read(bytes: bytes::Bytes) -> Vec<RecordBatch> {
    let reader = ParquetRecordBatchReaderBuilder::try_new(bytes).unwrap();
    let schema = Arc::clone(reader.schema());
    let batches: Vec<RecordBatch> = reader.build().unwrap().map(std::result::Result::unwrap).collect();
    if batches.is_empty() { vec![RecordBatch::new_empty(schema)] } else { batches }
}

/// The bytes of every Parquet file of a folder.
pub(crate) fn parts(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    names(folder)
        .into_iter()
        .filter(|name| name.ends_with(".parquet"))
        .map(|name| (name.clone(), fs::read(folder.join(name)).unwrap()))
        .collect()
}

/// The file of part `part` of an output, whatever fingerprint is in its name.
pub(crate) fn part(output: &Path, part: usize) -> PathBuf {
    let stem = format!("part-{part:05}-");
    let name = names(output).into_iter().find(|name| name.starts_with(&stem));
    output.join(name.unwrap_or_else(|| panic!("no part {part} in {}", output.display())))
}

/// The name of a part without the fingerprint of its job.
pub(crate) fn plain(name: &str) -> String {
    match name.strip_suffix(".parquet").and_then(|stem| stem.rsplit_once('-')) {
        Some((stem, fingerprint)) if fingerprint.len() == 8 => format!("{stem}.parquet"),
        _ => name.to_owned(),
    }
}

/// The names in a folder, sorted; none if the folder does not exist.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The strings of a column.
pub(crate) fn strings(rows: &RecordBatch, column: &str) -> Vec<Option<String>> {
    let column = cast(rows.column_by_name(column).unwrap(), &DataType::Utf8).unwrap();
    column.as_string::<i32>().iter().map(|s| s.map(str::to_owned)).collect()
}

/// The vectors, row by row.
pub(crate) fn vectors(rows: &RecordBatch) -> Vec<Option<Vec<f32>>> {
    let column = rows.column_by_name("embedding").unwrap().as_fixed_size_list();
    let vector = |v: ArrayRef| v.as_primitive::<Float32Type>().values().to_vec();
    (0..column.len()).map(|i| column.is_valid(i).then(|| vector(column.value(i)))).collect()
}

/// Every row's vector is the hash of the row's text.
pub(crate) fn assert_own_vectors(rows: &RecordBatch) {
    let expected: Vec<_> = strings(rows, "text").iter().map(|t| t.as_ref().map(|t| hashed(t.as_bytes()))).collect();
    assert_eq!(vectors(rows), expected);
}

pub(crate) fn lines(n: usize) -> String {
    (0..n).map(|i| format!("Line {i} says something of its own.\n")).collect()
}
