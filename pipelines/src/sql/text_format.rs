//! CSV and JSON as DataFusion's formats, with schema inference of our own.
//!
//! DataFusion infers CSV piece by piece, and a piece may begin inside a cell; it infers JSON from the first 1,000 rows, and a
//! key that comes later is lost. Here CSV is inferred from the first 1,000 records in one piece, and JSON from all rows.

use std::{
    collections::{HashMap, HashSet},
    io::{BufReader, Read},
    sync::Arc,
};

use arrow::{
    csv,
    datatypes::{DataType, Field, Schema, SchemaRef},
};
use async_trait::async_trait;
use datafusion::{
    catalog::Session,
    common::{DataFusionError, GetExt, Result, Statistics, config::CsvOptions},
    datasource::{
        file_format::{
            FileFormat, FileFormatFactory, csv::CsvFormat, file_compression_type::FileCompressionType, json::JsonFormat,
        },
        physical_plan::{FileScanConfig, FileSinkConfig, FileSource},
        table_schema::TableSchema,
    },
    execution::session_state::SessionState,
    physical_expr::LexRequirement,
    physical_plan::ExecutionPlan,
};
use object_store::{ObjectMeta, ObjectStore};

use super::{
    cells::Cells,
    error::external,
    files::merge_schemas,
    infer_json,
    plain_text::{self, Broken},
};
use crate::source::{
    Format, Shape,
    reason::{self, Reason},
};

/// Maximum number of rows for inference of CSV, as in DataFusion.
const INFERENCE_ROWS: usize = 1000;
/// Bytes that are read at once to infer CSV.
const READ_BYTES: u64 = 64 << 10;
/// Maximum bytes from which CSV is inferred.
const MAX_BYTES: usize = 256 << 20;

/// A format of DataFusion whose schemas are inferred here.
#[derive(Debug)]
pub(crate) struct TextFormat(Arc<dyn FileFormat>);

impl TextFormat {
    /// Wraps the formats CSV and JSON. Other formats are returned as they are.
    pub(super) fn wrap(format: Arc<dyn FileFormat>) -> Arc<dyn FileFormat> {
        if Dialect::of(format.as_ref(), true).is_some() { Arc::new(Self(format)) } else { format }
    }

    /// The format of DataFusion.
    pub(crate) fn unwrapped(format: &dyn FileFormat) -> &dyn FileFormat {
        let wrapped = (format as &dyn std::any::Any).downcast_ref::<Self>();
        wrapped.map_or(format, |wrapped| wrapped.0.as_ref())
    }

    async fn infer_file(
        &self,
        state: &dyn Session,
        store: &Arc<dyn ObjectStore>,
        file: &ObjectMeta,
    ) -> Result<SchemaRef> {
        let Some(dialect) = Dialect::of(self.0.as_ref(), state.config_options().catalog.has_header) else {
            return self.0.infer_schema(state, store, std::slice::from_ref(file)).await;
        };
        let compression = self.0.compression_type().unwrap_or(FileCompressionType::UNCOMPRESSED);
        let text = plain_text::open(store.as_ref(), &file.location, compression).await?;
        let inferred = tokio::task::spawn_blocking(move || dialect.infer(text)).await;
        inferred.map_err(external)?.map(Arc::new)
    }
}

/// What inference depends on.
enum Dialect {
    Csv(Box<CsvOptions>, bool),
    /// The number of rows; all if the user gives none.
    Json(Option<usize>),
}

impl Dialect {
    /// The dialect of a format that is inferred here.
    fn of(format: &dyn FileFormat, has_header: bool) -> Option<Self> {
        let format = format as &dyn std::any::Any;
        if let Some(csv) = format.downcast_ref::<CsvFormat>() {
            return Some(Self::Csv(Box::new(csv.options().clone()), csv.has_header().unwrap_or(has_header)));
        }
        let json = format.downcast_ref::<JsonFormat>()?;
        Some(Self::Json(json.options().schema_infer_max_rec))
    }

    fn infer(self, text: Box<dyn Read + Send>) -> Result<Schema> {
        match self {
            Self::Csv(options, has_header) => infer_csv(text, &options, has_header),
            Self::Json(rows) => {
                let shape = Shape::default();
                let lines = BufReader::with_capacity(1 << 20, plain_text::lines(text, shape.clone()));
                infer_json::infer(lines, shape, rows)
            }
        }
    }
}

fn infer_csv(text: Box<dyn Read + Send>, options: &CsvOptions, has_header: bool) -> Result<Schema> {
    let rows = options.schema_infer_max_rec.unwrap_or(INFERENCE_ROWS);
    let (head, cells) = head(text, Cells::new(options, has_header), rows as u64 + u64::from(has_header))?;
    if let Some(row) = cells.rows_before_open_quotation() {
        let reason = format!("no complete row in {MAX_BYTES} bytes; is a quotation not closed?");
        let too_long = || Broken { row, reason };
        return Err(external(if head.len() < MAX_BYTES { Broken::open_quotation(row) } else { too_long() }));
    }
    let format = csv_format(options, has_header)?;
    match format.infer_schema(head.as_slice(), Some(rows)) {
        Ok((schema, _)) => match twice(&schema) {
            Some(name) => {
                let reason = format!("two columns are named \"{}\"; rename one of them", reason::name(name));
                Err(external(Broken { row: 0, reason }))
            }
            None if rows == 0 => Ok(strings(&schema)),
            None => Ok(schema),
        },
        Err(error) => Err(broken_row(&head, options, has_header, &format).unwrap_or_else(|| error.into())),
    }
}

