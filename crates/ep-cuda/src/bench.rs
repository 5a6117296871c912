//! Helpers for benchmarks: the GPU of a rank, and a kernel that occupies a stream so that launches queue up behind it.

use std::ffi::{CStr, c_char, c_int};
use std::time::Duration;

use cudarc::driver::sys;
use ep::Result;

use crate::buffer::CudaBuffer;
use crate::device::KernelKey;
use crate::driver::check;
use crate::params::SpinParams;

/// Room for the texts that the driver writes.
const TEXT_BYTES: usize = 256;
/// The longest spin: it may delay other users of the GPU.
const LONGEST_SPIN: Duration = Duration::from_secs(1);

/// The GPU of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// The model's name.
    pub name: String,
    /// The address on the PCI bus, which is the same for all processes of the machine.
    pub pci_bus_id: String,
}

impl CudaBuffer {
    /// The GPU that this rank runs on.
    ///
    /// # Errors
    /// [`ep::EnvironmentError`] if a driver call fails.
    pub fn gpu(&self) -> Result<Gpu> {
        let ordinal = self.device.ordinal;
        let what = || format!("asking about GPU {ordinal}");
        let mut device = 0;
        // SAFETY: writes one handle; the ordinal is that of an open GPU.
        check(unsafe { sys::cuDeviceGet(&mut device, ordinal as c_int) }, what, "")?;
        let text = |ask: &dyn Fn(*mut c_char, c_int) -> sys::CUresult| -> Result<String> {
            let mut text: [c_char; TEXT_BYTES] = [0; TEXT_BYTES];
            check(ask(text.as_mut_ptr(), TEXT_BYTES as c_int - 1), what, "")?;
            // SAFETY: the last byte is zero: the driver was given one byte less than the array has.
            Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
        };
        Ok(Gpu {
            // SAFETY: `to` has room for `len` bytes.
            name: text(&|to, len| unsafe { sys::cuDeviceGetName(to, len, device) })?,
            // SAFETY: as above.
            pci_bus_id: text(&|to, len| unsafe { sys::cuDeviceGetPCIBusId(to, len, device) })?,
        })
    }

    /// Occupies the stream for `time`, at most one second. Operators that are called meanwhile start right after that,
    /// back to back, so events around them measure the GPU and not the time of a launch.
    ///
    /// # Errors
    /// [`ep::EnvironmentError`] if a driver call fails.
    pub fn spin(&self, time: Duration) -> Result<()> {
        let params = SpinParams { nanoseconds: time.min(LONGEST_SPIN).as_nanos() as u64 };
        let kernel = self.kernel(KernelKey::Spin)?;
        // SAFETY: the parameters are this kernel's, and name no memory.
        unsafe { kernel.launch(&self.stream, 1, 1, 0, &params) }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write as _};

    use ep::CudaEnv;

    use super::*;
    use crate::jit::{Arch, Compiler};

    #[test]
    fn spin_compiles_for_every_architecture() {
        let env = CudaEnv { cache_dir: None, ..CudaEnv::from_env() };
        let compiler = match Compiler::find(&env) {
            Ok(compiler) => compiler,
            Err(error) if std::env::var("HYBRID_EP_REQUIRE_NVRTC").as_deref() == Ok("1") => panic!("{error}"),
            Err(error) => {
                // Directly to stderr: the test harness captures the output of tests that pass.
                let _ = writeln!(io::stderr(), "skipped: no NVRTC ({error})");
                return;
            }
        };
        for arch in Arch::ALL.into_iter().filter(|arch| arch.oldest_nvrtc() <= compiler.version()) {
            let compiled = compiler.compile(&KernelKey::Spin.program(arch, false), arch).unwrap();
            let [spin] = &*compiled.resources else { panic!("{}", compiled.log) };
            assert_eq!((spin.kernel.as_str(), spin.spill_bytes, spin.static_shared_bytes), ("spin", 0, 0));
        }
    }
}
