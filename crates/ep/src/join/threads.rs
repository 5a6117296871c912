//! [`ThreadRendezvous`], the rendezvous of the threads of one process.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::Rendezvous;
use crate::error::{PeerError, PeerFault, Result};
use crate::topology::Rank;

/// The rendezvous of the threads of one process: one value for each rank.
#[derive(Debug)]
pub struct ThreadRendezvous {
    rank: Rank,
    timeout: Duration,
    table: Arc<Table>,
}

#[derive(Debug)]
struct Table {
    state: Mutex<TableState>,
    changed: Condvar,
}

#[derive(Debug)]
struct TableState {
    round: u64,
    /// Blobs of the current round, by rank.
    blobs: Vec<Option<Vec<u8>>>,
    /// Blobs of the last complete round, by rank.
    gathered: Vec<Vec<u8>>,
}

impl ThreadRendezvous {
    /// The ends of `ranks` ranks, in rank order. `timeout` bounds each exchange.
    pub fn new(ranks: usize, timeout: Duration) -> Vec<Self> {
        let state = TableState { round: 0, blobs: vec![None; ranks], gathered: Vec::new() };
        let table = Arc::new(Table { state: Mutex::new(state), changed: Condvar::new() });
        (0..ranks as u32).map(|rank| Self { rank: Rank(rank), timeout, table: Arc::clone(&table) }).collect()
    }
}

impl Rendezvous for ThreadRendezvous {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.table.state.lock().unwrap_or_else(PoisonError::into_inner).blobs.len()
    }

    fn all_gather(&mut self, blob: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut state = self.table.state.lock().unwrap_or_else(PoisonError::into_inner);
        let round = state.round;
        state.blobs[self.rank.index()] = Some(blob.to_vec());
        if state.blobs.iter().all(Option::is_some) {
            state.gathered = state.blobs.iter_mut().filter_map(Option::take).collect();
            state.round += 1;
            self.table.changed.notify_all();
        }
        let (state, result) = self
            .table
            .changed
            .wait_timeout_while(state, self.timeout, |state| state.round == round)
            .unwrap_or_else(PoisonError::into_inner);
        if result.timed_out() {
            let absent = state.blobs.iter().position(Option::is_none).unwrap_or(0);
            let (peer, waited_for) = (Rank(absent as u32), "its part of the rendezvous");
            let error = PeerError::joining(self.rank, peer, PeerFault::Absent, waited_for, self.timeout);
            return Err(PeerError { step: round, ..error }.into());
        }
        Ok(state.gathered.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn threads_exchange_blobs_in_every_round() {
        let met = std::thread::scope(|scope| {
            let ends = ThreadRendezvous::new(3, Duration::from_secs(20));
            let threads: Vec<_> = ends
                .into_iter()
                .map(|mut end| {
                    scope.spawn(move || {
                        (0..50u8)
                            .map(|round| end.all_gather(&[round, end.rank().0 as u8]).unwrap())
                            .collect::<Vec<_>>()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        for rounds in met {
            for (round, blobs) in (0..50u8).zip(rounds) {
                assert_eq!(blobs, [[round, 0], [round, 1], [round, 2]]);
            }
        }
        let error = ThreadRendezvous::new(2, Duration::from_millis(20))[0].all_gather(&[]).unwrap_err();
        assert!(error.to_string().starts_with("rank 1 never joined"), "{error}");
    }

    #[test]
    fn an_error_has_the_round_in_which_a_rank_is_absent() {
        let mut ends = ThreadRendezvous::new(2, Duration::from_secs(1));
        std::thread::scope(|scope| {
            for end in &mut ends {
                scope.spawn(|| end.all_gather(&[]).unwrap());
            }
        });
        match ends[0].all_gather(&[]).unwrap_err() {
            Error::Peer(absent) => assert_eq!((absent.step, absent.peer), (1, Rank(1))),
            other => panic!("{other}"),
        }
    }
}
