//! `COPY … TO` Parquet writes files with vectors as `elmo embed` does.
//!
//! Vectors have byte stream split encoding, no dictionary and no statistics. Row groups are bounded in bytes, as a
//! million rows of vectors take gigabytes; with a memory limit, those of other columns are, too. The footer names the model
//! and the settings. Options of the statement take precedence.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use crate::{
    args::literal_expr,
    functions,
    memory::at_most,
    plan::rewrite::{expand, input_schema},
};
use datafusion::{
    arrow::datatypes::{Field, Schema},
    common::{
        Result, plan_err,
        tree_node::{TreeNode, TreeNodeRecursion},
    },
    execution::memory_pool::MemoryPool,
    logical_expr::{Expr, LogicalPlan, dml::CopyTo, expr::ScalarFunction},
    parquet::{arrow::ArrowSchemaConverter, basic::Type},
};

/// Maximum bytes of a row group before compression.
const ROW_GROUP_BYTES: usize = 128 << 20;
/// A row group takes at most this part of a memory limit. A complete one exists twice until it is written: as pages, and
/// as the bytes of the file.
const ROW_GROUP_PART: usize = 16;

/// Maximum bytes of a row group in a query with this memory pool.
pub(super) fn row_group_bytes(pool: &dyn MemoryPool) -> usize {
    at_most(ROW_GROUP_BYTES, ROW_GROUP_PART, pool).max(1)
}

/// Adds the options for vectors to a COPY to Parquet. Returns other plans unchanged. Opens the models of the query, so
/// call it before execution, not while planning.
///
/// # Errors
/// When a model cannot be opened or Parquet has no type for a column.
pub(super) fn add_vector_options(plan: LogicalPlan, row_group_bytes: usize) -> Result<LogicalPlan> {
    match plan {
        LogicalPlan::Analyze(mut analyze) => {
            analyze.input = Arc::new(add_vector_options(Arc::unwrap_or_clone(analyze.input), row_group_bytes)?);
            Ok(LogicalPlan::Analyze(analyze))
        }
        LogicalPlan::Copy(copy) => with_options(copy, row_group_bytes).map(LogicalPlan::Copy),
        other => Ok(other),
    }
}

fn with_options(mut copy: CopyTo, row_group_bytes: usize) -> Result<CopyTo> {
    match copy.file_type.get_ext().as_str() {
        "parquet" => {
            for (key, value) in options(&copy, row_group_bytes)? {
                copy.options.entry(key).or_insert(value);
            }
        }
        // Checked here, before anything is embedded and the output is replaced.
        "csv" => {
            if let Some(field) = copy.input.schema().fields().iter().find(|field| field.data_type().is_nested()) {
                return plan_err!(
                    "COPY: CSV has no lists, such as the column {}; write Parquet, JSON or Arrow",
                    field.name()
                );
            }
        }
        _ => {}
    }
    Ok(copy)
}

fn options(copy: &CopyTo, row_group_bytes: usize) -> Result<HashMap<String, String>> {
    let schema = copy.input.schema().as_arrow();
    let vectors: Vec<&Field> = schema.fields().iter().map(AsRef::as_ref).filter(|field| holds_vectors(field)).collect();
    let mut options = HashMap::new();
    let mut set = |key: String, value: &str| options.insert(format!("format.{key}"), value.to_owned());
    if !vectors.is_empty() || row_group_bytes < ROW_GROUP_BYTES {
        set("max_row_group_bytes".to_owned(), &row_group_bytes.to_string());
        // DataFusion 55 ignores the limit in bytes when several threads write a file.
        set("allow_single_file_parallelism".to_owned(), "false");
    }
    if vectors.is_empty() {
        return Ok(options);
    }
    set("compression".to_owned(), "zstd(1)");
    for path in leaves(schema, &vectors)? {
        set(format!("encoding::{path}"), "byte_stream_split");
        set(format!("dictionary_enabled::{path}"), "false");
        set(format!("statistics_enabled::{path}"), "none");
    }
    for (key, value) in footer(&copy.input, &vectors)? {
        set(format!("metadata::{key}"), &value);
    }
    Ok(options)
}

/// Whether a column holds vectors of a model: their metadata name the layers. Scores have no layers.
fn holds_vectors(field: &Field) -> bool {
    field.metadata().contains_key("elmo.layers") && field.data_type().is_nested()
}

/// The paths of the Parquet columns with the numbers of vectors.
fn leaves(schema: &Schema, vectors: &[&Field]) -> Result<Vec<String>> {
    let columns = ArrowSchemaConverter::new().convert(schema)?;
    let is_vector = |name: &str| vectors.iter().any(|field| field.name() == name);
    let leaves = columns.columns().iter().filter(|column| {
        column.physical_type() == Type::FLOAT && column.path().parts().first().is_some_and(|name| is_vector(name))
    });
    Ok(leaves.map(|column| column.path().string()).collect())
}

/// The `elmo.*` metadata that all vector columns of the file share.
fn footer(input: &LogicalPlan, vectors: &[&Field]) -> Result<BTreeMap<String, String>> {
    let calls = calls(input)?;
    let of_field = |field: &&Field| {
        let metadata = elmo_metadata(field);
        // All settings that the calls with this field share. For a column that was read from a file, the field's
        // metadata.
        let matching = calls.iter().filter(|call| call.field == metadata).map(|call| call.settings.clone());
        matching.reduce(shared).unwrap_or(metadata)
    };
    Ok(vectors.iter().map(of_field).reduce(shared).unwrap_or_default())
}

fn shared(mut one: BTreeMap<String, String>, other: BTreeMap<String, String>) -> BTreeMap<String, String> {
    one.retain(|key, value| other.get(key) == Some(value));
    one
}

fn elmo_metadata(field: &Field) -> BTreeMap<String, String> {
    let pairs = field.metadata().iter().filter(|(key, _)| key.starts_with("elmo."));
    pairs.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// The metadata of a call that returns vectors.
struct Settings {
    /// Those of its field.
    field: BTreeMap<String, String>,
    /// All of them.
    settings: BTreeMap<String, String>,
}

/// The calls in a plan that return vectors, each once.
fn calls(plan: &LogicalPlan) -> Result<Vec<Settings>> {
    let mut found: Vec<(String, Settings)> = Vec::new();
    plan.apply_with_subqueries(|node| {
        let schema = input_schema(node)?;
        node.apply_expressions(|expr| {
            // Some functions are defined by others.
            let expanded = expr.clone().transform_up(|e| expand(e, &schema))?.data;
            expanded.apply(|expr| {
                if let Expr::ScalarFunction(ScalarFunction { func, args }) = expr
                    && let Some((function, _)) = functions::text_function(func)
                    && !function.kind.is_score()
                {
                    let options: Vec<_> = args.iter().skip(function.parameters.columns).map(literal_expr).collect();
                    let call = function.call(&options)?;
                    let key = call.cache_key(&function.models);
                    if found.iter().all(|(other, _)| *other != key) {
                        let settings = call.embedder(&function.models)?.metadata().into_iter().collect();
                        let field = elmo_metadata(&call.field(&function.models)?);
                        found.push((key, Settings { field, settings }));
                    }
                }
                Ok(TreeNodeRecursion::Continue)
            })
        })
    })?;
    Ok(found.into_iter().map(|(_, settings)| settings).collect())
}
