//! `hybrid-ep doctor`: what this machine offers, what is missing, and how to get it.
//!
//! Everything is read from files, the environment and the standard library, and no other program
//! is run, so that an examination works on a machine where those are broken. Only the GPU driver is
//! asked, in a thread that is not waited for longer than it takes one that works.
//! What cannot be read is reported as unknown, with the reason.

mod cgroup;
mod check;
mod cpu;
mod cuda;
mod fact;
mod gpu;
mod launch;
mod library;
mod memory;
mod network;
mod parse;
mod pci;
mod probe;
mod render;
mod system;
// Made-up machines have PCI addresses in file names, whose colons other systems do not allow.
#[cfg(test)]
#[cfg(unix)]
mod tests;

use serde::Serialize;

use self::{
    check::{Check, Mark, Section},
    cpu::Cpu,
    cuda::Cuda,
    fact::Fact,
    gpu::Gpus,
    launch::Launch,
    memory::Memory,
    network::Network,
    probe::Probe,
    system::System,
};

/// The backend that every machine can run, of which the verdict begins.
const HOST: &str = "host";

/// What an examination found.
///
/// In JSON a fact is its bare value, `null` where the thing is not there, and
/// `{"unknown": "why"}` where it could not be found out. The names of fields carry their units.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    /// The version of the program that examined.
    pub(crate) hybrid_ep_version: &'static str,
    /// The operating system.
    pub(crate) system: System,
    /// The processors.
    pub(crate) cpu: Cpu,
    /// Main memory.
    pub(crate) memory: Memory,
    /// GPUs, their driver and its libraries.
    pub(crate) gpus: Gpus,
    /// What the CUDA backend stands on, as the driver and the run-time compiler themselves tell.
    pub(crate) cuda: Cuda,
    /// Network cards and libraries.
    pub(crate) network: Network,
    /// What a launcher left in the environment.
    pub(crate) launch: Launch,
    /// What can carry ranks.
    pub(crate) backends: Vec<Backend>,
    /// The same as findings, one fact a line, with what to do about each.
    pub(crate) sections: Vec<Section>,
    /// What it all comes to.
    pub(crate) verdict: Verdict,
}

/// Something that can carry ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Backend {
    /// Its name.
    pub(crate) name: &'static str,
    /// Whether it can be used.
    #[serde(flatten)]
    pub(crate) state: BackendState,
}

/// Whether a backend can be used, or the first thing that it lacks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub(crate) enum BackendState {
    /// It has all that it needs.
    Ready {
        /// What it runs on.
        found: String,
    },
    /// This machine lacks something that it needs.
    Missing {
        /// What is missing.
        found: String,
        /// How to get it.
        how: &'static str,
    },
}

/// What an examination comes to.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Verdict {
    /// Whether ranks that are threads can run.
    pub(crate) thread_ranks: bool,
    /// Whether ranks that are processes can run; absent where the system rules them out.
    pub(crate) process_ranks: Fact<bool>,
    /// Findings to put right.
    pub(crate) problems: usize,
    /// All this in one line.
    pub(crate) text: String,
}

/// Examines the machine that this program, called `program` by people, runs on.
pub(crate) fn examine(program: &str) -> Report {
    Report::of(&Probe::of_this_machine(), Cuda::of_this_machine(), program)
}

impl Report {
    /// The report as aligned plain text: a mark (`ok`, `--` for absent and not needed, `!!` for a
    /// problem), a name and what was found, one fact a line, and a verdict as the last line.
    pub(crate) fn render(&self) -> String {
        render::render(self)
    }

    fn of(probe: &Probe, cuda: Cuda, program: &str) -> Self {
        let limits = cgroup::Limits::find(probe);
        let system = System::find(probe);
        let cpu = Cpu::find(probe, &limits);
        let memory = Memory::find(probe, &limits);
        let gpus = Gpus::find(probe);
        let network = Network::find(probe);
        let launch = Launch::find(probe);
        let backends = backends(&cuda);
        let sections = vec![
            system.section(),
            cpu.section(),
            memory.section(),
            gpus.section(),
            cuda.section(),
            network.section(&system),
            launch.section(),
            backends_section(&backends),
        ];
        Report {
            hybrid_ep_version: env!("CARGO_PKG_VERSION"),
            verdict: Verdict::of(&system, &cpu, &backends, &sections, program),
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

impl Verdict {
    fn of(system: &System, cpu: &Cpu, backends: &[Backend], sections: &[Section], program: &str) -> Self {
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
                format!("ready: thread ranks on {cores}; process ranks not certain ({why})")
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
        Verdict {
            // Threads need nothing but the standard library.
            thread_ranks: true,
            process_ranks,
            problems,
            text,
        }
    }
}

/// The backends of this build, with how they stand on this machine.
fn backends(cuda: &Cuda) -> Vec<Backend> {
    vec![
        Backend { name: HOST, state: BackendState::Ready { found: "ready".to_owned() } },
        Backend { name: "cuda", state: cuda.backend() },
    ]
}

fn backends_section(backends: &[Backend]) -> Section {
    let check = |backend: &Backend| match &backend.state {
        BackendState::Ready { found } => Check::ok(backend.name, found),
        BackendState::Missing { found, how } => {
            Check::absent(backend.name, found).advice("ranks on GPUs", *how)
        }
    };
    Section { title: "Backends", checks: backends.iter().map(check).collect() }
}
