use super::*;
use crate::cluster::ClusterDescription;
use crate::input::preset::{self, Joined};
use crate::model::ModelDescription;
use crate::planner::{GradientCodec, Replicas};
use crate::presets;
use crate::simulate::{SimulationOptions, Straggler, Stragglers};
use crate::units::{BytesPerSecond, Seconds};

fn deepseek(nodes: usize, gbit: f64, options: Options) -> StepPlan {
    let cluster = presets::datacenters(2, gbit, 0.005, presets::dgx_h200(nodes));
    let model = presets::deepseek_v3().try_into().unwrap();
    StepPlanner::new(cluster.try_into().unwrap(), model, options).unwrap().plan().unwrap()
}

fn seconds(plan: &StepPlan, strategy: Strategy) -> f64 {
    plan.price(strategy).unwrap().step_time.0
}

/// One micro-batch on each of 2 x 64 GPUs. With two stages, each GPU of a stage has two.
#[test]
fn a_pipeline_beats_expert_domains_on_a_fast_link() {
    let one = Options { batch: Batch::MicroBatches, ..Options::paper_codec() };
    let plan = deepseek(8, 100.0, one);
    assert_eq!(plan.best().strategy, Strategy::Pipeline);
    assert_eq!((plan.best().micro_batches, plan.global_batch), (2, 128.0 * 4096.0));
    let domains = plan.price(Strategy::ExpertDomains).unwrap();
    assert!((domains.passes.0 - 56.7).abs() < 0.1 && (domains.dense_sync.0 - 4.4).abs() < 0.1);
    assert!((seconds(&plan, Strategy::Pipeline) - 4.8).abs() < 0.1);
}

/// The published batch on 2 x 256 GPUs in four stages, which share the uplinks.
#[test]
fn expert_domains_beat_a_pipeline_on_a_slow_link() {
    let four = Options { pipeline_stages: Some(4), ..Options::paper_codec() };
    let fast = deepseek(32, 100.0, four.clone());
    assert_eq!(fast.best().micro_batches, 120);
    assert_eq!(fast.best().strategy, Strategy::Pipeline);
    // 120 + 3 micro-batches of 15 layers of 73.7 ms, and dense gradients.
    let domains = seconds(&fast, Strategy::ExpertDomains);
    assert!((domains - (123.0 * 15.0 * 0.07369 + 4.3)).abs() < 0.2, "{domains}");
    let slow = deepseek(32, 10.0, four);
    assert_eq!(slow.best().strategy, Strategy::ExpertDomains);
    // The activations of 128 GPUs cross one uplink in every micro-batch: 120 x 6.01 s.
    let pipeline = seconds(&slow, Strategy::Pipeline);
    assert!((pipeline / 722.0 - 1.0).abs() < 0.02, "{pipeline}");
    let link = slow.price(Strategy::Pipeline).unwrap().bottlenecks()[0];
    assert!(link.level == 0 && (link.time.0 - 6.01).abs() < 0.01, "{link:?}");
    assert_eq!(fast.best().bottlenecks(), [], "stages wait for no link of 100 Gbit/s");
    assert!((seconds(&slow, Strategy::ExpertDomains) / 687.5 - 1.0).abs() < 0.01);
}

/// The layers of every strategy are those of its price, not those of expert domains.
#[test]
fn layers_are_those_of_the_strategy() {
    let cluster: Cluster = presets::datacenters(2, 100.0, 0.005, presets::dgx_h200(16)).try_into().unwrap();
    let model: Model = presets::deepseek_v3().try_into().unwrap();
    for options in [Options::default(), Options { replicas: Replicas::Keep, ..Options::paper_codec() }] {
        let planner = StepPlanner::new(cluster.clone(), model.clone(), options).unwrap();
        let plan = planner.plan().unwrap();
        assert_eq!(plan.prices.len(), 6);
        for price in &plan.prices {
            let layers = planner.layer_plan(price).unwrap();
            assert_eq!(layers.best, price.candidate, "{:?}", price.strategy);
            if price.strategy.path().is_some() {
                assert_eq!((&layers.best.domain_sizes[..], layers.candidates), (&[1, 1, 1][..], 1));
                assert!(layers.alternatives.is_empty() && layers.explanation.changes.is_empty());
            }
        }
    }
}

