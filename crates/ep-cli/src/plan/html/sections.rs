//! The sections of the HTML report.

use ep_plan::planner::{Candidate, Plan};
use ep_plan::step::{StepParts, StepPlan, StepPrice, Strategy};
use ep_plan::units::{Bytes, Seconds};

use super::markup::{escape, note, section, sentence, table};
use super::picture;
use crate::common::failure::Failure;
use crate::common::units;
use crate::plan::software;
use crate::plan::steps::{self, Shown};
use crate::plan::sweep::Sweep;
use crate::plan::{text, upgrades, words};
use crate::planner::chart::{self, Bar, Line, MUTED, SERIES};
use crate::planner::problem::Problem;
use crate::planner::text::sizes;

/// The unit for the times of a chart, chosen by the longest time.
struct Unit {
    name: &'static str,
    seconds: f64,
}

impl Unit {
    fn of(longest: Seconds) -> Self {
        match longest.0 {
            long if long >= 1.0 => Self { name: "s", seconds: 1.0 },
            middle if middle >= 1e-3 => Self { name: "ms", seconds: 1e-3 },
            _ => Self { name: "µs", seconds: 1e-6 },
        }
    }

    fn value(&self, time: Seconds) -> f64 {
        time.0 / self.seconds
    }
}

/// The answer for a step: sentences, and a card per strategy.
pub(super) fn step_answer(shown: &Shown, problem: &Problem) -> String {
    let plan = &shown.plan;
    let sentences = steps::answer(shown, problem);
    let first = sentences.first().map_or("", |line| line);
    let rest: String = sentences.iter().skip(1).map(|line| note(line)).collect();
    let best = shown.head();
    // Local steps are never the best, even if they are the fastest, so their card is last.
    let (local, others): (Vec<&StepPrice>, Vec<_>) =
        plan.prices.iter().partition(|price| price.strategy == Strategy::LocalSteps);
    let cards: String = others
        .into_iter()
        .chain(local)
        .map(|price| {
            let class = if price == best { " main" } else { "" };
            let what = match price == best {
                true if shown.runnable => format!("a step: {}, this plan", steps::name(price.strategy)),
                true => format!("a step: {}, the best", steps::name(price.strategy)),
                false => format!(
                    "{}, {}",
                    steps::name(price.strategy),
                    words::relation(best.step_time / price.step_time)
                ),
            };
            let (number, what) = (escape(&price.step_time.to_string()), escape(&what));
            format!("<div class=\"card{class}\"><b>{number}</b><span>{what}</span></div>\n")
        })
        .collect();
    format!("<p class=\"answer\">{}</p>\n{rest}<div class=\"cards\">\n{cards}</div>\n", sentence(first))
}

