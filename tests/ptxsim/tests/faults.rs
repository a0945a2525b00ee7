//! Planted bugs: each is caught, and the message says where and what.

mod common;

use common::{Run, Setup, run};
use quire_ptxsim::{Access, CtaOrder, FaultKind, Memory, Options, SimError, Space};

fn alone(body: &str) -> Run {
    run(&Setup::default(), body)
}

fn threads(threads: usize, body: &str) -> Run {
    run(&Setup { threads, ..Setup::default() }, body)
}

/// Asserts that the message has all of these parts.
fn says(run: &Run, parts: &[&str]) -> FaultKind {
    let (kind, message) = run.fault();
    for part in parts {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
    kind
}

#[test]
fn reads_and_writes_out_of_bounds() {
    // 1024 bytes: lane 1 reads the first ones past the end.
    let past = alone("mad.wide.u32 %d3, %r0, 4, %d1;\nld.global.b32 %r1, [%d3+1020];");
    let kind = says(
        &past,
        &[
            "kernel k, line 22: `ld.global.b32 %r1, [%d3+1020]`",
            "CTA (0, 0, 0), warp 0, lane 1:",
            "global read of 4 bytes",
            "ends 4 bytes past the end of `input` (1024 bytes)",
        ],
    );
    let read = FaultKind::OutOfBounds {
        space: Space::Global,
        access: Access::Read,
        bytes: 4,
        address: past.p1 + 1024,
        place: "ends 4 bytes past the end of `input` (1024 bytes)".into(),
    };
    assert_eq!(kind, read);
    says(
        &alone("mov.u32 %r1, 0;\nst.global.v4.b32 [%d0+-16], {%r1, %r1, %r1, %r1};"),
        &["global write of 16 bytes", "16 bytes before the start of `out`"],
    );
    // The allocation is the one that the pointer came from, however far off it is.
    says(
        &alone("add.s64 %d3, %d1, 8589934592;\nld.global.b32 %r1, [%d3];"),
        &["past the end of `input`"],
    );
    says(&alone("mov.b64 %d3, 0;\nld.global.b32 %r1, [%d3];"), &["no allocation is near"]);
}

#[test]
fn lanes_that_are_masked_do_not_access() {
    let body = "setp.lt.u32 %p1, %r0, 2;\nmov.u32 %r1, 7;\nmad.wide.u32 %d3, %r0, 512, %d1;\n\
                @%p1 ld.global.b32 %r1, [%d3];\nmad.wide.u32 %d4, %r0, 4, %d0;\n\
                st.global.b32 [%d4], %r1;";
    let run = alone(body);
    let profile = run.result.as_ref().expect("two lanes are inside");
    assert_eq!(profile.global.read_bytes, 8);
    assert_eq!(run.words(3), [0x0302_0100, 0x0302_0100, 7]);
}

#[test]
fn misaligned_accesses() {
    let run = alone("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d1+8];");
    let kind = says(&run, &["global read of 16 bytes", "is misaligned: byte 8 of `input`"]);
    assert!(matches!(kind, FaultKind::Misaligned { bytes: 16, .. }));
    says(
        &alone("mov.b32 %r1, global_smem;\nst.shared.b32 [%r1+2], %r1;"),
        &["shared write of 4 bytes at 0x402 is misaligned"],
    );
}

#[test]
fn freed_memory() {
    let mut memory = Memory::new();
    let address = memory.alloc("x", &[0; 4]);
    memory.free(address).expect("an allocation");
    let error = memory.read(address, 4).expect_err("freed");
    assert!(error.to_string().contains("`x` is freed"), "{error}");
    assert!(matches!(memory.free(address), Err(SimError::Host(_))));
    assert!(matches!(memory.free(address + 1), Err(SimError::Host(_))));
}

#[test]
fn uninitialised_registers() {
    for (body, what) in [
        ("st.global.b32 [%d2], %r9;", "value stored to global memory"),
        ("ld.global.b32 %r1, [%d9];", "address"),
        ("@%p9 mov.u32 %r1, 0;", "guard"),
        ("@%p9 bra $end;\n$end:", "guard"),
        ("add.s32 %r1, %r9, 1;\nsetp.lt.s32 %p1, %r1, 5;\n@%p1 bra $end;\n$end:", "guard"),
        ("shfl.sync.idx.b32 %r1, %r0, %r9, 31, -1;", "lane of the shuffle"),
        ("shfl.sync.bfly.b32 %r1, %r9, 1, 31, -1;\nst.global.b32 [%d2], %r1;", "value stored"),
        ("redux.sync.add.s32 %r1, %r9, -1;\nst.global.b32 [%d2], %r1;", "value stored"),
        ("vote.sync.any.pred %p1, %p9, -1;", "vote"),
        ("mov.b64 {%r1, _}, %d9;\nst.global.b32 [%d2], %r1;", "value stored"),
        ("selp.b32 %r1, %r0, %r9, %p9;\nst.global.b32 [%d2], %r1;", "value stored"),
        ("mov.u32 %r1, 0;\ndiv.s32 %r2, %r0, %r1;\nst.global.b32 [%d2], %r2;", "value stored"),
        (
            "mov.b32 %r1, global_smem;\ncp.async.ca.shared.global [%r1], [%d1], 4, %r9;",
            "size of the copy",
        ),
    ] {
        let kind = says(&alone(body), &["warp 0, lane 0: uninitialised", what]);
        assert!(matches!(kind, FaultKind::Uninitialised { .. }), "{body}");
    }
}

#[test]
fn what_is_not_used_may_be_undefined() {
    let run = alone(
        "setp.lt.u32 %p1, %r0, 99;\nselp.b32 %r1, %r0, %r9, %p1;\n\
         mov.pred %p2, 0;\nand.pred %p3, %p2, %p9;\n@%p3 bra $end;\n\
         mov.pred %p4, -1;\nor.pred %p5, %p4, %p9;\n@!%p5 bra $end;\n\
         mad.wide.u32 %d4, %r0, 4, %d0;\nst.global.b32 [%d4], %r1;\n$end:",
    );
    run.result.as_ref().expect("nothing undefined is used");
    assert_eq!(run.words(2), [0, 1]);
}

#[test]
fn uninitialised_memory() {
    // `out` holds nothing yet; loading is fine, storing what was loaded is not.
    says(
        &alone("ld.global.b32 %r1, [%d2];\nst.global.b32 [%d2], %r1;"),
        &["line 22", "uninitialised value stored"],
    );
    // Shared memory carries it along: 4 of 8 bytes were written.
    says(
        &alone(
            "mov.b32 %r1, global_smem;\nshl.b32 %r2, %r0, 3;\nadd.s32 %r1, %r1, %r2;\n\
             st.shared.b32 [%r1], %r0;\nld.shared.v2.b32 {%r3, %r4}, [%r1];\n\
             st.global.b32 [%d2], %r3;\nst.global.b32 [%d2], %r4;",
        ),
        &["line 27", "uninitialised value stored"],
    );
    let run = alone("");
    let error = run.memory.read(run.p0, 4).expect_err("never written");
    assert!(error.to_string().contains("nothing was written to byte 0 of `out`"), "{error}");
}

#[test]
fn divergent_barriers() {
    let lanes = alone("setp.lt.u32 %p1, %r0, 5;\n@%p1 bra $end;\nbar.sync 0;\n$end:");
    says(&lanes, &["line 23: `bar.sync 0`", "divergent barrier", "only lanes 0xffffffe0"]);
    let guarded = alone("setp.lt.u32 %p1, %r0, 5;\n@%p1 bar.sync 0;");
    says(&guarded, &["divergent barrier", "only lanes 0x0000001f"]);
    let exited = threads(64, "setp.lt.u32 %p1, %r0, 32;\n@%p1 ret;\nbar.sync 0;");
    says(&exited, &["warp 1: divergent barrier: warp 0 has exited"]);
    let other = threads(
        64,
        "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra $b;\nbar.sync 0;\nbra $end;\n$b:\nbar.sync 0;\n$end:",
    );
    says(&other, &["line 26", "warp 0: divergent barrier: warp 1 waits at line 23"]);
}

#[test]
fn whole_warp_instructions_in_part_of_it() {
    for instruction in [
        "shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;",
        "redux.sync.add.s32 %r1, %r0, -1;",
        "bar.warp.sync -1;",
        "cp.async.commit_group;",
        "cp.async.wait_group 0;",
        "vote.sync.ballot.b32 %r1, %p1, -1;",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r0];",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 \
         {%r1, %r2, %r3, %r4}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%r1, %r2, %r3, %r4};",
    ] {
        let body = format!("setp.lt.u32 %p1, %r0, 5;\n@!%p1 bra $end;\n{instruction}\n$end:");
        let kind = says(&alone(&body), &["the whole warp must execute this", "0x0000001f"]);
        assert_eq!(kind, FaultKind::PartialWarp { lanes: 31 }, "{instruction}");
    }
    let outside = alone("setp.lt.u32 %p1, %r0, 5;\n@%p1 shfl.sync.idx.b32 %r1, %r0, 9, 31, 31;");
    assert_eq!(
        says(&outside, &["shuffle reads lane 9"]),
        FaultKind::Shuffle { from: 9, lanes: 31 }
    );
    let uniform = alone("setp.lt.u32 %p1, %r0, 5;\n@%p1 bra.uni $end;\n$end:");
    says(&uniform, &["bra.uni diverges: taken by 0x0000001f of 0xffffffff"]);
}

