//! Compares the simulator with the stream model and the planner, and checks properties that every simulator must have.

#![expect(clippy::unwrap_used, reason = "a test's own input")]

#[path = "simulate/agreement.rs"]
mod agreement;

use ep_plan::cluster::Sharing;
use ep_plan::model::ModelDescription;
use ep_plan::paper::{SIMULATION_FIXED_DOMAIN, SIMULATION_GROWING_DOMAIN, SimulationCase};
use ep_plan::planner::{Compression, Replicas, Setting, Work};
use ep_plan::simulate::{
    Direction, FlowDetail, LinkOrder, MessageStart, Outcome, Phase, Record, Scheme, Simulation,
    SimulationOptions, Straggler, Stragglers, Symmetry,
};
use ep_plan::{
    Cluster, ClusterDescription, Model, Options, PlanError, Planner, StreamInput, StreamModel, presets,
};
use proptest::prelude::*;

/// Largest relative difference between simulated and closed-form speedups. The schedules are the same, so only rounding
/// remains.
const SPEEDUP_TOLERANCE: f64 = 1e-9;

fn stream(input: StreamInput, domain_size: usize) -> f64 {
    Simulation::stream(input, domain_size, SimulationOptions::default()).unwrap().run().step_seconds.0
}

fn simulated_speedup(case: SimulationCase, datacenters: usize, gbit_per_s: f64, domain_size: usize) -> f64 {
    let input = case.input(datacenters, gbit_per_s);
    let found = stream(input, 1) / stream(input, domain_size);
    let formula = StreamModel::new(input).unwrap().speedup(domain_size).unwrap();
    assert!((found / formula - 1.0).abs() < SPEEDUP_TOLERANCE, "{found} simulated, {formula} by the formula");
    found
}

#[test]
fn the_papers_simulation_with_a_fixed_domain() {
    let rates = [1.25, 2.5, 5.0, 10.0, 20.0];
    let speedups = rates.map(|rate| simulated_speedup(SIMULATION_FIXED_DOMAIN, 1000, rate, 500));
    assert_eq!(
        speedups.map(|speedup| format!("{speedup:.4}")),
        ["1.4568", "1.2961", "1.1739", "1.0952", "1.0500"]
    );
}

#[test]
fn the_papers_simulation_with_growing_domains() {
    let at = |size| {
        let speedup = |rate| simulated_speedup(SIMULATION_GROWING_DOMAIN, 1000, rate, size);
        [1.0, 2.0, 5.0, 10.0].map(|rate| format!("{:.4}", speedup(rate)))
    };
    assert_eq!(at(1000), ["3.7795", "2.5488", "1.6195", "1.3098"]);
    assert_eq!(at(500), ["1.6067", "1.4358", "1.2362", "1.1340"]);
    assert_eq!(at(250), ["1.2322", "1.1785", "1.1054", "1.0626"]);
    let decline =
        [250, 500, 750, 1000].map(|all| simulated_speedup(SIMULATION_GROWING_DOMAIN, all, 1.0, 250));
    assert_eq!(decline.map(|speedup| format!("{speedup:.4}")), ["4.0884", "1.6055", "1.3356", "1.2322"]);
}

