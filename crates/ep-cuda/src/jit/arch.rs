//! The GPU architectures that kernels are compiled for.

use std::fmt;

use ep::{EnvironmentError, Result};

use super::Version;

/// A GPU architecture that kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Arch {
    /// Ampere and Ada: compute capability 8.0, 8.6 and 8.9.
    Sm80,
    /// Hopper, with its architecture-specific instructions: 9.0 only.
    Sm90a,
    /// Blackwell for datacenters, with its architecture-specific instructions: 10.0 only.
    Sm100a,
}

impl Arch {
    /// Every architecture, the oldest first.
    pub const ALL: [Self; 3] = [Self::Sm80, Self::Sm90a, Self::Sm100a];

    /// The compute capabilities that [`of_device`](Self::of_device) accepts, for errors.
    pub const CAPABILITIES: &'static str = "8.0, 8.6, 8.9, 9.0 or 10.0";

    /// The architecture whose machine code runs best on a device of this compute capability.
    ///
    /// # Errors
    /// An [`EnvironmentError`] for a device that cannot run code of any architecture.
    pub fn of_device(major: u32, minor: u32) -> Result<Self> {
        match (major, minor) {
            // Code runs on devices of the same major version and the same or a later minor version, but not on embedded
            // devices (8.7).
            (8, 7) => {}
            (8, 0..) => return Ok(Self::Sm80),
            (9, 0) => return Ok(Self::Sm90a),
            (10, 0) => return Ok(Self::Sm100a),
            _ => {}
        }
        Err(EnvironmentError::new(
            format!("GPU of compute capability {major}.{minor}"),
            "there are no kernels for it",
            format!("use a GPU of compute capability {}, or the host backend", Self::CAPABILITIES),
        )
        .into())
    }

    /// The compilers' name of the architecture.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sm80 => "sm_80",
            Self::Sm90a => "sm_90a",
            Self::Sm100a => "sm_100a",
        }
    }

    /// The architecture of a name; `None` if there is none.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|arch| arch.name() == name)
    }

    /// Maximum shared memory of a block, in bytes, for each kind of GPU that runs code of this architecture.
    pub fn shared_bytes(self) -> &'static [usize] {
        match self {
            // Compute capability 8.0, and 8.6 or 8.9.
            Self::Sm80 => &[163 << 10, 99 << 10],
            Self::Sm90a | Self::Sm100a => &[227 << 10],
        }
    }

    /// Whether its GPUs have the bulk copy engine (`device/common/copy_bulk.cuh`).
    pub(crate) fn copies_in_bulk(self) -> bool {
        match self {
            Self::Sm80 => false,
            Self::Sm90a | Self::Sm100a => true,
        }
    }

    /// Whether its code may convert to FP8 e4m3 by an instruction (`device/dispatch/e4m3_cvt.cuh`).
    pub(crate) fn converts_to_e4m3(self) -> bool {
        match self {
            // Compute capability 8.9 has the instruction, but 8.0 and 8.6 run the same code.
            Self::Sm80 => false,
            Self::Sm90a | Self::Sm100a => true,
        }
    }

    /// The oldest version of NVRTC that supports the architecture.
    pub fn oldest_nvrtc(self) -> Version {
        match self {
            Self::Sm80 | Self::Sm90a => Version { major: 12, minor: 0 },
            Self::Sm100a => Version { major: 12, minor: 8 },
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed() {
        for arch in Arch::ALL {
            assert_eq!(Arch::from_name(arch.name()), Some(arch));
        }
        for name in ["", "sm_90", "SM_90A", "sm_75"] {
            assert_eq!(Arch::from_name(name), None, "{name}");
        }
    }

    #[test]
    fn devices_get_code_that_runs_on_them() {
        let served = [(8, 0, Arch::Sm80), (8, 6, Arch::Sm80), (8, 9, Arch::Sm80), (9, 0, Arch::Sm90a)];
        for (major, minor, arch) in served.into_iter().chain([(10, 0, Arch::Sm100a)]) {
            assert_eq!(Arch::of_device(major, minor).unwrap(), arch, "{major}.{minor}");
        }
        // Architecture-specific code runs on no other minor version; 8.7 is embedded.
        for (major, minor) in [(7, 5), (8, 7), (9, 1), (10, 1), (10, 3), (11, 0), (12, 0), (0, 0)] {
            let message = Arch::of_device(major, minor).unwrap_err().to_string();
            assert!(message.contains(&format!("{major}.{minor}: there are no kernels")), "{message}");
            assert!(message.contains(Arch::CAPABILITIES), "{message}");
        }
    }
}