/// Options can fix the stages, the GPUs of an EP group and the tensor parallelism of all strategies.
#[test]
fn a_layout_can_be_fixed() {
    let plan = |options: Options| {
        let cluster = presets::datacenters(2, 100.0, 0.005, presets::dgx_h200(8)).try_into().unwrap();
        StepPlanner::new(cluster, presets::mixtral_8x7b().try_into().unwrap(), options).unwrap().plan()
    };
    let fixed = |stages, group, tensor| Options {
        pipeline_stages: Some(stages),
        expert_parallel: Some(group),
        tensor_parallel: Some(tensor),
        ..Options::default()
    };
    for (stages, group, tensor) in [(1, 8, 1), (1, 2, 2), (2, 4, 8)] {
        let found = plan(fixed(stages, group, tensor)).unwrap();
        assert!(!found.prices.is_empty());
        for price in found.prices {
            let layout = price.layout;
            assert_eq!(
                (layout.stages(), layout.group_gpus(), layout.tensor_parallel),
                (stages, group, tensor),
                "{:?}",
                price.strategy
            );
        }
    }
    // At most the 8 GPUs of a node split dense parameters.
    for (options, key, value) in [
        (fixed(3, 8, 1), "pipeline_stages", 3),
        (fixed(1, 3, 1), "expert_parallel", 3),
        (fixed(1, 8, 16), "tensor_parallel", 16),
    ] {
        match plan(options).unwrap_err() {
            PlanError::Division { key: found, value: of, possible } => {
                assert_eq!((found, of), (key, value));
                assert!(possible.contains(&1) && !possible.contains(&value), "{possible:?}");
            }
            other => panic!("{other}"),
        }
    }
}

/// No layout of 2 x 8 x 8 GPUs has three stages. With 10 nodes in each datacenter five stages exist, but not for a pipeline.
#[test]
fn a_number_of_stages_that_no_layout_has_is_refused() {
    let plan = |nodes, stages| {
        let cluster = presets::datacenters(2, 100.0, 0.005, presets::dgx_h200(nodes)).try_into().unwrap();
        let options = Options { pipeline_stages: Some(stages), ..Options::default() };
        StepPlanner::new(cluster, presets::deepseek_v3().try_into().unwrap(), options).unwrap().plan()
    };
    let error = plan(8, 3).unwrap_err();
    let possible = vec![1, 2, 4, 8, 16, 32];
    assert_eq!(error, PlanError::Division { key: "pipeline_stages", value: 3, possible });
    assert!(error.to_string().contains("pipeline_stages is 3") && error.to_string().contains("1, 2, 4, 8"));
    // A pipeline has equally many stages in each of the two datacenters, so 10 and not 5. Stages of the other
    // strategies span both.
    let ten = plan(10, 10).unwrap();
    assert_eq!(ten.impossible, []);
    let five = plan(10, 5).unwrap();
    assert_eq!(five.without_layout, [Strategy::Pipeline]);
    assert!(
        five.price(Strategy::DataParallel).is_some() || five.impossible.contains(&Strategy::DataParallel)
    );
}

/// A GPU holds whole experts of whole layers, so a model may have no layout although all GPUs together have enough
/// memory for it.
#[test]
fn a_model_that_does_not_divide_says_so() {
    let mut cluster = presets::datacenters(2, 100.0, 0.005, presets::dgx_h200(1));
    cluster.levels.truncate(1);
    cluster.gpu.memory_gb = 15.0;
    let mut model = presets::mixtral_8x7b();
    (model.experts, model.moe_layers, model.other_parameters) = (3, 3, 0.0);
    let planner =
        StepPlanner::new(cluster.try_into().unwrap(), model.try_into().unwrap(), Options::default()).unwrap();
    let error = planner.plan().unwrap_err();
    assert!(matches!(error, PlanError::NoLayout { .. }), "{error}");
    assert!(error.to_string().contains("whole experts of whole layers"), "{error}");
    assert!(!error.to_string().contains("pipeline stages"), "{error}");
}

