//! `elmo train`: runs that are killed and resumed, refusals, and a text whose entropy is known.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    path::PathBuf,
    process::Stdio,
    thread,
    time::Duration,
};

use serde_json::{Value, json};

use crate::{
    markup::Page,
    place::{Ended, Place, ended},
};

#[path = "train/described.rs"]
mod described;
#[path = "train/eval.rs"]
mod eval;
#[path = "train/finetune.rs"]
mod finetune;
#[path = "train/processes.rs"]
mod processes;
#[path = "train/score.rs"]
mod score;
#[path = "train/upload.rs"]
mod upload;

/// A model of some thousand parameters.
const OPTIONS: &str = r#"{
    "lstm": {"cell_clip": 3, "dim": 16, "n_layers": 2, "proj_clip": 3, "projection_dim": 8, "use_skip_connections": true},
    "char_cnn": {"activation": "relu", "embedding": {"dim": 4}, "filters": [[1, 8], [2, 8]],
        "max_characters_per_token": 8, "n_characters": 262, "n_highway": 1}
}"#;

/// The default of every reader is what the run records; what is given overrides it. The tokens are counted by hand: white space
/// leaves `w1,` and `w2.` whole, and Moses separates the marks.
#[test]
fn a_trained_model_is_read_with_its_own_tokenizer() {
    let place = prepared();
    place.train("--steps 1 --output plain -q", 0);
    place.train("--steps 1 --record-tokenizer moses --output raw -q", 0);
    let other = place.train("--steps 1 --record-tokenizer words --output raw -q", 2);
    assert!(other.err.contains("record-tokenizer: moses in the run, words now"), "{}", other.err);
    place.write("ask.txt", "w1, w2. W3 w4\n");
    let sql = |model: &str, options: &str| {
        let query = format!("SELECT array_length(elmo_tokens('w1, w2. W3 w4'{options})) AS n");
        ended(place.elmo().args(["sql", "--model", model, "--format", "csv", "-q", "-c", &query]).output().unwrap()).out
    };
    for (model, given, tokens) in
        [("plain", "", 4), ("raw", "", 6), ("plain", "--tokenizer moses", 6), ("raw", "--tokenizer whitespace", 4)]
    {
        let embed = format!("embed ask.txt --model {model} {given} -q --json --overwrite --output vectors");
        assert_eq!(place.exits(&embed, 0).json()["tokens"], tokens, "{model} {given}");
        let options = given.replace("--tokenizer ", ", tokenizer => '");
        let options = if options.is_empty() { options } else { options + "'" };
        assert_eq!(sql(model, &options), format!("n\n{tokens}\n"), "{model} {given}");
    }
    place.exits("model convert plain copy --to hdf5", 0);
    let (plain, copy) =
        (place.exits("model info plain --json", 0).json(), place.exits("model info copy --json", 0).json());
    assert_eq!(
        plain["text"],
        json!({"tokenizer": "whitespace", "sentences": "off", "state": "warm", "recorded": ["tokenizer", "sentences", "state"]})
    );
    assert_eq!((&copy["text"], &copy["fingerprint"]), (&plain["text"], &plain["fingerprint"]));
    the_pair_is_the_model(&place, &plain);
    let raw = place.exits("model info raw --json", 0).json();
    assert_eq!(
        raw["text"],
        json!({"tokenizer": "moses", "sentences": "split", "state": "warm", "recorded": ["tokenizer", "sentences", "state"]})
    );
    assert_eq!(raw["fingerprint"], plain["fingerprint"]);
    let query = "EXPLAIN SELECT elmo_embed(text) FROM 'ask.txt'";
    let plan =
        ended(place.elmo().args(["sql", "--model", "plain", "--format", "csv", "-q", "-c", query]).output().unwrap())
            .out;
    assert!(plan.contains("tokenizer=whitespace, sentences=off"), "{plan}");
}

/// `plain` as AllenNLP reads it: the same weights, and the same vectors from the same state. The pair has no place for the start state of
/// the run: it records none, so its default is zero, and the report says so.
fn the_pair_is_the_model(place: &Place, plain: &Value) {
    let converted = place.exits("model convert plain pair --to allennlp --json", 0).json();
    for fingerprint in ["fingerprint_before", "fingerprint_after"] {
        assert_eq!(converted[fingerprint], plain["fingerprint"], "{converted}");
    }
    let note = converted["note"].as_str().unwrap();
    assert!(note.contains("its default is zero") && note.contains("--to safetensors"), "{note}");
    let names: Vec<_> = fs::read_dir(place.path("pair")).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert!(names.len() == 2 && names.iter().all(|name| name.to_str().unwrap().starts_with("plain_")), "{names:?}");
    let files = "--options pair/plain_options.json --weights pair/plain_weights.hdf5";
    let pair = place.exits(&format!("model info {files} --json"), 0).json();
    for key in ["fingerprint", "parameters"] {
        assert_eq!(pair[key], plain[key], "{pair}");
    }
    let text =
        json!({"tokenizer": "whitespace", "sentences": "off", "state": "zero", "recorded": ["tokenizer", "sentences"]});
    assert_eq!(pair["text"], text);
    let vectors = |model: &str, output: &str| {
        place.exits(&format!("embed ask.txt {model} --output {output} -q"), 0);
        place.exits_sql(&format!("SELECT * FROM '{output}/*.parquet'"))
    };
    let expected = vectors("--model plain --state zero", "of-run");
    assert!(expected.len() > 100, "{expected}");
    assert_eq!(vectors(files, "of-pair"), expected);
}

/// A corpus without a sentence of usual length has a start state of its own all the same: documents as lines, and words.
#[test]
fn every_model_has_a_start_state_of_its_own() {
    let place = prepared();
    place.write("documents/a.txt", (0..9).map(|n| text(n, 90).replace('\n', " ") + "\n").collect::<String>());
    place.write("words/a.txt", text(3, 90).replace(' ', "\n"));
    for shards in ["documents", "words"] {
        place.train(&format!("--shards {shards} --steps 1 -q --output run-{shards}"), 0);
        assert!(place.path(&format!("run-{shards}/warm_state.safetensors")).exists(), "{shards}");
        assert_eq!(place.exits(&format!("model info run-{shards} --json"), 0).json()["text"]["state"], "warm");
    }
}

/// A run in the folder of its shards, or in one below: what it writes are no shards, and all else is. Expected: the run goes on, and a file
/// of its own is no text.
#[test]
fn a_run_may_be_in_the_folder_of_its_shards() {
    for (output, shards) in [("corpus/model", "corpus"), ("corpus", "corpus"), ("corpus", "corpus/*.txt")] {
        let place = prepared();
        for steps in [2, 4] {
            place.train(&format!("--shards {shards} --steps {steps} -q --output {output}"), 0);
        }
        let own = place.train(&format!("--shards {output}/steps.jsonl --steps 4 -q --output {output}"), 2);
        assert!(own.err.contains("is a file of the run"), "{own:?}");
    }
}

/// Numbers without a library: a linear congruential generator (Knuth's MMIX).
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

/// Sentences of the words `w0` to `w39`, the first ones more frequent.
fn text(seed: u64, sentences: usize) -> String {
    let mut dice = Dice(seed);
    let mut line = || -> String {
        let words = 1 + dice.below(9);
        let words: Vec<String> = (0..words)
            .map(|_| {
                let most = 1 + dice.below(40);
                format!("w{}", dice.below(most))
            })
            .collect();
        words.join(" ")
    };
    (0..sentences).map(|_| line() + "\n").collect()
}

/// Three shards of text, a vocabulary and options.
fn prepared() -> Place {
    let place = Place::new();
    for shard in 0..3 {
        place.write(&format!("corpus/{shard}.txt"), text(shard, 40));
    }
    place.write("valid.txt", text(9, 60));
    place.write("options.json", OPTIONS);
    place.exits("vocab corpus --output vocab.txt -q", 0);
    place
}

/// A run with dropout and negatives, whose blocks are small, so that a few steps pass many of them.
const RUN: &str = "train --shards corpus --vocab vocab.txt --options options.json --rows 4 --unroll 5 --samples 9 --seed 3 \
                   --block-sentences 7 --log-every 1 --checkpoint-every 7 --device cpu";

/// [`RUN`] with more options, which replace its own.
fn run(words: &str) -> String {
    let given: Vec<&str> = words.split_whitespace().collect();
    let mut kept = Vec::new();
    let mut own = RUN.split_whitespace().peekable();
    while let Some(word) = own.next() {
        if word.starts_with("--") && given.contains(&word) {
            own.next();
        } else {
            kept.push(word);
        }
    }
    [kept, given].concat().join(" ")
}

