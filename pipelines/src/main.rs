//! The binary `elmo`; see [`elmo_pipelines::cli`].

#[global_allocator]
static ALLOCATOR: elmo_pipelines::LargePages = elmo_pipelines::LargePages;

fn main() -> ! {
    // Crash points that a test asks for through FAILPOINTS; not in a release build.
    #[cfg(debug_assertions)]
    let _scenario = fail::FailScenario::setup();
    elmo_pipelines::cli::main()
}
