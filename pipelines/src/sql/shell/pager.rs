//! Shows a text in a pager.

use std::{
    env,
    io::{self, Write},
    process::{Command, Stdio},
};

use super::screen::Screen;
use crate::{error::Result, sql::print::io_failed};

/// Quits if the text fits the screen, does not wrap lines, passes colours on, and leaves the text on the screen.
const LESS: &str = "less -SRFX";

/// Exit codes of the system's shell for a command that cannot be run.
const NOT_RUN: [Option<i32>; 2] = [Some(126), Some(127)];

/// Prints a text, in a pager if it is higher than the screen and one is wanted and installed.
///
/// # Errors
/// [`Error::BrokenPipe`](crate::Error::BrokenPipe) or [`Error::Failed`](crate::Error::Failed) when stdout cannot be
/// written to.
pub fn page(text: &[u8], wanted: bool) -> Result<()> {
    let is_high = |screen: Screen| text.iter().filter(|byte| **byte == b'\n').count() >= screen.rows;
    let pager = if wanted && Screen::of_stdout().is_some_and(is_high) { pager() } else { None };
    if pager.is_some_and(|pager| show(text, &pager)) {
        return Ok(());
    }
    let mut out = io::stdout().lock();
    out.write_all(text).and_then(|()| out.flush()).map_err(io_failed)
}

/// The command of the pager: `$PAGER`, which may be empty for none, or `less` if it is installed.
fn pager() -> Option<String> {
    match env::var("PAGER") {
        Ok(pager) => Some(pager).filter(|pager| !pager.trim().is_empty()),
        Err(_) => {
            let folders = env::var_os("PATH")?;
            env::split_paths(&folders).any(|folder| folder.join("less").is_file()).then(|| LESS.to_owned())
        }
    }
}

/// Runs a pager until it ends; returns whether it could be run.
fn show(text: &[u8], pager: &str) -> bool {
    let child = Command::new("sh").args(["-c", pager]).stdin(Stdio::piped()).spawn();
    let Ok(mut child) = child else { return false };
    if let Some(mut input) = child.stdin.take() {
        // The user may leave it before the end of the text.
        let _ = input.write_all(text);
    }
    child.wait().is_ok_and(|status| !NOT_RUN.contains(&status.code()))
}
