//! Runs the kernels on the CPU and compares the results with the oracle: the sources in `device/`, compiled as C++.
//!
//! `cpu/machine.hpp` simulates GPUs by threads, and `cpu/ptx.cuh` replaces the header of the same name; all other
//! kernel sources are those of the GPU. ThreadSanitizer finds unordered accesses, also if they do not collide in the
//! run: between lanes, warps, blocks, ranks, and copies in flight.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod cases;
mod content;
mod program;
mod record;
mod script;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use program::{Outcome, Program};
use script::Script;

fn plain() -> &'static Program {
    static PROGRAM: OnceLock<Program> = OnceLock::new();
    PROGRAM.get_or_init(|| Program::of_operators(false))
}

fn sanitized() -> &'static Program {
    static PROGRAM: OnceLock<Program> = OnceLock::new();
    PROGRAM.get_or_init(|| Program::of_operators(true))
}

/// The files of all cases.
fn files() -> &'static [PathBuf] {
    static FILES: OnceLock<Vec<PathBuf>> = OnceLock::new();
    FILES.get_or_init(|| cases::all().iter().chain(&cases::faults()).map(Script::write).collect())
}

/// The file of a case of this name.
fn file(name: &str) -> &'static PathBuf {
    files().iter().find(|path| path.ends_with(name)).unwrap()
}

/// Calls `run` for all jobs, on all cores, and returns its results in any order.
fn on_all_cores<T: Sync, R: Send>(jobs: &[T], run: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut said = Vec::new();
        while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            said.push(run(job));
        }
        said
    };
    thread::scope(|scope| {
        let workers: Vec<_> =
            (0..thread::available_parallelism().map_or(1, usize::from)).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    })
}

/// Runs every case with these seeds; cases with rails, which take several times as long, with every third seed.
fn run_all(program: &Program, seeds: Range<u64>) {
    let rails =
        |file: &PathBuf| file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("rails"));
    let jobs: Vec<_> = files()
        .iter()
        .flat_map(|file| seeds.clone().step_by(if rails(file) { 3 } else { 1 }).map(move |seed| (file, seed)))
        .collect();
    let outcomes = on_all_cores(&jobs, |&(file, seed)| (file, seed, program.run(file, seed, None)));
    let wrong: Vec<_> =
        outcomes.iter().filter(|(.., outcome)| !matches!(outcome, Outcome::Equal(_))).collect();
    let names: Vec<String> =
        wrong.iter().map(|(file, seed, _)| format!("{} {seed}", file.display())).collect();
    if let Some((.., first)) = wrong.first() {
        panic!(
            "{} of {} runs (case, seed):\n{}\nthe first: {first}",
            wrong.len(),
            jobs.len(),
            names.join("\n")
        );
    }
}

#[test]
fn kernels_equal_the_oracle() {
    run_all(plain(), 0..6);
}

#[test]
fn kernels_have_no_race() {
    run_all(sanitized(), 0..1);
}

/// Many more seeds, for changes of the kernels.
#[test]
#[ignore = "takes many minutes"]
fn kernels_equal_the_oracle_whatever_the_order() {
    run_all(plain(), 0..300);
    run_all(sanitized(), 0..20);
}

#[test]
fn a_seed_repeats_a_run() {
    let [first, again, other] =
        [5, 5, 6].map(|seed| match plain().run(file("capacities-Bulk"), seed, None) {
            Outcome::Equal(said) => said,
            outcome => panic!("{outcome}"),
        });
    assert_eq!(first, again);
    assert_ne!(first, other);
}

/// Whether a case fails when a memory order or a wait is left out on purpose.
fn notices(left_out: &str, case: &str) -> bool {
    match sanitized().run(file(case), 1, Some(left_out)) {
        Outcome::Equal(_) => false,
        Outcome::Crash(said) => panic!("{left_out}: {said}"),
        Outcome::Different(_) | Outcome::Undefined(_) | Outcome::Race(_) => true,
    }
}

