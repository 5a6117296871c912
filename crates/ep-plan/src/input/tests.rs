use proptest::prelude::*;

use super::*;
use crate::cluster::Sharing;
use crate::model::ElementType;
use crate::planner::{Compression, GradientCodec, Replicas, Work};
use crate::presets;
use crate::routing::{Placement, Routing};

const GOOD: &str = r#"
[cluster]
name = "two datacenters"

[[cluster.level]]
name = "wan"
members = 2
bandwidth = "100 Gbit/s"
sharing = "per-member"
round_trip = "5 ms"
alpha_us = 20

[[cluster.level]]
name = "nvlink"
members = 8
bandwidth_gb_per_s = 450
sharing = 2

[cluster.gpu]
throughput = "400 TFLOP/s"
memory = "80 GB"
memory_bandwidth = "3.35 TB/s"

[model]
preset = "mixtral-8x7b"
experts = 16
precision = { dispatch = "fp8" }
routing = { zipf = 1.0 }

[options]
work = "forward"
memory_cap = "24 GB"
gradient_accumulation = 4
"#;

#[test]
fn a_file_is_read() {
    let document = parse("plan.toml", GOOD).unwrap();
    let cluster = document.cluster.unwrap();
    assert_eq!(cluster.levels[0].bandwidth_gbit_per_s, 100.0);
    assert_eq!((cluster.levels[0].alpha_s, cluster.levels[0].round_trip_s), (20e-6, 0.005));
    assert_eq!(cluster.levels[0].sharing, Sharing::PerMember);
    assert_eq!(
        (cluster.levels[1].bandwidth_gbit_per_s, cluster.levels[1].sharing),
        (3600.0, Sharing::Gpus(2))
    );
    assert_eq!(cluster.gpu.hbm_gb_per_s, 3350.0);
    let model = document.model.unwrap();
    assert_eq!((model.experts, model.topk, model.hidden), (16, 2, 4096));
    assert_eq!(model.precision.dispatch, ElementType::Fp8);
    assert_eq!(model.precision.combine, ElementType::Bf16);
    assert_eq!(model.routing, Routing::Zipf { exponent: 1.0, shuffle_seed: 0 });
    let options = document.options.unwrap();
    assert_eq!((options.work, options.memory_cap_gb, options.micro_batches), (Work::Forward, Some(24.0), 4));
    assert_eq!(options.weight_compression, Compression::Int8);
    assert_eq!(parse("empty", "").unwrap(), Document::default());
}

/// The error message after one line of the valid file is replaced.
fn message(line: &str, instead: &str) -> String {
    assert_eq!(GOOD.matches(line).count(), 1, "{line}");
    parse("plan.toml", &GOOD.replace(line, instead)).unwrap_err().to_string()
}

