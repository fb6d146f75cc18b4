use std::sync::Arc;

use arrow::{
    array::{Array, ArrayRef, AsArray, RecordBatch},
    datatypes::{Float64Type, Int32Type, Int64Type, Schema, TimestampMillisecondType},
    util::display::array_value_to_string,
};
use futures::executor::block_on;
use proptest::prelude::*;

use super::*;
use crate::stream::{Message, TopicPartition};

/// Messages with these values.
pub(super) fn messages<V: AsRef<[u8]>>(values: &[Option<V>]) -> Messages {
    let mut messages = Messages::new(TopicPartition::new("reviews", 3), 100);
    for (offset, value) in (100..).zip(values) {
        let value = value.as_ref().map(AsRef::as_ref);
        messages.push(Message { offset, timestamp: Some(7), key: None, value, headers: &[] });
    }
    messages
}

/// Settings for JSON with these columns.
fn json(columns: &str) -> DecodeSettings {
    DecodeSettings { format: Format::Json, columns: columns.parse().unwrap(), ..DecodeSettings::default() }
}

fn decoded(settings: DecodeSettings, messages: &Messages) -> Decoded {
    let decoder = Decoder::new(settings).unwrap();
    let decoded = block_on(decoder.decode(messages)).unwrap();
    check(&decoder, &decoded, messages);
    decoded
}

/// What holds for any messages: the columns are those of the fields, and a rejected message has no text.
pub(super) fn check(decoder: &Decoder, decoded: &Decoded, messages: &Messages) {
    let schema = Schema::new(decoder.fields().to_vec());
    RecordBatch::try_new(Arc::new(schema), decoded.columns.clone()).unwrap();
    assert!(decoded.texts.as_string_opt::<i32>().is_some() && decoded.texts.len() == messages.len());
    assert!(decoded.bad.is_sorted_by(|(a, _), (b, _)| a < b));
    assert!(decoded.bad.iter().all(|(row, _)| decoded.texts.is_null(*row)));
}

pub(super) fn strings(column: &ArrayRef) -> Vec<Option<String>> {
    let shown = |row| column.is_valid(row).then(|| array_value_to_string(column, row).unwrap());
    (0..column.len()).map(shown).collect()
}

fn labels(decoded: &Decoded) -> Vec<(usize, &'static str)> {
    decoded.bad.iter().map(|(row, rejection)| (*row, rejection.label())).collect()
}

fn texts(decoded: &Decoded) -> Vec<Option<&str>> {
    decoded.texts.as_string::<i32>().iter().collect()
}

/// Ten kinds of poison, each between two good messages; labels by hand.
#[test]
fn each_kind_of_poison_has_its_label_and_harms_nobody() {
    let long = format!("{{\"text\": {:?}}}", "x".repeat(41));
    let poison: [(Option<&[u8]>, &str); 12] = [
        (None, "tombstone"),
        (Some(b"{\"text\": \"caf\xe9\"}"), "not_utf8"),
        (Some(b""), "bad_json"),
        (Some(b"{\"text\": \"cut"), "bad_json"),
        (Some(b"{\"text\": \"a\"} {}"), "bad_json"),
        (Some(b"{\"Text\": \"a\"}"), "no_text"),
        (Some(b"[\"text\", \"a\"]"), "no_text"),
        (Some(b"{\"text\": [\"a\"]}"), "wrong_type"),
        (Some(b"{\"text\": \"a\", \"n\": 9223372036854775808}"), "wrong_type"),
        (Some(b"{\"text\": \"a\", \"n\": {\"secret\": 1}}"), "wrong_type"),
        (Some(long.as_bytes()), "text_too_large"),
        (Some(b"{\"text\": \"\\ud83d\", \"n\": nul}"), "bad_json"),
    ];
    let good: &[u8] = b"{\"text\": \"good\", \"n\": 7}";
    let values: Vec<Option<&[u8]>> =
        poison.iter().flat_map(|(value, _)| [Some(good), *value]).chain([Some(good)]).collect();
    let decoded = decoded(DecodeSettings { max_text_bytes: 40, ..json("n=/n:int64") }, &messages(&values));
    let expected: Vec<_> = poison.iter().enumerate().map(|(at, (_, label))| (2 * at + 1, *label)).collect();
    assert_eq!(labels(&decoded), expected);
    let is_good = |row: usize| row.is_multiple_of(2);
    assert_eq!(texts(&decoded), (0..25).map(|row| is_good(row).then_some("good")).collect::<Vec<_>>());
    let numbers = decoded.columns[0].as_primitive::<Int64Type>();
    assert_eq!(numbers.iter().collect::<Vec<_>>(), (0..25).map(|row| is_good(row).then_some(7)).collect::<Vec<_>>());
    for (_, rejection) in &decoded.bad {
        assert!(!rejection.to_string().contains("secret") && !rejection.to_string().contains("cut"), "{rejection}");
    }
}

