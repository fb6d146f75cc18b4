//! Crashes of a stream at every named point, at random instants, and processes that freeze, lose their partitions and wake
//! up. The short tests of CI are here; [`torture`](super::torture) repeats them with random choices.

use std::{
    fs,
    os::unix::process::ExitStatusExt,
    thread,
    time::{Duration, Instant},
};

use super::{
    broker::{self, Topic},
    case::{Case, Enriched, SHORT_SESSION},
    dataset::Dataset,
    dice::Dice,
    node::Node,
    streaming::{Stream, kill},
};

/// Small files and few messages at a time, so that each point is passed several times.
pub(super) const SMALL: &str = "-X max.partition.fetch.bytes=2000 -X fetch.message.max.bytes=2000";

/// Points of a stream into files, and how often a stream of [`a_case`] can pass each before it reaches it once more. How many
/// messages come at a time depends on the broker, so this is not certain for more than one pass.
pub(super) const FILE_POINTS: [(&str, usize); 10] = [
    ("at_start", 0),
    ("after_poll", 8),
    ("after_decode", 8),
    ("in_embed", 8),
    ("before_write", 8),
    ("before_put", 8),
    ("after_put", 8),
    ("before_hint", 8),
    ("after_hint", 8),
    ("in_drain", 1),
];

/// Points of a transaction. Rows of several batches may be in one.
pub(super) const TRANSACTION_POINTS: [(&str, usize); 4] =
    [("before_transaction", 1), ("in_transaction", 1), ("before_commit", 1), ("after_commit", 1)];

/// Points of a stream into a topic.
pub(super) const TOPIC_POINTS: [(&str, usize); 9] = [
    ("at_start", 0),
    ("after_poll", 8),
    ("after_decode", 8),
    ("in_embed", 8),
    ("before_transaction", 1),
    ("in_transaction", 1),
    ("before_commit", 1),
    ("after_commit", 1),
    ("in_drain", 1),
];

/// A topic of two partitions. A fetch is at least what was produced at once, so that is little.
pub(super) fn a_case(name: &str) -> Case {
    let mut case = Case::new(name, 2, 16);
    (1..12).for_each(|_| case.produce(16));
    case
}

/// How a process ends at a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// It aborts.
    Abort,
    /// It is killed with SIGKILL while it stands there.
    Kill,
}

/// A crash at a point.
#[derive(Debug, Clone, Copy)]
pub(super) struct Crash {
    pub(super) point: &'static str,
    /// How often the point is passed before.
    pub(super) passes: usize,
    pub(super) end: End,
}

impl Crash {
    /// Starts a stream that will crash.
    fn start(self, stream: &Stream, once: bool) -> Node {
        let Self { point, passes, end } = self;
        let action = if end == End::Abort { "return" } else { "return(freeze)" };
        let mut points = format!("stream.{point}={passes}*off->{action}");
        if point == "before_commit" {
            // Until then the broker has the messages, which without this would wait in the producer.
            points.push_str(";stream.in_transaction=sleep(100)");
        }
        let mut command = stream.command();
        command.env("FAILPOINTS", points);
        Node::spawn(command, if once { "--once" } else { "" })
    }

    /// Waits for the crash. False if the stream has come to its end without it.
    fn wait(self, mut node: Node) -> bool {
        let reached = format!("reached stream.{}", self.point);
        broker::eventually("the process reaches the point, or ends", || {
            node.stderr().contains(&reached) || node.child.try_wait().unwrap().is_some()
        });
        match node.child.try_wait().unwrap() {
            Some(ended) if ended.success() => return false,
            Some(ended) => assert_eq!(ended.signal(), Some(libc::SIGABRT), "{self:?}: {}", node.stderr()),
            None => kill(node),
        }
        true
    }
}

/// Waits until something holds while processes run.
pub(super) fn wait_until(what: &str, nodes: &mut [&mut Node], mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        for node in &mut *nodes {
            assert_eq!(node.child.try_wait().unwrap(), None, "a process ended before {what}: {}", node.stderr());
        }
        if began.elapsed() > Duration::from_secs(60) {
            let said: Vec<_> = nodes.iter().map(|node| node.stderr()).collect();
            panic!("never came true: {what}; {}", said.join("\n\n"));
        }
        // To look takes processor time from the processes.
        thread::sleep(Duration::from_millis(200));
    }
}

/// Ends processes in order. One that has not begun says so, or has no handler of signals yet.
pub(super) fn end_in_order(nodes: Vec<Node>) {
    nodes.iter().for_each(|node| node.signal("-TERM"));
    for mut node in nodes {
        let (ended, said) = (node.wait(), node.stderr());
        let in_order = match ended {
            Some(130) => {
                said.contains("interrupted before anything was written") || said.trim().ends_with("error: interrupted")
            }
            Some(code) => code == 0,
            None => said.is_empty(),
        };
        assert!(in_order, "{ended:?}: {said}");
    }
}

