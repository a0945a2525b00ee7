//! What the scheduler's documentation says of a plan, checked from outside.

use super::driver::{Order, Sim};
use quire_engine::kv::BlockId;
use quire_engine::scheduler::{Policy, SeqId, Sequence};
use std::collections::{BTreeMap, HashSet};

/// A sequence before a plan was made.
struct Was {
    order: Order,
    running: bool,
    queued: bool,
    num_computed: usize,
    /// Tokens that could be computed.
    uncomputed: usize,
    blocks: Vec<BlockId>,
    num_entries: usize,
}

/// Everything before a plan was made.
pub struct Before {
    seqs: BTreeMap<SeqId, Was>,
    in_transit: bool,
}

impl Before {
    /// The state now.
    pub fn new(sim: &Sim) -> Self {
        let was = |&id: &SeqId| {
            let seq = sim.scheduler.sequence(id);
            let was = Was {
                order: sim.live[&id].order,
                running: sim.scheduler.is_running(id),
                queued: sim.scheduler.is_queued(id),
                num_computed: seq.num_computed_tokens,
                uncomputed: sim.uncomputed(id),
                blocks: seq.table.blocks().to_vec(),
                num_entries: seq.table.len(),
            };
            (id, was)
        };
        Before {
            seqs: sim.live.keys().map(was).collect(),
            in_transit: sim.scheduler.kv_usage().num_in_transit > 0,
        }
    }

    /// Checks the plan that was made.
    pub fn check(&self, sim: &Sim) {
        let (plan, config) = (sim.plan(), sim.scheduler.config());
        let computed = plan.num_tokens() + plan.num_padding_tokens;
        assert!(computed <= config.max_num_batched_tokens, "over budget");
        assert!(plan.scheduled.len() <= config.max_num_seqs, "over the seats");
        let ids: HashSet<SeqId> = plan.scheduled.iter().map(|s| s.id).collect();
        assert_eq!(ids.len(), plan.scheduled.len(), "scheduled twice");
        for s in &plan.scheduled {
            let was = &self.seqs[&s.id];
            assert!(sim.scheduler.is_running(s.id), "{:?} is planned without a seat", s.id);
            assert!(!was.running || s.start == was.num_computed, "{:?} skips tokens", s.id);
        }
        if config.policy == Policy::Static {
            let batch_is_open = self.seqs.values().any(|w| w.running);
            let admitted = self.admitted(sim);
            assert!(!batch_is_open || admitted.is_empty(), "the batch was not over");
            assert!(plan.preempted.is_empty());
            return;
        }
        self.check_victims(sim);
        self.check_swaps(sim);
        self.check_order(sim);
        self.check_admission(sim);
        self.check_no_waste(sim);
    }

    fn by_order(&self, which: impl Fn(&SeqId, &Was) -> bool) -> Vec<SeqId> {
        let matching = self.seqs.iter().filter(|(id, was)| which(id, was));
        let mut ids: Vec<SeqId> = matching.map(|(&id, _)| id).collect();
        ids.sort_by_key(|id| (self.seqs[id].order, *id));
        ids
    }

    fn admitted(&self, sim: &Sim) -> Vec<SeqId> {
        let preempted = |id: &SeqId| sim.plan().preempted.iter().any(|(p, _)| p == id);
        self.by_order(|id, was| sim.scheduler.is_running(*id) && (!was.running || preempted(id)))
    }

    /// The victims are the last of the running, and somebody needed what they gave.
    fn check_victims(&self, sim: &Sim) {
        let victims: HashSet<SeqId> = sim.plan().preempted.iter().map(|p| p.0).collect();
        if victims.is_empty() {
            return;
        }
        assert_eq!(victims.len(), sim.plan().preempted.len(), "preempted twice");
        let running = self.by_order(|_, was| was.running);
        let orders: HashSet<Order> = victims.iter().map(|id| self.seqs[id].order).collect();
        let latest = running.iter().rev().take(victims.len());
        let latest: HashSet<Order> = latest.map(|id| self.seqs[id].order).collect();
        assert_eq!(orders, latest, "preemption takes the last in order");
        let first = running.first().expect("victims were running");
        let first = self.seqs[first].order;
        let urgent = matches!(sim.scheduler.config().policy, Policy::Priority { .. });
        assert!(urgent || !orders.contains(&first), "the first of the running was preempted");
        let block_size = sim.scheduler.config().block_size;
        let gained = |(id, was): (&SeqId, &Was)| {
            let table = &sim.scheduler.sequence(*id).table;
            let entry = |e: usize| e.checked_sub(was.num_entries - was.blocks.len());
            let new = |e: usize| {
                table.get(e).is_some()
                    && table.get(e) != entry(e).and_then(|i| was.blocks.get(i)).copied()
            };
            was.running && !victims.contains(id) && (0..table.len()).any(new)
        };
        let wanted = |id: &SeqId| {
            let was = &self.seqs[id];
            let last = was.num_computed / block_size;
            let shared = || was.blocks.last().is_some_and(|&b| self.num_holders(b) > 1);
            was.uncomputed == 1 && (was.num_entries <= last || shared())
        };
        let useful = self.seqs.iter().any(gained)
            || victims.iter().any(wanted)
            || !self.admitted(sim).is_empty();
        // The mate that an urgent sample was to fork from may leave the block behind meanwhile.
        let excused = urgent && sim.scheduler.config().window.is_some();
        assert!(useful || excused, "preempted for nothing");
    }

