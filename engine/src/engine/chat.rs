//! Conversations: the model's chat template, compiled once, and the prompts it makes.

use super::{Engine, RequestError, TextConfig};
use crate::text::chat::{
    ChatError, ChatMessage, ChatTemplate, FoundTemplate, RenderOptions, control_tokens,
};

/// The templates of a model, ready to render.
pub(super) struct ChatTemplates {
    default: ChatTemplate,
    tool_use: Option<ChatTemplate>,
}

impl ChatTemplates {
    /// Compiles what the model's files hold.
    pub(super) fn new(text: &TextConfig, found: &FoundTemplate) -> Result<Self, ChatError> {
        let mut options = found.options.clone();
        options.control_tokens = control_tokens(&text.tokenizer);
        let tool_use = found.tool_use.as_ref();
        Ok(ChatTemplates {
            tool_use: tool_use
                .map(|source| ChatTemplate::new(source, options.clone()))
                .transpose()?,
            default: ChatTemplate::new(&found.default, options)?,
        })
    }
}

impl Engine {
    /// The prompt of a conversation as ids: the model's chat template, exactly one BOS, and no
    /// control token that comes from a message.
    ///
    /// # Errors
    /// The model has no chat template, it does not compile, or it refuses the messages.
    pub fn encode_chat(
        &self,
        messages: &[ChatMessage],
        options: &RenderOptions<'_>,
    ) -> Result<Vec<u32>, RequestError> {
        let templates = self.chat_templates()?;
        let template = match &templates.tool_use {
            Some(tool_use) if options.tools.is_some() => tool_use,
            _ => &templates.default,
        };
        let prompt = template.render(messages, options)?;
        self.check_prompt_bytes(prompt.text())?;
        let ids = template.encode(&self.text.tokenizer, &prompt)?;
        Ok(self.with_bos(ids))
    }

    /// Whether the model brings a chat template that compiles; the error says why not.
    ///
    /// # Errors
    /// There is none, or it does not compile.
    pub fn check_chat_template(&self) -> Result<(), RequestError> {
        self.chat_templates().map(drop)
    }

    fn chat_templates(&self) -> Result<&ChatTemplates, RequestError> {
        if let Some(templates) = self.chat.get() {
            return Ok(templates);
        }
        let found = self.text.chat_template.as_ref().ok_or(RequestError::NoChatTemplate)?;
        let templates = ChatTemplates::new(&self.text, found)?;
        Ok(self.chat.get_or_init(|| templates))
    }
}
