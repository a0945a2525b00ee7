//! Sizes and limits of an engine, and how they follow from a model and the machine.

use crate::kv::{BLOCK_SIZES, PrefixHasher};
use crate::memory::{FixedBytes, MemoryPlan, ModelMemory, PlanPart, SystemMemory};
use crate::ops::StepLimits;
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
#[derive(Clone, Debug, PartialEq)]
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
    /// Share of the memory, over 0 and up to 1, that may be taken once the engine is up, by it and
    /// by everything else; KV blocks take what weights and activations leave. Default: all that is
    /// available, of which KV blocks take what the next field says.
    pub memory_utilization: Option<f32>,
    /// Bytes for KV blocks; default without `memory_utilization`: enough for every sequence at
    /// full length, at most a quarter of what weights and activations leave.
    pub kv_cache_bytes: Option<usize>,
    /// Number of KV blocks, instead of `kv_cache_bytes`.
    pub num_blocks: Option<usize>,
    /// Bytes of host memory for swapped-out blocks: none, or at least a block.
    pub swap_bytes: usize,
    /// Equal prefixes share blocks.
    pub prefix_caching: bool,
    /// Who comes first.
    pub policy: Policy,
    /// What becomes of the blocks of a preempted sequence.
    pub preemption: PreemptionMode,
    /// Plan each step before the results of the one before are applied; default: where the backend
    /// computes while the engine plans.
    pub async_scheduling: Option<bool>,
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
            memory_utilization: None,
            kv_cache_bytes: None,
            num_blocks: None,
            swap_bytes: 0,
            prefix_caching: true,
            policy: Policy::Fcfs,
            preemption: PreemptionMode::Auto,
            async_scheduling: None,
            max_logprobs: DEFAULT_MAX_LOGPROBS,
            seed: 0,
        }
    }
}

/// A configuration that cannot be.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
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
    /// A share that is none.
    #[error("memory_utilization is {0}; it must be over 0 and at most 1")]
    Utilization(f32),
    /// The parts of the engine exceed the memory it may take.
    #[error(
        "the engine needs {} bytes and may take {}: weights {}, workspace {}, logits {}, sampling \
         {}, other {}, swap space {}, KV cache {}; {}",
        .plan.needed(), .plan.budget, .plan.weights, .plan.workspace, .plan.logits, .plan.sampling,
        .plan.other, .plan.swap, .plan.kv_cache, .part.remedy(.plan, str::to_owned)
    )]
    DoesNotFit {
        /// What was asked for, the least of what was not.
        plan: Box<MemoryPlan>,
        /// The first part without room.
        part: PlanPart,
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
        /// Where the memory goes.
        plan: Box<MemoryPlan>,
    },
}

/// The sizes in force: what the scheduler needs, and what was adjusted on the way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedConfig {
    /// Limits for the scheduler.
    pub scheduler: SchedulerConfig,
    /// Where the memory goes.
    pub memory: MemoryPlan,
    /// Most log-probabilities a request may ask for at one position.
    pub max_logprobs: u32,
    /// What is to be measured at start.
    pub measure: Measure,
    /// Plan each step before the results of the one before are applied.
    pub async_scheduling: Option<bool>,
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

/// The memory plan and the numbers of blocks in it.
struct Plan {
    memory: MemoryPlan,
    num_blocks: usize,
    num_swap_blocks: usize,
    /// Bytes of a block.
    block_bytes: usize,
}

