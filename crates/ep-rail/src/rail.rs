//! What the engine of a rail and the layer above it share.

use ep::{Error, Operator, PeerError, Rank};

/// The error for a `peer` that violates the protocol of its rail: `rank` found `what` from it. An engine does not know
/// the current operator, so the error has [`Operator::Join`] and step 0, and the operator that polls replaces both.
pub fn broken(rank: Rank, peer: Rank, what: impl Into<String>) -> Error {
    PeerError::broken(rank, peer, Operator::Join, 0, what).into()
}
