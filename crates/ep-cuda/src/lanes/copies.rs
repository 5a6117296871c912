//! The copies of an emulated link between lanes in GPU memory.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ep::{Copier, Put, Rail, Rank, Result};
use ep_rail::{Carry, Loopback};

use super::DeviceLanes;
use super::driver::ByDriver;
use super::kernel::ByKernel;
use crate::driver::{Device, DeviceAddress, Event, HostWords, Look, Mapped, Relaxed, Stream};
use crate::reaper::{self, Job, Lost};

/// How long the copies of a dropped engine may take before the lanes are given up.
const PATIENCE: Duration = Duration::from_secs(10);
/// A copy that takes longer than this may have failed, so the proxy then asks the driver, but not more often than once in
/// this time.
const LATE: Duration = Duration::from_millis(100);

/// What copies from lane to lane. Copies end in the order in which they begin, and are numbered in this order; numbers
/// wrap around.
pub(super) trait LaneCopier: Debug + Send {
    /// Begins a copy, which is executed by work of the stream. The caller has checked both ranges.
    fn begin(&mut self, stream: &Stream, copy: &Ranges) -> Result<()>;

    /// Makes sure that what was begun goes on.
    fn go_on(&mut self, stream: &Stream) -> Result<()>;

    /// Maximum number of copies under way.
    fn most(&self) -> usize;
}

/// A copy's number and memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ranges {
    pub(super) number: u32,
    pub(super) from: DeviceAddress,
    pub(super) to: DeviceAddress,
    pub(super) bytes: usize,
}

/// Executes the puts of a rank whose lanes, like those of its rail peers, are in GPU memory.
#[derive(Debug)]
pub(crate) struct LaneCopies {
    rail: Rail,
    /// Copies what is not in a lane.
    loopback: Arc<Loopback>,
    /// `None` once the engine is dropped.
    copying: Mutex<Option<Copying>>,
    /// One word: the number of the last copy that has ended.
    ended: Arc<Mapped>,
    most: usize,
}

/// The stream of the copies, and the memory that they access.
#[derive(Debug)]
struct Copying {
    rank: Rank,
    device: Arc<Device>,
    /// Dropped before what its work accesses.
    stream: Stream,
    copier: Box<dyn LaneCopier>,
    /// Recorded after the last copy; `None` before the engine is dropped.
    last: Option<Event>,
    /// By domain.
    lanes: Vec<Arc<DeviceLanes>>,
    /// This rank's domain.
    own: usize,
    /// The number of the last copy that has begun.
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
        copier: Copier,
    ) -> Result<Self> {
        let ended = Arc::new(Mapped::new(device, 1)?);
        let copier: Box<dyn LaneCopier> = match copier {
            Copier::Driver => Box::new(ByDriver::new(&ended)),
            Copier::Kernel => Box::new(ByKernel::new(device, &ended)?),
        };
        let most = copier.most();
        let copying = Copying {
            rank: rail.own(),
            device: Arc::clone(device),
            stream: Stream::new(device)?,
            copier,
            last: None,
            lanes,
            own: rail.own_index(),
            begun: 0,
            ask_at: Instant::now(),
        };
        Ok(Self { rail, loopback, copying: Mutex::new(Some(copying)), ended, most })
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
        let Copying { stream, copier, lanes, begun, .. } = copying.as_mut().expect(LIVES);
        if put.len == 0 || !lanes[own].contains(put.source) {
            return self.loopback.copy(put).map(|()| None);
        }
        let from = lanes[own].at("source of a put", put.source, put.len)?;
        let to = lanes[peer].at("destination of a put", put.destination, put.len)?;
        let number = begun.wrapping_add(1);
        copier.begin(stream, &Ranges { number, from, to, bytes: put.len })?;
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
        let mut copying = self.lock();
        let Copying { stream, copier, ask_at, .. } = copying.as_mut().expect(LIVES);
        copier.go_on(stream)?;
        let now = Instant::now();
        if now < (*begun + LATE).max(*ask_at) {
            return Ok(false);
        }
        *ask_at = now + LATE;
        let _relaxed = Relaxed::new();
        stream.is_done().map(|_| false)
    }

    fn most(&self) -> usize {
        self.most
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
