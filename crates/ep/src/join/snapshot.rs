//! [`SnapshotLink`]: a link to a rank on another machine that carries snapshots of this rank's state.
//!
//! A later snapshot replaces an earlier one, so the loss of one is harmless.
//!
//! A stopped process reads nothing. Its machine acknowledges what arrives until the socket's receive window is full. The
//! system treats a full window as a machine that acknowledges nothing, and ends the connection after
//! [`Member::network_timeout`](super::Member::network_timeout): the peer would appear unreachable. So every snapshot
//! says how many snapshots its sender has read, and a rank sends only answers while [`UNREAD`] of its snapshots are unread.
//! A connection without unsent bytes stays open as long as the other machine answers the system's probes.
//!
//! The number of bytes that the system has not sent (`SIOCOUTQ`) does not show in time that the peer reads nothing. It is 0
//! until the window is full, and then it is too late: bytes that a socket has taken cannot be withdrawn.

use super::link::LinkSender;

/// While this many snapshots of a rank are unread, the rank sends a snapshot only to report snapshots that it has newly read.
/// So at most twice this number can be unread. A message with a snapshot of [`SnapshotLink::LONGEST`] bytes has 1069 bytes,
/// so the unread messages take at most 34 KiB. Linux's default receive buffer has 128 KiB.
const UNREAD: u64 = 16;
/// Bytes of the count before a snapshot.
const COUNT: usize = size_of::<u64>();

/// The sending direction of a link to a rank on another machine, and the numbers of snapshots in both directions.
#[derive(Debug)]
pub struct SnapshotLink {
    sender: LinkSender,
    flow: Flow,
}

/// Numbers of snapshots on a link, since it was made.
#[derive(Debug, Clone, Default)]
struct Flow {
    /// Sent by this rank.
    sent: u64,
    /// Of these, read by the peer, as its newest snapshot said.
    read: u64,
    /// Read by this rank.
    received: u64,
    /// Of these, those that this rank's newest snapshot counted.
    told: u64,
}

impl Flow {
    /// Whether this rank may send a snapshot. A rank that has read snapshots may always send the new count: otherwise two
    /// ranks with [`UNREAD`] snapshots in flight would wait for each other's counts.
    fn is_open(&self) -> bool {
        self.sent - self.read < UNREAD || self.told < self.received
    }

    /// Counts a snapshot that this rank sends. Returns the count that goes with it.
    fn send(&mut self) -> u64 {
        self.sent += 1;
        self.told = self.received;
        self.received
    }

    /// Counts a snapshot that has arrived with the peer's count. Returns whether the count is possible.
    #[must_use]
    fn receive(&mut self, read: u64) -> bool {
        let is_possible = (self.read..=self.sent).contains(&read);
        if is_possible {
            self.read = read;
            self.received += 1;
        }
        is_possible
    }
}

impl SnapshotLink {
    /// The longest snapshot, in bytes.
    pub const LONGEST: usize = 1024;

    /// A link over which no message was sent yet.
    pub fn new(sender: LinkSender) -> Self {
        Self { sender, flow: Flow::default() }
    }

    /// Sends a snapshot without waiting. Drops it if the socket has no room or the peer does not read, unless it is the
    /// `last` one of this rank.
    ///
    /// `snapshot` is called when the snapshot is sent. If several threads send over this link under a lock, a later
    /// message therefore never has an earlier state.
    ///
    /// # Panics
    /// When the snapshot is longer than [`LONGEST`](Self::LONGEST).
    pub fn send(&mut self, last: bool, snapshot: impl FnOnce() -> Vec<u8>) {
        let goes = last || (self.flow.is_open() && self.sender.has_room());
        if !goes {
            return;
        }
        let snapshot = snapshot();
        assert!(snapshot.len() <= Self::LONGEST, "a snapshot of {} bytes", snapshot.len());
        let read = self.flow.send();
        self.sender.queue(&[&read.to_le_bytes()[..], &snapshot].concat());
    }

