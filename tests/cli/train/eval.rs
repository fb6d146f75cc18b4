//! `elmo eval`: against the measurements of training, against SQL, and against calculations by hand.

use elmo::{ModelData, lm_head::LmHeadData, model_dir::WeightsFormat, weights::Tensor};

use super::prepared;
use crate::place::Place;

/// Writes the built-in model with a softmax that ignores its states: the probability of a word is always the same.
fn unigram(place: &Place, words: &[(&str, f32)]) {
    let model = ModelData::tiny();
    let width = model.options.lstm.projection_dim;
    place.write("unigram/README", "");
    model.save(&place.path("unigram"), WeightsFormat::Safetensors).unwrap();
    let weight = Tensor { shape: vec![words.len(), width], data: vec![0.0; words.len() * width] };
    let bias = Tensor { shape: vec![words.len()], data: words.iter().map(|(_, p)| p.ln()).collect() };
    let list = words.iter().map(|(word, _)| (*word).to_owned()).collect();
    LmHeadData::new(list, weight, bias).unwrap().save(&place.path("unigram")).unwrap();
}

fn near(found: &serde_json::Value, expected: f64, what: &str) {
    let found = found.as_f64().unwrap();
    assert!((found / expected - 1.0).abs() < 1e-6, "{what}: {found}, not {expected}");
}

/// With 20 sentences of three predictions, windows of 20 leave nothing out. Every word has probability 1/11.
#[test]
fn a_uniform_softmax_has_the_number_of_words_as_perplexity() {
    let place = Place::new();
    let names: Vec<String> =
        ["<S>", "</S>", "<UNK>"].map(str::to_owned).into_iter().chain((0..8).map(|n| format!("w{n}"))).collect();
    unigram(&place, &names.iter().map(|name| (name.as_str(), 1.0 / 11.0)).collect::<Vec<_>>());
    place.write("text.txt", "w1 w5\n".repeat(20));
    let words = "eval --model unigram text.txt --tokenizer whitespace --sentences off --device cpu --json -q";
    let report = place.exits(words, 0).json();
    for figure in ["carried", "by_sentence"] {
        for direction in ["perplexity", "perplexity_forward", "perplexity_backward"] {
            near(&report[figure][direction], 11.0, figure);
        }
        assert_eq!(report[figure]["predictions"], 60);
    }
}

/// By hand: ten documents of 2200 predictions would have 11 rows by their size, and would fill no window of them. With half as many
/// rows, two rounds of five are 220 windows of 100 predictions, which leave nothing out. Every word has probability 1/11.
#[test]
fn few_long_documents_are_measured() {
    let place = prepared();
    let names: Vec<String> =
        ["<S>", "</S>", "<UNK>"].map(str::to_owned).into_iter().chain((0..8).map(|n| format!("w{n}"))).collect();
    unigram(&place, &names.iter().map(|name| (name.as_str(), 1.0 / 11.0)).collect::<Vec<_>>());
    let document = ["w1"; 2199].join(" ") + "\n";
    place.write("documents.txt", document.repeat(10));
    let words = "eval --model unigram documents.txt --tokenizer whitespace --sentences off --device cpu --json -q";
    let report = place.exits(words, 0).json();
    assert_eq!(report["carried"]["predictions"], 22_000);
    near(&report["carried"]["perplexity"], 11.0, "carried");
    // A run measures as much.
    place.train("--valid documents.txt --steps 1 --eval-every 1 --output run -q", 0);
    let measured = place.lines("run/valid.jsonl").pop().unwrap();
    assert_eq!(measured["tokens"], 22_000);
    assert!(measured["perplexity"].as_f64().is_some_and(f64::is_finite), "{measured}");
}

/// By hand: forward predicts `a`, `<UNK>` for the word that is not known, and `</S>`: 1/2 1/8 1/4 = 1/64 per sentence, so the
/// perplexity is 64^(1/3) = 4. Backward has `<S>`, with 1/16, instead of `</S>`: 256^(1/3).
#[test]
fn both_figures_are_those_of_a_calculation_by_hand() {
    let place = Place::new();
    unigram(&place, &[("<S>", 0.0625), ("</S>", 0.25), ("<UNK>", 0.125), ("a", 0.5), ("c", 0.0625)]);
    // An empty line and a NULL are no sentences.
    let rows: String = (0..20).map(|_| "{\"body\": \"a b\"}\n{\"body\": null}\n{\"body\": \"\"}\n").collect();
    place.write("text.jsonl", rows);
    let words =
        "eval --input text.jsonl --column body --model unigram --tokenizer whitespace --sentences off --device cpu -q";
    let report = place.exits(&format!("{words} --json"), 0).json();
    for figure in ["carried", "by_sentence"] {
        near(&report[figure]["perplexity_forward"], 4.0, figure);
        near(&report[figure]["perplexity_backward"], 256_f64.cbrt(), figure);
        near(&report[figure]["perplexity"], (4.0 * 256_f64.cbrt()).sqrt(), figure);
        assert_eq!(report[figure]["predictions"], 60, "{figure}");
    }
    assert_eq!((&report["sentences"], &report["tokens"], &report["unknown"]), (&20.into(), &40.into(), &20.into()));
    assert_eq!((&report["words"], &report["files"], &report["bad_rows"]), (&5.into(), &1.into(), &0.into()));
    let text = place.exits(words, 0).out;
    for line in
        ["carried state         perplexity 5.040 (forward 4.000, backward 6.350) on 60", "40, 20 (50.00 %) not in"]
    {
        assert!(text.contains(line), "{text}");
    }
    let line = text.lines().find(|line| line.starts_with("sentence by sentence")).unwrap();
    assert!(line.contains("perplexity 5.040") && line.ends_with("from state zero"), "{text}");
}

