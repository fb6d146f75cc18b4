//! The fits: the mix and its baselines, once for every seed. Each has a thread, and its result does not depend on the others.

use std::{
    fmt,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

use elmo::train::{Labelled, MixData, MixFit, MixLayers, MixRecipe, fit_mix};

use super::{dataset::Dataset, features::Features, scores::Scorer};
use crate::{
    error::{Error, Result},
    report::TARGET,
};

/// What is fitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum System {
    /// A mix of the layers of a biLM of the same sizes with random weights.
    Untrained,
    /// The token layer alone.
    Token,
    /// The top layer alone.
    Top,
    /// The mix.
    Mix,
}

impl System {
    /// All, the mix last.
    pub(super) const ALL: [Self; 4] = [Self::Untrained, Self::Token, Self::Top, Self::Mix];

    /// The key in the report.
    pub(super) fn key(self) -> &'static str {
        match self {
            Self::Untrained => "untrained",
            Self::Token => "token",
            Self::Top => "top",
            Self::Mix => "mix",
        }
    }

    fn layers(self, n_layers: usize) -> MixLayers {
        match self {
            Self::Untrained | Self::Mix => MixLayers::Learned,
            Self::Token => MixLayers::One(0),
            Self::Top => MixLayers::One(n_layers.saturating_sub(1)),
        }
    }
}

impl fmt::Display for System {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Untrained => "untrained biLM",
            Self::Token => "token layer",
            Self::Top => "top layer",
            Self::Mix => "learned mix",
        })
    }
}

/// Labelled vectors.
pub(super) struct Examples {
    features: Features,
    examples: Vec<Labelled>,
}

impl Examples {
    pub(super) fn new(features: Features, data: &Dataset) -> Self {
        let mut first = 0;
        let examples = features.counts().iter().zip(&data.labels).map(|(count, labels)| {
            let example = Labelled { first, vectors: *count as usize, labels: labels.clone() };
            first += u64::from(*count);
            example
        });
        let examples = examples.collect();
        Self { features, examples }
    }

    fn data(&self) -> MixData<'_> {
        MixData { vectors: &self.features, examples: &self.examples }
    }
}

/// Examples for training and for measuring.
pub(super) struct Split {
    pub(super) train: Examples,
    pub(super) dev: Examples,
}

/// A fit that is to be made.
#[derive(Clone, Copy)]
pub(super) struct Planned<'s> {
    pub(super) system: System,
    pub(super) seed: u64,
    pub(super) split: &'s Split,
}

/// A fit that was made.
#[derive(Debug)]
pub(super) struct Fitted {
    pub(super) system: System,
    pub(super) seed: u64,
    pub(super) fit: MixFit,
    /// On the dev examples.
    pub(super) scores: Vec<f64>,
}

/// Makes all fits, as many at a time as there are threads, and returns them in their order.
///
/// # Errors
/// [`Error::Stopped`], and [`Error::Failed`] when the features cannot be read or a number is not legal.
pub(super) fn fit_all(
    planned: &[Planned<'_>],
    recipe: &MixRecipe,
    scorer: &Scorer,
    threads: usize,
    stopped: &AtomicBool,
) -> Result<Vec<Fitted>> {
    let (next, fitted) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let planned_count = planned.len();
    let take = || {
        let number = next.fetch_add(1, Ordering::Relaxed);
        planned.get(number).map(|planned| (number, planned))
    };
    let work = || {
        while let Some((number, planned)) = take() {
            let outcome = fit_one(planned, recipe, scorer, stopped);
            if outcome.is_err() {
                // No other fit is begun.
                next.store(planned_count, Ordering::Relaxed);
            }
            fitted.lock().unwrap_or_else(PoisonError::into_inner).push((number, outcome));
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads.min(planned.len()) {
            // The others do the work of a thread that the operating system refuses.
            let _ = thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    let mut fitted = fitted.into_inner().unwrap_or_else(PoisonError::into_inner);
    fitted.sort_by_key(|(number, _)| *number);
    fitted.into_iter().map(|(_, outcome)| outcome).collect()
}

/// Refuses a fit whose mix no other command would read, or whose classifier has no numbers.
///
/// # Errors
/// [`Error::Check`] with what to change.
pub(super) fn check(fitted: &Fitted) -> Result<()> {
    let Fitted { system, seed, fit, .. } = fitted;
    let what = format!("the fit of the {system}, seed {seed}, has diverged");
    let what = what.as_str();
    let message = match fit.mix(false).check(what) {
        Err(error) => error.to_string(),
        Ok(()) if !fit.is_finite() => format!("{what}: a weight of the classifier is not a finite number"),
        Ok(()) => return Ok(()),
    };
    let help = "give a lower --learning-rate, or a lower --l2";
    Err(Error::Check { message, help: Some(help.to_owned()) })
}

fn fit_one(planned: &Planned<'_>, recipe: &MixRecipe, scorer: &Scorer, stopped: &AtomicBool) -> Result<Fitted> {
    let Planned { system, seed, split } = *planned;
    let recipe = MixRecipe { layers: system.layers(recipe.n_layers), seed, ..recipe.clone() };
    let gold = split.dev.examples.iter().map(|example| example.labels.as_slice());
    let score = |classes: &[Vec<u32>]| scorer.score(gold.clone(), classes).first().copied().unwrap_or(f64::NAN);
    let each_epoch = |epoch, score| tracing::debug!(target: TARGET, %system, seed, epoch, score, "pass");
    let fit = fit_mix(&recipe, split.train.data(), split.dev.data(), &score, &each_epoch, stopped);
    let fit = fit.map_err(|error| Error::Failed(format!("the fit of the {system}, seed {seed}: {error}")))?;
    let fit = fit.ok_or(Error::Stopped)?;
    let scores = scorer.score(gold.clone(), &fit.predictions);
    let shown =
        scorer.measures().iter().zip(&scores).next().map(|(name, score)| format!("{name} {:.2} %", 100.0 * score));
    tracing::info!(target: TARGET, passes = fit.epoch, "{system}, seed {seed}: {}", shown.unwrap_or_default());
    Ok(Fitted { system, seed, fit, scores })
}
