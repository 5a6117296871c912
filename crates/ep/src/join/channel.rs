//! Messages of an authenticated connection. Each message has a length and an HMAC-SHA256 code over its number and
//! content, which only the other end can make.

use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::secret::{Code, Key};
use super::wire::{Piece, Wire};

/// The longest body of a message, in bytes.
pub(crate) const MAX_MESSAGE: usize = 64 << 20;
/// Bytes of the length before a message.
const HEAD: usize = size_of::<u32>();
const CODE: usize = size_of::<Code>();

/// One direction of a connection.
#[derive(Debug)]
pub(super) struct Direction {
    key: Key,
    /// Number of messages so far. A message's code covers this number, so a repeated, omitted or reordered message has a wrong
    /// code.
    count: u64,
}

impl Direction {
    pub(super) fn new(key: Key) -> Self {
        Self { key, count: 0 }
    }

    /// A direction that carries no messages.
    #[cfg(target_os = "linux")]
    fn silent() -> Self {
        Self::new(Key::of(b"no direction", b""))
    }

    fn code(&mut self, head: &[u8], parts: &[&[u8]]) -> Code {
        let count = self.count.to_le_bytes();
        self.count += 1;
        let all: Vec<&[u8]> = [&count[..], head].into_iter().chain(parts.iter().copied()).collect();
        self.key.code(b"message", &all)
    }

    fn verify(&mut self, head: &[u8], parts: &[&[u8]], code: &[u8]) -> bool {
        let count = self.count.to_le_bytes();
        self.count += 1;
        let all: Vec<&[u8]> = [&count[..], head].into_iter().chain(parts.iter().copied()).collect();
        self.key.verify(b"message", &all, code)
    }
}

/// The result of receiving.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Incoming {
    /// A message: its kind in the first byte, then its body.
    Message(Vec<u8>),
    /// No message follows.
    End(End),
}

/// Why no message follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// The other end closed the connection, or its process ended.
    Closed,
    /// The other end sent a malformed message.
    Malformed,
    /// The network does not reach the other end.
    Unreachable,
}

impl End {
    /// Why a wire has ended.
    fn of(wire: &Wire) -> Self {
        if wire.failure().is_some_and(is_unreachable) { Self::Unreachable } else { Self::Closed }
    }
}

/// Whether an error says that the network does not reach the other end: the other end's machine acknowledges nothing, or a
/// router reports that it cannot be reached.
pub(super) fn is_unreachable(error: ErrorKind) -> bool {
    use ErrorKind::{HostUnreachable, NetworkDown, NetworkUnreachable, TimedOut};
    matches!(error, TimedOut | HostUnreachable | NetworkUnreachable | NetworkDown)
}

/// A connection whose other end has proven that it is a member of the job.
#[derive(Debug)]
pub(super) struct Channel {
    wire: Wire,
    inward: Direction,
    outward: Direction,
    /// The longest body that this end accepts, in bytes.
    longest: usize,
    malformed: bool,
}

impl Channel {
    pub(super) fn new(wire: Wire, inward: Direction, outward: Direction) -> Self {
        Self { wire, inward, outward, longest: MAX_MESSAGE, malformed: false }
    }

    /// From now on, accepts no body longer than `bytes`.
    #[cfg(target_os = "linux")]
    pub(super) fn accept_at_most(&mut self, bytes: usize) {
        self.longest = bytes;
    }

    pub(super) fn wire(&self) -> &Wire {
        &self.wire
    }

    /// Closes the connection. Messages that were sent still arrive.
    pub(super) fn finish(self) {
        self.wire.finish();
    }

    pub(super) fn wire_mut(&mut self) -> &mut Wire {
        &mut self.wire
    }

    /// Queues a message. [`Wire::flush`] sends it.
    pub(super) fn send(&mut self, kind: u8, body: &[u8]) {
        let message = [&[kind], body].concat();
        self.put(Piece::Own(message));
    }

    /// Like [`send`](Self::send), with a body that several connections share without copying it.
    pub(super) fn send_shared(&mut self, kind: u8, body: &Arc<Vec<u8>>) {
        let head = ((1 + body.len()) as u32).to_le_bytes();
        let code = self.outward.code(&head, &[&[kind], body]);
        self.wire.send(Piece::Own([&head[..], &[kind]].concat()));
        self.wire.send(Piece::Shared(Arc::clone(body)));
        self.wire.send(Piece::Own(code.to_vec()));
    }

    /// Like [`send`](Self::send), with a descriptor.
    #[cfg(target_os = "linux")]
    pub(super) fn send_descriptor(&mut self, kind: u8, body: &[u8], descriptor: OwnedFd) {
        let message = [&[kind], body].concat();
        self.put(Piece::WithDescriptor(message, descriptor));
    }

