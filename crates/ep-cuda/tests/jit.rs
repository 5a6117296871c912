//! The kernel compiler against a real NVRTC. Where there is none, these tests say so and pass, unless
//! `HYBRID_EP_REQUIRE_NVRTC=1` asks for one.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use ep::{CudaEnv, EnvironmentError, Error};
use ep_cuda::jit::{Arch, Compiler, Cubin, Jit, LoadError, Origin, Program, Resources, Version};

const SOURCE: &str = r#"
#include "common/twice.cuh"

extern "C" __global__ void doubled(float* values, int n) {
    __shared__ float staged[64];
    staged[threadIdx.x % 64] = values[threadIdx.x] * FACTOR;
    __syncthreads();
    values[0] = twice(staged[n % 64]);
}

// Too few registers for what is held at once.
extern "C" __global__ void __launch_bounds__(1024, 2) crowded(float* values, int n) {
    float held[64];
#pragma unroll
    for (int i = 0; i < 64; i++) held[i] = values[i * n];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; i++) values[(63 - i) * n + 1] = held[i] * held[63 - i];
}
"#;

fn program() -> Program {
    Program {
        name: "sample",
        source: SOURCE,
        headers: &[
            (
                "common/twice.cuh",
                "#include \"common/add.cuh\"\n__device__ float twice(float x) { return add(x, x); }",
            ),
            ("common/add.cuh", "__device__ inline float add(float a, float b) { return a + b; }"),
        ],
        defines: vec![("FACTOR", "3.0f".into())],
    }
}

/// The compiler, and an environment without a cache; `None` if there is no compiler and the environment requires none.
fn compiler() -> Option<(Compiler, CudaEnv)> {
    let env = CudaEnv { cache_dir: None, ..CudaEnv::from_env() };
    match Compiler::find(&env) {
        Ok(compiler) => Some((compiler, env)),
        Err(error) if std::env::var("HYBRID_EP_REQUIRE_NVRTC").as_deref() == Ok("1") => panic!("{error}"),
        Err(error) => {
            // Directly to stderr: the test harness captures the output of tests that pass.
            let _ = writeln!(io::stderr(), "skipped: no NVRTC ({error})");
            None
        }
    }
}

/// An empty directory, removed with this value.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("hybrid-ep-jit-test-{}-{number}", std::process::id()));
        // This mode, whatever the umask: the cache trusts no directory that others can write to.
        fs::DirBuilder::new().mode(0o700).create(&dir).unwrap();
        Self(dir)
    }

    /// The only file of a cache in this directory.
    fn only_entry(&self) -> PathBuf {
        let entries: Vec<_> = fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(entries.len(), 1, "{entries:?}");
        entries.into_iter().next().unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn cached_in(dir: &Path, env: &CudaEnv) -> Jit {
    Jit::new(CudaEnv { cache_dir: Some(dir.to_owned()), ..env.clone() })
}

fn without_compiler(dir: &Path) -> Jit {
    cached_in(dir, &CudaEnv { nvrtc: Some("/nowhere/libnvrtc.so.13".into()), ..CudaEnv::default() })
}

fn get(jit: &Jit) -> Cubin {
    jit.cubin(&program(), Arch::Sm90a).unwrap()
}

fn assert_elf(cubin: &[u8]) {
    assert_eq!(&cubin[..4], b"\x7fELF");
}

#[test]
fn every_architecture_is_compiled_for() {
    let Some((compiler, _)) = compiler() else { return };
    println!("{compiler:?}");
    for arch in Arch::ALL.into_iter().filter(|arch| arch.oldest_nvrtc() <= compiler.version()) {
        let compiled = compiler.compile(&program(), arch).unwrap();
        assert_elf(&compiled.cubin);
        assert!(compiled.log.contains(arch.name()), "{}", compiled.log);
        let named = |name: &str| -> Resources {
            compiled.resources.iter().find(|kernel| kernel.kernel == name).unwrap().clone()
        };
        assert_eq!(compiled.resources.len(), 2, "{}", compiled.log);
        let doubled = named("doubled");
        assert!((4..=32).contains(&doubled.registers), "{doubled:?}");
        assert_eq!((doubled.static_shared_bytes, doubled.spill_bytes, doubled.stack_bytes), (256, 0, 0));
        // Two blocks of 1024 threads share 64 Ki registers.
        let crowded = named("crowded");
        assert_eq!(crowded.registers, 32);
        assert!(crowded.spill_bytes > 0 && crowded.stack_bytes > 0, "{crowded:?}");
    }
}

#[test]
fn products_and_sums_are_fused_only_where_the_source_says_so() {
    let Some((compiler, _)) = compiler() else { return };
    let spelled = |expression: &'static str| Program {
        name: "fused",
        source: "extern \"C\" __global__ void k(float* p) { p[0] = EXPRESSION; }",
        headers: &[],
        defines: vec![("EXPRESSION", expression.into())],
    };
    let cubin = |expression| compiler.compile(&spelled(expression), Arch::Sm80).unwrap().cubin;
    assert_eq!(cubin("p[1]*p[2]+p[3]"), cubin("__fadd_rn(__fmul_rn(p[1],p[2]),p[3])"));
    assert_ne!(cubin("p[1]*p[2]+p[3]"), cubin("__fmaf_rn(p[1],p[2],p[3])"));
}

