//! Each lane-wise opcode against a formula in Rust, over edge values and random bits.

mod common;

use common::{Asm, LANES, Rng};
use half::{bf16, f16};

/// Runs `opcode` on 32-bit-or-other registers: one lane for each row of sources.
fn run(opcode: &str, widths: &[u32], dst: u32, rows: &[Vec<u64>]) -> Vec<u64> {
    let mut out = Vec::new();
    for chunk in rows.chunks(LANES) {
        let mut asm = Asm::new();
        let mut sources = Vec::new();
        for (i, &width) in widths.iter().enumerate() {
            let column = chunk.iter().map(|row| row[i]).collect::<Vec<_>>();
            sources.push(asm.load(&column, width));
        }
        let result = asm.register(dst);
        asm.line(&format!("{opcode} {result}, {};", sources.join(", ")));
        out.extend(asm.run(&result, dst).into_iter().take(chunk.len()));
    }
    out
}

const EDGES: &[u64] = &[
    0,
    1,
    2,
    3,
    31,
    32,
    33,
    63,
    64,
    255,
    0x7fff,
    0x8000,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x1_0000_0000,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    u64::MAX,
];

/// Floats whose treatment differs: zeros, subnormals, ties, the largest ones, infinities, NaNs.
const F32_EDGES: &[u32] = &[
    0,
    0x8000_0000,
    1,
    0x8000_0001,
    0x007f_ffff,
    0x0080_0000,
    0x3f80_0000,
    0xbf80_0000,
    0x3f80_8000,
    0x3f81_8000,
    0x3f00_0000,
    0x3fc0_0000,
    0x4020_0000,
    0xc020_0000,
    0x4f00_0000,
    0xcf00_0000,
    0x5f00_0000,
    0x7f7f_ffff,
    0xff7f_ffff,
    0x7f80_0000,
    0xff80_0000,
    0x7fc0_0000,
    0x7f80_0001,
    0x42b0_0000,
    0xc2b0_0000,
    0x477f_f000,
    0x3880_0000,
    0x387f_c000,
    0x3300_0000,
];

fn mask(width: u32) -> u64 {
    u64::MAX >> (64 - width)
}

/// All pairs of edges, cut to each width, and random rows.
fn int_rows(widths: &[u32]) -> Vec<Vec<u64>> {
    let mut rng = Rng(7);
    let mut rows = Vec::new();
    for &a in EDGES {
        for &b in EDGES {
            rows.push(vec![a, b, a ^ b.rotate_left(9)]);
        }
    }
    rows.extend((0..64).map(|_| vec![rng.next(), rng.next(), rng.next()]));
    cut(rows, widths)
}

fn float_rows(arity: usize) -> Vec<Vec<u64>> {
    let mut rng = Rng(9);
    let mut rows = Vec::new();
    for &a in F32_EDGES {
        for &b in F32_EDGES {
            rows.push(vec![a.into(), b.into(), 0x3f80_0000 ^ u64::from(b) << 3]);
        }
    }
    rows.extend((0..64).map(|_| vec![rng.next(), rng.next(), rng.next()]));
    cut(rows, &vec![32; arity])
}

fn cut(rows: Vec<Vec<u64>>, widths: &[u32]) -> Vec<Vec<u64>> {
    let cut = |row: Vec<u64>| row.iter().zip(widths).map(|(v, &w)| v & mask(w)).collect();
    rows.into_iter().map(cut).collect()
}

fn check(opcode: &str, widths: &[u32], dst: u32, formula: impl Fn(&[u64]) -> u64) {
    let rows = int_rows(widths);
    for (row, got) in rows.iter().zip(run(opcode, widths, dst, &rows)) {
        let want = formula(row) & mask(dst);
        assert_eq!(got, want, "{opcode} {row:x?}: {got:#x}, not {want:#x}");
    }
}

fn check_f32(opcode: &str, arity: usize, formula: impl Fn(f32, f32, f32) -> f32) {
    let rows = float_rows(arity);
    for (row, got) in rows.iter().zip(run(opcode, &vec![32; arity], 32, &rows)) {
        let arg = |i: usize| f32::from_bits(*row.get(i).unwrap_or(&0) as u32);
        let want = formula(arg(0), arg(1), arg(2));
        let want = if want.is_nan() { 0x7fff_ffff } else { want.to_bits() };
        assert_eq!(got as u32, want, "{opcode} {row:x?}: {got:#x}, not {want:#x}");
    }
}

