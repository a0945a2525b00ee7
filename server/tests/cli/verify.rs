//! `quire verify`.

use super::*;

/// The golden file with one change to one tensor's bytes.
fn changed_golden(dir: &TempDir, tensor: &str, change: impl Fn(&mut [u8])) -> String {
    use safetensors::{SafeTensors, tensor::TensorView};
    let bytes = fs::read(Path::new(MODEL).join("golden.safetensors")).unwrap();
    let golden = SafeTensors::deserialize(&bytes).unwrap();
    let mut data: Vec<u8> = golden.tensor(tensor).unwrap().data().to_vec();
    change(&mut data);
    let views = golden.tensors().into_iter().map(|(name, view)| {
        let shape = view.shape().to_vec();
        let bytes = if name == tensor { &data } else { view.data() };
        (name, TensorView::new(view.dtype(), shape, bytes).unwrap())
    });
    write(dir, "golden.safetensors", safetensors::serialize(views, None).unwrap())
}

/// Adds to the float at `at`.
fn add(at: usize, delta: f32) -> impl Fn(&mut [u8]) {
    move |data| {
        let bytes = &mut data[4 * at..4 * at + 4];
        let value = f32::from_le_bytes(bytes.try_into().unwrap()) + delta;
        bytes.copy_from_slice(&value.to_le_bytes());
    }
}

#[test]
fn verify_passes_on_every_backend_and_type() {
    for args in [
        &["--dtype", "f32"][..],
        &["--dtype", "bf16"],
        &["--dtype", "f32", "--block-size", "8", "--max-num-batched-tokens", "7"],
        &["--backend", "reference"],
        &["--isa", "portable", "--threads", "3"],
    ] {
        let output = quire(&[&["verify", MODEL][..], args].concat());
        let text = stdout(&output);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {text}{}", stderr(&output));
        assert!(text.contains("passed: 5 of 5 sequences"), "{text}");
    }
}

#[test]
fn verify_passes_with_preemption_in_the_middle_and_counts_it() {
    // The longest sequence fits; two of them do not.
    let flags = "--json --max-model-len 128 --num-blocks-override 16 --block-size 8 --device cpu";
    for (mode, kind, other, chunk) in [
        ("--preemption-mode recompute", "recompute", "swap", "64"),
        ("--preemption-mode swap --swap-space 8M", "swap", "recompute", "64"),
        ("--preemption-mode swap --swap-space 8M", "swap", "recompute", "16"),
    ] {
        let flags = format!("verify {MODEL} {flags} {mode} --max-num-batched-tokens {chunk}");
        let output = quire(&flags.split(' ').collect::<Vec<_>>());
        assert_eq!(output.status.code(), Some(0), "{}{}", stdout(&output), stderr(&output));
        let report = &json_lines(&stdout(&output))[0];
        let count = |kind| report[format!("num_preempted_{kind}")].as_u64().unwrap();
        assert!(count(kind) > 0, "{flags}: {report}");
        assert_eq!(count(other), 0, "{flags}");
        assert_eq!((&report["gemm"], &report["graphs"]), (&Value::Null, &Value::Null));
    }
}

#[test]
fn verify_finds_one_changed_logit_or_token() {
    let dir = tempfile::tempdir().unwrap();
    let verify = |golden: &str| quire(&["verify", MODEL, "--golden", golden, "--json"]);
    let within = verify(&changed_golden(&dir, "logits_2", add(17, 5e-4)));
    assert_eq!(within.status.code(), Some(0), "{}", stdout(&within));

    let differs = verify(&changed_golden(&dir, "logits_2", add(17, 0.01)));
    assert_eq!(differs.status.code(), Some(1), "{}", stderr(&differs));
    let report = &json_lines(&stdout(&differs))[0];
    assert_eq!(report["passed"], false);
    let passed: Vec<bool> =
        (0..5).map(|i| report["sequences"][i]["passed"].as_bool().unwrap()).collect();
    assert_eq!(passed, [true, true, false, true, true]);
    let max = report["sequences"][2]["max_abs_diff"]["value"].as_f64().unwrap();
    assert!((max - 0.01).abs() < 1e-3, "{max}");

    // Any other token is further than the tolerance below the maximum.
    let other = verify(&changed_golden(&dir, "greedy_1", |data| data[0] ^= 1));
    assert_eq!(other.status.code(), Some(1));
    let report = &json_lines(&stdout(&other))[0]["sequences"][1];
    assert_eq!(report["generated_agree"], 0);
    assert_eq!(report["decode_equals_prefill"], true);
}

