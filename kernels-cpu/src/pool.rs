//! The worker pool: one job at a time, run by every worker.
//!
//! The calling thread is worker 0; the others spin for some tens of microseconds after a job, so
//! that the next operator of a step finds them awake, then sleep. With more workers than usable
//! cores nobody spins. A call allocates nothing.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a waiting thread spins before it sleeps.
const SPIN: Duration = Duration::from_micros(40);

/// Cores this process may use: the smaller of its affinity mask and its cgroup quota.
pub fn usable_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// A job: called once with each worker's index.
type Job = *const (dyn Fn(usize) + Sync);

/// Worker threads that run one closure together.
pub struct Pool {
    shared: Arc<Shared>,
    threads: usize,
    handles: Vec<JoinHandle<()>>,
    /// Held for the whole of a job: callers on several threads take turns.
    turn: Mutex<()>,
}

/// What the threads of a pool share.
struct Shared {
    /// Written by the caller while no worker runs, read by workers after they saw a new `epoch`.
    job: UnsafeCell<Option<Job>>,
    /// Counts jobs.
    epoch: AtomicU64,
    /// Workers that have not finished the job.
    running: AtomicUsize,
    stop: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    start: Gate,
    done: Gate,
    spin: bool,
}

// SAFETY: `job` is written only between jobs, under `turn`, and published through `epoch`; the
// closure behind it is `Sync`. All else is `Sync` by itself.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is only used while the caller keeps the closure alive.
unsafe impl Send for Shared {}

/// A place to wait for a condition: spinning first, then asleep.
#[derive(Default)]
struct Gate {
    lock: Mutex<()>,
    wake: Condvar,
    sleepers: AtomicUsize,
}