/// A stream into files crashes; the same command then reads to the end. Returns whether the point was reached.
pub(super) fn in_files(case: &Case, undisturbed: &Dataset, name: &str, crash: Crash) -> bool {
    let stream = case.stream(name).with("--rows-per-file 10").with(SMALL);
    let crashed = crash.wait(crash.start(&stream, true));
    stream.drain();
    case.check_same(&stream.dataset(), undisturbed);
    crashed
}

/// As [`in_files`], of a stream into a topic. Before a commit, messages are on the broker, where the crash must abort them.
pub(super) fn in_topic(case: &Case, undisturbed: &Enriched, name: &str, crash: Crash) -> bool {
    let target = case.broker.topic(name, case.topic.partitions);
    let stream = case.stream_to(name, &target).with(SMALL);
    let crashed = crash.wait(crash.start(&stream, true));
    stream.drain();
    let enriched = case.enriched(&target);
    case.check_enriched(&enriched, undisturbed);
    if crashed && crash.point == "before_commit" {
        let written = case.broker.read_uncommitted(&target).len();
        assert!(written > enriched.len(), "nothing was aborted: {crash:?}, {written} of {} messages", enriched.len());
    }
    crashed
}

/// A member crashes when a second one joins and partitions are taken from it, while messages come. Returns their number.
pub(super) fn in_revocation(end: End) -> usize {
    let mut case = Case::new("revoked", 4, 400);
    let crash = Crash { point: "in_revoke", passes: 0, end };
    let stream = case.stream("out").with("--rows-per-file 20 --max-age 1s");
    let mut first = crash.start(&stream, false);
    wait_until("the first member writes", &mut [&mut first], || !stream.dataset().objects.is_empty());
    let mut second = stream.start();
    broker::eventually("partitions are taken from the first member", || {
        case.produce(20);
        first.stderr().contains("reached") || first.child.try_wait().unwrap().is_some()
    });
    assert!(crash.wait(first));
    case.produce(100);
    wait_for_rows(&case, &stream, &mut [&mut second]);
    end_in_order(vec![second]);
    case.check_same(&stream.dataset(), &case.undisturbed());
    case.written.len()
}

/// Waits until running streams have written all rows.
pub(super) fn wait_for_rows(case: &Case, stream: &Stream, nodes: &mut [&mut Node]) {
    wait_until("everything is written", nodes, || stream.dataset().table_rows() >= case.written.len());
}

/// Kills the processes of a stream at random instants while messages come. Every other one is let work first, since the
/// start of a process takes longer than its work.
fn kill_often(case: &mut Case, stream: &Stream, kills: usize, dice: &mut Dice) {
    for _ in 0..kills {
        let mut node = stream.start();
        case.produce(60);
        if dice.below(4) == 0 {
            thread::sleep(dice.millis(0..1500));
        } else {
            node.wait_for("assigned");
            thread::sleep(dice.millis(0..700));
        }
        kill(node);
    }
}

/// Kills a stream into files. Returns the number of messages.
pub(super) fn kills_into_files(kills: usize, dice: &mut Dice) -> usize {
    let mut case = Case::new("killed", 4, 200);
    let stream = case.stream("out").with("-v --rows-per-file 20 --max-age 300ms");
    kill_often(&mut case, &stream, kills, dice);
    stream.drain();
    case.check_same(&stream.dataset(), &case.undisturbed());
    case.written.len()
}

/// Kills a stream into a topic. Returns the number of messages.
pub(super) fn kills_into_topic(kills: usize, dice: &mut Dice) -> usize {
    let mut case = Case::new("killed-transactions", 4, 200);
    let target = case.broker.topic("killed-out", 4);
    let stream = case.stream_to("out", &target).with("-v");
    kill_often(&mut case, &stream, kills, dice);
    stream.drain();
    case.check_enriched(&case.enriched(&target), &case.undisturbed_messages());
    case.written.len()
}

/// A process that stands still at a point of a stream into files, loses its partitions to another one, and wakes up.
pub(super) fn frozen_in_files(case: &mut Case, name: &str, point: &str) {
    let stream = case.stream(name).with("-v --rows-per-file 10 --max-age 500ms");
    let mut late = start_frozen(&stream, point);
    // Its session ends after a second; then the other one has all partitions.
    stream.drain();
    late.signal("-CONT");
    // It drops what it had, joins again, and goes on.
    case.produce(30);
    wait_for_rows(case, &stream, &mut [&mut late]);
    end_in_order(vec![late]);
    case.check_same(&stream.dataset(), &case.undisturbed());
}

/// The same of a stream into a topic.
pub(super) fn frozen_in_topic(case: &mut Case, target: &Topic, name: &str, point: &str) {
    let stream = case.stream_to(name, target).with(SMALL).with("-v");
    let mut late = start_frozen(&stream, point);
    stream.drain();
    late.signal("-CONT");
    case.produce(30);
    wait_until("everything is written", &mut [&mut late], || case.enriched(target).len() >= case.written.len());
    end_in_order(vec![late]);
    case.check_enriched(&case.enriched(target), &case.undisturbed_messages());
}

