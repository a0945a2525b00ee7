//! What happens to a row's logits before the temperature: masks, bias, penalties, and the hook
//! for a processor of the user's own.

use super::{ProcessorCall, RowError, SamplingBatch, SamplingRow, SeenToken};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What a custom processor may look at.
#[derive(Clone, Copy, Debug)]
pub struct LogitsContext<'a> {
    /// The prompt's ids.
    pub prompt: &'a [u32],
    /// The ids generated so far.
    pub output: &'a [u32],
}

/// A user's own rule for the next token, registered by name with
/// [`crate::Engine::register_logits_processor`] and asked for by
/// [`crate::SamplingParams::logits_processor`].
///
/// It must depend on its arguments alone: then the request's tokens still do not depend on what
/// else is in the batch. It runs on a worker thread, once for each token of a request that asks
/// for it; a panic in it fails that request.
///
/// ```
/// use quire_engine::sampling::{LogitsContext, LogitsProcessor};
///
/// /// Forbids the token that was generated last.
/// struct NoRepeat;
///
/// impl LogitsProcessor for NoRepeat {
///     fn process(&self, context: &LogitsContext<'_>, logits: &mut [f32]) {
///         if let Some(&last) = context.output.last() {
///             logits[last as usize] = f32::NEG_INFINITY;
///         }
///     }
/// }
/// ```
pub trait LogitsProcessor: Send + Sync {
    /// Changes `logits` (`[vocab]`, after masks and bias, before penalties and temperature).
    /// −∞ forbids a token; a NaN or +∞ fails the request.
    fn process(&self, context: &LogitsContext<'_>, logits: &mut [f32]);
}

/// Applies everything that comes before the temperature, in the documented order.
pub(super) fn process(
    logits: &mut [f32],
    row: &SamplingRow,
    batch: &SamplingBatch,
) -> Result<(), RowError> {
    if let Some(allowed) = &row.allowed {
        keep_only(logits, &batch.ids[allowed.clone()]);
    }
    for &id in &batch.ids[row.suppressed.clone()] {
        if let Some(logit) = logits.get_mut(id as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
    for &(id, bias) in &batch.biases[row.bias.clone()] {
        logits[id as usize] += bias;
    }
    if let Some(call) = &row.processor {
        call_processor(call, &batch.history, logits)?;
    }
    for seen in &batch.seen[row.seen.clone()] {
        penalise(logits, seen, row);
    }
    Ok(())
}

fn call_processor(
    call: &ProcessorCall,
    history: &[u32],
    logits: &mut [f32],
) -> Result<(), RowError> {
    let (prompt, output) = history[call.history.clone()].split_at(call.prompt_len);
    // The row is scratch, so it does not matter how far the processor came.
    let run = || call.processor.process(&LogitsContext { prompt, output }, logits);
    catch_unwind(AssertUnwindSafe(run)).map_err(|_| RowError::ProcessorPanicked)
}

/// −∞ for every id that is not in `ids`, which ascend and are below the vocabulary.
pub(super) fn keep_only(logits: &mut [f32], ids: &[u32]) {
    let mut next = 0;
    for &id in ids {
        logits[next..id as usize].fill(f32::NEG_INFINITY);
        next = id as usize + 1;
    }
    logits[next..].fill(f32::NEG_INFINITY);
}

/// Repetition over prompt and output, once a token; frequency and presence over the output.
fn penalise(logits: &mut [f32], seen: &SeenToken, row: &SamplingRow) {
    let Some(logit) = logits.get_mut(seen.token as usize) else { return };
    let forbidden = *logit == f32::NEG_INFINITY;
    if *logit > 0.0 {
        *logit /= row.repetition_penalty;
    } else {
        *logit *= row.repetition_penalty;
    }
    if !forbidden {
        // An extreme penalty is as strong as numbers go, and no stronger.
        *logit = logit.clamp(f32::MIN, f32::MAX);
    }
    if seen.output_count > 0 {
        *logit -= row.frequency_penalty * seen.output_count as f32 + row.presence_penalty;
    }
}
