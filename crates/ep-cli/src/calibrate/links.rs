//! The network between every two ranks: plain TCP streams, one direction at a time.
//!
//! A record on a stream is a header of 8 bytes, followed by the number of bytes that the header states. The header 0 ends
//! a measurement. The receiver acknowledges this header, and every record without the flag [`SILENT`], with one byte, so
//! only the sender needs a clock.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use ep::join::Rendezvous;
use ep::{Config, Rank};
use serde::{Deserialize, Serialize};

use crate::common::failure::Failure;
use crate::common::streams::{Stream, connect, failed, receive, send, shut_down};
use crate::common::threads;

/// Bytes of a record of a continuous stream.
const PART: u64 = 64 << 10;
/// In a header: the record is not acknowledged.
const SILENT: u64 = 1 << 63;
/// Minimum and maximum number of timed round trips.
const ROUND_TRIPS: std::ops::RangeInclusive<usize> = 5..=200;
/// Time after which no round trips beyond the minimum are started.
const ROUND_TRIP_TIME: Duration = Duration::from_millis(500);

/// What is measured for every pair of ranks.
#[derive(Debug)]
pub(super) struct Request<'a> {
    /// Numbers of connections, ascending.
    pub(super) flows: &'a [usize],
    /// Sizes of messages, bytes.
    pub(super) sizes: &'a [u64],
    /// Time of each measurement.
    pub(super) duration: Duration,
}

/// The figures from one rank to another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Direction {
    pub(super) from: u32,
    pub(super) to: u32,
    /// Median time of a byte and its echo.
    pub(super) round_trip_us: f64,
    pub(super) flows: Vec<Flows>,
}

/// The figures with one number of connections.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Flows {
    pub(super) flows: usize,
    /// Payload of continuous streams, divided by the time until the receiver has all of it.
    pub(super) stream_gbit_per_s: f64,
    pub(super) messages: Vec<Messages>,
}

/// The figures for messages of one size, each sent when the one before has been acknowledged.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Messages {
    pub(super) message_bytes: u64,
    /// Payload divided by time, which includes the waits for acknowledgements.
    pub(super) gbit_per_s: f64,
}

impl Direction {
    /// The median round trip; `None` if no clock can have measured it.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        Duration::try_from_secs_f64(self.round_trip_us / 1e6).ok()
    }

    /// The highest rate of continuous streams, and the smallest number of connections that comes within 2 % of it.
    pub(super) fn best(&self) -> (f64, usize) {
        let most = self.flows.iter().map(|flows| flows.stream_gbit_per_s).fold(0.0, f64::max);
        let enough = self.flows.iter().find(|flows| flows.stream_gbit_per_s >= 0.98 * most);
        (most, enough.map_or(1, |flows| flows.flows))
    }
}

/// Measures every pair of ranks in both directions, one after the other. All ranks get all figures. Collective.
pub(super) fn all(
    meet: &mut dyn Rendezvous,
    config: &Config,
    request: &Request<'_>,
) -> Result<Vec<Direction>, Failure> {
    let (rank, ranks) = (meet.rank(), meet.ranks() as u32);
    let most = request.flows.iter().copied().max().unwrap_or(1);
    let peers: Vec<Rank> = (0..ranks).map(Rank).filter(|&peer| peer != rank).collect();
    let wanted: Vec<Rank> = peers.iter().flat_map(|&peer| vec![peer; most]).collect();
    let streams = connect(meet, config, &wanted)?;
    let mut mine = Vec::new();
    for from in 0..ranks {
        for to in (0..ranks).filter(|&to| to != from) {
            meet.all_gather(&[])?;
            let other = match rank.0 {
                own if own == from => Rank(to),
                own if own == to => Rank(from),
                _ => continue,
            };
            let with: Vec<&Stream> = streams.iter().filter(|stream| stream.peer == other).collect();
            let done = match rank.0 == from {
                true => sent(&with, request).map(|(round_trip_us, flows)| {
                    mine.push(Direction { from, to, round_trip_us, flows });
                }),
                false => received(&with, request),
            };
            done.map_err(|error| failed(other, &error))?;
        }
    }
    let blob = serde_json::to_vec(&mine).map_err(Failure::request)?;
    let mut all = Vec::new();
    for (rank, blob) in meet.all_gather(&blob)?.iter().enumerate() {
        all.extend(figures_of(rank, blob)?);
    }
    Ok(all)
}