fn start_frozen(stream: &Stream, point: &str) -> Node {
    let mut command = stream.command();
    command.env("FAILPOINTS", format!("stream.{point}=1*return(freeze)->off"));
    let mut node = Node::spawn(command, "");
    node.wait_for(&format!("reached stream.{point}"));
    let status = format!("/proc/{}/status", node.child.id());
    broker::eventually("the process is stopped", || fs::read_to_string(&status).unwrap().contains("State:\tT"));
    node
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn of_two_processes_with_one_name_the_older_one_ends() {
    let mut case = Case::new("namesakes", 2, 100);
    let target = case.broker.topic("namesakes-out", 2);
    let stream = case.stream_to("out", &target).with("-v -X group.instance.id=elmo-0");
    let mut older = stream.start();
    wait_until("the first one writes", &mut [&mut older], || !case.enriched(&target).is_empty());
    let mut newer = stream.start();
    broker::eventually("the older one ends", || {
        case.produce(20);
        older.child.try_wait().unwrap().is_some()
    });
    let said = older.stderr();
    assert_eq!(older.wait(), Some(5), "{said}");
    assert!(said.contains("group.instance.id"), "{said}");
    wait_until("the newer one goes on", &mut [&mut newer], || case.enriched(&target).len() >= case.written.len());
    end_in_order(vec![newer]);
    case.check_enriched(&case.enriched(&target), &case.undisturbed_messages());
}

/// Every named point, after one pass, with SIGABRT or with SIGKILL.
#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_crash_at_any_point_loses_and_doubles_nothing() {
    let case = a_case("crashes");
    let undisturbed = case.undisturbed();
    let run = |(index, (point, most)): (usize, &(&'static str, usize))| {
        let end = if index.is_multiple_of(3) { End::Kill } else { End::Abort };
        assert!(in_files(&case, &undisturbed, point, Crash { point, passes: 1.min(*most), end }), "{point}");
    };
    thread::scope(|scope| {
        for half in 0..2 {
            scope.spawn(move || FILE_POINTS.iter().enumerate().skip(half).step_by(2).for_each(run));
        }
    });
}

/// The broker keeps the transaction, and with it the group's offsets, for longer than the first questions may take.
#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn the_transaction_of_a_crash_is_waited_for() {
    let case = Case::new("kept", 1, 40);
    let target = case.broker.topic("kept-out", 1);
    let stream = case.patient_stream_to("kept", &target).with("-X transaction.timeout.ms=23000").with(SHORT_SESSION);
    let crash = Crash { point: "before_commit", passes: 0, end: End::Abort };
    assert!(crash.wait(crash.start(&stream, true)));
    stream.drain();
    case.check_enriched(&case.enriched(&target), &case.undisturbed_messages());
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_crash_while_partitions_are_taken_away_loses_and_doubles_nothing() {
    in_revocation(End::Abort);
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_crash_at_any_point_of_a_transaction_loses_and_doubles_nothing() {
    let case = a_case("transactions");
    let undisturbed = case.undisturbed_messages();
    thread::scope(|scope| {
        for (point, _) in TOPIC_POINTS {
            let (case, undisturbed) = (&case, &undisturbed);
            let end = if point == "in_transaction" { End::Kill } else { End::Abort };
            let crash = Crash { point, passes: 0, end };
            scope.spawn(move || assert!(in_topic(case, undisturbed, point, crash), "{point}"));
        }
    });
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_process_that_froze_and_lost_its_partitions_goes_on_behind_the_others() {
    let mut case = Case::new("frozen", 2, 60);
    frozen_in_files(&mut case, "out", "before_put");
}

/// Its partitions are lost, and nobody else has them.
#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_process_that_froze_reads_to_the_end_all_the_same() {
    let case = Case::new("frozen-alone", 2, 60);
    let stream = case.stream("out");
    let mut late = start_frozen(&case.stream("out").with("--once"), "before_put");
    let (group, broker) = (case.group("out"), &case.broker);
    broker::eventually("the group has forgotten it", || broker.members(&group) == 0);
    late.signal("-CONT");
    assert_eq!(late.wait(), Some(0), "{}", late.stderr());
    case.check_same(&stream.dataset(), &case.undisturbed());
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_process_that_froze_in_a_transaction_goes_on_behind_the_others() {
    thread::scope(|scope| {
        for point in ["before_transaction", "before_commit"] {
            scope.spawn(move || {
                let mut case = Case::new("frozen-transaction", 2, 60);
                let target = case.broker.topic("frozen-out", 2);
                frozen_in_topic(&mut case, &target, "out", point);
            });
        }
    });
}
