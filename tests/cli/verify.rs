//! `verify` and `inspect` report altered outputs, and accept unaltered ones.
//!
//! Files are altered with the parquet crate: the rows are read, one thing in them is changed, and the footer stays.

use std::{
    fs::{self, File},
    path::PathBuf,
    sync::Arc,
};

use arrow::{
    array::{
        Array, ArrayRef, AsArray, BooleanArray, FixedSizeListArray, Float32Array, ListArray, RecordBatch, StringArray,
        StructArray, UInt32Array,
    },
    compute::concat_batches,
    datatypes::{Field, Float32Type, Schema, UInt32Type},
};
use parquet::{
    arrow::{ArrowWriter, arrow_reader::ParquetRecordBatchReaderBuilder},
    file::{metadata::KeyValue, properties::WriterProperties},
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::{
    place::{Ended, Place},
    sql::sql,
};

/// The output `out` of three rows, the second without a vector.
fn place(words: &str) -> Place {
    let place = Place::new();
    place.write("plain.txt", "It rained. We stayed in.\n\nThe bank was steep.\n");
    place.exits(&format!("embed -q --model tiny --device cpu --input plain.txt --output out {words}"), 0);
    place
}

/// `elmo verify`, with a report as JSON.
fn verify(words: &str) -> String {
    format!("verify --model tiny --device cpu -q --json {words}")
}

/// A part of an output, by its number.
fn part(place: &Place, output: &str, number: usize) -> String {
    format!("{output}/{}", part_name(place, output, number))
}

fn part_name(place: &Place, output: &str, number: usize) -> String {
    file_name(place, output, number, ".parquet").unwrap_or_else(|| panic!("no part {number} in {output}"))
}

/// The entry of a part in the manifest of `out`.
fn entry(place: &Place, number: usize) -> PathBuf {
    let name = file_name(place, "out/_elmo", number, ".json").unwrap_or_else(|| panic!("no entry {number}"));
    place.path("out/_elmo").join(name)
}

/// The name of the file `part-NUMBER…` in a folder.
fn file_name(place: &Place, folder: &str, number: usize, end: &str) -> Option<String> {
    let names = fs::read_dir(place.path(folder)).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    let start = format!("part-{number:05}");
    names.into_iter().find(|name| name.starts_with(&start) && name.ends_with(end))
}

fn read(place: &Place, name: &str) -> (RecordBatch, Vec<KeyValue>) {
    let builder = ParquetRecordBatchReaderBuilder::try_new(File::open(place.path(name)).unwrap()).unwrap();
    let footer = builder.metadata().file_metadata().key_value_metadata().cloned().unwrap_or_default();
    let footer = footer.into_iter().filter(|pair| pair.key.starts_with("elmo.")).collect();
    let batches: Vec<RecordBatch> = builder.build().unwrap().map(|batch| batch.unwrap()).collect();
    (concat_batches(&batches[0].schema(), &batches).unwrap(), footer)
}

fn write(place: &Place, name: &str, rows: &RecordBatch, footer: Vec<KeyValue>) {
    write_alone(place, name, rows, footer);
    enter(place, name);
}

/// Writes a file without an entry in a manifest.
fn write_alone(place: &Place, name: &str, rows: &RecordBatch, footer: Vec<KeyValue>) {
    let properties = WriterProperties::builder().set_key_value_metadata(Some(footer)).build();
    let file = File::create(place.path(name)).unwrap();
    let mut writer = ArrowWriter::try_new(file, rows.schema(), Some(properties)).unwrap();
    writer.write(rows).unwrap();
    writer.close().unwrap();
}

/// Writes the current size and hash of a part into its entry, as a forger of an output would.
fn enter(place: &Place, name: &str) {
    let number = name.split("part-").nth(1).unwrap()[..5].parse().unwrap();
    let entry = entry(place, number);
    let bytes = fs::read(place.path(name)).unwrap();
    let mut values: Value = serde_json::from_slice(&fs::read(&entry).unwrap()).unwrap();
    values["bytes"] = json!(bytes.len());
    values["sha256"] = json!(format!("{:x}", Sha256::digest(&bytes)));
    fs::write(entry, values.to_string()).unwrap();
}

fn alter(place: &Place, name: &str, change: impl FnOnce(&RecordBatch) -> RecordBatch) {
    let (rows, footer) = read(place, name);
    write(place, name, &change(&rows), footer);
}

/// Changes a pair of a footer.
fn alter_footer(place: &Place, name: &str, key: &str, value: &str) {
    let (rows, mut footer) = read(place, name);
    let pair = footer.iter_mut().find(|pair| pair.key == key).unwrap();
    pair.value = Some(value.to_owned());
    write(place, name, &rows, footer);
}

/// Alters the first part of `out`, runs a command, and restores the part.
fn altered(place: &Place, words: &str, change: impl FnOnce(&RecordBatch) -> RecordBatch) -> Ended {
    let name = part(place, "out", 0);
    let before = fs::read(place.path(&name)).unwrap();
    alter(place, &name, change);
    let ended = place.run(words);
    fs::write(place.path(&name), before).unwrap();
    enter(place, &name);
    ended
}

/// The report of `elmo verify` on an altered part, which it must reject.
fn refused(place: &Place, change: impl FnOnce(&RecordBatch) -> RecordBatch) -> Value {
    let ended = altered(place, &verify("out"), change);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    ended.json()
}

/// The rows with column `name` replaced.
fn with_column(rows: &RecordBatch, name: &str, column: ArrayRef) -> RecordBatch {
    let place = rows.schema().index_of(name).unwrap();
    let mut fields: Vec<Field> = rows.schema().fields().iter().map(|field| field.as_ref().clone()).collect();
    let mut columns = rows.columns().to_vec();
    let nullable = fields[place].is_nullable();
    fields[place] = Field::new(name, column.data_type().clone(), nullable);
    columns[place] = column;
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).unwrap()
}

