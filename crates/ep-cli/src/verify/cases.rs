//! Which cases are run, and how one of them is run again.

use std::fmt::Write as _;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};

use ep::conformance::{self, Case};

use crate::args::VerifyArgs;
use crate::backend::Chosen;
use crate::bench::MAX_RANKS;
use crate::failure::Failure;

/// The cases of one command line, in the order in which they are run.
#[derive(Debug)]
pub(super) struct Selection {
    pub(super) seed: u64,
    pub(super) cases: Vec<Numbered>,
    pub(super) backend: Chosen,
    /// Options that decide which case a random one is.
    limits: String,
    processes: bool,
}

/// A case with the number that finds it again.
#[derive(Debug)]
pub(super) struct Numbered {
    pub(super) origin: Origin,
    pub(super) number: u64,
    pub(super) case: Case,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    Suite,
    Random,
}

impl Selection {
    pub(super) fn resolve(args: &VerifyArgs) -> Result<Self, Failure> {
        for (option, value) in [("--ranks", args.ranks), ("--domains", args.domains)] {
            if value == 0 || value > MAX_RANKS {
                return Err(Failure::request(format!("{option} {value}: must be from 1 to {MAX_RANKS}")));
            }
        }
        let backend = Chosen::resolve(args.backend, Some(args.domains))?;
        let domains = if backend == Chosen::Cuda { 1 } else { args.domains };
        let seed = args.seed.unwrap_or_else(new_seed);
        let suite = || numbered(Origin::Suite, conformance::suite());
        let random = |numbers: std::ops::Range<u64>| {
            numbers.map(|number| Numbered {
                origin: Origin::Random,
                number,
                case: conformance::random_case(seed_of(seed, number), args.ranks, domains),
            })
        };
        let cases = match (args.case, args.suite_only) {
            (None, true) => suite().collect(),
            (None, false) => suite().chain(random(0..args.cases)).collect(),
            (Some(number), false) => random(number..number.saturating_add(1)).collect(),
            (Some(number), true) => {
                let all: Vec<Numbered> = suite().collect();
                let count = all.len();
                let one: Vec<Numbered> = all.into_iter().filter(|case| case.number == number).collect();
                if one.is_empty() {
                    return Err(Failure::request(format!(
                        "--case {number}: the suite has cases 0 to {}",
                        count - 1
                    )));
                }
                one
            }
        };
        // Numbers stay those of the whole suite.
        let served = |case: &Numbered| backend == Chosen::Host || case.case.domains == 1;
        let cases: Vec<Numbered> = cases;
        let cases = cases.into_iter().filter(served).collect();
        Ok(Self { seed, cases, backend, limits: limits(args), processes: args.processes })
    }

    /// The command line that runs one of the cases again, alone.
    pub(super) fn replay(&self, case: &Numbered) -> String {
        let which = match case.origin {
            Origin::Suite => format!("--suite-only --case {}", case.number),
            Origin::Random => format!("--seed {} --case {}{}", self.seed, case.number, self.limits),
        };
        let form = if self.processes { " --processes" } else { "" };
        let backend = if self.backend == Chosen::Cuda { " --backend cuda" } else { "" };
        format!("hybrid-ep verify{backend} {which}{form}")
    }

    /// How many of the cases are of the suite, and how many are random.
    pub(super) fn counts(&self) -> String {
        let suite = self.cases.iter().filter(|case| case.origin == Origin::Suite).count();
        format!("{suite} fixed and {} random cases, seed {}", self.cases.len() - suite, self.seed)
    }

    /// The numbers of ranks that the cases need, ascending.
    pub(super) fn world_sizes(&self) -> Vec<usize> {
        let mut sizes: Vec<usize> = self.cases.iter().map(|case| case.case.ranks).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }
}

impl Numbered {
    /// How people call it.
    pub(super) fn name(&self) -> String {
        match self.origin {
            Origin::Suite => format!("fixed case {}", self.number),
            Origin::Random => format!("random case {}", self.number),
        }
    }
}

fn numbered(origin: Origin, cases: Vec<Case>) -> impl Iterator<Item = Numbered> {
    cases.into_iter().zip(0..).map(move |(case, number)| Numbered { origin, number, case })
}

fn limits(args: &VerifyArgs) -> String {
    let mut out = String::new();
    for (option, value, default) in [("--ranks", args.ranks, 8), ("--domains", args.domains, 4)] {
        if value != default {
            // Writing to a string cannot fail.
            let _ = write!(out, " {option} {value}");
        }
    }
    out
}

/// The seed of one random case: neighbours share nothing, and a case needs none before it.
fn seed_of(seed: u64, number: u64) -> u64 {
    seed.wrapping_add(number.wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

/// A seed that is new each time, short enough to be typed.
fn new_seed() -> u64 {
    RandomState::new().build_hasher().finish() >> 32
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Command, CommandLine};

    fn resolve(options: &str) -> Result<Selection, Failure> {
        let line = format!("hybrid-ep verify {options}");
        let Command::Verify(args) = CommandLine::parse_from(line.split_whitespace()).command else {
            panic!("not a verification: {line}")
        };
        Selection::resolve(&args)
    }

    #[test]
    fn a_replayed_case_is_the_same_case() {
        let all = resolve("--seed 3 --cases 20 --ranks 6").unwrap();
        for case in all.cases.iter().step_by(7).chain(all.cases.last()) {
            let replay = all.replay(case);
            let again = resolve(replay.strip_prefix("hybrid-ep verify").unwrap()).unwrap();
            assert_eq!(again.cases.len(), 1, "{replay}");
            assert_eq!(again.cases[0].case, case.case, "{replay}");
        }
    }

    #[test]
    fn seeds_are_new_unless_given() {
        assert_ne!(resolve("--cases 0").unwrap().seed, resolve("--cases 0").unwrap().seed);
        assert_eq!(resolve("--cases 0 --seed 77").unwrap().seed, 77);
    }

    #[test]
    fn limits_are_named() {
        assert!(resolve("--ranks 0").unwrap_err().to_string().contains("--ranks 0"));
        assert!(resolve("--suite-only --case 99999").unwrap_err().to_string().contains("--case 99999"));
    }
}
