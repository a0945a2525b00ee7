//! Errors of the libraries in the words of the command line: flags instead of configuration
//! fields, sizes in units, and what to give instead of a wrong path.

use crate::size::format_size;
use anyhow::anyhow;
use quire_engine::config::ConfigError;
use quire_model_zoo::ModelError;
use quire_model_zoo::config::supported_architectures;
use quire_model_zoo::error::LoadError;
use std::fs::File;
use std::io::Read;
use std::path::{Component, Path};

/// Why the model at `path` cannot be opened and, where it is known, what to do about it.
pub fn open_error(error: ModelError, path: &Path) -> anyhow::Error {
    let hint = match &error {
        ModelError::Load(LoadError::Unsupported { what: "architecture", .. }) => {
            let known: Vec<&str> = supported_architectures().collect();
            Some(format!("supported are {}", known.join(", ")))
        }
        _ => path_hint(path),
    };
    match hint {
        Some(hint) => anyhow!("{error}; {hint}"),
        None => error.into(),
    }
}

/// What is wrong with a path that names no model.
fn path_hint(path: &Path) -> Option<String> {
    if path.is_file() {
        return (!is_gguf(path)).then(|| "for safetensors give the folder".to_owned());
    }
    if path.is_dir() {
        let gguf = gguf_file(path).filter(|_| !path.join("config.json").exists())?;
        return Some(format!("to run a GGUF file give its path, such as {}", gguf));
    }
    let missing = !path.exists() && is_hub_name(path);
    missing.then(|| "Quire downloads nothing yet; give a local folder or .gguf file".to_owned())
}

fn is_gguf(path: &Path) -> bool {
    let mut magic = [0; 4];
    File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && magic == *b"GGUF"
}

/// The first GGUF file of a folder, by name.
fn gguf_file(folder: &Path) -> Option<String> {
    let paths = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
    let gguf = paths.filter(|path| path.extension().is_some_and(|ext| ext == "gguf")).min()?;
    Some(gguf.display().to_string())
}

/// `organisation/name`, where there is no folder `organisation` here.
fn is_hub_name(path: &Path) -> bool {
    let parts: Vec<Component<'_>> = path.components().collect();
    matches!(parts[..], [Component::Normal(organisation), Component::Normal(_)]
        if !Path::new(organisation).exists())
        && path.extension().is_none_or(|ext| ext != "gguf")
}

/// Why a model cannot be run as asked.
pub fn run_error(error: ModelError) -> anyhow::Error {
    match error {
        ModelError::Config(error) => config_error(error),
        other => other.into(),
    }
}

fn config_error(error: ConfigError) -> anyhow::Error {
    match error {
        ConfigError::OutOfRange { name, value, rule } => {
            let flag = flag(name);
            if name != "kv_cache_bytes" {
                return anyhow!("{flag} is {value}; it must be {rule}");
            }
            let with_unit = |word: &str| word.parse().map_or(word.to_owned(), exact_size);
            let rule: Vec<String> = rule.split(' ').map(with_unit).collect();
            anyhow!("{flag} is {}; it must be {}", exact_size(value), rule.join(" "))
        }
        ConfigError::WeightsTooLarge { bytes, available } => anyhow!(
            "the weights take {}; {} of memory are available",
            format_size(bytes),
            format_size(available)
        ),
        ConfigError::PoolTooSmall { blocks, block_size, max_model_len, needed_bytes } => anyhow!(
            "the KV cache of {blocks} blocks holds {} tokens, fewer than {} {max_model_len}, which \
             needs {}; raise --kv-cache-memory or --num-blocks-override, or lower --max-model-len",
            blocks * block_size,
            flag("max_model_len"),
            exact_size(needed_bytes)
        ),
    }
}

/// A flag and, in brackets, the configuration field it sets.
fn flag(field: &str) -> String {
    let flag = match field {
        "kv_cache_bytes" => "kv-cache-memory".to_owned(),
        "num_blocks" => "num-blocks-override".to_owned(),
        other => other.replace('_', "-"),
    };
    format!("--{flag} ({field})")
}

/// A size that may be compared with one close to it.
fn exact_size(bytes: usize) -> String {
    if bytes < 1024 {
        format_size(bytes)
    } else {
        format!("{bytes} bytes ({})", format_size(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_named_by_flag_and_in_units() {
        let out_of_range = |name, value, rule: &str| {
            config_error(ConfigError::OutOfRange { name, value, rule: rule.to_owned() }).to_string()
        };
        assert_eq!(
            out_of_range("max_num_seqs", 0, "from 1 to 4096"),
            "--max-num-seqs (max_num_seqs) is 0; it must be from 1 to 4096"
        );
        assert_eq!(
            out_of_range("num_blocks", 0, "from 1 to 9"),
            "--num-blocks-override (num_blocks) is 0; it must be from 1 to 9"
        );
        assert_eq!(
            out_of_range("kv_cache_bytes", 1, "from 49152 to 3221225472"),
            "--kv-cache-memory (kv_cache_bytes) is 1 byte; it must be from 49152 bytes (48.0 KiB) \
             to 3221225472 bytes (3.0 GiB)"
        );
        let too_large = ConfigError::WeightsTooLarge { bytes: 14 << 30, available: 3 << 29 };
        assert_eq!(
            config_error(too_large).to_string(),
            "the weights take 14.0 GiB; 1.5 GiB of memory are available"
        );
        let too_small = ConfigError::PoolTooSmall {
            blocks: 3,
            block_size: 16,
            max_model_len: 49,
            needed_bytes: 4 << 20,
        };
        let text = config_error(too_small).to_string();
        assert!(
            text.contains("fewer than --max-model-len (max_model_len) 49, which needs"),
            "{text}"
        );
        assert!(text.contains("4194304 bytes (4.0 MiB); raise --kv-cache-memory or"), "{text}");
    }

    #[test]
    fn wrong_paths_get_a_hint() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, content: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, content).unwrap();
            path
        };
        let gguf = file("b.gguf", "GGUF");
        assert_eq!(path_hint(&gguf), None);
        let folder = path_hint(dir.path()).unwrap();
        assert!(folder.ends_with("b.gguf"), "{folder}");
        let hint = path_hint(&file("model.safetensors", "12345678")).unwrap();
        assert_eq!(hint, "for safetensors give the folder");
        assert!(path_hint(&file("empty", "")).is_some());
        file("config.json", "{}");
        assert_eq!(path_hint(dir.path()), None);
        let hub = path_hint(Path::new("Qwen/Qwen3-0.6B")).unwrap();
        assert!(hub.starts_with("Quire downloads nothing yet; give a local folder"), "{hub}");
        // Of these the system's own message says enough.
        for path in ["src/none", "Qwen/model.gguf", "/Qwen/none", "none", "../Qwen/none"] {
            assert_eq!(path_hint(Path::new(path)), None, "{path}");
        }
    }
}
