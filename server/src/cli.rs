//! The command line, with vLLM's names where the meaning is the same.

mod model;
pub mod scheduling;

use crate::bench::args::BenchArgs;
use crate::device::DeviceFlag;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use quire_engine::SamplingParams;
use quire_engine::sampling::{EarlyStopping, NumLogprobs};
use std::ops::RangeInclusive;
use std::path::PathBuf;

pub use model::{ModelArgs, Setup};

/// LLM inference on CPUs and NVIDIA devices.
#[derive(Parser)]
#[command(name = "quire", version)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Subcommand)]
pub enum Command {
    /// Continue prompts given on the command line or in a JSONL file
    Generate(Box<GenerateArgs>),
    /// Talk to a model
    Chat(Box<ChatArgs>),
    /// Show a model's sizes and what running it here takes; no weights are read, save for --measure
    Info(InfoArgs),
    /// Compare a model's logits with recorded ones
    Verify(VerifyArgs),
    /// Measure how fast a model runs here
    Bench(BenchArgs),
}

/// Arguments of `generate`.
#[derive(Args)]
#[command(group = ArgGroup::new("what").required(true).args(["prompt", "input"]))]
pub struct GenerateArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Text to continue; several are run together
    #[arg(long, value_name = "TEXT")]
    pub prompt: Vec<String>,
    /// JSONL file of requests, `-` for standard input: {"prompt": "…"}, {"prompt_token_ids": […]}
    /// or {"messages": […]} with optional "id" and sampling parameters
    #[arg(long, value_name = "FILE")]
    pub input: Option<PathBuf>,
    /// File for the results of --input, `-` for standard output
    #[arg(long, value_name = "FILE", conflicts_with = "prompt", default_value = "-")]
    pub output: PathBuf,
    /// How the results of --input are written
    #[arg(long, value_enum, conflicts_with = "prompt", default_value = "jsonl")]
    pub format: Format,
    /// Go on with an interrupted run: keep what is in the --output file, run what is missing.
    /// Input and flags must be those of the first run
    #[arg(long, conflicts_with = "prompt")]
    pub resume: bool,
    /// Stop at the first line that is bad or fails
    #[arg(long, conflicts_with = "prompt")]
    pub fail_fast: bool,
    /// Results of --prompt as JSON lines; the summary as JSON
    #[arg(long)]
    pub json: bool,
    /// Do not show where the memory goes
    #[arg(long, short)]
    pub quiet: bool,
    /// Jinja template for "messages", in place of the model's
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    pub chat_template: Option<PathBuf>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    beams: BeamArgs,
    #[command(flatten)]
    requests: RequestArgs,
    #[command(flatten)]
    results: ResultArgs,
}

impl GenerateArgs {
    /// Puts the flags over `params`.
    pub fn apply(&self, params: &mut SamplingParams) {
        self.sampling.apply(params);
        self.beams.apply(params);
        self.requests.apply(params);
        self.results.apply(params);
    }
}

/// What the help of `chat` ends with.
const CHAT_HELP: &str = "\
In a terminal, a line is a message; one that ends in \\ goes on in the next, and lines between two
lines of \"\"\" are one message. /help lists the commands. Ctrl-C stops an answer, which stays
in the conversation as far as it came; Ctrl-D ends. Standard input that is no terminal has one
message a line that is not blank, taken as it is.

When the conversation outgrows the context, the oldest messages and their answers are left out;
the system message stays.";

/// Arguments of `chat`.
#[derive(Args)]
#[command(after_help = CHAT_HELP)]
pub struct ChatArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// System message
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Jinja template, in place of the model's
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
    /// Each answer as a line of JSON
    #[arg(long)]
    pub json: bool,
    /// Do not show where the memory goes
    #[arg(long, short)]
    pub quiet: bool,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// How results are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// One JSON object a line
    Jsonl,
    /// The texts, to be read
    Text,
}

