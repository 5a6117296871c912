//! Compares the planner's formulas with the simulator over many configurations.

use ep_plan::planner::{BaselineKind, Candidate, Compression, Work};
use ep_plan::simulate::{Outcome, Scheme, Simulation, SimulationOptions};
use ep_plan::{Cluster, Model, ModelDescription, Options, Planner, presets};

/// Largest relative difference between simulated and planned layer times where the planner's assumptions hold.
const PLANNER_TOLERANCE: f64 = 0.05;

/// A configuration of the comparison with the planner.
struct Comparison {
    cluster: Cluster,
    model: Model,
    options: Options,
}

const COMPARED_LAYERS: usize = 40;

impl Comparison {
    fn run(&self, scheme: &Scheme) -> Outcome {
        let layers = Some(COMPARED_LAYERS);
        let options =
            SimulationOptions { planner: self.options.clone(), layers, ..SimulationOptions::default() };
        Simulation::new(&self.cluster, &self.model, options, scheme.clone()).unwrap().run()
    }

    fn priced(&self, scheme: &Scheme) -> Candidate {
        let planner = Planner::new(self.cluster.clone(), self.model.clone(), self.options.clone()).unwrap();
        let baseline = |wanted: BaselineKind| {
            let baselines = planner.plan().baselines;
            baselines.into_iter().find(|baseline| baseline.kind == wanted).unwrap().candidate
        };
        match scheme {
            Scheme::Plain => baseline(BaselineKind::PlainEp),
            Scheme::Hierarchical => baseline(BaselineKind::HierarchicalEp),
            Scheme::Hybrid { domain_sizes } => planner.evaluate(domain_sizes).unwrap(),
        }
    }

    /// The part of the layer time by which the schedule may differ from the formula. The planner adds up phases that
    /// the schedule can overlap (transfers of different levels; the last computation and earlier combines), and it
    /// ignores the first gather and the last gradients of a step.
    fn beyond_assumptions(&self, candidate: &Candidate) -> f64 {
        let chunks = self.options.overlap_chunks;
        let passes = [Some(candidate.forward), candidate.backward];
        let chain: f64 = passes
            .iter()
            .flatten()
            .filter(|pass| pass.all_to_all > pass.expert + pass.decode + pass.encode)
            .map(|pass| (pass.expert + pass.decode + pass.encode).0 / chunks as f64)
            .sum();
        let directions = if candidate.backward.is_some() { 2.0 } else { 1.0 };
        let by_level: Vec<f64> = candidate
            .levels
            .iter()
            .map(|level| {
                directions * (level.all_gather.time + level.all_to_all.time).0 + level.gradients.time.0
            })
            .collect();
        let across: f64 = by_level.iter().sum::<f64>() - by_level.iter().copied().fold(0.0, f64::max);
        let edges: f64 = passes
            .iter()
            .flatten()
            .map(|pass| (pass.all_gather + pass.gradients + pass.shared_refresh).0 * 2.0)
            .sum::<f64>()
            / COMPARED_LAYERS as f64;
        (chain + across + edges) / candidate.layer_time.0
    }
}

fn comparisons() -> Vec<(Comparison, Vec<Scheme>)> {
    let hybrid = |sizes: &[usize]| Scheme::Hybrid { domain_sizes: sizes.to_vec() };
    let mut all = Vec::new();
    for (datacenters, nodes, inside, model, sizes) in [
        (2, 8, 8, presets::deepseek_v3(), [[2, 1, 1], [2, 2, 1], [2, 8, 2], [1, 8, 1]]),
        (4, 4, 8, presets::qwen3_235b(), [[2, 1, 1], [4, 1, 1], [4, 4, 1], [2, 2, 2]]),
        (8, 1, 1, presets::mixtral_8x22b(), [[2, 1, 1], [4, 1, 1], [8, 1, 1], [1, 1, 1]]),
        (16, 1, 8, presets::qwen3_235b(), [[2, 1, 1], [4, 1, 1], [16, 1, 1], [1, 1, 4]]),
    ] {
        for uplink in [1.0, 10.0, 100.0, 400.0, 3200.0] {
            for (work, weight_compression, micro_batches) in [
                (Work::Forward, 50.0, 1),
                (Work::Forward, 1.0, 2),
                (Work::Training, 50.0, 1),
                (Work::Training, 50.0, 3),
            ] {
                let mut cluster = presets::datacenters(datacenters, uplink, 0.0, presets::dgx_h100(nodes));
                cluster.levels[2].scaling_factor = inside;
                for level in &mut cluster.levels {
                    (level.alpha_s, level.round_trip_s) = (0.0, 0.0);
                }
                let options = Options {
                    work,
                    weight_compression: Compression::By(weight_compression),
                    micro_batches,
                    memory_cap_gb: Some(1e6),
                    ..Options::paper_codec()
                };
                let model = ModelDescription { moe_layers: COMPARED_LAYERS, ..model.clone() };
                let comparison = Comparison {
                    cluster: cluster.try_into().unwrap(),
                    model: model.try_into().unwrap(),
                    options,
                };
                let mut schemes = vec![Scheme::Plain, Scheme::Hierarchical];
                schemes.extend(sizes.iter().map(|sizes| hybrid(sizes)));
                all.push((comparison, schemes));
            }
        }
    }
    all
}

#[test]
fn the_planner_and_the_simulator_agree_where_its_assumptions_hold() {
    let (mut compared, mut held, mut worst) = (0, 0, 0.0f64);
    for (comparison, schemes) in comparisons() {
        for scheme in schemes {
            let candidate = comparison.priced(&scheme);
            let outcome = comparison.run(&scheme);
            let difference = outcome.layer_seconds / candidate.layer_time - 1.0;
            let beyond = comparison.beyond_assumptions(&candidate);
            compared += 1;
            // Where the assumptions do not hold, `beyond` bounds the additional difference.
            assert!(
                difference.abs() <= PLANNER_TOLERANCE + beyond,
                "{scheme:?} at {:?}: {} simulated, {} planned, {beyond:.3} beyond the assumptions",
                comparison.cluster.levels()[0].link_bandwidth,
                outcome.layer_seconds,
                candidate.layer_time
            );
            if beyond <= 0.02 {
                held += 1;
                worst = worst.max(difference.abs());
            }
        }
    }
    println!("{compared} compared, assumptions hold in {held}, worst difference there {worst:.4}");
    assert_eq!(compared, 480);
    assert!(held > 150, "only {held} of {compared} configurations tried the tolerance");
    assert!(worst <= PLANNER_TOLERANCE, "{worst}");
}

/// The bytes over each level, as rates integrated over time, equal those of the planner.
#[test]
fn simulated_bytes_equal_planned_bytes() {
    for (comparison, schemes) in comparisons().into_iter().step_by(7) {
        for scheme in schemes {
            let candidate = comparison.priced(&scheme);
            let outcome = comparison.run(&scheme);
            let often = (COMPARED_LAYERS * comparison.options.micro_batches) as f64;
            for (level, found) in candidate.levels.iter().zip(&outcome.levels) {
                let planned = level.bytes_per_link.0 * found.links as f64 * often;
                assert!(
                    (found.bytes.0 - planned).abs() <= 1e-7 * planned,
                    "{scheme:?}, {}: {} simulated, {planned} planned",
                    found.name,
                    found.bytes.0
                );
            }
        }
    }
}
