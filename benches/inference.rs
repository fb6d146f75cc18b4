//! Checks a device against the CPU, then measures its speed in every precision: tokens per second, and the share of its matrix
//! products.
//!
//!     cargo bench -p elmo --bench inference -- [cuda|cuda:N|cpu] [SECONDS] [small|medium|original]
//!
//! SECONDS is the duration of each measurement, 4 by default; without a size, all are measured. Without the device, a line says so.
//! Weights are random, and words follow Zipf's law: 50,000 words, sentences of 1 to 60, on average 16. Results are the vectors of sentences, in host memory.
//! scripts/gpu runs this on machines with a GPU; it needs neither DataFusion nor Kafka.

#[path = "text.rs"]
mod text;

use std::{
    error::Error,
    time::{Duration, Instant},
};

use arrow::{
    array::{ArrayRef, AsArray},
    datatypes::Float32Type,
};
use elmo::{
    ColumnEmbedder, Elmo, EmbedSpec, EmbedderSettings, ModelData,
    engine::lanes,
    model::{
        BiLm, DeviceChoice, DeviceName, NoDropout, PackedBatch, Precision, compare, matmul_ceiling, parse_devices,
        resolve_devices, self_test,
    },
    options::PublishedSize,
    spec::{Layers, Level, Pooling, SentenceMode, TokenizerKind},
};
use text::Text;

/// Precisions of inference, and the largest difference of a number from the CPU in float32 that passes. Activations are up to 3.
const PRECISIONS: [(Precision, f32); 5] = [
    (Precision::F32, 1e-4),
    (Precision::Tf32, 0.05),
    (Precision::Bf16, 0.3),
    (Precision::F16, 0.05),
    (Precision::Int8, 0.3),
];
const SIZES: [(&str, PublishedSize); 3] =
    [("small", PublishedSize::Small), ("medium", PublishedSize::Medium), ("original", PublishedSize::Original)];
