//! Files, folders, patterns and URLs as tables: `SELECT … FROM 's3://bucket/reviews/*.parquet'`.
//!
//! Names are resolved as by `elmo embed`. Parquet, CSV, JSON and Arrow files become [`FileTable`]s, with projection and
//! filter pushdown; text files become [`super::lines`] tables.

use std::{
    collections::HashSet,
    path::Path,
    sync::{Arc, OnceLock, Weak},
};

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use async_trait::async_trait;
use datafusion::{
    catalog::{Session, TableProvider, TableProviderFactory, UrlTableFactory},
    datasource::{
        file_format::{
            FileFormat, arrow::ArrowFormat, avro::AvroFormat, csv::CsvFormat,
            file_compression_type::FileCompressionType, json::JsonFormat, parquet::ParquetFormat,
        },
        listing::{ListingOptions, ListingTable, ListingTableConfig, ListingTableUrl},
    },
    error::{DataFusionError, Result},
    execution::{object_store::ObjectStoreRegistry, session_state::SessionState},
    logical_expr::CreateExternalTable,
};
use futures::{StreamExt, TryStreamExt, stream};
use object_store::{ObjectMeta, ObjectStore};
use parking_lot::RwLock;
use url::Url;

use super::{
    error::external,
    file_errors::with_file_name,
    file_table::{self, CONCURRENT_FILES, FileTable},
    lines::LinesTable,
    text_format::TextFormat,
};
use crate::{
    recorded::{common_metadata, holds_vectors, is_about, of_column},
    source::{Compression, Format, InputFile, SourceError, list, of_name, types},
    stores::{Location, Stores},
};

/// Makes [`Stores`] available to DataFusion. A store is opened on first use, with credentials from the environment.
#[derive(Debug)]
pub(crate) struct StoreRegistry(pub(crate) Stores);

impl ObjectStoreRegistry for StoreRegistry {
    fn register_store(&self, url: &Url, store: Arc<dyn ObjectStore>) -> Option<Arc<dyn ObjectStore>> {
        self.0.insert(url.as_str(), store);
        None
    }

    fn get_store(&self, url: &Url) -> Result<Arc<dyn ObjectStore>> {
        Ok(self.0.locate(url.as_str()).map_err(external)?.store)
    }
}

/// Resolves table names that are not in the catalog as files.
#[derive(Debug)]
pub(super) struct FileTables {
    stores: Stores,
    /// Set after the session has been built, as the session owns `self`.
    session: OnceLock<Weak<RwLock<SessionState>>>,
}

impl FileTables {
    pub(super) fn new(stores: &Stores) -> Self {
        Self { stores: stores.clone(), session: OnceLock::new() }
    }

    pub(super) fn set_session(&self, session: Weak<RwLock<SessionState>>) {
        // Called once per session.
        let _ = self.session.set(session);
    }

    async fn table(&self, address: &str) -> Result<Arc<dyn TableProvider>> {
        if let Some(format) = datafusion_only_format(address) {
            return self.datafusion_table(address, format).await;
        }
        let files = list(&self.stores, &[address.to_owned()], None).await.map_err(external)?;
        let Some(first) = files.first() else {
            return Err(DataFusionError::Plan(format!("{address}: file not found")));
        };
        if let Some(other) = files.iter().find(|file| kind(file) != kind(first)) {
            return Err(DataFusionError::Plan(format!(
                "{address}: the files of a table must have one format and compression, and {first} and {other} differ; \
                 use a pattern such as '*.parquet'"
            )));
        }
        if first.format == Format::Text {
            return LinesTable::try_new(files, has_views(&self.state()?));
        }
        // DataFusion reads a file of zero bytes as a table without rows.
        let magic = matches!(first.format, Format::Parquet | Format::Arrow);
        if let Some(empty) = files.iter().find(|file| magic && file.size == 0) {
            return Err(external(SourceError::NoBytes { file: empty.to_string() }));
        }
        self.listing(files).await
    }

    fn state(&self) -> Result<SessionState> {
        let session = self.session.get().and_then(Weak::upgrade);
        let state = session.map(|session| session.read().clone());
        state.ok_or_else(|| DataFusionError::Internal("the session was dropped".to_owned()))
    }

