//! Lists of `fi_info`, allocated as libfabric allocates them: every structure and string with `malloc`.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;

use crate::settings::{Bus, Hardware, Network, Settings, Step};
use crate::sys;
use crate::world::{Nic, World};

unsafe extern "C" {
    fn calloc(count: usize, bytes: usize) -> *mut c_void;
    fn free(memory: *mut c_void);
    fn strdup(text: *const c_char) -> *mut c_char;
}

/// Zeroed memory for a structure of numbers and pointers.
fn zeroed<T>() -> *mut T {
    // SAFETY: allocates.
    let memory: *mut T = unsafe { calloc(1, size_of::<T>()) }.cast();
    assert!(!memory.is_null(), "out of memory");
    memory
}

fn copied(text: *const c_char) -> *mut c_char {
    // SAFETY: a string.
    if text.is_null() { ptr::null_mut() } else { unsafe { strdup(text) } }
}

fn c_string(text: &str) -> *mut c_char {
    copied(CString::new(text).expect("no zero byte").as_ptr())
}

fn text(text: *const c_char) -> Option<String> {
    // SAFETY: a string of the entry.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// An entry without contents.
fn empty() -> *mut sys::Info {
    let entry = zeroed::<sys::Info>();
    // SAFETY: just allocated.
    unsafe {
        (*entry).tx_attr = zeroed();
        (*entry).rx_attr = zeroed();
        (*entry).ep_attr = zeroed();
        (*entry).domain_attr = zeroed();
        (*entry).fabric_attr = zeroed();
    }
    entry
}

/// What an entry tells about the hardware of its NIC; null for nothing.
fn nic_info(hardware: &Hardware) -> *mut sys::NicInfo {
    let (kind, bus) = match hardware.bus {
        Bus::Untold => return ptr::null_mut(),
        Bus::Other => (0, 0),
        Bus::Pci(bus) => (sys::BUS_PCI, bus),
    };
    let network = match hardware.network {
        Network::Unknown => ptr::null_mut(),
        Network::Ethernet => c_string("Ethernet"),
        Network::InfiniBand => c_string("InfiniBand"),
    };
    let nic = zeroed::<sys::NicInfo>();
    // SAFETY: just allocated.
    unsafe {
        (*nic).bus_attr = zeroed();
        (*(*nic).bus_attr).kind = kind;
        (*(*nic).bus_attr).pci.bus = bus;
        (*nic).link_attr = zeroed();
        let link = &mut *(*nic).link_attr;
        let state = if hardware.is_down { sys::LINK_DOWN } else { 0 };
        (link.speed, link.state, link.network_type) = (hardware.speed, state, network);
    }
    nic
}

/// A copy of what [`nic_info`] made, or null for null.
///
/// # Safety
/// `nic` must come from [`nic_info`] or this function.
unsafe fn copy_nic_info(nic: *const sys::NicInfo) -> *mut sys::NicInfo {
    if nic.is_null() {
        return ptr::null_mut();
    }
    let new = zeroed::<sys::NicInfo>();
    // SAFETY: both have both structures.
    unsafe {
        (*new).bus_attr = zeroed();
        (*new).bus_attr.copy_from((*nic).bus_attr, 1);
        (*new).link_attr = zeroed();
        (*new).link_attr.copy_from((*nic).link_attr, 1);
        (*(*new).link_attr).network_type = copied((*(*nic).link_attr).network_type);
    }
    new
}

/// Frees what [`nic_info`] or [`copy_nic_info`] made.
///
/// # Safety
/// As for [`copy_nic_info`]; in addition, `nic` must not have been freed.
unsafe fn free_nic_info(nic: *mut sys::NicInfo) {
    if nic.is_null() {
        return;
    }
    // SAFETY: guaranteed by the caller.
    unsafe {
        free((*(*nic).link_attr).network_type.cast());
        free((*nic).link_attr.cast());
        free((*nic).bus_attr.cast());
        free(nic.cast());
    }
}

/// The domain's name and the fabric's name of an entry.
pub(crate) fn names(entry: &sys::Info) -> (Option<String>, Option<String>) {
    // SAFETY: an entry has these structures.
    unsafe { (text((*entry.domain_attr).name), text((*entry.fabric_attr).name)) }
}

/// The provider's name and the fabric's name of these attributes.
pub(crate) fn fabric_names(attributes: &sys::FabricAttr) -> (Option<String>, Option<String>) {
    (text(attributes.prov_name), text(attributes.name))
}

/// Whether a NIC does what the hints ask, and demands nothing that they do not allow.
fn fits(settings: &Settings, hints: &sys::Info) -> bool {
    // SAFETY: hints have all attribute structures.
    let (tx, ep, domain) = unsafe { (&*hints.tx_attr, &*hints.ep_attr, &*hints.domain_attr) };
    hints.caps & settings.lacks == 0
        && settings.mode & !hints.mode == 0
        && mr_mode(settings, Some(hints)) & !domain.mr_mode == 0
        && (settings.key_size <= 8 || settings.fail == Step::Key)
        && tx.op_flags & !settings.completes == 0
        && (settings.ignores_class || tx.tclass == 0 || tx.tclass == settings.traffic_class)
        && [0, sys::EP_RDM].contains(&ep.kind)
        && domain.cq_data_size <= settings.data_size
}

/// The demands on registered memory. Who asks for the memory of GPUs must register it (`FI_MR_HMEM`).
fn mr_mode(settings: &Settings, hints: Option<&sys::Info>) -> c_int {
    let asks = hints.is_some_and(|hints| hints.caps & sys::HMEM != 0);
    settings.mr_mode | if asks { sys::MR_HMEM } else { 0 }
}

fn entry_of(provider: &str, nic: &Nic, hints: Option<&sys::Info>) -> *mut sys::Info {
    let entry = empty();
    let settings = &nic.settings;
    // SAFETY: just allocated; hints have all attribute structures.
    unsafe {
        let info = &mut *entry;
        info.mode = settings.mode;
        info.addr_format = if settings.text_addresses { sys::ADDR_STR } else { 0 };
        let tx = &mut *info.tx_attr;
        tx.size = settings.tx_size;
        if let Some(hints) = hints {
            info.caps = hints.caps;
            tx.op_flags = (*hints.tx_attr).op_flags;
            tx.tclass = if settings.ignores_class { settings.traffic_class } else { (*hints.tx_attr).tclass };
        }
        (*info.rx_attr).size = settings.rx_size;
        (*info.ep_attr).kind = sys::EP_RDM;
        (*info.ep_attr).max_msg_size = settings.max_msg_size;
        let domain = &mut *info.domain_attr;
        domain.name = c_string(&nic.domain);
        domain.threading = sys::THREAD_DOMAIN;
        domain.mr_mode = mr_mode(settings, hints);
        domain.mr_key_size = settings.key_size;
        domain.cq_data_size = settings.data_size;
        domain.av_type = settings.av_type;
        (*info.fabric_attr).name = c_string(&nic.fabric());
        (*info.fabric_attr).prov_name = c_string(provider);
        info.nic = nic_info(&settings.hardware);
    }
    entry
}

/// What `fi_getinfo` answers: the NICs that fit, or an error.
///
/// # Safety
/// The hints must be an entry with its attribute structures.
pub(crate) unsafe fn list(
    world: &mut World,
    node: Option<String>,
    hints: Option<&sys::Info>,
) -> Result<*mut sys::Info, c_int> {
    // SAFETY: guaranteed by the caller.
    let asked = hints.and_then(|hints| text(unsafe { (*hints.fabric_attr).prov_name }));
    let domain = hints.and_then(|hints| names(hints).0);
    let mut found = Vec::new();
    for (index, network) in world.networks.iter().enumerate() {
        // A name also selects what is layered over the provider, as `tcp` selects `tcp;ofi_rxm`.
        let of_name = |name: &str| network.name == name || network.name.starts_with(&format!("{name};"));
        if asked.as_deref().is_some_and(|asked| !of_name(asked)) {
            continue;
        }
        for nic in &network.nics {
            if asked.is_some() && nic.settings.fail == Step::GetInfo {
                return Err(-nic.settings.errno);
            }
            let fits = hints.is_none_or(|hints| fits(&nic.settings, hints))
                && node.as_ref().is_none_or(|node| nic.node == *node)
                && domain.as_ref().is_none_or(|domain| nic.domain == *domain);
            if fits {
                // Lists of all providers also come from other tests, so they do not count as objects of this one.
                found.push((asked.as_ref().map(|_| index), entry_of(&network.name, nic, hints)));
            }
        }
    }
    let mut first = ptr::null_mut();
    for (network, entry) in found.into_iter().rev() {
        // SAFETY: just allocated.
        unsafe { (*entry).next = first };
        first = entry;
        world.infos.insert(entry.addr(), network);
    }
    if first.is_null() { Err(-(sys::ENODATA as c_int)) } else { Ok(first) }
}

/// A copy of one entry, or an entry without contents.
///
/// # Safety
/// `entry` must be an entry of this library, or null.
pub(crate) unsafe fn copy(world: &mut World, entry: *const sys::Info) -> *mut sys::Info {
    let new = empty();
    // SAFETY: guaranteed by the caller; all entries have all attribute structures.
    unsafe {
        if let Some(old) = entry.as_ref() {
            let (tx, rx, ep, domain, fabric) =
                ((*new).tx_attr, (*new).rx_attr, (*new).ep_attr, (*new).domain_attr, (*new).fabric_attr);
            tx.copy_from(old.tx_attr, 1);
            rx.copy_from(old.rx_attr, 1);
            ep.copy_from(old.ep_attr, 1);
            domain.copy_from(old.domain_attr, 1);
            fabric.copy_from(old.fabric_attr, 1);
            (*domain).name = copied((*domain).name);
            (*fabric).name = copied((*fabric).name);
            (*fabric).prov_name = copied((*fabric).prov_name);
            new.copy_from(old, 1);
            let info = &mut *new;
            info.next = ptr::null_mut();
            (info.tx_attr, info.rx_attr, info.ep_attr) = (tx, rx, ep);
            (info.domain_attr, info.fabric_attr) = (domain, fabric);
            info.nic = copy_nic_info(old.nic);
        }
    }
    let network = world.infos.get(&entry.addr()).copied().flatten();
    world.infos.insert(new.addr(), network);
    new
}

/// Frees a list.
///
/// # Safety
/// `first` must be an entry of this library, or null. All entries after it are its own.
pub(crate) unsafe fn free_list(world: &mut World, first: *mut sys::Info) {
    let mut entry = first;
    while !entry.is_null() {
        assert!(world.infos.remove(&entry.addr()).is_some(), "fi_freeinfo of what is not an entry");
        // SAFETY: an entry that is not free yet, as checked, with its attribute structures.
        unsafe {
            let info = &*entry;
            let next = info.next;
            free_nic_info(info.nic);
            free((*info.domain_attr).name.cast());
            free((*info.fabric_attr).name.cast());
            free((*info.fabric_attr).prov_name.cast());
            free(info.tx_attr.cast());
            free(info.rx_attr.cast());
            free(info.ep_attr.cast());
            free(info.domain_attr.cast());
            free(info.fabric_attr.cast());
            free(entry.cast());
            entry = next;
        }
    }
}
