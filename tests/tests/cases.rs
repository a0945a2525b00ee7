//! Public failures of engines like this one, and hostile inputs, each under its number in the table
//! of `README.md`. Those that concern one module alone are tested beside it.

use quire_engine::backend::CpuBackend;
use quire_engine::engine::{RequestError, TextConfig};
use quire_engine::ops::Backend;
use quire_engine::sampling::{MAX_N, NumLogprobs};
use quire_engine::scheduler::AdmissionError;
use quire_engine::text::chat::{
    ChatError, ChatMessage, ChatTemplateOptions, FoundTemplate, RenderOptions,
};
use quire_engine::{DType, Engine, FinishReason, Request, RequestOutput, SamplingParams};
use quire_kernels_cpu::usable_cores;
use quire_tests::fixtures::{EOS, MODEL_VOCAB, Setup, TOKENIZER_VOCAB, TinyModel};
use quire_tests::oracle::{Fingerprint, drain, greedy, run_all, run_alone};
use quire_tests::strategies::mixed_requests;
use serde_json::json;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant, UNIX_EPOCH};

const BOS: u32 = EOS - 1;

/// Far more than a refusal takes, on a busy machine; far less than what is refused would.
const SOON: Duration = Duration::from_secs(5);

fn setup() -> Setup {
    Setup::cpu(DType::F32)
}

fn drawn(seed: u64) -> SamplingParams {
    SamplingParams { temperature: 1.0, seed: Some(seed), ..greedy(12) }
}

fn fingerprints(outputs: &[RequestOutput]) -> Vec<Fingerprint> {
    outputs.iter().map(Fingerprint::from).collect()
}

/// Asserts that each of `bad` is refused at once with its text, among mates that do not change and
/// whose engine gives every block back.
fn assert_refused(bad: Vec<(SamplingParams, &str)>) {
    let model = TinyModel::new(1);
    let mates = mixed_requests(3, 9);
    let alone: Vec<RequestOutput> = mates.iter().map(|r| run_alone(&model, &setup(), r)).collect();
    let mut engine = model.engine(&setup());
    for mate in &mates {
        engine.add_request(mate.clone()).unwrap();
    }
    let mut outputs = engine.step().unwrap().finished;
    for (params, text) in bad {
        let start = Instant::now();
        let held = engine.num_held_blocks();
        let error = engine.add_request(Request::new("bad", params)).unwrap_err();
        assert!(error.to_string().contains(text), "{error} instead of {text}");
        assert!(error.to_string().len() < 300, "{} bytes of error", error.to_string().len());
        assert!(start.elapsed() < SOON, "{:?} for {text}", start.elapsed());
        assert_eq!((engine.num_unfinished(), engine.num_held_blocks()), (3 - outputs.len(), held));
    }
    outputs.extend(drain(&mut engine));
    outputs.sort_by_key(|o| o.request_id);
    assert_eq!(fingerprints(&outputs), fingerprints(&alone));
}

// ---- Sampling ------------------------------------------------------------------------------

#[test]
fn a22_top_k_may_exceed_the_vocabulary_and_be_off_in_some_rows() {
    let model = TinyModel::new(1);
    let request = |top_k| {
        let params = SamplingParams { top_k, temperature: 3.0, ..drawn(4) };
        Request { capture_logits: true, ..Request::new("top k", params) }
    };
    let outputs = run_all(&mut model.engine(&setup()), &[0, 5, 9_999_999, 258].map(request));
    assert_eq!(outputs[2].token_ids, outputs[0].token_ids, "more than there are is all");
    assert_eq!(outputs[3].token_ids, outputs[0].token_ids, "all is all");
    // The row with a cut is cut, the others beside it are not.
    let rank = |output: &RequestOutput, i: usize| {
        let row = &output.logits[output.prompt_token_ids.len() - 1 + i][..TOKENIZER_VOCAB];
        let sampled = row[output.token_ids[i] as usize];
        row.iter().filter(|&&x| x > sampled).count()
    };
    assert!((0..12).all(|i| rank(&outputs[1], i) < 5));
    assert!((0..12).any(|i| rank(&outputs[0], i) >= 5), "nothing there to cut");
    // top_p 0 says greedy, and only there.
    let zero = SamplingParams { top_p: 0.0, ..greedy(12) };
    let greedy_output = run_alone(&model, &setup(), &Request::new("top p", greedy(12)));
    let output = run_alone(&model, &setup(), &Request::new("top p", zero));
    assert_eq!(output.token_ids, greedy_output.token_ids);
    assert_refused(vec![(SamplingParams { top_p: 0.0, ..drawn(1) }, "top_p must be in (0, 1]")]);
}

