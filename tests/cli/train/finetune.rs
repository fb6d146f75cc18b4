//! `elmo finetune`: a run that begins with a model.

use std::fs;

use super::{OPTIONS, prepared, text};
use crate::place::Place;

/// A text whose words follow one another in one order only.
fn domain(sentences: usize) -> String {
    (0..sentences).map(|n| format!("w{} w{} w{} w{}\n", n % 3, n % 3 + 3, n % 3 + 6, n % 3 + 9)).collect()
}

/// A model of general text, and a domain.
fn trained() -> Place {
    let place = prepared();
    place.train("--valid valid.txt --steps 20 --eval-every 20 --output run -q", 0);
    place.write("domain.txt", domain(90));
    place.write("heldout.txt", domain(60));
    place
}

const FINETUNE: &str = "finetune --model run --shards domain.txt --valid heldout.txt --rows 4 --unroll 5 --samples 0 --dropout 0 \
                        --seed 3 --eval-every 10 --checkpoint-every 5 --log-every 1 --device cpu --json -q";

/// The measurements before and after are those of `elmo eval`.
#[test]
fn a_model_learns_a_domain() {
    let place = trained();
    let eval = |model: &str| place.exits(&format!("eval --model {model} heldout.txt --device cpu --json -q"), 0).json();
    let before = eval("run");
    let words = format!("{FINETUNE} --optimizer adamw --learning-rate 0.02 --steps 60 --output tuned");
    let report = place.exits(&words, 0).json();
    let after = eval("tuned");
    assert_eq!(report["perplexity_before"], before["carried"]["perplexity"]);
    assert_eq!(report["perplexity"], after["carried"]["perplexity"]);
    let [before, after] = [&before, &after].map(|report| report["carried"]["perplexity"].as_f64().unwrap());
    // The first word is one of three, and the others follow from it: 3^(1/5) = 1.25 with all that can be known.
    assert!(after < 0.2 * before, "{before} before, {after} after");
    let valid = place.lines("tuned/valid.jsonl");
    let steps: Vec<u64> = valid.iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [0, 10, 20, 30, 40, 50, 60]);
    assert_eq!(valid[0]["perplexity"], report["perplexity_before"]);
    assert_eq!(fs::read(place.path("tuned/vocab.txt")).unwrap(), fs::read(place.path("run/vocab.txt")).unwrap());
    let text = |model: &str| place.exits(&format!("model info {model} --json"), 0).json()["text"].clone();
    assert_eq!(text("tuned"), text("run"));
    let shown = place.exits(&words.replace(" --json", ""), 0).out;
    assert!(shown.contains("held-out before") && shown.contains("held-out perplexity"), "{shown}");
}

/// Also by another path.
#[test]
fn a_model_is_not_replaced_by_what_begins_with_it() {
    let place = trained();
    let before = place.left("run");
    for output in ["run", "./run/../run"] {
        let refused = place.exits(&format!("{FINETUNE} --steps 10 --overwrite --output {output}"), 2);
        assert!(refused.err.contains("the model with which the run begins is in this folder"), "{refused:?}");
    }
    // The weights alone, from within the folder.
    let words = "train --init weights.safetensors --options options.json --vocab vocab.txt --shards ../domain.txt --rows 4 --overwrite \
                 --device cpu --output .";
    let refused = place.shell(&format!("cd run && elmo {words}"));
    assert!(refused.code == Some(2) && refused.err.contains("is in this folder"), "{refused:?}");
    place.same("run", &before, "refused");
}

/// As with one process that has all rows, up to the order of sums.
#[test]
fn several_processes_measure_before_the_first_step() {
    let place = trained();
    let report = |words: &str| place.exits(&format!("{FINETUNE} --steps 10 {words}"), 0).json();
    let one = report("--output one");
    let two = place
        .exits(&format!("{} --processes 2 --steps 10 --output two", FINETUNE.replace("--rows 4", "--rows 2")), 0)
        .json();
    for name in ["perplexity_before", "perplexity"] {
        let [one, two] = [&one, &two].map(|report| report[name].as_f64().unwrap());
        assert!((one / two - 1.0).abs() < 1e-5, "{name}: {one} and {two}");
    }
}

