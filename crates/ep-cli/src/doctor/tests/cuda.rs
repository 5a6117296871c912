//! These tests check what the report says about the CUDA driver, the kernel compiler and the kernel cache.

use super::{FakeMachine, assert_sound, find, gpu_server, h200s, known, no_cuda};
use crate::doctor::{
    check::Mark,
    cuda::{Cuda, CudaGpu, KernelCache},
    fact::Fact,
};

fn old_driver() -> Cuda {
    let problem = "the driver supports CUDA 11.8, and 12.0 is needed";
    Cuda { driver_supports: known("11.8"), driver_problem: Some(problem.to_owned()), ..h200s(2) }
}

#[test]
fn a_missing_driver_and_compiler_are_reported_with_advice() {
    let report = FakeMachine::new().linux().examine();
    assert_sound(&report);
    assert_eq!(find(&report, "CUDA driver").mark, Mark::Absent);
    let compiler = find(&report, "kernel compiler");
    assert_eq!(compiler.mark, Mark::Absent);
    assert!(compiler.found.contains("looked at everything"));
    assert!(compiler.how.as_ref().unwrap().contains("pip install nvidia-cuda-nvrtc"));
    assert_eq!(find(&report, "kernel cache").found, "/home/a/.cache/hybrid-ep: 0 programs, 8 GiB free");
    assert_eq!(report.verdict.problems, 0);
    let json = serde_json::to_value(&report.cuda).unwrap();
    assert!(json["gpus"].is_null() && json["nvrtc"].is_null());
}

#[test]
fn the_answers_of_the_driver_are_reported() {
    let mut machine = gpu_server();
    machine.cuda = h200s(8);
    let report = machine.examine();
    assert_sound(&report);
    assert_eq!(find(&report, "CUDA driver").found, "CUDA 13.0, 8 GPUs");
    assert_eq!(
        find(&report, "CUDA GPU 7").found,
        "NVIDIA H200, compute capability 9.0 (kernels for sm_90a), 132 SMs, 140 GiB"
    );
    assert_eq!(
        find(&report, "peer access").found,
        "between all 8 GPUs, with atomic operations on every link (NVLink)"
    );
    let fabric = find(&report, "fabric handles");
    assert_eq!(
        (fabric.mark, fabric.found.as_str()),
        (Mark::Absent, "offered by the driver, never run by us; no channel of nvidia-imex")
    );
    assert_eq!(find(&report, "kernel compiler").found, "NVRTC 13.0, /venv/libnvrtc.so.13");
    assert_eq!(
        find(&report, "kernel cache").found,
        "/home/a/.cache/hybrid-ep: 3 programs, 96 KiB, 8 GiB free"
    );
    let json = serde_json::to_value(&report.cuda).unwrap();
    assert_eq!(json["gpus"][0]["offers_fabric"], true);
    assert_eq!(json["peer_links"][1][1], "own");
    assert_eq!(json["gpus"][0]["architecture"], "sm_90a");
}

#[test]
fn the_cuda_backend_is_ready_if_nothing_is_missing() {
    let state = |cuda: Cuda| {
        let mut machine = gpu_server();
        machine.cuda = cuda;
        let report = machine.examine();
        assert_sound(&report);
        let check = find(&report, "cuda").clone();
        assert_eq!(report.verdict.text.contains("; cuda ready on "), check.mark == Mark::Ok);
        let json = serde_json::to_value(&report.backends[1]).unwrap();
        assert_eq!(json["state"], if check.mark == Mark::Ok { "ready" } else { "missing" });
        assert_eq!(json["found"], check.found);
        (check.mark, check.found)
    };
    let without_compiler = |entries| Cuda {
        nvrtc: Fact::Absent,
        kernel_cache: KernelCache { entries, ..no_cuda().kernel_cache },
        ..h200s(2)
    };
    let Fact::Known(mut gpus) = h200s(2).gpus else { panic!("no GPUs") };
    gpus[1].architecture = None;
    let unsupported = Cuda { gpus: Fact::Known(gpus), ..h200s(2) };
    for (cuda, mark, found) in [
        (h200s(8), Mark::Ok, "ready on 8 GPUs"),
        (without_compiler(1), Mark::Ok, "ready on 2 GPUs, with 1 program from the cache"),
        (without_compiler(0), Mark::Absent, "no kernel compiler, and no kernel in the cache"),
        (h200s(0), Mark::Absent, "the driver shows no GPU"),
        (unsupported, Mark::Absent, "no kernels for CUDA GPU 1"),
        (old_driver(), Mark::Absent, "the driver supports CUDA 11.8, and 12.0 is needed"),
        (no_cuda(), Mark::Absent, "no GPU driver (libcuda.so.1)"),
    ] {
        assert_eq!(state(cuda), (mark, found.to_owned()));
    }
}

