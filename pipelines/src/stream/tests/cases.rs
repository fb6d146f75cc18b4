//! Single histories: defects that were found, and promises that random histories reach seldom.

use std::time::Duration;

use super::{
    process::{GRACE, Process, Settings},
    world::{Outside, World, partition},
};
use crate::stream::{
    TopicPartition,
    clock::{self, simulated},
    source::{Event, Start},
};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);
const LONG: Duration = Duration::from_secs(600);

/// A process, and what happened before its case begins.
struct Case {
    world: World,
    settings: Settings,
    assigned: Vec<TopicPartition>,
}

/// A process of these settings, in a world of two partitions whose requests take no time.
fn case(settings: Settings) -> Case {
    let world = World::new(1, 2);
    world.with(|outside| outside.slow = 0);
    Case { world, settings, assigned: Vec::new() }
}

/// A process that writes files of up to five rows.
fn plain() -> Case {
    case(Settings::default())
}

impl Case {
    fn produced(self, number: i32, messages: u64) -> Self {
        produce(&self.world, number, messages);
        self
    }

    fn outside<T>(self, change: impl FnOnce(&mut Outside) -> T) -> Self {
        self.world.with(change);
        self
    }

    /// These partitions are assigned to it.
    fn assigned(mut self, numbers: &[i32]) -> Self {
        self.assigned = numbers.iter().copied().map(partition).collect();
        self
    }

    /// Runs the case, after which nothing may be wrong and all memory must be returned.
    fn run(self, test: impl AsyncFnOnce(&World, Process) -> Process) {
        let Self { world, settings, assigned } = self;
        let wrong = simulated::run(async {
            let mut process = Process::start(&world, &settings).await;
            if !assigned.is_empty() {
                process.consumer.assign(&assigned).await;
            }
            test(&world, process).await.kill(&world).await;
            world.with(|outside| std::mem::take(&mut outside.wrong))
        });
        assert!(wrong.is_empty(), "{wrong:#?}");
    }
}

fn produce(world: &World, number: i32, messages: u64) {
    world.with(|outside| outside.log(&partition(number)).produce(messages, 0));
}

async fn ends_in_order(process: &mut Process) {
    let ended = process.end(LONG).await;
    assert!(matches!(ended, Some(Ok(true))), "{ended:?}");
}

/// The offsets in the files of a partition.
async fn rows(world: &World, number: i32) -> Vec<i64> {
    world.dataset(&partition(number)).await.0
}

fn offsets(end: i64) -> Vec<i64> {
    (0..end).collect()
}

const ONCE: Settings = Settings {
    to_topic: false,
    once: true,
    skips: false,
    memory: 64 << 20,
    rows_per_file: 5,
    max_age: Duration::from_secs(60),
    start: Start::Beginning,
    on_gap: crate::stream::OnGap::Skip,
};

#[test]
fn a_partition_that_was_read_is_given_away_at_once() {
    case(ONCE).produced(0, 7).produced(1, 3).run(async |world, mut process| {
        process.consumer.held.insert(partition(1));
        process.consumer.assign(&[partition(0), partition(1)]).await;
        process.poll_for(20 * SECOND).await;
        assert!(!process.has_ended(), "partition 1 is not read");
        assert_eq!(rows(world, 0).await, offsets(7));
        let began = clock::now();
        process.consumer.revoke(&[partition(0)], false).await;
        assert!(clock::now() - began < SECOND);
        process.consumer.assign(&[]).await;
        process.consumer.held.clear();
        ends_in_order(&mut process).await;
        process
    });
}

/// A group with an eager protocol takes all partitions from a member before it says which it has next; one that was not heard
/// of for long loses all, and gets them again.
#[test]
fn reading_once_does_not_end_between_two_assignments() {
    for lost in [false, true] {
        case(ONCE).produced(0, 7).run(async |world, mut process| {
            process.consumer.held.insert(partition(0));
            process.consumer.assign(&[partition(0)]).await;
            process.consumer.revoke(&[partition(0)], lost).await;
            process.poll_for(20 * SECOND).await;
            assert!(!process.has_ended(), "it is not read");
            process.consumer.held.clear();
            process.consumer.assign(&[partition(0)]).await;
            ends_in_order(&mut process).await;
            assert_eq!(rows(world, 0).await, offsets(7));
            process
        });
    }
}