/// Bytes of text per submission; each thread has two submissions in flight.
const SUBMISSION_BYTES: usize = 2 << 20;
/// Threads that split texts into words and submit them.
const SUBMITTERS: usize = 6;
/// Rows of a batch of the model alone, and sentences of a row and their tokens.
const BATCH: [usize; 3] = [1024, 4, 16];

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let device = arguments.first().map_or("cuda", String::as_str);
    let seconds: f64 = arguments.get(1).map_or(Ok(4.0), |word| word.parse())?;
    let only = arguments.get(2).map(String::as_str);
    if let Some(name) = only.filter(|only| SIZES.iter().all(|(name, _)| name != only)) {
        return Err(format!("{name} is not a size").into());
    }
    let choices = parse_devices(device)?;
    let devices = match resolve_devices(&choices) {
        Ok(devices) => devices,
        Err(missing) => {
            println!("no measurement: {missing}");
            return Ok(());
        }
    };
    if let Some(Err(reason)) = devices[0].kernels(Precision::F32) {
        println!("without kernels of our own: {reason}\n");
    }
    println!("| model | precision | largest difference from the CPU | batches of other sizes |\n|---|---|---|---|");
    let mut failed = Vec::new();
    for (precision, tolerance) in PRECISIONS {
        if !has(devices[0], precision) {
            continue;
        }
        let (difference, by_batch) = check(&choices, devices[0], precision)?;
        println!("| small | {precision} | {difference:.1e} | {by_batch:.1e} |");
        // NaN fails too.
        if !(difference <= tolerance && by_batch <= tolerance) {
            failed.push(format!(
                "{precision}: {difference:.1e} and {by_batch:.1e}, at most {tolerance:.0e} was expected"
            ));
        }
    }
    println!(
        "\n| size | precision | tokens/s | TFLOP/s | matrix products, TFLOP/s | share | lanes busy | layers alone, tokens/s |\n\
         |---|---|---|---|---|---|---|---|"
    );
    for (name, size) in SIZES.into_iter().filter(|(name, _)| only.is_none_or(|only| only == *name)) {
        for (precision, _) in PRECISIONS {
            if has(devices[0], precision) {
                println!("| {name} | {precision} | {} |", measure(size, &choices, &devices, precision, seconds)?);
            }
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ").into()) }
}

/// Whether a device computes in a precision.
fn has(device: DeviceName, precision: Precision) -> bool {
    match precision {
        Precision::Int8 => device == DeviceName::Cpu,
        Precision::Tf32 | Precision::F16 => device != DeviceName::Cpu,
        _ => true,
    }
}

fn settings(choices: &[DeviceChoice], precision: Precision) -> EmbedderSettings {
    EmbedderSettings { devices: choices.to_vec(), precision, ..EmbedderSettings::default() }
}

/// Largest difference from the CPU in float32, through the model and through the engine; and that between batches.
fn check(choices: &[DeviceChoice], device: DeviceName, precision: Precision) -> Result<(f32, f32), Box<dyn Error>> {
    let model = || ModelData::random(PublishedSize::Small.options(), "random");
    let data = model()?;
    let there = BiLm::new(&data.options, &data.weights, device, precision)?;
    let here = BiLm::new(&data.options, &data.weights, DeviceName::Cpu, Precision::F32)?;
    let mut largest = compare(&here, &there)?;
    let by_batch = self_test(&there)?.largest_difference;
    let (exact, tested) = (
        Elmo::from_data(model()?, &settings(&[DeviceChoice::Cpu], Precision::F32))?,
        Elmo::from_data(data, &settings(choices, precision))?,
    );
    let texts = Text::new().take(40_000);
    for spec in specs() {
        let columns = [&exact, &tested].map(|elmo| ColumnEmbedder::new(elmo, spec.clone()));
        let [exact, tested] = columns;
        largest = larger(largest, difference(&exact?.embed(&texts)?.vectors, &tested?.embed(&texts)?.vectors)?);
    }
    Ok((largest, by_batch))
}

/// Every way in which layers are reduced.
fn specs() -> Vec<EmbedSpec> {
    let base = EmbedSpec { tokenizer: TokenizerKind::Whitespace, sentences: SentenceMode::Off, ..EmbedSpec::default() };
    let poolings = [Pooling::Mean, Pooling::Max, Pooling::First, Pooling::Last, Pooling::Ends];
    let mut specs: Vec<EmbedSpec> = poolings.map(|pooling| EmbedSpec { pooling, ..base.clone() }).to_vec();
    specs.push(EmbedSpec { layers: Layers::All, ..base.clone() });
    specs.push(EmbedSpec { level: Level::Token, ..base });
    specs
}

fn larger(a: f32, b: f32) -> f32 {
    if a.is_nan() || a > b { a } else { b }
}

/// Largest difference of the numbers in two columns of vectors, sentences or tokens.
fn difference(one: &ArrayRef, other: &ArrayRef) -> Result<f32, Box<dyn Error>> {
    let (one, other) = (numbers(one)?, numbers(other)?);
    if one.len() != other.len() {
        return Err(format!("{} numbers beside {}", one.len(), other.len()).into());
    }
    Ok(one.iter().zip(&other).map(|(a, b)| (a - b).abs()).fold(0.0, larger))
}

fn numbers(column: &ArrayRef) -> Result<Vec<f32>, Box<dyn Error>> {
    if let Some(vectors) = column.as_fixed_size_list_opt() {
        return Ok(vectors.values().as_primitive::<Float32Type>().values().to_vec());
    }
    let tokens = column.as_list_opt::<i32>().ok_or("a column of vectors was expected")?.values();
    let vectors = tokens.as_struct().column_by_name("embedding").ok_or("tokens without vectors")?;
    numbers(vectors)
}

/// A row of the table of speeds.
fn measure(
    size: PublishedSize,
    choices: &[DeviceChoice],
    devices: &[DeviceName],
    precision: Precision,
    seconds: f64,
) -> Result<String, Box<dyn Error>> {
    let options = size.options();
    let elmo = Elmo::from_data(ModelData::random(options.clone(), "random")?, &settings(choices, precision))?;
    let spec = EmbedSpec { tokenizer: TokenizerKind::Whitespace, sentences: SentenceMode::Off, ..EmbedSpec::default() };
    let columns = ColumnEmbedder::new(&elmo, spec)?;
    let mut text = Text::new();
    let texts: Vec<ArrayRef> = (0..SUBMITTERS).map(|_| text.take(SUBMISSION_BYTES)).collect();
    // Fills the tables of words, and has memory allocated.
    submit(&columns, &texts, Duration::from_secs_f64(seconds / 4.0))?;
    let ceiling = matmul_ceiling(&options, &lanes(devices, None), precision, 1.0)?;
    let (before, started) = (elmo.embedder().metrics(), Instant::now());
    submit(&columns, &texts, Duration::from_secs_f64(seconds))?;
    let (after, seconds) = (elmo.embedder().metrics(), started.elapsed().as_secs_f64());
    drop((columns, elmo));
    // On a CPU such a batch takes a minute.
    let alone = match devices[0] {
        DeviceName::Cpu => "not measured".to_owned(),
        device => format!("{:.0}", layers_alone(size, device, precision, seconds / 2.0)?),
    };
    let (tokens, gflop) = ((after.tokens - before.tokens) as f64, after.gflop - before.gflop);
    let threads = lanes(devices, None).len() as f64;
    let busy = (after.device_seconds - before.device_seconds) / seconds / threads;
    Ok(format!(
        "{:.0} | {:.2} | {:.2} | {:.0} % | {:.0} % | {alone}",
        tokens / seconds,
        gflop / seconds / 1e3,
        ceiling / 1e3,
        100.0 * gflop / seconds / ceiling,
        100.0 * busy
    ))
}

/// Embeds the texts again and again, each in a thread of its own.
fn submit(columns: &ColumnEmbedder, texts: &[ArrayRef], duration: Duration) -> Result<(), Box<dyn Error>> {
    let end = Instant::now() + duration;
    let one = |text: &ArrayRef| -> elmo::Result<()> {
        let mut in_flight = None;
        while Instant::now() < end {
            if let Some(pending) = in_flight.replace(columns.submit(text)?) {
                elmo::PendingColumns::wait(pending)?;
            }
        }
        in_flight.map_or(Ok(()), |pending| pending.wait().map(|_| ()))
    };
    let results: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = texts.iter().map(|text| scope.spawn(|| one(text))).collect();
        threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
    });
    results.into_iter().try_for_each(|result| Ok(result.map_err(|_| "a thread has panicked")??))
}

