//! Sizes and limits of an engine, and how they follow from a model and the machine.

use crate::kv::BLOCK_SIZES;
use crate::kv::PrefixHasher;
use crate::model::ModelInfo;
use crate::ops::DType;
use crate::sampling::DEFAULT_MAX_LOGPROBS;
use crate::scheduler::{Policy, Preemption, PreemptionCosts, SchedulerConfig};

/// Most tokens a step may have.
pub const MAX_BATCHED_TOKENS: usize = 1 << 16;
/// Most sequences a step may have.
pub const MAX_SEQS: usize = 4096;

/// Tokens in a step unless set; lowered where a step would take longer than
/// [`DEFAULT_STEP_MS`].
pub const DEFAULT_BATCHED_TOKENS: usize = 512;
/// Milliseconds that a full step shall take at most, by the speed measured at start.
pub const DEFAULT_STEP_MS: u64 = 250;

/// What becomes of the blocks of a preempted sequence: see [`Preemption`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PreemptionMode {
    /// The cheaper of both, by costs measured at start.
    #[default]
    Auto,
    /// By these costs.
    Costs(PreemptionCosts),
    /// Computed anew.
    Recompute,
    /// Copied to the host while there is room.
    Swap,
}

/// What a user sets. `None` is derived from the model and the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// Sequences in one step.
    pub max_num_seqs: usize,
    /// Tokens in one step; default: [`DEFAULT_BATCHED_TOKENS`], fewer where that takes longer than
    /// [`DEFAULT_STEP_MS`] by the speed measured at start.
    pub max_num_batched_tokens: Option<usize>,
    /// Tokens of one sequence, prompt and output; default: what the model was trained for.
    pub max_model_len: Option<usize>,
    /// Tokens a KV block holds.
    pub block_size: usize,
    /// Bytes for KV blocks; default: enough for every sequence at full length, at most a
    /// quarter of the memory available to the process.
    pub kv_cache_bytes: Option<usize>,
    /// Number of KV blocks, instead of `kv_cache_bytes`.
    pub num_blocks: Option<usize>,
    /// Bytes of host memory for swapped-out blocks.
    pub swap_bytes: usize,
    /// Equal prefixes share blocks.
    pub prefix_caching: bool,
    /// Who comes first.
    pub policy: Policy,
    /// What becomes of the blocks of a preempted sequence.
    pub preemption: PreemptionMode,
    /// Plan each step before the results of the one before are applied.
    pub async_scheduling: bool,
    /// Most log-probabilities a request may ask for at one position.
    pub max_logprobs: u32,
    /// Seed of requests that bring none.
    pub seed: u64,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            max_num_seqs: 64,
            max_num_batched_tokens: None,
            max_model_len: None,
            block_size: 16,
            kv_cache_bytes: None,
            num_blocks: None,
            swap_bytes: 0,
            prefix_caching: true,
            policy: Policy::Fcfs,
            preemption: PreemptionMode::Auto,
            async_scheduling: false,
            max_logprobs: DEFAULT_MAX_LOGPROBS,
            seed: 0,
        }
    }
}

/// A configuration that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A value outside its range.
    #[error("{name} is {value}; it must be {rule}")]
    OutOfRange {
        /// Which value.
        name: &'static str,
        /// What it was.
        value: usize,
        /// What it must be.
        rule: String,
    },
    /// The weights alone exceed the memory there is.
    #[error("the weights take {bytes} bytes; {available} bytes of memory are available")]
    WeightsTooLarge {
        /// What they take in the type asked for.
        bytes: usize,
        /// What there is.
        available: usize,
    },
    /// The KV pool cannot hold one sequence.
    #[error(
        "the KV cache of {blocks} blocks holds {} tokens, fewer than max_model_len {max_model_len} \
         (which needs {needed_bytes} bytes); raise the KV cache memory or lower max_model_len",
        .blocks * .block_size
    )]
    PoolTooSmall {
        /// Blocks in the pool.
        blocks: usize,
        /// Tokens in a block.
        block_size: usize,
        /// Tokens one sequence may have.
        max_model_len: usize,
        /// KV bytes of one such sequence.
        needed_bytes: usize,
    },
}

/// The sizes in force: what the scheduler needs, and what was adjusted on the way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedConfig {
    /// Limits for the scheduler.
    pub scheduler: SchedulerConfig,
    /// Bytes of the KV cache.
    pub kv_cache_bytes: usize,
    /// Most log-probabilities a request may ask for at one position.
    pub max_logprobs: u32,
    /// What is to be measured at start.
    pub measure: Measure,
    /// Plan each step before the results of the one before are applied.
    pub async_scheduling: bool,
    /// What was lowered and why, for the user to read.
    pub notes: Vec<String>,
}

