//! The job of `elmo fit-mix`.

use std::{
    collections::BTreeMap,
    fmt,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use elmo::{
    Elmo, EmbedSpec, EmbedderSettings, ModelData,
    train::{MixLayers, MixRecipe, MixSettings, initial_weights},
};
use object_store::PutMode;
use serde::Serialize;

use super::{
    conll::{self, TagColumns},
    dataset::{Dataset, Labels},
    extract::{Extraction, Layered, features},
    features::sweep,
    fits::{Examples, Fitted, Planned, Split, System, check, fit_all},
    report::{FitMixReport, FittedSystem},
    rows,
    scores::Scorer,
};
use crate::{
    error::{Error, Result},
    report::{Progress, TARGET, count},
    stores::{Location, StoreError, Stores, writable::check_file},
};

/// The form of the labelled data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Data {
    /// Sentences with a tag for each token.
    Tags(TagColumns),
    /// Rows with a label for each text.
    Texts {
        /// Column of texts, or of lists of tokens.
        column: String,
        /// Column of labels.
        label: String,
    },
}

/// What to fit, and on what.
#[derive(Debug)]
pub struct FitMixJob {
    /// Files to learn from.
    pub train: Vec<String>,
    /// Files to measure on.
    pub dev: Vec<String>,
    /// Their form.
    pub data: Data,
    /// The biLM.
    pub model: ModelData,
    /// How it runs.
    pub settings: EmbedderSettings,
    /// How it reads texts; level and layers are the job's.
    pub spec: EmbedSpec,
    /// Layers are normalised before they are mixed.
    pub layer_norm: bool,
    /// The mix.
    pub output: Location,
    /// Replace a mix that exists.
    pub overwrite: bool,
    /// Folder for features.
    pub cache: PathBuf,
    /// How the mix and its baselines are learned.
    pub fit: MixSettings,
    /// A fit is made for each.
    pub seeds: Vec<u64>,
    /// Fit the baselines too.
    pub baselines: bool,
    /// Fits that are made at a time.
    pub threads: usize,
}

/// How much data there is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DataCounts {
    /// `sentences` or `texts`.
    pub unit: &'static str,
    /// Sentences or texts.
    pub examples: usize,
    /// Labels of each kind.
    pub labels: BTreeMap<String, usize>,
}

impl DataCounts {
    fn of(data: &Dataset, labels: &Labels) -> Self {
        let mut counts = BTreeMap::new();
        for number in data.labels.iter().flatten() {
            *counts.entry(labels.names()[*number as usize].clone()).or_default() += 1;
        }
        let unit = if data.is_tagged() { "sentences" } else { "texts" };
        Self { unit, examples: data.len(), labels: counts }
    }
}

impl fmt::Display for DataCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", count(self.examples as u64), self.unit)?;
        match self.unit {
            "sentences" => write!(f, ", {} tokens", count(self.labels.values().sum::<usize>() as u64)),
            _ => Ok(()),
        }
    }
}

/// The data of a job.
struct Labelled {
    train: Dataset,
    dev: Dataset,
    labels: Labels,
}

/// Reads the data, computes the layers of its tokens or finds them in the cache, fits the mix and its baselines, and writes the
/// mix with the best score.
///
/// # Errors
/// [`Error::Usage`] when the output exists; [`Error::Input`] or [`SourceError`](crate::source::SourceError) for data that cannot
/// be used; [`elmo::Error`] when the model fails; [`Error::Io`] when the cache cannot be written; [`StoreError`] when the mix
/// cannot be written; [`Error::Stopped`] when `stop` ends first.
pub async fn fit_mix(
    job: FitMixJob,
    stores: &Stores,
    stop: impl Future<Output = ()> + Send + 'static,
    progress: &dyn Progress,
) -> Result<FitMixReport> {
    let (output, overwrite) = (job.output.clone(), job.overwrite);
    if !overwrite && output.head().await?.is_some() {
        return Err(Error::usage(format!("{output} exists"), "give another --output, or --overwrite"));
    }
    check_file(&output)?;
    let data = read(&job, stores).await?;
    let stopped = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stopped);
    tokio::spawn(async move {
        stop.await;
        flag.store(true, Ordering::Relaxed);
    });
    let report = tokio::task::block_in_place(|| fit(job, &data, progress, &stopped))?;
    write(&output, &report).await?;
    Ok(report)
}

async fn write(output: &Location, report: &FitMixReport) -> Result<()> {
    let text = serde_json::to_string_pretty(&report.mix).map_err(|error| Error::Failed(error.to_string()))?;
    let written = output.put(format!("{text}\n").into(), PutMode::Overwrite).await;
    written.map_err(|error| StoreError::request("write", output, error))?;
    Ok(output.sync()?)
}

async fn read(job: &FitMixJob, stores: &Stores) -> Result<Labelled> {
    let mut labels = Labels::default();
    let train = read_files(job, stores, &job.train, &mut labels).await?;
    if labels.names().len() < 2 {
        let what =
            format!("label but {:?}: there is nothing to learn", labels.names().first().map_or("", String::as_str));
        return Err(train.empty(&what));
    }
    let known = labels.names().len();
    let dev = read_files(job, stores, &job.dev, &mut labels).await?;
    if let Some(unknown) = labels.names().get(known..).filter(|unknown| !unknown.is_empty()) {
        tracing::warn!(labels = unknown.join(", "), "only in the dev data: they cannot be learned and count as errors");
    }
    Ok(Labelled { train, dev, labels })
}

