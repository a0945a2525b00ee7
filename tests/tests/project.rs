//! Rules about the project itself: which crate may depend on which, the licences of dependencies,
//! where `unsafe` may stand, how long a file may be, and that the map of the repository names every
//! crate.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Each workspace crate's folder and the workspace crates it may depend on, in any way. `bench` stands
/// on no right-hand side, and `tests` on that of `bench` alone, which checks a GPU by the same cases;
/// `tests/ptxsim` is for `tests`.
const LAYERS: &[(&str, &[&str])] = &[
    ("kernels-ptx", &[]),
    ("kernels-cpu", &[]),
    ("engine", &["kernels-ptx", "kernels-cpu"]),
    ("model-zoo", &["engine"]),
    ("server", &["engine", "model-zoo"]),
    (
        "bench",
        &["kernels-ptx", "kernels-cpu", "engine", "model-zoo", "server", "tests", "tests/fakecuda"],
    ),
    ("tests/ptxsim", &[]),
    ("tests/fakecuda", &["tests/ptxsim"]),
    (
        "tests",
        &[
            "kernels-ptx",
            "kernels-cpu",
            "engine",
            "model-zoo",
            "server",
            "tests/fakecuda",
            "tests/ptxsim",
        ],
    ),
];

/// Files and folders (ending in `/`) in which `unsafe` may stand.
const UNSAFE_MODULES: &[&str] = &[
    "engine/src/backend/cuda/driver/",
    "kernels-cpu/src/",
    "model-zoo/src/mapped.rs",
    "tests/fakecuda/src/",
    "tests/fakecuda/tests/common/",
];

/// Lines a Rust file may have, tests included.
const MAX_FILE_LINES: usize = 700;

/// The keyword, spelt so that this file does not contain it.
const UNSAFE: &str = concat!("un", "safe");

