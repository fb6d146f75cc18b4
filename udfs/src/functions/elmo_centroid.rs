//! `elmo_centroid(embedding)`: an aggregate, the mean of vectors.

use std::sync::Arc;

use datafusion::{
    arrow::{
        array::{Array, ArrayRef, AsArray, BooleanArray, FixedSizeListArray, Float32Array, Float64Array, Int64Array},
        buffer::NullBuffer,
        compute::cast,
        datatypes::{DataType, Field, FieldRef, Float32Type, Float64Type, Int64Type},
    },
    common::{ScalarValue, internal_err, not_impl_err, plan_err},
    error::Result,
    logical_expr::{
        Accumulator, AggregateUDFImpl, Documentation, EmitTo, GroupsAccumulator, Signature, Volatility,
        function::{AccumulatorArgs, StateFieldsArgs},
    },
};
use datafusion_macros::user_doc;

/// The name in SQL.
pub const NAME: &str = "elmo_centroid";

/// The aggregate: `FixedSizeList<Float32, D>`, with the field of its argument.
#[user_doc(
    doc_section(label = "ELMo Functions"),
    description = "Returns the mean of the vectors of a group, summed in double precision, `FixedSizeList<Float32, D>`. Ignores NULL vectors. Returns NULL if there are no other vectors.",
    syntax_example = "elmo_centroid(embedding)",
    sql_example = r"```sql
