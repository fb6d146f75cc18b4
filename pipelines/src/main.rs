//! The binary `elmo`; see [`elmo_pipelines::cli`].

fn main() -> ! {
    // Crash points that a test asks for through FAILPOINTS; not in a release build.
    #[cfg(debug_assertions)]
    let _scenario = fail::FailScenario::setup();
    elmo_pipelines::cli::main()
}
