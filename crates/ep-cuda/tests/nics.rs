//! The CUDA backend over a fake libfabric that accesses the memory of GPUs, as a NIC does with GPUDirect RDMA. Needs a GPU;
//! skipped, with a message, where there is none.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // in helpers of tests

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys;
use ep::conformance::{Prepared, suite};
use ep::{Backend as _, Config, World};
use ep_cuda::CudaBuffer;
use ep_fabric_fake::{Fake, Settings, sys as fabric};

/// The stream of all copies of a GPU: the fake makes one at a time. A stream for each thread would be too many for the driver,
/// which would let copies wait for kernels that wait for them.
struct Copies {
    context: sys::CUcontext,
    stream: sys::CUstream,
}

// SAFETY: handles of the driver, which any thread may use.
unsafe impl Send for Copies {}

impl Copies {
    fn new(gpu: i32) -> Self {
        let (mut context, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: each call stores one handle. The backend has initialised the driver and uses this GPU.
        unsafe {
            assert_eq!(sys::cuDevicePrimaryCtxRetain(&mut context, gpu), sys::CUresult::CUDA_SUCCESS);
            assert_eq!(sys::cuCtxSetCurrent(context), sys::CUresult::CUDA_SUCCESS);
            assert_eq!(sys::cuStreamCreate(&mut stream, flags), sys::CUresult::CUDA_SUCCESS);
        }
        Self { context, stream }
    }

    fn copy(&self, to: u64, from: u64, len: usize) {
        // SAFETY: the context is retained, and the stream is never destroyed. The ranges are a registered window of this GPU
        // and a buffer in host memory. All memory has one address space.
        let answers = unsafe {
            [
                sys::cuCtxSetCurrent(self.context),
                sys::cuMemcpyAsync(to, from, len, self.stream),
                sys::cuStreamSynchronize(self.stream),
            ]
        };
        assert_eq!(answers, [sys::CUresult::CUDA_SUCCESS; 3]);
    }
}

/// The GPU whose memory contains the address; 0 for memory of the host that the driver does not know.
fn gpu_of(address: u64) -> i32 {
    let mut gpu = 0i32;
    let which = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
    // SAFETY: stores one number.
    let answer = unsafe { sys::cuPointerGetAttribute(std::ptr::from_mut(&mut gpu).cast(), which, address) };
    if answer == sys::CUresult::CUDA_SUCCESS { gpu } else { 0 }
}

/// Copies by way of host memory: a copy inside a GPU would need a multiprocessor, which kernels that wait may occupy.
extern "C" fn copy(to: *mut c_void, from: *const c_void, len: usize) {
    static OF_GPUS: Mutex<BTreeMap<i32, Copies>> = Mutex::new(BTreeMap::new());
    let mut bytes = vec![0u8; len];
    let host = bytes.as_mut_ptr() as u64;
    for (to, from, gpu) in [(host, from as u64, gpu_of(from as u64)), (to as u64, host, gpu_of(to as u64))] {
        let mut of_gpus = OF_GPUS.lock().unwrap_or_else(PoisonError::into_inner);
        of_gpus.entry(gpu).or_insert_with(|| Copies::new(gpu)).copy(to, from, len);
    }
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
