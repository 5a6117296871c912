//! What the passes of codecs need of a GPU: memory, launches, copies and an end of waiting.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use ep::{CallerError, Result};

use crate::device::{CodecKernel, KernelKey};
use crate::driver::{Device, DeviceAddress, Event, Mapped, Private, Stream};
use crate::kernels::Kernels;
use crate::params::{
    CODEC_THREADS, EntriesParams, Int8DecodeParams, Int8EncodeParams, ResidualsParams, SumsParams,
};

/// Memory that kernels access, freed when it is dropped.
pub(crate) struct Memory {
    pub(crate) address: DeviceAddress,
    pub(crate) bytes: usize,
    pub(crate) _owner: Option<Box<dyn Any + Send + Sync>>,
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:#x}", self.bytes, self.address)
    }
}

/// Host memory that kernels access.
#[derive(Debug)]
pub(crate) struct HostMemory {
    pub(crate) start: NonNull<u8>,
    pub(crate) memory: Memory,
}

// SAFETY: plain memory, which only its owner accesses.
unsafe impl Send for HostMemory {}

/// A launch of one of the kernels.
#[derive(Debug)]
pub(crate) enum Launch {
    Int8Encode(Int8EncodeParams),
    Int8Decode(Int8DecodeParams),
    Residuals(ResidualsParams),
    Entries(EntriesParams),
    Sums(SumsParams),
}

impl Launch {
    pub(crate) fn kernel(&self) -> CodecKernel {
        match self {
            Self::Int8Encode(_) => CodecKernel::Int8Encode,
            Self::Int8Decode(_) => CodecKernel::Int8Decode,
            Self::Residuals(_) => CodecKernel::Residuals,
            Self::Entries(_) => CodecKernel::Entries,
            Self::Sums(_) => CodecKernel::Sums,
        }
    }
}

/// A GPU, or in tests a CPU that runs the kernels. Work is done in the order of the calls.
pub(crate) trait Machine: fmt::Debug + Send + Sync {
    /// The number of the GPU.
    fn number(&self) -> usize;

    /// Makes later work wait for the work so far of a stream.
    ///
    /// # Safety
    /// `stream` is a stream of the GPU's primary context.
    unsafe fn follow(&self, stream: *mut c_void) -> Result<()>;

    /// Allocates memory of the GPU.
    fn allocate(&self, bytes: usize) -> Result<Memory>;

    /// Allocates host memory.
    fn pin(&self, bytes: usize) -> Result<HostMemory>;

    /// The most blocks of `CODEC_THREADS` threads that are of use.
    fn blocks(&self) -> u32;

    /// Launches a kernel.
    ///
    /// # Safety
    /// The memory that the parameters name exists until [`finish`](Self::finish) has returned.
    unsafe fn launch(&self, launch: &Launch, blocks: u32) -> Result<()>;

    /// Sets memory of the GPU to zero.
    fn zero(&self, to: DeviceAddress, bytes: usize) -> Result<()>;

    /// Copies from host memory. `bytes` may be changed afterwards.
    fn upload(&self, bytes: &[u8], to: DeviceAddress) -> Result<()>;

    /// Copies to host memory, and waits for the copy.
    fn download(&self, from: DeviceAddress, bytes: &mut [u8]) -> Result<()>;

    /// Waits for all work.
    fn finish(&self) -> Result<()>;
}

/// A GPU, with a stream of its own.
#[derive(Debug)]
pub(crate) struct Gpu {
    device: Arc<Device>,
    stream: Stream,
}

// SAFETY: the driver's functions on a stream may be called from any thread, also at the same time.
unsafe impl Sync for Gpu {}

/// Blocks per multiprocessor: the number that it runs at the same time.
const BLOCKS_PER_SM: u32 = 8;

impl Gpu {
    pub(crate) fn new(ordinal: usize) -> Result<Self> {
        let device = Device::open(ordinal)?;
        let stream = Stream::new(&device)?;
        Ok(Self { device, stream })
    }
}

impl Machine for Gpu {
    fn number(&self) -> usize {
        self.device.ordinal
    }

    unsafe fn follow(&self, stream: *mut c_void) -> Result<()> {
        let stream = Stream::borrowed(&self.device, stream.cast());
        if stream.is_capturing()? {
            let problem = "a CUDA graph is being captured, and codecs wait for the GPU: publish, pass and reduce outside of captures";
            let (key, value) = ("the current stream", "capturing".into());
            return Err(CallerError::Config { key, value, problem: problem.into() }.into());
        }
        let event = Event::untimed(&self.device)?;
        event.record(&stream)?;
        self.stream.wait(&event)
    }

    fn allocate(&self, bytes: usize) -> Result<Memory> {
        if bytes == 0 {
            return Ok(Memory { address: 0, bytes, _owner: None });
        }
        let private = Private::new(&self.device, bytes)?;
        Ok(Memory { address: private.address(), bytes, _owner: Some(Box::new(private)) })
    }

    fn pin(&self, bytes: usize) -> Result<HostMemory> {
        let mapped = Mapped::new(&self.device, bytes.div_ceil(4).max(1))?;
        let (start, address) = (mapped.start(), mapped.address());
        Ok(HostMemory { start, memory: Memory { address, bytes, _owner: Some(Box::new(mapped)) } })
    }

    fn blocks(&self) -> u32 {
        BLOCKS_PER_SM * self.device.multiprocessors
    }

    unsafe fn launch(&self, launch: &Launch, blocks: u32) -> Result<()> {
        let kernel = Kernels::get().load(&self.device, KernelKey::Codec(launch.kernel()), false)?;
        let threads = CODEC_THREADS as u32;
        // SAFETY: the parameters are those of the kernel; the caller guarantees that the memory stays.
        unsafe {
            match launch {
                Launch::Int8Encode(params) => kernel.launch(&self.stream, blocks, threads, 0, params),
                Launch::Int8Decode(params) => kernel.launch(&self.stream, blocks, threads, 0, params),
                Launch::Residuals(params) => kernel.launch(&self.stream, blocks, threads, 0, params),
                Launch::Entries(params) => kernel.launch(&self.stream, blocks, threads, 0, params),
                Launch::Sums(params) => kernel.launch(&self.stream, blocks, threads, 0, params),
            }
        }
    }

    fn zero(&self, to: DeviceAddress, bytes: usize) -> Result<()> {
        self.stream.zero(to, bytes)
    }

    fn upload(&self, bytes: &[u8], to: DeviceAddress) -> Result<()> {
        self.stream.upload(bytes, to)
    }

    fn download(&self, from: DeviceAddress, bytes: &mut [u8]) -> Result<()> {
        self.stream.download(from, bytes)
    }

    fn finish(&self) -> Result<()> {
        self.stream.synchronize()
    }
}
