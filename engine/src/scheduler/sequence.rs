//! A sequence: its tokens, how far they are computed, and the blocks that hold them.

use super::GroupId;
use crate::kv::{BlockHash, BlockId, BlockTable};
use std::fmt;

/// Identifies a sequence while it lives; never reused for another.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeqId {
    generation: u32,
    slot: u32,
}

impl fmt::Debug for SeqId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seq {}.{}", self.slot, self.generation)
    }
}

/// When a sequence ends, as far as tokens tell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopRules {
    /// Tokens to generate at most; 0 is read as 1.
    pub max_tokens: usize,
    /// Below this many generated tokens no stop token ends the sequence.
    pub min_tokens: usize,
    /// Tokens that end it, sorted: the model's EOS (unless ignored) and the request's own.
    pub stop_token_ids: Vec<u32>,
}

/// Why a sequence ended by its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The last token is this stop token.
    StopToken(u32),
    /// `max_tokens` were generated.
    Length,
}

/// A place in the queue: smaller comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Order {
    /// With priorities: priority × aging steps + step of arrival, so that age and urgency weigh
    /// against each other without ever changing.
    pub(super) key: i64,
    /// Number of the arrival.
    pub(super) arrival: u64,
}

/// What a new sequence brings.
#[derive(Clone, Debug, Default)]
pub struct NewSequence {
    /// Its prompt.
    pub prompt: Vec<u32>,
    /// When it ends.
    pub rules: StopRules,
    /// Smaller is more urgent; only [`crate::scheduler::Policy::Priority`] looks at it.
    pub priority: i32,
    /// Only sequences with the same salt share blocks.
    pub cache_salt: Option<String>,
    /// Every token has to be computed, as the logits at all positions are wanted.
    pub skip_cache: bool,
    /// Its next token cannot be planned before the last one is known.
    pub needs_history: bool,
}

/// Where a sequence is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Behind the sample of its request that computes the prompt.
    Pending,
    /// In the queue, without blocks.
    Waiting,
    /// In the queue, its blocks on the host.
    Swapped(Vec<SwappedBlock>),
    /// Among the running.
    Running,
}

/// Where the content of a swapped sequence's block is; leading freed entries are left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SwappedBlock {
    /// In this block of the host pool.
    Host(BlockId),
    /// Where it was, as other sequences hold it too.
    Device(BlockId),
}

/// A request's tokens and where they are cached.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// Prompt, then output as far as it is known.
    pub tokens: Vec<u32>,
    /// How many of `tokens` are the prompt.
    pub prompt_len: usize,
    /// Tokens planned so far: those before it are computed, or will be by the steps under way.
    pub num_computed_tokens: usize,
    /// Tokens whose K and V `table` holds; beyond `num_computed_tokens` only where a whole
    /// prompt was found in the cache.
    pub kv_len: usize,
    /// Where K and V are.
    pub table: BlockTable,
    /// Place in the order of arrival; kept through preemption.
    pub arrival: u64,
    /// Smaller is more urgent.
    pub priority: i32,
    /// Times it was preempted.
    pub num_preemptions: u32,
    /// Prompt tokens found in the prefix cache when it was first admitted.
    pub num_cached_tokens: usize,
    /// When it ends.
    pub rules: StopRules,
    /// Tokens sampled by steps under way.
    pub(super) num_pending: usize,
    pub(super) order: Order,
    pub(super) state: State,
    pub(super) needs_history: bool,
    pub(super) skip_cache: bool,
    /// The request's samples or beams, where there are several.
    pub(super) group: Option<GroupId>,
    /// Blocks shared with a mate are computed when the mate has computed this many tokens.
    pub(super) waits_for: Option<(SeqId, usize)>,
    /// Step it was last given a seat in; 0: none yet.
    pub(super) seated_in: u64,
    /// Step it was last planned in, and what was computed before.
    pub(super) last_planned: (u64, usize),
    /// Where the chain of `hashes` starts; `None`: it shares no blocks through the cache.
    pub(super) root: Option<BlockHash>,
    /// Names of its full blocks, as far as they were needed.
    pub(super) hashes: Vec<BlockHash>,
    /// Full blocks that need not be published: they are, or somebody else's are.
    pub(super) num_published: usize,
}

impl Sequence {
    pub(super) fn new(new: NewSequence, root: Option<BlockHash>, order: Order) -> Self {
        debug_assert!(new.rules.stop_token_ids.is_sorted());
        Sequence {
            prompt_len: new.prompt.len(),
            tokens: new.prompt,
            num_computed_tokens: 0,
            kv_len: 0,
            table: BlockTable::default(),
            arrival: order.arrival,
            priority: new.priority,
            num_preemptions: 0,
            num_cached_tokens: 0,
            rules: new.rules,
            num_pending: 0,
            order,
            state: State::Waiting,
            needs_history: new.needs_history,
            skip_cache: new.skip_cache,
            group: None,
            waits_for: None,
            seated_in: 0,
            last_planned: (0, 0),
            root,
            hashes: Vec::new(),
            num_published: 0,
        }
    }