impl EngineConfig {
    /// Checks every value against the model and `memory`, and computes the rest.
    ///
    /// # Errors
    /// A value is out of its range, or the parts do not fit the memory.
    pub fn resolve(
        &self,
        model: &dyn ModelMemory,
        memory: SystemMemory,
    ) -> Result<ResolvedConfig, ConfigError> {
        let sizes = self.sizes(model)?;
        let mut plan = self.plan(&sizes, model, memory)?;
        let max_model_len = self.max_model_len_in(&plan, sizes.max_model_len)?;
        let mut notes = Vec::new();
        if max_model_len < sizes.max_model_len {
            notes.push(format!(
                "max_model_len lowered from {} to {max_model_len}, which is what the KV cache of \
                 {} blocks holds",
                sizes.max_model_len, plan.num_blocks
            ));
            // The rotary tables are shorter now, and so are block tables.
            let shorter = SchedulerConfig { max_model_len, ..sizes.clone() };
            let FixedBytes { workspace, other, .. } = self.fixed_bytes(&shorter, model);
            (plan.memory.workspace, plan.memory.other) = (workspace, other);
        }
        let sizes = SchedulerConfig {
            max_model_len,
            num_blocks: plan.num_blocks,
            num_swap_blocks: plan.num_swap_blocks,
            ..sizes
        };
        Ok(ResolvedConfig {
            measure: Measure {
                budget: self.max_num_batched_tokens.is_none(),
                preemption_costs: self.preemption == PreemptionMode::Auto && self.swap_bytes > 0,
            },
            async_scheduling: self.async_scheduling,
            scheduler: self.with_policies(sizes, model),
            memory: plan.memory,
            max_logprobs: self.max_logprobs,
            notes,
        })
    }

    /// The sizes that do not depend on the memory, checked; the rest are defaults.
    fn sizes(&self, model: &dyn ModelMemory) -> Result<SchedulerConfig, ConfigError> {
        in_range("max_num_seqs", self.max_num_seqs, 1..=MAX_SEQS)?;
        let max_num_batched_tokens = self.max_num_batched_tokens.unwrap_or(DEFAULT_BATCHED_TOKENS);
        in_range("max_num_batched_tokens", max_num_batched_tokens, 1..=MAX_BATCHED_TOKENS)?;
        if !BLOCK_SIZES.contains(&self.block_size) {
            let rule = format!("one of {BLOCK_SIZES:?}");
            let (name, value) = ("block_size", self.block_size);
            return Err(ConfigError::OutOfRange { name, value, rule });
        }
        let limit = model.info().max_position_embeddings;
        let max_model_len = self.max_model_len.unwrap_or(limit);
        in_range("max_model_len", max_model_len, 1..=limit)?;
        Ok(SchedulerConfig {
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            block_size: self.block_size,
            ..SchedulerConfig::default()
        })
    }

    /// Where the memory goes, and how many blocks that makes.
    fn plan(
        &self,
        sizes: &SchedulerConfig,
        model: &dyn ModelMemory,
        memory: SystemMemory,
    ) -> Result<Plan, ConfigError> {
        let block_bytes = model
            .block_bytes(self.block_size)
            .filter(|&b| b > 0 && b < isize::MAX as usize)
            .expect("model dimensions are limited at load");
        let fixed = self.fixed_bytes(sizes, model);
        let num_swap_blocks = self.num_swap_blocks(block_bytes)?;
        let mut plan = MemoryPlan {
            swap: if model.swap_is_apart() {
                0
            } else {
                num_swap_blocks.saturating_mul(block_bytes)
            },
            ..MemoryPlan::new(memory, self.budget(memory)?, fixed)
        };
        let blocks_per_seq = sizes.max_model_len.div_ceil(self.block_size);
        let num_blocks = self.num_blocks(blocks_per_seq, block_bytes, &plan)?;
        plan.kv_cache = num_blocks.saturating_mul(block_bytes);
        if let Some(part) = plan.tight_part() {
            // Blocks that nobody asked for are as few as can be: others have to give way.
            let asked = self.num_blocks.is_some() || self.kv_cache_bytes.is_some();
            let part = match part {
                PlanPart::KvCache if !asked && plan.swap > 0 => PlanPart::Swap,
                PlanPart::KvCache if !asked => PlanPart::Workspace,
                part => part,
            };
            return Err(ConfigError::DoesNotFit { plan: Box::new(plan), part });
        }
        Ok(Plan { memory: plan, num_blocks, num_swap_blocks, block_bytes })
    }

