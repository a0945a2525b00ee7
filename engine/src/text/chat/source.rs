//! Where a model keeps its chat template.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{ChatError, ChatTemplateOptions};

/// The contents of the files of a model folder that may say something about its template.
#[derive(Clone, Copy, Debug, Default)]
pub struct TemplateFiles<'a> {
    /// `tokenizer_config.json`: special tokens and, in most models, the template.
    pub tokenizer_config: Option<&'a str>,
    /// `chat_template.jinja`: wins over all others.
    pub chat_template_jinja: Option<&'a str>,
    /// `chat_template.json`: wins over `tokenizer_config.json`.
    pub chat_template_json: Option<&'a str>,
}

/// A template as a model gives it.
#[derive(Clone, Debug)]
pub struct FoundTemplate {
    /// For conversations without tools, and with them unless `tool_use` is there.
    pub default: String,
    /// For conversations with tools.
    pub tool_use: Option<String>,
    /// The special tokens that the model names; `control_tokens` are left to the tokenizer.
    pub options: ChatTemplateOptions,
}

/// Finds the template in the files of a model; none if it has none.
///
/// # Errors
/// A file that is not JSON of the expected form; the error names it.
pub fn find_template(files: &TemplateFiles<'_>) -> Result<Option<FoundTemplate>, ChatError> {
    let config = files.tokenizer_config.map(|text| parse("tokenizer_config.json", text));
    let config = config.transpose()?.unwrap_or(Value::Null);
    let options = special_tokens(&config)?;
    let found = |default: &str| FoundTemplate {
        default: default.to_owned(),
        tool_use: None,
        options: options.clone(),
    };
    if let Some(jinja) = files.chat_template_jinja {
        return Ok(Some(found(jinja)));
    }
    if let Some(text) = files.chat_template_json {
        let json = parse("chat_template.json", text)?;
        if let Some(templates) = named_templates("chat_template.json", &json)? {
            return Ok(Some(with_names(templates, &options)));
        }
    }
    let templates = named_templates("tokenizer_config.json", &config)?;
    Ok(templates.map(|templates| with_names(templates, &options)))
}

fn parse(file: &'static str, text: &str) -> Result<Value, ChatError> {
    serde_json::from_str(text).map_err(|e| ChatError::File { file, reason: e.to_string() })
}

/// The templates of a file by name; a template without a name is called `default`.
fn named_templates(
    file: &'static str,
    json: &Value,
) -> Result<Option<BTreeMap<String, String>>, ChatError> {
    let wrong = |reason: &str| ChatError::File { file, reason: reason.to_owned() };
    match json.get("chat_template") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(template)) => {
            Ok(Some(BTreeMap::from([("default".to_owned(), template.clone())])))
        }
        Some(Value::Array(list)) => {
            let mut templates = BTreeMap::new();
            for entry in list {
                let text = |key: &str| entry.get(key).and_then(Value::as_str).map(str::to_owned);
                let (Some(name), Some(template)) = (text("name"), text("template")) else {
                    return Err(wrong("an entry of chat_template lacks name or template"));
                };
                templates.insert(name, template);
            }
            if !templates.contains_key("default") {
                return Err(wrong("chat_template is a list without a \"default\""));
            }
            Ok(Some(templates))
        }
        Some(_) => Err(wrong("chat_template is neither a string nor a list")),
    }
}

fn with_names(
    mut templates: BTreeMap<String, String>,
    options: &ChatTemplateOptions,
) -> FoundTemplate {
    FoundTemplate {
        default: templates.remove("default").unwrap_or_default(),
        tool_use: templates.remove("tool_use"),
        options: options.clone(),
    }
}

/// The tokens named `…_token`, each a string or an object with `content`.
fn special_tokens(config: &Value) -> Result<ChatTemplateOptions, ChatError> {
    let mut options = ChatTemplateOptions::default();
    for (key, value) in config.as_object().into_iter().flatten() {
        // Flags such as `add_bos_token` are bools.
        if !key.ends_with("_token") || value.is_null() || value.is_boolean() {
            continue;
        }
        let token = value.as_str().or_else(|| value.get("content")?.as_str());
        let Some(token) = token else {
            let reason = format!("{key} is neither a string nor an object with content");
            return Err(ChatError::File { file: "tokenizer_config.json", reason });
        };
        options.special_tokens.insert(key.clone(), token.to_owned());
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(files: TemplateFiles<'_>) -> Option<FoundTemplate> {
        find_template(&files).unwrap()
    }

    #[test]
    fn the_jinja_file_wins_and_the_config_names_tokens() {
        let config = r#"{"chat_template": "config", "bos_token": "<s>", "add_bos_token": true,
            "eos_token": {"content": "</s>", "lstrip": false}, "pad_token": null}"#;
        let json = r#"{"chat_template": "json"}"#;
        let mut files = TemplateFiles {
            tokenizer_config: Some(config),
            chat_template_json: Some(json),
            chat_template_jinja: Some("jinja"),
        };
        let found = find(files).unwrap();
        assert_eq!(found.default, "jinja");
        let tokens: Vec<_> = found.options.special_tokens.into_iter().collect();
        let expected = [("bos_token", "<s>"), ("eos_token", "</s>")];
        assert_eq!(tokens, expected.map(|(key, token)| (key.to_owned(), token.to_owned())));
        files.chat_template_jinja = None;
        assert_eq!(find(files).unwrap().default, "json");
        files.chat_template_json = None;
        assert_eq!(find(files).unwrap().default, "config");
        assert!(find(TemplateFiles::default()).is_none());
    }

    #[test]
    fn named_templates_are_told_apart() {
        let config = r#"{"chat_template": [{"name": "tool_use", "template": "T"},
            {"name": "default", "template": "D"}, {"name": "rag", "template": "R"}]}"#;
        let found = find(TemplateFiles { tokenizer_config: Some(config), ..Default::default() });
        let found = found.unwrap();
        assert_eq!((found.default.as_str(), found.tool_use.as_deref()), ("D", Some("T")));
    }

    #[test]
    fn wrong_files_are_named() {
        let error = |config| {
            let files = TemplateFiles { tokenizer_config: Some(config), ..Default::default() };
            find_template(&files).unwrap_err().to_string()
        };
        assert!(error("{").starts_with("tokenizer_config.json: EOF"));
        assert!(error(r#"{"chat_template": 1}"#).ends_with("neither a string nor a list"));
        assert!(error(r#"{"chat_template": []}"#).ends_with("without a \"default\""));
        assert!(error(r#"{"chat_template": [{"name": "x"}]}"#).ends_with("lacks name or template"));
        assert!(error(r#"{"bos_token": 1}"#).contains("bos_token is neither"));
    }
}
