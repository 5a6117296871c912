//! Asks the GPU driver about this machine without creating a context: allocates nothing on a GPU.

use std::ffi::{CStr, c_char, c_int};

use cudarc::driver::{result::DriverError, sys};
use ep::{EnvironmentError, Result};

use crate::driver;
use crate::jit::{Arch, Version};

/// The CUDA version of the oldest driver that loads the machine code of the oldest supported compiler.
pub const OLDEST_DRIVER: Version = Version { major: 12, minor: 0 };

/// The advice to users of an older driver.
pub const DRIVER_HINT: &str = "install a driver of version 525 or later";

/// The driver and its GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverFacts {
    /// The newest CUDA version that the driver supports.
    pub cuda: Version,
    /// The GPUs, in the driver's order.
    pub gpus: Vec<GpuFacts>,
    /// `links[a][b]`: how GPU `a` can access the memory of GPU `b`.
    pub links: Vec<Vec<PeerLink>>,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuFacts {
    /// The model's name.
    pub name: String,
    /// Compute capability, before the dot.
    pub capability_major: u32,
    /// Compute capability, after the dot.
    pub capability_minor: u32,
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// Maximum shared memory of a block, in bytes.
    pub shared_bytes: usize,
    /// Memory of the GPU, in bytes.
    pub memory_bytes: u64,
    /// Whether the driver offers fabric handles, by which GPUs of an NVLink domain on several machines share memory. A process
    /// also needs a channel of the service `nvidia-imex`.
    pub offers_fabric: bool,
    /// The address on the PCI bus, such as `0000:18:00.0`; `None` if the driver does not report it.
    pub pci_address: Option<String>,
}

/// How one GPU can access another GPU's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PeerLink {
    /// The GPU's own memory.
    Own,
    /// By loads, stores and atomic operations: NVLink.
    Atomics,
    /// By loads and stores: usually PCI Express.
    Plain,
    /// No access.
    None,
}

/// Asks the driver. Returns `None` if its library is not installed.
///
/// # Errors
/// An [`EnvironmentError`] if the library is installed but does not work.
pub fn probe() -> Result<Option<DriverFacts>> {
    if !driver::load()? {
        return Ok(None);
    }
    facts().map(Some).map_err(|error| {
        let hint =
            "nvidia-smi shows whether the driver works; in a container, hand the GPUs to it (--gpus all)";
        EnvironmentError::new("GPU driver (libcuda.so.1)", describe(error), hint).into()
    })
}

impl DriverFacts {
    /// The architecture of each GPU, in order. This backend must support all of them, because ranks use all GPUs.
    ///
    /// # Errors
    /// An [`EnvironmentError`] if the driver is too old, shows no GPU, or shows a GPU that this backend does not
    /// support.
    pub fn architectures(&self) -> Result<Vec<Arch>> {
        if self.cuda < OLDEST_DRIVER {
            return Err(EnvironmentError::new(
                "GPU driver (libcuda.so.1)",
                format!("it supports CUDA {}, and {OLDEST_DRIVER} is needed", self.cuda),
                format!("{DRIVER_HINT}, or use the host backend"),
            )
            .into());
        }
        if self.gpus.is_empty() {
            return Err(EnvironmentError::new(
                "looking for GPUs",
                "the driver shows none",
                "see CUDA_VISIBLE_DEVICES and `nvidia-smi`, hand GPUs to the container (--gpus all), or use the host \
                 backend",
            )
            .into());
        }
        self.gpus.iter().enumerate().map(|(number, gpu)| gpu.architecture(number)).collect()
    }
}

impl GpuFacts {
    /// The architecture that kernels are compiled for on GPU `number`.
    fn architecture(&self, number: usize) -> Result<Arch> {
        let Self { name, capability_major, capability_minor, .. } = self;
        Arch::of_device(*capability_major, *capability_minor).map_err(|_| {
            EnvironmentError::new(
                format!("GPU {number} ({name}, compute capability {capability_major}.{capability_minor})"),
                "there are no kernels for it",
                format!(
                    "leave it out with CUDA_VISIBLE_DEVICES, use a GPU of compute capability {}, or use the host backend",
                    Arch::CAPABILITIES
                ),
            )
            .into()
        })
    }
}

/// Like [`probe`], but fails without a driver, or if this backend does not support every GPU that the driver shows.
///
/// # Errors
/// The errors of [`probe`] and [`DriverFacts::architectures`]; an [`EnvironmentError`] without a driver.
pub fn usable() -> Result<DriverFacts> {
    let facts = probe()?.ok_or_else(driver::missing)?;
    facts.architectures().map(|_| facts)
}

fn facts() -> Result<DriverFacts, DriverError> {
    let mut version = 0;
    // SAFETY: the argument points to a local integer; the call is allowed before `cuInit`.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result()?;
    let cuda = Version { major: version.unsigned_abs() / 1000, minor: version.unsigned_abs() % 1000 / 10 };
    // SAFETY: takes no pointer and may be called any number of times.
    match unsafe { sys::cuInit(0) } {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => {
            return Ok(DriverFacts { cuda, gpus: Vec::new(), links: Vec::new() });
        }
        result => result.result()?,
    }
    let mut count = 0;
    // SAFETY: the argument points to a local integer, and the driver is initialised.
    unsafe { sys::cuDeviceGetCount(&raw mut count) }.result()?;
    let devices = (0..count).map(device).collect::<Result<Vec<_>, _>>()?;
    let gpus = devices.iter().map(|&device| gpu(device)).collect::<Result<_, _>>()?;
    let links = devices.iter().map(|&from| devices.iter().map(|&to| link(from, to)).collect());
    Ok(DriverFacts { cuda, gpus, links: links.collect::<Result<_, _>>()? })
}

