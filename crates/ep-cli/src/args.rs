//! The command line of the program. Each command defines its own options.

use clap::error::Error as Answer;
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

use crate::common::failure::Failure;
use crate::common::invocation::Invocation;

/// Expert-parallel communication for mixture-of-experts models.
#[derive(Debug, Parser)]
#[command(name = "hybrid-ep", version, after_help = EXIT_CODES)]
pub(crate) struct CommandLine {
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl CommandLine {
    /// Parses the arguments. The error is the parser's answer, which may be the help or the version.
    pub(crate) fn of(invocation: &Invocation) -> Result<Self, Answer> {
        // Usage and help show this name, also in front of the subcommands' names.
        let parser = Self::command().no_binary_name(true).bin_name(&invocation.name);
        let matches = parser.try_get_matches_from(&invocation.arguments)?;
        Self::from_arg_matches(&matches)
    }
}

/// The parser's error as one line, without the usage that the parser prints below it: the help shows the usage.
pub(crate) fn refusal(answer: &Answer, invocation: &Invocation) -> Failure {
    use clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand as NoCommand;
    let known = |argument: &&str| CommandLine::command().find_subcommand(argument).is_some();
    let command = invocation.arguments.iter().filter_map(|argument| argument.to_str()).find(known);
    let help = [&*invocation.name].into_iter().chain(command).collect::<Vec<_>>().join(" ");
    let text = answer.render().to_string();
    let said = match answer.kind() {
        NoCommand => "no command given".into(),
        _ => {
            let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
            let lines = lines.filter(|line| !line.is_empty() && !line.starts_with("For more information"));
            lines.collect::<Vec<_>>().join(" ").replace(" tip: ", "; ")
        }
    };
    let said = said.strip_prefix("error: ").unwrap_or(&said);
    Failure::request(format!("{said}; see `{help} --help`"))
}

const EXIT_CODES: &str = "\
Exit codes:
  0  success: everything that was checked is correct
  1  a result is wrong, or a rank that this command started died
  2  the request is invalid, or this machine cannot run it: one line on stderr gives the reason
  3  another rank died, left or stalled: one line on stderr names it";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Time dispatch and combine, compare the times with the hardware's floor, and check every byte
    Bench(crate::bench::BenchArgs),
    /// Compare the operators' results with the reference implementation: a fixed suite, then random cases
    Verify(crate::verify::VerifyArgs),
    /// Report what this machine offers, what is missing, and how to get it
    Doctor(crate::doctor::DoctorArgs),
    /// Measure latency and bandwidth between ranks over an engine such as libfabric's tcp, without operators
    Rail(crate::rail::RailArgs),
    /// Measure hosts and the network between them, and write a cluster for `plan`
    Calibrate(crate::calibrate::CalibrateArgs),
    /// Compile all kernels of the CUDA backend into the kernel cache, ahead of the first start
    Warm(crate::warm::WarmArgs),
    /// Choose expert domains across datacenters: predicted times, bytes and memory, and the alternatives
    Plan(crate::plan::PlanArgs),
    /// Recompute tables and figures of the HybridEP paper (arXiv 2510.19470) and compare them with the printed ones
    Reproduce(crate::reproduce::ReproduceArgs),
    /// Simulate a schedule event by event, with stragglers and jitter, and compare it with the planner's prediction
    Simulate(crate::simulate::SimulateArgs),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_shows_the_name_of_the_invocation() {
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
}
