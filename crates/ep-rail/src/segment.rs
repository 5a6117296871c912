//! Segments: mapped memory that other ranks can access, as threads of this process or as processes of this machine.

use std::ffi::c_void;
#[cfg(target_os = "linux")]
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use ep::{EnvironmentError, Result, Window};
use rustix::mm::{self, MapFlags, ProtFlags};

/// A mapping of zero-initialised memory, at least 4 KiB aligned.
///
/// Its bytes are accessed through raw pointers and atomics only, since other ranks may read and write them at any time.
/// The protocol of the backend says which rank may access which bytes when. Dropping a segment unmaps it, so code that
/// uses a pointer into it must keep the segment.
#[derive(Debug)]
pub struct Segment {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a segment is an address range; code that dereferences a pointer into it must justify the access.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// Maps `len` bytes for the threads of this process.
    ///
    /// # Errors
    /// [`EnvironmentError`] when the system does not have enough memory available, or refuses the mapping, as it does
    /// for a `len` of 0.
    pub fn private(len: usize) -> Result<Self> {
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

    /// The address of the first byte, a multiple of 4096.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Length, bytes.
    #[expect(clippy::len_without_is_empty, reason = "the system refuses a mapping of 0 bytes")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The address of `len` bytes at `offset`, valid as long as the segment.
    ///
    /// # Panics
    /// When the bytes are not inside the segment.
    pub fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "{len} bytes at {offset} of a segment of {} bytes",
            self.len
        );
        // SAFETY: offset is inside the mapping, as just checked.
        unsafe { self.start.as_ptr().add(offset) }
    }

    /// A reference to a `T` at `offset`, bytes.
    ///
    /// # Safety
    /// Any bytes must be a valid `T`, and all accesses to `T` must be atomic, since other ranks may write at any time.
    ///
    /// # Panics
    /// When the `T` is not inside the segment, or is not aligned.
    pub unsafe fn view<T>(&self, offset: usize) -> &T {
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

impl Window for Segment {
    fn start(&self) -> NonNull<u8> {
        Segment::start(self)
    }

    fn len(&self) -> usize {
        Segment::len(self)
    }
}

#[cfg(target_os = "linux")]
impl Segment {
    /// Maps `len` bytes that other processes can map through the returned file. The file has no name, so the system
    /// frees the memory when its processes end, even when they are killed. The file is sealed: its length cannot
    /// change, and access to a mapping of it cannot fault.
    ///
    /// # Errors
    /// Those of [`private`](Self::private).
    pub fn shared(len: usize) -> Result<(Self, OwnedFd)> {
        use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};
        check_available(len)?;
        let failed = |error: rustix::io::Errno| out_of_memory(len, &error);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("hybrid-ep", flags).map_err(failed)?;
        ftruncate(&file, len as u64).map_err(failed)?;
        fcntl_add_seals(&file, seals()).map_err(failed)?;
        Ok((Self::mapped(map(&file, len), len)?, file))
    }

    /// Maps the memory of another process: `len` bytes, the whole of a file that [`shared`](Self::shared) made there.
    ///
    /// # Errors
    /// A text that says what is wrong with the file: it is no memfd, is not sealed, has a different length or belongs
    /// to a different user. The peer that sent the file is at fault, so the caller adds its rank.
    pub fn received(file: &OwnedFd, len: usize) -> Result<Self, String> {
        use rustix::fs::{fcntl_get_seals, fstat};
        // Only files in memory have seals, and only memfds accept all of these.
        if !fcntl_get_seals(file).is_ok_and(|found| found.contains(seals())) {
            return Err("must be a memfd that is sealed against shrinking, growing and further seals".into());
        }
        let stat = fstat(file).map_err(|error| format!("fstat of its file: {error}"))?;
        if u64::try_from(stat.st_size) != Ok(len as u64) {
            return Err(format!("its file has {} bytes, but {len} were announced", stat.st_size));
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
    /// Shorter mappings are not checked: reading the available memory would cost more than the check is worth.
    const LARGE: usize = 64 << 20;
    if len < LARGE {
        return Ok(());
    }
    match ep::available_memory() {
        Some(available) if available < len as u64 => {
            Err(out_of_memory(len, &format!("only {available} bytes of memory are available")).into())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
