//! A rank's membership in its world. It ends when the rank's buffer has been dropped, no CUDA graph holds its operators,
//! and its work has finished. Only then does the rank tell its peers that it has left.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use ep::{Rank, Result};

use crate::arena::Arena;
use crate::driver::{Device, DeviceAddress, DeviceMark, Event, Look, Relaxed, Stream};
use crate::fault::Faults;
use crate::params::{EPOCH_OFFSET, GONE_BITS, GoneWord, LEFT_OFFSET};
use crate::rails::RankRails;
use crate::reaper::{self, Job, Lost};

/// Shared by a buffer and the CUDA graphs that captured its operators. Dropping the last owner ends the membership.
#[derive(Debug)]
pub(crate) struct Member(Mutex<Option<Parting>>);

/// What a rank needs to leave.
#[derive(Debug)]
pub(crate) struct Parting {
    pub(crate) rank: Rank,
    /// The rank's own stream.
    pub(crate) stream: Stream,
    pub(crate) arena: Arena,
    /// This rank's control block.
    pub(crate) own: DeviceAddress,
    /// Control blocks of the ranks whose memory is mapped. The links tell the other ranks that this rank leaves.
    pub(crate) control: Vec<DeviceAddress>,
    pub(crate) faults: Arc<Faults>,
    pub(crate) tail: Tail,
    /// Recorded after the gone words were written to the peers.
    pub(crate) said: Event,
    /// Rails to the other NVLink domains, if there are any.
    pub(crate) rails: Option<Arc<RankRails>>,
    /// How long to wait until what this rank has sent along its rail has left it.
    pub(crate) stall_bound: Duration,
    pub(crate) stage: Stage,
    pub(crate) patience: Duration,
    /// Whether the program has interrupted a wait for this rank's work. The end of the program does not wait for the
    /// work then: Ctrl-C ends a program whose kernels wait for a peer.
    pub(crate) interrupted: bool,
}

/// The progress of a rank that leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Working,
    /// The kernels have ended; the proxy may still send what they have stored.
    Draining,
    Telling,
    Left,
}

/// The end of the work that a rank has put into streams. Replays of graphs are not included: graphs keep the member.
#[derive(Debug)]
pub(crate) struct Tail {
    event: Event,
    /// A stream with work that is not recorded in `event` yet.
    latest: Option<Stream>,
    /// All work of the GPU, for use if `unsure`.
    whole: DeviceMark,
    /// Whether `event` may not include all work.
    unsure: bool,
}

impl Tail {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self> {
        let (event, whole) = (Event::untimed(device)?, DeviceMark::new(device)?);
        Ok(Self { event, latest: None, whole, unsure: false })
    }

    /// Records the work of a stream that the caller may destroy at any time.
    pub(crate) fn record(&self, stream: &Stream) -> Result<()> {
        self.event.record(stream)
    }

    /// Makes `next` wait for all work so far, the last of which is in `stream`.
    pub(crate) fn go_on_in(&mut self, stream: &Stream, next: &Stream) -> Result<()> {
        // A stream that is not lasting has been recorded already, and may have been destroyed.
        if stream.is_lasting() {
            if stream.is_capturing()? {
                self.unsure = true;
                return Ok(());
            }
            self.event.record(stream)?;
        }
        if next.is_capturing()? { Ok(()) } else { next.wait(&self.event) }
    }

    /// Notes that no work follows the work in `stream`.
    fn end_in(&mut self, stream: &Stream) {
        self.latest = stream.is_lasting().then(|| stream.view());
    }

    fn look(&mut self) -> Look {
        if let Some(stream) = &self.latest {
            match stream.mark(&self.event) {
                Ok(()) => self.latest = None,
                Err(look) => return look,
            }
        }
        match self.event.look() {
            Look::Over if self.unsure => self.whole.look(),
            look => look,
        }
    }
}

/// Members of this process.
static MEMBERS: Mutex<Vec<Weak<Member>>> = Mutex::new(Vec::new());

impl Member {
    pub(crate) fn new(part: Parting) -> Arc<Self> {
        let member = Arc::new(Self(Mutex::new(Some(part))));
        let mut members = MEMBERS.lock().unwrap_or_else(PoisonError::into_inner);
        members.retain(|member| member.strong_count() > 0);
        members.push(Arc::downgrade(&member));
        member
    }

