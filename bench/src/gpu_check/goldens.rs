//! Goldens: logits recorded from Hugging Face transformers, on the device in several ways.

use super::Run;
use anyhow::{Context, ensure};
use quire_engine::backend::CudaOptions;
use quire_engine::config::PreemptionMode;
use quire_engine::{DType, EngineConfig};
use quire_model_zoo::verify::{Golden, VerifyReport, verify};
use quire_model_zoo::{BackendKind, LoadOptions, ModelFiles};
use std::path::{Path, PathBuf};

/// Tokens of the longest sequence: a prompt of 97 and 24 more.
const LONGEST: usize = 121;
/// Bytes for swapped-out blocks.
const SWAP_BYTES: usize = 4 << 20;

/// What becomes of sequences without room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    /// There is room for all.
    Ample,
    /// They are computed anew.
    Recompute,
    /// They wait on the host.
    Swap,
}

/// A way to run a golden.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    graphs: bool,
    block_size: usize,
    /// Tokens of a step.
    budget: usize,
    room: Room,
}

const fn way(graphs: bool, block_size: usize, budget: usize, room: Room) -> Way {
    Way { graphs, block_size, budget, room }
}

/// Every value of every setting, most delicate first.
pub(super) const WAYS: [Way; 6] = [
    way(true, 32, 16, Room::Swap),
    way(true, 16, 512, Room::Ample),
    way(false, 32, 512, Room::Recompute),
    way(false, 16, 64, Room::Swap),
    way(true, 16, 64, Room::Recompute),
    way(false, 32, 16, Room::Ample),
];

/// The folders of goldens that a run takes, in the order of their names.
pub(super) fn folders(run: &Run) -> anyhow::Result<Vec<PathBuf>> {
    let goldens = run.data.join("goldens");
    let entries = std::fs::read_dir(&goldens).with_context(|| goldens.display().to_string())?;
    let mut folders: Vec<PathBuf> =
        entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    folders.retain(|folder| folder.is_dir());
    folders.sort();
    folders.truncate(run.sizes.goldens);
    ensure!(!folders.is_empty(), "{} holds no golden", goldens.display());
    Ok(folders)
}

impl Way {
    /// Nothing is preempted. Of models with windows, less room may be enough for all.
    pub fn is_ample(&self) -> bool {
        self.room == Room::Ample
    }

    fn options(&self, dtype: DType) -> LoadOptions {
        // Sequences are admitted that have no room to grow.
        let tight = if self.block_size == 16 { 16 } else { 9 };
        let (num_blocks, preemption, swap_bytes) = match self.room {
            Room::Ample => (16 * LONGEST.div_ceil(self.block_size), PreemptionMode::Recompute, 0),
            Room::Recompute => (tight, PreemptionMode::Recompute, 0),
            Room::Swap => (tight, PreemptionMode::Swap, SWAP_BYTES),
        };
        let engine = EngineConfig {
            block_size: self.block_size,
            max_num_seqs: 16,
            max_num_batched_tokens: Some(self.budget),
            max_model_len: Some(LONGEST),
            num_blocks: Some(num_blocks),
            swap_bytes,
            preemption,
            ..Default::default()
        };
        let cuda = CudaOptions { enforce_eager: !self.graphs, ..Default::default() };
        let backend = BackendKind::Cuda;
        LoadOptions { backend, dtype: Some(dtype), cuda, engine, ..Default::default() }
    }
}

/// Checks a golden in one way: logits within their bounds, decode with the bits of prefill.
pub(super) fn check(run: &mut Run, folder: &Path, way: &Way, dtype: DType) {
    let golden = folder.file_name().unwrap_or_default().display();
    let Way { graphs, block_size, budget, room } = way;
    let name = format!(
        "golden {golden}, {dtype}, graphs {graphs}, blocks of {block_size}, {budget} tokens a \
         step, room {room:?}"
    );
    run.check(&name, || {
        let files = ModelFiles::open(folder)?;
        let golden = Golden::open(&Golden::in_folder(folder)?, files.info().vocab_size)?;
        let mut engine = files.load(&way.options(dtype), &mut |_| ())?;
        let report = verify(&mut engine, &golden)?;
        ensure!(report.passed, "{}", failures(&report));
        let (recomputed, swapped) = (report.num_preempted_recompute, report.num_preempted_swap);
        let went = match room {
            Room::Ample => recomputed + swapped == 0,
            Room::Recompute => recomputed > 0,
            Room::Swap => swapped > 0,
        };
        ensure!(went, "{recomputed} preempted to recompute, {swapped} to swap");
        Ok(())
    });
}

/// What is wrong with each sequence that failed.
fn failures(report: &VerifyReport) -> String {
    let failed = report.sequences.iter().enumerate().filter(|(_, sequence)| !sequence.passed);
    let lines: Vec<String> = failed.map(|(i, s)| format!("sequence {i}: {s:?}")).collect();
    lines.join("; ")
}
