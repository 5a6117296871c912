//! The CPU backend. It needs no GPU and no other library, and its data path is the reference for other backends.
//!
//! Ranks are threads of one process, or processes of one or several machines. All ranks of an NVLink domain can read
//! and write each other's registered memory. Between domains, bytes move only through the [`ep::Transport`] of a rail.
//!
//! `docs/token-path.md` follows a token through these modules; `docs/protocol-host.md` lists every word that ranks
//! share, with its writer, its readers and its memory order.
//!
//! ```
//! use ep::{Backend, BackendExt, CombineInput, Config, DispatchInput, DispatchMode, Routing, World};
//! use ep_host::HostBuffer;
//!
//! # fn main() -> ep::Result<()> {
//! // Two ranks as threads, one NVLink domain, four experts; each rank sends one token to two of them.
//! let world = World::builder().ranks(2).experts(4).build()?;
//! let buffers = HostBuffer::threads(&world, &Config::from_env()?)?;
//! let hidden = 8;
//! let one_rank = |mut buffer: HostBuffer| -> ep::Result<()> {
//!     let routing = Routing::from_topk(buffer.rank(), 4, 2, &[0, 3], &[0.25, 0.75])?;
//!     let mut tokens = buffer.alloc(hidden * 2)?;
//!     buffer.upload(&1.0f32.to_bits().to_le_bytes()[2..].repeat(hidden), &mut tokens)?;
//!
//!     let handle = buffer.preprocess(&routing, DispatchMode::permuted(16)?, None)?;
//!     let received = buffer.dispatch_new(&handle, DispatchInput::new(&tokens, hidden))?;
//!     assert_eq!(buffer.receive_shape(&handle)?.kept_per_expert.iter().sum::<u32>(), 2);
//!     // ... the experts turn received.tokens into their outputs; here they are the identity ...
//!     let combined = buffer.combine_new(&handle, CombineInput::new(&received.tokens, hidden))?;
//!     assert_eq!(combined.tokens.as_bytes()[..2], 2.0f32.to_bits().to_le_bytes()[2..]);
//!     Ok(())
//! };
//! std::thread::scope(|scope| {
//!     let ranks: Vec<_> = buffers.into_iter().map(|buffer| scope.spawn(|| one_rank(buffer))).collect();
//!     ranks.into_iter().try_for_each(|rank| rank.join().expect("a rank does not panic"))
//! })
//! # }
//! ```
//!
//! | module | contents | called by |
//! |---|---|---|
//! | `buffer` | [`HostBuffer`]: the state of a rank and its constructors | the program |
//! | `operators` | [`ep::Backend`] for [`HostBuffer`]: checks arguments, stages memory, starts workers | the program |
//! | `call` | sizes of a dispatch's outputs, checked before the operator starts | `operators` |
//! | `join` | exchanges control blocks and windows between processes | `buffer` |
//! | `preprocess`, `dispatch`, `combine` | the work of each operator, as turns of workers | `operators` |
//! | `schedule` | which chunks and messages of an operator are claimed | `dispatch`, `combine` |
//! | `comm` | entering and finishing an operator, the worker loop | `operators`, the three operators |
//! | `wait` | bounded waiting; finds the rank at fault | `comm`, `preprocess` |
//! | `progress` | what a worker knows while it waits | `wait` |
//! | `published` | how ranks name memory to each other | `control`, `directory`, `memory` |
//! | `pulse` | the heartbeat thread; tells a busy rank from a stopped process | `buffer`, `wait` |
//! | `control` | the control block, and the protocol that makes shared access sound | `comm`, `wait`, `pulse` |
//! | `engine` | the choice of the [`ep::Transport`], from the configuration | `buffer` |
//! | `message` | layout and checks of a message in a slot | the three operators |
//! | `handle` | [`HostHandle`]: the result of preprocess | `operators`, `dispatch`, `combine` |
//! | `directory` | finds the segments of other ranks | `join`, `memory`, `comm` |
//! | `memory` | registered memory and its allocator | `operators`, `comm` |
//! | `processes` | descriptors of peers' memory, status of ranks on other machines, deaths | `join`, `directory`, `wait`, `pulse` |
//! | `status` | the words of a control block that ranks on other machines mirror | `control`, `processes` |
//! | `signature` | the arguments that must be equal on all ranks | `comm`, `operators` |
//! | `weight_rows` | multiplies rows by weights; needs no peer | the program |
//! | `workers` | spreads pieces of work over the workers of one rank | `operators`, `weight_rows` |
//! | `simd` | copies, sums and conversions of rows | `dispatch`, `combine`, `weight_rows` |
//! | [`copies`] | ways to copy memory, for benchmarks | `ep-cli` |
//! | `probe` | latency and bandwidth of an engine, without operators | `ep-cli` |

mod buffer;
mod call;
mod combine;
mod comm;
mod control;
pub mod copies;
mod directory;
mod dispatch;
mod engine;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod handle;
#[cfg(test)]
mod hostile;
mod join;
mod memory;
mod message;
mod operators;
mod preprocess;
#[cfg(feature = "fabric")]
mod probe;
#[cfg_attr(not(target_os = "linux"), path = "processes_unsupported.rs")]
mod processes;
mod progress;
mod published;
mod pulse;
mod schedule;
mod signature;
mod simd;
mod status;
mod wait;
mod weight_rows;
mod workers;

pub use buffer::HostBuffer;
pub use handle::HostHandle;
pub use memory::HostMemory;
#[cfg(feature = "fabric")]
pub use probe::RailProbe;
