//! The figures of `calibrate` as tables, as JSON and as a cluster file.

use std::fmt::Write as _;
use std::time::Duration;

use ep_plan::cluster::ClusterDescription;
use ep_plan::input::cluster_to_toml;
use serde::Serialize;

use super::host::Host;
use super::links::Direction;
use crate::common::table::table;
use crate::common::units;

#[derive(Debug, Serialize)]
pub(super) struct Report {
    version: &'static str,
    hosts: Vec<Host>,
    directions: Vec<Direction>,
    /// The stated rate of the links.
    link_gbit_per_s: Option<f64>,
    cluster: ClusterDescription,
}

const DEFINITION: &str = "\
stream = payload of a continuous stream divided by time; columns of sizes = payload of messages of this size divided by time, \
where each message waits for the acknowledgement of the one before; round trip = median time of one byte and its echo; \
memory = bytes read and written while copying; codec = bytes of f32 weights encoded and decoded as int8; GEMM = products of \
f32 matrices. The figures of a host are those of its CPUs, not of GPUs";

impl Report {
    pub(super) fn new(
        hosts: Vec<Host>,
        directions: Vec<Direction>,
        link_gbit_per_s: Option<f64>,
        cluster: ClusterDescription,
    ) -> Self {
        Self { version: env!("CARGO_PKG_VERSION"), hosts, directions, link_gbit_per_s, cluster }
    }

    /// Names from outside: a word such as `inf` in them is not a number.
    pub(super) fn names(&self) -> Vec<&str> {
        let hosts = self.hosts.iter().flat_map(|host| [&*host.name, &*host.cpu_model]);
        hosts.chain([&*self.cluster.gpu.name]).collect()
    }

    pub(super) fn render(&self) -> String {
        let wan = &self.cluster.levels[0];
        let mut out = format!("{}\n\n{}\n\n", self.links(), self.of_hosts());
        let rates: Vec<String> = match &wan.site_bandwidth_gbit_per_s[..] {
            [] => vec![rate(wan.bandwidth_gbit_per_s)],
            rates => rates.iter().map(|&gbit| rate(gbit)).collect(),
        };
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "Cluster: {} hosts, bandwidth {} with efficiency {} over {}, round trip {}.",
            self.hosts.len(),
            rates.join(", "),
            wan.efficiency,
            units::counted(wan.flows, "connection"),
            units::time(Duration::try_from_secs_f64(wan.round_trip_s).unwrap_or(Duration::MAX)),
        );
        if let Some(stated) = self.link_gbit_per_s {
            let most = self.directions.iter().map(|direction| direction.best().0).fold(0.0, f64::max);
            if most > 1.02 * stated {
                let _ = writeln!(
                    out,
                    "The measured {} exceeds the stated {}: check --link.",
                    rate(most),
                    rate(stated)
                );
            }
        }
        let _ = writeln!(out, "{DEFINITION}.");
        out
    }

    /// The cluster as a file for `plan --cluster`.
    pub(super) fn file(&self) -> String {
        format!(
            "# Written by `hybrid-ep calibrate` {}. One member of 'wan' is one host, and one GPU in the plan.\n\
             # Not measured: alpha, loss, links inside a host. The figures of [cluster.gpu] are those of CPUs; replace \
             them by\n# those of your GPUs, and add levels for nodes and GPUs (docs/planner.md, \"Measure a cluster\").\n{}",
            self.version,
            cluster_to_toml(&self.cluster)
        )
    }

    fn links(&self) -> String {
        let sizes: Vec<String> = self
            .directions
            .first()
            .and_then(|direction| direction.flows.first())
            .map(|flows| flows.messages.iter().map(|message| units::bytes(message.message_bytes)).collect())
            .unwrap_or_default();
        let rows = self.directions.iter().flat_map(|direction| {
            direction.flows.iter().map(move |flows| {
                let mut row = vec![
                    format!("{} to {}", direction.from, direction.to),
                    units::time(direction.round_trip().unwrap_or(Duration::MAX)),
                    flows.flows.to_string(),
                    rate(flows.stream_gbit_per_s),
                ];
                row.extend(flows.messages.iter().map(|message| rate(message.gbit_per_s)));
                row
            })
        });
        let header = ["ranks", "round trip", "connections", "stream"];
        let header: Vec<&str> = header.into_iter().chain(sizes.iter().map(String::as_str)).collect();
        table(&header, rows, 1)
    }

    fn of_hosts(&self) -> String {
        let gigabytes = |figure: f64| format!("{}/s", units::bytes((figure * 1e9) as u64));
        let rows = self.hosts.iter().map(|host| {
            vec![
                format!("{} ({})", host.rank, host.name),
                host.cores.to_string(),
                format!("{:.1} GFLOP/s", host.gflop_per_s),
                gigabytes(host.memory_gb_per_s),
                gigabytes(host.encode_gb_per_s),
                gigabytes(host.decode_gb_per_s),
            ]
        });
        table(&["rank (host)", "cores", "GEMM", "memory", "codec: encode", "decode"], rows, 1)
    }
}

/// Formats a rate: in Gbit/s if it is at least 1 Gbit/s, otherwise in Mbit/s.
fn rate(gbit_per_s: f64) -> String {
    if gbit_per_s >= 1.0 {
        format!("{gbit_per_s:.2} Gbit/s")
    } else {
        format!("{:.2} Mbit/s", gbit_per_s * 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_the_shorter_unit() {
        assert_eq!(
            [0.0956, 0.999, 1.0, 12.345].map(rate),
            ["95.60 Mbit/s", "999.00 Mbit/s", "1.00 Gbit/s", "12.35 Gbit/s"]
        );
    }
}
