//! Arguments of `bench`.

use super::dataset::{ClassSpec, MAX_LEN, MAX_REQUESTS};
use crate::cli::scheduling::PolicyName;
use crate::cli::{ModelArgs, parse_positive, parse_whole, parse_within};
use crate::size::parse_size;
use clap::{Args, Subcommand, ValueEnum};
use quire_engine::backend::Isa;
use std::path::PathBuf;
use std::str::FromStr;

/// Arguments of `bench`.
#[derive(Args)]
pub struct BenchArgs {
    /// What to measure.
    #[command(subcommand)]
    pub command: BenchCommand,
}

/// What to measure.
#[derive(Subcommand)]
pub enum BenchCommand {
    /// How fast many requests are done together
    Throughput(Box<ThroughputArgs>),
    /// How long one batch takes
    Latency(Box<LatencyArgs>),
    /// How fast this machine's CPU reads and multiplies at best; no model is needed
    Ceiling(CeilingArgs),
}

/// What the help of `bench throughput` ends with.
const THROUGHPUT_HELP: &str = "\
Made-up requests are greedy and go on after the end-of-sequence token. Prompts are made ids before
the clock starts. A line of --input is one of `quire generate` with two more fields: \"class\", a
name under which it is reported apart, and \"at\", the second at which it arrives.

The prediction is the sum of the times of the steps that an ideal schedule of the same requests
takes, by step times measured beforehand; requests that share a prefix are not predicted.

KV cache: `live` tokens are those whose K and V are held; `held` slots are those of blocks that are
taken, with static batching for a whole batch at its greatest length.";

/// Arguments of `bench throughput`.
#[derive(Args)]
#[command(after_help = THROUGHPUT_HELP)]
pub struct ThroughputArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub dataset: DatasetArgs,
    /// Requests a second, at random intervals (Poisson), made from --seed [default: all at once, or
    /// as `at` in the lines says]
    #[arg(long, value_name = "R", allow_negative_numbers = true, value_parser = parse_rate)]
    pub request_rate: Option<f64>,
    /// Scheduling policies to run one after the other on the same requests: fcfs, priority or
    /// static, each with :N for its own --max-num-seqs [default: what --scheduling-policy says]
    #[arg(long, value_name = "POLICY[:N],…", value_delimiter = ',')]
    pub policy: Vec<PolicySpec>,
    /// Block sizes to run each policy with [default: what --block-size says]
    #[arg(
        long,
        value_name = "N,…",
        value_delimiter = ',',
        conflicts_with = "block_size",
        value_parser = parse_positive,
    )]
    pub block_sizes: Vec<usize>,
    /// Requests to run before the clock starts
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = parse_whole::<usize>)]
    pub warmup: usize,
    /// Leave out the prediction and the measurements that it takes
    #[arg(long)]
    pub no_prediction: bool,
    /// File for the picture (SVG) of the KV cache over time
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    #[command(flatten)]
    pub report: ReportArgs,
    #[command(flatten)]
    pub ceiling: NoCeiling,
}

/// Which requests to run.
#[derive(Args)]
#[command(next_help_heading = "Requests")]
pub struct DatasetArgs {
    /// JSONL file of requests, `-` for standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["dataset", "classes"])]
    pub input: Option<PathBuf>,
    /// Made-up requests: random token ids of one length, or of the lengths of --classes
    #[arg(long, value_enum)]
    pub dataset: Option<DatasetKind>,
    /// Requests of `mix`, in random order: COUNTxOUTPUT@PROMPT, the lengths in tokens, the prompt's
    /// as a range where wanted, such as 80x16@8 20x512@8-64; each is reported apart
    #[arg(
        long,
        value_name = "COUNTxOUTPUT@PROMPT",
        value_delimiter = ',',
        num_args = 1..,
        required_if_eq("dataset", "mix"),
        conflicts_with_all = ["input_len", "output_len", "range_ratio", "num_prompts", "prefix_len"],
    )]
    pub classes: Vec<ClassSpec>,
    /// Tokens of a random prompt, without --prefix-len
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = parse_len, conflicts_with = "input")]
    pub input_len: usize,
    /// Tokens to generate from a random prompt
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = parse_len, conflicts_with = "input")]
    pub output_len: usize,
    /// Both lengths are drawn from N·(1 − R) to N·(1 + R)
    #[arg(
        long,
        value_name = "R",
        default_value_t = 0.0,
        allow_negative_numbers = true,
        value_parser = parse_ratio,
        conflicts_with = "input",
    )]
    pub range_ratio: f64,
    /// Random requests [default: 64], or how many lines of --input to take [default: all]
    #[arg(
        long,
        value_name = "N",
        value_parser = |text: &str| parse_within::<usize>(1..=MAX_REQUESTS as u64, text),
    )]
    pub num_prompts: Option<usize>,
    /// Tokens that all random prompts begin with
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        value_parser = |text: &str| parse_within::<usize>(0..=MAX_LEN as u64, text),
        conflicts_with = "input",
    )]
    pub prefix_len: usize,
}

/// Made-up requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DatasetKind {
    /// Random ids, all of one kind
    Random,
    /// Random ids, several kinds
    Mix,
}

