//! The sending side of one rail peer.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use ep::{Error, Posted, Put, Rank, Transport};

use super::plan::ValidPlan;
use super::signal::{Arrival, MOST_UNITS, Part, What, units_of_a_put};
use super::window::RailWindow;
use crate::params::RAIL_SECTIONS;

/// Units are put together up to this many bytes. At 50 GB/s such a run takes 20 us, which is far above the costs of a
/// put, and short enough that the peer's kernels start early. A single unit may be longer.
const RUN_BYTES: usize = 1 << 20;
/// A run of fewer bytes waits for further units. Otherwise a fast proxy posts each unit alone, and the costs of puts exceed
/// the time that the link needs for their bytes (docs/lab/040).
const SHORT_RUN_BYTES: usize = 512 << 10;
/// A short run is posted this long after the previous run of its section.
const HOLD: Duration = Duration::from_micros(20);
/// The same for a section that has few of the bytes, such as that of the weights. Its runs are always short. If a run of
/// weights followed each run of rows, half of the puts would carry few bytes (docs/lab/048).
const SMALL_SECTION_HOLD: Duration = Duration::from_micros(80);

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
    /// Everything that the kernels have completed is posted.
    Idle,
    /// Complete units wait for further units.
    Held,
    /// The engine accepted puts, or the kernels have completed further units.
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
    plan: Option<ValidPlan>,
    plan_posted: bool,
    /// Number of units at the start of the plan that the kernels have completed.
    complete: usize,
    sections: [Posting; RAIL_SECTIONS],
    /// The next section to post.
    section: usize,
}

/// What is posted of a section.
#[derive(Debug, Clone, Copy, Default)]
struct Posting {
    /// Number of units that are posted.
    posted: usize,
    /// When the last run was posted.
    last_run: Option<Instant>,
}

impl Sending {
    pub(super) fn new() -> Self {
        Self {
            epoch: 1,
            plan: None,
            plan_posted: false,
            complete: 0,
            sections: [Posting::default(); RAIL_SECTIONS],
            section: 0,
        }
    }

    /// Posts the plan if the kernels have released it, and one run of completed units of each section.
    pub(super) fn step(&mut self, link: &Link<'_>) -> Result<Progress, SendError> {
        let parity = (self.epoch & 1) as usize;
        let plan = match &self.plan {
            Some(plan) => plan,
            None if link.window.out_epoch(link.domain, parity) != self.epoch => return Ok(Progress::Idle),
            None => {
                let offset = link.window.out_plan(link.domain, parity);
                let plan = ValidPlan::read(link.window, offset, self.epoch);
                let plan = plan.map_err(|problem| SendError::Plan { epoch: self.epoch, problem })?;
                self.plan.insert(plan)
            }
        };
        let mut moved = false;
        if !self.plan_posted {
            if link.post_plan(plan, parity)? == Posted::Full {
                return Ok(Progress::Full);
            }
            self.plan_posted = true;
            moved = true;
        }
        let complete = link.complete_units(plan, parity, self.epoch, self.complete);
        // `complete_units` looks at [`MOST_UNITS`] units at a time. If these have no bytes, nothing is posted, but later
        // units may be complete.
        moved |= complete > self.complete;
        self.complete = complete;
        while self.section < RAIL_SECTIONS {
            let posting = &mut self.sections[self.section];
            if let Some(units) = next_run(plan, self.section, posting, self.complete) {
                if link.post_part(plan, parity, self.section, &units)? == Posted::Full {
                    return Ok(Progress::Full);
                }
                *posting = Posting { posted: units.end, last_run: Some(Instant::now()) };
                moved = true;
            }
            self.section += 1;
        }
        self.section = 0;
        let is_posted = |posted: usize| self.sections.iter().all(|section| section.posted == posted);
        let held = !is_posted(self.complete);
        // From here on the kernels may write the plan of the epoch after the next one to the same place.
        if is_posted(plan.units()) {
            *self = Self { epoch: self.epoch.wrapping_add(1), ..Self::new() };
        }
        Ok(match (moved, held) {
            (true, _) => Progress::Moved,
            (false, true) => Progress::Held,
            (false, false) => Progress::Idle,
        })
    }
}

