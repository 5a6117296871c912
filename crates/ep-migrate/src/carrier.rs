//! The carrier: what moves messages between two ranks. The runtime has no transport of its own.

use std::fmt;
use std::sync::Arc;

use ep::Rank;

/// One of the ordered streams of messages between two ranks. Lanes do not wait for each other.
///
/// Bodies of each kind have two lanes: one for regular bodies, one for longer ones. Receivers post receives for regular
/// bodies, whose length has a bound, before the headers arrive. A longer body would not fit such a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Lane {
    /// Headers of all messages.
    Headers = 0,
    /// Regular bodies of messages with weights.
    Weights = 1,
    /// Regular bodies of messages with gradients.
    Gradients = 2,
    /// Longer bodies of messages with weights.
    LongWeights = 3,
    /// Longer bodies of messages with gradients.
    LongGradients = 4,
}

impl Lane {
    /// All lanes.
    pub const ALL: [Self; 5] =
        [Self::Headers, Self::Weights, Self::Gradients, Self::LongWeights, Self::LongGradients];
}

/// Moves messages between this rank and the others.
///
/// Messages of one pair and lane arrive in the order in which they were sent, and the k-th receive takes the k-th
/// message. A message is at most as long as the capacity of its receive. Both calls start a transfer and return at
/// once, so that many transfers can be under way; any thread may wait for them, in any order.
pub trait Carrier: Send + Sync + fmt::Debug {
    /// Starts to send a message. The carrier keeps it until the receiver has it.
    ///
    /// # Errors
    /// [`CarrierError`] if the connection is closed or the carrier cannot send.
    fn send(&self, to: Rank, lane: Lane, message: Arc<Vec<u8>>) -> Result<Box<dyn Sending>, CarrierError>;

    /// Starts to receive a message of at most `capacity` bytes.
    ///
    /// # Errors
    /// [`CarrierError`] if the connection is closed or the carrier cannot receive.
    fn receive(&self, from: Rank, lane: Lane, capacity: usize) -> Result<Box<dyn Receiving>, CarrierError>;

    /// Closes all connections of this rank. Every wait for a transfer ends, on this rank and on its peers. A message that
    /// was sent before still arrives if its receive is posted and the peer takes it soon; others are lost.
    fn abort(&self);
}

impl<C: Carrier + ?Sized> Carrier for Arc<C> {
    fn send(&self, to: Rank, lane: Lane, message: Arc<Vec<u8>>) -> Result<Box<dyn Sending>, CarrierError> {
        (**self).send(to, lane, message)
    }

    fn receive(&self, from: Rank, lane: Lane, capacity: usize) -> Result<Box<dyn Receiving>, CarrierError> {
        (**self).receive(from, lane, capacity)
    }

    fn abort(&self) {
        (**self).abort();
    }
}

/// A message on the way to a peer.
pub trait Sending: Send + fmt::Debug {
    /// Waits until the message is sent, without a time limit: [`Carrier::abort`] ends the wait.
    ///
    /// # Errors
    /// [`CarrierError`] if the connection is closed before that.
    fn wait(self: Box<Self>) -> Result<(), CarrierError>;
}

/// A receive that is posted.
pub trait Receiving: Send + fmt::Debug {
    /// Waits until the message has arrived, without a time limit: [`Carrier::abort`] ends the wait. Returns the
    /// message. By now the caller knows its length, `bytes`; a carrier need not know it. If the message has a different
    /// length, the result is an error, or `bytes` bytes of undefined content.
    ///
    /// # Errors
    /// [`CarrierError`] if the connection is closed before that.
    fn wait(self: Box<Self>, bytes: usize) -> Result<Vec<u8>, CarrierError>;
}

/// Why a carrier could not move a message.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CarrierError {
    /// The connection is closed: the peer's process has ended, or one side called [`Carrier::abort`].
    Closed,
    /// The network does not reach the peer.
    Unreachable,
    /// The peer has sent what no correct carrier sends.
    Broken(String),
    /// Any other reason, in the words of the carrier.
    Failed(String),
}

impl fmt::Display for CarrierError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("the connection is closed"),
            Self::Unreachable => f.write_str("the network does not reach the peer"),
            Self::Broken(reason) | Self::Failed(reason) => f.write_str(reason),
        }
    }
}

impl std::error::Error for CarrierError {}
