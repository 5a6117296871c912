//! An endpoint with its window: the objects of libfabric, opened and closed in order, and the three calls that move
//! bytes. No call here may run at the same time as another one of the same endpoint; `engine` has the lock.

use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use ep::{EnvironmentError, Error, GpuPart, Limits, Result, Window};

use crate::blob::{self, Blob};
use crate::info::{self, Chosen, LOG_HINT, Memory};
use crate::library::Library;
use crate::nics::Bus;
use crate::{Options, sys};

/// An object of libfabric, which is closed when it is dropped.
struct Object(NonNull<sys::Fid>);

// SAFETY: the objects are used under the engine's lock, by one thread at a time (`FI_THREAD_DOMAIN`).
unsafe impl Send for Object {}

impl Object {
    /// The object that a function of the library stored; every object begins with its [`sys::Fid`].
    fn new<T>(object: *mut T) -> Option<Self> {
        NonNull::new(object.cast()).map(Self)
    }

    fn as_ptr<T>(&self) -> *mut T {
        self.0.as_ptr().cast()
    }

    /// The generic functions of the object.
    fn ops(&self) -> &sys::Ops {
        // SAFETY: an open object has this table.
        unsafe { &*(*self.0.as_ptr()).ops }
    }

    fn bind(&self, to: &Self, flags: u64) -> isize {
        // SAFETY: both objects are open.
        self.ops()
            .bind
            .map_or(-sys::ENOSYS, |bind| unsafe { bind(self.as_ptr(), to.as_ptr(), flags) } as isize)
    }

