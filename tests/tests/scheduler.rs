//! Named cases of the scheduler, under the simulation's fake device and checks.

use quire_engine::kv::PrefixHasher;
use quire_engine::scheduler::{
    AdmissionError, NewSequence, Policy, Preemption, PreemptionKind, SchedulerConfig, SeqId,
};
use quire_tests::rng::Rng;
use quire_tests::sim::Sim;
use quire_tests::sim::device::Failure;
use quire_tests::sim::driver::length;

const BLOCK: usize = 4;

fn config(seats: usize, budget: usize, num_blocks: usize) -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: seats,
        max_num_batched_tokens: budget,
        max_model_len: num_blocks * BLOCK,
        block_size: BLOCK,
        num_blocks,
        ..Default::default()
    }
}

/// Blocks of 16 and a prefix cache.
fn cached() -> SchedulerConfig {
    SchedulerConfig {
        block_size: 16,
        max_model_len: 128,
        prefix_cache: Some(PrefixHasher::new("cases", 16)),
        ..config(4, 256, 32)
    }
}

fn prompt(len: usize, seed: u64) -> Vec<u32> {
    let mut rng = Rng::new(seed);
    (0..len).map(|_| rng.below(24) as u32).collect()
}

fn new(prompt: Vec<u32>, max_tokens: usize) -> NewSequence {
    NewSequence { prompt, rules: length(max_tokens), ..Default::default() }
}

fn add(sim: &mut Sim, prompt: Vec<u32>, max_tokens: usize) -> SeqId {
    let request = sim.add(new(prompt, max_tokens), 1).unwrap();
    sim.ids(request)[0]
}

fn finish(sim: &mut Sim) {
    sim.drain();
    sim.check_idle();
}

#[test]
fn a1_a_full_hit_leaves_a_token_to_compute_and_the_chain_whole() {
    let mut sim = Sim::with_limits(cached(), 0);
    let (short, long) = (prompt(32, 1), prompt(48, 1));
    add(&mut sim, short.clone(), 4);
    sim.drain();
    for (prompt, cached, written) in [(short, 31, 32), (long, 32, 32)] {
        let id = add(&mut sim, prompt, 4);
        sim.step();
        assert_eq!(sim.scheduler.sequence(id).num_cached_tokens, cached);
        let row = sim.plan().scheduled[0];
        assert_eq!((row.start, row.write_from), (cached, written));
        sim.drain();
    }
    sim.check_idle();
}

#[test]
fn a3_blocks_are_shared_in_the_step_that_writes_them() {
    for fails in [false, true] {
        let mut sim = Sim::with_limits(cached(), 0);
        add(&mut sim, prompt(32, 1), 4);
        add(&mut sim, prompt(32, 1), 4);
        assert!(sim.schedule());
        let starts: Vec<_> = sim.plan().scheduled.iter().map(|s| (s.start, s.write_from)).collect();
        assert_eq!(starts, [(0, 0), (31, 32)]);
        assert_eq!(sim.scheduler.pool().num_held(), 2);
        if fails {
            // Nothing was written, so nothing may be found.
            sim.fail(Failure::AtOnce);
            assert_eq!(sim.scheduler.pool().num_cached(), 0);
        }
        finish(&mut sim);
    }
}

/// What was computed before a reset, and what those that were running then compute after it.
#[test]
fn a_reset_cache_shares_nothing_computed_before() {
    let mut sim = Sim::with_limits(cached(), 0);
    let found = |sim: &mut Sim, prompt: Vec<u32>| {
        let id = add(sim, prompt, 1);
        sim.step();
        let row = sim.plan().scheduled.iter().find(|s| s.id == id).expect("it is admitted");
        row.start
    };
    add(&mut sim, prompt(48, 1), 12);
    sim.step();
    assert_eq!(found(&mut sim, prompt(48, 1)), 47, "without a reset");
    sim.scheduler.reset_prefix_cache();
    assert_eq!(sim.scheduler.pool().num_cached(), 0);
    sim.drain();
    assert_eq!(sim.scheduler.pool().num_cached(), 0, "named after the reset");
    assert_eq!(found(&mut sim, prompt(48, 1)), 0);
    finish(&mut sim);
}

