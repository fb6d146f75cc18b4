//! Speed of the training step, as a share of the speed of matrix products on the same device.
//!
//!     cargo bench -p elmo --bench training_step -- TEXT [STEPS] [WORDS] [small|medium|original] [LANES] [THREADS]
//!         [cpu|cuda:N] [f32|tf32|bf16] [ROWS]
//!
//! TEXT has a sentence on each line, tokens separated by spaces; its most frequent WORDS are the vocabulary. The ceiling
//! is measured before and after, with the same number of threads and in the same number format. At the original size, the speed is
//! also given by the operations of a step whose words all differ. Without a GPU, a measurement of one is skipped with a line that
//! says so.

use std::{
    collections::HashMap,
    convert::Infallible,
    error::Error,
    time::{Duration, Instant},
};

use elmo::{
    model::{DeviceName, Precision, cuda_devices, libtorch_ceiling},
    options::PublishedSize,
    train::{
        Boundaries, Direction, LanguageModel, Packer, Places, Recipe, Resources, Sentence, StepReport, Trainer, Window,
        keep_freed_memory,
    },
};

/// Operations of a token at the original size if no two words of a step are the same, in 1e9.
const GFLOP_PER_TOKEN: f64 = 0.823;
/// Steps before the measurement, on a CPU and on a GPU. The first one starts threads and touches memory. On a GPU libtorch loads a kernel
/// when it first needs it, and needs other ones for other numbers of words.
const WARM_UP: (usize, usize) = (1, 10);
/// Ids of `<S>`, `</S>` and `<UNK>` come first.
const SPECIALS: usize = 3;

fn main() -> Result<(), Box<dyn Error>> {
    keep_freed_memory();
    let arguments: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let number = |i: usize, default: usize| arguments.get(i).map_or(Ok(default), |word| word.parse());
    let Some(file) = arguments.first() else {
        println!("no measurement: name a file of text");
        return Ok(());
    };
    let text = std::fs::read_to_string(file)?;
    let (steps, words) = (number(1, 5)?, number(2, 30_000)?);
    let size = match arguments.get(3).map_or("small", String::as_str) {
        "small" => PublishedSize::Small,
        "medium" => PublishedSize::Medium,
        "original" => PublishedSize::Original,
        other => return Err(format!("{other} is not a size").into()),
    };
    let options = size.options();
    let cores = std::thread::available_parallelism()?.get();
    let word = |i: usize, default: &'static str| arguments.get(i).map_or(default, String::as_str);
    let device = device(word(6, "cpu"))?;
    let precision = match word(7, "f32") {
        "f32" => Precision::F32,
        "tf32" => Precision::Tf32,
        "bf16" => Precision::Bf16,
        other => return Err(format!("{other} is not a number format").into()),
    };
    if device != DeviceName::Cpu && cuda_devices() == 0 {
        println!("no measurement: libtorch sees no GPU");
        return Ok(());
    }
    let recipe = Recipe { lanes: number(4, 4)?, rows: number(8, 128)?, precision, ..Recipe::bilm() };
    let threads = if device == DeviceName::Cpu { number(5, cores)? } else { 1 };
    println!("{device}, {precision}, {} rows", recipe.rows);
    let warm_up = if device == DeviceName::Cpu { WARM_UP.0 } else { WARM_UP.1 };
    let windows = windows(&text, words, &recipe, warm_up + steps);
    let model = LanguageModel::initial(&options, words, recipe.seed);
    let mut trainer = Trainer::new(&options, recipe, Resources { device, threads, ..Resources::default() }, &model)?;
    windows[..warm_up].iter().try_for_each(|window| trainer.step(window).map(drop))?;
    let ceiling = || libtorch_ceiling(&options, &vec![device; threads], precision, 2.0);
    let before = ceiling()?;
    let (started, cpu) = (Instant::now(), processor_time());
    let mut reports = Vec::new();
    for window in &windows[warm_up..] {
        reports.push(trainer.step(window)?);
    }
    let (wall, cpu) = (started.elapsed(), processor_time() - cpu);
    print(&reports, wall, cpu, f64::midpoint(before, ceiling()?), threads);
    if size == PublishedSize::Original {
        let tokens = reports.iter().map(|r| r.tokens).sum::<u64>() as f64 / wall.as_secs_f64();
        println!("{:.2} TFLOP/s at {GFLOP_PER_TOKEN} GFLOP per token", tokens * GFLOP_PER_TOKEN / 1e3);
    }
    Ok(())
}