/// The steps of all strategies, divided into their parts.
pub(super) fn steps(plan: &StepPlan, problem: &Problem) -> Result<String, Failure> {
    let options = &problem.options;
    let longest = plan.prices.iter().map(|price| price.step_time.0).fold(0.0, f64::max);
    let unit = Unit::of(plan.best().step_time);
    let logarithmic = longest / plan.best().step_time.0 > 8.0;
    let bars: Vec<Bar> = plan
        .prices
        .iter()
        .map(|price| {
            let StepParts { compute, exchanges, stage_links, fill, replicas } = price.parts();
            let all = [compute, exchanges, stage_links, fill, replicas];
            let parts = match logarithmic {
                true => vec![(0, unit.value(price.step_time))],
                false => {
                    all.map(|part| unit.value(part.max(Seconds::ZERO))).into_iter().enumerate().collect()
                }
            };
            let note = format!("{}, idle {:.0} %", price.step_time, 100.0 * price.idle_share);
            Bar { label: steps::name_and_fit(price), parts, note }
        })
        .collect();
    let series: &[(&str, _)] = match logarithmic {
        true => &[("step", SERIES[0])],
        false => &[
            ("GPU computes", SERIES[2]),
            ("exchanges inside stages, uneven load", SERIES[1]),
            ("waits for links between stages", SERIES[4]),
            ("start and end of the pipeline", MUTED),
            ("replicas made equal", SERIES[3]),
        ],
    };
    let axis = format!("time of a step, {}{}", unit.name, if logarithmic { " (logarithmic)" } else { "" });
    let chart = chart::bars(series, &bars, &axis, logarithmic)?;
    let mut rows: Vec<Vec<String>> = plan
        .prices
        .iter()
        .map(|price| {
            vec![
                steps::name_and_fit(price),
                steps::layout(price, problem),
                units::count(price.tokens_per_second.round() as u64),
                steps::changes(price, options),
            ]
        })
        .collect();
    rows.extend(
        steps::without_price(plan).map(|(strategy, why)| {
            vec![steps::name(strategy).into(), why.into(), String::new(), String::new()]
        }),
    );
    let header = ["between datacenters", "fastest layout", "tokens/s", "changes the training"];
    let about = format!(
        "The same {} tokens under every way to use the datacenters, each in its fastest layout (of those within 1 %, \
         preferably one with EP groups inside nodes, then the one with the fewest stages). Inside a datacenter, experts are \
         gathered only if that saves 5 %.",
        units::count(plan.global_batch.round() as u64)
    );
    Ok(section("Steps compared", &about, &format!("{chart}{}", table(&header, &rows))))
}

/// The same step on larger clusters.
pub(super) fn larger(shown: &Shown) -> String {
    let about = "The same step, planned again with twice of one resource or of two.";
    let rows = upgrades::rows(&shown.upgrades, shown.head());
    section("Larger clusters", about, &table(&upgrades::HEADER, &rows))
}

/// The heading of the sections about layers.
pub(super) fn layers_title(problem: &Problem, shown: &Shown, plan: &Plan) -> String {
    let price = shown.price();
    let about = format!(
        "One layer and one micro-batch of one EP group: {}, {} of a layer on each GPU. The sections below are about these layers.",
        steps::layout(price, problem),
        units::counted(plan.experts_per_gpu, "expert")
    );
    let mut about: Vec<String> =
        std::iter::once(about).chain(steps::shown_bottleneck(shown, problem)).collect();
    if price != shown.head() {
        about.extend(software::lines(price, problem, None));
    }
    let about = about.join(" ");
    section(&format!("Layers of: {}", steps::name(price.strategy)), &about, "")
}

/// The plan as a row of numbers.
pub(super) fn answer(plan: &Plan) -> String {
    let card = |class: &str, number: String, what: &str| {
        format!("<div class=\"card{class}\"><b>{}</b><span>{}</span></div>\n", escape(&number), escape(what))
    };
    let all = sizes(&plan.best.domain_sizes);
    let over = format!("domain sizes of {}", plan.level_names.join(", "));
    let mut cards = card(" main", all, &over);
    cards.push_str(&card("", plan.best.layer_time.to_string(), "layer time"));
    for baseline in &plan.baselines {
        let fits = if baseline.fits { "" } else { ", which does not fit" };
        let short = words::baseline_name(baseline.kind).split(',').next().unwrap_or_default();
        let relation = words::relation(baseline.speedup);
        let (number, word) = relation.split_once(' ').unwrap_or((&relation, ""));
        let (number, word) = match word {
            "faster" | "slower" => (number, format!("{word} than")),
            _ => ("1.00x", "as fast as".to_owned()),
        };
        cards.push_str(&card("", number.to_owned(), &format!("{word} {short}{fits}")));
    }
    let answer = escape(&text::answer(plan)).replace('\n', "<br>");
    format!("<p class=\"answer\">{answer}</p>\n<div class=\"cards\">\n{cards}</div>\n")
}

