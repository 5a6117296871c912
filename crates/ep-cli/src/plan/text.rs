//! A plan as text for a terminal.

use std::fmt::Write as _;

use ep_plan::Routing;
use ep_plan::cluster::{LevelDescription, Sharing};
use ep_plan::model::AttentionDescription;
use ep_plan::planner::{CompressionGain, Options, PassTimes, Plan, Setting};
use ep_plan::step::{StepMemory, Strategy};
use ep_plan::units::{Bytes, Seconds};

use super::software;
use super::steps::{self, Shown};
use super::sweep::Sweep;
use super::upgrades;
use super::words::{baseline_name, relation, times};
use crate::common::units;
use crate::planner::problem::Problem;
use crate::planner::text::{heading, sizes, table};

pub(super) fn render(
    problem: &Problem,
    step: Option<&Shown>,
    plan: &Plan,
    sweep: Option<&Sweep>,
    explain: bool,
) -> String {
    let mut out = heading(problem, plan);
    for note in &problem.notes {
        let _ = writeln!(out, "{note}");
    }
    let [domains, phases, links, compared] = [domains(plan), phases(plan), links(plan), compared(plan)];
    if let Some(shown) = step {
        let answer = steps::answer(shown, problem).join("\n");
        let _ = write!(out, "\n{answer}\n\n{}\n", steps::compared(shown, &problem.options));
        let larger = table(&upgrades::HEADER, upgrades::rows(&shown.upgrades, shown.head()), 1);
        let _ = write!(out, "\n{larger}\n");
    }
    let _ = write!(
        out,
        "\n{}\n\n{domains}\n\n{phases}\n\n{links}\n\n{}\n\n{compared}\n",
        layer_answer(problem, step, plan),
        memory(step, plan)
    );
    if problem.options.setting == Setting::Full {
        let _ = write!(out, "\n{}\n{}\n", lossy(problem, step, plan), gains(problem, step, plan));
    }
    if let Some(sweep) = sweep {
        let _ = write!(out, "\n{}\n", sweep.render());
    }
    out.push('\n');
    // The first sentence repeats the answer above.
    let sentences = plan.explanation.text.iter().skip(1);
    let shown = if explain { usize::MAX } else { passes(plan).len() };
    for sentence in sentences.take(shown) {
        let _ = writeln!(out, "{sentence}");
    }
    if explain {
        out.push_str(&growth(plan));
        out.push_str(&selective(problem, plan));
        out.push('\n');
    }
    for line in assumed(problem) {
        let _ = writeln!(out, "{line}");
    }
    let _ = writeln!(out, "{}", terms(problem, step.is_some()));
    if !explain {
        out.push_str(
            "For more: --explain (limits and alternatives), --html FILE (a report with charts); docs/planner.md explains the terms.\n",
        );
    }
    out
}

/// Explains the columns and notations of the tables that their headers do not explain.
fn terms(problem: &Problem, has_steps: bool) -> String {
    let levels =
        problem.cluster.levels.iter().map(|level| level.name.as_str()).collect::<Vec<_>>().join(", ");
    let steps = match has_steps {
        true => {
            "a step is one global batch, in which a GPU is idle while it does not compute. In the table, each strategy has its fastest \
             layout: of those within 1 % of the fastest, preferably one with EP groups inside nodes, then the one with the fewest \
             stages. Inside a datacenter, experts are gathered only if that saves 5 %. `dense sync` and `expert sync` make replicas of parameters equal \
             again at its end, without overlap: an upper bound. `bytes per link` leaves out activations between stages. "
        }
        false => "",
    };
    format!(
        "Terms: {steps}Numbers in brackets belong to the levels {levels}: members of an EP group, or sizes of expert domains. `sent as \
         tokens`: 100 % moves tokens only, 0 % experts only. `rows per token`: rows that the busiest GPU receives in a dispatch, over its \
         own tokens. `hottest/mean`: load of the busiest group of GPUs over the mean load."
    )
}

