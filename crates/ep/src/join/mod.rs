//! How ranks join a job: they prove to each other that they know the job secret, and exchange settings and addresses
//! before they share memory.
//!
//! | module | content |
//! |---|---|
//! | `tcp`, `threads` | `TcpRendezvous` and `ThreadRendezvous`, the implementations of `Rendezvous` |
//! | `joining` | the steps in which a rank of any backend joins its world |
//! | `secret` | the job secret, and the keys derived from it |
//! | `store` | the address where rank 0 listens: a TCP port, or without a secret a socket of this user and machine |
//! | `local` | sockets between processes of one user on one machine |
//! | `handshake` | how the two ends of a connection authenticate each other |
//! | `reception` | the unauthenticated connections of a listener, bounded in number and time |
//! | `channel` | authenticated, numbered messages on a connection |
//! | `wire` | the non-blocking socket of a channel |
//! | `hub`, `spoke` | the rendezvous: rank 0 has the hub, and every other rank has a spoke that connects to it |
//! | `note` | the messages between hub and spokes, and `Loss`: which rank is lost, and why |
//! | `machine`, `machines` | which ranks share memory, and how ranks that do not share memory reach each other |
//! | `network` | TCP connections between machines, and the network address of this machine |
//! | `links` | connects sockets between all pairs of ranks |
//! | `link` | one such socket; between ranks of one machine it carries descriptors of memory |
//! | `snapshot` | a link between machines that carries snapshots of this rank's state |
//!
//! `SECURITY.md` says what this module guarantees and what it does not; `docs/joining.md` describes the protocol.

#[cfg(unix)]
mod channel;
#[cfg(all(feature = "fuzzing", target_os = "linux"))]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(unix)]
mod handshake;
#[cfg(unix)]
mod hub;
#[cfg(target_os = "linux")]
mod joining;
#[cfg(target_os = "linux")]
mod link;
#[cfg(target_os = "linux")]
mod links;
#[cfg(target_os = "linux")]
mod local;
#[cfg(target_os = "linux")]
mod machine;
mod machines;
#[cfg(target_os = "linux")]
mod network;
#[cfg(unix)]
mod note;
#[cfg(unix)]
mod reception;
mod secret;
#[cfg(target_os = "linux")]
mod snapshot;
#[cfg(unix)]
mod spoke;
#[cfg(unix)]
mod store;
#[cfg(unix)]
mod tcp;
#[cfg(all(test, target_os = "linux"))]
mod tests;
mod threads;
#[cfg(unix)]
mod wire;

#[cfg(target_os = "linux")]
pub use joining::{Introduction, Joining, Met, Setting, join};
#[cfg(target_os = "linux")]
pub use link::{Link, LinkEvent, LinkReceiver, LinkSender};
#[cfg(target_os = "linux")]
pub use links::{Door, Invitation, Links, NoInvitation};
#[cfg(target_os = "linux")]
pub use machine::{Machine, NoMachine};
pub use machines::Machines;
#[cfg(target_os = "linux")]
pub use network::{address_of, address_towards};
pub use secret::Secret;
#[cfg(target_os = "linux")]
pub use snapshot::SnapshotLink;
#[cfg(unix)]
pub use tcp::{Member, TcpRendezvous};
pub use threads::ThreadRendezvous;

use std::net::IpAddr;
#[cfg(unix)]
use std::time::Instant;

#[cfg(unix)]
use crate::error::{CallerError, Operator};
use crate::error::{Error, Result};
#[cfg(unix)]
use crate::interrupt::Interrupt;
use crate::topology::Rank;

/// The largest blob of a rendezvous, in bytes.
pub const MAX_BLOB: usize = 64 << 20;

/// The place where the ranks of a job meet and exchange blobs.
pub trait Rendezvous {
    /// This rank.
    fn rank(&self) -> Rank;

    /// Number of ranks.
    fn ranks(&self) -> usize;

    /// Sends `blob`, at most [`MAX_BLOB`] bytes, to all ranks and returns the blobs of all ranks in rank order.
    /// Collective.
    ///
    /// # Errors
    /// [`PeerError`](crate::PeerError) that names a rank which is absent, late or lost.
    fn all_gather(&mut self, blob: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// Leaves the job because of `error`, and tells the other ranks, so that all report the same rank at fault.
    ///
    /// Returns the error to report: `error`, or an error that names a rank which was lost earlier. After this call, no
    /// exchange succeeds. The default implementation tells no rank and returns `error`.
    fn abandon(&mut self, error: Error) -> Error {
        error
    }

    /// An error that names a rank which was lost since the last exchange, if this rank has learned of one. Does not wait.
    /// A rank calls this while it waits for other ranks outside the rendezvous. The default implementation returns `None`.
    fn lost(&mut self) -> Option<Error> {
        None
    }

    /// The job secret, if the ranks have one in common.
    fn secret(&self) -> Option<&Secret> {
        None
    }

    /// The network address of this machine from which this rank reaches the rendezvous; `None` if the rendezvous has no
    /// network address. Ranks of other machines connect to the address of this machine.
    fn network_address(&self) -> Option<IpAddr> {
        None
    }
}

/// Lets the program end a wait of this rank.
#[derive(Debug, Clone)]
#[cfg(unix)]
struct Watch {
    rank: Rank,
    interrupt: Interrupt,
}

#[cfg(unix)]
impl Watch {
    /// Returns [`CallerError::Interrupted`] if the program asks to stop waiting.
    fn check(&self) -> Result<()> {
        if !self.interrupt.asked() {
            return Ok(());
        }
        let (operator, waited_for) = (Operator::Join, "the other ranks".into());
        Err(CallerError::Interrupted { operator, rank: self.rank, waited_for }.into())
    }

    /// The time of the next [`check`](Self::check), at most `deadline`.
    fn until(&self, deadline: Instant) -> Instant {
        if self.interrupt.is_set() { deadline.min(Instant::now() + Interrupt::EVERY) } else { deadline }
    }
}
