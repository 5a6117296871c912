//! Builds the problem to plan from presets, files and options.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use ep::trace::RoutingTrace;
use ep_plan::cluster::ClusterDescription;
use ep_plan::input::preset::{self, Joined};
use ep_plan::input::{self, Document, Kind};
use ep_plan::limits::{self, Number};
use ep_plan::model::ModelDescription;
use ep_plan::step::StepPlanner;
use ep_plan::{Options, Planner, Routing};
use serde::Serialize;

use super::args::ProblemArgs;
use super::key::Key;
use crate::common::failure::Failure;
use crate::common::output::{one_line, to_stderr};

/// Descriptions of a cluster, a model and options. The planner checks whether they fit together.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Problem {
    pub(crate) cluster: ClusterDescription,
    pub(crate) model: ModelDescription,
    pub(crate) options: Options,
    /// Remarks on the origin of the values, for the report.
    pub(crate) notes: Vec<String>,
}

impl Problem {
    pub(crate) fn resolve(args: &ProblemArgs) -> Result<Self, Failure> {
        let mut inside = Document::default();
        let (cluster, mut notes) = cluster(args, &mut inside)?;
        let (model, options) = model(args, inside)?;
        let mut problem = Self { cluster, model, options, notes: Vec::new() };
        if let Some(path) = &args.routing {
            let note = problem
                .take_routing(path, args.layer)
                .map_err(|what| Failure::request(format!("--routing {}: {what}", path.display())))?;
            notes.push(note);
        }
        for assignment in &args.set {
            problem
                .set(assignment)
                .map_err(|what| Failure::request(format!("--set {assignment}: {what}")))?;
        }
        Ok(Self { notes, ..problem })
    }

    /// The planner of this problem.
    pub(crate) fn planner(&self) -> Result<Planner, Failure> {
        self.try_planner().map_err(Failure::request)
    }

