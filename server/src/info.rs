//! `quire info`: what a model is, and what running it here takes.

use crate::Outcome;
use crate::cli::InfoArgs;
use crate::load;
use crate::output::{Output, two_columns};
use crate::size::format_size;
use quire_engine::backend::{CpuBackend, ReferenceBackend};
use quire_engine::config::{ResolvedConfig, available_memory};
use quire_engine::ops::{Backend, BackendInfo};
use quire_model_zoo::loader::ModelFormat;
use quire_model_zoo::{BackendKind, ModelFiles};
use serde::Serialize;

#[derive(Serialize)]
struct Info {
    model: String,
    format: &'static str,
    architecture: String,
    parameters: u64,
    num_layers: usize,
    hidden_size: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    vocab_size: usize,
    max_position_embeddings: usize,
    dtype: String,
    backend: &'static str,
    isa: String,
    threads: usize,
    batch_invariant: bool,
    huge_pages: String,
    kv_bytes_per_token: usize,
    block_size: usize,
    num_blocks: usize,
    kv_cache_bytes: usize,
    max_model_len: usize,
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
    /// Null where the system does not say.
    available_memory_bytes: Option<usize>,
    notes: Vec<String>,
}

/// Runs the command.
///
/// # Errors
/// The model cannot be opened, or the options do not fit it or the machine.
pub fn run(args: &InfoArgs) -> anyhow::Result<Outcome> {
    let files = load::open(&args.model.model)?;
    let options = args.model.load_options();
    let plan = load::plan(&files, &options)?;
    let dtype = options.dtype.unwrap_or_else(|| files.default_dtype());
    let backend = match options.backend {
        BackendKind::Reference => ReferenceBackend::new(dtype).info(),
        BackendKind::Cpu => CpuBackend::new(dtype, options.isa, options.threads)?.info(),
    };
    let info = info(args.model.model.display().to_string(), &files, backend, plan);
    let mut output = Output::stdout();
    if args.json {
        output.json(&info)?;
    } else {
        output.text(&table(&info))?;
    }
    Ok(Outcome::Done)
}

fn info(model: String, files: &ModelFiles, backend: BackendInfo, plan: ResolvedConfig) -> Info {
    let sizes = files.info();
    let limits = plan.scheduler;
    Info {
        model,
        format: match files.format {
            ModelFormat::HuggingFace => "Hugging Face folder",
            ModelFormat::Gguf => "GGUF",
        },
        architecture: sizes.architecture,
        parameters: sizes.num_parameters,
        num_layers: sizes.num_layers,
        hidden_size: sizes.hidden_size,
        num_heads: sizes.num_heads,
        num_kv_heads: sizes.num_kv_heads,
        head_dim: sizes.head_dim,
        vocab_size: sizes.vocab_size,
        max_position_embeddings: sizes.max_position_embeddings,
        dtype: backend.dtype.to_string(),
        backend: backend.name,
        isa: backend.isa,
        threads: backend.threads,
        batch_invariant: backend.batch_invariant,
        huge_pages: huge_pages(),
        kv_bytes_per_token: plan.kv_cache_bytes / (limits.num_blocks * limits.block_size),
        block_size: limits.block_size,
        num_blocks: limits.num_blocks,
        kv_cache_bytes: plan.kv_cache_bytes,
        max_model_len: limits.max_model_len,
        max_num_seqs: limits.max_num_seqs,
        max_num_batched_tokens: limits.max_num_batched_tokens,
        available_memory_bytes: available_memory(),
        notes: plan.notes,
    }
}

/// Whether the system gives transparent huge pages to programs that ask, as ours does.
fn huge_pages() -> String {
    let path = "/sys/kernel/mm/transparent_hugepage/enabled";
    let setting = std::fs::read_to_string(path).ok();
    // The file lists the choices, the one in force in brackets.
    let chosen = setting.as_deref().and_then(|s| s.split_once('[')?.1.split_once(']'));
    match chosen {
        Some(("never", _)) => "switched off by the system".to_owned(),
        Some((setting, _)) => format!("available (system setting: {setting})"),
        None => "not available".to_owned(),
    }
}

fn table(info: &Info) -> String {
    let available = info.available_memory_bytes.map_or("unknown".to_owned(), format_size);
    let mut rows = vec![
        ("model", info.model.clone()),
        ("format", info.format.to_owned()),
        ("architecture", info.architecture.clone()),
        ("parameters", info.parameters.to_string()),
        ("layers", info.num_layers.to_string()),
        ("hidden size", info.hidden_size.to_string()),
        ("heads", format!("{} query, {} key/value", info.num_heads, info.num_kv_heads)),
        ("head dimension", info.head_dim.to_string()),
        ("vocabulary", info.vocab_size.to_string()),
        ("trained context", format!("{} tokens", info.max_position_embeddings)),
        ("dtype", info.dtype.clone()),
        ("backend", info.backend.to_owned()),
        ("instruction set", info.isa.clone()),
        ("threads", info.threads.to_string()),
        ("batch invariant", if info.batch_invariant { "yes" } else { "no" }.to_owned()),
        ("huge pages", info.huge_pages.clone()),
        ("available memory", available),
        ("KV per token", format!("{} bytes", info.kv_bytes_per_token)),
        (
            "KV cache",
            format!(
                "{} blocks of {} tokens, {}",
                info.num_blocks,
                info.block_size,
                format_size(info.kv_cache_bytes)
            ),
        ),
        ("max model len", format!("{} tokens", info.max_model_len)),
        ("max num seqs", info.max_num_seqs.to_string()),
        ("max batched tokens", info.max_num_batched_tokens.to_string()),
    ];
    rows.extend(info.notes.iter().map(|note| ("note", note.clone())));
    two_columns(&rows)
}
