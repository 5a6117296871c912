//! Rail lanes in GPU memory, and an emulated link between them.
//!
//! NICs access the lanes in GPU memory if the provider and the GPU support that (`rails.rs` decides). With the engine
//! `paced`, the lanes of a rank are in the memory of its GPU, as for a NIC with GPUDirect RDMA; plans, flags and states
//! stay in host memory. A put of a lane is then a copy from one lane to the other, by the driver or by a kernel
//! ([`copies`]).

mod copies;
mod driver;
mod kernel;

use std::ops::Range;
use std::sync::Arc;

use ep::{CallerError, Result};

pub(crate) use copies::LaneCopies;

use crate::driver::{Chunk, Device, DeviceAddress, GRANULE, Reservation, Sharing, Stream};

/// The lanes of a rank, in the memory of its GPU.
#[derive(Debug)]
pub(crate) struct DeviceLanes {
    memory: Reservation,
    /// The offsets in the rail window that these lanes have.
    offsets: Range<usize>,
}

impl DeviceLanes {
    /// Allocates the lanes, all zero, with access for the GPUs `devices`.
    pub(crate) fn new(device: &Arc<Device>, devices: &[usize], offsets: Range<usize>) -> Result<Self> {
        let bytes = offsets.len().next_multiple_of(GRANULE);
        Self::in_chunk(device, devices, Chunk::new(device, bytes, Sharing::Machine)?, offsets)
    }

    /// Allocates the lanes, all zero, with access for NICs and for the GPU itself.
    pub(crate) fn for_nics(device: &Arc<Device>, offsets: Range<usize>) -> Result<Self> {
        let bytes = offsets.len().next_multiple_of(GRANULE);
        Self::in_chunk(device, &[device.ordinal], Chunk::for_nics(device, bytes)?, offsets)
    }

    fn in_chunk(
        device: &Arc<Device>,
        devices: &[usize],
        chunk: Chunk,
        offsets: Range<usize>,
    ) -> Result<Self> {
        let bytes = chunk.bytes;
        let mut memory = Reservation::new(device)?;
        memory.push(chunk, devices)?;
        let stream = Stream::new(device)?;
        stream.zero(memory.address, bytes)?;
        stream.synchronize()?;
        Ok(Self { memory, offsets })
    }

    /// The address of the first lane.
    pub(crate) fn address(&self) -> DeviceAddress {
        self.memory.address
    }

    /// Bytes of all lanes.
    pub(crate) fn bytes(&self) -> usize {
        self.offsets.len()
    }

    /// Whether the byte at an offset of the rail window is in a lane.
    fn contains(&self, offset: usize) -> bool {
        offset >= self.offsets.start
    }

    /// The address of `len` bytes at an offset of the rail window.
    fn at(&self, what: &'static str, offset: usize, len: usize) -> Result<DeviceAddress> {
        match offset.checked_add(len) {
            Some(end) if self.contains(offset) && end <= self.offsets.end => {
                Ok(self.address() + (offset - self.offsets.start) as DeviceAddress)
            }
            _ => {
                let (expected, found) = (self.offsets.end, offset.saturating_add(len));
                Err(CallerError::Shape { what, expected, found, unit: "bytes" }.into())
            }
        }
    }
}
