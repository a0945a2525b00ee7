//! Where the memory goes, as people and programs read it.

use crate::size::format_size;
use quire_engine::memory::MemoryPlan;
use serde::Serialize;
use std::fmt::Write;

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

/// A line for each part, then their sum and what there is.
pub fn table(plan: &MemoryPlan) -> String {
    let sums = [
        ("needed", plan.needed()),
        ("budget", plan.budget),
        ("available", plan.available),
        ("total", plan.total),
    ];
    let rows: Vec<_> = plan.parts().into_iter().chain(sums).collect();
    let sizes: Vec<String> = rows.iter().map(|row| format_size(row.1)).collect();
    let width = sizes.iter().map(String::len).max().unwrap_or(0);
    let mut text = "memory\n".to_owned();
    for ((name, _), size) in rows.iter().zip(sizes) {
        let _ = writeln!(text, "  {name:10}  {size:>width$}");
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
        assert_eq!(table(&PLAN), expected);
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
