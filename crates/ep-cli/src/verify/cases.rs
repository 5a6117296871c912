//! Selects the cases to run, and builds the command that repeats one of them.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt::{self, Write as _};
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::ops::Range;

use ep::Config;
use ep::conformance::{self, Case};

use crate::common::agree::JobOptions;
use crate::common::backend::BackendKind;
use crate::common::failure::Failure;
use crate::common::role::MAX_RANKS;
use crate::verify::args::VerifyArgs;

/// Default limit of `--ranks` for random cases.
const MOST_RANKS: usize = 8;
/// Default limit of `--domains` for random cases.
const MOST_DOMAINS: usize = 4;

/// The cases that one command line selects, in the order in which they run.
#[derive(Debug)]
pub(super) struct Selection {
    pub(super) seed: u64,
    pub(super) backend: BackendKind,
    fixed: Vec<NumberedCase>,
    /// Random cases by number. A case is drawn when it runs, so that a million cases need no memory.
    random: Range<u64>,
    most_ranks: usize,
    most_domains: usize,
    /// If set, run only cases with this number of ranks.
    only_ranks: Option<usize>,
    /// Run only cases with at least this number of domains.
    least_domains: usize,
    /// Number of random cases that are run.
    random_cases: usize,
    left_out: LeftOut,
    /// The options, besides the seed, that determine a random case.
    limits: String,
    processes: bool,
    /// Name of the program in commands that repeat a case.
    program: String,
}

/// Numbers of fixed cases that are not run.
#[derive(Debug, Default)]
struct LeftOut {
    /// Maximum number of ranks of a case that is run.
    ranks: usize,
    /// Number of cases with more ranks.
    of_many_ranks: usize,
    /// Number of cases with several domains, if the ranks can have only one.
    of_many_domains: usize,
    /// Minimum number of domains of a case that is run.
    domains: usize,
    /// Number of cases with fewer domains.
    of_few_domains: usize,
}

/// A case with the number that `--case` takes.
#[derive(Debug, Clone)]
pub(super) struct NumberedCase {
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
    pub(super) fn resolve(
        args: &VerifyArgs,
        backend: BackendKind,
        config: &Config,
        program: &str,
    ) -> Result<Self, Failure> {
        check_limits(args)?;
        let most_ranks = args.ranks.unwrap_or(MOST_RANKS);
        // On GPUs, engines that map windows serve ranks of one process only.
        let one_domain =
            args.processes && backend == BackendKind::Cuda && config.host.transport.maps_windows();
        let most_domains = args.domains.unwrap_or(if one_domain { 1 } else { MOST_DOMAINS });
        let seed = args.seed.unwrap_or_else(new_seed);
        let suite = || numbered(Origin::Suite, conformance::suite()).collect::<Vec<_>>();
        let (mut fixed, random) = match (args.case, args.suite_only) {
            (None, true) => (suite(), 0..0),
            (None, false) => (suite(), 0..args.cases),
            (Some(number), false) => (Vec::new(), number..number + 1),
            (Some(number), true) => {
                let mut all = suite();
                let count = all.len();
                all.retain(|case| case.number == number);
                if all.is_empty() {
                    return Err(Failure::request(format!(
                        "--case {number}: the suite has cases 0 to {}",
                        count - 1
                    )));
                }
                (all, 0..0)
            }
        };
        // The remaining cases keep their numbers in the whole suite.
        let left_out =
            leave_out(&mut fixed, args.ranks.unwrap_or(usize::MAX), one_domain, args.least_domains);
        if let (Some(number), true, true) = (args.case, fixed.is_empty(), random.is_empty()) {
            return Err(Failure::request(format!(
                "--case {number}: this case is left out: it has {left_out}"
            )));
        }
        let mut selection = Self {
            seed,
            backend,
            fixed,
            random,
            most_ranks,
            most_domains,
            only_ranks: None,
            least_domains: args.least_domains,
            random_cases: 0,
            left_out,
            limits: limits(args.ranks, args.domains.or(one_domain.then_some(most_domains))),
            processes: args.processes,
            program: program.to_owned(),
        };
        selection.random_cases = selection.count_random_cases();
        Ok(selection)
    }

    /// Keeps only the cases with this number of ranks.
    pub(super) fn retain(&mut self, ranks: usize) {
        self.fixed.retain(|case| case.case.ranks == ranks);
        self.only_ranks = Some(ranks);
        self.random_cases = self.count_random_cases();
    }