/// By hand; the escapes are those of `source/escapes.rs`: D83D DE00 is U+1F600, half a pair is U+FFFD.
#[test]
fn texts_of_json() {
    let values = [
        r#"{"body": {"parts": ["a", "\ud83d\ude00\ud83d\n"]}}"#,
        r#"{"body": {"parts": ["a", null]}}"#,
        r#"{"body": {"parts": ["a", 1.50]}}"#,
        r#"{"body": {"parts": ["a", ""]}}"#,
    ];
    let text_path = Some(Pointer::parse("/body/parts/1").unwrap());
    let settings = DecodeSettings { text_path, ..json("all") };
    let decoded = decoded(settings.clone(), &messages(&values.map(Some)));
    assert_eq!(texts(&decoded), [Some("\u{1f600}\u{fffd}\n"), None, Some("1.50"), Some("")]);
    assert!(decoded.bad.is_empty());
    let whole = strings(&decoded.columns[0]);
    assert_eq!(whole[0].as_deref(), Some("{\"body\": {\"parts\": [\"a\", \"\u{1f600}\u{fffd}\\n\"]}}"));
    assert_eq!(whole[2].as_deref(), Some(values[2]));
    let names: Vec<_> = Decoder::new(settings).unwrap().fields().iter().map(|field| field.name().clone()).collect();
    assert_eq!(names, ["message", "text", "_topic", "_partition", "_offset", "_timestamp"]);
}

#[test]
fn messages_that_are_texts() {
    let values: [Option<&[u8]>; 5] =
        [Some("Gr\u{fc}\u{df}e".as_bytes()), None, Some(b""), Some(b"a\xff"), Some(b"toolong!!")];
    let decoded = decoded(DecodeSettings { max_text_bytes: 8, ..DecodeSettings::default() }, &messages(&values));
    assert_eq!(texts(&decoded), [Some("Gr\u{fc}\u{df}e"), None, Some(""), None, None]);
    assert_eq!(labels(&decoded), [(1, "tombstone"), (3, "not_utf8"), (4, "text_too_large")]);
    assert_eq!(decoded.bad[1].1.to_string(), "not UTF-8: invalid at byte 1 of 2");
}

#[test]
fn keys_headers_and_origin() {
    let mut messages = Messages::new(TopicPartition::new("reviews", 3), 7);
    let headers = [("a".to_owned(), Some(b"\xff".to_vec())), ("a".to_owned(), None)];
    let message = Message { offset: 7, timestamp: Some(12), key: Some(b"k"), value: Some(b"x"), headers: &headers };
    messages.push(message);
    messages.push(Message { offset: 9, timestamp: None, key: Some(b"\xff"), headers: &[], ..message });
    messages.push(Message { offset: 10, key: None, ..message });
    let settings = DecodeSettings { keys: Keys::Text, headers: true, keep_text: false, ..DecodeSettings::default() };
    let text_keys = decoded(settings.clone(), &messages);
    assert_eq!(labels(&text_keys), [(1, "wrong_type")]);
    let [keys, lists, topics, partitions, offsets, times] = text_keys.columns.as_slice() else { panic!("six columns") };
    assert_eq!(strings(keys), [Some("k".to_owned()), None, None]);
    let lists = lists.as_list::<i32>();
    assert_eq!((lists.value_length(0), lists.value_length(1), lists.value_length(2)), (2, 0, 2));
    let pairs = lists.value(0);
    let (names, values) = (pairs.as_struct().column(0), pairs.as_struct().column(1).as_binary::<i32>());
    assert_eq!(strings(names), [Some("a".to_owned()), Some("a".to_owned())]);
    assert_eq!(values.iter().collect::<Vec<_>>(), [Some(&b"\xff"[..]), None]);
    assert_eq!(strings(topics), vec![Some("reviews".to_owned()); 3]);
    assert_eq!(partitions.as_primitive::<Int32Type>().values(), &[3, 3, 3]);
    assert_eq!(offsets.as_primitive::<Int64Type>().values(), &[7, 9, 10]);
    assert_eq!(times.as_primitive::<TimestampMillisecondType>().iter().collect::<Vec<_>>(), [Some(12), None, Some(12)]);
    let bytes = decoded(DecodeSettings { keys: Keys::Binary, ..settings }, &messages);
    let keys = bytes.columns[0].as_binary::<i32>();
    assert!(bytes.bad.is_empty() && keys.iter().eq([Some(&b"k"[..]), Some(b"\xff"), None]));
}

