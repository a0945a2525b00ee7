//! Prints the speed of the kernels on this machine: `cargo run --release --example kernel_speed`.
//!
//! Arguments: instruction set (default: the best), threads (default: all usable cores).

use std::time::{Duration, Instant};

use quire_kernels_cpu::{
    AttnArgs, Ctx, Dtype, Epilogue, Isa, KvCache, KvShape, PackedMatrix, attention, gemm,
    usable_cores,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let isa = args.next().map_or(Ok(Isa::detect()), |name| name.parse())?;
    let threads = args.next().map_or(Ok(usable_cores()), |n| n.parse())?;
    let ctx = Ctx::new(isa, threads)?;
    println!("{isa}, {threads} threads");
    let idle = best(Duration::from_millis(50), || ctx.pool.run(|_| ()));
    println!("empty pool run: {:.2} µs", idle.as_secs_f64() * 1e6);
    for (m, n, k) in [
        (64, 1024, 1024),
        (128, 1024, 1024),
        (512, 1024, 1024),
        (512, 2048, 2048),
        (1024, 3072, 576),
        (1024, 576, 1536),
        (512, 2048, 8192),
        (32, 3072, 576),
        (16, 3072, 576),
        (16, 576, 1536),
        (16, 49152, 576),
        (8, 49152, 576),
        (1, 3072, 576),
        (1, 576, 1536),
        (1, 49152, 576),
        (1, 73728, 2048),
    ] {
        report_gemm(&ctx, m, n, k)?;
    }
    for (tokens, context, kv_heads, group, head_dim) in [
        (1024, 1024, 3, 3, 64),
        (4096, 4096, 3, 3, 64),
        (1024, 1024, 8, 4, 128),
        (1, 1024, 3, 3, 64),
        (1, 8192, 8, 4, 128),
        (1, 8192, 8, 8, 128),
    ] {
        let shape = KvShape {
            layers: 1,
            num_blocks: context / 16,
            block_size: 16,
            kv_heads,
            head_dim,
            dtype: Dtype::Bf16,
        };
        report_attention(&ctx, shape, group, tokens)?;
    }
    Ok(())
}

/// The shortest of the runs that fit in `budget`, after one to warm up.
fn best(budget: Duration, mut f: impl FnMut()) -> Duration {
    f();
    let (start, mut best) = (Instant::now(), Duration::MAX);
    while start.elapsed() < budget {
        let run = Instant::now();
        f();
        best = best.min(run.elapsed());
    }
    best
}

fn report_gemm(ctx: &Ctx, m: usize, n: usize, k: usize) -> Result<(), Box<dyn std::error::Error>> {
    let mut w = PackedMatrix::zeroed(Dtype::Bf16, n, k)?;
    w.set_rows(ctx, 0, n, &|row, out| {
        out.iter_mut().enumerate().for_each(|(i, x)| *x = ((row + 7 * i) % 13) as f32 * 0.1);
    });
    let x = vec![0x3f80_3f80; m * Dtype::Bf16.words(k)];
    let mut out = vec![0.0; m * n];
    let time = best(Duration::from_millis(300), || {
        gemm(ctx, &x, m, &w, Epilogue::Store { bias: None, out: &mut out });
    });
    let seconds = time.as_secs_f64();
    println!(
        "gemm {m:5} × {n:5} × {k:4}: {:8.1} µs {:7.1} GFLOP/s {:6.1} GB/s of weights",
        seconds * 1e6,
        (2 * m * n * k) as f64 / seconds / 1e9,
        w.bytes() as f64 / seconds / 1e9,
    );
    Ok(())
}

/// The last `tokens` of a sequence that fills the cache.
fn report_attention(
    ctx: &Ctx,
    shape: KvShape,
    group: usize,
    tokens: usize,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut kv = KvCache::new(shape)?;
    kv.fill(0x3e00_3e00);
    let context = shape.num_blocks * shape.block_size;
    let q_heads = shape.kv_heads * group;
    let q = vec![0x3e00_3e00; tokens * q_heads * shape.head_dim / 2];
    let mut out = vec![0; q.len()];
    let block_table: Vec<i32> = (0..shape.num_blocks as i32).collect();
    let args = AttnArgs {
        q: &q,
        q_heads,
        layer: 0,
        query_start_loc: &[0, tokens as i32],
        seq_lens: &[context as i32],
        block_table: &block_table,
        max_blocks: shape.num_blocks,
        scale: 0.1,
        window: None,
        softcap: None,
    };
    let time = best(Duration::from_millis(300), || attention(ctx, &args, &kv, &mut out));
    let seconds = time.as_secs_f64();
    let pairs = tokens * (context - tokens) + tokens * (tokens + 1) / 2;
    println!(
        "attention {tokens:4} of {context:4}, {} × {group} heads of {:3}: {:8.1} µs {:7.1} GFLOP/s {:6.1} GB/s of KV",
        shape.kv_heads,
        shape.head_dim,
        seconds * 1e6,
        (4 * pairs * q_heads * shape.head_dim) as f64 / seconds / 1e9,
        shape.bytes()? as f64 / seconds / 1e9,
    );
    Ok(())
}
