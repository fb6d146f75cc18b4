//! Lets every binary, test and example of the workspace find libtorch without `LD_LIBRARY_PATH`.

use std::{env, path::PathBuf};

fn main() {
    println!("cargo::rerun-if-env-changed=LIBTORCH");
    println!("cargo::rerun-if-changed=build.rs");
    let Some(libtorch) = env::var_os("LIBTORCH").map(PathBuf::from) else { return };
    let lib = libtorch.join("lib").canonicalize().unwrap_or_else(|_| libtorch.join("lib"));
    // DT_RPATH, not DT_RUNPATH: libtorch's own dependencies are looked up through it as well.
    println!("cargo::rustc-link-arg=-Wl,--disable-new-dtags,-rpath,{}", lib.display());
}