pub(super) fn domains(plan: &Plan) -> Result<String, Failure> {
    let gpus = plan.best.expert_domain_size();
    let domains = plan.scaling_factors.iter().product::<usize>() / gpus.max(1);
    let about = match (gpus, domains) {
        (1, 1) => {
            "The EP group is a single GPU, which has all experts: neither experts nor tokens move.".to_owned()
        }
        (1, _) => {
            "Experts stay where they are: every GPU is a domain of its own, and only tokens move.".to_owned()
        }
        _ => {
            let tokens = match domains {
                1 => "No token moves.".to_owned(),
                _ => format!("Tokens move only between the {domains} domains."),
            };
            format!(
                "GPUs with the same colour and number form a domain: they gather each other's experts and then hold the \
                 same {} experts. {tokens}",
                gpus * plan.experts_per_gpu
            )
        }
    };
    let picture = picture::draw(plan)?.unwrap_or_else(|| "<p>No picture: too many GPUs.</p>".into());
    let rows: Vec<Vec<String>> = plan
        .best
        .levels
        .iter()
        .enumerate()
        .map(|(index, level)| {
            vec![
                plan.level_names[index].clone(),
                plan.scaling_factors[index].to_string(),
                level.domain_size.to_string(),
                level.domains.to_string(),
                text::proportion(plan, index, 0),
                format!("{:.3}", level.rows_per_token),
            ]
        })
        .collect();
    let header = ["level", "members", "domain size", "domains", "sent as tokens (p)", "rows per token"];
    Ok(section("Expert domains", &about, &format!("{picture}{}", table(&header, &rows))))
}

/// The phases of each pass as two bars: the GPU's phases and the links' phases, which run at the same time.
pub(super) fn phases(problem: &Problem, plan: &Plan) -> Result<String, Failure> {
    const GPU: [usize; 4] = [0, 3, 4, 5];
    const LINKS: [usize; 4] = [1, 2, 6, 7];
    let passes = text::passes(plan);
    let longest = passes.iter().map(|(_, pass)| pass.total).fold(Seconds::ZERO, Seconds::max);
    let unit = Unit::of(longest);
    let names = text::phase_times(&plan.best.forward).map(|(name, _)| name);
    let mut series: Vec<_> = names.into_iter().zip(SERIES).collect();
    series.push(("waits for tokens", MUTED));
    let mut bars = Vec::new();
    for (name, pass) in &passes {
        let times = text::phase_times(pass);
        let parts = |which: [usize; 4]| which.map(|index| (index, unit.value(times[index].1))).to_vec();
        let chain = pass.compute_chain(problem.options.overlap_chunks);
        let busy: Seconds = GPU.iter().map(|&index| times[index].1).sum();
        let mut gpu = parts(GPU);
        gpu.push((names.len(), unit.value((chain - busy).max(Seconds::ZERO))));
        bars.push(Bar { label: format!("{name}, GPU"), parts: gpu, note: chain.to_string() });
        let note = pass.link_chain().to_string();
        bars.push(Bar { label: format!("{name}, links"), parts: parts(LINKS), note });
    }
    // The legend lists only the phases that occur.
    let used: Vec<usize> = (0..series.len())
        .filter(|index| {
            bars.iter().any(|bar| bar.parts.iter().any(|(of, length)| of == index && *length > 0.0))
        })
        .collect();
    for bar in &mut bars {
        bar.parts = bar
            .parts
            .iter()
            .filter_map(|(of, length)| Some((used.iter().position(|index| index == of)?, *length)))
            .collect();
    }
    let series: Vec<_> = used.iter().map(|&index| series[index]).collect();
    let about = "The phases of the GPU and of the links, each with the time that it takes by itself. A pass takes as long \
                 as the longer of its two bars.";
    Ok(section("Time by phase", about, &chart::bars(&series, &bars, unit.name, false)?))
}

