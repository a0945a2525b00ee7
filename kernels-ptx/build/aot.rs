//! Compiles changed kernel sources by running `kernels-triton/aot.py`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::manifest::Manifest;
use super::{PYTHON_VARIABLE, Paths, files, sources};

/// Compiles the sources into a folder of `paths.out`; returns it.
///
/// The folder starts as a copy of the committed files, so that only what changed is compiled.
pub fn compile(paths: &Paths) -> Result<PathBuf> {
    let sources = paths.sources.as_deref().context("there are no kernel sources to compile")?;
    let folder = paths.out.join("aot");
    if !folder.join("manifest.yaml").exists() {
        // The manifest comes last: it says that the copy is whole.
        for name in ["ptx", "manifest.yaml"] {
            files::copy(&paths.committed.join(name), &folder.join(name))?;
        }
    }
    run_driver(paths, sources, &folder)?;
    let (written, wanted) = (Manifest::read(&folder)?.source_hash, sources::hash(sources)?);
    ensure!(
        written == wanted,
        "aot.py gives the sources the hash {written}, the build script {wanted}: the rules in \
         kernels-triton/variants.py and kernels-ptx/build/sources.rs differ"
    );
    Ok(folder)
}

fn run_driver(paths: &Paths, sources: &Path, folder: &Path) -> Result<()> {
    let own = sources.join(".venv/bin/python");
    let python = paths.python.as_ref().unwrap_or(&own);
    let mut command = Command::new(python);
    command.arg(sources.join("aot.py")).arg("--out").arg(folder);
    let done = command.env("PYTHONDONTWRITEBYTECODE", "1").output().with_context(|| {
        format!(
            "{sources} is not what the PTX in {committed} was compiled from, and {python}, which \
             should compile it, does not start.\nRun\n    make -C {root} setup\nand build again, \
             or set {PYTHON_VARIABLE} to a Python with {sources}/requirements.txt installed",
            sources = sources.display(),
            committed = paths.committed.display(),
            python = python.display(),
            root = sources.parent().unwrap_or(sources).display(),
        )
    })?;
    if !done.status.success() {
        let log = String::from_utf8_lossy(&done.stderr);
        bail!("{command:?} ended with {}:\n{}", done.status, log.trim_end());
    }
    Ok(())
}
