//! Messages on the way to one peer: which part is sent next.
//!
//! A message is sent only after the peer has posted its receive, so that the peer has memory for it. So the numbers of
//! posted receives travel first. A part of headers goes before bodies, and bodies of different lanes take turns: a long
//! body delays no other lane by more than the parts that are already in slots.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use ep_migrate::{CarrierError, Lane};

use crate::part::LANES;
use crate::transfer::Promise;

/// A message that waits to be sent.
#[derive(Debug)]
pub(crate) struct Letter {
    pub(crate) message: Arc<Vec<u8>>,
    pub(crate) sent: Promise<()>,
}

/// The next part.
#[derive(Debug)]
pub(crate) enum Next {
    /// A part of a message. The last part has the promise, to be completed when the peer has the part.
    Message { lane: Lane, message: Arc<Vec<u8>>, range: Range<usize>, sent: Option<Promise<()>> },
    /// The numbers of receives that this rank has posted, by lane.
    Posted([u64; LANES]),
}

/// The messages to one peer.
#[derive(Debug, Default)]
pub(crate) struct Outgoing {
    queues: [Queue; LANES],
    /// Receives that this rank has posted, by lane, and those of which the peer was told.
    posted: [u64; LANES],
    told: [u64; LANES],
    /// The lane after that of the last part of a body.
    turn: usize,
}

#[derive(Debug, Default)]
struct Queue {
    letters: VecDeque<Letter>,
    /// Bytes of the first letter that were taken.
    taken: usize,
    /// Messages of which a part was taken.
    begun: u64,
    /// Receives that the peer has posted.
    allowed: u64,
    /// Whether a part of the first letter was taken.
    is_begun: bool,
}

impl Queue {
    fn is_ready(&self) -> bool {
        !self.letters.is_empty() && (self.is_begun || self.begun < self.allowed)
    }
}

impl Outgoing {
    /// Adds a message.
    pub(crate) fn push(&mut self, lane: Lane, letter: Letter) {
        self.queues[lane as usize].letters.push_back(letter);
    }

    /// Counts a receive that this rank has posted.
    pub(crate) fn count_receive(&mut self, lane: Lane) {
        self.posted[lane as usize] += 1;
    }

    /// Records how many receives the peer has posted.
    ///
    /// # Errors
    /// What no correct peer sends.
    pub(crate) fn allow(&mut self, counts: [u64; LANES]) -> Result<(), String> {
        for (queue, count) in self.queues.iter_mut().zip(counts) {
            if count < queue.allowed {
                return Err(format!("{count} posted receives after {}", queue.allowed));
            }
            queue.allowed = count;
        }
        Ok(())
    }

    /// Whether [`next`](Self::next) would return a part.
    pub(crate) fn has_next(&self) -> bool {
        self.posted != self.told || self.queues.iter().any(Queue::is_ready)
    }

    /// Takes the next part, of at most `room` bytes.
    pub(crate) fn next(&mut self, room: usize) -> Option<Next> {
        if self.posted != self.told {
            self.told = self.posted;
            return Some(Next::Posted(self.posted));
        }
        let headers = Lane::Headers as usize;
        let lane = if self.queues[headers].is_ready() {
            headers
        } else {
            let ready =
                (0..LANES).map(|at| (self.turn + at) % LANES).find(|&lane| self.queues[lane].is_ready())?;
            self.turn = (ready + 1) % LANES;
            ready
        };
        let queue = &mut self.queues[lane];
        let first = queue.letters.front().expect("a queue that is ready has a letter");
        let message = Arc::clone(&first.message);
        let range = queue.taken..message.len().min(queue.taken + room);
        if !std::mem::replace(&mut queue.is_begun, true) {
            queue.begun += 1;
        }
        queue.taken = range.end;
        let mut sent = None;
        if range.end == message.len() {
            (queue.taken, queue.is_begun) = (0, false);
            sent = queue.letters.pop_front().map(|letter| letter.sent);
        }
        Some(Next::Message { lane: Lane::ALL[lane], message, range, sent })
    }

    /// Ends all messages with an error.
    pub(crate) fn fail(&mut self, error: &CarrierError) {
        for letter in self.queues.iter_mut().flat_map(|queue| queue.letters.drain(..)) {
            letter.sent.complete(Err(error.clone()));
        }
    }
}
