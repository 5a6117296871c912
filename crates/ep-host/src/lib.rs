//! The CPU backend: the embedded default, and the executable specification of the operators' data path.
//!
//! A rank is a thread of this process or a process of this machine. Its registered memory can be touched by all
//! ranks of its NVLink domain; between domains there is only the [`ep::Transport`] of its rail.
//!
//! ```
//! use ep::{Backend, BackendExt, CombineInput, Config, DispatchInput, DispatchMode, Routing, World};
//! use ep_host::HostBuffer;
//!
//! # fn main() -> ep::Result<()> {
//! // Two ranks as threads, one NVLink domain, four experts; each rank sends one token to two of them.
//! let buffers = HostBuffer::threads(World::new(2, 1, 4)?, &Config::from_env()?)?;
//! let hidden = 8;
//! std::thread::scope(|scope| {
//!     for mut buffer in buffers {
//!         scope.spawn(move || -> ep::Result<()> {
//!             let routing = Routing::from_topk(buffer.rank(), 4, 2, &[0, 3], &[0.25, 0.75])?;
//!             let mut tokens = buffer.alloc(hidden * 2)?;
//!             buffer.upload(&1.0f32.to_bits().to_le_bytes()[2..].repeat(hidden), &mut tokens)?;
//!
//!             let handle = buffer.preprocess(&routing, DispatchMode::permuted(16)?, None)?;
//!             let received = buffer.dispatch_new(&handle, DispatchInput::bf16(hidden, &tokens))?;
//!             assert_eq!(buffer.receive_shape(&handle)?.kept_per_expert.iter().sum::<u32>(), 2);
//!             // ... the experts turn received.tokens into their outputs; here they are the identity ...
//!             let combined = buffer.combine_new(&handle, 1, CombineInput::bf16(hidden, &received.tokens))?;
//!             assert_eq!(combined.tokens.as_bytes()[..2], 2.0f32.to_bits().to_le_bytes()[2..]);
//!             Ok(())
//!         });
//!     }
//! });
//! # Ok(())
//! # }
//! ```
//!
//! | module | what is there |
//! |---|---|
//! | `buffer` | [`HostBuffer`]: checks the caller's arguments, then runs an operator |
//! | `join`, `call` | how ranks find each other; the arguments of a call, checked before anything is sent |
//! | `preprocess`, `dispatch`, `combine` | the operators, as turns that workers take on chunks |
//! | `schedule` | what the workers of an operator have taken, and what is left |
//! | `comm` | what operators share: entering, leaving, waiting with a timeout, naming who is at fault |
//! | `control` | what a rank's peers may know of it, and the protocol that makes touching its memory sound |
//! | `rail`, `loopback`, `message` | streams of messages between domains, their engine, their layout |
//! | `segment`, `memory`, `processes` | memory that ranks share; whose process lives |
//! | `weight_rows`, `workers` | experts' outputs times their weights, beside the operators; work of one rank alone |
//! | `simd` | copies, sums and conversions of rows |

mod buffer;
mod call;
mod combine;
mod comm;
mod control;
mod dispatch;
mod handle;
mod join;
mod loopback;
mod memory;
mod message;
mod preprocess;
mod processes;
mod rail;
mod schedule;
mod segment;
mod simd;
mod weight_rows;
mod workers;

pub use buffer::HostBuffer;
pub use handle::HostHandle;
pub use memory::HostMemory;
