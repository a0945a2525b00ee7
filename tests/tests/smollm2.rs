//! The real model, SmolLM2-135M-Instruct in Q4_1: its greedy text is that of Hugging Face
//! transformers on the same weights, and its tokens do not depend on the schedule.
//!
//! Without the model (`make fetch` gets it) these tests pass without looking, unless `QUIRE_TEST_MODEL=required`
//! is set, as `make test` does.

use quire_engine::backend::{Isa, Quantization};
use quire_engine::engine::Prompt;
use quire_engine::{DType, Engine, EngineConfig, Request};
use quire_model_zoo::{LoadOptions, ModelFiles};
use quire_tests::fixtures::{data_dir, smollm2};
use quire_tests::oracle::{Fingerprint, greedy, run_all};
use quire_tests::strategies::mixed_requests;
use serde_json::Value;

/// Two f32 engines that add in other orders may disagree where two logits are this close.
const F32_GAP: f64 = 1e-2;
/// In bf16, of logits around 20, this is four units in the last place.
const BF16_GAP: f64 = 0.5;

/// An engine over the weights as they are stored.
fn engine(
    files: &ModelFiles,
    dtype: DType,
    isa: Isa,
    threads: usize,
    sizes: EngineConfig,
) -> Engine {
    let options = LoadOptions {
        dtype: Some(dtype),
        quantization: Some(Quantization::Stored),
        isa: Some(isa),
        threads: Some(threads),
        engine: sizes,
        ..Default::default()
    };
    files.load(&options, &mut |_| ()).expect("the model fits")
}

fn sizes(seats: usize, block_size: usize, pool_tokens: usize, budget: usize) -> EngineConfig {
    EngineConfig {
        max_num_seqs: seats,
        max_num_batched_tokens: Some(budget),
        max_model_len: Some(160),
        block_size,
        num_blocks: Some(pool_tokens / block_size),
        ..Default::default()
    }
}

fn numbers<T>(case: &Value, field: &str, read: impl Fn(&Value) -> Option<T>) -> Vec<T> {
    let items = case[field].as_array().unwrap_or_else(|| panic!("no {field} in {case}"));
    items.iter().map(|n| read(n).unwrap_or_else(|| panic!("{field} has {n}"))).collect()
}

fn ids(case: &Value, field: &str) -> Vec<u32> {
    numbers(case, field, |n| u32::try_from(n.as_u64()?).ok())
}

/// Compares greedy continuations with the recorded ones and returns how many tokens agreed, of how
/// many. `recorded` picks the recording of the dtype.
fn compare(dtype: DType, gap_limit: f64, recorded: impl Fn(&Value) -> &Value) -> (usize, usize) {
    let Some(path) = smollm2() else { return (0, 0) };
    let text = std::fs::read_to_string(data_dir().join("smollm2-greedy.json")).expect("recorded");
    let recording: Value = serde_json::from_str(&text).expect("JSON");
    let cases = recording["cases"].as_array().expect("cases");
    assert!(cases.len() >= 4, "{} recorded prompts", cases.len());
    let files = ModelFiles::open(&path).expect("the model");
    // A dtype that is asked for is that of the weights, too, as in the recording.
    let options = LoadOptions { dtype: Some(dtype), ..Default::default() };
    assert_eq!(options.quantization(), Quantization::None);
    let mut engine = files.load(&options, &mut |_| ()).expect("the model fits");
    let mut requests = Vec::new();
    for case in cases {
        let prompt = case["prompt"].as_str().expect("a prompt");
        let encoded = engine.encode(prompt).expect("text");
        assert_eq!(encoded, ids(case, "prompt_token_ids"), "{prompt:?}");
        requests.push(Request::new(prompt, greedy(ids(recorded(case), "token_ids").len())));
    }
    let (mut agreed, mut total) = (0, 0);
    for (case, output) in cases.iter().zip(run_all(&mut engine, &requests)) {
        let want = ids(recorded(case), "token_ids");
        let gaps = numbers(recorded(case), "gaps", Value::as_f64);
        let same = want.iter().zip(&output.token_ids).take_while(|(a, b)| a == b).count();
        if same < want.len() {
            let (name, gap) = (&case["name"], gaps[same]);
            println!("{dtype}, {name}: token {same} differs, where the gap is {gap}");
            assert!(gap < gap_limit, "{name}: token {same} differs across a gap of {gap}");
        }
        agreed += same;
        total += want.len();
    }
    println!("{dtype}: {agreed} of {total} greedy tokens agree");
    (agreed, total)
}

#[test]
fn greedy_text_in_f32_is_that_of_transformers() {
    let (agreed, total) = compare(DType::F32, F32_GAP, |case| case);
    assert!(agreed * 10 >= total * 9, "only {agreed} of {total} tokens could be compared");
}

#[test]
fn greedy_text_in_bf16_is_that_of_transformers_up_to_near_ties() {
    let (agreed, total) = compare(DType::Bf16, BF16_GAP, |case| &case["bf16"]);
    assert!(agreed * 4 >= total, "only {agreed} of {total} tokens could be compared");
}

