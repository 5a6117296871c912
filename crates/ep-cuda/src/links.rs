//! Registered memory between processes: each sends its chunks, as file descriptors, to all others, which map them.
//!
//! A rank has one socket to every peer. What it sends: a chunk, whenever its memory grows, and waits for the peer to
//! have mapped it; at the end, a farewell. A socket that closes without one means that the process died: the kernels of
//! the others learn of it through their control block.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use ep::{EnvironmentError, PeerError, PeerFault, Rank, Result};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use crate::arena::Announce;
use crate::driver::{Chunk, Device, DeviceAddress, Reservation, Stream};
use crate::params::LEFT_OFFSET;

/// A message is a number: a chunk's bytes, with its descriptor, or one of these.
const FAREWELL: u64 = 0;
/// The answer to a chunk that was mapped, and to one that was not.
const MAPPED: u8 = 1;
const NOT_MAPPED: u8 = 2;

/// Pause between two looks for a connection.
const RETRY: Duration = Duration::from_millis(1);

/// What a kernel reads of a peer that is gone.
pub(crate) const LEFT: u32 = 1;
const DIED: u32 = 2;

fn broken(what: &str, error: impl std::fmt::Display) -> ep::Error {
    EnvironmentError::new(
        what,
        error,
        "all ranks of an NVLink domain must run on one machine, in one network namespace",
    )
    .into()
}

fn address(name: &str) -> Result<SocketAddr> {
    SocketAddr::from_abstract_name(name).map_err(|error| broken("naming a socket", error))
}

/// Where a rank waits for its peers.
pub(crate) struct Door {
    listener: UnixListener,
    pub(crate) name: String,
}

impl Door {
    pub(crate) fn open(rank: Rank) -> Result<Self> {
        use std::hash::{BuildHasher as _, Hasher as _, RandomState};
        let name = format!(
            "hybrid-ep-{}-{rank}-{:x}",
            std::process::id(),
            RandomState::new().build_hasher().finish()
        );
        let listener =
            UnixListener::bind_addr(&address(&name)?).map_err(|error| broken("opening a socket", error))?;
        Ok(Self { listener, name })
    }
}

/// The memory of all peers, mapped here. Peers add to it through their sockets.
pub(crate) struct Mapped {
    pub(crate) peers: Vec<Option<Arc<Mutex<Reservation>>>>,
}

/// Connects to all peers and takes their connections; their memory is mapped as it comes.
///
/// `doors` are the peers' names by rank, `own_control` the own control block.
pub(crate) fn connect(
    rank: Rank,
    door: Door,
    doors: &[String],
    device: &Arc<Device>,
    own_control: DeviceAddress,
    timeout: Duration,
) -> Result<(Links, Mapped)> {
    let mut peers: Vec<Option<Arc<Mutex<Reservation>>>> = Vec::with_capacity(doors.len());
    for peer in 0..doors.len() {
        let own = peer == rank.index();
        peers.push(if own { None } else { Some(Arc::new(Mutex::new(Reservation::new(device)?))) });
    }
    let control = Arc::new(Mutex::new(Some(own_control)));
    // Connections wait in the listener's queue, so nobody waits for anybody here.
    let mut links = Links { rank, peers: Vec::new(), control: Arc::clone(&control) };
    for (peer, name) in doors.iter().enumerate().filter(|&(peer, _)| peer != rank.index()) {
        let mut link =
            UnixStream::connect_addr(&address(name)?).map_err(|error| broken("reaching a peer", error))?;
        link.set_read_timeout(Some(timeout)).map_err(|error| broken("reaching a peer", error))?;
        link.write_all(&rank.0.to_le_bytes()).map_err(|error| broken("greeting a peer", error))?;
        links.peers.push((Rank(peer as u32), link));
    }
    let since = Instant::now();
    let mut waiting_for: Vec<Rank> = links.peers.iter().map(|&(peer, _)| peer).collect();
    while !waiting_for.is_empty() {
        let (peer, link) = accept(&door, rank, &waiting_for, since, timeout)?;
        waiting_for.retain(|&other| other != peer);
        let memory = peers[peer.index()].as_ref().map_or_else(Weak::new, Arc::downgrade);
        // Whoever drops the buffer unmaps the memory, at a time of its own, not this thread.
        let (device, control) = (Arc::clone(device), Arc::clone(&control));
        std::thread::Builder::new()
            .name(format!("ep-link-{rank}-{peer}"))
            .spawn(move || serve(link, &memory, &device, &control, peer.index()))
            .map_err(|error| broken("starting a thread", error))?;
    }
    Ok((links, Mapped { peers }))
}

