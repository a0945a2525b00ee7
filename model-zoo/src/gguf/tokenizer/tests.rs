//! SentencePiece against the algorithm in its plainest form, hostile keys, and word splits.

use std::path::Path;

use proptest::prelude::*;
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

use super::{super::header, super::testing::Builder, words::WordSplit, *};

/// Token, score, type.
type Piece = (String, f32, TokenType);

fn piece(text: &str, score: f32, kind: TokenType) -> Piece {
    (text.to_owned(), score, kind)
}

/// `<unk>`, `<s>`, `</s>`, the 256 bytes, then `pieces` from id 259 on.
fn vocabulary(pieces: &[Piece]) -> Vec<Piece> {
    let mut all = vec![
        piece("<unk>", 0.0, TokenType::UNKNOWN),
        piece("<s>", 0.0, TokenType::CONTROL),
        piece("</s>", 0.0, TokenType::CONTROL),
    ];
    all.extend((0..=255).map(|b: u8| piece(&format!("<0x{b:02X}>"), 0.0, TokenType(6))));
    all.extend_from_slice(pieces);
    all
}

fn spm(pieces: &[Piece]) -> Builder {
    let texts: Vec<&str> = pieces.iter().map(|(text, ..)| text.as_str()).collect();
    let scores: Vec<u8> = pieces.iter().flat_map(|(_, score, _)| score.to_le_bytes()).collect();
    let types: Vec<i32> = pieces.iter().map(|(.., kind)| kind.0 as i32).collect();
    Builder::new()
        .string(MODEL, "llama")
        .strings(TOKENS, &texts)
        .array(SCORES, 6, pieces.len() as u64, &scores)
        .i32s(TOKEN_TYPE, &types)
        .u32(BOS, 1)
        .u32(EOS, 2)
}

/// `Hello` and `▁world` by way of their parts, `\n\n` and `<tool>` as they are.
fn example() -> Vec<Piece> {
    let texts = [
        "▁", "e", "l", "o", "H", "w", "r", "d", "ll", "He", "Hell", "Hello", "▁w", "or", "ld",
        "▁wor", "▁world",
    ];
    let normal = texts.iter().enumerate();
    let mut pieces: Vec<Piece> =
        normal.map(|(i, text)| piece(text, -(i as f32), TokenType::NORMAL)).collect();
    pieces.push(piece("\n\n", -1000.0, TokenType::USER_DEFINED));
    pieces.push(piece("<tool>", -1000.0, TokenType::USER_DEFINED));
    vocabulary(&pieces)
}

fn read(builder: &Builder) -> Result<GgufTokenizer, String> {
    let header = header::parse(Path::new("m.gguf"), &builder.bytes()).unwrap();
    read_tokenizer(&header.metadata).map_err(|e| e.to_string())
}

fn texts(read: &GgufTokenizer, text: &str) -> Vec<String> {
    read.tokenizer
        .encode_fast(text, true)
        .unwrap()
        .get_ids()
        .iter()
        .map(|id| read.tokenizer.id_to_token(*id).unwrap())
        .collect()
}

#[test]
fn spm_merges_by_score_and_spells_the_rest_in_bytes() {
    let read = read(&spm(&example())).unwrap();
    assert_eq!((read.bos, &read.eos[..], read.add_bos), (Some(1), &[2][..], true));
    let texts = |text: &str| texts(&read, text);
    assert_eq!(texts("Hello world"), ["▁", "Hello", "▁world"]);
    assert_eq!(texts("Hell\u{e9}"), ["▁", "Hell", "<0xC3>", "<0xA9>"]);
    assert_eq!(texts("\n"), ["▁", "<0x0A>"]);
    // Each stretch of text between other tokens starts with a space, as in llama.cpp.
    assert_eq!(
        texts("Hello</s>He\n\nHe<tool>"),
        ["▁", "Hello", "</s>", "▁", "He", "\n\n", "▁", "He", "<tool>"]
    );
    assert_eq!(texts(""), [""; 0]);
    for text in ["Hello world", "  Hello\tworld ", "naïve 日本 🦀\n", "Hell▁"] {
        let ids = read.tokenizer.encode_fast(text, true).unwrap().get_ids().to_vec();
        let decoded = read.tokenizer.decode(&ids, true).unwrap();
        assert_eq!(decoded, text.replace('▁', " "));
    }
    let bare = self::read(&spm(&example()).flag("tokenizer.ggml.add_space_prefix", false)).unwrap();
    assert_eq!(self::texts(&bare, "Hello world"), ["Hello", "▁world"]);
    assert_eq!(bare.tokenizer.decode(&[259, 259], true).unwrap(), "  ");
}

