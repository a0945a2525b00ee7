//! `embed`, `gather_rows`, `copy_blocks`, `swap_out`, `swap_in`, `patch_tokens`.

use quire_ptxsim::CtaOrder;
use quire_tests::args;
use quire_tests::ptx::{Element, Gpu, Kernels, Variant};
use quire_tests::rng::Rng;

pub const TESTED: &[&str] =
    &["copy_blocks", "embed", "gather_rows", "patch_tokens", "swap_in", "swap_out"];

const ORDERS: [CtaOrder; 3] = [CtaOrder::Forward, CtaOrder::Reverse, CtaOrder::Shuffled(4)];

/// Rows of `table`, `[_, hidden]`.
pub fn embed(
    variant: &Variant<'_>,
    table: &[f32],
    ids: &[u32],
    hidden: usize,
    order: CtaOrder,
) -> Vec<f32> {
    let mut gpu = Gpu::ordered(order);
    let out = gpu.empty("out", ids.len() * hidden * 4);
    let weights = gpu.floats("table", variant.element(), table);
    let token_ids = gpu.u32s("token_ids", ids);
    let grid = [ids.len(), hidden.div_ceil(variant.constant("BLOCK"))];
    let num_table_rows = table.len() / hidden;
    gpu.launch(variant, &grid, args![out, table: weights, token_ids, hidden, num_table_rows]);
    gpu.read(out, Element::F32, ids.len() * hidden)
}

#[test]
fn embeddings() {
    let kernels = Kernels::load();
    for variant in kernels.variants("embed") {
        for (hidden, order) in [(16, ORDERS[0]), (1040, ORDERS[1]), (2048, ORDERS[2])] {
            let (element, rows) = (variant.element(), 5);
            let table: Vec<f32> =
                Rng::new(1).floats(rows * hidden, 3.0).iter().map(|&x| element.round(x)).collect();
            let ids = [4u32, 0, 5, 4, u32::MAX, 2];
            let got = embed(&variant, &table, &ids, hidden, order);
            for (got, &id) in got.chunks_exact(hidden).zip(&ids) {
                let want = table.chunks_exact(hidden).nth(id as usize);
                assert_eq!(got, want.unwrap_or(&vec![0.0; hidden]), "id {id}");
            }
        }
    }
}

/// Rows of `table`, `[_, words]`.
pub fn gather_rows(
    variant: &Variant<'_>,
    table: &[i32],
    rows: &[i32],
    words: usize,
    order: CtaOrder,
) -> Vec<i32> {
    let mut gpu = Gpu::ordered(order);
    let out = gpu.empty("out", rows.len() * words * 4);
    let (source, picks) = (gpu.i32s("table", table), gpu.i32s("rows", rows));
    let grid = [rows.len(), words.div_ceil(variant.constant("BLOCK"))];
    let num_table_rows = table.len() / words;
    gpu.launch(
        variant,
        &grid,
        args![out, table: source, rows: picks, row_words: words, num_table_rows],
    );
    gpu.read_i32s(out, rows.len() * words)
}

#[test]
fn gathered_rows() {
    let kernels = Kernels::load();
    let variant = kernels.only("gather_rows");
    for (words, order) in [(16usize, ORDERS[0]), (1024, ORDERS[1]), (1200, ORDERS[2])] {
        let table: Vec<i32> = (0..7 * words as i32).collect();
        let rows = [6, 0, -1, 7, 3, 3];
        let got = gather_rows(&variant, &table, &rows, words, order);
        for (got, row) in got.chunks_exact(words).zip(rows) {
            let want = usize::try_from(row).ok().and_then(|row| table.chunks_exact(words).nth(row));
            assert_eq!(got, want.unwrap_or(&vec![0; words]), "row {row}");
        }
    }
}

/// A cache of `layers × blocks × words` whose words are all different.
fn cache(layers: usize, blocks: usize, words: usize) -> Vec<i32> {
    (0..(layers * blocks * words) as i32).collect()
}

