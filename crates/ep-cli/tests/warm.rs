//! `hybrid-ep warm` without a GPU. Where there is no NVRTC the tests that compile say so and pass, unless
//! `HYBRID_EP_REQUIRE_NVRTC=1` asks for one.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use std::io::{self, Write as _};

use common::{Directory, Finished, finish, program, run};
use ep::CudaEnv;
use ep_cuda::jit::{Arch, Compiler};

/// The program with the compiler of this environment, and its cache in this directory.
fn warm(cache: &str, arguments: &[&str]) -> Finished {
    let mut command = program();
    command.args(["warm"]).args(arguments).env("HYBRID_EP_CACHE_DIR", cache);
    if let Some(nvrtc) = std::env::var_os("HYBRID_EP_NVRTC") {
        command.env("HYBRID_EP_NVRTC", nvrtc);
    }
    finish(command.spawn().unwrap())
}

/// Whether there is a compiler; `false` where it is allowed that there is none.
fn compiler_found() -> bool {
    match Compiler::find(&CudaEnv::from_env()) {
        Ok(_) => true,
        Err(error) if std::env::var("HYBRID_EP_REQUIRE_NVRTC").as_deref() == Ok("1") => panic!("{error}"),
        Err(error) => {
            // Past the harness, which shows what a test that passes prints to nobody.
            let _ = writeln!(io::stderr(), "skipped: no NVRTC ({error})");
            false
        }
    }
}

#[test]
fn a_second_run_finds_all_that_the_first_compiled() {
    if !compiler_found() {
        return;
    }
    let directory = Directory::new("warm");
    let cache = directory.file("cache");
    let cold = warm(&cache, &["--arch", "sm_90a"]).succeeded();
    let kernels = std::fs::read_dir(&cache).unwrap().count();
    // A preprocessing, two dispatches, four combines, and the pause of benchmarks.
    assert!(kernels >= 8, "{cold:?}");
    let said = format!("{kernels} kernels for sm_90a: {kernels} compiled, 0 found, in ");
    assert!(cold.stdout.contains(&said), "{cold:?}");
    assert!(cold.stdout.contains(&format!("kept in {cache}: {kernels} programs, ")), "{cold:?}");
    assert_eq!(cold.stdout.matches("compiled in ").count(), kernels, "{cold:?}");

    // No compiler is needed any more.
    let again = |remove: Option<std::path::PathBuf>| {
        if let Some(file) = remove {
            std::fs::remove_file(file).unwrap();
        }
        let mut command = program();
        command.args(["warm", "--arch", "sm_90a"]).env("HYBRID_EP_CACHE_DIR", &cache);
        finish(command.env("HYBRID_EP_NVRTC", "/nowhere/libnvrtc.so.13").spawn().unwrap())
    };
    let found = again(None).succeeded();
    let said = format!("{kernels} kernels for sm_90a: 0 compiled, {kernels} found, in ");
    assert!(found.stdout.contains(&said), "{found:?}");
    // Until something is missing.
    let first = std::fs::read_dir(&cache).unwrap().next().unwrap().unwrap().path();
    again(Some(first)).refused(2, &["/nowhere/libnvrtc.so.13", "pip install nvidia-cuda-nvrtc"]);
}

#[test]
fn without_a_place_to_keep_kernels_there_is_nothing_to_warm() {
    let directory = Directory::new("warm-nowhere");
    let file = directory.file("file");
    std::fs::write(&file, "").unwrap();
    warm(&file, &["--arch", "sm_80"]).refused(2, &["keeping compiled kernels", &file, "HYBRID_EP_CACHE_DIR"]);
    let mut command = program();
    command.args(["warm", "--arch", "sm_80"]).env_remove("HOME").env_remove("XDG_CACHE_HOME");
    finish(command.spawn().unwrap()).refused(2, &["nor HOME is set", "set HYBRID_EP_CACHE_DIR"]);
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
fn without_a_gpu_the_cause_is_told() {
    // Where there is one, all of this would run.
    let Err(missing) = ep_cuda::check_available() else { return };
    run(&["warm"]).refused(2, &[&missing.to_string()]);
}
