//! `gemm`, `gemm_silu_mul`, and the same in chunks: `gemm_partial`, `fold_partials`,
//! `fold_silu_mul`.

use proptest::prelude::*;
use quire_ptxsim::CtaOrder;
use quire_tests::args;
use quire_tests::ptx::{Element, Gpu, Kernels, Variant};
use quire_tests::rng::Rng;

pub const TESTED: &[&str] =
    &["fold_partials", "fold_silu_mul", "gemm", "gemm_partial", "gemm_silu_mul"];

/// Unused elements at the end of each row of x and of the output.
const GAP: usize = 16;

/// A product x Wᵀ and its epilogue.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub rows: usize,
    pub n: usize,
    pub k: usize,
    pub bias: bool,
    pub accumulate: bool,
    pub seed: u64,
}

impl Case {
    fn floats(&self, name: &str, count: usize, scale: f32) -> Vec<f32> {
        Rng::named(self.seed, name).floats(count, scale)
    }

    fn x(&self, element: Element) -> Vec<f32> {
        let x = self.floats("x", self.rows * self.k, 2.0);
        x.into_iter().map(|x| element.round(x)).collect()
    }

    fn w(&self, element: Element) -> Vec<f32> {
        self.floats("w", self.n * self.k, 1.0).into_iter().map(|x| element.round(x)).collect()
    }

    fn bias(&self) -> Vec<f32> {
        self.floats("bias", self.n, 3.0)
    }

    fn before(&self) -> Vec<f32> {
        self.floats("before", self.rows * self.n, 4.0)
    }

    /// Row `row` and column `column` of x Wᵀ in f64, and Σ |x w|.
    fn product(&self, x: &[f32], w: &[f32], row: usize, column: usize) -> (f64, f64) {
        let (x, w) = (&x[row * self.k..][..self.k], &w[column * self.k..][..self.k]);
        let terms = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w));
        terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()))
    }
}

/// A case on a device, for rows `rows` of x.
pub struct Data {
    gpu: Gpu,
    rows: Vec<usize>,
    x: u64,
    w: u64,
    bias: u64,
    out: u64,
    out_element: Element,
    width: usize,
}

impl Data {
    /// `gated`: the output is that of the gated product, else f32 and perhaps added to.
    pub fn new(
        case: &Case,
        element: Element,
        rows: &[usize],
        gated: bool,
        order: CtaOrder,
    ) -> Data {
        let mut gpu = Gpu::ordered(order);
        let (all, before) = (case.x(element), case.before());
        let padded = |values: &[f32], width: usize| -> Vec<f32> {
            let row = |&row: &usize| [&values[row * width..][..width], &[f32::NAN; GAP]].concat();
            rows.iter().flat_map(row).collect()
        };
        let width = if gated { case.n / 2 } else { case.n };
        let out_element = if gated { element } else { Element::F32 };
        let out_bytes = rows.len() * (width + GAP) * out_element.bytes();
        Data {
            x: gpu.floats("x", element, &padded(&all, case.k)),
            w: gpu.floats("w", element, &case.w(element)),
            bias: if case.bias { gpu.floats("bias", Element::F32, &case.bias()) } else { 0 },
            out: match case.accumulate && !gated {
                true => gpu.floats("out", Element::F32, &padded(&before, width)),
                false => gpu.empty("out", out_bytes),
            },
            gpu,
            rows: rows.to_vec(),
            out_element,
            width,
        }
    }

    fn result(&self) -> Vec<Vec<f32>> {
        let pitch = (self.width + GAP) * self.out_element.bytes();
        let row =
            |i: usize| self.gpu.read(self.out + (i * pitch) as u64, self.out_element, self.width);
        (0..self.rows.len()).map(row).collect()
    }

    pub fn gemm(&mut self, variant: &Variant<'_>, case: &Case) {
        let tiles = self.rows.len().div_ceil(variant.constant("BLOCK_T"))
            * case.n.div_ceil(variant.constant("BLOCK_N"));
        self.gpu.launch(
            variant,
            &[tiles],
            args![
                out: self.out, x: self.x, w: self.w, bias: self.bias, num_rows: self.rows.len(),
                num_n: case.n, num_k: case.k, x_stride: case.k + GAP, out_stride: case.n + GAP,
                has_bias: usize::from(case.bias), accumulate: usize::from(case.accumulate),
            ],
        );
    }

    pub fn gated(&mut self, variant: &Variant<'_>, case: &Case) {
        let tiles = self.rows.len().div_ceil(variant.constant("BLOCK_T"))
            * (case.n / 2).div_ceil(variant.constant("BLOCK_N"));
        self.gpu.launch(
            variant,
            &[tiles],
            args![
                out: self.out, x: self.x, w: self.w, num_rows: self.rows.len(), num_n: case.n,
                num_k: case.k, x_stride: case.k + GAP, out_stride: self.width + GAP,
            ],
        );
    }

    /// The chunks of the product, and their number.
    pub fn partial(&mut self, variant: &Variant<'_>, case: &Case) -> (u64, usize) {
        let rows = self.rows.len();
        let chunks = case.k.div_ceil(variant.constant("CHUNK"));
        let partial = self.gpu.empty("partial", 4 * chunks * rows * case.n);
        let grid = [
            case.n.div_ceil(variant.constant("BLOCK_N")),
            chunks,
            rows.div_ceil(variant.constant("BLOCK_T")),
        ];
        self.gpu.launch(
            variant,
            &grid,
            args![
                partial, x: self.x, w: self.w, num_rows: rows, num_n: case.n, num_k: case.k,
                x_stride: case.k + GAP,
            ],
        );
        (partial, chunks)
    }

