//! Requirements of the CUDA backend, as reported by the driver and the run-time compiler.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use ep::{CudaEnv, EnvironmentError};
use ep_cuda::jit::{Arch, Cache, Compiler, INSTALL_HINT, Version};
use ep_cuda::probe::{self, DRIVER_HINT, DriverFacts, GpuFacts, OLDEST_DRIVER, PeerLink};
use serde::Serialize;

use super::{
    backend::BackendState,
    check::{Check, Section},
    fact::Fact,
    parse,
};
use crate::common::threads;

/// Longest wait for the driver. Waking eight idle GPUs takes seconds; a driver that takes longer than this hangs.
const PATIENCE: Duration = Duration::from_secs(30);

/// Maximum number of pairs of GPUs in one line.
const MAX_PAIRS: usize = 8;

/// Driver, GPUs, compiler and compiled kernels.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Cuda {
    /// The newest CUDA version that the driver supports; absent if its library is not installed.
    pub(crate) driver_supports: Fact<String>,
    /// Why that version is too old; `None` if it is not.
    pub(crate) driver_problem: Option<String>,
    /// The GPUs, in the driver's order, which `CUDA_VISIBLE_DEVICES` changes.
    pub(crate) gpus: Fact<Vec<CudaGpu>>,
    /// How each GPU (row) accesses the memory of each GPU (column): `own`, `atomics` (loads, stores and atomic
    /// operations, as over NVLink), `plain` (loads and stores), or `none`.
    pub(crate) peer_links: Fact<Vec<Vec<&'static str>>>,
    /// The run-time compiler that the backend uses; absent if none can be used.
    pub(crate) nvrtc: Fact<Nvrtc>,
    /// The reason why no compiler can be used, with the paths that were tried.
    pub(crate) nvrtc_problem: Option<String>,
    /// The cache of compiled kernels.
    pub(crate) kernel_cache: KernelCache,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct CudaGpu {
    /// The model's name.
    pub(crate) name: String,
    /// The compute capability, such as `9.0`.
    pub(crate) compute_capability: String,
    /// The architecture for which kernels are compiled; `None` if there are no kernels for this GPU.
    pub(crate) architecture: Option<&'static str>,
    /// Streaming multiprocessors.
    pub(crate) multiprocessors: u32,
    /// Memory.
    pub(crate) memory_bytes: u64,
    /// Whether the driver offers fabric handles, which an NVLink domain over several machines needs.
    pub(crate) offers_fabric: bool,
    /// The address on the PCI bus; `None` if the driver does not report it.
    pub(crate) pci_address: Option<String>,
}

/// A run-time compiler.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Nvrtc {
    /// Its version.
    pub(crate) version: String,
    /// Its path.
    pub(crate) path: String,
}

/// The cache of compiled kernels.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct KernelCache {
    /// The directory, which may not exist yet; `None` if no variable names one.
    pub(crate) dir: Option<String>,
    /// Compiled programs in it.
    pub(crate) entries: usize,
    /// Their size.
    pub(crate) bytes: u64,
    /// Free space on its file system.
    pub(crate) free_bytes: Fact<u64>,
    /// The reason why nothing can be added to it.
    pub(crate) problem: Option<String>,
}

impl Cuda {
    /// Queries the driver of this machine and looks for a compiler.
    pub(super) fn of_this_machine() -> Self {
        let env = CudaEnv::from_env();
        let driver = ask_driver();
        let supported = driver.known().map(|facts| facts.cuda);
        let (nvrtc, nvrtc_problem) = find_compiler(&env, supported);
        Cuda {
            driver_supports: driver.clone().map(|facts| facts.cuda.to_string()),
            driver_problem: supported.filter(|cuda| *cuda < OLDEST_DRIVER).map(driver_problem),
            gpus: driver.clone().map(|facts| facts.gpus.into_iter().map(CudaGpu::from).collect()),
            peer_links: driver
                .map(|facts| facts.links.iter().map(|row| row.iter().map(link_name).collect()).collect()),
            nvrtc,
            nvrtc_problem,
            kernel_cache: KernelCache::of(&env),
        }
    }

    /// `imex_channels`: the number of channels by which processes share GPU memory between machines.
    pub(super) fn section(&self, imex_channels: usize) -> Section {
        let mut checks = vec![self.driver_check()];
        let gpus = self.gpus.known().map(Vec::as_slice).unwrap_or_default();
        checks.extend(gpus.iter().enumerate().map(|(number, gpu)| gpu.check(number)));
        checks.extend(self.peer_links.known().and_then(|links| peer_check(links)));
        if gpus.iter().any(|gpu| gpu.offers_fabric) {
            checks.push(fabric_check(imex_channels));
        }
        checks.push(self.compiler_check());
        checks.push(self.kernel_cache.check());
        Section { title: "CUDA", checks }
    }