    fn lock(&self) -> MutexGuard<'_, Option<Parting>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `with` with the tail, unless [`finish`] has ended the membership.
    pub(crate) fn with_tail(&self, with: impl FnOnce(&mut Tail) -> Result<()>) -> Result<()> {
        self.lock().as_mut().map_or(Ok(()), |part| with(&mut part.tail))
    }

    /// Called when the program has interrupted a wait for this rank's work.
    pub(crate) fn interrupt(&self) {
        if let Some(part) = &mut *self.lock() {
            part.interrupted = true;
        }
    }

    /// Called when the buffer is dropped; its last work is in `stream`.
    pub(crate) fn end_in(&self, stream: &Stream) {
        if let Some(part) = &mut *self.lock() {
            part.tail.end_in(stream);
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let part = self.lock().take();
        if let Some(part) = part {
            reaper::retire(Box::new(part));
        }
    }
}

impl Parting {
    /// Tells all peers that this rank takes part in no further operator. `sent`: whether everything has left along its
    /// rail.
    fn say_left(&self, sent: bool) -> Result<()> {
        let mut word = if sent { GoneWord::Left } else { GoneWord::LeftEarly } as u32;
        if self.rails.is_some() && sent {
            let mut epoch = [0; 4];
            self.stream.download(self.own + EPOCH_OFFSET as DeviceAddress, &mut epoch)?;
            word |= u32::from_le_bytes(epoch) << GONE_BITS;
        }
        self.arena.leaving(word);
        let at = LEFT_OFFSET + 4 * self.rank.index();
        for &control in &self.control {
            // A write to a peer that is gone may fail; that peer does not need it.
            let _ = self.stream.upload(&word.to_le_bytes(), control + at as DeviceAddress);
        }
        self.said.record(&self.stream)
    }
}

impl Job for Parting {
    fn look(&mut self) -> Look {
        let _relaxed = Relaxed::new();
        if self.stage == Stage::Working {
            match self.tail.look() {
                Look::Over => {}
                look => return look,
            }
            // A rank that has given up has told its peers by its abort word.
            let failed = self.faults.read().is_some();
            self.stage = if failed { Stage::Left } else { Stage::Draining };
            if let Some(rails) = self.rails.as_ref().filter(|_| !failed) {
                rails.drain(self.stall_bound);
            }
        }
        if self.stage == Stage::Draining {
            let Some(sent) = self.rails.as_ref().map_or(Some(true), |rails| rails.is_drained()) else {
                return Look::Running;
            };
            self.stage = if self.say_left(sent).is_ok() { Stage::Telling } else { Stage::Left };
        }
        if self.stage == Stage::Telling {
            match self.said.look() {
                Look::Over => self.stage = Stage::Left,
                look => return look,
            }
        }
        self.arena.close();
        Look::Over
    }

    fn patience(&self) -> Duration {
        self.patience
    }

    fn is_awaited(&self) -> bool {
        !self.interrupted
    }

    fn give_up(&mut self) -> Lost {
        // Sends the leave message: peers must not wait for this rank any longer.
        self.arena.close();
        Lost { what: format!("the buffer of rank {}", self.rank), bytes: self.arena.registered_bytes() }
    }
}

/// Ends all memberships at the end of a program: waits up to `limit` for the work in the GPUs' streams, including
/// replays of graphs; then all ranks of this process leave their worlds. Does not free memory. Does not wait for the
/// work of a rank whose wait was interrupted ([`ep::Interrupt`]).
///
/// The caller must have dropped all buffers, and must not replay graphs afterwards.
pub fn finish(limit: Duration) {
    let until = Instant::now() + limit;
    reaper::settle_awaited(limit);
    let members = std::mem::take(&mut *MEMBERS.lock().unwrap_or_else(PoisonError::into_inner));
    for mut part in members.iter().filter_map(Weak::upgrade).filter_map(|member| member.lock().take()) {
        // Replays may be in any stream.
        part.tail.unsure = true;
        let look = loop {
            match part.look() {
                Look::Running if part.is_awaited() && Instant::now() < until && !reaper::is_ending() => {
                    thread::sleep(Duration::from_millis(1));
                }
                look => break look,
            }
        };
        // In a forked child (`Gone`) the links belong to the parent.
        if look != Look::Gone {
            part.arena.close();
        }
        // Graphs may still use the memory.
        std::mem::forget(part);
    }
}
