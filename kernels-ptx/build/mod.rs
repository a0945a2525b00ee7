//! From the manifest and its PTX files to what the crate includes.
//!
//! ```text
//! kernels-triton/ ──hash──┬─ as in the manifest ──▶ kernels-ptx/ ─────────┐
//!                         └─ another ──▶ aot.py ──▶ OUT_DIR/aot/ ─────────┤
//!                                                                         ▼
//!       OUT_DIR/kernels.rs (structs, index), ptx.lz4 ◀── checked: manifest.yaml, ptx/
//! ```
//!
//! Where there is no `kernels-triton/`, in a packaged crate, the committed files are what there is.
//! The build script and `tests/build_steps.rs` include this module.

mod aot;
mod files;
mod generate;
mod manifest;
mod pack;
mod sources;

use std::path::{Path, PathBuf};

use anyhow::Result;
use manifest::Manifest;

/// Environment variable with the Python that has Triton.
pub const PYTHON_VARIABLE: &str = "QUIRE_PYTHON";

/// Where everything is.
pub struct Paths {
    /// `kernels-ptx/`: `manifest.yaml` and `ptx/`.
    pub committed: PathBuf,
    /// `kernels-triton/`, absolute; `None` in a packaged crate.
    pub sources: Option<PathBuf>,
    /// Folder for generated files.
    pub out: PathBuf,
    /// Python with Triton; `None`: that of `kernels-triton/.venv`.
    pub python: Option<PathBuf>,
}

/// Which PTX was embedded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The committed files.
    Committed,
    /// Files compiled by this build from changed sources.
    Compiled,
}

/// The files on which the result depends, all of which exist.
///
/// Not the folder of the sources, which holds the virtual environment: a file that is new there
/// matters only once a file that is in the list names it.
pub fn watched(paths: &Paths) -> Result<Vec<PathBuf>> {
    let mut files = vec![paths.committed.join("manifest.yaml"), paths.committed.join("ptx")];
    if let Some(sources) = &paths.sources {
        files.extend(sources::files(sources)?.into_iter().map(|file| sources.join(file)));
    }
    Ok(files)
}

/// Writes `kernels.rs` and `ptx.lz4` into `paths.out`.
pub fn run(paths: &Paths) -> Result<Origin> {
    let origin = origin(paths)?;
    let folder = match origin {
        Origin::Committed => paths.committed.clone(),
        Origin::Compiled => aot::compile(paths)?,
    };
    embed(&folder, &paths.out)?;
    Ok(origin)
}

/// Whether the committed PTX is that of the sources.
fn origin(paths: &Paths) -> Result<Origin> {
    let Some(sources) = &paths.sources else { return Ok(Origin::Committed) };
    let committed = Manifest::read(&paths.committed)?;
    let same = committed.source_hash == sources::hash(sources)?;
    Ok(if same { Origin::Committed } else { Origin::Compiled })
}

/// Checks the manifest and the PTX in `folder` and writes them in the form that the crate includes.
fn embed(folder: &Path, out: &Path) -> Result<()> {
    let manifest = Manifest::read(folder)?;
    manifest.check()?;
    let packed = pack::pack(&manifest, folder)?;
    files::write(&out.join("ptx.lz4"), &packed.blob)?;
    files::write(&out.join("kernels.rs"), generate::generate(&manifest, &packed)?.as_bytes())
}