#[test]
fn a24_a_bias_outside_the_vocabulary_is_refused_by_id() {
    let bias = |id| SamplingParams { logit_bias: vec![(3, 1.0), (id, 1.0)], ..greedy(2) };
    let rule = "logit_bias must be below the vocabulary size 258, got";
    // The output matrix has rows for the first two; the tokenizer has no tokens for them.
    let ids = [TOKENIZER_VOCAB as u32, MODEL_VOCAB as u32 - 1, MODEL_VOCAB as u32, u32::MAX];
    let texts = ids.map(|id| format!("{rule} {id}"));
    assert_refused(ids.iter().zip(&texts).map(|(&id, text)| (bias(id), text.as_str())).collect());
}

// ---- Logprobs ------------------------------------------------------------------------------

/// JSON writes −∞ as null; here it stays a number that is no NaN, and nothing else turns into one.
#[test]
fn a29_a_probability_of_zero_is_minus_infinity_and_harms_nothing() {
    let model = TinyModel::new(1);
    let top = Some(NumLogprobs::Top(1));
    let params = SamplingParams { top_k: 1, prompt_logprobs: top, logprobs: top, ..drawn(1) };
    // An id of the padding has no probability, but may be given.
    let prompt = vec![5, MODEL_VOCAB as u32 - 1, 6];
    let output = run_alone(&model, &setup(), &Request::new(prompt, params));
    let given = output.prompt_logprobs.as_ref().expect("asked for");
    assert_eq!(given[0].sampled.logprob, f32::NEG_INFINITY);
    let others = given[0].top.iter().chain([&given[1].sampled]).chain(&given[1].top);
    let sampled = output.logprobs.iter().flatten().map(|at| &at.sampled);
    assert!(others.chain(sampled).all(|l| l.logprob.is_finite() && l.logprob <= 0.0));
    assert_eq!(output.finish_reason, FinishReason::Length);
}

#[test]
fn a31_the_sampled_token_is_always_there_and_lengths_agree() {
    let model = TinyModel::new(1);
    let params =
        SamplingParams { logprobs: Some(NumLogprobs::Top(1)), temperature: 2.0, ..drawn(3) };
    let request = Request { stream: true, ..Request::new("sampled, not argmax", params) };
    let mut engine = model.engine(&setup());
    engine.add_request(request).unwrap();
    let (mut deltas, mut outputs) = (Vec::new(), Vec::new());
    while engine.num_unfinished() > 0 {
        let step = engine.step().unwrap();
        deltas.extend(step.deltas);
        outputs.extend(step.finished);
    }
    let logprobs = outputs[0].logprobs.as_ref().expect("asked for");
    assert_eq!(logprobs.len(), outputs[0].token_ids.len());
    assert!(logprobs.iter().map(|at| at.sampled.token).eq(outputs[0].token_ids.iter().copied()));
    assert!(logprobs.iter().all(|at| at.top.len() == 1));
    assert!(logprobs.iter().any(|at| at.top[0].token != at.sampled.token), "always the argmax");
    assert!(deltas.iter().map(|d| d.logprobs.as_ref()).eq(logprobs.iter().map(Some)));
}

// ---- Templates -----------------------------------------------------------------------------

/// An engine with this chat template, and a tokenizer that has `<bos>`.
fn chat_engine(template: &str, prepend_bos: Option<u32>) -> Engine {
    let model = TinyModel::new(1);
    let options = ChatTemplateOptions {
        special_tokens: [("bos_token".into(), "<bos>".into())].into(),
        ..Default::default()
    };
    let found = FoundTemplate { default: template.into(), tool_use: None, options };
    let text = TextConfig { prepend_bos, chat_template: Some(found), ..model.text() };
    model.engine_with(&setup(), text, |executor| executor)
}

