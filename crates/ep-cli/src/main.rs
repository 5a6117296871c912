//! The program `hybrid-ep`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use ep_cli::Invocation;

fn main() -> ExitCode {
    let arguments = std::env::args_os().skip(1).collect();
    let invocation = Invocation { name: "hybrid-ep".into(), command: Vec::new(), arguments };
    ep_cli::run(&invocation).into()
}
