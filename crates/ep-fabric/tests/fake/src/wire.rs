//! Puts in flight. They move only while a queue of their sender or of their receiver is read.

use std::ptr;

use crate::settings::{Gone, Settings, Step};
use crate::sys;
use crate::world::{EOPBADSTATE, Endpoint, Id, Kind, Object, World, scribble};

const EAGAIN: isize = -sys::EAGAIN;
const EINVAL: isize = -sys::EINVAL;
const EIO: i32 = 5;
const ECONNRESET: i32 = 104;
const ENORX: i32 = 269;
/// Flags of completions (`FI_RMA`, `FI_WRITE`, `FI_REMOTE_WRITE`).
const SENT: u64 = sys::RMA | sys::WRITE;
const RECEIVED: u64 = sys::RMA | sys::REMOTE_WRITE | sys::REMOTE_CQ_DATA;

/// The arguments of `fi_writedata`.
#[derive(Clone, Copy)]
pub(crate) struct Post {
    pub(crate) source: usize,
    pub(crate) len: usize,
    pub(crate) descriptor: usize,
    pub(crate) data: u64,
    pub(crate) to: sys::Address,
    pub(crate) at: u64,
    pub(crate) key: u64,
    pub(crate) context: Id,
}

/// A put in flight.
pub(crate) struct Flight {
    /// The sender; `None` when the bytes have left it, and its completion was reported.
    pub(crate) from: Option<Id>,
    /// The sender's and the receiver's numbers.
    pair: (u64, u64),
    post: Post,
    /// The bytes, when they have left the sender.
    bytes: Option<Vec<u8>>,
    /// Ranges that are not delivered: offset and length.
    parts: Vec<(usize, usize)>,
    /// Attempts to deliver the immediate.
    attempts: u64,
    fails: bool,
}

/// Takes a context from the caller until its completion is read.
fn take_context(world: &mut World, endpoint: Id, context: Id) {
    if context == 0 || !context.is_multiple_of(8) {
        return world.wrong(endpoint, "a context that is no address");
    }
    let taken = world.endpoint(endpoint).is_some_and(|state| state.contexts.insert(context));
    if !taken {
        world.wrong(endpoint, "a context of an operation in flight is used again");
    }
    scribble(context, 0xC5);
}

/// Checks that the completions of all posted operations fit the endpoint's queue.
fn check_room(world: &mut World, endpoint: Id) {
    let Some(state) = world.endpoint(endpoint) else { return };
    let (posted, queue) = (state.outstanding + state.receives.len(), state.queue.unwrap_or(0));
    let Some(queue) = world.queue(queue) else { return };
    let (unread, size) = (queue.ready.len() + queue.errors.len(), queue.size);
    if posted + unread > size {
        let text = format!("{posted} operations and {unread} completions with a queue of {size}");
        world.wrong(endpoint, text);
    }
}

/// `fi_recv`, of no bytes, for immediates.
pub(crate) fn post_receive(world: &mut World, endpoint: Id, settings: &Settings, context: Id) -> isize {
    if let Some(answer) = world.fails(endpoint, Step::Recv) {
        return answer as isize;
    }
    let again = world.of(endpoint).is_some_and(|(network, _)| network.percent(settings.again));
    let Some(state) = world.endpoint(endpoint).filter(|state| state.enabled) else {
        return -(EOPBADSTATE as isize);
    };
    if again {
        return EAGAIN;
    }
    if state.receives.len() >= settings.rx_size {
        world.wrong(endpoint, format!("more than {} posted receives", settings.rx_size));
        return EAGAIN;
    }
    state.receives.push_back(context);
    take_context(world, endpoint, context);
    check_room(world, endpoint);
    0
}

