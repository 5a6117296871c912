//! What libfabric offers: lists of `fi_info`, and the choice of a provider and a NIC.

use std::ffi::{CStr, CString, c_char};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use ep::{CallerError, EnvironmentError, GpuPart, Result, TrafficClass};

use crate::library::Library;
use crate::{Options, Provider, sys};

/// What to do about an error of a provider.
pub(crate) const LOG_HINT: &str = "see the provider's manual, fi_provider(7), or set FI_LOG_LEVEL=warn";

unsafe extern "C" {
    /// The C library's. `fi_freeinfo` frees the copy.
    fn strdup(text: *const c_char) -> *mut c_char;
}

/// A list that the library allocated.
pub(crate) struct InfoList {
    library: Arc<Library>,
    first: NonNull<sys::Info>,
}

// SAFETY: the list is plain memory that only its owner accesses.
unsafe impl Send for InfoList {}

impl Drop for InfoList {
    fn drop(&mut self) {
        // SAFETY: the library allocated the list, and nothing uses it any more.
        unsafe { (self.library.freeinfo)(self.first.as_ptr()) };
    }
}

/// The memory that a provider must be able to register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Memory {
    OfHost,
    /// Memory of the host and of GPUs.
    OfGpus,
}

/// One entry of a list. All entries have all five attribute structures: the library's constructor allocates them.
#[derive(Clone, Copy)]
pub(crate) struct Entry<'a>(&'a sys::Info);

impl<'a> Entry<'a> {
    pub(crate) fn as_ptr(self) -> *mut sys::Info {
        ptr::from_ref(self.0).cast_mut()
    }

    /// Whether addresses are strings, whose lengths differ from endpoint to endpoint.
    pub(crate) fn src_is_text(self) -> bool {
        self.0.addr_format == sys::ADDR_STR
    }

    pub(crate) fn mode(self) -> u64 {
        self.0.mode
    }

    pub(crate) fn tx(self) -> &'a sys::TxAttr {
        // SAFETY: allocated with the entry, which the list keeps.
        unsafe { &*self.0.tx_attr }
    }

    pub(crate) fn rx(self) -> &'a sys::RxAttr {
        // SAFETY: as above.
        unsafe { &*self.0.rx_attr }
    }

    pub(crate) fn ep(self) -> &'a sys::EpAttr {
        // SAFETY: as above.
        unsafe { &*self.0.ep_attr }
    }

    pub(crate) fn domain(self) -> &'a sys::DomainAttr {
        // SAFETY: as above.
        unsafe { &*self.0.domain_attr }
    }

    pub(crate) fn fabric_attr(self) -> *mut sys::FabricAttr {
        self.0.fabric_attr
    }

    /// The name of the domain, which is that of the NIC.
    pub(crate) fn domain_name(self) -> String {
        text(self.domain().name)
    }

    /// The PCI address of the NIC, such as `0000:18:00.0`; `None` where the provider does not tell.
    pub(crate) fn pci_address(self) -> Option<String> {
        // SAFETY: null, or allocated with the entry.
        let bus = unsafe { self.0.nic.as_ref()?.bus_attr.as_ref()? };
        let sys::PciAttr { domain, bus: number, device, function } = bus.pci;
        (bus.kind == sys::BUS_PCI).then(|| format!("{domain:04x}:{number:02x}:{device:02x}.{function:x}"))
    }

    /// The link of the NIC; `None` where the provider does not tell.
    pub(crate) fn link(self) -> Option<Link> {
        // SAFETY: as above.
        let link = unsafe { self.0.nic.as_ref()?.link_attr.as_ref()? };
        Some(Link {
            is_down: link.state == sys::LINK_DOWN,
            bits_per_s: link.speed,
            network: text(link.network_type),
        })
    }

    /// The provider's name, such as `tcp` or `verbs;ofi_rxm`.
    pub(crate) fn provider(self) -> String {
        // SAFETY: allocated with the entry.
        text(unsafe { (*self.0.fabric_attr).prov_name })
    }
}

/// What a provider tells about the link of a NIC.
pub(crate) struct Link {
    pub(crate) is_down: bool,
    /// 0 if it is unknown.
    pub(crate) bits_per_s: usize,
    /// Such as `InfiniBand`; empty if it is unknown.
    pub(crate) network: String,
}

fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: not null, so a string that the library keeps with the entry.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

impl InfoList {
    fn entries(&self) -> impl Iterator<Item = Entry<'_>> {
        // SAFETY: the library made the list; it lives as long as `self`.
        let first = unsafe { self.first.as_ref() };
        // SAFETY: as above; `next` is null at the end.
        std::iter::successors(Some(first), |entry| unsafe { entry.next.as_ref() }).map(Entry)
    }

    /// What the library offers for an engine: reliable endpoints with remote writes that carry an immediate of 32 bits.
    /// `None` when it offers nothing. `completion` is when a put counts as complete, and `class` the traffic class.
    fn ask(
        library: &Arc<Library>,
        provider: Option<&CStr>,
        address: Option<&CStr>,
        completion: u64,
        class: u32,
        memory: Memory,
    ) -> Result<Option<Self>> {
        let hints = Self::copy(library, ptr::null())?;
        // SAFETY: allocated just now, and no other reference exists. `fi_freeinfo` frees the copied name.
        unsafe {
            let entry = &mut *hints.first.as_ptr();
            entry.caps = sys::MSG | sys::RMA | sys::WRITE | sys::REMOTE_WRITE | sys::SEND | sys::RECV;
            entry.mode = sys::CONTEXT | sys::CONTEXT2 | sys::RX_CQ_DATA;
            (*entry.tx_attr).op_flags = completion;
            (*entry.tx_attr).tclass = class;
            (*entry.ep_attr).kind = sys::EP_RDM;
            let domain = &mut *entry.domain_attr;
            domain.mr_mode =
                sys::MR_LOCAL | sys::MR_VIRT_ADDR | sys::MR_ALLOCATED | sys::MR_PROV_KEY | sys::MR_ENDPOINT;
            if memory == Memory::OfGpus {
                entry.caps |= sys::HMEM;
                domain.mr_mode |= sys::MR_HMEM;
            }
            domain.threading = sys::THREAD_DOMAIN;
            domain.cq_data_size = size_of::<u32>();
            if let Some(provider) = provider {
                (*entry.fabric_attr).prov_name = strdup(provider.as_ptr());
            }
        }
        Self::get(library, address, hints.first.as_ptr())
    }

    /// Calls `fi_getinfo`. `hints` are an entry, or null.
    fn get(library: &Arc<Library>, address: Option<&CStr>, hints: *const sys::Info) -> Result<Option<Self>> {
        let node = address.map_or(ptr::null(), CStr::as_ptr);
        let flags = if address.is_some() { sys::SOURCE } else { 0 };
        let mut first = ptr::null_mut();
        // SAFETY: the hints and strings live during the call, which stores one pointer.
        let answer =
            unsafe { (library.getinfo)(library.interface(), node, ptr::null(), flags, hints, &mut first) }
                as isize;
        match NonNull::new(first) {
            Some(first) if answer == 0 => Ok(Some(Self { library: Arc::clone(library), first })),
            _ if answer == 0 || answer == -sys::ENODATA => Ok(None),
            _ => {
                let what = format!("asking libfabric {} for its providers", library.version());
                let problem = format!("fi_getinfo: {}", library.text(answer));
                Err(EnvironmentError::new(what, problem, LOG_HINT).into())
            }
        }
    }

    /// A list of one entry: a copy of this one, or an empty one for null.
    fn copy(library: &Arc<Library>, entry: *const sys::Info) -> Result<Self> {
        // SAFETY: an entry of the library or null, for which it allocates an empty entry with all attribute structures.
        let copy = NonNull::new(unsafe { (library.dupinfo)(entry) });
        let what = format!("copying an entry of libfabric {}", library.version());
        let copy = copy.ok_or_else(|| {
            EnvironmentError::new(what, "fi_dupinfo: out of memory", "free memory on this machine")
        })?;
        Ok(Self { library: Arc::clone(library), first: copy })
    }

    /// Whether the library lists a provider of these names when it is not asked for anything.
    fn knows(library: &Arc<Library>, names: &[&str]) -> Result<bool> {
        let list = Self::get(library, None, ptr::null())?;
        Ok(list.is_some_and(|list| list.entries().any(|entry| names.contains(&&*entry.provider()))))
    }

    /// All providers that an engine can use, each once.
    pub(crate) fn all(library: &Arc<Library>) -> Result<Vec<Provider>> {
        let mut providers: Vec<Provider> = Vec::new();
        let Some(list) = Self::ask(library, None, None, 0, 0, Memory::OfHost)? else { return Ok(providers) };
        for entry in list.entries() {
            let (name, domain) = (entry.provider(), entry.domain_name());
            let at = providers.iter().position(|provider| provider.name == name).unwrap_or_else(|| {
                providers.push(Provider { name, domains: Vec::new(), gpu_memory: false });
                providers.len() - 1
            });
            if !providers[at].domains.contains(&domain) {
                providers[at].domains.push(domain);
            }
        }
        let of_gpus = Self::ask(library, None, None, 0, 0, Memory::OfGpus)?;
        let names: Vec<String> = of_gpus.iter().flat_map(Self::entries).map(Entry::provider).collect();
        for provider in &mut providers {
            provider.gpu_memory = names.contains(&provider.name);
        }
        Ok(providers)
    }
}

