//! How ranks meet.

use ep::config::LaunchEnv;
use ep::rendezvous::{Rendezvous, TcpRendezvous, ThreadRendezvous};
use ep::{CallerError, Config, EnvironmentError, Rank, World};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::Failure;

/// What all ways of making a buffer share. Read from a Python dict.
#[derive(Debug, FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Settings {
    /// "host" or "cuda".
    pub(crate) backend: String,
    /// The GPU; with "cuda", where it is not the threads' own choice.
    pub(crate) gpu: Option<usize>,
    /// GPUs of this machine, over which threads are spread.
    pub(crate) gpus: usize,
    pub(crate) experts: usize,
    pub(crate) domains: usize,
    /// Seconds.
    timeout: Option<f64>,
    workers: Option<usize>,
    sms: Option<usize>,
}

impl Settings {
    pub(crate) fn world(&self, ranks: usize) -> Result<World, Failure> {
        Ok(World::new(ranks, self.domains, self.experts)?)
    }

    pub(crate) fn config(&self) -> Result<Config, Failure> {
        let mut config = Config::from_env()?;
        if let Some(seconds) = self.timeout {
            config.timeout = std::time::Duration::try_from_secs_f64(seconds)
                .ok()
                .filter(|timeout| (1..=86_400_000).contains(&timeout.as_millis()))
                .ok_or_else(|| bad("timeout", &seconds, "must be from 0.001 to 86,400 seconds"))?;
        }
        if let Some(workers) = self.workers {
            config.workers = at_most("workers", workers, 256)?;
        }
        if let Some(sms) = self.sms {
            config.sms = at_most("sms", sms, 1024)?;
        }
        Ok(config)
    }
}

/// The timeout of these settings, seconds.
#[pyfunction]
pub(crate) fn timeout_of(settings: Settings) -> Result<f64, Failure> {
    Ok(settings.config()?.timeout.as_secs_f64())
}

fn at_most(key: &'static str, value: usize, most: usize) -> Result<usize, Failure> {
    if value <= most { Ok(value) } else { Err(bad(key, &value, &format!("must be at most {most}"))) }
}

fn bad(key: &'static str, value: &dyn std::fmt::Display, problem: &str) -> Failure {
    CallerError::Config { key, value: value.to_string(), problem: problem.into() }.into()
}

/// A rendezvous by a function of Python's, which gives everybody's bytes for this rank's.
pub(crate) struct Callback {
    pub(crate) rank: Rank,
    pub(crate) ranks: usize,
    pub(crate) all_gather: Py<PyAny>,
    /// What the function raised.
    pub(crate) raised: Option<PyErr>,
}

impl Callback {
    /// The error of a join: what Python raised in it, if it did.
    pub(crate) fn blame(self, failure: Failure) -> Failure {
        self.raised.map_or(failure, Failure::Raised)
    }
}

impl Rendezvous for Callback {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn all_gather(&mut self, blob: &[u8]) -> ep::Result<Vec<Vec<u8>>> {
        let gathered = Python::attach(|py| -> PyResult<Vec<Vec<u8>>> {
            self.all_gather.call1(py, (PyBytes::new(py, blob),))?.extract(py)
        });
        let problem = match gathered {
            Ok(blobs) if blobs.len() == self.ranks => return Ok(blobs),
            Ok(blobs) => format!("{} ranks answered, there are {}", blobs.len(), self.ranks),
            Err(error) => {
                let text = error.to_string();
                self.raised = Some(error);
                text
            }
        };
        Err(EnvironmentError::new("meeting the other ranks", problem, "").into())
    }
}

/// The rendezvous that the launcher's environment describes, else that of one rank alone.
pub(crate) fn launched(config: &Config) -> Result<Box<dyn Rendezvous>, Failure> {
    let alone = || ThreadRendezvous::new(1, config.timeout).into_iter().map(|end| Box::new(end) as _).next();
    match LaunchEnv::from_env()? {
        Some(env) => {
            let (rank, ranks) = (Rank(env.rank), env.world_size as usize);
            Ok(Box::new(TcpRendezvous::join(&env.store, rank, ranks, config.timeout)?))
        }
        None => alone().ok_or_else(|| Failure::Caller("a world has one rank at least".into())),
    }
}
