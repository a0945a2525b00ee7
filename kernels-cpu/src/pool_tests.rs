//! Tests of the worker pool.

use super::*;
use std::sync::atomic::AtomicU32;
use std::thread::{scope, sleep};

/// Waits for `ready`, which something else brings about.
fn until(ready: impl Fn() -> bool) {
    let start = Instant::now();
    while !ready() {
        assert!(start.elapsed() < Duration::from_secs(60), "it does not happen");
        std::thread::yield_now();
    }
}

#[test]
fn each_item_is_done_once_whatever_the_numbers() {
    for threads in [1, 2, 3, 5] {
        let pool = Pool::new(threads).unwrap();
        assert_eq!(pool.threads(), threads);
        for items in (0..300).chain([1000]) {
            let seen: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
            pool.for_each(items, |worker, item| {
                assert!(worker < threads);
                seen[item].fetch_add(1, Relaxed);
            });
            let once = seen.iter().all(|n| n.load(Relaxed) == 1);
            assert!(once, "{threads} threads, {items} items");
        }
    }
}

#[test]
fn a_worker_has_one_item_at_a_time_and_all_take_part() {
    let pool = Pool::new(3).unwrap();
    let busy: [AtomicBool; 3] = Default::default();
    let met = AtomicUsize::new(0);
    pool.for_each(3, |worker, _| {
        assert!(!busy[worker].swap(true, SeqCst));
        met.fetch_add(1, SeqCst);
        // Three items wait for one another, so three workers must have come.
        until(|| met.load(SeqCst) == 3);
        busy[worker].store(false, SeqCst);
    });
}

#[test]
fn workers_that_do_not_come_hold_up_nobody() {
    // It says it has three workers; but they never were started.
    let shared = Arc::clone(&Pool::new(1).unwrap().shared);
    let pool = Pool { shared, threads: 3, handles: Vec::new(), turn: Mutex::new(()) };
    let sum = AtomicUsize::new(0);
    for _ in 0..10 {
        pool.for_each(100, |worker, item| {
            assert_eq!(worker, 0);
            sum.fetch_add(item, Relaxed);
        });
    }
    assert_eq!(sum.into_inner(), 10 * 4950);
}

#[test]
fn a_worker_joins_a_job_that_is_open_and_no_other() {
    let shared = Arc::clone(&Pool::new(1).unwrap().shared);
    let calls = AtomicUsize::new(0);
    let job = |worker| {
        assert_eq!(worker, 7);
        assert_eq!(shared.state().inside(), 1);
        calls.fetch_add(1, Relaxed);
    };
    assert_eq!((shared.join(7), calls.load(Relaxed)), (0, 0), "there was no job yet");
    for number in 1..4 {
        // SAFETY: the last job is closed, nobody is inside, and `job` outlives the loop.
        unsafe { shared.open(&job, 1) };
        assert_eq!(shared.join(7), number);
        shared.close();
        assert_eq!(calls.load(Relaxed), number as usize);
        assert_eq!(shared.join(7), number, "the job is closed");
        assert_eq!(calls.load(Relaxed), number as usize);
    }
}

#[test]
fn the_count_of_jobs_wraps_around() {
    let pool = Pool::new(2).unwrap();
    let last = u64::MAX / State::JOB;
    pool.shared.state.store((last - 1) * State::JOB, SeqCst);
    for _ in 0..3 {
        let met = AtomicUsize::new(0);
        pool.for_each(2, |_, _| {
            met.fetch_add(1, SeqCst);
            until(|| met.load(SeqCst) == 2);
        });
    }
    assert_eq!(pool.shared.state().job(), 1);
}

#[test]
fn the_caller_waits_for_those_inside() {
    let pool = Pool::new(2).unwrap();
    for pause in [Duration::ZERO, SPIN * 20] {
        let done = AtomicU32::new(0);
        let met = AtomicUsize::new(0);
        pool.for_each(2, |worker, _| {
            met.fetch_add(1, SeqCst);
            until(|| met.load(SeqCst) == 2);
            if worker == 1 {
                sleep(pause);
            }
            done.fetch_add(1, SeqCst);
        });
        assert_eq!(done.into_inner(), 2);
    }
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
    let pool = Pool::new(2).unwrap();
    for bad in 0..2 {
        let met = AtomicUsize::new(0);
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.for_each(2, |worker, _| {
                met.fetch_add(1, SeqCst);
                until(|| met.load(SeqCst) >= 2);
                assert!(worker != bad, "worker {worker} fails");
                met.fetch_add(1, SeqCst);
            });
        }));
        let message = *result.unwrap_err().downcast::<String>().unwrap();
        assert_eq!(message, format!("worker {bad} fails"));
        assert_eq!(met.load(SeqCst), 3);
        pool.for_each(5, |_, _| {
            met.fetch_add(1, SeqCst);
        });
        assert_eq!(met.load(SeqCst), 8);
    }
}

/// Several callers, jobs of every length, pauses in which workers fall asleep, and panics; what
/// a job writes is on the caller's stack and read right after.
#[test]
fn stress() {
    let pool = Pool::new(4).unwrap();
    let caller = |number: usize| {
        for round in 0..3000 {
            let items = (round * 7 + number) % 23;
            let bad = (round % 50 == 49).then_some(items / 2);
            let seen: [AtomicUsize; 23] = Default::default();
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.for_each(items, |_, item| {
                    seen[item].fetch_add(round + 1, Relaxed);
                    if Some(item) == bad {
                        // Unlike `panic!`, silent.
                        resume_unwind(Box::new(round));
                    }
                });
            }));
            match result {
                Ok(()) => {
                    assert!(bad.is_none() || items == 0);
                    assert!(seen[..items].iter().all(|n| n.load(Relaxed) == round + 1));
                }
                Err(panic) => assert_eq!(panic.downcast_ref(), Some(&round)),
            }
            if round % 100 == number {
                sleep(SPIN * 3);
            }
        }
    };
    scope(|scope| {
        (0..3).for_each(|number| drop(scope.spawn(move || caller(number))));
    });
    assert_eq!((pool.shared.state().inside(), pool.shared.state().is_open()), (0, false));
}

#[test]
fn callers_on_several_threads_take_turns() {
    let pool = Pool::new(2).unwrap();
    let inside = AtomicUsize::new(0);
    scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..50 {
                    pool.for_each(4, |_, _| {
                        assert!(inside.fetch_add(1, SeqCst) < 2);
                        inside.fetch_sub(1, SeqCst);
                    });
                }
            });
        }
    });
}

#[test]
#[should_panic(expected = "called from its own job")]
fn nested_jobs_are_refused() {
    let pool = Pool::new(2).unwrap();
    pool.for_each(2, |_, _| pool.for_each(1, |_, _| ()));
}

#[test]
fn sleeping_workers_wake() {
    let pool = Pool::new(3).unwrap();
    for _ in 0..5 {
        sleep(SPIN * 10);
        let met = AtomicUsize::new(0);
        pool.for_each(3, |_, _| {
            met.fetch_add(1, SeqCst);
            until(|| met.load(SeqCst) == 3);
        });
    }
}
