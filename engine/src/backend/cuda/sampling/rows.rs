//! A step's rows as the kernels take them: parameters by row, and the lists that they refer to.

use super::super::arena::{Array, Layout, Staging};
use super::as_i32;
use crate::sampling::{GREEDY_BELOW, RowTarget, SamplingBatch, SamplingRow};
use bytemuck::Pod;
use std::ops::Range;

/// What is neither given nor wanted.
const NONE: i32 = -1;

/// What a row asks for, or the rows of a slice together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Needs {
    /// A token, or what is known of a given one.
    pub answer: bool,
    /// The host's sampler.
    pub host: bool,
    /// Only some ids are allowed.
    pub allowed: bool,
    /// Suppressed ids, bias or penalties.
    pub edits: bool,
    /// A draw, not the maximum.
    pub draw: bool,
    /// Log-probabilities from the device: of the token and so many best ones; −1: of none.
    pub num_top: i32,
}

impl Needs {
    pub const NOTHING: Needs = Needs {
        answer: false,
        host: false,
        allowed: false,
        edits: false,
        draw: false,
        num_top: NONE,
    };

    /// What either needs.
    pub fn or(self, other: Needs) -> Needs {
        Needs {
            answer: self.answer | other.answer,
            host: self.host | other.host,
            allowed: self.allowed | other.allowed,
            edits: self.edits | other.edits,
            draw: self.draw | other.draw,
            num_top: self.num_top.max(other.num_top),
        }
    }

    pub fn logprobs(self) -> bool {
        self.num_top != NONE
    }
}

/// The device's part of a [`SamplingRow`]. Where it has none, or the token is given, the row is a
/// greedy one without edits, which costs least.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct DeviceRow {
    pub needs: Needs,
    given: i32,
    temperature: f32,
    top_k: i32,
    top_p: f32,
    min_p: f32,
    repetition_penalty: f32,
    frequency_penalty: f32,
    presence_penalty: f32,
    seed: i64,
    position: i32,
    allowed: [i32; 2],
    suppressed: [i32; 2],
    bias: [i32; 2],
    seen: [i32; 2],
}

impl DeviceRow {
    const NOTHING: DeviceRow = DeviceRow {
        needs: Needs::NOTHING,
        given: NONE,
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        frequency_penalty: 0.0,
        presence_penalty: 0.0,
        seed: 0,
        position: 0,
        allowed: [NONE; 2],
        suppressed: [0; 2],
        bias: [0; 2],
        seen: [0; 2],
    };

    /// `row` over ids below `vocab`, on a device that finds up to `max_top` best tokens.
    pub fn new(row: &SamplingRow, vocab: usize, max_top: usize) -> DeviceRow {
        let nothing = DeviceRow::NOTHING;
        let samples = row.target == RowTarget::Sample;
        // There are no more best tokens than tokens.
        let num_top = row.logprobs.map(|n| (n as usize).min(vocab));
        let answer = row.target != RowTarget::Nothing;
        let host =
            answer && (samples && row.processor.is_some() || num_top.is_some_and(|n| n > max_top));
        if host || !answer {
            return DeviceRow { needs: Needs { answer, host, ..nothing.needs }, ..nothing };
        }
        let num_top = num_top.map_or(NONE, |n| as_i32(n as u64));
        if let RowTarget::Given(token) = row.target {
            let needs = Needs { answer, num_top, ..nothing.needs };
            return DeviceRow { needs, given: as_i32(token.into()), ..nothing };
        }
        let edits = [&row.suppressed, &row.bias, &row.seen].iter().any(|list| !list.is_empty());
        let draw = row.temperature >= GREEDY_BELOW;
        let allowed = row.allowed.is_some();
        DeviceRow {
            needs: Needs { answer, host, allowed, edits, draw, num_top },
            given: NONE,
            temperature: row.temperature,
            // As many as there are: all pass.
            top_k: if row.top_k as usize >= vocab { 0 } else { as_i32(row.top_k.into()) },
            top_p: row.top_p,
            min_p: row.min_p,
            repetition_penalty: row.repetition_penalty,
            frequency_penalty: row.frequency_penalty,
            presence_penalty: row.presence_penalty,
            seed: row.seed.cast_signed(),
            position: row.position.cast_signed(),
            allowed: row.allowed.as_ref().map_or([NONE; 2], ends),
            suppressed: ends(&row.suppressed),
            bias: ends(&row.bias),
            seen: ends(&row.seen),
        }
    }

    /// Whether top-k or top-p is on.
    pub fn is_cut(&self) -> bool {
        self.needs.draw && (self.top_k > 0 || self.top_p < 1.0)
    }

