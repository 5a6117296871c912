//! Whole steps in words: the answer, and the comparison of the strategies.

use std::fmt::Write as _;

use ep_plan::planner::Options;
use ep_plan::step::{Bottleneck, Fewer, Fit, StepParts, StepPlan, StepPrice, Strategy};

use super::software::{self, Instead, Runtime};
use super::upgrades::Upgrade;
use super::words::{relation, times};
use crate::common::units;
use crate::planner::problem::Problem;
use crate::planner::text::{sizes, table};

/// The steps of all strategies, and the strategy whose layers are shown.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Shown {
    pub(super) plan: StepPlan,
    /// Index of that strategy's price.
    pub(super) index: usize,
    /// The best plans on parts of the cluster, fastest first.
    pub(super) fewer: Vec<Fewer>,
    /// The same step with twice of each resource.
    pub(super) upgrades: Vec<Upgrade>,
    /// Why one site alone holds no plan, if its memory is the reason.
    pub(super) one_site_refused: Option<String>,
    /// Faster expert domains that span sites and would fit if no memory were kept free.
    pub(super) roomy: Option<StepPrice>,
    /// The fastest expert domains without lossy compression, if the plan of [`head`](Self::head) is lossy expert domains.
    pub(super) exact: Option<StepPrice>,
    /// A plan that this project can run, if it cannot run that of [`head`](Self::head).
    pub(super) instead: Option<Instead>,
    /// With `--runnable`, the best plan without this option.
    pub(super) unrestricted: Option<StepPrice>,
    /// Whether `--runnable` chose the strategy.
    pub(super) runnable: bool,
}

impl Shown {
    pub(super) fn price(&self) -> &StepPrice {
        &self.plan.prices[self.index]
    }

    /// The plan that the report recommends, and with which it compares the others: the best one, or, with `--runnable`, the one
    /// that `--groups` writes.
    pub(super) fn head(&self) -> &StepPrice {
        head(&self.plan, self.index, self.runnable)
    }
}

/// As [`Shown::head`].
pub(super) fn head(plan: &StepPlan, shown: usize, runnable: bool) -> &StepPrice {
    if runnable { &plan.prices[shown] } else { plan.best() }
}

/// The name of a strategy.
pub(crate) fn name(strategy: Strategy) -> &'static str {
    match strategy {
        Strategy::ExpertDomains => "expert domains",
        Strategy::HierarchicalEp => "hierarchical EP",
        Strategy::PlainEp => "plain EP",
        Strategy::DataParallel => "data parallelism",
        Strategy::Pipeline => "pipeline",
        Strategy::LocalSteps => "local steps",
    }
}

/// The name of a price's strategy, and whether its layout is tight on memory.
pub(super) fn name_and_fit(price: &StepPrice) -> String {
    let fit = if price.fit == Fit::Fits { "" } else { " (tight)" };
    format!("{}{fit}", name(price.strategy))
}

/// Whether the dense gradients of a strategy change on the way between datacenters.
pub(super) fn has_lossy_gradients(price: &StepPrice) -> bool {
    price.dense_exchange.is_some_and(|exchange| !exchange.codec.is_lossless())
}

/// Whether the experts of a strategy change on the way: only expert domains compress them, and only if any move.
pub(super) fn has_lossy_experts(price: &StepPrice, options: &Options) -> bool {
    let moves = price.candidate.expert_domain_size() > 1;
    price.strategy == Strategy::ExpertDomains && moves && options.lossy()
}

/// Whether the experts or the dense gradients of a strategy change on the way.
pub(super) fn is_lossy(price: &StepPrice, options: &Options) -> bool {
    has_lossy_gradients(price) || has_lossy_experts(price, options)
}

/// What a strategy changes in the training, compared with one datacenter.
pub(super) fn changes(price: &StepPrice, options: &Options) -> String {
    match price.strategy {
        Strategy::ExpertDomains if has_lossy_experts(price, options) => "lossy compression".into(),
        Strategy::LocalSteps => format!("weights differ for {} steps", options.local_steps),
        _ if has_lossy_gradients(price) => "lossy dense gradients".into(),
        _ => "nothing".into(),
    }
}

