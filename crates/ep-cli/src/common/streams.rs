//! Plain TCP streams between ranks of a job, for measurements of the network alone.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use ep::join::{Rendezvous, Secret};
use ep::{Config, Rank};

use crate::common::failure::Failure;

/// Maximum number of bytes of one read or write.
const PART: usize = 1 << 20;
/// Bytes of the word by which a rank recognises the connections of its peers.
const WORD: usize = 32;
/// How long a new connection may take to send the word.
const GREETING: Duration = Duration::from_secs(2);
/// Pause between two checks for new connections.
const PAUSE: Duration = Duration::from_millis(1);

/// A connection with a peer.
pub(crate) struct Stream {
    pub(crate) peer: Rank,
    pub(crate) socket: TcpStream,
}

/// Ends all transfers on these streams, so that threads that wait for them return.
pub(crate) fn shut_down<'a>(streams: impl IntoIterator<Item = &'a Stream>) {
    for stream in streams {
        // It is not an error if a stream has already ended.
        let _ = stream.socket.shutdown(Shutdown::Both);
    }
}

/// The error for a stream that failed.
pub(crate) fn failed(peer: Rank, error: &std::io::Error) -> Failure {
    Failure::request(format!("the plain TCP stream between this rank and rank {peer}: {error}"))
}

/// Connects this rank with `peers`. Returns one stream per entry, in their order. A peer may occur several times; it must
/// list this rank the same number of times. Collective.
pub(crate) fn connect(
    meet: &mut dyn Rendezvous,
    config: &Config,
    peers: &[Rank],
) -> Result<Vec<Stream>, Failure> {
    let (rank, timeout) = (meet.rank(), config.timeout);
    let own = |error: std::io::Error| Failure::request(format!("listening for plain TCP streams: {error}"));
    let listener = TcpListener::bind((own_address(meet, config)?, 0)).map_err(own)?;
    // Exchange the addresses and words of all ranks. Only ranks of the job know the words, so a rank recognises
    // connections of its peers.
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
    accept(&listener, word, peers, &mut streams, timeout, || meet.lost())?;
    Ok(streams.into_iter().flatten().collect())
}

/// Accepts connections until every peer has a stream, or `lost` returns an error.
fn accept(
    listener: &TcpListener,
    word: &[u8],
    peers: &[Rank],
    streams: &mut [Option<Stream>],
    timeout: Duration,
    mut lost: impl FnMut() -> Option<ep::Error>,
) -> Result<(), Failure> {
    let start = Instant::now();
    listener
        .set_nonblocking(true)
        .map_err(|error| Failure::request(format!("waiting for streams: {error}")))?;
    while let Some(missing) = streams.iter().position(Option::is_none) {
        let socket = match listener.accept() {
            Ok((socket, _)) => socket,
            // A peer that has ended never connects.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if let Some(error) = lost() {
                    return Err(error.into());
                }
                if start.elapsed() >= timeout {
                    return Err(failed(peers[missing], &ErrorKind::TimedOut.into()));
                }
                std::thread::sleep(PAUSE);
                continue;
            }
            Err(error) => return Err(failed(peers[missing], &error)),
        };
        let Ok(mut socket) = prepared(socket, timeout.min(GREETING)) else { continue };
        let mut greeting = [0; WORD + 4];
        // Ignore a connection without the word: it comes from another program.
        let read = socket.read_exact(&mut greeting);
        let (said, from) = greeting.split_at(WORD);
        if read.is_err() || said != word {
            continue;
        }
        let awaited =
            |(peer, stream): (&Rank, &Option<Stream>)| stream.is_none() && peer.0.to_le_bytes() == from;
        let place = peers.iter().zip(&*streams).position(awaited);
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
fn own_address(meet: &dyn Rendezvous, config: &Config) -> Result<IpAddr, Failure> {
    #[cfg(target_os = "linux")]
    let address = config.host.transport.network_address(meet)?;
    #[cfg(not(target_os = "linux"))]
    let address = meet.network_address();
    Ok(address.unwrap_or(Ipv4Addr::LOCALHOST.into()))
}

/// Sends this number of bytes.
pub(crate) fn send(mut socket: &TcpStream, mut bytes: u64) -> std::io::Result<()> {
    let part = vec![0x5A; PART];
    while bytes > 0 {
        let now = part.len().min(usize::try_from(bytes).unwrap_or(PART));
        socket.write_all(&part[..now])?;
        bytes -= now as u64;
    }
    Ok(())
}

/// Receives this number of bytes and drops them.
pub(crate) fn receive(mut socket: &TcpStream, mut bytes: u64) -> std::io::Result<()> {
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
    use super::*;

    #[test]
    fn a_peer_that_never_connects_is_named_after_the_timeout() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        // Another program, which stays silent.
        let _stranger = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let timeout = Duration::from_millis(100);
        let refused = accept(&listener, &[7; WORD], &[Rank(3)], &mut [None], timeout, || None).unwrap_err();
        assert!(refused.to_string().contains("this rank and rank 3"), "{refused}");
    }

    #[test]
    fn a_lost_rank_ends_the_wait_for_connections() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut looks = 0;
        let lost = || {
            looks += 1;
            (looks > 2).then(|| ep::EnvironmentError::new("a rank", "was lost", "start it again").into())
        };
        let never = Duration::MAX;
        let refused = accept(&listener, &[7; WORD], &[Rank(3)], &mut [None], never, lost).unwrap_err();
        assert!(refused.to_string().contains("was lost"), "{refused}");
        assert_eq!(looks, 3);
    }
}
