//! Suggestions for misspelt names.

/// Similarity from which a name is suggested, 0 to 1.
const SIMILAR: f64 = 0.5;

/// The most similar of the known names.
pub(super) fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let similarity = |other: &str| strsim::normalized_damerau_levenshtein(&name.to_lowercase(), &other.to_lowercase());
    let rated = known.map(|other| (similarity(other), other)).filter(|(similarity, _)| *similarity >= SIMILAR);
    rated.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, other)| other)
}

/// The end of an error about an unknown name.
pub(super) fn did_you_mean<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> String {
    nearest(name, known).map(|other| format!("; did you mean {other}?")).unwrap_or_default()
}
