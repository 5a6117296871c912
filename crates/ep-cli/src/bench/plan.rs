//! From what was asked to what will be done: everything that can be refused is refused here, before the run.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ep::config::LaunchEnv;
use ep::trace::RoutingTrace;
use ep::workload::Workload;
use ep::{Config, DispatchMode, Rank, Routing, ScaleFormat, TokenFormat, World};

use crate::args::{BackendChoice, BenchArgs, Dtype, TuningArgs};
use crate::backend::Chosen;
use crate::bench::footprint;
use crate::failure::Failure;
use crate::output::JsonTarget;

/// Iterations before the timed ones.
pub(crate) const WARM_UP: usize = 3;
/// More ranks than this on one machine are a mistake in writing.
pub(crate) const MAX_RANKS: usize = 1024;
/// As many experts as a recorded routing may have.
const MAX_EXPERTS: usize = 1 << 20;

/// A benchmark that can be run.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) backend: Chosen,
    pub(crate) world: World,
    pub(crate) config: Config,
    pub(crate) place: Place,
    pub(crate) hidden: usize,
    pub(crate) dtype: Dtype,
    pub(crate) mode: DispatchMode,
    pub(crate) iterations: usize,
    pub(crate) seed: u64,
    /// GB/s of a GPU's wire, as the user says.
    pub(crate) wire: Option<f64>,
    /// The recorded routing that was asked for.
    pub(crate) routing_file: Option<PathBuf>,
    /// What is measured, one after the other.
    pub(crate) scenarios: Vec<Scenario>,
    pub(crate) json: JsonTarget,
}

/// Where the ranks live.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// Threads of this process.
    Threads,
    /// Processes, which this one has yet to start.
    Launcher,
    /// This process is one rank.
    Rank(LaunchEnv),
}

impl Place {
    pub(crate) fn resolve(processes: bool) -> Result<Self, Failure> {
        if !processes {
            return Ok(Self::Threads);
        }
        Ok(LaunchEnv::from_env()?.map_or(Self::Launcher, Self::Rank))
    }
}

/// One routing to measure.
#[derive(Debug)]
pub(crate) struct Scenario {
    /// The layer of the recorded routing; `None` when drawn.
    pub(crate) layer: Option<usize>,
    /// Experts per token, at most.
    pub(crate) topk: usize,
    source: Source,
}

#[derive(Debug)]
enum Source {
    Drawn(Vec<Workload>),
    Recorded(Arc<[Routing]>),
}

impl Scenario {
    /// Tokens of each rank.
    pub(crate) fn tokens(&self) -> Vec<usize> {
        match &self.source {
            Source::Drawn(workloads) => workloads.iter().map(|workload| workload.tokens).collect(),
            Source::Recorded(routings) => routings.iter().map(Routing::tokens).collect(),
        }
    }

    /// (token, expert) pairs of all ranks; `None` beyond 64 bits.
    pub(crate) fn copies(&self) -> Option<u64> {
        match &self.source {
            Source::Drawn(workloads) => workloads.iter().try_fold(0u64, |sum, workload| {
                sum.checked_add(u64::try_from(workload.tokens.checked_mul(workload.topk)?).ok()?)
            }),
            Source::Recorded(routings) => Some(routings.iter().map(|routing| routing.copies() as u64).sum()),
        }
    }

    /// Zipf exponent; `None` when recorded.
    pub(crate) fn skew(&self) -> Option<f64> {
        match &self.source {
            Source::Drawn(workloads) => workloads.first().map(|workload| workload.skew),
            Source::Recorded(_) => None,
        }
    }

    /// Every rank's routing.
    pub(crate) fn routings(&self) -> Arc<[Routing]> {
        match &self.source {
            Source::Drawn(workloads) => {
                workloads.iter().zip(0..).map(|(workload, rank)| workload.routing(Rank(rank))).collect()
            }
            Source::Recorded(routings) => Arc::clone(routings),
        }
    }
}

