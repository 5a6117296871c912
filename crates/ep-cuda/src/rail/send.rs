//! The sending side of one rail peer.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use ep::{Error, Posted, Put, Rank, Transport};

use super::plan::Plan;
use super::signal::{Arrival, MOST_UNITS, Part, What, units_of_a_put};
use super::window::RailWindow;
use crate::params::{RAIL_SECTIONS, RailPlan};

/// Units are put together up to this many bytes. At 50 GB/s such a run takes 20 us, which is far above the costs of a
/// put, and short enough that the peer's kernels start early. A single unit may be longer.
const RUN_BYTES: usize = 1 << 20;
/// A run of fewer bytes waits for further units. Otherwise a fast proxy posts each unit alone, and the costs of puts exceed
/// the time that the link needs for their bytes (docs/lab/040).
const SHORT_RUN_BYTES: usize = 512 << 10;
/// So long after the last run, a short run is posted.
const HOLD: Duration = Duration::from_micros(20);

/// What the engine has accepted so far, to all peers.
#[derive(Debug, Default)]
pub(crate) struct Sent {
    bytes: AtomicU64,
    messages: AtomicU64,
}

impl Sent {
    /// Bytes and puts.
    pub(crate) fn so_far(&self) -> (u64, u64) {
        (self.bytes.load(Relaxed), self.messages.load(Relaxed))
    }
}

/// What a step towards one peer needs.
pub(super) struct Link<'a> {
    pub(super) sent: &'a Sent,
    pub(super) window: &'a RailWindow,
    pub(super) transport: &'a dyn Transport,
    /// This rank's domain.
    pub(super) own_domain: usize,
    /// The peer's domain.
    pub(super) domain: usize,
    pub(super) peer: Rank,
}

/// What a step has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// The kernels have completed nothing that is not posted.
    Idle,
    /// Units are complete, and wait for others.
    Held,
    /// The engine accepted puts.
    Moved,
    /// The engine's queue is full.
    Full,
}

/// Why a step failed.
#[derive(Debug)]
pub(super) enum SendError {
    /// This rank's kernels wrote an invalid plan for this epoch.
    Plan { epoch: u32, problem: String },
    /// The engine refused a put.
    Engine(Error),
}

/// What is posted of the epochs so far.
#[derive(Debug)]
pub(super) struct Sending {
    /// The epoch to send.
    epoch: u32,
    /// The plan of the epoch, once the kernels have released it.
    plan: Option<Plan>,
    plan_posted: bool,
    /// Units whose sections are all posted.
    posted: usize,
    /// The units that are being posted.
    run: Option<Run>,
    /// When the last run of the epoch was posted.
    last_run: Option<Instant>,
}

/// Consecutive complete units.
#[derive(Debug)]
struct Run {
    units: Range<usize>,
    /// The next section to post.
    section: usize,
}

impl Sending {
    pub(super) fn new() -> Self {
        Self { epoch: 1, plan: None, plan_posted: false, posted: 0, run: None, last_run: None }
    }

    /// Posts the plan if the kernels have released it, and one run of units that they have completed.
    pub(super) fn step(&mut self, link: &Link<'_>) -> Result<Progress, SendError> {
        let parity = (self.epoch & 1) as usize;
        let plan = match &self.plan {
            Some(plan) => plan,
            None if link.window.out_epoch(link.domain, parity) != self.epoch => return Ok(Progress::Idle),
            None => {
                let offset = link.window.out_plan(link.domain, parity);
                let plan = Plan::read(link.window, offset, self.epoch);
                let plan = plan.map_err(|problem| SendError::Plan { epoch: self.epoch, problem })?;
                self.plan.insert(plan)
            }
        };
        let mut progress = Progress::Idle;
        if !self.plan_posted {
            if link.post_plan(parity)? == Posted::Full {
                return Ok(Progress::Full);
            }
            self.plan_posted = true;
            progress = Progress::Moved;
        }
        let run = match &mut self.run {
            Some(run) => run,
            None => {
                let Some(units) = link.complete_run(plan, parity, self.epoch, self.posted) else {
                    return Ok(progress);
                };
                let waited = self.last_run.map(|last| last.elapsed());
                if waits(units.len(), bytes_of(plan, &units), units.end == plan.units(), waited) {
                    return Ok(if progress == Progress::Idle { Progress::Held } else { progress });
                }
                let end = units.start + units_of_a_put(units.len());
                self.run.insert(Run { units: units.start..end, section: 0 })
            }
        };
        while run.section < RAIL_SECTIONS {
            if link.post_part(plan, parity, run)? == Posted::Full {
                return Ok(Progress::Full);
            }
            run.section += 1;
        }
        self.posted = run.units.end;
        self.run = None;
        self.last_run = Some(Instant::now());
        // From here on the kernels may write the plan of the epoch after the next one to the same place.
        if self.posted == plan.units() {
            *self = Self { epoch: self.epoch.wrapping_add(1), ..Self::new() };
        }
        Ok(Progress::Moved)
    }
}

