//! Heartbeats of ranks that are processes. The heartbeat thread of each rank sends heartbeats on the links, measures
//! how long its peers are silent, and reports a peer whose silence reaches the stall bound.
//!
//! The thread runs whatever the program does: a rank that compiles or writes a checkpoint keeps sending heartbeats, and
//! a rank whose process is stopped does not.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ep::{EnvironmentError, Rank, Result};

/// The pause between two heartbeats, unless the bound is short. Ranks of other machines learn of a fault with the next
/// heartbeat.
const EVERY: Duration = Duration::from_millis(100);
/// Minimum number of heartbeats within the bound: a busy machine delays individual heartbeats.
const BEATS_PER_BOUND: u32 = 16;
/// Maximum part of the time between two runs of the thread that counts as silence of the peers, in pauses between
/// heartbeats. The rest does not count: the whole job may have been suspended.
const WATCHED_PAUSES: u32 = 4;

/// The heartbeats of all peers, as this rank has received them.
#[derive(Debug)]
pub(crate) struct Hearts {
    /// By rank: heartbeats received.
    beats: Vec<AtomicU64>,
    /// By rank: nanoseconds of silence, without the time in which this rank did not watch.
    silence_ns: Vec<AtomicU64>,
    /// The silence after which a process counts as stopped.
    bound: Duration,
}

impl Hearts {
    pub(crate) fn new(ranks: usize, bound: Duration) -> Arc<Self> {
        let zeros = || (0..ranks).map(|_| AtomicU64::new(0)).collect();
        Arc::new(Self { beats: zeros(), silence_ns: zeros(), bound })
    }

    /// Called when a heartbeat of `rank` has arrived.
    pub(crate) fn heard(&self, rank: Rank) {
        self.beats[rank.index()].fetch_add(1, Relaxed);
    }

    fn silence(&self, rank: Rank) -> Duration {
        Duration::from_nanos(self.silence_ns[rank.index()].load(Relaxed))
    }

    /// Whether a rank seems to be stopped: it has been silent for half of the bound.
    fn is_quiet(&self, rank: Rank) -> bool {
        self.silence(rank) >= self.bound / 2
    }

    /// The ranks that seem to be stopped, ascending.
    pub(crate) fn quiet(&self) -> Vec<Rank> {
        (0..self.silence_ns.len() as u32).map(Rank).filter(|&rank| self.is_quiet(rank)).collect()
    }

    fn every(&self) -> Duration {
        EVERY.min(self.bound / BEATS_PER_BOUND).max(Duration::from_micros(100))
    }
}

/// The heartbeat thread; runs until this value is dropped.
#[derive(Debug)]
pub(crate) struct Heartbeat {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
    /// The process that has the thread; a forked child has a copy of this value but not the thread.
    process: u32,
}

#[derive(Debug, Default)]
struct Stop {
    asked: Mutex<bool>,
    changed: Condvar,
}

