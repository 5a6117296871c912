//! Determines how long the network alone takes for the bytes that an operator sends between domains, which is the floor
//! of that leg. Over TCP, plain streams measure this time in the same run; over an emulated link, it is computed.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ep::join::Rendezvous;
use ep::{EnvironmentError, Rank};

use crate::bench::measure::{AllSamples, Operator};
use crate::bench::plan::BenchPlan;
use crate::common::backend::BackendKind;
use crate::common::failure::Failure;
use crate::common::streams::{Stream, connect, failed, receive, send, shut_down};
use crate::common::threads;

/// The operators whose bytes are timed.
const MOVING: [Operator; 2] = [Operator::Dispatch, Operator::Combine];
/// Timed repetitions for each operator, after one that is not timed.
const REPEATS: usize = 5;
/// A socket can hold this many bytes that the other end has not read.
const BUFFERED: u64 = 128 << 10;
/// Names of the threads of a stream, for errors.
const SENDER: &str = "a thread that sends on a plain TCP stream";
const RECEIVER: &str = "a thread that receives from a plain TCP stream";

/// The times of this rank, by operator.
pub(super) type StreamTimes = BTreeMap<Operator, Vec<Duration>>;

/// The times that the bytes of dispatch and combine between domains take alone. Collective. `None` with one domain, over
/// engines other than `tcp` and emulated links, and over `tcp` on GPUs.
pub(super) fn measure(
    meet: &mut dyn Rendezvous,
    plan: &BenchPlan,
    samples: &AllSamples,
) -> Result<Option<StreamTimes>, Failure> {
    let topology = plan.world.topology();
    let between = |operator: Operator| {
        samples.get(&operator).map_or(0, |samples| samples.per_call(samples.between_domains))
    };
    if topology.domains() > 1
        && let Some(pace) = plan.config.host.transport.pace()?
    {
        let time = |operator| (operator, vec![pace.delivery(between(operator))]);
        return Ok(Some(MOVING.map(time).into()));
    }
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
    for operator in MOVING {
        let bytes = between(operator);
        // The operator's bytes, spread evenly over the peers. Drawn routings send about the same number to each peer.
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
        let mut running = Vec::new();
        let started = streams.iter().zip(parts).try_for_each(|(Stream { peer, socket }, &(out, inward))| {
            let sender = threads::spawn_scoped(scope, SENDER, move || send(socket, out))?;
            running.push((*peer, sender));
            let receiver = threads::spawn_scoped(scope, RECEIVER, move || receive(socket, inward))?;
            running.push((*peer, receiver));
            Ok::<_, EnvironmentError>(())
        });
        started.inspect_err(|_| shut_down(&*streams))?;
        running.into_iter().try_for_each(|(peer, thread)| {
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
    fn a_refused_thread_ends_the_other_transfers() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = || std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut streams = [1, 2].map(|peer| Stream { peer: Rank(peer), socket: connect() });
        // The peers never send, so the receivers that run would wait for ever.
        for allowed in 0..4 {
            let parts = [(1, 1); 2].map(|(out, inward)| (out + 2 * BUFFERED, inward));
            let error = threads::quota::of(allowed, || exchange(&mut streams, &parts)).unwrap_err();
            let refused = [SENDER, RECEIVER][allowed % 2];
            assert!(error.to_string().starts_with(&format!("starting {refused}: ")), "{error}");
        }
    }

    #[test]
    fn an_emulated_link_takes_in_the_bytes_of_each_operator() {
        let plan = plan("--ranks 2 --domains 2 --transport paced:1GB/s,7us");
        let samples = |bytes: u64| Samples { calls: 2, between_domains: 2 * bytes, ..Samples::default() };
        let samples = AllSamples::from([
            (Operator::Dispatch, samples(3_000_000)),
            (Operator::Combine, samples(5_000)),
            (Operator::Preprocess, samples(100)),
        ]);
        let mut meet = ThreadRendezvous::new(1, Duration::from_secs(1)).remove(0);
        let times = measure(&mut meet, &plan, &samples).unwrap().unwrap();
        let micros = |time| vec![Duration::from_micros(time)];
        let expected = [(Operator::Dispatch, micros(3007)), (Operator::Combine, micros(12))];
        assert_eq!(times, expected.into());
    }

    #[test]
    fn nothing_is_measured_where_no_bytes_cross_a_network() {
        for options in ["--ranks 1", "--ranks 1 --transport tcp"] {
            let mut meet = ThreadRendezvous::new(1, Duration::from_secs(1)).remove(0);
            assert!(measure(&mut meet, &plan(options), &AllSamples::new()).unwrap().is_none());
        }
    }
}
