//! Turns the options into a benchmark. All invalid options are refused here, before the run starts.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::PathBuf;
use std::sync::Arc;

use ep::trace::RoutingTrace;
use ep::workload::Workload;
use ep::{Config, DispatchMode, Rank, Routing, ScaleFormat, TokenFormat, World};

use crate::bench::args::{BenchArgs, Dtype};
use crate::common::agree::JobOptions;
use crate::common::backend::BackendKind;
use crate::common::failure::Failure;
use crate::common::numbers::Number;
use crate::common::output::Target;
use crate::common::role::{ProcessRole, ranks};

/// Iterations before the timed ones.
pub(crate) const WARM_UP: usize = 3;
/// Most experts of a drawn routing: drawing a token takes time in proportion to the experts, and more take minutes.
const MAX_EXPERTS: usize = 1 << 16;
/// Range of the Zipf exponent; a larger one would send all tokens to the same few experts.
const SKEW: Number = Number::new(0.0, 100.0);
/// Most iterations: the times of all of them are kept in memory.
const MAX_ITERATIONS: usize = 1_000_000;

/// A benchmark that can be run.
#[derive(Debug)]
pub(crate) struct BenchPlan {
    pub(crate) backend: BackendKind,
    pub(crate) world: World,
    pub(crate) config: Config,
    pub(crate) role: ProcessRole,
    pub(crate) hidden: usize,
    pub(crate) dtype: Dtype,
    pub(crate) mode: DispatchMode,
    pub(crate) iterations: usize,
    pub(crate) seed: u64,
    /// `--wire`: bandwidth from a GPU to the others, in GB/s.
    pub(crate) wire: Option<f64>,
    /// The file of the recorded routing, if one was given.
    pub(crate) routing_file: Option<PathBuf>,
    /// The routings to measure, one after the other.
    pub(crate) scenarios: Vec<Scenario>,
    pub(crate) json: Target,
}

/// One routing to measure.
#[derive(Debug)]
pub(crate) struct Scenario {
    /// The layer of the recorded routing; `None` for a drawn routing.
    pub(crate) layer: Option<usize>,
    /// Most experts of a token.
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

    /// Copies, which are (token, expert) pairs, of all ranks; `None` if 64 bits cannot count them.
    pub(crate) fn copies(&self) -> Option<u64> {
        match &self.source {
            Source::Drawn(workloads) => workloads.iter().try_fold(0u64, |sum, workload| {
                sum.checked_add(u64::try_from(workload.tokens.checked_mul(workload.topk)?).ok()?)
            }),
            Source::Recorded(routings) => Some(routings.iter().map(|routing| routing.copies() as u64).sum()),
        }
    }

    /// Zipf exponent; `None` for a recorded routing.
    pub(crate) fn skew(&self) -> Option<f64> {
        match &self.source {
            Source::Drawn(workloads) => workloads.first().map(|workload| workload.skew),
            Source::Recorded(_) => None,
        }
    }

    /// The routings of all ranks.
    pub(crate) fn routings(&self) -> Arc<[Routing]> {
        match &self.source {
            Source::Drawn(workloads) => {
                workloads.iter().zip(0..).map(|(workload, rank)| workload.routing(Rank(rank))).collect()
            }
            Source::Recorded(routings) => Arc::clone(routings),
        }
    }
}

