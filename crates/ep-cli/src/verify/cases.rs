//! Which cases are run, and how one of them is run again.

use std::fmt::{self, Write as _};
use std::hash::{BuildHasher as _, Hasher as _, RandomState};

use ep::conformance::{self, Case};

use crate::args::VerifyArgs;
use crate::backend::Chosen;
use crate::bench::MAX_RANKS;
use crate::failure::Failure;

/// Ranks and NVLink domains of a random case, at most, where nothing is said.
const MOST_RANKS: usize = 8;
const MOST_DOMAINS: usize = 4;

/// The cases of one command line, in the order in which they are run.
#[derive(Debug)]
pub(super) struct Selection {
    pub(super) seed: u64,
    pub(super) cases: Vec<Numbered>,
    pub(super) backend: Chosen,
    left_out: LeftOut,
    /// Options that decide which case a random one is.
    limits: String,
    processes: bool,
    /// What people type before options.
    program: String,
}

/// Fixed cases that are not run.
#[derive(Debug, Default)]
struct LeftOut {
    /// They have more ranks than these.
    ranks: usize,
    of_many_ranks: usize,
    /// They have several NVLink domains, and the backend serves one.
    of_many_domains: usize,
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
    pub(super) fn resolve(args: &VerifyArgs, program: &str) -> Result<Self, Failure> {
        check_limits(args)?;
        let backend = backend(args)?;
        let most_ranks = args.ranks.unwrap_or(MOST_RANKS);
        let most_domains = if backend == Chosen::Cuda { 1 } else { args.domains.unwrap_or(MOST_DOMAINS) };
        let seed = args.seed.unwrap_or_else(new_seed);
        let suite = || numbered(Origin::Suite, conformance::suite());
        let random = |numbers: std::ops::Range<u64>| {
            numbers.map(|number| Numbered {
                origin: Origin::Random,
                number,
                case: conformance::random_case(seed_of(seed, number), most_ranks, most_domains),
            })
        };
        let mut cases: Vec<Numbered> = match (args.case, args.suite_only) {
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
        let left_out = leave_out(&mut cases, args.ranks.unwrap_or(usize::MAX), backend);
        if let (Some(number), true) = (args.case, cases.is_empty()) {
            return Err(Failure::request(format!("--case {number}: it is left out, for it has {left_out}")));
        }
        Ok(Self {
            seed,
            cases,
            backend,
            left_out,
            limits: limits(args),
            processes: args.processes,
            program: program.to_owned(),
        })
    }

    /// The command line that runs one of the cases again, alone.
    pub(super) fn replay(&self, case: &Numbered) -> String {
        let which = match case.origin {
            Origin::Suite => format!("--suite-only --case {}", case.number),
            Origin::Random => format!("--seed {} --case {}{}", self.seed, case.number, self.limits),
        };
        let form = if self.processes { " --processes" } else { "" };
        let backend = if self.backend == Chosen::Cuda { " --backend cuda" } else { "" };
        format!("{} verify{backend} {which}{form}", self.program)
    }

    /// How many of the cases are of the suite, and how many are random.
    pub(super) fn counts(&self) -> String {
        let suite = self.cases.iter().filter(|case| case.origin == Origin::Suite).count();
        let random = self.cases.len() - suite;
        let left_out = match self.left_out.count() {
            0 => String::new(),
            count => format!(" ({count} left out: {})", self.left_out),
        };
        format!("{suite} fixed{left_out} and {random} random cases, seed {}", self.seed)
    }

    /// The numbers of ranks that the cases need, ascending.
    pub(super) fn world_sizes(&self) -> Vec<usize> {
        let mut sizes: Vec<usize> = self.cases.iter().map(|case| case.case.ranks).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }
}

impl LeftOut {
    fn count(&self) -> usize {
        self.of_many_ranks + self.of_many_domains
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ranks, of_many_ranks, of_many_domains } = self;
        if *of_many_ranks > 0 {
            write!(f, "more than {ranks} ranks")?;
        }
        if *of_many_domains > 0 {
            let between = if *of_many_ranks > 0 { ", or " } else { "" };
            write!(f, "{between}several NVLink domains, which the backend does not serve")?;
        }
        Ok(())
    }
}

