//! Compares the fast implementations with slow implementations of their definitions.

use proptest::prelude::*;
use proptest::strategy::ValueTree;

use super::fair::Crossing;
use super::mesh::Mesh;
use super::pipe::Pipe;
use super::*;
use crate::planner::{Compression, Options, Work};
use crate::{divisors, presets};

/// A flow of the reference implementation: the links that it crosses, its start and its bytes.
#[derive(Debug, Clone)]
struct Single {
    path: Vec<usize>,
    start: f64,
    bytes: f64,
    priority: u8,
}

/// Progressive filling by definition: all rates grow together until a link is full.
fn naive_rates(capacities: &[f64], flows: &[&Single]) -> Vec<f64> {
    let mut rates = vec![0.0; flows.len()];
    let mut left = capacities.to_vec();
    for priority in 0..3 {
        let mut growing: Vec<usize> =
            (0..flows.len()).filter(|&flow| flows[flow].priority == priority).collect();
        while !growing.is_empty() {
            let users =
                |link: usize| growing.iter().filter(|&&flow| flows[flow].path.contains(&link)).count() as f64;
            let links: Vec<usize> = (0..capacities.len()).filter(|&link| users(link) > 0.0).collect();
            let step = links.iter().map(|&link| left[link] / users(link)).fold(f64::INFINITY, f64::min);
            let full: Vec<usize> = links
                .iter()
                .copied()
                .filter(|&link| left[link] / users(link) <= step * (1.0 + 1e-12) + 1e-15)
                .collect();
            let taken: Vec<(usize, f64)> = links.iter().map(|&link| (link, users(link) * step)).collect();
            for (link, taken) in taken {
                left[link] = if full.contains(&link) { 0.0 } else { left[link] - taken };
            }
            growing.iter().for_each(|&flow| rates[flow] += step);
            growing.retain(|&flow| !flows[flow].path.iter().any(|link| full.contains(link)));
        }
    }
    rates
}

/// The end of each flow. Computes all rates from scratch whenever a flow starts or ends.
fn naive_ends(capacities: &[f64], flows: &[Single]) -> Vec<f64> {
    let mut left: Vec<f64> = flows.iter().map(|flow| flow.bytes).collect();
    let mut ends = vec![f64::NAN; flows.len()];
    let mut now = 0.0;
    loop {
        let active: Vec<usize> =
            (0..flows.len()).filter(|&flow| flows[flow].start <= now && ends[flow].is_nan()).collect();
        let next_start =
            flows.iter().map(|flow| flow.start).filter(|&start| start > now).fold(f64::INFINITY, f64::min);
        let rates = naive_rates(capacities, &active.iter().map(|&flow| &flows[flow]).collect::<Vec<_>>());
        let next_end = active
            .iter()
            .zip(&rates)
            .map(|(&flow, &rate)| now + left[flow] / rate)
            .fold(f64::INFINITY, f64::min);
        let next = next_end.min(next_start);
        if next.is_infinite() {
            return ends;
        }
        for (&flow, &rate) in active.iter().zip(&rates) {
            left[flow] -= rate * (next - now);
            if left[flow] <= 1e-12 * flows[flow].bytes {
                ends[flow] = next;
            }
        }
        now = next;
    }
}