/// The closed form has no jitter. In the simulation a thousand GPUs wait for the slowest of them.
#[test]
fn jitter_reduces_the_speedup_of_the_papers_simulation() {
    let input = SIMULATION_GROWING_DOMAIN.input(1000, 1.0);
    let run = |domain_size| {
        let options = SimulationOptions { jitter: 0.1, seed: 1, ..SimulationOptions::default() };
        Simulation::stream(input, domain_size, options).unwrap().run().step_seconds.0
    };
    let (plain, hybrid) = (run(1), run(1000));
    assert!(plain > stream(input, 1) && hybrid > stream(input, 1000));
    assert!(plain / hybrid < StreamModel::new(input).unwrap().speedup(1000).unwrap());
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn simulated_steps_equal_the_stream_model(
        gpus in 1..=60usize,
        pick in any::<prop::sample::Index>(),
        (tokens, experts, rate, pre_expert) in (0.01..100.0f64, 0.001..10.0f64, 0.1..400.0f64, 0.0..50.0f64),
        chunks in 1..=5usize,
    ) {
        let input = StreamInput {
            gpus,
            token_bytes: ep_plan::Bytes::from_mb(tokens),
            expert_bytes: ep_plan::Bytes::from_mb(experts),
            bandwidth: ep_plan::BytesPerSecond::from_gbit_per_s(rate),
            pre_expert: ep_plan::Seconds::from_ms(pre_expert),
        };
        let model = StreamModel::new(input).unwrap();
        let size = *pick.get(&model.domain_sizes());
        let planner = Options { overlap_chunks: chunks, ..Options::paper_codec() };
        let wanted = model.latency(size).unwrap();
        for link_order in [LinkOrder::TokensFirst, LinkOrder::InTurn] {
            let options = SimulationOptions { planner: planner.clone(), link_order, ..SimulationOptions::default() };
            let found = Simulation::stream(input, size, options).unwrap().run().step_seconds;
            prop_assert!((found.0 - wanted.0).abs() <= 1e-9 * wanted.0, "{found}, should be {wanted}");
        }
    }
}

fn cluster_of(datacenters: usize, inside: usize, change: impl FnOnce(&mut ClusterDescription)) -> Cluster {
    let mut cluster = presets::datacenters(datacenters, 10.0, 0.001, presets::dgx_h100(1));
    cluster.levels[2].scaling_factor = inside;
    change(&mut cluster);
    cluster.try_into().unwrap()
}

fn small_model(cluster: &Cluster) -> Model {
    let mut model = presets::mixtral_8x7b();
    (model.hidden, model.expert_intermediate, model.tokens_per_gpu, model.moe_layers) = (512, 1024, 512, 3);
    model.experts = 2 * cluster.gpus();
    model.try_into().unwrap()
}

fn run(cluster: &Cluster, scheme: &Scheme, options: SimulationOptions) -> Outcome {
    Simulation::new(cluster, &small_model(cluster), options, scheme.clone()).unwrap().run()
}

fn schemes() -> [Scheme; 4] {
    let hybrid = |sizes: [usize; 3]| Scheme::Hybrid { domain_sizes: sizes.to_vec() };
    [Scheme::Plain, Scheme::Hierarchical, hybrid([2, 1, 1]), hybrid([2, 1, 2])]
}

#[test]
fn steps_with_too_many_operations_are_refused() {
    let cluster = cluster_of(2, 1, |_| {});
    let simulate = |micro_batches| {
        let planner = Options { micro_batches, ..Options::default() };
        let options = SimulationOptions { planner, layers: Some(3), ..SimulationOptions::default() };
        Simulation::new(&cluster, &small_model(&cluster), options, Scheme::Plain)
    };
    assert!(simulate(100).is_ok());
    let Err(PlanError::TooMany { count, most, .. }) = simulate(1_000_000) else { panic!("too many") };
    // 3 layers forward and backward, each with some operations.
    assert!(count >= 6e6 && count > most as f64, "{count}");
    assert_eq!(count % 6e6, 0.0);
}

