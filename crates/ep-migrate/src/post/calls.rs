//! What the calls of a rank do with messages: they send one, or take the next.

use std::sync::Arc;

use ep::Result;

use super::{Post, State};
use crate::carrier::Lane;
use crate::header::{HEADER_BYTES, Header, Kind};
use crate::inbox::{Call, GRADIENTS, Message, WEIGHTS, lane_of, noun};

impl Post {
    /// Sends a message. Waits while too many are under way to this peer.
    pub(crate) fn send(
        &self,
        peer: usize,
        call: Call,
        kind: Kind,
        streams: u16,
        body: Arc<Vec<u8>>,
    ) -> Result<()> {
        let lane = if kind == Kind::Gradients { GRADIENTS } else { WEIGHTS };
        let regular = self.setup.windows[lane].regular;
        let (layer, bytes) = (call.layer as u32, body.len() as u64);
        let header = Header { streams, layer, step: call.step, bytes, regular, ..self.bare(kind) };
        let what =
            || format!("the peer to take one of the {} messages under way to it", self.setup.most_sent);
        let room = |state: &mut State| {
            let peer = &state.peers[peer];
            (peer.sent.len() + peer.awaited < self.setup.most_sent).then_some(())
        };
        self.wait(call, what, &[peer], room)?;
        let body_lane = lane_of(lane, bytes <= regular);
        let header = Arc::new(header.to_bytes());
        self.post(peer, [(Lane::Headers, header), (body_lane, body)])?;
        *self.lock().traffic.sent(lane) += bytes + HEADER_BYTES as u64;
        Ok(())
    }

    /// Asks a peer for complete weights of a layer.
    pub(crate) fn request(&self, peer: usize, call: Call) -> Result<()> {
        let header = Header { layer: call.layer as u32, step: call.step, ..self.bare(Kind::Request) };
        self.lock().peers[peer].lanes[WEIGHTS].recovers[call.layer] = true;
        self.post_header(peer, header)
    }

    /// Takes the next message of a layer from any of these peers, but no weights of a step after the call's. Waits
    /// until such a message has arrived.
    pub(crate) fn next(&self, call: Call, lane: usize, peers: &[usize]) -> Result<(usize, Message)> {
        let what = || {
            let from = peers.iter().map(|&peer| self.peer(peer).to_string()).collect::<Vec<_>>().join(", ");
            format!("{} of layer {} from rank {from}", noun(lane), call.layer)
        };
        let want = |wanted| {
            let mut state = self.lock();
            peers.iter().for_each(|&peer| state.peers[peer].lanes[lane].wanted = wanted);
        };
        want(Some(call.layer as u32));
        peers.iter().try_for_each(|&peer| self.request_bodies(peer, lane))?;
        let taken = |state: &mut State| {
            peers.iter().find_map(|&peer| Some((peer, state.peers[peer].lanes[lane].take(call, lane)?)))
        };
        let found = self.wait(call, what, peers, taken);
        want(None);
        let found = found?;
        self.request_bodies(found.0, lane)?;
        Ok(found)
    }

    /// Takes the next message with gradients of a layer from a peer. Waits until a message whose step `is_due` has
    /// arrived, or until `is_wanted` returns false: then the result is `None`. [`wake`](Self::wake) makes the wait
    /// check `is_wanted`.
    pub(crate) fn next_while(
        &self,
        call: Call,
        peer: usize,
        waited_for: impl Fn() -> String,
        is_wanted: impl Fn() -> bool,
        is_due: impl Fn(u64) -> bool,
    ) -> Result<Option<Message>> {
        let taken = |state: &mut State| {
            if !is_wanted() {
                return Some(None);
            }
            let inbox = &mut state.peers[peer].lanes[GRADIENTS];
            inbox.arrived[call.layer].front().filter(|message| is_due(message.header.step))?;
            inbox.take(call, GRADIENTS).map(Some)
        };
        let found = self.wait(call, waited_for, &[peer], taken)?;
        self.request_bodies(peer, GRADIENTS)?;
        Ok(found)
    }

    /// Takes the next message of a layer from a peer if it has arrived, but no weights of a step after the call's.
    pub(crate) fn try_next(&self, call: Call, lane: usize, peer: usize) -> Result<Option<Message>> {
        let message = self.lock().peers[peer].lanes[lane].take(call, lane);
        self.request_bodies(peer, lane)?;
        Ok(message)
    }
}
