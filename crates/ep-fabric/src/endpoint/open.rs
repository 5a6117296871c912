//! Opens an endpoint, object by object.

use std::ptr;
use std::sync::Arc;

use ep::{EnvironmentError, Limits, Result, Window};

use super::Endpoint;
use super::memory::register;
use super::objects::{Contexts, Object, OpenDomain};
use super::steps::Steps;
use crate::info::{self, Chosen, Memory};
use crate::library::Library;
use crate::{Options, sys};

/// The functions of an open domain.
fn ops(domain: &OpenDomain) -> &sys::DomainOps {
    // SAFETY: an open domain has this table, which lives as long as the domain.
    unsafe { &*(*domain.domain.as_ptr::<sys::Domain>()).ops }
}

/// Opens a queue with room for this number of completions.
fn open_queue(steps: &Steps<'_>, domain: &OpenDomain, size: usize) -> Result<Object> {
    let mut attributes = sys::CqAttr {
        size,
        flags: 0,
        format: sys::CQ_FORMAT_DATA,
        wait_obj: sys::WAIT_NONE,
        signaling_vector: 0,
        wait_cond: 0,
        wait_set: ptr::null_mut(),
    };
    let mut queue = ptr::null_mut();
    let open = ops(domain).cq_open.ok_or_else(|| steps.missing("fi_cq_open"))?;
    // SAFETY: the domain is open; the attributes live during the call, which stores one pointer.
    let answer = unsafe { open(domain.domain.as_ptr(), &mut attributes, &mut queue, ptr::null_mut()) };
    steps.opened("fi_cq_open", answer as isize, Object::new(queue))
}

/// Opens a list of the addresses of peers.
fn open_addresses(steps: &Steps<'_>, domain: &OpenDomain, peers: usize) -> Result<Object> {
    let open = ops(domain).av_open.ok_or_else(|| steps.missing("fi_av_open"))?;
    let of_kind = |kind| {
        let mut attributes = sys::AvAttr {
            kind,
            rx_ctx_bits: 0,
            count: peers,
            ep_per_node: 0,
            name: ptr::null(),
            map_addr: ptr::null_mut(),
            flags: 0,
        };
        let mut vector = ptr::null_mut();
        // SAFETY: as in `open_queue`.
        let answer = unsafe { open(domain.domain.as_ptr(), &mut attributes, &mut vector, ptr::null_mut()) };
        steps.opened("fi_av_open", answer as isize, Object::new(vector))
    };
    of_kind(sys::AV_TABLE).or_else(|_| of_kind(sys::AV_MAP))
}

/// Opens the endpoint itself, with the queue and the list of addresses.
fn open_endpoint(
    steps: &Steps<'_>,
    info: &Chosen,
    domain: &OpenDomain,
    queue: &Object,
    addresses: &Object,
) -> Result<Object> {
    let open = ops(domain).endpoint.ok_or_else(|| steps.missing("fi_endpoint"))?;
    let mut endpoint = ptr::null_mut();
    // SAFETY: as in `open_queue`, with the entry.
    let answer =
        unsafe { open(domain.domain.as_ptr(), info.entry().as_ptr(), &mut endpoint, ptr::null_mut()) };
    let endpoint = steps.opened("fi_endpoint", answer as isize, Object::new(endpoint))?;
    steps.ok("fi_ep_bind to the queue", endpoint.bind(queue, sys::TRANSMIT | sys::RECV))?;
    steps.ok("fi_ep_bind to the addresses", endpoint.bind(addresses, 0))?;
    steps.ok("fi_enable", endpoint.enable())?;
    Ok(endpoint)
}

impl Endpoint {
    /// # Safety
    /// The window's memory must stay as its [`Window`] states until the window is dropped.
    pub(crate) unsafe fn open(
        library: Arc<Library>,
        options: &Options,
        nic: Option<&str>,
        window: Arc<dyn Window>,
        peers: usize,
        limits: Limits,
    ) -> Result<Self> {
        let memory = if window.gpu_part().is_some() { Memory::OfGpus } else { Memory::OfHost };
        let info = Chosen::new(&library, options, nic, memory)?;
        let entry = info.entry();
        let provider = entry.provider();
        let what = info::what(&library, options, nic);
        let largest = entry.ep().max_msg_size;
        if largest < limits.put_bytes {
            let problem =
                format!("a put of {} bytes; the provider carries at most {largest}", limits.put_bytes);
            return Err(EnvironmentError::new(what, problem, limits.advice).into());
        }
        let steps = Steps { library: &library, what: &what, limits };
        let domain = OpenDomain::new(&library, &info).map_err(|(step, answer)| steps.failed(step, answer))?;
        let signals = peers.saturating_mul(limits.signals);
        let puts = entry.tx().size.clamp(1, signals.max(1));
        let receives = match entry.mode() & sys::RX_CQ_DATA {
            0 => 0,
            _ => entry.rx().size.clamp(1, signals.max(1)),
        };
        // Room for the completion of every operation of this rank and for every signal of the peers.
        let queue = open_queue(&steps, &domain, puts + receives + signals)?;
        let addresses = open_addresses(&steps, &domain, peers)?;
        let endpoint = open_endpoint(&steps, &info, &domain, &queue, &addresses)?;
        // SAFETY: guaranteed by the caller; the endpoint keeps the window, and closes the regions before it drops it.
        let parts = unsafe { register(&steps, &info, &domain.domain, &endpoint, &*window) }?;
        let mut endpoint = Self {
            parts,
            endpoint,
            addresses,
            queue,
            _domain: domain,
            contexts: Contexts::new(puts + receives),
            info,
            library: Arc::clone(&library),
            _window: window,
            provider,
            puts,
            unposted: (puts..puts + receives).collect(),
        };
        endpoint.post_receives()?;
        Ok(endpoint)
    }
}
