//! Rail lanes in GPU memory, and an emulated link between them.
//!
//! NICs access the lanes in GPU memory if the provider and the GPU support that (`rails.rs` decides).
//!
//! With the engine `paced`, the lanes of a rank are in the memory of its GPU, as for a NIC with
//! GPUDirect RDMA; plans, flags and states stay in host memory. A put of a lane is a copy by the driver from one lane to
//! the other, in a stream of the sending rank.
//!
//! If both ranks share a GPU, the driver copies with a kernel, which needs a free multiprocessor: on an H100, such copies
//! waited while other kernels occupied all multiprocessors. So the kernels of ranks that share a GPU must leave some
//! multiprocessors free.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ep::{CallerError, Put, Rail, Result};
use ep_rail::{Carry, Loopback};

use crate::driver::{
    Chunk, Device, DeviceAddress, Event, GRANULE, HostWords, Look, Mapped, Relaxed, Reservation, Sharing,
    Stream,
};
use crate::reaper::{self, Job, Lost};

/// How long the copies of a dropped engine may take before the lanes are given up.
const PATIENCE: Duration = Duration::from_secs(10);
/// A copy that takes longer than this may have failed, so the proxy then asks the driver, but not more often than once in
/// this time.
const LATE: Duration = Duration::from_millis(100);

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

    /// The address of `len` bytes at an offset of the rail window.
    fn at(&self, what: &'static str, offset: usize, len: usize) -> Result<DeviceAddress> {
        match offset.checked_add(len) {
            Some(end) if self.offsets.start <= offset && end <= self.offsets.end => {
                Ok(self.address() + (offset - self.offsets.start) as DeviceAddress)
            }
            _ => {
                let (expected, found) = (self.offsets.end, offset.saturating_add(len));
                Err(CallerError::Shape { what, expected, found, unit: "bytes" }.into())
            }
        }
    }
}

/// Executes the puts of a rank whose lanes, like those of its rail peers, are in GPU memory.
///
/// After each copy, the stream stores the copy's number to host memory. To ask the driver for an event of each copy would
/// take a lock that the calls of the next copies need: with four ranks on a GPU a put then took 68 us of the proxy's time
/// (docs/lab/044).
#[derive(Debug)]
pub(crate) struct LaneCopies {
    rail: Rail,
    /// Copies what is not in a lane.
    loopback: Arc<Loopback>,
    /// `None` once the engine is dropped.
    copying: Mutex<Option<Copying>>,
    /// One word: the number of the last copy that has ended.
    ended: Arc<Mapped>,
}

/// The stream of the copies, and the memory that they access.
#[derive(Debug)]
struct Copying {
    rank: ep::Rank,
    device: Arc<Device>,
    stream: Stream,
    /// Recorded after the last copy; `None` before the engine is dropped.
    last: Option<Event>,
    /// By domain.
    lanes: Vec<Arc<DeviceLanes>>,
    /// This rank's domain.
    own: usize,
    ended: Arc<Mapped>,
    /// The number of the last copy that has begun. Numbers wrap around.
    begun: u32,
    /// When to ask the driver about a copy that is late.
    ask_at: Instant,
}

/// A copy of a lane's bytes.
#[derive(Debug)]
pub(crate) struct LaneCopy {
    number: u32,
    begun: Instant,
}

impl LaneCopies {
    /// `lanes` are those of all ranks of the rail, by domain.
    pub(crate) fn new(
        device: &Arc<Device>,
        rail: Rail,
        loopback: Arc<Loopback>,
        lanes: Vec<Arc<DeviceLanes>>,
    ) -> Result<Self> {
        let ended = Arc::new(Mapped::new(device, 1)?);
        let copying = Copying {
            rank: rail.own(),
            device: Arc::clone(device),
            stream: Stream::new(device)?,
            last: None,
            lanes,
            own: rail.own_index(),
            ended: Arc::clone(&ended),
            begun: 0,
            ask_at: Instant::now(),
        };
        Ok(Self { rail, loopback, copying: Mutex::new(Some(copying)), ended })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Copying>> {
        self.copying.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const LIVES: &str = "only the drop of the engine takes the stream, after the last copy";

impl Carry for LaneCopies {
    /// `None` if the bytes have been copied already.
    type Copy = Option<LaneCopy>;

    fn begin(&self, put: &Put) -> Result<Option<LaneCopy>> {
        let (own, peer) = (self.rail.own_index(), self.rail.peer_index(put.peer)?);
        let mut copying = self.lock();
        let Copying { stream, lanes, ended, begun, .. } = copying.as_mut().expect(LIVES);
        if put.len == 0 || put.source < lanes[own].offsets.start {
            return self.loopback.copy(put).map(|()| None);
        }
        let from = lanes[own].at("source of a put", put.source, put.len)?;
        let to = lanes[peer].at("destination of a put", put.destination, put.len)?;
        // Another thread may be capturing a graph.
        let _relaxed = Relaxed::new();
        stream.copy(from, to, put.len)?;
        let number = begun.wrapping_add(1);
        stream.store(ended.address(), number)?;
        *begun = number;
        Ok(Some(LaneCopy { number, begun: Instant::now() }))
    }

    /// # Errors
    /// [`EnvironmentError`](ep::EnvironmentError) if the driver reports a failure of the GPU's work, after which the copy
    /// will not end.
    fn has_ended(&self, copy: &Option<LaneCopy>) -> Result<bool> {
        let Some(LaneCopy { number, begun }) = copy else { return Ok(true) };
        if is_reached(self.ended.read(0), *number) {
            return Ok(true);
        }
        let now = Instant::now();
        if now < *begun + LATE {
            return Ok(false);
        }
        let mut copying = self.lock();
        let Copying { stream, ask_at, .. } = copying.as_mut().expect(LIVES);
        if now < *ask_at {
            return Ok(false);
        }
        *ask_at = now + LATE;
        let _relaxed = Relaxed::new();
        stream.is_done()
    }
}

/// Whether copy `number` has ended if `ended` is the number of the last copy that has. Fewer than 2^31 copies are under
/// way.
fn is_reached(ended: u32, number: u32) -> bool {
    ended.wrapping_sub(number) < 1 << 31
}

impl Drop for LaneCopies {
    fn drop(&mut self) {
        if let Some(copying) = self.copying.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            reaper::retire(Box::new(copying));
        }
    }
}

/// The lanes are freed when the copies have ended.
impl Job for Copying {
    fn look(&mut self) -> Look {
        let _relaxed = Relaxed::new();
        if self.last.is_none() {
            let Ok(last) = Event::untimed(&self.device) else { return Look::Running };
            if let Err(look) = self.stream.mark(&last) {
                return look;
            }
            self.last = Some(last);
        }
        self.last.as_ref().map_or(Look::Running, Event::look)
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    fn give_up(&mut self) -> Lost {
        let bytes = self.lanes[self.own].offsets.len();
        Lost { what: format!("the rail lanes of rank {}", self.rank), bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_copies_wrap_around() {
        for (ended, number, expected) in
            [(0, 1, false), (1, 1, true), (2, 1, true), (u32::MAX, 0, false), (0, u32::MAX, true)]
        {
            assert_eq!(is_reached(ended, number), expected, "{ended} {number}");
        }
    }
}
