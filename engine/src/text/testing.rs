//! Small tokenizers of every decoder kind, for tests.

use tokenizers::decoders::bpe::BPEDecoder;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::ctc::CTC;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence;
use tokenizers::decoders::strip::Strip;
use tokenizers::decoders::wordpiece::WordPiece;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::replace::Replace;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::{AddedToken, DecoderWrapper};

use super::Tokenizer;

/// Words with all that decoders look at: spaces in each spelling, prefixes, suffixes, punctuation.
const WORDS: [&str; 24] = [
    "▁",
    "▁▁",
    "▁Hey",
    "▁you",
    "▁in▁the",
    "Hey",
    "sing",
    "##ing",
    "##",
    "!",
    ".",
    "'",
    "n't",
    "do not",
    "a</w>",
    "</w>",
    "b",
    " ",
    "  c ",
    "�",
    "😀",
    "你",
    "|",
    "<pad>",
];

fn build(tokens: Vec<String>, decoder: Option<DecoderWrapper>) -> tokenizers::Tokenizer {
    let ids = 0..tokens.len() as u32;
    let vocab: Vocab = tokens.into_iter().zip(ids).collect();
    let model = BPE::builder().vocab_and_merges(vocab, Vec::new()).build().unwrap();
    let mut tokenizer = tokenizers::Tokenizer::new(model);
    tokenizer.with_decoder(decoder);
    tokenizer
        .add_special_tokens(&[AddedToken::from("<|s|>", true), AddedToken::from("</s>", true)]);
    tokenizer.add_tokens(&[AddedToken::from("<tool>", false)]);
    tokenizer
}

fn words(decoder: Option<DecoderWrapper>) -> Tokenizer {
    Tokenizer::from_inner(build(WORDS.map(str::to_owned).to_vec(), decoder))
}

fn words_and_bytes(decoders: Vec<DecoderWrapper>) -> Tokenizer {
    let bytes = (0..=255).map(|byte: u8| format!("<0x{byte:02X}>"));
    let tokens = WORDS.into_iter().map(str::to_owned).chain(bytes).collect();
    Tokenizer::from_inner(build(tokens, Some(Sequence::new(decoders).into())))
}

fn replace() -> DecoderWrapper {
    Replace::new("▁", " ").unwrap().into()
}

/// GPT-2's kind: the 256 bytes, some of their pairs, and a token outside the alphabet.
pub fn byte_level() -> Tokenizer {
    Tokenizer::from_inner(byte_level_inner())
}

/// The file of [`byte_level`].
pub fn byte_level_json() -> String {
    byte_level_inner().to_string(false).expect("serialises")
}

fn byte_level_inner() -> tokenizers::Tokenizer {
    let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let pairs = ["ðŁ", "ĺĢ", "½ł", "Ġa", "Ã©", "a b"];
    let tokens = alphabet.into_iter().map(String::from).chain(pairs.map(str::to_owned)).collect();
    let mut tokenizer = build(tokens, Some(ByteLevel::default().into()));
    tokenizer.with_pre_tokenizer(Some(ByteLevel::default().add_prefix_space(false)));
    tokenizer
}

/// Id of `<|s|>` in [`byte_level`].
pub fn byte_level_special() -> u32 {
    256 + 6
}

/// The ids of the bytes of a character; none for a tokenizer without bytes.
pub fn byte_ids(tokenizer: &Tokenizer, c: char) -> Vec<u32> {
    let mut buffer = [0; 4];
    let text = c.encode_utf8(&mut buffer);
    match tokenizer.token_to_id("<0x00>") {
        Some(zero) => text.bytes().map(|byte| zero + u32::from(byte)).collect(),
        None => tokenizer.encode(text, false).unwrap(),
    }
}

/// T5's kind.
pub fn metaspace() -> Tokenizer {
    words(Some(Metaspace::new('▁', PrependScheme::Always, true).into()))
}

/// BERT's kind.
pub fn word_piece() -> Tokenizer {
    words(Some(WordPiece::default().into()))
}

/// Llama 2's kind: SentencePiece with byte fallback.
pub fn llama() -> Tokenizer {
    words_and_bytes(vec![
        replace(),
        ByteFallback::default().into(),
        Fuse::default().into(),
        Strip::new(' ', 1, 0).into(),
    ])
}

/// A tokenizer of each decoder and of chains that take them through every kind of stage.
pub fn all() -> Vec<(&'static str, Tokenizer)> {
    let fallback = || DecoderWrapper::from(ByteFallback::default());
    let fuse = || DecoderWrapper::from(Fuse::default());
    let never = Metaspace::new('▁', PrependScheme::Never, true);
    vec![
        ("byte level", byte_level()),
        ("metaspace", metaspace()),
        ("metaspace without prefix", words(Some(never.into()))),
        ("word piece", word_piece()),
        ("llama", llama()),
        ("gemma", words_and_bytes(vec![replace(), fallback(), fuse()])),
        ("fallback, metaspace", words_and_bytes(vec![fallback(), Metaspace::default().into()])),
        ("fuse, strip", words_and_bytes(vec![replace(), fuse(), Strip::new(' ', 3, 0).into()])),
        ("strip", words_and_bytes(vec![replace(), Strip::new(' ', 1, 0).into(), fallback()])),
        (
            "byte level, strip",
            words_and_bytes(vec![ByteLevel::default().into(), Strip::new('▁', 2, 0).into()]),
        ),
        ("fuse, replace", words_and_bytes(vec![fallback(), fuse(), replace()])),
        ("nested", words_and_bytes(vec![Sequence::new(vec![replace(), fallback()]).into()])),
        ("bpe", words(Some(BPEDecoder::default().into()))),
        ("ctc", words(Some(CTC::default().into()))),
        ("none", words(None)),
    ]
}
