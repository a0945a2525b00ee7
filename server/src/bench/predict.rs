//! How long a run should take: the schedule of its requests, replayed without a model, and the
//! sum of the times that a measured [`StepModel`] gives its steps.
//!
//! The schedule is the ideal one of the policy, not that of the engine's scheduler, so that time
//! the scheduler loses shows as a difference. It knows no prefix cache.

use serde::Serialize;
use std::collections::VecDeque;

/// A request as far as its schedule goes.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// When it arrives, in seconds.
    pub arrival_s: f64,
    /// Tokens of the prompt, at least 1.
    pub prompt: usize,
    /// Tokens of the output, at least 1.
    pub output: usize,
}

/// What the schedule keeps to.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Sequences in a step.
    pub seats: usize,
    /// Tokens in a step.
    pub budget: usize,
    /// Tokens of a block.
    pub block_size: usize,
    /// Blocks in the pool; one sequence always fits.
    pub num_blocks: usize,
    /// Static batching: blocks that every sequence reserves. `None`: continuous batching.
    pub reserved_blocks: Option<usize>,
}

/// What a step computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StepWork {
    /// Tokens, padding included.
    pub tokens: usize,
    /// Rows of logits, padding included.
    pub rows: usize,
    /// Keys read by all sequences with one token.
    pub decode_keys: usize,
    /// Pairs of query and key of all sequences with more.
    pub prefill_pairs: usize,
}

impl StepWork {
    fn add(&mut self, start: usize, tokens: usize, samples: bool) {
        self.tokens += tokens;
        self.rows += usize::from(samples);
        if tokens == 1 {
            self.decode_keys += start + 1;
        } else {
            self.prefill_pairs += tokens * start + tokens * tokens / 2;
        }
    }
}

/// The time of a step, by measured points.
#[derive(Clone, Debug, Default, Serialize)]
pub struct StepModel {
    /// Tokens → seconds of a step with one row of logits, without attention; ascending.
    pub body: Vec<(usize, f64)>,
    /// Rows → seconds that the rows after the first add; ascending.
    pub rows: Vec<(usize, f64)>,
    /// Seconds for a key that a decode reads.
    pub decode_key_s: f64,
    /// Seconds for a pair of query and key of a prompt.
    pub prefill_pair_s: f64,
}

impl StepModel {
    /// Seconds of a step.
    pub fn seconds(&self, work: &StepWork) -> f64 {
        interpolate(&self.body, work.tokens)
            + interpolate(&self.rows, work.rows)
            + work.decode_keys as f64 * self.decode_key_s
            + work.prefill_pairs as f64 * self.prefill_pair_s
    }
}

/// The value at `x` on the line through the points around it; beyond the ends, through the last
/// two.
pub fn interpolate(points: &[(usize, f64)], x: usize) -> f64 {
    let (first, last) = match points {
        [] => return 0.0,
        [only] => return only.1,
        _ => {
            let after = points.partition_point(|point| point.0 < x).clamp(1, points.len() - 1);
            (points[after - 1], points[after])
        }
    };
    let slope = (last.1 - first.1) / (last.0 - first.0) as f64;
    first.1 + slope * (x as f64 - first.0 as f64)
}

/// A schedule and how long it takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Schedule {
    /// From the first arrival to the last token.
    pub duration_s: f64,
    /// Steps.
    pub num_steps: usize,
    /// Sequences that gave up their blocks.
    pub num_preemptions: usize,
}

/// Replays `requests`, which are in order of arrival; `seconds` is the time of a step.
pub fn replay(requests: &[Shape], limits: &Limits, seconds: impl Fn(&StepWork) -> f64) -> Schedule {
    let mut replay = Replay {
        limits: *limits,
        waiting: requests.iter().map(Seq::new).collect(),
        running: Vec::new(),
        schedule: Schedule::default(),
        seconds,
    };
    match limits.reserved_blocks {
        Some(blocks) => replay.run_static((limits.num_blocks / blocks).clamp(1, limits.seats)),
        None => replay.run_continuous(),
    }
    replay.schedule
}

/// A sequence of the replay.
#[derive(Clone, Copy, Debug)]
struct Seq {
    shape: Shape,
    generated: usize,
    computed: usize,
}

impl Seq {
    fn new(shape: &Shape) -> Self {
        Seq { shape: *shape, generated: 0, computed: 0 }
    }

    fn num_tokens(&self) -> usize {
        self.shape.prompt + self.generated
    }

    fn num_uncomputed(&self) -> usize {
        self.num_tokens() - self.computed
    }