#[test]
fn crates_depend_only_on_the_layers_below() {
    let metadata = metadata();
    let folders = workspace_folders(&metadata);
    let known: Vec<&str> = LAYERS.iter().map(|(folder, _)| *folder).collect();
    let mut faults = Vec::new();
    for package in array(&metadata, "packages") {
        let Some(folder) = folders.get(text(package, "name")) else { continue };
        let Some((_, allowed)) = LAYERS.iter().find(|(layer, _)| layer == folder) else {
            faults.push(format!("{folder} has no row in LAYERS, which has {known:?}"));
            continue;
        };
        for dependency in array(package, "dependencies") {
            let below = folders.get(text(dependency, "name"));
            if let Some(below) = below.filter(|below| !allowed.contains(&below.as_str())) {
                faults.push(format!("{folder} depends on {below}; it may depend on {allowed:?}"));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert_eq!(folders.len(), LAYERS.len(), "LAYERS names crates that the workspace does not have");
}

#[test]
fn every_dependency_has_a_permissive_licence() {
    let allowed = allowed_licences();
    let mut faults = Vec::new();
    for package in array(&metadata(), "packages") {
        let licence = package["license"].as_str().unwrap_or("");
        if !is_satisfied(licence, &allowed) {
            let (name, version) = (text(package, "name"), text(package, "version"));
            faults.push(format!("{name} {version}: {licence:?} is not covered by {allowed:?}"));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn unsafe_stands_only_in_the_named_modules() {
    let mut faults = Vec::new();
    for (path, source) in rust_files() {
        if UNSAFE_MODULES.iter().any(|module| is_in(&path, module)) {
            continue;
        }
        for (i, line) in source.lines().enumerate().filter(|(_, line)| has_unsafe(line)) {
            faults.push(format!("{path}:{}: {}", i + 1, line.trim()));
        }
    }
    assert!(faults.is_empty(), "{UNSAFE} outside of {UNSAFE_MODULES:?}:\n{}", faults.join("\n"));
}

#[test]
fn no_rust_file_is_too_long() {
    let lengths = rust_files().into_iter().map(|(path, source)| (path, source.lines().count()));
    let faults: Vec<_> = lengths.filter(|(_, lines)| *lines > MAX_FILE_LINES).collect();
    assert!(faults.is_empty(), "files with more than {MAX_FILE_LINES} lines: {faults:?}");
}

#[test]
fn the_map_names_every_crate() {
    let folders = workspace_folders(&metadata());
    let map = read(&root().join("ARCHITECTURE.md"));
    let words: Vec<&str> = map.split(|c: char| !c.is_alphanumeric() && c != '-').collect();
    let named = |folder: &str| folder.split('/').all(|part| words.contains(&part));
    let missing: Vec<_> = folders.values().filter(|folder| !named(folder)).collect();
    assert!(missing.is_empty(), "ARCHITECTURE.md does not name the folders {missing:?}");
    let readme = read(&root().join("README.md"));
    assert!(readme.contains("(ARCHITECTURE.md)"), "README.md does not link to ARCHITECTURE.md");
}

#[test]
fn licence_expressions_follow_spdx() {
    let allowed = ["MIT", "Zlib", "Apache-2.0 WITH LLVM-exception"].map(String::from);
    for yes in [
        "MIT",
        "GPL-3.0 OR MIT",
        "MIT/GPL-3.0",
        "MIT AND Zlib",
        "(GPL-3.0 OR MIT) AND Zlib",
        "Apache-2.0 WITH LLVM-exception",
        // AND binds more tightly than OR.
        "MIT OR Zlib AND GPL-3.0",
    ] {
        assert!(is_satisfied(yes, &allowed), "{yes}");
    }
    for no in [
        "",
        "GPL-3.0",
        "MIT AND GPL-3.0",
        "Apache-2.0",
        "(MIT OR Zlib) AND GPL-3.0",
        "MIT OR",
        "(MIT",
        "MIT)",
    ] {
        assert!(!is_satisfied(no, &allowed), "{no}");
    }
}

#[test]
fn the_keyword_is_found_in_code_alone() {
    for yes in ["{} {{", "pub {} fn f() {{", "let x = {}{{ *p }};", "{}", "#[{}(no_mangle)]"] {
        assert!(has_unsafe(&yes.replace("{}", UNSAFE)), "{yes}");
    }
    for no in ["// {} {{", "let a = 1; // {}", "#![forbid({}_code)]", "is_{}", "let {}ty = 1;"] {
        assert!(!has_unsafe(&no.replace("{}", UNSAFE)), "{no}");
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ has a parent").to_owned()
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// What `cargo metadata` says, dependencies of all platforms included; those not yet downloaded are
/// fetched.
fn metadata() -> Value {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--locked"])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("cargo metadata prints JSON")
}

fn array<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().unwrap_or_else(|| panic!("cargo metadata has no array {key}"))
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("cargo metadata has no string {key}"))
}

/// Name of each workspace crate → its folder, relative to the root.
fn workspace_folders(metadata: &Value) -> BTreeMap<String, String> {
    let members = array(metadata, "workspace_members");
    let packages = array(metadata, "packages").iter();
    let folder = |package: &Value| {
        let manifest = Path::new(text(package, "manifest_path"));
        let folder = manifest.parent().expect("a manifest lies in a folder");
        let root = Path::new(text(metadata, "workspace_root"));
        folder.strip_prefix(root).expect("a member lies in the workspace").display().to_string()
    };
    packages
        .filter(|package| members.contains(&package["id"]))
        .map(|package| (text(package, "name").to_owned(), folder(package)))
        .collect()
}

/// Path from the root, with `/`, and content of each Rust file in the crates' folders.
fn rust_files() -> Vec<(String, String)> {
    let root = root();
    let mut files = Vec::new();
    let mut folders: Vec<PathBuf> = LAYERS.iter().map(|(folder, _)| root.join(folder)).collect();
    while let Some(folder) = folders.pop() {
        let entries =
            fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        for path in entries.map(|entry| entry.expect("a readable folder").path()) {
            if path.is_dir() && !path.ends_with("target") {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(&root).expect("below the root").display().to_string();
                files.push((name.replace('\\', "/"), read(&path)));
            }
        }
    }
    assert!(
        files.iter().any(|(path, _)| path == "tests/tests/project.rs"),
        "the walk misses files"
    );
    files.sort();
    files
}

/// Whether `path` is the file `module`, or lies in it where it is a folder.
fn is_in(path: &str, module: &str) -> bool {
    if module.ends_with('/') { path.starts_with(module) } else { path == module }
}

/// True where the code of `line`, up to a `//`, has the keyword as a word of its own.
fn has_unsafe(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or("");
    code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == UNSAFE)
}

/// The list `allow` of deny.toml: the one place that names permissive licences.
fn allowed_licences() -> Vec<String> {
    let deny = read(&root().join("deny.toml"));
    let (_, rest) = deny.split_once("\nallow = [").expect("deny.toml has a list `allow`");
    let (list, _) = rest.split_once(']').expect("the list ends");
    list.split('"').skip(1).step_by(2).map(String::from).collect()
}

/// Whether some choice in the SPDX `expression` needs only `allowed` licences. The old `/` counts
/// as OR; what does not parse is not satisfied.
fn is_satisfied(expression: &str, allowed: &[String]) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let tokens: Vec<&str> = spaced.split_whitespace().collect();
    let mut parser = Licence { tokens: &tokens, allowed };
    parser.any() == Some(true) && parser.tokens.is_empty()
}

/// Recursive descent over the tokens that are left; `None` is a syntax error.
struct Licence<'a> {
    tokens: &'a [&'a str],
    allowed: &'a [String],
}

impl Licence<'_> {
    /// `all OR all OR …`
    fn any(&mut self) -> Option<bool> {
        let mut satisfied = self.all()?;
        while self.take("OR") {
            satisfied |= self.all()?;
        }
        Some(satisfied)
    }

    /// `one AND one AND …`
    fn all(&mut self) -> Option<bool> {
        let mut satisfied = self.one()?;
        while self.take("AND") {
            satisfied &= self.one()?;
        }
        Some(satisfied)
    }

    /// `( any )`, `ID` or `ID WITH EXCEPTION`
    fn one(&mut self) -> Option<bool> {
        if self.take("(") {
            let satisfied = self.any()?;
            return self.take(")").then_some(satisfied);
        }
        let mut licence = self.word()?.to_owned();
        if self.take("WITH") {
            licence = format!("{licence} WITH {}", self.word()?);
        }
        Some(self.allowed.contains(&licence))
    }

    fn take(&mut self, token: &str) -> bool {
        let found = self.tokens.first() == Some(&token);
        self.tokens = &self.tokens[usize::from(found)..];
        found
    }

    fn word(&mut self) -> Option<&str> {
        let (first, rest) = self.tokens.split_first()?;
        self.tokens = rest;
        (!["(", ")", "AND", "OR", "WITH"].contains(first)).then_some(*first)
    }
}
