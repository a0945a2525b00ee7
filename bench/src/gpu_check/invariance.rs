//! A request has the same tokens and log-probabilities, bit for bit, whatever is beside it, however
//! its prompt is cut, with graphs and without, preempted or not, for every block size.

use super::{EAGER, Run, goldens};
use anyhow::ensure;
use quire_engine::backend::CudaOptions;
use quire_engine::config::PreemptionMode;
use quire_engine::sampling::NumLogprobs;
use quire_engine::{DType, EngineConfig, Request, SamplingParams};
use quire_tests::fixtures::{Place, Setup, TinyModel};
use quire_tests::oracle::{Fingerprint, greedy, run_all, run_alone};
use quire_tests::rng::Rng;

/// Tokens of the model's context.
const MAX_POSITIONS: usize = 512;
/// Bytes for swapped-out blocks.
const SWAP_BYTES: usize = 256 << 20;
/// Ids of the tokenizer that prompts are made of: bytes.
const VOCAB: usize = 256;

/// A way to run all requests together.
struct Way {
    name: &'static str,
    graphs: bool,
    /// Plan one step ahead.
    ahead: bool,
    block_size: usize,
    /// Tokens of a step.
    budget: usize,
    /// `None`: there is room for all.
    preemption: Option<PreemptionMode>,
    reversed: bool,
}

const WAY: Way = Way {
    name: "in a batch, with graphs",
    graphs: true,
    ahead: true,
    block_size: 16,
    budget: 512,
    preemption: None,
    reversed: false,
};
const SWAP: Option<PreemptionMode> = Some(PreemptionMode::Swap);
const RECOMPUTE: Option<PreemptionMode> = Some(PreemptionMode::Recompute);

const WAYS: [Way; 6] = [
    WAY,
    Way { name: "in a batch, without graphs", graphs: false, ..WAY },
    Way { name: "in chunks of 24 tokens", budget: 24, reversed: true, ..WAY },
    Way { name: "preempted by swap", preemption: SWAP, ..WAY },
    Way { name: "preempted and computed anew", preemption: RECOMPUTE, reversed: true, ..WAY },
    Way { name: "in blocks of 64, not ahead", block_size: 64, ahead: false, graphs: false, ..WAY },
];

/// Checks a model with random weights, and a golden.
pub(super) fn run(run: &mut Run) -> anyhow::Result<()> {
    let mut spec = run.sizes.invariant_model.spec(MAX_POSITIONS);
    spec.eos = vec![VOCAB as u32 + 1];
    let model = TinyModel::of_spec(spec, 1);
    let requests = requests(run.sizes.prompts, run.sizes.outputs);
    let mut alone: Vec<Fingerprint> = Vec::new();
    run.check("each request alone", || {
        let setup = device(&WAY);
        alone.extend(requests.iter().map(|r| Fingerprint::from(&run_alone(&model, &setup, r))));
        Ok(())
    });
    if alone.len() == requests.len() {
        for way in &WAYS {
            run.check(way.name, || way.check(&model, &requests, &alone));
        }
    }
    let folder = goldens::folders(run)?.remove(0);
    for way in goldens::WAYS.iter().take(run.sizes.golden_ways) {
        goldens::check(run, &folder, way, DType::Bf16);
    }
    Ok(())
}

/// Greedy ones and drawn ones, all with log-probabilities.
fn requests(prompts: &[usize], outputs: usize) -> Vec<Request> {
    let request = |(i, &len): (usize, &usize)| {
        let mut rng = Rng::new(i as u64);
        let ids: Vec<u32> = (0..len).map(|_| rng.below(VOCAB) as u32).collect();
        let base = SamplingParams { logprobs: Some(NumLogprobs::Top(3)), ..greedy(outputs) };
        let params = match i % 3 {
            0 => base,
            1 => SamplingParams { temperature: 0.9, seed: Some(i as u64), ..base },
            _ => {
                let prompt_logprobs = Some(NumLogprobs::Top(1));
                SamplingParams {
                    temperature: 0.7,
                    top_p: 0.9,
                    prompt_logprobs,
                    seed: Some(5),
                    ..base
                }
            }
        };
        Request::new(ids, params)
    };
    prompts.iter().enumerate().map(request).collect()
}

fn device(way: &Way) -> Setup {
    let options = CudaOptions { enforce_eager: !way.graphs, ..EAGER };
    Setup { place: Place::Cuda(options), ..Setup::cuda(DType::Bf16) }
}

impl Way {
    fn check(
        &self,
        model: &TinyModel,
        requests: &[Request],
        alone: &[Fingerprint],
    ) -> anyhow::Result<()> {
        let longest = alone.iter().zip(requests).map(|(output, request)| {
            let quire_engine::engine::Prompt::Tokens(ids) = &request.prompt else { return 0 };
            output.token_ids.len() + ids.len()
        });
        let longest = longest.max().unwrap_or(1);
        let blocks = longest.div_ceil(self.block_size);
        let config = EngineConfig {
            max_num_seqs: requests.len(),
            max_num_batched_tokens: Some(self.budget),
            max_model_len: Some(longest),
            block_size: self.block_size,
            // Of those that are preempted, the longest and a little more have room.
            num_blocks: Some(self.preemption.map_or(blocks * requests.len(), |_| blocks + 2)),
            swap_bytes: if self.preemption == SWAP { SWAP_BYTES } else { 0 },
            preemption: self.preemption.unwrap_or_default(),
            async_scheduling: Some(self.ahead),
            ..Default::default()
        };
        let mut engine = model.engine(&device(self).with(config));
        let mut order: Vec<usize> = (0..requests.len()).collect();
        if self.reversed {
            order.reverse();
        }
        let ordered: Vec<Request> = order.iter().map(|&i| requests[i].clone()).collect();
        let outputs = run_all(&mut engine, &ordered);
        for (&request, output) in order.iter().zip(&outputs) {
            let (got, want) = (Fingerprint::from(output), &alone[request]);
            let first = got.token_ids.iter().zip(&want.token_ids).position(|(a, b)| a != b);
            ensure!(got == *want, "request {request} differs; first other token: {first:?}");
        }
        let stats = engine.stats().scheduler;
        let went = match self.preemption {
            None => stats.num_preemptions() == 0,
            SWAP => stats.num_blocks_swapped_in > 0,
            _ => stats.num_preempted_recompute > 0,
        };
        ensure!(went, "the way was not gone: {stats:?}");
        Ok(())
    }
}
