//! `elmo completions` and `elmo man`, generated from the types that parse the command line.

use std::{fs, io, path::PathBuf};

use clap::{Args, CommandFactory, ValueHint};
use clap_complete::Shell;

use super::{Cli, output::print_raw};
use crate::error::{Error, Result};

/// Print a completion script for a shell
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo completions bash > elmo.bash
  elmo completions fish > elmo.fish

Save the script as ~/.local/share/bash-completion/completions/elmo for bash, as
~/.config/fish/completions/elmo.fish for fish, or as _elmo in a directory of $fpath for zsh.")]
pub(super) struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

/// Print the manual page, or write one page per command
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo man > elmo.1
  elmo man --dir man")]
pub(super) struct ManArgs {
    /// Write elmo.1, elmo-embed.1, … to DIR, which is created if necessary
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    dir: Option<PathBuf>,
}

pub(super) fn completions(args: &CompletionsArgs) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "elmo", &mut script);
    print_raw(&script)
}

pub(super) fn man(args: &ManArgs) -> Result<()> {
    let mut root = Cli::command();
    root.build();
    match &args.dir {
        None => print_raw(&page(root)?),
        Some(dir) => {
            fs::create_dir_all(dir).map_err(|e| Error::io(dir, e))?;
            write_pages(&root, "elmo", dir)
        }
    }
}

fn write_pages(command: &clap::Command, name: &str, dir: &std::path::Path) -> Result<()> {
    let path = dir.join(format!("{name}.1"));
    let titled = command.clone().display_name(name.to_owned());
    fs::write(&path, page(titled)?).map_err(|e| Error::io(&path, e))?;
    for sub in command.get_subcommands() {
        write_pages(sub, &format!("{name}-{}", sub.get_name()), dir)?;
    }
    Ok(())
}

fn page(command: clap::Command) -> Result<Vec<u8>> {
    let mut page = Vec::new();
    let rendered: io::Result<()> = clap_mangen::Man::new(command).render(&mut page);
    rendered.map_err(|e| Error::Failed(format!("cannot write the manual page: {e}")))?;
    Ok(page)
}
