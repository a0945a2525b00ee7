//! The launches of a mixture of experts, from routing to the residual stream.

use quire_ptxsim::CtaOrder;
use quire_tests::args;
use quire_tests::ptx::{Element, Gpu, Kernels, Variant};
use quire_tests::rng::Rng;

pub const TESTED: &[&str] =
    &["combine", "count_experts", "grouped_gemm", "place_slots", "plan_tiles", "route"];

/// How tokens choose experts.
#[derive(Clone, Copy, Debug)]
pub struct Routing {
    pub experts: usize,
    pub top_k: usize,
    pub sigmoid: bool,
    pub bias: bool,
    pub renormalise: bool,
    pub scale: f32,
}

impl Routing {
    /// Scores of a token in f64, and by what it chooses.
    fn scores(&self, logits: &[f32], bias: &[f32]) -> Vec<(f64, f64)> {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let exp = |x: f32| f64::from(x - max).exp();
        let total: f64 = logits.iter().map(|&x| exp(x)).sum();
        let score = |(&x, &b): (&f32, &f32)| {
            let score =
                if self.sigmoid { 1.0 / (1.0 + f64::from(-x).exp()) } else { exp(x) / total };
            (score, if self.bias { score + f64::from(b) } else { f64::from(x) })
        };
        logits.iter().zip(bias).map(score).collect()
    }

    /// The chosen experts, ascending, with their weights.
    fn formula(&self, logits: &[f32], bias: &[f32]) -> Vec<(usize, f64)> {
        let scores = self.scores(logits, bias);
        let mut order: Vec<usize> = (0..self.experts).collect();
        // Stable: ties go to the lower expert.
        order.sort_by(|&a, &b| scores[b].1.total_cmp(&scores[a].1));
        order.truncate(self.top_k);
        order.sort_unstable();
        let total: f64 = order.iter().map(|&e| scores[e].0).sum();
        let weight = |e: usize| scores[e].0 / if self.renormalise { total } else { 1.0 };
        order.into_iter().map(|e| (e, weight(e) * f64::from(self.scale))).collect()
    }
}

/// Experts and weights on the device: `[T, top_k]`.
pub fn route(
    gpu: &mut Gpu,
    route: &Variant<'_>,
    r: &Routing,
    logits: &[f32],
    bias: &[f32],
) -> (u64, u64) {
    let tokens = logits.len() / r.experts;
    let slots = tokens * r.top_k;
    let (expert, weight) = (gpu.empty("expert", 4 * slots), gpu.empty("weight", 4 * slots));
    let logits = gpu.floats("logits", Element::F32, logits);
    let bias = gpu.floats("bias", Element::F32, bias);
    gpu.launch(
        route,
        &[tokens],
        args![
            expert, weight, logits, bias, num_experts: r.experts, top_k: r.top_k,
            use_sigmoid: usize::from(r.sigmoid), has_bias: usize::from(r.bias),
            renormalise: usize::from(r.renormalise), scale: r.scale,
        ],
    );
    (expert, weight)
}

#[test]
fn routes() {
    let kernels = Kernels::load();
    let variant = kernels.only("route");
    for (experts, top_k) in [(4, 1), (8, 2), (60, 4), (128, 8), (256, 8)] {
        for mode in 0..4 {
            let (sigmoid, bias) = (mode & 1 == 1, mode & 2 == 2);
            let r = Routing { experts, top_k, sigmoid, bias, renormalise: mode < 2, scale: 2.5 };
            let tokens = 5;
            let mut logits = Rng::new(mode + experts as u64).floats(tokens * experts, 4.0);
            // Ties at the top: the lower experts win.
            logits[..experts].fill(1.0);
            let bias = Rng::new(3).floats(experts, 0.5);
            let mut gpu = Gpu::ordered(CtaOrder::Reverse);
            let (expert, weight) = route(&mut gpu, &variant, &r, &logits, &bias);
            let got_experts = gpu.read_i32s(expert, tokens * top_k);
            let got_weights = gpu.read(weight, Element::F32, tokens * top_k);
            for (token, logits) in logits.chunks_exact(experts).enumerate() {
                let want = r.formula(logits, &bias);
                let slots = token * top_k..(token + 1) * top_k;
                let chosen: Vec<usize> =
                    got_experts[slots.clone()].iter().map(|&e| e as usize).collect();
                assert_eq!(chosen, want.iter().map(|w| w.0).collect::<Vec<_>>(), "{r:?} {token}");
                for (&got, (_, want)) in got_weights[slots].iter().zip(&want) {
                    let off = (f64::from(got) - want).abs();
                    assert!(off <= 1e-5 * want, "{r:?} {token}: {got} is not {want}");
                }
                let mut alone = Gpu::new();
                let (expert, weight) = route(&mut alone, &variant, &r, logits, &bias);
                assert_eq!(alone.read_i32s(expert, top_k), got_experts[token * top_k..][..top_k]);
                assert_eq!(
                    alone.read(weight, Element::F32, top_k),
                    got_weights[token * top_k..][..top_k]
                );
            }
        }
    }
    // A row of NaN still chooses valid experts.
    let r = Routing {
        experts: 8,
        top_k: 2,
        sigmoid: false,
        bias: false,
        renormalise: true,
        scale: 1.0,
    };
    let mut gpu = Gpu::new();
    let (expert, _) = route(&mut gpu, &variant, &r, &[f32::NAN; 8], &[0.0; 8]);
    assert_eq!(gpu.read_i32s(expert, 2), [0, 1]);
}

