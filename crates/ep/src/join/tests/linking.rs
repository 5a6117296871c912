//! Links between the ranks, after joining.

use super::*;

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
    // Rank 1 knows a different invitation of rank 2 than the other ranks, as if rank 1 belonged to a different job.
    let (doors, invitations) = doors(3);
    let other = Door::open().unwrap();
    let told = |rank: usize| {
        let mut told = invitations.clone();
        if rank == 1 {
            told[2] = other.invitation().clone();
        }
        told
    };
    // Rank 1 gives up first. If another rank did, that rank would close its door, and rank 1 would report it as dead.
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
        .filter_map(|_| super::super::local::connect(&format!("hybrid-ep/link/{}", &text[..32])).ok())
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
        // The door stays open, so that only the rendezvous can report the failure.
        let door = Door::open().unwrap();
        two.all_gather(door.invitation().to_string().as_bytes()).unwrap();
        two.abandon(EnvironmentError::new("linking", "no route", "").into());
        for rank in [zero, one] {
            assert_eq!(rank.join().unwrap(), (Rank(2), PeerFault::Failed));
        }
    });
}
