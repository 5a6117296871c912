//! The report on a machine, and its summary.

use serde::Serialize;

use super::{
    backend::{self, BackendReport, BackendState, HOST},
    cgroup,
    check::{Mark, Section},
    cpu::Cpu,
    cuda::Cuda,
    fabric::FabricProvider,
    fact::Fact,
    gpu::Gpus,
    launch::Launch,
    memory::Memory,
    network::Network,
    parse,
    probe::Probe,
    system::System,
};

/// The report on a machine.
///
/// In JSON a fact is its bare value, `null` if the thing does not exist, and `{"unknown": "why"}` if it could not be
/// determined. The names of fields carry their units.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DoctorReport {
    /// The version of this program.
    pub(crate) hybrid_ep_version: &'static str,
    /// The operating system.
    pub(crate) system: System,
    /// The processors.
    pub(crate) cpu: Cpu,
    /// Main memory.
    pub(crate) memory: Memory,
    /// GPUs, their driver and its libraries.
    pub(crate) gpus: Gpus,
    /// Requirements of the CUDA backend, as reported by the driver and the run-time compiler.
    pub(crate) cuda: Cuda,
    /// Network cards and libraries.
    pub(crate) network: Network,
    /// The variables that a launcher sets.
    pub(crate) launch: Launch,
    /// The backends and their states.
    pub(crate) backends: Vec<BackendReport>,
    /// The facts as findings, with advice.
    pub(crate) sections: Vec<Section>,
    /// The summary.
    pub(crate) verdict: DoctorVerdict,
}

/// The summary of a report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct DoctorVerdict {
    /// Whether ranks can run as threads.
    pub(crate) thread_ranks: bool,
    /// Whether ranks can run as processes; absent on an operating system that does not support them.
    pub(crate) process_ranks: Fact<bool>,
    /// Number of problems.
    pub(crate) problems: usize,
    /// The summary in one line.
    pub(crate) text: String,
}

impl DoctorReport {
    pub(super) fn of(probe: &Probe, cuda: Cuda, providers: Fact<Vec<FabricProvider>>, program: &str) -> Self {
        let limits = cgroup::Limits::find(probe);
        let system = System::find(probe);
        let cpu = Cpu::find(probe, &limits);
        let memory = Memory::find(probe, &limits);
        let gpus = Gpus::find(probe);
        let network = Network::find(probe, &cuda, providers);
        let launch = Launch::find(probe);
        let backends = backends(&cuda);
        let sections = vec![
            system.section(),
            cpu.section(),
            memory.section(),
            gpus.section(),
            cuda.section(gpus.imex_channels),
            network.section(&system),
            launch.section(),
            backend::section(&backends),
        ];
        DoctorReport {
            hybrid_ep_version: env!("CARGO_PKG_VERSION"),
            verdict: DoctorVerdict::of(&system, &cpu, &backends, &sections, program),
            system,
            cpu,
            memory,
            gpus,
            cuda,
            network,
            launch,
            backends,
            sections,
        }
    }
}

impl DoctorVerdict {
    fn of(
        system: &System,
        cpu: &Cpu,
        backends: &[BackendReport],
        sections: &[Section],
        program: &str,
    ) -> Self {
        let checks = sections.iter().flat_map(|section| &section.checks);
        let problems = checks.filter(|check| check.mark == Mark::Problem).count();
        let process_ranks = system.process_ranks();
        let cores = match cpu.cores_usable {
            Fact::Known(n) => parse::count(n, "core"),
            Fact::Absent | Fact::Unknown(_) => "an unknown number of cores".to_owned(),
        };
        let mut text = match &process_ranks {
            Fact::Known(true) => format!("ready: thread ranks and process ranks on {cores}"),
            Fact::Known(false) => {
                format!("ready: thread ranks on {cores}; process ranks need a newer kernel (Linux 5.3)")
            }
            Fact::Absent => format!("ready: thread ranks on {cores}; process ranks need Linux"),
            Fact::Unknown(why) => {
                format!("ready: thread ranks on {cores}; process ranks unknown ({why})")
            }
        };
        for backend in backends {
            if let (BackendState::Ready { found }, true) = (&backend.state, backend.name != HOST) {
                text.push_str(&format!("; {} {found}", backend.name));
            }
        }
        if problems > 0 {
            text.push_str(&format!("; {} above (!!)", parse::count(problems, "problem")));
        }
        text.push_str(&format!("; try: {program} bench"));
        DoctorVerdict {
            // Threads need nothing but the standard library.
            thread_ranks: true,
            process_ranks,
            problems,
            text,
        }
    }
}

/// The backends of this build and their states on this machine.
fn backends(cuda: &Cuda) -> Vec<BackendReport> {
    vec![
        BackendReport { name: HOST, state: BackendState::Ready { found: "ready".to_owned() } },
        BackendReport { name: "cuda", state: cuda.backend() },
    ]
}
