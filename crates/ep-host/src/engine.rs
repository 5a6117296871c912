//! The engine of a rank's rail: which one, from the configuration, and how it is opened. `buffer` connects it.

use std::sync::Arc;

use ep::{Config, Rail, Rank, Result, Unconnected, World};

use crate::control::check_segment;
use crate::join::RankSegments;
use crate::loopback::Loopback;
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

/// Opens the engine of `rank`. `segments` are those of all ranks, by rank.
pub(crate) fn open(
    world: &World,
    rank: Rank,
    config: &Config,
    segments: &[RankSegments],
) -> Result<Box<dyn Unconnected>> {
    let rail = rail_of(world, rank)?;
    let bytes = WindowLayout::new(world, config)?.bytes();
    let windows = rail
        .ranks()
        .iter()
        .map(|&peer| {
            let window = &segments[peer.index()].window;
            check_segment(peer, "window", window, bytes)?;
            Ok(Arc::clone(window))
        })
        .collect::<Result<Vec<_>>>()?;
    let signals = WindowLayout::signals(config.host.slots);
    if needs_blobs(world, config) {
        return open_fabric(rail, &windows, config, signals);
    }
    Ok(Box::new(Loopback::new(rail, windows, signals)))
}

#[cfg(feature = "fabric")]
fn open_fabric(
    rail: Rail,
    windows: &[Arc<crate::segment::Segment>],
    config: &Config,
    signals: usize,
) -> Result<Box<dyn Unconnected>> {
    let ep::TransportOptions { engine, address, libfabric, .. } = config.host.transport.clone();
    let options = ep_fabric::Options { provider: engine, address, library: libfabric };
    let window = Arc::clone(&windows[rail.own_index()]) as Arc<dyn ep::Window>;
    let limits = ep::Limits { signals, put_bytes: config.host.slot_bytes.next_multiple_of(64) };
    // SAFETY: a segment is mapped, with an unchanging length, until it is dropped. Other ranks may write to it at any
    // time: only pointers and atomics access it.
    unsafe { ep_fabric::open(&options, rail, window, limits) }
}

#[cfg(not(feature = "fabric"))]
fn open_fabric(
    _: Rail,
    _: &[Arc<crate::segment::Segment>],
    config: &Config,
    _: usize,
) -> Result<Box<dyn Unconnected>> {
    let (key, value) = ("host.transport", config.host.transport.engine.clone());
    let problem = "this build has only `loopback`; enable the feature `fabric` of ep-host".into();
    Err(ep::CallerError::Config { key, value, problem }.into())
}
