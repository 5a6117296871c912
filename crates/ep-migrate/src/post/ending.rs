//! How a rank ends: it records its first error or leaves, tells its peers, and closes the carrier.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use ep::{Error, PeerFault, Rank};

use super::{Post, hold};
use crate::carrier::Lane;
use crate::header::Kind;
use crate::threads::GRACE;

impl Post {
    /// Records an error, wakes every call, and tells the peers which rank is at fault. Returns the first error of this
    /// rank.
    pub(crate) fn fail(&self, error: impl Into<Error>) -> Error {
        let error = error.into();
        let culprit = match &error {
            Error::Peer(peer) => (peer.peer, peer.fault),
            _ => (self.setup.rank, PeerFault::Failed),
        };
        self.fail_for(error, culprit)
    }

    /// Records that a decoder refused a message of a peer. Returns the first error of this rank.
    pub(crate) fn undecodable(&self, peer: usize, found: impl Into<String>) -> Error {
        self.fail(self.broken(peer, found))
    }

    /// Records that another part of the program found a fault of a rank, which need not be one of the peers.
    pub(crate) fn blame(&self, peer: Rank, fault: PeerFault) {
        self.fail(self.peer_error(peer, fault, "messages of another part of the step".into()));
    }

    /// Like [`fail`](Self::fail), but tells the peers that `culprit` is at fault.
    pub(super) fn fail_for(&self, error: impl Into<Error>, culprit: (Rank, PeerFault)) -> Error {
        let error = {
            let mut state = self.lock();
            if let Some(first) = &state.error {
                return first.clone();
            }
            state.error.insert(error.into()).clone()
        };
        self.changed.notify_all();
        // Also to the rank at fault, which may be alive and waiting.
        self.say(Kind::Failure(culprit.0, culprit.1));
        error
    }

    /// Sends a last message to all peers. A peer that the message cannot reach notices that its connection closes.
    fn say(&self, kind: Kind) {
        let header = Arc::new(self.bare(kind).to_bytes());
        for (peer, &rank) in self.setup.peers.iter().enumerate() {
            let _order = hold(&self.orders[peer].sends);
            if let Ok(transfer) = self.carrier.send(rank, Lane::Headers, header.clone()) {
                self.lock().peers[peer].sent.push_back(transfer);
            }
        }
        self.changed.notify_all();
    }

    /// Sends `Left`, unless there is an error, waits until the peers no longer need this rank, and closes the carrier. The
    /// wait is at most `patience`, and short after an error.
    pub(crate) fn close(&self, patience: Duration) {
        let started = Instant::now();
        {
            let mut state = self.lock();
            if std::mem::replace(&mut state.is_leaving, true) {
                return;
            }
            if state.error.is_none() {
                drop(state);
                self.say(Kind::Left);
            }
        }
        let mut state = self.lock();
        while state.peers.iter().any(|peer| peer.ended.is_none()) {
            let bound = if state.error.is_some() { patience.min(GRACE) } else { patience };
            let Some(left) = bound.checked_sub(started.elapsed()) else { break };
            (state, _) = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
        state.is_closing = true;
        self.changed.notify_all();
        drop(state);
        self.carrier.abort();
    }
}
