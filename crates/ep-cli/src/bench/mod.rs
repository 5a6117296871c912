//! `hybrid-ep bench`: times the operators, compares the times with the machine's floor, and checks the results.
//!
//! [`plan`] turns the options into a benchmark. [`run`] is the part of each rank, on a [`stage`] that holds its
//! buffers; [`inspect`] adds to each backend what a benchmark needs. [`report`] combines the samples of all ranks.

mod args;
mod busy;
mod ceiling;
mod chart;
mod check;
mod clock;
mod cuda;
mod definitions;
mod floor;
mod footprint;
mod gpu;
mod measure;
mod plan;
mod report;
mod routed;
mod run;
mod shared;
mod stage;
mod stream;
mod table;
mod tokens;

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use ep::Rank;
use ep::config::LaunchEnv;
use ep::join::{TcpRendezvous, ThreadRendezvous};
use ep_cuda::CudaBuffer;
use ep_host::HostBuffer;
use indicatif::ProgressBar;

pub(crate) use crate::bench::args::BenchArgs;
use crate::bench::busy::Watch;
use crate::bench::clock::Timed;
use crate::bench::plan::{BenchPlan, WARM_UP};
use crate::bench::report::{BenchReport, MachineState};
use crate::bench::run::RankReport;
use crate::bench::shared::Shared;
use crate::common::backend::BackendKind;
use crate::common::failure::{Failure, Verdict};
use crate::common::invocation::Invocation;
use crate::common::output::Checked;
use crate::common::role::ProcessRole;
use crate::common::{launch, output};

/// How long a rank's `PeerFault` waits for another rank's error, which may be its cause.
const GRACE: Duration = Duration::from_millis(300);
/// Bound of the barrier between rank threads. It is never reached: the first failure ends the process.
const THREAD_BARRIER: Duration = Duration::from_secs(86_400);

pub(crate) fn main(args: &BenchArgs, invocation: &Invocation) -> Result<Verdict, Failure> {
    if args.tuning.launched {
        launch::end_with_launcher();
    }
    let plan = Arc::new(BenchPlan::resolve(args)?);
    // A launcher has checked the footprint already, before its ranks took their memory.
    if !args.tuning.launched {
        footprint::check(&plan)?;
    }
    match plan.backend {
        BackendKind::Host => run_on::<HostBuffer>(&plan, invocation),
        BackendKind::Cuda => run_on::<CudaBuffer>(&plan, invocation),
    }
}

fn run_on<B: Timed>(plan: &Arc<BenchPlan>, invocation: &Invocation) -> Result<Verdict, Failure> {
    match &plan.role {
        ProcessRole::Launcher => launch::run(invocation, plan.ranks(), &plan.config),
        ProcessRole::Threads => conclude(plan, |bar| {
            (0..plan.scenarios.len()).map(|scenario| on_threads::<B>(plan, scenario, bar)).collect()
        }),
        ProcessRole::Rank(env) if env.rank == 0 => conclude(plan, |bar| as_one_rank::<B>(plan, env, bar)),
        // Every rank receives all reports; only rank 0 prints.
        ProcessRole::Rank(env) => as_one_rank::<B>(plan, env, &ProgressBar::hidden()).map(|_| Verdict::Right),
    }
}

/// Measures with a progress bar, then prints and writes the report.
fn conclude(
    plan: &BenchPlan,
    measure: impl FnOnce(&ProgressBar) -> Result<Vec<Vec<RankReport>>, Failure>,
) -> Result<Verdict, Failure> {
    let bar = progress(plan);
    bar.set_message("measuring the ceiling");
    let mut around = MachineState::default();
    around.memory = (plan.backend == BackendKind::Host).then(|| around.measure(plan));
    bar.set_message("measuring");
    let watch = Watch::start();
    let measured = measure(&bar).map(|scenarios| {
        around.busy = watch.stop(scenarios.iter().flatten().filter_map(|rank| rank.process));
        bar.set_message("measuring the ceiling");
        BenchReport::new(plan, &scenarios, &around)
    });
    // The next output, which may be an error, must begin on a line of its own.
    bar.finish_and_clear();
    let report = measured?;
    let json = Checked::json(&report)?;
    let names: Vec<&str> = report.names();
    output::print_beside(&Checked::text(table::render(&report), &names)?, &[&plan.json])?;
    plan.json.write(&json)?;
    Ok(Verdict::of(report.verified))
}

fn progress(plan: &BenchPlan) -> ProgressBar {
    output::progress((plan.scenarios.len() * (WARM_UP + plan.iterations)) as u64)
}

