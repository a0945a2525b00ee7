//! Control flow, memory and whole-warp instructions that do what they should, and the counts.

mod common;

use common::{Asm, LANES, Rng, Setup, run};
use half::{bf16, f16};
use quire_ptxsim::{CtaOrder, Options};

/// Stores `%r1` of each thread as a word of `out`.
const STORE: &str = "mad.wide.u32 %d4, %r0, 4, %d0;\nst.global.b32 [%d4], %r1;";

fn words(body: &str) -> Vec<u32> {
    let run = run(&Setup::default(), &format!("{body}\n{STORE}"));
    run.result.as_ref().unwrap_or_else(|e| panic!("{e}"));
    run.words(LANES)
}

#[test]
fn lanes_that_diverge_meet_again() {
    // Lane l loops l & 7 times, odd ones add 100 on the way; the shuffle needs all of them.
    let got = words(
        "mov.u32 %r1, 0;\nand.b32 %r2, %r0, 7;\n$top:\nsetp.eq.u32 %p1, %r2, 0;\n@%p1 bra $out;\n\
         add.s32 %r1, %r1, 1;\nand.b32 %r3, %r0, 1;\nsetp.eq.u32 %p2, %r3, 0;\n@%p2 bra $even;\n\
         add.s32 %r1, %r1, 100;\n$even:\nsub.s32 %r2, %r2, 1;\nbra.uni $top;\n$out:\n\
         shfl.sync.bfly.b32 %r1, %r1, 1, 31, -1;",
    );
    for (lane, got) in got.into_iter().enumerate() {
        let other = (lane ^ 1) as u32;
        assert_eq!(got, (other & 7) * if other & 1 == 1 { 101 } else { 1 }, "lane {lane}");
    }
}

#[test]
fn lanes_may_return_early() {
    let body = format!("setp.ge.u32 %p1, %r0, 5;\n@%p1 ret;\nmov.u32 %r1, 9;\n{STORE}");
    let run = run(&Setup::default(), &body);
    run.result.as_ref().expect("no fault");
    assert_eq!(run.words(5), [9; 5]);
    assert!(!run.memory.is_written(run.p0 + 20, 4).expect("inside"));
}