    /// All but the KV blocks; sizes that no address can name exceed every budget.
    fn fixed_bytes(&self, sizes: &SchedulerConfig, model: &dyn ModelMemory) -> FixedBytes {
        let limits = StepLimits {
            max_tokens: sizes.max_num_batched_tokens,
            max_seqs: sizes.max_num_seqs,
            max_positions: sizes.max_model_len,
            max_logprobs: (self.max_logprobs as usize).min(model.info().vocab_size),
            block_size: sizes.block_size,
            swap: self.swap_bytes > 0,
            vocab_size: model.info().vocab_size,
            num_heads: model.info().num_heads,
        };
        let beyond = FixedBytes { weights: usize::MAX, ..FixedBytes::default() };
        model.fixed_bytes(&limits).unwrap_or(beyond)
    }

    /// `max_model_len`, or what the pool holds where that is less and nobody asked for the length.
    fn max_model_len_in(&self, plan: &Plan, max_model_len: usize) -> Result<usize, ConfigError> {
        let capacity = plan.num_blocks * self.block_size;
        if capacity < max_model_len && self.max_model_len.is_some() {
            return Err(ConfigError::PoolTooSmall {
                blocks: plan.num_blocks,
                block_size: self.block_size,
                max_model_len,
                needed_bytes: max_model_len.div_ceil(self.block_size) * plan.block_bytes,
                plan: Box::new(plan.memory),
            });
        }
        Ok(max_model_len.min(capacity))
    }

    /// `sizes` with everything that is not a size.
    fn with_policies(&self, sizes: SchedulerConfig, model: &dyn ModelMemory) -> SchedulerConfig {
        let identity = || model.info().cache_identity(model.dtype());
        SchedulerConfig {
            // Static batching is the classic baseline and shares nothing.
            prefix_cache: (self.prefix_caching && self.policy != Policy::Static)
                .then(|| PrefixHasher::new(&identity(), self.block_size)),
            window: model.info().window,
            policy: self.policy,
            preemption: match self.preemption {
                PreemptionMode::Recompute => Preemption::Recompute,
                PreemptionMode::Swap => Preemption::Swap,
                PreemptionMode::Costs(costs) => Preemption::Auto(costs),
                PreemptionMode::Auto => Preemption::Auto(PreemptionCosts::default()),
            },
            ..sizes
        }
    }

    /// Bytes the engine may take of `memory`.
    fn budget(&self, memory: SystemMemory) -> Result<usize, ConfigError> {
        let Some(share) = self.memory_utilization else { return Ok(memory.available) };
        if !(share > 0.0 && share <= 1.0) {
            return Err(ConfigError::Utilization(share));
        }
        let filled = (memory.total as f64 * f64::from(share)) as usize;
        Ok(filled.saturating_sub(memory.taken()))
    }

    fn num_swap_blocks(&self, block_bytes: usize) -> Result<usize, ConfigError> {
        if (1..block_bytes).contains(&self.swap_bytes) {
            return Err(ConfigError::OutOfRange {
                name: "swap_bytes",
                value: self.swap_bytes,
                rule: format!("0 or at least {block_bytes} (one block)"),
            });
        }
        Ok((self.swap_bytes / block_bytes).min(i32::MAX as usize))
    }

