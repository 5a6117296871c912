//! `verify --soak`: runs many iterations on the same ranks, each with a different routing, mode and format.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::ops::Range;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};

use ep::config::LaunchEnv;
use ep::conformance::{Iteration, Soak, Soaking};
use ep::join::{Rendezvous, TcpRendezvous};
use ep::{Config, WeightRows};
use ep_cuda::CudaBuffer;
use ep_host::HostBuffer;
use indicatif::ProgressBar;
use rayon::prelude::*;

use crate::common::agree::JobOptions;
use crate::common::backend::BackendKind;
use crate::common::failure::{Failure, Verdict};
use crate::common::invocation::Invocation;
use crate::common::launch::{self, Job};
use crate::common::role::{self, ProcessRole};
use crate::common::{output, threads, units};
use crate::verify::args::VerifyArgs;
use crate::verify::cases;
use crate::verify::run::{self, CheckReport};
use crate::verify::tally::{FAILED, PASSED, Tally, attend, seed_for_ranks};

/// Number of iterations that are prepared together, on all cores. Ranks that are processes exchange reports after each batch.
const BATCH: u64 = 32;
/// Maximum number of prepared iterations that are queued for a rank.
const AHEAD: usize = 4;

/// A soak that can be run.
#[derive(Debug)]
struct SoakPlan {
    soak: Soak,
    iterations: u64,
    backend: BackendKind,
    config: Config,
    seed: u64,
    processes: bool,
    /// Name of the program in commands that repeat an iteration.
    program: String,
}

/// The outcomes of all ranks so far.
#[derive(Debug, PartialEq, Eq)]
struct Outcomes {
    /// Number of iterations that each rank has passed.
    passed: Vec<u64>,
    /// Reports of failures, with their iteration.
    reports: Vec<(u64, CheckReport)>,
}

/// The outcome of one iteration on a rank that is a thread.
struct RankOutcome {
    rank: usize,
    number: u64,
    report: Option<CheckReport>,
}

pub(super) fn main(
    args: &VerifyArgs,
    iterations: u64,
    role: ProcessRole,
    invocation: &Invocation,
) -> Result<Verdict, Failure> {
    let plan = SoakPlan::resolve(args, iterations, &role, &invocation.name)?;
    match role {
        ProcessRole::Threads => {
            output::to_stdout(&plan.announcement("threads"))?;
            let bar = plan.progress();
            let outcomes = match plan.backend {
                BackendKind::Host => on_threads::<HostBuffer>(&plan, &bar),
                BackendKind::Cuda => on_threads::<CudaBuffer>(&plan, &bar),
            };
            bar.finish_and_clear();
            let outcomes = outcomes?;
            plan.print_failure(&outcomes)?;
            plan.conclude(outcomes.passed_by_all(), outcomes.reports.len().min(1), Ok(()))
        }
        ProcessRole::Launcher => {
            output::to_stdout(&plan.announcement("processes"))?;
            let (tally, bar) = (Tally::default(), plan.progress());
            let job = Job::start(
                invocation,
                plan.soak.world().ranks(),
                &seed_for_ranks(args, plan.seed),
                Stdio::piped(),
            )?;
            let outcome = attend(job, &plan.config, &tally, &bar);
            bar.finish_and_clear();
            let [passed, failed] = [&tally.passed, &tally.failed].map(|count| count.load(Ordering::Relaxed));
            plan.conclude(passed as u64, failed, outcome)
        }
        ProcessRole::Rank(env) => match plan.backend {
            BackendKind::Host => as_one_rank::<HostBuffer>(&plan, &env, args.tuning.launched),
            BackendKind::Cuda => as_one_rank::<CudaBuffer>(&plan, &env, args.tuning.launched),
        },
    }
}

