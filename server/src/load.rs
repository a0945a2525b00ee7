//! Opening and loading a model, with a progress bar where a person is watching.

use crate::cli::Setup;
use crate::device::Why;
use crate::{explain, memory};
use indicatif::{ProgressBar, ProgressStyle};
use quire_engine::Engine;
use quire_engine::config::{ConfigError, DEFAULT_BATCHED_TOKENS, DEFAULT_STEP_MS, ResolvedConfig};
use quire_model_zoo::{LoadOptions, ModelError, ModelFiles};
use std::path::Path;

/// Opens the files of the model at `path`.
///
/// # Errors
/// It cannot be opened; the message says what to give instead where that is known.
pub fn open(path: &Path) -> anyhow::Result<ModelFiles> {
    ModelFiles::open(path).map_err(|error| explain::open_error(error, path))
}

/// The sizes an engine with `options` will have. Where memory is short, a table of what goes
/// where is shown on standard error.
///
/// # Errors
/// A limit does not fit; the message names its flag.
pub fn plan(files: &ModelFiles, options: &LoadOptions) -> anyhow::Result<ResolvedConfig> {
    files.plan(options).map_err(|error| {
        if let ModelError::Config(
            ConfigError::DoesNotFit { plan, .. } | ConfigError::PoolTooSmall { plan, .. },
        ) = &error
        {
            crate::report(memory::table(plan, memory::host_swap(options)).trim_end());
        }
        explain::run_error(error, options)
    })
}

/// Reads the weights. What was adjusted is noted on standard error.
///
/// # Errors
/// The model cannot be loaded, or a limit does not fit; the message names its flag.
pub fn load(files: &ModelFiles, options: &LoadOptions) -> anyhow::Result<Engine> {
    let plan = plan(files, options)?;
    for note in &plan.notes {
        crate::report(&format!("note: {note}"));
    }
    let bar = ProgressBar::new(files.info().num_parameters);
    bar.set_style(style("loading {bar:30} {percent}% [{elapsed}<{eta}]"));
    let engine = files.load_planned(options, plan, &mut |parameters| bar.set_position(parameters));
    bar.finish_and_clear();
    engine.map_err(|error| explain::run_error(error, options))
}

/// Shows on standard error where the memory of an engine made with `setup` goes, what runs it if
/// nobody said so, and what was lowered after measuring.
pub fn show(engine: &Engine, Setup { options, choice }: &Setup) {
    crate::report(memory::table(engine.memory(), memory::host_swap(options)).trim_end());
    // Of what cannot be used there is a note already.
    if let Some(Why::Usual(_)) = &choice.why {
        crate::report(&format!("device: {}", choice.described()));
    }
    let most = options.engine.max_num_batched_tokens.unwrap_or(DEFAULT_BATCHED_TOKENS);
    let tokens = engine.limits().max_num_batched_tokens;
    if tokens < most {
        crate::report(&format!(
            "note: max_num_batched_tokens lowered from {most} to {tokens}: more take over \
             {DEFAULT_STEP_MS} ms a step"
        ));
    }
}

/// A progress bar's style from a template of ours.
pub fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("a valid template")
}
