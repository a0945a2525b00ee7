//! The ops as launches.

use super::attention::{self, Attention};
use super::element::Compute;
use super::error::CudaError;
use super::launcher::Work;
use super::load::{self, Uploader};
use super::tensors::{
    CudaHostCache, CudaKvCache, CudaMatrix, CudaTensor, CudaVector, layer_block_bytes,
};
use super::{CudaBackend, swap};
use crate::backend::GemmMode;
use crate::model::MAX_LOGIT_ROWS;
use crate::ops::{
    AttentionArgs, Backend, BackendError, BackendInfo, ForwardInput, KvLayout, MatrixLayout,
    QkvArgs, StepLimits, TensorKind, WeightFormats, WeightRows,
};
use crate::sampling::{SampleOutput, SamplingBatch};
use quire_kernels_ptx::DevicePtr;
use quire_kernels_ptx::launch::{
    CopyBlocks, Embed, GatherRows, PatchTokens, QkNormRopeWriteKv, RmsNorm,
};
use std::marker::PhantomData;
use std::ops::Range;

impl<T: Compute> CudaBackend<T> {
    /// Before an op that no graph holds; hands out the first failure of the ops before.
    fn leave_graph(&mut self) -> Result<(), CudaError> {
        self.graphs.end(&mut self.launcher)?;
        self.launcher.take_failure()
    }

    fn take_step(&mut self, input: &ForwardInput) -> Result<(), CudaError> {
        self.launcher.context().bind()?;
        self.graphs.abandon(&mut self.launcher);
        let block_size = self.layout.as_ref().map_or(1, |layout| layout.block_size);
        let pad = !self.options.enforce_eager;
        let written = self.step.write(&mut self.launcher, input, block_size, pad)?;
        if written.moved {
            self.graphs.clear();
        }
        let chosen = self.sampler().chosen();
        self.patch_tokens(chosen);
        self.sampler().begin_step();
        self.launcher.take_failure()?;
        match written.shape {
            Some(shape) => self.graphs.begin(&mut self.launcher, shape),
            None => Ok(()),
        }
    }

    /// Puts tokens that the step before chose in their places.
    fn patch_tokens(&mut self, chosen: DevicePtr<i32>) {
        let n = self.step.num_patches;
        let (places, rows) = self.step.patches();
        let args = PatchTokens {
            token_ids: self.step.token_ids(),
            sampled: chosen,
            places,
            rows,
            num_patches: n as i32,
        };
        let kernel = self.kernels.patch_tokens;
        let grid = [n.div_ceil(kernel.tile("BLOCK")), 1, 1];
        self.launcher.launch(kernel, grid, &args, || Work::bytes(16 * n));
    }

    fn reserve_step(&mut self, limits: &StepLimits) -> Result<(), CudaError> {
        if let Some(uploader) = self.uploader.take() {
            uploader.finish()?;
        }
        let context = self.launcher.context().clone();
        let layout = self.layout.clone().expect("the KV cache is there");
        let group = limits.num_heads / layout.num_kv_heads;
        let attention = self.attention.as_ref().expect("the KV cache is there");
        self.step.reserve(limits, attention.tile_rows(group)?)?;
        let bytes =
            attention::scratch_bytes(limits.max_positions, limits.num_heads, layout.head_dim);
        if bytes > self.scratch.bytes() {
            // Both at a time may not fit.
            self.scratch = context.alloc(0, "partial results")?;
            self.scratch = context.alloc(bytes, "partial results")?;
        }
        self.graphs.clear();
        let limits = load::sampler_limits(limits).expect("the vocabulary can be counted");
        self.sampler = Some(super::sampling::DeviceSampler::new(&mut self.launcher, limits)?);
        self.launcher.load_kernels()
    }

    fn sampler(&mut self) -> &mut super::sampling::DeviceSampler {
        self.sampler.as_mut().expect("reserve was called")
    }
}

impl<T: Compute> Backend for CudaBackend<T> {
    type Tensor = CudaTensor<T>;
    type Matrix = CudaMatrix<T>;
    type Vector = CudaVector;
    type KvCache = CudaKvCache<T>;
    type HostCache = CudaHostCache;

