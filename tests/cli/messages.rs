//! Messages on stderr: their format, their verbosity, and that they contain no secrets.

use crate::place::Place;

const EMBED: &str = "embed --model tiny --input plain.txt --output out";

fn place() -> Place {
    let place = Place::new();
    place.write("plain.txt", "It rained.\n");
    place
}

#[test]
fn quiet_is_silent_and_the_untrained_model_says_so() {
    let place = place();
    let ended = place.exits(EMBED, 0);
    assert!(ended.err.contains("untrained"), "{ended:?}");
    assert_eq!(place.exits(&format!("-q {EMBED}"), 0).err, "");
    assert_eq!(place.exits(&format!("{EMBED} --quiet"), 0).err, "");
}

#[test]
fn json_lines_for_collectors() {
    let place = place();
    place.write("broken.jsonl", "{");
    for (words, code) in [(EMBED, 0), ("embed --model tiny --input broken.jsonl --output o", 3)] {
        let ended = place.exits(&format!("{words} -vv --log-format json"), code);
        let lines: Vec<serde_json::Value> = ended.err.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        if code == 0 {
            assert!(lines.iter().any(|line| line["level"] == "WARN"), "{ended:?}");
        } else {
            let last = lines.last().unwrap();
            assert_eq!((&last["level"], &last["code"]), (&"ERROR".into(), &code.into()), "{last}");
        }
    }
}

#[test]
fn the_resume_command_is_a_json_message_too() {
    let place = place();
    for flag in ["", "-q"] {
        let words = "embed --model tiny --input a.txt --output out --rows-per-file 200 --window-rows 100 --threads 1";
        let ended = place.interrupted(&format!("{words} --overwrite {flag} --log-format json"));
        assert_eq!(ended.code, Some(130), "{ended:?}");
        let lines: Vec<serde_json::Value> = ended.err.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let note = lines.iter().find(|line| line["message"].as_str().unwrap().starts_with("to resume: "));
        assert!(note.is_some(), "{ended:?}");
        assert!(lines.iter().all(|line| line["timestamp"].is_string() && line["level"].is_string()), "{ended:?}");
        std::fs::remove_dir_all(place.path("out")).unwrap();
    }
}

#[test]
fn no_text_of_a_user_is_logged() {
    let place = Place::new();
    place.write("plain.txt", "Xylophone quartets rehearse.\n");
    let ended = place.exits(&format!("{EMBED} -v"), 0);
    assert!(!ended.err.contains("Xylophone"), "{ended:?}");
}

#[test]
fn no_secret_is_printed() {
    let place = place();
    for words in [
        "embed --model https://me:hunter2@127.0.0.1:1/model --input plain.txt --output out",
        "embed --model tiny --input s3://key:hunter2@bucket/a.txt --output out",
        "embed --model tiny --input plain.txt --output s3://key:hunter2@bucket/out -vv",
        // Nothing listens on port 1: after its retries, the store names the URL.
        "embed --model tiny --input https://127.0.0.1:1/a.txt?X-Amz-Signature=hunter2 --output out -vv",
        "embed --model tiny --input http://me:hun/ter2@127.0.0.1:1/a.txt --output out",
        "model info http://127.0.0.1:1/model?token=hunter2 --log-format json",
        "model info ftp://me:hunter2@host/model --log-format json",
        "inspect s3://key:hunter2@bucket/out",
        "verify az://key:hunter2@bucket/out --model tiny",
    ] {
        let ended = place.run(words);
        assert_ne!(ended.code, Some(0), "{words}");
        let said = format!("{}{}", ended.out, ended.err);
        assert!(!said.contains("hunter2") && !said.contains("ter2@"), "{words}: {said}");
    }
}

/// Errors of clap contain the invalid value.
#[test]
fn no_secret_of_a_wrong_argument_is_printed() {
    const EMBED: &str = "embed --model tiny --input plain.txt --output out";
    let place = place();
    let checked = |ended: crate::place::Ended, words: &str| {
        assert_eq!(ended.code, Some(2), "{words}: {ended:?}");
        assert!(!ended.out.contains("hunter2") && !ended.err.contains("hunter2"), "{words}: {ended:?}");
        assert!(ended.err.starts_with("error: "), "{words}: {ended:?}");
    };
    for words in [
        "https://me:hunter2@host/model",
        "inspect out https://me:hunter2@host/model",
        &format!("{EMBED} --threads https://me:hunter2@host/model"),
        &format!("{EMBED} --level s3://key:hunter2@bucket/x"),
        &format!("{EMBED} --layers https://host/x?sig=hunter2"),
        &format!("{EMBED} --device az://account:hunter2@container/x"),
        "sql --add-model https://me:hunter2@host/model",
    ] {
        let ended = place.run(words);
        assert!(ended.err.contains("***"), "the argument itself is still named: {ended:?}");
        checked(ended, words);
    }
    for name in ["ELMO_THREADS", "ELMO_LEVEL"] {
        let ended = place.run_with(EMBED, &[(name, "https://me:hunter2@host/x")]);
        assert!(
            ended.err.contains(&format!("note: the value comes from the environment variable {name}")),
            "{ended:?}"
        );
        checked(ended, name);
    }
    for file in ["[embed]\nlevel = 'https://me:hunter2@host/x'", "threads = 'https://host/x?sig=hunter2'"] {
        place.write("elmo.toml", file);
        let ended = place.run(EMBED);
        assert!(ended.err.contains("note: the value comes from elmo.toml"), "{ended:?}");
        checked(ended, file);
    }
    for file in ["model = https://me:hunter2@host/x", "model = ['s3://key:hunter2@bucket/x']", "password = hunter2"] {
        place.write("elmo.toml", file);
        checked(place.run(EMBED), file);
    }
}

#[test]
fn json_stays_valid_when_secrets_are_redacted() {
    let place = place();
    for (folder, shown) in [("my_password=", "my_password="), ("password: \"hunter2", "password: \"***")] {
        let words = ["embed", "--model", "tiny", "--input", "plain.txt", "--json", "-vv", "--log-format=json", "-o"];
        let output = place.elmo().args(words).arg(folder).output().unwrap();
        let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        assert!(!out.contains("hunter2") && !err.contains("hunter2"), "{out}{err}");
        let report: serde_json::Value = serde_json::from_str(&out).unwrap();
        assert!(report["output"].as_str().unwrap().ends_with(shown), "{out}");
        for line in err.lines() {
            assert!(serde_json::from_str::<serde_json::Value>(line).is_ok(), "{line}");
        }
    }
}

#[test]
fn a_full_or_closed_stderr_does_not_end_a_job() {
    let place = place();
    for (words, code) in [(EMBED, 0), ("inspect none", 3), ("frobnicate", 2), ("--log-format json inspect none", 3)] {
        let ended = place.shell(&format!("elmo {words} 2> /dev/full"));
        assert_eq!(ended.code, Some(code), "{words}: {ended:?}");
    }
    let ended = place.shell(&format!("ELMO_POOLING=middle elmo {EMBED} 2> /dev/full"));
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert_eq!(place.shell(&format!("elmo {EMBED} --overwrite 2>&-")).code, Some(0));
}

#[test]
fn no_colours_unless_there_is_a_terminal() {
    let place = place();
    for words in ["embed --help", "frobnicate", "inspect none", EMBED] {
        let ended = place.run(words);
        assert!(!ended.out.contains('\x1b') && !ended.err.contains('\x1b'), "{words}: {ended:?}");
    }
}
