//! The CUDA backend: preprocess, dispatch and combine between GPUs, one kernel launch each.
//!
//! | module | contents |
//! |---|---|
//! | `buffer`, `operators` | [`CudaBuffer`]: checks arguments, fills in kernel parameters, launches one kernel per operator |
//! | `join`, `links`, `peers` | how ranks meet, and map each other's memory |
//! | `remote`, `notices` | ranks on other machines: mirrors of control blocks; news of ranks, written for the kernels |
//! | `arena`, `memory` | registered memory, which all GPUs of the domain can access |
//! | `streams` | the streams that operators are launched in, and the CUDA graphs that capture them |
//! | `member`, `reaper` | leaving a world, and freeing memory |
//! | `handle`, `routing` | a routing in GPU memory, and the lists that preprocess computes from it |
//! | `weight_rows` | multiplies experts' outputs by their weights |
//! | `dense` | converts a top-k routing to a map and dense probabilities; needs no buffer |
//! | `codec` | [`GpuPlace`]: codecs of experts in GPU memory; needs no buffer |
//! | `tuning` | the division of an operator into pieces, stages and blocks |
//! | `call` | the arguments that must be equal on all ranks, and errors that name a difference |
//! | `rail` | the layout of windows between NVLink domains, and the proxy thread that moves their bytes; calls no driver |
//! | `rails` | a rank's rails: its pinned window, its engine and its proxy |
//! | `lanes` | lanes in GPU memory, and the copies of emulated links |
//! | `beat` | heartbeats of ranks that are processes |
//! | `wait` | interruptible waits for the GPU |
//! | `fault` | converts a kernel's fault report to an error that names the rank at fault |
//! | `params`, `shared`, `mirror` | definitions shared by host and kernels; `device/common/params.cuh` is generated from them |
//! | `device`, `kernels`, `jit` | kernel sources, their variants, compiling and loading |
//! | [`mod@warm`] | compiles all kernels before they are used |
//! | [`mod@probe`] | asks the driver about GPUs without creating a context |
//! | `driver` | checked calls of the CUDA driver |
//! | [`mod@bench`] | helpers for benchmarks |
//!
//! The kernels are in `device/`: start at `device/dispatch/kernel.cu`. `docs/cuda.md` describes how they work together,
//! `docs/protocol.md` every word that ranks share.

mod arena;
mod beat;
pub mod bench;
mod buffer;
mod call;
mod codec;
mod dense;
mod device;
mod driver;
mod fault;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod handle;
pub mod jit;
mod join;
mod kernels;
mod lanes;
mod links;
mod member;
mod memory;
mod mirror;
mod notices;
mod operators;
mod params;
mod peers;
pub mod probe;
mod rail;
mod rails;
mod reaper;
mod remote;
mod routing;
mod shared;
mod streams;
mod tuning;
mod wait;
pub mod warm;
mod weight_rows;

pub use buffer::CudaBuffer;
pub use codec::{GpuMut, GpuPlace, GpuRef, GpuVec};
pub use dense::TopK;
pub use driver::{Event, Stream};
pub use handle::CudaHandle;
pub use member::finish;
pub use memory::CudaMemory;

/// Maximum number of ranks of a job, in all NVLink domains together.
pub const MAX_RANKS: usize = params::MAX_RANKS;

pub use reaper::{leaked_bytes, settle};

/// Checks that there are a driver and at least one GPU, and that this backend supports every GPU that the driver shows.
/// Allocates nothing on the GPUs.
///
/// # Errors
/// An [`ep::EnvironmentError`] that names what is missing.
pub fn check_available() -> ep::Result<()> {
    probe::usable().map(drop)
}
