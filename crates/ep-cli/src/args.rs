//! What can be asked for on the command line. Meaning and limits are resolved elsewhere.

use std::path::PathBuf;

use clap::error::Error as Answer;
use clap::{Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand, ValueEnum};
use ep_cuda::jit::Arch;

use crate::Invocation;

/// Expert-parallel communication for mixture-of-experts models.
#[derive(Debug, Parser)]
#[command(name = "hybrid-ep", version, after_help = EXIT_CODES)]
pub(crate) struct CommandLine {
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl CommandLine {
    /// What the invocation asks for; or what the parser has to say, help included.
    pub(crate) fn of(invocation: &Invocation) -> Result<Self, Answer> {
        // Subcommands take their names from here, and it stands in usage and help.
        let parser = Self::command().no_binary_name(true).bin_name(&invocation.name);
        let matches = parser.try_get_matches_from(&invocation.arguments)?;
        Self::from_arg_matches(&matches)
    }
}

const EXIT_CODES: &str = "\
Exit codes:
  0  done, and right where it was checked
  1  a result is wrong, or a rank died
  2  the request or the machine does not allow it: one line on stderr says what
  3  another rank died, left or stalled: one line on stderr names it";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Time dispatch and combine, set them against the memory floor, and check every byte
    Bench(BenchArgs),
    /// Compare the operators with their definition: a fixed suite, then random cases
    Verify(VerifyArgs),
    /// Say what this machine offers, what is missing, and what to do about it
    Doctor(DoctorArgs),
    /// Compile every kernel that the CUDA backend may need, so that no start has to
    Warm(WarmArgs),
    /// Choose expert domains across datacenters: times, bytes and memory, beside the alternatives
    Plan(crate::plan::PlanArgs),
    /// Set the paper's tables and figures beside what its own model gives
    Reproduce(crate::reproduce::ReproduceArgs),
    /// Run a schedule event by event, with stragglers and jitter, beside what the planner says
    Simulate(crate::simulate::SimulateArgs),
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// What moves the tokens
    #[arg(long, value_enum, default_value_t)]
    pub(crate) backend: BackendChoice,
    /// Number of ranks [default: 4, or what the launcher says]
    #[arg(long, value_name = "N")]
    pub(crate) ranks: Option<usize>,
    /// Number of NVLink domains that the ranks are split into [default: 2, or 1 for an odd number of ranks and on GPUs]
    #[arg(long, value_name = "N")]
    pub(crate) domains: Option<usize>,
    /// Run ranks as processes instead of threads; one rank of a job under torchrun or SLURM
    #[arg(long)]
    pub(crate) processes: bool,

    /// Tokens of each rank: one number for all, or one per rank, zero allowed
    #[arg(
        long,
        value_name = "N[,N...]",
        action = clap::ArgAction::Set,
        value_delimiter = ',',
        default_value = "4096",
        help_heading = "Workload"
    )]
    pub(crate) tokens: Vec<usize>,
    /// Elements of a token
    #[arg(long, value_name = "N", default_value_t = 2048, help_heading = "Workload")]
    pub(crate) hidden: usize,
    /// Experts in the world
    #[arg(long, value_name = "N", default_value_t = 64, help_heading = "Workload")]
    pub(crate) experts: usize,
    /// Experts of each token
    #[arg(long, value_name = "N", default_value_t = 8, help_heading = "Workload")]
    pub(crate) topk: usize,
    /// What dispatch delivers
    #[arg(long, value_enum, default_value_t, help_heading = "Workload")]
    pub(crate) dtype: Dtype,
    /// Rows to a multiple of which each expert's group is padded
    #[arg(long, value_name = "N", default_value_t = 16, help_heading = "Workload")]
    pub(crate) pad: usize,
    /// Zipf exponent of the experts' popularity; 0 = uniform
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
    /// The one layer of the recorded routing to measure [default: each layer]
    #[arg(long, value_name = "N", requires = "routing", help_heading = "Workload")]
    pub(crate) layer: Option<usize>,

    /// Timed iterations, after 3 for warming up
    #[arg(long, value_name = "N", default_value_t = 12, help_heading = "Measurement")]
    pub(crate) iters: usize,
    /// Seed of tokens and routing
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Measurement")]
    pub(crate) seed: u64,
    /// Bandwidth of each GPU to the others, for the floor on GPUs [default: 340 for H100 and H200, else no floor]
    #[arg(long, value_name = "GB/s", value_parser = bandwidth, help_heading = "Measurement")]
    pub(crate) wire: Option<f64>,
    /// Write everything measured as JSON; `-` = stdout, with the table on stderr
    #[arg(long, value_name = "FILE", help_heading = "Measurement")]
    pub(crate) json: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) tuning: TuningArgs,
}

