//! The CUDA backend over a fake libfabric that accesses the memory of GPUs, as a NIC does with GPUDirect RDMA. Needs a GPU;
//! skipped, with a message, where there is none.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // in helpers of tests

use std::ffi::c_void;
use std::sync::OnceLock;

use cudarc::driver::sys;
use ep::conformance::{Prepared, suite};
use ep::{Backend as _, Config, World};
use ep_cuda::CudaBuffer;
use ep_fabric_fake::{Fake, Settings, sys as fabric};

/// The stream of all copies: the fake makes one at a time. A stream for each thread would be too many for the driver, which would
/// let copies wait for kernels that wait for them.
struct Copies {
    context: sys::CUcontext,
    stream: sys::CUstream,
}

// SAFETY: handles of the driver, which any thread may use.
unsafe impl Send for Copies {}
// SAFETY: as above.
unsafe impl Sync for Copies {}

impl Copies {
    fn new() -> Self {
        let (mut context, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: each call stores one handle. The backend has initialised the driver, and GPU 0 exists.
        unsafe {
            assert_eq!(sys::cuDevicePrimaryCtxRetain(&mut context, 0), sys::CUresult::CUDA_SUCCESS);
            assert_eq!(sys::cuCtxSetCurrent(context), sys::CUresult::CUDA_SUCCESS);
            assert_eq!(sys::cuStreamCreate(&mut stream, flags), sys::CUresult::CUDA_SUCCESS);
        }
        Self { context, stream }
    }

    /// By way of host memory: a copy inside a GPU would need a multiprocessor, which kernels that wait may occupy.
    fn copy(&self, to: u64, from: u64, len: usize) {
        // SAFETY: the context is retained.
        assert_eq!(unsafe { sys::cuCtxSetCurrent(self.context) }, sys::CUresult::CUDA_SUCCESS);
        let mut bytes = vec![0u8; len];
        let host = bytes.as_mut_ptr() as u64;
        for (to, from) in [(host, from), (to, host)] {
            // SAFETY: the ranges are registered windows, or the buffer above. All memory has one address space.
            let answer = unsafe { sys::cuMemcpyAsync(to, from, len, self.stream) };
            assert_eq!(answer, sys::CUresult::CUDA_SUCCESS);
        }
        // SAFETY: the stream is never destroyed.
        assert_eq!(unsafe { sys::cuStreamSynchronize(self.stream) }, sys::CUresult::CUDA_SUCCESS);
    }
}

extern "C" fn copy(to: *mut c_void, from: *const c_void, len: usize) {
    static COPIES: OnceLock<Copies> = OnceLock::new();
    COPIES.get_or_init(Copies::new).copy(to as u64, from as u64, len);
}

fn config(fake: &Fake, gpu_memory: Option<bool>) -> Config {
    let mut config = Config::default();
    config.host.transport.engine = fake.provider().into();
    config.host.transport.libfabric = Some(fake.path().into());
    config.host.transport.gpu_memory = gpu_memory;
    config.cuda.sms = 4;
    config
}

fn check(prepared: &Prepared, config: &Config) {
    let buffers = CudaBuffer::threads(prepared.world(), config).unwrap_or_else(|error| panic!("{error}"));
    std::thread::scope(|scope| {
        for mut buffer in buffers {
            scope.spawn(move || prepared.check(&mut buffer).unwrap_or_else(|failure| panic!("{failure}")));
        }
    });
}

#[test]
fn the_suite_passes_with_lanes_in_the_memory_of_gpus() {
    if let Err(error) = ep_cuda::check_available() {
        return eprintln!("SKIPPED: no usable GPU: {error}");
    }
    // As with verbs: local descriptors, posted receives, and keys of the provider.
    let basic = fabric::MR_VIRT_ADDR | fabric::MR_ALLOCATED | fabric::MR_PROV_KEY;
    let settings = Settings {
        mr_mode: fabric::MR_LOCAL | basic,
        mode: fabric::RX_CQ_DATA,
        key_size: 4,
        data_size: 4,
        reorder: true,
        part: 100_000,
        ..Settings::default()
    };
    let without = Settings { lacks: fabric::HMEM, ..settings };
    let cases: Vec<Prepared> = suite()
        .into_iter()
        .map(|case| case.prepare().unwrap())
        .filter(|one| one.world().topology().domains() > 1 && one.world().ranks() <= 4)
        .collect();
    assert!(cases.len() > 1);
    for (name, settings, gpu_memory, in_gpus, most_cases) in [
        ("gpu memory", settings, None, true, usize::MAX),
        ("host memory by the setting", settings, Some(false), false, 5),
        ("host memory by the provider", without, None, false, 5),
    ] {
        let fake = Fake::new(name, &settings);
        fake.set_copy(copy);
        let mut ranks = 0;
        for prepared in cases.iter().take(most_cases) {
            check(prepared, &config(&fake, gpu_memory));
            ranks += prepared.world().ranks() as u64;
        }
        let report = fake.assert_clean(name);
        // One of the attempt, and one of the lanes.
        assert_eq!(report.gpu_regions, if in_gpus { 2 * ranks } else { 0 }, "{name}");
    }
    let fake = Fake::new("demanded", &without);
    let world = World::builder().ranks(2).domains(2).experts(2).build().unwrap();
    let error = CudaBuffer::threads(&world, &config(&fake, Some(true))).map(drop).unwrap_err().to_string();
    assert!(error.contains("FI_HMEM") && error.contains("HYBRID_EP_TRANSPORT_GPU_MEMORY=0"), "{error}");
}