    /// Only blocks that nobody else holds are copied to the host.
    fn check_swaps(&self, sim: &Sim) {
        if sim.scheduler.config().window.is_some() {
            // Others may have left the block behind in this very step.
            return;
        }
        let victim = |id: &SeqId| sim.plan().preempted.iter().any(|(p, _)| p == id);
        for &(from, _) in &sim.plan().transfers.swap_out {
            let mut holders = self.seqs.iter().filter(|(_, w)| w.blocks.contains(&BlockId(from)));
            assert!(holders.all(|(id, _)| victim(id)), "block {from} is held by others too");
        }
    }

    fn num_holders(&self, block: BlockId) -> usize {
        self.seqs.values().filter(|was| was.blocks.contains(&block)).count()
    }

    /// Decodes, partial prefills, then admitted ones, each in order.
    fn check_order(&self, sim: &Sim) {
        let key = |id: &SeqId| {
            let was = &self.seqs[id];
            let preempted = sim.plan().preempted.iter().any(|(p, _)| p == id);
            let class = match was.running && !preempted {
                true if was.uncomputed == 1 => 0,
                true => 1,
                false => 2,
            };
            (class, was.order)
        };
        let keys: Vec<(u8, Order)> = sim.plan().scheduled.iter().map(|s| key(&s.id)).collect();
        assert!(keys.is_sorted(), "order of the step: {keys:?}");
    }

    /// Who comes first is admitted first, with all blocks; nobody in a step that ran short.
    fn check_admission(&self, sim: &Sim) {
        let admitted = self.admitted(sim);
        let Some(last) = admitted.last() else { return };
        let priorities = matches!(sim.scheduler.config().policy, Policy::Priority { .. });
        assert!(priorities || sim.plan().preempted.is_empty(), "admitted while preempting");
        for (id, was) in &self.seqs {
            let passed =
                was.order < self.seqs[last].order && sim.scheduler.is_queued(*id) && was.queued;
            assert!(!passed, "{last:?} came before {id:?}");
        }
        if sim.scheduler.sequence(*last).num_preemptions > 0 && !sim.is_beam(*last) {
            let spare = (sim.scheduler.num_running() - 1).div_ceil(4);
            assert!(sim.scheduler.pool().num_free() >= spare, "{last:?} came back too early");
        }
        for id in admitted {
            let seq = sim.scheduler.sequence(id);
            let known = seq.num_tokens() - sim.samples(id);
            let needed = known.div_ceil(sim.scheduler.config().block_size);
            assert_eq!(seq.table.len(), needed, "{id:?}: all blocks or none");
        }
    }

    /// Whatever can run does, while budget is left; and a prefill never takes a decode's place.
    fn check_no_waste(&self, sim: &Sim) {
        let (plan, config) = (sim.plan(), sim.scheduler.config());
        let in_plan = |id: &SeqId| plan.scheduled.iter().find(|s| s.id == *id);
        let victim = |id: &SeqId| plan.preempted.iter().any(|(p, _)| p == id);
        let ran_out = plan.num_tokens() == config.max_num_batched_tokens;
        let prefills = plan.scheduled.iter().any(|s| {
            let was = &self.seqs[&s.id];
            !was.running || was.uncomputed > 1
        });
        for (id, was) in self.seqs.iter().filter(|(id, was)| was.running && !victim(id)) {
            if was.uncomputed == 0 || sim.is_beam(*id) {
                continue;
            }
            let planned = in_plan(id).map_or(0, |s| s.num_scheduled_tokens);
            if was.uncomputed == 1 {
                let due = !self.in_transit && (prefills || !ran_out);
                assert!(!due || planned == 1, "{id:?} is stalled");
            } else if !ran_out {
                assert_eq!(planned, was.uncomputed, "{id:?} could do more");
            }
        }
        if ran_out || !plan.preempted.is_empty() || self.in_transit {
            return;
        }
        let queue = self.by_order(|id, _| sim.scheduler.is_queued(*id));
        let Some(front) = queue.first() else { return };
        let unit: Vec<SeqId> = match sim.is_beam(*front) {
            true => sim.scheduler.beams_of(*front).to_vec(),
            false => vec![*front],
        };
        let blocks = |seq: &Sequence| seq.num_tokens().div_ceil(config.block_size);
        let needed: usize = unit.iter().map(|&id| blocks(sim.scheduler.sequence(id))).sum();
        let spare = match sim.scheduler.sequence(*front).num_preemptions {
            0 => 0,
            _ => sim.scheduler.num_running().div_ceil(4),
        };
        let no_room = needed + spare > sim.scheduler.pool().num_free();
        let no_seat = sim.seats(*front) > sim.num_free_seats();
        assert!(no_room || no_seat, "{front:?} could run");
    }
}
