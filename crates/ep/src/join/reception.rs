//! The unauthenticated connections of a listener, bounded in number and time.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use rustix::event::PollFd;

use super::channel::Channel;
use super::handshake::{Claim, Inbound, Progress, Role};
use super::secret::Key;
use super::store::Listener;
use crate::error::{EnvironmentError, Result};

/// A connection that is not authenticated within this time is dropped.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(2);
/// Maximum number of unauthenticated connections. A further one evicts the oldest.
const MAX_PENDING: usize = 128;
/// Maximum number of connections that one call of [`Reception::turn`] accepts, so that it also serves the pending ones.
const AT_ONCE: usize = 64;

/// The unauthenticated connections of one listener.
#[derive(Debug)]
pub(super) struct Reception<'a> {
    listener: &'a Listener,
    key: &'a Key,
    role: Role,
    pending: Vec<Inbound>,
    /// Number of connections that were dropped.
    pub(super) dropped: u64,
    /// Accepting failed for lack of descriptors; retry at this time.
    pause: Option<Instant>,
}

impl<'a> Reception<'a> {
    pub(super) fn new(listener: &'a Listener, key: &'a Key, role: Role) -> Self {
        Self { listener, key, role, pending: Vec::new(), dropped: 0, pause: None }
    }

    /// Accepts connections and advances the pending handshakes. Returns the connections that are now authenticated.
    pub(super) fn turn(&mut self) -> Result<Vec<(Claim, Channel)>> {
        self.accept()?;
        let mut proven = Vec::new();
        let (mut waiting, key, role) = (Vec::new(), self.key, self.role);
        for mut inbound in self.pending.drain(..) {
            match inbound.advance(key, role)? {
                Progress::Done(claim, channel) => proven.push((claim, channel)),
                Progress::Waiting if inbound.since.elapsed() < HANDSHAKE => waiting.push(inbound),
                Progress::Waiting | Progress::Unauthenticated => self.dropped += 1,
            }
        }
        self.pending = waiting;
        Ok(proven)
    }

    fn accept(&mut self) -> Result<()> {
        if self.pause.is_some_and(|until| Instant::now() < until) {
            return Ok(());
        }
        self.pause = None;
        for _ in 0..AT_ONCE {
            match self.listener.accept() {
                Ok(Some(socket)) => match Inbound::new(socket) {
                    Ok(inbound) => self.pending.push(inbound),
                    Err(_) => self.dropped += 1,
                },
                Ok(None) => self.dropped += 1,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                // The connection ended before it was accepted.
                Err(error)
                    if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(error) if self.pending.is_empty() && error.kind() == ErrorKind::InvalidInput => {
                    return Err(EnvironmentError::new("accepting ranks", error, "").into());
                }
                // No descriptor is free. Drop a pending connection, and retry a little later.
                Err(_) => {
                    self.evict();
                    self.pause = Some(Instant::now() + Duration::from_millis(5));
                    return Ok(());
                }
            }
            if self.pending.len() > MAX_PENDING {
                self.evict();
            }
        }
        Ok(())
    }

    /// Drops the oldest connection, preferring those without a valid offer.
    fn evict(&mut self) {
        let oldest = |known: bool| self.pending.iter().position(|inbound| inbound.is_known() == known);
        if let Some(at) = oldest(false).or_else(|| oldest(true)) {
            self.pending.remove(at);
            self.dropped += 1;
        }
    }