fn sext(value: u64, width: u32) -> i64 {
    (value << (64 - width)) as i64 >> (64 - width)
}

#[test]
fn sums_and_extremes_of_integers() {
    for width in [16, 32, 64] {
        let (signed, unsigned) = (format!("s{width}"), format!("u{width}"));
        let two = [width, width];
        for ty in [&signed, &unsigned] {
            check(&format!("add.{ty}"), &two, width, |r| r[0].wrapping_add(r[1]));
            check(&format!("sub.{ty}"), &two, width, |r| r[0].wrapping_sub(r[1]));
        }
        let s = |r: &[u64]| (sext(r[0], width), sext(r[1], width));
        check(&format!("min.{signed}"), &two, width, |r| s(r).0.min(s(r).1) as u64);
        check(&format!("max.{signed}"), &two, width, |r| s(r).0.max(s(r).1) as u64);
        check(&format!("min.{unsigned}"), &two, width, |r| r[0].min(r[1]));
        check(&format!("max.{unsigned}"), &two, width, |r| r[0].max(r[1]));
        check(&format!("neg.{signed}"), &[width], width, |r| r[0].wrapping_neg());
    }
    check("abs.s32", &[32], 32, |r| sext(r[0], 32).unsigned_abs());
    check("abs.s64", &[64], 64, |r| sext(r[0], 64).unsigned_abs());
}

#[test]
fn products() {
    for (ty, width) in [("16", 16), ("32", 32), ("64", 64)] {
        let two = [width, width];
        for sign in ["s", "u"] {
            check(&format!("mul.lo.{sign}{ty}"), &two, width, |r| r[0].wrapping_mul(r[1]));
            check(&format!("mad.lo.{sign}{ty}"), &[width; 3], width, |r| {
                r[0].wrapping_mul(r[1]).wrapping_add(r[2])
            });
        }
        check(&format!("mul.hi.u{ty}"), &two, width, |r| {
            ((u128::from(r[0]) * u128::from(r[1])) >> width) as u64
        });
        check(&format!("mul.hi.s{ty}"), &two, width, |r| {
            ((i128::from(sext(r[0], width)) * i128::from(sext(r[1], width))) >> width) as u64
        });
    }
    for width in [16, 32] {
        let product = |r: &[u64]| (sext(r[0], width) * sext(r[1], width)) as u64;
        check(&format!("mul.wide.s{width}"), &[width; 2], 2 * width, product);
        check(&format!("mul.wide.u{width}"), &[width; 2], 2 * width, |r| r[0] * r[1]);
    }
    check("mad.wide.s32", &[32, 32, 64], 64, |r| {
        ((sext(r[0], 32) * sext(r[1], 32)) as u64).wrapping_add(r[2])
    });
    check("mad.wide.u32", &[32, 32, 64], 64, |r| (r[0] * r[1]).wrapping_add(r[2]));
}

#[test]
fn quotients() {
    for width in [32, 64] {
        let rows: Vec<Vec<u64>> =
            int_rows(&[width, width]).into_iter().map(|r| vec![r[0], r[1].max(1)]).collect();
        let check = |opcode: &str, formula: fn(u64, u64, u32) -> u64| {
            let got = run(&format!("{opcode}{width}"), &[width; 2], width, &rows);
            for (row, got) in rows.iter().zip(got) {
                let want = formula(row[0], row[1], width) & mask(width);
                assert_eq!(got, want, "{opcode}{width} {row:x?}");
            }
        };
        check("div.s", |a, b, width| sext(a, width).wrapping_div(sext(b, width)) as u64);
        check("rem.s", |a, b, width| sext(a, width).wrapping_rem(sext(b, width)) as u64);
        check("div.u", |a, b, _| a / b);
        check("rem.u", |a, b, _| a % b);
    }
}

