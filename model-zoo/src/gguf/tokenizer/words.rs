//! How byte-level BPE cuts text into words before merging.
//!
//! The cuts are not in the file: `tokenizer.ggml.pre` names one of those that llama.cpp knows, and
//! the expressions here are those of the models' own `tokenizer.json`. They are applied one after
//! the other, each to what the ones before left in one piece.

use tokenizers::{
    PreTokenizerWrapper, SplitDelimiterBehavior,
    pre_tokenizers::{
        byte_level::ByteLevel,
        sequence::Sequence,
        split::{Split, SplitPattern},
    },
};

/// One way to cut text, and what goes with it.
#[derive(Debug)]
pub(super) struct WordSplit {
    names: &'static [&'static str],
    cuts: &'static [&'static str],
    /// A word that is a token is taken as it is, whether or not merges lead to it.
    pub(super) ignore_merges: bool,
    /// Prompts start with BOS where the file does not say.
    pub(super) add_bos: bool,
    /// Text is composed (NFC) first.
    pub(super) compose: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const DIGIT: &str = r"\p{N}";
const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
/// Visible ASCII but for digits, its full-width forms, quotation marks, CJK marks.
const DEEPSEEK_LLM_MARKS: &str =
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+";
/// DeepSeek's ranges of Han, Korean and other scripts of its first tokenizers.
const DEEPSEEK_EAST_ASIAN: &str = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+";
/// The letters with case, as far as DeepSeek LLM's list goes.
const DEEPSEEK_LLM_LETTERS: &str = concat!(
    r"\s?[A-Za-z\x{00B5}\x{00C0}-\x{00D6}\x{00D8}-\x{00F6}\x{00F8}-\x{01BA}\x{01BC}-\x{01BF}",
    r"\x{01C4}-\x{0293}\x{0295}-\x{02AF}\x{0370}-\x{0373}\x{0376}\x{0377}\x{037B}-\x{037D}",
    r"\x{037F}\x{0386}\x{0388}-\x{038A}\x{038C}\x{038E}-\x{03A1}\x{03A3}-\x{03F5}",
    r"\x{03F7}-\x{0481}\x{048A}-\x{052F}\x{0531}-\x{0556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}",
    r"\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}",
    r"\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}",
    r"\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}",
    r"\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}",
    r"\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}",
    r"\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}",
    r"\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}",
    r"\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}",
    r"\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}",
    r"\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}",
    r"\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}",
    r"\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+",
);
/// Han, Hiragana and Katakana.
const DEEPSEEK_V3_EAST_ASIAN: &str = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+";
const DEEPSEEK_V3: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"##,
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
);
/// llama.cpp's, for files that do not say.
const UNNAMED: [&str; 4] = [
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
];

const PLAIN: WordSplit =
    WordSplit { names: &[], cuts: &[], ignore_merges: false, add_bos: false, compose: false };

const WORD_SPLITS: &[WordSplit] = &[
    WordSplit { names: &["default"], cuts: &UNNAMED, ..PLAIN },
    WordSplit {
        names: &["gpt-2", "gpt2", "phi-2", "olmo", "mpt", "jais", "gigachat", "mellum"],
        cuts: &[GPT2],
        ..PLAIN
    },
    WordSplit {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"],
        cuts: &[DIGIT, GPT2],
        ..PLAIN
    },
    WordSplit {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"],
        cuts: &[LLAMA3],
        ignore_merges: true,
        add_bos: true,
        ..PLAIN
    },
    WordSplit { names: &["smaug-bpe", "dbrx", "chatglm-bpe", "glm4"], cuts: &[LLAMA3], ..PLAIN },
    WordSplit { names: &["qwen2"], cuts: &[QWEN2], compose: true, ..PLAIN },
    WordSplit { names: &["deepseek-r1-qwen"], cuts: &[QWEN2], ..PLAIN },
    WordSplit { names: &["tekken"], cuts: &[TEKKEN], ignore_merges: true, add_bos: true, ..PLAIN },
    WordSplit { names: &["gpt-4o", "llama4"], cuts: &[GPT4O], ..PLAIN },
    WordSplit {
        names: &["deepseek-llm"],
        cuts: &[
            r"[\r\n]",
            DEEPSEEK_LLM_LETTERS,
            DEEPSEEK_LLM_MARKS,
            r"\s+$",
            DEEPSEEK_EAST_ASIAN,
            DIGIT,
        ],
        ..PLAIN
    },
    WordSplit {
        names: &["deepseek-coder"],
        cuts: &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_EAST_ASIAN, DIGIT],
        ..PLAIN
    },
    WordSplit {
        names: &["deepseek-v3", "hunyuan-dense"],
        cuts: &[r"\p{N}{1,3}", DEEPSEEK_V3_EAST_ASIAN, DEEPSEEK_V3],
        ..PLAIN
    },
];

impl WordSplit {
    /// The split of that name in `tokenizer.ggml.pre`.
    pub(super) fn named(name: &str) -> Option<&'static Self> {
        WORD_SPLITS.iter().find(|split| split.names.contains(&name))
    }

    /// Every name that [`WordSplit::named`] knows.
    pub(super) fn known_names() -> impl Iterator<Item = &'static str> {
        WORD_SPLITS.iter().flat_map(|split| split.names).copied()
    }

    /// Cuts text, then spells its bytes as characters.
    pub(super) fn pre_tokenizer(&self) -> tokenizers::Result<PreTokenizerWrapper> {
        let mut steps: Vec<PreTokenizerWrapper> = Vec::with_capacity(self.cuts.len() + 1);
        for cut in self.cuts {
            let pattern = SplitPattern::Regex((*cut).to_owned());
            steps.push(Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?.into());
        }
        steps.push(ByteLevel::new(false, true, false).into());
        Ok(Sequence::new(steps).into())
    }
}
