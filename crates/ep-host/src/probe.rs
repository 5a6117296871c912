//! [`RailProbe`]: latency and bandwidth of an engine between two ranks, without operators.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ep::join::Rendezvous;
use ep::{
    CallerError, Config, Limits, PeerError, PeerFault, Posted, Put, Rail, Rank, Result, Signal, Size,
    Transport,
};
use ep_rail::{RankPlace, Segment, open_fabric};

/// The signal of a message is this number plus its slot. The signal of a credit, which only `stream` sends, is
/// [`CREDIT`] plus the slot.
const MESSAGE: u32 = 0;
const CREDIT: u32 = 1 << 16;

/// One end of a rail of all ranks of a rendezvous, for measurements. The engine is that of
/// [`Config::host`](ep::HostConfig::transport).
///
/// One pair of ranks measures at a time. All ranks meet in a barrier before each measurement: otherwise a message of
/// the next measurement could arrive during this one.
pub struct RailProbe {
    rail: Rail,
    window: Arc<Segment>,
    transport: Box<dyn Transport>,
    /// The longest time without a signal of the peer.
    patience: Duration,
}

impl std::fmt::Debug for RailProbe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let engine = self.transport.name();
        f.debug_struct("RailProbe").field("rail", &self.rail).field("engine", &engine).finish_non_exhaustive()
    }
}

impl RailProbe {
    /// The longest message, bytes.
    pub const MAX_BYTES: usize = 4 << 20;
    /// Messages in flight in one direction.
    pub const IN_FLIGHT: usize = 16;

    /// Opens the engine and connects all ranks of the rendezvous. Collective.
    ///
    /// # Errors
    /// [`CallerError`] for engines that need mapped windows, such as `loopback`; the errors of the engine and of the
    /// rendezvous.
    pub fn join(rendezvous: &mut dyn Rendezvous, config: &Config) -> Result<Self> {
        config.check()?;
        let transport = &config.host.transport;
        if transport.maps_windows() {
            let problem = "copies inside one machine; measure a provider of libfabric, such as tcp".into();
            let (key, value) = ("HYBRID_EP_TRANSPORT", transport.engine.clone());
            return Err(CallerError::Config { key, value, problem }.into());
        }
        let ranks = (0..rendezvous.ranks() as u32).map(Rank).collect();
        let rail = Rail::new(ranks, rendezvous.rank().index())?;
        // A slot for each message in flight, to send from and to receive into.
        let bytes = Size::new(2 * Self::IN_FLIGHT) * Self::MAX_BYTES;
        let window = Arc::new(Segment::private(bytes.bytes("the window of a probe")?)?);
        let limits = Limits {
            signals: 2 * Self::IN_FLIGHT,
            put_bytes: Self::MAX_BYTES,
            advice: "choose another provider",
        };
        let place = RankPlace { address: rendezvous.network_address(), ..RankPlace::default() };
        let opened = open_fabric(rail.clone(), &place, Arc::clone(&window), transport, limits)?;
        let blobs = rendezvous.all_gather(&opened.blob())?;
        let transport = opened.connect(&blobs)?;
        rendezvous.all_gather(&[])?;
        Ok(Self { rail, window, transport, patience: config.stall_bound() })
    }

    /// The engine's name.
    pub fn transport(&self) -> &str {
        self.transport.name()
    }

    /// Sends a message to `peer` and waits for its message, `turns` times. The rank that `starts` sends first; the other
    /// one calls this too. Returns the time of all turns.
    ///
    /// # Errors
    /// [`PeerError`] when the peer is gone or sends nothing within the stall bound; [`CallerError`] for more than
    /// [`MAX_BYTES`](Self::MAX_BYTES); the errors of the engine.
    pub fn ping_pong(&self, peer: Rank, bytes: usize, turns: usize, starts: bool) -> Result<Duration> {
        self.check(bytes)?;
        let start = Instant::now();
        for turn in 0..turns {
            if starts || turn > 0 {
                self.post(peer, bytes, MESSAGE)?;
            }
            self.wait_for(peer, || self.take(peer, |_| true))?;
        }
        if !starts && turns > 0 {
            self.post(peer, bytes, MESSAGE)?;
        }
        Ok(start.elapsed())
    }

    /// Sends `out` messages to `peer` and receives `inward` messages, with at most [`IN_FLIGHT`](Self::IN_FLIGHT) in
    /// flight in each direction. The peer calls this with the two numbers swapped. Returns the time until the peer has
    /// acknowledged the last message of this rank and the peer's last message has arrived.
    ///
    /// # Errors
    /// Those of [`ping_pong`](Self::ping_pong).
    pub fn stream(&self, peer: Rank, bytes: usize, out: usize, inward: usize) -> Result<Duration> {
        self.check(bytes)?;
        let start = Instant::now();
        let free = Cell::new((1_u32 << Self::IN_FLIGHT) - 1);
        let owed = Cell::new(0_u32);
        let (sent, acknowledged, received) = (Cell::new(0), Cell::new(0), Cell::new(0));
        let handle = |word: u32| {
            let slot = 1 << ((word & 0xFFFF) % Self::IN_FLIGHT as u32);
            if word & CREDIT == CREDIT {
                free.set(free.get() | slot);
                acknowledged.set(acknowledged.get() + 1);
            } else {
                owed.set(owed.get() | slot);
                received.set(received.get() + 1);
            }
            true
        };
        // Each attempt also sends: a put that was refused may be all that the peer waits for.
        let attempt = || {
            let mut progressed = false;
            while owed.get() != 0 {
                let slot = owed.get().trailing_zeros();
                if self.transport.put(Put::new(peer, signal(CREDIT | slot)))? == Posted::Full {
                    break;
                }
                owed.set(owed.get() & !(1 << slot));
                progressed = true;
            }
            while sent.get() < out && free.get() != 0 {
                let slot = free.get().trailing_zeros();
                if self.transport.put(self.message(peer, bytes, slot))? == Posted::Full {
                    break;
                }
                free.set(free.get() & !(1 << slot));
                sent.set(sent.get() + 1);
                progressed = true;
            }
            Ok(self.take(peer, handle)? || progressed)
        };
        while acknowledged.get() < out || received.get() < inward || owed.get() != 0 {
            self.wait_for(peer, attempt)?;
        }
        Ok(start.elapsed())
    }

