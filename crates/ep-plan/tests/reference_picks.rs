//! Six reference results of the full model: a DeepSeek-V3 layer over two datacenters of eight nodes of eight GPUs.
//!
//! The reference was computed independently from the same formulas. All six domain sizes agree, and times agree within
//! 2%. The formulas leave one choice open, the number of live layers (see NOTES.md).

use ep_plan::planner::{BaselineKind, Replicas, Work};
use ep_plan::{Options, Plan, Planner, presets};

#[expect(clippy::unwrap_used, reason = "a test's own input")]
fn plan(work: Work, uplink_gbit_per_s: f64, live_layers: usize) -> Plan {
    let mut cluster = presets::datacenters(2, uplink_gbit_per_s, 0.005, presets::dgx_h100(8));
    for level in &mut cluster.levels {
        level.alpha_s = 20e-6;
    }
    for level in &mut cluster.levels[1..] {
        level.round_trip_s = 0.0;
    }
    // The reference gathers experts again in every pass.
    let replicas = Replicas::Regather;
    let options =
        Options { work, live_layers, replicas, memory_cap_gb: Some(24.0), ..Options::paper_codec() };
    let (cluster, model) = (cluster.try_into().unwrap(), presets::deepseek_v3().try_into().unwrap());
    Planner::new(cluster, model, options).unwrap().plan()
}

fn over_hierarchical(plan: &Plan) -> f64 {
    let hierarchical = plan.baselines.iter().find(|baseline| baseline.kind == BaselineKind::HierarchicalEp);
    hierarchical.map_or(f64::NAN, |baseline| baseline.speedup)
}

fn near(found: f64, reference: f64, tolerance: f64) -> bool {
    (found / reference - 1.0).abs() < tolerance
}

#[test]
fn forward_plans_agree_with_the_reference() {
    let reference =
        [(10.0, [2, 8, 2], 187.0, 32.0), (100.0, [2, 8, 2], 24.9, 25.0), (400.0, [2, 4, 1], 15.5, 12.0)];
    for (uplink, domain_sizes, milliseconds, speedup) in reference {
        let plan = plan(Work::Forward, uplink, 2);
        assert_eq!(plan.best.domain_sizes, domain_sizes, "{uplink} Gbit/s");
        let found = plan.best.layer_time.as_ms();
        assert!(near(found, milliseconds, 0.02), "{uplink} Gbit/s: {found} ms");
        assert!(
            near(over_hierarchical(&plan), speedup, 0.02),
            "{uplink} Gbit/s: {}",
            over_hierarchical(&plan)
        );
    }
}

#[test]
fn training_plans_agree_with_the_reference() {
    for (uplink, speedup) in [(10.0, 1.28), (100.0, 1.30), (400.0, 1.37)] {
        let plan = plan(Work::Training, uplink, 2);
        assert_eq!(plan.best.domain_sizes, [2, 2, 1], "{uplink} Gbit/s");
        assert!(
            near(over_hierarchical(&plan), speedup, 0.01),
            "{uplink} Gbit/s: {}",
            over_hierarchical(&plan)
        );
    }
}

/// With one live layer a larger domain fits into memory; it is faster by less than a percent.
#[test]
fn one_live_layer_allows_a_slightly_faster_larger_domain() {
    for uplink in [10.0, 100.0] {
        let (one, two) = (plan(Work::Forward, uplink, 1), plan(Work::Forward, uplink, 2));
        assert_eq!(one.best.domain_sizes, [2, 8, 4]);
        assert!(near(one.best.layer_time.as_ms(), two.best.layer_time.as_ms(), 0.01));
    }
}
