//! The engine: requests in, a synchronous step loop, outputs out.
//!
//! One [`Engine::step`]: schedule, prepare, execute, update, detokenise, stop check. A step
//! either completes for all of its sequences or fails as a whole; a failed step may be tried
//! again. A bad row (NaN), or a token that cannot be decoded, ends its own request only.

mod beams;
mod chat;
mod llm;
mod measure;
mod output;
mod request;
mod rows;
mod state;
mod step;

pub use llm::{Llm, LlmError};
pub use output::{
    BeamScore, FinishReason, RequestDelta, RequestMetrics, RequestOutput, StepOutput, StopReason,
};
pub use request::{MAX_PROMPT_BYTES, MAX_SAMPLE_TOKENS, Prompt, Request, RequestError, RequestId};

use crate::config::{ConfigError, ResolvedConfig};
use crate::memory::MemoryPlan;
use crate::metrics::{EngineStats, LoadSnapshot};
use crate::model::ModelInfo;
use crate::ops::{BackendError, BackendInfo};
use crate::runner::Executor;
use crate::sampling::{LogitsProcessor, ParamLimits, RowError};
use crate::scheduler::{self, KvUsage, NewSequence, Scheduler, SchedulerConfig, SeqId};
use crate::text::Tokenizer;
use crate::text::chat::FoundTemplate;
use beams::BeamState;
use chat::ChatTemplates;
use rows::{RowContext, RowPlan, TokenLists};
use state::RequestState;
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;
use step::Flight;

/// A step could not be computed, or an engine not be made.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The configuration does not fit the model or the machine.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The backend failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

impl EngineError {
    /// Whether every step from now on would fail, too.
    pub fn is_lost(&self) -> bool {
        matches!(self, EngineError::Backend(error) if error.is_lost())
    }
}

/// The tokenizer with what the model's files say of its special tokens.
#[derive(Clone)]
pub struct TextConfig {
    /// Text to ids and back.
    pub tokenizer: Tokenizer,
    /// Put this id before a text prompt unless encoding already did.
    pub prepend_bos: Option<u32>,
    /// Ids that end an answer.
    pub eos_token_ids: Vec<u32>,
    /// The model's chat template, where it has one.
    pub chat_template: Option<FoundTemplate>,
}

/// Many requests over one model. Not thread-safe by design: one thread steps it.
pub struct Engine {
    executor: Box<dyn Executor>,
    text: TextConfig,
    /// Compiled when first asked for.
    chat: OnceCell<ChatTemplates>,
    seed: u64,
    scheduler: Scheduler,
    requests: HashMap<SeqId, RequestState>,
    /// Live sequences of live requests, in order of arrival; none for those with beams.
    ids: BTreeMap<RequestId, Vec<SeqId>>,
    /// Live requests with beams.
    beams: BTreeMap<RequestId, BeamState>,
    beam_of: HashMap<SeqId, RequestId>,
    processors: BTreeMap<String, Arc<dyn LogitsProcessor>>,
    max_logprobs: u32,
    next_id: u64,
    stats: EngineStats,
    /// Ids that may be sampled.
    vocab_size: usize,
    block_bytes: usize,
    memory: MemoryPlan,
    /// The step at work; its arrays are reused.
    flight: Flight,
    /// A step that is computed and not yet applied, where steps are planned ahead.
    ahead: Option<Flight>,
    plan_ahead: bool,
    /// Why nothing more can be computed.
    lost: Option<String>,
    /// What a failed step's predecessor brought, and what ended with the device.
    unreported: StepOutput,
    /// Outputs that wait for the rest of their static batch, and since when.
    withheld: Vec<(Instant, RequestOutput)>,
}