/// The codec of dense gradients, and the strategies whose prices include it. `None` unless the options name a codec.
pub(crate) fn dense_gradients(plan: &StepPlan, options: &Options) -> Option<String> {
    let codec = options.dense_gradient_compression?;
    let names = |crossing: bool| {
        let of = plan.prices.iter().filter(|price| price.dense_exchange.is_some() == crossing);
        of.map(|price| name(price.strategy)).collect::<Vec<_>>().join(", ")
    };
    let (with, without) = (names(true), names(false));
    if with.is_empty() {
        return Some(format!(
            "No strategy sends dense gradients between datacenters, so `{codec}` is not priced."
        ));
    }
    let lossy = if codec.is_lossless() { "" } else { ", which is lossy" };
    let others = match without.is_empty() {
        true => String::new(),
        false => format!(" Without dense gradients between datacenters: {without}."),
    };
    Some(format!("Dense gradients between datacenters are priced as `{codec}`{lossy}: {with}.{others}"))
}

/// The answer in a few sentences, one per line.
pub(super) fn answer(shown: &Shown, problem: &Problem) -> Vec<String> {
    let (plan, options) = (&shown.plan, &problem.options);
    let best = shown.head();
    let faster = faster_part(best, &shown.fewer);
    let tight = if shown.runnable { None } else { faster_but_tight(plan) };
    // What the best plan has and a faster one lacks.
    let gpus = faster.map(|_| format!("all {} GPUs", units::count(problem.cluster.gpus() as u64)));
    let has: Vec<String> = gpus.into_iter().chain(tight.map(|_| "memory to spare".into())).collect();
    let with = if has.is_empty() { String::new() } else { format!(" with {}", has.join(" and ")) };
    let runtime = if shown.runnable { " for `ExpertMigration`" } else { "" };
    let mut lines = vec![format!(
        "Best{runtime}{with}: {}. A step of {} tokens takes {}: {} tokens/s, GPUs idle {:.0} % of it.",
        described(best),
        units::count(plan.global_batch.round() as u64),
        best.step_time,
        units::count(best.tokens_per_second.round() as u64),
        100.0 * best.idle_share
    )];
    let layers = layers_of_a_stage(problem.model.moe_layers, best.layout.stages());
    lines.push(format!("Layout: {}{layers}.", layout(best, problem)));
    lines.extend(unrestricted(shown, problem));
    lines.extend(tight.map(|price| {
        format!(
            "Tight on memory, but faster: {}, {} a step, {}. The parameters fit, but less than {:.0} % of a GPU's memory \
             (`reserved_memory`) is left for activations.",
            described(price),
            price.step_time,
            relation(best.step_time / price.step_time),
            100.0 * options.reserved_memory
        )
    }));
    lines.extend(fewer(shown, problem));
    lines.push(parts(best));
    lines.extend(bottleneck(best, problem));
    lines.extend(synchronisation(best));
    lines.extend(software::lines(best, problem, shown.instead.as_ref()));
    if best.fit == Fit::Tight && options.reserved_memory > 0.0 {
        lines.push(format!(
            "No layout leaves {:.0} % of a GPU's memory free (`reserved_memory`). This one holds the parameters, but \
             leaves little for activations.",
            100.0 * options.reserved_memory
        ));
    }
    let domains = plan.price(Strategy::ExpertDomains);
    let lossy = domains.is_some_and(|domains| is_lossy(domains, options));
    // Lossy expert domains are compared with the fastest strategy that loses nothing.
    let other = plan
        .prices
        .iter()
        .filter(|price| !matches!(price.strategy, Strategy::ExpertDomains | Strategy::LocalSteps))
        // A runnable plan is compared only with strategies whose EP groups span datacenters, too.
        .filter(|price| !shown.runnable || price.strategy.spans())
        .filter(|price| price.fit == best.fit)
        .find(|price| !lossy || !is_lossy(price, options));
    match (domains, other) {
        (Some(domains), Some(other)) if best.strategy == Strategy::ExpertDomains => {
            let exact = shown.exact.as_ref().filter(|exact| exact.step_time < other.step_time);
            let gain = exact.unwrap_or(other).step_time / domains.step_time;
            let how = if lossy { "Without lossy compression, the fastest is" } else { "The next is" };
            let worth = match times(gain) == times(1.0) {
                true => " Moving experts is not worth it: the gain is 1.00x.",
                false => "",
            };
            let other = match exact {
                Some(exact) => format!("{}, with exact weights and gradients", described(exact)),
                None => described(other),
            };
            lines.push(format!("{how} {other}, {}.{worth}", slower(gain)));
        }
        (Some(domains), _) if best.strategy != Strategy::ExpertDomains => {
            let (domains_are, ratio) = (described(domains), relation(best.step_time / domains.step_time));
            lines.push(match domains.candidate.domain_sizes.first() {
                Some(1) => format!(
                    "The fastest expert domains move no experts between datacenters: {domains_are} are {ratio}.{}",
                    memory_decides(shown, best)
                ),
                _ => format!(
                    "Moving experts between datacenters is not worth it here: {domains_are} are {ratio}."
                ),
            });
        }
        _ => {}
    }
    if let Some(local) = plan.price(Strategy::LocalSteps).filter(|local| local.step_time.0 < best.step_time.0)
    {
        let beside = faster.map_or(String::new(), |part| {
            let ratio = local.tokens_per_second / part.price.tokens_per_second;
            format!(" (beside the fewer GPUs above, {})", relation(ratio))
        });
        lines.push(format!(
            "With {} between two exchanges, a step would take {}, {}{beside}, but local steps follow a different training \
             trajectory.",
            units::counted(options.local_steps, "local step"),
            local.step_time,
            relation(best.step_time / local.step_time)
        ));
    }
    lines.extend(dense_gradients(plan, options));
    if plan.truncated {
        lines.push(
            "There are too many layouts to price them all; those with many stages are left out.".into(),
        );
    }
    lines
}

