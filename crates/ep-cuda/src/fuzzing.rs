//! Entry points for the target in `fuzz/`: parsers of what ranks of a job send. [`jit::fuzzing`](crate::jit::fuzzing) has
//! another entry point.

use bytemuck::Zeroable as _;
use ep::join::Machines;
use ep::{Config, Rank};

use crate::driver::Shared;
use crate::fault::Words;
use crate::join::{Facts, Places};
use crate::links::announced;
use crate::params::{FaultKind, FaultRecord, FaultReport};
use crate::remote::{AbortWord, State};

const RANKS: usize = 3;

/// Parses `bytes` as the state of a rank on another machine, and makes the errors that its records stand for.
///
/// # Panics
/// When writing the state again changes it, or when a word that kernels use as an index is out of bounds.
pub fn state(bytes: &[u8]) {
    let Some(state) = State::from_bytes(bytes, RANKS) else { return };
    assert_eq!(state.to_bytes(), bytes);
    if state.abort != 0 {
        let AbortWord { by, at_fault, .. } = AbortWord::of(state.abort);
        assert!([by, at_fault].iter().all(|&rank| (rank as usize) < RANKS));
    }
    let FaultReport { own, theirs } = state.report;
    let words = Words::new(4, Machines::one(RANKS), &Config::default());
    for (own, theirs) in [(own, theirs), (theirs, own)] {
        assert!((own.fault.rank as usize) < RANKS && (own.fault.peer as usize) < RANKS);
        if let Some(error) = words.error(&FaultReport { own, theirs }, &[]) {
            assert!(!error.to_string().is_empty());
        }
    }
}

/// The state of a rank that runs, or of one that has given up because of a rank that passed different arguments.
pub fn state_of(given_up: bool) -> Vec<u8> {
    let mut state = State { abort: 0, left: 0, report: FaultReport::zeroed() };
    if given_up {
        state.abort = AbortWord { cause: FaultKind::Mismatch as u32, by: 1, at_fault: 2 }.word();
        let mut theirs = FaultRecord::zeroed();
        (theirs.fault.kind, theirs.fault.rank, theirs.fault.peer) = (FaultKind::Mismatch as u32, 2, 1);
        (theirs.call[0], theirs.peer_call[0]) = (1, 2);
        let mut own = FaultRecord::zeroed();
        (own.fault.kind, own.fault.rank, own.fault.peer) = (FaultKind::Aborted as u32, 1, 2);
        own.fault.cause = FaultKind::Mismatch as u32;
        state.report = FaultReport { own, theirs };
    }
    state.to_bytes()
}

/// Parses `bytes` as the facts in a rank's introduction, as its addresses, and as an allocation that it shares.
///
/// # Panics
/// When writing and parsing one of them again changes it.
pub fn joining(bytes: &[u8]) {
    if let Some(facts) = str::from_utf8(bytes).ok().and_then(|text| text.parse::<Facts>().ok()) {
        assert_eq!(facts.to_string().parse(), Ok(facts));
    }
    match Places::from_bytes(Rank(1), bytes) {
        Ok(places) => assert_eq!(places.to_bytes(), bytes),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    if let Some((size, Shared::Fabric(handle))) = announced(bytes, None) {
        assert_eq!([&(size as u64).to_le_bytes(), &handle[..]].concat(), bytes);
    }
}
