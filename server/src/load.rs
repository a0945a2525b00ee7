//! Loading a model, with a progress bar where a person is watching.

use indicatif::{ProgressBar, ProgressStyle};
use quire_engine::Engine;
use quire_model_zoo::{LoadOptions, ModelError, ModelFiles};

/// Reads the weights. What was adjusted is noted on standard error.
pub fn load(files: &ModelFiles, options: &LoadOptions) -> Result<Engine, ModelError> {
    for note in files.plan(options)?.notes {
        crate::report(&format!("note: {note}"));
    }
    let bar = ProgressBar::new(files.info().num_parameters);
    bar.set_style(style("loading {bar:30} {percent}% [{elapsed}<{eta}]"));
    let engine = files.load(options, &mut |parameters| bar.set_position(parameters));
    bar.finish_and_clear();
    engine
}

/// A progress bar's style from a template of ours.
pub fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("a valid template")
}
