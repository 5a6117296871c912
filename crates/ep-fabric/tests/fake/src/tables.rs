//! The functions of the objects' tables.

use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use crate::settings::{Settings, Step};
use crate::sys;
use crate::wire::{self, Post};
use crate::world::{
    self, ENOAV, ENOCQ, ENOKEY, EOPBADSTATE, Endpoint, Guard, Id, Kind, Object, Queue, Region, id, world,
};

const EINVAL: c_int = -(sys::EINVAL as c_int);

/// The pointer that an object has to its table. Objects only read their tables.
fn table<T>(table: &'static T) -> *mut T {
    ptr::from_ref(table).cast_mut()
}

fn fid(ops: &'static sys::Ops) -> sys::Fid {
    sys::Fid { class: 0, context: ptr::null_mut(), ops: table(ops) }
}

static PLAIN: sys::Ops =
    sys::Ops { size: size_of::<sys::Ops>(), close: Some(close), bind: None, control: None };
static OF_ENDPOINT: sys::Ops = sys::Ops {
    size: size_of::<sys::Ops>(),
    close: Some(close),
    bind: Some(bind_endpoint),
    control: Some(enable_endpoint),
};
static OF_REGION: sys::Ops = sys::Ops {
    size: size_of::<sys::Ops>(),
    close: Some(close),
    bind: Some(bind_region),
    control: Some(enable_region),
};
static FABRIC: sys::FabricOps =
    sys::FabricOps { size: size_of::<sys::FabricOps>(), domain: Some(open_domain) };
static DOMAIN: sys::DomainOps = sys::DomainOps {
    size: size_of::<sys::DomainOps>(),
    av_open: Some(open_addresses),
    cq_open: Some(open_queue),
    endpoint: Some(open_endpoint),
};
static REGIONS: sys::MrOps = sys::MrOps {
    size: size_of::<sys::MrOps>(),
    reg: Some(register),
    regv: None,
    regattr: Some(register_attr),
};
static ADDRESSES: sys::AvOps = sys::AvOps { size: size_of::<sys::AvOps>(), insert: Some(insert) };
static QUEUE: sys::CqOps =
    sys::CqOps { size: size_of::<sys::CqOps>(), read: Some(read), readfrom: None, readerr: Some(readerr) };
static CM: sys::CmOps = sys::CmOps { size: size_of::<sys::CmOps>(), setname: None, getname: Some(getname) };
static MSG: sys::MsgOps = sys::MsgOps { size: size_of::<sys::MsgOps>(), recv: Some(recv) };
static RMA: sys::RmaOps = sys::RmaOps {
    size: size_of::<sys::RmaOps>(),
    read: [None; 3],
    write: [None; 4],
    writedata: Some(writedata),
};

/// Makes a call on an object of a domain. No other call on the domain may overlap this one.
fn exclusive(call: &str, object: Id, body: impl FnOnce(&mut Guard, Settings) -> isize) -> isize {
    let Some(settings) = ({
        let mut world = world();
        world.entered(call, object);
        world.called(call, object)
    }) else {
        return EINVAL as isize;
    };
    // Time for another thread to break the rule.
    std::thread::yield_now();
    let mut world = world();
    let answer = body(&mut world, settings);
    world.left(object);
    answer
}

unsafe extern "C" fn close(object: *mut sys::Fid) -> c_int {
    world().close(id(object))
}

/// Adds an object of a domain, unless the step fails.
///
/// # Safety
/// `result` must be the caller's variable.
unsafe fn open<T: 'static>(
    step: Step,
    domain: *mut sys::Domain,
    result: *mut *mut T,
    head: T,
    kind: Kind,
) -> Result<Id, c_int> {
    let (mut world, domain) = (world(), id(domain));
    world.called("an object's opening", domain).ok_or(EINVAL)?;
    if let Some(answer) = world.fails(domain, step) {
        return Err(answer);
    }
    let (network, nic) = (world.objects[&domain].network, world.objects[&domain].nic);
    let object = world.add(head, Object { network, nic, domain, uses: vec![domain], kind });
    // SAFETY: guaranteed by the caller.
    unsafe { *result = object };
    Ok(id(object))
}

