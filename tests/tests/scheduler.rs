//! The scheduler under random arrivals, lengths, aborts, pools and budgets, with a fake model.
//!
//! The fake model's token is a hash of the whole history, and its KV slots hold the hash of the
//! history up to their position. Every read checks every slot, so a block that was handed to two
//! sequences, a stale slot or a skipped position shows at once.

use proptest::prelude::*;
use quire_engine::scheduler::{
    AdmissionError, FinishReason, Scheduler, SchedulerConfig, SeqId, StepPlan, StopRules,
};
use quire_tests::rng::Rng;
use std::collections::BTreeMap;

const BLOCK: usize = 4;
/// Tokens are below this; small, so that stop tokens come up.
const VOCAB: u64 = 24;

fn hash(tokens: &[u32]) -> u64 {
    let mut rng = Rng::new(tokens.len() as u64);
    tokens.iter().fold(0, |h, &t| {
        rng = Rng::new(h ^ u64::from(t) ^ rng.next_u64());
        rng.next_u64()
    })
}

fn next_token(history: &[u32]) -> u32 {
    (hash(history) % VOCAB) as u32
}

/// What a request must give, whatever the schedule: its output and why it ends.
fn expected(prompt: &[u32], rules: &StopRules) -> (Vec<u32>, FinishReason) {
    let mut tokens = prompt.to_vec();
    loop {
        let token = next_token(&tokens);
        tokens.push(token);
        let n = tokens.len() - prompt.len();
        if n >= rules.min_tokens && rules.stop_token_ids.contains(&token) {
            return (tokens.split_off(prompt.len()), FinishReason::StopToken(token));
        }
        if n >= rules.max_tokens {
            return (tokens.split_off(prompt.len()), FinishReason::Length);
        }
    }
}

struct Live {
    arrival: u64,
    expected: (Vec<u32>, FinishReason),
    /// Holds blocks, as far as the plans say.
    running: bool,
}

/// A scheduler with the fake model, which checks every plan against the stated policy.
struct Sim {
    scheduler: Scheduler,
    plan: StepPlan,
    /// Hash of the history at each slot.
    slots: Vec<u64>,
    live: BTreeMap<SeqId, Live>,
    num_ended: usize,
}

impl Sim {
    fn new(config: SchedulerConfig) -> Self {
        Sim {
            slots: vec![0; config.num_blocks * config.block_size],
            scheduler: Scheduler::new(config),
            plan: StepPlan::default(),
            live: BTreeMap::new(),
            num_ended: 0,
        }
    }

    fn add(&mut self, prompt: Vec<u32>, rules: StopRules) -> Result<SeqId, AdmissionError> {
        let result = self.scheduler.add(prompt.clone(), rules.clone());
        self.scheduler.check_integrity();
        let id = result?;
        let arrival = self.scheduler.sequence(id).arrival;
        let live = Live { arrival, expected: expected(&prompt, &rules), running: false };
        assert!(self.live.insert(id, live).is_none(), "{id:?} was given twice");
        Ok(id)
    }

    fn abort(&mut self, id: SeqId) {
        let live = self.live.remove(&id).expect("a live sequence");
        let sequence = self.scheduler.finish(id);
        self.scheduler.check_integrity();
        assert!(live.expected.0.starts_with(sequence.output()));
    }

    /// Ids of the running (or the waiting) by arrival.
    fn by_arrival(&self, running: bool) -> Vec<SeqId> {
        let mut ids: Vec<SeqId> =
            self.live.iter().filter(|(_, l)| l.running == running).map(|(&id, _)| id).collect();
        ids.sort_by_key(|id| self.live[id].arrival);
        ids
    }

    /// Plans, checks and computes a step; false when nothing is left.
    fn step(&mut self) -> bool {
        let running = self.by_arrival(true);
        let waiting = self.by_arrival(false);
        self.scheduler.schedule(&mut self.plan);
        self.check_plan(&running, &waiting);
        for id in &self.plan.preempted {
            self.live.get_mut(id).expect("live").running = false;
        }
        for s in &self.plan.scheduled {
            self.live.get_mut(&s.id).expect("live").running = true;
        }
        self.scheduler.check_integrity();
        self.compute();
        !self.plan.scheduled.is_empty()
    }

