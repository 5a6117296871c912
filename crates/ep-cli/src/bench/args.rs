//! The options of `bench`.

use std::fmt;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::common::backend::BackendChoice;
use crate::common::numbers::{ANY, Number, count, count64, number};
use crate::common::tuning::TuningArgs;

/// Range of `--wire` in GB/s; it contains the bandwidth of every real link.
const WIRE_GB_PER_S: Number = Number::new(1e-3, 1e6);

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Backend that moves the tokens
    #[arg(long, value_enum, default_value_t)]
    pub(crate) backend: BackendChoice,
    /// Number of ranks [default: 4, or the launcher's WORLD_SIZE]
    #[arg(long, value_name = "N", value_parser = count(ANY))]
    pub(crate) ranks: Option<usize>,
    /// Number of NVLink domains; each has the same number of ranks [default: 2; 1 on GPUs or for an odd number of
    /// ranks]
    #[arg(long, value_name = "N", value_parser = count(ANY))]
    pub(crate) domains: Option<usize>,
    /// Run the ranks as processes instead of threads; under torchrun or SLURM, this process is one rank
    #[arg(long)]
    pub(crate) processes: bool,

    /// Tokens of each rank; 0 is allowed. A list such as 1,128,4096 measures each number, and 100+0+4096+1 gives one number
    /// per rank
    #[arg(
        long,
        value_name = "N[+N...][,...]",
        action = clap::ArgAction::Set,
        value_delimiter = ',',
        default_value = "4096",
        value_parser = TokenCounts::parse,
        help_heading = "Workload"
    )]
    pub(crate) tokens: Vec<TokenCounts>,
    /// Hidden size: elements of a token
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = count(ANY), help_heading = "Workload")]
    pub(crate) hidden: usize,
    /// Number of experts on all ranks together; at most 65,536
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = count(ANY), help_heading = "Workload")]
    pub(crate) experts: usize,
    /// Number of experts that each token is routed to
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = count(ANY), help_heading = "Workload")]
    pub(crate) topk: usize,
    /// Number format of the tokens that dispatch takes and delivers
    #[arg(long, value_enum, default_value_t, help_heading = "Workload")]
    pub(crate) dtype: Dtype,
    /// Arrangement of the received rows; plain,permuted measures both
    #[arg(
        long,
        value_enum,
        value_name = "MODE",
        action = clap::ArgAction::Set,
        value_delimiter = ',',
        default_value = "permuted",
        help_heading = "Workload"
    )]
    pub(crate) mode: Vec<Mode>,
    /// Pad the rows of each expert to a multiple of N, in permuted mode [default: 16]
    #[arg(long, value_name = "N", value_parser = count(ANY), help_heading = "Workload")]
    pub(crate) pad: Option<usize>,
    /// Zipf exponent of the experts' popularity, from 0 (uniform) to 100
    #[arg(long, value_name = "S", default_value_t = 0.0, help_heading = "Workload")]
    pub(crate) skew: f64,
    /// Take tokens, experts and top-k from a recorded routing (.safetensors)
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["tokens", "experts", "topk", "skew"],
        help_heading = "Workload"
    )]
    pub(crate) routing: Option<PathBuf>,
    /// Measure only layer N of the recorded routing, counted from 0 [default: all layers]
    #[arg(long, value_name = "N", requires = "routing", value_parser = count(ANY), help_heading = "Workload")]
    pub(crate) layer: Option<usize>,

    /// Timed iterations, after 3 warm-up iterations; at most 1,000,000
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = count(ANY), help_heading = "Measurement")]
    pub(crate) iters: usize,
    /// Seed of the random tokens and of the random routing
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count64(ANY), help_heading = "Measurement")]
    pub(crate) seed: u64,
    /// Bandwidth from each GPU to the others, for the floor on GPUs [default: 340 on H100 and H200, no floor on others]
    #[arg(long, value_name = "GB/s", value_parser = number(WIRE_GB_PER_S), help_heading = "Measurement")]
    pub(crate) wire: Option<f64>,
    /// Write all results as JSON; `-` = stdout, and the table goes to stderr
    #[arg(long, value_name = "FILE", help_heading = "Measurement")]
    pub(crate) json: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) tuning: TuningArgs,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Dtype {
    /// bf16 in, bf16 out
    #[default]
    Bf16,
    /// bf16 in, FP8 e4m3 with one f32 scale per 128 elements out: dispatch quantises
    Fp8,
    /// FP8 e4m3 with one f32 scale per 128 elements, in and out
    Fp8Given,
}

impl Dtype {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            Self::Fp8Given => "fp8-given",
        }
    }
}

/// A value of `--mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    /// One row per token and rank, with one probability for each expert of the rank
    Plain,
    /// One row per token and expert, grouped by expert and padded
    Permuted,
}

