use super::*;
use quire_engine::text::chat::Content;
use serde_json::json;

/// Parses a line; messages and prompts have the same defaults.
fn parse_with(line: &str, defaults: &SamplingParams) -> RequestLine {
    parse_line(line, &Defaults { prompt: defaults.clone(), chat: defaults.clone() })
}

fn parse(line: &str) -> RequestLine {
    parse_with(line, &SamplingParams::default())
}

fn request_of(prompt: impl Into<Prompt>, params: SamplingParams) -> LineRequest {
    Request::new(prompt, params).into()
}

/// Parses `{"prompt": "x", "FIELD": VALUE}`.
fn with(field: &str, value: &str) -> Result<SamplingParams, String> {
    let line = format!("{{\"prompt\": \"x\", \"{field}\": {value}}}");
    parse(&line).request.map(|request| request.params)
}

/// Parses `{"messages": […one…], "FIELD": VALUE}`.
fn chat_with(field: &str, value: &str) -> Result<Conversation, String> {
    let line = format!(
        "{{\"messages\": [{{\"role\": \"user\", \"content\": \"x\"}}], \"{field}\": {value}}}"
    );
    parse(&line).request.map(conversation_of)
}

fn conversation_of(request: LineRequest) -> Conversation {
    match request.input {
        LineInput::Chat(conversation) => *conversation,
        LineInput::Prompt(prompt) => panic!("{prompt:?}"),
    }
}

fn changed(change: impl FnOnce(&mut SamplingParams)) -> SamplingParams {
    let mut params = SamplingParams::default();
    change(&mut params);
    params
}

#[test]
fn every_field_takes_its_type() {
    let strings = |all: &[&str]| all.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
    let none = SamplingParams::default();
    for (field, value, expected) in [
        ("max_tokens", "1", changed(|p| p.max_tokens = Some(1))),
        ("max_tokens", "18446744073709551615", changed(|p| p.max_tokens = Some(usize::MAX))),
        ("min_tokens", "3", changed(|p| p.min_tokens = 3)),
        ("temperature", "0", changed(|p| p.temperature = 0.0)),
        ("temperature", "0.5", changed(|p| p.temperature = 0.5)),
        ("temperature", "3.4e38", changed(|p| p.temperature = 3.4e38)),
        ("top_k", "-1", none.clone()),
        ("top_k", "0", none.clone()),
        ("top_k", "4294967295", changed(|p| p.top_k = u32::MAX)),
        ("top_p", "1e-3", changed(|p| p.top_p = 1e-3)),
        ("min_p", "1", changed(|p| p.min_p = 1.0)),
        ("seed", "18446744073709551615", changed(|p| p.seed = Some(u64::MAX))),
        ("stop", "\"a\"", changed(|p| p.stop = strings(&["a"]))),
        ("stop", "[\"a\", \"b\"]", changed(|p| p.stop = strings(&["a", "b"]))),
        ("stop_token_ids", "[0, 4294967295]", changed(|p| p.stop_token_ids = vec![0, u32::MAX])),
        ("include_stop_str_in_output", "true", changed(|p| p.include_stop_str_in_output = true)),
        ("ignore_eos", "true", changed(|p| p.ignore_eos = true)),
        ("logprobs", "0", changed(|p| p.logprobs = Some(NumLogprobs::Top(0)))),
        ("logprobs", "-1", changed(|p| p.logprobs = Some(NumLogprobs::All))),
        ("prompt_logprobs", "5", changed(|p| p.prompt_logprobs = Some(NumLogprobs::Top(5)))),
        ("n", "3", changed(|p| p.n = 3)),
        ("presence_penalty", "-2", changed(|p| p.presence_penalty = -2.0)),
        ("frequency_penalty", "0.5", changed(|p| p.frequency_penalty = 0.5)),
        ("repetition_penalty", "1.1", changed(|p| p.repetition_penalty = 1.1)),
        ("bad_words", "[\"a\"]", changed(|p| p.bad_words = strings(&["a"]))),
        ("allowed_token_ids", "[3]", changed(|p| p.allowed_token_ids = Some(vec![3]))),
        ("allowed_token_ids", "[]", changed(|p| p.allowed_token_ids = Some(vec![]))),
        ("logit_bias", "{\"5\": -1}", changed(|p| p.logit_bias = vec![(5, -1.0)])),
        ("spaces_between_special_tokens", "false", none.clone()),
        ("skip_special_tokens", "false", changed(|p| p.skip_special_tokens = false)),
        ("detokenize", "false", changed(|p| p.detokenize = false)),
        ("use_beam_search", "true", changed(|p| p.use_beam_search = true)),
        ("beam_width", "4", changed(|p| p.beam_width = Some(4))),
        ("length_penalty", "-0.5", changed(|p| p.length_penalty = -0.5)),
        ("early_stopping", "false", none.clone()),
        ("early_stopping", "true", changed(|p| p.early_stopping = EarlyStopping::Always)),
        ("early_stopping", "\"never\"", changed(|p| p.early_stopping = EarlyStopping::Never)),
        ("priority", "-2147483648", changed(|p| p.priority = i32::MIN)),
        ("cache_salt", "\"a\"", changed(|p| p.cache_salt = Some("a".to_owned()))),
        ("id", "7", none),
    ] {
        assert_eq!(with(field, value), Ok(expected), "{field} {value}");
    }
}

