//! `rms_norm`, `add_rms_norm`, `qk_norm_rope_write_kv`.

use proptest::prelude::*;
use quire_ptxsim::CtaOrder;
use quire_tests::args;
use quire_tests::ptx::{Element, Gpu, Kernels, Variant};
use quire_tests::rng::Rng;

pub const TESTED: &[&str] = &["add_rms_norm", "qk_norm_rope_write_kv", "rms_norm"];

const EPS: f32 = 1e-5;

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// x · weight / √(mean x² + eps), in f64.
fn normed(x: &[f32], weight: &[f32]) -> Vec<f64> {
    let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / x.len() as f64;
    let factor = (mean + f64::from(EPS)).sqrt().recip();
    x.iter().zip(weight).map(|(&x, &w)| f64::from(x) * factor * f64::from(w)).collect()
}

/// Sums of squares do not cancel: errors are relative, and one rounding to the type is added.
fn assert_near(what: &str, element: Element, got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{what}");
    let error = (want.len() + 16) as f64 * 2f64.powi(-24) + element.ulp();
    for (i, (&got, want)) in got.iter().zip(want).enumerate() {
        let bound = error * want.abs() + 1e-6;
        assert!((f64::from(got) - want).abs() <= bound, "{what}, {i}: {got} is not {want}");
    }
}

pub fn rms_norm(variant: &Variant<'_>, x: &[f32], weight: &[f32], order: CtaOrder) -> Vec<f32> {
    let (mut gpu, width, element) = (Gpu::ordered(order), weight.len(), variant.element());
    let out = gpu.empty("out", x.len() * element.bytes());
    let input = gpu.floats("x", Element::F32, x);
    let weight = gpu.floats("weight", Element::F32, weight);
    let args = args![out, x: input, weight, eps: EPS, width];
    gpu.launch(variant, &[x.len() / width], args);
    gpu.read(out, element, x.len())
}

