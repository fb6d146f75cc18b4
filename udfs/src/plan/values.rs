//! VALUES with embedding calls, which DataFusion would evaluate when it plans the query.
//!
//! `VALUES (1, elmo_embed('a')), (2, elmo_embed('b'))` becomes `SELECT v, elmo_embed(w)` from `VALUES (1, 'a'), (2,
//! 'b')`. Rows keep their order, and all texts are embedded together. Where the cells of a column differ in more than
//! constants, the column becomes a CASE over the number of the cell's pattern.

use std::{any::Any, collections::HashMap, sync::Arc};

use datafusion::{
    arrow::datatypes::{DataType, Field},
    common::{
        Column, DFSchema, DFSchemaRef, Result, ScalarValue, internal_err,
        tree_node::{Transformed, TreeNode, TreeNodeRecursion},
    },
    logical_expr::{
        BinaryExpr, Case, EmptyRelation, Expr, ExprSchemable, LogicalPlan, Projection, ScalarUDF, Union, Values, lit,
    },
};

use super::expr::is_pure;
use crate::{
    functions::{self, elmo_span::ElmoSpan},
    text_function::{TextFunction, is_constant},
};

/// Maximum number of patterns per column, and so of branches of a CASE. Evaluation takes longer the more there are.
const MAX_PATTERNS: usize = 32;

/// Replaces VALUES with embedding calls by a projection over VALUES of constants.
pub(super) fn rewrite_values(plan: LogicalPlan) -> Result<Transformed<LogicalPlan>> {
    let LogicalPlan::Values(values) = plan else { return Ok(Transformed::no(plan)) };
    if !values.values.iter().flatten().any(has_call) {
        return Ok(Transformed::no(LogicalPlan::Values(values)));
    }
    let Values { schema, values } = values;
    let typed = |row: Vec<Expr>| {
        let cells = row.into_iter().zip(schema.fields());
        cells.map(|(cell, field)| cell.cast_to(field.data_type(), &DFSchema::empty())).collect::<Result<Vec<_>>>()
    };
    let rows = values.into_iter().map(typed).collect::<Result<Vec<_>>>()?;
    let plan = match by_column(&schema, &rows)? {
        Some(plan) => plan,
        None => by_row(schema, rows)?,
    };
    Ok(Transformed::yes(plan))
}

fn has_call(expr: &Expr) -> bool {
    let is_call =
        |e: &Expr| matches!(e, Expr::ScalarFunction(function) if functions::text_function(&function.func).is_some());
    expr.exists(|e| Ok(is_call(e))).unwrap_or(true)
}

/// A projection with one expression per column, over VALUES of the constants of all rows. `None` when the cells of a
/// column have too many patterns, or a cell reads a column of an outer query.
fn by_column(schema: &DFSchemaRef, rows: &[Vec<Expr>]) -> Result<Option<LogicalPlan>> {
    if rows.iter().flatten().any(Expr::contains_outer) {
        return Ok(None);
    }
    let mut constants = Constants { rows: rows.len(), fields: Vec::new(), columns: Vec::new() };
    let mut outputs = Vec::new();
    for (index, (qualifier, field)) in schema.iter().enumerate() {
        let cells: Vec<&Expr> = rows.iter().filter_map(|row| row.get(index)).collect();
        let Some(expr) = column(&cells, &mut constants)? else { return Ok(None) };
        outputs.push(expr.alias_qualified(qualifier.cloned(), field.name()));
    }
    let projection = Projection::try_new(outputs, Arc::new(constants.into_plan()?))?;
    Ok(Some(LogicalPlan::Projection(projection)))
}

/// A union of one projection per row.
fn by_row(schema: DFSchemaRef, rows: Vec<Vec<Expr>>) -> Result<LogicalPlan> {
    let row = |exprs: Vec<Expr>| {
        let named = exprs.into_iter().zip(schema.iter());
        let named = named.map(|(expr, (qualifier, field))| expr.alias_qualified(qualifier.cloned(), field.name()));
        let one = EmptyRelation { produce_one_row: true, schema: Arc::new(DFSchema::empty()) };
        let projection = Projection::try_new(named.collect(), Arc::new(LogicalPlan::EmptyRelation(one)))?;
        Ok(Arc::new(LogicalPlan::Projection(projection)))
    };
    let mut inputs = rows.into_iter().map(row).collect::<Result<Vec<_>>>()?;
    Ok(match (inputs.len(), inputs.pop()) {
        (1, Some(only)) => Arc::unwrap_or_clone(only),
        (_, last) => LogicalPlan::Union(Union { inputs: inputs.into_iter().chain(last).collect(), schema }),
    })
}

