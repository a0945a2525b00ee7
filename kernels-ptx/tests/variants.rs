//! What ships: every variant of the manifest, as a backend finds and launches it.

use half::{bf16, f16};
use quire_kernels_ptx::{
    ComputeCapability, DevicePtr, Kernel, Launch, Registry, SelectError, Target, Variant, kernels,
    launch,
};

const fn capability(major: u32, minor: u32) -> ComputeCapability {
    ComputeCapability { major, minor }
}

/// The limit that `kernels-triton/variants.yaml` states, too.
const MAX_FILES: usize = 150;

fn registry(major: u32, minor: u32) -> Registry {
    Registry::new(capability(major, minor)).expect("a supported device")
}

fn all() -> impl Iterator<Item = (&'static Kernel, &'static Variant)> {
    kernels().iter().flat_map(|kernel| kernel.variants.iter().map(move |variant| (kernel, variant)))
}

/// Sizes in bytes of the parameters of a PTX file's only entry.
fn entry_params(variant: &Variant) -> Vec<usize> {
    let ptx = variant.ptx();
    let start = format!(".visible .entry {}(", variant.entry);
    let (_, rest) = ptx.split_once(&start).unwrap_or_else(|| panic!("{variant}: no entry"));
    let (params, _) = rest.split_once(')').expect("the end of the parameters");
    assert_eq!(ptx.matches(".entry ").count(), 1, "{variant}");
    let size = |param: &str| match param.split_whitespace().nth(1) {
        Some(".u64" | ".b64" | ".s64") => 8,
        Some(".u32" | ".b32" | ".s32" | ".f32") => 4,
        other => panic!("{variant}: parameter of type {other:?}"),
    };
    params.split(',').map(size).collect()
}

#[test]
fn launch_structs_have_the_parameters_of_the_entries() {
    for (kernel, variant) in all() {
        let mut sizes: Vec<usize> = kernel.args.iter().map(|arg| arg.size).collect();
        sizes.extend([size_of::<u64>(); 2]); // scratch memory
        assert_eq!(entry_params(variant), sizes, "{} {variant}", kernel.name);
    }
}

#[test]
fn the_manifest_says_what_the_ptx_says() {
    for (kernel, variant) in all() {
        let (major, minor) = (variant.ptx_version / 10, variant.ptx_version % 10);
        for line in [
            format!(".version {major}.{minor}"),
            format!(".target {}", variant.target),
            format!(".reqntid {}", variant.num_threads),
        ] {
            let found = variant.ptx().lines().any(|found| found == line);
            assert!(found, "{} {variant}: no line {line:?}", kernel.name);
        }
        assert_eq!(variant.num_threads, 32 * variant.num_warps, "{}", variant.name);
    }
}

#[test]
fn every_variant_is_found_by_its_types_and_constants() {
    for (kernel, variant) in all() {
        let registry = if variant.target == "sm_90a" { registry(9, 0) } else { registry(8, 0) };
        let found = registry.select_by_name(kernel.name, variant.types, variant.constants);
        let found = found.unwrap_or_else(|error| panic!("{error}"));
        assert!(std::ptr::eq(found, variant), "{}: found {}", variant.name, found.name);
    }
}

#[test]
fn devices_run_the_target_of_their_architecture() {
    let dense = |major, minor| {
        let registry = registry(major, minor);
        let gemm = registry.select::<launch::Gemm<bf16>>(&[]).expect("bf16");
        let in_f32 = registry.select::<launch::Gemm<f32>>(&[]).expect("f32");
        let copy = registry.select::<launch::CopyBlocks>(&[]).expect("one variant");
        [gemm.target, in_f32.target, copy.target]
    };
    for (major, minor) in [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)] {
        assert_eq!(dense(major, minor), ["sm_80"; 3], "{major}.{minor}");
    }
    // What has no file for Hopper falls back.
    assert_eq!(dense(9, 0), ["sm_90a", "sm_80", "sm_80"]);
    let error = Registry::new(capability(7, 5)).expect_err("too old");
    assert!(matches!(error, SelectError::UnsupportedDevice { .. }));
    assert_eq!(
        error.to_string(),
        "compute capability 7.5 runs none of the kernels, which are for 9.0, 8.0 and later"
    );
}

#[test]
fn a_target_with_a_suffix_runs_on_one_architecture() {
    let special = Target { name: "sm_100a", capability: capability(10, 0), exact: true };
    let general = Target { name: "sm_80", capability: capability(8, 0), exact: false };
    for (device, on_special, on_general) in [
        (capability(7, 5), false, false),
        (capability(8, 0), false, true),
        (capability(9, 0), false, true),
        (capability(10, 0), true, true),
        (capability(10, 3), false, true),
        (capability(12, 0), false, true),
    ] {
        assert_eq!(special.runs_on(device), on_special, "{device}");
        assert_eq!(general.runs_on(device), on_general, "{device}");
    }
}

/// Another target might have it, but would add up in another order.
#[test]
fn a_tile_that_the_target_lacks_is_not_taken_from_another() {
    let wanted = |tile| [("HEAD_DIM", 64), ("PADDED", 0), ("TILE", tile)];
    let on = |registry: Registry, tile| {
        registry.select::<launch::PrefillAttention<bf16>>(&wanted(tile)).map(|found| found.target)
    };
    assert_eq!(on(registry(9, 0), 64).expect("Hopper's tile"), "sm_90a");
    assert_eq!(on(registry(8, 0), 32).expect("Ampere's tile"), "sm_80");
    on(registry(9, 0), 32).expect_err("Ampere's tile");
    on(registry(8, 0), 64).expect_err("Hopper's tile");
}

