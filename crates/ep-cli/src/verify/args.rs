//! The options of `verify`.

use clap::Args;

use crate::common::backend::BackendChoice;
use crate::common::numbers::{ANY, Count, count, count64};
use crate::common::tuning::TuningArgs;

/// Maximum number of random cases of one verification.
const MOST_CASES: usize = 1_000_000;
/// Maximum number of iterations of one soak, which take days.
const MOST_ITERATIONS: usize = 1_000_000_000;

#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// Backend to verify
    #[arg(long, value_enum, default_value_t)]
    pub(crate) backend: BackendChoice,
    /// Number of random cases after the fixed suite; at most 1,000,000
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = count64(Count::new(0, MOST_CASES)))]
    pub(crate) cases: u64,
    /// Seed of the random cases or of the soak [default: a new seed, which is printed]
    #[arg(long, value_name = "N", value_parser = count64(ANY))]
    pub(crate) seed: Option<u64>,
    /// Maximum number of ranks of a case [default: 8 for random cases, no limit for the suite]; with --soak, the number of
    /// ranks [default: 4]
    #[arg(long, value_name = "MAX", value_parser = count(ANY))]
    pub(crate) ranks: Option<usize>,
    /// Maximum number of NVLink domains of a random case [default: 4]; with --soak, the number of domains [default: 2; 1
    /// on GPUs or for an odd number of ranks]
    #[arg(long, value_name = "MAX", value_parser = count(ANY))]
    pub(crate) domains: Option<usize>,
    /// Leave out cases with fewer NVLink domains; on several machines, each of which has whole domains, their number
    #[arg(long, value_name = "MIN", default_value_t = 1, value_parser = count(ANY), conflicts_with = "soak")]
    pub(crate) least_domains: usize,
    /// Run the ranks as processes instead of threads; under torchrun or SLURM, this process is one rank
    #[arg(long)]
    pub(crate) processes: bool,
    /// Run only random case K, or with --suite-only, only case K of the fixed suite
    #[arg(long, value_name = "K", value_parser = count64(Count::new(0, MOST_CASES)))]
    pub(crate) case: Option<u64>,
    /// Run the fixed suite only
    #[arg(long)]
    pub(crate) suite_only: bool,
    /// Run N iterations on the same ranks, instead of cases that each start new ranks. Every iteration changes routing,
    /// tokens, mode, capacity and format; some reuse handles of earlier iterations
    #[arg(long, value_name = "N", value_parser = count64(Count::new(1, MOST_ITERATIONS)))]
    #[arg(conflicts_with_all = ["cases", "case", "suite_only"])]
    pub(crate) soak: Option<u64>,

    #[command(flatten)]
    pub(crate) tuning: TuningArgs,
}

/// Parses options of `verify`.
#[cfg(test)]
pub(crate) fn parse(options: &str) -> Result<VerifyArgs, clap::Error> {
    #[derive(clap::Parser)]
    #[command(no_binary_name = true)]
    struct Options {
        #[command(flatten)]
        args: VerifyArgs,
    }
    <Options as clap::Parser>::try_parse_from(options.split_whitespace()).map(|options| options.args)
}
