//! Segments: mapped memory that other ranks can access, as threads of this process or as processes of this machine.
//!
//! `join` makes the segments of control blocks and windows, `memory` those of the arena. `comm` finds the segments of
//! peers through the [`Directory`].

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use ep::{EnvironmentError, Rank, Result};
#[cfg(target_os = "linux")]
use rustix::fd::OwnedFd;
use rustix::mm::{self, MapFlags, ProtFlags};

use crate::processes::Processes;

/// Bytes at the end of a control block's or window's segment that hold the job's stamp.
pub(crate) const STAMP_BYTES: usize = 64;

/// A mapping of zero-initialised memory, at least 4 KiB aligned.
///
/// Its bytes are accessed through raw pointers and atomics only, since other ranks may read and write them at any time.
/// The protocol in [`crate::control`] says which rank may access which bytes when.
#[derive(Debug)]
pub(crate) struct Segment {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a segment is an address range; code that dereferences a pointer into it must justify the access.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// Maps `len` bytes for the threads of this process.
    pub(crate) fn private(len: usize) -> Result<Self> {
        check_available(len)?;
        // SAFETY: a fresh mapping at an address of the system's choice aliases nothing.
        let start = unsafe {
            mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        };
        Self::mapped(start, len)
    }

    fn mapped(start: rustix::io::Result<*mut c_void>, len: usize) -> Result<Self> {
        let start = start.map_err(|error| out_of_memory(len, &error))?;
        // SAFETY: the range was mapped just now, and advice changes no contents. Without huge pages, access is slower.
        #[cfg(all(target_os = "linux", not(miri)))]
        let _ = unsafe { mm::madvise(start, len, mm::Advice::LinuxHugepage) };
        let start = NonNull::new(start.cast()).expect("a mapping is not at address zero");
        Ok(Self { start, len })
    }

    /// The address of the first byte.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Length, bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The address of `len` bytes at `offset`.
    ///
    /// # Panics
    /// When the bytes are not inside the segment.
    pub(crate) fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "{len} bytes at {offset} of a segment of {} bytes",
            self.len
        );
        // SAFETY: offset is inside the mapping, as just checked.
        unsafe { self.start.as_ptr().add(offset) }
    }

    /// The words of the stamp, in the last [`STAMP_BYTES`] bytes. Control blocks and windows reserve these bytes.
    fn stamp_words(&self) -> &[AtomicU64; 4] {
        // SAFETY: any bytes are valid atomics.
        unsafe { self.view(self.len - STAMP_BYTES) }
    }

    /// Writes the stamp, which marks the segment as one of this job.
    pub(crate) fn stamp(&self, stamp: &[u8; 32]) {
        for (word, bytes) in self.stamp_words().iter().zip(stamp.as_chunks().0) {
            word.store(u64::from_le_bytes(*bytes), Relaxed);
        }
    }

    /// Whether the segment has this stamp.
    pub(crate) fn has_stamp(&self, stamp: &[u8; 32]) -> bool {
        let words = self.stamp_words().iter().zip(stamp.as_chunks().0);
        words.fold(true, |same, (word, bytes)| same & (word.load(Relaxed) == u64::from_le_bytes(*bytes)))
    }

    /// A reference to a `T` at `offset`.
    ///
    /// # Safety
    /// Any bytes must be a valid `T`, and all accesses to `T` must be atomic, since other ranks may write at any time.
    pub(crate) unsafe fn view<T>(&self, offset: usize) -> &T {
        let at = self.at(offset, size_of::<T>()).cast::<T>();
        assert!(at.is_aligned());
        // SAFETY: in bounds and aligned, and mapped as long as `self`; the caller promised the rest.
        unsafe { &*at }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the range is this segment's own mapping, and pointers into it are used only while an `Arc` keeps the
        // segment. Unmapping a valid range cannot fail.
        let _ = unsafe { mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[cfg(target_os = "linux")]
impl Segment {
    /// Maps `len` bytes that other processes can map through the returned file. The file has no name, so the system
    /// frees the memory when its processes end, even when they are killed. The file is sealed: its length cannot
    /// change, and access to a mapping of it cannot fault.
    pub(crate) fn shared(len: usize) -> Result<(Self, OwnedFd)> {
        use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};
        check_available(len)?;
        let failed = |error: rustix::io::Errno| out_of_memory(len, &error);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("hybrid-ep", flags).map_err(failed)?;
        ftruncate(&file, len as u64).map_err(failed)?;
        fcntl_add_seals(&file, seals()).map_err(failed)?;
        Ok((Self::mapped(map(&file, len), len)?, file))
    }

    /// Maps the memory of another process.
    ///
    /// # Errors
    /// A text that says what is wrong with the file.
    pub(crate) fn received(file: &OwnedFd, len: usize) -> Result<Self, String> {
        use rustix::fs::{fcntl_get_seals, fstat};
        // Only files in memory have seals, and only memfds accept all of these.
        if !fcntl_get_seals(file).is_ok_and(|found| found.contains(seals())) {
            return Err("must be a memfd that is sealed against shrinking, growing and further seals".into());
        }
        let stat = fstat(file).map_err(|error| format!("fstat of its file: {error}"))?;
        if u64::try_from(stat.st_size) != Ok(len as u64) {
            return Err(format!("its file has {} bytes, {len} were announced", stat.st_size));
        }
        let user = rustix::process::geteuid().as_raw();
        if stat.st_uid != user {
            return Err(format!("its file belongs to uid {}, not to uid {user}", stat.st_uid));
        }
        Self::mapped(map(file, len), len).map_err(|error| format!("mapping it: {error}"))
    }
}

#[cfg(target_os = "linux")]
fn seals() -> rustix::fs::SealFlags {
    use rustix::fs::SealFlags;
    SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL
}

#[cfg(target_os = "linux")]
fn map(file: &OwnedFd, len: usize) -> rustix::io::Result<*mut c_void> {
    // SAFETY: a fresh mapping at an address of the system's choice aliases nothing in this process. All accesses allow
    // for writes by other processes, and the seals keep the file as long as the mapping.
    unsafe {
        mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0)
    }
}

