//! Rows into the bytes of one Parquet file. Knows neither stores nor threads.

use std::io::Write;

use arrow::{array::RecordBatch, datatypes::SchemaRef};
use parquet::{
    arrow::{
        ArrowWriter,
        arrow_writer::{ArrowRowGroupWriterFactory, ArrowWriterOptions},
    },
    errors::ParquetError,
    file::writer::SerializedFileWriter,
};

use super::{
    Encoding, encoding,
    row_group::RowGroup,
    units::{Unit, Units},
};

/// Begins a file; its row groups are made by the factory.
///
/// # Errors
/// When Parquet has no type for a column.
pub(super) fn begin<W: Write + Send>(
    out: W,
    schema: &SchemaRef,
    encoding: &Encoding,
) -> Result<(SerializedFileWriter<W>, ArrowRowGroupWriterFactory), ParquetError> {
    let properties = encoding.properties(schema)?;
    // The schema is appended to the footer together with the caller's pairs.
    let options = ArrowWriterOptions::new().with_properties(properties).with_skip_arrow_metadata(true);
    ArrowWriter::try_new_with_options(out, SchemaRef::clone(schema), options)?.into_serialized_writer()
}

/// Encodes the rows of one file. Its bytes depend on the rows alone, not on the batches in which they arrive.
pub(crate) struct Encoder<W: Write + Send> {
    schema: SchemaRef,
    writer: SerializedFileWriter<W>,
    factory: ArrowRowGroupWriterFactory,
    /// The current row group, if it has rows.
    group: Option<RowGroup>,
    units: Units,
    row_group_bytes: u64,
}

impl<W: Write + Send> Encoder<W> {
    /// Begins a file.
    ///
    /// # Errors
    /// When Parquet has no type for a column.
    pub(crate) fn new(out: W, schema: &SchemaRef, encoding: &Encoding) -> Result<Self, ParquetError> {
        let (writer, factory) = begin(out, schema, encoding)?;
        let (schema, row_group_bytes) = (SchemaRef::clone(schema), encoding.row_group_bytes);
        Ok(Self { schema, writer, factory, group: None, units: Units::default(), row_group_bytes })
    }

    /// Adds rows; returns the units that are full, which the caller passes to [`encode`](Self::encode) in this order.
    pub(crate) fn push(&mut self, batch: &RecordBatch) -> Vec<Unit> {
        self.units.push(batch)
    }

    /// Encodes a unit.
    ///
    /// # Errors
    /// When its rows do not match the schema, or the writer below fails.
    pub(crate) fn encode(&mut self, unit: &Unit) -> Result<(), ParquetError> {
        let group = match &mut self.group {
            Some(group) => group,
            none => {
                let index = self.writer.flushed_row_groups().len();
                none.insert(RowGroup::new(&self.writer, &self.factory, &self.schema, index)?)
            }
        };
        group.write(unit)?;
        if group.bytes >= self.row_group_bytes { self.end_group() } else { Ok(()) }
    }

    fn end_group(&mut self) -> Result<(), ParquetError> {
        self.group.take().map_or(Ok(()), |group| group.close()?.append(&mut self.writer))
    }

