//! The same shapes in Hugging Face transformers with static batching, in a process of its own: where
//! `python3` has torch and transformers.

use super::Run;
use super::end_to_end::Rates;
use super::report::Figure;
use crate::models::Sizes;
use anyhow::{Context, ensure};
use serde::Deserialize;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Given to `python3` on its standard input, so that it need not lie beside the program.
const SCRIPT: &str = include_str!("../../gpu_check_transformers.py");
/// Between looks at the process.
const PAUSE: Duration = Duration::from_millis(50);

/// What the script prints: a line for each batch, or one that says why there is none.
#[derive(Debug, Deserialize, PartialEq)]
#[serde(untagged)]
enum Line {
    /// A batch that was run.
    Measured {
        batch: usize,
        /// Seconds until all sequences have their first token.
        first_s: f64,
        /// Tokens that each sequence got.
        tokens: usize,
        /// Seconds until they have them all.
        total_s: f64,
    },
    /// Nothing can be run.
    Skipped { skipped: String },
}

/// Runs `sizes` in transformers; `rates` are ours, by batch.
pub(super) fn run(run: &mut Run, (name, sizes): (&str, &Sizes), rates: &Rates) {
    let what = format!("{name} in transformers");
    if !run.has_time_for(&what) {
        return;
    }
    let task = task(run, sizes);
    let output = match answer("python3", &task, run.time_left()) {
        Ok(output) => output,
        Err(error) => return run.leave_out(&what, &format!("{error:#}")),
    };
    for line in output.lines() {
        match serde_json::from_str(line) {
            Ok(Line::Measured { batch, first_s, tokens, total_s }) => {
                let steps = (batch * tokens.saturating_sub(1)) as f64;
                let rate = steps / (total_s - first_s).max(1e-9);
                figures(run, name, (batch, rate), (first_s, rates.get(&batch).copied()));
            }
            Ok(Line::Skipped { skipped }) => run.leave_out(&what, &skipped),
            Err(error) => run.leave_out(&what, &format!("{line:?}: {error}")),
        }
    }
}

fn figures(
    run: &mut Run,
    name: &str,
    (batch, rate): (usize, f64),
    (first_s, ours): (f64, Option<f64>),
) {
    let params = json!({"model": name, "batch": batch, "by": "transformers"});
    let first = Figure::new("time to first tokens", "ms", params.clone());
    run.figure(first.ms(1e3 * first_s).value(1e3 * first_s));
    run.figure(Figure::new("decode", "tok/s", params.clone()).value(rate));
    if let Some(ours) = ours {
        let ratio = Figure::new("decode, ours over theirs", "times", params);
        run.figure(ratio.value(ours / rate));
    }
}

/// What the script is to do.
fn task(run: &Run, sizes: &Sizes) -> Value {
    json!({
        "device": if run.dry_run { "cpu" } else { "cuda" },
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.mlp,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "tie_word_embeddings": sizes.tied,
        "batches": run.sizes.batches,
        "prompt": run.sizes.prompt,
        "generated": run.sizes.generated,
        "seconds": run.time_left().as_secs_f64(),
    })
}

/// What the script prints, if it ends in time.
fn answer(python: &str, task: &Value, time: Duration) -> anyhow::Result<String> {
    let mut child = Command::new(python)
        .args(["-", &task.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("{python} cannot be started"))?;
    let result = wait(&mut child, time);
    if result.is_err() {
        // It may have ended by itself.
        let _ = child.kill();
        let _ = child.wait();
    }
    result
}

fn wait(child: &mut Child, time: Duration) -> anyhow::Result<String> {
    let end = Instant::now() + time;
    let mut stdin = child.stdin.take().context("no standard input")?;
    stdin.write_all(SCRIPT.as_bytes()).context("the script cannot be given to it")?;
    drop(stdin);
    let mut outputs = (child.stdout.take(), child.stderr.take());
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        ensure!(Instant::now() < end, "no answer in {:.0} s", time.as_secs_f64());
        std::thread::sleep(PAUSE);
    };
    let text = |pipe: Option<&mut dyn Read>| {
        let mut bytes = Vec::new();
        pipe.map(|pipe| pipe.read_to_end(&mut bytes)).transpose()?;
        anyhow::Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let errors = text(outputs.1.as_mut().map(|pipe| pipe as &mut dyn Read))?;
    let last = errors.trim_end().lines().last().unwrap_or_default().to_owned();
    ensure!(status.success(), "{status}: {last}");
    text(outputs.0.as_mut().map(|pipe| pipe as &mut dyn Read))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_both_kinds_are_read() {
        let line = |text: &str| serde_json::from_str::<Line>(text).unwrap();
        let measured = line(r#"{"batch": 2, "first_s": 0.5, "tokens": 9, "total_s": 1.5}"#);
        let want = Line::Measured { batch: 2, first_s: 0.5, tokens: 9, total_s: 1.5 };
        assert_eq!(measured, want);
        assert_eq!(line(r#"{"skipped": "no"}"#), Line::Skipped { skipped: "no".into() });
    }

    #[test]
    fn a_python_that_is_not_there_is_an_error() {
        let error = answer("no-such-python", &json!({}), Duration::from_secs(5)).unwrap_err();
        assert_eq!(error.to_string(), "no-such-python cannot be started");
    }
}
