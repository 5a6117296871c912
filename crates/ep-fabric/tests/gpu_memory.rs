//! Windows with a part in the memory of a GPU, over the fake libfabric: it demands that this part is registered as such, and
//! refuses it from a provider that was not asked for it.
#![allow(clippy::unwrap_used)] // in helpers of tests

mod common;
#[path = "common/fake.rs"]
mod fake;

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use common::{Access, Pages, rail};
use ep::conformance::{End, TRANSPORT_LIMITS, WindowAccess, check_transport, transport_window_bytes};
use ep::{GpuPart, Put, Result, Signal, Transport, Unconnected, Window};
use ep_fabric::{Options, registers_gpu_memory};
use ep_fabric_fake::{Fake, Settings, Step, sys};
use fake::Opens;

/// Bytes of the part in host memory.
const HOST: usize = 4096;

/// Host memory, and memory that the fake takes for that of a GPU.
struct TwoParts {
    host: Arc<Pages>,
    gpu: Arc<Pages>,
}

impl TwoParts {
    fn new(fake: &Fake, gpu_bytes: usize) -> Arc<Self> {
        let parts = Self { host: Pages::new(HOST), gpu: Pages::new(gpu_bytes) };
        fake.set_gpu_memory(parts.gpu.start().as_ptr().expose_provenance(), gpu_bytes);
        // Never freed: the fake would take what another test allocates there for memory of a GPU.
        std::mem::forget(Arc::clone(&parts.gpu));
        Arc::new(parts)
    }
}

impl Window for TwoParts {
    fn start(&self) -> NonNull<u8> {
        self.host.start()
    }

    fn len(&self) -> usize {
        self.host.len()
    }

    fn gpu_part(&self) -> Option<GpuPart> {
        let address = self.gpu.start().as_ptr().expose_provenance() as u64;
        Some(GpuPart { gpu: 3, address, len: self.gpu.len() })
    }
}

/// The part in the memory of the GPU, by offsets of the window.
struct OfGpu(Access);

impl WindowAccess for OfGpu {
    fn usable(&self) -> Range<usize> {
        HOST..HOST + self.0.0.len()
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        self.0.write(offset - HOST, bytes);
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) {
        self.0.read(offset - HOST, bytes);
    }
}

fn open(
    options: &Options,
    ranks: usize,
    own: usize,
    window: Arc<dyn Window>,
) -> Result<Box<dyn Unconnected>> {
    // SAFETY: the pages are allocated until they are dropped.
    unsafe { ep_fabric::open(options, rail(ranks, own), window, TRANSPORT_LIMITS) }
}

/// Whether the provider registers memory of a GPU; otherwise, the reason.
fn registers(fake: &Fake, options: &Options) -> std::result::Result<(), String> {
    let window = TwoParts::new(fake, 4096);
    // SAFETY: the window keeps the memory.
    unsafe { registers_gpu_memory(options, window.gpu_part().unwrap()) }.unwrap()
}

fn conform(fake: &Fake, options: &Options, ranks: usize) {
    let windows: Vec<_> = (0..ranks).map(|_| TwoParts::new(fake, transport_window_bytes(ranks))).collect();
    let opened: Vec<_> = (0..ranks)
        .map(|own| open(options, ranks, own, Arc::clone(&windows[own]) as Arc<dyn Window>).unwrap())
        .collect();
    let blobs: Vec<Vec<u8>> = opened.iter().map(|engine| engine.blob()).collect();
    let ends: Vec<End> = opened
        .into_iter()
        .enumerate()
        .map(|(own, engine)| {
            let window = Box::new(OfGpu(Access(Arc::clone(&windows[own].gpu))));
            End { rail: rail(ranks, own), transport: engine.connect(&blobs).unwrap(), window }
        })
        .collect();
    let outcome = std::thread::scope(|scope| {
        let check = |end: End| scope.spawn(|| check_transport(end, Duration::from_secs(60)));
        let threads: Vec<_> = ends.into_iter().map(check).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap())
    });
    assert_eq!(outcome, Ok(()), "{:?}", fake.report());
}

/// The demands that `verbs` and `efa` make, and none.
fn demands() -> [Settings; 3] {
    let basic = sys::MR_VIRT_ADDR | sys::MR_ALLOCATED | sys::MR_PROV_KEY;
    [
        Settings { key_size: 1, ..Settings::default() },
        Settings {
            mr_mode: sys::MR_LOCAL | basic,
            mode: sys::RX_CQ_DATA,
            key_size: 4,
            data_size: 4,
            reorder: true,
            part: 4096,
            ..Settings::default()
        },
        Settings { mr_mode: sys::MR_LOCAL | basic | sys::MR_ENDPOINT, part: 777, ..Settings::default() },
    ]
}

