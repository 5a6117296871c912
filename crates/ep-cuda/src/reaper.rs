//! Frees memory after its owner was dropped, as soon as no work on the GPU can access it.
//!
//! What must be freed is a [`Job`]. [`retire`] polls it during the calling thread's [`Grace`], and then leaves it to a
//! background thread. A job whose work has not finished within its patience is given up: its memory stays allocated
//! until the process ends. A warning on stderr says so, and [`leaked_bytes`] counts it.

use std::any::Any;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ep::{EnvironmentError, Result};

use crate::driver::Look;

/// Pauses between two polls of the jobs.
const SHORTEST_PAUSE: Duration = Duration::from_micros(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(5);
/// How long the end of the process waits for a poll in progress.
const LAST_LOOK: Duration = Duration::from_millis(200);

/// Something to be dropped when its work on the GPU has finished.
pub(crate) trait Job: Send {
    /// Polls the work, without waiting for it.
    fn look(&mut self) -> Look;

    /// How long the work may take before the job is given up.
    fn patience(&self) -> Duration;

    /// Whether the end of the program waits for the work.
    fn is_awaited(&self) -> bool {
        true
    }

    /// Called when the job is given up. The job is never dropped.
    fn give_up(&mut self) -> Lost;
}

/// What a job that was given up leaves behind.
pub(crate) struct Lost {
    /// The owner of the memory, for the warning.
    pub(crate) what: String,
    /// Bytes of GPU memory that stay allocated.
    pub(crate) bytes: usize,
}

struct Waiting {
    job: Box<dyn Job>,
    since: Instant,
}

#[derive(Default)]
struct Queue {
    jobs: Vec<Waiting>,
    /// Objects that CUDA graphs have released, to be dropped by the thread.
    things: Vec<Box<dyn Any + Send>>,
    started: bool,
    /// Jobs and things that the thread has taken out of the queue.
    in_hand: usize,
    /// Those among them that the end of the program waits for.
    awaited_in_hand: usize,
}

static QUEUE: Mutex<Queue> = Mutex::new(Queue {
    jobs: Vec::new(),
    things: Vec::new(),
    started: false,
    in_hand: 0,
    awaited_in_hand: 0,
});
static WAKE: Condvar = Condvar::new();
/// Held while the thread calls the driver.
static LOOKING: Mutex<()> = Mutex::new(());
static ENDING: AtomicBool = AtomicBool::new(false);
static LEAKED: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static GRACE: Cell<Option<Instant>> = const { Cell::new(None) };
}

fn queue() -> MutexGuard<'static, Queue> {
    QUEUE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The number of bytes of GPU memory that this process will never free, because work that may access them did not
/// finish in time.
pub fn leaked_bytes() -> usize {
    LEAKED.load(Relaxed)
}

/// Waits up to `limit` until the memory of all dropped buffers has been freed or given up. Returns whether it has been.
/// Does not wait for memory that a CUDA graph, a handle or a [`CudaMemory`](crate::CudaMemory) still uses.
pub fn settle(limit: Duration) -> bool {
    settles(limit, |queue| queue.jobs.is_empty() && queue.things.is_empty() && queue.in_hand == 0)
}

/// Like [`settle`], for the end of a program: does not wait for jobs that are not awaited ([`Job::is_awaited`]).
pub(crate) fn settle_awaited(limit: Duration) -> bool {
    settles(limit, |queue| {
        let awaited = queue.jobs.iter().any(|waiting| waiting.job.is_awaited());
        !awaited && queue.things.is_empty() && queue.awaited_in_hand == 0
    })
}

fn settles(limit: Duration, is_done: impl Fn(&Queue) -> bool) -> bool {
    let until = Instant::now() + limit;
    loop {
        if is_done(&queue()) {
            return true;
        }
        if Instant::now() >= until || is_ending() {
            return false;
        }
        thread::sleep(LONGEST_PAUSE);
    }
}

/// The time for which [`retire`] waits on this thread.
pub(crate) struct Grace(());

impl Grace {
    pub(crate) fn begin(time: Duration) {
        GRACE.set(Some(Instant::now() + time));
    }