    fn enable(&self) -> isize {
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

/// The step that registers the memory of a GPU, as errors name it.
const REGISTER_GPU: &str = "fi_mr_regattr of GPU memory";

/// The object that a call of the library has opened, or the library's answer.
fn opened(answer: isize, object: Option<Object>) -> std::result::Result<Object, isize> {
    match object {
        Some(object) if answer == 0 => Ok(object),
        _ => Err(if answer == 0 { -sys::ENOSYS } else { answer }),
    }
}

/// An open domain of a NIC. The fields are in the order in which they must be dropped.
struct OpenDomain {
    domain: Object,
    _fabric: Object,
}

impl OpenDomain {
    /// # Errors
    /// The step that failed, and the library's answer.
    fn new(library: &Library, info: &Chosen) -> std::result::Result<Self, (&'static str, isize)> {
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

/// Memory that the library uses for one operation while it is in flight (`fi_context2`).
#[repr(C, align(64))]
pub(crate) struct Context([u8; 64]);

/// The contexts of all operations, at addresses that do not change. The library reads and writes them.
struct Contexts {
    first: NonNull<Context>,
    count: usize,
}

// SAFETY: plain memory; only the library accesses it, under the engine's lock.
unsafe impl Send for Contexts {}

impl Contexts {
    fn new(count: usize) -> Self {
        let contexts: Box<[Context]> = (0..count).map(|_| Context([0; 64])).collect();
        let first = NonNull::new(Box::into_raw(contexts).cast()).expect("a box is not null");
        Self { first, count }
    }

    fn at(&self, index: usize) -> *mut c_void {
        assert!(index < self.count);
        // SAFETY: inside the allocation.
        unsafe { self.first.add(index) }.as_ptr().cast()
    }

    /// The index of a context that the library returned.
    fn index(&self, context: *mut c_void) -> Option<usize> {
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

/// What the queue of completions delivered.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Completion {
    /// The put with this context is complete.
    Put(usize),
    /// The put with this context failed.
    Failed(usize, String),
    /// A peer's put has arrived, with this immediate.
    Arrived(u32),
}

/// A part of a peer's window.
#[derive(Debug, Clone, Copy, Default)]
struct RemotePart {
    key: u64,
    base: u64,
    len: usize,
}

/// Where a peer's window is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Remote {
    address: sys::Address,
    /// In order of their offsets. Parts that the window does not have are empty.
    parts: [RemotePart; Blob::MOST_PARTS],
}

impl Remote {
    /// The lengths of the window's parts, in order.
    pub(crate) fn lens(&self) -> impl Iterator<Item = usize> + '_ {
        self.parts.iter().map(|part| part.len)
    }
}

/// The part in which `len` bytes at an offset of a window lie, and the offset in that part. `lens` are those of the parts, in
/// order.
///
/// # Errors
/// The offset at which the part ends that has the first byte; the length of the window if none has it.
pub(crate) fn place(
    lens: impl Iterator<Item = usize>,
    offset: usize,
    len: usize,
) -> std::result::Result<(usize, usize), usize> {
    let mut start = 0;
    for (part, part_len) in lens.enumerate() {
        let within = offset - start;
        if within < part_len || (len == 0 && within == part_len) {
            return if len <= part_len - within { Ok((part, within)) } else { Err(start + part_len) };
        }
        start += part_len;
    }
    Err(start)
}

/// A registered part of this rank's window.
struct Part {
    region: Object,
    start: *mut u8,
    len: usize,
    /// What the provider calls the first byte.
    base: u64,
}

// SAFETY: the pointer is an address; only the library accesses the memory through it.
unsafe impl Send for Part {}

impl Part {
    fn mr(&self) -> &sys::Mr {
        // SAFETY: an open region begins with this structure.
        unsafe { &*self.region.as_ptr::<sys::Mr>() }
    }
}

/// The fields are in the order in which they must be dropped.
pub(crate) struct Endpoint {
    /// In order of their offsets: the part in host memory, then that in the memory of a GPU.
    parts: Vec<Part>,
    endpoint: Object,
    addresses: Object,
    queue: Object,
    _domain: OpenDomain,
    contexts: Contexts,
    info: Chosen,
    library: Arc<Library>,
    /// Keeps the memory of the parts.
    _window: Arc<dyn Window>,
    provider: String,
    /// Contexts of puts come first, and then those of posted receives.
    puts: usize,
    /// Contexts of receives that have to be posted, where immediates need posted receives.
    unposted: Vec<usize>,
}

impl Endpoint {
    /// The CPUs near the NIC; empty if the provider or the machine does not tell.
    pub(crate) fn near_cpus(&self) -> Vec<usize> {
        let address = self.info.entry().pci_address();
        address.map(|address| Bus::of_this_machine().cpus(&address)).unwrap_or_default()
    }

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
        let gpu_part = window.gpu_part();
        let memory = if gpu_part.is_some() { Memory::OfGpus } else { Memory::OfHost };
        let info = Chosen::new(&library, options, nic, memory)?;
        let entry = info.entry();
        let provider = entry.provider();
        let what = info::what(&library, options, nic);
        let failed = |step: &str, answer: isize| -> Error {
            let hint = match step {
                "fi_mr_reg" => format!("raise the limit of locked memory (ulimit -l), or {}", limits.advice),
                REGISTER_GPU => GpuPart::HINT.to_owned(),
                "fi_cq_open" => limits.advice.to_owned(),
                _ => LOG_HINT.to_owned(),
            };
            EnvironmentError::new(&what, format!("{step}: {}", library.text(answer)), hint).into()
        };
        let ok = |step: &str, answer: isize| if answer == 0 { Ok(()) } else { Err(failed(step, answer)) };
        let opened =
            |step: &str, answer: isize, object| opened(answer, object).map_err(|answer| failed(step, answer));
        let missing = |step: &str| failed(step, -sys::ENOSYS);
        let (largest, mr_mode) = (entry.ep().max_msg_size, entry.domain().mr_mode);
        if largest < limits.put_bytes {
            let problem =
                format!("a put of {} bytes; the provider carries at most {largest}", limits.put_bytes);
            return Err(EnvironmentError::new(what, problem, limits.advice).into());
        }
        let none = ptr::null_mut();
        let open_domain = OpenDomain::new(&library, &info).map_err(|(step, answer)| failed(step, answer))?;
        let domain = open_domain.domain.as_ptr::<sys::Domain>();
        // SAFETY: an open domain has this table.
        let ops = unsafe { &*(*domain).ops };

        let signals = peers.saturating_mul(limits.signals);
        let puts = entry.tx().size.clamp(1, signals.max(1));
        let receives = match entry.mode() & sys::RX_CQ_DATA {
            0 => 0,
            _ => entry.rx().size.clamp(1, signals.max(1)),
        };
        // Room for the completion of every operation of this rank and for every signal of the peers.
        let mut attributes = sys::CqAttr {
            size: puts + receives + signals,
            flags: 0,
            format: sys::CQ_FORMAT_DATA,
            wait_obj: sys::WAIT_NONE,
            signaling_vector: 0,
            wait_cond: 0,
            wait_set: none,
        };
        let mut queue = ptr::null_mut();
        let open = ops.cq_open.ok_or_else(|| missing("fi_cq_open"))?;
        // SAFETY: as above.
        let answer = unsafe { open(domain, &mut attributes, &mut queue, none) };
        let queue = opened("fi_cq_open", answer as isize, Object::new(queue))?;

        let open = ops.av_open.ok_or_else(|| missing("fi_av_open"))?;
        let mut addresses = Err(missing("fi_av_open"));
        for kind in [sys::AV_TABLE, sys::AV_MAP] {
            let mut attributes = sys::AvAttr {
                kind,
                rx_ctx_bits: 0,
                count: peers,
                ep_per_node: 0,
                name: ptr::null(),
                map_addr: none,
                flags: 0,
            };
            let mut vector = ptr::null_mut();
            // SAFETY: as above.
            let answer = unsafe { open(domain, &mut attributes, &mut vector, none) };
            addresses = opened("fi_av_open", answer as isize, Object::new(vector));
            if addresses.is_ok() {
                break;
            }
        }
        let addresses = addresses?;

        let open = ops.endpoint.ok_or_else(|| missing("fi_endpoint"))?;
        let mut endpoint = ptr::null_mut();
        // SAFETY: as above.
        let answer = unsafe { open(domain, entry.as_ptr(), &mut endpoint, none) };
        let endpoint = opened("fi_endpoint", answer as isize, Object::new(endpoint))?;
        ok("fi_ep_bind to the queue", endpoint.bind(&queue, sys::TRANSMIT | sys::RECV))?;
        ok("fi_ep_bind to the addresses", endpoint.bind(&addresses, 0))?;
        ok("fi_enable", endpoint.enable())?;

        // Where the provider leaves the keys to the engine, they are random, so that no other program can guess them. Keys
        // have at least 4 bytes with all providers.
        let mut key = [0; 8];
        getrandom::fill(&mut key).map_err(|error| {
            EnvironmentError::new(&what, error, "give this process access to the system's random numbers")
        })?;
        let bits = entry.domain().mr_key_size.clamp(1, 8) as u32 * 8;
        let key = match mr_mode & sys::MR_PROV_KEY {
            0 => u64::from_le_bytes(key) >> (u64::BITS - bits),
            _ => 0,
        };
        // SAFETY: an open domain has this table.
        let ops = unsafe { &*(*domain).mr };
        let access = sys::WRITE | sys::REMOTE_WRITE;
        let of_domain = || open_domain.domain.as_ptr::<sys::Fid>();
        let register = ops.reg.ok_or_else(|| missing("fi_mr_reg"))?;
        let mut region = ptr::null_mut::<sys::Mr>();
        let (start, len) = (window.start().as_ptr(), window.len());
        // SAFETY: the caller guarantees that the memory stays mapped; `window` keeps it until the region is closed.
        let answer =
            unsafe { register(of_domain(), start.cast(), len, access, 0, key, 0, &mut region, none) };
        let mut regions = vec![(opened("fi_mr_reg", answer as isize, Object::new(region))?, start, len)];
        if let Some(part) = gpu_part {
            // Another key than that of the host memory, with as many bits.
            let key = if mr_mode & sys::MR_PROV_KEY == 0 { key ^ 1 } else { 0 };
            // SAFETY: as above.
            let region = unsafe { register_gpu_part(&open_domain.domain, part, key) };
            let region = region.map_err(|answer| failed(REGISTER_GPU, answer))?;
            // The address belongs to the GPU: this process cannot access it.
            let start = ptr::with_exposed_provenance_mut::<u8>(part.address as usize);
            regions.push((region, start, part.len));
        }
        let mut parts = Vec::with_capacity(regions.len());
        for (region, start, len) in regions {
            if mr_mode & sys::MR_ENDPOINT != 0 {
                ok("fi_mr_bind", region.bind(&endpoint, 0))?;
                ok("fi_mr_enable", region.enable())?;
            }
            let base = if mr_mode & sys::MR_VIRT_ADDR == 0 { 0 } else { start.expose_provenance() as u64 };
            let part = Part { region, start, len, base };
            if part.mr().key == sys::KEY_NOTAVAIL && mr_mode & sys::MR_PROV_KEY != 0 {
                let hint = "set HYBRID_EP_TRANSPORT to another provider";
                let problem = "fi_mr_key: the provider has no key of at most 8 bytes for the window";
                return Err(EnvironmentError::new(what, problem, hint).into());
            }
            parts.push(part);
        }
        let mut endpoint = Self {
            parts,
            endpoint,
            addresses,
            queue,
            _domain: open_domain,
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

    /// The provider's name.
    pub(crate) fn provider(&self) -> &str {
        &self.provider
    }

    /// Puts that may be in flight: their contexts are `0..puts`.
    pub(crate) fn puts(&self) -> usize {
        self.puts
    }

    /// The lengths of the parts of this rank's window, bytes.
    pub(crate) fn lens(&self) -> impl Iterator<Item = usize> + '_ {
        self.parts.iter().map(|part| part.len)
    }

    /// The text of an error of the library.
    pub(crate) fn text(&self, answer: isize) -> String {
        self.library.text(answer)
    }

    /// The error of a call after the endpoint was opened.
    pub(crate) fn error(&self, call: &str, answer: isize) -> Error {
        let what = format!("using provider {} of libfabric {}", self.provider, self.library.version());
        let hint = match -answer {
            sys::ENFILE | sys::EMFILE => "raise the limit of open files (ulimit -n)",
            _ => LOG_HINT,
        };
        EnvironmentError::new(what, format!("{call}: {}", self.library.text(answer)), hint).into()
    }

    /// What peers need to reach this rank's window.
    pub(crate) fn blob(&self) -> Result<Blob> {
        let endpoint = self.endpoint.as_ptr::<sys::Ep>();
        // SAFETY: an open endpoint of this kind has this table.
        let getname = unsafe { (*(*endpoint).cm).getname };
        let getname = getname.ok_or_else(|| self.error("fi_getname", -sys::ENOSYS))?;
        let mut address = vec![0u8; 512];
        let mut len = address.len();
        // SAFETY: the call writes at most `len` bytes, and the length that the address has.
        let answer =
            unsafe { getname(self.endpoint.as_ptr(), address.as_mut_ptr().cast(), &mut len) } as isize;
        if answer != 0 || len > address.len() {
            return Err(self.error("fi_getname", answer));
        }
        address.truncate(len);
        let part = |part: &Part| blob::Part { key: part.mr().key, base: part.base, len: part.len as u64 };
        let parts = self.parts.iter().map(part).collect();
        Ok(Blob { provider: self.provider.clone(), address, parts })
    }

    /// Adds a peer. `None` when the provider refuses its address.
    pub(crate) fn insert(&mut self, blob: &Blob) -> Option<Remote> {
        // The library reads as many bytes as an address of this provider has.
        let own = self.blob().ok()?.address.len();
        let mut parts = [RemotePart::default(); Blob::MOST_PARTS];
        for (part, &blob::Part { key, base, len }) in parts.iter_mut().zip(&blob.parts) {
            *part = RemotePart { key, base, len: usize::try_from(len).ok()? };
        }
        let text = self.info.entry().src_is_text();
        let complete = if text { blob.address.last() == Some(&0) } else { blob.address.len() == own };
        if !complete {
            return None;
        }
        let mut address = u64::MAX;
        // SAFETY: an open vector has this table. The address has the length of its format, or is a string that ends
        // with 0, as checked; the call stores one number.
        let inserted = unsafe {
            let vector = self.addresses.as_ptr::<sys::Av>();
            let insert = (*(*vector).ops).insert?;
            insert(vector, blob.address.as_ptr().cast(), 1, &mut address, 0, ptr::null_mut())
        };
        (inserted == 1).then_some(Remote { address, parts })
    }

    /// Posts a put of `len` bytes at `source`, with the context. The caller has checked the offsets. `Ok(false)`: the
    /// provider's queue is full, or its connection is not ready.
    pub(crate) fn write(
        &mut self,
        to: Remote,
        source: usize,
        destination: usize,
        len: usize,
        immediate: u32,
        context: usize,
    ) -> Result<bool, isize> {
        assert!(context < self.puts);
        let (Ok((own, source)), Ok((peer, destination))) =
            (place(self.lens(), source, len), place(to.lens(), destination, len))
        else {
            return Err(-sys::EINVAL);
        };
        let (own, peer) = (&self.parts[own], &to.parts[peer]);
        let endpoint = self.endpoint.as_ptr::<sys::Ep>();
        // SAFETY: the source is inside the registered part, whose memory outlives the endpoint. The context is not in use by
        // another operation. A descriptor is passed whether or not the provider needs it (`FI_MR_LOCAL`).
        let answer = unsafe {
            let writedata = (*(*endpoint).rma).writedata.ok_or(-sys::ENOSYS)?;
            let (from, desc) = (own.start.wrapping_add(source), own.mr().desc);
            let at = peer.base + destination as u64;
            let context = self.contexts.at(context);
            writedata(endpoint, from.cast(), len, desc, immediate.into(), to.address, at, peer.key, context)
        };
        match answer {
            0 => Ok(true),
            answer if answer == -sys::EAGAIN => Ok(false),
            answer => Err(answer),
        }
    }

    /// Posts receives, where the provider needs one for every immediate.
    fn post_receives(&mut self) -> Result<()> {
        while let Some(&context) = self.unposted.last() {
            let endpoint = self.endpoint.as_ptr::<sys::Ep>();
            // SAFETY: a receive of no bytes: only the immediate of a remote write consumes it. Nothing else uses its
            // context. The address means any sender.
            let answer = unsafe {
                let recv = (*(*endpoint).msg).recv;
                let recv = recv.ok_or_else(|| self.error("fi_recv", -sys::ENOSYS))?;
                let Part { start, .. } = self.parts[0];
                let desc = self.parts[0].mr().desc;
                recv(endpoint, start.cast(), 0, desc, u64::MAX, self.contexts.at(context))
            };
            match answer {
                0 => drop(self.unposted.pop()),
                // Posted again with the next progress.
                answer if answer == -sys::EAGAIN => break,
                answer => return Err(self.error("fi_recv", answer)),
            }
        }
        Ok(())
    }

    /// Makes progress and passes the completions on. Returns their number.
    pub(crate) fn progress(&mut self, on: &mut dyn FnMut(Completion)) -> Result<usize> {
        self.post_receives()?;
        let queue = self.queue.as_ptr::<sys::Cq>();
        // SAFETY: an open queue has this table.
        let ops = unsafe { &*(*queue).ops };
        let (Some(read), Some(readerr)) = (ops.read, ops.readerr) else {
            return Err(self.error("fi_cq_read", -sys::ENOSYS));
        };
        const MOST: usize = 32;
        let empty =
            sys::CqDataEntry { op_context: ptr::null_mut(), flags: 0, len: 0, buf: ptr::null_mut(), data: 0 };
        let mut entries = [empty; MOST];
        let mut total = 0;
        loop {
            // SAFETY: the queue's format is that of the entries, and there are `MOST` of them.
            let found = unsafe { read(queue, entries.as_mut_ptr().cast(), MOST) };
            if found == -sys::EAVAIL {
                // SAFETY: all bytes zero are a valid entry: null pointers and numbers.
                let mut entry: sys::CqErrEntry = unsafe { std::mem::zeroed() };
                // SAFETY: the entry lives during the call; without room for its data, the provider keeps the data.
                let found = unsafe { readerr(queue, &mut entry, 0) };
                match found {
                    1 => {
                        total += 1;
                        self.failed(&entry, on)?;
                        continue;
                    }
                    // The next call reads it. Another turn here might find the same state for ever, under the lock.
                    0 => return Ok(total),
                    again if again == -sys::EAGAIN => return Ok(total),
                    answer => return Err(self.error("fi_cq_readerr", answer)),
                }
            }
            if found == 0 || found == -sys::EAGAIN {
                return Ok(total);
            }
            if found < 0 || found as usize > MOST {
                return Err(self.error("fi_cq_read", found.min(0)));
            }
            let found = found as usize;
            total += found;
            for entry in &entries[..found] {
                self.completed(entry, on)?;
            }
            self.post_receives()?;
            if found < MOST {
                return Ok(total);
            }
        }
    }

    fn completed(&mut self, entry: &sys::CqDataEntry, on: &mut dyn FnMut(Completion)) -> Result<()> {
        let context = self.contexts.index(entry.op_context);
        if let Some(receive) = context.filter(|&context| context >= self.puts) {
            self.unposted.push(receive);
        }
        // A provider may mark a remote completion by this flag only.
        if entry.flags & sys::REMOTE_CQ_DATA != 0 {
            on(Completion::Arrived(entry.data as u32));
            return Ok(());
        }
        match context {
            Some(put) if put < self.puts => on(Completion::Put(put)),
            _ => {
                let problem = format!("a completion of no operation (flags {:#x})", entry.flags);
                let what =
                    format!("using provider {} of libfabric {}", self.provider, self.library.version());
                return Err(EnvironmentError::new(what, format!("fi_cq_read: {problem}"), LOG_HINT).into());
            }
        }
        Ok(())
    }

    fn failed(&mut self, entry: &sys::CqErrEntry, on: &mut dyn FnMut(Completion)) -> Result<()> {
        if is_shortage(entry.err as isize) {
            return Err(self.error("fi_cq_readerr", -(entry.err as isize)));
        }
        let text = self.library.text(entry.err as isize);
        match self.contexts.index(entry.op_context) {
            Some(put) if put < self.puts => on(Completion::Failed(put, text)),
            // A receive that failed, or an error of no operation of ours, such as a peer's connection that ended. Puts
            // to that peer fail by themselves.
            Some(receive) => self.unposted.push(receive),
            None => {}
        }
        Ok(())
    }
}

/// Whether an error says that this process lacks a resource, which is no peer's fault.
pub(crate) fn is_shortage(error: isize) -> bool {
    [sys::ENOMEM, sys::ENFILE, sys::EMFILE, sys::ENOBUFS].contains(&error)
}
