//! Several processes compute what one does. Here they are threads, each with a trainer and a connection of its own; the tests
//! of the command have real processes.

use std::{net::TcpListener, os::fd::IntoRawFd, sync::Arc, thread, time::Duration};

use elmo::{
    model::{DeviceName, Precision},
    train::{
        Classes, Evaluated, Evaluation, Group, Limits, Meeting, Recipe, Resources, Snapshot, StepReport, TrainError,
        Trainer, Values,
    },
};

use super::cases::{self, Case};

/// Runs a function in so many threads, and returns what they return, by rank.
fn together<T: Send + 'static>(size: usize, run: impl Fn(Group) -> T + Send + Sync + 'static) -> Vec<T> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    // Process 0 takes it over.
    let listener = listener.into_raw_fd();
    let run = Arc::new(run);
    let start = |rank| {
        let (run, host, name) = (Arc::clone(&run), "127.0.0.1".to_owned(), "test".to_owned());
        let (local_size, has_store) = (Some(size), false);
        let (local_rank, listener) = (Some(rank), (rank == 0).then_some(listener));
        let meeting = Meeting { rank, size, local_rank, local_size, host, port, listener, has_store, run: name };
        let limits = Limits { start: Duration::from_secs(30), answer: Duration::from_secs(30) };
        thread::spawn(move || run(Group::meet(&meeting, DeviceName::Cpu, limits).unwrap()))
    };
    let threads: Vec<_> = (0..size).map(start).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

fn case(name: &str) -> Case {
    cases::cases().into_iter().find(|case| case.name == name).unwrap()
}

fn resources(group: Group, part_rows: usize) -> Resources {
    Resources { threads: 1, group, part_rows, ..Resources::default() }
}

/// Everything that is random or sparse, or all words.
fn recipe(case: &Case, classes: Classes, lanes: usize) -> Recipe {
    Recipe { seed: 3, dropout: 0.2, classes, ..case.recipe(Precision::F64, lanes) }
}

fn steps(trainer: &mut Trainer, steps: std::ops::Range<usize>) -> Vec<StepReport> {
    cases::windows()[steps].iter().map(|window| trainer.step(window).unwrap()).collect()
}

fn near(found: &[StepReport], expected: &[StepReport], what: &str) {
    for (found, expected) in found.iter().zip(expected) {
        let gaps = [
            found.loss_forward - expected.loss_forward,
            found.loss_backward - expected.loss_backward,
            (found.grad_norm - expected.grad_norm) / expected.grad_norm,
        ];
        assert!(gaps.iter().all(|gap| gap.abs() < 1e-12), "{what}, step {}: {gaps:?}", found.step);
    }
    assert_eq!(found.len(), expected.len());
}

fn bits(snapshot: &Snapshot) -> Vec<u64> {
    let of = |values: &Values| match values {
        Values::F32(values) => values.iter().map(|v| u64::from(v.to_bits())).collect::<Vec<_>>(),
        Values::F64(values) => values.iter().map(|v| v.to_bits()).collect(),
    };
    snapshot.tensors.values().flat_map(|saved| of(&saved.values)).collect()
}

/// Held-out sums after some windows, of fewer rows than there may be processes.
fn evaluated(trainer: &Trainer) -> Evaluated {
    let mut evaluation = Evaluation::of_run(trainer, 2).unwrap();
    let mut total = Evaluated::default();
    cases::windows()[..3].iter().for_each(|window| total.add(evaluation.window(&window.of_rows(1..3)).unwrap()));
    total
}

