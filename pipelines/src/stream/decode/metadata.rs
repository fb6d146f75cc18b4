//! Columns about messages: where they are from, their time, keys and headers.

use std::sync::Arc;

use arrow::{
    array::{
        ArrayRef, BinaryBuilder, Int32Array, Int64Array, ListBuilder, StringArray, StringBuilder, StructBuilder,
        TimestampMillisecondArray,
    },
    datatypes::{DataType, Field, Fields, TimeUnit},
};

use crate::stream::Messages;

/// Name of the column of keys.
pub(super) const KEY: &str = "_key";
/// Name of the column of headers.
const HEADERS: &str = "_headers";

/// Columns of every message, after those of the user: `_topic`, `_partition`, `_offset` and `_timestamp`.
pub(super) fn fields() -> [Field; 4] {
    let time = DataType::Timestamp(TimeUnit::Millisecond, Some("UTC".into()));
    [
        Field::new("_topic", DataType::Utf8, false),
        Field::new("_partition", DataType::Int32, false),
        Field::new("_offset", DataType::Int64, false),
        Field::new("_timestamp", time, true),
    ]
}

/// The values of [`fields`].
pub(super) fn columns(messages: &Messages) -> [ArrayRef; 4] {
    let source = &messages.source;
    let topics = StringArray::from_iter_values(std::iter::repeat_n(&*source.topic, messages.len()));
    let times: TimestampMillisecondArray = messages.iter().map(|message| message.timestamp).collect();
    [
        Arc::new(topics),
        Arc::new(Int32Array::from_value(source.partition, messages.len())),
        Arc::new(Int64Array::from_iter_values(messages.iter().map(|message| message.offset))),
        Arc::new(times.with_timezone("UTC")),
    ]
}

/// Keys as bytes.
pub(super) fn binary_keys(messages: &Messages) -> ArrayRef {
    let mut keys = BinaryBuilder::new();
    messages.iter().for_each(|message| keys.append_option(message.key));
    Arc::new(keys.finish())
}

/// Keys as strings, and the rows whose keys are not UTF-8.
pub(super) fn text_keys(messages: &Messages) -> (ArrayRef, Vec<usize>) {
    let (mut keys, mut bad) = (StringBuilder::new(), Vec::new());
    for (row, message) in messages.iter().enumerate() {
        let key = message.key.map(str::from_utf8);
        if let Some(Err(_)) = key {
            bad.push(row);
        }
        keys.append_option(key.and_then(Result::ok));
    }
    (Arc::new(keys.finish()), bad)
}

fn header_fields() -> Fields {
    vec![Field::new("key", DataType::Utf8, false), Field::new("value", DataType::Binary, true)].into()
}

fn header_item() -> Field {
    Field::new("item", DataType::Struct(header_fields()), false)
}

/// The column of headers: a list, as names may repeat and their order counts.
pub(super) fn header_field() -> Field {
    Field::new(HEADERS, DataType::List(Arc::new(header_item())), false)
}

/// The values of [`header_field`].
pub(super) fn headers(messages: &Messages) -> ArrayRef {
    let parts =
        StructBuilder::new(header_fields(), vec![Box::new(StringBuilder::new()), Box::new(BinaryBuilder::new())]);
    let mut lists = ListBuilder::new(parts).with_field(header_item());
    for message in messages.iter() {
        for (name, value) in message.headers {
            let header = lists.values();
            if let Some(names) = header.field_builder::<StringBuilder>(0) {
                names.append_value(name);
            }
            if let Some(values) = header.field_builder::<BinaryBuilder>(1) {
                values.append_option(value.as_deref());
            }
            header.append(true);
        }
        lists.append(true);
    }
    Arc::new(lists.finish())
}
