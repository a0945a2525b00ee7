//! The build script's work, on a small folder of sources and one of PTX.
//!
//! `/bin/sh` takes the part of Python, and `aot.py` is a shell script that does what a test wants.
#![cfg(unix)]

use std::fs;
use std::path::{Path, PathBuf};

use steps::{Origin, Paths};
use tempfile::TempDir;

#[path = "../build/mod.rs"]
mod steps;

/// Hash of [`SOURCES`], by `variants.source_hash` of `kernels-triton/`.
const SOURCE_HASH: &str = "1009c2b385da0a3f7b44c18f5a210fa12da8fb727d60face79e5df9d177862ba";
/// The same after [`Fixture::change_kernel`].
const CHANGED_HASH: &str = "50328e818d40d513c84ca4ee74b7ebacf03209624d8ece69d7c105bf2bfcf29d";

/// Paths below the folder of sources, and their text. Not all are part of the hash.
const SOURCES: &[(&str, &str)] = &[
    ("aot.py", ". \"$(dirname \"$0\")/answer.sh\"\n"),
    ("requirements.txt", "triton==0\n"),
    ("variants.py", "# table\n"),
    ("variants.yaml", "kernels: []\n"),
    ("README.md", "Read me.\n"),
    ("memory/kernels.py", "# kernels\n"),
    ("memory/helper.py", "# helper\n"),
    ("memory/naive.py", "# reference\n"),
    ("memory/test_memory.py", "# test\n"),
    ("memory/notes.txt", "notes\n"),
    // Sorts before `memory/`, though `memory` sorts before `memory-more`.
    ("memory-more/kernels.py", "# more\n"),
    ("tools/tool.py", "# no kernels here\n"),
];

const PTX: &str = ".version 8.0\n.target sm_80\n.visible .entry copy(.param .u64 copy_param_0)\n";

const MANIFEST: &str = "\
triton: 0.0.0
source_hash: SOURCE_HASH
kernels:
- name: copy
  family: memory
  why: Copies.
  args:
  - {name: out, type: '*{dtype}:16', ptr: true, dtype: '{dtype}', hint: 16, doc: '[n]'}
  - {name: count, type: 'i32:16', ptr: false, dtype: i32, hint: 16, doc: n}
  variants:
  - name: copy_bf16
    target: sm_80
    ptx_version: 80
    file: ptx/sm_80/copy_bf16.ptx
    sha256: cb6d01ae9575966e39aabcc3a7d58ae3c49489db661a0ace2cdf908a7a6894c5
    key: ''
    entry: copy
    types: {dtype: bf16}
    constexpr: {BLOCK: 64, FAST: true}
    num_warps: 4
    num_stages: 1
    shared_bytes: 0
    reqntid: 128
    global_scratch: 0
    profile_scratch: 0
";

struct Fixture {
    folder: TempDir,
}

impl Fixture {
    fn new() -> Self {
        let fixture = Fixture { folder: TempDir::new().expect("a temporary folder") };
        for (path, text) in SOURCES {
            fixture.write(&format!("sources/{path}"), text);
        }
        fixture.write("committed/ptx/sm_80/copy_bf16.ptx", PTX);
        fixture.write("committed/manifest.yaml", &MANIFEST.replace("SOURCE_HASH", SOURCE_HASH));
        fixture
    }

    fn path(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().expect("a file has a folder")).expect("a new folder");
        fs::write(path, text).expect("a writable file");
    }

    fn read(&self, path: &str) -> String {
        fs::read_to_string(self.path(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    /// Replaces text that must be there.
    fn edit(&self, path: &str, old: &str, new: &str) {
        let text = self.read(path);
        assert!(text.contains(old), "{path} has no {old:?}");
        self.write(path, &text.replace(old, new));
    }

    fn change_kernel(&self) {
        self.edit("sources/memory/kernels.py", "# kernels", "# other kernels");
    }

    /// Makes `aot.py` do this; `$2` is the folder it writes to.
    fn answer(&self, script: &str) {
        self.write("sources/answer.sh", script);
    }

    fn paths(&self) -> Paths {
        Paths {
            committed: self.path("committed"),
            sources: Some(self.path("sources")),
            out: self.path("out"),
            python: Some(PathBuf::from("/bin/sh")),
        }
    }

    fn run(&self) -> Result<Origin, String> {
        steps::run(&self.paths()).map_err(|error| format!("{error:#}"))
    }

    fn error(&self) -> String {
        self.run().expect_err("a refusal")
    }
}

fn has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{text:?} has no {part:?}");
    }
}