    fn count_random_cases(&self) -> usize {
        match (self.only_ranks, self.least_domains) {
            (None, ..=1) => (self.random.end - self.random.start) as usize,
            _ => self.random.clone().filter(|&number| self.runs(&self.random_case(number).case)).count(),
        }
    }

    /// Whether a random case, or a fixed one that was not left out, is run.
    fn runs(&self, case: &Case) -> bool {
        self.only_ranks.is_none_or(|ranks| case.ranks == ranks) && case.domains >= self.least_domains
    }

    /// Number of cases.
    pub(super) fn len(&self) -> usize {
        self.fixed.len() + self.random_cases
    }

    /// All selected cases. Random cases are drawn as the iterator reaches them.
    pub(super) fn cases(&self) -> impl Iterator<Item = Cow<'_, NumberedCase>> + Send {
        let random = self.random.clone().map(|number| Cow::Owned(self.random_case(number)));
        let all = self.fixed.iter().map(Cow::Borrowed).chain(random);
        all.filter(|case| self.runs(&case.case))
    }

    fn random_case(&self, number: u64) -> NumberedCase {
        let case = conformance::random_case(seed_of(self.seed, number), self.most_ranks, self.most_domains);
        NumberedCase { origin: Origin::Random, number, case }
    }

    /// The command line that repeats one case alone.
    pub(super) fn replay(&self, case: &NumberedCase) -> String {
        let which = match case.origin {
            Origin::Suite => format!("--suite-only --case {}", case.number),
            Origin::Random => format!("--seed {} --case {}{}", self.seed, case.number, self.limits),
        };
        let form = if self.processes { " --processes" } else { "" };
        let backend = if self.backend == BackendKind::Cuda { " --backend cuda" } else { "" };
        format!("{} verify{backend} {which}{form}", self.program)
    }

    /// The numbers of fixed and random cases, and the seed, in words.
    pub(super) fn counts(&self) -> String {
        let (suite, random) = (self.fixed.len(), self.random_cases);
        let left_out = match self.left_out.count() {
            0 => String::new(),
            count => format!(" ({count} left out: {})", self.left_out),
        };
        format!("{suite} fixed{left_out} and {random} random cases, seed {}", self.seed)
    }

    /// The options that determine the cases. They must be equal on all ranks.
    pub(super) fn job_options(&self, args: &VerifyArgs) -> JobOptions {
        JobOptions::of("verify")
            .with("--backend", self.backend.name())
            .with("--suite-only", args.suite_only)
            // Only random cases have a seed.
            .with("--seed", if args.suite_only { "not used".into() } else { self.seed.to_string() })
            .with("--case", args.case.map_or_else(|| "not given".into(), |case| case.to_string()))
            .with("--cases", args.cases)
            .with("--ranks", self.most_ranks)
            .with("--domains", self.most_domains)
            .with("--least-domains", self.least_domains)
    }

    /// The world sizes of the selected cases, ascending.
    pub(super) fn world_sizes(&self) -> Vec<usize> {
        let mut sizes: BTreeSet<usize> = self.fixed.iter().map(|case| case.case.ranks).collect();
        // Stops drawing random cases once every possible size has been seen.
        let mut missing: BTreeSet<usize> =
            (1..=self.most_ranks).filter(|size| !sizes.contains(size)).collect();
        for number in self.random.clone() {
            if missing.is_empty() {
                break;
            }
            let case = self.random_case(number).case;
            if self.runs(&case) {
                missing.remove(&case.ranks);
                sizes.insert(case.ranks);
            }
        }
        sizes.into_iter().collect()
    }
}

impl LeftOut {
    fn count(&self) -> usize {
        self.of_many_ranks + self.of_many_domains + self.of_few_domains
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let many_ranks = format!("more than {} ranks", self.ranks);
        let many_domains = "several domains, for which processes on GPUs need --transport shm or tcp";
        let few_domains = format!("fewer than {} domains", self.domains);
        let reasons = [
            (self.of_many_ranks, many_ranks.as_str()),
            (self.of_many_domains, many_domains),
            (self.of_few_domains, &few_domains),
        ];
        let mut separator = "";
        for (_, reason) in reasons.iter().filter(|(count, _)| *count > 0) {
            write!(f, "{separator}{reason}")?;
            separator = "; or ";
        }
        Ok(())
    }
}

