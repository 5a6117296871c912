//! `hybrid-ep calibrate`: measures hosts and the network between them, and writes a cluster that `plan --cluster` reads.
//!
//! Each host runs one rank. [`links`] and [`host`] measure, [`cluster`] turns the figures into a cluster, and [`report`]
//! shows them.

mod cluster;
mod host;
mod links;
mod report;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use ep::config::LaunchEnv;
use ep::join::{Rendezvous as _, TcpRendezvous};
use ep_plan::input::Kind;
use ep_plan::limits;

use crate::common::agree::JobOptions;
use crate::common::failure::{Failure, Verdict};
use crate::common::invocation::Invocation;
use crate::common::launch;
use crate::common::numbers::{ANY, Count, count, count64};
use crate::common::output::{self, Checked, Target, check_apart};
use crate::common::role::{self, ProcessRole};
use crate::common::tuning::TuningArgs;

/// Range of the number of connections between two hosts.
const FLOWS: Count = Count::new(1, 256);
/// Range of the bytes of a message.
const MESSAGE: Count = Count::new(1, 1 << 30);

#[derive(Debug, Args)]
pub(crate) struct CalibrateArgs {
    /// Number of hosts, with one rank each [default: 2, or the launcher's WORLD_SIZE]
    #[arg(long, value_name = "N", value_parser = count(ANY))]
    ranks: Option<usize>,
    /// Sizes of messages, bytes; each message waits for the acknowledgement of the one before
    #[arg(long, value_name = "BYTES[,BYTES...]", value_delimiter = ',', default_value = "65536,1048576,16777216", value_parser = count64(MESSAGE))]
    sizes: Vec<u64>,
    /// Numbers of TCP connections between two hosts
    #[arg(long, value_name = "N[,N...]", value_delimiter = ',', default_value = "1,4,16", value_parser = count(FLOWS))]
    flows: Vec<usize>,
    /// Time of each measurement in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    duration_ms: u32,
    /// Stated rate of the link, such as 100Mbit/s: the file has this rate, and the measured rate divided by it as
    /// `efficiency`
    #[arg(long, value_name = "RATE")]
    link: Option<String>,
    /// Write a cluster for `hybrid-ep plan --cluster FILE`; `-` = stdout
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// Write the figures as JSON; `-` = stdout, and the table goes to stderr
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    tuning: TuningArgs,
}

pub(crate) fn main(args: &CalibrateArgs, invocation: &Invocation) -> Result<Verdict, Failure> {
    if args.tuning.launched {
        launch::end_with_launcher();
    }
    let link = args.link.as_ref().map(|text| {
        Kind::LinkRate
            .parse(text, limits::LINK_GBIT_PER_S)
            .map_err(|what| Failure::request(format!("--link {text}: {what}")))
    });
    let link = link.transpose()?;
    let write = Target::resolve("--write", args.write.as_deref())?;
    let json = Target::resolve("--json", args.json.as_deref())?;
    check_apart(&[&write, &json])?;
    let role = ProcessRole::resolve(true)?;
    let alone = !matches!(role, ProcessRole::Rank(_));
    let ranks = role::ranks(args.ranks.or(Some(2).filter(|_| alone)), &role)?;
    if ranks < 2 {
        return Err(Failure::request(format!("--ranks {ranks}: a link needs at least 2 hosts")));
    }
    match role {
        ProcessRole::Rank(env) => as_rank(args, &env, link, [&write, &json]),
        _ => launch::run(invocation, ranks, &args.tuning.config()?),
    }
}

fn as_rank(
    args: &CalibrateArgs,
    env: &LaunchEnv,
    link: Option<f64>,
    [write, json]: [&Target; 2],
) -> Result<Verdict, Failure> {
    let config = args.tuning.config()?;
    let mut flows = args.flows.clone();
    flows.sort_unstable();
    flows.dedup();
    let duration = Duration::from_millis(args.duration_ms.into());
    let mut meet = TcpRendezvous::launched(env, &config)?;
    launch::as_rank(&mut meet, |meet| {
        let options = JobOptions::of("calibrate")
            .with("--sizes", format!("{:?}", args.sizes))
            .with("--flows", format!("{flows:?}"))
            .with("--duration-ms", args.duration_ms);
        options.check(meet)?;
        // Measure one host after the other, because ranks may share a machine.
        let mut hosts = Vec::new();
        for rank in 0..meet.ranks() as u32 {
            let own = (meet.rank().0 == rank).then(|| host::measure(rank, duration)).transpose()?;
            let blob =
                own.map_or(Ok(Vec::new()), |own| serde_json::to_vec(&own)).map_err(Failure::request)?;
            let all = meet.all_gather(&blob)?;
            let found = all.get(rank as usize).map(Vec::as_slice).unwrap_or_default();
            hosts.push(serde_json::from_slice(found).map_err(Failure::request)?);
        }
        let request = links::Request { flows: &flows, sizes: &args.sizes, duration };
        let directions = links::all(meet, &config, &request)?;
        if meet.rank().index() == 0 {
            let cluster = cluster::of(&hosts, &directions, link)?;
            let report = report::Report::new(hosts, directions, link, cluster);
            let (figures, file) = (Checked::json(&report)?, report.file());
            let names = report.names();
            let file = write.is_wanted().then(|| Checked::text(file, &names)).transpose()?;
            output::print_beside(&Checked::text(report.render(), &names)?, &[write, json])?;
            json.write(&figures)?;
            file.map_or(Ok(()), |file| write.write(&file))?;
        }
        Ok(Verdict::Right)
    })
}
