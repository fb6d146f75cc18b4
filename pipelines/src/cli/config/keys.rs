//! The keys that `elmo.toml` and the environment may contain, derived from the commands.

use std::collections::{BTreeMap, BTreeSet};

use clap::{Arg, ArgAction, Command};

/// Options that are not settings: they ask for something else than the command.
const NOT_A_SETTING: [&str; 3] = ["help", "version", "config"];

/// A key as messages name it: `key` or `section.key`.
pub(super) fn shown(section: &str, key: &str) -> String {
    if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") }
}

/// The keys that are allowed in each section.
pub(super) struct LegalKeys {
    /// Keys at the top of the file.
    pub(super) common: BTreeSet<String>,
    pub(super) sections: BTreeMap<String, BTreeSet<String>>,
    /// Keys of options that take several values.
    pub(super) several: BTreeSet<String>,
}

impl LegalKeys {
    /// The keys of all commands. A key of at least two commands may be at the top.
    pub(super) fn of(root: &Command) -> Self {
        let (mut sections, mut several) = (BTreeMap::new(), BTreeSet::new());
        let global: BTreeSet<String> = root.get_arguments().filter_map(setting_name).collect();
        walk(root, "", &mut |name, command| {
            let own: BTreeSet<String> = command.get_arguments().filter_map(setting_name).collect();
            sections.insert(name.to_owned(), &own | &global);
            several.extend(command.get_arguments().filter(|arg| takes_several(arg)).filter_map(setting_name));
        });
        let mut common = global;
        for (name, keys) in &sections {
            let others: BTreeSet<&String> = sections.iter().filter(|(n, _)| *n != name).flat_map(|(_, k)| k).collect();
            common.extend(keys.iter().filter(|key| others.contains(key)).cloned());
        }
        Self { common, sections, several }
    }

    /// The keys of a section; of the top for an empty name.
    pub(super) fn of_section(&self, section: &str) -> Option<&BTreeSet<String>> {
        if section.is_empty() { Some(&self.common) } else { self.sections.get(section) }
    }

    /// Every key, mapped to its name for a message about `section`: keys of other sections have their section's name in
    /// front.
    pub(super) fn seen_from(&self, section: &str) -> BTreeMap<String, String> {
        let mut places = BTreeMap::new();
        for key in self.of_section(section).into_iter().flatten() {
            places.insert(key.clone(), key.clone());
        }
        for (other, keys) in &self.sections {
            for key in keys {
                places.entry(key.clone()).or_insert_with(|| shown(other, key));
            }
        }
        places
    }
}

fn takes_several(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append) || arg.get_num_args().is_some_and(|n| n.max_values() > 1)
}

/// Calls `visit` for every command that can be given alone, with its section name (`model convert` is `model-convert`).
pub(super) fn walk(command: &Command, section: &str, visit: &mut impl FnMut(&str, &Command)) {
    for sub in command.get_subcommands().filter(|c| c.get_name() != "help") {
        let name = join(section, sub.get_name());
        if !sub.has_subcommands() || !sub.is_subcommand_required_set() {
            visit(&name, sub);
        }
        walk(sub, &name, visit);
    }
}

pub(super) fn join(section: &str, name: &str) -> String {
    if section.is_empty() { name.to_owned() } else { format!("{section}-{name}") }
}

/// The long name of an option that is a setting. A hidden one is that of another command.
pub(super) fn setting_name(arg: &Arg) -> Option<String> {
    arg.get_long().filter(|name| !NOT_A_SETTING.contains(name) && !arg.is_hide_set()).map(str::to_owned)
}

/// The environment variable of an option: `ELMO_BATCH_TOKENS` for `batch-tokens`.
pub(in crate::cli) fn variable(long: &str) -> String {
    format!("ELMO_{}", long.replace('-', "_").to_ascii_uppercase())
}

/// The known name that is most similar to `name`, if any is similar.
pub(super) fn nearest<'a>(name: &str, legal: impl Iterator<Item = &'a String>) -> Option<&'a String> {
    /// `modle`/`model` has 0.8, `colum`/`column` 0.83.
    const MIN_SIMILARITY: f64 = 0.6;
    // With the common prefix, all variables would be similar.
    let bare = |name: &str| name.strip_prefix("ELMO_").unwrap_or(name).to_owned();
    legal
        .map(|other| (strsim::normalized_damerau_levenshtein(&bare(name), &bare(other)), other))
        .filter(|(similarity, _)| *similarity >= MIN_SIMILARITY)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, other)| other)
}