/// Removes the fixed cases that need more than there is. Random ones are drawn to fit.
fn leave_out(cases: &mut Vec<Numbered>, ranks: usize, backend: Chosen) -> LeftOut {
    let mut left_out = LeftOut { ranks, ..LeftOut::default() };
    cases.retain(|case| {
        let many_ranks = case.case.ranks > ranks;
        let many_domains = !many_ranks && backend == Chosen::Cuda && case.case.domains > 1;
        left_out.of_many_ranks += usize::from(many_ranks);
        left_out.of_many_domains += usize::from(many_domains);
        !many_ranks && !many_domains
    });
    left_out
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
    for (option, value) in [("--ranks", args.ranks), ("--domains", args.domains)] {
        if let Some(value) = value {
            // Writing to a string cannot fail.
            let _ = write!(out, " {option} {value}");
        }
    }
    out
}

/// What is verified. Where nothing is said, it is the backend that serves all cases.
pub(super) fn backend(args: &VerifyArgs) -> Result<Chosen, Failure> {
    Chosen::resolve(args.backend, Some(args.domains.unwrap_or(MOST_DOMAINS)))
}

/// Refuses numbers of ranks and domains that are mistakes in writing.
pub(super) fn check_limits(args: &VerifyArgs) -> Result<(), Failure> {
    for (option, value) in [("--ranks", args.ranks), ("--domains", args.domains)] {
        if let Some(value) = value.filter(|value| !(1..=MAX_RANKS).contains(value)) {
            return Err(Failure::request(format!("{option} {value}: must be from 1 to {MAX_RANKS}")));
        }
    }
    Ok(())
}

/// The seed of one random case: neighbours share nothing, and a case needs none before it.
fn seed_of(seed: u64, number: u64) -> u64 {
    seed.wrapping_add(number.wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

/// A seed that is new each time, short enough to be typed.
pub(super) fn new_seed() -> u64 {
    RandomState::new().build_hasher().finish() >> 32
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Command, CommandLine};

    fn resolve(options: &str) -> Result<Selection, Failure> {
        let line = format!("hybrid-ep verify --backend host {options}");
        let Command::Verify(args) = CommandLine::parse_from(line.split_whitespace()).command else {
            panic!("not a verification: {line}")
        };
        Selection::resolve(&args, "hybrid-ep")
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
    fn fixed_cases_of_more_ranks_are_left_out_and_counted() {
        let all = resolve("--suite-only").unwrap();
        assert!(!all.counts().contains("left out"), "{}", all.counts());
        let few = resolve("--suite-only --ranks 2").unwrap();
        assert!(few.cases.len() > 20 && few.cases.iter().all(|case| case.case.ranks <= 2));
        let missing = all.cases.len() - few.cases.len();
        let said = format!(" fixed ({missing} left out: more than 2 ranks) and 0 random cases");
        assert!(few.counts().contains(&said), "{}", few.counts());
        let large = all.cases.iter().find(|case| case.case.ranks == 16).unwrap().number;
        let refusal = resolve(&format!("--suite-only --ranks 2 --case {large}")).unwrap_err().to_string();
        assert!(refusal.contains("more than 2 ranks"), "{refusal}");
        assert!(
            resolve("--cases 30 --seed 1 --ranks 2").unwrap().cases.iter().all(|case| case.case.ranks <= 2)
        );
    }

    #[test]
    fn one_domain_is_all_that_gpus_serve() {
        let mut cases: Vec<Numbered> = numbered(Origin::Suite, conformance::suite()).collect();
        let left_out = leave_out(&mut cases, 8, Chosen::Cuda);
        assert!(cases.iter().all(|case| case.case.domains == 1 && case.case.ranks <= 8));
        assert_eq!(left_out.count() + cases.len(), conformance::suite().len());
        let said = "more than 8 ranks, or several NVLink domains, which the backend does not serve";
        assert_eq!(left_out.to_string(), said);
    }

    #[test]
    fn limits_are_named() {
        assert!(resolve("--ranks 0").unwrap_err().to_string().contains("--ranks 0"));
        assert!(resolve("--suite-only --case 99999").unwrap_err().to_string().contains("--case 99999"));
    }
}
