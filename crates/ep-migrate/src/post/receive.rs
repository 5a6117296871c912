//! Messages from a peer: the threads that receive headers and bodies, and the receives that are posted for bodies.

use std::collections::VecDeque;
use std::sync::PoisonError;

use ep::{PeerFault, Result};

use super::{Post, Resend, hold};
use crate::carrier::{CarrierError, Lane, Receiving};
use crate::header::{HEADER_BYTES, Header, Kind, Wait};
use crate::inbox::{Due, GRADIENTS, Message, WEIGHTS, lane_of, noun};

/// Number of receives for headers of one peer that are posted at a time. A carrier may send a message only after its
/// receive is posted, so with a single receive each header would cost a round trip.
const HEADERS_AHEAD: usize = 16;

impl Post {
    /// Receives headers until the peer sends its last one.
    pub(super) fn listen(&self, peer: usize, resend: &Resend) {
        let mut posted = VecDeque::new();
        loop {
            let header = match self.next_header(peer, &mut posted) {
                Ok(bytes) => Header::parse(&bytes).map_err(|what| self.broken(peer, what)),
                Err(error) => Err(self.lost(peer, &error, "its next message")),
            };
            let heard = header.and_then(|header| {
                self.check(peer, &header)?;
                self.hear(peer, header, resend)
            });
            match heard {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    // Records the error before the end: a call that sees the end, and no error, would report that the
                    // peer died.
                    if !self.lock().is_closing {
                        self.fail(error);
                    }
                    self.end(peer, PeerFault::Died);
                    return;
                }
            }
        }
    }

    /// Waits for the next header. Keeps receives posted for the headers after it.
    fn next_header(
        &self,
        peer: usize,
        posted: &mut VecDeque<Box<dyn Receiving>>,
    ) -> Result<Vec<u8>, CarrierError> {
        while posted.len() < HEADERS_AHEAD {
            match self.carrier.receive(self.peer(peer), Lane::Headers, HEADER_BYTES) {
                Ok(receive) => posted.push_back(receive),
                Err(error) if posted.is_empty() => return Err(error),
                // What the peer sent before its connection closed still arrives.
                Err(_) => break,
            }
        }
        let first = posted.pop_front().expect("the loop ends early only if a receive is posted");
        first.wait(HEADER_BYTES)
    }

    /// Processes a header. Returns whether another follows.
    fn hear(&self, peer: usize, header: Header, resend: &Resend) -> Result<bool> {
        let lane = match header.kind {
            Kind::Weights | Kind::Resent => WEIGHTS,
            Kind::Gradients => GRADIENTS,
            Kind::Request => {
                resend(self, peer, header.layer as usize)?;
                return Ok(true);
            }
            Kind::Left => {
                self.end(peer, PeerFault::Left);
                return Ok(false);
            }
            Kind::Ask => {
                let wait = {
                    let mut state = self.lock();
                    state.is_asked = !state.waits.is_empty();
                    if state.is_asked { Wait::Blocked } else { Wait::Free }
                };
                self.changed.notify_all();
                self.post_header(peer, self.bare(Kind::Alive(wait)))?;
                return Ok(true);
            }
            Kind::Alive(wait) => {
                self.lock().peers[peer].question.answer(wait);
                self.changed.notify_all();
                return Ok(true);
            }
            Kind::Failure(culprit, fault) => {
                let error = self.told(peer, culprit, fault);
                self.fail_for(error, (culprit, fault));
                self.end(peer, PeerFault::Failed);
                return Ok(false);
            }
        };
        self.lock().peers[peer].lanes[lane].announced.push_back(header);
        self.request_bodies(peer, lane)?;
        Ok(true)
    }

    /// Records that no further message comes from a peer.
    fn end(&self, peer: usize, fault: PeerFault) {
        self.lock().peers[peer].ended.get_or_insert(fault);
        self.changed.notify_all();
    }

    /// Posts receives for announced bodies, and for regular bodies that are not announced yet, as far as the window
    /// allows.
    pub(super) fn request_bodies(&self, peer: usize, lane: usize) -> Result<()> {
        let order = hold(&self.orders[peer].receives[lane]);
        let window = self.setup.windows[lane];
        loop {
            // A header stays announced until its body is requested, so that a peer that has left does not count as
            // exhausted.
            let due = {
                let mut state = self.lock();
                let sends_more = state.peers[peer].ended.is_none() && !state.is_closing;
                let inbox = &mut state.peers[peer].lanes[lane];
                if inbox.pair(window) {
                    self.changed.notify_all();
                }
                match inbox.due(window) {
                    Some(Due::Ahead) if !sends_more => return Ok(()),
                    Some(due) => due,
                    None => return Ok(()),
                }
            };
            let bytes = match due {
                Due::Announced(header) => header.bytes,
                Due::Ahead => window.regular,
            };
            let body_lane = lane_of(lane, bytes <= window.regular);
            match (self.carrier.receive(self.peer(peer), body_lane, bytes as usize), due) {
                (Ok(receive), Due::Announced(header)) => {
                    let inbox = &mut self.lock().peers[peer].lanes[lane];
                    inbox.announced.pop_front();
                    inbox.requested.push_back((header, receive));
                    self.changed.notify_all();
                }
                (Ok(receive), Due::Ahead) => self.lock().peers[peer].lanes[lane].posted.push_back(receive),
                // This need not be an error: the thread `headers` reads the last messages of the peer, and decides.
                (Err(error), Due::Ahead) if !matches!(error, CarrierError::Failed(_)) => return Ok(()),
                (Err(error), _) => {
                    drop(order);
                    return Err(self.fail(self.lost(peer, &error, "the next body")));
                }
            }
        }
    }

    /// Waits for the bodies of a lane.
    pub(super) fn collect(&self, peer: usize, lane: usize) {
        loop {
            let (header, receive) = {
                let mut state = self.lock();
                loop {
                    if state.is_closing {
                        return;
                    }
                    let inbox = &mut state.peers[peer].lanes[lane];
                    if let Some(first) = inbox.requested.pop_front() {
                        inbox.awaited = Some(first.0.layer);
                        break first;
                    }
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            };
            let received =
                receive.wait(header.bytes as usize).map_err(|error| self.lost(peer, &error, noun(lane)));
            let mut state = self.lock();
            let inbox = &mut state.peers[peer].lanes[lane];
            inbox.awaited = None;
            match received {
                Ok(body) => {
                    inbox.arrived[header.layer as usize].push_back(Message { header, body });
                    *state.traffic.received(lane) += header.bytes + HEADER_BYTES as u64;
                    self.changed.notify_all();
                }
                Err(_) if state.is_closing => return,
                Err(error) => {
                    drop(state);
                    self.fail(error);
                    return;
                }
            }
        }
    }
}
