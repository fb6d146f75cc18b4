//! The binary `elmo`; see [`elmo_pipelines::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    elmo_pipelines::cli::main()
}
