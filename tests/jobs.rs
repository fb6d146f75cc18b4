//! The program as a user runs it: jobs, crashes, resumption, exit codes.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{
    fs,
    process::{Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use arrow::{
    array::{ArrayRef, AsArray, BinaryArray, Int64Array, RecordBatch},
    datatypes::Int64Type,
    ipc::writer::FileWriter,
};
use parquet::arrow::ArrowWriter;

#[path = "common/kill.rs"]
mod kill;
#[path = "common/program.rs"]
mod program;

use program::{Place, lines, text, wait_for};

/// The column of one kind over all rows of an output.
fn ids(batches: &[RecordBatch]) -> Vec<i64> {
    let column = |b: &RecordBatch| b.column_by_name("id").unwrap().as_primitive::<Int64Type>().values().to_vec();
    batches.iter().flat_map(column).collect()
}

#[test]
fn every_format_gives_the_same_vectors_in_the_same_order() {
    let place = Place::new();
    let texts = ["The soup was cold.", "We waited, and waited.", "", "Best noodles in town!"];
    place.write("a.txt", &(texts.join("\n") + "\n"));
    place.write("a.csv", &texts.iter().fold("text\n".to_owned(), |all, t| all + &format!("\"{t}\"\n")));
    place.write("a.jsonl", &texts.iter().map(|t| format!("{{\"text\": \"{t}\"}}\n")).collect::<String>());
    let column: ArrayRef = Arc::new(arrow::array::StringArray::from(texts.to_vec()));
    let batch = RecordBatch::try_from_iter([("text", column)]).unwrap();
    let mut parquet =
        ArrowWriter::try_new(fs::File::create(place.path("a.parquet")).unwrap(), batch.schema(), None).unwrap();
    parquet.write(&batch).unwrap();
    parquet.close().unwrap();
    let mut arrow = FileWriter::try_new(fs::File::create(place.path("a.arrow")).unwrap(), &batch.schema()).unwrap();
    arrow.write(&batch).unwrap();
    arrow.finish().unwrap();
    let mut expected = None;
    for format in ["txt", "csv", "jsonl", "parquet", "arrow"] {
        place.exits(&format!("embed -q --model tiny --input a.{format} --output {format} --keep none"), 0);
        let rows = place.rows(format);
        let vectors = ArrayRef::clone(rows[0].column_by_name("embedding").unwrap());
        assert_eq!(vectors.len(), texts.len());
        assert!(vectors.is_null(2), "{format}: blank text has no vector");
        assert_eq!(expected.get_or_insert_with(|| ArrayRef::clone(&vectors)), &vectors, "{format}");
    }
}

#[test]
fn kept_columns_parts_and_levels() {
    let place = Place::new();
    place.write(
        "a.jsonl",
        &(0..25).map(|i| format!("{{\"id\": {i}, \"x\": \"y\", \"text\": \"Row {i}.\"}}\n")).collect::<String>(),
    );
    place.exits("embed -q --model tiny --input a.jsonl --output all --rows-per-file 10 --id id", 0);
    assert_eq!(place.parts("all").len(), 3);
    let rows = place.rows("all");
    assert_eq!(ids(&rows), (0..25).collect::<Vec<_>>());
    let names = |rows: &[RecordBatch]| rows[0].schema().fields().iter().map(|f| f.name().clone()).collect::<Vec<_>>();
    assert_eq!(names(&rows), ["id", "text", "x", "embedding", "truncated", "error"]);
    place.exits("embed -q --model tiny --input a.jsonl --output tokens --keep id --level token", 0);
    assert_eq!(names(&place.rows("tokens")), ["id", "tokens", "truncated", "error"]);
    let (report, _) = place.exits("inspect all --json", 0);
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!((&report["rows"], &report["files"]), (&25.into(), &3.into()));
    place.exits("verify all --model tiny --sample 7 --tolerance 0", 0);
    place.exits("verify tokens --model tiny --sample 7 --tolerance 0", 0); // texts come from the inputs again
}

#[test]
fn a_finished_job_is_left_alone_and_another_one_refused() {
    let place = Place::new();
    place.write("a.txt", &lines(20));
    place.exits("embed -q --model tiny --input a.txt --output out", 0);
    let before = place.parts("out");
    place.exits("embed -q --model tiny --input a.txt --output out", 0);
    assert_eq!(place.parts("out"), before);
    let (_, err) = place.exits("embed -q --model tiny --input a.txt --output out --pooling max", 2);
    assert!(err.contains("elmo.pooling: was mean, now max") && err.contains("--overwrite"), "{err}");
    place.write("a.txt", &lines(21));
    let (_, err) = place.exits("embed -q --model tiny --input a.txt --output out", 2);
    assert!(err.contains("changed since"), "{err}");
    place.exits("embed -q --model tiny --input a.txt --output out --overwrite", 0);
    assert_eq!(place.rows("out").iter().map(RecordBatch::num_rows).sum::<usize>(), 21);
}

#[test]
fn two_jobs_on_one_output() {
    let place = Place::new();
    place.write("a.txt", &lines(5));
    fs::create_dir_all(place.path("out/_elmo")).unwrap();
    let lock = fs::File::create(place.path("out/_elmo/lock")).unwrap();
    lock.try_lock().unwrap();
    let (_, err) = place.exits("embed -q --model tiny --input a.txt --output out", 5);
    assert!(err.contains("another job is writing there"), "{err}");
    drop(lock);
    place.exits("embed -q --model tiny --input a.txt --output out", 0);
}

#[test]
fn rejected_rows_are_counted_and_said() {
    let place = Place::new();
    let bytes: ArrayRef = Arc::new(BinaryArray::from_vec(vec![b"fine", b"\xff broken", b"also fine"]));
    let id: ArrayRef = Arc::new(Int64Array::from(vec![1, 2, 3]));
    let batch = RecordBatch::try_from_iter([("id", id), ("text", bytes)]).unwrap();
    let mut file =
        ArrowWriter::try_new(fs::File::create(place.path("a.parquet")).unwrap(), batch.schema(), None).unwrap();
    file.write(&batch).unwrap();
    file.close().unwrap();
    let (_, err) = place.exits("embed -q --model tiny --input a.parquet --output fail", 3);
    assert!(err.contains("a.parquet, row 1: not UTF-8") && err.contains("--on-error"), "{err}");
    let (report, _) = place.exits("embed -q --model tiny --input a.parquet --output null --on-error null --json", 6);
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!((&report["rows_out"], &report["errors"], &report["skipped"]), (&3.into(), &1.into(), &0.into()));
    let (_, err) = place.exits("embed --model tiny --input a.parquet --output skip --on-error skip --keep id", 6);
    // It is in no column of errors, so it is named here.
    assert!(err.contains("row skipped") && err.contains("a.parquet") && err.contains("row=1"), "{err}");
    assert_eq!(ids(&place.rows("skip")), [1, 3]);
}

#[test]
fn dry_run_writes_nothing() {
    let place = Place::new();
    place.write("a.txt", &lines(30));
    let (report, _) = place.exits("embed -q --model tiny --input a.txt --output out --dry-run --json", 0);
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["rows"], 30);
    assert!(!place.path("out").exists());
}

