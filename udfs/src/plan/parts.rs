//! Rows of several batches as one.

use std::sync::Arc;

use datafusion::{
    arrow::{
        array::{Array, ArrayRef, AsArray, RecordBatch},
        compute::{cast, concat, concat_batches},
        datatypes::{DataType, FieldRef, SchemaRef},
    },
    error::Result,
};

/// Texts of several batches as one column. Where their dictionaries do not fit together, the texts themselves.
pub(crate) fn join(parts: &[ArrayRef]) -> Result<ArrayRef> {
    let all = |parts: &[ArrayRef]| concat(&parts.iter().map(AsRef::as_ref).collect::<Vec<&dyn Array>>());
    match parts {
        [one] => Ok(Arc::clone(one)),
        parts if fit(parts) => Ok(all(parts)?),
        parts => {
            let texts = parts.iter().map(|part| cast(part, &plain(part.data_type())));
            Ok(all(&texts.collect::<Result<Vec<_>, _>>()?)?)
        }
    }
}

/// Rows as one batch, or as they are where dictionaries do not fit together: columns keep their types.
pub(crate) fn join_rows(schema: &SchemaRef, batches: Vec<RecordBatch>) -> Result<Vec<RecordBatch>> {
    let column = |n: usize| batches.iter().map(|batch| Arc::clone(batch.column(n))).collect::<Vec<_>>();
    if batches.len() < 2 || !(0..schema.fields().len()).all(|n| fit(&column(n))) {
        return Ok(batches);
    }
    Ok(vec![concat_batches(schema, &batches)?])
}

/// Whether dictionaries have keys for their values together. Arrow's `concat` fails where they have not, and panics
/// where values are views.
fn fit(parts: &[ArrayRef]) -> bool {
    let Some(first) = parts.first() else { return true };
    let DataType::Dictionary(keys, _) = first.data_type() else { return !has_small_keys(first.data_type()) };
    let Some(most) = most_values(keys) else { return true };
    let values: Vec<&ArrayRef> = parts.iter().map(|part| part.as_any_dictionary().values()).collect();
    let is_shared = values.windows(2).all(|two| Arc::ptr_eq(two[0], two[1]));
    is_shared || values.iter().map(|values| values.len()).sum::<usize>() <= most
}

/// Values that keys of this type can tell apart, if one may ever have more.
fn most_values(keys: &DataType) -> Option<usize> {
    match keys {
        DataType::Int8 => Some(i8::MAX as usize),
        DataType::UInt8 => Some(u8::MAX.into()),
        DataType::Int16 => Some(i16::MAX as usize),
        DataType::UInt16 => Some(u16::MAX.into()),
        _ => None,
    }
}

fn has_small_keys(kind: &DataType) -> bool {
    use DataType::*;
    match kind {
        Dictionary(keys, values) => most_values(keys).is_some() || has_small_keys(values),
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
fn plain(kind: &DataType) -> DataType {
    use DataType::*;
    let plain_item = |item: &FieldRef| {
        let kind = plain(item.data_type());
        Arc::new(item.as_ref().clone().with_data_type(kind))
    };
    match kind {
        Dictionary(_, values) => plain(values),
        List(item) => List(plain_item(item)),
        LargeList(item) => LargeList(plain_item(item)),
        ListView(item) => ListView(plain_item(item)),
        LargeListView(item) => LargeListView(plain_item(item)),
        FixedSizeList(item, size) => FixedSizeList(plain_item(item), *size),
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
    fn texts_whose_dictionaries_do_not_fit_together_are_joined() {
        let expected = join(&parts(|words| Arc::new(words))).unwrap();
        for encode in [small, views] {
            let joined = join(&parts(encode)).unwrap();
            assert_eq!(&cast(&joined, &DataType::Utf8).unwrap(), &expected);
        }
        let joined = join(&parts(lists)).unwrap();
        assert_eq!(joined.as_list::<i32>().values(), &expected);
        let large = |words: StringArray| Arc::new(words.iter().collect::<DictionaryArray<Int32Type>>()) as ArrayRef;
        let joined = join(&parts(large)).unwrap();
        assert_eq!(joined.data_type(), large(words(0)).data_type());
        assert_eq!(&cast(&joined, &DataType::Utf8).unwrap(), &expected);
    }

    #[test]
    fn rows_are_joined_where_their_dictionaries_fit_together() {
        let batches = |columns: Vec<ArrayRef>| {
            let schema = Schema::new(vec![Field::new("x", columns[0].data_type().clone(), true)]);
            let batch = |column| RecordBatch::try_new(Arc::new(schema.clone()), vec![column]).unwrap();
            columns.into_iter().map(batch).collect::<Vec<_>>()
        };
        let joined = |columns: Vec<ArrayRef>| {
            let batches = batches(columns);
            join_rows(&batches[0].schema(), batches).unwrap().iter().map(RecordBatch::num_rows).collect::<Vec<_>>()
        };
        assert_eq!(joined(parts(|words| Arc::new(words))), [300]);
        for encode in [small, views, lists] {
            assert_eq!(joined(parts(encode)), [100, 100, 100]);
        }
        // Of one dictionary, and of several that are small.
        let one = small(words(0));
        assert_eq!(joined(vec![one.slice(0, 50), one.slice(50, 50)]), [100]);
        let few = |n: usize| small(words(n).slice(0, 40));
        assert_eq!(joined(vec![few(0), few(100), few(200)]), [120]);
    }
}