/// Of two members that read once, the second one is given a partition of the first, and the first may be done with its other
/// one before that is read: then it comes back when the second leaves.
#[test]
fn reading_once_waits_for_partitions_that_may_return() {
    case(ONCE).produced(0, 7).produced(1, 7).run(async |world, mut process| {
        process.consumer.held.insert(partition(1));
        process.consumer.assign(&[partition(0), partition(1)]).await;
        process.consumer.revoke(&[partition(1)], false).await;
        process.consumer.assign(&[]).await;
        process.poll_for(5 * SECOND).await;
        assert_eq!(rows(world, 0).await, offsets(7));
        assert!(!process.has_ended(), "partition 1 may return");
        process.consumer.held.clear();
        process.consumer.assign(&[partition(1)]).await;
        ends_in_order(&mut process).await;
        assert_eq!(rows(world, 1).await, offsets(7));
        process
    });
}

#[test]
fn a_member_without_partitions_is_ready_and_ends() {
    for silent in [false, true] {
        case(Settings { once: false, ..ONCE }).run(async |world, mut process| {
            process.poll_for(10 * SECOND).await;
            assert!(process.health.ready().is_err(), "the group has not accepted it");
            match silent {
                true => process.consumer.join_silently(),
                false => process.consumer.assign(&[]).await,
            }
            process.poll_for(20 * SECOND).await;
            assert_eq!(process.health.ready(), Ok(()));
            process.stop();
            ends_in_order(&mut process).await;
            process.kill(world).await;

            let mut process = Process::start(world, &ONCE).await;
            match silent {
                true => process.consumer.join_silently(),
                false => process.consumer.assign(&[]).await,
            }
            ends_in_order(&mut process).await;
            process
        });
    }
}

/// A pause drops what was fetched ahead, so that nothing waits although nothing was read. Publishing takes longer than the time
/// after which a partition with nothing left counts as read.
#[test]
fn reading_once_does_not_end_while_memory_is_short() {
    case(Settings { memory: 8 << 10, rows_per_file: 1000, ..ONCE }).produced(0, 300).assigned(&[0]).run(
        async |world, mut process| {
            world.with(|outside| outside.slow = 20_000);
            assert!(matches!(process.end(LONG * 10).await, Some(Ok(true))));
            assert_eq!(rows(world, 0).await, offsets(300));
            process
        },
    );
}

/// By hand: the consumer waits 30 s, so that it gets its answer after 20 s, whatever a task waits for.
#[test]
fn a_task_that_is_stuck_does_not_keep_its_partition() {
    for (stage, puts) in [(true, false), (false, true)] {
        plain()
            .produced(0, 7)
            .outside(|outside| (outside.stage_hangs, outside.puts_hang) = (stage, puts))
            .assigned(&[0])
            .run(async |_, mut process| {
                process.poll_for(5 * SECOND).await;
                let began = clock::now();
                process.consumer.revoke(&[partition(0)], false).await;
                let took = clock::now() - began;
                assert!(took >= 20 * SECOND && took < 21 * SECOND, "{took:?}");
                assert!(process.metrics.encode().contains("elmo_stream_queue_rows 0\n"));
                process
            });
    }
}

/// Rows that wait in an open file, or are in the stage, are published before the partition goes to another member, if the time
/// that the consumer waits is enough.
#[test]
fn what_was_read_is_published_before_a_partition_is_given_away() {
    for to_topic in [false, true] {
        case(Settings { to_topic, rows_per_file: 100, ..Settings::default() }).assigned(&[0]).run(
            async |world, mut process| {
                produce(world, 0, 3);
                process.poll_for(5 * SECOND).await;
                world.with(|outside| (outside.slow, outside.stage_takes) = (5000, 5000));
                produce(world, 0, 4);
                process.poll_for(SECOND).await;
                process.consumer.revoke(&[partition(0)], false).await;
                let read = if to_topic { published(world) } else { rows(world, 0).await };
                assert_eq!(read, offsets(7));
                assert_eq!(world.with(|outside| outside.committed[&partition(0)].0), 7);
                process
            },
        );
    }
}

#[test]
fn a_consumer_that_ends_ends_the_stream_in_time_whatever_a_task_waits_for() {
    plain().produced(0, 7).outside(|outside| outside.stage_hangs = true).assigned(&[0]).run(async |_, mut process| {
        process.poll_for(5 * SECOND).await;
        process.consumer.die();
        let began = clock::now();
        let ended = process.end(LONG).await.expect("it ends");
        assert!(ended.unwrap_err().to_string().contains("the consumer has ended"));
        assert!(clock::now() - began < GRACE);
        process
    });
}