    /// The policy, as the scheduler's documentation states it.
    fn check_plan(&self, running: &[SeqId], waiting: &[SeqId]) {
        let (plan, config) = (&self.plan, self.scheduler.config());
        assert!(plan.num_tokens() <= config.max_num_batched_tokens, "over budget");
        assert!(plan.scheduled.len() <= config.max_num_seqs, "over the seats");

        // The victims are the latest of the running, one after the other.
        let victims: Vec<SeqId> =
            running.iter().rev().take(plan.preempted.len()).copied().collect();
        assert_eq!(plan.preempted, victims, "preemption takes the latest arrival");
        if let Some(oldest) = running.first() {
            assert!(!plan.preempted.contains(oldest), "the oldest was preempted");
        }

        // Decodes, partial prefills, then admitted ones, each by arrival.
        let class = |id: &SeqId| {
            let seq = self.scheduler.sequence(*id);
            match running.contains(id) {
                true if seq.tokens.len() - seq.num_computed_tokens == 1 => 0,
                true => 1,
                false => 2,
            }
        };
        let keys: Vec<(u8, u64)> =
            plan.scheduled.iter().map(|s| (class(&s.id), self.live[&s.id].arrival)).collect();
        assert!(keys.is_sorted_by(|a, b| a < b), "order of the step: {keys:?}");

        let admitted: Vec<SeqId> =
            plan.scheduled.iter().map(|s| s.id).filter(|id| class(id) == 2).collect();
        assert_eq!(admitted, waiting[..admitted.len()], "admission by arrival");
        assert!(plan.preempted.is_empty() || admitted.is_empty(), "admitted while preempting");
        for s in &plan.scheduled {
            let seq = self.scheduler.sequence(s.id);
            assert!(s.num_scheduled_tokens >= 1 && s.start == seq.num_computed_tokens);
            let end = s.start + s.num_scheduled_tokens;
            assert!(end <= seq.tokens.len() && s.samples == (end == seq.tokens.len()));
            assert!(end <= seq.blocks.len() * BLOCK, "tokens without blocks");
            if class(&s.id) == 2 {
                assert_eq!(seq.blocks.len(), seq.tokens.len().div_ceil(BLOCK), "all or nothing");
            }
        }
        self.check_no_waste(running, waiting, admitted.len());
    }

    /// With budget to spare and no preemption, whatever could run does.
    fn check_no_waste(&self, running: &[SeqId], waiting: &[SeqId], num_admitted: usize) {
        let (plan, config) = (&self.plan, self.scheduler.config());
        if plan.num_tokens() == config.max_num_batched_tokens || !plan.preempted.is_empty() {
            return;
        }
        for id in running {
            let seq = self.scheduler.sequence(*id);
            let share = plan.scheduled.iter().find(|s| s.id == *id).expect("budget is left");
            assert_eq!(share.num_scheduled_tokens, seq.tokens.len() - share.start);
        }
        if let Some(id) = waiting.get(num_admitted) {
            let needed = self.scheduler.sequence(*id).tokens.len().div_ceil(BLOCK);
            let no_seat = self.scheduler.num_running() == config.max_num_seqs;
            assert!(no_seat || needed > self.scheduler.pool().num_free(), "{id:?} could run");
        }
    }