/// Latency computed by hand: `alpha` per message, a round trip per exchange.
#[test]
fn every_message_pays_alpha_and_every_exchange_a_round_trip() {
    let mut cluster = presets::datacenters(6, 10.0, 0.25, presets::dgx_h100(1));
    cluster.levels.truncate(1);
    cluster.levels[0].alpha_s = 0.5;
    cluster.levels[0].bandwidth_gbit_per_s = 1e9;
    cluster.gpu.sustained_tflops = 1e9;
    let cluster: Cluster = cluster.try_into().unwrap();
    let seconds = |scheme: Scheme, message_start, overlap_chunks, layers| {
        let planner = Options {
            work: Work::Forward,
            weight_compression: Compression::EXACT,
            overlap_chunks,
            ..Options::paper_codec()
        };
        let layers = Some(layers);
        let options = SimulationOptions { planner, message_start, layers, ..SimulationOptions::default() };
        let outcome = run(&cluster, &scheme, options);
        ((outcome.step_seconds.0 * 1e4).round() / 1e4, outcome.messages)
    };
    let (once, per_chunk) = (MessageStart::PerExchange, MessageStart::PerChunk);
    // Dispatch and combine with five peers: 2 x (5 x 0.5 + 0.25), for each of two layers.
    assert_eq!(seconds(Scheme::Plain, once, 1, 2), (11.0, 120.0));
    // With four chunks, the first combines are sent while the last dispatch is in flight: one round trip less.
    assert_eq!(seconds(Scheme::Plain, once, 4, 1), (5.25, 60.0));
    // Four chunks of five messages each.
    assert_eq!(seconds(Scheme::Plain, per_chunk, 4, 1), (20.25, 240.0));
    // A gather from two peers (1.25); the dispatch to one other domain (0.75) overlaps with it, because latency does
    // not occupy links; then the combine (0.75).
    let domains = Scheme::Hybrid { domain_sizes: vec![3] };
    assert_eq!(seconds(domains, once, 1, 1), (2.0, 24.0));
}

#[test]
fn sent_bytes_arrive_and_no_link_exceeds_its_capacity() {
    for sharing in [Sharing::PerGpu, Sharing::PerMember, Sharing::Gpus(2)] {
        let cluster = cluster_of(4, 4, |cluster| cluster.levels[0].sharing = sharing);
        for scheme in schemes() {
            for (flow_detail, jitter) in [
                (FlowDetail::Aggregated, 0.0),
                (FlowDetail::Aggregated, 0.2),
                (FlowDetail::PerDestination, 0.2),
            ] {
                let stragglers =
                    Stragglers::Listed(vec![Straggler::Link { level: 0, link: 1, slowdown: 3.0 }]);
                let options =
                    SimulationOptions { flow_detail, jitter, stragglers, ..SimulationOptions::default() };
                let outcome = run(&cluster, &scheme, options);
                for level in 0..3 {
                    let sum = |direction| -> f64 {
                        let links = outcome.links.iter();
                        let links = links.filter(|link| link.level == level && link.direction == direction);
                        links.map(|link| link.bytes.0 * link.alike as f64).sum()
                    };
                    let (up, down) = (sum(Direction::Up), sum(Direction::Down));
                    // If the links of a level are equal, downlinks cannot limit flows and are not simulated.
                    if flow_detail == FlowDetail::PerDestination || level == 0 {
                        assert!(
                            (up - down).abs() <= 1e-9 * up,
                            "{scheme:?}, level {level}: {up} in, {down} out"
                        );
                    }
                    assert!((outcome.levels[level].bytes.0 - up).abs() <= 1e-9 * up);
                }
                for link in &outcome.links {
                    assert!(link.utilisation <= 1.0 + 1e-9, "{link:?}");
                    assert!(link.busy_seconds.0 <= outcome.step_seconds.0 * (1.0 + 1e-9), "{link:?}");
                }
            }
        }
    }
}

#[test]
fn random_numbers_depend_on_the_seed_alone() {
    let cluster = cluster_of(4, 4, |_| {});
    for scheme in schemes() {
        let with = |jitter, fraction, seed| {
            let stragglers = Stragglers::Random { fraction, slowdown: 2.0 };
            run(
                &cluster,
                &scheme,
                SimulationOptions { jitter, seed, stragglers, ..SimulationOptions::default() },
            )
        };
        assert_eq!(with(0.1, 0.2, 7), with(0.1, 0.2, 7));
        assert_ne!(with(0.1, 0.2, 7).step_seconds, with(0.1, 0.2, 8).step_seconds);
        // Nothing is drawn without jitter and stragglers.
        assert_eq!(with(0.0, 0.0, 7), with(0.0, 0.0, 8));
        assert_eq!(with(0.0, 0.0, 7), run(&cluster, &scheme, SimulationOptions::default()));
        // A tiny jitter hardly changes the step, although all GPUs are simulated instead of one.
        let (none, little) = (with(0.0, 0.0, 7), with(1e-9, 0.0, 7));
        assert_eq!((none.simulated_gpus, little.simulated_gpus), (1, 16));
        assert!((little.step_seconds / none.step_seconds - 1.0).abs() < 1e-6);
    }
}

