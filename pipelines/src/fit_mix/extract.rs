//! The layers of all tokens of a data set, from the cache or computed.

use std::{
    cell::Cell,
    collections::VecDeque,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use arrow::array::{Array, AsArray};
use elmo::{
    ColumnEmbedder, Elmo, EmbedSpec,
    mix::ScalarMix,
    spec::{Layers, Level},
};
use sha2::{Digest, Sha256};

use super::{
    dataset::Dataset,
    features::{self, Draft, Features, Key},
};
use crate::{
    error::{Error, Result},
    report::{Progress, Snapshot},
};

/// Version of the key: features of other programs are not read.
const VERSION: &str = "elmo features 1";
/// Parts that are queued while one is written.
const AHEAD: usize = 3;
/// Weight 0 in a softmax beside 0.
const NEVER: f32 = -1000.0;

/// What extraction needs besides a model and data.
pub(super) struct Extraction<'e> {
    /// Folder of the cache.
    pub(super) folder: &'e Path,
    pub(super) stopped: &'e AtomicBool,
    progress: &'e dyn Progress,
    /// Rows and tokens of all data sets so far.
    seen: Cell<Snapshot>,
}

impl<'e> Extraction<'e> {
    /// Of data sets that have so many examples together.
    pub(super) fn new(folder: &'e Path, stopped: &'e AtomicBool, progress: &'e dyn Progress, examples: usize) -> Self {
        let seen = Cell::new(Snapshot { rows_total: Some(examples as u64), ..Snapshot::default() });
        Self { folder, stopped, progress, seen }
    }

    fn advance(&self, counts: &[u32]) {
        let Snapshot { rows, tokens, .. } = self.seen.get();
        let (rows, more) = (rows + counts.len() as u64, counts.iter().map(|count| u64::from(*count)).sum::<u64>());
        self.seen.set(Snapshot { rows, tokens: tokens + more, ..self.seen.get() });
        self.progress.update(&self.seen.get());
    }
}

/// A model with its settings.
pub(super) struct Layered {
    /// One for all layers, or one for each layer if layers are normalised: their statistics are those of a sentence, which only
    /// the engine knows.
    embedders: Vec<ColumnEmbedder>,
    stride: usize,
}

impl Layered {
    /// With `layer_norm`, each layer is normalised as the mix will normalise it.
    ///
    /// # Errors
    /// As [`ColumnEmbedder::new`].
    pub(super) fn new(elmo: &Elmo, spec: &EmbedSpec, layer_norm: bool) -> Result<Self> {
        let spec = |layers| EmbedSpec { level: Level::Token, layers, ..spec.clone() };
        let n_layers = elmo.options().n_layers_out();
        let only = |layer: usize| {
            let scalars = (0..n_layers).map(|other| if other == layer { 0.0 } else { NEVER }).collect();
            Layers::Mix(ScalarMix { scalars, gamma: 1.0, layer_norm: true })
        };
        let layers: Vec<Layers> = if layer_norm { (0..n_layers).map(only).collect() } else { vec![Layers::All] };
        let embedders = layers.into_iter().map(|layers| ColumnEmbedder::new(elmo, spec(layers)));
        let embedders = embedders.collect::<elmo::Result<Vec<_>>>()?;
        Ok(Self { stride: embedders.iter().map(ColumnEmbedder::width).sum(), embedders })
    }

    fn key(&self, data: &Dataset) -> Key {
        let mut hash = Sha256::new();
        hash.update(VERSION);
        for embedder in &self.embedders {
            hash.update(embedder.device_kind());
            for (key, value) in embedder.metadata() {
                hash.update(format!("{key}={value}\n"));
            }
        }
        hash.update(data.digest());
        hash.finalize().into()
    }
}

/// The features of a data set, and whether they come from the cache.
///
/// # Errors
/// [`Error::Input`] for an example that cannot be embedded, [`Error::Io`] when the cache cannot be written,
/// [`Error::Stopped`], and those of the engine.
pub(super) fn features(model: &Layered, data: &Dataset, extraction: &Extraction<'_>) -> Result<(Features, bool)> {
    let key = model.key(data);
    let path = features::path(extraction.folder, &key);
    if let Some(found) = Features::open(&path, &key, model.stride)
        && found.counts().len() == data.len()
    {
        check(data, 0, found.counts())?;
        extraction.advance(found.counts());
        return Ok((found, true));
    }
    let mut draft = Draft::create(&path, key, model.stride)?;
    let (mut queue, mut parts, mut done) = (VecDeque::new(), data.parts.iter(), 0);
    loop {
        if extraction.stopped.load(Ordering::Relaxed) {
            return Err(Error::Stopped);
        }
        while queue.len() < AHEAD
            && let Some(part) = parts.next()
        {
            let pending = model.embedders.iter().map(|embedder| embedder.submit(part));
            queue.push_back(pending.collect::<elmo::Result<Vec<_>>>()?);
        }
        let Some(pending) = queue.pop_front() else { break };
        let of_part = |error: elmo::Error| match error {
            elmo::Error::Row { row, reason } => data.error(done + row, &reason.to_string()),
            error => error.into(),
        };
        let columns = pending.into_iter().map(|pending| pending.wait().map_err(of_part));
        let columns = columns.collect::<Result<Vec<_>>>()?;
        let counts = columns.first().map(|columns| columns.tokens.values().to_vec()).unwrap_or_default();
        check(data, done, &counts)?;
        let layers: Vec<&[u8]> = columns.iter().map(|columns| bytes_of(columns.vectors.as_ref())).collect();
        interleave(&layers, counts.iter().map(|count| *count as usize).sum(), &mut draft)?;
        counts.iter().for_each(|count| draft.count(*count));
        done += counts.len();
        extraction.advance(&counts);
    }
    Ok((draft.finish()?, false))
}