    /// Whether ranks can run on the GPUs; if not, the first thing that is missing.
    pub(super) fn backend(&self) -> BackendState {
        let gpus = match &self.gpus {
            Fact::Known(gpus) => gpus,
            Fact::Absent => return missing("no GPU driver (libcuda.so.1)", "install the NVIDIA driver"),
            Fact::Unknown(why) => return missing(why, "nvidia-smi shows whether the driver works"),
        };
        if let Some(problem) = &self.driver_problem {
            return missing(problem, DRIVER_HINT);
        }
        if gpus.is_empty() {
            return missing(
                "the driver shows no GPU",
                "check CUDA_VISIBLE_DEVICES, or give GPUs to the container",
            );
        }
        // Ranks are distributed over all GPUs that the driver shows.
        if let Some(number) = gpus.iter().position(|gpu| gpu.architecture.is_none()) {
            return missing(
                &format!("no kernels for CUDA GPU {number}"),
                "leave it out with CUDA_VISIBLE_DEVICES",
            );
        }
        let on = parse::count(gpus.len(), "GPU");
        match (&self.nvrtc, self.kernel_cache.entries) {
            (Fact::Known(_), _) => BackendState::Ready { found: format!("ready on {on}") },
            (_, 0) => missing("no kernel compiler, and no kernel in the cache", INSTALL_HINT),
            (_, kept) => BackendState::Ready {
                found: format!("ready on {on}, with {} from the cache", parse::count(kept, "program")),
            },
        }
    }

    fn driver_check(&self) -> Check {
        const NAME: &str = "CUDA driver";
        let gpus = self.gpus.known().map_or(0, Vec::len);
        let found = |version: &String| format!("CUDA {version}, {}", parse::count(gpus, "GPU"));
        Check::of_optional(
            NAME,
            &self.driver_supports,
            |version| match &self.driver_problem {
                None => Check::ok(NAME, found(version)),
                Some(problem) => Check::absent(NAME, format!("{}; {problem}", found(version)))
                    .advice("the CUDA backend", DRIVER_HINT),
            },
            || Check::absent(NAME, "libcuda.so.1 not found, or it does not load"),
        )
    }

    fn compiler_check(&self) -> Check {
        const NAME: &str = "kernel compiler";
        let problem = self.nvrtc_problem.as_deref().unwrap_or("not found");
        Check::of_optional(
            NAME,
            &self.nvrtc,
            |nvrtc| Check::ok(NAME, format!("NVRTC {}, {}", nvrtc.version, nvrtc.path)),
            || Check::absent(NAME, problem).advice("kernels that are not in the cache", INSTALL_HINT),
        )
    }
}

/// The finding on fabric handles, by which the machines of an NVLink domain share GPU memory. The driver offers them.
fn fabric_check(imex_channels: usize) -> Check {
    const NAME: &str = "fabric handles";
    match imex_channels {
        0 => Check::absent(NAME, "offered by the driver, never run by us; no channel of nvidia-imex").advice(
            "NVLink domains that span machines",
            "start nvidia-imex on all machines of the domain, and make a channel (nvidia-modprobe -i 0)",
        ),
        some => Check::ok(
            NAME,
            format!(
                "offered by the driver, never run by us; {} of nvidia-imex",
                parse::count(some, "channel")
            ),
        ),
    }
}

impl CudaGpu {
    fn check(&self, number: usize) -> Check {
        let name = format!("CUDA GPU {number}");
        let found = |kernels: String| {
            let memory = parse::human_bytes(self.memory_bytes);
            format!(
                "{}, compute capability {} ({kernels}), {} SMs, {memory}",
                self.name, self.compute_capability, self.multiprocessors
            )
        };
        match self.architecture {
            Some(arch) => Check::ok(name, found(format!("kernels for {arch}"))),
            None => Check::absent(name, found("no kernels for it".to_owned())).advice(
                "ranks on this GPU",
                format!("use a GPU of compute capability {}", Arch::CAPABILITIES),
            ),
        }
    }
}

impl From<GpuFacts> for CudaGpu {
    fn from(facts: GpuFacts) -> Self {
        let (major, minor) = (facts.capability_major, facts.capability_minor);
        CudaGpu {
            name: facts.name,
            compute_capability: format!("{major}.{minor}"),
            architecture: Arch::of_device(major, minor).ok().map(Arch::name),
            multiprocessors: facts.multiprocessors,
            memory_bytes: facts.memory_bytes,
            offers_fabric: facts.offers_fabric,
            pci_address: facts.pci_address,
        }
    }
}