/// One cell of 20 MB takes a minute to embed, so a dry run must not embed it.
#[test]
fn a_dry_run_does_not_embed_huge_rows_and_names_bad_ones() {
    let place = Place::new();
    place.write("huge.txt", &"one two three four five six seven\n".repeat(600_000).replace('\n', " "));
    let (report, _) = place.exits("embed -q --model tiny --input huge.txt --output out --dry-run --json", 0);
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    let tokens = report["tokens"].as_u64().unwrap();
    // Seven tokens in 34 bytes; another text has another number of bytes per token.
    assert!((2_000_000..8_400_000).contains(&tokens) && report["seconds"].as_f64().unwrap() > 1.0, "{report}");
    place.write("long.txt", &format!("short\n{}\n", "word ".repeat(700)));
    let words = "embed -q --model tiny --input long.txt --output out --on-long error --max-tokens 400";
    let (real, dry) = (place.run(words), place.run(&format!("{words} --dry-run")));
    assert_eq!((real.status.code(), &real.stderr), (Some(3), &dry.stderr), "{}", text(&real.stderr));
    assert!(text(&dry.stderr).contains("long.txt, row 1: a sentence of 700 tokens"), "{}", text(&dry.stderr));
}

#[test]
fn a_dry_run_says_what_the_output_would_mean_for_the_job() {
    let place = Place::new();
    place.write("a.txt", &lines(30));
    let words = "embed -q --model tiny --input a.txt --output out --rows-per-file 10";
    let output = |more: &str| -> serde_json::Value {
        let (report, _) = place.exits(&format!("{words} {more} --dry-run --json"), 0);
        serde_json::from_str::<serde_json::Value>(&report).unwrap()["output"].clone()
    };
    assert_eq!(output(""), serde_json::json!({"state": "new"}));
    place.exits(words, 0);
    assert_eq!(output(""), serde_json::json!({"state": "complete"}));
    assert_eq!(output("--overwrite"), serde_json::json!({"state": "overwritten"}));
    for entry in ["done", "part-00002"] {
        fs::remove_file(place.path(&format!("out/_elmo/{entry}.json"))).unwrap();
    }
    assert_eq!(output(""), serde_json::json!({"state": "begun", "rows": 20}));
    let refused = |words: &str, place: &Place| {
        let (real, dry) = (place.run(words), place.run(&format!("{words} --dry-run")));
        assert!(!real.status.success());
        assert_eq!((real.status.code(), real.stderr), (dry.status.code(), dry.stderr));
    };
    refused(&format!("{words} --pooling max"), &place);
    place.write("out/mine.csv", "");
    refused(&format!("{words} --overwrite"), &place);
    fs::create_dir(place.path("full")).unwrap();
    place.write("full/mine.csv", "");
    refused("embed -q --model tiny --input a.txt --output full", &place);
}

