//! A GPU and its primary context, which PyTorch uses, too.

use std::sync::{Arc, Mutex};

use cudarc::driver::sys;
use ep::{EnvironmentError, GpuPart, Result};

use super::idle::Look;
use super::{check, failure, initialise};
use crate::jit::Arch;

/// A GPU. Retains its primary context as long as this value lives.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) ordinal: usize,
    primary: Primary,
    pub(crate) arch: Arch,
    /// Number of streaming multiprocessors.
    pub(crate) multiprocessors: u32,
    /// Maximum shared memory of a block, in bytes.
    pub(crate) shared_bytes: usize,
    /// Memory of the GPU, in bytes.
    pub(crate) memory_bytes: usize,
    /// Whether the driver offers fabric handles. It may still refuse them to this process.
    pub(super) offers_fabric: bool,
}

// SAFETY: a context handle may be used from any thread; `bind` makes the context current for a thread.
unsafe impl Send for Device {}
// SAFETY: as above; the fields never change.
unsafe impl Sync for Device {}

impl Device {
    /// The number of GPUs that the driver shows to this process.
    pub(crate) fn count() -> Result<usize> {
        initialise()?;
        let mut count = 0;
        // SAFETY: writes one number.
        check(unsafe { sys::cuDeviceGetCount(&mut count) }, || "counting GPUs".into(), "")?;
        Ok(count.max(0) as usize)
    }

    /// Opens GPU number `ordinal`. All ranks of the process share one value per GPU.
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
        // SAFETY: `device` is a valid handle; the context is released by `Primary`.
        let answer = unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) };
        let short = answer == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        check(answer, what, if short { "" } else { "is another process using it exclusively?" })?;
        let primary = Primary { device, context };
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
            primary,
            arch: Arch::of_device(major as u32, minor as u32)?,
            multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
            shared_bytes: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize,
            memory_bytes,
            offers_fabric: offers_fabric(device),
        })
    }

    /// Makes the GPU's context the current one of this thread until the result is dropped.
    pub(crate) fn bind(&self) -> Result<Bound> {
        self.make_current().map_err(|answer| failure(answer, || format!("using GPU {}", self.ordinal), ""))
    }

    /// Like [`bind`](Self::bind), for polling the GPU's work.
    ///
    /// # Errors
    /// The state of the GPU's work, from the driver's result.
    pub(super) fn bind_to_look(&self) -> std::result::Result<Bound, Look> {
        self.make_current().map_err(Look::of)
    }

    fn make_current(&self) -> std::result::Result<Bound, sys::CUresult> {
        const SUCCESS: sys::CUresult = sys::CUresult::CUDA_SUCCESS;
        let (mut previous, own) = (std::ptr::null_mut(), self.primary.context);
        // SAFETY: writes one handle.
        match unsafe { sys::cuCtxGetCurrent(&mut previous) } {
            SUCCESS if previous == own => return Ok(Bound { previous: None }),
            SUCCESS => {}
            answer => return Err(answer),
        }
        // SAFETY: the context is retained.
        match unsafe { sys::cuCtxSetCurrent(own) } {
            SUCCESS => Ok(Bound { previous: Some(previous) }),
            answer => Err(answer),
        }
    }

    pub(super) fn context(&self) -> sys::CUcontext {
        self.primary.context
    }

    /// The GPU's address on the PCI bus, such as `0000:18:00.0`; `None` if the driver does not report it.
    pub(crate) fn pci_address(&self) -> Option<String> {
        pci_address(self.primary.device)
    }

    /// How NICs access the GPU's memory.
    pub(crate) fn gpu_direct(&self) -> GpuDirect {
        GpuDirect::of(self.primary.device)
    }

    /// Makes what a NIC has written to the GPU's memory visible to kernels of this GPU, including those that run.
    pub(crate) fn flush_nic_writes(&self) -> Result<()> {
        let _bound = self.bind()?;
        let target =
            sys::CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
        let scope = sys::CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER;
        // SAFETY: the call takes no pointer.
        let answer = unsafe { sys::cuFlushGPUDirectRDMAWrites(target, scope) };
        check(answer, || format!("flushing what a NIC has written to GPU {}", self.ordinal), GpuPart::HINT)
    }

    /// The GPU's UUID.
    pub(crate) fn uuid(&self) -> Result<[u8; 16]> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: writes 16 bytes.
        let answer = unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, self.primary.device) };
        check(answer, || format!("identifying GPU {}", self.ordinal), "")?;
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    /// The error for `bytes` bytes of registered memory that the GPU does not have.
    pub(crate) fn out_of_memory(&self, bytes: usize) -> ep::Error {
        EnvironmentError::new(
            format!("allocating {bytes} bytes of registered memory on GPU {}", self.ordinal),
            format!("{} of {} bytes are free", self.free_bytes(), self.memory_bytes),
            "use fewer tokens, a smaller hidden or a smaller capacity, or free memory of other libraries",
        )
        .into()
    }

    /// Free memory of the GPU, in bytes; 0 if it is unknown.
    pub(crate) fn free_bytes(&self) -> usize {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers.
        let answer = self.bind().map(|_bound| unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) });
        if matches!(answer, Ok(sys::CUresult::CUDA_SUCCESS)) { free } else { 0 }
    }
}