    /// Encodes the rest and writes the footer with these key-value pairs.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub(crate) fn finish(&mut self, footer: &[(String, String)]) -> Result<(), ParquetError> {
        if let Some(unit) = self.units.close() {
            self.encode(&unit)?;
        }
        self.end_group()?;
        for pair in encoding::footer(footer, &self.schema) {
            self.writer.append_key_value_metadata(pair);
        }
        self.writer.finish().map(drop)
    }

    /// Size of the file if it ended here: bytes that are encoded, those that the current row group is expected to have,
    /// and the rows of the open unit as they are.
    pub(crate) fn bytes(&self) -> u64 {
        let group = self.group.as_ref().map_or(0, RowGroup::encoded_bytes);
        (self.writer.bytes_written() + group) as u64 + self.units.bytes()
    }

    /// Bytes of encoded rows that stay allocated, because the open unit holds a slice of their batch.
    pub(crate) fn kept(&self) -> u64 {
        self.units.kept()
    }

    /// The writer below.
    pub(crate) fn out(&self) -> &W {
        self.writer.inner()
    }

    /// The writer below, whose bytes may be taken; after [`finish`](Self::finish) it has all of them.
    pub(crate) fn out_mut(&mut self) -> &mut W {
        self.writer.inner_mut()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::{
        array::{ArrayRef, FixedSizeListArray, Float32Array, Int64Array, StringArray},
        buffer::NullBuffer,
        datatypes::{DataType, Field},
    };
    use proptest::prelude::*;

    use super::*;
    use crate::sink::Codec;

    /// Rows whose vectors are NULL where `nulls`, which are runs of valid and of NULL rows in turn and begin anew at their
    /// end, say so.
    fn rows(count: usize, width: i32, nulls: &[usize]) -> RecordBatch {
        let runs = nulls.iter().cycle().enumerate().flat_map(|(run, rows)| std::iter::repeat_n(run % 2 == 0, *rows));
        let valid = NullBuffer::from(runs.take(count).collect::<Vec<bool>>());
        let numbers = (0..count * usize::try_from(width).unwrap()).map(|i| (i as f32 * 0.37).sin());
        let item = Arc::new(Field::new("item", DataType::Float32, false));
        let numbers = Arc::new(Float32Array::from_iter_values(numbers));
        let vectors = FixedSizeListArray::new(item, width, numbers, Some(valid));
        RecordBatch::try_from_iter_with_nullable([
            ("id", Arc::new(Int64Array::from_iter(0..count as i64)) as ArrayRef, false),
            ("text", Arc::new(StringArray::from_iter_values((0..count).map(|i| format!("text {}", i % 700)))), true),
            ("vector", Arc::new(vectors), true),
        ])
        .unwrap()
    }

    fn encoding() -> Encoding {
        Encoding { vectors: "vector".into(), codec: Codec::Lz4, row_group_bytes: 6 << 20 }
    }

    /// The file when the rows arrive in batches of these sizes, over and over.
    fn encoded(rows: &RecordBatch, arrivals: &[usize]) -> Vec<u8> {
        let mut encoder = Encoder::new(Vec::new(), &rows.schema(), &encoding()).unwrap();
        let mut start = 0;
        for size in arrivals.iter().cycle() {
            let count = (*size).min(rows.num_rows() - start);
            encoder.push(&rows.slice(start, count)).iter().for_each(|unit| encoder.encode(unit).unwrap());
            start += count;
            if start == rows.num_rows() {
                break;
            }
        }
        encoder.finish(&[]).unwrap();
        std::mem::take(encoder.out_mut())
    }

    /// The file of Arrow's writer, to which each unit comes as one batch.
    fn by_arrow(rows: &RecordBatch) -> Vec<u8> {
        let properties = encoding().properties(&rows.schema()).unwrap();
        let mut writer = ArrowWriter::try_new(Vec::new(), rows.schema(), Some(properties)).unwrap();
        let (mut units, mut group) = (Units::default(), 0);
        let full = units.push(rows);
        for unit in full.into_iter().chain(units.close()) {
            let [batch] = unit.rows.as_slice() else { panic!("the rows arrived at once") };
            writer.write(batch).unwrap();
            group += unit.bytes;
            if group >= encoding().row_group_bytes {
                group = 0;
                writer.flush().unwrap();
            }
        }
        writer.into_inner().unwrap()
    }

    /// Rows, numbers of a vector, and runs of NULLs; with up to 3 MB of numbers, which fill some pages, or with more rows
    /// than a page may have.
    fn shapes() -> impl Strategy<Value = (usize, i32, Vec<usize>)> {
        let shape = prop_oneof![
            (1_usize..700, 1020_i32..1030),
            (1_usize..2500, 250_i32..310),
            (1_usize..10_000, 2_i32..70),
            (20_000_usize..60_000, 0_i32..4),
        ];
        let run = || prop_oneof![1_usize..4, 1_usize..300, 1000_usize..1100, 4000_usize..15_000];
        let runs = prop_oneof![
            Just(vec![1, 0]),
            prop::collection::vec((run(), run()), 1..3)
                .prop_map(|runs| { runs.into_iter().flat_map(|(valid, null)| [valid, null]).collect::<Vec<_>>() })
        ];
        (shape, runs).prop_map(|((count, width), runs)| (count, width, runs))
    }

    fn arrivals() -> impl Strategy<Value = Vec<usize>> {
        prop::collection::vec(prop_oneof![1_usize..4, 1_usize..100, 500_usize..5000], 1..6)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn however_rows_arrive_the_file_is_that_of_arrow_s_writer(
            (count, width, runs) in shapes(), arrivals in arrivals(),
        ) {
            let rows = rows(count, width, &runs);
            let expected = by_arrow(&rows);
            prop_assert!(encoded(&rows, &[count]) == expected, "at once");
            prop_assert!(encoded(&rows, &arrivals) == expected, "in parts");
        }
    }

    /// A batch that is one unit goes to Arrow's writer as it is.
    #[test]
    fn one_batch_is_encoded_as_by_arrow_s_writer() {
        let rows = rows(1000, 1024, &[100, 3]);
        let properties = encoding().properties(&rows.schema()).unwrap();
        let mut writer = ArrowWriter::try_new(Vec::new(), rows.schema(), Some(properties)).unwrap();
        writer.write(&rows).unwrap();
        let expected = writer.into_inner().unwrap();
        assert!(encoded(&rows, &[1000]) == expected);
        assert!(encoded(&rows, &[7]) == expected);
    }

    /// Pages end after 20,000 rows, and Arrow's writer takes longer steps where it sees NULLs alone.
    #[test]
    fn long_runs_of_nulls() {
        for runs in [[0, 1], [18_000, 20_000], [1, 4095], [1030, 1023], [3, 50_000]] {
            let rows = rows(60_000, 2, &runs);
            let expected = by_arrow(&rows);
            assert!(encoded(&rows, &[60_000]) == expected, "{runs:?}");
            assert!(encoded(&rows, &[999]) == expected, "{runs:?}");
        }
    }

    /// Rotation goes by this size.
    #[test]
    fn the_size_while_rows_are_written_is_that_of_arrow_s_writer() {
        let rows = rows(4096, 200, &[50, 2]);
        let properties = encoding().properties(&rows.schema()).unwrap();
        let options = ArrowWriterOptions::new().with_properties(properties).with_skip_arrow_metadata(true);
        let mut arrow = ArrowWriter::try_new_with_options(Vec::new(), rows.schema(), options).unwrap();
        arrow.write(&rows).unwrap();
        let mut encoder = Encoder::new(Vec::new(), &rows.schema(), &encoding()).unwrap();
        for start in (0..4096).step_by(64) {
            encoder.push(&rows.slice(start, 64)).iter().for_each(|unit| encoder.encode(unit).unwrap());
        }
        assert_eq!(encoder.bytes(), (arrow.bytes_written() + arrow.in_progress_size()) as u64);
    }
}
