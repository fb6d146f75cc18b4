//! Which job may continue an output: the same settings and the same rows, whatever the files' times and places are.

use std::{
    fs::{self, File},
    path::Path,
    time::{Duration, SystemTime},
};

use elmo::{EmbedSpec, spec::OnError};
use elmo_pipelines::{
    Exit,
    bulk::{BulkJob, dry_run::dry_run, manifest::ManifestError},
    source::Keep,
    stores::Stores,
};
use serde_json::Value;

use crate::common::{Hashing, Place, lines, names, part, parts, plain, run, run_local};

fn stores() -> Stores {
    Stores::with_settings([])
}

fn hashing(on_error: OnError) -> Hashing {
    Hashing { spec: EmbedSpec { on_error, ..EmbedSpec::default() }, ..Hashing::default() }
}

/// 45 lines of which line 25 is not UTF-8, without the text in the output.
fn job_with_a_bad_row(place: &Place, output: &str) -> BulkJob {
    let mut text = lines(45).into_bytes();
    let start = lines(25).len();
    text[start] = 0xff;
    place.write("bad.txt", text);
    BulkJob { keep: Keep::None, ..place.job("bad.txt", output) }
}

async fn embed(job: &BulkJob, on_error: OnError) -> elmo_pipelines::Result<elmo_pipelines::bulk::BulkReport> {
    run(job, &hashing(on_error), &stores()).await
}

/// The advice that the error gives: `--on-error null keeps such rows without a vector, --on-error skip leaves them out`.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_failed_on_a_row_is_continued_with_another_on_error() {
    let place = Place::new();
    for on_error in [OnError::Null, OnError::Skip] {
        let (calm, output) = (format!("calm-{on_error}"), format!("failed-{on_error}"));
        embed(&job_with_a_bad_row(&place, &calm), on_error).await.unwrap();
        let job = job_with_a_bad_row(&place, &output);
        let error = embed(&job, OnError::Fail).await.unwrap_err();
        assert!(error.to_string().contains("bad.txt, row 25"), "{error}");
        assert_eq!(parts(&place.path(&output)).len(), 2);
        let report = embed(&job, on_error).await.unwrap();
        assert_eq!((report.resumed_rows, report.counts.rows_in, report.counts.errors), (20, 45, 1));
        assert!(parts(&place.path(&output)) == parts(&place.path(&calm)), "same names, same bytes");
        // The row is decided about now: another answer is another output.
        let refused = embed(&job, OnError::Fail).await.unwrap_err();
        assert_eq!(refused.exit(), Exit::Usage);
        assert!(refused.to_string().contains(&format!("on-error: was {on_error}, now fail")), "{refused}");
        embed(&job, on_error).await.unwrap();
    }
}

