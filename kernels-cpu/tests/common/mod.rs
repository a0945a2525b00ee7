//! What the kernel tests share: contexts, random values, rounding.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use quire_kernels_cpu::{Ctx, Dtype, Isa};

/// One context for each instruction set of this machine.
pub fn contexts(threads: usize) -> Vec<Ctx> {
    Isa::available().into_iter().map(|isa| Ctx::new(isa, threads).unwrap()).collect()
}

/// Values in [-1, 1), the same for the same seed.
pub fn random(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        // SplitMix64
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// `x` as `dtype` holds it.
pub fn round(dtype: Dtype, x: f32) -> f32 {
    match dtype {
        Dtype::F32 => x,
        Dtype::Bf16 => half::bf16::from_f32(x).to_f32(),
    }
}

/// Rows of `d` values as words.
pub fn words(dtype: Dtype, x: &[f32], d: usize) -> Vec<u32> {
    let pair = |p: &[f32]| {
        let bits = |x: f32| u32::from(half::bf16::from_f32(x).to_bits());
        bits(p[0]) | bits(*p.get(1).unwrap_or(&0.0)) << 16
    };
    match dtype {
        Dtype::F32 => x.iter().map(|x| x.to_bits()).collect(),
        Dtype::Bf16 => x.chunks(d).flat_map(|row| row.chunks(2).map(pair)).collect(),
    }
}

/// Rows of `d` values from words.
pub fn values(dtype: Dtype, words: &[u32], d: usize) -> Vec<f32> {
    let unpack = |row: &[u32]| -> Vec<f32> {
        let both = row.iter().flat_map(|w| [w << 16, w & 0xffff_0000].map(f32::from_bits));
        both.take(d).collect()
    };
    match dtype {
        Dtype::F32 => words.iter().map(|&w| f32::from_bits(w)).collect(),
        Dtype::Bf16 => words.chunks(d.div_ceil(2)).flat_map(unpack).collect(),
    }
}

/// Asserts `|got − want| ≤ bound`, element by element; NaN fails.
pub fn assert_close(got: &[f32], want: &[f64], bound: impl Fn(usize) -> f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: lengths");
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got) - want).abs();
        assert!(error <= bound(i), "{what}: element {i} is {got}, not {want} (± {})", bound(i));
    }
}
