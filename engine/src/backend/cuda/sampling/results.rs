//! What a step's rows got: where it is in the results, and how it becomes [`SampleOutput`]s.

use crate::sampling::{RowError, SampleOutput, TokenLogprob, TokenLogprobs};

/// Rows of an array begin where the kernels want it.
const ALIGN: usize = 4;
/// Bytes of a word: an i32 or an f32.
pub(super) const WORD: usize = 4;

/// Status of a row, as the kernels have it.
const OK: i32 = 0;
const NOT_A_NUMBER: i32 = 1;
const NOTHING_ALLOWED: i32 = 2;

/// The arrays of a step's results, in words:
///
/// ```text
/// token[R]  status[R]  then, where any row wants them:  logprob[R]  top_id[R, n]  top_logprob[R, n]
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ResultShape {
    rows: usize,
    /// n, the most that a row wants; `None`: no log-probability is wanted at all.
    num_top: Option<usize>,
}

impl ResultShape {
    pub fn new(rows: usize, num_top: Option<usize>) -> Self {
        ResultShape { rows: rows.next_multiple_of(ALIGN), num_top }
    }

    /// The most that a row may want of the best tokens; at least 1, by which kernels divide.
    pub fn max_top(&self) -> usize {
        self.num_top.unwrap_or(0).max(1)
    }

    pub fn token(&self, row: usize) -> usize {
        row
    }

    pub fn status(&self, row: usize) -> usize {
        self.rows + row
    }

    pub fn logprob(&self, row: usize) -> usize {
        2 * self.rows + row
    }

    pub fn top_id(&self, row: usize) -> usize {
        3 * self.rows + row * self.max_top()
    }

    pub fn top_logprob(&self, row: usize) -> usize {
        (3 + self.max_top()) * self.rows + row * self.max_top()
    }

    /// Bytes of all.
    pub fn bytes(&self) -> usize {
        let arrays = self.num_top.map_or(2, |_| 3 + 2 * self.max_top());
        WORD * arrays * self.rows
    }

    /// What row `row` got; `num_top`: how many of the best tokens it wants, if log-probabilities.
    fn output(&self, words: &[i32], row: usize, num_top: Option<usize>) -> SampleOutput {
        let token = match words[self.status(row)] {
            OK => Ok(words[self.token(row)].cast_unsigned()),
            NOT_A_NUMBER => Err(RowError::NotANumber),
            NOTHING_ALLOWED => Err(RowError::NothingAllowed),
            other => panic!("row {row} has status {other}"),
        };
        let pair = |id: i32, bits: i32| TokenLogprob {
            token: id.cast_unsigned(),
            logprob: f32::from_bits(bits.cast_unsigned()),
        };
        let logprobs = num_top.filter(|_| token.is_ok()).map(|n| {
            let ids = &words[self.top_id(row)..][..n];
            let values = &words[self.top_logprob(row)..][..n];
            TokenLogprobs {
                sampled: pair(words[self.token(row)], words[self.logprob(row)]),
                top: ids.iter().zip(values).map(|(&id, &bits)| pair(id, bits)).collect(),
            }
        });
        SampleOutput { token, logprobs }
    }
}

/// Who answers a row that has a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The device.
    Device { row: usize, num_top: Option<usize> },
    /// The host's sampler.
    Host,
}

/// What the host knows of a step whose results are not read yet.
#[derive(Debug, Default)]
pub(super) struct StepAnswers {
    pub shape: ResultShape,
    /// Of each row with a target.
    pub answers: Vec<Answer>,
    /// Those of the host, in row order.
    pub by_host: Vec<SampleOutput>,
}

impl StepAnswers {
    pub fn clear(&mut self) {
        self.shape = ResultShape::default();
        self.answers.clear();
        self.by_host.clear();
    }

    /// Appends the answers, in row order, given the device's results.
    pub fn read(&mut self, words: &[i32], out: &mut Vec<SampleOutput>) {
        let (shape, mut by_host) = (self.shape, self.by_host.drain(..));
        out.extend(self.answers.iter().map(|&answer| match answer {
            Answer::Device { row, num_top } => shape.output(words, row, num_top),
            Answer::Host => by_host.next().expect("its slice was sampled"),
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_lie_one_after_the_other_and_rows_of_four_are_aligned() {
        let shape = ResultShape::new(6, Some(3));
        let of_row_4 = [shape.token(4), shape.status(4), shape.logprob(4)];
        assert_eq!(of_row_4, [4, 8 + 4, 16 + 4]);
        assert_eq!((shape.top_id(4), shape.top_logprob(4)), (24 + 12, 48 + 12));
        assert_eq!(shape.bytes(), 4 * 72);
        assert_eq!(ResultShape::new(6, None).bytes(), 4 * 16);
        assert_eq!(ResultShape::default().bytes(), 0);
    }

    /// Rows: a token alone, one with log-probabilities, a refused one with them, the host's.
    #[test]
    fn answers_come_in_row_order() {
        let shape = ResultShape::new(5, Some(2));
        let mut words = vec![0; shape.bytes() / WORD];
        let bits = |x: f32| x.to_bits().cast_signed();
        for (at, word) in [
            (shape.token(0), 11),
            (shape.token(2), 22),
            (shape.logprob(2), bits(-0.5)),
            (shape.top_id(2), 7),
            (shape.top_logprob(2), bits(-0.25)),
            (shape.top_id(2) + 1, 99),
            (shape.status(3), NOTHING_ALLOWED),
            (shape.status(4), NOT_A_NUMBER),
        ] {
            words[at] = word;
        }
        let host = SampleOutput { token: Ok(5), logprobs: None };
        let device = |row, num_top| Answer::Device { row, num_top };
        let mut step = StepAnswers {
            shape,
            answers: vec![
                device(0, None),
                Answer::Host,
                device(2, Some(1)),
                device(3, Some(1)),
                device(4, None),
            ],
            by_host: vec![host.clone()],
        };
        let mut out = Vec::new();
        step.read(&words, &mut out);
        let pair = |token, logprob| TokenLogprob { token, logprob };
        let logprobs = TokenLogprobs { sampled: pair(22, -0.5), top: vec![pair(7, -0.25)] };
        let refused = |error| SampleOutput { token: Err(error), logprobs: None };
        let want = [
            SampleOutput { token: Ok(11), logprobs: None },
            host,
            SampleOutput { token: Ok(22), logprobs: Some(logprobs) },
            refused(RowError::NothingAllowed),
            refused(RowError::NotANumber),
        ];
        assert_eq!(out, want);
        step.clear();
        assert_eq!((step.answers.len(), step.shape.bytes()), (0, 0));
    }
}
