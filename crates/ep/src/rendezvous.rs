//! How ranks meet: an all-gather of small blobs before any memory is shared.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{EnvironmentError, Error, PeerError, PeerFault, Result};
use crate::topology::Rank;

/// Exchanges a blob with every rank. Collective.
pub trait Rendezvous {
    /// This rank.
    fn rank(&self) -> Rank;

    /// Number of ranks.
    fn ranks(&self) -> usize;

    /// Gives `blob` to all ranks and returns everybody's, by rank.
    ///
    /// # Errors
    /// [`PeerError`] that names a rank which is absent, or gone.
    fn all_gather(&mut self, blob: &[u8]) -> Result<Vec<Vec<u8>>>;
}

/// A rendezvous over TCP: rank 0 listens, the others connect to it.
///
/// For trusted networks: there is no authentication, as in the stores of the usual launchers.
#[derive(Debug)]
pub struct TcpRendezvous {
    rank: Rank,
    ranks: usize,
    timeout: Duration,
    /// On rank 0 the streams of ranks 1.. in order; elsewhere the one to rank 0.
    streams: Vec<TcpStream>,
}

/// First bytes of a connection: tells a rank of ours from a stranger who knocks at the port.
const MAGIC: [u8; 8] = *b"hyb-ep01";
/// No blob is larger; a longer length is a stranger's.
const MAX_BLOB: usize = 64 << 20;
/// Status byte before each answer of rank 0.
const OK: u8 = 0;
const ABSENT: u8 = 1;
const STALLED: u8 = 2;
const DIED: u8 = 3;
/// Pause between attempts to connect or to accept.
const RETRY: Duration = Duration::from_millis(5);

impl TcpRendezvous {
    /// Meets the other ranks at `store` (`host:port`), where rank 0 listens.
    ///
    /// # Errors
    /// [`EnvironmentError`] when the address cannot be bound or resolved; [`PeerError`] with
    /// [`PeerFault::Absent`] that names the first missing rank after `timeout`, on every rank that did come.
    pub fn join(store: &str, rank: Rank, ranks: usize, timeout: Duration) -> Result<Self> {
        let deadline = Instant::now() + timeout;
        let mut this = Self { rank, ranks, timeout, streams: Vec::new() };
        if ranks > 1 {
            if rank == Rank(0) {
                let listener = TcpListener::bind(store).map_err(|error| {
                    EnvironmentError::new(
                        format!("listening at {store} for {} ranks", ranks - 1),
                        error,
                        "is another job using the port? set MASTER_PORT or HYBRID_EP_STORE to a free one",
                    )
                })?;
                this.streams = this.accept_all(&listener, deadline)?;
            } else {
                this.streams = vec![this.connect(store, deadline)?];
            }
        }
        Ok(this)
    }

    /// As [`join`](Self::join) on rank 0, with a listener that the caller has bound (to a port of the system's choice).
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub fn host(listener: &TcpListener, ranks: usize, timeout: Duration) -> Result<Self> {
        let mut this = Self { rank: Rank(0), ranks, timeout, streams: Vec::new() };
        this.streams = this.accept_all(listener, Instant::now() + timeout)?;
        Ok(this)
    }

