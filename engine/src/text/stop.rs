//! Finds stop strings in text that comes in pieces.
//!
//! One Knuth–Morris–Pratt automaton per stop string: the cost is linear in the text and in the stop
//! strings, however repetitive, and the automata's states say how much of the text's end may still
//! become a stop string. That much is held back, and no more:
//!
//! ```text
//!   text    … f o o b a r E N          stops "END", "bar!"
//!           └─ emitted ──┘└ held: "EN" is the longest end of the text that starts a stop
//! ```

use std::sync::Arc;

/// Passes text through until the first stop string.
///
/// The match is the one whose last byte comes first; of several stop strings that end there, the
/// longest; of equal ones, the first listed. How the text is cut into pieces has no influence.
#[derive(Clone)]
pub struct StopMatcher {
    patterns: Arc<[Pattern]>,
    /// For each pattern, how many of its bytes the end of the text matches.
    states: Vec<usize>,
    include_stop: bool,
    /// Text of which the first `num_emitted` bytes were given out.
    text: String,
    num_emitted: usize,
    matched: Option<usize>,
}

/// What a piece of text made certain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopResult {
    /// Text to give out.
    pub emit: String,
    /// Index of the stop string that was found, now or before. The text has ended then.
    pub matched: Option<usize>,
}

struct Pattern {
    bytes: Vec<u8>,
    /// `borders[n]`: length of the longest proper prefix of `bytes[..n]` that is also its suffix;
    /// 0 for n = 0. `[bytes.len() + 1]`
    borders: Vec<usize>,
}

impl Pattern {
    fn new(stop: &str) -> Self {
        assert!(!stop.is_empty(), "an empty stop string matches everywhere; refuse it earlier");
        let bytes = stop.as_bytes().to_vec();
        let mut pattern = Self { borders: vec![0; 2], bytes };
        let mut state = 0;
        for i in 1..pattern.bytes.len() {
            state = pattern.next(state, pattern.bytes[i]);
            pattern.borders.push(state);
        }
        pattern
    }

    /// The number of matched bytes after `byte`, where `state` of them matched before.
    fn next(&self, mut state: usize, byte: u8) -> usize {
        if state == self.bytes.len() {
            state = self.borders[state];
        }
        while state > 0 && self.bytes[state] != byte {
            state = self.borders[state];
        }
        if self.bytes[state] == byte { state + 1 } else { 0 }
    }
}

impl StopMatcher {
    /// A matcher at the start of a text. `include_stop` keeps the stop string in the text.
    ///
    /// `stops` may be empty. They are to be checked against [`MAX_STOP_STRINGS`] and
    /// [`MAX_STOP_BYTES`] before.
    ///
    /// # Panics
    /// A stop string is empty.
    ///
    /// [`MAX_STOP_STRINGS`]: super::MAX_STOP_STRINGS
    /// [`MAX_STOP_BYTES`]: super::MAX_STOP_BYTES
    pub fn new(stops: &[String], include_stop: bool) -> Self {
        Self {
            patterns: stops.iter().map(|stop| Pattern::new(stop)).collect(),
            states: vec![0; stops.len()],
            include_stop,
            text: String::new(),
            num_emitted: 0,
            matched: None,
        }
    }

    /// Takes the next piece of text. After a match nothing more is emitted.
    pub fn push(&mut self, text: &str) -> StopResult {
        if self.matched.is_some() {
            return StopResult { emit: String::new(), matched: self.matched };
        }
        let text_start = self.append(text);
        for (i, byte) in text.bytes().enumerate() {
            self.step(byte);
            if let Some(index) = self.full_match() {
                self.matched = Some(index);
                let stop_end = text_start + i + 1;
                let stop_bytes = self.patterns[index].bytes.len();
                let end = if self.include_stop { stop_end } else { stop_end - stop_bytes };
                return StopResult { emit: self.emit_to(end), matched: self.matched };
            }
        }
        StopResult { emit: self.emit_certain(), matched: None }
    }