/// What an engine measures when it starts, as the user did not set it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Measure {
    /// How many tokens a step of [`DEFAULT_STEP_MS`] computes.
    pub budget: bool,
    /// What preemption costs.
    pub preemption_costs: bool,
}

fn in_range(
    name: &'static str,
    value: usize,
    range: std::ops::RangeInclusive<usize>,
) -> Result<(), ConfigError> {
    if range.contains(&value) {
        return Ok(());
    }
    let rule = format!("from {} to {}", range.start(), range.end());
    Err(ConfigError::OutOfRange { name, value, rule })
}

impl EngineConfig {
    /// Checks every value against the model and computes the rest. `available_bytes` is the
    /// memory the process may still take; weights come out of it first.
    pub fn resolve(
        &self,
        model: &ModelInfo,
        dtype: DType,
        available_bytes: usize,
    ) -> Result<ResolvedConfig, ConfigError> {
        let weight_bytes = (model.num_parameters as usize).saturating_mul(dtype.size());
        let available_bytes =
            available_bytes.checked_sub(weight_bytes).ok_or(ConfigError::WeightsTooLarge {
                bytes: weight_bytes,
                available: available_bytes,
            })?;
        in_range("max_num_seqs", self.max_num_seqs, 1..=MAX_SEQS)?;
        let tokens = self.max_num_batched_tokens.unwrap_or(DEFAULT_BATCHED_TOKENS);
        in_range("max_num_batched_tokens", tokens, 1..=MAX_BATCHED_TOKENS)?;
        if !BLOCK_SIZES.contains(&self.block_size) {
            let rule = format!("one of {BLOCK_SIZES:?}");
            return Err(ConfigError::OutOfRange {
                name: "block_size",
                value: self.block_size,
                rule,
            });
        }
        let limit = model.max_position_embeddings;
        let mut max_model_len = self.max_model_len.unwrap_or(limit);
        in_range("max_model_len", max_model_len, 1..=limit)?;

        let block_bytes = model
            .kv_layout(1, self.block_size, dtype)
            .block_bytes()
            .filter(|&b| b > 0 && b < isize::MAX as usize)
            .expect("model dimensions are limited at load");
        let blocks_per_seq = max_model_len.div_ceil(self.block_size);
        let num_blocks = self.num_blocks(blocks_per_seq, block_bytes, available_bytes)?;

        let mut notes = Vec::new();
        let capacity = num_blocks * self.block_size;
        if capacity < max_model_len {
            // Only a length nobody asked for is lowered silently enough to go on.
            if self.max_model_len.is_some() || capacity == 0 {
                return Err(ConfigError::PoolTooSmall {
                    blocks: num_blocks,
                    block_size: self.block_size,
                    max_model_len,
                    needed_bytes: blocks_per_seq * block_bytes,
                });
            }
            notes.push(format!(
                "max_model_len lowered from {max_model_len} to {capacity}, which is what the KV \
                 cache of {num_blocks} blocks holds"
            ));
            max_model_len = capacity;
        }
        let scheduler = SchedulerConfig {
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: tokens,
            max_model_len,
            block_size: self.block_size,
            num_blocks,
            num_swap_blocks: (self.swap_bytes / block_bytes).min(i32::MAX as usize),
            // Static batching is the classic baseline and shares nothing.
            prefix_cache: (self.prefix_caching && self.policy != Policy::Static)
                .then(|| PrefixHasher::new(&model.cache_identity(dtype), self.block_size)),
            window: model.window,
            policy: self.policy,
            preemption: match self.preemption {
                PreemptionMode::Recompute => Preemption::Recompute,
                PreemptionMode::Swap => Preemption::Swap,
                PreemptionMode::Costs(costs) => Preemption::Auto(costs),
                PreemptionMode::Auto => Preemption::Auto(PreemptionCosts::default()),
            },
        };
        Ok(ResolvedConfig {
            measure: Measure {
                budget: self.max_num_batched_tokens.is_none(),
                preemption_costs: self.preemption == PreemptionMode::Auto && self.swap_bytes > 0,
            },
            async_scheduling: self.async_scheduling,
            scheduler,
            kv_cache_bytes: num_blocks * block_bytes,
            max_logprobs: self.max_logprobs,
            notes,
        })
    }

    fn num_blocks(
        &self,
        blocks_per_seq: usize,
        block_bytes: usize,
        available_bytes: usize,
    ) -> Result<usize, ConfigError> {
        // Slots are i64 and block ids i32; one bound keeps both far from their ends.
        let most = (i32::MAX as usize / self.block_size).min(available_bytes / block_bytes);
        if let Some(blocks) = self.num_blocks {
            in_range("num_blocks", blocks, 1..=most)?;
            return Ok(blocks);
        }
        if let Some(bytes) = self.kv_cache_bytes {
            in_range("kv_cache_bytes", bytes, block_bytes..=available_bytes.max(block_bytes))?;
            return Ok((bytes / block_bytes).min(most));
        }
        let wanted = self.max_num_seqs.saturating_mul(blocks_per_seq);
        Ok(wanted.min(available_bytes / 4 / block_bytes).min(most))
    }
}

