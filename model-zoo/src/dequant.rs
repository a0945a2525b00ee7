//! Decoding of every [`SourceDtype`] to f32.
//!
//! Layouts and operation order are ggml's (`dequantize_row_*`): each product is rounded to f32
//! before the next, and nothing is fused, so that values agree bit for bit with other readers.

use half::{bf16, f16};

use crate::source::SourceDtype;

/// Decodes whole blocks. Panics if `bytes` and `out` do not hold the same number of blocks.
pub(crate) fn dequantise(dtype: SourceDtype, bytes: &[u8], out: &mut [f32]) {
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
        SourceDtype::Q6K => blocks(bytes, out, q6_k),
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
            SourceDtype::Q6K,
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
