//! `hybrid-ep rail`: latency and bandwidth of an engine between rank 0 and each other rank, without operators.
//!
//! [`measure`] is the part of each rank; [`report`] renders what rank 0 has measured.

mod measure;
mod report;

use std::path::PathBuf;

use clap::Args;
use ep::Config;
use ep::config::LaunchEnv;
use ep::join::{Rendezvous as _, TcpRendezvous};
use ep_host::RailProbe;

use crate::common::agree::JobOptions;
use crate::common::failure::{Failure, Verdict};
use crate::common::invocation::Invocation;
use crate::common::launch;
use crate::common::numbers::{ANY, count};
use crate::common::output::{self, Checked, Target};
use crate::common::role::{self, ProcessRole};
use crate::common::tuning::TuningArgs;

#[derive(Debug, Args)]
#[command(mut_arg("transport", |arg| arg.help(
    "Engine to measure: a provider of libfabric such as tcp or shm [default: HYBRID_EP_TRANSPORT, or tcp]"
)))]
pub(crate) struct RailArgs {
    /// Number of ranks [default: 2, or the launcher's WORLD_SIZE]
    #[arg(long, value_name = "N", value_parser = count(ANY))]
    ranks: Option<usize>,
    /// Sizes of the messages, bytes, each at most 4 MiB
    #[arg(
        long,
        value_name = "BYTES[,BYTES...]",
        value_delimiter = ',',
        default_value = "0,64,1024,4096,16384,65536,131072,1048576,4194304",
        value_parser = count(ANY)
    )]
    sizes: Vec<usize>,
    /// Time of each measurement in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    duration_ms: u32,
    /// Write the figures as JSON; `-` = stdout, and the table goes to stderr
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// The default of --transport differs from that of the other commands: see [`RailArgs::config`].
    #[command(flatten)]
    tuning: TuningArgs,
}

impl RailArgs {
    /// The settings. The default engine is `tcp`, because the library's default, `loopback`, copies inside one machine.
    fn config(&self) -> ep::Result<Config> {
        let mut config = self.tuning.config()?;
        let transport = &mut config.host.transport;
        let is_named = self.tuning.transport.is_some()
            || std::env::var_os("HYBRID_EP_TRANSPORT").is_some_and(|name| !name.is_empty());
        if !is_named && transport.is_loopback() {
            transport.engine = "tcp".into();
        }
        Ok(config)
    }
}

pub(crate) fn main(args: &RailArgs, invocation: &Invocation) -> Result<Verdict, Failure> {
    if args.tuning.launched {
        launch::end_with_launcher();
    }
    if let Some(&long) = args.sizes.iter().find(|&&bytes| bytes > RailProbe::MAX_BYTES) {
        let most = RailProbe::MAX_BYTES;
        return Err(Failure::request(format!("--sizes {long}: a message has at most {most} bytes")));
    }
    let transport = args.config()?.host.transport;
    if transport.maps_windows() {
        let problem = "copies inside one machine; measure a provider of libfabric, such as tcp";
        return Err(Failure::request(format!("transport {}: {problem}", transport.engine)));
    }
    let json = Target::resolve("--json", args.json.as_deref())?;
    let role = ProcessRole::resolve(true)?;
    let ranks = role::ranks(args.ranks.or(Some(2).filter(|_| !matches!(role, ProcessRole::Rank(_)))), &role)?;
    if ranks < 2 {
        return Err(Failure::request(format!("--ranks {ranks}: a rail needs at least 2 ranks")));
    }
    match role {
        ProcessRole::Rank(env) => as_rank(args, &env, &json),
        _ => launch::run(invocation, ranks, &args.config()?),
    }
}

fn as_rank(args: &RailArgs, env: &LaunchEnv, json: &Target) -> Result<Verdict, Failure> {
    let config = args.config()?;
    let mut meet = TcpRendezvous::launched(env, &config)?;
    launch::as_rank(&mut meet, |meet| {
        let options = JobOptions::of("rail")
            .with("--sizes", format!("{:?}", args.sizes))
            .with("--duration-ms", args.duration_ms)
            .with("--transport", &config.host.transport.engine);
        options.check(meet)?;
        let probe = RailProbe::join(meet, &config)?;
        let pairs = measure::all(&probe, meet, &args.sizes, args.duration_ms)?;
        if meet.rank().index() == 0 {
            let report = report::Report::new(&probe, pairs);
            let written = Checked::json(&report)?;
            output::print_beside(&Checked::text(report.render(), &[])?, &[json])?;
            json.write(&written)?;
        }
        Ok(Verdict::Right)
    })
}
