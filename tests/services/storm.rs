//! Processes of a stream that join and leave without a pause, in order or killed or frozen, while messages come.

use std::thread;

use super::{
    broker::Topic,
    case::Case,
    crashes::{end_in_order, wait_for_rows, wait_until},
    dice::Dice,
    node::Node,
    streaming::{self, Stream, kill},
};

/// Processes at a time; more while some leave.
const MEMBERS: usize = 3;
const PARTITIONS: i32 = 12;
/// Messages between two events.
const MESSAGES: usize = 24;

/// How the processes are members of their group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Membership {
    /// Cooperative rebalances, by the classic protocol.
    Cooperative,
    /// The protocol of KIP-848. The broker alone has its timeouts.
    Consumer,
    /// Static members: the broker waits for those that left.
    Static,
}

impl Membership {
    fn words(self, slot: usize) -> String {
        match self {
            Self::Cooperative => "-X session.timeout.ms=1000 -X heartbeat.interval.ms=300".to_owned(),
            Self::Consumer => "-X group.protocol=consumer".to_owned(),
            Self::Static => {
                let short = "-X session.timeout.ms=3000 -X heartbeat.interval.ms=300";
                format!("{short} -X group.instance.id=elmo-{slot}")
            }
        }
    }
}

/// What happened in a storm.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Tally {
    pub(super) joins: usize,
    pub(super) ended: usize,
    pub(super) killed: usize,
    pub(super) frozen: usize,
    pub(super) messages: usize,
}

struct Member {
    node: Node,
    frozen: bool,
}

struct Storm<'d> {
    case: Case,
    /// Where the messages go, unless to files.
    target: Option<Topic>,
    membership: Membership,
    dice: &'d mut Dice,
    members: [Option<Member>; MEMBERS],
    /// Told to end, and not yet gone.
    leaving: Vec<Node>,
    tally: Tally,
}

/// Where messages go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Into {
    Files,
    Topic,
}

/// Lets processes join and leave `events` times, then waits until those that are left have written everything.
pub(super) fn storm(membership: Membership, into: Into, events: usize, dice: &mut Dice) -> Tally {
    let case = Case::new("storm", PARTITIONS, 10 * MESSAGES);
    let target = (into == Into::Topic).then(|| case.broker.topic("storm-out", PARTITIONS));
    let members = [const { None }; MEMBERS];
    let mut storm = Storm { case, target, membership, dice, members, leaving: Vec::new(), tally: Tally::default() };
    for slot in 0..MEMBERS {
        storm.join(slot);
    }
    for _ in 0..events {
        storm.event();
        storm.case.produce(MESSAGES);
        thread::sleep(storm.dice.millis(100..900));
        storm.nobody_failed();
    }
    storm.calm()
}

