//! What tests run on: a tiny random model built in memory, and the recorded files.

use crate::rng::Rng;
use half::{bf16, f16};
use quire_engine::backend::cuda::{Compute, CudaHostCache, CudaKvCache};
use quire_engine::backend::reference::RefKvCache;
use quire_engine::backend::{
    CpuBackend, CpuBuffers, CudaBackend, CudaBuffers, CudaOptions, Isa, Quantization,
    ReferenceBackend, ReferenceBuffers,
};
use quire_engine::engine::TextConfig;
use quire_engine::memory::SystemMemory;
use quire_engine::ops::Backend;
use quire_engine::runner::{Executor, ModelRunner, RunnerSizes};
use quire_engine::scheduler::SchedulerConfig;
use quire_engine::text::Tokenizer;
use quire_engine::{DType, Engine, EngineConfig};
use quire_model_zoo::decoder::{Decoder, DecoderLimits, model_info};
use quire_model_zoo::dequant::dequantise;
use quire_model_zoo::error::LoadError;
use quire_model_zoo::memory::DecoderMemory;
use quire_model_zoo::source::{SourceDtype, WeightSource};
use quire_model_zoo::spec::{DecoderSpec, RopeScaling, RopeSpec};
use quire_model_zoo::weights::expected_weights;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

/// End of sequence of the [`TinyModel`].
pub const EOS: u32 = 257;
/// Ids of [`byte_tokenizer`]: the 256 bytes and two special tokens.
pub const TOKENIZER_VOCAB: usize = 258;
/// Rows of the [`TinyModel`]'s embedding; the last ones are padding without a token.
pub const MODEL_VOCAB: usize = 272;

/// For [`TinyModel::quantised`]: every format of blocks that is multiplied as it is, and one that
/// stands for 8-bit weights.
pub const QUANTISED: [SourceDtype; 6] = [
    SourceDtype::Q8_0,
    SourceDtype::Q4_0,
    SourceDtype::Q4_1,
    SourceDtype::Q4K,
    SourceDtype::Q6K,
    SourceDtype::F32,
];

/// The folder of recorded test data.
pub fn data_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data")
}

/// The folders with a model and its golden file, in the order of their names.
pub fn golden_dirs() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(data_dir().join("goldens")).expect("recorded goldens");
    let mut dirs: Vec<PathBuf> = entries.map(|entry| entry.expect("readable").path()).collect();
    dirs.sort();
    assert_eq!(dirs.len(), 6, "{dirs:?}");
    dirs
}

/// The SmolLM2 model that `make fetch` puts in place; says so on standard error if it is absent.
///
/// # Panics
/// It is absent and `QUIRE_TEST_MODEL` is set to `required`, as `make test` does.
pub fn smollm2() -> Option<PathBuf> {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/SmolLM2-135M-Instruct.Q4_1.gguf");
    if path.exists() {
        return Some(path);
    }
    let required = std::env::var_os("QUIRE_TEST_MODEL").is_some_and(|v| v == "required");
    assert!(!required, "{} is absent; `make fetch` gets it", path.display());
    eprintln!("skipped: {} is absent; `make fetch` gets it", path.display());
    None
}

/// A byte-level tokenizer without merges: id of a token = rank of its byte, then `<bos>`, `<eos>`.
pub fn byte_tokenizer() -> Tokenizer {
    Tokenizer::from_inner(byte_level(&[]))
}

