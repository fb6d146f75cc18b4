//! Readers of a dataset: `elmo inspect`, `elmo verify` and `elmo sql`.

use std::{process::Command, sync::Arc, time::Instant};

use arrow::{
    array::{ArrayRef, Int64Array, RecordBatch, StringArray},
    datatypes::{DataType, Field, Schema},
};
use datafusion::prelude::SessionContext;
use elmo::{ColumnEmbedder, Elmo, EmbedSpec, EmbedderSettings, ModelData, engine::DeviceChoice};
use elmo_pipelines::{
    output::{
        inspect::{InspectReport, inspect},
        verify::{Verify, verify},
    },
    stores::{Location, Stores},
    stream::{
        TopicPartition,
        chain::{ChainError, ChainProblem, Dataset, FileFormat, OpenFile, Published, Rejected},
    },
};

use super::{format, identity};

/// A dataset in a local folder, written with the built-in model: two topics, and of each message its text.
struct Written {
    folder: tempfile::TempDir,
    elmo: Elmo,
}

fn tiny() -> Elmo {
    let settings = EmbedderSettings { devices: vec![DeviceChoice::Cpu], ..EmbedderSettings::default() };
    Elmo::from_data(ModelData::tiny(), &settings).unwrap()
}

fn schema(columns: &ColumnEmbedder, with_text: bool) -> Arc<Schema> {
    let mut fields = vec![Field::new("_offset", DataType::Int64, false)];
    fields.extend(with_text.then(|| Field::new("text", DataType::Utf8, true)));
    fields.extend(columns.fields());
    Arc::new(Schema::new(fields))
}

impl Written {
    async fn new(with_text: bool) -> Self {
        let written = Self { folder: tempfile::tempdir().unwrap(), elmo: tiny() };
        let output = written.output();
        let process = Dataset::open(&output, &identity("tiny"), 1).await.unwrap();
        let columns = ColumnEmbedder::new(&written.elmo, EmbedSpec::default()).unwrap();
        let schema = schema(&columns, with_text);
        let format = FileFormat { schema: Arc::clone(&schema), footer: columns.metadata(), ..format() };
        for (topic, partition) in [("reviews", 0), ("reviews", 11), ("mails", 0)] {
            let partition = TopicPartition::new(topic, partition);
            let mut chain = process.chain(&partition, || async { Ok::<_, ChainError>(100) }, None).await.unwrap();
            for start in [100, 102, 104] {
                let mut file = OpenFile::new(chain.id(), start, &format).unwrap();
                // The second message of the last file could not be decoded.
                let second = (start < 104).then(|| format!("Message {start}. It rained."));
                let texts: ArrayRef = Arc::new(StringArray::from(vec![Some("We stayed in.".to_owned()), second]));
                let rows = embedded(&columns, &schema, start, &texts).await;
                file.write(&rows, start + 2, &Rejected::new(), Instant::now()).await.unwrap();
                let file = file.finish(start + 2).await.unwrap();
                assert!(matches!(chain.publish(&file).await.unwrap(), Published::Ours { retries: 0, .. }));
            }
        }
        written
    }

    fn address(&self) -> String {
        self.folder.path().join("out").to_str().unwrap().to_owned()
    }

    fn output(&self) -> Location {
        Stores::with_settings([]).locate(&self.address()).unwrap()
    }

    fn path(&self, file: &str) -> std::path::PathBuf {
        self.folder.path().join("out").join(file)
    }

    async fn inspect(&self) -> InspectReport {
        inspect(&self.address(), &Stores::with_settings([])).await.unwrap()
    }