/// The NIC that an engine uses: one entry, from which all its objects are opened.
pub(crate) struct Chosen(InfoList);

impl Chosen {
    pub(crate) fn entry(&self) -> Entry<'_> {
        self.0.entries().next().expect("`Chosen` is made of a list with an entry")
    }

    /// Chooses the provider's first NIC that fits, or `nic`, which the options name.
    ///
    /// # Errors
    /// [`CallerError::Config`] for options that are no text for C or no code point; [`EnvironmentError`] that lists what
    /// the library offers, when what the options name is not among it.
    pub(crate) fn new(
        library: &Arc<Library>,
        options: &Options,
        nic: Option<&str>,
        memory: Memory,
    ) -> Result<Self> {
        match Self::find(library, options, nic, memory)? {
            Ok(chosen) => Ok(chosen),
            Err(domains) => {
                let names = names_of(&options.provider);
                let what = what(library, options, nic);
                if memory == Memory::OfGpus && Self::find(library, options, nic, Memory::OfHost)?.is_ok() {
                    let problem = "the provider does not register the memory of GPUs here (FI_HMEM)";
                    return Err(EnvironmentError::new(what, problem, GpuPart::HINT).into());
                }
                Err(not_offered(library, what, &names, &domains)?.into())
            }
        }
    }

    /// The provider's first NIC that fits, or `nic`. If there is none, the NICs that fit but for their name.
    pub(crate) fn find(
        library: &Arc<Library>,
        options: &Options,
        nic: Option<&str>,
        memory: Memory,
    ) -> Result<std::result::Result<Self, Vec<String>>> {
        let address = match (&options.address, nic, options.provider.as_str()) {
            // On another interface than this one, other machines could reach the windows. So it takes a decision.
            (None, None, "tcp" | "net") => Some("127.0.0.1"),
            (address, ..) => address.as_deref(),
        };
        let mut domains = Vec::new();
        let chosen = find_entry(library, options, address, memory, |entry| {
            let domain = entry.domain_name();
            if nic.is_none_or(|asked| *asked == domain) {
                return InfoList::copy(library, entry.as_ptr()).map(Some);
            }
            if !domains.contains(&domain) {
                domains.push(domain);
            }
            Ok(None)
        })?;
        Ok(chosen.map(Self).ok_or(domains))
    }
}

/// The names of a provider. libfabric 1.17 calls the provider `net` that later versions call `tcp`. Its `tcp` has no
/// reliable unconnected endpoints of its own, and `tcp;ofi_rxm` leaks endpoints.
fn names_of(provider: &str) -> Vec<&str> {
    match provider {
        "tcp" => vec!["tcp", "net"],
        name => vec![name],
    }
}

