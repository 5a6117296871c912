//! The measurements between rank 0 and each other rank. All ranks run this; those that do not measure wait in barriers.

use std::time::Duration;

use ep::Rank;
use ep::join::Rendezvous;
use ep_host::RailProbe;
use serde::Serialize;

use crate::common::failure::Failure;

/// Number of messages of the trial run, whose time determines the number of messages of a measurement.
const TRIAL: usize = 8;
/// Range of the number of messages of a measurement.
const MESSAGES: std::ops::RangeInclusive<f64> = 8.0..=100_000.0;

/// The figures between rank 0 and one other rank.
#[derive(Debug, Serialize)]
pub(super) struct Pair {
    pub(super) rank: u32,
    pub(super) sizes: Vec<Figures>,
}

/// The figures of one size of message.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    pub(super) message_bytes: usize,
    /// Half of the time of a message and its answer.
    pub(super) latency_us: f64,
    /// From rank 0 to the other rank.
    pub(super) one_way_gb_per_s: Option<f64>,
    /// In each direction, while both send.
    pub(super) both_ways_gb_per_s: Option<f64>,
    /// Time of a message in the stream from rank 0, which contains the work of both ranks for it.
    pub(super) per_message_us: f64,
}

impl Figures {
    /// `seconds`: the time of a message in each [`Way`], for [`Way::PingPong`] with its answer.
    fn of(bytes: usize, seconds: [f64; 3]) -> Self {
        let [turn, one_way, both_ways] = seconds;
        let rate = |seconds: f64| (bytes > 0).then(|| bytes as f64 / seconds / 1e9);
        Self {
            message_bytes: bytes,
            latency_us: turn / 2.0 * 1e6,
            one_way_gb_per_s: rate(one_way),
            both_ways_gb_per_s: rate(both_ways),
            per_message_us: one_way * 1e6,
        }
    }
}

/// The ways in which a pair exchanges messages.
#[derive(Clone, Copy)]
enum Way {
    PingPong,
    FromZero,
    Both,
}

/// Measures all pairs and sizes. The figures are those of rank 0; other ranks get none. Collective.
pub(super) fn all(
    probe: &RailProbe,
    meet: &mut dyn Rendezvous,
    sizes: &[usize],
    duration_ms: u32,
) -> Result<Vec<Pair>, Failure> {
    let mut pairs = Vec::new();
    for other in (1..meet.ranks() as u32).map(Rank) {
        let mut figures = Vec::new();
        for &bytes in sizes {
            let mut time = |way| per_message(probe, meet, other, bytes, duration_ms, way);
            let seconds = [time(Way::PingPong)?, time(Way::FromZero)?, time(Way::Both)?];
            figures.push(Figures::of(bytes, seconds));
        }
        pairs.push(Pair { rank: other.0, sizes: figures });
    }
    if meet.rank() != Rank(0) {
        pairs.clear();
    }
    Ok(pairs)
}

/// Measures the seconds per message of this size between rank 0 and `other`. The number of messages is chosen to fill the
/// duration.
fn per_message(
    probe: &RailProbe,
    meet: &mut dyn Rendezvous,
    other: Rank,
    bytes: usize,
    duration_ms: u32,
    way: Way,
) -> Result<f64, Failure> {
    let rank = meet.rank();
    let run = |meet: &mut dyn Rendezvous, messages: usize| -> Result<Duration, Failure> {
        meet.all_gather(&[])?;
        let peer = match rank {
            Rank(0) => other,
            _ if rank == other => Rank(0),
            _ => return Ok(Duration::ZERO),
        };
        Ok(match way {
            Way::PingPong => probe.ping_pong(peer, bytes, messages, rank == Rank(0))?,
            Way::FromZero if rank == Rank(0) => probe.stream(peer, bytes, messages, 0)?,
            Way::FromZero => probe.stream(peer, bytes, 0, messages)?,
            Way::Both => probe.stream(peer, bytes, messages, messages)?,
        })
    };
    let trial = run(meet, TRIAL)?.as_secs_f64() / TRIAL as f64;
    // The trial of rank 0 determines the number of messages, so that both ranks use the same number.
    let all = meet.all_gather(&trial.to_le_bytes())?;
    let trial = all.first().and_then(|blob| blob.as_slice().try_into().ok()).map_or(0.0, f64::from_le_bytes);
    let messages = f64::from(duration_ms) / 1e3 / trial.max(1e-9);
    let messages = messages.clamp(*MESSAGES.start(), *MESSAGES.end()) as usize;
    Ok(run(meet, messages)?.as_secs_f64() / messages as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_their_units() {
        let figures = Figures::of(1_000_000, [0.004, 0.0005, 0.001]);
        let rates = [figures.one_way_gb_per_s, figures.both_ways_gb_per_s];
        assert_eq!(
            (figures.latency_us, figures.per_message_us, rates),
            (2000.0, 500.0, [Some(2.0), Some(1.0)])
        );
        assert_eq!(Figures::of(0, [1.0; 3]).one_way_gb_per_s, None);
    }
}
