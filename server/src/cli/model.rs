//! Which model to run, and on what: the flags that all commands share.

use super::scheduling::Scheduling;
use super::{parse_whole, parse_within};
use crate::device::{Choice, DeviceFlag, Why};
use crate::size::parse_size;
use anyhow::ensure;
use clap::{Args, ValueEnum};
use quire_engine::backend::{CudaOptions, GemmMode, Isa, Quantization};
use quire_engine::{DType, EngineConfig};
use quire_model_zoo::LoadOptions;
use std::path::PathBuf;

/// A model and how to run it.
#[derive(Args)]
pub struct ModelArgs {
    /// Hugging Face folder or GGUF file
    pub model: PathBuf,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    scheduling: Scheduling,
}

#[derive(Args)]
#[command(next_help_heading = "Engine")]
struct EngineArgs {
    /// Most tokens of a request, prompt and output [default: what the model was made for]
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        value_parser = parse_whole::<usize>,
    )]
    max_model_len: Option<usize>,
    /// Most requests in a step [default: 64]
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        value_parser = parse_whole::<usize>,
    )]
    max_num_seqs: Option<usize>,
    /// Most tokens in a step [default: 512, on CUDA 2048; verify: 64]
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        value_parser = parse_whole::<usize>,
    )]
    max_num_batched_tokens: Option<usize>,
    /// Tokens of a KV block: 8, 16, 32, 64, 128 or 256 [default: 16]
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        value_parser = parse_whole::<usize>,
    )]
    block_size: Option<usize>,
    /// Share of the memory, over 0 and up to 1, to fill: KV blocks take all that weights,
    /// activations and whatever else runs here leave of it [default: on CUDA 0.9, else see
    /// --kv-cache-memory]
    #[arg(
        long,
        alias = "gpu-memory-utilization",
        value_name = "SHARE",
        allow_negative_numbers = true,
        value_parser = parse_share,
    )]
    memory_utilization: Option<f32>,
    /// Memory for KV blocks, such as 512M or 2GiB [default: on the CPU what all requests in a step
    /// need, at most a quarter of what weights and activations leave]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = parse_size)]
    kv_cache_memory: Option<usize>,
    /// Number of KV blocks, instead of --kv-cache-memory
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        value_parser = parse_whole::<usize>,
        conflicts_with = "kv_cache_memory",
    )]
    num_blocks_override: Option<usize>,
    /// Most log-probabilities a request may ask for at one position [default: 20]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = parse_whole::<u32>)]
    max_logprobs: Option<u32>,
    /// Type of weights and KV: auto, f32 or bf16 [default: auto, f32 for f32 models, else bf16]
    #[arg(long, value_name = "TYPE", value_parser = parse_dtype)]
    dtype: Option<Dtype>,
    /// What becomes of weights
    #[arg(long, value_enum, default_value = "auto")]
    quantization: QuantizationName,
    /// What runs the model: cpu, cuda, cuda:N or reference; auto is the first CUDA device if it can
    /// be used, else the CPU
    #[arg(
        long,
        visible_alias = "backend",
        value_name = "DEVICE",
        default_value = "auto",
        value_parser = DeviceFlag::parse,
    )]
    device: DeviceFlag,
    /// Instruction set of the CPU: portable, avx2, avx512, avx512bf16 or neon [default: the best
    /// there is]
    #[arg(long)]
    isa: Option<Isa>,
    /// Worker threads on the CPU [default: the cores this process may use]
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        value_parser = |text: &str| parse_within::<usize>(1..=1024, text),
    )]
    threads: Option<usize>,
    /// Who multiplies matrices on a CUDA device [default: triton]
    #[arg(long, value_enum)]
    gemm: Option<GemmName>,
    /// Launch each kernel of each step on a CUDA device: no graphs
    #[arg(long)]
    enforce_eager: bool,
    /// Seed of requests that bring none
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        value_parser = parse_whole::<u64>,
        default_value_t = 0,
    )]
    seed: u64,
}

/// `None` stands for `auto`.
#[derive(Clone, Copy)]
struct Dtype(Option<DType>);

fn parse_dtype(text: &str) -> Result<Dtype, String> {
    if text == "auto" {
        return Ok(Dtype(None));
    }
    let dtype = text.parse::<DType>();
    dtype.map(|dtype| Dtype(Some(dtype))).map_err(|_| "must be auto, f32 or bf16".to_owned())
}

