//! The command line of hybrid-ep, for the program `hybrid-ep` and for whatever else offers it: the Python package does.

#![forbid(unsafe_code)]

mod args;
mod backend;
mod bench;
mod ceiling;
mod doctor;
mod failure;
mod launch;
mod machine;
mod output;
mod plan;
mod reproduce;
mod simulate;
mod units;
mod verify;
mod warm;

use std::ffi::OsString;
use std::io::Write as _;

use crate::args::{Command, CommandLine, DoctorArgs};
use crate::failure::{Failure, Verdict};

/// A command line, and how to start the same again: ranks that are processes are such starts.
#[derive(Debug, Clone)]
pub struct Invocation {
    /// What people type before the arguments; in help, errors and commands to repeat.
    pub name: String,
    /// What is executed before the arguments; empty: the executable of this process.
    pub command: Vec<OsString>,
    /// The arguments, without a name before them.
    pub arguments: Vec<OsString>,
}

/// Parses, resolves, and does what is asked; the exit code. All output goes to this process's stdout and stderr.
pub fn run(invocation: &Invocation) -> u8 {
    let command = match CommandLine::of(invocation) {
        Ok(line) => line.command,
        // Help and version too: the parser knows where each goes, and which code it has.
        Err(answer) => {
            // Where the terminal is gone, nobody listens.
            let _ = answer.print().and_then(|()| std::io::stdout().flush());
            return answer.exit_code().try_into().unwrap_or(failure::code::CALLER);
        }
    };
    let outcome = match command {
        Command::Bench(args) => bench::main(&args, invocation),
        Command::Verify(args) => verify::main(&args, invocation),
        Command::Doctor(args) => examine(&args, invocation),
        Command::Warm(args) => warm::main(&args),
        Command::Plan(args) => plan::main(&args),
        Command::Reproduce(args) => reproduce::main(&args),
        Command::Simulate(args) => simulate::main(&args),
    };
    match outcome {
        Ok(verdict) => verdict.code(),
        Err(failure) => {
            output::error(&invocation.name, &failure);
            failure.code()
        }
    }
}

fn examine(args: &DoctorArgs, invocation: &Invocation) -> Result<Verdict, Failure> {
    let report = doctor::examine(&invocation.name);
    let text = if args.json { output::to_json(&report)? } else { report.render() };
    output::to_stdout(&text)?;
    Ok(Verdict::Right)
}
