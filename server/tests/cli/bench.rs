//! `quire bench`.

use super::{MODEL, json_lines, quire, refusal, stderr, stdout, write};
use serde_json::Value;
use std::fs;

/// The JSON that a benchmark prints.
fn bench(what: &str, flags: &[&str]) -> Value {
    let output = quire(&[&["bench", what, MODEL, "--json"][..], flags].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    json_lines(&stdout(&output)).remove(0)
}

fn names(value: &Value) -> Vec<&str> {
    value.as_object().expect("an object").keys().map(String::as_str).collect()
}

#[test]
fn policies_are_compared_on_the_same_requests() {
    let dir = tempfile::tempdir().unwrap();
    let [json, svg] = ["o.json", "o.svg"].map(|name| dir.path().join(name));
    let [json, svg] = [&json, &svg].map(|path| path.to_str().unwrap());
    let classes = ["--classes", "6x4@5", "2x40@3-9", "--max-model-len", "64"];
    let policies = ["--policy", "static:2,fcfs:4", "--output", json, "--plot", svg];
    let report = bench("throughput", &[&classes[..], &policies].concat());
    let kept: Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    assert_eq!(kept, report);
    assert_eq!(fs::read_to_string(svg).unwrap().matches("<polyline").count(), 4);

    assert_eq!(
        names(&report),
        [
            "benchmark",
            "version",
            "model",
            "dataset",
            "request_rate",
            "machine",
            "step_model",
            "ceilings",
            "runs",
            "ratios"
        ]
    );
    let [fixed, continuous] = report["runs"].as_array().unwrap().as_slice() else {
        panic!("two runs: {report}")
    };
    for run in [fixed, continuous] {
        assert_eq!(run["completed"], 8);
        assert_eq!(run["total_output_tokens"], 6 * 4 + 2 * 40);
        assert_eq!(run["backend"]["batch_invariant"], true);
        let classes = run["classes"].as_array().unwrap();
        let tokens = |name: &str| {
            let class = classes.iter().find(|class| class["name"] == name).expect(name);
            assert!(class["p99_e2el_ms"].as_f64() >= class["median_ttft_ms"].as_f64());
            class["output_tokens"].as_u64().unwrap()
        };
        assert_eq!((tokens("4@5"), tokens("40@3-9")), (24, 80));
        for key in ["ttft", "tpot", "itl", "e2el", "queue"] {
            for part in ["mean", "median", "std", "p99"] {
                let name = format!("{part}_{key}_ms");
                assert!(run[&name].as_f64().is_some_and(|ms| ms >= 0.0), "{name}");
            }
        }
        let kv = &run["kv_cache"];
        let moments = kv["over_time"].as_array().unwrap();
        assert!((1..=run["num_steps"].as_u64().unwrap()).contains(&(moments.len() as u64)));
        let live_of_held = kv["live_of_held"].as_f64().unwrap();
        assert!(0.0 < live_of_held && live_of_held <= 1.0, "{live_of_held}");
        assert!(run["prediction"]["measured_over_predicted"].as_f64().unwrap() > 0.0);
        assert_eq!(run["prediction"]["num_preemptions"], 0);
        let shares = ["reading", "multiplying"].map(|bound| &run["ceiling"][bound]);
        let steps: u64 = shares.iter().filter_map(|share| share["num_steps"].as_u64()).sum();
        assert_eq!(run["num_steps"], steps, "every step has a bound");
        let percent = shares.iter().filter_map(|share| share["percent"].as_f64());
        assert!(percent.clone().count() > 0 && percent.into_iter().all(|percent| percent > 0.0));
    }
    assert_eq!(fixed["config"]["policy"], "static");
    assert_eq!(fixed["config"]["max_num_seqs"], 2);
    // Two reservations of 64 tokens.
    assert_eq!(fixed["kv_cache"]["peak_blocks"], 8);
    assert!(fixed["num_padding_tokens"].as_u64().unwrap() > 0);
    assert_eq!(continuous["num_padding_tokens"], 0);
    // What the schedules take is the same however fast the machine is.
    for run in [fixed, continuous] {
        assert_eq!(run["prediction"]["num_steps"], run["num_steps"]);
    }
    assert!(fixed["num_steps"].as_u64() > continuous["num_steps"].as_u64());
    let ratio = &report["ratios"][0];
    assert_eq!((&ratio["run"], &ratio["over"]), (&"fcfs:4".into(), &"static:2".into()));
    assert!(ratio["output_throughput"].as_f64().unwrap() > 0.0);
}

#[test]
fn lines_bring_their_class_and_their_time() {
    let dir = tempfile::tempdir().unwrap();
    let lines = "{\"prompt\": \"One\", \"max_tokens\": 3, \"ignore_eos\": true, \"at\": 0.2}\n\
                 {\"prompt_token_ids\": [1, 2], \"max_tokens\": 4, \"ignore_eos\": true, \
                 \"class\": \"ids\", \"n\": 2, \"temperature\": 1}\n";
    let input = write(&dir, "in.jsonl", lines);
    let report = bench("throughput", &["--input", &input, "--no-prediction"]);
    let run = &report["runs"][0];
    assert!(run["duration"].as_f64().unwrap() > 0.2);
    assert_eq!((&run["completed"], &run["total_output_tokens"]), (&2.into(), &11.into()));
    assert_eq!(run["total_input_tokens"], 3 + 2);
    assert_eq!(run["prediction"], Value::Null);
    assert!(report["ceilings"]["read_bandwidth"].as_f64().unwrap() > 0.0);
    let classes: Vec<_> = run["classes"].as_array().unwrap().iter().collect();
    assert_eq!((&classes[0]["name"], &classes[0]["completed"]), (&"ids".into(), &2.into()));
    assert_eq!((&classes[1]["name"], &classes[1]["completed"]), (&Value::Null, &1.into()));
    let flags = ["--input", &input, "--num-prompts", "1", "--no-ceiling"];
    let first_line = bench("throughput", &flags);
    assert_eq!(first_line["ceilings"], Value::Null);
    assert_eq!(first_line["runs"][0]["ceiling"], Value::Null);
    assert_eq!(first_line["runs"][0]["completed"], 1);
}

#[test]
fn a_table_has_a_column_a_run_and_shared_prefixes_count_as_hits() {
    let flags = ["--num-prompts", "4", "--input-len", "8", "--output-len", "4", "--warmup", "0"];
    let more = ["--prefix-len", "40", "--block-sizes", "8,16", "--request-rate", "500"];
    let output = quire(&[&["bench", "throughput", MODEL][..], &flags, &more].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    let row = |name: &str| -> Vec<String> {
        let line = text.lines().find(|line| line.starts_with(name)).expect(name);
        line[name.len()..].split_whitespace().map(str::to_owned).collect()
    };
    assert!(text.lines().next().unwrap().contains("fcfs:64 block 8  fcfs:64 block 16"), "{text}");
    assert_eq!(row("Successful requests"), ["4", "4"]);
    assert_eq!(row("Total input tokens"), ["192", "192"]);
    assert_eq!(row("  expected, (block size - 1) / 2"), ["3.50", "7.50"]);
    let hits = row("Prefix cache hits (%)");
    assert!(hits.iter().all(|percent| percent.parse::<f64>().unwrap() > 0.0), "{hits:?}");
    assert!(!text.contains("Predicted"), "{text}");
}

#[test]
fn limits_however_tight_are_no_obstacle() {
    let few = ["--num-prompts", "3", "--input-len", "5", "--output-len", "3"];
    let run = |flags: &[&str]| {
        let report = bench("throughput", &[&few[..], flags].concat());
        assert_eq!(report["runs"][0]["completed"], 3, "{flags:?}");
        (report["step_model"].clone(), report["runs"][0]["prediction"].clone())
    };
    let (model, prediction) = run(&["--max-model-len", "8"]);
    assert_eq!((model, prediction), (Value::Null, Value::Null));
    for tight in [
        vec!["--max-num-batched-tokens", "1"],
        vec!["--max-num-batched-tokens", "1", "--max-model-len", "30"],
        vec!["--max-num-batched-tokens", "4", "--max-num-seqs", "4", "--max-model-len", "24"],
        vec!["--num-blocks-override", "3", "--block-size", "8", "--async-scheduling"],
        vec!["--num-blocks-override", "3", "--policy", "static", "--max-model-len", "48"],
    ] {
        let (_, prediction) = run(&tight);
        let seconds = prediction["duration_s"].as_f64().unwrap();
        assert!(seconds > 0.0 && seconds < 60.0, "{tight:?}: {prediction}");
    }
}

#[test]
fn a_batch_is_timed_again_and_again() {
    let flags = ["--input-len", "6", "--output-len", "5", "--batch-size", "3", "--num-iters", "4"];
    let report = bench("latency", &[&flags[..], &["--num-iters-warmup", "1"]].concat());
    assert_eq!(report["latencies"].as_array().unwrap().len(), 4);
    let of = |value: &Value| value.as_f64().unwrap();
    assert!(of(&report["percentiles"]["50"]) <= of(&report["percentiles"]["99"]));
    assert!(of(&report["ttft"]["mean"]) < of(&report["avg_latency"]));
    assert!(of(&report["tpot"]["p90"]) > 0.0);
    // 5 tokens each: a step for the prompts, then four.
    let share = |report: &Value, bound: &str| report["ceiling"][bound]["num_steps"].as_u64();
    let steps: u64 = ["reading", "multiplying"].iter().filter_map(|b| share(&report, b)).sum();
    assert_eq!(steps, 4 * 5);
    let one = bench("latency", &["--output-len", "1", "--num-iters", "1"]);
    assert_eq!(one["tpot"], Value::Null);
}

#[test]
fn the_machine_is_measured_without_a_model() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("o.json");
    let out = out.to_str().unwrap();
    let few = ["bench", "ceiling", "--threads", "2", "--memory", "4M", "--isa", "portable"];
    let output = quire(&[&few[..], &["--json", "--output", out]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let report = json_lines(&stdout(&output)).remove(0);
    let kept: Value = serde_json::from_str(&fs::read_to_string(out).unwrap()).unwrap();
    assert_eq!(kept, report);
    assert_eq!((&report["isa"], &report["memory"]), (&"portable".into(), &(4 << 20).into()));
    let runs = report["runs"].as_array().unwrap();
    assert_eq!(
        runs.iter().map(|run| run["threads"].as_u64()).collect::<Vec<_>>(),
        [1, 2].map(Some)
    );
    for key in ["read_huge_pages", "read_small_pages", "bf16", "f32", "int8"] {
        assert!(runs.iter().all(|run| run[key].as_f64().unwrap() > 0.0), "{key}: {report}");
    }

    let text = stdout(&quire(&["bench", "ceiling", "--threads", "1", "--memory", "1M"]));
    assert!(text.contains("memory read      1.0 MiB\n"), "{text}");
    let row = text.lines().find(|line| line.starts_with("multiply, bf16 (GFLOP/s)")).unwrap();
    assert!(row.split_whitespace().last().unwrap().parse::<f64>().unwrap() > 0.0, "{row}");
    assert!(text.contains("1 thread\n"), "{text}");
    for (flags, problem) in [
        (["--memory", "1K"], "--memory is 1024 bytes, less than 1 MiB"),
        (["--memory", "900T"], "--memory is 900.0 TiB, more than half of the "),
        (["--threads", "0"], "from 1 to 1024"),
        (["--isa", "sse9"], "unknown instruction set"),
        (["--output", "/none/o"], "cannot write /none/o"),
    ] {
        let error = refusal(&quire(&[&["bench", "ceiling"][..], &flags].concat()));
        assert!(error.contains(problem), "{flags:?}: {error}");
    }
}

#[test]
fn where_the_memory_goes_is_shown_once_unless_not_wanted() {
    let tables = |flags: &[&str]| {
        let few = ["--num-prompts", "1", "--output-len", "1", "--no-prediction"];
        let output = quire(&[&["bench", "throughput", MODEL][..], &few, flags].concat());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        stderr(&output).matches("memory\n  weights ").count()
    };
    let cache = ["--num-blocks-override", "20"];
    assert_eq!(tables(&[&cache[..], &["--policy", "fcfs,priority"]].concat()), 1);
    assert_eq!(tables(&[&cache[..], &["--block-sizes", "16,32"]].concat()), 2);
    assert_eq!((tables(&["--quiet"]), tables(&["--json"])), (0, 0));
    let args = ["bench", "latency", MODEL, "--num-iters", "1", "--output-len", "1"];
    assert!(stderr(&quire(&args)).starts_with("memory\n  weights "));
    assert_eq!(stderr(&quire(&[&args[..], &["-q"]].concat())), "");
}

#[test]
fn what_cannot_run_is_refused_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let bad = write(&dir, "bad.jsonl", "{\"prompt\": \"x\"}\n{\"prompt\": 1}\n");
    let long = write(&dir, "long.jsonl", "{\"prompt\": \"x\", \"max_tokens\": 300}\n");
    let out = dir.path().join("o");
    let out = out.to_str().unwrap();
    for (flags, text) in [
        (vec!["--input", &bad], "bad.jsonl:2: prompt must be a string"),
        (vec!["--input", &long], "line 1 of the input"),
        (vec!["--input", &bad, "--output", &bad], "would overwrite the input"),
        (vec!["--input", "none.jsonl"], "cannot read none.jsonl"),
        (vec!["--output", out, "--plot", out], "--output and --plot are one file"),
        (vec!["--prefix-len", "16777217"], "must be a whole number from 0 to 16777216"),
        (vec!["--output-len", "200"], "exceed the context of 256"),
        (vec!["--dataset", "random", "--classes", "1x1@1"], "--dataset mix"),
        (vec!["--policy", "fcfs:5000"], "--max-num-seqs (max_num_seqs) is 5000"),
    ] {
        let error = refusal(&quire(&[&["bench", "throughput", MODEL][..], &flags].concat()));
        assert!(error.contains(text), "{flags:?}: {error}");
    }
    assert!(!fs::exists(out).unwrap());
    let flags = ["--batch-size", "3", "--max-num-seqs", "2"];
    let error = refusal(&quire(&[&["bench", "latency", MODEL][..], &flags].concat()));
    assert!(error.contains("--batch-size is 3, more than --max-num-seqs 2"), "{error}");
}
