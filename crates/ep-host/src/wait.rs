//! Bounded waiting for other ranks. Every wait ends: with the event, or with an error that names the rank at fault.
//!
//! A worker without work calls [`Op::idle`]. Each call spins, yields or sleeps; every 32nd call of a wait also checks
//! the peers, in this order:
//!
//! 1. a peer's control block says that it failed or left;
//! 2. a peer's process is dead, or the network does not reach the peer;
//! 3. the program asks to stop ([`ep::Config::interrupt`]);
//! 4. a bound is exceeded. `stall_timeout` (30 s) bounds how long a peer's heartbeat may be silent and how long a peer
//!    inside an operator may make no progress. `timeout` (600 s) bounds how long this rank waits for a live peer to
//!    enter the operator.
//!
//! Check 1 runs each time, checks 2 to 4 at most once per [`READ_COUNTERS_EVERY_NS`] for all workers of the rank
//! together. Check 3 runs only on the thread that called the operator, and at most once per [`Interrupt::EVERY`].
//!
//! The checks consider all ranks that have not finished the step, not only the rank that the worker waits for: that
//! rank may itself wait for another one. `comm` and `preprocess` call this module.

use std::sync::PoisonError;
use std::sync::atomic::{Ordering::Acquire, Ordering::Relaxed};
use std::time::{Duration, Instant};

use ep::{CallerError, Error, Interrupt, Operator, PeerError, PeerFault, Rank, Result};

use crate::comm::{Comm, Op};
use crate::control::{Control, Health};
use crate::progress::{Idle, NAP, ProgressMonitor, SeenProgress, Waiting};

/// Grace period: after a rank has left, how long this rank waits for news of another rank's death.
const GRACE_PERIOD: Duration = Duration::from_millis(100);
/// After a rank has finished the step and is lost: how long its last messages may still arrive, nanoseconds.
const LAST_MESSAGES_NS: u64 = 500_000_000;
/// Least time between two checks that need a system call or read every peer's counters, nanoseconds.
const READ_COUNTERS_EVERY_NS: u64 = 2_000_000;

