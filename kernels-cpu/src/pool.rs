//! The worker pool: one job at a time, whose items are handed to whoever is free.
//!
//! The calling thread is worker 0. The others join a job if they come while it is open; the caller
//! closes it when no item is left, and waits only for those inside. So a worker that the system
//! has not got round to running holds up nobody:
//!
//! ```text
//! caller    open ── items … ── close ── wait until nobody is inside ── return
//! worker 1     join ── items … ── leave
//! worker 2  (late)                      finds it closed: waits for the next
//! ```
//!
//! Waiting threads spin for some tens of microseconds, so that the next operator of a step finds
//! them awake, then sleep. With more workers than usable cores nobody spins. A call allocates
//! nothing.

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
    /// Written by the caller while the job is closed and nobody is inside, read by workers inside.
    job: UnsafeCell<Option<Job>>,
    /// Number of the job, whether it is open, and how many workers are inside: see [`State`].
    state: AtomicU64,
    stop: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    start: Gate,
    done: Gate,
    spin: bool,
}

/// A value of [`Shared::state`]. All changes are made to the whole word at once: a worker is let in
/// only if the job is still open, and after it was closed nobody comes in.
#[derive(Clone, Copy)]
struct State(u64);

impl State {
    /// Added by a worker inside; subtracted when it leaves.
    const WORKER: u64 = 1;
    /// Most workers inside.
    const MAX_WORKERS: u64 = Self::OPEN - 1;
    /// Set while workers may join.
    const OPEN: u64 = 1 << 16;
    /// Added with every job. The count wraps around, and a worker that sleeps for all of it would
    /// miss a job, as it may.
    const JOB: u64 = 1 << 17;

    fn job(self) -> u64 {
        self.0 / Self::JOB
    }

    fn is_open(self) -> bool {
        self.0 & Self::OPEN != 0
    }

    fn inside(self) -> u64 {
        self.0 & Self::MAX_WORKERS
    }
}

// SAFETY: `job` is written only under `turn`, closed and with nobody inside, and read only inside;
// the closure behind it is `Sync`. All else is `Sync` by itself.
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

    /// Wakes up to `most` sleepers; to be called after a sequentially consistent change.
    fn open(&self, most: usize) {
        let sleepers = self.sleepers.load(SeqCst);
        if sleepers == 0 {
            return;
        }
        drop(lock(&self.lock));
        if sleepers <= most {
            self.wake.notify_all();
        } else {
            (0..most).for_each(|_| self.wake.notify_one());
        }
    }
}

impl Pool {
    /// A pool of `threads` workers, the calling thread among them.
    ///
    /// Fails if the system refuses a thread. Panics if `threads` is 0 or over 65,535.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        assert!(
            (1..=State::MAX_WORKERS as usize).contains(&threads),
            "a pool of {threads} threads"
        );
        let shared = Arc::new(Shared {
            job: UnsafeCell::new(None),
            state: AtomicU64::new(0),
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

    /// Calls `f(worker, item)` for every item below `items`, each on whichever worker is free, and
    /// returns when all are done. A worker has one item at a time.
    ///
    /// A single item runs on the caller. A panic in `f` is resumed here, when no item is being
    /// worked on any more; some may never have been. The pool stays usable.
    /// Panics if called from within a job of the same pool.
    pub fn for_each(&self, items: usize, f: impl Fn(usize, usize) + Sync) {
        let outer = CURRENT.get();
        assert!(!std::ptr::eq(outer, &*self.shared), "Pool::for_each called from its own job");
        if items <= 1 || self.threads == 1 {
            return (0..items).for_each(|item| f(0, item));
        }
        let next = AtomicUsize::new(0);
        let take_items = |worker| {
            loop {
                let item = next.fetch_add(1, Relaxed);
                if item >= items {
                    break;
                }
                f(worker, item);
            }
        };
        let turn = lock(&self.turn);
        // SAFETY: `turn` is held, so the last job is closed and nobody is inside; the closure
        // outlives the job, as `close` comes before any return or unwinding.
        unsafe { self.shared.open(&take_items, items - 1) };
        CURRENT.set(&*self.shared);
        let own = catch_unwind(AssertUnwindSafe(|| take_items(0)));
        CURRENT.set(outer);
        self.shared.close();
        let theirs = lock(&self.shared.panic).take();
        drop(turn);
        if let Some(panic) = own.err().or(theirs) {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        self.shared.start.open(usize::MAX);
        for handle in self.handles.drain(..) {
            // Workers catch the panics of jobs, so they end normally.
            let _ = handle.join();
        }
    }
}

impl Shared {
    /// Opens the next job and wakes up to `helpers` workers for it.
    ///
    /// # Safety
    /// The last job is closed and nobody is inside. `job` lives until [`Shared::close`] returned.
    unsafe fn open(&self, job: &(dyn Fn(usize) + Sync), helpers: usize) {
        // SAFETY: only the lifetime is erased; workers use the closure while they are inside, which
        // nobody is any more when `close` returns.
        let job: Job = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static _>(job) };
        // SAFETY: nobody is inside, so nobody reads the cell.
        unsafe { *self.job.get() = Some(job) };
        self.state.fetch_add(State::JOB + State::OPEN, SeqCst);
        self.start.open(helpers);
    }

    /// Closes the job, and waits for the workers inside.
    fn close(&self) {
        let last = State(self.state.fetch_sub(State::OPEN, SeqCst));
        if last.inside() > 0 {
            self.done.wait(self.spin, || self.state().inside() == 0);
        }
    }

    fn state(&self) -> State {
        State(self.state.load(SeqCst))
    }

    /// The life of worker `worker`.
    fn work(&self, worker: usize) {
        CURRENT.set(self);
        let mut seen = 0;
        loop {
            let stopped = || self.stop.load(SeqCst);
            self.start.wait(self.spin, || self.state().job() != seen || stopped());
            if stopped() {
                return;
            }
            seen = self.join(worker);
        }
    }

    /// Takes part in the job that is open, if one is. Returns its number, or that of the last.
    fn join(&self, worker: usize) -> u64 {
        let mut state = self.state();
        loop {
            if !state.is_open() {
                return state.job();
            }
            let entered = state.0 + State::WORKER;
            match self.state.compare_exchange_weak(state.0, entered, SeqCst, SeqCst) {
                Ok(_) => break,
                Err(now) => state = State(now),
            }
        }
        // SAFETY: this worker is inside, so the caller has written the cell and does not touch it.
        let job = unsafe { *self.job.get() }.expect("an open job");
        // SAFETY: the closure lives for as long as a worker is inside.
        let job = unsafe { &*job };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(worker))) {
            lock(&self.panic).get_or_insert(panic);
        }
        let last = State(self.state.fetch_sub(State::WORKER, SeqCst));
        if last.inside() == 1 && !last.is_open() {
            self.done.open(1);
        }
        state.job()
    }
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