#[test]
fn stragglers_only_slow_down() {
    let cluster = cluster_of(4, 4, |_| {});
    for scheme in schemes() {
        let step = |list: Vec<Straggler>, symmetry| {
            let stragglers = Stragglers::Listed(list);
            run(&cluster, &scheme, SimulationOptions { stragglers, symmetry, ..SimulationOptions::default() })
        };
        let none = step(Vec::new(), Symmetry::Collapse);
        let mut before = none.step_seconds.0;
        for slowdown in [1.0, 1.5, 3.0, 10.0] {
            let slow = step(vec![Straggler::Gpu { gpu: 5, slowdown }], Symmetry::Collapse);
            assert!(slow.step_seconds.0 >= before * (1.0 - 1e-9), "{scheme:?}, GPU {slowdown} times slower");
            assert!(
                slow.phase(Phase::PreExpert).longest_seconds.0 >= slow.phase(Phase::PreExpert).mean_seconds.0
            );
            before = slow.step_seconds.0;
        }
        let mut before = none.step_seconds.0;
        for slowdown in [1.0, 1.5, 3.0, 10.0] {
            let slow = step(vec![Straggler::Link { level: 0, link: 2, slowdown }], Symmetry::Collapse);
            assert!(slow.step_seconds.0 >= before * (1.0 - 1e-9), "{scheme:?}, link {slowdown} times slower");
            before = slow.step_seconds.0;
        }
        // All GPUs wait for the slow link, so a step that is limited by links takes nearly ten times longer.
        assert!(before > 5.0 * none.step_seconds.0, "{scheme:?}: {before} after {}", none.step_seconds);
        let random = |fraction| {
            let stragglers = Stragglers::Random { fraction, slowdown: 3.0 };
            run(&cluster, &scheme, SimulationOptions { stragglers, ..SimulationOptions::default() })
        };
        assert_eq!(random(0.0), none);
        assert!(random(0.25).step_seconds.0 >= none.step_seconds.0);
        // If all GPUs are three times slower, all are of one kind.
        assert_eq!(random(1.0).simulated_gpus, 1);
        let (quarter, all) = (random(0.25).step_seconds.0, random(1.0).step_seconds.0);
        // Slower compute leaves more gaps, which gradients fill: a step that is limited by links can become slightly
        // faster.
        assert!(all >= quarter * (1.0 - if matches!(scheme, Scheme::Hybrid { .. }) { 0.02 } else { 0.0 }));
    }
}

/// A slow datacenter at the paper's scale: 1000 datacenters, of which one has a tenth of the uplink.
#[test]
fn one_slow_datacenter_of_a_thousand() {
    let input = SIMULATION_GROWING_DOMAIN.input(1000, 10.0);
    let run = |list| {
        let options =
            SimulationOptions { stragglers: Stragglers::Listed(list), ..SimulationOptions::default() };
        Simulation::stream(input, 1, options).unwrap().run()
    };
    let (even, slow) = (run(Vec::new()), run(vec![Straggler::Link { level: 0, link: 17, slowdown: 10.0 }]));
    assert_eq!((even.simulated_gpus, slow.simulated_gpus), (1, 2));
    // Dispatch and combine with the slow datacenter take ten times longer.
    let model = StreamModel::new(input).unwrap();
    let exchange = (model.all_to_all_bytes(1).unwrap() / input.bandwidth).0;
    let wanted = input.pre_expert.0 + 20.0 * exchange;
    assert!((slow.step_seconds.0 / wanted - 1.0).abs() < 1e-6, "{} instead of {wanted}", slow.step_seconds.0);
}

