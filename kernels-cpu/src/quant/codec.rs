//! One column of a panel's block from the bytes of a GGUF block, and back to values.

use half::f16;

use super::kind::QuantKind;
use crate::matrix::PANEL;

/// Elements of the largest block.
const MAX_BLOCK: usize = 256;

/// Writes a GGUF block of `kind` as column `column` of a unit of a panel.
pub(super) fn pack_block(kind: QuantKind, block: &[u8], unit: &mut [u32], column: usize) {
    let half_at = |at: usize| u16::from_le_bytes([block[at], block[at + 1]]);
    match kind {
        QuantKind::Int8 => unreachable!("int8 rows are not blocks"),
        QuantKind::Q8_0 => {
            set_half(unit, 0, column, half_at(0));
            set_words(unit, 32, column, &block[2..], |byte| byte ^ 0x80);
        }
        QuantKind::Q4_0 => {
            set_half(unit, 0, column, half_at(0));
            set_nibbles(unit, 32, column, &split_nibbles(&block[2..]));
        }
        QuantKind::Q4_1 => {
            set_half(unit, 0, column, half_at(0));
            set_half(unit, 1, column, half_at(2));
            set_nibbles(unit, 64, column, &split_nibbles(&block[4..]));
        }
        QuantKind::Q4K => {
            set_half(unit, 0, column, half_at(0));
            set_half(unit, 1, column, half_at(2) ^ 0x8000);
            set_words(unit, 64, column, &block[4..16], |byte| byte);
            for (i, bytes) in block[16..].chunks_exact(32).enumerate() {
                let mut values = [0; 64];
                for (j, &byte) in bytes.iter().enumerate() {
                    (values[j], values[32 + j]) = (byte & 15, byte >> 4);
                }
                set_nibbles(unit, 256 + i * 8 * PANEL, column, &values);
            }
        }
        QuantKind::Q6K => {
            set_half(unit, 0, column, half_at(208));
            set_words(unit, 32, column, &block[192..208], |byte| byte ^ 0x80);
            for group in 0..16 {
                let values: [u8; 16] = std::array::from_fn(|i| six_bits(block, group * 16 + i));
                let at = 32 + (4 + 3 * group) * PANEL;
                let pairs: [u8; 4] = std::array::from_fn(|byte| {
                    (0..4).map(|step| values[4 * step + byte] >> 4 << (2 * step)).sum()
                });
                set_words(unit, at, column, &pairs, |byte| byte);
                set_nibbles(unit, at + PANEL, column, &values.map(|value| value & 15));
            }
        }
    }
}

/// Decodes column `column` of a unit of a panel of GGUF blocks; products are rounded one by one,
/// in the order of ggml.
pub(super) fn unpack_block(kind: QuantKind, unit: &[u32], column: usize, out: &mut [f32]) {
    let scale = half(unit, 0, column);
    let mut values = [0_u8; MAX_BLOCK];
    let values = &mut values[..out.len()];
    match kind {
        QuantKind::Int8 => unreachable!("int8 rows are not blocks"),
        QuantKind::Q8_0 => {
            for (i, out) in out.iter_mut().enumerate() {
                *out = scale * f32::from((byte(unit, 32, column, i) ^ 0x80).cast_signed());
            }
        }
        QuantKind::Q4_0 => {
            get_nibbles(unit, 32, column, values);
            for (out, &q) in out.iter_mut().zip(&*values) {
                *out = scale * (f32::from(q) - 8.0);
            }
        }
        QuantKind::Q4_1 => {
            get_nibbles(unit, 64, column, values);
            let minimum = half(unit, 1, column);
            for (out, &q) in out.iter_mut().zip(&*values) {
                *out = scale * f32::from(q) + minimum;
            }
        }
        QuantKind::Q4K => {
            get_nibbles(unit, 256, column, values);
            let minimum = half(unit, 1, column);
            for (i, (out, &q)) in out.iter_mut().zip(&*values).enumerate() {
                let (step, base) = six_bit_pair(unit, column, i / 32);
                *out = (scale * f32::from(step)) * f32::from(q) + minimum * f32::from(base);
            }
        }
        QuantKind::Q6K => {
            for (i, out) in out.iter_mut().enumerate() {
                let (group, i) = (i / 16, i % 16);
                let at = 32 + (4 + 3 * group) * PANEL;
                get_nibbles(unit, at + PANEL, column, &mut values[..16]);
                let pair = byte(unit, at, column, i % 4) >> (i / 4 * 2) & 3;
                let q = f32::from(values[i] | pair << 4) - 32.0;
                let step = (byte(unit, 32, column, group) ^ 0x80).cast_signed();
                *out = scale * f32::from(step) * q;
            }
        }
    }
}

