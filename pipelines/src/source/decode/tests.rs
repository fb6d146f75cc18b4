//! Random files against other parsers: for CSV the one below, a character at a time, and for JSON serde_json.

use std::sync::Arc;

use arrow::{
    array::{Array, AsArray},
    datatypes::{DataType, Field, Schema},
};
use serde_json::{Value, value::RawValue};
use tokio::io::BufReader;

use super::*;
use crate::source::{Reading, types};

/// Number of files of each kind.
const FILES: u64 = 1000;

/// Sizes of reads and batches: most boundaries of bytes and of rows come up.
const READS: [(usize, usize); 4] = [(1, 8192), (7, 3), (64, 1), (1 << 20, 2)];

/// Numbers from a seed (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }

    fn one<'a>(&mut self, of: &[&'a str]) -> &'a str {
        of[self.below(of.len())]
    }

    fn several(&mut self, most: usize, of: &[&str]) -> String {
        (0..self.below(most + 1)).map(|_| self.one(of)).collect()
    }
}

/// What a file holds: its rows, up to the first that cannot be read.
type Read<T> = (Vec<T>, bool);

/// Reads a file in each of the ways of [`READS`].
async fn read<T>(plan: &FilePlan, text: &str, row: impl Fn(&RecordBatch, usize) -> T) -> Vec<Read<T>> {
    let mut all = Vec::new();
    for (bytes, rows) in READS {
        let bytes = Box::new(BufReader::with_capacity(bytes, Cursor::new(text.as_bytes().to_vec())));
        let mut decoded = Decoded::new(plan, bytes, Default::default(), rows).unwrap();
        let mut found = Vec::new();
        let broken = loop {
            match decoded.next(&plan.file).await {
                Ok(Some(batch)) => found.extend((0..batch.num_rows()).map(|at| row(&batch, at))),
                Ok(None) => break false,
                Err(SourceError::Malformed { row, .. }) => {
                    assert_eq!(row, found.len() as u64, "the row that the error names, of {text:?}");
                    break true;
                }
                Err(other) => panic!("{other}"),
            }
        };
        all.push((found, broken));
    }
    all
}

fn plan(format: Format, fields: Vec<Field>) -> FilePlan {
    let file = InputFile { format, ..InputFile::stdin(Reading::default()) };
    let (read, kept) = ((0..fields.len()).collect(), Vec::new());
    FilePlan { file, schema: Arc::new(Schema::new(fields)), read, text: 0, kept, wants_all: false }
}

fn string(batch: &RecordBatch, column: usize, row: usize) -> Option<String> {
    let column = batch.column(column).as_string::<i32>();
    column.is_valid(row).then(|| column.value(row).to_owned())
}

/// The rows below the header, by RFC 4180 and, where it says nothing, as Python's csv module: a mark inside a cell that
/// does not begin with one is an ordinary character, and so is what follows a closing mark; empty lines are no rows.
fn csv_rows(text: &str) -> Read<Vec<String>> {
    let (mut rows, mut row, mut cell) = (Vec::new(), Vec::new(), String::new());
    let (mut quoted, mut begun, mut chars) = (false, false, text.chars().peekable());
    while let Some(c) = chars.next() {
        match c {
            '"' if quoted && chars.next_if_eq(&'"').is_some() => cell.push('"'),
            '"' if quoted => quoted = false,
            _ if quoted => cell.push(c),
            '"' if !begun => quoted = true,
            ',' => row.push(std::mem::take(&mut cell)),
            '\n' | '\r' if !begun && row.is_empty() => continue,
            '\n' | '\r' => {
                row.push(std::mem::take(&mut cell));
                rows.push(std::mem::take(&mut row));
            }
            _ => cell.push(c),
        }
        begun = quoted || !matches!(c, ',' | '\n' | '\r');
    }
    if quoted {
        return (rows.split_off(1), true);
    }
    if begun || !row.is_empty() {
        row.push(cell);
        rows.push(row);
    }
    (rows.split_off(1), false)
}