#[test]
fn unchanged_sources_embed_the_committed_files() {
    let fixture = Fixture::new();
    assert_eq!(fixture.run(), Ok(Origin::Committed));
    let source = fixture.read("out/kernels.rs");
    has(&source, &["pub struct Copy<Dtype: Element>", "/// \\[n\\]. Aligned to 16 bytes."]);
    has(&source, &["pub out: DevicePtr<Dtype>", "pub count: i32", "(\"FAST\", 1)"]);
    assert!(fixture.path("out/ptx.lz4").exists() && !fixture.path("out/aot").exists());
}

#[test]
fn what_the_hash_does_not_cover_may_change() {
    let fixture = Fixture::new();
    for path in ["README.md", "memory/naive.py", "memory/test_memory.py", "tools/tool.py"] {
        fixture.write(&format!("sources/{path}"), "changed");
    }
    assert_eq!(fixture.run(), Ok(Origin::Committed));
}

#[test]
fn a_packaged_crate_has_no_sources() {
    let fixture = Fixture::new();
    let paths = Paths { sources: None, ..fixture.paths() };
    fixture.edit("committed/manifest.yaml", SOURCE_HASH, "whatever");
    assert_eq!(steps::run(&paths).expect("it embeds"), Origin::Committed);
    assert_eq!(steps::watched(&paths).expect("a list").len(), 2);
}

#[test]
fn changed_sources_are_compiled_into_the_output_folder() {
    let fixture = Fixture::new();
    fixture.change_kernel();
    // It finds a copy of the committed files, so that it has to compile only what changed.
    fixture
        .answer(&format!("sed -i -e s/{SOURCE_HASH}/{CHANGED_HASH}/ -e s/Copies/New/ $2/*.yaml"));
    assert_eq!(fixture.run(), Ok(Origin::Compiled));
    has(&fixture.read("out/kernels.rs"), &["/// New."]);
    has(&fixture.read("committed/manifest.yaml"), &[SOURCE_HASH, "Copies"]);
    // A second build goes on from there.
    fixture.answer(&format!("grep -q {CHANGED_HASH} $2/manifest.yaml"));
    assert_eq!(fixture.run(), Ok(Origin::Compiled));
}

#[test]
fn a_missing_python_is_an_error_with_the_command_to_run() {
    let fixture = Fixture::new();
    fixture.change_kernel();
    let error = steps::run(&Paths { python: None, ..fixture.paths() }).expect_err("no Python");
    let command = format!("make -C {} setup", fixture.folder.path().display());
    has(&format!("{error:#}"), &[&command, "QUIRE_PYTHON", ".venv/bin/python", "No such file"]);
}

#[test]
fn a_failing_compiler_is_quoted() {
    let fixture = Fixture::new();
    fixture.change_kernel();
    fixture.answer("echo 'aot: kernel memory.copy: bad' >&2; exit 1");
    has(&fixture.error(), &["aot.py", "--out", "exit status: 1", "aot: kernel memory.copy: bad"]);
}

#[test]
fn two_rules_for_the_hash_are_noticed() {
    let fixture = Fixture::new();
    fixture.change_kernel();
    fixture.answer("true");
    has(&fixture.error(), &[SOURCE_HASH, CHANGED_HASH, "variants.py", "sources.rs"]);
}

#[test]
fn tampered_and_missing_files_are_refused() {
    let fixture = Fixture::new();
    fixture.edit("committed/ptx/sm_80/copy_bf16.ptx", "8.0", "8.1");
    has(&fixture.error(), &["copy_bf16.ptx: SHA-256 is ", "the manifest has "]);
    fs::remove_file(fixture.path("committed/ptx/sm_80/copy_bf16.ptx")).expect("a file");
    has(&fixture.error(), &["copy_bf16.ptx", "No such file"]);
    fixture.write("committed/manifest.yaml", "kernels: [");
    has(&fixture.error(), &["manifest.yaml: "]);
}

