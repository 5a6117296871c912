//! A fake driver without GPUs (`ep-cli/tests/fake`), which counts errors that a GPU would not survive, and buffers on
//! it.
#![allow(dead_code, reason = "each test file uses some of it")]

use std::env;
use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use ep::{Backend as _, Config, DispatchInput, DispatchMode, DispatchOutput, Probs, Routing, World};
use ep_cuda::{CudaBuffer, CudaHandle, CudaMemory};
use libloading::Library;

/// The environment variable that is set in the process with the fake driver.
pub(crate) const INSIDE: &str = "HYBRID_EP_LIFETIME_TEST";
/// Longer than any step of a test: a step that takes this long hangs.
pub(crate) const HANG: Duration = Duration::from_secs(60);

/// The fake driver's own functions.
pub(crate) struct Driver(Library);

impl Driver {
    pub(crate) fn new() -> Self {
        // SAFETY: the fake driver, which the library loads by the same name; loading it runs nothing.
        Self(unsafe { Library::new("libcuda.so") }.unwrap())
    }

    /// Calls a function of one pointer.
    pub(crate) fn call<T>(&self, name: &str, of: *mut c_void) -> T {
        // SAFETY: the names and types below are those of `cuda.c`.
        unsafe { (self.0.get::<unsafe extern "C" fn(*mut c_void) -> T>(name).unwrap())(of) }
    }

    pub(crate) fn ask<T>(&self, name: &str) -> T {
        // SAFETY: as above.
        unsafe { (self.0.get::<unsafe extern "C" fn() -> T>(name).unwrap())() }
    }

    /// The current context of this thread.
    pub(crate) fn current(&self) -> *mut c_void {
        let mut context = std::ptr::null_mut::<c_void>();
        assert_eq!(self.call::<i32>("cuCtxGetCurrent", (&raw mut context).cast()), 0);
        context
    }

    /// A stream of the caller, like those of PyTorch.
    pub(crate) fn stream(&self) -> *mut c_void {
        self.ask("fake_stream")
    }

    pub(crate) fn hold(&self, stream: *mut c_void) {
        self.call("fake_hold", stream)
    }

    pub(crate) fn release(&self, stream: *mut c_void) {
        self.call("fake_release", stream)
    }

    /// Puts work of the caller into a stream.
    pub(crate) fn submit(&self, stream: *mut c_void) {
        self.call("fake_submit", stream)
    }

    pub(crate) fn capture<T>(&self, stream: *mut c_void, work: impl FnOnce() -> T) -> (*mut c_void, T) {
        self.call::<()>("fake_begin_capture", stream);
        let result = work();
        (self.call("fake_end_capture", stream), result)
    }

    pub(crate) fn replay(&self, graph: *mut c_void, stream: *mut c_void) {
        // SAFETY: as above.
        unsafe {
            let replay = self.0.get::<unsafe extern "C" fn(*mut c_void, *mut c_void)>("fake_replay");
            (replay.unwrap())(graph, stream);
        }
    }

    pub(crate) fn destroy_graph(&self, graph: *mut c_void) {
        self.call("fake_destroy_graph", graph)
    }

    pub(crate) fn mapped(&self) -> i64 {
        self.ask("fake_mapped_bytes")
    }

    /// The number of uploads by this process; a leaving rank uploads its gone word to each rank.
    pub(crate) fn uploads(&self) -> i32 {
        self.ask("fake_uploads")
    }

    #[track_caller]
    pub(crate) fn check(&self) {
        assert_eq!(self.ask::<i32>("fake_violations"), 0, "a GPU would have died of it");
    }
}

/// Where the fake driver and compiler are, made once.
pub(crate) fn libraries() -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake-driver");
        std::fs::create_dir_all(&directory).unwrap();
        for (source, library) in [("cuda.c", "libcuda.so"), ("nvrtc.c", "libnvrtc.so.12")] {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ep-cli/tests/fake").join(source);
            let made = directory.join(format!("{library}.{}", std::process::id()));
            let mut compiler = Command::new(env::var_os("CC").unwrap_or_else(|| "cc".into()));
            compiler
                .args(["-shared", "-fPIC", "-pthread", "-O1", "-Wall", "-Wextra", "-Werror", "-o"])
                .args([&made, &source]);
            let compiled = compiler.output().expect("a C compiler; Rust needs one to link, too");
            assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
            // Renamed when it is complete, because other runs of these tests may use it.
            std::fs::rename(made, directory.join(library)).unwrap();
        }
        directory
    })
}

/// Runs the test of this name, with these variables, in a process that has the fake driver.
#[track_caller]
pub(crate) fn outside(name: &str, variables: &[(&str, &str)]) -> Output {
    let directory = libraries();
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture", "--test-threads", "1"])
        .env(INSIDE, "1")
        .env("LD_LIBRARY_PATH", directory)
        .env("HYBRID_EP_NVRTC", directory.join("libnvrtc.so.12"))
        .env("HYBRID_EP_KERNEL_CACHE", directory.join("no cache"))
        .envs(variables.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let since = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if since.elapsed() > HANG {
            child.kill().unwrap();
            panic!("{name} hangs: {:?}", child.wait_with_output().unwrap());
        }
        thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{name}: {}", text(&output));
    output
}

pub(crate) fn text(output: &Output) -> String {
    let [out, err] =
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    out + &err
}

/// A test that runs in a child process with the fake driver; in the parent process, starts that child. Runs once with a
/// driver from before CUDA 12.5 and once with a later one, because the two are polled for idleness in different ways.
macro_rules! inside {
    ($name:ident, $driver:ident => $body:block) => {
        #[test]
        fn $name() {
            if !$crate::fake::is_inside() {
                for old in ["0", "1"] {
                    $crate::fake::outside(stringify!($name), &[("FAKE_CUDA_OLD", old)]);
                }
                return;
            }
            let $driver = $crate::fake::Driver::new();
            $body
            $driver.check();
        }
    };
}

/// Whether this is the process that has the driver.
pub(crate) fn is_inside() -> bool {
    env::var_os(INSIDE).is_some()
}

pub(crate) fn config() -> Config {
    let mut config = Config::default();
    config.cuda.sms = 4;
    config
}

pub(crate) fn buffers(ranks: usize, config: &Config) -> Vec<CudaBuffer> {
    CudaBuffer::threads(&World::builder().ranks(ranks).experts(2 * ranks).build().unwrap(), config).unwrap()
}

pub(crate) fn one() -> CudaBuffer {
    buffers(1, &config()).pop().unwrap()
}

pub(crate) const HIDDEN: usize = 64;
pub(crate) const CAPACITY: usize = 16;

pub(crate) fn preprocess(buffer: &mut CudaBuffer) -> CudaHandle {
    let experts = buffer.world().experts();
    let routing = Routing::from_topk(buffer.rank(), experts, 1, &[0, 1], &[1.0, 1.0]).unwrap();
    buffer.preprocess(&routing, DispatchMode::permuted(4).unwrap(), Some(CAPACITY)).unwrap()
}

/// Dispatches two tokens. Returns the memory in which they are received.
pub(crate) fn dispatch(buffer: &mut CudaBuffer, handle: &CudaHandle) -> CudaMemory {
    let tokens = buffer.alloc(2 * 2 * HIDDEN).unwrap();
    let mut received = buffer.alloc(CAPACITY * 2 * HIDDEN).unwrap();
    let input = DispatchInput::new(&tokens, HIDDEN).probs(Probs::Skip);
    let output = DispatchOutput::new(&mut received);
    buffer.dispatch(handle, input, output).unwrap();
    received
}