    pub fn fold(&mut self, variant: &Variant<'_>, case: &Case, (partial, chunks): (u64, usize)) {
        let grid = [self.rows.len(), case.n.div_ceil(variant.constant("BLOCK_N"))];
        self.gpu.launch(
            variant,
            &grid,
            args![
                out: self.out, partial, bias: self.bias, num_rows: self.rows.len(), num_n: case.n,
                num_chunks: chunks, out_stride: case.n + GAP, has_bias: usize::from(case.bias),
                accumulate: usize::from(case.accumulate),
            ],
        );
    }

    pub fn fold_gated(
        &mut self,
        variant: &Variant<'_>,
        case: &Case,
        (partial, chunks): (u64, usize),
    ) {
        let grid = [self.rows.len(), self.width.div_ceil(variant.constant("BLOCK_N"))];
        self.gpu.launch(variant, &grid, args![
            out: self.out, partial, num_rows: self.rows.len(), num_n: case.n, num_chunks: chunks,
            out_stride: self.width + GAP,
        ]);
    }
}

fn bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter().map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
}

/// A sum of k products in f32, in any order, is within (k + 1) · 2⁻²⁴ · Σ|x w|.
fn assert_linear(case: &Case, element: Element, got: &[Vec<f32>]) {
    let (x, w, bias, before) = (case.x(element), case.w(element), case.bias(), case.before());
    for (row, got) in got.iter().enumerate() {
        for (column, &got) in got.iter().enumerate() {
            let (mut want, mut size) = case.product(&x, &w, row, column);
            let added =
                [(case.bias, bias[column]), (case.accumulate, before[row * case.n + column])];
            for (_, value) in added.into_iter().filter(|(used, _)| *used) {
                want += f64::from(value);
                size += f64::from(value).abs();
            }
            let bound = (case.k + 4) as f64 * 2f64.powi(-24) * size;
            let off = (f64::from(got) - want).abs();
            assert!(off <= bound, "{case:?} {element}, ({row}, {column}): {got} is not {want}");
        }
    }
}

fn assert_gated(case: &Case, element: Element, got: &[Vec<f32>]) {
    let (x, w) = (case.x(element), case.w(element));
    let sum_error = (case.k + 4) as f64 * 2f64.powi(-24);
    for (row, got) in got.iter().enumerate() {
        for (column, &got) in got.iter().enumerate() {
            let (gate, gate_size) = case.product(&x, &w, row, column);
            let (up, up_size) = case.product(&x, &w, row, case.n / 2 + column);
            let silu = gate / (1.0 + (-gate).exp());
            let want = silu * up;
            // |silu′| ≤ 1.1; the exponential, the division and the product are in f32.
            let bound = sum_error * (1.1 * gate_size * up.abs() + silu.abs() * up_size)
                + (2f64.powi(-18) + element.ulp()) * want.abs()
                + 1e-7;
            let off = (f64::from(got) - want).abs();
            assert!(off <= bound, "{case:?} {element}, ({row}, {column}): {got} is not {want}");
        }
    }
}

/// All ways to the plain product agree, in bits, and each row is the same alone.
fn check_linear(kernels: &Kernels, case: &Case) {
    let fold = kernels.only("fold_partials");
    for gemm in kernels.variants("gemm") {
        let element = gemm.element();
        let all: Vec<usize> = (0..case.rows).collect();
        let whole = |order| {
            let mut data = Data::new(case, element, &all, false, order);
            data.gemm(&gemm, case);
            data.result()
        };
        let want = whole(CtaOrder::Forward);
        assert_linear(case, element, &want);
        assert_eq!(bits(&whole(CtaOrder::Shuffled(case.seed))), bits(&want));
        let partials = kernels.variants("gemm_partial");
        for partial in partials.iter().filter(|v| v.element() == element) {
            for rows in [&all[..], &all[case.rows - 1..]] {
                let mut data = Data::new(case, element, rows, false, CtaOrder::Reverse);
                let chunks = data.partial(partial, case);
                data.fold(&fold, case, chunks);
                let want = bits(&want[rows[0]..]);
                assert_eq!(bits(&data.result()), want, "{case:?} {}", partial.name());
            }
        }
    }
}

fn check_gated(kernels: &Kernels, case: &Case) {
    for gemm in kernels.variants("gemm_silu_mul") {
        let element = gemm.element();
        let all: Vec<usize> = (0..case.rows).collect();
        let mut data = Data::new(case, element, &all, true, CtaOrder::Shuffled(case.seed));
        data.gated(&gemm, case);
        let want = data.result();
        assert_gated(case, element, &want);
        let fold = kernels.of("fold_silu_mul", element);
        let partials = kernels.variants("gemm_partial");
        for partial in partials.iter().filter(|v| v.element() == element) {
            for rows in [&all[..], &all[case.rows - 1..]] {
                let mut data = Data::new(case, element, rows, true, CtaOrder::Reverse);
                let chunks = data.partial(partial, case);
                data.fold_gated(&fold, case, chunks);
                let want = bits(&want[rows[0]..]);
                assert_eq!(bits(&data.result()), want, "{case:?} {}", partial.name());
            }
        }
    }
}

#[test]
fn products_of_several_chunks_and_tiles() {
    let kernels = Kernels::load();
    let case = Case { rows: 131, n: 144, k: 1104, bias: true, accumulate: true, seed: 1 };
    check_linear(&kernels, &case);
    check_gated(&kernels, &Case { rows: 3, n: 288, ..case });
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 6,
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn any_shape(
        rows in 1..40usize,
        n in 1..7usize,
        k in 1..40usize,
        bias in any::<bool>(),
        accumulate in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let kernels = Kernels::load();
        let case = Case { rows, n: 16 * n, k: 16 * k, bias, accumulate, seed };
        check_linear(&kernels, &case);
        check_gated(&kernels, &Case { n: 32 * n, ..case });
    }
}
