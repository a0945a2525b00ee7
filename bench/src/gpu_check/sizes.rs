//! What is measured, and the same at sizes for a dry run, so that this goes every way, too.

use quire_engine::DType;

use crate::models::{self, LLAMA_1B, LLAMA_8B, SMOLLM2, TINY};

/// Every size that a run is made of.
pub(super) struct Sizes {
    /// The model whose requests must not change with the batch.
    pub invariant_model: models::Sizes,
    /// Tokens of their prompts.
    pub prompts: &'static [usize],
    /// Tokens that they generate.
    pub outputs: usize,
    /// Goldens that are run, in which types, and the first of them in how many ways.
    pub goldens: usize,
    pub golden_dtypes: &'static [DType],
    pub golden_ways: usize,
    /// Random cases of each op.
    pub op_cases: u32,
    /// Bytes of timed copies.
    pub copies: &'static [usize],
    /// Rows, columns and depth of the product whose rate is the matrix peak.
    pub peak: usize,
    /// Bytes that measured memory is spread over, so that no cache holds it.
    pub spread: usize,
    pub attention: AttentionSizes,
    /// Shapes of weights, and rows.
    pub gemm: &'static [GemmShape],
    pub gemm_rows: &'static [usize],
    /// The model whose steps are timed, with its name, and sequences of a step.
    pub step_model: (&'static str, models::Sizes),
    pub step_batches: &'static [usize],
    pub step_context: usize,
    /// Steps that are timed.
    pub steps: usize,
    /// Whole models, by name.
    pub models: &'static [(&'static str, models::Sizes)],
    pub batches: &'static [usize],
    /// Tokens of a prompt, and those of the prompt whose first token is waited for.
    pub prompt: usize,
    pub long_prompt: usize,
    /// Tokens generated for each sequence.
    pub generated: usize,
}

/// Sizes of attention.
pub(super) struct AttentionSizes {
    pub kv_heads: usize,
    pub head_dim: usize,
    pub batches: &'static [usize],
    pub contexts: &'static [usize],
    pub groups: &'static [usize],
    pub prefill: &'static [usize],
    /// Query heads of a KV head in prefill.
    pub prefill_group: usize,
    pub block_sizes: &'static [usize],
    /// Sequences and keys when block sizes are compared.
    pub compared: &'static [(usize, usize)],
    /// Sequences when the fold's cost is found, and splits of the longest.
    pub fold_seqs: usize,
    pub fold_splits: usize,
}

/// The shape of a weight.
#[derive(Clone, Copy, Debug)]
pub(super) struct GemmShape {
    pub name: &'static str,
    /// Rows; gate and up together where it is both.
    pub n: usize,
    pub k: usize,
    /// Gate and up of an MLP.
    pub gated: bool,
}

const fn shape(name: &'static str, n: usize, k: usize, gated: bool) -> GemmShape {
    GemmShape { name, n, k, gated }
}

/// On a device.
pub(super) const FULL: Sizes = Sizes {
    invariant_model: SMOLLM2,
    prompts: &[40, 1, 300, 17, 129, 64, 260, 8],
    outputs: 32,
    goldens: usize::MAX,
    golden_dtypes: &[DType::Bf16, DType::F32],
    golden_ways: usize::MAX,
    op_cases: 24,
    copies: &[1 << 16, 1 << 20, 1 << 24, 1 << 28, 1 << 30],
    peak: 8192,
    spread: 256 << 20,
    attention: AttentionSizes {
        kv_heads: 8,
        head_dim: 128,
        batches: &[64, 1, 8, 256],
        contexts: &[4096, 32_768, 512],
        groups: &[4, 1, 8],
        prefill: &[4096, 1024, 16_384],
        prefill_group: 4,
        block_sizes: &[8, 16, 32, 64],
        compared: &[(64, 4096), (1, 32_768)],
        fold_seqs: 528,
        fold_splits: 4,
    },
    gemm: &[
        shape("qkv", 6144, 4096, false),
        shape("o", 4096, 4096, false),
        shape("gate_up", 28_672, 4096, true),
        shape("down", 4096, 14_336, false),
        shape("head", 128_256, 4096, false),
    ],
    gemm_rows: &[1, 64, 2048, 16, 256, 8],
    step_model: ("1B", LLAMA_1B),
    step_batches: &[1, 64],
    step_context: 512,
    steps: 100,
    models: &[("8B", LLAMA_8B), ("1B", LLAMA_1B)],
    batches: &[1, 64, 16, 256],
    prompt: 128,
    long_prompt: 1024,
    generated: 64,
};

/// On the stand-in driver.
pub(super) const DRY: Sizes = Sizes {
    invariant_model: TINY,
    prompts: &[30, 15, 14, 33],
    outputs: 4,
    goldens: 1,
    // In f32 one alone takes the interpreter most of a minute.
    golden_dtypes: &[DType::Bf16],
    golden_ways: 1,
    op_cases: 1,
    copies: &[1 << 10, 1 << 16],
    peak: 64,
    spread: 1 << 12,
    attention: AttentionSizes {
        kv_heads: 1,
        head_dim: 64,
        batches: &[2, 1],
        contexts: &[40, 260],
        groups: &[2],
        prefill: &[24],
        prefill_group: 2,
        block_sizes: &[8, 16],
        compared: &[(1, 40)],
        fold_seqs: 1,
        fold_splits: 2,
    },
    gemm: &[shape("plain", 64, 64, false), shape("gated", 64, 64, true)],
    gemm_rows: &[1, 20],
    step_model: ("tiny", TINY),
    step_batches: &[2],
    step_context: 20,
    steps: 3,
    models: &[("tiny", TINY)],
    batches: &[1, 2],
    prompt: 6,
    long_prompt: 24,
    generated: 4,
};
