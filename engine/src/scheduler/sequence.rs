//! A sequence: its tokens, how far they are computed, and the blocks that hold them.

use crate::kv::BlockId;
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

/// A request's tokens and where they are cached.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// Prompt, then output.
    pub tokens: Vec<u32>,
    /// How many of `tokens` are the prompt.
    pub prompt_len: usize,
    /// Tokens whose K and V are in `blocks`.
    pub num_computed_tokens: usize,
    /// Block table; token `i` is in `blocks[i / block_size]`.
    pub blocks: Vec<BlockId>,
    /// Place in the order of arrival; kept through preemption.
    pub arrival: u64,
    /// Times it was preempted.
    pub num_preemptions: u32,
    /// When it ends.
    pub rules: StopRules,
}

impl Sequence {
    pub(super) fn new(prompt: Vec<u32>, rules: StopRules, arrival: u64) -> Self {
        debug_assert!(rules.stop_token_ids.is_sorted());
        Sequence {
            prompt_len: prompt.len(),
            tokens: prompt,
            num_computed_tokens: 0,
            blocks: Vec::new(),
            arrival,
            num_preemptions: 0,
            rules,
        }
    }

    /// Generated tokens.
    pub fn output(&self) -> &[u32] {
        &self.tokens[self.prompt_len..]
    }

    pub(super) fn num_uncomputed(&self) -> usize {
        self.tokens.len() - self.num_computed_tokens
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

    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }
}
