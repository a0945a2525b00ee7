//! Opening and loading a model, with a progress bar where a person is watching.

use crate::explain;
use indicatif::{ProgressBar, ProgressStyle};
use quire_engine::Engine;
use quire_engine::config::ResolvedConfig;
use quire_model_zoo::{LoadOptions, ModelFiles};
use std::path::Path;

/// Opens the files of the model at `path`.
///
/// # Errors
/// It cannot be opened; the message says what to give instead where that is known.
pub fn open(path: &Path) -> anyhow::Result<ModelFiles> {
    ModelFiles::open(path).map_err(|error| explain::open_error(error, path))
}

/// The sizes an engine with `options` will have.
///
/// # Errors
/// A limit does not fit; the message names its flag.
pub fn plan(files: &ModelFiles, options: &LoadOptions) -> anyhow::Result<ResolvedConfig> {
    files.plan(options).map_err(explain::run_error)
}

/// Reads the weights. What was adjusted is noted on standard error.
///
/// # Errors
/// The model cannot be loaded, or a limit does not fit; the message names its flag.
pub fn load(files: &ModelFiles, options: &LoadOptions) -> anyhow::Result<Engine> {
    for note in plan(files, options)?.notes {
        crate::report(&format!("note: {note}"));
    }
    let bar = ProgressBar::new(files.info().num_parameters);
    bar.set_style(style("loading {bar:30} {percent}% [{elapsed}<{eta}]"));
    let engine = files.load(options, &mut |parameters| bar.set_position(parameters));
    bar.finish_and_clear();
    engine.map_err(explain::run_error)
}

/// A progress bar's style from a template of ours.
pub fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("a valid template")
}