/// The ends of the same flows on a mesh, where each flow is a bundle of `count` equal flows.
fn mesh_ends(capacities: &[f64], flows: &[Single], count: usize) -> (Vec<f64>, Mesh) {
    let mut mesh = Mesh::default();
    for &capacity in capacities {
        mesh.add_link(capacity);
    }
    let mut order: Vec<usize> = (0..flows.len()).collect();
    order.sort_by(|&a, &b| flows[a].start.total_cmp(&flows[b].start));
    let mut ends = vec![f64::NAN; flows.len()];
    let mut coming = order.into_iter().peekable();
    let mut now;
    loop {
        let start = coming.peek().map(|&flow| flows[flow].start);
        let end = mesh.next_end();
        match (start, end) {
            (Some(start), end) if end.is_none_or(|end| start <= end) => {
                now = start;
                while let Some(flow) = coming.next_if(|&flow| flows[flow].start == start) {
                    let single = &flows[flow];
                    let path = single.path.iter();
                    let path =
                        path.map(|&link| Crossing { link: link as u32, count: count as f64 }).collect();
                    mesh.add(now, path, single.bytes, single.priority, flow as u64);
                }
            }
            (_, Some(end)) => {
                now = end;
                let mut ended = Vec::new();
                mesh.take_ended(now, &mut ended);
                ended.into_iter().for_each(|flow| ends[flow as usize] = now);
            }
            (_, None) => return (ends, mesh),
        }
        mesh.settle(now);
    }
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs())
}

