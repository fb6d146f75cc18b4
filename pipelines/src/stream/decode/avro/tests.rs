//! The data of `tests/fixtures/avro/messages.json` were written by fastavro; `tests/reference/avro_messages.py` shows the
//! values.

use std::{
    io::{BufRead, BufReader, Write},
    net::TcpListener,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use arrow::array::AsArray;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::super::{
    AvroSchemas, Columns, DecodeSettings, Decoded, Decoder, Format, Pointer, RegistrySettings, Rejection,
    tests::{check, messages, strings},
};
use crate::{
    error::{Exit, Fault},
    stream::StreamError,
};

fn fixture() -> Value {
    serde_json::from_str(include_str!("../../../../../tests/fixtures/avro/messages.json")).unwrap()
}

fn bytes(hex: &Value) -> Vec<u8> {
    let hex = hex.as_str().unwrap();
    (0..hex.len() / 2).map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap()).collect()
}

/// Confluent's framing.
fn framed(id: u32, datum: &[u8]) -> Vec<u8> {
    [&[0], &id.to_be_bytes()[..], datum].concat()
}

fn settings(schemas: AvroSchemas, columns: &str) -> DecodeSettings {
    let columns: Columns = columns.parse().unwrap();
    DecodeSettings { format: Format::Avro, schemas: Some(schemas), columns, ..DecodeSettings::default() }
}

fn registry(url: &str) -> AvroSchemas {
    AvroSchemas::Registry(RegistrySettings { url: url.to_owned(), user_info: None })
}

async fn decoded(decoder: &Decoder, values: &[Vec<u8>]) -> Decoded {
    let messages = messages(&values.iter().map(Some).collect::<Vec<_>>());
    let decoded = decoder.decode(&messages).await.unwrap();
    check(decoder, &decoded, &messages);
    decoded
}

fn labels(decoded: &Decoded) -> Vec<(usize, &'static str)> {
    decoded.bad.iter().map(|(row, rejection)| (*row, rejection.label())).collect()
}

fn some(values: &[&str]) -> Vec<Option<String>> {
    values.iter().map(|value| Some((*value).to_owned())).collect()
}

/// Answers requests as `answer` says: from the path and the authorization, a status and a body. Returns the address and the
/// number of requests.
fn fake(answer: impl Fn(&str, Option<&str>) -> (u16, String) + Send + 'static) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let lines: Vec<String> =
                BufReader::new(&stream).lines().map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
            let Some(path) = lines.first().and_then(|line| line.split(' ').nth(1)) else { continue };
            let user = lines.iter().find_map(|line| line.strip_prefix("authorization: "));
            counted.fetch_add(1, Ordering::SeqCst);
            let (status, body) = answer(path, user);
            let head = format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
            _ = stream.write_all((head + &body).as_bytes());
        }
    });
    (url, count)
}

/// A registry with the schemas of the fixture: 1 `review`, 2 `later`, 3 `string`, 4 refers to `place`.
fn with_schemas() -> (String, Arc<AtomicUsize>) {
    fake(|path, _| {
        let cases = fixture();
        let of_case = |name: &str| json!({"schema": cases[name]["schema"].to_string()}).to_string();
        match path {
            "/schemas/ids/1" => (200, of_case("review")),
            "/schemas/ids/2" => (200, of_case("later")),
            "/schemas/ids/3" => (200, of_case("string")),
            "/schemas/ids/4" => {
                let schema = json!({"type": "record", "name": "Note", "fields": [
                    {"name": "place", "type": "Place"}, {"name": "text", "type": "string"}]});
                let references = json!([{"name": "Place", "subject": "place/v", "version": 2}]);
                (200, json!({"schema": schema.to_string(), "references": references}).to_string())
            }
            "/subjects/place%2Fv/versions/2" => (200, of_case("place")),
            "/schemas/ids/5" => (200, json!({"schema": "{}", "schemaType": "PROTOBUF"}).to_string()),
            _ => (404, json!({"error_code": 40403, "message": "Schema not found"}).to_string()),
        }
    })
}

