//! The registered memory of a window.

use std::ptr;
use std::sync::Arc;

use ep::{EnvironmentError, GpuPart, Result, Window};

use super::objects::{Object, OpenDomain, opened};
use super::steps::{REGISTER_GPU, Steps};
use crate::info::{Chosen, Memory};
use crate::library::Library;
use crate::{Options, sys};

/// A registered part of this rank's window.
pub(super) struct Part {
    pub(super) region: Object,
    pub(super) start: *mut u8,
    pub(super) len: usize,
    /// What the provider calls the first byte.
    pub(super) base: u64,
}

// SAFETY: the pointer is an address; only the library accesses the memory through it.
unsafe impl Send for Part {}

impl Part {
    pub(super) fn mr(&self) -> &sys::Mr {
        // SAFETY: an open region begins with this structure.
        unsafe { &*self.region.as_ptr::<sys::Mr>() }
    }
}

/// Registers the parts of a window.
///
/// # Safety
/// `domain` and `endpoint` must be open. The window's memory must stay mapped until the parts are dropped.
pub(super) unsafe fn register(
    steps: &Steps<'_>,
    info: &Chosen,
    domain: &Object,
    endpoint: &Object,
    window: &dyn Window,
) -> Result<Vec<Part>> {
    let mr_mode = info.entry().domain().mr_mode;
    let key = match mr_mode & sys::MR_PROV_KEY {
        0 => Some(random_key(steps, info.entry().domain().mr_key_size)?),
        _ => None,
    };
    // SAFETY: an open domain has this table.
    let ops = unsafe { &*(*domain.as_ptr::<sys::Domain>()).mr };
    let access = sys::WRITE | sys::REMOTE_WRITE;
    let register = ops.reg.ok_or_else(|| steps.missing("fi_mr_reg"))?;
    let mut region = ptr::null_mut::<sys::Mr>();
    let (start, len, none) = (window.start().as_ptr(), window.len(), ptr::null_mut());
    // SAFETY: the caller guarantees that the memory stays mapped.
    let answer = unsafe {
        register(domain.as_ptr(), start.cast(), len, access, 0, key.unwrap_or(0), 0, &mut region, none)
    };
    let region = steps.opened("fi_mr_reg", answer as isize, Object::new(region))?;
    let mut regions = vec![(region, start, len)];
    if let Some(part) = window.gpu_part() {
        // Another key than that of the host memory, with as many bits.
        // SAFETY: as above.
        let region = unsafe { register_gpu_part(domain, part, key.map_or(0, |key| key ^ 1)) };
        let region = region.map_err(|answer| steps.failed(REGISTER_GPU, answer))?;
        // The address belongs to the GPU: this process cannot access it.
        let start = ptr::with_exposed_provenance_mut::<u8>(part.address as usize);
        regions.push((region, start, part.len));
    }
    let part = |(region, start, len): (Object, *mut u8, usize)| {
        if mr_mode & sys::MR_ENDPOINT != 0 {
            steps.ok("fi_mr_bind", region.bind(endpoint, 0))?;
            steps.ok("fi_mr_enable", region.enable())?;
        }
        let base = if mr_mode & sys::MR_VIRT_ADDR == 0 { 0 } else { start.expose_provenance() as u64 };
        let part = Part { region, start, len, base };
        if part.mr().key == sys::KEY_NOTAVAIL && mr_mode & sys::MR_PROV_KEY != 0 {
            let hint = "set HYBRID_EP_TRANSPORT to another provider";
            let problem = "fi_mr_key: the provider has no key of at most 8 bytes for the window";
            return Err(EnvironmentError::new(steps.what, problem, hint).into());
        }
        Ok(part)
    };
    regions.into_iter().map(part).collect()
}

/// A key of `bytes` bytes. It is random where the provider leaves the choice to the engine, so that no other program can guess it. Keys
/// have at least 4 bytes with all providers.
fn random_key(steps: &Steps<'_>, bytes: usize) -> Result<u64> {
    let mut key = [0; 8];
    getrandom::fill(&mut key).map_err(|error| {
        EnvironmentError::new(steps.what, error, "give this process access to the system's random numbers")
    })?;
    Ok(u64::from_le_bytes(key) >> (u64::BITS - bytes.clamp(1, 8) as u32 * 8))
}

/// Registers memory of a GPU.
///
/// # Safety
/// `domain` must be an open domain, and the memory must stay mapped until the region is dropped.
///
/// # Errors
/// The library's answer.
unsafe fn register_gpu_part(
    domain: &Object,
    part: GpuPart,
    requested_key: u64,
) -> std::result::Result<Object, isize> {
    // SAFETY: guaranteed by the caller: an open domain has this table.
    let register = unsafe { (*(*domain.as_ptr::<sys::Domain>()).mr).regattr }.ok_or(-sys::ENOSYS)?;
    let memory = sys::Iovec { base: ptr::with_exposed_provenance_mut(part.address as usize), len: part.len };
    let attributes = sys::MrAttr {
        mr_iov: &memory,
        iov_count: 1,
        access: sys::WRITE | sys::REMOTE_WRITE,
        offset: 0,
        requested_key,
        context: ptr::null_mut(),
        auth_key_size: 0,
        auth_key: ptr::null_mut(),
        iface: sys::HMEM_CUDA,
        device: sys::MrDevice { cuda: part.gpu },
        later: [0; 8],
    };
    let mut region = ptr::null_mut::<sys::Mr>();
    // SAFETY: the attributes live during the call, which stores one pointer.
    let answer = unsafe { register(domain.as_ptr(), &attributes, 0, &mut region) };
    opened(answer as isize, Object::new(region))
}

/// Registers memory of a GPU, and ends the registration again. Returns why that is not possible.
///
/// # Safety
/// The memory must stay mapped during the call.
pub(crate) unsafe fn try_gpu_memory(
    library: &Arc<Library>,
    options: &Options,
    nic: Option<&str>,
    part: GpuPart,
) -> Result<std::result::Result<(), String>> {
    let Ok(info) = Chosen::find(library, options, nic, Memory::OfGpus)? else {
        return Ok(Err("the provider does not register the memory of GPUs (FI_HMEM)".into()));
    };
    let said = |step: &str, answer| format!("{step}: {}", library.text(answer));
    let domain = match OpenDomain::new(library, &info) {
        Ok(domain) => domain,
        Err((step, answer)) => return Ok(Err(said(step, answer))),
    };
    // SAFETY: guaranteed by the caller; the region is closed before the domain.
    let region = unsafe { register_gpu_part(&domain.domain, part, 1) };
    Ok(region.map(drop).map_err(|answer| said(REGISTER_GPU, answer)))
}