impl Stop {
    fn lock(&self) -> MutexGuard<'_, bool> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The heartbeat thread's state of a peer.
struct Watched {
    rank: Rank,
    beat: Box<dyn FnMut() + Send>,
    beats: u64,
    silent: bool,
}

impl Heartbeat {
    /// Starts the thread. `links` has a function per peer that sends a heartbeat; it must not wait for the peer. The
    /// thread calls `tell(peer, true)` when a peer's silence reaches the bound, and `tell(peer, false)` when a
    /// heartbeat of that peer arrives again.
    pub(crate) fn start(
        own: Rank,
        links: Vec<(Rank, Box<dyn FnMut() + Send>)>,
        hearts: Arc<Hearts>,
        mut tell: impl FnMut(Rank, bool) + Send + 'static,
    ) -> Result<Self> {
        let stop = Arc::new(Stop::default());
        let asked = Arc::clone(&stop);
        let run = move || {
            let mut peers: Vec<Watched> = (links.into_iter())
                .map(|(rank, beat)| Watched { rank, beat, beats: 0, silent: false })
                .collect();
            let mut looked = Instant::now();
            let mut stop = asked.lock();
            while !*stop {
                drop(stop);
                for peer in &mut peers {
                    (peer.beat)();
                }
                let paused = looked.elapsed();
                looked += paused;
                for peer in &mut peers {
                    peer.look(&hearts, paused, &mut tell);
                }
                stop = asked.lock();
                if !*stop {
                    let waited = asked.changed.wait_timeout(stop, hearts.every());
                    stop = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        };
        let thread = std::thread::Builder::new().name(format!("ep-beat-{own}")).spawn(run);
        let thread = thread.map_err(|error| {
            let hint = "raise the limit of threads (ulimit -u)";
            EnvironmentError::new("starting the heartbeat thread", error, hint)
        })?;
        Ok(Self { stop, thread: Some(thread), process: std::process::id() })
    }
}

impl Watched {
    /// Updates the peer's silence. `paused`: the time since the last call.
    fn look(&mut self, hearts: &Hearts, paused: Duration, tell: &mut impl FnMut(Rank, bool)) {
        let beats = hearts.beats[self.rank.index()].load(Relaxed);
        let silence = &hearts.silence_ns[self.rank.index()];
        if beats != self.beats {
            self.beats = beats;
            silence.store(0, Relaxed);
        } else {
            let counted = paused.min(hearts.every() * WATCHED_PAUSES);
            silence.fetch_add(counted.as_nanos() as u64, Relaxed);
        }
        let silent = hearts.silence(self.rank) >= hearts.bound;
        if silent != self.silent {
            self.silent = silent;
            tell(self.rank, silent);
        }
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if self.process != std::process::id() {
            return;
        }
        *self.stop.lock() = true;
        self.stop.changed.notify_all();
        let _ = thread.join();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const PEER: Rank = Rank(1);
    /// Ends a test that hangs.
    const LONG: Duration = Duration::from_secs(60);

    fn watched() -> Watched {
        Watched { rank: PEER, beat: Box::new(|| {}), beats: 0, silent: false }
    }

    #[test]
    fn silence_is_reported_once_and_its_end_once() {
        let hearts = Hearts::new(2, Duration::from_millis(1600));
        let mut peer = watched();
        let mut told = Vec::new();
        let mut look = |hearts: &Hearts, times: u32| {
            for _ in 0..times {
                peer.look(hearts, hearts.every(), &mut |rank, silent| told.push((rank, silent)));
            }
        };
        look(&hearts, 15);
        assert!(hearts.is_quiet(PEER));
        look(&hearts, 5);
        hearts.heard(PEER);
        look(&hearts, 15);
        assert_eq!(told, [(PEER, true), (PEER, false)]);
    }

    #[test]
    fn time_in_which_this_process_was_stopped_does_not_count_as_silence() {
        let hearts = Hearts::new(2, Duration::from_millis(1600));
        let mut peer = watched();
        peer.look(&hearts, Duration::from_secs(3600), &mut |_, _| panic!("it is not silent"));
        assert!(!hearts.is_quiet(PEER));
    }

    #[test]
    fn heartbeats_are_sent_until_the_drop_and_a_silent_peer_is_reported() {
        let hearts = Hearts::new(2, Duration::from_millis(50));
        let (sent, beats) = mpsc::channel();
        let beat = Box::new(move || sent.send(()).unwrap());
        let (said, heard) = mpsc::channel();
        let tell = move |rank, silent| said.send((rank, silent)).unwrap();
        let heartbeat = Heartbeat::start(Rank(0), vec![(PEER, beat)], Arc::clone(&hearts), tell).unwrap();
        assert_eq!(heard.recv_timeout(LONG), Ok((PEER, true)));
        hearts.heard(PEER);
        assert_eq!(heard.recv_timeout(LONG), Ok((PEER, false)));
        drop(heartbeat);
        // The channel ends, so no heartbeat follows; there were several.
        assert!(beats.iter().count() >= 2);
    }
}
