//! A resumed job keeps durable parts, and writes the others with the same bytes.

use std::{
    fs,
    time::{Duration, Instant},
};

use elmo::{
    EmbedSpec,
    spec::{OnLong, SentenceMode, StateMode},
};
use elmo_pipelines::{
    Error, Exit,
    bulk::manifest,
    bulk::{self, BulkJob},
    report::{Progress, Silent, Snapshot},
    stage::{Pending, Stage},
    stores::Stores,
};
use tokio::sync::Notify;

use crate::common::{Hashing, Place, lines, names, part, parts, plain, run, run_local, strings, tiny};

/// Asks the job to stop once it has seen so many rows.
#[derive(Debug)]
pub(crate) struct StopAfter {
    rows: u64,
    pub(crate) stop: Notify,
}

impl StopAfter {
    pub(crate) fn new(rows: u64) -> Self {
        Self { rows, stop: Notify::new() }
    }
}

impl Progress for StopAfter {
    fn update(&self, seen: &Snapshot) {
        if seen.rows >= self.rows {
            self.stop.notify_one();
        }
    }

    fn finish(&self) {}
}

fn stores() -> Stores {
    Stores::with_settings([])
}

#[tokio::test(flavor = "multi_thread")]
async fn neither_windows_nor_interruptions_show_in_the_bytes() {
    let place = Place::new();
    let uneven: String = (0..230).map(|i| format!("{} end {i}.\n", "many words ".repeat(i * 7 % 23))).collect();
    place.write("a.txt", uneven);
    let stage = tiny(EmbedSpec::default());
    let job =
        |output: &str, window_rows| BulkJob { rows_per_file: Some(60), window_rows, ..place.job("a.txt", output) };
    run(&job("calm", 1000), stage.as_ref(), &stores()).await.unwrap();
    let calm = parts(&place.path("calm"));
    assert_eq!(calm.len(), 4);
    for window_rows in [1, 7, 64] {
        let output = format!("windows-{window_rows}");
        run(&job(&output, window_rows), stage.as_ref(), &stores()).await.unwrap();
        assert!(parts(&place.path(&output)) == calm, "windows of {window_rows} rows");
    }
    let mut interruptions = 0;
    for rows in [10, 70, 130, 200] {
        let progress = StopAfter::new(rows);
        // Another window each time: flags for memory may change between runs.
        let job = job("stopped", rows as usize);
        match bulk::run(&job, stage.as_ref(), &stores(), progress.stop.notified(), &progress).await {
            Err(Error::Interrupted { .. }) => interruptions += 1,
            done => drop(done.unwrap()),
        }
    }
    assert!(interruptions > 1);
    run(&job("stopped", 64), stage.as_ref(), &stores()).await.unwrap();
    assert!(parts(&place.path("stopped")) == calm);
}