/// Cells of a column that differ only in constants.
struct Pattern<'v> {
    /// A cell with columns in place of its constants.
    expr: Expr,
    /// The types of the constants.
    types: Vec<DataType>,
    /// One of the cells.
    cell: &'v Expr,
    /// The rows of the cells, each with its constants.
    rows: Vec<(usize, Vec<Expr>)>,
}

/// One expression for all cells of a column. `None` when they have more than [`MAX_PATTERNS`] patterns.
fn column(cells: &[&Expr], constants: &mut Constants) -> Result<Option<Expr>> {
    let mut patterns: Vec<Pattern<'_>> = Vec::new();
    let mut numbers = Vec::with_capacity(cells.len());
    for (row, cell) in cells.iter().copied().enumerate() {
        let (expr, found) = extract_constants(cell.clone(), 0)?;
        let types = found.iter().map(|constant| constant.get_type(&DFSchema::empty())).collect::<Result<Vec<_>>>()?;
        let known = patterns.iter().position(|pattern| pattern.expr == expr && pattern.types == types);
        let number = known.unwrap_or(patterns.len());
        match patterns.get_mut(number) {
            Some(pattern) => pattern.rows.push((row, found)),
            None if number == MAX_PATTERNS => return Ok(None),
            None => patterns.push(Pattern { expr, types, cell, rows: vec![(row, found)] }),
        }
        numbers.push(lit(number as i64));
    }
    let mut exprs = patterns.into_iter().map(|pattern| constants.add(pattern)).collect::<Result<Vec<_>>>()?;
    let Some(last) = exprs.pop() else { return internal_err!("VALUES without rows") };
    if exprs.is_empty() {
        return Ok(Some(last));
    }
    let number = Expr::Column(constants.push(DataType::Int64, numbers)?);
    let branch = |(number, expr): (usize, Expr)| (Box::new(lit(number as i64)), Box::new(expr));
    let branches = exprs.into_iter().enumerate().map(branch).collect();
    Ok(Some(Expr::Case(Case::new(Some(Box::new(number)), branches, Some(Box::new(last))))))
}

/// The VALUES of constants that is being built.
struct Constants {
    rows: usize,
    fields: Vec<Field>,
    columns: Vec<Vec<Expr>>,
}

impl Constants {
    fn push(&mut self, data_type: DataType, cells: Vec<Expr>) -> Result<Column> {
        let name = column_name(self.fields.len());
        let nullable = cells.iter().map(|cell| cell.nullable(&DFSchema::empty())).collect::<Result<Vec<_>>>()?;
        self.fields.push(Field::new(&name, data_type, nullable.contains(&true)));
        self.columns.push(cells);
        Ok(Column::from_name(name))
    }

    /// Adds the constants of a pattern, and returns the pattern as an expression over them.
    fn add(&mut self, pattern: Pattern<'_>) -> Result<Expr> {
        let (expr, sample) = extract_constants(pattern.cell.clone(), self.fields.len())?;
        let is_cell = matches!(expr, Expr::Column(_));
        // Rows of other patterns do not read these columns. They get NULL; but if the constant is a whole cell they get
        // that constant, because the column may be declared non-nullable.
        let other = |(constant, data_type): (Expr, &DataType)| match is_cell {
            true => Ok(constant),
            false => Ok(Expr::Literal(ScalarValue::try_from(data_type)?, None)),
        };
        let others = sample.into_iter().zip(&pattern.types).map(other).collect::<Result<Vec<_>>>()?;
        let mut columns: Vec<Vec<Expr>> = others.into_iter().map(|other| vec![other; self.rows]).collect();
        for (row, constants) in pattern.rows {
            for (column, constant) in columns.iter_mut().zip(constants) {
                if let Some(cell) = column.get_mut(row) {
                    *cell = constant;
                }
            }
        }
        for (column, data_type) in columns.into_iter().zip(pattern.types) {
            self.push(data_type, column)?;
        }
        Ok(expr)
    }

