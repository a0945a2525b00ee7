//! Every kernel of `kernels-ptx`, as shipped for sm_80, in the PTX interpreter: against a formula
//! in f64 or the CPU's sampler, bit for bit the same alone or in a batch, in any order of blocks,
//! over memory that holds NaN or nothing wherever it must not be read.
//!
//! Each test goes over all variants of its kernels, so a variant that is added is tested.

use std::collections::BTreeSet;

use quire_tests::ptx::{Kernels, TARGET};

mod activation;
mod attention;
mod gemm;
mod memory;
mod moe;
mod norm_rope;
mod planted;
mod profile;
mod sampling;

/// The kernels whose variants some module goes over.
const TESTED: &[&[&str]] = &[
    activation::TESTED,
    attention::TESTED,
    gemm::TESTED,
    memory::TESTED,
    moe::TESTED,
    norm_rope::TESTED,
    sampling::TESTED,
];

#[test]
fn every_kernel_is_tested() {
    let kernels = Kernels::load();
    let shipped: BTreeSet<&str> = kernels.iter().map(|kernel| kernel.name.as_str()).collect();
    let tested: BTreeSet<&str> = TESTED.concat().into_iter().collect();
    assert_eq!(tested, shipped);
    let variants = || kernels.iter().flat_map(|kernel| &kernel.variants);
    let here = variants().filter(|variant| variant.target == TARGET).count();
    println!("{here} variants for {TARGET} are executed; assembled only:");
    for variant in variants().filter(|variant| variant.target != TARGET) {
        println!("  {} {}", variant.target, variant.name);
    }
}
