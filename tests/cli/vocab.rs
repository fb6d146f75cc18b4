//! `elmo vocab`, against counts by hand.

use std::fs;

use crate::place::Place;

/// By hand: the 4, a 3, `é` and b 2 each (b comes first, as its byte is smaller), c, d and sat 1.
const CORPUS: &str = "the a b the\n\na é the a\nthe b é c\nd sat\n";

fn lines(place: &Place, name: &str) -> Vec<String> {
    fs::read_to_string(place.path(name)).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn words_are_counted_and_ordered() {
    let place = Place::new();
    place.write("corpus/a.txt", &CORPUS[..24]);
    place.write("corpus/b.txt", &CORPUS[24..]);
    let report = place.exits("vocab corpus --output out/vocab.txt --min-count 2 --threads 3 --json", 0).json();
    assert_eq!(lines(&place, "out/vocab.txt"), ["<S>", "</S>", "<UNK>", "the", "a", "b", "é"]);
    assert_eq!(lines(&place, "out/vocab.counts.tsv"), ["the\t4", "a\t3", "b\t2", "é\t2"]);
    let expected = [("tokens", 14), ("sentences", 4), ("types", 7), ("words", 7), ("lowest_count", 2)];
    for (key, value) in expected {
        assert_eq!(report[key], value, "{key}: {report}");
    }
    assert!((report["coverage"].as_f64().unwrap() - 11.0 / 14.0).abs() < 1e-12, "{report}");
    let stats: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(place.path("out/vocab.stats.json")).unwrap()).unwrap();
    assert_eq!(stats, report);
    assert!(report["warnings"][0].as_str().unwrap().contains("21.4 %"), "{report}");
}

#[test]
fn memory_and_threads_do_not_change_the_result() {
    let place = Place::new();
    let corpus: String =
        (0..20_000_u32).map(|n| format!("w{} x{}\n", n % 977, n.wrapping_mul(2_654_435_761) % 3001)).collect();
    place.write("corpus.txt", corpus);
    place.exits("vocab corpus.txt --output one.txt --threads 1", 0);
    place.exits("vocab corpus.txt --output two.txt --threads 4 --memory 1KB", 0);
    assert_eq!(lines(&place, "one.txt"), lines(&place, "two.txt"));
    assert_eq!(lines(&place, "one.counts.tsv"), lines(&place, "two.counts.tsv"));
    place.exits("vocab corpus.txt --output three.txt --size 100", 0);
    assert_eq!(lines(&place, "three.txt"), lines(&place, "one.txt")[..100]);
}

