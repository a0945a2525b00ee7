//! What it costs prefill that sums are folded at every 256 keys, which makes a row's bits those of
//! decode.
//!
//! The kernel cannot leave the fold out, so it is found from times: one tile of new rows a sequence,
//! over contexts of every length from a tile of keys to several splits. Between two splits the time
//! grows by a tile of keys; where a split is completed, by that and a fold. Tiles with and without a
//! mask differ, too, so the times are fitted, by least squares, as
//!
//! ```text
//! time = start + unmasked tiles · u + masked tiles · m + completed splits · fold
//! ```
//! and the fold's share of the time of a split without mask is fold / (u · tiles a split + fold).
//! What the second set of sums takes of registers, and so of tiles, is not in it.

use super::attention::{Cache, Queries, time};
use super::kit::Kit;
use super::report::Figure;
use super::{EAGER, Run};
use anyhow::Context;
use quire_kernels_ptx::kernels;
use serde_json::json;

/// Keys of a split.
const SPLIT: usize = 256;
/// Percent beyond which folding always is too dear.
const LIMIT: f64 = 10.0;
/// Sequences with blocks of their own; others take theirs, so that keys come from a cache and
/// arithmetic is what takes time.
const OWN_BLOCKS: usize = 8;
const KERNEL: &str = "prefill_attention";

/// Times contexts of every length.
pub(super) fn run(run: &mut Run) -> anyhow::Result<()> {
    if !run.has_time_for("cost of the fold") {
        return Ok(());
    }
    let sizes = &run.sizes.attention;
    let mut kit = Kit::new(EAGER, run.sizes, run.dry_run)?;
    let longest = sizes.fold_splits * SPLIT;
    let seqs = sizes.fold_seqs.min(OWN_BLOCKS);
    let Some(cache) = Cache::new(run, &mut kit, (seqs, longest, 16))? else {
        run.leave_out("cost of the fold", "no memory");
        return Ok(());
    };
    let tile = tile(&mut kit, &cache, sizes.prefill_group)?;
    let rows = tile.rows / sizes.prefill_group;
    let mut queries =
        Queries::new(&mut kit, &cache.layout, sizes.fold_seqs * rows, sizes.prefill_group)?;
    let mut points = Vec::new();
    for context in (tile.keys..=longest).step_by(tile.keys).filter(|&context| context >= rows) {
        let input = cache.input(sizes.fold_seqs, rows, context);
        let ms = time(&mut kit, &cache, &mut queries, &input)?;
        points.push((counts(context, rows, tile.keys), ms));
    }
    let params = json!({
        "group": sizes.prefill_group, "head_dim": sizes.head_dim, "keys": longest,
        "tile": tile.keys,
    });
    let figure = Figure::new("cost of the fold", "% of a split", params);
    run.figure(match fit(&points).filter(|_| !run.dry_run) {
        Some([_, unmasked, _, fold]) => {
            let split = unmasked * (SPLIT / tile.keys) as f64 + fold;
            figure.value(100.0 * fold / split).aim(LIMIT)
        }
        None => figure,
    });
    Ok(())
}

/// Rows (times heads of a group) and keys that the kernel takes at a time.
struct Tile {
    rows: usize,
    keys: usize,
}

/// Asks the kernel that is launched.
fn tile(kit: &mut Kit, cache: &Cache, group: usize) -> anyhow::Result<Tile> {
    let mut queries = Queries::new(kit, &cache.layout, 2, group)?;
    kit.begin(&cache.input(1, 2, SPLIT))?;
    kit.device.record_launches(true);
    queries.attend(&mut kit.device, cache, 0);
    let launches = kit.device.record_launches(false);
    let launch = launches.iter().find(|launch| launch.kernel == KERNEL).context(KERNEL)?;
    let kernel = kernels().iter().find(|kernel| kernel.name == KERNEL).context(KERNEL)?;
    let variant = kernel.variants.iter().find(|v| v.name == launch.variant).context(KERNEL)?;
    let constant = |name| variant.constant(name).context(name).map(|value| value as usize);
    Ok(Tile { rows: constant("BLOCK_M")?, keys: constant("TILE")? })
}

/// One, tiles without and with a mask, and completed splits: what the kernel does for the last `rows`
/// of `context` tokens.
fn counts(context: usize, rows: usize, tile: usize) -> [f64; 4] {
    // Up to here every row sees every key.
    let unmasked = (context - rows + 1) / SPLIT * SPLIT;
    let masked = (context - unmasked).div_ceil(tile);
    [1.0, (unmasked / tile) as f64, masked as f64, (context / SPLIT) as f64]
}

/// Factors of the counts that fit the times best, by the normal equations; `None`: the points do not
/// say.
fn fit(points: &[([f64; 4], f64)]) -> Option<[f64; 4]> {
    let mut rows = [[0.0; 5]; 4];
    for (counts, time) in points {
        for (row, factor) in rows.iter_mut().zip(counts) {
            for (entry, value) in row.iter_mut().zip(counts.iter().chain([time])) {
                *entry += factor * value;
            }
        }
    }
    for pivot in 0..4 {
        let best =
            (pivot..4).max_by(|&a, &b| rows[a][pivot].abs().total_cmp(&rows[b][pivot].abs()));
        rows.swap(pivot, best?);
        let lead = rows[pivot];
        if lead[pivot].abs() < 1e-9 {
            return None;
        }
        for (i, row) in rows.iter_mut().enumerate() {
            if i != pivot {
                let factor = row[pivot] / lead[pivot];
                row.iter_mut().zip(lead).for_each(|(entry, value)| *entry -= factor * value);
            }
        }
    }
    Some(std::array::from_fn(|i| rows[i][4] / rows[i][i]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 32 new rows, tiles of 64 keys.
    #[test]
    fn tiles_and_splits_are_counted() {
        for (context, counted) in [
            (64, [1.0, 0.0, 1.0, 0.0]),
            (256, [1.0, 0.0, 4.0, 1.0]),
            (320, [1.0, 4.0, 1.0, 1.0]),
            (512, [1.0, 4.0, 4.0, 2.0]),
            (576, [1.0, 8.0, 1.0, 2.0]),
        ] {
            assert_eq!(counts(context, 32, 64), counted, "{context}");
        }
    }

    #[test]
    fn the_fit_finds_what_the_times_are_made_of() {
        let made_of = [3.0, 1.0, 1.25, 0.2];
        let points = |longest: usize| {
            let contexts = (64..=longest).step_by(64);
            contexts.map(|context| {
                let counts = counts(context, 32, 64);
                (counts, counts.iter().zip(made_of).map(|(n, time)| n * time).sum())
            })
        };
        let found = fit(&points(1024).collect::<Vec<_>>()).unwrap();
        assert!(found.iter().zip(made_of).all(|(a, b)| (a - b).abs() < 1e-6), "{found:?}");
        // Within one split there is no tile without a mask.
        assert_eq!(fit(&points(256).collect::<Vec<_>>()), None);
        assert_eq!(fit(&[]), None);
    }
}
