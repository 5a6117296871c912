//! Selects a backend, and creates its ranks.

use clap::ValueEnum;
use ep::join::Rendezvous;
use ep::{Config, WeightRows, World};
use ep_cuda::CudaBuffer;
use ep_host::HostBuffer;

use crate::common::failure::Failure;

/// The values of `--backend`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendChoice {
    /// cuda if this machine can run it and one NVLink domain is enough, else host
    #[default]
    Auto,
    /// CPU cores and shared memory; emulates several NVLink domains
    Host,
    /// GPUs of one NVLink domain
    Cuda,
}

/// A backend that the command line can start.
pub(crate) trait Start: WeightRows + Send + Sized + 'static {
    /// Creates all ranks of a world, to be moved to threads.
    fn threads(world: &World, config: &Config) -> ep::Result<Vec<Self>>;

    /// Creates the rank of this process. Collective.
    fn join(world: &World, meet: &mut dyn Rendezvous, config: &Config) -> ep::Result<Self>;
}

impl Start for HostBuffer {
    fn threads(world: &World, config: &Config) -> ep::Result<Vec<Self>> {
        Self::threads(world.clone(), config)
    }

    fn join(world: &World, meet: &mut dyn Rendezvous, config: &Config) -> ep::Result<Self> {
        Self::join(world.clone(), meet, config)
    }
}

impl Start for CudaBuffer {
    fn threads(world: &World, config: &Config) -> ep::Result<Vec<Self>> {
        Self::threads(world, config)
    }

    fn join(world: &World, meet: &mut dyn Rendezvous, config: &Config) -> ep::Result<Self> {
        Self::join(world, meet, config)
    }
}

/// The backend to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BackendKind {
    Host,
    Cuda,
}

impl BackendKind {
    /// Resolves `--backend`. `auto` chooses CUDA if this machine can run it and `domains` is 1 or not given: only the
    /// host backend emulates several domains.
    pub(crate) fn resolve(choice: BackendChoice, domains: Option<usize>) -> Result<Self, Failure> {
        match choice {
            BackendChoice::Host => Ok(Self::Host),
            BackendChoice::Cuda => {
                ep_cuda::check_available()?;
                Ok(Self::Cuda)
            }
            BackendChoice::Auto if domains.unwrap_or(1) == 1 && ep_cuda::check_available().is_ok() => {
                Ok(Self::Cuda)
            }
            BackendChoice::Auto => Ok(Self::Host),
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Cuda => "cuda",
        }
    }
}