    fn sql(&self, statement: &str) -> String {
        let mut command = Command::new(env!("CARGO_BIN_EXE_elmo"));
        let output =
            command.args(["sql", "-q", "--format", "csv", "-c", statement]).current_dir(self.folder.path()).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

/// Rows with the columns of the embedder. A text that is NULL has the error of a message that could not be decoded.
async fn embedded(columns: &ColumnEmbedder, schema: &Arc<Schema>, start: i64, texts: &ArrayRef) -> RecordBatch {
    let found = columns.submit_async(texts).await.unwrap().await.unwrap();
    let error: StringArray = (0..texts.len()).map(|row| texts.is_null(row).then_some("not JSON")).collect();
    let mut arrays: Vec<ArrayRef> = vec![Arc::new(Int64Array::from_iter_values((start..).take(texts.len())))];
    arrays.extend(schema.index_of("text").is_ok().then(|| Arc::clone(texts)));
    arrays.extend([found.vectors, Arc::new(found.truncated) as ArrayRef, Arc::new(error) as ArrayRef]);
    RecordBatch::try_new(Arc::clone(schema), arrays).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn inspect_walks_a_dataset() {
    let written = Written::new(true).await;
    let report = written.inspect().await;
    assert!(report.error().is_none(), "{report}");
    assert_eq!((report.files, report.rows, report.errors), (9, 18, 3));
    let chain = report.chain.as_ref().unwrap();
    let found: Vec<_> =
        chain.partitions.iter().map(|p| (p.topic.as_str(), p.partition, p.start, p.end, p.rows)).collect();
    assert_eq!(found, [("mails", 0, 100, 106, 6), ("reviews", 0, 100, 106, 6), ("reviews", 11, 100, 106, 6)]);
    assert!(report.to_string().contains("offsets 100 to 106 in 3 objects, 6 rows"), "{report}");

    // One partition of it, and one object.
    for (part, files) in
        [("topic=reviews/partition=11", 3), ("topic=mails/partition=0/00000000000000000102.parquet", 1)]
    {
        let report = inspect(written.path(part).to_str().unwrap(), &Stores::with_settings([])).await.unwrap();
        assert_eq!((report.files, report.chain.as_ref().unwrap().partitions.len()), (files, 1));
        assert!(report.error().is_none(), "{report}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn inspect_reports_what_is_wrong_with_a_dataset() {
    let written = Written::new(true).await;
    let mails = TopicPartition::new("mails", 0);
    let object = |start: i64| written.path(&format!("topic=mails/partition=0/{start:020}.parquet"));
    let kept = std::fs::read(object(102)).unwrap();

    std::fs::remove_file(object(102)).unwrap();
    let hole = ChainProblem::Hole { partition: mails.clone(), start: 102, end: 104 };
    let report = written.inspect().await;
    assert_eq!(report.chain.as_ref().unwrap().problems, [hole]);
    let message = report.error().unwrap().to_string();
    assert_eq!(message, "the objects do not tile the offsets of the topic: mails[0]: no object has offsets 102 to 104");
    std::fs::write(object(102), &kept).unwrap();

    std::fs::write(written.path("topic=mails/stray.parquet"), &kept).unwrap();
    let unnamed = ChainProblem::Unnamed { file: "topic=mails/stray.parquet".into() };
    assert_eq!(written.inspect().await.chain.unwrap().problems, [unnamed]);
    std::fs::remove_file(written.path("topic=mails/stray.parquet")).unwrap();

    // The first object and the last one: their ends are in the chain's own files.
    for (gone, start, end) in [(100, 100, 102), (104, 104, 106)] {
        let kept = std::fs::read(object(gone)).unwrap();
        std::fs::remove_file(object(gone)).unwrap();
        let hole = ChainProblem::Hole { partition: mails.clone(), start, end };
        assert_eq!(written.inspect().await.chain.unwrap().problems, [hole]);
        std::fs::write(object(gone), &kept).unwrap();
    }

    // An object under another name overlaps the others, whatever its name is.
    std::fs::write(object(106), &kept).unwrap();
    let overlap = ChainProblem::Overlap { partition: mails.clone(), start: 102, end: 104 };
    assert_eq!(written.inspect().await.chain.unwrap().problems, [overlap]);
    std::fs::remove_file(object(106)).unwrap();

    std::fs::remove_file(written.path("_elmo/chain/mails/0/genesis.json")).unwrap();
    let report = written.inspect().await;
    assert_eq!(report.chain.unwrap().problems, [ChainProblem::NoGenesis { partition: mails }]);
}

#[tokio::test(flavor = "multi_thread")]
async fn inspect_reads_the_offsets_of_the_rows() {
    let written = Written::new(true).await;
    let process = Dataset::open(&written.output(), &identity("tiny"), 1).await.unwrap();
    let partition = TopicPartition::new("mails", 0);
    let mut chain = process.chain(&partition, || async { Ok::<_, ChainError>(0) }, None).await.unwrap();
    let columns = ColumnEmbedder::new(&written.elmo, EmbedSpec::default()).unwrap();
    let schema = schema(&columns, true);
    let format = FileFormat { schema: Arc::clone(&schema), footer: columns.metadata(), ..format() };
    let mut file = OpenFile::new(chain.id(), 106, &format).unwrap();
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["a"]));
    for offset in [107, 107] {
        let rows = embedded(&columns, &schema, offset, &texts).await;
        file.write(&rows, 108, &Rejected::new(), Instant::now()).await.unwrap();
    }
    let file = file.finish(108).await.unwrap();
    assert!(matches!(chain.publish(&file).await.unwrap(), Published::Ours { .. }));
    let problems = written.inspect().await.chain.unwrap().problems;
    assert!(matches!(&problems[..], [ChainProblem::Offsets { offset: 107, .. }]), "{problems:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn verify_recomputes_the_rows_of_a_dataset() {
    let written = Written::new(true).await;
    let job = |output: &str| Verify { output: output.to_owned(), sample: 100, seed: 0, column: None, mix: None };
    let stores = Stores::with_settings([]);
    let report = verify(&job(&written.address()), &written.elmo, &stores).await.unwrap();
    assert!(report.error(0.0).is_none(), "{report}");
    // The messages that could not be decoded have no text.
    assert_eq!((report.rows, report.bit_equal_rows, report.not_recomputed, report.vectors), (18, 15, 3, 15));
    assert_eq!(report.chain.unwrap().partitions.len(), 3);
    std::fs::remove_file(written.path("topic=mails/partition=0/00000000000000000102.parquet")).unwrap();
    let report = verify(&job(&written.address()), &written.elmo, &stores).await.unwrap();
    assert!(report.error(0.0).unwrap().to_string().contains("mails[0]: no object has offsets 102 to 104"));

    let without = Written::new(false).await;
    let refused = verify(&job(&without.address()), &without.elmo, &stores).await.unwrap_err();
    let expected = "the output has no column \"text\", and a stream does not read its messages again: elmo inspect \
                    checks everything but the numbers";
    assert_eq!(refused.to_string(), expected);
}

/// The folders are columns, and the chain's own files are not rows.
#[tokio::test(flavor = "multi_thread")]
async fn sql_reads_a_dataset_as_a_table() {
    let written = Written::new(true).await;
    let counts = written.sql(
        "SELECT topic, partition, count(*) AS rows, min(_offset) AS first, max(_offset) AS last FROM 'out' \
         GROUP BY topic, partition ORDER BY topic, partition",
    );
    assert_eq!(
        counts,
        "topic,partition,rows,first,last\nmails,0,6,100,105\nreviews,0,6,100,105\nreviews,11,6,100,105\n"
    );
    let types = written.sql("SELECT arrow_typeof(topic) AS t, arrow_typeof(partition) AS p FROM 'out' LIMIT 1");
    assert_eq!(types, "t,p\nUtf8,Int64\n");
    // One partition alone has the same columns.
    let one = written.sql("SELECT DISTINCT topic, partition FROM 'out/topic=reviews/partition=11'");
    assert_eq!(one, "topic,partition\nreviews,11\n");
}

/// As any program with DataFusion reads it, without the tables of elmo.
#[tokio::test(flavor = "multi_thread")]
async fn plain_datafusion_reads_a_dataset() {
    let written = Written::new(true).await;
    let session = SessionContext::new();
    let table = format!(
        "CREATE EXTERNAL TABLE messages STORED AS PARQUET PARTITIONED BY (topic, partition) \
         LOCATION '{}/'",
        written.address()
    );
    session.sql(&table).await.unwrap();
    let rows = session.sql(
        "SELECT topic, partition, count(*) AS rows, count(embedding) AS vectors, min(_offset) AS first, \
         max(_offset) AS last FROM messages GROUP BY topic, partition ORDER BY topic, partition",
    );
    let shown = rows.await.unwrap().to_string().await.unwrap();
    let cells =
        |line: &str| line.split('|').map(str::trim).filter(|cell| !cell.is_empty()).collect::<Vec<_>>().join(" ");
    let found: Vec<String> = shown.lines().map(cells).filter(|line| !line.starts_with('+')).collect();
    let expected = [
        "topic partition rows vectors first last",
        "mails 0 6 5 100 105",
        "reviews 0 6 5 100 105",
        "reviews 11 6 5 100 105",
    ];
    assert_eq!(found, expected, "{shown}");
}

/// A generation is a dataset of its own for those who read its folder; whoever reads the whole output sees its number.
#[tokio::test(flavor = "multi_thread")]
async fn a_generation_is_a_dataset_of_its_own() {
    let written = Written::new(true).await;
    let process = Dataset::open(&written.output(), &identity("another model"), 2).await.unwrap();
    let partition = TopicPartition::new("mails", 0);
    let mut chain = process.chain(&partition, || async { Ok::<_, ChainError>(0) }, None).await.unwrap();
    let columns = ColumnEmbedder::new(&written.elmo, EmbedSpec::default()).unwrap();
    let schema = schema(&columns, true);
    let format = FileFormat { schema: Arc::clone(&schema), footer: columns.metadata(), ..format() };
    let mut file = OpenFile::new(chain.id(), 0, &format).unwrap();
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["a"]));
    file.write(&embedded(&columns, &schema, 0, &texts).await, 1, &Rejected::new(), Instant::now()).await.unwrap();
    let file = file.finish(1).await.unwrap();
    assert!(matches!(chain.publish(&file).await.unwrap(), Published::Ours { .. }));

    let first = written.inspect().await;
    assert_eq!((first.rows, first.chain.as_ref().unwrap().problems.len()), (18, 0));
    let second = inspect(&format!("{}/generation=2", written.address()), &Stores::with_settings([])).await.unwrap();
    assert_eq!((second.rows, second.chain.as_ref().unwrap().problems.len()), (1, 0));
    let both = "SELECT generation, count(*) AS rows FROM 'out' GROUP BY generation ORDER BY generation";
    assert_eq!(written.sql(both), "generation,rows\n2,1\n,18\n");
    assert_eq!(written.sql("SELECT topic, partition FROM 'out/generation=2'").lines().nth(1), Some("mails,0"));
}