/// Bytes this process may still take: what the system has available, within the memory limit
/// of its control group. `None` where the system does not say.
pub fn available_memory() -> Option<usize> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib = |key: &str| -> Option<usize> {
        let line = meminfo.lines().find(|l| l.starts_with(key))?;
        line.split_whitespace().nth(1)?.parse().ok()
    };
    let mut available = kib("MemAvailable:")?.checked_mul(1024)?;
    for (limit, used, stat) in cgroup_memory_files() {
        let read = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<usize>().ok();
        if let (Some(limit), Some(used)) = (read(&limit), read(&used)) {
            // Cached file pages, such as those of the model's own file, give way.
            let used = used.saturating_sub(inactive_file_bytes(&stat).unwrap_or(0));
            available = available.min(limit.saturating_sub(used));
        }
    }
    Some(available)
}

fn inactive_file_bytes(stat: &str) -> Option<usize> {
    let stat = std::fs::read_to_string(stat).ok()?;
    let line = |l: &str| {
        l.strip_prefix("inactive_file ")
            .or(l.strip_prefix("total_inactive_file "))?
            .trim()
            .parse()
            .ok()
    };
    stat.lines().find_map(line)
}

/// (limit, usage, statistics) files of this process's control group, version 2 and version 1; inside a
/// container the group is usually mounted as the root.
fn cgroup_memory_files() -> Vec<(String, String, String)> {
    let root = "/sys/fs/cgroup";
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = groups.lines().find_map(|l| l.strip_prefix("0::")).unwrap_or("/");
    let mut files = vec![(
        format!("{root}/memory/memory.limit_in_bytes"),
        format!("{root}/memory/memory.usage_in_bytes"),
        format!("{root}/memory/memory.stat"),
    )];
    // A limit on any ancestor applies.
    let mut group = own.trim_end_matches('/').to_string();
    loop {
        files.push((
            format!("{root}{group}/memory.max"),
            format!("{root}{group}/memory.current"),
            format!("{root}{group}/memory.stat"),
        ));
        match group.rfind('/') {
            Some(at) => group.truncate(at),
            None => return files,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> ModelInfo {
        ModelInfo {
            architecture: "test".into(),
            vocab_size: 320,
            max_position_embeddings: 256,
            num_parameters: 1,
            num_layers: 2,
            num_heads: 4,
            num_kv_heads: 2,
            head_dim: 64,
            hidden_size: 64,
            window: None,
        }
    }

    /// 2 layers × K and V × 16 tokens × 2 heads × 64 × 4 bytes.
    const BLOCK: usize = 2 * 2 * 16 * 2 * 64 * 4;

    #[test]
    fn defaults_hold_every_sequence_at_full_length() {
        let r = EngineConfig::default().resolve(&model(), DType::F32, 1 << 33).unwrap();
        assert_eq!(r.scheduler.max_model_len, 256);
        assert_eq!(r.scheduler.num_blocks, 64 * 16);
        assert_eq!(r.kv_cache_bytes, 64 * 16 * BLOCK);
        assert!(r.notes.is_empty());
    }

    #[test]
    fn a_length_nobody_asked_for_is_lowered_with_a_note_and_an_asked_one_refused() {
        let small = EngineConfig { kv_cache_bytes: Some(3 * BLOCK + 1), ..Default::default() };
        let r = small.resolve(&model(), DType::F32, 1 << 33).unwrap();
        assert_eq!(r.scheduler.max_model_len, 48);
        assert!(r.notes[0].contains("from 256 to 48"), "{:?}", r.notes);
        let asked = EngineConfig { max_model_len: Some(49), ..small };
        let e = asked.resolve(&model(), DType::F32, 1 << 33).unwrap_err();
        assert!(matches!(e, ConfigError::PoolTooSmall { blocks: 3, .. }), "{e}");
    }

    #[test]
    fn values_out_of_range_are_named() {
        let cases = [
            (EngineConfig { max_num_seqs: 0, ..Default::default() }, "max_num_seqs is 0"),
            (EngineConfig { block_size: 24, ..Default::default() }, "block_size is 24"),
            (
                EngineConfig { max_model_len: Some(257), ..Default::default() },
                "max_model_len is 257",
            ),
            (
                EngineConfig { num_blocks: Some(usize::MAX / 2), ..Default::default() },
                "num_blocks is",
            ),
        ];
        for (config, text) in cases {
            let e = config.resolve(&model(), DType::F32, 1 << 33).unwrap_err().to_string();
            assert!(e.contains(text), "{e}");
        }
    }
}
