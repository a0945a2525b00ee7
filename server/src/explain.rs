//! Errors of the libraries in the words of the command line: flags instead of configuration
//! fields, sizes in units, and what to give instead of a wrong path.

use crate::size::format_size;
use anyhow::anyhow;
use quire_engine::config::ConfigError;
use quire_engine::memory::{MemoryPlan, PlanPart};
use quire_model_zoo::config::supported_architectures;
use quire_model_zoo::error::LoadError;
use quire_model_zoo::{BackendKind, LoadOptions, ModelError};
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

/// Why a model cannot be run with `options`.
pub fn run_error(error: ModelError, options: &LoadOptions) -> anyhow::Error {
    match error {
        ModelError::Config(error) => config_error(error, options.backend),
        ModelError::NoSwapSpace { bytes, available } => anyhow!(
            "{} is {}; the host has {} available",
            flag("swap_bytes"),
            exact_size(bytes),
            exact_size(available)
        ),
        other => other.into(),
    }
}

fn config_error(error: ConfigError, backend: BackendKind) -> anyhow::Error {
    match error {
        ConfigError::OutOfRange { name, value, rule } => {
            let flag = flag(name);
            if !matches!(name, "kv_cache_bytes" | "swap_bytes") {
                return anyhow!("{flag} is {value}; it must be {rule}");
            }
            let with_unit = |word: &str| word.parse().map_or(word.to_owned(), exact_size);
            let rule: Vec<String> = rule.split(' ').map(with_unit).collect();
            anyhow!("{flag} is {}; it must be {}", exact_size(value), rule.join(" "))
        }
        ConfigError::Utilization(share) => {
            anyhow!("{} is {share}; it must be over 0 and at most 1", flag("memory_utilization"))
        }
        ConfigError::DoesNotFit { plan, part } => does_not_fit(&plan, part, backend),
        ConfigError::PoolTooSmall { blocks, block_size, max_model_len, needed_bytes, .. } => {
            anyhow!(
                "the KV cache of {blocks} blocks holds {} tokens, fewer than {} {max_model_len}, which \
             needs {}; raise --kv-cache-memory or --num-blocks-override, or lower --max-model-len",
                blocks * block_size,
                flag("max_model_len"),
                exact_size(needed_bytes)
            )
        }
    }
}

/// What has no room and what to change.
fn does_not_fit(plan: &MemoryPlan, part: PlanPart, backend: BackendKind) -> anyhow::Error {
    let whose = match backend {
        BackendKind::Cuda => " of the device's memory",
        BackendKind::Cpu | BackendKind::Reference => "",
    };
    let what = match part {
        PlanPart::Weights => format!("the weights of {}", format_size(plan.weights)),
        PlanPart::Workspace => {
            let fixed = format_size(plan.fixed());
            format!("weights and activations of {fixed} and a KV block")
        }
        PlanPart::Swap => format!("the swap space of {}", format_size(plan.swap)),
        PlanPart::KvCache => format!("the KV cache of {}", format_size(plan.kv_cache)),
    };
    anyhow!(
        "no room for {what}: the engine needs {} and may take {}{whose}; {}",
        exact_size(plan.needed()),
        exact_size(plan.budget),
        part.remedy(plan, flag)
    )
}

/// A flag and, in brackets, the configuration field it sets.
fn flag(field: &str) -> String {
    let flag = match field {
        "kv_cache_bytes" => "kv-cache-memory".to_owned(),
        "num_blocks" => "num-blocks-override".to_owned(),
        "swap_bytes" => "swap-space".to_owned(),
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
            let error = ConfigError::OutOfRange { name, value, rule: rule.to_owned() };
            config_error(error, BackendKind::Cpu).to_string()
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
        assert_eq!(
            out_of_range("swap_bytes", 4, "0 or at least 49152 (one block)"),
            "--swap-space (swap_bytes) is 4 bytes; it must be 0 bytes or at least 49152 bytes (48.0 \
             KiB) (one block)"
        );
        let too_small = ConfigError::PoolTooSmall {
            blocks: 3,
            block_size: 16,
            max_model_len: 49,
            needed_bytes: 4 << 20,
            plan: Box::default(),
        };
        let text = config_error(too_small, BackendKind::Cpu).to_string();
        assert!(
            text.contains("fewer than --max-model-len (max_model_len) 49, which needs"),
            "{text}"
        );
        assert!(text.contains("4194304 bytes (4.0 MiB); raise --kv-cache-memory or"), "{text}");
    }

    #[test]
    fn what_does_not_fit_is_named_with_its_flag() {
        let plan = MemoryPlan {
            available: 20 << 30,
            budget: 1 << 30,
            weights: 2 << 30,
            workspace: 3 << 30,
            kv_cache: 4 << 30,
            swap: 5 << 30,
            ..MemoryPlan::default()
        };
        let message_on = |backend, plan: MemoryPlan, part| {
            let error = ConfigError::DoesNotFit { plan: Box::new(plan), part };
            config_error(error, backend).to_string()
        };
        let message = |plan, part| message_on(BackendKind::Cpu, plan, part);
        assert_eq!(
            message(plan, PlanPart::Weights),
            "no room for the weights of 2.0 GiB: the engine needs 15032385536 bytes (14.0 GiB) and \
             may take 1073741824 bytes (1.0 GiB); take a smaller model or a smaller --dtype \
             (dtype), or raise --memory-utilization (memory_utilization)"
        );
        let device = message_on(BackendKind::Cuda, plan, PlanPart::Weights);
        assert!(device.contains("may take 1073741824 bytes (1.0 GiB) of the device's memory;"));
        let all = MemoryPlan { available: plan.budget, ..plan };
        for (part, start, end) in [
            (PlanPart::Workspace, "weights and activations of 5.0 GiB and", "(max_model_len)"),
            (PlanPart::Swap, "the swap space of 5.0 GiB", "; lower --swap-space (swap_bytes)"),
            (PlanPart::KvCache, "the KV cache of 4.0 GiB", "--num-blocks-override (num_blocks)"),
        ] {
            let text = message(all, part);
            assert!(
                text.starts_with(&format!("no room for {start}")) && text.ends_with(end),
                "{text}"
            );
        }
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
