//! Decoding of every [`SourceDtype`] to f32.
//!
//! Layouts and operation order are ggml's (`dequantize_row_*`): each product is rounded to f32
//! before the next, and nothing is fused, so that values agree bit for bit with other readers.

use half::{bf16, f16};

use crate::source::SourceDtype;

/// Decodes whole blocks. Panics if `bytes` and `out` do not hold the same number of blocks.
pub fn dequantise(dtype: SourceDtype, bytes: &[u8], out: &mut [f32]) {
    let (elements, size) = (dtype.block_elements(), dtype.block_bytes());
    assert!(bytes.len().is_multiple_of(size) && out.len().is_multiple_of(elements));
    assert_eq!(bytes.len() / size, out.len() / elements, "blocks in and out");
    match dtype {
        SourceDtype::F32 => plain(bytes, out, f32::from_le_bytes),
        SourceDtype::F16 => plain(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        SourceDtype::Bf16 => plain(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
        SourceDtype::Q8_0 => blocks(bytes, out, q8_0),
        SourceDtype::Q4_0 => blocks(bytes, out, q4_0),
        SourceDtype::Q4_1 => blocks(bytes, out, q4_1),
        SourceDtype::Q5_0 => blocks(bytes, out, q5_0),
        SourceDtype::Q5_1 => blocks(bytes, out, q5_1),
        SourceDtype::Q2K => blocks(bytes, out, q2_k),
        SourceDtype::Q3K => blocks(bytes, out, q3_k),
        SourceDtype::Q4K => blocks(bytes, out, q4_k),
        SourceDtype::Q5K => blocks(bytes, out, q5_k),
        SourceDtype::Q6K => blocks(bytes, out, q6_k),
        SourceDtype::Iq4Nl => blocks(bytes, out, iq4_nl),
        SourceDtype::Iq4Xs => blocks(bytes, out, iq4_xs),
        SourceDtype::Mxfp4 => blocks(bytes, out, mxfp4),
    }
}

fn plain<const N: usize>(bytes: &[u8], out: &mut [f32], decode: impl Fn([u8; N]) -> f32) {
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *out = decode(*bytes);
    }
}

fn blocks<const BYTES: usize, const ELEMENTS: usize>(
    bytes: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; ELEMENTS]),
) {
    for (bytes, out) in bytes.as_chunks::<BYTES>().0.iter().zip(out.as_chunks_mut::<ELEMENTS>().0) {
        decode(bytes, out);
    }
}

fn f16_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let scale = f16_at(block, 0);
    for (out, &q) in out.iter_mut().zip(&block[2..]) {
        *out = scale * f32::from(q as i8);
    }
}

fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let scale = f16_at(block, 0);
    let (low, high) = out.split_at_mut(16);
    for ((low, high), &q) in low.iter_mut().zip(high).zip(&block[2..]) {
        *low = scale * f32::from((q & 15) as i8 - 8);
        *high = scale * f32::from((q >> 4) as i8 - 8);
    }
}

fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (scale, minimum) = (f16_at(block, 0), f16_at(block, 2));
    let (low, high) = out.split_at_mut(16);
    for ((low, high), &q) in low.iter_mut().zip(high).zip(&block[4..]) {
        *low = scale * f32::from(q & 15) + minimum;
        *high = scale * f32::from(q >> 4) + minimum;
    }
}

/// f16 scale, 32 fifth bits in element order, 16 bytes of nibbles: element `i` in the low half of
/// byte `i`, element `i + 16` in the high half.
fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let scale = f16_at(block, 0);
    let fifths = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    for (i, out) in out.iter_mut().enumerate() {
        *out = scale * f32::from(five_bits(&block[6..], fifths, i) as i8 - 16);
    }
}

/// As [`q5_0`], with an f16 minimum after the scale and values from 0.
fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (scale, minimum) = (f16_at(block, 0), f16_at(block, 2));
    let fifths = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
    for (i, out) in out.iter_mut().enumerate() {
        *out = scale * f32::from(five_bits(&block[8..], fifths, i)) + minimum;
    }
}

/// Element `i` of 32: a nibble of 16 bytes and a bit of `fifths`.
fn five_bits(nibbles: &[u8], fifths: u32, i: usize) -> u8 {
    let nibble = (nibbles[i % 16] >> (i / 16 * 4)) & 15;
    let fifth = (fifths >> i) & 1;
    nibble | (fifth as u8) << 4
}