/// Tokens per second of the LSTM layers, of one batch after the other; nothing is downloaded.
fn layers_alone(
    size: PublishedSize,
    device: DeviceName,
    precision: Precision,
    seconds: f64,
) -> Result<f64, Box<dyn Error>> {
    let _no_gradients = tch::no_grad_guard();
    let data = ModelData::random(size.options(), "random")?;
    let model = BiLm::new(&data.options, &data.weights, device, precision)?;
    let [rows, in_row, tokens] = BATCH;
    let (words, sentences) = Text::new().numbered(rows * in_row, tokens);
    let table = model.token_table(&words.iter().map(String::as_str).collect::<Vec<_>>())?;
    let places: Vec<usize> = (0..sentences.len()).collect();
    let places: Vec<Vec<usize>> = places.chunks(in_row).map(<[usize]>::to_vec).collect();
    let start = model.zero_state()?;
    let run = || {
        let batch = PackedBatch::of_rows(&sentences, places.clone())?;
        model.forward(&table, &batch, &start, &NoDropout, false)
    };
    run()?;
    device.synchronize()?;
    let (started, mut batches) = (Instant::now(), 0);
    while started.elapsed() < Duration::from_secs_f64(seconds) {
        // Preparing the next batch takes the place of waiting for this one.
        run()?;
        batches += 1;
        if batches % 4 == 0 {
            device.synchronize()?;
        }
    }
    device.synchronize()?;
    Ok((batches * rows * in_row * tokens) as f64 / started.elapsed().as_secs_f64())
}