/// The rows with other vectors: `change` modifies all their numbers and returns the new width of a vector.
fn with_vectors(rows: &RecordBatch, change: impl FnOnce(&mut Vec<f32>, i32) -> i32) -> RecordBatch {
    let vectors = rows.column_by_name("embedding").unwrap().as_fixed_size_list();
    let (item, width, values, nulls) = vectors.clone().into_parts();
    let mut values = values.as_primitive::<Float32Type>().values().to_vec();
    let width = change(&mut values, width);
    let vectors = FixedSizeListArray::new(item, width, Arc::new(Float32Array::from(values)), nulls);
    with_column(rows, "embedding", Arc::new(vectors))
}

/// The rows with another number in the first vector.
fn with_number(rows: &RecordBatch, change: impl FnOnce(f32) -> f32) -> RecordBatch {
    with_vectors(rows, |values, width| {
        values[0] = change(values[0]);
        width
    })
}

/// The rows with another column of tokens.
fn with_tokens(rows: &RecordBatch, name: &str, change: impl FnOnce(&ArrayRef) -> ArrayRef) -> RecordBatch {
    let list = rows.column_by_name("tokens").unwrap().as_list::<i32>();
    let (item, offsets, values, nulls) = list.clone().into_parts();
    let (fields, mut columns, no_nulls) = values.as_struct().clone().into_parts();
    let place = fields.iter().position(|field| field.name() == name).unwrap();
    columns[place] = change(&columns[place]);
    let tokens = StructArray::new(fields, columns, no_nulls);
    with_column(rows, "tokens", Arc::new(ListArray::new(item, offsets, Arc::new(tokens), nulls)))
}

/// Adds 1 to a number of the first token.
fn shifted(column: &ArrayRef) -> ArrayRef {
    let mut numbers = column.as_primitive::<UInt32Type>().values().to_vec();
    numbers[0] += 1;
    Arc::new(UInt32Array::from(numbers))
}

#[test]
fn untouched_outputs_pass() {
    for words in ["", "--level token --layers all", "--list-type list --normalize l2", "--level token --boundaries"] {
        let place = place(words);
        let report = place.exits(&verify("out --tolerance 0"), 0).json();
        let rows = ["rows", "sampled", "bit_equal_rows"].map(|key| report[key].clone());
        assert_eq!(rows, [json!(3), json!(3), json!(3)], "{words}: {report}");
        assert_eq!(report["manifest"], json!({"complete": true, "problems": []}), "{words}: {report}");
    }
}