#[test]
fn wrong_types_are_refused_with_field_and_value() {
    let cases: [(&str, &[&str]); 30] = [
        ("max_tokens", &["0", "-1", "5.5", "5.0", "\"5\"", "true", "[5]", "18446744073709551616"]),
        ("min_tokens", &["-1", "1.0"]),
        ("temperature", &["\"hot\"", "true", "3.5e38", "[1]"]),
        ("top_k", &["-2", "1.5", "4294967296"]),
        ("top_p", &["\"1\""]),
        ("min_p", &["{}"]),
        ("seed", &["-1", "1.5", "\"1\""]),
        ("stop", &["5", "[5]", "[null]", "{}"]),
        ("stop_token_ids", &["5", "[-1]", "[1.0]", "[\"a\"]", "[4294967296]"]),
        ("include_stop_str_in_output", &["1", "\"true\""]),
        ("ignore_eos", &["0"]),
        ("logprobs", &["true", "-2", "1.5", "4294967296"]),
        ("prompt_logprobs", &["\"3\"", "-2", "[]"]),
        ("n", &["0", "0.5", "-1", "\"2\""]),
        ("presence_penalty", &["\"0\"", "1e39"]),
        ("frequency_penalty", &["[]"]),
        ("repetition_penalty", &["true"]),
        ("bad_words", &["5", "[5]"]),
        ("allowed_token_ids", &["5", "[-1]", "{}"]),
        ("logit_bias", &["[]", "{\"a\": 1}", "{\"-1\": 1}", "{\"1\": \"x\"}", "5"]),
        ("spaces_between_special_tokens", &["1"]),
        ("skip_special_tokens", &["1"]),
        ("detokenize", &["1"]),
        ("prompt_token_ids", &["\"x\"", "[1.5]", "[-1]"]),
        ("use_beam_search", &["1", "\"true\""]),
        ("beam_width", &["0", "-1", "2.5", "\"2\""]),
        ("length_penalty", &["\"1\"", "1e39"]),
        ("early_stopping", &["\"always\"", "\"true\"", "0", "[]"]),
        ("priority", &["0.5", "2147483648", "-2147483649", "\"high\""]),
        ("cache_salt", &["5", "[\"a\"]"]),
    ];
    for (field, values) in cases {
        for value in values {
            let error = with(field, value).unwrap_err();
            assert!(error.starts_with(&format!("{field} must be ")), "{field} {value}: {error}");
            assert!(error.contains("got "), "{field} {value}: {error}");
        }
    }
    assert!(with("seed", "-1").unwrap_err().ends_with("got -1"));
    for (field, rule) in [
        ("max_tokens", "from 1 to 18446744073709551615, got -7"),
        ("n", "from 1 to 18446744073709551615, got -7"),
        ("seed", "from 0 to 18446744073709551615, got -7"),
        ("logprobs", "from -1 to 4294967295, got -7"),
        ("prompt_logprobs", "from -1 to 4294967295, got -7"),
    ] {
        let error = with(field, "-7").unwrap_err();
        assert!(error.ends_with(&format!("a whole number {rule}")), "{error}");
    }
}

