//! What `elmo embed` reads, as it is typed.

use std::{fs, path::Path};

use crate::place::Place;

const ROWS: &str = "{\"text\": \"It rained.\", \"n\": 1}\n{\"text\": \"We stayed in.\", \"n\": 2}\n";

/// The number of rows that an output has, as JSON of its report.
fn rows_of(place: &Place, output: &str) -> i64 {
    place.exits(&format!("inspect --json {output}"), 0).json()["rows"].as_i64().unwrap()
}

fn inputs_of(place: &Place, output: &str) -> Vec<String> {
    let job = fs::read_to_string(place.path(&format!("{output}/_elmo/job.json"))).unwrap();
    let job: serde_json::Value = serde_json::from_str(&job).unwrap();
    let name = |input: &serde_json::Value| Path::new(input["file"].as_str().unwrap()).file_name().unwrap().to_owned();
    job["inputs"].as_array().unwrap().iter().map(|input| name(input).into_string().unwrap()).collect()
}

#[test]
fn inputs_need_no_option() {
    let place = Place::new();
    for name in ["a", "b", "c", "d"] {
        place.write(&format!("{name}.txt"), "It rained.\n");
    }
    let embed = |words: &str, output: &str| {
        place.exits(&format!("embed -q --model tiny {words} -o {output}"), 0);
        inputs_of(&place, output)
    };
    assert_eq!(embed("d.txt", "one"), ["d.txt"]);
    assert_eq!(embed("d.txt --input b.txt --limit 3 c.txt -i a.txt", "order"), ["d.txt", "b.txt", "c.txt", "a.txt"]);
    // The command line overrides the environment, which overrides the file.
    place.write("elmo.toml", "[embed]\ninput = ['a.txt', 'b.txt']\n");
    assert_eq!(embed("", "file"), ["a.txt", "b.txt"]);
    assert_eq!(embed("c.txt", "argument"), ["c.txt"]);
    assert_eq!(embed("--input d.txt", "option"), ["d.txt"]);
    let env = [("ELMO_INPUT", "b.txt")];
    assert_eq!(place.run_with("embed -q --model tiny -o env", &env).code, Some(0));
    assert_eq!(inputs_of(&place, "env"), ["b.txt"]);
    assert_eq!(place.run_with("embed -q --model tiny a.txt -o both", &env).code, Some(0));
    assert_eq!(inputs_of(&place, "both"), ["a.txt"]);
}

#[test]
fn without_an_input_an_example_is_shown() {
    let place = Place::new();
    for words in ["embed", "embed -o out", "embed reviews.jsonl"] {
        let ended = place.exits(words, 2);
        assert!(ended.err.contains("elmo embed reviews.jsonl --output vectors"), "{ended:?}");
    }
}

#[test]
fn a_trial_is_a_job_of_its_own() {
    let place = Place::new();
    let dry = place.exits("embed reviews.jsonl --model tiny -q --limit 7 -o trial --dry-run --json", 0).json();
    assert_eq!((dry["rows"].as_u64(), dry["rows_exact"].as_bool()), (Some(7), Some(true)));
    let report = place.exits("embed reviews.jsonl --model tiny -q --limit 7 -o trial --keep id --json", 0).json();
    assert_eq!((report["rows_in"].as_u64(), report["rows_out"].as_u64()), (Some(7), Some(7)));
    assert_eq!(rows_of(&place, "trial"), 7);
    place.exits("verify trial --model tiny --sample 7", 0);
    let ended = place.exits("embed reviews.jsonl --model tiny -q --limit 8 -o trial --keep id", 2);
    assert!(ended.err.contains("limit: was 7, now 8"), "{ended:?}");
    place.exits("embed reviews.jsonl --model tiny -q --limit 0 -o other", 2);
    // As many lines of a pipe as are asked for, whatever follows.
    let ended = place.shell("yes 'It rained.' | elmo embed - --model tiny -q --limit 5 -o lines --json");
    assert_eq!(ended.json()["rows_in"], 5, "{ended:?}");
}

