//! The engine of a rank's rail: which one, from the configuration, and how it is opened. `buffer` connects it.

use std::net::IpAddr;
use std::sync::Arc;

use ep::{Config, Limits, Rail, Rank, Result, Unconnected, World};
use ep_rail::{Loopback, Segment};

use crate::control::check_segment;
use crate::join::Connected;
use crate::rail::WindowLayout;

/// The rail of `rank`.
pub(crate) fn rail_of(world: &World, rank: Rank) -> Result<Rail> {
    let topology = world.topology();
    let ranks = topology.rail_ranks(topology.local_rank_of(rank)).collect();
    Rail::new(ranks, topology.domain_of(rank))
}

/// Whether the ranks exchange blobs: the engine does not map the windows of the peers.
pub(crate) fn needs_blobs(world: &World, config: &Config) -> bool {
    world.topology().domains() > 1 && !config.host.transport.is_loopback()
}

/// Opens the engine of `rank`.
pub(crate) fn open(
    world: &World,
    rank: Rank,
    config: &Config,
    connected: &Connected,
) -> Result<Box<dyn Unconnected>> {
    let rail = rail_of(world, rank)?;
    let signals = WindowLayout::signals(config.host.slots);
    let window = |peer: Rank| {
        let bytes = WindowLayout::new(world, config)?.bytes();
        let window = connected.segments[peer.index()].window.as_ref();
        let window = window.expect("the window of a rank of this machine; `join` has checked the engine");
        check_segment(peer, "window", window, bytes)?;
        Ok(Arc::clone(window))
    };
    if needs_blobs(world, config) {
        let local_rank = world.topology().local_rank_of(rank);
        let limits = Limits { signals, put_bytes: config.host.slot_bytes.next_multiple_of(64) };
        return open_fabric(rail, local_rank, window(rank)?, config, limits, connected.machines.address);
    }
    let windows = rail.ranks().iter().map(|&peer| window(peer)).collect::<Result<Vec<_>>>()?;
    Ok(Box::new(Loopback::new(rail, windows, signals)))
}

/// Opens an engine of libfabric. `address` is the network address of this machine that ranks of other machines use, if there
/// are any.
#[cfg(feature = "fabric")]
pub(crate) fn open_fabric(
    rail: Rail,
    local_rank: usize,
    window: Arc<Segment>,
    config: &Config,
    limits: Limits,
    address: Option<IpAddr>,
) -> Result<Box<dyn Unconnected>> {
    let domain = config.host.transport.nic(local_rank).map(str::to_string);
    let ep::TransportOptions { engine, address: setting, traffic_class, libfabric, .. } =
        config.host.transport.clone();
    let setting = setting.map(|setting| ip_address(&setting)).transpose()?;
    // A NIC that is named has an address. Other providers choose an interface if there is no setting.
    let address = setting
        .or(address.filter(|_| engine == "tcp" && domain.is_none()).map(|address| address.to_string()));
    let options = ep_fabric::Options { provider: engine, address, domain, traffic_class, library: libfabric };
    // SAFETY: a segment is mapped, with an unchanging length, until it is dropped. Other ranks may write to it at any
    // time: only pointers and atomics access it.
    unsafe { ep_fabric::open(&options, rail, window as Arc<dyn ep::Window>, limits) }
}

/// The IP address that the setting `HYBRID_EP_TRANSPORT_ADDRESS` selects, as text.
#[cfg(all(feature = "fabric", target_os = "linux"))]
fn ip_address(setting: &str) -> Result<String> {
    Ok(ep::join::address_of(setting)?.to_string())
}

#[cfg(all(feature = "fabric", not(target_os = "linux")))]
fn ip_address(setting: &str) -> Result<String> {
    Ok(setting.to_string())
}

#[cfg(not(feature = "fabric"))]
pub(crate) fn open_fabric(
    _: Rail,
    _: usize,
    _: Arc<Segment>,
    config: &Config,
    _: Limits,
    _: Option<IpAddr>,
) -> Result<Box<dyn Unconnected>> {
    let (key, value) = ("host.transport", config.host.transport.engine.clone());
    let problem = "this build has only `loopback`; enable the feature `fabric` of ep-host".into();
    Err(ep::CallerError::Config { key, value, problem }.into())
}
