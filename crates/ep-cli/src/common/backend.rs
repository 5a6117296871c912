//! Selects a backend.

use clap::ValueEnum;

use crate::common::failure::Failure;

/// The values of `--backend`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendChoice {
    /// cuda if this machine can run it and --domains is 1 or not given, else host
    #[default]
    Auto,
    /// CPU cores and shared memory; emulates several NVLink domains
    Host,
    /// GPUs; several NVLink domains are connected by the engine that --transport or HYBRID_EP_TRANSPORT names
    Cuda,
}

/// The backend to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BackendKind {
    Host,
    Cuda,
}

impl BackendKind {
    /// Resolves `--backend`. `auto` chooses CUDA if this machine can run it and `domains` is 1 or not given. The CUDA
    /// backend runs several domains only if it is named.
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
