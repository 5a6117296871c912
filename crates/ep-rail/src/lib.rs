//! What every backend needs to move bytes between NVLink domains: memory that engines can register, and engines.
//!
//! `docs/rails.md` has the rules of engines. The backend decides what the bytes mean and when a rank may send them.
//!
//! | module | contents |
//! |---|---|
//! | `segment` | [`Segment`]: mapped memory that other ranks can access; a window of a rail |
//! | `loopback` | [`Loopback`]: the [`ep::Transport`] for ranks of one machine |
//! | `paced` | [`Paced`]: `loopback` with the bandwidth and the latency of an emulated link |
//! | `fabric` | [`open_fabric`]: opens an engine over libfabric; an error without the feature `fabric` |
//! | `streams` | [`Streams`]: messages in slots, with credits, over any engine; [`open_streams`]: opens the engine for them |
//! | `rail` | [`rail_of`]: the ranks of a rail; [`connect_rail`]: connects an engine with them; the error for a peer that breaks its protocol |

mod fabric;
mod loopback;
mod paced;
mod rail;
mod segment;
mod streams;
#[cfg(test)]
mod testing;

pub use fabric::{RankPlace, open_fabric, open_fabric_over, registers_gpu_memory};
pub use loopback::Loopback;
pub use paced::{Carry, InHostMemory, Paced};
pub use rail::{broken, connect_rail, rail_of};
pub use segment::Segment;
pub use streams::{ClaimedSlot, Streams, WindowLayout, needs_blobs, open_streams};
