//! Reduces layers on the device of the model, and downloads the results only.

use std::ops::Range;

use super::{LAYER_NORM_EPSILON, Wanted};
use crate::{
    engine::sentence::{Output, Recipe, Vectors},
    model::{Activations, DeviceError, Mixing, Selection},
    pooling::{Partial, Reducer},
    spec::Pooling,
};

/// Sentences with equal recipes are reduced together.
pub(super) fn reduce(activations: &Activations, wanted: &[Wanted<'_>]) -> Result<Vec<Vectors>, DeviceError> {
    let mut answers: Vec<Option<Vectors>> = wanted.iter().map(|_| None).collect();
    let real: Vec<Range<usize>> = wanted.iter().map(|wanted| wanted.real.clone()).collect();
    while let Some(first) = answers.iter().position(Option::is_none) {
        let recipe = wanted[first].recipe;
        let is_alike = |sentence: &usize| {
            let other = wanted[*sentence].recipe;
            answers[*sentence].is_none() && other.output == recipe.output && other.pooling == recipe.pooling
        };
        let sentences: Vec<usize> = (first..wanted.len()).filter(is_alike).collect();
        for (sentence, vectors) in sentences.iter().zip(of_recipe(activations, recipe, wanted, &sentences, &real)?) {
            answers[*sentence] = Some(vectors);
        }
    }
    Ok(answers.into_iter().flatten().collect())
}

/// The results of sentences of the batch that have the same recipe.
fn of_recipe(
    activations: &Activations,
    recipe: &Recipe,
    wanted: &[Wanted<'_>],
    sentences: &[usize],
    real: &[Range<usize>],
) -> Result<Vec<Vectors>, DeviceError> {
    let mixing = match &recipe.output {
        Output::Combined(factors) => Mixing::Sum(factors),
        Output::All => Mixing::All,
        Output::Normalized(factors) => Mixing::Normalized { factors, tokens: real, epsilon: LAYER_NORM_EPSILON },
    };
    let selected = activations.select(&selection(recipe.pooling, wanted, sentences), mixing)?;
    let kept = sentences.iter().map(|&sentence| wanted[sentence].keep.len());
    let width = activations.width() * if recipe.output == Output::All { activations.n_layers() } else { 1 };
    Ok(match recipe.pooling {
        None => {
            let values = selected.vectors()?;
            let mut rest: &[f32] = &values;
            let tokens = kept.map(|n| {
                let (of_sentence, others) = rest.split_at(n * width);
                rest = others;
                Vectors::Tokens(of_sentence.to_vec())
            });
            tokens.collect()
        }
        Some(Pooling::Mean) => pooled(&selected.sums()?, kept, width),
        Some(Pooling::Max) => pooled(&selected.maxima()?, kept, width),
        Some(pooling @ (Pooling::First | Pooling::Last | Pooling::Ends)) => {
            let values = selected.vectors()?;
            let mut rows = values.chunks_exact(width);
            let partials = kept.map(|tokens| match if tokens > 0 { rows.next() } else { None } {
                Some(row) => Partial { values: row.iter().map(|&value| value.into()).collect(), tokens },
                None => Reducer::new(pooling, width, activations.width()).finish(),
            });
            partials.map(Vectors::Pooled).collect()
        }
    })
}

/// The tokens that a pooling reads.
fn selection(pooling: Option<Pooling>, wanted: &[Wanted<'_>], sentences: &[usize]) -> Selection {
    let mut selection = Selection { tokens: Vec::new(), sentences: Vec::new() };
    for &sentence in sentences {
        let keep = wanted[sentence].keep.clone();
        let (first, last) = (keep.start, keep.end.saturating_sub(1));
        let before = selection.tokens.len();
        match pooling {
            _ if keep.is_empty() => {}
            None | Some(Pooling::Mean | Pooling::Max) => selection.tokens.extend(keep.map(|i| (sentence, i, i))),
            Some(Pooling::First) => selection.tokens.push((sentence, first, first)),
            Some(Pooling::Last) => selection.tokens.push((sentence, last, last)),
            Some(Pooling::Ends) => selection.tokens.push((sentence, last, first)),
        }
        selection.sentences.push((sentence, selection.tokens.len() - before));
    }
    selection
}

fn pooled(values: &[f64], tokens: impl Iterator<Item = usize>, width: usize) -> Vec<Vectors> {
    let partials = values.chunks_exact(width).zip(tokens);
    partials.map(|(row, tokens)| Vectors::Pooled(Partial { values: row.to_vec(), tokens })).collect()
}
