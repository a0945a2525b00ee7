//! Instruction sets: each one forced, and what is left on a CPU with less than this one.

use super::*;
use quire_engine::backend::Isa;

#[test]
fn verify_passes_for_every_architecture_on_every_instruction_set() {
    let models = fs::read_dir(Path::new(MODEL).parent().unwrap()).unwrap();
    let models: Vec<PathBuf> = models.map(|entry| entry.unwrap().path()).collect();
    assert!(models.len() > 1);
    for model in &models {
        for isa in Isa::available() {
            for dtype in ["f32", "bf16"] {
                let model = model.to_str().unwrap();
                let flags = ["--device", "cpu", "--isa", isa.name(), "--dtype", dtype, "--json"];
                let output = quire(&[&["verify", model], &flags[..]].concat());
                let case = format!("{model} {isa} {dtype}: {}", stderr(&output));
                assert_eq!(output.status.code(), Some(0), "{case}");
                let report = &json_lines(&stdout(&output))[0];
                assert_eq!((&report["isa"], &report["dtype"]), (&isa.name().into(), &dtype.into()));
                assert_eq!(report["passed"], true, "{case}");
            }
        }
    }
}

#[test]
fn an_instruction_set_that_is_not_there_is_refused_by_name() {
    let neon = quire(&["verify", MODEL, "--device", "cpu", "--isa", "neon"]);
    if Isa::Neon.is_available() {
        assert_eq!(neon.status.code(), Some(0));
    } else {
        let refused = refusal(&neon);
        assert!(refused.contains("does not run the neon kernels; it runs portable"), "{refused}");
    }
    let unknown = refusal(&quire(&["verify", MODEL, "--device", "cpu", "--isa", "sse9"]));
    assert!(unknown.contains("--isa") && unknown.contains("sse9"), "{unknown}");
}

/// The binary on the CPU `cpu`, as qemu makes it; none where there is no qemu.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn quire_on(cpu: &str, args: &[&str]) -> Option<Output> {
    let mut qemu = Command::new("qemu-x86_64");
    // It warns on standard error of what it lacks of that CPU, among the lines of the binary.
    qemu.args(["-cpu", cpu, env!("CARGO_BIN_EXE_quire")]).args(args);
    match qemu.stdin(Stdio::null()).output() {
        Ok(output) => Some(output),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => panic!("qemu-x86_64: {error}"),
    }
}

/// On a CPU without AVX-512, and on one without AVX, the binary starts, takes the best path there
/// is, and gives the bits of that path here.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[test]
fn lesser_cpus_run_what_they_have() {
    let dir = tempfile::tempdir().unwrap();
    let line = r#"{"prompt_token_ids":[5,6,7,8,9,10,11],"max_tokens":6,"ignore_eos":true,"temperature":0,"logprobs":2}"#;
    let input = write(&dir, "in.jsonl", format!("{line}\n"));
    for (cpu, isa, missing) in
        [("Haswell", Isa::Avx2, "avx512"), ("Nehalem", Isa::Portable, "avx2")]
    {
        let Some(output) = quire_on(cpu, &["info", MODEL, "--device", "cpu", "--json"]) else {
            eprintln!("note: without qemu-x86_64 (package qemu-user) nothing is checked here");
            return;
        };
        assert_eq!(output.status.code(), Some(0), "{cpu}: {}", stderr(&output));
        assert_eq!(json_lines(&stdout(&output))[0]["isa"], isa.name(), "{cpu}");

        let verify = ["verify", MODEL, "--device", "cpu", "--dtype", "bf16"];
        let verified = quire_on(cpu, &verify).unwrap();
        assert!(stdout(&verified).contains("passed: 5 of 5 sequences"), "{}", stderr(&verified));
        let refused = quire_on(cpu, &[&verify[..], &["--isa", missing]].concat()).unwrap();
        let problem = format!("does not run the {missing} kernels; it runs portable");
        assert!(stderr(&refused).contains(&problem), "{cpu}: {}", stderr(&refused));
        assert_eq!(refused.status.code(), Some(2));

        if !isa.is_available() {
            continue; // This CPU is less than that one, and has nothing to compare with.
        }
        let generate = ["generate", MODEL, "--input", &input, "--device", "cpu", "--threads", "2"];
        for more in [&["--dtype", "f32"][..], &["--dtype", "bf16"], &["--quantization", "int8"]] {
            let flags = [&generate[..], more].concat();
            let here = quire(&[&flags[..], &["--isa", isa.name()]].concat());
            let there = quire_on(cpu, &flags).unwrap();
            let results = [here, there].map(|output| {
                assert_eq!(output.status.code(), Some(0), "{cpu}: {}", stderr(&output));
                let result = json_lines(&stdout(&output)).remove(0);
                assert_eq!(result["token_ids"].as_array().unwrap().len(), 6);
                (result["token_ids"].clone(), result["logprobs"].clone())
            });
            assert_eq!(results[0], results[1], "{cpu} {more:?}");
        }
    }
}
