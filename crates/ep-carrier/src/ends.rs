//! Which peers are gone, of ranks that are threads. `links` has the same for processes.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Release};

use ep_migrate::CarrierError;

/// Which connections of a rank have ended. An engine is no failure detector, so this is observed elsewhere.
pub(crate) trait Ends: Send + Sync + fmt::Debug {
    /// Why the connection with the rank at this position has ended; `None` if it has not.
    fn ended(&self, position: usize) -> Option<CarrierError>;

    /// Ends the connections of this rank. A second call does nothing.
    fn leave(&self);

    /// Leaves, and waits until no thread of this value runs.
    fn finish(&self) {
        self.leave();
    }
}

/// Ranks that are threads: each marks its own end.
#[derive(Debug)]
pub(crate) struct ThreadEnds {
    own: usize,
    left: Arc<[AtomicBool]>,
}

impl ThreadEnds {
    /// The ends of `ranks` ranks.
    pub(crate) fn of(ranks: usize) -> Vec<Self> {
        let left: Arc<[AtomicBool]> = (0..ranks).map(|_| AtomicBool::new(false)).collect();
        (0..ranks).map(|own| Self { own, left: Arc::clone(&left) }).collect()
    }
}

impl Ends for ThreadEnds {
    fn ended(&self, position: usize) -> Option<CarrierError> {
        self.left[position].load(Acquire).then_some(CarrierError::Closed)
    }

    fn leave(&self) {
        self.left[self.own].store(true, Release);
    }
}