/// Logits of the weights as stored, whose activations are rounded to 8 bits, against the weights
/// unpacked in f32: the root mean square of the differences, over the deviation of the logits.
#[test]
fn weights_as_stored_give_nearly_the_logits_of_the_unpacked() {
    let Some(path) = smollm2() else { return };
    let files = ModelFiles::open(&path).expect("the model");
    let prompts = [
        "The capital of France is",
        "Once upon a time there was a fox who lived in the woods. Every morning",
        "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    ];
    let run = |dtype, quantization| {
        let options = LoadOptions { dtype, quantization, ..Default::default() };
        let mut engine = files.load(&options, &mut |_| ()).expect("the model fits");
        let request =
            |prompt: &&str| Request { capture_logits: true, ..Request::new(*prompt, greedy(8)) };
        let outputs = run_all(&mut engine, &prompts.iter().map(request).collect::<Vec<_>>());
        (engine.backend().quantization.to_string(), outputs)
    };
    let (stored, got) = run(None, None);
    assert_eq!(stored, "120 Q4_1 as stored, 1 Q8_0 as stored of 121 matrices");
    let (_, want) = run(Some(DType::F32), Some(Quantization::None));
    let (mut error, mut deviation) = (0.0, 0.0);
    for (got, want) in got.iter().zip(&want) {
        println!("{:?}", got.text);
        for (got, want) in got.logits.iter().zip(&want.logits).take(want.prompt_token_ids.len()) {
            let mean = want.iter().map(|&x| f64::from(x)).sum::<f64>() / want.len() as f64;
            for (&got, &want) in got.iter().zip(want) {
                error += f64::from(got - want).powi(2);
                deviation += (f64::from(want) - mean).powi(2);
            }
        }
    }
    let relative = f64::sqrt(error / deviation);
    println!("logits differ by {relative:.2e} of their deviation");
    assert!(relative < 0.1, "{relative:e}");
    assert!(got[0].text.contains("Paris"), "{:?}", got[0].text);
}

/// Mixed requests that are short enough for a machine of two cores, over ids that are text.
fn short_requests(n: usize) -> Vec<Request> {
    let mut requests = mixed_requests(n, 31);
    for (i, request) in requests.iter_mut().enumerate() {
        request.params.max_tokens = Some(4 + i % 9);
        request.params.min_tokens = 0;
        if let Prompt::Tokens(ids) = &mut request.prompt {
            ids.truncate(18);
            ids.iter_mut().enumerate().for_each(|(j, id)| *id = *id * 150 + 300 + j as u32);
        }
    }
    requests
}

#[test]
fn tokens_do_not_depend_on_seats_blocks_threads_or_preemption() {
    let Some(path) = smollm2() else { return };
    let files = ModelFiles::open(&path).expect("the model");
    let requests = short_requests(64);
    let (isa, dtype) = (Isa::detect(), DType::Bf16);
    let oracle: Vec<Fingerprint> = {
        let alone = sizes(1, 16, 160, 160);
        let mut engine = engine(&files, dtype, isa, 2, alone);
        let run = |r: &Request| {
            let outputs = run_all(&mut engine, std::slice::from_ref(r));
            Fingerprint::from(&outputs[0])
        };
        requests.iter().map(run).collect()
    };
    let runs = [
        (2, sizes(1, 32, 160, 16)),
        (1, sizes(7, 8, 160, 64)),
        (2, sizes(7, 32, 160, 512)),
        (2, sizes(64, 8, 160, 16)),
        (2, sizes(64, 32, 64 * 32, 512)),
        (1, sizes(64, 8, 320, 512)),
    ];
    let mut preemptions = 0;
    for (threads, sizes) in runs {
        let mut engine = engine(&files, dtype, isa, threads, sizes.clone());
        for (i, output) in run_all(&mut engine, &requests).iter().enumerate() {
            assert_eq!(Fingerprint::from(output), oracle[i], "request {i}, {sizes:?}");
        }
        preemptions += engine.stats().num_preemptions();
    }
    assert!(preemptions > 0, "the pools are too large to preempt");
}

#[test]
fn tokens_do_not_depend_on_the_schedule_on_any_instruction_set() {
    let Some(path) = smollm2() else { return };
    let files = ModelFiles::open(&path).expect("the model");
    let requests = short_requests(4);
    for isa in Isa::available() {
        let mut together = engine(&files, DType::Bf16, isa, 2, sizes(4, 8, 160, 7));
        let mut alone = engine(&files, DType::Bf16, isa, 1, sizes(1, 32, 160, 160));
        let outputs = run_all(&mut together, &requests);
        for (request, output) in requests.iter().zip(&outputs) {
            let want = run_all(&mut alone, std::slice::from_ref(request));
            assert_eq!(Fingerprint::from(output), Fingerprint::from(&want[0]), "{isa}");
        }
    }
}