impl Engine {
    /// An engine over `executor`, whose KV cache has the sizes of `config`.
    pub fn new(
        mut executor: Box<dyn Executor>,
        text: TextConfig,
        config: ResolvedConfig,
        seed: u64,
    ) -> Self {
        assert_eq!(executor.kv_layout().num_blocks, config.scheduler.num_blocks);
        assert_eq!(executor.kv_layout().block_size, config.scheduler.block_size);
        assert_eq!(executor.num_swap_blocks(), config.scheduler.num_swap_blocks);
        let block_bytes = executor.kv_layout().block_bytes().expect("the cache is allocated");
        let mut scheduler = Scheduler::new(config.scheduler);
        measure::apply(executor.as_mut(), config.measure, &mut scheduler);
        Engine {
            max_logprobs: config.max_logprobs,
            scheduler,
            // Rows past the tokenizer's vocabulary are padding of the output matrix.
            vocab_size: executor.model().vocab_size.min(text.tokenizer.vocab_size()),
            flight: Flight::default(),
            ahead: None,
            plan_ahead: config.async_scheduling.unwrap_or(executor.runs_ahead()),
            lost: None,
            unreported: StepOutput::default(),
            withheld: Vec::new(),
            executor,
            text,
            chat: OnceCell::new(),
            seed,
            requests: HashMap::new(),
            ids: BTreeMap::new(),
            beams: BTreeMap::new(),
            beam_of: HashMap::new(),
            processors: BTreeMap::new(),
            next_id: 0,
            stats: EngineStats::default(),
            block_bytes,
            memory: config.memory,
        }
    }

    /// The model's sizes.
    pub fn model(&self) -> &ModelInfo {
        self.executor.model()
    }

    /// The backend's description.
    pub fn backend(&self) -> BackendInfo {
        self.executor.backend()
    }

    /// The tokenizer and special tokens.
    pub fn text(&self) -> &TextConfig {
        &self.text
    }

    /// The scheduler's limits.
    pub fn limits(&self) -> &SchedulerConfig {
        self.scheduler.config()
    }

    /// Whether each step is planned before the results of the one before are applied.
    pub fn async_scheduling(&self) -> bool {
        self.plan_ahead
    }

    /// Where the memory goes.
    pub fn memory(&self) -> &MemoryPlan {
        &self.memory
    }

    /// Counters since the start.
    pub fn stats(&self) -> EngineStats {
        EngineStats { scheduler: self.scheduler.stats(), ..self.stats }
    }

    /// Counters and queue lengths, for [`crate::metrics::LoadLog`].
    pub fn load(&self) -> LoadSnapshot {
        let pool = self.scheduler.pool();
        LoadSnapshot {
            stats: self.stats(),
            num_running: self.scheduler.num_running(),
            num_waiting: self.scheduler.num_waiting(),
            kv_usage: pool.num_held() as f64 / pool.num_blocks() as f64,
        }
    }

    /// How full the KV cache is, in detail. Takes time in proportion to the blocks held.
    pub fn kv_usage(&self) -> KvUsage {
        self.scheduler.kv_usage()
    }

    /// Forgets all cached prefixes; requests that share them already go on.
    pub fn reset_prefix_cache(&mut self) {
        self.scheduler.reset_prefix_cache();
    }

    /// Requests whose outputs have not all been handed out.
    pub fn num_unfinished(&self) -> usize {
        let withheld = self.withheld.iter().map(|(_, output)| output);
        let ended = withheld.chain(&self.unreported.finished).map(|output| output.request_id);
        let ended: BTreeSet<RequestId> = ended.filter(|id| !self.ids.contains_key(id)).collect();
        self.ids.len() + ended.len()
    }

    /// KV blocks held now.
    pub fn num_held_blocks(&self) -> usize {
        self.scheduler.pool().num_held()
    }

    /// Ids that may be sampled: below both the tokenizer's and the model's vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The ids a text prompt becomes.
    pub fn encode(&self, prompt: &str) -> Result<Vec<u32>, RequestError> {
        self.check_prompt_bytes(prompt)?;
        Ok(self.with_bos(self.text.tokenizer.encode(prompt, true)?))
    }