/// Rows as written, with marks where they are needed and by chance elsewhere.
fn written(rows: &[Vec<String>], random: &mut Random) -> String {
    let end = random.one(&["\n", "\r\n", "\r"]);
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().map(|cell| {
            let needs = cell.contains(['"', ',', '\n', '\r']) || (cell.is_empty() && row.len() == 1);
            match needs || random.below(3) == 0 {
                true => format!("\"{}\"", cell.replace('"', "\"\"")),
                false => cell.clone(),
            }
        });
        text += &(cells.collect::<Vec<_>>().join(",") + end);
    }
    if random.below(2) == 0 {
        text.truncate(text.len() - end.len());
    }
    text
}

#[tokio::test]
async fn random_csv_is_read_as_another_parser_reads_it() {
    let pieces = ["a", "b ", "\"", "\"\"", ",", ",", "\n", "\r\n", "\r", "é", "𠀀", "\u{feff}", "\0", "'", "\\"];
    for seed in 0..FILES {
        let mut random = Random(seed);
        let columns = 1 + random.below(3);
        let names: Vec<String> = (0..columns).map(|i| format!("c{i}")).collect();
        let plan = plan(Format::Csv, names.iter().map(|name| Field::new(name, DataType::Utf8, true)).collect());
        let (text, made) = match random.below(2) {
            0 => (names.join(",") + "\n" + &random.several(40, &pieces), None),
            _ => {
                let rows = (0..random.below(9)).map(|_| (0..columns).map(|_| random.several(5, &pieces)).collect());
                let rows: Vec<Vec<String>> = rows.collect();
                let all: Vec<_> = [vec![names], rows.clone()].concat();
                (written(&all, &mut random), Some(rows))
            }
        };
        let (mut expected, mut broken) = csv_rows(&text);
        assert!(made.is_none_or(|rows| rows == expected), "the other parser is wrong about {text:?}");
        if let Some(at) = expected.iter().position(|row| row.len() != columns) {
            expected.truncate(at);
            broken = true;
        }
        // Empty cells are NULL.
        let expected =
            expected.into_iter().map(|row| row.into_iter().map(|c| Some(c).filter(|c| !c.is_empty())).collect());
        let expected: (Vec<Vec<Option<String>>>, bool) = (expected.collect(), broken);
        let cells = |batch: &RecordBatch, row: usize| (0..columns).map(|column| string(batch, column, row)).collect();
        for (found, how) in read(&plan, &text, cells).await.iter().zip(READS) {
            assert_eq!(found, &expected, "seed {seed}, {how:?}: {text:?}");
        }
    }
}

/// A row of JSON: a string, a single value as it is written, a list of strings.
type JsonRow = (Option<String>, Option<String>, Option<Vec<Option<String>>>);

fn json_row(line: &str) -> Option<JsonRow> {
    let row: std::collections::BTreeMap<String, &RawValue> = serde_json::from_str(line).ok()?;
    let value = |name: &str| row.get(name).map(|raw| (serde_json::from_str(raw.get()).unwrap(), raw.get()));
    let single = |name: &str| match value(name)? {
        (Value::Null, _) => None,
        (Value::String(text), _) => Some(text),
        (_, raw) => Some(raw.to_owned()),
    };
    let list = value("list").and_then(|(list, _)| {
        let items = list.as_array().cloned()?;
        Some(items.iter().map(|item| item.as_str().map(str::to_owned)).collect())
    });
    Some((single("text"), single("n"), list))
}

/// A string of JSON in one of the ways in which it can be written.
fn json_string(random: &mut Random) -> String {
    let pieces = [
        "a",
        " ",
        "é",
        "𠀀",
        "\u{7f}",
        "\\u0000",
        "\\n",
        "\\\"",
        "\\\\",
        "\\/",
        "\\ud840\\udc00",
        "\\uD83D\\uDE00",
        "\\u00e9",
        "}",
        "{",
        "]",
        ",",
        ":",
    ];
    format!("\"{}\"", random.several(8, &pieces))
}