#[test]
fn converting_keeps_every_bit() {
    let place = Place::new();
    let fingerprint = |model: &str| {
        let (out, _) = place.exits(&format!("model info {model} --json"), 0);
        serde_json::from_str::<serde_json::Value>(&out).unwrap()["fingerprint"].as_str().unwrap().to_owned()
    };
    let first = fingerprint("tiny");
    place.exits("model convert tiny a --to hdf5", 0);
    place.exits("model convert a b --to safetensors", 0);
    assert_eq!((fingerprint("a"), fingerprint("b")), (first.clone(), first));
    place.exits("model verify b", 0);
}

const JOB: &str = "embed -q --model tiny --input a.txt --rows-per-file 50 --window-rows 20 --threads 1 --output";

/// Kills a job until it survives, and compares its output with that of a job that was not killed.
fn survives(place: &Place, rows: usize, kill: impl FnMut(&mut Command, usize) -> bool) {
    place.write("a.txt", &lines(rows));
    place.exits(&format!("{JOB} calm"), 0);
    let runs = kill::repeatedly(|| place.command(&format!("{JOB} killed")), kill);
    place.exits(&format!("{JOB} killed"), 0);
    let (calm, killed) = (place.parts("calm"), place.parts("killed"));
    assert_eq!(calm.keys().collect::<Vec<_>>(), killed.keys().collect::<Vec<_>>());
    assert!(calm == killed, "bytes differ after {runs} kills");
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "crash points are in builds with debug assertions only")]
fn a_crash_at_any_point_loses_and_doubles_nothing() {
    let points = [
        "bulk.after_list",
        "bulk.before_part",
        "bulk.mid_part",
        "bulk.after_upload_before_manifest",
        "bulk.after_manifest",
        "bulk.before_done",
    ];
    for point in points {
        let place = Place::new();
        survives(&place, 230, |command, run| {
            // Later in the job each time, so that every part is hit.
            kill::aborts_at(command, point, 2 * run) && run < 4
        });
    }
}

