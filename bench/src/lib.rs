//! Workloads for Quire's criterion benches, and the check of a machine with a GPU.
//!
//! * [`PagedBatch`]: a batch of sequences over a shuffled paged KV cache, as a running engine has it
//!   after some churn; the benches vary its shape.
//! * [`gpu_check`]: what `make gpu-check` runs.
//! * [`models`]: models with random weights, of well-known shapes.
//! * [`running`]: schedulers full of sequences that decode.
//! * [`speed`]: speeds as shares of what the machine can do.

pub mod gpu_check;
pub mod models;
pub mod running;
pub mod speed;

use quire_kernels_cpu::{
    AttnArgs, AttnScratch, AttnScratchShape, Ctx, Dtype, KvCache, KvShape, QkvArgs, attention,
    qk_norm_rope_write_kv, to_words,
};

/// Shape of a paged attention workload.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Sequences.
    pub num_seqs: usize,
    /// Tokens each has in the cache.
    pub context: usize,
    /// Tokens of each that attend in this step: 1 = decode.
    pub query_len: usize,
    /// Query heads.
    pub num_heads: usize,
    /// KV heads.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Tokens of a KV block.
    pub block_size: usize,
}

impl Shape {
    /// Bytes of K and V that one call reads at least.
    pub fn kv_bytes(&self, dtype: Dtype) -> u64 {
        let tokens = self.num_seqs * self.context;
        (2 * tokens * self.num_kv_heads * self.head_dim * dtype.size()) as u64
    }

    /// Multiply–add FLOPs of one call, counting only keys a query sees.
    pub fn flops(&self) -> u64 {
        let (q, n) = (self.query_len, self.context);
        let visible = q * n - q * (q - 1) / 2;
        (4 * self.num_seqs * visible * self.num_heads * self.head_dim) as u64
    }
}

/// What attends to a [`PagedBatch`].
#[derive(Clone, Copy, Debug)]
pub struct Queries {
    /// The first so many of its sequences.
    pub num_seqs: usize,
    /// The last so many tokens of each.
    pub query_len: usize,
    /// Query heads.
    pub num_heads: usize,
}

/// A filled cache with the metadata of one step.
pub struct PagedBatch {
    shape: Shape,
    kv: KvCache,
    scratch: AttnScratch,
    q: Vec<u32>,
    out: Vec<u32>,
    query_start_loc: Vec<i32>,
    seq_lens: Vec<i32>,
    block_table: Vec<i32>,
    max_blocks: usize,
}

/// A small deterministic generator (xorshift64*), for fillings and shuffles.
pub struct Random(u64);

impl Random {
    /// A generator for a seed other than 0.
    pub fn new(seed: u64) -> Self {
        assert_ne!(seed, 0, "xorshift stays at 0");
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// `n` numbers in [−1, 1).
    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
    }

    /// `0..n` in random order.
    pub fn shuffled(&mut self, n: usize) -> Vec<i32> {
        let mut ids: Vec<i32> = (0..n as i32).collect();
        for i in (1..n).rev() {
            ids.swap(i, self.next() as usize % (i + 1));
        }
        ids
    }
}

impl PagedBatch {
    /// Fills a cache of just enough blocks, handed out in random order.
    pub fn new(ctx: &Ctx, shape: Shape, dtype: Dtype) -> Self {
        let mut random = Random::new(0x5DEE_CE66_D1CE_4E5B);
        let max_blocks = shape.context.div_ceil(shape.block_size);
        let num_blocks = max_blocks * shape.num_seqs;
        let kv_shape = KvShape {
            layers: 1,
            num_blocks,
            block_size: shape.block_size,
            kv_heads: shape.num_kv_heads,
            head_dim: shape.head_dim,
            dtype,
        };
        let mut kv = KvCache::new(kv_shape).expect("the bench's cache fits this machine");
        let block_table = random.shuffled(num_blocks);
        for seq in 0..shape.num_seqs {
            let table = &block_table[seq * max_blocks..][..max_blocks];
            write_sequence(ctx, &shape, table, &mut random, &mut kv);
        }
        let mut batch = PagedBatch {
            shape,
            kv,
            scratch: AttnScratch::default(),
            q: Vec::new(),
            out: Vec::new(),
            query_start_loc: Vec::new(),
            seq_lens: Vec::new(),
            block_table,
            max_blocks,
        };
        let Shape { num_seqs, query_len, num_heads, .. } = shape;
        batch.set_queries(ctx, Queries { num_seqs, query_len, num_heads });
        batch
    }

    /// Takes other queries to the same keys and values.
    pub fn set_queries(&mut self, ctx: &Ctx, queries: Queries) {
        let Queries { num_seqs, query_len, num_heads } = queries;
        assert!(num_seqs <= self.max_seqs(), "{num_seqs} of {} sequences", self.max_seqs());
        self.shape = Shape { num_seqs, query_len, num_heads, ..self.shape };
        let (rows, width) = (num_seqs * query_len, num_heads * self.shape.head_dim);
        let dtype = self.kv.shape().dtype;
        self.q = vec![0; rows * dtype.words(width)];
        let values = Random::new(0x9E37_79B9).floats(rows * width);
        to_words(ctx, &values, rows, width, &mut self.q, dtype);
        self.out = vec![0; self.q.len()];
        let shape = AttnScratchShape {
            seqs: num_seqs,
            positions: self.shape.context,
            q_heads: num_heads,
            kv_heads: self.shape.num_kv_heads,
            head_dim: self.shape.head_dim,
        };
        self.scratch.reserve(&shape).expect("it is small beside the cache");
        self.query_start_loc = (0..=num_seqs).map(|i| (i * query_len) as i32).collect();
        self.seq_lens = vec![self.shape.context as i32; num_seqs];
    }

    /// Sequences in the cache.
    pub fn max_seqs(&self) -> usize {
        self.block_table.len() / self.max_blocks
    }

    /// What attends to what.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Runs attention once.
    pub fn attend(&mut self, ctx: &Ctx) -> &[u32] {
        let args = AttnArgs {
            q: &self.q,
            q_heads: self.shape.num_heads,
            layer: 0,
            query_start_loc: &self.query_start_loc,
            seq_lens: &self.seq_lens,
            block_table: &self.block_table[..self.shape.num_seqs * self.max_blocks],
            max_blocks: self.max_blocks,
            scale: (self.shape.head_dim as f32).sqrt().recip(),
            window: None,
            softcap: None,
        };
        attention(ctx, &args, &self.kv, &mut self.scratch, &mut self.out);
        &self.out
    }
}

/// Writes random keys and values for every position of one sequence.
fn write_sequence(ctx: &Ctx, shape: &Shape, table: &[i32], random: &mut Random, kv: &mut KvCache) {
    let slot = |p: usize| {
        table[p / shape.block_size] as i64 * shape.block_size as i64 + (p % shape.block_size) as i64
    };
    let slots: Vec<i64> = (0..shape.context).map(slot).collect();
    let heads = shape.num_heads + 2 * shape.num_kv_heads;
    let args = QkvArgs {
        qkv: &random.floats(shape.context * heads * shape.head_dim),
        positions: &vec![0; shape.context],
        slots: &slots,
        q_heads: shape.num_heads,
        q_norm: None,
        k_norm: None,
        eps: 1e-6,
        cos: &[1.0],
        sin: &[0.0],
        rot_dim: 2,
        interleaved: false,
        layer: 0,
    };
    let words = kv.shape().dtype.words(shape.head_dim);
    let mut q = vec![0; shape.context * shape.num_heads * words];
    qk_norm_rope_write_kv(ctx, &args, kv, &mut q);
}
