//! What has come from each peer: announced, requested, arrived.

use std::collections::VecDeque;

use ep::{Operator, PeerFault};

use crate::carrier::{Lane, Transfer};
use crate::header::{Header, Kind};
use crate::question::Question;

/// The lanes of bodies, which index arrays.
pub(crate) const WEIGHTS: usize = 0;
pub(crate) const GRADIENTS: usize = 1;

/// The operator and step of a call, and what it waits for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    pub(crate) operator: Operator,
    pub(crate) step: u64,
    pub(crate) layer: usize,
}

/// A message with its body, of which only the length is known to be right.
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
    /// Why no further message comes from this peer, if so.
    pub(crate) ended: Option<PeerFault>,
    pub(crate) lanes: [Inbox; 2],
    /// Messages under way to this peer.
    pub(crate) sent: VecDeque<Box<dyn Transfer>>,
    /// Those among them that the thread `sent` waits for: 0 or 1.
    pub(crate) awaited: usize,
    /// The question whether this peer is to blame for a wait.
    pub(crate) question: Question,
}

impl Peer {
    /// The reason, if this peer sends nothing more and nothing that it sent is on the way.
    pub(crate) fn is_exhausted(&self) -> Option<PeerFault> {
        let is_empty = |inbox: &Inbox| {
            inbox.announced.is_empty() && inbox.requested.is_empty() && inbox.awaited.is_none()
        };
        self.ended.filter(|_| self.lanes.iter().all(is_empty))
    }
}

/// Bodies of one peer in one lane, which pass through three queues.
#[derive(Default)]
pub(crate) struct Inbox {
    pub(crate) announced: VecDeque<Header>,
    pub(crate) requested: VecDeque<(Header, Box<dyn Transfer>)>,
    /// The layer of the body that the lane's thread waits for.
    pub(crate) awaited: Option<u32>,
    /// The layer that a call waits for. It is requested even if the window is full.
    pub(crate) wanted: Option<u32>,
    /// By layer.
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

    /// Bodies that take memory on this rank.
    pub(crate) fn held(&self) -> usize {
        self.requested.len()
            + usize::from(self.awaited.is_some())
            + self.arrived.iter().map(VecDeque::len).sum::<usize>()
    }

    /// Takes the first message of a layer; of weights, at most those of the call's step, unless complete ones are due.
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

    /// Whether the next announced body is to be requested.
    pub(crate) fn is_open(&self, window: usize) -> bool {
        let Some(wanted) = self.wanted.filter(|_| self.held() >= window) else { return self.held() < window };
        // Bodies come in order, so those before the wanted one are requested as well.
        let is_requested = self.requested.iter().any(|(header, _)| header.layer == wanted);
        let is_announced = self.announced.iter().any(|header| header.layer == wanted);
        is_announced && !is_requested && self.awaited != Some(wanted)
    }
}

pub(crate) fn lane_of(index: usize) -> Lane {
    if index == WEIGHTS { Lane::Weights } else { Lane::Gradients }
}

pub(crate) fn noun(index: usize) -> &'static str {
    if index == WEIGHTS { "weights" } else { "gradients" }
}
