//! Steps on a GPU. `make gpu` runs them; elsewhere they are counted as skipped. Number formats and devices go through one check,
//! which the CPU passes with the formats that it has.

use elmo::{
    model::{DeviceName, Precision},
    train::{Evaluation, Recipe, Resources, Snapshot, StepReport, Trainer},
};

use super::cases::{self, Case};

const GPU: DeviceName = DeviceName::Cuda(0);
/// Steps that are compared: rounding grows with them.
const STEPS: usize = 20;

fn resources(device: DeviceName) -> Resources {
    Resources { device, threads: 1, ..Resources::default() }
}

fn trainer(case: &Case, precision: Precision, device: DeviceName) -> Trainer {
    Trainer::new(&case.options, case.recipe(precision, 2), resources(device), &case.model()).unwrap()
}

fn steps(trainer: &mut Trainer, case: &Case, range: std::ops::Range<usize>) -> Vec<StepReport> {
    let windows = cases::windows();
    range.map(|step| trainer.step_with(&windows[step], &case.draws(step)).unwrap()).collect()
}

/// The largest difference of losses and of norms from those of float64 on the CPU, which agree with the independent reference
/// (`fixtures.rs`); relative where numbers are large.
fn gap(case: &Case, precision: Precision, device: DeviceName) -> f64 {
    let expected = steps(&mut trainer(case, Precision::F64, DeviceName::Cpu), case, 0..STEPS);
    let found = steps(&mut trainer(case, precision, device), case, 0..STEPS);
    let of = |report: &StepReport| [report.loss_forward, report.loss_backward, report.grad_norm];
    let pairs = found.iter().zip(&expected).flat_map(|(a, b)| of(a).into_iter().zip(of(b)));
    pairs.map(|(a, b)| (a - b).abs() / b.abs().max(1.0)).fold(0.0, f64::max)
}

fn check(device: DeviceName, formats: &[(Precision, f64)]) {
    for case in cases::cases() {
        for &(precision, tolerance) in formats {
            let found = gap(&case, precision, device);
            assert!(found <= tolerance, "{}, {precision} on {device}: {found:e}", case.name);
        }
    }
}

/// The digits of float32, and those of bfloat16 without the growth of errors that the optimiser brings in 20 steps.
#[test]
fn number_formats_of_the_cpu_are_near_float64() {
    check(DeviceName::Cpu, &[(Precision::F32, 1e-4), (Precision::Bf16, 0.1)]);
}

#[test]
fn tf32_is_refused_on_a_cpu() {
    let case = &cases::cases()[0];
    let recipe = case.recipe(Precision::Tf32, 2);
    let error = Trainer::new(&case.options, recipe, resources(DeviceName::Cpu), &case.model()).unwrap_err();
    assert!(error.to_string().contains("TF32 is a number format of GPUs"), "{error}");
}

#[test]
#[ignore = "needs a GPU; make gpu runs it"]
fn number_formats_on_cuda_are_near_float64() {
    check(GPU, &[(Precision::F32, 1e-4), (Precision::Tf32, 0.02), (Precision::Bf16, 0.1)]);
}

/// Dropout that a GPU draws itself, and negatives that are drawn while it works: with others, a step would have other losses than on the CPU.
#[test]
#[ignore = "needs a GPU; make gpu runs it"]
fn random_numbers_on_cuda_are_those_of_the_cpu() {
    for case in cases::cases() {
        let run = |device| -> Vec<StepReport> {
            let recipe = Recipe { dropout: 0.3, ..case.recipe(Precision::F32, 2) };
            let mut trainer = Trainer::new(&case.options, recipe, resources(device), &case.model()).unwrap();
            cases::windows()[..5].iter().map(|window| trainer.step(window).unwrap()).collect()
        };
        for (gpu, cpu) in run(GPU).iter().zip(run(DeviceName::Cpu)) {
            let gap = (gpu.loss - cpu.loss).abs() / cpu.loss;
            assert!(gap <= 1e-4, "{}, step {}: {} on the GPU, {} on the CPU", case.name, gpu.step, gpu.loss, cpu.loss);
        }
    }
}

/// The switch is that of the last run, so that float32 is float32 again.
#[test]
#[ignore = "needs a GPU; make gpu runs it"]
fn tf32_does_not_outlive_its_run_on_cuda() {
    let case = &cases::cases()[0];
    let before = steps(&mut trainer(case, Precision::F32, GPU), case, 0..1);
    steps(&mut trainer(case, Precision::Tf32, GPU), case, 0..1);
    let after = steps(&mut trainer(case, Precision::F32, GPU), case, 0..1);
    let gap = (before[0].loss - after[0].loss).abs();
    assert!(gap < 1e-5, "{gap:e}");
}

/// A run that moves between a GPU and the CPU: the snapshot has the same bits on both, and the losses go on.
#[test]
#[ignore = "needs a GPU; make gpu runs it"]
fn a_run_moves_to_cuda_and_back() {
    let case = &cases::cases()[0];
    let expected = steps(&mut trainer(case, Precision::F64, DeviceName::Cpu), case, 0..STEPS);
    let moved = |snapshot: &Snapshot, device| {
        let recipe: Recipe = case.recipe(Precision::F32, 2);
        let trainer = Trainer::restore(&case.options, recipe, resources(device), snapshot).unwrap();
        assert_eq!(trainer.snapshot().unwrap(), *snapshot, "{device}");
        trainer
    };
    let mut run = trainer(case, Precision::F32, DeviceName::Cpu);
    let mut found = steps(&mut run, case, 0..5);
    let mut run = moved(&run.snapshot().unwrap(), GPU);
    found.extend(steps(&mut run, case, 5..12));
    let mut run = moved(&run.snapshot().unwrap(), DeviceName::Cpu);
    found.extend(steps(&mut run, case, 12..STEPS));
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found.loss - expected.loss).abs() < 1e-4 * expected.loss, "step {}", found.step);
    }
}

/// Held-out text on a GPU.
#[test]
#[ignore = "needs a GPU; make gpu runs it"]
fn held_out_perplexity_on_cuda_is_that_of_the_cpu() {
    let case = &cases::cases()[0];
    let windows = cases::windows();
    let perplexity = |device| {
        let mut evaluation = Evaluation::of_run(&trainer(case, Precision::F32, device), cases::ROWS).unwrap();
        let mut total = evaluation.window(&windows[0]).unwrap();
        windows[1..6].iter().for_each(|window| total.add(evaluation.window(window).unwrap()));
        total.perplexity()
    };
    let (gpu, cpu) = (perplexity(GPU), perplexity(DeviceName::Cpu));
    assert!((gpu / cpu - 1.0).abs() < 1e-5, "{gpu} on the GPU, {cpu} on the CPU");
}
