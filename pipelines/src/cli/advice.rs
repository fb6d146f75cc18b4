//! What an error advises, as far as the command can do it: commands share the errors of reading files, and not every command has all
//! options that these name.

use std::{collections::HashSet, ffi::OsString};

use clap::Command;

/// Options by their long names.
struct Options {
    of_command: HashSet<String>,
    of_others: HashSet<String>,
}

/// An advice without the parts that name options of other commands; `None` if nothing is left. `args` are those of the program `root`.
pub(super) fn without_options_of_others(help: &str, root: &Command, args: &[OsString]) -> Option<String> {
    let options = Options::of(root, args);
    let clauses: Vec<String> = help.split("; ").filter_map(|clause| options.kept(clause)).collect();
    (!clauses.is_empty()).then(|| clauses.join("; "))
}

impl Options {
    fn of(root: &Command, args: &[OsString]) -> Self {
        let mut command = root;
        for arg in args.iter().skip(1) {
            command = command.find_subcommand(arg).unwrap_or(command);
        }
        let mut of_command = long_names(root);
        of_command.extend(long_names(command));
        let mut of_others = all_long_names(root);
        of_others.retain(|name| !of_command.contains(name));
        Self { of_command, of_others }
    }

    /// What is left of a clause.
    fn kept(&self, clause: &str) -> Option<String> {
        // An advice to run another command names options of that one.
        if clause.contains("elmo ") || !self.names_others(clause) {
            return Some(clause.to_owned());
        }
        [", and ", ", or "].into_iter().find_map(|separator| {
            let parts: Vec<&str> = clause.split(separator).filter(|part| !self.names_others(part)).collect();
            (!parts.is_empty()).then(|| parts.join(separator))
        })
    }

    fn names_others(&self, text: &str) -> bool {
        let names = text.split_whitespace().filter_map(|word| word.strip_prefix("--"));
        names.map(|name| name.trim_end_matches(|c: char| !c.is_ascii_alphanumeric())).any(|name| {
            let name = name.split('=').next().unwrap_or(name);
            !self.of_command.contains(name) && self.of_others.contains(name)
        })
    }
}

fn long_names(command: &Command) -> HashSet<String> {
    command.get_arguments().filter_map(|arg| arg.get_long()).map(str::to_owned).collect()
}

fn all_long_names(command: &Command) -> HashSet<String> {
    let mut names = long_names(command);
    command.get_subcommands().for_each(|below| names.extend(all_long_names(below)));
    names
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::cli::Cli;

    fn kept(help: &str, args: &str) -> Option<String> {
        let args: Vec<OsString> = format!("elmo {args}").split(' ').map(OsString::from).collect();
        without_options_of_others(help, &Cli::command(), &args)
    }

    /// By hand: `elmo embed` has all these options, `elmo train` only `--column`, and `--steps`.
    #[test]
    fn an_advice_names_options_of_its_command_only() {
        let column = "name the column of texts with --column, and those to keep with --keep";
        assert_eq!(kept(column, "embed a.csv").as_deref(), Some(column));
        assert_eq!(kept(column, "-q train --shards a").as_deref(), Some("name the column of texts with --column"));
        assert_eq!(kept("name its format with --input-format", "train --shards a"), None);
        let row = "correct or remove the row, or leave such rows out with --on-malformed skip";
        assert_eq!(kept(row, "train --shards a").as_deref(), Some("correct or remove the row"));
        let kept_column = "correct or remove the row; a column that is only kept can be left out with --keep, and --types string \
                           reads numbers as they are written";
        assert_eq!(kept(kept_column, "vocab a.csv").as_deref(), Some("correct or remove the row"));
        let pipe = "give it on standard input, with - as the input and --input-format for its format";
        assert_eq!(kept(pipe, "train --shards a"), None, "training reads no standard input");
        for same in ["give fewer --steps, or --quiet", "elmo embed FILE --keep id reads it", "pip install --upgrade x"]
        {
            assert_eq!(kept(same, "train --shards a").as_deref(), Some(same));
        }
    }
}
