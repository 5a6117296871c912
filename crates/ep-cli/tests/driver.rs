//! Runs the program with a CUDA driver that is missing, unusable, or fails in one function. The error must contain the
//! failed action, the driver's reason and advice, and the program must end. The driver is a fake (`fake/cuda.c`),
//! compiled by these tests, so that they need no GPU and do not depend on one.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use common::{Directory, Finished, finish_in_time, program};

/// One case of the fixed suite: one rank, 4 tokens.
const VERIFY: &[&str] = &["verify", "--backend", "cuda", "--suite-only", "--case", "0"];
/// Two ranks, each on its own GPU if there are two.
const BENCH: &[&str] = &[
    "bench",
    "--backend",
    "cuda",
    "--ranks",
    "2",
    "--tokens",
    "24",
    "--hidden",
    "64",
    "--experts",
    "8",
    "--topk",
    "3",
    "--iters",
    "2",
    "--timeout-ms",
    "5000",
];

/// Settings of the fake driver.
#[derive(Clone, Copy, Default)]
struct Fake<'a> {
    fail: &'a str,
    gpus: Option<&'a str>,
    version: Option<&'a str>,
    capability: Option<&'a str>,
    log: Option<&'a str>,
}

impl<'a> Fake<'a> {
    /// A driver with two GPUs and a function that fails.
    fn failing(fail: &'a str) -> Self {
        Self { fail, gpus: Some("2"), ..Self::default() }
    }

    /// Runs the program with this driver and an empty kernel cache.
    #[track_caller]
    fn run(self, arguments: &[&str]) -> Finished {
        let libraries = libraries();
        let cache = Directory::new(&format!("driver-{:?}", std::thread::current().id()));
        let mut command = program();
        command
            .args(arguments)
            .env("LD_LIBRARY_PATH", libraries)
            .env("HYBRID_EP_NVRTC", libraries.join("libnvrtc.so.12"))
            .env("HYBRID_EP_KERNEL_CACHE", cache.path())
            .env("FAKE_CUDA_FAIL", self.fail);
        for (key, value) in [
            ("FAKE_CUDA_GPUS", self.gpus),
            ("FAKE_CUDA_VERSION", self.version),
            ("FAKE_CUDA_CAPABILITY", self.capability),
            ("FAKE_CUDA_LOG", self.log),
        ] {
            value.map(|value| command.env(key, value));
        }
        finish_in_time(command.spawn().unwrap())
    }
}

/// The directory of the fake driver and compiler, which are compiled once.
fn libraries() -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake-driver");
        std::fs::create_dir_all(&directory).unwrap();
        for (source, library) in [("cuda.c", "libcuda.so"), ("nvrtc.c", "libnvrtc.so.12")] {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake").join(source);
            let made = directory.join(format!("{library}.{}", std::process::id()));
            let mut compiler = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
            compiler
                .args(["-shared", "-fPIC", "-pthread", "-O1", "-Wall", "-Wextra", "-Werror", "-o"])
                .args([&made, &source]);
            let compiled = compiler.output().expect("a C compiler; Rust needs one to link, too");
            assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
            // Renamed when complete, because other runs of these tests use the same directory.
            std::fs::rename(made, directory.join(library)).unwrap();
        }
        directory
    })
}

/// The line of `doctor` on the CUDA backend.
#[track_caller]
fn doctor_says(finished: Finished) -> String {
    let finished = finished.succeeded();
    finished
        .stdout
        .lines()
        .find(|line| line.get(6..).is_some_and(|line| line.starts_with("cuda ")))
        .unwrap()
        .to_owned()
}