/// What the template makes of messages in JSON, with its control tokens.
fn chat(template: &str, messages: &serde_json::Value) -> Result<String, RequestError> {
    let engine = chat_engine(template, None);
    let messages = ChatMessage::list_from_json(messages)?;
    let now = UNIX_EPOCH + Duration::from_secs(1_721_984_703);
    let ids = engine.encode_chat(&messages, &RenderOptions { now, ..Default::default() })?;
    Ok(engine.text().tokenizer.decode(&ids, false)?)
}

#[test]
fn a41_there_is_exactly_one_bos() {
    let says_hi = [ChatMessage::new("user", "hi")];
    let body = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let written = format!("{{{{ bos_token }}}}{body}");
    for (template, prepend_bos, expected) in [
        (&*written, None, 1),
        (&*written, Some(BOS), 1),
        (body, Some(BOS), 1),
        (body, None, 0),
        (&format!("{{{{ bos_token }}}}{written}"), Some(BOS), 1),
    ] {
        let engine = chat_engine(template, prepend_bos);
        let ids = engine.encode_chat(&says_hi, &RenderOptions::default()).unwrap();
        let count = ids.iter().filter(|&&id| id == BOS).count();
        assert_eq!(count, expected, "{template} with {prepend_bos:?}: {ids:?}");
        assert!(expected == 0 || ids[0] == BOS);
    }
    // A text prompt that brings its own.
    let engine = chat_engine(body, Some(BOS));
    assert_eq!(engine.encode("<bos>hi").unwrap(), engine.encode("hi").unwrap());
}

#[test]
fn a42_the_globals_of_hugging_face_are_there() {
    let hi = json!([{"role": "user", "content": "hi"}]);
    for (template, expected) in [
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
        ("{% for x in range(9) %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "01"),
        ("{{ {'a': 'é<'}|tojson }}", "{\"a\": \"é<\"}"),
        ("{% set n = namespace(x=1) %}{% set n.x = n.x + 1 %}{{ n.x }}", "2"),
        ("{{ 'yes' if tools is none and add_generation_prompt }}", "yes"),
    ] {
        assert_eq!(chat(template, &hi).unwrap(), expected, "{template}");
    }
}

/// The first lines of Gemma 2's template, in words of our own.
#[test]
fn a44_a_template_that_refuses_says_why_and_harms_nobody() {
    let template = "{% if messages[0].role == 'system' %}\
                    {{ raise_exception('System role not supported') }}{% endif %}ok";
    let system = json!([{"role": "system", "content": "be kind"}]);
    let error = chat(template, &system).unwrap_err();
    assert!(matches!(&error, RequestError::Chat(ChatError::Raised(_))), "{error:?}");
    assert_eq!(error.to_string(), "System role not supported");
    assert_eq!(chat(template, &json!([{"role": "user", "content": "hi"}])).unwrap(), "ok");
}

#[test]
fn a47_content_parts_are_read_as_their_text() {
    let template = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}";
    let parts = json!([{"type": "text", "text": "42"}]);
    let messages = json!([{"role": "user", "content": "hi"}, {"role": "tool", "content": parts}]);
    assert_eq!(chat(template, &messages).unwrap(), "user=hi;tool=42;");
}

#[test]
fn a48_tool_calls_need_no_content() {
    let template = "{% for m in messages %}{% if m.content %}{{ m.content }}{% endif %}\
                    {% for c in m.tool_calls or [] %}{{ c.function.name }}\
                    ({{ c.function.arguments.x }}){% endfor %}{% endfor %}";
    let calls = json!([{"id": "1", "type": "function",
        "function": {"name": "f", "arguments": "{\"x\": 3}"}}]);
    for content in [Some(json!(null)), Some(json!("")), None] {
        let mut message = json!({"role": "assistant", "tool_calls": calls});
        if let Some(content) = content {
            message["content"] = content;
        }
        let messages = json!([{"role": "user", "content": "hi"}, message]);
        assert_eq!(chat(template, &messages).unwrap(), "hif(3)");
    }
}

// ---- CPU -----------------------------------------------------------------------------------