#[test]
fn a_compile_error_carries_the_log_and_the_programs_name() {
    let Some((compiler, env)) = compiler() else { return };
    let broken = Program { name: "broken", source: "__global__ void k() { missing(); }", ..program() };
    let Err(Error::Environment(EnvironmentError { what, problem, .. })) =
        compiler.compile(&broken, Arch::Sm80)
    else {
        panic!("it compiled");
    };
    assert!(what.contains("broken.cu for sm_80 with NVRTC"), "{what}");
    assert!(problem.contains("broken.cu(1): error") && problem.contains("\"missing\""), "{problem}");
    // The failed compilation leaves nothing in the cache.
    let dir = Scratch::new();
    let jit = cached_in(&dir.0, &env);
    assert!(jit.cubin(&broken, Arch::Sm80).is_err());
    assert_eq!(jit.cache_state().entries, 0);
}

#[test]
fn headers_come_from_the_program_alone() {
    let Some((compiler, _)) = compiler() else { return };
    // `Cargo.toml` exists in the working directory, which is that of the crate's manifest.
    for include in ["Cargo.toml", "no/such/header.cuh", "cuda_runtime.h"] {
        let source: &'static str = format!("#include \"{include}\"\n").leak();
        let error = compiler.compile(&Program { source, ..program() }, Arch::Sm80).unwrap_err().to_string();
        assert!(error.contains("could not open source file") && error.contains(include), "{error}");
    }
}

#[test]
fn a_warm_start_needs_no_compiler() {
    let Some((compiler, env)) = compiler() else { return };
    let dir = Scratch::new();
    let cold = cached_in(&dir.0, &env);
    let compiled = get(&cold);
    assert_eq!(compiled.origin, Origin::Compiled);
    assert_eq!(get(&cold).origin, Origin::Memory);

    let warm = without_compiler(&dir.0);
    let found = get(&warm);
    assert_eq!(found.origin, Origin::Disk);
    assert_eq!((&found.bytes, &found.resources), (&compiled.bytes, &compiled.resources));
    assert_eq!(found.nvrtc, compiler.version());
    assert_eq!(warm.warnings(), [""; 0]);
    println!("cold {:.1} ms, warm {:.3} ms", compiled.seconds * 1e3, found.seconds * 1e3);

    // A program that was not compiled before needs a compiler.
    let other = Program { defines: vec![("FACTOR", "4.0f".into())], ..program() };
    let error = warm.cubin(&other, Arch::Sm90a).unwrap_err().to_string();
    assert!(error.contains("/nowhere/libnvrtc.so.13") && error.contains("pip install"), "{error}");
}

#[test]
fn a_damaged_entry_is_compiled_anew() {
    let Some((_, env)) = compiler() else { return };
    let dir = Scratch::new();
    let good = get(&cached_in(&dir.0, &env));
    let path = dir.only_entry();
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x40;
    fs::write(&path, bytes).unwrap();

    let jit = cached_in(&dir.0, &env);
    let again = get(&jit);
    assert_eq!((again.origin, &again.bytes), (Origin::Compiled, &good.bytes));
    assert!(jit.warnings()[0].contains("damaged"), "{:?}", jit.warnings());
    assert_eq!(get(&without_compiler(&dir.0)).origin, Origin::Disk);
}

#[test]
fn a_cache_that_cannot_be_written_is_told_and_stops_nothing() {
    let Some((_, env)) = compiler() else { return };
    let dir = Scratch::new();
    let file = dir.0.join("file");
    fs::write(&file, "").unwrap();
    let jit = cached_in(&file.join("cache"), &env);
    assert_eq!(get(&jit).origin, Origin::Compiled);
    assert_eq!(get(&jit).origin, Origin::Memory);
    assert!(jit.warnings()[0].contains("compiled kernels are not kept in"), "{:?}", jit.warnings());
    assert!(jit.cache_state().problem.is_some());
}