/// The same rows written by another program, swapped parts, a flipped bit.
#[test]
fn other_bytes_than_were_written() {
    let place = place("--rows-per-file 1");
    let (first, second) = (part(&place, "out", 0), part(&place, "out", 2));
    let [a, b] = [&first, &second].map(|name| fs::read(place.path(name)).unwrap());
    let mut flipped = a.clone();
    flipped[a.len() / 3] ^= 1;
    let check = |bytes: [&[u8]; 2], named: &str| {
        for (name, bytes) in [&first, &second].into_iter().zip(bytes) {
            fs::write(place.path(name), bytes).unwrap();
        }
        for words in ["inspect out --json".to_owned(), verify("out --sample 1")] {
            let ended = place.exits(&words, 1);
            assert!(ended.err.contains(named), "{ended:?}");
            let help = "  help: run the elmo command of this output again with --check, which rewrites changed parts";
            assert!(ended.err.contains(help), "{ended:?}");
        }
    };
    let [first_name, second_name] = [0, 2].map(|number| part_name(&place, "out", number));
    check([&b, &a], &format!("{first_name} has other bytes than the job wrote, {second_name}"));
    let (rows, footer) = read(&place, &second);
    let second_entry = entry(&place, 2);
    let before = fs::read(&second_entry).unwrap();
    write(&place, &second, &rows, footer);
    fs::write(second_entry, before).unwrap();
    let again = fs::read(place.path(&second)).unwrap();
    check([&a, &again], &format!("{second_name} has other bytes than the job wrote"));
    for (name, bytes) in [(&first, &flipped), (&second, &b)] {
        fs::write(place.path(name), bytes).unwrap();
    }
    assert!(matches!(place.run(&verify("out")).code, Some(1 | 3)), "a bit of the file is another");
}

#[test]
fn one_bit() {
    let place = place("");
    let flip = |rows: &RecordBatch| with_number(rows, |x| f32::from_bits(x.to_bits() ^ 1));
    let rounding = altered(&place, &verify("out"), flip);
    assert_eq!(rounding.code, Some(0), "{rounding:?}");
    assert_eq!(rounding.json()["bit_equal_rows"], 2, "{rounding:?}");
    let exact = altered(&place, &verify("out --tolerance 0"), flip);
    assert_eq!(exact.code, Some(1), "{exact:?}");
    assert!(exact.err.contains("numbers differ by up to") && exact.err.contains("in row 0"), "{exact:?}");
    assert!(!exact.err.contains("0 rows"), "{exact:?}");
    let other = |rows: &RecordBatch| with_number(rows, |x| x + 1.0);
    assert_eq!(altered(&place, &verify("out"), other).code, Some(1));
}

#[test]
fn nan_and_infinite_numbers() {
    let place = place("");
    for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let report = refused(&place, |rows| with_number(rows, |_| wrong));
        assert_eq!(report["mismatches"], json!({"not_finite": 1}), "{report}");
        assert_eq!(report["first_mismatches"], json!([{"row": 0, "what": ["not_finite"]}]), "{report}");
    }
    let all = refused(&place, |rows| {
        with_vectors(rows, |values, width| {
            values.fill(f32::NAN);
            width
        })
    });
    assert_eq!(all["mismatched_rows"], 2, "{all}");
}

#[test]
fn vectors_of_another_width() {
    let place = place("");
    let report = refused(&place, |rows| {
        with_vectors(rows, |values, width| {
            let narrow = values.chunks_exact(width as usize).flat_map(|vector| &vector[1..]);
            *values = narrow.copied().collect();
            width - 1
        })
    });
    assert_eq!(report["mismatches"], json!({"shape": 2}), "{report}");
}

#[test]
fn words_and_offsets_of_tokens() {
    let place = place("--level token");
    let report = refused(&place, |rows| {
        with_tokens(rows, "token", |column| {
            let words = column.as_string::<i32>().iter().enumerate();
            let words = words.map(|(i, word)| if i == 0 { Some("Hailed") } else { word });
            Arc::new(words.collect::<StringArray>())
        })
    });
    assert_eq!(report["mismatches"], json!({"token": 1}), "{report}");
    for name in ["start", "end", "sentence"] {
        let report = refused(&place, |rows| with_tokens(rows, name, shifted));
        assert_eq!(report["mismatches"][name], 1, "{report}");
        assert_eq!(report["mismatched_rows"], 1, "{report}");
    }
}

#[test]
fn truncated_and_error() {
    let place = place("");
    let report =
        refused(&place, |rows| with_column(rows, "truncated", Arc::new(BooleanArray::from(vec![false, false, true]))));
    assert_eq!(report["first_mismatches"], json!([{"row": 2, "what": ["truncated"]}]), "{report}");
    let with_error = |rows: &RecordBatch| {
        with_column(rows, "error", Arc::new(StringArray::from(vec![None, Some("a secret"), None])))
    };
    let ended = altered(&place, &verify("out"), with_error);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert_eq!(ended.json()["mismatches"], json!({"error": 1}), "{ended:?}");
    assert!(ended.err.contains("1 of 3 rows") && ended.err.contains("row 1: error"), "{ended:?}");
    assert!(!ended.out.contains("secret") && !ended.err.contains("secret"), "no data in messages: {ended:?}");
}