#[test]
fn bits() {
    for width in [16, 32, 64] {
        let two = [width, width];
        check(&format!("and.b{width}"), &two, width, |r| r[0] & r[1]);
        check(&format!("or.b{width}"), &two, width, |r| r[0] | r[1]);
        check(&format!("xor.b{width}"), &two, width, |r| r[0] ^ r[1]);
        check(&format!("not.b{width}"), &[width], width, |r| !r[0]);
        let shift = [width, 32];
        check(&format!("shl.b{width}"), &shift, width, |r| {
            if r[1] >= width.into() { 0 } else { r[0] << r[1] }
        });
        for ty in ["u", "b"] {
            check(&format!("shr.{ty}{width}"), &shift, width, |r| {
                if r[1] >= width.into() { 0 } else { r[0] >> r[1] }
            });
        }
        check(&format!("shr.s{width}"), &shift, width, |r| {
            (sext(r[0], width) >> r[1].min(width as u64 - 1)) as u64
        });
    }
    for width in [32, 64] {
        check(&format!("popc.b{width}"), &[width], 32, |r| r[0].count_ones().into());
        check(&format!("clz.b{width}"), &[width], 32, |r| {
            u64::from(r[0].leading_zeros()) - u64::from(64 - width)
        });
    }
    check("brev.b32", &[32], 32, |r| (r[0] as u32).reverse_bits().into());
}

/// Bit by bit, as the ISA states it.
fn bfe(a: u32, pos: u32, len: u32, signed: bool) -> u32 {
    let (pos, len) = (pos & 255, len & 255);
    let sign_at = (pos + len).saturating_sub(1).min(31);
    let sign = signed && len > 0 && a >> sign_at & 1 == 1;
    (0..32).fold(0, |out, i| {
        let bit = if i < len && pos + i <= 31 { a >> (pos + i) & 1 == 1 } else { sign };
        out | u32::from(bit) << i
    })
}

#[test]
fn fields_and_permutations() {
    let rows: Vec<Vec<u64>> = EDGES
        .iter()
        .flat_map(|&a| {
            (0..34).flat_map(move |pos| {
                [0, 1, 5, 31, 32, 33, 255].map(|len| vec![a & mask(32), pos, len])
            })
        })
        .collect();
    for (opcode, signed) in [("bfe.u32", false), ("bfe.s32", true)] {
        for (row, got) in rows.iter().zip(run(opcode, &[32; 3], 32, &rows)) {
            let want = bfe(row[0] as u32, row[1] as u32, row[2] as u32, signed);
            assert_eq!(got as u32, want, "{opcode} {row:x?}");
        }
    }
    check("shf.l.wrap.b32", &[32; 3], 32, |r| {
        let n = r[2] % 32;
        if n == 0 { r[1] } else { r[1] << n | r[0] >> (32 - n) }
    });
    check("shf.r.wrap.b32", &[32; 3], 32, |r| {
        let n = r[2] % 32;
        if n == 0 { r[0] } else { r[0] >> n | r[1] << (32 - n) }
    });
    let permuted = |selector: u64| {
        let row = vec![0x8322_1100, 0xf766_5544, selector];
        run("prmt.b32", &[32; 3], 32, &[row])[0]
    };
    assert_eq!(permuted(0x7701), 0xf7f7_0011);
    assert_eq!(permuted(0x3210), 0x8322_1100);
    assert_eq!(permuted(0xb8f4), 0xff00_ff44);
}

#[test]
fn three_input_logic() {
    for table in [0x00, 0x01, 0x80, 0xca, 0x96, 0xe8, 0xff, 0x6a] {
        let mut asm = Asm::new();
        let rows = int_rows(&[32; 3]);
        let columns: [Vec<u64>; 3] =
            std::array::from_fn(|i| rows.iter().take(LANES).map(|row| row[i]).collect());
        let [a, b, c] = columns.each_ref().map(|column| asm.load(column, 32));
        asm.line(&format!("lop3.b32 {a}, {a}, {b}, {c}, {table};"));
        for (lane, got) in asm.run(&a, 32).into_iter().enumerate() {
            let bit = |i: usize| columns.each_ref().map(|column| column[lane] >> i & 1);
            let want = (0..32).fold(0, |out, i| {
                let [a, b, c] = bit(i);
                out | (table as u64 >> (a << 2 | b << 1 | c) & 1) << i
            });
            assert_eq!(got, want, "table {table:#x}, lane {lane}");
        }
    }
}

