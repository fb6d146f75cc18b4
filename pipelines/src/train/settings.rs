//! What identifies a run: settings that determine its numbers. A run goes on with these alone.

use std::collections::BTreeMap;

use elmo::{
    spec::{SentenceMode, TokenizerKind},
    train::{Classes, Optimizer, Recipe, Schedule},
};
use serde::{Deserialize, Serialize};

use super::{
    corpus::Shard,
    job::{TrainJob, Until},
};

/// What changes the rounding of sums and nothing else: a run goes on with other ones.
const ROUNDING: [&str; 4] = ["accumulate", "lanes", "processes", ROWS_AT_A_TIME];
/// Rows that a process computes together, as they were given.
const ROWS_AT_A_TIME: &str = "rows at a time";
/// Rows of a replica.
const REPLICA_ROWS: &str = "rows that share negatives";

/// Names and values, as they are compared and shown.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct Settings(BTreeMap<String, String>);

impl Settings {
    /// The settings of a job. `model` and `init` describe the sizes and where the weights begin, `words` the vocabulary,
    /// and `valid` the held-out text.
    pub(super) fn new(job: &TrainJob, recipe: &Recipe, model: &str, init: &str, words: &str, valid: &[Shard]) -> Self {
        let mut all = Self::default();
        all.set("model", model);
        all.set("init", init);
        all.set("vocabulary", words);
        all.set("column", &job.text.column);
        all.set("tokenizer", job.text.tokenizer);
        all.set("sentences", job.text.sentences);
        // Only where they differ from how the corpus is read: settings of earlier runs lack them.
        let (record, text) = (job.text.record, &job.text);
        if (record.tokenizer, record.sentences) != (Some(text.tokenizer), Some(text.sentences)) {
            let word = |word: Option<&'static str>| word.unwrap_or("none");
            all.set("record-tokenizer", word(record.tokenizer.map(TokenizerKind::as_str)));
            all.set("record-sentences", word(record.sentences.map(SentenceMode::as_str)));
        }
        all.set("on-error", if job.text.skip_bad_rows { "skip" } else { "fail" });
        all.set("order", job.order);
        all.set("block-sentences", job.text.block_sentences);
        all.set_recipe(recipe);
        all.set("accumulate", job.accumulate);
        all.set("processes", job.processes);
        all.set(ROWS_AT_A_TIME, job.part_rows);
        let texts: Vec<&str> = valid.iter().map(|shard| shard.sha256.as_str()).collect();
        all.set("held-out text", if texts.is_empty() { "none".to_owned() } else { texts.join(" ") });
        all
    }

    fn set_recipe(&mut self, recipe: &Recipe) {
        self.set("seed", recipe.seed);
        self.set("rows", recipe.rows);
        // Only where they are not all rows: settings of earlier runs lack them.
        if let Some(rows) = recipe.replica_rows.filter(|&rows| rows < recipe.rows) {
            self.set(REPLICA_ROWS, rows);
        }
        self.set("unroll", recipe.positions);
        self.set("dropout", recipe.dropout);
        self.set(
            "samples",
            match recipe.classes {
                Classes::Full => "0 (all words)".to_owned(),
                Classes::Sampled(samples) => samples.to_string(),
                Classes::Auto(samples) => format!("{samples}, all words of small vocabularies"),
            },
        );
        self.set("gradient-scale", recipe.gradient_scale);
        self.set("clip-norm", recipe.clip_norm.map_or("off".to_owned(), |norm| norm.to_string()));
        self.set(
            "optimizer",
            match recipe.optimizer {
                Optimizer::Adagrad { initial_accumulator } => format!("adagrad, accumulator {initial_accumulator}"),
                Optimizer::AdamW { beta1, beta2, epsilon, weight_decay } => {
                    format!("adamw, betas {beta1} and {beta2}, epsilon {epsilon}, weight decay {weight_decay}")
                }
            },
        );
        self.set("learning-rate", recipe.learning_rate);
        self.set(
            "schedule",
            match recipe.schedule {
                Schedule::Constant => "constant".to_owned(),
                Schedule::Cosine { warm_up, total, final_ratio } => {
                    format!("cosine over {total} steps, warm-up {warm_up}, final ratio {final_ratio}")
                }
                Schedule::InverseSquareRoot { warm_up } => format!("inverse-sqrt, warm-up {warm_up}"),
            },
        );
        self.set("precision", recipe.precision);
        self.set("lanes", recipe.lanes);
    }

    fn set(&mut self, name: &str, value: impl ToString) {
        self.0.insert(name.to_owned(), value.to_string());
    }

    /// Names and values.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// How the settings of a run differ from those given now.
    pub(super) fn differences(&self, now: &Self) -> Vec<String> {
        self.compared(now, |name| !ROUNDING.contains(&name))
    }

    /// How what only changes the rounding of sums differs.
    pub(super) fn rounding_differences(&self, now: &Self) -> Vec<String> {
        self.compared(now, |name| ROUNDING.contains(&name))
    }

    /// Rows of a window, and how many of them a process computes at a time.
    pub(super) fn rows(&self) -> Option<(usize, usize)> {
        let number = |name: &str| self.0.get(name)?.parse::<usize>().ok();
        let rows = number("rows")?;
        Some((rows, number(ROWS_AT_A_TIME).unwrap_or(rows)))
    }

    /// What runs of earlier versions had, which do not say it.
    fn unset(&self, name: &str) -> Option<String> {
        match name {
            "accumulate" | "processes" => Some("1".to_owned()),
            ROWS_AT_A_TIME | REPLICA_ROWS => self.0.get("rows").cloned(),
            _ => None,
        }
    }

    fn compared(&self, now: &Self, which: impl Fn(&str) -> bool) -> Vec<String> {
        let names: std::collections::BTreeSet<&String> = self.0.keys().chain(now.0.keys()).collect();
        let value = |all: &Self, name: &String| all.0.get(name).cloned().or_else(|| all.unset(name));
        let shown =
            |all: &Self, name: &String| value(all, name).map_or("not set".to_owned(), |value| shortened(&value));
        let differ = |name: &&String| which(name) && value(self, name) != value(now, name);
        let line = |name: &String| format!("{name}: {} in the run, {} now", shown(self, name), shown(now, name));
        names.into_iter().filter(differ).map(line).collect()
    }
}

/// Digests need not be shown in full.
fn shortened(value: &str) -> String {
    let words = value.split(' ').map(|word| match word {
        digest if digest.len() == 64 && digest.bytes().all(|byte| byte.is_ascii_hexdigit()) => &digest[..12],
        word => word,
    });
    words.collect::<Vec<_>>().join(" ")
}

/// The length of a run in words.
pub(super) fn length(until: Until, steps: u64) -> String {
    match until {
        Until::Steps(_) => format!("{steps} steps"),
        Until::Epochs(epochs) => format!("{epochs} epochs, {steps} steps"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(rows: usize, replica_rows: Option<usize>) -> Settings {
        let mut all = Settings::default();
        all.set_recipe(&Recipe { rows, replica_rows, ..Recipe::bilm() });
        all
    }

    /// A window of one replica is that of a run without any.
    #[test]
    fn replicas_identify_a_run_of_several() {
        let one = settings(128, None);
        assert_eq!(settings(128, Some(128)), one);
        let (all, replicas) = (settings(384, None), settings(384, Some(128)));
        assert_eq!(all.differences(&replicas), ["rows that share negatives: 384 in the run, 128 now"]);
        assert_eq!(replicas.differences(&replicas.clone()), [""; 0]);
    }
}