/// Removes the fixed cases with too many ranks or too few domains, and with `one_domain` those with several domains.
fn leave_out(cases: &mut Vec<NumberedCase>, ranks: usize, one_domain: bool, least_domains: usize) -> LeftOut {
    let mut left_out = LeftOut { ranks, domains: least_domains, ..LeftOut::default() };
    cases.retain(|case| {
        let many_ranks = case.case.ranks > ranks;
        let many_domains = !many_ranks && one_domain && case.case.domains > 1;
        left_out.of_many_ranks += usize::from(many_ranks);
        let few_domains = !many_ranks && !many_domains && case.case.domains < least_domains;
        left_out.of_many_domains += usize::from(many_domains);
        left_out.of_few_domains += usize::from(few_domains);
        !many_ranks && !many_domains && !few_domains
    });
    left_out
}

impl NumberedCase {
    /// The case's name in messages.
    pub(super) fn name(&self) -> String {
        match self.origin {
            Origin::Suite => format!("fixed case {}", self.number),
            Origin::Random => format!("random case {}", self.number),
        }
    }
}

fn numbered(origin: Origin, cases: Vec<Case>) -> impl Iterator<Item = NumberedCase> {
    cases.into_iter().zip(0..).map(move |(case, number)| NumberedCase { origin, number, case })
}

fn limits(ranks: Option<usize>, domains: Option<usize>) -> String {
    let mut out = String::new();
    for (option, value) in [("--ranks", ranks), ("--domains", domains)] {
        if let Some(value) = value {
            // Writing to a string cannot fail.
            let _ = write!(out, " {option} {value}");
        }
    }
    out
}

/// The backend to verify. Without `--backend` and `--domains`, the host backend, which serves all cases.
pub(super) fn backend(args: &VerifyArgs) -> Result<BackendKind, Failure> {
    BackendKind::resolve(args.backend, Some(args.domains.unwrap_or(MOST_DOMAINS)))
}

/// Refuses numbers of ranks and domains that must be typing errors.
pub(super) fn check_limits(args: &VerifyArgs) -> Result<(), Failure> {
    let least = ("--least-domains", Some(args.least_domains));
    for (option, value) in [("--ranks", args.ranks), ("--domains", args.domains), least] {
        if let Some(value) = value.filter(|value| !(1..=MAX_RANKS).contains(value)) {
            return Err(Failure::request(format!("{option} {value}: must be from 1 to {MAX_RANKS}")));
        }
    }
    Ok(())
}