    /// A table of the given files, with their merged schema.
    async fn listing(&self, files: Vec<InputFile>) -> Result<Arc<dyn TableProvider>> {
        let state = self.state()?;
        let (format, compression) = files.first().map_or((Format::Text, Compression::None), kind);
        let data_format = data_format(format, compression)?;
        let Some(location) = files.first().and_then(|file| file.location.as_ref()) else {
            return Err(DataFusionError::Plan("standard input is no table".to_owned()));
        };
        let url = listing_url(location)?.object_store();
        let store = &state.runtime_env().object_store(&url)?;
        let infer = |file: &InputFile| {
            let (name, meta) = (file.to_string(), meta(file));
            let (state, data_format) = (&state, &data_format);
            async move {
                let schema = data_format.infer_schema(state, store, &[meta]).await;
                schema.map_err(|error| with_file_name(error, &name)).map(|schema| (name, with_settings(&schema)))
            }
        };
        // A closure in `map` would be inferred to take one lifetime only.
        let schemas: Vec<_> = files.iter().map(infer).collect();
        let schemas: Vec<_> = stream::iter(schemas).buffered(CONCURRENT_FILES).try_collect().await?;
        check_partitions(&files, &schemas)?;
        let schema = merge_schemas(format, &schemas)?;
        // DataFusion's reader of Arrow does not convert types.
        let views = format != Format::Parquet || has_views(&state);
        Ok(Arc::new(FileTable::new(data_format, url, files, &schema, views)?))
    }

    /// A table in a format that `elmo embed` does not read. DataFusion resolves the name.
    async fn datafusion_table(&self, address: &str, format: Arc<dyn FileFormat>) -> Result<Arc<dyn TableProvider>> {
        let config = ListingTableConfig::new(ListingTableUrl::parse(address)?);
        let config = config.with_listing_options(listing_options(format)).infer_schema(&self.state()?).await;
        let config = config.map_err(|error| match error.find_root() {
            DataFusionError::Plan(text) if text.starts_with("No files found") => {
                external(SourceError::Missing { address: address.to_owned() })
            }
            _ => with_file_name(error, address),
        })?;
        Ok(Arc::new(ListingTable::try_new(config)?))
    }
}

fn meta(file: &InputFile) -> ObjectMeta {
    let location = file_table::path(file);
    ObjectMeta { location, last_modified: Default::default(), size: file.size, e_tag: None, version: None }
}

/// Rejects a column that is in some files and in the names of the folders of others: its values in those files would be
/// lost.
fn check_partitions(files: &[InputFile], schemas: &[(String, SchemaRef)]) -> Result<()> {
    let keys = |file: &InputFile| file.partitions.iter().map(|partition| partition.key.clone()).collect::<HashSet<_>>();
    let all: HashSet<String> = files.iter().flat_map(keys).collect();
    for (file, (name, schema)) in files.iter().zip(schemas).filter(|_| !all.is_empty()) {
        let own = keys(file);
        let lost = schema.fields().iter().find(|field| all.contains(field.name()) && !own.contains(field.name()));
        if let Some(field) = lost {
            return Err(DataFusionError::Plan(format!(
                "the column {} is in {name}, and other files have it in the names of their folders; read them separately",
                field.name()
            )));
        }
    }
    Ok(())
}

/// Options without a file extension: the files are listed already.
fn listing_options(format: Arc<dyn FileFormat>) -> ListingOptions {
    ListingOptions::new(format).with_file_extension("")
}

/// Merges the schemas of several files by column name. CSV files, which DataFusion reads by position, must have the
/// same columns in the same order. Field metadata, such as the model of a vector column, is kept if all files agree on
/// it; see [`common_metadata`].
pub(super) fn merge_schemas(format: Format, files: &[(String, SchemaRef)]) -> Result<SchemaRef> {
    let Some((first, schema)) = files.first() else { return Ok(Arc::new(Schema::empty())) };
    let mut columns: Vec<Field> = schema.fields().iter().map(|field| field.as_ref().clone()).collect();
    for (file, schema) in files.iter().skip(1) {
        let names = |schema: &Schema| schema.fields().iter().map(|field| field.name().clone()).collect::<Vec<_>>();
        if format.has_cells() && names(schema) != columns.iter().map(|c| c.name().clone()).collect::<Vec<_>>() {
            return Err(DataFusionError::Plan(format!(
                "{first} and {file} have different columns, or the same in another order; read them separately and \
                 combine them with UNION ALL BY NAME"
            )));
        }
        for column in &mut columns {
            let Ok(other) = schema.field_with_name(column.name()) else {
                column.set_nullable(true);
                continue;
            };
            let Some(data_type) = common_type(format, column.data_type(), other.data_type()) else {
                return Err(DataFusionError::Plan(format!(
                    "the column {} is {} in {first} and {} in {file}; read them separately and combine them with \
                     UNION ALL",
                    column.name(),
                    column.data_type(),
                    other.data_type()
                )));
            };
            let metadata = common_metadata(column, other);
            let nullable = column.is_nullable() || other.is_nullable();
            *column = Field::new(column.name(), data_type, nullable).with_metadata(metadata);
        }
        for field in schema.fields() {
            if columns.iter().all(|column| column.name() != field.name()) {
                columns.push(field.as_ref().clone().with_nullable(true));
            }
        }
    }
    Ok(Arc::new(Schema::new(columns)))
}