#[test]
fn with_a_working_driver_everything_runs() {
    let fake = Fake { gpus: Some("2"), ..Fake::default() };
    assert!(doctor_says(fake.run(&["doctor"])).ends_with("ready on 2 GPUs"));
    let report: serde_json::Value =
        serde_json::from_str(&fake.run(&["doctor", "--json"]).succeeded().stdout).unwrap();
    assert_eq!(report["cuda"]["gpus"][1]["pci_address"], "0000:1b:00.0");
    let warm = fake.run(&["warm"]).succeeded();
    assert!(
        warm.stdout.contains(" kernels for sm_90a: ")
            && warm.stdout.contains(" compiled, 0 found in the cache, in "),
        "{warm:?}"
    );
}

#[test]
fn results_of_gpus_that_compute_nothing_are_wrong() {
    let verify = Fake::default().run(VERIFY);
    assert_eq!(verify.code, Some(1), "{verify:?}");
    assert!(verify.stdout.contains("0 passed, 1 failed"), "{verify:?}");
    assert!(
        verify.stderr.contains("replay: hybrid-ep verify --backend cuda --suite-only --case 0"),
        "{verify:?}"
    );
    for form in [&[][..], &["--processes"]] {
        let bench = Fake { gpus: Some("2"), ..Fake::default() }.run(&[BENCH, form].concat());
        assert_eq!(bench.code, Some(1), "{bench:?}");
        assert!(bench.stdout.contains("\nWRONG: rank 0: receives"), "{bench:?}");

        let soak = ["verify", "--backend", "cuda", "--soak", "40", "--ranks", "2", "--seed", "3"];
        let soak = Fake::default().run(&[&soak, form].concat());
        assert_eq!(soak.code, Some(1), "{soak:?}");
        assert!(soak.stdout.contains("0 passed, 1 failed"), "{soak:?}");
        let replay = "replay: hybrid-ep verify --backend cuda --soak 1 --seed 3 --ranks 2 --domains 1";
        assert!(soak.stderr.contains("FAILED: iteration 0\n") && soak.stderr.contains(replay), "{soak:?}");
    }
}

#[test]
fn checking_for_usable_gpus_creates_no_context() {
    let directory = Directory::new("driver-log");
    let log = directory.file("log");
    let fake = Fake { log: Some(&log), ..Fake::default() };
    let called = |arguments: &[&str], code| {
        assert_eq!(fake.run(arguments).code, Some(code), "{arguments:?}");
        let calls = std::fs::read_to_string(&log).unwrap();
        std::fs::remove_file(&log).unwrap();
        assert!(calls.lines().any(|call| call == "cuInit"), "{calls}");
        calls.lines().any(|call| call == "cuDevicePrimaryCtxRetain")
    };
    // These are refused after the backend has been chosen.
    assert!(!called(&["bench", "--backend", "cuda", "--topk", "0"], 2));
    assert!(!called(&["bench", "--topk", "0"], 2));
    assert!(!called(&["doctor"], 0) && !called(&["warm"], 0));
    // A case that runs creates a context.
    assert!(called(VERIFY, 1));
}

/// Compiling during an operator would delay the peers. Loading a kernel waits for the kernels that run on the GPU,
/// which may in turn wait for the loading rank.
#[test]
fn kernels_are_loaded_before_the_first_operator() {
    let directory = Directory::new("driver-kernels");
    let log = directory.file("log");
    // Kernels loaded before the first launch, and after it.
    let loads = |gpus, arguments: &[&str]| {
        Fake { gpus: Some(gpus), log: Some(&log), ..Fake::default() }.run(arguments);
        let calls = std::fs::read_to_string(&log).unwrap();
        std::fs::remove_file(&log).unwrap();
        let (before, after) = calls.split_once("cuLaunchKernel").unwrap();
        [before, after].map(|calls| calls.lines().filter(|&call| call == "cuModuleLoadData").count())
    };
    // Each GPU loads the kernels that nearly all programs launch, and later those of the benchmark.
    assert_eq!(loads("1", VERIFY)[0], 3);
    assert_eq!(loads("2", BENCH), [6, 2]);
    // All kernels, if ranks share a GPU.
    assert_eq!(loads("1", BENCH), [11, 0]);
}