/// A [`Quantization`] by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum QuantizationName {
    /// On the CPU, blocks of a GGUF file are used as they are (Q8_0, Q4_0, Q4_1, Q4_K, Q6_K),
    /// unless --dtype says otherwise
    Auto,
    /// Every weight is unpacked to the dtype
    None,
    /// Every weight is rounded to 8 bits, on the CPU
    Int8,
}

impl From<QuantizationName> for Option<Quantization> {
    fn from(name: QuantizationName) -> Self {
        match name {
            QuantizationName::Auto => None,
            QuantizationName::None => Some(Quantization::None),
            QuantizationName::Int8 => Some(Quantization::Int8),
        }
    }
}

/// A [`GemmMode`] by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum GemmName {
    /// Quire's own kernels: a request's results do not depend on what runs beside it
    Triton,
    /// NVIDIA's cuBLASLt, with which they may
    Cublas,
}

impl From<GemmName> for GemmMode {
    fn from(name: GemmName) -> Self {
        match name {
            GemmName::Triton => GemmMode::Triton,
            GemmName::Cublas => GemmMode::Cublas,
        }
    }
}

impl EngineArgs {
    /// Refuses flags that say nothing to the device asked for, nor to the one that it is compared
    /// with. What `auto` finds is nobody's fault.
    fn check(&self, against: Option<DeviceFlag>) -> anyhow::Result<()> {
        let of_cpu = |flag| matches!(flag, DeviceFlag::Auto | DeviceFlag::Cpu);
        let of_cuda = |flag| matches!(flag, DeviceFlag::Auto | DeviceFlag::Cuda(_));
        let cpu_is_used = of_cpu(self.device) || against.is_some_and(of_cpu);
        let cuda_is_used = of_cuda(self.device) || against.is_some_and(of_cuda);
        for (name, given, applies, whose) in [
            ("--isa", self.isa.is_some(), of_cpu(self.device), "the CPU"),
            ("--threads", self.threads.is_some(), cpu_is_used, "the CPU"),
            (
                "--quantization int8",
                self.quantization == QuantizationName::Int8,
                of_cpu(self.device),
                "the CPU",
            ),
            ("--gemm", self.gemm.is_some(), cuda_is_used, "a CUDA device"),
            ("--enforce-eager", self.enforce_eager, cuda_is_used, "a CUDA device"),
        ] {
            let device = self.device;
            ensure!(!given || applies, "{name} is for {whose}, not for --device {device}");
        }
        Ok(())
    }
}

/// How to run a model.
#[derive(Clone, Debug)]
pub struct Setup {
    /// For the loader.
    pub options: LoadOptions,
    /// Where the backend in them comes from.
    pub choice: Choice,
}

impl ModelArgs {
    /// Chooses the device and makes the options of the flags and, where there are none, the
    /// engine's defaults. A device that `auto` finds and cannot use is noted on standard error.
    ///
    /// # Errors
    /// A flag does not fit the device.
    pub fn setup(&self) -> anyhow::Result<Setup> {
        self.setup_against(None)
    }

    /// The same where the model runs on another device, too.
    ///
    /// # Errors
    /// A flag fits neither device.
    pub fn setup_against(&self, against: Option<DeviceFlag>) -> anyhow::Result<Setup> {
        self.engine.check(against)?;
        let choice = self.engine.device.choose();
        if let Some(Why::Unusable(why)) = &choice.why {
            crate::report(&format!("note: device: {}; CUDA cannot be used: {why}", choice.name()));
        }
        let flags = &self.engine;
        let options = LoadOptions {
            backend: choice.backend,
            dtype: flags.dtype.and_then(|dtype| dtype.0),
            quantization: flags.quantization.into(),
            isa: flags.isa,
            threads: flags.threads,
            cuda: CudaOptions {
                device: choice.device,
                gemm: flags.gemm.map_or(GemmMode::default(), GemmMode::from),
                enforce_eager: flags.enforce_eager,
            },
            engine: self.engine_config(),
        };
        Ok(Setup { options, choice })
    }

    fn engine_config(&self) -> EngineConfig {
        let flags = &self.engine;
        let default = EngineConfig::default();
        let mut engine = EngineConfig {
            max_num_seqs: flags.max_num_seqs.unwrap_or(default.max_num_seqs),
            max_num_batched_tokens: flags.max_num_batched_tokens,
            max_model_len: flags.max_model_len,
            block_size: flags.block_size.unwrap_or(default.block_size),
            memory_utilization: flags.memory_utilization,
            kv_cache_bytes: flags.kv_cache_memory,
            num_blocks: flags.num_blocks_override,
            max_logprobs: flags.max_logprobs.unwrap_or(default.max_logprobs),
            seed: flags.seed,
            ..default
        };
        self.scheduling.apply(&mut engine);
        engine
    }

