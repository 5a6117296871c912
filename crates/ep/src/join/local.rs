//! Sockets between processes of one user on one machine. Their names are in Linux's abstract name space, where a name
//! exists as long as its socket.

use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

/// The process ID of the other end of a socket; `None` if that process is not visible in this PID namespace.
pub(super) type Peer = Option<u32>;

pub(super) fn listen(name: &str) -> io::Result<UnixListener> {
    UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)
}

/// Connects to a listener of this user, without blocking.
pub(super) fn connect(name: &str) -> io::Result<(UnixStream, Peer)> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    // `connect` blocks while the listener's queue is full, unless the socket is already non-blocking.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    let stream = UnixStream::from(socket);
    match same_user(&stream) {
        Some(peer) => Ok((stream, peer)),
        // Abstract names have no owner: any user may have bound this name first.
        None => Err(io::Error::new(io::ErrorKind::PermissionDenied, "another user listens there")),
    }
}

/// The process at the other end, if it runs as this user. The system reports the user, so the peer cannot forge it.
pub(super) fn same_user(stream: &UnixStream) -> Option<Peer> {
    let peer = getsockopt(stream, PeerCredentials).ok()?;
    let own = rustix::process::geteuid().as_raw();
    (peer.uid() == own).then(|| u32::try_from(peer.pid()).ok().filter(|&pid| pid != 0))
}

#[cfg(test)]
mod tests {
    use rustix::fs::{OFlags, fcntl_getfl};
    use rustix::io::{FdFlags, fcntl_getfd};

    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_connection_neither_blocks_nor_stays_open_in_a_program_that_this_one_starts() {
        let name = format!("hybrid-ep-test-flags-{}", std::process::id());
        let _listener = listen(&name).unwrap();
        let (stream, _) = connect(&name).unwrap();
        assert!(fcntl_getfl(&stream).unwrap().contains(OFlags::NONBLOCK));
        assert!(fcntl_getfd(&stream).unwrap().contains(FdFlags::CLOEXEC));
    }
}