#[test]
fn spm_without_bytes_has_an_unknown_token() {
    let pieces = [
        piece("<unk>", 0.0, TokenType::UNKNOWN),
        piece("<s>", 0.0, TokenType::CONTROL),
        piece("</s>", 0.0, TokenType::CONTROL),
        piece("▁", -1.0, TokenType::NORMAL),
        piece("a", -2.0, TokenType::NORMAL),
    ];
    assert_eq!(texts(&read(&spm(&pieces)).unwrap(), "aéüa"), ["▁", "a", "<unk>", "a"]);
    let mut without = pieces.to_vec();
    without[0].2 = TokenType::NORMAL;
    assert!(read(&spm(&without)).unwrap_err().contains("`tokenizer.ggml.unknown_token_id`"));
    let named = spm(&without).u32("tokenizer.ggml.unknown_token_id", 0);
    assert_eq!(texts(&read(&named).unwrap(), "é"), ["▁", "<unk>"]);
    let outside = spm(&without).u32("tokenizer.ggml.unknown_token_id", 5);
    assert!(read(&outside).unwrap_err().contains("is 5; there are 5 tokens"));
}

#[test]
fn bad_spm_keys_are_refused_by_name() {
    let refused = |builder: Builder, parts: &[&str]| {
        let message = read(&builder).unwrap_err();
        for part in ["m.gguf"].iter().chain(parts) {
            assert!(message.contains(part), "{message:?} lacks {part:?}");
        }
    };
    let good = || spm(&example());
    refused(good().without(SCORES), &["`tokenizer.ggml.scores`", "missing"]);
    refused(good().array(SCORES, 6, 1, &[0; 4]), &["1 entries", "278 tokens"]);
    refused(good().i32s(SCORES, &[0; 278]), &["`tokenizer.ggml.scores`", "list of floats"]);
    refused(
        good().flag("tokenizer.ggml.remove_extra_whitespaces", true),
        &["tokenizer option `remove_extra_whitespaces`"],
    );
    let charsmap = |bytes: &[u8]| {
        good().array("tokenizer.ggml.precompiled_charsmap", 0, bytes.len() as u64, bytes)
    };
    refused(charsmap(&[1]), &["tokenizer option `precompiled_charsmap`"]);
    assert!(read(&charsmap(&[])).is_ok());
    assert!(read(&good().flag("tokenizer.ggml.remove_extra_whitespaces", false)).is_ok());

    let mut changed = example();
    changed[270].1 = f32::NAN;
    refused(spm(&changed), &["`tokenizer.ggml.scores`", "token 270 NaN"]);
    changed[270].1 = changed[271].1;
    refused(spm(&changed), &["`▁w`", "`Hello`"]);
    changed[270].0 = "x".repeat(513);
    refused(spm(&changed), &["513 bytes", "limit is 512"]);
}

