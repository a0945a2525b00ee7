//! A rehearsal of `make gpu-check` on the stand-in driver: every stage runs, all that must hold does,
//! and nothing claims a speed.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Each stage, and whether it checks and whether it measures.
const STAGES: [(&str, bool, bool); 8] = [
    ("invariance", true, false),
    ("conformance", true, false),
    ("ceilings", false, true),
    ("attention", false, true),
    ("gemm", false, true),
    ("block-size", false, true),
    ("overhead", false, true),
    ("end-to-end", false, true),
];

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data")
}

fn gpu_check(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-check"));
    command.arg("--dry-run").args(args).arg("--data").arg(data()).output().expect("it starts")
}

fn array<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().unwrap_or_else(|| panic!("no array {key} in {value}"))
}

#[test]
fn a_dry_run_goes_through_every_stage() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("results/report.json");
    let output = gpu_check(&["--json", file.to_str().expect("a name")]);
    let (table, progress) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{table}\n{progress}");
    assert!(table.contains("dry run: nothing was measured"), "{table}");
    let report: Value =
        serde_json::from_slice(&std::fs::read(&file).expect("a report")).expect("JSON");
    assert_eq!((&report["dry_run"], &report["passed"]), (&true.into(), &true.into()));
    assert_eq!(report["device"]["name"], "Fake CUDA device");
    let stages = array(&report, "stages");
    assert_eq!(stages.len(), STAGES.len());
    for (stage, (name, checks, measures)) in stages.iter().zip(STAGES) {
        assert_eq!(stage["name"], name);
        assert_eq!(stage["error"], Value::Null);
        assert_eq!(!array(stage, "checks").is_empty(), checks, "{stage}");
        assert!(array(stage, "checks").iter().all(|check| check["passed"] == true), "{stage}");
        assert_eq!(!array(stage, "figures").is_empty(), measures, "{stage}");
        for figure in array(stage, "figures") {
            let numbers = ["value", "ms", "ceiling", "percent", "aim"];
            assert!(numbers.iter().all(|number| figure[number].is_null()), "{figure}");
        }
        // Whether there are transformers is up to the machine.
        let left_out = array(stage, "left_out").iter().filter_map(Value::as_str);
        let left_out: Vec<&str> = left_out.filter(|what| !what.contains("transformers")).collect();
        assert!(left_out.is_empty(), "{left_out:?}");
    }
}

#[test]
fn what_there_is_no_time_for_is_left_out_and_no_failure() {
    let output = gpu_check(&["--only", "invariance,gemm", "--budget", "0"]);
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{table}");
    assert_eq!(table.matches("left out: all of it: no time").count(), 2, "{table}");
    assert!(table.contains("0 checks, 0 failed; 2 stages, 0 ended early"), "{table}");
}

#[test]
fn stages_and_folders_that_are_not_there_are_named() {
    let output = gpu_check(&["--only", "speed"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert!(error.contains("there are invariance, conformance"), "{error}");
    let output = Command::new(env!("CARGO_BIN_EXE_gpu-check"))
        .args(["--dry-run", "--data", "no/such/folder"])
        .output()
        .expect("it starts");
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("no/such/folder/goldens is no folder; say --data FOLDER"), "{error}");
}
