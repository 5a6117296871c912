//! Finds shared libraries as a dynamic loader would, without loading them.

use std::{collections::BTreeSet, path::PathBuf};

use super::probe::Probe;

/// Library directories of Linux distributions, GPU containers, WSL and the EFA installer.
const STANDARD_DIRS: [&str; 18] = [
    "/usr/local/lib",
    "/usr/local/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/lib64",
    "/lib",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/local/cuda/compat",
    "/opt/amazon/efa/lib64",
    "/opt/amazon/efa/lib",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/run/opengl-driver/lib",
];

const LOADER_CONFIG_DIR: &str = "/etc/ld.so.conf.d";

/// Library directories of a CUDA toolkit.
const TOOLKIT_LIB_DIRS: [&str; 4] = ["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"];

/// Directories below a Python package directory to which `pip` installs NVRTC.
const WHEEL_LIB_DIRS: [&str; 2] = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"];

/// The directories that a dynamic loader searches, in its order.
pub(super) fn loader_dirs(probe: &Probe) -> Vec<String> {
    let from_env = probe.var("LD_LIBRARY_PATH").unwrap_or_default();
    // A relative entry depends on the current directory, so it says nothing about the machine.
    let from_env = from_env.split(':').filter(|dir| dir.starts_with('/'));
    let standard = STANDARD_DIRS.into_iter();
    from_env.map(str::to_owned).chain(configured_dirs(probe)).chain(standard.map(str::to_owned)).collect()
}

/// The directories that may hold a run-time compiler: those of CUDA toolkits and Python packages, and the loader's.
pub(super) fn nvrtc_dirs(probe: &Probe) -> Vec<String> {
    let mut dirs = Vec::new();
    for toolkit in toolkits(probe) {
        dirs.extend(TOOLKIT_LIB_DIRS.map(|dir| format!("{toolkit}/{dir}")));
    }
    for packages in python_package_dirs(probe) {
        dirs.extend(WHEEL_LIB_DIRS.map(|dir| format!("{packages}/{dir}")));
    }
    dirs.extend(loader_dirs(probe));
    dirs
}

/// Every file in `dirs` with one of these names, in the order of the directories. A file with two paths (`/lib` is
/// often a link to `/usr/lib`) counts once.
pub(super) fn find_all(probe: &Probe, dirs: &[String], names: &[&str]) -> Vec<String> {
    let mut seen: BTreeSet<PathBuf> = BTreeSet::new();
    let mut found = Vec::new();
    for dir in dirs {
        for name in names {
            let path = format!("{}/{name}", dir.trim_end_matches('/'));
            let file = probe.resolve(&path);
            // Skips dead links, which removed drivers leave behind.
            if file.is_file() && seen.insert(file.canonicalize().unwrap_or(file)) {
                found.push(path);
            }
        }
    }
    found
}

/// Directories that the system's loader configuration adds.
fn configured_dirs(probe: &Probe) -> Vec<String> {
    let files = probe.names_where(LOADER_CONFIG_DIR, |name| name.ends_with(".conf"));
    let mut dirs = Vec::new();
    for file in files {
        if let Some(text) = probe.text(&format!("{LOADER_CONFIG_DIR}/{file}")).known() {
            let lines = text.lines().map(str::trim);
            dirs.extend(lines.filter(|line| line.starts_with('/')).map(str::to_owned));
        }
    }
    dirs
}

/// Directories of CUDA toolkits: those that variables name, then those in the usual place.
fn toolkits(probe: &Probe) -> Vec<String> {
    let named = ["CUDA_HOME", "CUDA_PATH"].into_iter();
    let named = named.filter_map(|name| probe.var(name)).map(str::to_owned);
    let versions = probe.names_where("/usr/local", |name| name.starts_with("cuda-"));
    named
        .chain(["/usr/local/cuda".to_owned()])
        // Newest first.
        .chain(versions.iter().rev().map(|name| format!("/usr/local/{name}")))
        .collect()
}

/// Directories of Python packages.
fn python_package_dirs(probe: &Probe) -> Vec<String> {
    let mut dirs = Vec::new();
    for prefix in python_prefixes(probe) {
        for lib in ["lib", "lib64"] {
            let lib = format!("{prefix}/{lib}");
            for python in probe.names_where(&lib, |name| name.starts_with("python3")) {
                dirs.push(format!("{lib}/{python}/site-packages"));
                dirs.push(format!("{lib}/{python}/dist-packages"));
            }
        }
    }
    dirs
}

/// Prefixes of Python installations: active environments, those on the `PATH`, the system's and the user's.
fn python_prefixes(probe: &Probe) -> Vec<String> {
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter();
    let active = active.filter_map(|name| probe.var(name)).map(str::to_owned);
    let on_path = probe.var("PATH").unwrap_or_default();
    let on_path = on_path
        .split(':')
        .filter(|dir| dir.starts_with('/'))
        .filter(|dir| probe.exists(&format!("{dir}/python3")))
        .filter_map(|dir| dir.trim_end_matches('/').strip_suffix("/bin"))
        .map(str::to_owned);
    let user = probe.var("HOME").map(|home| format!("{home}/.local"));
    let mut prefixes: Vec<String> = Vec::new();
    for prefix in active.chain(on_path).chain(["/usr/local".to_owned(), "/usr".to_owned()]).chain(user) {
        if !prefixes.contains(&prefix) {
            prefixes.push(prefix);
        }
    }
    prefixes
}