/// Calls `visit` with the entries at `address` that fit the options, except that they may be of any NIC. The preferred ones
/// come first, and the same NIC may come several times. Returns the first value that `visit` returns.
pub(crate) fn find_entry<T>(
    library: &Arc<Library>,
    options: &Options,
    address: Option<&str>,
    memory: Memory,
    mut visit: impl FnMut(Entry<'_>) -> Result<Option<T>>,
) -> Result<Option<T>> {
    let class = class_bits(options.traffic_class)?;
    let address = address.map(|address| c_text("transport address", address)).transpose()?;
    for name in names_of(&options.provider) {
        let hint = c_text("transport", name)?;
        // Complete means that the bytes are in the peer's window, where the provider can tell. Otherwise that the
        // network has taken them. `shm` writes to the peer's memory itself, and version 1.17 stops completing puts
        // after some hundreds if it is asked for delivery.
        let delivery: &[u64] =
            if name == "shm" { &[] } else { &[sys::DELIVERY_COMPLETE, sys::TRANSMIT_COMPLETE] };
        for &completion in delivery.iter().chain([&0]) {
            let list = InfoList::ask(library, Some(&hint), address.as_deref(), completion, class, memory)?;
            for entry in list.iter().flat_map(InfoList::entries) {
                // A name also selects what is layered over the provider. A provider may list classes of which it
                // knows nothing.
                if entry.provider() != name || (class != 0 && entry.tx().tclass != class) {
                    continue;
                }
                if let Some(value) = visit(entry)? {
                    return Ok(Some(value));
                }
            }
        }
    }
    Ok(None)
}

fn c_text(key: &'static str, value: &str) -> Result<CString> {
    let problem = "must not contain a zero byte";
    CString::new(value)
        .map_err(|_| CallerError::Config { key, value: value.into(), problem: problem.into() }.into())
}

/// What an engine opens, for errors.
pub(crate) fn what(library: &Library, options: &Options, nic: Option<&str>) -> String {
    let nic = nic.map_or(String::new(), |domain| format!(" on NIC {domain}"));
    let at = options.address.as_ref().map_or(String::new(), |address| format!(" at address {address}"));
    format!("opening provider {}{nic}{at} of libfabric {}", options.provider, library.version())
}

/// The error of `what` when no entry fits. `names` are the provider's, and `domains` those of the entries that fit but for their NIC.
fn not_offered(
    library: &Arc<Library>,
    what: String,
    names: &[&str],
    domains: &[String],
) -> Result<EnvironmentError> {
    let (problem, hint) = if !domains.is_empty() {
        let problem = "the provider has no such NIC here".into();
        (problem, format!("set HYBRID_EP_TRANSPORT_NIC to names out of: {}", domains.join(", ")))
    } else {
        let offered = InfoList::all(library)?;
        let all: Vec<&str> = offered.iter().map(|provider| provider.name.as_str()).collect();
        let offers = format!(
            "offered: {}; HYBRID_EP_TRANSPORT is `tcp` (libfabric's `net` or `tcp`), `shm` on one machine, or one of these",
            if all.is_empty() { "none".into() } else { all.join(", ") }
        );
        if names.iter().any(|name| all.contains(name)) {
            let problem = "the provider is here, but not at this address, or not with this traffic class";
            (
                problem.to_string(),
                "check HYBRID_EP_TRANSPORT_ADDRESS and HYBRID_EP_TRANSPORT_TRAFFIC_CLASS".into(),
            )
        } else if InfoList::knows(library, names)? {
            let needs = "reliable unconnected endpoints, and remote writes with immediates of 4 bytes";
            (format!("the provider does not offer here what an engine needs: {needs}"), offers)
        } else {
            ("it is not offered here".into(), offers)
        }
    };
    Ok(EnvironmentError::new(what, problem, hint))
}

/// The traffic class in the interface's numbers; 0 for none.
fn class_bits(class: Option<TrafficClass>) -> Result<u32> {
    Ok(match class {
        None => 0,
        Some(TrafficClass::Dscp(dscp)) if dscp < TrafficClass::DSCPS => sys::TC_DSCP | u32::from(dscp),
        Some(TrafficClass::BestEffort) => sys::TC_BEST_EFFORT,
        Some(TrafficClass::LowLatency) => sys::TC_LOW_LATENCY,
        Some(TrafficClass::DedicatedAccess) => sys::TC_DEDICATED_ACCESS,
        Some(TrafficClass::BulkData) => sys::TC_BULK_DATA,
        Some(TrafficClass::Scavenger) => sys::TC_SCAVENGER,
        Some(class) => {
            let problem =
                format!("must be a DSCP below {}, or a class that this engine knows", TrafficClass::DSCPS);
            let (key, value) = ("transport traffic class", format!("{class:?}"));
            return Err(CallerError::Config { key, value, problem }.into());
        }
    })
}
