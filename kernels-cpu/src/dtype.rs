//! Element types and how they are packed into 32-bit words.
//!
//! Everything a matrix kernel multiplies is stored as rows of `u32` words: one `f32`, or two
//! consecutive `bf16` (the element with the even index in the low half). One kernel then serves
//! both types; an odd last element is followed by a zero.

use crate::simd::Simd;

#[cfg(not(target_endian = "little"))]
compile_error!("word layouts assume a little-endian machine");

/// The element type of packed weights, activations and the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE single precision, one element a word.
    F32,
    /// bfloat16, two elements a word.
    Bf16,
}

impl Dtype {
    /// Elements in one word.
    pub const fn pack(self) -> usize {
        match self {
            Self::F32 => 1,
            Self::Bf16 => 2,
        }
    }

    /// Words that hold `n` elements.
    pub const fn words(self, n: usize) -> usize {
        n.div_ceil(self.pack())
    }

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        4 / self.pack()
    }

    /// Element `sub` of `word`, widened.
    pub(crate) fn extract(self, word: u32, sub: usize) -> f32 {
        match self {
            Self::F32 => f32::from_bits(word),
            Self::Bf16 => f32::from_bits(if sub == 0 { word << 16 } else { word & 0xffff_0000 }),
        }
    }
}

/// A [`Dtype`] as a type, so that kernels are compiled once for each.
pub(crate) trait Elem {
    /// Elements in one word.
    const PACK: usize;

    /// `acc + a·b` over the elements of each word, in index order.
    fn dot<S: Simd>(s: S, acc: S::V, a: S::W, b: S::W) -> S::V;

    /// Rounds 32 values to nearest even into `dst`, which holds exactly their words.
    fn put_vectors<S: Simd>(s: S, values: [S::V; 2], dst: &mut [u32]);

    /// Rounds `src` to nearest even into `dst`, which holds exactly the words of `src`.
    fn put<S: Simd>(s: S, src: &[f32], dst: &mut [u32]);
}

/// [`Dtype::F32`] as a type.
pub(crate) struct F32;

/// [`Dtype::Bf16`] as a type.
pub(crate) struct Bf16;

impl Elem for F32 {
    const PACK: usize = 1;

    #[inline(always)]
    fn dot<S: Simd>(s: S, acc: S::V, a: S::W, b: S::W) -> S::V {
        s.dot_f32(acc, a, b)
    }

    #[inline(always)]
    fn put_vectors<S: Simd>(s: S, values: [S::V; 2], dst: &mut [u32]) {
        let (lanes, _) = bytemuck::cast_slice_mut::<u32, f32>(dst).as_chunks_mut::<16>();
        s.store(values[0], &mut lanes[0]);
        s.store(values[1], &mut lanes[1]);
    }

    #[inline(always)]
    fn put<S: Simd>(_: S, src: &[f32], dst: &mut [u32]) {
        dst.copy_from_slice(bytemuck::cast_slice(src));
    }
}

impl Elem for Bf16 {
    const PACK: usize = 2;

    #[inline(always)]
    fn dot<S: Simd>(s: S, acc: S::V, a: S::W, b: S::W) -> S::V {
        s.dot_bf16(acc, a, b)
    }

    #[inline(always)]
    fn put_vectors<S: Simd>(s: S, values: [S::V; 2], dst: &mut [u32]) {
        s.store_w(s.pack_bf16(values[0], values[1]), &mut dst.as_chunks_mut::<16>().0[0]);
    }

    #[inline(always)]
    fn put<S: Simd>(s: S, src: &[f32], dst: &mut [u32]) {
        assert_eq!(dst.len(), src.len().div_ceil(2), "words for {} bf16 values", src.len());
        let (blocks, tail) = src.as_chunks::<32>();
        let (words, _) = dst.as_chunks_mut::<16>();
        for (block, word) in blocks.iter().zip(words.iter_mut()) {
            let (halves, _) = block.as_chunks::<16>();
            s.store_w(s.pack_bf16(s.load(&halves[0]), s.load(&halves[1])), word);
        }
        if !tail.is_empty() {
            let mut block = [[0.0; 16]; 2];
            block.as_flattened_mut()[..tail.len()].copy_from_slice(tail);
            let mut word = [0; 16];
            s.store_w(s.pack_bf16(s.load(&block[0]), s.load(&block[1])), &mut word);
            // 31 elements fill 16 words, which `as_chunks_mut` counts as a whole chunk.
            let filled = tail.len().div_ceil(2);
            let at = dst.len() - filled;
            dst[at..].copy_from_slice(&word[..filled]);
        }
    }
}
