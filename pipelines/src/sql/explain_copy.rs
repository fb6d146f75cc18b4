//! EXPLAIN of a COPY shows the options `append` and `overwrite`, which DataFusion does not know.

use std::{collections::HashMap, sync::Arc};

use datafusion::{
    catalog::Session,
    common::{GetExt, Result},
    dataframe::DataFrame,
    datasource::file_format::{FileFormat, FileFormatFactory, file_type_to_format, format_as_file_type},
    logical_expr::LogicalPlan,
};

use super::output_folder::Existing;

/// Adds the option to the plan below EXPLAIN. Returns other queries unchanged.
pub(super) fn show(frame: DataFrame, existing: Existing) -> Result<DataFrame> {
    let Some(option) = existing.option() else { return Ok(frame) };
    let (state, plan) = frame.into_parts();
    let LogicalPlan::Explain(mut explain) = plan else { return Ok(DataFrame::new(state, plan)) };
    explain.plan = match Arc::unwrap_or_clone(explain.plan) {
        LogicalPlan::Copy(mut copy) => {
            copy.file_type = format_as_file_type(Arc::new(Explained(file_type_to_format(&copy.file_type)?)));
            copy.options.insert(option.to_owned(), "true".to_owned());
            Arc::new(LogicalPlan::Copy(copy))
        }
        other => Arc::new(other),
    };
    Ok(DataFrame::new(state, LogicalPlan::Explain(explain)))
}

/// A format that ignores the options.
#[derive(Debug)]
struct Explained(Arc<dyn FileFormatFactory>);

impl GetExt for Explained {
    fn get_ext(&self) -> String {
        self.0.get_ext()
    }
}

impl FileFormatFactory for Explained {
    fn create(&self, state: &dyn Session, options: &HashMap<String, String>) -> Result<Arc<dyn FileFormat>> {
        let mut options = options.clone();
        options.retain(|name, _| Existing::ALL.iter().all(|existing| existing.option() != Some(name.as_str())));
        self.0.create(state, &options)
    }

    fn default(&self) -> Arc<dyn FileFormat> {
        self.0.default()
    }
}
