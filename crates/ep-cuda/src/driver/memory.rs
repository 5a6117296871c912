//! Physical GPU memory, address ranges that map it, and host memory that kernels access.

use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use cudarc::driver::sys;
use ep::{EnvironmentError, Result};

use super::{Device, Relaxed, check};

/// An address in a GPU's memory, in the address space of one process.
pub(crate) type DeviceAddress = sys::CUdeviceptr;

/// Sizes and addresses of mapped memory are multiples of this number of bytes, the driver's granularity on all GPUs so
/// far.
pub(crate) const GRANULE: usize = 2 << 20;

/// Which processes can map an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// Those of this machine.
    Machine,
    /// Those of all machines of the NVLink domain.
    Domain,
}

/// Size of a fabric handle.
pub(crate) const FABRIC_BYTES: usize = size_of::<sys::CUmemFabricHandle>();

/// The means by which another process imports an allocation.
#[derive(Debug)]
pub(crate) enum Shared {
    /// A file descriptor, for a process on the same machine.
    Descriptor(OwnedFd),
    /// A fabric handle, for a process on any machine of the NVLink domain. It is plain bytes and owns nothing.
    Fabric([u8; FABRIC_BYTES]),
}

const DESCRIPTOR: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
const FABRIC: sys::CUmemAllocationHandleType = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC;
/// The advice to users whose GPUs do not share memory between machines.
pub(crate) const FABRIC_HINT: &str = "does the service nvidia-imex run on all machines of the domain, and may this process use a channel \
     (/dev/nvidia-caps-imex-channels)?";

/// Who accesses an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    OfGpus,
    OfNicsToo,
}

/// An allocation of physical GPU memory that several GPUs and processes can map. It is freed when this value has been
/// dropped and no mapping is left.
#[derive(Debug)]
pub(crate) struct Chunk {
    handle: sys::CUmemGenericAllocationHandle,
    pub(crate) bytes: usize,
}

impl Chunk {
    /// Allocates `bytes` bytes, a multiple of [`GRANULE`].
    pub(crate) fn new(device: &Device, bytes: usize, sharing: Sharing) -> Result<Self> {
        Self::allocate(device, bytes, sharing, Access::OfGpus)
    }

    /// Allocates `bytes` bytes, a multiple of [`GRANULE`], that NICs can access, too, if the GPU supports that
    /// ([`GpuDirect::of`]).
    pub(crate) fn for_nics(device: &Device, bytes: usize) -> Result<Self> {
        Self::allocate(device, bytes, Sharing::Machine, Access::OfNicsToo)
    }

