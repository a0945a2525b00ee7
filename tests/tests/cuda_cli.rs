//! The `quire` binary on a device: a program of its own, which finds the stand-in driver where it
//! would find NVIDIA's, or none.

use fakecuda::{FakeCuda, Stats};
use quire_engine::backend::cuda::{CudaDevice, CudaError};
use quire_tests::fixtures::data_dir;
use serde_json::Value;
use std::fs;
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

fn golden() -> String {
    data_dir().join("goldens/llama-gqa").to_str().expect("UTF-8").to_owned()
}

/// A machine, as `quire` sees it.
struct Machine {
    scratch: TempDir,
    /// It has a driver.
    has_driver: bool,
    /// And cuBLASLt.
    has_cublaslt: bool,
    variables: Vec<(&'static str, String)>,
}

impl Machine {
    /// One with a device.
    fn new() -> Self {
        let scratch = tempfile::tempdir().expect("a folder");
        Machine { scratch, has_driver: true, has_cublaslt: true, variables: Vec::new() }
    }

    /// One without a driver.
    fn without_driver() -> Self {
        Machine { has_driver: false, ..Machine::new() }
    }

    /// The same, told something of the driver.
    fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.variables.push((name, value.into()));
        self
    }

    /// Nothing is computed there.
    fn null() -> Self {
        Machine::new().with("FAKECUDA_NULL", "1")
    }

    fn quire(&self, args: &[&str]) -> Run {
        let mut command = Command::new(env!("CARGO_BIN_EXE_quire_on_fakecuda"));
        command.args(args).stdin(Stdio::null()).env_remove("LD_LIBRARY_PATH");
        let stats = self.scratch.path().join("stats.json");
        let _ = fs::remove_file(&stats);
        if self.has_driver {
            let folder = FakeCuda::library_folder(self.scratch.path()).expect("a folder");
            if !self.has_cublaslt {
                fs::remove_file(folder.join("libcublasLt.so")).expect("it is there");
            }
            command.env("LD_LIBRARY_PATH", folder).env("FAKECUDA_STATS", &stats);
        }
        let variables = self.variables.iter().map(|(name, value)| (name, value));
        let output = command.envs(variables).output().expect("it runs");
        let stats = fs::read(&stats).ok();
        Run::new(output, stats.map(|json| serde_json::from_slice(&json).expect("counts")))
    }
}

/// What a command printed.
struct Run {
    code: Option<i32>,
    stdout: String,
    stderr: String,
    stats: Option<Stats>,
}

impl Run {
    fn new(output: Output, stats: Option<Stats>) -> Self {
        let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
        let (stdout, stderr) = (text(output.stdout), text(output.stderr));
        for word in ["panicked", "internal error", "fakecuda:"] {
            assert!(!stderr.contains(word), "{stderr}");
        }
        Run { code: output.status.code(), stdout, stderr, stats }
    }

    #[track_caller]
    fn done(self) -> Self {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        self
    }

    /// The one line of a command that cannot run.
    #[track_caller]
    fn refusal(&self) -> &str {
        assert_eq!(self.code, Some(2), "{}", self.stderr);
        assert_eq!(self.stdout, "");
        let lines: Vec<&str> = self.stderr.lines().collect();
        let [line] = lines[..] else { panic!("{}", self.stderr) };
        assert!(line.starts_with("error: "), "{line}");
        line
    }

    #[track_caller]
    fn json(&self) -> Vec<Value> {
        self.stdout.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
    }

    /// Nothing was left on the device.
    #[track_caller]
    fn assert_no_leak(&self) {
        let s = self.stats.expect("the driver was used");
        assert!(s.allocations > 0);
        let alive = [
            s.live_allocations,
            s.live_bytes,
            s.live_pinned,
            s.live_streams,
            s.live_events,
            s.live_modules,
            s.live_graphs,
        ];
        assert_eq!(alive, [0; 7], "{s:?}");
    }
}

/// Eight prompts, of different lengths.
const PROMPTS: [&str; 8] =
    ["A", "Once upon a time", "12", "the", "x y z", "Hello", "zz", "Mary had"];