/// By hand: publishing has four fifths of the 25 s; the rest is for leaving the group.
#[test]
fn a_store_that_does_not_answer_does_not_delay_the_end() {
    plain().produced(0, 7).outside(|outside| outside.puts_hang = true).assigned(&[0]).run(async |_, mut process| {
        process.poll_for(5 * SECOND).await;
        let began = clock::now();
        process.stop();
        assert!(matches!(process.end(LONG).await, Some(Ok(false))), "rows were read and not published");
        let took = clock::now() - began;
        assert!(took >= 20 * SECOND && took < 21 * SECOND, "{took:?}");
        process
    });
}

#[test]
fn a_stop_does_not_give_a_revoked_partition_more_time() {
    plain().produced(0, 7).outside(|outside| outside.puts_hang = true).assigned(&[0]).run(async |_, mut process| {
        process.poll_for(5 * SECOND).await;
        let began = clock::now();
        let answer = process.consumer.begin_to_revoke(&[partition(0)], false).unwrap();
        clock::sleep(10 * SECOND).await;
        process.stop();
        clock::sleep(11 * SECOND).await;
        assert!(matches!(answer.take(), Ok(Some(()))), "after {:?}", clock::now() - began);
        assert!(matches!(process.end(LONG).await, Some(Ok(false))));
        process
    });
}

/// A partition returns while its first task still tries to publish: that one ends, and each revocation has its answer.
#[test]
fn revocations_of_two_assignments_are_told_apart() {
    plain().produced(0, 7).outside(|outside| outside.puts_hang = true).assigned(&[0]).run(async |_, mut process| {
        process.poll_for(5 * SECOND).await;
        let first = process.consumer.begin_to_revoke(&[partition(0)], false).unwrap();
        clock::sleep(SECOND).await;
        assert!(matches!(first.take(), Ok(None)));
        process.consumer.assign(&[partition(0)]).await;
        assert!(matches!(first.take(), Ok(Some(()))));
        process.poll_for(5 * SECOND).await;
        let second = process.consumer.begin_to_revoke(&[partition(0)], false).unwrap();
        clock::sleep(19 * SECOND).await;
        assert!(matches!(second.take(), Ok(None)));
        clock::sleep(2 * SECOND).await;
        assert!(matches!(second.take(), Ok(Some(()))));
        process
    });
}

#[test]
fn a_partition_that_was_not_begun_is_no_loss() {
    plain().produced(0, 7).run(async |world, mut process| {
        world.with(|outside| outside.gets_hang = true);
        process.consumer.assign(&[partition(0)]).await;
        process.stop();
        ends_in_order(&mut process).await;
        process
    });
}

#[test]
fn brokers_that_do_not_answer_are_asked_until_they_do() {
    plain().produced(0, 7).run(async |world, mut process| {
        world.with(|outside| outside.down = true);
        // It waits for the start, and then goes on without.
        process.consumer.assign(&[partition(0)]).await;
        process.poll_for(100 * SECOND).await;
        assert_eq!(process.consumer.next(&partition(0)), None);
        world.with(|outside| outside.down = false);
        process.poll_for(100 * SECOND).await;
        assert_eq!(rows(world, 0).await, offsets(7));
        process
    });
}

/// By hand: the file would be published after an hour.
#[test]
fn a_file_that_takes_the_memory_of_its_partition_is_published() {
    case(Settings { memory: 16 << 10, rows_per_file: 10_000, max_age: HOUR, ..Settings::default() })
        .produced(0, 400)
        .assigned(&[0, 1])
        .run(async |world, mut process| {
            process.poll_for(120 * SECOND).await;
            let published = rows(world, 0).await;
            assert!(published.len() >= 200, "{published:?}");
            process.stop();
            ends_in_order(&mut process).await;
            process
        });
}

