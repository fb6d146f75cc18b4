//! `elmo score`: against SQL, inspected, verified, interrupted.

use std::fs;

use super::prepared;
use crate::place::{Place, ended};

fn rows(place: &Place, query: &str) -> String {
    let ended = ended(place.elmo().args(["sql", "-q", "--format", "ndjson", "-c", query]).output().unwrap());
    assert_eq!(ended.code, Some(0), "{query}: {ended:?}");
    ended.out
}

/// Bit for bit: JSON has all digits.
#[test]
fn scores_are_those_of_sql() {
    let place = Place::new();
    let report = place.exits("score reviews.jsonl --output scores --rows-per-file 70 --json -q", 0).json();
    assert_eq!((&report["rows_out"], &report["parts"]), (&200.into(), &3.into()));
    let columns = "id, perplexity, surprisal, truncated, error";
    let found = rows(&place, &format!("SELECT {columns} FROM 'scores/*.parquet' ORDER BY id"));
    let query = "SELECT id, elmo_perplexity(text) AS perplexity, elmo_surprisal(text) AS surprisal, false AS truncated, \
                 CAST(NULL AS VARCHAR) AS error FROM 'reviews.jsonl' ORDER BY id";
    let expected = rows(&place, query);
    assert!(expected.contains("\"forward\"") && expected.lines().count() == 200);
    assert!(found == expected, "{found:.2000}\n\n{expected:.2000}");
    // Texts alone.
    place.exits("score reviews.jsonl --level sentence --keep id --output texts -q", 0);
    let texts = rows(&place, "SELECT * FROM 'texts/*.parquet' ORDER BY id");
    let query = "SELECT id, perplexity, truncated, error FROM 'scores/*.parquet' ORDER BY id";
    assert_eq!(texts, rows(&place, query));
}

#[test]
fn scores_are_inspected_and_verified() {
    let place = prepared();
    place.train("--steps 4 --output run -q", 0);
    place.write(
        "texts.jsonl",
        "{\"text\": \"w1 w2 unheard\"}\n{\"text\": null}\n{\"text\": \"\"}\n{\"text\": \"w3\"}\n",
    );
    place.exits("score texts.jsonl --model run --output out -q", 0);
    let report = place.exits("inspect out --json", 0).json();
    // Counted by hand.
    let scores = &report["scores"];
    assert_eq!((&scores["texts"], &scores["null_rows"]), (&2.into(), &2.into()), "{report}");
    assert_eq!((&scores["tokens"], &scores["unknown"], &scores["not_finite"]), (&4.into(), &1.into(), &0.into()));
    assert!(scores["perplexity_min"].as_f64() <= scores["perplexity_median"].as_f64(), "{scores}");
    assert_eq!(report["made_by"]["elmo.scores"], "token");
    assert_eq!(report["made_by"]["elmo.layers"], serde_json::Value::Null);
    let shown = place.exits("inspect out", 0).out;
    assert!(shown.contains("texts scored") && !shown.contains("dimensions"), "{shown}");
    // Two perplexities and four surprisals.
    let verified = place.exits("verify out --model run --json -q", 0).json();
    assert_eq!(
        (&verified["sampled"], &verified["bit_equal_rows"], &verified["scores"]),
        (&4.into(), &4.into(), &6.into())
    );
    // With texts that are read again from the inputs.
    place.exits("score texts.jsonl --model run --keep none --output bare -q", 0);
    let bare = place.exits("verify bare --model run --tolerance 0 --json -q", 0).json();
    assert_eq!(bare["bit_equal_rows"], 4);
    let other = place.exits("verify out -q", 1);
    assert!(other.err.contains("made by another model"), "{other:?}");
    // The same weights with the softmax of another run.
    place.train("--steps 5 --output more -q", 0);
    for name in ["options.json", "weights.safetensors", "vocab.txt", "softmax.safetensors"] {
        place.write(&format!("mixed/{name}"), fs::read(place.path("run").join(name)).unwrap());
    }
    let head = elmo::lm_head::LmHeadFiles::find(&place.path("more")).unwrap().read(8).unwrap();
    head.save(&place.path("mixed")).unwrap();
    let mixed = place.exits("verify out --model mixed -q", 1);
    assert!(mixed.err.contains("elmo.lm_head"), "{mixed:?}");
    let resumed = place.exits("score texts.jsonl --model mixed --output out -q", 2);
    assert!(resumed.err.contains("elmo.lm_head"), "{resumed:?}");
    let vectors = place.exits("embed texts.jsonl --model run --output out -q", 2);
    assert!(vectors.err.contains("--overwrite"), "{vectors:?}");
}

#[test]
fn an_interrupted_job_resumes_to_the_same_bytes() {
    let place = prepared();
    place.train("--steps 2 --output run -q", 0);
    let words = "score a.txt --model run --output out --rows-per-file 500 --window-rows 100 -q";
    let stopped = place.interrupted(words);
    assert_eq!(stopped.code, Some(130), "{stopped:?}");
    let resumed = place.exits(&format!("{words} --json"), 0).json();
    assert!(resumed["resumed_rows"].as_u64() >= Some(500), "{resumed}");
    place.exits(&words.replace("--output out", "--output whole"), 0);
    let parts = |folder: &str| -> Vec<Vec<u8>> {
        (0..12).map(|number| fs::read(place.path(&place.part(folder, number))).unwrap()).collect()
    };
    assert!(parts("out") == parts("whole"), "the files differ");
}

#[test]
fn a_model_without_a_head_cannot_score() {
    let place = Place::new();
    let ended = place.exits("score reviews.jsonl --model tiny --output out -q", 4);
    assert!(ended.err.contains("has no LM head") && ended.err.contains("elmo finetune --vocab"), "{ended:?}");
    assert!(!place.path("out").exists());
    place.write("long.txt", "one two three four five\n");
    let long = "score long.txt --output out --max-tokens 3 --on-long error -q";
    place.exits(long, 3);
    let null = place.exits(&format!("{} --json --overwrite", long.replace("-q", "-q --on-error null")), 6).json();
    assert_eq!(null["errors"], 1);
    let plan = place.exits("score long.txt --output plan --dry-run --json -q", 0).json();
    assert_eq!((&plan["rows"], &plan["columns"][1]), (&1.into(), &"perplexity".into()));
}
