//! The parts of the CUDA driver API that this crate uses: every call is checked, and owners free their objects on drop.

mod capture;
mod device;
mod idle;
mod kernel;
mod memory;
mod stream;

use std::ffi::CStr;
use std::sync::Once;

use cudarc::driver::sys;
use ep::{EnvironmentError, Result};

pub(crate) use capture::{Capture, Relaxed};
pub(crate) use device::Device;
pub(crate) use idle::{DeviceMark, Look};
pub(crate) use kernel::Kernel;
pub(crate) use memory::{Chunk, DeviceAddress, GRANULE, HostWords, Mapped, Pinned, Reservation};
pub use stream::{Event, Stream};

/// Converts a driver's result to an error that says what was attempted. An empty `hint` is replaced by one for the
/// result.
pub(crate) fn check(answer: sys::CUresult, what: impl Fn() -> String, hint: &str) -> Result<()> {
    if answer == sys::CUresult::CUDA_SUCCESS { Ok(()) } else { Err(failure(answer, what, hint)) }
}

/// As [`check`], for a result that is not a success.
fn failure(answer: sys::CUresult, what: impl Fn() -> String, hint: &str) -> ep::Error {
    let hint = if hint.is_empty() { advice(answer) } else { hint };
    EnvironmentError::new(what(), describe(answer), hint).into()
}

/// The hint for a result, independent of what was attempted.
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
            "an earlier kernel of this process failed, and the process can no longer use the GPU: start it again under \
             compute-sanitizer, which names the access"
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
    // SAFETY: the driver's string ends with a zero byte and lives as long as the process.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    format!("{text} ({answer:?})")
}

/// The error for a missing driver.
pub(crate) fn missing() -> EnvironmentError {
    EnvironmentError::new(
        "loading the CUDA driver",
        "libcuda.so.1 is not there, or does not load",
        "install the NVIDIA driver (in a container: --gpus all), or use the host backend",
    )
}

/// Loads and initialises the driver. Must be called before any other function of the driver.
pub(crate) fn initialise() -> Result<()> {
    // SAFETY: loads a library and unloads it again.
    if !unsafe { sys::is_culib_present() } {
        return Err(missing().into());
    }
    // SAFETY: the driver is present; initialising it again does nothing.
    let answer = unsafe { sys::cuInit(0) };
    let what = || "initialising the CUDA driver".into();
    check(answer, what, "`nvidia-smi` says whether the GPU works")?;
    static AT_EXIT: Once = Once::new();
    // Exit handlers run in reverse order of registration: this one runs before the driver's.
    AT_EXIT.call_once(|| {
        // SAFETY: the function may be called when the process ends. If it cannot be registered, it is not called.
        let _ = unsafe { atexit(crate::reaper::process_ends) };
    });
    Ok(())
}

unsafe extern "C" {
    /// Of the C library: registers an exit handler.
    fn atexit(function: extern "C" fn()) -> i32;
}
