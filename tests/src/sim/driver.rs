//! Drives the scheduler: requests come, steps are planned, computed, and fail; every result is
//! compared with what the request gives alone.

use super::device::{Device, Failure, Work};
use super::fake::{self, History};
use super::ops::{self, Op, PromptSpec, PromptStart, SimConfig};
use super::policy::Before;
use super::totals::Totals;
use quire_engine::scheduler::{
    AdmissionError, FinishReason, NewSequence, Policy, Scheduler, SchedulerConfig, SeqId, StepPlan,
    StopRules,
};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::Rc;

/// A place in the queue: smaller comes first.
pub type Order = (i64, u64);

/// A live sequence.
#[derive(Clone, Debug)]
pub struct Live {
    /// The request it belongs to.
    pub request: u64,
    /// Its place among all that ever came.
    pub order: Order,
    /// Smaller is more urgent.
    pub priority: i32,
    /// Of a sample: its seed, and what it must give.
    expected: Option<(u64, Vec<u32>, FinishReason)>,
    needs_history: bool,
}

/// A live request.
#[derive(Clone, Debug)]
struct Request {
    ids: Vec<SeqId>,
    prompt: Vec<u32>,
    salt: Option<String>,
    max_tokens: usize,
    /// What it has where it has beams.
    beams: Option<Beams>,
}

/// The beams of a request.
#[derive(Clone, Debug)]
struct Beams {
    width: usize,
    /// What there is of results for the next comparison.
    results: HashMap<SeqId, u64>,
    /// The beams there should be.
    expected: Vec<History>,
}

impl Request {
    /// Sequences that it may have at a time.
    fn num_seqs(&self) -> usize {
        self.beams.as_ref().map_or(self.ids.len(), |beams| beams.width)
    }
}

/// A scheduler with the fake device.
pub struct Sim {
    config: SimConfig,
    /// The scheduler under test.
    pub scheduler: Scheduler,
    device: Device,
    plan: StepPlan,
    in_flight: VecDeque<(StepPlan, Work)>,
    /// Live sequences.
    pub live: BTreeMap<SeqId, Live>,
    requests: BTreeMap<u64, Request>,
    /// True histories, those of sequences that ended while a step computes them included.
    histories: HashMap<SeqId, History>,
    /// Conversations that have ended, with their salt.
    ended: Vec<(Vec<u32>, Option<String>)>,
    next_arrival: u64,
    last_step: u64,
    /// What happened, in numbers.
    pub totals: Totals,
    /// What happened, in words, for those who ask.
    pub log: Option<Log>,
}

/// Lines that outlive a simulation that fails.
pub type Log = Rc<RefCell<Vec<String>>>;

impl Sim {
    /// An idle one.
    pub fn new(config: SimConfig) -> Self {
        let scheduler = Scheduler::new(config.scheduler.clone());
        Sim {
            device: Device::new(&scheduler),
            scheduler,
            config,
            plan: StepPlan::default(),
            in_flight: VecDeque::new(),
            live: BTreeMap::new(),
            requests: BTreeMap::new(),
            histories: HashMap::new(),
            ended: Vec::new(),
            next_arrival: 0,
            last_step: 0,
            totals: Totals::default(),
            log: None,
        }
    }

    /// An idle one with these limits that plans `run_ahead` steps ahead.
    pub fn with_limits(scheduler: SchedulerConfig, run_ahead: usize) -> Self {
        Sim::new(SimConfig { scheduler, run_ahead, vocab: 24, tree: 0 })
    }

    /// The plan that was made last.
    pub fn plan(&self) -> &StepPlan {
        &self.plan
    }

    /// Whether `id` is one of several beams, or to become so.
    pub fn is_beam(&self, id: SeqId) -> bool {
        self.live[&id].expected.is_none()
    }

    /// Seats that the request of `id` takes when it is admitted.
    pub fn seats(&self, id: SeqId) -> usize {
        self.requests[&self.live[&id].request].beams.as_ref().map_or(1, |b| b.width)
    }