/// If ranks share a GPU, a copy queued behind a kernel delays the copies of other ranks, for which that kernel may
/// wait.
#[test]
fn nothing_is_copied_to_the_host_before_its_stream_is_idle() {
    let directory = Directory::new("driver-downloads");
    let log = directory.file("log");
    Fake { log: Some(&log), ..Fake::default() }.run(VERIFY);
    let calls = std::fs::read_to_string(&log).unwrap();
    let calls: Vec<&str> = calls.lines().filter(|call| !call.ends_with("Current")).collect();
    let downloads: Vec<_> =
        calls.windows(2).filter(|calls| calls[1].starts_with("cuMemcpyDtoHAsync")).collect();
    assert!(!downloads.is_empty(), "{calls:?}");
    assert!(downloads.iter().all(|calls| calls[0] == "cuStreamSynchronize"), "{calls:?}");
}

/// Runs the program with the libraries of a directory.
#[track_caller]
fn with_libraries_of(directory: &Directory, arguments: &[&str]) -> Finished {
    let mut command = program();
    finish_in_time(command.args(arguments).env("LD_LIBRARY_PATH", directory.path()).spawn().unwrap())
}

#[test]
fn a_driver_that_is_missing_or_does_not_load_is_reported() {
    let directory = Directory::new("driver-broken");
    for name in ["libcuda.so", "libcuda.so.1"] {
        std::fs::write(directory.file(name), "no library").unwrap();
    }
    let run = |arguments: &[&str]| with_libraries_of(&directory, arguments);
    for arguments in [VERIFY, BENCH, &["warm"]] {
        run(arguments)
            .refused(2, &["libcuda.so.1 is missing or cannot be loaded", "install the NVIDIA driver"]);
    }
    assert!(doctor_says(run(&["doctor"])).ends_with("no GPU driver (libcuda.so.1)"));
}

/// Such a driver may be the stub library of an old CUDA toolkit.
#[test]
fn a_driver_that_lacks_a_function_is_reported() {
    let directory = Directory::new("driver-lacking");
    let source = directory.file("cuda.c");
    std::fs::write(&source, "int cuInit(unsigned flags) { return flags; }").unwrap();
    let library = directory.file("libcuda.so");
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let compiled = Command::new(compiler).args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status();
    assert!(compiled.unwrap().success());
    let run = |arguments: &[&str]| with_libraries_of(&directory, arguments);
    for arguments in [VERIFY, BENCH, &["warm"]] {
        run(arguments)
            .refused(2, &["libcuda.so.1 has no function cuCtxGetCurrent", "driver of version 525 or later"]);
    }
    let said = doctor_says(run(&["doctor"]));
    assert!(said.contains("has no function cuCtxGetCurrent"), "{said}");
}

#[test]
fn unusable_drivers_and_gpus_are_reported() {
    let old = Fake { version: Some("11080"), ..Fake::default() };
    let volta = Fake { capability: Some("70"), gpus: Some("2"), ..Fake::default() };
    let none = Fake { gpus: Some("0"), ..Fake::default() };
    let what = "GPU driver (libcuda.so.1): ";
    let advice = "nvidia-smi shows whether the driver works";
    for (fake, parts, doctor) in [
        (
            old,
            ["GPU driver (libcuda.so.1)", "it supports CUDA 11.8, and 12.0 is needed", "install a driver of"],
            "the driver supports CUDA 11.8, and 12.0 is needed",
        ),
        (
            volta,
            [
                "GPU 0 (Fake GPU 0, compute capability 7.0)",
                "there are no kernels for it",
                "CUDA_VISIBLE_DEVICES",
            ],
            "no kernels for CUDA GPU 0",
        ),
        (
            none,
            ["looking for GPUs", "the driver shows none", "CUDA_VISIBLE_DEVICES"],
            "the driver shows no GPU",
        ),
        (
            Fake::failing("cuInit=100"),
            ["looking for GPUs", "the driver shows none", "hand GPUs to the container"],
            "the driver shows no GPU",
        ),
        (
            Fake::failing("cuInit=34"),
            [what, "CUDA driver is a stub library (error 34)", advice],
            "CUDA driver is a stub library (error 34)",
        ),
        (
            Fake::failing("cuInit=802"),
            [what, "system not yet initialized (error 802)", advice],
            "system not yet initialized (error 802)",
        ),
        (
            Fake::failing("cuDriverGetVersion=999"),
            [what, "unknown error (error 999)", advice],
            "unknown error (error 999)",
        ),
        (
            Fake::failing("cuDeviceGetAttribute=999"),
            [what, "unknown error (error 999)", advice],
            "unknown error (error 999)",
        ),
    ] {
        let processes = [BENCH, &["--processes"]].concat();
        for arguments in [VERIFY, BENCH, &processes, &["warm"]] {
            fake.run(arguments).refused(2, &parts);
        }
        let line = doctor_says(fake.run(&["doctor"]));
        assert!(line.starts_with("  --  cuda ") && line.contains(doctor), "{line}");
    }
}

