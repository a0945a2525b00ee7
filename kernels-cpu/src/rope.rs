//! Between the QKV projection and attention: per-head RMS norm, rotary embedding, and writing K
//! and V into the cache.

use std::sync::atomic::{AtomicU16, AtomicU32, Ordering::Relaxed};

use crate::ctx::Ctx;
use crate::dtype::{Bf16, Dtype, Elem, F32};
use crate::kv::{HALF, KvCache, KvShape, MAX_HEAD_DIM};
use crate::norm::rms_factor;
use crate::ptr::SharedMut;
use crate::simd::{Kernel, Simd, dispatch};

/// Inputs of [`qk_norm_rope_write_kv`] for T tokens.
#[derive(Clone, Copy)]
pub struct QkvArgs<'a> {
    /// `[T][(Hq + 2·Hkv)·D]`: query heads, then key heads, then value heads.
    pub qkv: &'a [f32],
    /// `[T]` absolute positions.
    pub positions: &'a [u32],
    /// `[T]` `block · block_size + offset`, or −1 to write nothing.
    pub slots: &'a [i64],
    /// Query heads.
    pub q_heads: usize,
    /// `[D]` weight of the norm of each query head.
    pub q_norm: Option<&'a [f32]>,
    /// `[D]` weight of the norm of each key head.
    pub k_norm: Option<&'a [f32]>,
    /// Added to the mean square in the norms.
    pub eps: f32,
    /// `[max_pos][rot_dim / 2]`.
    pub cos: &'a [f32],
    /// `[max_pos][rot_dim / 2]`.
    pub sin: &'a [f32],
    /// Leading elements of a head that are rotated, even.
    pub rot_dim: usize,
    /// Pairs are (2i, 2i + 1) rather than (i, i + rot_dim / 2).
    pub interleaved: bool,
    /// Layer of the cache.
    pub layer: usize,
}

/// Normalises (where asked) and rotates queries and keys, rounds all to the cache's type, writes
/// K and V to their slots and queries to `q_out`, `[T][Hq][words(D)]`.
///
/// Panics if a length does not fit, or a position or slot is out of range.
pub fn qk_norm_rope_write_kv(ctx: &Ctx, args: &QkvArgs<'_>, kv: &mut KvCache, q_out: &mut [u32]) {
    let shape = *kv.shape();
    let (tokens, q_words) = (args.positions.len(), args.q_heads * words(&shape));
    args.check(&shape);
    assert_eq!(q_out.len(), tokens * q_words, "words of {tokens} tokens' queries");
    let q_out = SharedMut::new(q_out);
    // Atomics, because nothing else says that the slots of two tokens differ.
    let cache: &[AtomicU32] = as_atomics(kv.words_mut());
    let row = (args.q_heads + 2 * shape.kv_heads) * shape.head_dim;
    ctx.for_rows(tokens, row, |start, end| {
        // SAFETY: an item has its own tokens.
        let q_out = unsafe { q_out.slice(start * q_words, (end - start) * q_words) };
        dispatch(ctx.isa, Tokens { args, shape: &shape, cache, start, end, q_out });
    });
}

fn words(shape: &KvShape) -> usize {
    shape.dtype.words(shape.head_dim)
}

/// The words as atomics, for as long as they are borrowed.
fn as_atomics(words: &mut [u32]) -> &[AtomicU32] {
    let len = words.len();
    // SAFETY: `AtomicU32` has the size and alignment of `u32`, and the borrow is exclusive.
    unsafe { std::slice::from_raw_parts(words.as_mut_ptr().cast(), len) }
}

impl QkvArgs<'_> {
    fn check(&self, shape: &KvShape) {
        let (tokens, d, half) = (self.positions.len(), shape.head_dim, self.rot_dim / 2);
        let row = (self.q_heads + 2 * shape.kv_heads) * d;
        assert_eq!(self.qkv.len(), tokens * row, "values of {tokens} tokens' heads");
        assert_eq!(self.slots.len(), tokens, "slots of {tokens} tokens");
        assert!(self.rot_dim <= d && self.rot_dim.is_multiple_of(2), "rot_dim {}", self.rot_dim);
        assert_eq!(self.cos.len(), self.sin.len(), "rotary tables");
        for norm in [self.q_norm, self.k_norm].into_iter().flatten() {
            assert_eq!(norm.len(), d, "norm weights of a head");
        }
        let limit = (shape.num_blocks * shape.block_size) as i64;
        for (&position, &slot) in self.positions.iter().zip(self.slots) {
            let end = (position as usize + 1) * half;
            assert!(end <= self.cos.len(), "position {position} is past the rotary tables");
            assert!((-1..limit).contains(&slot), "slot {slot} of {limit}");
        }
        assert!(self.layer < shape.layers, "layer {} of {}", self.layer, shape.layers);
    }
}