    /// The snapshot in a message of the peer; `None` for a message that breaks the protocol.
    pub fn receive<'a>(&mut self, body: &'a [u8]) -> Option<&'a [u8]> {
        let (read, snapshot) = body.split_first_chunk::<COUNT>()?;
        self.flow.receive(u64::from_le_bytes(*read)).then_some(snapshot)
    }

    /// Sends a leave message, and no message after it.
    pub fn leave(&mut self) {
        self.sender.leave();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::net::Ipv4Addr;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::super::{Door, LinkEvent, LinkReceiver, Links, Member};
    use super::*;
    use crate::topology::Rank;

    #[test]
    fn unread_snapshots_close_a_flow_until_the_peer_has_read_some() {
        let mut flow = Flow::default();
        for round in 1..=3 {
            for _ in 0..UNREAD {
                assert!(flow.is_open());
                let _ = flow.send();
            }
            assert!(!flow.is_open());
            assert!(flow.receive(round * UNREAD));
            // This rank owes the peer a count, and may send it.
            assert!(flow.is_open());
            flow.told = flow.received;
        }
        assert!(!flow.receive(3 * UNREAD + 1), "the peer cannot have read what was not sent");
    }

    const NETWORK_TIMEOUT: Duration = Duration::from_millis(500);

    /// The two ends of a link over TCP.
    fn linked() -> [(SnapshotLink, LinkReceiver); 2] {
        let mut doors = [(); 2].map(|()| Door::open().unwrap());
        let invitations = doors.each_mut().map(|door| {
            let address = door.open_to(Ipv4Addr::LOCALHOST.into()).unwrap();
            door.invitation().clone().at(address)
        });
        std::thread::scope(|scope| {
            let mut rank = 0..;
            let threads = doors.map(|door| {
                let mut member = Member::new(Rank(rank.next().unwrap()), 2, Duration::from_secs(60));
                member.network_timeout = NETWORK_TIMEOUT;
                let invitations = &invitations;
                scope.spawn(move || Links::connect(door, &member, invitations, || None).unwrap())
            });
            threads.map(|thread| {
                let (sender, receiver) = thread.join().unwrap().links.pop().unwrap().1.split();
                (SnapshotLink::new(sender), receiver)
            })
        })
    }

    /// Reads what has arrived. Returns the number of snapshots.
    fn read((link, receiver): &mut (SnapshotLink, LinkReceiver)) -> usize {
        let mut count = 0;
        while let Some(LinkEvent::Message(body, _)) = receiver.wait(NETWORK_TIMEOUT) {
            assert_eq!(link.receive(&body), Some(&b"the state of this rank"[..]));
            count += 1;
        }
        count
    }

    /// A rank that reads nothing, like a stopped process, has a machine that acknowledges what arrives.
    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_rank_that_reads_nothing_is_not_unreachable() {
        let [mut running, mut stopped] = linked();
        let own = || b"the state of this rank".to_vec();
        // More than all buffers hold.
        (0..100_000).for_each(|_| running.0.send(false, own));
        let event = running.1.wait(8 * NETWORK_TIMEOUT);
        assert!(event.is_none(), "{event:?}");
        // The stopped rank resumes, reads what has arrived, and answers.
        assert_eq!(read(&mut stopped), UNREAD as usize);
        stopped.0.send(false, own);
        assert_eq!(read(&mut running), 1);
        running.0.send(false, own);
        assert_eq!(read(&mut stopped), 1);
    }

    /// Two ranks: their flows, and the counts on the way to each.
    #[derive(Default)]
    struct Pair {
        flows: [Flow; 2],
        ways: [VecDeque<u64>; 2],
    }

    impl Pair {
        fn send(&mut self, from: usize) -> bool {
            let is_open = self.flows[from].is_open();
            if is_open {
                let count = self.flows[from].send();
                self.ways[1 - from].push_back(count);
            }
            is_open
        }

        fn read(&mut self, rank: usize) {
            if let Some(count) = self.ways[rank].pop_front() {
                assert!(self.flows[rank].receive(count));
            }
        }
    }

    proptest! {
        /// Sends and reads in any order; then, in some cases, one rank stops for a while; then both ranks run.
        #[test]
        fn few_snapshots_are_unread_and_ranks_never_wait_for_each_other(
            steps in prop::collection::vec((0..2_usize, any::<bool>()), 0..600),
            stops in any::<bool>(),
            stopped in 0..2_usize,
        ) {
            let mut pair = Pair::default();
            for (rank, sends) in steps {
                if sends { pair.send(rank); } else { pair.read(rank) }
                for way in &pair.ways {
                    prop_assert!(way.len() as u64 <= 2 * UNREAD);
                }
            }
            let running = 1 - stopped;
            if stops {
                for _ in 0..10 * UNREAD {
                    pair.read(running);
                    pair.send(running);
                }
                prop_assert!(!pair.flows[running].is_open());
                prop_assert!(pair.ways[stopped].len() as u64 <= 2 * UNREAD);
            }
            // Both ranks send again and again. In the first round, a rank may wait for the count of the other one.
            for round in 0..10 * UNREAD {
                for rank in [stopped, running] {
                    while !pair.ways[rank].is_empty() {
                        pair.read(rank);
                    }
                    prop_assert!(pair.send(rank) || round == 0);
                }
            }
        }
    }

    #[test]
    fn ranks_whose_snapshots_cross_do_not_wait_for_each_other() {
        let mut pair = Pair::default();
        for rank in [0, 1] {
            (0..2 * UNREAD).for_each(|_| _ = pair.send(rank));
        }
        assert_eq!(pair.ways.each_ref().map(VecDeque::len), [UNREAD as usize; 2]);
        for rank in [0, 1] {
            while !pair.ways[rank].is_empty() {
                pair.read(rank);
            }
        }
        assert!(pair.send(0) && pair.send(1));
    }

    #[test]
    fn a_count_of_snapshots_that_were_never_sent_or_were_counted_before_is_impossible() {
        let mut flow = Flow::default();
        for _ in 0..3 {
            assert_eq!(flow.send(), 0);
        }
        assert!(flow.receive(2) && !flow.receive(1) && !flow.receive(4) && flow.receive(3));
    }
}