#[test]
fn arithmetic_of_f32() {
    check_f32("add.f32", 2, |a, b, _| a + b);
    check_f32("add.rn.f32", 2, |a, b, _| a + b);
    check_f32("sub.rn.f32", 2, |a, b, _| a - b);
    check_f32("mul.rn.f32", 2, |a, b, _| a * b);
    check_f32("fma.rn.f32", 3, f32::mul_add);
    check_f32("div.rn.f32", 2, |a, b, _| a / b);
    check_f32("div.full.f32", 2, |a, b, _| a / b);
    check_f32("sqrt.rn.f32", 1, |a, _, _| a.sqrt());
    check_f32("rcp.rn.f32", 1, |a, _, _| a.recip());
    check_f32("neg.f32", 1, |a, _, _| -a);
    check_f32("abs.f32", 1, |a, _, _| a.abs());
    check_f32("copysign.f32", 2, |a, b, _| b.copysign(a));
}

#[test]
fn fused_multiply_add_rounds_once() {
    let tiny = 2f32.powi(-30);
    let row = [1.0 + tiny.sqrt(), 1.0 - tiny.sqrt(), -1.0].map(|x: f32| u64::from(x.to_bits()));
    let got = run("fma.rn.f32", &[32; 3], 32, &[row.to_vec()])[0];
    assert_eq!(f32::from_bits(got as u32), -tiny);
}

fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

#[test]
fn subnormals_are_flushed_where_asked() {
    check_f32("add.rn.ftz.f32", 2, |a, b, _| flush(flush(a) + flush(b)));
    check_f32("mul.ftz.f32", 2, |a, b, _| flush(flush(a) * flush(b)));
    check_f32("fma.rn.ftz.f32", 3, |a, b, c| flush(flush(a).mul_add(flush(b), flush(c))));
    check_f32("ex2.approx.ftz.f32", 1, |a, _, _| flush(f64::from(flush(a)).exp2() as f32));
}

