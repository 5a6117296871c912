//! What a launcher tells a process: its rank, the number of processes, and where they meet.

use crate::error::{CallerError, Result};
use crate::settings;

/// This process's rank, the number of processes and the rendezvous address, from the variables of `torchrun` or SLURM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchEnv {
    /// This process's rank.
    pub rank: u32,
    /// Number of processes.
    pub world_size: u32,
    /// `host:port` of the rendezvous, where rank 0 listens and all other ranks connect.
    pub store: String,
    /// Which start of the job this process belongs to, so that rank 0 refuses a process of an earlier start.
    pub generation: u64,
}

impl LaunchEnv {
    /// Reads `RANK` and `WORLD_SIZE` (torchrun), or `SLURM_PROCID` and `SLURM_NTASKS` (SLURM). `None` when neither
    /// `RANK` nor `SLURM_PROCID` is set; a `WORLD_SIZE` other than 1 is then an error, since each process would run alone.
    ///
    /// The rendezvous is at `HYBRID_EP_STORE` (`host:port`), else at `MASTER_ADDR` (default 127.0.0.1) and port
    /// `MASTER_PORT` + 1, since torchrun itself listens on `MASTER_PORT`. A job of one rank needs none of these
    /// variables.
    ///
    /// The generation is `HYBRID_EP_GENERATION`, else `SLURM_RESTART_COUNT`, else 0. torchrun's restart count is not
    /// read: a machine that joins later counts from 0.
    ///
    /// # Errors
    /// [`CallerError::Config`] for a variable that is malformed, or missing although the others are set.
    pub fn from_env() -> Result<Option<Self>> {
        Self::from_lookup(settings::variable)
    }

    fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let (rank_key, size_key) = match (lookup("RANK"), lookup("SLURM_PROCID")) {
            (Some(_), _) => ("RANK", "WORLD_SIZE"),
            (None, Some(_)) => ("SLURM_PROCID", "SLURM_NTASKS"),
            (None, None) => match lookup("WORLD_SIZE").as_deref().map(str::trim) {
                None | Some("" | "1") => return Ok(None),
                Some(_) => ("RANK", "WORLD_SIZE"),
            },
        };
        let config = |key, value: Option<String>, problem: String| CallerError::Config {
            key,
            value: value.unwrap_or_else(|| "(not set)".into()),
            problem,
        };
        let number = |key: &'static str, max: u32, problem: &str| -> Result<u32> {
            let value = lookup(key);
            match value.as_deref().map(str::trim).map(str::parse) {
                Some(Ok(number)) if number <= max => Ok(number),
                Some(_) => {
                    Err(config(key, value, format!("must be a whole number up to {max}{problem}")).into())
                }
                None => {
                    let other = if key == rank_key { size_key } else { rank_key };
                    let problem = format!(
                        "is needed with {other}: start the program with torchrun or srun, set both, or set neither for \
                         one rank"
                    );
                    Err(config(key, None, problem).into())
                }
            }
        };
        let world_size = number(size_key, 1 << 20, "")?;
        let rank = number(rank_key, 1 << 20, "")?;
        if rank >= world_size {
            return Err(config(
                rank_key,
                Some(rank.to_string()),
                format!("must be below {size_key} = {world_size}"),
            )
            .into());
        }
        let store = match (lookup("HYBRID_EP_STORE"), lookup("MASTER_PORT")) {
            (Some(store), _) => store,
            // The system chooses the port. No other rank needs to know it.
            (None, None) if world_size == 1 => "127.0.0.1:0".into(),
            (None, None) => {
                let problem = match rank_key {
                    "RANK" => "is needed with RANK: set it, or HYBRID_EP_STORE=host:port",
                    _ => {
                        "is needed, and SLURM does not set it: export it in the job's script, or HYBRID_EP_STORE=host:port"
                    }
                };
                return Err(config("MASTER_PORT", None, problem.into()).into());
            }
            (None, Some(_)) => {
                let host = lookup("MASTER_ADDR").unwrap_or_else(|| "127.0.0.1".into());
                let port = number("MASTER_PORT", 65_534, ", because the ranks meet at the port after it")?;
                format!("{host}:{}", port + 1)
            }
        };
        let generation = match lookup("HYBRID_EP_GENERATION").or_else(|| lookup("SLURM_RESTART_COUNT")) {
            None => 0,
            Some(value) => value.trim().parse().map_err(|_| {
                config("HYBRID_EP_GENERATION", Some(value), "must be a whole number below 2^64".into())
            })?,
        };
        Ok(Some(Self { rank, world_size, store, generation }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::env;
    use super::*;

    #[test]
    fn variables_of_torchrun_and_slurm_are_read() {
        assert_eq!(LaunchEnv::from_lookup(env(&[])).unwrap(), None);
        let torchrun =
            [("RANK", "1"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")];
        let found = LaunchEnv::from_lookup(env(&torchrun)).unwrap().unwrap();
        assert_eq!(
            found,
            LaunchEnv { rank: 1, world_size: 4, store: "localhost:29501".into(), generation: 0 }
        );
        let slurm = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2"), ("HYBRID_EP_STORE", "node1:77")];
        assert_eq!(LaunchEnv::from_lookup(env(&slurm)).unwrap().unwrap().store, "node1:77");
        let message = |pairs| LaunchEnv::from_lookup(env(pairs)).unwrap_err().to_string();
        assert!(message(&[("RANK", "0")]).contains("WORLD_SIZE = (not set): is needed with RANK"));
        assert!(message(&[("WORLD_SIZE", "2")]).contains("RANK = (not set): is needed with WORLD_SIZE"));
        assert!(
            message(&[("RANK", "0"), ("WORLD_SIZE", "two")])
                .contains("WORLD_SIZE = two: must be a whole number")
        );
        for alone in ["1", ""] {
            assert_eq!(LaunchEnv::from_lookup(env(&[("WORLD_SIZE", alone)])).unwrap(), None);
        }
        assert!(message(&[("RANK", "4"), ("WORLD_SIZE", "4")]).contains("must be below WORLD_SIZE = 4"));
        assert!(
            message(&[("RANK", "0"), ("WORLD_SIZE", "4")]).contains("MASTER_PORT = (not set): is needed")
        );
        let slurm = message(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")]);
        assert!(
            slurm.contains("MASTER_PORT = (not set)") && slurm.contains("SLURM does not set it"),
            "{slurm}"
        );
        let port = message(&[("RANK", "0"), ("WORLD_SIZE", "4"), ("MASTER_PORT", "x")]);
        assert!(port.contains("MASTER_PORT = x: must be a whole number"), "{port}");
        let again = |variable| {
            let pairs = [("RANK", "0"), ("WORLD_SIZE", "1"), variable];
            LaunchEnv::from_lookup(env(&pairs)).map(|found| found.unwrap().generation)
        };
        assert_eq!(again(("HYBRID_EP_GENERATION", "3")), Ok(3));
        assert_eq!(again(("SLURM_RESTART_COUNT", "2")), Ok(2));
        let unclear = again(("HYBRID_EP_GENERATION", "second")).unwrap_err().to_string();
        assert!(unclear.starts_with("HYBRID_EP_GENERATION = second: must be"), "{unclear}");
        // A job of one rank needs no address.
        let alone = LaunchEnv::from_lookup(env(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1")])).unwrap();
        assert_eq!(alone.unwrap().store, "127.0.0.1:0");
    }
}
