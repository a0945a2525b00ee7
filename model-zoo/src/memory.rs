//! What a decoder takes on a backend, counted by the walk that also builds it.

use crate::decoder::{self, Parts, model_info, stacks};
use crate::loader::ModelError;
use crate::source::WeightSource;
use crate::spec::DecoderSpec;
use crate::weights::{ExpectedWeight, expected_weights};
use quire_engine::DType;
use quire_engine::memory::{BufferSizes, FixedBytes, ModelMemory};
use quire_engine::model::ModelInfo;
use quire_engine::ops::{MatrixLayout, MatrixShape, StepLimits, TensorKind, WeightFormats};
use std::collections::HashMap;

/// A decoder and the sizes of a backend's buffers.
pub struct DecoderMemory<'a> {
    spec: &'a DecoderSpec,
    /// Where the weights come from; without it they are plain floats.
    source: Option<&'a dyn WeightSource>,
    info: ModelInfo,
    buffers: Box<dyn BufferSizes>,
}

impl<'a> DecoderMemory<'a> {
    /// What a decoder of `spec` takes in `buffers`, if its weights are stored as plain floats.
    pub fn new(spec: &'a DecoderSpec, buffers: impl BufferSizes + 'static) -> Self {
        DecoderMemory { spec, source: None, info: model_info(spec), buffers: Box::new(buffers) }
    }

    /// The same with the weights as `source` stores them.
    pub fn stored_in(self, source: &'a dyn WeightSource) -> Self {
        DecoderMemory { source: Some(source), ..self }
    }

    /// How many matrices are kept in which quantised format.
    pub fn quantization(&self) -> WeightFormats {
        let mut counter = self.counter();
        decoder::parameters(&mut counter, self.spec).expect("a count cannot fail");
        let mut formats = WeightFormats::default();
        counter.shapes.iter().for_each(|shape| formats.add(self.buffers.quantised_as(shape)));
        formats
    }

    /// The weights that a step multiplies by.
    pub fn step_weights(&self) -> StepWeights {
        let mut counter = self.counter();
        decoder::parameters(&mut counter, self.spec).expect("a count cannot fail");
        // The head comes last: the output matrix, or the embedding in its place.
        let head = counter.shapes.pop();
        if !self.spec.tie_word_embeddings {
            counter.shapes.pop();
        }
        let mut weights = StepWeights::default();
        counter.shapes.iter().for_each(|shape| weights.layers.add(shape, self.buffers.as_ref()));
        head.iter().for_each(|shape| weights.head.add(shape, self.buffers.as_ref()));
        weights
    }

    fn counter(&self) -> Counter<'_> {
        let weight = |ExpectedWeight { name, shape }| (name, shape);
        Counter {
            buffers: self.buffers.as_ref(),
            source: self.source,
            weights: expected_weights(self.spec).into_iter().map(weight).collect(),
            shapes: Vec::new(),
            matrices: Some(0),
            vectors: Some(0),
            tensors: Some(0),
        }
    }
}

/// The weights that a step multiplies by; an embedding that is only looked up is not among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepWeights {
    /// Those every token is multiplied by.
    pub layers: WeightSizes,
    /// The output matrix, by which tokens are multiplied whose logits are wanted.
    pub head: WeightSizes,
}

/// Sizes of some weight matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WeightSizes {
    /// Bytes, packed.
    pub bytes: u64,
    /// Elements of the matrices in the dtype.
    pub plain: u64,
    /// Elements of the quantised matrices.
    pub quantised: u64,
}

impl WeightSizes {
    fn add(&mut self, shape: &MatrixShape, buffers: &dyn BufferSizes) {
        let elements = shape.n as u64 * shape.k as u64;
        self.bytes =
            self.bytes.saturating_add(buffers.matrix_bytes(shape).unwrap_or(usize::MAX) as u64);
        match buffers.quantised_as(shape) {
            Some(_) => self.quantised += elements,
            None => self.plain += elements,
        }
    }
}