#[test]
fn a4_a_fork_counts_each_block_once() {
    let limits = SchedulerConfig { window: Some(8), ..config(4, 64, 8) };
    let mut sim = Sim::with_limits(limits, 0);
    sim.add(new(prompt(12, 1), 8), 2).unwrap();
    sim.step();
    assert_eq!(sim.scheduler.pool().num_held(), 3);
    sim.step();
    // The first moved on: it freed a block and took one. The second shares what it sees.
    assert_eq!(sim.plan().scheduled.len(), 2);
    assert_eq!(sim.scheduler.pool().num_held(), 3);
    finish(&mut sim);
    assert!(sim.totals.scheduler.num_window_freed > 0);
}

#[test]
fn a6_a_prompt_whose_logits_are_wanted_is_computed_whole() {
    let mut sim = Sim::with_limits(cached(), 0);
    for _ in 0..2 {
        let sequence = NewSequence { skip_cache: true, ..new(prompt(33, 1), 2) };
        sim.add(sequence, 1).unwrap();
        sim.step();
        let row = sim.plan().scheduled[0];
        assert_eq!((row.start, row.num_scheduled_tokens, row.write_from), (0, 33, 0));
        sim.drain();
    }
    sim.check_idle();
}

#[test]
fn a7_only_full_blocks_are_cached_and_the_last_token_counts() {
    let mut sim = Sim::with_limits(cached(), 0);
    add(&mut sim, prompt(40, 1), 1);
    sim.drain();
    let mut other = prompt(40, 1);
    other[31] ^= 1;
    for (prompt, cached) in [(prompt(40, 1), 32), (other, 16)] {
        let id = add(&mut sim, prompt, 2);
        sim.step();
        assert_eq!(sim.scheduler.sequence(id).num_cached_tokens, cached);
        sim.drain();
    }
    sim.check_idle();
}

#[test]
fn a9_a_prompt_above_the_pool_is_refused_and_the_queue_moves() {
    let mut sim = Sim::with_limits(config(4, 64, 10), 0);
    let refused = sim.add(new(prompt(40, 1), 1), 1).unwrap_err();
    assert_eq!(refused, AdmissionError::TooLong { prompt: 40, max_tokens: 1, limit: 40 });
    // All of the pool can be used: no block is kept back.
    add(&mut sim, prompt(39, 2), 1);
    add(&mut sim, prompt(3, 3), 2);
    finish(&mut sim);
    assert_eq!(sim.totals.ended, 2);
}

#[test]
fn a11_a_sequence_is_resumed_only_when_all_of_it_fits() {
    // 64 blocks; the first holds 40 of them, the second needs 60, and a step takes one block.
    let mut sim = Sim::with_limits(config(4, BLOCK, 64), 0);
    add(&mut sim, prompt(39 * BLOCK, 1), BLOCK);
    while sim.scheduler.pool().num_held() < 40 {
        assert!(sim.step());
    }
    add(&mut sim, prompt(59 * BLOCK, 2), BLOCK);
    while sim.totals.ended == 0 {
        assert!(sim.step());
        assert_eq!(sim.scheduler.num_waiting(), 1);
    }
    finish(&mut sim);
    assert_eq!((sim.totals.ended, sim.totals.scheduler.num_preemptions()), (2, 0));
}

#[test]
fn a14_the_limit_is_exact_and_refusals_name_true_numbers() {
    let limits = SchedulerConfig { max_model_len: 2048, ..config(2, 512, 512) };
    let mut sim = Sim::with_limits(limits, 0);
    add(&mut sim, prompt(8, 1), 2040);
    add(&mut sim, prompt(2047, 2), 1);
    for (len, max_tokens) in [(8, 2045), (2048, 1), (2048, 0), (1, usize::MAX)] {
        let error = sim.scheduler.add(new(prompt(len, 3), max_tokens), 1).unwrap_err();
        let max_tokens = max_tokens.max(1);
        let limit = 2048;
        assert_eq!(error, AdmissionError::TooLong { prompt: len, max_tokens, limit });
    }
    let text = sim.scheduler.add(new(prompt(8, 1), 2045), 1).unwrap_err().to_string();
    for number in ["8 tokens", "2045", "2053", "2048"] {
        assert!(text.contains(number), "{text}");
    }
    let empty = sim.scheduler.add(new(Vec::new(), 1), 1);
    assert_eq!(empty, Err(AdmissionError::EmptyPrompt));
    assert_eq!(sim.live.len(), 2);
}

