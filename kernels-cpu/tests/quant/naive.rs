//! The arithmetic of quantised products, written plainly.

use half::f16;
use quire_kernels_cpu::QuantKind;

/// A part of a block with its own integer scale and minimum.
pub struct Group {
    pub scale: i32,
    pub minimum: i32,
    pub q: Vec<i32>,
}

/// A block of weights: `(scale · group scale) · q + minimum · group minimum`.
pub struct Block {
    pub scale: f32,
    pub minimum: f32,
    pub groups: Vec<Group>,
}

/// A block of activations, `scale · q`.
pub struct Activations {
    pub scale: f32,
    pub q: Vec<i32>,
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Blocks of a row as a GGUF file holds it.
pub fn blocks(kind: QuantKind, row: &[u8]) -> Vec<Block> {
    let size = kind.row_bytes(kind.block_elements()).unwrap();
    row.chunks(size).map(|bytes| block(kind, bytes)).collect()
}

fn block(kind: QuantKind, bytes: &[u8]) -> Block {
    let nibble = |at: usize, high: bool| i32::from(bytes[at] >> if high { 4 } else { 0 } & 15);
    let one = |minimum: i32, q: Vec<i32>| vec![Group { scale: 1, minimum, q }];
    match kind {
        QuantKind::Int8 => panic!("no file has int8 rows"),
        QuantKind::Q8_0 => {
            let q = bytes[2..].iter().map(|&byte| i32::from(byte as i8)).collect();
            Block { scale: half_at(bytes, 0), minimum: 0.0, groups: one(0, q) }
        }
        QuantKind::Q4_0 => {
            let q = (0..32).map(|i| nibble(2 + i % 16, i >= 16) - 8).collect();
            Block { scale: half_at(bytes, 0), minimum: 0.0, groups: one(0, q) }
        }
        QuantKind::Q4_1 => {
            let q = (0..32).map(|i| nibble(4 + i % 16, i >= 16)).collect();
            Block { scale: half_at(bytes, 0), minimum: half_at(bytes, 2), groups: one(1, q) }
        }
        QuantKind::Q4K => {
            let groups = (0..8).map(|group| {
                let p = |i: usize| i32::from(bytes[4 + i]);
                let (scale, minimum) = if group < 4 {
                    (p(group) % 64, p(group + 4) % 64)
                } else {
                    let low = p(group + 4);
                    (low % 16 + p(group - 4) / 64 * 16, low / 16 + p(group) / 64 * 16)
                };
                let at = 16 + group / 2 * 32;
                let q = (0..32).map(|i| nibble(at + i, group % 2 == 1)).collect();
                Group { scale, minimum, q }
            });
            let minimum = -half_at(bytes, 2);
            Block { scale: half_at(bytes, 0), minimum, groups: groups.collect() }
        }
        QuantKind::Q6K => {
            let value = |i: usize| {
                let (side, run, i) = (i / 128, i % 128 / 32, i % 32);
                let low = nibble(side * 64 + run % 2 * 32 + i, run >= 2);
                low + i32::from(bytes[128 + side * 32 + i]) / (1 << (2 * run)) % 4 * 16 - 32
            };
            let groups = (0..16).map(|group| Group {
                scale: i32::from(bytes[192 + group] as i8),
                minimum: 0,
                q: (0..16).map(|i| value(group * 16 + i)).collect(),
            });
            Block { scale: half_at(bytes, 208), minimum: 0.0, groups: groups.collect() }
        }
    }
}

/// Quantises values as one block.
pub fn quantise(values: &[f32]) -> Activations {
    if values.iter().any(|x| !x.is_finite()) {
        return Activations { scale: f32::NAN, q: vec![0; values.len()] };
    }
    let largest = values.iter().fold(0.0_f32, |a, x| a.max(x.abs()));
    if largest < 2.0_f32.powi(-100) {
        return Activations { scale: 0.0, q: vec![0; values.len()] };
    }
    let inverse = 127.0 / largest;
    let q = values.iter().map(|x| (x * inverse).round_ties_even() as i32).collect();
    Activations { scale: largest / 127.0, q }
}

/// An `Int8` row.
pub fn int8_row(values: &[f32]) -> Vec<Block> {
    let Activations { scale, q } = quantise(values);
    vec![Block { scale, minimum: 0.0, groups: vec![Group { scale: 1, minimum: 0, q }] }]
}

/// Whether the format has minima.
fn has_minima(kind: QuantKind) -> bool {
    matches!(kind, QuantKind::Q4_1 | QuantKind::Q4K)
}

/// The values of a row of weights.
pub fn dequantise(kind: QuantKind, row: &[Block]) -> Vec<f32> {
    let mut values = Vec::new();
    for block in row {
        for group in &block.groups {
            let step = block.scale * group.scale as f32;
            let minimum = block.minimum * group.minimum as f32;
            let value = |&q: &i32| {
                let product = step * q as f32;
                if has_minima(kind) { product + minimum } else { product }
            };
            values.extend(group.q.iter().map(value));
        }
    }
    values
}

/// The largest sum of the magnitudes of the terms of the chain that a block can contribute.
pub fn largest_terms(block: &Block) -> f64 {
    let of_group = |group: &Group| {
        let step = f64::from(block.scale.abs()) * f64::from(group.scale.abs());
        let minimum = f64::from(block.minimum.abs()) * f64::from(group.minimum.abs());
        group.q.iter().map(|&q| step * f64::from(q.abs()) + minimum).sum::<f64>()
    };
    block.groups.iter().map(of_group).sum()
}

/// The product of a row of activations and a row of weights.
pub fn dot(kind: QuantKind, x: &[Activations], w: &[Block]) -> f32 {
    assert_eq!(x.len(), w.len());
    let mut acc = 0.0_f32;
    for (x, w) in x.iter().zip(w) {
        let (mut dot, mut sum, mut at) = (0_i64, 0_i64, 0);
        for group in &w.groups {
            let x = &x.q[at..at + group.q.len()];
            let products = x.iter().zip(&group.q).map(|(&x, &w)| i64::from(x) * i64::from(w));
            dot += i64::from(group.scale) * products.sum::<i64>();
            sum += i64::from(group.minimum) * x.iter().map(|&x| i64::from(x)).sum::<i64>();
            at += group.q.len();
        }
        let dot = i32::try_from(dot).expect("dots fit") as f32;
        if kind == QuantKind::Int8 {
            return w.scale * x.scale * dot;
        }
        acc = (w.scale * x.scale).mul_add(dot, acc);
        if has_minima(kind) {
            let sum = i32::try_from(sum).expect("sums fit") as f32;
            acc = (w.minimum * x.scale).mul_add(sum, acc);
        }
    }
    acc
}