    /// Seats that nobody holds.
    pub fn num_free_seats(&self) -> usize {
        let running = |id: &SeqId| self.scheduler.is_running(*id);
        let seats = |request: &Request| match &request.beams {
            Some(beams) if running(&request.ids[0]) => beams.width,
            Some(_) => 0,
            None => request.ids.iter().filter(|id| running(id)).count(),
        };
        let held: usize = self.requests.values().map(seats).sum();
        self.scheduler.config().max_num_seqs.checked_sub(held).expect("more seats than there are")
    }

    /// Tokens of `id` that could be computed, as far as one can see from outside.
    pub fn uncomputed(&self, id: SeqId) -> usize {
        let (seq, live) = (self.scheduler.sequence(id), &self.live[&id]);
        let num_pending = seq.num_tokens() - seq.tokens.len();
        let last = seq.num_tokens() - seq.prompt_len >= seq.rules.max_tokens.max(1);
        let blocked = num_pending > 0 && (live.needs_history || last);
        if blocked { 0 } else { seq.num_tokens() - seq.num_computed_tokens }
    }

    /// Tokens that the plan made last samples for `id`.
    pub fn samples(&self, id: SeqId) -> usize {
        self.plan.scheduled.iter().filter(|s| s.id == id && s.samples).count()
    }

    /// Ids of a live request.
    pub fn ids(&self, request: u64) -> &[SeqId] {
        self.requests.get(&request).map_or(&[], |r| &r.ids)
    }

    /// Does one operation.
    pub fn apply(&mut self, op: &Op) {
        self.tell(|_| format!("{op:?}"));
        match op {
            Op::Add { .. } => self.apply_add(op),
            Op::Step => drop(self.step()),
            Op::Plan => {
                self.schedule();
            }
            Op::Compute => self.compute(),
            Op::Fail(how) => self.fail(*how),
            Op::Abort(at) => {
                if let Some(request) = nth(self.requests.keys(), *at) {
                    self.abort(request);
                }
            }
            Op::AbortSample(at) => self.abort_sample(*at),
            Op::ResetCache => self.scheduler.reset_prefix_cache(),
            Op::Budget(tokens) => self.scheduler.set_max_num_batched_tokens(*tokens),
        }
        self.scheduler.check_integrity();
    }

    fn apply_add(&mut self, op: &Op) {
        let Op::Add { prompt, uncut, rules, n, beams, priority, salt, skip_cache, needs_history } =
            op
        else {
            unreachable!("an addition");
        };
        let (mut prompt, salt) = self.prompt(prompt, salt.clone());
        let limit = self.scheduler.config().max_model_len;
        let mut rules = rules.clone();
        if !uncut {
            prompt.truncate(limit - 1);
            rules.max_tokens = rules.max_tokens.min(limit - prompt.len());
        }
        let new = NewSequence {
            prompt,
            rules,
            priority: *priority,
            cache_salt: salt,
            skip_cache: *skip_cache,
            needs_history: *needs_history,
        };
        let refused =
            if *beams { self.add_beams(new, *n).is_err() } else { self.add(new, *n).is_err() };
        self.totals.refused += u64::from(refused);
    }

    fn prompt(&self, spec: &PromptSpec, salt: Option<String>) -> (Vec<u32>, Option<String>) {
        let (mut tokens, salt) = match &spec.start {
            PromptStart::FollowUp(at) if !self.ended.is_empty() => {
                self.ended[at % self.ended.len()].clone()
            }
            PromptStart::FollowUp(_) => (ops::tree_tokens(&self.config, &[]), salt),
            PromptStart::Path(path) => (ops::tree_tokens(&self.config, path), salt),
        };
        tokens.extend(ops::more_tokens(&self.config, spec.more));
        (tokens, salt)
    }

    /// Adds samples; refused where, and only where, they may not fit.
    pub fn add(&mut self, new: NewSequence, n: usize) -> Result<u64, AdmissionError> {
        let config = self.scheduler.config();
        let length = new.prompt.len().saturating_add(new.rules.max_tokens.max(1));
        let fits = !new.prompt.is_empty() && length <= config.max_model_len;
        let added = self.scheduler.add(new.clone(), n);
        assert_eq!(added.is_ok(), fits, "{length} tokens");
        let ids = added?;
        assert_eq!(ids.len(), n);
        Ok(self.track(&new, ids, None))
    }