/// The seed of one random case. It depends only on the seed and the number, so that a case can be repeated alone.
fn seed_of(seed: u64, number: u64) -> u64 {
    seed.wrapping_add(number.wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

/// A new random seed of 32 bits, short enough to type.
pub(super) fn new_seed() -> u64 {
    RandomState::new().build_hasher().finish() >> 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verify::args::parse;

    fn resolve(options: &str) -> Result<Selection, Failure> {
        let args = parse(&format!("--backend host {options}")).unwrap();
        Selection::resolve(&args, BackendKind::Host, &Config::default(), "hybrid-ep")
    }

    #[test]
    fn the_replay_command_selects_the_same_case() {
        let all = resolve("--seed 3 --cases 20 --ranks 6").unwrap();
        for case in all.cases().step_by(7).chain(all.cases().last()) {
            let replay = all.replay(&case);
            let again = resolve(replay.strip_prefix("hybrid-ep verify").unwrap()).unwrap();
            assert_eq!(again.len(), 1, "{replay}");
            assert_eq!(again.cases().next().unwrap().case, case.case, "{replay}");
        }
    }

    #[test]
    fn the_options_that_ranks_compare_determine_the_cases() {
        let options = |text: &str| {
            let args = parse(&format!("--backend host {text}")).unwrap();
            resolve(text).unwrap().job_options(&args)
        };
        let same = options("--seed 3 --cases 20 --ranks 6");
        assert_eq!(same, options("--cases 20 --ranks 6 --seed 3"));
        for other in [
            "--seed 4 --cases 20 --ranks 6",
            "--seed 3 --cases 21 --ranks 6",
            "--seed 3 --cases 20 --ranks 5",
            "--seed 3 --cases 20 --ranks 6 --domains 1",
            "--seed 3 --cases 20 --ranks 6 --case 7",
            "--suite-only --ranks 6",
        ] {
            assert_ne!(same, options(other), "{other}");
        }
        // The suite has no seed.
        assert_eq!(options("--suite-only"), options("--suite-only"));
    }

    #[test]
    fn the_seed_is_random_unless_given() {
        assert_ne!(resolve("--cases 0").unwrap().seed, resolve("--cases 0").unwrap().seed);
        assert_eq!(resolve("--cases 0 --seed 77").unwrap().seed, 77);
    }

    #[test]
    fn fixed_cases_of_more_ranks_are_left_out_and_counted() {
        let all = resolve("--suite-only").unwrap();
        assert!(!all.counts().contains("left out"), "{}", all.counts());
        let few = resolve("--suite-only --ranks 2").unwrap();
        assert!(few.len() > 20 && few.cases().all(|case| case.case.ranks <= 2));
        let missing = all.len() - few.len();
        let said = format!(" fixed ({missing} left out: more than 2 ranks) and 0 random cases");
        assert!(few.counts().contains(&said), "{}", few.counts());
        let large = all.cases().find(|case| case.case.ranks == 16).unwrap().number;
        let refusal = resolve(&format!("--suite-only --ranks 2 --case {large}")).unwrap_err().to_string();
        assert!(refusal.contains("more than 2 ranks"), "{refusal}");
        assert!(resolve("--cases 30 --seed 1 --ranks 2").unwrap().cases().all(|case| case.case.ranks <= 2));
    }

    #[test]
    fn processes_on_gpus_leave_out_several_domains_over_loopback() {
        let resolve = |options: &str, engine: &str| {
            let mut config = Config::default();
            config.host.transport.engine = engine.to_owned();
            let args = parse(&format!("--backend cuda --cases 50 --seed 5 {options}")).unwrap();
            Selection::resolve(&args, BackendKind::Cuda, &config, "hybrid-ep").unwrap()
        };
        let several = |selection: &Selection| selection.cases().filter(|case| case.case.domains > 1).count();
        let threads = resolve("", "loopback");
        let processes = resolve("--processes --ranks 8", "loopback");
        assert!(several(&threads) > 20);
        assert_eq!(several(&processes), 0);
        assert!(processes.counts().contains("; or several domains, for which"), "{}", processes.counts());
        let last = processes.cases().last().unwrap();
        assert!(processes.replay(&last).contains("--domains 1"), "{}", processes.replay(&last));
        assert!(several(&resolve("--processes", "tcp")) > 20);
    }

    #[test]
    fn cases_of_few_domains_can_be_left_out() {
        let all = resolve("--cases 60 --seed 5").unwrap();
        let several = resolve("--cases 60 --seed 5 --least-domains 2").unwrap();
        let of_several = || all.cases().filter(|case| case.case.domains >= 2).map(|case| case.case.clone());
        let found: Vec<Case> = several.cases().map(|case| case.case.clone()).collect();
        assert_eq!(found, of_several().collect::<Vec<_>>());
        assert_eq!(several.len(), found.len());
        assert!(several.len() < all.len() && several.counts().contains("fewer than 2 domains"));
        let mut of_ranks = resolve("--cases 60 --seed 5 --least-domains 2").unwrap();
        of_ranks.retain(4);
        assert_eq!(of_ranks.len(), of_several().filter(|case| case.ranks == 4).count());
        assert!(several.world_sizes().iter().all(|&ranks| ranks > 1));
        assert!(resolve("--least-domains 0").is_err());
    }

    #[test]
    fn random_cases_are_drawn_lazily() {
        let many = resolve("--cases 1000000 --seed 1").unwrap();
        assert!(many.len() > 1_000_000);
        assert_eq!(many.cases().nth(many.len() - 1_000_000).unwrap().number, 0);
        let few = resolve("--cases 200 --seed 1 --ranks 8").unwrap();
        let mut sizes: Vec<usize> = few.cases().map(|case| case.case.ranks).collect();
        sizes.sort_unstable();
        sizes.dedup();
        assert_eq!(few.world_sizes(), sizes);
        let mut of_three = resolve("--cases 200 --seed 1 --ranks 8").unwrap();
        of_three.retain(3);
        assert!(of_three.cases().all(|case| case.case.ranks == 3));
        assert_eq!(of_three.cases().count(), of_three.len());
    }

    #[test]
    fn a_number_out_of_range_is_refused_by_option() {
        assert!(resolve("--ranks 0").unwrap_err().to_string().contains("--ranks 0"));
        assert!(resolve("--suite-only --case 99999").unwrap_err().to_string().contains("--case 99999"));
    }
}
