//! `verify --soak`: ranks that live through all iterations, each with another routing, mode and format.

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
use ep::rendezvous::{Rendezvous, TcpRendezvous};
use ep::{Config, Rank};
use ep_cuda::CudaBuffer;
use ep_host::HostBuffer;
use indicatif::ProgressBar;
use rayon::prelude::*;

use crate::Invocation;
use crate::args::VerifyArgs;
use crate::backend::{Chosen, Start};
use crate::bench::{self, Place};
use crate::failure::{Failure, Verdict};
use crate::launch::Job;
use crate::verify::run::{self, Report};
use crate::verify::{FAILED, PASSED, Tally, attend, cases, seed_for_ranks};
use crate::{output, units};

/// Iterations that are prepared at a time, on all cores; and after which processes tell each other how they fare.
const BATCH: u64 = 32;
/// Iterations that wait for a rank, at most: it runs ahead of the others as far as the operators let it.
const AHEAD: usize = 4;

/// A soak that can be run.
#[derive(Debug)]
struct Plan {
    soak: Soak,
    iterations: u64,
    backend: Chosen,
    config: Config,
    seed: u64,
    processes: bool,
    /// What people type before options.
    program: String,
}

/// What all ranks say, so far.
#[derive(Debug, PartialEq, Eq)]
struct Course {
    /// Iterations that each rank has passed.
    passed: Vec<u64>,
    /// What was wrong, with its iteration.
    reports: Vec<(u64, Report)>,
}

/// What a rank that is a thread says of one iteration.
struct Word {
    rank: usize,
    number: u64,
    report: Option<Report>,
}

