//! Token ids to text, one id at a time.

use super::chain::Chain;
use super::{TextError, Tokenizer};

/// Turns the output ids of one sequence into text as they come.
///
/// The texts of all [`push`](Self::push)es and of [`finish`](Self::finish), joined, are exactly
/// `tokenizer.decode(ids, skip_special)` of all pushed ids: the ids alone, not as the continuation
/// of a prompt, so a tokenizer that drops the space before the first word drops it before the first
/// output word. Time per token does not grow with the text, nor does memory, but for
/// what is held back.
///
/// Text is held back only while a later token can change it: an unfinished UTF-8 character, and for
/// byte-fallback tokenizers a run of `<0x..>` tokens, which is text or U+FFFD as a whole.
#[derive(Clone)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special: bool,
    chain: Chain,
}

impl Detokenizer {
    /// A detokenizer at the start of a text. `skip_special` leaves out the tokens that the
    /// tokenizer flags special, whatever they look like.
    pub fn new(tokenizer: Tokenizer, skip_special: bool) -> Self {
        let chain = tokenizer.chain();
        Self { tokenizer, skip_special, chain }
    }

    /// Takes the next id; gives the text that has become certain, which may be empty. An id outside
    /// the vocabulary has no text.
    ///
    /// # Errors
    /// The tokenizer's decoder fails.
    pub fn push(&mut self, id: u32) -> Result<String, TextError> {
        match self.tokenizer.visible_token(id, self.skip_special) {
            Some(token) => self.chain.push(token),
            None => Ok(String::new()),
        }
    }