/// Numbers of tokens of one run: one for all ranks, or one per rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TokenCounts(Vec<usize>);

impl TokenCounts {
    fn parse(text: &str) -> Result<Self, String> {
        text.split('+').map(count(ANY)).collect::<Result<_, _>>().map(Self)
    }

    /// The number of tokens of each rank. The error describes a list whose length does not fit the number of ranks.
    pub(crate) fn per_rank(&self, ranks: usize) -> Result<Vec<usize>, String> {
        match self.0[..] {
            [tokens] => Ok(vec![tokens; ranks]),
            _ if self.0.len() == ranks => Ok(self.0.clone()),
            _ => Err(format!(
                "{self} has {} numbers for {ranks} ranks; give one for all, or one per rank",
                self.0.len()
            )),
        }
    }

    /// The shortest form of the numbers of all ranks.
    pub(crate) fn of(per_rank: Vec<usize>) -> Self {
        match per_rank[..] {
            [first, ref rest @ ..] if rest.iter().all(|&tokens| tokens == first) => Self(vec![first]),
            _ => Self(per_rank),
        }
    }
}

impl fmt::Display for TokenCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.iter().map(ToString::to_string).collect::<Vec<_>>().join("+"))
    }
}

/// Parses options of `bench`.
#[cfg(test)]
pub(crate) fn parse(options: &str) -> Result<BenchArgs, clap::Error> {
    #[derive(clap::Parser)]
    #[command(no_binary_name = true)]
    struct Options {
        #[command(flatten)]
        args: BenchArgs,
    }
    <Options as clap::Parser>::try_parse_from(options.split_whitespace()).map(|options| options.args)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recorded_routing_conflicts_with_the_options_of_a_drawn_one() {
        assert!(parse("--routing trace.safetensors --layer 2 --hidden 256").is_ok());
        for option in ["--tokens 5", "--experts 8", "--topk 2", "--skew 1"] {
            let error = parse(&format!("--routing trace.safetensors {option}")).unwrap_err();
            assert_eq!(error.kind(), clap::error::ErrorKind::ArgumentConflict);
        }
        assert!(parse("--layer 2").is_err());
        assert!(parse("--tokens 5 --tokens 6").is_err());
    }

    #[test]
    fn a_list_of_tokens_is_a_list_of_runs_and_a_plus_separates_ranks() {
        let per_rank = |options: &str| -> Vec<Result<Vec<usize>, String>> {
            parse(options).unwrap().tokens.iter().map(|tokens| tokens.per_rank(3)).collect()
        };
        assert_eq!(per_rank(""), [Ok(vec![4096; 3])]);
        assert_eq!(per_rank("--tokens 5,6"), [Ok(vec![5; 3]), Ok(vec![6; 3])]);
        assert_eq!(per_rank("--tokens 128,100+0+1"), [Ok(vec![128; 3]), Ok(vec![100, 0, 1])]);
        let wrong = per_rank("--tokens 7+8").remove(0).unwrap_err();
        assert_eq!(wrong, "7+8 has 2 numbers for 3 ranks; give one for all, or one per rank");
        for text in ["5+", "+5", "5,", "5++6", "a+5", "-1+5", "5 + 6", "5;6", "18446744073709551616+1"] {
            assert!(TokenCounts::parse(text).is_err(), "{text}");
        }
        assert_eq!(TokenCounts::of(vec![5; 3]).to_string(), "5");
        assert_eq!(TokenCounts::of(vec![5, 0, 5]).to_string(), "5+0+5");
    }

    #[test]
    fn modes_are_a_list() {
        let modes = |options: &str| parse(options).ok().map(|args| args.mode);
        assert_eq!(modes(""), Some(vec![Mode::Permuted]));
        assert_eq!(modes("--mode plain"), Some(vec![Mode::Plain]));
        assert_eq!(modes("--mode plain,permuted"), Some(vec![Mode::Plain, Mode::Permuted]));
        for wrong in ["--mode both", "--mode plain,", "--mode plain --mode permuted"] {
            assert_eq!(modes(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn options_for_gpus_are_parsed_and_bounded() {
        let parse =
            |options: &str| parse(options).ok().map(|args| (args.backend, args.tuning.sms, args.wire));
        assert_eq!(parse(""), Some((BackendChoice::Auto, vec![], None)));
        let given = parse("--backend cuda --sms 24 --wire 337.5");
        assert_eq!(given, Some((BackendChoice::Cuda, vec![24], Some(337.5))));
        assert_eq!(parse("--sms 8,16,32").unwrap().1, [8, 16, 32]);
        for option in [
            "--sms 0",
            "--sms 1025",
            "--sms 8,0",
            "--sms 8,",
            "--wire 0",
            "--wire -1",
            "--wire nan",
            "--wire inf",
            "--wire x",
        ] {
            assert_eq!(parse(option), None, "{option}");
        }
    }
}
