//! A non-blocking stream socket with its received and unsent bytes. Local sockets also carry descriptors.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Maximum number of bytes that one read allocates, so that a forged length does not make this process allocate that length.
const READ: usize = 64 << 10;

/// A stream socket.
#[derive(Debug)]
pub(super) enum Socket {
    Tcp(TcpStream),
    #[cfg(target_os = "linux")]
    Unix(std::os::unix::net::UnixStream),
}

impl Socket {
    fn prepare(&self) -> std::io::Result<()> {
        match self {
            Self::Tcp(stream) => {
                stream.set_nodelay(true)?;
                stream.set_nonblocking(true)
            }
            #[cfg(target_os = "linux")]
            Self::Unix(stream) => stream.set_nonblocking(true),
        }
    }

    /// Makes the system end a TCP connection when the other machine acknowledges nothing for `timeout`, even while this
    /// end sends nothing. Systems other than Linux detect it later.
    pub(super) fn watch(&self, timeout: Duration) {
        #[cfg(target_os = "linux")]
        if let Self::Tcp(stream) = self {
            let _ = super::network::watch(stream, timeout);
        }
        #[cfg(not(target_os = "linux"))]
        let _ = timeout;
    }

    /// Reads bytes. Appends the descriptors that arrive with them to `descriptors`, or closes them if it is `None`.
    fn read(&self, bytes: &mut [u8], descriptors: Option<&mut VecDeque<OwnedFd>>) -> std::io::Result<usize> {
        match (self, descriptors) {
            #[cfg(target_os = "linux")]
            (Self::Unix(stream), Some(descriptors)) => receive_with_descriptors(stream, bytes, descriptors),
            // A plain read receives no descriptors: the system closes them.
            #[cfg(target_os = "linux")]
            (Self::Unix(stream), None) => (&*stream).read(bytes),
            (Self::Tcp(stream), _) => (&*stream).read(bytes),
        }
    }

    fn write(&self, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) -> std::io::Result<usize> {
        match self {
            Self::Tcp(stream) => (&*stream).write(bytes),
            #[cfg(target_os = "linux")]
            Self::Unix(stream) => send_with_descriptor(stream, bytes, descriptor),
        }
    }

