//! What a stream wrote, read as a stranger would: every Parquet file below a folder, by its name, its footer and its rows.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::Write,
    ops::Range,
    sync::Arc,
};

use arrow::{
    array::{Array, AsArray, RecordBatch, StringArray},
    compute::concat_batches,
    datatypes::{Int32Type, Int64Type},
    util::display::array_value_to_string,
};
use elmo_pipelines::stores::Stores;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

/// Footer pairs of an object.
const START: &str = "stream.start";
const END: &str = "stream.end";
const ROWS: &str = "stream.rows";
/// Offsets that retention took before they were read: `FIRST-NEXT,…`.
const GAPS: &str = "stream.gaps";

/// All objects below a folder, sorted by topic, partition and start offset.
pub(crate) struct Dataset {
    pub(crate) objects: Vec<Object>,
}

/// One object: offsets `start..end` of a partition.
pub(crate) struct Object {
    pub(crate) path: String,
    pub(crate) topic: String,
    pub(crate) partition: i32,
    pub(crate) offsets: Range<i64>,
    pub(crate) footer: BTreeMap<String, String>,
    pub(crate) rows: RecordBatch,
}

impl Dataset {
    /// Reads a folder: a path or a URL. Not from within a runtime.
    pub(crate) fn read(folder: &str) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(Self::from_stores(&Stores::from_env(), folder))
    }

    /// The ends of all partitions together, by their newest objects: the number of messages that are in the folder, if all
    /// partitions begin at offset 0.
    pub(crate) fn end(folder: &str) -> i64 {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let root = Stores::from_env().locate(folder).unwrap();
            let found = root.below(&root.path, 64, |name| name != "_elmo").await.unwrap();
            let paths = found.into_iter().map(|meta| meta.location);
            let mut paths: Vec<_> = paths.filter(|path| path.extension() == Some("parquet")).collect();
            paths.sort();
            // Names are as long as each other, so the last one is the newest.
            let newest: BTreeMap<_, _> =
                paths.into_iter().map(|path| (folder_of(path.as_ref()).to_owned(), path)).collect();
            let mut sum = 0;
            for path in newest.into_values() {
                let bytes = root.at(path.clone()).get().await.unwrap().unwrap();
                sum += Object::parse(path.as_ref(), bytes).offsets.end;
            }
            sum
        })
    }

    pub(crate) async fn from_stores(stores: &Stores, folder: &str) -> Self {
        let root = stores.locate(folder).unwrap();
        let found = root.below(&root.path, 64, |name| name != "_elmo").await.unwrap();
        // Other generations lie in folders below the first one.
        let below = |path: &str| path[root.path.as_ref().len()..].to_owned();
        let inside = |path: &str| {
            let path = below(path);
            path.ends_with(".parquet") && !path.contains("/_elmo/") && !path.contains("/generation=")
        };
        let mut objects = Vec::new();
        for meta in found.into_iter().filter(|meta| inside(meta.location.as_ref())) {
            let bytes = root.at(meta.location.clone()).get().await.unwrap().unwrap();
            objects.push(Object::parse(meta.location.as_ref(), bytes));
        }
        objects.sort_by(|a, b| (&a.topic, a.partition, a.offsets.start).cmp(&(&b.topic, b.partition, b.offsets.start)));
        Self { objects }
    }

    /// The objects of every partition.
    pub(crate) fn chains(&self) -> BTreeMap<(&str, i32), Vec<&Object>> {
        let mut chains = BTreeMap::<_, Vec<_>>::new();
        for object in &self.objects {
            chains.entry((object.topic.as_str(), object.partition)).or_default().push(object);
        }
        chains
    }

    /// Checks each object by itself and that each begins where the one before it ends. Returns the offsets that each
    /// partition covers.
    pub(crate) fn check(&self) -> BTreeMap<(&str, i32), Range<i64>> {
        for object in &self.objects {
            object.check();
        }
        let covered = |objects: &Vec<&Object>| {
            for pair in objects.windows(2) {
                assert_eq!(pair[0].offsets.end, pair[1].offsets.start, "{} and {}", pair[0].path, pair[1].path);
            }
            objects[0].offsets.start..objects[objects.len() - 1].offsets.end
        };
        self.chains().iter().map(|(partition, objects)| (*partition, covered(objects))).collect()
    }

    /// Checks that the rows are exactly those with the given offsets, each once and in order, but for declared gaps.
    pub(crate) fn check_offsets(&self, topic: &str, expected: impl IntoIterator<Item = (i32, i64)>) {
        self.check();
        let mut wanted: Vec<_> = expected.into_iter().filter(|(p, offset)| !self.is_gap(topic, *p, *offset)).collect();
        wanted.sort_unstable();
        let mine = self.objects.iter().filter(|object| object.topic == topic);
        let found: Vec<_> =
            mine.flat_map(|o| o.row_offsets().into_iter().map(|offset| (o.partition, offset))).collect();
        let differs = wanted.iter().zip(&found).find(|(a, b)| a != b);
        assert!(found == wanted, "{} rows, not {}; first difference: {differs:?}", found.len(), wanted.len());
    }

    /// Number of rows.
    pub(crate) fn table_rows(&self) -> usize {
        self.objects.iter().map(|object| object.rows.num_rows()).sum()
    }

    /// Checks that the rows are exactly those with the given offsets, where other messages were left out.
    pub(crate) fn check_rows(&self, topic: &str, wanted: &[(i32, i64)]) {
        self.check();
        let mine = self.objects.iter().filter(|object| object.topic == topic);
        let found: Vec<_> =
            mine.flat_map(|o| o.row_offsets().into_iter().map(|offset| (o.partition, offset))).collect();
        assert_eq!(found, wanted);
    }

    fn is_gap(&self, topic: &str, partition: i32, offset: i64) -> bool {
        let mine = self.objects.iter().filter(|object| (object.topic.as_str(), object.partition) == (topic, partition));
        mine.flat_map(Object::gaps).any(|gap| gap.contains(&offset))
    }

    /// All rows in order of topic, partition and offset, whatever files they are in.
    pub(crate) fn table(&self) -> RecordBatch {
        let schema = self.objects.first().expect("no object").rows.schema();
        concat_batches(&schema, self.objects.iter().map(|object| &object.rows)).unwrap()
    }

    /// Checks that another dataset has the same rows, to the bit: that of a run which nothing disturbed.
    pub(crate) fn assert_same_rows(&self, undisturbed: &Self) {
        let (ours, theirs) = (self.table(), undisturbed.table());
        assert_eq!(ours.schema().fields(), theirs.schema().fields());
        assert_eq!(ours.num_rows(), theirs.num_rows());
        if ours == theirs {
            return;
        }
        for (field, (a, b)) in ours.schema().fields().iter().zip(ours.columns().iter().zip(theirs.columns())) {
            if let Some(row) = (0..a.len()).find(|row| a.slice(*row, 1) != b.slice(*row, 1)) {
                let show = |column| array_value_to_string(column, row).unwrap();
                panic!("row {row}, column {}: {} instead of {}", field.name(), show(a), show(b));
            }
        }
    }

    /// The values of a string column, in order.
    pub(crate) fn strings(&self, column: &str) -> Vec<Option<String>> {
        let table = self.table();
        let column = arrow::compute::cast(table.column_by_name(column).unwrap(), &arrow::datatypes::DataType::Utf8);
        let column = column.unwrap();
        let column: &StringArray = column.as_string();
        column.iter().map(|value| value.map(str::to_owned)).collect()
    }

    /// One line per object, for a failure's message.
    pub(crate) fn describe(&self) -> String {
        let mut out = String::new();
        for object in &self.objects {
            writeln!(out, "{} to {}: {} rows", object.path, object.offsets.end, object.rows.num_rows()).unwrap();
        }
        out
    }
}