    fn accept_all(&self, listener: &TcpListener, deadline: Instant) -> Result<Vec<TcpStream>> {
        let environment = |error| EnvironmentError::new("accepting ranks", error, "");
        listener.set_nonblocking(true).map_err(environment)?;
        let mut slots: Vec<Option<TcpStream>> = (1..self.ranks).map(|_| None).collect();
        while slots.iter().any(Option::is_none) {
            match listener.accept() {
                Ok((stream, _)) => {
                    if let Some((rank, stream)) = self.greet(stream, deadline)? {
                        slots[rank - 1] = Some(stream);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if Instant::now() >= deadline {
                        return Err(self.name_the_absent(&mut slots));
                    }
                    std::thread::sleep(RETRY);
                }
                Err(error) => return Err(environment(error).into()),
            }
        }
        let mut streams: Vec<TcpStream> = slots.into_iter().flatten().collect();
        for stream in &mut streams {
            // A rank that is gone again is found at the first exchange.
            let _ = stream.write_all(&[OK]);
        }
        Ok(streams)
    }

    /// Reads a newcomer's greeting; `None` for a stranger, who is dropped.
    fn greet(&self, mut stream: TcpStream, deadline: Instant) -> Result<Option<(usize, TcpStream)>> {
        let left = deadline.saturating_duration_since(Instant::now()).max(RETRY);
        let mut greeting = [0; 16];
        let read = stream
            .set_nonblocking(false)
            .and_then(|()| stream.set_nodelay(true))
            .and_then(|()| stream.set_read_timeout(Some(left.min(Duration::from_secs(2)))))
            .and_then(|()| stream.read_exact(&mut greeting));
        if read.is_err() || greeting[..8] != MAGIC {
            return Ok(None);
        }
        let word = |at: usize| {
            u32::from_le_bytes([greeting[at], greeting[at + 1], greeting[at + 2], greeting[at + 3]]) as usize
        };
        let (rank, ranks) = (word(8), word(12));
        if ranks != self.ranks || rank == 0 || rank >= ranks {
            return Err(EnvironmentError::new(
                "meeting the other ranks",
                format!("rank {rank} of {ranks} knocked, but this job has {} ranks", self.ranks),
                "start every rank with the same WORLD_SIZE and its own RANK",
            )
            .into());
        }
        Ok(Some((rank, stream)))
    }

    /// Tells those who came which rank did not, so that all report the same.
    fn name_the_absent(&self, slots: &mut [Option<TcpStream>]) -> Error {
        let absent = slots.iter().position(Option::is_none).unwrap_or(0) as u32 + 1;
        for stream in slots.iter_mut().flatten() {
            let mut answer = vec![ABSENT];
            answer.extend(absent.to_le_bytes());
            let _ = stream.write_all(&answer);
        }
        self.absent(Rank(absent), "its connection")
    }

    fn absent(&self, peer: Rank, waited_for: &str) -> Error {
        let waited_for = format!("{waited_for} at the rendezvous");
        PeerError::joining(self.rank, peer, PeerFault::Absent, waited_for, self.timeout).into()
    }

    fn connect(&self, store: &str, deadline: Instant) -> Result<TcpStream> {
        let addresses: Vec<_> = store
            .to_socket_addrs()
            .map_err(|error| {
                EnvironmentError::new(
                    format!("resolving {store}"),
                    error,
                    "set MASTER_ADDR and MASTER_PORT, or HYBRID_EP_STORE",
                )
            })?
            .collect();
        let mut stream = loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.absent(Rank(0), "a listener"));
            }
            let patience = left.min(Duration::from_secs(1));
            let attempt = addresses
                .iter()
                .filter_map(|address| TcpStream::connect_timeout(address, patience).ok())
                .find(|stream| !is_self_connection(stream));
            match attempt {
                Some(stream) => break stream,
                None => std::thread::sleep(RETRY),
            }
        };
        let mut greeting = MAGIC.to_vec();
        greeting.extend(self.rank.0.to_le_bytes());
        greeting.extend((self.ranks as u32).to_le_bytes());
        let mut status = [0];
        // Rank 0 answers at its own deadline at the latest; leave it time to say who is missing.
        stream
            .set_nodelay(true)
            .and_then(|()| stream.set_read_timeout(Some(self.timeout + Duration::from_secs(1))))
            .and_then(|()| stream.write_all(&greeting))
            .and_then(|()| stream.read_exact(&mut status))
            .map_err(|_| self.absent(Rank(0), "an answer"))?;
        if status[0] == ABSENT {
            let mut rank = [0; 4];
            stream.read_exact(&mut rank).map_err(|_| self.absent(Rank(0), "an answer"))?;
            return Err(self.absent(Rank(u32::from_le_bytes(rank)), "its connection"));
        }
        Ok(stream)
    }

    /// Rank 0's part of an exchange: takes everybody's blob and gives all to everybody, or tells who was lost.
    fn collect(&self, streams: &mut [TcpStream], blob: &[u8]) -> Result<Vec<Vec<u8>>> {
        let start = Instant::now();
        let mut all = vec![blob.to_vec()];
        let mut lost = None;
        for (stream, rank) in streams.iter_mut().zip(1..) {
            let left = self.timeout.saturating_sub(start.elapsed()).max(RETRY);
            match stream.set_read_timeout(Some(left)).and_then(|()| read_blob(stream)) {
                Ok(blob) => all.push(blob),
                Err(error) => {
                    lost = Some((Rank(rank), error));
                    break;
                }
            }
        }
        if let Some((peer, error)) = lost {
            let fault = PeerFault::of_socket(&error);
            let mut answer = vec![if fault == PeerFault::Stalled { STALLED } else { DIED }];
            answer.extend(peer.0.to_le_bytes());
            for stream in streams {
                // Whoever is gone too cannot be told.
                let _ = stream.write_all(&answer);
            }
            return Err(self.gone(peer, fault, &error, start));
        }
        for (stream, rank) in streams.iter_mut().zip(1..) {
            let send = |stream: &mut TcpStream| {
                stream.write_all(&[OK])?;
                all.iter().try_for_each(|blob| write_blob(stream, blob))
            };
            send(stream)
                .map_err(|error| self.gone(Rank(rank), PeerFault::of_socket(&error), &error, start))?;
        }
        Ok(all)
    }

    /// Another rank's part of an exchange.
    fn contribute(&self, stream: &mut TcpStream, blob: &[u8]) -> Result<Vec<Vec<u8>>> {
        let start = Instant::now();
        let gone = |error: std::io::Error| self.gone(Rank(0), PeerFault::of_socket(&error), &error, start);
        let mut status = [0];
        // Rank 0 answers at its own deadline at the latest; leave it time to say who is lost.
        stream
            .set_read_timeout(Some(self.timeout + Duration::from_secs(1)))
            .and_then(|()| write_blob(stream, blob))
            .and_then(|()| stream.read_exact(&mut status))
            .map_err(gone)?;
        if status[0] != OK {
            let mut rank = [0; 4];
            stream.read_exact(&mut rank).map_err(gone)?;
            let fault = if status[0] == STALLED { PeerFault::Stalled } else { PeerFault::Died };
            return Err(self.gone(Rank(u32::from_le_bytes(rank)), fault, &"rank 0 says so", start));
        }
        (0..self.ranks).map(|_| read_blob(stream)).collect::<std::io::Result<Vec<_>>>().map_err(gone)
    }

    fn gone(&self, peer: Rank, fault: PeerFault, why: &dyn std::fmt::Display, start: Instant) -> Error {
        let waited_for = format!("its part of the rendezvous ({why})");
        PeerError::joining(self.rank, peer, fault, waited_for, start.elapsed()).into()
    }
}

