//! Running a schedule instead of estimating it: an event-driven simulator at the level of flows.
//!
//! The planner prices a layer with a formula. The simulator executes the schedule that the formula stands for: every
//! GPU computes and sends on streams of its own, flows share links max-min fairly, groups wait for their last
//! member. So it also shows what a formula cannot: a slow GPU, a slow link, jitter, gathers that run into tokens.
//!
//! ```text
//!  Cluster, Model, Scheme ─▶ work.rs     what a layer computes and sends (the planner's volumes)
//!                         ─▶ program.rs  a step as a graph of computations and exchanges
//!  stragglers, jitter     ─▶ world.rs    which GPUs and links differ; those that do not are simulated once
//!                                │
//!                            engine.rs   events: streams, groups, flows on pipe.rs and mesh.rs (fair.rs)
//!                                ▼
//!                            Outcome, Timeline (Chrome trace, SVG)
//! ```
//!
//! ```
//! # fn main() -> ep_plan::Result<()> {
//! use ep_plan::presets;
//! use ep_plan::simulate::{Scheme, Simulation, SimulationOptions, Straggler, Stragglers};
//!
//! let cluster: ep_plan::Cluster = presets::datacenters(2, 100.0, 0.005, presets::dgx_h200(8)).try_into()?;
//! let model: ep_plan::Model = presets::deepseek_v3().try_into()?;
//! let options = SimulationOptions {
//!     layers: Some(4),
//!     stragglers: Stragglers::Listed(vec![Straggler::Gpu { gpu: 3, slowdown: 1.5 }]),
//!     ..SimulationOptions::default()
//! };
//! let scheme = Scheme::Hybrid { domain_sizes: vec![2, 2, 1] };
//! let outcome = Simulation::new(&cluster, &model, options, scheme)?.run();
//! println!("{} per layer, {} events", outcome.layer_seconds, outcome.events);
//! # Ok(())
//! # }
//! ```
//!
//! `SIMULATOR.md` beside the sources says what is simulated, and where it parts from the planner's formulas.

mod clock;
mod engine;
mod fair;
mod mesh;
mod options;
mod outcome;
mod pipe;
mod program;
mod random;
mod shape;
mod svg;
mod symmetry;
mod timeline;
mod work;
mod world;

pub use options::{
    FlowDetail, LinkOrder, MessageStart, Record, Scheme, SimulationOptions, Straggler, Stragglers, Symmetry,
};
pub use outcome::{Direction, LevelOutcome, LinkOutcome, Outcome, Phase, PhaseTime};
pub use svg::SvgOptions;
pub use timeline::{Lane, Span, Timeline, Track};

use crate::cluster::{Cluster, ClusterDescription, GpuDescription, LevelDescription, Sharing};
use crate::error::Result;
use crate::model::Model;
use crate::stream_model::{StreamInput, StreamModel};
use crate::units::{Bytes, Seconds};
use engine::{Counts, Recorder, Setup};
use program::{Program, Task};
use random::Jitter;
use work::Work;
use world::World;

/// A schedule on a cluster, ready to run.
#[derive(Debug)]
pub struct Simulation {
    cluster: Cluster,
    options: SimulationOptions,
    work: Work,
    program: Program,
    world: World,
}

impl Simulation {
    /// Checks that everything fits together.
    ///
    /// Memory is not checked: the planner refuses what does not fit.
    ///
    /// # Errors
    /// [`PlanError::Experts`](crate::PlanError::Experts) when the experts cannot be spread evenly,
    /// [`PlanError::Levels`](crate::PlanError::Levels) or [`PlanError::DomainSize`](crate::PlanError::DomainSize) for
    /// domains that cannot be, [`PlanError::Quantity`](crate::PlanError::Quantity) or
    /// [`PlanError::Index`](crate::PlanError::Index) for an option out of range.
    pub fn new(cluster: &Cluster, model: &Model, options: SimulationOptions, scheme: Scheme) -> Result<Self> {
        options.check(cluster)?;
        let work = Work::new(cluster, model, &options, &scheme)?;
        Ok(Self::with_work(cluster.clone(), work, options))
    }

    /// The paper's stream model: `G` GPUs of one level, one layer forward unless the options say more, no expert
    /// compute. Of the options' planner part, chunks, micro-batches and live layers count.
    ///
    /// # Errors
    /// [`PlanError::DomainSize`](crate::PlanError::DomainSize) for a domain that does not divide the GPUs, and what
    /// [`StreamModel::new`] and an option out of range give.
    pub fn stream(input: StreamInput, domain_size: usize, options: SimulationOptions) -> Result<Self> {
        let model = StreamModel::new(input)?;
        let cluster = one_level(&input)?;
        options.check(&cluster)?;
        let work = Work::stream(&model, domain_size, &options)?;
        Ok(Self::with_work(cluster, work, options))
    }

    fn with_work(cluster: Cluster, work: Work, options: SimulationOptions) -> Self {
        let program = Program::new(&work, options.link_order);
        let world = World::new(&cluster, &options, &work.domain_sizes, &work.layer);
        Self { cluster, options, work, program, world }
    }

    /// Runs the step. The same simulation gives the same outcome, always.
    pub fn run(&self) -> Outcome {
        let counts = engine::run(Setup {
            world: &self.world,
            program: &self.program,
            jitter: Jitter::new(self.options.jitter, self.options.seed),
            recorder: self.recorder(),
        });
        self.outcome(counts)
    }

