//! From a path to a running engine.

use crate::config::{GenerationDefaults, MAX_CONFIG_BYTES, read_config};
use crate::decoder::{Decoder, DecoderLimits, model_info};
use crate::error::LoadError;
use crate::folder::ModelFolder;
use crate::gguf::{GgufFile, GgufTokenizer};
use crate::memory::DecoderMemory;
use crate::safetensors::SafetensorsSource;
use crate::source::{SourceDtype, WeightSource};
use crate::spec::DecoderSpec;
use crate::weights::{EMBED_TOKENS, check_weights};
use quire_engine::backend::{
    CpuBackend, CpuBuffers, CudaOptions, Quantization, ReferenceBackend, ReferenceBuffers,
};
use quire_engine::config::{ConfigError, ResolvedConfig};
use quire_engine::engine::TextConfig;
use quire_engine::memory::SystemMemory;
use quire_engine::model::ModelInfo;
use quire_engine::ops::{Backend, BackendError};
use quire_engine::runner::{Executor, ModelRunner, RunnerSizes};
use quire_engine::text::chat::{
    ChatError, ChatTemplateOptions, FoundTemplate, TemplateFiles, find_template,
};
use quire_engine::text::{TextError, Tokenizer};
use quire_engine::{DType, Engine, EngineConfig};
use std::path::Path;

#[cfg_attr(not(feature = "cuda"), path = "loader/no_cuda.rs")]
pub(crate) mod cuda;

pub use quire_engine::backend::Isa;

/// Memory assumed where the system does not say what there is.
const UNKNOWN_MEMORY: SystemMemory = SystemMemory::unused(8 << 30);

/// Why a model cannot be opened or run.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file is not what it should be.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The backend cannot hold the model.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The engine's limits do not fit the model.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The tokenizer is unusable.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The files that may hold a chat template are malformed.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// The backend is not part of this build.
    #[error("this build has no CUDA backend; build it with the feature `cuda`, or take the CPU")]
    NoCuda,
    /// There is no room in host memory for swapped-out blocks.
    #[error(
        "the swap space of {bytes} bytes exceeds the {available} bytes of host memory there are"
    )]
    NoSwapSpace {
        /// What was asked for.
        bytes: usize,
        /// What there is.
        available: usize,
    },
    /// The model has a part no op computes yet.
    #[error("{architecture} with {part} is not supported")]
    Unsupported {
        /// The architecture.
        architecture: String,
        /// The part.
        part: &'static str,
    },
}

/// Which implementation of the ops runs the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendKind {
    /// The scalar specification: slow, for verification.
    Reference,
    /// SIMD kernels and worker threads.
    #[default]
    Cpu,
    /// An NVIDIA device.
    Cuda,
}

/// How to run a model.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// The backend.
    pub backend: BackendKind,
    /// Type of GEMM inputs, KV and the weights that are not quantised; default: f32 for f32
    /// models, else bf16.
    pub dtype: Option<DType>,
    /// What becomes of quantised weights, and of others; default: they are kept as they are stored
    /// on the CPU, in the dtype on other backends and where a dtype is asked for.
    pub quantization: Option<Quantization>,
    /// Instruction set of the CPU backend; default: the best of this machine.
    pub isa: Option<Isa>,
    /// Threads of the CPU backend; default: the cores this process may use.
    pub threads: Option<usize>,
    /// How the CUDA backend is set up.
    pub cuda: CudaOptions,
    /// Sizes and limits.
    pub engine: EngineConfig,
}

impl LoadOptions {
    /// What becomes of weights; anything but `None` is for the CPU backend.
    pub fn quantization(&self) -> Quantization {
        match (self.quantization, self.backend) {
            (Some(quantization), _) => quantization,
            (None, BackendKind::Cpu) if self.dtype.is_none() => Quantization::Stored,
            (None, _) => Quantization::None,
        }
    }
}

impl BackendKind {
    /// Refuses what the backend does not do with weights.
    pub(crate) fn check(self, quantization: Quantization) -> Result<(), BackendError> {
        let backend = match self {
            BackendKind::Cpu => return Ok(()),
            BackendKind::Reference => "reference",
            BackendKind::Cuda => "cuda",
        };
        let what = match quantization {
            Quantization::None => return Ok(()),
            Quantization::Stored => "weights in blocks as stored",
            Quantization::Int8 => "int8 weights",
        };
        let reason = format!("{what} are for the CPU backend");
        Err(BackendError::Unsupported { backend, reason })
    }
}