/// The same rows from a pipe as from a file.
#[test]
fn every_format_from_a_pipe() {
    let place = Place::new();
    place.write("rows.jsonl", ROWS);
    place.write("rows.json", "[{\"text\": \"It rained.\", \"n\": 1},\n {\"text\": \"We stayed in.\", \"n\": 2}]");
    place.write("rows.csv", "text,n\nIt rained.,1\nWe stayed in.,2\n");
    place.write("rows.tsv", "text\tn\nIt rained.\t1\nWe stayed in.\t2\n");
    for format in ["parquet", "arrow"] {
        place.exits_sql(&format!("COPY (SELECT * FROM 'rows.jsonl') TO 'rows.{format}'"));
    }
    place.exits("embed rows.csv -q --model tiny --keep text,n -o file", 0);
    let of_file = place.exits_sql("SELECT text, n, embedding FROM 'file/*.parquet'");
    for (file, format) in [
        ("rows.jsonl", "jsonl"),
        ("rows.json", "jsonl"),
        ("rows.csv", "csv"),
        ("rows.tsv", "tsv"),
        ("rows.parquet", "parquet"),
        ("rows.arrow", "arrow"),
    ] {
        let line =
            format!("cat {file} | elmo embed - -q --model tiny --input-format {format} --keep text,n -o pipe-{file}");
        let ended = place.shell(&line);
        assert_eq!(ended.code, Some(0), "{file}: {ended:?}");
        let of_pipe = place.exits_sql(&format!("SELECT text, n, embedding FROM 'pipe-{file}/*.parquet'"));
        assert_eq!(of_pipe, of_file, "{file}");
        // Standard input cannot be read again.
        let again = place.shell(&line);
        assert_eq!(again.code, Some(2), "{again:?}");
    }
    let large: String = (0..60_000).map(|n| format!("{{\"text\": \"It rained.\", \"n\": {n}}}\n")).collect();
    // More than is looked at before the first row.
    assert!(large.len() > 1 << 20);
    place.write("large.jsonl", large);
    let ended = place
        .shell("cat large.jsonl | elmo embed - -q --model tiny --input-format jsonl --limit 50000 -o large --json");
    assert_eq!(ended.json()["rows_out"], 50_000, "{ended:?}");
}

/// A Parquet or Arrow file has bytes even without rows; an empty input in another format has no rows.
#[test]
fn nothing_from_a_pipe() {
    let place = Place::new();
    place.write("garbage", "It rained all day, which is no Parquet and no Arrow.\n");
    for format in ["text", "csv", "tsv", "jsonl"] {
        let ended = place
            .shell(&format!("elmo embed - -q --model tiny --input-format {format} -o {format} --json < /dev/null"));
        assert_eq!((ended.code, &ended.json()["rows_in"]), (Some(0), &0.into()), "{format}: {ended:?}");
    }
    for format in ["parquet", "arrow"] {
        for (input, reason, help) in [
            ("/dev/null", "-: is empty, and a Parquet or Arrow file never is", "check the command that writes"),
            (
                "garbage",
                "-: after row 0: not a",
                "check that the command that writes to standard input writes one whole",
            ),
        ] {
            let line = format!("elmo embed - -q --model tiny --input-format {format} -o {format} < {input}");
            let ended = place.shell(&line);
            assert_eq!(ended.code, Some(3), "{line}: {ended:?}");
            assert!(ended.err.contains(&format!("error: {reason}")), "{line}: {ended:?}");
            assert!(ended.err.contains(&format!("  help: {help}")), "{line}: {ended:?}");
        }
    }
    // A file whose name does not tell its format.
    place.write("nothing.bin", "");
    for (file, help) in [("nothing.bin", "the file is damaged: "), ("garbage", "name its format with --input-format")] {
        let ended = place.exits(&format!("embed {file} -q --model tiny --input-format parquet -o parquet"), 3);
        assert!(ended.err.contains(&format!("  help: {help}")), "{ended:?}");
    }
}

/// Parquet needs its end first.
#[test]
fn parquet_from_a_pipe_without_a_temporary_folder() {
    let place = Place::new();
    place.exits_sql("COPY (SELECT 'a' AS text) TO 'a.parquet'");
    let line = "cat a.parquet | TMPDIR=$PWD/gone elmo embed - -q --model tiny --input-format parquet -o out";
    let ended = place.shell(line);
    assert_eq!(ended.code, Some(5), "{ended:?}");
    let folder = place.path("gone");
    let said = format!("-: cannot be copied to the temporary folder {}: ", folder.display());
    assert!(ended.err.contains(&said), "{ended:?}");
    assert!(ended.err.contains("  help: set TMPDIR to a folder with room, or save the input to a file"), "{ended:?}");
}

#[test]
fn lines_that_look_like_objects_are_noticed() {
    let place = Place::new();
    place.write("rows.jsonl", ROWS);
    place.write("text", "{braces}\n{\"and\": \"more\"}\n");
    let warned = |line: &str| {
        let ended = place.shell(line);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        ended.err.contains("--input-format jsonl")
    };
    assert!(warned("elmo embed - --model tiny -o a < rows.jsonl"));
    assert!(!warned("elmo embed - --model tiny -o b --input-format text < rows.jsonl"));
    assert!(!warned("elmo embed - --model tiny -o c < text"));
}

