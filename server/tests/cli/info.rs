//! `quire info`, and the memory plan wherever it is shown.

use super::*;

#[test]
fn info_says_what_a_model_takes() {
    let args = ["info", MODEL, "--block-size", "32", "--num-blocks-override", "10"];
    let output = quire(&[&args[..], &["--json"]].concat());
    assert_eq!(output.status.code(), Some(0));
    let info = &json_lines(&stdout(&output))[0];
    assert_eq!(info["architecture"], "LlamaForCausalLM");
    assert_eq!(info["dtype"], "f32");
    assert_eq!(info["backend"], "cpu");
    assert_eq!(info["block_size"], 32);
    assert_eq!(info["num_blocks"], 10);
    // 3 layers × K and V × 2 heads × 64 × 4 bytes.
    assert_eq!(info["kv_bytes_per_token"], 3072);
    assert_eq!(info["memory"]["kv_cache"], 10 * 32 * 3072);
    let small = quire(&["info", MODEL, "--num-blocks-override", "4", "--dtype", "bf16"]);
    let table = stdout(&small);
    assert!(table.contains("KV per token        1536 bytes"), "{table}");
    assert!(table.contains("max_model_len lowered from 256 to 64"), "{table}");
}

#[test]
fn info_has_the_memory_plan_and_the_schedulers_settings() {
    let args = ["info", MODEL, "--json", "--num-blocks-override", "10", "--threads", "2"];
    let info = |flags: &[&str]| {
        let output = quire(&[&args[..], flags].concat());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        json_lines(&stdout(&output)).remove(0)
    };
    let default = info(&[]);
    let memory = &default["memory"];
    let part = |name: &str| memory[name].as_u64().unwrap();
    assert_eq!(part("kv_cache"), 10 * 16 * 3072);
    let names = ["weights", "workspace", "logits", "sampling", "other", "kv_cache", "swap"];
    assert_eq!(names.map(part).iter().sum::<u64>(), part("needed"));
    assert!(names[..6].iter().all(|name| part(name) > 0), "{memory}");
    assert!(part("needed") <= part("budget") && part("budget") == part("available"), "{memory}");
    assert_eq!(default["scheduling_policy"], "fcfs");
    assert_eq!(default["preemption_costs"], Value::Null);
    assert_eq!(default["prefix_caching"], true);
    assert_eq!(default["measured_at_start"], serde_json::json!(["max_num_batched_tokens"]));

    let flags = "--swap-space 1M --scheduling-policy priority --aging-steps 9 --async-scheduling \
                 --no-enable-prefix-caching --max-num-batched-tokens 64";
    let flags: Vec<&str> = flags.split_whitespace().collect();
    let set = info(&flags);
    assert_eq!((&set["scheduling_policy"], &set["aging_steps"]), (&"priority".into(), &9.into()));
    assert_eq!((&set["prefix_caching"], &set["async_scheduling"]), (&false.into(), &true.into()));
    // 16 tokens × 3072 bytes a block.
    assert_eq!(set["swap_blocks"], (1 << 20) / (16 * 3072));
    assert_eq!(set["memory"]["swap"], (1 << 20) / (16 * 3072) * (16 * 3072));
    assert_eq!(set["measured_at_start"], serde_json::json!(["preemption_costs"]));
    assert_eq!(set["preemption_costs"], Value::Null);
    assert!(set["memory"]["workspace"].as_u64() < default["memory"]["workspace"].as_u64());

    let measured = info(&["--swap-space", "1M", "--measure"]);
    assert!(measured["preemption_costs"]["recompute_ns_per_token"].as_u64().unwrap() > 0);
    assert!(measured["max_num_batched_tokens"].as_u64().unwrap() <= 512);
    let given = info(&["--swap-space", "1M", "--preemption-costs", "90000,7"]);
    assert_eq!(given["preemption_costs"]["swap_ns_per_block"], 7);

    let table = stdout(&quire(&["info", MODEL, "--scheduling-policy", "static"]));
    for line in [
        "scheduling policy   static",
        "prefix caching      no",
        "preemption          recompute (there is no swap space)",
        "\nmemory\n  weights    ",
        "\n  swap space  ",
    ] {
        assert!(table.contains(line), "{line}: {table}");
    }
}