    /// Computes up to `budget` tokens, and takes a new one where those were the last.
    fn compute(&mut self, budget: &mut usize, work: &mut StepWork) {
        let tokens = self.num_uncomputed().min(*budget);
        if tokens == 0 {
            return;
        }
        *budget -= tokens;
        let samples = tokens == self.num_uncomputed();
        work.add(self.computed, tokens, samples);
        self.computed += tokens;
        self.generated += usize::from(samples);
    }

    fn is_done(&self) -> bool {
        self.generated >= self.shape.output
    }
}

struct Replay<F> {
    limits: Limits,
    /// In order of arrival.
    waiting: VecDeque<Seq>,
    /// In order of arrival.
    running: Vec<Seq>,
    schedule: Schedule,
    seconds: F,
}

impl<F: Fn(&StepWork) -> f64> Replay<F> {
    fn step(&mut self, work: &StepWork) {
        self.schedule.num_steps += 1;
        self.schedule.duration_s += (self.seconds)(work);
    }

    fn has_arrived(&self) -> bool {
        let first = self.waiting.front();
        first.is_some_and(|seq| seq.shape.arrival_s <= self.schedule.duration_s)
    }

    /// Goes on to the next arrival; false: there is none.
    fn wait(&mut self) -> bool {
        let next = self.waiting.front().map(|seq| seq.shape.arrival_s);
        self.schedule.duration_s = self.schedule.duration_s.max(next.unwrap_or(0.0));
        next.is_some()
    }

    fn blocks(&self, seq: &Seq) -> usize {
        seq.num_tokens().div_ceil(self.limits.block_size)
    }

    fn free_blocks(&self) -> Option<usize> {
        let held = self.running.iter().map(|seq| self.blocks(seq)).sum();
        self.limits.num_blocks.checked_sub(held)
    }

    /// Seats are refilled as they become free.
    fn run_continuous(&mut self) {
        while !self.running.is_empty() || self.wait() {
            let mut short = false;
            while self.running.len() > 1 && self.free_blocks().is_none() {
                let mut seq = self.running.pop().expect("more than one");
                seq.computed = 0;
                self.waiting.push_front(seq);
                self.schedule.num_preemptions += 1;
                short = true;
            }
            let (mut work, mut budget) = (StepWork::default(), self.limits.budget);
            // Those that have one token to compute come first.
            let fresh: Vec<bool> =
                self.running.iter().map(|seq| seq.num_uncomputed() > 1).collect();
            for kind in [false, true] {
                for (seq, _) in self.running.iter_mut().zip(&fresh).filter(|(_, f)| **f == kind) {
                    seq.compute(&mut budget, &mut work);
                }
            }
            while !short && budget > 0 && self.running.len() < self.limits.seats {
                let free = self.free_blocks().unwrap_or(0);
                let fits = |seq: &Seq| self.running.is_empty() || self.blocks(seq) <= free;
                if !self.has_arrived() || !self.waiting.front().is_some_and(fits) {
                    break;
                }
                let mut seq = self.waiting.pop_front().expect("seen");
                seq.compute(&mut budget, &mut work);
                self.running.push(seq);
            }
            self.step(&work);
            self.running.retain(|seq| !seq.is_done());
        }
    }