    /// Whether the flags say how many tokens a step may have.
    pub fn sets_batched_tokens(&self) -> bool {
        self.engine.max_num_batched_tokens.is_some()
    }

    /// Whether the flags say how many requests a step may have.
    pub fn sets_num_seqs(&self) -> bool {
        self.engine.max_num_seqs.is_some()
    }
}

/// A share that is not nothing.
fn parse_share(text: &str) -> Result<f32, String> {
    let share = text.parse().ok().filter(|&x: &f32| x > 0.0 && x <= 1.0);
    share.ok_or_else(|| "must be over 0 and at most 1".to_owned())
}

#[cfg(test)]
mod tests {
    use crate::cli::{Cli, Command};
    use clap::Parser;
    use quire_engine::backend::{GemmMode, Quantization};
    use quire_model_zoo::{BackendKind, LoadOptions};

    fn options(flags: &str) -> Result<LoadOptions, String> {
        let line = format!("quire info m {flags}");
        let cli = Cli::try_parse_from(line.split_whitespace()).map_err(|e| e.to_string())?;
        let Command::Info(args) = cli.command else { panic!("info") };
        args.model.setup().map(|setup| setup.options).map_err(|e| e.to_string())
    }

    #[test]
    fn both_names_of_the_device_take_all_values() {
        for name in ["--device", "--backend"] {
            for (value, backend, device) in [
                ("cpu", BackendKind::Cpu, 0),
                ("reference", BackendKind::Reference, 0),
                ("cuda", BackendKind::Cuda, 0),
                ("cuda:3", BackendKind::Cuda, 3),
            ] {
                let options = options(&format!("{name} {value}")).unwrap();
                assert_eq!((options.backend, options.cuda.device), (backend, device));
            }
            let auto = options(&format!("{name} auto")).unwrap();
            assert_eq!(auto.backend, options("").unwrap().backend);
            assert!(options(&format!("{name} gpu")).unwrap_err().contains("cuda:N or reference"));
        }
    }

    #[test]
    fn flags_of_the_cuda_backend_reach_its_options() {
        let default = options("--device cuda").unwrap().cuda;
        assert_eq!((default.gemm, default.enforce_eager), (GemmMode::Triton, false));
        let set = options("--device cuda:1 --gemm cublas --enforce-eager").unwrap().cuda;
        assert_eq!((set.gemm, set.enforce_eager, set.device), (GemmMode::Cublas, true, 1));
    }

    #[test]
    fn quantization_is_chosen_by_device_and_dtype_unless_it_is_given() {
        for (flags, quantization) in [
            ("--device cpu", Quantization::Stored),
            ("--device cpu --dtype auto --quantization auto", Quantization::Stored),
            ("--device cpu --dtype bf16", Quantization::None),
            ("--device cpu --dtype f32 --quantization auto", Quantization::None),
            ("--device cpu --quantization none", Quantization::None),
            ("--device cpu --quantization int8 --dtype f32", Quantization::Int8),
            ("--device cuda", Quantization::None),
            ("--device reference --quantization none", Quantization::None),
        ] {
            assert_eq!(options(flags).unwrap().quantization(), quantization, "{flags}");
        }
        let unknown = options("--quantization q4").unwrap_err();
        assert!(unknown.contains("[possible values: auto, none, int8]"), "{unknown}");
    }

    #[test]
    fn flags_of_another_device_are_refused_unless_nobody_chose_it() {
        for (flags, problem) in [
            ("--device cpu --gemm triton", "--gemm is for a CUDA device, not for --device cpu"),
            ("--device reference --enforce-eager", "not for --device reference"),
            ("--device cuda:2 --isa avx2", "--isa is for the CPU, not for --device cuda:2"),
            ("--device cuda --threads 2", "--threads is for the CPU"),
            ("--device reference --threads 2", "--threads is for the CPU"),
            ("--device cuda --quantization int8", "--quantization int8 is for the CPU"),
            ("--device reference --quantization int8", "not for --device reference"),
        ] {
            assert!(options(flags).unwrap_err().contains(problem), "{flags}");
        }
        assert!(options("--threads 2 --gemm cublas --enforce-eager --isa portable").is_ok());
    }
}