#[test]
fn failures_to_create_a_buffer_are_reported() {
    for (fail, parts) in [
        (
            "cuDevicePrimaryCtxRetain=46",
            &["opening GPU 0", "busy or unavailable", "is another process using it exclusively?"][..],
        ),
        ("cuDevicePrimaryCtxRetain=2", &["opening GPU 0", "out of memory"]),
        ("cuCtxSetCurrent=304", &["using GPU 0", "OS call failed"]),
        ("cuStreamCreate=2", &["making a stream", "out of memory", "show what uses it"]),
        ("cuMemAddressReserve=2", &["reserving 2147483648 bytes of addresses", "out of memory"]),
        (
            "cuMemCreate=2",
            &[
                "allocating 33554432 bytes of registered memory on GPU 0",
                "5242880 of 2147483648 bytes are free",
                "use fewer tokens, a smaller hidden or a smaller capacity, or free memory of other libraries",
            ],
        ),
        (
            "cuMemCreate=801",
            &["allocating 33554432 bytes on GPU 0", "operation not supported", "does not allow it"],
        ),
        ("cuMemMap=1", &["mapping 33554432 bytes", "invalid argument", "report this as a bug"]),
        ("cuMemSetAccess=1", &["mapping 33554432 bytes", "invalid argument", "must reach each other"]),
        ("cuMemHostAlloc=2", &["pinning ", " bytes of host memory", "out of memory", "show what uses it"]),
        ("cuMemsetD8Async=999", &["clearing ", "on GPU 0", "unknown error"]),
        ("cuStreamSynchronize=700", &["waiting for GPU 0", "illegal memory access", "compute-sanitizer"]),
    ] {
        Fake::failing(fail).run(BENCH).refused(2, parts);
        let verify = Fake::failing(fail).run(VERIFY);
        verify.refused(2, parts);
        assert!(verify.stdout.contains("0 passed, 0 failed"), "{verify:?}");
    }
    // Only the GPU of the second rank is full.
    Fake::failing("cuMemCreate=2@2").run(BENCH).refused(2, &["allocating 33554432 bytes", "on GPU 1"]);
}

