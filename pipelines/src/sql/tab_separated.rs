//! `CREATE EXTERNAL TABLE … STORED AS TSV`: CSV with tabs, whose files in a folder are called `.tsv`.

use std::{str::FromStr, sync::Arc};

use async_trait::async_trait;
use datafusion::{
    catalog::{Session, TableProvider, TableProviderFactory},
    common::{GetExt, Result},
    datasource::{file_format::file_compression_type::FileCompressionType, listing::ListingTableUrl},
    logical_expr::CreateExternalTable,
};

/// Creates tables with the factory of CSV.
#[derive(Debug)]
pub(super) struct TabSeparated(pub(super) Arc<dyn TableProviderFactory>);

#[async_trait]
impl TableProviderFactory for TabSeparated {
    async fn create(&self, session: &dyn Session, command: &CreateExternalTable) -> Result<Arc<dyn TableProvider>> {
        let mut command = command.clone();
        "CSV".clone_into(&mut command.file_type);
        command.options.entry("format.delimiter".to_owned()).or_insert_with(|| "\t".to_owned());
        // The factory takes all files of a folder if columns are declared, and otherwise those with the extension.
        if command.schema.fields().is_empty() {
            let compression = command.options.get("format.compression").map(String::as_str).unwrap_or_default();
            let extension = format!(".tsv{}", FileCompressionType::from_str(compression)?.get_ext());
            for location in &mut command.locations {
                let url = ListingTableUrl::parse(&location)?;
                if url.is_folder() && url.get_glob().is_none() {
                    *location = format!("{}/*{extension}", location.trim_end_matches('/'));
                }
            }
        }
        self.0.create(session, &command).await
    }
}
