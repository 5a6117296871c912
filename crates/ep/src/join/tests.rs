//! Tests of joining: complete jobs, lost ranks, and unauthenticated connections.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

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

/// Rank 0 may compute for long before it takes part in an exchange. Its machine is reachable all the time, although the
/// socket has no room for a long blob.
#[test]
#[cfg(target_os = "linux")]
#[cfg_attr(miri, ignore = "sockets")]
fn a_rank_that_is_late_to_an_exchange_of_long_blobs_is_not_unreachable() {
    let (listener, address) = listener();
    let network_timeout = Duration::from_millis(500);
    let member = |rank| Member { network_timeout, ..member(rank, 2, LONG) };
    let blob = vec![7; 16 << 20];
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| {
            let mut zero = TcpRendezvous::host(&listener, member(0))?;
            std::thread::sleep(8 * network_timeout);
            zero.all_gather(b"late")
        });
        let one = TcpRendezvous::join(&address.to_string(), member(1)).unwrap().all_gather(&blob);
        assert!(zero.join().unwrap().unwrap() == [&b"late"[..], &blob]);
        assert!(one.unwrap() == [&b"late"[..], &blob]);
    });
}

/// The clock of rank 1's exchange ends before the system gives up a socket that stays full.
#[test]
#[cfg(target_os = "linux")]
#[cfg_attr(miri, ignore = "sockets")]
fn a_rank_0_that_reads_no_long_blob_within_the_timeout_is_late_and_not_unreachable() {
    let (listener, address) = listener();
    std::thread::scope(|scope| {
        let (_reported, waits) = std::sync::mpsc::channel::<()>();
        let host = || TcpRendezvous::host(&listener, member(0, 2, LONG)).unwrap();
        scope.spawn(move || {
            let _silent = host();
            let _ = waits.recv();
        });
        let timeout = Duration::from_secs(3);
        let mut one = TcpRendezvous::join(&address.to_string(), member(1, 2, timeout)).unwrap();
        let error = peer_error(one.all_gather(&vec![7; 16 << 20]));
        assert_eq!((error.peer, error.fault), (Rank(0), PeerFault::Late), "{error}");
    });
}

/// A rank may be slow to read the blobs of an exchange. Its machine is reachable all the time.
#[test]
#[cfg(target_os = "linux")]
#[cfg_attr(miri, ignore = "sockets")]
fn a_rank_that_is_slow_to_read_long_blobs_is_not_unreachable() {
    // More than a receive window, which the sender's socket takes whole, and more than both sockets hold.
    for bytes in [1 << 20, 16 << 20] {
        // On a busy machine the blobs may be there before the rank waits for them.
        assert!((0..50).any(|_| read_slowly(bytes)), "the rank was not slow");
    }
}

/// Runs an exchange of which one rank does not read the blobs for longer than the network timeout. Returns false if the
/// rank did not have to wait for them, and so was not slow.
#[cfg(target_os = "linux")]
fn read_slowly(bytes: usize) -> bool {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    let (listener, address) = listener();
    let network_timeout = Duration::from_millis(500);
    let member = |rank| Member { network_timeout, ..member(rank, 2, LONG) };
    let blob = vec![7; bytes];
    let is_slow = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| {
            let mut zero = TcpRendezvous::host(&listener, member(0))?;
            zero.all_gather(b"")?;
            let all = zero.all_gather(&blob)?;
            // An exchange that follows sees whether the connection still is there.
            zero.all_gather(b"last").map(|_| all)
        });
        let interrupt = Interrupt::new({
            let is_slow = Arc::clone(&is_slow);
            move || {
                if is_slow.swap(false, Relaxed) {
                    std::thread::sleep(8 * network_timeout);
                }
                false
            }
        });
        let mut one = TcpRendezvous::join(&address.to_string(), Member { interrupt, ..member(1) }).unwrap();
        one.all_gather(b"").unwrap();
        is_slow.store(true, Relaxed);
        let all = one.all_gather(b"slow").unwrap();
        assert!(all == [&blob[..], b"slow"]);
        one.all_gather(b"last").unwrap();
        assert!(zero.join().unwrap().unwrap() == all);
        !is_slow.load(Relaxed)
    })
}

