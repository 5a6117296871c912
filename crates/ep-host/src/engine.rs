//! Opens the engine of a rank's rail that the configuration selects. `buffer` connects it.

use std::sync::Arc;

use ep::{CallerError, Config, Copier, Limits, Rank, Result, Unconnected, World};
use ep_rail::{Loopback, Paced, RankPlace, open_fabric, rail_of};

use crate::control::check_segment;
use crate::join::Connected;
use crate::rail::{WindowLayout, needs_blobs};

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
        let put_bytes = config.host.slot_bytes.next_multiple_of(64);
        let limits = Limits { signals, put_bytes, advice: "lower HYBRID_EP_SLOTS or HYBRID_EP_SLOT_BYTES" };
        let place = RankPlace { local_rank, gpu: None, address: connected.machines.address() };
        return open_fabric(rail, &place, window(rank)?, &config.host.transport, limits);
    }
    let windows = rail.ranks().iter().map(|&peer| window(peer)).collect::<Result<Vec<_>>>()?;
    // SAFETY: puts copy slots only. The sender fills a send slot after the credit of the slot's last message. The receiver
    // reads a receive slot after the message's signal and before it posts the credit, and no other rank writes to that slot.
    // The rings lie in front of all slots.
    let loopback = unsafe { Loopback::new(rail, windows, signals)? };
    let Some(pace) = config.host.transport.pace()? else { return Ok(Box::new(loopback)) };
    if pace.copier() == Copier::Kernel {
        let (key, value) = ("HYBRID_EP_TRANSPORT", config.host.transport.engine.clone());
        let problem = "only GPUs have a `kernel` that copies; leave this part out on the CPU backend".into();
        return Err(CallerError::Config { key, value, problem }.into());
    }
    match world.topology().domains() {
        1 => Ok(Box::new(loopback)),
        _ => Ok(Box::new(Paced::new(loopback, pace, signals)?)),
    }
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

    #[test]
    fn a_link_by_a_kernel_is_refused() {
        for domains in [1, 2] {
            let world = World::builder().ranks(2).domains(domains).experts(2).build().unwrap();
            let mut config = Config::default();
            config.host.transport.engine = "paced:25GB/s,5us,kernel".into();
            let error = HostBuffer::threads(&world, &config).unwrap_err();
            assert!(matches!(error, ep::Error::Caller(CallerError::Config { .. })), "{error}");
        }
    }
}
