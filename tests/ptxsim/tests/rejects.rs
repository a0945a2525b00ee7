//! Text outside of the subset is refused, with the line and what is wrong there.

mod common;

use quire_ptxsim::{Arg, Launch, Memory, Module, Options, SimError, launch};

/// The error of a kernel with this body; its line, the first of the body being 1.
fn refused(body: &str) -> (usize, String) {
    let text = common::text(32, body);
    let first = text.lines().position(|line| line.starts_with("mad.wide.u32 %d2")).unwrap() + 1;
    match Module::parse(&text) {
        Ok(_) => panic!("accepted: {body}"),
        Err(error) => (error.line - first, error.to_string()),
    }
}

#[test]
fn unknown_opcodes_and_modifiers() {
    for body in [
        "frob.b32 %r1, %r2;",
        "add.sat.s32 %r1, %r2, %r3;",
        "add.rz.f32 %f1, %f2, %f3;",
        "add.cc.u32 %r1, %r2, %r3;",
        "fma.rn.sat.f32 %f1, %f2, %f3, %f3;",
        "fma.rn.relu.bf16x2 %r1, %r2, %r3, %r3;",
        "add.rn.bf16 %h1, %h2, %h3;",
        "mul.lo.s8 %r1, %r2, %r3;",
        "div.approx.f32 %f1, %f2, %f3;",
        "setp.lo.u32 %p1, %r1, %r2;",
        "setp.lt.b32 %p1, %r1, %r2;",
        "setp.lt.nand.s32 %p1, %r1, %r2, %p2;",
        "cvt.rz.bf16.f32 %h1, %f1;",
        "cvt.sat.s32.f32 %r1, %f1;",
        "cvt.f32.e4m3 %f1, %h1;",
        "ld.volatile.global.b32 %r1, [%d0];",
        "ld.global.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%d0];",
        "ld.local.b32 %r1, [%d0];",
        "ld.b32 %r1, [%d0];",
        "st.global.release.b32 [%d0], %r1;",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b8 {%r1, %r2, %r3, %r4}, [%r5];",
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1}, {%r1}, {%r1}, {%r1};",
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r1}, {%r1}, {%r1}, {%r1};",
        "shfl.sync.bfly.b64 %d1, %d2, 1, 31, -1;",
        "cp.async.bulk.commit_group;",
        "cp.async.wait_all;",
        "bar.red.popc.u32 %r1, 0, %p1;",
        "atom.global.add.u32 %r1, [%d0], 1;",
        "red.global.add.u32 [%d0], 1;",
        "membar.gl;",
        "exit;",
    ] {
        let (line, message) = refused(body);
        assert!(message.contains("unknown opcode or modifier"), "{message}");
        assert!(message.contains(body.trim_end_matches(';')) && line == 1, "{line}: {message}");
    }
}

#[test]
fn operands_of_the_wrong_kind() {
    for (body, reason) in [
        ("add.s32 %r1, %d2, %r3;", "a register of 32 bits is needed, this one has 64"),
        ("add.s64 %d1, %d2, %r3;", "a register of 64 bits is needed, this one has 32"),
        ("add.s32 %r1, %r2;", "3 operands are needed, there are 2"),
        ("add.s32 %r1, %r2, 0f3F800000;", "integer literal of 32 bits"),
        ("add.f32 %f1, %f2, 1;", "float literal of 32 bits"),
        ("add.s32 %r1, %r2, %p1;", "a register or integer literal"),
        ("add.s32 %r1, %r2, 4294967296;", "does not fit in 32 bits"),
        ("and.b16 %h1, %h2, -32769;", "does not fit in 16 bits"),
        ("add.s32 5, %r2, %r3;", "a destination register"),
        ("add.s32 %r1, %r2, 010;", "unknown operand 010"),
        ("add.s32 %r1, %r2, foo;", "unknown operand foo"),
        ("add.s32 %r1, %r2, %r40;", "%r40 is not a declared register"),
        ("add.s32 %r1, %r2, %x1;", "%x1 is not a declared register"),
        ("mov.u32 %r1, %clock;", "%clock is not a declared register"),
        ("mov.u32 %r1, %tid.y;", "is not a declared register"),
        ("mov.b32 %r1, {%h1, %h2, %h3};", "3 parts do not make a register of 32 bits"),
        ("selp.b32 %r1, %r2, %r3, %r4;", "a predicate is needed"),
        ("and.pred %p1, %p2, %r1;", "a predicate is needed"),
        ("ld.global.b32 %r1, [%r2];", "a register of 64 bits is needed"),
        ("ld.shared.b32 %r1, [%d2];", "a register of 32 bits is needed"),
        ("ld.global.b32 %r1, %d0;", "an address is needed"),
        ("ld.global.b32 %r1, [%d0+%r1];", "unknown offset"),
        ("ld.global.v2.b32 {%r1}, [%d0];", "2 registers are needed, there are 1"),
        ("ld.global.b64 %r1, [%d0];", "a register of 64 bits is needed"),
        ("ld.param.b32 %r1, [p0];", "4 bytes of a parameter of 8"),
        ("ld.param.b32 %r1, [q];", "unknown operand q"),
        ("cp.async.cg.shared.global [%r1], [%d0], 8;", "copies of 8 bytes"),
        ("cp.async.ca.shared.global [%r1], [%d0], 32;", "copies of 32 bytes"),
        ("shfl.sync.bfly.b32 %r1, %r2, 1, 31, %r3;", "a literal member mask is needed"),
        ("bar.sync 1;", "only barrier 0 is supported"),
        ("bar.sync 0, 64;", "1 operands are needed, there are 2"),
        ("@%r1 bra $L;\n$L:", "the guard %r1 is not a predicate"),
        ("bra $nowhere;", "there is no label $nowhere"),
        ("bra %r1;", "a label is needed"),
        ("$a:\n$a:", "the label is defined twice"),
    ] {
        let (_, message) = refused(body);
        assert!(message.contains(reason), "{body}\n  gives {message}\n  not {reason}");
    }
}

