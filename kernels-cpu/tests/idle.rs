//! A pool without work takes no time of the processor. Alone in its program, whose time is measured.

#![cfg(target_os = "linux")]

use quire_kernels_cpu::{Ctx, Isa, usable_cores};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Time of the processor that this process took, in hundredths of a second.
fn ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("Linux");
    // What follows the name, which may hold anything: the third field, and so on.
    let fields: Vec<&str> = stat.rsplit_once(')').expect("a name").1.split_whitespace().collect();
    let field = |number: usize| fields[number - 3].parse::<u64>().expect("a number");
    field(14) + field(15)
}

#[test]
fn an_idle_pool_sleeps() {
    for threads in [usable_cores().max(2), 2 * usable_cores()] {
        let ctx = Ctx::new(Isa::Portable, threads).expect("threads");
        let sum = AtomicUsize::new(0);
        ctx.pool.for_each(1000, |_, item| {
            sum.fetch_add(item, Relaxed);
        });
        assert_eq!(sum.into_inner(), 499_500);
        let before = ticks();
        std::thread::sleep(Duration::from_millis(400));
        // One thread that spins would take 40.
        let taken = ticks() - before;
        assert!(taken < 10, "{threads} idle threads took {taken} ticks of 40");
    }
}
