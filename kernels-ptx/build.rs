//! Embeds the committed PTX and generates the launch structs; `build/mod.rs` does the work.

use std::path::PathBuf;
use std::process::ExitCode;
use std::{env, fs};

use anyhow::{Context, Result};

#[path = "build/mod.rs"]
mod steps;

fn main() -> ExitCode {
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<()> {
    let folder = |name: &str| env::var_os(name).map(PathBuf::from).context(name.to_owned());
    let committed = folder("CARGO_MANIFEST_DIR")?;
    let beside = committed.join("../kernels-triton");
    let paths = steps::Paths {
        sources: beside.is_dir().then(|| fs::canonicalize(&beside)).transpose()?,
        committed,
        out: folder("OUT_DIR")?,
        python: env::var_os(steps::PYTHON_VARIABLE).map(PathBuf::from),
    };
    println!("cargo::rerun-if-env-changed={}", steps::PYTHON_VARIABLE);
    for path in steps::watched(&paths)? {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    if steps::run(&paths)? == steps::Origin::Compiled {
        println!(
            "cargo::warning=the kernel sources changed, so this build has its own PTX; \
             `make kernels` updates kernels-ptx/"
        );
    }
    Ok(())
}