    fn info(&self) -> BackendInfo {
        let info = self.launcher.context().info();
        BackendInfo {
            name: "cuda",
            isa: format!("{} (compute capability {})", info.name, info.capability),
            threads: 1,
            dtype: T::COMPUTE,
            quantization: WeightFormats::default(),
            batch_invariant: self.options.gemm == GemmMode::Triton,
        }
    }

    fn matrix(
        &mut self,
        layout: MatrixLayout,
        n: usize,
        k: usize,
        rows: &dyn WeightRows,
    ) -> Result<CudaMatrix<T>, BackendError> {
        let context = self.launcher.context().clone();
        let uploader = match &mut self.uploader {
            Some(uploader) => uploader,
            none => none.insert(Uploader::new(&context)?),
        };
        uploader.matrix(&context, (layout, n, k), rows)
    }

    fn vector(&mut self, data: &[f32]) -> Result<CudaVector, BackendError> {
        Ok(load::vector((self.launcher.context(), self.launcher.stream()), data)?)
    }

    fn tensor(
        &mut self,
        max_rows: usize,
        cols: usize,
        kind: TensorKind,
    ) -> Result<CudaTensor<T>, BackendError> {
        Ok(load::tensor(self.launcher.context(), max_rows, cols, kind)?)
    }

    fn kv_cache(&mut self, layout: &KvLayout) -> Result<CudaKvCache<T>, BackendError> {
        assert_eq!(layout.dtype, T::COMPUTE);
        self.attention = Some(Attention::new(&mut self.launcher, layout.head_dim)?);
        self.layout = Some(layout.clone());
        let context = self.launcher.context().clone();
        let buffer = load::kv_buffer((&context, self.launcher.stream()), layout)?;
        Ok(CudaKvCache { context, buffer, layout: layout.clone(), element: PhantomData })
    }

    fn host_cache(
        &mut self,
        layout: &KvLayout,
        num_blocks: usize,
    ) -> Result<CudaHostCache, BackendError> {
        let what = "swapped-out blocks";
        let block_bytes = layout.block_bytes();
        let bytes = block_bytes.and_then(|bytes| bytes.checked_mul(num_blocks));
        let no_room = || CudaError::HostMemory { what: what.to_owned(), bytes: usize::MAX };
        let buffer = self.launcher.context().alloc_pinned(bytes.ok_or_else(no_room)?, what)?;
        if num_blocks > 0 {
            self.swap.reserve(&self.launcher, layout)?;
        }
        Ok(CudaHostCache { buffer, block_bytes: block_bytes.expect("all of them can be counted") })
    }

    fn reserve(&mut self, limits: &StepLimits) -> Result<(), BackendError> {
        Ok(self.reserve_step(limits)?)
    }

    fn copy_blocks(
        &mut self,
        kv: &mut CudaKvCache<T>,
        pairs: &[(u32, u32)],
    ) -> Result<(), BackendError> {
        if pairs.is_empty() {
            return Ok(());
        }
        let pairs_on_device = self.swap.pairs(&self.launcher, pairs)?;
        let words = layer_block_bytes(&kv.layout) / 4;
        let grid = swap::grid(self.kernels.copy_blocks.tile("BLOCK"), &kv.layout, pairs.len());
        let args = CopyBlocks {
            cache: kv.buffer.ptr(),
            pairs: pairs_on_device,
            num_blocks: kv.layout.num_blocks as i32,
            block_words: words as i32,
        };
        let bytes = 2 * pairs.len() * 4 * words * kv.layout.num_layers;
        self.launcher.launch(self.kernels.copy_blocks, grid, &args, || Work::bytes(bytes));
        Ok(self.launcher.take_failure()?)
    }

    fn swap_out(
        &mut self,
        kv: &CudaKvCache<T>,
        host: &mut CudaHostCache,
        pairs: &[(u32, u32)],
    ) -> Result<(), BackendError> {
        Ok(self.swap.swap_out(&mut self.launcher, kv, host, pairs)?)
    }