#[tokio::test(flavor = "multi_thread")]
async fn carried_state_survives_an_interruption() {
    let place = Place::new();
    place.write("a.txt", lines(50));
    let spec = || EmbedSpec {
        state: StateMode::Carry,
        batch_rows: Some(4),
        sentences: SentenceMode::Off,
        on_long: OnLong::Truncate,
        ..EmbedSpec::default()
    };
    // 10 rows are not a whole number of batches of 4, so parts have 12.
    let job = |output: &str| place.job("a.txt", output);
    run(&job("calm"), tiny(spec()).as_ref(), &stores()).await.unwrap();
    let calm = parts(&place.path("calm"));
    assert_eq!(calm.len(), 5);
    let progress = StopAfter::new(30);
    let stop = progress.stop.notified();
    let stopped = bulk::run(&job("stopped"), tiny(spec()).as_ref(), &stores(), stop, &progress).await;
    assert!(matches!(stopped, Err(Error::Interrupted { .. })));
    let report = run(&job("stopped"), tiny(spec()).as_ref(), &stores()).await.unwrap();
    assert!(report.resumed_rows > 0, "nothing was durable");
    assert!(parts(&place.path("stopped")) == calm);
    let whole = BulkJob { rows_per_file: Some(1000), ..job("whole") };
    run(&whole, tiny(spec()).as_ref(), &stores()).await.unwrap();
    assert_eq!(place.rows("whole"), place.rows("calm"), "the size of parts must not show in the vectors");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hanging_device_does_not_hold_up_an_interruption() {
    let place = Place::new();
    place.write("a.txt", lines(30));
    let stuck = Hashing { stuck: true, ..Hashing::default() };
    let began = Instant::now();
    let shutdown = tokio::time::sleep(Duration::from_millis(50));
    let error = bulk::run(&place.job("a.txt", "out"), &stuck, &stores(), shutdown, &Silent).await.unwrap_err();
    assert_eq!(error.exit(), Exit::Interrupted);
    // Not a measurement: without the shutdown it would never end.
    assert!(began.elapsed() < Duration::from_secs(60));
    assert_eq!(names(&place.path("out")), ["_elmo"]);
}

/// A stage of which a test sees each window, with the rows before it, and may give another answer.
pub(crate) struct Watched<F>(pub(crate) Hashing, pub(crate) F);

#[async_trait::async_trait]
impl<F: Fn(usize, Pending) -> Pending + Send + Sync> Stage for Watched<F> {
    fn spec(&self) -> &EmbedSpec {
        self.0.spec()
    }

    fn fields(&self) -> Vec<arrow::datatypes::Field> {
        self.0.fields()
    }

    fn metadata(&self) -> Vec<(String, String)> {
        self.0.metadata()
    }

    async fn submit(&self, texts: &arrow::array::ArrayRef) -> elmo::Result<Pending> {
        let before = self.0.rows.load(std::sync::atomic::Ordering::SeqCst);
        let pending = self.0.submit(texts).await?;
        Ok(self.1(before, pending))
    }
}

/// A stage whose second window fails after a delay.
fn second_fails() -> impl Stage {
    Watched(Hashing::default(), |before: usize, pending: Pending| -> Pending {
        match before {
            4 => Box::pin(async {
                tokio::time::sleep(Duration::from_millis(100)).await;
                Err(elmo::Error::Row { row: 0, reason: "broken".into() })
            }),
            _ => pending,
        }
    })
}

/// A stage that does something once, while both windows of the first part are under way.
fn meddling(meddle: impl Fn() + Send + Sync) -> impl Stage {
    Watched(Hashing::default(), move |before: usize, pending: Pending| {
        if before == 4 {
            meddle();
        }
        pending
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_fails_after_a_job_was_stopped_is_met_again() {
    let place = Place::new();
    place.write("a.txt", lines(30));
    let job = place.job("a.txt", "out");
    let progress = StopAfter::new(1);
    let stop = progress.stop.notified();
    let error = bulk::run(&job, &second_fails(), &stores(), stop, &progress).await.unwrap_err();
    // The window before the one that failed, and none after it.
    let Error::Interrupted { rows: 4, again: true, .. } = error else { panic!("{error}") };
    let error = run(&job, &second_fails(), &stores()).await.unwrap_err();
    assert!(error.to_string().contains("a.txt, row 8"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_computed_before_an_interruption_is_not_computed_again() {
    let place = Place::new();
    place.write("a.txt", lines(200));
    let job = |output: &str| BulkJob { rows_per_file: Some(150), ..place.job("a.txt", output) };
    run_local(&job("calm")).await.unwrap();
    let calm = parts(&place.path("calm"));
    let partial = |output: &str| place.path(output).join("_elmo/partial.arrows");
    for damaged in ["not", "cut", "flipped"] {
        let output = format!("damaged-{damaged}");
        let (progress, stage) = (StopAfter::new(50), Hashing::default());
        let stop = progress.stop.notified();
        let error = bulk::run(&job(&output), &stage, &stores(), stop, &progress).await.unwrap_err();
        let Error::Interrupted { rows, again: true, .. } = error else { panic!("{error}") };
        assert!((50..150).contains(&rows), "{rows} rows are safe");
        assert_eq!(names(&place.path(&output)), ["_elmo"]);
        let mut bytes = fs::read(partial(&output)).unwrap();
        let middle = bytes.len() / 2;
        match damaged {
            "cut" => bytes.truncate(middle),
            "flipped" => bytes[middle] ^= 1,
            _ => {}
        }
        fs::write(partial(&output), bytes).unwrap();
        let again = Hashing::default();
        run(&job(&output), &again, &stores()).await.unwrap();
        let computed = again.rows.into_inner() as u64;
        assert_eq!(computed, if damaged == "not" { 200 - rows } else { 200 });
        assert!(parts(&place.path(&output)) == calm);
        assert!(!partial(&output).exists());
    }
}

/// A job that lost its lease may save its rows late, in the output of a successor.
#[tokio::test(flavor = "multi_thread")]
async fn the_saved_rows_of_another_job_are_not_used() {
    let place = Place::new();
    place.write("a.txt", lines(200));
    let job = |output: &str| BulkJob { rows_per_file: Some(150), ..place.job("a.txt", output) };
    let other = BulkJob { row_group_bytes: 1 << 20, ..job("other") };
    let progress = StopAfter::new(50);
    let stop = progress.stop.notified();
    bulk::run(&other, &Hashing::default(), &stores(), stop, &progress).await.unwrap_err();
    // An output that was begun, without a part.
    run_local(&job("out")).await.unwrap();
    let calm = parts(&place.path("out"));
    for name in calm.keys() {
        fs::remove_file(place.path("out").join(name)).unwrap();
    }
    for name in ["part-00000.json", "part-00001.json", "done.json"] {
        fs::remove_file(place.path("out/_elmo").join(name)).unwrap();
    }
    fs::copy(place.path("other/_elmo/partial.arrows"), place.path("out/_elmo/partial.arrows")).unwrap();
    let stage = Hashing::default();
    run(&job("out"), &stage, &stores()).await.unwrap();
    assert_eq!(stage.rows.into_inner(), 200);
    assert!(parts(&place.path("out")) == calm);
    assert!(!place.path("out/_elmo/partial.arrows").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_parts_are_written_again() {
    let place = Place::new();
    place.write("a.txt", lines(45));
    run_local(&place.job("a.txt", "out")).await.unwrap();
    let calm = parts(&place.path("out"));
    fs::remove_file(part(&place.path("out"), 1)).unwrap();
    fs::write(part(&place.path("out"), 3), "cut").unwrap();
    run_local(&place.job("a.txt", "out")).await.unwrap();
    assert!(parts(&place.path("out")) == calm);
    // An entry that does not have the part's digest is replaced together with the part.
    let entry = place.path("out/_elmo/part-00002.json");
    let right = fs::read_to_string(&entry).unwrap();
    fs::write(&entry, right.replace("\"sha256\": \"", "\"sha256\": \"0")).unwrap();
    fs::remove_file(part(&place.path("out"), 2)).unwrap();
    run_local(&place.job("a.txt", "out")).await.unwrap();
    assert!(parts(&place.path("out")) == calm);
    assert_eq!(fs::read_to_string(&entry).unwrap(), right);
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_and_empty_entries_are_made_again() {
    let place = Place::new();
    place.write("a.txt", lines(45));
    run_local(&place.job("a.txt", "calm")).await.unwrap();
    let calm = parts(&place.path("calm"));
    let losses: [&[&str]; 3] = [&["part-00004.json"], &["part-00003.json", "part-00004.json"], &["done.json"]];
    for (n, lost) in losses.into_iter().enumerate() {
        let output = format!("out-{n}");
        run_local(&place.job("a.txt", &output)).await.unwrap();
        lost.iter().for_each(|name| fs::remove_file(place.path(&format!("{output}/_elmo/{name}"))).unwrap());
        let report = run_local(&place.job("a.txt", &output)).await.unwrap();
        assert_eq!((report.counts.rows_in, report.parts), (45, 5), "{lost:?}");
        assert!(parts(&place.path(&output)) == calm);
    }
    // As after a power failure: the file exists, but its bytes are lost.
    run_local(&place.job("a.txt", "cut")).await.unwrap();
    fs::remove_file(place.path("cut/_elmo/done.json")).unwrap();
    fs::write(place.path("cut/_elmo/part-00004.json"), "").unwrap();
    assert_eq!(run_local(&place.job("a.txt", "cut")).await.unwrap().counts.rows_in, 45);
    assert!(parts(&place.path("cut")) == calm);
    // And after another entry that is lost.
    fs::remove_file(place.path("cut/_elmo/done.json")).unwrap();
    fs::remove_file(place.path("cut/_elmo/part-00001.json")).unwrap();
    fs::write(place.path("cut/_elmo/part-00004.json"), "{\"file\": \"par").unwrap();
    assert_eq!(run_local(&place.job("a.txt", "cut")).await.unwrap().counts.rows_in, 45);
    assert!(parts(&place.path("cut")) == calm);
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_that_somebody_edited_in_entries_are_no_reason_to_panic() {
    let place = Place::new();
    place.write("a.txt", lines(45));
    let edit = |output: &str, name: &str, key: &str, value: u64| {
        let path = place.path(&format!("{output}/_elmo/{name}"));
        let mut entry: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let place = if key == "tokens" { &mut entry["counts"][key] } else { &mut entry[key] };
        *place = value.into();
        fs::write(path, entry.to_string()).unwrap();
    };
    run_local(&place.job("a.txt", "tokens")).await.unwrap();
    fs::remove_file(place.path("tokens/_elmo/done.json")).unwrap();
    ["part-00001.json", "part-00002.json"].iter().for_each(|name| edit("tokens", name, "tokens", u64::MAX));
    run_local(&place.job("a.txt", "tokens")).await.unwrap();
    run_local(&place.job("a.txt", "bytes")).await.unwrap();
    let entry = place.path("bytes/_elmo/part-00001.json");
    let right = fs::read_to_string(&entry).unwrap();
    edit("bytes", "part-00001.json", "bytes", 7);
    run_local(&place.job("a.txt", "bytes")).await.unwrap();
    assert_eq!(fs::read_to_string(&entry).unwrap(), right);
}

#[tokio::test(flavor = "multi_thread")]
async fn totals_that_are_not_those_of_the_entries_are_made_again() {
    let place = Place::new();
    place.write("a.txt", lines(15));
    run_local(&place.job("a.txt", "out")).await.unwrap();
    let calm = fs::read_to_string(place.path("out/_elmo/done.json")).unwrap();
    for totals in ["", "{", "{}", &calm.replace("\"rows_in\": 15", "\"rows_in\": 16")] {
        place.write("out/_elmo/done.json", totals);
        let stage = Hashing::default();
        run(&place.job("a.txt", "out"), &stage, &stores()).await.unwrap();
        assert_eq!(stage.rows.into_inner(), 0, "the parts are there");
        assert_eq!(fs::read_to_string(place.path("out/_elmo/done.json")).unwrap(), calm);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_manifest_that_was_cut_off_before_the_first_part_begins_anew() {
    let place = Place::new();
    place.write("a.txt", lines(15));
    let job = place.job("a.txt", "out");
    let state = async || {
        let output = stores().locate(&job.output).unwrap();
        let nothing = serde_json::from_str(r#"{"settings": {}, "inputs": []}"#).unwrap();
        manifest::output_state(&output, &nothing, false).await
    };
    place.write("out/_elmo/job.json", "");
    assert_eq!(state().await.unwrap(), manifest::OutputState::New);
    run_local(&job).await.unwrap();
    let calm = parts(&place.path("out"));
    // With parts beside it, only a job of the same settings may continue.
    place.write("out/_elmo/job.json", "");
    state().await.unwrap_err();
    let other = BulkJob { row_group_bytes: 1 << 20, ..job.clone() };
    let error = run_local(&other).await.unwrap_err();
    assert!(error.to_string().contains("_elmo/job.json is missing or damaged"), "{error}");
    assert!(parts(&place.path("out")) == calm);
    run_local(&BulkJob { overwrite: true, ..job }).await.unwrap();
    assert!(parts(&place.path("out")) == calm);
}

#[tokio::test(flavor = "multi_thread")]
async fn entries_that_do_not_follow_from_each_other_are_refused() {
    let place = Place::new();
    place.write("a.txt", lines(45));
    let entry = |n: usize| place.path(&format!("out/_elmo/part-{n:05}.json"));
    let copy = |from, to| assert!(fs::copy(entry(from), entry(to)).is_ok());
    let meddle: [(&str, &dyn Fn()); 5] = [
        // As long as the other, so that the part cannot tell.
        ("part-00001.json", &|| {
            fs::rename(entry(1), place.path("kept")).unwrap();
            fs::rename(entry(2), entry(1)).unwrap();
            fs::rename(place.path("kept"), entry(2)).unwrap();
        }),
        ("part-00002.json", &|| copy(1, 2)),
        ("part-00003.json", &|| {
            let copy = fs::read_to_string(entry(2)).unwrap().replace("part-00002", "part-00003");
            fs::write(entry(3), copy).unwrap();
        }),
        ("part-00001.json", &|| {
            let edited = fs::read_to_string(entry(1)).unwrap().replace("\"rows_in\": 10", "\"rows_in\": 9");
            fs::write(entry(1), edited).unwrap();
        }),
        ("part-00005.json", &|| copy(4, 5)),
    ];
    for (named, meddle) in meddle {
        let _ = fs::remove_dir_all(place.path("out"));
        run_local(&place.job("a.txt", "out")).await.unwrap();
        let calm = parts(&place.path("out"));
        meddle();
        let error = run_local(&place.job("a.txt", "out")).await.unwrap_err();
        assert!(error.to_string().contains(&format!("{named}: not a valid manifest entry")), "{error}");
        assert!(parts(&place.path("out")) == calm);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_changes_under_a_running_job_ends_it() {
    let place = Place::new();
    place.write("a.txt", lines(45));
    place.write("b.txt", lines(45).replace("own", "oWn"));
    let (input, other, output) = (place.path("a.txt"), place.path("b.txt"), place.path("removed"));
    let replace = meddling(move || fs::rename(&other, &input).unwrap());
    let error = run(&place.job("a.txt", "replaced"), &replace, &stores()).await.unwrap_err();
    assert!(error.to_string().contains("changed or removed while it was read"), "{error}");
    assert!(parts(&place.path("replaced")).is_empty());
    let remove = meddling(move || fs::remove_dir_all(&output).unwrap());
    let error = run(&place.job("a.txt", "removed"), &remove, &stores()).await.unwrap_err();
    assert!(error.to_string().contains("deleted or replaced while the job ran"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_file_s_faults_are_no_fault_of_a_complete_part() {
    let place = Place::new();
    place.write("in/1.txt", lines(10));
    place.write("in/2.txt.gz", "no gzip");
    for _ in 0..2 {
        let error = run_local(&place.job("in", "out")).await.unwrap_err();
        assert!(error.to_string().contains("2.txt.gz"), "{error}");
        assert_eq!(parts(&place.path("out")).len(), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_kill_leaves_half_written_is_removed() {
    let place = Place::new();
    place.write("a.txt", lines(15));
    let halves = [
        ".part-00001.parquet#1",
        "part-00001.parquet#1",
        "_elmo/part-00001.json#2",
        "_elmo/partial.arrows#1",
        "mine.parquet#1",
        "_elmo/notes.json#1",
        "_elmo/part-notes.json#2",
    ];
    let leave = |output: &str| halves.iter().for_each(|name| place.write(&format!("{output}/{name}"), "half"));
    let kept = ["_elmo", "mine.parquet#1", "part-00000.parquet", "part-00001.parquet"];
    leave("out");
    run_local(&place.job("a.txt", "out")).await.unwrap();
    // There was no manifest, so the owner of this file is not known.
    let plain_names = || names(&place.path("out")).iter().map(|name| plain(name)).collect::<Vec<_>>();
    assert_eq!(plain_names(), [&[".part-00001.parquet#1"], &kept[..], &["part-00001.parquet#1"]].concat());
    leave("out");
    run_local(&place.job("a.txt", "out")).await.unwrap();
    assert_eq!(plain_names(), kept);
    let entries =
        ["done.json", "job.json", "lock", "notes.json#1", "part-00000.json", "part-00001.json", "part-notes.json#2"];
    assert_eq!(names(&place.path("out/_elmo")), entries);
    // Nothing is deleted from an output that is rejected.
    let other = BulkJob { rows_per_file: Some(5), ..place.job("a.txt", "out") };
    leave("out");
    leave("foreign");
    place.write("foreign/mine.csv", "");
    let before = [names(&place.path("out/_elmo")), names(&place.path("out"))];
    run_local(&other).await.unwrap_err();
    assert_eq!([names(&place.path("out/_elmo")), names(&place.path("out"))], before);
    run_local(&place.job("a.txt", "foreign")).await.unwrap_err();
    let foreign = [".part-00001.parquet#1", "_elmo", "mine.csv", "mine.parquet#1", "part-00001.parquet#1"];
    assert_eq!(names(&place.path("foreign")), foreign);
    assert_eq!(names(&place.path("foreign/_elmo")).len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_others_wrote_is_never_removed() {
    let place = Place::new();
    place.write("a.txt", lines(15));
    let theirs = "part-00000-5c1e3f0a-c000.snappy.parquet";
    place.write(&format!("out/{theirs}"), "of another program");
    let error = run_local(&place.job("a.txt", "out")).await.unwrap_err();
    assert!(error.to_string().contains(theirs), "{error}");
    let anew = BulkJob { overwrite: true, ..place.job("a.txt", "out") };
    // Even then: the folder is not ours alone.
    let error = run_local(&anew).await.unwrap_err();
    assert!(error.to_string().contains(theirs), "{error}");
    assert!(place.path(&format!("out/{theirs}")).exists());
    // Names like ours, but no manifest of a job that made them.
    place.write("like/part-00007.parquet", "of the user");
    for overwrite in [false, true] {
        let error = run_local(&BulkJob { overwrite, ..place.job("a.txt", "like") }).await.unwrap_err();
        assert!(error.to_string().contains("part-00007.parquet"), "{error}");
        assert_eq!(names(&place.path("like")), ["part-00007.parquet"]);
    }
    // Beside an output of ours: nothing is removed before everything was looked at.
    run_local(&place.job("a.txt", "ours")).await.unwrap();
    let before = parts(&place.path("ours"));
    // Two parts there are, so the third name is one that no job was about to give.
    let own = before.keys().next().unwrap().clone();
    for name in ["_SUCCESS", "part-00009.parquet", "part-00002.parquet", &own.replace("part-00000", "part-00002")] {
        place.write(&format!("ours/{name}"), "of the user");
        let error = run_local(&BulkJob { overwrite: true, ..place.job("a.txt", "ours") }).await.unwrap_err();
        assert!(error.to_string().contains(&format!("contains {name}, which its job did not write")), "{error}");
        fs::remove_file(place.path(&format!("ours/{name}"))).unwrap();
        assert!(parts(&place.path("ours")) == before);
    }
    // The part after the last entry of a job that was killed is its own, also when that entry was cut off.
    place.write("ours/_elmo/part-00001.json", "");
    place.write(&format!("ours/{}", own.replace("part-00000", "part-00002")), "cut");
    run_local(&BulkJob { overwrite: true, ..place.job("a.txt", "ours") }).await.unwrap();
    assert!(parts(&place.path("ours")) == before);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_output_that_is_a_file_is_refused() {
    let place = Place::new();
    place.write("a.txt", lines(15));
    place.write("b.txt", lines(15));
    for output in ["a.txt", "a.txt/x/y"] {
        let job = place.job("b.txt", output);
        let error = run_local(&job).await.unwrap_err();
        assert_eq!(error.exit(), Exit::Usage, "{error}");
        assert!(error.to_string().contains("a.txt is a file, but an output must be a folder"), "{error}");
        // A dry run says the same.
        let output = stores().locate(&job.output).unwrap();
        let nothing = serde_json::from_str(r#"{"settings": {}, "inputs": []}"#).unwrap();
        let dry = manifest::output_state(&output, &nothing, false).await.unwrap_err();
        assert_eq!(dry.to_string(), error.to_string());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_input_in_the_output_is_refused_before_anything_is_removed() {
    let place = Place::new();
    place.write("a.txt", lines(15));
    run_local(&place.job("a.txt", "out")).await.unwrap();
    let before = parts(&place.path("out"));
    std::os::unix::fs::symlink(place.path("out"), place.path("link")).unwrap();
    let name = before.keys().next().unwrap();
    for (input, output) in [
        (format!("out/{name}").as_str(), "out"),
        ("out", "out"),
        (&format!("link/{name}"), "out"),
        (&format!("out/{name}"), "link"),
        ("out/*.parquet", "link"),
    ] {
        let job = BulkJob { overwrite: true, keep: elmo_pipelines::source::Keep::None, ..place.job(input, output) };
        let error = run_local(&job).await.unwrap_err();
        assert_eq!(error.exit(), Exit::Usage, "{input} {output}: {error}");
        assert!(error.to_string().contains("is in the output folder"), "{error}");
        assert!(parts(&place.path("out")) == before);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn other_settings_are_refused_with_the_difference() {
    let place = Place::new();
    place.write("a.txt", lines(15));
    run_local(&place.job("a.txt", "out")).await.unwrap();
    let before = parts(&place.path("out"));
    let other = BulkJob { rows_per_file: Some(5), row_group_bytes: 1 << 20, ..place.job("a.txt", "out") };
    let error = run_local(&other).await.unwrap_err();
    let said = error.to_string();
    assert!(said.contains("rows-per-file: was 10, now 5") && said.contains("row-group-mb: was 64, now 1"), "{said}");
    assert_eq!(error.exit(), Exit::Usage);
    assert!(parts(&place.path("out")) == before);
    // Flags that only cost memory or time are no difference.
    run_local(&BulkJob { window_rows: 1, ..place.job("a.txt", "out") }).await.unwrap();
    let shorter = BulkJob { overwrite: true, ..other };
    place.write("a.txt", "one\n");
    run_local(&shorter).await.unwrap();
    assert_eq!(strings(&place.rows("out"), "text"), [Some("one".to_owned())]);
    let left: Vec<String> = names(&place.path("out")).iter().map(|name| plain(name)).collect();
    assert_eq!(left, ["_elmo", "part-00000.parquet"], "parts of the longer job are gone");
}
