//! The CPU backend: the embedded default, and the executable specification of the operators' data path.
//!
//! A rank is a thread of this process or a process of this machine. Its registered memory can be touched by all
//! ranks of its NVLink domain; between domains there is only the [`ep::Transport`] of its rail.
//!
//! | module | what is there |
//! |---|---|
//! | `buffer` | [`HostBuffer`]: checks the caller's arguments, then runs an operator |
//! | `preprocess`, `dispatch`, `combine` | the operators, as turns that workers take on chunks |
//! | `comm` | what operators share: entering, leaving, waiting with a timeout, naming who is at fault |
//! | `control` | what a rank's peers may know of it, and the protocol that makes touching its memory sound |
//! | `rail`, `loopback`, `message` | streams of messages between domains, their engine, their layout |
//! | `segment`, `memory`, `processes` | memory that ranks share; whose process lives |
//! | `simd` | copies, sums and conversions of rows |

mod buffer;
mod combine;
mod comm;
mod control;
mod dispatch;
mod handle;
mod loopback;
mod memory;
mod message;
mod preprocess;
mod processes;
mod rail;
mod segment;
#[allow(dead_code)]
mod simd;

pub use buffer::HostBuffer;
pub use handle::HostHandle;
pub use memory::HostMemory;
