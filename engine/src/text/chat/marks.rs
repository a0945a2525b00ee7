//! Keeps what users write from becoming control tokens.
//!
//! ```text
//!   "<|im_end|>"  ── Marks::mark ──▶  "⟨mark⟩|im_end|>"  ── template ──▶ …
//!     … ── Marks::restore ──▶  "<|im_end|>" and the byte where the mark was  ── encode
//! ```
//!
//! A control token in the rendered text is one of the template's only if its first character is.
//! So before rendering, in every string from outside, each character that a control token can
//! start with is replaced by a mark: a private-use character that occurs nowhere in the request or
//! the template. A mark stays in place however the template cuts and joins the strings, also where
//! it joins two harmless halves. The one exception are strings that the template itself spells out
//! and looks for, such as `</think>`; those are left alone unless they are control tokens.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::RangeInclusive;

use super::ChatError;

/// Unicode's private use areas, save the last.
const PRIVATE_USE: [RangeInclusive<char>; 2] = ['\u{E000}'..='\u{F8FF}', '\u{F0000}'..='\u{FFFFD}'];

/// Whether `c` is of the kind that marks are made of.
pub fn may_be_mark(c: char) -> bool {
    PRIVATE_USE.iter().any(|range| range.contains(&c))
}

/// The control tokens of a tokenizer, and what a template looks for in messages.
#[derive(Debug, Default)]
pub struct ControlTokens {
    /// Sorted; none is empty.
    tokens: Vec<String>,
    /// Strings of the template that may start in a message as they are. Sorted.
    literals: Vec<String>,
}

impl ControlTokens {
    pub fn new(tokens: &[String], literals: &BTreeSet<String>) -> Self {
        let mut tokens: Vec<_> = tokens.iter().filter(|token| !token.is_empty()).cloned().collect();
        tokens.sort_unstable();
        let begins_token = |literal: &String| tokens.iter().any(|token| token.starts_with(literal));
        let literals = literals.iter().filter(|literal| !begins_token(literal)).cloned().collect();
        Self { tokens, literals }
    }

    /// Whether `text` begins with a control token.
    pub fn starts(&self, text: &str) -> bool {
        begins_with_one_of(&self.tokens, text)
    }

    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.tokens.iter().map(String::as_str)
    }
}

/// Whether `text` begins with one of some sorted strings. Takes little time for each byte that
/// agrees, however many strings there are.
fn begins_with_one_of(mut sorted: &[String], text: &str) -> bool {
    for (at, byte) in text.bytes().enumerate() {
        // All that is left agrees with the text up to here, and the shortest comes first.
        match sorted.first() {
            None => return false,
            Some(shortest) if shortest.len() == at => return true,
            Some(_) => {}
        }
        let start = sorted.partition_point(|string| string.as_bytes()[at] < byte);
        let end = sorted.partition_point(|string| string.as_bytes()[at] <= byte);
        sorted = &sorted[start..end];
    }
    sorted.first().is_some_and(|shortest| shortest.len() == text.len())
}

/// The private-use characters that occur in some texts.
#[derive(Debug, Default)]
pub struct PrivateUse(HashSet<char>);

impl PrivateUse {
    pub fn add(&mut self, text: &str) {
        if !text.is_ascii() {
            self.0.extend(text.chars().filter(|&c| may_be_mark(c)));
        }
    }
}

/// One mark for each character that control tokens start with.
pub struct Marks<'a> {
    control: &'a ControlTokens,
    /// Character → mark.
    marks: BTreeMap<char, char>,
    /// Mark → character.
    characters: BTreeMap<char, char>,
}

impl<'a> Marks<'a> {
    /// Chooses marks that are not among `used`.
    pub fn new(control: &'a ControlTokens, used: &PrivateUse) -> Result<Self, ChatError> {
        let mut free = PRIVATE_USE.into_iter().flatten().filter(|c| !used.0.contains(c));
        let mut marks = BTreeMap::new();
        let firsts: BTreeSet<char> =
            control.iter().filter_map(|token| token.chars().next()).collect();
        for first in firsts {
            marks.insert(first, free.next().ok_or(ChatError::NoFreeCharacter)?);
        }
        let characters = marks.iter().map(|(&c, &mark)| (mark, c)).collect();
        Ok(Self { control, marks, characters })
    }

    /// `text` from outside with each character that could start a control token marked.
    pub fn mark(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        for (at, c) in text.char_indices() {
            let rest = &text[at..];
            match self.marks.get(&c) {
                Some(&mark)
                    if self.control.starts(rest)
                        || !begins_with_one_of(&self.control.literals, rest) =>
                {
                    out.push(mark);
                }
                _ => out.push(c),
            }
        }
        out
    }

    /// Rendered text with marks turned back, and the bytes where they were.
    pub fn restore(&self, text: &str) -> (String, Vec<usize>) {
        let mut out = String::with_capacity(text.len());
        let mut places = Vec::new();
        for c in text.chars() {
            match self.characters.get(&c) {
                Some(&original) => {
                    places.push(out.len());
                    out.push(original);
                }
                None => out.push(c),
            }
        }
        (out, places)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn control() -> ControlTokens {
        let tokens = ["<|a|>", "<|b|>", "[X]"].map(str::to_owned);
        let literals = ["</think>", "<|a|>", "<|", "<", "plain"].map(str::to_owned);
        ControlTokens::new(&tokens, &BTreeSet::from(literals))
    }

    fn marks(control: &ControlTokens) -> Marks<'_> {
        Marks::new(control, &PrivateUse::default()).unwrap()
    }

    #[test]
    fn beginnings_are_found() {
        let sorted = ["a", "ab", "abcd", "bc", "b€"].map(str::to_owned);
        for (text, expected) in [
            ("a", true),
            ("abc", true),
            ("b", false),
            ("b€", true),
            ("b€x", true),
            ("bb", false),
            ("bcd", true),
            ("", false),
            ("c", false),
        ] {
            assert_eq!(begins_with_one_of(&sorted, text), expected, "{text}");
        }
        assert!(!begins_with_one_of(&[], "a"));
    }

    #[test]
    fn what_could_start_a_control_token_is_marked_and_restored() {
        let control = control();
        let marks = marks(&control);
        let text = "é <|a|> a<b [X [X] </think>";
        let marked = marks.mark(text);
        assert_eq!(marked, "é \u{E000}|a|> a\u{E000}b \u{E001}X \u{E001}X] </think>");
        let (restored, places) = marks.restore(&marked);
        assert_eq!(restored, text);
        assert_eq!(places, [3, 10, 13, 16]);
    }

    #[test]
    fn halves_that_the_template_joins_stay_marked() {
        let control = control();
        let marks = marks(&control);
        let joined = [marks.mark("<|"), marks.mark("a|>")].concat();
        let (restored, places) = marks.restore(&joined);
        assert_eq!((restored.as_str(), places.as_slice()), ("<|a|>", [0].as_slice()));
        assert!(control.starts(&restored));
    }

    #[test]
    fn marks_avoid_what_occurs() {
        let control = control();
        let mut used = PrivateUse::default();
        used.add("x\u{E000}\u{E002}");
        let marks = Marks::new(&control, &used).unwrap();
        assert_eq!(marks.mark("<["), "\u{E001}\u{E003}");
        PRIVATE_USE.into_iter().flatten().for_each(|c| used.add(&c.to_string()));
        assert!(matches!(Marks::new(&control, &used), Err(ChatError::NoFreeCharacter)));
    }
}
