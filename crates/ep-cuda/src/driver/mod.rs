//! The CUDA driver, as little of it as this crate needs: every call checked, every owner freeing what it owns.

mod device;
mod kernel;
mod memory;
mod stream;

use std::ffi::CStr;

use cudarc::driver::sys;
use ep::{EnvironmentError, Result};

pub(crate) use device::Device;
pub(crate) use kernel::Kernel;
pub(crate) use memory::{Chunk, DeviceAddress, Mapped, Reservation};
pub use stream::{Event, Stream};

/// Turns a driver's answer into an error that says what was attempted. Where the caller has no hint, the answer has one.
pub(crate) fn check(answer: sys::CUresult, what: impl Fn() -> String, hint: &str) -> Result<()> {
    if answer == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let hint = if hint.is_empty() { advice(answer) } else { hint };
    Err(EnvironmentError::new(what(), describe(answer), hint).into())
}

/// What to do about an answer, whatever was attempted.
fn advice(answer: sys::CUresult) -> &'static str {
    use sys::CUresult as Answer;
    match answer {
        Answer::CUDA_ERROR_OUT_OF_MEMORY => {
            "free memory of the GPU or of the machine: `nvidia-smi` and `free` show who has it"
        }
        Answer::CUDA_ERROR_ILLEGAL_ADDRESS
        | Answer::CUDA_ERROR_MISALIGNED_ADDRESS
        | Answer::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | Answer::CUDA_ERROR_LAUNCH_FAILED => {
            "an earlier kernel of this process failed, and the GPU serves the process no more: start it again under \
             compute-sanitizer, which says which access it was"
        }
        Answer::CUDA_ERROR_NOT_SUPPORTED
        | Answer::CUDA_ERROR_NOT_PERMITTED
        | Answer::CUDA_ERROR_OPERATING_SYSTEM => {
            "the system or the container does not allow it; `hybrid-ep doctor` shows what there is"
        }
        _ => {
            "`nvidia-smi` and the kernel's log (NVRM, Xid) say whether the GPU works; if it does, report this as a bug"
        }
    }
}

fn describe(answer: sys::CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the driver writes a pointer to a static string, or none for an answer it does not know.
    let known = unsafe { sys::cuGetErrorString(answer, &mut text) } == sys::CUresult::CUDA_SUCCESS;
    if !known || text.is_null() {
        return format!("the driver answered {answer:?}");
    }
    // SAFETY: a string of the driver's, ended by a zero byte, that lives as long as the process.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    format!("{text} ({answer:?})")
}

/// There is no driver.
pub(crate) fn missing() -> EnvironmentError {
    EnvironmentError::new(
        "loading the CUDA driver",
        "libcuda.so.1 is not there, or does not load",
        "install the NVIDIA driver (in a container: --gpus all), or use the host backend",
    )
}

/// Loads and initialises the driver; the first thing that anybody does.
pub(crate) fn initialise() -> Result<()> {
    // SAFETY: looks for a library, and unloads it again.
    if !unsafe { sys::is_culib_present() } {
        return Err(missing().into());
    }
    // SAFETY: the driver is present; initialising it again does nothing.
    check(
        unsafe { sys::cuInit(0) },
        || "initialising the CUDA driver".into(),
        "`nvidia-smi` says whether the GPU works",
    )
}