impl Object {
    fn parse(path: &str, bytes: bytes::Bytes) -> Self {
        let reader = ParquetRecordBatchReaderBuilder::try_new(bytes).unwrap_or_else(|e| panic!("{path}: {e}"));
        let pairs = reader.metadata().file_metadata().key_value_metadata().cloned().unwrap_or_default();
        let footer: BTreeMap<_, _> = pairs.into_iter().filter_map(|pair| Some((pair.key, pair.value?))).collect();
        // The reader's own schema has the footer pairs; those of its batches have not.
        let schema = Arc::new(reader.schema().as_ref().clone().with_metadata(HashMap::new()));
        let rows: Vec<_> = reader.build().unwrap().map(|rows| rows.unwrap_or_else(|e| panic!("{path}: {e}"))).collect();
        let number = |key: &str| -> i64 {
            let value = footer.get(key).unwrap_or_else(|| panic!("{path} has no {key}: {footer:?}"));
            value.parse().unwrap_or_else(|e| panic!("{path}, {key}: {e}"))
        };
        Self {
            path: path.to_owned(),
            topic: folder(path, "topic="),
            partition: folder(path, "partition=").parse().unwrap(),
            offsets: number(START)..number(END),
            rows: concat_batches(&schema, &rows).unwrap(),
            footer,
        }
    }