/// `fi_fabric`.
///
/// # Safety
/// `result` must be the caller's variable.
pub(crate) unsafe fn open_fabric(attributes: &sys::FabricAttr, result: *mut *mut sys::Fabric) -> c_int {
    let mut world = world();
    let (provider, name) = crate::info::fabric_names(attributes);
    let is = |network: &world::Network| Some(&network.name) == provider.as_ref();
    let Some(network) = world.networks.iter().position(is) else { return -(sys::ENODATA as c_int) };
    let is = |nic: &world::Nic| Some(nic.fabric()) == name;
    let Some(nic) = world.networks[network].nics.iter().position(is) else { return -(sys::ENODATA as c_int) };
    let settings = world.networks[network].nics[nic].settings;
    if settings.fail == Step::Fabric {
        return -settings.errno;
    }
    let head = sys::Fabric { fid: fid(&PLAIN), ops: table(&FABRIC) };
    let fabric = world.add(head, Object { network, nic, domain: 0, uses: Vec::new(), kind: Kind::Fabric });
    // SAFETY: guaranteed by the caller.
    unsafe { *result = fabric };
    0
}

unsafe extern "C" fn open_domain(
    fabric: *mut sys::Fabric,
    info: *mut sys::Info,
    result: *mut *mut sys::Domain,
    _: *mut c_void,
) -> c_int {
    let (mut world, fabric) = (world(), id(fabric));
    if world.called("fi_domain", fabric).is_none() {
        return EINVAL;
    }
    // SAFETY: the caller's entry.
    if !unsafe { entry_is_of(&mut world, "fi_domain", fabric, &*info) } {
        return EINVAL;
    }
    if let Some(answer) = world.fails(fabric, Step::Domain) {
        return answer;
    }
    let (network, nic) = (world.objects[&fabric].network, world.objects[&fabric].nic);
    let head = sys::Domain { fid: fid(&PLAIN), ops: table(&DOMAIN), mr: table(&REGIONS) };
    // SAFETY: as above.
    let gpu_memory = unsafe { (*info).caps } & sys::HMEM != 0;
    let object = Object { network, nic, domain: 0, uses: vec![fabric], kind: Kind::Domain { gpu_memory } };
    // SAFETY: the caller's variable.
    unsafe { *result = world.add(head, object) };
    0
}

/// Whether an entry names the NIC of an object, and is in a list that is not freed.
///
/// # Safety
/// The entry must have its attribute structures, if it is in a list.
unsafe fn entry_is_of(world: &mut Guard, call: &str, object: Id, info: &sys::Info) -> bool {
    if !world.infos.contains_key(&ptr::from_ref(info).addr()) {
        world.wrong(object, format!("{call} with an entry that is not in a list"));
        return false;
    }
    let (network, nic) = (world.objects[&object].network, world.objects[&object].nic);
    let nic = &world.networks[network].nics[nic];
    let same = crate::info::names(info) == (Some(nic.domain.clone()), Some(nic.fabric()));
    if !same {
        world.wrong(object, format!("{call} with the entry of another NIC"));
    }
    same
}

unsafe extern "C" fn open_queue(
    domain: *mut sys::Domain,
    attributes: *mut sys::CqAttr,
    result: *mut *mut sys::Cq,
    _: *mut c_void,
) -> c_int {
    // SAFETY: the caller's structure.
    let attributes = unsafe { &*attributes };
    let Some(settings) = world().called("fi_cq_open", id(domain)) else { return EINVAL };
    if attributes.size > settings.cq_size || attributes.format != sys::CQ_FORMAT_DATA {
        return EINVAL;
    }
    let queue = Queue { size: attributes.size, ready: VecDeque::new(), errors: VecDeque::new() };
    let head = sys::Cq { fid: fid(&PLAIN), ops: table(&QUEUE) };
    // SAFETY: the caller's variable.
    unsafe { open(Step::CqOpen, domain, result, head, Kind::Queue(queue)) }.err().unwrap_or(0)
}

unsafe extern "C" fn open_addresses(
    domain: *mut sys::Domain,
    attributes: *mut sys::AvAttr,
    result: *mut *mut sys::Av,
    _: *mut c_void,
) -> c_int {
    // SAFETY: the caller's structure.
    let attributes = unsafe { &*attributes };
    let Some(settings) = world().called("fi_av_open", id(domain)) else { return EINVAL };
    // Asynchronous insertion needs a queue of events, which the tables here do not have.
    if ![0, attributes.kind].contains(&settings.av_type) || attributes.flags != 0 {
        return EINVAL;
    }
    let head = sys::Av { fid: fid(&PLAIN), ops: table(&ADDRESSES) };
    // SAFETY: the caller's variable.
    unsafe { open(Step::AvOpen, domain, result, head, Kind::Addresses(HashMap::new())) }.err().unwrap_or(0)
}