#[test]
fn manifests_that_cannot_be_launched_are_refused() {
    for (old, new, message) in [
        ("global_scratch: 0", "global_scratch: 64", "variant copy_bf16: needs 64 bytes of global"),
        ("profile_scratch: 0", "profile_scratch: 8", "8 of profile scratch memory"),
        ("target: sm_80", "target: sm_100f", "target `sm_100f` has neither the form"),
        ("types: {dtype: bf16}", "types: {}", "gives types to {}; the arguments use {\"dtype\"}"),
        ("types: {dtype: bf16}", "types: {dtype: fp8}", "unknown type `fp8`"),
        ("dtype: i32,", "dtype: bf16,", "argument count: no number has type `bf16`"),
        ("dtype: i32,", "dtype: fp32,", "argument count: a float has no multiples"),
        ("dtype: i32,", "dtype: '{dtype}',", "argument count: a type variable stands for"),
        ("hint: 16, doc: n", "hint: 0, doc: n", "argument count: a multiple of 0"),
        ("{name: count", "{name: type", "`type` is a keyword of Rust"),
        ("{name: count", "{name: no-name", "`no-name` is not in snake_case"),
        ("{name: count", "{name: out", "argument out is listed twice"),
        ("FAST: true", "FAST: 1.5", "manifest.yaml"),
        ("    reqntid: 128\n", "", "missing field `reqntid`"),
    ] {
        let fixture = Fixture::new();
        fixture.edit("committed/manifest.yaml", old, new);
        has(&fixture.error(), &["manifest.yaml", message]);
    }
    let fixture = Fixture::new();
    let manifest = fixture.read("committed/manifest.yaml");
    let (head, kernel) = manifest.split_once("kernels:\n").expect("a list of kernels");
    fixture.write("committed/manifest.yaml", &format!("{head}kernels:\n{kernel}{kernel}"));
    has(&fixture.error(), &["lists kernel copy twice"]);
    let (args, variant) = kernel.split_once("  variants:\n").expect("a list of variants");
    let twice = format!("{head}kernels:\n{args}  variants:\n{variant}{variant}");
    fixture.write("committed/manifest.yaml", &twice);
    has(&fixture.error(), &["variant copy_bf16 is listed twice for sm_80"]);
    fixture.write("committed/manifest.yaml", &format!("{head}kernels:\n{args}  variants: []\n"));
    has(&fixture.error(), &["kernel copy: it has no variant"]);
    fixture.write("committed/manifest.yaml", &format!("{head}kernels: []\n"));
    has(&fixture.error(), &["lists no kernel"]);
}

#[test]
fn targets_are_listed_from_special_to_general() {
    let fixture = Fixture::new();
    let manifest = fixture.read("committed/manifest.yaml");
    let (_, variant) = manifest.split_once("  variants:\n").expect("a list of variants");
    let more = ["sm_90", "sm_100a", "sm_90a"]
        .map(|target| variant.replace("sm_80\n", &format!("{target}\n")));
    fixture.write("committed/manifest.yaml", &(manifest.clone() + &more.concat()));
    assert_eq!(fixture.run(), Ok(Origin::Committed));
    let source = fixture.read("out/kernels.rs");
    let (_, targets) = source.split_once("static TARGETS: [Target; 4] = [").expect("a table");
    let mut rest = targets;
    for (name, major, minor, exact) in [
        ("sm_100a", 10, 0, true),
        ("sm_90a", 9, 0, true),
        ("sm_90", 9, 0, false),
        ("sm_80", 8, 0, false),
    ] {
        let row = format!(
            "{{ name: \"{name}\", capability: ComputeCapability {{ major: {major}, minor: {minor} }}, \
             exact: {exact} }}"
        );
        rest = rest.split_once(&row).unwrap_or_else(|| panic!("no {row} in order: {targets}")).1;
    }
}

#[test]
fn every_file_that_matters_is_watched() {
    let fixture = Fixture::new();
    let watched = steps::watched(&fixture.paths()).expect("a list");
    for path in &watched {
        assert!(path.exists(), "{}", path.display());
    }
    let expected = ["aot.py", "memory-more/kernels.py", "memory/helper.py", "memory/kernels.py"];
    let expected = [&expected[..], &["requirements.txt", "variants.py", "variants.yaml"]].concat();
    let sources = fixture.path("sources");
    let expected: Vec<_> = expected.iter().map(|file| sources.join(file)).collect();
    assert_eq!(watched[2..], expected);
}

/// What is committed was compiled from what is committed: `make kernels` was run.
#[test]
fn the_committed_ptx_is_of_the_committed_sources() {
    let committed = Path::new(env!("CARGO_MANIFEST_DIR"));
    let out = TempDir::new().expect("a temporary folder");
    let paths = Paths {
        committed: committed.to_owned(),
        sources: Some(committed.join("../kernels-triton")),
        out: out.path().to_owned(),
        python: Some(PathBuf::from("/run `make kernels` and commit what it writes")),
    };
    assert_eq!(steps::run(&paths).map_err(|error| format!("{error:#}")), Ok(Origin::Committed));
}
