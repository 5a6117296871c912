//! Owners of what an endpoint consists of: objects of libfabric, and memory that it uses for operations in flight.

use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};

use crate::info::Chosen;
use crate::library::Library;
use crate::sys;

/// An object of libfabric, which is closed when it is dropped.
pub(super) struct Object(NonNull<sys::Fid>);

// SAFETY: the objects are used under the engine's lock, by one thread at a time (`FI_THREAD_DOMAIN`).
unsafe impl Send for Object {}

impl Object {
    /// The object that a function of the library stored; every object begins with its [`sys::Fid`].
    pub(super) fn new<T>(object: *mut T) -> Option<Self> {
        NonNull::new(object.cast()).map(Self)
    }

    pub(super) fn as_ptr<T>(&self) -> *mut T {
        self.0.as_ptr().cast()
    }

    /// The generic functions of the object.
    pub(super) fn ops(&self) -> &sys::Ops {
        // SAFETY: an open object has this table.
        unsafe { &*(*self.0.as_ptr()).ops }
    }

    pub(super) fn bind(&self, to: &Self, flags: u64) -> isize {
        // SAFETY: both objects are open.
        self.ops()
            .bind
            .map_or(-sys::ENOSYS, |bind| unsafe { bind(self.as_ptr(), to.as_ptr(), flags) } as isize)
    }

    pub(super) fn enable(&self) -> isize {
        // SAFETY: the object is open, and the command takes no argument.
        let enable = |control: unsafe extern "C" fn(*mut sys::Fid, c_int, *mut c_void) -> c_int| unsafe {
            control(self.as_ptr(), sys::ENABLE, ptr::null_mut())
        };
        self.ops().control.map_or(-sys::ENOSYS, |control| enable(control) as isize)
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        if let Some(close) = self.ops().close {
            // SAFETY: the object is open; `Endpoint` closes what uses an object before the object.
            let _ = unsafe { close(self.as_ptr()) };
        }
    }
}

/// The object that a call of the library has opened, or the library's answer.
pub(super) fn opened(answer: isize, object: Option<Object>) -> std::result::Result<Object, isize> {
    match object {
        Some(object) if answer == 0 => Ok(object),
        _ => Err(if answer == 0 { -sys::ENOSYS } else { answer }),
    }
}

/// An open domain of a NIC. The fields are in the order in which they must be dropped.
pub(super) struct OpenDomain {
    pub(super) domain: Object,
    _fabric: Object,
}

impl OpenDomain {
    /// # Errors
    /// The step that failed, and the library's answer.
    pub(super) fn new(library: &Library, info: &Chosen) -> std::result::Result<Self, (&'static str, isize)> {
        let (entry, none) = (info.entry(), ptr::null_mut());
        let opened =
            |step, answer: c_int, object| opened(answer as isize, object).map_err(|answer| (step, answer));
        let mut fabric = ptr::null_mut();
        // SAFETY: the attributes belong to the entry; the call stores one pointer.
        let answer = unsafe { (library.fabric)(entry.fabric_attr(), &mut fabric, none) };
        let fabric_object = opened("fi_fabric", answer, Object::new(fabric))?;
        let mut domain = ptr::null_mut();
        // SAFETY: an open fabric has this table.
        let open = unsafe { (*(*fabric).ops).domain }.ok_or(("fi_domain", -sys::ENOSYS))?;
        // SAFETY: as above, with an open fabric and the entry.
        let answer = unsafe { open(fabric, entry.as_ptr(), &mut domain, none) };
        Ok(Self { domain: opened("fi_domain", answer, Object::new(domain))?, _fabric: fabric_object })
    }
}

/// Memory that the library uses for one operation while it is in flight (`fi_context2`).
#[repr(C, align(64))]
struct Context([u8; 64]);

/// The contexts of all operations, at addresses that do not change. The library reads and writes them.
pub(super) struct Contexts {
    first: NonNull<Context>,
    count: usize,
}

// SAFETY: plain memory; only the library accesses it, under the engine's lock.
unsafe impl Send for Contexts {}

impl Contexts {
    pub(super) fn new(count: usize) -> Self {
        let contexts: Box<[Context]> = (0..count).map(|_| Context([0; 64])).collect();
        let first = NonNull::new(Box::into_raw(contexts).cast()).expect("a box is not null");
        Self { first, count }
    }

    pub(super) fn at(&self, index: usize) -> *mut c_void {
        assert!(index < self.count);
        // SAFETY: inside the allocation.
        unsafe { self.first.add(index) }.as_ptr().cast()
    }

    /// The index of a context that the library returned.
    pub(super) fn index(&self, context: *mut c_void) -> Option<usize> {
        let offset = context.addr().checked_sub(self.first.addr().get())?;
        let index = offset / size_of::<Context>();
        (offset.is_multiple_of(size_of::<Context>()) && index < self.count).then_some(index)
    }
}

impl Drop for Contexts {
    fn drop(&mut self) {
        // SAFETY: made by `new` from a box of this length; the endpoint is closed, so the library is done with it.
        drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(self.first.as_ptr(), self.count)) });
    }
}
