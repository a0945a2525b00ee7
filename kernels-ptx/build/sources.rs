//! The hash over `kernels-triton/`, by the rule of `source_hash` in `kernels-triton/variants.py`.

use std::path::Path;

use anyhow::Result;
use sha2::{Digest, Sha256};

use super::files::{list, read};

/// Files outside of the families that decide what is compiled.
const DRIVER: [&str; 4] = ["aot.py", "requirements.txt", "variants.py", "variants.yaml"];

/// One hash over all that determines the PTX: SHA-256 of a line `<SHA-256 of the file>  <path>` for
/// each of [`files`].
pub fn hash(root: &Path) -> Result<String> {
    let mut lines = String::new();
    for file in files(root)? {
        lines += &format!("{}  {file}\n", sha256(&read(&root.join(&file))?));
    }
    Ok(sha256(lines.as_bytes()))
}

/// The files of the hash, by path relative to `root`, sorted: the driver's, and the Python files of
/// each folder that has a `kernels.py`, without references and tests.
pub fn files(root: &Path) -> Result<Vec<String>> {
    let mut files = DRIVER.map(str::to_owned).to_vec();
    for family in names(root)? {
        let folder = root.join(&family);
        if !folder.join("kernels.py").exists() {
            continue;
        }
        let sources = names(&folder)?.into_iter().filter(|name| is_source(name));
        files.extend(sources.map(|name| format!("{family}/{name}")));
    }
    files.sort();
    Ok(files)
}

fn is_source(name: &str) -> bool {
    name.ends_with(".py") && name != "naive.py" && !name.starts_with("test_")
}

/// Names of what lies in a folder.
fn names(folder: &Path) -> Result<Vec<String>> {
    let paths = list(folder)?;
    let names = paths.iter().filter_map(|path| path.file_name());
    Ok(names.map(|name| name.to_string_lossy().into_owned()).collect())
}

/// Hexadecimal SHA-256.
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