impl Place {
    fn train(&self, words: &str, code: i32) -> Ended {
        self.exits(&run(words), code)
    }

    fn lines(&self, file: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.path(file)).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Everything that a run leaves, without times: files of the model, of the last checkpoint, and the journal.
    fn left(&self, run: &str) -> BTreeMap<String, Vec<u8>> {
        let mut files = BTreeMap::new();
        let model =
            ["options.json", "weights.safetensors", "warm_state.safetensors", "softmax.safetensors", "vocab.txt"];
        for name in model.into_iter().chain(["MODEL.md"]) {
            files.insert(name.to_owned(), fs::read(self.path(run).join(name)).unwrap());
        }
        let last = self.checkpoints(run).pop().unwrap();
        files.insert("tensors".to_owned(), fs::read(last.join("tensors.safetensors")).unwrap());
        let mut state: Value = serde_json::from_slice(&fs::read(last.join("state.json")).unwrap()).unwrap();
        state["seconds"] = Value::Null;
        state["pending"]["seconds"] = Value::Null;
        files.insert("state".to_owned(), state.to_string().into_bytes());
        for name in ["steps.jsonl", "valid.jsonl"] {
            let lines = self.lines(&format!("{run}/{name}")).into_iter().map(|mut line| {
                line["seconds"] = Value::Null;
                line["share_of_ceiling"] = Value::Null;
                line.to_string()
            });
            files.insert(name.to_owned(), lines.collect::<Vec<_>>().join("\n").into_bytes());
        }
        files
    }

    fn checkpoints(&self, run: &str) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.path(run).join("checkpoints")).unwrap();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.retain(|path| path.file_name().unwrap().to_str().unwrap().starts_with("step-"));
        paths.sort();
        paths
    }

    /// Panics at the first file that differs.
    fn same(&self, run: &str, expected: &BTreeMap<String, Vec<u8>>, what: &str) {
        for (name, bytes) in self.left(run) {
            assert!(bytes == expected[&name], "{what}: {name} differs");
        }
    }
}

/// A run that is killed at any point and started again has the bits of one that was not: weights, optimiser, LSTM states,
/// positions, journal and perplexities.
#[test]
fn fifty_steps_are_the_same_with_any_interruption() {
    let place = prepared();
    let words = "--steps 50 --valid valid.txt --eval-every 10 -q";
    place.train(&format!("{words} --output whole --threads 2"), 0);
    let expected = place.left("whole");
    assert_eq!(place.lines("whole/steps.jsonl").len(), 50);
    let mut kills = 0;
    for (number, (point, passes)) in [
        ("train.after_step", 24),
        ("train.after_step", 0),
        ("train.after_step", 33),
        ("train.in_checkpoint", 1),
        ("train.before_rename", 2),
        ("train.after_rename", 3),
        ("train.in_export", 2),
        ("train.in_replacement", 6),
    ]
    .into_iter()
    .enumerate()
    {
        let command = format!("{words} --output killed-{number} --threads {}", 1 + number % 3);
        let points = format!("{point}={passes}*off->return");
        let killed = place.run_with(&run(&command), &[("FAILPOINTS", &points)]);
        assert_eq!(killed.code, None, "{point}: {killed:?}");
        kills += 1;
        place.train(&command, 0);
        place.same(&format!("killed-{number}"), &expected, point);
    }
    assert_eq!(kills, 8);
    // The run is complete: the same command only reports.
    let again = place.train(&format!("{words} --output whole --json"), 0).json();
    assert_eq!((again["steps"].as_u64(), again["ended"].as_str()), (Some(50), Some("all steps were made")));
    place.same("whole", &expected, "again");
}

/// SIGKILL at any instant: it may hit between two system calls that no crash point stands between. The runs that are killed
/// never end by themselves, and the length of a run is no part of what it computes.
#[test]
fn twenty_kills_at_random_instants_change_nothing() {
    let place = prepared();
    let words = "--valid valid.txt --eval-every 20 --checkpoint-every 5 -q --output";
    let mut dice = Dice(2018);
    let steps = || fs::read_to_string(place.path("run/steps.jsonl")).map_or(0, |text| text.lines().count());
    for number in 0..20 {
        let made = steps();
        let mut child = started(&place, &run(&format!("--steps 1000000 {words} run")), "");
        wait_for_lines(&place, "run/steps.jsonl", made + 1);
        thread::sleep(Duration::from_millis(dice.below(60)));
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().code(), None, "run {number} ended before it was killed");
    }
    // A multiple of the steps between two measurements, like the end of the other run.
    let last = (steps() / 20 + 2) * 20;
    place.train(&format!("--steps {last} {words} run"), 0);
    place.train(&format!("--steps {last} {words} whole"), 0);
    let mut expected = place.left("whole");
    let best = place.lines("whole/valid.jsonl").iter().rposition(|line| line["best"] == true).unwrap();
    if (best + 1) * 20 < last {
        // The description of a model that is older than the last start names the length of that run.
        let text = String::from_utf8(expected["MODEL.md"].clone()).unwrap();
        let found = fs::read_to_string(place.path("run/MODEL.md")).unwrap();
        assert_eq!(found.replace(" of 1000000 steps", &format!(" of {last} steps")), text);
        expected.insert("MODEL.md".to_owned(), found.into_bytes());
    }
    place.same("run", &expected, "after 20 kills");
}

/// Waits until the journal has some lines.
fn wait_for_lines(place: &Place, file: &str, lines: usize) {
    for _ in 0..12_000 {
        if fs::read_to_string(place.path(file)).is_ok_and(|text| text.lines().count() >= lines) {
            return;
        }
        thread::sleep(Duration::from_millis(5));
    }
    panic!("{file} never had {lines} lines");
}

