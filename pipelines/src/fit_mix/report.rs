//! What was fitted, and how good it is.

use std::{collections::BTreeMap, fmt};

use elmo::mix::ScalarMix;
use serde::Serialize;

use super::{
    fits::{Fitted, System},
    run::DataCounts,
    scores::Scorer,
};
use crate::report::{count, grid, table};

/// Scores by the name of the measure, 0 to 1.
type Scores = BTreeMap<&'static str, f64>;

/// The result of `elmo fit-mix`.
#[derive(Debug, Clone, Serialize)]
pub struct FitMixReport {
    /// Name of the model.
    pub model: String,
    /// Its fingerprint.
    pub fingerprint: String,
    /// What was learned from.
    pub train: DataCounts,
    /// What was measured on.
    pub dev: DataCounts,
    /// The labels.
    pub labels: Vec<String>,
    /// The measures, the one that chooses first.
    pub measures: &'static [&'static str],
    /// Baselines, and the mix last.
    pub systems: Vec<FittedSystem>,
    /// The file of the mix.
    pub output: String,
    /// The seed whose mix it is: the one with the best score.
    pub seed: u64,
    /// Its content.
    pub mix: ScalarMix,
    /// Its weights of the layers.
    pub weights: Vec<f64>,
    /// Files of features that were in the cache, and that were computed.
    pub features_reused: usize,
    /// Files of features that were computed.
    pub features_computed: usize,
}

/// One system with all seeds.
#[derive(Debug, Clone, Serialize)]
pub struct FittedSystem {
    /// `untrained`, `token`, `top` or `mix`.
    pub system: &'static str,
    #[serde(skip)]
    shown: System,
    /// Means over the seeds.
    pub mean: Scores,
    /// Standard deviations over the seeds (with n - 1); `None` with one seed.
    pub deviation: Option<Scores>,
    /// The result of each seed.
    pub seeds: Vec<SeedResult>,
}

/// One fit.
#[derive(Debug, Clone, Serialize)]
pub struct SeedResult {
    /// The seed.
    pub seed: u64,
    /// The pass after which it was the best.
    pub epoch: usize,
    /// Scores on the dev examples.
    pub scores: Scores,
    /// Weights of the layers.
    pub weights: Vec<f64>,
    /// Scale of the mix.
    pub gamma: f64,
}

impl FittedSystem {
    /// Summarises the fits of each system.
    pub(super) fn of(fitted: &[Fitted], scorer: &Scorer) -> Vec<Self> {
        let of_system = |system: System| {
            let fits: Vec<&Fitted> = fitted.iter().filter(|fit| fit.system == system).collect();
            let by_name = |score: &dyn Fn(usize) -> f64| -> Scores {
                scorer.measures().iter().enumerate().map(|(number, name)| (*name, score(number))).collect()
            };
            let scores =
                |number: usize| fits.iter().map(move |fit| fit.scores.get(number).copied().unwrap_or(f64::NAN));
            let result = |fit: &&Fitted| SeedResult {
                seed: fit.seed,
                epoch: fit.fit.epoch,
                scores: by_name(&|number| fit.scores[number]),
                weights: fit.fit.weights.clone(),
                gamma: fit.fit.head.gamma,
            };
            (!fits.is_empty()).then(|| Self {
                system: system.key(),
                shown: system,
                mean: by_name(&|number| mean(scores(number))),
                deviation: (fits.len() > 1).then(|| by_name(&|number| deviation(scores(number)))),
                seeds: fits.iter().map(result).collect(),
            })
        };
        System::ALL.into_iter().filter_map(of_system).collect()
    }

    /// Mean weights of the layers.
    fn weights(&self) -> String {
        let layers = self.seeds.first().map_or(0, |seed| seed.weights.len());
        let weight = |layer: usize| mean(self.seeds.iter().map(|seed| seed.weights[layer]));
        (0..layers).map(|layer| format!("{:.2}", weight(layer))).collect::<Vec<_>>().join(" ")
    }
}

fn mean(numbers: impl ExactSizeIterator<Item = f64>) -> f64 {
    let n = numbers.len() as f64;
    numbers.sum::<f64>() / n
}

fn deviation(numbers: impl ExactSizeIterator<Item = f64> + Clone) -> f64 {
    let (n, mean) = (numbers.len() as f64, mean(numbers.clone()));
    (numbers.map(|number| (number - mean).powi(2)).sum::<f64>() / (n - 1.0)).sqrt()
}

/// `entity_f1` as the head of a column.
fn heading(measure: &str) -> String {
    measure.replace("_f1", " F1").replace('_', " ") + ", %"
}

impl fmt::Display for FitMixReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let headings: Vec<String> = self.measures.iter().map(|measure| heading(measure)).collect();
        let header: Vec<&str> =
            [""].into_iter().chain(headings.iter().map(String::as_str)).chain(["layer weights"]).collect();
        let cell = |system: &FittedSystem, measure: &str| {
            let mean = 100.0 * system.mean.get(measure).copied().unwrap_or(f64::NAN);
            match system.deviation.as_ref().and_then(|deviation| deviation.get(measure)) {
                Some(deviation) => format!("{mean:.2} ± {:.2}", 100.0 * deviation),
                None => format!("{mean:.2}"),
            }
        };
        let row = |system: &FittedSystem| {
            let cells = self.measures.iter().map(|measure| cell(system, measure));
            std::iter::once(system.shown.to_string()).chain(cells).chain([system.weights()]).collect()
        };
        let rows: Vec<Vec<String>> = self.systems.iter().map(row).collect();
        f.write_str(&grid(&header, &rows))?;
        let seeds: Vec<String> =
            self.systems.iter().flat_map(|system| &system.seeds).map(|s| s.seed.to_string()).collect();
        let seeds = &seeds[..self.systems.first().map_or(0, |system| system.seeds.len())];
        let weights: Vec<String> = self.weights.iter().map(|weight| format!("{weight:.3}")).collect();
        let mut lines = vec![
            ("trained on", self.train.to_string()),
            ("measured on", self.dev.to_string()),
            ("labels", count(self.labels.len() as u64)),
            ("seeds", format!("{}: mean and standard deviation", seeds.join(", "))),
            ("mix", format!("{}, of seed {}", self.output, self.seed)),
            ("layer weights", weights.join(", ")),
            ("gamma", format!("{:.3}", self.mix.gamma)),
        ];
        if seeds.len() == 1 {
            lines[3].1 = seeds.join("");
        }
        write!(f, "\n{}", table(&lines))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: the mean of 1, 2 and 6 is 3; the squares of the differences are 4, 1 and 9, and 14 / 2 is 7.
    #[test]
    fn mean_and_standard_deviation() {
        let numbers = [1.0, 2.0, 6.0];
        assert_eq!(mean(numbers.into_iter()), 3.0);
        assert!((deviation(numbers.into_iter()) - 7.0_f64.sqrt()).abs() < 1e-15);
    }

    #[test]
    fn headings() {
        assert_eq!(["entity_f1", "accuracy", "macro_f1"].map(heading), ["entity F1, %", "accuracy, %", "macro F1, %"]);
    }
}