impl Rendezvous for TcpRendezvous {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn all_gather(&mut self, blob: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut streams = std::mem::take(&mut self.streams);
        let result = if self.rank == Rank(0) {
            self.collect(&mut streams, blob)
        } else {
            self.contribute(&mut streams[0], blob)
        };
        self.streams = streams;
        result
    }
}

/// A rendezvous of threads of one process.
#[derive(Debug)]
pub struct ThreadRendezvous {
    rank: Rank,
    timeout: Duration,
    table: Arc<Table>,
}

#[derive(Debug)]
struct Table {
    state: Mutex<TableState>,
    changed: Condvar,
}

#[derive(Debug)]
struct TableState {
    round: u64,
    /// Blobs of the round under way, by rank.
    blobs: Vec<Option<Vec<u8>>>,
    /// Blobs of the round before.
    gathered: Vec<Vec<u8>>,
}

impl ThreadRendezvous {
    /// One end for each of `ranks` threads.
    pub fn new(ranks: usize, timeout: Duration) -> Vec<Self> {
        let state = TableState { round: 0, blobs: vec![None; ranks], gathered: Vec::new() };
        let table = Arc::new(Table { state: Mutex::new(state), changed: Condvar::new() });
        (0..ranks as u32).map(|rank| Self { rank: Rank(rank), timeout, table: Arc::clone(&table) }).collect()
    }
}

impl Rendezvous for ThreadRendezvous {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.table.state.lock().unwrap_or_else(PoisonError::into_inner).blobs.len()
    }

    fn all_gather(&mut self, blob: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut state = self.table.state.lock().unwrap_or_else(PoisonError::into_inner);
        let round = state.round;
        state.blobs[self.rank.index()] = Some(blob.to_vec());
        if state.blobs.iter().all(Option::is_some) {
            state.gathered = state.blobs.iter_mut().filter_map(Option::take).collect();
            state.round += 1;
            self.table.changed.notify_all();
        }
        let (state, result) = self
            .table
            .changed
            .wait_timeout_while(state, self.timeout, |state| state.round == round)
            .unwrap_or_else(PoisonError::into_inner);
        if result.timed_out() {
            let absent = state.blobs.iter().position(Option::is_none).unwrap_or(0);
            let (peer, waited_for) = (Rank(absent as u32), "its part of the rendezvous");
            let error = PeerError::joining(self.rank, peer, PeerFault::Absent, waited_for, self.timeout);
            return Err(PeerError { step: round, ..error }.into());
        }
        Ok(state.gathered.clone())
    }
}

/// While nobody listens at a local port, the system may pick that very port for the connecting end, and TCP then
/// connects it to itself.
fn is_self_connection(stream: &TcpStream) -> bool {
    matches!((stream.local_addr(), stream.peer_addr()), (Ok(local), Ok(peer)) if local == peer)
}

fn write_blob(stream: &mut TcpStream, blob: &[u8]) -> std::io::Result<()> {
    stream.write_all(&(blob.len() as u64).to_le_bytes())?;
    stream.write_all(blob)
}