impl KernelCache {
    fn of(env: &CudaEnv) -> Self {
        let state = Cache::of(env).state();
        KernelCache {
            dir: state.dir.map(|dir| dir.display().to_string()),
            entries: state.entries,
            bytes: state.bytes,
            free_bytes: state
                .free_bytes
                .map_or_else(|| Fact::Unknown("the file system does not report it".to_owned()), Fact::Known),
            problem: state.problem,
        }
    }

    fn check(&self) -> Check {
        const NAME: &str = "kernel cache";
        let mut found = parse::count(self.entries, "program");
        if self.entries > 0 {
            found.push_str(&format!(", {}", parse::human_bytes(self.bytes)));
        }
        if let Some(problem) = &self.problem {
            return Check::absent(NAME, format!("{found}; {problem}"))
                .advice("starts without compilation", "set HYBRID_EP_KERNEL_CACHE to a writable directory");
        }
        if let Some(&free) = self.free_bytes.known() {
            found.push_str(&format!(", {} free", parse::human_bytes(free)));
        }
        Check::ok(NAME, format!("{}: {found}", self.dir.as_deref().unwrap_or("in memory")))
    }
}

fn driver_problem(supported: Version) -> String {
    format!("the driver supports CUDA {supported}, and {OLDEST_DRIVER} is needed")
}

fn missing(found: &str, how: &'static str) -> BackendState {
    BackendState::Missing { found: found.to_owned(), how }
}

/// Queries the driver on a thread of its own, because a broken driver may never answer.
fn ask_driver() -> Fact<DriverFacts> {
    let (sender, answer) = mpsc::channel();
    // The receiver is gone if the answer comes too late.
    let query = move || drop(sender.send(probe::probe()));
    if let Err(error) = threads::spawn("the thread that queries the driver", query) {
        return Fact::Unknown(error.to_string());
    }
    match answer.recv_timeout(PATIENCE) {
        Ok(Ok(Some(facts))) => Fact::Known(facts),
        Ok(Ok(None)) => Fact::Absent,
        Ok(Err(error)) => Fact::Unknown(error.to_string()),
        Err(RecvTimeoutError::Timeout) => {
            Fact::Unknown(format!("the driver has not answered within {} s", PATIENCE.as_secs()))
        }
        Err(RecvTimeoutError::Disconnected) => Fact::Unknown("the query to the driver failed".to_owned()),
    }
}

fn find_compiler(env: &CudaEnv, driver: Option<Version>) -> (Fact<Nvrtc>, Option<String>) {
    match Compiler::find_for(env, driver) {
        Ok(compiler) => {
            let path = compiler.path().display().to_string();
            (Fact::Known(Nvrtc { version: compiler.version().to_string(), path }), None)
        }
        // The error's hint is shown as advice.
        Err(ep::Error::Environment(EnvironmentError { problem, .. })) => (Fact::Absent, Some(problem)),
        Err(error) => (Fact::Absent, Some(error.to_string())),
    }
}

fn link_name(link: &PeerLink) -> &'static str {
    match link {
        PeerLink::Own => "own",
        PeerLink::Atomics => "atomics",
        PeerLink::Plain => "plain",
        PeerLink::None => "none",
    }
}

/// The finding on the links between GPUs; `None` for a single GPU.
fn peer_check(links: &[Vec<&'static str>]) -> Option<Check> {
    const NAME: &str = "peer access";
    if links.len() < 2 {
        return None;
    }
    if let Some(pairs) = pairs_with(links, "none") {
        let check = Check::absent(NAME, format!("missing from GPU to GPU: {pairs}"));
        return Some(check.advice(
            "ranks on both GPUs of such a pair",
            "use GPUs of one NVLink domain; nvidia-smi topo -m shows them",
        ));
    }
    let all = format!("between all {} GPUs", links.len());
    Some(Check::ok(
        NAME,
        match pairs_with(links, "plain") {
            Some(pairs) => {
                format!("{all}, without atomic operations from GPU to GPU: {pairs} (PCI Express)")
            }
            None => format!("{all}, with atomic operations on every link (NVLink)"),
        },
    ))
}

/// The pairs with this kind of link; only the first [`MAX_PAIRS`] are listed.
fn pairs_with(links: &[Vec<&'static str>], link: &str) -> Option<String> {
    let rows = links.iter().enumerate();
    let pairs = rows.flat_map(|(from, row)| row.iter().enumerate().map(move |(to, link)| (from, to, *link)));
    let pairs: Vec<String> =
        pairs.filter(|&(_, _, found)| found == link).map(|(from, to, _)| format!("{from} to {to}")).collect();
    let more = pairs.len().saturating_sub(MAX_PAIRS);
    let mut text = pairs[..pairs.len() - more].join(", ");
    if more > 0 {
        text.push_str(&format!(" and {more} more"));
    }
    (!pairs.is_empty()).then_some(text)
}