/// `fi_writedata`.
pub(crate) fn post_put(world: &mut World, endpoint: Id, settings: &Settings, post: Post) -> isize {
    if let Some(answer) = world.fails(endpoint, Step::WriteData) {
        return answer as isize;
    }
    let domain = world.objects[&endpoint].domain;
    let again = world.of(endpoint).is_some_and(|(network, _)| network.percent(settings.again));
    let Some(state) = world.endpoint(endpoint).filter(|state| state.enabled) else {
        world.wrong(endpoint, "fi_writedata of an endpoint that is not enabled");
        return -(EOPBADSTATE as isize);
    };
    let (number, vector, outstanding) = (state.number, state.addresses, state.outstanding);
    if outstanding >= settings.tx_size {
        world.wrong(endpoint, format!("more than {} puts in flight", settings.tx_size));
        return EAGAIN;
    }
    let known = vector.and_then(|vector| match &world.objects.get(&vector)?.kind {
        Kind::Addresses(known) => known.get(&post.to).copied(),
        _ => None,
    });
    let refused = if post.len > settings.max_msg_size {
        Some(format!("a put of {} bytes", post.len))
    } else if post.data >> (8 * settings.data_size.min(7)) != 0 {
        Some(format!("an immediate of more than {} bytes", settings.data_size))
    } else if known.is_none() {
        Some("a put to an address that is not in the vector".into())
    } else {
        let of_gpu = world.is_of_gpu(post.source, post.len);
        let local = (of_gpu || settings.mr_mode & sys::MR_LOCAL != 0) && post.len > 0;
        let fits = |object: &Object| match &object.kind {
            Kind::Region(region) => {
                object.domain == domain
                    && region.descriptor == post.descriptor
                    && region.access & sys::WRITE != 0
                    && region.enabled
                    && region.bound.is_none_or(|bound| bound == endpoint)
                    && post.source >= region.start
                    && post.source + post.len <= region.start + region.len
            }
            _ => false,
        };
        let missing = local && !world.objects.values().any(fits);
        missing.then(|| "a put from memory whose descriptor was not passed (FI_MR_LOCAL)".into())
    };
    if let Some(text) = refused {
        world.wrong(endpoint, text);
        return EINVAL;
    }
    let to = known.expect("checked above");
    if again || (settings.gone == Gone::Again && world.numbered(to).is_none()) {
        return EAGAIN;
    }
    let nic = world.objects[&endpoint].nic;
    let (network, _) = world.of(endpoint).expect("open");
    network.puts += 1;
    *network.puts_by_nic.entry(network.nics[nic].domain.clone()).or_default() += 1;
    let fails = network.puts == settings.fail_put;
    let part = if settings.part == 0 { post.len.max(1) } else { settings.part };
    let parts = (0..post.len).step_by(part).map(|at| (at, part.min(post.len - at))).collect();
    let pair = (number, to);
    network.wire.push(Flight { from: Some(endpoint), pair, post, bytes: None, parts, attempts: 0, fails });
    world.endpoint(endpoint).expect("open").outstanding += 1;
    take_context(world, endpoint, post.context);
    check_room(world, endpoint);
    0
}

/// Puts a completion into the queue of an endpoint.
fn complete(world: &mut World, endpoint: Id, context: Option<Id>, flags: u64, data: u64, error: i32) {
    let (network, settings) = world.of(endpoint).expect("open");
    let random = network.random(usize::MAX);
    let Some(queue) = world.endpoint(endpoint).and_then(|state| state.queue) else { return };
    let op_context = context.map_or(ptr::null_mut(), ptr::with_exposed_provenance_mut);
    if let Some(context) = context {
        scribble(context, 0xA3);
    }
    let queue = world.queue(queue).expect("an endpoint uses its queue");
    if error != 0 {
        // SAFETY: all bytes zero are a valid entry.
        let mut entry: sys::CqErrEntry = unsafe { std::mem::zeroed() };
        (entry.op_context, entry.flags, entry.err, entry.prov_errno) = (op_context, flags, error, 12);
        queue.errors.push_back(entry);
    } else {
        let entry = sys::CqDataEntry { op_context, flags, len: 0, buf: ptr::null_mut(), data };
        let at = if settings.reorder { random % (queue.ready.len() + 1) } else { queue.ready.len() };
        queue.ready.insert(at, entry);
    }
    let (found, size) = (queue.ready.len() + queue.errors.len(), queue.size);
    if found > size {
        world.wrong(endpoint, format!("{found} completions in a queue of {size}"));
    }
}