impl Op<'_> {
    /// Passes one turn of a worker that has no work.
    ///
    /// # Errors
    /// The error of the rank at fault, or of another worker, when waiting longer is useless;
    /// [`CallerError::Interrupted`].
    pub(crate) fn idle(&self, idle: &mut Idle, waiting: impl Fn() -> Waiting) -> Result<()> {
        self.check_stopped()?;
        if idle.turn() { self.check_peers(&waiting) } else { Ok(()) }
    }

    /// Returns the error that another worker has stored, if any. This worker then ends, too.
    pub(crate) fn check_stopped(&self) -> Result<()> {
        if !self.stopped.load(Acquire) {
            return Ok(());
        }
        let error = self.error.lock().unwrap_or_else(PoisonError::into_inner);
        error.clone().map_or(Ok(()), Err)
    }

    /// The other ranks that have not finished this step. A rank that has finished may leave without harm if its messages
    /// have arrived ([`lost_with_messages`](Self::lost_with_messages)).
    fn needed(&self) -> impl Iterator<Item = Rank> + '_ {
        let comm = self.comm;
        let unfinished = |rank: &Rank| comm.controls[rank.index()].finished() < self.step;
        comm.world.topology().all_ranks().filter(move |&rank| rank != comm.rank).filter(unfinished)
    }

    /// The error for a rank whose health is not alive although it has not finished this step.
    pub(crate) fn unhealthy(&self, rank: Rank, health: Health, waiting: Waiting) -> Error {
        match self.comm.failure(rank, health) {
            Some((at_fault, fault)) => self.peer_error(at_fault, fault, waiting, Some(rank)),
            None => self.left(rank, waiting),
        }
    }

    /// Checks the peers' health and processes, whether the program asks to stop, and the bounds.
    fn check_peers(&self, waiting: &impl Fn() -> Waiting) -> Result<()> {
        let comm = self.comm;
        comm.control().turn();
        for rank in self.needed() {
            let health = comm.controls[rank.index()].health();
            // `needed` read `finished` before this read of `health`. In between, the rank may have finished this step
            // and then left, or failed in a later operator.
            if health != Health::Alive && comm.controls[rank.index()].finished() >= self.step {
                continue;
            }
            if health != Health::Alive {
                return Err(self.unhealthy(rank, health, waiting()));
            }
        }
        let now = self.now_ns();
        let mut monitor = self.monitor.lock().unwrap_or_else(PoisonError::into_inner);
        if now.saturating_sub(monitor.read_ns) < READ_COUNTERS_EVERY_NS {
            return Ok(());
        }
        monitor.read_all(&comm.controls, now);
        let lost: Vec<(Rank, PeerFault)> = comm.processes.lost().collect();
        let lost_and_needed = |rank: Rank| lost.iter().find(|(lost, _)| *lost == rank);
        if let Some(&(rank, fault)) = self.needed().find_map(lost_and_needed) {
            return Err(self.peer_error(rank, fault, waiting(), None));
        }
        let awaited = waiting().peer;
        if let Some((fault, health)) = self.lost_with_messages(&mut monitor, &lost, now, awaited) {
            // Finding the cause may take a while, and other workers need the monitor meanwhile.
            drop(monitor);
            return Err(match fault {
                Some(fault) if health == Health::Alive => self.peer_error(awaited, fault, waiting(), None),
                _ => self.unhealthy(awaited, health, waiting()),
            });
        }
        if std::thread::current().id() == self.caller
            && now.saturating_sub(monitor.asked_ns) >= Interrupt::EVERY.as_nanos() as u64
        {
            monitor.asked_ns = now;
            self.check_interrupt(|| waiting().what)?;
        }
        self.check_bounds(&mut monitor, now, waiting)
    }

    /// The fault, if known, and the health of the awaited `rank`, if it has finished this step and is lost. `None`
    /// while its last messages may still arrive: a rank finishes a step when its transport has accepted its messages,
    /// which may still be in flight and may be lost with the rank. This rank gives them [`LAST_MESSAGES_NS`] from when
    /// it noticed the loss, and again from each progress.
    fn lost_with_messages(
        &self,
        monitor: &mut ProgressMonitor,
        lost: &[(Rank, PeerFault)],
        now: u64,
        rank: Rank,
    ) -> Option<(Option<PeerFault>, Health)> {
        let control = &self.comm.controls[rank.index()];
        let health = control.health();
        let fault = lost.iter().find(|(lost, _)| *lost == rank).map(|&(_, fault)| fault);
        let gone = fault.is_some() || health != Health::Alive;
        if rank == self.comm.rank || !gone || control.finished() < self.step {
            monitor.gone = None;
            return None;
        }
        let noticed = monitor.gone.filter(|(gone, _)| *gone == rank).map_or(now, |(_, noticed)| noticed);
        monitor.gone = Some((rank, noticed));
        let quiet = now.saturating_sub(noticed.max(self.progressed_ns.load(Relaxed)));
        (quiet >= LAST_MESSAGES_NS).then_some((fault, health))
    }

    /// Asks the program whether to stop.
    ///
    /// # Errors
    /// [`CallerError::Interrupted`] when the program says yes.
    pub(crate) fn check_interrupt(&self, waited_for: impl Fn() -> String) -> Result<()> {
        if !self.comm.config.interrupt.asked() {
            return Ok(());
        }
        let (operator, rank, waited_for) = (self.operator, self.comm.rank, waited_for());
        Err(CallerError::Interrupted { operator, rank, waited_for }.into())
    }

    /// Compares the time since each rank's last heartbeat, progress and entry with the two bounds.
    fn check_bounds(
        &self,
        monitor: &mut ProgressMonitor,
        now: u64,
        waiting: &impl Fn() -> Waiting,
    ) -> Result<()> {
        let comm = self.comm;
        let stall = comm.config.stall_bound();
        let stall_ns = stall.as_nanos() as u64;
        let since = |changed: u64| now.saturating_sub(changed);
        let exceeded = |peer: Rank, fault: PeerFault, why: String| {
            let Waiting { what, .. } = waiting();
            let what = format!("{what}; {why}");
            Err(self.peer_error(peer, fault, Waiting { peer, what }, None))
        };

        let needed = || monitor.needed(comm.rank, self.step);
        let check_heartbeats = |bound: Duration| {
            let mut silences = needed().map(|(rank, _)| (rank, comm.pulse.silence(rank)));
            let Some((rank, silence)) = silences.find(|&(_, silence)| silence >= bound) else {
                return Ok(());
            };
            exceeded(rank, PeerFault::Stalled, no_heartbeat(rank, silence))
        };
        check_heartbeats(stall)?;
        let own = since(self.progressed_ns.load(Relaxed));
        if own < stall_ns {
            return Ok(());
        }
        // The rank is inside an operator, and none of its workers runs.
        let stalled = |seen: &SeenProgress| seen.is_inside(self.step) && since(seen.ran_ns) >= stall_ns;
        if let Some((rank, _)) = needed().find(|(_, seen)| stalled(seen)) {
            let why = format!("rank {rank} is inside an operator and its workers do not run");
            return exceeded(rank, PeerFault::Stalled, why);
        }
        let absent = |seen: &SeenProgress| seen.entered < self.step;
        let Some((first_absent, _)) = needed().find(|(_, seen)| absent(seen)) else {
            // All ranks are inside and their workers run. Progress includes that of a rank that has just finished.
            if since(monitor.newest_progress()) < stall_ns {
                return Ok(());
            }
            let peer = waiting().peer;
            return exceeded(peer, PeerFault::Stalled, "no rank makes progress".into());
        };
        let peer = waiting().peer;
        let awaited = needed().find(|&(rank, seen)| rank == peer && absent(seen));
        let awaited = awaited.map_or(first_absent, |(rank, _)| rank);
        if own < comm.config.timeout.as_nanos() as u64 {
            if !monitor.told && monitor.first_inside(self.step) == Some(comm.rank) {
                monitor.told = true;
                self.tell_late(awaited, Duration::from_nanos(own));
            }
            return Ok(());
        }
        // Where both bounds are equal, the entry bound may be exceeded first. A heartbeat that has been silent for half
        // the stall bound then still means a stopped process and not a late rank.
        check_heartbeats(stall / 2)?;
        let why = format!("rank {awaited} lives but has not entered {} #{}", self.operator, self.step);
        let why = match comm.controls[awaited.index()].waits_outside() {
            true => format!(
                "{why}; it waits for gradients to be reduced: either rank {} has left out reduce_gradients, or rank {awaited} \
                 has left out {} #{} (a forward or backward pass)",
                comm.rank, self.operator, self.step
            ),
            false => why,
        };
        let why = match comm.processes.is_empty() {
            true => format!("{why} (it is a rank of this process: each rank needs a thread of its own)"),
            false => why,
        };
        exceeded(awaited, PeerFault::Late, why)
    }

    /// Prints on stderr that a rank is late, long before the entry bound makes that an error: the late rank may be
    /// writing a checkpoint, but its program may also have called another operator, or none. Only the lowest rank
    /// inside the operator prints this, once per operator.
    fn tell_late(&self, late: Rank, waited: Duration) {
        let Self { operator, step, comm, .. } = self;
        let named = comm.machine_of(late).map_or(String::new(), |machine| format!(" on {machine}"));
        let outside = match comm.controls[late.index()].waits_outside() {
            true => ", which waits for gradients to be reduced,",
            false => "",
        };
        ep::tell(format_args!(
            "rank {} has waited {:.0} s for rank {late}{named}{outside} to enter {operator} #{step}; {}",
            comm.rank,
            waited.as_secs_f64(),
            comm.config.bounds(PeerFault::Late)
        ));
    }

    /// The error for a rank that left while this rank needed it. The rank may have left because it noticed earlier than
    /// this rank that a third rank is lost. If a rank's process has died, or its heartbeat is silent for the stall
    /// bound, the error therefore names that rank. If a silence has begun, this function waits until the heartbeat
    /// returns or the stall bound is reached.
    fn left(&self, rank: Rank, waiting: Waiting) -> Error {
        let comm = self.comm;
        let (stall, quiet) = (comm.config.stall_bound(), comm.pulse.quiet());
        let is_alive = |rank: &Rank| matches!(comm.controls[rank.index()].health(), Health::Alive);
        let deadline = Instant::now() + GRACE_PERIOD;
        loop {
            if let Some((lost, fault)) = comm.processes.lost().find(|(rank, _)| is_alive(rank)) {
                return self.peer_error(lost, fault, waiting, None);
            }
            let silences = self.needed().filter(is_alive).map(|rank| (comm.pulse.silence(rank), rank));
            let longest = silences.max().filter(|&(silence, _)| silence >= quiet);
            match longest {
                Some((silence, silent)) if silence >= stall => {
                    let what = format!("{}; {}", waiting.what, no_heartbeat(silent, silence));
                    let waiting = Waiting { peer: silent, what };
                    return self.peer_error(silent, PeerFault::Stalled, waiting, None);
                }
                Some(_) => {}
                None if comm.processes.is_empty() || Instant::now() >= deadline => break,
                None => {}
            }
            std::thread::sleep(NAP);
        }
        self.peer_error(rank, PeerFault::Left, waiting, None)
    }

    /// The error that names `peer`. `reporter` is the rank whose control block reported the fault, if any.
    pub(crate) fn peer_error(
        &self,
        peer: Rank,
        fault: PeerFault,
        waiting: Waiting,
        reporter: Option<Rank>,
    ) -> Error {
        let waited = Duration::from_nanos(self.now_ns().saturating_sub(self.progressed_ns.load(Relaxed)));
        self.comm.peer_error(
            (self.operator, self.step),
            [peer, reporter.unwrap_or(peer)],
            fault,
            waiting.what,
            waited,
        )
    }
}

