//! Reports on stdout: for people, and as JSON.

use crate::place::{Place, snapshot};

fn place() -> Place {
    let place = Place::new();
    place.write("plain.txt", "It rained. We stayed in.\n\nThe bank was steep.\n");
    place.exits("embed -q --model tiny --input plain.txt --output out", 0);
    place
}

#[test]
fn embed() {
    let place = place();
    // The job is done already, so nothing is computed: only the time differs from run to run.
    for words in [
        "embed -q --model tiny --input plain.txt --output out",
        "embed -q --model tiny --input plain.txt --output out --json",
    ] {
        snapshot(
            if words.ends_with("json") { "report-embed-json" } else { "report-embed" },
            &steady(&place.exits(words, 0).out),
        );
    }
}

/// Sizes and speeds of text reports.
fn steady(text: &str) -> String {
    let mut lines = Vec::new();
    for line in text.lines() {
        let volatile = ["seconds", "tokens/s", "files", "Parquet", "time", "size", "speed"];
        match volatile.iter().find(|name| line.starts_with(*name)) {
            Some(name) => lines.push(format!("{name}  [MEASURED]")),
            None => lines.push(line.to_owned()),
        }
    }
    lines.join("\n")
}

#[test]
fn models() {
    let place = place();
    snapshot("report-model-info", &place.exits("model info tiny", 0).out);
    snapshot("report-model-info-json", &place.exits("model info tiny --json", 0).out);
    snapshot("report-model-verify", &place.exits("model verify tiny", 0).out);
    snapshot("report-model-verify-json", &place.exits("model verify --model tiny --json", 0).out);
    snapshot("report-model-convert", &place.exits("model convert tiny st --to safetensors", 0).out);
    snapshot("report-model-convert-json", &place.exits("model convert --model st pair --to allennlp --json", 0).out);
}

#[test]
fn inspect_and_verify() {
    let place = place();
    let inspected = place.exits("inspect out --json", 0).json();
    assert_eq!((&inspected["rows"], &inspected["vectors"]["null_rows"]), (&3.into(), &1.into()), "{inspected}");
    let verified = place.exits("verify out --model tiny --json", 0).json();
    assert_eq!((&verified["rows"], &verified["mismatched_rows"]), (&3.into(), &0.into()), "{verified}");
    assert!(place.exits("inspect out", 0).out.contains("rows"));
}

#[test]
fn demo_and_doctor() {
    let place = place();
    let demo = place.exits("demo -q --json", 0).json();
    assert_eq!(demo["job"]["rows_out"], 200);
    assert_eq!(demo["nearest"].as_array().unwrap().len(), 5);
    assert_eq!(demo["untrained"], true);
    let doctor = place.exits("doctor --json", 0).json();
    assert_eq!(doctor["self_test"]["passed"], true, "{doctor}");
    let text = doctor.to_string();
    assert!(!text.contains(place.path("home").to_str().unwrap()), "the home folder is nobody's business: {text}");
}

#[test]
fn bench() {
    let place = place();
    let report = place.exits("bench -q --size tiny --seconds 1 --json", 0).json();
    for key in ["tokens_per_second", "padding", "cache_hits", "ceiling_gflops", "share_of_ceiling"] {
        assert!(report.get(key).is_some(), "no {key} in {report}");
    }
}

#[test]
fn a_closed_pipe_is_no_failure() {
    let place = place();
    let ended = place.shell("{ elmo man; echo $? > code; } | true; cat code");
    assert_eq!((ended.out.as_str(), ended.err.as_str()), ("0\n", ""));
    let ended = place.shell("{ elmo model info tiny --tensors; echo $? > code; } | head -n 1 > /dev/null; cat code");
    assert_eq!((ended.out.as_str(), ended.err.as_str()), ("0\n", ""));
}