    /// Writes and reads the fake cache, samples, and ends what is done.
    fn compute(&mut self) {
        let mut sampled = Vec::new();
        for s in &self.plan.scheduled {
            let seq = self.scheduler.sequence(s.id);
            let slot = |p: usize| seq.blocks[p / BLOCK].0 as usize * BLOCK + p % BLOCK;
            let end = s.start + s.num_scheduled_tokens;
            for p in s.start..end {
                self.slots[slot(p)] = hash(&seq.tokens[..=p]);
            }
            for p in 0..end {
                assert_eq!(self.slots[slot(p)], hash(&seq.tokens[..=p]), "{:?} at {p}", s.id);
            }
            sampled.extend(s.samples.then(|| next_token(&seq.tokens)));
        }
        let mut finished = Vec::new();
        self.scheduler.update(&self.plan, sampled, &mut finished);
        for (id, reason) in finished {
            let live = self.live.remove(&id).expect("every sequence ends once");
            let sequence = self.scheduler.finish(id);
            assert_eq!((sequence.output(), reason), (&live.expected.0[..], live.expected.1));
            self.num_ended += 1;
            self.scheduler.check_integrity();
        }
        self.scheduler.check_integrity();
    }

    /// Runs until nothing is left, which must take no more steps than computing all live tokens
    /// anew for each of them, one at a time.
    fn drain(&mut self) {
        let tokens = |(&id, live): (&SeqId, &Live)| {
            self.scheduler.sequence(id).tokens.len() + live.expected.0.len()
        };
        let bound = self.live.iter().map(tokens).sum::<usize>() * self.live.len() + 1;
        for _ in 0..bound {
            if !self.step() {
                assert!(self.live.is_empty());
                assert_eq!(self.scheduler.pool().num_held(), 0);
                return;
            }
        }
        panic!("{} sequences are left after {bound} steps", self.live.len());
    }
}

fn config(seats: usize, budget: usize, num_blocks: usize) -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: seats,
        max_num_batched_tokens: budget,
        max_model_len: num_blocks * BLOCK,
        block_size: BLOCK,
        num_blocks,
    }
}

fn length(max_tokens: usize) -> StopRules {
    StopRules { max_tokens, ..Default::default() }
}

fn prompt(len: usize, seed: u64) -> Vec<u32> {
    let mut rng = Rng::new(seed);
    (0..len).map(|_| rng.below(VOCAB as usize) as u32).collect()
}

#[derive(Clone, Debug)]
enum Op {
    Add { len: usize, rules: StopRules },
    Step,
    Abort(prop::sample::Index),
}