#[test]
fn what_is_not_json_names_field_column_and_text() {
    for value in ["NaN", "1e400", "-1e400", "Infinity", "+1", ".5", "'x'"] {
        let error = with("temperature", value).unwrap_err();
        assert!(error.contains("field \"temperature\""), "{value}: {error}");
        assert!(error.contains(" at column 3") && error.contains(value), "{value}: {error}");
        assert!(!error.contains("line 1"), "{error}");
    }
    let jsonl = "; one JSON object a line (JSONL) is expected";
    for (text, expected) in [
        ("", "EOF while parsing a value"),
        ("{", "EOF while parsing an object at column 1"),
        ("{\n", "EOF while parsing an object at column 1"),
        ("{\"prompt\": \"x\",\r\n", "EOF while parsing a value at column 15"),
        ("[", "invalid type: sequence, expected a JSON object"),
        ("[{\"prompt\": \"x\"}]", "invalid type: sequence, expected a JSON object"),
        ("\"prompt\": \"x\",", "invalid type: string \"prompt\", expected a JSON object"),
        ("}", "expected value at column 1"),
        ("5", "invalid type: integer `5`, expected a JSON object"),
        ("null", "invalid type: null, expected a JSON object"),
    ] {
        let line = parse(text);
        let error = line.request.unwrap_err();
        assert!(error.starts_with(&format!("not a valid request: {expected}")), "{error}");
        assert!(error.ends_with(jsonl) && !error.contains("column 0"), "{error}");
        assert!(!error.contains("near ;") && !error.contains('\n'), "{error}");
        assert_eq!(line.id, Value::Null);
    }
    for (text, expected) in [
        ("{\"prompt\": \"x\"} {}\n", "trailing characters at column 17"),
        ("{\"prompt\" \"x\"}", "field \"prompt\": expected `:` at column 11, near \"x\""),
        ("{1: 2}", "key must be a string at column 2, near 1"),
        ("{\"a at line b\": NaN}", "field \"a at line b\": expected value at column 17, near NaN"),
    ] {
        let error = parse(text).request.unwrap_err();
        assert_eq!(error, format!("not a valid request: {expected}"));
    }
}

#[test]
fn null_is_not_given() {
    let defaults = changed(|p| {
        p.max_tokens = Some(5);
        p.temperature = 0.5;
        p.seed = Some(3);
        p.stop = vec!["a".to_owned()];
        p.logprobs = Some(NumLogprobs::Top(1));
        p.ignore_eos = true;
    });
    let nulls = |names: &[&str]| -> String {
        names.iter().map(|name| format!(", \"{name}\": null")).collect()
    };
    let nulls = nulls(SAMPLING_FIELDS) + &nulls(NOT_SUPPORTED);
    let line = format!("{{\"prompt\": null, \"prompt_token_ids\": [1]{nulls}}}");
    let request = parse_with(&line, &defaults).request;
    assert_eq!(request, Ok(request_of(vec![1], defaults)));
    assert!(with("prompt_token_ids", "null").is_ok());
    assert!(with("max_token", "null").unwrap_err().starts_with("unknown field \"max_token\""));
}

#[test]
fn every_sampling_field_is_settable() {
    for name in SAMPLING_FIELDS {
        // Panics at a name that nothing sets.
        let _ = set(&mut SamplingParams::default(), name, &json!(1));
    }
}

#[test]
fn ids_are_kept_and_bounded() {
    let late = parse("{\"x\": [1, {\"y\": 2}], \"z\": 1, \"prompt\": 5, \"id\": \"late\"}");
    assert_eq!(late.id, json!("late"));
    assert!(late.request.unwrap_err().starts_with("unknown field \"x\""));
    let twice = parse("{\"prompt\": \"x\", \"prompt\": \"y\", \"id\": 4}");
    assert_eq!(twice.id, json!(4));
    assert_eq!(twice.request.unwrap_err(), "field \"prompt\" is there twice");
    let of = |bytes| parse(&format!("{{\"id\": \"{}\", \"prompt\": \"x\"}}", "i".repeat(bytes)));
    assert!(of(1024).request.is_ok());
    let long = of(1025);
    assert_eq!(long.id, Value::Null);
    assert_eq!(long.request.unwrap_err(), "id must be at most 1024 bytes, got 1025 bytes");
}

#[test]
fn nothing_is_silently_ignored() {
    assert!(with("max_token", "5").unwrap_err().starts_with("unknown field \"max_token\""));
    assert!(with("best_of", "2").unwrap_err().contains("\"best_of\" is not supported"));
    for field in ["tools", "documents"] {
        let error = chat_with(field, "[]").unwrap_err();
        assert_eq!(error, format!("field {field:?} is not supported"));
    }
    for field in CHAT_FIELDS {
        let error = with(field, "true").unwrap_err();
        assert_eq!(error, format!("{field:?} is given without \"messages\""));
    }
    assert!(chat_with("prompt", "\"y\"").unwrap_err().starts_with("both "));
    assert!(with("prompt", "\"y\"").unwrap_err().contains("\"prompt\" is there twice"));
    assert!(with("prompt_token_ids", "[1]").unwrap_err().starts_with("both "));
    let missing = parse("{\"id\": 1}");
    assert_eq!(missing.id, json!(1));
    assert_eq!(
        missing.request.unwrap_err(),
        "none of \"prompt\", \"prompt_token_ids\" and \"messages\" is given"
    );
    let long = format!("{{\"{}\": 1}}", "x".repeat(10_000));
    let error = parse(&long).request.unwrap_err();
    assert!(error.len() < 850, "{error}");
}