const COPY: &str = "mov.b32 %r1, global_smem;\nmad.wide.u32 %d3, %r0, 4, %d1;\n\
                    shl.b32 %r2, %r0, 2;\nadd.s32 %r1, %r1, %r2;\n\
                    cp.async.ca.shared.global [%r1], [%d3], 4;\ncp.async.commit_group;\n";
const KEEP: &str = "mad.wide.u32 %d4, %r0, 4, %d0;\nst.global.b32 [%d4], %r3;";

#[test]
fn asynchronous_copies_land_when_waited_for() {
    let early = alone(&format!("{COPY}ld.shared.b32 %r3, [%r1];\n{KEEP}"));
    let kind = says(&early, &["line 27: `ld.shared.b32 %r3, [%r1]`", "lane 0", "still in flight"]);
    assert_eq!(kind, FaultKind::InFlight { access: Access::Read, address: 0x400 });
    // wait_group 1 leaves the latest group in flight.
    let one = alone(&format!("{COPY}cp.async.wait_group 1;\nld.shared.b32 %r3, [%r1];\n{KEEP}"));
    says(&one, &["still in flight"]);
    let none = alone(&format!("{COPY}cp.async.wait_group 0;\nld.shared.b32 %r3, [%r1];\n{KEEP}"));
    let profile = none.result.as_ref().expect("landed");
    assert_eq!((profile.global.read_bytes, profile.global.read_sectors), (128, 4));
    assert_eq!(none.words(2), [0x0302_0100, 0x0706_0504]);
    let overwritten = alone(&format!("{COPY}st.shared.b32 [%r1], %r0;"));
    says(&overwritten, &["shared write at 0x400", "still in flight"]);
    // Not committed: waiting does not land it.
    let open = COPY.replace("cp.async.commit_group;\n", "");
    let open = alone(&format!("{open}cp.async.wait_group 0;\nld.shared.b32 %r3, [%r1];"));
    says(&open, &["still in flight"]);
}