/// Sizes that suit a small device.
const SIZES: [&str; 6] =
    ["--kv-cache-memory", "4M", "--max-num-batched-tokens", "32", "--dtype", "bf16"];

/// `generate` on all prompts together.
fn generate(machine: &Machine, device: &str, flags: &[&str]) -> Run {
    let model = golden();
    let args = ["generate", &model, "--device", device];
    let greedy = ["--max-tokens", "6", "--temperature", "0", "--ignore-eos"];
    let prompts = PROMPTS.map(|prompt| ["--prompt", prompt]).concat();
    machine.quire(&[&args[..], &greedy, &SIZES, &prompts, flags].concat())
}

/// Blocks are copied and swapped whole, though part of them was never written.
#[test]
fn forks_and_swaps_move_blocks_that_are_not_full() {
    let (machine, model) = (Machine::new(), golden());
    let run = |flags: &[&str]| {
        let args = ["generate", &model, "--device", "cuda", "--dtype", "bf16", "--ignore-eos"];
        let prompts = PROMPTS.map(|prompt| ["--prompt", prompt]).concat();
        machine.quire(&[&args[..], &prompts, flags].concat()).done().stderr
    };
    run(&["--n", "2", "--seed", "3", "--max-tokens", "2", "--kv-cache-memory", "4M"]);
    let tight = ["--num-blocks-override", "4", "--max-model-len", "48", "--max-tokens", "24"];
    let swap = ["--swap-space", "1M", "--preemption-mode", "swap", "--temperature", "0"];
    let text = run(&[&tight[..], &swap].concat());
    assert!(text.contains("by swap") && !text.contains("preemptions  0"), "{text}");
}

/// The names of a table's rows.
fn names(table: &str) -> Vec<String> {
    table.lines().filter_map(|line| Some(line.split_once("  ")?.0.to_owned())).collect()
}

#[test]
fn eight_prompts_give_the_summary_that_the_cpu_gives() {
    let device = Machine::new();
    let cuda = generate(&device, "cuda", &[]).done();
    cuda.assert_no_leak();
    assert!(cuda.stats.is_some_and(|stats| stats.graph_launches > 0));
    let cpu = generate(&Machine::without_driver(), "cpu", &[]).done();
    assert_eq!(names(&cuda.stderr), names(&cpu.stderr), "{}\n{}", cuda.stderr, cpu.stderr);
    for line in ["requests     8 finished, 0 failed", "output       48 tokens, "] {
        assert!(cuda.stderr.contains(line), "{}", cuda.stderr);
    }
    let headings = |run: &Run| run.stdout.matches("==> prompt ").count();
    assert_eq!((headings(&cuda), headings(&cpu)), (8, 8));
}

#[test]
fn greedy_tokens_do_not_depend_on_the_batch() {
    let device = Machine::new();
    let line = |i: usize| {
        let (id, prompt) = (format!("r{i}"), PROMPTS[i]);
        serde_json::json!({"id": id, "prompt": prompt, "logprobs": 2}).to_string() + "\n"
    };
    let input = device.scratch.path().join("input.jsonl");
    let run = |lines: &str, flags: &[&str]| {
        fs::write(&input, lines).expect("a file");
        let model = golden();
        let args = ["generate", &model, "--input", input.to_str().expect("UTF-8"), "--format"];
        let greedy = ["jsonl", "--temperature", "0", "--max-tokens", "5", "--ignore-eos"];
        let sizes = ["--device", "cuda", "--dtype", "bf16", "--kv-cache-memory", "4M"];
        device.quire(&[&args[..], &greedy, &sizes, flags].concat()).done()
    };
    let answers = |run: &Run| {
        let mut all: Vec<_> = run
            .json()
            .into_iter()
            .map(|line| {
                (line["id"].to_string(), line["token_ids"].clone(), line["logprobs"].clone())
            })
            .collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    };
    let together = run(&(0..8).map(line).collect::<String>(), &["--max-num-batched-tokens", "16"]);
    together.assert_no_leak();
    let mut alone = Vec::new();
    for i in 0..8 {
        alone.extend(answers(&run(&line(i), &["--enforce-eager"])));
    }
    assert_eq!(answers(&together), alone);
    assert!(alone.iter().all(|(_, ids, _)| ids.as_array().is_some_and(|ids| ids.len() == 5)));
}