    fn allocate(device: &Device, bytes: usize, sharing: Sharing, access: Access) -> Result<Self> {
        let _bound = device.bind()?;
        let (kinds, hint) = match sharing {
            Sharing::Machine => (DESCRIPTOR, ""),
            Sharing::Domain => (sys::CUmemAllocationHandleType_enum(DESCRIPTOR.0 | FABRIC.0), FABRIC_HINT),
        };
        let mut properties = sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: kinds,
            location: location(device.ordinal),
            win32HandleMetaData: std::ptr::null_mut(),
            // SAFETY: integers, for which zero is the default.
            allocFlags: unsafe { std::mem::zeroed() },
        };
        properties.allocFlags.gpuDirectRDMACapable = u8::from(access == Access::OfNicsToo);
        let mut handle = 0;
        // SAFETY: writes one handle, released in `drop`.
        let answer = unsafe { sys::cuMemCreate(&mut handle, bytes, &properties, 0) };
        if answer == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(device.out_of_memory(bytes));
        }
        check(answer, || format!("allocating {bytes} bytes on GPU {}", device.ordinal), hint)?;
        Ok(Self { handle, bytes })
    }

    /// Whether this process can share memory of this GPU with other machines. Allocates such memory to find out.
    pub(crate) fn can_cross_machines(device: &Device) -> bool {
        device.offers_fabric && Self::new(device, GRANULE, Sharing::Domain).is_ok()
    }

    /// Exports the memory to processes of this machine.
    pub(crate) fn export(&self) -> Result<OwnedFd> {
        let mut fd = -1i32;
        // SAFETY: writes a file descriptor, which is of `int` size.
        let answer = unsafe {
            sys::cuMemExportToShareableHandle(std::ptr::from_mut(&mut fd).cast(), self.handle, DESCRIPTOR, 0)
        };
        check(answer, || "sharing memory with other processes".into(), "")?;
        // SAFETY: a new descriptor without another owner.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Exports the memory to processes of other machines. The chunk was made with [`Sharing::Domain`].
    pub(crate) fn export_to_machines(&self) -> Result<[u8; FABRIC_BYTES]> {
        let mut fabric = [0; FABRIC_BYTES];
        // SAFETY: writes a fabric handle, which has `FABRIC_BYTES` bytes.
        let answer =
            unsafe { sys::cuMemExportToShareableHandle(fabric.as_mut_ptr().cast(), self.handle, FABRIC, 0) };
        check(answer, || "sharing memory with other machines".into(), FABRIC_HINT)?;
        Ok(fabric)
    }

    /// Imports memory that another process has exported.
    pub(crate) fn import(device: &Device, shared: &Shared, bytes: usize) -> Result<Self> {
        let _bound = device.bind()?;
        let mut handle = 0;
        let (from, kind, hint) = match shared {
            // For this kind the descriptor itself is passed in the pointer.
            Shared::Descriptor(fd) => {
                (fd.as_raw_fd() as usize as *mut _, DESCRIPTOR, "do all ranks see all GPUs of the domain?")
            }
            Shared::Fabric(fabric) => (fabric.as_ptr().cast_mut().cast(), FABRIC, FABRIC_HINT),
        };
        // SAFETY: writes one handle; reads a fabric handle through `from`, which points to one, and does not write to it.
        let answer = unsafe { sys::cuMemImportFromShareableHandle(&mut handle, from, kind) };
        check(answer, || "opening another process's memory".into(), hint)?;
        Ok(Self { handle, bytes })
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: released once; mappings keep the memory.
        let _ = unsafe { sys::cuMemRelease(self.handle) };
    }
}

fn location(ordinal: usize) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: ordinal as i32 }
}

/// A reserved range of addresses. Chunks are mapped one after the other, from its start.
#[derive(Debug)]
pub(crate) struct Reservation {
    device: Arc<Device>,
    pub(crate) address: DeviceAddress,
    bytes: usize,
    chunks: Vec<Chunk>,
    mapped: usize,
}

impl Reservation {
    /// Reserves a range of addresses of the size of the GPU's memory.
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self> {
        let _bound = device.bind()?;
        let bytes = device.memory_bytes.next_multiple_of(GRANULE);
        let mut address = 0;
        // SAFETY: writes one address, freed in `drop`.
        let answer = unsafe { sys::cuMemAddressReserve(&mut address, bytes, GRANULE, 0, 0) };
        check(answer, || format!("reserving {bytes} bytes of addresses"), "")?;
        Ok(Self { device: Arc::clone(device), address, bytes, chunks: Vec::new(), mapped: 0 })
    }

    /// The number of mapped bytes.
    pub(crate) fn mapped(&self) -> usize {
        self.mapped
    }

    /// The number of bytes that can still be mapped.
    pub(crate) fn room(&self) -> usize {
        self.bytes - self.mapped
    }