/// By hand: a message counts 512 bytes beside its key, its value and its headers.
#[test]
fn messages_that_wait_for_a_transaction_count_against_the_memory() {
    case(Settings { to_topic: true, ..Settings::default() }).assigned(&[0]).run(async |world, mut process| {
        produce(world, 0, 40);
        world.with(|outside| outside.commits_hang = true);
        process.poll_for(10 * SECOND).await;
        assert!(process.budget.used() >= 40 * 512, "{}", process.budget.used());
        world.with(|outside| outside.commits_hang = false);
        process.poll_for(10 * SECOND).await;
        assert_eq!((process.budget.used(), published(world)), (0, offsets(40)));
        process
    });
}

fn published(world: &World) -> Vec<i64> {
    world.with(|outside| outside.published.get(&partition(0)).cloned().unwrap_or_default())
}

#[test]
fn a_topic_output_that_begins_again_continues_where_it_ends() {
    case(Settings { to_topic: true, ..Settings::default() }).produced(0, 5).assigned(&[0]).run(
        async |world, mut process| {
            process.poll_for(10 * SECOND).await;
            process.consumer.out_of_range(&partition(0), 5, (0, 4));
            process.poll_for(10 * SECOND).await;
            produce(world, 0, 3);
            process.poll_for(10 * SECOND).await;
            assert_eq!(published(world), offsets(8));
            process
        },
    );
}

/// The start is the end of the topic: a process that was killed before it had read anything must not begin at a later one.
#[test]
fn the_start_of_an_output_survives_a_kill() {
    for to_topic in [false, true] {
        let settings = Settings { to_topic, start: Start::End, ..Settings::default() };
        case(settings).produced(0, 5).run(async |world, process| {
            produce(world, 0, 2);
            process.kill(world).await;
            let mut process = Process::start(world, &settings).await;
            process.consumer.assign(&[partition(0)]).await;
            process.poll_for(90 * SECOND).await;
            let read = if to_topic { published(world) } else { rows(world, 0).await };
            assert_eq!(read, [5, 6]);
            process
        });
    }
}

/// Another process publishes what this one has read. Messages that the consumer read before it heard of that come later.
#[test]
fn messages_from_before_a_seek_are_dropped() {
    let settings = Settings { rows_per_file: 8, ..Settings::default() };
    case(settings).produced(0, 8).assigned(&[0]).run(async |world, mut process| {
        super::histories::publish(world, &settings, &partition(0), 3).await;
        process.consumer.slow_rounds = 50;
        process.poll_for(5 * SECOND).await;
        produce(world, 0, 8);
        process.poll_for(60 * SECOND).await;
        process.stop();
        ends_in_order(&mut process).await;
        assert_eq!(rows(world, 0).await, offsets(16));
        assert!(process.metrics.encode().contains("conflicts_total{kind=\"foreign\"} 1\n"));
        process
    });
}

#[test]
fn rows_that_another_process_may_not_have_written_are_no_orderly_end() {
    plain().produced(0, 3).assigned(&[0]).run(async |world, mut process| {
        process.poll_for(5 * SECOND).await;
        super::histories::publish(world, &Settings::default(), &partition(0), 2).await;
        process.stop();
        // Two of the three rows are in the other's file.
        assert!(matches!(process.end(LONG).await, Some(Ok(false))));
        process
    });
}

#[test]
fn an_event_of_a_former_assignment_changes_nothing() {
    plain().produced(0, 3).assigned(&[0]).run(async |world, mut process| {
        let old = crate::stream::source::testing::epoch(0);
        process.consumer.send(Event::OutOfRange { partition: partition(0), epoch: old, position: 9, range: (0, 3) });
        process.poll_for(90 * SECOND).await;
        assert_eq!(rows(world, 0).await, offsets(3));
        process
    });
}

/// A consumer that waits in a rebalance makes no statistics, and the last ones know nothing of the messages that it holds.
#[test]
fn reading_once_waits_for_messages_that_the_consumer_holds() {
    case(ONCE).produced(0, 7).assigned(&[0]).run(async |world, mut process| {
        process.consumer.fetch_everything();
        clock::sleep(29 * SECOND).await;
        assert!(!process.has_ended(), "it is not read");
        ends_in_order(&mut process).await;
        assert_eq!(rows(world, 0).await, offsets(7));
        process
    });
}

