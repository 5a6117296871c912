//! Tests of links, and of which rank an error names when a link ends or cannot be made.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rustix::event::{PollFd, PollFlags};

use super::super::{LinkEvent, LinkReceiver, LinkSender};
use super::*;
use crate::error::PeerError;

const LONG: Duration = Duration::from_secs(60);

/// Links two ranks over the network. Returns the links of each.
fn two_machines() -> [Links; 2] {
    two_machines_at(|address| address, LONG).map(Result::unwrap)
}

/// Like [`two_machines`], with addresses that `spoil` has changed, and with the timeout of rank 0.
fn two_machines_at(spoil: impl Fn(SocketAddr) -> SocketAddr, timeout: Duration) -> [Result<Links>; 2] {
    let mut doors = [(); 2].map(|()| Door::open().unwrap());
    let addresses = doors.each_mut().map(|door| door.open_to(Ipv4Addr::LOCALHOST.into()).unwrap());
    let invitations = [0, 1].map(|rank| {
        let invitation = doors[rank].invitation().clone();
        invitation.at(spoil(addresses[rank]))
    });
    std::thread::scope(|scope| {
        let mut members = [timeout, LONG].into_iter().zip(0..);
        let threads = doors.map(|door| {
            let (timeout, rank) = members.next().unwrap();
            let member = Member::new(Rank(rank), 2, timeout);
            let invitations = &invitations;
            scope.spawn(move || Links::connect(door, &member, invitations, || None))
        });
        threads.map(|thread| thread.join().unwrap())
    })
}

fn halves(mut links: Links) -> (LinkSender, LinkReceiver) {
    let (_, link) = links.links.pop().unwrap();
    assert!(link.is_remote() && link.process().is_none());
    link.split()
}

#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn links_between_machines_carry_messages_and_end_with_a_leave_message_or_a_death() {
    for leaves in [true, false] {
        let [mut one, mut other] = two_machines().map(halves);
        one.0.try_send(b"first");
        one.0.queue(b"second");
        for expected in [&b"first"[..], b"second"] {
            match other.1.wait(LONG) {
                Some(LinkEvent::Message(body, None)) => assert_eq!(body, expected),
                event => panic!("{event:?}"),
            }
        }
        if leaves {
            one.0.leave();
            assert!(matches!(other.1.wait(LONG), Some(LinkEvent::Left)));
        } else {
            // The system closes the sockets of a process that is killed.
            rustix::net::shutdown(&one.0, rustix::net::Shutdown::Both).unwrap();
            assert!(matches!(other.1.wait(LONG), Some(LinkEvent::Died)));
        }
        other.0.try_send(b"to a rank that is gone");
    }
}

/// A peer that was stopped for a while reads all that was sent to it before the link ended.
#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn a_leave_message_follows_messages_that_the_socket_had_no_room_for() {
    let [mut one, mut other] = two_machines().map(halves);
    let mut sent = 0;
    while one.0.has_room() {
        one.0.queue(&[7; 60_000]);
        sent += 1;
    }
    std::thread::scope(|scope| {
        let read = scope.spawn(move || {
            let mut messages = 0;
            loop {
                match other.1.wait(LONG) {
                    Some(LinkEvent::Message(..)) => messages += 1,
                    Some(LinkEvent::Left) => break messages,
                    event => panic!("{event:?} after {messages} messages"),
                }
            }
        });
        one.0.leave();
        assert_eq!(read.join().unwrap(), sent);
    });
}

#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn both_directions_of_a_link_share_one_descriptor() {
    use std::os::fd::{AsFd as _, AsRawFd as _};
    let [one, mut other] = two_machines().map(halves);
    let (sender, mut receiver) = one;
    assert_eq!(sender.as_fd().as_raw_fd(), receiver.as_fd().as_raw_fd());
    // The descriptor stays open until both directions are dropped.
    drop(sender);
    assert!(matches!(other.1.wait(LONG), Some(LinkEvent::Left)));
    other.0.queue(b"to the receiver");
    assert!(
        matches!(receiver.wait(LONG), Some(LinkEvent::Message(body, None)) if body == b"to the receiver")
    );
}

#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn a_rank_whose_address_answers_to_nothing_is_named() {
    // A port that was bound a moment ago, and is free again.
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let [zero, one] = two_machines_at(|_| free, Duration::from_secs(2));
    let said = one.as_ref().unwrap_err().to_string();
    assert!(said.contains(&format!("{free} refuses connections; does a firewall reject them?")), "{said}");
    let fault = |links: Result<Links>| match links {
        Err(Error::Peer(PeerError { peer, fault, .. })) => (peer, fault),
        other => panic!("{other:?}"),
    };
    // Rank 1 connects to rank 0, which waits for it.
    assert_eq!(fault(one), (Rank(0), PeerFault::Died));
    assert_eq!(fault(zero), (Rank(1), PeerFault::Late));
}