fn device(name: &str) -> Result<DeviceName, Box<dyn Error>> {
    match (name, name.strip_prefix("cuda:")) {
        ("cpu", _) => Ok(DeviceName::Cpu),
        (_, Some(number)) => Ok(DeviceName::Cuda(number.parse()?)),
        _ => Err(format!("{name} is not a device").into()),
    }
}

fn print(reports: &[StepReport], wall: Duration, cpu: Duration, ceiling: f64, threads: usize) {
    let sum = |of: fn(&StepReport) -> f64| reports.iter().map(of).sum::<f64>();
    let (tokens, gflop) = (sum(|r| r.tokens as f64), sum(|r| r.gflop));
    let (wall, cpu) = (wall.as_secs_f64(), cpu.as_secs_f64());
    println!(
        "{threads} threads, {} steps, {:.0} distinct words each",
        reports.len(),
        sum(|r| r.words as f64) / reports.len() as f64
    );
    println!("losses {:?}", reports.iter().map(|r| (r.loss * 1e4).round() / 1e4).collect::<Vec<_>>());
    println!("{:.0} tokens/s, {:.1} GFLOP/s, ceiling {ceiling:.1}", tokens / wall, gflop / wall);
    println!("{:.1} % of the ceiling", 100.0 * gflop / wall / ceiling);
    let busy = cpu / wall / threads as f64;
    println!(
        "{:.1} % while its threads ran ({:.0} % of the time)",
        100.0 * gflop / wall / ceiling / busy,
        100.0 * busy
    );
}

/// Processor time of all threads of this process.
fn processor_time() -> Duration {
    // SAFETY: the structure is plain numbers, which the call fills.
    let usage = unsafe {
        let mut usage = std::mem::zeroed::<libc::rusage>();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    let of = |time: libc::timeval| Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64);
    of(usage.ru_utime) + of(usage.ru_stime)
}

/// Windows of the first half of a text forward, and of the second half backward.
fn windows(text: &str, words: usize, recipe: &Recipe, n: usize) -> Vec<Window> {
    let mut counts = HashMap::<&str, u64>::new();
    text.split_whitespace().for_each(|word| *counts.entry(word).or_default() += 1);
    let mut counted: Vec<(&str, u64)> = counts.into_iter().collect();
    counted.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
    let ids: HashMap<&str, u32> =
        counted.iter().take(words - SPECIALS).zip(SPECIALS as u32..).map(|(&(word, _), id)| (word, id)).collect();
    let lines: Vec<&str> = text.lines().collect();
    let halves = [&lines[..lines.len() / 2], &lines[lines.len() / 2..]];
    let mut sources = halves.map(|lines| lines.iter().cycle());
    let boundaries = Boundaries { begin: 0, end: 1 };
    let mut packers = [Direction::Forward, Direction::Backward]
        .map(|direction| Packer::new(direction, boundaries, recipe.rows, recipe.positions));
    let mut places = Places::default();
    let mut next = || {
        let streams = [0, 1].map(|direction| {
            let source = &mut sources[direction];
            let sentence = || Ok::<_, Infallible>(source.next().map(|line| encoded(line, &ids)));
            packers[direction].next_window(&mut places, sentence).ok().flatten().unwrap_or_default()
        });
        Window::of_streams(places.finish(), streams, recipe.rows)
    };
    (0..n).map(|_| next()).collect()
}

fn encoded(line: &str, ids: &HashMap<&str, u32>) -> Sentence {
    line.split_whitespace().map(|word| (word, ids.get(word).copied().unwrap_or(2))).collect()
}
