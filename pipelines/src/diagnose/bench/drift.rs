//! How far a faster precision moves the vectors of a text away from those in float32.

use std::{collections::HashSet, fmt, sync::Arc};

use arrow::{
    array::{ArrayRef, AsArray, StringArray},
    datatypes::Float32Type,
};
use elmo::{
    ColumnEmbedder, Elmo, EmbedSpec, EmbedderSettings, ModelData,
    model::Precision,
    spec::{Layers, Level, OnError},
};
use serde::Serialize;

use crate::{
    error::{Error, Result},
    report::{count, table},
};

/// Maximum number of texts to compare.
const TEXTS: usize = 1000;
/// Texts whose vectors of tokens are in memory at the same time.
const AT_ONCE: usize = 64;
/// Bytes of text to read: enough for [`TEXTS`] distinct ones in most files.
const READ_BYTES: usize = 16 << 20;
/// Texts longer than this are not compared.
const MAX_BYTES: usize = 4096;

/// What is compared.
#[derive(Debug)]
pub struct Drift {
    /// The model.
    pub data: ModelData,
    /// Devices, and the precision that is compared with float32.
    pub settings: EmbedderSettings,
    /// Address of a file whose column `text` is embedded; `None` for the built-in reviews.
    pub text: Option<String>,
}

/// The differences between vectors in a precision and in float32.
#[derive(Debug, Clone, Serialize)]
pub struct DriftReport {
    /// Name of the model.
    pub model: String,
    /// The precision.
    pub precision: String,
    /// The devices.
    pub devices: Vec<String>,
    /// Distinct texts compared.
    pub texts: usize,
    /// Tokens compared.
    pub tokens: u64,
    /// Each layer of the vectors of tokens, the token layer first.
    pub layers: Vec<LayerDrift>,
    /// Cosine of the vectors of a text, mean pooling and mean of layers: the smallest.
    pub cosine_min: f64,
    /// The mean of these cosines.
    pub cosine_mean: f64,
    /// Share of the texts whose nearest other text, by cosine, is the same in both precisions.
    pub same_neighbour: f64,
}

/// The difference in one layer.
#[derive(Debug, Clone, Default, Serialize)]
pub struct LayerDrift {
    /// Largest difference of two numbers.
    pub max: f64,
    /// Root mean square of the differences over that of the numbers in float32.
    pub relative_rms: f64,
}

/// Embeds up to a thousand distinct texts in both precisions.
///
/// # Errors
/// [`Error::Usage`] if the precision is float32, or the text has fewer than two distinct texts; as [`super::run`].
pub async fn run(drift: Drift) -> Result<DriftReport> {
    let Drift { data, settings, text } = drift;
    if settings.precision == Precision::F32 {
        return Err(Error::usage("--drift compares another precision with f32", "add --precision int8 or bf16"));
    }
    let texts = match &text {
        Some(address) => super::read_texts(address, READ_BYTES).await?,
        None => super::built_in_texts(),
    };
    let mut seen = HashSet::new();
    let texts = texts.iter().filter(|text| text.len() <= MAX_BYTES && seen.insert(text.as_str()));
    let texts: Vec<&str> = texts.take(TEXTS).map(String::as_str).collect();
    if texts.len() < 2 {
        let message = "--drift needs at least two distinct texts of at most 4 KiB";
        return Err(Error::usage(message, "give a file with more texts"));
    }
    let exact = EmbedderSettings { precision: Precision::F32, ..settings.clone() };
    let [exact, rounded] = [Elmo::from_data(data.clone(), &exact)?, Elmo::from_data(data, &settings)?];
    compare(&exact, &rounded, &texts)
}

fn compare(exact: &Elmo, rounded: &Elmo, texts: &[&str]) -> Result<DriftReport> {
    let (layers, tokens) = layers(exact, rounded, texts)?;
    let spec = EmbedSpec { on_error: OnError::Null, ..exact.spec() };
    let [pooled, moved] = [vectors(exact, &spec, texts)?, vectors(rounded, &spec, texts)?];
    let width = pooled.len() / texts.len();
    let [pooled, moved] = [pooled, moved].map(|vectors| unit(&vectors, width));
    let cosines: Vec<f64> = pooled.chunks(width).zip(moved.chunks(width)).map(|(a, b)| dot(a, b)).collect();
    let (nearest, nearest_moved) = (nearest(&pooled, width), nearest(&moved, width));
    let same = nearest.iter().zip(&nearest_moved).filter(|(a, b)| a == b).count();
    Ok(DriftReport {
        model: exact.name().to_owned(),
        precision: rounded.precision().to_string(),
        devices: rounded.devices().iter().map(ToString::to_string).collect(),
        texts: texts.len(),
        tokens,
        layers,
        cosine_min: -cosines.iter().map(|cosine| -cosine).fold(f64::NEG_INFINITY, larger),
        cosine_mean: cosines.iter().sum::<f64>() / cosines.len() as f64,
        same_neighbour: same as f64 / texts.len() as f64,
    })
}