#[test]
fn asynchronous_copies_fill_with_zeros() {
    let partial = COPY.replace(", 4;\ncp", ", 4, %r5;\ncp");
    let partial = partial.replace("[%d3]", "[%d3+0]");
    let body = format!(
        "setp.lt.u32 %p1, %r0, 1;\nselp.b32 %r5, 2, 0, %p1;\n{partial}\
         cp.async.wait_group 0;\nld.shared.b32 %r3, [%r1];\n{KEEP}"
    );
    let run = alone(&body);
    assert_eq!(run.result.as_ref().expect("fine").global.read_bytes, 2);
    assert_eq!(run.words(2), [0x0100, 0]);
    // A copy of no bytes does not look at its source, not even at whether it is defined.
    let body =
        body.replace("selp.b32 %r5, 2, 0, %p1;", "mov.b32 %r5, 0;").replace("[%d3+0]", "[%d9]");
    assert_eq!(alone(&body).words(2), [0, 0]);
    let body = body.replace("mov.b32 %r5, 0;", "mov.b32 %r5, 5;").replace("[%d9]", "[%d3]");
    says(&alone(&body), &["cp.async of 4 bytes reads 5"]);
}

#[test]
fn shared_memory_has_the_size_of_the_launch() {
    let body = "mov.b32 %r1, global_smem;\nshl.b32 %r2, %r0, 2;\nadd.s32 %r1, %r1, %r2;\n\
                st.shared.b32 [%r1], %r0;";
    let setup = |shared| Setup { shared, ..Setup::default() };
    run(&setup(128), body).result.expect("32 words");
    says(
        &run(&setup(100), body),
        &["lane 25", "shared write of 4 bytes", "byte 100 of the 100 bytes that the launch gives"],
    );
    says(&alone("mov.b32 %r1, 0;\nld.shared.b32 %r2, [%r1];"), &["byte -1024 of the 4096 bytes"]);
}