/// The members of a single level are sites: tensor parallelism does not cross them.
#[test]
fn a_cluster_of_one_level_has_no_tensor_parallelism() {
    let mut cluster = presets::datacenters(4, 10.0, 0.005, presets::dgx_h200(1));
    cluster.levels.truncate(1);
    let mut model = presets::mixtral_8x7b();
    // Two GPUs could hold a copy of the dense parameters within the reserve, one cannot.
    (model.moe_layers, model.other_parameters) = (1, 6e9);
    let planner =
        StepPlanner::new(cluster.try_into().unwrap(), model.try_into().unwrap(), Options::default()).unwrap();
    let plan = planner.plan().unwrap();
    for price in &plan.prices {
        assert_eq!((price.layout.tensor_parallel, price.tensor_exchange.0), (1, 0.0), "{:?}", price.strategy);
    }
    let local = plan.price(Strategy::LocalSteps).unwrap();
    assert_eq!(local.fit, Fit::Tight);
}

/// A single datacenter has no other to exchange with.
#[test]
fn strategies_between_sites_need_several() {
    let mut cluster = presets::datacenters(2, 100.0, 0.005, presets::dgx_h200(16));
    cluster.levels[0].scaling_factor = 1;
    let planner = StepPlanner::new(
        cluster.try_into().unwrap(),
        presets::deepseek_v3().try_into().unwrap(),
        Options::default(),
    );
    let plan = planner.unwrap().plan().unwrap();
    let spanning = [Strategy::Pipeline, Strategy::HierarchicalEp, Strategy::PlainEp, Strategy::ExpertDomains];
    assert_eq!(plan.without_layout, spanning);
}

/// Dense gradients cross the link in every strategy but a pipeline with a stage per datacenter, whose stages hold
/// different parameters, and local steps, which send weights.
#[test]
fn a_codec_of_dense_gradients_is_priced_where_they_cross() {
    let by = |dense_gradient_compression| {
        let one = Options { batch: Batch::MicroBatches, ..Options::default() };
        deepseek(16, 10.0, Options { dense_gradient_compression, pipeline_stages: Some(2), ..one })
    };
    let plans = [None, Some(GradientCodec::Exact), Some(GradientCodec::Int8)].map(by);
    for strategy in Strategy::ALL {
        let [unset, exact, int8] = plans.each_ref().map(|plan| plan.price(strategy).unwrap());
        let crosses = !matches!(strategy, Strategy::Pipeline | Strategy::LocalSteps);
        assert_eq!(unset.dense_exchange, None);
        assert_eq!((exact.dense_exchange.is_some(), int8.dense_exchange.is_some()), (crosses, crosses));
        if !crosses {
            assert_eq!((unset, exact), (exact, int8), "{strategy:?}");
            continue;
        }
        assert_eq!(exact.layout, int8.layout, "{strategy:?}");
        // Between two datacenters 4 bytes per element instead of 3, or 132 bytes per 128 elements.
        let [exact, int8] = [exact, int8].map(|price| price.dense_exchange.unwrap().transfer.bytes_per_link);
        assert!((exact / int8 - 4.0 * 128.0 / 132.0).abs() < 1e-9, "{strategy:?}");
        let seconds = |price: &StepPrice| price.dense_sync.0;
        let [unset, exact, int8] = plans.each_ref().map(|plan| seconds(plan.price(strategy).unwrap()));
        assert!((exact / unset - 4.0 / 3.0).abs() < 0.02, "{strategy:?}: {exact} {unset}");
        assert!((int8 / unset - 132.0 / 128.0 / 3.0).abs() < 0.03, "{strategy:?}: {int8} {unset}");
    }
}

