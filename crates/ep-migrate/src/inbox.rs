//! Messages of each peer: announced, requested, arrived.

use std::collections::VecDeque;

use ep::{Operator, PeerFault};

use crate::carrier::{Lane, Receiving, Sending};
use crate::header::{Header, Kind};
use crate::question::Question;

/// The kinds of bodies, which index arrays.
pub(crate) const WEIGHTS: usize = 0;
pub(crate) const GRADIENTS: usize = 1;

/// The operator and step of a call, and the layer whose messages it sends or waits for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    pub(crate) operator: Operator,
    pub(crate) step: u64,
    pub(crate) layer: usize,
}

/// A message with its body. Of the body, only the length has been checked.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) header: Header,
    pub(crate) body: Vec<u8>,
}

/// Bytes of messages, headers included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes of weights that this rank sent.
    pub weights_sent: u64,
    /// Bytes of weights that this rank received.
    pub weights_received: u64,
    /// Bytes of gradients that this rank sent.
    pub gradients_sent: u64,
    /// Bytes of gradients that this rank received.
    pub gradients_received: u64,
}

#[derive(Default)]
pub(crate) struct Peer {
    /// Why this peer sends no further message. `None` while it may send one.
    pub(crate) ended: Option<PeerFault>,
    pub(crate) lanes: [Inbox; 2],
    /// Transfers under way to this peer, except the one that the thread `sent` waits for.
    pub(crate) sent: VecDeque<Box<dyn Sending>>,
    /// Number of transfers that the thread `sent` waits for: 0 or 1.
    pub(crate) awaited: usize,
    /// The question whether this peer is to blame for a wait.
    pub(crate) question: Question,
}

impl Peer {
    /// The reason why no further message arrives from this peer: it sends nothing more, and nothing that it sent is on
    /// the way.
    pub(crate) fn is_exhausted(&self) -> Option<PeerFault> {
        let is_empty = |inbox: &Inbox| {
            inbox.announced.is_empty() && inbox.requested.is_empty() && inbox.awaited.is_none()
        };
        self.ended.filter(|_| self.lanes.iter().all(is_empty))
    }
}

/// Which bodies of a kind a rank receives ahead of the call that takes them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    /// Maximum number of bytes of a regular body, the same on all ranks.
    pub(crate) regular: u64,
    /// Maximum number of bodies of one peer that are requested or held.
    pub(crate) bodies: usize,
    /// Maximum number of receives from one peer that are posted before their headers arrive. Each takes memory for a
    /// regular body.
    pub(crate) posted: usize,
}

/// A receive that an inbox needs next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Due {
    /// The receive of the first announced body.
    Announced(Header),
    /// The receive of a regular body that is not announced yet.
    Ahead,
}

/// Bodies of one peer and kind, which pass through three queues.
#[derive(Default)]
pub(crate) struct Inbox {
    /// Receives of regular bodies that are not announced yet.
    pub(crate) posted: VecDeque<Box<dyn Receiving>>,
    /// Whether a header of the peer has shown that the peer computes the same bound on regular bodies.
    pub(crate) agrees: bool,
    pub(crate) announced: VecDeque<Header>,
    pub(crate) requested: VecDeque<(Header, Box<dyn Receiving>)>,
    /// The layer of the body that the lane's thread waits for.
    pub(crate) awaited: Option<u32>,
    /// The layer that a call waits for. Its body is requested even if the window is full.
    pub(crate) wanted: Option<u32>,
    /// Indexed by layer.
    pub(crate) arrived: Vec<VecDeque<Message>>,
    /// By layer: the step of the next message.
    pub(crate) next_step: Vec<u64>,
    /// By layer: whether complete weights were asked for and have not been taken. They may be of a later step.
    pub(crate) recovers: Vec<bool>,
}

impl Traffic {
    pub(crate) fn sent(&mut self, lane: usize) -> &mut u64 {
        if lane == WEIGHTS { &mut self.weights_sent } else { &mut self.gradients_sent }
    }

    pub(crate) fn received(&mut self, lane: usize) -> &mut u64 {
        if lane == WEIGHTS { &mut self.weights_received } else { &mut self.gradients_received }
    }
}

impl Inbox {
    pub(crate) fn new(layers: usize, first_step: u64) -> Self {
        Self {
            arrived: (0..layers).map(|_| VecDeque::new()).collect(),
            next_step: vec![first_step; layers],
            recovers: vec![false; layers],
            ..Self::default()
        }
    }

    /// Number of bodies that take memory on this rank, not counting receives that are posted ahead.
    pub(crate) fn held(&self) -> usize {
        self.requested.len()
            + usize::from(self.awaited.is_some())
            + self.arrived.iter().map(VecDeque::len).sum::<usize>()
    }

    /// Takes the first message of a layer. Weights of a step after the call's stay, unless complete weights are due.
    pub(crate) fn take(&mut self, call: Call, lane: usize) -> Option<Message> {
        let first = &self.arrived[call.layer].front()?.header;
        if lane == WEIGHTS && first.step > call.step && !self.recovers[call.layer] {
            return None;
        }
        if first.kind == Kind::Resent {
            self.recovers[call.layer] = false;
        }
        self.arrived[call.layer].pop_front()
    }

    /// Pairs announced bodies with receives that were posted ahead. Returns whether there was such a pair.
    pub(crate) fn pair(&mut self, window: Window) -> bool {
        let before = self.announced.len();
        while let Some(&header) = self.announced.front()
            && header.bytes <= window.regular
            && let Some(receive) = self.posted.pop_front()
        {
            self.announced.pop_front();
            self.requested.push_back((header, receive));
        }
        self.announced.len() < before
    }

    /// The receive to post next, after [`pair`](Self::pair).
    pub(crate) fn due(&self, window: Window) -> Option<Due> {
        if let Some(&header) = self.announced.front() {
            return self.is_open(window.bodies).then_some(Due::Announced(header));
        }
        let posted = self.posted.len();
        let has_room = posted < window.posted && posted.saturating_add(self.held()) < window.bodies;
        (self.agrees && has_room).then_some(Due::Ahead)
    }

    /// Whether the next announced body is to be requested.
    fn is_open(&self, window: usize) -> bool {
        let Some(wanted) = self.wanted.filter(|_| self.held() >= window) else { return self.held() < window };
        // Bodies come in order, so those before the wanted one are requested as well.
        let is_requested = self.requested.iter().any(|(header, _)| header.layer == wanted);
        let is_announced = self.announced.iter().any(|header| header.layer == wanted);
        is_announced && !is_requested && self.awaited != Some(wanted)
    }
}

/// The lane of a body.
pub(crate) fn lane_of(index: usize, is_regular: bool) -> Lane {
    match (index, is_regular) {
        (WEIGHTS, true) => Lane::Weights,
        (WEIGHTS, false) => Lane::LongWeights,
        (_, true) => Lane::Gradients,
        (_, false) => Lane::LongGradients,
    }
}

pub(crate) fn noun(index: usize) -> &'static str {
    if index == WEIGHTS { "weights" } else { "gradients" }
}
