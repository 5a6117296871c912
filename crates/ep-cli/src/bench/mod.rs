//! `hybrid-ep bench`: times the operators, sets them against the machine's own ceiling, and checks the outcome.
//!
//! [`plan`] resolves what was asked; [`run`] is what every rank does, with [`stage`] and, for each backend, [`inspect`];
//! [`report`] makes sense of what all ranks say.

mod chart;
mod check;
mod definitions;
mod floor;
mod footprint;
mod gpu;
mod inspect;
mod measure;
mod plan;
mod report;
mod run;
mod stage;
mod table;
mod tokens;

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use ep::Rank;
use ep::config::LaunchEnv;
use ep::rendezvous::{TcpRendezvous, ThreadRendezvous};
use ep_cuda::CudaBuffer;
use ep_host::HostBuffer;
use indicatif::ProgressBar;

use crate::Invocation;
use crate::args::BenchArgs;
use crate::backend::Chosen;
use crate::bench::inspect::Inspect;
use crate::bench::plan::{Plan, WARM_UP};
use crate::bench::report::Report;
use crate::bench::run::{RankReport, Shared};
use crate::failure::{Failure, Verdict};
use crate::output::JsonTarget;
use crate::{launch, output};

pub(crate) use crate::bench::plan::{MAX_RANKS, Place, check_domains, config, ranks};

/// How long the first failure of a thread waits for the one that caused it.
const GRACE: Duration = Duration::from_millis(300);
/// Threads wait for each other without a limit of their own: the first failure ends the process.
const THREADS_MEET: Duration = Duration::from_secs(86_400);

pub(crate) fn main(args: &BenchArgs, invocation: &Invocation) -> Result<Verdict, Failure> {
    if args.tuning.launched {
        launch::end_with_launcher();
    }
    let plan = Arc::new(Plan::resolve(args)?);
    match plan.backend {
        Chosen::Host => run_on::<HostBuffer>(&plan, invocation),
        Chosen::Cuda => run_on::<CudaBuffer>(&plan, invocation),
    }
}

