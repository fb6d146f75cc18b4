//! Fifty steps of every case against the PyTorch program that made the fixtures, and what it says of packing, sampling,
//! schedules and evaluation.

use std::convert::Infallible;

use elmo::{
    model::Precision,
    options::ModelOptions,
    train::{
        Boundaries, Classes, Direction, Evaluated, Evaluation, LogUniform, Packer, Places, Recipe, Resources, Saved,
        Sentence, Stream, Trainer, Values, Window, Words,
    },
};
use serde_json::Value;

use super::cases::{self, Case, Numbers};

/// The reference computes in float64.
const TOLERANCE_F64: f64 = 1e-10;
/// Six times the largest difference of the reference in float32 from itself in float64.
const TOLERANCE_F32: f64 = 5e-6;

fn numbers(saved: &Saved) -> Vec<f64> {
    match &saved.values {
        Values::F32(values) => values.iter().map(|&v| f64::from(v)).collect(),
        Values::F64(values) => values.clone(),
    }
}

/// Remembers the largest difference, relative where numbers are above 1.
struct Worst {
    gap: f64,
    of: String,
}

impl Worst {
    fn compare(&mut self, what: &str, found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len(), "{what}");
        for (a, b) in found.iter().zip(expected) {
            let gap = (a - b).abs() / b.abs().max(1.0);
            assert!(!gap.is_nan(), "{what}: {a}, not {b}");
            if gap > self.gap {
                *self = Self { gap, of: what.to_owned() };
            }
        }
    }
}

/// Largest difference of a case in 50 steps.
fn run(case: &Case, expected: &Numbers, windows: &[Window], mut trainer: Trainer) -> Worst {
    let mut worst = Worst { gap: 0.0, of: String::new() };
    let of = |what: &str| expected[&format!("{}/{what}", case.name)].as_slice();
    for (step, window) in windows.iter().enumerate() {
        let report = trainer.step_with(window, &case.draws(step)).unwrap();
        assert_eq!(report.step, step as u64 + 1);
        let losses = [report.loss_forward, report.loss_backward, report.loss];
        worst.compare(&format!("loss of step {step}"), &losses, &of("loss")[3 * step..3 * step + 3]);
        worst.compare(&format!("norm of step {step}"), &[report.grad_norm], &of("norm")[step..=step]);
        worst.compare(&format!("clip of step {step}"), &[report.clip_scale], &of("clip")[step..=step]);
        worst.compare(&format!("rate of step {step}"), &[report.learning_rate], &of("learning_rate")[step..=step]);
        let kept = case.json["kept_weights"].as_array().unwrap();
        if kept.iter().any(|kept| kept.as_u64() == Some(report.step)) {
            let snapshot = trainer.snapshot().unwrap();
            for name in cases::strings(&case.json["tensors"]) {
                let expected = of(&format!("weights/{}/{name}", report.step));
                worst.compare(&name, &numbers(&snapshot.tensors[&format!("weights/{name}")]), expected);
            }
        }
    }
    // The error of the reference in float32 was measured for losses, norms and weights.
    if trainer.recipe().precision == Precision::F64 {
        compare_states(&mut worst, case, &of, &trainer);
    }
    worst
}

/// The states after the last window: `[2, L, R, X]` in the fixtures, and `[2, R, X]` of each layer here.
fn compare_states<'e>(worst: &mut Worst, case: &Case, of: &dyn Fn(&str) -> &'e [f64], trainer: &Trainer) {
    let layers = case.options.lstm.n_layers;
    let snapshot = trainer.snapshot().unwrap();
    for part in ["h", "c"] {
        let expected = of(&format!("state/{part}"));
        let n = expected.len() / (2 * layers);
        for layer in 0..layers {
            let found = numbers(&snapshot.tensors[&format!("lstm/{layer}/{part}")]);
            for direction in 0..2 {
                let expected = &expected[(direction * layers + layer) * n..][..n];
                worst.compare(&format!("{part} of layer {layer}"), &found[direction * n..][..n], expected);
            }
        }
    }
}

fn check(precision: Precision, lanes: usize, tolerance: f64) {
    let (expected, windows) = (cases::numbers("expected.safetensors"), cases::windows());
    let cases = cases::cases();
    assert!(cases.len() >= 17, "{} cases", cases.len());
    for case in &cases {
        let worst = run(case, &expected, &windows, case.trainer(precision, lanes, 1));
        println!("{}: {:e} ({})", case.name, worst.gap, worst.of);
        assert!(worst.gap <= tolerance, "{}, {precision}, {lanes} lanes: {:e}: {}", case.name, worst.gap, worst.of);
    }
}