#[test]
fn a_vector_that_should_be_null() {
    let place = place("");
    let report = refused(&place, |rows| {
        let vectors = rows.column_by_name("embedding").unwrap().as_fixed_size_list();
        let (item, width, values, _) = vectors.clone().into_parts();
        let values = Float32Array::from(values.as_primitive::<Float32Type>().values().to_vec());
        with_column(rows, "embedding", Arc::new(FixedSizeListArray::new(item, width, Arc::new(values), None)))
    });
    assert_eq!(report["first_mismatches"], json!([{"row": 1, "what": ["null"]}]), "{report}");
}

#[test]
fn rows_and_parts_that_are_lost() {
    let place = place("--rows-per-file 2");
    let dropped = altered(&place, &verify("out"), |rows| rows.slice(0, 1));
    assert_eq!(dropped.code, Some(1), "{dropped:?}");
    let first = part_name(&place, "out", 0);
    let said = format!("{first} has 1 rows, but its entry in the manifest says 2");
    assert!(dropped.err.contains(&said), "{dropped:?}");
    let looked_at = altered(&place, "inspect out --json", |rows| rows.slice(0, 1));
    assert_eq!(looked_at.code, Some(1), "{looked_at:?}");

    fs::copy(place.path(&part(&place, "out", 1)), place.path("out/more.parquet")).unwrap();
    let foreign = place.exits(&verify("out"), 1);
    assert!(foreign.err.contains("more.parquet is not in the manifest"), "{foreign:?}");
    fs::rename(place.path("out/more.parquet"), place.path("more.parquet")).unwrap();

    fs::remove_file(place.path(&part(&place, "out", 0))).unwrap();
    for words in [verify("out"), "inspect out --json".to_owned()] {
        let lost = place.exits(&words, 1);
        assert!(lost.err.contains(&format!("{first} is in the manifest but does not exist")), "{lost:?}");
        assert!(lost.err.contains("again, which writes what is missing"), "{lost:?}");
        assert_eq!(lost.json()["manifest"]["complete"], true, "{lost:?}");
    }
    // The remaining file is correct, and so is a copy in a folder without a manifest.
    place.exits(&verify(&part(&place, "out", 1)), 0);
    assert_eq!(place.exits(&verify("more.parquet"), 0).json()["manifest"], Value::Null);
}

/// A job that lost its lease may still publish a part, and other programs write `part-*` too.
#[test]
fn files_that_the_manifest_does_not_name() {
    let place = place("--rows-per-file 2");
    // Of another job: by itself it is sound, and its settings differ.
    place.exits("embed -q --model tiny --device cpu --input plain.txt --output other --pooling max", 0);
    let foreign = "out/part-00001-0123abcd.parquet";
    fs::copy(place.path(&part(&place, "other", 0)), place.path(foreign)).unwrap();
    place.write("out/part-00007.csv", "text\n");
    for words in [verify("out"), "inspect out --json".to_owned()] {
        let ended = place.exits(&words, 1);
        for name in ["part-00001-0123abcd.parquet", "part-00007.csv"] {
            assert!(ended.err.contains(&format!("{name} is not in the manifest")), "{ended:?}");
        }
        let help = "  help: delete part-00001-0123abcd.parquet, part-00007.csv: readers of the folder";
        assert!(ended.err.contains(help), "{ended:?}");
        assert_eq!(ended.json()["rows"], 3, "the rows of the job alone: {ended:?}");
    }
    fs::remove_file(place.path("out/part-00007.csv")).unwrap();

    // Of a job that is not finished, the next part may lack its entry. This one has another fingerprint, or none.
    fs::remove_file(place.path("out/_elmo/done.json")).unwrap();
    place.exits("inspect out", 1);
    fs::remove_file(place.path(foreign)).unwrap();
    fs::remove_file(entry(&place, 1)).unwrap();
    place.exits("inspect out", 0);
    fs::rename(place.path(&part(&place, "out", 1)), place.path("out/part-00002.parquet")).unwrap();
    place.exits("inspect out", 1);
}

/// A part that another job replaced under the same name differs in its footer, and the manifest tells which one is
/// wrong.
#[test]
fn a_replaced_part_can_be_restored() {
    for number in [0, 1] {
        let place = place("--rows-per-file 2");
        place.exits("embed -q --model tiny --input plain.txt --output other --pooling max --rows-per-file 2", 0);
        let replaced = part(&place, "out", number);
        fs::copy(place.path(&part(&place, "other", number)), place.path(&replaced)).unwrap();
        for words in [verify("out"), "inspect out".to_owned()] {
            let ended = place.exits(&words, 1);
            let help = format!("{} is not as the job wrote it: run the elmo command", part_name(&place, "out", number));
            assert!(ended.err.contains("elmo.pooling is") && ended.err.contains(&help), "{ended:?}");
        }
    }
}

