//! Finds and loads the run-time compiler.

use std::ffi::CString;
use std::fmt;
use std::path::Path;

use ep::{CudaEnv, EnvironmentError, Result};

use super::nvrtc::{Input, Nvrtc};
use super::{Arch, Program, Resources, resources, search};

/// The advice to users without a compiler.
pub const INSTALL_HINT: &str =
    "pip install nvidia-cuda-nvrtc, or set HYBRID_EP_NVRTC to the path of libnvrtc.so.13 or libnvrtc.so.12";

/// The oldest compiler that supports all options that are used.
const OLDEST: Version = Version { major: 12, minor: 0 };

/// A version of CUDA or of one of its parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// The number before the dot.
    pub major: u32,
    /// The number after the dot.
    pub minor: u32,
}

/// A loaded NVRTC. It stays loaded until the process ends.
pub struct Compiler {
    nvrtc: Nvrtc,
}

/// The result of a compilation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// Machine code for one architecture.
    pub cubin: Vec<u8>,
    /// The compiler's output: warnings, and the resources as text.
    pub log: String,
    /// The resources of each kernel.
    pub resources: Vec<Resources>,
}

impl Compiler {
    /// Finds the first usable compiler: the one that `env` names; otherwise those that the dynamic loader finds, then
    /// those of Python packages, then those of CUDA toolkits.
    ///
    /// # Errors
    /// An [`EnvironmentError`] that lists the places searched, and why no compiler there is usable.
    pub fn find(env: &CudaEnv) -> Result<Self> {
        Self::find_for(env, None)
    }

    /// Like [`find`](Self::find), but skips compilers of a newer major version than `driver`, the CUDA version of the GPU
    /// driver, which would refuse their machine code. A compiler that `env` names is used in any case.
    ///
    /// # Errors
    /// The errors of [`find`](Self::find).
    pub fn find_for(env: &CudaEnv, driver: Option<Version>) -> Result<Self> {
        let driver = driver.filter(|_| env.nvrtc.is_none());
        let (mut reasons, mut empty) = (Vec::new(), Vec::new());
        for candidate in search::candidates(env) {
            let reasons_before = reasons.len();
            for file in &candidate.files {
                match Nvrtc::load(file.as_os_str()).and_then(|nvrtc| usable(nvrtc, driver)) {
                    Ok(nvrtc) => return Ok(Self { nvrtc }),
                    Err(reason) if unknown(file, &reason) => {}
                    Err(reason) => reasons.push(reason),
                }
            }
            if reasons.len() == reasons_before {
                empty.push(candidate.name);
            }
        }
        if !empty.is_empty() {
            reasons.push(format!("nothing in {}", empty.join(", ")));
        }
        let what = "run-time compiler of GPU kernels (NVRTC)";
        Err(EnvironmentError::new(what, reasons.join("; "), INSTALL_HINT).into())
    }

    /// The compiler's version.
    pub fn version(&self) -> Version {
        self.nvrtc.version
    }

    /// The path of the compiler's library.
    pub fn path(&self) -> &Path {
        &self.nvrtc.path
    }

    /// Compiles a program for an architecture. Several threads may compile at the same time.
    ///
    /// # Errors
    /// An [`EnvironmentError`] with the compiler's log.
    pub fn compile(&self, program: &Program, arch: Arch) -> Result<Compiled> {
        let error = |problem: &dyn fmt::Display, hint: &str| {
            let what = format!("compiling {} for {arch} with {self}", program.file_name());
            EnvironmentError::new(what, problem, hint).into()
        };
        let oldest = arch.oldest_nvrtc();
        if self.version() < oldest {
            let problem = format!("{arch} is not known to versions before {oldest}");
            return Err(error(&problem, INSTALL_HINT));
        }
        let input = input(program, arch).map_err(|problem| error(&problem, ""))?;
        let output = self.nvrtc.compile(&input);
        match output.cubin {
            Ok(cubin) => Ok(Compiled { cubin, resources: resources::parse(&output.log), log: output.log }),
            Err(reason) => Err(error(&format!("{reason}\n{}", output.log), "")),
        }
    }
}

impl fmt::Display for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NVRTC {} ({})", self.version(), self.path().display())
    }
}

impl fmt::Debug for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Compiler({self})")
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl Version {
    /// Parses a version such as `13.0`.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (major, minor) = text.split_once('.')?;
        Some(Self { major: major.parse().ok()?, minor: minor.parse().ok()? })
    }
}

/// Whether the loader has not found a bare name, as opposed to having failed to load the library.
fn unknown(file: &Path, reason: &str) -> bool {
    file.parent() == Some(Path::new("")) && reason.starts_with(&format!("{}: cannot open", file.display()))
}

fn usable(nvrtc: Nvrtc, driver: Option<Version>) -> Result<Nvrtc, String> {
    let described = format!("{} is version {}", nvrtc.path.display(), nvrtc.version);
    match driver {
        _ if nvrtc.version < OLDEST => Err(format!("{described}, older than {OLDEST}")),
        Some(driver) if nvrtc.version.major > driver.major => {
            Err(format!("{described}, newer than the GPU driver's CUDA {driver}"))
        }
        _ => Ok(nvrtc),
    }
}

/// A program as C strings.
fn input(program: &Program, arch: Arch) -> Result<Input, String> {
    let c_string = |text: &str| {
        CString::new(text).map_err(|_| format!("a zero byte in its source, headers or macros: {text:.40?}"))
    };
    Ok(Input {
        source: c_string(program.source)?,
        name: c_string(&program.file_name())?,
        header_names: program.headers.iter().map(|(name, _)| c_string(name)).collect::<Result<_, _>>()?,
        header_texts: program.headers.iter().map(|(_, text)| c_string(text)).collect::<Result<_, _>>()?,
        options: program.options(arch).iter().map(|option| c_string(option)).collect::<Result<_, _>>()?,
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::jit::scratch::Scratch;

    #[test]
    fn a_missing_compiler_is_reported_with_every_place_searched() {
        let dir = Scratch::new();
        dir.write("cuda/lib64/libnvrtc.so.13", "no library at all");
        let named = CudaEnv { nvrtc: Some(dir.path("gone.so")), ..CudaEnv::default() };
        let message = Compiler::find(&named).unwrap_err().to_string();
        assert!(message.contains("gone.so"), "{message}");
        assert!(message.contains("pip install nvidia-cuda-nvrtc"), "{message}");

        let named = CudaEnv { nvrtc: Some(dir.path("cuda/lib64")), ..CudaEnv::default() };
        let message = Compiler::find(&named).unwrap_err().to_string();
        assert!(message.contains("cuda/lib64/libnvrtc.so.13"), "{message}");
        assert!(!message.contains("nothing in"), "{message}");

        fs::remove_file(dir.path("cuda/lib64/libnvrtc.so.13")).unwrap();
        let message = Compiler::find(&named).unwrap_err().to_string();
        assert!(message.contains("cuda/lib64 (HYBRID_EP_NVRTC)"), "{message}");
    }

    #[test]
    fn versions() {
        assert_eq!(Version::parse("13.5"), Some(Version { major: 13, minor: 5 }));
        for text in ["", "13", "13.", ".5", "13.5.1", "-1.0"] {
            assert_eq!(Version::parse(text), None, "{text}");
        }
        assert!(Version { major: 12, minor: 9 } < Version { major: 13, minor: 0 });
        assert_eq!(Version { major: 12, minor: 8 }.to_string(), "12.8");
    }
}