#[test]
fn verify_compares_op_by_op() {
    let layers = |more: &[&str]| quire(&[&["verify", MODEL, "--layers"][..], more].concat());
    let shown = layers(&[]);
    assert_eq!(shown.status.code(), Some(0), "{}", stderr(&shown));
    let text = stdout(&shown);
    assert!(text.contains("\nlayer 2 ") && text.contains("qk_norm_rope_write_kv"), "{text}");
    assert!(
        text.contains("\npassed: every op within 1e-4 (cpu against reference, f32, "),
        "{text}"
    );

    let json = layers(&["--json", "--tokens", "5,6,7", "--against", "cpu", "--isa", "portable"]);
    let report = &json_lines(&stdout(&json))[0];
    assert_eq!(report["tokens"], serde_json::json!([5, 6, 7]));
    assert_eq!((&report["against"], &report["isa"]), (&"cpu".into(), &"portable".into()));
    assert_eq!((&report["passed"], &report["first_difference"]), (&true.into(), &Value::Null));
    assert_eq!(report["ops"].as_array().unwrap().len(), 1 + 8 * 3 + 3);

    let golden = fs::read(format!("{MODEL}/golden.safetensors")).unwrap();
    let golden = safetensors::SafeTensors::deserialize(&golden).unwrap();
    let lengths = (0..5).map(|i| golden.tensor(&format!("ids_{i}")).unwrap().shape()[0]);
    let longest = lengths.filter(|&len| len <= 64).max().unwrap();
    let recorded = &json_lines(&stdout(&layers(&["--json"])))[0];
    assert_eq!(recorded["tokens"].as_array().unwrap().len(), longest);

    let outside = refusal(&layers(&["--tokens", "1,320"]));
    assert!(outside.contains("token id 320 is outside the vocabulary of 320"), "{outside}");
}

#[test]
fn verify_refuses_golden_files_that_do_not_fit() {
    let dir = tempfile::tempdir().unwrap();
    let verify = |golden: &str| refusal(&quire(&["verify", MODEL, "--golden", golden]));
    let outside = verify(&changed_golden(&dir, "ids_2", |data| data[1] = 9));
    assert!(outside.contains("`ids_2`") && outside.contains("vocabulary of 320"), "{outside}");
    let nan = verify(&changed_golden(&dir, "logits_bf16_0", add(3, f32::NAN)));
    assert!(nan.contains("`logits_bf16_0`: has NaN at [0, 3]"), "{nan}");
    let path = changed_golden(&dir, "ids_0", |_| ());
    cut(Path::new(&path), 1000);
    assert!(verify(&path).contains("golden.safetensors: is not a safetensors file"));
    let missing = dir.path().join("missing").display().to_string();
    assert!(verify(&missing).contains(&missing));
}

#[test]
fn verify_looks_for_golden_files_in_folders_only() {
    let (dir, model) = model_copy();
    let golden = model.join("golden.safetensors");
    let verify = || refusal(&quire(&["verify", model.to_str().unwrap()]));
    fs::rename(&golden, dir.path().join("outside")).unwrap();
    let none = verify();
    assert!(none.contains("--golden") && none.contains("holds no golden.safetensors"), "{none}");
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("../outside", &golden).unwrap();
        assert!(verify().contains("is a link out of the model folder"), "{}", verify());
    }
    let help = stdout(&quire(&["verify", "--help"]));
    for text in ["Kullback-Leibler", "generated", "A GGUF file needs --golden"] {
        assert!(help.contains(text), "{help}");
    }
}
