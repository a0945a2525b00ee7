//! Block transfers: after any sequence of copies and swaps, every block of both pools holds what a
//! model of their contents says, bit for bit, on every backend, dtype and block size.

use quire_engine::DType;
use quire_engine::backend::{CpuBackend, ReferenceBackend};
use quire_engine::ops::{Backend, BackendError, BlockTransfers, ForwardInput, KvLayout};
use quire_tests::fixtures::every_path;
use quire_tests::pools;
use std::panic::{AssertUnwindSafe, catch_unwind};

#[test]
fn transfers_do_what_a_model_of_the_pools_says() {
    for block_size in [8, 16, 32, 64] {
        for dtype in [DType::F32, DType::Bf16] {
            pools::check(&format!("reference {dtype}"), ReferenceBackend::new(dtype), block_size);
        }
        for (isa, dtype) in every_path() {
            for threads in [1, 3] {
                let backend = CpuBackend::new(dtype, Some(isa), Some(threads)).unwrap();
                pools::check(&format!("{isa} {dtype} {threads} threads"), backend, block_size);
            }
        }
    }
}

#[test]
fn the_lists_are_carried_out_in_order() {
    pools::check_order(CpuBackend::new(DType::Bf16, None, Some(2)).unwrap());
}

#[test]
fn a_runner_without_swap_space_copies_blocks() {
    pools::check_without_swap_space(ReferenceBackend::new(DType::F32));
    pools::check_without_swap_space(CpuBackend::new(DType::F32, None, Some(2)).unwrap());
}

#[test]
fn a_host_cache_that_does_not_fit_is_an_error() {
    let mut backend = CpuBackend::new(DType::F32, None, Some(1)).unwrap();
    let (num_layers, block_size, num_kv_heads, head_dim) = (64, 256, 64, 256);
    let dtype = DType::F32;
    let layout = KvLayout { num_layers, num_blocks: 1, block_size, num_kv_heads, head_dim, dtype };
    let error = backend.host_cache(&layout, i32::MAX as usize).err().unwrap();
    let BackendError::OutOfMemory { what, bytes } = error else { panic!("{error}") };
    assert_eq!(what, "the swapped-out KV blocks");
    assert_eq!(bytes, layout.block_bytes().unwrap() * i32::MAX as usize);
}

/// Whether `f` panics.
fn panics(f: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(f)).is_err()
}

#[test]
fn transfers_that_break_their_promises_are_refused() {
    let lists = |swap_out: &[(u32, u32)], swap_in: &[(u32, u32)], copies: &[(u32, u32)]| {
        let (swap_out, swap_in, copies) = (swap_out.to_vec(), swap_in.to_vec(), copies.to_vec());
        let transfers = BlockTransfers { swap_out, swap_in, copies };
        panics(|| transfers.check(4, 2))
    };
    assert!(!lists(&[], &[], &[]));
    // A source may be used twice, and lists may overlap each other.
    assert!(!lists(&[(3, 0), (3, 1)], &[(0, 3), (0, 2)], &[(3, 0), (3, 1)]));
    assert!(lists(&[(4, 0)], &[], &[]), "source out of range");
    assert!(lists(&[(0, 2)], &[], &[]), "destination out of range");
    assert!(lists(&[], &[(2, 0)], &[]), "source out of range");
    assert!(lists(&[], &[(0, 4)], &[]), "destination out of range");
    assert!(lists(&[], &[], &[(0, 4)]), "destination out of range");
    assert!(lists(&[(1, 0), (2, 0)], &[], &[]), "two copies over one block");
    assert!(lists(&[], &[(0, 3), (1, 3)], &[]), "two copies over one block");
    assert!(lists(&[], &[], &[(0, 3), (1, 3)]), "two copies over one block");
    assert!(lists(&[], &[], &[(0, 1), (1, 2)]), "a destination is a source");
    assert!(lists(&[], &[], &[(1, 1)]), "a destination is a source");
}

#[test]
fn only_the_first_blocks_of_a_table_may_be_missing() {
    // Tokens 17 to 19 of a sequence, in blocks of 8: the first two blocks may be freed.
    let refused = |table: &[i32]| {
        let input = ForwardInput {
            token_ids: vec![0; 3],
            positions: vec![17, 18, 19],
            slot_mapping: vec![9, 10, 11],
            query_start_loc: vec![0, 3],
            seq_lens: vec![20],
            block_table: table.to_vec(),
            max_blocks: table.len(),
            logits_indices: vec![2],
            placeholders: Vec::new(),
        };
        panics(|| input.check(8, 6))
    };
    for table in [[5, 4, 1, -1], [-1, 4, 1, -1], [-1, -1, 1, -1]] {
        assert!(!refused(&table), "{table:?}");
    }
    for table in [[5, -1, 1, -1], [-1, -1, -1, -1], [5, 4, -1, -1], [5, 6, 1, -1], [-2, 4, 1, -1]] {
        assert!(refused(&table), "{table:?}");
    }
}