impl Plan {
    pub(crate) fn resolve(args: &BenchArgs) -> Result<Self, Failure> {
        let backend = backend(args)?;
        let place = Place::resolve(args.processes)?;
        let json = JsonTarget::resolve(args.json.as_deref())?;
        let ranks = ranks(args.ranks, &place)?;
        let two = backend == Chosen::Host && ranks.is_multiple_of(2);
        let domains = args.domains.unwrap_or(if two { 2 } else { 1 });
        // Before the experts' tables are made, so that a number that is wrong is not a number of gigabytes.
        ep::Topology::new(ranks, domains)
            .map_err(|error| Failure::request(format!("--ranks, --domains: {error}")))?;
        if args.iters == 0 {
            return Err(Failure::request("--iters 0: at least one timed iteration is needed"));
        }
        check_hidden(args.hidden, args.dtype)?;
        let mode =
            DispatchMode::permuted(args.pad).map_err(|error| Failure::request(format!("--pad: {error}")))?;
        let (experts, scenarios) = match &args.routing {
            Some(path) => recorded(&RoutingTrace::read(path)?, ranks, args.layer)
                .map_err(|problem| Failure::request(format!("--routing {}: {problem}", path.display())))?,
            None => (args.experts, vec![drawn(args, ranks)?]),
        };
        let plan = Self {
            backend,
            world: World::new(ranks, domains, experts)?,
            config: config(&args.tuning)?,
            place,
            hidden: args.hidden,
            dtype: args.dtype,
            mode,
            iterations: args.iters,
            seed: args.seed,
            wire: args.wire,
            routing_file: args.routing.clone(),
            scenarios,
            json,
        };
        // Whoever started this rank has looked already, when its peers had not yet taken their part.
        if !args.tuning.launched {
            footprint::check(&plan)?;
        }
        Ok(plan)
    }

    pub(crate) fn ranks(&self) -> usize {
        self.world.ranks()
    }

    pub(crate) fn format(&self) -> TokenFormat {
        format(self.dtype)
    }

    /// Bytes of a row of bf16: an expert's output row, a combined token, a token unless it is FP8.
    pub(crate) fn bf16_row_bytes(&self) -> usize {
        2 * self.hidden
    }
}

/// The library's settings: defaults, then its environment variables, then options.
pub(crate) fn config(tuning: &TuningArgs) -> Result<Config, Failure> {
    let mut config = Config::from_env()?;
    if let Some(timeout) = tuning.timeout_ms {
        config.timeout = Duration::from_millis(timeout);
    }
    if let Some(workers) = tuning.workers {
        config.workers = workers.into();
    }
    if let Some(sms) = tuning.sms {
        config.sms = sms.into();
    }
    Ok(config)
}

fn format(dtype: Dtype) -> TokenFormat {
    match dtype {
        Dtype::Bf16 => TokenFormat::Bf16,
        Dtype::Fp8 => TokenFormat::QuantizeFp8(ScaleFormat::F32Per128),
        Dtype::Fp8Given => TokenFormat::Fp8(ScaleFormat::F32Per128),
    }
}

/// The backend, if it can serve what is asked of it.
fn backend(args: &BenchArgs) -> Result<Chosen, Failure> {
    check_domains(args.backend, args.domains)?;
    let backend = Chosen::resolve(args.backend, args.domains)?;
    if let (Chosen::Host, Some(wire)) = (backend, args.wire) {
        return Err(Failure::request(format!(
            "--wire {wire}: GPUs have a wire, the host backend is set against its memory; leave --wire out, or use \
             --backend cuda"
        )));
    }
    Ok(backend)
}

/// Refuses several domains of exactly that many where the backend that was asked for serves one.
pub(crate) fn check_domains(choice: BackendChoice, domains: Option<usize>) -> Result<(), Failure> {
    match (choice, domains) {
        (BackendChoice::Cuda, Some(domains @ 2..)) => Err(Failure::request(format!(
            "--domains {domains}: the cuda backend serves one NVLink domain; leave --domains out, or emulate \
             several with --backend host"
        ))),
        _ => Ok(()),
    }
}