/// Bytes of these units in all sections.
fn bytes_of(plan: &Plan, units: &Range<usize>) -> usize {
    (0..RAIL_SECTIONS).filter_map(|section| plan.part(section, units)).map(|part| part.len()).sum()
}

/// Whether a run of this many complete units and bytes waits for further units. `last`: it ends the set. `waited`: the time
/// since the run before it.
fn waits(units: usize, bytes: usize, last: bool, waited: Option<Duration>) -> bool {
    !last && units < MOST_UNITS && bytes < SHORT_RUN_BYTES && waited.is_some_and(|waited| waited < HOLD)
}

impl Link<'_> {
    fn post_plan(&self, parity: usize) -> Result<Posted, SendError> {
        let (from, to) =
            (self.window.out_plan(self.domain, parity), self.window.in_plan(self.own_domain, parity));
        self.post(Arrival { parity, what: What::Plan }, from..from + size_of::<RailPlan>(), to)
    }

    /// Posts the part of the next section of a run. A section without bytes needs no put.
    fn post_part(&self, plan: &Plan, parity: usize, run: &Run) -> Result<Posted, SendError> {
        let Run { units, section } = run;
        let Some(bytes) = plan.part(*section, units) else { return Ok(Posted::Yes) };
        let layout = self.window.layout();
        let lane = layout.out_lane(self.domain, parity);
        let to = layout.in_lane(self.own_domain, parity) + bytes.start;
        let what = What::Part(Part { section: *section, units: units.clone() });
        self.post(Arrival { parity, what }, lane + bytes.start..lane + bytes.end, to)
    }

    fn post(&self, arrival: Arrival, from: Range<usize>, to: usize) -> Result<Posted, SendError> {
        // The peer's window has the same layout.
        let bytes = from.len() as u64;
        let put = Put::new(self.peer, arrival.signal()).bytes(from, to);
        let posted = self.transport.put(put).map_err(SendError::Engine)?;
        if posted == Posted::Yes {
            self.sent.bytes.fetch_add(bytes, Relaxed);
            self.sent.messages.fetch_add(1, Relaxed);
        }
        Ok(posted)
    }

    /// The units from `first` on that the kernels have completed, at most as many as one put may have.
    ///
    /// A unit without bytes needs no flags, and its flags must not be awaited: the peer completes the epoch without this
    /// unit, and then the kernels may overwrite the flags with those of the epoch after the next one.
    fn complete_run(&self, plan: &Plan, parity: usize, epoch: u32, first: usize) -> Option<Range<usize>> {
        let complete = |unit: usize| {
            plan.sections_of(unit) == 0
                || plan.flags(unit).all(|flag| self.window.out_flag(self.domain, parity, flag) == epoch)
        };
        let mut end = first;
        while end < plan.units().min(first + MOST_UNITS)
            && (end == first || bytes_of(plan, &(first..end + 1)) <= RUN_BYTES)
            && complete(end)
        {
            end += 1;
        }
        (end > first).then_some(first..end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_runs_wait_for_further_units_but_not_for_long() {
        let just_now = Some(Duration::ZERO);
        assert!(waits(1, SHORT_RUN_BYTES - 1, false, just_now));
        assert!(waits(MOST_UNITS - 1, 1, false, Some(HOLD - Duration::from_nanos(1))));
        // The first of an epoch, a long one, one of as many units as a put may have, the last of the set, and after a while.
        assert!(!waits(1, 1, false, None));
        assert!(!waits(1, SHORT_RUN_BYTES, false, just_now));
        assert!(!waits(MOST_UNITS, 1, false, just_now));
        assert!(!waits(1, 1, true, just_now));
        assert!(!waits(1, 1, false, Some(HOLD)));
    }
}
