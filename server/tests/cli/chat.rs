//! Conversations: `chat`, and lines with messages.

use super::*;

/// Each message on a line, with the first letter of its role.
const TEMPLATE: &str = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}\
                        {% if add_generation_prompt %}a:{% endif %}{{ suffix }}";

/// Runs `chat` with `input` on standard input.
fn chat(dir: &TempDir, input: &str, more: &[&str]) -> Output {
    let template = write(dir, "chat.jinja", TEMPLATE);
    let flags = ["chat", MODEL, "--chat-template", &template, "--ignore-eos", "--temperature", "0"];
    let mut child = command(&[&flags[..], more].concat())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that cannot run does not read.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

fn prompt_tokens(result: &Value) -> u64 {
    result["usage"]["prompt_tokens"].as_u64().expect("a number")
}

#[test]
fn answers_depend_on_what_was_said_before() {
    let dir = tempfile::tempdir().unwrap();
    let flags = ["--max-tokens", "8", "--json"];
    let both = chat(&dir, "One\n\n/clear\r\n", &flags);
    assert_eq!(both.status.code(), Some(0), "{}", stderr(&both));
    let results = json_lines(&stdout(&both));
    assert_eq!(results.len(), 2);
    // Piped lines are messages as they are.
    let alone = chat(&dir, "/clear\n", &flags);
    let alone = &json_lines(&stdout(&alone))[0];
    assert!(prompt_tokens(&results[1]) > prompt_tokens(alone) + 8, "{results:?}");
    assert_ne!(results[1]["token_ids"], alone["token_ids"]);
    // The second prompt is the first with its answer and the new message.
    let answer = results[0]["text"].as_str().unwrap();
    let messages = serde_json::json!([
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "/clear"},
    ]);
    let line = serde_json::json!({"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": true});
    let input = write(&dir, "in.jsonl", format!("{line}\n"));
    let template = write(&dir, "chat.jinja", TEMPLATE);
    let same = quire(&["generate", MODEL, "--input", &input, "--chat-template", &template]);
    assert_eq!(json_lines(&stdout(&same))[0]["token_ids"], results[1]["token_ids"]);

    let shown = chat(&dir, "One\n/clear\n", &flags[..2]);
    let texts = results.iter().map(|result| format!("{}\n", result["text"].as_str().unwrap()));
    assert_eq!(stdout(&shown), texts.collect::<String>());
    let system = chat(&dir, "One\n", &[&flags[..], &["--system", "Be brief."]].concat());
    let longer = prompt_tokens(&json_lines(&stdout(&system))[0]);
    assert!(longer > prompt_tokens(&results[0]), "{longer}");
}

