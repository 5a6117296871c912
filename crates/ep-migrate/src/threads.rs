//! Starting and joining threads.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ep::{EnvironmentError, Result};

/// How long a rank that closes after an error waits for its peers to read the reason.
pub(crate) const GRACE: Duration = Duration::from_secs(1);

#[cfg(test)]
thread_local! {
    /// How many threads the calling thread can start, before the system refuses one.
    pub(crate) static STARTS: std::cell::Cell<usize> = const { std::cell::Cell::new(usize::MAX) };
}

/// Starts a thread. If `work` panics, the thread calls `report` with an error that stands for the panic.
pub(crate) fn spawn(
    name: String,
    work: impl FnOnce() + Send + 'static,
    report: impl FnOnce(EnvironmentError) + Send + 'static,
) -> Result<JoinHandle<()>> {
    let thread = name.clone();
    // What the work changes is behind locks, and nothing reads it after the error: `report` ends all calls.
    let run =
        move || catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| report(panicked(&name, &*panic)));
    start(thread, run).map_err(|error| {
        EnvironmentError::new(
            "starting a thread",
            error,
            "has the user reached its limit of processes (ulimit -u)?",
        )
        .into()
    })
}

fn start(name: String, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    #[cfg(test)]
    match STARTS.get().checked_sub(1) {
        Some(left) => STARTS.set(left),
        None => return Err(io::ErrorKind::WouldBlock.into()),
    }
    std::thread::Builder::new().name(name).spawn(run)
}

fn panicked(thread: &str, panic: &(dyn Any + Send)) -> EnvironmentError {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
    EnvironmentError::new(
        format!("running the thread {thread}"),
        format!("it panicked: {text}"),
        "report this bug, of hybrid-ep or of the carrier, with the panic's message",
    )
}

/// Joins the threads that end within [`GRACE`], a bound on the wait for all of them together. Called after the threads
/// were told to end.
pub(crate) fn join_within_grace(threads: impl Iterator<Item = JoinHandle<()>>) {
    let (started, own) = (Instant::now(), std::thread::current().id());
    for thread in threads {
        // A carrier may fail to end the wait of a thread. Such a thread owns nothing but its transfer, and is left alone.
        while !thread.is_finished() && started.elapsed() < GRACE && thread.thread().id() != own {
            std::thread::sleep(Duration::from_millis(1));
        }
        if thread.is_finished() {
            // A thread that panicked has printed its message.
            let _ = thread.join();
        }
    }
}