/// Every example has the vectors that its labels need.
fn check(data: &Dataset, first: usize, counts: &[u32]) -> Result<()> {
    for (example, (count, labels)) in (first..).zip(counts.iter().zip(&data.labels[first..])) {
        let is_tagged = data.is_tagged();
        if is_tagged && *count as usize != labels.len() {
            let reason = format!("the model reads {count} tokens of a sentence with {} tags", labels.len());
            return Err(data.error(example, &reason));
        }
        if *count == 0 {
            return Err(data.error(example, "the text has no tokens"));
        }
    }
    Ok(())
}

/// The bytes of the vectors of a column of token vectors.
fn bytes_of(vectors: &dyn Array) -> &[u8] {
    let list = vectors.as_list::<i32>();
    let structs = list.values().as_struct();
    let Some(embedding) = structs.column_by_name("embedding") else { return &[] };
    let values = embedding.as_fixed_size_list().values().as_primitive::<arrow::datatypes::Float32Type>();
    values.values().inner().as_slice()
}

/// Writes the vectors of each token one after the other.
fn interleave(layers: &[&[u8]], vectors: usize, draft: &mut Draft) -> Result<()> {
    if let [all] = layers {
        return draft.values(all);
    }
    for vector in 0..vectors {
        for layer in layers {
            let width = layer.len() / vectors;
            draft.values(&layer[vector * width..(vector + 1) * width])?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ListBuilder, StringBuilder};
    use elmo::train::LayerVectors;

    use super::*;
    use crate::{fit_mix::dataset::Place, report::Silent};

    fn data(sentences: &[&str], labels: usize) -> Dataset {
        let mut lists = ListBuilder::new(StringBuilder::new());
        for sentence in sentences {
            sentence.split(' ').for_each(|token| lists.values().append_value(token));
            lists.append(true);
        }
        Dataset {
            files: vec!["a.conll".to_owned()],
            parts: vec![Arc::new(lists.finish())],
            labels: sentences.iter().map(|s| vec![0; s.split(' ').count().min(labels)]).collect(),
            places: (0..).map(|n| Place::Line { file: 0, line: 10 * n + 1 }).take(sentences.len()).collect(),
        }
    }

    fn extract(folder: &Path, data: &Dataset, layer_norm: bool) -> Result<(Vec<f32>, bool)> {
        let elmo = Elmo::tiny().unwrap();
        let model = Layered::new(&elmo, &elmo.spec(), layer_norm).unwrap();
        let stopped = AtomicBool::new(false);
        let extraction = Extraction::new(folder, &stopped, &Silent, data.len());
        let (found, is_reused) = features(&model, data, &extraction)?;
        let mut values = Vec::new();
        let vectors: u32 = found.counts().iter().sum();
        found.read(0, vectors as usize, &mut values).unwrap();
        Ok((values, is_reused))
    }

    /// By the formula, in float64: one mean and one variance of a layer over the tokens and dimensions of a sentence.
    #[test]
    fn layers_are_normalised_over_their_sentence() {
        let folder = tempfile::tempdir().unwrap();
        let data = data(&["It rained all day .", "We stayed in ."], usize::MAX);
        let (plain, _) = extract(folder.path(), &data, false).unwrap();
        let (normalised, is_reused) = extract(folder.path(), &data, true).unwrap();
        assert!(!is_reused, "they are others");
        let (tokens, layers) = ([5, 4], 3);
        let width = plain.len() / (tokens.iter().sum::<usize>() * layers);
        let mut first = 0;
        for tokens in tokens {
            for layer in 0..layers {
                let places: Vec<usize> = (first..first + tokens)
                    .flat_map(|token| (0..width).map(move |k| (token * layers + layer) * width + k))
                    .collect();
                let n = places.len() as f64;
                let mean = places.iter().map(|place| f64::from(plain[*place])).sum::<f64>() / n;
                let variance = places.iter().map(|place| (f64::from(plain[*place]) - mean).powi(2)).sum::<f64>() / n;
                for place in places {
                    let expected = (f64::from(plain[place]) - mean) / (variance + 1e-12).sqrt();
                    assert!((f64::from(normalised[place]) - expected).abs() < 1e-5, "layer {layer}");
                }
            }
            first += tokens;
        }
    }

    #[test]
    fn cached_features_have_the_same_bits() {
        let folder = tempfile::tempdir().unwrap();
        let data = data(&["It rained all day .", "We stayed in ."], usize::MAX);
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        let (computed, first) = extract(folder.path(), &data, false).unwrap();
        let (cached, second) = extract(folder.path(), &data, false).unwrap();
        assert_eq!((first, second), (false, true));
        assert_eq!(bits(&computed), bits(&cached));
        // The parts of a data set do not matter, and its texts do.
        let halves = data.parts.iter().flat_map(|part| [part.slice(0, 1), part.slice(1, 1)]).collect();
        let in_halves = Dataset { parts: halves, files: Vec::new(), labels: data.labels, places: data.places };
        assert!(extract(folder.path(), &in_halves, false).unwrap().1);
        assert!(!extract(folder.path(), &super::tests::data(&["It rained"], 9), false).unwrap().1);
    }

    #[test]
    fn a_sentence_with_more_tokens_than_labels_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let error = extract(folder.path(), &data(&["a", "a b c"], 2), false).unwrap_err();
        assert_eq!(error.to_string(), "a.conll: line 11: the model reads 3 tokens of a sentence with 2 tags");
    }
}