impl Comm {
    /// The rank at fault and its fault, if the `health` of `rank` says that it has failed. A rank whose failure names
    /// this rank is itself at fault here.
    pub(crate) fn failure(&self, rank: Rank, health: Health) -> Option<(Rank, PeerFault)> {
        match health {
            Health::Failed { at_fault, fault, .. } if at_fault != self.rank => Some((at_fault, fault)),
            Health::Failed { .. } => Some((rank, PeerFault::Failed)),
            Health::Left | Health::Alive => None,
        }
    }

    /// The error that names `peer` in a wait of a call. `reporter` is the rank whose control block reported the fault,
    /// or `peer` itself.
    pub(crate) fn peer_error(
        &self,
        (operator, step): (Operator, u64),
        [peer, reporter]: [Rank; 2],
        fault: PeerFault,
        waited_for: String,
        waited: Duration,
    ) -> Error {
        let reported =
            if reporter == peer { String::new() } else { format!(" (reported by rank {reporter})") };
        let bounds = match fault {
            PeerFault::Late | PeerFault::Stalled => format!("; {}", self.config.bounds(fault)),
            _ => String::new(),
        };
        let control = self.controls.get(peer.index());
        PeerError {
            peer,
            machine: self.machine_of(peer),
            fault,
            operator,
            step,
            rank: self.rank,
            waited_for: format!("{waited_for}{reported}{bounds}"),
            waited,
            cause: control.filter(|_| fault == PeerFault::Failed).and_then(Control::cause),
        }
        .into()
    }
}