#[test]
fn fifty_steps_in_float64_agree_with_pytorch() {
    check(Precision::F64, 1, TOLERANCE_F64);
}

/// Rows 0, 1, and 2 and 3 in lanes of their own.
#[test]
fn fifty_steps_in_three_lanes_agree_with_pytorch() {
    check(Precision::F64, 3, TOLERANCE_F64);
}

#[test]
fn fifty_steps_in_float32_agree_with_pytorch() {
    check(Precision::F32, 2, TOLERANCE_F32);
}

/// Words of the fixture, whose ids do not matter.
fn spelled(
    stream: &Stream,
    words: &Words,
    spelling: &[String],
    positions: usize,
) -> (Vec<Vec<String>>, Vec<Vec<String>>) {
    let inputs = stream.inputs.chunks(positions);
    let inputs = inputs.map(|row| row.iter().map(|&input| words.word(input as usize).to_owned()).collect());
    let targets = stream.targets.chunks(positions);
    let targets = targets.map(|row| row.iter().map(|&target| spelling[target as usize].clone()).collect());
    (inputs.collect(), targets.collect())
}

fn matrix(json: &Value) -> Vec<Vec<String>> {
    json.as_array().unwrap().iter().map(cases::strings).collect()
}

#[test]
fn windows_of_the_packing_fixture() {
    let fixture = cases::json("packing.json");
    let sentences = matrix(&fixture["sentences"]);
    let mut spelling = vec!["<S>".to_owned(), "</S>".to_owned()];
    spelling.extend(sentences.concat());
    let id = |word: &String| spelling.iter().position(|known| known == word).unwrap() as u32;
    let (rows, positions) =
        (fixture["rows"].as_u64().unwrap() as usize, fixture["positions"].as_u64().unwrap() as usize);
    for (name, direction) in [("forward", Direction::Forward), ("backward", Direction::Backward)] {
        let mut packer = Packer::new(direction, Boundaries { begin: 0, end: 1 }, rows, positions);
        let mut source =
            sentences.iter().map(|words| words.iter().map(|word| (word.as_str(), id(word))).collect::<Sentence>());
        let windows = fixture["windows"].as_array().unwrap();
        for expected in windows {
            let mut places = Places::default();
            let stream = packer.next_window(&mut places, || Ok::<_, Infallible>(source.next())).unwrap().unwrap();
            let expected = &expected[name];
            let (inputs, targets) = spelled(&stream, &places.finish(), &spelling, positions);
            assert_eq!((inputs, targets), (matrix(&expected["inputs"]), matrix(&expected["targets"])), "{name}");
        }
        assert!(packer.next_window(&mut Places::default(), || Ok::<_, Infallible>(source.next())).unwrap().is_none());
        let predictions: usize = sentences.iter().map(|words| words.len() + 1).sum();
        let dropped = predictions - windows.len() * rows * positions;
        assert_eq!(dropped as u64, fixture["dropped"].as_u64().unwrap());
    }
}

#[test]
fn the_windows_of_the_cases_are_those_of_their_text() {
    let text = cases::json("text.json");
    let vocabulary = cases::strings(&text["vocabulary"]);
    let boundaries = Boundaries { begin: 0, end: 1 };
    let packer = |direction| Packer::new(direction, boundaries, cases::ROWS, cases::POSITIONS);
    let mut packers = [Direction::Forward, Direction::Backward].map(packer);
    let sentences = ["forward", "backward"].map(|name| matrix(&text[name]));
    let mut sources = sentences.each_ref().map(|all| all.iter().map(|words| sentence(words, &vocabulary)));
    let mut places = Places::default();
    let text_of = |window: &Window| {
        let words =
            |inputs: &Vec<u32>| inputs.iter().map(|&i| window.words.word(i as usize).to_owned()).collect::<Vec<_>>();
        (window.inputs.each_ref().map(words), window.targets.clone())
    };
    for expected in cases::windows() {
        let mut next = |direction: usize| {
            let source = &mut sources[direction];
            let stream = packers[direction].next_window(&mut places, || Ok::<_, Infallible>(source.next()));
            stream.unwrap().unwrap()
        };
        let streams = [next(0), next(1)];
        assert_eq!(text_of(&Window::of_streams(places.finish(), streams, cases::ROWS)), text_of(&expected));
    }
}

