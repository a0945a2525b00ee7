//! Messages on their way to a prompt.

use anyhow::{Context, anyhow};
use quire_engine::engine::RequestError;
use quire_engine::text::chat::{
    ChatMessage, ChatTemplate, FoundTemplate, MAX_TEMPLATE_BYTES, RenderOptions, TemplateFiles,
    find_template,
};
use quire_engine::{Engine, Request, SamplingParams};
use quire_model_zoo::ModelFiles;
use quire_model_zoo::config::MAX_CONFIG_BYTES;
use quire_model_zoo::folder::ModelFolder;
use quire_model_zoo::loader::ModelFormat;
use serde_json::{Map, Value};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Messages and how they become a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    /// The messages, oldest first.
    pub messages: Vec<ChatMessage>,
    /// The prompt ends with the start of an answer.
    pub add_generation_prompt: bool,
    /// The prompt ends within the last message.
    pub continue_final_message: bool,
    /// Further variables for the template.
    pub template_kwargs: Map<String, Value>,
}

impl Conversation {
    /// The prompt as ids.
    ///
    /// # Errors
    /// There is no template, or it refuses the messages.
    pub fn encode(self, engine: &Engine) -> Result<Vec<u32>, RequestError> {
        let options = RenderOptions {
            add_generation_prompt: self.add_generation_prompt,
            continue_final_message: self.continue_final_message,
            template_kwargs: self.template_kwargs,
            ..Default::default()
        };
        engine.encode_chat(&self.messages, &options)
    }
}

/// A request for an answer to the conversation `prompt`. Without `max_tokens` the answer may have
/// the `recommended` number of tokens or, without that, the rest of the context, but never more
/// than the latter.
pub fn answer_request(
    engine: &Engine,
    prompt: Vec<u32>,
    mut params: SamplingParams,
    recommended: Option<usize>,
) -> Request {
    let room = engine.limits().max_model_len.saturating_sub(prompt.len());
    params.max_tokens = params.max_tokens.or(recommended.map(|n| n.min(room.max(1))));
    Request::new(prompt, params)
}

/// Why a request was refused, in the words of the command line.
pub fn refusal(error: RequestError) -> anyhow::Error {
    match error {
        RequestError::NoChatTemplate => {
            anyhow!("the model has no chat template; give one with --chat-template")
        }
        other => other.into(),
    }
}

/// Reads the template in the file at `path`, to stand in place of the model's.
///
/// # Errors
/// It cannot be read, is too long, or does not compile.
pub fn read_template(path: &Path) -> anyhow::Result<String> {
    let name = path.display().to_string();
    let mut bytes = Vec::new();
    let file = File::open(path).with_context(|| format!("cannot read {name}"))?;
    let read = file.take(MAX_TEMPLATE_BYTES as u64 + 1).read_to_end(&mut bytes);
    read.with_context(|| format!("cannot read {name}"))?;
    let template = String::from_utf8(bytes)
        .map_err(|e| anyhow!("{name}: not UTF-8 at byte {}", e.utf8_error().valid_up_to() + 1))?;
    ChatTemplate::new(&template, Default::default()).context(name)?;
    Ok(template)
}

/// Puts `template` in place of the model's own; special tokens stay those of the model at `path`.
///
/// # Errors
/// The model's `tokenizer_config.json` is not what it should be.
pub fn set_template(files: &mut ModelFiles, path: &Path, template: String) -> anyhow::Result<()> {
    let text = &mut files.text;
    if let Some(own) = &mut text.chat_template {
        (own.default, own.tool_use) = (template, None);
        return Ok(());
    }
    text.chat_template = match files.format {
        ModelFormat::HuggingFace => {
            let config = ModelFolder::open(path)?;
            let config = config.read_text("tokenizer_config.json", MAX_CONFIG_BYTES)?;
            find_template(&TemplateFiles {
                tokenizer_config: config.as_deref(),
                chat_template_jinja: Some(&template),
                chat_template_json: None,
            })?
        }
        ModelFormat::Gguf => {
            let mut found =
                FoundTemplate { default: template, tool_use: None, options: Default::default() };
            let eos = text.eos_token_ids.first().copied();
            for (name, id) in [("bos_token", text.prepend_bos), ("eos_token", eos)] {
                let token = id.and_then(|id| text.tokenizer.id_to_token(id));
                found.options.special_tokens.extend(token.map(|token| (name.to_owned(), token)));
            }
            Some(found)
        }
    };
    Ok(())
}