/// The next run of complete units of a section, unless it waits for further units. Passes over units without bytes.
fn next_run(
    plan: &ValidPlan,
    section: usize,
    posting: &mut Posting,
    complete: usize,
) -> Option<Range<usize>> {
    let first = posting.posted;
    let bytes = |end: usize| plan.part(section, &(first..end)).map_or(0, |part| part.len());
    if first == complete || bytes(complete) == 0 {
        posting.posted = complete;
        return None;
    }
    let most = complete.min(first + MOST_UNITS);
    let mut end = first + 1;
    while end < most && bytes(end + 1) <= RUN_BYTES {
        end += 1;
    }
    let waited = posting.last_run.map(|last| last.elapsed());
    if waits(end - first, bytes(end), end == plan.units(), waited, hold(plan, section)) {
        return None;
    }
    Some(first..first + units_of_a_put(end - first))
}

/// The time after the last run of a section at which a short run of it is posted. A section is small if it has less than an
/// eighth of the set's bytes.
fn hold(plan: &ValidPlan, section: usize) -> Duration {
    let bytes = |section| plan.part(section, &(0..plan.units())).map_or(0, |part| part.len());
    let set: usize = (0..RAIL_SECTIONS).map(bytes).sum();
    if bytes(section) < set / 8 { SMALL_SECTION_HOLD } else { HOLD }
}

/// Whether a run of this many complete units and bytes waits for further units. `last`: whether the run ends the set.
/// `waited`: the time since the previous run.
fn waits(units: usize, bytes: usize, last: bool, waited: Option<Duration>, hold: Duration) -> bool {
    !last && units < MOST_UNITS && bytes < SHORT_RUN_BYTES && waited.is_some_and(|waited| waited < hold)
}

impl Link<'_> {
    fn post_plan(&self, plan: &ValidPlan, parity: usize) -> Result<Posted, SendError> {
        let (from, to) =
            (self.window.out_plan(self.domain, parity), self.window.in_plan(self.own_domain, parity));
        self.post(Arrival { parity, what: What::Plan }, from..from + plan.bytes(), to)
    }

    /// Posts the part of a section that belongs to these units. Units without bytes need no put.
    fn post_part(
        &self,
        plan: &ValidPlan,
        parity: usize,
        section: usize,
        units: &Range<usize>,
    ) -> Result<Posted, SendError> {
        let Some(bytes) = plan.part(section, units) else { return Ok(Posted::Yes) };
        let layout = self.window.layout();
        let lane = layout.out_lane(self.domain, parity);
        let to = layout.in_lane(self.own_domain, parity) + bytes.start;
        let what = What::Part(Part { section, units: units.clone() });
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

    /// The number of units at the start of the plan that the kernels have completed. The first `complete` ones are known to
    /// be. Looks at up to [`MOST_UNITS`] further ones.
    ///
    /// A unit without bytes needs no flags, and its flags must not be awaited: the peer completes the epoch without this
    /// unit, and then the kernels may overwrite the flags with those of the epoch after the next one.
    fn complete_units(&self, plan: &ValidPlan, parity: usize, epoch: u32, complete: usize) -> usize {
        let is_complete = |&unit: &usize| {
            plan.sections_of(unit) == 0
                || plan.flags(unit).all(|flag| self.window.out_flag(self.domain, parity, flag) == epoch)
        };
        let next = complete..plan.units().min(complete + MOST_UNITS);
        complete + next.take_while(is_complete).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_runs_wait_for_further_units_but_not_for_long() {
        let just_now = Some(Duration::ZERO);
        let waits = |units, bytes, last, waited| waits(units, bytes, last, waited, HOLD);
        assert!(waits(1, SHORT_RUN_BYTES - 1, false, just_now));
        assert!(waits(MOST_UNITS - 1, 1, false, Some(HOLD - Duration::from_nanos(1))));
        // These runs do not wait: the first of an epoch, a long one, one with the maximum number of units, the last of the
        // set, and any run after a while.
        assert!(!waits(1, 1, false, None));
        assert!(!waits(1, SHORT_RUN_BYTES, false, just_now));
        assert!(!waits(MOST_UNITS, 1, false, just_now));
        assert!(!waits(1, 1, true, just_now));
        assert!(!waits(1, 1, false, Some(HOLD)));
    }
}