/// Completes a put at its sender, if its completion was not reported.
fn sent(world: &mut World, flight: &mut Flight, error: i32) {
    let Some(endpoint) = flight.from.take() else { return };
    let Some(state) = world.endpoint(endpoint) else { return };
    state.outstanding -= 1;
    complete(world, endpoint, Some(flight.post.context), SENT, 0, error);
}

/// Where the bytes of a put belong, or why they belong nowhere.
fn target(world: &World, receiver: Id, settings: &Settings, post: &Post) -> Result<usize, Option<String>> {
    let domain = world.objects[&receiver].domain;
    let region = world.objects.values().find_map(|object| match &object.kind {
        Kind::Region(region) if object.domain == domain && region.key == post.key => Some(region),
        _ => None,
    });
    let Some(region) = region else {
        // A put to a rank that leaves may find its region closed and its endpoint open.
        let network = &world.networks[world.objects[&receiver].network];
        let closed = network.closed_keys.contains(&(domain, post.key));
        return Err((!closed).then(|| "a put with a key of no region".into()));
    };
    let usable = region.enabled && region.access & sys::REMOTE_WRITE != 0;
    let late = settings.mr_mode & sys::MR_ENDPOINT != 0;
    if !usable || (late && region.bound != Some(receiver)) {
        return Err(Some("a put to a region that is not bound, enabled and writable".into()));
    }
    let base = if settings.mr_mode & sys::MR_VIRT_ADDR == 0 { 0 } else { region.start };
    let offset = (post.at as usize).checked_sub(base);
    let inside = offset.filter(|offset| offset.checked_add(post.len).is_some_and(|end| end <= region.len));
    inside.map(|offset| region.start + offset).ok_or_else(|| Some("a put outside its region".into()))
}

/// Copies bytes, which may be in the memory of a GPU.
///
/// # Safety
/// Both ranges must be memory that their owners lend to the fake.
unsafe fn copy(world: &World, to: *mut u8, from: *const u8, len: usize) {
    match world.copy {
        Some(copy) => copy(to.cast(), from.cast(), len),
        // SAFETY: guaranteed by the caller.
        None => unsafe { to.copy_from(from, len) },
    }
}

/// Moves one put on: a part of its bytes, or its immediate. Returns it while it is not complete.
fn advance(world: &mut World, mut flight: Flight, settings: &Settings) -> Option<Flight> {
    if flight.fails {
        sent(world, &mut flight, EIO);
        return None;
    }
    if let Some(from) = flight.from.filter(|_| flight.bytes.is_none()) {
        let delivery = world.endpoint(from).is_some_and(|state| state.delivery);
        if !delivery {
            let (start, mut bytes) = (flight.post.source, vec![0; flight.post.len]);
            let start = ptr::with_exposed_provenance::<u8>(start);
            // SAFETY: the caller of libfabric keeps the source until the put is complete.
            unsafe { copy(world, bytes.as_mut_ptr(), start, bytes.len()) };
            flight.bytes = Some(bytes);
            // The bytes have left: the put is complete, and arrives even if its sender closes.
            if world.numbered(flight.pair.1).is_some() {
                sent(world, &mut flight, 0);
                return Some(flight);
            }
        }
    }
    let Some(receiver) = world.numbered(flight.pair.1) else {
        sent(world, &mut flight, if settings.gone == Gone::Silent { 0 } else { ECONNRESET });
        return None;
    };
    let (network, of_receiver) = world.of(receiver).expect("open");
    let next = if settings.reorder { network.random(flight.parts.len()) } else { 0 };
    let start = match target(world, receiver, &of_receiver, &flight.post) {
        Ok(start) => start,
        Err(text) => {
            text.into_iter().for_each(|text| world.wrong(receiver, text));
            sent(world, &mut flight, EIO);
            return None;
        }
    };
    if next < flight.parts.len() {
        let (at, len) = flight.parts.remove(next);
        let source = match &flight.bytes {
            Some(bytes) => bytes[at..at + len].as_ptr(),
            None => ptr::with_exposed_provenance(flight.post.source + at),
        };
        let destination = ptr::with_exposed_provenance_mut::<u8>(start + at);
        // SAFETY: both ranges are inside registered memory, or inside of the copy; the callers of libfabric keep
        // registered memory until they close the region.
        unsafe { copy(world, destination, source, len) };
        if !flight.parts.is_empty() {
            return Some(flight);
        }
    }
    let demands = of_receiver.mode & sys::RX_CQ_DATA != 0;
    let state: &mut Endpoint = world.endpoint(receiver).expect("open");
    let context = state.receives.pop_front();
    if demands && context.is_none() {
        flight.attempts += 1;
        world.of(receiver).expect("open").0.waits += 1;
        if flight.attempts > settings.rnr_retries {
            sent(world, &mut flight, ENORX);
            return None;
        }
        return Some(flight);
    }
    complete(world, receiver, context, RECEIVED, flight.post.data, 0);
    sent(world, &mut flight, 0);
    None
}