#[test]
fn mistakes_are_reported_with_line_and_key() {
    for (line, instead, expected) in [
        (
            "bandwidth = \"100 Gbit/s\"",
            "bandwidth = \"100 gb/s\"",
            "plan.toml:8:13: cluster.level[0].bandwidth: \"gb/s\" is not a unit of link bandwidth, where `bit` or \
             `b` is a bit \
             and `B` is a byte; possible: \"100 Gbit/s\" (bits) or \"12.5 GB/s\" (bytes)",
        ),
        (
            "bandwidth = \"100 Gbit/s\"",
            "bandwidth = 100",
            "plan.toml:8:13: cluster.level[0].bandwidth: is a number without a unit; possible: \"100 Gbit/s\" \
             (bits) or \
             \"12.5 GB/s\" (bytes), or the key bandwidth_gbit_per_s or bandwidth_gb_per_s",
        ),
        (
            "bandwidth = \"100 Gbit/s\"",
            "bandwith = \"100 Gbit/s\"",
            "plan.toml:8:1: cluster.level[0].bandwith: unknown key; possible: bandwidth; all keys here: name, \
             members, sharing, efficiency, loss, flows, alpha, round_trip, bandwidth",
        ),
        (
            "bandwidth = \"100 Gbit/s\"",
            "bandwidth = \"0 Gbit/s\"",
            "plan.toml:8:13: cluster.level[0].bandwidth: is 0 Gbit/s; possible: from 1e-6 to 1e9 Gbit/s",
        ),
        (
            "bandwidth = \"100 Gbit/s\"",
            "",
            "plan.toml:5:1: cluster.level[0]: `bandwidth` is missing; possible: bandwidth = \"100 Gbit/s\" (bits) or \
             \"12.5 GB/s\" (bytes)",
        ),
        (
            "members = 8",
            "members = 0",
            "plan.toml:15:11: cluster.level[1].members: is 0; possible: a whole number from 1 to 65536",
        ),
        (
            "members = 8",
            "members = \"eight\"",
            "plan.toml:15:11: cluster.level[1].members: is a string; possible: a whole number from 1 to 65536",
        ),
        (
            "name = \"nvlink\"",
            "name = \"wan\"",
            "plan.toml:14:8: cluster.level[1].name: another level is already named 'wan'; possible: a name that no \
             other level has",
        ),
        (
            "sharing = 2",
            "sharing = \"all\"",
            "plan.toml:17:11: cluster.level[1].sharing: is not a way to share a link; possible: \"per-gpu\", \
             \"per-member\", or \
             the number of GPUs that share a link",
        ),
        (
            "alpha_us = 20",
            "alpha_us = 20\nalpha = \"20 us\"",
            "plan.toml:11:12: cluster.level[0].alpha_us: `alpha` is given twice; possible: alpha or alpha_us, \
             not both",
        ),
        (
            "round_trip = \"5 ms\"",
            "round_trip = \"-5 ms\"",
            "plan.toml:10:14: cluster.level[0].round_trip: is -0.005 s; possible: from 0 to 1e6 s",
        ),
        (
            "memory = \"80 GB\"",
            "memory = \"80 Gbit\"",
            "plan.toml:21:10: cluster.gpu.memory: \"Gbit\" is not a unit of memory, which is in bytes; possible: \
             \"24 GB\" or \
             \"24 GiB\"",
        ),
        (
            "preset = \"mixtral-8x7b\"",
            "preset = \"mixtral\"",
            "plan.toml:25:10: model.preset: \"mixtral\" is not a preset; possible: deepseek-v3, qwen3-235b, \
             mixtral-8x7b, \
             mixtral-8x22b, paper-llama-tiny, paper-mistral-small, paper-gpt-medium, paper-gpt-large",
        ),
        (
            "preset = \"mixtral-8x7b\"",
            "",
            "plan.toml:24:1: model: `hidden` is missing; possible: hidden = a whole number from 1 to 1048576",
        ),
        (
            "experts = 16",
            "topk = 9",
            "plan.toml:26:8: model.topk: top-9 of 8 experts: a token chooses at least 1 and at most 8 distinct \
             experts",
        ),
        (
            "routing = { zipf = 1.0 }",
            "routing = { histogram = [1, 2] }",
            "plan.toml:28:11: model.routing: routing histogram: 2 counts for 16 experts; give one count per expert",
        ),
        (
            "routing = { zipf = 1.0 }",
            "routing = \"skewed\"",
            "plan.toml:28:11: model.routing: \"skewed\" is unknown; possible: \"even\", { zipf = 1.0 } or { histogram = [a \
             count per \
             expert] }",
        ),
        (
            "work = \"forward\"",
            "work = \"backward\"",
            "plan.toml:31:8: options.work: \"backward\" is unknown; possible: \"training\", \"forward\"",
        ),
        (
            "work = \"forward\"",
            "weight_compression = 0.5",
            "plan.toml:31:22: options.weight_compression: is 0.5; possible: a number from 1 to 1e6",
        ),
        (
            "work = \"forward\"",
            "dense_gradient_compression = \"int4\"",
            "plan.toml:31:30: options.dense_gradient_compression: unknown codec `int4`: the codecs are `exact`, `int8` and \
             `topk`",
        ),
        (
            "work = \"forward\"",
            "dense_gradient_compression = \"topk:0\"",
            "plan.toml:31:30: options.dense_gradient_compression: density `0` of the codec `topk`: it must be a number, \
             more than 0 and at most 1",
        ),
        (
            "work = \"forward\"",
            "dense_gradient_compression = 4",
            "plan.toml:31:30: options.dense_gradient_compression: is a number; possible: \"exact\", \"int8\" or \
             \"topk:DENSITY\"",
        ),
        (
            "work = \"forward\"",
            "reserved_memory = 1",
            "plan.toml:31:19: options.reserved_memory: is 1; possible: a number from 0 to 0.999",
        ),
    ] {
        assert_eq!(message(line, instead), expected);
    }
    assert_eq!(
        parse("p", "[clusters]").unwrap_err().to_string(),
        "p:1:2: clusters: unknown key; possible: cluster; all keys here: cluster, model, options"
    );
    let error = parse("p", "a = [1,\n  2").unwrap_err().to_string();
    assert!(error.starts_with("p:2:") && error.contains("not TOML"), "{error}");
    assert!(
        parse("p", "model = 1").unwrap_err().to_string().contains("model: is a number; possible: a table")
    );
    let no_gpu = parse("p", "[cluster]\nlevel = []").unwrap_err().to_string();
    assert_eq!(no_gpu, "p:1:1: cluster: `gpu` is missing; possible: gpu = a [cluster.gpu] table");
}