#[test]
fn malformed_rows_are_reported_without_their_text() {
    let place = Place::new();
    place.write("a.csv", "id,text\n1,It rained.\n2,a secret,and more\n3,We stayed in.\n");
    let ended = place.exits("embed a.csv --model tiny -o out --on-malformed skip", 6);
    let shown = format!("{}{}", ended.out, ended.err);
    assert!(shown.contains("malformed rows") && shown.contains("a.csv, line 3: 3 cells instead of 2"), "{shown}");
    assert!(!shown.contains("secret"), "{shown}");
    assert_eq!(rows_of(&place, "out"), 2);
    place.exits("verify out --model tiny", 0);
    // The same command finds the same.
    let again = place.exits("embed a.csv --model tiny -o out --on-malformed skip", 6);
    assert!(again.out.contains("rows resumed"), "{again:?}");
    let failed = place.exits("embed a.csv --model tiny -o other", 3);
    assert!(failed.err.contains("--on-malformed skip") && !failed.err.contains("secret"), "{failed:?}");
}

/// Elements, lines and bytes counted by hand, in the file as it is written here.
#[test]
fn elements_of_an_array_are_named() {
    let place = Place::new();
    let first = "[\n  {\"text\": \"It rained.\"},\n\n  ";
    let cases: [(&[u8], &str); 5] = [
        (
            b"{\n    \"text\": \"a\" secret\n  },\n {\"text\": \"b\"}]\n",
            "element 2 of the array, in line 4 of the file: not valid JSON: expected `,` or `}` at byte 19 of the element",
        ),
        (
            b"{\"text\": \"a\nsecret\"}]",
            "element 2 of the array, in line 4 of the file: not valid JSON: a line end or an invalid escape in a string at \
             byte 13 of the element",
        ),
        (b"7]", "element 2 of the array, in line 4 of the file: not a JSON object"),
        (
            b"{\"text\": \"secret \xff\"}]",
            "element 2 of the array, in line 4 of the file: not UTF-8: invalid at byte 17 of the element",
        ),
        (b"{} {\"secret\": 1}]", "line 4 of the file, after element 2 of the array: the objects of the array are not"),
    ];
    for (number, (second, reason)) in cases.iter().enumerate() {
        place.write("a.json", [first.as_bytes(), second].concat());
        let embed = format!("elmo embed -q --model tiny -o out-{number}");
        for line in [
            format!("{embed} a.json"),
            format!("{embed} - --input-format jsonl < a.json"),
            "elmo sql -q -c \"SELECT * FROM 'a.json'\"".to_owned(),
        ] {
            let ended = place.shell(&line);
            assert_eq!(ended.code, Some(3), "{line}: {ended:?}");
            assert!(ended.err.contains(&format!("Json error: {reason}")), "{line}: {ended:?}");
            assert!(!ended.err.contains("secret"), "{line}: {ended:?}");
        }
    }
    place.write("a.json", [first.as_bytes(), cases[0].0].concat());
    let ended = place.exits("embed a.json --model tiny -o skipped --on-malformed skip", 6);
    let reason = "a.json, line 4: element 2 of the array: not valid JSON at byte 19 of the element";
    assert!(ended.out.contains(reason), "{ended:?}");
    assert_eq!(rows_of(&place, "skipped"), 2);
    place.write("b.json", "[{\"text\": \"a\nb\"},\n7, {\"text\": \"c\"}]");
    let ended = place.exits("embed b.json --model tiny -o lines --on-malformed skip --json", 6);
    assert_eq!(rows_of(&place, "lines"), 1);
    let logged = |text: &str| ended.err.contains(text);
    assert!(logged("line 1: element 1 of the array: ") && logged("line 3: element 2 of the array: "), "{ended:?}");
}