/// Sampling parameters; for `--input`, what holds where a line does not say otherwise.
#[derive(Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Most tokens to generate [default: 16; in a conversation what the model recommends, else the
    /// rest of the context]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = parse_positive)]
    max_tokens: Option<usize>,
    /// Tokens to generate before anything may end the output [default: 0]
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        value_parser = parse_whole::<usize>,
    )]
    min_tokens: Option<usize>,
    /// 0 takes the most likely token [default: the model's, else 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Keep the K most likely tokens; 0 or -1 keeps all [default: the model's, else 0]
    #[arg(long, value_name = "K", allow_negative_numbers = true, value_parser = parse_top_k)]
    top_k: Option<u32>,
    /// Keep the most likely tokens of this mass [default: the model's, else 1]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Keep tokens at least P times as likely as the best one [default: the model's, else 0]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// Seed of the draws (`seed` in JSONL) [default: made from --seed and the number of the line,
    /// prompt or answer]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = parse_whole::<u64>)]
    request_seed: Option<u64>,
    /// Text that ends the output; may be repeated
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Token id that ends the output; may be repeated
    #[arg(
        long,
        value_name = "ID",
        allow_negative_numbers = true,
        value_parser = parse_whole::<u32>,
    )]
    stop_token_ids: Vec<u32>,
    /// Keep the stop text in the output
    #[arg(long)]
    include_stop_str_in_output: bool,
    /// Go on after the model's end-of-sequence token
    #[arg(long)]
    ignore_eos: bool,
    /// Taken off the logit of tokens in the output [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    presence_penalty: Option<f32>,
    /// Taken off for each time a token is in the output [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    frequency_penalty: Option<f32>,
    /// Weakens tokens of prompt and output when above 1 [default: the model's, else 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    repetition_penalty: Option<f32>,
    /// Text that must not be generated; may be repeated
    #[arg(long, value_name = "TEXT")]
    bad_words: Vec<String>,
}

/// Search instead of sampling.
#[derive(Args)]
#[command(next_help_heading = "Beam search")]
struct BeamArgs {
    /// Find the --n most likely sequences; wants --temperature 0
    #[arg(long)]
    use_beam_search: bool,
    /// Beams, from --n to 64 [default: as many as --n]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = parse_positive)]
    beam_width: Option<usize>,
    /// Beams are compared by their log-probability over length^X [default: 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    length_penalty: Option<f32>,
    /// When to end with as many sequences as beams: true, at once; false, when a better one is
    /// unlikely; never, when there cannot be one [default: false]
    #[arg(long, value_name = "WHEN", value_parser = early_stopping_parser())]
    early_stopping: Option<EarlyStopping>,
}

fn early_stopping_parser() -> impl TypedValueParser<Value = EarlyStopping> {
    PossibleValuesParser::new(["true", "false", "never"]).map(|name| match name.as_str() {
        "true" => EarlyStopping::Always,
        "never" => EarlyStopping::Never,
        _ => EarlyStopping::Heuristic,
    })
}

/// What a request is beside its output.
#[derive(Args)]
#[command(next_help_heading = "Requests")]
struct RequestArgs {
    /// Smaller is more urgent [default: 0]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    priority: Option<i32>,
    /// Share cached prefixes only with requests of the same salt
    #[arg(long, value_name = "TEXT")]
    cache_salt: Option<String>,
}

/// What `generate` may report beyond one text.
#[derive(Args)]
#[command(next_help_heading = "Results")]
struct ResultArgs {
    /// Report log-probabilities of each token and of the N most likely ones; -1: of all
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = parse_logprobs)]
    logprobs: Option<NumLogprobs>,
    /// The same for the tokens of the prompt
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = parse_logprobs)]
    prompt_logprobs: Option<NumLogprobs>,
    /// Sequences to generate from each prompt [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = parse_positive)]
    n: Option<usize>,
    /// Keep special tokens in the text
    #[arg(long)]
    no_skip_special_tokens: bool,
    /// Report token ids only
    #[arg(long)]
    no_detokenize: bool,
}

/// A whole number, whose range the message gives.
pub fn parse_whole<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    parse_from::<T>(0, text)
}

/// The same without 0.
pub fn parse_positive(text: &str) -> Result<usize, String> {
    parse_from(1, text)
}

fn parse_from<T: TryFrom<u64>>(least: u64, text: &str) -> Result<T, String> {
    parse_within(least..=u64::MAX >> (64 - 8 * size_of::<T>()), text)
}

/// A whole number of `range`.
pub fn parse_within<T: TryFrom<u64>>(range: RangeInclusive<u64>, text: &str) -> Result<T, String> {
    let (least, most) = (range.start(), range.end());
    let number = text.parse().ok().filter(|n| range.contains(n)).and_then(|n| T::try_from(n).ok());
    number.ok_or_else(|| format!("must be a whole number from {least} to {most}"))
}

/// A whole number, or `None` for -1.
fn parse_or_all(text: &str) -> Result<Option<u32>, String> {
    if text == "-1" {
        return Ok(None);
    }
    let number = text.parse().map(Some);
    number.map_err(|_| format!("must be a whole number from -1 (all) to {}", u32::MAX))
}

fn parse_top_k(text: &str) -> Result<u32, String> {
    parse_or_all(text).map(Option::unwrap_or_default)
}

fn parse_logprobs(text: &str) -> Result<NumLogprobs, String> {
    parse_or_all(text).map(|n| n.map_or(NumLogprobs::All, NumLogprobs::Top))
}

