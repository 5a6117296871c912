//! One engine over several NICs of a rank: an engine on each NIC; these engines take puts in turn.
//!
//! A put goes through one NIC as a whole, with its signal, so the order within a put is that of the NIC's engine. Puts
//! have no order among each other, so they need none across NICs. The engine on the `n`-th NIC of a rank reaches the
//! `n`-th NIC of every peer, so all ranks of a rail must have the same number of NICs.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, TryLockError};
use std::time::Instant;

use ep::{
    CallerError, Error, Operator, PeerError, Posted, Put, Rail, Rank, Result, Signal, Transport, Unconnected,
};

use crate::blob::Blob;

/// The first bytes of a blob of several NICs. Change them with the format.
const MAGIC: &[u8; 8] = b"ep-nics1";

/// Engines that do not know their peers yet, one on each NIC.
pub(crate) struct Opened {
    rail: Rail,
    engines: Vec<Box<dyn Unconnected>>,
}

impl Opened {
    pub(crate) fn new(rail: Rail, engines: Vec<Box<dyn Unconnected>>) -> Self {
        Self { rail, engines }
    }
}

impl Unconnected for Opened {
    fn blob(&self) -> Vec<u8> {
        join(&self.engines.iter().map(|engine| engine.blob()).collect::<Vec<_>>())
    }

    fn connect(self: Box<Self>, blobs: &[Vec<u8>]) -> Result<Box<dyn Transport>> {
        let Self { rail, engines } = *self;
        let (ranks, nics) = (rail.ranks().len(), engines.len());
        if blobs.len() != ranks {
            let (what, unit) = ("the blobs of a rail", "blobs");
            return Err(CallerError::Shape { what, expected: ranks, found: blobs.len(), unit }.into());
        }
        // By NIC, the blobs of all ranks.
        let mut by_nic = vec![Vec::with_capacity(ranks); nics];
        for (&rank, blob) in rail.ranks().iter().zip(blobs) {
            let unusable = |found| PeerError::broken(rail.own(), rank, Operator::Join, 0, found);
            let parts = match split(blob) {
                Some(parts) if parts.len() == nics => parts,
                Some(parts) => return Err(unusable(different_numbers(parts.len(), nics)).into()),
                None if Blob::from_bytes(blob).is_some() => {
                    return Err(unusable(different_numbers(1, nics)).into());
                }
                None => {
                    return Err(unusable(format!("a malformed address of its window on {nics} NICs")).into());
                }
            };
            by_nic.iter_mut().zip(parts).for_each(|(of_nic, part)| of_nic.push(part.to_vec()));
        }
        let connected = engines.into_iter().zip(&by_nic).map(|(engine, blobs)| engine.connect(blobs));
        let engines: Vec<Box<dyn Transport>> = connected.collect::<Result<_>>()?;
        let name = format!("{} on {nics} NICs", engines[0].name());
        let mut near_cpus: Vec<usize> =
            engines.iter().flat_map(|engine| engine.near_cpus()).copied().collect();
        near_cpus.sort_unstable();
        near_cpus.dedup();
        let lost_by = (0..ranks).map(|_| AtomicUsize::new(NONE)).collect();
        let reports = Mutex::new(Reports { known: vec![false; ranks], waiting: VecDeque::new() });
        Ok(Box::new(Several { name, near_cpus, rail, engines, next: AtomicUsize::new(0), lost_by, reports }))
    }
}

/// What is wrong with a peer whose number of NICs differs from that of this rank.
pub(crate) fn different_numbers(theirs: usize, own: usize) -> String {
    let hint = "set HYBRID_EP_TRANSPORT_NIC to the same number of NICs for each rank";
    format!("{theirs} NICs for a rank, but this rank has {own}; {hint}")
}

/// The number of NICs of the rank that sent this blob; `None` if it is not a blob of several NICs.
pub(crate) fn count_in(blob: &[u8]) -> Option<usize> {
    split(blob).map(|parts| parts.len())
}

/// The blobs of the engines as one.
fn join(blobs: &[Vec<u8>]) -> Vec<u8> {
    let mut joined = MAGIC.to_vec();
    for blob in blobs {
        joined.extend((blob.len() as u32).to_le_bytes());
        joined.extend(blob);
    }
    joined
}

/// The inverse of [`join`]; `None` for bytes that it does not make.
fn split(joined: &[u8]) -> Option<Vec<&[u8]>> {
    let mut rest = joined.strip_prefix(MAGIC)?;
    let mut blobs = Vec::new();
    while !rest.is_empty() {
        let (len, tail) = rest.split_first_chunk()?;
        let (blob, tail) = tail.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        blobs.push(blob);
        rest = tail;
    }
    Some(blobs)
}

/// Connected engines, one on each NIC.
struct Several {
    name: String,
    /// The CPUs near any of the NICs.
    near_cpus: Vec<usize>,
    rail: Rail,
    engines: Vec<Box<dyn Transport>>,
    /// The engine that is offered the next put first, modulo the number of engines.
    next: AtomicUsize,
    /// By index on the rail: the engine that has found the peer gone; `NONE` if none has.
    lost_by: Vec<AtomicUsize>,
    /// The lock admits one poller at a time, so that signals have one reader.
    reports: Mutex<Reports>,
}

/// The errors that engines have reported.
struct Reports {
    /// By index on the rail: whether an engine has reported this peer.
    known: Vec<bool>,
    /// Errors that `poll` has not returned. A call may find several errors; it returns one and keeps the others here.
    waiting: VecDeque<Error>,
}