/// Set in the child of the test below, which runs on one core.
const ONE_CORE: &str = "QUIRE_TEST_ONE_CORE";

#[test]
fn a69_threads_follow_affinity_and_quota() {
    let cores = usable_cores();
    let backend = CpuBackend::new(DType::F32, None, None).unwrap();
    assert_eq!(backend.info().threads, cores, "the default is what may be used");
    if std::env::var_os(ONE_CORE).is_some() {
        assert_eq!(cores, 1, "bound to one core");
        return;
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let Some(allowed) = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")) else {
        return; // This system does not say; then nothing can be compared.
    };
    let affinity = cores_of_list(allowed.trim());
    assert_eq!(cores, cpu_quota().map_or(affinity.len(), |quota| affinity.len().min(quota)));
    let this_test = std::env::current_exe().unwrap();
    let child = Command::new("taskset")
        .args(["-c", &affinity[0].to_string()])
        .arg(this_test)
        .args(["--exact", "a69_threads_follow_affinity_and_quota"])
        .env(ONE_CORE, "1")
        .output();
    // Without taskset there is only the comparison above.
    if let Ok(child) = child {
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && said.contains("1 passed"), "{said}");
    }
}

/// `0-3,8` → 0, 1, 2, 3, 8.
fn cores_of_list(list: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| text.parse::<usize>().expect("a core's number");
        number(first)..=number(last)
    };
    list.split(',').flat_map(range).collect()
}

/// Whole cores that the control group's quota amounts to, at least 1; none without one.
fn cpu_quota() -> Option<usize> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let groups = read("/proc/self/cgroup").unwrap_or_default();
    let own = groups.lines().find_map(|l| l.strip_prefix("0::")).unwrap_or("/");
    let folders = std::path::Path::new(own).ancestors().map(|p| p.display().to_string());
    let v2 = folders.filter_map(|folder| {
        let max = read(&format!("/sys/fs/cgroup{}/cpu.max", folder.trim_end_matches('/')))?;
        let (quota, period) = max.trim().split_once(' ')?;
        Some(quota.parse::<usize>().ok()? / period.parse::<usize>().ok()?)
    });
    let v1 = || {
        let number = |name: &str| read(&format!("/sys/fs/cgroup/cpu/{name}"))?.trim().parse().ok();
        let (quota, period): (usize, usize) =
            (number("cpu.cfs_quota_us")?, number("cpu.cfs_period_us")?);
        Some(quota / period)
    };
    v2.min().or_else(v1).map(|cores| cores.max(1))
}

// ---- Hostile inputs ------------------------------------------------------------------------

#[test]
fn x12_a_template_without_end_is_stopped_and_the_engine_goes_on() {
    let mut doubling = String::from("{% set n = namespace(x='ab') %}");
    doubling += "{% for i in range(10000) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}";
    let endless = "{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}";
    let model = TinyModel::new(1);
    let mate = Request::new("a mate", drawn(5));
    let alone = run_alone(&model, &setup(), &mate);
    for template in [endless, &doubling] {
        let mut engine = chat_engine(template, None);
        engine.add_request(mate.clone()).unwrap();
        engine.step().unwrap();
        let start = Instant::now();
        let messages = [ChatMessage::new("user", "hi")];
        let error = engine.encode_chat(&messages, &RenderOptions::default()).unwrap_err();
        assert!(matches!(error, RequestError::Chat(ChatError::TooMuchWork { .. })), "{error}");
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
        assert_eq!(Fingerprint::from(&drain(&mut engine)[0]), Fingerprint::from(&alone));
    }
}

/// A template comes with the model. A request has arguments for it, and among them one of this name
/// is a variable like others; those that the template always has cannot be replaced.
#[test]
fn x13_a_request_cannot_bring_a_template() {
    let engine = chat_engine("{{ messages[0].content }}{{ chat_template }}", None);
    let messages = [ChatMessage::new("user", "hi")];
    let encode = |name: &str, value: &str| {
        let template_kwargs = [(name.to_owned(), json!(value))].into_iter().collect();
        let options = RenderOptions { template_kwargs, ..Default::default() };
        let ids = engine.encode_chat(&messages, &options)?;
        Ok::<_, RequestError>(engine.text().tokenizer.decode(&ids, false)?)
    };
    let hostile = "{% for x in range(10000) %}{{ bos_token }}{% endfor %}";
    assert_eq!(encode("chat_template", hostile).unwrap(), format!("hi{hostile}"));
    for name in ["messages", "bos_token", "add_generation_prompt", "tools"] {
        let error = encode(name, hostile).unwrap_err().to_string();
        assert_eq!(error, format!("chat_template_kwargs must not set {name:?}"));
    }
}

