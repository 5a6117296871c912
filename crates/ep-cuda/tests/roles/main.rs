//! The kernels' logic on a CPU: the sources in `device/`, compiled as C++ for a machine of threads, against the oracle.
//!
//! `cpu/machine.hpp` says how GPUs are made of threads; `cpu/ptx.cuh` what each instruction promises. Only that header
//! of the kernels is another than on a GPU. ThreadSanitizer then finds two accesses that nothing orders, though they
//! never meet: between lanes, warps, blocks and ranks, and between these and copies that are under way.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod cases;
mod content;
mod program;
mod record;
mod script;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use program::{Outcome, Program};
use script::Script;

fn plain() -> &'static Program {
    static PROGRAM: OnceLock<Program> = OnceLock::new();
    PROGRAM.get_or_init(|| Program::build(false))
}

fn sanitized() -> &'static Program {
    static PROGRAM: OnceLock<Program> = OnceLock::new();
    PROGRAM.get_or_init(|| Program::build(true))
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

/// Calls `run` for all jobs, on all cores, and returns what it says.
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

fn run_all(program: &Program, seeds: Range<u64>) {
    let jobs: Vec<_> = files().iter().flat_map(|file| seeds.clone().map(move |seed| (file, seed))).collect();
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
    run_all(sanitized(), 0..2);
}

/// For changes of the kernels: many more ways in which the same work can go.
#[test]
#[ignore = "takes many minutes"]
fn kernels_equal_the_oracle_whatever_the_order() {
    run_all(plain(), 0..300);
    run_all(sanitized(), 0..20);
}

#[test]
fn all_blocks_have_a_role() {
    for blocks in [2, 3, 8, 24, 132] {
        for (tokens, copies) in [(0u32, 0u32), (1, 1), (256, 2048), (4096, 32_768), (100, 100)] {
            for variant in ["dispatch copy bulk", "dispatch quantize bulk"] {
                let (remote, own) = (7 * tokens.min(copies), tokens.min(copies));
                let sending = plain().sending(variant, blocks, tokens.div_ceil(4), [copies, remote, own]);
                assert!((1..blocks).contains(&sending), "{blocks} blocks, {tokens} tokens: {sending}");
            }
        }
    }
    // Many copies of few distinct ranks stay; one copy each goes out.
    let of = |rows, remote, own| plain().sending("dispatch copy bulk", 24, 1024, [rows, remote, own]);
    let (many, few) = (of(32_768, 4080, 4080), of(4096, 4032, 64));
    assert!(many < few, "{many} {few}");
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

/// Whether a run of what has no race otherwise goes wrong when an order in memory, or a wait, is left out on purpose.
fn notices(left_out: &str, case: &str) -> bool {
    match sanitized().run(file(case), 1, Some(left_out)) {
        Outcome::Equal(_) => false,
        Outcome::Crash(said) => panic!("{left_out}: {said}"),
        Outcome::Different(_) | Outcome::Undefined(_) | Outcome::Race(_) => true,
    }
}

/// Ranks that are processes address one memory differently.
#[test]
fn an_address_of_another_rank_is_noticed() {
    let outcome = plain().run(file("steps-Bulk"), 1, Some("delta"));
    assert!(matches!(outcome, Outcome::Crash(_)), "{outcome}");
}

#[test]
fn whatever_is_left_out_is_noticed() {
    let orders = [
        ("st_release_sys", "steps-Bulk"),
        ("ld_acquire_sys", "steps-Bulk"),
        ("atom_add_acq_rel_gpu", "steps-Bulk"),
        ("syncwarp", "steps-Plain"),
        ("syncthreads", "steps-Bulk"),
        ("mbarrier_try_wait", "steps-Bulk"),
        ("cp_async_bulk_wait_group_read", "formats-Bulk"),
        ("cp_async_bulk_wait_group", "steps-Bulk"),
        ("cp_async_wait_group", "sums-Bulk"),
        ("fence_proxy_async", "formats-Bulk"),
    ];
    let mut missed =
        on_all_cores(&orders, |(order, case)| (!notices(order, case)).then(|| (*order).to_owned()));
    // One single store, too: each that tells a peer that something is there.
    let releases: Vec<String> = sanitized()
        .sites(file("steps-Bulk"), 1)
        .into_iter()
        .filter(|site| site.starts_with("st_release_sys@"))
        .collect();
    assert!(releases.len() >= 3, "{releases:?}");
    missed.extend(on_all_cores(&releases, |site| (!notices(site, "steps-Bulk")).then(|| site.clone())));
    let missed: Vec<String> = missed.into_iter().flatten().collect();
    assert!(missed.is_empty(), "nobody noticed that these were left out: {missed:?}");
}

/// Which orders and waits of the kernels are needed, one place after the other: prints those that nobody misses.
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
    println!("of {} places, nobody misses {unneeded:#?}", sites.len());
}
