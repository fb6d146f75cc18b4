//! Collectives between threads, each with a connection of its own.

use std::{
    net::TcpListener,
    os::fd::IntoRawFd,
    thread,
    time::{Duration, Instant},
};

use super::*;

const LIMIT: Duration = Duration::from_secs(30);

fn limits(answer: Duration) -> Limits {
    Limits { start: LIMIT, answer }
}

/// Processes whose port no other program can take: the socket is left to process 0.
fn meetings(size: usize) -> Vec<Meeting> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let listener = listener.into_raw_fd();
    let meeting = |rank| Meeting {
        rank,
        size,
        local_rank: Some(rank),
        local_size: Some(size),
        host: "127.0.0.1".to_owned(),
        port,
        listener: (rank == 0).then_some(listener),
        has_store: false,
        run: "test".to_owned(),
    };
    (0..size).map(meeting).collect()
}

/// Runs a function in as many threads as there are processes, and returns what they return, by rank.
fn together<T: Send + 'static>(size: usize, run: fn(Group) -> T) -> Vec<T> {
    together_for(size, LIMIT, run)
}

fn together_for<T: Send + 'static>(size: usize, limit: Duration, run: fn(Group) -> T) -> Vec<T> {
    met(meetings(size), limits(limit), run).into_iter().map(|thread| thread.expect("they meet")).collect()
}