/// Two warps: the first stores a word for each thread, then all load their neighbour warp's.
fn exchange(between: &str) -> Run {
    threads(
        64,
        &format!(
            "mov.b32 %r1, global_smem;\nshl.b32 %r2, %r0, 2;\nadd.s32 %r3, %r1, %r2;\n\
             st.shared.b32 [%r3], %r0;\n{between}\nxor.b32 %r2, %r2, 128;\n\
             add.s32 %r3, %r1, %r2;\nld.shared.b32 %r4, [%r3];\n\
             mad.wide.u32 %d4, %r0, 4, %d0;\nst.global.b32 [%d4], %r4;"
        ),
    )
}

#[test]
fn warps_that_race_for_shared_memory() {
    assert_eq!(exchange("bar.sync 0;").words(64)[31..34], [63, 0, 1]);
    // Warp 0 reads what warp 1 has yet to write: undefined, which the order of warps decides.
    says(&exchange(""), &["uninitialised"]);
    let reverse = Options { order: CtaOrder::Reverse, ..Options::default() };
    let body = "mov.b32 %r1, global_smem;\nshr.u32 %r3, %r0, 5;\nst.shared.b32 [%r1], %r3;";
    let both = |options| run(&Setup { threads: 64, options, ..Setup::default() }, body);
    let kind = says(&both(Options::default()), &["warp 1, lane 0", "shared write", "by warp 0"]);
    assert!(matches!(kind, FaultKind::SharedRace { access: Access::Write, .. }));
    says(&both(reverse), &["warp 0, lane 0", "shared write", "by warp 1"]);
    // The same value from several warps is no race, but others need a barrier to read it.
    let same = "mov.b32 %r1, global_smem;\nst.shared.b32 [%r1], 7;\n";
    threads(64, same).result.expect("the same value");
    let read = format!("{same}ld.shared.b32 %r2, [%r1];");
    says(&threads(64, &read), &["warp 1", "shared write at 0x400 races"]);
    threads(64, &format!("{same}bar.sync 0;\nld.shared.b32 %r2, [%r1];")).result.expect("waits");
    // All read, then one overwrites without a barrier.
    let overwrite = "mov.b32 %r1, global_smem;\nsetp.lt.u32 %p1, %r0, 1;\n\
                     @%p1 st.shared.b32 [%r1], %r0;\nbar.sync 0;\nld.shared.b32 %r2, [%r1];\n\
                     setp.ge.u32 %p2, %r0, 95;\n@%p2 st.shared.b32 [%r1], 3;";
    says(&threads(96, overwrite), &["warp 2, lane 31", "races with a read by several warps"]);
    // A copy lands for its own warp; the others need a barrier.
    let copy = "mov.b32 %r1, global_smem;\nsetp.lt.u32 %p1, %r0, 1;\n\
                @%p1 cp.async.ca.shared.global [%r1], [%d1], 4;\ncp.async.commit_group;\n\
                cp.async.wait_group 0;\nld.shared.b32 %r2, [%r1];";
    says(&threads(64, copy), &["warp 1", "shared read at 0x400 races with a write by warp 0"]);
    let waited = copy.replace("0;\nld", "0;\nbar.sync 0;\nld");
    threads(64, &waited).result.expect("a barrier between");
}