/// Makes an output look as version 0.1.0 of the program left it: manifest format 1.
fn as_format_1(output: &Path, version: &str) {
    let edit = |path: &Path, change: &dyn Fn(&mut serde_json::Map<String, Value>)| {
        let mut value: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        change(value.as_object_mut().unwrap());
        fs::write(path, serde_json::to_vec_pretty(&value).unwrap()).unwrap();
    };
    edit(&output.join("_elmo/job.json"), &|job| {
        job.remove("format").unwrap();
        job["settings"]["elmo.version"] = version.into();
    });
    for name in parts(output).into_keys() {
        fs::rename(output.join(&name), output.join(plain(&name))).unwrap();
        let entry = plain(&name).replace(".parquet", ".json");
        edit(&output.join("_elmo").join(entry), &|entry| {
            entry["file"] = plain(&name).into();
            entry.remove("rows_digest").unwrap();
        });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_output_of_another_version_and_of_format_1_is_resumed() {
    let place = Place::new();
    place.write("a.txt", lines(45));
    let job = place.job("a.txt", "out");
    run_local(&job).await.unwrap();
    as_format_1(&place.path("out"), "0.0.1");
    let calm = parts(&place.path("out"));
    assert!(calm.contains_key("part-00004.parquet"), "{:?}", calm.keys());
    let stage = Hashing::default();
    run(&job, &stage, &stores()).await.unwrap();
    assert_eq!(stage.rows.into_inner(), 0, "nothing was left to do");
    // What is left of it is written with the names that it began with.
    for lost in ["_elmo/done.json", "_elmo/part-00004.json", "part-00004.parquet", "part-00001.parquet"] {
        fs::remove_file(place.path("out").join(lost)).unwrap();
    }
    let stage = Hashing::default();
    let report = run(&job, &stage, &stores()).await.unwrap();
    assert_eq!((stage.rows.into_inner(), report.counts.rows_in), (15, 45));
    assert!(parts(&place.path("out")) == calm);
    let other = BulkJob { rows_per_file: Some(5), ..job.clone() };
    assert!(run_local(&other).await.unwrap_err().to_string().contains("rows-per-file: was 10, now 5"));
    run_local(&BulkJob { overwrite: true, ..other }).await.unwrap();
    assert_eq!(parts(&place.path("out")).len(), 9, "the parts of format 1 are gone");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_format_is_refused() {
    let place = Place::new();
    place.write("a.txt", lines(5));
    run_local(&place.job("a.txt", "out")).await.unwrap();
    let path = place.path("out/_elmo/job.json");
    let newer = fs::read_to_string(&path).unwrap().replace("\"format\": 2", "\"format\": 3");
    fs::write(&path, newer).unwrap();
    let error = run_local(&place.job("a.txt", "out")).await.unwrap_err();
    assert!(error.to_string().contains("format: 3"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn names_of_parts_follow_from_the_settings() {
    let place = Place::new();
    place.write("a.txt", lines(5));
    place.write("b.txt", lines(7));
    let name = async |job: BulkJob| {
        run_local(&job).await.unwrap();
        names(Path::new(&job.output)).pop().unwrap()
    };
    let first = name(place.job("a.txt", "first")).await;
    assert_eq!(plain(&first), "part-00000.parquet");
    assert_eq!(first.len(), "part-00000-1a2b3c4d.parquet".len());
    assert_eq!(name(place.job("b.txt", "second")).await, first, "the same settings give the same names");
    let groups = BulkJob { row_group_bytes: 1 << 20, ..place.job("a.txt", "groups") };
    let column = BulkJob { keep: Keep::None, ..place.job("a.txt", "column") };
    assert!(name(groups).await != first && name(column).await != first);
}

/// As when a job that lost its lock publishes late, or a user copies a file.
#[tokio::test(flavor = "multi_thread")]
async fn parts_that_no_manifest_names_end_a_job_with_an_error() {
    let place = Place::new();
    place.write("a.txt", lines(45));
    let job = place.job("a.txt", "out");
    run_local(&job).await.unwrap();
    let calm = parts(&place.path("out"));
    for stray in ["part-00001-00c0ffee.parquet", "part-00001.parquet", "part-00007.csv", "more.parquet"] {
        // Both before the job finishes and after it.
        for lost in ["done.json", "no such file"] {
            let _ = fs::remove_file(place.path("out/_elmo").join(lost));
            place.write(&format!("out/{stray}"), "of another job");
            let error = run_local(&job).await.unwrap_err();
            assert!(matches!(error.module(), Some(ManifestError::Unlisted { .. })), "{error}");
            assert!(error.to_string().contains(stray), "{error}");
            assert!(error.help().unwrap().contains("delete these files"));
            fs::remove_file(place.path("out").join(stray)).unwrap();
            run_local(&job).await.unwrap();
        }
    }
    assert!(parts(&place.path("out")) == calm);
}

/// Gives a file another time.
fn touch(path: &Path) {
    let later = SystemTime::now() + Duration::from_secs(3600);
    File::options().write(true).open(path).unwrap().set_modified(later).unwrap();
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        match entry.path().is_dir() {
            true => copy(&entry.path(), &to.join(entry.file_name())),
            false => drop(fs::copy(entry.path(), to.join(entry.file_name())).unwrap()),
        }
    }
}

/// Loses the last part of an output, so that there is something left to do.
fn lose_the_last_part(output: &Path, number: usize) {
    fs::remove_file(part(output, number)).unwrap();
    fs::remove_file(output.join(format!("_elmo/part-{number:05}.json"))).unwrap();
    fs::remove_file(output.join("_elmo/done.json")).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn inputs_that_were_copied_or_moved_are_recognised_by_their_rows() {
    let place = Place::new();
    let csv = |from: usize, to: usize| -> String {
        (from..to).map(|i| format!("{i},Line {i} says something of its own.\n")).collect()
    };
    place.write("first/in/a.csv", format!("id,text\n{}", csv(0, 25)));
    place.write("first/in/b.csv", format!("id,text\n{}", csv(25, 45)));
    run_local(&place.job("first/in", "first/out")).await.unwrap();
    let calm = parts(&place.path("first/out"));
    assert_eq!(calm.len(), 5);
    // Copied byte for byte: another inode, another time.
    touch(&place.path("first/in/a.csv"));
    let stage = Hashing::default();
    run(&place.job("first/in", "first/out"), &stage, &stores()).await.unwrap();
    assert_eq!(stage.rows.into_inner(), 0);
    // Moved together with its output; the parts that are left are written.
    copy(&place.path("first"), &place.path("second"));
    lose_the_last_part(&place.path("second/out"), 4);
    let job = place.job("second/in", "second/out");
    let dry = dry_run(&job, &Hashing::default(), &stores()).await.unwrap();
    assert_eq!(serde_json::to_value(dry.output).unwrap(), serde_json::json!({"state": "begun", "rows": 40}));
    let stage = Hashing::default();
    let report = run(&job, &stage, &stores()).await.unwrap();
    assert_eq!((stage.rows.into_inner(), report.resumed_rows), (5, 40));
    assert!(parts(&place.path("second/out")) == calm);
    // From now on it is known by its new place: nothing is read again, not even to compare it.
    let recorded = fs::read_to_string(place.path("second/out/_elmo/job.json")).unwrap();
    assert!(recorded.contains("second/in/a.csv") && !recorded.contains("first/in"), "{recorded}");
    // A row that was read is another one, in as many bytes: in the text, and in a kept column.
    for (from, to) in [("Line 3 says", "Line 3 said"), ("\n3,Line", "\n9,Line")] {
        copy(&place.path("first"), &place.path("third"));
        lose_the_last_part(&place.path("third/out"), 4);
        place.write("third/in/a.csv", format!("id,text\n{}", csv(0, 25)).replace(from, to));
        for job in [place.job("third/in", "third/out"), BulkJob { check: true, ..place.job("third/in", "third/out") }] {
            let error = run_local(&job).await.unwrap_err();
            assert_eq!(error.exit(), Exit::Usage);
            assert!(error.to_string().contains("third/in/a.csv: changed since"), "{error}");
            let dry = dry_run(&job, &Hashing::default(), &stores()).await.unwrap_err();
            assert_eq!(dry.to_string(), error.to_string());
        }
        assert_eq!(parts(&place.path("third/out")).len(), 4);
    }
    // Rows that were not read yet may be others.
    copy(&place.path("first"), &place.path("fourth"));
    lose_the_last_part(&place.path("fourth/out"), 4);
    place.write("fourth/in/b.csv", format!("id,text\n{}", csv(25, 45)).replace("Line 42 says", "Line 42 said"));
    run_local(&place.job("fourth/in", "fourth/out")).await.unwrap();
    let found = parts(&place.path("fourth/out"));
    let same = found.iter().zip(&calm).filter(|(a, b)| a == b).count();
    assert_eq!((found.len(), same), (5, 4));
}

/// Format 1 has no digests, so changed inputs are rejected.
#[tokio::test(flavor = "multi_thread")]
async fn an_input_of_format_1_that_changed_is_refused() {
    let place = Place::new();
    place.write("a.txt", lines(45));
    run_local(&place.job("a.txt", "out")).await.unwrap();
    as_format_1(&place.path("out"), "0.1.0");
    touch(&place.path("a.txt"));
    let error = run_local(&place.job("a.txt", "out")).await.unwrap_err();
    assert!(error.to_string().contains("a.txt: changed since"), "{error}");
}