/// Bytes, and whole tokens for pairs that merge, in the order of their rank; then `<bos>`, `<eos>`.
/// A space is spelled `Ġ`.
pub fn byte_level(merges: &[(&str, &str)]) -> tokenizers::Tokenizer {
    let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let specials = ["<bos>", "<eos>"].map(str::to_owned);
    let merged = merges.iter().map(|(a, b)| format!("{a}{b}"));
    let tokens = alphabet.into_iter().map(String::from).chain(merged).chain(specials);
    let vocab: Vocab = tokens.zip(0..).collect();
    let merges = merges.iter().map(|&(a, b)| (a.to_owned(), b.to_owned())).collect();
    let model = BPE::builder().vocab_and_merges(vocab, merges).build().expect("a valid BPE");
    let mut tokenizer = tokenizers::Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(ByteLevel::default().add_prefix_space(false)));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    let special = |text: &str| tokenizers::AddedToken::from(text, true);
    tokenizer.add_special_tokens(&[special("<bos>"), special("<eos>")]);
    tokenizer
}

/// A decoder with seeded random weights, built in memory.
#[derive(Clone, Debug)]
pub struct TinyModel {
    /// What it is made of.
    pub spec: DecoderSpec,
    /// Shape and values, row-major, by name.
    tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    /// The blocks of matrices that are stored in some, by name; their values are above.
    blocks: BTreeMap<String, (SourceDtype, Vec<u8>)>,
    /// What becomes of weights on the CPU.
    pub quantization: Quantization,
}

impl TinyModel {
    /// Odd sizes, grouped heads, biases, q and k norms, one full and one windowed layer.
    pub fn new(seed: u64) -> Self {
        Self::of_spec(
            DecoderSpec {
                architecture: "TinyForCausalLM".into(),
                vocab_size: MODEL_VOCAB,
                hidden_size: 51,
                intermediate_size: 77,
                num_layers: 2,
                num_heads: 6,
                num_kv_heads: 2,
                head_dim: 16,
                rms_norm_eps: 1e-5,
                rope: RopeSpec {
                    theta: 10_000.0,
                    rot_dim: 12,
                    interleaved: false,
                    scaling: RopeScaling::None,
                },
                max_position_embeddings: 512,
                tie_word_embeddings: false,
                qkv_bias: true,
                o_bias: false,
                mlp_bias: false,
                qk_norm: true,
                windows: vec![None, Some(40)],
                bos: None,
                eos: vec![EOS],
                torch_dtype: None,
            },
            seed,
        )
    }

    /// Sizes that the CUDA kernels take: multiples of 16, but for the vocabulary.
    pub fn aligned(seed: u64) -> Self {
        let spec = TinyModel::new(seed).spec;
        let sizes = DecoderSpec {
            vocab_size: MODEL_VOCAB - 5,
            hidden_size: 64,
            intermediate_size: 96,
            ..spec
        };
        Self::of_spec(sizes, seed)
    }

    /// Sizes that are whole blocks, with every matrix stored in blocks of `format`, and kept so on
    /// the CPU; where it is no format of blocks, 8-bit weights are made of them.
    pub fn quantised(seed: u64, format: SourceDtype) -> Self {
        let spec = TinyModel::new(seed).spec;
        let mut model = Self::of_spec(
            DecoderSpec {
                hidden_size: 256,
                intermediate_size: 256,
                num_heads: 8,
                head_dim: 32,
                ..spec
            },
            seed,
        );
        if format.block_format().is_none() {
            return TinyModel { quantization: Quantization::Int8, ..model };
        }
        model.quantization = Quantization::Stored;
        model.in_blocks(seed, "", format)
    }

    /// The same with other weights in the matrices whose names end with `suffix`: blocks of
    /// `format`.
    pub fn in_blocks(mut self, seed: u64, suffix: &str, format: SourceDtype) -> Self {
        for (name, (shape, values)) in &mut self.tensors {
            if let [_, cols] = shape[..]
                && name.ends_with(suffix)
            {
                let rng = &mut Rng::named(seed, name);
                let blocks = random_blocks(rng, format, values.len(), (6.0 / cols as f32).sqrt());
                dequantise(format, &blocks, values);
                self.blocks.insert(name.clone(), (format, blocks));
            }
        }
        self
    }

    /// The same with the matrices whose names end with `suffix` stored as plain floats.
    pub fn unpacked(mut self, suffix: &str) -> Self {
        self.blocks.retain(|name, _| !name.ends_with(suffix));
        self
    }