pub(crate) fn no_heartbeat(rank: Rank, silence: Duration) -> String {
    format!("rank {rank} has had no heartbeat for {:.1} s", silence.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use ep::workload::Workload;
    use ep::{Backend as _, DispatchMode, EnvironmentError, World};

    use super::*;
    use crate::HostBuffer;
    use crate::signature::CollectiveArguments;

    /// Rank 1 has failed because of rank 2, and may have changed the rows that rank 0 has read.
    #[test]
    fn the_rank_at_fault_is_named_and_not_one_that_failed_because_of_it() {
        let world = World::builder().ranks(3).experts(3).build().unwrap();
        let buffers = HostBuffer::threads(&world, &ep::Config::default()).unwrap();
        let comm = &buffers[0].comm;
        let (operator, memories) = (Operator::Combine, Default::default());
        let op = Op::enter(comm, operator, 1, CollectiveArguments::default(), memories);
        assert_eq!(op.check_inputs_unchanged(), Ok(()));
        for (at_fault, fault, expected) in [
            (Rank(2), PeerFault::Died, (Rank(2), PeerFault::Died)),
            (Rank(0), PeerFault::Stalled, (Rank(1), PeerFault::Failed)),
            (Rank(1), PeerFault::Failed, (Rank(1), PeerFault::Failed)),
        ] {
            comm.controls[1].set_health(Health::Failed { at_fault, fault, operator, step: 1 });
            let Err(Error::Peer(error)) = op.check_inputs_unchanged() else { panic!("rank 1 has failed") };
            assert_eq!((error.peer, error.fault), expected, "{error}");
        }
    }

    #[test]
    fn peers_learn_of_an_operator_that_has_failed_and_cannot_return() {
        let mut config = ep::Config::default();
        config.stall_timeout = Duration::from_millis(200);
        let buffers =
            HostBuffer::threads(&World::builder().ranks(2).domains(2).experts(2).build().unwrap(), &config)
                .unwrap();
        let comm = &buffers[0].comm;
        let op = Op::enter(comm, Operator::Dispatch, 1, CollectiveArguments::default(), Default::default());
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let (begun, start) = (AtomicUsize::new(0), Instant::now());
        let failed = || matches!(comm.control().health(), Health::Failed { at_fault: Rank(0), .. });
        let error = Error::from(EnvironmentError::new("a put", "the card is gone", ""));
        let result = op.run(Some(&pool), |_| {
            if begun.fetch_add(1, Relaxed) == 0 {
                return Err(error.clone());
            }
            // The second worker does not end before the failure is published.
            while !failed() {
                assert!(start.elapsed() < Duration::from_secs(60), "the failure is not published");
                std::thread::yield_now();
            }
            Ok(())
        });
        assert_eq!(result, Err(error));
        assert!(comm.control().cause().unwrap().contains("a worker has not ended within the stall bound"));
    }

    /// Rank 0 is stopped. Rank 1 notices first, and leaves because of it. Rank 2 must name rank 0 and not rank 1.
    #[test]
    fn a_stopped_rank_is_named_and_not_one_that_left_because_of_it() {
        let stall = Duration::from_millis(400);
        let mut config = ep::Config::default();
        config.stall_timeout = stall;
        let mut buffers =
            HostBuffer::threads(&World::builder().ranks(3).experts(3).build().unwrap(), &config).unwrap();
        let (mut last, leaver, mut stopped) = (buffers.remove(2), buffers.remove(1), buffers.remove(0));
        Arc::get_mut(&mut stopped.comm).unwrap().pulse.stop();
        while last.comm.pulse.silence(Rank(0)) < last.comm.pulse.quiet() {
            std::thread::yield_now();
        }
        drop(leaver);
        let routing = Workload { tokens: 4, experts: 3, topk: 1, skew: 0.0, seed: 0 }.routing(Rank(2));
        let error = last.preprocess(&routing, DispatchMode::Plain, None).unwrap_err().to_string();
        assert!(error.starts_with("rank 0 stalled (preprocess #1)"), "{error}");
        assert!(last.comm.pulse.silence(Rank(0)) >= stall, "{error}");
    }
}