fn read_blob(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut len = [0; 8];
    stream.read_exact(&mut len)?;
    let len = u64::from_le_bytes(len) as usize;
    if len > MAX_BLOB {
        return Err(std::io::Error::new(ErrorKind::InvalidData, format!("a blob of {len} bytes")));
    }
    let mut blob = vec![0; len];
    stream.read_exact(&mut blob)?;
    Ok(blob)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `ranks` threads, leaving out `absent`, and returns what each got.
    fn meet(ranks: usize, absent: Option<usize>, timeout: Duration) -> Vec<Result<Vec<Vec<u8>>>> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let store = listener.local_addr().unwrap().to_string();
        std::thread::scope(|scope| {
            let store = &store;
            let others: Vec<_> = (1..ranks)
                .filter(|&rank| Some(rank) != absent)
                .map(|rank| {
                    scope.spawn(move || {
                        let mut met = TcpRendezvous::join(store, Rank(rank as u32), ranks, timeout)?;
                        met.all_gather(&vec![rank as u8; rank])?;
                        met.all_gather(&[rank as u8])
                    })
                })
                .collect();
            let zero = TcpRendezvous::host(&listener, ranks, timeout).and_then(|mut met| {
                met.all_gather(&[])?;
                met.all_gather(&[0])
            });
            std::iter::once(zero).chain(others.into_iter().map(|h| h.join().unwrap())).collect()
        })
    }

    #[test]
    fn everybody_gets_everybodys_blob() {
        for ranks in [1, 2, 5] {
            for result in meet(ranks, None, Duration::from_secs(20)) {
                let expected: Vec<Vec<u8>> = (0..ranks).map(|rank| vec![rank as u8]).collect();
                assert_eq!(result.unwrap(), expected);
            }
        }
    }

    #[test]
    fn the_absent_rank_is_named_everywhere() {
        let results = meet(4, Some(2), Duration::from_millis(300));
        assert_eq!(results.len(), 3);
        for result in results {
            let Err(Error::Peer(error)) = result else { panic!("{result:?}") };
            assert_eq!((error.peer, error.fault), (Rank(2), PeerFault::Absent));
        }
    }

    #[test]
    fn threads_meet_again_and_again() {
        let met = std::thread::scope(|scope| {
            let ends = ThreadRendezvous::new(3, Duration::from_secs(20));
            let threads: Vec<_> = ends
                .into_iter()
                .map(|mut end| {
                    scope.spawn(move || {
                        (0..50u8)
                            .map(|round| end.all_gather(&[round, end.rank().0 as u8]).unwrap())
                            .collect::<Vec<_>>()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        for rounds in met {
            for (round, blobs) in (0..50u8).zip(rounds) {
                assert_eq!(blobs, [[round, 0], [round, 1], [round, 2]]);
            }
        }
        let error = ThreadRendezvous::new(2, Duration::from_millis(20))[0].all_gather(&[]).unwrap_err();
        assert!(error.to_string().starts_with("rank 1 never joined"), "{error}");
    }

    #[test]
    fn a_rank_lost_after_joining_is_named_everywhere() {
        for (stays, fault) in [(false, PeerFault::Died), (true, PeerFault::Stalled)] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let store = listener.local_addr().unwrap().to_string();
            let timeout = Duration::from_millis(400);
            let results = std::thread::scope(|scope| {
                let store = &store;
                let join = move |rank| TcpRendezvous::join(store, Rank(rank), 3, timeout).unwrap();
                let one = scope.spawn(move || join(1).all_gather(&[]));
                let two = scope.spawn(move || {
                    let silent = join(2);
                    if stays {
                        std::thread::sleep(4 * timeout);
                    }
                    drop(silent);
                });
                let zero = TcpRendezvous::host(&listener, 3, timeout).unwrap().all_gather(&[]);
                two.join().unwrap();
                [zero, one.join().unwrap()]
            });
            for result in results {
                let Err(Error::Peer(error)) = result else { panic!("{result:?}") };
                assert_eq!((error.peer, error.fault), (Rank(2), fault), "{error}");
            }
        }
    }

    #[test]
    fn strangers_are_ignored() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut stranger = TcpStream::connect(address).unwrap();
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let store = address.to_string();
        std::thread::scope(|scope| {
            let one = scope
                .spawn(|| TcpRendezvous::join(&store, Rank(1), 2, Duration::from_secs(20))?.all_gather(b"x"));
            TcpRendezvous::host(&listener, 2, Duration::from_secs(20)).unwrap().all_gather(b"y").unwrap();
            assert_eq!(one.join().unwrap().unwrap(), [b"y", b"x"]);
        });
    }

    #[test]
    fn a_listener_that_never_comes_is_rank_0() {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let error = TcpRendezvous::join(&free, Rank(1), 2, Duration::from_millis(100)).unwrap_err();
        assert!(error.to_string().starts_with("rank 0 never joined"), "{error}");
    }
}