/// The faster plan that `--runnable` excludes, and what can run it.
fn unrestricted(shown: &Shown, problem: &Problem) -> Option<String> {
    let (price, head) = (shown.unrestricted.as_ref()?, shown.head());
    if !is_faster(head.step_time / price.step_time) {
        return None;
    }
    let software = match Runtime::of(price, problem) {
        Some(Runtime::Layers) => {
            "A training program with a pipeline can run it with `MoELayer` (docs/migration.md#in-a-pipeline)."
        }
        Some(Runtime::Migration) => "`ExpertMigration` can run its layers, too.",
        None => "`ExpertMigration` cannot run it.",
    };
    let stages = match price.layout.stages() == head.layout.stages() {
        true => ", with the same number of stages",
        false => "",
    };
    Some(format!(
        "Without `--runnable`{stages}: {}, {}: {}. {software}",
        described(price),
        relation(head.step_time / price.step_time),
        layout(price, problem)
    ))
}

/// The fastest strategy that is tight on memory, if it is faster than the best one, which leaves more memory for activations.
fn faster_but_tight(plan: &StepPlan) -> Option<&StepPrice> {
    let best = plan.best();
    let comparable = |price: &&StepPrice| price.strategy != Strategy::LocalSteps && best.fit == Fit::Fits;
    let mut prices = plan.prices.iter().filter(comparable);
    prices.find(|price| price.fit == Fit::Tight && is_faster(best.step_time / price.step_time))
}

/// The fastest part of the cluster, if it is faster than all of it. `fewer` has the fastest part first.
pub(super) fn faster_part<'a>(all: &StepPrice, fewer: &'a [Fewer]) -> Option<&'a Fewer> {
    fewer.first().filter(|part| is_faster(gain(part, all)))
}

/// The smallest part of the cluster that leaves out at least a tenth of its `gpus`, is at most 1 % slower than the whole
/// cluster (less than the model's error), and is tight on memory only if the whole cluster is.
fn as_fast_part<'a>(all: &StepPrice, fewer: &'a [Fewer], gpus: usize) -> Option<&'a Fewer> {
    let is_near = |part: &&Fewer| gain(part, all) >= 0.99 && part.price.fit <= all.fit;
    let part = fewer.iter().filter(is_near).min_by_key(|part| part.gpus)?;
    (part.gpus as f64 <= 0.9 * gpus as f64).then_some(part)
}

/// Whether a gain is more than 1 with the digits that the report prints.
fn is_faster(gain: f64) -> bool {
    gain > 1.0 && times(gain) != times(1.0)
}

/// Tokens per second of this part over those of the whole cluster.
pub(super) fn gain(part: &Fewer, all: &StepPrice) -> f64 {
    part.price.tokens_per_second / all.tokens_per_second
}