    /// Gives the rest of the text; an unfinished character reads as U+FFFD. To be called once,
    /// after the last id.
    ///
    /// # Errors
    /// The tokenizer's decoder fails.
    pub fn finish(&mut self) -> Result<String, TextError> {
        self.chain.finish()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::text::testing;

    /// The deltas of `ids`, the last one from `finish`.
    fn deltas(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> Vec<String> {
        let mut detokenizer = Detokenizer::new(tokenizer.clone(), skip_special);
        let mut deltas: Vec<_> = ids.iter().map(|&id| detokenizer.push(id).unwrap()).collect();
        deltas.push(detokenizer.finish().unwrap());
        deltas
    }

    fn ids(tokenizer: &Tokenizer, tokens: &[&str]) -> Vec<u32> {
        tokens.iter().map(|token| tokenizer.token_to_id(token).expect(token)).collect()
    }

    #[test]
    fn a36_characters_split_over_byte_level_tokens() {
        let tokenizer = testing::byte_level();
        // "😀" is F0 9F | 98 80, "你" is E4 | BD A0.
        let ids = ids(&tokenizer, &["ðŁ", "ĺĢ", "ä", "½ł"]);
        assert_eq!(deltas(&tokenizer, &ids, true), ["", "😀", "", "你", ""]);
    }

    #[test]
    fn a36_characters_split_over_fallback_tokens() {
        let tokenizer = testing::llama();
        let ids = ids(&tokenizer, &["<0xE4>", "<0xBD>", "<0xA0>", "▁you"]);
        assert_eq!(deltas(&tokenizer, &ids, true), ["", "", "", "你 you", ""]);
        assert_eq!(deltas(&tokenizer, &ids[..3], true), ["", "", "", "你"]);
    }

    #[test]
    fn a_fallback_run_that_turns_invalid_is_all_replacement() {
        let tokenizer = testing::llama();
        let ids = ids(&tokenizer, &["<0xE4>", "<0xBD>", "<0xA0>", "<0x80>", "<0x41>", "Hey"]);
        assert_eq!(deltas(&tokenizer, &ids, true), ["", "", "", "����", "�", "Hey", ""]);
    }

    #[test]
    fn a38_metaspace_keeps_spaces_between_tokens() {
        for tokenizer in [testing::metaspace(), testing::llama()] {
            let hey_you = ids(&tokenizer, &["▁Hey", "▁you"]);
            assert_eq!(deltas(&tokenizer, &hey_you, true), ["Hey", " you", ""]);
        }
        let llama = testing::llama();
        assert_eq!(deltas(&llama, &ids(&llama, &["▁in▁the"]), true), ["in the", ""]);
        // The first visible token counts, not the first id; and one space is dropped, not two.
        let special_first = ids(&llama, &["</s>", "▁", "▁Hey"]);
        assert_eq!(deltas(&llama, &special_first, true), ["", "", " Hey", ""]);
    }

    #[test]
    fn a39_special_is_a_flag_not_a_shape() {
        let tokenizer = testing::llama();
        let ids = ids(&tokenizer, &["Hey", "<tool>", "</s>"]);
        assert_eq!(deltas(&tokenizer, &ids, true), ["Hey", "<tool>", "", ""]);
        assert_eq!(deltas(&tokenizer, &ids, false), ["Hey", "<tool>", "</s>", ""]);
    }

    #[test]
    fn unfinished_characters_end_as_replacement() {
        let tokenizer = testing::byte_level();
        assert_eq!(deltas(&tokenizer, &ids(&tokenizer, &["ðŁ"]), true), ["", "�"]);
        let tokenizer = testing::llama();
        let ids = ids(&tokenizer, &["<0xF0>", "<0x9F>"]);
        assert_eq!(deltas(&tokenizer, &ids, true), ["", "", "��"]);
    }

    #[test]
    fn endless_invalid_bytes_are_not_held() {
        for (tokenizer, token) in [(testing::byte_level(), "Ģ"), (testing::llama(), "<0x80>")] {
            let mut ids = ids(&tokenizer, &[token]);
            ids.resize(1000, ids[0]);
            let deltas = deltas(&tokenizer, &ids, true);
            assert!(deltas[..1000].iter().all(|delta| delta == "�"));
            assert_eq!(deltas[1000], "");
        }
    }

    #[test]
    fn word_piece_cleans_up_each_word() {
        let tokenizer = testing::word_piece();
        let ids = ids(&tokenizer, &["sing", "##ing", "!", "b"]);
        assert_eq!(deltas(&tokenizer, &ids, true), ["sing", "ing", "!", " b", ""]);
    }

    /// Part of an id sequence for any tokenizer.
    #[derive(Clone, Debug)]
    enum Pick {
        /// An id, modulo the size of the vocabulary and two ids that are in none.
        Id(u32),
        /// The bytes of a character, if the tokenizer has bytes.
        Char(char),
    }

    fn pick() -> impl Strategy<Value = Pick> {
        prop_oneof![any::<u32>().prop_map(Pick::Id), any::<char>().prop_map(Pick::Char)]
    }

    fn ids_of(tokenizer: &Tokenizer, picks: &[Pick]) -> Vec<u32> {
        let num_ids = tokenizer.vocab_size() as u32 + 2;
        let ids_of_pick = |pick: &Pick| match *pick {
            Pick::Id(id) => vec![id % num_ids],
            Pick::Char(c) => testing::byte_ids(tokenizer, c),
        };
        picks.iter().flat_map(ids_of_pick).collect()
    }

    proptest! {
        #[test]
        fn deltas_join_to_the_one_shot_decode(
            picks in prop::collection::vec(pick(), 0..20),
            skip_special: bool,
        ) {
            for (name, tokenizer) in testing::all() {
                let ids = ids_of(&tokenizer, &picks);
                let whole = tokenizer.decode(&ids, skip_special).unwrap();
                prop_assert_eq!(deltas(&tokenizer, &ids, skip_special).concat(), whole, "{}", name);
            }
        }

        #[test]
        fn byte_level_holds_at_most_one_character(picks in prop::collection::vec(pick(), 0..20)) {
            let tokenizer = testing::byte_level();
            let deltas = deltas(&tokenizer, &ids_of(&tokenizer, &picks), false);
            prop_assert!(["", "�"].contains(&deltas.last().unwrap().as_str()));
        }
    }
}
