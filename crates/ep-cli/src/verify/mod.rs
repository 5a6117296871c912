//! `hybrid-ep verify`: the backend against the operators' definition, case by case.

mod cases;
mod run;
mod soak;

use std::ffi::OsString;
use std::io::{BufRead as _, BufReader};
use std::process::{ChildStdout, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use ep::config::LaunchEnv;
use ep::rendezvous::TcpRendezvous;
use ep::{Config, Rank};
use ep_cuda::CudaBuffer;
use ep_host::HostBuffer;
use indicatif::ProgressBar;

use crate::Invocation;
use crate::args::VerifyArgs;
use crate::backend::Chosen;
use crate::bench::{self, Place};
use crate::failure::{Failure, Verdict};
use crate::launch::{self, Job};
use crate::verify::cases::{Numbered, Selection};
use crate::verify::run::Wrong;
use crate::{machine, output};

/// What rank 0 writes to its launcher for each case.
const PASSED: &str = "passed";
const FAILED: &str = "failed";

/// Outcomes so far.
#[derive(Debug, Default)]
struct Tally {
    passed: AtomicUsize,
    failed: AtomicUsize,
}

impl Tally {
    fn add(&self, passed: bool) {
        let counter = if passed { &self.passed } else { &self.failed };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

pub(crate) fn main(args: &VerifyArgs, invocation: &Invocation) -> Result<Verdict, Failure> {
    if args.tuning.launched {
        launch::end_with_launcher();
    }
    let place = Place::resolve(args.processes)?;
    if let (Place::Rank(_), None, false) = (&place, args.seed, args.suite_only) {
        return Err(Failure::request("ranks that a launcher started need --seed, the same on all of them"));
    }
    if let Some(iterations) = args.soak {
        return soak::main(args, iterations, place, invocation);
    }
    let selection = Selection::resolve(args, &invocation.name)?;
    let config = bench::config(&args.tuning)?;
    match place {
        Place::Threads => {
            announce(&selection, "threads")?;
            let tally = Tally::default();
            let outcome = on_threads(&selection, &config, &tally);
            conclude(&selection, &tally, outcome)
        }
        Place::Launcher => {
            announce(&selection, "processes")?;
            let tally = Tally::default();
            let more = seed_for_ranks(args, selection.seed);
            let outcome = launch_all(&selection, &config, invocation, &more, &tally);
            conclude(&selection, &tally, outcome)
        }
        Place::Rank(env) => as_one_rank(selection, &config, &env, args.tuning.launched),
    }
}

/// The seed that ranks must be given to draw the same: none where it is among their arguments already.
fn seed_for_ranks(args: &VerifyArgs, seed: u64) -> Vec<OsString> {
    if args.seed.is_some() { Vec::new() } else { vec!["--seed".into(), seed.to_string().into()] }
}

/// Said first, so that a run that never ends can be repeated too.
fn announce(selection: &Selection, kind: &str) -> Result<(), Failure> {
    let (backend, counts) = (selection.backend.name(), selection.counts());
    output::to_stdout(&format!("running on the {backend} backend, ranks as {kind}: {counts}"))
}

fn conclude(selection: &Selection, tally: &Tally, outcome: Result<(), Failure>) -> Result<Verdict, Failure> {
    let [passed, failed] = [&tally.passed, &tally.failed].map(|count| count.load(Ordering::Relaxed));
    output::to_stdout(&format!("{passed} passed, {failed} failed"))?;
    outcome?;
    if failed == 0 {
        output::to_stdout(&format!("verified: {}", selection.counts()))?;
    }
    Ok(Verdict::of(failed == 0))
}

fn progress(selection: &Selection) -> ProgressBar {
    let bar = output::progress(selection.cases.len() as u64);
    bar.set_message("verifying");
    bar
}

/// Counts an outcome, and says what was wrong and how to see it again.
fn settle(selection: &Selection, case: &Numbered, wrong: &Wrong, tally: &Tally, bar: &ProgressBar) {
    tally.add(wrong.is_none());
    if let Some(wrong) = wrong {
        let text = format!("FAILED: {}\n  {wrong}\n  replay: {}", case.name(), selection.replay(case));
        // Where stderr is gone, the counts and the exit code still tell.
        let _ = bar.suspend(|| output::to_stderr(&text));
    }
    bar.inc(1);
}

/// All cases, several at a time: a case has serial stretches, which another's ranks fill.
fn on_threads(selection: &Selection, config: &Config, tally: &Tally) -> Result<(), Failure> {
    let bar = progress(selection);
    let next = AtomicUsize::new(0);
    let first_error = Mutex::new(None);
    let work = || {
        while let Some(case) = selection.cases.get(next.fetch_add(1, Ordering::Relaxed)) {
            let outcome = match selection.backend {
                Chosen::Host => run::on_threads::<HostBuffer>(case, config),
                Chosen::Cuda => run::on_threads::<CudaBuffer>(case, config),
            };
            match outcome {
                Ok(wrong) => settle(selection, case, &wrong, tally, &bar),
                Err(error) => {
                    // The machine does not allow it: the other cases are not tried.
                    next.store(selection.cases.len(), Ordering::Relaxed);
                    first_error.lock().unwrap_or_else(|poison| poison.into_inner()).get_or_insert(error);
                }
            }
        }
    };
    // Ranks of several cases on one GPU would have to run at once too.
    let at_a_time = if selection.backend == Chosen::Cuda { 1 } else { machine::cores().clamp(1, 8) };
    std::thread::scope(|scope| {
        for _ in 1..at_a_time {
            scope.spawn(work);
        }
        work();
    });
    bar.finish_and_clear();
    first_error.into_inner().unwrap_or_else(|poison| poison.into_inner()).map_or(Ok(()), Err)
}

/// One set of processes for each number of ranks that the cases need.
fn launch_all(
    selection: &Selection,
    config: &Config,
    invocation: &Invocation,
    more: &[OsString],
    tally: &Tally,
) -> Result<(), Failure> {
    let bar = progress(selection);
    let outcome = selection.world_sizes().into_iter().try_for_each(|ranks| {
        let job = Job::start(invocation, ranks, more, Stdio::piped())?;
        attend(job, config, tally, &bar)
    });
    bar.finish_and_clear();
    outcome
}

/// Counts what a job's rank 0 tells, until all ranks have ended.
fn attend(mut job: Job, config: &Config, tally: &Tally, bar: &ProgressBar) -> Result<(), Failure> {
    let told = job.stdout();
    // Read beside the waiting, which ends ranks that hang.
    std::thread::scope(|scope| {
        scope.spawn(|| told.map(|told| listen(told, tally, bar)));
        // What is wrong is counted; the verdict on it all comes from the counts.
        job.wait(config.timeout).map(|_| ())
    })
}

/// Counts what rank 0 tells, to its end.
fn listen(told: ChildStdout, tally: &Tally, bar: &ProgressBar) {
    for line in BufReader::new(told).lines().map_while(Result::ok) {
        tally.add(line == PASSED);
        bar.inc(1);
    }
}

/// The cases for as many ranks as this job has.
fn as_one_rank(
    mut selection: Selection,
    config: &Config,
    env: &LaunchEnv,
    launched: bool,
) -> Result<Verdict, Failure> {
    let (rank, ranks) = (Rank(env.rank), env.world_size as usize);
    selection.cases.retain(|case| case.case.ranks == ranks);
    let speaks = rank == Rank(0);
    let bar = if speaks && !launched { progress(&selection) } else { ProgressBar::hidden() };
    if speaks && !launched {
        announce(&selection, "processes")?;
    }
    let tally = Tally::default();
    let mut meet = TcpRendezvous::join(&env.store, rank, ranks, config.timeout)?;
    for case in &selection.cases {
        let wrong = match selection.backend {
            Chosen::Host => run::as_one_rank::<HostBuffer>(case, &mut meet, config)?,
            Chosen::Cuda => run::as_one_rank::<CudaBuffer>(case, &mut meet, config)?,
        };
        if speaks {
            settle(&selection, case, &wrong, &tally, &bar);
        }
        if speaks && launched {
            output::to_stdout(if wrong.is_none() { PASSED } else { FAILED })?;
        }
    }
    bar.finish_and_clear();
    match (speaks, launched) {
        (false, _) => Ok(Verdict::Right),
        (true, true) => Ok(Verdict::of(tally.failed.into_inner() == 0)),
        (true, false) => conclude(&selection, &tally, Ok(())),
    }
}