type Names = [&'static str];

/// Requires that with each variant of `second` that the device runs goes one of `first` that is
/// for the same problem and target and adds up in the same order.
fn same_order(registry: &Registry, first: &str, second: &str, problem: &Names, order: &Names) {
    let find = |kernel, variant: &Variant, constants: &[_]| {
        registry.select_by_name(kernel, variant.types, constants)
    };
    let of = |variant: &Variant, names: &Names| -> Vec<(&str, i64)> {
        names.iter().filter_map(|name| Some((*name, variant.constant(name)?))).collect()
    };
    let mut compared = 0;
    for (_, variant) in all().filter(|(kernel, _)| kernel.name == second) {
        if !find(second, variant, variant.constants).is_ok_and(|found| std::ptr::eq(found, variant))
        {
            continue; // of another target
        }
        let partner = find(first, variant, &of(variant, problem));
        let partner = partner.unwrap_or_else(|error| panic!("{variant}: {error}"));
        assert_eq!(partner.target, variant.target, "{partner}; {variant}");
        assert_eq!(of(partner, order), of(variant, order), "{partner}; {variant}");
        compared += 1;
    }
    assert!(compared > 0, "no variant of {second}");
}

/// Kernels that must compute a row to the same bits fall back together.
#[test]
fn kernels_of_one_arithmetic_are_chosen_for_one_target() {
    for registry in [registry(8, 0), registry(9, 0), registry(12, 0)] {
        let (head, order) = (["HEAD_DIM", "PADDED"], ["SPLIT", "TILE", "BLOCK_V"]);
        same_order(&registry, "prefill_attention", "decode_attention", &head, &order);
        same_order(&registry, "decode_attention", "prefill_attention", &head, &order);
        same_order(&registry, "gemm", "gemm_partial", &[], &["CHUNK"]);
        same_order(&registry, "gemm", "gemm_silu_mul", &[], &["CHUNK"]);
    }
}

#[test]
fn what_does_not_ship_is_refused_by_name() {
    let registry = registry(9, 0);
    let wanted = [("HEAD_DIM", 512), ("PADDED", 0)];
    let error = registry.select::<launch::DecodeAttention<f16>>(&wanted).expect_err("too wide");
    let message = error.to_string();
    assert!(matches!(error, SelectError::MissingVariant { kernel: "decode_attention", .. }));
    for part in [
        "decode_attention is not compiled for dtype=fp16 HEAD_DIM=512 PADDED=0",
        "compute capability 9.0",
        "dtype=fp16 BLOCK_M=64 BLOCK_V=64 HEAD_DIM=64 PADDED=0 SPLIT=256 TILE=64 for sm_90a",
        "for sm_80",
    ] {
        assert!(message.contains(part), "{message:?} has no {part:?}");
    }
    let ambiguous = registry.select::<launch::DecodeAttention<f16>>(&[]).expect_err("several");
    assert!(matches!(ambiguous, SelectError::AmbiguousVariant { .. }), "{ambiguous}");
    let no_type = registry.select::<launch::SiluMul<i8>>(&[]).expect_err("no such type");
    assert!(no_type.to_string().contains("silu_mul is not compiled for dtype=i8"), "{no_type}");
    let unknown = registry.select_by_name("sillu_mul", &[], &[]).expect_err("no such kernel");
    assert_eq!(unknown.to_string(), "there is no kernel sillu_mul");
}

fn silu_mul(gate_up: u64, width: i32) -> launch::SiluMul<bf16> {
    launch::SiluMul { out: DevicePtr::new(0x1000), gate_up: DevicePtr::new(gate_up), width }
}

#[test]
fn parameters_are_in_the_order_of_the_entry() {
    let mut params = silu_mul(0x2000, -32).params().expect("multiples of 16");
    let count = launch::SiluMul::<bf16>::kernel().args.len() + 2;
    assert_eq!(params.slots().len(), count);
    let slots = params.slots().to_vec();
    params.with_addresses(|addresses| {
        assert_eq!(addresses.len(), count);
        let distances: Vec<_> =
            addresses.windows(2).map(|w| w[1] as usize - w[0] as usize).collect();
        assert_eq!(distances, [size_of::<u64>(); 4]);
    });
    let bytes: Vec<[u8; 8]> = slots.iter().map(|slot| slot.to_ne_bytes()).collect();
    assert_eq!(bytes[0], 0x1000u64.to_ne_bytes());
    assert_eq!(bytes[1], 0x2000u64.to_ne_bytes());
    assert_eq!(bytes[2][..4], (-32i32).to_ne_bytes());
    assert_eq!(slots[3..], [0, 0]);
}

#[test]
fn broken_promises_name_kernel_and_argument() {
    assert!(silu_mul(0, 0).check().is_ok());
    let unaligned = silu_mul(0x2008, 32).params().expect_err("an address of 8 bytes");
    assert_eq!((unaligned.kernel, unaligned.argument.name), ("silu_mul", "gate_up"));
    let message = "silu_mul: gate_up is at 0x2008, which is not aligned to 16 bytes";
    assert_eq!(unaligned.to_string(), message);
    let odd = silu_mul(0x2000, -24).check().expect_err("no multiple of 16");
    assert_eq!(odd.to_string(), "silu_mul: width is -24, which is not a multiple of 16");
}

#[test]
fn there_are_no_more_files_than_agreed() {
    assert!(all().count() <= MAX_FILES, "{} files", all().count());
}
