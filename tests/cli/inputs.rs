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
            ("garbage", "-: after row 0: ", "check that the command that writes to standard input writes one whole"),
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
    for file in ["nothing.bin", "garbage"] {
        let ended = place.exits(&format!("embed {file} -q --model tiny --input-format parquet -o parquet"), 3);
        assert!(ended.err.contains("  help: the file is damaged: "), "{ended:?}");
    }
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
