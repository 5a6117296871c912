//! Turns the options into a benchmark. All invalid options are refused here, before the run starts.

use std::hash::{DefaultHasher, Hasher as _};
use std::path::PathBuf;

use ep::trace::RoutingTrace;
use ep::workload::Workload;
use ep::{Config, DispatchMode, ScaleFormat, TokenFormat, World};

use crate::bench::args::{BenchArgs, Dtype, Mode, TokenCounts};
use crate::bench::scenario::{Origin, Scenario, Source, mode_name};
use crate::common::agree::JobOptions;
use crate::common::backend::BackendKind;
use crate::common::failure::Failure;
use crate::common::numbers::Number;
use crate::common::output::Target;
use crate::common::role::{ProcessRole, ranks};

/// Iterations before the timed ones.
pub(crate) const WARM_UP: usize = 3;
/// Maximum number of experts of a drawn routing. The time to draw a token is proportional to the number of experts; with
/// more experts, drawing takes minutes.
const MAX_EXPERTS: usize = 1 << 16;
/// Range of the Zipf exponent; a larger one would send all tokens to the same few experts.
const SKEW: Number = Number::new(0.0, 100.0);
/// Maximum number of iterations, since the times of all iterations are kept in memory.
const MAX_ITERATIONS: usize = 1_000_000;
/// `--pad`, if it is not given.
const DEFAULT_PAD: usize = 16;

/// A benchmark that can be run.
#[derive(Debug)]
pub(crate) struct BenchPlan {
    pub(crate) backend: BackendKind,
    pub(crate) world: World,
    pub(crate) config: Config,
    pub(crate) role: ProcessRole,
    pub(crate) hidden: usize,
    pub(crate) dtype: Dtype,
    pub(crate) iterations: usize,
    pub(crate) seed: u64,
    /// `--wire`: bandwidth from a GPU to the others, in GB/s.
    pub(crate) wire: Option<f64>,
    /// The file of the recorded routing, if one was given.
    pub(crate) routing_file: Option<PathBuf>,
    /// The scenarios to measure, in this order.
    pub(crate) scenarios: Vec<Scenario>,
    /// The options that must be equal on all ranks: each rank computes the tokens and routings of all ranks, and all must
    /// call the same operators in the same order.
    pub(crate) job_options: JobOptions,
    pub(crate) json: Target,
}

impl BenchPlan {
    pub(crate) fn resolve(args: &BenchArgs) -> Result<Self, Failure> {
        let backend = backend(args)?;
        let role = ProcessRole::resolve(args.processes)?;
        let json = Target::resolve("--json", args.json.as_deref())?;
        let ranks = ranks(args.ranks, &role)?;
        let two = backend == BackendKind::Host && ranks.is_multiple_of(2);
        let domains = args.domains.unwrap_or(if two { 2 } else { 1 });
        // Check ranks and domains, with one expert per rank, before the routings are drawn: with a mistyped number, these
        // could take gigabytes.
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
        let modes = modes(args)?;
        let (config, sms) = settings(args, backend)?;
        let (experts, sources) = match &args.routing {
            Some(path) => recorded(&RoutingTrace::read(path)?, ranks, args.layer)
                .map_err(|problem| Failure::request(format!("--routing {}: {problem}", path.display())))?,
            None => (args.experts, drawn(args, ranks)?),
        };
        let world = World::builder().ranks(ranks).domains(domains).experts(experts).build()?;
        Ok(Self {
            job_options: job_options(args, backend, &world, (&modes, &sms), &sources),
            backend,
            world,
            config,
            role,
            hidden: args.hidden,
            dtype: args.dtype,
            iterations: args.iters,
            seed: args.seed,
            wire: args.wire,
            routing_file: args.routing.clone(),
            scenarios: Scenario::all(&modes, &sms, &sources),
            json,
        })
    }

    pub(crate) fn ranks(&self) -> usize {
        self.world.ranks()
    }

    pub(crate) fn format(&self) -> TokenFormat {
        format(self.dtype)
    }

    /// The settings for this scenario.
    pub(crate) fn config_of(&self, scenario: &Scenario) -> Config {
        let mut config = self.config.clone();
        if let Some(sms) = scenario.sms {
            config.cuda.sms = sms;
        }
        config
    }

