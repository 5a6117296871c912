//! The command line of hybrid-ep, shared by the program `hybrid-ep` and the Python package.

#![forbid(unsafe_code)]

mod args;
mod bench;
mod calibrate;
mod common;
mod doctor;
mod plan;
mod planner;
mod rail;
mod reproduce;
mod simulate;
mod verify;
mod warm;

use std::io::Write as _;

use crate::args::{Command, CommandLine};
pub use crate::common::invocation::Invocation;
use crate::common::{failure, output};

/// Runs a command line and returns its exit code. All output goes to this process's stdout and stderr.
pub fn run(invocation: &Invocation) -> u8 {
    let command = match CommandLine::of(invocation) {
        Ok(line) => line.command,
        // Help and version: the parser formats them for the terminal.
        Err(answer) if !answer.use_stderr() => {
            // A closed pipe (`| head`) is not an error.
            let _ = answer.print().and_then(|()| std::io::stdout().flush());
            return failure::code::RIGHT;
        }
        Err(answer) => {
            output::error(&invocation.name, &args::refusal(&answer, invocation));
            return failure::code::CALLER;
        }
    };
    let outcome = match command {
        Command::Bench(args) => bench::main(&args, invocation),
        Command::Verify(args) => verify::main(&args, invocation),
        Command::Doctor(args) => doctor::main(&args, invocation),
        Command::Rail(args) => rail::main(&args, invocation),
        Command::Calibrate(args) => calibrate::main(&args, invocation),
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
