//! Preprocessing: counts are exchanged, never routings.
//!
//! Each rank hands its counts to the other ranks of its rail, and publishes what it collected to its own domain; so
//! every rank gets G rows of E + G + 3 numbers, G - 1 of them from others.

use std::sync::atomic::Ordering::Relaxed;

use ep::{CallerError, Counts, DispatchMode, Rank, Result};

use crate::comm::{Idle, Op, Waiting};
use crate::message::{Format, Header};

/// Exchanges counts: this rank's for everybody's, by rank.
pub(crate) fn exchange(op: &Op<'_>, own: &Counts) -> Result<Vec<Counts>> {
    let comm = op.comm;
    let words = own.to_words();
    comm.control().publish_counts(comm.domain(), op.step, &words);
    send_along_rail(op, &words)?;

    let topology = &comm.world.topology;
    let mut ends: Vec<u64> =
        (0..topology.domains()).map(|domain| comm.rails.position(domain).1 + 1).collect();
    ends[comm.domain()] = 0;
    let mut all: Vec<Option<Counts>> = vec![None; comm.world.ranks()];
    let mut idle = Idle::default();
    while let Some(missing) = all.iter().position(Option::is_none) {
        comm.rails.poll()?;
        let mut progressed = receive_from_rail(op, &ends, words.len(), &mut idle)?;
        for rank in topology.all_ranks().filter(|rank| all[rank.index()].is_none()).collect::<Vec<_>>() {
            // Whoever in this domain is on the rank's rail has its counts.
            let collector = topology.rank_at(comm.domain(), topology.local_rank_of(rank));
            let control = &comm.controls[collector.index()];
            if let Some(words) = control.counts(topology.domain_of(rank), op.step) {
                if rank != comm.rank {
                    comm.preprocess_bytes.fetch_add(4 * words.len() as u64, Relaxed);
                }
                all[rank.index()] = Some(Counts::from_words(&comm.world, &words));
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

fn waiting(op: &Op<'_>, rank: Rank) -> Waiting {
    let topology = &op.comm.world.topology;
    let collector = topology.rank_at(op.comm.domain(), topology.local_rank_of(rank));
    // The collector is waited for only when it is another rank that has not come yet.
    let absent = collector != op.comm.rank && op.comm.controls[collector.index()].entered() < op.step;
    let peer = if absent { collector } else { rank };
    Waiting { peer, what: format!("the counts of rank {rank} from rank {collector}") }
}

fn message(words: usize) -> Format {
    Format { lists: false, probs: false, row_bytes: 4 * words, scale_bytes: 0 }
}

/// Checks that a row of counts fits a slot.
///
/// # Errors
/// [`CallerError::Config`] that says how large a slot must be.
pub(crate) fn check_slot(words: usize, slot_bytes: usize) -> Result<()> {
    let needed = message(words).sections(1, 0).end;
    if needed <= slot_bytes {
        return Ok(());
    }
    Err(CallerError::Config {
        key: "slot_bytes",
        value: slot_bytes.to_string(),
        problem: format!("the counts of this many experts and ranks take {needed} bytes; raise it with HYBRID_EP_SLOT_BYTES"),
    }
    .into())
}

fn send_along_rail(op: &Op<'_>, words: &[u32]) -> Result<()> {
    let rails = &op.comm.rails;
    let sections = message(words.len()).sections(1, 0);
    let mut idle = Idle::default();
    for domain in rails.others() {
        let end = rails.position(domain).0 + 1;
        let claim = loop {
            if let Some((_, claim)) = rails.claim_send(domain, end) {
                break claim;
            }
            rails.poll()?;
            let peer = rails.peer(domain);
            op.idle(&mut idle, || Waiting { peer, what: format!("rank {peer} to free a slot for counts") })?;
        };
        let slot = rails.outgoing(claim);
        // SAFETY: a claimed slot is this worker's to write, aligned to 64 bytes, and long enough: `check_slot`.
        unsafe {
            Header::new(op, 0, 1, 0).write(slot);
            slot.add(sections.rows).cast::<u32>().copy_from_nonoverlapping(words.as_ptr(), words.len());
        }
        op.post(&mut idle, claim, sections.end)?;
        op.progress(&mut idle);
    }
    Ok(())
}

fn receive_from_rail(op: &Op<'_>, ends: &[u64], words: usize, idle: &mut Idle) -> Result<bool> {
    let rails = &op.comm.rails;
    let sections = message(words).sections(1, 0);
    let mut progressed = false;
    for domain in rails.others() {
        let Some((_, claim)) = rails.claim_receive(domain, ends[domain]) else { continue };
        let slot = rails.incoming(claim);
        // SAFETY: a claimed slot is this worker's to read; it is aligned, and as long as `check_slot` made sure.
        let counts = unsafe {
            Header::read(slot, op, rails.peer(domain))?;
            std::slice::from_raw_parts(slot.add(sections.rows).cast::<u32>(), words)
        };
        op.comm.control().publish_counts(domain, op.step, counts);
        op.release(idle, claim)?;
        progressed = true;
    }
    Ok(progressed)
}

/// Plain and permuted do not mix: rows would mean different things on different ranks.
fn check_modes(op: &Op<'_>, all: &[Counts]) -> Result<()> {
    let plain = |rank: Rank| all[rank.index()].mode == DispatchMode::Plain;
    let name = |rank: Rank| if plain(rank) { "plain" } else { "permuted" }.to_string();
    let rank = op.comm.rank;
    match op.comm.world.topology.all_ranks().find(|&other| plain(other) != plain(rank)) {
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