    /// The chunks, in the order of their addresses.
    pub(crate) fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Maps a chunk after the others, with read and write access for `devices`.
    pub(crate) fn push(&mut self, chunk: Chunk, devices: &[usize]) -> Result<()> {
        let bytes = chunk.bytes;
        if bytes > self.room() {
            return Err(EnvironmentError::new(
                format!("growing registered memory of {} bytes by {bytes} bytes", self.mapped),
                format!("the GPU has {} bytes", self.bytes),
                "use fewer tokens or a smaller hidden",
            )
            .into());
        }
        let _bound = self.device.bind()?;
        let at = self.address + self.mapped as DeviceAddress;
        let what = || format!("mapping {bytes} bytes of registered memory");
        // SAFETY: the range is inside the reservation, after the mapped part.
        check(unsafe { sys::cuMemMap(at, bytes, 0, chunk.handle, 0) }, what, "")?;
        let access: Vec<_> = devices
            .iter()
            .map(|&ordinal| sys::CUmemAccessDesc {
                location: location(ordinal),
                flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            })
            .collect();
        // SAFETY: the range that was mapped above.
        let answer = unsafe { sys::cuMemSetAccess(at, bytes, access.as_ptr(), access.len()) };
        check(answer, what, "the GPUs of an NVLink domain must reach each other: `nvidia-smi topo -m`")
            .inspect_err(|_| {
                // Peers map the announced chunks one after the other, so a chunk that failed must leave no gap.
                // SAFETY: mapped above, and no work has its address.
                let _ = unsafe { sys::cuMemUnmap(at, bytes) };
            })?;
        self.mapped += bytes;
        self.chunks.push(chunk);
        Ok(())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let Ok(_bound) = self.device.bind() else { return };
        let _relaxed = Relaxed::new();
        let mut at = self.address;
        for chunk in &self.chunks {
            // SAFETY: mapped in `push`; the owner guarantees that no work uses it.
            let _ = unsafe { sys::cuMemUnmap(at, chunk.bytes) };
            at += chunk.bytes as DeviceAddress;
        }
        // SAFETY: reserved in `new`; all chunks have been unmapped.
        let _ = unsafe { sys::cuMemAddressFree(self.address, self.bytes) };
    }
}

/// Memory of a GPU that only this process uses.
#[derive(Debug)]
pub(crate) struct Private {
    device: Arc<Device>,
    address: DeviceAddress,
}

impl Private {
    /// Allocates `bytes` bytes, at least one.
    pub(crate) fn new(device: &Arc<Device>, bytes: usize) -> Result<Self> {
        let _bound = device.bind()?;
        let mut address = 0;
        let what = || format!("allocating {bytes} bytes on GPU {}", device.ordinal);
        // SAFETY: writes one address, freed in `drop`.
        check(unsafe { sys::cuMemAlloc_v2(&mut address, bytes) }, what, "")?;
        Ok(Self { device: Arc::clone(device), address })
    }

    pub(crate) fn address(&self) -> DeviceAddress {
        self.address
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        let Ok(_bound) = self.device.bind() else { return };
        // Another thread may be capturing a graph.
        let _relaxed = Relaxed::new();
        // SAFETY: allocated in `new`; the owner guarantees that no work uses it.
        let _ = unsafe { sys::cuMemFree_v2(self.address) };
    }
}

/// Pinned host memory that kernels can access, as an array of words.
#[derive(Debug)]
pub(crate) struct Mapped {
    device: Arc<Device>,
    words: *mut u32,
    len: usize,
    address: DeviceAddress,
}

