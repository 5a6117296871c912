//! The CUDA backend: dispatch and combine between the GPUs of an NVLink domain, at the wire, with few SMs.
//!
//! | module | what is there |
//! |---|---|
//! | `buffer`, `operators` | [`CudaBuffer`]: arguments checked, parameters filled, one launch per operator |
//! | `join`, `links`, `peers` | how ranks find each other's memory |
//! | `arena`, `memory` | registered memory, which all GPUs of the domain reach |
//! | `handle`, `routing` | a routing on the GPU, and the lists that preprocessing makes of it |
//! | `weight_rows` | experts' outputs times their weights, beside the operators |
//! | `tuning` | how an operator is cut into pieces, stages and blocks |
//! | `fault` | what a kernel has reported, as an error that names who is at fault |
//! | `params` | the mirror of `device/common/params.cuh` |
//! | `device`, `kernels`, `jit` | the kernels' sources, compiled and loaded ahead, or when they are needed |
//! | [`mod@warm`] | compiling all kernels ahead of their use |
//! | `driver` | the CUDA driver, every call checked |
//! | [`mod@bench`] | what benchmarks need beside the operators |
//!
//! The kernels are in `device/`: start at `device/dispatch/kernel.cu`.

mod arena;
pub mod bench;
mod buffer;
mod device;
mod driver;
mod fault;
mod handle;
pub mod jit;
mod join;
mod kernels;
mod links;
mod memory;
mod operators;
mod params;
mod peers;
pub mod probe;
mod routing;
mod tuning;
pub mod warm;
mod weight_rows;

pub use buffer::CudaBuffer;
pub use driver::{Event, Stream};
pub use handle::CudaHandle;
pub use memory::CudaMemory;
pub use routing::{DeviceReport, DeviceRouting, Indices};

/// Whether there is a driver, and GPUs all of which this backend serves. Nothing is allocated on them.
///
/// # Errors
/// [`ep::EnvironmentError`] that says what is missing.
pub fn check_available() -> ep::Result<()> {
    probe::usable().map(drop)
}