impl SoakPlan {
    fn resolve(
        args: &VerifyArgs,
        iterations: u64,
        role: &ProcessRole,
        program: &str,
    ) -> Result<Self, Failure> {
        cases::check_limits(args)?;
        let ranks = role::ranks(args.ranks, role)?;
        let backend = cases::backend(args)?;
        let two = backend == BackendKind::Host && ranks.is_multiple_of(2);
        let domains = args.domains.unwrap_or(if two { 2 } else { 1 });
        let seed = args.seed.unwrap_or_else(cases::new_seed);
        let soak = Soak::new(seed, ranks, domains)
            .map_err(|error| Failure::request(format!("--ranks, --domains: {error}")))?;
        let config = args.tuning.config()?;
        let (processes, program) = (args.processes, program.to_owned());
        Ok(Self { soak, iterations, backend, config, seed, processes, program })
    }

    /// The options that determine the iterations. They must be equal on all ranks.
    fn job_options(&self) -> JobOptions {
        JobOptions::of("verify --soak")
            .with("--backend", self.backend.name())
            .with("--seed", self.seed)
            .with("--soak", self.iterations)
            .with("--domains", self.soak.world().topology().domains())
    }

    /// The first line of the output. It has the seed, so that a run that hangs can be repeated.
    fn announcement(&self, kind: &str) -> String {
        let (world, backend) = (self.soak.world(), self.backend.name());
        format!(
            "soaking the {backend} backend, ranks as {kind}: {} of {} in {} with {}, seed {}",
            units::counted(self.iterations as usize, "iteration"),
            units::counted(world.ranks(), "rank"),
            units::counted(world.topology().domains(), "domain"),
            units::counted(world.experts(), "expert"),
            self.seed
        )
    }

    fn progress(&self) -> ProgressBar {
        let bar = output::progress(self.iterations);
        bar.set_message("soaking");
        bar
    }

    /// Prints the failure, if any, and the command that repeats it.
    fn print_failure(&self, outcomes: &Outcomes) -> Result<(), Failure> {
        let Some((number, message)) = outcomes.first_cause() else { return Ok(()) };
        let replay = self.replay(number);
        output::to_stderr(&format!("FAILED: iteration {number}\n  {message}\n  replay: {replay}"))
    }

    /// The command line that repeats an iteration. It runs all earlier iterations too, because the failure may depend
    /// on them.
    fn replay(&self, number: u64) -> String {
        let Self { program, seed, .. } = self;
        let backend = if self.backend == BackendKind::Cuda { " --backend cuda" } else { "" };
        let form = if self.processes { " --processes" } else { "" };
        let (ranks, domains) = (self.soak.world().ranks(), self.soak.world().topology().domains());
        let world = format!("--ranks {ranks} --domains {domains}");
        format!("{program} verify{backend} --soak {} --seed {seed} {world}{form}", number.saturating_add(1))
    }

    fn conclude(&self, passed: u64, failed: usize, outcome: Result<(), Failure>) -> Result<Verdict, Failure> {
        output::to_stdout(&format!("{passed} passed, {failed} failed"))?;
        outcome?;
        if failed == 0 {
            let ranks = units::counted(self.soak.world().ranks(), "rank");
            let iterations = units::counted(passed as usize, "iteration");
            output::to_stdout(&format!("verified: {ranks} through {iterations}, seed {}", self.seed))?;
        }
        Ok(Verdict::of(failed == 0))
    }

    /// Prepares some iterations on all cores.
    fn prepare(&self, numbers: Range<u64>) -> Result<Vec<Arc<Iteration>>, Failure> {
        let numbers: Vec<u64> = numbers.collect();
        let prepare = |number| self.soak.prepare(number).map(Arc::new);
        let prepared: ep::Result<_> =
            threads::pool()?.install(|| numbers.into_par_iter().map(prepare).collect());
        Ok(prepared?)
    }

    /// Prepares and queues all batches. Stops when the receiver is gone, which happens after a failure.
    fn prepare_all(&self, queue: &SyncSender<Result<Vec<Arc<Iteration>>, Failure>>) {
        self.batches().take_while(|batch| queue.send(self.prepare(batch.clone())).is_ok()).for_each(drop);
    }

    /// The batches of all iterations.
    fn batches(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let end = self.iterations;
        (0..end).step_by(BATCH as usize).map(move |begin| begin..end.min(begin + BATCH))
    }
}

