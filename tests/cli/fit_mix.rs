//! `elmo fit-mix`: data whose labels a known layer carries, the cache, the mix in other commands, and bad input.

use std::fs;

use serde_json::{Value, json};

use crate::place::{Ended, Place, ended};

/// Sentences `left it` and `right it`, in turn: the tag of `it` is that of the word before it, which the token layer cannot know.
fn tagged(sentences: usize) -> String {
    let sentence = |n: usize| if n.is_multiple_of(2) { "left\tO\nit\tB-L\n\n" } else { "right\tO\nit\tB-R\n\n" };
    (0..sentences).map(sentence).collect()
}

/// Texts of two kinds, which a word tells apart.
fn labelled(texts: usize) -> String {
    let row = |n: usize| {
        let (word, kind) = if n.is_multiple_of(3) { ("dreadful", "bad") } else { ("lovely", "good") };
        format!("\"It was, {word}, number {n}.\",{kind}\n")
    };
    "text,kind\n".to_owned() + &(0..texts).map(row).collect::<String>()
}

fn prepared() -> Place {
    let place = Place::new();
    place.write("train.conll", tagged(40));
    place.write("dev.conll", tagged(20));
    place.write("train.csv", labelled(60));
    place.write("dev.csv", labelled(12));
    place
}

const TAGS: &str =
    "fit-mix --model tiny --train train.conll --dev dev.conll --dropout 0 --l2 0 --learning-rate 0.05 --batch 4 -q";

fn fitted(place: &Place, words: &str) -> Value {
    place.exits(&format!("{TAGS} --json --overwrite {words}"), 0).json()
}

fn system<'r>(report: &'r Value, name: &str) -> &'r Value {
    report["systems"].as_array().unwrap().iter().find(|system| system["system"] == name).unwrap()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("no number: {value}"))
}

/// By construction: of the four tokens of two sentences, `it` occurs twice with different tags. The token layer gets one of
/// them right, so three of four tokens, and of the two entities one of two predicted ones.
#[test]
fn what_only_context_tells_is_unknown_to_the_token_layer() {
    let place = prepared();
    let report = fitted(&place, "");
    let names: Vec<&Value> = report["systems"].as_array().unwrap().iter().map(|system| &system["system"]).collect();
    assert_eq!(names, ["untrained", "token", "top", "mix"]);
    assert_eq!(report["measures"], json!(["entity_f1", "precision", "recall", "accuracy"]));
    let token = system(&report, "token");
    assert_eq!((number(&token["mean"]["accuracy"]), number(&token["mean"]["entity_f1"])), (0.75, 0.5), "{token}");
    assert_eq!(number(&token["deviation"]["accuracy"]), 0.0);
    let mix = system(&report, "mix");
    assert_eq!(mix["seeds"].as_array().unwrap().len(), 3);
    assert_eq!(number(&mix["mean"]["entity_f1"]), 1.0, "{mix}");
    assert_eq!(
        report["train"],
        json!({"unit": "sentences", "examples": 40, "labels": {"O": 40, "B-L": 20, "B-R": 20}})
    );
    // By one model and three random ones, of two data sets.
    assert_eq!((&report["features_reused"], &report["features_computed"]), (&json!(0), &json!(8)));
    let written: Value = serde_json::from_slice(&fs::read(place.path("mix.json")).unwrap()).unwrap();
    assert_eq!(written, report["mix"]);
    assert_eq!(written["layer_norm"], false);
}

/// Sentences of six words, `left` and `right` by chance, of which each has the tag of the word before it. The token layer knows no
/// tag: the first word has one of its own, and those of the other five are a coin's tosses.
fn tagged_by_the_word_before(sentences: usize, seed: u64) -> String {
    let mut state = seed;
    let mut is_left = || {
        // Knuth's MMIX.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33).is_multiple_of(2)
    };
    let mut lines = String::new();
    for _ in 0..sentences {
        let mut tag = "first";
        for _ in 0..6 {
            let (word, next) = if is_left() { ("left", "L") } else { ("right", "R") };
            lines.push_str(&format!("{word}\t{tag}\n"));
            tag = next;
        }
        lines.push('\n');
    }
    lines
}

