//! Every error message names the fault, its place and its reason, and has help and an exit code.

use crate::place::{Place, snapshot, steady};

/// Runs commands in a folder with files for all cases.
fn shown(cases: &[&str]) -> String {
    let place = Place::new();
    place.write("broken.jsonl", "{\"text\": \"It rained.\"}\n{\"text\": \n");
    place.write("latin1.txt", b"caf\xe9\n");
    place.write("plain.txt", "It rained.\nWe stayed in.\n");
    place.write("empty-model/README", "nothing");
    place.exits("model convert tiny no-weights --to hdf5", 0);
    std::fs::remove_file(place.path("no-weights/weights.hdf5")).unwrap();
    place.exits("model convert tiny page --to hdf5", 0);
    place.write("page/weights.hdf5", "<!DOCTYPE html>\n<html><body>Please log in</body></html>");
    place.exits("embed -q --model tiny --input plain.txt --output done", 0);
    let blocks: Vec<String> = cases.iter().map(|words| place.run(words).shown(words)).collect();
    blocks.join("\n")
}

#[test]
fn usage() {
    snapshot(
        "errors-usage",
        &shown(&[
            "frobnicate",
            "embed",
            "embed --model tiny --input plain.txt --output o --level word",
            "embed --model tiny --input plain.txt --output o --layers topp",
            "embed --model tiny --input plain.txt --output o --layers 7",
            "embed --model tiny --input plain.txt --output o --batch-tokens 0",
            "embed --model tiny --input plain.txt --output o --batch-tokens 18446744073709551616",
            "embed --model tiny --input plain.txt --output o --threads 1025",
            "embed --model tiny --input plain.txt --output o --device gpu",
            "embed --model tiny --input plain.txt --output o --precision f8",
            "embed --model tiny --input plain.txt --output o --state carry",
            "embed --model tiny --input plain.txt --output o --model-dir x",
            "embed --model tiny --options a.json --weights b.hdf5 --input plain.txt --output o",
            "embed --options a.json --input plain.txt --output o",
            "embed --model tiny --input plain.txt --output done --pooling max",
            "embed --model tiny --input - plain.txt --output o",
            "model convert tiny done --to hdf5",
            "model convert tiny new --to pickle",
            "model convert tiny s3://bucket/model --to hdf5",
            "verify done --model tiny --sample -1",
            "demo --row 1000",
            "embed --quiet --verbose --model tiny --input plain.txt --output o",
        ]),
    );
}

/// The rest of the message depends on the build of libtorch.
#[test]
fn a_device_that_does_not_exist() {
    let place = Place::new();
    let ended = place.exits("embed -q --model tiny --input reviews.jsonl --output o --device cuda:9", 1);
    assert!(ended.err.starts_with("error: device cuda:9 does not exist: "), "{ended:?}");
}

#[test]
fn input() {
    snapshot(
        "errors-input",
        &shown(&[
            "embed -q --model tiny --input none.csv --output o",
            "embed -q --model tiny --input plain.txt --column review --output o",
            "embed -q --model tiny --input reviews.jsonl --column txt --output o",
            "embed -q --model tiny --input reviews.jsonl --keep id,star --output o",
            "embed -q --model tiny --input broken.jsonl --output o",
            "embed -q --model tiny --input latin1.txt --output o",
            "embed -q --model tiny --input empty-model --output o",
            "inspect none",
            "inspect plain.txt",
            "verify none --model tiny",
        ]),
    );
}

#[test]
fn model() {
    snapshot(
        "errors-model",
        &shown(&[
            "embed -q --model none --input plain.txt --output o",
            "embed -q --model plain.txt --input plain.txt --output o",
            "embed -q --model empty-model --input plain.txt --output o",
            "embed -q --model no-weights --input plain.txt --output o",
            "embed -q --model page --input plain.txt --output o",
            "embed -q --options page/options.json --weights page/weights.hdf5 --input plain.txt --output o",
            "model info none",
            "model verify page",
            "model verify tiny --fingerprint 0123456789abcdef",
            "model info --offline s3://bucket/elmo",
        ]),
    );
}

#[test]
fn storage() {
    snapshot(
        "errors-storage",
        &shown(&[
            "embed -q --model tiny --input plain.txt --output plain.txt/o",
            "embed -q --model tiny --input plain.txt --output /proc/elmo",
            "model convert tiny plain.txt/o --to hdf5",
            "demo -q --output plain.txt/o",
        ]),
    );
}

#[test]
fn rejected() {
    let shown = shown(&[
        "embed -q --model tiny --input latin1.txt plain.txt --output kept --on-error null",
        "embed -q --model tiny --input latin1.txt plain.txt --output left --on-error skip",
    ]);
    snapshot("errors-rejected", &steady(&shown));
}

#[test]
fn interrupted() {
    let place = Place::new();
    let words = "embed -q --model tiny --input a.txt --output out --rows-per-file 200 --window-rows 100 --threads 1";
    let ended = place.interrupted(words);
    assert_eq!(ended.code, Some(130), "{ended:?}");
    let (_, after) = ended.err.split_once("interrupted after ").unwrap();
    let (rows, _) = after.split_once(' ').unwrap();
    assert!((1..6000).contains(&rows.parse().unwrap()), "{ended:?}");
    let shown = ended.shown(words).replace(env!("CARGO_BIN_EXE_elmo"), "elmo");
    snapshot("errors-interrupted", &shown.replace(&format!("after {rows} rows"), "after [ROWS] rows"));
}