#[test]
fn a_golden_model_is_verified() {
    let args = ["verify", &golden(), "--device", "cuda", "--dtype", "bf16"];
    let run = Machine::new().quire(&[&args[..], &["--kv-cache-memory", "4M"]].concat()).done();
    run.assert_no_leak();
    let stats = run.stats.expect("the driver was used");
    assert!(stats.launches > 100 && stats.graph_launches > 0, "{stats:?}");
}

#[test]
fn info_shows_the_device_and_the_plan() {
    let model = golden();
    let args = ["info", &model, "--device", "cuda", "--dtype", "bf16"];
    let machine = Machine::null().with("FAKECUDA_DEVICE_BYTES", (2u64 << 30).to_string());
    let table = machine.quire(&args).done();
    for text in ["cuda:0", "Fake CUDA device", "8.0", "12.4", "triton", "KV cache"] {
        assert!(table.stdout.contains(text), "{text}: {}", table.stdout);
    }
    let info = machine.quire(&[&args[..], &["--json"]].concat()).done().json().remove(0);
    assert_eq!((&info["device"], &info["backend"]), (&"cuda:0".into(), &"cuda".into()));
    assert_eq!(info["cuda"]["name"], "Fake CUDA device");
    assert_eq!(info["memory"]["total"], 2u64 << 30);
    assert_eq!(info["batch_invariant"], true);
    assert_eq!(info["async_scheduling"], true);
}

#[test]
fn cublas_multiplies_where_it_is_asked_for_and_there() {
    let machine = Machine::new();
    let run = generate(&machine, "cuda", &["--gemm", "cublas"]).done();
    run.assert_no_leak();
    assert!(run.stderr.contains("output       48 tokens, "), "{}", run.stderr);
    let model = golden();
    let info = ["info", &model, "--device", "cuda", "--gemm", "cublas", "--json"];
    let info = machine.quire(&info).done().json().remove(0);
    assert_eq!(info["cuda"]["gemm"], "cublas");
    assert_eq!(info["batch_invariant"], false);
    let without = Machine { has_cublaslt: false, ..Machine::new() };
    generate(&without, "cuda", &[]).done();
    let refused = generate(&without, "cuda", &["--gemm", "cublas", "--quiet"]);
    let line = refused.refusal();
    assert!(line.contains("libcublasLt.so") && line.contains("--gemm triton"), "{line}");
}

// ---- machines on which it cannot run -------------------------------------------------------

#[test]
fn without_a_driver_a_device_is_refused_and_auto_is_the_cpu() {
    if !matches!(CudaDevice::open(0), Err(CudaError::NoDriver)) {
        eprintln!("skipped: this machine has a driver");
        return;
    }
    let model = golden();
    let machine = Machine::without_driver();
    let refused = machine.quire(&["info", &model, "--device", "cuda"]);
    let line = refused.refusal();
    assert!(line.contains("no NVIDIA driver") && line.contains("--device cpu"), "{line}");
    let auto = generate(&machine, "auto", &[]).done();
    let cpu = generate(&machine, "cpu", &[]).done();
    assert_eq!(auto.stdout, cpu.stdout);
    assert!(auto.stderr.contains("device: cpu (no NVIDIA driver)"), "{}", auto.stderr);
}