/// The weights in the folder are those of the last measurement. The text is read as the model records it.
#[test]
fn a_trained_model_has_the_figures_of_its_run_and_of_sql() {
    let place = prepared();
    place.train("--valid valid.txt --steps 12 --eval-every 12 --output run -q", 0);
    let report = place.exits("eval --model run valid.txt --device cpu --json -q", 0).json();
    let measured = place.lines("run/valid.jsonl").pop().unwrap();
    for name in ["perplexity", "perplexity_forward", "perplexity_backward"] {
        assert_eq!(report["carried"][name], measured[name], "{name}");
    }
    assert_eq!(report["carried"]["predictions"], measured["tokens"]);
    assert_eq!(
        (&report["tokenizer"], &report["sentence_mode"], &report["state"]),
        (&"whitespace".into(), &"off".into(), &"warm".into())
    );
    // A line is a sentence, whose predictions are its tokens and one boundary.
    let query = "SELECT exp(-sum(f) / sum(n)) AS f, exp(-sum(b) / sum(n)) AS b, sum(n) AS n, sum(t) AS t, sum(u) AS u FROM (
        SELECT -ln(p['forward']) * (p['tokens'] + 1) AS f, -ln(p['backward']) * (p['tokens'] + 1) AS b, p['tokens'] + 1 AS n,
            p['tokens'] AS t, p['unknown'] AS u FROM (SELECT elmo_perplexity(text) AS p FROM 'valid.txt'))";
    let sql = place.elmo().args(["sql", "--model", "run", "-q", "--format", "ndjson", "-c", query]).output().unwrap();
    let sql: serde_json::Value = serde_json::from_slice(&sql.stdout).unwrap_or_else(|e| panic!("{e}: {sql:?}"));
    let own = &report["by_sentence"];
    for (found, expected) in [(&own["perplexity_forward"], &sql["f"]), (&own["perplexity_backward"], &sql["b"])] {
        let (found, expected) = (found.as_f64().unwrap(), expected.as_f64().unwrap());
        assert!((found / expected - 1.0).abs() < 1e-9, "{found}, not {expected}");
    }
    let average = (sql["f"].as_f64().unwrap() * sql["b"].as_f64().unwrap()).sqrt();
    near(&own["perplexity"], average, "average");
    let counts = [&own["predictions"], &report["tokens"], &report["unknown"]].map(|n| n.as_f64().unwrap());
    assert_eq!(counts, ["n", "t", "u"].map(|name| sql[name].as_f64().unwrap()));
    // Other options override what the model records.
    let other =
        place.exits("eval --model run valid.txt --tokenizer moses --state zero --device cpu --json -q", 0).json();
    assert_eq!((&other["tokenizer"], &other["state"]), (&"moses".into(), &"zero".into()));
    assert_ne!(other["by_sentence"]["perplexity"], own["perplexity"]);
    // Standard input is lines of text.
    let piped = place.shell("elmo eval --model run - --device cpu --json -q < valid.txt");
    assert_eq!(piped.json(), report);
    // Threads change nothing.
    let one = place.exits("eval --model run valid.txt --device cpu --threads 1 --json -q", 0).json();
    assert_eq!(one, report);
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let place = Place::new();
    place.write("blank.txt", "\n\n");
    // Bytes that are not UTF-8.
    place.write("bad.txt", b"It rained.\n\xff\xfe was here\n".as_slice());
    for (words, code, part) in [
        ("eval --model tiny reviews.jsonl", 4, "has no LM head"),
        ("eval --model tiny reviews.jsonl", 4, "elmo finetune --vocab"),
        ("eval blank.txt", 3, "there are no sentences"),
        ("eval bad.txt", 3, "--on-error skip"),
        ("eval missing.txt", 3, "missing.txt"),
        ("eval", 2, "no input was given"),
        ("eval -", 3, "there are no sentences"),
        ("eval reviews.jsonl --column body", 3, "body"),
        ("eval reviews.jsonl --state carry", 2, "carry"),
    ] {
        let ended = place.exits(&format!("{words} -q"), code);
        assert!(ended.err.contains(part), "{words}: {ended:?}");
    }
    let skipped = place.exits("eval bad.txt --on-error skip --json -q", 6).json();
    assert_eq!((&skipped["bad_rows"], &skipped["sentences"], &skipped["tokens"]), (&1.into(), &1.into(), &3.into()));
}