#[test]
fn a_kill_at_any_time_loses_and_doubles_nothing() {
    let place = Place::new();
    let (mut hit, mut durable) = (0, 0);
    let entry = |part: u32| place.path(&format!("killed/_elmo/part-{part:05}.json"));
    survives(&place, 6_000, |command, run| {
        if place.path("killed/_elmo/done.json").exists() {
            return false;
        }
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        // Alternately when the job has begun and when it has one more part; how long either takes depends on the machine.
        let parts = (0..).find(|part| !entry(*part).exists()).unwrap_or(0);
        wait_for(&if run % 2 == 0 { place.path("killed/_elmo/job.json") } else { entry(parts) });
        thread::sleep(Duration::from_millis(7 * (run as u64 * 5 % 7)));
        hit += u32::from(child.try_wait().unwrap().is_none());
        child.kill().unwrap(); // SIGKILL
        child.wait().unwrap();
        durable += u32::from(entry(0).exists() && !place.path("killed/_elmo/done.json").exists());
        run < 8
    });
    assert!(hit >= 3 && durable >= 1, "{hit} kills hit a running job, {durable} one with something durable");
}

#[test]
fn a_signal_finishes_the_window_and_the_command_that_is_printed_goes_on() {
    let place = Place::new();
    place.write("a.txt", &lines(6_000));
    let words = "embed --model tiny --input a.txt --rows-per-file 400 --window-rows 200 --threads 1 --output";
    place.exits(&format!("{words} calm"), 0);
    // The printed command resumes the job, even if it was started with --overwrite.
    for (signal, flag, setting) in [("-INT", "--overwrite", None), ("-TERM", "", Some(("ELMO_OVERWRITE", "true")))] {
        let output = format!("out{signal}");
        let mut child = place
            .command(&format!("{words} {output} {flag}"))
            .envs(setting)
            .stderr(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        wait_for(&place.path(&format!("{output}/_elmo/part-00000.json")));
        Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
        let mut err = String::new();
        std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut err).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(130), "{err}");
        assert!(!place.path(&format!("{output}/_elmo/done.json")).exists());
        let printed = err.lines().find_map(|line| line.strip_prefix("to resume: ")).unwrap_or_else(|| panic!("{err}"));
        let (_, again) = printed.split_once(" embed ").unwrap();
        assert!(again.contains("--rows-per-file 400") && again.ends_with(" --overwrite=false"), "{printed}");
        let before = place.parts(&output);
        let status = place.command(&format!("embed {again}")).envs(setting).output().unwrap().status;
        assert_eq!(status.code(), Some(0));
        let after = place.parts(&output);
        assert!(after == place.parts("calm"));
        assert!(!before.is_empty() && before.len() < after.len(), "it began anew, or there was nothing left to do");
    }
}

#[test]
fn a_command_with_a_secret_in_it_is_not_printed() {
    let place = Place::new();
    place.write("a.txt", &lines(6_000));
    let output = "session_token=v1/out";
    let mut child = place
        .command(&format!("embed --model tiny --input a.txt --rows-per-file 400 --threads 1 --output {output}"))
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait_for(&place.path(&format!("{output}/_elmo/part-00000.json")));
    Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    let mut err = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut err).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{err}");
    assert!(err.contains("run the same command again") && !err.contains("to resume:"), "{err}");
}

/// Standard input may be a non-blocking pipe, whose reads fail with `EAGAIN`.
#[test]
fn standard_input_that_does_not_wait_is_waited_for() {
    let place = Place::new();
    let (reader, mut writer) = std::io::pipe().unwrap();
    // SAFETY: sets a flag of a descriptor that is open; touches no memory.
    assert_eq!(unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&reader), libc::F_SETFL, libc::O_NONBLOCK) }, 0);
    let mut child =
        place.command("embed --model tiny --input - --output out").stdin(reader).stdout(Stdio::null()).spawn().unwrap();
    for line in lines(5).split_inclusive('\n') {
        thread::sleep(Duration::from_millis(200));
        std::io::Write::write_all(&mut writer, line.as_bytes()).unwrap();
    }
    drop(writer);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert_eq!(place.rows("out").iter().map(RecordBatch::num_rows).sum::<usize>(), 5);
}