const NONE: usize = usize::MAX;

impl Several {
    /// Records what `engine` has found. Returns the index of the peer that is gone, if the error says that one is.
    fn record(&self, engine: usize, error: &Error) -> Option<usize> {
        let Error::Peer(PeerError { peer, .. }) = error else { return None };
        let index = self.rail.peer_index(*peer).ok()?;
        let _ = self.lost_by[index].compare_exchange(NONE, engine, Relaxed, Relaxed);
        Some(index)
    }

    /// The engine that has found a peer gone: its calls for this peer fail.
    fn lost_by(&self, peer: Rank) -> Result<Option<&dyn Transport>> {
        let engine = self.lost_by[self.rail.peer_index(peer)?].load(Relaxed);
        Ok(self.engines.get(engine).map(|engine| &**engine))
    }
}

impl Transport for Several {
    fn name(&self) -> &str {
        &self.name
    }

    fn put(&self, put: Put) -> Result<Posted> {
        if let Some(engine) = self.lost_by(put.peer)? {
            return engine.put(put);
        }
        let count = self.engines.len();
        let first = self.next.fetch_add(1, Relaxed) % count;
        for turn in 0..count {
            let engine = (first + turn) % count;
            match self.engines[engine].put(put) {
                Ok(Posted::Full) => {}
                posted => {
                    return posted.inspect_err(|error| {
                        self.record(engine, error);
                    });
                }
            }
        }
        Ok(Posted::Full)
    }

    fn poll(&self, on_signal: &mut dyn FnMut(Rank, Signal)) -> Result<()> {
        let mut reports = match self.reports.try_lock() {
            Ok(reports) => reports,
            Err(TryLockError::Poisoned(reports)) => reports.into_inner(),
            // Another worker of this rank is polling.
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        for (number, engine) in self.engines.iter().enumerate() {
            let Err(error) = engine.poll(on_signal) else { continue };
            // The engine of each NIC finds that a peer is gone; only the first such error for a peer is returned.
            let index = self.record(number, &error);
            if index.is_none_or(|index| !std::mem::replace(&mut reports.known[index], true)) {
                reports.waiting.push_back(error);
            }
        }
        reports.waiting.pop_front().map_or(Ok(()), Err)
    }

    fn drain(&self, peer: Rank, deadline: Instant) -> Result<()> {
        if let Some(engine) = self.lost_by(peer)? {
            return engine.drain(peer, deadline);
        }
        self.engines.iter().try_for_each(|engine| engine.drain(peer, deadline))
    }

    fn near_cpus(&self) -> &[usize] {
        &self.near_cpus
    }
}

#[cfg(test)]
mod tests {
    use ep::{EnvironmentError, PeerFault};

    use super::*;

    /// An engine that reports errors.
    #[derive(Debug)]
    struct Reporting(Mutex<VecDeque<Error>>);

    impl Transport for Reporting {
        fn name(&self) -> &'static str {
            "reporting"
        }

        fn put(&self, _: Put) -> Result<Posted> {
            Ok(Posted::Yes)
        }

        fn poll(&self, _: &mut dyn FnMut(Rank, Signal)) -> Result<()> {
            self.0.lock().unwrap().pop_front().map_or(Ok(()), Err)
        }

        fn drain(&self, _: Rank, _: Instant) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn every_error_is_reported_once_also_if_all_nics_have_one_at_a_time() {
        let rail = Rail::new((0..4).map(Rank).collect(), 0).unwrap();
        let gone = |rank| -> Error {
            PeerError::joining(Rank(0), Rank(rank), PeerFault::Died, "a signal", std::time::Duration::ZERO)
                .into()
        };
        let own: Error = EnvironmentError::new("a NIC", "it fails", "").into();
        let engines = [vec![gone(1), gone(2), gone(3)], vec![gone(2), gone(1), own.clone()]]
            .map(|errors| Box::new(Reporting(Mutex::new(errors.into()))) as Box<dyn Transport>);
        let several = Several {
            name: "two".into(),
            near_cpus: Vec::new(),
            rail,
            engines: engines.into(),
            next: AtomicUsize::new(0),
            lost_by: (0..4).map(|_| AtomicUsize::new(NONE)).collect(),
            reports: Mutex::new(Reports { known: vec![false; 4], waiting: VecDeque::new() }),
        };
        let found: Vec<Error> = (0..9).filter_map(|_| several.poll(&mut |_, _| {}).err()).collect();
        assert_eq!(found, [gone(1), gone(2), gone(3), own]);
    }

    #[test]
    fn joined_blobs_can_be_split_and_others_cannot() {
        let blobs = [vec![1, 2, 3], vec![], vec![9; 300]];
        let joined = join(&blobs);
        assert_eq!(split(&joined).unwrap(), blobs.each_ref().map(|blob| blob.as_slice()));
        assert_eq!(split(&join(&[])), Some(Vec::new()));
        assert_eq!(split(b"ep-fab 1"), None);
        for end in MAGIC.len() + 1..joined.len() {
            // Where a part ends, nothing shows that the rest is missing, but `connect` compares the number of parts.
            let whole = [MAGIC.len() + 7, MAGIC.len() + 11].contains(&end);
            assert_eq!(split(&joined[..end]).is_some(), whole, "{end}");
        }
    }
}
