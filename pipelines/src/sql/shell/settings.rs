//! The settings of the shell, which `\set`, `\x`, `\timing` and `\f` change.

use super::super::{Expanded, nearest::did_you_mean};
use crate::{
    error::{Error, Result},
    sql::Format,
};

/// The settings of the shell.
#[derive(Debug, Clone, Copy)]
pub struct ShellSettings {
    /// When a record is shown as a line per value.
    pub expanded: Expanded,
    /// The format of results.
    pub format: Format,
    /// Maximum number of rows of a table.
    pub max_rows: usize,
    /// Whether a table that is higher than the terminal is shown in a pager.
    pub pager: bool,
    /// Whether the duration of a statement is printed.
    pub timing: bool,
}

const SWITCH: &[&str] = &["on", "off"];

/// The names of all settings, their legal values as far as they are words, and their meaning.
pub(super) const SETTINGS: &[(&str, &[&str], &str)] = &[
    (
        "expanded",
        &["on", "off", "auto"],
        "a line per value instead of a row per record; auto: if the table is too wide",
    ),
    ("format", &["table", "csv", "json", "ndjson"], "the format of results"),
    ("max_rows", &[], "maximum number of rows of a table"),
    ("pager", SWITCH, "show tables that are higher than the terminal in $PAGER, by default less"),
    ("timing", SWITCH, "print the duration of statements"),
];

impl ShellSettings {
    /// The settings at the start of a shell.
    pub fn new(format: Format, max_rows: usize) -> Self {
        Self { expanded: Expanded::Off, format, max_rows, pager: true, timing: true }
    }

    /// Changes a setting; without a value, a switch is toggled. Returns a message with the new value.
    ///
    /// # Errors
    /// [`Error::Usage`] for an unknown setting or an illegal value.
    pub fn set(&mut self, name: &str, value: Option<&str>) -> Result<String> {
        match name {
            "expanded" => self.expanded = self.new_expanded(value)?,
            "format" => self.format = format(value)?,
            "max_rows" => self.max_rows = rows(value)?,
            "pager" => self.pager = switch("pager", self.pager, value)?,
            "timing" => self.timing = switch("timing", self.timing, value)?,
            _ => {
                let names = || SETTINGS.iter().map(|(name, ..)| *name);
                let message = format!("{name}: unknown setting{}", did_you_mean(name, names()));
                return Err(Error::usage(message, format!("settings are {}", names().collect::<Vec<_>>().join(", "))));
            }
        }
        Ok(format!("{name} is {}", self.value(name)))
    }

    /// A line for each setting: its name, value and meaning.
    pub fn list(&self) -> String {
        let line = |(name, _, meaning): &(&str, &[&str], &str)| format!("{name:10}{:8}{meaning}\n", self.value(name));
        SETTINGS.iter().map(line).collect()
    }

    fn value(&self, name: &str) -> String {
        let on = |on: bool| if on { "on" } else { "off" }.to_owned();
        match name {
            "expanded" => match self.expanded {
                Expanded::On => "on".to_owned(),
                Expanded::Off => "off".to_owned(),
                Expanded::Auto => "auto".to_owned(),
            },
            "format" => self.format.to_string(),
            "max_rows" => self.max_rows.to_string(),
            "pager" => on(self.pager),
            _ => on(self.timing),
        }
    }

    fn new_expanded(&self, value: Option<&str>) -> Result<Expanded> {
        match value {
            None if self.expanded == Expanded::Off => Ok(Expanded::On),
            None | Some("off") => Ok(Expanded::Off),
            Some("on") => Ok(Expanded::On),
            Some("auto") => Ok(Expanded::Auto),
            Some(other) => Err(illegal("expanded", other, "on, off or auto")),
        }
    }
}

fn format(value: Option<&str>) -> Result<Format> {
    let value = value.unwrap_or_default();
    match value.parse::<Format>() {
        Ok(format) if !format.is_binary() => Ok(format),
        _ => Err(illegal("format", value, "table, csv, json or ndjson")),
    }
}

fn rows(value: Option<&str>) -> Result<usize> {
    let value = value.unwrap_or_default();
    value.parse().ok().filter(|rows| *rows > 0).ok_or_else(|| illegal("max_rows", value, "a whole number above 0"))
}

fn switch(name: &str, now: bool, value: Option<&str>) -> Result<bool> {
    match value {
        None => Ok(!now),
        Some("on") => Ok(true),
        Some("off") => Ok(false),
        Some(other) => Err(illegal(name, other, "on or off")),
    }
}

fn illegal(name: &str, value: &str, legal: &str) -> Error {
    let message = match value {
        "" => format!("{name} needs a value"),
        value => format!("{name} cannot be {value}"),
    };
    Error::usage(message, format!("use {legal}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_set_and_toggled() {
        let mut settings = ShellSettings::new(Format::Table, 100);
        for (name, value, message) in [
            ("expanded", None, "expanded is on"),
            ("expanded", None, "expanded is off"),
            ("expanded", Some("auto"), "expanded is auto"),
            ("max_rows", Some("7"), "max_rows is 7"),
            ("pager", Some("off"), "pager is off"),
            ("timing", None, "timing is off"),
            ("format", Some("csv"), "format is csv"),
        ] {
            assert_eq!(settings.set(name, value).unwrap(), message);
        }
        for (name, value, reason) in [
            ("max_rows", Some("0"), "max_rows cannot be 0"),
            ("max_rows", None, "max_rows needs a value"),
            ("format", Some("parquet"), "format cannot be parquet"),
            ("expanded", Some("maybe"), "expanded cannot be maybe"),
            ("maxrows", Some("1"), "maxrows: unknown setting; did you mean max_rows?"),
            ("colour", Some("on"), "colour: unknown setting"),
        ] {
            assert_eq!(settings.set(name, value).unwrap_err().to_string(), reason);
        }
        assert_eq!(settings.max_rows, 7);
    }

    #[test]
    fn the_list_has_every_setting_with_its_value() {
        let mut settings = ShellSettings::new(Format::Table, 100);
        for (name, values, meaning) in SETTINGS {
            // Every documented value is accepted.
            for value in *values {
                assert_eq!(settings.set(name, Some(value)).unwrap(), format!("{name} is {value}"));
            }
            assert!(settings.list().contains(meaning), "{name}");
        }
        assert!(settings.list().contains("max_rows  100     maximum"), "{}", settings.list());
    }
}
