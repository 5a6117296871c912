//! The heartbeat of a rank, and how long the heartbeats of the other ranks have been silent.
//!
//! A separate thread increments the rank's pulse word and reads those of the other ranks. The pulse therefore goes on
//! while the program computes, compiles or writes a checkpoint between operators, and stops only with the process.
//! `buffer` starts the thread; `wait` asks how long a peer has been silent.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ep::{EnvironmentError, Rank, Result};

use crate::control::Control;
use crate::processes::Processes;

/// The longest pause between two heartbeats; a short stall bound makes it shorter.
const EVERY: Duration = Duration::from_millis(100);
/// Heartbeats within one stall bound: a busy machine may delay some of them.
const BEATS_PER_BOUND: u32 = 16;
/// The time between two iterations of the thread counts as observed up to this many pauses. A longer gap means that
/// this process itself did not run, for example because the whole job was suspended; the excess does not count.
const OBSERVED_PAUSES: u32 = 4;

/// A rank that misses this many heartbeats in a row may be stopped.
const MISSED_BEATS: u32 = 4;

/// The heartbeat thread of a rank; it runs until this value is dropped.
#[derive(Debug)]
pub(crate) struct Pulse {
    monitor: Arc<PulseMonitor>,
    thread: Option<JoinHandle<()>>,
    /// The process that runs the thread. A forked child has a copy of this value but no thread.
    process: u32,
}

/// The state of the heartbeat thread.
#[derive(Debug)]
struct PulseMonitor {
    /// This rank.
    own: usize,
    /// By rank.
    controls: Vec<Control>,
    /// By rank.
    seen: Vec<SeenPulse>,
    /// The pause between two heartbeats.
    every: Duration,
    /// Observed time so far, nanoseconds.
    observed_ns: AtomicU64,
    /// The links to ranks of other machines, which get this rank's status with each heartbeat.
    processes: Processes,
    stop: AtomicBool,
}

/// The newest pulse of one rank.
#[derive(Debug, Default)]
struct SeenPulse {
    pulse: AtomicU64,
    /// [`PulseMonitor::observed_ns`] when the pulse last changed.
    changed_ns: AtomicU64,
}

impl Pulse {
    /// Starts the heartbeat thread of `rank`. `bound` is the stall bound: a silence of this length means a stopped process.
    ///
    /// # Errors
    /// [`EnvironmentError`] when the system cannot start a thread.
    pub(crate) fn start(
        rank: Rank,
        controls: &[Control],
        processes: &Processes,
        bound: Duration,
    ) -> Result<Self> {
        let monitor = Arc::new(PulseMonitor {
            own: rank.index(),
            controls: controls.to_vec(),
            seen: controls.iter().map(|_| SeenPulse::default()).collect(),
            every: EVERY.min(bound / BEATS_PER_BOUND).max(Duration::from_micros(100)),
            observed_ns: AtomicU64::new(0),
            processes: processes.clone(),
            stop: AtomicBool::new(false),
        });
        let monitoring = Arc::clone(&monitor);
        let thread = std::thread::Builder::new()
            .name(format!("ep-pulse-{rank}"))
            .spawn(move || monitoring.run())
            .map_err(|error| {
                EnvironmentError::new(
                    "starting the heartbeat thread",
                    error,
                    "raise the limit of threads (ulimit -u)",
                )
            })?;
        Ok(Self { monitor, thread: Some(thread), process: std::process::id() })
    }

    /// Whether this process is a forked child of the process that joined. The child maps the rank's memory but is not
    /// the rank.
    pub(crate) fn is_forked(&self) -> bool {
        std::process::id() != self.process
    }

    /// How long the heartbeat of `rank` has been silent while this rank observed it.
    pub(crate) fn silence(&self, rank: Rank) -> Duration {
        let changed = self.monitor.seen[rank.index()].changed_ns.load(Relaxed);
        Duration::from_nanos(self.monitor.observed_ns.load(Relaxed).saturating_sub(changed))
    }

    /// The silence after which a rank may be stopped. It is shorter than the stall bound, after which the rank counts
    /// as stopped.
    pub(crate) fn quiet(&self) -> Duration {
        self.monitor.every * MISSED_BEATS
    }

    /// Ends the heartbeat.
    pub(crate) fn stop(&mut self) {
        self.monitor.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        if !self.is_forked() {
            self.stop();
        }
    }
}

impl PulseMonitor {
    fn run(&self) {
        let mut read = Instant::now();
        while !self.stop.load(Relaxed) {
            let own = &self.controls[self.own];
            own.beat();
            self.processes.send_status(own, false);
            let paused = read.elapsed();
            read += paused;
            self.read_all(paused);
            std::thread::park_timeout(self.every);
        }
    }

    /// Reads all pulses; `paused` is the time since the last read.
    fn read_all(&self, paused: Duration) {
        let counted = paused.min(self.every * OBSERVED_PAUSES).as_nanos() as u64;
        let now = self.observed_ns.load(Relaxed) + counted;
        for (control, seen) in self.controls.iter().zip(&self.seen) {
            let pulse = control.pulse();
            if seen.pulse.swap(pulse, Relaxed) != pulse {
                seen.changed_ns.store(now, Relaxed);
            }
        }
        self.observed_ns.store(now, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::controls;

    fn monitor(controls: &[Control]) -> PulseMonitor {
        PulseMonitor {
            own: 0,
            controls: controls.to_vec(),
            seen: controls.iter().map(|_| SeenPulse::default()).collect(),
            every: EVERY,
            observed_ns: AtomicU64::new(0),
            processes: Processes::default(),
            stop: AtomicBool::new(false),
        }
    }

    #[test]
    fn the_heartbeat_runs_until_the_pulse_is_dropped() {
        let controls = controls(2);
        let pulse =
            Pulse::start(Rank(0), &controls, &Processes::default(), Duration::from_millis(20)).unwrap();
        while controls[0].pulse() < 3 {
            std::thread::yield_now();
        }
        // Rank 1 has no heartbeat thread.
        while pulse.silence(Rank(1)) < Duration::from_millis(20) {
            std::thread::yield_now();
        }
        drop(pulse);
        let last = controls[0].pulse();
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(controls[0].pulse(), last);
    }

    #[test]
    fn silence_is_counted_from_the_last_heartbeat() {
        let controls = controls(2);
        let monitor = monitor(&controls);
        let silence = |monitor: &PulseMonitor| {
            monitor.observed_ns.load(Relaxed).saturating_sub(monitor.seen[1].changed_ns.load(Relaxed))
        };
        monitor.read_all(EVERY);
        controls[1].beat();
        monitor.read_all(EVERY);
        assert_eq!(silence(&monitor), 0);
        monitor.read_all(EVERY);
        monitor.read_all(EVERY);
        assert_eq!(u128::from(silence(&monitor)), 2 * EVERY.as_nanos());
    }

    #[test]
    fn time_in_which_this_process_did_not_run_is_no_silence_of_the_peers() {
        let controls = controls(2);
        let monitor = monitor(&controls);
        monitor.read_all(Duration::from_secs(3600));
        assert_eq!(u128::from(monitor.observed_ns.load(Relaxed)), (EVERY * OBSERVED_PAUSES).as_nanos());
    }
}