#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn a_rank_of_this_machine_cannot_link_over_the_network() {
    let mut doors = [(); 2].map(|()| Door::open().unwrap());
    let address = doors[0].open_to(Ipv4Addr::LOCALHOST.into()).unwrap();
    let honest: Vec<Invitation> = doors.iter().map(|door| door.invitation().clone()).collect();
    let mut lying = honest.clone();
    lying[0] = lying[0].clone().at(address);
    std::thread::scope(|scope| {
        let [zero, one] = doors;
        let member = |rank| Member::new(Rank(rank), 2, Duration::from_millis(300));
        let (honest, lying) = (&honest, &lying);
        let zero = scope.spawn(move || Links::connect(zero, &member(0), honest, || None));
        let one = scope.spawn(move || Links::connect(one, &member(1), lying, || None));
        for rank in [zero, one] {
            assert!(rank.join().unwrap().is_err());
        }
    });
}

/// The doors of `N` ranks, the invitations of all of them, and the key of their links.
fn doors<const N: usize>() -> ([Door; N], Vec<Invitation>, Key) {
    let doors = [(); N].map(|()| Door::open().unwrap());
    let invitations: Vec<Invitation> = doors.iter().map(|door| door.invitation().clone()).collect();
    let shares: Vec<&[u8]> = invitations.iter().map(|invitation| &invitation.share[..]).collect();
    let key = Key::of(b"hybrid-ep links", b"").derive(b"links", &shares);
    (doors, invitations, key)
}

/// A member with a long timeout.
fn patient(rank: u32, ranks: usize) -> Member {
    Member::new(Rank(rank), ranks, LONG)
}

/// Connects to a rank that is connecting its links, as the rank that `claim` names.
fn call(to: &Invitation, key: &Key, claim: Claim) -> Channel {
    let (stream, _) = local::connect(&to.socket()).unwrap();
    let mut caller = Outbound::new(Socket::Unix(stream), key, Role::Link, claim).unwrap().unwrap();
    loop {
        match caller.advance(key) {
            Progress::Done((), channel) => return channel,
            Progress::Waiting => wait(&mut [caller.wire().unwrap().interest()], Instant::now() + LONG),
            Progress::Unauthenticated => panic!("the caller knows the secret"),
        }
    }
}

/// Accepts the link of a rank, and sends [`READY`].
fn answer(door: &Door, key: &Key) -> Channel {
    let mut reception = Reception::new(&door.listener, key, Role::Link);
    let (_, mut channel) = loop {
        match reception.turn().unwrap().pop() {
            Some(proven) => break proven,
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    channel.send(READY, &[]);
    channel.wire_mut().flush();
    channel
}

fn next(channel: &mut Channel) -> Incoming {
    loop {
        match channel.receive() {
            Some(incoming) => return incoming,
            None => wait(&mut [channel.wire().interest()], Instant::now() + LONG),
        }
    }
}

/// A peer drops a connection whose offer it has not read, for example to make room.
#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn a_rank_whose_connection_is_reset_connects_again() {
    let ([zero, one], invitations, _) = doors();
    let invitations = &invitations;
    std::thread::scope(|scope| {
        let one = scope.spawn(move || Links::connect(one, &patient(1, 2), invitations, || None));
        let unread = loop {
            match zero.listener.accept() {
                Ok(socket) => break socket.unwrap(),
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        wait(&mut [PollFd::new(&unread, PollFlags::IN)], Instant::now() + LONG);
        drop(unread);
        Links::connect(zero, &patient(0, 2), invitations, || None).unwrap();
        one.join().unwrap().unwrap();
    });
}

/// Rank 2 has a door but never links. The test first plays rank 0 towards rank 1, which fails once it has linked. Then the
/// test plays rank 1 towards rank 0.
#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn a_rank_that_fails_after_it_has_linked_is_named_while_another_rank_is_missing() {
    let ([zero, one, _two], invitations, key) = doors();
    let invitations = &invitations;
    let fails = &AtomicBool::new(false);
    let said = std::thread::scope(|scope| {
        let failing = scope.spawn(move || {
            let failure = || EnvironmentError::new("mapping memory", "no memory is left", "").into();
            let lost = || fails.load(Relaxed).then(failure);
            Links::connect(one, &patient(1, 3), invitations, lost)
        });
        let mut link = answer(&zero, &key);
        fails.store(true, Relaxed);
        let said = next(&mut link);
        let found = failing.join().unwrap();
        assert!(matches!(found, Err(Error::Environment(_))), "{found:?}");
        said
    });
    let Incoming::Message(said) = said else { panic!("{said:?}") };
    assert_eq!(said[0], kind::LOST);
    let error = std::thread::scope(|scope| {
        let zero = scope.spawn(move || Links::connect(zero, &patient(0, 3), invitations, || None));
        let claim = Claim { from: Rank(1), to: Rank(0), ranks: 3, generation: 0 };
        let mut link = call(&invitations[0], &key, claim);
        link.send(said[0], &said[1..]);
        link.finish();
        zero.join().unwrap().unwrap_err()
    });
    let Error::Peer(error) = error else { panic!("{error}") };
    assert_eq!((error.peer, error.fault), (Rank(1), PeerFault::Failed));
    assert!(error.cause.as_ref().is_some_and(|cause| cause.contains("no memory is left")), "{error}");
}

#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn a_rank_that_is_linked_at_the_second_attempt_is_not_lost() {
    let ([zero, _one, _two], invitations, key) = doors();
    let mut meeting = Meeting::new(&patient(1, 3), &key, &invitations);
    let fail = |meeting: &mut Meeting<'_>, at| {
        meeting.not_connected(at, ErrorKind::ConnectionRefused, String::new).unwrap();
        std::thread::sleep(GRACE_PERIOD);
    };
    fail(&mut meeting, 0);
    assert_eq!(meeting.loss().map(|loss| (loss.peer, loss.fault)), Some((Rank(0), PeerFault::Died)));
    let claim = Claim { from: Rank(1), to: Rank(0), ranks: 3, generation: 0 };
    let channel = std::thread::scope(|scope| {
        let answer = scope.spawn(|| answer(&zero, &key));
        let channel = call(&invitations[0], &key, claim);
        answer.join().unwrap();
        channel
    });
    meeting.peers[0].state = State::Linked { channel, process: None };
    assert!(meeting.loss().is_none());
    // A later failure of another rank counts.
    fail(&mut meeting, 2);
    assert_eq!(meeting.loss().map(|loss| loss.peer), Some(Rank(2)));
}

