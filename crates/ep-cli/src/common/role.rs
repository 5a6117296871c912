//! The role of this process in a job, and the check of `--ranks`.

use ep::config::LaunchEnv;

use crate::common::failure::Failure;

/// Maximum number of ranks on one machine; a larger number is treated as a typing error.
pub(crate) const MAX_RANKS: usize = 1024;

/// How the ranks of this invocation run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ProcessRole {
    /// The ranks are threads of this process.
    Threads,
    /// The ranks are processes that this process starts.
    Launcher,
    /// This process is one rank, started by a launcher.
    Rank(LaunchEnv),
}

impl ProcessRole {
    pub(crate) fn resolve(processes: bool) -> Result<Self, Failure> {
        if !processes {
            return Ok(Self::Threads);
        }
        Ok(LaunchEnv::from_env()?.map_or(Self::Launcher, Self::Rank))
    }
}

/// Number of ranks: `--ranks`, the launcher's world size, or 4. The first two must agree.
pub(crate) fn ranks(asked: Option<usize>, role: &ProcessRole) -> Result<usize, Failure> {
    let ranks = match (role, asked) {
        (ProcessRole::Rank(env), Some(ranks)) if ranks != env.world_size as usize => {
            return Err(Failure::request(format!(
                "--ranks {ranks}: the launcher started {} ranks (WORLD_SIZE); leave --ranks out",
                env.world_size
            )));
        }
        (ProcessRole::Rank(env), _) => env.world_size as usize,
        (_, ranks) => ranks.unwrap_or(4),
    };
    if ranks == 0 || ranks > MAX_RANKS {
        return Err(Failure::request(format!(
            "--ranks {ranks}: must be from 1 to {MAX_RANKS} on one machine"
        )));
    }
    Ok(ranks)
}