/// Ranks of a world of which nothing but `--ranks` and the launcher tell.
pub(crate) fn ranks(asked: Option<usize>, place: &Place) -> Result<usize, Failure> {
    let ranks = match (place, asked) {
        (Place::Rank(env), Some(ranks)) if ranks != env.world_size as usize => {
            return Err(Failure::request(format!(
                "--ranks {ranks}: the launcher started {} ranks (WORLD_SIZE)",
                env.world_size
            )));
        }
        (Place::Rank(env), _) => env.world_size as usize,
        (_, ranks) => ranks.unwrap_or(4),
    };
    if ranks == 0 || ranks > MAX_RANKS {
        return Err(Failure::request(format!(
            "--ranks {ranks}: must be from 1 to {MAX_RANKS} on one machine"
        )));
    }
    Ok(ranks)
}

fn check_hidden(hidden: usize, dtype: Dtype) -> Result<(), Failure> {
    if hidden.checked_mul(4).is_none() {
        return Err(Failure::request(format!("--hidden {hidden}: a row has more bytes than 64 bits count")));
    }
    let format = format(dtype);
    ep::backend::check_row_bytes(hidden, format.input_row_bytes(hidden))
        .and_then(|()| ep::backend::check_row_bytes(hidden, format.output_row_bytes(hidden)))
        .map_err(|error| Failure::request(format!("--hidden: {error}")))
}

/// The drawn workload that the options describe.
fn drawn(args: &BenchArgs, ranks: usize) -> Result<Scenario, Failure> {
    let BenchArgs { experts, topk, skew, seed, .. } = *args;
    if experts == 0 || experts > MAX_EXPERTS {
        return Err(Failure::request(format!("--experts {experts}: must be from 1 to {MAX_EXPERTS}")));
    }
    if !experts.is_multiple_of(ranks) {
        return Err(Failure::request(format!(
            "--experts {experts}: cannot be placed evenly on {ranks} ranks; use a multiple of {ranks}"
        )));
    }
    if topk == 0 || topk > experts {
        return Err(Failure::request(format!(
            "--topk {topk}: must be from 1 to the number of experts, {experts}"
        )));
    }
    if !skew.is_finite() || skew < 0.0 {
        return Err(Failure::request(format!("--skew {skew}: must be a number that is not negative")));
    }
    let tokens = match *args.tokens {
        [tokens] => vec![tokens; ranks],
        _ if args.tokens.len() == ranks => args.tokens.clone(),
        _ => {
            return Err(Failure::request(format!(
                "--tokens has {} numbers for {ranks} ranks; give one for all, or one per rank",
                args.tokens.len()
            )));
        }
    };
    let workload = |tokens| Workload { tokens, experts, topk, skew, seed };
    let source = Source::Drawn(tokens.into_iter().map(workload).collect());
    Ok(Scenario { layer: None, topk, source })
}

/// Number of experts, and the wanted layers, of a recorded routing.
fn recorded(
    trace: &RoutingTrace,
    ranks: usize,
    layer: Option<usize>,
) -> Result<(usize, Vec<Scenario>), String> {
    let layers = match layer {
        None => 0..trace.layers.len(),
        Some(layer) if layer < trace.layers.len() => layer..layer + 1,
        Some(layer) => {
            return Err(format!("--layer {layer}: the file has layers 0 to {}", trace.layers.len() - 1));
        }
    };
    if !trace.experts.is_multiple_of(ranks) {
        return Err(format!(
            "its {} experts cannot be placed evenly on {ranks} ranks; choose --ranks that divide {}",
            trace.experts, trace.experts
        ));
    }
    let scenario = |layer| -> Result<Scenario, String> {
        let routings = trace.spread(layer, ranks).map_err(|error| error.to_string())?;
        Ok(Scenario { layer: Some(layer), topk: trace.topk, source: Source::Recorded(routings.into()) })
    };
    Ok((trace.experts, layers.map(scenario).collect::<Result<_, _>>()?))
}