    /// Adds a request with beams.
    pub fn add_beams(&mut self, new: NewSequence, width: usize) -> Result<u64, AdmissionError> {
        let id = self.scheduler.add_beams(new.clone(), width)?;
        Ok(self.track(&new, vec![id], Some(width)))
    }

    fn track(&mut self, new: &NewSequence, ids: Vec<SeqId>, width: Option<usize>) -> u64 {
        let request = self.next_arrival;
        let history = History::new(new.cache_salt.as_deref(), &new.prompt);
        for (i, &id) in ids.iter().enumerate() {
            let key = match self.scheduler.config().policy {
                Policy::Priority { aging_steps } => {
                    i64::from(new.priority) * i64::from(aging_steps) + self.last_step as i64
                }
                Policy::Fcfs | Policy::Static => 0,
            };
            let order = (key, self.next_arrival);
            self.next_arrival += 1;
            let expected = width.is_none().then(|| {
                let seed = i as u64;
                let (output, reason) =
                    fake::alone(history.clone(), &new.rules, seed, self.config.vocab);
                (seed, output, reason)
            });
            let needs_history = new.needs_history || width.is_some();
            let mut history = history.clone();
            history.sample_seed = expected.as_ref().map(|e| e.0);
            let live = Live { request, order, priority: new.priority, expected, needs_history };
            assert!(self.live.insert(id, live).is_none(), "{id:?} was given twice");
            self.totals.started += 1;
            assert!(self.histories.insert(id, history).is_none(), "{id:?} lived before");
        }
        let beams =
            width.map(|width| Beams { width, results: HashMap::new(), expected: vec![history] });
        let NewSequence { prompt, cache_salt: salt, rules, .. } = new.clone();
        let request_state = Request { ids, prompt, salt, max_tokens: rules.max_tokens, beams };
        self.requests.insert(request, request_state);
        self.totals.requests += 1;
        request
    }

    /// Plans a step, if one may be; whether it is under way.
    pub fn schedule(&mut self) -> bool {
        if self.in_flight.len() > self.config.run_ahead {
            return false;
        }
        let before = Before::new(self);
        let mut plan = std::mem::take(&mut self.plan);
        self.scheduler.schedule(&mut plan);
        self.plan = plan;
        self.tell(|sim| sim.describe_plan());
        self.scheduler.check_integrity();
        before.check(self);
        self.check_rows();
        let plan = &self.plan;
        if plan.is_empty() {
            assert!(plan.scheduled.is_empty());
            return false;
        }
        assert_eq!(plan.step, self.last_step + 1, "steps are numbered");
        self.last_step = plan.step;
        self.totals.steps += 1;
        self.totals.tokens += plan.num_tokens() as u64;
        self.in_flight.push_back((plan.clone(), Work::new(plan, &self.scheduler)));
        true
    }

    fn tell(&self, what: impl Fn(&Self) -> String) {
        if let Some(log) = &self.log {
            log.borrow_mut().push(what(self));
        }
    }

    fn describe_plan(&self) -> String {
        let StepPlan { step, scheduled, transfers, preempted, num_padding_tokens, .. } = &self.plan;
        let mut text = format!("step {step}:");
        for s in scheduled {
            let (end, table) =
                (s.start + s.num_scheduled_tokens, &self.scheduler.sequence(s.id).table);
            let blocks: Vec<u32> = table.blocks().iter().map(|b| b.0).collect();
            text += &format!(" [{:?}: {}..{end}, writes from {}", s.id, s.start, s.write_from);
            text += &format!(", samples {}, {} freed, {blocks:?}]", s.samples, table.num_freed());
        }
        if !transfers.is_empty() {
            text += &format!(" {transfers:?}");
        }
        text + &format!(" preempted {preempted:?} padding {num_padding_tokens}")
    }

    /// What a row says agrees with its sequence.
    fn check_rows(&self) {
        for s in &self.plan.scheduled {
            let (seq, live) = (self.scheduler.sequence(s.id), &self.live[&s.id]);
            let end = s.start + s.num_scheduled_tokens;
            assert!(s.num_scheduled_tokens >= 1, "an empty row");
            let pending_before = seq.num_tokens() - seq.tokens.len() - usize::from(s.samples);
            assert_eq!(s.samples, end == seq.tokens.len() + pending_before, "{s:?}");
            assert!(s.write_from >= s.start && s.write_from <= end, "{s:?}");
            assert!(!live.needs_history || end <= seq.tokens.len(), "{s:?} needs its history");
            if s.samples {
                let generated = end - seq.prompt_len;
                assert!(generated < seq.rules.max_tokens.max(1), "{s:?} samples too much");
            }
        }
    }

