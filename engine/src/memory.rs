//! What running a model takes in memory, computed before anything is allocated.
//!
//! ```text
//! budget = weights + workspace + logits + sampling + other + KV cache + swap [+ free]
//! ```
//! The numbers are those the backend allocates by: a model is built, and counted, by one walk over
//! its parts ([`ModelMemory`]), and a backend sizes a buffer in one place ([`BufferSizes`]). Not in
//! the plan are the process itself, the rounding of each buffer to whole pages, and the engine's
//! lists: under 200 bytes a KV block, and what requests bring.

mod system;

pub use system::SystemMemory;

use crate::model::ModelInfo;
use crate::ops::{DType, KvLayout, MatrixShape, StepLimits, TensorKind};
use serde::Serialize;

/// What the buffers of a backend take, in bytes; the backend allocates by the same numbers.
/// `None`: more than an address can name.
pub trait BufferSizes {
    /// Type of GEMM inputs, KV and the weights that are not quantised.
    fn dtype(&self) -> DType;

    /// A weight, packed.
    fn matrix_bytes(&self, matrix: &MatrixShape) -> Option<usize>;

    /// The quantised format a weight is kept in, as users call it.
    fn quantised_as(&self, _matrix: &MatrixShape) -> Option<&'static str> {
        None
    }

    /// A small f32 parameter.
    fn vector_bytes(&self, len: usize) -> Option<usize> {
        len.checked_mul(size_of::<f32>())
    }

    /// An activation of at most `max_rows` rows.
    fn tensor_bytes(&self, max_rows: usize, cols: usize, kind: TensorKind) -> Option<usize>;

    /// All blocks of a KV cache, here or on the host.
    fn kv_bytes(&self, layout: &KvLayout) -> Option<usize>;

    /// Most that choosing tokens takes.
    fn sampling_bytes(&self, limits: &StepLimits) -> Option<usize>;

    /// What steps of a model with these weights take besides the model's own buffers, with a KV
    /// cache of `layout`.
    fn step_bytes(
        &self,
        _limits: &StepLimits,
        _layout: &KvLayout,
        _matrices: &[MatrixShape],
    ) -> Option<usize> {
        Some(0)
    }

    /// Whether swapped-out blocks are in other memory than everything else.
    fn swap_is_apart(&self) -> bool {
        false
    }
}

/// What a model takes on some backend, counted without loading it.
pub trait ModelMemory {
    /// The model's sizes.
    fn info(&self) -> &ModelInfo;

    /// Type of GEMM inputs, KV and the weights that are not quantised.
    fn dtype(&self) -> DType;

    /// All but the KV blocks, for steps within `limits`. `None`: more than an address can name.
    fn fixed_bytes(&self, limits: &StepLimits) -> Option<FixedBytes>;

    /// Whether swapped-out blocks are in other memory than everything else.
    fn swap_is_apart(&self) -> bool {
        false
    }

    /// One KV block of `block_size` tokens, over all layers.
    fn block_bytes(&self, block_size: usize) -> Option<usize>;
}

/// Bytes that do not depend on the number of KV blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FixedBytes {
    /// Weight matrices as the backend packs them.
    pub weights: usize,
    /// Activations of the largest step.
    pub workspace: usize,
    /// Logits and their inputs, for the rows that are computed at a time.
    pub logits: usize,
    /// Buffers of the samplers.
    pub sampling: usize,
    /// Norms, biases and rotary tables.
    pub other: usize,
}

/// Where the memory goes, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// What the machine has, within the limit of the control group.
    pub total: usize,
    /// What of it was available to this process when the plan was made.
    pub available: usize,
    /// What the engine may take.
    pub budget: usize,
    /// Weight matrices as the backend packs them.
    pub weights: usize,
    /// Activations of the largest step.
    pub workspace: usize,
    /// Logits and their inputs, for the rows that are computed at a time.
    pub logits: usize,
    /// Buffers of the samplers.
    pub sampling: usize,
    /// Norms, biases and rotary tables.
    pub other: usize,
    /// KV blocks.
    pub kv_cache: usize,
    /// Host memory for swapped-out blocks, where all else is in host memory, too.
    pub swap: usize,
}

/// A part of a plan, in the order in which parts are given room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanPart {
    /// Weights.
    Weights,
    /// Activations, logits, samplers and tables: all else that does not hold KV.
    Workspace,
    /// Swapped-out blocks.
    Swap,
    /// KV blocks.
    KvCache,
}

