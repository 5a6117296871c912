//! A rank's registered memory: all GPUs of its NVLink domain can access it, and it grows on demand.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ep::{Error, Rank, Result, Size};

use crate::driver::{Chunk, Device, DeviceAddress, DeviceMark, Look, Relaxed, Reservation, Sharing};
use crate::reaper::{self, Job, Lost};

/// Alignment of every part, in bytes: suits any vector load, and parts share no cache line.
const ALIGNMENT: usize = 256;
/// Memory grows by at least this many bytes, a multiple of the driver's granularity, if the GPU has them free.
const LEAST_GROWTH: usize = 32 << 20;
const GRANULE: usize = 2 << 20;

/// What a rank tells other processes. Dropping the value tells them that the rank leaves.
pub(crate) trait Announce: Send {
    /// Announces new memory, before this rank uses an address in it. Returns when all peers have mapped the chunk, after
    /// the chunks that they mapped before.
    fn announce(&mut self, chunk: &Chunk) -> Result<()>;

    /// Tells ranks of other machines at once that this rank's kernels have given up.
    fn tell_fault(&self);

    /// Tells other processes the word of `Control::left` that stands for this rank once its links end.
    fn leaving(&self, word: u32);
}

/// Registered memory, shared by the buffer, the CUDA graphs that use it, and all parts that were handed out. When the
/// last owner is dropped, the memory is freed as soon as the GPU has finished all work that it had at that time.
#[derive(Clone)]
pub(crate) struct Arena(Arc<Owner>);

/// A rank's registered memory; lives as long as any rank of this process may access it.
pub(crate) struct Memory(Mutex<State>);

struct Owner {
    memory: Arc<Memory>,
    /// Taken when the owner is dropped.
    release: Mutex<Option<Release>>,
}

/// What is freed when the work of the GPU has finished.
struct Release {
    rank: Rank,
    memory: Arc<Memory>,
    /// Other objects that kernels of this rank may access.
    held: Vec<Box<dyn Any + Send>>,
    mark: DeviceMark,
    patience: Duration,
}

struct State {
    device: Arc<Device>,
    reservation: Reservation,
    /// GPUs of this process that may access the memory.
    devices: Vec<usize>,
    /// Which other processes map the memory.
    sharing: Sharing,
    announce: Option<Box<dyn Announce>>,
    /// Why no more memory is handed out: an announcement failed, so not all peers have mapped all memory.
    closed: Option<Error>,
    /// Free ranges: length by first byte.
    free: BTreeMap<usize, usize>,
    /// Parts that peers may still read: the step after which the part is free, first byte, length.
    resting: Vec<(u64, usize, usize)>,
    /// Operators called so far.
    step: u64,
    /// Whether new parts belong to a CUDA graph, and whether any part ever did.
    captured: bool,
    ever_captured: bool,
}

impl std::fmt::Debug for Arena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.lock();
        f.debug_struct("Arena")
            .field("registered_bytes", &state.reservation.mapped())
            .field("free_bytes", &state.free.values().sum::<usize>())
            .finish_non_exhaustive()
    }
}

/// A part of registered memory; dropping it makes the memory free for reuse.
#[derive(Debug)]
pub(crate) struct Part {
    arena: Arena,
    offset: usize,
    len: usize,
    address: DeviceAddress,
    /// Whether peers may still read the part when this rank has finished the last operator that uses it.
    lent: bool,
    /// Whether the part is never reused, because replays of a CUDA graph may write to it at any time.
    kept: bool,
}

impl Part {
    pub(crate) fn address(&self) -> DeviceAddress {
        self.address
    }

    /// Drops the part. It is reused unless a captured graph may have its address.
    pub(crate) fn retire(mut self) {
        self.kept |= self.arena.lock().ever_captured;
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        let mut state = self.arena.lock();
        if self.lent {
            // A peer may still be in this rank's last operator. The peer has finished that operator when its handshake of
            // the next one arrives, so operators after the next one may overwrite the memory.
            let after = state.step + 1;
            state.resting.push((after, self.offset, self.len));
        } else {
            state.give_back(self.offset, self.len);
        }
    }
}

