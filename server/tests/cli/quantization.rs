//! `--quantization`, wherever it is shown.

use super::*;

#[test]
fn int8_weights_are_planned_shown_and_run() {
    let info = |flags: &[&str]| {
        let output = quire(&[&["info", MODEL, "--json", "--device", "cpu"], flags].concat());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        json_lines(&stdout(&output)).remove(0)
    };
    let (plain, int8) = (info(&[]), info(&["--quantization", "int8"]));
    // There are no blocks to keep.
    assert_eq!(plain["quantization"], "none");
    let matrices = "int8 (14 of 14 matrices)";
    assert_eq!((&int8["quantization"], &int8["dtype"]), (&matrices.into(), &"f32".into()));
    let part = |info: &Value, name: &str| info["memory"][name].as_u64().unwrap();
    assert!(part(&int8, "weights") * 3 < part(&plain, "weights"), "{int8}");
    assert!(part(&int8, "workspace") > part(&plain, "workspace"), "{int8}");

    let table = stdout(&quire(&["info", MODEL, "--device", "cpu", "--quantization", "int8"]));
    assert!(table.contains(&format!("quantization        {matrices}")), "{table}");

    let flags = ["--quantization", "int8", "--device", "cpu"];
    let verified = quire(&[&["verify", MODEL, "--dtype", "bf16"], &flags[..]].concat());
    assert!(stdout(&verified).contains(&format!(", bf16, {matrices}, ")), "{}", stdout(&verified));
    let verified = quire(&[&["verify", MODEL, "--json"], &flags[..]].concat());
    assert_eq!(json_lines(&stdout(&verified))[0]["quantization"], matrices);

    let layers = quire(&[&["verify", MODEL, "--layers", "--tokens", "1,2"], &flags[..]].concat());
    assert!(stdout(&layers).contains("weights int8, 2 tokens)"), "{}", stdout(&layers));
}

#[test]
fn int8_weights_are_refused_by_name_where_there_are_none() {
    for device in ["reference", "cuda"] {
        let output = quire(&["info", MODEL, "--device", device, "--quantization", "int8"]);
        let problem = format!("--quantization int8 is for the CPU, not for --device {device}");
        assert!(refusal(&output).contains(&problem), "{}", stderr(&output));
    }
}
