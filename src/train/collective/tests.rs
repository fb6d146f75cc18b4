//! Collectives between threads, each with a connection of its own.

use std::{
    net::TcpListener,
    thread,
    time::{Duration, Instant},
};

use super::*;

const LIMIT: Duration = Duration::from_secs(30);

fn meetings(size: usize) -> Vec<Meeting> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let meeting = |rank| Meeting {
        rank,
        size,
        local_rank: rank,
        local_size: Some(size),
        host: "127.0.0.1".to_owned(),
        port,
        has_store: false,
        run: "test".to_owned(),
    };
    (0..size).map(meeting).collect()
}

/// Runs a function in as many threads as there are processes, and returns what they return, by rank.
fn together<T: Send + 'static>(size: usize, run: fn(Group) -> T) -> Vec<T> {
    let start = |meeting: Meeting| thread::spawn(move || run(Group::meet(&meeting, DeviceName::Cpu, LIMIT).unwrap()));
    let threads: Vec<_> = meetings(size).into_iter().map(start).collect();
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
    alone.host = "127.0.0.1".to_owned();
    let error = Group::meet(&alone, DeviceName::Cpu, Duration::from_secs(1)).unwrap_err().to_string();
    assert!(error.starts_with(&format!("process 1 of 2: meeting the other processes: 127.0.0.1:{}: ", alone.port)));
}

#[test]
fn one_process_exchanges_nothing() {
    let group = Group::default();
    let mut numbers = [1.5];
    group.sum_numbers(&mut numbers).unwrap();
    assert_eq!((numbers, group.gather(&[4, 5]).unwrap()), ([1.5], vec![vec![4, 5]]));
    assert_eq!((group.broadcast_bytes(vec![9]).unwrap(), group.share(7)), (vec![9], 0..7));
}