#[test]
fn x16_n_is_bounded_before_anything_is_made() {
    let n = |n| SamplingParams { n, ..drawn(1) };
    assert_refused(vec![
        (n(1_000_000_000), "n must be from 1 to 1024, got 1000000000"),
        (n(usize::MAX), "n must be from 1 to 1024"),
        (n(MAX_N + 1), "got 1025"),
        (n(0), "got 0"),
    ]);
}

#[test]
fn x18_max_tokens_beyond_the_context_is_refused_with_true_numbers() {
    let max_tokens = |max_tokens| SamplingParams { max_tokens: Some(max_tokens), ..greedy(1) };
    assert_refused(vec![
        (max_tokens(0), "max_tokens must be at least 1, got 0"),
        (max_tokens(1 << 31), "prompt has 3 tokens and max_tokens is 2147483648"),
        (max_tokens(1 << 63), "max_tokens is 9223372036854775808"),
        (max_tokens(usize::MAX), "exceed the context of 512 tokens"),
    ]);
}

#[test]
fn x20_logprobs_are_bounded_by_number_and_prompt() {
    let logprobs = |n| SamplingParams { logprobs: Some(n), ..greedy(1) };
    let prompt_logprobs = |n| SamplingParams { prompt_logprobs: Some(n), ..greedy(1) };
    assert_refused(vec![
        (logprobs(NumLogprobs::Top(1_000_000)), "logprobs must be at most 20, got 1000000"),
        (logprobs(NumLogprobs::All), "logprobs must be at most 20, got -1"),
        (prompt_logprobs(NumLogprobs::Top(21)), "prompt_logprobs must be at most 20, got 21"),
        (prompt_logprobs(NumLogprobs::All), "prompt_logprobs must be at most 20"),
    ]);
    // A prompt has as many as the context allows, and no more are ever kept.
    let model = TinyModel::new(1);
    let mut engine = model.engine(&setup());
    let request = |len| Request::new(vec![1; len], prompt_logprobs(NumLogprobs::Top(20)));
    let error = engine.add_request(request(100_000)).unwrap_err();
    let too_long = AdmissionError::TooLong { prompt: 100_000, max_tokens: 1, limit: 512 };
    assert!(matches!(error, RequestError::Admission(e) if e == too_long));
    let output = run_all(&mut engine, &[request(511)]).remove(0);
    let prompt = output.prompt_logprobs.expect("asked for");
    assert_eq!(prompt.len(), 510);
    assert!(prompt.iter().all(|at| at.top.len() == 20));
}

#[test]
fn x21_stop_strings_are_bounded_and_none_is_empty() {
    let stop = |stop: Vec<String>| SamplingParams { stop, ..greedy(1) };
    assert_refused(vec![
        (stop((0..100_000).map(|i| i.to_string()).collect()), "stop must be at most 32 strings"),
        (stop(vec!["x".repeat(1 << 20)]), "stop must be at most 65536 bytes together"),
        (stop(vec![String::new()]), "stop must be without empty strings"),
        (stop(vec!["a".into(), String::new()]), "stop must be without empty strings"),
    ]);
}

#[test]
fn x22_biases_are_bounded_in_number_and_size() {
    let bias = |logit_bias| SamplingParams { logit_bias, ..greedy(8) };
    let many = vec![(1, 0.5); 1_000_000];
    assert_refused(vec![
        (bias(many), "logit_bias must be at most 258 ids"),
        (bias(vec![(7, f32::NAN)]), "logit_bias must be a number for token 7"),
    ]);
    let model = TinyModel::new(1);
    let run = |x| run_alone(&model, &setup(), &Request::new("big", bias(vec![(70, x)])));
    for (huge, most) in [(1e9, 100.0), (f32::INFINITY, 100.0), (-1e9, -100.0)] {
        assert_eq!(Fingerprint::from(&run(huge)), Fingerprint::from(&run(most)));
    }
    assert_eq!(run(1e9).token_ids, [70; 8]);
    assert!(!run(f32::NEG_INFINITY).token_ids.contains(&70));
}

