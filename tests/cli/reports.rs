//! Reports on stdout: for people, and as JSON.

use serde_json::Value;

use crate::{
    markup::Page,
    place::{Place, snapshot, steady},
};

fn place() -> Place {
    let place = Place::new();
    place.write("plain.txt", "It rained. We stayed in.\n\nThe bank was steep.\n");
    place.exits("embed -q --model tiny --input plain.txt --output out", 0);
    place
}

#[test]
fn embed() {
    let place = place();
    // The job is complete, so only the time differs from run to run.
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
    // Sizes and numbers depend on the machine, names and counts do not.
    snapshot("report-inspect-json", &shape(&inspected));
    snapshot("report-verify-json", &shape(&verified));
}

/// A report whose fractions, sizes and strings are replaced by their types, as they differ between machines.
fn shape(report: &Value) -> String {
    fn of(value: &Value) -> Value {
        match value {
            Value::Object(fields) => fields.iter().map(|(name, value)| (name.clone(), of(value))).collect(),
            Value::Array(items) => items.iter().map(of).collect(),
            Value::Number(number) if number.is_f64() => "[NUMBER]".into(),
            Value::Number(number) if number.as_u64().is_some_and(|n| n > 9999) => "[LARGE]".into(),
            Value::String(_) => "[TEXT]".into(),
            other => other.clone(),
        }
    }
    serde_json::to_string_pretty(&of(report)).unwrap()
}

/// The names in a report and the types of their values, sorted. Of a list, only the first item counts.
fn names(report: &Value) -> String {
    fn collect(at: &str, value: &Value, names: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                fields.iter().for_each(|(name, value)| collect(&format!("{at}.{name}"), value, names))
            }
            Value::Array(items) if items.is_empty() => names.push(format!("{at}[]")),
            Value::Array(items) => collect(&format!("{at}[]"), &items[0], names),
            Value::Null => names.push(format!("{at}: null")),
            Value::Bool(_) => names.push(format!("{at}: true or false")),
            Value::Number(_) => names.push(format!("{at}: number")),
            Value::String(_) => names.push(format!("{at}: string")),
        }
    }
    let mut all = Vec::new();
    collect("", report, &mut all);
    all.sort();
    all.join("\n")
}

#[test]
fn demo_and_doctor() {
    let place = place();
    let demo = place.exits("demo -q --json", 0).json();
    assert_eq!(demo["job"]["rows_out"], 200);
    assert_eq!(demo["nearest"].as_array().unwrap().len(), 5);
    assert_eq!(demo["untrained"], false);
    snapshot("report-demo-json", &names(&demo));
    let doctor = place.exits("doctor --json", 0).json();
    snapshot("report-doctor-json", &names(&doctor));
    assert_eq!(doctor["self_test"]["passed"], true, "{doctor}");
    let text = doctor.to_string();
    assert!(!text.contains(place.path("home").to_str().unwrap()), "the home folder is not shown: {text}");
}

#[test]
fn bench() {
    let place = place();
    let report = place.exits("bench --model tiny --text reviews.jsonl --seconds 2 --json", 0).json();
    for key in ["tokens_per_second", "padding", "cache_hits", "ceiling_gflops", "share_of_ceiling"] {
        assert!(report.get(key).is_some(), "no {key} in {report}");
    }
    snapshot("report-bench-json", &names(&report));
}

/// Expected: bounds around what a program in numpy with the same rounding found for `books` (layers 1.3, 1.7 and 1.5 % with 8 bits,
/// 2.0, 2.5 and 2.3 % with 7).
#[test]
fn drift_of_a_precision() {
    let place = place();
    let report = place.exits("bench --text reviews.jsonl --precision int8 --drift --json", 0).json();
    for layer in report["layers"].as_array().unwrap() {
        let rms = layer["relative_rms"].as_f64().unwrap();
        assert!(rms > 0.008 && rms < 0.04, "{report}");
    }
    assert_eq!(report["layers"].as_array().unwrap().len(), 3);
    assert!(
        report["cosine_min"].as_f64().unwrap() > 0.998 && report["same_neighbour"].as_f64().unwrap() > 0.8,
        "{report}"
    );
    let shown = place.exits("bench --text reviews.jsonl --precision int8 --drift", 0).out;
    assert!(shown.contains("int8 on cpu, against f32") && shown.contains("same neighbour"), "{shown}");
    let same = place.exits("bench --text reviews.jsonl --drift", 2);
    assert!(same.err.contains("add --precision int8 or bf16"), "{same:?}");
    place.write("one.jsonl", "{\"text\": \"The same.\"}\n{\"text\": \"The same.\"}\n");
    assert!(place.exits("bench --text one.jsonl --precision int8 --drift", 2).err.contains("two distinct texts"));
}

