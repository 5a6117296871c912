//! Plain TCP streams between the ranks of a rail: how long the network alone takes for the bytes that an operator sends
//! between domains. This is the floor of the leg between domains, measured in the same run.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use ep::Rank;
use ep::join::{Rendezvous, Secret};

use crate::bench::measure::{AllSamples, Operator};
use crate::bench::plan::BenchPlan;
use crate::common::backend::BackendKind;
use crate::common::failure::Failure;

/// Timed repetitions for each operator, after one that is not timed.
const REPEATS: usize = 5;
/// Bytes of one read or write.
const PART: usize = 1 << 20;
/// A socket holds so many bytes that the other end has not read.
const BUFFERED: u64 = 128 << 10;
/// Bytes of the word by which a rank recognises the connections of its peers.
const WORD: usize = 32;
/// How long a new connection may take to send the word.
const GREETING: Duration = Duration::from_secs(2);
/// Pause between two looks for new connections.
const PAUSE: Duration = Duration::from_millis(1);

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
    let mut streams = connect(meet, plan, &peers)?;
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

/// A connected rail peer.
struct Stream {
    peer: Rank,
    socket: TcpStream,
}

fn failed(peer: Rank, error: &std::io::Error) -> Failure {
    Failure::request(format!("the plain TCP stream between this rank and rank {peer}: {error}"))
}

/// Connects this rank with its peers, in their order. Collective.
fn connect(meet: &mut dyn Rendezvous, plan: &BenchPlan, peers: &[Rank]) -> Result<Vec<Stream>, Failure> {
    let (rank, timeout) = (meet.rank(), plan.config.timeout);
    let own = |error: std::io::Error| {
        Failure::request(format!("listening for the plain TCP streams of the benchmark: {error}"))
    };
    let listener = TcpListener::bind((own_address(meet, plan)?, 0)).map_err(own)?;
    // The addresses and words of all ranks. Only the ranks of the job know the words, so that a rank recognises its peers.
    let word = Secret::random_text()?;
    let word = &word.as_bytes()[..WORD];
    let blob = [word, listener.local_addr().map_err(own)?.to_string().as_bytes()].concat();
    let all = meet.all_gather(&blob)?;
    let mut streams: Vec<Option<Stream>> = peers.iter().map(|_| None).collect();
    for (slot, &peer) in streams.iter_mut().zip(peers).filter(|(_, peer)| **peer < rank) {
        let (theirs, address) = all[peer.index()].split_at_checked(WORD).unwrap_or_default();
        let address = std::str::from_utf8(address).ok().and_then(|text| text.parse::<SocketAddr>().ok());
        let connected = address
            .ok_or(ErrorKind::InvalidData.into())
            .and_then(|address| TcpStream::connect_timeout(&address, timeout))
            .and_then(|mut socket| {
                socket.write_all(&[theirs, &rank.0.to_le_bytes()].concat())?;
                prepared(socket, timeout)
            });
        *slot = Some(Stream { peer, socket: connected.map_err(|error| failed(peer, &error))? });
    }
    accept(&listener, word, peers, &mut streams, timeout)?;
    Ok(streams.into_iter().flatten().collect())
}

/// Accepts connections until every peer has a stream.
fn accept(
    listener: &TcpListener,
    word: &[u8],
    peers: &[Rank],
    streams: &mut [Option<Stream>],
    timeout: Duration,
) -> Result<(), Failure> {
    let start = Instant::now();
    listener
        .set_nonblocking(true)
        .map_err(|error| Failure::request(format!("waiting for streams: {error}")))?;
    while let Some(missing) = streams.iter().position(Option::is_none) {
        let socket = match listener.accept() {
            Ok((socket, _)) => socket,
            // The peer may have ended: it never connects then.
            Err(error) if error.kind() == ErrorKind::WouldBlock && start.elapsed() >= timeout => {
                return Err(failed(peers[missing], &ErrorKind::TimedOut.into()));
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                std::thread::sleep(PAUSE);
                continue;
            }
            Err(error) => return Err(failed(peers[missing], &error)),
        };
        let Ok(mut socket) = prepared(socket, timeout.min(GREETING)) else { continue };
        let mut greeting = [0; WORD + 4];
        // A connection of another program: wait for the peer's.
        let read = socket.read_exact(&mut greeting);
        let (said, from) = greeting.split_at(WORD);
        if read.is_err() || said != word {
            continue;
        }
        let place = peers.iter().position(|peer| peer.0.to_le_bytes() == from);
        if let (Some(at), Ok(socket)) = (place, prepared(socket, timeout)) {
            let peer = peers[at];
            streams[at].get_or_insert(Stream { peer, socket });
        }
    }
    Ok(())
}

fn prepared(socket: TcpStream, timeout: Duration) -> std::io::Result<TcpStream> {
    socket.set_nonblocking(false)?;
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(timeout))?;
    socket.set_write_timeout(Some(timeout))?;
    Ok(socket)
}

/// The address that the engine uses.
fn own_address(meet: &dyn Rendezvous, plan: &BenchPlan) -> Result<IpAddr, Failure> {
    #[cfg(target_os = "linux")]
    let address = plan.config.host.transport.network_address(meet)?;
    #[cfg(not(target_os = "linux"))]
    let address = meet.network_address();
    Ok(address.unwrap_or(Ipv4Addr::LOCALHOST.into()))
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

fn send(mut socket: &TcpStream, mut bytes: u64) -> std::io::Result<()> {
    let part = vec![0x5A; PART];
    while bytes > 0 {
        let now = part.len().min(usize::try_from(bytes).unwrap_or(PART));
        socket.write_all(&part[..now])?;
        bytes -= now as u64;
    }
    Ok(())
}

fn receive(mut socket: &TcpStream, mut bytes: u64) -> std::io::Result<()> {
    let mut part = vec![0; PART];
    while bytes > 0 {
        let most = part.len().min(usize::try_from(bytes).unwrap_or(PART));
        match socket.read(&mut part[..most])? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            read => bytes -= read as u64,
        }
    }
    Ok(())
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
    fn a_peer_that_never_connects_is_named_after_the_timeout() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        // Another program, which stays silent.
        let _stranger = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let timeout = Duration::from_millis(100);
        let refused = accept(&listener, &[7; WORD], &[Rank(3)], &mut [None], timeout).unwrap_err();
        assert!(refused.to_string().contains("this rank and rank 3"), "{refused}");
    }

    #[test]
    fn nothing_is_measured_where_no_bytes_cross_a_network() {
        for options in ["--ranks 1", "--ranks 1 --transport tcp"] {
            let mut meet = ThreadRendezvous::new(1, Duration::from_secs(1)).remove(0);
            assert!(measure(&mut meet, &plan(options), &AllSamples::new()).unwrap().is_none());
        }
    }
}
