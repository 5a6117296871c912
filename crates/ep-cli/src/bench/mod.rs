//! `hybrid-ep bench`: times the operators, sets them against the machine's own ceiling, and checks the outcome.
//!
//! [`plan`] resolves what was asked; [`run`] is what every rank does; [`report`] makes sense of what all ranks say.

mod chart;
mod check;
mod footprint;
mod measure;
mod plan;
mod report;
mod run;
mod table;
mod tokens;

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use ep::Rank;
use ep::config::LaunchEnv;
use ep::rendezvous::{TcpRendezvous, ThreadRendezvous};
use ep_host::HostBuffer;
use indicatif::ProgressBar;

use crate::args::BenchArgs;
use crate::bench::plan::{Plan, WARM_UP};
use crate::bench::report::Report;
use crate::bench::run::{RankReport, Shared};
use crate::ceiling::Ceiling;
use crate::failure::{Failure, Verdict};
use crate::output::JsonTarget;
use crate::{launch, output};

pub(crate) use crate::bench::plan::{MAX_RANKS, Place, config};

/// How long the first failure of a thread waits for the one that caused it.
const GRACE: Duration = Duration::from_millis(300);
/// Threads wait for each other without a limit of their own: the first failure ends the process.
const THREADS_MEET: Duration = Duration::from_secs(86_400);

pub(crate) fn main(args: &BenchArgs) -> Result<Verdict, Failure> {
    if args.tuning.launched {
        launch::end_with_launcher();
    }
    let plan = Arc::new(Plan::resolve(args)?);
    match &plan.place {
        Place::Launcher => launch::run(plan.ranks(), plan.config.timeout),
        Place::Threads => conclude(&plan, |bar| {
            (0..plan.scenarios.len()).map(|scenario| on_threads(&plan, scenario, bar)).collect()
        }),
        Place::Rank(env) if env.rank == 0 => conclude(&plan, |bar| as_one_rank(&plan, env, bar)),
        // All ranks know all reports; one speaks.
        Place::Rank(env) => as_one_rank(&plan, env, &ProgressBar::hidden()).map(|_| Verdict::Right),
    }
}

/// Measures under a progress bar, and reports.
fn conclude(
    plan: &Plan,
    measure: impl FnOnce(&ProgressBar) -> Result<Vec<Vec<RankReport>>, Failure>,
) -> Result<Verdict, Failure> {
    let bar = progress(plan);
    let measured = measure(&bar).map(|scenarios| {
        bar.set_message("measuring the ceiling");
        Report::new(plan, &scenarios, Ceiling::measure())
    });
    // Whatever is printed next, an error too, begins a line of its own.
    bar.finish_and_clear();
    let report = measured?;
    let table = table::render(&report);
    match &plan.json {
        JsonTarget::Stdout => output::to_stderr(&table)?,
        _ => output::to_stdout(&table)?,
    }
    plan.json.write(&output::to_json(&report)?)?;
    Ok(Verdict::of(report.verified))
}

fn progress(plan: &Plan) -> ProgressBar {
    let bar = output::progress((plan.scenarios.len() * (WARM_UP + plan.iterations)) as u64);
    bar.set_message("measuring");
    bar
}

/// Ranks as threads; every rank's report.
fn on_threads(plan: &Arc<Plan>, scenario: usize, bar: &ProgressBar) -> Result<Vec<RankReport>, Failure> {
    let shared = Arc::new(Shared::new(Arc::clone(plan), scenario));
    let buffers = HostBuffer::threads(plan.world.clone(), &plan.config)?;
    let (sender, outcomes) = mpsc::channel();
    for (mut buffer, mut meet) in buffers.into_iter().zip(ThreadRendezvous::new(plan.ranks(), THREADS_MEET)) {
        let rank = ep::Backend::rank(&buffer);
        let (shared, sender) = (Arc::clone(&shared), sender.clone());
        let bar = if rank == Rank(0) { bar.clone() } else { ProgressBar::hidden() };
        let body = move || {
            let work = AssertUnwindSafe(|| run::rank(&mut buffer, &mut meet, &shared, &bar));
            // The panic's message is on stderr already.
            let outcome = std::panic::catch_unwind(work)
                .unwrap_or_else(|_| Err(Failure::request(format!("rank {rank} panicked"))));
            drop(buffer);
            // Nobody listens any more when another rank has failed.
            let _ = sender.send(outcome);
        };
        std::thread::Builder::new()
            .name(format!("rank {rank}"))
            .spawn(body)
            .map_err(|error| Failure::request(format!("starting the thread of rank {rank}: {error}")))?;
    }
    drop(sender);
    let mut reports = Vec::new();
    for outcome in &outcomes {
        match outcome {
            Ok(all) => reports = all,
            // The caller ends the process, and with it the threads that wait for this one.
            Err(failure) => return Err(root_cause(failure, &outcomes)),
        }
    }
    Ok(reports)
}

/// Of the failures that come shortly after the first, one that is not about a peer: it made the others fail.
fn root_cause(first: Failure, outcomes: &mpsc::Receiver<Result<Vec<RankReport>, Failure>>) -> Failure {
    let about_a_peer = |failure: &Failure| matches!(failure, Failure::Library(ep::Error::Peer(_)));
    let mut cause = first;
    while about_a_peer(&cause) {
        match outcomes.recv_timeout(GRACE) {
            Ok(Err(failure)) if !about_a_peer(&failure) => cause = failure,
            Ok(_) => {}
            Err(_) => break,
        }
    }
    cause
}

/// This process as one rank; every rank's report of every scenario.
fn as_one_rank(
    plan: &Arc<Plan>,
    env: &LaunchEnv,
    bar: &ProgressBar,
) -> Result<Vec<Vec<RankReport>>, Failure> {
    let mut meet = TcpRendezvous::join(&env.store, Rank(env.rank), plan.ranks(), plan.config.timeout)?;
    let mut buffer = HostBuffer::join(plan.world.clone(), &mut meet, &plan.config)?;
    (0..plan.scenarios.len())
        .map(|scenario| run::rank(&mut buffer, &mut meet, &Shared::new(Arc::clone(plan), scenario), bar))
        .collect()
}