unsafe extern "C" fn open_endpoint(
    domain: *mut sys::Domain,
    info: *mut sys::Info,
    result: *mut *mut sys::Ep,
    _: *mut c_void,
) -> c_int {
    let (number, entry) = {
        let mut world = world();
        // SAFETY: the caller's entry.
        let entry = unsafe { &*info };
        if world.called("fi_endpoint", id(domain)).is_none() {
            return EINVAL;
        }
        // SAFETY: as above.
        if !unsafe { entry_is_of(&mut world, "fi_endpoint", id(domain), entry) } {
            return EINVAL;
        }
        (world.number(), entry)
    };
    // SAFETY: an entry has this structure.
    let tx = unsafe { &*entry.tx_attr };
    let delivery = tx.op_flags & sys::DELIVERY_COMPLETE != 0;
    let head = sys::Ep {
        fid: fid(&OF_ENDPOINT),
        ops: ptr::null_mut(),
        cm: table(&CM),
        msg: table(&MSG),
        rma: table(&RMA),
    };
    let endpoint = Endpoint { number, delivery, ..Endpoint::default() };
    // SAFETY: the caller's variable.
    match unsafe { open(Step::Endpoint, domain, result, head, Kind::Endpoint(endpoint)) } {
        Ok(id) => {
            world().opened_with_class(id, tx.tclass);
            0
        }
        Err(answer) => answer,
    }
}

unsafe extern "C" fn bind_endpoint(endpoint: *mut sys::Fid, to: *mut sys::Fid, flags: u64) -> c_int {
    let (mut world, endpoint, to) = (world(), id(endpoint), id(to));
    if world.called("fi_ep_bind", endpoint).is_none() || world.called("fi_ep_bind", to).is_none() {
        return EINVAL;
    }
    let is_queue = matches!(world.objects[&to].kind, Kind::Queue(_));
    let step = if is_queue { Step::BindCq } else { Step::BindAv };
    if let Some(answer) = world.fails(endpoint, step) {
        return answer;
    }
    let Some(state) = world.endpoint(endpoint) else { return EINVAL };
    if is_queue && flags == sys::TRANSMIT | sys::RECV {
        state.queue = Some(to);
    } else if !is_queue && flags == 0 {
        state.addresses = Some(to);
    } else {
        return EINVAL;
    }
    world.objects.get_mut(&endpoint).expect("found above").uses.push(to);
    0
}

unsafe extern "C" fn enable_endpoint(endpoint: *mut sys::Fid, command: c_int, _: *mut c_void) -> c_int {
    let (mut world, endpoint) = (world(), id(endpoint));
    if world.called("fi_enable", endpoint).is_none() || command != sys::ENABLE {
        return EINVAL;
    }
    if let Some(answer) = world.fails(endpoint, Step::Enable) {
        return answer;
    }
    let Some(state) = world.endpoint(endpoint) else { return EINVAL };
    match (state.queue, state.addresses) {
        (None, _) => -ENOCQ,
        (_, None) => -ENOAV,
        _ => {
            state.enabled = true;
            0
        }
    }
}

/// The memory of a region.
struct Memory {
    start: usize,
    len: usize,
    access: u64,
    key: u64,
    of_gpu: bool,
}

#[allow(clippy::too_many_arguments)] // as in C
unsafe extern "C" fn register(
    domain: *mut sys::Fid,
    buffer: *const c_void,
    len: usize,
    access: u64,
    offset: u64,
    key: u64,
    flags: u64,
    result: *mut *mut sys::Mr,
    _: *mut c_void,
) -> c_int {
    if buffer.is_null() || len == 0 || offset != 0 || flags != 0 {
        return EINVAL;
    }
    let memory = Memory { start: buffer.expose_provenance(), len, access, key, of_gpu: false };
    // SAFETY: the caller's variable.
    unsafe { add_region(Step::MrReg, domain, &memory, result) }
}

unsafe extern "C" fn register_attr(
    domain: *mut sys::Fid,
    attributes: *const sys::MrAttr,
    flags: u64,
    result: *mut *mut sys::Mr,
) -> c_int {
    // SAFETY: the caller's structure.
    let attributes = unsafe { &*attributes };
    let &sys::MrAttr { mr_iov, iov_count, access, offset, requested_key: key, iface, .. } = attributes;
    if iov_count != 1 || offset != 0 || flags != 0 || iface != sys::HMEM_CUDA {
        return EINVAL;
    }
    // SAFETY: as many as the structure says.
    let part = unsafe { &*mr_iov };
    if part.base.is_null() || part.len == 0 {
        return EINVAL;
    }
    // SAFETY: any bits are a number.
    if unsafe { attributes.device.cuda } < 0 {
        return EINVAL;
    }
    let memory = Memory { start: part.base.addr(), len: part.len, access, key, of_gpu: true };
    // SAFETY: the caller's variable.
    unsafe { add_region(Step::MrRegAttr, domain, &memory, result) }
}