impl Outcomes {
    fn new(ranks: usize) -> Self {
        Self { passed: vec![0; ranks], reports: Vec::new() }
    }

    fn record(&mut self, outcome: RankOutcome) {
        match outcome.report {
            None => self.passed[outcome.rank] += 1,
            Some(report) => self.reports.push((outcome.number, report)),
        }
    }

    /// Number of iterations that all ranks have passed.
    fn passed_by_all(&self) -> u64 {
        let first_wrong = self.reports.iter().map(|(number, _)| *number);
        self.passed.iter().copied().chain(first_wrong).min().unwrap_or(0)
    }

    /// The first iteration in which a rank itself failed; else the first in which a rank lost a peer.
    fn first_cause(&self) -> Option<(u64, &str)> {
        let key = |(number, report): &&(u64, CheckReport)| (report.weight, Reverse(*number));
        let (number, report) = self.reports.iter().rev().max_by_key(key)?;
        Some((*number, report.message()))
    }
}

/// Runs the soak with ranks as threads, until a rank reports a failure or all iterations have passed.
fn on_threads<B: WeightRows + Send>(plan: &SoakPlan, bar: &ProgressBar) -> Result<Outcomes, Failure> {
    let buffers = B::threads(plan.soak.world(), &plan.config)?;
    let mut outcomes = Outcomes::new(buffers.len());
    std::thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel();
        let mut queues = Vec::with_capacity(buffers.len());
        for (rank, buffer) in buffers.into_iter().enumerate() {
            let (queue, iterations) = mpsc::sync_channel(AHEAD);
            let sender = sender.clone();
            let work = move || run_as_thread(rank, buffer, &iterations, &sender);
            // An error drops the queues and the other buffers, which ends the ranks that run already.
            threads::spawn_scoped(scope, &format!("the thread of rank {rank}"), work)?;
            queues.push(queue);
        }
        drop(sender);
        'soak: for batch in plan.batches() {
            for iteration in plan.prepare(batch)? {
                for queue in &queues {
                    // The rank has ended; its last outcome says why.
                    if queue.send(Arc::clone(&iteration)).is_err() {
                        break 'soak;
                    }
                }
            }
            receiver.try_iter().for_each(|outcome| outcomes.record(outcome));
            bar.set_position(outcomes.passed_by_all());
            if !outcomes.reports.is_empty() {
                break;
            }
        }
        // Closing the queues ends the ranks, which ends the outcomes.
        drop(queues);
        receiver.iter().for_each(|outcome| outcomes.record(outcome));
        Ok(outcomes)
    })
}

/// Runs one rank as a thread.
fn run_as_thread<B: WeightRows + Send>(
    rank: usize,
    mut buffer: B,
    iterations: &Receiver<Arc<Iteration>>,
    sender: &Sender<RankOutcome>,
) {
    let mut soaking = Soaking::default();
    for iteration in iterations {
        let report = run::guarded(iteration.case(), || soaking.check(&mut buffer, &iteration));
        let ended = report.as_ref().is_some_and(|report| report.ended);
        // The receiver outlives all ranks, so sending cannot fail.
        let _ = sender.send(RankOutcome { rank, number: iteration.number(), report });
        if ended {
            return;
        }
    }
}

/// Runs the soak with this process as one rank. After each batch all ranks exchange reports and decide whether to go
/// on.
fn as_one_rank<B: WeightRows + Send>(
    plan: &SoakPlan,
    env: &LaunchEnv,
    launched: bool,
) -> Result<Verdict, Failure> {
    let mut reporter = match (env.rank, launched) {
        (0, true) => Reporter::ToLauncher { reported: 0 },
        (0, false) => Reporter::ToTerminal(plan.progress()),
        _ => Reporter::Silent,
    };
    if let Reporter::ToTerminal(_) = reporter {
        output::to_stdout(&plan.announcement("processes"))?;
    }
    let mut meet = TcpRendezvous::launched(env, &plan.config)?;
    launch::as_rank(&mut meet, |meet| {
        plan.job_options().check(meet)?;
        let buffer = B::join(plan.soak.world(), meet, &plan.config)?;
        std::thread::scope(|scope| {
            let (queue, batches) = mpsc::sync_channel(1);
            let prepare = move || plan.prepare_all(&queue);
            threads::spawn_scoped(scope, "the thread that prepares iterations", prepare)?;
            let outcomes = run_as_process(buffer, meet, batches, &mut reporter)?;
            reporter.conclude(plan, &outcomes)
        })
    })
}

