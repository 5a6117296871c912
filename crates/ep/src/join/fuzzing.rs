//! Entry points for the target in `fuzz/`: bytes from unauthenticated connections and from members.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::channel::{Channel, Direction, End, Incoming};
use super::handshake::{Claim, Inbound, Outbound, Progress, Role};
use super::joining::Introduced;
use super::note::Loss;
use super::secret::Key;
use super::wire::{Socket, Wire};
use crate::topology::Rank;

/// A socket that delivers these bytes and then ends. Truncates the bytes to what a socket holds unread.
fn sent(bytes: &[u8]) -> Socket {
    let (near, mut far) = UnixStream::pair().expect("a pair of sockets");
    far.write_all(&bytes[..bytes.len().min(16 << 10)]).expect("a socket has room");
    Socket::Unix(near)
}

fn key(purpose: &[u8]) -> Key {
    Key::of(purpose, b"a secret that the input does not know")
}

/// Sends `bytes` to rank 0's end of a handshake, from a caller that does not know the secret.
///
/// # Panics
/// When rank 0 accepts the caller as a member.
pub fn call(bytes: &[u8]) {
    let mut inbound = Inbound::new(sent(bytes)).expect("a socket that does not block");
    for _ in 0..4 {
        match inbound.advance(&key(b"job"), Role::Rendezvous).expect("random numbers") {
            Progress::Done(claim, _) => panic!("accepted without the secret: {claim:?}"),
            Progress::Unauthenticated => return,
            Progress::Waiting => {}
        }
    }
    panic!("the handshake waits for a connection that has ended");
}

/// Sends `bytes` to a rank's end of a handshake, from a listener that does not know the secret.
///
/// # Panics
/// When the rank accepts the listener as rank 0.
pub fn answer(bytes: &[u8]) {
    let claim = Claim { from: Rank(1), to: Rank(0), ranks: 2, generation: 0 };
    let outbound = Outbound::new(sent(bytes), &key(b"job"), Role::Rendezvous, claim).expect("random numbers");
    let Some(mut outbound) = outbound else { return };
    for _ in 0..4 {
        match outbound.advance(&key(b"job")) {
            Progress::Done(..) => panic!("accepted as rank 0 without the secret"),
            Progress::Unauthenticated => return,
            Progress::Waiting => {}
        }
    }
    panic!("the handshake waits for a connection that has ended");
}

/// Sends valid messages and raw bytes to a member, as the script says. Each piece of the script has a byte that chooses
/// between the two, a byte with the length, and the bytes.
///
/// # Panics
/// When the receiver receives anything but the valid messages before the first raw bytes.
pub fn converse(mut script: &[u8]) {
    let (near, far) = UnixStream::pair().expect("a pair of sockets");
    let mut raw = far.try_clone().expect("another handle of a socket");
    let ends = [near, far].map(|end| Wire::new(Socket::Unix(end)).expect("a socket that does not block"));
    let direction = |purpose: &[u8]| Direction::new(key(purpose));
    let [near, far] = ends;
    let mut near = Channel::new(near, direction(b"to near"), direction(b"to far"));
    let mut far = Channel::new(far, direction(b"to far"), direction(b"to near"));

    let mut malformed = false;
    while let [choice, len, rest @ ..] = script {
        let (piece, rest) = rest.split_at(usize::from(*len).min(rest.len()));
        script = rest;
        if choice % 4 == 0 && !piece.is_empty() {
            // If the socket is full, this script ends: it would need the reader below to run first.
            if raw.write_all(piece).is_err() {
                return;
            }
            malformed = true;
        } else {
            far.send(*choice, piece);
            far.wire_mut().flush();
        }
        match near.receive() {
            Some(Incoming::Message(message)) => {
                assert!(!malformed, "a message after malformed bytes");
                assert_eq!((message[0], &message[1..]), (*choice, piece));
            }
            Some(Incoming::End(end)) => assert!(malformed && end == End::Malformed, "{end:?}"),
            // The raw bytes may be the beginning of a message.
            None => assert!(malformed, "a valid message has not arrived"),
        }
    }
    drop((far, raw));
    assert!(matches!(near.receive(), Some(Incoming::End(_))), "the end of the connection is not noticed");
}

/// Parses a valid first line followed by `bytes` as the introduction of a member.
///
/// # Panics
/// When writing and parsing the introduction again changes it.
pub fn introduce(bytes: &[u8]) {
    const FIRST_LINE: &str = "version and backend";
    let bytes = [FIRST_LINE.as_bytes(), b"\n", bytes].concat();
    if let Some(read) = Introduced::<u64>::from_bytes(FIRST_LINE, &bytes) {
        let text = read.to_text(FIRST_LINE);
        assert_eq!(Introduced::from_bytes(FIRST_LINE, text.as_bytes()), Some(read));
    }
}

/// Parses `bytes` as the message of a member about a lost rank.
///
/// # Panics
/// When writing and parsing the loss again changes it.
pub fn report(bytes: &[u8]) {
    let Some(loss) = Loss::from_bytes(bytes) else { return };
    // Text that was not UTF-8 may have become longer, and is then truncated again.
    let Some(passed_on) = Loss::from_bytes(&loss.to_bytes()) else {
        panic!("{loss:?} cannot be parsed again")
    };
    assert_eq!((passed_on.peer, passed_on.fault), (loss.peer, loss.fault));
    assert_eq!(Loss::from_bytes(&passed_on.to_bytes()).as_ref(), Some(&passed_on));
    assert!(!loss.error(Rank(1), Some(Rank(0)), "its part", Duration::ZERO).to_string().is_empty());
}
