//! Sockets between processes of one user on one machine. Their names are in Linux's abstract name space, where a name
//! lives as long as its socket.

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
    use rustix::process::Uid;
    use rustix::thread::set_thread_res_uid;

    use super::super::handshake::Role;
    use super::super::reception::Reception;
    use super::super::secret::Key;
    use super::super::store::Listener;
    use super::*;

    /// Runs `f` in a thread that has become another user; `None` if this process may not become one.
    fn as_another_user<T: Send>(f: impl FnOnce() -> T + Send) -> Option<T> {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                // The call itself, not glibc's function, which changes all threads.
                let user = Uid::from_raw(65_534);
                set_thread_res_uid(user, user, user).ok().map(|()| f())
            });
            thread.join().expect("the thread of another user")
        })
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn connections_of_another_user_are_dropped_at_both_ends() {
        if as_another_user(|| ()).is_none() {
            eprintln!("skipped: this process cannot become another user");
            return;
        }
        let name = format!("hybrid-ep-test-{}", std::process::id());
        let listener = Listener::SameUser(listen(&name).expect("a free name"));
        let listener = listener.prepared().expect("a listener that does not block");
        let key = Key::of(b"test", b"");
        let mut reception = Reception::new(&listener, &key, Role::Rendezvous);
        // The other user does not trust a listener that is not its own.
        let refused = as_another_user(|| connect(&name).map(drop).map_err(|error| error.kind()));
        assert_eq!(refused, Some(Err(io::ErrorKind::PermissionDenied)));
        let name = SocketAddr::from_abstract_name(&name).expect("a name");
        let forced: Vec<_> = (0..2)
            .map(|_| as_another_user(|| UnixStream::connect_addr(&name)).expect("root becomes another user"))
            .collect();
        assert!(forced.iter().all(Result::is_ok), "{forced:?}");
        let _own = UnixStream::connect_addr(&name).expect("a connection of this user");
        assert!(reception.turn().expect("the listener works").is_empty());
        assert_eq!((reception.pending(), reception.dropped), (1, 3));
    }
}