#[test]
fn shuffles() {
    type Case = (&'static str, fn(u32) -> u32);
    let cases: [Case; 6] = [
        ("bfly.b32 %r1, %r0, 5, 31, -1", |l| l ^ 5),
        ("idx.b32 %r1, %r0, 7, 31, -1", |_| 7),
        ("up.b32 %r1, %r0, 3, 0, -1", |l| if l < 3 { l } else { l - 3 }),
        ("down.b32 %r1, %r0, 3, 31, -1", |l| if l > 28 { l } else { l + 3 }),
        // Segments of 8 lanes: 0x1807 = mask 24, clamp 7.
        ("down.b32 %r1, %r0, 3, 6151, -1", |l| if l % 8 > 4 { l } else { l + 3 }),
        ("idx.b32 %r1, %r0, 2, 6151, -1", |l| l / 8 * 8 + 2),
    ];
    for (case, from) in cases {
        let got = words(&format!("shfl.sync.{case};"));
        let want: Vec<u32> = (0..32).map(from).collect();
        assert_eq!(got, want, "{case}");
    }
}

#[test]
fn votes_and_reductions() {
    let odd = "and.b32 %r2, %r0, 1;\nsetp.eq.u32 %p1, %r2, 1;\n";
    assert_eq!(words(&format!("{odd}vote.sync.ballot.b32 %r1, %p1, -1;"))[3], 0xaaaa_aaaa);
    assert_eq!(words(&format!("{odd}vote.sync.ballot.b32 %r1, !%p1, -1;"))[3], 0x5555_5555);
    for (mode, pred, want) in [("any", "%p1", 1), ("all", "%p1", 0), ("all", "%p2", 1)] {
        let got = words(&format!(
            "{odd}mov.pred %p2, -1;\nvote.sync.{mode}.pred %p3, {pred}, -1;\n\
             selp.b32 %r1, 1, 0, %p3;"
        ));
        assert_eq!(got, [want; LANES]);
    }
    let signed = "sub.s32 %r2, %r0, 5;\n";
    for (op, want) in
        [("add.s32", 336), ("min.s32", -5), ("max.s32", 26), ("max.u32", -1), ("min.u32", 0)]
    {
        let got = words(&format!("{signed}redux.sync.{op} %r1, %r2, -1;"));
        assert_eq!(got, [want as u32; LANES], "{op}");
    }
}

#[test]
fn registers_in_parts() {
    let got = words(
        "cvt.u16.u32 %h1, %r0;\nmov.b16 %h2, -1;\nmov.b32 %r2, {%h1, %h2};\n\
         mov.b64 %d5, {%r2, %r0};\nmov.b64 {_, %r3}, %d5;\nmov.b64 {%r4, _}, %d5;\n\
         mov.b32 {%h3, %h4}, %r4;\ncvt.u32.u16 %r5, %h3;\nadd.s32 %r6, %r5, %r3;\n\
         mov.b64 {%h5, %h6, %h7, %h8}, %d5;\ncvt.s32.s16 %r7, %h6;\nadd.s32 %r1, %r6, %r7;",
    );
    assert_eq!(got, (0..32).map(|l: u32| (2 * l).wrapping_sub(1)).collect::<Vec<_>>());
}

#[test]
fn special_registers_and_parameters() {
    let body = format!(
        "mov.u32 %r2, %ctaid.x;\nmov.u32 %r3, %nctaid.x;\nmov.u32 %r4, %ntid.x;\n\
         mov.u32 %r5, %laneid;\nld.param.s32 %d5, [n];\ncvt.u32.u64 %r6, %d5;\n\
         shl.b32 %r7, %r2, 6;\nadd.s32 %r0, %r0, %r7;\nmad.lo.s32 %r1, %r2, 1000, %r5;\n\
         mad.lo.s32 %r1, %r3, 100, %r1;\nadd.s32 %r1, %r1, %r4;\nadd.s32 %r1, %r1, %r6;\n\
         setp.lt.s64 %p1, %d5, 0;\n@!%p1 ret;\n{STORE}"
    );
    let run = run(&Setup { threads: 64, grid: 3, n: -7, ..Setup::default() }, &body);
    assert_eq!(run.result.as_ref().expect("runs").blocks, 3);
    let want = |thread: u32| 1000 * (thread / 64) + thread % 32 + 300 + 64 - 7;
    assert_eq!(run.words(192), (0..192).map(want).collect::<Vec<_>>());
}

#[test]
fn narrow_and_signed_elements() {
    let got = words(
        "add.s64 %d5, %d1, 254;\nld.global.s8 %r2, [%d5];\nld.global.u8 %r3, [%d5+1];\n\
         ld.global.s16 %r4, [%d5];\nst.global.b8 [%d0+1000], %r3;\n\
         ld.global.u8 %h1, [%d0+1000];\ncvt.u32.u16 %r5, %h1;\n\
         add.s32 %r1, %r2, %r3;\nadd.s32 %r1, %r1, %r4;\nadd.s32 %r1, %r1, %r5;",
    );
    let want = -2 + 255 + i32::from(0xfffe_u16 as i16) + 255;
    assert_eq!(got, [want as u32; LANES]);
}

#[test]
fn block_orders() {
    // Blocks bump a counter in order; each of them sees another value by the order.
    let body = "mov.u32 %r2, %ctaid.x;\nmad.wide.u32 %d4, %r2, 128, %d0;\n\
                mad.wide.u32 %d4, %r0, 4, %d4;\nst.global.b32 [%d4], %r2;";
    for order in
        [CtaOrder::Forward, CtaOrder::Reverse, CtaOrder::Shuffled(1), CtaOrder::Shuffled(2)]
    {
        let options = Options { order, ..Options::default() };
        let run = run(&Setup { grid: 8, options, ..Setup::default() }, body);
        run.result.as_ref().expect("runs");
        assert_eq!(run.words(256), (0..256).map(|i| i / 32).collect::<Vec<_>>());
    }
}

/// Element (row, column) of the fragments as the ISA's figures have them.
fn fragments(a: &[[u16; 16]; 16], b: &[[u16; 8]; 16], c: &[[f32; 8]; 16]) -> [Vec<u64>; 10] {
    let pair = |low: u16, high: u16| u64::from(low) | u64::from(high) << 16;
    let column = |f: &dyn Fn(usize, usize) -> u64| (0..32).map(|l| f(l / 4, l % 4)).collect();
    [
        column(&|g, t| pair(a[g][2 * t], a[g][2 * t + 1])),
        column(&|g, t| pair(a[g + 8][2 * t], a[g + 8][2 * t + 1])),
        column(&|g, t| pair(a[g][2 * t + 8], a[g][2 * t + 9])),
        column(&|g, t| pair(a[g + 8][2 * t + 8], a[g + 8][2 * t + 9])),
        column(&|g, t| pair(b[2 * t][g], b[2 * t + 1][g])),
        column(&|g, t| pair(b[2 * t + 8][g], b[2 * t + 9][g])),
        column(&|g, t| c[g][2 * t].to_bits().into()),
        column(&|g, t| c[g][2 * t + 1].to_bits().into()),
        column(&|g, t| c[g + 8][2 * t].to_bits().into()),
        column(&|g, t| c[g + 8][2 * t + 1].to_bits().into()),
    ]
}

#[test]
fn matrix_products() {
    let mut rng = Rng(5);
    let mut value = || (rng.next() >> 40) as f32 / (1 << 23) as f32 - 1.0;
    for (ty, bits, wide) in [
        (
            "bf16",
            (|x| bf16::from_f32(x).to_bits()) as fn(f32) -> u16,
            (|b| bf16::from_bits(b).to_f32()) as fn(u16) -> f32,
        ),
        ("f16", |x| f16::from_f32(x).to_bits(), |b| f16::from_bits(b).to_f32()),
    ] {
        let a: [[u16; 16]; 16] = std::array::from_fn(|_| std::array::from_fn(|_| bits(value())));
        let b: [[u16; 8]; 16] = std::array::from_fn(|_| std::array::from_fn(|_| bits(value())));
        let c: [[f32; 8]; 16] = std::array::from_fn(|_| std::array::from_fn(|_| value()));
        let sources = fragments(&a, &b, &c);
        for result in 0..4 {
            let mut asm = Asm::new();
            let r: Vec<String> = sources.iter().map(|column| asm.load(column, 32)).collect();
            let d: Vec<String> = (0..4).map(|_| asm.register(32)).collect();
            asm.line(&format!(
                "mma.sync.aligned.m16n8k16.row.col.f32.{ty}.{ty}.f32 \
                 {{{}}}, {{{}}}, {{{}}}, {{{}}};",
                d.join(", "),
                r[..4].join(", "),
                r[4..6].join(", "),
                r[6..].join(", ")
            ));
            for (lane, got) in asm.run(&d[result], 32).into_iter().enumerate() {
                let row = lane / 4 + 8 * (result / 2);
                let column = 2 * (lane % 4) + result % 2;
                let mut want = c[row][column];
                (0..16).for_each(|k| want += wide(a[row][k]) * wide(b[k][column]));
                assert_eq!(f32::from_bits(got as u32), want, "{ty} ({row}, {column})");
            }
        }
    }
}

#[test]
fn undefined_rows_of_a_product_stay_apart() {
    // Row 3 of A is undefined: lanes 12 to 15 of registers 0 and 1 of D are, no others.
    let body = |store: &str| {
        format!(
            "shr.u32 %r2, %r0, 2;\nsetp.ne.u32 %p1, %r2, 3;\nmov.u32 %r6, 0;\n\
             @%p1 mov.u32 %r3, 0;\n\
             mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{%r10, %r11, %r12, %r13}}, \
             {{%r3, %r6, %r6, %r6}}, {{%r6, %r6}}, {{%r6, %r6, %r6, %r6}};\n{store}"
        )
    };
    let setup = Setup::default();
    for store in ["@%p1 st.global.b32 [%d2], %r10;", "st.global.b32 [%d2], %r12;"] {
        run(&setup, &body(store)).result.expect("other rows are defined");
    }
    let (_, message) = run(&setup, &body("st.global.b32 [%d2], %r11;")).fault();
    assert!(message.contains("lane 12: uninitialised"), "{message}");
}

#[test]
fn matrices_from_shared_memory() {
    // Four matrices whose element (m, row, column) is 64 m + 8 row + column, rows 16 bytes apart.
    let fill = "mov.b32 %r1, global_smem;\nshl.b32 %r2, %r0, 4;\nadd.s32 %r3, %r1, %r2;\n\
                shl.b32 %r4, %r0, 3;\nmad.lo.s32 %r5, %r4, 65537, 65536;\n\
                add.s32 %r6, %r5, 131074;\nadd.s32 %r7, %r6, 131074;\nadd.s32 %r8, %r7, 131074;\n\
                st.shared.v4.b32 [%r3], {%r5, %r6, %r7, %r8};\n";
    for (m, register) in ["%r10", "%r11", "%r12", "%r13"].into_iter().enumerate() {
        for (trans, name) in [(false, ""), (true, ".trans")] {
            let got = words(&format!(
                "{fill}ldmatrix.sync.aligned.m8n8.x4{name}.shared.b16 \
                 {{%r10, %r11, %r12, %r13}}, [%r3];\nmov.u32 %r1, {register};"
            ));
            for (lane, got) in got.into_iter().enumerate() {
                let element = |row: usize, column: usize| (64 * m + 8 * row + column) as u32;
                let (p, q) = (lane / 4, 2 * (lane % 4));
                let want = match trans {
                    false => element(p, q) | element(p, q + 1) << 16,
                    true => element(q, p) | element(q + 1, p) << 16,
                };
                assert_eq!(got, want, "matrix {m}, trans {trans}, lane {lane}");
            }
        }
    }
}

#[test]
fn counts() {
    let body = format!(
        "setp.lt.u32 %p1, %r0, 8;\nmov.b32 %r1, 0;\nmov.b32 %r2, global_smem;\n\
         mad.wide.u32 %d5, %r0, 16, %d1;\n@%p1 ld.global.v2.b32 {{%r3, %r4}}, [%d5];\n\
         @%p1 ld.global.v2.b32 {{%r3, %r4}}, [%d5];\n\
         @%p1 fma.rn.f32 %r5, %r3, %r4, %r3;\nadd.rn.f32 %r6, %r1, %r1;\n\
         add.f32 %r6, %r1, 0f3F800000;\nshl.b32 %r8, %r0, 2;\nadd.s32 %r2, %r2, %r8;\n\
         st.shared.b32 [%r2], %r6;\nbar.sync 0;\n{STORE}"
    );
    let run = run(&Setup { threads: 64, ..Setup::default() }, &body);
    let profile = run.result.expect("runs");
    assert_eq!(profile.flops, 8 * 2 + 64 + 64);
    assert_eq!(profile.global.read_bytes, 2 * 8 * 8);
    assert_eq!((profile.global.read_sectors, profile.global.read_footprint), (8, 4));
    assert_eq!(profile.global.written_footprint, 8);
    assert_eq!((profile.global.written_bytes, profile.global.written_sectors), (256, 8));
    assert_eq!((profile.shared.written_bytes, profile.shared.read_bytes), (256, 0));
    assert_eq!(profile.instructions["bar.sync"], 2);
    assert_eq!(profile.instructions["fma.rn.f32"], 2);
    assert_eq!(profile.count("add."), 6);
    assert_eq!(profile.warp_instructions(), 2 * (4 + 15 + 1));
}
