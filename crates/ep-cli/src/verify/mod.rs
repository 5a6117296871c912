//! `hybrid-ep verify`: compares a backend with the reference implementation, case by case.

mod args;
mod cases;
mod run;
mod soak;
mod tally;

use std::ffi::OsString;
use std::process::Stdio;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use ep::config::LaunchEnv;
use ep::join::TcpRendezvous;
use ep::{Config, Rank};
use ep_cuda::CudaBuffer;
use ep_host::HostBuffer;
use indicatif::ProgressBar;

use crate::common::agree::JobOptions;
use crate::common::backend::BackendKind;
use crate::common::failure::{Failure, Verdict};
use crate::common::invocation::Invocation;
use crate::common::launch::{self, Job};
use crate::common::role::ProcessRole;
use crate::common::{machine, output, threads};
pub(crate) use crate::verify::args::VerifyArgs;
use crate::verify::cases::{NumberedCase, Selection};
use crate::verify::run::Wrong;
use crate::verify::tally::{FAILED, PASSED, Tally, attend, seed_for_ranks};

pub(crate) fn main(args: &VerifyArgs, invocation: &Invocation) -> Result<Verdict, Failure> {
    if args.tuning.launched {
        launch::end_with_launcher();
    }
    let role = ProcessRole::resolve(args.processes)?;
    if let (ProcessRole::Rank(_), None, false) = (&role, args.seed, args.suite_only) {
        return Err(Failure::request(
            "--seed is missing; give every rank that a launcher starts the same --seed",
        ));
    }
    if let Some(iterations) = args.soak {
        return soak::main(args, iterations, role, invocation);
    }
    let config = args.tuning.config()?;
    let selection = Selection::resolve(args, cases::backend(args)?, &config, &invocation.name)?;
    match role {
        ProcessRole::Threads => {
            announce(&selection, "threads")?;
            let tally = Tally::default();
            let outcome = on_threads(&selection, &config, &tally);
            conclude(&selection, &tally, outcome)
        }
        ProcessRole::Launcher => {
            announce(&selection, "processes")?;
            let tally = Tally::default();
            let more = seed_for_ranks(args, selection.seed);
            let outcome = launch_all(&selection, &config, invocation, &more, &tally);
            conclude(&selection, &tally, outcome)
        }
        ProcessRole::Rank(env) => {
            let options = selection.job_options(args);
            as_one_rank(selection, &options, &config, &env, args.tuning.launched)
        }
    }
}

/// Prints backend, cases and seed before the run, so that a run that hangs can be repeated.
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
    let bar = output::progress(selection.len() as u64);
    bar.set_message("verifying");
    bar
}

/// Counts an outcome; for a failure also prints the reason and the command that repeats the case.
fn settle(selection: &Selection, case: &NumberedCase, wrong: &Wrong, tally: &Tally, bar: &ProgressBar) {
    tally.add(wrong.is_none());
    if let Some(wrong) = wrong {
        let text = format!("FAILED: {}\n  {wrong}\n  replay: {}", case.name(), selection.replay(case));
        // If stderr is closed, the counts and the exit code still report the failure.
        let _ = bar.suspend(|| output::to_stderr(&text));
    }
    bar.inc(1);
}

/// Runs all cases with ranks as threads, several cases at a time: other cases use the cores while one case is serial.
fn on_threads(selection: &Selection, config: &Config, tally: &Tally) -> Result<(), Failure> {
    let bar = progress(selection);
    // `None` after an error of the environment.
    let cases = Mutex::new(Some(selection.cases()));
    let first_error = Mutex::new(None);
    let work = || {
        loop {
            let next = || cases.lock().unwrap_or_else(|poison| poison.into_inner()).as_mut()?.next();
            let Some(case) = next() else { break };
            let outcome = match selection.backend {
                BackendKind::Host => run::on_threads::<HostBuffer>(&case, config),
                BackendKind::Cuda => run::on_threads::<CudaBuffer>(&case, config),
            };
            match outcome {
                Ok(wrong) => settle(selection, &case, &wrong, tally, &bar),
                Err(error) => {
                    // The machine cannot run this case, so the other cases are not tried.
                    *cases.lock().unwrap_or_else(|poison| poison.into_inner()) = None;
                    first_error.lock().unwrap_or_else(|poison| poison.into_inner()).get_or_insert(error);
                }
            }
        }
    };
    // On GPUs one case runs at a time: all ranks of a case must run at once, and they may share a GPU.
    let at_a_time = if selection.backend == BackendKind::Cuda { 1 } else { machine::cores().clamp(1, 8) };
    std::thread::scope(|scope| {
        for _ in 1..at_a_time {
            // Fewer threads suffice; the cases then take longer.
            if threads::spawn_scoped(scope, "a thread that runs cases", work).is_err() {
                break;
            }
        }
        work();
    });
    bar.finish_and_clear();
    first_error.into_inner().unwrap_or_else(|poison| poison.into_inner()).map_or(Ok(()), Err)
}

/// Starts one job for each number of ranks among the cases.
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

/// Runs the cases that need as many ranks as this job has, with this process as one of them.
fn as_one_rank(
    mut selection: Selection,
    options: &JobOptions,
    config: &Config,
    env: &LaunchEnv,
    launched: bool,
) -> Result<Verdict, Failure> {
    let (rank, ranks) = (Rank(env.rank), env.world_size as usize);
    let most = selection.world_sizes().last().copied().unwrap_or(0);
    selection.retain(ranks);
    if selection.len() == 0 {
        return Err(Failure::request(format!(
            "no selected case has {ranks} ranks, the number of ranks of this job, and the largest has {most}; select other \
             cases, for example random cases of up to {ranks} ranks with --ranks {ranks}"
        )));
    }
    let speaks = rank == Rank(0);
    let bar = if speaks && !launched { progress(&selection) } else { ProgressBar::hidden() };
    if speaks && !launched {
        announce(&selection, "processes")?;
    }
    let tally = Tally::default();
    let mut meet = TcpRendezvous::launched(env, config)?;
    launch::as_rank(&mut meet, |meet| {
        options.check(meet)?;
        for case in selection.cases() {
            let wrong = match selection.backend {
                BackendKind::Host => run::as_one_rank::<HostBuffer>(&case, meet, config)?,
                BackendKind::Cuda => run::as_one_rank::<CudaBuffer>(&case, meet, config)?,
            };
            if speaks {
                settle(&selection, &case, &wrong, &tally, &bar);
            }
            if speaks && launched {
                output::to_stdout(if wrong.is_none() { PASSED } else { FAILED })?;
            }
        }
        Ok(())
    })?;
    bar.finish_and_clear();
    match (speaks, launched) {
        (false, _) => Ok(Verdict::Right),
        (true, true) => Ok(Verdict::of(tally.failed.into_inner() == 0)),
        (true, false) => conclude(&selection, &tally, Ok(())),
    }
}