impl Arena {
    /// Registered memory of a rank. `patience`: how long to wait for work before the memory is given up.
    pub(crate) fn new(
        device: &Arc<Device>,
        devices: Vec<usize>,
        sharing: Sharing,
        rank: Rank,
        patience: Duration,
    ) -> Result<Self> {
        let mark = DeviceMark::new(device)?;
        let memory = Arc::new(Memory(Mutex::new(State {
            device: Arc::clone(device),
            reservation: Reservation::new(device)?,
            devices,
            sharing,
            announce: None,
            closed: None,
            free: BTreeMap::new(),
            resting: Vec::new(),
            step: 0,
            captured: false,
            ever_captured: false,
        })));
        let release = Release { rank, memory: Arc::clone(&memory), held: Vec::new(), mark, patience };
        Ok(Self(Arc::new(Owner { memory, release: Mutex::new(Some(release)) })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.memory.lock()
    }

    /// The memory itself, for other ranks of this process whose kernels access it.
    pub(crate) fn memory(&self) -> Arc<Memory> {
        Arc::clone(&self.0.memory)
    }

    /// Keeps `thing`, which kernels of this rank may access, as long as the memory.
    pub(crate) fn hold(&self, thing: impl Any + Send) {
        if let Some(release) = &mut *self.0.release() {
            release.held.push(Box::new(thing));
        }
    }

    /// The first address.
    pub(crate) fn base(&self) -> DeviceAddress {
        self.lock().reservation.address
    }

    /// The number of registered bytes.
    pub(crate) fn registered_bytes(&self) -> usize {
        self.lock().reservation.mapped()
    }

    /// Announces growth to other processes from now on.
    pub(crate) fn announce_with(&self, announce: Box<dyn Announce>) {
        self.lock().announce = Some(announce);
    }

    /// Tells ranks of other machines at once that this rank's kernels have given up.
    pub(crate) fn tell_fault(&self) {
        if let Some(announce) = &self.lock().announce {
            announce.tell_fault();
        }
    }

    /// Tells other processes the word of `Control::left` that stands for this rank once its links end.
    pub(crate) fn leaving(&self, word: u32) {
        if let Some(announce) = &self.lock().announce {
            announce.leaving(word);
        }
    }

    /// Ends the announcements, which tells other processes that this rank leaves. Called before the memory is freed.
    pub(crate) fn close(&self) {
        let announce = self.lock().announce.take();
        drop(announce);
    }

    /// Calls `with` with the chunks allocated so far.
    pub(crate) fn with_chunks<T>(&self, with: impl FnOnce(&[Chunk]) -> T) -> T {
        with(self.lock().reservation.chunks())
    }

    /// Sets the number of the next operator. Ignores captured operators: they are not executed now, so they free
    /// nothing.
    pub(crate) fn set_step(&self, step: u64) {
        let mut state = self.lock();
        if !state.captured {
            state.step = step;
        }
    }

    /// Sets whether the following operators are captured in a CUDA graph.
    pub(crate) fn set_captured(&self, captured: bool) {
        let mut state = self.lock();
        state.captured = captured;
        state.ever_captured |= captured;
    }

    /// Allocates a part of `bytes` bytes with undefined content. `lent`: peers may read it, as in [`Part::lent`].
    pub(crate) fn alloc(&self, bytes: usize, lent: bool) -> Result<Part> {
        let len = Size::new(bytes.max(1)).next_multiple_of(ALIGNMENT).bytes("registered memory")?;
        let mut state = self.lock();
        if let Some(error) = &state.closed {
            return Err(error.clone());
        }
        state.wake();
        let offset = match state.take(len) {
            Some(offset) => offset,
            None => {
                state.grow(len)?;
                state.take(len).expect("`grow` has added a free block of this length")
            }
        };
        let address = state.reservation.address + offset as DeviceAddress;
        let kept = state.captured;
        Ok(Part { arena: self.clone(), offset, len, address, lent, kept })
    }
}

impl Memory {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Owner {
    fn release(&self) -> MutexGuard<'_, Option<Release>> {
        self.release.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // If the buffer could not be made, its links are still open, and their threads write to this memory.
        let announce = self.memory.lock().announce.take();
        drop(announce);
        let release = self.release().take();
        if let Some(release) = release {
            reaper::retire(Box::new(release));
        }
    }
}

impl Job for Release {
    fn look(&mut self) -> Look {
        let _relaxed = Relaxed::new();
        self.mark.look()
    }

    fn patience(&self) -> Duration {
        self.patience
    }

    fn give_up(&mut self) -> Lost {
        let what = format!("registered memory of rank {}", self.rank);
        Lost { what, bytes: self.memory.lock().reservation.mapped() }
    }
}

impl State {
    /// Frees the resting parts that no peer can read any more.
    fn wake(&mut self) {
        let step = self.step;
        let (awake, resting) = self.resting.drain(..).partition(|&(after, ..)| after < step);
        self.resting = resting;
        let awake: Vec<_> = awake;
        for (_, offset, len) in awake {
            self.give_back(offset, len);
        }
    }

    /// Takes `len` bytes from the smallest free range that is large enough.
    fn take(&mut self, len: usize) -> Option<usize> {
        let (&offset, &found) =
            self.free.iter().filter(|&(_, &free)| free >= len).min_by_key(|&(_, &free)| free)?;
        self.free.remove(&offset);
        if found > len {
            self.free.insert(offset + len, found - len);
        }
        Some(offset)
    }

    fn give_back(&mut self, mut offset: usize, mut len: usize) {
        if let Some((&before, &before_len)) = self.free.range(..offset).next_back()
            && before + before_len == offset
        {
            self.free.remove(&before);
            offset = before;
            len += before_len;
        }
        if let Some(after_len) = self.free.remove(&(offset + len)) {
            len += after_len;
        }
        self.free.insert(offset, len);
    }

    fn grow(&mut self, len: usize) -> Result<()> {
        let mapped = self.reservation.mapped();
        // A free range at the end counts towards the new range.
        let at_end = self
            .free
            .iter()
            .next_back()
            .filter(|&(&at, &free)| at + free == mapped)
            .map_or(0, |(_, &free)| free);
        let needed = Size::new(len - at_end).next_multiple_of(GRANULE).bytes("registered memory")?;
        let bytes = needed.max(LEAST_GROWTH);
        // Do not ask the driver for more than the GPU has: it may report an invalid argument instead of out-of-memory.
        let room = self.reservation.room();
        let chunk = |bytes| match bytes {
            _ if bytes > room => Err(self.device.out_of_memory(bytes)),
            _ => Chunk::new(&self.device, bytes, self.sharing),
        };
        let chunk = match chunk(bytes) {
            // The exact size may still fit.
            Err(error) if bytes > needed => chunk(needed).map_err(|_| error)?,
            made => made?,
        };
        let bytes = chunk.bytes;
        self.reservation.push(chunk, &self.devices)?;
        if let (Some(announce), Some(chunk)) = (&mut self.announce, self.reservation.chunks().last()) {
            let announced = announce.announce(chunk).map_err(Error::while_sharing_memory);
            announced.inspect_err(|error| self.closed = Some(error.clone()))?;
        }
        self.give_back(mapped, bytes);
        Ok(())
    }
}
