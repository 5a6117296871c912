//! All objects of the fake, by address, under one lock.

use std::any::Any;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::ffi::{c_int, c_void};
use std::fmt::Write as _;
use std::ops::Range;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::settings::{Settings, Step};
use crate::sys;
use crate::wire::Flight;

pub(crate) const EBUSY: c_int = 16;
pub(crate) const EOPBADSTATE: c_int = 258;
pub(crate) const ENOCQ: c_int = 263;
pub(crate) const ENOKEY: c_int = 266;
pub(crate) const ENOAV: c_int = 267;

/// The address of an object, by which its owner names it.
pub(crate) type Id = usize;

static WORLD: Mutex<Option<World>> = Mutex::new(None);

/// The lock of the world. The world is made when the lock is first taken.
pub(crate) struct Guard(MutexGuard<'static, Option<World>>);

pub(crate) fn world() -> Guard {
    let mut world = WORLD.lock().unwrap_or_else(PoisonError::into_inner);
    world.get_or_insert_with(World::default);
    Guard(world)
}

impl std::ops::Deref for Guard {
    type Target = World;
    fn deref(&self) -> &World {
        self.0.as_ref().expect("made by `world`")
    }
}

impl std::ops::DerefMut for Guard {
    fn deref_mut(&mut self) -> &mut World {
        self.0.as_mut().expect("made by `world`")
    }
}

/// One NIC of a provider.
pub(crate) struct Nic {
    pub(crate) domain: String,
    pub(crate) node: String,
    pub(crate) settings: Settings,
}

impl Nic {
    pub(crate) fn fabric(&self) -> String {
        format!("network of {}", self.domain)
    }
}

/// A provider: its NICs and the network between them.
#[derive(Default)]
pub(crate) struct Network {
    pub(crate) name: String,
    pub(crate) nics: Vec<Nic>,
    pub(crate) wire: Vec<Flight>,
    random: u64,
    /// Puts that were posted.
    pub(crate) puts: u64,
    pub(crate) puts_by_nic: BTreeMap<String, u64>,
    /// Attempts to deliver an immediate to an endpoint without a posted receive.
    pub(crate) waits: u64,
    /// Endpoints that were opened, by NIC and by traffic class.
    endpoints: BTreeMap<String, usize>,
    classes: BTreeMap<u32, usize>,
    /// Regions in the memory of GPUs that were registered.
    pub(crate) gpu_regions: u64,
    /// Keys of regions that are closed, by domain.
    pub(crate) closed_keys: HashSet<(Id, u64)>,
    wrong: Vec<String>,
}

impl Network {
    /// A number below `below`.
    pub(crate) fn random(&mut self, below: usize) -> usize {
        // The generator splitmix64.
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.random;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((word ^ (word >> 31)) % below.max(1) as u64) as usize
    }

    pub(crate) fn percent(&mut self, percent: u8) -> bool {
        self.random(100) < usize::from(percent)
    }

    /// Records a call that libfabric does not allow.
    pub(crate) fn wrong(&mut self, text: impl Into<String>) {
        self.wrong.push(text.into());
    }
}

/// A queue of completions.
pub(crate) struct Queue {
    pub(crate) size: usize,
    pub(crate) ready: VecDeque<sys::CqDataEntry>,
    pub(crate) errors: VecDeque<sys::CqErrEntry>,
}

// SAFETY: the pointers are the callers' contexts, which only their owners follow.
unsafe impl Send for Queue {}

/// An endpoint.
#[derive(Default)]
pub(crate) struct Endpoint {
    /// Its number, which its address contains.
    pub(crate) number: u64,
    pub(crate) queue: Option<Id>,
    pub(crate) addresses: Option<Id>,
    pub(crate) enabled: bool,
    /// Whether puts complete when the bytes are in the peer's memory, and not when they have left.
    pub(crate) delivery: bool,
    /// Puts that are not complete.
    pub(crate) outstanding: usize,
    /// Contexts of posted receives.
    pub(crate) receives: VecDeque<Id>,
    /// Contexts of operations whose completion was not read.
    pub(crate) contexts: HashSet<Id>,
}

/// A registered region.
pub(crate) struct Region {
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) access: u64,
    pub(crate) key: u64,
    pub(crate) descriptor: usize,
    /// The endpoint that it is bound to.
    pub(crate) bound: Option<Id>,
    pub(crate) enabled: bool,
}

pub(crate) enum Kind {
    Fabric,
    /// Whether it was opened for the memory of GPUs, too.
    Domain {
        gpu_memory: bool,
    },
    Queue(Queue),
    /// The numbers of endpoints, by address in the vector.
    Addresses(HashMap<sys::Address, u64>),
    Endpoint(Endpoint),
    Region(Region),
}

