//! What an engine measures when it starts: how long a token and the copy of a block take.

use crate::config::{DEFAULT_STEP_MS, Measure};
use crate::ops::{BackendError, BlockTransfers, ForwardInput};
use crate::runner::{Executor, ExecutorOutput, Step};
use crate::sampling::{RowTarget, SamplingBatch, SamplingRow};
use crate::scheduler::{Preemption, PreemptionCosts, Scheduler};
use std::time::{Duration, Instant};

/// Tokens of the step that is timed: few enough to cost little on a large model.
const TOKENS: usize = 16;
/// A first run shorter than this is repeated, as it may have paid for fresh memory.
const SHORT: Duration = Duration::from_millis(100);
/// Tokens of the step that is timed where [`TOKENS`] take less than [`QUICK`]: a small model is
/// nearer to its speed with more.
const MORE_TOKENS: usize = 64;
const QUICK: Duration = Duration::from_millis(20);

/// Measures what is asked for and sets it in `scheduler`. A backend that fails here will say so
/// at its first step; nothing is set then.
pub(super) fn apply(executor: &mut dyn Executor, measure: Measure, scheduler: &mut Scheduler) {
    if !measure.budget && !measure.preemption_costs {
        return;
    }
    let Ok(token) = time_token(executor, scheduler) else { return };
    let most = scheduler.config().max_num_batched_tokens;
    if measure.budget {
        let budget = Duration::from_millis(DEFAULT_STEP_MS).as_nanos() / token.as_nanos().max(1);
        // A step must move every running sequence.
        let least = scheduler.config().max_num_seqs.clamp(TOKENS, most.max(TOKENS));
        let budget = usize::try_from(budget).unwrap_or(usize::MAX);
        scheduler.set_max_num_batched_tokens(budget.clamp(least, most.max(least)).min(most));
    }
    if measure.preemption_costs
        && let Ok(block) = time_block(executor)
    {
        let nanos = |d: Duration| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX);
        scheduler.set_preemption(Preemption::Auto(PreemptionCosts {
            recompute_ns_per_token: nanos(token),
            swap_ns_per_block: nanos(block),
        }));
    }
}

/// Time of a token in a step that writes nothing.
fn time_token(
    executor: &mut dyn Executor,
    scheduler: &Scheduler,
) -> Result<Duration, BackendError> {
    let config = scheduler.config();
    let most = config.max_num_batched_tokens.min(config.max_model_len);
    let tokens = TOKENS.min(most);
    let mut time = time_step(executor, config.block_size, tokens)?;
    if time < SHORT {
        time = time_step(executor, config.block_size, tokens)?;
    }
    if time >= QUICK {
        return Ok(time / tokens as u32);
    }
    let tokens = MORE_TOKENS.min(most);
    Ok(time_step(executor, config.block_size, tokens)? / tokens as u32)
}

/// Time of a step with one sequence of `n` tokens.
fn time_step(
    executor: &mut dyn Executor,
    block_size: usize,
    n: usize,
) -> Result<Duration, BackendError> {
    let mut input = ForwardInput::default();
    input.clear(n.div_ceil(block_size));
    input.token_ids.resize(n, 0);
    input.positions.extend(0..n as u32);
    input.slot_mapping.resize(n, -1);
    input.query_start_loc.push(n as i32);
    input.seq_lens.push(n as i32);
    input.block_table.resize(input.max_blocks, 0);
    input.logits_indices.push(n as u32 - 1);
    let mut batch = SamplingBatch::default();
    batch.rows.push(SamplingRow { target: RowTarget::Nothing, ..SamplingRow::default() });
    let step = Step { input: &input, sampling: &batch, capture: &[false] };
    executor.synchronize()?;
    let start = Instant::now();
    executor.execute(step, &mut ExecutorOutput::default())?;
    // Nobody asks for a result of this step, which alone would be waited for.
    executor.synchronize()?;
    Ok(start.elapsed())
}

/// Time to copy a block to the host; the pools hold nothing yet.
fn time_block(executor: &mut dyn Executor) -> Result<Duration, BackendError> {
    let blocks = executor.num_swap_blocks().min(executor.kv_layout().num_blocks).min(8) as u32;
    let pairs = (0..blocks).map(|i| (i, i)).collect();
    let transfers = BlockTransfers { swap_out: pairs, ..BlockTransfers::default() };
    // The first copy pays for fresh memory.
    executor.transfer(&transfers)?;
    executor.synchronize()?;
    let start = Instant::now();
    executor.transfer(&transfers)?;
    executor.synchronize()?;
    Ok(start.elapsed() / blocks.max(1))
}