fn any_flow(links: usize) -> impl Strategy<Value = Single> {
    let path = prop::sample::subsequence((0..links).collect::<Vec<_>>(), 1..=links.min(3));
    // Few different starts, so that several flows begin at one time.
    (path, 0..6u32, 0.1..10.0f64, 0..3u8).prop_map(|(path, start, bytes, priority)| Single {
        path,
        start: f64::from(start) * 0.7,
        bytes,
        priority,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn a_mesh_agrees_with_naive_filling(
        capacities in prop::collection::vec(0.5..5.0f64, 4),
        flows in prop::collection::vec(any_flow(4), 1..12),
    ) {
        let (ends, mesh) = mesh_ends(&capacities, &flows, 1);
        for (flow, (found, wanted)) in ends.iter().zip(naive_ends(&capacities, &flows)).enumerate() {
            prop_assert!(close(*found, wanted), "flow {flow}: {found}, should be {wanted}");
        }
        // Every link carries the bytes that were sent over it, and no more than its capacity.
        let last = ends.iter().copied().fold(0.0, f64::max);
        for (link, &capacity) in capacities.iter().enumerate() {
            let sent: f64 = flows.iter().filter(|flow| flow.path.contains(&link)).map(|flow| flow.bytes).sum();
            let (carried, busy) = mesh.usage(link as u32);
            prop_assert!((carried - sent).abs() <= 1e-9 * sent, "link {link}: {carried} of {sent}");
            prop_assert!(carried <= capacity * busy * (1.0 + 1e-9) && busy <= last * (1.0 + 1e-12));
        }
    }

    #[test]
    fn a_bundle_agrees_with_its_flows_one_by_one(
        capacities in prop::collection::vec(0.5..5.0f64, 3),
        flows in prop::collection::vec(any_flow(3), 1..5),
        count in 2..4usize,
    ) {
        let each: Vec<Single> = flows.iter().flat_map(|flow| vec![flow.clone(); count]).collect();
        let wanted = naive_ends(&capacities, &each);
        for (flow, found) in mesh_ends(&capacities, &flows, count).0.iter().enumerate() {
            prop_assert!(close(*found, wanted[flow * count]), "{found}, should be {}", wanted[flow * count]);
        }
    }

    #[test]
    fn a_pipe_agrees_with_naive_filling(
        capacity in 0.5..5.0f64,
        flows in prop::collection::vec(any_flow(1), 1..20),
    ) {
        let mut order: Vec<usize> = (0..flows.len()).collect();
        order.sort_by(|&a, &b| flows[a].start.total_cmp(&flows[b].start));
        let mut pipe = Pipe::new(capacity);
        let mut ends = vec![f64::NAN; flows.len()];
        let drain = |pipe: &mut Pipe, until: f64, ends: &mut Vec<f64>| {
            while let Some(end) = pipe.next_end().filter(|&end| end < until) {
                let mut ended = Vec::new();
                pipe.take_ended(end, &mut ended);
                ended.into_iter().for_each(|flow| ends[flow as usize] = end);
            }
        };
        for flow in order {
            drain(&mut pipe, flows[flow].start, &mut ends);
            pipe.add(flows[flow].start, 1.0, flows[flow].bytes, flows[flow].priority, flow as u64);
        }
        drain(&mut pipe, f64::INFINITY, &mut ends);
        for (flow, wanted) in naive_ends(&[capacity], &flows).into_iter().enumerate() {
            prop_assert!(close(ends[flow], wanted), "flow {flow}: {}, should be {wanted}", ends[flow]);
        }
        let sent: f64 = flows.iter().map(|flow| flow.bytes).sum();
        prop_assert!((pipe.carried() - sent).abs() <= 1e-9 * sent);
    }
}

#[test]
fn flows_that_share_nothing_are_not_computed_again() {
    let mut mesh = Mesh::default();
    for _ in 0..100 {
        mesh.add_link(1.0);
    }
    for flow in 0..99 {
        let link = flow / 3 * 3;
        let path = vec![Crossing { link, count: 1.0 }, Crossing { link: link + 1, count: 1.0 }];
        mesh.add(0.0, path, 1.0 + f64::from(flow), 0, u64::from(flow));
    }
    mesh.settle(0.0);
    let first = mesh.recomputed();
    let mut ended = Vec::new();
    let end = mesh.next_end().unwrap();
    mesh.take_ended(end, &mut ended);
    mesh.settle(end);
    assert_eq!(ended.len(), 1);
    assert!(mesh.recomputed() - first <= 3, "only two flows share links with the flow that ended");
}

/// A small cluster of three levels, a small model, and a scheme.
#[derive(Debug, Clone)]
struct Case {
    cluster: ClusterDescription,
    scheme: Scheme,
    options: SimulationOptions,
}

impl Case {
    fn run(&self, change: impl FnOnce(&mut SimulationOptions)) -> Outcome {
        let cluster = Cluster::try_from(self.cluster.clone()).unwrap();
        let mut model = presets::mixtral_8x7b();
        (model.hidden, model.expert_intermediate, model.tokens_per_gpu, model.moe_layers) = (64, 128, 256, 3);
        (model.experts, model.topk) = (2 * cluster.gpus(), 2);
        let mut options = self.options.clone();
        change(&mut options);
        Simulation::new(&cluster, &model.try_into().unwrap(), options, self.scheme.clone()).unwrap().run()
    }
}

fn any_case() -> impl Strategy<Value = Case> {
    let links = prop::collection::vec((-2.0..1.0f64, 0.0..1e-5f64, 0.0..1e-4f64), 3);
    let counts = prop::collection::vec(prop::sample::select(vec![1usize, 2, 3, 4]), 3);
    let sharing = prop::sample::select(vec![Sharing::PerGpu, Sharing::PerMember, Sharing::Gpus(2)]);
    let options = (
        prop::sample::select(vec![Work::Forward, Work::Training]),
        prop::sample::select(vec![1.0, 10.0]),
        1..=2usize,
        1..=3usize,
        prop::sample::select(vec![LinkOrder::TokensFirst, LinkOrder::Fair, LinkOrder::InTurn]),
        prop::sample::select(vec![MessageStart::PerExchange, MessageStart::PerChunk]),
    );
    let scheme = (0..3u8, any::<prop::sample::Index>());
    (links, counts, sharing, options, scheme).prop_map(|(links, counts, sharing, options, (kind, pick))| {
        let mut cluster = presets::datacenters(counts[0], 1.0, 0.0, presets::dgx_h100(counts[1]));
        cluster.levels[2].scaling_factor = counts[2];
        cluster.gpu.sustained_tflops = 1.0;
        for (level, (decade, alpha, round_trip)) in cluster.levels.iter_mut().zip(links) {
            level.bandwidth_gbit_per_s = 10f64.powf(decade);
            (level.alpha_s, level.round_trip_s) = (alpha, round_trip);
        }
        cluster.levels[0].sharing = sharing;
        let sizes = divisors::divisor_product(&counts);
        let scheme = match kind {
            0 => Scheme::Plain,
            1 => Scheme::Hierarchical,
            _ => Scheme::Hybrid { domain_sizes: pick.get(&sizes).clone() },
        };
        let (work, weight_compression, micro_batches, overlap_chunks, link_order, message_start) = options;
        let planner = Options {
            work,
            weight_compression: Compression::By(weight_compression),
            micro_batches,
            overlap_chunks,
            ..Options::paper_codec()
        };
        let options =
            SimulationOptions { planner, link_order, message_start, ..SimulationOptions::default() };
        Case { cluster, scheme, options }
    })
}

/// A slow GPU and, optionally, a slow link of a case.
fn stragglers_of(
    case: &Case,
    gpu: prop::sample::Index,
    link: Option<(usize, prop::sample::Index)>,
) -> Stragglers {
    let cluster = Cluster::try_from(case.cluster.clone()).unwrap();
    let mut list = vec![Straggler::Gpu { gpu: gpu.index(cluster.gpus()), slowdown: 1.7 }];
    if let Some((level, pick)) = link {
        let links = cluster.gpus().div_ceil(cluster.levels()[level].gpus_per_link);
        list.push(Straggler::Link { level, link: pick.index(links), slowdown: 2.5 });
    }
    Stragglers::Listed(list)
}

fn same(a: &Outcome, b: &Outcome) -> Result<(), TestCaseError> {
    prop_assert!(
        close(a.step_seconds.0, b.step_seconds.0),
        "steps of {} and {}",
        a.step_seconds.0,
        b.step_seconds.0
    );
    for (a, b) in a.levels.iter().zip(&b.levels) {
        prop_assert!(close(a.bytes.0, b.bytes.0), "level {}: {} and {}", a.name, a.bytes.0, b.bytes.0);
        prop_assert!(close(a.mean_utilisation, b.mean_utilisation));
    }
    for (a, b) in a.phases.iter().zip(&b.phases) {
        prop_assert!(close(a.mean_seconds.0, b.mean_seconds.0), "{a:?} and {b:?}");
        prop_assert!(close(a.longest_seconds.0, b.longest_seconds.0), "{a:?} and {b:?}");
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Simulating one GPU of each kind gives the same result as simulating all GPUs.
    #[test]
    fn collapsing_is_exact(
        case in any_case(),
        gpu in any::<prop::sample::Index>(),
        link in prop::option::of((0..3usize, any::<prop::sample::Index>())),
    ) {
        let stragglers = stragglers_of(&case, gpu, link);
        let collapsed = case.run(|options| options.stragglers = stragglers.clone());
        let each = case.run(|options| {
            options.stragglers = stragglers;
            options.symmetry = Symmetry::Ignore;
        });
        prop_assert!(collapsed.simulated_gpus <= each.simulated_gpus);
        same(&collapsed, &each)?;
    }

    /// If all GPUs are equal, one bundle per exchange gives the same result as one flow per pair of GPUs. (Nine GPUs
    /// with two per link are not equal: one link has a single GPU.)
    #[test]
    fn aggregating_is_exact_without_differences(case in any_case()) {
        let aggregated = case.run(|_| {});
        prop_assume!(aggregated.simulated_gpus == 1);
        let pairs = case.run(|options| options.flow_detail = FlowDetail::PerDestination);
        same(&aggregated, &pairs)?;
        prop_assert_eq!(aggregated.messages, pairs.messages);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// If no GPUs share links and transfers keep their order, the step is composed of sums and maxima, so that slower
    /// parts cannot shorten it.
    #[test]
    fn stragglers_only_slow_down(
        case in any_case(),
        gpu in any::<prop::sample::Index>(),
        link in prop::option::of((0..3usize, any::<prop::sample::Index>())),
    ) {
        let mut case = case;
        case.options.link_order = LinkOrder::InTurn;
        case.options.planner.overlap_chunks = 1;
        case.cluster.levels.iter_mut().for_each(|level| level.sharing = Sharing::PerGpu);
        let stragglers = stragglers_of(&case, gpu, link);
        let (none, slow) = (case.run(|_| {}), case.run(|options| options.stragglers = stragglers));
        prop_assert!(slow.step_seconds.0 >= none.step_seconds.0 * (1.0 - 1e-9));
    }
}

/// The same cases in every run, because the tests below make statements about most cases, not all.
fn some_cases(count: usize) -> impl Iterator<Item = (Case, Stragglers)> {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let strategy = (any_case(), any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0..3usize);
    (0..count).map(move |_| {
        let (case, gpu, link, level) = strategy.new_tree(&mut runner).unwrap().current();
        let stragglers = stragglers_of(&case, gpu, Some((level, link)));
        (case, stragglers)
    })
}

/// If GPUs share links and transfers may overtake each other, a late transfer can leave its bandwidth to others, so
/// that the step becomes shorter. This is rare, and the effect is small.
#[test]
fn stragglers_rarely_shorten_a_step_with_shared_links() {
    let mut faster = 0;
    for (case, stragglers) in some_cases(300) {
        let none = case.run(|_| {});
        let slow = case.run(|options| options.stragglers = stragglers.clone());
        let ratio = slow.step_seconds / none.step_seconds;
        assert!(ratio > 0.9, "{ratio} with {stragglers:?}: {case:#?}");
        faster += usize::from(ratio < 1.0 - 1e-9);
    }
    assert!(faster <= 9, "{faster} of 300 steps became faster");
}

/// Links that serve their parts of a bundle independently give nearly the same step as coupled links.
#[test]
fn decoupled_steps_are_close_to_coupled_steps() {
    let mut apart = 0;
    for (case, stragglers) in some_cases(300) {
        let with = |jitter, flow_detail| {
            case.run(|options| {
                (options.jitter, options.stragglers) = (jitter, stragglers.clone());
                options.flow_detail = flow_detail;
            })
        };
        for jitter in [0.0, 0.2] {
            let (coupled, each) = (with(jitter, FlowDetail::Aggregated), with(jitter, FlowDetail::Decoupled));
            let ratio = each.step_seconds / coupled.step_seconds;
            assert!((0.95..1.02).contains(&ratio), "{ratio} with {stragglers:?}: {case:#?}");
            assert!(each.links.iter().all(|link| link.utilisation <= 1.0 + 1e-9));
            apart += usize::from((ratio - 1.0).abs() > 0.01);
        }
    }
    assert!(apart <= 6, "{apart} of 600 are more than 1% apart");
}

/// With jitter, aggregated flows miss the contention of several senders at one receiver. Most steps are the same
/// nevertheless, and no step differs by much.
#[test]
fn aggregated_steps_with_jitter_and_stragglers_are_close_to_exact_steps() {
    let mut apart = 0;
    for (case, stragglers) in some_cases(200) {
        let with = |flow_detail| {
            case.run(|options| {
                (options.jitter, options.stragglers) = (0.2, stragglers.clone());
                options.flow_detail = flow_detail;
            })
        };
        let (aggregated, pairs) = (with(FlowDetail::Aggregated), with(FlowDetail::PerDestination));
        let ratio = aggregated.step_seconds / pairs.step_seconds;
        assert!((0.85..1.05).contains(&ratio), "{ratio} with {stragglers:?}: {case:#?}");
        apart += usize::from((ratio - 1.0).abs() > 0.01);
    }
    assert!(apart <= 20, "{apart} of 200 are more than 1% apart");
}

#[test]
fn flow_detail_auto_decouples_from_513_gpus() {
    assert_eq!(FlowDetail::default().resolve(512), FlowDetail::Aggregated);
    assert_eq!(FlowDetail::default().resolve(513), FlowDetail::Decoupled);
    for chosen in [FlowDetail::Aggregated, FlowDetail::Decoupled, FlowDetail::PerDestination] {
        assert_eq!(chosen.resolve(1), chosen);
        assert_eq!(chosen.resolve(100_000), chosen);
    }
}