/// The first `records` records, or fewer if they are too long.
fn head(mut text: Box<dyn Read + Send>, mut cells: Cells, records: u64) -> Result<(Vec<u8>, Cells)> {
    let mut head = Vec::new();
    while cells.records() < records && head.len() < MAX_BYTES {
        let from = head.len();
        let read = text.by_ref().take(READ_BYTES).read_to_end(&mut head).map_err(DataFusionError::IoError)?;
        if read == 0 {
            break;
        }
        let used = cells.read_until(records, &head[from..]);
        head.truncate(from + used);
    }
    Ok((head, cells))
}

fn csv_format(options: &CsvOptions, has_header: bool) -> Result<csv::reader::Format> {
    let mut format = csv::reader::Format::default()
        .with_header(has_header)
        .with_delimiter(options.delimiter)
        .with_quote(options.quote)
        .with_truncated_rows(options.truncated_rows.unwrap_or(false));
    if let Some(escape) = options.escape {
        format = format.with_escape(escape);
    }
    if let Some(comment) = options.comment {
        format = format.with_comment(comment);
    }
    if let Some(terminator) = options.terminator {
        format = format.with_terminator(terminator);
    }
    Ok(format)
}

/// The first row with another number of cells, or with bytes that are not UTF-8.
fn broken_row(
    head: &[u8],
    options: &CsvOptions,
    has_header: bool,
    format: &csv::reader::Format,
) -> Option<DataFusionError> {
    let (columns, _) = format.infer_schema(head, Some(0)).ok()?;
    let mut builder = csv::ReaderBuilder::new(Arc::new(strings(&columns)))
        .with_format(csv_format(options, has_header).ok()?)
        .with_batch_size(1);
    builder = builder.with_truncated_rows(options.truncated_rows.unwrap_or(false));
    let rows = builder.build(head).ok()?;
    let (row, error) = rows.enumerate().find_map(|(row, batch)| batch.err().map(|error| (row, error)))?;
    Some(external(Broken { row: row as u64, reason: Reason::from(&error).to_string() }))
}

/// A name that two columns have.
fn twice(schema: &Schema) -> Option<&str> {
    let mut seen = HashSet::new();
    schema.fields().iter().map(|field| field.name().as_str()).find(|name| !seen.insert(*name))
}

fn strings(schema: &Schema) -> Schema {
    Schema::new(schema.fields().iter().map(|f| Field::new(f.name(), DataType::Utf8, true)).collect::<Vec<_>>())
}

#[async_trait]
impl FileFormat for TextFormat {
    fn get_ext(&self) -> String {
        self.0.get_ext()
    }

    fn get_ext_with_compression(&self, compression: &FileCompressionType) -> Result<String> {
        self.0.get_ext_with_compression(compression)
    }

    fn compression_type(&self) -> Option<FileCompressionType> {
        self.0.compression_type()
    }

    async fn infer_schema(
        &self,
        state: &dyn Session,
        store: &Arc<dyn ObjectStore>,
        files: &[ObjectMeta],
    ) -> Result<SchemaRef> {
        let mut schemas = Vec::new();
        for file in files {
            schemas.push((file.location.to_string(), self.infer_file(state, store, file).await?));
        }
        let csv = (self.0.as_ref() as &dyn std::any::Any).downcast_ref::<CsvFormat>();
        match csv {
            Some(csv) if csv.options().truncated_rows == Some(true) => {
                let schemas = schemas.iter().map(|(_, schema)| schema.as_ref().clone());
                Ok(Arc::new(Schema::try_merge(schemas)?))
            }
            Some(_) => merge_schemas(Format::Csv, &schemas),
            None => merge_schemas(Format::Json, &schemas),
        }
    }

    async fn infer_stats(
        &self,
        state: &dyn Session,
        store: &Arc<dyn ObjectStore>,
        schema: SchemaRef,
        file: &ObjectMeta,
    ) -> Result<Statistics> {
        self.0.infer_stats(state, store, schema, file).await
    }

    async fn create_physical_plan(&self, state: &dyn Session, scan: FileScanConfig) -> Result<Arc<dyn ExecutionPlan>> {
        self.0.create_physical_plan(state, scan).await
    }

    async fn create_writer_physical_plan(
        &self,
        input: Arc<dyn ExecutionPlan>,
        state: &dyn Session,
        sink: FileSinkConfig,
        order: Option<LexRequirement>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        self.0.create_writer_physical_plan(input, state, sink, order).await
    }

    fn file_source(&self, schema: TableSchema) -> Arc<dyn FileSource> {
        self.0.file_source(schema)
    }
}

/// Creates a format for CREATE EXTERNAL TABLE.
#[derive(Debug)]
struct TextFormatFactory(Arc<dyn FileFormatFactory>);

impl FileFormatFactory for TextFormatFactory {
    fn create(&self, state: &dyn Session, options: &HashMap<String, String>) -> Result<Arc<dyn FileFormat>> {
        self.0.create(state, options).map(TextFormat::wrap)
    }

    fn default(&self) -> Arc<dyn FileFormat> {
        TextFormat::wrap(self.0.default())
    }
}

impl GetExt for TextFormatFactory {
    fn get_ext(&self) -> String {
        self.0.get_ext()
    }
}

/// A session whose tables of CSV and JSON files are inferred here. The session itself keeps DataFusion's formats, with which
/// COPY writes.
pub(super) fn with_text_formats(session: &SessionState) -> Result<SessionState> {
    let mut session = session.clone();
    for kind in ["csv", "json"] {
        if let Some(factory) = session.get_file_format_factory(kind) {
            session.register_file_format(Arc::new(TextFormatFactory(factory)), true)?;
        }
    }
    Ok(session)
}