/// Whether the other end closes the connection without sending a byte.
fn is_dropped_unanswered(mut stream: &TcpStream) -> bool {
    stream.set_read_timeout(Some(LONG)).unwrap();
    !matches!(stream.read(&mut [0; 1]), Ok(1..))
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

/// Links prove themselves with the secret of the rendezvous, and have the bounds of the buffer.
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
fn every_rank_names_the_absent_rank() {
    // Every rank must join within this time, also on a busy machine.
    let results = meet(4, Some(2), Duration::from_secs(3), Some(secret()));
    assert_eq!(results.len(), 3);
    for result in results {
        let error = peer_error(result);
        assert_eq!((error.peer, error.fault), (Rank(2), PeerFault::Absent));
        // Rank 2 may be on another machine, and the listener's address is 127.0.0.1.
        assert!(error.to_string().contains("which other machines cannot reach"), "{error}");
    }
}

/// A rank whose timeout ends before rank 0's gives up first. Rank 0 must not report that rank as dead, nor wait longer, and
/// says why a rank may be absent.
#[test]
fn a_rank_that_gives_up_first_tells_rank_0_which_rank_is_absent() {
    let (listener, address) = listener();
    std::thread::scope(|scope| {
        // Rank 0 must admit rank 1 within this time, also on a busy machine.
        let early = member(1, 3, Duration::from_secs(2));
        let one = scope.spawn(move || TcpRendezvous::join(&address.to_string(), early));
        let zero = peer_error(TcpRendezvous::host(&listener, member(0, 3, LONG)));
        assert!(zero.to_string().contains("which other machines cannot reach"), "{zero}");
        for error in [zero, peer_error(one.join().unwrap())] {
            assert_eq!((error.peer, error.fault), (Rank(2), PeerFault::Absent), "{error}");
        }
    });
}

/// Rank 0 may drop a connection of a rank that it has not admitted, for example to make room.
#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn a_rank_whose_connection_closes_before_it_is_admitted_connects_again() {
    let (listener, address) = listener();
    std::thread::scope(|scope| {
        let one = scope
            .spawn(move || TcpRendezvous::join(&address.to_string(), member(1, 2, LONG))?.all_gather(b"one"));
        let secret = secret();
        let prepared = super::store::Listener::Tcp(listener.try_clone().unwrap()).prepared().unwrap();
        let mut reception = super::reception::Reception::new(&prepared, secret.key(), Role::Rendezvous);
        let authenticated = loop {
            let proven = reception.turn().unwrap();
            if !proven.is_empty() {
                break proven;
            }
        };
        drop((authenticated, reception));
        let zero = TcpRendezvous::host(&listener, member(0, 2, LONG)).unwrap().all_gather(b"zero");
        assert_eq!(zero.unwrap(), [&b"zero"[..], b"one"]);
        assert_eq!(one.join().unwrap().unwrap(), [&b"zero"[..], b"one"]);
    });
}

#[test]
fn without_a_listener_rank_0_is_named_as_absent() {
    let free = listener().1.to_string();
    let error = TcpRendezvous::join(&free, member(1, 2, Duration::from_millis(100))).unwrap_err();
    assert!(error.to_string().starts_with("rank 0 never joined"), "{error}");
    assert!(error.to_string().contains(&format!("a listener at the rendezvous {free}")), "{error}");
}

#[test]
fn every_rank_names_a_rank_lost_after_joining() {
    for (stays, fault) in [(false, PeerFault::Left), (true, PeerFault::Late)] {
        let (listener, address) = listener();
        let store = address.to_string();
        // Every rank must join within rank 0's timeout, also on a busy machine.
        let timeout = if stays { Duration::from_secs(2) } else { LONG };
        let results = std::thread::scope(|scope| {
            let (reported, waits) = std::sync::mpsc::channel::<()>();
            let store = &store;
            let join = move |rank| TcpRendezvous::join(store, member(rank, 3, LONG)).unwrap();
            let one = scope.spawn(move || join(1).all_gather(&[]));
            scope.spawn(move || {
                let silent = join(2);
                if stays {
                    let _ = waits.recv();
                }
                drop(silent);
            });
            let zero = TcpRendezvous::host(&listener, member(0, 3, timeout)).unwrap().all_gather(&[]);
            let results = [zero, one.join().unwrap()];
            drop(reported);
            results
        });
        for result in results {
            let error = peer_error(result);
            assert_eq!((error.peer, error.fault), (Rank(2), fault), "{error}");
        }
    }
}