    /// A batch is taken when the one before has ended; prompts are padded to the longest, and
    /// rows that have ended go on until the last one has.
    fn run_static(&mut self, seats: usize) {
        while self.wait() {
            while self.running.len() < seats && self.has_arrived() {
                self.running.extend(self.waiting.pop_front());
            }
            let rows = self.running.len();
            let longest = self.running.iter().map(|seq| seq.shape.prompt).max().unwrap_or(0);
            let mut padding: usize = self.running.iter().map(|s| longest - s.shape.prompt).sum();
            while padding > 0 || self.running.iter().any(|seq| seq.computed < seq.shape.prompt) {
                let (mut work, mut budget) = (StepWork::default(), self.limits.budget);
                for seq in self.running.iter_mut().filter(|seq| seq.computed < seq.shape.prompt) {
                    seq.compute(&mut budget, &mut work);
                }
                let padded = padding.min(budget);
                padding -= padded;
                if padded > 0 {
                    work.add(0, padded, false);
                }
                self.step(&work);
            }
            self.running.retain(|seq| !seq.is_done());
            while !self.running.is_empty() {
                let (mut work, mut budget) = (StepWork::default(), self.limits.budget);
                for seq in &mut self.running {
                    seq.compute(&mut budget, &mut work);
                }
                for _ in self.running.len()..rows {
                    work.add(0, 1, true);
                }
                self.step(&work);
                self.running.retain(|seq| !seq.is_done());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shapes(lens: &[(usize, usize)]) -> Vec<Shape> {
        let shape = |&(prompt, output)| Shape { arrival_s: 0.0, prompt, output };
        lens.iter().map(shape).collect()
    }

    const ROOMY: Limits =
        Limits { seats: 2, budget: 100, block_size: 4, num_blocks: 100, reserved_blocks: None };

    /// Steps, and all tokens computed.
    fn run(lens: &[(usize, usize)], limits: &Limits) -> (usize, usize) {
        let tokens = std::cell::Cell::new(0);
        let schedule = replay(&shapes(lens), limits, |work| {
            tokens.set(tokens.get() + work.tokens);
            1.0
        });
        assert_eq!(schedule.duration_s, schedule.num_steps as f64);
        (schedule.num_steps, tokens.get())
    }

    #[test]
    fn continuous_batching_refills_a_seat_at_once() {
        // Seat 1: 4 steps. Seat 2: 1 step, then the third request for 3.
        let lens = [(5, 4), (5, 1), (5, 3)];
        assert_eq!(run(&lens, &ROOMY), (4, 5 + 3 + 5 + 5 + 2));
    }

    #[test]
    fn static_batching_waits_for_the_slowest_and_pads() {
        let fixed = Limits { reserved_blocks: Some(10), ..ROOMY };
        // (5, 4) and (3, 1): 2 × 5 prompt tokens, 3 more steps of 2 rows; then (5, 3) alone.
        let lens = [(5, 4), (3, 1), (5, 3)];
        assert_eq!(run(&lens, &fixed), (4 + 3, 10 + 6 + 5 + 2));
        // The pool has room for one reservation.
        let tight = Limits { num_blocks: 19, ..fixed };
        assert_eq!(run(&lens, &tight), (4 + 1 + 3, (5 + 3) + 3 + (5 + 2)));
    }

    #[test]
    fn prompts_are_cut_to_the_budget_after_the_decodes() {
        // Step 1: 4 of the first's 5. Step 2: 1, and 3 of the second's 5. Step 3: a decode, and
        // the last 2. Step 4: the second token of the second.
        let small = Limits { budget: 4, ..ROOMY };
        let mut works = Vec::new();
        let log = std::cell::RefCell::new(&mut works);
        replay(&shapes(&[(5, 2), (5, 2)]), &small, |work| {
            log.borrow_mut().push((work.tokens, work.rows, work.decode_keys, work.prefill_pairs));
            1.0
        });
        assert_eq!(works, [(4, 0, 0, 8), (4, 1, 5, 4), (3, 2, 6, 8), (1, 1, 6, 0)]);
    }

    #[test]
    fn short_of_blocks_the_last_one_is_computed_anew() {
        // Two sequences of 4 tokens fill 2 blocks; their next token takes a third and a fourth.
        let tight = Limits { num_blocks: 3, ..ROOMY };
        let schedule = replay(&shapes(&[(4, 3), (4, 3)]), &tight, |_| 1.0);
        // Both prompts; the first alone, twice; then the second again with its 5 tokens, and one.
        assert_eq!((schedule.num_steps, schedule.num_preemptions), (5, 1));
    }

    #[test]
    fn an_idle_engine_waits_for_the_next_arrival() {
        let mut late = shapes(&[(5, 2), (5, 1)]);
        late[1].arrival_s = 10.0;
        for reserved_blocks in [None, Some(10)] {
            let limits = Limits { reserved_blocks, ..ROOMY };
            assert_eq!(replay(&late, &limits, |_| 1.0).duration_s, 11.0);
        }
    }

    #[test]
    fn step_times_lie_on_lines_through_the_points() {
        let points = [(1, 1.0), (2, 3.0), (4, 4.0)];
        for (x, y) in [(1, 1.0), (2, 3.0), (3, 3.5), (4, 4.0), (8, 6.0), (0, -1.0)] {
            assert_eq!(interpolate(&points, x), y, "{x}");
        }
        assert_eq!((interpolate(&[], 3), interpolate(&[(5, 2.0)], 3)), (0.0, 2.0));
        let model = StepModel {
            body: points.to_vec(),
            rows: vec![(1, 0.0), (3, 2.0)],
            decode_key_s: 0.5,
            prefill_pair_s: 0.25,
        };
        let work = StepWork { tokens: 3, rows: 2, decode_keys: 4, prefill_pairs: 8 };
        assert_eq!(model.seconds(&work), 3.5 + 1.0 + 2.0 + 2.0);
    }
}
