//! The `quire` binary as users run it, on a tiny model.

#[path = "cli/bench.rs"]
mod bench;
#[path = "cli/chat.rs"]
mod chat;
#[path = "cli/device.rs"]
mod device;
#[path = "cli/info.rs"]
mod info;
#[path = "cli/isa.rs"]
mod isa;
#[path = "cli/quantization.rs"]
mod quantization;
#[path = "cli/resume.rs"]
mod resume;
#[path = "cli/verify.rs"]
mod verify;

use serde_json::Value;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/goldens/llama-gqa");

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quire"));
    command.args(args).stdin(Stdio::null());
    command
}

fn quire(args: &[&str]) -> Output {
    command(args).output().expect("the binary runs")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("UTF-8")
}

/// The one line that a command which cannot run prints.
fn refusal(output: &Output) -> String {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert_eq!(stdout(output), "");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.starts_with("error: "), "{text}");
    text
}

fn json_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
}

fn write(dir: &TempDir, name: &str, content: impl AsRef<[u8]>) -> String {
    let path = dir.path().join(name);
    fs::write(&path, content).unwrap();
    path.to_str().expect("UTF-8").to_owned()
}

/// A copy of the model to break.
fn model_copy() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    fs::create_dir(&model).unwrap();
    for entry in fs::read_dir(MODEL).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), model.join(entry.file_name())).unwrap();
    }
    (dir, model)
}

#[test]
fn prompts_stream_their_text() {
    let flags = ["--max-tokens", "8", "--request-seed", "7", "--ignore-eos"];
    let prompts = ["generate", MODEL, "--prompt", "One", "--prompt", "Two"];
    let json = quire(&[&prompts[..], &flags, &["--json", "--logprobs", "2"]].concat());
    assert_eq!(json.status.code(), Some(0), "{}", stderr(&json));
    let results = json_lines(&stdout(&json));
    assert_eq!(results.len(), 2);
    let texts: Vec<&str> = results.iter().map(|r| r["text"].as_str().unwrap()).collect();
    let shown = quire(&[&prompts[..], &flags].concat());
    assert_eq!(
        stdout(&shown),
        format!("==> prompt 1 <==\n{}\n==> prompt 2 <==\n{}\n", texts[0], texts[1])
    );
    assert!(stderr(&shown).contains("output       16 tokens"), "{}", stderr(&shown));

    // What a search found is shown when it ends.
    let search = ["--prompt", "One", "--use-beam-search", "--n", "2", "--temperature", "0"];
    let search = [&["generate", MODEL, "--max-tokens", "4"][..], &search].concat();
    let found = json_lines(&stdout(&quire(&[&search[..], &["--json"]].concat())));
    let shown = stdout(&quire(&search));
    for (i, output) in found.iter().enumerate() {
        let text = output["text"].as_str().unwrap();
        assert!(shown.contains(&format!("sample {} <==\n{text}", i + 1)), "{shown}");
        assert!(output["beam"]["score"].as_f64().unwrap() < 0.0);
    }
    assert_eq!(found.len(), 2);

    let first = &results[0];
    assert_eq!(first["token_ids"].as_array().unwrap().len(), 8);
    assert_eq!(first["finish_reason"], "length");
    assert_eq!(first["seed"], 7);
    assert_eq!(first["usage"]["total_tokens"], 3 + 8);
    assert_eq!(first["logprobs"].as_array().unwrap().len(), 8);
    assert_eq!(first["logprobs"][0]["token_id"], first["token_ids"][0]);
    assert_eq!(first["logprobs"][0]["top"].as_array().unwrap().len(), 2);
    assert!(first["timings"]["ttft_ms"].as_f64().unwrap() > 0.0);
    assert_eq!(first["timings"]["num_cached_tokens"], 0);
    assert_eq!(first["beam"], Value::Null, "no search was made");
    let summary = &json_lines(&stderr(&json))[0];
    assert_eq!(summary["finished"], 2);
    assert_eq!(summary["output_tokens"], 16);
    assert!(summary["peak_kv_blocks"].as_u64().unwrap() >= 2);
}

