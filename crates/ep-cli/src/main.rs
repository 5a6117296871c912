//! The command line of hybrid-ep: parse, resolve, then one match.

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

use std::process::ExitCode;

use clap::Parser as _;

use crate::args::{Command, CommandLine, DoctorArgs};
use crate::failure::{Failure, Verdict};

fn main() -> ExitCode {
    let outcome = match CommandLine::parse().command {
        Command::Bench(args) => bench::main(&args),
        Command::Verify(args) => verify::main(&args),
        Command::Doctor(args) => examine(&args),
        Command::Plan(args) => plan::main(&args),
        Command::Reproduce(args) => reproduce::main(&args),
        Command::Simulate(args) => simulate::main(&args),
    };
    match outcome {
        Ok(verdict) => verdict.into(),
        Err(failure) => {
            output::error(&failure);
            failure.code().into()
        }
    }
}

fn examine(args: &DoctorArgs) -> Result<Verdict, Failure> {
    let report = doctor::examine();
    let text = if args.json { output::to_json(&report)? } else { report.render() };
    output::to_stdout(&text)?;
    Ok(Verdict::Right)
}