impl PlanPart {
    /// What to change where this part of `plan` has no room; `name` says how a field of
    /// [`EngineConfig`](crate::EngineConfig) is to be named.
    pub fn remedy(self, plan: &MemoryPlan, name: impl Fn(&'static str) -> String) -> String {
        let lower = |fields: &[&'static str]| {
            let names: Vec<String> = fields.iter().map(|field| name(field)).collect();
            format!("lower {}", names.join(" or "))
        };
        let mut remedy = match self {
            PlanPart::Weights => format!("take a smaller model or a smaller {}", name("dtype")),
            PlanPart::Workspace => lower(&["max_num_batched_tokens", "max_model_len"]),
            PlanPart::Swap => lower(&["swap_bytes"]),
            PlanPart::KvCache => lower(&["kv_cache_bytes", "num_blocks"]),
        };
        if plan.budget < plan.available && plan.needed() <= plan.available {
            remedy.push_str(&format!(", or raise {}", name("memory_utilization")));
        }
        remedy
    }
}

impl MemoryPlan {
    /// A plan without KV blocks; `budget` is what the engine may take of `memory`.
    pub fn new(memory: SystemMemory, budget: usize, fixed: FixedBytes) -> Self {
        let FixedBytes { weights, workspace, logits, sampling, other } = fixed;
        MemoryPlan {
            total: memory.total,
            available: memory.available,
            budget,
            weights,
            workspace,
            logits,
            sampling,
            other,
            kv_cache: 0,
            swap: 0,
        }
    }

    /// Name and bytes of each part.
    pub fn parts(&self) -> [(&'static str, usize); 7] {
        [
            ("weights", self.weights),
            ("workspace", self.workspace),
            ("logits", self.logits),
            ("sampling", self.sampling),
            ("other", self.other),
            ("KV cache", self.kv_cache),
            ("swap space", self.swap),
        ]
    }

    /// All parts together; what no address can name counts as the largest number.
    pub fn needed(&self) -> usize {
        self.parts().iter().fold(0, |sum, part| sum.saturating_add(part.1))
    }

    /// All that does not hold KV.
    pub fn fixed(&self) -> usize {
        self.weights.saturating_add(self.step())
    }

    /// All that holds neither weights nor KV.
    fn step(&self) -> usize {
        let parts = [self.workspace, self.logits, self.sampling, self.other];
        parts.into_iter().fold(0, usize::saturating_add)
    }

    /// What the parts leave of the budget; `None` where they exceed it.
    pub fn free(&self) -> Option<usize> {
        self.budget.checked_sub(self.needed())
    }

    /// The first part for which the budget has no room.
    pub fn tight_part(&self) -> Option<PlanPart> {
        let parts = [
            (PlanPart::Weights, self.weights),
            (PlanPart::Workspace, self.step()),
            (PlanPart::Swap, self.swap),
            (PlanPart::KvCache, self.kv_cache),
        ];
        let mut sum = 0usize;
        parts.into_iter().find_map(|(part, bytes)| {
            sum = sum.saturating_add(bytes);
            (sum > self.budget).then_some(part)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(budget: usize) -> MemoryPlan {
        let fixed = FixedBytes { weights: 100, workspace: 20, logits: 5, sampling: 4, other: 1 };
        let memory = SystemMemory { total: 1000, available: 500 };
        MemoryPlan { kv_cache: 60, swap: 10, ..MemoryPlan::new(memory, budget, fixed) }
    }

    #[test]
    fn the_first_part_without_room_is_named() {
        assert_eq!((plan(0).needed(), plan(0).fixed()), (200, 130));
        for (budget, part, free) in [
            (99, Some(PlanPart::Weights), None),
            (100, Some(PlanPart::Workspace), None),
            (129, Some(PlanPart::Workspace), None),
            (139, Some(PlanPart::Swap), None),
            (140, Some(PlanPart::KvCache), None),
            (199, Some(PlanPart::KvCache), None),
            (200, None, Some(0)),
            (207, None, Some(7)),
        ] {
            assert_eq!((plan(budget).tight_part(), plan(budget).free()), (part, free), "{budget}");
        }
    }

    #[test]
    fn remedies_name_the_fields() {
        let upper = |part: PlanPart, budget| part.remedy(&plan(budget), str::to_uppercase);
        assert_eq!(upper(PlanPart::KvCache, 500), "lower KV_CACHE_BYTES or NUM_BLOCKS");
        let raise = ", or raise MEMORY_UTILIZATION";
        assert_eq!(upper(PlanPart::Swap, 499), format!("lower SWAP_BYTES{raise}"));
    }

    #[test]
    fn sums_beyond_any_address_fit_no_budget() {
        let huge = MemoryPlan { kv_cache: usize::MAX, ..plan(usize::MAX - 1) };
        assert_eq!(huge.needed(), usize::MAX);
        assert_eq!(huge.tight_part(), Some(PlanPart::KvCache));
    }
}