/// By hand: a vector takes 4 KiB, a message less than 640 bytes; a round reads ten messages.
/// What is read is bounded by the limit, what the stage has by a quarter of it, and each partition may have one batch.
#[test]
fn vectors_of_many_partitions_are_bounded_while_the_store_is_gone() {
    const PARTITIONS: usize = 16;
    const LIMIT: usize = 1 << 20;
    let world = World::new(1, PARTITIONS as i32);
    world.with(|outside| (outside.slow, outside.width, outside.puts_hang) = (0, 1024, true));
    let all: Vec<_> = (0..PARTITIONS as i32).collect();
    all.iter().for_each(|number| produce(&world, *number, 400));
    let case = Case { world, settings: Settings { memory: LIMIT, ..Settings::default() }, assigned: Vec::new() };
    case.assigned(&all).run(async |_, mut process| {
        process.poll_for(120 * SECOND).await;
        let batch = 10 * (4 * 1024 + 2 * 640);
        let (peak, most) = (process.budget.peak(), LIMIT + LIMIT / 4 + PARTITIONS * batch);
        assert!(peak > LIMIT && peak <= most, "{peak} of {most}");
        process
    });
}

const TOKENS: Memory = Memory { limit: 1 << 20, stage: 256 << 10, batch: 32 << 10 };

/// The limit, what of it the stage may have, and the vectors of a batch.
struct Memory {
    limit: usize,
    stage: usize,
    batch: usize,
}

/// Four partitions of messages of so many words, whose vectors have 256 bytes each. By hand: of a quarter of the memory for
/// the stage, a partition has a quarter, of which a batch has half.
fn of_words(words: usize, messages: u64, settings: Settings) -> Case {
    let world = World::new(1, 4);
    world.with(|outside| (outside.slow, outside.width, outside.words) = (0, 64, Some(words)));
    (0..4).for_each(|number| produce(&world, number, messages));
    let settings = Settings { memory: TOKENS.limit, rows_per_file: 1, ..settings };
    Case { world, settings, assigned: Vec::new() }.assigned(&[0, 1, 2, 3])
}

/// By hand: a message has vectors of 12.5 KiB, and ten of them, which are read at once, 125 KiB. Beside what the stage has, each
/// partition has a batch that is written, and one that is encoded.
#[test]
fn vectors_of_tokens_are_bounded() {
    of_words(50, 100, Settings::default()).run(async |world, mut process| {
        world.with(|outside| outside.stage_takes = 1000);
        process.poll_for(200 * SECOND).await;
        let (peak, most) = (world.vectors.peak(), TOKENS.stage + 4 * 2 * TOKENS.batch);
        assert!(peak > most / 4 && peak <= most, "{peak} of {most}");
        for number in 0..4 {
            assert_eq!(rows(world, number).await, offsets(100));
        }
        process
    });
}

/// As above, with rows that wait for a transaction: they take as much as the stage may have, and a batch of each partition.
#[test]
fn vectors_of_tokens_that_wait_for_a_transaction_are_bounded() {
    let settings = Settings { to_topic: true, ..Settings::default() };
    of_words(50, 100, settings).run(async |world, mut process| {
        world.with(|outside| outside.commits_hang = true);
        process.poll_for(100 * SECOND).await;
        let (peak, most) = (world.vectors.peak(), 2 * TOKENS.stage + 4 * 2 * TOKENS.batch);
        assert!(peak > most / 4 && peak <= most, "{peak} of {most}");
        assert!(process.budget.used() > peak, "{} are counted, of {peak}", process.budget.used());
        world.with(|outside| outside.commits_hang = false);
        process.poll_for(100 * SECOND).await;
        assert_eq!((process.budget.used(), published(world)), (0, offsets(100)));
        process
    });
}

/// By hand: 5,000 words have vectors of 1.28 MB. Of each partition, one message is in the stage, one is written and one waits.
/// Such files are encoded on other threads, for which the clock does not wait.
#[test]
fn a_message_that_is_larger_than_the_memory_passes_alone() {
    for to_topic in [false, true] {
        let settings = Settings { to_topic, ..Settings::default() };
        of_words(5000, 4, settings).run(async |world, mut process| {
            let mut done = Vec::new();
            for _ in 0..1000 {
                process.poll_for(SECOND).await;
                std::thread::sleep(SECOND / 50);
                done = if to_topic { published(world) } else { rows(world, 0).await };
                if done.len() == 4 {
                    break;
                }
            }
            assert_eq!(done, offsets(4));
            let (peak, message) = (world.vectors.peak(), 5000 * 256);
            assert!(message > TOKENS.limit && peak <= 4 * 3 * message, "{peak}");
            process
        });
    }
}

