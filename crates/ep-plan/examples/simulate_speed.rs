//! Measures the running time of the simulator: `simulate_speed <datacenters> <GPUs of each> <layers> [jitter]
//! [fraction of slow GPUs] [slow uplinks] [coupled]`.
//!
//! The example simulates one training step of a small model with one expert per GPU, under the hybrid scheme with
//! domains of about ten GPUs. With jitter every GPU is simulated separately, which is the expensive case.

use std::time::Instant;

use ep_plan::cluster::{LevelDescription, Sharing};
use ep_plan::simulate::{FlowDetail, Scheme, Simulation, SimulationOptions, Straggler, Stragglers};
use ep_plan::{Cluster, Model, presets};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<f64> =
        std::env::args().skip(1).map(|argument| argument.parse()).collect::<Result<_, _>>()?;
    let at = |index: usize, default: f64| arguments.get(index).copied().unwrap_or(default);
    let (datacenters, inside) = (at(0, 1000.0) as usize, at(1, 1.0) as usize);
    let begun = Instant::now();
    let mut description = presets::datacenters(datacenters, 10.0, 0.005, presets::dgx_h100(1));
    description.levels.truncate(1);
    if inside > 1 {
        description.levels.push(LevelDescription {
            name: "inside".into(),
            scaling_factor: inside,
            alpha_s: 5e-6,
            round_trip_s: 10e-6,
            bandwidth_gbit_per_s: 400.0,
            sharing: Sharing::PerGpu,
            site_members: Vec::new(),
            site_bandwidth_gbit_per_s: Vec::new(),
            efficiency: 1.0,
            loss: 0.0,
            flows: 1,
        });
    }
    let mut model = presets::mixtral_8x7b();
    model.experts = datacenters * inside;
    let (cluster, model): (Cluster, Model) = (description.try_into()?, model.try_into()?);
    let near_ten = |count: usize| (1..=10).rev().find(|&size| count.is_multiple_of(size)).unwrap_or(1);
    let mut domain_sizes = vec![1; cluster.levels().len()];
    if let Some(inner) = domain_sizes.last_mut() {
        *inner = near_ten(if inside > 1 { inside } else { datacenters });
    }
    let slow_uplinks = at(5, 0.0) as usize;
    let slow_link = |link| Straggler::Link { level: 0, link, slowdown: 2.0 };
    let stragglers = match slow_uplinks {
        0 => Stragglers::Random { fraction: at(4, 0.0), slowdown: 1.5 },
        _ => Stragglers::Listed((0..slow_uplinks).map(slow_link).collect()),
    };
    let options = SimulationOptions {
        layers: Some(at(2, 1.0) as usize),
        jitter: at(3, 0.05),
        stragglers,
        flow_detail: if at(6, 0.0) > 0.0 { FlowDetail::Aggregated } else { FlowDetail::Auto },
        ..SimulationOptions::default()
    };
    let simulation = Simulation::new(&cluster, &model, options, Scheme::Hybrid { domain_sizes })?;
    let built = begun.elapsed();
    let outcome = simulation.run();
    println!(
        "{} GPUs, {} simulated: built in {:.3} s, run in {:.3} s; {} flows, {} events, {:.3e} messages; step {}",
        cluster.gpus(),
        outcome.simulated_gpus,
        built.as_secs_f64(),
        (begun.elapsed() - built).as_secs_f64(),
        outcome.flows,
        outcome.events,
        outcome.messages,
        outcome.step_seconds,
    );
    Ok(())
}
