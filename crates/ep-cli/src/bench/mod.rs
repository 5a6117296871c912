//! `hybrid-ep bench`: times the operators, compares the times with the machine's floor, and checks the results.
//!
//! [`plan`] turns the options into a benchmark. [`run`] is what each rank does for each [`scenario`], on a [`stage`] that
//! holds its buffers; [`clock`] adds to each backend what a benchmark needs. [`report`] combines the samples of all
//! ranks.

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
mod heading;
mod measure;
mod plan;
mod report;
mod routed;
mod run;
mod runs;
mod scenario;
mod shared;
mod stage;
mod stream;
mod summary;
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
use crate::bench::ceiling::MemoryRates;
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
use crate::common::{launch, output, threads};

/// How long [`root_cause`] waits, after a rank's peer error, for another rank's error that may be the cause.
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
    if plan.backend == BackendKind::Host {
        around.memory = MemoryRates::measure(plan);
    }
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
    let buffers = B::threads(&plan.world, &plan.config_of(shared.scenario()))?;
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
            .map_err(|error| threads::refused(&format!("the thread of rank {rank}"), error))?;
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
        plan.job_options.check(meet)?;
        let mut reports = Vec::with_capacity(plan.scenarios.len());
        // A buffer has a fixed number of SMs, so ranks join again when this number changes.
        for alike in plan.scenarios.chunk_by(|one, next| one.sms == next.sms) {
            let mut buffer = B::join(&plan.world, meet, &plan.config_of(&alike[0]))?;
            for _ in alike {
                let shared = Shared::new(Arc::clone(plan), reports.len());
                reports.push(run::rank(&mut buffer, meet, &shared, bar)?);
            }
        }
        Ok(reports)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::ceiling::CeilingReport;
    use crate::bench::measure::Operator;
    use crate::bench::runs::{OperatorReport, Run};
    use crate::bench::scenario::Scenario;
    use crate::common::units;

    /// Measures all scenarios on the host backend, with ranks as threads.
    fn measure(plan: BenchPlan) -> BenchReport {
        let plan = Arc::new(plan);
        let run = |scenario| on_threads::<HostBuffer>(&plan, scenario, &ProgressBar::hidden()).unwrap();
        let ranks: Vec<_> = (0..plan.scenarios.len()).map(run).collect();
        BenchReport::new(&plan, &ranks, &MachineState::default())
    }

    /// A plan with the operators of the CUDA backend, and these numbers of SMs.
    fn as_on_gpus(options: &str, sms: &[usize]) -> BenchPlan {
        let plan = plan::tests::plan(options);
        let with = |scenario: &Scenario| {
            let scenario = scenario.clone();
            sms.iter().map(move |&sms| Scenario { sms: Some(sms), ..scenario.clone() })
        };
        let scenarios = plan.scenarios.iter().flat_map(with).collect();
        BenchPlan { backend: BackendKind::Cuda, scenarios, ..plan }
    }

    /// Checks the order of calls of each backend, their results and the report. The host backend runs both sequences.
    #[test]
    fn the_operator_sequence_of_each_backend_gives_correct_results_in_both_modes() {
        for (domains, options) in [
            (1, "--tokens 33"),
            (1, "--tokens 33 --dtype fp8 --skew 1"),
            (2, "--tokens 33 --dtype fp8"),
            (1, "--tokens 33+0+7+2 --dtype fp8-given"),
            (2, "--tokens 33+0+7+2 --dtype fp8-given --skew 1"),
            (1, "--tokens 33 --ranks 1"),
            (2, "--tokens 0+9+40+0 --pad 1"),
            (4, "--tokens 0,5,0+9+40+0"),
        ] {
            let options = format!(
                "--domains {domains} --hidden 128 --experts 8 --topk 3 --iters 2 --mode plain,permuted {options}"
            );
            for backend in [BackendKind::Host, BackendKind::Cuda] {
                let plan = BenchPlan { backend, ..plan::tests::plan(&options) };
                let runs = plan.scenarios.len();
                let report = measure(plan);
                assert_eq!(report.runs.len(), runs);
                for (at, run) in report.runs.iter().enumerate() {
                    assert_eq!(run.is_plain(), at < runs / 2);
                    check_run(run, backend, &options);
                }
                assert!(report.verified);
                let text = table::render(&report);
                let of_gpus: &[&str] =
                    &["non-blocking", "combine + probs", "busiest rank", "340 GB/s", "in a dispatch a rank"];
                for part in if backend == BackendKind::Cuda { of_gpus } else { &["check routing"] } {
                    assert!(text.contains(part), "no `{part}` in\n{text}");
                }
            }
        }
    }

    fn check_run(run: &Run, backend: BackendKind, options: &str) {
        assert!(run.verified, "{options}: {}", run.verification);
        let count = |what: &[u64]| units::count(what.iter().sum());
        let rows = count(&run.load.rows_per_rank);
        let plain = format!("all {rows} dispatched rows");
        let bounded = format!("so do the {rows} rows of a non-blocking dispatch");
        assert!(!run.is_plain() || run.verification.starts_with(&plain), "{options}: {}", run.verification);
        assert_eq!(run.verification.contains(&bounded), backend == BackendKind::Cuda, "{}", run.verification);
        let tokens: usize = run.tokens_per_rank.iter().sum();
        assert!(run.verification.contains(&format!("{} combined tokens", units::count(tokens as u64))));
        let names: Vec<&str> = run.operators.iter().map(|operator| operator.operator).collect();
        assert_eq!(names, Operator::all(backend).iter().map(|operator| operator.name()).collect::<Vec<_>>());
        // In plain mode a rank has at most one row of a token.
        let copies: u64 = run.load.tokens_per_rank.iter().sum();
        let fewer = run.load.rows_per_rank.iter().sum::<u64>() <= copies;
        assert!(!run.is_plain() || fewer, "{options}");
    }

    #[test]
    fn several_runs_have_headings_and_one_summary() {
        let options = "--domains 1 --hidden 64 --experts 8 --topk 3 --iters 1 --mode plain,permuted";
        let report = measure(as_on_gpus(&format!("{options} --tokens 2000,1+0+3+2"), &[8, 32]));
        let text = table::render(&report);
        let all = ["plain mode", "permuted mode padded to 16"].map(|mode| {
            ["2,000", "1 + 0 + 3 + 2"]
                .map(|tokens| [8, 32].map(|sms| format!("\n\n{mode}, {sms} SMs, {tokens} tokens a rank\n")))
        });
        for heading in all.as_flattened().as_flattened() {
            assert_eq!(text.matches(heading.as_str()).count(), 1, "{heading}{text}");
        }
        for once in
            ["floor = ", "time = between GPU events", "verified: all 8 runs", "hidden 64, 8 experts, top-3"]
        {
            assert_eq!(text.matches(once).count(), 1, "{once}: {text}");
        }
        assert_eq!(text.matches("\nverified: all ").count(), 9, "{text}");
        assert!(!text.contains("load per rank"), "{text}");
        let (_, summary) = text.rsplit_once("─\n mode ").unwrap();
        let rows: Vec<Vec<&str>> = summary.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            rows[0].join(" "),
            "SMs tokens preprocess dispatch ratio non-blocking combine ratio layer"
        );
        let first: Vec<String> = rows[2..10].iter().map(|row| row[..3].join(" ")).collect();
        let expected = ["plain", "permuted"].map(|mode| {
            [
                format!("{mode} 8 2,000"),
                format!("{mode} 32 2,000"),
                format!("{mode} 8 1"),
                format!("{mode} 32 1"),
            ]
        });
        assert_eq!(first, expected.concat());
        // The same figures as in the run's own table.
        let dispatch = &report.runs[0].operators[1];
        assert_eq!(dispatch.operator, "dispatch");
        let median = units::time_us(dispatch.median_us);
        assert!(summary.lines().nth(2).unwrap().contains(&median), "{median}: {summary}");
        assert!(summary.lines().last().unwrap().starts_with("verified: all 8 runs"), "{summary}");
        let json = serde_json::to_value(&report).unwrap();
        let runs: Vec<_> = json["runs"].as_array().unwrap().iter().map(|r| (&r["mode"], &r["sms"])).collect();
        assert_eq!(runs[1], (&"plain".into(), &32.into()));
    }

    /// Ranks as processes join again for each number of SMs, over the same rendezvous.
    #[test]
    fn a_rank_that_is_a_process_measures_all_numbers_of_sms() {
        let options = "--ranks 2 --domains 1 --hidden 64 --experts 8 --topk 3 --iters 1 --tokens 5,3+0";
        let plan = Arc::new(as_on_gpus(&format!("{options} --mode plain,permuted"), &[8, 32]));
        let groups: Vec<_> =
            plan.scenarios.chunk_by(|one, next| one.sms == next.sms).map(<[_]>::len).collect();
        assert!(groups.len() > 2, "{groups:?}");
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let rank = |rank| {
            let plan = Arc::clone(&plan);
            let env = LaunchEnv { rank, world_size: 2, store: free.clone(), generation: 0 };
            std::thread::spawn(move || {
                as_one_rank::<HostBuffer>(&plan, &env, &ProgressBar::hidden()).map_err(|f| f.to_string())
            })
        };
        for rank in [0, 1].map(rank) {
            let reports = rank.join().unwrap().unwrap();
            assert_eq!(reports.len(), plan.scenarios.len());
            let report = BenchReport::new(&plan, &reports, &MachineState::default());
            assert!(report.verified);
            let sms: Vec<_> = report.runs.iter().map(|run| run.sms).collect();
            assert_eq!(sms, plan.scenarios.iter().map(|scenario| scenario.sms).collect::<Vec<_>>());
        }
    }

    #[test]
    fn on_hosts_a_summary_has_no_columns_of_gpus() {
        let options = "--domains 1 --hidden 64 --experts 8 --topk 3 --iters 1 --tokens 3,4";
        let mut report = measure(plan::tests::plan(options));
        let text = table::render(&report);
        let header = text.lines().rfind(|line| line.starts_with(" mode")).unwrap();
        let words: Vec<&str> = header.split_whitespace().collect();
        assert_eq!(words.join(" "), "mode tokens preprocess dispatch ratio combine ratio layer");
        assert!(text.contains("\npermuted mode padded to 16, 4 tokens a rank\n"), "{text}");
        (report.verified, report.runs[1].verified) = (false, false);
        let text = table::render(&report);
        assert!(text.lines().last().unwrap().starts_with("WRONG: 1 of 2 runs"), "{text}");
    }

    #[test]
    fn one_run_names_its_mode_in_the_heading() {
        let heading = |mode: &str| {
            let options = "--domains 1 --hidden 64 --experts 8 --topk 3 --iters 1 --tokens 1000+2+3+4 --mode";
            table::render(&measure(plan::tests::plan(&format!("{options} {mode}"))))
        };
        let start = "\n1,000 + 2 + 3 + 4 tokens a rank, hidden 64, 8 experts, top-3, bf16, ";
        let permuted = heading("permuted");
        assert!(permuted.contains(&format!("{start}permuted mode padded to 16, skew 0,")), "{permuted}");
        assert!(permuted.contains("load per rank, rows received"), "{permuted}");
        let plain = heading("plain");
        assert!(plain.contains(&format!("{start}plain mode, skew 0, seed 1, 1 iteration\n")), "{plain}");
        assert!(plain.contains("load per rank, copies received"), "{plain}");
        assert_eq!(plain.matches("plain").count(), 1, "{plain}");
    }

    #[test]
    fn operators_of_different_sizes_have_ceilings_of_their_own() {
        let report =
            measure(plan::tests::plan("--domains 1 --hidden 64 --experts 8 --iters 1 --tokens 4000,8"));
        let size = |ceiling: &CeilingReport| match ceiling {
            CeilingReport::Memory { ceiling_size_bytes, .. } => *ceiling_size_bytes,
            CeilingReport::Wire { .. } => panic!("the host backend has no wire"),
        };
        let [large, small] = [0, 1].map(|run: usize| size(&report.runs[run].ceiling));
        assert!(large > 10 * small && size(&report.ceiling) == small, "{large} {small}");
        assert_eq!(report.floor_definition.matches("GB/s read + written by copying").count(), 2);
    }

    #[test]
    fn the_floor_of_a_layer_is_the_sum_of_its_operators() {
        let plan = plan::tests::plan("--domains 1 --tokens 20 --hidden 64 --experts 8 --topk 3 --iters 3");
        let plan = Arc::new(BenchPlan { backend: BackendKind::Cuda, wire: Some(2.0), ..plan });
        let ranks = on_threads::<HostBuffer>(&plan, 0, &ProgressBar::hidden()).unwrap();
        let report = BenchReport::new(&plan, &[ranks], &MachineState::default());
        let floor = |operator: Operator| {
            let find = |o: &&OperatorReport| o.operator == operator.name();
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
        assert!(own.contains("of its time\n"), "in one domain, preprocessing exchanges counts only\n{own}");
        let shared = text("NVIDIA H200", 2);
        assert!(shared.contains("\n2 GPUs (NVIDIA H200)") && shared.contains("\nno floor: "), "{shared}");
        assert!(shared.contains("\nnote: several ranks share a GPU"), "{shared}");
        let unknown = text("NVIDIA A100-SXM4-80GB", 4);
        assert!(unknown.contains("has not been measured; set it with --wire"), "{unknown}");
    }

    #[test]
    fn the_report_says_what_several_domains_of_one_machine_lack_and_exchange() {
        let text = |domains: &str, backend| {
            let plan = plan::tests::plan(&format!(
                "--ranks 4 --domains {domains} --tokens 20 --hidden 64 --experts 8 --topk 3 --iters 1"
            ));
            let plan = Arc::new(BenchPlan { backend, ..plan });
            let ranks = on_threads::<HostBuffer>(&plan, 0, &ProgressBar::hidden()).unwrap();
            table::render(&BenchReport::new(&plan, &[ranks], &MachineState::default()))
        };
        let no_network =
            "\nnote: the engine between domains (loopback) copies inside this machine; no network card";
        let masks = "not counted: a mask of experts for each token that goes to another domain";
        for (domains, backend, several) in
            [("1", BackendKind::Cuda, false), ("2", BackendKind::Host, true), ("2", BackendKind::Cuda, true)]
        {
            let said = text(domains, backend);
            assert_eq!(said.contains(no_network), several, "{said}");
            assert_eq!(said.contains(masks), several && backend == BackendKind::Cuda, "{said}");
        }
    }
}
