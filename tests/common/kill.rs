//! Kills a program at crash points or at any time, and starts it again.

use std::{os::unix::process::ExitStatusExt, process::Command};

/// Runs of a job that is killed again and again.
const MAX_RUNS: usize = 50;

/// Starts a job until `kill`, which runs it, returns false: the job survived, or was killed often enough. Returns the
/// number of kills.
pub(crate) fn repeatedly(start: impl Fn() -> Command, mut kill: impl FnMut(&mut Command, usize) -> bool) -> usize {
    let mut runs = 0;
    while kill(&mut start(), runs) {
        runs += 1;
        assert!(runs < MAX_RUNS, "the job never ends");
    }
    runs
}

/// Runs a job that aborts when it reaches a crash point for the `passes + 1`th time. False if it ends before, without an
/// error.
pub(crate) fn aborts_at(command: &mut Command, point: &str, passes: usize) -> bool {
    let output = command.env("FAILPOINTS", format!("{point}={passes}*off->return")).output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    match output.status.signal() {
        Some(signal) => assert_eq!(signal, libc::SIGABRT, "{point}: {err}"),
        None => assert!(output.status.success(), "{point}: {err}"),
    }
    output.status.signal().is_some()
}