#[test]
fn the_mix_finds_the_layers_that_carry_the_label() {
    let place = Place::new();
    place.write("train.conll", tagged_by_the_word_before(300, 1));
    place.write("dev.conll", tagged_by_the_word_before(60, 2));
    let report = fitted(&place, "");
    assert_eq!(report["measures"], json!(["accuracy", "macro_f1"]));
    let token = system(&report, "token");
    assert!(number(&token["mean"]["accuracy"]) < 0.55, "{token}");
    let mix = system(&report, "mix");
    assert!(number(&mix["mean"]["accuracy"]) > 0.95, "{mix}");
    for seed in mix["seeds"].as_array().unwrap() {
        let weights: Vec<f64> = seed["weights"].as_array().unwrap().iter().map(number).collect();
        assert!((weights.iter().sum::<f64>() - 1.0).abs() < 1e-12, "{weights:?}");
        assert!(weights[0] < 0.25, "the layer that knows nothing has the weight {}", weights[0]);
    }
}

#[test]
fn the_cache_changes_nothing_and_damaged_features_are_computed_again() {
    let place = prepared();
    let words = "--epochs 3 --features found";
    let without_counts = |mut report: Value| {
        for key in ["features_reused", "features_computed"] {
            report.as_object_mut().unwrap().remove(key);
        }
        (report, fs::read(place.path("mix.json")).unwrap())
    };
    let first = fitted(&place, words);
    let first_mix = without_counts(first.clone());
    let again = fitted(&place, &format!("{words} --threads 1"));
    assert_eq!((&again["features_reused"], &again["features_computed"]), (&json!(8), &json!(0)));
    assert_eq!(without_counts(again), first_mix);
    let files: Vec<_> = fs::read_dir(place.path("found")).unwrap().map(|file| file.unwrap().path()).collect();
    assert_eq!(files.len(), 8);
    let mut bytes = fs::read(&files[0]).unwrap();
    bytes[5] ^= 1;
    fs::write(&files[0], bytes).unwrap();
    let warned = place.exits(&format!("{} --overwrite --json {words}", TAGS.replace(" -q", "")), 0);
    assert!(warned.err.contains("the cached features are damaged and are computed again"), "{}", warned.err);
    let third = warned.json();
    assert_eq!((&third["features_reused"], &third["features_computed"]), (&json!(7), &json!(1)));
    assert_eq!(without_counts(third), first_mix);
    // Labels and what is fitted do not concern the features; the texts and the settings of the model do.
    place.write("dev.conll", tagged(20).replace("B-L", "B-left").replace("B-R", "B-L"));
    let relabelled = fitted(&place, &format!("{words} --baselines none"));
    assert_eq!(relabelled["features_computed"], 0);
    assert_eq!(relabelled["systems"].as_array().unwrap().len(), 1);
    let other = fitted(&place, &format!("{words} --baselines none --state warm"));
    assert_eq!(other["features_computed"], 2);
}

/// By hand: every token of a text of the kind `bad` occurs in others, except `dreadful`.
#[test]
fn labelled_texts_and_their_formats() {
    let place = prepared();
    let fit = "fit-mix --model tiny --label kind --dropout 0 --learning-rate 0.02 --batch 4 --overwrite --json -q";
    let report = place.exits(&format!("{fit} --train train.csv --dev dev.csv"), 0).json();
    assert_eq!(report["measures"], json!(["accuracy", "macro_f1"]));
    assert_eq!(report["dev"], json!({"unit": "texts", "examples": 12, "labels": {"bad": 4, "good": 8}}));
    let mix = system(&report, "mix");
    assert_eq!((number(&mix["mean"]["accuracy"]), number(&mix["mean"]["macro_f1"])), (1.0, 1.0), "{mix}");
    // The same rows in other formats have the same texts, and so the same features.
    let copy = |target: &str, from: &str| {
        let query = format!("COPY (SELECT * FROM '{from}') TO '{target}'");
        assert_eq!(ended(place.elmo().args(["sql", "-q", "-c", &query]).output().unwrap()).code, Some(0));
    };
    for format in ["parquet", "json", "tsv"] {
        copy(&format!("train.{format}"), "train.csv");
        let again = place.exits(&format!("{fit} --train train.{format} --dev dev.csv"), 0).json();
        assert_eq!((&again["mix"], &again["features_computed"]), (&report["mix"], &json!(0)), "{format}");
    }
    // Numbers are labels as they are written.
    let stars = "fit-mix --model tiny --label stars --train reviews.jsonl --dev reviews.jsonl --epochs 1 --seeds 5";
    let stars = place.exits(&format!("{stars} --output stars.json --json -q"), 0).json();
    let labels: std::collections::BTreeSet<&str> =
        stars["labels"].as_array().unwrap().iter().map(|label| label.as_str().unwrap()).collect();
    assert_eq!(labels.into_iter().collect::<Vec<_>>(), ["1", "2", "3", "4", "5"]);
    assert_eq!(system(&stars, "mix")["deviation"], Value::Null);
}