#[test]
fn entries_that_are_lost() {
    let place = place("--rows-per-file 2");
    fs::remove_file(entry(&place, 1)).unwrap();
    let lost = place.exits(&verify("out"), 1);
    assert!(lost.err.contains("the manifest has entries for 2 of 3 rows"), "{lost:?}");
    fs::remove_file(place.path("out/_elmo/done.json")).unwrap();
    let unfinished = place.exits(&verify("out"), 1);
    assert!(unfinished.err.contains("is not finished"), "{unfinished:?}");
    // Inspecting an incomplete output is not an error.
    assert_eq!(place.exits("inspect out --json", 0).json()["manifest"]["complete"], false);
    place.write("out/_elmo/done.json", "{");
    place.exits("inspect out", 5);
}

#[test]
fn footers() {
    let place = place("--rows-per-file 2");
    alter_footer(&place, &part(&place, "out", 1), "elmo.layers", "top");
    for words in [verify("out"), "inspect out".to_owned()] {
        let ended = place.exits(&words, 1);
        let named = ended.err.contains(&part_name(&place, "out", 1)) && ended.err.contains("elmo.layers is \"top\"");
        assert!(named, "{ended:?}");
    }
    // By itself as well: the manifest knows.
    let ended = place.exits(&verify(&part(&place, "out", 1)), 1);
    assert!(ended.err.contains("the footers disagree with the manifest: elmo.layers"), "{ended:?}");
    place.exits(&verify(&part(&place, "out", 0)), 0);
}

/// SQL writes columns of different settings into one file. Expected values: what the model computes with the settings of the
/// call, to the last bit.
#[test]
fn columns_with_settings_of_their_own() {
    let place = Place::new();
    for (number, columns) in [
        "elmo_embed(text, layers => 'top') AS embedding, elmo_embed(text) AS other",
        "elmo_embed(text) AS other, elmo_embed(text, layers => 1, normalize => 'l2', max_tokens => 4) AS embedding",
        "elmo_embed(text, state => 'warm', tokenizer => 'whitespace') AS embedding, elmo_embed(text) AS other",
        "elmo_embed(text, sentences => 'off', pooling => 'max') AS other, elmo_tokens(text, state => 'warm') AS tokens",
        "elmo_embed(text, model => 'big') AS other, elmo_embed(text, layers => 'top', state => 'warm') AS embedding",
    ]
    .into_iter()
    .enumerate()
    {
        let file = format!("{number}.parquet");
        let copy = format!("COPY (SELECT id, text, {columns} FROM 'reviews.jsonl' LIMIT 9) TO '{file}'");
        let written = sql(&place, &["--model", "tiny", "--add-model", "big=books", "--device", "cpu", "-c", &copy]);
        assert_eq!(written.code, Some(0), "{written:?}");
        let report = place.exits(&verify(&format!("{file} --tolerance 0")), 0).json();
        assert_eq!((&report["sampled"], &report["bit_equal_rows"]), (&json!(9), &json!(9)), "{columns}: {report}");
    }
}

/// UNION ALL of calls: the field has the settings of one of them. Rows of one setting are verified, others are refused.
#[test]
fn a_column_of_several_settings_is_refused() {
    let place = Place::new();
    let of = |options: &str| format!("SELECT id, text, elmo_embed(text{options}) AS embedding FROM 'reviews.jsonl'");
    for (number, (other, key)) in [
        ("", None),
        (", pooling => 'max'", Some("elmo.pooling")),
        (", state => 'warm'", Some("elmo.state")),
        (", tokenizer => 'whitespace'", Some("elmo.tokenizer")),
    ]
    .into_iter()
    .enumerate()
    {
        let file = format!("{number}.parquet");
        let copy = format!("COPY ({} UNION ALL {}) TO '{file}'", of(""), of(other));
        assert_eq!(sql(&place, &["--model", "tiny", "-c", &copy]).code, Some(0));
        let ended = place.run(&verify(&file));
        assert_eq!(ended.code, Some(i32::from(key.is_some())), "{other}: {ended:?}");
        let said =
            key.is_none_or(|key| ended.err.contains(&format!("with several settings: {key} differs between rows")));
        assert!(said, "{other}: {ended:?}");
    }
}

