//! Checks of a model, for `elmo model verify`.

use std::{fmt, sync::Arc};

use arrow::array::{Array, ArrayRef, AsArray, StringArray};
use elmo::{ColumnEmbedder, Elmo, EmbedSpec, ModelData};
use serde::Serialize;

use super::{error::ModelsError, files::ModelFiles, info, spec::ModelSpec};

/// The results of all checks.
#[derive(Debug, Serialize)]
pub struct Report {
    /// As the user named it.
    pub model: String,
    /// SHA-256 of options and weights; `None` when the model cannot be opened.
    pub fingerprint: Option<String>,
    /// In the order of execution.
    pub checks: Vec<Check>,
    /// The notes of `elmo model info`. They are no defects.
    pub notes: Vec<String>,
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// The property that is checked.
    pub name: &'static str,
    /// The model has the property.
    pub passed: bool,
    /// Details.
    pub found: String,
}

impl Check {
    fn new(name: &'static str, problem: Option<String>, fine: impl FnOnce() -> String) -> Self {
        Self { name, passed: problem.is_none(), found: problem.unwrap_or_else(fine) }
    }
}

impl Report {
    /// The report for a model that cannot be opened.
    pub fn unreadable(spec: &ModelSpec, error: &ModelsError) -> Self {
        let checks = vec![Check { name: "files and shapes", passed: false, found: error.to_string() }];
        Self { model: spec.to_string(), fingerprint: None, checks, notes: Vec::new() }
    }

    /// All checks passed.
    pub fn is_good(&self) -> bool {
        self.checks.iter().all(|check| check.passed)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "model        {}", self.model)?;
        if let Some(fingerprint) = &self.fingerprint {
            writeln!(f, "fingerprint  {fingerprint}")?;
        }
        for check in &self.checks {
            writeln!(f, "{}  {}: {}", if check.passed { "ok  " } else { "FAIL" }, check.name, check.found)?;
        }
        for note in &self.notes {
            writeln!(f, "note  {note}")?;
        }
        f.write_str(if self.is_good() { "the model is good\n" } else { "the model is bad\n" })
    }
}

/// The checks that need no forward pass. A model that opens has complete files and correct shapes, apart from its LM head.
pub fn of_data(spec: &ModelSpec, data: &ModelData, files: &ModelFiles, expected: Option<&str>) -> Report {
    let fingerprint = data.fingerprint.to_string();
    let mut checks = vec![
        Check::new("files and shapes", None, || {
            format!("{} tensors, all with the expected shape", data.weights.iter().count())
        }),
        Check::new("finite numbers", not_finite(data), || "no NaN, no infinity".into()),
    ];
    checks.extend(lm_head(data, files));
    if let Some(expected) = expected {
        let problem = wrong_fingerprint(&fingerprint, expected);
        checks.push(Check::new("fingerprint", problem, || "as expected".into()));
    }
    Report { model: spec.to_string(), fingerprint: Some(fingerprint), checks, notes: info::notes(data) }
}

/// Reads the LM head, which opening a model does not; `None` for a model without one.
fn lm_head(data: &ModelData, files: &ModelFiles) -> Option<Check> {
    const NAME: &str = "LM head";
    let read = files.read_lm_head(data).transpose()?;
    Some(match read {
        Ok(head) => Check::new(NAME, None, || format!("{} words, and a softmax of finite numbers", head.words().len())),
        Err(error) => Check::new(NAME, Some(error.to_string()), String::new),
    })
}

fn not_finite(data: &ModelData) -> Option<String> {
    data.weights.iter().find_map(|(name, tensor)| {
        let at = tensor.data.iter().position(|x| !x.is_finite())?;
        Some(format!("{name} has {} at index {at} of shape {:?}", tensor.data[at], tensor.shape))
    })
}

/// Compares a fingerprint with an expected prefix.
fn wrong_fingerprint(found: &str, expected: &str) -> Option<String> {
    const MIN_DIGITS: usize = 12;
    match expected.len() {
        n if n < MIN_DIGITS => Some(format!("the expected value has {n} digits; give at least {MIN_DIGITS}")),
        _ if found.starts_with(&expected.to_ascii_lowercase()) => None,
        _ => Some(format!("expected {expected}, found {found}")),
    }
}

/// A forward pass over a few sentences. Vectors must be finite and must not depend on the other sentences of the batch.
pub fn forward(elmo: &Elmo) -> Check {
    let problem = try_forward(elmo).unwrap_or_else(|e| Some(e.to_string()));
    Check::new("forward pass", problem, || {
        format!("{} sentences: finite, and the same alone as in a batch", TEXTS.len())
    })
}

const TEXTS: [&str; 4] = [
    "The river froze before the first of December .",
    "Yes .",
    "She said that the boats , which nobody had paid for , would leave without them .",
    "Grüße aus Köln !",
];

fn try_forward(elmo: &Elmo) -> elmo::Result<Option<String>> {
    let embedder = ColumnEmbedder::new(elmo, EmbedSpec::default())?;
    let together = embed(&embedder, &TEXTS)?;
    for (i, text) in TEXTS.iter().enumerate() {
        if together[i].is_empty() || together[i].iter().any(|x| !x.is_finite()) {
            return Ok(Some(format!("the vector of {text:?} is not finite")));
        }
        if distance(&embed(&embedder, &[text])?[0], &together[i]) > TOLERANCE {
            return Ok(Some(format!("the vector of {text:?} depends on the other sentences of its batch")));
        }
    }
    Ok(None)
}

/// Tolerance for rounding on devices other than the CPU. On the CPU vectors are bit-identical, as `elmo doctor` checks.
const TOLERANCE: f32 = 1e-4;

/// Largest absolute difference of two vectors; infinite when their lengths differ.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    match a.len() == b.len() {
        true => a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max),
        false => f32::INFINITY,
    }
}

/// One vector per text; empty for NULL.
fn embed(embedder: &ColumnEmbedder, texts: &[&str]) -> elmo::Result<Vec<Vec<f32>>> {
    let column: ArrayRef = Arc::new(StringArray::from(texts.to_vec()));
    let vectors = embedder.embed(&column)?.vectors;
    let rows = vectors.as_fixed_size_list();
    Ok((0..texts.len())
        .map(|i| match rows.is_null(i) {
            true => Vec::new(),
            false => rows.value(i).as_primitive::<arrow::datatypes::Float32Type>().values().to_vec(),
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprints_may_be_shortened_but_not_too_much() {
        let found = "ab12cd34ef56ab12cd34ef56ab12cd34ef56ab12cd34ef56ab12cd34ef56ab12";
        assert_eq!(wrong_fingerprint(found, "AB12cd34ef56"), None);
        assert_eq!(wrong_fingerprint(found, found), None);
        assert!(wrong_fingerprint(found, "ab12").is_some_and(|why| why.contains("at least 12")));
        assert!(wrong_fingerprint(found, "ff12cd34ef56").is_some_and(|why| why.starts_with("expected ff12")));
    }
}