#[test]
fn sharing_links_fairly_or_in_turn_is_not_faster() {
    let cluster = cluster_of(4, 4, |cluster| cluster.levels[0].bandwidth_gbit_per_s = 50.0);
    let scheme = Scheme::Hybrid { domain_sizes: vec![2, 1, 1] };
    let step = |link_order| {
        // Experts that are gathered in every pass compete with tokens for the links.
        let planner = Options { replicas: Replicas::Regather, ..Options::paper_codec() };
        let options = SimulationOptions { planner, link_order, ..SimulationOptions::default() };
        run(&cluster, &scheme, options).step_seconds.0
    };
    let first = step(LinkOrder::TokensFirst);
    assert!(step(LinkOrder::Fair) >= first * (1.0 - 1e-9) && step(LinkOrder::InTurn) > first);
}

fn recorded() -> Outcome {
    let cluster = cluster_of(4, 4, |_| {});
    let options = SimulationOptions {
        jitter: 0.1,
        record: Record { gpus: vec![0, 5], links: true },
        ..SimulationOptions::default()
    };
    run(&cluster, &Scheme::Hybrid { domain_sizes: vec![2, 1, 2] }, options)
}

#[test]
fn a_chrome_trace_is_json_and_its_durations_add_up() {
    let outcome = recorded();
    let timeline = outcome.timeline.as_ref().unwrap();
    let mut text = Vec::new();
    timeline.to_chrome_trace(&mut text).unwrap();
    let trace: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let complete: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
    assert_eq!(complete.len(), timeline.spans.len());
    let names: Vec<_> = events.iter().filter(|event| event["name"] == "thread_name").collect();
    assert_eq!(names.len(), 2 * 7);
    // Over the two recorded GPUs, the spans of a phase add up to more than zero and at most twice the longest time.
    for time in &outcome.phases {
        let of_phase = complete.iter().filter(|event| event["cat"] == time.phase.name());
        let sum: f64 = of_phase.map(|event| event["dur"].as_f64().unwrap() * 1e-6).sum();
        assert!(sum > 0.0 && sum <= 2.0 * time.longest_seconds.0 * (1.0 + 1e-9), "{time:?}: {sum}");
    }
    // Spans of a track do not overlap and lie inside the step.
    for tid in 0..timeline.tracks.len() as u64 {
        let mut end = 0.0;
        for event in complete.iter().filter(|event| event["tid"] == tid) {
            let (start, took) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
            assert!(start >= end - 1e-6 && took >= 0.0, "track {tid}: {start} after {end}");
            end = start + took;
        }
        let alone = timeline.tracks[tid as usize].name == "rail link"; // a datacenter has one node: the link is idle
        assert!(
            (end > 0.0) != alone && end <= outcome.step_seconds.0 * 1e6 * (1.0 + 1e-9),
            "track {tid}: {end}"
        );
    }
}

/// If all GPUs are equal, the recorded GPU has the mean time of each phase.
#[test]
fn recorded_durations_add_up_to_the_phases() {
    let cluster = cluster_of(4, 4, |_| {});
    for scheme in schemes() {
        let record = Record { gpus: vec![3], links: true };
        let outcome = run(&cluster, &scheme, SimulationOptions { record, ..SimulationOptions::default() });
        let timeline = outcome.timeline.as_ref().unwrap();
        let recorded = |phase: &Phase| timeline.spans.iter().any(|span| span.phase == Some(*phase));
        let listed: Vec<_> = outcome.phases.iter().map(|time| time.phase).collect();
        assert_eq!(listed, Phase::ALL.into_iter().filter(recorded).collect::<Vec<_>>(), "{scheme:?}");
        for time in &outcome.phases {
            let spans = timeline.spans.iter().filter(|span| span.phase == Some(time.phase));
            let sum: f64 = spans.map(|span| (span.end - span.start).0).sum();
            assert!((sum - time.mean_seconds.0).abs() <= 1e-9 * sum, "{scheme:?}, {time:?}: {sum}");
        }
        let links = timeline.spans.iter().filter(|span| span.phase.is_none() && span.level == Some(0));
        let busy: f64 = links.map(|span| (span.end - span.start).0).sum();
        let of_link = outcome.links.iter().find(|link| link.level == 0).unwrap();
        assert!((busy - of_link.busy_seconds.0).abs() <= 1e-9 * busy, "{busy}, {of_link:?}");
    }
    let plain = run(&cluster, &Scheme::Plain, SimulationOptions::default());
    assert!(plain.timeline.is_none());
}

