//! Every kernel that a step launches, in order, with its grid, bytes and operations: no launch is
//! added unnoticed, a graph launches the same, and no kernel moves less than its formula says it
//! must.
//!
//! The number of launches a layer is stated in ARCHITECTURE.md, too.

use fakecuda::{Config, FakeCuda};
use half::bf16;
use quire_engine::DType;
use quire_engine::backend::cuda::LaunchRecord;
use quire_engine::backend::{CudaBackend, CudaOptions};
use quire_engine::ops::ForwardInput;
use quire_engine::runner::{Executor, ExecutorOutput, ModelRunner, RunnerSizes, Step};
use quire_engine::sampling::{SamplingBatch, SamplingRow};
use quire_model_zoo::ModelFiles;
use quire_model_zoo::decoder::{Decoder, DecoderLimits};
use quire_tests::fixtures::data_dir;
use std::fmt::Write;

/// Launches of a layer in a decode step: norm, QKV and its fold, rotation, attention, output and its
/// fold; norm, gate and up and their fold, down and its fold.
const DECODE_LAUNCHES_OF_A_LAYER: usize = 12;
/// The same in a step of many rows, whose matrix products need no fold.
const PREFILL_LAUNCHES_OF_A_LAYER: usize = 8;
/// Embedding; gathered rows, norm, logits and their fold; statistics of the logits and their fold,
/// choice.
const OTHER_LAUNCHES: usize = 8;

const BLOCK_SIZE: usize = 16;
const BLOCKS_PER_SEQ: usize = 4;
/// Prompts of the four sequences, 72 tokens: more rows than are worth spreading K for.
const LENS: [usize; 4] = [20, 33, 7, 12];

type Runner = ModelRunner<CudaBackend<bf16>, Decoder<CudaBackend<bf16>>>;

fn runner(files: &ModelFiles, enforce_eager: bool) -> Runner {
    let options = CudaOptions { enforce_eager, ..CudaOptions::default() };
    let mut backend = CudaBackend::new(options).expect("a device");
    let limits = DecoderLimits { max_tokens: 128, max_positions: BLOCK_SIZE * BLOCKS_PER_SEQ };
    let model =
        Decoder::load(&files.spec, files.source.as_ref(), &mut backend, &limits, &mut |_| ())
            .expect("a golden model");
    let num_blocks = BLOCKS_PER_SEQ * LENS.len();
    let sizes = RunnerSizes {
        layout: files.info().kv_layout(num_blocks, BLOCK_SIZE, DType::Bf16),
        num_swap_blocks: 0,
        max_tokens: limits.max_tokens,
        max_seqs: LENS.len(),
        max_positions: limits.max_positions,
        max_logprobs: 20,
    };
    ModelRunner::new(backend, model, sizes).expect("a small KV cache")
}

/// Positions `from[i]..to[i]` of the i-th sequence, whose blocks are its own; the last row of each
/// is sampled.
fn input(from: [usize; 4], to: [usize; 4]) -> ForwardInput {
    let mut input = ForwardInput::default();
    input.clear(BLOCKS_PER_SEQ);
    for (seq, (from, to)) in from.into_iter().zip(to).enumerate() {
        let first = seq * BLOCKS_PER_SEQ;
        for position in from..to {
            input.token_ids.push((7 * position + seq) as u32 % 256);
            input.positions.push(position as u32);
            input.slot_mapping.push((first * BLOCK_SIZE + position) as i64);
        }
        input.query_start_loc.push(input.token_ids.len() as i32);
        input.seq_lens.push(to as i32);
        input.block_table.extend((first..first + BLOCKS_PER_SEQ).map(|block| block as i32));
        input.logits_indices.push(input.token_ids.len() as u32 - 1);
    }
    input
}

fn prefill() -> ForwardInput {
    input([0; 4], LENS)
}

fn decode(step: usize) -> ForwardInput {
    input(LENS.map(|len| len + step), LENS.map(|len| len + step + 1))
}

/// A step as the backend recorded it and as the device ran it.
struct Launches {
    made: Vec<LaunchRecord>,
    ran: Vec<fakecuda::LaunchRecord>,
}

