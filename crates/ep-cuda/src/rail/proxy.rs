//! The proxy thread of a rank.

use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ep::{EnvironmentError, Error, Rank, Result};

use super::losses::Failures;
use super::pump::{ProxyParts, Pump};
use super::send::Sent;

/// How long the thread looks for work without a pause after it had some. The units of one operator follow each other within
/// some tens of microseconds, so the thread does not sleep inside an operator.
const SPIN: Duration = Duration::from_micros(100);
/// Like [`SPIN`], after the host has launched an operator. Programs queue operators behind other work of the GPU, often
/// some milliseconds before they begin, and a nap would delay the operator.
const SPIN_AFTER_LAUNCH: Duration = Duration::from_millis(20);
/// The shortest nap: Linux adds about this much to any sleep.
const SHORTEST_NAP: Duration = Duration::from_micros(50);
/// The longest nap. A thousand rounds per second cost less than a hundredth of a core.
const LONGEST_NAP: Duration = Duration::from_millis(1);
/// The time since the thread last looked without a pause, divided by this number, is the length of a nap, within
/// [`SHORTEST_NAP`] and [`LONGEST_NAP`]. So naps delay an operator by at most this fraction of the time between its launch
/// and its beginning. In the replay of a graph, whose operators the host does not launch one by one, the delay is at most
/// this fraction of the time since the last operator.
const NAP_PART: u32 = 16;

/// How long the thread may take to drop its engine. An engine waits up to 2 s for a call of libfabric.
const ENGINE_DROPS: Duration = Duration::from_secs(5);
/// The pause between two looks at whether the thread has ended.
const JOIN_PAUSE: Duration = Duration::from_micros(200);

/// The longest time that a proxy waits for the network before it ends, so that the deadline is a valid instant.
const MOST_PATIENCE: Duration = Duration::from_secs(24 * 60 * 60);

/// The proxy of a rank: a thread that moves the bytes between the rail windows of the rank and its peers.
#[derive(Debug)]
pub(crate) struct Proxy {
    thread: Option<JoinHandle<Result<()>>>,
    requests: Arc<Requests>,
    failures: Arc<Failures>,
    sent: Arc<Sent>,
    patience: Duration,
    /// The process that has the thread; a forked child has a copy of this value but not the thread.
    process: u32,
}

/// What the thread is asked to do.
#[derive(Debug, Default)]
struct Requests {
    /// Set to end the nap.
    wake: AtomicBool,
    /// Send everything by this time, before this rank tells its peers that it leaves. The thread goes on.
    drain_by: OnceLock<Instant>,
    /// The answer to `drain_by`: whether everything has left this rank in time.
    drained: OnceLock<bool>,
    /// Send everything by this time, and end.
    stop_by: OnceLock<Instant>,
}

impl Proxy {
    /// Starts the thread. When the proxy is dropped, the thread posts what the kernels have completed, and waits for at
    /// most `patience`, and at most a day, until the bytes have left this rank.
    ///
    /// # Errors
    /// [`ep::CallerError`] when the parts do not fit each other; [`EnvironmentError`] when the thread cannot be started.
    pub(crate) fn start(parts: ProxyParts, patience: Duration) -> Result<Self> {
        let own = parts.rail.own();
        let mut pump = Pump::new(parts)?;
        let failures = Arc::clone(pump.losses().failures());
        let sent = Arc::clone(pump.sent());
        let requests = Arc::<Requests>::default();
        let asked = Arc::clone(&requests);
        let run = move || {
            ep::affinity::stay_near(pump.near_cpus());
            let served = catch_unwind(AssertUnwindSafe(|| serve(&mut pump, &asked)));
            served.unwrap_or_else(|panic| Err(pump.lose_all(panicked(own, panic.as_ref()))))
        };
        let thread = thread::Builder::new().name(format!("ep-rail-{own}")).spawn(run).map_err(|error| {
            let hint = "raise the limit of threads (ulimit -u)";
            EnvironmentError::new("starting the proxy thread", error, hint)
        })?;
        let patience = patience.min(MOST_PATIENCE);
        let process = std::process::id();
        Ok(Self { thread: Some(thread), requests, failures, sent, patience, process })
    }

    /// Bytes and puts that the engine has accepted.
    pub(crate) fn sent(&self) -> (u64, u64) {
        self.sent.so_far()
    }

    /// The first error of each rail peer that is lost.
    pub(crate) fn failures(&self) -> BTreeMap<Rank, Error> {
        self.failures.all()
    }