    /// Plans a step, and computes as far as the depth of run-ahead demands; whether there was
    /// something to plan.
    pub fn step(&mut self) -> bool {
        let planned = self.schedule();
        if !planned || self.in_flight.len() > self.config.run_ahead {
            self.compute();
        }
        planned
    }

    /// Computes the oldest step under way.
    pub fn compute(&mut self) {
        let Some((plan, work)) = self.in_flight.pop_front() else { return };
        self.tell(|_| format!("compute step {}", plan.step));
        self.device.execute(&work, &self.histories);
        let mut sampled = Vec::new();
        for s in plan.scheduled.iter().filter(|s| s.samples) {
            let end = s.start + s.num_scheduled_tokens;
            sampled.push(self.sample(s.id, end));
        }
        let mut finished = Vec::new();
        self.scheduler.update(&plan, sampled, &mut finished);
        self.scheduler.check_integrity();
        for (id, reason) in finished {
            self.finish(id, Some(reason));
        }
        let requests = plan.scheduled.iter().filter(|s| s.samples);
        let mut requests: Vec<u64> =
            requests.filter_map(|s| Some(self.live.get(&s.id)?.request)).collect();
        requests.dedup();
        for request in requests {
            self.advance(request);
        }
        if self.in_flight.is_empty() {
            self.histories.retain(|id, _| self.live.contains_key(id));
        }
        self.scheduler.check_integrity();
    }

    /// The token after the first `end` of `id`; with beams, the hash is kept.
    fn sample(&mut self, id: SeqId, end: usize) -> u32 {
        let history = self.histories.get_mut(&id).expect("kept while steps are under way");
        let hash = history.hash(end - 1);
        if let Some(seed) = history.sample_seed {
            let token = fake::next_token(hash, seed, self.config.vocab);
            if history.len() == end {
                history.push(token);
            }
            return token;
        }
        if let Some(live) = self.live.get(&id) {
            let request = self.requests.get_mut(&live.request).expect("live");
            request.beams.as_mut().expect("beams").results.insert(id, hash);
        }
        0
    }

    /// Goes on with the beams of `request` once all were sampled.
    fn advance(&mut self, request: u64) {
        let Some(state) = self.requests.get_mut(&request) else { return };
        let Some(Beams { width, results, expected }) = &mut state.beams else { return };
        let first = state.ids[0];
        assert_eq!(self.scheduler.beams_of(first), state.ids);
        if !self.scheduler.beams_are_parked(first) {
            return;
        }
        let hash = |id| *results.get(id).unwrap_or_else(|| panic!("{id:?} is parked unsampled"));
        let hashes: Vec<u64> = state.ids.iter().map(hash).collect();
        let alone: Vec<u64> = expected.iter().map(|h| h.hash(h.len() - 1)).collect();
        assert_eq!(hashes, alone, "beams differ from those alone");
        results.clear();
        let generated = expected[0].len() - state.prompt.len();
        let vocab = self.config.vocab;
        let next = fake::continue_beams(&hashes, generated, state.max_tokens, *width, vocab);
        let Some(next) = next else {
            self.end(request);
            return;
        };
        let beams = next.iter().map(|&(parent, token)| {
            let mut history = expected[parent].clone();
            history.push(token);
            history
        });
        *expected = beams.collect();
        let ids = self.scheduler.advance_beams(first, &next);
        assert_eq!(ids.len(), next.len());
        let template = self.live[&first].clone();
        for &id in state.ids.iter().skip(ids.len()) {
            self.live.remove(&id);
            self.totals.dropped += 1;
        }
        for (&id, history) in ids.iter().zip(expected.iter()) {
            assert_eq!(self.scheduler.sequence(id).tokens, history.tokens());
            self.histories.insert(id, history.clone());
            let is_new = self.live.insert(id, template.clone()).is_none();
            self.totals.started += u64::from(is_new);
        }
        state.ids = ids;
        self.totals.beams_advanced += 1;
        self.tell(|sim| format!("beams {:?} by {next:?}", sim.ids(request)));
        self.scheduler.check_integrity();
    }