// SAFETY: plain memory; all access goes through volatile reads and writes.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Allocates `len` words, all zero.
    pub(crate) fn new(device: &Arc<Device>, len: usize) -> Result<Self> {
        let _bound = device.bind()?;
        let (mut memory, mut address) = (std::ptr::null_mut(), 0);
        let what = || format!("pinning {} bytes of host memory", 4 * len);
        const FLAGS: u32 = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: writes one pointer, freed in `drop`.
        check(unsafe { sys::cuMemHostAlloc(&mut memory, 4 * len, FLAGS) }, what, "")?;
        let words = memory.cast::<u32>();
        // SAFETY: `4 * len` bytes were allocated.
        unsafe { words.write_bytes(0, len) };
        let mut mapped = Self { device: Arc::clone(device), words, len, address };
        // SAFETY: `memory` was allocated for mapping.
        check(unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, memory, 0) }, what, "")?;
        mapped.address = address;
        Ok(mapped)
    }

    /// The address for kernels.
    pub(crate) fn address(&self) -> DeviceAddress {
        self.address
    }

    /// The first byte, for this process.
    pub(crate) fn start(&self) -> NonNull<u8> {
        NonNull::new(self.words.cast()).expect("the driver has allocated it")
    }

    /// Stores the words `at` and `at + 1` with one write. A kernel that loads both at once with acquire order sees both, and
    /// all words that were stored before them. `at` is even.
    pub(crate) fn write_pair(&self, at: usize, low: u32, high: u32) {
        assert!(at + 1 < self.len && at.is_multiple_of(2), "inside the memory");
        fence(Ordering::Release);
        // SAFETY: inside the memory, which begins at a page; the GPU reads the two words as one.
        unsafe { self.words.add(at).cast::<u64>().write_volatile(u64::from(high) << 32 | u64::from(low)) }
    }
}

/// Words of host memory that kernels access.
pub(crate) trait HostWords: Send + Sync {
    /// The current value of one word.
    fn read(&self, at: usize) -> u32;

    /// Stores one word. A kernel that reads the word with acquire order sees all words that were stored before it.
    fn write(&self, at: usize, word: u32);
}

impl HostWords for Mapped {
    fn read(&self, at: usize) -> u32 {
        assert!(at < self.len, "inside the memory");
        // SAFETY: inside the memory and aligned; the GPU writes whole words.
        unsafe { self.words.add(at).read_volatile() }
    }

    fn write(&self, at: usize, word: u32) {
        assert!(at < self.len, "inside the memory");
        fence(Ordering::Release);
        // SAFETY: inside the memory and aligned; the GPU reads whole words.
        unsafe { self.words.add(at).write_volatile(word) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let Ok(_bound) = self.device.bind() else { return };
        // Another thread may be capturing a graph.
        let _relaxed = Relaxed::new();
        // SAFETY: allocated in `new`.
        let _ = unsafe { sys::cuMemFreeHost(self.words.cast()) };
    }
}

/// Memory of the program that is pinned, so that kernels can access it.
#[derive(Debug)]
pub(crate) struct Pinned {
    device: Arc<Device>,
    start: NonNull<u8>,
    address: DeviceAddress,
}

// SAFETY: an address that is not dereferenced here.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Pins the `bytes` bytes that begin at `start`. The memory must stay mapped until this value is dropped.
    pub(crate) fn new(device: &Arc<Device>, start: NonNull<u8>, bytes: usize) -> Result<Self> {
        let _bound = device.bind()?;
        let what = || format!("pinning {bytes} bytes of host memory");
        let hint = "use shorter lanes (HYBRID_EP_CUDA_LANE_BYTES on all ranks), or raise the limit of locked memory (ulimit -l)";
        const FLAGS: u32 = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller keeps the memory mapped; undone in `drop`.
        check(unsafe { sys::cuMemHostRegister_v2(start.as_ptr().cast(), bytes, FLAGS) }, what, hint)?;
        let mut pinned = Self { device: Arc::clone(device), start, address: 0 };
        // SAFETY: registered for mapping above.
        let answer =
            unsafe { sys::cuMemHostGetDevicePointer_v2(&mut pinned.address, start.as_ptr().cast(), 0) };
        check(answer, what, hint)?;
        Ok(pinned)
    }

    /// The address for kernels.
    pub(crate) fn address(&self) -> DeviceAddress {
        self.address
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let Ok(_bound) = self.device.bind() else { return };
        let _relaxed = Relaxed::new();
        // SAFETY: registered in `new`; the owner guarantees that no kernel uses it.
        let _ = unsafe { sys::cuMemHostUnregister(self.start.as_ptr().cast()) };
    }
}
