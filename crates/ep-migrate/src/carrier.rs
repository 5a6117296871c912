//! The carrier: what moves messages between two ranks. The runtime has no transport of its own.

use std::fmt;
use std::sync::Arc;

use ep::Rank;

/// One of the ordered streams of messages between two ranks. Lanes do not wait for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Lane {
    /// Headers of all messages.
    Headers = 0,
    /// Bodies of messages with weights.
    Weights = 1,
    /// Bodies of messages with gradients.
    Gradients = 2,
}

impl Lane {
    /// All lanes.
    pub const ALL: [Self; 3] = [Self::Headers, Self::Weights, Self::Gradients];
}

/// Moves messages between this rank and the others.
///
/// Messages of one pair and lane arrive in the order in which they were sent, and the k-th receive takes the k-th
/// message. A receive knows the length of its message in advance. Both calls start a transfer and return at once, so
/// that many transfers can be under way; any thread may wait for them.
pub trait Carrier: Send + Sync + fmt::Debug {
    /// Starts to send a message. The carrier keeps it until the receiver has it.
    ///
    /// # Errors
    /// [`CarrierError`] if the connection is closed or the carrier cannot send.
    fn send(&self, to: Rank, lane: Lane, message: Arc<Vec<u8>>) -> Result<Box<dyn Transfer>, CarrierError>;

    /// Starts to receive a message of `bytes` bytes.
    ///
    /// # Errors
    /// [`CarrierError`] if the connection is closed or the carrier cannot receive.
    fn receive(&self, from: Rank, lane: Lane, bytes: usize) -> Result<Box<dyn Transfer>, CarrierError>;

    /// Closes all connections of this rank. Every wait for a transfer ends, on this rank and on its peers.
    fn abort(&self);
}

/// A message under way.
pub trait Transfer: Send + fmt::Debug {
    /// Waits until the message is sent or has arrived, without a time limit: [`Carrier::abort`] ends the wait. Returns the
    /// message that arrived; nothing for a message that was sent.
    ///
    /// # Errors
    /// [`CarrierError`] if the connection is closed before the transfer is complete.
    fn wait(self: Box<Self>) -> Result<Vec<u8>, CarrierError>;
}

/// Why a carrier could not move a message.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CarrierError {
    /// The connection is closed: the peer's process has ended, or one side called [`Carrier::abort`].
    Closed,
    /// Any other reason, in the words of the carrier.
    Failed(String),
}

impl fmt::Display for CarrierError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("the connection is closed"),
            Self::Failed(reason) => f.write_str(reason),
        }
    }
}

impl std::error::Error for CarrierError {}
