//! Transfers: what a caller waits for, and the carrier's thread completes.

use std::sync::atomic::{AtomicBool, Ordering::Acquire};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use ep_migrate::{CarrierError, Receiving, Sending};

/// How often a wait checks whether its carrier has closed. The thread of a carrier that closes drops its promises, which
/// ends waits at once, unless the thread is stuck in a call of a library.
const CHECK: Duration = Duration::from_millis(100);

type Outcome<T> = Result<T, CarrierError>;

#[derive(Debug)]
struct Cell<T> {
    outcome: Mutex<Option<Outcome<T>>>,
    changed: Condvar,
}

/// The carrier's end of a transfer. Dropping it ends the wait with [`CarrierError::Closed`].
#[derive(Debug)]
pub(crate) struct Promise<T>(Arc<Cell<T>>);

impl<T> Promise<T> {
    /// Completes the transfer.
    pub(crate) fn complete(self, outcome: Outcome<T>) {
        self.set(outcome);
    }

    /// Sets the outcome, unless there is one.
    fn set(&self, outcome: Outcome<T>) {
        self.0.outcome.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(outcome);
        self.0.changed.notify_all();
    }
}

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        self.set(Err(CarrierError::Closed));
    }
}

/// The caller's end of a transfer.
#[derive(Debug)]
pub(crate) struct Transfer<T> {
    cell: Arc<Cell<T>>,
    /// Whether the carrier has closed.
    closed: Arc<AtomicBool>,
}

impl<T> Transfer<T> {
    /// A new transfer of the carrier that `closed` belongs to.
    pub(crate) fn new(closed: &Arc<AtomicBool>) -> (Promise<T>, Self) {
        let cell = Arc::new(Cell { outcome: Mutex::new(None), changed: Condvar::new() });
        (Promise(Arc::clone(&cell)), Self { cell, closed: Arc::clone(closed) })
    }

    fn outcome(&self) -> Outcome<T> {
        let mut outcome = self.cell.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(outcome) = outcome.take() {
                return outcome;
            }
            if self.closed.load(Acquire) {
                return Err(CarrierError::Closed);
            }
            (outcome, _) =
                self.cell.changed.wait_timeout(outcome, CHECK).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Sending for Transfer<()> {
    fn wait(self: Box<Self>) -> Outcome<()> {
        self.outcome()
    }
}

impl Receiving for Transfer<Vec<u8>> {
    fn wait(self: Box<Self>, bytes: usize) -> Outcome<Vec<u8>> {
        let message = self.outcome()?;
        if message.len() == bytes {
            return Ok(message);
        }
        Err(CarrierError::Broken(format!("a message of {} bytes instead of {bytes}", message.len())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_with_its_outcome_or_the_carrier() {
        let closed = Arc::new(AtomicBool::new(false));
        let (promise, transfer) = Transfer::new(&closed);
        promise.complete(Ok(vec![1, 2]));
        assert_eq!(Box::new(transfer).wait(2), Ok(vec![1, 2]));
        let (promise, transfer) = Transfer::new(&closed);
        promise.complete(Ok(vec![1, 2]));
        assert!(matches!(Box::new(transfer).wait(3), Err(CarrierError::Broken(_))));
        let (promise, transfer) = Transfer::<()>::new(&closed);
        drop(promise);
        assert_eq!(Sending::wait(Box::new(transfer)), Err(CarrierError::Closed));
        // The thread of the carrier is stuck, and its promise lives.
        let (_promise, transfer) = Transfer::<()>::new(&closed);
        closed.store(true, std::sync::atomic::Ordering::Release);
        assert_eq!(Sending::wait(Box::new(transfer)), Err(CarrierError::Closed));
    }
}