#[test]
fn failing_operators_are_reported() {
    for (fail, parts) in [
        (
            "cuModuleLoadData=209",
            &["loading kernel preprocess on GPU ", "no kernel image is available", "`hybrid-ep doctor`"][..],
        ),
        ("cuModuleGetFunction=999", &["loading kernel preprocess on GPU ", "unknown error"]),
        (
            "cuLaunchKernel=701",
            &["launching kernel preprocess (", "too many resources", "an earlier kernel may have failed"],
        ),
        ("cuStreamSynchronize=700@9", &["waiting for GPU ", "an illegal memory access", "compute-sanitizer"]),
        // The GPU then refuses all calls, and each rank reports its next one.
        ("cuLaunchKernel=700@4!", &["an illegal memory access was encountered"]),
        ("cuStreamSynchronize=700@9!", &["an illegal memory access was encountered"]),
        ("cuEventRecord=700@4!", &["an illegal memory access was encountered"]),
        (
            "cuMemcpyHtoDAsync_v2=700",
            &["copying ", " bytes to GPU ", "an illegal memory access", "start it again"],
        ),
        (
            "cuMemcpyDtoHAsync_v2=700",
            &["copying ", " bytes from GPU ", "an illegal memory access", "start it again"],
        ),
        ("cuEventCreate=2", &["making an event", "out of memory", "show what uses it"]),
        ("cuEventRecord=999@4", &["recording an event", "unknown error"]),
        ("cuEventElapsedTime=999", &["reading a time", "unknown error", "report this as a bug"]),
        ("cuStreamIsCapturing=999", &["asking whether a stream is captured", "unknown error"]),
    ] {
        Fake::failing(fail).run(BENCH).refused(2, parts);
        let ranks = Fake::failing(fail).run(&[BENCH, &["--processes"]].concat());
        assert_eq!(ranks.code, Some(2), "{fail}: {ranks:?}");
        // One line per rank, then the launcher's line.
        let (lines, last) = ranks.stderr.trim_end().rsplit_once('\n').unwrap_or_default();
        // If a rank fails while the other one still joins, the other one names it, with the same reason.
        let named = [[0, 1], [1, 0]].map(|[own, told]| {
            format!("hybrid-ep: error: rank {own} exited with code 2; rank {told} exited with code 3")
        });
        let both = last == "hybrid-ep: error: ranks 0, 1 exited with code 2";
        assert!(both || named.iter().any(|named| named == last), "{fail}: {ranks:?}");
        for line in lines.lines() {
            assert!(line.starts_with("hybrid-ep: error: "), "{fail}: {line}");
            assert!(parts.iter().all(|part| line.contains(part)), "{fail}: {line}");
        }
    }
}

#[test]
fn a_failing_operator_fails_its_case_and_ends_a_soak() {
    let parts = ["launching kernel preprocess (", "too many resources requested for launch"];
    let soak = ["verify", "--backend", "cuda", "--soak", "40", "--ranks", "2", "--timeout-ms", "5000"];
    let in_processes = [&soak[..], &["--processes"]].concat();
    for arguments in [VERIFY, &soak, &in_processes] {
        let finished = Fake::failing("cuLaunchKernel=701").run(arguments);
        assert_eq!(finished.code, Some(1), "{finished:?}");
        assert!(finished.stdout.ends_with("0 passed, 1 failed\n"), "{finished:?}");
        assert!(parts.iter().all(|part| finished.stderr.contains(part)), "{finished:?}");
    }
}

#[test]
fn failures_to_share_memory_between_processes_are_reported() {
    let reserving = ["reserving 2147483648 bytes of addresses", "out of memory"];
    let mapping = ["sharing memory with rank ", "it could not map the memory"];
    for (fail, parts) in [
        ("cuDeviceGetUuid_v2=999", ["identifying GPU ", "unknown error"]),
        (
            "cuMemExportToShareableHandle=801",
            ["sharing memory with other processes", "operation not supported"],
        ),
        ("cuMemAddressReserve=2@2", reserving),
        ("cuMemImportFromShareableHandle=999", mapping),
        ("cuMemMap=1@2", mapping),
    ] {
        let ranks = Fake::failing(fail).run(&[BENCH, &["--processes"]].concat());
        assert_eq!(ranks.code, Some(2), "{fail}: {ranks:?}");
        assert!(parts.iter().all(|part| ranks.stderr.contains(part)), "{fail}: {ranks:?}");
        assert!(ranks.stderr.lines().all(|line| line.starts_with("hybrid-ep: error: ")), "{fail}: {ranks:?}");
    }
}