#[test]
fn warps_that_race_for_global_memory() {
    // Each thread stores a word, then loads the other warp's.
    let exchange = |between: &str| {
        threads(
            64,
            &format!(
                "mad.wide.u32 %d3, %r0, 4, %d0;\nst.global.b32 [%d3], %r0;\n{between}\n\
                 xor.b32 %r2, %r0, 32;\nmad.wide.u32 %d3, %r2, 4, %d0;\nld.global.b32 %r1, [%d3];"
            ),
        )
    };
    exchange("bar.sync 0;").result.expect("a barrier between");
    let kind = says(&exchange(""), &["warp 1, lane 0", "byte 0 of `out`", "a write by warp 0"]);
    assert!(matches!(kind, FaultKind::GlobalRace { access: Access::Read, by: 0, .. }));
    threads(64, "st.global.b32 [%d0], 3;").result.expect("the same value");
    let different = "shr.u32 %r1, %r0, 5;\nst.global.b32 [%d0], %r1;";
    says(&threads(64, different), &["global write", "races with a write by warp 0"]);
}

#[test]
fn blocks_that_race_for_global_memory() {
    let same = "mov.u32 %r1, %ctaid.x;\nmad.wide.u32 %d3, %r0, 4, %d0;\nst.global.b32 [%d3], %r1;";
    let setup = |order| Setup {
        grid: 2,
        options: Options { order, ..Options::default() },
        ..Setup::default()
    };
    let kind = says(
        &run(&setup(CtaOrder::Forward), same),
        &["CTA (1, 0, 0)", "byte 0 of `out`", "CTA number 0 of this launch wrote it"],
    );
    assert!(matches!(kind, FaultKind::CtaRace { access: Access::Write, by: 0, .. }));
    // Reading what another block writes depends on the order; one of two orders shows it.
    let after = "mov.u32 %r1, %ctaid.x;\nsetp.eq.u32 %p1, %r1, 0;\nsetp.eq.u32 %p2, %r0, 0;\n\
                 and.pred %p3, %p1, %p2;\n@%p3 st.global.b32 [%d0], 1;\n\
                 @!%p1 ld.global.b32 %r2, [%d0];";
    says(&run(&setup(CtaOrder::Forward), after), &["global read", "CTA number 0"]);
    run(&setup(CtaOrder::Reverse), after).result.expect("the read is first");
}

#[test]
fn lanes_that_store_different_values_to_one_address() {
    let run = alone("st.global.b32 [%d0], %r0;");
    let kind = says(&run, &["lanes 0 and 1 store different values"]);
    assert!(matches!(kind, FaultKind::ConflictingStore { first: 0, second: 1, .. }));
    alone("st.global.b32 [%d0], 5;").result.expect("the same value");
    says(
        &alone(
            "mov.b32 %r1, global_smem;\nand.b32 %r2, %r0, 28;\nadd.s32 %r1, %r1, %r2;\n\
                st.shared.b32 [%r1], %r0;",
        ),
        &["lanes 0 and 1 store different values to 0x400"],
    );
}

#[test]
fn loops_without_end() {
    let options = Options { max_warp_instructions: 1000, ..Options::default() };
    let run = run(&Setup { options, ..Setup::default() }, "$top:\nbra $top;");
    says(&run, &["line 22", "no end after 1000 warp instructions"]);
}
