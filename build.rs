//! Lets every binary, test and example of the workspace find libtorch without `LD_LIBRARY_PATH`.
//!
//! The three packages share this script, because link arguments reach only the targets of the package that prints them.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
};

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-env-changed=LIBTORCH");
    if env::var("CARGO_PKG_NAME").is_ok_and(|package| package == "elmo") {
        cell_kernels();
    }
    // Set by .cargo/config.toml unless the user has one. torch-sys knows other ways to find a libtorch, which is then found at run time
    // in the library path.
    let Some(libtorch) = env::var_os("LIBTORCH").map(PathBuf::from) else { return Ok(()) };
    let lib = libtorch.join("lib");
    let lib = lib.canonicalize().unwrap_or(lib);
    link_arguments(&lib);
    if env::var("CARGO_PKG_NAME").is_ok_and(|package| package == "elmo") {
        collectives(&libtorch);
        tf32(&libtorch);
    }
    run_path_for_doctests(&lib)
}

/// Programs started by hand: first beside the program (where `make install` puts a copy), then where it was built.
fn link_arguments(lib: &Path) {
    let macos = env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "macos");
    let origin = if macos { "@executable_path" } else { "$ORIGIN" };
    if !macos {
        // DT_RPATH, not DT_RUNPATH: it serves libtorch's own dependencies too, and comes before LD_LIBRARY_PATH.
        println!("cargo::rustc-link-arg=-Wl,--disable-new-dtags");
    }
    println!("cargo::rustc-link-arg=-Wl,-rpath,{origin}/../lib/elmo/torch/lib");
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", lib.display());
}

/// Compiles the kernels of GPUs for the CPU, where tests run the same code.
fn cell_kernels() {
    const FOLDER: &str = "src/model/cell";
    println!("cargo::rerun-if-changed={FOLDER}");
    println!("cargo::rerun-if-changed=build.rs");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        // The same bits on processors with and without a multiplication that adds.
        .flag_if_supported("-ffp-contract=off")
        .file(format!("{FOLDER}/host.cpp"))
        .compile("elmo_cell");
}

/// Compiles the C interface to the collectives of libtorch, unless this libtorch has none, as that of macOS.
fn collectives(libtorch: &Path) {
    const SHIM: &str = "src/train/collective/shim";
    println!("cargo::rustc-check-cfg=cfg(elmo_c10d)");
    println!("cargo::rerun-if-changed={SHIM}");
    println!("cargo::rerun-if-changed=build.rs");
    let include = libtorch.join("include");
    let linux = env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux");
    if !linux || !include.join("torch/csrc/distributed/c10d/ProcessGroupGloo.hpp").exists() {
        return;
    }
    // Warnings of libtorch's own headers are not ours.
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .warnings(false)
        .define("USE_DISTRIBUTED", None)
        .define("USE_C10D_GLOO", None)
        .include(SHIM)
        .include(include.join("torch/csrc/api/include"))
        .include(include)
        .file(format!("{SHIM}/c10d.cpp"))
        .compile("elmo_c10d");
    println!("cargo::rustc-cfg=elmo_c10d");
}

/// Compiles the C interface to libtorch's switch for TF32, where there may be GPUs.
fn tf32(libtorch: &Path) {
    const SHIM: &str = "src/model/shim";
    println!("cargo::rustc-check-cfg=cfg(elmo_tf32)");
    println!("cargo::rerun-if-changed={SHIM}");
    let include = libtorch.join("include");
    let linux = env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux");
    if !linux || !include.join("ATen/Context.h").exists() {
        return;
    }
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").warnings(false).include(include).file(format!("{SHIM}/tf32.cpp"));
    build.compile("elmo_tf32");
    println!("cargo::rustc-cfg=elmo_tf32");
}

/// Documentation tests get no link arguments. But cargo puts every native search path *inside the target folder*
/// into the library path of what it runs, so a link from there to libtorch is all they need.
fn run_path_for_doctests(lib: &Path) -> io::Result<()> {
    let Some(out) = env::var_os("OUT_DIR") else { return Ok(()) };
    let link = Path::new(&out).join("libtorch");
    if !fs::read_link(&link).is_ok_and(|goal| goal == lib) {
        let _ = fs::remove_file(&link); // a link to another libtorch, or nothing
        std::os::unix::fs::symlink(lib, &link)?;
    }
    println!("cargo::rustc-link-search=native={}", link.display());
    Ok(())
}
