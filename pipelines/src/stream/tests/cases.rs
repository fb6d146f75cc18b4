//! Single histories: defects that were found, and promises that random histories reach seldom.

use std::time::Duration;

use super::{
    process::{GRACE, Process, Settings},
    world::{World, partition},
};
use crate::stream::{
    clock::{self, simulated},
    source::{Event, Start},
};

const SECOND: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(600);

/// A world whose requests take no time.
fn world() -> World {
    let world = World::new(1, 2);
    world.with(|outside| outside.slow = 0);
    world
}

fn produce(world: &World, number: i32, messages: u64) {
    world.with(|outside| outside.log(&partition(number)).produce(messages, 0));
}

/// Runs a case, after which nothing may be wrong and all memory must be returned.
fn run(world: &World, case: impl Future<Output = Process>) {
    let wrong = simulated::run(async {
        case.await.kill(world).await;
        world.with(|outside| std::mem::take(&mut outside.wrong))
    });
    assert!(wrong.is_empty(), "{wrong:#?}");
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
    let world = world();
    run(&world, async {
        produce(&world, 0, 7);
        produce(&world, 1, 3);
        let mut process = Process::start(&world, &ONCE).await;
        process.consumer.held.insert(partition(1));
        process.consumer.assign(&[partition(0), partition(1)]).await;
        process.poll_for(20 * SECOND).await;
        assert!(!process.has_ended(), "partition 1 is not read");
        assert_eq!(rows(&world, 0).await, offsets(7));
        let began = clock::now();
        process.consumer.revoke(&[partition(0)], false).await;
        assert!(clock::now() - began < SECOND);
        process.consumer.assign(&[]).await;
        process.consumer.held.clear();
        assert!(matches!(process.end(LONG).await, Some(Ok(true))));
        process
    });
}

/// A group with an eager protocol takes all partitions from a member before it says which it has next; one that was not heard
/// of for long loses all, and gets them again.
#[test]
fn reading_once_does_not_end_between_two_assignments() {
    for lost in [false, true] {
        let world = world();
        run(&world, async {
            produce(&world, 0, 7);
            let mut process = Process::start(&world, &ONCE).await;
            process.consumer.held.insert(partition(0));
            process.consumer.assign(&[partition(0)]).await;
            process.consumer.revoke(&[partition(0)], lost).await;
            process.poll_for(20 * SECOND).await;
            assert!(!process.has_ended(), "it is not read");
            process.consumer.held.clear();
            process.consumer.assign(&[partition(0)]).await;
            assert!(matches!(process.end(LONG).await, Some(Ok(true))));
            assert_eq!(rows(&world, 0).await, offsets(7));
            process
        });
    }
}

/// Of two members that read once, the second one is given a partition of the first, and the first may be done with its other
/// one before that is read: then it comes back when the second leaves.
#[test]
fn reading_once_waits_for_partitions_that_may_return() {
    let world = world();
    run(&world, async {
        produce(&world, 0, 7);
        produce(&world, 1, 7);
        let mut process = Process::start(&world, &ONCE).await;
        process.consumer.held.insert(partition(1));
        process.consumer.assign(&[partition(0), partition(1)]).await;
        process.consumer.revoke(&[partition(1)], false).await;
        process.consumer.assign(&[]).await;
        process.poll_for(5 * SECOND).await;
        assert_eq!(rows(&world, 0).await, offsets(7));
        assert!(!process.has_ended(), "partition 1 may return");
        process.consumer.held.clear();
        process.consumer.assign(&[partition(1)]).await;
        assert!(matches!(process.end(LONG).await, Some(Ok(true))));
        assert_eq!(rows(&world, 1).await, offsets(7));
        process
    });
}

#[test]
fn a_member_without_partitions_is_ready_and_ends() {
    for silent in [false, true] {
        let world = world();
        run(&world, async {
            let mut process = Process::start(&world, &Settings { once: false, ..ONCE }).await;
            process.poll_for(10 * SECOND).await;
            assert!(process.health.ready().is_err(), "the group has not accepted it");
            match silent {
                true => process.consumer.join_silently(),
                false => process.consumer.assign(&[]).await,
            }
            process.poll_for(20 * SECOND).await;
            assert_eq!(process.health.ready(), Ok(()));
            process.stop();
            assert!(matches!(process.end(LONG).await, Some(Ok(true))));
            process.kill(&world).await;

            let mut process = Process::start(&world, &ONCE).await;
            match silent {
                true => process.consumer.join_silently(),
                false => process.consumer.assign(&[]).await,
            }
            assert!(matches!(process.end(LONG).await, Some(Ok(true))));
            process
        });
    }
}