    fn put(&mut self, piece: Piece) {
        let message = piece.bytes();
        let head = (message.len() as u32).to_le_bytes();
        // The code covers kind and body as two parts, because the receiver passes the same two parts to `verify`.
        let (kind, body) = message.split_at(1);
        let code = self.outward.code(&head, &[kind, body]);
        let whole = [&head[..], message, &code].concat();
        self.wire.send(match piece {
            Piece::WithDescriptor(_, descriptor) => Piece::WithDescriptor(whole, descriptor),
            Piece::Own(_) | Piece::Shared(_) => Piece::Own(whole),
        });
    }

    /// The next message, if it has arrived.
    pub(super) fn receive(&mut self) -> Option<Incoming> {
        if self.malformed {
            return Some(Incoming::End(End::Malformed));
        }
        let found = self.next();
        if found.is_none() && self.wire.ended() {
            return Some(Incoming::End(End::of(&self.wire)));
        }
        self.malformed = found == Some(Incoming::End(End::Malformed));
        found
    }

    /// Like [`receive`](Self::receive), but returns `None` for a message of `kind` and leaves it for a later call.
    pub(super) fn receive_unless(&mut self, kind: u8) -> Option<Incoming> {
        match self.wire.peek(HEAD + 1).map(|message| message[HEAD]) {
            Some(found) if found == kind => None,
            // Return without receiving. `receive` reads the socket again and could find a message that `peek` did not,
            // of the kind that must stay.
            None if !self.wire.ended() => None,
            _ => self.receive(),
        }
    }

    fn next(&mut self) -> Option<Incoming> {
        let malformed = Some(Incoming::End(End::Malformed));
        let head: [u8; HEAD] = self.wire.peek(HEAD)?.try_into().expect("`peek(HEAD)` returns HEAD bytes");
        let len = u32::from_le_bytes(head) as usize;
        if !(1..=1 + self.longest).contains(&len) {
            return malformed;
        }
        let mut message = self.wire.take(HEAD + len + CODE)?;
        let (kind, body) = message[HEAD..HEAD + len].split_at(1);
        if !self.inward.verify(&head, &[kind, body], &message[HEAD + len..]) {
            return malformed;
        }
        message.truncate(HEAD + len);
        message.drain(..HEAD);
        Some(Incoming::Message(message))
    }

    /// Splits the channel into its sending and its receiving direction, for use by different threads.
    #[cfg(target_os = "linux")]
    pub(super) fn split(self) -> (Self, Self) {
        let Self { wire, inward, outward, longest, malformed } = self;
        let sends = wire.for_sending();
        (
            Self { wire: sends, inward: Direction::silent(), outward, longest, malformed: false },
            Self { wire, inward, outward: Direction::silent(), longest, malformed },
        )
    }

    /// Takes a sending direction with its unsent bytes. Nothing may be sent over this value afterwards.
    #[cfg(target_os = "linux")]
    pub(super) fn take_sending(&mut self) -> Self {
        let (wire, longest) = (self.wire.for_sending(), self.longest);
        let (inward, outward) = (Direction::silent(), Direction::silent());
        std::mem::replace(self, Self { wire, inward, outward, longest, malformed: false })
    }

    /// The descriptor that arrived with the last message.
    #[cfg(target_os = "linux")]
    pub(super) fn descriptor(&mut self) -> Option<OwnedFd> {
        self.wire.descriptor()
    }
}

#[cfg(all(test, target_os = "linux"))]
pub(super) mod tests {
    use std::os::unix::net::UnixStream;

    use super::super::wire::Socket;
    use super::*;

    /// Both ends of a connection.
    pub(in crate::join) fn channels() -> [Channel; 2] {
        let (one, other) = UnixStream::pair().expect("a pair of sockets");
        [one, other].map(|socket| {
            let direction = || Direction::new(Key::of(b"test", b""));
            let wire = Wire::new(Socket::Unix(socket)).expect("a wire over a socket");
            Channel::new(wire, direction(), direction())
        })
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_body_longer_than_the_receiver_accepts_is_malformed() {
        let [mut sender, mut receiver] = channels();
        receiver.accept_at_most(3);
        for body in [&b"abc"[..], b"abcd"] {
            sender.send(1, body);
        }
        sender.wire_mut().flush();
        assert_eq!(receiver.receive(), Some(Incoming::Message(b"\x01abc".to_vec())));
        assert_eq!(receiver.receive(), Some(Incoming::End(End::Malformed)));
    }

    /// A message that arrives between two reads of the socket is left too.
    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn receive_unless_leaves_a_message_whenever_it_arrives() {
        const LEFT: u8 = 7;
        for _ in 0..500 {
            let [mut sender, mut receiver] = channels();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    sender.send(LEFT, b"for later");
                    sender.wire_mut().flush();
                });
                while !receiver.wire().holds() {
                    assert_eq!(receiver.receive_unless(LEFT), None);
                }
            });
            assert_eq!(receiver.receive_unless(LEFT), None);
            let mut whole = vec![LEFT];
            whole.extend(b"for later");
            assert_eq!(receiver.receive(), Some(Incoming::Message(whole)));
            drop(sender);
            assert_eq!(receiver.receive_unless(LEFT), Some(Incoming::End(End::Closed)));
        }
    }
}