#[test]
fn ids_come_back_as_they_are() {
    for (id, kept) in [
        ("\"a\"", Some(json!("a"))),
        ("12", Some(json!(12))),
        ("18446744073709551615", Some(json!(u64::MAX))),
        ("1.5", Some(json!(1.5))),
        ("null", Some(Value::Null)),
        ("123456789012345678901234567890", None),
        ("[1]", None),
        ("true", None),
    ] {
        let line = format!("{{\"id\": {id}, \"prompt\": \"x\"}}");
        let line = parse(&line);
        assert_eq!(line.request.is_ok(), kept.is_some(), "{id}: {:?}", line.request);
        assert_eq!(line.id, kept.unwrap_or(Value::Null), "{id}");
    }
    let bad = parse("{\"seed\": -1, \"id\": \"late\"}");
    assert!(bad.request.is_err());
    assert_eq!(bad.id, json!("late"));
}

#[test]
fn lines_override_the_defaults() {
    let defaults = changed(|p| {
        p.temperature = 0.0;
        p.stop = vec!["a".to_owned()];
    });
    let parse = |text| parse_with(text, &defaults).request.unwrap();
    let request = parse("{\"prompt\": \"x\"}");
    assert_eq!(request, request_of("x", defaults.clone()));
    let request = parse("{\"prompt_token_ids\": [1, 2], \"stop\": [], \"temperature\": 1}");
    assert_eq!(request, request_of(vec![1, 2], SamplingParams::default()));
}

#[test]
fn messages_become_a_conversation() {
    let line = r#"{"id": 1, "messages": [{"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": null, "tool_calls": []}], "top_k": 3,
        "chat_template_kwargs": {"enable_thinking": false}, "add_generation_prompt": null}"#;
    let defaults =
        Defaults { prompt: SamplingParams::default(), chat: changed(|p| p.max_tokens = None) };
    let request = parse_line(line, &defaults).request.unwrap();
    let params = changed(|p| (p.max_tokens, p.top_k) = (None, 3));
    assert_eq!(request.params, params);
    let conversation = conversation_of(request);
    let contents: Vec<_> = conversation.messages.iter().map(|m| m.content.clone()).collect();
    let text = |text: &str| Content::Text(text.to_owned());
    assert_eq!(contents, [text("s"), text("a\nb"), Content::Null]);
    assert_eq!(conversation.template_kwargs["enable_thinking"], json!(false));
    assert!(conversation.add_generation_prompt && !conversation.continue_final_message);
    let own = "{\"messages\": [{\"role\": \"user\"}], \"max_tokens\": 4}";
    assert_eq!(parse_line(own, &defaults).request.unwrap().params.max_tokens, Some(4));
    let prompt = parse_line("{\"prompt\": \"x\", \"messages\": null}", &defaults);
    assert_eq!(prompt.request, Ok(request_of("x", SamplingParams::default())));
}

#[test]
fn a_continued_message_wants_no_new_answer() {
    let flags = |field, value| {
        let conversation = chat_with(field, value).unwrap();
        (conversation.add_generation_prompt, conversation.continue_final_message)
    };
    assert_eq!(flags("continue_final_message", "true"), (false, true));
    assert_eq!(flags("continue_final_message", "false"), (true, false));
    assert_eq!(flags("add_generation_prompt", "false"), (false, false));
    let both = "true, \"add_generation_prompt\": true";
    assert_eq!(flags("continue_final_message", both), (true, true));
}

#[test]
fn the_errors_of_wrong_types() {
    let values = ["\"x\"", "5", "-1.5", "true", "[1.5]", "[null]", "{\"a\": []}"];
    let mut text = String::new();
    let mut record = |field: &str, with: &dyn Fn(&str) -> Option<String>| {
        for value in values {
            let error = with(value).unwrap_or_else(|| "-".to_owned());
            text.push_str(&format!("{field} = {value}: {error}\n"));
        }
    };
    record("id", &|value| with("id", value).err());
    for field in PROMPT_FIELDS {
        let line = |value: &str| format!("{{\"{field}\": {value}}}");
        record(field, &|value| parse(&line(value)).request.err());
    }
    for field in CHAT_FIELDS {
        record(field, &|value| chat_with(field, value).err());
    }
    for field in SAMPLING_FIELDS {
        record(field, &|value| with(field, value).err());
    }
    insta::assert_snapshot!(text);
}
