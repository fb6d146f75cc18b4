//! `elmo train --upload`: machines that are lost, stores that fail, and copies of other runs.

use std::fs;

use super::{prepared, run};
use crate::place::Place;

impl Place {
    /// Names of the copies in a folder, ascending, and whether they are complete.
    fn copies(&self, folder: &str) -> Vec<(String, bool)> {
        let entries = fs::read_dir(self.path(folder)).into_iter().flatten().flatten();
        let copy =
            |entry: fs::DirEntry| (entry.file_name().into_string().unwrap(), entry.path().join("upload.json").exists());
        let mut copies: Vec<_> = entries.map(copy).collect();
        copies.sort();
        copies
    }
}

/// The disk is lost with the process, also in the middle of a copy: the same command resumes from the newest copy that is
/// complete, and the run has the bits of one that was not interrupted, with its journals and the model of its best measurement.
#[test]
fn a_lost_machine_changes_nothing() {
    let place = prepared();
    let words = "--steps 50 --valid valid.txt --eval-every 10";
    place.train(&format!("{words} -q --output whole"), 0);
    let expected = place.left("whole");
    // A copy has at least six files.
    for (number, (point, passes)) in
        [("train.after_step", 0), ("train.in_upload", 3), ("train.in_upload", 17), ("train.after_step", 40)]
            .into_iter()
            .enumerate()
    {
        let command = format!("{words} --output run-{number} --upload copies-{number}");
        let points = format!("{point}={passes}*off->return");
        let killed = place.run_with(&run(&command), &[("FAILPOINTS", &points)]);
        assert_eq!(killed.code, None, "{point}: {killed:?}");
        fs::remove_dir_all(place.path(&format!("run-{number}"))).unwrap();
        let copies = place.copies(&format!("copies-{number}"));
        let last = copies.iter().rev().find(|(_, is_complete)| *is_complete).map(|(name, _)| name.clone());
        let resumed = place.train(&command, 0);
        let says = resumed.err.contains("resuming from");
        assert_eq!(says, last.is_some(), "{point}, {last:?}: {resumed:?}");
        place.same(&format!("run-{number}"), &expected, point);
        let copies = place.copies(&format!("copies-{number}"));
        assert_eq!(copies.last(), Some(&("step-0000000050".to_owned(), true)), "{copies:?}");
        assert!(copies.len() <= 2 && copies.iter().all(|(_, is_complete)| *is_complete), "{copies:?}");
    }
    // A run that is complete is fetched as well.
    fs::remove_dir_all(place.path("run-0")).unwrap();
    let report = place.train(&format!("{words} --output run-0 --upload copies-0 --json -q"), 0).json();
    assert_eq!((report["steps"].as_u64(), report["upload"]["step"].as_u64()), (Some(50), Some(50)));
    place.same("run-0", &expected, "fetched at the end");
    // Whoever has an older checkpoint on the disk resumes from the newer copy.
    let part = words.replace("50", "20");
    place.train(&format!("{part} -q --output old --upload copies-old"), 0);
    fs::rename(place.path("old"), place.path("older")).unwrap();
    place.train(&format!("{words} -q --output old --upload copies-old"), 0);
    fs::remove_dir_all(place.path("old")).unwrap();
    fs::rename(place.path("older"), place.path("old")).unwrap();
    place.train(&format!("{words} -q --output old --upload copies-old"), 0);
    place.same("old", &expected, "from an older disk");
}

#[test]
fn copies_of_another_run_are_refused_and_those_of_an_earlier_one_removed() {
    let place = prepared();
    place.train("--steps 14 -q --output run --upload copies", 0);
    let refused = place.train("--steps 14 --dropout 0.2 --output other --upload copies", 2);
    for part in ["copies holds a run with other settings", "dropout: 0.1 in the run, 0.2 now"] {
        assert!(refused.err.contains(part), "{refused:?}");
    }
    assert!(!place.path("other").exists());
    let trial = place.train("--steps 20 --output other --upload copies --dry-run --json -q", 0).json();
    assert_eq!(trial["steps_made"], 14);
    assert!(!place.path("other").exists());
    place.train("--steps 3 -q --output other --upload copies --overwrite", 0);
    assert_eq!(place.copies("copies"), [("step-0000000003".to_owned(), true)]);
    for (upload, part) in [("https://example.org/copies", "web server"), ("run/copies", "in the folder of the run")] {
        let refused = place.train(&format!("--steps 20 --output run --upload {upload}"), 2);
        assert!(refused.err.contains(part), "{refused:?}");
    }
    // A copy that was damaged is named, and the one before is used when it is removed.
    place.train("--steps 14 -q --output new --upload new-copies", 0);
    let last = place.copies("new-copies").pop().unwrap().0;
    place.write(&format!("new-copies/{last}/tensors.safetensors"), "x");
    fs::remove_dir_all(place.path("new")).unwrap();
    let damaged = place.train("--steps 14 --output new --upload new-copies", 5);
    assert!(damaged.err.contains(&format!("{last}: damaged: tensors.safetensors")), "{damaged:?}");
    fs::remove_dir_all(place.path("new-copies").join(&last)).unwrap();
    place.train("--steps 14 -q --output new --upload new-copies", 0);
}

/// The text of a run that resumes would have the copies in it.
#[test]
fn copies_are_not_read_as_text() {
    let place = prepared();
    for (words, upload) in [
        ("", "corpus"),
        ("", "corpus/copies"),
        ("--dry-run", "./corpus/copies"),
        ("--shards corpus/**/*.txt", "corpus/copies"),
        ("--valid copies/*/*.jsonl", "copies"),
    ] {
        let refused = place.train(&format!("--steps 7 --output run --upload {upload} {words}"), 2);
        assert!(refused.err.contains("would read the copies as text"), "{words} {upload}: {refused:?}");
        assert!(!place.path("run").exists() && !place.path("copies").exists());
    }
    // This pattern takes no file of a folder below.
    for steps in [7, 9] {
        place.train(&format!("--shards corpus/*.txt --steps {steps} -q --output run --upload corpus/copies"), 0);
    }
}

/// The folder of the copies cannot be made: there is a file of its name. Before a run has a checkpoint, that is an error.
#[test]
fn a_store_that_fails_does_not_end_a_run() {
    let place = prepared();
    place.train("--steps 20 -q --output whole", 0);
    place.write("away", "");
    let command = "--steps 20 --output run --upload away/copies --json";
    for more in ["", "--dry-run", "--overwrite"] {
        let refused = place.train(&format!("{command} {more}"), 2);
        assert!(refused.err.contains("away is a file"), "{more}: {refused:?}");
        assert!(!place.path("run").exists(), "{more}");
    }
    place.train("--steps 7 -q --output run", 0);
    let ended = place.train(command, 5);
    assert!(ended.err.contains("checkpoints will not be copied until this is corrected"), "{ended:?}");
    assert!(ended.err.contains("the checkpoint of step 7 was not copied"), "{ended:?}");
    assert!(ended.err.contains("the last checkpoint of the run was not copied to"), "{ended:?}");
    assert_eq!((ended.json()["steps"].as_u64(), ended.json()["upload"]["step"].as_u64()), (Some(20), None));
    place.same("run", &place.left("whole"), "a store that fails");
    fs::remove_file(place.path("away")).unwrap();
    let again = place.train(command, 0).json();
    assert_eq!(again["upload"]["step"], 20);
    assert_eq!(place.copies("away/copies"), [("step-0000000020".to_owned(), true)]);
}