/// The figures that a rank has sent.
fn figures_of(rank: usize, blob: &[u8]) -> Result<Vec<Direction>, Failure> {
    let refused = |why: String| {
        Failure::request(format!(
            "the figures of rank {rank} cannot be used ({why}); every rank must run the same version of this program"
        ))
    };
    let figures: Vec<Direction> = serde_json::from_slice(blob).map_err(|error| refused(error.to_string()))?;
    match figures.iter().find(|direction| direction.round_trip().is_none()) {
        Some(Direction { to, round_trip_us, .. }) => {
            Err(refused(format!("a round trip of {round_trip_us:e} us to rank {to}")))
        }
        None => Ok(figures),
    }
}

/// The sender's part of the measurements, in the same order as in [`received`].
fn sent(streams: &[&Stream], request: &Request<'_>) -> std::io::Result<(f64, Vec<Flows>)> {
    let round_trip_us = round_trip(&streams[0].socket)?;
    let flows = request.flows.iter().map(|&flows| {
        let streams = &streams[..flows];
        let message = |&bytes: &u64| {
            let gbit_per_s = messages(streams, bytes, request.duration)?;
            Ok(Messages { message_bytes: bytes, gbit_per_s })
        };
        Ok(Flows {
            flows,
            stream_gbit_per_s: stream(streams, request.duration)?,
            messages: request.sizes.iter().map(message).collect::<std::io::Result<_>>()?,
        })
    });
    Ok((round_trip_us, flows.collect::<std::io::Result<_>>()?))
}

/// The receiver's part.
fn received(streams: &[&Stream], request: &Request<'_>) -> std::io::Result<()> {
    answer(&streams[0].socket)?;
    for &flows in request.flows {
        for _ in 0..=request.sizes.len() {
            each(&streams[..flows], |_, socket| answer(socket))?;
        }
    }
    Ok(())
}