#[test]
fn odd_text_is_reported_and_bad_input_is_refused() {
    let place = Place::new();
    let long = "x".repeat(49);
    place.write("odd.txt", format!("<S> it </S>\n{long} {long} it\nnot\u{a0}one\n"));
    let report = place.exits("vocab odd.txt --output odd-vocab.txt --json", 0).json();
    let warnings = report["warnings"].to_string();
    // The no-break space is where a word ends, so that no token has it: the row is counted.
    let row = "rows with a no-break space or a separator (U+001C to U+001F), where words are cut, as bilm-tf does: 1;";
    for part in ["48 bytes", "<S>, </S> or <UNK>", row] {
        assert!(warnings.contains(part), "{part}: {warnings}");
    }
    assert_eq!((report["cut_types"].as_u64(), report["cut_tokens"].as_u64()), (Some(1), Some(2)));
    // White space is what Python's `split` takes for it, as in bilm-tf; tokens of a list are not cut.
    assert_eq!(report["types"], 4, "it, not, one and the long one: {report}");
    place.write("lists.jsonl", "{\"text\": [\"not\u{a0}one\", \"it\", \"\"]}\n");
    let lists = place.exits("vocab lists.jsonl --output lists.txt --json", 0).json()["warnings"].to_string();
    assert!(lists.contains("tokens with a no-break space") && lists.contains("are empty"), "{lists}");
    assert!(!lists.contains("rows with"), "{lists}");
    // Each of the characters, and others that begin with the same byte in UTF-8.
    let (separators, others) = ("a\u{1c}b\na\u{1d}b\na\u{1e}b\na\u{1f}b\na b\n", "\u{a9} \u{bf}\na\tb\n");
    place.write("separators.txt", format!("{separators}{others}"));
    let report = place.exits("vocab separators.txt --output separators-vocab.txt --json", 0).json();
    let warnings = report["warnings"].to_string();
    assert!(warnings.contains("as bilm-tf does: 4;") && report["types"] == 4, "{report}");
    place.write("others.txt", others);
    let warnings = place.exits("vocab others.txt --output others-vocab.txt --json", 0).json()["warnings"].to_string();
    assert!(!warnings.contains("no-break"), "{warnings}");
    assert!(!lines(&place, "odd-vocab.txt")[3..].iter().any(|word| word == "<S>"));

    let again = place.exits("vocab odd.txt --output odd-vocab.txt", 2);
    assert!(again.err.contains("--overwrite"), "{again:?}");
    place.exits("vocab odd.txt --output odd-vocab.txt --overwrite", 0);

    place.write("blank.txt", "\n \n");
    assert!(place.exits("vocab blank.txt --output b.txt", 3).err.contains("no words"));
    assert!(!place.path("b.txt").exists());
    place.exits("vocab missing.txt --output b.txt", 3);
    place.exits("vocab --output b.txt", 2);
    place.write("bytes.txt", b"fine\n\xff\n");
    place.exits("vocab bytes.txt --output b.txt", 3);
}

/// Also by other names, and the files beside the vocabulary.
#[test]
fn a_corpus_is_not_replaced_by_its_vocabulary() {
    let place = Place::new();
    place.write("corpus.txt", CORPUS);
    place.write("counted.counts.tsv", "text\na b\n");
    std::os::unix::fs::symlink("corpus.txt", place.path("link.txt")).unwrap();
    for (input, output) in [
        ("corpus.txt", "corpus.txt"),
        ("corpus.txt", "./link.txt"),
        ("link.txt", "corpus.txt"),
        (".", "corpus.txt"),
        ("counted.counts.tsv", "counted.txt"),
    ] {
        let refused = place.exits(&format!("vocab {input} --output {output} --overwrite"), 2);
        assert!(refused.err.contains("and the input would be lost"), "{input}, {output}: {refused:?}");
    }
    assert_eq!(fs::read_to_string(place.path("corpus.txt")).unwrap(), CORPUS);
    assert!(!place.path("counted.txt").exists());
}

/// A sentence of 1,000 tokens is none to warn of, and one of 1,001 is.
#[test]
fn long_sentences_are_reported() {
    let place = Place::new();
    place.write("fine.txt", "a ".repeat(1000));
    let fine = place.exits("vocab fine.txt --output fine-vocab.txt --json", 0).json()["warnings"].to_string();
    assert!(!fine.contains("1000 tokens"), "{fine}");
    place.write("long.txt", format!("{}\n{}\n", "a ".repeat(1001), "a ".repeat(999)));
    let long = place.exits("vocab long.txt --output long-vocab.txt --json", 0).json()["warnings"].to_string();
    assert!(long.contains("sentences with more than 1000 tokens: 1; is there one sentence per line?"), "{long}");
}

#[test]
fn columns_and_tokenizers_are_those_of_embed() {
    let place = Place::new();
    place.write("rows.jsonl", "{\"body\": \"It's late. Go!\"}\n{\"body\": null}\n");
    let report = place.exits("vocab rows.jsonl --column body --tokenizer moses --output moses.txt --json", 0).json();
    // By hand: It 's late . | Go !
    assert_eq!((report["tokens"].as_u64(), report["sentences"].as_u64()), (Some(6), Some(2)));
    assert_eq!(report["tokenizer"], "moses");
}