/// Runs one scenario with the ranks as threads. Returns the reports of all ranks.
fn on_threads<B: Timed>(
    plan: &Arc<BenchPlan>,
    scenario: usize,
    bar: &ProgressBar,
) -> Result<Vec<RankReport>, Failure> {
    let shared = Arc::new(Shared::new(Arc::clone(plan), scenario));
    let buffers = B::threads(&plan.world, &plan.config)?;
    let (sender, outcomes) = mpsc::channel();
    for (mut buffer, mut meet) in buffers.into_iter().zip(ThreadRendezvous::new(plan.ranks(), THREAD_BARRIER))
    {
        let rank = buffer.rank();
        let (shared, sender) = (Arc::clone(&shared), sender.clone());
        let bar = if rank == Rank(0) { bar.clone() } else { ProgressBar::hidden() };
        let body = move || {
            let work = AssertUnwindSafe(|| run::rank(&mut buffer, &mut meet, &shared, &bar));
            // The panic handler has printed the message to stderr.
            let outcome = std::panic::catch_unwind(work)
                .unwrap_or_else(|_| Err(Failure::request(format!("rank {rank} panicked"))));
            drop(buffer);
            // The receiver is gone if another rank has failed.
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
            // The caller ends the process, which also ends the threads that wait for the failed rank.
            Err(failure) => return Err(root_cause(failure, &outcomes)),
        }
    }
    Ok(reports)
}

/// Picks the cause among the failures within [`GRACE`]: the first that is not a peer error, since a rank's own error
/// makes its peers fail.
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

/// Runs all scenarios with this process as one rank. Returns the reports of all ranks, by scenario.
fn as_one_rank<B: Timed>(
    plan: &Arc<BenchPlan>,
    env: &LaunchEnv,
    bar: &ProgressBar,
) -> Result<Vec<Vec<RankReport>>, Failure> {
    let mut meet = TcpRendezvous::launched(env, &plan.config)?;
    launch::as_rank(&mut meet, |meet| {
        plan.job_options().check(meet)?;
        let mut buffer = B::join(&plan.world, meet, &plan.config)?;
        (0..plan.scenarios.len())
            .map(|scenario| run::rank(&mut buffer, meet, &Shared::new(Arc::clone(plan), scenario), bar))
            .collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::measure::Operator;
    use crate::common::units;

    /// Runs the operator sequence of the CUDA backend on the host backend: checks the order of calls, their results and
    /// the report.
    #[test]
    fn the_operator_sequence_for_gpus_gives_correct_results_on_the_host() {
        for options in [
            "--tokens 33",
            "--tokens 33 --dtype fp8 --skew 1",
            "--tokens 33,0,7,2 --dtype fp8-given",
            "--tokens 33 --ranks 1",
            "--tokens 0,9,40,0 --pad 1",
        ] {
            let options = format!("--domains 1 --hidden 128 --experts 8 --topk 3 --iters 2 {options}");
            let plan = Arc::new(BenchPlan { backend: BackendKind::Cuda, ..plan::tests::plan(&options) });
            let ranks = on_threads::<HostBuffer>(&plan, 0, &ProgressBar::hidden()).unwrap();
            let report = BenchReport::new(&plan, &[ranks], &MachineState::default());
            let run = &report.runs[0];
            assert!(report.verified, "{options}: {}", run.verification);
            let rows: u64 = run.load.rows_per_rank.iter().sum();
            let bounded = format!("so do the {} rows of a non-blocking dispatch", units::count(rows));
            assert!(run.verification.contains(&bounded), "{options}: {}", run.verification);
            let names: Vec<&str> = run.operators.iter().map(|operator| operator.operator).collect();
            assert_eq!(names, Operator::all(BackendKind::Cuda).iter().map(|o| o.name()).collect::<Vec<_>>());
            let text = table::render(&report);
            for part in
                ["non-blocking", "combine + probs", "busiest rank", "340 GB/s", "in a dispatch a rank"]
            {
                assert!(text.contains(part), "no `{part}` in\n{text}");
            }
        }
    }

    #[test]
    fn the_floor_of_a_layer_is_the_sum_of_its_operators() {
        let plan = plan::tests::plan("--domains 1 --tokens 20 --hidden 64 --experts 8 --topk 3 --iters 3");
        let plan = Arc::new(BenchPlan { backend: BackendKind::Cuda, wire: Some(2.0), ..plan });
        let ranks = on_threads::<HostBuffer>(&plan, 0, &ProgressBar::hidden()).unwrap();
        let report = BenchReport::new(&plan, &[ranks], &MachineState::default());
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
    fn the_report_names_the_gpus_and_notes_ranks_that_share_one() {
        let plan = plan::tests::plan("--domains 1 --tokens 20 --hidden 64 --experts 8 --topk 3 --iters 1");
        let plan = Arc::new(BenchPlan { backend: BackendKind::Cuda, ..plan });
        let mut ranks = on_threads::<HostBuffer>(&plan, 0, &ProgressBar::hidden()).unwrap();
        let mut text = |name: &str, gpus: usize| {
            for (rank, report) in ranks.iter_mut().enumerate() {
                let pci_bus_id = format!("0000:{:02x}:00.0", rank % gpus);
                let registered_bytes = 1_000_000_000 + rank as u64;
                report.gpu = Some(gpu::RankGpu { name: name.into(), pci_bus_id, sms: 16, registered_bytes });
            }
            table::render(&BenchReport::new(&plan, &[ranks.clone()], &MachineState::default()))
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
        assert!(unknown.contains("has not been measured; set it with --wire"), "{unknown}");
    }
}
