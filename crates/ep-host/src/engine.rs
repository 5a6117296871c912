//! Opens the engine of a rank's rail that the configuration selects. `buffer` connects it.

use std::sync::Arc;

use ep::{Config, Rank, Result, Unconnected, World};
use ep_rail::{RankPlace, WindowLayout, open_streams, rail_of};

use crate::control::check_segment;
use crate::join::Connected;

/// Opens the engine of `rank`.
pub(crate) fn open(
    world: &World,
    rank: Rank,
    config: &Config,
    connected: &Connected,
) -> Result<Box<dyn Unconnected>> {
    let topology = world.topology();
    let bytes = WindowLayout::new(topology.domains(), &config.host)?.bytes();
    let window = |peer: Rank| {
        let window = connected.segments[peer.index()].window.as_ref();
        let window = window.expect("the window of a rank of this machine; `join` has checked the engine");
        check_segment(peer, "window", window, bytes)?;
        Ok(Arc::clone(window))
    };
    let address = connected.machines.address();
    let place = RankPlace { local_rank: topology.local_rank_of(rank), gpu: None, address };
    // SAFETY: the buffer of this rank makes one `Streams` of the engine.
    unsafe { open_streams(rail_of(world, rank)?, &place, &config.host, window) }
}

#[cfg(test)]
mod tests {
    use ep::Backend as _;

    use crate::HostBuffer;

    use super::*;

    #[test]
    fn ranks_of_one_domain_open_no_provider() {
        let world = World::builder().ranks(2).experts(2).build().unwrap();
        let mut config = Config::default();
        config.host.transport.engine = "no-such-provider".into();
        for slots in [1, 1024] {
            config.host.slots = slots;
            let buffers = HostBuffer::threads(&world, &config).unwrap();
            assert!(buffers.iter().all(|buffer| buffer.transport() == "loopback"));
        }
    }
}
