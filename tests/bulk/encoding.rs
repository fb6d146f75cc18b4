//! How the files are encoded, read from their footers.

use std::sync::Arc;

use arrow::{
    array::{
        ArrayRef, AsArray, Date64Array, ListArray, RecordBatch, StringArray, Time32SecondArray, TimestampSecondArray,
    },
    datatypes::{DataType, Field, TimestampMillisecondType},
    ipc::writer::FileWriter,
};
use elmo::{EmbedSpec, spec::Level};
use elmo_pipelines::{bulk::BulkJob, sink::Codec, source::Keep, stores::Stores};
use parquet::{
    basic::{Compression, Encoding, LogicalType, TimeUnit as ParquetUnit},
    file::{
        metadata::{PageIndexPolicy, ParquetMetaData, ParquetMetaDataReader},
        page_index::column_index::ColumnIndexMetaData,
    },
};

use crate::common::{Place, part, run, run_local, tiny};

/// The footer of the first part of an output.
fn metadata(place: &Place, output: &str) -> ParquetMetaData {
    let file = std::fs::File::open(part(&place.path(output), 0)).unwrap();
    ParquetMetaDataReader::new().with_page_index_policy(PageIndexPolicy::Required).parse_and_finish(&file).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn vectors_and_the_rest() {
    let place = Place::new();
    place.write("a.csv", "id,text\n".to_owned() + &(0..40).map(|i| format!("{i},row {i}\n")).collect::<String>());
    for level in [Level::Sentence, Level::Token] {
        let stage = tiny(EmbedSpec { level, ..EmbedSpec::default() });
        let job = BulkJob { rows_per_file: Some(100), ..place.job("a.csv", &level.to_string()) };
        run(&job, stage.as_ref(), &Stores::with_settings([])).await.unwrap();
        let metadata = metadata(&place, &level.to_string());
        let (mut vectors, mut others) = (0, 0);
        for (leaf, column) in metadata.row_group(0).columns().iter().enumerate() {
            assert!(matches!(column.compression(), Compression::ZSTD(_)), "{column:?}");
            let encodings: Vec<Encoding> = column.encodings().collect();
            let page_index = &metadata.column_index().unwrap()[0][leaf];
            if column.column_type() == parquet::basic::Type::FLOAT {
                vectors += 1;
                assert!(encodings.contains(&Encoding::BYTE_STREAM_SPLIT), "{encodings:?}");
                assert_eq!(column.dictionary_page_offset(), None);
                assert!(column.statistics().is_none());
                assert!(matches!(page_index, ColumnIndexMetaData::NONE));
            } else if !column.column_path().string().starts_with("error") {
                others += 1;
                assert!(column.statistics().is_some(), "{}", column.column_path());
                assert!(!matches!(page_index, ColumnIndexMetaData::NONE), "{}", column.column_path());
            }
        }
        assert_eq!((vectors, others), if level == Level::Sentence { (1, 3) } else { (1, 7) });
        let pairs = metadata.file_metadata().key_value_metadata().unwrap();
        let keys: Vec<&str> = pairs.iter().map(|pair| pair.key.as_str()).collect();
        // The metadata of every output.
        let said =
            "fingerprint options layers pooling tokenizer sentences state precision float version schema_version";
        for key in said.split(' ') {
            assert!(keys.contains(&format!("elmo.{key}").as_str()), "{key} is not among {keys:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn row_groups_end_by_bytes() {
    let place = Place::new();
    let wide = "x".repeat(100_000);
    place.write("a.txt", (0..300).map(|i| format!("{i} {wide}\n")).collect::<String>());
    let job = |output: &str, keep| BulkJob {
        rows_per_file: Some(1000),
        row_group_bytes: 8 << 20,
        window_rows: 33,
        codec: Codec::None,
        keep,
        ..place.job("a.txt", output)
    };
    run_local(&job("kept", Keep::All)).await.unwrap();
    let kept = metadata(&place, "kept");
    let rows: Vec<i64> = kept.row_groups().iter().map(|group| group.num_rows()).collect();
    // 30 MB of text in groups of 8 MiB, cut where 4 MiB are handed to the encoder: 42 rows at a time.
    assert_eq!(rows, [84, 84, 84, 48]);
    run_local(&job("left-out", Keep::None)).await.unwrap();
    assert_eq!(metadata(&place, "left-out").num_row_groups(), 1);
}

/// By the format's LogicalTypes.md, times have one of these; a bare integer would be a number to every other reader.
#[tokio::test(flavor = "multi_thread")]
async fn times_are_times_to_every_reader() {
    let place = Place::new();
    // 2024-02-29T12:00:00Z by `date -u -d @1709208000`.
    let seconds = TimestampSecondArray::from(vec![1_709_208_000]);
    let item = Arc::new(Field::new_list_field(DataType::Date64, true));
    let date = Date64Array::from(vec![1_709_208_000_000]);
    let list = ListArray::new(item, arrow::buffer::OffsetBuffer::from_lengths([1]), Arc::new(date.clone()), None);
    let columns: [(&str, ArrayRef); 6] = [
        ("text", Arc::new(StringArray::from(vec!["a"]))),
        ("plain", Arc::new(seconds.clone())),
        ("zoned", Arc::new(seconds.with_timezone("+02:00"))),
        ("time", Arc::new(Time32SecondArray::from(vec![43_200]))),
        ("date", Arc::new(date)),
        ("list", Arc::new(list)),
    ];
    let rows = RecordBatch::try_from_iter(columns).unwrap();
    let mut writer = FileWriter::try_new(Vec::new(), &rows.schema()).unwrap();
    writer.write(&rows).unwrap();
    place.write("a.arrow", writer.into_inner().unwrap());
    run_local(&place.job("a.arrow", "a")).await.unwrap();
    let millis = |is_utc| Some(LogicalType::timestamp(is_utc, ParquetUnit::MILLIS));
    let time = Some(LogicalType::time(false, ParquetUnit::MILLIS));
    let found = logical_types(&metadata(&place, "a"));
    assert_eq!(found[1..6], [millis(false), millis(true), time, millis(false), millis(false)]);
    for column in ["plain", "zoned", "date"] {
        let found = place.rows("a")[column].as_primitive::<TimestampMillisecondType>().value(0);
        assert_eq!(found, 1_709_208_000_000, "{column}");
    }
    place.write("b.csv", "text,plain,utc,day\na,2024-02-29 12:00:00,2024-02-29T12:00:00Z,2024-02-29\n");
    run_local(&place.job("b.csv", "b")).await.unwrap();
    let found = logical_types(&metadata(&place, "b"));
    assert_eq!(found[1..4], [millis(false), millis(true), Some(LogicalType::Date)]);
    for column in ["plain", "utc"] {
        let found = place.rows("b")[column].as_primitive::<TimestampMillisecondType>().value(0);
        assert_eq!(found, 1_709_208_000_000, "{column}");
    }
    let far: ArrayRef = Arc::new(TimestampSecondArray::from(vec![0, i64::MAX]));
    let text: ArrayRef = Arc::new(StringArray::from(vec!["a", "b"]));
    let rows = RecordBatch::try_from_iter([("text", text), ("far", far)]).unwrap();
    let mut writer = FileWriter::try_new(Vec::new(), &rows.schema()).unwrap();
    writer.write(&rows).unwrap();
    place.write("c.arrow", writer.into_inner().unwrap());
    let error = run_local(&place.job("c.arrow", "c")).await.unwrap_err().to_string();
    assert!(error.contains("c.arrow: after row 1: ") && error.contains("\"far\""), "{error}");
}

fn logical_types(metadata: &ParquetMetaData) -> Vec<Option<LogicalType>> {
    let columns = metadata.file_metadata().schema_descr().columns().iter();
    columns.map(|column| column.logical_type_ref().cloned()).collect()
}