/// One item: tokens `start..end`.
struct Tokens<'a> {
    args: &'a QkvArgs<'a>,
    shape: &'a KvShape,
    cache: &'a [AtomicU32],
    start: usize,
    end: usize,
    q_out: &'a mut [u32],
}

impl Kernel for Tokens<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.shape.dtype {
            Dtype::F32 => self.tokens::<S, F32>(s),
            Dtype::Bf16 => self.tokens::<S, Bf16>(s),
        }
    }
}

impl Tokens<'_> {
    #[inline(always)]
    fn tokens<S: Simd, D: Elem>(self, s: S) {
        let (d, q_heads) = (self.shape.head_dim, self.args.q_heads);
        let heads = q_heads + 2 * self.shape.kv_heads;
        let mut q_out = self.q_out.chunks_exact_mut(d / D::PACK);
        let mut scratch = [0.0; MAX_HEAD_DIM];
        let mut rounded = [0; MAX_HEAD_DIM];
        let (scratch, rounded) = (&mut scratch[..d], &mut rounded[..d / D::PACK]);
        for token in self.start..self.end {
            let values = &self.args.qkv[token * heads * d..][..heads * d];
            let (queries, rest) = values.split_at(q_heads * d);
            let (keys, values) = rest.split_at(self.shape.kv_heads * d);
            for (head, out) in queries.chunks_exact(d).zip(&mut q_out) {
                self.args.transform(s, head, self.args.q_norm, token, scratch);
                D::put(s, scratch, out);
            }
            let Ok(slot) = usize::try_from(self.args.slots[token]) else { continue };
            let place = Place::new(self.shape, self.args.layer, slot);
            for (i, head) in keys.chunks_exact(d).enumerate() {
                self.args.transform(s, head, self.args.k_norm, token, scratch);
                D::put(s, scratch, rounded);
                let start = place.half + i * self.shape.head_words() + place.token;
                for (slot, &word) in self.cache[start..].iter().step_by(HALF).zip(&*rounded) {
                    slot.store(word, Relaxed);
                }
            }
            for (i, head) in values.chunks_exact(d).enumerate() {
                D::put(s, head, rounded);
                let start = place.half
                    + self.shape.side_words()
                    + i * self.shape.head_words()
                    + place.token / D::PACK * d;
                write_value::<D>(&self.cache[start..start + d], place.token % D::PACK, rounded);
            }
        }
    }
}

/// Where a token's K and V go in a layer.
struct Place {
    /// First K word of the half-group of head 0.
    half: usize,
    /// Token in the half-group.
    token: usize,
}

impl Place {
    fn new(shape: &KvShape, layer: usize, slot: usize) -> Self {
        let (block, offset) = (slot / shape.block_size, slot % shape.block_size);
        let half = shape.block_start(layer, block) + offset / HALF * shape.half_words();
        Self { half, token: offset % HALF }
    }
}

/// Writes the elements of `rounded` as element `sub` of the words `out`.
#[inline(always)]
fn write_value<D: Elem>(out: &[AtomicU32], sub: usize, rounded: &[u32]) {
    if D::PACK == 1 {
        for (out, &word) in out.iter().zip(rounded) {
            out.store(word, Relaxed);
        }
        return;
    }
    // The other half of a word may be another worker's token, so it is not rewritten.
    // SAFETY: two `AtomicU16` have the size of an `AtomicU32` and a weaker alignment. During the
    // call the words of V are written through `AtomicU16` alone.
    let halves =
        unsafe { std::slice::from_raw_parts(out.as_ptr().cast::<AtomicU16>(), 2 * out.len()) };
    let pairs = halves.as_chunks::<2>().0.as_chunks::<2>().0;
    for (pair, &word) in pairs.iter().zip(rounded) {
        pair[0][sub].store(word as u16, Relaxed);
        pair[1][sub].store((word >> 16) as u16, Relaxed);
    }
}

impl QkvArgs<'_> {
    /// Norm (if any) and rotation of one head.
    #[inline(always)]
    fn transform<S: Simd>(
        &self,
        s: S,
        head: &[f32],
        norm: Option<&[f32]>,
        token: usize,
        out: &mut [f32],
    ) {
        out.copy_from_slice(head);
        if let Some(weight) = norm {
            let factor = rms_factor(s, head, self.eps);
            for (y, &w) in out.iter_mut().zip(weight) {
                *y = *y * factor * w;
            }
        }
        let half = self.rot_dim / 2;
        let at = self.positions[token] as usize * half;
        let (cos, sin) = (&self.cos[at..at + half], &self.sin[at..at + half]);
        if self.interleaved {
            let pairs = out.as_chunks_mut::<2>().0.iter_mut();
            for ((pair, &cos), &sin) in pairs.zip(cos).zip(sin) {
                *pair = [pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin];
            }
        } else {
            let (low, high) = out[..self.rot_dim].split_at_mut(half);
            for (((a, b), &cos), &sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    }
}