    /// Offsets of its rows.
    pub(crate) fn row_offsets(&self) -> Vec<i64> {
        let column = self.rows.column_by_name("_offset").expect("no column _offset");
        column.as_primitive::<Int64Type>().values().to_vec()
    }

    fn gaps(&self) -> Vec<Range<i64>> {
        let gaps = self.footer.get(GAPS).map(String::as_str).unwrap_or_default();
        let gap = |gap: &str| {
            let (first, next) = gap.split_once('-').unwrap();
            first.parse().unwrap()..next.parse().unwrap()
        };
        gaps.split(',').filter(|gap| !gap.is_empty()).map(gap).collect()
    }

    /// The name and the columns agree with the footer, offsets go up inside of the range.
    fn check(&self) {
        let Self { path, offsets, footer, .. } = self;
        let name = format!("/{:020}.parquet", offsets.start);
        assert!(path.ends_with(&name), "{path} begins at {}", offsets.start);
        assert!(offsets.start < offsets.end, "{path} covers {offsets:?}");
        assert_eq!(footer.get("stream.topic"), Some(&self.topic), "{path}");
        assert_eq!(footer.get("stream.partition"), Some(&self.partition.to_string()), "{path}");
        assert_eq!(footer.get(ROWS), Some(&self.rows.num_rows().to_string()), "{path}");
        let rows = self.row_offsets();
        assert!(rows.iter().all(|offset| offsets.contains(offset)), "{path}: {rows:?} outside of {offsets:?}");
        assert!(rows.windows(2).all(|pair| pair[0] < pair[1]), "{path}: {rows:?} out of order");
        for gap in self.gaps() {
            assert!(offsets.start <= gap.start && gap.end <= offsets.end, "{path}: {gap:?} outside of {offsets:?}");
            assert!(!rows.iter().any(|offset| gap.contains(offset)), "{path}: a row in {gap:?}");
        }
        if let Some(partitions) = self.rows.column_by_name("_partition") {
            let partitions = partitions.as_primitive::<Int32Type>();
            assert!(partitions.values().iter().all(|p| *p == self.partition), "{path}: rows of other partitions");
        }
    }
}

