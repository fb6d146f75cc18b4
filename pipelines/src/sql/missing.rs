//! What to say of a name that is neither a table nor a file.

use std::path::Path;

use datafusion::{error::DataFusionError, prelude::SessionContext};

use super::error::{SqlError, classify, sql_error};
use crate::{
    error::{Error, Exit},
    source::{Format, SourceError, of_name},
};

/// Names that a message shows.
const SHOWN: usize = 3;
/// The hint if no name is near.
const SPELLING: &str =
    "check the spelling; SHOW TABLES lists the tables, and the name of a file goes in quotes: 'a.parquet'";

/// Converts an error of planning. If it is about a missing table or file, it says so, with the names that are nearest.
pub(super) fn plan_error(error: DataFusionError, context: &SessionContext) -> Error {
    if let Some(folder) = empty_folder(error.find_root()) {
        return no_data(&folder);
    }
    let Some(name) = missing_name(error.find_root()) else { return sql_error(error) };
    let (exit, _) = classify(error.find_root());
    let tables = tables(context);
    // A folder with data files would be a table. Without a slash, its name might have been that of a table.
    if Path::new(&name).is_dir() && !tables.contains(&name) {
        return no_data(&name);
    }
    let message = format!("{name}: neither a table nor a file of this name exists");
    let quoted = |name: String| if of_name(&name).is_some() || name.contains('/') { format!("'{name}'") } else { name };
    // `FROM a.csv` is a table of a schema.
    let help = match Path::new(&name).exists() && !tables.contains(&name) {
        true => format!("there is a file; its name goes in quotes: '{name}'"),
        false => match nearest(&name, tables.into_iter().chain(files_beside(&name))) {
            names if names.is_empty() => SPELLING.to_owned(),
            names => format!("there is {}", names.into_iter().map(quoted).collect::<Vec<_>>().join(", ")),
        },
    };
    SqlError { message, exit, help: Some(help) }.into()
}

/// A folder without files that are read.
fn empty_folder(root: &DataFusionError) -> Option<String> {
    let DataFusionError::External(inner) = root else { return None };
    match inner.downcast_ref()? {
        SourceError::Empty { address } => Some(address.clone()),
        _ => None,
    }
}

fn no_data(folder: &str) -> Error {
    let message = format!("{}/: the folder has no file that is read as a table", folder.trim_end_matches('/'));
    let help = format!(
        "files are read whose names do not begin with . or _ and end in {}; CREATE EXTERNAL TABLE names the format of others",
        Format::EXTENSIONS
    );
    SqlError { message, exit: Exit::Input, help: Some(help) }.into()
}

/// The name that was not found, without the default catalog and schema.
fn missing_name(root: &DataFusionError) -> Option<String> {
    match root {
        DataFusionError::Plan(text) => {
            let name = text.strip_prefix("table '")?.strip_suffix("' not found")?;
            let name = name.strip_prefix("datafusion.").unwrap_or(name);
            Some(name.strip_prefix("public.").unwrap_or(name).to_owned())
        }
        DataFusionError::External(inner) => match inner.downcast_ref() {
            Some(SourceError::Missing { address }) => Some(address.clone()),
            _ => None,
        },
        _ => None,
    }
}

fn tables(context: &SessionContext) -> Vec<String> {
    let schemas = context.catalog_names().into_iter().filter_map(|name| context.catalog(&name)).flat_map(|catalog| {
        let names = catalog.schema_names().into_iter().filter(|name| name != "information_schema");
        names.filter_map(|name| catalog.schema(&name)).collect::<Vec<_>>()
    });
    schemas.flat_map(|schema| schema.table_names()).collect()
}

/// The files and folders beside a local file, named as it is.
fn files_beside(name: &str) -> Vec<String> {
    let folder = match name.trim_end_matches('/').rsplit_once('/') {
        Some((folder, _)) => format!("{folder}/"),
        None => String::new(),
    };
    let entries = std::fs::read_dir(if folder.is_empty() { "." } else { &folder }).into_iter().flatten().flatten();
    let shown = entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok().filter(|name| !name.starts_with(['.', '_']))?;
        match entry.path().is_dir() {
            true => Some(format!("{folder}{name}/")),
            false => of_name(&name).map(|_| format!("{folder}{name}")),
        }
    });
    shown.collect()
}

/// The names that a typing error may have meant, the nearest first.
fn nearest(name: &str, names: impl Iterator<Item = String>) -> Vec<String> {
    let wanted = name.trim_end_matches('/').to_lowercase();
    let most = wanted.chars().count().div_ceil(3);
    let distance = |other: &str| {
        let other = other.trim_end_matches('/').to_lowercase();
        // The name of a file without its extensions, and the same name with another extension.
        let stem =
            |name: &str| name.rsplit_once('/').map_or(name, |(_, file)| file).split('.').next().map(str::to_owned);
        let distance = strsim::damerau_levenshtein(&wanted, &other);
        if stem(&wanted) == stem(&other) { distance.min(1) } else { distance }
    };
    let mut near: Vec<_> =
        names.map(|name| (distance(&name), name)).filter(|(distance, _)| *distance <= most).collect();
    near.sort();
    near.dedup();
    near.into_iter().take(SHOWN).map(|(_, name)| name).collect()
}
