use proptest::prelude::*;

use super::*;
use crate::cluster::ClusterDescription;
use crate::model::{ElementType, ModelDescription};
use crate::presets;
use crate::routing::{Placement, Routing};
use crate::units::{Bytes, BytesPerSecond};

fn two_datacenters(gbit_per_s: f64) -> ClusterDescription {
    presets::datacenters(2, gbit_per_s, 0.005, presets::dgx_h200(8))
}

fn planner(cluster: ClusterDescription, model: ModelDescription, options: Options) -> Planner {
    Planner::new(cluster.try_into().unwrap(), model.try_into().unwrap(), options).unwrap()
}

fn deepseek(gbit_per_s: f64, options: Options) -> Planner {
    planner(two_datacenters(gbit_per_s), presets::deepseek_v3(), options)
}

fn baseline(plan: &Plan, kind: BaselineKind) -> &Baseline {
    plan.baselines.iter().find(|baseline| baseline.kind == kind).unwrap()
}

/// A cluster of three levels with link rates over four decades, a small model, and every option that affects the price.
fn any_planner() -> impl Strategy<Value = Planner> {
    let links = prop::collection::vec((0.0..4.0f64, 0.0..1e-4f64, 0.0..1e-2f64), 3);
    let counts = (
        prop::sample::select(vec![1usize, 2, 3, 4, 6]),
        prop::sample::select(vec![1usize, 2, 4]),
        1..=2usize,
    );
    let model = (6..12u32, 6..12u32, 1..=6usize, 5..12u32, 0.0..1.5f64);
    let options = (
        prop::sample::select(vec![Work::Forward, Work::Training]),
        prop::sample::select(vec![Replicas::Regather, Replicas::Keep, Replicas::Best]),
        prop::sample::select(vec![1.0, 10.0, 50.0]),
        prop::sample::select(vec![1.0, 10.0]),
        prop::option::of(0.0..0.05f64),
        1..=4usize,
    );
    (links, counts, model, options).prop_map(
        |(links, (outer, inner, own), (hidden, width, topk, tokens, exponent), options)| {
            let mut cluster = presets::datacenters(outer, 100.0, 0.0, presets::dgx_h100(inner));
            cluster.levels[2].scaling_factor = 2;
            for (level, (decade, alpha, round_trip)) in cluster.levels.iter_mut().zip(links) {
                level.bandwidth_gbit_per_s = 10f64.powf(decade);
                level.alpha_s = alpha;
                level.round_trip_s = round_trip;
            }
            let mut description = presets::mixtral_8x7b();
            description.hidden = 1 << hidden;
            description.expert_intermediate = 1 << width;
            description.experts = own * outer * inner * 2;
            description.topk = topk.min(description.experts);
            description.tokens_per_gpu = 1 << tokens;
            description.moe_layers = 4;
            description.routing = Routing::Zipf { exponent, shuffle_seed: 1 };
            let (work, replicas, weight_compression, gradient_compression, memory_cap_gb, micro_batches) =
                options;
            planner(
                cluster,
                description,
                Options {
                    work,
                    replicas,
                    weight_compression: Compression::By(weight_compression),
                    gradient_compression: Compression::By(gradient_compression),
                    memory_cap_gb,
                    micro_batches,
                    ..Options::paper_codec()
                },
            )
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn no_candidate_that_fits_beats_the_plan(planner in any_planner()) {
        let plan = planner.plan();
        prop_assert!(plan.best.memory.fits());
        let mut fitting = 0;
        for sizes in divisor_product(&plan.scaling_factors) {
            match planner.evaluate(&sizes) {
                Ok(candidate) => {
                    prop_assert!(candidate.layer_time.0 >= plan.best.layer_time.0 * (1.0 - 1e-9));
                    fitting += 1;
                }
                Err(error) => prop_assert!(matches!(error, PlanError::GatheredExperts { .. }), "{}", error),
            }
        }
        prop_assert!(fitting >= 1 && fitting <= plan.candidates - plan.candidates_beyond_memory);
        prop_assert_eq!(planner.evaluate(&plan.best.domain_sizes).unwrap().layer_time, plan.best.layer_time);
        prop_assert!(baseline(&plan, BaselineKind::HierarchicalEp).speedup >= 1.0 - 1e-9);
    }

    /// Phases and levels are consistent: the link time of a pass is the sum of its transfers, and the bytes of a link
    /// fit into the layer time.
    #[test]
    fn phases_and_transfers_add_up(planner in any_planner()) {
        let plan = planner.plan();
        let (best, options) = (&plan.best, &planner.options);
        let m = options.micro_batches as f64;
        let gathers = if best.replicas_kept { 1.0 / m } else { 1.0 };
        let single: f64 = best.levels.iter().map(|level| level.all_gather.time.0).sum();
        prop_assert!((best.forward.all_gather.0 - single * gathers).abs() <= 1e-9 * single);
        let tokens: f64 = best.levels.iter().map(|level| level.all_to_all.time.0).sum();
        prop_assert!((best.forward.all_to_all.0 - tokens).abs() <= 1e-9 * tokens);
        let passes = [Some(best.forward), best.backward];
        let total: f64 = passes.iter().flatten().map(|pass| pass.total.0).sum();
        prop_assert!((best.layer_time.0 - total).abs() <= 1e-12 * total);
        prop_assert_eq!(best.backward.is_some(), options.work == Work::Training);
        // The time that a link needs for its bytes does not exceed the layer time.
        for (level, at) in best.levels.iter().zip(planner.cluster.levels()) {
            prop_assert!((level.bytes_per_link / at.link_bandwidth).0 <= best.layer_time.0 * (1.0 + 1e-9));
        }
    }

    #[test]
    fn faster_links_never_make_a_layer_slower(planner in any_planner(), level in 0..3usize) {
        let before = planner.best(&planner.cost());
        let faster = planner.cluster.levels()[level].link_bandwidth * 3.0;
        let cluster = planner.cluster.with_bandwidth(level, faster).unwrap();
        let after = planner.best(&CostModel { cluster: &cluster, ..planner.cost() });
        prop_assert!(after.layer_time.0 <= before.layer_time.0 * (1.0 + 1e-9));
    }

    /// The extremes of selective migration, all tokens and all experts, are those that domains can express. Moving
    /// experts individually takes no more bytes than either.
    #[test]
    fn selective_migration_agrees_with_domains_at_its_extremes(planner in any_planner()) {
        let mut description = planner.model.description().clone();
        description.routing = Routing::Even; // otherwise the volumes of a candidate are those of its busiest GPU
        let planner = Planner { model: description.try_into().unwrap(), ..planner };
        let sizes = planner.best(&planner.cost()).domain_sizes;
        let replicas_kept = planner.replica_choices()[0];
        for report in planner.cost().selective(&sizes, replicas_kept) {
            let extreme = |size: usize| {
                let mut sizes = sizes.clone();
                sizes[report.level] = size;
                sizes[report.level + 1..].fill(1);
                let options = Options { setting: Setting::Paper, ..planner.options.clone() };
                let scaling = planner.cluster.scaling_factors();
                let unpriced = UnpricedCandidate::new(&scaling, sizes, &planner.model, &options).unwrap();
                planner.cost().price(&unpriced, replicas_kept).levels[report.level]
            };
            let frequencies = cost::Frequencies::new(&planner.options, replicas_kept);
            let tokens = extreme(1).all_to_all.bytes_per_gpu * frequencies.passes;
            let experts = extreme(planner.cluster.levels()[report.level].scaling_factor);
            let experts = experts.all_gather.bytes_per_gpu * frequencies.gathers
                + experts.gradients.bytes_per_gpu * frequencies.reductions;
            prop_assert!((report.tokens_only.0 - tokens.0).abs() <= 1e-9 * tokens.0);
            prop_assert!((report.experts_only.0 - experts.0).abs() <= 1e-9 * experts.0);
            prop_assert!(report.selective.0 <= report.tokens_only.min(report.experts_only).0 * (1.0 + 1e-9));
        }
    }

    #[test]
    fn the_paper_setting_on_one_level_equals_the_stream_model(
        gpus in prop::sample::select(vec![1usize, 2, 6, 8, 12, 16]),
        decade in -1.0..4.0f64,
        tokens in 4..14u32,
        ratio in 1.0..100.0f64,
    ) {
        let mut cluster = two_datacenters(100.0);
        cluster.levels.truncate(1);
        cluster.levels[0].scaling_factor = gpus;
        cluster.levels[0].bandwidth_gbit_per_s = 10f64.powf(decade);
        let mut model = presets::mixtral_8x7b();
        model.experts = 2 * gpus;
        model.tokens_per_gpu = 1 << tokens;
        let options = Options { setting: Setting::Paper, weight_compression: ratio.into(), ..Options::paper_codec() };
        let planner = planner(cluster, model, options);
        let stream = planner.stream_model(0).unwrap();
        for size in stream.domain_sizes() {
            let (ours, paper) = (planner.evaluate(&[size]).unwrap().layer_time.0, stream.latency(size).unwrap().0);
            prop_assert!((ours - paper).abs() <= 1e-12 * paper);
        }
        prop_assert_eq!(&planner.plan().best.domain_sizes, &[stream.best_domain_size()]);
    }
}

#[test]
fn one_more_member_saves_and_costs_the_bytes_of_the_growth_test() {
    let planner = deepseek(100.0, Options { setting: Setting::Paper, ..Options::paper_codec() });
    let growth = planner.cost().growth_tests(&[1, 2, 1], planner.plan().best.replicas_kept);
    for (level, [small, large]) in [(0, [1, 2]), (1, [2, 8]), (2, [1, 4])] {
        let mut sizes = vec![1, 2, 1];
        let mut at = |size: usize| {
            sizes[level] = size;
            planner.evaluate(&sizes).unwrap().levels[level]
        };
        let (before, after) = (at(small), at(large));
        let members = (large - small) as f64;
        let saved = before.all_to_all.bytes_per_gpu - after.all_to_all.bytes_per_gpu;
        let added = after.all_gather.bytes_per_gpu - before.all_gather.bytes_per_gpu;
        assert!((saved / (growth[level].saves * members) - 1.0).abs() < 1e-9);
        assert!((added / (growth[level].costs * members) - 1.0).abs() < 1e-9);
    }
}

/// `4 tokens_e H b` against `P (2 / CR_w + 1 / CR_g)`, for an expert with 1/256 of all selections.
#[test]
fn an_expert_moves_when_its_tokens_weigh_more() {
    let planner =
        deepseek(100.0, Options { gradient_compression: Compression::By(4.0), ..Options::paper_codec() });
    let cost = CostModel { path: TokenPath::Forwarded, ..planner.cost() };
    let trade = cost.trade(&[], 0, 1.0 / 256.0, false);
    let tokens = 4096.0 * 8.0 / 256.0 * 64.0; // of all 64 GPUs of a datacenter
    assert_eq!(trade.token_bytes.0, 4.0 * tokens * 7168.0 * 2.0);
    assert!((trade.expert_bytes.0 / (88_080_384.0 * (2.0 / 50.0 + 1.0 / 4.0)) - 1.0).abs() < 1e-12);
    assert!(trade.migrates());
    assert!(!cost.trade(&[], 0, 0.01 / 256.0, false).migrates());
    // At the inner level a copy serves the eight GPUs of a node, in one datacenter or in both.
    let per_copy =
        |outer: usize| cost.trade(&[outer], 1, 1.0 / 256.0, false).token_bytes.0 / trade.token_bytes.0;
    assert_eq!((per_copy(2), per_copy(1)), (1.0 / 8.0, 2.0 / 8.0));
}

#[test]
fn gradients_are_fifty_times_the_compressed_gather() {
    let candidate = deepseek(100.0, Options::paper_codec()).evaluate(&[2, 2, 1]).unwrap();
    for level in &candidate.levels[..2] {
        let ratio = level.gradients.bytes_per_gpu / level.all_gather.bytes_per_gpu;
        assert!((ratio - 50.0).abs() < 1e-9);
    }
    let compressed = Options { gradient_compression: Compression::By(50.0), ..Options::paper_codec() };
    let compressed = deepseek(100.0, compressed).evaluate(&[2, 2, 1]).unwrap();
    assert_eq!(compressed.levels[0].gradients, compressed.levels[0].all_gather);
}

#[test]
fn kept_replicas_pay_once_per_step() {
    let with = |replicas, micro_batches| {
        let options =
            Options { replicas, micro_batches, memory_cap_gb: Some(1000.0), ..Options::paper_codec() };
        deepseek(100.0, options).evaluate(&[2, 1, 1]).unwrap()
    };
    let (once, kept) = (with(Replicas::Regather, 8), with(Replicas::Keep, 8));
    let ratio = |a: Seconds, b: Seconds| (a / b * 1e6).round() / 1e6;
    assert_eq!(ratio(once.backward.unwrap().gradients, kept.backward.unwrap().gradients), 8.0);
    assert_eq!(ratio(once.forward.all_gather, kept.forward.all_gather), 8.0);
    assert_eq!(kept.backward.unwrap().all_gather, Seconds::ZERO);
    assert_eq!(kept.memory.gathered_experts / once.memory.gathered_experts, 29.0); // 58 layers instead of 2
    assert!(kept.layer_time < once.layer_time);
    // Encoding and refresh happen once per step, not once per micro-batch.
    let single = with(Replicas::Regather, 1);
    assert_eq!(ratio(single.backward.unwrap().encode, once.backward.unwrap().encode), 8.0);
    assert_eq!(ratio(single.backward.unwrap().shared_refresh, once.backward.unwrap().shared_refresh), 8.0);
}

#[test]
fn memory_limits_domains_and_the_error_names_the_largest_that_fits() {
    let tight = deepseek(100.0, Options { memory_cap_gb: Some(3.0), ..Options::paper_codec() });
    // 2 x (4 - 1) x 2 experts of 88 MB in 2 live layers take 2.1 GB; a domain of twice the size takes 4.9 GB.
    assert!(tight.evaluate(&[2, 2, 1]).is_ok());
    let error = tight.evaluate(&[2, 4, 1]).unwrap_err().to_string();
    assert!(error.contains("[2, 4, 1] gather 4.933 GB"), "{error}");
    assert!(error.contains("may hold 3.000 GB; possible: at most 4 GPUs in a domain"), "{error}");
    let none = deepseek(100.0, Options { memory_cap_gb: Some(0.0), ..Options::paper_codec() });
    assert_eq!(none.plan().best.domain_sizes, [1, 1, 1]);
    let kept = Options { memory_cap_gb: Some(0.0), replicas: Replicas::Keep, ..Options::paper_codec() };
    assert_eq!(deepseek(100.0, kept).plan().best.domain_sizes, [1, 1, 1]);
}

#[test]
fn hot_experts_cost_time_and_balanced_placement_costs_less() {
    let with = |routing, placement| {
        let model = ModelDescription { routing, ..presets::deepseek_v3() };
        let options = Options { placement, ..Options::paper_codec() };
        planner(two_datacenters(100.0), model, options).plan().best
    };
    let zipf = Routing::Zipf { exponent: 1.0, shuffle_seed: 3 };
    let even = with(Routing::Even, Placement::InOrder);
    let in_order = with(zipf.clone(), Placement::InOrder);
    let balanced = with(zipf, Placement::Lpt);
    assert!(even.levels.iter().all(|level| (level.hot_factor - 1.0).abs() < 1e-9));
    assert!(even.layer_time < balanced.layer_time && balanced.layer_time < in_order.layer_time);
    // Larger domains balance the load as well: all GPUs of a domain serve the tokens of a hot expert.
    assert!(in_order.expert_domain_size() > even.expert_domain_size());
}

#[test]
fn narrower_tokens_are_cheaper_to_dispatch() {
    let mut model = presets::deepseek_v3();
    model.precision.dispatch = ElementType::Fp8;
    let narrow = planner(two_datacenters(100.0), model, Options::paper_codec()).evaluate(&[1, 1, 1]).unwrap();
    let wide = deepseek(100.0, Options::paper_codec()).evaluate(&[1, 1, 1]).unwrap();
    let ratio = narrow.levels[0].all_to_all.bytes_per_gpu / wide.levels[0].all_to_all.bytes_per_gpu;
    assert!((ratio - (1.03125 + 2.0) / 4.0).abs() < 1e-9);
}

#[test]
fn baselines_have_the_volumes_of_their_schemes() {
    let plan = deepseek(100.0, Options::paper_codec()).plan();
    let plain = &baseline(&plan, BaselineKind::PlainEp).candidate.levels[0];
    let hierarchical = &baseline(&plan, BaselineKind::HierarchicalEp).candidate.levels[0];
    assert!((plain.rows_per_token - 4.0).abs() < 1e-9); // top-8: half of the copies cross
    assert!((hierarchical.rows_per_token - 0.9966).abs() < 1e-4); // nearly every token crosses, once
    let inside = baseline(&plan, BaselineKind::EpInsideDatacenter);
    assert_eq!(inside.candidate.domain_sizes, [2, 1, 1]);
    assert_eq!(inside.candidate.levels[0].all_to_all, Transfer::default());
    let sent = inside.candidate.levels[0].all_gather;
    assert_eq!(sent.bytes_per_gpu.0, 2.0 * 88_080_384.0); // two experts, uncompressed
    assert_eq!(sent.bytes_per_link, sent.bytes_per_gpu * 64.0);
    assert_eq!(inside.candidate.forward.decode, Seconds::ZERO);
    // Replicas of all 58 layers, twice 88 MB for each of two experts, take 20 GB: more than this GPU has left.
    assert!(!inside.candidate.replicas_kept && inside.fits);
    let roomy = deepseek(100.0, Options { memory_cap_gb: Some(48.0), ..Options::paper_codec() }).plan();
    assert!(baseline(&roomy, BaselineKind::EpInsideDatacenter).candidate.replicas_kept);
}

/// Four distant datacenters: gradients in every micro-batch cost 63 times as much as one reduction per step.
#[test]
fn replicas_are_kept_by_default_where_that_is_faster() {
    let cluster = presets::datacenters(4, 1.0, 0.08, presets::dgx_h200(4));
    let with = |options| planner(cluster.clone(), presets::qwen3_235b(), options).plan();
    let plan = with(Options { micro_batches: 64, ..Options::paper_codec() });
    assert!(plan.best.replicas_kept && plan.faster_baseline().is_none());
    assert_eq!(plan.best.layer_time.to_string(), "481.4 ms");
    let regathered = Options { micro_batches: 64, replicas: Replicas::Regather, ..Options::paper_codec() };
    let plan = with(regathered);
    let faster = plan.faster_baseline().unwrap();
    assert_eq!(faster.kind, BaselineKind::EpInsideDatacenter);
    assert_eq!(
        (faster.candidate.layer_time.to_string(), plan.best.layer_time.to_string()),
        ("927.6 ms".into(), "30.40 s".into())
    );
}

#[test]
fn the_best_domain_sizes_change_at_the_reported_value() {
    let options = Options { memory_cap_gb: Some(24.0), ..Options::paper_codec() };
    let planner = deepseek(400.0, Options { work: Work::Forward, ..options });
    let plan = planner.plan();
    let uplink =
        plan.explanation.changes.iter().filter(|change| change.quantity == Quantity::LinkGbitPerS(0));
    let mut seen = 0;
    for change in uplink {
        let best_at = |gbit: f64| {
            let bandwidth = BytesPerSecond::from_gbit_per_s(gbit);
            let cluster = planner.cluster.with_bandwidth(0, bandwidth).unwrap();
            Planner::new(cluster, planner.model.clone(), planner.options.clone())
                .unwrap()
                .plan()
                .best
                .domain_sizes
        };
        let beyond = if change.at > change.now { 1.000_001 } else { 0.999_999 };
        assert_eq!(best_at(change.at * beyond), change.domain_sizes);
        assert_eq!(best_at(change.at / beyond), plan.best.domain_sizes);
        assert_eq!(change.now, 400.0);
        seen += 1;
    }
    assert!(seen > 0, "{:#?}", plan.explanation.changes);
}

#[test]
fn an_explanation_names_domains_limits_and_changes() {
    let options = Options { work: Work::Forward, memory_cap_gb: Some(24.0), ..Options::paper_codec() };
    let plan = deepseek(10.0, options).plan();
    let text = plan.explanation.text.join("\n");
    assert!(
        text.starts_with("Domains: 2 of 2 on 'wan', 8 of 8 on 'rail', 2 of 8 on 'nvlink'. A layer takes 18"),
        "{text}"
    );
    assert!(
        text.contains(
            "The longer chain is the transfers on the links. Its longest part is the all-gather on 'wan', "
        ),
        "{text}"
    );
    assert!(text.contains("candidates need more than the 24.00 GB"), "{text}");
    assert!(text.contains("Next best: (2, 8, 1)"), "{text}");
    assert!(text.contains("With 'wan' links of at least "), "{text}");
    assert_eq!(plan.explanation.forward.component, Component::AllGather(0));
    assert_eq!(plan.explanation.backward, None);
}

#[test]
fn a_plan_survives_json() {
    let plan = deepseek(100.0, Options::paper_codec()).plan();
    let json = serde_json::to_string_pretty(&plan).unwrap();
    let again: Plan = serde_json::from_str(&json).unwrap();
    assert_eq!(again.explanation.text, plan.explanation.text);
    assert_eq!(again.partition().unwrap().export(), plan.partition().unwrap().export());
    assert_eq!(plan.level_names, ["wan", "rail", "nvlink"]);
    let layers = 58.0;
    assert!((plan.step_time / plan.best.layer_time - layers).abs() < 1e-9);
    let options: Options = serde_json::from_str(r#"{"work": "forward", "replicas": "best"}"#).unwrap();
    assert_eq!(options, Options { work: Work::Forward, replicas: Replicas::Best, ..Options::default() });
}

#[test]
fn errors_of_impossible_combinations_name_the_possible_values() {
    let error = |cluster: ClusterDescription, model: ModelDescription, options| {
        Planner::new(cluster.try_into().unwrap(), model.try_into().unwrap(), options).unwrap_err().to_string()
    };
    let wrong = |options| error(two_datacenters(100.0), presets::deepseek_v3(), options);
    assert!(
        wrong(Options { weight_compression: Compression::By(0.5), ..Options::paper_codec() })
            .contains("from 1 to 1e6; 1 means no compression")
    );
    assert!(wrong(Options { reserved_memory: 1.0, ..Options::paper_codec() }).contains("from 0 to 0.999"));
    assert!(wrong(Options { micro_batches: 0, ..Options::paper_codec() }).contains("micro_batches is 0"));
    let small = presets::datacenters(2, 100.0, 0.005, presets::dgx_h100(8));
    assert!(
        error(small, presets::deepseek_v3(), Options::paper_codec()).contains("at least 2 pipeline stages")
    );
    assert!(deepseek(100.0, Options::paper_codec()).stream_model(3).is_err());
    assert!(deepseek(100.0, Options::paper_codec()).evaluate(&[2, 8]).is_err());
}

/// The uncompressed gradients of one more member have more bytes than the tokens that it saves, even where its experts
/// have fewer.
#[test]
fn one_more_member_costs_gradients() {
    let growth = |options| deepseek(100.0, options).plan().explanation.growth[0];
    let training = growth(Options::paper_codec());
    assert!(training.costs.0 < training.saves.0 && training.gradients.0 > 20.0 * training.costs.0);
    let forward = growth(Options { work: Work::Forward, ..Options::paper_codec() });
    assert_eq!((forward.gradients, forward.saves * 2.0), (Bytes::ZERO, training.saves));
}

/// The example: uncompressed experts gain little, and training gains little without compressed gradients.
#[test]
fn compression_decides_what_domains_gain() {
    let plan = deepseek(100.0, Options::paper_codec()).plan();
    let gains: Vec<String> = plan
        .compression_gains
        .iter()
        .map(|gain| format!("{} {:.2} {:.1}", gain.weight_compression, gain.training.unwrap(), gain.forward))
        .collect();
    assert_eq!(gains, ["1x 1.01 1.0", "int8 1.01 1.3", "5x 1.02 3.3", "50x 1.30 25.6"]);
    let gain = plan.compression_gains[3].training.unwrap();
    assert!((gain / baseline(&plan, BaselineKind::HierarchicalEp).speedup - 1.0).abs() < 1e-9);
}

/// A gain in training depends on the memory of training, and a gain of forward passes on the memory of forward passes,
/// whichever of the two is planned.
#[test]
fn gains_do_not_depend_on_the_planned_work() {
    let gains = |memory_gb, work| {
        let mut cluster = two_datacenters(100.0);
        cluster.gpu.memory_gb = memory_gb;
        let options = Options { work, ..Options::default() };
        let plan = planner(cluster, presets::deepseek_v3(), options).plan();
        plan.compression_gains.iter().map(|gain| (gain.training, gain.forward)).collect::<Vec<_>>()
    };
    let [training, forward] = [Work::Training, Work::Forward].map(|work| gains(141.0, work));
    assert_eq!(training, forward);
    // Weights fit, their gradients and Adam state do not.
    assert!(
        gains(80.0, Work::Forward).iter().all(|(training, forward)| training.is_none() && *forward >= 1.0)
    );
}

/// A domain that contains all members of a level cannot grow.
#[test]
fn only_domains_that_can_grow_are_tested() {
    let planner = deepseek(100.0, Options::paper_codec());
    let levels = |sizes: &[usize]| {
        let tests = planner.cost().growth_tests(sizes, false);
        tests.iter().map(|test| test.level).collect::<Vec<_>>()
    };
    assert_eq!(levels(&[1, 4, 1]), [0, 1, 2]);
    assert_eq!(levels(&[2, 8, 4]), [2]);
    let alone = planner.cluster.group(&[2, 1, 8]).unwrap();
    assert_eq!(CostModel { cluster: &alone, ..planner.cost() }.growth_tests(&[1, 1, 8], false).len(), 1);
}

#[test]
fn the_passes_of_every_alternative_add_up() {
    let plan = deepseek(25.0, Options::default()).plan();
    assert!(!plan.alternatives.is_empty());
    for other in &plan.alternatives {
        let backward = other.backward.as_ref().unwrap();
        let sum = other.forward.total.0 + backward.total.0;
        assert!((sum - other.layer_time.0).abs() <= 1e-12 * sum, "{other:?}");
    }
}