pub fn add_rms_norm(
    variant: &Variant<'_>,
    (x, delta): (&[f32], &[f32]),
    weight: &[f32],
) -> (Vec<f32>, Vec<f32>) {
    let (mut gpu, width, element) =
        (Gpu::ordered(CtaOrder::Reverse), weight.len(), variant.element());
    let out = gpu.empty("out", x.len() * element.bytes());
    let residual = gpu.floats("residual", Element::F32, x);
    let delta = gpu.floats("delta", Element::F32, delta);
    let weight = gpu.floats("weight", Element::F32, weight);
    let args = args![out, residual, delta, weight, eps: EPS, width];
    gpu.launch(variant, &[x.len() / width], args);
    (gpu.read(out, element, x.len()), gpu.read(residual, Element::F32, x.len()))
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 8,
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn norms(rows in 1..8usize, width in 1..160usize, seed in any::<u64>()) {
        let (width, kernels) = (16 * width, Kernels::load());
        let mut rng = Rng::new(seed);
        let (x, delta) = (rng.floats(rows * width, 8.0), rng.floats(rows * width, 2.0));
        let weight = rng.floats(width, 1.5);
        let sum: Vec<f32> = x.iter().zip(&delta).map(|(x, d)| x + d).collect();
        for plain in kernels.variants("rms_norm") {
            let element = plain.element();
            let batch = rms_norm(&plain, &x, &weight, CtaOrder::Forward);
            let shuffled = rms_norm(&plain, &x, &weight, CtaOrder::Shuffled(seed));
            prop_assert_eq!(bits(&batch), bits(&shuffled));
            for (row, got) in batch.chunks_exact(width).enumerate() {
                let x = &x[row * width..][..width];
                assert_near(plain.name(), element, got, &normed(x, &weight));
                let alone = rms_norm(&plain, x, &weight, CtaOrder::Forward);
                prop_assert_eq!(bits(&alone), bits(got), "row {} alone", row);
            }
            let fused = kernels.of("add_rms_norm", element);
            let (out, residual) = add_rms_norm(&fused, (&x, &delta), &weight);
            prop_assert_eq!(bits(&residual), bits(&sum));
            let unfused = rms_norm(&plain, &sum, &weight, CtaOrder::Forward);
            prop_assert_eq!(bits(&out), bits(&unfused), "{}", fused.name());
        }
    }

    #[test]
    fn queries_keys_and_values(
        tokens in 1..5usize,
        group in prop::sample::select(vec![1usize, 3, 7]),
        head_dim in prop::sample::select(vec![16usize, 64, 80, 128, 192, 256]),
        rot_quarters in 1..5usize,
        interleaved in any::<bool>(),
        has_norm in any::<bool>(),
        block_shift in 3..8usize,
        far in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let rot_dim = (head_dim * rot_quarters / 4).next_multiple_of(2);
        let case = Rope {
            tokens, kv_heads: 2, group, head_dim, rot_dim, interleaved, has_norm, block_shift,
            far, seed,
        };
        check_rope(&Kernels::load(), &case);
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Rope {
    pub tokens: usize,
    pub kv_heads: usize,
    pub group: usize,
    pub head_dim: usize,
    pub rot_dim: usize,
    pub interleaved: bool,
    pub has_norm: bool,
    pub block_shift: usize,
    /// The blocks are the last ones of a cache of more than 2³² elements.
    pub far: bool,
    pub seed: u64,
}

const MAX_POSITION: usize = 40;
const NUM_BLOCKS: usize = 4;

impl Rope {
    fn heads(&self) -> usize {
        self.group * self.kv_heads
    }

    fn width(&self) -> usize {
        (self.heads() + 2 * self.kv_heads) * self.head_dim
    }

    /// Blocks, which are not there, before the ones that are; and the elements of a block.
    fn absent_blocks(&self) -> (usize, usize) {
        let block_elements = (2 * self.kv_heads * self.head_dim) << self.block_shift;
        (if self.far { (1 << 32) / block_elements } else { 0 }, block_elements)
    }

    fn floats(&self, name: &str, count: usize) -> Vec<f32> {
        Rng::named(self.seed, name).floats(count, 2.0)
    }

    fn positions(&self) -> Vec<i32> {
        let mut rng = Rng::named(self.seed, "positions");
        (0..self.tokens).map(|_| rng.below(MAX_POSITION) as i32).collect()
    }

    /// Distinct slots; every third token has none.
    fn slots(&self) -> Vec<i64> {
        let mut slots: Vec<i64> = (0..(NUM_BLOCKS << self.block_shift) as i64).collect();
        Rng::named(self.seed, "slots").shuffle(&mut slots);
        let slots = slots.into_iter().take(self.tokens).enumerate();
        slots.map(|(i, slot)| if i % 3 == 2 { -1 } else { slot }).collect()
    }

    /// A head in f64; `norm`: of a query or key.
    fn head(&self, token: usize, head: usize, norm: Option<&[f32]>) -> Vec<f64> {
        let (d, half) = (self.head_dim, self.rot_dim / 2);
        let qkv = self.floats("qkv", self.tokens * self.width());
        let x = &qkv[token * self.width() + head * d..][..d];
        let mut y: Vec<f64> = x.iter().map(|&x| x.into()).collect();
        let Some(weight) = norm else { return y };
        if self.has_norm {
            y = normed(x, weight);
        }
        let angle = self.positions()[token] as usize * half;
        let (cos, sin) =
            (self.floats("cos", MAX_POSITION * half), self.floats("sin", MAX_POSITION * half));
        for i in 0..half {
            let (a, b) = if self.interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
            let (c, s) = (f64::from(cos[angle + i]), f64::from(sin[angle + i]));
            (y[a], y[b]) = (y[a] * c - y[b] * s, y[b] * c + y[a] * s);
        }
        y
    }
}

/// Queries of the given tokens, and the cache, in which what was not written is `None`.
pub fn run_rope(
    variant: &Variant<'_>,
    case: &Rope,
    tokens: &[usize],
    order: CtaOrder,
) -> (Vec<f32>, Vec<Option<f32>>) {
    let (mut gpu, element) = (Gpu::ordered(order), variant.element());
    let (qkv, half) = (case.floats("qkv", case.tokens * case.width()), case.rot_dim / 2);
    let picked: Vec<f32> =
        tokens.iter().flat_map(|t| qkv[t * case.width()..][..case.width()].to_vec()).collect();
    let elements = (NUM_BLOCKS * 2 * case.kv_heads * case.head_dim) << case.block_shift;
    let (q_len, bytes) = (tokens.len() * case.heads() * case.head_dim, element.bytes());
    let q_out = gpu.empty("q_out", q_len * bytes);
    let kv_cache = gpu.empty("kv_cache", elements * bytes);
    let qkv = gpu.floats("qkv", Element::F32, &picked);
    let norm = |gpu: &mut Gpu, name| match case.has_norm {
        true => gpu.floats(name, Element::F32, &case.floats(name, case.head_dim)),
        false => 0,
    };
    let (q_norm, k_norm) = (norm(&mut gpu, "q_norm"), norm(&mut gpu, "k_norm"));
    let cos = gpu.floats("cos", Element::F32, &case.floats("cos", MAX_POSITION * half));
    let sin = gpu.floats("sin", Element::F32, &case.floats("sin", MAX_POSITION * half));
    let (all, slots) = (case.positions(), case.slots());
    let positions = gpu.i32s("positions", &tokens.iter().map(|&t| all[t]).collect::<Vec<_>>());
    let (absent, block_elements) = case.absent_blocks();
    let first_slot = (absent << case.block_shift) as i64;
    let slot = |&t: &usize| if slots[t] < 0 { -1 } else { first_slot + slots[t] };
    let slot_mapping = gpu.i64s("slot_mapping", &tokens.iter().map(slot).collect::<Vec<_>>());
    let first_block = kv_cache - (absent * block_elements * bytes) as u64;
    gpu.launch(
        variant,
        &[tokens.len(), case.heads() + 2 * case.kv_heads],
        args![
            q_out, kv_cache: first_block, qkv, q_norm, k_norm, cos, sin, positions, slot_mapping,
            num_q_heads: case.heads(), num_kv_heads: case.kv_heads, head_dim: case.head_dim,
            rot_dim: case.rot_dim, interleaved: usize::from(case.interleaved),
            has_norm: usize::from(case.has_norm), eps: EPS, block_size: 1usize << case.block_shift,
            block_shift: case.block_shift,
        ],
    );
    let cell = |i: usize| {
        let address = kv_cache + (i * bytes) as u64;
        let written = gpu.memory.is_written(address, bytes).expect("inside");
        written.then(|| gpu.read(address, element, 1)[0])
    };
    (gpu.read(q_out, element, q_len), (0..elements).map(cell).collect())
}

fn check_rope(kernels: &Kernels, case: &Rope) {
    let all: Vec<usize> = (0..case.tokens).collect();
    let (d, block_size) = (case.head_dim, 1 << case.block_shift);
    let (q_norm, k_norm) = (case.floats("q_norm", d), case.floats("k_norm", d));
    let variants = kernels.variants("qk_norm_rope_write_kv");
    for variant in variants.iter().filter(|v| d <= v.constant("BLOCK_D")) {
        let element = variant.element();
        let what = format!("{case:?} {}", variant.name());
        let (q, cache) = run_rope(variant, case, &all, CtaOrder::Forward);
        let mut expected = vec![false; cache.len()];
        for (token, slot) in case.slots().into_iter().enumerate() {
            for head in 0..case.heads() {
                let got = &q[(token * case.heads() + head) * d..][..d];
                assert_near(&what, element, got, &case.head(token, head, Some(&q_norm)));
            }
            let Ok(slot) = usize::try_from(slot) else { continue };
            for side_head in 0..2 * case.kv_heads {
                let norm = (side_head < case.kv_heads).then_some(&k_norm[..]);
                let row = (slot / block_size * 2 * case.kv_heads + side_head) * block_size;
                let at = (row + slot % block_size) * d;
                let got: Option<Vec<f32>> = cache[at..at + d].iter().copied().collect();
                let got = got.unwrap_or_else(|| panic!("{what}: slot {slot} is not written"));
                assert_near(
                    &what,
                    element,
                    &got,
                    &case.head(token, case.heads() + side_head, norm),
                );
                expected[at..at + d].fill(true);
            }
        }
        let written: Vec<bool> = cache.iter().map(Option::is_some).collect();
        assert_eq!(written, expected, "{what}: slots that are written");
        // Each token alone.
        for &token in &all {
            let (alone, _) = run_rope(variant, case, &[token], CtaOrder::Reverse);
            let width = case.heads() * d;
            assert_eq!(bits(&alone), bits(&q[token * width..][..width]), "{what}: {token} alone");
        }
    }
}