fn op() -> impl Strategy<Value = Op> {
    let stops = prop::collection::btree_set(0..VOCAB as u32, 0..3);
    let rules = (1..14usize, 0..5usize, stops).prop_map(|(max_tokens, min_tokens, stops)| {
        StopRules { max_tokens, min_tokens, stop_token_ids: stops.into_iter().collect() }
    });
    prop_oneof![
        3 => (1..24usize, rules).prop_map(|(len, rules)| Op::Add { len, rules }),
        4 => Just(Op::Step),
        1 => any::<prop::sample::Index>().prop_map(Op::Abort),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_schedule_keeps_the_policy_and_gives_the_same_tokens(
        seats in 1..6usize,
        budget in 1..20usize,
        num_blocks in 5..14usize,
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let mut sim = Sim::new(config(seats, budget, num_blocks));
        let limit = num_blocks * BLOCK;
        let (mut num_added, mut num_aborted) = (0, 0);
        for (i, op) in ops.into_iter().enumerate() {
            match op {
                Op::Add { len, rules } => {
                    let fits = len + rules.max_tokens <= limit;
                    let added = sim.add(prompt(len, i as u64), rules).is_ok();
                    prop_assert_eq!(added, fits);
                    num_added += usize::from(added);
                }
                Op::Step => drop(sim.step()),
                Op::Abort(_) if sim.live.is_empty() => {}
                Op::Abort(at) => {
                    let id = *sim.live.keys().nth(at.index(sim.live.len())).expect("in range");
                    sim.abort(id);
                    num_aborted += 1;
                }
            }
        }
        sim.drain();
        prop_assert_eq!(sim.num_ended, num_added - num_aborted);
    }
}

/// The random runs above would prove little of preemption if they never preempted.
#[test]
fn a_pool_too_small_for_all_preempts_and_finishes() {
    let mut sim = Sim::new(config(8, 16, 6));
    for i in 0..8 {
        sim.add(prompt(6, i), length(12)).unwrap();
    }
    sim.drain();
    assert_eq!(sim.num_ended, 8);
    assert!(sim.scheduler.num_preemptions() > 0);
}

#[test]
fn a9_a_prompt_above_the_pool_is_refused_and_the_queue_moves() {
    let mut sim = Sim::new(config(4, 64, 10));
    let refused = sim.add(prompt(40, 1), length(1)).unwrap_err();
    assert_eq!(refused, AdmissionError::TooLong { prompt: 40, max_tokens: 1, limit: 40 });
    // All of the pool can be used: no block is kept back.
    sim.add(prompt(39, 2), length(1)).unwrap();
    sim.add(prompt(3, 3), length(2)).unwrap();
    sim.drain();
    assert_eq!(sim.num_ended, 2);
}

#[test]
fn a11_a_sequence_is_resumed_only_when_all_of_it_fits() {
    // 64 blocks; the first holds 40 of them, the second needs 60, and a step takes one block.
    let mut sim = Sim::new(config(4, BLOCK, 64));
    sim.add(prompt(39 * BLOCK, 1), length(BLOCK)).unwrap();
    while sim.scheduler.pool().num_held() < 40 {
        assert!(sim.step());
    }
    sim.add(prompt(59 * BLOCK, 2), length(BLOCK)).unwrap();
    while sim.num_ended == 0 {
        assert!(sim.step());
        assert_eq!(sim.scheduler.num_waiting(), 1);
    }
    sim.drain();
    assert_eq!((sim.num_ended, sim.scheduler.num_preemptions()), (2, 0));
}

#[test]
fn a14_the_limit_is_exact_and_refusals_name_true_numbers() {
    let limits = SchedulerConfig { max_model_len: 2048, ..config(2, 512, 512) };
    let mut sim = Sim::new(limits);
    sim.add(prompt(8, 1), length(2040)).unwrap();
    sim.add(prompt(2047, 2), length(1)).unwrap();
    for (len, max_tokens) in [(8, 2045), (2048, 1), (2048, 0), (1, usize::MAX)] {
        let error = sim.add(prompt(len, 3), length(max_tokens)).unwrap_err();
        let max_tokens = max_tokens.max(1);
        let limit = 2048;
        assert_eq!(error, AdmissionError::TooLong { prompt: len, max_tokens, limit });
    }
    let text = sim.add(prompt(8, 1), length(2045)).unwrap_err().to_string();
    for number in ["8 tokens", "2045", "2053", "2048"] {
        assert!(text.contains(number), "{text}");
    }
    assert_eq!(sim.add(Vec::new(), length(1)), Err(AdmissionError::EmptyPrompt));
    assert_eq!(sim.live.len(), 2);
}

#[test]
fn a17_a_preempted_sequence_comes_before_newcomers() {
    let mut sim = Sim::new(config(2, 64, 8));
    let first = sim.add(prompt(12, 1), length(20)).unwrap();
    let second = sim.add(prompt(12, 2), length(16)).unwrap();
    let newcomer = sim.add(prompt(1, 3), length(1)).unwrap();
    while sim.scheduler.num_preemptions() == 0 {
        assert!(sim.step());
    }
    assert_eq!(sim.plan.preempted, [second]);
    // The newcomer would fit at once, and there is a seat; it waits for its turn all the same.
    while sim.live.contains_key(&first) {
        assert!(sim.step());
        assert!(!sim.live[&newcomer].running || sim.live[&second].running);
    }
    sim.drain();
    assert_eq!(sim.num_ended, 3);
}

#[test]
fn a17_one_seat_serves_in_order_of_arrival() {
    let mut sim = Sim::new(config(1, 8, 8));
    let ids: Vec<SeqId> = (0..3).map(|i| sim.add(prompt(5, i), length(3)).unwrap()).collect();
    for (turn, id) in ids.into_iter().enumerate() {
        while sim.num_ended == turn {
            assert!(sim.step());
            assert_eq!(sim.plan.scheduled[0].id, id);
        }
    }
    assert!(!sim.step());
}