/// A file whose content is not what its name or the option says, or that never ends.
#[test]
fn what_is_no_text_is_refused_at_its_beginning() {
    let place = Place::new();
    place.write("rows.csv", "id,text\n1,It rained.\n");
    let rows = "\u{feff}id,text\n1,It rained.\n";
    place.write("wide.csv", rows.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<_>>());
    place.write("bare.csv", rows[3..].encode_utf16().flat_map(u16::to_be_bytes).collect::<Vec<_>>());
    assert_eq!(place.shell("gzip -c rows.csv > packed.csv && zstd -qc rows.csv > packed.jsonl").code, Some(0));
    place.exits_sql("COPY (SELECT 'a' AS text) TO 'a.parquet'");
    fs::copy(place.path("a.parquet"), place.path("columns.txt")).unwrap();
    for (file, reason, help) in [
        ("wide.csv", "not csv: it is UTF-16", "iconv -f utf-16"),
        ("bare.csv", "not csv: it begins with NUL bytes", "iconv -f utf-16"),
        ("packed.csv", "not csv: it is compressed with gzip", "ends in .gz"),
        ("packed.jsonl", "not json lines: it is compressed with zstd", "ends in .zst"),
        ("columns.txt", "not text: it is Parquet", "--input-format"),
    ] {
        let ended = place.exits(&format!("embed {file} -q --model tiny -o out"), 3);
        assert!(ended.err.contains(&format!("{file}: {reason}")) && ended.err.contains(help), "{file}: {ended:?}");
        let query = format!("elmo sql -q -c \"SELECT * FROM '{file}'\"");
        let (ended, what) = (place.shell(&query), reason.split_once(": ").unwrap().1);
        assert!(ended.code == Some(3) && ended.err.contains(what), "{query}: {ended:?}");
    }
    for (format, reason) in [
        ("text", "-: not text: it begins with NUL bytes"),
        ("csv", "-: not csv: it begins with NUL bytes"),
        ("tsv", "-: not tsv: it begins with NUL bytes"),
        ("jsonl", "-: not json lines: it begins with NUL bytes"),
        ("parquet", "-: after row 0: not a Parquet file: it does not begin with PAR1"),
        ("arrow", "-: after row 0: not an Arrow file: it has no schema"),
    ] {
        let line = format!("timeout 60 elmo embed - -q --model tiny -o {format} --input-format {format} < /dev/zero");
        let ended = place.shell(&line);
        assert_eq!(ended.code, Some(3), "{line}: {ended:?}");
        assert!(ended.err.contains(reason) && ended.err.contains("  help: "), "{line}: {ended:?}");
    }
}

/// A file that was converted twice has two byte order marks.
#[test]
fn byte_order_marks_are_no_text() {
    let place = Place::new();
    let marks = "\u{feff}\u{feff}";
    place.write("a.csv", format!("{marks}text,n\nIt rained.,1\n"));
    place.write("a.jsonl", format!("{marks}{{\"text\": \"It rained.\", \"n\": 1}}\n"));
    place.write("a.json", format!("{marks}[{{\"text\": \"It rained.\", \"n\": 1}}]"));
    place.write("a.txt", format!("{marks}It rained.\n"));
    for file in ["a.csv", "a.jsonl", "a.json", "a.txt"] {
        place.exits(&format!("embed {file} -q --model tiny --keep text -o out-{file}"), 0);
        assert_eq!(
            place.exits_sql(&format!("SELECT text FROM 'out-{file}/*.parquet'")),
            "text\nIt rained.\n",
            "{file}"
        );
        assert_eq!(place.exits_sql(&format!("SELECT text FROM '{file}'")), "text\nIt rained.\n", "{file}");
    }
}

/// What to do is about the file, where no row can be left out.
#[test]
fn the_help_is_for_the_error() {
    let place = Place::new();
    for (file, content, help) in [
        ("quote.csv", "text\n\"a\n", "close it: a cell of CSV"),
        ("comma.json", "[{\"text\": \"a\"} {\"text\": \"b\"}]", "correct the file: an array holds objects"),
        ("cut.json", "[{\"text\": \"a\"}", "correct the file: an array holds objects"),
        ("item.json", "[{\"text\": \"a\"}, 7]", "correct or remove the row, or leave such rows out with"),
        ("twice.csv", "text,text\na,b\n", "rename one of them"),
    ] {
        place.write(file, content);
        let ended = place.exits(&format!("embed {file} -q --model tiny -o out"), 3);
        assert!(ended.err.contains(&format!("  help: {help}")), "{file}: {ended:?}");
    }
}

#[test]
fn rare_options_are_in_the_long_help_only() {
    let place = Place::new();
    let (short, long) = (place.exits("embed -h", 0).out, place.exits("embed --help", 0).out);
    for option in
        ["--state", "--batch-rows", "--boundaries", "--list-type", "--row-group-mb", "--window-rows", "--word-cache-mb"]
    {
        assert!(!short.contains(option) && long.contains(option), "{option}");
    }
    assert!(short.contains("--level") && short.contains("[INPUT]"));
}

#[test]
fn a_kept_column_with_the_name_of_an_added_one() {
    let place = Place::new();
    place.write("a.csv", "id,tokens\n1,It rained.\n");
    let embed = "embed a.csv --model tiny -q --column tokens --level token -o out";
    let ended = place.exits(embed, 3);
    assert!(ended.err.contains("--keep") && ended.err.contains("tokens"), "{ended:?}");
    place.exits(&format!("{embed} --keep id"), 0);
}
