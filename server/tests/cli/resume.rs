//! Batches that go on where they were interrupted, or stop where they fail.

use super::*;

/// Results without what differs from run to run.
fn without_timings(text: &str) -> Vec<Value> {
    let mut results = json_lines(text);
    for result in &mut results {
        result.as_object_mut().expect("an object").remove("timings");
    }
    results
}

/// `count` requests, some of them bad or with several sequences.
fn requests(count: usize) -> String {
    let line = |i: usize| match i % 10 {
        3 => format!("{{\"id\": {i}, \"prompt\": 5}}\n"),
        5 => format!("{{\"prompt\": \"Line {i}\", \"n\": 2, \"max_tokens\": 1}}\n"),
        7 => format!("\n{{\"id\": \"{i}\", \"prompt\": \"Line\", \"max_tokens\": 3}}\n"),
        _ => format!("{{\"id\": {i}, \"prompt\": \"x\", \"max_tokens\": 1}}\n"),
    };
    (0..count).map(line).collect()
}

fn run(input: &str, output: &str, more: &[&str]) -> Output {
    quire(&[&["generate", MODEL, "--input", input, "--output", output][..], more].concat())
}

#[cfg(unix)]
#[test]
fn a_run_that_was_killed_is_resumed() {
    use std::time::{Duration, Instant};
    let dir = tempfile::tempdir().unwrap();
    let input = write(&dir, "in.jsonl", requests(2000));
    let [whole, cut] = ["whole", "cut"].map(|name| dir.path().join(name).display().to_string());
    let once = run(&input, &whole, &["--resume", "--json"]);
    assert_eq!(once.status.code(), Some(1), "{}", stderr(&once));

    let args = ["generate", MODEL, "--input", &input, "--output", &cut, "--resume"];
    let mut child = command(&args).stderr(Stdio::null()).spawn().unwrap();
    let start = Instant::now();
    let enough = fs::metadata(&whole).unwrap().len() / 3;
    while fs::metadata(&cut).map_or(0, |metadata| metadata.len()) < enough {
        assert!(start.elapsed() < Duration::from_secs(60), "no results");
        std::thread::sleep(Duration::from_millis(2));
    }
    // SIGKILL.
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().code(), None, "the run ended before it was killed");
    let left = fs::read_to_string(&cut).unwrap();

    let resumed = run(&input, &cut, &["--resume", "--json"]);
    assert_eq!(resumed.status.code(), Some(1), "{}", stderr(&resumed));
    let result = fs::read_to_string(&cut).unwrap();
    assert!(without_timings(&result) == without_timings(&fs::read_to_string(&whole).unwrap()));
    // What was there is untouched but for the last group.
    let kept = result.bytes().zip(left.bytes()).take_while(|(a, b)| a == b).count();
    assert!(kept + 2000 > left.len(), "{kept} of {}", left.len());
    let summary = |output: &Output| -> Value {
        serde_json::from_str(stderr(output).lines().last().unwrap()).unwrap()
    };
    assert!(summary(&resumed)["kept"].as_u64().unwrap() > 300, "{}", summary(&resumed));
    assert_eq!(summary(&once)["kept"], 0);

    // Nothing is left to do, whatever is cut off the last line.
    let again = run(&input, &cut, &["--resume"]);
    assert!(stderr(&again).contains("requests  0 finished, 0 failed, 2000 done before"));
    fs::OpenOptions::new()
        .write(true)
        .open(&cut)
        .unwrap()
        .set_len(result.len() as u64 - 1)
        .unwrap();
    run(&input, &cut, &["--resume"]);
    assert!(without_timings(&fs::read_to_string(&cut).unwrap()) == without_timings(&result));
}

#[test]
fn results_of_other_requests_are_not_resumed() {
    let dir = tempfile::tempdir().unwrap();
    let input = write(&dir, "in.jsonl", requests(3));
    let output = write(&dir, "out.jsonl", "");
    assert_eq!(run(&input, &output, &[]).status.code(), Some(0));
    let before = fs::read_to_string(&output).unwrap();
    fs::write(&input, requests(3).replace("\"id\": 1", "\"id\": \"one\"")).unwrap();
    let other = refusal(&run(&input, &output, &["--resume"]));
    let expected =
        format!("{output}:2: this result has the id 1, but line 2 of {input} has \"one\"");
    assert!(other.contains(&expected), "{other}");
    assert_eq!(fs::read_to_string(&output).unwrap(), before);
    let none = refusal(&quire(&["generate", MODEL, "--input", &input, "--resume"]));
    assert!(none.contains("--output FILE"), "{none}");
    let text = refusal(&run(&input, &output, &["--resume", "--format", "text"]));
    assert!(text.contains("--format jsonl"), "{text}");
}

#[test]
fn the_first_failure_can_end_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let good = "{\"prompt\": \"x\", \"max_tokens\": 1}\n";
    let bad = "{\"prompt\": \"x\", \"top_p\": 7}\n";
    let lines = |bad: &str| good.repeat(9) + bad + &good.repeat(2000);
    let input = write(&dir, "in.jsonl", lines(bad));
    let output = dir.path().join("out.jsonl").display().to_string();
    let flags = ["--fail-fast", "--max-num-seqs", "2"];
    let stopped = run(&input, &output, &flags);
    assert_eq!(stopped.status.code(), Some(1), "{}", stderr(&stopped));
    let shown = stderr(&stopped);
    assert!(shown.contains(&format!("error: {input}:10: top_p must be")), "{shown}");
    assert!(shown.contains("error: stopped at the first failure; "), "{shown}");
    let left = json_lines(&fs::read_to_string(&output).unwrap());
    // What came before it is finished.
    assert_eq!(left.len(), 10, "{left:?}");
    assert_eq!(left.last().unwrap()["error"]["line"], 10);

    // The line is mended, and the run goes on.
    fs::write(&input, lines(good)).unwrap();
    let resumed = run(&input, &output, &[&flags[..], &["--resume"]].concat());
    assert_eq!(resumed.status.code(), Some(0), "{}", stderr(&resumed));
    let results = json_lines(&fs::read_to_string(&output).unwrap());
    let lines: Vec<u64> = results.iter().map(|result| result["line"].as_u64().unwrap()).collect();
    assert_eq!(lines, (1..=2010).collect::<Vec<_>>());
}

/// The engine refuses it; nothing is sized by it before.
#[test]
fn x16_a_gigantic_n_is_one_error_and_the_run_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let line = |n: u64| format!("{{\"prompt\": \"ab\", \"n\": {n}, \"max_tokens\": 1}}\n");
    let input = write(&dir, "in.jsonl", line(100_000_000_000) + &line(2));
    let output = dir.path().join("out.jsonl").display().to_string();
    let ended = run(&input, &output, &[]);
    assert_eq!(ended.status.code(), Some(1), "{}", stderr(&ended));
    let results = json_lines(&fs::read_to_string(&output).unwrap());
    assert_eq!(results.len(), 3, "{results:?}");
    let message = results[0]["error"]["message"].as_str().unwrap();
    assert!(message.contains("n must be from 1 to 1024"), "{message}");
}