/// A pipeline of two stages over four datacenters: each stage has replicas in two of them, which exchange gradients.
#[test]
fn a_stage_of_several_datacenters_exchanges_dense_gradients() {
    let cluster = presets::datacenters(4, 10.0, 0.005, presets::dgx_h200(8)).try_into().unwrap();
    let options = Options {
        dense_gradient_compression: Some(GradientCodec::Int8),
        pipeline_stages: Some(2),
        ..Options::default()
    };
    let model = presets::deepseek_v3().try_into().unwrap();
    let plan = StepPlanner::new(cluster, model, options).unwrap().plan().unwrap();
    let pipeline = plan.price(Strategy::Pipeline).unwrap();
    assert_eq!(pipeline.layout.stage[0], 2);
    let exchange = pipeline.dense_exchange.unwrap();
    let dense = memory::dense_parameters(&presets::deepseek_v3().try_into().unwrap(), &pipeline.layout);
    let inside: usize = pipeline.layout.dense_copies()[1..].iter().product();
    // One other datacenter.
    let bytes = dense / inside as f64 * 132.0 / 128.0;
    assert!((exchange.transfer.bytes_per_gpu.0 / bytes - 1.0).abs() < 1e-9, "{exchange:?}");
}

/// Every datacenter makes the update, so its GPUs hold the Adam state of all dense parameters.
#[test]
fn every_datacenter_keeps_the_adam_state_of_dense_parameters() {
    let cluster: Cluster = presets::datacenters(2, 10.0, 0.0, presets::dgx_h200(8)).try_into().unwrap();
    let model: Model = presets::deepseek_v3().try_into().unwrap();
    let layout = Layout {
        stages_across: 1,
        stages_inside: 1,
        tensor_parallel: 2,
        stage: vec![2, 8, 8],
        group: vec![2, 8, 8],
    };
    let of = |dense_gradient_compression, strategy| {
        let options = Options { dense_gradient_compression, ..Options::default() };
        StepMemory::of(&cluster, &model, &options, strategy, &layout).dense.0
            / memory::dense_parameters(&model, &layout)
    };
    let bytes = |codec| of(codec, Strategy::ExpertDomains);
    assert!((of(None, Strategy::LocalSteps) - (4.0 + 12.0 / 32.0)).abs() < 1e-9, "weights differ");
    // Weights and gradients in bf16; 64 replicas, of which a datacenter has 32; a carry of 4 bytes.
    assert!((bytes(None) - (4.0 + 12.0 / 64.0)).abs() < 1e-9);
    assert!((bytes(Some(GradientCodec::Exact)) - (4.0 + 12.0 / 32.0)).abs() < 1e-9);
    assert!((bytes(Some(GradientCodec::Int8)) - (4.0 + 16.0 / 32.0)).abs() < 1e-9);
}

#[test]
fn a_density_out_of_range_is_refused() {
    let cluster: Cluster = presets::datacenters(2, 10.0, 0.0, presets::dgx_h200(8)).try_into().unwrap();
    for density in [0.0, -0.1, 1.5, f64::NAN, f64::INFINITY] {
        let dense_gradient_compression = Some(GradientCodec::TopK { density });
        let options = Options { dense_gradient_compression, ..Options::default() };
        let model = presets::deepseek_v3().try_into().unwrap();
        let error = StepPlanner::new(cluster.clone(), model, options).unwrap_err().to_string();
        assert!(error.starts_with("density of dense_gradient_compression is "), "{error}");
        assert!(error.ends_with("it must be more than 0 and at most 1"), "{error}");
    }
}

#[test]
fn local_steps_are_listed_and_never_chosen() {
    // The weights and the Adam state of a datacenter need more memory than 64 GPUs have.
    assert_eq!(deepseek(8, 1.0, Options::paper_codec()).price(Strategy::LocalSteps), None);
    let plan = deepseek(16, 1.0, Options::paper_codec());
    assert!(seconds(&plan, Strategy::LocalSteps) < plan.best().step_time.0);
    assert_ne!(plan.best().strategy, Strategy::LocalSteps);
    let often = deepseek(16, 1.0, Options { local_steps: 1, ..Options::paper_codec() });
    assert!(seconds(&often, Strategy::LocalSteps) > 10.0 * seconds(&plan, Strategy::LocalSteps));
}

