//! The address of the rendezvous: a TCP port with a secret, or a local socket of this user without one.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use super::Watch;
use super::secret::{Key, Secret};
use super::wire::Socket;
use crate::error::{CallerError, EnvironmentError, Error, Result};

/// The bound for one attempt to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// The pause between two attempts to resolve a host.
const RESOLVE_PAUSE: Duration = Duration::from_millis(200);

fn unresolved(name: &str, error: std::io::Error) -> Error {
    let hint = "set MASTER_ADDR and MASTER_PORT, or HYBRID_EP_STORE";
    EnvironmentError::new(format!("resolving {name}"), error, hint).into()
}

/// The address where rank 0 listens, and the key that callers must know.
#[derive(Debug)]
pub(super) struct Store {
    /// The address as the caller gave it, for messages.
    name: String,
    way: Way,
    pub(super) key: Key,
}

#[derive(Debug)]
enum Way {
    Tcp(Vec<SocketAddr>),
    /// The name of a local socket in the abstract name space, which leaves no file behind.
    #[cfg(target_os = "linux")]
    SameUser(String),
}

impl Store {
    /// The store at `name` (`host:port`), whose host may have no address yet: tries to resolve it until `deadline`.
    pub(super) fn find(
        name: &str,
        secret: Option<&Secret>,
        deadline: Instant,
        watch: &Watch,
    ) -> Result<Self> {
        loop {
            match name.to_socket_addrs() {
                Ok(addresses) => return Self::at(name, addresses.collect(), secret),
                // The text is malformed, so another attempt would fail too.
                Err(error) if error.kind() == ErrorKind::InvalidInput => return Err(unresolved(name, error)),
                Err(error) if Instant::now() >= deadline => return Err(unresolved(name, error)),
                Err(_) => {}
            }
            watch.check()?;
            std::thread::sleep(RESOLVE_PAUSE.min(deadline.saturating_duration_since(Instant::now())));
        }
    }

    /// The store at `name` (`host:port`).
    pub(super) fn new(name: &str, secret: Option<&Secret>) -> Result<Self> {
        let addresses = name.to_socket_addrs().map_err(|error| unresolved(name, error))?;
        Self::at(name, addresses.collect(), secret)
    }

    fn at(name: &str, addresses: Vec<SocketAddr>, secret: Option<&Secret>) -> Result<Self> {
        if let Some(secret) = secret {
            return Ok(Self { name: name.into(), way: Way::Tcp(addresses), key: secret.key().clone() });
        }
        let problem = if !cfg!(target_os = "linux") {
            "is needed on systems other than Linux"
        } else if !addresses.iter().all(is_here) {
            "is needed when the store is on another machine"
        } else {
            return Ok(Self::same_user(name, addresses.first().map_or(0, SocketAddr::port)));
        };
        Err(CallerError::Config {
            key: "HYBRID_EP_SECRET",
            value: "(not set)".into(),
            problem: format!(
                "{problem} (the store is {name}): set it to the same random text on all ranks, or HYBRID_EP_SECRET_FILE to a file with it"
            ),
        }
        .into())
    }

    #[cfg(target_os = "linux")]
    fn same_user(name: &str, port: u16) -> Self {
        let user = rustix::process::geteuid().as_raw();
        let way = Way::SameUser(format!("hybrid-ep/{user}/{port}"));
        // This key is public. The listener authenticates a caller by the user that the system reports for the socket.
        Self { name: name.into(), way, key: Key::of(b"hybrid-ep same user", b"") }
    }

    #[cfg(not(target_os = "linux"))]
    fn same_user(name: &str, _port: u16) -> Self {
        Self { name: name.into(), way: Way::Tcp(Vec::new()), key: Key::of(b"no key", b"") }
    }

    /// The address, for messages.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Why ranks of other machines cannot reach the listener of this rank; empty if no reason is known.
    pub(super) fn only_here(&self) -> String {
        match &self.way {
            Way::Tcp(addresses) if addresses.iter().all(|address| address.ip().is_loopback()) => {
                let addresses: Vec<String> =
                    addresses.iter().map(|address| address.ip().to_string()).collect();
                format!(
                    "this rank listens at {}, which other machines cannot reach: set MASTER_ADDR or HYBRID_EP_STORE to its \
                     network address",
                    addresses.join(", ")
                )
            }
            _ => String::new(),
        }
    }

    /// The probable reason for rejected connections, for the error about a missing rank.
    pub(super) fn hint(&self) -> &'static str {
        match self.way {
            Way::Tcp(_) => {
                "do all ranks have the same HYBRID_EP_SECRET and run the same version of the library?"
            }
            #[cfg(target_os = "linux")]
            Way::SameUser(_) => {
                "without HYBRID_EP_SECRET only processes of this user in this network namespace can join"
            }
        }
    }

    /// The address of this machine from which packets to the store leave; `None` for a store that is a local socket.
    pub(super) fn facing_address(&self) -> Option<IpAddr> {
        match &self.way {
            #[cfg(target_os = "linux")]
            Way::Tcp(addresses) => {
                addresses.iter().find_map(|address| super::address_towards(&address.ip().to_string()))
            }
            _ => None,
        }
    }

    /// Listens for callers.
    pub(super) fn listen(&self) -> Result<Listener> {
        let failed = |error| {
            EnvironmentError::new(
                format!("listening at {}", self.name),
                error,
                "is another job using the port? set MASTER_PORT or HYBRID_EP_STORE to a free one",
            )
        };
        let listener = match &self.way {
            Way::Tcp(addresses) => TcpListener::bind(&addresses[..]).map(Listener::Tcp),
            #[cfg(target_os = "linux")]
            Way::SameUser(name) => super::local::listen(name).map(Listener::SameUser),
        };
        listener.and_then(Listener::prepared).map_err(|error| failed(error).into())
    }

    /// Tries to connect once; `None` if that failed.
    pub(super) fn connect(&self, deadline: Instant) -> Option<Socket> {
        match &self.way {
            Way::Tcp(addresses) => addresses.iter().find_map(|address| {
                let left = deadline.saturating_duration_since(Instant::now());
                let left = left.clamp(Duration::from_millis(1), CONNECT_TIMEOUT);
                let stream = TcpStream::connect_timeout(address, left).ok()?;
                (!is_self_connection(&stream)).then_some(Socket::Tcp(stream))
            }),
            #[cfg(target_os = "linux")]
            Way::SameUser(name) => super::local::connect(name).ok().map(|(stream, _)| Socket::Unix(stream)),
        }
    }
}

