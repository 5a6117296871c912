//! An engine whose signals arrive late and in a different order.

use std::sync::{Mutex, TryLockError};
use std::time::Instant;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::error::Result;
use crate::topology::Rank;
use crate::transport::{Posted, Put, Signal, Transport};

/// Delays and reorders the signals that an engine delivers, as an engine without any order between puts may. Lends
/// what the wrapped engine lends.
pub struct Reordering {
    inner: Box<dyn Transport>,
    held: Mutex<Held>,
}

struct Held {
    /// Signals that have arrived, and the number of polls for which each is held back.
    signals: Vec<(Rank, Signal, u32)>,
    random: ChaCha8Rng,
}

impl std::fmt::Debug for Reordering {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reordering").field("inner", &self.inner.name()).finish_non_exhaustive()
    }
}

impl Reordering {
    /// Wraps an engine. The order follows from `seed`.
    pub fn new(inner: Box<dyn Transport>, seed: u64) -> Self {
        Self {
            inner,
            held: Mutex::new(Held { signals: Vec::new(), random: ChaCha8Rng::seed_from_u64(seed) }),
        }
    }
}

impl Transport for Reordering {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn put(&self, put: Put) -> Result<Posted> {
        self.inner.put(put)
    }

    fn lend(&self, peer: Rank, offset: usize, len: usize) -> Option<std::ptr::NonNull<u8>> {
        self.inner.lend(peer, offset, len)
    }

    fn poll(&self, on_signal: &mut dyn FnMut(Rank, Signal)) -> Result<()> {
        let mut held = match self.held.try_lock() {
            Ok(held) => held,
            Err(TryLockError::Poisoned(held)) => held.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        let Held { signals: waiting, random } = &mut *held;
        let polled = self.inner.poll(&mut |peer, signal| {
            let delay = random.random_range(0..12);
            let at = random.random_range(0..=waiting.len());
            waiting.insert(at, (peer, signal, delay));
        });
        waiting.retain_mut(|(peer, signal, delay)| {
            let due = *delay == 0;
            if due {
                on_signal(*peer, *signal);
            }
            *delay = delay.saturating_sub(1);
            !due
        });
        polled
    }

    fn drain(&self, peer: Rank, deadline: Instant) -> Result<()> {
        self.inner.drain(peer, deadline)
    }
}