/// 16 bytes of scale (low nibble) and minimum (high nibble) for 16 elements each, 64 bytes of bit
/// pairs, f16 scale, f16 minimum. Each half of 128 elements has 32 of the bytes, which hold four
/// runs of 32 elements from the lowest pair up.
fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let (scales, pairs) = (&block[..16], &block[16..80]);
    let (scale, minimum) = (f16_at(block, 80), f16_at(block, 82));
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        let step = scale * f32::from(scales[group] & 15);
        let base = minimum * f32::from(scales[group] >> 4);
        for (i, out) in out.iter_mut().enumerate() {
            *out = step * f32::from(bit_pair(pairs, group * 16 + i)) - base;
        }
    }
}

/// 32 bytes of third bits (byte `i % 32`, bit `i / 32`; a clear bit takes 4 off), 64 bytes of bit
/// pairs as in [`q2_k`], 12 bytes of sixteen 6-bit scales around 32, f16 scale.
fn q3_k(block: &[u8; 110], out: &mut [f32; 256]) {
    let (thirds, pairs, packed) = (&block[..32], &block[32..96], &block[96..108]);
    let scale = f16_at(block, 108);
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        // Eight bytes hold the low nibbles of scales g and g + 8, four bytes the high pairs of
        // scales g, g + 4, g + 8 and g + 12.
        let low = (packed[group % 8] >> (group / 8 * 4)) & 15;
        let high = (packed[8 + group % 4] >> (group / 4 * 2)) & 3;
        let step = scale * f32::from((low | high << 4) as i8 - 32);
        for (i, out) in out.iter_mut().enumerate() {
            let i = group * 16 + i;
            let third = (thirds[i % 32] >> (i / 32)) & 1;
            *out = step * f32::from(bit_pair(pairs, i) as i8 - 4 * (1 - third as i8));
        }
    }
}

/// Element `i` of 256 in the bit pairs of [`q2_k`].
fn bit_pair(pairs: &[u8], i: usize) -> u8 {
    let (half, run) = (i / 128, i % 128 / 32);
    (pairs[half * 32 + i % 32] >> (2 * run)) & 3
}

/// f16 scale, f16 minimum, 12 bytes of [`six_bit_pair`]s for 32 elements each, 128 bytes of
/// nibbles: each 32 bytes hold 32 elements in the low halves, the next 32 in the high halves.
fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let (packed, nibbles) = (&block[4..16], &block[16..]);
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (step, base) = scale_and_minimum(block, packed, group);
        for (i, out) in out.iter_mut().enumerate() {
            let nibble = (nibbles[group / 2 * 32 + i] >> (group % 2 * 4)) & 15;
            *out = step * f32::from(nibble) - base;
        }
    }
}

/// As [`q4_k`], with 32 bytes of fifth bits (byte `i % 32`, bit `i / 32`) before the nibbles.
fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let (packed, fifths, nibbles) = (&block[4..16], &block[16..48], &block[48..]);
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (step, base) = scale_and_minimum(block, packed, group);
        for (i, out) in out.iter_mut().enumerate() {
            let nibble = (nibbles[group / 2 * 32 + i] >> (group % 2 * 4)) & 15;
            let fifth = (fifths[i] >> group) & 1;
            *out = step * f32::from(nibble | fifth << 4) - base;
        }
    }
}

/// The scale and minimum of a group: those of the block, at bytes 0 and 2, times the group's.
fn scale_and_minimum(block: &[u8], packed: &[u8], group: usize) -> (f32, f32) {
    let (scale, minimum) = six_bit_pair(packed, group);
    (f16_at(block, 0) * f32::from(scale), f16_at(block, 2) * f32::from(minimum))
}

/// Scale and minimum of one of eight groups. Groups 0 to 3 are the low 6 bits of bytes `g` and
/// `g + 4`; for groups 4 to 7 byte `g + 4` holds the low nibbles of both, and the top 2 bits of
/// bytes `g - 4` and `g` the rest.
fn six_bit_pair(packed: &[u8], group: usize) -> (u8, u8) {
    if group < 4 {
        return (packed[group] & 63, packed[group + 4] & 63);
    }
    let (low, top_scale, top_minimum) = (packed[group + 4], packed[group - 4], packed[group]);
    (low & 15 | top_scale >> 6 << 4, low >> 4 | top_minimum >> 6 << 4)
}

/// 128 bytes of low nibbles, 64 of high bit pairs, 16 scales of 16 elements each, one f16 scale;
/// each half of 128 elements has its own 64, 32 and 8 of them, and interleaves four runs of 32.
fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let (low, rest) = block.split_at(128);
    let (high, rest) = rest.split_at(64);
    let scale = f16_at(rest, 16);
    for (half, out) in out.chunks_exact_mut(128).enumerate() {
        let (low, high) = (&low[half * 64..][..64], &high[half * 32..][..32]);
        for (run, out) in out.chunks_exact_mut(32).enumerate() {
            let nibble_shift = run / 2 * 4;
            for (i, out) in out.iter_mut().enumerate() {
                let nibble = (low[run % 2 * 32 + i] >> nibble_shift) & 15;
                let pair = (high[i] >> (2 * run)) & 3;
                let q = (nibble | pair << 4) as i8 - 32;
                let sub_scale = rest[half * 8 + run * 2 + i / 16] as i8;
                *out = scale * f32::from(sub_scale) * f32::from(q);
            }
        }
    }
}

