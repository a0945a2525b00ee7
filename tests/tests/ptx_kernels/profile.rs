//! What every variant executes and moves on one small problem: the last table of
//! `kernels-triton/README.md`, which `make kernels-profile` writes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

use quire_engine::sampling::{SamplingBatch, SamplingRow, SeenToken};
use quire_ptxsim::{CtaOrder, Profile};
use quire_tests::ptx::{Kernels, Launched, TARGET, recorded};
use quire_tests::rng::Rng;
use quire_tests::roofline::{self, Work};
use serde_json::json;

use crate::attention::{Attention, Seq, Step};
use crate::{activation, attention, gemm, memory, moe, norm_rope, sampling};

const README: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../kernels-triton/README.md");
const MARKERS: [&str; 2] =
    ["<!-- profile: written by make kernels-profile -->\n", "<!-- end of profile -->\n"];
/// With this variable set the table is written instead of compared.
const WRITE: &str = "QUIRE_WRITE_PROFILE";

/// A kernel that moves more than this times the least is marked, and `roofline.yaml` says why.
const MUCH: f64 = 1.5;
const SECTOR_BYTES: u64 = 32;

/// Names and values, in a formula's words.
type Problem<'a> = &'a [(&'a str, usize)];

/// The profile of one variant.
struct Row {
    kernel: String,
    profile: Profile,
    /// The sizes that the least bytes depend on.
    problem: Vec<(String, usize)>,
    least_bytes: f64,
}

impl Row {
    fn new(launched: Launched, work: &Work, problem: Problem<'_>) -> Row {
        let (kernel, mut used) = (launched.kernel, Vec::new());
        let least_bytes = work.bytes(|name| {
            if name == "e" {
                return launched.element_bytes as f64;
            }
            let size = problem.iter().find(|(known, _)| *known == name);
            let value = size.unwrap_or_else(|| panic!("{kernel}: the problem has no {name}")).1;
            if used.iter().all(|(known, _)| known != name) {
                used.push((name.to_owned(), value));
            }
            value as f64
        });
        Row { kernel, profile: launched.profile, problem: used, least_bytes }
    }

    /// Bytes that the blocks fetch and write.
    fn moved_bytes(&self) -> u64 {
        let global = self.profile.global;
        SECTOR_BYTES * (global.read_footprint + global.written_footprint)
    }

    /// Bytes that their instructions ask for.
    fn asked_bytes(&self) -> u64 {
        let global = self.profile.global;
        SECTOR_BYTES * (global.read_sectors + global.written_sectors)
    }

    fn ratio(&self) -> f64 {
        self.moved_bytes() as f64 / self.least_bytes
    }

    /// The table's cells after the name.
    fn cells(&self) -> Vec<String> {
        let problem = self.problem.iter().map(|(name, value)| format!("{name} {value}"));
        let total = self.profile.warp_instructions();
        let mut cells = vec![problem.collect::<Vec<_>>().join(", "), total.to_string()];
        let mut groups = [0; GROUPS.len()];
        for (opcode, count) in &self.profile.instructions {
            groups[group(opcode)] += count;
        }
        cells.extend(groups.iter().map(|n| format!("{:.0}", 100.0 * *n as f64 / total as f64)));
        let ratio = format!("{:.2}", self.ratio());
        cells.extend([
            self.moved_bytes().to_string(),
            format!("{:.1}", self.asked_bytes() as f64 / self.moved_bytes() as f64),
            format!("{:.0}", self.least_bytes),
            if self.ratio() > MUCH { format!("**{ratio}**") } else { ratio },
            self.profile.flops.to_string(),
            format!("{:.2}", self.profile.flops as f64 / self.moved_bytes() as f64),
        ]);
        cells
    }
}

/// Columns of the instruction mix.
const GROUPS: [&str; 6] = ["tensor", "float", "integer", "global", "shared", "other"];

/// Index into [`GROUPS`].
fn group(opcode: &str) -> usize {
    let starts = |words: &[&str]| words.iter().any(|word| opcode.starts_with(word));
    let arithmetic = starts(&[
        "abs", "add", "and.b", "bfe", "div", "ex2", "fma", "mad", "max", "min", "mul", "neg",
        "not.b", "or.b", "prmt", "shl", "shr", "sqrt", "sub", "xor",
    ]);
    match opcode {
        _ if starts(&["mma"]) => 0,
        _ if arithmetic && (opcode.ends_with(".f32") || opcode.ends_with(".f64")) => 1,
        _ if arithmetic => 2,
        _ if starts(&["ld.global", "st.global", "cp.async.ca", "cp.async.cg"]) => 3,
        _ if starts(&["ld.shared", "st.shared", "ldmatrix"]) => 4,
        _ => 5,
    }
}

/// The rows so far, by variant.
struct Report {
    works: BTreeMap<String, Work>,
    rows: BTreeMap<String, Row>,
}

impl Report {
    /// Profiles every variant.
    fn measure(kernels: &Kernels) -> Report {
        let mut report = Report { works: roofline::load(), rows: BTreeMap::new() };
        report.attention(kernels);
        report.gemm(kernels);
        report.passes(kernels);
        report.memory(kernels);
        report.sampling(kernels);
        report.moe(kernels);
        report
    }

    /// Adds what `work` launches; of several launches of a variant, the one that moves most.
    fn run(&mut self, problem: Problem<'_>, work: impl FnOnce()) {
        for launched in recorded(work) {
            let known = self.works.get(&launched.kernel);
            let known = known.unwrap_or_else(|| panic!("roofline.yaml lacks {}", launched.kernel));
            let name = launched.variant.clone();
            let row = Row::new(launched, known, problem);
            let more = self.rows.get(&name).is_none_or(|r| r.moved_bytes() < row.moved_bytes());
            if more {
                self.rows.insert(name, row);
            }
        }
    }

    fn attention(&mut self, kernels: &Kernels) {
        for a in Attention::all(kernels) {
            let (head_dim, group, kv_heads) = (a.head_dims()[0], 4, 2);
            let case = attention::Case { kv_heads, group, head_dim, ..attention::Case::PLAIN };
            let step = |seqs: &[Seq]| Step::undefined_elsewhere(case, a.element(), seqs);
            let sizes = [("Hq", group * kv_heads), ("Hkv", kv_heads), ("D", head_dim)];
            let rows = 128;
            self.run(&[&[("T", rows)][..], &sizes].concat(), || {
                step(&[Seq { computed: 0, rows, id: 1 }]).prefill(&a.prefill, |_| true);
            });
            let keys = 4 * a.decode.constant("SPLIT");
            self.run(&[&[("S", 2), ("keys", keys)][..], &sizes].concat(), || {
                let seqs = [1, 2].map(|id| Seq { computed: keys - 1, rows: 1, id });
                step(&seqs).decode(&a.decode, &a.fold, 4);
            });
        }
    }

    fn gemm(&mut self, kernels: &Kernels) {
        let case =
            |rows| gemm::Case { rows, n: 256, k: 512, bias: false, accumulate: false, seed: 1 };
        let data = |case: &gemm::Case, element, gated| {
            let rows: Vec<usize> = (0..case.rows).collect();
            gemm::Data::new(case, element, &rows, gated, CtaOrder::Forward)
        };
        let problem = |case: &gemm::Case| [("M", case.rows), ("N", case.n), ("K", case.k)];
        let many = case(256);
        for v in kernels.variants("gemm") {
            self.run(&problem(&many), || data(&many, v.element(), false).gemm(&v, &many));
        }
        for v in kernels.variants("gemm_silu_mul") {
            self.run(&problem(&many), || data(&many, v.element(), true).gated(&v, &many));
        }
        for v in kernels.variants("gemm_partial") {
            let few = gemm::Case { k: 1024, ..case(v.constant("BLOCK_T")) };
            self.run(&problem(&few), || {
                let mut plain = data(&few, v.element(), false);
                let chunks = plain.partial(&v, &few);
                plain.fold(&kernels.only("fold_partials"), &few, chunks);
                let mut gated = data(&few, v.element(), true);
                let chunks = gated.partial(&v, &few);
                gated.fold_gated(&kernels.of("fold_silu_mul", v.element()), &few, chunks);
            });
        }
    }

    /// Norms, rotary embedding, activation.
    fn passes(&mut self, kernels: &Kernels) {
        let (rows, width) = (8, 2048);
        let floats = |seed, count| Rng::new(seed).floats(count, 2.0);
        let (x, delta, weight) =
            (floats(1, rows * width), floats(2, rows * width), floats(3, width));
        for v in kernels.variants("rms_norm") {
            self.run(&[("R", rows), ("H", width)], || {
                norm_rope::rms_norm(&v, &x, &weight, CtaOrder::Forward);
            });
        }
        for v in kernels.variants("add_rms_norm") {
            self.run(&[("R", rows), ("H", width)], || {
                norm_rope::add_rms_norm(&v, (&x, &delta), &weight);
            });
        }
        // Every third token of a case has no slot.
        let tokens = [0, 1, 3, 4, 6, 7, 9, 10];
        for v in kernels.variants("qk_norm_rope_write_kv") {
            let head_dim = v.constant("BLOCK_D");
            let case = norm_rope::Rope {
                tokens: 12,
                kv_heads: 2,
                group: 4,
                head_dim,
                rot_dim: head_dim,
                interleaved: false,
                has_norm: true,
                block_shift: 4,
                far: false,
                seed: 1,
            };
            let problem = [("T", tokens.len()), ("Hq", 8), ("Hkv", 2), ("D", head_dim)];
            self.run(&problem, || {
                norm_rope::run_rope(&v, &case, &tokens, CtaOrder::Forward);
            });
        }
        for v in kernels.variants("silu_mul") {
            let gate_up = floats(4, rows * 2 * width);
            self.run(&[("R", rows), ("width", width)], || {
                activation::run(&v, &gate_up, width, CtaOrder::Forward);
            });
        }
    }

    fn memory(&mut self, kernels: &Kernels) {
        let (rows, width) = (8usize, 2048);
        for v in kernels.variants("embed") {
            let (table, ids) =
                (vec![1.0; rows * width], (0..rows as u32).rev().collect::<Vec<_>>());
            self.run(&[("T", rows), ("H", width)], || {
                memory::embed(&v, &table, &ids, width, CtaOrder::Forward);
            });
        }
        let (table, picks) = (vec![1; rows * width], (0..rows as i32).rev().collect::<Vec<_>>());
        self.run(&[("R", rows), ("H", width)], || {
            memory::gather_rows(
                &kernels.only("gather_rows"),
                &table,
                &picks,
                width,
                CtaOrder::Forward,
            );
        });
        self.run(
            &[("P", 3), ("blocks", 2), ("layers", 3), ("block_bytes", 4 * 1040)],
            memory::copied_and_swapped_blocks,
        );
        self.run(&[("patches", 300)], || memory::patch_tokens(300, CtaOrder::Forward));
    }

    fn sampling(&mut self, kernels: &Kernels) {
        let (vocab, seen, max_top) = (16_384, 256, 4);
        let rows = (0..4).map(|i| SamplingRow {
            top_k: 50,
            top_p: 0.9,
            min_p: 0.01,
            repetition_penalty: 1.1,
            frequency_penalty: 0.1,
            presence_penalty: 0.1,
            logprobs: Some(max_top),
            seen: seen * i..seen * (i + 1),
            ..sampling::row(i)
        });
        let rows: Vec<SamplingRow> = rows.collect();
        // Tokens that are some way apart.
        let token = |i: usize| (i % seen * 61) as u32;
        let seen_tokens =
            (0..seen * rows.len()).map(|i| SeenToken { token: token(i), output_count: 1 });
        let batch = SamplingBatch {
            seen: seen_tokens.collect(),
            vocab_limit: vocab,
            rows,
            ..SamplingBatch::default()
        };
        let logits = sampling::logits(batch.rows.len(), vocab, vocab, 1);
        let problem = [
            ("R", batch.rows.len()),
            ("vocab", vocab),
            ("seen", seen),
            ("max_top", max_top as usize),
        ];
        self.run(&problem, || {
            sampling::sample(kernels, &batch, &logits, CtaOrder::Forward);
        });
    }

    fn moe(&mut self, kernels: &Kernels) {
        let (experts, top_k, tokens, n, k) = (16, 4, 64, 128, 256);
        let slots = tokens * top_k;
        let mut rng = Rng::new(1);
        let expert: Vec<i32> = (0..slots).map(|_| rng.below(experts) as i32).collect();
        let (x, w) = (rng.floats(tokens * k, 2.0), rng.floats(experts * n * k, 1.0));
        for v in kernels.variants("grouped_gemm") {
            let problem = [
                ("slots", slots),
                ("experts", experts),
                ("top_k", top_k),
                ("N", n),
                ("K", k),
                ("block_m", v.constant("BLOCK_M")),
            ];
            self.run(&problem, || {
                moe::grouped(kernels, &v, (&x, &w), &expert, (experts, top_k, k));
            });
        }
        let routing = moe::Routing {
            experts: 128,
            top_k: 8,
            sigmoid: false,
            bias: false,
            renormalise: true,
            scale: 1.0,
        };
        let logits = rng.floats(tokens * routing.experts, 4.0);
        self.run(&[("T", tokens), ("experts", routing.experts), ("top_k", routing.top_k)], || {
            moe::route(&mut Default::default(), &kernels.only("route"), &routing, &logits, &[0.0]);
        });
        self.run(&[("T", 3), ("top_k", 4), ("H", 1040)], moe::combined_contributions);
    }

    /// The part of README.md between the markers.
    fn markdown(&self) -> String {
        let names = ["variant", "problem", "warp instructions"].into_iter();
        let names = names.chain(GROUPS);
        let names =
            names.chain(["moved", "asked/moved", "least", "moved/least", "FLOPs", "FLOPs/byte"]);
        let names: Vec<&str> = names.collect();
        let mut text = format!("\n| {} |\n| --- | --- |", names.join(" | "));
        text += &" ---: |".repeat(names.len() - 2);
        text += "\n";
        for (name, row) in &self.rows {
            let twin = self.rows.get(&name.replace("_fp16", "_bf16"));
            let same =
                name.contains("_fp16") && twin.is_some_and(|twin| twin.cells() == row.cells());
            if !same {
                writeln!(text, "| `{name}` | {} |", row.cells().join(" | ")).expect("a string");
            }
        }
        text += "\nWhy more than 1.5 times the least is moved:\n\n";
        for (kernel, work) in &self.works {
            if let Some(why) = &work.more {
                writeln!(text, "- `{kernel}`: {why}").expect("a string");
            }
        }
        text + "\n"
    }

    fn json(&self) -> serde_json::Value {
        let traffic = |t: quire_ptxsim::Traffic| {
            json!({
                "read_bytes": t.read_bytes, "written_bytes": t.written_bytes,
                "read_sectors": t.read_sectors, "written_sectors": t.written_sectors,
                "read_footprint": t.read_footprint, "written_footprint": t.written_footprint,
            })
        };
        let one = |(name, row): (&String, &Row)| {
            let problem: BTreeMap<_, _> = row.problem.iter().cloned().collect();
            json!({
                "variant": name, "target": TARGET, "kernel": row.kernel, "problem": problem,
                "blocks": row.profile.blocks, "flops": row.profile.flops,
                "instructions": row.profile.instructions,
                "global": traffic(row.profile.global), "shared": traffic(row.profile.shared),
                "moved_bytes": row.moved_bytes(), "least_bytes": row.least_bytes,
                "over": row.ratio() > MUCH,
            })
        };
        self.rows.iter().map(one).collect()
    }
}

/// Every variant is profiled, what moves too much is explained, and README.md has the table.
#[test]
fn profile() {
    let kernels = Kernels::load();
    let report = Report::measure(&kernels);
    let variants = kernels.iter().flat_map(|kernel| &kernel.variants);
    let shipped = variants.filter(|v| v.target == TARGET).map(|v| v.name.as_str());
    let without: Vec<_> = shipped.filter(|name| !report.rows.contains_key(*name)).collect();
    assert!(without.is_empty(), "no problem in profile.rs launches {without:?}");

    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    fs::write(folder.join("kernels-profile.md"), report.markdown()).expect("the target folder");
    let json = format!("{:#}\n", report.json());
    fs::write(folder.join("kernels-profile.json"), json).expect("the target folder");

    let over = report.rows.values().filter(|row| row.ratio() > MUCH);
    let over: BTreeSet<&str> = over.map(|row| row.kernel.as_str()).collect();
    let explained = report.works.iter().filter(|(_, work)| work.more.is_some());
    let explained: BTreeSet<&str> = explained.map(|(kernel, _)| kernel.as_str()).collect();
    assert_eq!(over, explained, "kernels that move much (left), with a `more` in roofline.yaml");

    let text = fs::read_to_string(README).expect("README.md");
    let (head, rest) = text.split_once(MARKERS[0]).expect("the first marker in README.md");
    let (table, tail) = rest.split_once(MARKERS[1]).expect("the second marker in README.md");
    if env::var_os(WRITE).is_some() {
        let [first, last] = MARKERS;
        let new = [head, first, &report.markdown(), last, tail].concat();
        fs::write(README, new).expect("README.md can be written");
    } else {
        let hint = "the profile in kernels-triton/README.md is out of date: `make kernels-profile`";
        assert!(table == report.markdown(), "{hint}");
    }
}
