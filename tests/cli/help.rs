//! Help pages: their text and width, and their examples, which are run.

use crate::place::{Place, snapshot};

const COMMANDS: [&str; 26] = [
    "",
    "embed",
    "sql",
    "stream",
    "stream status",
    "cluster",
    "cluster worker",
    "cluster status",
    "model",
    "model info",
    "model convert",
    "model verify",
    "inspect",
    "verify",
    "vocab",
    "train",
    "finetune",
    "eval",
    "score",
    "plot",
    "fit-mix",
    "bench",
    "doctor",
    "demo",
    "completions",
    "man",
];

#[test]
fn pages() {
    let place = Place::new();
    for command in COMMANDS {
        let page = place.exits(&format!("{command} --help"), 0);
        assert_eq!(page.err, "");
        for line in page.out.lines() {
            assert!(line.chars().count() <= 100, "elmo {command} --help: {line}");
        }
        assert!(examples(&page.out).len() >= 2, "elmo {command} --help has fewer than two examples");
        snapshot(
            &format!("help-{}", if command.is_empty() { "elmo".into() } else { command.replace(' ', "-") }),
            &page.out,
        );
    }
}

#[test]
fn the_short_page_is_shorter() {
    let place = Place::new();
    let (short, long) = (place.exits("embed -h", 0).out, place.exits("embed --help", 0).out);
    assert!(short.lines().count() < long.lines().count());
}

/// The commands in the examples of a page.
fn examples(page: &str) -> Vec<String> {
    let after = page.split("Examples:\n").nth(1).unwrap_or_default();
    let commands = after.lines().take_while(|line| line.starts_with("  ") || line.is_empty());
    commands.map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

/// Examples that take seconds; the tests of reports run them.
const RUN_BY_REPORTS: [&str; 2] =
    ["elmo doctor --json", "elmo bench --model tiny --text reviews.jsonl --seconds 2 --json"];

#[test]
fn every_example_runs() {
    let mut left_out = 0;
    // The tests of clusters run the examples of a cluster, which do not end by themselves; streams need a broker.
    let needs_servers = |command: &&str| command.starts_with("cluster") || command.starts_with("stream");
    for command in COMMANDS.into_iter().filter(|command| !needs_servers(command)) {
        let place = Place::new();
        // Files that the examples of a page need.
        match command {
            "embed" => {
                _ = place.shell("mkdir logs && printf 'id,message\\n1,It rained.\\n' | gzip > logs/monday.csv.gz")
            }
            "inspect" | "verify" => _ = place.exits("embed -q --input reviews.jsonl --output vectors", 0),
            "plot" => place.write("model/steps.jsonl", "{\"step\":1,\"epoch\":0.1,\"loss\":2,\"softmax\":\"full\"}\n"),
            "eval" | "finetune" => {
                place.write("domain.txt", "It rained.\n");
                place.write("heldout.txt", "It rained.\nWe stayed in.\n");
            }
            "vocab" | "train" => place.write("corpus/shard-0.txt", "it rained .\n"),
            "fit-mix" => {
                for part in ["train", "dev"] {
                    place.write(&format!("{part}.conll"), "New\tB-place\nYork\tI-place\n\nit\tO\n");
                    place.write(&format!("{part}.csv"), "text,kind\nIt rained.,weather\nWe read.,other\n");
                }
            }
            _ => {}
        }
        for example in examples(&place.exits(&format!("{command} --help"), 0).out) {
            if RUN_BY_REPORTS.contains(&example.as_str()) {
                left_out += 1;
                continue;
            }
            if example.contains("--brokers") {
                continue;
            }
            let ended = place.shell(&example);
            assert_eq!(ended.code, Some(0), "{example}: {ended:?}");
        }
    }
    assert_eq!(left_out, RUN_BY_REPORTS.len());
}

#[test]
fn nothing_at_all_is_answered_with_help_and_exit_code_2() {
    let place = Place::new();
    let ended = place.exits("", 2);
    assert!(ended.err.contains("Usage: elmo"), "{ended:?}");
    assert_eq!(place.exits("--version", 0).out, format!("elmo {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn completions_and_manual_pages_know_every_command() {
    let place = Place::new();
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = place.exits(&format!("completions {shell}"), 0).out;
        assert!(["embed", "inspect", "batch-tokens"].iter().all(|word| script.contains(word)), "{shell}");
    }
    place.exits("man --dir man", 0);
    for command in COMMANDS {
        let page = format!("man/{}.1", format!("elmo {command}").trim().replace(' ', "-"));
        assert!(std::fs::read_to_string(place.path(&page)).unwrap().starts_with(".ie"), "{page}");
    }
    assert!(place.exits("man", 0).out.contains(".SH NAME"));
}

#[test]
fn help_does_not_wait_for_settings() {
    let place = Place::new();
    place.write("elmo.toml", "this is no TOML");
    for words in ["--help", "embed --help", "--version", "completions fish", "man"] {
        place.exits(words, 0);
    }
    place.exits("model info tiny", 2);
}