#[test]
fn a17_a_preempted_sequence_comes_before_newcomers() {
    let mut sim = Sim::with_limits(config(2, 64, 8), 0);
    let first = add(&mut sim, prompt(12, 1), 20);
    let second = add(&mut sim, prompt(12, 2), 16);
    let newcomer = add(&mut sim, prompt(1, 3), 1);
    while sim.scheduler.stats().num_preemptions() == 0 {
        assert!(sim.step());
    }
    assert_eq!(sim.plan().preempted, [(second, PreemptionKind::Recompute)]);
    // The newcomer would fit at once, and there is a seat; it waits for its turn all the same.
    while sim.live.contains_key(&first) {
        assert!(sim.step());
        if sim.live.contains_key(&newcomer) && sim.live.contains_key(&second) {
            let runs = |id| sim.scheduler.is_running(id);
            assert!(!runs(newcomer) || runs(second));
        }
    }
    finish(&mut sim);
    assert_eq!(sim.totals.ended, 3);
}

#[test]
fn a17_one_seat_serves_in_order_of_arrival() {
    let mut sim = Sim::with_limits(config(1, 8, 8), 0);
    let ids: Vec<SeqId> = (0..3).map(|i| add(&mut sim, prompt(5, i), 3)).collect();
    for (turn, id) in ids.into_iter().enumerate() {
        while sim.totals.ended == turn as u64 {
            assert!(sim.step());
            assert_eq!(sim.plan().scheduled[0].id, id);
        }
    }
    assert!(!sim.step());
}

fn priorities(seats: usize, aging_steps: u32) -> SchedulerConfig {
    SchedulerConfig { policy: Policy::Priority { aging_steps }, ..config(seats, 64, 8) }
}

fn add_urgent(sim: &mut Sim, seed: u64, priority: i32) -> SeqId {
    let request = sim.add(NewSequence { priority, ..new(prompt(6, seed), 4) }, 1).unwrap();
    sim.ids(request)[0]
}

#[test]
fn a17_an_urgent_request_takes_the_only_seat_and_gives_it_back() {
    let mut sim = Sim::with_limits(priorities(1, 100), 0);
    let low = add_urgent(&mut sim, 1, 5);
    sim.step();
    let high = add_urgent(&mut sim, 2, 0);
    let equal = add_urgent(&mut sim, 3, 0);
    sim.step();
    assert_eq!(sim.plan().preempted, [(low, PreemptionKind::Recompute)]);
    let mut served = Vec::new();
    while !sim.live.is_empty() {
        let id = sim.plan().scheduled[0].id;
        if served.last() != Some(&id) {
            served.push(id);
        }
        sim.step();
    }
    assert_eq!(served, [high, equal, low]);
}

#[test]
fn a_request_that_has_waited_long_enough_comes_before_any_urgent_one() {
    let (level, aging_steps) = (3, 10);
    let mut sim = Sim::with_limits(priorities(1, aging_steps), 0);
    let low = add_urgent(&mut sim, 0, level);
    let mut steps = 0;
    while sim.live.contains_key(&low) {
        // Urgent ones never end, and there are more than can be served.
        add_urgent(&mut sim, steps + 1, 0);
        sim.step();
        steps += 1;
        // What came first is served first: four steps each, then its own four.
        assert!(steps <= u64::from(aging_steps) * level as u64 * 4 + 8, "it starves");
    }
    assert!(steps > u64::from(aging_steps) * level as u64, "urgent ones came first");
}

#[test]
fn samples_share_the_blocks_of_their_prompt() {
    let mut sim = Sim::with_limits(config(8, 64, 16), 0);
    sim.add(new(prompt(10, 1), 6), 5).unwrap();
    sim.step();
    assert_eq!((sim.plan().scheduled.len(), sim.scheduler.pool().num_held()), (1, 3));
    sim.step();
    // Two full blocks for all, and one that each writes to.
    assert_eq!((sim.plan().scheduled.len(), sim.scheduler.pool().num_held()), (5, 2 + 5));
    assert_eq!(sim.plan().transfers.copies.len(), 4);
    assert!(sim.plan().scheduled[1..].iter().all(|s| (s.start, s.write_from) == (9, 10)));
    finish(&mut sim);
    assert_eq!(sim.totals.scheduler.num_forks, 4);
}

