//! What libfabric offers: lists of `fi_info`, and the choice of a provider.

use std::ffi::{CStr, CString, c_char};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use ep::{CallerError, EnvironmentError, Result};

use crate::library::Library;
use crate::{Options, Provider, sys};

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

    /// The provider's name, such as `tcp` or `verbs;ofi_rxm`.
    pub(crate) fn provider(self) -> String {
        // SAFETY: allocated with the entry.
        text(unsafe { (*self.0.fabric_attr).prov_name })
    }
}

fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: not null, so a string that the library keeps with the entry.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

impl InfoList {
    pub(crate) fn entries(&self) -> impl Iterator<Item = Entry<'_>> {
        // SAFETY: the library made the list; it lives as long as `self`.
        let first = unsafe { self.first.as_ref() };
        // SAFETY: as above; `next` is null at the end.
        std::iter::successors(Some(first), |entry| unsafe { entry.next.as_ref() }).map(Entry)
    }

    /// What the library offers for an engine: reliable endpoints with remote writes that carry an immediate of 32 bits.
    /// `None` when it offers nothing. `completion` is when a put counts as complete.
    fn ask(
        library: &Arc<Library>,
        provider: Option<&CStr>,
        address: Option<&CStr>,
        completion: u64,
    ) -> Result<Option<Self>> {
        let what = || "asking libfabric for its providers".to_string();
        // SAFETY: without an original, the function allocates an empty entry with all attribute structures.
        let hints = NonNull::new(unsafe { (library.dupinfo)(ptr::null()) });
        let hints = hints.ok_or_else(|| EnvironmentError::new(what(), "out of memory", ""))?;
        let hints = Self { library: Arc::clone(library), first: hints };
        // SAFETY: allocated just now, and no other reference exists. `fi_freeinfo` frees the copied name.
        unsafe {
            let entry = &mut *hints.first.as_ptr();
            entry.caps = sys::MSG | sys::RMA | sys::WRITE | sys::REMOTE_WRITE | sys::SEND | sys::RECV;
            entry.mode = sys::CONTEXT | sys::CONTEXT2 | sys::RX_CQ_DATA;
            (*entry.tx_attr).op_flags = completion;
            (*entry.ep_attr).kind = sys::EP_RDM;
            let domain = &mut *entry.domain_attr;
            domain.mr_mode =
                sys::MR_LOCAL | sys::MR_VIRT_ADDR | sys::MR_ALLOCATED | sys::MR_PROV_KEY | sys::MR_ENDPOINT;
            domain.threading = sys::THREAD_DOMAIN;
            domain.cq_data_size = size_of::<u32>();
            if let Some(provider) = provider {
                (*entry.fabric_attr).prov_name = strdup(provider.as_ptr());
            }
        }
        let node = address.map_or(ptr::null(), CStr::as_ptr);
        let flags = if address.is_some() { sys::SOURCE } else { 0 };
        let mut first = ptr::null_mut();
        // SAFETY: the hints and strings live during the call, which stores one pointer.
        let answer = unsafe {
            let hints = hints.first.as_ptr();
            (library.getinfo)(library.interface(), node, ptr::null(), flags, hints, &mut first)
        } as isize;
        match NonNull::new(first) {
            Some(first) if answer == 0 => Ok(Some(Self { library: Arc::clone(library), first })),
            _ if answer == 0 || answer == -sys::ENODATA => Ok(None),
            _ => Err(EnvironmentError::new(what(), library.text(answer), "").into()),
        }
    }

    /// The offers of one provider, best first.
    ///
    /// # Errors
    /// [`CallerError::Config`] for a name or address that is no text for C; [`EnvironmentError`] that lists what the
    /// library offers, when the provider is not among it.
    pub(crate) fn of(library: &Arc<Library>, options: &Options) -> Result<(Self, String)> {
        let c_text = |key, value: &str| {
            CString::new(value).map_err(|_| CallerError::Config {
                key,
                value: value.into(),
                problem: "must not contain a zero byte".into(),
            })
        };
        let address = match (&options.address, options.provider.as_str()) {
            // Ranks are on one machine. On another interface, other machines could reach the windows.
            (None, "tcp" | "net") => Some("127.0.0.1"),
            (address, _) => address.as_deref(),
        };
        let address = address.map(|address| c_text("transport address", address)).transpose()?;
        // libfabric 1.17 calls the provider `net` that later versions call `tcp`. Its `tcp` has no reliable unconnected
        // endpoints of its own, and `tcp;ofi_rxm` leaks endpoints.
        let names: &[&str] = match options.provider.as_str() {
            "tcp" => &["tcp", "net"],
            name => &[name],
        };
        for name in names {
            let hint = c_text("transport", name)?;
            // Complete means that the bytes are in the peer's window, where the provider can tell. Otherwise that the
            // network has taken them. `shm` writes to the peer's memory itself, and version 1.17 stops completing puts
            // after some hundreds if it is asked for delivery.
            let delivery: &[u64] =
                if *name == "shm" { &[] } else { &[sys::DELIVERY_COMPLETE, sys::TRANSMIT_COMPLETE] };
            for &completion in delivery.iter().chain([&0]) {
                let list = Self::ask(library, Some(&hint), address.as_deref(), completion)?;
                let Some(list) = list else { continue };
                if list.entries().any(|entry| entry.provider() == *name) {
                    return Ok((list, (*name).to_string()));
                }
            }
        }
        let offered: Vec<String> = Self::all(library)?.into_iter().map(|provider| provider.name).collect();
        let at = options.address.as_ref().map_or(String::new(), |address| format!(" at address {address}"));
        Err(EnvironmentError::new(
            format!("opening provider {}{at} of libfabric {}", options.provider, library.version()),
            "it is not offered here",
            format!("offered: {}", if offered.is_empty() { "none".into() } else { offered.join(", ") }),
        )
        .into())
    }

    /// All providers that an engine can use, each once.
    pub(crate) fn all(library: &Arc<Library>) -> Result<Vec<Provider>> {
        let mut providers: Vec<Provider> = Vec::new();
        let Some(list) = Self::ask(library, None, None, 0)? else { return Ok(providers) };
        for entry in list.entries() {
            let (name, domain) = (entry.provider(), text(entry.domain().name));
            let at = providers.iter().position(|provider| provider.name == name).unwrap_or_else(|| {
                providers.push(Provider { name, domains: Vec::new() });
                providers.len() - 1
            });
            if !providers[at].domains.contains(&domain) {
                providers[at].domains.push(domain);
            }
        }
        Ok(providers)
    }
}