#[test]
fn x24_a_temperature_that_is_no_number_is_refused() {
    let temperature = |temperature| SamplingParams { temperature, ..drawn(1) };
    let rule = "temperature must be finite and at least 0, got";
    // 1e999 is read as infinity.
    assert_refused(
        [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0, -f32::MIN_POSITIVE]
            .map(|t| (temperature(t), rule))
            .into(),
    );
    // The largest there is draws from all tokens alike.
    let model = TinyModel::new(1);
    let params = SamplingParams { temperature: f32::MAX, max_tokens: Some(64), ..drawn(1) };
    let output = run_alone(&model, &setup(), &Request::new("hot", params));
    assert_eq!(output.finish_reason, FinishReason::Length);
    assert!(output.token_ids.iter().collect::<BTreeSet<_>>().len() > 40);
}

/// Tests whose names start with a letter of the table's and a number, in `folder` of the repository
/// and below: file and name.
fn numbered_tests(folder: &str) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(root.join(folder)).unwrap().flatten() {
        let path = format!("{folder}/{}", entry.file_name().to_string_lossy());
        if entry.path().is_dir() {
            found.extend(numbered_tests(&path));
        } else if path.ends_with(".rs") {
            let source = std::fs::read_to_string(entry.path()).unwrap();
            let names = source.lines().filter_map(|line| {
                let name = line.trim().strip_prefix("fn ")?.strip_suffix("() {")?;
                let number = name.strip_prefix(['a', 'x'])?.split_once('_')?.0;
                number.parse::<u32>().ok().map(|_| name.to_owned())
            });
            found.extend(names.map(|name| (path.clone(), name)));
        }
    }
    found
}

/// The table in `README.md` names tests that exist, where it says, and all that bear a number.
#[test]
fn the_table_of_cases_is_true_and_whole() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = std::fs::read_to_string(folder.join("README.md")).unwrap();
    let rows = readme.lines().filter_map(|line| {
        let (entry, rest) = line.strip_prefix("| ")?.split_once(" | ")?;
        let (file, name) = rest.trim_matches(['|', ' ', '`']).split_once("::")?;
        Some((entry, file, name))
    });
    let mut named = BTreeSet::new();
    for (entry, file, name) in rows {
        let source = std::fs::read_to_string(folder.join("..").join(file)).unwrap_or_default();
        assert!(source.contains(&format!("fn {name}()")), "{file} has no test {name}");
        let prefix = format!("{}_", entry.to_lowercase());
        assert!(name.starts_with(&prefix), "{name} stands under {entry}");
        named.insert((file.to_owned(), name.to_owned()));
    }
    let folders = ["engine/src", "kernels-cpu", "model-zoo", "server", "tests"];
    let tests: BTreeSet<_> = folders.into_iter().flat_map(numbered_tests).collect();
    assert!(tests.len() > 50, "only {} tests were found", tests.len());
    let missing: Vec<_> = tests.difference(&named).collect();
    assert!(missing.is_empty(), "the table lacks {missing:?}");
}

/// Ids of every kind that a request may name are checked before they index anything.
#[test]
fn ids_outside_the_vocabulary_are_refused_wherever_they_stand() {
    let params = |change: fn(&mut SamplingParams)| {
        let mut params = greedy(1);
        change(&mut params);
        params
    };
    assert_refused(vec![
        (params(|p| p.stop_token_ids = vec![258]), "stop_token_ids must be below"),
        (params(|p| p.allowed_token_ids = Some(vec![271])), "allowed_token_ids must be below"),
    ]);
    let mut engine = TinyModel::new(1).engine(&setup());
    let error = engine.add_request(Request::new(vec![1, u32::MAX], greedy(1))).unwrap_err();
    assert!(matches!(error, RequestError::TokenOutOfVocabulary { id: u32::MAX, .. }), "{error}");
}
