//! A stage with the settings that an output names: in the field of the column that is verified, and in the footer.

use std::sync::Arc;

use elmo::{
    ColumnEmbedder, Elmo, EmbedSpec,
    mix::ScalarMix,
    spec::{Layers, Level, ListType, OnError, SpecError},
};

use crate::{
    error::{Error, Result},
    output::{
        footer::{Footer, shown},
        opened::Output,
    },
    recorded::{Pairs, STATE, is_kind_of},
    scores::{self, ScoreStage},
    stage::{EmbedStage, Stage},
};

/// A stage with the settings of `output`, and with `mix` if the output was made with a scalar mix.
///
/// # Errors
/// [`Error::Input`] when the footer names no model or invalid settings, [`Error::Check`] when `elmo` is
/// another model or would compute with other settings, [`Error::Usage`] when its precision differs or the mix is missing.
pub(super) fn stage(output: &Output, mix: Option<&ScalarMix>, elmo: &Elmo) -> Result<Arc<dyn Stage>> {
    let pairs = settings_of(&output.footer);
    check_model(output, pairs, elmo)?;
    check_mixed(&output.footer)?;
    // These settings come from the file, so invalid ones are an error of the file.
    let spec = spec_of(pairs, mix, elmo).map_err(|error| invalid_settings(output, error))?;
    let stage = if pairs.contains_key(scores::LEVEL) {
        ScoreStage::new(elmo, &spec).map(|stage| stage as Arc<dyn Stage>)
    } else {
        ColumnEmbedder::new(elmo, spec).map(|columns| {
            let width = columns.width();
            EmbedStage::new(columns, width) as Arc<dyn Stage>
        })
    };
    let stage = stage.map_err(|error| invalid_settings(output, error.into()))?;
    check_settings(pairs, stage.as_ref())?;
    Ok(stage)
}

/// Settings that earlier versions lost when SQL copied vectors, with the options of `elmo embed` that set them.
const LOST: [(&str, &str); 4] = [
    ("elmo.on_long", "--on-long"),
    ("elmo.sentences", "--sentences"),
    (STATE, "--state"),
    ("elmo.tokenizer", "--tokenizer"),
];

/// The settings that the output does not record, so that those of the model are assumed.
pub(super) fn unrecorded(output: &Output) -> Vec<String> {
    let settings = settings_of(&output.footer);
    let lost = LOST.iter().filter(|(key, _)| !settings.contains_key(*key));
    lost.map(|(key, option)| format!("{key} ({option})")).collect()
}

/// The settings of the column that is verified. Those of a column of vectors are in its field, and in the footer as far as all
/// columns share them; scores have none in their fields.
fn settings_of(footer: &Footer) -> &Pairs {
    let of = |name: &str| footer.vectors.iter().find(|(column, _)| column == name).map(|(_, settings)| settings);
    let settings = match get(&footer.pairs, "level") {
        _ if footer.pairs.contains_key(scores::LEVEL) => None,
        Some("token") => of("tokens"),
        Some(_) => of("embedding"),
        // SQL wrote columns of several levels.
        None => of("embedding").or_else(|| of("tokens")),
    };
    settings.unwrap_or(&footer.pairs)
}

fn get<'p>(pairs: &'p Pairs, key: &str) -> Option<&'p str> {
    pairs.get(&format!("elmo.{key}")).map(String::as_str)
}

/// The first file of an output, for messages about the footer that all files share.
fn first_file(output: &Output) -> String {
    output.files.first().map(|file| file.location.to_string()).unwrap_or_default()
}

fn check_model(output: &Output, pairs: &Pairs, elmo: &Elmo) -> Result<()> {
    let found = get(pairs, "fingerprint").ok_or_else(|| Error::Input {
        file: first_file(output),
        row: None,
        reason: "no elmo.fingerprint in the footer: not an output of elmo".into(),
        help: Some("give an output of elmo embed or elmo score".into()),
    })?;
    let ours = elmo.fingerprint().to_string();
    if found != ours {
        return Err(Error::check(format!(
            "made by another model: its fingerprint is {found}, that of this model {ours}; give the model of the job with --model"
        )));
    }
    let precision = elmo.precision().to_string();
    match get(pairs, "precision").filter(|found| *found != precision) {
        Some(found) => Err(Error::usage(
            format!("the output was made with --precision {found}, which gives other numbers than {precision}"),
            format!("add --precision {found}"),
        )),
        None => Ok(()),
    }
}