fn out_of_memory(len: usize, problem: &dyn std::fmt::Display) -> EnvironmentError {
    EnvironmentError::new(
        format!("mapping {len} bytes of registered memory"),
        problem,
        "use fewer tokens or ranks, or a smaller hidden",
    )
}

/// Checks that a large mapping fits the available memory. The system allocates pages at their first access, and kills
/// the process when it has none left, so the check must come before.
fn check_available(len: usize) -> Result<()> {
    /// Shorter mappings are not checked: reading `/proc/meminfo` would cost more than the check is worth.
    const LARGE: usize = 64 << 20;
    if len < LARGE {
        return Ok(());
    }
    match available_memory() {
        Some(available) if available < len => {
            Err(out_of_memory(len, &format!("only {available} bytes of memory are available")).into())
        }
        _ => Ok(()),
    }
}

/// Bytes of memory available without swapping; `None` where the system does not say.
fn available_memory() -> Option<usize> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Segments by owner and the owner's number.
type Known = HashMap<(Rank, u64), Arc<Segment>>;

/// Finds the segments of the ranks of one world.
#[derive(Debug, Clone)]
pub(crate) struct Directory {
    /// With thread ranks, all segments; with process ranks, those that this process has made or found.
    known: Arc<Mutex<Known>>,
    /// Empty with thread ranks.
    processes: Processes,
}

/// The identity of a segment among those of its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SegmentName {
    /// The owner's number for the segment; never reused.
    pub(crate) id: u64,
    pub(crate) len: usize,
}

impl Directory {
    /// A directory for ranks that are threads; all of them must use clones of one value.
    pub(crate) fn of_threads() -> Self {
        Self::of_processes(Processes::default())
    }

    /// A directory for ranks that are processes.
    pub(crate) fn of_processes(processes: Processes) -> Self {
        Self { known: Arc::default(), processes }
    }

    /// Makes a segment of `rank` and announces it to the peers.
    pub(crate) fn create(&self, rank: Rank, id: u64, len: usize) -> Result<Arc<Segment>> {
        let segment = if self.processes.is_empty() {
            Segment::private(len)?
        } else {
            #[cfg(not(target_os = "linux"))]
            return Err(crate::processes::unsupported());
            #[cfg(target_os = "linux")]
            {
                let (segment, file) = Segment::shared(len)?;
                self.processes.announce(SegmentName { id, len }, &file)?;
                segment
            }
        };
        let segment = Arc::new(segment);
        self.adopt(rank, id, &segment);
        Ok(segment)
    }

    /// Adds a segment of `rank`.
    pub(crate) fn adopt(&self, rank: Rank, id: u64, segment: &Arc<Segment>) {
        self.lock().insert((rank, id), Arc::clone(segment));
    }

    /// The segment `name` of `rank`. Waits, within the stall bound, for a segment of a process to arrive.
    ///
    /// # Errors
    /// [`ep::PeerError`] when it does not arrive or is not what was announced; [`EnvironmentError`] with thread ranks.
    pub(crate) fn find(&self, rank: Rank, name: SegmentName) -> Result<Arc<Segment>> {
        if let Some(segment) = self.lock().get(&(rank, name.id)) {
            return Ok(Arc::clone(segment));
        }
        let segment = self.processes.find(rank, name)?;
        self.adopt(rank, name.id, &segment);
        Ok(segment)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_share_one_segment() {
        let directory = Directory::of_threads();
        let mine = directory.create(Rank(0), 3, 4096).unwrap();
        let name = SegmentName { id: 3, len: 4096 };
        assert_eq!(directory.clone().find(Rank(0), name).unwrap().at(0, 1), mine.at(0, 1));
        assert!(directory.find(Rank(1), name).unwrap_err().to_string().contains("segment 3 of rank 1"));
    }

    #[test]
    fn a_mapping_larger_than_the_available_memory_is_refused() {
        let error = Segment::private(1 << 46).unwrap_err().to_string();
        assert!(error.contains("70368744177664 bytes") && error.contains("available"), "{error}");
    }

    #[test]
    #[should_panic(expected = "16 bytes at 4090 of a segment of 4096 bytes")]
    fn addresses_outside_of_a_segment_panic() {
        Segment::private(4096).unwrap().at(4090, 16);
    }
}
