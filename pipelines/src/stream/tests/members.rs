//! Random histories of a group: two or three live members share the partitions. Partitions go from one to another, in order or
//! from one that is not heard of and goes on working; members stop, are killed and return; brokers and the store fail.
//! Whatever happened: each message is in the output once and in order.

use std::{collections::BTreeSet, time::Duration};

use proptest::prelude::*;

use super::{
    histories::{LONG, check, read_rest},
    process::{GRACE, Process, Settings},
    world::{World, partition},
};
use crate::stream::clock::{self, simulated};

const PARTITIONS: i32 = 3;

/// What happens next. The number of a member is taken modulo their count.
#[derive(Debug, Clone)]
enum Step {
    Produce {
        partition: i32,
        messages: u64,
    },
    /// A member gets a partition after the one that had it has given it away.
    Give {
        partition: i32,
        to: usize,
    },
    /// A member gets a partition of one that the group has not heard of for long, and that knows nothing of it.
    Steal {
        partition: i32,
        to: usize,
    },
    /// Those hear what they have lost.
    Hear,
    /// All members poll for some time.
    Poll(u64),
    Brokers {
        down: bool,
    },
    /// So many of a hundred requests to the store fail.
    Faults(u64),
    /// A member stops, and starts again.
    Stop(usize),
    /// A member is killed, and starts again.
    Kill(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let (number, to) = (|| 0..PARTITIONS, || 0_usize..3);
    prop_oneof![
        8 => (number(), 1_u64..12).prop_map(|(partition, messages)| Step::Produce { partition, messages }),
        8 => (number(), to()).prop_map(|(partition, to)| Step::Give { partition, to }),
        4 => (number(), to()).prop_map(|(partition, to)| Step::Steal { partition, to }),
        2 => Just(Step::Hear),
        8 => (100_u64..4000).prop_map(Step::Poll),
        1 => any::<bool>().prop_map(|down| Step::Brokers { down }),
        2 => prop_oneof![Just(0), 10_u64..60].prop_map(Step::Faults),
        1 => to().prop_map(Step::Stop),
        1 => to().prop_map(Step::Kill),
    ]
}

/// A group as it runs.
struct Group {
    world: World,
    settings: Settings,
    members: Vec<Process>,
    /// Members that have lost a partition, and have not heard of it.
    unaware: BTreeSet<(usize, i32)>,
}

impl Group {
    async fn new(world: World, seed: u64, settings: Settings) -> Self {
        let settings = Settings { once: false, ..settings };
        let mut members = Vec::new();
        for _ in 0..2 + seed % 2 {
            members.push(Process::start(&world, &settings).await);
        }
        Self { world, settings, members, unaware: BTreeSet::new() }
    }

    async fn apply(&mut self, step: &Step) {
        match step {
            Step::Produce { partition: number, messages } => {
                self.world.with(|outside| outside.log(&partition(*number)).produce(*messages, 0));
            }
            Step::Give { partition, to } => self.give(*partition, to % self.members.len(), false).await,
            Step::Steal { partition, to } => self.give(*partition, to % self.members.len(), true).await,
            Step::Hear => {
                for (member, number) in std::mem::take(&mut self.unaware) {
                    self.members[member].consumer.revoke(&[partition(number)], true).await;
                }
            }
            Step::Poll(millis) => self.poll(Duration::from_millis(*millis)).await,
            Step::Brokers { down } => self.world.with(|outside| outside.down = *down),
            Step::Faults(percent) => self.world.with(|outside| outside.faults = *percent),
            Step::Stop(member) => {
                let member = member % self.members.len();
                self.stop(member).await;
                self.restart(member).await;
            }
            Step::Kill(member) => self.restart(member % self.members.len()).await,
        }
    }

    /// The member that has a partition, as far as the group knows.
    fn owner(&self, number: i32) -> Option<usize> {
        let has = |member: &usize| self.members[*member].consumer.owned().contains(&partition(number));
        (0..self.members.len()).filter(has).find(|member| !self.unaware.contains(&(*member, number)))
    }