/// Where the time of a step goes. Parts that round to 0 % are left out.
fn parts(price: &StepPrice) -> String {
    let StepParts { compute, exchanges, stage_links, fill, replicas } = price.parts();
    let named = [
        (compute, "compute"),
        (exchanges, "exchanges inside the stages that compute does not hide, and uneven load"),
        (stage_links, "waits for links between stages"),
        (fill, "start and end of the pipeline"),
        (replicas, "making replicas of parameters equal again"),
    ];
    let shown = named.iter().filter_map(|(time, what)| {
        let percent = format!("{:.0} %", 100.0 * (*time / price.step_time));
        (percent != "0 %" && percent != "-0 %").then(|| format!("{percent} {what}"))
    });
    format!("Time of a step: {}.", shown.collect::<Vec<_>>().join(", "))
}

/// The part of a step in which replicas are made equal, if it is a large one.
fn synchronisation(price: &StepPrice) -> Option<String> {
    let share = (price.dense_sync.0 + price.expert_sync.0) / price.step_time.0;
    (share > 0.2).then(|| {
        format!(
            "{:.0} % of a step makes replicas of parameters equal again: {} those of experts, {} those of dense parameters.",
            100.0 * share,
            price.expert_sync,
            price.dense_sync
        )
    })
}

/// What expert domains between datacenters would reach if memory did not exclude them.
fn memory_decides(shown: &Shown, best: &StepPrice) -> String {
    shown.roomy.as_ref().map_or_else(String::new, |roomy| {
        format!(
            " With `reserved_memory` 0, {} in EP groups of {} would fit; they are {}.",
            described(roomy),
            units::counted(roomy.layout.group_gpus(), "GPU"),
            relation(best.step_time / roomy.step_time)
        )
    })
}

/// Parts of the cluster that are faster than all of it, and, if datacenters have nodes, one site alone.
fn fewer(shown: &Shown, problem: &Problem) -> Vec<String> {
    let line = |part: &Fewer| {
        format!(
            "{} ({} GPUs) {} {} tokens/s, {}: {}{}.",
            used(part, problem),
            units::count(part.gpus as u64),
            if part.sites.len() == 1 { "trains" } else { "train" },
            units::count(part.price.tokens_per_second.round() as u64),
            relation(gain(part, shown.head())),
            layout(&part.price, problem),
            if part.price.fit > shown.head().fit { " (tight on memory)" } else { "" }
        )
    };
    let fastest = faster_part(shown.head(), &shown.fewer);
    // Members of the outermost of two levels may be nodes.
    let has_sites = problem.cluster.levels.len() > 2;
    let near = || as_fast_part(shown.head(), &shown.fewer, problem.cluster.gpus());
    let near = if fastest.is_none() && has_sites { near() } else { None };
    let alone = shown.fewer.iter().find(|part| part.sites.len() == 1 && has_sites);
    let mut lines: Vec<String> =
        fastest.map(|part| format!("Fewer GPUs are faster. {}", line(part))).into_iter().collect();
    lines.extend(near.map(|part| format!("Fewer GPUs are as fast within 1 %. {}", line(part))));
    lines.extend(alone.filter(|&alone| fastest != Some(alone) && near != Some(alone)).map(line));
    lines.extend(shown.one_site_refused.as_ref().filter(|_| has_sites).map(|why| {
        let sites = problem.cluster.levels.first().map_or(0, |outermost| outermost.scaling_factor);
        format!("One of the {sites} datacenters alone cannot train this model: {why}.")
    }));
    lines
}

/// The sites of a part, and how many of their members it uses, if not all.
fn used(part: &Fewer, problem: &Problem) -> String {
    let levels = &problem.cluster.levels;
    let all = levels.first().map_or(0, |outermost| outermost.scaling_factor);
    let sites = match part.sites[..] {
        [_] => format!("One of the {all} datacenters alone"),
        ref some if some.len() < all => {
            let names: Vec<String> = some.iter().map(|site| (site + 1).to_string()).collect();
            format!("{} of the {all} datacenters ({})", some.len(), names.join(", "))
        }
        _ => format!("The {all} datacenters"),
    };
    let whole = |(&site, &members): (&usize, &usize)| {
        let level = levels.get(1);
        level.is_none_or(|level| *level.site_members.get(site).unwrap_or(&level.scaling_factor) == members)
    };
    if part.sites.iter().zip(&part.members).all(whole) {
        return sites;
    }
    let name = levels.get(1).map_or("", |level| &level.name);
    match part.members[..] {
        [first, ref others @ ..] if others.iter().all(|&other| other == first) => {
            format!("{sites} with {first} members of level {name} each")
        }
        _ => {
            let members: Vec<String> = part.members.iter().map(usize::to_string).collect();
            format!("{sites} with {} members of level {name}", members.join(", "))
        }
    }
}