fn sentence(words: &[String], vocabulary: &[String]) -> Sentence {
    let id = |word: &String| vocabulary.iter().position(|known| known == word).unwrap_or(2); // <UNK>
    words.iter().map(|word| (word.as_str(), id(word) as u32)).collect()
}

#[test]
fn probabilities_and_expected_counts_of_the_sampler_fixture() {
    // The fixture divides before it takes the logarithm, which costs it six digits for the rarest of 793,471 words.
    let close = |found: f64, expected: &Value| {
        let expected = expected.as_f64().unwrap();
        assert!((found - expected).abs() <= 1e-10 * expected, "{found}, not {expected}");
    };
    let fixture = cases::json("sampler.json");
    for entry in fixture["sampler"].as_array().unwrap() {
        let sampler = LogUniform::new(entry["vocabulary_size"].as_u64().unwrap() as usize);
        for (i, id) in entry["ids"].as_array().unwrap().iter().enumerate() {
            let id = id.as_i64().unwrap();
            match entry.get("probabilities") {
                Some(expected) => close(sampler.probability(id), &expected[i]),
                None => {
                    let (n, tries) = (entry["samples"].as_u64().unwrap(), entry["num_tries"].as_u64().unwrap());
                    close(sampler.expected_count(id, n as usize, tries), &entry["expected_counts"][i]);
                }
            }
        }
    }
}

#[test]
fn rates_of_the_schedule_fixture() {
    let fixture = cases::json("schedules.json");
    for entry in fixture["schedules"].as_array().unwrap() {
        let schedule = cases::schedule(&entry["schedule"]);
        for (step, expected) in (1..).zip(entry["rates"].as_array().unwrap()) {
            let (rate, expected) =
                (entry["learning_rate"].as_f64().unwrap() * schedule.factor(step), expected.as_f64().unwrap());
            assert!((rate - expected).abs() <= 1e-15, "{schedule:?}, step {step}: {rate}, not {expected}");
        }
    }
}

/// Perplexity with carried states, in rows of one token as bilm-tf measures it.
#[test]
fn perplexity_of_the_evaluation_fixture() {
    let fixture = cases::json("evaluation.json");
    let json = &fixture["model"];
    let options = ModelOptions::from_json(json["options"].to_string().as_bytes(), "evaluation").unwrap();
    let vocabulary = cases::strings(&cases::json("text.json")["vocabulary"]);
    let model =
        cases::model(&options, vocabulary.len(), json["seed"].as_u64().unwrap(), json["scale"].as_f64().unwrap());
    let carried = &fixture["carried"];
    let rows = carried["rows"].as_u64().unwrap() as usize;
    for (precision, tolerance) in [(Precision::F64, 1e-10), (Precision::F32, 5e-6)] {
        let recipe = Recipe { rows: 1, lanes: 1, classes: Classes::Full, precision, ..Recipe::bilm() };
        let trainer = Trainer::new(&options, recipe, Resources::default(), &model).unwrap();
        let mut evaluation = Evaluation::of_run(&trainer, rows).unwrap();
        let packer = |direction| Packer::new(direction, Boundaries { begin: 0, end: 1 }, rows, 1);
        let mut packers = [packer(Direction::Forward), packer(Direction::Backward)];
        let all: Vec<Sentence> =
            matrix(&carried["sentences"]).iter().map(|words| sentence(words, &vocabulary)).collect();
        let mut sources = [all.iter(), all.iter()];
        let (mut total, mut places) = (Evaluated::default(), Places::default());
        for expected in carried["losses"].as_array().unwrap() {
            let mut next = |direction: usize| {
                let source = &mut sources[direction];
                let stream =
                    packers[direction].next_window(&mut places, || Ok::<_, Infallible>(source.next().cloned()));
                stream.unwrap().unwrap()
            };
            let streams = [next(0), next(1)];
            let sums = evaluation.window(&Window::of_streams(places.finish(), streams, rows)).unwrap();
            for (direction, sum) in sums.log_probability.iter().enumerate() {
                let (found, expected) = (-sum / rows as f64, expected[direction].as_f64().unwrap());
                assert!((found - expected).abs() <= tolerance * expected, "{precision}: {found}, not {expected}");
            }
            total.add(sums);
        }
        for (found, name) in [
            (total.perplexity(), "perplexity"),
            (total.perplexity_of(0), "forward"),
            (total.perplexity_of(1), "backward"),
        ] {
            let expected = carried[name].as_f64().unwrap();
            assert!((found / expected - 1.0).abs() <= 10.0 * tolerance, "{precision}, {name}: {found}, not {expected}");
        }
    }
}
