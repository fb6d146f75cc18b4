//! `elmo train` with several processes on the CPU of one machine.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Read},
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
    start_with(place, words, &[])
}

fn start_with(place: &Place, words: &str, variables: &[(&str, &str)]) -> Child {
    let mut command = place.elmo();
    command
        .args(words.split_whitespace())
        .envs(variables.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
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

/// Waits until processes that are no children of this one have ended.
fn wait_for_end(processes: &[u32]) {
    let is_left = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(" Z "));
    for _ in 0..6000 {
        if !processes.iter().any(is_left) {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
    panic!("{processes:?} did not end");
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
    // Slow steps, so that the signal comes before step 30.
    let slow = run(&format!("{two} --steps 1000000 --output run"));
    let child = start_with(&place, &slow, &[("FAILPOINTS", "train.after_step=12*off->sleep(300)")]);
    wait_for_lines(&place, "run/steps.jsonl", 12);
    signal(&child, "-TERM");
    let stopped = ended(child.wait_with_output().unwrap());
    assert_eq!(stopped.code, Some(130), "{stopped:?}");
    assert_eq!(stopped.err.matches("interrupted after step").count(), 1, "{stopped:?}");
    assert!(stopped.err.contains("to resume: ") && !stopped.err.contains("process 1"), "{stopped:?}");
    let steps = place.lines("run/steps.jsonl").len();
    assert!((12..30).contains(&steps), "{steps}");
    place.train(&format!("{two} --steps 30 --output run"), 0);
    place.same("run", &place.left("whole"), "interrupted");
    // A dry run has the window of all processes, and of those of the run if their number differs.
    for processes in ["--processes 2", "--processes 4"] {
        let words = format!("{words} {processes} --rows 2 --steps 40 --dry-run --json --output run");
        let estimate = place.train(&words, 0).json();
        assert_eq!(estimate["steps_made"].as_u64(), Some(30), "{processes}: {estimate}");
    }
    // By hand: two epochs of so many predictions, in whole steps of 20 for each process. More lanes than a process has rows are as
    // many as it has rows.
    for processes in [1, 2, 4] {
        let words = words.replace(" --threads 1", "");
        let layout = format!("--processes {processes} --rows 4 --lanes {}", 2 * processes);
        let estimate = place.train(&format!("{words} {layout} --epochs 2 --dry-run --json --output no"), 0).json();
        let of_step = 20.0 * processes as f64;
        let predictions = estimate["predictions"].as_f64().unwrap();
        let expected = (2.0 * predictions / of_step).floor() * of_step / predictions;
        let epochs = estimate["epochs"].as_f64().unwrap();
        assert!((epochs - expected).abs() < 1e-9, "{processes} processes, not {expected}: {estimate}");
    }
    // Four processes of one row, then two, one and three, which share the 4 rows.
    place.train(&format!("{words} --rows 4 --steps 40 --output one"), 0);
    place.train(&format!("{words} --processes 4 --rows 1 --steps 10 --output other"), 0);
    let words = words.replace(" -q", "");
    for (steps, processes, text) in [
        (20, "--processes 2", "processes: 4 in the run, 2 now; each of the 2 processes takes about 2 of the 4 rows"),
        (30, "", "processes: 2 in the run, 1 now"),
        (40, "--processes 3", "processes: 1 in the run, 3 now; each of the 3 processes takes about 1 of the 4 rows"),
    ] {
        let went_on = place.train(&format!("{words} {processes} --rows 1 --steps {steps} --output other"), 0);
        assert!(went_on.err.contains(text), "{went_on:?}");
    }
    near(&numbers(&place, "other"), &numbers(&place, "one"), "4, 2, 1 and 3 processes");
    let refused = place.train(&format!("{words} --processes 2 --rows 3 --steps 50 --output other"), 2);
    assert!(refused.err.contains("rows: 4 in the run, 6 now"), "{refused:?}");
}

/// Whoever is told to stop: the process that has started the others, one of the others, or every process, as the schedulers of
/// clusters do. The first process is told by its parent, too, and must not take that for a second signal.
#[test]
fn any_signal_lets_all_processes_write_one_checkpoint() {
    let place = prepared();
    let words = "--processes 2 --rows 2 --threads 1 --steps 1000000 --checkpoint-every 1000000 --output";
    for (name, ranks) in [("parent", vec![]), ("one", vec![1]), ("all", vec![0, 1])] {
        let child = start(&place, &run(&format!("{words} {name}")));
        wait_for_lines(&place, &format!("{name}/steps.jsonl"), 3);
        let processes = by_rank(&child);
        ranks.iter().for_each(|rank| send(processes[rank], "-TERM"));
        if name != "one" {
            signal(&child, "-TERM");
        }
        let stopped = ended(child.wait_with_output().unwrap());
        assert_eq!(stopped.code, Some(130), "{name}: {stopped:?}");
        assert_eq!(stopped.err.matches("interrupted after step").count(), 1, "{name}: {stopped:?}");
        assert_eq!(stopped.err.matches("to resume: ").count(), 1, "{name}: {stopped:?}");
        let steps = place.lines(&format!("{name}/steps.jsonl")).len();
        let checkpoints = place.checkpoints(name);
        assert!(checkpoints.len() == 1 && checkpoints[0].ends_with(format!("step-{steps:010}")), "{checkpoints:?}");
    }
}

/// It reaches process 1, which waits for process 0.
#[test]
fn a_signal_before_the_first_step_ends_all_processes() {
    let place = prepared();
    let words = run("--processes 2 --rows 2 --threads 1 --steps 5 --output run");
    let mut child = started(&place, &words, "train.before_lock=return(pause)");
    let mut errors = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("reached train.before_lock") {
        line.clear();
        assert!(errors.read_line(&mut line).unwrap() > 0);
    }
    send(by_rank(&child)[&1], "-TERM");
    let mut rest = String::new();
    errors.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{rest}");
    assert!(rest.contains("process 1 of this run has failed: a signal has ended it before the first step"), "{rest}");
    assert!(!place.path("run/checkpoints").exists(), "there was no step");
}

/// A disk that needs longer for a checkpoint than a process may be silent.
#[test]
fn a_slow_disk_ends_no_run() {
    let place = prepared();
    let words = run("--processes 2 --rows 2 --threads 1 --process-timeout 4 --steps 3 -q --output run");
    let slow = place.run_with(&words, &[("FAILPOINTS", "train.in_checkpoint=sleep(8000)")]);
    assert_eq!((slow.code, slow.err.as_str()), (Some(0), ""), "{slow:?}");
    assert_eq!(place.lines("run/steps.jsonl").len(), 3);
}

/// One that cannot pass a signal on.
#[test]
fn processes_end_with_the_one_that_has_started_them() {
    let place = prepared();
    let child = start(&place, &run("--processes 2 --rows 2 --threads 1 --steps 1000000 --output run"));
    wait_for_lines(&place, "run/steps.jsonl", 3);
    let processes: Vec<u32> = by_rank(&child).into_values().collect();
    assert_eq!(processes.len(), 2);
    signal(&child, "-KILL");
    assert_eq!(ended(child.wait_with_output().unwrap()).code, None);
    wait_for_end(&processes);
}

/// What process 0 alone knows: a folder that cannot be written. The others end with it, and are silent.
#[test]
fn a_full_disk_is_named_once() {
    let place = prepared();
    place.train("--processes 2 --rows 2 --threads 1 --steps 7 -q --output run", 0);
    let words = run("--processes 2 --rows 2 --threads 1 --steps 14 --output run");
    let full = place.shell(&format!("trap '' XFSZ; ulimit -f 20; exec elmo {words}"));
    assert_eq!(full.code, Some(5), "{full:?}");
    assert!(full.err.contains("step-0000000014") && full.err.contains("resumes from"), "{full:?}");
    assert!(!full.err.contains("process 1"), "{full:?}");
}

/// A process that is killed, and one that stops without ending: the run ends, names it, and goes on later.
#[test]
fn a_process_that_dies_or_hangs_ends_the_run() {
    let place = prepared();
    let words = "--processes 3 --rows 2 --process-timeout 5 --threads 1 --checkpoint-every 5 -q --output run --steps";
    for (lines, name, texts) in [
        (7, "-KILL", ["process 1 of this run was killed by signal 9", "resumes from the last checkpoint"]),
        (17, "-STOP", ["no sign of life from process 1 on ", "process 1 does not answer, and is ended"]),
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
        wait_for_end(&processes.into_values().collect::<Vec<_>>());
    }
    let steps = place.checkpoints("run").pop().unwrap();
    let step: usize = steps.to_str().unwrap().rsplit('-').next().unwrap().parse().unwrap();
    place.train(&format!("{words} {}", step + 5), 0);
    assert_eq!(place.lines("run/steps.jsonl").len(), step + 5);
}

/// Variables of torchrun for the number of a process, their number, and the number on its machine.
const TORCHRUN: [&str; 3] = ["RANK", "WORLD_SIZE", "LOCAL_RANK"];

/// A port that is free for now: torchrun, too, only chooses one.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// One of so many processes, all on this machine, started as by torchrun.
fn started_by_others(place: &Place, port: u16, (rank, size): (usize, usize), words: &str, names: [&str; 3]) -> Child {
    let mut command = place.elmo();
    for (name, value) in names.into_iter().zip([rank, size, rank]) {
        command.env(name, value.to_string());
    }
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.args(run(words).split_whitespace()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The name of this machine, as the system says it.
fn host() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim().to_owned()
}

/// Two of three processes come, or all but the first one, at whose machine they would meet.
#[test]
fn processes_that_do_not_join_are_named() {
    let place = prepared();
    let words = "--rows 2 --steps 5 --threads 1 --start-timeout 3 -q --output run";
    for (ranks, text) in [
        (vec![0, 2], format!("process 1 has not joined within 3 s; those that have: process 0 on {}", host())),
        (vec![1, 2], "process 0, which listens there, has not joined within 3 s".to_owned()),
    ] {
        let port = free_port();
        let start = |rank| started_by_others(&place, port, (rank, 3), words, TORCHRUN);
        let processes: Vec<Child> = ranks.into_iter().map(start).collect();
        for process in processes {
            let ended = ended(process.wait_with_output().unwrap());
            assert_eq!(ended.code, Some(1), "{ended:?}");
            assert!(ended.err.contains(&text) && ended.err.contains("--start-timeout"), "{text}: {ended:?}");
        }
    }
    assert!(!place.path("run").exists(), "nothing had begun");
}

/// Nobody supervises the processes of other programs: those that are left find out which one has died, also when it is the first
/// one, to which all are connected. Then the run goes on.
#[test]
fn the_death_of_a_process_that_has_joined_is_named_by_the_others() {
    let place = prepared();
    let words = "--rows 2 --threads 1 --checkpoint-every 5 -q --output run --steps";
    for (killed, lines) in [(1, 7), (0, 17)] {
        let (port, endless) = (free_port(), format!("{words} 1000000"));
        let start = |rank| started_by_others(&place, port, (rank, 3), &endless, TORCHRUN);
        let mut processes: Vec<Child> = (0..3).map(start).collect();
        wait_for_lines(&place, "run/steps.jsonl", lines);
        let dead = processes.remove(killed);
        signal(&dead, "-KILL");
        assert_eq!(ended(dead.wait_with_output().unwrap()).code, None);
        for process in processes {
            let ended = ended(process.wait_with_output().unwrap());
            assert_eq!(ended.code, Some(1), "{ended:?}");
            // Another one that has noticed it first may have ended, too, and is named with it.
            let text = format!("process {killed} on {}", host());
            let named = ended.err.split_once("no sign of life from ").map(|(_, named)| named);
            assert!(named.is_some_and(|named| named.contains(&text)), "{text}: {ended:?}");
            assert!(ended.err.contains("resumes from the last checkpoint"), "{ended:?}");
        }
    }
    let last = place.checkpoints("run").pop().unwrap();
    let step: usize = last.to_str().unwrap().rsplit('-').next().unwrap().parse().unwrap();
    place.train(&format!("{words} {} --processes 3", step + 2), 0);
    assert_eq!(place.lines("run/steps.jsonl").len(), step + 2);
}

/// Processes that something else has started, as torchrun does: each error is said once, by the one that has it.
#[test]
fn processes_are_joined_by_the_usual_variables() {
    let place = prepared();
    let port = free_port();
    let started = |rank: usize, words: &str, names: [&str; 3]| started_by_others(&place, port, (rank, 2), words, names);
    let both = |words: [&str; 2], names: [&str; 3]| {
        let processes = [started(0, words[0], names), started(1, words[1], names)];
        processes.map(|process| ended(process.wait_with_output().unwrap()))
    };
    let (torchrun, slurm) = (TORCHRUN, ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"]);
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
    assert!(
        first.err.contains("process 1 of this run has failed") && first.err.contains("0.txt: changed"),
        "{first:?}"
    );
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
        ("--device cuda:0,0", "names cuda:0 twice"),
        ("--device cuda:0,cuda:0", "names cuda:0 twice"),
        ("--device cuda:0,cpu", "they must be GPUs, each by its number"),
        ("--gpus x", "cuda:x"),
    ] {
        let all = run(&format!("{words} --steps 1 --output run"));
        let all = if words.contains("--gpus 0") { all } else { all.replacen("--device cpu", "", 1) };
        let refused = place.exits(&all, 2);
        assert!(refused.err.contains(text), "{words}: {refused:?}");
    }
    // No machine has so many.
    let missing =
        ended(place.elmo().args(run("--device cuda:4096 --steps 1 --output run").split_whitespace()).output().unwrap());
    assert!(missing.code == Some(1) && missing.err.contains("cuda:4096"), "{missing:?}");
}

#[test]
fn variables_that_describe_no_run_are_refused() {
    let place = prepared();
    let refused = |words: &str, variables: &[(&str, &str)]| {
        let mut command = place.elmo();
        let refused = ended(command.args(words.split_whitespace()).envs(variables.iter().copied()).output().unwrap());
        assert_eq!(refused.code, Some(2), "{variables:?}: {refused:?}");
        refused.err
    };
    let train = run("--steps 1 --output run");
    let second = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")];
    for (variables, texts) in [
        (&[("RANK", "0"), ("WORLD_SIZE", "many")][..], ["WORLD_SIZE is \"many\"", "unset RANK and WORLD_SIZE"]),
        (&[("WORLD_SIZE", "2")], ["RANK is not set, but WORLD_SIZE is 2", "its number, from 0"]),
        (&[("RANK", "2"), ("WORLD_SIZE", "2")], ["RANK is \"2\", and should be below", "the number of processes, 2"]),
        (&second[..2], ["MASTER_ADDR is not set, but this is process 1 of 2", "the name of the machine of process 0"]),
    ] {
        let error = refused(&train, variables);
        texts.iter().for_each(|text| assert!(error.contains(text), "{text}: {error}"));
    }
    let error = refused(&run("--processes 2 --steps 1 --output run"), &second);
    assert!(error.contains("say that this is process 1 of 2") && error.contains("leave --processes out"), "{error}");
    // A command of one process, which each of them would repeat, also where a run would not find process 0.
    let slurm = [("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "2")];
    for (variables, text) in [
        (&second[..], "says that this is process 1 of 2"),
        (&[("RANK", "0"), ("WORLD_SIZE", "2")], "this is process 0 of 2"),
        (&slurm[..], "this is process 0 of 2"),
        (&[("RANK", "5"), ("WORLD_SIZE", "2")], "below the number of processes, 2"),
    ] {
        let error = refused("eval valid.txt", variables);
        for text in ["elmo eval is one process", text, "env -u RANK -u WORLD_SIZE -u SLURM_PROCID"] {
            assert!(error.contains(text), "{text}: {error}");
        }
    }
    // Variables of somebody else.
    for variables in [&[("RANK", "0")][..], &[("WORLD_SIZE", "4")], &[("RANK", "gold"), ("WORLD_SIZE", "4")]] {
        let mut command = place.elmo();
        let found = ended(command.args(["eval", "valid.txt"]).envs(variables.iter().copied()).output().unwrap());
        assert!(!found.err.contains("one process"), "{variables:?}: {found:?}");
    }
}
