//! Options of sinks that `datafusion-proto` 55 does not serialise: key-value metadata of Parquet files and compression levels.
//! It also turns unset date formats of CSV files into empty ones.

use std::{
    collections::HashMap,
    sync::{Arc, LazyLock},
};

use arrow::{
    csv::WriterBuilder,
    datatypes::{Schema, SchemaRef},
};
use datafusion::{
    common::{
        Result, config::TableParquetOptions, file_options::csv_writer::CsvWriterOptions,
        file_options::json_writer::JsonWriterOptions, internal_err,
    },
    datasource::{
        file_format::{
            FileFormat,
            csv::CsvSink,
            json::JsonSink,
            parquet::{ParquetFormat, ParquetSink},
        },
        physical_plan::{FileSink, FileSinkConfig},
        sink::{DataSink, DataSinkExec},
    },
    execution::session_state::{SessionState, SessionStateBuilder},
    physical_expr::LexRequirement,
    physical_plan::ExecutionPlan,
};
use futures::FutureExt;
use serde::{Deserialize, Serialize};

type Plan = Arc<dyn ExecutionPlan>;

/// An argument of `create_writer_physical_plan`, which Parquet does not use.
static NO_SESSION: LazyLock<SessionState> = LazyLock::new(|| SessionStateBuilder::new().build());

/// Restored on a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SinkOptions {
    Parquet {
        metadata: HashMap<String, Option<String>>,
    },
    Csv {
        /// Of dates, times and timestamps.
        formats: [Option<String>; 5],
        null_value: Option<String>,
        compression_level: Option<u32>,
    },
    Json {
        compression_level: Option<u32>,
    },
}

impl SinkOptions {
    /// `None` if the operator is not a sink that can be serialised.
    pub(crate) fn of(plan: &Plan) -> Option<Self> {
        let sink = plan.downcast_ref::<DataSinkExec>()?.sink();
        if let Some(parquet) = sink.downcast_ref::<ParquetSink>() {
            return Some(Self::Parquet { metadata: parquet.parquet_options().key_value_metadata.clone() });
        }
        if let Some(csv) = sink.downcast_ref::<CsvSink>() {
            let CsvWriterOptions { writer_options: csv, compression_level, .. } = csv.writer_options();
            let formats = [
                csv.date_format(),
                csv.datetime_format(),
                csv.time_format(),
                csv.timestamp_format(),
                csv.timestamp_tz_format(),
            ];
            let null_value = Some(csv.null().to_owned()).filter(|null| !null.is_empty());
            let formats = formats.map(|format| format.map(str::to_owned));
            return Some(Self::Csv { formats, null_value, compression_level: *compression_level });
        }
        let json = sink.downcast_ref::<JsonSink>()?;
        Some(Self::Json { compression_level: json.writer_options().compression_level })
    }

    /// A sink that was decoded, with these options.
    ///
    /// # Errors
    /// If it has another format.
    pub(crate) fn restored(&self, plan: &Plan) -> Result<Plan> {
        let Some(sink) = plan.downcast_ref::<DataSinkExec>() else {
            return internal_err!("{} is not a sink", plan.name());
        };
        let (data, input) = (sink.sink(), Arc::clone(sink.input()));
        let restored: Arc<dyn DataSink> = match self {
            Self::Parquet { metadata } => {
                let Some(parquet) = data.downcast_ref::<ParquetSink>() else { return other_format() };
                let options =
                    TableParquetOptions { key_value_metadata: metadata.clone(), ..parquet.parquet_options().clone() };
                // Notes the order of the rows in the footer.
                let (format, config) = (ParquetFormat::default().with_options(options), parquet.config().clone());
                let planned =
                    format.create_writer_physical_plan(input, &*NO_SESSION, config, sink.sort_order().clone());
                return planned
                    .now_or_never()
                    .unwrap_or_else(|| internal_err!("a sink of Parquet files is not planned at once"));
            }
            Self::Csv { formats, null_value, compression_level } => {
                let Some(csv) = data.downcast_ref::<CsvSink>() else { return other_format() };
                let CsvWriterOptions { writer_options, compression, .. } = csv.writer_options();
                let writer_options = with_formats(writer_options, formats, null_value.as_ref());
                let (compression, compression_level) = (*compression, *compression_level);
                let options = CsvWriterOptions { writer_options, compression, compression_level };
                Arc::new(CsvSink::new(csv.config().clone(), options))
            }
            Self::Json { compression_level } => {
                let Some(json) = data.downcast_ref::<JsonSink>() else { return other_format() };
                let (compression, compression_level) = (json.writer_options().compression, *compression_level);
                let options = JsonWriterOptions { compression, compression_level };
                Arc::new(JsonSink::new(json.config().clone(), options))
            }
        };
        Ok(Arc::new(DataSinkExec::new(input, restored, sink.sort_order().clone())))
    }
}

