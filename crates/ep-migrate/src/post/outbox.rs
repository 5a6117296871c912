//! Messages on the way to a peer: they are handed to the carrier, and the thread `sent` waits for them.

use std::sync::{Arc, PoisonError};

use ep::Result;

use super::{Post, hold};
use crate::carrier::Lane;
use crate::header::Header;

impl Post {
    /// Sends a message without a body.
    pub(super) fn post_header(&self, peer: usize, header: Header) -> Result<()> {
        self.post(peer, [(Lane::Headers, Arc::new(header.to_bytes()))])
    }

    /// Hands the parts of a message to the carrier.
    pub(super) fn post(
        &self,
        peer: usize,
        parts: impl IntoIterator<Item = (Lane, Arc<Vec<u8>>)>,
    ) -> Result<()> {
        let order = hold(&self.orders[peer].sends);
        for (lane, part) in parts {
            match self.carrier.send(self.peer(peer), lane, part) {
                Ok(transfer) => self.lock().peers[peer].sent.push_back(transfer),
                Err(error) => {
                    drop(order);
                    return Err(self.fail(self.lost(peer, &error, "a message to be sent")));
                }
            }
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Waits for messages that were sent.
    pub(super) fn reap(&self, peer: usize) {
        loop {
            let transfer = {
                let mut state = self.lock();
                loop {
                    let sent = &mut state.peers[peer];
                    if let Some(first) = sent.sent.pop_front() {
                        sent.awaited = 1;
                        break first;
                    }
                    if state.is_closing {
                        return;
                    }
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            };
            let sent = transfer.wait();
            let mut state = self.lock();
            state.peers[peer].awaited = 0;
            self.changed.notify_all();
            if let Err(error) = sent {
                // The peer may have closed after it had all that it needed. If not, the thread `headers` notices as well.
                let is_over = state.is_closing || state.peers[peer].ended.is_some();
                drop(state);
                if !is_over {
                    self.fail(self.lost(peer, &error, "the peer to take a message"));
                }
                return;
            }
        }
    }
}
