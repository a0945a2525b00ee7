//! Chat templates render what Jinja2 renders, byte for byte.
//!
//! The templates of `data/chat` were written for this purpose, after the structure of those of
//! Llama 2 and 3.1, Mistral, Qwen 2.5 and 3, GLM-4, DeepSeek-R1 and Gemma 2; `values` and
//! `whitespace` go through what the language offers. `golden/make_chat_goldens.py` wrote
//! `expected.json` with Python.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use quire_engine::text::chat::{
    ChatError, ChatMessage, ChatTemplate, ChatTemplateOptions, RenderOptions,
};
use serde_json::Value;

/// 2024-07-26 09:05:03, the clock of the script.
const NOW_SECONDS: u64 = 1_721_984_703;

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data/chat")
}

fn read_json(name: &str) -> Value {
    let text = std::fs::read_to_string(data().join(name)).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn template(name: &str, control_tokens: &[&str]) -> ChatTemplate {
    let source = std::fs::read_to_string(data().join(format!("templates/{name}.jinja"))).unwrap();
    let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
    let options = ChatTemplateOptions {
        special_tokens: tokens.map(|(key, token)| (key.into(), token.into())).into(),
        control_tokens: control_tokens.iter().map(|&token| token.to_owned()).collect(),
    };
    ChatTemplate::new(&source, options).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn render(template: &ChatTemplate, case: &Value) -> Result<String, ChatError> {
    let list = |key: &str| case.get(key).and_then(Value::as_array).map(Vec::as_slice);
    let options = RenderOptions {
        add_generation_prompt: case.get("add_generation_prompt") != Some(&Value::Bool(false)),
        tools: list("tools"),
        documents: list("documents"),
        template_kwargs: case
            .get("template_kwargs")
            .map_or_else(Default::default, |kwargs| kwargs.as_object().unwrap().clone()),
        now: UNIX_EPOCH + Duration::from_secs(NOW_SECONDS),
        ..RenderOptions::default()
    };
    let messages = ChatMessage::list_from_json(&case["messages"])?;
    template.render(&messages, &options).map(|prompt| prompt.text().to_owned())
}

/// The lines that differ.
fn difference(got: &str, want: &str) -> String {
    let lines = got.split('\n').zip(want.split('\n')).enumerate();
    let differing = lines.filter(|(_, (got, want))| got != want);
    let report = differing
        .map(|(i, (got, want))| format!("line {}:\n  got  {got:?}\n  want {want:?}\n", i + 1));
    format!("{} instead of {} bytes\n{}", got.len(), want.len(), report.collect::<String>())
}

/// Compares all templates and cases, with some control tokens marked in messages.
fn compare(control_tokens: &[&str]) {
    let cases = read_json("cases.json");
    let cases: BTreeMap<&str, &Value> =
        cases.as_array().unwrap().iter().map(|c| (c["name"].as_str().unwrap(), c)).collect();
    let mut faults = Vec::new();
    let mut compared = 0;
    for (name, expected) in read_json("expected.json").as_object().unwrap() {
        let template = template(name, control_tokens);
        for (case, want) in expected.as_object().unwrap() {
            let got = render(&template, cases[case.as_str()]);
            let text = |key: &str| want.get(key).and_then(Value::as_str);
            let fault = match (&got, text("text"), text("raised")) {
                (Ok(got), Some(want), _) if got == want => None,
                (Ok(got), Some(want), _) => Some(difference(got, want)),
                (Err(ChatError::Raised(got)), None, Some(want)) if got == want => None,
                (Err(ChatError::Render { .. }), None, None) => None,
                _ => Some(format!(
                    "{:.300} instead of {:.300}",
                    format!("{got:?}"),
                    want.to_string()
                )),
            };
            faults.extend(fault.map(|fault| format!("{name}, {case}: {fault}")));
            compared += 1;
        }
    }
    assert!(faults.is_empty(), "{} of {compared}:\n{}", faults.len(), faults.join("\n"));
    assert!(compared > 200, "only {compared} renderings were compared");
}

#[test]
fn rendering_equals_jinja2() {
    compare(&[]);
}

#[test]
fn marking_control_tokens_changes_no_text() {
    compare(&["<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<｜User｜>"]);
}