#[test]
fn threads_that_ask_at_once_get_one_compilation() {
    let Some((_, env)) = compiler() else { return };
    let dir = Scratch::new();
    let jit = cached_in(&dir.0, &env);
    let start = Barrier::new(8);
    let cubins: Vec<(Arch, Cubin)> = thread::scope(|scope| {
        let ask = |number: usize| {
            let (jit, start) = (&jit, &start);
            // Every other thread compiles for the other architecture.
            let arch = [Arch::Sm80, Arch::Sm90a][number % 2];
            scope.spawn(move || {
                start.wait();
                (arch, jit.cubin(&program(), arch).unwrap())
            })
        };
        let threads: Vec<_> = (0..8).map(ask).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for arch in [Arch::Sm80, Arch::Sm90a] {
        let of_arch: Vec<&Cubin> =
            cubins.iter().filter(|(a, _)| *a == arch).map(|(_, cubin)| cubin).collect();
        let origins = of_arch.iter().map(|cubin| cubin.origin);
        assert_eq!(origins.clone().filter(|&origin| origin == Origin::Compiled).count(), 1);
        assert_eq!(origins.filter(|&origin| origin == Origin::Memory).count(), 3);
        assert!(of_arch.iter().all(|cubin| cubin.bytes == of_arch[0].bytes));
    }
}

#[test]
fn kept_code_that_the_driver_refuses_is_compiled_anew_once() {
    let Some((_, env)) = compiler() else { return };
    let dir = Scratch::new();
    get(&cached_in(&dir.0, &env));
    let refusal = || -> ep::Error { EnvironmentError::new("load", "bad image", "").into() };
    let load = |jit: &Jit, accept: &dyn Fn(&Cubin) -> bool| {
        let mut origins = Vec::new();
        let loaded = jit.load(&program(), Arch::Sm90a, |cubin| {
            origins.push(cubin.origin);
            if accept(cubin) { Ok(()) } else { Err(LoadError::Code(refusal())) }
        });
        (loaded.is_ok(), origins)
    };
    // An error that does not concern the code leaves the cache alone.
    let jit = cached_in(&dir.0, &env);
    let error = jit.load(&program(), Arch::Sm90a, |_| Err::<(), _>(LoadError::Other(refusal()))).unwrap_err();
    assert_eq!(error.to_string(), refusal().to_string());
    assert_eq!(jit.cache_state().entries, 1);
    let jit = cached_in(&dir.0, &env);
    let fresh = |cubin: &Cubin| cubin.origin == Origin::Compiled;
    assert_eq!(load(&jit, &fresh), (true, vec![Origin::Disk, Origin::Compiled]));
    // Code that this process has compiled itself is not compiled again: the result would be the same.
    assert_eq!(load(&jit, &|_| false), (false, vec![Origin::Memory]));
    // Without a compiler, the error states both reasons, and the refused entry is not tried again.
    let jit = without_compiler(&dir.0);
    let error = jit
        .load(&program(), Arch::Sm90a, |_| Err::<(), _>(LoadError::Code(refusal())))
        .unwrap_err()
        .to_string();
    assert!(error.contains("bad image") && error.contains("pip install"), "{error}");
    assert_eq!(jit.cache_state().entries, 0);
}

#[test]
fn a_compiler_is_found_by_its_file_its_directory_and_through_links() {
    let Some((found, _)) = compiler() else { return };
    let dir = Scratch::new();
    let link = dir.0.join("nvidia/cu13/lib/libnvrtc.so.13");
    fs::create_dir_all(link.parent().unwrap()).unwrap();
    symlink(found.path(), &link).unwrap();
    for named in [found.path(), &link, link.parent().unwrap()] {
        let env = CudaEnv { nvrtc: Some(named.to_owned()), ..CudaEnv::default() };
        let compiler = Compiler::find(&env).unwrap();
        assert_eq!(compiler.version(), found.version());
        // The path with all links resolved, because the compiler's other libraries lie there.
        assert_eq!(compiler.path(), found.path());
        assert_elf(&compiler.compile(&program(), Arch::Sm80).unwrap().cubin);
    }
}

#[test]
fn a_compiler_newer_than_the_driver_is_passed_over() {
    let Some((found, env)) = compiler() else { return };
    let older = Version { major: found.version().major - 1, minor: 9 };
    match Compiler::find_for(&env, Some(older)) {
        // A compiler that the user names is used whatever its version.
        Ok(other) if env.nvrtc.is_some() => assert_eq!(other.version(), found.version()),
        Ok(other) => assert!(other.version().major <= older.major),
        Err(error) => assert!(error.to_string().contains("newer than the GPU driver's CUDA"), "{error}"),
    }
    let same = Version { major: found.version().major, minor: 0 };
    assert_eq!(Compiler::find_for(&env, Some(same)).unwrap().version(), found.version());
}
