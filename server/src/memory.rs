//! Where the memory goes, as people and programs read it.

use crate::size::format_size;
use quire_engine::memory::MemoryPlan;
use quire_model_zoo::{BackendKind, LoadOptions};
use serde::Serialize;
use std::fmt::Write;

/// The name of a part of a plan.
const SWAP_SPACE: &str = "swap space";

/// A plan and its sum, for JSON; in bytes.
#[derive(Serialize)]
pub struct PlanJson {
    #[serde(flatten)]
    plan: MemoryPlan,
    needed: usize,
}

impl PlanJson {
    /// Whether the memory goes where it goes in `other`; what there is of it may differ.
    pub fn has_parts_of(&self, other: &PlanJson) -> bool {
        self.plan.parts() == other.plan.parts()
    }
}

impl From<MemoryPlan> for PlanJson {
    fn from(plan: MemoryPlan) -> Self {
        PlanJson { plan, needed: plan.needed() }
    }
}

/// Page-locked host memory for swapped-out blocks, in bytes, where all else that is planned is on a
/// device.
pub fn host_swap(options: &LoadOptions) -> Option<usize> {
    (options.backend == BackendKind::Cuda).then_some(options.engine.swap_bytes)
}

/// A line for each part, then their sum and what there is. With a `host_swap` the plan is that of
/// a device.
pub fn table(plan: &MemoryPlan, host_swap: Option<usize>) -> String {
    let sums = [
        ("needed", plan.needed()),
        ("budget", plan.budget),
        ("available", plan.available),
        ("total", plan.total),
    ];
    let is_planned = |part: &(&str, usize)| host_swap.is_none() || part.0 != SWAP_SPACE;
    let planned: Vec<_> = plan.parts().into_iter().filter(is_planned).chain(sums).collect();
    let apart: Vec<_> = host_swap.map(|bytes| (SWAP_SPACE, bytes)).into_iter().collect();
    let tables = match host_swap {
        None => vec![("memory", planned)],
        Some(_) => vec![("memory of the device", planned), ("page-locked host memory", apart)],
    };
    let sizes = tables.iter().flat_map(|table| &table.1).map(|row| format_size(row.1).len());
    let width = sizes.max().unwrap_or(0);
    let mut text = String::new();
    for (heading, rows) in tables {
        let _ = writeln!(text, "{heading}");
        for (name, bytes) in rows {
            let _ = writeln!(text, "  {name:10}  {:>width$}", format_size(bytes));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: MemoryPlan = MemoryPlan {
        total: 64 << 30,
        available: 40 << 30,
        budget: 3 << 29,
        weights: 1 << 30,
        workspace: 3 << 19,
        logits: 100 << 10,
        sampling: 0,
        other: 12,
        kv_cache: 200 << 20,
        swap: 0,
    };

    #[test]
    fn sizes_are_aligned() {
        let expected = "\
memory
  weights       1.0 GiB
  workspace     1.5 MiB
  logits      100.0 KiB
  sampling      0 bytes
  other        12 bytes
  KV cache    200.0 MiB
  swap space    0 bytes
  needed        1.2 GiB
  budget        1.5 GiB
  available    40.0 GiB
  total        64.0 GiB
";
        assert_eq!(table(&PLAN, None), expected);
    }

    #[test]
    fn swap_space_is_apart_from_the_memory_of_a_device() {
        let expected = "\
memory of the device
  weights       1.0 GiB
  workspace     1.5 MiB
  logits      100.0 KiB
  sampling      0 bytes
  other        12 bytes
  KV cache    200.0 MiB
  needed        1.2 GiB
  budget        1.5 GiB
  available    40.0 GiB
  total        64.0 GiB
page-locked host memory
  swap space    2.0 MiB
";
        assert_eq!(table(&PLAN, Some(2 << 20)), expected);
        let mut options = LoadOptions::default();
        options.engine.swap_bytes = 7;
        assert_eq!(host_swap(&options), None);
        options.backend = BackendKind::Cuda;
        assert_eq!(host_swap(&options), Some(7));
    }

    #[test]
    fn json_has_exact_bytes_and_the_sum() {
        let json = serde_json::to_value(PlanJson::from(PLAN)).unwrap();
        assert_eq!(json["kv_cache"], 200 << 20);
        assert_eq!(json["needed"], (1 << 30) + (3 << 19) + (100 << 10) + 12 + (200 << 20));
        assert_eq!(json.as_object().unwrap().len(), 11);
    }

    #[test]
    fn plans_with_the_same_parts_may_have_another_budget() {
        let same = |other: MemoryPlan| PlanJson::from(PLAN).has_parts_of(&other.into());
        assert!(same(MemoryPlan { available: 1, budget: 2, ..PLAN }));
        assert!(!same(MemoryPlan { swap: 1, ..PLAN }));
    }
}