    /// Adds the descriptors to poll to `fds`.
    pub(super) fn interest<'b>(&'b self, fds: &mut Vec<PollFd<'b>>) {
        if self.pause.is_none() {
            fds.push(PollFd::new(self.listener, rustix::event::PollFlags::IN));
        }
        fds.extend(self.pending.iter().filter_map(Inbound::wire).map(|wire| wire.interest()));
    }

    /// When to call [`turn`](Self::turn) again even if no descriptor is ready.
    pub(super) fn next_look(&self) -> Option<Instant> {
        let oldest = self.pending.iter().map(|inbound| inbound.since + HANDSHAKE).min();
        self.pause.into_iter().chain(oldest).min()
    }
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener, TcpStream};

    use super::super::handshake::Outbound;
    use super::super::wire::Socket;
    use super::*;
    use crate::topology::Rank;

    const CLAIM: Claim = Claim { from: Rank(1), to: Rank(0), ranks: 2, generation: 0 };

    fn listener() -> (Listener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        (Listener::Tcp(listener).prepared().unwrap(), address)
    }

    /// Accepts connections until the reception has seen `count` of them. Keeps them from timing out meanwhile: a busy machine
    /// may need longer than [`HANDSHAKE`] to accept all of them.
    fn accept(reception: &mut Reception<'_>, count: usize) {
        while reception.pending.len() + (reception.dropped as usize) < count {
            for inbound in &mut reception.pending {
                inbound.since = Instant::now();
            }
            assert!(reception.turn().unwrap().is_empty());
            std::thread::yield_now();
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn idle_connections_are_bounded_and_make_way_for_a_member() {
        let (listener, address) = listener();
        let key = Key::of(b"test", b"");
        let mut reception = Reception::new(&listener, &key, Role::Rendezvous);
        assert_eq!(reception.next_look(), None);
        let socket = Socket::Tcp(TcpStream::connect(address).unwrap());
        let mut member = Outbound::new(socket, &key, Role::Rendezvous, CLAIM).unwrap().unwrap();
        accept(&mut reception, 1);
        while !reception.pending[0].is_known() {
            assert!(reception.turn().unwrap().is_empty());
        }
        assert_eq!(reception.next_look(), Some(reception.pending[0].since + HANDSHAKE));
        let mut idle = Vec::new();
        // The member, and as many other connections as the reception holds.
        for connections in 2..=MAX_PENDING {
            idle.push(TcpStream::connect(address).unwrap());
            accept(&mut reception, connections);
        }
        assert_eq!((reception.pending.len(), reception.dropped), (MAX_PENDING, 0));
        for further in 1..=3 {
            idle.push(TcpStream::connect(address).unwrap());
            accept(&mut reception, MAX_PENDING + further);
            assert_eq!((reception.pending.len(), reception.dropped), (MAX_PENDING, further as u64));
        }
        // The member came first, and was not dropped.
        assert!(reception.pending[0].is_known());
        while !matches!(member.advance(&key), Progress::Done(..)) {}
        let proven = loop {
            let proven = reception.turn().unwrap();
            if !proven.is_empty() {
                break proven;
            }
        };
        assert_eq!(proven[0].0, CLAIM);
        assert_eq!(reception.pending.len(), MAX_PENDING - 1);
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_silent_connection_is_dropped_after_the_time_of_a_handshake() {
        let (listener, address) = listener();
        let key = Key::of(b"test", b"");
        let mut reception = Reception::new(&listener, &key, Role::Rendezvous);
        let _idle = TcpStream::connect(address).unwrap();
        accept(&mut reception, 1);
        assert_eq!((reception.pending.len(), reception.dropped), (1, 0));
        reception.pending[0].since -= HANDSHAKE;
        assert!(reception.turn().unwrap().is_empty());
        assert_eq!((reception.pending.len(), reception.dropped), (0, 1));
    }

    /// Runs `f` in a thread that has become another user; `None` if this process may not become one.
    #[cfg(target_os = "linux")]
    fn as_another_user<T: Send>(f: impl FnOnce() -> T + Send) -> Option<T> {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                // The system call itself: glibc's function changes the user of all threads.
                let user = rustix::process::Uid::from_raw(65_534);
                rustix::thread::set_thread_res_uid(user, user, user).ok().map(|()| f())
            });
            thread.join().expect("the thread of another user")
        })
    }

    #[test]
    #[cfg(target_os = "linux")]
    #[cfg_attr(miri, ignore = "sockets")]
    fn connections_of_another_user_are_dropped_at_both_ends() {
        if as_another_user(|| ()).is_none() {
            eprintln!("skipped: this process cannot become another user");
            return;
        }
        use std::os::linux::net::SocketAddrExt as _;
        use std::os::unix::net::{SocketAddr, UnixStream};

        use super::super::local::{connect, listen};
        let name = format!("hybrid-ep-test-{}", std::process::id());
        let listener = Listener::SameUser(listen(&name).expect("a free name"));
        let listener = listener.prepared().expect("a listener that does not block");
        let key = Key::of(b"test", b"");
        let mut reception = Reception::new(&listener, &key, Role::Rendezvous);
        // The other user does not trust a listener that is not its own.
        let refused = as_another_user(|| connect(&name).map(drop).map_err(|error| error.kind()));
        assert_eq!(refused, Some(Err(ErrorKind::PermissionDenied)));
        let name = SocketAddr::from_abstract_name(&name).expect("a name");
        let forced: Vec<_> = (0..2)
            .map(|_| as_another_user(|| UnixStream::connect_addr(&name)).expect("root becomes another user"))
            .collect();
        assert!(forced.iter().all(Result::is_ok), "{forced:?}");
        let _own = UnixStream::connect_addr(&name).expect("a connection of this user");
        assert!(reception.turn().expect("the listener works").is_empty());
        assert_eq!((reception.pending.len(), reception.dropped), (1, 3));
    }
}