/// The schema of a file, with all settings that the file records of a column of vectors in the metadata of its field, from
/// which COPY writes them again. The footer of `elmo embed` is about the column that it added, not about vectors that it kept.
fn with_settings(schema: &SchemaRef) -> SchemaRef {
    let fields = schema.fields().iter().map(|field| {
        if !holds_vectors(field) || !is_about(schema.metadata(), field) {
            return Arc::clone(field);
        }
        let settings = of_column(field, schema.metadata());
        let metadata = field.metadata().clone().into_iter().chain(settings).collect();
        Arc::new(field.as_ref().clone().with_metadata(metadata))
    });
    Arc::new(Schema::new_with_metadata(fields.collect::<Vec<_>>(), schema.metadata().clone()))
}

/// A type for the values of both columns. Types that were inferred are widened, as by `elmo embed`.
fn common_type(format: Format, a: &DataType, b: &DataType) -> Option<DataType> {
    match (a, b) {
        _ if format.is_untyped() => types::unify((a, true), (b, true)),
        _ if a == b => Some(a.clone()),
        (DataType::Null, other) | (other, DataType::Null) => Some(other.clone()),
        _ => None,
    }
}

#[async_trait]
impl UrlTableFactory for FileTables {
    async fn try_new(&self, name: &str) -> Result<Option<Arc<dyn TableProvider>>> {
        // Anything else is a plain table name, unless a file has it.
        let is_path = name.contains(['/', '*']) || of_name(name).is_some() || datafusion_only_format(name).is_some();
        if !is_path && !Path::new(name).exists() {
            return Ok(None);
        }
        match self.table(name).await {
            // A folder without data files that has the same name as a table to be created.
            Err(error) if !is_path && has_no_data_files(&error) => Ok(None),
            found => found.map(Some),
        }
    }
}

fn has_no_data_files(error: &DataFusionError) -> bool {
    let DataFusionError::External(inner) = error else { return false };
    matches!(inner.downcast_ref(), Some(SourceError::Empty { .. }))
}

/// `CREATE EXTERNAL TABLE … STORED AS TEXT`
#[async_trait]
impl TableProviderFactory for FileTables {
    async fn create(&self, _: &dyn Session, command: &CreateExternalTable) -> Result<Arc<dyn TableProvider>> {
        if !command.schema.fields().is_empty() || !command.options.is_empty() {
            return Err(DataFusionError::Plan(
                "STORED AS TEXT takes no column list and no options; its only column is text".to_owned(),
            ));
        }
        let mut addresses = command.locations.clone();
        addresses.sort();
        let files = list(&self.stores, &addresses, None).await.map_err(external)?;
        match files.iter().find(|file| file.format != Format::Text) {
            Some(other) => Err(DataFusionError::Plan(format!("{other}: not a .txt file"))),
            None => LinesTable::try_new(files, has_views(&self.state()?)),
        }
    }
}

/// Whether strings of Parquet and lines are read as views. They are not with a memory limit.
fn has_views(state: &SessionState) -> bool {
    state.config_options().execution.parquet.schema_force_view_types
}

fn kind(file: &InputFile) -> (Format, Compression) {
    (file.format, file.compression)
}

/// DataFusion's format for files. Keeps the field metadata of Parquet files.
fn data_format(format: Format, compression: Compression) -> Result<Arc<dyn FileFormat>> {
    let compression = match compression {
        Compression::None => FileCompressionType::UNCOMPRESSED,
        Compression::Gzip => FileCompressionType::GZIP,
        Compression::Zstd => FileCompressionType::ZSTD,
    };
    Ok(match format {
        Format::Text => {
            return Err(DataFusionError::Internal("text files have a table provider of their own".to_owned()));
        }
        Format::Parquet => Arc::new(ParquetFormat::default().with_skip_metadata(false)),
        Format::Csv | Format::Tsv => {
            let delimiter = if format == Format::Tsv { b'\t' } else { b',' };
            let csv = CsvFormat::default().with_has_header(true).with_delimiter(delimiter);
            TextFormat::wrap(Arc::new(csv.with_file_compression_type(compression)))
        }
        Format::Json => TextFormat::wrap(Arc::new(JsonFormat::default().with_file_compression_type(compression))),
        Format::Arrow => Arc::new(ArrowFormat),
    })
}

/// The format of extensions that DataFusion reads and `elmo embed` does not.
fn datafusion_only_format(address: &str) -> Option<Arc<dyn FileFormat>> {
    let (_, extension) = address.rsplit_once('.')?;
    match extension.to_ascii_lowercase().as_str() {
        "avro" => Some(Arc::new(AvroFormat)),
        _ => None,
    }
}

/// The URL of a single file, without a glob.
fn listing_url(location: &Location) -> Result<ListingTableUrl> {
    let url = location
        .url()
        .ok_or_else(|| DataFusionError::Plan(format!("{location}: the name cannot be written as a URL")))?;
    ListingTableUrl::try_new(url, None)
}
