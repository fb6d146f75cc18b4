//! VALUES with calls of ours. DataFusion evaluates the cells of VALUES when it plans, which must not run a model.
//!
//! `VALUES (1, elmo_embed('a')), (2, elmo_embed('b'))` becomes `SELECT v, elmo_embed(w)` from `VALUES (1, 'a'), (2, 'b')`:
//! rows keep their order, and texts are embedded together. Where the cells of a column differ in more than constants,
//! there is a CASE on which of them it is.

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

use crate::{
    functions::{self, elmo_span::ElmoSpan},
    plan::calls::is_plain,
    text_function::{TextFunction, is_constant},
};

/// Branches of a CASE, at most: what is evaluated for which rows takes longer the more there are.
const MOST_KINDS: usize = 32;

/// Keeps the calls in VALUES for run time.
pub(crate) fn at_run_time(plan: LogicalPlan) -> Result<Transformed<LogicalPlan>> {
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

/// One expression per column over the constants of all rows; `None` where cells have too little in common, or read
/// other tables.
fn by_column(schema: &DFSchemaRef, rows: &[Vec<Expr>]) -> Result<Option<LogicalPlan>> {
    if rows.iter().flatten().any(Expr::contains_outer) {
        return Ok(None);
    }
    let mut constants = Constants { rows: rows.len(), fields: Vec::new(), columns: Vec::new() };
    let mut outputs = Vec::new();
    for (place, (qualifier, field)) in schema.iter().enumerate() {
        let cells: Vec<&Expr> = rows.iter().filter_map(|row| row.get(place)).collect();
        let Some(expr) = column(&cells, &mut constants)? else { return Ok(None) };
        outputs.push(expr.alias_qualified(qualifier.cloned(), field.name()));
    }
    let projection = Projection::try_new(outputs, Arc::new(constants.into_plan()?))?;
    Ok(Some(LogicalPlan::Projection(projection)))
}

/// A projection of nothing per row.
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

/// Cells of a column that differ in nothing but constants.
struct Kind<'v> {
    /// With columns in place of the constants, and the types of these.
    shape: Expr,
    types: Vec<DataType>,
    /// One of them.
    cell: &'v Expr,
    /// Where they stand, with their constants.
    rows: Vec<(usize, Vec<Expr>)>,
}

/// One expression for all cells of a column; `None` when they are of too many kinds.
fn column(cells: &[&Expr], constants: &mut Constants) -> Result<Option<Expr>> {
    let mut kinds: Vec<Kind<'_>> = Vec::new();
    let mut which = Vec::with_capacity(cells.len());
    for (row, cell) in cells.iter().copied().enumerate() {
        let (shape, found) = open(cell.clone(), 0)?;
        let types = found.iter().map(|constant| constant.get_type(&DFSchema::empty())).collect::<Result<Vec<_>>>()?;
        let known = kinds.iter().position(|kind| kind.shape == shape && kind.types == types);
        let number = known.unwrap_or(kinds.len());
        match kinds.get_mut(number) {
            Some(kind) => kind.rows.push((row, found)),
            None if number == MOST_KINDS => return Ok(None),
            None => kinds.push(Kind { shape, types, cell, rows: vec![(row, found)] }),
        }
        which.push(lit(number as i64));
    }
    let mut exprs = kinds.into_iter().map(|kind| constants.add(kind)).collect::<Result<Vec<_>>>()?;
    let Some(last) = exprs.pop() else { return internal_err!("VALUES without rows") };
    if exprs.is_empty() {
        return Ok(Some(last));
    }
    let which = Expr::Column(constants.push(DataType::Int64, which)?);
    let branch = |(number, expr): (usize, Expr)| (Box::new(lit(number as i64)), Box::new(expr));
    let branches = exprs.into_iter().enumerate().map(branch).collect();
    Ok(Some(Expr::Case(Case::new(Some(Box::new(which)), branches, Some(Box::new(last))))))
}

/// The VALUES of constants below, as it is made.
struct Constants {
    rows: usize,
    fields: Vec<Field>,
    columns: Vec<Vec<Expr>>,
}

impl Constants {
    fn push(&mut self, kind: DataType, cells: Vec<Expr>) -> Result<Column> {
        let name = name(self.fields.len());
        let nullable = cells.iter().map(|cell| cell.nullable(&DFSchema::empty())).collect::<Result<Vec<_>>>()?;
        self.fields.push(Field::new(&name, kind, nullable.contains(&true)));
        self.columns.push(cells);
        Ok(Column::from_name(name))
    }