    /// The planner of whole steps; `None` for forward passes, which have no step.
    pub(crate) fn step_planner(&self) -> Result<Option<StepPlanner>, ep_plan::PlanError> {
        self.check()?;
        let (cluster, model) = (self.cluster.clone().try_into()?, self.model.clone().try_into()?);
        match StepPlanner::new(cluster, model, self.options.clone()) {
            Ok(planner) => Ok(Some(planner)),
            Err(ep_plan::PlanError::Forward) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Refuses a cap above the memory of a GPU, with which a plan could exceed that memory.
    fn check(&self) -> Result<(), ep_plan::PlanError> {
        let device = self.cluster.gpu.memory_gb;
        match self.options.memory_cap_gb {
            Some(cap) if cap > device => Err(ep_plan::PlanError::Quantity {
                what: "memory_cap (GB)".into(),
                value: cap,
                needed: format!("at most the {device} GB of a GPU"),
            }),
            _ => Ok(()),
        }
    }

    pub(crate) fn try_planner(&self) -> Result<Planner, ep_plan::PlanError> {
        self.check()?;
        Planner::new(self.cluster.clone().try_into()?, self.model.clone().try_into()?, self.options.clone())
    }

    /// Names that come from the input: a word such as `inf` in them is not a number.
    pub(crate) fn names(&self) -> Vec<&str> {
        let levels = self.cluster.levels.iter().map(|level| &*level.name);
        let others = [&*self.cluster.name, &*self.cluster.gpu.name, &*self.model.name];
        others.into_iter().chain(levels).chain(self.notes.iter().map(String::as_str)).collect()
    }

    fn set(&mut self, assignment: &str) -> Result<(), String> {
        let (name, value) = assignment.split_once('=').ok_or("write KEY=VALUE")?;
        let key = Key::find(name, &self.cluster)?;
        let value = key.parse(value)?;
        self.apply(&key, value);
        // The name of a preset states its numbers of members, and a name in a file may: the name then states the change, too.
        if let Some(level) = key.members_of() {
            let name = &self.cluster.levels[level].name;
            let renamed = format!("{}, {value} members of '{name}'", self.cluster.name);
            if renamed.chars().count() <= limits::NAME {
                self.cluster.name = renamed;
            }
        }
        Ok(())
    }

    /// Sets the value of a key.
    pub(crate) fn apply(&mut self, key: &Key, value: f64) {
        key.apply(&mut self.cluster, &mut self.model, &mut self.options, value);
    }

    /// Replaces the model's routing by a recorded one. Returns a note for the report.
    fn take_routing(&mut self, path: &Path, layer: Option<usize>) -> Result<String, String> {
        let trace = RoutingTrace::read(path).map_err(|error| error.to_string())?;
        if trace.experts != self.model.experts || trace.topk != self.model.topk {
            return Err(format!(
                "the recording is of top-{} of {} experts, but the model has top-{} of {}; choose the model that was \
                 recorded",
                trace.topk, trace.experts, self.model.topk, self.model.experts
            ));
        }
        let counts = |layer: usize| {
            let mut counts = vec![0.0; trace.experts];
            for routing in &trace.layers[layer] {
                for token in 0..routing.tokens() {
                    routing.experts_of(token).iter().for_each(|&expert| counts[expert as usize] += 1.0);
                }
            }
            counts
        };
        let hottest = |layer: &usize| counts(*layer).into_iter().fold(0.0, f64::max);
        let layers = trace.layers.len();
        let (layer, why) = match layer {
            Some(layer) if layer < layers => (layer, String::new()),
            Some(layer) => {
                return Err(format!(
                    "--layer {layer}: the file has layers 0 to {}",
                    layers.saturating_sub(1)
                ));
            }
            None => (0..layers)
                .max_by(|a, b| hottest(a).total_cmp(&hottest(b)))
                .map(|layer| (layer, format!(", which of {layers} layers has the most popular expert")))
                .ok_or("the file has no layer")?,
        };
        self.model.routing = Routing::Histogram(counts(layer));
        let file = one_line(&path.display().to_string());
        Ok(format!("Routing recorded in {file}, layer {layer}{why}."))
    }
}

/// The cluster and notes on it. The other tables of the cluster's file go to `inside`.
fn cluster(args: &ProblemArgs, inside: &mut Document) -> Result<(ClusterDescription, Vec<String>), Failure> {
    let name = &*args.cluster;
    let refuse = |what: String| Failure::request(format!("--cluster {name}: {what}"));
    let joined_by = [
        ("--datacenters", args.datacenters.is_some()),
        ("--nodes", !args.nodes.is_empty()),
        ("--gpus-per-node", args.gpus_per_node.is_some()),
        ("--uplink", !args.uplink.is_empty()),
        ("--round-trip", args.round_trip.is_some()),
    ];
    if let (false, Some((option, _))) =
        (preset::is_joinable(name), joined_by.iter().find(|(_, given)| *given))
    {
        return Err(refuse(format!("{option} is for presets; write the value in the file, or use --set")));
    }
    let (joined, uplinks) = joined(args)?;
    if let (Some(wanted), Some(whole)) =
        (args.gpus_per_node, preset::cluster(name, &Joined { gpus_per_node: None, ..joined }))
    {
        let most = whole.levels.last().map_or(0, |level| level.scaling_factor);
        if wanted > most {
            return Err(refuse(format!("--gpus-per-node {wanted}: its NVLink domains have {most} GPUs")));
        }
    }
    if let Some(mut found) = preset::cluster(name, &joined) {
        unequal(args, &mut found, &uplinks)?;
        let about = preset::CLUSTERS.iter().find(|known| known.name == name).map(|known| known.about);
        let paper = about.filter(|_| !preset::is_joinable(name));
        return Ok((found, paper.map(|about| format!("{name}: {about}.")).into_iter().collect()));
    }
    *inside = read(name, "--cluster", &preset::cluster_names())?;
    let found = inside.cluster.take().ok_or_else(|| refuse("the file has no [cluster]".into()))?;
    Ok((found, Vec::new()))
}

/// The numbers of nodes and the uplinks that differ from datacenter to datacenter.
fn unequal(args: &ProblemArgs, cluster: &mut ClusterDescription, uplinks: &[f64]) -> Result<(), Failure> {
    let lists = [("--nodes", args.nodes.len()), ("--uplink", uplinks.len())];
    let datacenters = datacenters(args);
    if let Some((option, given)) = lists.into_iter().find(|&(_, given)| given > 1 && given != datacenters) {
        return Err(Failure::request(format!(
            "{option}: {given} entries for {datacenters} datacenters; give a single value or one entry per datacenter. \
             Without --datacenters, the entries of --nodes, else of --uplink, give the number of datacenters"
        )));
    }
    if let (true, Some(rail)) = (args.nodes.len() > 1, cluster.levels.get_mut(1)) {
        let most = rail.scaling_factor;
        rail.set_members(&args.nodes);
        let counts = args.nodes.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        cluster.name = cluster.name.replacen(&format!("({most} x "), &format!("({counts} x "), 1);
    }
    if let (true, Some(wan)) = (uplinks.len() > 1, cluster.levels.first_mut()) {
        wan.set_bandwidths(uplinks);
    }
    Ok(())
}

/// The number of datacenters of a preset: as given, or the length of a list with one entry per datacenter.
fn datacenters(args: &ProblemArgs) -> usize {
    let lists = [args.nodes.len(), args.uplink.len()];
    let listed = lists.into_iter().find(|&entries| entries > 1);
    args.datacenters.or(listed).unwrap_or(Joined::default().datacenters)
}

/// The parts of a preset, and the bandwidth of every uplink that is given.
fn joined(args: &ProblemArgs) -> Result<(Joined, Vec<f64>), Failure> {
    let default = Joined::default();
    let quantity = |option: &str, text: &String, kind: Kind, range: Number| {
        kind.parse(text, range).map_err(|what| Failure::request(format!("{option} {text}: {what}")))
    };
    let uplink = |text| quantity("--uplink", text, Kind::LinkRate, limits::LINK_GBIT_PER_S);
    let uplinks = args.uplink.iter().map(uplink).collect::<Result<Vec<f64>, _>>()?;
    let round_trip = |text| quantity("--round-trip", text, Kind::Time, limits::SECONDS);
    let joined = Joined {
        datacenters: datacenters(args),
        nodes: args.nodes.iter().copied().max().unwrap_or(default.nodes),
        gpus_per_node: args.gpus_per_node,
        uplink_gbit_per_s: uplinks.first().copied().unwrap_or(default.uplink_gbit_per_s),
        round_trip_s: args.round_trip.as_ref().map(round_trip).transpose()?.unwrap_or(default.round_trip_s),
    };
    Ok((joined, uplinks))
}

/// The model and the options. `inside` has the other tables of the cluster's file.
fn model(args: &ProblemArgs, inside: Document) -> Result<(ModelDescription, Options), Failure> {
    let Some(name) = &args.model else {
        let model = inside.model.or_else(|| preset::model("deepseek-v3"));
        let model = model.ok_or_else(|| Failure::request("the preset deepseek-v3 is missing"))?;
        return Ok((model, inside.options.unwrap_or_default()));
    };
    if let Some(found) = preset::model(name) {
        return Ok((found, inside.options.unwrap_or_default()));
    }
    let refuse = |what: &str| Failure::request(format!("--model {name}: {what}"));
    let document = read(name, "--model", &preset::model_names())?;
    let model = document.model.ok_or_else(|| refuse("the file has no [model]"))?;
    let options = match (document.options, inside.options) {
        (Some(_), Some(_)) if *name != args.cluster => {
            return Err(refuse("the cluster's file has [options] too; remove one of the two"));
        }
        (model_options, cluster_options) => model_options.or(cluster_options).unwrap_or_default(),
    };
    Ok((model, options))
}

fn read(name: &str, option: &str, presets: &[&str]) -> Result<Document, Failure> {
    let text = read_text(name).map_err(|problem| {
        let presets = presets.join(", ");
        Failure::request(format!(
            "{option} {name}: not a preset, and reading it as a file failed: {problem}; presets: {presets}"
        ))
    })?;
    input::parse(name, &text).map_err(|error| {
        // Users at a terminal get an excerpt, too; scripts read only the one line of the error.
        if std::io::IsTerminal::is_terminal(&std::io::stderr()) {
            let _ = to_stderr(&error.excerpt());
        }
        Failure::request(error)
    })
}

/// Reads a regular file or a pipe up to the size limit. Devices are refused, because they may have no end.
fn read_text(name: &str) -> Result<String, String> {
    let kind = std::fs::metadata(name).map_err(|error| error.to_string())?.file_type();
    if !kind.is_file() && !kind.is_fifo() {
        return Err("it is neither a file nor a pipe".into());
    }
    let most = limits::FILE_BYTES as u64;
    let mut text = String::new();
    let read = File::open(name).and_then(|file| file.take(most + 1).read_to_string(&mut text));
    match read {
        Ok(length) if length as u64 > most => {
            Err(format!("it has more than {most} bytes, the limit for such a file"))
        }
        Ok(_) => Ok(text),
        Err(error) => Err(error.to_string()),
    }
}