/// Puts a flag, where there is one, over `field`.
fn set<T: Copy>(flag: Option<T>, field: &mut T) {
    *field = flag.unwrap_or(*field);
}

impl SamplingArgs {
    /// Puts the flags over `params`.
    pub fn apply(&self, params: &mut SamplingParams) {
        set(self.max_tokens.map(Some), &mut params.max_tokens);
        set(self.min_tokens, &mut params.min_tokens);
        set(self.temperature, &mut params.temperature);
        set(self.top_k, &mut params.top_k);
        set(self.top_p, &mut params.top_p);
        set(self.min_p, &mut params.min_p);
        set(self.request_seed.map(Some), &mut params.seed);
        set(self.presence_penalty, &mut params.presence_penalty);
        set(self.frequency_penalty, &mut params.frequency_penalty);
        set(self.repetition_penalty, &mut params.repetition_penalty);
        params.bad_words.extend_from_slice(&self.bad_words);
        params.stop.extend_from_slice(&self.stop);
        params.stop_token_ids.extend_from_slice(&self.stop_token_ids);
        params.include_stop_str_in_output |= self.include_stop_str_in_output;
        params.ignore_eos |= self.ignore_eos;
    }

    /// The flag for the most tokens to generate.
    pub fn max_tokens(&self) -> Option<usize> {
        self.max_tokens
    }
}

impl BeamArgs {
    /// Puts the flags over `params`.
    fn apply(&self, params: &mut SamplingParams) {
        params.use_beam_search |= self.use_beam_search;
        set(self.beam_width.map(Some), &mut params.beam_width);
        set(self.length_penalty, &mut params.length_penalty);
        set(self.early_stopping, &mut params.early_stopping);
    }
}

impl RequestArgs {
    /// Puts the flags over `params`.
    fn apply(&self, params: &mut SamplingParams) {
        set(self.priority, &mut params.priority);
        params.cache_salt = self.cache_salt.clone().or(params.cache_salt.take());
    }
}

impl ResultArgs {
    /// Puts the flags over `params`.
    fn apply(&self, params: &mut SamplingParams) {
        set(self.logprobs.map(Some), &mut params.logprobs);
        set(self.prompt_logprobs.map(Some), &mut params.prompt_logprobs);
        set(self.n, &mut params.n);
        params.skip_special_tokens &= !self.no_skip_special_tokens;
        params.detokenize &= !self.no_detokenize;
    }
}

/// Arguments of `info`.
#[derive(Args)]
pub struct InfoArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Load the model and measure what an engine measures when it starts
    #[arg(long)]
    pub measure: bool,
    /// One JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

/// What the table of `verify` shows.
const VERIFY_HELP: &str = "\
Columns, one row a recorded sequence:
  max |Δ|    largest difference of a logit over the prompt, and its limit in f32
  mean |Δ|   mean difference, and its limit in bf16
  KL         Kullback-Leibler divergence of the recorded from our next-token probabilities, in nats
             a position: 0 where they are the same; it has no limit
  greedy     recorded tokens that are our most likely ones too, given the recorded ones before them
  gap        how far below our largest logit a recorded token's is, at most
  generated  tokens the engine generated by itself that equal the recorded ones, up to the first
             that differs
  decode     whether generating gives the logits, bit for bit, that reading the same tokens gives

All sequences run together. With fewer --num-blocks-override than they need (and --max-model-len, so
that one fits) some are preempted on the way; the last line says how many, and how.

With --layers the model computes one sequence with two implementations, --against as the measure,
and the table shows, op by op, norm of the difference over norm of the values. The first one over
the bound, marked with !, is the place to look. The sequence is --tokens, else the longest recorded
one of at most 64 tokens, else one made up. Weights in blocks are unpacked on both sides; with
--quantization int8 the model's are rounded, and the table shows what that costs.

Exit code 0: all within the limits; 1: some differ. A GGUF file needs --golden, or --layers.";

