//! The candidates for the library of the run-time compiler, in search order.

use std::cmp::Reverse;
use std::fs;
use std::path::{Path, PathBuf};

use ep::CudaEnv;

/// The library's names, the newest first. The last is a toolkit's symbolic link to a library of any version.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// Directories of the wheels for CUDA 13 and CUDA 12, below a directory of Python packages.
const WHEEL_DIRS: [&str; 2] = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"];

/// Directories below a toolkit.
const TOOLKIT_DIRS: [&str; 4] = ["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"];

/// The default directory of the system's toolkit.
const SYSTEM_TOOLKIT: &str = "/usr/local/cuda";

/// Where a run-time compiler may be installed.
#[derive(Debug, PartialEq)]
pub(super) struct Candidate {
    /// The name in errors.
    pub(super) name: String,
    /// What to load, in order: existing files, or bare names for the dynamic loader.
    pub(super) files: Vec<PathBuf>,
}

/// All candidates in search order. A candidate that the user names is the only one.
pub(super) fn candidates(env: &CudaEnv) -> Vec<Candidate> {
    if let Some(named) = &env.nvrtc {
        let files = if named.is_dir() { libraries_in(named) } else { vec![named.clone()] };
        return vec![Candidate { name: format!("{} (HYBRID_EP_NVRTC)", named.display()), files }];
    }
    // A library that is already loaded, for example by PyTorch, is found by its bare name, too.
    let loader =
        Candidate { name: "the dynamic loader".into(), files: NAMES.iter().map(PathBuf::from).collect() };
    let python = env.python_roots.iter().map(|root| Candidate {
        name: format!("Python in {}", root.display()),
        files: package_dirs(root).iter().flat_map(|dir| libraries_below(dir, &WHEEL_DIRS)).collect(),
    });
    let toolkits = env.cuda_home.iter().map(PathBuf::as_path).chain([Path::new(SYSTEM_TOOLKIT)]);
    let toolkits = toolkits.map(|toolkit| Candidate {
        name: toolkit.display().to_string(),
        files: libraries_below(toolkit, &TOOLKIT_DIRS),
    });
    std::iter::once(loader).chain(python).chain(toolkits).collect()
}

fn libraries_below(root: &Path, dirs: &[&str]) -> Vec<PathBuf> {
    dirs.iter().flat_map(|dir| libraries_in(&root.join(dir))).collect()
}

fn libraries_in(dir: &Path) -> Vec<PathBuf> {
    NAMES.iter().map(|name| dir.join(name)).filter(|file| file.is_file()).collect()
}

/// The directories of Python packages of a root: the root itself, and those of the Pythons installed below it.
fn package_dirs(root: &Path) -> Vec<PathBuf> {
    let mut dirs = vec![root.to_owned()];
    for lib in ["lib", "lib64"].map(|lib| root.join(lib)) {
        for python in pythons_in(&lib) {
            dirs.extend(["site-packages", "dist-packages"].map(|packages| python.join(packages)));
        }
    }
    dirs
}

/// The directories `python3` and `python3.*`, the newest version first.
fn pythons_in(lib: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(lib).into_iter().flatten().flatten();
    let mut pythons: Vec<(u32, PathBuf)> = entries
        .filter_map(|entry| {
            let name = entry.file_name();
            let minor = name.to_str()?.strip_prefix("python3")?;
            Some((minor.strip_prefix('.').unwrap_or(minor).parse().unwrap_or(0), entry.path()))
        })
        .collect();
    pythons.sort_by_key(|(minor, path)| (Reverse(*minor), path.clone()));
    pythons.into_iter().map(|(_, path)| path).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jit::scratch::Scratch;

    #[test]
    fn candidates_are_searched_in_order() {
        let dir = Scratch::new();
        for file in [
            "venv/lib/python3.9/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
            "venv/lib/python3.12/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
            "venv/lib/python3.12/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.alt.so.12",
            "venv/lib/python3.12/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc-builtins.so.12.9",
            "usr/lib/python3/dist-packages/nvidia/cu13/lib/libnvrtc.so.13",
            "target/nvidia/cu13/lib/libnvrtc.so.13",
            "cuda/lib64/libnvrtc.so",
            "cuda/lib64/libnvrtc.so.12",
            "cuda/targets/x86_64-linux/lib/libnvrtc.so.13",
        ] {
            dir.write(file, "");
        }
        let env = CudaEnv {
            python_roots: ["venv", "gone", "target", "usr"].map(|root| dir.path(root)).into(),
            cuda_home: Some(dir.path("cuda")),
            ..CudaEnv::default()
        };
        let candidates = candidates(&env);
        assert_eq!(candidates[0].files, NAMES.map(PathBuf::from));
        let found: Vec<Vec<PathBuf>> =
            candidates[1..6].iter().map(|candidate| candidate.files.clone()).collect();
        let expected = [
            &[
                "venv/lib/python3.12/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
                "venv/lib/python3.9/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
            ][..],
            &[],
            &["target/nvidia/cu13/lib/libnvrtc.so.13"],
            &["usr/lib/python3/dist-packages/nvidia/cu13/lib/libnvrtc.so.13"],
            &[
                "cuda/lib64/libnvrtc.so.12",
                "cuda/lib64/libnvrtc.so",
                "cuda/targets/x86_64-linux/lib/libnvrtc.so.13",
            ],
        ];
        let expected = expected.map(|files| files.iter().map(|file| dir.path(file)).collect::<Vec<_>>());
        assert_eq!(found, expected);
        assert_eq!(candidates[2].name, format!("Python in {}", dir.path("gone").display()));
        assert_eq!(candidates[6].name, SYSTEM_TOOLKIT);
        assert_eq!(candidates.len(), 7);
    }

    #[test]
    fn a_candidate_named_by_the_user_is_the_only_one() {
        let dir = Scratch::new();
        dir.write("own/libnvrtc.so.12", "");
        dir.write("venv/nvidia/cu13/lib/libnvrtc.so.13", "");
        let files = |named: &str| {
            let env = CudaEnv {
                nvrtc: Some(dir.path(named)),
                python_roots: vec![dir.path("venv")],
                ..CudaEnv::default()
            };
            let mut candidates = candidates(&env);
            assert_eq!(candidates.len(), 1);
            candidates.remove(0).files
        };
        assert_eq!(files("own"), [dir.path("own/libnvrtc.so.12")]);
        assert_eq!(files("gone/libnvrtc.so"), [dir.path("gone/libnvrtc.so")]);
    }
}