    /// Ends a request as a whole.
    pub fn abort(&mut self, request: u64) {
        self.totals.aborted += 1;
        self.end(request);
    }

    fn end(&mut self, request: u64) {
        for id in self.requests[&request].ids.clone() {
            self.finish(id, None);
        }
    }

    fn abort_sample(&mut self, at: usize) {
        let samples = self.live.iter().filter(|(_, live)| live.expected.is_some());
        if let Some(id) = nth(samples.map(|(id, _)| id), at) {
            self.totals.aborted += 1;
            self.finish(id, None);
        }
    }

    /// Ends a sequence. With a reason: it must have given what it gives alone.
    fn finish(&mut self, id: SeqId, reason: Option<FinishReason>) {
        let live = self.live.remove(&id).expect("every sequence ends once");
        let seq = self.scheduler.finish(id);
        assert!(!self.scheduler.is_live(id));
        self.scheduler.check_integrity();
        if let Some((_, output, expected)) = &live.expected {
            assert!(output.starts_with(seq.output()), "{id:?}: {:?}, not {output:?}", seq.output());
            if let Some(reason) = reason {
                assert_eq!((seq.output(), reason), (&output[..], *expected), "{id:?}");
            }
        }
        self.totals.ended += 1;
        let request = self.requests.get_mut(&live.request).expect("live");
        request.ids.retain(|&i| i != id);
        self.ended.push((seq.tokens, request.salt.clone()));
        if request.ids.is_empty() {
            self.requests.remove(&live.request);
        }
    }

    /// The oldest step under way fails, and with it those after it.
    pub fn fail(&mut self, how: Failure) {
        if let Some((_, work)) = self.in_flight.front() {
            self.device.fail(work, how);
        }
        self.in_flight.clear();
        self.scheduler.cancel();
        for (&id, history) in &mut self.histories {
            if self.live.contains_key(&id) {
                history.truncate(self.scheduler.sequence(id).tokens.len());
            }
        }
        self.histories.retain(|id, _| self.live.contains_key(id));
    }

    /// Without faults, all that is there must end within a number of steps: twice those of
    /// computing every sequence anew for each of the others, a token at a time.
    pub fn drain(&mut self) {
        let tokens =
            |request: &Request| (request.prompt.len() + request.max_tokens) * request.num_seqs();
        let live: usize = self.requests.values().map(Request::num_seqs).sum();
        let bound = 2 * (self.requests.values().map(tokens).sum::<usize>() + 1) * (live + 1);
        for steps in 0..bound {
            if self.live.is_empty() {
                self.totals.worst_drain = self.totals.worst_drain.max(100 * steps / bound);
                return;
            }
            self.step();
            self.scheduler.check_integrity();
        }
        panic!("{} sequences are left after {bound} steps", self.live.len());
    }

    /// With nothing left, everything is back.
    pub fn check_idle(&mut self) {
        assert!(self.live.is_empty());
        while !self.in_flight.is_empty() {
            self.compute();
        }
        self.scheduler.check_integrity();
        let usage = self.scheduler.kv_usage();
        assert_eq!(self.scheduler.pool().num_held(), 0, "blocks are missing");
        assert_eq!((usage.num_held, usage.num_in_transit, usage.num_swapped), (0, 0, 0));
        assert_eq!((self.scheduler.num_waiting(), self.scheduler.num_running()), (0, 0));
        assert!(!self.schedule(), "a step of nothing");
        assert_eq!(self.totals.ended + self.totals.dropped, self.totals.started);
        self.totals.add_scheduler(&self.scheduler);
    }
}

fn nth<'a, T: Copy + 'a>(items: impl Iterator<Item = &'a T>, at: usize) -> Option<T> {
    let items: Vec<T> = items.copied().collect();
    (!items.is_empty()).then(|| items[at % items.len()])
}

/// Rules that end after `max_tokens`.
pub fn length(max_tokens: usize) -> StopRules {
    StopRules { max_tokens, ..Default::default() }
}