/// Slots grouped by expert, as `plan_tiles` and `place_slots` leave them.
struct Plan {
    sorted_slots: u64,
    tile_expert: u64,
    num_tiles: u64,
    max_tiles: usize,
}

fn plan(
    gpu: &mut Gpu,
    kernels: &Kernels,
    expert: u64,
    slots: usize,
    experts: usize,
    block_m: usize,
) -> Plan {
    let (count, tiles, place) =
        (kernels.only("count_experts"), kernels.only("plan_tiles"), kernels.only("place_slots"));
    assert_eq!(count.constant("CHUNK"), place.constant("CHUNK"));
    let chunks = slots.div_ceil(count.constant("CHUNK"));
    let counts = gpu.empty("counts", 4 * chunks * experts);
    gpu.launch(&count, &[chunks], args![counts, expert, num_slots: slots, num_experts: experts]);
    let starts = gpu.empty("starts", 4 * chunks * experts);
    let max_tiles = slots / block_m + slots.min(experts);
    let plan = Plan {
        sorted_slots: gpu.empty("sorted_slots", 4 * max_tiles * block_m),
        tile_expert: gpu.empty("tile_expert", 4 * max_tiles),
        num_tiles: gpu.empty("num_tiles", 4),
        max_tiles,
    };
    gpu.launch(
        &tiles,
        &[1],
        args![
            sorted_slots: plan.sorted_slots, tile_expert: plan.tile_expert,
            num_tiles: plan.num_tiles, starts, counts, num_slots: slots, num_chunks: chunks,
            num_experts: experts, block_m,
        ],
    );
    gpu.launch(
        &place,
        &[chunks],
        args![
            sorted_slots: plan.sorted_slots, expert, starts, num_slots: slots, num_experts: experts,
        ],
    );
    plan
}

#[test]
fn slots_grouped_by_expert() {
    let kernels = Kernels::load();
    for (slots, experts, block_m) in [(1, 4, 16), (130, 3, 16), (300, 60, 64), (257, 256, 16)] {
        let mut rng = Rng::new(slots as u64);
        let expert: Vec<i32> = (0..slots).map(|_| rng.below(experts) as i32).collect();
        let mut gpu = Gpu::ordered(CtaOrder::Shuffled(2));
        let on_device = gpu.i32s("expert", &expert);
        let plan = plan(&mut gpu, &kernels, on_device, slots, experts, block_m);
        let mut want = Vec::new();
        for e in 0..experts as i32 {
            let of: Vec<i32> = (0..slots as i32).filter(|&s| expert[s as usize] == e).collect();
            for tile in of.chunks(block_m) {
                let mut tile = tile.to_vec();
                tile.resize(block_m, slots as i32);
                want.push((e, tile));
            }
        }
        let num_tiles = gpu.read_i32s(plan.num_tiles, 1)[0] as usize;
        assert_eq!(num_tiles, want.len());
        let experts = gpu.read_i32s(plan.tile_expert, num_tiles);
        let sorted = gpu.read_i32s(plan.sorted_slots, num_tiles * block_m);
        let got: Vec<_> = sorted.chunks_exact(block_m).map(<[i32]>::to_vec).collect();
        let got: Vec<_> = experts.into_iter().zip(got).collect();
        assert_eq!(got, want, "{slots} slots");
    }
}