    fn outcome(&self, counts: Counts) -> Outcome {
        let step = counts.end;
        let passes = (self.work.layers * self.work.micro_batches) as f64;
        let links = self.links(&counts);
        let levels: Vec<LevelOutcome> =
            (0..self.cluster.levels().len()).map(|level| self.level(level, &links)).collect();
        let (phases, computing) = self.phases(&counts);
        Outcome {
            step_seconds: Seconds(step),
            layer_seconds: Seconds(step / passes),
            layers: self.work.layers,
            micro_batches: self.work.micro_batches,
            phases,
            compute_idle_seconds: Seconds((step - computing).max(0.0)),
            messages: levels.iter().map(|level| level.messages).sum(),
            levels,
            links,
            events: counts.events,
            flows: counts.flows,
            simulated_gpus: self.world.actors(),
            timeline: counts.timeline,
        }
    }

    /// Every phase that occurs, and the mean time of a GPU's computations.
    fn phases(&self, counts: &Counts) -> (Vec<PhaseTime>, f64) {
        let gpus = self.cluster.gpus() as f64;
        let mut computing = 0.0;
        let mut phases = Vec::new();
        for phase in Phase::ALL {
            let times = counts.busy.iter().map(|busy| busy[phase as usize]);
            let longest = times.clone().fold(0.0, f64::max);
            let total: f64 =
                times.zip(&self.world.kinds.count).map(|(time, &count)| time * f64::from(count)).sum();
            let mean = total / gpus;
            if phase.computes() {
                computing += mean;
            }
            if longest > 0.0 {
                let (mean_seconds, longest_seconds) = (Seconds(mean), Seconds(longest));
                phases.push(PhaseTime { phase, mean_seconds, longest_seconds });
            }
        }
        (phases, computing)
    }

    fn links(&self, counts: &Counts) -> Vec<LinkOutcome> {
        let entries = self.world.links.iter().zip(&counts.links);
        entries
            .map(|(link, &(carried, busy))| LinkOutcome {
                level: link.level,
                direction: link.direction,
                link: link.link,
                alike: link.alike * link.width.round().max(1.0) as usize,
                bytes: Bytes(carried / link.width),
                busy_seconds: Seconds(busy),
                utilisation: if counts.end > 0.0 { carried / (link.capacity * counts.end) } else { 0.0 },
            })
            .collect()
    }

    fn level(&self, level: usize, links: &[LinkOutcome]) -> LevelOutcome {
        let uplinks = links.iter().filter(|link| link.level == level && link.direction == Direction::Up);
        let count: usize = uplinks.clone().map(|link| link.alike).sum();
        let over_all = |value: fn(&LinkOutcome) -> f64| -> f64 {
            uplinks.clone().map(|link| value(link) * link.alike as f64).sum()
        };
        let gpus = self.cluster.gpus() as f64;
        let messages: f64 = self
            .program
            .operations
            .iter()
            .map(|operation| match &operation.task {
                Task::Exchange(_, exchange, _) if exchange.level == level => exchange.messages * gpus,
                _ => 0.0,
            })
            .sum();
        LevelOutcome {
            name: self.cluster.level_name(level),
            links: count,
            bytes: Bytes(over_all(|link| link.bytes.0)),
            messages,
            mean_utilisation: over_all(|link| link.utilisation) / count as f64,
            peak_utilisation: uplinks.map(|link| link.utilisation).fold(0.0, f64::max),
        }
    }

    /// Tracks for the GPUs and links to record.
    fn recorder(&self) -> Option<Recorder> {
        let record = &self.options.record;
        if record.gpus.is_empty() {
            return None;
        }
        let mut recorder = Recorder::default();
        for &gpu in &record.gpus {
            let actor = self.world.kinds.of[gpu];
            let tracks = &mut recorder.timeline.tracks;
            recorder.actors.entry(actor).or_default().push(tracks.len());
            for (lane, name) in [
                (Lane::Compute, "compute"),
                (Lane::Tokens, "tokens"),
                (Lane::Experts, "experts"),
                (Lane::Gradients, "gradients"),
            ] {
                tracks.push(Track { gpu, lane, name: name.into() });
            }
            if record.links {
                for level in 0..self.cluster.levels().len() {
                    let link = recorder.links.entry(self.world.uplink(actor, level)).or_default();
                    link.tracks.push(tracks.len());
                    let name = format!("{} link", self.cluster.level_name(level));
                    tracks.push(Track { gpu, lane: Lane::Link(level), name });
                }
            }
        }
        Some(recorder)
    }
}

/// A cluster of one level on which every GPU has a link of its own.
fn one_level(input: &StreamInput) -> Result<Cluster> {
    Cluster::try_from(ClusterDescription {
        name: format!("{} GPUs of the stream model", input.gpus),
        levels: vec![LevelDescription {
            name: "link".into(),
            scaling_factor: input.gpus,
            alpha_s: 0.0,
            round_trip_s: 0.0,
            bandwidth_gbit_per_s: input.bandwidth.as_gbit_per_s(),
            sharing: Sharing::PerGpu,
        }],
        // The stream model says how long compute takes, not what does it.
        gpu: GpuDescription { name: "any".into(), sustained_tflops: 1.0, memory_gb: 1.0, hbm_gb_per_s: 1.0 },
    })
}

#[cfg(test)]
mod tests;