    /// The same with other attention windows, one a layer.
    pub fn with_windows(seed: u64, windows: [Option<u32>; 2]) -> Self {
        let spec = TinyModel::new(seed).spec;
        Self::of_spec(DecoderSpec { windows: windows.into(), ..spec }, seed)
    }

    /// A model of `spec` with weights that keep activations near 1 and logits apart.
    pub fn of_spec(spec: DecoderSpec, seed: u64) -> Self {
        let tensors = expected_weights(&spec).into_iter().map(|weight| {
            let len = weight.shape.iter().product();
            let mut rng = Rng::named(seed, &weight.name);
            let values = if weight.name.ends_with("norm.weight") {
                rng.floats(len, 0.25).into_iter().map(|x| 1.0 + x).collect()
            } else {
                let fan_in = if weight.shape.len() == 2 { weight.shape[1] } else { 4 };
                rng.floats(len, (6.0 / fan_in as f32).sqrt())
            };
            (weight.name, (weight.shape, values))
        });
        let tensors = tensors.collect();
        TinyModel { spec, tensors, blocks: BTreeMap::new(), quantization: Quantization::None }
    }

    /// One row of a matrix that is not in blocks, to change.
    pub fn row_mut(&mut self, name: &str, row: usize) -> &mut [f32] {
        assert!(!self.blocks.contains_key(name), "{name} is in blocks");
        let (shape, values) = self.tensors.get_mut(name).expect(name);
        let cols = shape[shape.len() - 1];
        &mut values[row * cols..][..cols]
    }

    /// An engine over this model. Its KV cache starts out as NaN, so that a read of anything not
    /// written shows.
    pub fn engine(&self, setup: &Setup) -> Engine {
        self.engine_with(setup, self.text(), |executor| executor)
    }

    /// The byte tokenizer, with this model's EOS and no chat template.
    pub fn text(&self) -> TextConfig {
        TextConfig {
            tokenizer: byte_tokenizer(),
            prepend_bos: None,
            eos_token_ids: self.spec.eos.clone(),
            chat_template: None,
        }
    }

    /// The same with other text settings, and with an executor around the model's own.
    pub fn engine_with(
        &self,
        setup: &Setup,
        text: TextConfig,
        wrap: impl FnOnce(Box<dyn Executor>) -> Box<dyn Executor>,
    ) -> Engine {
        let memory = match setup.place {
            Place::Reference => DecoderMemory::new(&self.spec, ReferenceBuffers::new(setup.dtype)),
            Place::Cpu { threads, .. } => {
                let buffers = CpuBuffers::new(setup.dtype, Some(threads));
                DecoderMemory::new(&self.spec, buffers.quantised(self.quantization))
            }
            Place::Cuda(options) => {
                DecoderMemory::new(&self.spec, CudaBuffers::new(setup.dtype, options.gemm))
            }
        };
        let resolved = setup
            .engine
            .resolve(&memory.stored_in(self), SystemMemory::unused(1 << 32))
            .expect("a valid configuration");
        let limits = DecoderLimits {
            max_tokens: resolved.scheduler.max_num_batched_tokens,
            max_positions: resolved.scheduler.max_model_len,
        };
        let sizes = &resolved.scheduler;
        let executor = match setup.place {
            Place::Reference => {
                self.executor(ReferenceBackend::new(setup.dtype), &limits, sizes, setup.dtype)
            }
            Place::Cpu { isa, threads } => {
                let backend = CpuBackend::new(setup.dtype, Some(isa), Some(threads))
                    .expect("the instruction set is available");
                self.executor(backend.quantised(self.quantization), &limits, sizes, setup.dtype)
            }
            Place::Cuda(options) => match setup.dtype {
                DType::F32 => self.executor(cuda::<f32>(options), &limits, sizes, setup.dtype),
                DType::Bf16 => self.executor(cuda::<bf16>(options), &limits, sizes, setup.dtype),
            },
        };
        Engine::new(wrap(executor), text, resolved, setup.engine.seed)
    }