/// Moves some puts of the endpoints that use a queue.
fn turn(world: &mut World, queue: Id, settings: &Settings) {
    let own: Vec<u64> = world
        .objects
        .values()
        .filter_map(|object| match &object.kind {
            Kind::Endpoint(endpoint) if endpoint.queue == Some(queue) => Some(endpoint.number),
            _ => None,
        })
        .collect();
    let index = world.objects[&queue].network;
    let network = &mut world.networks[index];
    if network.percent(settings.late) {
        return;
    }
    for _ in 0..=network.random(4) {
        let network = &mut world.networks[index];
        let moves = |flight: &Flight| own.contains(&flight.pair.0) || own.contains(&flight.pair.1);
        let mine: Vec<usize> = (0..network.wire.len()).filter(|&at| moves(&network.wire[at])).collect();
        if mine.is_empty() {
            return;
        }
        let mut at = mine[network.random(mine.len())];
        if !settings.reorder {
            // The first put of this sender and receiver.
            let pair = network.wire[at].pair;
            at = network.wire.iter().position(|flight| flight.pair == pair).expect("it exists");
        }
        let flight = network.wire.remove(at);
        if let Some(flight) = advance(world, flight, settings) {
            let wire = &mut world.networks[index].wire;
            wire.insert(at.min(wire.len()), flight);
        }
    }
}

/// Gives the contexts of completions back to the caller, who reads them now.
fn give_back(world: &mut World, queue: Id, contexts: impl Iterator<Item = Id>) {
    for context in contexts.filter(|&context| context != 0) {
        for object in world.objects.values_mut() {
            if let Kind::Endpoint(state) = &mut object.kind
                && state.queue == Some(queue)
            {
                state.contexts.remove(&context);
            }
        }
    }
}

/// `fi_cq_read`.
pub(crate) fn read(
    world: &mut World,
    queue: Id,
    settings: &Settings,
    count: usize,
) -> Result<Vec<sys::CqDataEntry>, isize> {
    if let Some(answer) = world.fails(queue, Step::CqRead) {
        return Err(answer as isize);
    }
    turn(world, queue, settings);
    let (network, _) = world.of(queue).expect("open");
    let (again, random) = (network.percent(settings.again), network.random(usize::MAX));
    let state = world.queue(queue).ok_or(EINVAL)?;
    if again {
        return Err(EAGAIN);
    }
    if !state.errors.is_empty() {
        return Err(-sys::EAVAIL);
    }
    if state.ready.is_empty() {
        return Err(EAGAIN);
    }
    let most = state.ready.len().min(count);
    let found: Vec<_> = state.ready.drain(..1 + random % most).collect();
    give_back(world, queue, found.iter().map(|entry| entry.op_context.addr()));
    Ok(found)
}

/// `fi_cq_readerr`.
pub(crate) fn read_error(
    world: &mut World,
    queue: Id,
    settings: &Settings,
) -> Result<sys::CqErrEntry, isize> {
    if let Some(answer) = world.fails(queue, Step::CqReadErr) {
        return Err(answer as isize);
    }
    let (network, _) = world.of(queue).expect("open");
    let again = network.percent(settings.again);
    let state = world.queue(queue).ok_or(EINVAL)?;
    if again {
        return Err(EAGAIN);
    }
    let entry = state.errors.pop_front().ok_or(EAGAIN)?;
    give_back(world, queue, std::iter::once(entry.op_context.addr()));
    Ok(entry)
}
