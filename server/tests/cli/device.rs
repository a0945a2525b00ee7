//! `--device`, on machines with and without an NVIDIA driver. What a device computes is tested
//! elsewhere, on a stand-in driver.

use super::*;

/// Whether this machine has what `--device cuda` needs.
fn has_device() -> bool {
    quire(&["info", MODEL, "--device", "cuda"]).status.success()
}

#[cfg(feature = "cuda")]
#[test]
fn a_device_that_cannot_be_used_is_one_line_and_exit_code_2() {
    // Wherever this runs, there are not so many.
    let prompt = ["--prompt", "x"];
    for args in [
        &[&["generate", MODEL][..], &prompt].concat()[..],
        &["chat", MODEL, "--chat-template", "/dev/null"],
        &["info", MODEL],
        &["info", MODEL, "--measure"],
        &["verify", MODEL],
        &["verify", MODEL, "--layers"],
        &["bench", "latency", MODEL],
        &["bench", "throughput", MODEL, "--num-prompts", "1"],
    ] {
        for name in ["--device", "--backend"] {
            let error = refusal(&quire(&[args, &[name, "cuda:999"]].concat()));
            let known = ["NVIDIA driver", "there is no CUDA device 999"];
            assert!(known.iter().any(|text| error.contains(text)), "{args:?}: {error}");
        }
    }
    if !has_device() {
        let error = refusal(&quire(&["info", MODEL, "--device", "cuda"]));
        assert!(error.contains("--device cpu"), "{error}");
        let against = ["verify", MODEL, "--layers", "--against", "cuda"];
        assert!(refusal(&quire(&against)).contains("--device cpu"));
    }
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_build_without_the_backend_says_so() {
    for device in ["cuda", "cuda:1"] {
        let error = refusal(&quire(&["info", MODEL, "--device", device]));
        assert!(error.contains("this build has no CUDA backend"), "{error}");
    }
    assert!(!has_device());
}

#[test]
fn auto_takes_the_cpu_where_there_is_no_device_and_says_so_among_notes_only() {
    if has_device() {
        return;
    }
    let generate = ["generate", MODEL, "--prompt", "x", "--max-tokens", "2", "--temperature", "0"];
    let run = |flags: &[&str]| {
        let output = quire(&[&generate[..], flags].concat());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        output
    };
    let told = |output: &Output| {
        let text = stderr(output);
        text.lines().filter(|line| line.contains("device: cpu (")).count()
    };
    let (auto, cpu) = (run(&[]), run(&["--device", "cpu"]));
    assert_eq!(stdout(&auto), stdout(&cpu));
    assert_eq!((told(&auto), told(&cpu)), (1, 0), "{}", stderr(&auto));
    for quiet in ["--quiet", "--json"] {
        assert_eq!(told(&run(&[quiet])), 0, "{quiet}");
    }
    // Those of a device do no harm where nobody chose one.
    run(&["--gemm", "cublas", "--enforce-eager"]);
    let refused =
        refusal(&quire(&[&generate[..], &["--device", "cpu", "--gemm", "cublas"]].concat()));
    assert!(refused.contains("--gemm is for a CUDA device, not for --device cpu"), "{refused}");
}

#[test]
fn info_says_what_the_model_runs_on() {
    let info = |flags: &[&str]| {
        let output = quire(&[&["info", MODEL, "--json"][..], flags].concat());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        json_lines(&stdout(&output)).remove(0)
    };
    let cpu = info(&["--device", "cpu"]);
    assert_eq!((&cpu["device"], &cpu["backend"]), (&"cpu".into(), &"cpu".into()));
    assert_eq!((&cpu["cuda"], &cpu["async_scheduling"]), (&Value::Null, &false.into()));
    let reference = info(&["--backend", "reference"]);
    assert_eq!(reference["device"], "reference");
    if !has_device() {
        assert_eq!(info(&[])["device"], "cpu");
        let table = stdout(&quire(&["info", MODEL]));
        assert!(table.contains("\ndevice              cpu ("), "{table}");
    }
    let table = stdout(&quire(&["info", MODEL, "--device", "cpu"]));
    assert!(table.contains("\ndevice              cpu\n"), "{table}");
}

#[test]
fn the_help_lists_the_flags_of_devices() {
    let help = stdout(&quire(&["generate", "--help"]));
    for text in [
        "--device <DEVICE>",
        "[default: auto]",
        "--backend]",
        "--gemm <GEMM>",
        "triton:",
        "cublas:",
        "--enforce-eager",
        "--no-async-scheduling",
    ] {
        assert!(help.contains(text), "{text}: {help}");
    }
}