impl ModelMemory for DecoderMemory<'_> {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn dtype(&self) -> DType {
        self.buffers.dtype()
    }

    fn fixed_bytes(&self, limits: &StepLimits) -> Option<FixedBytes> {
        let mut counter = self.counter();
        let counts = "a count cannot fail";
        decoder::parameters(&mut counter, self.spec).expect(counts);
        decoder::rope(&mut counter, self.spec, limits.max_positions).expect(counts);
        decoder::workspace(&mut counter, self.spec, limits.max_tokens).expect(counts);
        let layout = self.info.kv_layout(1, limits.block_size, self.dtype());
        add(&mut counter.tensors, self.buffers.step_bytes(limits, &layout, &counter.shapes));
        let workspace = counter.tensors.replace(0)?;
        decoder::head_workspace(&mut counter, self.spec, limits.max_tokens).expect(counts);
        Some(FixedBytes {
            weights: counter.matrices?,
            workspace,
            logits: counter.tensors?,
            sampling: self.buffers.sampling_bytes(limits)?,
            other: counter.vectors?,
        })
    }

    fn swap_is_apart(&self) -> bool {
        self.buffers.swap_is_apart()
    }

    fn block_bytes(&self, block_size: usize) -> Option<usize> {
        self.buffers.kv_bytes(&self.info.kv_layout(1, block_size, self.dtype()))
    }
}

/// Adds up what is asked of it, in bytes; `None`: more than an address can name.
struct Counter<'a> {
    buffers: &'a dyn BufferSizes,
    source: Option<&'a dyn WeightSource>,
    /// Shapes by name.
    weights: HashMap<String, Vec<usize>>,
    /// The matrices so far.
    shapes: Vec<MatrixShape>,
    matrices: Option<usize>,
    vectors: Option<usize>,
    tensors: Option<usize>,
}

impl Counter<'_> {
    /// The rows of all of `names`.
    fn rows(&self, names: &[String]) -> usize {
        names.iter().map(|name| self.weights[name][0]).sum()
    }
}

/// Adds `bytes` to `sum`.
fn add(sum: &mut Option<usize>, bytes: Option<usize>) {
    *sum = sum.zip(bytes).and_then(|(sum, bytes)| sum.checked_add(bytes));
}

