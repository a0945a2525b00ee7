//! Every architecture's logits on the CUDA backend are those recorded from Hugging Face
//! transformers, on a stand-in driver that interprets the kernels.
//!
//! A golden's sequences run together, each as a prompt and generated, and the report says whether
//! both have the same bits. Five settings have 2 · 2 · 3 · 3 · 2 combinations; [`WAYS`] has every
//! pair of values of any two settings, and each golden goes those of one of the [`PATHS`], so that
//! every architecture sees every value and every pair is seen by two.

use fakecuda::{Config, FakeCuda, Order, Stats};
use quire_engine::backend::CudaOptions;
use quire_engine::config::PreemptionMode;
use quire_engine::metrics::EngineStats;
use quire_engine::{DType, EngineConfig};
use quire_model_zoo::verify::{Golden, verify};
use quire_model_zoo::{BackendKind, LoadOptions, ModelFiles};
use quire_tests::fixtures::golden_dirs;
use std::collections::BTreeSet;
use std::path::Path;

/// Tokens of the longest sequence: a prompt of 97 and 24 more.
const LONGEST: usize = 121;

/// What becomes of sequences without room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    /// There is room for all.
    Ample,
    /// They are computed anew.
    Recompute,
    /// They wait on the host.
    Swap,
}

/// A way to run a golden.
#[derive(Clone, Copy, Debug)]
struct Way {
    graphs: bool,
    block_size: usize,
    /// Tokens of a step.
    budget: usize,
    room: Room,
    order: Order,
}

/// Every pair of values.
const WAYS: [Way; 9] = [
    way(true, 16, 512, Room::Ample, Order::Lazy),
    way(false, 32, 512, Room::Recompute, Order::Eager),
    way(true, 32, 512, Room::Swap, Order::Lazy),
    way(false, 32, 64, Room::Ample, Order::Lazy),
    way(true, 16, 64, Room::Recompute, Order::Lazy),
    way(false, 16, 64, Room::Swap, Order::Eager),
    way(true, 32, 16, Room::Ample, Order::Eager),
    way(false, 16, 16, Room::Recompute, Order::Lazy),
    way(true, 32, 16, Room::Swap, Order::Lazy),
];

/// Places in [`WAYS`]: every value in each path, every way in one.
const PATHS: [&[usize]; 3] = [&[0, 2, 5, 7], &[1, 3, 4, 8], &[1, 2, 4, 6]];

const fn way(graphs: bool, block_size: usize, budget: usize, room: Room, order: Order) -> Way {
    Way { graphs, block_size, budget, room, order }
}

impl Way {
    fn options(&self, dtype: DType) -> LoadOptions {
        // Sequences are admitted that have no room to grow.
        let tight = if self.block_size == 16 { 16 } else { 9 };
        let (num_blocks, preemption, swap_bytes) = match self.room {
            Room::Ample => (16 * LONGEST.div_ceil(self.block_size), PreemptionMode::Recompute, 0),
            Room::Recompute => (tight, PreemptionMode::Recompute, 0),
            Room::Swap => (tight, PreemptionMode::Swap, 4 << 20),
        };
        let engine = EngineConfig {
            block_size: self.block_size,
            max_num_seqs: 16,
            max_num_batched_tokens: Some(self.budget),
            max_model_len: Some(LONGEST),
            num_blocks: Some(num_blocks),
            swap_bytes,
            preemption,
            ..Default::default()
        };
        let cuda = CudaOptions { enforce_eager: !self.graphs, ..Default::default() };
        let backend = BackendKind::Cuda;
        LoadOptions { backend, dtype: Some(dtype), cuda, engine, ..Default::default() }
    }
}

