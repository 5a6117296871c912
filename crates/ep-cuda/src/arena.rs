//! A rank's registered memory: reachable by the GPUs of all ranks of its NVLink domain, and growing when it must.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use ep::{Error, Result};

use crate::driver::{Chunk, Device, DeviceAddress, Reservation};

/// Every part begins at a multiple of this, bytes: a row may begin with any vector load, and parts share no cache line.
const ALIGNMENT: usize = 256;
/// Memory grows by at least this much, bytes: a multiple of the driver's granularity.
const LEAST_GROWTH: usize = 32 << 20;
const GRANULE: usize = 2 << 20;

/// Makes new memory known to other processes before anybody names an address in it.
pub(crate) trait Announce: Send {
    /// Returns when all peers have mapped the chunk behind those they have.
    fn announce(&mut self, chunk: &Chunk) -> Result<()>;
}

/// Registered memory, shared by the buffer and all parts that were handed out.
#[derive(Clone)]
pub(crate) struct Arena(Arc<Mutex<State>>);

struct State {
    device: Arc<Device>,
    reservation: Reservation,
    /// GPUs of this process that may touch it.
    devices: Vec<usize>,
    announce: Option<Box<dyn Announce>>,
    /// Why nothing is handed out any more: not all peers know all of the memory.
    closed: Option<Error>,
    /// Free ranges: first byte to length.
    free: BTreeMap<usize, usize>,
    /// Parts that peers may still read: the operator after which they are free, first byte, length.
    resting: Vec<(u64, usize, usize)>,
    /// Operators called so far.
    step: u64,
    /// Whether parts that are made now belong to a CUDA graph; and whether there ever were any.
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

/// A part of registered memory; goes back when dropped.
#[derive(Debug)]
pub(crate) struct Part {
    arena: Arena,
    offset: usize,
    len: usize,
    address: DeviceAddress,
    /// Whether peers may read it after the last operator of this rank that used it is over.
    lent: bool,
    /// Whether it stays with the arena for good: replays of a CUDA graph may write to it at any time.
    kept: bool,
}

impl Part {
    pub(crate) fn address(&self) -> DeviceAddress {
        self.address
    }

    /// Gives the part up: it goes back, unless a captured graph may know it.
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
            // A peer may be in the last operator still. It has left it when it greets in the next one; and only what
            // is called after that one may overwrite what it reads.
            let after = state.step + 1;
            state.resting.push((after, self.offset, self.len));
        } else {
            state.give_back(self.offset, self.len);
        }
    }
}

impl Arena {
    pub(crate) fn new(device: &Arc<Device>, devices: Vec<usize>) -> Result<Self> {
        Ok(Self(Arc::new(Mutex::new(State {
            device: Arc::clone(device),
            reservation: Reservation::new(device)?,
            devices,
            announce: None,
            closed: None,
            free: BTreeMap::new(),
            resting: Vec::new(),
            step: 0,
            captured: false,
            ever_captured: false,
        }))))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(|poison| poison.into_inner())
    }

    /// The first address.
    pub(crate) fn base(&self) -> DeviceAddress {
        self.lock().reservation.address
    }

    /// Bytes that are registered now.
    pub(crate) fn registered_bytes(&self) -> usize {
        self.lock().reservation.mapped()
    }

    /// From now on other processes are told of growth.
    pub(crate) fn announce_with(&self, announce: Box<dyn Announce>) {
        self.lock().announce = Some(announce);
    }

    /// Tells other processes that nothing follows; before the memory goes.
    pub(crate) fn close(&self) {
        let announce = self.lock().announce.take();
        drop(announce);
    }

    /// Calls `with` with the chunks so far.
    pub(crate) fn with_chunks<T>(&self, with: impl FnOnce(&[Chunk]) -> T) -> T {
        with(self.lock().reservation.chunks())
    }

    /// The operator that is called next. One that is captured in a graph is not done now, so nothing has rested by it.
    pub(crate) fn set_step(&self, step: u64) {
        let mut state = self.lock();
        if !state.captured {
            state.step = step;
        }
    }

    /// Whether what follows is captured in a CUDA graph.
    pub(crate) fn set_captured(&self, captured: bool) {
        let mut state = self.lock();
        state.captured = captured;
        state.ever_captured |= captured;
    }

    /// A part of `bytes` bytes, content undefined.
    pub(crate) fn alloc(&self, bytes: usize, lent: bool) -> Result<Part> {
        let len = bytes.max(1).next_multiple_of(ALIGNMENT);
        let mut state = self.lock();
        if let Some(error) = &state.closed {
            return Err(error.clone());
        }
        state.wake();
        let offset = match state.take(len) {
            Some(offset) => offset,
            None => {
                state.grow(len)?;
                state.take(len).expect("memory grew by at least this much")
            }
        };
        let address = state.reservation.address + offset as DeviceAddress;
        let kept = state.captured;
        Ok(Part { arena: self.clone(), offset, len, address, lent, kept })
    }
}

impl State {
    /// Frees what has rested long enough.
    fn wake(&mut self) {
        let step = self.step;
        let (awake, resting) = self.resting.drain(..).partition(|&(after, ..)| after < step);
        self.resting = resting;
        let awake: Vec<_> = awake;
        for (_, offset, len) in awake {
            self.give_back(offset, len);
        }
    }

    /// The smallest free range that is large enough.
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
        // What is free at the end need not be allocated again.
        let at_end = self
            .free
            .iter()
            .next_back()
            .filter(|&(&at, &free)| at + free == mapped)
            .map_or(0, |(_, &free)| free);
        let bytes = (len - at_end).max(LEAST_GROWTH).next_multiple_of(GRANULE);
        let chunk = match Chunk::new(&self.device, bytes) {
            Ok(chunk) => chunk,
            // Exactly what is needed may still fit.
            Err(error) if bytes > (len - at_end).next_multiple_of(GRANULE) => {
                Chunk::new(&self.device, (len - at_end).next_multiple_of(GRANULE)).map_err(|_| error)?
            }
            Err(error) => return Err(error),
        };
        let bytes = chunk.bytes;
        self.reservation.push(chunk, &self.devices)?;
        if let (Some(announce), Some(chunk)) = (&mut self.announce, self.reservation.chunks().last()) {
            announce.announce(chunk).inspect_err(|error| self.closed = Some(error.clone()))?;
        }
        self.give_back(mapped, bytes);
        Ok(())
    }
}
