//! The host side of rails between NVLink domains: the layout of a rank's rail window, and the proxy thread that moves
//! bytes between the windows of a rail. `docs/cuda-rails.md` describes the memory that kernels and proxies share.
//!
//! | module | contents |
//! |---|---|
//! | `layout` | the offsets of a window, and the limits of the engine |
//! | `window` | access to the words of a window |
//! | `plan` | a proxy's copy of a plan, checked |
//! | `signal` | the bits of a signal |
//! | `send`, `receive` | sending to one peer, and receiving from it |
//! | `losses` | lost peers |
//! | `pump` | one round of the proxy thread |
//! | `proxy` | the thread |
//!
//! Nothing here calls CUDA: the proxy accesses a window as host memory.

mod layout;
mod losses;
mod plan;
mod proxy;
mod pump;
mod receive;
mod send;
mod signal;
#[cfg(test)]
mod tests;
mod window;

pub(crate) use layout::{RailLayout, SIGNALS, limits};
pub(crate) use proxy::Proxy;
pub(crate) use pump::{ProxyParts, Show};
