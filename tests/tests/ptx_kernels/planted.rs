//! Bugs planted in shipped kernels, or in what they are given, are caught; the message names the
//! kernel, the instruction and the lane.

use quire_ptxsim::{CtaOrder, FaultKind, SimError};
use quire_tests::args;
use quire_tests::ptx::{Element, Gpu, Kernels, Variant};

use crate::attention::{Attention, Case, Seq, Step};

/// Asserts the parts of a fault's message.
fn says(result: Result<(), SimError>, parts: &[&str]) -> FaultKind {
    let error = result.expect_err("the bug is caught");
    let message = error.to_string();
    for part in ["kernel ", "line ", ": `", "CTA (", "warp ", "lane "].iter().chain(parts) {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
    error.fault().unwrap_or_else(|| panic!("not a fault: {message}")).clone()
}

/// Attention in bf16 with heads of 64.
fn attention(kernels: &Kernels) -> Attention<'_> {
    let mut all = Attention::all(kernels).into_iter();
    let found = all.find(|a| a.element() == Element::Bf16 && a.head_dims() == [64]);
    found.expect("a variant of bf16 with heads of 64")
}

const SEQ: Seq = Seq { computed: 20, rows: 1, id: 1 };

/// The register that a parameter is loaded into.
fn register_of(variant: &Variant<'_>, param: &str) -> String {
    let (ptx, param) = (variant.ptx(), format!("[{}]", variant.param(param)));
    let line = ptx.lines().find(|line| line.contains("ld.param") && line.contains(&param));
    let words: Vec<_> = line.expect("it is loaded").split([' ', '\t', ',']).collect();
    let register = words.iter().find(|word| word.starts_with('%'));
    register.expect("a register").to_string()
}

/// `x < bound` holds always: `setp.lt.s32 p, x, bound` compares with 2³¹ − 1 instead.
fn without_bound(variant: &Variant<'_>, bound: &str) -> String {
    let (ptx, operand) = (variant.ptx(), format!(", {};", register_of(variant, bound)));
    let lines = ptx.lines().map(|line| match line.contains("setp.lt.s32") {
        true => line.replace(&operand, ", 2147483647;"),
        false => line.to_owned(),
    });
    let changed = lines.collect::<Vec<_>>().join("\n");
    assert_ne!(changed, ptx.trim_end(), "{} compares nothing with {bound}", variant.name());
    changed
}

#[test]
fn rows_past_the_group_without_a_mask() {
    let kernels = Kernels::load();
    let attention = attention(&kernels);
    let decode = attention.decode.with_ptx(&without_bound(&attention.decode, "group"));
    let case = Case { group: 7, ..Case::PLAIN };
    let mut step = Step::new(case, Element::Bf16, &[SEQ], CtaOrder::Forward);
    let kind = says(step.try_decode(&decode, &attention.fold, 1), &["decode_attention", "`q`"]);
    assert!(matches!(kind, FaultKind::OutOfBounds { .. }), "{kind:?}");
}

#[test]
fn keys_and_values_past_the_end() {
    let kernels = Kernels::load();
    let attention = attention(&kernels);
    // Asynchronous copies take all bytes instead of none where the mask is false.
    let mut changed = 0;
    let lines: Vec<String> = attention
        .decode
        .ptx()
        .lines()
        .map(|line| match line.split_once(", 0x10, %") {
            Some((head, _)) if line.contains("cp.async") => {
                changed += 1;
                format!("{head}, 0x10, 0x10;")
            }
            _ => line.to_owned(),
        })
        .collect();
    assert!(changed > 0, "keys and values are copied asynchronously");
    let decode = attention.decode.with_ptx(&lines.join("\n"));
    let mut step = Step::undefined_elsewhere(Case::PLAIN, Element::Bf16, &[SEQ]);
    step.try_decode(&attention.decode, &attention.fold, 1).expect("no bug, no fault");
    let kind = says(step.try_decode(&decode, &attention.fold, 1), &["value stored to global"]);
    assert!(matches!(kind, FaultKind::Uninitialised { .. }), "{kind:?}");
}

#[test]
fn a_stride_that_breaks_its_promise() {
    let kernels = Kernels::load();
    let mut variants = kernels.variants("gemm_partial").into_iter();
    let variant = variants.find(|v| v.element() == Element::Bf16).expect("a variant");
    let variant = variant.trusting();
    let mut gpu = Gpu::new();
    let (n, k, stride) = (64usize, 128usize, 129usize);
    let x = gpu.floats("x", Element::Bf16, &vec![1.0; 2 * stride]);
    let w = gpu.floats("w", Element::Bf16, &vec![1.0; n * k]);
    let partial = gpu.empty("partial", 4 * 2 * n);
    let result = gpu.try_launch(
        &variant,
        &[1, 1, 1],
        args![
            partial, x, w, num_rows: 2usize, num_n: n, num_k: k, x_stride: stride,
        ],
    );
    let kind = says(result, &["gemm_partial", "misaligned", "byte 258 of `x`"]);
    assert!(matches!(kind, FaultKind::Misaligned { bytes: 16, .. }), "{kind:?}");
}

#[test]
#[should_panic(expected = "x_stride = Int(129) is no multiple of Some(16)")]
fn the_launcher_refuses_a_broken_promise() {
    let kernels = Kernels::load();
    let variants = kernels.variants("gemm_partial");
    let args = args![
        partial: 0u64, x: 0u64, w: 0u64, num_rows: 2usize, num_n: 64usize, num_k: 64usize,
        x_stride: 129usize,
    ];
    Gpu::new().launch(&variants[0], &[1], args);
}

/// A slot of the block after the last one.
#[test]
fn a_slot_that_is_off_by_a_block() {
    let kernels = Kernels::load();
    let variants = kernels.variants("qk_norm_rope_write_kv");
    let (heads, kv_heads, d, block_size, num_blocks) = (2usize, 1usize, 64usize, 16usize, 3usize);
    let mut gpu = Gpu::new();
    let floats =
        |gpu: &mut Gpu, name: &str, count: usize| gpu.floats(name, Element::F32, &vec![0.5; count]);
    let variant = variants.iter().find(|v| v.element() == Element::Bf16).expect("a variant");
    let q_out = gpu.empty("q_out", heads * d * 2);
    let kv_cache = gpu.empty("kv_cache", num_blocks * 2 * kv_heads * block_size * d * 2);
    let qkv = floats(&mut gpu, "qkv", (heads + 2 * kv_heads) * d);
    let (cos, sin) = (floats(&mut gpu, "cos", d / 2), floats(&mut gpu, "sin", d / 2));
    let positions = gpu.i32s("positions", &[0]);
    let slot_mapping = gpu.i64s("slot_mapping", &[(num_blocks * block_size) as i64]);
    let result = gpu.try_launch(variant, &[1, heads + 2 * kv_heads], args![
        q_out, kv_cache, qkv, q_norm: 0u64, k_norm: 0u64, cos, sin, positions, slot_mapping,
        num_q_heads: heads, num_kv_heads: kv_heads, head_dim: d, rot_dim: d, interleaved: 0usize,
        has_norm: 0usize, eps: 1e-5f32, block_size, block_shift: 4usize,
    ]);
    let kind = says(result, &["write_kv", "global write", "past the end of `kv_cache`"]);
    assert!(matches!(kind, FaultKind::OutOfBounds { .. }), "{kind:?}");
}
