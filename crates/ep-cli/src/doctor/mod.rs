//! `hybrid-ep doctor`: reports what this machine offers, what is missing, and how to get it.
//!
//! The facts come from files, the environment and system calls. No other program is run, so that the report works on a
//! machine where programs are broken. Only the GPU driver and libfabric are queried, on threads with a time limit. A fact
//! that cannot be read is reported as unknown, with the reason.

mod backend;
mod cgroup;
mod check;
mod cpu;
mod cuda;
mod fabric;
mod fact;
mod gpu;
mod interface;
mod launch;
mod library;
mod memory;
mod network;
mod nics;
mod parse;
mod pci;
mod probe;
mod rdma;
mod render;
mod report;
mod system;
// The fake machines of the tests have file names with colons (PCI addresses), which only Unix allows.
#[cfg(test)]
#[cfg(unix)]
mod tests;

use clap::Args;

use self::{cuda::Cuda, probe::Probe, report::DoctorReport};
use crate::common::failure::{Failure, Verdict};
use crate::common::invocation::Invocation;
use crate::common::output;

/// The options of `doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn main(args: &DoctorArgs, invocation: &Invocation) -> Result<Verdict, Failure> {
    let report = examine(&invocation.name);
    if args.json {
        output::to_stdout(output::Checked::json(&report)?.as_str())?;
    } else {
        output::to_stdout(&render::render(&report))?;
    }
    Ok(Verdict::Right)
}

/// Examines this machine. `program` is the name that users type; the verdict suggests a command with it.
fn examine(program: &str) -> DoctorReport {
    DoctorReport::of(&Probe::of_this_machine(), Cuda::of_this_machine(), fabric::providers(), program)
}