#[test]
fn the_demo_leaves_the_files_of_others_alone() {
    let place = Place::new();
    place.write("reviews.jsonl", "{\"text\": \"mine\"}\n");
    place.exits("embed -q --model tiny --input reviews.jsonl --output vectors", 0);
    let mut parts = std::fs::read_dir(place.path("vectors")).unwrap().map(|file| file.unwrap().path());
    let part = parts.find(|path| path.extension().is_some_and(|end| end == "parquet")).unwrap();
    let vectors = std::fs::read(&part).unwrap();
    // The second time in its own output.
    for _ in 0..2 {
        let shown = place.exits("demo -q --output .", 0).out;
        assert!(shown.contains("elmo inspect ./elmo-demo/vectors"), "{shown}");
        place.exits("inspect elmo-demo/vectors", 0);
    }
    place.write("elmo-demo/reviews.jsonl", "{\"text\": \"mine too\"}\n");
    let refused = place.exits("demo -q --output .", 2);
    assert!(refused.err.contains("elmo-demo/reviews.jsonl already exists with other content"), "{refused:?}");
    let read = |name: &str| std::fs::read_to_string(place.path(name)).unwrap();
    assert_eq!(read("reviews.jsonl"), "{\"text\": \"mine\"}\n");
    assert_eq!(read("elmo-demo/reviews.jsonl"), "{\"text\": \"mine too\"}\n");
    assert!(std::fs::read(&part).unwrap() == vectors);
}

/// The picture has what the report has: every sentence and every word, with its numbers.
#[test]
fn the_picture_of_the_demo_is_a_page_of_its_own() {
    let place = Place::new();
    let demo = place.exits("demo -q --json --output .", 0).json();
    let page = Page::parse(&std::fs::read_to_string(place.path("elmo-demo/demo.html")).unwrap());
    page.needs_no_network();
    assert_eq!(page.elements.iter().filter(|name| *name == "svg").count(), 2);
    let list = |list: &Value| list.as_array().unwrap().clone();
    let (contexts, words) = (list(&demo["senses"]["contexts"]), list(&demo["surprisal"]));
    assert_eq!((contexts.len(), words.len() > 10), (8, true), "{demo}");
    for context in &contexts {
        let (sense, text) = (context["sense"].as_str().unwrap(), context["text"].as_str().unwrap());
        assert!(page.text.contains(&format!("{sense} {text}")), "no {text} in {}", page.text);
    }
    for word in &words {
        let number = |name: &str| word[name].as_f64().unwrap();
        let (name, bits) =
            (word["word"].as_str().unwrap(), format!("{:.1} | {:.1}", number("forward"), number("backward")));
        assert!(page.text.contains(name) && page.text.contains(&bits), "no {name}, {bits} in {}", page.text);
    }
}

#[test]
fn a_closed_pipe_is_no_failure() {
    let place = place();
    let ended = place.shell("{ elmo man; echo $? > code; } | true; cat code");
    assert_eq!((ended.out.as_str(), ended.err.as_str()), ("0\n", ""));
    let ended = place.shell("{ elmo model info tiny --tensors; echo $? > code; } | head -n 1 > /dev/null; cat code");
    assert_eq!((ended.out.as_str(), ended.err.as_str()), ("0\n", ""));
    // But it does not hide failures.
    let embed = "elmo embed -q --model tiny --input bad.txt --output rejected --on-error null";
    let ended =
        place.shell(&format!("printf 'a\\n\\377\\n' > bad.txt; {{ {embed}; echo $? > code; }} | true; cat code"));
    assert_eq!(ended.out, "6\n", "{ended:?}");
}
