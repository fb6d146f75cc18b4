//! Measures between two vectors: the common part of `elmo_cosine`, `elmo_dot` and `elmo_l2`.
//!
//! DataFusion's `array_distance` first casts every vector to a list of doubles. These functions read the vectors in
//! place.

use std::sync::Arc;

use datafusion::{
    arrow::{
        array::{Array, ArrayRef, AsArray, Float32Array},
        compute::cast,
        datatypes::{DataType, Field, Float32Type},
    },
    common::{ScalarValue, exec_err, internal_err, plan_err},
    error::Result,
    logical_expr::{ColumnarValue, ScalarFunctionArgs, Signature, Volatility},
};

/// A measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Measure {
    /// `a · b / (|a| |b|)`; NULL if a vector is zero.
    Cosine,
    /// `a · b`.
    Dot,
    /// `|a - b|`.
    L2,
}

impl Measure {
    /// `None` for an undefined cosine.
    fn of(self, a: &[f32], b: &[f32]) -> Option<f32> {
        match self {
            Self::Cosine => elmo::measure::cosine(a, b),
            Self::Dot => Some(elmo::measure::dot(a, b)),
            Self::L2 => Some(elmo::measure::l2(a, b)),
        }
    }
}

/// A function of two vectors.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct MeasureFunction {
    pub(crate) name: &'static str,
    measure: Measure,
    pub(crate) signature: Signature,
}

impl MeasureFunction {
    pub(crate) fn new(name: &'static str, measure: Measure) -> Self {
        let mut signature = Signature::user_defined(Volatility::Immutable);
        signature.parameter_names = Some(["a", "b"].map(str::to_owned).to_vec());
        Self { name, measure, signature }
    }

    pub(crate) fn coerce(&self, types: &[DataType]) -> Result<Vec<DataType>> {
        let name = self.name;
        let [a, b] = types else { return plan_err!("{name} compares two vectors: {name}(a, b)") };
        if let (DataType::FixedSizeList(_, n), DataType::FixedSizeList(_, m)) = (a, b)
            && n != m
        {
            return plan_err!("{name}: vectors of {n} and of {m} dimensions cannot be compared");
        }
        [a, b].into_iter().map(|data_type| vector_type(name, data_type)).collect()
    }

    pub(crate) fn invoke(&self, args: &ScalarFunctionArgs) -> Result<ColumnarValue> {
        let [a, b] = args.args.as_slice() else { return internal_err!("{} takes two vectors", self.name) };
        let rows = match (a, b) {
            (ColumnarValue::Scalar(_), ColumnarValue::Scalar(_)) => 1,
            _ => args.number_rows,
        };
        let measured: ArrayRef = Arc::new(self.measure_rows(&Vectors::of(a)?, &Vectors::of(b)?, rows)?);
        match (a, b) {
            (ColumnarValue::Scalar(_), ColumnarValue::Scalar(_)) => {
                Ok(ColumnarValue::Scalar(ScalarValue::try_from_array(&measured, 0)?))
            }
            _ => Ok(ColumnarValue::Array(measured)),
        }
    }
}

impl MeasureFunction {
    fn measure_rows(&self, left: &Vectors, right: &Vectors, rows: usize) -> Result<Float32Array> {
        if let (Some(left), Some(right)) = (left.matrix(), right.matrix())
            && left.dimension == right.dimension
        {
            return Ok((0..rows).map(|row| self.measure.of(left.row(row), right.row(row))).collect());
        }
        let measured = (0..rows).map(|row| match (left.get(row), right.get(row)) {
            (Some(a), Some(b)) if a.len() != b.len() => {
                let (name, n, m) = (self.name, a.len(), b.len());
                exec_err!("{name}: a row has vectors of {n} and of {m} dimensions")
            }
            (Some(a), Some(b)) => Ok(self.measure.of(a, b)),
            _ => Ok(None),
        });
        measured.collect()
    }
}

/// The type to which a vector argument is coerced: a list of `Float32`.
fn vector_type(name: &str, data_type: &DataType) -> Result<DataType> {
    let item = |item: &Arc<Field>| match item.data_type() {
        DataType::Float32 => Some(Arc::clone(item)),
        number if number.is_numeric() => Some(Arc::new(item.as_ref().clone().with_data_type(DataType::Float32))),
        _ => None,
    };
    let coerced = match data_type {
        DataType::FixedSizeList(of, n) => item(of).map(|of| DataType::FixedSizeList(of, *n)),
        DataType::List(of) | DataType::ListView(of) => item(of).map(DataType::List),
        DataType::LargeList(of) | DataType::LargeListView(of) => item(of).map(DataType::LargeList),
        DataType::Null => Some(DataType::new_list(DataType::Float32, true)),
        _ => None,
    };
    match coerced {
        Some(coerced) => Ok(coerced),
        None => plan_err!("{name}: a vector is a list of numbers such as elmo_embed returns, not {data_type}"),
    }
}

