//! What a launcher left in the environment.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{
    check::{Check, Section},
    probe::Probe,
};

/// A family of variables that come together.
struct Launcher {
    name: &'static str,
    variables: &'static [&'static str],
    enables: &'static str,
    how: &'static str,
}

const LAUNCHERS: [Launcher; 4] = [
    Launcher {
        name: "torchrun",
        variables: &["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"],
        enables: "ranks that torchrun starts",
        how: "torchrun --nproc-per-node N ...",
    },
    Launcher {
        name: "Slurm",
        variables: &[
            "SLURM_JOB_ID",
            "SLURM_PROCID",
            "SLURM_NTASKS",
            "SLURM_LOCALID",
            "SLURM_NODEID",
            "SLURM_NNODES",
            "SLURM_JOB_NODELIST",
        ],
        enables: "ranks that Slurm starts",
        how: "export MASTER_PORT=29500; srun -n N ...",
    },
    Launcher {
        name: "MPI",
        variables: &[
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "PMI_RANK",
            "PMI_SIZE",
            "PMIX_RANK",
        ],
        enables: "ranks that MPI starts",
        how: "mpirun -n N -x MASTER_PORT=29500 sh -c 'RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE exec ...'",
    },
    Launcher {
        name: "GPU choice",
        variables: &["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"],
        enables: "a choice among the GPUs",
        how: "export CUDA_VISIBLE_DEVICES=0,1",
    },
];

/// The launch environment.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Launch {
    /// Each variable that was looked for, with its value if it is set.
    pub(crate) variables: BTreeMap<&'static str, Option<String>>,
}

impl Launch {
    pub(super) fn find(probe: &Probe) -> Self {
        Launch {
            variables: LAUNCHERS
                .iter()
                .flat_map(|launcher| launcher.variables)
                .map(|name| (*name, probe.var(name).map(str::to_owned)))
                .collect(),
        }
    }

    fn value(&self, name: &str) -> Option<&str> {
        self.variables.get(name)?.as_deref()
    }

    pub(super) fn section(&self) -> Section {
        let mut checks: Vec<Check> =
            LAUNCHERS.iter().flat_map(|launcher| self.launcher_checks(launcher)).collect();
        checks.extend(self.mismatch("RANK", "WORLD_SIZE"));
        checks.extend(self.mismatch("LOCAL_RANK", "LOCAL_WORLD_SIZE"));
        Section { title: "Launch environment", checks }
    }

    /// A line for each variable that is set, or one line for them all.
    fn launcher_checks(&self, launcher: &Launcher) -> Vec<Check> {
        let set: Vec<Check> = launcher
            .variables
            .iter()
            .filter_map(|name| Some(variable_check(name, self.value(name)?)))
            .collect();
        if set.is_empty() {
            let check = Check::absent(launcher.name, "not set");
            return vec![check.advice(launcher.enables, launcher.how)];
        }
        set
    }

    /// A rank needs a number of ranks that it is below.
    fn mismatch(&self, rank_name: &str, size_name: &str) -> Option<Check> {
        let rank_text = self.value(rank_name)?;
        let how = format!("set {rank_name} and {size_name} together, {rank_name} from 0");
        let problem = |found: String| {
            let name = format!("{rank_name}/{size_name}");
            Some(Check::problem(name, found).advice("ranks that find each other", how))
        };
        let Ok(rank) = rank_text.parse::<u32>() else {
            return problem(format!("{rank_name} is no number"));
        };
        let Some(size_text) = self.value(size_name) else {
            return problem(format!("{size_name} is not set"));
        };
        match size_text.parse::<u32>() {
            Err(_) => problem(format!("{size_name} is no number")),
            Ok(size) if rank >= size => problem(format!("rank {rank} of {size}")),
            Ok(_) => None,
        }
    }
}

/// A finding on a variable that is set. Whatever its value, it is told; only a port can be told
/// to be wrong by itself.
fn variable_check(name: &str, value: &str) -> Check {
    if name == "MASTER_PORT" && !matches!(value.parse::<u16>(), Ok(1..)) {
        return Check::problem(name, format!("{value} is no port number"))
            .advice("ranks that find each other", "a number from 1 to 65535");
    }
    Check::ok(name, value)
}