/// Runs a golden; what the engine and the driver did.
fn run(fake: &FakeCuda, dir: &Path, way: &Way, dtype: DType) -> (EngineStats, Stats) {
    fake.reset(&Config { order: way.order, ..Config::default() });
    let files = ModelFiles::open(dir).expect("a golden model");
    let path = Golden::in_folder(dir).expect("a golden file");
    let golden = Golden::open(&path, files.info().vocab_size).expect("a golden file");
    let mut engine = files.load(&way.options(dtype), &mut |_| ()).expect("a small model");
    let report = verify(&mut engine, &golden).expect("sequences that fit");
    engine.check_integrity();
    assert_eq!(report.sequences.len(), golden.len());
    assert!(report.passed, "{} in {dtype}, {way:?}: {report:#?}", dir.display());
    (engine.stats(), fake.stats())
}

/// That the way was gone, and not another.
fn assert_went(way: &Way, engine: &EngineStats, driver: &Stats) {
    let scheduler = &engine.scheduler;
    let preemptions = (scheduler.num_preempted_recompute, scheduler.num_preempted_swap);
    // With a window nobody runs short of blocks.
    if scheduler.num_window_freed == 0 {
        match way.room {
            Room::Ample => assert_eq!(preemptions, (0, 0), "{way:?}"),
            Room::Recompute => assert!(preemptions.0 > 0 && preemptions.1 == 0, "{way:?}"),
            Room::Swap => {
                assert!(preemptions.1 > 0, "{way:?}");
                assert!(scheduler.num_blocks_swapped_in > 0, "{way:?}");
            }
        }
    }
    assert_eq!(driver.graph_launches > 10, way.graphs, "{way:?}: {driver:?}");
    assert!(way.graphs || driver.graph_launches == 0, "{way:?}: {driver:?}");
}

#[test]
fn bf16_in_ways_of_every_setting() {
    let fake = FakeCuda::load(&Config::default());
    let mut windowed = 0;
    for (dir, path) in golden_dirs().iter().zip(PATHS.iter().cycle()) {
        for &way in *path {
            let (engine, driver) = run(&fake, dir, &WAYS[way], DType::Bf16);
            assert_went(&WAYS[way], &engine, &driver);
            windowed += usize::from(engine.scheduler.num_window_freed > 0);
        }
    }
    assert_eq!(windowed, PATHS[0].len(), "one golden has windows");
}

/// In one way each: the kernels of f32 have no matrix instructions and take the interpreter long.
#[test]
fn f32_in_one_way_each() {
    let fake = FakeCuda::load(&Config::default());
    for (dir, way) in golden_dirs().iter().zip([0, 1, 2, 3, 4, 6].map(|way| WAYS[way])) {
        let (engine, driver) = run(&fake, dir, &way, DType::F32);
        assert_went(&way, &engine, &driver);
    }
}

/// What the comments above say of the constants.
#[test]
fn the_ways_have_every_pair_and_each_path_every_value() {
    let values = |way: &Way| {
        let Way { graphs, block_size, budget, room, order } = way;
        [
            format!("graphs {graphs}"),
            format!("block size {block_size}"),
            format!("budget {budget}"),
            format!("{room:?}"),
            format!("{order:?}"),
        ]
    };
    let (mut all, mut pairs) = (BTreeSet::new(), BTreeSet::new());
    for way in WAYS.iter().map(values) {
        pairs.extend(way.iter().flat_map(|a| way.iter().map(move |b| (a.clone(), b.clone()))));
        all.extend(way);
    }
    // Of 2, 2, 3, 3 and 2 values, ordered pairs of two settings, and each value with itself.
    assert_eq!((all.len(), pairs.len()), (12, 144 - (4 + 4 + 9 + 9 + 4) + 12));
    for path in PATHS {
        let seen: BTreeSet<String> = path.iter().flat_map(|&way| values(&WAYS[way])).collect();
        assert_eq!(seen, all, "{path:?}");
    }
    let gone: BTreeSet<usize> = PATHS.iter().copied().flatten().copied().collect();
    assert_eq!(gone.len(), WAYS.len());
}