/// The stage is slow, so memory is short for as long as the topic is ahead. By hand: 16 batches of ten rows every 20 s are 2,400
/// rows in 300 s. A row has less than 400 bytes, so they are less than a mebibyte, of which a file has at least a thirty-second.
#[test]
fn memory_that_the_queue_takes_does_not_make_small_files() {
    case(Settings { memory: 1 << 20, rows_per_file: 10_000, max_age: HOUR, ..Settings::default() })
        .produced(0, 20_000)
        .assigned(&[0])
        .run(async |world, mut process| {
            world.with(|outside| outside.stage_takes = 20_000);
            process.poll_for(300 * SECOND).await;
            assert!(process.budget.peak() > (1 << 20) / 4 * 3, "memory is never short: {}", process.budget.peak());
            let (rows, files) = world.dataset(&partition(0)).await;
            eprintln!("{} rows in {} files", rows.len(), files.len());
            assert!(files.len() <= 32, "{} rows in {} files", rows.len(), files.len());
            process
        });
}

/// The file is published after a minute, whatever else the partition waits for.
#[test]
fn a_partition_publishes_while_it_waits_for_the_stage() {
    plain().produced(0, 3).assigned(&[0]).run(async |world, mut process| {
        process.poll_for(5 * SECOND).await;
        world.with(|outside| outside.stage_hangs = true);
        produce(world, 0, 3);
        process.poll_for(60 * SECOND).await;
        assert_eq!(rows(world, 0).await, offsets(3));
        process
    });
}

/// By hand: of seven messages, the fifth has no value.
#[test]
fn rows_count_when_they_are_published() {
    let rows = |process: &Process, outcome: &str| {
        let name = format!("elmo_stream_rows_total{{outcome=\"{outcome}\"}} ");
        let metrics = process.metrics.encode();
        metrics.lines().find_map(|line| line.strip_prefix(&name)).unwrap().to_owned()
    };
    plain().produced(0, 7).outside(|outside| outside.puts_hang = true).assigned(&[0]).run(
        async |world, mut process| {
            process.poll_for(90 * SECOND).await;
            assert_eq!((rows(&process, "embedded"), rows(&process, "null")), ("0".into(), "0".into()));
            process.kill(world).await;

            world.with(|outside| outside.puts_hang = false);
            let mut process = Process::start(world, &Settings::default()).await;
            process.consumer.assign(&[partition(0)]).await;
            process.poll_for(90 * SECOND).await;
            assert_eq!((rows(&process, "embedded"), rows(&process, "null")), ("6".into(), "1".into()));
            process
        },
    );
}

/// Two files are complete within two seconds, and the store refuses them for a minute. By hand: pauses of 0.2 s to 6.4 s, each half as
/// long again at most, take less than 20 s, so there are at least six repeats; the second file waits for the first.
#[test]
fn an_outage_shows_in_the_metrics_while_it_lasts() {
    let number = |process: &Process, name: &str| -> f64 {
        let metrics = process.metrics.encode();
        let value = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.unwrap().parse().unwrap()
    };
    plain().produced(0, 5).outside(|outside| outside.puts_fail = true).assigned(&[0]).run(
        async |world, mut process| {
            process.poll_for(SECOND).await;
            produce(world, 0, 5);
            process.poll_for(60 * SECOND).await;
            assert!(number(&process, "elmo_stream_publish_retries_total") >= 6.0);
            assert_eq!(number(&process, "elmo_stream_publish_duration_seconds_count"), 0.0);
            world.with(|outside| outside.puts_fail = false);
            process.poll_for(60 * SECOND).await;
            assert_eq!(rows(world, 0).await, offsets(10));
            assert_eq!(number(&process, "elmo_stream_publish_duration_seconds_count"), 2.0);
            assert!(number(&process, "elmo_stream_publish_duration_seconds_sum") > 2.0 * 55.0);
            process
        },
    );
}

/// The consumer goes on in a topic that is made again, at the offset that it had.
#[test]
fn a_topic_that_is_made_again_ends_the_stream_that_reads_it() {
    plain().produced(0, 7).outside(|outside| outside.topic_id = Some("old".into())).assigned(&[0]).run(
        async |world, mut process| {
            process.poll_for(20 * SECOND).await;
            world.with(|outside| outside.topic_id = Some("new".into()));
            let ended = process.end(60 * SECOND).await;
            assert!(ended.unwrap().unwrap_err().to_string().contains("it was created again"));
            process
        },
    );
}

