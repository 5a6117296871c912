//! The parts of the CUDA driver API that this crate uses: every call is checked, and owners free their objects on drop.

mod capture;
mod device;
mod idle;
mod kernel;
mod memory;
mod stream;

use std::ffi::CStr;
use std::sync::{Once, OnceLock};

use cudarc::driver::sys;
use ep::{EnvironmentError, Result};

pub(crate) use capture::{Capture, Relaxed};
pub(crate) use device::{Device, GpuDirect, offers_fabric, pci_address};
pub(crate) use idle::{DeviceMark, Look};
pub(crate) use kernel::Kernel;
pub(crate) use memory::{
    Chunk, DeviceAddress, FABRIC_BYTES, FABRIC_HINT, GRANULE, HostWords, Mapped, Pinned, Private,
    Reservation, Shared, Sharing,
};
pub use stream::{Event, Stream};

/// Converts a driver's result to an error that says what was attempted. An empty `hint` is replaced by one for the
/// result.
pub(crate) fn check(answer: sys::CUresult, what: impl Fn() -> String, hint: &str) -> Result<()> {
    if answer == sys::CUresult::CUDA_SUCCESS { Ok(()) } else { Err(failure(answer, what, hint)) }
}

/// Like [`check`], for a result that is not a success.
fn failure(answer: sys::CUresult, what: impl Fn() -> String, hint: &str) -> ep::Error {
    let hint = if hint.is_empty() { advice(answer) } else { hint };
    EnvironmentError::new(what(), describe(answer), hint).into()
}

/// The hint for a result, independent of what was attempted.
fn advice(answer: sys::CUresult) -> &'static str {
    use sys::CUresult as Answer;
    match answer {
        Answer::CUDA_ERROR_OUT_OF_MEMORY => {
            "free memory of the GPU or of the machine: `nvidia-smi` and `free` show what uses it"
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
            "the system or the container does not allow it; `hybrid-ep doctor` shows what is available"
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
        "libcuda.so.1 is missing or cannot be loaded",
        "install the NVIDIA driver (in a container: --gpus all), or use the host backend",
    )
}

/// The functions of the driver that this crate calls. A call of a function that the driver lacks panics.
const FUNCTIONS: &[&str] = &[
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetP2PAttribute",
    "cuDeviceGetPCIBusId",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime",
    "cuEventQuery",
    "cuEventRecord",
    "cuFlushGPUDirectRDMAWrites",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuGetErrorString",
    "cuGraphRetainUserObject",
    "cuInit",
    "cuLaunchKernel",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemAlloc_v2",
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemHostGetDevicePointer_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemImportFromShareableHandle",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamGetCaptureInfo_v2",
    "cuStreamIsCapturing",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuStreamWriteValue32_v2",
    "cuThreadExchangeStreamCaptureMode",
    "cuUserObjectCreate",
    "cuUserObjectRelease",
];

/// Loads the driver. Returns false if it is not installed.
///
/// # Errors
/// [`EnvironmentError`] for a driver without a function that this crate calls.
pub(crate) fn load() -> Result<bool> {
    static LACKING: OnceLock<Option<&str>> = OnceLock::new();
    // SAFETY: loads a library and unloads it again; its initialisers have no requirements.
    if !unsafe { sys::is_culib_present() } {
        return Ok(false);
    }
    let lacking = LACKING.get_or_init(|| {
        // SAFETY: the library is present. The symbols are looked up, not used.
        let has = |name: &str| unsafe { sys::culib().get::<*const ()>(name.as_bytes()).is_ok() };
        FUNCTIONS.iter().copied().find(|name| !has(name))
    });
    lacking.map_or(Ok(true), |name| {
        Err(EnvironmentError::new(
            "loading the CUDA driver",
            format!("libcuda.so.1 has no function {name}"),
            "install an NVIDIA driver of version 525 or later (the library may be a stub of the CUDA toolkit), or use the \
             host backend",
        )
        .into())
    })
}

/// Loads and initialises the driver. Must be called before any other function of the driver.
pub(crate) fn initialise() -> Result<()> {
    if !load()? {
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
    /// The function of the C library that registers an exit handler.
    fn atexit(function: extern "C" fn()) -> i32;
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    /// The names that are called as `sys::cu...(` in a directory.
    fn called(directory: &Path, names: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                called(&path, names);
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            for rest in text.split("sys::cu").skip(1) {
                let name: String = rest.chars().take_while(|&at| at.is_alphanumeric() || at == '_').collect();
                if name.starts_with(char::is_uppercase) && rest[name.len()..].starts_with('(') {
                    names.insert(format!("cu{name}"));
                }
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "reads files")]
    fn all_functions_that_are_called_are_looked_up() {
        let mut names = BTreeSet::new();
        called(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut names);
        assert_eq!(names.iter().map(String::as_str).collect::<Vec<_>>(), FUNCTIONS);
    }
}
