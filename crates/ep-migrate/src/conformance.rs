//! The checks that every carrier must pass: [`check_carrier`].
//!
//! Every rank, a thread or a process, calls [`check_carrier`] with its own end. A carrier that loses a message would let a
//! rank wait without end, so the checks close their carrier after a bound, which ends all waits.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use ep::Rank;

use crate::carrier::{Carrier, CarrierError, Lane, Receiving, Sending};

/// Lengths of messages, bytes: those around the lengths of slots are the likely ones to be wrong.
const LENGTHS: [usize; 9] = [0, 1, 64, 4079, 4080, 4081, 30_000, 3, 100_001];
/// Short messages in a row.
const SHORT: usize = 200;
/// Length of a body that no lane may wait for.
const LONG: usize = 400_000;

/// A check that failed on one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CarrierFailure {
    /// The rank that found the failure.
    pub rank: Rank,
    /// The check.
    pub check: &'static str,
    /// What is wrong.
    pub problem: String,
}

impl std::fmt::Display for CarrierFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {}, {}: {}", self.rank, self.check, self.problem)
    }
}

impl std::error::Error for CarrierFailure {}

type Outcome = Result<(), String>;
/// The name of a check, and what it does.
type Check = (&'static str, fn(&End<'_>) -> Outcome);

/// Runs all checks as rank `own` of `ranks`, which are at least two. The last check closes the carrier of the first rank.
///
/// # Errors
/// [`CarrierFailure`]: the first check that failed. All checks together take at most `bound`.
pub fn check_carrier(
    own: Rank,
    ranks: &[Rank],
    carrier: &dyn Carrier,
    bound: Duration,
) -> Result<(), CarrierFailure> {
    assert!(ranks.len() > 1 && ranks.contains(&own), "rank {own} of {ranks:?}");
    let end = End { own, ranks, carrier };
    let checks: [Check; 5] = [
        ("messages of every length", |end| end.lengths()),
        ("receives that are waited for in reverse order", |end| end.reversed()),
        ("many short messages", |end| end.short()),
        ("lanes that do not wait for each other", |end| end.lanes()),
        ("a rank that closes its carrier", |end| end.close()),
    ];
    std::thread::scope(|scope| {
        let (done, is_done) = channel::<()>();
        scope.spawn(move || {
            if is_done.recv_timeout(bound) == Err(RecvTimeoutError::Timeout) {
                carrier.abort();
            }
        });
        let failure = checks.into_iter().find_map(|(check, run)| {
            run(&end).err().map(|problem| CarrierFailure { rank: own, check, problem })
        });
        drop(done);
        failure.map_or(Ok(()), Err)
    })
}

/// One rank's end.
struct End<'a> {
    own: Rank,
    ranks: &'a [Rank],
    carrier: &'a dyn Carrier,
}

/// The bytes of message `number` of a lane.
fn content(from: Rank, to: Rank, lane: Lane, number: usize, len: usize) -> Vec<u8> {
    let seed = (from.0 as usize * 31 + to.0 as usize) * 31 + lane as usize * 7 + number;
    (0..len).map(|at| (seed + at * 13 + at / 251) as u8).collect()
}

fn failed(what: impl std::fmt::Display) -> impl FnOnce(CarrierError) -> String {
    move |error| format!("{what}: {error}")
}

