//! The engine of a rank's rail: which one, from the configuration, and how it is opened. `buffer` connects it.

use std::sync::Arc;

use ep::{Config, Limits, Rank, Result, Unconnected, World};
use ep_rail::{Loopback, open_fabric, rail_of};

use crate::control::check_segment;
use crate::join::Connected;
use crate::rail::WindowLayout;

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
        let (options, address) = (&config.host.transport, connected.machines.address);
        return open_fabric(rail, local_rank, window(rank)?, options, limits, address);
    }
    let windows = rail.ranks().iter().map(|&peer| window(peer)).collect::<Result<Vec<_>>>()?;
    Ok(Box::new(Loopback::new(rail, windows, signals)))
}
