//! Settings of a buffer, and the rendezvous of its ranks.

use std::time::Duration;

use ep::config::LaunchEnv;
use ep::join::{Rendezvous, Secret, TcpRendezvous, ThreadRendezvous};
use ep::{CallerError, Config, EnvironmentError, Rank, World};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::Failure;

/// The settings of a buffer, read from a Python dict.
#[derive(Debug, FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Settings {
    /// "host" or "cuda".
    pub(crate) backend: String,
    /// The GPU, with "cuda"; ignored for ranks that are threads, which are spread over all GPUs.
    pub(crate) gpu: Option<usize>,
    /// The number of GPUs over which ranks that are threads are spread.
    pub(crate) gpus: usize,
    pub(crate) experts: usize,
    pub(crate) domains: usize,
    /// Seconds.
    timeout: Option<f64>,
    /// Seconds.
    stall_timeout: Option<f64>,
    workers: Option<usize>,
    sms: Option<usize>,
    /// With several NVLink domains: the most tokens of a rank.
    max_tokens: Option<usize>,
    /// With several NVLink domains: the longest row, in elements of bf16.
    max_hidden: Option<usize>,
}

impl Settings {
    pub(crate) fn world(&self, ranks: usize) -> Result<World, Failure> {
        Ok(World::builder().ranks(ranks).domains(self.domains).experts(self.experts).build()?)
    }

    pub(crate) fn config(&self) -> Result<Config, Failure> {
        let mut config = Config::from_env()?;
        if let Some(seconds) = self.timeout {
            config.timeout = duration("timeout", seconds)?;
        }
        if let Some(seconds) = self.stall_timeout {
            config.stall_timeout = duration("stall_timeout", seconds)?;
        }
        if let Some(workers) = self.workers {
            config.host.workers = at_most("workers", workers, 256)?;
        }
        if let Some(sms) = self.sms {
            config.cuda.sms = at_most("sms", sms, 1024)?;
        }
        if self.domains > 1 && self.backend == "cuda" {
            config.cuda.raise_rails(self.max_tokens, self.max_hidden);
        }
        Ok(config)
    }
}

/// The entry bound of these settings, in seconds.
#[pyfunction]
pub(crate) fn timeout_of(settings: Settings) -> Result<f64, Failure> {
    Ok(settings.config()?.timeout.as_secs_f64())
}

fn duration(key: &'static str, seconds: f64) -> Result<Duration, Failure> {
    Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|duration| (1..=86_400_000).contains(&duration.as_millis()))
        .ok_or_else(|| bad(key, &seconds, "must be from 0.001 to 86,400 seconds"))
}

fn at_most(key: &'static str, value: usize, most: usize) -> Result<usize, Failure> {
    if value <= most { Ok(value) } else { Err(bad(key, &value, &format!("must be at most {most}"))) }
}

fn bad(key: &'static str, value: &dyn std::fmt::Display, problem: &str) -> Failure {
    CallerError::Config { key, value: value.to_string(), problem: problem.into() }.into()
}

/// A rendezvous through a Python object, `hybrid_ep.rendezvous.Meeting`.
pub(crate) struct Callback {
    rank: Rank,
    ranks: usize,
    meeting: Py<PyAny>,
    secret: Option<Secret>,
    /// The exception that `meeting` raised.
    raised: Option<PyErr>,
}

impl Callback {
    /// Ranks must know the secret of the environment, if it has one. The exchanged bytes are as open as the group's
    /// store.
    pub(crate) fn new(rank: Rank, ranks: usize, meeting: Py<PyAny>) -> Result<Self, Failure> {
        Ok(Self { rank, ranks, meeting, secret: Secret::from_env()?, raised: None })
    }

    /// Selects the error of a failed join: the exception that Python raised, if it raised one.
    pub(crate) fn cause(self, failure: Failure) -> Failure {
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
            self.meeting.call_method1(py, "all_gather", (PyBytes::new(py, blob),))?.extract(py)
        });
        let problem = match gathered {
            Ok(blobs) if blobs.len() == self.ranks => return Ok(blobs),
            Ok(blobs) => format!("{} ranks answered, expected {}", blobs.len(), self.ranks),
            Err(error) => {
                let text = error.to_string();
                self.raised = Some(error);
                text
            }
        };
        Err(EnvironmentError::new("exchanging addresses with the other ranks", problem, "").into())
    }

    fn abandon(&mut self, error: ep::Error) -> ep::Error {
        // An exception of `meeting` is either known to the other ranks or concerns this rank only: nothing to tell.
        if self.raised.is_none() {
            let (peer, fault) = match &error {
                ep::Error::Peer(error) => (error.peer.0, error.fault.to_string()),
                _ => (self.rank.0, ep::PeerFault::Failed.to_string()),
            };
            let told = Python::attach(|py| {
                self.meeting.call_method1(py, "abandon", (peer, fault, error.to_string())).map(|_| ())
            });
            // `abandon` raises an error that names an earlier lost rank, if there is one.
            self.raised = told.err();
        }
        error
    }

    fn secret(&self) -> Option<&Secret> {
        self.secret.as_ref()
    }

    #[cfg(target_os = "linux")]
    fn network_address(&self) -> Option<std::net::IpAddr> {
        let host = Python::attach(|py| self.meeting.getattr(py, "host")?.extract::<Option<String>>(py));
        ep::join::address_towards(&host.ok()??)
    }
}

/// The rendezvous that the launcher's environment describes, else the rendezvous of one rank.
pub(crate) fn launched(config: &Config) -> Result<Box<dyn Rendezvous>, Failure> {
    let alone = || ThreadRendezvous::new(1, config.timeout).into_iter().map(|end| Box::new(end) as _).next();
    match LaunchEnv::from_env()? {
        Some(env) => Ok(Box::new(TcpRendezvous::launched(&env, config)?)),
        None => alone().ok_or_else(|| Failure::Caller("ranks: expected at least one".into())),
    }
}