/// When a process is killed, its connection closes without a final message.
#[test]
fn a_rank_that_dies_is_named_at_once_also_by_ranks_that_join_later() {
    let (listener, address) = listener();
    let store = address.to_string();
    let results = std::thread::scope(|scope| {
        let store = &store;
        let zero = scope.spawn(|| TcpRendezvous::host(&listener, member(0, 4, LONG)));
        let one = scope.spawn(move || TcpRendezvous::join(store, member(1, 4, LONG)));
        let mut two = proven(address, 2, 4, &secret()).unwrap();
        assert_eq!(next(&mut two)[0], kind::WAITING);
        drop(two);
        let three = TcpRendezvous::join(store, member(3, 4, Duration::from_secs(5)));
        [zero.join().unwrap(), one.join().unwrap(), three]
    });
    for result in results {
        let error = peer_error(result);
        assert_eq!((error.peer, error.fault), (Rank(2), PeerFault::Died), "{error}");
    }
}

/// A rank that needs no further exchange leaves the rendezvous while others still connect their links.
#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn a_rank_that_has_joined_and_left_is_lost_for_a_later_exchange_only() {
    for leaver in 0..2 {
        let (listener, address) = listener();
        let store = address.to_string();
        let mut met: Vec<TcpRendezvous> = std::thread::scope(|scope| {
            let zero = scope.spawn(|| TcpRendezvous::host(&listener, member(0, 3, LONG)).unwrap());
            let others: Vec<_> = (1..3)
                .map(|rank| {
                    scope.spawn({
                        let store = &store;
                        move || TcpRendezvous::join(store, member(rank, 3, LONG)).unwrap()
                    })
                })
                .collect();
            std::iter::once(zero).chain(others).map(|rank| rank.join().unwrap()).collect()
        });
        drop(met.remove(leaver));
        let since = Instant::now();
        while since.elapsed() < 2 * GRACE_PERIOD {
            for rank in &mut met {
                assert_eq!(rank.lost(), None, "rank {leaver} has joined");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let error = peer_error(met[0].all_gather(b"one more"));
        assert_eq!((error.peer, error.fault), (Rank(leaver as u32), PeerFault::Left), "{error}");
    }
}

#[test]
fn rank_0_tells_which_rank_is_lost_before_it_leaves() {
    let (listener, address) = listener();
    let store = address.to_string();
    std::thread::scope(|scope| {
        let store = &store;
        let one = scope.spawn(move || {
            let mut one = TcpRendezvous::join(store, member(1, 3, LONG)).unwrap();
            // By then rank 0 has closed the connection, so sending fails.
            std::thread::sleep(Duration::from_millis(700));
            (one.all_gather(&[1; 100]), one.all_gather(&[]))
        });
        let two = scope.spawn(move || proven(address, 2, 3, &secret()).unwrap());
        let mut zero = TcpRendezvous::host(&listener, member(0, 3, LONG)).unwrap();
        let mut two = two.join().unwrap();
        while next(&mut two) != [kind::MET] {}
        drop(two);
        let error = peer_error(zero.all_gather(&[]));
        assert_eq!((error.peer, error.fault), (Rank(2), PeerFault::Died));
        drop(zero);
        let (first, again) = one.join().unwrap();
        for result in [first, again] {
            let error = peer_error(result);
            assert_eq!((error.peer, error.fault), (Rank(2), PeerFault::Died), "{error}");
        }
    });
}

#[test]
fn a_rank_that_abandons_the_job_is_quoted_and_the_first_loss_counts() {
    let (listener, address) = listener();
    let store = address.to_string();
    let results = std::thread::scope(|scope| {
        let store = &store;
        let join = move |rank| TcpRendezvous::join(store, member(rank, 3, LONG)).unwrap();
        let one = scope.spawn(move || join(1).all_gather(&[]));
        let two = scope.spawn(move || {
            let own = EnvironmentError::new("mapping", "no memory", "").into();
            assert!(matches!(join(2).abandon(own), Error::Environment(_)));
        });
        let zero = TcpRendezvous::host(&listener, member(0, 3, LONG)).unwrap().all_gather(&[]);
        two.join().unwrap();
        [zero, one.join().unwrap()]
    });
    for result in results {
        let error = peer_error(result);
        assert_eq!((error.peer, error.fault), (Rank(2), PeerFault::Failed), "{error}");
        assert_eq!(error.cause.as_deref(), Some("mapping: no memory"));
    }
}

#[test]
fn a_rank_that_saw_another_leave_learns_which_rank_died_before() {
    let (listener, address) = listener();
    let store = address.to_string();
    std::thread::scope(|scope| {
        let store = &store;
        let one = scope.spawn(move || TcpRendezvous::join(store, member(1, 4, LONG)).unwrap());
        let [two, three] =
            [2, 3].map(|rank| scope.spawn(move || proven(address, rank, 4, &secret()).unwrap()));
        let mut zero = TcpRendezvous::host(&listener, member(0, 4, LONG)).unwrap();
        let mut one = one.join().unwrap();
        let [two, mut three] = [two, three].map(|thread| thread.join().unwrap());
        three.send(kind::LOST, &Loss::new(Rank(1), PeerFault::Left, "").to_bytes());
        three.wire_mut().flush();
        drop(two);
        let error = peer_error(zero.all_gather(&[]));
        assert_eq!((error.peer, error.fault), (Rank(2), PeerFault::Died), "{error}");
        // Rank 0 has answered before rank 1 asks, so that rank 1 finds the answer however busy the machine is.
        let left = PeerError::joining(Rank(1), Rank(3), PeerFault::Left, "its link", Duration::ZERO);
        let told = peer_error(Err::<(), _>(one.abandon(left.into())));
        assert_eq!((told.peer, told.fault), (Rank(2), PeerFault::Died), "{told}");
    });
}

#[test]
fn a_process_of_an_earlier_start_of_the_job_is_refused_and_the_job_goes_on() {
    let (listener, address) = listener();
    let store = address.to_string();
    let of = |rank, generation| Member { generation, ..member(rank, 2, LONG) };
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| TcpRendezvous::host(&listener, of(0, 2))?.all_gather(b"zero"));
        let old = TcpRendezvous::join(&store, of(1, 1)).unwrap_err().to_string();
        let expected = "joining as rank 1 of 2: the job at this store is generation 2, and this process is of 1; this process or rank 0 is left over";
        assert!(old.starts_with(expected), "{old}");
        let one = TcpRendezvous::join(&store, of(1, 2)).unwrap().all_gather(b"one");
        assert_eq!(one.unwrap(), zero.join().unwrap().unwrap());
    });
}