#[test]
fn beams_keep_their_seats_and_share_their_blocks() {
    for run_ahead in [0, 1] {
        let mut sim = Sim::with_limits(config(4, 64, 16), run_ahead);
        sim.add_beams(new(prompt(10, 1), 8), 3).unwrap();
        add(&mut sim, prompt(3, 2), 4);
        let late = add(&mut sim, prompt(3, 3), 4);
        sim.step();
        assert!(!sim.scheduler.is_running(late), "its seat is kept for the beams to come");
        finish(&mut sim);
        assert!(sim.totals.beams_advanced > 0 && sim.totals.scheduler.num_block_copies > 0);
    }
    let mut sim = Sim::with_limits(config(4, 64, 16), 0);
    let error = sim.add_beams(new(prompt(10, 1), 8), 5).unwrap_err();
    assert_eq!(error, AdmissionError::BeamsTooWide { width: 5, limit: 4, name: "max_num_seqs" });
    let error = sim.add_beams(new(prompt(8, 1), 32), 2).unwrap_err();
    let (prompt, width, max_tokens) = (8, 2, 32);
    let (needed, limit) = (2 + 2 * 8, 16);
    assert_eq!(error, AdmissionError::BeamsTooLong { prompt, width, max_tokens, needed, limit });
}

fn swapping(num_swap_blocks: usize) -> SchedulerConfig {
    SchedulerConfig { preemption: Preemption::Swap, num_swap_blocks, ..config(4, 64, 8) }
}

#[test]
fn without_room_on_the_host_a_victim_is_computed_anew() {
    for (room, swaps) in [(0, false), (8, true)] {
        let mut sim = Sim::with_limits(swapping(room), 0);
        add(&mut sim, prompt(12, 1), 20);
        add(&mut sim, prompt(12, 2), 16);
        finish(&mut sim);
        let stats = sim.totals.scheduler;
        assert_eq!(stats.num_preempted_swap > 0, swaps);
        assert_eq!(stats.num_swap_fallbacks > 0, !swaps);
        assert_eq!(stats.num_blocks_swapped_in, stats.num_blocks_swapped_out);
    }
}

#[test]
fn blocks_that_swapped_samples_left_behind_are_taken_back() {
    // The first needs the whole pool in the end. Two samples share three blocks, which stay
    // where they are when one after the other is swapped.
    let mut sim = Sim::with_limits(swapping(8), 0);
    let first = add(&mut sim, prompt(4, 1), 28);
    sim.add(new(prompt(12, 2), 16), 2).unwrap();
    let mut left_behind = false;
    while sim.live.contains_key(&first) {
        sim.step();
        let running = sim.scheduler.num_running();
        let usage = sim.scheduler.kv_usage();
        left_behind |= running == 1 && usage.num_swapped > 0;
    }
    assert!(left_behind);
    finish(&mut sim);
    let stats = sim.totals.scheduler;
    assert!(stats.num_preempted_swap >= 2);
    assert!(stats.num_blocks_swapped_in < stats.num_blocks_swapped_out, "some were given up");
}

#[test]
fn a_window_bounds_the_blocks_of_a_sequence() {
    for window in [1, 2, 7, 8] {
        let limits = SchedulerConfig { window: Some(window), ..config(1, 4, 16) };
        let mut sim = Sim::with_limits(limits, 1);
        let id = add(&mut sim, prompt(20, 1), 40);
        while sim.live.contains_key(&id) {
            sim.step();
            let decoding =
                sim.scheduler.is_live(id) && !sim.scheduler.sequence(id).output().is_empty();
            let held = sim.scheduler.pool().num_held();
            assert!(!decoding || held <= (window - 1).div_ceil(BLOCK) + 1, "{held} for {window}");
        }
        finish(&mut sim);
    }
}

#[test]
fn a_static_batch_pads_and_waits_for_its_last() {
    let limits = SchedulerConfig { policy: Policy::Static, max_model_len: 16, ..config(2, 64, 8) };
    let mut sim = Sim::with_limits(limits, 0);
    add(&mut sim, prompt(4, 1), 2);
    add(&mut sim, prompt(10, 2), 6);
    let next = add(&mut sim, prompt(2, 3), 2);
    sim.step();
    assert_eq!((sim.plan().num_tokens(), sim.plan().num_padding_tokens), (14, 6));
    while sim.live.len() > 1 {
        assert!(!sim.scheduler.is_running(next));
        sim.step();
    }
    finish(&mut sim);
    assert_eq!(sim.totals.ended, 3);
}