fn folder_of(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// The value of a folder `key=value` in a path.
fn folder(path: &str, key: &str) -> String {
    let value = path.split('/').find_map(|part| part.strip_prefix(key));
    value.unwrap_or_else(|| panic!("{path} has no folder {key}")).to_owned()
}

#[cfg(test)]
mod tests {
    use arrow::{
        array::{Int32Array, Int64Array},
        datatypes::{DataType, Field, Schema},
    };
    use parquet::{arrow::ArrowWriter, file::metadata::KeyValue};

    use super::*;

    /// Writes an object of partition 3 of topic `t`.
    fn write(root: &std::path::Path, name: i64, offsets: Range<i64>, rows: &[i64], pairs: &[(&str, &str)]) {
        let folder = root.join("topic=t/partition=3");
        std::fs::create_dir_all(&folder).unwrap();
        let fields = [("_partition", DataType::Int32), ("_offset", DataType::Int64), ("text", DataType::Utf8)];
        let schema = Arc::new(Schema::new(fields.map(|(name, kind)| Field::new(name, kind, false)).to_vec()));
        let texts = StringArray::from_iter_values(rows.iter().map(|offset| format!("text {offset}")));
        let partitions = Int32Array::from_value(3, rows.len());
        let columns =
            vec![Arc::new(partitions) as _, Arc::new(Int64Array::from(rows.to_vec())) as _, Arc::new(texts) as _];
        let batch = RecordBatch::try_new(Arc::clone(&schema), columns).unwrap();
        let file = std::fs::File::create(folder.join(format!("{name:020}.parquet"))).unwrap();
        let mut writer = ArrowWriter::try_new(file, schema, None).unwrap();
        writer.write(&batch).unwrap();
        let count = rows.len().to_string();
        let (start, end) = (offsets.start.to_string(), offsets.end.to_string());
        let own = [("stream.topic", "t"), ("stream.partition", "3"), (START, &start), (END, &end), (ROWS, &count)];
        for (key, value) in own.iter().chain(pairs) {
            writer.append_key_value_metadata(KeyValue::new((*key).to_owned(), (*value).to_owned()));
        }
        writer.close().unwrap();
    }

    fn read(root: &tempfile::TempDir) -> Dataset {
        Dataset::read(root.path().to_str().unwrap())
    }

    fn offsets(range: impl IntoIterator<Item = i64>) -> Vec<(i32, i64)> {
        range.into_iter().map(|offset| (3, offset)).collect()
    }

    /// What the checks say of one more object after `0..3`.
    fn verdict(
        name: i64,
        covered: Range<i64>,
        rows: &[i64],
        pairs: &[(&str, &str)],
        expected: Vec<(i32, i64)>,
    ) -> bool {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), 0, 0..3, &[0, 1, 2], &[]);
        write(root.path(), name, covered, rows, pairs);
        std::panic::catch_unwind(|| read(&root).check_offsets("t", expected)).is_ok()
    }

    #[test]
    fn a_dataset_is_checked() {
        let all = || offsets(0..6);
        assert!(verdict(3, 3..6, &[3, 4, 5], &[], all()));
        assert!(verdict(3, 3..9, &[3, 4, 5], &[], all()), "compaction left offsets out");
        assert!(!verdict(3, 3..6, &[3, 5], &[], all()), "a row is lost");
        assert!(!verdict(3, 3..6, &[3, 4, 4, 5], &[], all()), "a row is doubled");
        assert!(!verdict(3, 3..6, &[3, 5, 4], &[], all()), "out of order");
        assert!(!verdict(3, 3..6, &[2, 3, 4, 5], &[], all()), "outside of the range");
        assert!(!verdict(2, 2..6, &[3, 4, 5], &[], all()), "the ranges overlap");
        assert!(!verdict(4, 4..6, &[4, 5], &[], all()), "a hole between the ranges");
        assert!(!verdict(4, 3..6, &[3, 4, 5], &[], all()), "another name");
        assert!(!verdict(3, 3..6, &[3, 4, 5], &[(ROWS, "2")], all()), "another count");
        assert!(verdict(3, 3..6, &[5], &[(GAPS, "3-5")], all()), "a declared gap");
        assert!(!verdict(3, 3..6, &[4, 5], &[(GAPS, "3-5")], all()), "a row in a gap");
    }

    #[test]
    fn two_runs_are_compared_by_rows() {
        let (one, two, other) =
            (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write(one.path(), 0, 0..4, &[0, 1, 2, 3], &[]);
        write(two.path(), 0, 0..1, &[0], &[("stream.writer", "b")]);
        write(two.path(), 1, 1..4, &[1, 2, 3], &[]);
        write(other.path(), 0, 0..4, &[0, 1, 2, 4], &[]);
        read(&one).assert_same_rows(&read(&two));
        assert!(std::panic::catch_unwind(|| read(&one).assert_same_rows(&read(&other))).is_err());
        assert_eq!(read(&two).strings("text")[3].as_deref(), Some("text 3"));
        assert_eq!(read(&two).check().into_values().next(), Some(0..4));
    }
}
