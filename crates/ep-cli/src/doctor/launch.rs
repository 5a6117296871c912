//! The environment variables of launchers, and the job secret.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{
    check::{Check, Section},
    probe::Probe,
};

/// A group of variables that are set together.
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
    /// All known variables, with their values if set.
    pub(crate) variables: BTreeMap<&'static str, Option<String>>,
    /// The name of the variable that sets the job secret. Its value is never shown.
    pub(crate) secret: Option<&'static str>,
}

/// The variables that set the job secret; the first one that is set takes effect.
const SECRETS: [&str; 2] = ["HYBRID_EP_SECRET", "HYBRID_EP_SECRET_FILE"];

impl Launch {
    pub(super) fn find(probe: &Probe) -> Self {
        Launch {
            variables: LAUNCHERS
                .iter()
                .flat_map(|launcher| launcher.variables)
                .map(|name| (*name, probe.var(name).map(str::to_owned)))
                .collect(),
            secret: SECRETS.into_iter().find(|name| probe.var(name).is_some()),
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
        checks.push(self.secret_check());
        Section { title: "Launch environment", checks }
    }

    fn secret_check(&self) -> Check {
        match self.secret {
            Some(name) => Check::ok("job secret", format!("{name} is set: ranks must know it to join")),
            None => Check::absent("job secret", "not set: processes of this user on this machine can join")
                .advice(
                    "ranks that authenticate each other",
                    "export HYBRID_EP_SECRET=$(openssl rand -hex 32)",
                ),
        }
    }

    /// One finding for each variable that is set, or one for the group if none is.
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

    /// The problem with a rank variable that does not fit its world size.
    fn mismatch(&self, rank_name: &str, size_name: &str) -> Option<Check> {
        let rank_text = self.value(rank_name)?;
        let how = format!("set {rank_name} and {size_name} together; {rank_name} counts from 0");
        let problem = |found: String| {
            let name = format!("{rank_name}/{size_name}");
            Some(Check::problem(name, found).advice("ranks that find each other", how))
        };
        let Ok(rank) = rank_text.parse::<u32>() else {
            return problem(format!("{rank_name} is not a number"));
        };
        let Some(size_text) = self.value(size_name) else {
            return problem(format!("{size_name} is not set"));
        };
        match size_text.parse::<u32>() {
            Err(_) => problem(format!("{size_name} is not a number")),
            Ok(size) if rank >= size => problem(format!("rank {rank} of {size}")),
            Ok(_) => None,
        }
    }
}

/// The finding on a variable that is set. Only a port can be checked without other variables.
fn variable_check(name: &str, value: &str) -> Check {
    if name == "MASTER_PORT" && !matches!(value.parse::<u16>(), Ok(1..)) {
        return Check::problem(name, format!("{value} is not a port number"))
            .advice("ranks that find each other", "a number from 1 to 65535");
    }
    Check::ok(name, value)
}
