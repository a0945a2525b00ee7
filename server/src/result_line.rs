//! One result: a line of JSONL, or a text to be read.

use crate::output::{counted, escaped, milliseconds, to_json};
use quire_engine::sampling::TokenLogprob;
use quire_engine::text::{TextError, Tokenizer};
use quire_engine::{BeamScore, RequestOutput, StopReason, TokenLogprobs};
use serde::Serialize;
use serde_json::Value;

#[derive(Serialize)]
struct ResultLine<'a> {
    id: &'a Value,
    /// Of the input, or number of the prompt.
    line: u64,
    /// Which of the request's sequences.
    index: usize,
    text: &'a str,
    token_ids: &'a [u32],
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Vec<Position>>,
    /// One entry a token of the prompt; the first has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Vec<Option<Position>>>,
    finish_reason: &'a str,
    stop_reason: &'a Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    beam: Option<BeamScore>,
    usage: Usage,
    seed: u64,
    timings: Timings,
}

#[derive(Serialize)]
struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
}

/// Null where a request did not get so far. All of it depends on what ran beside the request.
#[derive(Serialize)]
struct Timings {
    queue_ms: Option<f64>,
    ttft_ms: Option<f64>,
    tpot_ms: Option<f64>,
    e2e_ms: f64,
    /// Tokens of the prompt that were not computed.
    num_cached_tokens: usize,
}

#[derive(Serialize)]
struct Position {
    #[serde(flatten)]
    sampled: Token,
    top: Vec<Token>,
}

#[derive(Serialize)]
struct Token {
    token_id: u32,
    token: String,
    /// Null where it is −∞.
    logprob: f32,
}

#[derive(Serialize)]
struct ErrorLine<'a> {
    id: &'a Value,
    error: ErrorDetail<'a>,
}

#[derive(Serialize)]
struct ErrorDetail<'a> {
    message: &'a str,
    line: u64,
}

/// The line of a request that ended well.
pub fn result_line(
    id: &Value,
    line: u64,
    output: &RequestOutput,
    tokenizer: &Tokenizer,
) -> Result<String, TextError> {
    let positions = |all: &Vec<TokenLogprobs>| -> Result<Vec<Position>, TextError> {
        all.iter().map(|one| position(one, tokenizer)).collect()
    };
    let logprobs = output.logprobs.as_ref().map(positions).transpose()?;
    let of_prompt = output.prompt_logprobs.as_ref().map(positions).transpose()?;
    let prompt_logprobs =
        of_prompt.map(|all| std::iter::once(None).chain(all.into_iter().map(Some)).collect());
    let (prompt_tokens, completion_tokens) =
        (output.prompt_token_ids.len(), output.token_ids.len());
    let metrics = &output.metrics;
    Ok(to_json(&ResultLine {
        id,
        line,
        index: output.index,
        text: &output.text,
        token_ids: &output.token_ids,
        logprobs,
        prompt_logprobs,
        finish_reason: output.finish_reason.name(),
        stop_reason: &output.stop_reason,
        beam: output.beam,
        usage: Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
        },
        seed: output.seed,
        timings: Timings {
            queue_ms: metrics.queue.map(milliseconds),
            ttft_ms: metrics.ttft.map(milliseconds),
            tpot_ms: metrics.tpot.map(milliseconds),
            e2e_ms: milliseconds(metrics.e2e),
            num_cached_tokens: metrics.num_cached_tokens,
        },
    }))
}

/// The line of a request that was refused or failed, `message` being one line.
pub fn error_line(id: &Value, message: &str, line: u64) -> String {
    to_json(&ErrorLine { id, error: ErrorDetail { message, line } })
}

/// A result to be read: a rule with the id or, without one, the line, then the text.
pub fn result_text(id: &Value, line: u64, output: &RequestOutput) -> String {
    let tokens = counted(output.token_ids.len() as u64, "token");
    let title = format!("{} ({tokens}, {})", name(id, line), output.finish_reason.name());
    format!("── {title}\n{}\n", output.text.trim())
}

/// The same for a request that was refused or failed.
pub fn error_text(id: &Value, message: &str, line: u64) -> String {
    format!("── {}\nerror: {message}\n", name(id, line))
}

/// An id on one line: a string without its quotes, a number, or the number of the line for null.
fn name(id: &Value, line: u64) -> String {
    match id {
        Value::Null => format!("line {line}"),
        Value::String(id) => escaped(id).into_owned(),
        other => other.to_string(),
    }
}

fn position(logprobs: &TokenLogprobs, tokenizer: &Tokenizer) -> Result<Position, TextError> {
    let token = |one: &TokenLogprob| -> Result<Token, TextError> {
        let token = tokenizer.token_text(one.token)?;
        Ok(Token { token_id: one.token, token, logprob: one.logprob })
    };
    let top = logprobs.top.iter().map(token).collect::<Result<_, _>>()?;
    Ok(Position { sampled: token(&logprobs.sampled)?, top })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn names_of_results_are_one_line() {
        assert_eq!(name(&json!("a\nb\t\u{1b}é"), 7), "a\\nb\\t\\u{1b}é");
        assert_eq!(name(&json!(12), 7), "12");
        assert_eq!(name(&Value::Null, 7), "line 7");
        assert_eq!(error_text(&Value::Null, "bad", 7), "── line 7\nerror: bad\n");
    }
}