/// How results are shown and kept.
#[derive(Args)]
pub struct ReportArgs {
    /// JSON instead of a table
    #[arg(long)]
    pub json: bool,
    /// Do not show where the memory goes
    #[arg(long, short)]
    pub quiet: bool,
    /// File for the results as JSON
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

impl ReportArgs {
    /// Whether to show where the memory goes.
    pub fn shows_memory(&self) -> bool {
        !(self.json || self.quiet)
    }
}

/// Arguments of `bench latency`.
#[derive(Args)]
pub struct LatencyArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Tokens of a prompt; they are random
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = parse_len)]
    pub input_len: usize,
    /// Tokens to generate
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = parse_len)]
    pub output_len: usize,
    /// Requests in the batch
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = parse_positive)]
    pub batch_size: usize,
    /// Batches to measure
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = parse_positive)]
    pub num_iters: usize,
    /// Batches before them
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = parse_whole::<usize>)]
    pub num_iters_warmup: usize,
    #[command(flatten)]
    pub report: ReportArgs,
    #[command(flatten)]
    pub ceiling: NoCeiling,
}

/// Whether the machine is measured, too.
#[derive(Args)]
pub struct NoCeiling {
    /// Leave out how close the steps come to what the CPU can do, and measuring that beforehand
    #[arg(long)]
    pub no_ceiling: bool,
}

/// What the help of `bench ceiling` ends with.
const CEILING_HELP: &str = "\
The best of many short runs counts. Memory is read once on huge pages, as weights are where the
system gives them, and once on small ones. Matrix kernels multiply in registers, with operands in
the L1 cache.";

/// Arguments of `bench ceiling`.
#[derive(Args)]
#[command(after_help = CEILING_HELP)]
pub struct CeilingArgs {
    /// Threads to measure with, besides one alone [default: the cores this process may use]
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        value_parser = |text: &str| parse_within::<usize>(1..=1024, text),
    )]
    pub threads: Option<usize>,
    /// Instruction set: portable, avx2, avx512, avx512bf16 or neon [default: the best there is]
    #[arg(long)]
    pub isa: Option<Isa>,
    /// Memory to read, such as 512M or 2GiB [default: 512 MiB, or 16 times the L3 cache]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = parse_size)]
    pub memory: Option<usize>,
    /// JSON instead of a table
    #[arg(long)]
    pub json: bool,
    /// File for the results as JSON
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// A policy to run with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolicySpec {
    /// The policy; how priorities age is said by the engine's flags.
    pub policy: PolicyName,
    /// Most sequences in a step, where not as the engine's flags say.
    pub max_num_seqs: Option<usize>,
}

impl FromStr for PolicySpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, seqs) = match text.split_once(':') {
            Some((name, seqs)) => (name, Some(parse_positive(seqs)?)),
            None => (text, None),
        };
        let policy = PolicyName::from_str(name, false);
        let policy = policy.map_err(|_| {
            let names: Vec<String> =
                PolicyName::value_variants().iter().map(PolicyName::to_string).collect();
            format!("must be one of {}, with :N where wanted", names.join(", "))
        })?;
        Ok(PolicySpec { policy, max_num_seqs: seqs })
    }
}

fn parse_len(text: &str) -> Result<usize, String> {
    parse_within(1..=MAX_LEN as u64, text)
}

fn parse_rate(text: &str) -> Result<f64, String> {
    // Far below it, arrivals would lie beyond what clocks count.
    let rate = text.parse().ok().filter(|rate: &f64| rate.is_finite() && *rate >= 1e-3);
    rate.ok_or_else(|| "must be a number of at least 0.001".to_owned())
}

fn parse_ratio(text: &str) -> Result<f64, String> {
    let ratio = text.parse().ok().filter(|ratio: &f64| (0.0..1.0).contains(ratio));
    ratio.ok_or_else(|| "must be a number from 0 to below 1".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn throughput(flags: &str) -> Result<ThroughputArgs, String> {
        let line = format!("quire bench throughput m {flags}");
        let cli = Cli::try_parse_from(line.split_whitespace()).map_err(|e| e.to_string())?;
        let Command::Bench(BenchArgs { command: BenchCommand::Throughput(args) }) = cli.command
        else {
            panic!("bench throughput")
        };
        Ok(*args)
    }

    #[test]
    fn policies_may_have_seats_of_their_own() {
        let args = throughput("--policy static:8,fcfs --block-sizes 8,16").unwrap();
        let [first, second] = args.policy[..] else { panic!("{:?}", args.policy) };
        assert_eq!((first.policy, first.max_num_seqs), (PolicyName::Static, Some(8)));
        assert_eq!((second.policy, second.max_num_seqs), (PolicyName::Fcfs, None));
        assert_eq!(args.block_sizes, [8, 16]);
    }

    #[test]
    fn what_does_not_go_together_is_refused() {
        for (flags, text) in [
            ("--policy lifo", "one of fcfs, priority, static"),
            ("--num-prompts 16777217", "from 1 to 16777216"),
            ("--input-len 0", "from 1 to 16777216"),
            ("--output-len 16777217", "from 1 to 16777216"),
            ("--prefix-len 16777217", "from 0 to 16777216"),
            ("--policy fcfs:0", "from 1 to"),
            ("--request-rate 0", "at least 0.001"),
            ("--request-rate 1e-20", "at least 0.001"),
            ("--range-ratio 1", "below 1"),
            ("--dataset mix", "--classes"),
            ("--input f --classes 1x1@1", "cannot be used"),
            ("--input f --output-len 3", "cannot be used"),
            ("--classes 1x1@1 --num-prompts 3", "cannot be used"),
            ("--block-size 8 --block-sizes 8", "cannot be used"),
            ("--classes 1x1", "COUNTxOUTPUT@PROMPT"),
        ] {
            let error = throughput(flags).err().expect(flags);
            assert!(error.contains(text), "{flags}: {error}");
        }
        assert!(throughput("--input f --num-prompts 3").is_ok());
    }
}