/// How a model is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelFormat {
    /// A folder in Hugging Face layout.
    HuggingFace,
    /// One GGUF file.
    Gguf,
}

/// A model's files, opened and checked; the weights are read by [`ModelFiles::load`].
pub struct ModelFiles {
    /// What the decoder is made of.
    pub spec: DecoderSpec,
    /// The weights.
    pub source: Box<dyn WeightSource>,
    /// Tokenizer and special tokens.
    pub text: TextConfig,
    /// Sampling parameters the publisher recommends.
    pub generation: GenerationDefaults,
    /// How it is stored.
    pub format: ModelFormat,
}

impl ModelFiles {
    /// Opens a Hugging Face folder or a `.gguf` file that holds every weight of its model.
    ///
    /// # Errors
    /// A file is missing, malformed, or asks for something not supported; a tensor is missing or
    /// has the wrong shape.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let files = if path.is_dir() { Self::open_folder(path)? } else { Self::open_gguf(path)? };
        if files.spec.mlp_bias {
            let architecture = files.spec.architecture.clone();
            return Err(ModelError::Unsupported { architecture, part: "mlp_bias" });
        }
        check_weights(&files.spec, files.source.as_ref())?;
        Ok(files)
    }

    fn open_folder(path: &Path) -> Result<Self, ModelError> {
        let config = read_config(path)?;
        let source = SafetensorsSource::open(path)?;
        let missing = || LoadError::malformed(path, "holds no tokenizer.json");
        let folder = ModelFolder::open(path)?;
        let tokenizer = Tokenizer::from_file(&folder.file("tokenizer.json")?.ok_or_else(missing)?)?;
        let mut eos_token_ids = config.spec.eos.clone();
        if let Some(text) = folder_eos_token(&folder)? {
            add_token(&tokenizer, &text, &mut eos_token_ids);
        }
        let text = TextConfig {
            tokenizer,
            // tokenizer.json has a post-processor where the model wants BOS.
            prepend_bos: None,
            eos_token_ids,
            chat_template: folder_template(&folder)?,
        };
        Ok(ModelFiles {
            spec: config.spec,
            source: Box::new(source),
            text,
            generation: config.generation,
            format: ModelFormat::HuggingFace,
        })
    }

    fn open_gguf(path: &Path) -> Result<Self, ModelError> {
        let file = GgufFile::open(path)?;
        let tokenizer = file.tokenizer()?;
        let spec = file.spec()?;
        let mut eos_token_ids = spec.eos.clone();
        let chat_template = gguf_template(&tokenizer);
        let prepend_bos = tokenizer.bos.filter(|_| tokenizer.add_bos);
        let tokenizer = Tokenizer::from_inner(tokenizer.tokenizer);
        for text in TURN_ENDS {
            add_token(&tokenizer, text, &mut eos_token_ids);
        }
        let text = TextConfig { chat_template, prepend_bos, tokenizer, eos_token_ids };
        Ok(ModelFiles {
            spec,
            source: Box::new(file.into_source()?),
            text,
            generation: GenerationDefaults::default(),
            format: ModelFormat::Gguf,
        })
    }

    /// The model's sizes.
    pub fn info(&self) -> ModelInfo {
        model_info(&self.spec)
    }

    /// The type weights are computed in unless the user says otherwise.
    pub fn default_dtype(&self) -> DType {
        match self.source.dtype(EMBED_TOKENS) {
            Some(SourceDtype::F32) => DType::F32,
            _ => DType::Bf16,
        }
    }

    /// What the model takes when it runs with `options`.
    pub fn memory(&self, options: &LoadOptions) -> DecoderMemory<'_> {
        let dtype = self.dtype(options);
        let memory = match options.backend {
            BackendKind::Reference => DecoderMemory::new(&self.spec, ReferenceBuffers::new(dtype)),
            BackendKind::Cpu => {
                let buffers = CpuBuffers::new(dtype, options.threads);
                DecoderMemory::new(&self.spec, buffers.quantised(options.quantization()))
            }
            BackendKind::Cuda => cuda::memory(&self.spec, dtype, options.cuda),
        };
        memory.stored_in(self.source.as_ref())
    }

    fn dtype(&self, options: &LoadOptions) -> DType {
        options.dtype.unwrap_or_else(|| self.default_dtype())
    }

    /// The sizes an engine with `options` will have.
    ///
    /// # Errors
    /// A limit does not fit the model or the memory of this machine.
    pub fn plan(&self, options: &LoadOptions) -> Result<ResolvedConfig, ModelError> {
        options.backend.check(options.quantization())?;
        let memory = SystemMemory::read().unwrap_or(UNKNOWN_MEMORY);
        if options.backend == BackendKind::Cuda {
            let bytes = options.engine.swap_bytes;
            if bytes > memory.available {
                return Err(ModelError::NoSwapSpace { bytes, available: memory.available });
            }
            let (config, memory) = cuda::plan(&self.spec, self.dtype(options), options)?;
            return Ok(config.resolve(&self.memory(options), memory)?);
        }
        Ok(options.engine.resolve(&self.memory(options), memory)?)
    }

    /// Reads the weights and builds an engine. `progress` is called with the parameters read.
    ///
    /// # Errors
    /// A tensor is missing or has the wrong shape; memory is short; a limit does not fit.
    pub fn load(
        &self,
        options: &LoadOptions,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Engine, ModelError> {
        self.load_planned(options, self.plan(options)?, progress)
    }

    /// The same with the sizes that [`ModelFiles::plan`] made of the same options.
    ///
    /// # Errors
    /// A tensor is missing or has the wrong shape; memory is short.
    pub fn load_planned(
        &self,
        options: &LoadOptions,
        config: ResolvedConfig,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Engine, ModelError> {
        options.backend.check(options.quantization())?;
        let dtype = self.dtype(options);
        let executor = match options.backend {
            BackendKind::Reference => {
                self.executor(ReferenceBackend::new(dtype), &config, progress)?
            }
            BackendKind::Cpu => {
                let backend = CpuBackend::new(dtype, options.isa, options.threads)?;
                let backend = backend.quantised(options.quantization());
                self.executor(backend, &config, progress)?
            }
            BackendKind::Cuda => cuda::executor(self, (dtype, options.cuda), &config, progress)?,
        };
        Ok(Engine::new(executor, self.text.clone(), config, options.engine.seed))
    }

    fn executor<B: Backend>(
        &self,
        mut backend: B,
        config: &ResolvedConfig,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Box<dyn Executor>, ModelError> {
        let sizes = &config.scheduler;
        let limits = DecoderLimits {
            max_tokens: sizes.max_num_batched_tokens,
            max_positions: sizes.max_model_len,
        };
        let model =
            Decoder::load(&self.spec, self.source.as_ref(), &mut backend, &limits, progress)?;
        let dtype = backend.info().dtype;
        let layout = self.info().kv_layout(sizes.num_blocks, sizes.block_size, dtype);
        let sizes = RunnerSizes {
            layout,
            num_swap_blocks: sizes.num_swap_blocks,
            max_tokens: sizes.max_num_batched_tokens,
            max_seqs: sizes.max_num_seqs,
            max_positions: sizes.max_model_len,
            max_logprobs: config.max_logprobs as usize,
        };
        Ok(Box::new(ModelRunner::new(backend, model, sizes)?))
    }
}

/// Special tokens that end an answer. Many GGUF files name one of several that their model uses.
const TURN_ENDS: [&str; 8] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
];

/// Adds a special token of the vocabulary to `ids`, unless it is there.
fn add_token(tokenizer: &Tokenizer, text: &str, ids: &mut Vec<u32>) {
    let id = tokenizer.token_to_id(text).filter(|&id| tokenizer.is_special(id));
    ids.extend(id.filter(|id| !ids.contains(id)));
}

/// The end-of-sequence token that `tokenizer_config.json` names, which fine-tunes change without
/// changing `config.json`.
fn folder_eos_token(folder: &ModelFolder) -> Result<Option<String>, ModelError> {
    let Some(text) = folder.read_text("tokenizer_config.json", MAX_CONFIG_BYTES)? else {
        return Ok(None);
    };
    // What is not JSON is refused with the chat template.
    let config: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    let token = &config["eos_token"];
    Ok(token.as_str().or(token["content"].as_str()).map(str::to_owned))
}

/// The chat template in the files of a model folder.
fn folder_template(folder: &ModelFolder) -> Result<Option<FoundTemplate>, ModelError> {
    let read = |name| folder.read_text(name, MAX_CONFIG_BYTES);
    let config = read("tokenizer_config.json")?;
    let jinja = read("chat_template.jinja")?;
    let json = read("chat_template.json")?;
    Ok(find_template(&TemplateFiles {
        tokenizer_config: config.as_deref(),
        chat_template_jinja: jinja.as_deref(),
        chat_template_json: json.as_deref(),
    })?)
}

/// The chat template in a GGUF file, with the special tokens that templates name.
fn gguf_template(tokenizer: &GgufTokenizer) -> Option<FoundTemplate> {
    let token = |name: &str, id: Option<u32>| {
        let text = tokenizer.tokenizer.id_to_token(id?)?;
        Some((name.to_owned(), text))
    };
    let bos = token("bos_token", tokenizer.bos);
    let eos = token("eos_token", tokenizer.eos.first().copied());
    Some(FoundTemplate {
        default: tokenizer.chat_template.clone()?,
        tool_use: None,
        options: ChatTemplateOptions {
            special_tokens: bos.into_iter().chain(eos).collect(),
            control_tokens: Vec::new(),
        },
    })
}

/// Opens and loads a model in one go.
///
/// # Errors
/// See [`ModelFiles::open`] and [`ModelFiles::load`].
pub fn load(path: &Path, options: &LoadOptions) -> Result<Engine, ModelError> {
    ModelFiles::open(path)?.load(options, &mut |_| ())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::golden_folder;

    fn copy_of_golden() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(golden_folder("llama-gqa")).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
        dir
    }

    /// Whatever a model is opened for, plans and weights can rely on its shapes.
    #[test]
    fn a49_models_whose_weights_do_not_fit_are_not_opened() {
        let dir = copy_of_golden();
        let path = dir.path().join("config.json");
        let config: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        for (key, problem) in [
            ("num_hidden_layers", "is missing"),
            ("intermediate_size", "the config makes it"),
            ("vocab_size", "the config makes it"),
        ] {
            let mut changed = config.clone();
            changed[key] = (config[key].as_u64().unwrap() + 32).into();
            std::fs::write(&path, changed.to_string()).unwrap();
            let error = ModelFiles::open(dir.path()).err().expect(key).to_string();
            assert!(error.contains(problem), "{key}: {error}");
        }
        std::fs::write(&path, config.to_string()).unwrap();
        let weights = dir.path().join("model.safetensors");
        let bytes = std::fs::read(&weights).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let flat = tensors.tensors().into_iter().map(|(name, tensor)| {
            let shape = vec![tensor.shape().iter().product()];
            let view = safetensors::tensor::TensorView::new(tensor.dtype(), shape, tensor.data());
            (name, view.unwrap())
        });
        std::fs::write(&weights, safetensors::serialize(flat, None).unwrap()).unwrap();
        let error = ModelFiles::open(dir.path()).err().expect("vectors").to_string();
        assert!(error.contains("has shape"), "{error}");
    }

    #[test]
    fn the_tokenizers_own_eos_ends_an_answer_too() {
        let dir = copy_of_golden();
        let ids = || ModelFiles::open(dir.path()).unwrap().text.eos_token_ids;
        assert_eq!(ids(), [258]);
        let tokenizer = ModelFiles::open(dir.path()).unwrap().text.tokenizer;
        let (other, _) = tokenizer
            .added_tokens()
            .into_iter()
            .find(|(token, special)| *special && tokenizer.token_to_id(token) != Some(258))
            .expect("more than one special token");
        let id = tokenizer.token_to_id(&other).unwrap();
        let config = dir.path().join("tokenizer_config.json");
        for form in [serde_json::json!(other), serde_json::json!({"content": other})] {
            std::fs::write(&config, serde_json::json!({"eos_token": form}).to_string()).unwrap();
            assert_eq!(ids(), [258, id]);
        }
    }

    #[test]
    fn quantised_weights_are_refused_where_there_are_none() {
        let files = ModelFiles::open(&golden_folder("llama-gqa")).unwrap();
        for (quantization, problem) in [
            (Quantization::Int8, "reference backend: int8 weights are for the CPU backend"),
            (Quantization::Stored, "reference backend: weights in blocks as stored are for"),
        ] {
            let backend = BackendKind::Reference;
            let quantization = Some(quantization);
            let options = LoadOptions { backend, quantization, ..Default::default() };
            let error = files.plan(&options).unwrap_err().to_string();
            assert!(error.contains(problem), "{error}");
        }
    }
}