pub(super) fn main(
    args: &VerifyArgs,
    iterations: u64,
    place: Place,
    invocation: &Invocation,
) -> Result<Verdict, Failure> {
    let plan = Plan::resolve(args, iterations, &place, &invocation.name)?;
    match place {
        Place::Threads => {
            output::to_stdout(&plan.announcement("threads"))?;
            let bar = plan.progress();
            let course = match plan.backend {
                Chosen::Host => on_threads::<HostBuffer>(&plan, &bar),
                Chosen::Cuda => on_threads::<CudaBuffer>(&plan, &bar),
            };
            bar.finish_and_clear();
            let course = course?;
            plan.complain(&course)?;
            plan.conclude(course.passed_by_all(), course.reports.len().min(1), Ok(()))
        }
        Place::Launcher => {
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
        Place::Rank(env) => match plan.backend {
            Chosen::Host => as_one_rank::<HostBuffer>(&plan, &env, args.tuning.launched),
            Chosen::Cuda => as_one_rank::<CudaBuffer>(&plan, &env, args.tuning.launched),
        },
    }
}

impl Plan {
    fn resolve(args: &VerifyArgs, iterations: u64, place: &Place, program: &str) -> Result<Self, Failure> {
        cases::check_limits(args)?;
        bench::check_domains(args.backend, args.domains)?;
        let ranks = bench::ranks(args.ranks, place)?;
        let backend = cases::backend(args)?;
        let two = backend == Chosen::Host && ranks.is_multiple_of(2);
        let domains = args.domains.unwrap_or(if two { 2 } else { 1 });
        let seed = args.seed.unwrap_or_else(cases::new_seed);
        let soak = Soak::new(seed, ranks, domains)
            .map_err(|error| Failure::request(format!("--ranks, --domains: {error}")))?;
        let config = bench::config(&args.tuning)?;
        let (processes, program) = (args.processes, program.to_owned());
        Ok(Self { soak, iterations, backend, config, seed, processes, program })
    }

    /// Said first, so that a run that never ends can be repeated too.
    fn announcement(&self, kind: &str) -> String {
        let (world, backend) = (self.soak.world(), self.backend.name());
        format!(
            "soaking the {backend} backend, ranks as {kind}: {} of {} in {} with {}, seed {}",
            units::counted(self.iterations as usize, "iteration"),
            units::counted(world.ranks(), "rank"),
            units::counted(world.topology.domains(), "domain"),
            units::counted(world.experts(), "expert"),
            self.seed
        )
    }

    fn progress(&self) -> ProgressBar {
        let bar = output::progress(self.iterations);
        bar.set_message("soaking");
        bar
    }

    /// Says what was wrong, and how to see it again.
    fn complain(&self, course: &Course) -> Result<(), Failure> {
        let Some((number, message)) = course.most_telling() else { return Ok(()) };
        let replay = self.replay(number);
        output::to_stderr(&format!("FAILED: iteration {number}\n  {message}\n  replay: {replay}"))
    }

    /// The command line that comes to an iteration again: what it finds may follow from those before it.
    fn replay(&self, number: u64) -> String {
        let Self { program, seed, .. } = self;
        let backend = if self.backend == Chosen::Cuda { " --backend cuda" } else { "" };
        let form = if self.processes { " --processes" } else { "" };
        let (ranks, domains) = (self.soak.world().ranks(), self.soak.world().topology.domains());
        let world = format!("--ranks {ranks} --domains {domains}");
        format!("{program} verify{backend} --soak {} --seed {seed} {world}{form}", number + 1)
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

    /// The next iterations, on all cores.
    fn prepare(&self, numbers: Range<u64>) -> Result<Vec<Arc<Iteration>>, Failure> {
        let numbers: Vec<u64> = numbers.collect();
        let prepared: ep::Result<_> =
            numbers.into_par_iter().map(|number| self.soak.prepare(number).map(Arc::new)).collect();
        Ok(prepared?)
    }

    /// Batch by batch, as long as anybody takes them: nobody does any more when something was wrong.
    fn prepare_all(&self, queue: &SyncSender<Result<Vec<Arc<Iteration>>, Failure>>) {
        self.batches().take_while(|batch| queue.send(self.prepare(batch.clone())).is_ok()).for_each(drop);
    }

    /// The batches of all iterations.
    fn batches(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let end = self.iterations;
        (0..end).step_by(BATCH as usize).map(move |begin| begin..end.min(begin + BATCH))
    }
}

impl Course {
    fn new(ranks: usize) -> Self {
        Self { passed: vec![0; ranks], reports: Vec::new() }
    }

    fn hear(&mut self, word: Word) {
        match word.report {
            None => self.passed[word.rank] += 1,
            Some(report) => self.reports.push((word.number, report)),
        }
    }

    /// Iterations before the first that a rank did not pass, or has not come to.
    fn passed_by_all(&self) -> u64 {
        let first_wrong = self.reports.iter().map(|(number, _)| *number);
        self.passed.iter().copied().chain(first_wrong).min().unwrap_or(0)
    }

    /// The first iteration that anybody has a cause to name for; else the first that anybody lost a peer in.
    fn most_telling(&self) -> Option<(u64, &str)> {
        let key = |(number, report): &&(u64, Report)| (report.weight, Reverse(*number));
        let (number, report) = self.reports.iter().rev().max_by_key(key)?;
        Some((*number, report.message()))
    }
}

/// Ranks as threads. They are given iterations until one of them finds something wrong.
fn on_threads<B: Start>(plan: &Plan, bar: &ProgressBar) -> Result<Course, Failure> {
    let buffers = B::threads(plan.soak.world(), &plan.config)?;
    let mut course = Course::new(buffers.len());
    std::thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        let mut queues = Vec::with_capacity(buffers.len());
        for (rank, buffer) in buffers.into_iter().enumerate() {
            let (queue, iterations) = mpsc::sync_channel(AHEAD);
            let tell = tell.clone();
            scope.spawn(move || live(rank, buffer, &iterations, &tell));
            queues.push(queue);
        }
        drop(tell);
        'soak: for batch in plan.batches() {
            for iteration in plan.prepare(batch)? {
                for queue in &queues {
                    // A rank that has ended takes no more: its last word says why.
                    if queue.send(Arc::clone(&iteration)).is_err() {
                        break 'soak;
                    }
                }
            }
            told.try_iter().for_each(|word| course.hear(word));
            bar.set_position(course.passed_by_all());
            if !course.reports.is_empty() {
                break;
            }
        }
        // Without more to come the ranks end, and with them what they say.
        drop(queues);
        told.iter().for_each(|word| course.hear(word));
        Ok(course)
    })
}

/// One rank's life as a thread.
fn live<B: Start>(rank: usize, mut buffer: B, iterations: &Receiver<Arc<Iteration>>, tell: &Sender<Word>) {
    let mut soaking = Soaking::default();
    for iteration in iterations {
        let report = run::guarded(iteration.case(), || soaking.check(&mut buffer, &iteration));
        let ended = report.as_ref().is_some_and(|report| report.ended);
        // The listener outlives all ranks.
        let _ = tell.send(Word { rank, number: iteration.number(), report });
        if ended {
            return;
        }
    }
}

