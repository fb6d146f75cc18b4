//! What a run says of itself: lines of progress, and `MODEL.md`.

use super::*;

/// The first line of progress of a run, which belongs to its first step.
fn progress(place: &Place, words: &str) -> Value {
    let ended = place.train(&format!("{words} --log-format json"), 0);
    let lines = ended.err.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut shown: Vec<Value> = lines.filter(|line| line["message"] == "training").collect();
    assert!(!shown.is_empty(), "{ended:?}");
    shown.swap_remove(0)
}

/// By hand: ten sentences of three words are 30 tokens and 10 boundaries, so 40 predictions in each direction. A step has 4 rows of 5 of
/// them, half an epoch; three epochs are six steps. The vocabulary has three words and the three special ones.
#[test]
fn progress_has_the_same_names_in_every_run() {
    const PREDICTIONS: f64 = 40.0;
    let place = Place::new();
    place.write("corpus/a.txt", "w0 w1 w2\n".repeat(10));
    place.write("options.json", OPTIONS);
    place.exits("vocab corpus --output vocab.txt -q", 0);
    for (samples, loss, other) in [("2", "sampled_loss", "loss"), ("0", "loss", "sampled_loss")] {
        let run = format!("run-{samples}");
        let line = progress(&place, &format!("--samples {samples} --epochs 3 --output {run}"));
        assert_eq!((&line["step"], &line["steps"], &line["level"]), (&json!(1), &json!(6), &json!("INFO")), "{line}");
        assert!(line[loss].as_f64().unwrap() > 0.0 && line.get(other).is_none(), "{line}");
        assert!(line["tokens_per_second"].as_f64().unwrap() > 0.0, "{line}");
        // A model of so few parameters may have none of a hundred parts.
        assert!(line["percent_of_matmul_ceiling"].as_f64().unwrap() >= 0.0, "{line}");
        assert!(line["left"].as_str().unwrap().ends_with('s'), "{line}");
        assert!(line.get("held_out_perplexity").is_none(), "nothing was measured: {line}");
        assert_eq!(line["epoch"].as_f64().unwrap() * PREDICTIONS, 20.0, "{line}");
        let journal = place.lines(&format!("{run}/steps.jsonl"));
        let shown = (line[loss].as_f64().unwrap(), journal[0]["loss"].as_f64().unwrap());
        assert!((shown.0 - shown.1).abs() <= 0.5e-4, "{shown:?}: four decimals are shown");
        let mut tokens = 0.0;
        for line in &journal {
            tokens += 20.0;
            assert_eq!(line["epoch"].as_f64().unwrap() * PREDICTIONS, tokens, "{line}");
        }
        assert_eq!((journal.len(), tokens), (6, 3.0 * PREDICTIONS));
    }
}

/// Counts by hand. The digest is the beginning of what Python has:
///
/// ```python
/// digest = hashlib.sha256()
/// for row, words in enumerate([[b"w1", b"w2"], [b"w3"]]):
///     digest.update(struct.pack("<Q", row))
///     for word in words:
///         digest.update(struct.pack("<I", len(word)) + word)
///     digest.update(struct.pack("<I", 2**32 - 1))
/// ```
#[test]
fn a_model_describes_its_corpus() {
    let place = prepared();
    place.write("corpus/few.txt", "w1 w2\nw3\n");
    place.train("--steps 3 --output run -q", 0);
    let text = fs::read_to_string(place.path("run/MODEL.md")).unwrap();
    assert!(text.contains("\n| few.txt | 2 | 3 | `cf48f10d806d6af5` |\n"), "{text}");
    let mut all = (2, 3);
    for shard in 0..3 {
        let words = fs::read_to_string(place.path(&format!("corpus/{shard}.txt"))).unwrap();
        let (sentences, tokens) = (words.lines().count(), words.split_whitespace().count());
        assert!(text.contains(&format!("\n| {shard}.txt | {sentences} | {tokens} | `")), "{text}");
        all = (all.0 + sentences, all.1 + tokens);
    }
    assert!(text.contains(&format!("\n{} sentences, {} tokens, 0.00 % of them not among", all.0, all.1)), "{text}");
    let counted = text.lines().find(|line| line.ends_with(" tokens in each direction).")).unwrap();
    // Three steps of 4 rows and 5 positions.
    assert!(counted.contains(", 60 tokens"), "{counted}");
    assert!(text.contains("\n## Held-out text\n\nNot measured.\n"), "{text}");
}