pub(super) fn compared(plan: &Plan) -> Result<String, Failure> {
    let row = |label: String, time: Seconds, series: usize, note: String| (label, time, series, note);
    let best = plan.best.layer_time;
    let mut rows =
        vec![row(format!("this plan {}", sizes(&plan.best.domain_sizes)), best, 0, best.to_string())];
    rows.extend(plan.alternatives.iter().take(3).map(|other| {
        let kept = if other.replicas_kept { ", kept" } else { "" };
        let label = format!("domains {}{kept}", sizes(&other.domain_sizes));
        row(
            label,
            other.layer_time,
            1,
            format!("{} ({})", other.layer_time, words::relation(best / other.layer_time)),
        )
    }));
    rows.extend(plan.baselines.iter().map(|baseline| {
        let time = baseline.candidate.layer_time;
        let label = words::baseline_name(baseline.kind).replace("sharded data parallelism", "DP");
        let fits = if baseline.fits { "" } else { ", no fit" };
        row(label, time, 2, format!("{time} ({}{fits})", words::relation(1.0 / baseline.speedup)))
    }));
    let times = || rows.iter().map(|(_, time, ..)| time.0);
    let longest = times().fold(0.0, f64::max);
    let logarithmic = longest / times().fold(longest, f64::min) > 8.0;
    let unit = Unit::of(if logarithmic { best } else { Seconds(longest) });
    let bars: Vec<Bar> = rows
        .into_iter()
        .map(|(label, time, of, note)| Bar { label, parts: vec![(of, unit.value(time))], note })
        .collect();
    let series =
        [("this plan", SERIES[0]), ("next best domains", SERIES[5]), ("without expert domains", MUTED)];
    let axis = format!("time of a layer, {}{}", unit.name, if logarithmic { " (logarithmic)" } else { "" });
    let about =
        "The same model's prediction for the next best domain sizes and for layers without expert domains.";
    Ok(section("Compared", about, &chart::bars(&series, &bars, &axis, logarithmic)?))
}

/// What compression gains, and what is known of its effect on training.
pub(super) fn compression(problem: &Problem, step: Option<&Shown>, plan: &Plan) -> String {
    let rows: Vec<Vec<String>> = plan
        .compression_gains
        .iter()
        .map(|gain| {
            let exact = if gain.weight_compression.is_exact() { " (exact)" } else { "" };
            vec![
                format!("{}{exact}", gain.weight_compression),
                text::training_gain(gain),
                words::times(gain.forward),
            ]
        })
        .collect();
    let forward = format!("gain in the {}", text::forward_alone(problem, step));
    let header = ["weights compressed", "gain in training", &forward];
    let about = format!(
        "{} The gains are those of expert domains over hierarchical EP.",
        text::lossy(problem, step, plan)
    );
    section("Compression", &about, &table(&header, &rows))
}

pub(super) fn swept(sweep: &Sweep) -> Result<String, Failure> {
    let schemes = sweep.schemes();
    let line = |label: &str| Line { label: label.into(), points: Vec::new(), notes: Vec::new() };
    let mut lines: Vec<Line> = std::iter::once("the best").chain(schemes.iter().copied()).map(line).collect();
    let mut before = String::new();
    for point in &sweep.points {
        let Ok(found) = &point.outcome else { continue };
        if found.choice != before {
            before.clone_from(&found.choice);
            let at = lines[0].points.len();
            lines[0].notes.push((at, before.clone()));
        }
        lines[0].points.push((point.value, found.seconds));
        for (line, scheme) in lines[1..].iter_mut().zip(&schemes) {
            line.points.extend(found.of(scheme).map(|seconds| (point.value, seconds)));
        }
    }
    let unit = if sweep.unit.is_empty() { String::new() } else { format!(", {}", sweep.unit) };
    let axis = format!("{}{unit}", sweep.key);
    let failed = sweep.points.len() - lines[0].points.len();
    let mut about = "The labels give the best choice, at the values where it changes.".to_owned();
    if failed > 0 {
        about.push_str(&format!(" {failed} of the values allow no plan."));
    }
    let found = sweep.points.iter().filter_map(|point| point.outcome.as_ref().ok());
    let fewer = found.filter(|plan| plan.fewer.is_some()).count();
    if fewer > 0 {
        about.push_str(&format!(" At {fewer} of the values, fewer GPUs are faster than all of them."));
    }
    let chart = match lines[0].points.len() {
        0 | 1 => "<p>Too few values allow a plan.</p>".to_owned(),
        _ => chart::lines(&lines, [&axis, "time, s"], sweep.logarithmic)?,
    };
    Ok(section(&format!("Sweep of {}", sweep.key), &about, &chart))
}

