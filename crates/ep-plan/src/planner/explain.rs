//! The explanation of a plan: what limits it, and what would change it.

use serde::{Deserialize, Serialize};

use super::compression::Compression;
use super::cost::{Candidate, CostModel, LevelTraffic};
use super::memory::Memory;
use super::migration::GrowthTest;
use super::time::{Bound, PassTimes};
use super::{Alternative, Options, Planner};
use crate::cluster::Cluster;
use crate::units::{Bytes, BytesPerSecond, Seconds};

/// Number of half octaves by which a quantity is varied in each direction to find a change: up to a factor of 2¹⁰.
const HALF_OCTAVES: i32 = 20;

/// Bisections of the last half octave. They determine the boundary to nine digits.
const BISECTIONS: usize = 30;

/// What limits a plan, and which values would change it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// The limit of the forward pass.
    pub forward: Limit,
    /// The limit of the backward pass, when training.
    pub backward: Option<Limit>,
    /// For each level whose domains do not contain all members, the bytes that one more member would save and add.
    pub growth: Vec<GrowthTest>,
    /// For each quantity and direction, the nearest value at which other domain sizes are best.
    pub changes: Vec<Change>,
    /// The explanation as English sentences.
    pub text: Vec<String>,
}

/// The limit of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Limit {
    /// The longer chain.
    pub bound: Bound,
    /// The longest phase of that chain.
    pub component: Component,
    /// Time of the phase alone.
    pub time: Seconds,
    /// Time of the phase over time of the pass.
    pub share: f64,
}

/// A phase of a pass. Phases that use links are divided by level; the number is the level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "phase", content = "level")]
pub enum Component {
    /// Compute before the experts.
    PreExpert,
    /// Expert compute.
    Expert,
    /// Decoding and encoding.
    Codec,
    /// All-gather of experts.
    AllGather(usize),
    /// Dispatch and combine.
    AllToAll(usize),
    /// Reduce-scatter of the gradients of gathered experts.
    Gradients(usize),
    /// Refresh of the codec's shared expert.
    SharedRefresh(usize),
}

/// A quantity that the explanation varies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "quantity", content = "level")]
pub enum Quantity {
    /// Bandwidth of one link of this level, Gbit/s.
    LinkGbitPerS(usize),
    /// `CR_w`, a ratio.
    WeightCompression,
    /// `CR_g`, a ratio.
    GradientCompression,
    /// Memory for gathered experts, GB.
    MemoryCapGb,
}

/// A value of one quantity at which other domain sizes become the best.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// The quantity that is varied. All others keep their values.
    pub quantity: Quantity,
    /// The value in the plan.
    pub now: f64,
    /// The value at which the choice changes.
    pub at: f64,
    /// The best domain sizes just beyond `at`, seen from `now`.
    pub domain_sizes: Vec<usize>,
}

impl Planner {
    pub(super) fn explain(
        &self,
        cost: &CostModel<'_>,
        best: &Candidate,
        alternatives: &[Alternative],
        beyond: usize,
        changes: Vec<Change>,
    ) -> Explanation {
        let forward = self.limit(&best.forward, &best.levels);
        let backward = best.backward.map(|pass| self.limit(&pass, &best.levels));
        let mut text = vec![self.headline(best)];
        text.push(self.limit_sentence("Forward", &best.forward, forward));
        text.extend(
            best.backward.zip(backward).map(|(pass, limit)| self.limit_sentence("Backward", &pass, limit)),
        );
        text.extend(alternatives.first().map(|next| self.next_sentence(best, next)));
        if let (true, Some(cap)) = (beyond > 0, best.memory.cap) {
            text.push(format!(
                "{beyond} candidates need more than the {cap} that a GPU has for gathered experts."
            ));
        }
        text.extend(changes.iter().map(|change| self.change_sentence(change)));
        Explanation {
            forward,
            backward,
            growth: cost.growth_tests(&best.domain_sizes, best.replicas_kept),
            changes,
            text,
        }
    }