/// This process as one rank. After every batch all learn from all whether to go on.
fn as_one_rank<B: Start>(plan: &Plan, env: &LaunchEnv, launched: bool) -> Result<Verdict, Failure> {
    let mut speaker = match (env.rank, launched) {
        (0, true) => Speaker::ToLauncher { told: 0 },
        (0, false) => Speaker::ToPeople(plan.progress()),
        _ => Speaker::Silent,
    };
    if let Speaker::ToPeople(_) = speaker {
        output::to_stdout(&plan.announcement("processes"))?;
    }
    let mut meet =
        TcpRendezvous::join(&env.store, Rank(env.rank), env.world_size as usize, plan.config.timeout)?;
    let buffer = B::join(plan.soak.world(), &mut meet, &plan.config)?;
    std::thread::scope(|scope| {
        let (queue, batches) = mpsc::sync_channel(1);
        scope.spawn(move || plan.prepare_all(&queue));
        let course = live_as_process(buffer, &mut meet, batches, &mut speaker)?;
        speaker.conclude(plan, &course)
    })
}

/// One rank's life as a process.
fn live_as_process<B: Start>(
    buffer: B,
    meet: &mut dyn Rendezvous,
    batches: Receiver<Result<Vec<Arc<Iteration>>, Failure>>,
    speaker: &mut Speaker,
) -> Result<Course, Failure> {
    let (mut buffer, mut soaking) = (Some(buffer), Soaking::default());
    let mut course = Course::new(1);
    for batch in batches {
        let batch = batch?;
        let mut first = None;
        for iteration in &batch {
            let Some(alive) = &mut buffer else { break };
            let report = run::guarded(iteration.case(), || soaking.check(alive, iteration));
            if report.as_ref().is_some_and(|report| report.ended) {
                // Before the exchange: peers that still wait for this rank in an operator then know that it failed.
                buffer = None;
            }
            first = first.or(report.map(|report| (iteration.number(), report)));
        }
        course.reports = exchange(meet, first.as_ref())?;
        course.passed[0] += batch.len() as u64;
        speaker.tell(&course)?;
        if !course.reports.is_empty() {
            break;
        }
    }
    Ok(course)
}

/// Gives what this rank has to say to all ranks, and takes what they say.
fn exchange(meet: &mut dyn Rendezvous, mine: Option<&(u64, Report)>) -> Result<Vec<(u64, Report)>, Failure> {
    let blob = mine.map_or_else(Vec::new, |(number, report)| {
        [&number.to_le_bytes()[..], &Report::to_bytes(Some(report))].concat()
    });
    let read = |blob: &Vec<u8>| {
        let (&number, report) = blob.split_first_chunk()?;
        Some((u64::from_le_bytes(number), Report::from_bytes(report)?))
    };
    Ok(meet.all_gather(&blob)?.iter().filter_map(read).collect())
}

/// To whom a rank that is a process speaks.
enum Speaker {
    Silent,
    ToPeople(ProgressBar),
    /// In lines, one for each iteration.
    ToLauncher {
        told: u64,
    },
}

impl Speaker {
    /// Says how far all ranks are.
    fn tell(&mut self, course: &Course) -> Result<(), Failure> {
        let passed = course.passed_by_all();
        match self {
            Self::Silent => Ok(()),
            Self::ToPeople(bar) => {
                bar.set_position(passed);
                Ok(())
            }
            Self::ToLauncher { told } => {
                let new = passed - std::mem::replace(told, passed);
                (0..new).try_for_each(|_| output::to_stdout(PASSED))
            }
        }
    }

    /// Says what came of it; the verdict that the process ends with.
    fn conclude(self, plan: &Plan, course: &Course) -> Result<Verdict, Failure> {
        let verdict = Verdict::of(course.reports.is_empty());
        match self {
            Self::Silent => return Ok(Verdict::Right),
            Self::ToPeople(bar) => {
                bar.finish_and_clear();
                plan.complain(course)?;
                plan.conclude(course.passed_by_all(), course.reports.len().min(1), Ok(()))?;
            }
            Self::ToLauncher { .. } if verdict == Verdict::Wrong => {
                plan.complain(course)?;
                output::to_stdout(FAILED)?;
            }
            Self::ToLauncher { .. } => {}
        }
        Ok(verdict)
    }
}
