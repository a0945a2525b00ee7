//! `quire info`: what a model is, and what running it here takes.

use crate::Outcome;
use crate::cli::scheduling::PolicyName;
use crate::cli::{InfoArgs, Setup};
use crate::device::CudaReport;
use crate::load;
use crate::memory::{PlanJson, host_swap, table as memory_table};
use crate::output::{Output, counted, two_columns};
use crate::size::format_size;
use quire_engine::backend::ceiling::usable_cores;
use quire_engine::backend::{CpuBackend, GemmMode, ReferenceBackend};
use quire_engine::config::{DEFAULT_STEP_MS, Measure, ResolvedConfig};
use quire_engine::ops::{Backend, BackendInfo, WeightFormats};
use quire_engine::scheduler::{Policy, Preemption, PreemptionCosts, SchedulerConfig};
use quire_model_zoo::loader::ModelFormat;
use quire_model_zoo::{BackendKind, LoadOptions, ModelFiles};
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
    /// How many matrices are in which quantised format.
    quantization: String,
    /// `cpu`, `cuda:0` or `reference`.
    device: String,
    /// It with why it was chosen, for the table.
    #[serde(skip)]
    described_device: String,
    /// Null on other devices.
    cuda: Option<CudaReport>,
    backend: &'static str,
    isa: String,
    threads: usize,
    batch_invariant: bool,
    huge_pages: String,
    /// In them after loading; null without `--measure`.
    huge_page_bytes: Option<usize>,
    kv_bytes_per_token: usize,
    block_size: usize,
    num_blocks: usize,
    max_model_len: usize,
    max_num_seqs: usize,
    /// The most there can be, where it is measured at start and was not measured now.
    max_num_batched_tokens: usize,
    #[serde(flatten)]
    scheduling: Scheduling,
    memory: PlanJson,
    notes: Vec<String>,
}

/// What an engine does when seats or blocks are short.
#[derive(Serialize)]
struct Scheduling {
    scheduling_policy: PolicyName,
    /// Null but for the policy `priority`.
    aging_steps: Option<u32>,
    prefix_caching: bool,
    async_scheduling: bool,
    swap_blocks: usize,
    preemption_mode: &'static str,
    /// Null where they are not needed, or are measured at start and were not measured now.
    preemption_costs: Option<Costs>,
    /// What an engine measures when it starts, by name.
    measured_at_start: Vec<&'static str>,
    /// It was measured now.
    measured: bool,
}

#[derive(Serialize)]
struct Costs {
    recompute_ns_per_token: u64,
    swap_ns_per_block: u64,
}

/// Runs the command.
///
/// # Errors
/// The model cannot be opened, or the options do not fit it or the machine.
pub fn run(args: &InfoArgs) -> anyhow::Result<Outcome> {
    let files = load::open(&args.model.model)?;
    let setup = args.model.setup()?;
    let options = &setup.options;
    let mut plan = load::plan(&files, options)?;
    // Unless somebody says otherwise it depends on the backend.
    plan.async_scheduling.get_or_insert(options.backend == BackendKind::Cuda);
    let memory = plan.memory;
    let mut huge_page_bytes = None;
    if args.measure {
        let engine = load::load(&files, options)?;
        plan.scheduler = engine.limits().clone();
        plan.async_scheduling = Some(engine.async_scheduling());
        huge_page_bytes = bytes_in_huge_pages();
    }
    let computer = Computer::new(&files, options)?;
    let model = args.model.model.display().to_string();
    let mut info = info(model, &files, (&setup, computer), (plan, args.measure));
    info.huge_page_bytes = huge_page_bytes;
    let mut output = Output::stdout();
    if args.json {
        output.json(&info)?;
    } else {
        output.text(&(table(&info) + &memory_table(&memory, host_swap(options))))?;
    }
    Ok(Outcome::Done)
}

/// What computes.
struct Computer {
    info: BackendInfo,
    cuda: Option<CudaReport>,
}

