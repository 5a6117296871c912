//! The receiving side of one rail peer.

use std::mem;

use ep::Signal;

use super::plan::ValidPlan;
use super::signal::{Arrival, Part, What};
use super::window::RailWindow;
use crate::params::{MAX_CHUNKS, RAIL_SECTIONS};

/// Maximum number of signals of parts in one epoch.
const MOST_PARTS: usize = RAIL_SECTIONS * MAX_CHUNKS;

/// What a rail peer did that the protocol does not allow.
#[derive(Debug)]
pub(super) struct Broken {
    /// The epoch in which the peer did it.
    pub(super) epoch: u32,
    /// What this rank found, for [`ep::PeerError::broken`].
    pub(super) found: String,
}

/// What has arrived from a rail peer.
///
/// A peer is at most one epoch ahead, so the signals of two epochs may arrive at a time. Their parity tells them apart.
#[derive(Debug)]
pub(super) struct Receiving {
    domain: usize,
    /// By parity.
    epochs: [Incoming; 2],
}

/// What has arrived of one epoch.
#[derive(Debug)]
struct Incoming {
    epoch: u32,
    set: Set,
}

#[derive(Debug)]
enum Set {
    /// The plan has not arrived; these parts have.
    Early(Vec<Part>),
    Planned(Planned),
}

/// A set whose plan has arrived.
#[derive(Debug)]
struct Planned {
    plan: ValidPlan,
    /// By unit: the sections whose part has not arrived, as bits.
    missing: Vec<u8>,
    /// The number of units at the start of the set that have arrived with all sections.
    whole: usize,
    /// The number of chunks that was published to the kernels; `None` if the plan was not.
    published: Option<usize>,
}

impl Receiving {
    pub(super) fn new(domain: usize) -> Self {
        // The first epoch of kernels is 1.
        Self { domain, epochs: [Incoming::new(2), Incoming::new(1)] }
    }

    /// Handles a signal, and tells the kernels what has arrived.
    pub(super) fn on_signal(&mut self, window: &RailWindow, signal: Signal) -> Result<(), Broken> {
        let Some(Arrival { parity, what }) = Arrival::of(signal) else {
            let epoch = self.epochs[0].epoch.min(self.epochs[1].epoch);
            return Err(Broken { epoch, found: format!("an invalid signal ({:#x})", signal.word()) });
        };
        let (epoch, other) = (self.epochs[parity].epoch, self.epochs[1 - parity].epoch);
        let broken = |found| Broken { epoch, found };
        // A peer enters epoch n + 2 only after this rank's kernels have received all of n.
        if epoch.wrapping_sub(other) == 3 {
            return Err(broken(format!("a signal of epoch {epoch} before all of epoch {other}")));
        }
        let incoming = &mut self.epochs[parity];
        incoming.handle(window, self.domain, parity, what).map_err(broken)?;
        if incoming.is_whole() {
            *incoming = Incoming::new(epoch.wrapping_add(2));
        }
        Ok(())
    }
}

impl Incoming {
    fn new(epoch: u32) -> Self {
        Self { epoch, set: Set::Early(Vec::new()) }
    }

    fn is_whole(&self) -> bool {
        matches!(&self.set, Set::Planned(set) if set.whole == set.plan.units())
    }

    fn handle(
        &mut self,
        window: &RailWindow,
        domain: usize,
        parity: usize,
        what: What,
    ) -> Result<(), String> {
        let epoch = self.epoch;
        match (&mut self.set, what) {
            (Set::Planned(set), What::Part(part)) => set.mark(&part)?,
            (Set::Planned(_), What::Plan) => return Err(format!("a second plan of epoch {epoch}")),
            (Set::Early(parts), What::Part(_)) if parts.len() == MOST_PARTS => {
                return Err(format!("more than {MOST_PARTS} parts of a set before its plan"));
            }
            (Set::Early(parts), What::Part(part)) => parts.push(part),
            (Set::Early(parts), What::Plan) => {
                let plan = ValidPlan::read(window, window.in_plan(domain, parity), epoch);
                let mut set = Planned::new(plan.map_err(|problem| format!("an invalid plan: {problem}"))?);
                parts.iter().try_for_each(|part| set.mark(part))?;
                self.set = Set::Planned(set);
            }
        }
        if let Set::Planned(set) = &mut self.set
            && let Some(chunks) = set.news()
        {
            window.set_progress(domain, parity, epoch, chunks);
        }
        Ok(())
    }
}

impl Planned {
    fn new(plan: ValidPlan) -> Self {
        let missing = (0..plan.units()).map(|unit| plan.sections_of(unit)).collect();
        Self { plan, missing, whole: 0, published: None }
    }

    /// Notes that a part has arrived.
    fn mark(&mut self, Part { section, units }: &Part) -> Result<(), String> {
        let part = || format!("a signal of section {section}, units {} to {}", units.start, units.end - 1);
        if !self.plan.uses(*section) {
            return Err(format!("{}, of a plan without that section", part()));
        }
        let all = self.plan.units();
        let missing = self.missing.get_mut(units.clone());
        let missing = missing.ok_or_else(|| format!("{}, of a plan of {all} units", part()))?;
        if self.plan.part(*section, units).is_none() {
            return Err(format!("{}, which have no bytes there", part()));
        }
        for (unit, missing) in units.clone().zip(missing) {
            let bit = 1 << section;
            let has_bytes = self.plan.part(*section, &(unit..unit + 1)).is_some();
            if has_bytes && *missing & bit == 0 {
                return Err(format!("{}, of which unit {unit} has arrived before", part()));
            }
            *missing &= !bit;
        }
        Ok(())
    }

    /// The number of chunks at the start of the set that have arrived; `None` if that number was published before.
    fn news(&mut self) -> Option<usize> {
        let more = self.missing[self.whole..].iter().take_while(|&&missing| missing == 0).count();
        self.whole += more;
        let arrived = Some(self.plan.chunks_of(self.whole));
        (mem::replace(&mut self.published, arrived) != arrived).then_some(arrived).flatten()
    }
}
