//! Tests of joining. This file has the tests of complete jobs, and what the other files share.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod linking;
mod lost;
mod slow;
mod strangers;

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use super::handshake::{Claim, Outbound, Progress, Role};
use super::hub::GRACE_PERIOD;
use super::note::{Loss, kind};
use super::secret::random;
use super::wire::{Socket, wait};
use super::*;
use crate::config::Config;
use crate::error::{EnvironmentError, PeerError, PeerFault};

/// Longer than any step of these tests takes, even on a busy machine.
const LONG: Duration = Duration::from_secs(60);

fn secret() -> Secret {
    Secret::new(b"a secret of the tests").unwrap()
}

fn member(rank: usize, ranks: usize, timeout: Duration) -> Member {
    Member::new(Rank(rank as u32), ranks, timeout).with_secret(secret())
}

fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

fn peer_error<T: std::fmt::Debug>(result: Result<T>) -> PeerError {
    match result {
        Err(Error::Peer(error)) => error,
        other => panic!("expected a peer error, found {other:?}"),
    }
}

/// Connects as `rank` of `ranks` with `secret`; `None` if the handshake fails.
fn proven(address: SocketAddr, rank: u32, ranks: u32, secret: &Secret) -> Option<super::channel::Channel> {
    let socket = Socket::Tcp(TcpStream::connect(address).unwrap());
    let claim = Claim { from: Rank(rank), to: Rank(0), ranks, generation: 0 };
    let mut outbound = Outbound::new(socket, secret.key(), Role::Rendezvous, claim).unwrap()?;
    loop {
        match outbound.advance(secret.key()) {
            Progress::Done((), channel) => return Some(channel),
            Progress::Unauthenticated => return None,
            Progress::Waiting => {
                let until = Instant::now() + LONG;
                wait(&mut [outbound.wire().unwrap().interest()], until);
            }
        }
    }
}

/// Joins as rank 1 of 3 and gives up, because rank 2 is absent.
fn give_up(address: SocketAddr) {
    let mut one = proven(address, 1, 3, &secret()).unwrap();
    assert_eq!(next(&mut one)[0], kind::WAITING);
    one.send(kind::LOST, &Loss::new(Rank(2), PeerFault::Absent, "").to_bytes());
    one.finish();
}

/// The next message of a connection; empty if the connection has ended.
fn next(channel: &mut super::channel::Channel) -> Vec<u8> {
    loop {
        channel.wire_mut().flush();
        match channel.receive() {
            Some(super::channel::Incoming::Message(message)) => return message,
            Some(super::channel::Incoming::End(_)) => return Vec::new(),
            None => wait(&mut [channel.wire().interest()], Instant::now() + LONG),
        }
    }
}

/// Joins `ranks` threads, without `absent`, and returns the result of each thread's second exchange. The timeout is that of
/// rank 0: the other ranks wait for what it reports.
fn meet(
    ranks: usize,
    absent: Option<usize>,
    timeout: Duration,
    secret: Option<Secret>,
) -> Vec<Result<Vec<Vec<u8>>>> {
    let (listener, address) = listener();
    let store = address.to_string();
    let member = |rank: usize| {
        let timeout = if rank == 0 { timeout } else { LONG };
        Member { secret: secret.clone(), ..Member::new(Rank(rank as u32), ranks, timeout) }
    };
    std::thread::scope(|scope| {
        let (store, member) = (&store, &member);
        let others: Vec<_> = (1..ranks)
            .filter(|&rank| Some(rank) != absent)
            .map(|rank| {
                scope.spawn(move || {
                    let mut met = TcpRendezvous::join(store, member(rank))?;
                    met.all_gather(&vec![rank as u8; rank])?;
                    met.all_gather(&[rank as u8])
                })
            })
            .collect();
        let zero = TcpRendezvous::host(&listener, member(0)).and_then(|mut met| {
            met.all_gather(&[])?;
            met.all_gather(&[0])
        });
        std::iter::once(zero).chain(others.into_iter().map(|h| h.join().unwrap())).collect()
    })
}

/// Runs `attack` while two ranks join, and checks that they join and exchange their blobs.
fn joins_in_spite_of(attack: impl FnOnce(SocketAddr) + Send) {
    let (listener, address) = listener();
    let store = address.to_string();
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| TcpRendezvous::host(&listener, member(0, 2, LONG))?.all_gather(b"zero"));
        attack(address);
        let one = TcpRendezvous::join(&store, member(1, 2, LONG)).unwrap().all_gather(b"one");
        assert_eq!(one.unwrap(), [&b"zero"[..], b"one"]);
        assert_eq!(zero.join().unwrap().unwrap(), [&b"zero"[..], b"one"]);
    });
}

/// Whether the other end closes the connection without sending a byte.
fn is_dropped_unanswered(mut stream: &TcpStream) -> bool {
    stream.set_read_timeout(Some(LONG)).unwrap();
    !matches!(stream.read(&mut [0; 1]), Ok(1..))
}

/// The handshakes of links use the secret of the rendezvous, and links have the timeouts of the buffer.
#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn a_member_that_has_met_the_others_keeps_the_secret_and_the_settings() {
    let (listener, _) = listener();
    let met = TcpRendezvous::host(&listener, member(0, 1, LONG)).unwrap();
    let interrupt = Interrupt::new(|| true);
    let config = Config { stall_timeout: Duration::from_secs(8), interrupt, ..Config::default() };
    let member = Member::of(&met, &config);
    assert!(member.secret.is_some_and(|kept| kept.key().verify(
        b"test",
        &[b"text"],
        &secret().key().code(b"test", &[b"text"])
    )));
    assert_eq!((member.rank, member.ranks), (Rank(0), 1));
    assert_eq!((member.timeout, member.network_timeout), (config.timeout, config.network_timeout()));
    assert!(member.interrupt.asked());
}

#[test]
fn every_rank_gets_every_blob() {
    for secret in [Some(secret()), None] {
        for ranks in [1, 2, 5] {
            for result in meet(ranks, None, LONG, secret.clone()) {
                let expected: Vec<Vec<u8>> = (0..ranks).map(|rank| vec![rank as u8]).collect();
                assert_eq!(result.unwrap(), expected);
            }
        }
    }
}

#[test]
fn large_blobs_arrive() {
    let blob = |rank: u8| vec![rank; 3 << 20];
    let (listener, address) = listener();
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| TcpRendezvous::host(&listener, member(0, 2, LONG))?.all_gather(&blob(0)));
        let mut one = TcpRendezvous::join(&address.to_string(), member(1, 2, LONG)).unwrap();
        assert!(one.all_gather(&blob(1)).unwrap() == [blob(0), blob(1)]);
        assert!(zero.join().unwrap().unwrap() == [blob(0), blob(1)]);
    });
    let mut alone = TcpRendezvous::join("127.0.0.1:0", member(0, 1, LONG)).unwrap();
    let error = alone.all_gather(&vec![0; MAX_BLOB + 1]).unwrap_err().to_string();
    assert_eq!(error, "blob of a rendezvous: expected 67108864 bytes at most, found 67108865");
}

#[test]
fn the_program_can_interrupt_joining() {
    let (listener, address) = listener();
    let interrupted = |rank| Member { interrupt: Interrupt::new(|| true), ..member(rank, 2, LONG) };
    let one = TcpRendezvous::join(&address.to_string(), interrupted(1)).unwrap_err();
    let zero = TcpRendezvous::host(&listener, interrupted(0)).unwrap_err();
    for error in [zero, one] {
        assert!(matches!(error, Error::Caller(CallerError::Interrupted { .. })), "{error}");
    }
}