/// By hand: backslashes make commas and backslashes parts of a pointer, and nothing else.
#[test]
fn pointers_may_hold_commas() {
    let columns: Columns = r"a=/x\,y/z:int32, b=/p\\,c=/q\r\,:json".parse().unwrap();
    let Columns::Listed(listed) = columns else { panic!("{columns:?}") };
    let written: Vec<_> = listed.iter().map(|c| (&*c.name, c.pointer.to_string(), c.kind)).collect();
    let expected = [
        ("a", "/x,y/z".to_owned(), ColumnType::Int32),
        ("b", r"/p\".to_owned(), ColumnType::String),
        ("c", r"/q\r,".to_owned(), ColumnType::Json),
    ];
    assert_eq!(written, expected);
    let found = decoded(
        json(r"city=/home\,address/city"),
        &messages(&[Some(br#"{"text": "t", "home,address": {"city": "Ulm"}}"#)]),
    );
    assert_eq!(strings(&found.columns[0]), [Some("Ulm".to_owned())]);
}

#[test]
fn settings_that_cannot_work_are_refused() {
    for (columns, expected) in [
        ("a", "name=/pointer:type"),
        ("=/a", "has no name"),
        ("a=b", "does not begin with /"),
        ("a=/a~", "after ~ comes"),
        ("a=/a:integer", "possible are string, int64, int32, float64, float32, bool, timestamp, date, json"),
    ] {
        let error = columns.parse::<Columns>().unwrap_err();
        assert!(error.contains(expected), "{columns}: {error}");
    }
    let columns: Columns = "title=/dc:title:string, n=/n:int32".parse().unwrap();
    let Columns::Listed(listed) = columns else { panic!("{columns:?}") };
    assert_eq!((listed[0].pointer.to_string().as_str(), listed[1].kind), ("/dc:title", ColumnType::Int32));
    let schemas = || Some(AvroSchemas::Raw("x.avsc".into()));
    for (settings, expected) in [
        (json("_Offset=/a"), "taken by the output"),
        (json("partition=/a"), "taken by the output"),
        (json("a=/a,A=/b"), "stands twice"),
        (json("text=/a"), "stands twice"),
        (DecodeSettings { format: Format::Text, ..json("a=/a") }, "--columns needs"),
        (DecodeSettings { format: Format::Avro, ..json("") }, "needs schemas"),
        (DecodeSettings { schemas: schemas(), ..json("") }, "not avro"),
        (DecodeSettings { format: Format::Avro, schemas: schemas(), ..json("") }, "--avro-schema x.avsc"),
        (DecodeSettings { max_text_bytes: 0, ..json("") }, "is 0"),
    ] {
        let error = Decoder::new(settings.clone()).unwrap_err();
        assert!(
            matches!(&error, StreamError::Settings { message, help: Some(_) } if message.contains(expected)),
            "{error}"
        );
    }
    assert!(Decoder::new(DecodeSettings { keep_text: false, ..json("text=/a") }).is_ok());
    assert!("xml".parse::<Format>().unwrap_err().contains("text, json, avro"));
}

fn payload() -> impl Strategy<Value = Option<Vec<u8>>> {
    let values =
        r#"\{"text": ?("[a-z\\u00d8"]{0,9}"|null|-?[0-9]{1,25}|\[1\]), ?"n": ?(-?[0-9]{1,20}|"x"|null|\{"a": 1\})\}"#;
    prop_oneof![
        Just(None),
        prop::collection::vec(any::<u8>(), 0..40).prop_map(Some),
        values.prop_map(|json| Some(json.into_bytes())),
        (values, any::<prop::sample::Index>(), any::<u8>()).prop_map(|(json, at, byte)| {
            let mut bytes = json.into_bytes();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            Some(bytes)
        }),
    ]
}

proptest! {
    /// Any bytes: no panic, no shifted row, and each message is decoded as it is alone.
    #[test]
    fn a_message_is_decoded_as_if_it_were_alone(values in prop::collection::vec(payload(), 0..12)) {
        for settings in [json("n=/n:int64,all=:json,s=/n:string"), DecodeSettings::default()] {
            let together = decoded(settings.clone(), &messages(&values));
            for (row, value) in values.iter().enumerate() {
                let alone = decoded(settings.clone(), &messages(std::slice::from_ref(value)));
                let of_row: Vec<_> = together.bad.iter().filter(|(bad, _)| *bad == row).map(|(_, why)| why).collect();
                prop_assert_eq!(of_row, alone.bad.iter().map(|(_, why)| why).collect::<Vec<_>>());
                prop_assert_eq!(&together.texts.slice(row, 1), &alone.texts);
                // The offsets differ.
                for (all, one) in together.columns.iter().zip(&alone.columns).take(3) {
                    prop_assert_eq!(&all.slice(row, 1), one);
                }
            }
        }
    }

    /// Expected: the values that serde_json wrote. (Its own parser rounds some floats in the last bit.)
    #[test]
    fn texts_and_numbers_are_those_of_the_document(text in any::<String>(), n in any::<i64>(), x in any::<f64>()) {
        let document = serde_json::json!({"text": text, "n": n, "x": x, "deep": [{"text": "no"}]});
        let decoded = decoded(json("n=/n:int64,x=/x:float64,no=/deep/0/text"), &messages(&[Some(document.to_string())]));
        prop_assert!(decoded.bad.is_empty(), "{:?}", decoded.bad);
        prop_assert_eq!(texts(&decoded), [Some(text.as_str())]);
        prop_assert_eq!(decoded.columns[0].as_primitive::<Int64Type>().value(0), n);
        prop_assert_eq!(decoded.columns[1].as_primitive::<Float64Type>().value(0), x);
        prop_assert_eq!(&strings(&decoded.columns[2])[0], &Some("no".to_owned()));
    }
}
