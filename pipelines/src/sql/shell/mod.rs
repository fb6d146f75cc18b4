//! The interactive shell: the prompt, its commands and settings. Its loop is in the command line, `cli/sql/shell.rs`.

mod command;
mod complete;
mod function;
mod names;
mod pager;
mod prompt;
mod scan;
mod screen;
mod settings;

pub use self::{
    command::{Command, help},
    function::FunctionHelp,
    names::Names,
    pager::page,
    prompt::{Input, Prompt, default_history},
    screen::Screen,
    settings::ShellSettings,
};
