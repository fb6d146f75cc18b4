//! Files, folders, patterns and URLs as tables: `SELECT … FROM 's3://bucket/reviews/*.parquet'`.
//!
//! What a name means is what it means to `elmo embed`. Parquet, CSV, JSON and Arrow are read by DataFusion, which reads
//! only what a query needs; lines of text, which it does not know, by [`super::lines`].

use std::{
    collections::HashMap,
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
use object_store::ObjectStore;
use parking_lot::RwLock;
use url::Url;

use super::{lines::LinesTable, readers::named};
use crate::{
    source::{Compression, Format, InputFile, SourceError, list, of_name},
    stores::{Location, Stores},
};

/// The stores of elmo, for DataFusion: opened when a query first names them, with the credentials of the environment.
#[derive(Debug)]
pub(crate) struct Registry(pub(crate) Stores);

impl ObjectStoreRegistry for Registry {
    fn register_store(&self, url: &Url, store: Arc<dyn ObjectStore>) -> Option<Arc<dyn ObjectStore>> {
        self.0.insert(url.as_str(), store);
        None
    }

    fn get_store(&self, url: &Url) -> Result<Arc<dyn ObjectStore>> {
        Ok(self.0.locate(url.as_str()).map_err(external)?.store)
    }
}

/// Makes tables of names that no table has.
#[derive(Debug)]
pub(super) struct Files {
    stores: Stores,
    /// The session they are for; known only when it is there.
    session: OnceLock<Weak<RwLock<SessionState>>>,
}

impl Files {
    pub(super) fn new(stores: &Stores) -> Self {
        Self { stores: stores.clone(), session: OnceLock::new() }
    }

    pub(super) fn belong_to(&self, session: Weak<RwLock<SessionState>>) {
        // Said once, when the session is made.
        let _ = self.session.set(session);
    }

    async fn table(&self, address: &str) -> Result<Arc<dyn TableProvider>> {
        if let Some(format) = format_of_datafusion(address) {
            return self.foreign(address, format).await;
        }
        let files = list(&self.stores, &[address.to_owned()], None).await.map_err(external)?;
        let Some(first) = files.first() else {
            return Err(DataFusionError::Plan(format!("{address}: no file has this name")));
        };
        if let Some(other) = files.iter().find(|file| kind(file) != kind(first)) {
            return Err(DataFusionError::Plan(format!(
                "{address}: a table has files of one kind, and {first} and {other} differ; name them by a pattern such \
                 as '*.parquet'"
            )));
        }
        if first.format == Format::Text {
            return LinesTable::of(files).await;
        }
        // DataFusion takes a file without a byte for one without rows.
        let magic = matches!(first.format, Format::Parquet | Format::Arrow);
        if let Some(empty) = files.iter().find(|file| magic && file.size == 0) {
            let reason = "the file is empty, and so not of its format".to_owned();
            return Err(external(SourceError::Malformed { file: empty.to_string(), row: 0, reason }));
        }
        self.listing(&files).await
    }

    fn state(&self) -> Result<SessionState> {
        let session = self.session.get().and_then(Weak::upgrade);
        let state = session.map(|session| session.read().clone());
        state.ok_or_else(|| DataFusionError::Internal("the session of a table is gone".to_owned()))
    }

    /// A table of files that are listed by name. DataFusion would take the first file's columns for those of all.
    async fn listing(&self, files: &[InputFile]) -> Result<Arc<dyn TableProvider>> {
        let state = self.state()?;
        let (format, compression) = files.first().map_or((Format::Text, Compression::None), kind);
        let options = listing_options(data_format(format, compression)?);
        let mut urls = Vec::new();
        let mut schemas = Vec::new();
        for file in files {
            let Some(location) = &file.location else { continue };
            let url = listing_url(location)?;
            let schema = options.infer_schema(&state, &url).await.map_err(|error| named(error, &file.to_string()))?;
            schemas.push((file.to_string(), schema));
            urls.push(url);
        }
        let schema = merged(format, &schemas)?;
        let config = ListingTableConfig::new_with_multi_paths(urls).with_listing_options(options).with_schema(schema);
        Ok(Arc::new(ListingTable::try_new(config)?))
    }

    /// What only DataFusion knows, as it lists it.
    async fn foreign(&self, address: &str, format: Arc<dyn FileFormat>) -> Result<Arc<dyn TableProvider>> {
        let config = ListingTableConfig::new(ListingTableUrl::parse(address)?);
        let config = config.with_listing_options(listing_options(format)).infer_schema(&self.state()?).await;
        let config = config.map_err(|error| named(error, address))?;
        Ok(Arc::new(ListingTable::try_new(config)?))
    }
}

/// The files are known by their names, so no extension has to fit.
fn listing_options(format: Arc<dyn FileFormat>) -> ListingOptions {
    ListingOptions::new(format).with_file_extension("")
}

/// The columns of several files: by name, and in CSV, which DataFusion reads by place, in one order too. What a file says
/// of a column beyond its type (which model made it) is kept where all of them say it.
fn merged(format: Format, files: &[(String, SchemaRef)]) -> Result<SchemaRef> {
    let Some((first, schema)) = files.first() else { return Ok(Arc::new(Schema::empty())) };
    let mut columns: Vec<Field> = schema.fields().iter().map(|field| field.as_ref().clone()).collect();
    for (file, schema) in files.iter().skip(1) {
        let names = |schema: &Schema| schema.fields().iter().map(|field| field.name().clone()).collect::<Vec<_>>();
        if format == Format::Csv && names(schema) != columns.iter().map(|c| c.name().clone()).collect::<Vec<_>>() {
            return Err(DataFusionError::Plan(format!(
                "{first} and {file} have other columns, or the same in another order; read them one by one and join them \
                 by UNION ALL BY NAME"
            )));
        }
        for column in &mut columns {
            let Ok(other) = schema.field_with_name(column.name()) else {
                column.set_nullable(true);
                continue;
            };
            let Some(both) = unified(format, column.data_type(), other.data_type()) else {
                return Err(DataFusionError::Plan(format!(
                    "the column {} is {} in {first} and {} in {file}; read them one by one and join them by UNION ALL",
                    column.name(),
                    column.data_type(),
                    other.data_type()
                )));
            };
            let metadata =
                if column.metadata() == other.metadata() { column.metadata().clone() } else { HashMap::new() };
            let nullable = column.is_nullable() || other.is_nullable();
            *column = Field::new(column.name(), both, nullable).with_metadata(metadata);
        }
        for field in schema.fields() {
            if columns.iter().all(|column| column.name() != field.name()) {
                columns.push(field.as_ref().clone().with_nullable(true));
            }
        }
    }
    Ok(Arc::new(Schema::new(columns)))
}

/// A type for both; types that were guessed from the first rows may be wider.
fn unified(format: Format, a: &DataType, b: &DataType) -> Option<DataType> {
    match (a, b) {
        _ if a == b => Some(a.clone()),
        (DataType::Null, other) | (other, DataType::Null) => Some(other.clone()),
        (DataType::Int64, DataType::Float64) | (DataType::Float64, DataType::Int64)
            if matches!(format, Format::Csv | Format::Json) =>
        {
            Some(DataType::Float64)
        }
        _ if format == Format::Csv => Some(DataType::Utf8),
        _ => None,
    }
}

#[async_trait]
impl UrlTableFactory for Files {
    async fn try_new(&self, name: &str) -> Result<Option<Arc<dyn TableProvider>>> {
        // What looks like no path is the name of a table, unless a file has it.
        let like_a_path = name.contains(['/', '*']) || of_name(name).is_some() || format_of_datafusion(name).is_some();
        if !like_a_path && !Path::new(name).exists() {
            return Ok(None);
        }
        match self.table(name).await {
            // A folder of something else, which only has the name of a table that is made.
            Err(error) if !like_a_path && is_no_table(&error) => Ok(None),
            found => found.map(Some),
        }
    }
}

fn is_no_table(error: &DataFusionError) -> bool {
    let DataFusionError::External(inner) = error else { return false };
    matches!(inner.downcast_ref(), Some(SourceError::Empty { .. }))
}

/// `CREATE EXTERNAL TABLE … STORED AS TEXT`
#[async_trait]
impl TableProviderFactory for Files {
    async fn create(&self, _: &dyn Session, command: &CreateExternalTable) -> Result<Arc<dyn TableProvider>> {
        if !command.schema.fields().is_empty() || !command.options.is_empty() {
            return Err(DataFusionError::Plan(
                "STORED AS TEXT: lines have one column, text, and no options; leave out both".to_owned(),
            ));
        }
        let mut addresses = command.locations.clone();
        addresses.sort();
        let files = list(&self.stores, &addresses, None).await.map_err(external)?;
        match files.iter().find(|file| file.format != Format::Text) {
            Some(other) => Err(DataFusionError::Plan(format!("{other}: not a .txt file"))),
            None => LinesTable::of(files).await,
        }
    }
}

fn kind(file: &InputFile) -> (Format, Compression) {
    (file.format, file.compression)
}

/// How DataFusion reads a format. What Parquet files say of their columns is kept.
fn data_format(format: Format, compression: Compression) -> Result<Arc<dyn FileFormat>> {
    let packed = match compression {
        Compression::None => FileCompressionType::UNCOMPRESSED,
        Compression::Gzip => FileCompressionType::GZIP,
        Compression::Zstd => FileCompressionType::ZSTD,
    };
    Ok(match format {
        Format::Text => return Err(DataFusionError::Internal("lines are read by us".to_owned())),
        Format::Parquet => Arc::new(ParquetFormat::default().with_skip_metadata(false)),
        Format::Csv => Arc::new(CsvFormat::default().with_has_header(true).with_file_compression_type(packed)),
        Format::Json => Arc::new(JsonFormat::default().with_file_compression_type(packed)),
        Format::Arrow => Arc::new(ArrowFormat),
    })
}

/// Endings that DataFusion knows and `elmo embed` does not: `.json` is what COPY calls its lines of JSON.
fn format_of_datafusion(address: &str) -> Option<Arc<dyn FileFormat>> {
    let (_, extension) = address.rsplit_once('.')?;
    match extension.to_ascii_lowercase().as_str() {
        "json" => Some(Arc::new(JsonFormat::default())),
        "avro" => Some(Arc::new(AvroFormat)),
        _ => None,
    }
}

/// The URL of one file; no character of its name is a pattern.
fn listing_url(location: &Location) -> Result<ListingTableUrl> {
    let url = location.url().ok_or_else(|| DataFusionError::Plan(format!("{location}: no URL says this name")))?;
    ListingTableUrl::try_new(url, None)
}

pub(super) fn external(error: impl std::error::Error + Send + Sync + 'static) -> DataFusionError {
    DataFusionError::External(Box::new(error))
}