fn run(fake: &FakeCuda, runner: &mut Runner, input: &ForwardInput) -> Launches {
    let row = SamplingRow { temperature: 0.0, ..SamplingRow::default() };
    let sampling = SamplingBatch {
        rows: vec![row; input.logits_indices.len()],
        vocab_limit: runner.model().vocab_size,
        ..SamplingBatch::default()
    };
    let capture = vec![false; input.logits_indices.len()];
    fake.log_launches(true);
    runner.parts_mut().0.record_launches(true);
    let step = Step { input, sampling: &sampling, capture: &capture };
    let mut out = ExecutorOutput::default();
    runner.execute(step, &mut out).expect("the device works");
    assert!(out.samples.iter().all(|sample| sample.token.is_ok()));
    let made = runner.parts_mut().0.record_launches(false);
    Launches { made, ran: fake.take_launches() }
}

fn table(launches: &Launches, num_layers: usize) -> String {
    let mut out = format!("{num_layers} layers, {} launches\n", launches.made.len());
    for LaunchRecord { kernel, variant, grid, work } in &launches.made {
        let variant = variant.strip_prefix(kernel).unwrap_or(variant).trim_start_matches('_');
        let grid = grid.map(|n| n.to_string()).join("×");
        let (bytes, flops) = (work.bytes, work.flops);
        writeln!(out, "{kernel:22} {variant:44} {grid:9} {bytes:7} B {flops:9} FLOP").unwrap();
    }
    out
}

/// What was made ran, in that order, and moved at least what it had to.
fn assert_ran(launches: &Launches) {
    let made = launches.made.iter().map(|made| (made.kernel, made.grid));
    let ran = launches.ran.iter().map(|ran| (ran.entry.as_str(), ran.grid));
    assert_eq!(made.collect::<Vec<_>>(), ran.collect::<Vec<_>>());
    for (made, ran) in launches.made.iter().zip(&launches.ran) {
        let moved = ran.read_footprint_bytes + ran.written_footprint_bytes;
        assert!(made.work.bytes > 0, "{made:?}");
        assert!(made.work.bytes <= moved, "{made:?} moves {moved} bytes: {ran:?}");
        assert!(made.work.flops <= ran.flops, "{made:?} computes {}", ran.flops);
    }
}

#[test]
fn a_step_launches_what_is_listed_here() {
    let fake = FakeCuda::load(&Config::default());
    let files = ModelFiles::open(&data_dir().join("goldens/llama-gqa")).expect("a golden model");
    let num_layers = files.spec.num_layers;
    let mut runner = runner(&files, true);

    let prefill = run(&fake, &mut runner, &prefill());
    assert_ran(&prefill);
    assert_eq!(prefill.made.len(), num_layers * PREFILL_LAUNCHES_OF_A_LAYER + OTHER_LAUNCHES);
    insta::assert_snapshot!("prefill", table(&prefill, num_layers));

    let decode = run(&fake, &mut runner, &decode(0));
    assert_ran(&decode);
    assert_eq!(decode.made.len(), num_layers * DECODE_LAUNCHES_OF_A_LAYER + OTHER_LAUNCHES);
    insta::assert_snapshot!("decode", table(&decode, num_layers));
}

/// The third step of a shape is a graph and the launches that choose tokens; together they are those
/// of a step without graphs.
#[test]
fn a_graph_launches_what_a_step_without_it_does() {
    let fake = FakeCuda::load(&Config::default());
    let files = ModelFiles::open(&data_dir().join("goldens/llama-gqa")).expect("a golden model");
    let [mut eager, mut graphs] = [true, false].map(|eager| runner(&files, eager));
    for runner in [&mut eager, &mut graphs] {
        run(&fake, runner, &prefill());
    }
    for step in 0..4 {
        let eager = run(&fake, &mut eager, &decode(step));
        let graph = run(&fake, &mut graphs, &decode(step));
        let what = |ran: &fakecuda::LaunchRecord| (ran.entry.clone(), ran.grid, ran.flops);
        let [eager, with_graphs] = [&eager, &graph].map(|l| l.ran.iter().map(what));
        assert!(eager.eq(with_graphs), "step {step}: {:?}", graph.ran);
        let in_graph = graph.ran.iter().filter(|ran| ran.in_graph).count();
        assert_eq!(in_graph > 0, step > 0, "step {step}");
        if step > 1 {
            assert_eq!(in_graph + graph.made.len(), graph.ran.len(), "step {step}");
        }
    }
    assert_eq!(graphs.parts_mut().0.num_graphs(), 1);
}
