//! Threads, which the system may refuse to start, and the pool of the parallel iterators.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

use ep::EnvironmentError;
use rayon::{ThreadPool, ThreadPoolBuilder};

const HINT: &str = "raise the limit of threads (ulimit -u, or pids.max of the control group)";

/// Starts a thread. `what` names it in the error: "the thread that reads stdin".
pub(crate) fn spawn<T: Send + 'static>(
    what: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>, EnvironmentError> {
    builder().and_then(|builder| builder.spawn(work)).map_err(|error| refused(what, error))
}

/// Starts a thread of a scope. After an error the scope still waits for its other threads, so the caller must end what
/// they wait for.
pub(crate) fn spawn_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    what: &str,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>, EnvironmentError> {
    builder().and_then(|builder| builder.spawn_scoped(scope, work)).map_err(|error| refused(what, error))
}

/// The pool for parallel iterators, with one thread for each core. The first call starts it.
///
/// This is not rayon's global pool: the first parallel iterator would start the global pool, and panic if that fails.
pub(crate) fn pool() -> Result<&'static ThreadPool, EnvironmentError> {
    static POOL: Mutex<Option<&ThreadPool>> = Mutex::new(None);
    let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(pool) = *pool {
        return Ok(pool);
    }
    let started = ThreadPoolBuilder::new()
        .build()
        .map_err(|error| refused("the threads that prepare and check data", error))?;
    Ok(pool.insert(Box::leak(Box::new(started))))
}

/// The error of a thread that the system refused.
pub(crate) fn refused(what: &str, error: impl std::fmt::Display) -> EnvironmentError {
    EnvironmentError::new(format!("starting {what}"), error, HINT)
}

fn builder() -> io::Result<Builder> {
    #[cfg(test)]
    quota::take()?;
    Ok(Builder::new())
}

/// For tests: limits the number of threads that a thread can start.
#[cfg(test)]
pub(crate) mod quota {
    use std::cell::Cell;
    use std::io;

    thread_local! {
        static LEFT: Cell<usize> = const { Cell::new(usize::MAX) };
    }

    /// Runs `work`, which can start this number of threads.
    pub(crate) fn of<T>(threads: usize, work: impl FnOnce() -> T) -> T {
        LEFT.set(threads);
        let value = work();
        LEFT.set(usize::MAX);
        value
    }

    pub(super) fn take() -> io::Result<()> {
        let left = LEFT.get().checked_sub(1).ok_or(io::ErrorKind::WouldBlock)?;
        LEFT.set(left);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_thread_is_an_error_with_advice() {
        let start = || spawn("the thread of a test", || 7);
        assert_eq!(quota::of(1, start).unwrap().join().unwrap(), 7);
        let error = quota::of(0, start).unwrap_err().to_string();
        assert!(
            error.starts_with("starting the thread of a test: ") && error.contains("ulimit -u"),
            "{error}"
        );
    }

    #[test]
    fn the_pool_is_started_once() {
        let pool = pool().unwrap();
        assert!(std::ptr::eq(pool, super::pool().unwrap()));
        assert_eq!(pool.install(|| rayon::join(|| 1, || 2)), (1, 2));
    }
}