fn other_format() -> Result<Plan> {
    internal_err!("a sink has another format than its options")
}

/// The options of a CSV file with these formats in place of their own.
fn with_formats(csv: &WriterBuilder, formats: &[Option<String>; 5], null: Option<&String>) -> WriterBuilder {
    let plain = WriterBuilder::new()
        .with_header(csv.header())
        .with_delimiter(csv.delimiter())
        .with_quote(csv.quote())
        .with_escape(csv.escape())
        .with_double_quote(csv.double_quote())
        .with_quote_style(csv.quote_style())
        .with_ignore_leading_whitespace(csv.ignore_leading_whitespace())
        .with_ignore_trailing_whitespace(csv.ignore_trailing_whitespace());
    let with: [fn(WriterBuilder, String) -> WriterBuilder; 5] = [
        WriterBuilder::with_date_format,
        WriterBuilder::with_datetime_format,
        WriterBuilder::with_time_format,
        WriterBuilder::with_timestamp_format,
        WriterBuilder::with_timestamp_tz_format,
    ];
    let given = formats.iter().zip(with);
    let csv = given.fold(plain, |csv, (format, with)| match format {
        Some(format) => with(csv, format.clone()),
        None => csv,
    });
    null.map_or(csv.clone(), |null| csv.with_null(null.clone()))
}

/// The complete configuration of a file sink, for comparison.
#[derive(Debug, PartialEq)]
pub(crate) struct Described {
    schema: SchemaRef,
    order: Option<LexRequirement>,
    parquet: Option<TableParquetOptions>,
    /// Everything else.
    text: String,
}

/// The configuration of a file sink. `None` if it cannot be serialised.
pub(crate) fn described(sink: &DataSinkExec) -> Option<(&FileSinkConfig, Described)> {
    let (sink, order): (&dyn DataSink, _) = (sink.sink(), sink.sort_order().clone());
    let (config, parquet, options) = if let Some(parquet) = sink.downcast_ref::<ParquetSink>() {
        (parquet.config(), Some(parquet.parquet_options().clone()), String::new())
    } else if let Some(csv) = sink.downcast_ref::<CsvSink>() {
        (csv.config(), None, format!("{:?}", csv.writer_options()))
    } else {
        let json = sink.downcast_ref::<JsonSink>()?;
        (json.config(), None, format!("{:?}", json.writer_options()))
    };
    let schema = Arc::clone(&config.output_schema);
    // `original_url` is not used by sinks. Schemas are compared by value, since their metadata is displayed in random order.
    let rest = FileSinkConfig {
        original_url: String::new(),
        table_paths: Vec::new(),
        output_schema: Arc::new(Schema::empty()),
        ..config.clone()
    };
    // The glob and the table name of a path do not affect where files are written.
    let paths = config.table_paths.iter().map(|path| (path.prefix(), path.is_collection(), path.file_extension()));
    let text = format!("{rest:?} {:?} {options}", paths.collect::<Vec<_>>());
    Some((config, Described { schema, order, parquet, text }))
}