/// A seed with which the program protects the memory that the addresses of other ranks name (`Memory::guarded`).
const GUARDED: u64 = 0;

/// Ranks that are processes have different addresses for the same memory.
#[test]
fn using_an_address_of_another_rank_is_detected() {
    let outcome = plain().run(file("steps-Bulk"), GUARDED, Some("delta"));
    assert!(matches!(outcome, Outcome::Crash(_)), "{outcome}");
}

#[test]
fn every_order_and_wait_that_is_left_out_is_detected() {
    let orders = [
        ("st_release_sys", "steps-Bulk"),
        ("ld_acquire_sys", "steps-Bulk"),
        ("st_release_gpu", "rails-alone-Bulk"),
        ("ld_acquire_gpu", "rails-alone-Bulk"),
        ("atom_add_acq_rel_gpu", "steps-Bulk"),
        ("syncwarp", "steps-Plain"),
        ("syncthreads", "steps-Bulk"),
        ("mbarrier_try_wait", "steps-Bulk"),
        ("cp_async_bulk_wait_group_read", "formats-Bulk"),
        ("cp_async_bulk_wait_group", "steps-Bulk"),
        ("mbarrier_try_wait", "steps-Plain"),
        ("fence_proxy_async", "formats-Bulk"),
        ("fence_acq_rel_sys", "steps-Bulk"),
    ];
    let mut missed =
        on_all_cores(&orders, |(order, case)| (!notices(order, case)).then(|| (*order).to_owned()));
    // Each single release store, too.
    let releases: Vec<String> = sanitized()
        .sites(file("steps-Bulk"), 1)
        .into_iter()
        .filter(|site| site.starts_with("st_release_sys@"))
        .collect();
    assert!(releases.len() >= 2, "{releases:?}");
    missed.extend(on_all_cores(&releases, |site| (!notices(site, "steps-Bulk")).then(|| site.clone())));
    let missed: Vec<String> = missed.into_iter().flatten().collect();
    assert!(missed.is_empty(), "no test detected that these were left out: {missed:?}");
}

/// The kernel that copies the bytes of an emulated link, and the host that commands it.
#[test]
fn lane_copies_equal_their_commands_and_have_no_race() {
    let [plain, sanitized] = [false, true].map(Program::of_lane_copies);
    let run = |program: &Program, seed, change| program.run(Path::new("-"), seed, change);
    let mut relaunches = 0;
    for (program, seeds) in [(&plain, 30), (&sanitized, 4)] {
        for seed in 0..seeds {
            match run(program, seed, None) {
                Outcome::Equal(said) => relaunches += usize::from(!said.contains("launches: 1\n")),
                outcome => panic!("seed {seed}: {outcome}"),
            }
        }
    }
    assert!(relaunches > 0, "the kernel never left between two commands");
    let missed: Vec<_> = ["st_release_sys", "ld_acquire_sys", "syncwarp", "syncthreads", "mbarrier_try_wait"]
        .into_iter()
        .filter(|order| matches!(run(&sanitized, 1, Some(order)), Outcome::Equal(_)))
        .collect();
    assert!(missed.is_empty(), "the test did not detect that these were left out: {missed:?}");
}

/// Leaves out each order and wait of the kernels in turn, and prints those whose absence no test detects.
#[test]
#[ignore = "takes many minutes"]
fn every_place_is_needed() {
    let mut sites: Vec<String> = on_all_cores(files(), |file| plain().sites(file, 1)).concat();
    sites.sort_unstable();
    sites.dedup();
    let unneeded: Vec<String> = on_all_cores(&sites, |site| {
        let noticed = files().iter().any(|file| {
            (1..3).any(|seed| !matches!(sanitized().run(file, seed, Some(site)), Outcome::Equal(_)))
        });
        (!noticed).then(|| site.clone())
    })
    .into_iter()
    .flatten()
    .collect();
    println!("of {} places, no test detects the absence of {unneeded:#?}", sites.len());
}