    fn swap_in(
        &mut self,
        kv: &mut CudaKvCache<T>,
        host: &mut CudaHostCache,
        pairs: &[(u32, u32)],
    ) -> Result<(), BackendError> {
        Ok(self.swap.swap_in(&mut self.launcher, kv, host, pairs)?)
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        Ok(self.launcher.context().synchronize()?)
    }

    fn begin_step(&mut self, input: &ForwardInput) -> Result<(), BackendError> {
        Ok(self.take_step(input)?)
    }

    fn embed(&mut self, table: &CudaMatrix<T>, out: &mut CudaTensor<T>) {
        assert_eq!((table.layout, table.k), (MatrixLayout::Plain, out.cols));
        out.resize(self.step.num_tokens);
        let args = Embed {
            out: out.floats(),
            table: table.values(),
            token_ids: self.step.token_ids(),
            hidden: out.cols as i32,
            num_table_rows: table.n as i32,
        };
        let kernel = self.kernels.embed;
        let bytes = out.rows * out.cols * (4 + size_of::<T>());
        let grid = [out.rows, out.cols.div_ceil(kernel.tile("BLOCK")), 1];
        self.launcher.launch(kernel, grid, &args, || Work::bytes(bytes));
    }

    fn linear(
        &mut self,
        x: &CudaTensor<T>,
        w: &CudaMatrix<T>,
        bias: Option<&CudaVector>,
        out: &mut CudaTensor<T>,
    ) {
        out.resize(x.rows);
        self.multiply(x, w, bias, out, false);
    }

    fn linear_add(
        &mut self,
        x: &CudaTensor<T>,
        w: &CudaMatrix<T>,
        bias: Option<&CudaVector>,
        residual: &mut CudaTensor<T>,
    ) {
        assert_eq!(residual.rows, x.rows);
        let is_first = self.communicator.rank() == 0;
        self.multiply(x, w, bias.filter(|_| is_first), residual, is_first);
        let len = residual.rows * residual.stride;
        let communicator = &self.communicator;
        self.launcher.enqueue(|s| communicator.all_reduce_sum(s, residual.floats(), len));
    }

    fn gate_up_silu_mul(&mut self, x: &CudaTensor<T>, w: &CudaMatrix<T>, out: &mut CudaTensor<T>) {
        out.resize(x.rows);
        self.multiply_gate_up(x, w, out);
    }

    fn rms_norm(
        &mut self,
        x: &CudaTensor<T>,
        weight: &CudaVector,
        eps: f32,
        out: &mut CudaTensor<T>,
    ) {
        assert_eq!((x.cols, x.stride, x.stride), (out.cols, out.stride, x.cols));
        out.resize(x.rows);
        let args = RmsNorm {
            out: out.values(),
            x: x.floats(),
            weight: weight.values(),
            eps,
            width: x.cols as i32,
        };
        let bytes = x.rows * x.cols * (4 + size_of::<T>());
        let kernel = self.kernels.rms_norm;
        self.launcher.launch(kernel, [x.rows, 1, 1], &args, || Work::bytes(bytes));
    }

    fn qk_norm_rope_write_kv(
        &mut self,
        qkv: &CudaTensor<T>,
        args: &QkvArgs<'_, Self>,
        kv: &mut CudaKvCache<T>,
        q: &mut CudaTensor<T>,
    ) {
        q.resize(qkv.rows);
        let KvLayout { num_kv_heads, head_dim, block_size, .. } = kv.layout;
        let heads = args.num_heads + 2 * num_kv_heads;
        assert_eq!((qkv.stride, q.stride), (heads * head_dim, args.num_heads * head_dim));
        assert_eq!(args.q_norm.is_some(), args.k_norm.is_some());
        let norm = |weight: Option<&CudaVector>| weight.map_or(DevicePtr::null(), |w| w.values());
        let launch = QkNormRopeWriteKv {
            q_out: q.values(),
            kv_cache: kv.layer(args.layer),
            qkv: qkv.floats(),
            q_norm: norm(args.q_norm),
            k_norm: norm(args.k_norm),
            cos: args.rope.cos.values(),
            sin: args.rope.sin.values(),
            positions: self.step.positions(),
            slot_mapping: self.step.slots(),
            num_q_heads: args.num_heads as i32,
            num_kv_heads: num_kv_heads as i32,
            head_dim: head_dim as i32,
            rot_dim: args.rope.rot_dim as i32,
            interleaved: args.rope.interleaved.into(),
            has_norm: args.q_norm.is_some().into(),
            eps: args.eps,
            block_size: block_size as i32,
            block_shift: block_size.trailing_zeros() as i32,
        };
        let kernel = self.kernels.rope[usize::from(head_dim > 128)];
        let bytes = qkv.rows * heads * head_dim * (4 + size_of::<T>());
        self.launcher.launch(kernel, [qkv.rows, heads, 1], &launch, || Work::bytes(bytes));
    }

