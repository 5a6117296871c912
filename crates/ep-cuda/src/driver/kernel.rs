//! A loaded kernel and its launch.

use std::ffi::CString;
use std::sync::Arc;

use cudarc::driver::sys;
use ep::{EnvironmentError, Result};

use super::{Device, Stream, check};
use crate::jit::LoadError;

/// A loaded kernel of one GPU. Modules are never unloaded, because unloading waits for the GPU.
#[derive(Debug)]
pub(crate) struct Kernel {
    device: Arc<Device>,
    name: &'static str,
    function: sys::CUfunction,
}

// SAFETY: a function handle may be used from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above; the fields never change.
unsafe impl Sync for Kernel {}

/// Whether the driver refuses the code itself. Other errors, such as a lack of memory, say nothing about the code.
fn concerns_code(answer: sys::CUresult) -> bool {
    use sys::CUresult as Answer;
    matches!(
        answer,
        Answer::CUDA_ERROR_INVALID_IMAGE
            | Answer::CUDA_ERROR_NO_BINARY_FOR_GPU
            | Answer::CUDA_ERROR_INVALID_PTX
            | Answer::CUDA_ERROR_UNSUPPORTED_PTX_VERSION
            | Answer::CUDA_ERROR_INVALID_SOURCE
            | Answer::CUDA_ERROR_NOT_FOUND
    )
}

impl Kernel {
    /// Loads the kernel `name` of a cubin, and allows it all shared memory of a block.
    pub(crate) fn load(
        device: &Arc<Device>,
        cubin: &[u8],
        name: &'static str,
    ) -> std::result::Result<Self, LoadError> {
        let _bound = device.bind()?;
        let what = || format!("loading kernel {name} on GPU {}", device.ordinal);
        let mut module = std::ptr::null_mut();
        // SAFETY: a complete cubin, which contains its own length.
        let answer = unsafe { sys::cuModuleLoadData(&mut module, cubin.as_ptr().cast()) };
        check(answer, what, "the driver may be older than the compiler: `hybrid-ep doctor` shows both")
            .map_err(|error| if concerns_code(answer) { LoadError::Code(error) } else { error.into() })?;
        let mut function = std::ptr::null_mut();
        let entry = CString::new(name).map_err(|error| EnvironmentError::new(what(), error, ""))?;
        // SAFETY: the module is loaded; the name ends with a zero byte.
        let answer = unsafe { sys::cuModuleGetFunction(&mut function, module, entry.as_ptr()) };
        check(answer, what, "")
            .map_err(|error| if concerns_code(answer) { LoadError::Code(error) } else { error.into() })?;
        let kernel = Self { device: Arc::clone(device), name, function };
        let static_bytes =
            kernel.attribute(sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
        let most = device.shared_bytes as i32 - static_bytes;
        use sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as DYNAMIC;
        // SAFETY: the function is loaded.
        check(unsafe { sys::cuFuncSetAttribute(function, DYNAMIC, most) }, what, "")?;
        Ok(kernel)
    }

    fn attribute(&self, attribute: sys::CUfunction_attribute) -> Result<i32> {
        let _bound = self.device.bind()?;
        let mut value = 0;
        // SAFETY: writes one number.
        let answer = unsafe { sys::cuFuncGetAttribute(&mut value, attribute, self.function) };
        check(answer, || format!("asking about kernel {}", self.name), "").map(|()| value)
    }

    /// Maximum dynamic shared memory of a block, in bytes.
    pub(crate) fn shared_bytes(&self) -> Result<usize> {
        use sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as DYNAMIC;
        self.attribute(DYNAMIC).map(|bytes| bytes as usize)
    }

    /// Launches the kernel in the stream.
    ///
    /// # Safety
    /// `P` is the kernel's parameter struct, and all memory that it names stays allocated until the launch has
    /// finished.
    pub(crate) unsafe fn launch<P>(
        &self,
        stream: &Stream,
        blocks: u32,
        threads: u32,
        shared_bytes: usize,
        params: &P,
    ) -> Result<()> {
        let _bound = self.device.bind()?;
        let mut arguments = [std::ptr::from_ref(params).cast_mut().cast()];
        // SAFETY: one argument, which the driver copies before it returns; the caller guarantees the rest.
        let answer = unsafe {
            sys::cuLaunchKernel(
                self.function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                shared_bytes as u32,
                stream.raw(),
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        check(
            answer,
            || {
                format!(
                    "launching kernel {} ({blocks} blocks of {threads} threads, {shared_bytes} bytes)",
                    self.name
                )
            },
            "an earlier kernel may have failed",
        )
    }
}