#[test]
fn the_conformance_suite_passes_in_the_memory_of_gpus() {
    for (index, settings) in demands().iter().enumerate() {
        let fake = Fake::new(&format!("gpu memory, {index}"), settings);
        assert_eq!(registers(&fake, &fake.options()), Ok(()));
        conform(&fake, &fake.options(), 3);
        // One of the attempt.
        assert_eq!(fake.assert_clean("gpu memory").gpu_regions, 1 + 3);
    }
}

#[test]
fn several_nics_register_the_memory_each() {
    let fake = Fake::new("gpu memory, two nics", &Settings::default());
    fake.offer("nic1", "198.51.100.2", &Settings::default());
    let options = Options { domains: vec!["nic0".into(), "nic1".into()], ..fake.options() };
    assert_eq!(registers(&fake, &options), Ok(()));
    conform(&fake, &options, 2);
    let report = fake.assert_clean("two nics");
    assert_eq!(report.gpu_regions, 2 + 4);
    assert!(report.puts.values().all(|&puts| puts > 0), "{report:?}");
}

/// Waits for a signal.
fn signal(transport: &dyn Transport) -> u32 {
    let mut found = None;
    while found.is_none() {
        transport.poll(&mut |_, signal| found = Some(signal.word())).unwrap();
    }
    found.unwrap()
}

/// One rank has its lanes in the memory of a GPU and the other has not: the offsets are the same. A put does not cross from one
/// part to the other.
#[test]
fn ranks_with_and_without_gpu_memory_reach_each_other() {
    let fake = Fake::new("gpu memory of one", &demands()[1]);
    let two = TwoParts::new(&fake, 4096);
    let one = Pages::new(HOST + 4096);
    let options = fake.options();
    let engines = [
        open(&options, 2, 0, Arc::clone(&two) as Arc<dyn Window>).unwrap(),
        open(&options, 2, 1, Arc::clone(&one) as Arc<dyn Window>).unwrap(),
    ];
    let blobs: Vec<Vec<u8>> = engines.iter().map(|engine| engine.blob()).collect();
    let [gpu, host] = engines.map(|engine| engine.connect(&blobs).unwrap());
    let (of_gpu, of_host) = (rail(2, 0).own(), rail(2, 1).own());
    let word = |word| Signal::new(word).unwrap();

    Access(Arc::clone(&two.gpu)).write(100, b"from the gpu");
    gpu.put(Put::new(of_host, word(1)).bytes(HOST + 100..HOST + 112, HOST + 8)).unwrap();
    assert_eq!(signal(&*host), 1);
    let mut bytes = [0; 12];
    Access(Arc::clone(&one)).read(HOST + 8, &mut bytes);
    assert_eq!(&bytes, b"from the gpu");

    Access(Arc::clone(&one)).write(50, b"to the gpu");
    host.put(Put::new(of_gpu, word(2)).bytes(50..60, HOST + 200)).unwrap();
    assert_eq!(signal(&*gpu), 2);
    let mut bytes = [0; 10];
    Access(Arc::clone(&two.gpu)).read(200, &mut bytes);
    assert_eq!(&bytes, b"to the gpu");

    let refused = |transport: &dyn Transport, put: Put| transport.put(put).unwrap_err().to_string();
    let source = refused(&*gpu, Put::new(of_host, word(3)).bytes(HOST - 1..HOST + 1, 0));
    assert!(source.contains("source of a put") && source.contains("4096"), "{source}");
    let destination = refused(&*host, Put::new(of_gpu, word(3)).bytes(0..2, HOST - 1));
    assert!(destination.contains("destination of a put") && destination.contains("4096"), "{destination}");
    let outside = refused(&*host, Put::new(of_gpu, word(3)).bytes(0..2, HOST + 4095));
    assert!(outside.contains("destination of a put") && outside.contains("8192"), "{outside}");
    drop((gpu, host));
    fake.assert_clean("one with gpu memory");
}

/// The error where the memory of a GPU cannot be registered says how to do without.
#[test]
fn a_provider_without_gpu_memory_is_refused_with_the_setting() {
    for (settings, part) in [
        (Settings { lacks: sys::HMEM, ..Settings::default() }, "FI_HMEM"),
        (Settings { fail: Step::MrRegAttr, errno: 22, ..Settings::default() }, "fi_mr_regattr of GPU memory"),
    ] {
        let fake = Fake::new(&format!("without gpu memory, {part}"), &settings);
        // A provider may offer it in a library that was built without it.
        let why = registers(&fake, &fake.options()).unwrap_err();
        assert!(why.contains(part), "{why}");
        let window = TwoParts::new(&fake, 4096);
        let error = open(&fake.options(), 2, 0, window).map(drop).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("HYBRID_EP_TRANSPORT_GPU_MEMORY=0"), "{error}");
        let pages = Pages::new(4096);
        assert!(open(&fake.options(), 2, 0, pages).is_ok());
        fake.assert_clean(part);
    }
}