/// The values of Q4_0 and Q4_1 in order: low halves, then high halves.
fn split_nibbles(bytes: &[u8]) -> [u8; 32] {
    std::array::from_fn(|i| bytes[i % 16] >> (i / 16 * 4) & 15)
}

/// Element `i` of a Q6_K block, 0 to 63: each half of 128 elements has 64 bytes of low nibbles and
/// 32 of bit pairs, and interleaves four runs of 32.
fn six_bits(block: &[u8], i: usize) -> u8 {
    let (half, run, i) = (i / 128, i % 128 / 32, i % 32);
    let nibble = block[half * 64 + run % 2 * 32 + i] >> (run / 2 * 4) & 15;
    let pair = block[128 + half * 32 + i] >> (2 * run) & 3;
    nibble | pair << 4
}

/// Scale and minimum of one of the eight groups of Q4_K. Groups 0 to 3 are the low 6 bits of bytes
/// `g` and `g + 4`; for groups 4 to 7 byte `g + 4` holds the low nibbles of both, and the top 2
/// bits of bytes `g - 4` and `g` the rest.
fn six_bit_pair(unit: &[u32], column: usize, group: usize) -> (u8, u8) {
    let packed = |at: usize| byte(unit, 64, column, at);
    if group < 4 {
        return (packed(group) & 63, packed(group + 4) & 63);
    }
    let low = packed(group + 4);
    (low & 15 | packed(group - 4) >> 6 << 4, low >> 4 | packed(group) >> 6 << 4)
}

/// Sets `column` of row `row` of f16 values at the start of a unit.
fn set_half(unit: &mut [u32], row: usize, column: usize, bits: u16) {
    bytemuck::cast_slice_mut::<u32, u16>(unit)[row * PANEL + column] = bits;
}

fn half(unit: &[u32], row: usize, column: usize) -> f32 {
    f16::from_bits(bytemuck::cast_slice::<u32, u16>(unit)[row * PANEL + column]).to_f32()
}

/// Sets words of four bytes, each mapped by `map`, from word `at` on.
fn set_words(unit: &mut [u32], at: usize, column: usize, bytes: &[u8], map: fn(u8) -> u8) {
    for (i, bytes) in bytes.as_chunks::<4>().0.iter().enumerate() {
        unit[at + i * PANEL + column] = u32::from_le_bytes(bytes.map(map));
    }
}

/// Byte `i` of the words from word `at` on.
fn byte(unit: &[u32], at: usize, column: usize, i: usize) -> u8 {
    unit[at + i / 4 * PANEL + column].to_le_bytes()[i % 4]
}

/// Sets words of eight nibbles, from word `at` on.
fn set_nibbles(unit: &mut [u32], at: usize, column: usize, values: &[u8]) {
    for (i, values) in values.as_chunks::<8>().0.iter().enumerate() {
        let bytes = std::array::from_fn(|byte| values[byte] | values[byte + 4] << 4);
        unit[at + i * PANEL + column] = u32::from_le_bytes(bytes);
    }
}

/// Gets the values of words of eight nibbles, from word `at` on.
fn get_nibbles(unit: &[u32], at: usize, column: usize, values: &mut [u8]) {
    for (i, value) in values.iter_mut().enumerate() {
        *value = byte(unit, at, column, i / 8 * 4 + i % 4) >> (i % 8 / 4 * 4) & 15;
    }
}