/// The assumptions behind the times that appear nowhere else in the report, one line each. All outputs have them.
pub(super) fn assumed(problem: &Problem) -> Vec<String> {
    let routing = match problem.model.routing {
        Routing::Even => "even routing",
        _ => "the routing of the problem",
    };
    let links = reached(&problem.cluster.levels);
    let mut lines = vec![
        format!("Links: {}.", rates(&problem.cluster.levels)),
        format!(
            "Assumed: {routing}, {} TFLOP/s in each GPU, {links}. Activations are not counted: `reserved_memory` is kept free \
             for them and for dense parameters. Step times on GPUs were never compared with measured ones.",
            problem.cluster.gpu.sustained_tflops
        ),
    ];
    lines.extend(attention(problem.model.attention));
    lines
}

/// The bandwidth and the round trip of each level's links.
fn rates(levels: &[LevelDescription]) -> String {
    let rate = |level: &LevelDescription| {
        let most = level.site_bandwidth_gbit_per_s.iter().copied().fold(level.bandwidth_gbit_per_s, f64::max);
        let bandwidth = match most == level.bandwidth_gbit_per_s {
            true => format!("{most}"),
            false => format!("{} to {most}", level.bandwidth_gbit_per_s),
        };
        let shared = match level.sharing {
            Sharing::PerGpu => "for each GPU".to_owned(),
            Sharing::PerMember => "for each member, shared by its GPUs".to_owned(),
            Sharing::Gpus(gpus) => format!("for {gpus} GPUs"),
        };
        let round_trip = match level.round_trip_s == 0.0 {
            true => String::new(),
            false => format!(", round trip {}", Seconds(level.round_trip_s)),
        };
        format!("{} {bandwidth} Gbit/s {shared}{round_trip}", level.name)
    };
    levels.iter().map(rate).collect::<Vec<_>>().join("; ")
}

/// What limits the links besides their bandwidth. The report states it because the defaults limit nothing, unlike most real
/// links.
fn reached(levels: &[LevelDescription]) -> String {
    let limits = |level: &LevelDescription| (level.efficiency, level.loss, level.flows);
    let groups = levels.chunk_by(|one, next| limits(one) == limits(next));
    groups.filter_map(reached_alike).collect::<Vec<_>>().join(", ")
}

/// The part of [`reached`] about levels that have the same limits.
fn reached_alike(levels: &[LevelDescription]) -> Option<String> {
    let LevelDescription { efficiency, loss, flows, .. } = levels.first()?;
    let names: Vec<&str> = levels.iter().map(|level| level.name.as_str()).collect();
    let names = match names[..] {
        [name] => format!("level {name}"),
        [ref names @ .., last] => format!("levels {} and {last}", names.join(", ")),
        [] => return None,
    };
    let part = if *efficiency == 1.0 { "all".to_owned() } else { efficiency.to_string() };
    let (lost, counts) = match *loss == 0.0 {
        true => ("no loss".to_owned(), ", which counts only with loss"),
        false => (format!("{loss} of the packets lost"), ""),
    };
    Some(format!(
        "links of {names} with {part} of their bandwidth (`efficiency` {efficiency}), {lost} (`loss` {loss}) and {} each \
         (`flows` {flows}{counts})",
        units::counted(*flows, "connection")
    ))
}

/// A remark on a model whose attention, or a part of it, has no sizes: the model's steps appear shorter than they are.
fn attention(sizes: AttentionDescription) -> Option<String> {
    let (missing, compute) = match (sizes.parameters == 0.0, sizes.score_width == 0.0) {
        (true, true) => ("attention parameters", "attention compute"),
        (true, false) => ("attention parameters", "the compute of attention projections"),
        (false, true) => ("attention `score_width`", "the compute of attention scores"),
        (false, false) => return None,
    };
    Some(format!("The model has no {missing}: {compute} counts as 0."))
}

/// The answer for one layer.
pub(super) fn layer_answer(problem: &Problem, step: Option<&Shown>, plan: &Plan) -> String {
    let Some(shown) = step else { return answer(plan) };
    let price = shown.price();
    let mut more: Vec<String> = steps::shown_bottleneck(shown, problem).into_iter().collect();
    if price != shown.head() {
        more.extend(software::lines(price, problem, None));
    }
    let more: String = more.iter().map(|line| format!("\n{line}")).collect();
    format!(
        "Layers of the strategy `{}`, {}, {} of a layer on each GPU.\nIn an EP group, {}{more}",
        steps::name(price.strategy),
        steps::layout(price, problem),
        units::counted(plan.experts_per_gpu, "expert"),
        domains_answer(plan)
    )
}