impl BenchPlan {
    pub(crate) fn resolve(args: &BenchArgs) -> Result<Self, Failure> {
        let backend = backend(args)?;
        let role = ProcessRole::resolve(args.processes)?;
        let json = Target::resolve("--json", args.json.as_deref())?;
        let ranks = ranks(args.ranks, &role)?;
        let two = backend == BackendKind::Host && ranks.is_multiple_of(2);
        let domains = args.domains.unwrap_or(if two { 2 } else { 1 });
        // Checked with one expert per rank, before the routings are drawn, which a mistyped number could make gigabytes
        // long.
        World::builder()
            .ranks(ranks)
            .domains(domains)
            .experts(ranks)
            .build()
            .map_err(|error| Failure::request(format!("--ranks, --domains: {error}")))?;
        if args.iters == 0 || args.iters > MAX_ITERATIONS {
            return Err(Failure::request(format!(
                "--iters {}: must be from 1 to {MAX_ITERATIONS}",
                args.iters
            )));
        }
        check_hidden(args.hidden, args.dtype)?;
        let mode =
            DispatchMode::permuted(args.pad).map_err(|error| Failure::request(format!("--pad: {error}")))?;
        let (experts, scenarios) = match &args.routing {
            Some(path) => recorded(&RoutingTrace::read(path)?, ranks, args.layer)
                .map_err(|problem| Failure::request(format!("--routing {}: {problem}", path.display())))?,
            None => (args.experts, vec![drawn(args, ranks)?]),
        };
        Ok(Self {
            backend,
            world: World::builder().ranks(ranks).domains(domains).experts(experts).build()?,
            config: args.tuning.config()?,
            role,
            hidden: args.hidden,
            dtype: args.dtype,
            mode,
            iterations: args.iters,
            seed: args.seed,
            wire: args.wire,
            routing_file: args.routing.clone(),
            scenarios,
            json,
        })
    }

    pub(crate) fn ranks(&self) -> usize {
        self.world.ranks()
    }

    pub(crate) fn format(&self) -> TokenFormat {
        format(self.dtype)
    }

    /// The options that must be equal on all ranks: each rank computes the tokens and routings of all ranks, and all
    /// must call the same operators in the same order.
    pub(crate) fn job_options(&self) -> JobOptions {
        let origin = match &self.scenarios[..] {
            [Scenario { source: Source::Drawn(_), .. }] => "random".into(),
            recorded => format!("recorded (hash {:016x})", fingerprint(recorded)),
        };
        let drawn = self.scenarios.first().filter(|_| self.routing_file.is_none());
        let list = |tokens: Vec<usize>| match &tokens[..] {
            [first, rest @ ..] if rest.iter().all(|tokens| tokens == first) => first.to_string(),
            all => all.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
        };
        let mut options = JobOptions::of("bench")
            .with("--backend", self.backend.name())
            .with("--domains", self.world.topology().domains())
            .with("--routing", origin);
        if let Some(scenario) = drawn {
            options = options
                .with("--tokens", list(scenario.tokens()))
                .with("--experts", self.world.experts())
                .with("--topk", scenario.topk)
                .with("--skew", scenario.skew().unwrap_or_default());
        }
        options
            .with("--hidden", self.hidden)
            .with("--dtype", self.dtype.name())
            .with("--pad", self.mode.pad_multiple())
            .with("--seed", self.seed)
            .with("--iters", self.iterations)
    }

    /// Bytes of a bf16 row: an expert's output row, a combined token, or a bf16 input token.
    pub(crate) fn bf16_row_bytes(&self) -> usize {
        2 * self.hidden
    }
}

/// Hash of the recorded routings, to compare them between ranks. All ranks run the same program, so all compute the
/// same hash.
fn fingerprint(scenarios: &[Scenario]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for routing in scenarios.iter().flat_map(|scenario| scenario.routings().to_vec()) {
        for (experts, weights) in routing.rows() {
            experts.hash(&mut hasher);
            weights.iter().for_each(|weight| weight.to_bits().hash(&mut hasher));
        }
    }
    hasher.finish()
}

fn format(dtype: Dtype) -> TokenFormat {
    match dtype {
        Dtype::Bf16 => TokenFormat::Bf16,
        Dtype::Fp8 => TokenFormat::QuantizeFp8(ScaleFormat::F32Per128),
        Dtype::Fp8Given => TokenFormat::Fp8(ScaleFormat::F32Per128),
    }
}