impl End<'_> {
    fn peers(&self) -> impl Iterator<Item = Rank> + '_ {
        self.ranks.iter().copied().filter(|&rank| rank != self.own)
    }

    fn send(&self, to: Rank, lane: Lane, number: usize, len: usize) -> Result<Box<dyn Sending>, String> {
        let message = Arc::new(content(self.own, to, lane, number, len));
        self.carrier.send(to, lane, message).map_err(failed(format!("sending to rank {to}")))
    }

    fn receive(&self, from: Rank, lane: Lane, capacity: usize) -> Result<Box<dyn Receiving>, String> {
        self.carrier.receive(from, lane, capacity).map_err(failed(format!("a receive from rank {from}")))
    }

    /// Waits for message `number` of a lane, and compares it.
    fn expect(
        &self,
        receive: Box<dyn Receiving>,
        from: Rank,
        lane: Lane,
        number: usize,
        len: usize,
    ) -> Outcome {
        let what = || format!("message {number} of rank {from} in {lane:?}, {len} bytes");
        let found = receive.wait(len).map_err(failed(what()))?;
        match found == content(from, self.own, lane, number, len) {
            true => Ok(()),
            false => Err(format!("{} has other content", what())),
        }
    }

    /// Sends messages of these lengths to all peers in all lanes, and receives theirs. A receive is posted `ahead` messages
    /// before its message is sent, or after it if `ahead` is negative. Some have room for more than the message.
    fn exchange(&self, lengths: &[usize], ahead: isize) -> Outcome {
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        let shift = ahead.unsigned_abs();
        let (receives_late, sends_late) = if ahead < 0 { (shift, 0) } else { (0, shift) };
        for step in 0..lengths.len() + shift {
            let number = |late: usize| step.checked_sub(late).filter(|&number| number < lengths.len());
            for (peer, lane) in self.peers().flat_map(|peer| Lane::ALL.map(|lane| (peer, lane))) {
                if let Some(number) = number(receives_late) {
                    let len = lengths[number];
                    let receive = self.receive(peer, lane, len + 17 * (number % 2))?;
                    receives.push((receive, peer, lane, number, len));
                }
                if let Some(number) = number(sends_late) {
                    sends.push(self.send(peer, lane, number, lengths[number])?);
                }
            }
        }
        for (receive, peer, lane, number, len) in receives {
            self.expect(receive, peer, lane, number, len)?;
        }
        sends.into_iter().try_for_each(|send| send.wait().map_err(failed("a message to be sent")))
    }

    fn lengths(&self) -> Outcome {
        let all = LENGTHS.len() as isize;
        [0, 3, all, -2, -all].into_iter().try_for_each(|ahead| self.exchange(&LENGTHS, ahead))
    }

    fn short(&self) -> Outcome {
        self.exchange(&[5; SHORT], 16)
    }

    fn reversed(&self) -> Outcome {
        for peer in self.peers() {
            let receive = |len| self.receive(peer, Lane::Weights, len);
            let receives = LENGTHS.iter().map(|&len| receive(len)).collect::<Result<Vec<_>, _>>()?;
            for (number, &len) in LENGTHS.iter().enumerate() {
                self.send(peer, Lane::Weights, number, len)?;
            }
            for (number, receive) in receives.into_iter().enumerate().rev() {
                self.expect(receive, peer, Lane::Weights, number, LENGTHS[number])?;
            }
        }
        Ok(())
    }

    /// Sends a long body whose receive the peer posts only after messages in all other lanes have gone both ways.
    fn lanes(&self) -> Outcome {
        let mut long = Vec::new();
        for peer in self.peers() {
            long.push(self.send(peer, Lane::LongWeights, 0, LONG)?);
        }
        for peer in self.peers() {
            for lane in Lane::ALL.into_iter().filter(|&lane| lane != Lane::LongWeights) {
                let receive = self.receive(peer, lane, 100)?;
                self.send(peer, lane, 1, 100)?;
                self.expect(receive, peer, lane, 1, 100)?;
            }
        }
        for peer in self.peers() {
            let receive = self.receive(peer, Lane::LongWeights, LONG)?;
            self.expect(receive, peer, Lane::LongWeights, 0, LONG)?;
        }
        long.into_iter().try_for_each(|send| send.wait().map_err(failed("the long body to be sent")))
    }

    /// The first rank sends last messages and closes its carrier. What it has sent still arrives if the receive was posted,
    /// whether it has waited for it or not; all other waits for it end; the other ranks still reach each other.
    fn close(&self) -> Outcome {
        let first = self.ranks[0];
        if self.own == first {
            for peer in self.peers() {
                self.receive(peer, Lane::Headers, 1)?.wait(1).map_err(failed("news of posted receives"))?;
                self.send(peer, Lane::Gradients, 7, 5000)?.wait().map_err(failed("the last message"))?;
            }
            for peer in self.peers() {
                self.send(peer, Lane::Weights, 8, 20_000)?;
            }
            self.carrier.abort();
            let receive = self.carrier.receive(self.ranks[1], Lane::Headers, 1);
            return match receive.and_then(|receive| receive.wait(1)) {
                Err(CarrierError::Closed) => Ok(()),
                other => Err(format!("a receive of the rank that has closed gave {other:?}")),
            };
        }
        let none = self.receive(first, Lane::Headers, 1)?;
        let waited_for = self.receive(first, Lane::Gradients, 5000)?;
        let last = self.receive(first, Lane::Weights, 20_000)?;
        self.send(first, Lane::Headers, 0, 1)?;
        match none.wait(1) {
            Err(CarrierError::Closed) => {}
            other => return Err(format!("a message that was never sent gave {other:?}")),
        }
        self.expect(waited_for, first, Lane::Gradients, 7, 5000)?;
        self.expect(last, first, Lane::Weights, 8, 20_000)?;
        let others: Vec<Rank> = self.ranks[1..].to_vec();
        if others.len() > 1 {
            let rest = End { ranks: &others, ..*self };
            rest.exchange(&[9, 10_000], 1)?;
        }
        Ok(())
    }
}