/// The values of IQ4 nibbles, spaced as weights are distributed.
const IQ4_VALUES: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// f16 scale, 16 bytes of nibbles as in [`q5_0`].
fn iq4_nl(block: &[u8; 18], out: &mut [f32; 32]) {
    table_nibbles(f16_at(block, 0), &block[2..], &IQ4_VALUES, out);
}

/// f16 scale, eight high bit pairs and then eight low nibbles of 6-bit scales around 32, and for
/// each group of 32 elements 16 bytes of nibbles as in [`q5_0`].
fn iq4_xs(block: &[u8; 136], out: &mut [f32; 256]) {
    let scale = f16_at(block, 0);
    let high_pairs = u16::from_le_bytes([block[2], block[3]]);
    let (low_nibbles, nibbles) = (&block[4..8], &block[8..]);
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let low = (low_nibbles[group / 2] >> (group % 2 * 4)) & 15;
        let high = ((high_pairs >> (2 * group)) & 3) as u8;
        let step = scale * f32::from((low | high << 4) as i8 - 32);
        table_nibbles(step, &nibbles[group * 16..][..16], &IQ4_VALUES, out);
    }
}

/// Twice the values of E2M1, the element type of OCP microscaling.
const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Exponent byte of a power of two, 16 bytes of nibbles as in [`q5_0`].
fn mxfp4(block: &[u8; 17], out: &mut [f32; 32]) {
    let exponent = u32::from(block[0]);
    // Half of 2^(exponent - 127), since the table is doubled; the lowest two are subnormal.
    let bits = if exponent < 2 { 0x0020_0000 << exponent } else { (exponent - 1) << 23 };
    table_nibbles(f32::from_bits(bits), &block[1..], &E2M1_DOUBLED, out);
}

fn table_nibbles(scale: f32, nibbles: &[u8], table: &[i8; 16], out: &mut [f32]) {
    let (low, high) = out.split_at_mut(16);
    for ((low, high), &q) in low.iter_mut().zip(high).zip(nibbles) {
        *low = scale * f32::from(table[usize::from(q & 15)]);
        *high = scale * f32::from(table[usize::from(q >> 4)]);
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use safetensors::SafeTensors;

    use super::*;

    #[test]
    fn every_block_type_matches_the_gguf_package_bit_for_bit() {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/gguf-dequant.safetensors");
        let file = fs::read(path).unwrap();
        let goldens = SafeTensors::deserialize(&file).unwrap();
        for dtype in [
            SourceDtype::F16,
            SourceDtype::Bf16,
            SourceDtype::Q8_0,
            SourceDtype::Q4_0,
            SourceDtype::Q4_1,
            SourceDtype::Q5_0,
            SourceDtype::Q5_1,
            SourceDtype::Q2K,
            SourceDtype::Q3K,
            SourceDtype::Q4K,
            SourceDtype::Q5K,
            SourceDtype::Q6K,
            SourceDtype::Iq4Nl,
            SourceDtype::Iq4Xs,
            SourceDtype::Mxfp4,
        ] {
            let bytes = goldens.tensor(&format!("{dtype}.bytes")).unwrap();
            let expected = goldens.tensor(&format!("{dtype}.f32")).unwrap();
            assert_eq!(expected.shape(), [bytes.shape()[0], dtype.block_elements()], "{dtype}");
            assert_eq!(bytes.shape()[1], dtype.block_bytes(), "{dtype}");
            let mut values = vec![0.0; expected.data().len() / 4];
            dequantise(dtype, bytes.data(), &mut values);
            for (i, (value, expected)) in values.iter().zip(expected.data().chunks(4)).enumerate() {
                let expected = f32::from_le_bytes(expected.try_into().unwrap());
                assert!(expected.is_finite(), "{dtype}[{i}]");
                assert_eq!(value.to_bits(), expected.to_bits(), "{dtype}[{i}]: {value} {expected}");
            }
        }
    }

    #[test]
    fn f32_is_read_little_endian() {
        let mut out = [0.0; 2];
        dequantise(SourceDtype::F32, &[0, 0, 128, 63, 0, 0, 0, 192], &mut out);
        assert_eq!(out, [1.0, -2.0]);
    }
}