#[test]
fn statements_and_directives() {
    for (body, reason) in [
        ("{ .reg .b32 t; add.s32 %r1, %r1, %r1; }", "nested blocks are not supported"),
        (".local .align 4 .b8 stack[16];", "unknown directive"),
        (".reg .f32 %g<4>;", "unknown register declaration"),
        (".reg .b32 %r<4>;", "the registers are declared twice"),
        (".pragma \"frequency 3\";", "unknown directive"),
    ] {
        let (line, message) = refused(body);
        assert!(message.contains(reason) && line == 1, "{body} gives {message}");
    }
}

#[test]
fn headers() {
    let text = common::text(32, "");
    for (from, to, reason) in [
        (".version 8.0", ".version 8.4", "line 1: expected .version 8.0"),
        (".target sm_80", ".target sm_90a", "line 2: expected .target sm_80"),
        (".address_size 64", ".address_size 32", "expected .address_size 64"),
        (".reqntid 32", ".maxntid 32", "expected .reqntid"),
        (".reqntid 32", ".reqntid 33", "a multiple of 32"),
        (".reqntid 32", ".reqntid 32\n.maxnreg 64", "unknown directive"),
        (".param .u32 n", ".param .f64 n", "unknown parameter type"),
        (".extern .shared .align 16 .b8", ".extern .shared .align 16 .b32", "unknown directive"),
        ("global_smem[]", "global_smem[64]", "unknown shared variable"),
        (".extern .shared", ".extern .const", "unknown directive"),
        ("ret;\n}", "ret;", "the file ends where } is expected"),
        ("ret;\n}", "mov.u32 %r1, 0;\n}", "does not end with ret or bra"),
        ("ret;\n}", "ret\n}", "a statement without ;"),
    ] {
        assert!(text.contains(from));
        let error = Module::parse(&text.replace(from, to)).expect_err(to);
        assert!(error.to_string().contains(reason), "{to}: {error}");
    }
    let error =
        Module::parse(".version 8.0\n.target sm_80\n.address_size 64\n").expect_err("empty");
    assert!(error.to_string().contains("no .visible .entry"), "{error}");
}

#[test]
fn launches_that_do_not_fit() {
    let module = Module::parse(&common::text(64, "")).expect("a kernel");
    let kernel = module.kernel("k").expect("there");
    assert_eq!((kernel.threads(), kernel.params().len()), (64, 3));
    let good = Launch {
        entry: "k",
        grid: [1, 2, 3],
        block: [64, 1, 1],
        dynamic_shared: 1024,
        args: &[Arg::Pointer(0), Arg::Pointer(0), Arg::I32(1)],
    };
    let run =
        |wanted: &Launch<'_>| launch(&module, wanted, &mut Memory::new(), &Options::default());
    assert_eq!(run(&good).expect("fits").blocks, 6);
    let pointers = [Arg::Pointer(0); 3];
    for (bad, reason) in [
        (Launch { entry: "other", ..good }, "no such entry; there is [\"k\"]"),
        (Launch { block: [32, 1, 1], ..good }, "block [32, 1, 1], but .reqntid is 64"),
        (Launch { block: [64, 2, 1], ..good }, "block [64, 2, 1]"),
        (Launch { grid: [1, 0, 1], ..good }, "grid y is 0"),
        (Launch { grid: [1, 1, 65_536], ..good }, "grid z is 65536"),
        (Launch { dynamic_shared: 163 * 1024 + 1, ..good }, "bytes of shared memory"),
        (Launch { args: &pointers[..2], ..good }, "2 arguments for 3 parameters"),
        (Launch { args: &pointers, ..good }, "argument 2 is Pointer(0)"),
        (Launch { grid: [70_000, 65_535, 1], ..good }, "blocks are more than"),
    ] {
        match run(&bad) {
            Err(error @ SimError::Launch { .. }) => {
                assert!(error.to_string().contains(reason), "{error}");
            }
            other => panic!("{reason}: {other:?}"),
        }
    }
}