/// Fifty steps, with the optimisers of the cases; three processes have 1, 1 and 2 of the 4 rows. Replicas
/// of two rows belong to one process, or to two, and those of one row to a process that has another one too.
#[test]
fn several_processes_have_the_losses_of_one() {
    for (name, classes, replica_rows) in [
        ("base", Classes::Full, None),
        ("base", Classes::Sampled(9), None),
        ("adamw_cosine", Classes::Sampled(9), None),
        ("sampled_two_replicas", Classes::Sampled(9), Some(2)),
        ("base", Classes::Sampled(9), Some(1)),
    ] {
        let recipe = move |case: &Case| Recipe { replica_rows, ..self::recipe(case, classes, 2) };
        let case = case(name);
        let mut one =
            Trainer::new(&case.options, recipe(&case), resources(Group::default(), 4), &case.model()).unwrap();
        let (expected, held_out) = (steps(&mut one, 0..cases::STEPS), evaluated(&one));
        for (processes, part_rows) in [(2, 4), (2, 1), (3, 4), (4, 4)] {
            let name = name.to_owned();
            let found = together(processes, move |group| {
                let case = self::case(&name);
                let resources = resources(group, part_rows);
                let mut trainer = Trainer::new(&case.options, recipe(&case), resources, &case.model()).unwrap();
                let found = steps(&mut trainer, 0..cases::STEPS);
                trainer.check_equal().unwrap();
                (found, evaluated(&trainer), trainer.snapshot().unwrap())
            });
            for (reports, sums, snapshot) in &found {
                let what = format!("{classes:?}, {replica_rows:?} rows of a replica, {processes} processes");
                near(reports, &expected, &what);
                assert_eq!(sums.tokens, held_out.tokens);
                assert!((sums.perplexity() / held_out.perplexity() - 1.0).abs() < 1e-12, "{what}");
                assert!(bits(snapshot) == bits(&found[0].2), "{what}: the processes differ");
            }
        }
    }
}

/// A snapshot of two processes is that of four, bit for bit after the same steps, and the losses go on.
#[test]
fn a_run_goes_on_with_another_number_of_processes() {
    let (case, classes) = (case("base"), Classes::Sampled(9));
    let mut one =
        Trainer::new(&case.options, recipe(&case, classes, 1), resources(Group::default(), 4), &case.model()).unwrap();
    let expected = steps(&mut one, 0..12);
    let go_on = |processes: usize, from: Option<Snapshot>, range: std::ops::Range<usize>| {
        let mut all = together(processes, move |group| {
            let case = self::case("base");
            let recipe = recipe(&case, classes, 1);
            let is_first = group.is_first();
            let mut trainer = match &from {
                None => Trainer::new(&case.options, recipe, resources(group, 4), &case.model()).unwrap(),
                Some(snapshot) => {
                    // The others get it from process 0.
                    let snapshot = Snapshot::shared(is_first.then(|| snapshot.clone()), &group).unwrap();
                    Trainer::restore(&case.options, recipe, resources(group, 4), &snapshot).unwrap()
                }
            };
            let reports = steps(&mut trainer, range.clone());
            match is_first {
                true => (reports, Some(trainer.snapshot().unwrap())),
                false => {
                    trainer.join_snapshot().unwrap();
                    (reports, None)
                }
            }
        });
        all.swap_remove(0)
    };
    let (reports, snapshot) = go_on(2, None, 0..4);
    near(&reports, &expected[..4], "2 processes");
    let (none, same) = go_on(4, snapshot.clone(), 0..0);
    assert!(none.is_empty() && bits(&same.unwrap()) == bits(snapshot.as_ref().unwrap()));
    let (reports, snapshot) = go_on(4, snapshot, 4..8);
    near(&reports, &expected[4..8], "4 processes");
    let (reports, _) = go_on(1, snapshot, 8..12);
    near(&reports, &expected[8..], "1 process");
    // With the same number, the bits are those of a run that was not interrupted.
    let (_, half) = go_on(2, None, 0..4);
    let ((again, end), (whole, whole_end)) = (go_on(2, half, 4..8), go_on(2, None, 0..8));
    assert_eq!(again, whole[4..]);
    assert!(bits(&end.unwrap()) == bits(&whole_end.unwrap()));
}

/// One of three begins with another weight.
#[test]
fn processes_that_differ_are_found() {
    let found = together(3, |group| {
        let case = case("base");
        let mut model = case.model();
        if group.rank() == 2 {
            model.softmax_bias.data[5] += 1e-6;
        }
        let recipe = recipe(&case, Classes::Full, 1);
        let trainer = Trainer::new(&case.options, recipe, resources(group, 4), &model).unwrap();
        trainer.check_equal().unwrap_err()
    });
    for error in found {
        let TrainError::Diverged { step: 0, name, rank: 2 } = &error else { panic!("{error}") };
        assert_eq!(name, "weights/softmax/b");
    }
}

#[test]
fn more_processes_than_rows_are_refused() {
    let errors = together(5, |group| {
        let case = case("base");
        let recipe = recipe(&case, Classes::Full, 1);
        Trainer::new(&case.options, recipe, resources(group, 4), &case.model()).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("4 rows for 5 processes")), "{errors:?}");
}