/// Runs all batches on this rank.
fn run_as_process<B: WeightRows + Send>(
    buffer: B,
    meet: &mut dyn Rendezvous,
    batches: Receiver<Result<Vec<Arc<Iteration>>, Failure>>,
    reporter: &mut Reporter,
) -> Result<Outcomes, Failure> {
    let (mut buffer, mut soaking) = (Some(buffer), Soaking::default());
    let mut outcomes = Outcomes::new(1);
    for batch in batches {
        let batch = batch?;
        let mut first = None;
        for iteration in &batch {
            let Some(alive) = &mut buffer else { break };
            let report = run::guarded(iteration.case(), || soaking.check(alive, iteration));
            if report.as_ref().is_some_and(|report| report.ended) {
                // Dropped before the exchange: peers that still wait in an operator for this rank then see that it
                // left.
                buffer = None;
            }
            first = first.or(report.map(|report| (iteration.number(), report)));
        }
        outcomes.reports = exchange(meet, first.as_ref())?;
        outcomes.passed[0] += batch.len() as u64;
        reporter.progress(&outcomes)?;
        if !outcomes.reports.is_empty() {
            break;
        }
    }
    Ok(outcomes)
}

/// Exchanges the first failure of each rank with all ranks.
fn exchange(
    meet: &mut dyn Rendezvous,
    mine: Option<&(u64, CheckReport)>,
) -> Result<Vec<(u64, CheckReport)>, Failure> {
    let blob = mine.map_or_else(Vec::new, |(number, report)| {
        [&number.to_le_bytes()[..], &CheckReport::to_bytes(Some(report))].concat()
    });
    let read = |blob: &Vec<u8>| {
        let (&number, report) = blob.split_first_chunk()?;
        Some((u64::from_le_bytes(number), CheckReport::from_bytes(report)?))
    };
    Ok(meet.all_gather(&blob)?.iter().filter_map(read).collect())
}

/// Where a rank that is a process reports its progress.
enum Reporter {
    Silent,
    ToTerminal(ProgressBar),
    /// One line per iteration, to the launcher.
    ToLauncher {
        reported: u64,
    },
}

impl Reporter {
    /// Reports how many iterations all ranks have passed.
    fn progress(&mut self, outcomes: &Outcomes) -> Result<(), Failure> {
        let passed = outcomes.passed_by_all();
        match self {
            Self::Silent => Ok(()),
            Self::ToTerminal(bar) => {
                bar.set_position(passed);
                Ok(())
            }
            Self::ToLauncher { reported } => {
                // A report of a faulty peer may name an iteration that has been reported as passed.
                let new = passed.saturating_sub(*reported);
                *reported += new;
                (0..new).try_for_each(|_| output::to_stdout(PASSED))
            }
        }
    }

    /// Reports the result, and returns the verdict of this process.
    fn conclude(self, plan: &SoakPlan, outcomes: &Outcomes) -> Result<Verdict, Failure> {
        let verdict = Verdict::of(outcomes.reports.is_empty());
        match self {
            Self::Silent => return Ok(Verdict::Right),
            Self::ToTerminal(bar) => {
                bar.finish_and_clear();
                plan.print_failure(outcomes)?;
                plan.conclude(outcomes.passed_by_all(), outcomes.reports.len().min(1), Ok(()))?;
            }
            Self::ToLauncher { .. } if verdict == Verdict::Wrong => {
                plan.print_failure(outcomes)?;
                output::to_stdout(FAILED)?;
            }
            Self::ToLauncher { .. } => {}
        }
        Ok(verdict)
    }
}
