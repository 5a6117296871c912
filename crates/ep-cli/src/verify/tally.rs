//! Counts of passed and failed cases, including those of jobs whose rank 0 reports outcomes to its launcher.

use std::ffi::OsString;
use std::io::{BufRead as _, BufReader};
use std::process::ChildStdout;
use std::sync::atomic::{AtomicUsize, Ordering};

use ep::Config;
use indicatif::ProgressBar;

use crate::common::failure::Failure;
use crate::common::launch::Job;
use crate::common::{output, threads};
use crate::verify::args::VerifyArgs;

/// Lines that rank 0 writes to its launcher, one per case.
pub(super) const PASSED: &str = "passed";
pub(super) const FAILED: &str = "failed";

/// Numbers of cases that have passed and failed so far.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) passed: AtomicUsize,
    pub(super) failed: AtomicUsize,
}

impl Tally {
    pub(super) fn add(&self, passed: bool) {
        let counter = if passed { &self.passed } else { &self.failed };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// The option that gives launched ranks the seed; empty if the seed is among their arguments already.
pub(super) fn seed_for_ranks(args: &VerifyArgs, seed: u64) -> Vec<OsString> {
    if args.seed.is_some() { Vec::new() } else { vec!["--seed".into(), seed.to_string().into()] }
}

/// Counts the outcomes that rank 0 of a job writes, until all ranks have ended.
pub(super) fn attend(mut job: Job, config: &Config, tally: &Tally, bar: &ProgressBar) -> Result<(), Failure> {
    let stdout = job.stdout();
    // Read on another thread, because `wait` must run meanwhile to end ranks that hang.
    std::thread::scope(|scope| {
        let count = || stdout.map(|stdout| count_lines(stdout, tally, bar));
        threads::spawn_scoped(scope, "the thread that counts the outcomes of rank 0", count)?;
        // The tally decides the verdict, not the job's.
        job.wait(config).map(|_| ())
    })
}

/// Counts the lines of rank 0 until it closes its stdout.
fn count_lines(stdout: ChildStdout, tally: &Tally, bar: &ProgressBar) {
    for line in BufReader::new(stdout).lines().map_while(Result::ok) {
        match line.as_str() {
            PASSED => tally.add(true),
            FAILED => tally.add(false),
            // Something else in the rank's process writes, too.
            other => {
                let _ = bar.suspend(|| output::to_stderr(other));
                continue;
            }
        }
        bar.inc(1);
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn only_the_words_of_rank_0_count() {
        let mut child = Command::new("printf")
            .args(["%s\\n", "a banner", PASSED, "passed.", FAILED, PASSED])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let tally = Tally::default();
        count_lines(child.stdout.take().unwrap(), &tally, &ProgressBar::hidden());
        child.wait().unwrap();
        assert_eq!((tally.passed.into_inner(), tally.failed.into_inner()), (2, 1));
    }
}