/// Every preset model on every preset cluster has a plan, or does not fit into the memory of all GPUs.
#[test]
fn every_pair_of_presets_is_planned() {
    let (mut planned, mut refused) = (0, Vec::new());
    for datacenters in [2, 3] {
        for cluster in preset::CLUSTERS {
            let joined = Joined { datacenters, ..Joined::default() };
            let cluster_of = preset::cluster(cluster.name, &joined).unwrap();
            for model in preset::MODELS {
                let (found, wanted) =
                    (Cluster::try_from(cluster_of.clone()).unwrap(), preset::model(model.name).unwrap());
                let model_of = Model::try_from(wanted).unwrap();
                let (needed, memory) = (memory::whole_model(&model_of), found.memory() * found.gpus() as f64);
                match StepPlanner::new(found, model_of, Options::paper_codec())
                    .and_then(|planner| planner.plan())
                {
                    Ok(plan) => {
                        planned += 1;
                        assert!(plan.best().step_time.0.is_finite() && !plan.truncated);
                    }
                    Err(error) => {
                        assert!(
                            matches!(error, PlanError::TotalMemory { .. }),
                            "{} {}: {error}",
                            cluster.name,
                            model.name
                        );
                        assert!(needed.0 > memory.0);
                        refused.push((cluster.name, model.name));
                    }
                }
            }
        }
    }
    // DeepSeek-V3 needs 10.7 TB, and 128 GPUs of 80 GB have 10.2 TB; the paper's clusters have at most 2.6 TB.
    assert_eq!((planned, refused.len()), (93, 19), "{refused:?}");
    assert!(refused.iter().all(|(cluster, _)| cluster.starts_with("paper") || *cluster == "dgx-h100"));
}

/// Every strategy, simulated: within 5 % of the price, plus what SIMULATOR.md lists. One gather and one reduction overlap
/// with nothing; levels and chunks overlap more than the formula assumes.
#[test]
fn simulated_steps_agree_with_prices() {
    let codecs = [None, Some(GradientCodec::Exact), Some(GradientCodec::Int8)];
    for (gbit, dense_gradient_compression) in
        [1.0, 100.0, 1600.0].into_iter().flat_map(|gbit| codecs.map(|codec| (gbit, codec)))
    {
        let options = Options { dense_gradient_compression, ..Options::paper_codec() };
        // Local steps need memory for weights and Adam state of all layers in each site. 64 GPUs have it for 20 layers, not for
        // 58.
        let mut simulated = Vec::new();
        for layers in [58, 20] {
            let mut model = presets::deepseek_v3();
            model.moe_layers = layers;
            simulated.extend(simulated_and_priced(gbit, model, &options));
        }
        let missing = Strategy::ALL.into_iter().find(|strategy| !simulated.contains(strategy));
        assert_eq!(missing, None, "{gbit} {dense_gradient_compression:?}");
    }
}

/// Compares the step of each strategy that fits with its price, and returns these strategies.
fn simulated_and_priced(gbit: f64, mut model: ModelDescription, options: &Options) -> Vec<Strategy> {
    // Without latency, because the simulator hides more of it than the formula (SIMULATOR.md).
    let mut cluster = presets::datacenters(2, gbit, 0.0, presets::dgx_h200(8));
    cluster.levels.iter_mut().for_each(|level| (level.alpha_s, level.round_trip_s) = (0.0, 0.0));
    let moe_layers = model.moe_layers as f64;
    model.global_batch = Some(4 << 20);
    let planner =
        StepPlanner::new(cluster.try_into().unwrap(), model.try_into().unwrap(), options.clone()).unwrap();
    let prices = planner.plan().unwrap().prices;
    for price in &prices {
        let simulated = planner.simulate(price, Default::default()).unwrap();
        let case = (gbit, options.dense_gradient_compression, moe_layers, price.strategy);
        // The exchanges at the end of a step are those of the formula.
        let exchanges = price.dense_sync + price.expert_sync;
        assert!(
            (simulated.step_time - simulated.passes - exchanges).0.abs() <= 1e-9 * simulated.step_time.0,
            "{case:?}"
        );
        let micro_batches = price.micro_batches as f64;
        let layers = moe_layers / price.layout.stages() as f64;
        let candidate = &price.candidate;
        let passes = [Some(candidate.forward), candidate.backward];
        let once: f64 = passes
            .iter()
            .flatten()
            .map(|pass| (pass.all_gather + pass.gradients + pass.shared_refresh).0)
            .sum();
        let transfers = candidate.levels.iter().map(|level| {
            2.0 * level.all_to_all.time.0 + 2.0 * level.all_gather.time.0 + level.gradients.time.0
        });
        let inner = transfers.clone().sum::<f64>() - transfers.fold(0.0, f64::max);
        let expert = 3.0 * candidate.forward.expert.0 / 4.0;
        let differences = micro_batches * (layers * (inner + expert) + 2.0 * once);
        let error = (simulated.step_time - price.step_time).0.abs();
        assert!(
            error <= 0.05 * price.step_time.0 + differences,
            "{case:?}: simulated {} priced {} differences {differences}",
            simulated.step_time,
            price.step_time
        );
    }
    prices.iter().map(|price| price.strategy).collect()
}