/// Whether an address belongs to this machine: only then can a socket be bound to it.
fn is_here(address: &SocketAddr) -> bool {
    let ip = address.ip();
    ip.is_loopback() || std::net::UdpSocket::bind((ip, 0)).is_ok()
}

/// Whether a connection has this socket at both ends. If no process listens at a local port, the system may choose the
/// same port for the connecting socket, and TCP then connects the socket to itself.
fn is_self_connection(stream: &TcpStream) -> bool {
    matches!((stream.local_addr(), stream.peer_addr()), (Ok(local), Ok(peer)) if local == peer)
}

/// A non-blocking listening socket.
#[derive(Debug)]
pub(super) enum Listener {
    Tcp(TcpListener),
    #[cfg(target_os = "linux")]
    SameUser(std::os::unix::net::UnixListener),
}

impl Listener {
    pub(super) fn prepared(self) -> std::io::Result<Self> {
        match &self {
            Self::Tcp(listener) => listener.set_nonblocking(true)?,
            #[cfg(target_os = "linux")]
            Self::SameUser(listener) => listener.set_nonblocking(true)?,
        }
        Ok(self)
    }

    /// Accepts the next connection; `Ok(None)` for a connection of another user, which it drops.
    pub(super) fn accept(&self) -> std::io::Result<Option<Socket>> {
        match self {
            Self::Tcp(listener) => listener.accept().map(|(stream, _)| Some(Socket::Tcp(stream))),
            #[cfg(target_os = "linux")]
            Self::SameUser(listener) => {
                let (stream, _) = listener.accept()?;
                Ok(super::local::same_user(&stream).map(|_| Socket::Unix(stream)))
            }
        }
    }
}

impl Listener {
    /// The network address at which ranks reach this listener; `None` if it is bound to all addresses, or is a
    /// local socket.
    pub(super) fn network_address(&self) -> Option<IpAddr> {
        match self {
            Self::Tcp(listener) => {
                listener.local_addr().ok().map(|at| at.ip()).filter(|ip| !ip.is_unspecified())
            }
            #[cfg(target_os = "linux")]
            Self::SameUser(_) => None,
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            #[cfg(target_os = "linux")]
            Self::SameUser(listener) => listener.as_fd(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn without_a_secret_ranks_join_on_this_machine_only() {
        // An address of the range reserved for documentation, which no machine has.
        let error = Store::new("192.0.2.1:29501", None).unwrap_err().to_string();
        assert!(error.starts_with("HYBRID_EP_SECRET = (not set): is needed"), "{error}");
        assert!(error.contains("192.0.2.1:29501") && error.contains("HYBRID_EP_SECRET_FILE"), "{error}");
        let secret = Secret::new(b"0123456789abcdef").unwrap();
        assert!(Store::new("192.0.2.1:29501", Some(&secret)).is_ok());
        #[cfg(target_os = "linux")]
        for name in ["127.0.0.1:1", "localhost:1", "0.0.0.0:1"] {
            assert!(matches!(Store::new(name, None).unwrap().way, Way::SameUser(_)), "{name}");
        }
        let error = Store::new("no port", None).unwrap_err().to_string();
        assert!(error.starts_with("resolving no port"), "{error}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the system for an address")]
    fn a_host_without_an_address_is_asked_for_again_and_a_wrong_text_is_not() {
        let watch = Watch { rank: crate::Rank(1), interrupt: crate::Interrupt::default() };
        let find = |name: &str, wait: u64| {
            let start = Instant::now();
            let error = Store::find(name, None, start + Duration::from_millis(wait), &watch).unwrap_err();
            (error.to_string(), start.elapsed())
        };
        // A name that never has an address (RFC 6761).
        let (error, took) = find("rank-0.invalid:1", 300);
        assert!(
            error.starts_with("resolving rank-0.invalid:1") && took >= Duration::from_millis(300),
            "{error}"
        );
        let (error, _) = find("no port", u64::MAX >> 20);
        assert!(error.starts_with("resolving no port"), "{error}");
    }

    fn with_secret(name: &str) -> Store {
        Store::new(name, Some(&Secret::new(b"0123456789abcdef").unwrap())).unwrap()
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn packets_to_a_store_leave_from_the_address_that_faces_it() {
        assert_eq!(with_secret("127.0.0.1:1").facing_address(), Some(Ipv4Addr::LOCALHOST.into()));
        assert_eq!(Store::new("127.0.0.1:1", None).unwrap().facing_address(), None, "a local socket");
    }

    #[test]
    fn a_listener_that_other_machines_cannot_reach_says_so() {
        let said = |name| with_secret(name).only_here();
        assert!(said("127.0.0.1:1").contains("listens at 127.0.0.1, which other machines cannot reach"));
        assert_eq!(said("192.0.2.1:1"), "");
    }
}