/// Registers memory.
///
/// # Safety
/// `result` must be the caller's variable.
unsafe fn add_region(step: Step, domain: *mut sys::Fid, memory: &Memory, result: *mut *mut sys::Mr) -> c_int {
    let domain = domain.cast::<sys::Domain>();
    let &Memory { start, len, access, key: asked, of_gpu } = memory;
    let (settings, key, number) = {
        let mut world = world();
        let Some(settings) = world.called("fi_mr_reg", id(domain)) else { return EINVAL };
        if world.copy.is_none() && world.is_of_gpu(start, len) != of_gpu {
            world.wrong(id(domain), "memory of a GPU registered as host memory, or the reverse");
            return EINVAL;
        }
        let takes = matches!(world.objects[&id(domain)].kind, Kind::Domain { gpu_memory: true });
        if of_gpu && !takes {
            world.wrong(id(domain), "memory of a GPU registered without FI_HMEM");
            return EINVAL;
        }
        let bits = 8 * settings.key_size.min(8) as u32;
        let key = if settings.mr_mode & sys::MR_PROV_KEY != 0 {
            // The provider's own choice, which differs from the caller's.
            let (network, _) = world.of(id(domain)).expect("called above");
            let key = (network.random(usize::MAX) as u64) >> (u64::BITS - bits);
            if key == asked { key ^ 1 } else { key }
        } else if bits < u64::BITS && asked >> bits != 0 {
            world.wrong(id(domain), format!("fi_mr_reg with a key of more than {bits} bits"));
            return EINVAL;
        } else {
            asked
        };
        let taken = |object: &Object| {
            object.domain == id(domain) && matches!(&object.kind, Kind::Region(region) if region.key == key)
        };
        if world.objects.values().any(taken) {
            return -ENOKEY;
        }
        (settings, key, world.number())
    };
    let late = settings.mr_mode & sys::MR_ENDPOINT != 0;
    let local = of_gpu || settings.mr_mode & sys::MR_LOCAL != 0;
    // Descriptors are not addresses: only the fake reads them.
    let descriptor = if local { 0x1000 + number as usize * 8 } else { 0 };
    let unusable = late || settings.fail == Step::Key;
    let head = sys::Mr {
        fid: fid(&OF_REGION),
        desc: ptr::without_provenance_mut(descriptor),
        key: if unusable { sys::KEY_NOTAVAIL } else { key },
    };
    if of_gpu && let Some((network, _)) = world().of(id(domain)) {
        network.gpu_regions += 1;
    }
    let region = Region { start, len, access, key, descriptor, bound: None, enabled: !late };
    // SAFETY: the caller's variable.
    unsafe { open(step, domain, result, head, Kind::Region(region)) }.err().unwrap_or(0)
}

unsafe extern "C" fn bind_region(region: *mut sys::Fid, to: *mut sys::Fid, flags: u64) -> c_int {
    let (mut world, region, to) = (world(), id(region), id(to));
    if world.called("fi_mr_bind", region).is_none() || world.endpoint(to).is_none() || flags != 0 {
        return EINVAL;
    }
    if let Some(answer) = world.fails(region, Step::MrBind) {
        return answer;
    }
    let Some(state) = world.region(region) else { return EINVAL };
    state.bound = Some(to);
    world.objects.get_mut(&region).expect("found above").uses.push(to);
    0
}

unsafe extern "C" fn enable_region(region: *mut sys::Fid, command: c_int, _: *mut c_void) -> c_int {
    let mut world = world();
    let address = id(region);
    let Some(settings) = world.called("fi_mr_enable", address) else { return EINVAL };
    if let Some(answer) = world.fails(address, Step::MrEnable) {
        return answer;
    }
    let Some(state) = world.region(address) else { return EINVAL };
    if command != sys::ENABLE || state.bound.is_none() {
        return -EOPBADSTATE;
    }
    state.enabled = true;
    if settings.fail != Step::Key {
        // SAFETY: an open region; its head stays allocated.
        unsafe { (*region.cast::<sys::Mr>()).key = state.key };
    }
    0
}

/// The address of an endpoint, in the format of its NIC.
fn address_of(settings: &Settings, number: u64) -> Vec<u8> {
    if settings.text_addresses {
        // Texts of different lengths.
        let tail = "/".repeat(number as usize % 5);
        return format!("fake://{number}{tail}\0").into_bytes();
    }
    [*b"fakeaddr", number.to_le_bytes()].concat()
}