    /// Takes the next piece of text, in which no stop string can end; one may start.
    pub fn push_unmatched(&mut self, text: &str) -> String {
        if self.matched.is_some() {
            return String::new();
        }
        self.append(text);
        for byte in text.bytes() {
            self.step(byte);
        }
        for (pattern, state) in self.patterns.iter().zip(&mut self.states) {
            if *state == pattern.bytes.len() {
                *state = pattern.borders[*state];
            }
        }
        self.emit_certain()
    }

    /// Gives the text that was held back: the input has ended, without a match. Empty after one.
    pub fn finish(&mut self) -> String {
        if self.matched.is_some() {
            return String::new();
        }
        self.states.fill(0);
        self.emit_certain()
    }

    /// Appends to the held text; gives where the piece starts in it.
    fn append(&mut self, text: &str) -> usize {
        // Only once half is waste, so that the moves stay linear in the text.
        if self.num_emitted > self.text.len() / 2 {
            self.text.drain(..self.num_emitted);
            self.num_emitted = 0;
        }
        let start = self.text.len();
        self.text.push_str(text);
        start
    }

    fn step(&mut self, byte: u8) {
        for (pattern, state) in self.patterns.iter().zip(&mut self.states) {
            *state = pattern.next(*state, byte);
        }
    }

    /// The longest stop string that ends with the last byte, the first listed of equal ones.
    fn full_match(&self) -> Option<usize> {
        let is_full = |&index: &usize| self.states[index] == self.patterns[index].bytes.len();
        // `max_by_key` takes the last of equal ones.
        (0..self.states.len()).rev().filter(is_full).max_by_key(|&index| self.states[index])
    }

    /// Gives all but the longest end that starts a stop string. Its first byte is the stop's first,
    /// so the cut lies between characters.
    fn emit_certain(&mut self) -> String {
        let num_held = self.states.iter().copied().max().unwrap_or(0);
        self.emit_to(self.text.len() - num_held)
    }