/// One linear layer of the experts on `x`, whose rows serve `slots_per_row` slots each.
pub fn grouped(
    kernels: &Kernels,
    variant: &Variant<'_>,
    (x, w): (&[f32], &[f32]),
    expert: &[i32],
    (experts, slots_per_row, k): (usize, usize, usize),
) -> Vec<f32> {
    let (element, slots) = (variant.element(), expert.len());
    let n = w.len() / experts / k;
    let mut gpu = Gpu::ordered(CtaOrder::Reverse);
    let on_device = gpu.i32s("expert", expert);
    let plan = plan(&mut gpu, kernels, on_device, slots, experts, variant.constant("BLOCK_M"));
    let out = gpu.empty("out", 4 * slots * n);
    let (x, w) = (gpu.floats("x", element, x), gpu.floats("w", element, w));
    let grid = [plan.max_tiles, n.div_ceil(variant.constant("BLOCK_N"))];
    gpu.launch(
        variant,
        &grid,
        args![
            out, x, w, sorted_slots: plan.sorted_slots, tile_expert: plan.tile_expert,
            num_tiles: plan.num_tiles, num_slots: slots, slots_per_row, N: n, K: k,
        ],
    );
    gpu.read(out, Element::F32, slots * n)
}

#[test]
fn products_of_experts() {
    let kernels = Kernels::load();
    let (experts, n, k, tokens, top_k) = (5, 144, 208, 23, 2);
    let mut rng = Rng::new(8);
    let expert: Vec<i32> = (0..tokens * top_k).map(|_| rng.below(experts) as i32).collect();
    for element in [Element::Bf16, Element::F16, Element::F32] {
        let rounded =
            |values: Vec<f32>| values.iter().map(|&x| element.round(x)).collect::<Vec<_>>();
        let x = rounded(Rng::new(1).floats(tokens * k, 2.0));
        let w = rounded(Rng::new(2).floats(experts * n * k, 1.0));
        let mut results = Vec::new();
        let variants = kernels.variants("grouped_gemm");
        for variant in variants.iter().filter(|v| v.element() == element) {
            let got = grouped(&kernels, variant, (&x, &w), &expert, (experts, top_k, k));
            for (slot, got) in got.chunks_exact(n).enumerate() {
                let x = &x[slot / top_k * k..][..k];
                for (column, &got) in got.iter().enumerate() {
                    let w = &w[(expert[slot] as usize * n + column) * k..][..k];
                    let terms = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w));
                    let (want, size) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
                    let bound = (k + 4) as f64 * 2f64.powi(-24) * size;
                    assert!(
                        (f64::from(got) - want).abs() <= bound,
                        "{slot} {column}: {got}, {want}"
                    );
                }
            }
            // The last token alone.
            let alone = grouped(
                &kernels,
                variant,
                (&x[(tokens - 1) * k..], &w),
                &expert[(tokens - 1) * top_k..],
                (experts, top_k, k),
            );
            assert_eq!(alone, got[(tokens - 1) * top_k * n..], "{} alone", variant.name());
            results.push(got);
        }
        assert!(!results.is_empty(), "no variant for {element}");
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "tile sizes differ in bits");
    }
}

#[test]
pub fn combined_contributions() {
    let kernels = Kernels::load();
    let variant = kernels.only("combine");
    for (width, top_k) in [(16, 1), (1040, 4)] {
        let tokens = 3;
        let mut rng = Rng::new(width as u64);
        let before = rng.floats(tokens * width, 2.0);
        let y = rng.floats(tokens * top_k * width, 2.0);
        let weights = rng.floats(tokens * top_k, 1.0);
        let mut gpu = Gpu::ordered(CtaOrder::Reverse);
        let residual = gpu.floats("residual", Element::F32, &before);
        let parts = gpu.floats("y", Element::F32, &y);
        let weight = gpu.floats("weight", Element::F32, &weights);
        let grid = [tokens, width.div_ceil(variant.constant("BLOCK"))];
        gpu.launch(&variant, &grid, args![residual, y: parts, weight, top_k, width]);
        let want: Vec<f32> = (0..tokens * width)
            .map(|i| {
                let (token, column) = (i / width, i % width);
                let slots = token * top_k..(token + 1) * top_k;
                // In expert order, each step one fused multiply-add.
                before[i]
                    + slots.fold(0.0f32, |sum, s| y[s * width + column].mul_add(weights[s], sum))
            })
            .collect();
        assert_eq!(gpu.read(residual, Element::F32, tokens * width), want);
    }
}