    fn executor<B: Backend<KvCache: Poison>>(
        &self,
        mut backend: B,
        limits: &DecoderLimits,
        sizes: &SchedulerConfig,
        dtype: DType,
    ) -> Box<dyn Executor> {
        let model = Decoder::load(&self.spec, self, &mut backend, limits, &mut |_| ())
            .expect("the weights fit the spec");
        let layout = model_info(&self.spec).kv_layout(sizes.num_blocks, sizes.block_size, dtype);
        let sizes = RunnerSizes {
            layout,
            num_swap_blocks: sizes.num_swap_blocks,
            max_tokens: limits.max_tokens,
            max_seqs: sizes.max_num_seqs,
            max_positions: limits.max_positions,
            max_logprobs: self.spec.vocab_size,
        };
        let mut runner = ModelRunner::new(backend, model, sizes).expect("a small KV cache");
        runner.parts_mut().1.poison();
        Box::new(runner)
    }
}

impl WeightSource for TinyModel {
    fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|(shape, _)| shape.as_slice())
    }

    fn dtype(&self, name: &str) -> Option<SourceDtype> {
        self.tensors.get(name)?;
        Some(self.blocks.get(name).map_or(SourceDtype::F32, |blocks| blocks.0))
    }

    fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }

    fn read_row(&self, name: &str, row: usize, out: &mut [f32]) -> Result<(), LoadError> {
        let (_, values) = &self.tensors[name];
        out.copy_from_slice(&values[row * out.len()..][..out.len()]);
        Ok(())
    }

    fn stored_row(&self, name: &str, row: usize) -> Option<&[u8]> {
        let (format, blocks) = self.blocks.get(name)?;
        let cols = self.tensors[name].0[1];
        blocks.chunks_exact(cols / format.block_elements() * format.block_bytes()).nth(row)
    }

    fn location(&self, _: &str) -> String {
        "memory".into()
    }
}

