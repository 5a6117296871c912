//! An event-driven simulator of a training step, at the level of flows.
//!
//! The planner prices a layer with formulas. The simulator executes the schedule that these formulas describe: every
//! GPU computes and sends on its own streams, flows share links max-min fairly, and an exchange ends when the last
//! member of its group has sent. The simulator therefore also shows effects that the formulas leave out: slow GPUs,
//! slow links, jitter, and gathers that compete with tokens for a link.
//!
//! ```text
//!  Cluster, Model, Scheme ─▶ work.rs     computations and exchanges of a layer (the planner's volumes)
//!                         ─▶ program.rs  a step as a graph of computations and exchanges
//!  stragglers, jitter     ─▶ world.rs    kinds of GPUs and links; equal GPUs are simulated once
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
//! `SIMULATOR.md` beside the sources lists what is simulated, and where the results differ from the planner's formulas.

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
use crate::error::{PlanError, Result};
use crate::limits;
use crate::model::Model;
use crate::stream_model::{StreamInput, StreamModel};
use crate::units::{Bytes, Seconds};
use engine::{Counts, Recorder, Setup};
use program::{Program, Task};
use random::Jitter;
use work::StepWork;
use world::World;

/// A schedule on a cluster, ready to run.
#[derive(Debug)]
pub struct Simulation {
    cluster: Cluster,
    options: SimulationOptions,
    work: StepWork,
    program: Program,
    world: World,
}

impl Simulation {
    /// Checks the arguments and prepares the simulation of one step.
    ///
    /// If the number of experts is not a multiple of the number of GPUs, the slots that remain hold [copies of
    /// experts](crate::Model::spread). Memory is not checked; [`Planner`](crate::Planner) refuses domain sizes that do not fit.
    /// The exception is [`Replicas::Best`](crate::planner::Replicas::Best), for which this function asks the planner.
    ///
    /// # Errors
    /// - [`PlanError::Levels`] when there is not one domain size per level, [`PlanError::DomainSize`] when a domain
    ///   size does not divide its level.
    /// - [`PlanError::Quantity`], [`PlanError::Count`] or [`PlanError::Index`] when an option is out of range;
    ///   [`PlanError::Count`] also when the cluster has more GPUs than [`limits::EXPERTS`] allows.
    /// - [`PlanError::Unequal`] when sites have different numbers of GPUs. Links of different bandwidth are simulated.
    /// - [`PlanError::TooMany`] when the step has more operations than [`limits::OPERATIONS`] or [`limits::EVENTS`].
    /// - With [`Replicas::Best`](crate::planner::Replicas::Best), the errors of [`Planner::new`](crate::Planner::new)
    ///   and [`Planner::evaluate`](crate::Planner::evaluate).
    pub fn new(cluster: &Cluster, model: &Model, options: SimulationOptions, scheme: Scheme) -> Result<Self> {
        options.check(cluster)?;
        if cluster.is_unequal() {
            return Err(cluster.unequal("the simulator", "equal sites; `plan`, which prices unequal ones; or `simulate --steps` for EP groups inside a site"));
        }
        let work = StepWork::new(cluster, model, &options, &scheme)?;
        Self::with_work(cluster.clone(), work, options)
    }

    /// Prepares the simulation of the paper's stream model: `G` GPUs of one level, the forward pass, no expert compute.
    /// `options.layers` defaults to one layer. Of `options.planner`, only the chunks, micro-batches and live layers
    /// have an effect.
    ///
    /// # Errors
    /// [`PlanError::DomainSize`] when the domain size does not divide the number of GPUs, [`PlanError::TooMany`] when
    /// the step has too many operations, and [`PlanError::Quantity`], [`PlanError::Count`] or [`PlanError::Index`] when
    /// a parameter or an option is out of range.
    pub fn stream(input: StreamInput, domain_size: usize, options: SimulationOptions) -> Result<Self> {
        let model = StreamModel::new(input)?;
        let cluster = one_level(&input)?;
        options.check(&cluster)?;
        let work = StepWork::stream(&model, domain_size, &options)?;
        Self::with_work(cluster, work, options)
    }

    fn with_work(cluster: Cluster, work: StepWork, options: SimulationOptions) -> Result<Self> {
        let world = World::new(&cluster, &options, &work.domain_sizes, &work.layer);
        check_size(&work, world.actors())?;
        let program = Program::new(&work, options.link_order);
        Ok(Self { cluster, options, work, program, world })
    }

    /// Runs the step. The outcome is deterministic: every run of the same simulation gives the same outcome.
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

    /// The times of every phase that occurs, and the mean over all GPUs of the time spent computing.
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

    /// A recorder with one track per stream of each recorded GPU and, if asked for, one per uplink.
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

/// Refuses a step with too many operations. The simulator holds the graph of operations in memory.
fn check_size(work: &StepWork, actors: usize) -> Result<()> {
    let passes = work.micro_batches as f64 * work.layers as f64 * if work.trains { 2.0 } else { 1.0 };
    let operations = passes * work.operations_per_pass() as f64;
    let too_many = |what: String, count: f64, most: usize| PlanError::TooMany {
        what,
        count,
        most,
        hint: "simulate fewer layers (--layers), micro-batches (gradient_accumulation) or chunks (overlap_chunks)",
    };
    let StepWork { micro_batches, layers, chunks, .. } = work;
    let step = format!("of {micro_batches} micro-batches x {layers} layers x {chunks} chunks");
    if operations > limits::OPERATIONS.most as f64 {
        return Err(too_many(format!("operations {step}"), operations, limits::OPERATIONS.most));
    }
    let events = operations * actors as f64;
    if events > limits::EVENTS.most as f64 {
        return Err(too_many(format!("operations {step}, on {actors} GPUs"), events, limits::EVENTS.most));
    }
    Ok(())
}

/// A cluster of one level in which every GPU has its own link.
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
            site_members: Vec::new(),
            site_bandwidth_gbit_per_s: Vec::new(),
            efficiency: 1.0,
            loss: 0.0,
            flows: 1,
        }],
        // These values have no effect: the stream model gives the time of compute directly.
        gpu: GpuDescription { name: "any".into(), sustained_tflops: 1.0, memory_gb: 1.0, hbm_gb_per_s: 1.0 },
    })
}

#[cfg(test)]
mod tests;