    /// Bytes of a bf16 row: an expert's output row, a combined token, or a bf16 input token.
    pub(crate) fn bf16_row_bytes(&self) -> usize {
        2 * self.hidden
    }
}

/// The modes to measure.
fn modes(args: &BenchArgs) -> Result<Vec<DispatchMode>, Failure> {
    if let Some(pad) = args.pad
        && !args.mode.contains(&Mode::Permuted)
    {
        return Err(Failure::request(format!(
            "--pad {pad}: plain mode pads no rows; leave --pad out, or measure --mode permuted"
        )));
    }
    let permuted = DispatchMode::permuted(args.pad.unwrap_or(DEFAULT_PAD))
        .map_err(|error| Failure::request(format!("--pad: {error}")))?;
    let mode = |mode: &Mode| match mode {
        Mode::Plain => DispatchMode::Plain,
        Mode::Permuted => permuted,
    };
    Ok(args.mode.iter().map(mode).collect())
}

/// The settings, and the numbers of SMs to measure.
fn settings(args: &BenchArgs, backend: BackendKind) -> Result<(Config, Vec<Option<usize>>), Failure> {
    let configs = args.tuning.configs()?;
    let sms = match backend {
        BackendKind::Cuda => configs.iter().map(|config| Some(config.cuda.sms)).collect(),
        BackendKind::Host if configs.len() > 1 => {
            let problem = "the host backend uses no SMs; give one number, or use --backend cuda";
            return Err(args.tuning.one_number_of_sms(problem).into());
        }
        BackendKind::Host => vec![None],
    };
    Ok((configs.into_iter().next().unwrap_or_default(), sms))
}

fn job_options(
    args: &BenchArgs,
    backend: BackendKind,
    world: &World,
    (modes, sms): (&[DispatchMode], &[Option<usize>]),
    sources: &[Source],
) -> JobOptions {
    let mut options = JobOptions::of("bench")
        .with("--backend", backend.name())
        .with("--domains", world.topology().domains());
    options = if args.routing.is_some() {
        let mut hasher = DefaultHasher::new();
        // All ranks run the same program, so all compute the same hash.
        sources.iter().for_each(|source| source.hash_routings(&mut hasher));
        options.with("--routing", format!("recorded (hash {:016x})", hasher.finish()))
    } else {
        options
            .with("--routing", "random")
            .with("--tokens", list(sources.iter().map(|source| TokenCounts::of(source.tokens()))))
            .with("--experts", args.experts)
            .with("--topk", args.topk)
            .with("--skew", args.skew)
    };
    options = options
        .with("--hidden", args.hidden)
        .with("--dtype", args.dtype.name())
        .with("--mode", list(modes.iter().copied().map(mode_name)));
    if let Some(permuted) = modes.iter().find(|&&mode| mode != DispatchMode::Plain) {
        options = options.with("--pad", permuted.pad_multiple());
    }
    if backend == BackendKind::Cuda {
        // 0 lets the backend choose.
        options = options.with("--sms", list(sms.iter().copied().map(Option::unwrap_or_default)));
    }
    options.with("--seed", args.seed).with("--iters", args.iters)
}

