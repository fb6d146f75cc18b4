//! `COPY … TO` Parquet: files with vectors are written as `elmo embed` writes them.
//!
//! Vectors are split into byte streams, without dictionary and statistics; row groups end by bytes, as a million rows of
//! vectors are gigabytes; and the footer says which model and settings made them. What the statement says itself wins.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use datafusion::{
    arrow::datatypes::{Field, Schema},
    common::{
        Result, plan_err,
        tree_node::{TreeNode, TreeNodeRecursion},
    },
    logical_expr::{Expr, LogicalPlan, dml::CopyTo, expr::ScalarFunction},
    parquet::{arrow::ArrowSchemaConverter, basic::Type},
};
use elmo::ColumnEmbedder;

use crate::{functions, plan::session::literal, rewrite};

/// Bytes of a row group before it is packed.
const ROW_GROUP_BYTES: usize = 128 << 20;

/// Adds to a COPY to Parquet what its vectors ask for; any other plan comes back as it is. Opens the models of the query,
/// so it belongs between planning and running.
///
/// # Errors
/// When a model cannot be opened or Parquet has no type for a column.
pub(crate) fn keep_vectors(plan: LogicalPlan) -> Result<LogicalPlan> {
    match plan {
        LogicalPlan::Analyze(mut analyze) => {
            analyze.input = Arc::new(keep_vectors(Arc::unwrap_or_clone(analyze.input))?);
            Ok(LogicalPlan::Analyze(analyze))
        }
        LogicalPlan::Copy(copy) => with_options(copy).map(LogicalPlan::Copy),
        other => Ok(other),
    }
}

fn with_options(mut copy: CopyTo) -> Result<CopyTo> {
    match copy.file_type.get_ext().as_str() {
        "parquet" => {
            let more = options(&copy)?;
            for (key, value) in more {
                copy.options.entry(key).or_insert(value);
            }
        }
        // Found now, the output is as it was, and nothing was embedded in vain.
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

fn options(copy: &CopyTo) -> Result<HashMap<String, String>> {
    let schema = copy.input.schema().as_arrow();
    let vectors: Vec<&Field> = schema.fields().iter().map(AsRef::as_ref).filter(|field| holds_vectors(field)).collect();
    let mut options = HashMap::new();
    if vectors.is_empty() {
        return Ok(options);
    }
    let mut set = |key: String, value: &str| options.insert(format!("format.{key}"), value.to_owned());
    set("compression".to_owned(), "zstd(1)");
    set("max_row_group_bytes".to_owned(), &ROW_GROUP_BYTES.to_string());
    // DataFusion 55 counts the rows of a group alone where several threads write a file.
    set("allow_single_file_parallelism".to_owned(), "false");
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

/// Whether a column holds vectors of a model: its layers stand in the metadata. Scores have none.
fn holds_vectors(field: &Field) -> bool {
    field.metadata().contains_key("elmo.layers") && field.data_type().is_nested()
}

/// Paths of the Parquet columns that hold the numbers of vectors.
fn leaves(schema: &Schema, vectors: &[&Field]) -> Result<Vec<String>> {
    let columns = ArrowSchemaConverter::new().convert(schema)?;
    let is_vector = |name: &str| vectors.iter().any(|field| field.name() == name);
    let leaves = columns.columns().iter().filter(|column| {
        column.physical_type() == Type::FLOAT && column.path().parts().first().is_some_and(|name| is_vector(name))
    });
    Ok(leaves.map(|column| column.path().string()).collect())
}

/// The `elmo.*` pairs on which all vectors of the file agree.
fn footer(input: &LogicalPlan, vectors: &[&Field]) -> Result<BTreeMap<String, String>> {
    let made = embedders(input)?;
    let of_field = |field: &&Field| {
        let said = elmo_pairs(field);
        // The settings of the call that gives this field; of a column that was read from a file, what its field says.
        let mut fitting =
            made.iter().filter(|embedder| embedder.fields().first().is_some_and(|f| elmo_pairs(f) == said));
        match (fitting.next(), fitting.next()) {
            (Some(one), None) => one.metadata().into_iter().collect(),
            _ => said,
        }
    };
    let mut all = vectors.iter().map(of_field);
    let mut agreed = all.next().unwrap_or_default();
    for other in all {
        agreed.retain(|key, value| other.get(key) == Some(value));
    }
    Ok(agreed)
}

fn elmo_pairs(field: &Field) -> BTreeMap<String, String> {
    let pairs = field.metadata().iter().filter(|(key, _)| key.starts_with("elmo."));
    pairs.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// The embedders of all calls in a plan, each once.
fn embedders(plan: &LogicalPlan) -> Result<Vec<ColumnEmbedder>> {
    let mut found: Vec<(String, ColumnEmbedder)> = Vec::new();
    plan.apply_with_subqueries(|node| {
        node.apply_expressions(|expr| {
            // Some functions are said with others.
            let expanded = expr.clone().transform_up(rewrite::expand)?.data;
            expanded.apply(|expr| {
                if let Expr::ScalarFunction(ScalarFunction { func, args }) = expr
                    && let Some((function, _)) = functions::text_function(func)
                    && !function.kind.is_score()
                {
                    let options: Vec<_> = args.iter().skip(function.shape.columns).map(literal).collect();
                    let call = function.call(&options)?;
                    let identity = call.identity(&function.models);
                    if found.iter().all(|(there, _)| *there != identity) {
                        found.push((identity, call.embedder(&function.models)?));
                    }
                }
                Ok(TreeNodeRecursion::Continue)
            })
        })
    })?;
    Ok(found.into_iter().map(|(_, embedder)| embedder).collect())
}