impl Kind {
    fn name(&self) -> &'static str {
        match self {
            Self::Fabric => "fabric",
            Self::Domain { .. } => "domain",
            Self::Queue(_) => "queue",
            Self::Addresses(_) => "addresses",
            Self::Endpoint(_) => "endpoint",
            Self::Region(_) => "region",
        }
    }
}

/// What all objects have.
pub(crate) struct Object {
    pub(crate) network: usize,
    pub(crate) nic: usize,
    /// The domain that it belongs to; the object itself for a domain, and 0 for a fabric.
    pub(crate) domain: Id,
    /// The objects that must be closed after it.
    pub(crate) uses: Vec<Id>,
    pub(crate) kind: Kind,
}

/// The memory of an object. It stays allocated, so that no later object has its address, and a late call is detected.
struct Head(#[allow(dead_code)] Box<dyn Any>);

// SAFETY: the fake does not access the head after it has written it.
unsafe impl Send for Head {}

/// Everything.
#[derive(Default)]
pub(crate) struct World {
    pub(crate) networks: Vec<Network>,
    pub(crate) objects: HashMap<Id, Object>,
    /// Entries of lists, with the network whose test asked for the list by name.
    pub(crate) infos: HashMap<usize, Option<usize>>,
    /// Domains with a call that has not returned.
    calls: HashSet<Id>,
    heads: Vec<Head>,
    /// What tests declare to be memory of GPUs.
    gpu_memory: Vec<Range<usize>>,
    /// Copies all bytes, and knows which memory is that of a GPU, so the fake does not check it.
    pub(crate) copy: Option<Copy>,
    numbers: u64,
}

/// Copies bytes that a processor may not access: destination, source, length.
pub type Copy = extern "C" fn(*mut c_void, *const c_void, usize);

impl World {
    /// Declares `len` bytes to be memory of a GPU.
    pub(crate) fn set_gpu_memory(&mut self, start: usize, len: usize) {
        self.gpu_memory.push(start..start + len);
    }

    /// Whether a range has memory of a GPU.
    pub(crate) fn is_of_gpu(&self, start: usize, len: usize) -> bool {
        self.gpu_memory.iter().any(|range| start < range.end && range.start < start + len)
    }

    pub(crate) fn offer(&mut self, provider: &str, domain: String, node: String, settings: Settings) {
        let nic = Nic { domain, node, settings };
        let found = self.networks.iter().position(|network| network.name == provider);
        let index = found.unwrap_or_else(|| {
            let (name, random) = (provider.to_string(), settings.seed);
            self.networks.push(Network { name, random, ..Network::default() });
            self.networks.len() - 1
        });
        self.networks[index].nics.push(nic);
    }

    pub(crate) fn report(&self, provider: &str) -> String {
        let mut text = String::new();
        let Some(index) = self.networks.iter().position(|network| network.name == provider) else {
            return text;
        };
        let network = &self.networks[index];
        let mut open: BTreeMap<&str, usize> = BTreeMap::new();
        for object in self.objects.values().filter(|object| object.network == index) {
            *open.entry(object.kind.name()).or_default() += 1;
        }
        let infos = self.infos.values().filter(|&&of| of == Some(index)).count();
        if infos > 0 {
            open.insert("info", infos);
        }
        let mut line = |word: &str, number: u64, what: &str| {
            writeln!(text, "{word} {number} {what}").expect("strings take all text");
        };
        open.into_iter().for_each(|(kind, count)| line("open", count as u64, kind));
        network.endpoints.iter().for_each(|(nic, count)| line("endpoint", *count as u64, nic));
        network.classes.iter().for_each(|(class, count)| line("class", *count as u64, &class.to_string()));
        network.puts_by_nic.iter().for_each(|(nic, count)| line("puts", *count, nic));
        line("waits", network.waits, "");
        line("gpu", network.gpu_regions, "");
        network.wrong.iter().for_each(|wrong| line("wrong", 1, wrong));
        text
    }

    /// The network and the settings of an object.
    pub(crate) fn of(&mut self, id: Id) -> Option<(&mut Network, Settings)> {
        let object = self.objects.get(&id)?;
        let network = &mut self.networks[object.network];
        let settings = network.nics[object.nic].settings;
        Some((network, settings))
    }

    /// The settings of an object, for a call with this object. An object that is not open is recorded in all networks,
    /// because it names none.
    pub(crate) fn called(&mut self, call: &str, id: Id) -> Option<Settings> {
        if let Some((_, settings)) = self.of(id) {
            return Some(settings);
        }
        self.networks.iter_mut().for_each(|network| network.wrong(format!("{call}: the object is not open")));
        None
    }

    pub(crate) fn wrong(&mut self, id: Id, text: impl Into<String>) {
        if let Some((network, _)) = self.of(id) {
            network.wrong(text);
        }
    }

    /// The answer of a step that is set to fail.
    pub(crate) fn fails(&self, id: Id, step: Step) -> Option<c_int> {
        let object = self.objects.get(&id)?;
        let settings = &self.networks[object.network].nics[object.nic].settings;
        (settings.fail == step).then_some(-settings.errno)
    }

    pub(crate) fn queue(&mut self, id: Id) -> Option<&mut Queue> {
        match &mut self.objects.get_mut(&id)?.kind {
            Kind::Queue(queue) => Some(queue),
            _ => None,
        }
    }

    pub(crate) fn endpoint(&mut self, id: Id) -> Option<&mut Endpoint> {
        match &mut self.objects.get_mut(&id)?.kind {
            Kind::Endpoint(endpoint) => Some(endpoint),
            _ => None,
        }
    }

    pub(crate) fn region(&mut self, id: Id) -> Option<&mut Region> {
        match &mut self.objects.get_mut(&id)?.kind {
            Kind::Region(region) => Some(region),
            _ => None,
        }
    }

    /// The open endpoint with this number.
    pub(crate) fn numbered(&self, number: u64) -> Option<Id> {
        let is = |object: &Object| matches!(&object.kind, Kind::Endpoint(one) if one.number == number);
        self.objects.iter().find(|(_, object)| is(object)).map(|(&id, _)| id)
    }

    /// A number that was not given before.
    pub(crate) fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// Adds an object that begins with `head`, and returns its address.
    pub(crate) fn add<T: 'static>(&mut self, head: T, object: Object) -> *mut T {
        let mut head = Box::new(head);
        let address: *mut T = ptr::from_mut(&mut *head);
        self.heads.push(Head(head));
        let id = address.addr();
        let object = match object.kind {
            Kind::Domain { .. } => Object { domain: id, ..object },
            _ => object,
        };
        if let Kind::Endpoint(_) = &object.kind {
            let network = &mut self.networks[object.network];
            let nic = network.nics[object.nic].domain.clone();
            *network.endpoints.entry(nic).or_default() += 1;
        }
        self.objects.insert(id, object);
        address
    }

    pub(crate) fn opened_with_class(&mut self, id: Id, class: u32) {
        if let Some((network, _)) = self.of(id) {
            *network.classes.entry(class).or_default() += 1;
        }
    }

    /// Closes an object, unless another one uses it.
    pub(crate) fn close(&mut self, id: Id) -> c_int {
        if self.called("fi_close", id).is_none() {
            return -(sys::EINVAL as c_int);
        }
        let name = self.objects[&id].kind.name();
        if let Some(user) = self.objects.values().find(|object| object.uses.contains(&id)) {
            let user = user.kind.name();
            self.wrong(id, format!("fi_close of a {name} that a {user} uses"));
            return -EBUSY;
        }
        let object = self.objects.remove(&id).expect("called just now");
        let network = &mut self.networks[object.network];
        match object.kind {
            Kind::Endpoint(_) => network.wire.retain(|flight| flight.from != Some(id)),
            Kind::Region(region) => drop(network.closed_keys.insert((object.domain, region.key))),
            _ => {}
        }
        0
    }

    /// Marks the domain of an object as busy with a call. The caller of libfabric must not call again before
    /// [`left`](Self::left) (`FI_THREAD_DOMAIN`).
    pub(crate) fn entered(&mut self, call: &str, id: Id) {
        let Some(domain) = self.objects.get(&id).map(|object| object.domain) else { return };
        if !self.calls.insert(domain) {
            self.wrong(id, format!("{call} during another call of the same domain"));
        }
    }

    pub(crate) fn left(&mut self, id: Id) {
        let Some(domain) = self.objects.get(&id).map(|object| object.domain) else { return };
        self.calls.remove(&domain);
    }
}

/// The address of an object.
pub(crate) fn id<T>(object: *mut T) -> Id {
    object.addr()
}

/// A context of 64 bytes, which belongs to the library while its operation is in flight: the fake writes to it.
pub(crate) fn scribble(context: Id, byte: u8) {
    // SAFETY: the caller of libfabric lends these bytes (`FI_CONTEXT2`) until the operation is complete.
    unsafe { ptr::write_bytes(ptr::with_exposed_provenance_mut::<c_void>(context).cast::<u8>(), byte, 64) };
}