pub(super) fn links(plan: &Plan) -> Result<String, Failure> {
    let mut bars = Vec::new();
    let candidates: Vec<(&str, usize, &Candidate)> = std::iter::once(("this plan", 0, &plan.best))
        .chain(plan.baselines.iter().map(|baseline| {
            let name = match words::baseline_name(baseline.kind).split_once(',') {
                Some((name, _)) => name,
                None => words::baseline_name(baseline.kind),
            };
            (name, 1, &baseline.candidate)
        }))
        .collect();
    for (index, level) in plan.level_names.iter().enumerate() {
        for (name, series, candidate) in &candidates {
            let bytes = candidate.levels.get(index).map_or(Bytes::ZERO, |level| level.bytes_per_link);
            bars.push(Bar {
                label: format!("{level}: {name}"),
                parts: vec![(*series, bytes.0 / 1e6)],
                note: if bytes.0 > 0.0 { bytes.to_string() } else { "nothing".into() },
            });
        }
    }
    let series = [("this plan", SERIES[0]), ("without expert domains", MUTED)];
    let about = "All bytes that one link carries for a layer in one direction: experts, tokens and gradients, without activations between pipeline stages.";
    let chart = chart::bars(&series, &bars, "MB (logarithmic)", true)?;
    Ok(section("Bytes per link", about, &chart))
}

pub(super) fn memory(problem: &Problem, step: Option<&Shown>, plan: &Plan) -> Result<String, Failure> {
    let memory = &plan.best.memory;
    let device = Bytes::from_gb(problem.cluster.gpu.memory_gb);
    let free = memory.cap.map_or(Bytes::ZERO, |cap| (cap - memory.gathered_experts).max(Bytes::ZERO));
    let used = memory.own_experts + memory.gathered_experts + free;
    let rest = (device - used).max(Bytes::ZERO);
    let series = [
        ("own experts, with gradients and optimizer", SERIES[2]),
        ("gathered experts", SERIES[0]),
        ("left for gathered experts", SERIES[5]),
        ("everything else", MUTED),
    ];
    let gb = |bytes: Bytes| bytes.0 / 1e9;
    let parts = [memory.own_experts, memory.gathered_experts, free, rest];
    let bar = Bar {
        label: "a GPU".into(),
        parts: parts.into_iter().map(gb).enumerate().collect(),
        note: format!("of {device}"),
    };
    let beyond = match plan.candidates_beyond_memory {
        0 => "Every candidate fits.".to_owned(),
        beyond => format!("{beyond} of {} candidates do not fit.", plan.candidates),
    };
    let chart = chart::bars(&series, &[bar], "GB", false)?;
    let numbers = format!(
        "Own experts {}, gathered experts {}{}{}.",
        memory.own_experts,
        memory.gathered_experts,
        memory.cap.map_or(String::new(), |cap| format!(" (limit {cap})")),
        text::left(step, plan)
    );
    Ok(section("Memory", &format!("{numbers} {beyond}"), &chart))
}

pub(super) fn why(plan: &Plan) -> String {
    let items: Vec<String> =
        plan.explanation.text.iter().map(|item| format!("<li>{}</li>\n", sentence(item))).collect();
    section("What limits the layers, and what would change it", "", &format!("<ul>\n{}</ul>", items.concat()))
}