/// Expected values: the footer of `elmo embed`. The field of its column names the model, layers and pooling only, and so did
/// copies of earlier versions.
#[test]
fn copies_by_sql_record_all_settings() {
    let place = place("--state warm --tokenizer words --sentences off");
    let copied = sql(&place, &["-c", "COPY (SELECT * FROM 'out') TO 'copy.parquet'"]);
    assert_eq!(copied.code, Some(0), "{copied:?}");
    let sorted = |name: &str| {
        let pairs = read(&place, name).1.into_iter().map(|pair| (pair.key, pair.value));
        let mut pairs: Vec<(String, Option<String>)> = pairs.collect();
        pairs.sort();
        pairs
    };
    let made = part(&place, "out", 0);
    assert_eq!(sorted("copy.parquet"), sorted(&made));
    place.exits(&verify("copy.parquet --tolerance 0"), 0);

    let (rows, mut footer) = read(&place, &made);
    footer.retain(|pair| ["elmo.fingerprint", "elmo.layers", "elmo.pooling"].contains(&pair.key.as_str()));
    write_alone(&place, "old.parquet", &rows, footer);
    let ended = place.exits(&verify("old.parquet"), 1);
    let lost = "does not record elmo.on_long (--on-long), elmo.sentences (--sentences), elmo.state (--state), \
                elmo.tokenizer (--tokenizer)";
    assert!(ended.err.contains(lost) && !ended.err.contains("changed"), "{ended:?}");
}

#[test]
fn texts_from_the_inputs() {
    let place = place("--keep none --rows-per-file 2");
    place.exits(&verify("out"), 0);
    let one = place.exits(&verify(&part(&place, "out", 1)), 0).json();
    assert_eq!((&one["rows"], &one["bit_equal_rows"]), (&json!(1), &json!(1)), "{one}");
    // A folder may be called like a file.
    place.exits("embed -q --model tiny --input plain.txt --output x.parquet --keep none", 0);
    place.exits(&verify("x.parquet"), 0);
    let far = place.path("far.parquet");
    fs::copy(place.path(&part(&place, "out", 1)), far).unwrap();
    assert!(place.exits(&verify("far.parquet"), 2).err.contains("no manifest beside it"));

    // In as many bytes, so that only the rows tell.
    place.write("plain.txt", "It rained. We stayed in.\n\nThe bank was sleek.\n");
    let changed = place.exits(&verify("out"), 3);
    assert!(changed.err.contains("plain.txt") && changed.err.contains("changed since"), "{changed:?}");
    place.write("plain.txt", "It rained.\n");
    let changed = place.exits(&verify("out"), 3);
    assert!(changed.err.contains("plain.txt") && changed.err.contains("changed since"), "{changed:?}");
    fs::remove_file(place.path("plain.txt")).unwrap();
    place.exits(&verify("out"), 3);
}

/// As `elmo embed` does: a copy is accepted for its rows, and another row is noticed, also where it is in a kept column.
#[test]
fn inputs_that_were_copied() {
    let place = Place::new();
    let rows = "id,score,text\n007,1,It rained.\n008,2,We stayed in.\n009,3,The bank was steep.\n";
    let words = "embed -q --model tiny --device cpu --input rows.csv --rows-per-file 2 --output";
    for (output, more) in [
        ("none", "--keep none"),
        ("id", "--keep none --id id"),
        ("columns", "--keep score,id"),
        ("strings", "--keep score --types string"),
    ] {
        place.write("rows.csv", rows);
        place.exits(&format!("{words} {output} {more}"), 0);
        let later = std::time::SystemTime::now() + std::time::Duration::from_secs(3600);
        File::options().write(true).open(place.path("rows.csv")).unwrap().set_modified(later).unwrap();
        place.exits(&verify(&format!("{output} --tolerance 0")), 0);
        place.exits(&format!("{words} {output} {more}"), 0);
        let changes = [("steep", "muddy", true), (",3,", ",4,", matches!(output, "columns" | "strings"))];
        for (from, to, is_read) in changes {
            place.write("rows.csv", rows.replace(from, to));
            let (verified, embedded) = (place.run(&verify(output)), place.run(&format!("{words} {output} {more}")));
            let codes = (verified.code, embedded.code);
            assert_eq!(codes, if is_read { (Some(3), Some(2)) } else { (Some(0), Some(0)) }, "{output} {verified:?}");
            assert_eq!(verified.err.contains("rows.csv: changed since"), is_read, "{output}: {verified:?}");
        }
    }
}