unsafe extern "C" fn getname(endpoint: *mut sys::Fid, address: *mut c_void, len: *mut usize) -> c_int {
    let (mut world, endpoint) = (world(), id(endpoint));
    let Some(settings) = world.called("fi_getname", endpoint) else { return EINVAL };
    if let Some(answer) = world.fails(endpoint, Step::GetName) {
        return answer;
    }
    let Some(state) = world.endpoint(endpoint) else { return EINVAL };
    if !state.enabled {
        return -EOPBADSTATE;
    }
    let bytes = address_of(&settings, state.number);
    // SAFETY: the caller states its room in `len`.
    unsafe {
        address.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len().min(*len));
        *len = bytes.len();
    }
    0
}

unsafe extern "C" fn insert(
    vector: *mut sys::Av,
    addresses: *const c_void,
    count: usize,
    result: *mut sys::Address,
    flags: u64,
    _: *mut c_void,
) -> c_int {
    let (mut world, vector) = (world(), id(vector));
    let Some(settings) = world.called("fi_av_insert", vector) else { return EINVAL };
    if count != 1 || flags != 0 {
        return EINVAL;
    }
    let text: &str;
    // SAFETY: the caller passes an address of this NIC's format: a string, or 16 bytes.
    let number = unsafe {
        if settings.text_addresses {
            text = CStr::from_ptr(addresses.cast::<c_char>()).to_str().unwrap_or("");
            text.strip_prefix("fake://").and_then(|text| text.trim_end_matches('/').parse().ok())
        } else {
            let bytes = addresses.cast::<[u8; 16]>().read_unaligned();
            let number = bytes.strip_prefix(b"fakeaddr").and_then(|number| number.try_into().ok());
            number.map(u64::from_le_bytes)
        }
    };
    let number = number.filter(|_| !settings.refuses_addresses);
    let Some(Kind::Addresses(known)) = world.objects.get_mut(&vector).map(|object| &mut object.kind) else {
        return EINVAL;
    };
    // A table numbers its addresses, a map does not.
    let next = known.len() as u64;
    let address = if settings.av_type == sys::AV_MAP { next * 64 + 7 } else { next };
    // SAFETY: the caller's variable.
    unsafe { *result = if number.is_some() { address } else { u64::MAX } };
    let Some(number) = number else { return 0 };
    known.insert(address, number);
    1
}

unsafe extern "C" fn recv(
    endpoint: *mut sys::Ep,
    _buffer: *mut c_void,
    _len: usize,
    _descriptor: *mut c_void,
    source: sys::Address,
    context: *mut c_void,
) -> isize {
    let context = context.expose_provenance();
    exclusive("fi_recv", id(endpoint), |world, settings| {
        if source != u64::MAX {
            return EINVAL as isize;
        }
        wire::post_receive(world, id(endpoint), &settings, context)
    })
}

#[allow(clippy::too_many_arguments)] // as in C
unsafe extern "C" fn writedata(
    endpoint: *mut sys::Ep,
    buffer: *const c_void,
    len: usize,
    descriptor: *mut c_void,
    data: u64,
    to: sys::Address,
    at: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    let (source, context) = (buffer.expose_provenance(), context.expose_provenance());
    let post = Post { source, len, descriptor: descriptor.addr(), data, to, at, key, context };
    exclusive("fi_writedata", id(endpoint), |world, settings| {
        wire::post_put(world, id(endpoint), &settings, post)
    })
}

unsafe extern "C" fn read(queue: *mut sys::Cq, entries: *mut c_void, count: usize) -> isize {
    if exclusive("fi_cq_read", id(queue), |_, settings| isize::from(settings.stuck)) == 1 {
        loop {
            std::thread::park();
        }
    }
    exclusive("fi_cq_read", id(queue), |world, settings| {
        let found = wire::read(world, id(queue), &settings, count);
        found.map_or_else(
            |answer| answer,
            |found| {
                // SAFETY: the caller's array, in the format of the queue; `found` has at most `count` entries.
                unsafe {
                    let entries = entries.cast::<sys::CqDataEntry>();
                    entries.copy_from_nonoverlapping(found.as_ptr(), found.len());
                }
                found.len() as isize
            },
        )
    })
}

unsafe extern "C" fn readerr(queue: *mut sys::Cq, entry: *mut sys::CqErrEntry, _flags: u64) -> isize {
    exclusive("fi_cq_readerr", id(queue), |world, settings| {
        match wire::read_error(world, id(queue), &settings) {
            Ok(found) => {
                // SAFETY: the caller's structure.
                unsafe { *entry = found };
                1
            }
            Err(answer) => answer,
        }
    })
}