#[test]
fn the_mix_is_read_by_embed_and_in_sql_by_name() {
    let place = prepared();
    fitted(&place, "--epochs 2 --layer-norm");
    let mix: Value = serde_json::from_slice(&fs::read(place.path("mix.json")).unwrap()).unwrap();
    assert_eq!((mix["layer_norm"].as_bool(), mix["scalars"].as_array().unwrap().len()), (Some(true), 3));
    place.exits("embed reviews.jsonl --model tiny --layers mix.json --limit 9 --output vectors -q", 0);
    let query = "SELECT max(elmo_l2(elmo_embed(r.text, layers => 'tagger'), v.embedding)) AS far, count(*) AS n \
                 FROM 'reviews.jsonl' r JOIN 'vectors' v ON r.id = v.id";
    let words = ["sql", "--model", "tiny", "--add-mix", "tagger=mix.json", "-q", "--format", "csv", "-c", query];
    let found: Ended = ended(place.elmo().args(words).output().unwrap());
    assert_eq!(found.out, "far,n\n0.0,9\n", "{found:?}");
}

/// By hand: the first step of Adam changes gamma by nearly the learning rate, and the limit of gamma is 1e6. The derivative of the
/// square of a scalar is infinite with an l2 of 1e308, and 0 times infinity is no number.
#[test]
fn a_fit_that_diverges_writes_no_mix() {
    let place = prepared();
    let fit = "fit-mix --model tiny --train train.conll --dev dev.conll --baselines none --seeds 4 --epochs 2 -q";
    for (words, says) in [
        ("--learning-rate 1e300", "the fit of the learned mix, seed 4, has diverged: "),
        ("--learning-rate 1e30", "has diverged: gamma is "),
        ("--l2 1e308", "has diverged: a scalar mix needs one finite scalar per layer"),
    ] {
        let refused = place.exits(&format!("{fit} {words}"), 1);
        assert!(refused.err.contains(says) && refused.err.contains("a lower --learning-rate"), "{words}: {refused:?}");
        assert!(!place.path("mix.json").exists(), "{words}");
    }
}

#[test]
fn the_report_is_a_table() {
    let place = prepared();
    let shown = place.exits(&format!("{TAGS} --seeds 7"), 0).out;
    let lines: Vec<&str> = shown.lines().collect();
    assert!(
        lines[0].trim_start().starts_with("entity F1, %  precision, %  recall, %  accuracy, %  layer weights"),
        "{shown}"
    );
    let token = lines.iter().find(|line| line.starts_with("token layer ")).unwrap();
    let cells: Vec<&str> = token.split_whitespace().collect();
    assert_eq!(cells, ["token", "layer", "50.00", "50.00", "50.00", "75.00", "1.00", "0.00", "0.00"]);
    assert!(shown.contains("trained on     40 sentences, 80 tokens"), "{shown}");
}