/// The algorithm as llama.cpp and SentencePiece describe it, without queues or ranks.
fn naive(pieces: &[Piece], text: &str) -> Vec<u32> {
    let id = |text: &str| pieces.iter().position(|piece| piece.0 == text);
    let mut symbols: Vec<String> =
        format!("▁{}", text.replace(' ', "▁")).chars().map(String::from).collect();
    loop {
        let mut best: Option<(usize, f32)> = None;
        for at in 1..symbols.len() {
            let joined = symbols[at - 1..=at].concat();
            let score = id(&joined).map(|id| pieces[id].1);
            if let Some(score) = score.filter(|score| best.is_none_or(|(_, s)| *score > s)) {
                best = Some((at, score));
            }
        }
        let Some((at, _)) = best else { break };
        let right = symbols.remove(at);
        symbols[at - 1].push_str(&right);
    }
    let bytes = |symbol: &str| symbol.bytes().map(|b| 3 + u32::from(b)).collect::<Vec<_>>();
    let ids = symbols.iter().map(|s| id(s).map_or_else(|| bytes(s), |id| vec![id as u32]));
    ids.collect::<Vec<_>>().concat()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn spm_is_the_naive_algorithm(
        words in prop::collection::btree_set("[abé▁]{2,6}", 0..24),
        order in any::<prop::sample::Index>(),
        text in "[abé z\u{1f980}]{1,24}",
    ) {
        let mut pieces: Vec<String> = "abé▁".chars().map(String::from).chain(words).collect();
        // Any word may have any score; a rotation of a multiple is enough to vary their order.
        let len = pieces.len();
        pieces.rotate_left(order.index(len));
        let pieces: Vec<Piece> = pieces
            .into_iter()
            .enumerate()
            .map(|(i, text)| {
                let score = -((i * 7 + order.index(1000)) as f32 * 0.618).fract();
                piece(&text, score, TokenType::NORMAL)
            })
            .collect();
        let pieces = vocabulary(&pieces);
        let read = read(&spm(&pieces)).unwrap();
        let ids = read.tokenizer.encode_fast(text.as_str(), true).unwrap().get_ids().to_vec();
        prop_assert_eq!(&ids, &naive(&pieces, &text));
        prop_assert_eq!(read.tokenizer.decode(&ids, true).unwrap(), text);
    }
}

proptest! {
    /// Any vocabulary: refused, or able to encode and decode what it is given.
    #[test]
    fn hostile_vocabularies_never_panic(
        pieces in prop::collection::vec(("[ab▁<0x1>]{0,3}", any::<f32>(), 0i64..8), 0..12),
        has_bytes in any::<bool>(),
        text in "[ab <0x1>é]{0,12}",
    ) {
        let pieces = pieces.iter().map(|(text, score, kind)| piece(text, *score, TokenType(*kind)));
        let pieces: Vec<Piece> = pieces.collect();
        let pieces = if has_bytes { vocabulary(&pieces) } else { pieces };
        if let Ok(read) = read(&spm(&pieces)) {
            let ids = read.tokenizer.encode_fast(text.as_str(), true).unwrap().get_ids().to_vec();
            prop_assert!(ids.iter().all(|id| (*id as usize) < pieces.len()));
            read.tokenizer.decode(&ids, true).unwrap();
        }
    }
}

#[test]
fn every_word_split_compiles_under_one_name() {
    let mut names = Vec::from_iter(WordSplit::known_names());
    for name in &names {
        WordSplit::named(name).unwrap().pre_tokenizer().unwrap();
    }
    let len = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), len);
}

#[test]
fn words_are_cut_like_the_models_own() {
    let words = |name: &str, text: &str| {
        let mut words = PreTokenizedString::from(text);
        let pre_tokenizer = WordSplit::named(name).unwrap().pre_tokenizer().unwrap();
        pre_tokenizer.pre_tokenize(&mut words).unwrap();
        let splits = words.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.into_iter().map(|(_, (from, to), _)| text[from..to].to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(words("starcoder", "a 123'll"), ["a", " ", "1", "2", "3", "'ll"]);
    assert_eq!(words("command-r", "I'M x\n\n y"), ["I", "'", "M", " x", "\n\n", " y"]);
    assert_eq!(words("glm4", "it'S 1234!\n"), ["it", "'S", " ", "123", "4", "!\n"]);
    assert_eq!(words("smaug-bpe", "a  b"), ["a", " ", " b"]);
    assert_eq!(words("deepseek-r1-qwen", "12 ab"), ["1", "2", " ab"]);
    assert_eq!(words("tekken", "HelloWorld 12/\n"), ["Hello", "World", " ", "1", "2", "/\n"]);
    assert_eq!(words("tekken", "can't"), ["can", "'t"]);
    assert_eq!(words("gpt-4o", "Can'T 1234 aB"), ["Can'T", " ", "123", "4", " a", "B"]);
    assert_eq!(words("deepseek-llm", "Hi 中文12\n!?"), ["Hi", " ", "中文", "1", "2", "\n", "!?"]);
    assert_eq!(words("deepseek-coder", "a + b7 中"), ["a", " +", " b", "7", " ", "中"]);
    assert_eq!(words("deepseek-v3", "ab中12345.x !y"), ["ab", "中", "123", "45", ".x", " !", "y"]);
}