/// Blocks of `len` values that spread over some `±size`, from bytes of all kinds.
fn random_blocks(rng: &mut Rng, format: SourceDtype, len: usize, size: f32) -> Vec<u8> {
    let bytes = len / format.block_elements() * format.block_bytes();
    let mut blocks: Vec<u8> = (0..bytes).map(|_| rng.below(256) as u8).collect();
    for block in blocks.chunks_exact_mut(format.block_bytes()) {
        let size = size * (0.75 + 0.25 * rng.signed());
        // Where the block's scale and minimum are, and what they are of values up to `size`.
        let floats: &[(usize, f32)] = match format {
            SourceDtype::Q8_0 => &[(0, size / 128.0)],
            SourceDtype::Q4_0 => &[(0, size / 8.0)],
            SourceDtype::Q4_1 => &[(0, size / 7.5), (2, -size)],
            // Scales of 6 bits; values and minima of about the same weight.
            SourceDtype::Q4K => &[(0, size / 300.0), (2, size / 40.0)],
            SourceDtype::Q6K => &[(208, size / 2000.0)],
            other => panic!("{other} is not run in blocks"),
        };
        for &(at, value) in floats {
            block[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
        }
    }
    blocks
}

/// A backend on the device that the test has loaded.
fn cuda<T: Compute>(options: CudaOptions) -> CudaBackend<T> {
    CudaBackend::new(options).expect("a device")
}

/// A KV cache that tests can fill with NaN and look into.
pub trait Poison {
    /// Sets every key and value to NaN.
    fn poison(&mut self);

    /// The bits of every key and value of a block, in all layers.
    fn block_bits(&self, block: u32) -> Vec<u32>;
}

impl Poison for RefKvCache {
    fn poison(&mut self) {
        self.fill(f32::NAN);
    }

    fn block_bits(&self, block: u32) -> Vec<u32> {
        self.block_values(block).map(f32::to_bits).collect()
    }
}

impl Poison for quire_kernels_cpu::KvCache {
    fn poison(&mut self) {
        // NaN as one f32 and as two bf16.
        self.fill(0xFFFF_FFFF);
    }

    fn block_bits(&self, block: u32) -> Vec<u32> {
        let shape = *self.shape();
        let (block, mut bits) = (block as usize, Vec::new());
        let mut head_values = vec![0.0; shape.head_dim];
        for layer in 0..shape.layers {
            for (head, slot) in (0..shape.kv_heads * shape.block_size)
                .map(|i| (i / shape.block_size, i % shape.block_size))
            {
                self.read_k(layer, block, slot, head, &mut head_values);
                bits.extend(head_values.iter().map(|x| x.to_bits()));
                self.read_v(layer, block, slot, head, &mut head_values);
                bits.extend(head_values.iter().map(|x| x.to_bits()));
            }
        }
        bits
    }
}

impl<T: Compute> Poison for CudaKvCache<T> {
    fn poison(&mut self) {
        // NaN as f32 and as bf16.
        self.fill(0xff).expect("the device works");
    }

    fn block_bits(&self, block: u32) -> Vec<u32> {
        words(&self.block(block).expect("the device works"))
    }
}

impl Poison for CudaHostCache {
    fn poison(&mut self) {
        self.fill(0xff).expect("the device works");
    }

    fn block_bits(&self, block: u32) -> Vec<u32> {
        words(&self.block(block).expect("the device works"))
    }
}

fn words(bytes: &[u8]) -> Vec<u32> {
    let word = |bytes: &[u8]| u32::from_ne_bytes(bytes.try_into().expect("four bytes"));
    bytes.chunks_exact(4).map(word).collect()
}

/// Which implementation of the ops runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The specification.
    Reference,
    /// The CPU kernels.
    Cpu {
        /// Instruction set.
        isa: Isa,
        /// Worker threads.
        threads: usize,
    },
    /// An NVIDIA device, or what stands in for one.
    Cuda(CudaOptions),
}

/// How an engine over a [`TinyModel`] is set up.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The backend.
    pub place: Place,
    /// Type of weights, GEMM inputs and KV.
    pub dtype: DType,
    /// Sizes and limits.
    pub engine: EngineConfig,
}

impl Setup {
    /// The best instruction set of this machine, two threads, default sizes.
    pub fn cpu(dtype: DType) -> Self {
        let place = Place::Cpu { isa: Isa::detect(), threads: 2 };
        Setup { place, dtype, engine: EngineConfig::default() }
    }

    /// The same on one thread, and one that computes in bf16, and the specification of both.
    pub fn every() -> [Self; 3] {
        let one = |dtype| Setup {
            place: Place::Cpu { isa: Isa::detect(), threads: 1 },
            ..Setup::cpu(dtype)
        };
        [one(DType::F32), one(DType::Bf16), Setup::reference(DType::F32)]
    }

    /// The reference backend with default sizes.
    pub fn reference(dtype: DType) -> Self {
        Setup { place: Place::Reference, dtype, engine: EngineConfig::default() }
    }

    /// The device, with default sizes.
    pub fn cuda(dtype: DType) -> Self {
        let place = Place::Cuda(CudaOptions::default());
        Setup { place, dtype, engine: EngineConfig::default() }
    }

    /// The same with other sizes.
    pub fn with(&self, engine: EngineConfig) -> Self {
        Setup { engine, ..self.clone() }
    }
}

/// Every instruction set of this machine with every dtype.
pub fn every_path() -> Vec<(Isa, DType)> {
    let dtypes = [DType::F32, DType::Bf16];
    Isa::available().into_iter().flat_map(|isa| dtypes.map(|dtype| (isa, dtype))).collect()
}
