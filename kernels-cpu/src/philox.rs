//! Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): a
//! counter-based generator, so that a draw depends on its key and counter and on nothing else.

use crate::isa::Isa;
use crate::simd::{Kernel, LANES, Simd, dispatch};
use crate::vecmath::ln;

const M0: u32 = 0xD251_1F53;
const M1: u32 = 0xCD9E_8D57;
const W0: u32 = 0x9E37_79B9;
const W1: u32 = 0xBB67_AE85;

/// Four random words for a 64-bit key and a 128-bit counter.
#[inline(always)]
pub fn philox4x32(key: u64, counter: [u32; 4]) -> [u32; 4] {
    let (mut k0, mut k1) = (key as u32, (key >> 32) as u32);
    let mut c = counter;
    for _ in 0..10 {
        let p0 = u64::from(M0) * u64::from(c[0]);
        let p1 = u64::from(M1) * u64::from(c[2]);
        c = [(p1 >> 32) as u32 ^ c[1] ^ k0, p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ k1, p0 as u32];
        k0 = k0.wrapping_add(W0);
        k1 = k1.wrapping_add(W1);
    }
    c
}

/// A word as a uniform number strictly inside (0, 1), exact in f32: (⌊w / 2⁹⌋ + ½) / 2²³.
#[inline(always)]
pub fn uniform(word: u32) -> f32 {
    ((word >> 9) as f32 + 0.5) * (1.0 / 8_388_608.0)
}

/// Gumbel noise −ln(−ln u) of token `id` at `position`: lane `id mod 4` of the words for counter
/// (id / 4, position, 0, 0). At most 16.64.
#[inline(always)]
pub fn gumbel(key: u64, position: u32, id: u32) -> f32 {
    let words = philox4x32(key, [id / 4, position, 0, 0]);
    -ln(-ln(uniform(words[(id % 4) as usize])))
}

/// Ids handled together: one counter a lane, four words each.
const BLOCK: usize = 4 * LANES;

/// The id with the largest `x[id] + gumbel(key, position, id)`, the lowest of equal ones; the bits
/// of the scalar [`gumbel`]. No value may be NaN; 0 where all are −∞.
pub fn gumbel_argmax(isa: Isa, x: &[f32], key: u64, position: u32) -> u32 {
    struct Scan<'a>(&'a [f32], u64, u32);
    impl Kernel for Scan<'_> {
        type Output = u32;
        #[inline(always)]
        fn run<S: Simd>(self, _: S) -> u32 {
            let mut best = (f32::NEG_INFINITY, 0);
            for (i, block) in self.0.chunks(BLOCK).enumerate() {
                let first = (i * BLOCK) as u32;
                let mut scores = [f32::NEG_INFINITY; BLOCK];
                scores[..block.len()].copy_from_slice(block);
                add_noise(&mut scores, self.1, self.2, first / 4);
                let max = scores.iter().fold(f32::NEG_INFINITY, |m, &s| if s > m { s } else { m });
                if max > best.0 {
                    let at = scores.iter().position(|&s| s == max).unwrap_or(0);
                    best = (max, first + at as u32);
                }
            }
            best.1
        }
    }
    dispatch(isa, Scan(x, key, position))
}

/// Adds noise to the scores of the ids from `4 · first_counter` on.
#[inline(always)]
fn add_noise(scores: &mut [f32; BLOCK], key: u64, position: u32, first_counter: u32) {
    let mut words = [[0; LANES]; 4];
    for lane in 0..LANES {
        let drawn = philox4x32(key, [first_counter + lane as u32, position, 0, 0]);
        for (word, drawn) in words.iter_mut().zip(drawn) {
            word[lane] = drawn;
        }
    }
    for (offset, words) in words.iter().enumerate() {
        let mut noise = [0.0; LANES];
        for lane in 0..LANES {
            noise[lane] = -ln(-ln(uniform(words[lane])));
        }
        for lane in 0..LANES {
            scores[4 * lane + offset] += noise[lane];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers published with the Random123 library.
    #[test]
    fn known_answers() {
        assert_eq!(philox4x32(0, [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox4x32(u64::MAX, [u32::MAX; 4]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox4x32(0x299f_31d0_a409_3822, [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn uniform_is_strictly_between_zero_and_one() {
        assert!(uniform(0) > 0.0);
        assert!(uniform(u32::MAX) < 1.0);
    }

    #[test]
    fn the_scan_has_the_scalar_bits_on_every_path() {
        for len in [1, 3, 64, 65, 1000] {
            let x: Vec<f32> = (0..len).map(|i| ((i * 7919) % 37) as f32 * 0.3).collect();
            for position in 0..40 {
                let score = |id: usize| x[id] + gumbel(9, position, id as u32);
                let mut best = 0;
                for id in 1..len {
                    if score(id) > score(best) {
                        best = id;
                    }
                }
                for isa in Isa::available() {
                    let got = gumbel_argmax(isa, &x, 9, position);
                    assert_eq!(got as usize, best, "{isa}, {len} ids, position {position}");
                }
            }
        }
        assert_eq!(gumbel_argmax(Isa::Portable, &[f32::NEG_INFINITY; 70], 1, 1), 0);
    }
}