fn json_line(random: &mut Random) -> String {
    let mut members = Vec::new();
    if random.below(4) > 0 {
        members
            .push(format!("\"text\":{}", if random.below(9) == 0 { "null".to_owned() } else { json_string(random) }));
    }
    if random.below(4) > 0 {
        let number = random.one(&["1", "-0", "1.50", "1e5", "123456789012345678901234567890", "true", "null", "\"x\""]);
        members.push(format!("\"n\" : {number}"));
    }
    if random.below(4) > 0 {
        let items: Vec<String> = (0..random.below(4)).map(|_| json_string(random)).collect();
        members.push(format!("\"list\": [{}]", items.join(" ,")));
    }
    if random.below(4) == 0 {
        members.push(format!("{}: {{\"deep\": [[{}], {{}}]}}", "\"other\"", json_string(random)));
    }
    let from = random.below(members.len().max(1));
    members.rotate_left(from);
    let gap = random.one(&["", " ", "\t"]);
    format!("{gap}{{{gap}{}{gap}}}{gap}", members.join(random.one(&[",", ", "])))
}

#[tokio::test]
async fn random_json_is_read_as_another_parser_reads_it() {
    let string_field = |name: &str| Field::new(name, DataType::Utf8, true);
    let plan =
        plan(Format::Json, vec![string_field("text"), string_field("n"), Field::new("list", types::words(), true)]);
    let row = |batch: &RecordBatch, row: usize| -> JsonRow {
        let list = batch.column(2).as_list::<i32>();
        let items = list.is_valid(row).then(|| {
            let items = list.value(row);
            let items = items.as_string::<i32>();
            items.iter().map(|item| item.map(str::to_owned)).collect()
        });
        (string(batch, 0, row), string(batch, 1, row), items)
    };
    for seed in 0..FILES {
        let mut random = Random(seed);
        let (end, damaged) = (random.one(&["\n", "\r\n", "\n\n", "\n \n"]), random.below(3) == 0);
        let mut lines: Vec<String> = (0..random.below(9)).map(|_| json_line(&mut random)).collect();
        if damaged {
            let broken =
                random.one(&["]", "{\"text\": }", "{\"text\": \"x\"", "nope", "{\"n\": x}", "{\"text\": \"\\x\"}"]);
            lines.insert(random.below(lines.len() + 1), broken.to_owned());
        }
        let mut text = lines.join(end);
        if random.below(2) == 0 {
            text += end;
        }
        let expected: Vec<JsonRow> = lines.iter().map_while(|line| json_row(line)).collect();
        let expected = (expected, damaged);
        for (found, how) in read(&plan, &text, row).await.iter().zip(READS) {
            assert_eq!(found, &expected, "seed {seed}, {how:?}: {text:?}");
        }
    }
}

/// Rows of many sizes around the size of a batch, with cells of two lines.
#[tokio::test]
async fn csv_and_json_of_some_megabytes() {
    let mut random = Random(1);
    let sizes = [0, 1, 10, 1000, 70_000, 262_143, 262_144, BATCH_BYTES - 30, BATCH_BYTES, BATCH_BYTES + 1];
    let texts: Vec<String> = (0..60).map(|i| format!("{i}\n\"é{}", "x,".repeat(sizes[random.below(10)] / 2))).collect();
    let expected: Vec<Option<String>> = texts.iter().cloned().map(Some).collect();
    let csv = texts.iter().fold("text\n".to_owned(), |all, text| all + "\"" + &text.replace('"', "\"\"") + "\"\n");
    let json =
        texts.iter().fold(String::new(), |all, text| all + &serde_json::json!({ "text": text }).to_string() + "\n");
    for (format, content) in [(Format::Csv, csv), (Format::Json, json)] {
        let plan = plan(format, vec![Field::new("text", DataType::Utf8, true)]);
        for (capacity, rows) in [(64 << 10, BATCH_ROWS), (BATCH_BYTES, BATCH_ROWS), (usize::MAX >> 40, 7)] {
            let bytes = Box::new(BufReader::with_capacity(capacity, Cursor::new(content.clone().into_bytes())));
            let mut decoded = Decoded::new(&plan, bytes, Default::default(), rows).unwrap();
            let mut found = Vec::new();
            while let Some(batch) = decoded.next(&plan.file).await.unwrap() {
                found.extend((0..batch.num_rows()).map(|row| string(&batch, 0, row)));
            }
            assert!(found == expected, "{format}, reads of {capacity} bytes, batches of {rows} rows");
        }
    }
}