    async fn give(&mut self, number: i32, to: usize, stolen: bool) {
        let source = [partition(number)];
        if !self.world.has(&source[0]) {
            return;
        }
        let owner = self.owner(number);
        if owner == Some(to) {
            return;
        }
        if let Some(owner) = owner {
            let consumer = &mut self.members[owner].consumer;
            match stolen {
                // Brokers refuse its commits from now on.
                true => {
                    consumer.disown(&source);
                    self.unaware.insert((owner, number));
                }
                false => consumer.revoke(&source, false).await,
            }
        }
        if self.unaware.remove(&(to, number)) {
            self.members[to].consumer.revoke(&source, true).await;
        }
        self.members[to].consumer.assign(&source).await;
    }

    async fn poll(&mut self, time: Duration) {
        let end = clock::now() + time;
        while clock::now() < end {
            self.members.iter_mut().for_each(|member| member.consumer.round(10));
            clock::sleep(Duration::from_millis(200)).await;
        }
    }

    async fn stop(&mut self, member: usize) {
        let (process, began) = (&mut self.members[member], clock::now());
        process.stop();
        let ended = process.end(LONG).await;
        let took = clock::now() - began;
        if !matches!(ended, Some(Ok(_))) || took > GRACE + Duration::from_millis(500) {
            self.world.wrong(format!("member {member} stopped after {took:?}: {ended:?}"));
        }
    }

    async fn restart(&mut self, member: usize) {
        self.unaware.retain(|(unaware, _)| *unaware != member);
        let process = Process::start(&self.world, &self.settings).await;
        std::mem::replace(&mut self.members[member], process).kill(&self.world).await;
    }

    async fn finish(mut self) -> Vec<String> {
        self.world.with(|outside| (outside.down, outside.faults) = (false, 0));
        for member in 0..self.members.len() {
            if self.members[member].has_ended() {
                self.world.wrong(format!("member {member} ended although nobody told it to"));
            }
            self.stop(member).await;
        }
        for process in self.members {
            process.kill(&self.world).await;
        }
        read_rest(&self.world, &self.settings).await
    }
}

async fn run(seed: u64, settings: Settings, steps: Vec<Step>) -> Vec<String> {
    let mut group = Group::new(World::inhabited(seed, PARTITIONS), seed, settings).await;
    for step in &steps {
        group.apply(step).await;
        group.poll(Duration::from_millis(200)).await;
    }
    group.finish().await
}

/// Both have read the same messages, and publish them when their files are a minute old.
#[test]
fn of_two_members_that_believe_to_own_a_partition_one_publishes() {
    let settings = Settings { rows_per_file: 100, ..Settings::default() };
    let wrong = simulated::run(async {
        let mut group = Group::new(World::new(0, PARTITIONS), 0, settings).await;
        group.world.with(|outside| outside.slow = 0);
        let produce = |messages| Step::Produce { partition: 0, messages };
        let give = Step::Give { partition: 0, to: 0 };
        for step in [give, produce(3), Step::Poll(5000), Step::Steal { partition: 0, to: 1 }, Step::Poll(5000)] {
            group.apply(&step).await;
        }
        assert_eq!(group.members.iter().filter(|member| member.consumer.owned() == [partition(0)]).count(), 2);
        assert_eq!(group.world.dataset(&partition(0)).await.0, [0_i64; 0]);
        group.apply(&Step::Poll(90_000)).await;
        assert_eq!(group.world.dataset(&partition(0)).await.0, [0, 1, 2]);
        let conflicts = "elmo_stream_publish_conflicts_total{kind=\"foreign\"} 1\n";
        assert_eq!(group.members.iter().filter(|member| member.metrics.encode().contains(conflicts)).count(), 1);
        group.finish().await
    });
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn whatever_members_do_each_message_is_in_the_output_once() {
    check(step(), |seed, settings, steps| simulated::run(run(seed, settings, steps)));
}