#[test]
fn a_full_context_loses_its_oldest_messages() {
    let dir = tempfile::tempdir().unwrap();
    let message = "x".repeat(50) + "\n";
    let long = "y".repeat(300) + "\n";
    let input = message.repeat(4) + &long + &message;
    let output = chat(&dir, &input, &["--json", "--max-tokens", "20", "--max-model-len", "200"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let results = json_lines(&stdout(&output));
    assert_eq!(results.len(), 6);
    let fits = |result: &&Value| prompt_tokens(result) <= 180;
    assert_eq!(results[..4].iter().filter(fits).count(), 4, "{results:?}");
    // A message that does not fit by itself is taken back.
    assert_eq!(results[4]["error"]["line"], 5);
    assert!(fits(&&results[5]), "{results:?}");
    assert!(prompt_tokens(&results[5]) > 100, "{results:?}");
    let notes = stderr(&output);
    assert!(notes.contains("note: the context of 200 tokens is full; "), "{notes}");
    assert!(notes.contains("error: message 5: prompt has "), "{notes}");
}

#[test]
fn chat_needs_a_template_that_compiles() {
    let dir = tempfile::tempdir().unwrap();
    let none = refusal(&quire(&["chat", MODEL]));
    assert!(none.contains("no chat template; give one with --chat-template"), "{none}");
    let bad = write(&dir, "bad.jinja", "{% if %}");
    let error = refusal(&quire(&["chat", MODEL, "--chat-template", &bad]));
    assert!(error.contains("bad.jinja: the chat template does not compile: "), "{error}");
    let missing = refusal(&quire(&["chat", MODEL, "--chat-template", "/none/x.jinja"]));
    assert!(missing.contains("cannot read /none/x.jinja"), "{missing}");
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_a_conversation_that_is_piped() {
    use std::io::Read;
    let dir = tempfile::tempdir().unwrap();
    let template = write(&dir, "chat.jinja", TEMPLATE);
    let mut child = command(&[
        "chat",
        MODEL,
        "--chat-template",
        &template,
        "--backend",
        "reference",
        "--ignore-eos",
    ])
    .stdin(Stdio::piped())
    .stdout(Stdio::piped())
    .stderr(Stdio::piped())
    .spawn()
    .unwrap();
    child.stdin.take().unwrap().write_all(&b"One\n".repeat(1000)).unwrap();
    let mut shown = child.stdout.take().unwrap();
    shown.read_exact(&mut [0; 8]).unwrap();
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    std::io::copy(&mut shown, &mut std::io::sink()).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn lines_with_messages_are_answered() {
    let dir = tempfile::tempdir().unwrap();
    let user = "{\"role\": \"user\", \"content\": \"One\"}";
    let partial =
        "{\"role\": \"assistant\", \"content\": [{\"type\": \"text\", \"text\": \"Tw\"}]}";
    let lines = [
        format!("{{\"messages\": [{user}]}}"),
        "{\"prompt\": \"u:One\\na:\"}".to_owned(),
        format!("{{\"messages\": [{user}], \"add_generation_prompt\": false, \"max_tokens\": 3}}"),
        format!(
            "{{\"messages\": [{user}, {partial}], \"continue_final_message\": true, \"max_tokens\": 3}}"
        ),
        "{\"prompt\": \"u:One\\na:Tw\"}".to_owned(),
        format!(
            "{{\"messages\": [{user}], \"chat_template_kwargs\": {{\"suffix\": \"!!\"}}, \"max_tokens\": 3}}"
        ),
        format!("{{\"messages\": [{user}], \"n\": 2, \"temperature\": 1, \"max_tokens\": 3}}"),
        "{\"messages\": []}".to_owned(),
        format!("{{\"messages\": [{user}, {{\"content\": \"x\"}}]}}"),
        "{\"messages\": [{\"role\": \"user\", \"content\": 5}]}".to_owned(),
        "{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"image_url\"}]}]}"
            .to_owned(),
        format!("{{\"messages\": [{user}], \"tools\": [{{}}]}}"),
        format!(
            "{{\"messages\": [{user}, {partial}], \"continue_final_message\": true, \"add_generation_prompt\": true}}"
        ),
    ];
    let input = write(&dir, "in.jsonl", lines.join("\n"));
    let template = write(&dir, "chat.jinja", TEMPLATE);
    let (_dir, model) = model_copy();
    let run = |more: &[&str]| {
        let model = model.to_str().unwrap();
        let flags = ["generate", model, "--input", &input, "--temperature", "0", "--ignore-eos"];
        let output = quire(&[&flags[..], more].concat());
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        json_lines(&stdout(&output))
    };
    let results = run(&["--chat-template", &template]);
    assert_eq!(results.len(), lines.len() + 1);
    let completion = |result: &Value| result["usage"]["completion_tokens"].as_u64().unwrap();
    // The rest of the context, and the default of prompts.
    assert_eq!(results[0]["usage"]["total_tokens"], 256);
    assert_eq!(completion(&results[1]), 16);
    assert_eq!(prompt_tokens(&results[0]), prompt_tokens(&results[1]));
    let ids =
        |i: usize, count: usize| results[i]["token_ids"].as_array().unwrap()[..count].to_vec();
    assert_eq!(ids(0, 16), ids(1, 16));
    assert_eq!(prompt_tokens(&results[2]) + 2, prompt_tokens(&results[0]));
    assert_eq!(ids(3, 3), ids(4, 3));
    assert_eq!(prompt_tokens(&results[5]), prompt_tokens(&results[0]) + 2);
    assert_eq!((&results[6]["index"], &results[7]["index"]), (&0.into(), &1.into()));
    for (result, text) in results[8..].iter().zip([
        "messages must not be empty",
        "messages[1].role is missing",
        "messages[0].content is a number",
        "this model reads text only",
        "field \"tools\" is not supported",
        "add_generation_prompt and continue_final_message exclude each other",
    ]) {
        let message = result["error"]["message"].as_str().unwrap();
        assert!(message.contains(text), "{message}");
    }
    assert!(run(&[])[0]["error"]["message"].as_str().unwrap().contains("--chat-template"));

    // The flag, else what the model recommends, as far as the context goes.
    let flag = run(&["--chat-template", &template, "--max-tokens", "5"]);
    assert_eq!((completion(&flag[0]), completion(&flag[1])), (5, 5));
    for (recommended, expected) in [(9, 9), (4096, 256 - prompt_tokens(&results[0]))] {
        let config = format!("{{\"max_new_tokens\": {recommended}, \"repetition_penalty\": 1.5}}");
        fs::write(model.join("generation_config.json"), config).unwrap();
        let results = run(&["--chat-template", &template]);
        assert_eq!((completion(&results[0]), completion(&results[1])), (expected, 16));
        let penalised = run(&["--chat-template", &template, "--repetition-penalty", "1.5"]);
        assert_eq!(results[0]["token_ids"], penalised[0]["token_ids"]);
        assert_ne!(results[1]["token_ids"], Value::from(ids(1, 16)));
    }
}

#[test]
fn results_do_not_overwrite_the_chat_template() {
    let dir = tempfile::tempdir().unwrap();
    let template = write(&dir, "t.jinja", "{{ messages[0].content }}");
    let input =
        write(&dir, "in.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n");
    let flags = ["--chat-template", &template, "--output", &template];
    let output = quire(&[&["generate", MODEL, "--input", &input][..], &flags].concat());
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("would overwrite the chat template"), "{}", stderr(&output));
    assert!(fs::read_to_string(&template).unwrap().starts_with("{{"));
}
