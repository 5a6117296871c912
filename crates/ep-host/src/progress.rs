//! What a worker knows while it waits: how long it has waited, for what, and the progress of the other ranks.

use std::time::{Duration, Instant};

use ep::Rank;

use crate::control::Control;

/// A waiting worker spins until this many turns.
const SPIN_TURNS: u32 = 64;
/// From [`SPIN_TURNS`] to this many turns a waiting worker yields the core; after that it sleeps.
const YIELD_TURNS: u32 = 4096;
/// One sleep of a waiting worker.
pub(crate) const NAP: Duration = Duration::from_micros(50);
/// Turns between two checks of the peers' health.
const CHECK_EVERY_TURNS: u32 = 32;

/// The event that a worker waits for, quoted in the error when the event does not happen.
#[derive(Debug)]
pub(crate) struct Waiting {
    /// The rank that must act.
    pub(crate) peer: Rank,
    /// The event, as the object of "waited for".
    pub(crate) what: String,
}

/// How long, and for how many turns, a worker has had no work.
#[derive(Debug, Default)]
pub(crate) struct Idle {
    turns: u32,
    since: Option<Instant>,
}

impl Idle {
    /// Passes one turn without work: spins, then yields the core, then sleeps, as the wait grows longer. Returns
    /// whether to check the peers now.
    pub(crate) fn turn(&mut self) -> bool {
        self.since.get_or_insert_with(Instant::now);
        self.turns += 1;
        if self.turns < SPIN_TURNS {
            std::hint::spin_loop();
        } else if self.turns < YIELD_TURNS {
            std::thread::yield_now();
        } else {
            std::thread::sleep(NAP);
        }
        self.turns.is_multiple_of(CHECK_EVERY_TURNS)
    }

    /// Ends the wait, if there was one, and returns its length.
    pub(crate) fn end(&mut self) -> Option<Duration> {
        self.turns = 0;
        self.since.take().map(|since| since.elapsed())
    }
}

/// The progress of all ranks, as this rank has observed it since it entered the operator. Times are nanoseconds since
/// that entry.
#[derive(Debug)]
pub(crate) struct ProgressMonitor {
    ranks: Vec<SeenProgress>,
    /// When the counters were last read.
    pub(crate) read_ns: u64,
    /// When the program was last asked whether to stop.
    pub(crate) asked_ns: u64,
    /// The awaited rank, if it has finished the step and is lost, and when this rank first noticed the loss.
    pub(crate) gone: Option<(Rank, u64)>,
    /// Whether this rank has printed that a rank is late.
    pub(crate) told: bool,
}

/// The counters of one rank at the last read, and when they last changed. Bounds are judged by these values only, never
/// by newer ones: a rank that enters just after a read would otherwise appear to have been inside, without progress,
/// since long before it entered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SeenProgress {
    /// Newest step entered.
    pub(crate) entered: u64,
    /// Newest step finished.
    pub(crate) finished: u64,
    /// [`Control::progress`].
    work: u64,
    /// [`Control::turns`].
    turns: u64,
    /// When `entered`, `finished` or `work` last changed.
    pub(crate) progressed_ns: u64,
    /// When any of the four values last changed.
    pub(crate) ran_ns: u64,
}

impl SeenProgress {
    /// Whether the rank's workers should be running: the rank is inside `step`, or inside an earlier step.
    pub(crate) fn is_inside(&self, step: u64) -> bool {
        self.entered >= step || self.entered > self.finished
    }
}

impl ProgressMonitor {
    pub(crate) fn new(controls: &[Control]) -> Self {
        let start = |control| SeenProgress { progressed_ns: 0, ran_ns: 0, ..Self::read(control, 0) };
        Self { ranks: controls.iter().map(start).collect(), read_ns: 0, asked_ns: 0, gone: None, told: false }
    }

    fn read(control: &Control, now: u64) -> SeenProgress {
        let (entered, finished) = (control.entered(), control.finished());
        let (work, turns) = (control.progress(), control.turns());
        SeenProgress { entered, finished, work, turns, progressed_ns: now, ran_ns: now }
    }

    /// Reads the counters of all ranks at time `now`.
    pub(crate) fn read_all(&mut self, controls: &[Control], now: u64) {
        for (control, seen) in controls.iter().zip(&mut self.ranks) {
            let mut new = Self::read(control, now);
            if [new.entered, new.finished, new.work] == [seen.entered, seen.finished, seen.work] {
                new.progressed_ns = seen.progressed_ns;
                if new.turns == seen.turns {
                    new.ran_ns = seen.ran_ns;
                }
            }
            *seen = new;
        }
        self.read_ns = now;
    }

    /// When any rank last made progress, finished ranks included.
    pub(crate) fn newest_progress(&self) -> u64 {
        self.ranks.iter().map(|seen| seen.progressed_ns).max().unwrap_or(0)
    }

    /// The lowest rank that had entered `step` at the last read.
    pub(crate) fn first_inside(&self, step: u64) -> Option<Rank> {
        (0..).map(Rank).zip(&self.ranks).find(|(_, seen)| seen.entered >= step).map(|(rank, _)| rank)
    }

    /// The ranks, other than `own`, that had not finished `step` at the last read.
    pub(crate) fn needed(&self, own: Rank, step: u64) -> impl Iterator<Item = (Rank, &SeenProgress)> {
        let ranks = (0..).map(Rank).zip(&self.ranks);
        ranks.filter(move |&(rank, seen)| rank != own && seen.finished < step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::controls;
    use crate::signature::SIGNATURE;

    fn enter(control: &Control, step: u64) {
        control.enter(step, [0; SIGNATURE], [None; 4]);
    }

    #[test]
    fn time_before_a_rank_enters_does_not_count_as_a_stall() {
        let controls = controls(2);
        let mut monitor = ProgressMonitor::new(&controls);
        monitor.read_all(&controls, 1000);
        // The rank enters after the read and before the bounds are checked.
        enter(&controls[1], 1);
        assert!(!monitor.ranks[1].is_inside(1), "bounds are judged by the values of the last read");
        monitor.read_all(&controls, 5000);
        let seen = monitor.ranks[1];
        assert!(seen.is_inside(1));
        assert_eq!((seen.ran_ns, seen.progressed_ns), (5000, 5000));
    }

    #[test]
    fn workers_that_wait_count_turns_but_no_progress() {
        let controls = controls(2);
        let mut monitor = ProgressMonitor::new(&controls);
        enter(&controls[1], 1);
        monitor.read_all(&controls, 10);
        controls[1].turn();
        monitor.read_all(&controls, 20);
        monitor.read_all(&controls, 30);
        assert_eq!((monitor.ranks[1].ran_ns, monitor.ranks[1].progressed_ns), (20, 10));
        controls[1].advance();
        monitor.read_all(&controls, 40);
        assert_eq!((monitor.ranks[1].ran_ns, monitor.ranks[1].progressed_ns), (40, 40));
    }

    #[test]
    fn a_rank_that_has_finished_the_step_is_not_needed() {
        let controls = controls(3);
        let mut monitor = ProgressMonitor::new(&controls);
        controls.iter().for_each(|control| enter(control, 1));
        controls[2].finish(1);
        monitor.read_all(&controls, 10);
        let needed = |step| monitor.needed(Rank(0), step).map(|(rank, _)| rank).collect::<Vec<_>>();
        assert_eq!(needed(1), [Rank(1)]);
        assert_eq!(needed(2), [Rank(1), Rank(2)]);
        // Finishing is progress: the ranks that waited for this rank to finish advance a moment later.
        assert_eq!(monitor.newest_progress(), 10);
    }
}