/// A pause drops what was fetched ahead, so that nothing waits although nothing was read. Publishing takes longer than the time
/// after which a partition with nothing left counts as read.
#[test]
fn reading_once_does_not_end_while_memory_is_short() {
    let world = world();
    run(&world, async {
        produce(&world, 0, 300);
        let settings = Settings { memory: 8 << 10, rows_per_file: 1000, ..ONCE };
        let mut process = Process::start(&world, &settings).await;
        process.consumer.assign(&[partition(0)]).await;
        world.with(|outside| outside.slow = 20_000);
        assert!(matches!(process.end(LONG * 10).await, Some(Ok(true))));
        assert_eq!(rows(&world, 0).await, offsets(300));
        process
    });
}

/// By hand: the consumer waits 30 s, so that it gets its answer after 20 s, whatever a task waits for.
#[test]
fn a_task_that_is_stuck_does_not_keep_its_partition() {
    for (stage, puts) in [(true, false), (false, true)] {
        let world = world();
        run(&world, async {
            produce(&world, 0, 7);
            world.with(|outside| (outside.stage_hangs, outside.puts_hang) = (stage, puts));
            let mut process = Process::start(&world, &Settings::default()).await;
            process.consumer.assign(&[partition(0)]).await;
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

#[test]
fn a_consumer_that_ends_ends_the_stream_in_time_whatever_a_task_waits_for() {
    let world = world();
    run(&world, async {
        produce(&world, 0, 7);
        world.with(|outside| outside.stage_hangs = true);
        let mut process = Process::start(&world, &Settings::default()).await;
        process.consumer.assign(&[partition(0)]).await;
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
    let world = world();
    run(&world, async {
        produce(&world, 0, 7);
        world.with(|outside| outside.puts_hang = true);
        let mut process = Process::start(&world, &Settings::default()).await;
        process.consumer.assign(&[partition(0)]).await;
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
    let world = world();
    run(&world, async {
        produce(&world, 0, 7);
        world.with(|outside| outside.puts_hang = true);
        let mut process = Process::start(&world, &Settings::default()).await;
        process.consumer.assign(&[partition(0)]).await;
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
    let world = world();
    run(&world, async {
        produce(&world, 0, 7);
        world.with(|outside| outside.puts_hang = true);
        let mut process = Process::start(&world, &Settings::default()).await;
        process.consumer.assign(&[partition(0)]).await;
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
    let world = world();
    run(&world, async {
        produce(&world, 0, 7);
        let mut process = Process::start(&world, &Settings::default()).await;
        world.with(|outside| outside.gets_hang = true);
        process.consumer.assign(&[partition(0)]).await;
        process.stop();
        assert!(matches!(process.end(LONG).await, Some(Ok(true))));
        process
    });
}

#[test]
fn brokers_that_do_not_answer_are_asked_until_they_do() {
    let world = world();
    run(&world, async {
        produce(&world, 0, 7);
        let mut process = Process::start(&world, &Settings::default()).await;
        world.with(|outside| outside.down = true);
        // It waits for the start, and then goes on without.
        process.consumer.assign(&[partition(0)]).await;
        process.poll_for(100 * SECOND).await;
        assert_eq!(process.consumer.next(&partition(0)), None);
        world.with(|outside| outside.down = false);
        process.poll_for(100 * SECOND).await;
        assert_eq!(rows(&world, 0).await, offsets(7));
        process
    });
}

/// By hand: the file would be published after an hour.
#[test]
fn a_file_that_takes_the_memory_of_its_partition_is_published() {
    let world = world();
    run(&world, async {
        produce(&world, 0, 400);
        let hour = Duration::from_secs(3600);
        let settings = Settings { memory: 16 << 10, rows_per_file: 10_000, max_age: hour, ..Settings::default() };
        let mut process = Process::start(&world, &settings).await;
        process.consumer.assign(&[partition(0), partition(1)]).await;
        process.poll_for(120 * SECOND).await;
        let published = rows(&world, 0).await;
        assert!(published.len() >= 200, "{published:?}");
        process.stop();
        assert!(matches!(process.end(LONG).await, Some(Ok(true))));
        process
    });
}

/// By hand: a message counts 512 bytes beside its key, its value and its headers.
#[test]
fn messages_that_wait_for_a_transaction_count_against_the_memory() {
    let world = world();
    run(&world, async {
        let settings = Settings { to_topic: true, ..Settings::default() };
        let mut process = Process::start(&world, &settings).await;
        process.consumer.assign(&[partition(0)]).await;
        produce(&world, 0, 40);
        world.with(|outside| outside.commits_hang = true);
        process.poll_for(10 * SECOND).await;
        assert!(process.budget.used() >= 40 * 512, "{}", process.budget.used());
        world.with(|outside| outside.commits_hang = false);
        process.poll_for(10 * SECOND).await;
        assert_eq!((process.budget.used(), published(&world)), (0, offsets(40)));
        process
    });
}

fn published(world: &World) -> Vec<i64> {
    world.with(|outside| outside.published.get(&partition(0)).cloned().unwrap_or_default())
}

#[test]
fn a_topic_output_that_begins_again_continues_where_it_ends() {
    let world = world();
    run(&world, async {
        let settings = Settings { to_topic: true, ..Settings::default() };
        produce(&world, 0, 5);
        let mut process = Process::start(&world, &settings).await;
        process.consumer.assign(&[partition(0)]).await;
        process.poll_for(10 * SECOND).await;
        process.consumer.out_of_range(&partition(0), 5, (0, 4));
        process.poll_for(10 * SECOND).await;
        produce(&world, 0, 3);
        process.poll_for(10 * SECOND).await;
        assert_eq!(published(&world), offsets(8));
        process
    });
}

/// The start is the end of the topic: a process that was killed before it had written anything must not begin at a later one.
#[test]
fn the_start_of_a_topic_output_survives_a_kill() {
    let world = world();
    run(&world, async {
        let settings = Settings { to_topic: true, start: Start::End, ..Settings::default() };
        produce(&world, 0, 5);
        let mut process = Process::start(&world, &settings).await;
        process.consumer.assign(&[partition(0)]).await;
        assert_eq!(process.consumer.next(&partition(0)), Some(5));
        produce(&world, 0, 2);
        process.kill(&world).await;
        let mut process = Process::start(&world, &settings).await;
        process.consumer.assign(&[partition(0)]).await;
        process.poll_for(10 * SECOND).await;
        assert_eq!(published(&world), [5, 6]);
        process
    });
}

/// The thread of transactions does not answer, so the start is not given before somebody knows it.
#[test]
fn a_start_that_is_not_recorded_is_not_used() {
    let world = world();
    run(&world, async {
        let settings = Settings { to_topic: true, start: Start::End, ..Settings::default() };
        world.with(|outside| outside.commits_hang = true);
        let mut process = Process::start(&world, &settings).await;
        process.consumer.assign(&[partition(0)]).await;
        produce(&world, 0, 2);
        process.poll_for(10 * SECOND).await;
        assert_eq!(process.consumer.next(&partition(0)), None);
        world.with(|outside| outside.commits_hang = false);
        process.poll_for(10 * SECOND).await;
        assert_eq!(published(&world), [0, 1]);
        process
    });
}

/// Another process publishes what this one has read. Messages that the consumer read before it heard of that come later.
#[test]
fn messages_from_before_a_seek_are_dropped() {
    let world = world();
    run(&world, async {
        let settings = Settings { rows_per_file: 8, ..Settings::default() };
        produce(&world, 0, 8);
        let mut process = Process::start(&world, &settings).await;
        process.consumer.assign(&[partition(0)]).await;
        super::histories::publish(&world, &settings, &partition(0), 3).await;
        process.consumer.slow_rounds = 50;
        process.poll_for(5 * SECOND).await;
        produce(&world, 0, 8);
        process.poll_for(60 * SECOND).await;
        process.stop();
        assert!(matches!(process.end(LONG).await, Some(Ok(true))));
        assert_eq!(rows(&world, 0).await, offsets(16));
        assert!(process.metrics.encode().contains("conflicts_total{kind=\"foreign\"} 1\n"));
        process
    });
}

#[test]
fn rows_that_another_process_may_not_have_written_are_no_orderly_end() {
    let world = world();
    run(&world, async {
        produce(&world, 0, 3);
        let mut process = Process::start(&world, &Settings::default()).await;
        process.consumer.assign(&[partition(0)]).await;
        process.poll_for(5 * SECOND).await;
        super::histories::publish(&world, &Settings::default(), &partition(0), 2).await;
        process.stop();
        // Two of the three rows are in the other's file.
        assert!(matches!(process.end(LONG).await, Some(Ok(false))));
        process
    });
}

#[test]
fn an_event_of_a_former_assignment_changes_nothing() {
    let world = world();
    run(&world, async {
        produce(&world, 0, 3);
        let mut process = Process::start(&world, &Settings::default()).await;
        process.consumer.assign(&[partition(0)]).await;
        let old = crate::stream::source::testing::epoch(0);
        process.consumer.send(Event::OutOfRange { partition: partition(0), epoch: old, position: 9, range: (0, 3) });
        process.poll_for(90 * SECOND).await;
        assert_eq!(rows(&world, 0).await, offsets(3));
        process
    });
}

/// A consumer that waits in a rebalance makes no statistics, and the last ones know nothing of the messages that it holds.
#[test]
fn reading_once_waits_for_messages_that_the_consumer_holds() {
    let world = world();
    run(&world, async {
        produce(&world, 0, 7);
        let mut process = Process::start(&world, &ONCE).await;
        process.consumer.assign(&[partition(0)]).await;
        process.consumer.fetch_everything();
        clock::sleep(29 * SECOND).await;
        assert!(!process.has_ended(), "it is not read");
        assert!(matches!(process.end(LONG).await, Some(Ok(true))));
        assert_eq!(rows(&world, 0).await, offsets(7));
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
    run(&world, async {
        (0..16).for_each(|number| produce(&world, number, 400));
        let settings = Settings { memory: LIMIT, ..Settings::default() };
        let mut process = Process::start(&world, &settings).await;
        let all: Vec<_> = (0..16).map(partition).collect();
        process.consumer.assign(&all).await;
        process.poll_for(120 * SECOND).await;
        let batch = 10 * (4 * 1024 + 2 * 640);
        let (peak, most) = (process.budget.peak(), LIMIT + LIMIT / 4 + PARTITIONS * batch);
        assert!(peak > LIMIT && peak <= most, "{peak} of {most}");
        process
    });
}

/// The stage is slow, so memory is short for as long as the topic is ahead. By hand: 16 batches of ten rows every 20 s are 2,400
/// rows in 300 s. A row has less than 400 bytes, so they are less than a mebibyte, of which a file has at least a thirty-second.
#[test]
fn memory_that_the_queue_takes_does_not_make_small_files() {
    let world = world();
    run(&world, async {
        produce(&world, 0, 20_000);
        let hour = Duration::from_secs(3600);
        let settings = Settings { memory: 1 << 20, rows_per_file: 10_000, max_age: hour, ..Settings::default() };
        let mut process = Process::start(&world, &settings).await;
        process.consumer.assign(&[partition(0)]).await;
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
    let world = world();
    run(&world, async {
        produce(&world, 0, 3);
        let mut process = Process::start(&world, &Settings::default()).await;
        process.consumer.assign(&[partition(0)]).await;
        process.poll_for(5 * SECOND).await;
        world.with(|outside| outside.stage_hangs = true);
        produce(&world, 0, 3);
        process.poll_for(60 * SECOND).await;
        assert_eq!(rows(&world, 0).await, offsets(3));
        process
    });
}

/// By hand: of seven messages, the fifth has no value.
#[test]
fn rows_count_when_they_are_published() {
    let world = world();
    run(&world, async {
        produce(&world, 0, 7);
        let rows = |process: &Process, outcome: &str| {
            let name = format!("elmo_stream_rows_total{{outcome=\"{outcome}\"}} ");
            let metrics = process.metrics.encode();
            metrics.lines().find_map(|line| line.strip_prefix(&name)).unwrap().to_owned()
        };
        world.with(|outside| outside.puts_hang = true);
        let mut process = Process::start(&world, &Settings::default()).await;
        process.consumer.assign(&[partition(0)]).await;
        process.poll_for(90 * SECOND).await;
        assert_eq!((rows(&process, "embedded"), rows(&process, "null")), ("0".into(), "0".into()));
        process.kill(&world).await;

        world.with(|outside| outside.puts_hang = false);
        let mut process = Process::start(&world, &Settings::default()).await;
        process.consumer.assign(&[partition(0)]).await;
        process.poll_for(90 * SECOND).await;
        assert_eq!((rows(&process, "embedded"), rows(&process, "null")), ("6".into(), "1".into()));
        process
    });
}

/// The broker deletes messages between two questions of a stream that has no output yet.
#[test]
fn an_output_that_begins_has_no_gap() {
    for to_topic in [false, true] {
        let world = world();
        run(&world, async {
            produce(&world, 0, 9);
            let settings = Settings { to_topic, on_gap: crate::stream::OnGap::Fail, ..Settings::default() };
            world.with(|outside| outside.deletes_below = Some(4));
            let mut process = Process::start(&world, &settings).await;
            process.consumer.assign(&[partition(0)]).await;
            process.poll_for(90 * SECOND).await;
            assert!(!process.has_ended());
            let read = if to_topic { published(&world) } else { rows(&world, 0).await };
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
        let world = world();
        run(&world, async {
            produce(&world, 0, 5);
            let settings = Settings { on_gap, ..Settings::default() };
            let mut process = Process::start(&world, &settings).await;
            process.consumer.assign(&[partition(0)]).await;
            process.poll_for(5 * SECOND).await;
            process.kill(&world).await;
            produce(&world, 0, 5);
            world.with(|outside| outside.log(&partition(0)).low = 7);
            let mut process = Process::start(&world, &settings).await;
            process.consumer.assign(&[partition(0)]).await;
            process.poll_for(90 * SECOND).await;
            match on_gap {
                Fail => {
                    let error = process.end(LONG).await.expect("it ends").unwrap_err();
                    assert!(error.to_string().contains("the dataset ends at offset 5"), "{error}");
                    assert_eq!(rows(&world, 0).await, offsets(5));
                }
                Skip => assert_eq!(rows(&world, 0).await, [0, 1, 2, 3, 4, 7, 8, 9]),
            }
            process
        });
    }
}

/// The offsets that the group has of other partitions say nothing about an output that has none of this topic.
#[test]
fn a_new_output_of_an_old_group_begins_where_it_is_told_to() {
    let world = world();
    run(&world, async {
        produce(&world, 0, 5);
        world.with(|outside| outside.committed.insert(partition(1), (3, String::new())));
        let mut process = Process::start(&world, &Settings { start: Start::End, ..Settings::default() }).await;
        process.consumer.assign(&[partition(0)]).await;
        assert_eq!(process.consumer.next(&partition(0)), Some(5));
        process
    });
}

#[test]
fn a_partition_that_was_added_while_no_process_ran_begins_at_its_first_message() {
    for to_topic in [false, true] {
        let world = world();
        run(&world, async {
            produce(&world, 0, 5);
            let settings = Settings { to_topic, start: Start::End, ..Settings::default() };
            let mut process = Process::start(&world, &settings).await;
            process.consumer.assign(&[partition(0)]).await;
            assert_eq!(process.consumer.next(&partition(0)), Some(5));
            process.kill(&world).await;
            produce(&world, 1, 5);
            let mut process = Process::start(&world, &settings).await;
            process.consumer.assign(&[partition(0), partition(1)]).await;
            process.poll_for(10 * SECOND).await;
            let end = process.consumer.next(&partition(1));
            let first = match to_topic {
                true => world.with(|outside| outside.published[&partition(1)][0]),
                false => rows(&world, 1).await[0],
            };
            assert_eq!((first, end), (0, Some(5)));
            process
        });
    }
}