    /// Blocks of the pool: what was asked for, or what `plan`, which has none yet, leaves.
    fn num_blocks(
        &self,
        blocks_per_seq: usize,
        block_bytes: usize,
        plan: &MemoryPlan,
    ) -> Result<usize, ConfigError> {
        // Slots are i64 and block ids i32; one bound keeps both far from their ends.
        let most = i32::MAX as usize / self.block_size;
        if let Some(blocks) = self.num_blocks {
            in_range("num_blocks", blocks, 1..=most)?;
            return Ok(blocks);
        }
        if let Some(value) = self.kv_cache_bytes {
            if value < block_bytes {
                let rule = format!("at least {block_bytes} (one block)");
                return Err(ConfigError::OutOfRange { name: "kv_cache_bytes", value, rule });
            }
            return Ok((value / block_bytes).min(most));
        }
        let left = plan.free().unwrap_or(0);
        let blocks = if self.memory_utilization.is_some() {
            left / block_bytes
        } else {
            self.max_num_seqs.saturating_mul(blocks_per_seq).min(left / 4 / block_bytes)
        };
        // Without room for one the plan is refused.
        Ok(blocks.clamp(1, most))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ModelInfo;
    use crate::ops::DType;

    /// A model whose workspace and rotary tables grow by one KiB a token.
    struct Model(ModelInfo);

    impl ModelMemory for Model {
        fn info(&self) -> &ModelInfo {
            &self.0
        }

        fn dtype(&self) -> DType {
            DType::F32
        }

        fn fixed_bytes(&self, limits: &StepLimits) -> Option<FixedBytes> {
            Some(FixedBytes {
                weights: 64 * KIB,
                workspace: limits.max_tokens.checked_mul(KIB)?,
                logits: 2 * KIB,
                sampling: 3 * KIB,
                other: limits.max_positions.checked_mul(KIB)?,
            })
        }

        fn block_bytes(&self, block_size: usize) -> Option<usize> {
            self.0.kv_layout(1, block_size, DType::F32).block_bytes()
        }
    }

    fn model() -> Model {
        Model(ModelInfo {
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
        })
    }

    const KIB: usize = 1024;
    /// 2 layers × K and V × 16 tokens × 2 heads × 64 × 4 bytes.
    const BLOCK: usize = 2 * 2 * 16 * 2 * 64 * 4;
    /// All but KV blocks of the default limits.
    const FIXED: usize = (64 + 512 + 2 + 3 + 256) * KIB;

    fn resolve(config: &EngineConfig, available: usize) -> Result<ResolvedConfig, ConfigError> {
        config.resolve(&model(), SystemMemory { total: 2 * available, available })
    }

    #[test]
    fn defaults_hold_every_sequence_at_full_length() {
        let r = resolve(&EngineConfig::default(), 1 << 33).unwrap();
        assert_eq!(r.scheduler.max_model_len, 256);
        assert_eq!(r.scheduler.num_blocks, 64 * 16);
        assert_eq!(r.memory.kv_cache, 64 * 16 * BLOCK);
        assert_eq!(r.memory.needed(), FIXED + 64 * 16 * BLOCK);
        assert_eq!((r.memory.budget, r.memory.total), (1 << 33, 1 << 34));
        assert!(r.notes.is_empty());
    }

    #[test]
    fn by_default_blocks_take_a_quarter_of_what_is_left_at_most() {
        let r = resolve(&EngineConfig::default(), FIXED + 4 * 20 * BLOCK).unwrap();
        assert_eq!(r.scheduler.num_blocks, 20);
        assert_eq!(r.memory.free(), Some(3 * 20 * BLOCK));
        // One block is the least there can be.
        let r = resolve(&EngineConfig::default(), FIXED + BLOCK).unwrap();
        assert_eq!((r.scheduler.num_blocks, r.scheduler.max_model_len), (1, 16));
    }

    #[test]
    fn a_utilization_gives_blocks_all_that_is_left_of_it() {
        let config = EngineConfig { memory_utilization: Some(0.75), ..Default::default() };
        // Half is taken by others, so a quarter is the engine's.
        let available = 2 * (FIXED + 100 * BLOCK + 1);
        let r = resolve(&config, available).unwrap();
        assert_eq!(r.memory.budget, available / 2);
        assert_eq!(r.scheduler.num_blocks, 100);
        assert_eq!(r.memory.free(), Some(1));
        let swapping = EngineConfig { swap_bytes: 10 * BLOCK, ..config.clone() };
        let r = resolve(&swapping, available).unwrap();
        assert_eq!((r.scheduler.num_blocks, r.scheduler.num_swap_blocks), (90, 10));
        let explicit = EngineConfig { num_blocks: Some(7), ..config };
        assert_eq!(resolve(&explicit, available).unwrap().memory.kv_cache, 7 * BLOCK);
        for share in [0.0, -0.5, 1.01, f32::NAN, f32::INFINITY] {
            let config = EngineConfig { memory_utilization: Some(share), ..Default::default() };
            let error = resolve(&config, available).unwrap_err();
            assert!(matches!(error, ConfigError::Utilization(_)), "{error}");
        }
        let taken = EngineConfig { memory_utilization: Some(0.5), ..Default::default() };
        let error = resolve(&taken, available).unwrap_err();
        assert!(error.to_string().ends_with("or raise memory_utilization"), "{error}");
    }

    #[test]
    fn what_does_not_fit_is_refused_with_every_number() {
        let config =
            EngineConfig { num_blocks: Some(16), swap_bytes: 2 * BLOCK, ..Default::default() };
        let enough = FIXED + 18 * BLOCK;
        assert_eq!(resolve(&config, enough).unwrap().memory.free(), Some(0));
        for (available, part, remedy) in [
            (enough - 1, PlanPart::KvCache, "lower kv_cache_bytes or num_blocks"),
            (FIXED + 2 * BLOCK - 1, PlanPart::Swap, "lower swap_bytes"),
            (FIXED - 1, PlanPart::Workspace, "lower max_num_batched_tokens"),
            (64 * KIB - 1, PlanPart::Weights, "take a smaller model or a smaller dtype"),
        ] {
            let error = resolve(&config, available).unwrap_err();
            let text = error.to_string();
            let ConfigError::DoesNotFit { plan, part: tight } = error else { panic!("{text}") };
            assert_eq!((tight, plan.needed(), plan.budget), (part, enough, available), "{text}");
            assert!(text.contains(remedy), "{text}");
            let kv = format!("needs {enough} bytes and may take {available}: weights 65536, ");
            assert!(text.contains(&kv) && text.contains("KV cache 524288;"), "{text}");
        }
        // Blocks that were not asked for are counted as one, and something else is to give way.
        for (swap_bytes, tight) in [(0, PlanPart::Workspace), (BLOCK, PlanPart::Swap)] {
            let config = EngineConfig { swap_bytes, ..Default::default() };
            let error = resolve(&config, FIXED + swap_bytes + BLOCK - 1).unwrap_err();
            let ConfigError::DoesNotFit { plan, part } = error else { panic!("{error}") };
            assert_eq!((plan.kv_cache, part), (BLOCK, tight));
        }
    }

    #[test]
    fn a_length_nobody_asked_for_is_lowered_with_a_note_and_an_asked_one_refused() {
        let small = EngineConfig { kv_cache_bytes: Some(3 * BLOCK + 1), ..Default::default() };
        let r = resolve(&small, 1 << 33).unwrap();
        assert_eq!(r.scheduler.max_model_len, 48);
        assert!(r.notes[0].contains("from 256 to 48"), "{:?}", r.notes);
        assert_eq!(r.memory.other, 48 * KIB);
        let asked = EngineConfig { max_model_len: Some(49), ..small };
        let e = resolve(&asked, 1 << 33).unwrap_err();
        assert!(matches!(e, ConfigError::PoolTooSmall { blocks: 3, .. }), "{e}");
    }

    #[test]
    fn values_out_of_range_are_named() {
        let config = EngineConfig::default;
        let cases = [
            (EngineConfig { max_num_seqs: 0, ..config() }, "max_num_seqs is 0"),
            (EngineConfig { block_size: 24, ..config() }, "block_size is 24"),
            (EngineConfig { max_model_len: Some(257), ..config() }, "max_model_len is 257"),
            (EngineConfig { num_blocks: Some(usize::MAX / 2), ..config() }, "num_blocks is"),
            (EngineConfig { kv_cache_bytes: Some(BLOCK - 1), ..config() }, "at least 32768"),
            (EngineConfig { swap_bytes: 4, ..config() }, "swap_bytes is 4; it must be 0 or at"),
        ];
        for (config, text) in cases {
            let e = resolve(&config, 1 << 33).unwrap_err().to_string();
            assert!(e.contains(text), "{e}");
        }
    }

    #[test]
    fn sizes_that_no_address_can_name_are_refused() {
        for config in [
            EngineConfig { kv_cache_bytes: Some(usize::MAX), ..Default::default() },
            EngineConfig { swap_bytes: usize::MAX, ..Default::default() },
            EngineConfig { num_blocks: Some(i32::MAX as usize / 16), ..Default::default() },
        ] {
            let error = resolve(&config, 1 << 33).unwrap_err();
            assert!(matches!(error, ConfigError::DoesNotFit { .. }), "{error}");
        }
    }
}
