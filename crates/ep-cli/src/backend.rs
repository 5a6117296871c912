//! Which backend runs, and how its ranks come to be.

use ep::rendezvous::Rendezvous;
use ep::{Config, WeightRows, World};
use ep_cuda::CudaBuffer;
use ep_host::HostBuffer;

use crate::args::BackendChoice;
use crate::failure::Failure;

/// A backend that the command line can start.
pub(crate) trait Start: WeightRows + Send + Sized + 'static {
    /// All ranks of a world, to be moved to threads.
    fn threads(world: &World, config: &Config) -> ep::Result<Vec<Self>>;

    /// This process as one rank. Collective.
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

/// A backend that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Chosen {
    Host,
    Cuda,
}

impl Chosen {
    /// What was asked for, or what this machine has. Several domains are emulated by the host backend only.
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
