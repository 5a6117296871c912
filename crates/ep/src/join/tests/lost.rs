//! Ranks that are absent or lost, and which rank the errors name.

use super::*;

#[test]
fn every_rank_names_the_absent_rank() {
    // Every rank must join within this time, even on a busy machine.
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
        // Rank 0 must admit rank 1 within this time, even on a busy machine.
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
        let prepared = super::super::store::Listener::Tcp(listener.try_clone().unwrap()).prepared().unwrap();
        let mut reception =
            super::super::reception::Reception::new(&prepared, secret.key(), Role::Rendezvous);
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
        // Every rank must join within rank 0's timeout, even on a busy machine.
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
            // After this pause, rank 0 has closed the connection, so sending fails.
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