/// The differences in the layers of all tokens, and the number of tokens.
fn layers(exact: &Elmo, rounded: &Elmo, texts: &[&str]) -> Result<(Vec<LayerDrift>, u64)> {
    let spec = EmbedSpec { level: Level::Token, layers: Layers::All, on_error: OnError::Null, ..exact.spec() };
    let (count, width) = (exact.options().n_layers_out(), exact.options().width());
    let mut sums = vec![(0.0_f64, 0.0_f64, 0.0_f64); count];
    let mut tokens = 0;
    for texts in texts.chunks(AT_ONCE) {
        let [exact, rounded] = [vectors(exact, &spec, texts)?, vectors(rounded, &spec, texts)?];
        if exact.len() != rounded.len() {
            return Err(Error::Failed("a text has a vector in one of the precisions only".to_owned()));
        }
        tokens += (exact.len() / (count * width)) as u64;
        for (number, (exact, rounded)) in exact.chunks(width).zip(rounded.chunks(width)).enumerate() {
            let (max, differences, squares) = &mut sums[number % count];
            for (a, b) in exact.iter().zip(rounded) {
                let (a, difference) = (f64::from(*a), f64::from(*a) - f64::from(*b));
                *max = larger(*max, difference.abs());
                *differences += difference * difference;
                *squares += a * a;
            }
        }
    }
    let layer = |(max, differences, squares): (f64, f64, f64)| LayerDrift {
        max,
        relative_rms: (differences / squares.max(f64::MIN_POSITIVE)).sqrt(),
    };
    Ok((sums.into_iter().map(layer).collect(), tokens))
}

/// The larger of two numbers, or NaN if one is NaN.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

/// All numbers of all vectors, zeros for a text without a vector.
fn vectors(elmo: &Elmo, spec: &EmbedSpec, texts: &[&str]) -> Result<Vec<f32>> {
    let column: ArrayRef = Arc::new(StringArray::from_iter_values(texts));
    let vectors = ColumnEmbedder::new(elmo, spec.clone())?.embed(&column)?.vectors;
    let vectors = match spec.level {
        Level::Token => vectors.as_list::<i32>().values().as_struct().column_by_name("embedding").cloned(),
        _ => Some(vectors),
    };
    let vectors = vectors.ok_or_else(|| Error::Failed("the vectors of tokens have no column embedding".to_owned()))?;
    Ok(vectors.as_fixed_size_list().values().as_primitive::<Float32Type>().values().to_vec())
}

/// Vectors of length 1.
fn unit(vectors: &[f32], width: usize) -> Vec<f32> {
    let scaled = |vector: &[f32]| {
        let length = dot(vector, vector).sqrt().max(f64::MIN_POSITIVE);
        vector.iter().map(|x| (f64::from(*x) / length) as f32).collect::<Vec<_>>()
    };
    vectors.chunks(width).flat_map(scaled).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// The nearest other vector of each.
fn nearest(vectors: &[f32], width: usize) -> Vec<usize> {
    let one = |(row, vector): (usize, &[f32])| {
        let others =
            vectors.chunks(width).map(|other| dot(vector, other)).enumerate().filter(|(other, _)| *other != row);
        others.max_by(|a, b| a.1.total_cmp(&b.1)).map_or(row, |(other, _)| other)
    };
    vectors.chunks(width).enumerate().map(one).collect()
}

impl fmt::Display for DriftReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |share: f64| format!("{:.2} %", 100.0 * share);
        let mut rows = vec![
            ("model", self.model.clone()),
            ("precision", format!("{} on {}, against f32", self.precision, self.devices.join(" "))),
            ("texts", format!("{} distinct, {} tokens", count(self.texts as u64), count(self.tokens))),
        ];
        let names: Vec<String> = (0..self.layers.len()).map(|layer| format!("layer {layer}")).collect();
        for (name, layer) in names.iter().zip(&self.layers) {
            rows.push((name, format!("relative rms {}, at most {:.4}", percent(layer.relative_rms), layer.max)));
        }
        rows.push(("cosine of texts", format!("{:.6} on average, at least {:.6}", self.cosine_mean, self.cosine_min)));
        rows.push(("same neighbour", percent(self.same_neighbour)));
        f.write_str(&table(&rows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected: by hand.
    #[test]
    fn neighbours_and_cosines() {
        let vectors = unit(&[3.0, 0.0, 1.0, 1.0, 0.0, 5.0, 0.1, 0.9], 2);
        assert_eq!(vectors[0..2], [1.0, 0.0]);
        assert!((dot(&vectors[0..2], &vectors[2..4]) - 0.5_f64.sqrt()).abs() < 1e-6);
        assert_eq!(nearest(&vectors, 2), [1, 3, 3, 2]);
    }

    #[test]
    fn a_model_does_not_drift_from_itself() {
        let tiny = Elmo::tiny().unwrap();
        let report = compare(&tiny, &tiny, &["It rained.", "We stayed in. It was cold.", "Soup!"]).unwrap();
        assert_eq!((report.texts, report.tokens, report.layers.len()), (3, 13, 3));
        assert!(report.layers.iter().all(|layer| (layer.max, layer.relative_rms) == (0.0, 0.0)), "{report:?}");
        assert!(report.cosine_min > 0.999_999 && (report.same_neighbour - 1.0).abs() < 1e-9, "{report:?}");
    }
}