#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// What is compared with the definition
    #[arg(long, value_enum, default_value_t)]
    pub(crate) backend: BackendChoice,
    /// Random cases after the fixed suite
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub(crate) cases: u64,
    /// Seed of the random cases or of the soak [default: a new one, which is printed]
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// Ranks of a case, at most [default: 8 in a random one; all fixed ones]; of a soak [default: 4]
    #[arg(long, value_name = "MAX")]
    pub(crate) ranks: Option<usize>,
    /// NVLink domains of a random case, at most [default: 4]; of a soak [default: 2, or 1 for an odd number of ranks
    /// and on GPUs]
    #[arg(long, value_name = "MAX")]
    pub(crate) domains: Option<usize>,
    /// Run ranks as processes instead of threads; one rank of a job under torchrun or SLURM
    #[arg(long)]
    pub(crate) processes: bool,
    /// Run this one case again: a random one, or one of the suite with --suite-only
    #[arg(long, value_name = "K")]
    pub(crate) case: Option<u64>,
    /// Run the fixed suite only
    #[arg(long)]
    pub(crate) suite_only: bool,
    /// Instead of cases with ranks of their own: keep the ranks for N iterations, each with another routing, other
    /// tokens, modes, capacities and formats, some on handles of earlier ones
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    #[arg(conflicts_with_all = ["cases", "case", "suite_only"])]
    pub(crate) soak: Option<u64>,

    #[command(flatten)]
    pub(crate) tuning: TuningArgs,
}

/// Settings of the library that are worth an option; its environment variables reach the others.
#[derive(Debug, Clone, Copy, Args)]
#[command(next_help_heading = "Tuning")]
pub(crate) struct TuningArgs {
    /// A wait without any progress for this long is an error that names the peer
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=86_400_000))]
    pub(crate) timeout_ms: Option<u64>,
    /// Worker threads of each rank; 0 = its share of the cores
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=256))]
    pub(crate) workers: Option<u16>,
    /// SMs of each GPU that dispatch and combine run on [default: chosen by the backend]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) sms: Option<u16>,
    /// Set by the launcher: stdin is a pipe whose end is the launcher's end.
    #[arg(long, hide = true)]
    pub(crate) launched: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct WarmArgs {
    /// Compile for these instead of the GPUs that are here; no GPU is needed
    #[arg(long, value_name = "NAME[,NAME...]", value_delimiter = ',', value_parser = architecture)]
    pub(crate) arch: Vec<Arch>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendChoice {
    /// The fastest that this machine has and that serves the NVLink domains asked for
    #[default]
    Auto,
    /// CPU and shared memory
    Host,
    /// GPUs of one NVLink domain
    Cuda,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Dtype {
    /// bf16 in, bf16 out
    #[default]
    Bf16,
    /// bf16 in, quantised inside dispatch, FP8 e4m3 with f32 scales per 128 out
    Fp8,
    /// FP8 e4m3 with f32 scales per 128 in and out
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

/// GB/s that something can be divided by.
fn bandwidth(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err("must be a number of GB/s above zero".into()),
    }
}

/// An architecture that there are kernels for.
fn architecture(text: &str) -> Result<Arch, String> {
    Arch::from_name(text).ok_or_else(|| {
        let names: Vec<&str> = Arch::ALL.into_iter().map(Arch::name).collect();
        format!("there are no kernels for it; there are for {}", names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_names_what_was_typed() {
        let help = |arguments: &[&str]| {
            let arguments = arguments.iter().map(Into::into).collect();
            let name = "python -m hybrid_ep".to_owned();
            CommandLine::of(&Invocation { name, command: Vec::new(), arguments }).unwrap_err()
        };
        assert!(help(&["--help"]).to_string().contains("Usage: python -m hybrid_ep <COMMAND>"));
        let of_bench = help(&["bench", "--help"]);
        assert!(of_bench.to_string().contains("Usage: python -m hybrid_ep bench [OPTIONS]"), "{of_bench}");
        assert_eq!(of_bench.exit_code(), 0);
        let wrong = help(&["bench", "--tokens", "many"]);
        assert_eq!(wrong.exit_code(), 2);
        assert!(help(&["bench", "x"]).to_string().contains("Usage: python -m hybrid_ep bench [OPTIONS]"));
    }

    #[test]
    fn the_command_line_is_consistent() {
        CommandLine::command().debug_assert();
    }

    #[test]
    fn a_trace_replaces_the_drawn_workload() {
        let parse = |line: &str| CommandLine::try_parse_from(line.split(' '));
        assert!(parse("hybrid-ep bench --routing trace.safetensors --layer 2 --hidden 256").is_ok());
        for option in ["--tokens 5", "--experts 8", "--topk 2", "--skew 1"] {
            let error = parse(&format!("hybrid-ep bench --routing trace.safetensors {option}")).unwrap_err();
            assert_eq!(error.kind(), clap::error::ErrorKind::ArgumentConflict);
        }
        assert!(parse("hybrid-ep bench --layer 2").is_err());
        assert!(parse("hybrid-ep bench --tokens 5,6").is_ok());
        assert!(parse("hybrid-ep bench --tokens 5 --tokens 6").is_err());
    }

    #[test]
    fn gpus_have_options_of_their_own() {
        let parse = |line: &str| match CommandLine::try_parse_from(line.split(' ')).ok()?.command {
            Command::Bench(args) => Some((args.backend, args.tuning.sms, args.wire)),
            _ => None,
        };
        assert_eq!(parse("hybrid-ep bench"), Some((BackendChoice::Auto, None, None)));
        let given = parse("hybrid-ep bench --backend cuda --sms 24 --wire 337.5");
        assert_eq!(given, Some((BackendChoice::Cuda, Some(24), Some(337.5))));
        for option in
            ["--sms 0", "--sms 1025", "--wire 0", "--wire -1", "--wire nan", "--wire inf", "--wire x"]
        {
            assert_eq!(parse(&format!("hybrid-ep bench {option}")), None, "{option}");
        }
    }
}