#[cfg(test)]
pub(super) mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Command, CommandLine};

    fn resolve(options: &str) -> Result<Plan, Failure> {
        let line = format!("hybrid-ep bench --backend host {options}");
        let Command::Bench(args) = CommandLine::parse_from(line.split_whitespace()).command else {
            panic!("not a benchmark: {line}")
        };
        Plan::resolve(&args)
    }

    /// A plan for the host backend.
    pub(in crate::bench) fn plan(options: &str) -> Plan {
        resolve(options).unwrap()
    }

    #[test]
    fn defaults_make_a_plan() {
        let plan = resolve("").unwrap();
        assert_eq!((plan.ranks(), plan.world.topology.domains(), plan.world.experts()), (4, 2, 64));
        assert_eq!(plan.scenarios[0].tokens(), [4096; 4]);
        assert_eq!(plan.scenarios[0].copies(), Some(4 * 4096 * 8));
        assert_eq!(resolve("--ranks 1").unwrap().world.topology.domains(), 1);
        assert_eq!(resolve("--tokens 5,0,1,2").unwrap().scenarios[0].tokens(), [5, 0, 1, 2]);
    }

    #[test]
    fn options_override_the_environment() {
        let plan = resolve("--timeout-ms 1500 --workers 3 --sms 24").unwrap();
        assert_eq!((plan.config.timeout, plan.config.workers), (Duration::from_millis(1500), 3));
        assert_eq!(plan.config.sms, 24);
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_option() {
        for (options, culprit) in [
            ("--ranks 0", "--ranks 0"),
            ("--ranks 4 --domains 3", "domains"),
            ("--ranks 3", "--experts 64"),
            ("--hidden 2044", "2044"),
            ("--hidden 8 --dtype fp8", "--hidden"),
            ("--hidden 8 --dtype fp8-given", "--hidden"),
            ("--hidden 0", "--hidden"),
            ("--hidden 18446744073709551600", "--hidden"),
            ("--topk 65", "--topk 65"),
            ("--topk 0", "--topk 0"),
            ("--tokens 1,2", "--tokens has 2 numbers"),
            ("--tokens 18446744073709551615", "--tokens"),
            ("--experts 0", "--experts 0"),
            ("--experts 4000000000", "--experts 4000000000"),
            ("--skew nan", "--skew"),
            ("--iters 0", "--iters"),
            ("--pad 0", "--pad"),
            ("--routing /no/such.safetensors", "/no/such.safetensors"),
            ("--wire 340", "--wire 340"),
            ("--json /no/such/directory/x.json", "/no/such/directory"),
        ] {
            let failure = resolve(options).unwrap_err();
            assert!(failure.to_string().contains(culprit), "{options}: {failure}");
            assert_eq!(failure.code(), crate::failure::code::CALLER);
        }
    }
    #[test]
    fn the_cuda_backend_serves_one_domain() {
        let parse = |options: &str| {
            let line = format!("hybrid-ep bench --backend cuda {options}");
            match CommandLine::parse_from(line.split_whitespace()).command {
                Command::Bench(args) => args,
                _ => panic!("not a benchmark: {line}"),
            }
        };
        let failure = Plan::resolve(&parse("--domains 2")).unwrap_err();
        assert!(failure.to_string().contains("--domains 2: the cuda backend serves one"), "{failure}");
        // Where there is no GPU that is what is said, and else that is the plan.
        match Plan::resolve(&parse("--wire 300")) {
            Ok(plan) => {
                assert_eq!((plan.backend, plan.world.topology.domains()), (Chosen::Cuda, 1));
                assert_eq!(plan.wire, Some(300.0));
            }
            Err(failure) => assert_eq!(failure.code(), crate::failure::code::CALLER, "{failure}"),
        }
    }
}