async fn read_files(job: &FitMixJob, stores: &Stores, inputs: &[String], labels: &mut Labels) -> Result<Dataset> {
    match &job.data {
        Data::Tags(columns) => conll::read(stores, inputs, &job.output, *columns, labels).await,
        Data::Texts { column, label } => rows::read(stores, inputs, &job.output, column, label, labels).await,
    }
}

/// Features of the models of a job.
struct Splits {
    trained: Split,
    /// Of each seed.
    untrained: Vec<Split>,
    reused: usize,
    computed: usize,
}

fn fit(job: FitMixJob, data: &Labelled, progress: &dyn Progress, stopped: &AtomicBool) -> Result<FitMixReport> {
    let (options, fingerprint) = (job.model.options.clone(), job.model.fingerprint.to_string());
    let (model, layer_norm) = (job.model.name.clone(), job.layer_norm);
    let recipe = MixRecipe {
        n_layers: options.n_layers_out(),
        width: options.width(),
        classes: data.labels.names().len(),
        layers: MixLayers::Learned,
        maximum: !data.train.is_tagged(),
        settings: job.fit,
        seed: 0,
    };
    let scorer = match data.train.is_tagged() {
        true => Scorer::of_tags(data.labels.names()),
        false => Scorer::Classes(data.labels.names().len()),
    };
    let (seeds, threads, output) = (job.seeds.clone(), job.threads, job.output.to_string());
    let splits = all_features(job, data, progress, stopped);
    progress.finish();
    let splits = splits?;
    let fitted = fit_all(&planned(&splits, &seeds), &recipe, &scorer, threads, stopped)?;
    let best = best(&fitted).ok_or_else(|| Error::Failed("no mix was fitted".to_owned()))?;
    check(best)?;
    Ok(FitMixReport {
        model,
        fingerprint,
        train: DataCounts::of(&data.train, &data.labels),
        dev: DataCounts::of(&data.dev, &data.labels),
        labels: data.labels.names().to_vec(),
        measures: scorer.measures(),
        systems: FittedSystem::of(&fitted, &scorer),
        output,
        seed: best.seed,
        mix: best.fit.mix(layer_norm),
        weights: best.fit.weights.clone(),
        features_reused: splits.reused,
        features_computed: splits.computed,
    })
}

/// One model after the other: only one is in memory.
fn all_features(job: FitMixJob, data: &Labelled, progress: &dyn Progress, stopped: &AtomicBool) -> Result<Splits> {
    let FitMixJob { model, settings, spec, layer_norm, cache, seeds, baselines, .. } = job;
    let options = model.options.clone();
    sweep(&cache);
    let models = if baselines { 1 + seeds.len() } else { 1 };
    let extraction = Extraction::new(&cache, stopped, progress, models * (data.train.len() + data.dev.len()));
    let (mut reused, mut computed) = (0, 0);
    let mut split = |model: ModelData, what: &str| -> Result<Split> {
        tracing::info!(target: TARGET, "layers of the {what}");
        let layered = Layered::new(&Elmo::from_data(model, &settings)?, &spec, layer_norm)?;
        let mut examples = |data: &Dataset| -> Result<Examples> {
            let (features, is_reused) = features(&layered, data, &extraction)?;
            *(if is_reused { &mut reused } else { &mut computed }) += 1;
            Ok(Examples::new(features, data))
        };
        Ok(Split { train: examples(&data.train)?, dev: examples(&data.dev)? })
    };
    let trained = split(model, "model")?;
    let mut untrained = Vec::new();
    for seed in seeds.iter().filter(|_| baselines) {
        let random = ModelData::new(options.clone(), initial_weights(&options, *seed), "untrained")?;
        untrained.push(split(random, &format!("untrained biLM, seed {seed}"))?);
    }
    Ok(Splits { trained, untrained, reused, computed })
}

/// Systems and seeds; without baselines, the mix alone.
fn planned<'s>(splits: &'s Splits, seeds: &[u64]) -> Vec<Planned<'s>> {
    let has_baselines = !splits.untrained.is_empty();
    let systems = System::ALL.into_iter().filter(|system| has_baselines || *system == System::Mix);
    let of_seeds = |system| {
        seeds.iter().enumerate().map(move |(number, seed)| {
            let split = match system {
                System::Untrained => splits.untrained.get(number).unwrap_or(&splits.trained),
                _ => &splits.trained,
            };
            Planned { system, seed: *seed, split }
        })
    };
    systems.flat_map(of_seeds).collect()
}

/// The mix with the best first score, the first of equals.
fn best(fitted: &[Fitted]) -> Option<&Fitted> {
    let score = |fit: &Fitted| fit.scores.first().copied().unwrap_or(f64::NEG_INFINITY);
    let mixes = fitted.iter().filter(|fit| fit.system == System::Mix);
    mixes.reduce(|best, fit| if score(fit) > score(best) { fit } else { best })
}