#[test]
fn approximations_are_near() {
    type Case = (&'static str, fn(f64) -> f64);
    let cases: [Case; 6] = [
        ("ex2.approx.f32", f64::exp2),
        ("lg2.approx.f32", f64::log2),
        ("rcp.approx.f32", f64::recip),
        ("rsqrt.approx.f32", |x| x.sqrt().recip()),
        ("sqrt.approx.f32", f64::sqrt),
        ("rsqrt.approx.ftz.f32", |x| x.sqrt().recip()),
    ];
    let values = [0.1f32, 0.5, 1.0, 1.5, 2.0, 3.0, 10.0, 100.25];
    let rows: Vec<Vec<u64>> = values.iter().map(|x| vec![x.to_bits().into()]).collect();
    for (opcode, formula) in cases {
        for (&x, got) in values.iter().zip(run(opcode, &[32], 32, &rows)) {
            let (got, want) = (f64::from(f32::from_bits(got as u32)), formula(x.into()));
            assert!((got - want).abs() <= want.abs() * 2f64.powi(-22), "{opcode} {x}: {got}");
        }
    }
    let special = |opcode, x: f32| {
        f32::from_bits(run(opcode, &[32], 32, &[vec![x.to_bits().into()]])[0] as u32)
    };
    assert_eq!(special("ex2.approx.f32", f32::NEG_INFINITY), 0.0);
    assert_eq!(special("ex2.approx.f32", 200.0), f32::INFINITY);
    assert_eq!(special("lg2.approx.f32", 0.0), f32::NEG_INFINITY);
    assert!(special("lg2.approx.f32", -1.0).is_nan());
    assert_eq!(special("rsqrt.approx.f32", -0.0), f32::NEG_INFINITY);
}

/// The extreme by the ISA: a number before a NaN, −0 below +0.
fn extreme(a: f32, b: f32, largest: bool) -> f32 {
    match (a.is_nan(), b.is_nan()) {
        (true, _) => b,
        (_, true) => a,
        _ => {
            let first_is_larger = a > b || a == b && a.is_sign_positive();
            if first_is_larger == largest { a } else { b }
        }
    }
}

#[test]
fn extremes_of_f32() {
    check_f32("max.f32", 2, |a, b, _| extreme(a, b, true));
    check_f32("min.f32", 2, |a, b, _| extreme(a, b, false));
    let nan = |a: f32, b: f32| a.is_nan() || b.is_nan();
    check_f32("max.NaN.f32", 2, |a, b, _| if nan(a, b) { f32::NAN } else { extreme(a, b, true) });
    check_f32("min.NaN.f32", 2, |a, b, _| if nan(a, b) { f32::NAN } else { extreme(a, b, false) });
}

#[test]
fn conversions_between_floats() {
    let rows = float_rows(2);
    let single: Vec<Vec<u64>> = rows.iter().map(|row| vec![row[0]]).collect();
    let to_f16 = |x: f32| if x.is_nan() { 0x7fff } else { f16::from_f32(x).to_bits() };
    let to_bf16 = |x: f32| if x.is_nan() { 0x7fff } else { bf16::from_f32(x).to_bits() };
    let f = |bits: u64| f32::from_bits(bits as u32);
    for (row, got) in single.iter().zip(run("cvt.rn.f16.f32", &[32], 16, &single)) {
        assert_eq!(got, to_f16(f(row[0])).into(), "{row:x?}");
    }
    for (row, got) in single.iter().zip(run("cvt.rn.bf16.f32", &[32], 16, &single)) {
        assert_eq!(got, to_bf16(f(row[0])).into(), "{row:x?}");
    }
    for (row, got) in rows.iter().zip(run("cvt.rn.bf16x2.f32", &[32, 32], 32, &rows)) {
        let want = u64::from(to_bf16(f(row[0]))) << 16 | u64::from(to_bf16(f(row[1])));
        assert_eq!(got, want, "{row:x?}");
    }
    for (row, got) in rows.iter().zip(run("cvt.rn.f16x2.f32", &[32, 32], 32, &rows)) {
        let want = u64::from(to_f16(f(row[0]))) << 16 | u64::from(to_f16(f(row[1])));
        assert_eq!(got, want, "{row:x?}");
    }
    // By hand: ties go to even, what exceeds the range to infinity, subnormals are kept.
    let hand = |opcode, bits: u32| run(opcode, &[32], 16, &[vec![bits.into()]])[0];
    assert_eq!(hand("cvt.rn.bf16.f32", 0x3f80_8000), 0x3f80);
    assert_eq!(hand("cvt.rn.bf16.f32", 0x3f81_8000), 0x3f82);
    assert_eq!(hand("cvt.rn.bf16.f32", 0x3f80_8001), 0x3f81);
    assert_eq!(hand("cvt.rn.bf16.f32", 0x7f7f_ffff), 0x7f80);
    assert_eq!(hand("cvt.rn.f16.f32", 65520f32.to_bits()), 0x7c00);
    assert_eq!(hand("cvt.rn.f16.f32", 65519f32.to_bits()), 0x7bff);
    assert_eq!(hand("cvt.rn.f16.f32", 2f32.powi(-25).to_bits()), 0);
    assert_eq!(hand("cvt.rn.f16.f32", (1.5 * 2f32.powi(-25)).to_bits()), 1);
    for bits in 0..=u16::MAX {
        if bits % 37 == 0 {
            let row = [vec![u64::from(bits)]];
            let wide = f16::from_bits(bits).to_f32();
            let want = if wide.is_nan() { 0x7fff_ffff } else { wide.to_bits() };
            assert_eq!(run("cvt.f32.f16", &[16], 32, &row)[0] as u32, want);
        }
    }
    let wide: Vec<Vec<u64>> = vec![vec![0x3f80], vec![0xff80], vec![0x0001]];
    assert_eq!(run("cvt.f32.bf16", &[16], 32, &wide), [0x3f80_0000, 0xff80_0000, 0x0001_0000]);
    assert_eq!(run("cvt.f64.f32", &[32], 64, &[vec![0x3fc0_0000]])[0], 1.5f64.to_bits());
    assert_eq!(
        run("cvt.rn.f32.f64", &[64], 32, &[vec![0.1f64.to_bits()]])[0],
        0.1f32.to_bits().into()
    );
}

#[test]
fn conversions_to_and_from_integers() {
    let rows = float_rows(1);
    type Rounding = (&'static str, fn(f32) -> f32);
    let modes: [Rounding; 4] = [
        ("rni", f32::round_ties_even),
        ("rzi", f32::trunc),
        ("rmi", f32::floor),
        ("rpi", f32::ceil),
    ];
    for (mode, round) in modes {
        let value = |row: &[u64]| round(f32::from_bits(row[0] as u32));
        for (row, got) in rows.iter().zip(run(&format!("cvt.{mode}.s32.f32"), &[32], 32, &rows)) {
            assert_eq!(got as i32, value(row) as i32, "{mode} {row:x?}");
        }
        for (row, got) in rows.iter().zip(run(&format!("cvt.{mode}.u32.f32"), &[32], 32, &rows)) {
            assert_eq!(got as u32, value(row) as u32, "{mode} {row:x?}");
        }
        for (row, got) in rows.iter().zip(run(&format!("cvt.{mode}.s64.f32"), &[32], 64, &rows)) {
            assert_eq!(got as i64, value(row) as i64, "{mode} {row:x?}");
        }
        check_f32(&format!("cvt.{mode}.f32.f32"), 1, |a, _, _| round(a));
    }
    let hand = |x: f32| run("cvt.rzi.s32.f32", &[32], 32, &[vec![x.to_bits().into()]])[0] as i32;
    assert_eq!([hand(-2.9), hand(3e9), hand(-3e9), hand(f32::NAN)], [-2, i32::MAX, i32::MIN, 0]);
    check("cvt.rn.f32.s32", &[32], 32, |r| (r[0] as i32 as f32).to_bits().into());
    check("cvt.rn.f32.u32", &[32], 32, |r| (r[0] as f32).to_bits().into());
    check("cvt.rn.f32.s64", &[64], 32, |r| (r[0] as i64 as f32).to_bits().into());
    check("cvt.rn.f32.u64", &[64], 32, |r| (r[0] as f32).to_bits().into());
    check("cvt.rn.f64.s64", &[64], 64, |r| (r[0] as i64 as f64).to_bits());
    for from in [16, 32, 64] {
        for to in [16, 32, 64] {
            for sign in ["s", "u"] {
                check(&format!("cvt.{sign}{to}.s{from}"), &[from], to, |r| sext(r[0], from) as u64);
                check(&format!("cvt.{sign}{to}.u{from}"), &[from], to, |r| r[0]);
            }
        }
    }
}

#[test]
fn double_precision() {
    let two = |opcode, a: f64, b: f64| {
        f64::from_bits(run(opcode, &[64, 64], 64, &[vec![a.to_bits(), b.to_bits()]])[0])
    };
    assert_eq!(two("add.rn.f64", 0.1, 0.2), 0.1 + 0.2);
    assert_eq!(two("sub.rn.f64", 0.1, 0.2), 0.1 - 0.2);
    assert_eq!(two("mul.rn.f64", 0.1, 0.2), 0.1 * 0.2);
    assert_eq!(two("div.rn.f64", 0.1, 0.3), 0.1 / 0.3);
    let one = |opcode, a: f64| run(opcode, &[64], 64, &[vec![a.to_bits()]])[0];
    assert_eq!(one("cvt.rpi.f64.f64", 1.25), 2f64.to_bits());
    assert_eq!(one("cvt.rmi.f64.f64", -1.25), (-2f64).to_bits());
    assert_eq!(one("cvt.rzi.s64.f64", -1e300) as i64, i64::MIN);
    let fused = [1.0 + 2f64.powi(-40), 1.0 - 2f64.powi(-40), -1.0].map(f64::to_bits);
    let got = run("fma.rn.f64", &[64; 3], 64, &[fused.to_vec()])[0];
    assert_eq!(f64::from_bits(got), -2f64.powi(-80));
}

#[test]
fn narrow_floats() {
    let mut rng = Rng(3);
    let rows: Vec<Vec<u64>> =
        (0..256).map(|_| (0..3).map(|_| rng.next() & 0xffff_ffff).collect()).collect();
    let halves = |x: u64| [x as u16, (x >> 16) as u16];
    for (row, got) in rows.iter().zip(run("fma.rn.bf16x2", &[32; 3], 32, &rows)) {
        for (i, got) in halves(got).into_iter().enumerate() {
            let [a, b, c] = [0, 1, 2].map(|j| bf16::from_bits(halves(row[j])[i]).to_f64());
            // One rounding from f64, exact enough unless the exponents are far apart.
            let want = bf16::from_f64(a.mul_add(b, c));
            let close = want.to_bits().abs_diff(got) == 0 || want.is_nan();
            assert!(close, "{row:x?} {i}: {got:#x}, not {want}");
        }
    }
    for (row, got) in
        rows.iter().zip(run("add.rn.f16x2", &[32; 2], 32, &cut(rows.clone(), &[32; 2])))
    {
        for (i, got) in halves(got).into_iter().enumerate() {
            let [a, b] = [0, 1].map(|j| f16::from_bits(halves(row[j])[i]).to_f32());
            let want = f16::from_f32(a + b);
            assert!(want.is_nan() || want.to_bits() == got, "{row:x?} {i}: {got:#x}, not {want}");
        }
    }
    let one = |opcode, a: f32, b: f32| {
        let row = [a, b].map(|x| u64::from(bf16::from_f32(x).to_bits()));
        bf16::from_bits(run(opcode, &[16, 16], 16, &[row.to_vec()])[0] as u16).to_f32()
    };
    assert_eq!(one("max.bf16", -1.0, 2.0), 2.0);
    assert_eq!(one("min.bf16", f32::NAN, 2.0), 2.0);
}

#[test]
fn comparisons() {
    let conditions = ["eq", "ne", "lt", "le", "gt", "ge"];
    let holds = |condition: &str, order: std::cmp::Ordering| match condition {
        "eq" => order.is_eq(),
        "ne" => order.is_ne(),
        "lt" => order.is_lt(),
        "le" => order.is_le(),
        "gt" => order.is_gt(),
        _ => order.is_ge(),
    };
    for condition in conditions {
        for width in [16, 32, 64] {
            let rows = int_rows(&[width, width]);
            let got = compare(&format!("{condition}.s{width}"), width, &rows);
            for (row, got) in rows.iter().zip(got) {
                let want = holds(condition, sext(row[0], width).cmp(&sext(row[1], width)));
                assert_eq!(got, want, "{condition}.s{width} {row:x?}");
            }
            let got = compare(&format!("{condition}.u{width}"), width, &rows);
            for (row, got) in rows.iter().zip(got) {
                assert_eq!(got, holds(condition, row[0].cmp(&row[1])), "{condition} {row:x?}");
            }
        }
    }
    let rows = float_rows(2);
    for condition in conditions {
        let ordered = compare(&format!("{condition}.f32"), 32, &rows);
        let unordered = compare(&format!("{condition}u.f32"), 32, &rows);
        for ((row, ordered), unordered) in rows.iter().zip(ordered).zip(unordered) {
            let [a, b] = [0, 1].map(|i| f32::from_bits(row[i] as u32));
            let known = a.partial_cmp(&b).map(|order| holds(condition, order));
            assert_eq!(ordered, known.unwrap_or(false), "{condition} {a} {b}");
            assert_eq!(unordered, known.unwrap_or(true), "{condition}u {a} {b}");
        }
    }
    for (row, (num, nan)) in rows
        .iter()
        .zip(compare("num.f32", 32, &rows).into_iter().zip(compare("nan.f32", 32, &rows)))
    {
        let is_nan = row.iter().any(|&bits| f32::from_bits(bits as u32).is_nan());
        assert_eq!((num, nan), (!is_nan, is_nan), "{row:x?}");
    }
}

/// Which rows fulfil `setp.{condition}`.
fn compare(condition: &str, width: u32, rows: &[Vec<u64>]) -> Vec<bool> {
    let mut out = Vec::new();
    for chunk in rows.chunks(LANES) {
        let mut asm = Asm::new();
        let column = |i: usize| chunk.iter().map(|row| row[i]).collect::<Vec<_>>();
        let (a, b) = (asm.load(&column(0), width), asm.load(&column(1), width));
        asm.line(&format!("setp.{condition} %p1, {a}, {b};"));
        let result = asm.register(32);
        asm.line(&format!("selp.b32 {result}, 1, 0, %p1;"));
        out.extend(asm.run(&result, 32).into_iter().take(chunk.len()).map(|bit| bit == 1));
    }
    out
}
