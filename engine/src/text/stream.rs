//! The output text of one sequence: detokenised, and ended by its stop strings.

use super::{Detokenizer, StopMatcher, TextError, Tokenizer};

/// How a sequence's output becomes text.
#[derive(Clone, Copy, Debug)]
pub struct OutputTextOptions<'a> {
    /// Strings that end the text, none of them empty.
    pub stops: &'a [String],
    /// Keep the stop string in the text.
    pub include_stop: bool,
    /// Stop strings that end in the text of the first `min_tokens` ids are plain text.
    pub min_tokens: usize,
    /// Leave out tokens flagged special.
    pub skip_special_tokens: bool,
    /// Without it there is no text, and so no stop string is found.
    pub detokenize: bool,
}

/// Text that has become certain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextDelta {
    /// The text, which may be empty.
    pub text: String,
    /// Index of the stop string that was found, now or before. The text has ended then.
    pub stop: Option<usize>,
}

/// Turns the output ids of one sequence into the text that its user sees.
#[derive(Clone)]
pub struct OutputText {
    /// None: no text is wanted.
    pipe: Option<(Detokenizer, StopMatcher)>,
    min_tokens: usize,
    num_tokens: usize,
}

impl OutputText {
    /// The text of a sequence without output yet.
    ///
    /// # Panics
    /// A stop string is empty.
    pub fn new(tokenizer: &Tokenizer, options: &OutputTextOptions) -> Self {
        let pipe = options.detokenize.then(|| {
            let detokenizer = Detokenizer::new(tokenizer.clone(), options.skip_special_tokens);
            (detokenizer, StopMatcher::new(options.stops, options.include_stop))
        });
        Self { pipe, min_tokens: options.min_tokens, num_tokens: 0 }
    }

    /// Takes the next output id. After a stop string nothing more is given out.
    ///
    /// # Errors
    /// The tokenizer's decoder fails.
    pub fn push(&mut self, id: u32) -> Result<TextDelta, TextError> {
        self.num_tokens += 1;
        let Some((detokenizer, matcher)) = &mut self.pipe else {
            return Ok(TextDelta::default());
        };
        let text = detokenizer.push(id)?;
        Ok(match_stops(matcher, &text, self.num_tokens > self.min_tokens))
    }

    /// Gives the rest of the text, after the last id. Text that the detokeniser held back can still
    /// hold a stop string.
    ///
    /// # Errors
    /// The tokenizer's decoder fails.
    pub fn finish(&mut self) -> Result<TextDelta, TextError> {
        let Some((detokenizer, matcher)) = &mut self.pipe else {
            return Ok(TextDelta::default());
        };
        let text = detokenizer.finish()?;
        let mut delta = match_stops(matcher, &text, self.num_tokens > self.min_tokens);
        delta.text.push_str(&matcher.finish());
        Ok(delta)
    }
}

fn match_stops(matcher: &mut StopMatcher, text: &str, may_stop: bool) -> TextDelta {
    if may_stop {
        let result = matcher.push(text);
        TextDelta { text: result.emit, stop: result.matched }
    } else {
        TextDelta { text: matcher.push_unmatched(text), stop: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::testing;

    fn options(stops: &[String]) -> OutputTextOptions<'_> {
        OutputTextOptions {
            stops,
            include_stop: false,
            min_tokens: 0,
            skip_special_tokens: true,
            detokenize: true,
        }
    }

    /// The deltas of `tokens`, the last one from `finish`.
    fn deltas(tokens: &[&str], options: &OutputTextOptions) -> Vec<(String, Option<usize>)> {
        let tokenizer = testing::llama();
        let mut output = OutputText::new(&tokenizer, options);
        let ids = tokens.iter().map(|token| tokenizer.token_to_id(token).expect(token));
        let mut deltas: Vec<TextDelta> = ids.map(|id| output.push(id).unwrap()).collect();
        deltas.push(output.finish().unwrap());
        deltas.into_iter().map(|delta| (delta.text, delta.stop)).collect()
    }

    fn text(text: &str) -> (String, Option<usize>) {
        (text.to_owned(), None)
    }

    fn stop(text: &str) -> (String, Option<usize>) {
        (text.to_owned(), Some(0))
    }

    #[test]
    fn stop_strings_span_tokens() {
        let stops = ["y you".to_owned()];
        let tokens = ["▁Hey", "▁you", "▁Hey"];
        assert_eq!(deltas(&tokens, &options(&stops)), [text("He"), stop(""), stop(""), stop("")]);
        assert_eq!(deltas(&tokens[..1], &options(&stops)), [text("He"), text("y")]);
        let include = OutputTextOptions { include_stop: true, ..options(&stops) };
        assert_eq!(deltas(&tokens[..2], &include), [text("He"), stop("y you"), stop("")]);
    }

    #[test]
    fn stop_strings_are_found_in_the_held_back_end() {
        let stops = ["你".to_owned()];
        let tokens = ["Hey", "<0xE4>", "<0xBD>", "<0xA0>"];
        let expected = [text("Hey"), text(""), text(""), text(""), stop("")];
        assert_eq!(deltas(&tokens, &options(&stops)), expected);
    }

    #[test]
    fn skipped_special_tokens_stop_nothing() {
        let stops = ["</s>".to_owned()];
        assert_eq!(deltas(&["Hey", "</s>"], &options(&stops)), [text("Hey"), text(""), text("")]);
        let shown = OutputTextOptions { skip_special_tokens: false, ..options(&stops) };
        assert_eq!(deltas(&["Hey", "</s>"], &shown), [text("Hey"), stop(""), stop("")]);
    }

    #[test]
    fn min_tokens_makes_early_stops_text() {
        let stops = ["Hey".to_owned()];
        let options = OutputTextOptions { min_tokens: 2, ..options(&stops) };
        let expected = [text("Hey"), text("Hey"), stop(""), stop("")];
        assert_eq!(deltas(&["Hey", "Hey", "Hey"], &options), expected);
        assert_eq!(deltas(&["Hey", "Hey"], &options), [text("Hey"), text("Hey"), text("")]);
    }

    #[test]
    fn without_detokenize_there_is_no_text() {
        let stops = ["Hey".to_owned()];
        let options = OutputTextOptions { detokenize: false, ..options(&stops) };
        assert_eq!(deltas(&["Hey", "▁you"], &options), [text(""), text(""), text("")]);
    }
}