#[test]
fn an_old_driver_is_reported_with_advice() {
    let mut machine = gpu_server();
    machine.cuda = old_driver();
    let report = machine.examine();
    let driver = find(&report, "CUDA driver");
    assert_eq!(driver.mark, Mark::Absent);
    assert!(driver.found.starts_with("CUDA 11.8, 2 GPUs; "), "{}", driver.found);
    assert!(driver.how.as_ref().unwrap().contains("525"), "{driver:?}");
}

#[test]
fn unsupported_gpus_and_missing_links_are_reported() {
    let mut machine = gpu_server();
    let (mut gpus, mut links) = match h200s(3) {
        Cuda { gpus: Fact::Known(gpus), peer_links: Fact::Known(links), .. } => (gpus, links),
        other => panic!("{other:?}"),
    };
    gpus[1] = CudaGpu { compute_capability: "7.5".to_owned(), architecture: None, ..gpus[1].clone() };
    links[0][2] = "plain";
    links[2][1] = "none";
    machine.cuda = Cuda { gpus: Fact::Known(gpus), peer_links: Fact::Known(links), ..h200s(3) };
    let report = machine.examine();
    assert_sound(&report);
    let old = find(&report, "CUDA GPU 1");
    assert_eq!(old.mark, Mark::Absent);
    assert!(old.found.contains("7.5 (no kernels for it)"), "{}", old.found);
    assert!(old.how.as_ref().unwrap().contains("9.0"));
    let peers = find(&report, "peer access");
    assert_eq!(peers.mark, Mark::Absent);
    assert_eq!(peers.found, "missing from GPU to GPU: 2 to 1");

    let Fact::Known(links) = &mut machine.cuda.peer_links else { panic!("no links") };
    links[2][1] = "plain";
    assert_eq!(
        find(&machine.examine(), "peer access").found,
        "between all 3 GPUs, without atomic operations from GPU to GPU: 0 to 2, 2 to 1 (PCI Express)"
    );
    machine.cuda = h200s(1);
    let report = machine.examine();
    assert!(report.sections.iter().flat_map(|s| &s.checks).all(|check| check.name != "peer access"));
}

#[test]
fn a_failing_driver_and_an_unwritable_cache_are_reported() {
    let mut machine = gpu_server();
    let why = || "GPU driver (libcuda.so.1): system not yet initialized (error 802)".to_owned();
    machine.cuda = Cuda {
        driver_supports: Fact::Unknown(why()),
        gpus: Fact::Unknown(why()),
        peer_links: Fact::Unknown(why()),
        ..no_cuda()
    };
    machine.cuda.kernel_cache.problem = Some("/home/a cannot be written to".to_owned());
    let report = machine.examine();
    assert_sound(&report);
    assert!(find(&report, "CUDA driver").found.contains("error 802"));
    let cache = find(&report, "kernel cache");
    assert_eq!(cache.mark, Mark::Absent);
    assert_eq!(cache.found, "0 programs; /home/a cannot be written to");
    assert!(cache.how.as_ref().unwrap().contains("HYBRID_EP_KERNEL_CACHE"));
}