#[test]
fn a_caret_marks_the_place() {
    let error = parse("p", "[model]\npreset = \"gpt\"").unwrap_err();
    assert_eq!(error.excerpt(), "  |\n2 | preset = \"gpt\"\n  |          ^^^^^");
}

#[test]
fn every_preset_survives_being_written_and_read() {
    for name in preset::cluster_names() {
        let cluster = preset::cluster(name, &preset::Joined::default()).unwrap();
        let text = cluster_to_toml(&cluster);
        assert_eq!(parse(name, &text).unwrap().cluster, Some(cluster), "{text}");
    }
    for name in preset::model_names() {
        let model = preset::model(name).unwrap();
        let text = model_to_toml(&model);
        assert_eq!(parse(name, &text).unwrap().model, Some(model), "{text}");
    }
}

/// A valid name: the characters of the text that a name may have.
fn a_name(text: String) -> String {
    text.chars().filter(|letter| !letter.is_control()).take(limits::NAME).collect()
}

/// Values that replace those of a valid file.
const HOSTILE: [&str; 18] = [
    "0",
    "-1",
    "1",
    "3",
    "65536",
    "1000000007",
    "1000000000000",
    "9223372036854775807",
    "1.5",
    "5e-324",
    "1e308",
    "-0.0",
    "nan",
    "inf",
    "\"5e-324 Gbit/s\"",
    "\"1e308 s\"",
    "\"0 GB\"",
    "[1, 2]",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Every changed file is refused or planned, and every planned time is finite.
    #[test]
    fn spoilt_problems_are_refused_or_planned(
        cluster in prop::sample::select(preset::cluster_names()),
        model in prop::sample::select(preset::model_names()),
        spoils in prop::collection::vec((any::<prop::sample::Index>(), prop::sample::select(HOSTILE.to_vec()), 0..4u8), 1..4),
    ) {
        let joined = preset::Joined { nodes: 2, ..preset::Joined::default() };
        let cluster = preset::cluster(cluster, &joined).unwrap();
        let text = to_toml(&cluster, &preset::model(model).unwrap(), &Options::default());
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        for (at, value, how) in spoils {
            let at = at.index(lines.len());
            match how {
                0 => { lines.remove(at); }
                1 => { let again = lines[at].clone(); lines.insert(at, again); }
                _ => if let Some((key, _)) = lines[at].clone().split_once(" = ") {
                    lines[at] = format!("{key} = {value}");
                }
            }
        }
        let text = lines.join("\n");
        if let Ok(Document { cluster: Some(cluster), model: Some(model), options }) = parse("x", &text) {
            let cluster = crate::Cluster::try_from(cluster).unwrap();
            let model = crate::Model::try_from(model).unwrap();
            if let Ok(planner) = crate::Planner::new(cluster, model, options.unwrap_or_default()) {
                let plan = planner.plan();
                prop_assert!(plan.step_time.0.is_finite() && plan.step_time.0 > 0.0, "{text}");
                for baseline in &plan.baselines {
                    prop_assert!(baseline.speedup.is_finite() && baseline.candidate.layer_time.0.is_finite(), "{text}");
                }
            }
        }
    }
}

#[test]
fn names_are_short_and_have_no_control_characters() {
    let name = |name: &str| parse("p", &format!("[cluster]\nname = \"{name}\"")).unwrap_err().to_string();
    assert!(
        name("\\u001B[31m").contains("p:2:8: cluster.name: has a control character"),
        "{}",
        name("\\u001B[31m")
    );
    assert!(name(&"x".repeat(201)).contains("has 201 characters; possible: at most 200"));
    assert!(name(&"ü".repeat(200)).contains("`level` is missing"));
}

#[test]
fn a_file_has_a_largest_size() {
    let error = parse("p", &" ".repeat(limits::FILE_BYTES + 1)).unwrap_err().to_string();
    assert_eq!(error, "p:1:1: the file has 8388609 bytes; possible: at most 8388608 bytes");
}

