//! `elmo.toml`: parsed, and checked against the commands.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use clap::Command;
use toml::{Table, Value};

use super::{
    error::ConfigError,
    keys::{LegalKeys, nearest, shown},
};

/// The file that is read from the current directory unless `--config` names another.
const FILE_NAME: &str = "elmo.toml";

/// Options whose single value is a comma-separated list. A list in the file is joined with commas.
const WITH_COMMAS: [&str; 1] = ["keep"];

/// The settings of one file. Every key exists, and every value is a scalar or a list of scalars.
#[derive(Debug, Clone, Default)]
pub(in crate::cli) struct ConfigFile {
    path: PathBuf,
    common: BTreeMap<String, Vec<String>>,
    sections: BTreeMap<String, BTreeMap<String, Vec<String>>>,
}

impl ConfigFile {
    /// Reads `explicit`, or [`FILE_NAME`] in the current directory if it exists.
    ///
    /// # Errors
    /// [`ConfigError::Read`] when the file cannot be read, unless [`FILE_NAME`] does not exist; and as
    /// [`ConfigFile::parse`].
    pub(in crate::cli) fn find(explicit: Option<&Path>, root: &Command) -> Result<Option<Self>, ConfigError> {
        let path = explicit.unwrap_or(Path::new(FILE_NAME));
        match std::fs::read_to_string(path) {
            Ok(text) => Self::parse(&text, path, root).map(Some),
            Err(e) if explicit.is_none() && e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(ConfigError::Read { path: path.to_path_buf(), source }),
        }
    }

    /// Parses `text`; errors name the file `path`.
    ///
    /// # Errors
    /// [`ConfigError::Syntax`] when it is not TOML, [`ConfigError::UnknownSection`] or
    /// [`ConfigError::UnknownKey`] for unknown names, [`ConfigError::Value`] for a value that is neither a scalar nor,
    /// if the option takes several values, a list of scalars, and for a key with two spellings.
    pub(super) fn parse(text: &str, path: &Path, root: &Command) -> Result<Self, ConfigError> {
        let table: Table = text
            .parse()
            .map_err(|e: toml::de::Error| ConfigError::Syntax { path: path.to_path_buf(), reason: reason(text, &e) })?;
        let legal = LegalKeys::of(root);
        let mut file = Self { path: path.to_path_buf(), ..Self::default() };
        file.check_spellings("", &table)?;
        for (name, value) in &table {
            match value {
                Value::Table(section) if !legal.common.contains(name) => file.add_section(name, section, &legal)?,
                value => {
                    let key = file.legal_key(name, "", &legal)?;
                    let values = file.values(name, &key, value, &legal)?;
                    file.common.insert(key, values);
                }
            }
        }
        Ok(file)
    }

    /// Rejects `max-tokens` beside `max_tokens`, which are one key here but two in TOML.
    fn check_spellings(&self, section: &str, table: &Table) -> Result<(), ConfigError> {
        let mut seen = BTreeMap::new();
        for key in table.keys() {
            if let Some(other) = seen.insert(key.replace('_', "-"), key) {
                let reason = format!("{} is the same key; keep one of the two", shown(section, other));
                return Err(ConfigError::Value { path: self.path.clone(), key: shown(section, key), reason });
            }
        }
        Ok(())
    }

    fn add_section(&mut self, name: &str, table: &Table, legal: &LegalKeys) -> Result<(), ConfigError> {
        if !legal.sections.contains_key(name) {
            return Err(ConfigError::UnknownSection {
                path: self.path.clone(),
                section: name.to_owned(),
                nearest: nearest(name, legal.sections.keys()).cloned(),
            });
        }
        self.check_spellings(name, table)?;
        let mut section = BTreeMap::new();
        for (key, value) in table {
            let option = self.legal_key(key, name, legal)?;
            let values = self.values(&shown(name, key), &option, value, legal)?;
            section.insert(option, values);
        }
        self.sections.insert(name.to_owned(), section);
        Ok(())
    }

    /// The key as the option spells it; `batch_tokens` is accepted for `batch-tokens`.
    fn legal_key(&self, key: &str, section: &str, legal: &LegalKeys) -> Result<String, ConfigError> {
        let kebab = key.replace('_', "-");
        if legal.of_section(section).is_some_and(|keys| keys.contains(&kebab)) {
            return Ok(kebab);
        }
        let places = legal.seen_from(section);
        let nearest = nearest(&kebab, places.keys()).map(|key| places[key].clone());
        Err(ConfigError::UnknownKey { path: self.path.clone(), key: shown(section, key), nearest })
    }

    /// The values for clap of the option `--option`; `key` is its name in messages.
    fn values(&self, key: &str, option: &str, value: &Value, legal: &LegalKeys) -> Result<Vec<String>, ConfigError> {
        let wrong = |reason: String| ConfigError::Value { path: self.path.clone(), key: key.to_owned(), reason };
        let (several, with_commas) = (legal.several.contains(option), WITH_COMMAS.contains(&option));
        let or_list = if several || with_commas { ", true, false or a list of those" } else { ", true or false" };
        let item = |value: &Value| {
            let found = value.type_str();
            scalar(value).ok_or_else(|| wrong(format!("expected a string, a number{or_list}, found {found}")))
        };
        let Value::Array(items) = value else { return Ok(vec![item(value)?]) };
        if !several && !with_commas {
            return Err(wrong(format!("expected one value, found a list of {}", items.len())));
        }
        if items.is_empty() {
            return Err(wrong("the list is empty; put a value into it, or leave the key out".to_owned()));
        }
        let values = items.iter().map(item).collect::<Result<Vec<_>, _>>()?;
        // Of several defaults for an option with one value, clap would silently take the first.
        Ok(if with_commas { vec![values.join(",")] } else { values })
    }

    /// The values of an option of a command.
    pub(super) fn get(&self, section: &str, key: &str) -> Option<&[String]> {
        let own = self.sections.get(section).and_then(|keys| keys.get(key));
        own.or_else(|| self.common.get(key)).map(Vec::as_slice)
    }

    /// The place of `value` of the option `--key` in the file, for a message about an invalid value.
    pub(in crate::cli) fn origin(&self, key: &str, value: &str) -> Option<String> {
        let has = |keys: &BTreeMap<String, Vec<String>>| keys.get(key).is_some_and(|v| v.iter().any(|v| v == value));
        let path = self.path.display();
        if let Some((section, _)) = self.sections.iter().find(|(_, keys)| has(keys)) {
            return Some(format!("{path}, key {section}.{key}"));
        }
        has(&self.common).then(|| format!("{path}, key {key}"))
    }
}

/// What is wrong with TOML and where. The library's own text shows the line, with the value in it.
fn reason(text: &str, error: &toml::de::Error) -> String {
    let Some(before) = error.span().and_then(|span| text.get(..span.start)) else { return error.message().to_owned() };
    let (line, column) =
        (before.matches('\n').count() + 1, before.chars().rev().take_while(|c| *c != '\n').count() + 1);
    format!("line {line}, column {column}: {}", error.message())
}

fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(s) => Some(s.clone()),
        Value::Integer(_) | Value::Float(_) | Value::Boolean(_) => Some(value.to_string()),
        _ => None,
    }
}