/// The links that the stages of a pipeline wait for. `None` if they wait for no link.
fn bottleneck(price: &StepPrice, problem: &Problem) -> Option<String> {
    let links = price.bottlenecks();
    let link = *links.first()?;
    let level = problem.cluster.levels.get(link.level)?;
    let missing = |link: &Bottleneck| link.time / price.stage_time;
    // With loss, connections have a rate that the bandwidth does not change.
    let limited =
        |rate: f64, more: f64| level.reached_of(rate * more).0 < 0.99 * more * level.reached_of(rate).0;
    let rates = &level.site_bandwidth_gbit_per_s;
    let waits = |which: String| {
        format!(
            "The stages wait for level {}: {which} for {} per micro-batch in one direction, and a stage takes {}.",
            level.name, link.time, price.stage_time
        )
    };
    let enough = |rate: f64, link: &Bottleneck| units::at_least_gbit_per_s(missing(link) * rate);
    let slowest = rates.get(link.site).copied().unwrap_or(level.bandwidth_gbit_per_s);
    if limited(slowest, missing(&link)) {
        let which = match rates.is_empty() {
            true => "its busiest link sends".to_owned(),
            false => format!("the link of datacenter {} sends or receives", link.site + 1),
        };
        return Some(format!(
            "{} Loss limits each connection (`loss`, `flows`), so more bandwidth alone does not help: they would not wait with {} as \
             many connections, if the bandwidth suffices.",
            waits(which),
            times(missing(&link))
        ));
    }
    if rates.is_empty() {
        let waits = waits("its busiest link sends".into());
        let (more, enough) = (times(missing(&link)), enough(level.bandwidth_gbit_per_s, &link));
        return Some(format!("{waits} With {more} as much bandwidth ({enough}) they would not wait."));
    }
    // Links of unequal sites: each has a need of its own.
    let waits = waits(format!("the link of datacenter {} sends or receives", link.site + 1));
    let needs: Vec<String> = links
        .iter()
        .filter(|other| other.level == link.level)
        .filter_map(|other| Some((other, rates.get(other.site)?)))
        .map(|(other, &rate)| {
            let (more, enough) = (times(missing(other)), enough(rate, other));
            format!("{more} as much bandwidth at datacenter {} ({enough})", other.site + 1)
        })
        .collect();
    Some(format!("{waits} They would not wait with {}.", needs.join(" and ")))
}

/// The [`bottleneck`] of the strategy that is shown. `None` if it is the plan of [`Shown::head`], whose bottleneck [`answer`]
/// names.
pub(super) fn shown_bottleneck(shown: &Shown, problem: &Problem) -> Option<String> {
    let price = shown.price();
    bottleneck(price, problem).filter(|_| price != shown.head())
}

/// The gain of a faster plan as a statement about the slower plan.
fn slower(gain: f64) -> String {
    relation(1.0 / gain)
}

/// A strategy with its main choice.
pub(super) fn described(price: &StepPrice) -> String {
    let candidate = &price.candidate;
    match price.strategy {
        Strategy::ExpertDomains => {
            let kept = if candidate.has_kept_replicas() { " with kept replicas" } else { "" };
            format!("expert domains {}{kept}", sizes(&candidate.domain_sizes))
        }
        Strategy::Pipeline => format!("a pipeline of {} stages across datacenters", price.layout.stages()),
        Strategy::DataParallel => "EP inside a datacenter, data parallelism across".into(),
        other => name(other).into(),
    }
}