/// The answer for forward passes: the fastest scheme, and, if that is a baseline, the best expert domains.
pub(super) fn answer(plan: &Plan) -> String {
    let Some(baseline) = plan.faster_baseline() else {
        return format!("Best: {}{}", domains_answer(plan), worth(plan));
    };
    let time = baseline.candidate.layer_time;
    format!(
        "Best: {}. A layer takes {time}.\nThe best expert domains are {}: domains {}",
        baseline_name(baseline.kind),
        relation(baseline.speedup),
        domains_answer(plan).trim_start_matches("domains ")
    )
}

/// A remark on a plan whose expert domains gain too little for the printed digits to show.
fn worth(plan: &Plan) -> String {
    let fastest = plan.baselines.iter().filter(|baseline| baseline.fits).map(|baseline| baseline.speedup);
    let gain = fastest.fold(f64::INFINITY, f64::min);
    let moves = plan.best.expert_domain_size() > 1;
    match moves && times(gain) == times(1.0) {
        true => " Moving experts is not worth it: the gain over the fastest scheme without domains is 1.00x."
            .into(),
        false => String::new(),
    }
}

fn domains_answer(plan: &Plan) -> String {
    let domain_sizes = sizes(&plan.best.domain_sizes);
    let gpus = plan.best.expert_domain_size();
    let what = match gpus {
        1 if plan.scaling_factors.iter().all(|&members| members == 1) => {
            "an EP group is one GPU, so neither experts nor tokens move".to_owned()
        }
        1 => "only tokens move".to_owned(),
        _ => format!("experts are gathered among {gpus} GPUs"),
    };
    let kept = if plan.best.has_kept_replicas() { ", kept for the whole step" } else { "" };
    format!("domains {domain_sizes}: {what}{kept}. A layer takes {}.", plan.best.layer_time)
}

fn domains(plan: &Plan) -> String {
    let rows = plan.best.levels.iter().enumerate().map(|(index, level)| {
        vec![
            plan.level_names[index].clone(),
            plan.scaling_factors[index].to_string(),
            level.domain_size.to_string(),
            level.domains.to_string(),
            proportion(plan, index, 1),
            format!("{:.3}", level.rows_per_token),
            format!("{:.2}", level.hot_factor),
        ]
    });
    let header = [
        "level",
        "members",
        "domain size",
        "domains",
        "sent as tokens (p)",
        "rows per token",
        "hottest/mean",
    ];
    table(&header, rows, 1)
}

/// The part of a level's data that travels as tokens. Nothing crosses a level of one member.
pub(super) fn proportion(plan: &Plan, level: usize, decimals: usize) -> String {
    match plan.scaling_factors[level] {
        1 => "-".into(),
        _ => format!("{:.decimals$} %", 100.0 * plan.data_proportions[level]),
    }
}

