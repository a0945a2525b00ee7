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
