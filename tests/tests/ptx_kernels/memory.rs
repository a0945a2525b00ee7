//! `embed`, `gather_rows`, `copy_blocks`, `swap_out`, `swap_in`, `prepare_inputs`, `commit_step`.

use quire_ptxsim::CtaOrder;
use quire_tests::args;
use quire_tests::ptx::{Element, Gpu, Kernels, Variant};
use quire_tests::rng::Rng;

pub const TESTED: &[&str] = &[
    "commit_step",
    "copy_blocks",
    "embed",
    "gather_rows",
    "prepare_inputs",
    "swap_in",
    "swap_out",
];

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

#[test]
pub fn inputs_of_a_step() {
    let kernels = Kernels::load();
    let (prepare, commit) = (kernels.only("prepare_inputs"), kernels.only("commit_step"));
    for order in ORDERS {
        let (block_shift, table_stride) = (3usize, 80usize);
        // Sequences of entries 2, 0, 3: 1 row after 9, 600 rows from 0, 2 rows after 15.
        let (starts, entries, computed) = ([0, 1, 601, 603], [2, 0, 3], [0, 77, 9, 15]);
        let tables: Vec<i32> = (0..4 * table_stride as i32).map(|i| i * 7 % 320).collect();
        let mut tables = tables;
        tables[3 * table_stride + 2] = -1;
        let mut ids: Vec<u32> = (0..603).collect();
        ids[0] = u32::MAX;
        ids[602] = u32::MAX;
        let mut gpu = Gpu::ordered(order);
        let token_ids = gpu.u32s("token_ids", &ids);
        let (positions, slots) = (gpu.empty("positions", 603 * 4), gpu.empty("slots", 603 * 8));
        let seq_lens = gpu.empty("seq_lens", 12);
        let (query_start_loc, rows) = (gpu.i32s("starts", &starts), gpu.i32s("entries", &entries));
        let num_computed = gpu.i32s("num_computed", &computed);
        let last_tokens = gpu.u32s("last_tokens", &[1000, 1001, 1002, 1003]);
        let block_tables = gpu.i32s("block_tables", &tables);
        gpu.launch(
            &prepare,
            &[3, 600usize.div_ceil(prepare.constant("BLOCK"))],
            args![
                token_ids, positions, slot_mapping: slots, seq_lens, query_start_loc, entries: rows,
                num_computed, last_tokens, block_tables, table_stride, block_shift,
            ],
        );
        let got_slots = gpu.read_i64s(slots, 603);
        let got_positions = gpu.read_i32s(positions, 603);
        for (seq, &entry) in entries.iter().enumerate() {
            for row in starts[seq]..starts[seq + 1] {
                let position = computed[entry as usize] + row - starts[seq];
                assert_eq!(got_positions[row as usize], position);
                let block = tables[entry as usize * table_stride + (position >> 3) as usize];
                let slot = i64::from(block) * 8 + i64::from(position % 8);
                let want = if block < 0 { -1 } else { slot };
                assert_eq!(got_slots[row as usize], want, "row {row}");
            }
        }
        assert_eq!(gpu.read_i32s(seq_lens, 3), [10, 600, 17]);
        ids[0] = 1002;
        ids[602] = 1003;
        let got: Vec<u32> = gpu.read_i32s(token_ids, 603).iter().map(|&id| id as u32).collect();
        assert_eq!(got, ids);

        let sampled = gpu.u32s("sampled", &[501, 502]);
        let sample_rows = gpu.i32s("sample_rows", &[1, -1, 0]);
        gpu.launch(
            &commit,
            &[1],
            args![
                num_computed, last_tokens, query_start_loc, entries: rows, sampled, sample_rows,
                num_seqs: 3usize,
            ],
        );
        assert_eq!(gpu.read_i32s(num_computed, 4), [600, 77, 10, 17]);
        assert_eq!(gpu.read_i32s(last_tokens, 4), [1000, 1001, 502, 501]);
    }
}