/// A topic that was deleted and made again has the same name and other messages, perhaps as many.
#[test]
fn a_topic_that_was_made_again_ends_a_stream() {
    plain().produced(0, 7).outside(|outside| outside.topic_id = Some("old".into())).assigned(&[0]).run(
        async |world, mut process| {
            process.poll_for(90 * SECOND).await;
            process.kill(world).await;
            for id in [Some("old".to_owned()), None, Some("new".to_owned())] {
                let is_new = id.as_deref() == Some("new");
                world.with(|outside| outside.topic_id = id);
                let mut process = Process::start(world, &Settings::default()).await;
                process.consumer.assign(&[partition(0)]).await;
                let ended = process.end(20 * SECOND).await;
                match ended {
                    None => assert!(!is_new),
                    Some(ended) => assert!(is_new && ended.unwrap_err().to_string().contains("it was created again")),
                }
                process.kill(world).await;
            }
            Process::start(world, &Settings::default()).await
        },
    );
}

/// The broker deletes messages between two questions of a stream that has no output yet.
#[test]
fn an_output_that_begins_has_no_gap() {
    for to_topic in [false, true] {
        case(Settings { to_topic, on_gap: crate::stream::OnGap::Fail, ..Settings::default() })
            .produced(0, 9)
            .outside(|outside| outside.deletes_below = Some(4))
            .assigned(&[0])
            .run(async |world, mut process| {
                process.poll_for(90 * SECOND).await;
                assert!(!process.has_ended());
                let read = if to_topic { published(world) } else { rows(world, 0).await };
                assert_eq!(read, [4, 5, 6, 7, 8]);
                process
            });
    }
}

/// Of an output that has begun, the same is a loss.
#[test]
fn a_gap_behind_the_output_ends_the_stream_unless_it_is_skipped() {
    use crate::stream::OnGap::{Fail, Skip};
    for on_gap in [Fail, Skip] {
        let settings = Settings { on_gap, ..Settings::default() };
        case(settings).produced(0, 5).assigned(&[0]).run(async |world, mut process| {
            process.poll_for(5 * SECOND).await;
            process.kill(world).await;
            produce(world, 0, 5);
            world.with(|outside| outside.log(&partition(0)).low = 7);
            let mut process = Process::start(world, &settings).await;
            process.consumer.assign(&[partition(0)]).await;
            process.poll_for(90 * SECOND).await;
            match on_gap {
                Fail => {
                    let error = process.end(LONG).await.expect("it ends").unwrap_err();
                    assert!(error.to_string().contains("the dataset ends at offset 5"), "{error}");
                    assert_eq!(rows(world, 0).await, offsets(5));
                }
                Skip => assert_eq!(rows(world, 0).await, [0, 1, 2, 3, 4, 7, 8, 9]),
            }
            process
        });
    }
}

/// The offsets that the group has of other partitions say nothing about an output that has none of this topic.
#[test]
fn a_new_output_of_an_old_group_begins_where_it_is_told_to() {
    case(Settings { start: Start::End, ..Settings::default() })
        .produced(0, 5)
        .outside(|outside| outside.committed.insert(partition(1), (3, String::new())))
        .assigned(&[0])
        .run(async |_, process| {
            assert_eq!(process.consumer.next(&partition(0)), Some(5));
            process
        });
}

/// Of two partitions one is added after the first process has begun.
#[test]
fn a_partition_that_was_added_while_no_process_ran_begins_at_its_first_message() {
    for to_topic in [false, true] {
        let settings = Settings { to_topic, start: Start::End, ..Settings::default() };
        case(settings).produced(0, 5).outside(|outside| outside.logs.pop_last()).assigned(&[0]).run(
            async |world, process| {
                assert_eq!(process.consumer.next(&partition(0)), Some(5));
                process.kill(world).await;
                produce(world, 1, 5);
                let mut process = Process::start(world, &settings).await;
                process.consumer.assign(&[partition(0), partition(1)]).await;
                process.poll_for(10 * SECOND).await;
                let end = process.consumer.next(&partition(1));
                let first = match to_topic {
                    true => world.with(|outside| outside.published[&partition(1)][0]),
                    false => rows(world, 1).await[0],
                };
                assert_eq!((first, end), (0, Some(5)));
                process
            },
        );
    }
}