    pub(super) fn shut_down(&self) {
        // Shutting down fails if the connection has already ended, which is fine.
        let _ = match self {
            Self::Tcp(stream) => stream.shutdown(std::net::Shutdown::Write),
            #[cfg(target_os = "linux")]
            Self::Unix(stream) => stream.shutdown(std::net::Shutdown::Write),
        };
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            #[cfg(target_os = "linux")]
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

#[cfg(target_os = "linux")]
fn receive_with_descriptors(
    stream: &std::os::unix::net::UnixStream,
    bytes: &mut [u8],
    descriptors: &mut VecDeque<OwnedFd>,
) -> std::io::Result<usize> {
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
    // A valid message has at most one descriptor. The system closes the descriptors that do not fit.
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let iov = &mut [std::io::IoSliceMut::new(bytes)];
    let received = recvmsg(stream, iov, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(found) = message {
            descriptors.extend(found);
        }
    }
    // A message has at most one descriptor and is read whole, so only a faulty peer sends more.
    descriptors.truncate(2);
    Ok(received.bytes)
}

#[cfg(target_os = "linux")]
fn send_with_descriptor(
    stream: &std::os::unix::net::UnixStream,
    bytes: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
) -> std::io::Result<usize> {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors = descriptor.map(|descriptor| [descriptor]);
    if let Some(descriptors) = &descriptors {
        ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    Ok(sendmsg(stream, &[std::io::IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?)
}

/// Bytes to send.
#[derive(Debug)]
pub(super) enum Piece {
    Own(Vec<u8>),
    /// Bytes that several connections send.
    Shared(Arc<Vec<u8>>),
    /// Bytes with a descriptor, which is sent with the first byte.
    WithDescriptor(Vec<u8>, OwnedFd),
}

impl Piece {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Own(bytes) | Self::WithDescriptor(bytes, _) => bytes,
            Self::Shared(bytes) => bytes,
        }
    }
}

/// Pause before another attempt to send, if the system lacked a resource.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(1);

/// A socket with its received and unsent bytes.
#[derive(Debug)]
pub(super) struct Wire {
    /// Shared by the halves of a split connection, so that both halves use one descriptor.
    socket: Arc<Socket>,
    /// Received bytes that were not taken.
    incoming: Vec<u8>,
    /// Received descriptors; `None` while this end accepts none.
    descriptors: Option<VecDeque<OwnedFd>>,
    outgoing: VecDeque<Piece>,
    /// Bytes of the first piece of `outgoing` that were sent.
    sent: usize,
    /// No bytes can arrive any more.
    ended: bool,
    /// No bytes can be sent any more.
    unwritable: bool,
    /// Why the system did not send the first piece of `outgoing`, if the reason may pass.
    shortage: Option<std::io::Error>,
    failure: Failure,
}

/// The error that ended a connection. The system reports it once, to the first call on the socket. So the halves of a
/// split connection share this value, and hold its lock during every call on the socket.
#[derive(Debug, Clone, Default)]
struct Failure(Arc<Mutex<Option<ErrorKind>>>);

impl Failure {
    /// Calls the socket, and stores an error that ends the connection.
    fn watch<T>(&self, call: impl FnOnce() -> std::io::Result<T>) -> std::io::Result<T> {
        let mut failure = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        call().inspect_err(|error| {
            let passes = matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock);
            if !passes && !is_shortage(error) {
                failure.get_or_insert(error.kind());
            }
        })
    }
}

/// Whether the system lacks a resource for sending: memory, or room for descriptors that no receiver has taken yet. This is
/// not the other end's fault and may pass.
fn is_shortage(error: &std::io::Error) -> bool {
    let code = error.raw_os_error().map(rustix::io::Errno::from_raw_os_error);
    code.is_some_and(|code| {
        [rustix::io::Errno::TOOMANYREFS, rustix::io::Errno::NOBUFS, rustix::io::Errno::NOMEM].contains(&code)
    })
}

impl Wire {
    pub(super) fn new(socket: Socket) -> std::io::Result<Self> {
        socket.prepare()?;
        Ok(Self::with(Arc::new(socket), Failure::default()))
    }

    fn with(socket: Arc<Socket>, failure: Failure) -> Self {
        let (incoming, outgoing) = (Vec::new(), VecDeque::new());
        let (sent, ended, unwritable) = (0, false, false);
        Self {
            socket,
            incoming,
            descriptors: None,
            outgoing,
            sent,
            ended,
            unwritable,
            shortage: None,
            failure,
        }
    }

    /// A second wire on the same socket. One of the two only sends, and the other only receives.
    #[cfg(target_os = "linux")]
    pub(super) fn for_sending(&self) -> Self {
        Self::with(Arc::clone(&self.socket), self.failure.clone())
    }

    /// The error that ended the connection; `None` while it works, and if the other end has closed it.
    pub(super) fn failure(&self) -> Option<ErrorKind> {
        *self.failure.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts descriptors from now on.
    pub(super) fn take_descriptors(&mut self) {
        self.descriptors.get_or_insert_default();
    }

    /// The oldest received descriptor.
    pub(super) fn descriptor(&mut self) -> Option<OwnedFd> {
        self.descriptors.as_mut()?.pop_front()
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Takes the next `len` bytes once they have arrived. Never reads beyond them, so that a later message, and the
    /// descriptor with it, stay in the socket.
    pub(super) fn take(&mut self, len: usize) -> Option<Vec<u8>> {
        self.fill(len).then(|| std::mem::take(&mut self.incoming))
    }

    /// The next `len` bytes, without taking them, once they have arrived.
    pub(super) fn peek(&mut self, len: usize) -> Option<&[u8]> {
        self.fill(len).then(|| &self.incoming[..len])
    }

    fn fill(&mut self, len: usize) -> bool {
        while self.incoming.len() < len && !self.ended {
            let at = self.incoming.len();
            self.incoming.resize(len.min(at + READ), 0);
            let (socket, descriptors) = (&self.socket, self.descriptors.as_mut());
            let read = self.failure.watch(|| socket.read(&mut self.incoming[at..], descriptors));
            self.incoming.truncate(at + *read.as_ref().unwrap_or(&0));
            match read {
                Ok(0) => self.ended = true,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // All bytes that arrived before the error have been read.
                Err(_) => self.ended = true,
            }
        }
        self.incoming.len() >= len
    }

    /// Whether no more bytes can arrive.
    pub(super) fn ended(&self) -> bool {
        self.ended
    }

    /// Whether received bytes were not taken.
    #[cfg(target_os = "linux")]
    pub(super) fn holds(&self) -> bool {
        !self.incoming.is_empty()
    }

    /// Whether no more bytes can be sent.
    #[cfg(target_os = "linux")]
    pub(super) fn is_unwritable(&self) -> bool {
        self.unwritable
    }

    pub(super) fn send(&mut self, piece: Piece) {
        self.outgoing.push_back(piece);
    }

    /// Sends as many of the queued bytes as the socket accepts now.
    pub(super) fn flush(&mut self) {
        while let Some(piece) = self.outgoing.front() {
            let bytes = piece.bytes();
            let descriptor = match piece {
                Piece::WithDescriptor(_, descriptor) if self.sent == 0 => Some(descriptor.as_fd()),
                _ => None,
            };
            if self.unwritable || self.sent == bytes.len() {
                self.outgoing.pop_front();
                self.sent = 0;
                continue;
            }
            match self.failure.watch(|| self.socket.write(&bytes[self.sent..], descriptor)) {
                Ok(sent) => {
                    self.sent += sent;
                    self.shortage = None;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if is_shortage(&error) => {
                    self.shortage = Some(error);
                    return;
                }
                // Bytes that the other end sent before it closed can still be read, so only sending ends here.
                Err(_) => self.unwritable = true,
            }
        }
    }

    /// Sends the queued bytes. Waits at most until `until` for the other end to take them.
    pub(super) fn flush_until(&mut self, until: Instant) {
        self.flush();
        while self.has_unsent() && Instant::now() < until {
            // `poll` reports room for bytes, but not the end of other shortages.
            match &self.shortage {
                None => wait(&mut [PollFd::new(&*self.socket, PollFlags::OUT)], until),
                Some(_) => std::thread::sleep(SHORTAGE_PAUSE),
            }
            self.flush();
        }
    }

    /// The shortage because of which unsent bytes are queued; `None` if they wait for the other end.
    #[cfg(target_os = "linux")]
    pub(super) fn take_shortage(&mut self) -> Option<std::io::Error> {
        self.shortage.take()
    }

    /// Whether unsent bytes are queued.
    pub(super) fn has_unsent(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Closes the connection so that the sent bytes arrive. If this end closed a socket with unread bytes, the system
    /// would reset the connection and discard the sent bytes. So this function first reads the unread bytes.
    pub(super) fn finish(mut self) {
        self.flush();
        self.socket.shut_down();
        let mut rest = [0; READ];
        // The bound covers all bytes that a socket can hold. A peer that keeps sending must not keep this end busy.
        for _ in 0..256 {
            if !matches!(self.socket.read(&mut rest, None), Ok(1..)) {
                break;
            }
        }
    }

    /// The events to poll for.
    pub(super) fn interest(&self) -> PollFd<'_> {
        let writes = if self.has_unsent() { PollFlags::OUT } else { PollFlags::empty() };
        PollFd::new(&*self.socket, PollFlags::IN | writes)
    }
}

/// Waits until one of `fds` is ready, or until `until`. A signal may end the wait early.
pub(super) fn wait(fds: &mut [PollFd<'_>], until: Instant) {
    // A little longer than asked for, so that the caller's clock is past `until` afterwards.
    let left = until.saturating_duration_since(Instant::now()) + Duration::from_micros(50);
    let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    // Treat a failed poll as an early end: the caller checks its connections and waits again.
    if poll(fds, Some(&timeout)).is_err() {
        std::thread::sleep(Duration::from_millis(1).min(left));
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn over_tcp() -> (Wire, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let peer = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
        (Wire::new(Socket::Tcp(listener.accept().expect("a connection").0)).expect("a wire"), peer)
    }

    #[test]
    fn a_shortage_is_no_end_of_the_connection() {
        let failure = Failure::default();
        let fails = |code: rustix::io::Errno| drop(failure.watch::<()>(|| Err(code.into())));
        use rustix::io::Errno;
        let passing = [Errno::TOOMANYREFS, Errno::NOBUFS, Errno::NOMEM, Errno::AGAIN, Errno::INTR];
        passing.into_iter().for_each(fails);
        assert_eq!(*failure.0.lock().unwrap(), None);
        fails(Errno::PIPE);
        assert_eq!(*failure.0.lock().unwrap(), Some(ErrorKind::BrokenPipe));
    }

    fn two_wires() -> (Wire, Wire) {
        let (one, other) = UnixStream::pair().expect("a pair of sockets");
        [one, other].map(|end| Wire::new(Socket::Unix(end)).expect("a wire")).into()
    }

    /// More bytes than a socket holds.
    fn long() -> Vec<u8> {
        (0..4 << 20).map(|at: u32| (at % 251) as u8).collect()
    }

    fn wants_to_write(wire: &Wire) -> bool {
        let mut fds = [wire.interest()];
        wait(&mut fds, Instant::now());
        fds[0].revents().contains(PollFlags::OUT)
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn bytes_that_find_no_room_are_sent_later() {
        let (mut one, mut other) = two_wires();
        assert!(!one.has_unsent() && !wants_to_write(&one));
        one.send(Piece::Own(long()));
        one.flush();
        assert!(one.has_unsent() && !one.is_unwritable());
        let mut found = None;
        while found.is_none() {
            found = other.take(long().len());
            one.flush();
        }
        assert!(found == Some(long()) && !one.has_unsent());
        one.send(Piece::Own(vec![1]));
        assert!(wants_to_write(&one));
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_descriptor_goes_with_the_first_byte_only() {
        let (mut one, mut other) = two_wires();
        other.take_descriptors();
        let descriptor = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        one.send(Piece::WithDescriptor(long(), descriptor));
        let mut found = None;
        while found.is_none() {
            one.flush();
            found = other.take(long().len());
        }
        assert!(other.descriptor().is_some() && other.descriptor().is_none());
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn peeked_bytes_are_held_until_they_are_taken() {
        let (mut one, mut other) = two_wires();
        one.send(Piece::Own(vec![1, 2, 3]));
        one.flush();
        assert!(!other.holds());
        assert_eq!(other.peek(2), Some(&[1, 2][..]));
        assert!(other.holds());
        assert_eq!(other.take(2), Some(vec![1, 2]));
        assert!(!other.holds() && !other.ended());
        assert_eq!(other.take(1), Some(vec![3]));
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_peer_that_is_gone_ends_both_directions() {
        let (mut one, other) = two_wires();
        drop(other);
        one.send(Piece::Own(vec![1]));
        one.flush();
        assert!(one.is_unwritable() && !one.has_unsent());
        assert_eq!(one.failure(), Some(ErrorKind::BrokenPipe));
        assert!(one.take(1).is_none() && one.ended());
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_connection_that_is_reset_ends_with_its_error() {
        let (mut wire, peer) = over_tcp();
        assert_eq!(wire.failure(), None);
        wire.send(Piece::Own(vec![1]));
        wire.flush();
        // A socket that closes with unread bytes resets the connection.
        while peer.peek(&mut [0]).unwrap() == 0 {}
        drop(peer);
        while !wire.ended() {
            assert_eq!(wire.take(1), None);
        }
        assert_eq!(wire.failure(), Some(ErrorKind::ConnectionReset));
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_wire_that_finishes_delivers_its_bytes_and_does_not_reset_the_connection() {
        let (socket, mut peer) = UnixStream::pair().unwrap();
        let mut wire = Wire::new(Socket::Unix(socket)).unwrap();
        peer.write_all(&[7; 2 * READ]).unwrap();
        wire.send(Piece::Own(b"the last message".to_vec()));
        wire.finish();
        let mut found = Vec::new();
        peer.read_to_end(&mut found).unwrap();
        assert_eq!(found, b"the last message");
    }
}