fn device(ordinal: c_int) -> Result<sys::CUdevice, DriverError> {
    let mut device = 0;
    // SAFETY: the argument points to a local integer; the driver refuses an ordinal that it does not have.
    unsafe { sys::cuDeviceGet(&raw mut device, ordinal) }.result()?;
    Ok(device)
}

fn gpu(device: sys::CUdevice) -> Result<GpuFacts, DriverError> {
    use sys::CUdevice_attribute as A;
    const NAME_BYTES: usize = 256;
    let mut name: [c_char; NAME_BYTES] = [0; NAME_BYTES];
    // SAFETY: the array has room for one byte more than the driver may write, so its last byte stays zero.
    unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), NAME_BYTES as c_int - 1, device) }.result()?;
    // SAFETY: the last byte is zero.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let mut memory_bytes = 0;
    // SAFETY: the argument points to a local number.
    unsafe { sys::cuDeviceTotalMem_v2(&raw mut memory_bytes, device) }.result()?;
    let attribute = |which| {
        let mut value: c_int = 0;
        // SAFETY: the argument points to a local integer.
        unsafe { sys::cuDeviceGetAttribute(&raw mut value, which, device) }.result()?;
        Ok(value.unsigned_abs())
    };
    Ok(GpuFacts {
        name,
        capability_major: attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        capability_minor: attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_bytes: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize,
        memory_bytes: memory_bytes as u64,
        offers_fabric: driver::offers_fabric(device),
        pci_address: driver::pci_address(device),
    })
}

fn link(from: sys::CUdevice, to: sys::CUdevice) -> Result<PeerLink, DriverError> {
    use sys::CUdevice_P2PAttribute as A;
    if from == to {
        return Ok(PeerLink::Own);
    }
    let has = |which| {
        let mut value = 0;
        // SAFETY: the argument points to a local integer, and both devices are handles of the driver.
        unsafe { sys::cuDeviceGetP2PAttribute(&raw mut value, which, from, to) }.result()?;
        Ok(value != 0)
    };
    Ok(match has(A::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED)? {
        false => PeerLink::None,
        true if has(A::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)? => PeerLink::Atomics,
        true => PeerLink::Plain,
    })
}

/// The driver's text for an error, with its number.
fn describe(error: DriverError) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the argument points to a local pointer.
    let found = unsafe { sys::cuGetErrorString(error.0, &raw mut text) }.result();
    let words = match found {
        // SAFETY: the driver hands out a text that lives as long as its library, or null.
        Ok(()) => unsafe { text.as_ref().map(|text| CStr::from_ptr(text).to_string_lossy()) },
        Err(_) => None,
    };
    format!("{} (error {})", words.unwrap_or("it gives no reason".into()), error.0 as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts_of(cuda: (u32, u32), capabilities: &[(u32, u32)]) -> DriverFacts {
        let gpu = |&(capability_major, capability_minor): &(u32, u32)| GpuFacts {
            name: "NVIDIA Model".into(),
            capability_major,
            capability_minor,
            multiprocessors: 132,
            shared_bytes: 227 << 10,
            memory_bytes: 80 << 30,
            offers_fabric: false,
            pci_address: None,
        };
        let cuda = Version { major: cuda.0, minor: cuda.1 };
        DriverFacts { cuda, gpus: capabilities.iter().map(gpu).collect(), links: Vec::new() }
    }

    #[test]
    fn all_gpus_must_be_supported() {
        let archs = |cuda, gpus: &[_]| facts_of(cuda, gpus).architectures();
        assert_eq!(archs((12, 0), &[(9, 0), (8, 6)]).unwrap(), [Arch::Sm90a, Arch::Sm80]);
        for (cuda, gpus, parts) in [
            ((11, 8), &[(9, 0)][..], ["it supports CUDA 11.8, and 12.0 is needed", "install a driver"]),
            ((13, 0), &[], ["the driver shows none", "CUDA_VISIBLE_DEVICES"]),
            (
                (13, 0),
                &[(9, 0), (7, 5)],
                ["GPU 1 (NVIDIA Model, compute capability 7.5)", "leave it out with CUDA_VISIBLE_DEVICES"],
            ),
        ] {
            let message = archs(cuda, gpus).unwrap_err().to_string();
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
    }

    #[test]
    fn probing_never_panics() {
        match probe() {
            Ok(None) => {}
            Ok(Some(facts)) => {
                assert!(facts.cuda.major >= 11, "{facts:?}");
                assert!(facts.links.iter().all(|row| row.len() == facts.gpus.len()));
                assert_eq!(facts.links.len(), facts.gpus.len());
            }
            Err(error) => assert!(error.to_string().contains("libcuda.so.1"), "{error}"),
        }
    }
}