thread_local! {
    /// The pool whose job this thread runs.
    static CURRENT: Cell<*const Shared> = const { Cell::new(std::ptr::null()) };
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic in a job unwinds through `turn`; nothing it guards can be half-changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gate {
    /// Returns once `ready` holds.
    fn wait(&self, spin: bool, ready: impl Fn() -> bool) {
        if spin {
            let start = Instant::now();
            loop {
                for _ in 0..64 {
                    if ready() {
                        return;
                    }
                    std::hint::spin_loop();
                }
                if start.elapsed() > SPIN {
                    break;
                }
            }
        }
        let mut guard = lock(&self.lock);
        // Sequentially consistent with `open`: either we see the change or it sees us.
        self.sleepers.fetch_add(1, SeqCst);
        while !ready() {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, SeqCst);
    }

    /// Wakes the sleepers; to be called after a sequentially consistent change.
    fn open(&self) {
        if self.sleepers.load(SeqCst) > 0 {
            drop(lock(&self.lock));
            self.wake.notify_all();
        }
    }
}

impl Pool {
    /// A pool of `threads` workers, the calling thread among them.
    ///
    /// Fails if the system refuses a thread. Panics if `threads` is 0.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        assert!(threads >= 1, "a pool needs at least one thread");
        let shared = Arc::new(Shared {
            job: UnsafeCell::new(None),
            epoch: AtomicU64::new(0),
            running: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
            start: Gate::default(),
            done: Gate::default(),
            spin: threads <= usable_cores(),
        });
        let mut pool = Self { shared, threads, handles: Vec::new(), turn: Mutex::new(()) };
        for worker in 1..threads {
            let shared = Arc::clone(&pool.shared);
            // Dropping `pool` on failure stops the workers already started.
            let builder = std::thread::Builder::new().name(format!("quire-worker-{worker}"));
            pool.handles.push(builder.spawn(move || shared.work(worker))?);
        }
        Ok(pool)
    }

    /// Number of workers.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Calls `f(worker)` once on every worker and returns when all are done.
    ///
    /// A panic in `f` is resumed here, after every worker has finished; the pool stays usable.
    /// Panics if called from within a job of the same pool.
    pub fn run(&self, f: impl Fn(usize) + Sync) {
        let shared = &*self.shared;
        let outer = CURRENT.get();
        assert!(!std::ptr::eq(outer, shared), "Pool::run called from within its own job");
        if self.threads == 1 {
            return f(0);
        }
        let turn = lock(&self.turn);
        let job: &(dyn Fn(usize) + Sync) = &f;
        // SAFETY: the lifetime is erased, but this call does not return or unwind before
        // `running` is back to 0, and no worker touches the job after that.
        let job: Job = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static _>(job) };
        // SAFETY: `turn` is held and the last job is over, so nobody reads the cell.
        unsafe { *shared.job.get() = Some(job) };
        shared.running.store(self.threads - 1, SeqCst);
        shared.epoch.fetch_add(1, SeqCst);
        shared.start.open();
        CURRENT.set(shared);
        let own = catch_unwind(AssertUnwindSafe(|| f(0)));
        CURRENT.set(outer);
        shared.done.wait(shared.spin, || shared.running.load(SeqCst) == 0);
        let theirs = lock(&shared.panic).take();
        drop(turn);
        if let Some(panic) = own.err().or(theirs) {
            resume_unwind(panic);
        }
    }

    /// Calls `f(worker, item)` for every item below `items`, each on whichever worker is free.
    ///
    /// A single item runs on the caller. Panics as [`Pool::run`] does.
    pub fn for_each(&self, items: usize, f: impl Fn(usize, usize) + Sync) {
        if items <= 1 || self.threads == 1 {
            return (0..items).for_each(|item| f(0, item));
        }
        let next = AtomicUsize::new(0);
        self.run(|worker| {
            loop {
                let item = next.fetch_add(1, Relaxed);
                if item >= items {
                    break;
                }
                f(worker, item);
            }
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        self.shared.epoch.fetch_add(1, SeqCst);
        self.shared.start.open();
        for handle in self.handles.drain(..) {
            // Workers catch the panics of jobs, so they end normally.
            let _ = handle.join();
        }
    }
}

impl Shared {
    /// The life of worker `worker`.
    fn work(&self, worker: usize) {
        CURRENT.set(self);
        let mut seen = 0;
        loop {
            self.start.wait(self.spin, || self.epoch.load(SeqCst) != seen);
            seen += 1;
            if self.stop.load(SeqCst) {
                return;
            }
            // SAFETY: the new epoch says the caller has written the job and will not touch the
            // cell before `running` is 0.
            let job = unsafe { *self.job.get() };
            if let Some(job) = job {
                // SAFETY: the caller keeps the closure alive until `running` is 0.
                let job = unsafe { &*job };
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(worker))) {
                    lock(&self.panic).get_or_insert(panic);
                }
            }
            if self.running.fetch_sub(1, SeqCst) == 1 {
                self.done.open();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_worker_runs_every_job_once() {
        for threads in [1, 2, 3, 5] {
            let pool = Pool::new(threads).unwrap();
            assert_eq!(pool.threads(), threads);
            let calls: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            for _ in 0..500 {
                pool.run(|worker| {
                    calls[worker].fetch_add(1, Relaxed);
                });
            }
            assert!(calls.iter().all(|n| n.load(Relaxed) == 500), "{threads} threads");
        }
    }

    #[test]
    fn for_each_covers_each_item_once() {
        let pool = Pool::new(3).unwrap();
        for items in [0, 1, 2, 1000] {
            let seen: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
            pool.for_each(items, |worker, item| {
                assert!(worker < 3);
                seen[item].fetch_add(1, Relaxed);
            });
            assert!(seen.iter().all(|n| n.load(Relaxed) == 1), "{items} items");
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(2).unwrap();
        for bad in 0..2 {
            let finished = AtomicUsize::new(0);
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(|worker| {
                    assert!(worker != bad, "worker {worker} fails");
                    finished.fetch_add(1, SeqCst);
                });
            }));
            let message = *result.unwrap_err().downcast::<String>().unwrap();
            assert_eq!(message, format!("worker {bad} fails"));
            assert_eq!(finished.load(SeqCst), 1);
            pool.run(|_| {
                finished.fetch_add(1, SeqCst);
            });
            assert_eq!(finished.load(SeqCst), 3);
        }
    }

    #[test]
    fn callers_on_several_threads_take_turns() {
        let pool = Pool::new(2).unwrap();
        let inside = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        pool.run(|_| {
                            assert!(inside.fetch_add(1, SeqCst) < 2);
                            inside.fetch_sub(1, SeqCst);
                        });
                    }
                });
            }
        });
    }

    #[test]
    #[should_panic(expected = "from within its own job")]
    fn nested_jobs_are_refused() {
        let pool = Pool::new(2).unwrap();
        pool.run(|_| pool.run(|_| ()));
    }

    #[test]
    fn sleeping_workers_wake() {
        let pool = Pool::new(2).unwrap();
        for _ in 0..5 {
            std::thread::sleep(SPIN * 10);
            let sum = AtomicUsize::new(0);
            pool.run(|worker| {
                sum.fetch_add(worker + 1, SeqCst);
            });
            assert_eq!(sum.into_inner(), 3);
        }
    }
}