#[test]
fn an_svg_is_well_formed() {
    use ep_plan::simulate::SvgOptions;
    let outcome = recorded();
    let timeline = outcome.timeline.unwrap();
    let draw = |options: SvgOptions| {
        let mut text = String::new();
        timeline.to_svg(&mut text, &options).unwrap();
        text
    };
    let all = draw(SvgOptions { title: "a < b & \"c\"\u{1}".into(), ..SvgOptions::default() });
    let document = roxmltree::Document::parse(&all).unwrap();
    let texts: Vec<_> = document.descendants().filter_map(|node| node.text()).collect();
    assert!(texts.contains(&"a < b & \"c\""));
    assert!(texts.contains(&"GPU 5 wan link") && texts.contains(&"dispatch"));
    let spans: Vec<_> = document.descendants().filter(|node| node.has_tag_name("title")).collect();
    assert!(spans.len() > 50 && spans.len() <= timeline.spans.len());
    for rectangle in spans.iter().filter_map(|title| title.parent()) {
        let number = |name: &str| rectangle.attribute(name).unwrap().parse::<f64>().unwrap();
        assert!(number("x") >= 149.9 && number("x") + number("width") <= 1261.0);
    }
    let third = outcome.step_seconds.0 / 3.0;
    let some = draw(SvgOptions { window: Some((third, 2.0 * third)), ..SvgOptions::default() });
    let some = roxmltree::Document::parse(&some).unwrap();
    let shown = some.descendants().filter(|node| node.has_tag_name("title")).count();
    assert!(shown > 0 && shown < spans.len());
    // An empty timeline gives a valid picture too.
    let mut empty = String::new();
    ep_plan::simulate::Timeline::default().to_svg(&mut empty, &SvgOptions::default()).unwrap();
    roxmltree::Document::parse(&empty).unwrap();
}

#[test]
fn errors_of_impossible_simulations_name_the_possible_values() {
    let cluster = cluster_of(4, 4, |_| {});
    let error = |options, scheme| {
        Simulation::new(&cluster, &small_model(&cluster), options, scheme).unwrap_err().to_string()
    };
    let listed = |straggler| SimulationOptions {
        stragglers: Stragglers::Listed(vec![straggler]),
        ..SimulationOptions::default()
    };
    let domains = |sizes: &[usize]| Scheme::Hybrid { domain_sizes: sizes.to_vec() };
    assert!(error(SimulationOptions::default(), domains(&[3, 1, 1])).contains("possible: 1, 2, 4"));
    assert!(error(SimulationOptions::default(), domains(&[2])).contains("3 levels"));
    let jitter = SimulationOptions { jitter: -0.1, ..SimulationOptions::default() };
    assert!(error(jitter, Scheme::Plain).contains("jitter (relative standard deviation) is -0.1"));
    assert!(error(listed(Straggler::Gpu { gpu: 16, slowdown: 2.0 }), Scheme::Plain).contains("there are 16"));
    assert!(error(listed(Straggler::Gpu { gpu: 1, slowdown: 0.5 }), Scheme::Plain).contains("from 1 to 1e6"));
    let link = Straggler::Link { level: 0, link: 4, slowdown: 2.0 };
    assert!(error(listed(link), Scheme::Plain).contains("straggling link 4 does not exist: there are 4"));
    let recorded =
        SimulationOptions { record: Record { gpus: vec![99], links: false }, ..SimulationOptions::default() };
    assert!(error(recorded, Scheme::Plain).contains("recorded GPU 99 does not exist"));
    let none = SimulationOptions { layers: Some(0), ..SimulationOptions::default() };
    assert!(error(none, Scheme::Plain).contains("from 1 to 10000"));
}

