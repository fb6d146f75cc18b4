//! Concatenates the rows of several batches.

use std::sync::Arc;

use datafusion::{
    arrow::{
        array::{Array, ArrayRef, AsArray, RecordBatch},
        compute::{cast, concat, concat_batches},
        datatypes::{DataType, FieldRef, SchemaRef},
    },
    error::Result,
};

/// Concatenates texts. If the values of dictionaries would overflow their keys, the result has no dictionary.
pub(super) fn concat_texts(parts: &[ArrayRef]) -> Result<ArrayRef> {
    let concat_all = |parts: &[ArrayRef]| concat(&parts.iter().map(AsRef::as_ref).collect::<Vec<&dyn Array>>());
    match parts {
        [one] => Ok(Arc::clone(one)),
        parts if keys_suffice(parts) => Ok(concat_all(parts)?),
        parts => {
            let texts = parts.iter().map(|part| cast(part, &without_dictionaries(part.data_type())));
            Ok(concat_all(&texts.collect::<Result<Vec<_>, _>>()?)?)
        }
    }
}

/// Concatenates batches. If the values of dictionaries would overflow their keys, returns the batches as they are:
/// columns keep their types.
pub(super) fn concat_rows(schema: &SchemaRef, batches: Vec<RecordBatch>) -> Result<Vec<RecordBatch>> {
    let column = |n: usize| batches.iter().map(|batch| Arc::clone(batch.column(n))).collect::<Vec<_>>();
    if batches.len() < 2 || !(0..schema.fields().len()).all(|n| keys_suffice(&column(n))) {
        return Ok(batches);
    }
    Ok(vec![concat_batches(schema, &batches)?])
}

/// Whether the keys of dictionaries can index the values of all parts. If not, Arrow's `concat` fails, and panics if
/// the values are views.
fn keys_suffice(parts: &[ArrayRef]) -> bool {
    let Some(first) = parts.first() else { return true };
    let DataType::Dictionary(keys, _) = first.data_type() else { return !has_small_keys(first.data_type()) };
    let Some(max) = max_values(keys) else { return true };
    let values: Vec<&ArrayRef> = parts.iter().map(|part| part.as_any_dictionary().values()).collect();
    let is_shared = values.windows(2).all(|two| Arc::ptr_eq(two[0], two[1]));
    is_shared || values.iter().map(|values| values.len()).sum::<usize>() <= max
}

/// Maximum number of values for keys of this type. `None` when it cannot be exceeded in practice.
fn max_values(keys: &DataType) -> Option<usize> {
    match keys {
        DataType::Int8 => Some(i8::MAX as usize),
        DataType::UInt8 => Some(u8::MAX.into()),
        DataType::Int16 => Some(i16::MAX as usize),
        DataType::UInt16 => Some(u16::MAX.into()),
        _ => None,
    }
}

fn has_small_keys(data_type: &DataType) -> bool {
    use DataType::*;
    match data_type {
        Dictionary(keys, values) => max_values(keys).is_some() || has_small_keys(values),
        List(item) | LargeList(item) | ListView(item) | LargeListView(item) | FixedSizeList(item, _) | Map(item, _) => {
            has_small_keys(item.data_type())
        }
        RunEndEncoded(_, values) => has_small_keys(values.data_type()),
        Struct(fields) => fields.iter().any(|field| has_small_keys(field.data_type())),
        Union(fields, _) => fields.iter().any(|(_, field)| has_small_keys(field.data_type())),
        _ => false,
    }
}

/// The type of a text, or of a list of tokens, without dictionaries.
fn without_dictionaries(data_type: &DataType) -> DataType {
    use DataType::*;
    let convert = |item: &FieldRef| {
        let data_type = without_dictionaries(item.data_type());
        Arc::new(item.as_ref().clone().with_data_type(data_type))
    };
    match data_type {
        Dictionary(_, values) => without_dictionaries(values),
        List(item) => List(convert(item)),
        LargeList(item) => LargeList(convert(item)),
        ListView(item) => ListView(convert(item)),
        LargeListView(item) => LargeListView(convert(item)),
        FixedSizeList(item, size) => FixedSizeList(convert(item), *size),
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use datafusion::arrow::{
        array::{DictionaryArray, Int8Array, ListArray, StringArray, StringViewArray},
        buffer::OffsetBuffer,
        datatypes::{Field, Int8Type, Int32Type, Schema},
    };

    fn words(first: usize) -> StringArray {
        (first..first + 100).map(|n| Some(format!("word {n}"))).collect()
    }

    /// Three times 100 words.
    fn parts(encode: impl Fn(StringArray) -> ArrayRef) -> Vec<ArrayRef> {
        [0, 100, 200].into_iter().map(|first| encode(words(first))).collect()
    }

    fn small(words: StringArray) -> ArrayRef {
        Arc::new(words.iter().collect::<DictionaryArray<Int8Type>>())
    }

    fn views(words: StringArray) -> ArrayRef {
        let values: StringViewArray = words.iter().collect();
        Arc::new(DictionaryArray::new(Int8Array::from_iter_values(0..100), Arc::new(values)))
    }

    fn lists(words: StringArray) -> ArrayRef {
        let tokens = small(words);
        let item = Arc::new(Field::new_list_field(tokens.data_type().clone(), true));
        Arc::new(ListArray::new(item, OffsetBuffer::from_lengths([1; 100]), tokens, None))
    }

    #[test]
    fn texts_whose_dictionaries_overflow_are_concatenated() {
        let expected = concat_texts(&parts(|words| Arc::new(words))).unwrap();
        for encode in [small, views] {
            let concatenated = concat_texts(&parts(encode)).unwrap();
            assert_eq!(&cast(&concatenated, &DataType::Utf8).unwrap(), &expected);
        }
        let concatenated = concat_texts(&parts(lists)).unwrap();
        assert_eq!(concatenated.as_list::<i32>().values(), &expected);
        let large = |words: StringArray| Arc::new(words.iter().collect::<DictionaryArray<Int32Type>>()) as ArrayRef;
        let concatenated = concat_texts(&parts(large)).unwrap();
        assert_eq!(concatenated.data_type(), large(words(0)).data_type());
        assert_eq!(&cast(&concatenated, &DataType::Utf8).unwrap(), &expected);
    }

    #[test]
    fn rows_are_concatenated_unless_their_dictionaries_overflow() {
        let batches = |columns: Vec<ArrayRef>| {
            let schema = Schema::new(vec![Field::new("x", columns[0].data_type().clone(), true)]);
            let batch = |column| RecordBatch::try_new(Arc::new(schema.clone()), vec![column]).unwrap();
            columns.into_iter().map(batch).collect::<Vec<_>>()
        };
        let concatenated = |columns: Vec<ArrayRef>| {
            let batches = batches(columns);
            concat_rows(&batches[0].schema(), batches).unwrap().iter().map(RecordBatch::num_rows).collect::<Vec<_>>()
        };
        assert_eq!(concatenated(parts(|words| Arc::new(words))), [300]);
        for encode in [small, views, lists] {
            assert_eq!(concatenated(parts(encode)), [100, 100, 100]);
        }
        // One shared dictionary, and several small ones.
        let one = small(words(0));
        assert_eq!(concatenated(vec![one.slice(0, 50), one.slice(50, 50)]), [100]);
        let few = |n: usize| small(words(n).slice(0, 40));
        assert_eq!(concatenated(vec![few(0), few(100), few(200)]), [120]);
    }
}
