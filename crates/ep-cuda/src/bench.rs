//! What benchmarks need beside the operators: which GPU a rank runs on, and a pause of the GPU, behind which launches
//! queue up.

use std::ffi::{CStr, c_char, c_int};
use std::time::Duration;

use cudarc::driver::sys;
use ep::Result;

use crate::buffer::CudaBuffer;
use crate::device::KernelKey;
use crate::driver::check;

/// Room for the texts that the driver writes.
const TEXT_BYTES: usize = 256;
/// No pause is longer: it blocks the GPU for everybody.
const LONGEST_SPIN: Duration = Duration::from_secs(1);

/// The GPU of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// The model's name.
    pub name: String,
    /// Its address on the bus: the same for all processes of the machine.
    pub pci_bus_id: String,
}

/// The mirror of `SpinParams` in `device/spin.cu`.
#[repr(C)]
struct SpinParams {
    nanoseconds: u64,
}

impl CudaBuffer {
    /// The GPU that this rank runs on.
    ///
    /// # Errors
    /// [`ep::EnvironmentError`] when the driver does not say.
    pub fn gpu(&self) -> Result<Gpu> {
        let ordinal = self.device.ordinal;
        let what = || format!("asking about GPU {ordinal}");
        let mut device = 0;
        // SAFETY: writes one handle; the ordinal is that of an open GPU.
        check(unsafe { sys::cuDeviceGet(&mut device, ordinal as c_int) }, what, "")?;
        let text = |ask: &dyn Fn(*mut c_char, c_int) -> sys::CUresult| -> Result<String> {
            let mut text: [c_char; TEXT_BYTES] = [0; TEXT_BYTES];
            check(ask(text.as_mut_ptr(), TEXT_BYTES as c_int - 1), what, "")?;
            // SAFETY: the last byte is zero: it was kept from the driver.
            Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
        };
        Ok(Gpu {
            // SAFETY: there is room for as many bytes as is said.
            name: text(&|to, len| unsafe { sys::cuDeviceGetName(to, len, device) })?,
            // SAFETY: as above.
            pci_bus_id: text(&|to, len| unsafe { sys::cuDeviceGetPCIBusId(to, len, device) })?,
        })
    }

    /// Keeps the stream busy for this long, at most a second. Operators that are called meanwhile start right after
    /// it, one behind the other: events around them then measure the GPU, not how long a launch takes.
    ///
    /// # Errors
    /// [`ep::EnvironmentError`] when the driver refuses.
    pub fn spin(&self, time: Duration) -> Result<()> {
        let params = SpinParams { nanoseconds: time.min(LONGEST_SPIN).as_nanos() as u64 };
        let kernel = self.kernel(KernelKey::Spin)?;
        // SAFETY: the kernel's own parameters, which name no memory.
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
    fn the_pause_compiles_for_every_architecture() {
        let env = CudaEnv { cache_dir: None, ..CudaEnv::from_env() };
        let compiler = match Compiler::find(&env) {
            Ok(compiler) => compiler,
            Err(error) if std::env::var("HYBRID_EP_REQUIRE_NVRTC").as_deref() == Ok("1") => panic!("{error}"),
            Err(error) => {
                // Past the test harness, which would swallow it.
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