fn run_on<B: Inspect>(plan: &Arc<Plan>, invocation: &Invocation) -> Result<Verdict, Failure> {
    match &plan.place {
        Place::Launcher => launch::run(invocation, plan.ranks(), plan.config.timeout),
        Place::Threads => conclude(plan, |bar| {
            (0..plan.scenarios.len()).map(|scenario| on_threads::<B>(plan, scenario, bar)).collect()
        }),
        Place::Rank(env) if env.rank == 0 => conclude(plan, |bar| as_one_rank::<B>(plan, env, bar)),
        // All ranks know all reports; one speaks.
        Place::Rank(env) => as_one_rank::<B>(plan, env, &ProgressBar::hidden()).map(|_| Verdict::Right),
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
        Report::new(plan, &scenarios)
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
fn on_threads<B: Inspect>(
    plan: &Arc<Plan>,
    scenario: usize,
    bar: &ProgressBar,
) -> Result<Vec<RankReport>, Failure> {
    let shared = Arc::new(Shared::new(Arc::clone(plan), scenario));
    let buffers = B::threads(&plan.world, &plan.config)?;
    let (sender, outcomes) = mpsc::channel();
    for (mut buffer, mut meet) in buffers.into_iter().zip(ThreadRendezvous::new(plan.ranks(), THREADS_MEET)) {
        let rank = buffer.rank();
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
fn as_one_rank<B: Inspect>(
    plan: &Arc<Plan>,
    env: &LaunchEnv,
    bar: &ProgressBar,
) -> Result<Vec<Vec<RankReport>>, Failure> {
    let mut meet = TcpRendezvous::join(&env.store, Rank(env.rank), plan.ranks(), plan.config.timeout)?;
    let mut buffer = B::join(&plan.world, &mut meet, &plan.config)?;
    (0..plan.scenarios.len())
        .map(|scenario| run::rank(&mut buffer, &mut meet, &Shared::new(Arc::clone(plan), scenario), bar))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::measure::Operator;
    use crate::units;

    /// What is timed on GPUs, run on the host backend: the order of calls, what they leave, and what is said of it.
    #[test]
    fn the_operators_of_gpus_are_right_on_the_host_too() {
        for options in [
            "--tokens 33",
            "--tokens 33 --dtype fp8 --skew 1",
            "--tokens 33,0,7,2 --dtype fp8-given",
            "--tokens 33 --ranks 1",
            "--tokens 0,9,40,0 --pad 1",
        ] {
            let options = format!("--domains 1 --hidden 128 --experts 8 --topk 3 --iters 2 {options}");
            let plan = Arc::new(Plan { backend: Chosen::Cuda, ..plan::tests::plan(&options) });
            let ranks = on_threads::<HostBuffer>(&plan, 0, &ProgressBar::hidden()).unwrap();
            let report = Report::new(&plan, &[ranks]);
            let run = &report.runs[0];
            assert!(report.verified, "{options}: {}", run.verification);
            let rows: u64 = run.load.rows_per_rank.iter().sum();
            let bounded = format!("so do the {} rows of a non-blocking dispatch", units::count(rows));
            assert!(run.verification.contains(&bounded), "{options}: {}", run.verification);
            let names: Vec<&str> = run.operators.iter().map(|operator| operator.operator).collect();
            assert_eq!(names, Operator::all(Chosen::Cuda).iter().map(|o| o.name()).collect::<Vec<_>>());
            let text = table::render(&report);
            for part in
                ["non-blocking", "combine + probs", "busiest rank", "340 GB/s", "in a dispatch a rank"]
            {
                assert!(text.contains(part), "no `{part}` in\n{text}");
            }
        }
    }

    #[test]
    fn a_layers_floor_is_the_sum_of_its_operators() {
        let plan = plan::tests::plan("--domains 1 --tokens 20 --hidden 64 --experts 8 --topk 3 --iters 3");
        let plan = Arc::new(Plan { backend: Chosen::Cuda, wire: Some(2.0), ..plan });
        let ranks = on_threads::<HostBuffer>(&plan, 0, &ProgressBar::hidden()).unwrap();
        let report = Report::new(&plan, &[ranks]);
        let floor = |operator: Operator| {
            let find = |o: &&report::OperatorReport| o.operator == operator.name();
            report.runs[0].operators.iter().find(find).unwrap().floor_us
        };
        assert_eq!(floor(Operator::Preprocess), None);
        let [dispatch, combine, layer] = [Operator::Dispatch, Operator::Combine, Operator::Layers]
            .map(|operator| floor(operator).unwrap());
        assert!(dispatch > 0.0 && (layer - 2.0 * (dispatch + combine)).abs() < 0.01, "{layer}");
        assert!(report.floor_definition.contains("at 2 GB/s (--wire)"), "{}", report.floor_definition);
    }
    #[test]
    fn gpus_are_named_and_ranks_that_share_one_are_told_of() {
        let plan = plan::tests::plan("--domains 1 --tokens 20 --hidden 64 --experts 8 --topk 3 --iters 1");
        let plan = Arc::new(Plan { backend: Chosen::Cuda, ..plan });
        let mut ranks = on_threads::<HostBuffer>(&plan, 0, &ProgressBar::hidden()).unwrap();
        let mut text = |name: &str, gpus: usize| {
            for (rank, report) in ranks.iter_mut().enumerate() {
                let pci_bus_id = format!("0000:{:02x}:00.0", rank % gpus);
                let registered_bytes = 1_000_000_000 + rank as u64;
                report.gpu = Some(gpu::Gpu { name: name.into(), pci_bus_id, sms: 16, registered_bytes });
            }
            table::render(&Report::new(&plan, &[ranks.clone()]))
        };
        let own = text("NVIDIA H200", 4);
        assert!(
            own.contains("\n4 GPUs (NVIDIA H200), 16 SMs and up to 1.00 GB of registered memory a rank\n"),
            "{own}"
        );
        assert!(own.contains("340 GB/s") && !own.contains("note: "), "{own}");
        let shared = text("NVIDIA H200", 2);
        assert!(shared.contains("\n2 GPUs (NVIDIA H200)") && shared.contains("\nno floor: "), "{shared}");
        assert!(shared.contains("\nnote: several ranks share a GPU"), "{shared}");
        let unknown = text("NVIDIA A100-SXM4-80GB", 4);
        assert!(unknown.contains("has not been measured; with --wire"), "{unknown}");
    }
}