    /// Refuses text that is too long to fit the context, before the work of encoding it.
    fn check_prompt_bytes(&self, text: &str) -> Result<(), RequestError> {
        let context = self.limits().max_model_len;
        let limit = MAX_PROMPT_BYTES.min(self.text.tokenizer.max_bytes(context));
        if text.len() > limit {
            return Err(RequestError::PromptTooLarge { bytes: text.len(), limit, context });
        }
        Ok(())
    }

    /// Puts BOS before `ids` where the model wants it and it is not there.
    fn with_bos(&self, mut ids: Vec<u32>) -> Vec<u32> {
        if let Some(bos) = self.text.prepend_bos
            && ids.first() != Some(&bos)
        {
            ids.insert(0, bos);
        }
        ids
    }

    /// What parameters are checked against.
    pub fn param_limits(&self) -> ParamLimits {
        ParamLimits { vocab_size: self.vocab_size(), max_logprobs: self.max_logprobs }
    }

    /// Makes a processor available to requests under `name`, in place of one that had it.
    pub fn register_logits_processor(
        &mut self,
        name: impl Into<String>,
        processor: Arc<dyn LogitsProcessor>,
    ) {
        self.processors.insert(name.into(), processor);
    }

    /// Checks a request and puts its sequences at the end of the queue. Nothing changes on an
    /// error.
    pub fn add_request(&mut self, request: Request) -> Result<RequestId, RequestError> {
        let arrival = Instant::now();
        if let Some(reason) = &self.lost {
            return Err(RequestError::Lost(reason.clone()));
        }
        request.params.validate(&self.param_limits())?;
        let prompt = match &request.prompt {
            Prompt::Text(text) => self.encode(text)?,
            Prompt::Tokens(ids) => ids.clone(),
        };
        let vocab_size = self.executor.model().vocab_size;
        if let Some(&id) = prompt.iter().find(|&&id| id as usize >= vocab_size) {
            return Err(RequestError::TokenOutOfVocabulary { id, vocab_size });
        }
        let n = request.params.n;
        if n.saturating_mul(prompt.len()) > MAX_SAMPLE_TOKENS && n > 1 {
            return Err(RequestError::TooManySamples { n, prompt: prompt.len() });
        }
        let room = self.limits().max_model_len.saturating_sub(prompt.len());
        let max_tokens = request.params.max_tokens.unwrap_or(room);
        if request.params.min_tokens > max_tokens.max(1) {
            let min_tokens = request.params.min_tokens;
            return Err(RequestError::MinTokens { min_tokens, max_tokens });
        }
        let bad_words = self.bad_words(&request.params.bad_words)?.into();
        let lists = TokenLists::new(&request.params, bad_words);
        let processor = self.processor(request.params.logits_processor.as_deref())?;
        let rules = scheduler::StopRules {
            max_tokens,
            min_tokens: request.params.min_tokens,
            stop_token_ids: self.stop_token_ids(&request),
        };
        let id = RequestId(self.next_id);
        let seed = request.params.seed.unwrap_or_else(|| derived_seed(self.seed, id.0));
        let new = NewSequence {
            prompt: prompt.clone(),
            rules,
            priority: request.params.priority,
            cache_salt: request.params.cache_salt.clone(),
            // What is found in the cache has no logits.
            skip_cache: request.params.prompt_logprobs.is_some() || request.capture_logits,
            needs_history: processor.is_some() || lists.needs_history(&request.params),
        };
        if request.params.use_beam_search {
            self.add_beam_request(id, request, new, seed, arrival)?;
            self.next_id += 1;
            return Ok(id);
        }
        let seqs = self.scheduler.add(new, request.params.n)?;
        for (index, &seq) in seqs.iter().enumerate() {
            let context = RowContext {
                prompt: &prompt,
                seed: seed.wrapping_add(index as u64),
                vocab_size: self.vocab_size(),
                lists: lists.clone(),
                processor: processor.clone(),
                capture: request.capture_logits,
            };
            let rows = RowPlan::new(&request.params, context);
            let tokenizer = &self.text.tokenizer;
            let state = RequestState::new((id, index), &request, rows, tokenizer, arrival);
            self.requests.insert(seq, state);
        }
        self.next_id += 1;
        self.ids.insert(id, seqs);
        Ok(id)
    }