    fn check(&self, bytes: usize) -> Result<()> {
        if bytes <= Self::MAX_BYTES {
            return Ok(());
        }
        let (what, unit) = ("message of a probe", "bytes at most");
        Err(CallerError::Shape { what, expected: Self::MAX_BYTES, found: bytes, unit }.into())
    }

    fn message(&self, peer: Rank, bytes: usize, slot: u32) -> Put {
        let put = Put::new(peer, signal(MESSAGE | slot));
        if bytes == 0 {
            return put;
        }
        let source = slot as usize * Self::MAX_BYTES;
        // The second half of the peer's window, which is as long as this one, holds what arrives.
        put.bytes(source..source + bytes, self.window.len() / 2 + source)
    }

    fn post(&self, peer: Rank, bytes: usize, slot: u32) -> Result<()> {
        self.wait_for(peer, || Ok(self.transport.put(self.message(peer, bytes, slot))? == Posted::Yes))
    }

    /// Passes the signals of `peer` that have arrived to `handle`. Returns whether it returned true for one.
    fn take(&self, peer: Rank, handle: impl Fn(u32) -> bool) -> Result<bool> {
        let mut found = false;
        self.transport.poll(&mut |from, signal| {
            if from == peer {
                found |= handle(signal.word());
            }
        })?;
        Ok(found)
    }

    /// Calls `attempt` until it returns true.
    fn wait_for(&self, peer: Rank, attempt: impl Fn() -> Result<bool>) -> Result<()> {
        let start = Instant::now();
        let mut turns = 0_u32;
        while !attempt()? {
            turns = turns.wrapping_add(1);
            match turns {
                ..1000 => std::hint::spin_loop(),
                _ if !turns.is_multiple_of(64) => std::thread::yield_now(),
                _ if start.elapsed() < self.patience => {}
                _ => {
                    let (own, what) = (self.rail.own(), "a message of the measurement");
                    let fault = PeerFault::Stalled;
                    return Err(PeerError::joining(own, peer, fault, what, start.elapsed()).into());
                }
            }
        }
        Ok(())
    }

    /// The bytes of the window, so that a test can look at them.
    #[cfg(test)]
    fn bytes(&self, offset: usize, len: usize) -> *mut u8 {
        self.window.at(offset, len)
    }
}

fn signal(word: u32) -> Signal {
    Signal::new(word).expect("a slot and a kind have 17 bits")
}

#[cfg(test)]
mod tests {
    use ep::join::ThreadRendezvous;

    use super::*;

    /// Two probes over libfabric's `tcp`; `None` where the library is not installed.
    fn probes() -> Option<Vec<RailProbe>> {
        let mut config = Config::default();
        config.host.transport.engine = "tcp".into();
        config.host.transport.libfabric = ep_fabric::testing::installed()?;
        let meetings = ThreadRendezvous::new(2, Duration::from_secs(60));
        std::thread::scope(|scope| {
            let config = &config;
            let join = |mut meeting| scope.spawn(move || RailProbe::join(&mut meeting, config).unwrap());
            let threads: Vec<_> = meetings.into_iter().map(join).collect();
            Some(threads.into_iter().map(|thread| thread.join().unwrap()).collect())
        })
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn messages_of_all_sizes_arrive_in_both_directions() {
        let Some(probes) = probes() else { return };
        let barrier = &std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            for (probe, rank) in probes.into_iter().zip(0..) {
                scope.spawn(move || {
                    let peer = Rank(1 - rank);
                    // SAFETY: inside the send slots, which only this thread uses now.
                    unsafe {
                        probe.bytes(0, RailProbe::MAX_BYTES).write_bytes(7 + rank as u8, RailProbe::MAX_BYTES)
                    };
                    for bytes in [0, 1, 4096, RailProbe::MAX_BYTES] {
                        assert!(probe.ping_pong(peer, bytes, 5, rank == 0).unwrap() > Duration::ZERO);
                        barrier.wait();
                        let (out, inward) = if rank == 0 { (40, 0) } else { (0, 40) };
                        probe.stream(peer, bytes, out, inward).unwrap();
                        barrier.wait();
                        probe.stream(peer, bytes, 33, 33).unwrap();
                        barrier.wait();
                    }
                    let last = RailProbe::IN_FLIGHT * RailProbe::MAX_BYTES;
                    // SAFETY: the peer's last message into this slot has arrived.
                    let arrived = unsafe {
                        probe.bytes(last, RailProbe::MAX_BYTES).add(RailProbe::MAX_BYTES - 1).read()
                    };
                    assert_eq!(arrived, 7 + (1 - rank) as u8);
                    assert!(probe.ping_pong(peer, RailProbe::MAX_BYTES + 1, 1, true).is_err());
                });
            }
        });
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_peer_that_sends_nothing_is_named() {
        let Some(mut probes) = probes() else { return };
        probes[0].patience = Duration::from_millis(50);
        let error = probes[0].ping_pong(Rank(1), 8, 1, true).unwrap_err().to_string();
        assert!(error.starts_with("rank 1 stalled"), "{error}");
    }
}