/// How NICs access the memory of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GpuDirect {
    /// They do not, or kernels that run cannot be shown what they have written.
    Unsupported,
    /// Kernels see what a NIC has written before something that they see.
    Ordered,
    /// Kernels see what a NIC has written after [`Device::flush_nic_writes`].
    Flushed,
}

impl GpuDirect {
    fn of(device: sys::CUdevice) -> Self {
        use sys::CUdevice_attribute as A;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: writes one number.
            let answer = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) };
            if answer == sys::CUresult::CUDA_SUCCESS { value } else { 0 }
        };
        Self::from_attributes(
            attribute(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED),
            attribute(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING),
            attribute(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS),
        )
    }

    /// From whether allocations can be made for NICs, for whom what they write is ordered, and who can flush it.
    fn from_attributes(allocations: i32, ordering: i32, flushes: i32) -> Self {
        let owner = sys::CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER as i32;
        let host = sys::CUflushGPUDirectRDMAWritesOptions::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST as i32;
        match allocations != 0 {
            true if ordering >= owner => Self::Ordered,
            true if flushes & host != 0 => Self::Flushed,
            _ => Self::Unsupported,
        }
    }
}

/// Whether the driver offers fabric handles for a GPU's memory. Drivers before CUDA 12.3 do not have this attribute.
pub(crate) fn offers_fabric(device: sys::CUdevice) -> bool {
    let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED;
    let mut value = 0;
    // SAFETY: writes one number.
    let answer = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) };
    answer == sys::CUresult::CUDA_SUCCESS && value != 0
}

/// The address of a GPU on the PCI bus, such as `0000:18:00.0`; `None` if the driver does not report it.
pub(crate) fn pci_address(device: sys::CUdevice) -> Option<String> {
    use sys::CUdevice_attribute as A;
    let attribute = |attribute| {
        let mut value = 0;
        // SAFETY: writes one number.
        let answer = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) };
        (answer == sys::CUresult::CUDA_SUCCESS).then_some(value)
    };
    let domain = attribute(A::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?;
    let bus = attribute(A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?;
    let slot = attribute(A::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?;
    Some(format!("{domain:04x}:{bus:02x}:{slot:02x}.0"))
}

/// Keeps a GPU's context the current one of this thread. Its drop restores the context that was current before: the
/// current GPU of a thread belongs to the caller, who may use several.
#[must_use = "the GPU is current only as long as this value lives"]
#[derive(Debug)]
pub(crate) struct Bound {
    /// The context that the drop makes current again; `None` if the GPU's context was the current one already.
    previous: Option<sys::CUcontext>,
}

impl Drop for Bound {
    fn drop(&mut self) {
        if let Some(previous) = self.previous {
            // SAFETY: a context that was current in this thread, or none. If it was destroyed in between, the driver
            // refuses, and the caller has no context to lose.
            let _ = unsafe { sys::cuCtxSetCurrent(previous) };
        }
    }
}

/// The primary context of a GPU, retained until this value is dropped.
#[derive(Debug)]
struct Primary {
    device: sys::CUdevice,
    context: sys::CUcontext,
}

impl Drop for Primary {
    fn drop(&mut self) {
        // SAFETY: retained once, when this value was made. The result is ignored: at the end of the process the driver may
        // have shut down.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_are_in_gpu_memory_where_kernels_can_be_shown_what_nics_write() {
        for (allocations, ordering, flushes, expected) in [
            (0, 200, 1, GpuDirect::Unsupported),
            (1, 0, 0, GpuDirect::Unsupported),
            // A flush that only a stream can make.
            (1, 0, 2, GpuDirect::Unsupported),
            (1, 0, 3, GpuDirect::Flushed),
            (1, 100, 0, GpuDirect::Ordered),
            (1, 200, 1, GpuDirect::Ordered),
        ] {
            let found = GpuDirect::from_attributes(allocations, ordering, flushes);
            assert_eq!(found, expected, "{allocations} {ordering} {flushes}");
        }
    }
}