#[test]
fn a_prompt_that_is_too_long_fails_alone() {
    let long = "x".repeat(300);
    let output = quire(&["generate", MODEL, "--prompt", &long, "--prompt", "ok"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("error: prompt 1: prompt has 300 tokens"));
    assert!(stdout(&output).starts_with("==> prompt 2 <==\n"));
}

#[test]
fn bad_lines_become_results_and_order_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let mut input = String::new();
    let mut expected = Vec::new();
    for i in 0..40 {
        let (line, error) = match i % 8 {
            3 => ("not json".to_owned(), Some("not a valid request")),
            5 => (format!("{{\"id\": {i}, \"prompt\": \"x\", \"top_p\": 2}}"), Some("top_p must")),
            7 => {
                let line = format!("{{\"id\": {i}, \"prompt\": \"{}\"}}", "y".repeat(400));
                (line, Some("exceed the context of 256"))
            }
            // Later lines end before earlier ones.
            _ => {
                let tokens = 40 - i;
                let line = format!("{{\"id\": {i}, \"prompt\": \"x\", \"max_tokens\": {tokens}}}");
                (line, None)
            }
        };
        input.push_str(&line);
        input.push('\n');
        expected.push((i, error));
    }
    let input = write(&dir, "in.jsonl", input);
    let path = write(&dir, "out.jsonl", "old results");
    let run =
        quire(&["generate", MODEL, "--input", &input, "--output", &path, "--ignore-eos", "--json"]);
    assert_eq!(run.status.code(), Some(1), "{}", stderr(&run));
    assert_eq!(stdout(&run), "");
    let results = json_lines(&fs::read_to_string(&path).unwrap());
    assert_eq!(results.len(), expected.len());
    for (result, (i, error)) in results.iter().zip(expected) {
        match error {
            Some(text) => {
                assert_eq!(result["error"]["line"], i + 1);
                let message = result["error"]["message"].as_str().unwrap();
                assert!(message.contains(text), "{message}");
            }
            None => {
                assert_eq!(result["id"], i);
                assert_eq!(result["usage"]["completion_tokens"], 40 - i);
            }
        }
    }
    let errors = stderr(&run);
    assert!(errors.contains(&format!("error: {input}:4: not a valid request")), "{errors}");
    let summary: Value = serde_json::from_str(errors.lines().last().unwrap()).unwrap();
    assert_eq!((&summary["finished"], &summary["failed"]), (&25.into(), &15.into()));
}