/// An early version accepted such a connection and opened a file that the other process named.
#[test]
fn a_process_without_the_secret_gets_no_answer() {
    joins_in_spite_of(|address| {
        let mut old = TcpStream::connect(address).unwrap();
        let first_version = [&b"hyb-ep01"[..], &1u32.to_le_bytes(), &2u32.to_le_bytes()].concat();
        old.write_all(&[first_version, vec![0; 200]].concat()).unwrap();
        assert!(is_dropped_unanswered(&old));
        let mut new = TcpStream::connect(address).unwrap();
        let words = [Role::Rendezvous as u32, 1, 0, 2].map(u32::to_le_bytes).concat();
        new.write_all(&[&b"hyb-ep03"[..], &words, &[7; 72]].concat()).unwrap();
        assert!(is_dropped_unanswered(&new));
        let mut web = TcpStream::connect(address).unwrap();
        web.write_all(&b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(9)).unwrap();
        assert!(is_dropped_unanswered(&web));
    });
}

#[test]
fn a_process_with_another_secret_is_refused() {
    joins_in_spite_of(|address| {
        let other = Secret::new(b"a secret of another job").unwrap();
        assert!(proven(address, 1, 2, &other).is_none());
    });
    // The errors of both ends name the probable reason.
    let (listener, address) = listener();
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| TcpRendezvous::host(&listener, member(0, 3, LONG)));
        let other = Secret::new(b"a secret of another job").unwrap();
        let one = Member::new(Rank(1), 3, Duration::from_millis(800)).with_secret(other);
        let one = TcpRendezvous::join(&address.to_string(), one);
        give_up(address);
        for result in [one, zero.join().unwrap()] {
            let error = peer_error(result).to_string();
            assert!(
                error.contains("do all ranks have the same HYBRID_EP_SECRET and run the same version"),
                "{error}"
            );
        }
    });
}