> SELECT label, elmo_centroid(elmo_embed(text)) AS middle FROM reviews GROUP BY label;
```",
    argument(
        name = "embedding",
        description = "A vector, `FixedSizeList<Float32, D>`, such as the result of elmo_embed."
    )
)]
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct ElmoCentroid {
    signature: Signature,
}

impl Default for ElmoCentroid {
    fn default() -> Self {
        Self { signature: Signature::user_defined(Volatility::Immutable) }
    }
}

impl AggregateUDFImpl for ElmoCentroid {
    fn name(&self) -> &str {
        NAME
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, types: &[DataType]) -> Result<DataType> {
        let [data_type] = types else { return plan_err!("{NAME} needs a vector: {NAME}(embedding)") };
        Ok(data_type.clone())
    }

    fn return_field(&self, fields: &[FieldRef]) -> Result<FieldRef> {
        let [field] = fields else { return plan_err!("{NAME} needs a vector: {NAME}(embedding)") };
        Ok(Arc::new(field.as_ref().clone().with_name(NAME).with_nullable(true)))
    }

    fn coerce_types(&self, types: &[DataType]) -> Result<Vec<DataType>> {
        match types {
            [DataType::FixedSizeList(item, n)] if item.data_type().is_floating() => {
                let item = Arc::new(item.as_ref().clone().with_data_type(DataType::Float32));
                Ok(vec![DataType::FixedSizeList(item, *n)])
            }
            // The dimension is not known.
            [DataType::Null] => Ok(vec![DataType::new_fixed_size_list(DataType::Float32, 1, true)]),
            [other @ (DataType::List(_) | DataType::LargeList(_))] => {
                let remedy = "write arrow_cast(embedding, 'FixedSizeList(N, Float32)') with N dimensions";
                plan_err!("{NAME}: a vector is a list of fixed size, not {other}; {remedy}")
            }
            [other] => plan_err!("{NAME}: a vector is a list of fixed size, such as elmo_embed returns, not {other}"),
            _ => plan_err!("{NAME} needs one vector: {NAME}(embedding)"),
        }
    }

    fn accumulator(&self, args: AccumulatorArgs) -> Result<Box<dyn Accumulator>> {
        Ok(Box::new(SingleGroup(Sums::new(&args)?)))
    }

    fn state_fields(&self, args: StateFieldsArgs) -> Result<Vec<FieldRef>> {
        let DataType::FixedSizeList(_, n) = args.return_field.data_type() else {
            return internal_err!("{NAME} of {}", args.return_field.data_type());
        };
        Ok(vec![
            Arc::new(Field::new(format!("{}[sums]", args.name), sums_type(*n), false)),
            Arc::new(Field::new(format!("{}[count]", args.name), DataType::Int64, false)),
        ])
    }

    fn groups_accumulator_supported(&self, _: AccumulatorArgs) -> bool {
        true
    }

    fn create_groups_accumulator(&self, args: AccumulatorArgs) -> Result<Box<dyn GroupsAccumulator>> {
        Ok(Box::new(Sums::new(&args)?))
    }

    fn documentation(&self) -> Option<&Documentation> {
        self.doc()
    }
}

fn sums_item() -> FieldRef {
    Arc::new(Field::new("item", DataType::Float64, false))
}

fn sums_type(n: i32) -> DataType {
    DataType::FixedSizeList(sums_item(), n)
}

/// Sums and counts of vectors, per group.
#[derive(Debug)]
struct Sums {
    /// The item field of the result's lists.
    item: FieldRef,
    /// Numbers per vector.
    width: usize,
    /// (groups, width)
    sums: Vec<f64>,
    /// (groups)
    counts: Vec<i64>,
}

impl Sums {
    fn new(args: &AccumulatorArgs) -> Result<Self> {
        if args.is_distinct {
            return not_impl_err!("{NAME}(DISTINCT …); group by the vectors in a subquery");
        }
        let DataType::FixedSizeList(item, n) = args.return_field.data_type() else {
            return internal_err!("{NAME} of {}", args.return_field.data_type());
        };
        Ok(Self { item: Arc::clone(item), width: *n as usize, sums: Vec::new(), counts: Vec::new() })
    }

    fn resize(&mut self, groups: usize) {
        self.sums.resize(groups * self.width, 0.0);
        self.counts.resize(groups, 0);
    }

    fn group_sums(&mut self, group: usize) -> &mut [f64] {
        &mut self.sums[group * self.width..(group + 1) * self.width]
    }

    /// Adds (`sign` 1) or subtracts (`sign` -1) the vectors of the rows that `filter` selects.
    fn add(
        &mut self,
        vectors: &ArrayRef,
        group: impl Fn(usize) -> usize,
        filter: Option<&BooleanArray>,
        sign: i64,
    ) -> Result<()> {
        let lists = vectors.as_fixed_size_list();
        let numbers = cast(lists.values(), &DataType::Float32)?;
        let numbers = numbers.as_primitive::<Float32Type>();
        let selected = |row: usize| filter.is_none_or(|filter| filter.is_valid(row) && filter.value(row));
        for row in (0..lists.len()).filter(|&row| lists.is_valid(row) && selected(row)) {
            let start = lists.value_offset(row) as usize;
            if numbers.nulls().is_some_and(|nulls| nulls.slice(start, self.width).null_count() > 0) {
                continue;
            }
            let vector = &numbers.values()[start..start + self.width];
            let group = group(row);
            let sums = self.group_sums(group).iter_mut();
            sums.zip(vector).for_each(|(sum, value)| *sum += sign as f64 * f64::from(*value));
            self.counts[group] += sign;
            if self.counts[group] == 0 {
                // The window frame is empty: clears the rounding errors of additions and subtractions.
                self.group_sums(group).fill(0.0);
            }
        }
        Ok(())
    }

    fn merge(&mut self, states: &[ArrayRef], group: impl Fn(usize) -> usize) -> Result<()> {
        let [sums, counts] = states else { return internal_err!("the state of {NAME} has two columns") };
        let (lists, counts) = (sums.as_fixed_size_list(), counts.as_primitive::<Int64Type>());
        let numbers = lists.values().as_primitive::<Float64Type>().values();
        for row in 0..lists.len() {
            let start = lists.value_offset(row) as usize;
            let partial = &numbers[start..start + self.width];
            let group = group(row);
            self.group_sums(group).iter_mut().zip(partial).for_each(|(sum, more)| *sum += more);
            self.counts[group] += counts.value(row);
        }
        Ok(())
    }

    fn take(&mut self, emit_to: EmitTo) -> (Vec<f64>, Vec<i64>) {
        let counts = emit_to.take_needed(&mut self.counts);
        let numbers = match emit_to {
            EmitTo::All => EmitTo::All,
            EmitTo::First(n) => EmitTo::First(n * self.width),
        };
        (numbers.take_needed(&mut self.sums), counts)
    }

    fn means(&self, sums: &[f64], counts: &[i64]) -> Result<ArrayRef> {
        let valid: Vec<bool> = counts.iter().map(|count| *count > 0).collect();
        let groups = sums.chunks_exact(self.width.max(1)).zip(counts);
        let mean = |(sums, count): (&[f64], &i64)| {
            let count = (*count).max(1) as f64;
            sums.iter().map(|sum| (sum / count) as f32).collect::<Vec<_>>()
        };
        let values: Vec<f32> = groups.flat_map(mean).collect();
        let values: ArrayRef = Arc::new(Float32Array::from(values));
        let (item, width) = (Arc::clone(&self.item), self.width as i32);
        let nulls = Some(NullBuffer::from(valid));
        Ok(Arc::new(FixedSizeListArray::try_new_with_length(item, width, values, nulls, counts.len())?))
    }

    fn states(&self, sums: Vec<f64>, counts: Vec<i64>) -> Result<Vec<ArrayRef>> {
        let (rows, width) = (counts.len(), self.width as i32);
        let values = Arc::new(Float64Array::from(sums));
        let sums = FixedSizeListArray::try_new_with_length(sums_item(), width, values, None, rows)?;
        Ok(vec![Arc::new(sums), Arc::new(Int64Array::from(counts))])
    }
}

impl GroupsAccumulator for Sums {
    fn update_batch(
        &mut self,
        values: &[ArrayRef],
        group_indices: &[usize],
        opt_filter: Option<&BooleanArray>,
        total_num_groups: usize,
    ) -> Result<()> {
        self.resize(total_num_groups);
        self.add(&values[0], |row| group_indices[row], opt_filter, 1)
    }

    fn evaluate(&mut self, emit_to: EmitTo) -> Result<ArrayRef> {
        let (sums, counts) = self.take(emit_to);
        self.means(&sums, &counts)
    }

    fn state(&mut self, emit_to: EmitTo) -> Result<Vec<ArrayRef>> {
        let (sums, counts) = self.take(emit_to);
        self.states(sums, counts)
    }

    fn merge_batch(&mut self, values: &[ArrayRef], group_indices: &[usize], total_num_groups: usize) -> Result<()> {
        self.resize(total_num_groups);
        self.merge(values, |row| group_indices[row])
    }

    fn convert_to_state(&self, values: &[ArrayRef], opt_filter: Option<&BooleanArray>) -> Result<Vec<ArrayRef>> {
        let (item, width) = (Arc::clone(&self.item), self.width);
        let mut rows = Self { item, width, sums: Vec::new(), counts: Vec::new() };
        rows.resize(values[0].len());
        rows.add(&values[0], |row| row, opt_filter, 1)?;
        let (sums, counts) = rows.take(EmitTo::All);
        self.states(sums, counts)
    }

    fn size(&self) -> usize {
        self.sums.capacity() * size_of::<f64>() + self.counts.capacity() * size_of::<i64>()
    }
}

/// An accumulator for one group.
#[derive(Debug)]
struct SingleGroup(Sums);

impl Accumulator for SingleGroup {
    fn update_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
        self.0.resize(1);
        self.0.add(&values[0], |_| 0, None, 1)
    }

    fn evaluate(&mut self) -> Result<ScalarValue> {
        self.0.resize(1);
        ScalarValue::try_from_array(&self.0.means(&self.0.sums, &self.0.counts)?, 0)
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn state(&mut self) -> Result<Vec<ScalarValue>> {
        self.0.resize(1);
        let states = self.0.states(self.0.sums.clone(), self.0.counts.clone())?;
        states.iter().map(|state| ScalarValue::try_from_array(state, 0)).collect()
    }

    fn merge_batch(&mut self, states: &[ArrayRef]) -> Result<()> {
        self.0.resize(1);
        self.0.merge(states, |_| 0)
    }

    /// For sliding window frames.
    fn retract_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
        self.0.add(&values[0], |_| 0, None, -1)
    }

    fn supports_retract_batch(&self) -> bool {
        true
    }
}
