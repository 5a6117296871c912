//! The exchange of preprocess: ranks exchange counts, never routings. `operators` calls [`exchange`].
//!
//! Each rank sends its counts to its rail peers. It publishes its own counts and those that it receives in its control
//! block, where the ranks of its domain read them. With G ranks and E experts, every rank gets G rows of E + G + 3
//! numbers, G - 1 of them from other ranks.

use std::sync::atomic::Ordering::Relaxed;

use ep::{CallerError, Counts, DispatchMode, Rank, Result, Size};

use crate::comm::Op;
use crate::message::{Format, Header, Message, Sections};
use crate::progress::{Idle, Waiting};

/// Sends this rank's counts and returns the counts of all ranks, by rank.
///
/// # Errors
/// [`ep::PeerError`] that names the rank at fault; [`CallerError::Collective`] when ranks differ in mode or call.
pub(crate) fn exchange(op: &Op<'_>, own: &Counts) -> Result<Vec<Counts>> {
    let comm = op.comm;
    let words = own.to_words();
    comm.control().publish_counts(comm.domain(), op.step, &words);
    send_along_rail(op, &words)?;

    let topology = comm.world.topology();
    let mut ends: Vec<u64> =
        (0..topology.domains()).map(|domain| comm.rails.position(domain).1 + 1).collect();
    ends[comm.domain()] = 0;
    let mut all: Vec<Option<Counts>> = vec![None; comm.world.ranks()];
    // Not read back from the control block, where a peer could have changed them.
    all[comm.rank.index()] = Some(own.clone());
    let mut idle = Idle::default();
    while let Some(missing) = all.iter().position(Option::is_none) {
        op.poll()?;
        let mut progressed = receive_from_rail(op, &ends, words.len(), &mut idle)?;
        for rank in topology.all_ranks().filter(|rank| all[rank.index()].is_none()).collect::<Vec<_>>() {
            // The rank of this domain that is on the rail of `rank` publishes the counts of `rank`.
            let collector = topology.rank_at(comm.domain(), topology.local_rank_of(rank));
            let control = &comm.controls[collector.index()];
            if let Some(words) = control.counts(topology.domain_of(rank), op.step) {
                comm.preprocess_bytes.fetch_add(4 * words.len() as u64, Relaxed);
                let invalid = |problem| op.broken(rank, format!("counts of no valid routing: {problem}"));
                all[rank.index()] = Some(Counts::from_words(&comm.world, &words).map_err(invalid)?);
                progressed = true;
            }
        }
        if progressed {
            op.progress(&mut idle);
        } else {
            let rank = Rank(missing as u32);
            op.idle(&mut idle, || waiting(op, rank))?;
        }
    }
    let all: Vec<Counts> = all.into_iter().flatten().collect();
    check_modes(op, &all)?;
    Ok(all)
}

/// The event that this rank waits for while the counts of `rank` are missing.
fn waiting(op: &Op<'_>, rank: Rank) -> Waiting {
    let topology = op.comm.world.topology();
    let collector = topology.rank_at(op.comm.domain(), topology.local_rank_of(rank));
    // Name the collector only when it is another rank that has not entered; otherwise `rank` has to act.
    let absent = collector != op.comm.rank && op.comm.controls[collector.index()].entered() < op.step;
    let peer = if absent { collector } else { rank };
    let from = if collector == rank { String::new() } else { format!(" from rank {collector}") };
    Waiting { peer, what: format!("the counts of rank {rank}{from}") }
}

/// The format of a message with one row of counts.
fn counts_format(words: usize) -> Format {
    Format { lists: false, probs: false, row_bytes: 4 * words, scale_bytes: 0 }
}

/// The sections of a message with one row of counts. Called in worlds of several domains only, whose slots have been checked.
fn counts_sections(words: usize, slot_bytes: usize) -> Sections {
    let sections = counts_format(words).sections_within(1, 0, slot_bytes);
    sections.expect("`check_slot` has checked the slots of a world of several domains")
}

/// Checks that a row of counts fits a slot.
///
/// # Errors
/// [`CallerError::Config`] that says how large a slot must be.
pub(crate) fn check_slot(words: usize, slot_bytes: usize) -> Result<()> {
    let format = counts_format(words);
    if format.sections_within(1, 0, slot_bytes).is_some() {
        return Ok(());
    }
    let needed = format.sections_within(1, 0, Size::MAX).map_or(Size::MAX, |sections| sections.end);
    Err(CallerError::Config {
        key: "host.slot_bytes",
        value: slot_bytes.to_string(),
        problem: format!(
            "the counts of this many experts and ranks take {needed} bytes; raise it with HYBRID_EP_SLOT_BYTES"
        ),
    }
    .into())
}