/// Sends the recorded bytes of a member's connection again.
#[test]
fn a_replay_is_not_admitted() {
    let (listener, address) = listener();
    // A relay records the bytes of a member.
    let (relay, front) = self::listener();
    let store = front.to_string();
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| TcpRendezvous::host(&listener, member(0, 3, LONG))?.all_gather(b"zero"));
        let recorded = scope.spawn(move || {
            let (mut inner, mut outer) = (relay.accept().unwrap().0, TcpStream::connect(address).unwrap());
            let (mut answers, mut back) = (outer.try_clone().unwrap(), inner.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut answers, &mut back));
            let mut said = [0; 96 + 32];
            for part in [0..96, 96..128] {
                inner.read_exact(&mut said[part.clone()]).unwrap();
                outer.write_all(&said[part]).unwrap();
            }
            std::thread::spawn(move || std::io::copy(&mut inner, &mut outer));
            said
        });
        let store = &store;
        let one =
            scope.spawn(move || TcpRendezvous::join(store, member(1, 3, LONG)).unwrap().all_gather(b"one"));
        let said = recorded.join().unwrap();
        // Replay the bytes as rank 1, and with the number of a rank that has not joined.
        for forge in [false, true] {
            let mut again = TcpStream::connect(address).unwrap();
            let mut said = said;
            if forge {
                said[12] = 2;
            }
            again.write_all(&said).unwrap();
            again.set_read_timeout(Some(LONG)).unwrap();
            let mut answer = Vec::new();
            // The recorded offer is valid and gets an answer. Its proof is for another nonce and is rejected.
            let _ = again.read_to_end(&mut answer);
            assert_eq!(answer.len(), if forge { 0 } else { 64 });
        }
        let two = TcpRendezvous::join(&address.to_string(), member(2, 3, LONG)).unwrap().all_gather(b"two");
        for result in [two, one.join().unwrap(), zero.join().unwrap()] {
            assert_eq!(result.unwrap(), [&b"zero"[..], b"one", b"two"]);
        }
    });
}

#[test]
fn a_member_with_another_number_of_ranks_is_refused_and_the_job_goes_on() {
    joins_in_spite_of(|address| {
        for (rank, ranks) in [(1, 3), (2, 2), (0, 2)] {
            let store = address.to_string();
            let mut claimed = proven(address, rank, ranks, &secret()).unwrap();
            assert_eq!(next(&mut claimed), [&[kind::OTHER_WORLD][..], &2u32.to_le_bytes()].concat());
            if rank == 1 {
                let error = TcpRendezvous::join(&store, member(1, 3, LONG)).unwrap_err().to_string();
                assert!(
                    error.starts_with("joining as rank 1 of 3: the job at this store has 2 ranks"),
                    "{error}"
                );
            }
        }
    });
}

#[test]
fn the_error_about_a_missing_rank_ends_with_the_refusal() {
    let (listener, address) = listener();
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| TcpRendezvous::host(&listener, member(0, 3, LONG)));
        let mut claimed = proven(address, 1, 4, &secret()).unwrap();
        next(&mut claimed);
        give_up(address);
        let error = peer_error(zero.join().unwrap()).to_string();
        assert!(error.ends_with("(rank 1 of 4 was refused: this job has 3 ranks)"), "{error}");
    });
}