/// Signals come at any time: SIGKILL leaves the last checkpoint, SIGTERM and SIGINT write one.
#[test]
fn signals_lose_nothing() {
    let place = prepared();
    // The run never ends by itself.
    let words = run("--steps 1000000 --checkpoint-every 60 --output run");
    let start = || {
        let mut command = place.elmo();
        command.args(words.split_whitespace()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    for (signal, lines) in [("-KILL", 100), ("-TERM", 200), ("-INT", 300)] {
        let child = start();
        wait_for_lines(&place, "run/steps.jsonl", lines);
        std::process::Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
        let ended = ended(child.wait_with_output().unwrap());
        if signal == "-KILL" {
            assert_eq!(ended.code, None, "{ended:?}");
            continue;
        }
        assert_eq!(ended.code, Some(130), "{ended:?}");
        assert!(ended.err.contains("interrupted after step") && ended.err.contains("to resume: "), "{ended:?}");
        let steps = place.lines("run/steps.jsonl").len();
        assert!(place.checkpoints("run").pop().unwrap().ends_with(format!("step-{steps:010}")), "{steps}");
        // After an interruption the folder is a model.
        place.exits("model info run", 0);
    }
    // The length of a run is not part of what it computes.
    let steps = place.lines("run/steps.jsonl").len() + 50;
    place.train(&format!("--steps {steps} --checkpoint-every 60 -q --output run"), 0);
    place.train(&format!("--steps {steps} --checkpoint-every {steps} -q --output whole"), 0);
    let (run, whole) = (place.left("run"), place.left("whole"));
    assert!(run == whole, "signals changed the run");
}

#[test]
fn threads_do_not_change_a_run() {
    let place = prepared();
    for threads in [1, 2, 8] {
        place.train(&format!("--steps 30 --threads {threads} --rows 8 --lanes 4 -q --output run-{threads}"), 0);
    }
    let expected = place.left("run-1");
    place.same("run-2", &expected, "2 threads");
    place.same("run-8", &expected, "8 threads");
}

#[test]
fn a_damaged_checkpoint_is_named_and_the_one_before_is_used() {
    let place = prepared();
    place.train("--steps 30 -q --output whole", 0);
    place.train("--steps 16 -q --output run", 0);
    let checkpoints = place.checkpoints("run");
    assert_eq!(checkpoints.len(), 2, "those of steps 14 and 16 are kept");
    let damage = |path: &PathBuf| {
        let file = path.join("tensors.safetensors");
        let mut bytes = fs::read(&file).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(file, bytes).unwrap();
    };
    damage(&checkpoints[1]);
    let resumed = place.train("--steps 30 --output run", 0);
    assert!(resumed.err.contains("step-0000000016: damaged"), "{resumed:?}");
    assert!(resumed.err.contains("resuming from") && resumed.err.contains("step-0000000014"), "{resumed:?}");
    place.same("run", &place.left("whole"), "after the checkpoint of step 14");
    place.checkpoints("run").iter().for_each(damage);
    let refused = place.train("--steps 40 --output run", 5);
    assert!(refused.err.contains("all checkpoints are damaged") && refused.err.contains("--overwrite"), "{refused:?}");
    place.train("--steps 30 -q --output run --overwrite", 0);
    place.same("run", &place.left("whole"), "begun anew");
}

/// A run that would begin again would replace its model. The expected files are those of the run itself.
#[test]
fn a_run_whose_checkpoints_are_gone_does_not_begin_again() {
    let place = prepared();
    for (output, valid) in [("plain", ""), ("measured", "--valid valid.txt --eval-every 5")] {
        let words = format!("--steps 16 {valid} --output {output}");
        place.train(&format!("{words} -q"), 0);
        let expected = place.left(output);
        let (folder, away) = (place.path(output).join("checkpoints"), place.path("away"));
        fs::rename(&folder, &away).unwrap();
        let model = fs::read(place.path(output).join("weights.safetensors")).unwrap();
        for (more, has_folder) in [("", false), ("--dry-run", false), ("", true), ("--dry-run", true)] {
            if has_folder {
                fs::create_dir_all(&folder).unwrap();
            }
            let refused = place.train(&format!("{words} {more}"), 5);
            for part in ["checkpoints: this run has made checkpoints", "none of them is left", "--overwrite"] {
                assert!(refused.err.contains(part), "{part}: {refused:?}");
            }
        }
        assert!(fs::read(place.path(output).join("weights.safetensors")).unwrap() == model, "{output}");
        fs::remove_dir_all(&folder).unwrap();
        fs::rename(&away, &folder).unwrap();
        place.same(output, &expected, "after refusals");
        fs::remove_dir_all(&folder).unwrap();
        place.train(&format!("{words} -q --overwrite"), 0);
        place.same(output, &expected, "begun anew");
    }
}

/// Killed in its first checkpoint, after steps and the model of a measurement, a run has nothing to resume from and begins again.
#[test]
fn a_run_that_was_killed_before_its_first_checkpoint_begins_again() {
    let place = prepared();
    let words = "--steps 16 --valid valid.txt --eval-every 5 -q --output";
    place.train(&format!("{words} whole"), 0);
    let expected = place.left("whole");
    for point in ["train.in_checkpoint", "train.before_rename", "train.after_rename"] {
        let output = point.replace('.', "-");
        let command = format!("{words} {output}");
        let killed = place.run_with(&run(&command), &[("FAILPOINTS", &format!("{point}=return"))]);
        assert_eq!(killed.code, None, "{point}: {killed:?}");
        assert!(place.path(&output).join("weights.safetensors").exists(), "{point}: no model of step 5");
        let found = place.train(&format!("{command} --dry-run --json"), 0).json();
        let made = if point == "train.after_rename" { json!(7) } else { Value::Null };
        assert_eq!(found["steps_made"], made, "{point}");
        place.train(&command, 0);
        place.same(&output, &expected, point);
    }
}

/// The expected files are those that the run wrote itself.
#[test]
fn a_model_that_lacks_a_file_is_written_again() {
    let place = prepared();
    let words = "--steps 16 -q --output run";
    place.train(words, 0);
    let expected = place.left("run");
    let model = [
        "options.json",
        "weights.safetensors",
        "softmax.safetensors",
        "warm_state.safetensors",
        "vocab.txt",
        "MODEL.md",
    ];
    for name in model {
        fs::remove_file(place.path("run").join(name)).unwrap();
        place.train(words, 0);
        place.same("run", &expected, name);
    }
}

/// The weights of the best measurement are older than the last checkpoint: three measurements after it are not better.
#[test]
fn the_best_model_is_written_again_from_its_checkpoint() {
    let place = prepared();
    let words = "--valid valid.txt --eval-every 20 --checkpoint-every 20 --keep-checkpoints 9 --optimizer adamw --dropout 0 \
                 --learning-rate 0.02 --samples 0 --output run";
    let ended = format!("{words} --steps 4000 --patience 3 --json");
    let report = place.train(&ended, 0).json();
    let (best, steps) = (report["model_step"].as_u64().unwrap(), report["steps"].as_u64().unwrap());
    assert_eq!(steps, best + 60, "{report}");
    let expected = place.left("run");
    let weights = place.path("run/weights.safetensors");
    fs::remove_file(&weights).unwrap();
    assert_eq!(place.train(&ended, 0).json()["model_step"], best);
    place.same("run", &expected, "after the weights were removed");
    // Without the checkpoint of that step, a complete run cannot.
    fs::remove_dir_all(place.path(&format!("run/checkpoints/step-{best:010}"))).unwrap();
    fs::remove_file(&weights).unwrap();
    let refused = place.train(&ended, 5);
    let lost = format!("run/weights.safetensors is missing: it belongs to the model of step {best}");
    assert!(refused.err.contains(&lost) && refused.err.contains("--steps"), "{refused:?}");
    assert!(!weights.exists());
    // A run that goes on takes the best one of the measurements that it makes.
    let more = place.train(&format!("{words} --steps {} --json", steps + 20), 0);
    assert!(more.err.contains(&lost) && more.err.contains(&format!("of step {steps} instead")), "{more:?}");
    assert_eq!(more.json()["model_step"], steps + 20);
    place.exits("model verify run", 0);
}

/// A run that was killed in step 16 has measured step 10 only, and has a checkpoint of step 15. Expected: the weights of step 10, as its
/// measurement is the one that MODEL.md names.
#[test]
fn weights_that_were_not_measured_are_not_the_best_ones() {
    let place = prepared();
    let words =
        "--valid valid.txt --eval-every 10 --checkpoint-every 5 --keep-checkpoints 9 --steps 20 -q --output run";
    let killed = place.run_with(&run(words), &[("FAILPOINTS", "train.after_step=15*off->return")]);
    assert_eq!(killed.code, None, "{killed:?}");
    let weights = place.path("run/weights.safetensors");
    let best = fs::read(&weights).unwrap();
    fs::remove_file(&weights).unwrap();
    let killed = place.run_with(&run(words), &[("FAILPOINTS", "train.after_step=return")]);
    assert_eq!(killed.code, None, "{killed:?}");
    assert!(fs::read(&weights).unwrap() == best, "the weights of step 10 were expected");
}

#[test]
fn other_settings_and_another_corpus_are_refused_with_the_difference() {
    let place = prepared();
    place.train("--steps 10 --valid valid.txt -q --output run", 0);
    let begun = place.left("run");
    let refused = place.train("--steps 20 --valid valid.txt --dropout 0.2 --unroll 6 --output run", 2);
    for part in ["dropout: 0.1 in the run, 0.2 now", "unroll: 5 in the run, 6 now", "--overwrite"] {
        assert!(refused.err.contains(part), "{part}: {refused:?}");
    }
    assert!(!refused.err.contains("seed:"), "{refused:?}");
    let whole = fs::read(place.path("corpus/1.txt")).unwrap();
    place.write("corpus/1.txt", [whole.as_slice(), b"one more\n"].concat());
    let refused = place.train("--steps 20 --valid valid.txt --output run", 3);
    let change = "1.txt: changed; it had 40 sentences";
    assert!(refused.err.contains(change) && refused.err.contains("and has 41"), "{refused:?}");
    place.write("corpus/1.txt", &whole);
    place.write("corpus/3.txt", "a new one\n");
    let refused = place.train("--steps 20 --valid valid.txt --output run", 3);
    assert!(refused.err.contains("3.txt: is new"), "{refused:?}");
    fs::remove_file(place.path("corpus/3.txt")).unwrap();
    place.write("other.txt", "w1 w2\n");
    let refused = place.train("--steps 20 --valid other.txt --output run", 3);
    assert!(refused.err.contains("the held-out text of this run has changed"), "{refused:?}");
    place.same("run", &begun, "refusals");
    // The corpus may move, and a run may become longer.
    fs::rename(place.path("corpus"), place.path("moved")).unwrap();
    place.train("--shards moved --steps 20 --valid valid.txt -q --output run", 0);
    assert_eq!(place.lines("run/steps.jsonl").len(), 20);
}

/// `--overwrite` removes event files, and those of another program are left alone; `elmo plot` draws the run.
#[test]
fn event_files_and_curves_belong_to_a_run() {
    let place = prepared();
    let files = || fs::read_dir(place.path("run/tensorboard")).unwrap().count();
    place.train("--steps 7 -q --output run", 0);
    place.train("--steps 9 -q --output run", 0);
    assert_eq!(files(), 2);
    place.train("--steps 8 -q --output run --overwrite", 0);
    assert_eq!(files(), 1);
    let plotted = place.exits("plot run --output run.svg --json", 0).json();
    assert_eq!((&plotted["runs"][0]["steps"], &plotted["runs"][0]["damaged_lines"]), (&json!(8), &json!(0)));
    place.exits("plot run --output run.html -q", 0);
    for file in ["run.svg", "run.html"] {
        let page = Page::parse(&fs::read_to_string(place.path(file)).unwrap());
        page.needs_no_network();
        assert!(page.text.contains("sampled softmax"), "{file}");
    }
    assert!(place.exits("plot nowhere", 3).err.contains("no folder of a run"));
    assert!(place.exits("plot run --output options.html --smoothing 1", 2).err.contains("below 1"));
    place.write("options.html", "mine");
    assert!(place.exits("plot run --output options.html", 2).err.contains("is no plot"));
    place.write("foreign/tensorboard/events.out.tfevents.1.host", "x");
    assert!(place.train("--steps 1 --output foreign", 2).err.contains("tensorboard"));
}

#[test]
fn bad_input_is_refused_before_the_first_step() {
    let place = prepared();
    let vocab = fs::read_to_string(place.path("vocab.txt")).unwrap();
    let mut lines: Vec<&str> = vocab.lines().collect();
    lines.swap(3, 20);
    place.write("unsorted.txt", lines.join("\n"));
    fs::copy(place.path("vocab.counts.tsv"), place.path("unsorted.counts.tsv")).unwrap();
    place.write("twice.txt", format!("{vocab}w0\n"));
    place.write("lacking.txt", vocab.replace("<UNK>\n", ""));
    place.write("gap.txt", vocab.replace("<UNK>\n", "<UNK>\n\n\n"));
    place.write("empty/a.txt", "\n  \n");
    place.write("bytes/a.txt", b"fine\n\xff\n");
    place.write("wrong.json", OPTIONS.replace("\"dim\": 16", "\"dim\": 0"));
    place.write("keys.json", OPTIONS.replacen('{', "{\"n_tokens_vocab\": 9,", 1));
    place.write("epochs.json", OPTIONS.replacen('{', "{\"n_epochs\": -1,", 1));
    place.write("unroll.json", OPTIONS.replacen('{', "{\"unroll_steps\": 0,", 1));
    place.write("model/options.json", OPTIONS);
    let (shards, vocab, options) = ("--shards corpus", "--vocab vocab.txt", "--options options.json");
    for (words, code, part) in [
        (format!("{shards} --vocab unsorted.txt {options}"), 3, "comes after line"),
        (format!("{shards} --vocab twice.txt {options}"), 4, "occurs twice"),
        (format!("{shards} --vocab lacking.txt {options}"), 4, "<UNK> is missing"),
        (format!("{shards} --vocab gap.txt {options}"), 4, "line 4 is empty"),
        (format!("{shards} --vocab nowhere.txt {options}"), 2, "elmo vocab"),
        (format!("{shards} --vocab corpus {options}"), 2, "corpus: is a folder"),
        (format!("--shards nowhere {vocab} {options}"), 3, "no such file"),
        (format!("--shards empty {vocab} {options}"), 3, "no sentences"),
        (format!("--shards bytes {vocab} {options}"), 3, "row 1"),
        (format!("--shards - {vocab} {options}"), 2, "standard input"),
        (format!("{shards} {vocab} --options wrong.json"), 4, "lstm.dim"),
        (format!("{shards} {vocab} --options keys.json"), 2, "n_tokens_vocab"),
        (format!("{shards} {vocab} --options epochs.json"), 2, "epochs.json: `n_epochs` is -1; it must be above 0"),
        (format!("{shards} {vocab} --options unroll.json"), 2, "unroll.json: `unroll_steps` is 0"),
        (format!("{shards} {vocab} {options} --samples 43"), 2, "--samples 0"),
        (format!("{shards} {vocab} {options} --rows 4 --lanes 5"), 2, "lanes"),
        (format!("{shards} {vocab} {options} --valid empty"), 3, "no sentences"),
        (format!("{shards} {vocab}"), 2, "none of --size"),
        (format!("{shards} {options}"), 2, "no --vocab"),
        (format!("{vocab} {options}"), 2, "no --shards"),
        (format!("{shards} {vocab} {options} --init tiny"), 2, "sizes of its own"),
        (format!("{shards} {vocab} --init a.safetensors"), 2, "--options or --size"),
        (format!("{shards} {vocab} {options} --steps 3 --epochs 2"), 2, "cannot be used with"),
        (format!("{shards} {vocab} {options} --patience 3"), 2, "--valid"),
        (format!("{shards} {vocab} {options} --device cuda:98,99"), 1, "does not exist"),
    ] {
        let refused = place.exits(&format!("train {words} --output run"), code);
        assert!(refused.err.contains(part), "{words}: {refused:?}");
        assert!(!place.path("run").exists(), "{words}");
    }
    for (output, code, part) in [("model", 2, "options.json"), ("s3://bucket/run", 2, "local folder")] {
        let refused = place.train(&format!("--output {output}"), code);
        assert!(refused.err.contains(part), "{output}: {refused:?}");
    }
    fs::create_dir_all(place.path("locked")).unwrap();
    let lock = File::create(place.path("locked/train.lock")).unwrap();
    lock.lock().unwrap();
    assert!(place.train("--output locked", 5).err.contains("another process"));
    // Rows that are no text are left out where told so, and counted.
    let skipping =
        format!("train --shards bytes {vocab} {options} --on-error skip --steps 1 --rows 2 --json --output run");
    let skipped = place.exits(&skipping, 6);
    assert_eq!(skipped.json()["bad_rows"], 1);
    assert!(skipped.err.contains("1 rows of the corpus are not text"), "{skipped:?}");
    // Those of held-out text are counted once, however often it is measured.
    let valid = "--valid bytes --on-error skip --steps 2 --eval-every 1 --json --output held-out";
    let skipped = place.train(valid, 6);
    assert_eq!(skipped.json()["bad_rows"], 1);
    assert!(skipped.err.contains("1 rows of the held-out text are not text"), "{skipped:?}");
}

/// One text in several formats gives one run.
#[test]
fn all_formats_give_the_same_run() {
    let place = prepared();
    place.write("one/a.txt", text(4, 80));
    let sql = [
        "COPY (SELECT text FROM 'one/a.txt') TO 'parquet/a.parquet'",
        "COPY (SELECT string_to_array(text, ' ') AS words FROM 'one/a.txt') TO 'lists/a.parquet'",
        "COPY (SELECT text FROM 'one/a.txt') TO 'json/a.jsonl'",
    ];
    for statement in sql {
        place.exits_sql(statement);
    }
    place.shell("mkdir packed zst && gzip -c one/a.txt > packed/a.txt.gz && zstd -qc one/a.txt > zst/a.txt.zst");
    let losses = |shards: &str, more: &str| {
        place.train(&format!("--shards {shards} --steps 12 -q --output run-{shards}{more} {more}"), 0);
        place.left(&format!("run-{shards}{more}"))["weights.safetensors"].clone()
    };
    let expected = losses("one", "");
    for (shards, more) in [("parquet", ""), ("lists", "--column=words"), ("json", ""), ("packed", ""), ("zst", "")] {
        assert!(losses(shards, more) == expected, "{shards}");
    }
    // `w1.` is one token, which is not in the vocabulary, or `w1` and a full stop.
    place.write("stops/a.txt", text(4, 80).replace('\n', ".\n"));
    assert!(losses("stops", "--tokenizer=moses") != losses("stops", ""));
}

#[test]
fn a_loss_that_is_not_finite_ends_the_run_or_is_passed_over() {
    let place = prepared();
    let stopped = place.train("--steps 20 --learning-rate 1e30 --clip-norm off --checkpoint-every 1 --output wild", 1);
    assert!(stopped.err.contains("is not a finite number"), "{stopped:?}");
    assert!(stopped.err.contains("the last good checkpoint is") && stopped.err.contains("rollback"), "{stopped:?}");
    let again =
        "--steps 20 --learning-rate 1e30 --clip-norm off --checkpoint-every 1 --on-spike rollback --output wild";
    assert!(place.train(again, 1).err.contains("going back to"));

    place.train("--steps 20 -q --output whole", 0);
    let spike = [("FAILPOINTS", "train.spike=9*off->1*return")];
    let passed = place.run_with(&run("--steps 20 --on-spike rollback --output run"), &spike);
    assert_eq!(passed.code, Some(0), "{passed:?}");
    assert!(passed.err.contains("step 10: the loss is not a finite number; going back to"), "{passed:?}");
    let (whole, run) = (place.lines("whole/steps.jsonl"), place.lines("run/steps.jsonl"));
    assert_eq!(run.iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(), (1..=20).collect::<Vec<_>>());
    // The checkpoint of step 7 stays; then other text is read.
    let losses = |lines: &[Value]| lines.iter().map(|line| line["loss"].to_string()).collect::<Vec<_>>();
    assert_eq!(losses(&run[..7]), losses(&whole[..7]));
    assert_ne!(losses(&run[7..9]), losses(&whole[7..9]));
}

/// The first shard has one word, which the model soon predicts; the others have words that it has never seen by then.
#[test]
fn a_loss_that_jumps_ends_the_run_unless_told_otherwise() {
    let place = prepared();
    place.write("corpus/0.txt", "w0 w0 w0 w0\n".repeat(200));
    let words = "--order bilm --samples 0 --learning-rate 0.5 --checkpoint-every 7 --steps 100";
    let stopped = place.train(&format!("{words} --output run"), 1);
    assert!(stopped.err.contains(": the loss jumped to "), "{stopped:?}");
    assert!(stopped.err.contains("the last good checkpoint is") && stopped.err.contains("ignore"), "{stopped:?}");
    let lines = place.lines("run/steps.jsonl");
    assert!((20..100).contains(&lines.len()), "{}", lines.len());

    let ignored = place.train(&format!("{words} --on-spike ignore --output run"), 0);
    assert!(ignored.err.contains(": the loss jumped to "), "{ignored:?}");
    let losses = |lines: &[Value]| lines.iter().map(|line| line["loss"].to_string()).collect::<Vec<_>>();
    let ignored = losses(&place.lines("run/steps.jsonl"));
    assert!(ignored.len() == 100 && ignored[..lines.len()] == losses(&lines), "{}", ignored.len());

    let back = place.train(&format!("{words} --on-spike rollback --output back"), 0);
    assert!(back.err.contains(": the loss jumped to ") && back.err.contains("; going back to back"), "{back:?}");
    assert_eq!(place.lines("back/steps.jsonl").len(), 100);
}

/// By hand: weights after a step with a rate of 1e200 are infinite in float32. The loss of that step is finite.
#[test]
fn weights_that_are_not_finite_are_no_checkpoint() {
    let place = prepared();
    let words =
        "--steps 20 --learning-rate 1e200 --clip-norm off --checkpoint-every 1 --on-spike rollback --output run";
    for _ in 0..2 {
        let ended = place.train(words, 1);
        assert!(
            ended.err.contains("step 1: a weight") && ended.err.contains("going back to a checkpoint did not help"),
            "{ended:?}"
        );
        assert!(!ended.err.contains("give --on-spike rollback"), "{ended:?}");
        let checkpoints = place.checkpoints("run");
        assert!(checkpoints.len() == 1 && checkpoints[0].ends_with("step-0000000000"), "{checkpoints:?}");
    }
}

#[test]
fn a_run_goes_back_to_its_beginning_and_further_the_second_time() {
    let place = prepared();
    let spikes = |points: &str, output: &str| {
        let words = run(&format!("--steps 20 --on-spike rollback --output {output}"));
        let passed = place.run_with(&words, &[("FAILPOINTS", points)]);
        assert_eq!(passed.code, Some(0), "{passed:?}");
        passed.err
    };
    let early = spikes("train.spike=2*off->1*return", "early");
    assert!(early.contains("step 3: ") && early.contains("step-0000000000 and passing"), "{early}");
    let twice = spikes("train.spike=9*off->2*return", "twice");
    assert!(twice.contains("step 10: ") && twice.contains("step-0000000007 and passing"), "{twice}");
    assert!(twice.contains("step 8: ") && twice.contains("step-0000000000 and passing"), "{twice}");
}

/// A run that goes back still computes as its command says, and resumes without a remark.
#[test]
fn a_run_that_goes_back_has_the_settings_of_now() {
    let place = prepared();
    place.train("--rows 4 --steps 7 -q --output run", 0);
    let words = "--rows 2 --accumulate 2 --steps 20 --on-spike rollback --output run";
    let back = place.run_with(&run(words), &[("FAILPOINTS", "train.spike=1*off->1*return")]);
    assert!(back.code == Some(0) && back.err.contains("going back to"), "{back:?}");
    let again = place.train(&words.replace("20", "25"), 0);
    assert!(!again.err.contains("sums in another order"), "{again:?}");
}

#[test]
fn options_that_change_nothing_and_windows_that_do_not_fit_are_refused() {
    let place = prepared();
    for (words, text) in [
        ("--warm-up 9", "--warm-up changes nothing without --schedule cosine or inverse-sqrt"),
        ("--final-ratio 0.5", "--final-ratio changes nothing without --schedule cosine"),
        ("--schedule inverse-sqrt --final-ratio 0.5", "--final-ratio changes nothing"),
        ("--weight-decay 0.1", "--weight-decay changes nothing without --optimizer adamw"),
        ("--rows 4611686018427387904 --accumulate 8", "has more than 2147483647 tokens"),
        ("--rows 100000000 --accumulate 99999999999", "has more than 2147483647 tokens"),
        ("--epochs 1e300", "steps, and at most 4 294 967 295 can be made"),
        ("--processes 1000000", "it must be at most 1024"),
        ("--rows 4 --lanes 99", "99 lanes for 4 rows; there must be 1 to 4"),
    ] {
        let refused = place.run(&run(&format!("{words} --output no")));
        let said = refused.err.replace([',', '\u{202f}', '\u{a0}'], " ");
        assert!(refused.code == Some(2) && said.contains(&text.replace(',', " ")), "{words}: {refused:?}");
    }
    // Processes that do not fit are not started. By hand: 1000 of them take 332 GiB for the program alone.
    let refused =
        place.run_with(&run("--processes 1000 --output no"), &[("FAILPOINTS", "train.free_memory=return(1000000000)")]);
    assert!(refused.code == Some(2) && refused.err.contains("1000 processes take at least"), "{refused:?}");
    let short = place.train("--schedule cosine --warm-up 100 --steps 3 --output short", 0);
    assert!(short.err.contains("rises for 100 steps, and the run has 3"), "{short:?}");
}

/// Folders of languages have files of one name; a moved, compressed corpus is the same; one with other rows is not, because
/// a run resumes from a row.
#[test]
fn a_corpus_is_compared_by_paths_and_rows() {
    let place = prepared();
    place.shell("mkdir -p all/lang=de all/lang=en && cp corpus/0.txt all/lang=de && cp corpus/1.txt all/lang=en/0.txt");
    place.train("--shards all --steps 5 -q --output run", 0);
    place.train("--shards all --steps 8 -q --output run", 0);
    place.shell("mv all packed && gzip packed/*/0.txt");
    place.train("--shards packed --steps 10 -q --output run", 0);
    place.shell("gunzip packed/*/0.txt.gz && sed -i '3s/^/\\n/' packed/lang=en/0.txt");
    let refused = place.train("--shards packed --steps 20 --output run", 3);
    assert!(refused.err.contains("lang=en/0.txt: changed") && !refused.err.contains("lang=de"), "{refused:?}");
}

/// A process with a fail point.
fn started(place: &Place, words: &str, points: &str) -> std::process::Child {
    let mut command = place.elmo();
    command.args(words.split_whitespace()).env("FAILPOINTS", points);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn signal(child: &std::process::Child, name: &str) {
    std::process::Command::new("kill").args([name, &child.id().to_string()]).status().unwrap();
}

/// The text of a run changes while it trains: no step uses it, and none is lost.
#[test]
fn a_corpus_that_changes_ends_the_run_with_a_checkpoint() {
    let place = prepared();
    let words = "--checkpoint-every 1000000 --output run --steps";
    let child = started(&place, &run(&format!("{words} 1000000")), "train.after_step=sleep(2)");
    wait_for_lines(&place, "run/steps.jsonl", 20);
    let path = place.path("corpus/1.txt");
    let (whole, modified) = (fs::read(&path).unwrap(), fs::metadata(&path).unwrap().modified().unwrap());
    place.write("corpus/1.txt", [whole.as_slice(), b"one more\n"].concat());
    let ended = ended(child.wait_with_output().unwrap());
    assert_eq!(ended.code, Some(3), "{ended:?}");
    assert!(ended.err.contains("1.txt") && ended.err.contains("resumes from there"), "{ended:?}");
    let steps = place.lines("run/steps.jsonl").len();
    assert!(place.checkpoints("run").pop().unwrap().ends_with(format!("step-{steps:010}")), "{steps}");
    place.write("corpus/1.txt", &whole);
    // Part of the state.
    File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
    place.train(&format!("{words} {} -q", steps + 5), 0);
    place.train(&format!("{words} {} -q --output whole", steps + 5).replace("--output run ", ""), 0);
    place.same("run", &place.left("whole"), "after the corpus was restored");
}

/// SIGTERM during a measurement ends it; it is made when the run goes on. The fail point makes it last 18 windows x 0.3 s.
#[test]
fn a_measurement_is_interrupted_and_made_again() {
    let place = prepared();
    let words = "--valid valid.txt --steps 12 --eval-every 5 -q --output";
    place.train(&format!("{words} whole"), 0);
    let child = started(&place, &run(&format!("{words} run")), "train.in_measurement=sleep(300)");
    wait_for_lines(&place, "run/steps.jsonl", 5);
    signal(&child, "-TERM");
    let ended = ended(child.wait_with_output().unwrap());
    assert_eq!(ended.code, Some(130), "{ended:?}");
    assert!(place.checkpoints("run").pop().unwrap().ends_with("step-0000000005"));
    assert_eq!(place.lines("run/valid.jsonl").len(), 0);
    place.train(&format!("{words} run"), 0);
    place.same("run", &place.left("whole"), "after a measurement that was interrupted");
}

/// Two starts on a folder that does not exist: the first one stops before it creates the folder, and wakes up when the
/// second one has ended. It finds a run that is longer than its own, and leaves it as it is.
#[test]
fn a_later_start_does_not_destroy_a_run() {
    let place = prepared();
    let mut first = started(&place, &run("--steps 10 --output run"), "train.before_lock=return(freeze)");
    let mut line = String::new();
    let mut errors = std::io::BufReader::new(first.stderr.take().unwrap());
    while !line.contains("reached train.before_lock") {
        line.clear();
        assert!(std::io::BufRead::read_line(&mut errors, &mut line).unwrap() > 0);
    }
    place.train("--steps 30 -q --output run", 0);
    let expected = place.left("run");
    signal(&first, "-CONT");
    assert!(first.wait().unwrap().success());
    place.same("run", &expected, "after the other start");
}

/// A file may have 10 KB: the checkpoint does not fit.
#[test]
fn a_full_disk_leaves_the_last_checkpoint() {
    let place = prepared();
    place.train("--steps 14 -q --output whole", 0);
    place.train("--steps 7 -q --output run", 0);
    let full = place.shell(&format!("trap '' XFSZ; ulimit -f 20; exec elmo {}", run("--steps 14 --output run")));
    assert_eq!(full.code, Some(5), "{full:?}");
    assert!(full.err.contains("step-0000000014") && full.err.contains("resumes from"), "{full:?}");
    assert!(full.err.contains("step-0000000007"), "{full:?}");
    assert!(!place.path("run/checkpoints/partial").exists(), "what is incomplete takes room");
    place.train("--steps 14 -q --output run", 0);
    place.same("run", &place.left("whole"), "after a full disk");
}

/// `-p ln p`
fn surprise(p: f64) -> f64 {
    -p * p.ln()
}

/// A source of sentences of known entropy. The first two words are any of eight. Then the sentence ends with probability
/// 0.1; otherwise the word before the last one comes again with probability 0.8, and else any of the eight.
fn source(dice: &mut Dice, sentences: usize) -> String {
    let mut text = String::new();
    for _ in 0..sentences {
        let mut words = vec![dice.below(8), dice.below(8)];
        while dice.below(10) > 0 {
            let copied = words[words.len() - 2];
            words.push(if dice.below(10) < 8 { copied } else { dice.below(8) });
        }
        let words: Vec<String> = words
            .iter()
            .map(|word| ["ash", "bay", "cod", "dew", "elm", "fig", "gum", "hop"][*word as usize].to_owned())
            .collect();
        text += &(words.join(" ") + "\n");
    }
    text
}

/// Expected: the entropy of the source, by hand. A sentence has two predictions of ln 8 and, on average, ten of `h`: whether
/// it ends, and which word comes, the copied one with probability 0.825 and each other one with 0.025. Read backwards, it
/// has the same probability and the same number of predictions. No model is better than that on average; the held-out text
/// has some 24,000 predictions, whose mean differs from the expectation by 0.7 % (one standard error). A model of single
/// words or pairs cannot come below exp(h) with all eight words alike, 8.2: memory over two words is needed.
#[test]
fn a_text_of_known_entropy_is_learned_to_its_entropy() {
    let place = Place::new();
    place.write(
        "options.json",
        OPTIONS.replace("\"dim\": 16", "\"dim\": 64").replace("\"projection_dim\": 8", "\"projection_dim\": 16"),
    );
    place.write("corpus/a.txt", source(&mut Dice(1), 10_000));
    place.write("corpus/b.txt", source(&mut Dice(2), 10_000));
    place.write("valid.txt", source(&mut Dice(3), 2000));
    place.exits("vocab corpus --output vocab.txt -q", 0);
    let h = surprise(0.1) + surprise(0.9) + 0.9 * (surprise(0.825) + 7.0 * surprise(0.025));
    let expected = f64::exp((2.0 * 8.0_f64.ln() + 10.0 * h) / 12.0);
    let words = "train --shards corpus --valid valid.txt --vocab vocab.txt --options options.json --rows 32 --unroll 12 \
                 --optimizer adamw --learning-rate 0.01 --schedule cosine --warm-up 20 --dropout 0 --steps 500 \
                 --eval-every 250 --device cpu --output run --json";
    let report = place.exits(words, 0).json();
    for name in ["perplexity", "perplexity_forward", "perplexity_backward"] {
        let found = report[name].as_f64().unwrap();
        assert!((found / expected - 1.0).abs() < 0.03, "{name} {found}, not {expected}: {report}");
    }
    assert_eq!(report["negatives"], Value::Null, "a small vocabulary takes all words");
    let lines = place.lines("run/steps.jsonl");
    let names = ["step", "loss_forward", "loss_backward", "loss", "grad_norm", "clip_scale", "tokens", "seconds"];
    assert!(names.iter().all(|name| lines[0][name].is_number()), "{}", lines[0]);
    assert_eq!(lines[0]["softmax"], "full");
    assert!(lines.last().unwrap()["loss"].as_f64() < lines[0]["loss"].as_f64());
    let valid = place.lines("run/valid.jsonl");
    assert_eq!(valid.iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(), [250, 500]);

    // The folder is a model that gives vectors and probabilities.
    place.write("ask.txt", "ash bay ash bay ash\n");
    let embed = "embed ask.txt --model run --tokenizer whitespace --sentences off -q --output vectors --level token";
    place.exits(embed, 0);
    assert_eq!(place.exits("inspect vectors --json", 0).json()["rows"], 1);
    let info = place.exits("model info run --json", 0).json();
    assert_eq!(info["parameters"], json!(report_parameters()), "{info}");
    assert_eq!((&report["model_step"], place.checkpoints("run").len()), (&json!(500), 2));
    the_export_is_the_trained_model(&place);
    // After `ash bay ash bay` the word before the last one is likely, and another one is not: by the source 0.9 x 0.825 and
    // 0.9 x 0.025.
    let surprisal = |text: &str| -> f64 {
        let query = format!("SELECT elmo_perplexity('{text}', tokenizer => 'whitespace')['average']");
        let shown =
            place.elmo().args(["sql", "-q", "--format", "csv", "--model", "run", "-c", &query]).output().unwrap();
        let shown = ended(shown);
        shown.out.lines().nth(1).unwrap_or_else(|| panic!("{shown:?}")).parse().unwrap()
    };
    assert!(surprisal("ash bay ash bay ash bay") < 0.7 * surprisal("ash bay cod dew elm fig"));
}

/// All layers of the folder as a model, for sentences of the held-out text, are those that libtorch's operations of training
/// compute from the weights of the last checkpoint. The two paths round differently.
fn the_export_is_the_trained_model(place: &Place) {
    let data = elmo::ModelData::open(&place.path("run")).unwrap();
    let plan: Vec<_> = (data.options.weight_plan().into_iter())
        .map(|spec| elmo::options::TensorSpec { name: format!("weights/{}", spec.name), shape: spec.shape })
        .collect();
    let last = place.checkpoints("run").pop().unwrap();
    let saved = elmo::weights::safetensors::read_file(&last.join("tensors.safetensors"), &plan).unwrap().weights;
    let mut trained = elmo::weights::Weights::default();
    for spec in data.options.weight_plan() {
        trained.insert(spec.name.clone(), saved.get(&format!("weights/{}", spec.name)).unwrap().clone());
    }
    let (cpu, precision) = (elmo::model::DeviceName::Cpu, elmo::model::Precision::F32);
    let trained = elmo::model::BiLm::with_torch_operations(&data.options, &trained, cpu, precision).unwrap();
    let folder = elmo::model::BiLm::new(&data.options, &data.weights, cpu, precision).unwrap();
    let words = ["<S>", "</S>", "ash", "bay", "cod", "dew", "elm", "fig", "gum", "hop", "unseen"];
    let sentences: Vec<Vec<i64>> = vec![vec![0, 2, 3, 2, 3, 2, 1], vec![0, 9, 10, 8, 1], vec![0, 4, 1]];
    let layers = |model: &elmo::model::BiLm| {
        let table = model.token_vectors(&words).unwrap();
        let activations = model.run(&table, &sentences, &model.zero_state().unwrap(), false).unwrap();
        let mut all = Vec::new();
        for layer in 0..activations.n_layers() {
            let values = activations.combine(&[(layer, 1.0)]).unwrap();
            for (sentence, words) in sentences.iter().enumerate() {
                for token in 0..words.len() {
                    let mut vector = vec![0.0; values.width()];
                    values.token(&activations, sentence, token, &mut vector);
                    all.extend(vector);
                }
            }
        }
        all
    };
    let (expected, found) = (layers(&trained), layers(&folder));
    // Three layers of 15 tokens, of 2 x 16 numbers each.
    assert_eq!((found.len(), expected.len()), (3 * 15 * 32, 3 * 15 * 32));
    let far = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0_f32, f32::max);
    assert!(far < 1e-5, "{far:e}");
    assert!(expected.iter().any(|value| value.abs() > 0.1), "activations of a trained model");
}

/// By hand, for the options of the test above: `char_embed` 261 x 4; filters 4 x 8 + 8 and 2 x 4 x 8 + 8; one highway layer
/// 2 x (16 x 16 + 16); two directions of two cells, each (16 + 16) x 256 + 256 and 64 x 16. Filters and projection have the
/// same width, so there is no projection of the char CNN.
fn report_parameters() -> u64 {
    1044 + 40 + 72 + 544 + 4 * (32 * 256 + 256 + 1024)
}

#[test]
fn the_best_weights_are_kept_and_the_run_ends_when_they_get_no_better() {
    let place = prepared();
    let words = "--valid valid.txt --steps 4000 --eval-every 20 --patience 3 --optimizer adamw --learning-rate 0.02 \
                 --dropout 0 --samples 0 --json --output run";
    let report = place.train(words, 0).json();
    assert_eq!(report["ended"], "the held-out perplexity no longer falls", "{report}");
    let valid = place.lines("run/valid.jsonl");
    let best = valid.iter().min_by(|a, b| a["perplexity"].as_f64().partial_cmp(&b["perplexity"].as_f64()).unwrap());
    let best = best.unwrap();
    assert_eq!((&report["model_step"], &report["perplexity"]), (&best["step"], &best["perplexity"]));
    assert_eq!(report["steps"].as_u64(), best["step"].as_u64().map(|step| step + 60));
    let text = fs::read_to_string(place.path("run/MODEL.md")).unwrap();
    let step = best["step"].as_u64().unwrap();
    assert!(text.contains(&format!("Step {step} of")) && text.contains("--tokenizer whitespace"), "{text}");
    let number = |name: &str| best[name].as_f64().unwrap();
    let held_out = format!(
        "\nPerplexity {:.3} (forward {:.3}, backward {:.3}) on {} predictions in each direction of valid.txt: all words",
        number("perplexity"),
        number("perplexity_forward"),
        number("perplexity_backward"),
        best["tokens"]
    );
    assert!(text.contains(&held_out), "no {held_out} in {text}");
    // Another run can begin with these weights.
    let init = "train --shards corpus --vocab vocab.txt --init run --valid valid.txt --steps 1 --rows 4 --learning-rate 1e-9 \
                --device cpu --json --output more";
    let more = place.exits(init, 0).json()["perplexity"].as_f64().unwrap();
    assert!((more / best["perplexity"].as_f64().unwrap() - 1.0).abs() < 1e-6, "{more}");
    // So can one with a file of all tensors.
    let data = elmo::ModelData::open(&place.path("run")).unwrap();
    let head = elmo::lm_head::LmHeadFiles::find(&place.path("run")).unwrap().read(8).unwrap();
    let mut all = data.weights.clone();
    all.insert("softmax/W".to_owned(), head.weight().clone());
    all.insert("softmax/b".to_owned(), head.bias().clone());
    place.write("all.safetensors", elmo::weights::safetensors::write(&all, &BTreeMap::new()).unwrap());
    let words = init.replace("--init run", "--init all.safetensors --options options.json");
    place.exits(&words.replace("--output more", "--output same"), 0);
    let losses = |run: &str| place.lines(&format!("{run}/steps.jsonl"))[0]["loss"].to_string();
    assert_eq!(losses("same"), losses("more"));
    // And one with the file of the run, which has no softmax.
    let words = init.replace("--init run", "--init run/weights.safetensors --options options.json");
    place.exits(&words.replace("--output more", "--output bare"), 0);
    assert_ne!(losses("bare"), losses("more"), "a softmax of its own");
    place.write("words.txt", "<S>\n</S>\n<UNK>\nw0\n");
    let other = place.exits(&init.replace("vocab.txt", "words.txt").replace("--output more", "--output other"), 2);
    assert!(other.err.contains("is another one than"), "{other:?}");
}

#[test]
fn a_dry_run_writes_nothing_and_warns() {
    let place = prepared();
    let estimate = place.train("--epochs 2 --valid corpus/1.txt --dry-run --json --output run", 0).json();
    let stats: Value = serde_json::from_str(&fs::read_to_string(place.path("vocab.stats.json")).unwrap()).unwrap();
    assert_eq!((&estimate["tokens"], &estimate["sentences"]), (&stats["tokens"], &stats["sentences"]));
    let predictions = stats["tokens"].as_u64().unwrap() + stats["sentences"].as_u64().unwrap();
    assert_eq!(estimate["predictions"].as_u64(), Some(predictions));
    assert_eq!(estimate["steps"].as_u64(), Some(2 * predictions / 20));
    // By hand: as above with 16 cells and 8 projected: a char CNN with projection 16 x 8 + 8.
    let parameters = 1044 + 40 + 72 + 544 + 136 + 4 * (16 * 64 + 64 + 128);
    assert_eq!(estimate["parameters"].as_u64(), Some(parameters));
    assert_eq!(estimate["softmax_parameters"].as_u64(), estimate["words"].as_u64().map(|words| 9 * words));
    assert!(
        estimate["warnings"].to_string().contains("are also in the corpus; its perplexity is too low"),
        "{estimate}"
    );
    assert!(estimate["hours"].as_f64().unwrap() > 0.0);
    assert!(!place.path("run").exists());
    assert!(!estimate["warnings"].to_string().contains("--sentences split"), "{estimate}");
    place.write("long/a.txt", format!("{}\n{}\n", "w1 ".repeat(1000), "w1 ".repeat(1001)));
    let long = place.train("--shards long --dry-run --output run", 0).out;
    assert!(long.contains("1 sentences of the corpus have more than 1,000 tokens"), "{long}");
}

/// The text is not read again when nothing has changed.
#[test]
fn a_run_that_resumes_makes_its_remarks_again() {
    let place = prepared();
    let text = "of the held-out text with at least 6 tokens are also in the corpus";
    for steps in [5, 8] {
        let made = place.train(&format!("--steps {steps} --valid corpus/1.txt --output run"), 0);
        assert!(made.err.contains(text), "{made:?}");
    }
}

/// Gross disorder ends a new run that draws negatives by rank. By hand: `a` occurs 1,000 times and eleven words ten times each,
/// but `a` is the last one of the vocabulary.
#[test]
fn a_vocabulary_that_is_not_sorted_is_refused_where_the_order_matters() {
    let place = prepared();
    place.write("abc/a.txt", "a a a a a a a a a a\n".repeat(100) + &"b c d e f g h i j k l\n".repeat(10));
    place.write("last.txt", "<S> </S> <UNK> b c d e f g h i j k l a".replace(' ', "\n"));
    let words = "--shards abc --vocab last.txt --steps 2 --output";
    for more in ["", "--dry-run"] {
        let refused = place.train(&format!("{words} run {more}"), 3);
        let expected = "\"b\" in line 4 is counted 10 times, and \"a\" in line 15 is counted 1,000 times";
        for part in [expected, "--samples 0", "elmo vocab"] {
            assert!(refused.err.contains(part), "{part}: {refused:?}");
        }
    }
    assert!(!place.path("run").exists());
    // Over all words the order does not matter.
    let full = place.train(&format!("{words} full --samples 0"), 0);
    assert!(!full.err.contains("is not sorted by"), "{full:?}");
    // A model that goes on has the order of its own text.
    let finetune = "finetune --model full --shards abc --steps 1 --rows 2 --device cpu --samples 9 --output tuned";
    let warned = place.exits(finetune, 0);
    assert!(warned.err.contains("is not sorted by the frequency"), "{warned:?}");
    // Slight disorder: 5 words of 20 counts each at ranks before the most frequent one.
    place.write("slight/a.txt", "a ".repeat(100) + &"b c d e f ".repeat(20));
    place.write("slight.txt", "<S>\n</S>\n<UNK>\nb\nc\na\nd\ne\nf\nx\ny\nz\nu\nv\nw\n");
    let warned = place.train("--shards slight --vocab slight.txt --steps 2 --output slightly", 0);
    assert!(warned.err.contains("is not sorted by the frequency"), "{warned:?}");
}

/// The fail point is the memory that is free.
#[test]
fn what_does_not_fit_into_memory_is_refused_before_the_first_step() {
    let place = prepared();
    let with = |words: &str, bytes: &str| {
        place.run_with(&run(words), &[("FAILPOINTS", &format!("train.free_memory=return({bytes})"))])
    };
    let needs = "weights and the state of the optimiser take ";
    for words in ["--steps 5 --output run", "--steps 5 --dry-run --output run"] {
        let refused = with(words, "9000");
        assert_eq!(refused.code, Some(2), "{refused:?}");
        for part in [needs, "free", "--rows", "--accumulate", "--unroll", "--samples", "--size"] {
            assert!(refused.err.contains(part), "{part}: {refused:?}");
        }
        assert!(!place.path("run").exists());
    }
    // The program and a thread are taken for 340 MiB, and the model for less than one.
    assert_eq!(with("--steps 5 --output run", "370000000").code, Some(0));
    // A run that goes on needs as much.
    let before = place.left("run");
    let refused = with("--steps 9 --output run", "9000");
    assert!(refused.code == Some(2) && refused.err.contains(needs), "{refused:?}");
    place.same("run", &before, "refused");
    // Activations count. By hand: a lane has 157 rows of 100 tokens, each with 2 x 2 x (6 x 16 + 3 x 8) numbers of 4 bytes: 30 MB.
    let refused = with("--rows 10000 --unroll 100 --threads 1 --steps 1 --output wide", "370000000");
    assert!(refused.code == Some(2) && refused.err.contains(needs), "{refused:?}");
}

#[test]
fn the_preset_is_the_published_recipe_or_refused() {
    let place = prepared();
    let base = "train --shards corpus --vocab vocab.txt --options options.json --steps 1 --output run";
    let refused = place.exits(&format!("{base} --preset bilm --rows 4 --dropout 0"), 2);
    assert!(refused.err.contains("from which these differ: --rows, --dropout"), "{refused:?}");
    let small = place.exits(&format!("{base} --preset bilm"), 2);
    assert!(
        small.err.contains("8192 negatives cannot be drawn") && small.err.contains("larger vocabulary"),
        "{small:?}"
    );
    assert!(!place.path("run").exists());
}

/// Three shards of 40 sentences in blocks of 7 are read nearly in its own order; one block, or the order of bilm, is as wanted.
#[test]
fn few_shards_of_many_blocks_are_warned_of() {
    let place = prepared();
    let warns = |more: &str| {
        place.train(&format!("--steps 1 --overwrite --output run {more}"), 0).err.contains("deal its sentences")
    };
    assert!(warns(""));
    assert!(!warns("--block-sentences 40"));
    assert!(!warns("--order bilm"));
    for shard in 3..10 {
        place.write(&format!("corpus/{shard}.txt"), text(shard, 40));
    }
    assert!(!warns(""));
}

/// Shards that are cut off or overwritten, before a run and while it trains: the file is named, and the run goes on when it is
/// whole again.
#[test]
fn damaged_shards_are_named_and_lose_nothing() {
    let place = prepared();
    place.write("one/a.txt", text(4, 120));
    place.exits_sql("COPY (SELECT text FROM 'one/a.txt') TO 'parquet/a.parquet'");
    place.shell("mkdir gz zst && gzip -c one/a.txt > gz/a.txt.gz && zstd -qc one/a.txt > zst/a.txt.zst");
    for (folder, file, cut) in [
        ("gz", "a.txt.gz", true),
        ("zst", "a.txt.zst", true),
        ("parquet", "a.parquet", true),
        ("parquet", "a.parquet", false),
    ] {
        let path = place.path(&format!("{folder}/{file}"));
        let (whole, modified) = (fs::read(&path).unwrap(), fs::metadata(&path).unwrap().modified().unwrap());
        let damaged = match cut {
            true => whole[..whole.len() / 2].to_vec(),
            false => [vec![0xff; whole.len() / 2], whole[whole.len() / 2..].to_vec()].concat(),
        };
        let words = format!("--shards {folder} --checkpoint-every 1000000 --output run-{folder}-{cut}");
        fs::write(&path, &damaged).unwrap();
        let refused = place.train(&format!("{words} --steps 5"), 3);
        assert!(refused.err.contains(file), "{file}: {refused:?}");
        assert!(!place.path(&format!("run-{folder}-{cut}")).exists());

        fs::write(&path, &whole).unwrap();
        File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
        let child = started(&place, &run(&format!("{words} --steps 1000000")), "train.after_step=sleep(2)");
        wait_for_lines(&place, &format!("run-{folder}-{cut}/steps.jsonl"), 7);
        fs::write(&path, &damaged).unwrap();
        // Another time than that of the whole file, whatever the clock of the disk can tell.
        File::options().write(true).open(&path).unwrap().set_modified(modified + Duration::from_secs(9)).unwrap();
        let ended = ended(child.wait_with_output().unwrap());
        assert_eq!(ended.code, Some(3), "{file}: {ended:?}");
        assert!(ended.err.contains(file) && ended.err.contains("resumes from there"), "{file}: {ended:?}");
        let steps = place.lines(&format!("run-{folder}-{cut}/steps.jsonl")).len();
        let last = place.checkpoints(&format!("run-{folder}-{cut}")).pop().unwrap();
        assert!(last.ends_with(format!("step-{steps:010}")), "{file}: {steps}");

        fs::write(&path, &whole).unwrap();
        File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
        place.train(&format!("{words} --steps {} -q", steps + 2), 0);
    }
}

/// What the run itself would refuse, and a run that would go on.
#[test]
fn a_dry_run_looks_at_the_output() {
    let place = prepared();
    place.write("model/options.json", OPTIONS);
    assert!(place.train("--steps 9 --dry-run --output model", 2).err.contains("options.json"));
    place.train("--steps 7 -q --output run", 0);
    let before = place.left("run");
    let refused = place.train("--steps 9 --rows 5 --dry-run --output run", 2);
    assert!(refused.err.contains("rows: 4 in the run, 5 now"), "{refused:?}");
    let estimate = place.train("--steps 9 --dry-run --json --output run", 0).json();
    assert_eq!((estimate["steps"].as_u64(), estimate["steps_made"].as_u64()), (Some(9), Some(7)));
    assert!(
        place.train("--steps 9 --rows 5 --dry-run --overwrite --json --output run", 0).json()["steps_made"].is_null()
    );
    place.same("run", &before, "after dry runs");
}