proptest! {
    #[test]
    fn descriptions_survive_being_written_and_read(
        name in any::<String>().prop_map(a_name),
        times in (0.0..2.0f64, 0.0..1e-3f64),
        rate in 0.001..1e6f64,
        sites in prop::collection::vec((1..9usize, 0.5..2.0f64), 2),
        gpus in 1..9usize,
        routing in prop_oneof![
            Just(Routing::Even),
            (0.0..2.0f64, 0..1000u64).prop_map(|(exponent, shuffle_seed)| Routing::Zipf { exponent, shuffle_seed }),
            prop::collection::vec(1.0..1.5f64, 16).prop_map(Routing::Histogram),
        ],
        cap in prop::option::of(0.0..100.0f64),
        dense in prop::option::of(prop_oneof![
            Just(GradientCodec::Exact),
            Just(GradientCodec::Int8),
            (1e-9..=1.0f64).prop_map(|density| GradientCodec::TopK { density }),
        ]),
    ) {
        let mut cluster = presets::datacenters(2, rate, times.0, presets::dgx_h100(2));
        cluster.name = name.clone();
        cluster.levels[0].alpha_s = times.1;
        let (members, rates): (Vec<usize>, Vec<f64>) = sites.into_iter().unzip();
        cluster.levels[1].set_members(&members);
        cluster.levels[2].set_bandwidths(&rates);
        cluster.levels[0].sharing = Sharing::Gpus(gpus);
        let mut model = presets::mixtral_8x7b();
        (model.experts, model.routing, model.name) = (16, routing, name);
        let options = Options {
            memory_cap_gb: cap,
            replicas: Replicas::Best,
            placement: Placement::Lpt,
            gradient_compression: Compression::By(1.0 + times.0),
            dense_gradient_compression: dense,
            ..Options::default()
        };
        let text = to_toml(&cluster, &model, &options);
        let read = parse("x", &text).map_err(|error| TestCaseError::fail(format!("{error}\n{text}")))?;
        prop_assert_eq!(read, Document { cluster: Some(cluster), model: Some(model), options: Some(options) });
    }

    #[test]
    fn any_text_is_read_or_refused(text in any::<String>(), at in 0..GOOD.len(), letter in any::<char>()) {
        let _ = parse("x", &text);
        let spoilt: String = GOOD.chars().enumerate().map(|(i, old)| if i == at { letter } else { old }).collect();
        if let Err(error) = parse("x", &spoilt) {
            prop_assert!(!error.excerpt().is_empty() && error.line <= GOOD.lines().count() + 1);
        }
    }
}

/// `gradient_accumulation` replaces the global batch of the model, even if it is 1.
#[test]
fn micro_batches_that_are_given_determine_the_step() {
    let batch = |text: &str| parse("plan.toml", text).unwrap().options.unwrap().batch;
    assert_eq!(batch("[options]"), crate::planner::Batch::Model);
    assert_eq!(batch("[options]\ngradient_accumulation = 1"), crate::planner::Batch::MicroBatches);
    let model = parse("plan.toml", "[model]\npreset = \"deepseek-v3\"\nglobal_batch = 4096").unwrap().model;
    assert_eq!(model.unwrap().global_batch, Some(4096));
    let (pipeline_stages, expert_parallel, tensor_parallel) = (Some(4), Some(32), Some(2));
    let options =
        Options { pipeline_stages, expert_parallel, tensor_parallel, local_steps: 7, ..Options::default() };
    let text = options_to_toml(&options);
    assert_eq!(parse("plan.toml", &text).unwrap().options, Some(options));
}

#[test]
fn lists_have_one_entry_per_site() {
    let lists = GOOD
        .replace("members = 8", "members = [8, 4]")
        .replace("\"100 Gbit/s\"", "[\"100 Gbit/s\", \"3 GB/s\"]");
    let cluster = parse("plan.toml", &lists).unwrap().cluster.unwrap();
    assert_eq!((cluster.levels[1].scaling_factor, &cluster.levels[1].site_members[..]), (8, &[8, 4][..]));
    assert_eq!(cluster.levels[0].site_bandwidth_gbit_per_s, [100.0, 24.0]);
    assert_eq!(cluster.gpus(), 12);
    // The unit of a key holds for all entries, and equal entries are a single value.
    let keyed = GOOD.replace("bandwidth = \"100 Gbit/s\"", "bandwidth_gbit_per_s = [100, 100]");
    assert_eq!(parse("plan.toml", &keyed).unwrap(), parse("plan.toml", GOOD).unwrap());
    for (line, instead, expected) in [
        ("members = 8", "members = [8, 8, 4]", "members: has 3 entries; possible: 2 entries, one per member"),
        ("members = 8", "members = [8, 0]", "members[1]: is 0; possible: a whole number from 1"),
        ("members = 8", "members = []", "members: has 0 entries"),
        ("members = 8", "members = [3]", "members: has 1 entry; possible: 2 entries, one per member"),
        (
            "members = 2",
            "members = [3]",
            "members: is a list, which only the second level may have; possible: a whole",
        ),
        (
            "bandwidth_gb_per_s = 450",
            "bandwidth_gb_per_s = [450, \"x\"]",
            "bandwidth_gb_per_s[1]: is a string",
        ),
    ] {
        let message = message(line, instead);
        assert!(message.contains(expected), "{message}");
    }
}
