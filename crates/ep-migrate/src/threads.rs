//! Starting and joining threads.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ep::{EnvironmentError, Result};

use crate::post::GRACE;

pub(crate) fn spawn(name: String, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name).spawn(work).map_err(|error| {
        EnvironmentError::new(
            "starting a thread",
            error,
            "has the user reached its limit of processes (ulimit -u)?",
        )
        .into()
    })
}

/// Joins the threads that end within [`GRACE`], which is for all of them. Called after they were told to end.
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