    fn emit_to(&mut self, end: usize) -> String {
        let emit = self.text[self.num_emitted..end].to_owned();
        self.num_emitted = end;
        emit
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn matcher(stops: &[&str], include_stop: bool) -> StopMatcher {
        let stops: Vec<String> = stops.iter().map(|&stop| stop.to_owned()).collect();
        StopMatcher::new(&stops, include_stop)
    }

    fn push_all(matcher: &mut StopMatcher, pieces: &[&str]) -> Vec<(String, Option<usize>)> {
        let push = |&piece: &&str| {
            let result = matcher.push(piece);
            (result.emit, result.matched)
        };
        pieces.iter().map(push).collect()
    }

    #[test]
    fn a33_stop_across_pieces_leaks_nothing() {
        let mut matcher = matcher(&["DEFGHIJ"], false);
        let nothing = || (String::new(), None);
        assert_eq!(
            push_all(&mut matcher, &["DEF", "G", "HI", "J", "after"]),
            [nothing(), nothing(), nothing(), (String::new(), Some(0)), (String::new(), Some(0))]
        );
        assert_eq!(matcher.finish(), "");
    }

    #[test]
    fn a33_broken_prefix_is_given_out_whole() {
        let mut matcher = matcher(&["DEFGHIJ"], false);
        assert_eq!(matcher.push("abcDEF").emit, "abc");
        assert_eq!(matcher.push("GH").emit, "");
        assert_eq!(matcher.push("DEx").emit, "DEFGHDEx");
        assert_eq!(matcher.push("DE").emit, "");
        assert_eq!(matcher.finish(), "DE");
    }

    #[test]
    fn the_stop_string_is_kept_on_demand() {
        let mut matcher = matcher(&["END"], true);
        assert_eq!(matcher.push("an EN").emit, "an ");
        let result = matcher.push("D of it");
        assert_eq!(result, StopResult { emit: "END".to_owned(), matched: Some(0) });
    }

    #[test]
    fn the_first_end_wins_then_the_longest_then_the_first_listed() {
        let first_end = matcher(&["abcd", "bc"], false).push("xabcd");
        assert_eq!(first_end, StopResult { emit: "xa".to_owned(), matched: Some(1) });
        let longest = matcher(&["c", "abc", "bc", "abc"], false).push("xabc");
        assert_eq!(longest, StopResult { emit: "x".to_owned(), matched: Some(1) });
    }

    #[test]
    fn cuts_lie_between_characters() {
        // "é" is C3 A9 and "è" is C3 A8: they share a byte, but not a character.
        let mut matcher = matcher(&["é!", "😀"], false);
        assert_eq!(matcher.push("è").emit, "è");
        assert_eq!(matcher.push("é").emit, "");
        assert_eq!(matcher.push("😁").emit, "é😁");
        assert_eq!(matcher.push("…😀").emit, "…");
    }

    #[test]
    fn without_stops_all_text_passes() {
        let mut matcher = matcher(&[], false);
        assert_eq!(matcher.push("text"), StopResult { emit: "text".to_owned(), matched: None });
        assert_eq!(matcher.finish(), "");
    }

    #[test]
    fn a_stop_that_ends_too_early_is_text() {
        let mut matcher = matcher(&["aba"], false);
        assert_eq!(matcher.push_unmatched("aba"), "ab");
        assert_eq!(matcher.push("ba"), StopResult { emit: String::new(), matched: Some(0) });
    }

    #[test]
    fn long_stops_in_repetitive_text_take_linear_time() {
        let stop = "a".repeat(10_000) + "b";
        let mut matcher = matcher(&[&stop], false);
        let steps_per_push = 1_000_000 / 50;
        let mut num_emitted = 0;
        for _ in 0..50 {
            num_emitted += matcher.push(&"a".repeat(steps_per_push)).emit.len();
        }
        assert_eq!(num_emitted, 1_000_000 - 10_000);
        // The buffer holds the possible stop, one piece, and as much again of emitted text.
        assert!(matcher.text.capacity() < 4 * (10_000 + steps_per_push));
        assert_eq!(matcher.push("b"), StopResult { emit: String::new(), matched: Some(0) });
    }

    /// The text up to the stop, and the stop, found by looking at every end of the text.
    fn naive(stops: &[String], include_stop: bool, text: &str) -> (String, Option<usize>) {
        for (end, _) in text.char_indices().skip(1).chain([(text.len(), ' ')]) {
            let ending = stops.iter().enumerate().filter(|(_, stop)| text[..end].ends_with(*stop));
            let longest = ending.reduce(|a, b| if b.1.len() > a.1.len() { b } else { a });
            if let Some((index, stop)) = longest {
                let end = if include_stop { end } else { end - stop.len() };
                return (text[..end].to_owned(), Some(index));
            }
        }
        (text.to_owned(), None)
    }

    proptest! {
        #[test]
        fn matches_like_the_naive_matcher(
            stops in prop::collection::vec("[abé]{1,5}", 0..4),
            pieces in prop::collection::vec("[abé]{0,4}", 0..12),
            include_stop: bool,
        ) {
            let mut matcher = StopMatcher::new(&stops, include_stop);
            let mut emitted = String::new();
            let mut matched = None;
            let mut seen = String::new();
            for piece in &pieces {
                let result = matcher.push(piece);
                emitted.push_str(&result.emit);
                matched = result.matched;
                seen.push_str(piece);
                if matched.is_some() {
                    continue;
                }
                // All is out but the longest end that starts a stop.
                prop_assert!(seen.starts_with(&emitted));
                let starts_stop = |&(at, _): &(usize, char)| {
                    stops.iter().any(|stop| stop.starts_with(&seen[at..]))
                };
                let held_from = seen.char_indices().find(starts_stop).map_or(seen.len(), |f| f.0);
                prop_assert_eq!(emitted.len(), held_from);
            }
            emitted.push_str(&matcher.finish());
            prop_assert_eq!((emitted, matched), naive(&stops, include_stop, &pieces.concat()));
        }
    }
}
