//! Cuts by rank or by mass without sorting: three histogram passes over order-preserving keys.

/// Bins of one pass.
pub(super) const BINS: usize = 2048;
/// (shift, bits) of the digits of a 32-bit key, most significant first.
const DIGITS: [(u32, u32); 3] = [(21, 11), (10, 11), (0, 10)];

/// A `u32` that orders like the float (no NaN; −0 counts as +0).
#[inline(always)]
pub(super) fn order_key(x: f32) -> u32 {
    let bits = (x + 0.0).to_bits();
    if bits >> 31 == 0 { bits | 0x8000_0000 } else { !bits }
}

/// The largest key `t` for which the keys `≥ t` together weigh at least `target`; 0 when all of
/// them weigh less. `weights` and `keys` run in parallel. Keeping `key ≥ t` keeps ties at the cut.
pub(super) fn cut(
    keys: &[u32],
    weight: impl Fn(usize) -> u64,
    target: u64,
    histogram: &mut Vec<u64>,
) -> u32 {
    histogram.resize(BINS, 0);
    let mut prefix = 0u32;
    let mut above = 0u64;
    for (shift, bits) in DIGITS {
        histogram.fill(0);
        let decided = u32::MAX.checked_shl(shift + bits).unwrap_or(0);
        let digit = (1u32 << bits) - 1;
        for (i, &key) in keys.iter().enumerate() {
            if key & decided == prefix {
                histogram[((key >> shift) & digit) as usize] += weight(i);
            }
        }
        let mut bin = digit as usize;
        while bin > 0 && above + histogram[bin] < target {
            above += histogram[bin];
            bin -= 1;
        }
        prefix |= (bin as u32) << shift;
    }
    prefix
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn keys_order_like_floats(a in -1e30f32..1e30, b in -1e30f32..1e30) {
            prop_assert_eq!(a.partial_cmp(&b), Some(order_key(a).cmp(&order_key(b))));
        }

        #[test]
        fn cut_equals_the_sort(
            items in prop::collection::vec((0u32..40, 0u64..5), 1..60),
            spread in prop::sample::select(vec![1u32, 1 << 9, 1 << 20, 100_000_007]),
            target in 1u64..100,
        ) {
            let keys: Vec<u32> = items.iter().map(|x| x.0.wrapping_mul(spread)).collect();
            let got = cut(&keys, |i| items[i].1, target, &mut Vec::new());
            let mass = |t: u32| -> u64 {
                keys.iter().zip(&items).filter(|(k, _)| **k >= t).map(|(_, x)| x.1).sum()
            };
            if mass(0) < target {
                prop_assert_eq!(got, 0);
            } else {
                prop_assert!(mass(got) >= target);
                prop_assert!(got == u32::MAX || mass(got + 1) < target);
            }
        }
    }

    #[test]
    fn signed_zeros_are_equal_and_infinities_are_ends() {
        assert_eq!(order_key(-0.0), order_key(0.0));
        assert!(order_key(f32::NEG_INFINITY) < order_key(f32::MIN));
        assert!(order_key(f32::INFINITY) > order_key(f32::MAX));
    }
}