#[test]
fn standard_input_to_standard_output() {
    let mut child = command(&["generate", MODEL, "--input", "-", "--output", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let input = b"\n{\"id\": \"a\", \"prompt_token_ids\": [1, 2, 3], \"max_tokens\": 2}\n\xff\n";
    child.stdin.take().unwrap().write_all(input).unwrap();
    let output = child.wait_with_output().unwrap();
    let results = json_lines(&stdout(&output));
    assert_eq!(results.len(), 2);
    assert_eq!(results[0]["id"], "a");
    assert_eq!(results[1]["error"]["message"], "not UTF-8 at byte 1");
    assert_eq!(results[1]["error"]["line"], 3);
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn results_do_not_depend_on_preemption() {
    let dir = tempfile::tempdir().unwrap();
    let lines = (0..12).map(|i| format!("{{\"id\": {i}, \"prompt\": \"Line {i}\"}}\n"));
    let input = write(&dir, "in.jsonl", lines.collect::<String>());
    let flags = ["--max-tokens", "40", "--ignore-eos", "--json", "--max-model-len", "64"];
    let run = |more: &[&str]| {
        let output = quire(&[&["generate", MODEL, "--input", &input][..], &flags, more].concat());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let summary: Value = serde_json::from_str(stderr(&output).lines().last().unwrap()).unwrap();
        let results = json_lines(&stdout(&output)).into_iter();
        let tokens: Vec<_> = results.map(|r| (r["id"].clone(), r["token_ids"].clone())).collect();
        (tokens, summary["preemptions"].as_u64().unwrap())
    };
    let (roomy, none) = run(&[]);
    let (tight, some) = run(&["--num-blocks-override", "8", "--block-size", "8"]);
    assert_eq!(none, 0);
    assert!(some > 0);
    assert_eq!(roomy, tight);
}

#[test]
fn unusable_files_are_found_before_anything_runs() {
    let dir = tempfile::tempdir().unwrap();
    let input = write(&dir, "in.jsonl", "{\"prompt\": \"x\"}\n");
    let folder = dir.path().to_str().unwrap();
    let no_folder = format!("{folder}/none/out.jsonl");
    let missing = format!("{folder}/missing");
    for (args, text) in [
        (vec!["--input", &input, "--output", &no_folder], no_folder.as_str()),
        (vec!["--input", &input, "--output", folder], folder),
        (vec!["--input", &missing], &missing),
        (vec!["--input", folder], "it is a folder"),
        (vec!["--input", &input, "--output", &input], "would overwrite the input"),
        (vec!["--prompt", "x", "--temperature", "-1"], "temperature must be"),
        (vec!["--prompt", "x", "--max-model-len", "999"], "--max-model-len (max_model_len) is 999"),
        (vec!["--prompt", "x", "--kv-cache-memory", "1"], "(kv_cache_bytes) is 1 byte; it must be"),
        (vec!["--prompt", "x", "--num-blocks-override", "0"], "--num-blocks-override (num_blocks)"),
        (vec!["--prompt", "x", "--threads", "-1"], "a whole number from 1 to"),
        (vec!["--prompt", "x", "--kv-cache-memory", "12Q"], "--kv-cache-memory"),
        (vec!["--prompt", "x", "--max-token", "3"], "--max-tokens"),
        (vec!["--prompt", "x", "--threads", "0"], "threads"),
    ] {
        let error = refusal(&quire(&[&["generate", MODEL][..], &args].concat()));
        assert!(error.contains(text), "{args:?}: {error}");
    }
    assert_eq!(fs::read_to_string(&input).unwrap(), "{\"prompt\": \"x\"}\n");
}

#[test]
fn outputs_overwrite_nothing_that_is_read() {
    let (dir, model) = model_copy();
    let input = write(&dir, "in.jsonl", "{\"prompt\": \"x\"}\n");
    let stdin = fs::File::open(&input).unwrap();
    let model_path = model.to_str().unwrap();
    let run = ["generate", model_path, "--input", "-", "--output", &input];
    let same = command(&run).stdin(stdin).output().unwrap();
    assert!(refusal(&same).contains("would overwrite the input"), "{}", stderr(&same));
    let appended = fs::OpenOptions::new().append(true).open(&input).unwrap();
    let run = ["generate", model_path, "--input", &input];
    let endless = command(&run).stdout(appended).output().unwrap();
    assert!(refusal(&endless).contains("would overwrite the input"), "{}", stderr(&endless));
    let weights = model.join("model.safetensors");
    let linked = dir.path().join("linked");
    fs::hard_link(&weights, &linked).unwrap();
    let before = fs::read(&weights).unwrap();
    for (model, output) in [(&model, &weights), (&model, &linked), (&weights, &weights)] {
        let (model, output) = (model.to_str().unwrap(), output.to_str().unwrap());
        let run = quire(&["generate", model, "--input", &input, "--output", output]);
        assert!(refusal(&run).contains("would overwrite a file of the model"), "{}", stderr(&run));
    }
    assert!(fs::read(&weights).unwrap() == before);
    assert_eq!(fs::read_to_string(&input).unwrap(), "{\"prompt\": \"x\"}\n");
}

#[test]
fn a_line_has_its_seed_whatever_the_others_are() {
    let dir = tempfile::tempdir().unwrap();
    let run = |content: &str, more: &[&str]| {
        let input = write(&dir, "in.jsonl", content);
        let output = quire(&[&["generate", MODEL, "--input", &input][..], more].concat());
        json_lines(&stdout(&output)).last().expect("a result")["seed"].as_u64().unwrap()
    };
    let [good, bad] = ["{\"prompt\": \"x\"}\n", "{\"prompt\": 5}\n"];
    let third = run(&good.repeat(3), &[]);
    assert_eq!(run(&format!("{bad}{good}{good}"), &[]), third);
    assert_eq!(run(&format!("\n\n{good}"), &[]), third);
    assert_ne!(run(good, &[]), third);
    assert_ne!(run(&good.repeat(3), &["--seed", "1"]), third);
    assert_eq!(run(&good.repeat(3), &["--request-seed", "5"]), 5);
    let prompts = ["generate", MODEL, "--json", "--prompt", "a", "--prompt", "b", "--prompt", "c"];
    assert_eq!(json_lines(&stdout(&quire(&prompts)))[2]["seed"], third);
}

#[test]
fn null_leaves_the_flag_in_force() {
    let dir = tempfile::tempdir().unwrap();
    let line = "{\"prompt\": \"x\", \"max_tokens\": null, \"guided_json\": null}\n";
    let input = write(&dir, "in.jsonl", line);
    let output =
        quire(&["generate", MODEL, "--input", &input, "--max-tokens", "3", "--ignore-eos"]);
    assert_eq!(json_lines(&stdout(&output))[0]["usage"]["completion_tokens"], 3);
}

#[test]
fn texts_are_headed_by_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let lines = "{\"prompt\": \"x\", \"id\": \"a\\nb\\u001b[2J\"}\n\n{\"prompt\": \"x\"}\nbad\n";
    let input = write(&dir, "in.jsonl", lines);
    let run = ["generate", MODEL, "--input", &input, "--format", "text", "--max-tokens", "1"];
    let text = stdout(&quire(&run));
    let heads: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("── ")).collect();
    assert_eq!(heads.len(), 3, "{text}");
    assert!(heads[0].starts_with("a\\nb\\u{1b}[2J (1 token, "), "{text}");
    assert!(heads[1].starts_with("line 3 (1 token, "), "{text}");
    assert_eq!(heads[2], "line 4");
}

#[test]
fn messages_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let long = "x".repeat(100_000);
    let input = write(&dir, "in.jsonl", format!("\"{long}\"\n{{\"id\": \"{long}\"}}\n"));
    let output = quire(&["generate", MODEL, "--input", &input]);
    let results = json_lines(&stdout(&output));
    for (result, start) in results.iter().zip(["not a valid request: ", "id must be at most 1024"])
    {
        let message = result["error"]["message"].as_str().unwrap();
        assert!(message.starts_with(start), "{message}");
        assert!(message.chars().count() <= 1001, "{}", message.len());
    }
    assert_eq!(results.len(), 2);
    assert!(stderr(&output).len() < 4000);
    let flag = refusal(&quire(&["generate", MODEL, "--prompt", "x", &format!("--{long}")]));
    assert!(flag.len() < 2000);
}

