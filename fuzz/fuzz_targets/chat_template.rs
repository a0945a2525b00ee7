//! Templates and messages: an error, or a prompt, within the limits.

#![no_main]

use libfuzzer_sys::fuzz_target;
use quire_engine::text::chat::{ChatMessage, ChatTemplate, ChatTemplateOptions, RenderOptions};

fuzz_target!(|input: (&str, &str)| {
    let (source, messages) = input;
    let Ok(template) = ChatTemplate::new(source, ChatTemplateOptions::default()) else { return };
    let messages = serde_json::from_str(messages)
        .ok()
        .and_then(|json| ChatMessage::list_from_json(&json).ok())
        .unwrap_or_else(|| vec![ChatMessage::new("user", messages)]);
    let _ = template.render(&messages, &RenderOptions::default());
});
