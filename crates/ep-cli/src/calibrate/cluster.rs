//! The cluster that a calibration found: one level, whose members are the hosts.

use ep_plan::cluster::{Cluster, ClusterDescription, GpuDescription, LevelDescription, Sharing};

use super::host::Host;
use super::links::Direction;
use crate::common::failure::Failure;

/// The cluster. `link` is the stated rate of the links in Gbit/s.
///
/// The rate of a host is the slowest of its directions, each with its best number of connections: an exchange waits for
/// its slowest part. Each figure of the GPU is the lowest of all hosts.
///
/// # Errors
/// The reason why the figures are outside the planner's bounds.
pub(super) fn of(
    hosts: &[Host],
    directions: &[Direction],
    link: Option<f64>,
) -> Result<ClusterDescription, Failure> {
    let rate_of = |rank: u32| {
        let own = directions.iter().filter(|direction| direction.from == rank || direction.to == rank);
        own.map(|direction| direction.best().0).fold(f64::INFINITY, f64::min)
    };
    let rates: Vec<f64> = hosts.iter().map(|host| rounded(rate_of(host.rank))).collect();
    let slowest = rates.iter().copied().fold(f64::INFINITY, f64::min);
    let round_trip_us = directions.iter().map(|direction| direction.round_trip_us).fold(0.0, f64::max);
    let mut wan = LevelDescription {
        name: "wan".into(),
        scaling_factor: hosts.len(),
        site_members: Vec::new(),
        alpha_s: 0.0,
        round_trip_s: rounded(round_trip_us) / 1e6,
        bandwidth_gbit_per_s: slowest,
        site_bandwidth_gbit_per_s: Vec::new(),
        sharing: Sharing::PerMember,
        efficiency: 1.0,
        loss: 0.0,
        flows: directions.iter().map(|direction| direction.best().1).max().unwrap_or(1),
    };
    match link {
        Some(stated) => {
            wan.bandwidth_gbit_per_s = stated;
            wan.efficiency = rounded(slowest / stated).min(1.0);
        }
        None => wan.set_bandwidths(&rates),
    }
    let least = |figure: fn(&Host) -> f64| rounded(hosts.iter().map(figure).fold(f64::INFINITY, f64::min));
    let cpu = hosts.first().map_or("", |host| &host.cpu_model);
    let cluster = ClusterDescription {
        name: format!("{} hosts, measured", hosts.len()),
        levels: vec![wan],
        gpu: GpuDescription {
            name: format!("CPU {cpu}"),
            sustained_tflops: least(|host| host.gflop_per_s) / 1e3,
            memory_gb: least(|host| host.memory_gb),
            hbm_gb_per_s: least(|host| host.memory_gb_per_s),
        },
    };
    Cluster::try_from(cluster.clone())
        .map(|_| cluster)
        .map_err(|error| Failure::request(format!("the measured figures are not a valid cluster: {error}")))
}

/// Rounds to three significant digits, since measurements are not more precise.
fn rounded(value: f64) -> f64 {
    format!("{value:.2e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::super::links::Flows;
    use super::*;

    fn host(rank: u32, gflop_per_s: f64) -> Host {
        Host {
            rank,
            name: "host".into(),
            cpu_model: "CPU".into(),
            cores: 2,
            memory_gb: 8.0,
            memory_gb_per_s: 10.0,
            encode_gb_per_s: 1.0,
            decode_gb_per_s: 1.0,
            gflop_per_s,
        }
    }

    fn direction(from: u32, to: u32, rate: f64, round_trip_us: f64) -> Direction {
        let flows = Flows { flows: 4, stream_gbit_per_s: rate, messages: Vec::new() };
        Direction { from, to, round_trip_us, flows: vec![flows] }
    }

    #[test]
    fn the_slowest_direction_of_a_host_is_its_rate() {
        let hosts = [host(0, 100.0), host(1, 50.0), host(2, 70.0)];
        let directions = [
            direction(0, 1, 9.0, 100.0),
            direction(1, 0, 8.0, 300.0),
            direction(0, 2, 5.0, 200.0),
            direction(2, 0, 6.0, 200.0),
            direction(1, 2, 7.123_45, 100.0),
            direction(2, 1, 9.0, 100.0),
        ];
        let cluster = of(&hosts, &directions, None).unwrap();
        let wan = &cluster.levels[0];
        assert_eq!((wan.scaling_factor, wan.flows, wan.round_trip_s), (3, 4, 300e-6));
        assert_eq!(wan.site_bandwidth_gbit_per_s, [5.0, 7.12, 5.0]);
        assert_eq!((wan.bandwidth_gbit_per_s, wan.efficiency), (5.0, 1.0));
        assert_eq!(cluster.gpu.sustained_tflops, 0.05);
        let stated = of(&hosts, &directions, Some(10.0)).unwrap();
        assert_eq!((stated.levels[0].bandwidth_gbit_per_s, stated.levels[0].efficiency), (10.0, 0.5));
        assert!(stated.levels[0].site_bandwidth_gbit_per_s.is_empty());
        // If the stated rate is below the measured one, the efficiency is 1.
        assert_eq!(of(&hosts, &directions, Some(1.0)).unwrap().levels[0].efficiency, 1.0);
    }

    #[test]
    fn figures_outside_the_bounds_are_refused() {
        let directions = [direction(0, 1, 0.0, 1.0), direction(1, 0, 1.0, 1.0)];
        let refused = of(&[host(0, 1.0), host(1, 1.0)], &directions, None).unwrap_err().to_string();
        assert!(refused.contains("bandwidth_gbit_per_s of level 'wan' is 0"), "{refused}");
    }
}