#[test]
fn nothing_to_run_is_said_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let input = write(&dir, "in.jsonl", "\n");
    let output = quire(&["generate", MODEL, "--input", &input, "--quiet"]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(stderr(&output), "no requests\n");
}

#[test]
fn recommended_parameters_that_cannot_be_name_their_file() {
    let (_dir, model) = model_copy();
    let file = model.join("generation_config.json");
    fs::write(&file, "{\"temperature\": -1}").unwrap();
    let args = ["generate", model.to_str().unwrap(), "--prompt", "x", "--max-tokens", "1"];
    let error = refusal(&quire(&args));
    let expected = format!("error: {}: temperature must be", file.display());
    assert!(error.starts_with(&expected), "{error}");
    let flag = refusal(&quire(&[&args[..], &["--temperature", "-2"]].concat()));
    assert!(flag.starts_with("error: temperature must be"), "{flag}");
    let mended = quire(&[&args[..], &["--temperature", "0"]].concat());
    assert_eq!(mended.status.code(), Some(0), "{}", stderr(&mended));
}

#[test]
fn wrong_paths_say_what_to_give() {
    let (dir, model) = model_copy();
    let refused = |path: &Path| refusal(&quire(&["info", path.to_str().unwrap()]));
    let weights = refused(&model.join("model.safetensors"));
    assert!(
        weights.contains("does not start with GGUF; for safetensors give the folder"),
        "{weights}"
    );
    let gguf = write(&dir, "tiny.gguf", "GGUF");
    assert!(refused(dir.path()).trim_end().ends_with(&gguf), "{}", refused(dir.path()));
    let hub = refused(Path::new("Qwen/Qwen3-0.6B"));
    assert!(hub.contains("downloads nothing yet; give a local folder or .gguf file"), "{hub}");
    let config = fs::read_to_string(model.join("config.json")).unwrap();
    fs::write(model.join("config.json"), config.replace("LlamaForCausalLM", "NewLM")).unwrap();
    let architecture = refused(&model);
    assert!(architecture.contains("`NewLM` is not supported; supported are "), "{architecture}");
    assert!(architecture.contains("LlamaForCausalLM, "), "{architecture}");
}

#[test]
fn a_model_that_cannot_be_loaded_leaves_old_results_alone() {
    let dir = tempfile::tempdir().unwrap();
    let input = write(&dir, "in.jsonl", "{\"prompt\": \"x\"}\n");
    let output = write(&dir, "out.jsonl", "old\n");
    let args = ["--input", &input, "--output", &output];
    let error = refusal(&quire(&[&["generate", "/no/such/model"][..], &args].concat()));
    assert!(error.contains("/no/such/model"), "{error}");
    assert_eq!(error.matches("No such file").count(), 1, "{error}");
    assert_eq!(fs::read_to_string(&output).unwrap(), "old\n");
    let new = dir.path().join("new.jsonl");
    let args = ["--input", &input, "--output", new.to_str().unwrap()];
    refusal(&quire(&[&["generate", "/no/such/model"][..], &args].concat()));
    assert!(!new.exists());
}

/// Breaks the model in a folder.
type Breakage = fn(&Path);