#[test]
fn a_second_process_of_a_rank_is_refused() {
    let (listener, address) = listener();
    let store = address.to_string();
    std::thread::scope(|scope| {
        let store = &store;
        let zero = scope.spawn(|| TcpRendezvous::host(&listener, member(0, 3, LONG))?.all_gather(b"zero"));
        let mut first = proven(address, 1, 3, &secret()).unwrap();
        assert_eq!(next(&mut first)[0], kind::WAITING);
        let error = TcpRendezvous::join(store, member(1, 3, LONG)).unwrap_err().to_string();
        assert!(error.starts_with("joining as rank 1 of 3: rank 1 has already joined this job"), "{error}");
        let two =
            scope.spawn(move || TcpRendezvous::join(store, member(2, 3, LONG)).unwrap().all_gather(b"two"));
        while next(&mut first) != [kind::MET] {}
        first.send(kind::BLOB, b"the first");
        while next(&mut first)[0] != kind::BLOB {}
        for result in [two.join().unwrap(), zero.join().unwrap()] {
            assert_eq!(result.unwrap()[1], b"the first");
        }
    });
}

/// Neither idle connections nor a connection that sends a byte now and then prevent or delay joining.
#[test]
fn ranks_join_in_spite_of_slow_and_idle_connections() {
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        joins_in_spite_of(|address| {
            let idle: Vec<_> = (0..300).map(|_| TcpStream::connect(address).unwrap()).collect();
            let mut slow = TcpStream::connect(address).unwrap();
            scope.spawn(move || {
                let held = idle;
                while stopped.recv_timeout(Duration::from_millis(20)).is_err() {
                    let _ = slow.write_all(b"h");
                }
                drop(held);
            });
        });
        stop.send(()).unwrap();
    });
}

/// The timeout holds although connections send a byte now and then.
#[test]
fn slow_connections_do_not_extend_the_timeout() {
    let (listener, address) = listener();
    let timeout = Duration::from_secs(1);
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut slow: Vec<_> = (0..20).map(|_| TcpStream::connect(address).unwrap()).collect();
            while stopped.recv_timeout(Duration::from_millis(20)).is_err() {
                slow.iter_mut().for_each(|stream| drop(stream.write_all(b"h")));
            }
        });
        let start = Instant::now();
        let error = peer_error(TcpRendezvous::host(&listener, member(0, 2, timeout)));
        assert_eq!((error.peer, error.fault), (Rank(1), PeerFault::Absent));
        // This asserts no timing: without a deadline for the whole wait, it would never end.
        assert!(start.elapsed() < LONG, "{:?}", start.elapsed());
        stop.send(()).unwrap();
    });
}

/// A length beyond the bound, a length of 0 and a wrong code each end the connection.
#[test]
fn forged_and_oversized_messages_end_the_connection() {
    for forged in [&u32::MAX.to_le_bytes()[..], &[0; 4], &[&3u32.to_le_bytes()[..], &[0; 40]].concat()] {
        let (listener, address) = listener();
        std::thread::scope(|scope| {
            let zero = scope.spawn(|| TcpRendezvous::host(&listener, member(0, 2, LONG))?.all_gather(b""));
            let mut one = proven(address, 1, 2, &secret()).unwrap();
            while next(&mut one) != [kind::MET] {}
            one.wire_mut().send(super::wire::Piece::Own(forged.to_vec()));
            one.wire_mut().flush();
            let error = peer_error(zero.join().unwrap());
            assert_eq!((error.peer, error.fault), (Rank(1), PeerFault::Failed), "{error}");
        });
    }
}

#[test]
fn a_member_that_does_not_read_is_named() {
    let (listener, address) = listener();
    let timeout = Duration::from_secs(3);
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| {
            let mut zero = TcpRendezvous::host(&listener, member(0, 2, timeout)).unwrap();
            // More than the system buffers for a peer that does not read.
            zero.all_gather(&vec![0; 48 << 20])
        });
        let mut one = proven(address, 1, 2, &secret()).unwrap();
        while next(&mut one) != [kind::MET] {}
        one.send(kind::BLOB, b"");
        one.wire_mut().flush();
        let error = peer_error(zero.join().unwrap());
        assert_eq!((error.peer, error.fault), (Rank(1), PeerFault::Stalled), "{error}");
        drop(one);
    });
}