#[test]
fn bad_data_is_refused_with_its_place() {
    let place = prepared();
    let tags = |name: &str, text: &str| place.write(name, text);
    tags("ragged.conll", "a\tO\n\nb\tx\tO\n");
    tags("untagged.conll", "a\tO\nb\t\n");
    tags("bare.conll", "a\nb\n");
    tags("blank.conll", "\n \n");
    tags("nothing.conll", "");
    tags("alike.conll", "a\tO\nb\tO\n");
    place.write("latin.conll", b"a\tO\ncaf\xe9\tB-x\n");
    place.write("unlabelled.csv", "text,kind\none,a\ntwo,\n");
    place.write("untexted.csv", "text,kind\none,a\n  ,b\n");
    place.write("ragged.csv", "text,kind\none,a\ntwo,b,c\n");
    place.write("header.csv", "text,kind\n");
    place.write("marks.csv", "text,kind\none,a\n\u{200b},b\n");
    for (train, says) in [
        ("ragged.conll", "ragged.conll: line 3: 3 columns separated by tabs; the first line has 2"),
        ("untagged.conll", "untagged.conll: line 2: the tag in column 2 is empty"),
        ("bare.conll", "bare.conll: line 1: tokens and tags are both in column 1 of 1"),
        ("blank.conll", "blank.conll: contains no sentence"),
        ("nothing.conll", "nothing.conll: contains no sentence"),
        ("alike.conll", "alike.conll: contains no label but \"O\""),
        ("latin.conll", "latin.conll: line 2: not UTF-8"),
        ("train.conll --tag-column 3", "train.conll: line 1: there is no column 3: the line has 2"),
        ("unlabelled.csv --label kind", "unlabelled.csv, row 1: there is no label in column kind"),
        ("untexted.csv --label kind", "untexted.csv, row 1: there is no text"),
        ("ragged.csv --label kind", "ragged.csv: after row 1"),
        ("header.csv --label kind", "header.csv: contains no row"),
        ("train.csv --label sort", "no column \"sort\""),
        ("missing.conll", "missing.conll: no such file"),
    ] {
        let dev = if train.contains("--label") { "dev.csv" } else { "dev.conll" };
        let refused = place.exits(&format!("fit-mix --model tiny --train {train} --dev {dev} -q"), 3);
        assert!(refused.err.contains(says), "{train}: no {says:?} in {}", refused.err);
    }
    assert!(!place.path("mix.json").exists());
    place.exits("fit-mix --model tiny --train train.conll --dev missing.conll", 3);
    tags("train.json", "");
    for (words, says) in [
        ("--dev dev.conll", "--train was not given"),
        ("--train train.conll", "--dev was not given"),
        ("--train train.csv --dev dev.csv --label kind --column kind", "--column and --label are both kind"),
        ("--train train.conll --dev dev.conll --seeds 1,1", "seed 1 is given twice"),
        ("--train train.conll --dev dev.conll --dropout 1", "at least 0 and below 1"),
        ("--train train.conll --dev dev.conll --output train.json", "train.json exists"),
        ("--train train.conll --dev dev.conll --output mixx.txt", "mixx.txt: --layers reads a mix"),
        ("--train train.csv --dev dev.csv --label kind --tag-column 2", "cannot be used with"),
        ("--train train.conll --dev dev.conll --column text", "--column changes nothing without --label"),
        ("--train train.conll --dev dev.conll --tokenizer moses", "--tokenizer changes nothing without --label"),
    ] {
        let refused = place.exits(&format!("fit-mix --model tiny {words}"), 2);
        assert!(refused.err.contains(says), "{words}: no {says:?} in {}", refused.err);
    }
    assert_eq!(fs::read_to_string(place.path("train.conll")).unwrap(), tagged(40));
    // What is set for all commands may be of no use to one.
    place.write("elmo.toml", "tokenizer = 'moses'\n");
    let fit = "fit-mix --model tiny --train train.conll --dev dev.conll --baselines none --seeds 4 --epochs 1 -q";
    let ended = place.run_with(fit, &[("ELMO_COLUMN", "body")]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
}

/// Labelled texts may be in a file whose name is that of a mix.
#[test]
fn data_are_not_replaced_by_the_mix() {
    let place = prepared();
    let rows = "{\"text\": \"a\", \"kind\": \"x\"}\n{\"text\": \"b\", \"kind\": \"y\"}\n";
    place.write("rows.json", rows);
    place.write("tags.json", tagged(20));
    std::os::unix::fs::symlink("rows.json", place.path("link.json")).unwrap();
    for (words, output) in [
        ("--train rows.json --dev dev.csv --label kind", "rows.json"),
        ("--train rows.json --dev dev.csv --label kind", "link.json"),
        ("--train train.conll --dev tags.json", "tags.json"),
    ] {
        let refused = place.exits(&format!("fit-mix --model tiny {words} --output {output} --overwrite"), 2);
        assert!(refused.err.contains("and the input would be lost"), "{words}: {refused:?}");
    }
    assert_eq!(fs::read_to_string(place.path("rows.json")).unwrap(), rows);
    assert_eq!(fs::read_to_string(place.path("tags.json")).unwrap(), tagged(20));
}