#[test]
pub fn copied_and_swapped_blocks() {
    let kernels = Kernels::load();
    let (copy, out, back) =
        (kernels.only("copy_blocks"), kernels.only("swap_out"), kernels.only("swap_in"));
    for (words, order) in [(16usize, ORDERS[0]), (1024, ORDERS[1]), (1040, ORDERS[2])] {
        let (layers, blocks) = (3, 6);
        let host = cache(layers, blocks, words);
        let block = |data: &[i32], layer: usize, block: usize| {
            data[(layer * blocks + block) * words..][..words].to_vec()
        };
        let mut gpu = Gpu::ordered(order);
        let device = gpu.i32s("cache", &host);
        let pairs = gpu.i32s("pairs", &[0, 5, 2, 1, 0, 3]);
        let tiles = words.div_ceil(copy.constant("BLOCK"));
        let sizes = args![cache: device, pairs, num_blocks: blocks, block_words: words];
        gpu.launch(&copy, &[3, tiles, layers], sizes);
        let copied = gpu.read_i32s(device, host.len());
        let staging = gpu.empty("staging", 2 * layers * words * 4);
        let picks = gpu.i32s("blocks", &[4, 5]);
        let grid = [2, words.div_ceil(out.constant("BLOCK")), layers];
        gpu.launch(
            &out,
            &grid,
            args![
                staging, cache: device, blocks: picks, num_blocks: blocks, block_words: words,
            ],
        );
        let swapped = gpu.read_i32s(staging, 2 * layers * words);
        let empty = gpu.i32s("new cache", &vec![-1; host.len()]);
        let places = gpu.i32s("blocks", &[0, 3]);
        let grid = [2, words.div_ceil(back.constant("BLOCK")), layers];
        gpu.launch(
            &back,
            &grid,
            args![
                cache: empty, staging, blocks: places, num_blocks: blocks, block_words: words,
            ],
        );
        let restored = gpu.read_i32s(empty, host.len());
        for layer in 0..layers {
            for (to, from) in [(0, 0), (1, 2), (2, 2), (3, 0), (4, 4), (5, 0)] {
                assert_eq!(block(&copied, layer, to), block(&host, layer, from), "copy to {to}");
            }
            for (i, from) in [(0, 4), (1, 0)] {
                let got = &swapped[(i * layers + layer) * words..][..words];
                assert_eq!(got, block(&host, layer, from), "swapped block {i}, layer {layer}");
            }
            for (to, from) in [(0, Some(4)), (3, Some(0)), (1, None), (2, None), (5, None)] {
                let want = from.map_or(vec![-1; words], |from| block(&host, layer, from));
                assert_eq!(block(&restored, layer, to), want, "restored block {to}");
            }
        }
    }
}

/// A block far beyond 2³¹ words is addressed with 64 bits: it is there, and nothing before it.
#[test]
fn blocks_beyond_two_to_the_31_words() {
    let kernels = Kernels::load();
    let copy = kernels.only("copy_blocks");
    let (words, far) = (1024usize, (1usize << 32) / 1024);
    let mut gpu = Gpu::new();
    let there = gpu.i32s("far blocks", &cache(1, 2, words));
    let base = there - (far * words * 4) as u64;
    let pairs = gpu.i32s("pairs", &[far as i32 + 1, far as i32]);
    gpu.launch(
        &copy,
        &[1, words.div_ceil(copy.constant("BLOCK")), 1],
        args![
            cache: base, pairs, num_blocks: far + 2, block_words: words,
        ],
    );
    assert_eq!(gpu.read_i32s(there, 2 * words)[..words], cache(1, 2, words)[words..]);
}

/// Replaces as many ids of a step's 603 by sampled ones, scattered, some sampled ids twice.
pub fn patch_tokens(patches: usize, order: CtaOrder) {
    let kernels = Kernels::load();
    let patch = kernels.only("patch_tokens");
    let ids: Vec<u32> = (0..603).collect();
    let sampled: Vec<u32> = (0..200).map(|i| 1_000_000 + i).collect();
    let places: Vec<usize> = (0..patches).map(|i| (7 * i + 3) % ids.len()).collect();
    let rows: Vec<usize> = (0..patches).map(|i| (3 * i + 1) % sampled.len()).collect();
    let indices = |of: &[usize]| of.iter().map(|&i| i as i32).collect::<Vec<_>>();
    let mut gpu = Gpu::ordered(order);
    let token_ids = gpu.u32s("token_ids", &ids);
    let source = gpu.u32s("sampled", &sampled);
    let (to, from) = (gpu.i32s("places", &indices(&places)), gpu.i32s("rows", &indices(&rows)));
    gpu.launch(
        &patch,
        &[patches.div_ceil(patch.constant("BLOCK"))],
        args![token_ids, sampled: source, places: to, rows: from, num_patches: patches],
    );
    let mut want = ids;
    for (&place, &row) in places.iter().zip(&rows) {
        want[place] = sampled[row];
    }
    let got = gpu.read_i32s(token_ids, want.len());
    let got: Vec<u32> = got.into_iter().map(|id| id as u32).collect();
    assert_eq!(got, want, "{patches} patches");
}

#[test]
fn patched_tokens() {
    for (patches, order) in [(1, ORDERS[0]), (256, ORDERS[1]), (300, ORDERS[2]), (603, ORDERS[1])] {
        patch_tokens(patches, order);
    }
}