/// Refuses a column of several settings, as UNION ALL of different calls makes. Its field names those of one call, and the footer, if
/// the file has no other column of vectors, those that all calls share.
fn check_mixed(footer: &Footer) -> Result<()> {
    let [(column, settings)] = footer.vectors.as_slice() else { return Ok(()) };
    if get(&footer.pairs, "fingerprint").is_none() {
        return Ok(());
    }
    match settings.keys().find(|key| *key != "elmo.version" && !footer.pairs.contains_key(*key)) {
        Some(key) => Err(Error::check(format!(
            "the vectors of column {column:?} were computed with several settings: {key} differs between rows; write those of \
             each setting into an output of its own"
        ))),
        None => Ok(()),
    }
}

fn invalid_settings(output: &Output, error: Error) -> Error {
    let Some(elmo::Error::Spec(reason)) = error.module() else { return error };
    Error::Input {
        file: first_file(output),
        row: None,
        reason: format!("the footer names invalid settings: {reason}"),
        help: Some("give an output of elmo embed or elmo score that was not edited".into()),
    }
}

/// Refuses a stage whose settings are not those of the footer, such as another mix, warm state or LM head.
fn check_settings(pairs: &Pairs, stage: &dyn Stage) -> Result<()> {
    for (key, ours) in stage.metadata() {
        let found = pairs.get(&key);
        let has_no_digest = key == STATE && found.is_some_and(|found| is_kind_of(found, &ours));
        // Other versions may compute the same vectors.
        if key != "elmo.version" && !has_no_digest && found.is_some_and(|found| *found != ours) {
            let (found, ours) = (shown(found), shown(Some(&ours)));
            return Err(Error::check(format!("{key} is {found} in the footers, but would be {ours} now")));
        }
    }
    Ok(())
}

/// The settings that `pairs` name, and for others those that `elmo` records.
fn spec_of(pairs: &Pairs, mix: Option<&ScalarMix>, elmo: &Elmo) -> Result<EmbedSpec> {
    fn parsed<T: std::str::FromStr<Err = SpecError>>(value: Option<&str>, default: T) -> Result<T> {
        value.map_or(Ok(default), |v| v.parse().map_err(|e: SpecError| elmo::Error::from(e).into()))
    }
    let get = |key: &str| get(pairs, key);
    let default = elmo.options().spec();
    let state = get("state").map(|state| state.split(':').next().unwrap_or(state));
    if state == Some("carry") {
        return Err(Error::check(
            "in state carry a row depends on all rows before it; run elmo embed again and compare the files",
        ));
    }
    let layers = match (get("layers"), mix) {
        (Some(layers), Some(mix)) if layers.starts_with("mix:") => Layers::Mix(mix.clone()),
        (Some(layers), None) if layers.starts_with("mix:") => {
            return Err(Error::usage("the output was made with a scalar mix", "give its file with --layers FILE"));
        }
        (layers, _) => parsed(layers, default.layers)?,
    };
    let level = match (get("level").or(get("scores")), get("pooling")) {
        // Fields name no level. Tokens are not pooled.
        (None, Some("none")) => Level::Token,
        (level, _) => parsed(level, default.level)?,
    };
    Ok(EmbedSpec {
        level,
        layers,
        pooling: if level == Level::Token { default.pooling } else { parsed(get("pooling"), default.pooling)? },
        tokenizer: parsed(get("tokenizer"), default.tokenizer)?,
        sentences: parsed(get("sentences"), default.sentences)?,
        boundaries: get("boundaries") == Some("true"),
        normalize: parsed(get("normalize"), default.normalize)?,
        state: parsed(state, default.state)?,
        on_long: parsed(get("on_long"), default.on_long)?,
        max_tokens: get("max_tokens").and_then(|n| n.parse().ok()).unwrap_or(default.max_tokens),
        on_error: OnError::Null,
        float: parsed(get("float"), default.float)?,
        list_type: ListType::Fixed,
        batch_rows: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(list: &[(&str, &str)]) -> Pairs {
        list.iter().map(|(key, value)| (format!("elmo.{key}"), (*value).to_owned())).collect()
    }

    /// By hand. A file that another program rewrote has no pairs in its footer, and one of two columns shares few of them.
    #[test]
    fn settings_of_some_rows_are_missing_in_the_footer() {
        let own = pairs(&[("fingerprint", "f"), ("pooling", "max"), ("version", "1")]);
        let is_mixed = |footer: &[(&str, &str)], columns: &[&str]| {
            let vectors = columns.iter().map(|column| ((*column).to_owned(), own.clone())).collect();
            check_mixed(&Footer { pairs: pairs(footer), vectors, ..Footer::default() }).is_err()
        };
        assert!(is_mixed(&[("fingerprint", "f")], &["embedding"]));
        assert!(!is_mixed(&[("fingerprint", "f"), ("pooling", "max")], &["embedding"]), "versions are no settings");
        assert!(!is_mixed(&[], &["embedding"]));
        assert!(!is_mixed(&[("fingerprint", "f")], &["embedding", "tokens"]));
    }
}