/// Arguments of `verify`.
#[derive(Args)]
#[command(after_help = VERIFY_HELP)]
pub struct VerifyArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Recorded sequences [default: golden.safetensors in the model's folder; a GGUF file has none]
    #[arg(long, value_name = "FILE")]
    pub golden: Option<PathBuf>,
    /// Compare op by op with another implementation
    #[arg(long)]
    pub layers: bool,
    /// What --layers compares with: cpu, cuda, cuda:N or reference
    #[arg(
        long,
        value_name = "DEVICE",
        requires = "layers",
        default_value = "reference",
        value_parser = DeviceFlag::parse_one,
    )]
    pub against: DeviceFlag,
    /// Token ids for --layers, separated by commas
    #[arg(
        long,
        value_name = "IDS",
        requires = "layers",
        conflicts_with = "golden",
        value_delimiter = ',',
        allow_negative_numbers = true,
        value_parser = parse_whole::<u32>,
    )]
    pub tokens: Option<Vec<u32>>,
    /// One JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use quire_engine::{DType, EngineConfig};
    use quire_model_zoo::BackendKind;
    use quire_model_zoo::loader::Isa;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn flags_reach_engine_and_sampler() {
        let line = "quire generate m --prompt a --prompt b --device cpu --dtype bf16 \
                    --kv-cache-memory 1M --gpu-memory-utilization 0.5 --swap-space 3M --isa portable --top-k -1 --stop x --stop y --ignore-eos";
        let cli = Cli::try_parse_from(line.split_whitespace()).unwrap();
        let Command::Generate(args) = cli.command else { panic!("generate") };
        let options = args.model.setup().unwrap().options;
        assert_eq!(options.backend, BackendKind::Cpu);
        assert_eq!(options.dtype, Some(DType::Bf16));
        assert_eq!(options.isa, Some(Isa::Portable));
        assert_eq!(options.engine.kv_cache_bytes, Some(1 << 20));
        assert_eq!(options.engine.memory_utilization, Some(0.5));
        assert_eq!(options.engine.swap_bytes, 3 << 20);
        assert_eq!(options.engine.block_size, EngineConfig::default().block_size);
        let mut params = SamplingParams { top_k: 7, ..Default::default() };
        args.sampling.apply(&mut params);
        let expected = SamplingParams {
            stop: vec!["x".to_owned(), "y".to_owned()],
            ignore_eos: true,
            ..Default::default()
        };
        assert_eq!(params, expected);
    }

    #[test]
    fn flags_of_beams_and_requests_reach_the_parameters() {
        let line = "quire generate m --prompt a --n 2 --use-beam-search --beam-width 4 \
                    --length-penalty -0.5 --early-stopping never --priority -3 --cache-salt s";
        let cli = Cli::try_parse_from(line.split_whitespace()).unwrap();
        let Command::Generate(args) = cli.command else { panic!("generate") };
        let mut params = SamplingParams::default();
        args.apply(&mut params);
        let expected = SamplingParams {
            n: 2,
            use_beam_search: true,
            beam_width: Some(4),
            length_penalty: -0.5,
            early_stopping: EarlyStopping::Never,
            priority: -3,
            cache_salt: Some("s".to_owned()),
            ..Default::default()
        };
        assert_eq!(params, expected);
    }

    #[test]
    fn contradictions_are_refused() {
        for line in [
            "quire generate m",
            "quire generate m --prompt a --input f",
            "quire generate m --prompt a --output f",
            "quire info m --kv-cache-memory 1M --num-blocks-override 3",
            "quire info m --dtype f8",
            "quire info m --top-k 3",
            "quire generate m --prompt a --resume",
            "quire generate m --prompt a --fail-fast",
            "quire chat m --n 2",
            "quire chat m --use-beam-search",
            "quire generate m --prompt a --early-stopping always",
            "quire generate m --prompt a --priority high",
            "quire verify m --tokens 1",
            "quire verify m --against cpu",
            "quire verify m --layers --against auto",
            "quire info m --gemm mine",
            "quire verify m --layers --tokens 1 --golden f",
        ] {
            assert!(Cli::try_parse_from(line.split_whitespace()).is_err(), "{line}");
        }
    }

    #[test]
    fn numbers_out_of_range_are_told_the_range() {
        for (flags, rule) in [
            ("--threads -1", "from 1 to 1024"),
            ("--seed -1", "from 0 to 18446744073709551615"),
            ("--request-seed 1.5", "from 0 to 18446744073709551615"),
            ("--max-tokens 0", "from 1 to 18446744073709551615"),
            ("--n -1", "from 1 to 18446744073709551615"),
            ("--beam-width 0", "from 1 to 18446744073709551615"),
            ("--max-num-seqs -1", "from 0 to 18446744073709551615"),
            ("--max-logprobs 4294967296", "from 0 to 4294967295"),
            ("--stop-token-ids -1", "from 0 to 4294967295"),
            ("--top-k -2", "from -1 (all) to 4294967295"),
            ("--logprobs -2", "from -1 (all) to 4294967295"),
            ("--kv-cache-memory -1", "expected bytes"),
            ("--memory-utilization 1.5", "over 0 and at most 1"),
            ("--memory-utilization -0.5", "over 0 and at most 1"),
            ("--memory-utilization NaN", "over 0 and at most 1"),
            ("--dtype f16", "must be auto, f32 or bf16"),
        ] {
            let line = format!("quire generate m --prompt a {flags}");
            let error = Cli::try_parse_from(line.split_whitespace()).err().expect(flags);
            assert!(error.to_string().contains(rule), "{error}");
        }
    }
}