/// The simulated steps of all strategies that fit, with these slow links. `change` makes the links of the cluster unequal.
fn with_slow_links(
    change: impl Fn(&mut ClusterDescription),
    links: &[(usize, usize)],
) -> Vec<(Strategy, f64)> {
    let mut cluster = presets::datacenters(4, 40.0, 0.01, presets::dgx_h200(4));
    change(&mut cluster);
    let mut model = presets::qwen3_235b();
    model.global_batch = Some(1 << 20);
    let planner =
        StepPlanner::new(cluster.try_into().unwrap(), model.try_into().unwrap(), Options::default()).unwrap();
    // The layouts are those of equal links.
    let equal = presets::datacenters(4, 40.0, 0.01, presets::dgx_h200(4)).try_into().unwrap();
    let prices = StepPlanner { cluster: equal, ..planner.clone() }.plan().unwrap().prices;
    let list = links.iter().map(|&(level, link)| Straggler::Link { level, link, slowdown: 4.0 }).collect();
    let stragglers = Stragglers::Listed(list);
    let simulated = |price: &StepPrice| {
        let price = &planner.pricing().price(price.strategy, &price.layout).unwrap().unwrap();
        let options = SimulationOptions { stragglers: stragglers.clone(), ..SimulationOptions::default() };
        (price.strategy, planner.simulate(price, options).unwrap().step_time.0)
    };
    let prices = prices.iter().filter(|price| price.strategy != Strategy::LocalSteps);
    prices.map(simulated).collect()
}

/// A slow link makes a step as long as links of less bandwidth at its site do, whether EP groups, stages or replicas cross it.
#[test]
fn slow_links_are_those_of_the_cluster() {
    let even = with_slow_links(|_| {}, &[]);
    for site in 0..4 {
        let slow = with_slow_links(|_| {}, &[(0, site)]);
        let mut uplinks = [40.0; 4];
        uplinks[site] = 10.0;
        let narrow = with_slow_links(|cluster| cluster.levels[0].set_bandwidths(&uplinks), &[]);
        for ((&(strategy, slow), &(_, narrow)), &(_, even)) in slow.iter().zip(&narrow).zip(&even) {
            assert!((slow / narrow - 1.0).abs() < 0.01, "{strategy:?} {site}: {slow} {narrow}");
            assert!(slow > 1.05 * even, "{strategy:?} {site}: {slow} {even}");
        }
    }
    // The same holds if the uplink of another site has less bandwidth.
    let uplinks = |uplinks: [f64; 4], slow: &[(usize, usize)]| {
        with_slow_links(|cluster| cluster.levels[0].set_bandwidths(&uplinks), slow)
    };
    let slow = uplinks([40.0, 40.0, 40.0, 10.0], &[(0, 1)]);
    let narrow = uplinks([40.0, 10.0, 40.0, 10.0], &[]);
    for (&(strategy, slow), &(_, narrow)) in slow.iter().zip(&narrow) {
        assert!((slow / narrow - 1.0).abs() < 0.01, "{strategy:?}: {slow} {narrow}");
    }
    // A slow link inside a site slows an exchange of replicas there. Simulated layers can become a little shorter
    // (SIMULATOR.md).
    let rail = with_slow_links(|_| {}, &[(1, 60)]);
    let inside =
        with_slow_links(|cluster| cluster.levels[1].set_bandwidths(&[400.0, 100.0, 400.0, 400.0]), &[]);
    for ((&(strategy, rail), &(_, even)), &(_, inside)) in rail.iter().zip(&even).zip(&inside) {
        assert!(rail >= even * 0.95 && rail <= inside * 1.05, "{strategy:?}: {rail} {even} {inside}");
    }
    assert!(rail.iter().zip(&even).any(|(rail, even)| rail.1 > 1.01 * even.1), "{rail:?} {even:?}");
}

