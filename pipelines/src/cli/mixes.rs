//! Scalar mixes on the command line: their files, and the names that `--add-mix` gives them.

use std::{path::Path, str::FromStr};

use elmo::{
    mix::ScalarMix,
    spec::{Layers, SpecError},
};

use crate::error::{Error, Result};

/// The value of `--add-mix`: the file of a scalar mix and its name.
#[derive(Debug, Clone)]
pub(super) struct NamedMix {
    name: String,
    file: String,
}

impl FromStr for NamedMix {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        let (name, file) = text
            .split_once('=')
            .filter(|(name, file)| !name.is_empty() && !file.is_empty())
            .ok_or("it must be NAME=FILE, such as sentiment=mixes/sentiment.json")?;
        Ok(Self { name: name.to_owned(), file: file.to_owned() })
    }
}

/// Reads the files of `--add-mix`.
///
/// # Errors
/// [`Error::Usage`] if a name is reserved or given twice, or a file cannot be read; [`elmo::Error`] if it is not a mix.
pub(super) fn read_mixes(named: &[NamedMix]) -> Result<Vec<(String, ScalarMix)>> {
    let mut mixes: Vec<(String, ScalarMix)> = Vec::new();
    for NamedMix { name, file } in named {
        let refuse = |reason| Err(Error::usage(reason, "give the scalar mix another name"));
        if let Err(reason) = Layers::check_mix_name(name) {
            return refuse(reason.to_string());
        }
        if mixes.iter().any(|(other, _)| other == name) {
            return refuse(format!("two scalar mixes are named {name}"));
        }
        mixes.push((name.clone(), read_mix("--add-mix", file)?));
    }
    Ok(mixes)
}

/// Parses the value of `--layers`: the name of a mix, a file that is read, or built-in layers.
///
/// # Errors
/// [`Error::Usage`] if there are no such layers, or the file cannot be read; [`elmo::Error`] if it is not a mix.
pub(super) fn layers_of(text: &str, mixes: &[(String, ScalarMix)]) -> Result<Layers> {
    if let Some((_, mix)) = mixes.iter().find(|(name, _)| name == text) {
        return Ok(Layers::Mix(mix.clone()));
    }
    if is_file_of_mix(text) {
        return read_mix("--layers", text).map(Layers::Mix);
    }
    text.parse().map_err(|_: SpecError| {
        let legal: Vec<&str> =
            Layers::WORDS.iter().copied().chain(mixes.iter().map(|(name, _)| name.as_str())).collect();
        let hint = nearest(text, &legal).map(|word| format!("; did you mean {word}?")).unwrap_or_default();
        let message = format!("layers: unknown value {text:?}; legal values are {}{hint}", legal.join(", "));
        Error::usage(message, "a scalar mix is named by its file, FILE.json, or by --add-mix NAME=FILE")
    })
}

/// Whether the value of `--layers` is the file of a mix.
pub(super) fn is_file_of_mix(text: &str) -> bool {
    Path::new(text).extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json"))
}

/// The most similar of some words, if one is similar.
fn nearest<'w>(name: &str, words: &[&'w str]) -> Option<&'w str> {
    const SIMILAR: f64 = 0.6;
    let similarity = |word: &str| strsim::normalized_levenshtein(&name.to_lowercase(), &word.to_lowercase());
    let rated = words.iter().map(|word| (similarity(word), *word)).filter(|(similarity, _)| *similarity >= SIMILAR);
    rated.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, word)| word)
}

/// Reads the file of a scalar mix that an option names.
fn read_mix(option: &str, file: &str) -> Result<ScalarMix> {
    let help = "give the file of a scalar mix, as in README.md, \"Your own weights\"";
    if std::fs::metadata(file).is_ok_and(|found| !found.is_file()) {
        return Err(Error::usage(format!("{option} {file}: not a file"), help));
    }
    let bytes = std::fs::read(file).map_err(|e| Error::usage(format!("{option} {file}: {e}"), help))?;
    ScalarMix::from_json(&bytes, file).map_err(|e| elmo::Error::from(e).into())
}