/// The producer may wait for it before it sends more. Lines of standard input are read 8,192 at a time.
#[test]
fn a_part_of_standard_input_is_published_while_lines_of_the_next_are_waited_for() {
    let place = Place::new();
    let mut child = place
        .command("embed --model tiny --input - --output out --rows-per-file 4000 --window-rows 1000")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut input, lines(8193).as_bytes()).unwrap();
    wait_for(&place.path("out/_elmo/part-00001.json"));
    drop(input);
    assert!(child.wait().unwrap().success());
    assert_eq!(place.rows("out").iter().map(arrow::array::RecordBatch::num_rows).sum::<usize>(), 8193);
}

/// A read that waits for a line cannot be cancelled, so the process ends without it.
#[test]
fn a_signal_ends_a_job_that_waits_for_standard_input() {
    // In the middle of a part, at the end of one, and before the first line.
    for sent in [5, 4, 0] {
        interrupt_standard_input(sent);
    }
}

fn interrupt_standard_input(sent: usize) {
    let place = Place::new();
    let mut child = place
        .command("embed --model tiny --input - --output out --rows-per-file 2 --window-rows 1")
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut input, lines(sent).as_bytes()).unwrap();
    wait_for(&place.path("out/_elmo/job.json"));
    // Wait until the program has read all lines and waits for more.
    thread::sleep(Duration::from_millis(300));
    Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        // Not a measurement: the pipe stays open, so it would wait forever.
        assert!(begun.elapsed() < Duration::from_secs(60), "it waits for standard input");
        thread::sleep(Duration::from_millis(20));
    };
    drop(input);
    let mut err = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut err).unwrap();
    assert_eq!(status.code(), Some(130), "{err}");
    assert!(err.contains("standard input cannot be read again") && !err.contains("to resume:"), "{err}");
    // Standard input cannot be read again: all lines that were read are in the output, also those of the open part.
    assert!(err.contains(&format!("interrupted after {sent} rows")), "{err}");
    let rows = place.rows("out");
    let texts: Vec<_> = rows.iter().flat_map(|rows| rows["text"].as_string::<i32>().iter().flatten()).collect();
    assert_eq!(texts.iter().map(|text| format!("{text}\n")).collect::<String>(), lines(sent));
    assert!(!place.path("out/_elmo/done.json").exists());
    let (_, err) =
        place.exits("embed --model tiny --input - --output out --rows-per-file 2", if sent == 0 { 0 } else { 2 });
    assert_eq!(err.contains("cannot be read again"), sent > 0, "{err}");
}

/// Lines come faster than devices work, and are read ahead. Standard input is a file here, whose offset the program shares:
/// it shows which lines were read.
#[test]
fn no_line_of_standard_input_that_was_taken_is_lost() {
    for state in ["", "--state carry --batch-rows 16 --sentences off --on-long truncate"] {
        let place = Place::new();
        let content = lines(40_000);
        place.write("a.txt", &content);
        let mut input = fs::File::open(place.path("a.txt")).unwrap();
        let words = "embed -q --model tiny --threads 1 --rows-per-file 400 --window-rows 64";
        let mut child = place
            .command(&format!("{words} {state} --input - --output out"))
            .stdin(Stdio::from(input.try_clone().unwrap()))
            .stderr(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        wait_for(&place.path("out/_elmo/part-00000.json"));
        Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(130));
        let taken = std::io::Seek::stream_position(&mut input).unwrap() as usize;
        assert!(taken < content.len(), "nothing was left to interrupt");
        let whole = content[..taken].rfind('\n').map_or(0, |end| end + 1);
        let rows = place.rows("out");
        let texts: Vec<_> = rows.iter().flat_map(|rows| rows["text"].as_string::<i32>().iter().flatten()).collect();
        assert_eq!(texts.iter().map(|text| format!("{text}\n")).collect::<String>(), content[..whole]);
        // Without an interruption the same lines have the same vectors.
        place.write("b.txt", &content[..whole]);
        place.exits(&format!("{words} {state} --input b.txt --output calm"), 0);
        let calm = place.rows("calm");
        let vectors = |rows: &[RecordBatch]| -> Vec<ArrayRef> {
            rows.iter().flat_map(|rows| (0..rows.num_rows()).map(|row| rows["embedding"].slice(row, 1))).collect()
        };
        assert!(vectors(&rows) == vectors(&calm), "{state}");
    }
}