    /// Generated tokens that are known.
    pub fn output(&self) -> &[u32] {
        &self.tokens[self.prompt_len..]
    }

    /// Tokens there are, those sampled by steps under way included.
    pub fn num_tokens(&self) -> usize {
        self.tokens.len() + self.num_pending
    }

    /// Whether a token cannot be planned before the one before it is known.
    fn is_blocked(&self) -> bool {
        let output = self.num_tokens() - self.prompt_len;
        self.num_pending > 0 && (self.needs_history || output >= self.rules.max_tokens.max(1))
    }

    /// Tokens that could be planned now, mates aside.
    pub(super) fn num_uncomputed(&self) -> usize {
        if self.is_blocked() { 0 } else { self.num_tokens() - self.num_computed_tokens }
    }

    /// What was computed before step `step`.
    pub(super) fn computed_before(&self, step: u64) -> usize {
        if self.last_planned.0 == step { self.last_planned.1 } else { self.num_computed_tokens }
    }

    /// Whether the last token ends the sequence.
    pub(super) fn finish_reason(&self) -> Option<FinishReason> {
        let n = self.output().len();
        let last = *self.tokens.last()?;
        let stops =
            n >= self.rules.min_tokens && self.rules.stop_token_ids.binary_search(&last).is_ok();
        if stops {
            Some(FinishReason::StopToken(last))
        } else {
            (n >= self.rules.max_tokens.max(1)).then_some(FinishReason::Length)
        }
    }

    /// Takes all it holds: blocks of the pool, blocks of the host.
    pub(super) fn take_blocks(&mut self) -> (Vec<BlockId>, Vec<BlockId>) {
        let mut blocks = self.table.split_off(0);
        let mut host_blocks = Vec::new();
        if let State::Swapped(swapped) = &self.state {
            for entry in swapped {
                match *entry {
                    SwappedBlock::Host(block) => host_blocks.push(block),
                    SwappedBlock::Device(block) => blocks.push(block),
                }
            }
        }
        (blocks, host_blocks)
    }

    /// Forgets what was computed. Its blocks must be gone.
    pub(super) fn restart(&mut self) {
        assert!(self.table.blocks().is_empty(), "a sequence restarts without blocks");
        self.table = BlockTable::default();
        self.num_computed_tokens = 0;
        self.kv_len = 0;
        self.num_published = 0;
        self.waits_for = None;
    }
}

/// Live sequences by id: O(1) everything, ids of ended ones are recognised.
#[derive(Debug, Default)]
pub(super) struct Slab {
    slots: Vec<(u32, Option<Sequence>)>,
    vacant: Vec<u32>,
}

impl Slab {
    pub(super) fn insert(&mut self, seq: Sequence) -> SeqId {
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push((0, None));
            (self.slots.len() - 1) as u32
        });
        let entry = &mut self.slots[slot as usize];
        entry.1 = Some(seq);
        SeqId { generation: entry.0, slot }
    }

    pub(super) fn remove(&mut self, id: SeqId) -> Sequence {
        let entry = &mut self.slots[id.slot as usize];
        assert_eq!(entry.0, id.generation, "{id:?} has ended");
        let seq = entry.1.take().expect("generation matches");
        entry.0 = entry.0.wrapping_add(1);
        self.vacant.push(id.slot);
        seq
    }

    pub(super) fn get(&self, id: SeqId) -> &Sequence {
        let entry = &self.slots[id.slot as usize];
        assert_eq!(entry.0, id.generation, "{id:?} has ended");
        entry.1.as_ref().expect("generation matches")
    }

    pub(super) fn get_mut(&mut self, id: SeqId) -> &mut Sequence {
        let entry = &mut self.slots[id.slot as usize];
        assert_eq!(entry.0, id.generation, "{id:?} has ended");
        entry.1.as_mut().expect("generation matches")
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.slots.iter().filter_map(|(_, seq)| seq.as_ref())
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Sequence> {
        self.slots.iter_mut().filter_map(|(_, seq)| seq.as_mut())
    }

    pub(super) fn iter_with_ids(&self) -> impl Iterator<Item = (SeqId, &Sequence)> {
        self.slots.iter().enumerate().filter_map(|(slot, (generation, seq))| {
            let id = SeqId { generation: *generation, slot: slot as u32 };
            seq.as_ref().map(|seq| (id, seq))
        })
    }

    /// Whether the sequence lives.
    pub(super) fn contains(&self, id: SeqId) -> bool {
        let entry = &self.slots[id.slot as usize];
        entry.0 == id.generation && entry.1.is_some()
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }
}
