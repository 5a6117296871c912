//! Compiles every kernel that a launch may need into the cache on disk.

use ep::{EnvironmentError, Result};

use crate::device::KernelKey;
use crate::jit::{Arch, CacheState, Cubin, Jit};
use crate::{kernels, probe};

/// A kind of GPU: the properties of a GPU on which its kernels depend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Target {
    /// The architecture that kernels are compiled for.
    pub arch: Arch,
    /// Maximum shared memory of a block, in bytes.
    pub shared_bytes: usize,
}

impl Target {
    /// The kinds of GPUs that the driver shows.
    ///
    /// # Errors
    /// The errors of [`check_available`](crate::check_available).
    pub fn found() -> Result<Vec<Self>> {
        let facts = probe::usable()?;
        let of_gpus = facts.architectures()?.into_iter().zip(&facts.gpus);
        Ok(distinct(of_gpus.map(|(arch, gpu)| Self { arch, shared_bytes: gpu.shared_bytes })))
    }

    /// All kinds of GPUs that run an architecture's code.
    pub fn of_arch(arch: Arch) -> Vec<Self> {
        arch.shared_bytes().iter().map(|&shared_bytes| Self { arch, shared_bytes }).collect()
    }
}

/// A kernel that is in the cache now.
#[derive(Debug, Clone)]
pub struct Warmed {
    /// The kernel's name.
    pub kernel: &'static str,
    /// Distinguishes kernels of the same name; `-` if there is only one.
    pub variant: String,
    /// The architecture that it is compiled for.
    pub arch: Arch,
    /// The machine code and its origin.
    pub cubin: Cubin,
}

/// The result of [`warm`].
#[derive(Debug, Clone)]
pub struct Warm {
    /// All requested kernels, in the order in which they became available.
    pub kernels: Vec<Warmed>,
    /// The state of the cache, including other entries.
    pub cache: CacheState,
    /// Problems of the cache that did not prevent the result.
    pub warnings: Vec<String>,
}

/// Compiles every kernel that buffers on these GPUs may launch, unless the cache on disk has it, and stores it there.
/// Compiles on several threads, and calls `each` for each available kernel, on any of these threads. `plain_copies` is that
/// of [`ep::Config`].
///
/// # Errors
/// [`EnvironmentError`] if the cache cannot be written to, no compiler is found, or a compilation fails.
pub fn warm(targets: &[Target], plain_copies: bool, each: impl Fn(&Warmed) + Sync) -> Result<Warm> {
    let jit = kernels::jit();
    if let Some(problem) = jit.cache_state().problem {
        return Err(not_kept(problem));
    }
    let wanted =
        distinct(targets.iter().flat_map(|target| {
            KernelKey::all(target.shared_bytes).into_iter().map(|key| (key, target.arch))
        }));
    let kernels = kernels::side_by_side(&wanted, |&(key, arch)| {
        let warmed = keep(&jit, key, arch, plain_copies)?;
        each(&warmed);
        Ok(warmed)
    })?;
    Ok(Warm { kernels, cache: jit.cache_state(), warnings: jit.warnings() })
}

/// Compiles and stores one kernel, and checks that a later process would find its file.
fn keep(jit: &Jit, key: KernelKey, arch: Arch, plain_copies: bool) -> Result<Warmed> {
    let program = key.program(arch, plain_copies);
    let cubin = jit.cubin(&program, arch)?;
    if !jit.is_kept(&program, arch) {
        return Err(not_kept(jit.warnings().pop().unwrap_or_else(|| "another process removed it".into())));
    }
    Ok(Warmed { kernel: key.name(), variant: key.variant(), arch, cubin })
}

fn not_kept(problem: String) -> ep::Error {
    let hint = "set HYBRID_EP_KERNEL_CACHE to a directory that can be written to";
    EnvironmentError::new("keeping compiled kernels", problem, hint).into()
}

fn distinct<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut distinct = Vec::new();
    for one in all {
        if !distinct.contains(&one) {
            distinct.push(one);
        }
    }
    distinct
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_architecture_stands_for_all_its_gpus() {
        let keys = |targets: &[Target]| {
            let all = targets.iter().flat_map(|target| KernelKey::all(target.shared_bytes));
            distinct(all).len()
        };
        // The GPUs of this architecture have two sizes of shared memory.
        assert!(keys(&Target::of_arch(Arch::Sm80)) > keys(&Target::of_arch(Arch::Sm80)[..1]));
        for target in Arch::ALL.into_iter().flat_map(Target::of_arch) {
            assert!(Target::of_arch(target.arch).contains(&target));
        }
    }
}