/// Rank 0 has said which rank it waits for, and is stopped then: the others name rank 0.
#[test]
fn a_rank_0_that_stops_while_it_waits_for_another_rank_is_named() {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
    static HAS_JOINED: AtomicBool = AtomicBool::new(false);
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    static IS_REPORTED: AtomicBool = AtomicBool::new(false);
    // All ranks must join within this time, also on a busy machine, and rank 0 must be silent for two seconds of it.
    let timeout = Duration::from_secs(4);
    let (listener, address) = listener();
    std::thread::scope(|scope| {
        let stopping = Interrupt::new(|| {
            // The second call in the exchange: rank 0 says which rank it waits for after the first one.
            if HAS_JOINED.load(Relaxed) && CALLS.fetch_add(1, Relaxed) == 1 {
                while !IS_REPORTED.load(Relaxed) {
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
            false
        });
        let zero = Member { interrupt: stopping, ..member(0, 3, LONG) };
        scope.spawn(move || {
            let mut hub = TcpRendezvous::host(&listener, zero).unwrap();
            HAS_JOINED.store(true, Relaxed);
            let _ = hub.all_gather(b"zero");
        });
        let silent = proven(address, 1, 3, &secret()).unwrap();
        let two = scope.spawn(move || {
            TcpRendezvous::join(&address.to_string(), member(2, 3, timeout)).unwrap().all_gather(b"two")
        });
        let result = two.join();
        IS_REPORTED.store(true, Relaxed);
        drop(silent);
        let error = peer_error(result.unwrap());
        assert_eq!((error.peer, error.fault), (Rank(0), PeerFault::Stalled), "{error}");
    });
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

/// Connects the links of one thread per door. `told` gives the invitations that each rank knows, and `timeout` its timeout.
fn link(
    doors: Vec<Door>,
    told: impl Fn(usize) -> Vec<Invitation> + Sync,
    timeout: impl Fn(usize) -> Duration + Sync,
) -> Vec<Result<Links>> {
    let ranks = told(0).len();
    std::thread::scope(|scope| {
        let (told, timeout) = (&told, &timeout);
        let threads: Vec<_> = doors
            .into_iter()
            .enumerate()
            .map(|(rank, door)| {
                scope.spawn(move || {
                    let member = member(rank, ranks, timeout(rank));
                    Links::connect(door, &member, &told(rank), || None)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn doors(ranks: usize) -> (Vec<Door>, Vec<Invitation>) {
    let doors: Vec<Door> = (0..ranks).map(|_| Door::open().unwrap()).collect();
    let invitations = doors.iter().map(|door| door.invitation().clone()).collect();
    (doors, invitations)
}

#[test]
fn links_carry_messages_and_descriptors_and_report_their_end() {
    let (doors, invitations) = doors(3);
    let links = link(doors, |_| invitations.clone(), |_| LONG);
    let mut ends: Vec<Vec<(Rank, LinkSender, LinkReceiver)>> = links
        .into_iter()
        .map(|links| {
            let split = |(peer, link): (Rank, Link)| {
                assert_eq!(link.process(), Some(std::process::id()));
                let (sender, receiver) = link.split();
                (peer, sender, receiver)
            };
            links.unwrap().links.into_iter().map(split).collect()
        })
        .collect();
    assert_eq!(ends[1].iter().map(|end| end.0).collect::<Vec<_>>(), [Rank(0), Rank(2)]);
    let (mut reader, writer) = std::io::pipe().unwrap();
    ends[0][1].1.send(b"a pipe", Some(writer.as_fd()), LONG).unwrap();
    ends[0][1].1.send(b"nothing", None, LONG).unwrap();
    drop(writer);
    let Some(LinkEvent::Message(body, Some(pipe))) = ends[2][0].2.wait(LONG) else { panic!("no pipe") };
    assert_eq!(body, b"a pipe");
    std::fs::File::from(pipe).write_all(b"through").unwrap();
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert_eq!(text, "through");
    assert!(matches!(ends[2][0].2.wait(LONG), Some(LinkEvent::Message(body, None)) if body == b"nothing"));
    assert!(ends[2][0].2.receive().is_none());
    // A rank that leaves sends a leave message. When a rank is killed, the system closes its sockets.
    drop(ends.remove(0));
    assert!(matches!(ends[0][0].2.wait(LONG), Some(LinkEvent::Left)));
    let (_, sender, receiver) = ends[0].pop().unwrap();
    std::mem::forget(sender);
    rustix::net::shutdown(&receiver, rustix::net::Shutdown::Both).unwrap();
    assert!(matches!(ends[1].pop().unwrap().2.wait(LONG), Some(LinkEvent::Died)));
}

#[test]
fn a_rank_that_knows_other_invitations_gets_no_links() {
    // Rank 1 knows another invitation of rank 2 than the other ranks, as if it were of another job.
    let (doors, invitations) = doors(3);
    let other = Door::open().unwrap();
    let told = |rank: usize| {
        let mut told = invitations.clone();
        if rank == 1 {
            told[2] = other.invitation().clone();
        }
        told
    };
    // Rank 1 gives up first: another rank that gave up would close its door, and rank 1 would take it for dead.
    let timeout = |rank: usize| if rank == 1 { Duration::from_millis(900) } else { LONG };
    let [zero, one, two] = <[_; 3]>::try_from(link(doors, told, timeout)).unwrap().map(peer_error);
    assert_eq!((one.peer, one.fault), (Rank(0), PeerFault::Late), "{one}");
    assert_eq!((zero.peer, two.peer), (Rank(1), Rank(1)), "{zero}; {two}");
}

#[test]
fn a_rank_that_closes_its_door_before_linking_is_named() {
    let (mut doors, invitations) = doors(3);
    doors.remove(0);
    let ranks = [1, 2];
    let results: Vec<_> = std::thread::scope(|scope| {
        let invitations = &invitations;
        let threads: Vec<_> = ranks
            .into_iter()
            .zip(doors)
            .map(|(rank, door)| {
                scope.spawn(move || Links::connect(door, &member(rank, 3, LONG), invitations, || None))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for result in results {
        let error = peer_error(result);
        assert_eq!((error.peer, error.fault), (Rank(0), PeerFault::Died), "{error}");
    }
}

#[test]
fn ranks_link_in_spite_of_idle_connections_to_a_door() {
    let (doors, invitations) = doors(2);
    // Socket names are not secret: /proc/net/unix lists them.
    let text = invitations[0].to_string();
    let idle: Vec<_> = (0..300)
        .filter_map(|_| super::local::connect(&format!("hybrid-ep/link/{}", &text[..32])).ok())
        .collect();
    assert!(!idle.is_empty());
    for result in link(doors, |_| invitations.clone(), |_| LONG) {
        result.unwrap();
    }
    assert_ne!(random().unwrap(), random().unwrap());
}

/// A rank that gives up while the others link is reported at once, and not after the timeout.
#[test]
fn a_rank_that_fails_while_the_others_link_is_named_at_once() {
    /// The rank that the error of linking names.
    fn linked(mut met: TcpRendezvous) -> (Rank, PeerFault) {
        let door = Door::open().unwrap();
        let blobs = met.all_gather(door.invitation().to_string().as_bytes()).unwrap();
        let text = |blob: &Vec<u8>| std::str::from_utf8(blob).unwrap().parse().unwrap();
        let invitations: Vec<Invitation> = blobs.iter().map(text).collect();
        let member = member(met.rank().index(), 3, LONG);
        let start = Instant::now();
        let error = peer_error(Links::connect(door, &member, &invitations, || met.lost()));
        assert!(start.elapsed() < LONG / 2, "{error}");
        (error.peer, error.fault)
    }
    let (listener, address) = listener();
    let store = address.to_string();
    std::thread::scope(|scope| {
        let store = &store;
        let zero = scope.spawn(|| linked(TcpRendezvous::host(&listener, member(0, 3, LONG)).unwrap()));
        let one = scope.spawn(move || linked(TcpRendezvous::join(store, member(1, 3, LONG)).unwrap()));
        let mut two = TcpRendezvous::join(store, member(2, 3, LONG)).unwrap();
        // The door stays open, so that only the rendezvous can tell.
        let door = Door::open().unwrap();
        two.all_gather(door.invitation().to_string().as_bytes()).unwrap();
        two.abandon(EnvironmentError::new("linking", "no route", "").into());
        for rank in [zero, one] {
            assert_eq!(rank.join().unwrap(), (Rank(2), PeerFault::Failed));
        }
    });
}