impl Storm<'_> {
    fn stream(&self, slot: usize) -> Stream {
        let stream = match &self.target {
            None => self.case.patient_stream("out", "out").with("--rows-per-file 30 --max-age 500ms"),
            Some(target) => self.case.patient_stream_to("out", target),
        };
        stream.with("-v").with(&self.membership.words(slot))
    }

    fn join(&mut self, slot: usize) {
        self.tally.joins += 1;
        let node = self.stream(slot).start();
        self.members[slot] = Some(Member { node, frozen: false });
    }

    /// A member joins, leaves, freezes or wakes up.
    fn event(&mut self) {
        let slot = self.dice.below(MEMBERS);
        match self.members[slot].take() {
            None => self.join(slot),
            Some(Member { node, frozen: true }) => {
                node.signal("-CONT");
                self.tally.joins += 1;
                self.members[slot] = Some(Member { node, frozen: false });
            }
            Some(Member { node, frozen: false }) => match self.dice.below(5) {
                0 | 1 => self.end(node),
                2 | 3 => {
                    self.tally.killed += 1;
                    kill(node);
                }
                _ => {
                    self.tally.frozen += 1;
                    node.signal("-STOP");
                    self.members[slot] = Some(Member { node, frozen: true });
                }
            },
        }
    }

    /// Ends a member in order. Another one with its name would fence it, so a static member is waited for.
    fn end(&mut self, node: Node) {
        self.tally.ended += 1;
        match self.membership {
            Membership::Static => end_in_order(vec![node]),
            _ => {
                node.signal("-TERM");
                self.leaving.push(node);
            }
        }
    }

    fn nobody_failed(&mut self) {
        for Member { node, .. } in self.members.iter_mut().flatten() {
            let ended = node.child.try_wait().unwrap();
            assert_eq!(ended, None, "{:?}, {:?}: {}", self.membership, self.tally, node.stderr());
        }
    }

    fn calm(mut self) -> Tally {
        for slot in 0..MEMBERS {
            match &mut self.members[slot] {
                None => self.join(slot),
                Some(Member { node, frozen }) => {
                    if std::mem::take(frozen) {
                        node.signal("-CONT");
                    }
                }
            }
        }
        let stream = self.stream(0);
        let Self { case, target, mut leaving, members, mut tally, .. } = self;
        let mut members: Vec<_> = members.into_iter().flatten().map(|member| member.node).collect();
        let mut running: Vec<_> = members.iter_mut().collect();
        match &target {
            None => wait_for_rows(&case, &stream, &mut running),
            Some(target) => {
                wait_until("everything is written", &mut running, || case.enriched(target).len() >= case.written.len())
            }
        }
        leaving.extend(members);
        end_in_order(leaving);
        match &target {
            None => case.check_same(&stream.dataset(), &case.undisturbed()),
            Some(target) => case.check_enriched(&case.enriched(target), &case.undisturbed_messages()),
        }
        tally.messages = case.written.len();
        tally
    }
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_storm_of_rebalances_loses_and_doubles_nothing() {
    storm(Membership::Cooperative, Into::Files, 10, &mut Dice::new(1));
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_storm_of_rebalances_by_the_new_protocol_loses_and_doubles_no_transaction() {
    storm(Membership::Consumer, Into::Topic, 6, &mut Dice::new(2));
}

/// docs/stream.md, "Upgrade without a gap".
#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn static_members_keep_their_partitions_over_a_rolling_restart() {
    let mut case = Case::new("static", PARTITIONS, 240);
    let start = |slot: usize| {
        let words = "-v --max-age 500ms --metrics 127.0.0.1:0 -X session.timeout.ms=30000";
        let stream = case.patient_stream("out", "out").with(words);
        let mut node = stream.with(&format!("-X group.instance.id=elmo-{slot}")).start();
        let address = streaming::metrics_address(&mut node);
        (node, address)
    };
    let mut members: Vec<_> = (0..MEMBERS).map(start).collect();
    let has_share = |address: &str| {
        let partitions = || streaming::metric(address, "elmo_stream_partitions", "");
        super::broker::eventually("a member has its share", || partitions() == f64::from(PARTITIONS) / MEMBERS as f64);
    };
    let rebalances = |address: &str| streaming::metric(address, "elmo_stream_rebalances_total", "");
    members.iter().for_each(|(_, address)| has_share(address));
    let before: Vec<_> = members.iter().map(|(_, address)| rebalances(address)).collect();
    for slot in 0..MEMBERS {
        let restarted = {
            let (node, _) = members.remove(slot);
            end_in_order(vec![node]);
            start(slot)
        };
        has_share(&restarted.1);
        members.insert(slot, restarted);
        for other in (0..MEMBERS).filter(|other| *other > slot) {
            assert_eq!(rebalances(&members[other].1), before[other], "member {other} when {slot} was restarted");
        }
    }
    let stream = case.patient_stream("out", "out");
    case.produce(120);
    let mut nodes: Vec<_> = members.iter_mut().map(|(node, _)| node).collect();
    wait_for_rows(&case, &stream, &mut nodes);
    end_in_order(members.into_iter().map(|(node, _)| node).collect());
    case.check_same(&stream.dataset(), &case.undisturbed());
}