    fn into_plan(mut self) -> Result<LogicalPlan> {
        if self.fields.is_empty() {
            self.push(DataType::Int64, vec![lit(0_i64); self.rows])?;
        }
        let schema = DFSchema::from_unqualified_fields(self.fields.into(), HashMap::new())?;
        let mut columns: Vec<_> = self.columns.into_iter().map(Vec::into_iter).collect();
        let values = (0..self.rows).map(|_| columns.iter_mut().filter_map(Iterator::next).collect()).collect();
        Ok(LogicalPlan::Values(Values { schema: Arc::new(schema), values }))
    }
}

/// The name that DataFusion gives to a column of VALUES. DataFusion derives the names again when parameters are
/// replaced by their values, so other names would be lost.
fn column_name(number: usize) -> String {
    format!("column{}", number + 1)
}

/// Replaces the constants of a cell by columns, numbered from `first`. Returns the expression and the constants.
///
/// A cell without calls is a single constant. In a cell with calls the constants are the literals among texts, offsets
/// and operands. Other constant expressions stay: an expression in a branch of a CASE may be an error that is never
/// evaluated, and arguments of other functions may have to be literals.
fn extract_constants(mut cell: Expr, first: usize) -> Result<(Expr, Vec<Expr>)> {
    let mut found: Vec<Expr> = Vec::new();
    let mut extract = |expr: &mut Expr| {
        let column = Column::from_name(column_name(first + found.len()));
        found.push(std::mem::replace(expr, Expr::Column(column)));
    };
    if is_constant(std::slice::from_ref(&cell), 1) && is_pure(&cell) && !has_call(&cell) {
        extract(&mut cell);
        return Ok((cell, found));
    }
    let expr = cell.transform_down(|mut expr| {
        // A lambda is evaluated for elements, not for rows.
        if matches!(expr, Expr::HigherOrderFunction(_) | Expr::Lambda(_)) {
            return Ok(Transformed::new(expr, false, TreeNodeRecursion::Jump));
        }
        let operands: Vec<&mut Expr> = match &mut expr {
            Expr::BinaryExpr(BinaryExpr { left, right, .. }) => vec![left.as_mut(), right.as_mut()],
            Expr::Cast(cast) => vec![cast.expr.as_mut()],
            Expr::ScalarFunction(function) => {
                let columns = column_arguments(&function.func);
                function.args.iter_mut().take(columns).collect()
            }
            _ => Vec::new(),
        };
        operands.into_iter().filter(|operand| is_literal(operand)).for_each(&mut extract);
        Ok(Transformed::yes(expr))
    })?;
    let expr = expr.data.transform_up(|expr| Ok(to_immutable(expr)))?;
    Ok((expr.data, found))
}

/// Whether an expression is a literal, or NULL cast to a type.
fn is_literal(expr: &Expr) -> bool {
    match expr {
        Expr::Literal(..) => true,
        Expr::Cast(cast) => matches!(cast.expr.as_ref(), Expr::Literal(value, _) if value.is_null()),
        _ => false,
    }
}

/// The number of leading arguments that may be columns: 0 for functions that are not known here.
fn column_arguments(function: &ScalarUDF) -> usize {
    let inner = function.inner().as_ref() as &dyn Any;
    match functions::text_function(function) {
        Some((of_text, _)) => of_text.parameters.columns,
        None if inner.is::<ElmoSpan>() => usize::MAX,
        None => 0,
    }
}

/// Makes a call immutable again that was made volatile because its text was a constant.
fn to_immutable(expr: Expr) -> Transformed<Expr> {
    let Expr::ScalarFunction(function) = &expr else { return Transformed::no(expr) };
    let Some((of_text, constructor)) = functions::text_function(&function.func) else { return Transformed::no(expr) };
    if !of_text.is_volatile() || is_constant(&function.args, of_text.parameters.columns) {
        return Transformed::no(expr);
    }
    let immutable = TextFunction::new(of_text.parameters, of_text.kind, of_text.models.clone());
    Transformed::yes(constructor(immutable).call(function.args.clone()))
}
