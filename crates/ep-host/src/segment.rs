//! Segments: runs of memory that other ranks can reach, as threads of this process or as processes of this machine.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use ep::{EnvironmentError, Rank, Result};
use rustix::mm::{self, MapFlags, ProtFlags};

/// A mapping of zero-initialised memory, 4 KiB aligned at least.
///
/// Its bytes are reached through raw pointers only: other ranks read and write them at any time, and what may be
/// touched when is the operators' protocol ([`crate::control`]).
#[derive(Debug)]
pub(crate) struct Segment {
    start: NonNull<u8>,
    len: usize,
    /// The memfd behind it, where other processes can open it.
    #[cfg(target_os = "linux")]
    file: Option<rustix::fd::OwnedFd>,
}

// SAFETY: a segment is an address range; whoever dereferences a pointer into it answers for the access.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// Memory for the threads of this process.
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
        // SAFETY: the range was mapped just now; advice changes no contents. Without huge pages it only is slower.
        #[cfg(target_os = "linux")]
        let _ = unsafe { mm::madvise(start, len, mm::Advice::LinuxHugepage) };
        let start = NonNull::new(start.cast()).expect("a mapping is not at address zero");
        Ok(Self {
            start,
            len,
            #[cfg(target_os = "linux")]
            file: None,
        })
    }

    /// Length, bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The address of `len` bytes at `offset`.
    ///
    /// # Panics
    /// When they are not inside the segment.
    pub(crate) fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "{len} bytes at {offset} of a segment of {} bytes",
            self.len
        );
        // SAFETY: offset is inside the mapping, as just checked.
        unsafe { self.start.as_ptr().add(offset) }
    }

    /// A reference to a `T` at `offset`.
    ///
    /// # Safety
    /// Any bytes must be a valid `T`, and everything in `T` must allow for other ranks' writes at any time: atomics.
    pub(crate) unsafe fn view<T>(&self, offset: usize) -> &T {
        let at = self.at(offset, size_of::<T>()).cast::<T>();
        assert!(at.is_aligned());
        // SAFETY: in bounds and aligned, alive as long as self; the rest is the caller's.
        unsafe { &*at }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the range is this segment's own mapping, and nobody holds a pointer into it longer than an Arc to
        // it. Unmapping a valid range cannot fail.
        let _ = unsafe { mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[cfg(target_os = "linux")]
impl Segment {
    /// Memory that other processes can open while this one lives. It has no name, so nothing of it stays behind
    /// when its processes end, however they end.
    pub(crate) fn shared(len: usize) -> Result<Self> {
        use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
        check_available(len)?;
        let failed = |error: rustix::io::Errno| out_of_memory(len, &error);
        let file = memfd_create("hybrid-ep", MemfdFlags::CLOEXEC).map_err(failed)?;
        ftruncate(&file, len as u64).map_err(failed)?;
        Self::of_file(file, len)
    }

    /// The segment that is file descriptor `fd` of process `pid`.
    pub(crate) fn open(pid: u32, fd: u32, len: usize) -> Result<Self> {
        use rustix::fs::{Mode, OFlags, open};
        let path = format!("/proc/{pid}/fd/{fd}");
        let file = open(&*path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(|error| {
            EnvironmentError::new(
                format!("opening a peer's memory at {path}"),
                error,
                "all ranks must run in one PID namespace, as the same user",
            )
        })?;
        Self::of_file(file, len)
    }

    fn of_file(file: rustix::fd::OwnedFd, len: usize) -> Result<Self> {
        // SAFETY: a fresh mapping at an address of the system's choice aliases nothing in this process; what other
        // processes do to the bytes is the protocol's business.
        let start = unsafe {
            mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )
        };
        let mut segment = Self::mapped(start, len)?;
        segment.file = Some(file);
        Ok(segment)
    }

    /// The number under which other processes find the memory.
    pub(crate) fn fd(&self) -> u32 {
        use std::os::fd::AsRawFd as _;
        self.file.as_ref().map_or(0, |file| file.as_raw_fd() as u32)
    }
}

#[cfg(not(target_os = "linux"))]
impl Segment {
    pub(crate) fn shared(_len: usize) -> Result<Self> {
        Err(no_processes())
    }

    pub(crate) fn open(_pid: u32, _fd: u32, _len: usize) -> Result<Self> {
        Err(no_processes())
    }

    pub(crate) fn fd(&self) -> u32 {
        0
    }
}

#[cfg(not(target_os = "linux"))]
fn no_processes() -> ep::Error {
    EnvironmentError::new("sharing memory between processes", "this needs Linux (memfd)", "use thread ranks")
        .into()
}

fn out_of_memory(len: usize, problem: &dyn std::fmt::Display) -> EnvironmentError {
    EnvironmentError::new(
        format!("mapping {len} bytes of registered memory"),
        problem,
        "fewer tokens, ranks or hidden need less memory",
    )
}

/// Shared memory is handed out page by page, when it is touched, and running out then kills the process: ask before.
fn check_available(len: usize) -> Result<()> {
    /// Smaller requests are not worth the look.
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

/// Bytes of memory that can be had without swapping, where the system says.
fn available_memory() -> Option<usize> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Segments by owner and the owner's number for it.
type Known = HashMap<(Rank, u64), Arc<Segment>>;

/// How the ranks of one world find each other's segments.
#[derive(Debug, Clone)]
pub(crate) struct Directory {
    /// Published by threads, or opened by this process.
    known: Arc<Mutex<Known>>,
    /// Process of each rank; none when the ranks are threads.
    pids: Option<Arc<[u32]>>,
}

/// What a rank needs to know to reach another's segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SegmentName {
    /// The owner's number for it; never reused.
    pub(crate) id: u64,
    pub(crate) fd: u32,
    pub(crate) len: usize,
}

impl Directory {
    /// For ranks that are threads: clones share what is published.
    pub(crate) fn of_threads() -> Self {
        Self { known: Arc::default(), pids: None }
    }

    /// For ranks that are processes.
    pub(crate) fn of_processes(pids: Vec<u32>) -> Self {
        Self { known: Arc::default(), pids: Some(pids.into()) }
    }

    /// A new segment of `rank` that its peers can find.
    pub(crate) fn create(&self, rank: Rank, id: u64, len: usize) -> Result<Arc<Segment>> {
        let segment =
            Arc::new(if self.pids.is_none() { Segment::private(len)? } else { Segment::shared(len)? });
        self.adopt(rank, id, &segment);
        Ok(segment)
    }

    /// Makes a segment known.
    pub(crate) fn adopt(&self, rank: Rank, id: u64, segment: &Arc<Segment>) {
        self.lock().insert((rank, id), Arc::clone(segment));
    }

    /// A peer's segment.
    pub(crate) fn find(&self, rank: Rank, name: SegmentName) -> Result<Arc<Segment>> {
        let mut known = self.lock();
        if let Some(segment) = known.get(&(rank, name.id)) {
            return Ok(Arc::clone(segment));
        }
        let Some(pids) = &self.pids else {
            return Err(EnvironmentError::new(
                format!("finding segment {} of rank {rank}", name.id),
                "it was never published",
                "",
            )
            .into());
        };
        let segment = Arc::new(Segment::open(pids[rank.index()], name.fd, name.len)?);
        known.insert((rank, name.id), Arc::clone(&segment));
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
        let name = SegmentName { id: 3, fd: mine.fd(), len: 4096 };
        assert_eq!(directory.clone().find(Rank(0), name).unwrap().at(0, 1), mine.at(0, 1));
        assert!(directory.find(Rank(1), name).unwrap_err().to_string().contains("segment 3 of rank 1"));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn processes_open_the_same_bytes() {
        let pids = vec![std::process::id()];
        let mine = Directory::of_processes(pids.clone()).create(Rank(0), 1, 8192).unwrap();
        let theirs = Directory::of_processes(pids)
            .find(Rank(0), SegmentName { id: 1, fd: mine.fd(), len: 8192 })
            .unwrap();
        assert_ne!(mine.at(0, 1), theirs.at(0, 1));
        // SAFETY: both ranges are mapped, and only this thread touches them.
        unsafe {
            mine.at(5000, 1).write(77);
            assert_eq!(theirs.at(5000, 1).read(), 77);
        }
    }

    #[test]
    fn more_than_there_is_is_refused() {
        let error = Segment::private(1 << 46).unwrap_err().to_string();
        assert!(error.contains("70368744177664 bytes") && error.contains("available"), "{error}");
    }

    #[test]
    #[should_panic(expected = "16 bytes at 4090 of a segment of 4096 bytes")]
    fn bounds_are_checked() {
        Segment::private(4096).unwrap().at(4090, 16);
    }
}