impl Parts for Counter<'_> {
    type Matrix = ();
    type Vector = ();
    type Tensor = ();

    fn matrix(&mut self, layout: MatrixLayout, names: &[String]) -> Result<(), ModelError> {
        let buffers = self.buffers;
        let shapes: Vec<MatrixShape> = match self.source {
            None => {
                let (n, k) = (self.rows(names), self.weights[&names[0]][1]);
                vec![MatrixShape { layout, n, k, blocks: None }]
            }
            Some(source) => {
                let stacks = stacks(source, layout, names, |s| buffers.quantised_as(s).is_some());
                stacks.into_iter().map(|(_, shape)| shape).collect()
            }
        };
        for shape in shapes {
            add(&mut self.matrices, buffers.matrix_bytes(&shape));
            self.shapes.push(shape);
        }
        Ok(())
    }

    fn vector(&mut self, names: &[String]) -> Result<(), ModelError> {
        let rows = self.rows(names);
        add(&mut self.vectors, self.buffers.vector_bytes(rows));
        Ok(())
    }

    fn table(&mut self, len: usize, _: &mut dyn Iterator<Item = f32>) -> Result<(), ModelError> {
        add(&mut self.vectors, self.buffers.vector_bytes(len));
        Ok(())
    }

    fn tensor(&mut self, rows: usize, cols: usize, kind: TensorKind) -> Result<(), ModelError> {
        add(&mut self.tensors, self.buffers.tensor_bytes(rows, cols, kind));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{GOLDENS, golden_folder, read_config};
    use crate::decoder::Loader;
    use crate::gguf::testing::block_model;
    use crate::safetensors::SafetensorsSource;
    use quire_engine::EngineConfig;
    use quire_engine::backend::cpu::{CpuKvCache, CpuMatrix, CpuTensor};
    use quire_engine::backend::reference::{RefKvCache, RefMatrix, RefTensor};
    use quire_engine::backend::{
        CpuBackend, CpuBuffers, Quantization, ReferenceBackend, ReferenceBuffers,
    };
    use quire_engine::memory::SystemMemory;
    use quire_engine::ops::Backend;

    /// A buffer that knows what it takes.
    trait Bytes {
        fn bytes(&self) -> usize;
    }

    impl Bytes for Vec<f32> {
        fn bytes(&self) -> usize {
            size_of::<f32>() * self.capacity()
        }
    }

    macro_rules! knows_its_bytes {
        ($($buffer:ty),*) => {$(
            impl Bytes for $buffer {
                fn bytes(&self) -> usize {
                    <$buffer>::bytes(self)
                }
            }
        )*};
    }

    /// A backend that knows what its steps take besides the model's buffers.
    trait StepBytes {
        fn step_bytes(&self) -> usize;
    }

    impl StepBytes for CpuBackend {
        fn step_bytes(&self) -> usize {
            Self::step_bytes(self)
        }
    }

    impl StepBytes for ReferenceBackend {
        fn step_bytes(&self) -> usize {
            0
        }
    }

    knows_its_bytes!(CpuMatrix, CpuTensor, CpuKvCache, RefMatrix, RefTensor, RefKvCache);

    /// Loads onto a backend and adds up what it allocated.
    struct Allocated<'a, B: Backend> {
        loader: Loader<'a, B>,
        matrices: usize,
        vectors: usize,
        tensors: usize,
    }

    impl<B: Backend> Parts for Allocated<'_, B>
    where
        B::Matrix: Bytes,
        B::Vector: Bytes,
        B::Tensor: Bytes,
    {
        type Matrix = ();
        type Vector = ();
        type Tensor = ();

        fn matrix(&mut self, layout: MatrixLayout, names: &[String]) -> Result<(), ModelError> {
            self.matrices += self.loader.matrix(layout, names)?.bytes();
            Ok(())
        }

        fn vector(&mut self, names: &[String]) -> Result<(), ModelError> {
            self.vectors += self.loader.vector(names)?.bytes();
            Ok(())
        }

        fn table(
            &mut self,
            len: usize,
            values: &mut dyn Iterator<Item = f32>,
        ) -> Result<(), ModelError> {
            self.vectors += self.loader.table(len, values)?.bytes();
            Ok(())
        }

        fn tensor(&mut self, rows: usize, cols: usize, kind: TensorKind) -> Result<(), ModelError> {
            self.tensors += self.loader.tensor(rows, cols, kind)?.bytes();
            Ok(())
        }
    }

    /// Plans for `buffers` with `config`, allocates all of it on `backend` and compares.
    fn check<B: Backend + StepBytes>(
        (spec, source): (&DecoderSpec, &dyn WeightSource),
        mut backend: B,
        buffers: impl BufferSizes + 'static,
        config: &EngineConfig,
    ) where
        B::Matrix: Bytes,
        B::Vector: Bytes,
        B::Tensor: Bytes,
        B::KvCache: Bytes,
        B::HostCache: Bytes,
    {
        let what = format!("{} {:?} {config:?}", spec.architecture, backend.info());
        let memory = DecoderMemory::new(spec, buffers).stored_in(source);
        let resolved = config.resolve(&memory, SystemMemory::unused(1 << 32)).unwrap();
        let (plan, sizes) = (resolved.memory, &resolved.scheduler);
        let layout = memory.info().kv_layout(sizes.num_blocks, sizes.block_size, memory.dtype());
        assert_eq!(backend.kv_cache(&layout).unwrap().bytes(), plan.kv_cache, "{what}");
        let host = backend.host_cache(&layout, sizes.num_swap_blocks).unwrap();
        assert_eq!(host.bytes(), plan.swap, "{what}");

        let progress: decoder::OnProgress<'_> = &mut |_| ();
        let loader = Loader::new(&mut backend, source, progress);
        let mut allocated = Allocated { loader, matrices: 0, vectors: 0, tensors: 0 };
        decoder::parameters(&mut allocated, spec).unwrap();
        decoder::rope(&mut allocated, spec, sizes.max_model_len).unwrap();
        decoder::workspace(&mut allocated, spec, sizes.max_num_batched_tokens).unwrap();
        let workspace = allocated.tensors;
        decoder::head_workspace(&mut allocated, spec, sizes.max_num_batched_tokens).unwrap();
        assert_eq!(allocated.tensors, workspace + plan.logits, "{what}");
        assert_eq!(allocated.matrices, plan.weights, "{what}");
        assert_eq!(allocated.vectors, plan.other, "{what}");
        backend
            .reserve(&StepLimits {
                max_tokens: sizes.max_num_batched_tokens,
                max_seqs: sizes.max_num_seqs,
                max_positions: sizes.max_model_len,
                max_logprobs: 0,
                block_size: sizes.block_size,
                swap: false,
                vocab_size: spec.vocab_size,
                num_heads: spec.num_heads,
            })
            .unwrap();
        assert_eq!(workspace + backend.step_bytes(), plan.workspace, "{what}");
        let loaded = backend.info().quantization.to_string();
        assert_eq!(loaded, memory.quantization().to_string(), "{what}");
    }

    const CONFIGS: [fn() -> EngineConfig; 2] = [
        || EngineConfig { block_size: 8, ..Default::default() },
        || EngineConfig {
            block_size: 32,
            max_num_batched_tokens: Some(7),
            num_blocks: Some(3),
            swap_bytes: 1 << 20,
            ..Default::default()
        },
    ];

    fn check_cpu(
        model: (&DecoderSpec, &dyn WeightSource),
        (dtype, quantization): (DType, Quantization),
        config: &EngineConfig,
    ) {
        let cpu = CpuBackend::new(dtype, None, Some(1)).unwrap().quantised(quantization);
        let buffers = CpuBuffers::new(dtype, Some(1)).quantised(quantization);
        check(model, cpu, buffers, config);
    }

    /// What the matrices of a model of blocks are kept in: the ggml types are those of
    /// [`block_model`].
    #[test]
    fn plans_of_quantised_weights_are_what_backends_allocate() {
        for (kinds, stored) in [
            ([8, 8, 8, 8], "Q8_0 as stored (9 of 9 matrices)"),
            ([2, 2, 2, 2], "Q4_0 as stored (9 of 9 matrices)"),
            ([8, 3, 3, 3], "8 Q4_1 as stored, 1 Q8_0 as stored of 9 matrices"),
            // Queries, keys and values of two formats are two matrices.
            ([14, 12, 14, 12], "8 Q4_K as stored, 3 Q6_K as stored of 11 matrices"),
            ([14, 12, 6, 12], "8 Q4_K as stored, 1 Q6_K as stored of 11 matrices"),
            ([14, 14, 14, 6], "Q6_K as stored (3 of 9 matrices)"),
            ([1, 0, 0, 30], "none"),
        ] {
            let (spec, source) = block_model(kinds);
            for (quantization, want) in [
                (Quantization::None, "none"),
                (Quantization::Stored, stored),
                (Quantization::Int8, "int8 (9 of 9 matrices)"),
            ] {
                let buffers = CpuBuffers::new(DType::Bf16, Some(1)).quantised(quantization);
                let memory = DecoderMemory::new(&spec, buffers).stored_in(&source);
                assert_eq!(memory.quantization().to_string(), want, "{kinds:?}");
                for config in CONFIGS.map(|config| config()) {
                    check_cpu((&spec, &source), (DType::Bf16, quantization), &config);
                }
            }
        }
    }

    #[test]
    fn plans_are_what_backends_allocate() {
        for golden in GOLDENS {
            let dir = golden_folder(golden);
            let spec = read_config(&dir).unwrap().spec;
            let source = SafetensorsSource::open(&dir).unwrap();
            for dtype in [DType::F32, DType::Bf16] {
                for config in CONFIGS.map(|config| config()) {
                    for quantization in
                        [Quantization::None, Quantization::Stored, Quantization::Int8]
                    {
                        check_cpu((&spec, &source), (dtype, quantization), &config);
                    }
                    let reference = ReferenceBackend::new(dtype);
                    check((&spec, &source), reference, ReferenceBuffers::new(dtype), &config);
                }
            }
        }
    }

    #[test]
    fn a_step_multiplies_by_all_weights_but_an_untied_embedding() {
        let (spec, source) = block_model([8, 3, 3, 3]);
        let buffers = || CpuBuffers::new(DType::Bf16, Some(1));
        let plain = DecoderMemory::new(&spec, buffers()).step_weights();
        let (vocab, hidden) = (spec.vocab_size as u64, spec.hidden_size as u64);
        assert_eq!((plain.head.plain, plain.head.quantised), (vocab * hidden, 0));
        let vectors = hidden * (2 * spec.num_layers as u64 + 1);
        let embedding = if spec.tie_word_embeddings { 0 } else { vocab * hidden };
        let all = model_info(&spec).num_parameters - vectors - embedding;
        assert_eq!(plain.layers.plain + plain.head.plain, all);
        let stored = DecoderMemory::new(&spec, buffers().quantised(Quantization::Stored));
        let stored = stored.stored_in(&source).step_weights();
        assert_eq!(stored.layers.quantised, plain.layers.plain);
        assert_eq!((stored.layers.plain, stored.head.plain), (0, 0));
        // Blocks of 32: 34 bytes or 20, in panels of 64 rows.
        assert!(stored.layers.bytes < plain.layers.bytes / 2);

        let spec = DecoderSpec { tie_word_embeddings: !spec.tie_word_embeddings, ..spec };
        let other = DecoderMemory::new(&spec, buffers()).step_weights();
        assert_eq!(other, plain);
    }

    #[test]
    fn sizes_are_those_of_the_formula() {
        let spec = read_config(&golden_folder("llama-gqa")).unwrap().spec;
        let (hidden, vocab) = (spec.hidden_size, spec.vocab_size);
        let memory = DecoderMemory::new(&spec, CpuBuffers::new(DType::Bf16, Some(3)));
        let limits = |max_tokens, max_positions| StepLimits {
            max_tokens,
            max_seqs: 1,
            max_positions,
            max_logprobs: 20,
            block_size: 16,
            swap: false,
            vocab_size: vocab,
            num_heads: spec.num_heads,
        };
        let bytes = memory.fixed_bytes(&limits(100, 10)).unwrap();
        let (q, kv) = (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim);
        let f32_cols = hidden + q + 2 * kv;
        let bf16_cols = hidden + 2 * q + spec.intermediate_size;
        let workspace =
            |tokens, positions| memory.fixed_bytes(&limits(tokens, positions)).unwrap().workspace;
        let activations = 100 * (4 * f32_cols + 2 * bf16_cols);
        assert_eq!(workspace(200, 10) - bytes.workspace, activations);
        // Attention keeps a maximum, a sum and an output of every head for each split of 256
        // positions, and a counter.
        let group = spec.num_heads / spec.num_kv_heads;
        let head = 4 * (group * (spec.head_dim + 2)).next_multiple_of(16) + 4;
        assert_eq!(workspace(100, 513) - workspace(100, 256), 2 * spec.num_kv_heads * head);
        assert_eq!(bytes.logits, 64 * (4 * hidden + 2 * hidden + 4 * vocab));
        assert_eq!(bytes.sampling, 3 * (6 * 4 * vocab + 8 * 2048));
        // Fewer rows than a slice of logits has.
        assert_eq!(memory.fixed_bytes(&limits(5, 10)).unwrap().logits, 5 * bytes.logits / 64);
        let longer = memory.fixed_bytes(&limits(100, 11)).unwrap();
        assert_eq!(longer.other - bytes.other, 2 * 4 * spec.rope.rot_dim / 2);
        let block = 2 * 16 * spec.num_layers * kv;
        assert_eq!(memory.block_bytes(16), Some(2 * block));
        // The reference keeps every value as an f32.
        let reference = DecoderMemory::new(&spec, ReferenceBuffers::new(DType::Bf16));
        assert_eq!(reference.block_bytes(16), Some(4 * block));
        assert_eq!(memory.fixed_bytes(&limits(usize::MAX, 10)), None);
        assert_eq!(memory.fixed_bytes(&limits(100, usize::MAX)), None);
    }
}