/// Runs `part` for every stream, each on a thread of its own unless there is only one stream.
fn each(
    streams: &[&Stream],
    part: impl Fn(usize, &TcpStream) -> std::io::Result<()> + Sync,
) -> std::io::Result<()> {
    if let [only] = streams {
        return part(0, &only.socket);
    }
    std::thread::scope(|scope| {
        let part = &part;
        let started = streams.iter().enumerate().map(|(index, stream)| {
            let work = move || part(index, &stream.socket);
            threads::spawn_scoped(scope, "a thread for a connection", work)
        });
        let running = started.collect::<Result<Vec<_>, _>>().map_err(|error| {
            shut_down(streams.iter().copied());
            std::io::Error::other(error)
        })?;
        running
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

/// Receives records until the header 0.
fn answer(mut socket: &TcpStream) -> std::io::Result<()> {
    let mut header = [0; 8];
    loop {
        socket.read_exact(&mut header)?;
        let header = u64::from_le_bytes(header);
        receive(socket, header & !SILENT)?;
        if header & SILENT == 0 {
            socket.write_all(&[1])?;
        }
        if header == 0 {
            return Ok(());
        }
    }
}

/// Sends one record, and waits for its acknowledgement unless it is silent.
fn record(mut socket: &TcpStream, header: u64) -> std::io::Result<()> {
    socket.write_all(&header.to_le_bytes())?;
    send(socket, header & !SILENT)?;
    if header & SILENT == 0 {
        socket.read_exact(&mut [0])?;
    }
    Ok(())
}

/// Median of the round trips of a record of one byte, microseconds.
fn round_trip(socket: &TcpStream) -> std::io::Result<f64> {
    let begun = Instant::now();
    let mut times: Vec<f64> = Vec::new();
    while times.len() < *ROUND_TRIPS.start()
        || (times.len() < *ROUND_TRIPS.end() && begun.elapsed() < ROUND_TRIP_TIME)
    {
        let start = Instant::now();
        record(socket, 1)?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    record(socket, 0)?;
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// Gbit/s of continuous streams: all send for the duration, and the time ends when the receiver has everything.
fn stream(streams: &[&Stream], duration: Duration) -> std::io::Result<f64> {
    let start = Instant::now();
    let bytes = std::sync::atomic::AtomicU64::new(0);
    each(streams, |_, socket| {
        while start.elapsed() < duration {
            record(socket, PART | SILENT)?;
            bytes.fetch_add(PART, std::sync::atomic::Ordering::Relaxed);
        }
        record(socket, 0)
    })?;
    Ok(gbit_per_s(bytes.into_inner(), start.elapsed()))
}

/// Gbit/s of messages of `bytes` bytes. A message is divided over the streams and sent after the acknowledgement of the
/// one before.
fn messages(streams: &[&Stream], bytes: u64, duration: Duration) -> std::io::Result<f64> {
    let start = Instant::now();
    let (count, mut sent) = (streams.len() as u64, 0);
    while sent == 0 || start.elapsed() < duration {
        each(streams, |index, socket| {
            let part = part_of(bytes, count, index as u64);
            if part > 0 { record(socket, part) } else { Ok(()) }
        })?;
        sent += bytes;
    }
    let time = start.elapsed();
    each(streams, |_, socket| record(socket, 0))?;
    Ok(gbit_per_s(sent, time))
}

/// Bytes of a message that one of `count` streams carries: parts differ by at most one byte.
fn part_of(bytes: u64, count: u64, index: u64) -> u64 {
    bytes / count + u64::from(index < bytes % count)
}

fn gbit_per_s(bytes: u64, time: Duration) -> f64 {
    bytes as f64 * 8.0 / 1e9 / time.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use ep::join::ThreadRendezvous;

    use super::*;

    #[test]
    fn rates_are_in_gbit_per_s() {
        assert_eq!(gbit_per_s(250_000_000, Duration::from_millis(500)), 4.0);
    }

    #[test]
    fn the_parts_of_a_message_are_the_message() {
        for (bytes, parts) in [(10, [4, 3, 3]), (9, [3, 3, 3]), (2, [1, 1, 0])] {
            assert_eq!([0, 1, 2].map(|index| part_of(bytes, 3, index)), parts);
        }
    }

    #[test]
    fn every_pair_is_measured_in_both_directions_and_all_ranks_know_it() {
        let request = Request { flows: &[1, 3], sizes: &[1, 100_000], duration: Duration::from_millis(5) };
        let all: Vec<Vec<Direction>> = std::thread::scope(|scope| {
            let ranks: Vec<_> = ThreadRendezvous::new(3, Duration::from_secs(60))
                .into_iter()
                .map(|mut meet| {
                    let request = &request;
                    scope.spawn(move || all(&mut meet, &Config::default(), request).unwrap())
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert!(all.iter().all(|of_rank| *of_rank == all[0]));
        let pairs: Vec<_> = all[0].iter().map(|direction| (direction.from, direction.to)).collect();
        assert_eq!(pairs, [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]);
        for direction in &all[0] {
            // A round trip takes microseconds: a figure in a larger unit would be smaller.
            assert!(direction.round_trip_us > 0.1 && direction.best().0 > 0.0);
            for (flows, wanted) in direction.flows.iter().zip([1, 3]) {
                assert_eq!(flows.flows, wanted);
                let sizes: Vec<_> = flows.messages.iter().map(|message| message.message_bytes).collect();
                assert_eq!(sizes, [1, 100_000]);
                assert!(flows.messages.iter().all(|message| message.gbit_per_s > 0.0));
            }
        }
    }

    #[test]
    fn a_peer_that_sends_impossible_figures_is_named() {
        let sent = |round_trip: &str| {
            format!(r#"[{{"from": 2, "to": 0, "round_trip_us": {round_trip}, "flows": []}}]"#)
        };
        assert_eq!(figures_of(2, sent("12.5").as_bytes()).unwrap()[0].round_trip_us, 12.5);
        for (blob, part) in [
            (sent("-3"), "a round trip of -3e0 us to rank 0"),
            (sent("1e300"), "1e300 us"),
            ("[".into(), "EOF"),
        ] {
            let error = figures_of(2, blob.as_bytes()).unwrap_err().to_string();
            assert!(error.starts_with("the figures of rank 2") && error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_refused_thread_ends_the_threads_of_the_other_connections() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = || TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let streams = [1, 2].map(|peer| Stream { peer: Rank(peer), socket: connect() });
        // The peer never sends, so the thread that runs would wait for ever.
        let wait = |_: usize, socket: &TcpStream| answer(socket);
        let error = threads::quota::of(1, || each(&[&streams[0], &streams[1]], wait)).unwrap_err();
        assert!(error.to_string().contains("starting a thread for a connection"), "{error}");
    }

    #[test]
    fn the_least_number_of_connections_near_the_best_rate_is_enough() {
        let flows = |rates: &[(usize, f64)]| Direction {
            from: 0,
            to: 1,
            round_trip_us: 1.0,
            flows: rates
                .iter()
                .map(|&(flows, stream_gbit_per_s)| Flows { flows, stream_gbit_per_s, messages: Vec::new() })
                .collect(),
        };
        assert_eq!(flows(&[(1, 5.0), (4, 9.9), (16, 10.0)]).best(), (10.0, 4));
        assert_eq!(flows(&[(1, 10.0), (4, 9.0)]).best(), (10.0, 1));
    }
}