#[tokio::test]
async fn columns_of_every_type() {
    let (url, _) = with_schemas();
    let columns = "id=/id:int64,stars=/stars:int64,price=/price:float64,weight=/weight:float32,ok=/ok:bool,day=/day:date,\
                   at=/at:timestamp,us=/at_us:timestamp,kind=/kind,city=/place/city,zip=/place/zip,tag=/tags/1,pages=/attributes/pages:int32,\
                   either=/either,uuid=/uuid,amount=/amount:float64,day_text=/day,none=/nosuch:int64,place=/place:json";
    let decoder = Decoder::new(settings(registry(&url), columns)).unwrap();
    let data = &fixture()["review"]["data"];
    let decoded = decoded(&decoder, &[framed(1, &bytes(&data[0])), framed(1, &bytes(&data[1]))]).await;
    assert!(decoded.bad.is_empty(), "{:?}", decoded.bad);
    assert_eq!(strings(&decoded.texts), some(&["Gr\u{fc}\u{df}e \u{20000}", ""]));
    let shown = |name: &str| {
        let place = decoder.fields().iter().position(|field| field.name() == name).unwrap();
        strings(&decoded.columns[place])
            .into_iter()
            .map(|value| value.unwrap_or_else(|| "NULL".to_owned()))
            .collect::<Vec<_>>()
    };
    for (name, expected) in [
        ("id", ["9007199254740993", "-1"]),
        ("stars", ["5", "5"]),
        ("price", ["0.1", "0.1"]),
        ("weight", ["16777216.0", "16777216.0"]),
        ("ok", ["true", "false"]),
        ("day", ["2024-02-29", "2024-02-29"]),
        ("at", ["2024-02-29T10:30:00.250Z", "2024-02-29T10:30:00.250Z"]),
        ("us", ["2024-02-29T10:30:00.250001Z", "2024-02-29T10:30:00.250001Z"]),
        ("kind", ["BOOK", "BOOK"]),
        ("city", ["Ulm", "NULL"]),
        ("zip", ["NULL", "NULL"]),
        ("tag", ["b", "NULL"]),
        ("pages", ["12", "NULL"]),
        ("either", ["7", "x"]),
        ("uuid", ["f81d4fae-7dec-11d0-a765-00a0c91e6bf6", "f81d4fae-7dec-11d0-a765-00a0c91e6bf6"]),
        ("amount", ["12.3", "12.3"]),
        ("day_text", ["2024-02-29", "2024-02-29"]),
        ("none", ["NULL", "NULL"]),
        ("place", [r#"{"city":"Ulm","zip":null}"#, "NULL"]),
    ] {
        assert_eq!(shown(name), expected, "{name}");
    }
}

/// Integers that a float or a narrower integer does not hold, and bytes that are not UTF-8.
#[tokio::test]
async fn values_are_held_exactly_or_rejected() {
    let (url, _) = with_schemas();
    let data = &fixture()["review"]["data"];
    let both = [framed(1, &bytes(&data[0])), framed(1, &bytes(&data[1]))];
    for (columns, expected) in [
        ("x=/id:float64", &[(0, "wrong_type")][..]),
        ("x=/id:int32", &[(0, "wrong_type")]),
        ("x=/raw", &[(1, "wrong_type")]),
        ("x=/place", &[(0, "wrong_type")]),
        ("x=/ok:int64", &[(0, "wrong_type"), (1, "wrong_type")]),
        ("x=/stars:float64", &[]),
    ] {
        let decoder = Decoder::new(settings(registry(&url), columns)).unwrap();
        assert_eq!(labels(&decoded(&decoder, &both).await), expected, "{columns}");
    }
    let texts = DecodeSettings { text_path: Some(Pointer::parse("/raw").unwrap()), ..settings(registry(&url), "") };
    let from_bytes = decoded(&Decoder::new(texts).unwrap(), &both).await;
    assert_eq!(
        (strings(&from_bytes.texts), labels(&from_bytes)),
        (vec![Some("caf\u{e9}".to_owned()), None], vec![(1, "wrong_type")])
    );
}

/// Schemas alternate, and messages of ten kinds that cannot be read stand between them.
#[tokio::test]
async fn schemas_and_poison_in_one_batch() {
    let (url, requests) = with_schemas();
    let cases = fixture();
    let datum = |name: &str, at: usize| bytes(&cases[name]["data"][at]);
    let (review, later) = (framed(1, &datum("review", 0)), framed(2, &datum("later", 0)));
    let mut not_utf8 = review.clone();
    let text = not_utf8.windows(2).position(|two| two == [0xc3, 0xbc]).unwrap();
    not_utf8[text] = 0xff;
    let values = vec![
        review.clone(),
        framed(7, b"x"),
        later.clone(),
        review[..review.len() - 1].to_vec(),
        not_utf8,
        review.clone(),
        [review.clone(), review.clone()].concat(),
        [review.clone(), vec![1]].concat(),
        vec![0, 0, 0],
        b"{\"text\": \"json\"}".to_vec(),
        framed(2, &datum("later", 1)),
        framed(5, b"x"),
        framed(1, &[]),
        framed(1, &[0xff; 30]),
        later.clone(),
        review.clone(),
    ];
    let decoder = Decoder::new(settings(registry(&url), "stars=/stars:int64,language=/language")).unwrap();
    let decoded = decoded(&decoder, &values).await;
    let expected = [
        (1, "unknown_schema"),
        (3, "bad_avro"),
        (4, "bad_avro"),
        (6, "bad_avro"),
        (7, "bad_avro"),
        (8, "bad_avro"),
        (9, "bad_avro"),
        (11, "unknown_schema"),
        (12, "bad_avro"),
        (13, "bad_avro"),
    ];
    assert_eq!(labels(&decoded), expected);
    let (first, second) = (Some("Gr\u{fc}\u{df}e \u{20000}"), Some("sp\u{e4}ter"));
    let mut texts = [None; 16];
    [0, 5, 15].into_iter().for_each(|row| texts[row] = first);
    [2, 14].into_iter().for_each(|row| texts[row] = second);
    assert!(decoded.texts.as_string::<i32>().iter().eq(texts));
    let stars: Vec<_> = decoded.columns[0].as_primitive::<arrow::datatypes::Int64Type>().iter().collect();
    let of_row = |row| match row {
        0 | 5 | 15 => Some(5),
        2 | 14 => Some(3),
        10 => Some(1 << 40),
        _ => None,
    };
    assert_eq!(stars, (0..16).map(of_row).collect::<Vec<_>>());
    assert_eq!(requests.load(Ordering::SeqCst), 4, "each schema is asked for once");
    decoder.decode(&messages(&values.iter().map(Some).collect::<Vec<_>>())).await.unwrap();
    assert_eq!(requests.load(Ordering::SeqCst), 4, "answers are kept, also that there is no such schema");
}

#[tokio::test]
async fn texts_of_other_schemas() {
    let (url, _) = with_schemas();
    let datum = bytes(&fixture()["string"]["data"][0]);
    let whole = DecodeSettings { text_path: Some(Pointer::parse("").unwrap()), ..settings(registry(&url), "") };
    let found = decoded(&Decoder::new(whole).unwrap(), &[framed(3, &datum)]).await;
    assert_eq!(strings(&found.texts), some(&["only a text"]));
    let named = decoded(&Decoder::new(settings(registry(&url), "")).unwrap(), &[framed(3, &datum)]).await;
    assert_eq!(labels(&named), [(0, "no_text")]);
    // A place in Ulm without a zip, and the text "a": 1 byte of length (zigzag), the characters, branch 0.
    let note = framed(4, &[6, b'U', b'l', b'm', 0, 2, b'a']);
    let referring =
        decoded(&Decoder::new(settings(registry(&url), "city=/place/city,all=:json")).unwrap(), &[note]).await;
    assert_eq!((strings(&referring.texts), strings(&referring.columns[0])), (some(&["a"]), some(&["Ulm"])));
    assert_eq!(strings(&referring.columns[1]), some(&[r#"{"place":{"city":"Ulm","zip":null},"text":"a"}"#]));
}

#[tokio::test]
async fn schemas_of_a_file() {
    let (folder, cases) = (tempfile::tempdir().unwrap(), fixture());
    let file = folder.path().join("later.avsc");
    std::fs::write(&file, cases["later"]["schema"].to_string()).unwrap();
    let (datum, fingerprint) = (bytes(&cases["later"]["data"][0]), bytes(&cases["later"]["fingerprint"]));
    let single = |fingerprint: &[u8]| [&[0xC3, 0x01], fingerprint, &datum].concat();
    let raw = Decoder::new(settings(AvroSchemas::Raw(file.clone()), "")).unwrap();
    let found = decoded(&raw, &[datum.clone(), single(&fingerprint)]).await;
    assert_eq!((strings(&found.texts)[0].as_deref(), labels(&found)), (Some("sp\u{e4}ter"), vec![(1, "bad_avro")]));
    let decoder = Decoder::new(settings(AvroSchemas::SingleObject(file), "")).unwrap();
    let found = decoded(&decoder, &[single(&fingerprint), single(&[7; 8]), datum.clone(), vec![0xC3, 1, 2]]).await;
    assert_eq!(strings(&found.texts)[0].as_deref(), Some("sp\u{e4}ter"));
    assert_eq!(labels(&found), [(1, "unknown_schema"), (2, "bad_avro"), (3, "bad_avro")]);
    let [_, (_, unknown), ..] = &found.bad[..] else { panic!("{:?}", found.bad) };
    assert!(matches!(&found.bad[0].1, Rejection::UnknownSchema { id, .. } if id == "0707070707070707"), "{unknown}");
}

/// A registry that fails twice is asked a third time; one that refuses is not; neither makes messages bad.
#[tokio::test]
async fn a_registry_that_fails_is_no_bad_message() {
    let tries = AtomicUsize::new(0);
    let (url, requests) = fake(move |_, _| match tries.fetch_add(1, Ordering::SeqCst) {
        0 => (503, String::new()),
        1 => (404, "no registry here".to_owned()),
        _ => (200, json!({"schema": fixture()["string"]["schema"].to_string()}).to_string()),
    });
    let value = framed(3, &bytes(&fixture()["string"]["data"][0]));
    let whole = DecodeSettings { text_path: Some(Pointer::parse("").unwrap()), ..settings(registry(&url), "") };
    let found = decoded(&Decoder::new(whole).unwrap(), std::slice::from_ref(&value)).await;
    assert_eq!((strings(&found.texts), requests.load(Ordering::SeqCst)), (some(&["only a text"]), 3));

    let (url, requests) = fake(|_, _| (401, String::new()));
    let decoder = Decoder::new(settings(registry(&url), "")).unwrap();
    assert_eq!(decoder.probe().await.unwrap_err().exit(), Exit::Storage);
    let (good, _) = with_schemas();
    Decoder::new(settings(registry(&good), "")).unwrap().probe().await.unwrap();
    let error = decoder.decode(&messages(&[Some(value)])).await.unwrap_err();
    assert_eq!((error.exit(), requests.load(Ordering::SeqCst)), (Exit::Storage, 2));
    assert!(error.to_string().contains("401") && error.help().unwrap().contains("user information"), "{error}");
}

/// While a stream runs, its messages wait: for a registry that is away, and for one that refuses until its user may read.
#[tokio::test]
async fn a_registry_is_asked_until_it_answers() {
    let tries = AtomicUsize::new(0);
    let (url, requests) = fake(move |_, _| match tries.fetch_add(1, Ordering::SeqCst) {
        0 => (401, String::new()),
        1 => (403, String::new()),
        2 => (503, String::new()),
        _ => (200, json!({"schema": fixture()["string"]["schema"].to_string()}).to_string()),
    });
    let whole = DecodeSettings { text_path: Some(Pointer::parse("").unwrap()), ..settings(registry(&url), "") };
    let value = framed(3, &bytes(&fixture()["string"]["data"][0]));
    let found = Decoder::new(whole).unwrap().outlast(&messages(&[Some(value)])).await;
    assert_eq!((strings(&found.texts), labels(&found)), (some(&["only a text"]), vec![]));
    assert_eq!(requests.load(Ordering::SeqCst), 4);
}

/// Something else answers at the address of the registry, as while it is restarted behind a proxy. Messages of schemas that
/// are known are read meanwhile, the others wait, and none is rejected.
#[tokio::test]
async fn messages_wait_for_a_registry_that_is_away() {
    let away = Arc::new(AtomicUsize::new(0));
    let is_away = Arc::clone(&away);
    let string = json!({"schema": fixture()["string"]["schema"].to_string()}).to_string();
    let (url, requests) = fake(move |_, _| match is_away.load(Ordering::SeqCst) {
        0 => (200, string.clone()),
        // No status that a server sends: the client gets an answer that is none.
        _ => (0, String::new()),
    });
    let whole = DecodeSettings { text_path: Some(Pointer::parse("").unwrap()), ..settings(registry(&url), "") };
    let decoder = Decoder::new(whole).unwrap();
    let datum = bytes(&fixture()["string"]["data"][0]);
    let (known, new) = (framed(3, &datum), framed(4, &datum));
    decoder.outlast(&messages(&[Some(known.clone())])).await;

    away.store(1, Ordering::SeqCst);
    let read = decoder.outlast(&messages(&[Some(known.clone()), Some(known.clone())])).await;
    assert_eq!((strings(&read.texts).len(), labels(&read), requests.load(Ordering::SeqCst)), (2, vec![], 1));
    let both = messages(&[Some(known), Some(new)]);
    let mut waiting = std::pin::pin!(decoder.outlast(&both));
    loop {
        tokio::select! {
            read = &mut waiting => panic!("{:?}", labels(&read)),
            () = tokio::time::sleep(std::time::Duration::from_millis(20)) => {}
        }
        // All attempts of one round, and the first one of the next.
        if requests.load(Ordering::SeqCst) > 1 + 5 {
            break;
        }
    }
    away.store(0, Ordering::SeqCst);
    let read = waiting.await;
    assert_eq!((strings(&read.texts), labels(&read)), (some(&["only a text"; 2]), vec![]));
}

/// The user is sent, and never shown. Expected: RFC 7617's own example, `Aladdin:open sesame`.
#[tokio::test]
async fn secrets_are_sent_and_never_shown() {
    let (url, _) = fake(|_, user| {
        let is_known = user == Some("Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==");
        if is_known { (404, json!({"error_code": 40403}).to_string()) } else { (401, String::new()) }
    });
    let settings_of = |url: String, user_info: Option<&str>| {
        let user_info = user_info.map(str::to_owned);
        settings(AvroSchemas::Registry(RegistrySettings { url, user_info }), "")
    };
    let in_url = url.replace("http://", "http://Aladdin:open%20sesame@");
    let value = [Some(framed(9, b""))];
    let decoder = Decoder::new(settings_of(url.clone(), Some("Aladdin:open sesame"))).unwrap();
    let found = decoder.decode(&messages(&value)).await.unwrap();
    assert_eq!(labels(&found), [(0, "unknown_schema")]);
    assert!(!format!("{decoder:?}").contains("sesame"), "{decoder:?}");
    let decoder = Decoder::new(settings_of(in_url, None)).unwrap();
    assert_eq!(labels(&decoder.decode(&messages(&value)).await.unwrap()), [(0, "unknown_schema")]);
    assert!(!format!("{decoder:?}").contains("sesame"), "{decoder:?}");
    let decoder = Decoder::new(settings_of(url.replace("http://", "http://Aladdin:hunter2@"), None)).unwrap();
    let error = decoder.decode(&messages(&value)).await.unwrap_err();
    assert!(
        matches!(error, StreamError::Broker { .. }) && !format!("{error} {error:?}").contains("hunter2"),
        "{error:?}"
    );
    for (url, user_info) in
        [("redis://u:hunter2@h", None), ("not an address hunter2@", None), ("http://h", Some("hunter2"))]
    {
        let error = Decoder::new(settings_of(url.to_owned(), user_info)).unwrap_err();
        assert!(matches!(error, StreamError::Settings { .. }), "{error:?}");
        assert!(url.starts_with("not") || !error.to_string().contains("hunter2"), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    /// Any bytes, and good data with one byte changed: no panic, no shifted row, no harm to the good message between them.
    #[test]
    fn damaged_data_harm_nobody(
        random in prop::collection::vec(any::<u8>(), 0..200),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
    ) {
        let cases = fixture();
        let good = bytes(&cases["review"]["data"][0]);
        let mut values = vec![good.clone(), random];
        for (at, byte) in changes {
            let mut damaged = good.clone();
            damaged[at.index(good.len())] = byte;
            values.extend([damaged, good.clone()]);
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("review.avsc");
        std::fs::write(&file, cases["review"]["schema"].to_string()).unwrap();
        for columns in ["id=/id:int64,tag=/tags/0", "all"] {
            let decoder = Decoder::new(settings(AvroSchemas::Raw(file.clone()), columns)).unwrap();
            let found = futures::executor::block_on(decoded(&decoder, &values));
            let texts = strings(&found.texts);
            for (row, value) in values.iter().enumerate() {
                let alone = futures::executor::block_on(decoded(&decoder, std::slice::from_ref(value)));
                prop_assert_eq!(&strings(&alone.texts)[0], &texts[row]);
                prop_assert!(*value != good || texts[row].is_some());
            }
        }
    }
}