fn list<T: ToString>(values: impl Iterator<Item = T>) -> String {
    values.map(|value| value.to_string()).collect::<Vec<_>>().join(",")
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

/// The random workloads that the options describe: one for each value of `--tokens`.
fn drawn(args: &BenchArgs, ranks: usize) -> Result<Vec<Source>, Failure> {
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
    let source = |tokens: &TokenCounts| {
        let tokens =
            tokens.per_rank(ranks).map_err(|problem| Failure::request(format!("--tokens {problem}")))?;
        let workload = |tokens| Workload { tokens, experts, topk, skew, seed };
        let origin = Origin::Drawn(tokens.into_iter().map(workload).collect());
        Ok(Source { layer: None, topk, origin })
    };
    args.tokens.iter().map(source).collect()
}

/// Number of experts and the requested layers of a recorded routing.
fn recorded(
    trace: &RoutingTrace,
    ranks: usize,
    layer: Option<usize>,
) -> Result<(usize, Vec<Source>), String> {
    let layers = match layer {
        None => 0..trace.layers.len(),
        Some(layer) if layer < trace.layers.len() => layer..layer + 1,
        Some(layer) => {
            return Err(format!("--layer {layer}: the file has layers 0 to {}", trace.layers.len() - 1));
        }
    };
    if !trace.experts.is_multiple_of(ranks) {
        return Err(format!(
            "its {} experts cannot be placed evenly on {ranks} ranks; use a number of --ranks that divides {}",
            trace.experts, trace.experts
        ));
    }
    let source = |layer| -> Result<Source, String> {
        let routings = trace.spread(layer, ranks).map_err(|error| error.to_string())?;
        Ok(Source { layer: Some(layer), topk: trace.topk, origin: Origin::Recorded(routings.into()) })
    };
    Ok((trace.experts, layers.map(source).collect::<Result<_, _>>()?))
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
        let scenario = &plan.scenarios[0];
        assert_eq!(scenario.mode, DispatchMode::permuted(16).unwrap());
        assert_eq!((plan.scenarios.len(), scenario.sms), (1, None));
        assert_eq!(scenario.source.tokens(), [4096; 4]);
        assert_eq!(scenario.source.copies(), Some(4 * 4096 * 8));
        assert_eq!(resolve("--ranks 1").unwrap().world.topology().domains(), 1);
        assert_eq!(resolve("--tokens 5+0+1+2").unwrap().scenarios[0].source.tokens(), [5, 0, 1, 2]);
    }

    #[test]
    fn all_combinations_are_measured_modes_outermost_and_tokens_innermost() {
        let plan = resolve("--mode plain,permuted --pad 8 --tokens 1,5+0+1+2").unwrap();
        let runs: Vec<_> =
            plan.scenarios.iter().map(|s| (mode_name(s.mode), s.sms, s.source.tokens())).collect();
        let expected = ["plain", "permuted"]
            .map(|mode| [vec![1; 4], vec![5, 0, 1, 2]].map(|tokens| (mode, None, tokens)))
            .concat();
        assert_eq!(runs, expected);
        let sms = [Some(8), Some(32)];
        let sources = [plan.scenarios[0].source.clone(), plan.scenarios[1].source.clone()];
        let all = Scenario::all(&[DispatchMode::Plain; 2], &sms, &sources);
        let order: Vec<_> = all.iter().map(|s| (s.sms.unwrap(), s.source.tokens()[0])).collect();
        assert_eq!(order, [(8, 1), (8, 5), (32, 1), (32, 5)].repeat(2));
        assert_eq!(plan.config_of(&all[3]).cuda.sms, 32);
        assert_eq!(plan.config_of(&plan.scenarios[0]), plan.config);
    }

    #[test]
    fn the_options_that_ranks_compare_contain_every_list() {
        let options = |text: &str, backend| {
            let args = parse(text).unwrap();
            let world = World::builder().ranks(2).domains(1).experts(64).build().unwrap();
            let sms: Vec<_> = args.tuning.sms.iter().map(|&sms| Some(sms.into())).collect();
            let sources = drawn(&args, 2).unwrap();
            job_options(&args, backend, &world, (&modes(&args).unwrap(), &sms), &sources)
        };
        let cuda = |text| options(text, BackendKind::Cuda);
        let same = cuda("--sms 8,16 --mode plain,permuted --tokens 5,6");
        assert_eq!(same, cuda("--sms 8,16 --mode plain,permuted --tokens 5+5,6 --pad 16"));
        for other in [
            "--sms 16,8 --mode plain,permuted --tokens 5,6",
            "--sms 8 --mode plain,permuted --tokens 5,6",
            "--sms 8,16 --mode permuted,plain --tokens 5,6",
            "--sms 8,16 --mode plain,plain --tokens 5,6",
            "--sms 8,16 --mode plain,permuted --tokens 6,5",
            "--sms 8,16 --mode plain,permuted --tokens 5+6",
            "--sms 8,16 --mode plain,permuted --tokens 5,6 --pad 8",
        ] {
            assert_ne!(same, cuda(other), "{other}");
        }
        // SMs have no meaning on the host backend.
        let host = |text| options(text, BackendKind::Host);
        assert_eq!(host("--sms 8"), host("--sms 16"));
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
            ("--tokens 1+2", "--tokens 1+2 has 2 numbers for 4 ranks"),
            ("--tokens 5,1+2+3+4+5", "--tokens 1+2+3+4+5 has 5 numbers for 4 ranks"),
            ("--mode plain --pad 8", "--pad 8: plain mode pads no rows"),
            ("--sms 8,16", "--sms = 8,16: the host backend uses no SMs"),
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