#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn a_claim_that_does_not_fit_gets_no_link() {
    let fits = Claim { from: Rank(1), to: Rank(0), ranks: 2, generation: 0 };
    let another_world = Claim { ranks: 3, ..fits };
    let another_rank = Claim { to: Rank(1), ..fits };
    let itself = Claim { from: Rank(0), ..fits };
    let no_rank = Claim { from: Rank(2), ..fits };
    for claim in [fits, another_world, another_rank, itself, no_rank] {
        let ([zero, _one], invitations, key) = doors();
        let (invitations, is_answered) = (&invitations, &AtomicBool::new(false));
        let (answer, found) = std::thread::scope(|scope| {
            let zero = scope.spawn(move || {
                let stop = || EnvironmentError::new("linking", "the caller has its answer", "").into();
                let lost = || is_answered.load(Relaxed).then(stop);
                Links::connect(zero, &patient(0, 2), invitations, lost)
            });
            // The connection stays open until rank 0 has linked: its end would mean the death of a linked rank.
            let mut caller = call(&invitations[0], &key, claim);
            let answer = next(&mut caller);
            is_answered.store(true, Relaxed);
            (answer, zero.join().unwrap())
        });
        let expected =
            if claim == fits { Incoming::Message(vec![READY]) } else { Incoming::End(End::Closed) };
        assert_eq!(answer, expected, "{claim:?}");
        assert_eq!(found.is_ok(), claim == fits, "{claim:?}: {found:?}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn only_the_ranks_that_are_linked_stamp_alike() {
    let stamps = || two_machines().map(|links| [&b"one"[..], b"two"].map(|what| links.stamp(what)));
    let [zero, one] = stamps();
    assert_eq!(zero, one);
    assert_ne!(zero[0], zero[1]);
    let [others, _] = stamps();
    assert!(zero.iter().all(|stamp| !others.contains(stamp)));
}

#[test]
fn invitations_survive_the_round_trip_as_text() {
    let door = Door::open().unwrap();
    let text = door.invitation().to_string();
    assert_eq!(text.parse().as_ref(), Ok(door.invitation()));
    assert_eq!(text.len(), 96);
    for wrong in ["", &text[2..], &format!("{text}0"), &text.replace(['0', '1', '2', '3'], "g")] {
        assert_eq!(wrong.parse::<Invitation>(), Err(NoInvitation), "{wrong}");
    }
    assert!(!format!("{door:?}").contains(&text[32..]));
}

#[test]
fn only_some_failures_of_a_connection_say_that_its_peer_is_lost() {
    let address = Address::Network((Ipv4Addr::LOCALHOST, 9).into());
    let fault = |kind| {
        let loss = loss_of(Rank(1), &address, kind, || "why".into()).unwrap();
        loss.map(|loss| loss.fault)
    };
    assert_eq!(fault(ErrorKind::ConnectionRefused), Some(PeerFault::Died));
    assert_eq!(fault(ErrorKind::TimedOut), Some(PeerFault::Unreachable));
    let local = |kind| loss_of(Rank(1), &Address::Local("a name".into()), kind, || "why".into());
    assert_eq!(local(ErrorKind::ConnectionRefused).unwrap().map(|loss| loss.fault), Some(PeerFault::Died));
    assert_eq!(local(ErrorKind::WouldBlock).unwrap(), None, "its queue of connections is full");
    assert!(local(ErrorKind::PermissionDenied).unwrap_err().to_string().contains("must run as one user"));
    for retried in [ErrorKind::ConnectionReset, ErrorKind::WouldBlock, ErrorKind::ConnectionAborted] {
        assert_eq!(fault(retried), None, "{retried:?}");
    }
}
