//! Plain TCP streams between the ranks of a rail: how long the network alone takes for the bytes that an operator sends
//! between domains. This is the floor of the leg between domains, measured in the same run.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ep::Rank;
use ep::join::Rendezvous;

use crate::bench::measure::{AllSamples, Operator};
use crate::bench::plan::BenchPlan;
use crate::common::backend::BackendKind;
use crate::common::failure::Failure;
use crate::common::streams::{Stream, connect, failed, receive, send};

/// Timed repetitions for each operator, after one that is not timed.
const REPEATS: usize = 5;
/// A socket holds so many bytes that the other end has not read.
const BUFFERED: u64 = 128 << 10;

/// The times of this rank, by operator.
pub(super) type StreamTimes = BTreeMap<Operator, Vec<Duration>>;

/// Times plain TCP streams for the bytes between domains of dispatch and combine. Collective. `None` if no bytes cross a
/// network: with one domain, on GPUs, and over other engines than `tcp`.
pub(super) fn measure(
    meet: &mut dyn Rendezvous,
    plan: &BenchPlan,
    samples: &AllSamples,
) -> Result<Option<StreamTimes>, Failure> {
    let topology = plan.world.topology();
    if plan.backend != BackendKind::Host
        || topology.domains() == 1
        || plan.config.host.transport.engine != "tcp"
    {
        return Ok(None);
    }
    let rank = meet.rank();
    let peers: Vec<Rank> =
        topology.rail_ranks(topology.local_rank_of(rank)).filter(|&peer| peer != rank).collect();
    let mut streams = connect(meet, &plan.config, &peers)?;
    let mut times = StreamTimes::new();
    for operator in [Operator::Dispatch, Operator::Combine] {
        let bytes = samples.get(&operator).map_or(0, |samples| samples.per_call(samples.between_domains));
        // The operator's bytes, spread evenly over the peers. The drawn routings send about as much to each.
        let out = bytes / peers.len() as u64;
        let all = meet.all_gather(&out.to_le_bytes())?;
        let number = |blob: &[u8]| blob.try_into().map_or(0, u64::from_le_bytes);
        let parts: Vec<(u64, u64)> = peers.iter().map(|peer| (out, number(&all[peer.index()]))).collect();
        let of_operator = times.entry(operator).or_default();
        for repeat in 0..=REPEATS {
            meet.all_gather(&[])?;
            let start = Instant::now();
            exchange(&mut streams, &parts)?;
            if repeat > 0 {
                of_operator.push(start.elapsed());
            }
        }
    }
    Ok(Some(times))
}

/// Sends and receives these numbers of bytes on each stream, all at the same time.
fn exchange(streams: &mut [Stream], parts: &[(u64, u64)]) -> Result<(), Failure> {
    if let ([Stream { peer, socket }], &[(out, inward)]) = (&*streams, parts)
        && out <= BUFFERED
    {
        // Starting a thread would take longer than such a message.
        return send(socket, out)
            .and_then(|()| receive(socket, inward))
            .map_err(|error| failed(*peer, &error));
    }
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (Stream { peer, socket }, &(out, inward)) in streams.iter().zip(parts) {
            threads.push((*peer, scope.spawn(move || send(socket, out))));
            threads.push((*peer, scope.spawn(move || receive(socket, inward))));
        }
        threads.into_iter().try_for_each(|(peer, thread)| {
            let done = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            done.map_err(|error| failed(peer, &error))
        })
    })
}

#[cfg(test)]
mod tests {
    use ep::join::ThreadRendezvous;

    use super::*;
    use crate::bench::measure::Samples;
    use crate::bench::plan::tests::plan;

    #[test]
    fn every_rank_times_the_bytes_of_both_operators() {
        let plan = plan("--ranks 4 --domains 2 --transport tcp");
        let samples = |rank: u64| {
            let samples = Samples { calls: 2, between_domains: 2 * (3_000_000 + rank), ..Samples::default() };
            AllSamples::from([(Operator::Dispatch, samples.clone()), (Operator::Combine, samples)])
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = ThreadRendezvous::new(4, Duration::from_secs(60))
                .into_iter()
                .zip(0..)
                .map(|(mut meet, rank)| {
                    let (plan, samples) = (&plan, samples(rank));
                    scope.spawn(move || measure(&mut meet, plan, &samples).unwrap().unwrap())
                })
                .collect();
            for rank in ranks {
                let times = rank.join().unwrap();
                assert_eq!(times.keys().collect::<Vec<_>>(), [&Operator::Dispatch, &Operator::Combine]);
                assert!(times.values().all(|times| times.len() == REPEATS));
            }
        });
    }

    #[test]
    fn nothing_is_measured_where_no_bytes_cross_a_network() {
        for options in ["--ranks 1", "--ranks 1 --transport tcp"] {
            let mut meet = ThreadRendezvous::new(1, Duration::from_secs(1)).remove(0);
            assert!(measure(&mut meet, &plan(options), &AllSamples::new()).unwrap().is_none());
        }
    }
}