impl Computer {
    /// Asks the backend, as far as it can be asked without a model.
    fn new(files: &ModelFiles, options: &LoadOptions) -> anyhow::Result<Self> {
        let dtype = options.dtype.unwrap_or_else(|| files.default_dtype());
        Ok(match options.backend {
            BackendKind::Reference => {
                Computer { info: ReferenceBackend::new(dtype).info(), cuda: None }
            }
            BackendKind::Cpu => Computer {
                info: CpuBackend::new(dtype, options.isa, options.threads)?.info(),
                cuda: None,
            },
            BackendKind::Cuda => {
                let cuda = CudaReport::new(options.cuda, options.engine.swap_bytes)?;
                let info = BackendInfo {
                    name: "cuda",
                    isa: format!("{} (compute capability {})", cuda.name, cuda.compute_capability),
                    threads: 1,
                    dtype,
                    quantization: WeightFormats::default(),
                    batch_invariant: options.cuda.gemm == GemmMode::Triton,
                };
                Computer { info, cuda: Some(cuda) }
            }
        })
    }
}

fn info(
    model: String,
    files: &ModelFiles,
    (setup, computer): (&Setup, Computer),
    (plan, measured): (ResolvedConfig, bool),
) -> Info {
    let Computer { info: backend, cuda } = computer;
    let sizes = files.info();
    let scheduling = scheduling(&plan, measured);
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
        quantization: files.memory(&setup.options).quantization().to_string(),
        device: setup.choice.name(),
        described_device: setup.choice.described(),
        cuda,
        backend: backend.name,
        isa: backend.isa,
        threads: backend.threads,
        batch_invariant: backend.batch_invariant,
        huge_pages: huge_pages(),
        huge_page_bytes: None,
        kv_bytes_per_token: plan.memory.kv_cache / (limits.num_blocks * limits.block_size),
        block_size: limits.block_size,
        num_blocks: limits.num_blocks,
        max_model_len: limits.max_model_len,
        max_num_seqs: limits.max_num_seqs,
        max_num_batched_tokens: limits.max_num_batched_tokens,
        scheduling,
        memory: plan.memory.into(),
        notes: plan.notes,
    }
}

fn scheduling(plan: &ResolvedConfig, measured: bool) -> Scheduling {
    let SchedulerConfig { policy, preemption, num_swap_blocks, prefix_cache, .. } = &plan.scheduler;
    let Measure { budget, preemption_costs: costs } = plan.measure;
    let names = [(budget, "max_num_batched_tokens"), (costs, "preemption_costs")];
    Scheduling {
        scheduling_policy: (*policy).into(),
        aging_steps: match policy {
            Policy::Priority { aging_steps } => Some(*aging_steps),
            Policy::Fcfs | Policy::Static => None,
        },
        prefix_caching: prefix_cache.is_some(),
        async_scheduling: plan.async_scheduling.unwrap_or_default(),
        swap_blocks: *num_swap_blocks,
        preemption_mode: match preemption {
            Preemption::Auto(_) => "auto",
            Preemption::Swap => "swap",
            Preemption::Recompute => "recompute",
        },
        preemption_costs: match *preemption {
            // Without swap space there is nothing to choose.
            Preemption::Auto(PreemptionCosts { recompute_ns_per_token, swap_ns_per_block })
                if *num_swap_blocks > 0 && (measured || !costs) =>
            {
                Some(Costs { recompute_ns_per_token, swap_ns_per_block })
            }
            _ => None,
        },
        measured_at_start: names.iter().filter(|name| name.0).map(|name| name.1).collect(),
        measured,
    }
}

/// Whether this process gets transparent huge pages where it asks for them, and if not, why.
pub fn huge_pages() -> String {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let setting = read("/sys/kernel/mm/transparent_hugepage/enabled");
    // The file lists the choices, the one in force in brackets.
    let chosen = setting.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    let status = read("/proc/self/status");
    let allowed = status.lines().find_map(|line| line.strip_prefix("THP_enabled:"));
    match chosen {
        None => "not available on this system".to_owned(),
        Some(("never", _)) => {
            "switched off by the system; decoding is faster after `echo madvise > \
             /sys/kernel/mm/transparent_hugepage/enabled`"
                .to_owned()
        }
        Some(_) if allowed.is_some_and(|value| value.trim() == "0") => {
            "switched off for this process".to_owned()
        }
        Some((setting, _)) => format!("available (system setting: {setting})"),
    }
}