/// Links of unequal sites: one uplink per site, whatever the number of its parts.
#[test]
fn slow_links_of_unequal_sites_are_found() {
    let mut cluster = presets::datacenters(3, 100.0, 0.005, presets::dgx_h200(8));
    cluster.levels[1].set_members(&[8, 8, 4]);
    let cluster = Cluster::try_from(cluster).unwrap();
    assert_eq!((cluster.links(0), cluster.links(1)), (3, 160));
    assert_eq!([0, 1, 2].map(|link| cluster.gpus_of_link(0, link)), [0..64, 64..128, 128..160]);
    assert_eq!(cluster.gpus_of_link(1, 130), 130..131);
    assert_eq!([0, 63, 64, 127, 128, 159].map(|gpu| cluster.site_of_gpu(gpu)), [0, 0, 1, 1, 2, 2]);
}

/// The parts of a step have its time as their sum, and none is negative. A step on one stage has neither fill nor links
/// between stages.
#[test]
fn the_parts_of_a_step_add_up() {
    for (nodes, gbit) in [(8, 100.0), (8, 1.0), (32, 10.0)] {
        let plan = deepseek(nodes, gbit, Options::default());
        for price in &plan.prices {
            let parts = price.parts();
            let all = [parts.compute, parts.exchanges, parts.stage_links, parts.fill, parts.replicas];
            let step = price.step_time.0;
            assert!(all.iter().all(|part| part.0 >= -1e-9 * step), "{:?}: {parts:?}", price.strategy);
            let sum: Seconds = all.into_iter().sum();
            assert!((sum.0 / step - 1.0).abs() < 1e-9, "{:?}: {parts:?}", price.strategy);
            assert_eq!(parts.stage_links.0 > 0.0, !price.bottlenecks().is_empty(), "{:?}", price.strategy);
            if price.layout.stages() == 1 {
                assert!(parts.fill.0.abs() < 1e-9 * step, "{parts:?}");
            }
        }
    }
}

/// Gathers inside a datacenter that save little are left out, and the report's layers are those of the price.
#[test]
fn gathers_that_save_little_are_left_out() {
    let mut gathering = 0;
    let slow_rails = BytesPerSecond::from_gbit_per_s(25.0);
    for (nodes, rails, expert_parallel) in [(2, None, None), (8, None, None), (8, Some(slow_rails), Some(64))]
    {
        let cluster = presets::datacenters(2, 25.0, 0.02, presets::dgx_h200(nodes));
        let mut cluster: Cluster = cluster.try_into().unwrap();
        if let Some(rate) = rails {
            cluster = cluster.with_bandwidth(1, rate).unwrap();
        }
        let model: Model = presets::qwen3_235b().try_into().unwrap();
        let options = Options { expert_parallel, ..Options::default() };
        let planner = StepPlanner::new(cluster, model, options).unwrap();
        for price in planner.plan().unwrap().prices.iter().filter(|price| !price.strategy.spans()) {
            let layers = planner.layer_plan(price).unwrap();
            assert_eq!(layers.best, price.candidate, "{:?}", price.strategy);
            let without = planner.pricing().planner(price.strategy, &price.layout).unwrap();
            let without = without.evaluate(&vec![1; price.layout.group.len()]).unwrap();
            let saves = 1.0 - price.candidate.layer_time / without.layer_time;
            if price.candidate.expert_domain_size() > 1 {
                gathering += 1;
                assert!(saves > LEAST_SAVING, "{:?} {saves}", price.strategy);
            }
        }
    }
    // Gathers that save more remain.
    assert!(gathering > 0);
}
