//! `elmo train` with several processes on the CPU of one machine.

use std::{
    collections::BTreeMap,
    net::TcpListener,
    process::{Child, Stdio},
    time::Instant,
};

use super::*;

/// In float64, with dropout and negatives.
const EXACT: &str = "--precision f64 --dropout 0.2 --threads 1 -q";

/// Losses and norms of all steps, and held-out perplexities.
fn numbers(place: &Place, folder: &str) -> Vec<f64> {
    let mut numbers = Vec::new();
    for line in place.lines(&format!("{folder}/steps.jsonl")) {
        let of = |name: &str| line[name].as_f64().unwrap();
        numbers.extend([of("loss_forward"), of("loss_backward"), of("grad_norm")]);
    }
    numbers
        .extend(place.lines(&format!("{folder}/valid.jsonl")).iter().map(|line| line["perplexity"].as_f64().unwrap()));
    numbers
}

fn near(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (place, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((a - b).abs() < 1e-12 * b.abs().max(1.0), "{what}: number {place} is {a}, not {b}");
    }
}

fn start(place: &Place, words: &str) -> Child {
    let mut command = place.elmo();
    command.args(words.split_whitespace()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// The processes that a process has started, by rank.
fn by_rank(parent: &Child) -> BTreeMap<usize, u32> {
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", parent.id())).unwrap();
    let rank = |pid: &str| -> Option<(usize, u32)> {
        let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
        let variables = environment.split(|byte| *byte == 0).map(String::from_utf8_lossy);
        let rank = variables.into_iter().find_map(|variable| variable.strip_prefix("RANK=").map(str::to_owned));
        Some((rank?.parse().ok()?, pid.parse().ok()?))
    };
    children.split_whitespace().filter_map(rank).collect()
}

fn send(pid: u32, name: &str) {
    std::process::Command::new("kill").args([name, &pid.to_string()]).status().unwrap();
}

/// 20 steps over all that changes the rows of a process; dropout and negatives are those of one process with all 4 rows.
#[test]
fn several_processes_and_parts_have_the_losses_of_one() {
    let place = prepared();
    let words = format!("{EXACT} --steps 20 --valid valid.txt --eval-every 10");
    place.train(&format!("{words} --rows 4 --output one"), 0);
    let expected = numbers(&place, "one");
    for (number, layout) in [
        "--processes 2 --rows 2",
        "--processes 4 --rows 1",
        "--accumulate 4 --rows 1",
        "--processes 2 --accumulate 2 --rows 1",
    ]
    .into_iter()
    .enumerate()
    {
        let ended = place.train(&format!("{words} {layout} --output run-{number}"), 0);
        near(&numbers(&place, &format!("run-{number}")), &expected, layout);
        assert_eq!((ended.err.as_str(), ended.out.matches("use it with").count()), ("", 1), "{layout}: {ended:?}");
    }
}

/// The same number of processes gives the same bits, whatever interrupted the run, and another number the same losses.
#[test]
fn a_run_of_two_processes_goes_on() {
    let place = prepared();
    let words = format!("{EXACT} --valid valid.txt --eval-every 10 --checkpoint-every 10");
    let two = format!("{words} --processes 2 --rows 2");
    place.train(&format!("{two} --steps 30 --output whole"), 0);
    let child = start(&place, &run(&format!("{two} --steps 1000000 --output run")));
    wait_for_lines(&place, "run/steps.jsonl", 12);
    signal(&child, "-TERM");
    let stopped = ended(child.wait_with_output().unwrap());
    assert_eq!(stopped.code, Some(130), "{stopped:?}");
    assert_eq!(stopped.err.matches("interrupted after step").count(), 1, "{stopped:?}");
    assert!(stopped.err.contains("to resume: ") && !stopped.err.contains("process 1"), "{stopped:?}");
    let steps = place.lines("run/steps.jsonl").len();
    if steps < 30 {
        place.train(&format!("{two} --steps 30 --output run"), 0);
        place.same("run", &place.left("whole"), "interrupted");
    }
    // Two processes of 2 rows, then one, then four; the last ones are given by their variables only.
    place.train(&format!("{words} --rows 4 --steps 30 --output one"), 0);
    place.train(&format!("{two} --steps 10 --output other"), 0);
    let words = words.replace(" -q", "");
    let went_on = place.train(&format!("{words} --rows 2 --steps 20 --output other"), 0);
    assert!(went_on.err.contains("processes: 2 in the run, 1 now"), "{went_on:?}");
    let went_on = place.train(&format!("{words} --processes 4 --rows 2 --steps 30 --output other"), 0);
    let text = "processes: 1 in the run, 4 now; each of the 4 processes takes about 1 of the 4 rows";
    assert!(went_on.err.contains(text), "{went_on:?}");
    near(&numbers(&place, "other"), &numbers(&place, "one"), "2, 1 and 4 processes");
    let refused = place.train(&format!("{words} --processes 2 --rows 3 --steps 40 --output other"), 2);
    assert!(refused.err.contains("rows: 4 in the run, 6 now"), "{refused:?}");
}

/// A process that is killed, and one that stops without ending: the run ends, names it, and goes on later.
#[test]
fn a_process_that_dies_or_hangs_ends_the_run() {
    let place = prepared();
    let words = "--processes 3 --rows 2 --process-timeout 2 --threads 1 --checkpoint-every 5 -q --output run --steps";
    for (lines, name, texts) in [
        (7, "-KILL", ["process 1 of this run was killed by signal 9", "goes on from the last checkpoint"]),
        (17, "-STOP", ["process 0 of 3: ", "process 1 does not answer, and is ended"]),
    ] {
        let child = start(&place, &run(&format!("{words} 1000000")));
        wait_for_lines(&place, "run/steps.jsonl", lines);
        let processes = by_rank(&child);
        assert_eq!(processes.len(), 3, "{processes:?}");
        let begun = Instant::now();
        send(processes[&1], name);
        let ended = ended(child.wait_with_output().unwrap());
        assert!(begun.elapsed() < Duration::from_secs(60), "the others waited");
        assert_eq!(ended.code, Some(1), "{ended:?}");
        texts.iter().for_each(|text| assert!(ended.err.contains(text), "{name}: {text}: {ended:?}"));
        let left = |pid: &&u32| fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(" Z "));
        assert_eq!(processes.values().filter(left).count(), 0, "{name}: processes are left");
    }
    let steps = place.checkpoints("run").pop().unwrap();
    let step: usize = steps.to_str().unwrap().rsplit('-').next().unwrap().parse().unwrap();
    place.train(&format!("{words} {}", step + 5), 0);
    assert_eq!(place.lines("run/steps.jsonl").len(), step + 5);
}

/// Processes that something else has started, as torchrun does: each error is said once, by the one that has it.
#[test]
fn processes_are_joined_by_the_usual_variables() {
    let place = prepared();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let started = |rank: usize, words: &str, names: [&str; 3]| {
        let mut command = place.elmo();
        for (name, value) in names.into_iter().zip([rank, 2, rank]) {
            command.env(name, value.to_string());
        }
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.args(run(words).split_whitespace()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let both = |words: [&str; 2], names: [&str; 3]| {
        let processes = [started(0, words[0], names), started(1, words[1], names)];
        processes.map(|process| ended(process.wait_with_output().unwrap()))
    };
    let (torchrun, slurm) =
        (["RANK", "WORLD_SIZE", "LOCAL_RANK"], ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"]);
    let words = "--rows 2 --steps 5 --threads 1 -q --output run";
    let [first, second] = both([words, words], torchrun);
    assert_eq!((first.code, second.code), (Some(0), Some(0)), "{first:?} {second:?}");
    assert!(first.out.contains("after 5 steps") && second.out.is_empty(), "{first:?} {second:?}");
    let longer = words.replace("--steps 5", "--steps 8");
    let [first, second] = both([&longer, &longer], slurm);
    assert_eq!((first.code, second.code), (Some(0), Some(0)), "{first:?} {second:?}");
    assert_eq!(place.lines("run/steps.jsonl").len(), 8);
    // Other settings that decide when the processes exchange something.
    let [first, second] = both([&longer, &longer.replace("--steps 8", "--steps 9")], torchrun);
    assert_eq!((first.code, second.code), (Some(1), Some(2)), "{first:?} {second:?}");
    assert!(second.err.contains("steps: 8 in process 0, 9 here"), "{second:?}");
    // Another corpus on the second machine.
    place.write("other/0.txt", "w1 w2 w3\n");
    let other = format!("{words} --shards other");
    let [first, second] = both([words, &other], torchrun);
    assert_eq!((first.code, second.code), (Some(1), Some(2)), "{first:?} {second:?}");
    assert!(first.err.contains("process 1 of this run has failed"), "{first:?}");
    assert!(second.err.contains("0.txt: changed") && second.err.contains("the same files"), "{second:?}");
    // What both have is said by the first one.
    fs::remove_file(place.path("vocab.txt")).unwrap();
    let [first, second] = both([words, words], torchrun);
    assert!(first.err.contains("vocab.txt") && second.err.is_empty(), "{first:?} {second:?}");
}

#[test]
fn devices_that_cannot_be_used_together_are_refused() {
    let place = prepared();
    for (words, text) in [
        ("--gpus 0,1 --device cpu", "both name the devices"),
        ("--processes 2 --device cuda:0", "--processes is for the CPU"),
        ("--device cuda:0,0", "twice"),
        ("--gpus x", "cuda:x"),
    ] {
        let all = run(&format!("{words} --steps 1 --output run"));
        let all = if words.contains("--gpus 0") { all } else { all.replacen("--device cpu", "", 1) };
        let refused = place.exits(&all, 2);
        assert!(refused.err.contains(text), "{words}: {refused:?}");
    }
    let mut command = place.elmo();
    command.args(run("--steps 1 --output run").split_whitespace()).env("RANK", "0").env("WORLD_SIZE", "many");
    let refused = ended(command.output().unwrap());
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(refused.err.contains("WORLD_SIZE is \"many\""), "{refused:?}");
}
