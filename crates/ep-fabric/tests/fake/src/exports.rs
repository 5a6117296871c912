//! The exported functions.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::settings::Offer;
use crate::world::{Copy, world};
use crate::{info, sys, tables};

static VERSION: AtomicU32 = AtomicU32::new(sys::version(1, 17));

fn string(text: *const c_char) -> String {
    // SAFETY: callers pass strings, or null.
    let text = unsafe { text.as_ref().map(|text| CStr::from_ptr(text)) };
    text.map_or(String::new(), |text| text.to_string_lossy().into_owned())
}

/// Adds a NIC to a provider. The first NIC of a provider creates the provider.
///
/// # Safety
/// The offer must live during the call, with its strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_offer(offer: *const Offer) {
    // SAFETY: guaranteed by the caller.
    let offer = unsafe { *offer };
    world().offer(&string(offer.provider), string(offer.domain), string(offer.node), offer.settings);
}

/// Writes to `text` what the fake has recorded about a provider, cut at `len` bytes. Returns the length of the whole
/// report. Each line has a word, a number and a text.
///
/// The words: `open`, objects of a kind that are not closed; `endpoint`, endpoints that were ever opened on a NIC;
/// `class`, endpoints that were ever opened with a traffic class; `puts`, puts that were posted on a NIC; `waits`,
/// attempts to deliver an immediate without a posted receive; `gpu`, regions in the memory of GPUs that were registered; `wrong`, calls that libfabric does not allow.
///
/// # Safety
/// `provider` must be a string, and `text` have room for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_report(provider: *const c_char, text: *mut c_char, len: usize) -> usize {
    let report = world().report(&string(provider));
    // SAFETY: guaranteed by the caller.
    unsafe { text.cast::<u8>().copy_from_nonoverlapping(report.as_ptr(), report.len().min(len)) };
    report.len()
}

/// Declares `len` bytes to be memory of a GPU: they must be registered as such.
#[unsafe(no_mangle)]
pub extern "C" fn fake_set_gpu_memory(start: usize, len: usize) {
    world().set_gpu_memory(start, len);
}

/// Makes this function copy all bytes of all networks. Tests with a GPU set it, so the fake then takes any memory for that of a
/// GPU that is registered as such.
#[unsafe(no_mangle)]
pub extern "C" fn fake_set_copy(copy: Copy) {
    world().copy = Some(copy);
}

/// Sets the version that the library claims to have.
#[unsafe(no_mangle)]
pub extern "C" fn fake_set_version(version: u32) {
    VERSION.store(version, Relaxed);
}

#[unsafe(no_mangle)]
extern "C" fn fi_version() -> u32 {
    VERSION.load(Relaxed)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fi_getinfo(
    version: u32,
    node: *const c_char,
    _service: *const c_char,
    flags: u64,
    hints: *const sys::Info,
    first: *mut *mut sys::Info,
) -> c_int {
    if version > VERSION.load(Relaxed) {
        return -(sys::ENOSYS as c_int);
    }
    let node = (flags & sys::SOURCE != 0).then(|| string(node));
    // SAFETY: the caller passes hints that libfabric allocated, or none.
    match unsafe { info::list(&mut world(), node, hints.as_ref()) } {
        Ok(list) => {
            // SAFETY: the caller's variable.
            unsafe { *first = list };
            0
        }
        Err(answer) => answer,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fi_freeinfo(first: *mut sys::Info) {
    // SAFETY: the caller passes a list of this library, which `info` checks.
    unsafe { info::free_list(&mut world(), first) };
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fi_dupinfo(entry: *const sys::Info) -> *mut sys::Info {
    // SAFETY: the caller passes an entry of this library, or null.
    unsafe { info::copy(&mut world(), entry) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fi_fabric(
    attributes: *mut sys::FabricAttr,
    fabric: *mut *mut sys::Fabric,
    _context: *mut c_void,
) -> c_int {
    // SAFETY: the attributes of an entry, and the caller's variable.
    unsafe { tables::open_fabric(&*attributes, fabric) }
}

#[unsafe(no_mangle)]
extern "C" fn fi_strerror(error: c_int) -> *const c_char {
    match error {
        5 => c"Input/output error",
        11 => c"Resource temporarily unavailable",
        12 => c"Cannot allocate memory",
        13 => c"Permission denied",
        22 => c"Invalid argument",
        38 => c"Function not implemented",
        61 => c"No data available",
        104 => c"Connection reset by peer",
        269 => c"Receiver not ready, no receive buffers available",
        _ => c"Unspecified error",
    }
    .as_ptr()
}