    /// Adds the constants of some cells, and gives what these are over them.
    fn add(&mut self, kind: Kind<'_>) -> Result<Expr> {
        let (expr, sample) = open(kind.cell.clone(), self.fields.len())?;
        let is_cell = matches!(expr, Expr::Column(_));
        // Other rows look at none of them. A text may be NULL there; a cell is what it is, as it may be of a column
        // that is never NULL.
        let other = |(constant, kind): (Expr, &DataType)| match is_cell {
            true => Ok(constant),
            false => Ok(Expr::Literal(ScalarValue::try_from(kind)?, None)),
        };
        let others = sample.into_iter().zip(&kind.types).map(other).collect::<Result<Vec<_>>>()?;
        let mut columns: Vec<Vec<Expr>> = others.into_iter().map(|other| vec![other; self.rows]).collect();
        for (row, constants) in kind.rows {
            for (column, constant) in columns.iter_mut().zip(constants) {
                if let Some(cell) = column.get_mut(row) {
                    *cell = constant;
                }
            }
        }
        for (column, kind) in columns.into_iter().zip(kind.types) {
            self.push(kind, column)?;
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

/// As DataFusion calls the columns of VALUES, also anew when parameters get their values.
fn name(number: usize) -> String {
    format!("column{}", number + 1)
}

/// A cell with columns in place of its constants, numbered from `first`, and the constants.
///
/// A cell without calls is one, as it is in VALUES without calls. Of others it is the texts, the places in them and the
/// operands: literals only, as what is behind a CASE may be an error that nobody sees, and what other functions take
/// may have to be a literal.
fn open(mut cell: Expr, first: usize) -> Result<(Expr, Vec<Expr>)> {
    let mut found: Vec<Expr> = Vec::new();
    let mut lift = |expr: &mut Expr| {
        let column = Column::from_name(name(first + found.len()));
        found.push(std::mem::replace(expr, Expr::Column(column)));
    };
    if is_constant(std::slice::from_ref(&cell), 1) && is_plain(&cell) && !has_call(&cell) {
        lift(&mut cell);
        return Ok((cell, found));
    }
    let opened = cell.transform_down(|mut expr| {
        // A lambda is evaluated for elements, not for rows.
        if matches!(expr, Expr::HigherOrderFunction(_) | Expr::Lambda(_)) {
            return Ok(Transformed::new(expr, false, TreeNodeRecursion::Jump));
        }
        let places: Vec<&mut Expr> = match &mut expr {
            Expr::BinaryExpr(BinaryExpr { left, right, .. }) => vec![left.as_mut(), right.as_mut()],
            Expr::Cast(cast) => vec![cast.expr.as_mut()],
            Expr::ScalarFunction(function) => {
                let columns = columns_of(&function.func);
                function.args.iter_mut().take(columns).collect()
            }
            _ => Vec::new(),
        };
        places.into_iter().filter(|place| is_literal(place)).for_each(&mut lift);
        Ok(Transformed::yes(expr))
    })?;
    let opened = opened.data.transform_up(|expr| Ok(on_columns(expr)))?;
    Ok((opened.data, found))
}

/// A literal, or a NULL that was given a type.
fn is_literal(expr: &Expr) -> bool {
    match expr {
        Expr::Literal(..) => true,
        Expr::Cast(cast) => matches!(cast.expr.as_ref(), Expr::Literal(value, _) if value.is_null()),
        _ => false,
    }
}

/// So many arguments of a function may be columns, of those that calls are made of.
fn columns_of(function: &ScalarUDF) -> usize {
    let inner = function.inner().as_ref() as &dyn Any;
    match functions::text_function(function) {
        Some((of, _)) => of.shape.columns,
        None if inner.is::<ElmoSpan>() => usize::MAX,
        None => 0,
    }
}

/// A call that was kept for run time, as its text was a literal, like any other on a column.
fn on_columns(expr: Expr) -> Transformed<Expr> {
    let Expr::ScalarFunction(function) = &expr else { return Transformed::no(expr) };
    let Some((of, make)) = functions::text_function(&function.func) else { return Transformed::no(expr) };
    if !of.is_at_run_time() || is_constant(&function.args, of.shape.columns) {
        return Transformed::no(expr);
    }
    let call = make(TextFunction::new(of.shape, of.kind, of.models.clone())).call(function.args.clone());
    Transformed::yes(call)
}