/// Machines whose device cannot be used, and what is said of them.
fn unusable() -> Vec<(Machine, [&'static str; 2])> {
    vec![
        (Machine::null().with("FAKECUDA_DRIVER_VERSION", "11080"), ["CUDA 11.8", "12.0"]),
        (Machine::null().with("FAKECUDA_COUNT", "0"), ["no device", "nvidia-smi"]),
        (Machine::null().with("FAKECUDA_CC", "7.5"), ["Fake CUDA device", "7.5"]),
    ]
}

#[test]
fn a_device_that_cannot_be_used_is_refused_and_auto_says_why_it_is_the_cpu() {
    let model = golden();
    let small = ["--max-tokens", "2", "--kv-cache-memory", "4M", "--prompt", "x"];
    for (machine, texts) in unusable() {
        for command in [&["info", &model][..], &[&["generate", &model][..], &small].concat()] {
            let refused = machine.quire(&[command, &["--device", "cuda"]].concat());
            let line = refused.refusal();
            assert!(texts.iter().all(|text| line.contains(text)), "{line}");
        }
        let generate = [&["generate", &model, "--device", "auto"][..], &small].concat();
        for quiet in [&[][..], &["--json"]] {
            let auto = machine.quire(&[&generate[..], quiet].concat()).done();
            let said = auto.stderr.lines().find(|line| line.contains("cpu")).unwrap_or_default();
            assert!(texts.iter().all(|text| said.contains(text)), "{}", auto.stderr);
        }
        let info = machine.quire(&["info", &model, "--device", "auto", "--json"]).done();
        assert_eq!(info.json()[0]["device"], "cpu");
    }
}

#[test]
fn auto_takes_a_device_that_can_be_used() {
    let model = golden();
    let info = Machine::null().quire(&["info", &model, "--json"]).done();
    assert_eq!(info.json()[0]["device"], "cuda:0");
    let second = ["info", &model, "--device", "cuda:1", "--json"];
    let two = Machine::null().with("FAKECUDA_COUNT", "2").quire(&second).done();
    assert_eq!(two.json()[0]["device"], "cuda:1");
    let one = Machine::null().quire(&second);
    assert!(one.refusal().contains("there is no CUDA device 1: 1 found"), "{}", one.refusal());
}

// ---- faults --------------------------------------------------------------------------------

#[test]
fn a_failure_while_loading_is_one_line_and_leaves_nothing() {
    for (fault, text) in [
        ("alloc:1:2", "no device memory for partial results: 67108864 bytes asked for"),
        ("alloc:30:2", "no device memory for"),
        ("host_alloc:3:2", "no page-locked host memory for"),
        ("copy:9:1", "CUDA_ERROR_INVALID_VALUE (1)"),
        ("copy:9:700", "the device is lost"),
        ("sync:2:719", "the device is lost"),
    ] {
        let run = generate(&Machine::null().with("FAKECUDA_FAIL", fault), "cuda", &[]);
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{fault}: {}", run.stderr);
        let errors: Vec<_> = run.stderr.lines().filter(|line| line.contains("error")).collect();
        let [error] = errors[..] else { panic!("{fault}: {}", run.stderr) };
        assert!(error.contains(text), "{fault}: {error}");
        let stats = run.stats.expect("the driver was used");
        assert_eq!(stats.live_allocations + stats.live_pinned, 0, "{fault}: {stats:?}");
    }
}

#[test]
fn a_device_that_is_lost_on_the_way_ends_each_request_with_the_error() {
    for fault in ["launch:60:700", "graph_launch:2:700", "copy:40:719", "sync:30:700"] {
        let machine = Machine::null().with("FAKECUDA_FAIL", fault);
        let run = generate(&machine, "cuda", &["--json"]);
        assert_eq!(run.code, Some(1), "{fault}: {}", run.stderr);
        let results = run.json();
        assert_eq!(results.len(), 8, "{fault}: {}", run.stdout);
        let failed = results.iter().filter(|line| {
            line["error"]["message"].as_str().is_some_and(|why| why.contains("the device is lost"))
        });
        assert!(failed.count() > 0, "{fault}: {}", run.stdout);
        let said = |text: &str| run.stderr.lines().filter(|line| line.contains(text)).count();
        assert_eq!(said("error: the engine failed: "), 1, "{fault}: {}", run.stderr);
        run.assert_no_leak();
    }
}
