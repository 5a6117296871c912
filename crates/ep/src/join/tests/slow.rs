//! Slow connections and ranks that do not read.

use super::*;

/// Rank 0 may compute for a long time before it takes part in an exchange. Its machine stays reachable, although the socket
/// has no room for a long blob.
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

/// Rank 1's exchange times out before the system gives up on a socket that stays full.
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

/// A rank may be slow to read the blobs of an exchange. Its machine stays reachable.
#[test]
#[cfg(target_os = "linux")]
#[cfg_attr(miri, ignore = "sockets")]
fn a_rank_that_is_slow_to_read_long_blobs_is_not_unreachable() {
    // First more than a receive window, but all of it fits in the sender's socket; then more than both sockets hold.
    for bytes in [1 << 20, 16 << 20] {
        // On a busy machine the blobs may arrive before the rank waits for them.
        assert!((0..50).any(|_| read_slowly(bytes)), "the rank was not slow");
    }
}

/// Runs an exchange in which one rank does not read the blobs for longer than the network timeout. Returns false if the
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
            // Another exchange shows whether the connection is still open.
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

/// The timeout applies even if connections send a byte now and then.
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

/// If rank 0 is stopped after it has sent which rank it waits for, the other ranks name rank 0.
#[test]
fn a_rank_0_that_stops_while_it_waits_for_another_rank_is_named() {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
    static HAS_JOINED: AtomicBool = AtomicBool::new(false);
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    static IS_REPORTED: AtomicBool = AtomicBool::new(false);
    // All ranks must join within this time, even on a busy machine, and rank 0 must be silent for two seconds of it.
    let timeout = Duration::from_secs(4);
    let (listener, address) = listener();
    std::thread::scope(|scope| {
        let stopping = Interrupt::new(|| {
            // Stop at the second call in the exchange: after the first one, rank 0 sends which rank it waits for.
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