/// `inspect` and `verify` name what is lost or damaged, and the command that they name repairs it.
#[test]
fn every_kind_of_damage_is_named_and_repaired() {
    type Damage = fn(&Place);
    let damages: [(&str, Damage, i32, &str); 10] = [
        (
            "",
            |place| fs::remove_file(place.path(&part(place, "out", 1))).unwrap(),
            1,
            "is in the manifest but does not",
        ),
        ("", |place| fs::write(place.path(&part(place, "out", 1)), "cut").unwrap(), 3, "not a readable Parquet file"),
        (
            "--check",
            |place| {
                let path = place.path(&part(place, "out", 1));
                let mut bytes = fs::read(&path).unwrap();
                bytes[4] ^= 1;
                fs::write(path, bytes).unwrap();
            },
            1,
            "has other bytes than the job wrote",
        ),
        ("", |place| fs::remove_file(entry(place, 1)).unwrap(), 1, "has lost its entry in the manifest"),
        ("", |place| fs::write(entry(place, 1), "{\"file\": \"par").unwrap(), 1, "has lost its entry in the manifest"),
        ("", |place| fs::remove_file(entry(place, 2)).unwrap(), 1, "has lost its entry in the manifest"),
        ("", |place| fs::remove_file(place.path("out/_elmo/job.json")).unwrap(), 5, "job.json is missing or damaged"),
        ("", |place| place.write("out/_elmo/job.json", "{"), 5, "job.json is missing or damaged"),
        ("", |place| place.write("out/_elmo/done.json", "{"), 5, "done.json is missing or damaged"),
        ("", |place| place.write("out/_elmo/done.json", ""), 1, "is not finished"),
    ];
    let words = "embed --model tiny --device cpu --input plain.txt --output out --rows-per-file 1";
    for (number, (more, damage, code, message)) in damages.into_iter().enumerate() {
        let place = place("--rows-per-file 1");
        damage(&place);
        let ended = place.exits(&verify("out --sample 1"), code);
        assert!(ended.err.contains(message), "{number}: {ended:?}");
        assert!(ended.err.contains("elmo command"), "{number}: {ended:?}");
        assert!(!ended.err.contains("delete part"), "{number}: a part of the job itself: {ended:?}");
        let repaired = place.exits(&format!("{words} {more}"), 0);
        assert!(repaired.err.contains("WARN") || code == 5, "{number}: it is said: {repaired:?}");
        place.exits(&verify("out --tolerance 0"), 0);
    }
    // Without any manifest a folder is as good as a copy; the command writes both anew.
    let place = place("--rows-per-file 1");
    fs::remove_dir_all(place.path("out/_elmo")).unwrap();
    assert_eq!(place.exits(&verify("out"), 0).json()["manifest"], Value::Null);
    assert!(place.exits(words, 0).err.contains("the manifest is lost"));
    assert_eq!(place.exits(&verify("out"), 0).json()["manifest"]["complete"], true);
}

#[test]
fn texts_from_standard_input() {
    let place = Place::new();
    let line = "printf 'It rained.\\n' | elmo embed -q --model tiny --input - --output";
    assert_eq!(place.shell(&format!("{line} kept")).code, Some(0));
    assert_eq!(place.shell(&format!("{line} lost --keep none")).code, Some(0));
    place.exits(&verify("kept"), 0);
    let lost = place.exits(&verify("lost"), 2);
    assert!(lost.err.contains("the texts came from standard input and were not kept"), "{lost:?}");
}

#[test]
fn the_column_that_was_embedded() {
    let place = Place::new();
    let rows = "{\"text\": \"not this\", \"message\": \"It rained.\"}\n{\"text\": \"nor this\", \"message\": null}\n";
    place.write("logs.jsonl", rows);
    for keep in ["all", "none"] {
        let words = format!("embed -q --model tiny --input logs.jsonl --output {keep} --column message --keep {keep}");
        place.exits(&words, 0);
        place.exits(&verify(keep), 0);
    }
    place.exits(&verify("all --column text"), 1);
}

#[test]
fn rows_with_an_error() {
    let place = Place::new();
    place.write("latin1.txt", b"It rained.\ncaf\xe9\nWe stayed in.\n");
    for (output, not_recomputed) in [("kept", 1), ("none", 0)] {
        let keep = if output == "kept" { "all" } else { "none" };
        let words = "embed -q --model tiny --input latin1.txt --on-error null";
        place.exits(&format!("{words} --output {output} --keep {keep}"), 6);
        let report = place.exits(&verify(output), 0).json();
        assert_eq!((&report["rows"], &report["mismatched_rows"]), (&json!(3), &json!(0)), "{report}");
        assert_eq!(report["not_recomputed"], not_recomputed, "{report}");
    }
    place.exits("embed -q --model tiny --input latin1.txt --output skipped --on-error skip", 6);
    assert_eq!(place.exits(&verify("skipped"), 0).json()["rows"], 2);
}

