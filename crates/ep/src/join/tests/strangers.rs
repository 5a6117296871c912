//! Connections and processes that do not belong to the job.

use super::*;

#[test]
fn a_process_of_an_earlier_start_of_the_job_is_refused_and_the_job_goes_on() {
    let (listener, address) = listener();
    let store = address.to_string();
    let of = |rank, generation| Member { generation, ..member(rank, 2, LONG) };
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| TcpRendezvous::host(&listener, of(0, 2))?.all_gather(b"zero"));
        let old = TcpRendezvous::join(&store, of(1, 1)).unwrap_err().to_string();
        let expected = "joining as rank 1 of 2: the job at this store is generation 2, but this process is of generation 1; this process or rank 0 is left over";
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
            // The recorded offer is valid and gets an answer. The recorded proof is for a different nonce and is rejected.
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

/// A length beyond the bound, a length of 0 and a wrong code each end the connection.
#[test]
fn forged_and_oversized_messages_end_the_connection() {
    for forged in [&u32::MAX.to_le_bytes()[..], &[0; 4], &[&3u32.to_le_bytes()[..], &[0; 40]].concat()] {
        let (listener, address) = listener();
        std::thread::scope(|scope| {
            let zero = scope.spawn(|| TcpRendezvous::host(&listener, member(0, 2, LONG))?.all_gather(b""));
            let mut one = proven(address, 1, 2, &secret()).unwrap();
            while next(&mut one) != [kind::MET] {}
            one.wire_mut().send(super::super::wire::Piece::Own(forged.to_vec()));
            one.wire_mut().flush();
            let error = peer_error(zero.join().unwrap());
            assert_eq!((error.peer, error.fault), (Rank(1), PeerFault::Failed), "{error}");
        });
    }
}
