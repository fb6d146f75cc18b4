//! The binary `elmo`; see [`elmo_pipelines::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    // Crash points that a test asks for through FAILPOINTS; not in a normal build.
    #[cfg(feature = "failpoints")]
    let _scenario = fail::FailScenario::setup();
    elmo_pipelines::cli::main()
}