#[test]
fn broken_models_are_refused_by_file() {
    let breakages: [(&str, Breakage); 4] = [
        ("model.safetensors", |model| cut(&model.join("model.safetensors"), 500_000)),
        ("model.safetensors", |model| cut(&model.join("model.safetensors"), 100)),
        ("tokenizer.json", |model| fs::remove_file(model.join("tokenizer.json")).unwrap()),
        ("shard.safetensors", |model| {
            fs::remove_file(model.join("model.safetensors")).unwrap();
            let index = "{\"weight_map\": {\"lm_head.weight\": \"shard.safetensors\"}}";
            fs::write(model.join("model.safetensors.index.json"), index).unwrap();
        }),
    ];
    for (named, breakage) in breakages {
        let (_dir, model) = model_copy();
        breakage(&model);
        let model = model.to_str().unwrap();
        for args in [vec!["generate", model, "--prompt", "x"], vec!["info", model]] {
            let error = refusal(&quire(&args));
            assert!(error.contains(named), "{args:?}: {error}");
        }
    }
}

fn cut(path: &Path, len: u64) {
    fs::OpenOptions::new().write(true).open(path).unwrap().set_len(len).unwrap();
}

#[cfg(unix)]
#[test]
fn ctrl_c_shows_what_ended_behind_the_prompt_it_cut_off() {
    use std::io::Read;
    let flags = ["--temperature", "0", "--ignore-eos", "--max-tokens", "240"];
    let run = ["generate", MODEL, "--backend", "reference", "--prompt", "One", "--prompt", "Two"];
    let alone = quire(&[&run[..], &flags, &["--json"]].concat());
    let ids: Vec<Vec<u64>> = json_lines(&stdout(&alone))
        .iter()
        .map(|r| r["token_ids"].as_array().unwrap().iter().filter_map(Value::as_u64).collect())
        .collect();
    // Ends the second prompt early and no other; the many others make steps slow.
    let stop = ids[1][1..8].iter().find(|id| !ids[0].contains(id)).expect("an id").to_string();
    let others = ["--prompt", "One"].repeat(60);
    let run = [&run[..], &others, &flags, &["--stop-token-ids", &stop]].concat();
    let mut child = command(&run).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut shown = child.stdout.take().unwrap();
    let heading = "==> prompt 1 <==\n";
    // Some text of the first prompt: more steps than the second one takes.
    let mut start = vec![0; heading.len() + 16];
    shown.read_exact(&mut start).unwrap();
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    shown.read_to_end(&mut start).unwrap();
    let text = String::from_utf8(start).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert!(text.starts_with(heading), "{text}");
    let second = text.split_once("\n==> prompt 2 <==\n").expect("the second prompt").1;
    let second = second.split_once("\n==> prompt 3 <==\n").expect("the third prompt").0;
    assert!(!second.is_empty());
    assert!(
        stderr(&output).contains("; 1 request finished, 0 failed, 61 cut off"),
        "{}",
        stderr(&output)
    );
}

#[cfg(unix)]
#[test]
fn ctrl_c_keeps_what_is_finished_in_order() {
    use std::io::{BufRead, BufReader, Read};
    let dir = tempfile::tempdir().unwrap();
    // "a" and "b" end in the first step; what is between and after runs for many more.
    let long = "{\"id\": \"long\", \"prompt\": \"x\", \"max_tokens\": 250}\n";
    let short = |id| format!("{{\"id\": \"{id}\", \"prompt\": \"x\", \"max_tokens\": 1}}\n");
    let lines = [short("a"), long.to_owned(), short("b"), long.repeat(300)].concat();
    let input = write(&dir, "in.jsonl", lines);
    let args = ["generate", MODEL, "--input", &input, "--ignore-eos", "--max-num-seqs", "4"];
    let mut child = command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut results = BufReader::new(child.stdout.take().unwrap());
    let mut text = String::new();
    results.read_line(&mut text).unwrap();
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    results.read_to_string(&mut text).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert!(stderr(&output).contains("error: interrupted; "), "{}", stderr(&output));
    let ids: Vec<Value> = json_lines(&text).into_iter().map(|r| r["id"].clone()).collect();
    assert_eq!(ids[0], "a");
    assert!(ids.contains(&"b".into()), "{ids:?}");
    assert!(ids.len() < 303, "the run was not cut off");
}

#[cfg(unix)]
#[test]
fn a_reader_that_leaves_is_no_error() {
    let mut child =
        command(&["info", MODEL]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(stderr(&output), "");
    assert_eq!(output.status.code(), Some(0));
}