/// The vectors of a column, or a constant vector.
struct Vectors {
    lists: ArrayRef,
    values: Float32Array,
    is_constant: bool,
}

impl Vectors {
    fn of(column: &ColumnarValue) -> Result<Self> {
        let (lists, is_constant) = match column {
            ColumnarValue::Array(lists) => (Arc::clone(lists), false),
            ColumnarValue::Scalar(list) => (list.to_array()?, true),
        };
        let values = match lists.data_type() {
            DataType::FixedSizeList(..) => lists.as_fixed_size_list().values(),
            DataType::List(_) => lists.as_list::<i32>().values(),
            DataType::LargeList(_) => lists.as_list::<i64>().values(),
            other => return internal_err!("{other} is not a list"),
        };
        let values = cast(values, &DataType::Float32)?.as_primitive::<Float32Type>().clone();
        Ok(Self { lists, values, is_constant })
    }

    /// The vectors as rows of a matrix, if they have one length and nothing is NULL.
    fn matrix(&self) -> Option<Matrix<'_>> {
        let lists = self.lists.as_fixed_size_list_opt()?;
        let dimension = lists.value_length() as usize;
        let is_complete = lists.null_count() == 0 && self.values.null_count() == 0;
        let start = lists.value_offset(0) as usize;
        let step = if self.is_constant { 0 } else { dimension };
        is_complete.then(|| Matrix { values: &self.values.values()[start..], dimension, step })
    }

    /// The vector of a row. `None` when the vector or one of its numbers is NULL.
    fn get(&self, row: usize) -> Option<&[f32]> {
        let row = if self.is_constant { 0 } else { row };
        if self.lists.is_null(row) {
            return None;
        }
        let (start, end) = match self.lists.data_type() {
            DataType::FixedSizeList(..) => {
                let lists = self.lists.as_fixed_size_list();
                let start = lists.value_offset(row) as usize;
                (start, start + lists.value_length() as usize)
            }
            DataType::LargeList(_) => {
                let offsets = self.lists.as_list::<i64>().value_offsets();
                (offsets[row] as usize, offsets[row + 1] as usize)
            }
            _ => {
                let offsets = self.lists.as_list::<i32>().value_offsets();
                (offsets[row] as usize, offsets[row + 1] as usize)
            }
        };
        let nulls = self.values.nulls();
        let is_valid = nulls.is_none_or(|nulls| nulls.slice(start, end - start).null_count() == 0);
        is_valid.then(|| &self.values.values()[start..end])
    }
}

/// Vectors of one length.
struct Matrix<'a> {
    values: &'a [f32],
    dimension: usize,
    /// Distance between two rows: 0 for a constant.
    step: usize,
}

impl<'a> Matrix<'a> {
    fn row(&self, row: usize) -> &'a [f32] {
        &self.values[row * self.step..][..self.dimension]
    }
}

/// The methods of [`datafusion::logical_expr::ScalarUDFImpl`] for a struct whose only field is a [`MeasureFunction`].
macro_rules! measure_function {
    () => {
        fn name(&self) -> &str {
            self.0.name
        }

        fn signature(&self) -> &datafusion::logical_expr::Signature {
            &self.0.signature
        }

        fn return_type(
            &self,
            _: &[datafusion::arrow::datatypes::DataType],
        ) -> datafusion::error::Result<datafusion::arrow::datatypes::DataType> {
            Ok(datafusion::arrow::datatypes::DataType::Float32)
        }

        fn coerce_types(
            &self,
            types: &[datafusion::arrow::datatypes::DataType],
        ) -> datafusion::error::Result<Vec<datafusion::arrow::datatypes::DataType>> {
            self.0.coerce(types)
        }

        fn invoke_with_args(
            &self,
            args: datafusion::logical_expr::ScalarFunctionArgs,
        ) -> datafusion::error::Result<datafusion::logical_expr::ColumnarValue> {
            self.0.invoke(&args)
        }

        fn documentation(&self) -> Option<&datafusion::logical_expr::Documentation> {
            self.doc()
        }
    };
}
pub(crate) use measure_function;