/// When nothing is learned, the folder has the weights of the model.
#[test]
fn weights_that_get_no_better_are_those_of_the_model() {
    let place = trained();
    // The text that the model has learned, and a rate that destroys it.
    let words = FINETUNE.replace("domain.txt", "corpus/0.txt").replace("heldout.txt", "valid.txt");
    let report =
        place.exits(&format!("{words} --learning-rate 50 --on-spike ignore --steps 10 --output worse"), 0).json();
    assert_eq!((&report["model_step"], &report["perplexity"]), (&0.into(), &report["perplexity_before"]));
    let fingerprint = |model: &str| place.exits(&format!("model info {model} --json"), 0).json()["fingerprint"].clone();
    assert_eq!(fingerprint("worse"), fingerprint("run"));
}

#[test]
fn an_interrupted_run_measures_once_and_ends_with_the_same_bits() {
    let place = trained();
    place.exits(&format!("{FINETUNE} --steps 20 --output whole"), 0);
    place.exits(&format!("{FINETUNE} --steps 7 --output parts"), 0);
    place.exits(&format!("{FINETUNE} --steps 20 --output parts"), 0);
    let first = place.lines("parts/valid.jsonl").remove(0);
    assert_eq!(first, place.lines("whole/valid.jsonl")[0]);
    let zeros = |run: &str| place.lines(&format!("{run}/valid.jsonl")).iter().filter(|line| line["step"] == 0).count();
    assert_eq!((zeros("parts"), zeros("whole")), (1, 1));
    let losses = |run: &str| -> Vec<String> {
        place.lines(&format!("{run}/steps.jsonl")).iter().map(|line| line["loss"].to_string()).collect()
    };
    assert_eq!(losses("parts"), losses("whole"));
}

/// The reading that the model records is the default, and options override it.
#[test]
fn text_is_read_as_the_model_records_it() {
    let place = prepared();
    place.train("--steps 1 --record-tokenizer moses --output raw -q", 0);
    place.write("domain.txt", "w1, w2. W3 w4\n");
    let words = "finetune --model raw --shards domain.txt --rows 2 --unroll 4 --samples 0 --device cpu --json -q";
    // By hand: Moses separates the marks and ends a sentence after the full stop.
    for (given, tokens, sentences, recorded) in
        [("", 6, 2, "moses"), ("--tokenizer whitespace", 4, 1, "whitespace"), ("--sentences off", 6, 1, "moses")]
    {
        let estimate = place.exits(&format!("{words} {given} --overwrite --output out --dry-run"), 0).json();
        assert_eq!((&estimate["tokens"], &estimate["sentences"]), (&tokens.into(), &sentences.into()), "{given}");
        place.exits(&format!("{words} {given} --steps 1 --overwrite --output out"), 0);
        let info = place.exits("model info out --json", 0).json();
        assert_eq!(info["text"]["tokenizer"], recorded, "{given}");
    }
}

#[test]
fn what_cannot_be_finetuned_is_refused() {
    let place = trained();
    place.write("options.json", OPTIONS);
    place.write("blank.txt", "\n\n");
    place.write("words.txt", "<S>\n</S>\n<UNK>\nw0\n");
    let base = "--shards domain.txt --rows 4 --device cpu -q --output out";
    for (words, code, part) in [
        (format!("finetune --model tiny {base}"), 4, "has no LM head"),
        (format!("finetune --model tiny {base}"), 4, "elmo finetune --vocab"),
        (format!("finetune --model run --vocab words.txt {base}"), 2, "is another one than"),
        (format!("finetune --model run --size small {base}"), 2, "sizes of its own"),
        (format!("finetune --model run --options options.json {base}"), 2, "sizes of its own"),
        (format!("finetune --model nowhere {base}"), 4, "nowhere"),
        ("finetune --model run --output out -q".to_owned(), 2, "no --shards was given"),
        ("finetune --model run --shards domain.txt -q".to_owned(), 2, "no --output was given"),
        (format!("finetune --model run {}", base.replace("domain.txt", "blank.txt")), 3, "there are no sentences"),
        (format!("train --init run --options options.json --vocab vocab.txt {base}"), 2, "sizes of its own"),
        (format!("train --init run {base}"), 2, "no --vocab was given"),
    ] {
        let ended = place.exits(&words, code);
        assert!(ended.err.contains(part), "{words}: {ended:?}");
        assert!(!place.path("out").exists(), "{words}");
    }
    // A model without an LM head gets a softmax for a vocabulary.
    place.write("corpus/9.txt", text(5, 9));
    place.exits(&format!("finetune --model tiny --vocab vocab.txt --steps 2 --samples 0 {base}"), 0);
    assert!(place.exits("eval --model out heldout.txt --json -q", 0).json()["by_sentence"]["perplexity"].is_f64());
}
