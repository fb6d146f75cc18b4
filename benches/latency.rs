//! How long callers wait who embed one sentence at a time, some of them at once.
//!
//!     cargo bench -p elmo --bench latency -- [SIZE] [PRECISION] [DEVICE] [CALLERS...]
//!
//! The defaults are `original`, `f32`, `cpu` and 1, 8 and 64 callers. Each caller embeds a sentence of 13 words, waits for its vector, and
//! goes on with the next one. Words are in the cache, as they are in a server after a while. Weights are random. `elmo` itself asks for
//! large pages of memory; set THP_MEM_ALLOC_ENABLE=1 to do so here.

#[path = "text.rs"]
mod text;

use std::{
    error::Error,
    sync::Arc,
    time::{Duration, Instant},
};

use arrow::array::{ArrayRef, StringArray};
use elmo::{
    ColumnEmbedder, Elmo, EmbedSpec, EmbedderSettings, ModelData,
    model::parse_devices,
    options::PublishedSize,
    spec::{SentenceMode, TokenizerKind},
};
use text::Text;

/// Words of a sentence.
const WORDS: usize = 13;
/// Different sentences.
const SENTENCES: usize = 100;
/// Duration of each measurement.
const DURATION: Duration = Duration::from_secs(15);

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let argument = |at: usize, default: &str| arguments.get(at).map_or_else(|| default.to_owned(), String::clone);
    let (size, precision) = (argument(0, "original"), argument(1, "f32"));
    let size = match size.as_str() {
        "small" => PublishedSize::Small,
        "medium" => PublishedSize::Medium,
        "original" => PublishedSize::Original,
        other => return Err(format!("{other:?} is not a size: small, medium or original").into()),
    };
    let settings = EmbedderSettings {
        precision: precision.parse()?,
        devices: parse_devices(&argument(2, "cpu"))?,
        ..EmbedderSettings::default()
    };
    let callers: Vec<usize> = match arguments.get(3..) {
        Some(given @ [_, ..]) => given.iter().map(|word| word.parse()).collect::<Result<_, _>>()?,
        _ => vec![1, 8, 64],
    };
    let elmo = Elmo::from_data(ModelData::random(size.options(), "random")?, &settings)?;
    let spec = EmbedSpec { tokenizer: TokenizerKind::Whitespace, sentences: SentenceMode::Off, ..EmbedSpec::default() };
    let columns = ColumnEmbedder::new(&elmo, spec)?;
    let mut text = Text::new();
    let one = |_| Arc::new(StringArray::from(vec![text.sentence(WORDS)])) as ArrayRef;
    let sentences: Vec<ArrayRef> = (0..SENTENCES).map(one).collect();
    for sentence in &sentences {
        columns.embed(sentence)?;
    }
    println!("| callers | p50, ms | p99, ms | sentences/s |\n|---|---|---|---|");
    for callers in callers {
        if callers == 0 {
            return Err("there must be a caller".into());
        }
        wait_for_each(&columns, &sentences, callers, Duration::from_secs(1))?;
        let started = Instant::now();
        let mut waits = wait_for_each(&columns, &sentences, callers, DURATION)?;
        let seconds = started.elapsed().as_secs_f64();
        waits.sort_unstable();
        let at = |share: f64| waits[((waits.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3;
        println!("| {callers} | {:.1} | {:.1} | {:.0} |", at(0.5), at(0.99), waits.len() as f64 / seconds);
    }
    Ok(())
}

/// How long each sentence of each caller took.
fn wait_for_each(
    columns: &ColumnEmbedder,
    sentences: &[ArrayRef],
    callers: usize,
    duration: Duration,
) -> Result<Vec<Duration>, Box<dyn Error>> {
    let end = Instant::now() + duration;
    let call = |first: usize| -> elmo::Result<Vec<Duration>> {
        let mut waits = Vec::new();
        for sentence in sentences.iter().cycle().skip(first) {
            let started = Instant::now();
            columns.embed(sentence)?;
            waits.push(started.elapsed());
            if Instant::now() > end {
                break;
            }
        }
        Ok(waits)
    };
    let results: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..callers).map(|caller| scope.spawn(move || call(caller % sentences.len()))).collect();
        threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
    });
    let mut all = Vec::new();
    for result in results {
        all.extend(result.map_err(|_| "a thread has panicked")??);
    }
    Ok(all)
}