    fn attention(
        &mut self,
        q: &CudaTensor<T>,
        args: &AttentionArgs,
        kv: &CudaKvCache<T>,
        out: &mut CudaTensor<T>,
    ) {
        assert_eq!((q.cols, q.stride), (out.cols, out.stride));
        out.resize(q.rows);
        self.attend(q, args, kv, out);
    }

    fn gather_rows(&mut self, x: &CudaTensor<T>, rows: Range<usize>, out: &mut CudaTensor<T>) {
        assert_eq!((x.cols, x.stride), (out.cols, out.stride));
        // Of a padded step all rows are computed, so that every step of its shape is the same.
        let end = if self.step.is_padded {
            self.step.num_logits.min(rows.start + MAX_LOGIT_ROWS)
        } else {
            rows.end
        };
        out.resize(end - rows.start);
        let args = GatherRows {
            out: DevicePtr::new(out.floats().address()),
            table: DevicePtr::new(x.floats().address()),
            rows: self.step.logits_rows(rows.start),
            row_words: x.stride as i32,
            num_table_rows: self.step.num_tokens as i32,
        };
        let kernel = self.kernels.gather_rows;
        let bytes = out.rows * x.stride * 8;
        let grid = [out.rows, x.stride.div_ceil(kernel.tile("BLOCK")), 1];
        self.launcher.launch(kernel, grid, &args, || Work::bytes(bytes));
    }

    fn sample(
        &mut self,
        logits: &mut CudaTensor<T>,
        batch: &SamplingBatch,
        rows: Range<usize>,
    ) -> Result<(), BackendError> {
        self.leave_graph()?;
        let sampler = self.sampler.as_mut().expect("reserve was called");
        Ok(sampler.sample(&mut self.launcher, logits.floats(), batch, rows)?)
    }

    fn end_step(&mut self) -> Result<(), BackendError> {
        self.leave_graph()?;
        let sampler = self.sampler.as_mut().expect("reserve was called");
        Ok(sampler.end_step(&mut self.launcher)?)
    }

    fn runs_ahead(&self) -> bool {
        true
    }

    fn read_samples(&mut self, out: &mut Vec<SampleOutput>) -> Result<(), BackendError> {
        self.launcher.context().bind()?;
        Ok(self.sampler().read(out)?)
    }

    fn wants_retry(&mut self) -> bool {
        self.graphs.take_gave_up()
    }

    fn abandon_steps(&mut self) {
        self.graphs.abandon(&mut self.launcher);
        // What goes on must not meet what comes; if it fails, the next call will say so.
        let _ = self.launcher.context().synchronize();
        if let Some(sampler) = &mut self.sampler {
            sampler.abandon();
        }
    }

    fn num_rows(&self, x: &CudaTensor<T>) -> usize {
        x.rows
    }

    fn read_row(
        &mut self,
        x: &CudaTensor<T>,
        row: usize,
        out: &mut Vec<f32>,
    ) -> Result<(), BackendError> {
        assert!(row < x.rows);
        self.leave_graph()?;
        let value = CudaTensor::<T>::value_bytes(x.kind);
        let at = row * x.stride * value;
        let mut bytes = vec![0; x.cols * value];
        let stream = self.launcher.stream();
        stream.download_now(&x.buffer, at..at + bytes.len(), &mut bytes)?;
        load::to_floats(&bytes, x.kind, T::COMPUTE, out);
        Ok(())
    }
}