    /// Each word as tokens, as it is and, where that differs, after a space.
    fn bad_words(&self, words: &[String]) -> Result<Vec<Vec<u32>>, RequestError> {
        let mut all = Vec::new();
        for word in words {
            let word = word.trim_start();
            for text in [word.to_owned(), format!(" {word}")] {
                let ids = self.text.tokenizer.encode(&text, false)?;
                if !ids.is_empty() && !all.contains(&ids) {
                    all.push(ids);
                }
            }
        }
        Ok(all)
    }

    fn processor(
        &self,
        name: Option<&str>,
    ) -> Result<Option<Arc<dyn LogitsProcessor>>, RequestError> {
        let Some(name) = name else { return Ok(None) };
        let found = self.processors.get(name).cloned();
        found.map(Some).ok_or_else(|| RequestError::UnknownProcessor {
            name: name.to_owned(),
            known: self.processors.keys().cloned().collect::<Vec<_>>().join(", "),
        })
    }

    /// Sorted ids that end `request`.
    fn stop_token_ids(&self, request: &Request) -> Vec<u32> {
        let mut ids = request.params.stop_token_ids.clone();
        if !request.params.ignore_eos {
            ids.extend(&self.text.eos_token_ids);
        }
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Ends the live sequences of a request; their blocks are free when this returns. With them
    /// come those that have ended and were not handed out yet. Empty: no such request, or all its
    /// outputs have been handed out.
    pub fn abort(&mut self, id: RequestId) -> Vec<RequestOutput> {
        let mut outputs = self.take_outputs(id);
        outputs.extend(self.finish_search(id, Some(FinishReason::Abort)));
        let seqs = self.ids.get(&id).cloned().unwrap_or_default();
        outputs.extend(seqs.into_iter().map(|seq| self.finish(seq, FinishReason::Abort, None)));
        self.complete_idle_step();
        outputs
    }

    /// What a request has brought that no step has handed out.
    fn take_outputs(&mut self, id: RequestId) -> Vec<RequestOutput> {
        self.unreported.deltas.retain(|delta| delta.request_id != id);
        let withheld = self.withheld.extract_if(.., |(_, output)| output.request_id == id);
        let mut outputs: Vec<_> = withheld.map(|(_, output)| output).collect();
        outputs.extend(self.unreported.finished.extract_if(.., |o| o.request_id == id));
        outputs
    }

    /// Takes a request out of scheduler and tables. After a failed row its last token is not one.
    fn finish(
        &mut self,
        seq: SeqId,
        reason: FinishReason,
        failed: Option<RowError>,
    ) -> RequestOutput {
        let state = self.requests.remove(&seq).expect("a request a sequence");
        let live = self.ids.get_mut(&state.id).expect("a live request");
        live.retain(|&s| s != seq);
        if live.is_empty() {
            self.ids.remove(&state.id);
        }
        let mut sequence = self.scheduler.finish(seq);
        if failed.is_some() {
            sequence.tokens.pop();
        }
        state.into_output(sequence, reason, Instant::now())
    }

    /// Asserts the invariants of scheduler, pool and request tables; for tests.
    pub fn check_integrity(&self) {
        self.scheduler.check_integrity();
        assert_eq!(self.requests.len(), self.ids.values().map(Vec::len).sum::<usize>());
        assert!(self.beams.keys().all(|id| self.ids.contains_key(id)), "beams of no request");
        if self.ids.is_empty() {
            assert_eq!(self.num_held_blocks(), 0, "an idle engine holds blocks");
        }
    }
}

/// The seed of request number `request` that brings none: SplitMix64 (Steele, Lea, Flood, 2014)
/// of both, below 2⁵³ so that it survives as a JSON number.
pub fn derived_seed(engine_seed: u64, request: u64) -> u64 {
    let mut z =
        engine_seed.wrapping_add(request.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (z ^ (z >> 31)) >> 11
}
