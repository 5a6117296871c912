//! The rail peers that this rank has lost.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ep::{Error, Rank};

/// The first error of each lost peer, for the proxy thread and the operators.
#[derive(Debug, Default)]
pub(super) struct Failures(Mutex<BTreeMap<Rank, Error>>);

impl Failures {
    /// A copy of the errors.
    pub(super) fn all(&self) -> BTreeMap<Rank, Error> {
        self.lock().clone()
    }

    /// Records the error of a peer. Returns false if the peer has one already.
    fn record(&self, peer: Rank, error: &Error) -> bool {
        match self.lock().entry(peer) {
            Entry::Occupied(_) => false,
            Entry::Vacant(entry) => {
                entry.insert(error.clone());
                true
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Rank, Error>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Called once for each lost peer.
pub(crate) type OnLost = Box<dyn FnMut(Rank, &Error) + Send>;

/// Records lost peers and reports each of them once.
pub(super) struct Losses {
    failures: Arc<Failures>,
    on_lost: OnLost,
}

impl Losses {
    pub(super) fn new(on_lost: OnLost) -> Self {
        Self { failures: Arc::default(), on_lost }
    }

    pub(super) fn failures(&self) -> &Arc<Failures> {
        &self.failures
    }

    /// Records and reports a lost peer, unless it is lost already.
    pub(super) fn lose(&mut self, peer: Rank, error: &Error) {
        if self.failures.record(peer, error) {
            (self.on_lost)(peer, error);
        }
    }

    /// Loses all these peers. A report that panics does not prevent those of the other peers.
    pub(super) fn lose_all(&mut self, peers: impl Iterator<Item = Rank>, error: &Error) {
        for peer in peers {
            // The panic hook has printed the panic, and the peer's error is recorded before its report.
            let _ = catch_unwind(AssertUnwindSafe(|| self.lose(peer, error)));
        }
    }
}