    /// Entries of its lists that are edited.
    pub fn num_edits(&self) -> usize {
        let lists = [self.suppressed, self.bias, self.seen];
        lists.iter().map(|[start, end]| (end - start) as usize).sum()
    }
}

fn ends(range: &Range<usize>) -> [i32; 2] {
    let end = |at: usize| i32::try_from(at).expect("the lists of a step have fewer than 2^31 ids");
    [end(range.start), end(range.end)]
}

/// Entries of a batch's lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ListSizes {
    pub ids: usize,
    pub biases: usize,
    pub seen: usize,
}

impl ListSizes {
    pub fn of(batch: &SamplingBatch) -> Self {
        ListSizes { ids: batch.ids.len(), biases: batch.biases.len(), seen: batch.seen.len() }
    }
}

/// Where a step's parameters are.
#[derive(Clone, Copy)]
pub(super) struct RowArrays {
    // [R]
    pub given: Array<i32>,
    pub temperature: Array<f32>,
    pub top_k: Array<i32>,
    pub top_p: Array<f32>,
    pub min_p: Array<f32>,
    pub repetition_penalty: Array<f32>,
    pub frequency_penalty: Array<f32>,
    pub presence_penalty: Array<f32>,
    pub seed: Array<i64>,
    pub position: Array<i32>,
    pub num_top: Array<i32>,
    // [R, 2], start and end in the lists
    pub allowed: Array<i32>,
    pub suppressed: Array<i32>,
    pub bias: Array<i32>,
    pub seen: Array<i32>,
    // Lists.
    pub ids: Array<i32>,
    pub bias_ids: Array<i32>,
    pub bias_values: Array<f32>,
    pub seen_ids: Array<i32>,
    pub seen_counts: Array<i32>,
}

impl RowArrays {
    /// Places for `rows` rows and their lists.
    pub fn new(rows: usize, lists: ListSizes) -> (Self, Layout) {
        let mut layout = Layout::default();
        let arrays = RowArrays {
            given: layout.array(rows),
            temperature: layout.array(rows),
            top_k: layout.array(rows),
            top_p: layout.array(rows),
            min_p: layout.array(rows),
            repetition_penalty: layout.array(rows),
            frequency_penalty: layout.array(rows),
            presence_penalty: layout.array(rows),
            seed: layout.array(rows),
            position: layout.array(rows),
            num_top: layout.array(rows),
            allowed: layout.array(2 * rows),
            suppressed: layout.array(2 * rows),
            bias: layout.array(2 * rows),
            seen: layout.array(2 * rows),
            ids: layout.array(lists.ids),
            bias_ids: layout.array(lists.biases),
            bias_values: layout.array(lists.biases),
            seen_ids: layout.array(lists.seen),
            seen_counts: layout.array(lists.seen),
        };
        (arrays, layout)
    }

    /// Writes `rows`, which are those of `batch`, and its lists.
    pub fn write(&self, to: &mut Staging<'_>, rows: &[DeviceRow], batch: &SamplingBatch) {
        fill(to, self.given, rows, |row| row.given);
        fill(to, self.temperature, rows, |row| row.temperature);
        fill(to, self.top_k, rows, |row| row.top_k);
        fill(to, self.top_p, rows, |row| row.top_p);
        fill(to, self.min_p, rows, |row| row.min_p);
        fill(to, self.repetition_penalty, rows, |row| row.repetition_penalty);
        fill(to, self.frequency_penalty, rows, |row| row.frequency_penalty);
        fill(to, self.presence_penalty, rows, |row| row.presence_penalty);
        fill(to, self.seed, rows, |row| row.seed);
        fill(to, self.position, rows, |row| row.position);
        fill(to, self.num_top, rows, |row| row.needs.num_top);
        fill_pairs(to, self.allowed, rows, |row| row.allowed);
        fill_pairs(to, self.suppressed, rows, |row| row.suppressed);
        fill_pairs(to, self.bias, rows, |row| row.bias);
        fill_pairs(to, self.seen, rows, |row| row.seen);
        fill(to, self.ids, &batch.ids, |&id| as_i32(id.into()));
        fill(to, self.bias_ids, &batch.biases, |&(id, _)| {
            assert!((id as usize) < batch.vocab_limit, "bias for id {id}");
            as_i32(id.into())
        });
        fill(to, self.bias_values, &batch.biases, |&(_, bias)| bias);
        fill(to, self.seen_ids, &batch.seen, |seen| as_i32(seen.token.into()));
        fill(to, self.seen_counts, &batch.seen, |seen| as_i32(seen.output_count.into()));
    }
}