/// A layout in words.
pub(super) fn layout(price: &StepPrice, problem: &Problem) -> String {
    let layout = &price.layout;
    // If a stage spans several datacenters, the exchanges of its replicas cross between them, too.
    let across = layout.stage.first().copied().filter(|&members| members > 1 && layout.stages() > 1);
    // Datacenters of different sizes are divided into equal parts.
    let sites = problem.cluster.levels.first().map_or(0, |outermost| outermost.scaling_factor);
    let spans = across.map_or(String::new(), |members| match members > sites {
        true => format!(
            " (each spans all {sites} sites, with 1/{} of each of their {members} equal parts)",
            layout.stages()
        ),
        false => format!(" of {members} datacenters each"),
    });
    let mut parts = vec![
        units::counted(layout.stages(), "stage") + &spans,
        format!("EP groups of {} {}", units::counted(layout.group_gpus(), "GPU"), sizes(&layout.group)),
    ];
    let copies = layout.groups_per_stage();
    if copies > 1 {
        parts.push(format!("{} per stage", units::counted(copies, "group")));
    }
    if layout.tensor_parallel > 1 {
        parts.push(format!("tensor parallelism over {}", units::counted(layout.tensor_parallel, "GPU")));
    }
    parts.push(units::counted(price.micro_batches, "micro-batch"));
    parts.join(", ")
}

/// How many layers a stage of a pipeline has, behind the layout. The stages with the most layers determine the time of a step.
fn layers_of_a_stage(layers: usize, stages: usize) -> String {
    let most = layers.div_ceil(stages);
    match stages {
        1 => String::new(),
        _ if layers.is_multiple_of(stages) => {
            format!("; {} in each stage", units::counted(most, "MoE layer"))
        }
        _ => format!("; at most {most} of the {layers} MoE layers in a stage"),
    }
}

/// The strategies that have no price, each with the reason.
pub(crate) fn without_price(plan: &StepPlan) -> impl Iterator<Item = (Strategy, &'static str)> {
    let unfit = plan.impossible.iter().map(|&strategy| (strategy, "does not fit"));
    unfit.chain(plan.without_layout.iter().map(|&strategy| (strategy, "no such layout")))
}

/// What `(tight)` means, if a strategy has this mark.
fn tight(plan: &StepPlan, options: &Options) -> Option<String> {
    let is_tight = |price: &StepPrice| price.fit == Fit::Tight;
    if !plan.prices.iter().any(is_tight) {
        return None;
    }
    if options.reserved_memory == 0.0 {
        return Some("(tight): no memory is kept free for activations (`reserved_memory` 0).".into());
    }
    let others =
        if plan.prices.iter().all(is_tight) { "" } else { " The layouts without this mark leave it." };
    Some(format!(
        "(tight): the parameters fit, but leave less than {:.0} % of a GPU's memory for dense parameters and activations (`reserved_memory`).{others} \
         Recomputation, which may be needed then, is not counted: it adds up to a third of the compute.",
        100.0 * options.reserved_memory
    ))
}

/// One row per strategy, fastest first.
pub(super) fn compared(shown: &Shown, options: &Options) -> String {
    let (plan, head) = (&shown.plan, shown.head());
    // A different strategy can be faster than a runnable plan, so the runnable plan is not called the best.
    let (itself, against) =
        if shown.runnable { ("this plan", "against this plan") } else { ("best", "against the best") };
    let mut rows: Vec<Vec<String>> = plan
        .prices
        .iter()
        .map(|price| {
            let against = match price == head {
                true => itself.into(),
                false => relation(head.step_time / price.step_time),
            };
            vec![
                name_and_fit(price),
                price.step_time.to_string(),
                units::count(price.tokens_per_second.round() as u64),
                format!("{:.0} %", 100.0 * price.idle_share),
                against,
                price.dense_sync.to_string(),
                price.expert_sync.to_string(),
                changes(price, options),
            ]
        })
        .collect();
    rows.extend(without_price(plan).map(|(strategy, why)| {
        let mut row = vec![name(strategy).to_owned(), why.into()];
        row.resize(8, String::new());
        row
    }));
    let header = [
        "between datacenters",
        "step",
        "tokens/s",
        "idle",
        against,
        "dense sync",
        "expert sync",
        "changes the training",
    ];
    let mut text = table(&header, rows, 1);
    if let Some(what) = tight(plan, options) {
        let _ = write!(text, "\n{what}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipeline_says_how_many_layers_a_stage_has() {
        for (layers, stages, expected) in [
            (58, 1, ""),
            (58, 2, "; 29 MoE layers in each stage"),
            (58, 58, "; 1 MoE layer in each stage"),
            (58, 16, "; at most 4 of the 58 MoE layers in a stage"),
        ] {
            assert_eq!(layers_of_a_stage(layers, stages), expected);
        }
    }
}