    fn limit(&self, pass: &PassTimes, levels: &[LevelTraffic]) -> Limit {
        let bound = pass.bound(self.options.overlap_chunks);
        // The time of a phase is a mean over micro-batches, that of a transfer is not. A level has the same fraction of
        // both sums over the levels.
        let by_level =
            |component: fn(usize) -> Component, time: fn(&LevelTraffic) -> Seconds, phase: Seconds| {
                let single: Seconds = levels.iter().map(time).sum();
                let scale = if single.0 > 0.0 { phase / single } else { 0.0 };
                let of_level = |(index, level)| (component(index), time(level) * scale);
                levels.iter().enumerate().map(of_level).collect::<Vec<_>>()
            };
        let mut phases = by_level(Component::AllToAll, |level| level.all_to_all.time, pass.all_to_all);
        match bound {
            Bound::Compute => phases.extend([
                (Component::PreExpert, pass.pre_expert),
                (Component::Expert, pass.expert),
                (Component::Codec, pass.decode + pass.encode),
            ]),
            Bound::Links => {
                phases.extend(by_level(Component::AllGather, |level| level.all_gather.time, pass.all_gather));
                phases.extend(by_level(Component::Gradients, |level| level.gradients.time, pass.gradients));
                let refresh = |level: &LevelTraffic| level.shared_refresh.time;
                phases.extend(by_level(Component::SharedRefresh, refresh, pass.shared_refresh));
            }
        }
        let longer = |a: (Component, Seconds), b: (Component, Seconds)| if b.1 > a.1 { b } else { a };
        let (component, time) = phases.into_iter().fold((Component::PreExpert, Seconds::ZERO), longer);
        Limit { bound, component, time, share: if pass.total.0 > 0.0 { time / pass.total } else { 0.0 } }
    }

    /// For each quantity and direction, the nearest value at which other domain sizes are best.
    pub(super) fn changes(&self, best: &Candidate) -> Vec<Change> {
        let mut quantities: Vec<Quantity> = (0..self.cluster.levels().len())
            .filter(|&level| self.cluster.levels()[level].scaling_factor > 1)
            .map(Quantity::LinkGbitPerS)
            .collect();
        // Codecs with a fixed ratio are not varied. Neither is a ratio of 1, because the strategy may have no codec.
        let varies = |compression: Compression| matches!(compression, Compression::By(ratio) if ratio > 1.0);
        if varies(self.options.weight_compression) {
            quantities.push(Quantity::WeightCompression);
        }
        if self.options.trains() && varies(self.options.gradient_compression) {
            quantities.push(Quantity::GradientCompression);
        }
        if self.memory.cap.is_some() {
            quantities.push(Quantity::MemoryCapGb);
        }
        quantities.into_iter().flat_map(|quantity| self.nearest_changes(quantity, best)).collect()
    }

    /// In each direction, steps away from the current value until other domain sizes are best, then bisects the last
    /// step.
    fn nearest_changes(&self, quantity: Quantity, best: &Candidate) -> Vec<Change> {
        let now = self.value(quantity);
        let best_at = |log2: f64| self.best_with(quantity, now * log2.exp2());
        let changes =
            |sizes: &Option<Vec<usize>>| sizes.as_ref().is_some_and(|sizes| *sizes != best.domain_sizes);
        [-0.5, 0.5]
            .into_iter()
            .filter_map(|step: f64| {
                let beyond = (1..=HALF_OCTAVES)
                    .map(|count| step * f64::from(count))
                    .find(|&at| changes(&best_at(at)))?;
                let (mut same, mut other) = (beyond - step, beyond);
                for _ in 0..BISECTIONS {
                    let middle = (same + other) / 2.0;
                    if changes(&best_at(middle)) { other = middle } else { same = middle }
                }
                Some(Change { quantity, now, at: now * other.exp2(), domain_sizes: best_at(other)? })
            })
            .collect()
    }

    fn value(&self, quantity: Quantity) -> f64 {
        match quantity {
            Quantity::LinkGbitPerS(level) => self.cluster.description().levels[level].bandwidth_gbit_per_s,
            Quantity::WeightCompression => self.options.weights_by(&self.model),
            Quantity::GradientCompression => self.options.gradients_by(&self.model),
            Quantity::MemoryCapGb => self.memory.cap.unwrap_or_default().0 / 1e9,
        }
    }

    /// The best domain sizes with a different value of a quantity. `None` if the value is out of range.
    fn best_with(&self, quantity: Quantity, value: f64) -> Option<Vec<usize>> {
        let cost = self.cost();
        let with_options = |options: Options| {
            options.check().is_ok().then(|| self.best(&CostModel { options: &options, ..cost }).domain_sizes)
        };
        match quantity {
            Quantity::LinkGbitPerS(level) => {
                let bandwidth = BytesPerSecond::from_gbit_per_s(value);
                let cluster: Cluster = self.cluster.with_bandwidth(level, bandwidth).ok()?;
                Some(self.best(&CostModel { cluster: &cluster, ..cost }).domain_sizes)
            }
            Quantity::WeightCompression => {
                with_options(Options { weight_compression: value.into(), ..self.options.clone() })
            }
            Quantity::GradientCompression => {
                with_options(Options { gradient_compression: value.into(), ..self.options.clone() })
            }
            Quantity::MemoryCapGb => {
                let memory = Memory { cap: Some(Bytes::from_gb(value)), ..self.memory };
                Some(self.best(&CostModel { memory, ..cost }).domain_sizes)
            }
        }
    }

