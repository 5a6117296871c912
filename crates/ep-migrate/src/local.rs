//! A carrier between threads of one process.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use ep::Rank;

use crate::carrier::{Carrier, CarrierError, Lane, Receiving, Sending};

/// Connects the ranks of one process, each of which may run on a thread of its own.
///
/// ```
/// use ep::Rank;
/// use ep_migrate::{Carrier, Lane, LocalNetwork};
///
/// let network = LocalNetwork::new();
/// let (one, two) = (network.carrier(Rank(1)), network.carrier(Rank(2)));
/// one.send(Rank(2), Lane::Headers, b"hello".to_vec().into())?;
/// assert_eq!(two.receive(Rank(1), Lane::Headers, 8)?.wait(5)?, b"hello");
/// # Ok::<(), ep_migrate::CarrierError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct LocalNetwork {
    wires: Arc<Wires>,
}

#[derive(Debug, Default)]
struct Wires {
    state: Mutex<State>,
    changed: Condvar,
}

/// Sender, receiver and lane.
type Key = (Rank, Rank, Lane);

#[derive(Debug, Default)]
struct State {
    queues: HashMap<Key, Queue>,
    closed: Vec<Rank>,
}

#[derive(Debug, Default)]
struct Queue {
    /// Messages from number `first` on; `None` for those that were received.
    messages: VecDeque<Option<Arc<Vec<u8>>>>,
    first: u64,
    /// The number of the next receive.
    posted: u64,
}

impl Queue {
    /// Takes the message with this number, if it was sent.
    fn take(&mut self, number: u64) -> Option<Arc<Vec<u8>>> {
        let at = usize::try_from(number - self.first).ok()?;
        let message = self.messages.get_mut(at)?.take();
        while matches!(self.messages.front(), Some(None)) {
            self.messages.pop_front();
            self.first += 1;
        }
        message
    }
}

impl LocalNetwork {
    /// A network without ranks.
    pub fn new() -> Self {
        Self::default()
    }

    /// The carrier of a rank.
    pub fn carrier(&self, rank: Rank) -> LocalCarrier {
        LocalCarrier { rank, wires: self.wires.clone() }
    }
}

impl Wires {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One rank's end of a [`LocalNetwork`].
#[derive(Debug, Clone)]
pub struct LocalCarrier {
    rank: Rank,
    wires: Arc<Wires>,
}

impl Carrier for LocalCarrier {
    fn send(&self, to: Rank, lane: Lane, message: Arc<Vec<u8>>) -> Result<Box<dyn Sending>, CarrierError> {
        let mut state = self.wires.lock();
        if state.closed.contains(&self.rank) || state.closed.contains(&to) {
            return Err(CarrierError::Closed);
        }
        state.queues.entry((self.rank, to, lane)).or_default().messages.push_back(Some(message));
        self.wires.changed.notify_all();
        Ok(Box::new(Sent))
    }

    fn receive(&self, from: Rank, lane: Lane, capacity: usize) -> Result<Box<dyn Receiving>, CarrierError> {
        let key = (from, self.rank, lane);
        let mut state = self.wires.lock();
        let queue = state.queues.entry(key).or_default();
        let number = queue.posted;
        queue.posted += 1;
        Ok(Box::new(Awaited { key, number, capacity, wires: self.wires.clone() }))
    }

    fn abort(&self) {
        self.wires.lock().closed.push(self.rank);
        self.wires.changed.notify_all();
    }
}

/// The network keeps messages, so a message is sent at once.
#[derive(Debug)]
struct Sent;

impl Sending for Sent {
    fn wait(self: Box<Self>) -> Result<(), CarrierError> {
        Ok(())
    }
}

#[derive(Debug)]
struct Awaited {
    key: Key,
    number: u64,
    capacity: usize,
    wires: Arc<Wires>,
}

impl Receiving for Awaited {
    fn wait(self: Box<Self>, bytes: usize) -> Result<Vec<u8>, CarrierError> {
        let (from, to, _) = self.key;
        let mut state = self.wires.lock();
        loop {
            if state.closed.contains(&to) {
                return Err(CarrierError::Closed);
            }
            if let Some(message) = state.queues.get_mut(&self.key).and_then(|queue| queue.take(self.number)) {
                if message.len() != bytes || bytes > self.capacity {
                    let (found, room) = (message.len(), self.capacity);
                    let text = format!("a message of {found} bytes instead of {bytes}, with room for {room}");
                    return Err(CarrierError::Failed(text));
                }
                return Ok(message.to_vec());
            }
            // A message that was sent before its sender closed still arrives.
            if state.closed.contains(&from) {
                return Err(CarrierError::Closed);
            }
            state = self.wires.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