#[test]
fn no_rows() {
    let place = Place::new();
    place.write("empty.txt", "");
    for keep in ["all", "none"] {
        place.exits(&format!("embed -q --model tiny --input empty.txt --output {keep} --keep {keep}"), 0);
        let report = place.exits(&verify(keep), 0).json();
        assert_eq!((&report["rows"], &report["sampled"]), (&json!(0), &json!(0)), "{report}");
    }
}

#[test]
fn another_precision() {
    for (precision, passes, fails) in [("bf16", 0.05, 0.2), ("int8", 0.2, 0.5)] {
        let place = place(&format!("--precision {precision}"));
        let exact = place.exits(&verify("out"), 2);
        assert!(exact.err.contains(&format!("add --precision {precision}")), "{exact:?}");
        // The same bits on the same machine.
        place.exits(&verify(&format!("out --precision {precision} --tolerance 0")), 0);
        // Other kinds of processors differ in the second digit.
        let changed = |by: f32| {
            let words = format!("{} --precision {precision}", verify("out"));
            altered(&place, &words, |rows| {
                with_vectors(rows, |values, width| {
                    values[0] += by;
                    width
                })
            })
            .code
        };
        assert_eq!((changed(passes), changed(fails)), (Some(0), Some(1)), "{precision}");
    }
}

#[test]
fn tolerances_are_numbers() {
    let place = Place::new();
    assert!(place.exits("verify out --model tiny --tolerance nan", 2).err.contains("a number of at least 0"));
}

#[test]
fn a_column_without_texts_is_named() {
    let place = Place::new();
    place.write("a.csv", "id,text\n1,It rained.\n");
    place.exits("embed a.csv -q --model tiny --device cpu --keep id -o ids", 0);
    let ended = place.exits(&verify("ids --column id"), 3);
    let said = ".parquet: column \"id\" is Int64; a text column is string, binary or a list of strings";
    assert!(ended.err.contains(said), "{ended:?}");
    assert!(ended.err.contains("  help: name another column with --column"), "{ended:?}");
}

#[test]
fn inspect_counts() {
    let place = place("");
    let counts = |change: &dyn Fn(&mut [f32])| {
        let ended = altered(&place, "inspect out --json", |rows| {
            with_vectors(rows, |values, width| {
                change(&mut values[..width as usize]);
                width
            })
        });
        let vectors = ended.json()["vectors"].clone();
        let counts = ["count", "null_rows", "zero", "not_finite"].map(|key| vectors[key].clone());
        (ended.code, json!(counts))
    };
    assert_eq!(counts(&|_| {}), (Some(0), json!([2, 1, 0, 0])));
    assert_eq!(counts(&|vector| vector[0] = f32::NAN), (Some(1), json!([2, 1, 0, 1])));
    assert_eq!(counts(&|vector| vector[0] = f32::INFINITY), (Some(1), json!([2, 1, 0, 1])));
    assert_eq!(counts(&|vector| vector.fill(0.0)), (Some(0), json!([2, 1, 1, 0])));
    // Large, and numbers all the same.
    assert_eq!(counts(&|vector| vector.fill(f32::MAX)), (Some(0), json!([2, 1, 0, 0])));
}

/// A column of type Null has no values.
#[test]
fn inspect_counts_no_errors_in_a_column_of_nulls() {
    let place = Place::new();
    let copy = "COPY (SELECT value AS id, NULL AS error FROM range(0, 3)) TO 'nulls.parquet'";
    assert_eq!(sql(&place, &["-c", copy]).code, Some(0));
    let counted = place.exits("inspect nulls.parquet --json", 0).json();
    assert_eq!((&counted["rows"], &counted["errors"]), (&3.into(), &0.into()), "{counted}");
}

#[test]
fn a_damaged_file_is_damaged_data() {
    let place = place("");
    let bytes = fs::read(place.path(&part(&place, "out", 0))).unwrap();
    place.write(&part(&place, "out", 0), &bytes[..bytes.len() - 20]);
    for words in ["inspect out".to_owned(), verify("out")] {
        let ended = place.exits(&words, 3);
        assert!(ended.err.contains("not a readable Parquet file"), "{ended:?}");
        assert!(ended.err.contains("  help: run the elmo command of this output again"), "{ended:?}");
    }
}
