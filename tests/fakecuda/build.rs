//! Names for the dynamic loader.
//!
//! The library is known to it by what a program that wants the CUDA driver looks for. It stays
//! loaded once it is, since it has a function that runs at exit.
//!
//! A second name, that of cuBLASLt, is an empty library that needs the first: a symbol that is looked
//! up in it is found in what it needs.

use std::path::Path;
use std::process::Command;
use std::{env, fs};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    let out = env::var("OUT_DIR").expect("Cargo sets OUT_DIR");
    let out = Path::new(&out);
    let source = out.join("empty.c");
    fs::write(&source, "").expect("OUT_DIR can be written");
    // To link against; at run time the driver is there under this name.
    link(out, &source, "libcuda.so", &[]);
    link(out, &source, "libcublasLt.so", &["-Wl,--no-as-needed", "-L.", "-lcuda"]);
    fs::remove_file(out.join("libcuda.so")).expect("it was just made");
}

/// Links an empty library of that name, with the linker driver that Rust uses.
fn link(out: &Path, source: &Path, name: &str, needs: &[&str]) {
    let linker = env::var("RUSTC_LINKER").unwrap_or_else(|_| "cc".into());
    let mut command = Command::new(linker);
    command.current_dir(out).args(["-shared", "-o", name]).arg(source);
    command.arg(format!("-Wl,-soname,{name}")).args(needs);
    let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(status.success(), "{command:?}: {status}");
}