/// The connection of one of these peers.
fn accept(
    door: &Door,
    rank: Rank,
    waiting_for: &[Rank],
    since: Instant,
    timeout: Duration,
) -> Result<(Rank, UnixStream)> {
    let what = "taking a peer's connection";
    door.listener.set_nonblocking(true).map_err(|error| broken(what, error))?;
    loop {
        let left = timeout.saturating_sub(since.elapsed());
        match door.listener.accept() {
            // Who says nothing sensible is a stranger.
            Ok((link, _)) => {
                if let Ok(peer) = greeting(&link, left.max(RETRY))
                    && waiting_for.contains(&peer)
                {
                    return Ok((peer, link));
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if left.is_zero() {
                    let (peer, waited) = (waiting_for[0], since.elapsed());
                    return Err(
                        PeerError::joining(rank, peer, PeerFault::Absent, "its connection", waited).into()
                    );
                }
                std::thread::sleep(RETRY);
            }
            Err(error) => return Err(broken(what, error)),
        }
    }
}

/// Who it is that has connected.
fn greeting(mut link: &UnixStream, timeout: Duration) -> io::Result<Rank> {
    link.set_nonblocking(false)?;
    link.set_read_timeout(Some(timeout))?;
    let mut who = [0; 4];
    link.read_exact(&mut who)?;
    // What comes later comes at any time.
    link.set_read_timeout(None)?;
    Ok(Rank(u32::from_le_bytes(who)))
}

/// Maps what a peer sends until it leaves; then tells the kernels of this rank, which may be waiting for it.
fn serve(
    mut link: UnixStream,
    memory: &Weak<Mutex<Reservation>>,
    device: &Arc<Device>,
    control: &Mutex<Option<DeviceAddress>>,
    peer: usize,
) {
    let gone = loop {
        match receive(&link) {
            Ok(Some((FAREWELL, _))) => break LEFT,
            Ok(Some((bytes, Some(fd)))) => {
                // Without the buffer there is nobody to map it for.
                let Some(memory) = memory.upgrade() else { return };
                let mapped = Chunk::import(device, &fd, bytes as usize).and_then(|chunk| {
                    let mut memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
                    memory.push(chunk, &[device.ordinal])
                });
                // The peer turns the other answer into an error that names this rank.
                let answer = if mapped.is_ok() { MAPPED } else { NOT_MAPPED };
                if link.write_all(&[answer]).is_err() {
                    break DIED;
                }
            }
            Ok(_) | Err(_) => break DIED,
        }
    };
    let control = control.lock().unwrap_or_else(PoisonError::into_inner);
    if let (Some(own), Ok(stream)) = (*control, Stream::new(device)) {
        let word = own + (LEFT_OFFSET + 4 * peer) as DeviceAddress;
        // If this fails, waits for the peer end by their timeout.
        let _ = stream.upload(&gone.to_le_bytes(), word).and_then(|()| stream.synchronize());
    }
}

/// The next message; `None` at the end.
fn receive(link: &UnixStream) -> rustix::io::Result<Option<(u64, Option<OwnedFd>)>> {
    let mut bytes = [0; 8];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(
        link,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL,
    )?;
    if received.bytes < bytes.len() {
        return Ok(None);
    }
    let fd = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    Ok(Some((u64::from_le_bytes(bytes), fd)))
}

/// This rank's connections to its peers.
pub(crate) struct Links {
    rank: Rank,
    peers: Vec<(Rank, UnixStream)>,
    /// The own control block, as long as it is there.
    control: Arc<Mutex<Option<DeviceAddress>>>,
}

impl Announce for Links {
    fn announce(&mut self, chunk: &Chunk) -> Result<()> {
        const WAITED_FOR: &str = "it to map memory that this rank has added";
        let (rank, since) = (self.rank, Instant::now());
        let lost = |peer, error: &io::Error| {
            PeerError::joining(rank, peer, PeerFault::of_socket(error), WAITED_FOR, since.elapsed())
        };
        let fd = chunk.export()?;
        for (peer, link) in &mut self.peers {
            let fds = [fd.as_fd()];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            ancillary.push(SendAncillaryMessage::ScmRights(&fds));
            let bytes = (chunk.bytes as u64).to_le_bytes();
            sendmsg(&*link, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL)
                .map_err(|error| lost(*peer, &error.into()))?;
        }
        // All map at the same time.
        for (peer, link) in &mut self.peers {
            let mut answer = [0];
            link.read_exact(&mut answer).map_err(|error| lost(*peer, &error))?;
            if answer != [MAPPED] {
                return Err(broken(&format!("sharing memory with rank {peer}"), "it could not map it"));
            }
        }
        Ok(())
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        *self.control.lock().unwrap_or_else(PoisonError::into_inner) = None;
        for (_, link) in &mut self.peers {
            // A peer that is gone needs no farewell.
            let _ = link.write_all(&FAREWELL.to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_millis(200);

    fn knock(door: &Door, word: &[u8]) {
        let mut link = UnixStream::connect_addr(&address(&door.name).unwrap()).unwrap();
        link.write_all(word).unwrap();
    }

    #[test]
    fn a_peer_that_does_not_connect_is_named() {
        let door = Door::open(Rank(0)).unwrap();
        let error = accept(&door, Rank(0), &[Rank(2), Rank(3)], Instant::now(), TIMEOUT).unwrap_err();
        let said = error.to_string();
        assert!(said.starts_with("rank 2 never joined (join #0): rank 0 waited 0."), "{said}");
        assert!(said.ends_with(" s for its connection"), "{said}");
    }

    #[test]
    fn strangers_are_let_go_and_peers_found_behind_them() {
        let door = Door::open(Rank(1)).unwrap();
        // Somebody who says too little, a rank that is not awaited, and one that is.
        knock(&door, &[7]);
        knock(&door, &9u32.to_le_bytes());
        knock(&door, &2u32.to_le_bytes());
        let (peer, _) = accept(&door, Rank(1), &[Rank(0), Rank(2)], Instant::now(), TIMEOUT).unwrap();
        assert_eq!(peer, Rank(2));
    }
}
