//! The suite of carriers, over [`LocalNetwork`] and over carriers with one fault each.

use super::*;
use crate::conformance::{CarrierFailure, check_carrier};

/// Runs the suite with what `carrier` makes for each rank.
fn check<C: Carrier + 'static>(count: usize, carrier: impl Fn(Rank) -> C) -> Result<(), CarrierFailure> {
    let ranks = ranks(count);
    let carriers: Vec<(Rank, C)> = ranks.iter().map(|&rank| (rank, carrier(rank))).collect();
    let bound = Duration::from_secs(2);
    std::thread::scope(|scope| {
        let threads: Vec<_> = carriers
            .iter()
            .map(|(rank, carrier)| scope.spawn(|| check_carrier(*rank, &ranks, carrier, bound)))
            .collect();
        let mut outcomes = threads.into_iter().map(|thread| thread.join().unwrap());
        outcomes.find(Result::is_err).unwrap_or(Ok(()))
    })
}

#[test]
fn threads_of_one_process_pass_the_suite() {
    for count in [2, 3] {
        let network = LocalNetwork::new();
        check(count, |rank| network.carrier(rank)).unwrap();
    }
}

/// What a broken carrier does with a message.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Loses(Lane),
    Changes(Lane),
    Mixes(Lane, Lane),
    NeverCloses,
}

#[derive(Debug)]
struct Broken {
    of: LocalCarrier,
    fault: Fault,
}

impl Carrier for Broken {
    fn send(&self, to: Rank, lane: Lane, message: Arc<Vec<u8>>) -> Result<Box<dyn Sending>, CarrierError> {
        match self.fault {
            Fault::Loses(lost) if lost == lane && message.len() == 5 => self.of.send(Rank(99), lane, message),
            Fault::Changes(lost) if lost == lane && message.len() > 4080 => {
                let mut changed = message.to_vec();
                changed[4080] ^= 1;
                self.of.send(to, lane, Arc::new(changed))
            }
            Fault::Mixes(from, into) if from == lane => self.of.send(to, into, message),
            _ => self.of.send(to, lane, message),
        }
    }

    fn receive(&self, from: Rank, lane: Lane, capacity: usize) -> Result<Box<dyn Receiving>, CarrierError> {
        self.of.receive(from, lane, capacity)
    }

    fn abort(&self) {
        match self.fault {
            // Sends a message in place of closing, so that the test ends.
            Fault::NeverCloses => {
                for to in ranks(2) {
                    drop(self.of.send(to, Lane::Headers, Arc::new(vec![0])));
                }
                self.of.abort();
            }
            _ => self.of.abort(),
        }
    }
}

#[test]
fn carriers_with_a_fault_fail() {
    for fault in [
        Fault::Loses(Lane::Gradients),
        Fault::Changes(Lane::LongGradients),
        Fault::Mixes(Lane::Weights, Lane::Gradients),
        Fault::NeverCloses,
    ] {
        let network = LocalNetwork::new();
        let outcome = check(2, |rank| Broken { of: network.carrier(rank), fault });
        assert!(outcome.is_err(), "{fault:?}");
    }
}