fn fill<S, T: Pod>(to: &mut Staging<'_>, array: Array<T>, from: &[S], value: impl Fn(&S) -> T) {
    for (place, from) in to.get(array).iter_mut().zip(from) {
        *place = value(from);
    }
}

fn fill_pairs(
    to: &mut Staging<'_>,
    array: Array<i32>,
    rows: &[DeviceRow],
    pair: impl Fn(&DeviceRow) -> [i32; 2],
) {
    for (place, row) in to.get(array).chunks_exact_mut(2).zip(rows) {
        place.copy_from_slice(&pair(row));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::{LogitsContext, LogitsProcessor, ProcessorCall};
    use std::sync::Arc;

    const VOCAB: usize = 1000;
    const MAX_TOP: usize = 64;

    fn device(row: &SamplingRow) -> DeviceRow {
        DeviceRow::new(row, VOCAB, MAX_TOP)
    }

    struct Leave;

    impl LogitsProcessor for Leave {
        fn process(&self, _: &LogitsContext<'_>, _: &mut [f32]) {}
    }

    fn processed() -> SamplingRow {
        let processor = Arc::new(Leave);
        let call = ProcessorCall { processor, history: 0..0, prompt_len: 0 };
        SamplingRow { processor: Some(call), suppressed: 0..3, ..SamplingRow::default() }
    }

    #[test]
    fn a_plain_row_is_drawn_and_a_greedy_one_is_not() {
        let answer = Needs { answer: true, ..Needs::NOTHING };
        assert_eq!(device(&SamplingRow::default()).needs, Needs { draw: true, ..answer });
        for (temperature, draw) in [(0.0, false), (0.9e-5, false), (1e-5, true)] {
            let row = SamplingRow { temperature, ..SamplingRow::default() };
            assert_eq!(device(&row).needs, Needs { draw, ..answer }, "{temperature}");
        }
    }

    #[test]
    fn rows_that_are_not_the_devices_cost_it_nothing() {
        let given = SamplingRow {
            target: RowTarget::Given(7),
            allowed: Some(0..2),
            logprobs: Some(2),
            ..processed()
        };
        let needs = Needs { answer: true, num_top: 2, ..Needs::NOTHING };
        assert_eq!(device(&given), DeviceRow { needs, given: 7, ..DeviceRow::NOTHING });
        let nothing = SamplingRow { target: RowTarget::Nothing, logprobs: Some(2), ..processed() };
        assert_eq!(device(&nothing), DeviceRow::NOTHING);
        let needs = Needs { answer: true, host: true, ..Needs::NOTHING };
        assert_eq!(device(&processed()), DeviceRow { needs, ..DeviceRow::NOTHING });
    }

    #[test]
    fn more_best_tokens_than_the_device_finds_are_the_hosts() {
        for (wanted, vocab, host, num_top) in
            [(64, 1000, false, 64), (65, 1000, true, -1), (65, 50, false, 50), (0, 50, false, 0)]
        {
            let row = SamplingRow { logprobs: Some(wanted), ..SamplingRow::default() };
            let needs = DeviceRow::new(&row, vocab, MAX_TOP).needs;
            assert_eq!((needs.host, needs.num_top), (host, num_top), "{wanted} of {vocab}");
            assert_eq!(needs.logprobs(), !host);
        }
    }

    #[test]
    fn numbers_keep_their_bits_and_lists_their_ends() {
        let row = SamplingRow {
            seed: u64::MAX - 1,
            position: u32::MAX,
            top_k: 999,
            allowed: Some(5..5),
            suppressed: 1..4,
            bias: 2..4,
            seen: 7..8,
            ..SamplingRow::default()
        };
        let got = device(&row);
        assert_eq!((got.seed, got.position, got.top_k), (-2, -1, 999));
        // An empty list of allowed ids allows none, which is not the same as no list.
        assert_eq!((got.allowed, got.suppressed), ([5, 5], [1, 4]));
        assert_eq!((got.bias, got.seen, got.num_edits()), ([2, 4], [7, 8], 6));
        assert!(got.needs.allowed && got.needs.edits);
        for top_k in [1000, u32::MAX] {
            assert_eq!(device(&SamplingRow { top_k, ..row.clone() }).top_k, 0);
        }
    }

    #[test]
    fn a_slice_needs_what_any_of_its_rows_does() {
        let with = |edits, num_top| Needs { edits, num_top, ..Needs::NOTHING };
        let [some, none] = [with(true, -1).or(with(false, 3)), with(false, -1).or(Needs::NOTHING)];
        assert_eq!((some, none), (with(true, 3), Needs::NOTHING));
    }
}
