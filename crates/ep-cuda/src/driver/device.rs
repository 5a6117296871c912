//! A GPU and its primary context, which PyTorch uses too.

use std::sync::{Arc, Mutex};

use cudarc::driver::sys;
use ep::{EnvironmentError, Result};

use super::{check, initialise};
use crate::jit::Arch;

/// A GPU, with its primary context retained as long as this lives.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) ordinal: usize,
    device: sys::CUdevice,
    context: sys::CUcontext,
    pub(crate) arch: Arch,
    /// Streaming multiprocessors.
    pub(crate) multiprocessors: u32,
    /// Most bytes of shared memory that a block may ask for.
    pub(crate) shared_bytes: usize,
    /// Bytes of memory on the GPU.
    pub(crate) memory_bytes: usize,
}

// SAFETY: a context handle may be used from any thread; `bind` makes it current where it is needed.
unsafe impl Send for Device {}
// SAFETY: as above; nothing here is changed after it was made.
unsafe impl Sync for Device {}

impl Device {
    /// Number of GPUs that the driver shows to this process.
    pub(crate) fn count() -> Result<usize> {
        initialise()?;
        let mut count = 0;
        // SAFETY: writes one number.
        check(unsafe { sys::cuDeviceGetCount(&mut count) }, || "counting GPUs".into(), "")?;
        Ok(count.max(0) as usize)
    }

    /// The GPU of this number; one owner for each, shared by all ranks of the process.
    pub(crate) fn open(ordinal: usize) -> Result<Arc<Self>> {
        static OPEN: Mutex<Vec<Arc<Device>>> = Mutex::new(Vec::new());
        let mut open = OPEN.lock().unwrap_or_else(|poison| poison.into_inner());
        if let Some(device) = open.iter().find(|device| device.ordinal == ordinal) {
            return Ok(Arc::clone(device));
        }
        let device = Arc::new(Self::new(ordinal)?);
        open.push(Arc::clone(&device));
        Ok(device)
    }

    fn new(ordinal: usize) -> Result<Self> {
        let count = Self::count()?;
        if ordinal >= count {
            return Err(EnvironmentError::new(
                format!("opening GPU {ordinal}"),
                format!("the driver shows {count} GPUs"),
                "start no more ranks than there are GPUs, or see CUDA_VISIBLE_DEVICES",
            )
            .into());
        }
        let what = || format!("opening GPU {ordinal}");
        let mut device = 0;
        // SAFETY: writes one handle; the number was checked.
        check(unsafe { sys::cuDeviceGet(&mut device, ordinal as i32) }, what, "")?;
        let mut context = std::ptr::null_mut();
        // SAFETY: `device` is one; released in `drop`.
        let answer = unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) };
        let short = answer == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        check(answer, what, if short { "" } else { "is another process using it exclusively?" })?;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: writes one number.
            check(unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) }, what, "")
                .map(|()| value)
        };
        use sys::CUdevice_attribute as A;
        let major = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let mut memory_bytes = 0;
        // SAFETY: writes one number.
        check(unsafe { sys::cuDeviceTotalMem_v2(&mut memory_bytes, device) }, what, "")?;
        Ok(Self {
            ordinal,
            device,
            context,
            arch: Arch::of_device(major as u32, minor as u32)?,
            multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
            shared_bytes: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize,
            memory_bytes,
        })
    }

    /// Makes the GPU the current one of this thread.
    pub(crate) fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained.
        check(unsafe { sys::cuCtxSetCurrent(self.context) }, || format!("using GPU {}", self.ordinal), "")
    }

    /// What tells the GPU from all others.
    pub(crate) fn uuid(&self) -> Result<[u8; 16]> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: writes 16 bytes.
        let answer = unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, self.device) };
        check(answer, || format!("identifying GPU {}", self.ordinal), "")?;
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    /// Bytes of memory that are free now.
    pub(crate) fn free_bytes(&self) -> usize {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers; an answer other than success leaves them zero.
        let answer = self.bind().map(|()| unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) });
        if matches!(answer, Ok(sys::CUresult::CUDA_SUCCESS)) { free } else { 0 }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: retained once in `new`. At the end of the process the driver may be gone: the answer is of no use.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}
