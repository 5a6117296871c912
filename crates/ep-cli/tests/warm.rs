//! `hybrid-ep warm` without a GPU. Tests that compile are skipped if there is no NVRTC, unless
//! `HYBRID_EP_REQUIRE_NVRTC=1` requires one.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use std::io::{self, Write as _};

use common::{Directory, Finished, finish, program, run};
use ep::CudaEnv;
use ep_cuda::jit::{Arch, Compiler};

/// Runs `warm` with the compiler of this environment and this directory as kernel cache.
fn warm(cache: &str, arguments: &[&str]) -> Finished {
    let mut command = program();
    command.args(["warm"]).args(arguments).env("HYBRID_EP_KERNEL_CACHE", cache);
    if let Some(nvrtc) = std::env::var_os("HYBRID_EP_NVRTC") {
        command.env("HYBRID_EP_NVRTC", nvrtc);
    }
    finish(command.spawn().unwrap())
}

/// Whether there is a compiler. Panics if there is none but one is required.
fn compiler_found() -> bool {
    match Compiler::find(&CudaEnv::from_env()) {
        Ok(_) => true,
        Err(error) if std::env::var("HYBRID_EP_REQUIRE_NVRTC").as_deref() == Ok("1") => panic!("{error}"),
        Err(error) => {
            // Written directly, because the test harness hides the output of tests that pass.
            let _ = writeln!(io::stderr(), "skipped: no NVRTC ({error})");
            false
        }
    }
}

#[test]
fn a_second_run_finds_all_kernels_in_the_cache() {
    if !compiler_found() {
        return;
    }
    let directory = Directory::new("warm");
    let cache = directory.file("cache");
    let cold = warm(&cache, &["--arch", "sm_90a"]).succeeded();
    let kernels = std::fs::read_dir(&cache).unwrap().count();
    // Preprocess, two variants of dispatch, four of combine, and the pause of benchmarks.
    assert!(kernels >= 8, "{cold:?}");
    let said = format!("{kernels} kernels for sm_90a: {kernels} compiled, 0 found in the cache, in ");
    assert!(cold.stdout.contains(&said), "{cold:?}");
    assert!(cold.stdout.contains(&format!("kernel cache {cache}: {kernels} programs, ")), "{cold:?}");
    assert_eq!(cold.stdout.matches("compiled in ").count(), kernels, "{cold:?}");

    // The second run needs no compiler.
    let again = |remove: Option<std::path::PathBuf>| {
        if let Some(file) = remove {
            std::fs::remove_file(file).unwrap();
        }
        let mut command = program();
        command.args(["warm", "--arch", "sm_90a"]).env("HYBRID_EP_KERNEL_CACHE", &cache);
        finish(command.env("HYBRID_EP_NVRTC", "/nowhere/libnvrtc.so.13").spawn().unwrap())
    };
    let found = again(None).succeeded();
    let said = format!("{kernels} kernels for sm_90a: 0 compiled, {kernels} found in the cache, in ");
    assert!(found.stdout.contains(&said), "{found:?}");
    // A missing kernel needs the compiler again.
    let first = std::fs::read_dir(&cache).unwrap().next().unwrap().unwrap().path();
    again(Some(first)).refused(2, &["/nowhere/libnvrtc.so.13", "pip install nvidia-cuda-nvrtc"]);
}

#[test]
fn a_cache_that_cannot_be_used_is_refused() {
    let directory = Directory::new("warm-nowhere");
    let file = directory.file("file");
    std::fs::write(&file, "").unwrap();
    warm(&file, &["--arch", "sm_80"])
        .refused(2, &["keeping compiled kernels", &file, "HYBRID_EP_KERNEL_CACHE"]);
    let mut command = program();
    command.args(["warm", "--arch", "sm_80"]).env_remove("HOME").env_remove("XDG_CACHE_HOME");
    finish(command.spawn().unwrap()).refused(2, &["nor HOME is set", "set HYBRID_EP_KERNEL_CACHE"]);
}

#[test]
fn architectures_without_kernels_are_refused() {
    for arguments in [&["warm", "--arch", "sm_75"][..], &["warm", "--arch", "sm_90a,sm_90"]] {
        let finished = run(arguments);
        assert_eq!(finished.code, Some(2), "{finished:?}");
        for arch in Arch::ALL {
            assert!(finished.stderr.contains(arch.name()), "{finished:?}");
        }
    }
}

#[test]
fn without_a_gpu_the_reason_is_reported() {
    // With a GPU, this would run.
    let Err(missing) = ep_cuda::check_available() else { return };
    run(&["warm"]).refused(2, &[&missing.to_string()]);
}
