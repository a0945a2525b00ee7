//! The fake model: K and V of a position are the hash of the history up to it, and so is the next
//! token. What a request gives when it is alone follows from its prompt.

use quire_engine::scheduler::{FinishReason, StopRules};

/// Scrambles 64 bits (SplitMix64).
pub fn mix(x: u64) -> u64 {
    let z = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Tokens and the hash of every prefix of them.
#[derive(Clone, Debug)]
pub struct History {
    /// Seed of the sample it belongs to; beams have none.
    pub sample_seed: Option<u64>,
    root: u64,
    tokens: Vec<u32>,
    hashes: Vec<u64>,
}

impl History {
    /// The history of `tokens`; those of different salts have nothing in common.
    pub fn new(salt: Option<&str>, tokens: &[u32]) -> Self {
        let root = salt.map_or(0, |s| s.bytes().fold(1, |h, b| mix(h ^ u64::from(b))));
        let mut history =
            History { sample_seed: None, root, tokens: Vec::new(), hashes: Vec::new() };
        tokens.iter().for_each(|&t| history.push(t));
        history
    }

    /// Appends a token.
    pub fn push(&mut self, token: u32) {
        let before = self.hashes.last().copied().unwrap_or(self.root);
        self.hashes.push(mix(mix(before).wrapping_add(u64::from(token))));
        self.tokens.push(token);
    }

    /// Cuts it after `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
        self.hashes.truncate(len);
    }

    /// All tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Hash of the tokens up to and including `position`.
    pub fn hash(&self, position: usize) -> u64 {
        self.hashes[position]
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }
}

/// The token after a history with hash `hash`, for the sample with this seed.
pub fn next_token(hash: u64, sample_seed: u64, vocab: u64) -> u32 {
    (mix(hash ^ mix(sample_seed)) % vocab) as u32
}

/// What a sample gives when it is alone: its output and why it ends.
pub fn alone(
    mut history: History,
    rules: &StopRules,
    sample_seed: u64,
    vocab: u64,
) -> (Vec<u32>, FinishReason) {
    let prompt_len = history.len();
    loop {
        let token = next_token(history.hash(history.len() - 1), sample_seed, vocab);
        history.push(token);
        let n = history.len() - prompt_len;
        let output = || history.tokens()[prompt_len..].to_vec();
        if n >= rules.min_tokens && rules.stop_token_ids.contains(&token) {
            return (output(), FinishReason::StopToken(token));
        }
        if n >= rules.max_tokens.max(1) {
            return (output(), FinishReason::Length);
        }
    }
}

/// How beams with these hashes go on: (place of the beam continued, token), or `None` when the
/// request is done. The number of beams varies up to `width`; two may continue alike.
pub fn continue_beams(
    hashes: &[u64],
    num_generated: usize,
    max_tokens: usize,
    width: usize,
    vocab: u64,
) -> Option<Vec<(usize, u32)>> {
    let all = hashes.iter().fold(num_generated as u64, |h, &x| mix(h ^ x));
    if num_generated + 1 >= max_tokens.max(1) || mix(all ^ 1).is_multiple_of(24) {
        return None;
    }
    let count =
        if mix(all ^ 2).is_multiple_of(4) { 1 + mix(all ^ 3) as usize % width } else { width };
    let next = (0..count as u64).map(|i| {
        let parent = mix(all ^ (16 + i)) as usize % hashes.len();
        (parent, (mix(hashes[parent] ^ (1 + i)) % vocab) as u32)
    });
    Some(next.collect())
}