/// Sends this rank's counts to its rail peer in every other domain.
fn send_along_rail(op: &Op<'_>, words: &[u32]) -> Result<()> {
    let rails = &op.comm.rails;
    let mut idle = Idle::default();
    for domain in rails.others() {
        let sections = counts_sections(words.len(), rails.slot_bytes());
        let end = rails.position(domain).0 + 1;
        let claim = loop {
            if let Some((_, claim)) = rails.claim_send(domain, end) {
                break claim;
            }
            op.poll()?;
            let peer = rails.peer(domain);
            op.idle(&mut idle, || Waiting { peer, what: format!("rank {peer} to free a slot for counts") })?;
        };
        let slot = rails.outgoing(claim);
        // SAFETY: only this thread writes a claimed slot; it is aligned to 64 bytes and long enough (`check_slot`).
        unsafe {
            Header::new(op, 0, 1, 0).write(slot);
            slot.add(sections.rows).cast::<u32>().copy_from_nonoverlapping(words.as_ptr(), words.len());
        }
        op.post(&mut idle, claim, sections.end)?;
        op.progress(&mut idle);
    }
    Ok(())
}

/// Publishes the counts that have arrived on the rail. Returns whether any have arrived. By domain, `ends` has the
/// number that follows the number of this operator's last message.
fn receive_from_rail(op: &Op<'_>, ends: &[u64], words: usize, idle: &mut Idle) -> Result<bool> {
    let rails = &op.comm.rails;
    let mut progressed = false;
    for domain in rails.others() {
        let Some((_, claim)) = rails.claim_receive(domain, ends[domain]) else { continue };
        let (slot, peer) = (rails.incoming(claim), rails.peer(domain));
        // SAFETY: only this thread reads a claimed slot; it is longer than a header and aligned to 64 bytes.
        let received = unsafe { Message::open(slot, rails.slot_bytes(), counts_format(words), op, peer, 0)? };
        if received.tokens != 1 {
            return Err(op.broken(peer, format!("a message of {} rows of counts, not 1", received.tokens)));
        }
        let row = received.row(0).cast::<u32>();
        // A peer that does not keep to the protocol may still write to the slot, so each word is read once.
        // SAFETY: the row has `words` words, by the format, and is aligned.
        let counts: Vec<u32> = (0..words).map(|at| unsafe { row.add(at).read_volatile() }).collect();
        op.comm.control().publish_counts(domain, op.step, &counts);
        op.release(idle, claim)?;
        progressed = true;
    }
    Ok(progressed)
}

/// Checks that all ranks use the same mode, because the mode decides what a row number means.
fn check_modes(op: &Op<'_>, all: &[Counts]) -> Result<()> {
    let mode = |rank: Rank| all[rank.index()].mode;
    let name = |rank: Rank| match mode(rank) {
        DispatchMode::Plain => "plain".to_owned(),
        DispatchMode::Permuted { pad_multiple } => format!("permuted with pad_multiple {pad_multiple}"),
    };
    let rank = op.comm.rank;
    match op.comm.world.topology().all_ranks().find(|&other| mode(other) != mode(rank)) {
        None => Ok(()),
        Some(peer) => Err(CallerError::Collective {
            operator: op.operator,
            field: "the dispatch mode",
            rank,
            mine: name(rank),
            peer,
            theirs: name(peer),
        }
        .into()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use ep::{Backend as _, Config, Operator, World};

    use super::*;
    use crate::HostBuffer;
    use crate::control::MEMORIES;
    use crate::signature::CollectiveArguments;

    #[test]
    fn a_rank_that_passes_counts_on_is_waited_for_only_until_it_has_entered() {
        let world = World::builder().ranks(4).domains(2).experts(4).build().unwrap();
        let buffers = HostBuffer::threads(&world, &Config::default()).unwrap();
        let enter = |rank: usize| {
            let arguments = CollectiveArguments::default();
            Op::enter(&buffers[rank].comm, Operator::Preprocess, 1, arguments, [None; MEMORIES])
        };
        // Rank 0 receives the counts of rank 2 for its domain.
        let op = enter(1);
        assert_eq!(waiting(&op, Rank(2)).peer, Rank(0));
        let _collector = enter(0);
        assert_eq!(waiting(&op, Rank(2)).peer, Rank(2));
        assert_eq!(waiting(&op, Rank(2)).what, "the counts of rank 2 from rank 0");
    }
}