/// What the threads of these processes return.
fn met<T: Send + 'static>(
    meetings: Vec<Meeting>,
    limits: Limits,
    run: fn(Group) -> T,
) -> Vec<Result<T, CollectiveError>> {
    let start = |meeting: Meeting| thread::spawn(move || Group::meet(&meeting, DeviceName::Cpu, limits).map(run));
    let threads: Vec<_> = meetings.into_iter().map(start).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// By hand.
#[test]
fn sums_copies_and_collections_of_three() {
    let found = together(3, |group| {
        let rank = group.rank() as f64;
        let mut numbers = [rank, 10.0 * rank];
        group.sum_numbers(&mut numbers).unwrap();
        let gathered = group.gather(&[group.rank() as i64, 7]).unwrap();
        let bytes = group.broadcast_bytes(vec![group.rank() as u8 + 40; 2 + group.rank()]).unwrap();
        let empty = group.broadcast_bytes(vec![1; group.rank()]).unwrap();
        group.barrier().unwrap();
        // One larger than what is sent together, one not in a single piece, and an empty one.
        let large = Tensor::full([SMALL as i64 + 1], 1.0 + rank, (Kind::Float, Device::Cpu));
        let turned = (Tensor::arange(6, (Kind::Float, Device::Cpu)).view([2, 3]) * (1.0 + rank)).tr();
        let mut tensors = [large, turned, Tensor::zeros([0, 2], (Kind::Float, Device::Cpu))];
        group.sum(&mut tensors).unwrap();
        let ends = [tensors[0].double_value(&[0]), tensors[0].double_value(&[SMALL as i64])];
        let turned = Vec::<f32>::try_from(tensors[1].reshape([-1])).unwrap();
        (numbers, gathered, bytes, empty, ends, turned, group.share(10))
    });
    for (rank, (numbers, gathered, bytes, empty, ends, turned, share)) in found.into_iter().enumerate() {
        assert_eq!(numbers, [3.0, 30.0]);
        assert_eq!(gathered, [[0, 7], [1, 7], [2, 7]]);
        assert_eq!((bytes, empty), (vec![40, 40], vec![]));
        assert_eq!((ends, turned), ([6.0, 6.0], vec![0.0, 18.0, 6.0, 24.0, 12.0, 30.0]));
        assert_eq!(share, [0..3, 3..6, 6..10][rank]);
    }
}

/// Sums of numbers that rounding depends on have the same bits everywhere.
#[test]
fn sums_have_the_same_bits_in_all_processes() {
    let found = together(4, |group| {
        let mut tensors = [(Tensor::arange(10_007, (Kind::Float, Device::Cpu)) * 0.7 + group.rank() as f64).sin()];
        group.sum(&mut tensors).unwrap();
        Vec::<f32>::try_from(&tensors[0]).unwrap().iter().map(|x| x.to_bits()).collect::<Vec<_>>()
    });
    assert!(found.iter().all(|bits| *bits == found[0]));
}

/// The store of torchrun's agent, which is none of the processes, and its variables. The first attempt ends without order, and the
/// second one meets at the same store, where the keys of the first one still are.
#[cfg(elmo_c10d)]
#[test]
fn processes_meet_at_the_store_of_torchrun() {
    let agent = Meeting { run: "agent".to_owned(), ..meetings(2).remove(0) };
    let store = c10d::Store::open(&agent, LIMIT).unwrap();
    store.set("workers", b"2").unwrap();
    for attempt in 0..2 {
        let started_by_torchrun = |rank: usize| {
            let variable = |name: &str| {
                Some(match name {
                    "RANK" | "LOCAL_RANK" => rank.to_string(),
                    "WORLD_SIZE" | "LOCAL_WORLD_SIZE" => "2".to_owned(),
                    "MASTER_ADDR" => "127.0.0.1".to_owned(),
                    "MASTER_PORT" => agent.port.to_string(),
                    "TORCHELASTIC_USE_AGENT_STORE" => "True".to_owned(),
                    "TORCHELASTIC_RUN_ID" => "job".to_owned(),
                    "TORCHELASTIC_RESTART_COUNT" => attempt.to_string(),
                    _ => return None,
                })
            };
            Meeting::from_env(variable).unwrap().unwrap()
        };
        let both: Vec<_> = (0..2).map(started_by_torchrun).collect();
        assert!(both.iter().all(|meeting| meeting.has_store && !meeting.is_server()));
        let found = met(both, limits(LIMIT), |group| {
            let mut numbers = [1.0 + group.rank() as f64, 0.25];
            group.sum_numbers(&mut numbers).unwrap();
            group.abandon();
            numbers
        });
        // By hand.
        assert!(found.into_iter().all(|numbers| numbers.unwrap() == [3.0, 0.5]), "attempt {attempt}");
    }
    assert_eq!(store.get("workers").unwrap(), b"2");
}

/// Long before the time limit.
#[test]
fn a_process_that_leaves_ends_the_wait_of_the_others() {
    let started = Instant::now();
    let found = together(3, |group| match group.rank() {
        1 => None,
        _ => Some(group.sum_numbers(&mut [1.0]).unwrap_err().to_string()),
    });
    assert!(found[0].as_ref().unwrap().starts_with("process 0 of 3: summing over all processes: "), "{found:?}");
    assert!(found[2].as_ref().unwrap().starts_with("process 2 of 3: "), "{found:?}");
    assert!(started.elapsed() < LIMIT, "the others waited for the time limit");
}

#[test]
fn a_process_that_nobody_joins_names_the_place() {
    let mut alone = meetings(2).remove(1);
    // A port at which nobody listens.
    alone.port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let limits = Limits { start: Duration::from_secs(1), ..limits(LIMIT) };
    let error = Group::meet(&alone, DeviceName::Cpu, limits).unwrap_err().to_string();
    assert!(error.starts_with(&format!("process 1 of 2: meeting the other processes: 127.0.0.1:{}: ", alone.port)));
    assert!(error.ends_with("; process 0, which listens there, has not joined within 1 s"), "{error}");
}

/// A slow disk: far longer than the time limit, which the process that only sleeps does not pass.
#[test]
fn a_process_that_writes_a_file_is_waited_for() {
    let found = together_for(2, Duration::from_secs(1), |group| {
        if group.is_first() {
            let _busy = group.busy();
            thread::sleep(Duration::from_secs(3));
        }
        group.barrier().unwrap();
        // It lives, and is not where the other one waits.
        if group.is_first() {
            thread::sleep(Duration::from_secs(10));
        }
        group.barrier().map_err(|e| e.reason)
    });
    let text = found[1].clone().unwrap_err();
    let name = format!("process 0 on {}", rendezvous::host_name());
    let expected = format!("another process has not answered for 1 s; alive, but not yet in this exchange: {name}");
    assert_eq!(text, expected);
}

/// Two of four, where all would wait for ever.
#[test]
fn processes_that_do_not_join_are_named() {
    let mut some = meetings(4);
    some.remove(2);
    some.remove(1);
    let limits = Limits { start: Duration::from_secs(2), answer: LIMIT };
    let found = met(some, limits, |_| ());
    let texts: Vec<_> = found.into_iter().map(|met| met.unwrap_err().to_string()).collect();
    let host = rendezvous::host_name();
    for text in &texts {
        assert!(text.contains("process 1, process 2 have not joined within"), "{texts:?}");
        assert!(text.contains(&format!("those that have: process 0 on {host}, process 3 on {host}")), "{texts:?}");
    }
}

#[test]
fn the_first_failure_reaches_those_that_wait() {
    let found = together(3, |group| match group.rank() {
        1 => {
            group.fail("out of memory");
            None
        }
        _ => {
            let error = group.barrier().unwrap_err();
            let cause = group.cause();
            group.abandon();
            assert_eq!(error.cause, cause);
            Some((error.to_string(), cause.unwrap().rank))
        }
    });
    let text = |rank| format!("process {rank} of 3: waiting for all processes: process 1 has failed: out of memory");
    assert_eq!(found, [Some((text(0), 1)), None, Some((text(2), 1))]);
}

#[test]
fn an_end_in_order_is_that_of_all() {
    let found = together(3, |group| {
        group.finish();
        group.barrier().unwrap_err().reason
    });
    assert!(found.iter().all(|reason| reason == "the connections have ended before"), "{found:?}");
}

/// Each mistake is found by the process that has it, and the other one is told.
#[test]
fn processes_that_are_not_of_one_run_do_not_wait_for_each_other() {
    let wrong = |change: fn(&mut Meeting)| {
        let mut meetings = meetings(2);
        change(&mut meetings[1]);
        let found = met(meetings, limits(Duration::from_secs(2)), |_| ());
        found.into_iter().map(|met| met.unwrap_err().to_string()).collect::<Vec<_>>()
    };
    let size = wrong(|meeting| meeting.size = 3);
    assert!(size[1].contains("the number of processes is 3 here, and 2 in process 0: give the same WORLD_SIZE"));
    let mut same = meetings(3);
    same[2].rank = 1;
    let found = met(same, Limits { start: Duration::from_secs(2), answer: LIMIT }, |_| ());
    let texts: Vec<_> = found.into_iter().map(|met| met.unwrap_err().to_string()).collect();
    assert!(texts.iter().any(|text| text.contains("another process has the number 1, too")), "{texts:?}");
}

/// The port is taken by another program, as it could be between its choice and its use.
#[test]
fn a_port_that_is_taken_is_named() {
    let mut meetings = meetings(2);
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    (meetings[0].port, meetings[0].listener) = (other.local_addr().unwrap().port(), None);
    let error = Group::meet(&meetings[0], DeviceName::Cpu, limits(LIMIT)).unwrap_err().to_string();
    assert!(error.contains("another program has this port: give a free one in MASTER_PORT"), "{error}");
}

#[test]
fn one_process_exchanges_nothing() {
    let group = Group::default();
    let mut numbers = [1.5];
    group.sum_numbers(&mut numbers).unwrap();
    assert_eq!((numbers, group.gather(&[4, 5]).unwrap()), ([1.5], vec![vec![4, 5]]));
    assert_eq!((group.broadcast_bytes(vec![9]).unwrap(), group.share(7)), (vec![9], 0..7));
}