#[test]
fn what_the_memory_cannot_hold_is_refused_with_a_table() {
    for (flags, problem) in [
        (["--kv-cache-memory", "2T"], "no room for the KV cache of 2.0 TiB: the engine needs"),
        (
            ["--num-blocks-override", "100000000"],
            "lower --kv-cache-memory (kv_cache_bytes) or --num-blocks-over",
        ),
        (["--swap-space", "90T"], "no room for the swap space of 90.0 TiB"),
        (
            ["--memory-utilization", "0.0000001"],
            "or raise --memory-utilization (memory_utilization)",
        ),
    ] {
        let output = quire(&[&["generate", MODEL, "--prompt", "x"][..], &flags].concat());
        assert_eq!((output.status.code(), stdout(&output)), (Some(2), String::new()));
        let text = stderr(&output);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0] == "memory" && lines[1].starts_with("  weights  "), "{text}");
        let error = lines.last().unwrap();
        assert!(error.starts_with("error: ") && error.contains(problem), "{text}");
    }
}

#[test]
fn where_the_memory_goes_is_shown_at_start_unless_not_wanted() {
    let shown = |flags: &[&str]| {
        let args = ["generate", MODEL, "--prompt", "x", "--max-tokens", "1"];
        let output = quire(&[&args[..], flags].concat());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        stderr(&output).starts_with("memory\n  weights ")
    };
    assert!(shown(&[]));
    assert!(!shown(&["--quiet"]));
    assert!(!shown(&["--json"]));
}

#[cfg(unix)]
#[test]
fn a_path_with_a_line_break_keeps_the_table() {
    let (dir, model) = model_copy();
    let odd = dir.path().join("a\nb");
    fs::rename(model, &odd).unwrap();
    let table = stdout(&quire(&["info", odd.to_str().unwrap()]));
    assert!(table.lines().next().is_some_and(|line| line.ends_with("a\\nb")), "{table}");
}

/// A process under `prctl(PR_SET_THP_DISABLE)` gets no huge pages; Python makes the call.
#[cfg(target_os = "linux")]
#[test]
fn info_tells_huge_pages_truly_and_everything_runs_without() {
    let measured = |output: &Output| {
        assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
        let info = json_lines(&stdout(output)).remove(0);
        (info["huge_pages"].as_str().unwrap().to_owned(), info["huge_page_bytes"].clone())
    };
    let args = ["info", MODEL, "--device", "cpu", "--json", "--measure"];
    let (state, bytes) = measured(&quire(&args));
    if state.starts_with("switched off") || state.starts_with("not available") {
        return; // Here there is nothing to be switched off.
    }
    assert!(state.starts_with("available (system setting: "), "{state}");
    assert!(bytes.is_u64(), "{bytes}");
    let not_loaded = json_lines(&stdout(&quire(&args[..5]))).remove(0);
    assert_eq!(not_loaded["huge_page_bytes"], Value::Null);

    let off = "import ctypes, os, sys; off = ctypes.CDLL(None).prctl(41, 1, 0, 0, 0); \
               sys.exit(99) if off else os.execv(sys.argv[1], sys.argv[1:])";
    let without = |args: &[&str]| {
        let python = ["-c", off, env!("CARGO_BIN_EXE_quire")];
        Command::new("python3").args(python).args(args).stdin(Stdio::null()).output()
    };
    let Ok(output) = without(&args) else {
        return; // No Python.
    };
    assert_eq!(measured(&output), ("switched off for this process".to_owned(), 0.into()));
    let verified = without(&["verify", MODEL, "--device", "cpu"]).unwrap();
    assert!(stdout(&verified).contains("passed: 5 of 5"), "{}", stderr(&verified));
}

#[test]
fn threads_are_the_cores_there_are_or_said_to_be_more() {
    let threads = |output: &Output| {
        assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
        let table = stdout(output);
        let line = table.lines().find_map(|line| line.strip_prefix("threads "));
        line.expect("a line").trim().to_owned()
    };
    let cores = std::thread::available_parallelism().unwrap().get();
    let args = ["info", MODEL, "--device", "cpu"];
    assert_eq!(threads(&quire(&args)), cores.to_string());
    let more = quire(&[&args[..], &["--threads", "1024"]].concat());
    let plural = if cores == 1 { "core" } else { "cores" };
    assert_eq!(threads(&more), format!("1024 on {cores} {plural}"));

    // The first core this process may use.
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let first = allowed.and_then(|list| list.trim().split([',', '-']).next());
    let Some(first) = first else {
        return;
    };
    let one = Command::new("taskset")
        .args(["-c", first, env!("CARGO_BIN_EXE_quire")])
        .args(args)
        .stdin(Stdio::null())
        .output();
    if let Ok(one) = one {
        assert_eq!(threads(&one), "1");
    }
}