    /// How the next best domain sizes compare with the best ones. They are faster if their gathers save too little.
    fn next_sentence(&self, best: &Candidate, next: &Alternative) -> String {
        let ratio = next.layer_time / best.layer_time;
        let percent = format!("{:.2}%", 100.0 * (ratio - 1.0).abs());
        let relation = match ratio {
            _ if percent == "0.00%" => "as fast".to_owned(),
            ratio if ratio < 1.0 => {
                let least = 100.0 * self.least_saving;
                format!("{percent} faster, but gathers that save at most {least}% of a layer are left out")
            }
            ratio if ratio < 2.0 => format!("{percent} slower"),
            ratio => format!("{ratio:.1}x slower"),
        };
        let kept = if next.replicas_kept { " with kept replicas" } else { "" };
        format!("Next best: {}{kept}, {relation}.", domain_sizes_text(&next.domain_sizes))
    }

    fn headline(&self, best: &Candidate) -> String {
        let levels =
            best.domain_sizes.iter().zip(self.cluster.levels()).enumerate().map(|(level, (size, at))| {
                format!("{size} of {} on '{}'", at.scaling_factor, self.cluster.level_name(level))
            });
        let replicas = if best.has_kept_replicas() { ", replicas kept" } else { "" };
        format!(
            "Domains: {}{replicas}. A layer takes {}.",
            levels.collect::<Vec<_>>().join(", "),
            best.layer_time
        )
    }

    fn limit_sentence(&self, pass: &str, times: &PassTimes, limit: Limit) -> String {
        let phase = match limit.component {
            Component::PreExpert => "compute before the experts".to_owned(),
            Component::Expert => "the experts".to_owned(),
            Component::Codec => "the codec".to_owned(),
            Component::AllGather(level) => format!("the all-gather on '{}'", self.cluster.level_name(level)),
            Component::AllToAll(level) => format!("the all-to-all on '{}'", self.cluster.level_name(level)),
            Component::Gradients(level) => format!("gradients on '{}'", self.cluster.level_name(level)),
            Component::SharedRefresh(level) => {
                format!("the shared expert's refresh on '{}'", self.cluster.level_name(level))
            }
        };
        let bound = match limit.bound {
            Bound::Compute => "tokens and compute, which wait for each other",
            Bound::Links => "the transfers on the links",
        };
        let link = matches!(limit.component, Component::AllToAll(_)) && limit.bound == Bound::Compute;
        let what = if link { "It is limited by a link, not by compute" } else { "Its longest part" };
        let colon = if link { ":" } else { " is" };
        format!(
            "{pass}: {}. The longer chain is {bound}. {what}{colon} {phase}, {} alone.",
            times.total, limit.time
        )
    }

    fn change_sentence(&self, change: &Change) -> String {
        let (name, unit) = match change.quantity {
            Quantity::LinkGbitPerS(level) => {
                (format!("'{}' links", self.cluster.level_name(level)), " Gbit/s")
            }
            Quantity::WeightCompression => ("weight compression".to_owned(), "x"),
            Quantity::GradientCompression => ("gradient compression".to_owned(), "x"),
            Quantity::MemoryCapGb => ("memory for gathered experts".to_owned(), " GB"),
        };
        format!(
            "With {name} {}, {} would be best.",
            threshold(change.at, change.now, unit),
            domain_sizes_text(&change.domain_sizes)
        )
    }
}

/// The values beyond the threshold `at`, seen from the present value `now`, as text.
fn threshold(at: f64, now: f64, unit: &str) -> String {
    let (at_text, now_text) = (four_digits(at), four_digits(now));
    match (at_text == now_text, at > now) {
        (true, true) => format!("of slightly more than the present {now_text}{unit}"),
        (true, false) => format!("of slightly less than the present {now_text}{unit}"),
        (false, true) => format!("of at least {at_text}{unit} (now {now_text}{unit})"),
        (false, false) => format!("of less than {at_text}{unit} (now {now_text}{unit})"),
    }
}

/// A number with four significant digits and without trailing zeros.
fn four_digits(number: f64) -> String {
    let magnitude = if number == 0.0 { 0 } else { number.abs().log10().floor() as i32 };
    let decimals = usize::try_from(3 - magnitude).unwrap_or(0).min(9);
    let text = format!("{number:.decimals$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// Domain sizes as the planner's texts write them, outermost level first: `(2, 8, 4)`.
pub fn domain_sizes_text(sizes: &[usize]) -> String {
    format!("({})", sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threshold_whose_text_is_that_of_the_present_value_says_on_which_side_it_is() {
        assert_eq!(threshold(2.5, 1.0, "x"), "of at least 2.5x (now 1x)");
        assert_eq!(threshold(391.6, 400.0, " Gbit/s"), "of less than 391.6 Gbit/s (now 400 Gbit/s)");
        assert_eq!(threshold(1.000_01, 1.0, "x"), "of slightly more than the present 1x");
        assert_eq!(threshold(0.999_99, 1.0, "x"), "of slightly less than the present 1x");
    }
}