    /// A value that ends the grace when it is dropped.
    pub(crate) fn until_dropped() -> Self {
        Self(())
    }
}

impl Drop for Grace {
    fn drop(&mut self) {
        GRACE.set(None);
    }
}

/// Drops the job as soon as its work has finished, or gives it up.
pub(crate) fn retire(job: Box<dyn Job>) {
    if is_ending() {
        std::mem::forget(job);
        return;
    }
    let since = Instant::now();
    let until = GRACE.get();
    let mut waiting = Waiting { job, since };
    let mut pause = SHORTEST_PAUSE;
    while until.is_some_and(|until| Instant::now() < until) {
        match waiting.look() {
            None => return,
            Some(again) => waiting = again,
        }
        thread::sleep(pause);
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
    if start().is_err() {
        waiting.give_up("no thread could be started to wait for it");
        return;
    }
    queue().jobs.push(waiting);
    WAKE.notify_one();
}

/// Has `thing` dropped by the background thread. Does not wait and does not call the driver.
pub(crate) fn drop_later(thing: Box<dyn Any + Send>) {
    queue().things.push(thing);
    WAKE.notify_one();
}

/// Starts the background thread, unless it is running.
pub(crate) fn start() -> Result<()> {
    let mut queue = queue();
    if queue.started {
        return Ok(());
    }
    let started = thread::Builder::new().name("ep-reaper".into()).spawn(reap);
    started.map_err(|error| EnvironmentError::new("starting the thread that frees GPU memory", error, ""))?;
    queue.started = true;
    Ok(())
}

/// Whether the process is ending. Then the driver must not be called.
pub(crate) fn is_ending() -> bool {
    ENDING.load(SeqCst)
}

/// Called by the C library when the process ends, before the driver's own exit handler.
pub(crate) extern "C" fn process_ends() {
    ENDING.store(true, SeqCst);
    let until = Instant::now() + LAST_LOOK;
    while LOOKING.try_lock().is_err() && Instant::now() < until {
        thread::sleep(SHORTEST_PAUSE);
    }
}

fn reap() {
    let mut pause = SHORTEST_PAUSE;
    loop {
        let mut queue = queue();
        (queue.in_hand, queue.awaited_in_hand) = (0, 0);
        while queue.jobs.is_empty() && queue.things.is_empty() {
            queue = WAKE.wait(queue).unwrap_or_else(PoisonError::into_inner);
            pause = SHORTEST_PAUSE;
        }
        let (jobs, things) = (std::mem::take(&mut queue.jobs), std::mem::take(&mut queue.things));
        queue.in_hand = jobs.len() + things.len();
        queue.awaited_in_hand = jobs.iter().filter(|waiting| waiting.job.is_awaited()).count() + things.len();
        drop(queue);

        let looking = LOOKING.lock().unwrap_or_else(PoisonError::into_inner);
        for thing in things {
            if is_ending() { std::mem::forget(thing) } else { drop(thing) }
        }
        // Unfinished jobs go back to the queue while `in_hand` still counts them, so `settle` never misses one.
        for job in jobs {
            if let Some(again) = job.look() {
                self::queue().jobs.push(again);
            }
        }
        drop(looking);
        thread::sleep(pause);
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

impl Waiting {
    /// Polls the job. Returns `None` if it needs no more polling.
    fn look(mut self) -> Option<Self> {
        if is_ending() {
            std::mem::forget(self.job);
            return None;
        }
        match self.job.look() {
            Look::Over => drop(self.job),
            // The context belongs to another process, or ends with this one.
            Look::Gone => std::mem::forget(self.job),
            Look::Running if self.since.elapsed() < self.job.patience() => return Some(self),
            Look::Running => {
                let waited = self.since.elapsed().as_secs_f64();
                self.give_up(&format!("work that may access it had not finished after {waited:.1} s"));
            }
        }
        None
    }

    fn give_up(mut self, why: &str) {
        let Lost { what, bytes } = self.job.give_up();
        std::mem::forget(self.job);
        LEAKED.fetch_add(bytes, Relaxed);
        ep::tell(format_args!(
            "warning: {what}: {bytes} bytes of GPU memory stay allocated until the process ends: {why}"
        ));
    }
}