/// Eight experts on 16 GPUs: every expert is on two GPUs, and every GPU has one expert.
#[test]
fn copies_of_experts_are_simulated() {
    let cluster = cluster_of(4, 4, |_| {});
    let model: Model = ModelDescription { moe_layers: 8, ..presets::mixtral_8x7b() }.try_into().unwrap();
    let options = SimulationOptions::default();
    let planner = Planner::new(cluster.clone(), model.clone(), options.planner.clone()).unwrap();
    let outcome = Simulation::new(&cluster, &model, options, Scheme::Plain).unwrap().run();
    let plan = planner.plan();
    assert_eq!(plan.experts_per_gpu, 1);
    let planned = plan.baselines[0].candidate.layer_time;
    assert!((outcome.layer_seconds / planned - 1.0).abs() < 0.05, "{} {planned}", outcome.layer_seconds);
}

#[test]
fn options_survive_json() {
    let text = r#"{"jitter": 0.05, "seed": 3, "layers": 2, "link-order": "fair"}"#;
    assert!(serde_json::from_str::<SimulationOptions>(text).is_err(), "fields are in snake case");
    let text = r#"{"jitter": 0.05, "link_order": "in-turn", "planner": {"setting": "paper"},
        "stragglers": {"listed": [{"gpu": 3, "slowdown": 2}, {"level": 0, "link": 1, "slowdown": 4}]},
        "record": {"gpus": [0], "links": true}}"#;
    let options: SimulationOptions = serde_json::from_str(text).unwrap();
    assert_eq!(options.planner.setting, Setting::Paper);
    let stragglers = Stragglers::Listed(vec![
        Straggler::Gpu { gpu: 3, slowdown: 2.0 },
        Straggler::Link { level: 0, link: 1, slowdown: 4.0 },
    ]);
    assert_eq!(options.stragglers, stragglers);
    let again: SimulationOptions = serde_json::from_str(&serde_json::to_string(&options).unwrap()).unwrap();
    assert_eq!(again, options);
    let scheme: Scheme = serde_json::from_str(r#"{"hybrid": {"domain_sizes": [2, 1]}}"#).unwrap();
    assert_eq!(scheme, Scheme::Hybrid { domain_sizes: vec![2, 1] });
}

/// An uplink with half the bandwidth of the other one is simulated as a straggling link.
#[test]
fn unequal_links_are_stragglers_of_the_fastest() {
    let unequal = cluster_of(2, 2, |cluster| cluster.levels[0].set_bandwidths(&[10.0, 5.0]));
    let equal = cluster_of(2, 2, |_| {});
    let slow = Straggler::Link { level: 0, link: 1, slowdown: 2.0 };
    let stragglers = Stragglers::Listed(vec![slow]);
    for scheme in schemes() {
        let wanted = run(
            &equal,
            &scheme,
            SimulationOptions { stragglers: stragglers.clone(), ..SimulationOptions::default() },
        );
        let found = run(&unequal, &scheme, SimulationOptions::default());
        assert_eq!(found.step_seconds, wanted.step_seconds, "{scheme:?}");
        assert!(found.step_seconds.0 > run(&equal, &scheme, SimulationOptions::default()).step_seconds.0);
    }
}

#[test]
fn unequal_sites_are_refused_with_the_level() {
    let cluster = cluster_of(2, 2, |cluster| cluster.levels[1].set_members(&[2, 1]));
    let refused =
        Simulation::new(&cluster, &small_model(&cluster), SimulationOptions::default(), Scheme::Hierarchical)
            .unwrap_err();
    assert!(matches!(refused, ep_plan::PlanError::Unequal { .. }), "{refused}");
    assert!(refused.to_string().contains("level 'rail' has 2, 1 members"), "{refused}");
}