/// The backend to run, if the options allow it.
fn backend(args: &BenchArgs) -> Result<BackendKind, Failure> {
    let backend = BackendKind::resolve(args.backend, args.domains)?;
    if let (BackendKind::Host, Some(wire)) = (backend, args.wire) {
        return Err(Failure::request(format!(
            "--wire {wire}: this option is for GPUs, and the floor of the host backend comes from memory bandwidth; \
             leave --wire out, or use --backend cuda"
        )));
    }
    Ok(backend)
}

fn check_hidden(hidden: usize, dtype: Dtype) -> Result<(), Failure> {
    if hidden.checked_mul(4).is_none() {
        return Err(Failure::request(format!(
            "--hidden {hidden}: a row would have more bytes than 64 bits can count; use a smaller hidden size"
        )));
    }
    let format = format(dtype);
    ep::backend::check_row_bytes(hidden, format.input_row_bytes(hidden))
        .and_then(|()| ep::backend::check_row_bytes(hidden, format.output_row_bytes(hidden)))
        .map_err(|error| Failure::request(format!("--hidden: {error}")))
}

/// The random workload that the options describe.
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
    if !SKEW.allows(skew) {
        return Err(Failure::request(format!("--skew {skew}: must be a number {SKEW}")));
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

/// Number of experts and the requested layers of a recorded routing.
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
    use std::time::Duration;

    use super::*;
    use crate::bench::args::parse;

    fn resolve(options: &str) -> Result<BenchPlan, Failure> {
        BenchPlan::resolve(&parse(&format!("--backend host {options}")).unwrap())
    }

    /// A plan for the host backend.
    pub(in crate::bench) fn plan(options: &str) -> BenchPlan {
        resolve(options).unwrap()
    }

    #[test]
    fn defaults_make_a_plan() {
        let plan = resolve("").unwrap();
        assert_eq!((plan.ranks(), plan.world.topology().domains(), plan.world.experts()), (4, 2, 64));
        assert_eq!(plan.scenarios[0].tokens(), [4096; 4]);
        assert_eq!(plan.scenarios[0].copies(), Some(4 * 4096 * 8));
        assert_eq!(resolve("--ranks 1").unwrap().world.topology().domains(), 1);
        assert_eq!(resolve("--tokens 5,0,1,2").unwrap().scenarios[0].tokens(), [5, 0, 1, 2]);
    }

    #[test]
    fn options_override_the_environment() {
        let config = resolve("--timeout-ms 1500 --stall-timeout-ms 700 --workers 3 --sms 24").unwrap().config;
        assert_eq!(config.timeout, Duration::from_millis(1500));
        assert_eq!(config.stall_timeout, Duration::from_millis(700));
        assert_eq!((config.host.workers, config.cuda.sms), (3, 24));
    }

    #[test]
    fn an_invalid_option_is_refused_by_name() {
        for (options, named) in [
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
            assert!(failure.to_string().contains(named), "{options}: {failure}");
            assert_eq!(failure.code(), crate::common::failure::code::CALLER);
        }
    }

    #[test]
    fn the_cuda_backend_has_one_domain_unless_several_are_asked_for() {
        let parse = |options: &str| parse(&format!("--backend cuda {options}")).unwrap();
        if let Ok(plan) = BenchPlan::resolve(&parse("--domains 2")) {
            assert_eq!((plan.backend, plan.world.topology().domains()), (BackendKind::Cuda, 2));
        }
        // Without a GPU the request is refused; with one it gives a plan.
        match BenchPlan::resolve(&parse("--wire 300")) {
            Ok(plan) => {
                assert_eq!((plan.backend, plan.world.topology().domains()), (BackendKind::Cuda, 1));
                assert_eq!(plan.wire, Some(300.0));
            }
            Err(failure) => assert_eq!(failure.code(), crate::common::failure::code::CALLER, "{failure}"),
        }
    }
}