/// Names and times of all phases of one pass.
pub(super) fn phase_times(pass: &PassTimes) -> [(&'static str, Seconds); 8] {
    [
        ("pre-expert", pass.pre_expert),
        ("all-gather", pass.all_gather),
        ("all-to-all", pass.all_to_all),
        ("expert", pass.expert),
        ("decode", pass.decode),
        ("encode", pass.encode),
        ("gradients", pass.gradients),
        ("shared refresh", pass.shared_refresh),
    ]
}

pub(super) fn passes(plan: &Plan) -> Vec<(&'static str, PassTimes)> {
    let backward = plan.best.backward.map(|pass| ("backward", pass));
    std::iter::once(("forward", plan.best.forward)).chain(backward).collect()
}

fn phases(plan: &Plan) -> String {
    let passes = passes(plan);
    let names = phase_times(&plan.best.forward).map(|(name, _)| name);
    let mut rows: Vec<Vec<String>> = names
        .iter()
        .enumerate()
        .map(|(index, name)| {
            let times = passes.iter().map(|(_, pass)| or_dash(phase_times(pass)[index].1));
            std::iter::once((*name).to_owned()).chain(times).collect()
        })
        .collect();
    let totals = passes.iter().map(|(_, pass)| pass.total.to_string());
    rows.push(std::iter::once("pass, with overlap".to_owned()).chain(totals).collect());
    let header: Vec<&str> =
        std::iter::once("phase, by itself").chain(passes.iter().map(|(name, _)| *name)).collect();
    table(&header, rows, 1)
}

fn or_dash(time: Seconds) -> String {
    if time.0 > 0.0 { time.to_string() } else { "-".into() }
}

fn links(plan: &Plan) -> String {
    let bytes = |bytes: Bytes| if bytes.0 > 0.0 { bytes.to_string() } else { "-".into() };
    let rows = plan.best.levels.iter().zip(&plan.level_names).map(|(level, name)| {
        vec![
            name.clone(),
            bytes(level.all_gather.bytes_per_link),
            bytes(level.all_to_all.bytes_per_link),
            bytes(level.gradients.bytes_per_link),
            bytes(level.shared_refresh.bytes_per_link),
            bytes(level.bytes_per_link),
        ]
    });
    let header = [
        "bytes per link",
        "one all-gather",
        "dispatch + combine",
        "gradients",
        "shared refresh",
        "layer in all",
    ];
    table(&header, rows, 1)
}

/// The memory of a GPU that dense parameters take, and the memory that is left.
pub(super) fn left(step: Option<&Shown>, plan: &Plan) -> String {
    step.map_or_else(String::new, |shown| {
        let StepMemory { experts, dense, device } = shown.price().memory;
        let left = (device - experts - dense - plan.best.memory.gathered_experts).max(Bytes::ZERO);
        format!(
            ", dense parameters {dense}; {left} of {device} are left, for activations and everything else"
        )
    })
}

fn memory(step: Option<&Shown>, plan: &Plan) -> String {
    let (memory, left) = (&plan.best.memory, left(step, plan));
    let cap = memory.cap.map_or("no limit".to_owned(), |cap| format!("limit {cap}"));
    let beyond = match plan.candidates_beyond_memory {
        0 => String::new(),
        beyond => format!(" {beyond} of {} candidates do not fit.", plan.candidates),
    };
    format!(
        "Memory of a GPU: own experts {}, gathered experts {} ({cap}){left}.{beyond}",
        memory.own_experts, memory.gathered_experts
    )
}

/// What the shown layers compress, and what is known of the effect on the trained model.
pub(super) fn lossy(problem: &Problem, step: Option<&Shown>, plan: &Plan) -> String {
    let Options { weight_compression, gradient_compression, dense_gradient_compression, .. } =
        problem.options;
    let price = step.map(Shown::price);
    let dense = dense_gradient_compression
        .filter(|_| price.is_some_and(steps::has_lossy_gradients))
        .map(|codec| format!("dense gradients between datacenters {codec}"));
    let trains = problem.options.trains();
    let exact = match trains {
        true => "Weights and gradients are sent exactly",
        false => "Weights are sent exactly",
    };
    let (experts, and_exact) = match (weight_compression.is_exact(), gradient_compression.is_exact()) {
        (false, _) if !trains => (format!("weights {weight_compression}"), ""),
        (false, true) => (format!("weights {weight_compression}"), " Gradients of experts are sent exactly."),
        (true, _) => (format!("gradients {gradient_compression}"), " Weights of experts are sent exactly."),
        (false, false) => (format!("weights {weight_compression}, gradients {gradient_compression}"), ""),
    };
    let moved = match price {
        Some(price) => steps::has_lossy_experts(price, &problem.options),
        None => problem.options.lossy() && plan.best.expert_domain_size() > 1,
    };
    match (moved, dense) {
        (false, None) if !problem.options.lossy() => format!("{exact}."),
        (false, None) => match price {
            Some(price) if price.strategy != Strategy::ExpertDomains => format!(
                "{exact}: `{}` compresses no experts, only `expert domains` do.",
                steps::name(price.strategy)
            ),
            _ => "Nothing is compressed, because no expert moves.".into(),
        },
        (false, Some(dense)) => {
            format!("Compression is lossy: {dense}. Weights and gradients of experts are sent exactly.")
        }
        (true, None) => format!("Compression is lossy: {experts}.{and_exact} {MEASURED}"),
        (true, Some(dense)) => {
            format!(
                "Compression is lossy: {experts}, {dense}.{and_exact} {MEASURED} This test had exact dense gradients."
            )
        }
    }
}

/// The measurement of the codecs' effect on training. docs/planner.md has the table.
const MEASURED: &str = "The paper reports no visible loss at 50x. A small test here (16 experts, 2 layers, real text, \
                        2 emulated datacenters, 900 steps) ended at 1.85 nats per byte without compression and with int8 \
                        weights, 1.90 with 50x compressed changes of the weights, and 2.02 with the paper's codec at 50x.";

/// The gain in training. There is none if a GPU cannot hold the gradients and the Adam state of its own experts.
pub(super) fn training_gain(gain: &CompressionGain) -> String {
    gain.training.map_or_else(|| "does not fit".into(), times)
}

/// The heading of gains in the forward pass. They grow with the micro-batches for which a gathered expert is kept.
pub(super) fn forward_alone(problem: &Problem, step: Option<&Shown>) -> String {
    let count = step.map_or(problem.options.micro_batches, |shown| shown.price().micro_batches);
    format!("forward pass alone, {}", units::counted(count, "micro-batch"))
}

/// What domains gain over hierarchical EP, per compression of the weights.
fn gains(problem: &Problem, step: Option<&Shown>, plan: &Plan) -> String {
    let rows = plan.compression_gains.iter().map(|gain| {
        let exact = if gain.weight_compression.is_exact() { " (exact)" } else { "" };
        let ratio = format!("{}{exact}", gain.weight_compression);
        vec![ratio, training_gain(gain), times(gain.forward)]
    });
    let header =
        ["domains over hierarchical EP, weights compressed", "training", &forward_alone(problem, step)];
    table(&header, rows, 1)
}

fn compared(plan: &Plan) -> String {
    let mut rows = vec![vec![
        format!("this plan {}", sizes(&plan.best.domain_sizes)),
        plan.best.layer_time.to_string(),
        "-".into(),
        "yes".into(),
    ]];
    rows.extend(plan.alternatives.iter().map(|other| {
        let kept = if other.replicas_kept { ", replicas kept" } else { "" };
        let faster = other.layer_time / plan.best.layer_time;
        vec![
            format!("domains {}{kept}", sizes(&other.domain_sizes)),
            other.layer_time.to_string(),
            relation(faster),
            "yes".into(),
        ]
    }));
    rows.extend(plan.baselines.iter().map(|baseline| {
        vec![
            baseline_name(baseline.kind).into(),
            baseline.candidate.layer_time.to_string(),
            relation(baseline.speedup),
            if baseline.fits { "yes" } else { "NO" }.into(),
        ]
    }));
    table(&["compared with", "layer time", "this plan is", "fits"], rows, 1)
}

fn growth(plan: &Plan) -> String {
    if plan.explanation.growth.is_empty() {
        return "\nNo domain can have one more member: each contains all members of its level.\n".into();
    }
    let rows = plan.explanation.growth.iter().map(|test| {
        let pays = if test.saves.0 > (test.costs + test.gradients).0 { "saves bytes" } else { "costs bytes" };
        vec![
            plan.level_names[test.level].clone(),
            test.saves.to_string(),
            test.costs.to_string(),
            test.gradients.to_string(),
            pays.into(),
        ]
    });
    let header = [
        "one more member in a domain",
        "saves token bytes",
        "costs expert bytes",
        "costs gradient bytes",
        "result",
    ];
    format!("\n{}\n", table(&header, rows, 1))
}

fn selective(problem: &Problem, plan: &Plan) -> String {
    if plan.selective.is_empty() {
        return String::new();
    }
    let copies = plan.selective.iter().any(|level| level.experts > problem.model.experts);
    let rows = plan.selective.iter().map(|level| {
        vec![
            plan.level_names[level.level].clone(),
            format!("{} of {}", level.migrating, level.experts),
            level.tokens_only.to_string(),
            level.experts_only.to_string(),
            level.selective.to_string(),
        ]
    });
    let header = [
        "choice for each expert",
        if copies { "experts and copies worth moving" } else { "experts worth moving" },
        "only tokens move",
        "only experts move",
        "cheaper choice",
    ];
    format!("\n{}\n", table(&header, rows, 1))
}
