//! What every backend needs to move bytes between NVLink domains: memory that engines can register, and engines.
//!
//! `docs/rails.md` has the rules of engines. What the bytes mean, and when a rank may send them, is the business of the
//! backend.
//!
//! | module | contents |
//! |---|---|
//! | `segment` | [`Segment`]: mapped memory that other ranks can access; a window of a rail |
//! | `loopback` | [`Loopback`]: the [`ep::Transport`] for ranks of one machine |
//! | `rail` | the error for a peer that breaks a rail's protocol |

mod loopback;
mod rail;
mod segment;

pub use loopback::Loopback;
pub use rail::broken;
pub use segment::Segment;