/// Bytes of this process that lie in transparent huge pages, where the system says so.
fn bytes_in_huge_pages() -> Option<usize> {
    let maps = std::fs::read_to_string("/proc/self/smaps_rollup").ok()?;
    let line = maps.lines().find_map(|line| line.strip_prefix("AnonHugePages:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()? * 1024)
}

fn table(info: &Info) -> String {
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
        ("quantization", info.quantization.clone()),
        ("device", info.described_device.clone()),
        ("backend", info.backend.to_owned()),
    ];
    match &info.cuda {
        Some(cuda) => rows.extend(cuda_rows(cuda)),
        None => {
            rows.extend([("instruction set", info.isa.clone()), ("threads", threads(info.threads))])
        }
    }
    rows.push(("batch invariant", yes_no(info.batch_invariant)));
    if info.cuda.is_none() {
        let used = info.huge_page_bytes.map(format_size);
        let used = used.map_or_else(String::new, |size| format!("; {size} after loading"));
        rows.push(("huge pages", info.huge_pages.clone() + &used));
    }
    rows.extend([
        ("KV per token", format!("{} bytes", info.kv_bytes_per_token)),
        ("KV cache", format!("{} blocks of {} tokens", info.num_blocks, info.block_size)),
        ("max model len", format!("{} tokens", info.max_model_len)),
        ("max num seqs", info.max_num_seqs.to_string()),
        ("max batched tokens", batched_tokens(info)),
    ]);
    rows.extend(info.scheduling.rows());
    rows.extend(info.notes.iter().map(|note| ("note", note.clone())));
    two_columns(&rows)
}

fn cuda_rows(cuda: &CudaReport) -> [(&'static str, String); 5] {
    [
        ("device name", cuda.name.clone()),
        ("compute capability", cuda.compute_capability.clone()),
        ("driver", format!("CUDA {}", cuda.driver_cuda_version)),
        ("matrix products", cuda.gemm.to_owned()),
        ("graphs", yes_no(cuda.graphs)),
    ]
}

/// `threads`, and what they share where they are too many.
fn threads(threads: usize) -> String {
    match usable_cores() {
        cores if threads > cores => format!("{threads} on {}", counted(cores as u64, "core")),
        _ => threads.to_string(),
    }
}

fn yes_no(yes: bool) -> String {
    if yes { "yes" } else { "no" }.to_owned()
}

fn batched_tokens(info: &Info) -> String {
    let tokens = info.max_num_batched_tokens;
    match info.scheduling.is_open("max_num_batched_tokens") {
        true => format!(
            "{tokens}, or fewer: as many as {DEFAULT_STEP_MS} ms allow, by a measurement at start"
        ),
        false => tokens.to_string(),
    }
}

impl Scheduling {
    /// Whether `name` will be measured at start, and is not known now.
    fn is_open(&self, name: &str) -> bool {
        !self.measured && self.measured_at_start.contains(&name)
    }

    fn rows(&self) -> [(&'static str, String); 5] {
        let policy = match self.aging_steps {
            Some(steps) => format!("priority, a level for every {steps} steps of waiting"),
            None => self.scheduling_policy.to_string(),
        };
        let preemption = match &self.preemption_costs {
            Some(Costs { recompute_ns_per_token, swap_ns_per_block }) => format!(
                "auto: {recompute_ns_per_token} ns to compute a token, {swap_ns_per_block} ns to \
                 copy a block"
            ),
            None if self.is_open("preemption_costs") => {
                "auto, by costs measured at start".to_owned()
            }
            None if self.swap_blocks == 0 => "recompute (there is no swap space)".to_owned(),
            None => self.preemption_mode.to_owned(),
        };
        [
            ("scheduling policy", policy),
            ("preemption", preemption),
            ("swap space", counted(self.swap_blocks as u64, "block")),
            ("prefix caching", yes_no(self.prefix_caching)),
            ("async scheduling", yes_no(self.async_scheduling)),
        ]
    }
}