    /// Ends the thread's nap, because an operator is about to begin.
    pub(crate) fn wake(&self) {
        self.requests.wake.store(true, Relaxed);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    /// Makes the thread send what the kernels have completed, within `patience`. The kernels must have ended. The thread
    /// continues to receive.
    pub(crate) fn drain(&self, patience: Duration) {
        self.requests.drain_by.get_or_init(|| Instant::now() + patience.min(MOST_PATIENCE));
        self.wake();
    }

    /// Whether everything has left this rank, after [`drain`](Self::drain); `None` until this is known.
    pub(crate) fn is_drained(&self) -> Option<bool> {
        let ended = || self.thread.as_ref().is_none_or(JoinHandle::is_finished).then_some(false);
        self.requests.drained.get().copied().or_else(ended)
    }

    /// Makes dropping the proxy not wait: this rank has given up, so its peers need nothing from it any more.
    pub(crate) fn give_up(&self) {
        self.requests.stop_by.get_or_init(Instant::now);
    }

    /// Ends the thread, as dropping the proxy does, and returns how it ended. The kernels must have ended.
    ///
    /// # Errors
    /// The error that ended the thread before; [`ep::PeerError`] for a peer to which not everything has left in time.
    #[cfg(test)]
    pub(crate) fn stop(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        if self.process != std::process::id() {
            return Ok(());
        }
        let stop_by = *self.requests.stop_by.get_or_init(|| Instant::now() + self.patience);
        thread.thread().unpark();
        let last = stop_by.max(Instant::now()) + ENGINE_DROPS;
        while !thread.is_finished() {
            if Instant::now() >= last {
                // The thread keeps what it uses: the engine and the window.
                let what = format!("ending the proxy thread {}", thread.thread().name().unwrap_or_default());
                let problem = "a call of the engine between NVLink domains has not returned";
                let error =
                    EnvironmentError::new(what, problem, "its memory is not freed before the process ends");
                ep::tell(&error);
                return Err(error.into());
            }
            thread::sleep(JOIN_PAUSE);
        }
        // The thread catches panics of its rounds. What is left are panics of values that it drops.
        thread.join().unwrap_or_else(|panic| {
            let problem = format!("it panicked: {}", text_of(panic.as_ref()));
            Err(EnvironmentError::new("ending the proxy thread", problem, REPORT).into())
        })
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // Lost peers are in `failures`. The rest concerns ranks that leave, whose kernels have ended.
        let _ = self.end();
    }
}

/// What to do about a panic.
const REPORT: &str = "report this bug with the panic's message";

fn panicked(own: Rank, panic: &(dyn Any + Send)) -> Error {
    let problem = format!("the proxy thread panicked: {}", text_of(panic));
    EnvironmentError::new(format!("serving the rail of rank {own}"), problem, REPORT).into()
}

fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

/// Makes rounds until the proxy is stopped.
fn serve(pump: &mut Pump, requests: &Requests) -> Result<()> {
    // The thread looks without a pause until then.
    let mut spin_until = Instant::now();
    loop {
        if let (Some(deadline), None) = (requests.drain_by.get(), requests.drained.get()) {
            requests.drained.get_or_init(|| pump.drain(*deadline).is_ok());
        }
        if let Some(deadline) = requests.stop_by.get() {
            return pump.drain(*deadline);
        }
        if requests.wake.swap(false, Relaxed) {
            spin_until = Instant::now() + SPIN_AFTER_LAUNCH;
        }
        if pump.step()? {
            spin_until = spin_until.max(Instant::now() + SPIN);
        } else {
            rest(Instant::now().checked_duration_since(spin_until));
        }
    }
}

/// Pauses the thread. `idle`: the time since the thread last looked for work without a pause; `None` if it still does.
fn rest(idle: Option<Duration>) {
    match idle {
        // With fewer cores than threads, another rank's thread may have what this one waits for.
        None => thread::yield_now(),
        Some(idle) => thread::park_timeout(nap_after(idle)),
    }
}

/// The length of a nap after this time.
fn nap_after(idle: Duration) -> Duration {
    (idle / NAP_PART).clamp(SHORTEST_NAP, LONGEST_NAP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn naps_grow_with_the_time_without_work() {
        let micros = Duration::from_micros;
        for (idle, nap) in [(100, 50), (800, 50), (1600, 100), (16_000, 1000), (1_000_000, 1000)] {
            assert_eq!(nap_after(micros(idle)), micros(nap));
        }
    }
}
