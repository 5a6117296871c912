//! Where the compiler of GPU kernels is looked for, and where compiled kernels are kept.

use std::ffi::OsString;
use std::path::PathBuf;

/// Where to look for NVRTC, the run-time compiler of GPU kernels, and where to cache compiled kernels.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CudaEnv {
    /// The NVRTC library, or its directory. If set, no other compiler is used. `HYBRID_EP_NVRTC`.
    pub nvrtc: Option<PathBuf>,
    /// Directory of the kernel cache: `HYBRID_EP_KERNEL_CACHE`, else `hybrid-ep` in `XDG_CACHE_HOME`, else in
    /// `HOME/.cache`. `None`: compiled kernels live as long as the process.
    pub cache_dir: Option<PathBuf>,
    /// Directory of a CUDA toolkit. `CUDA_HOME`, else `CUDA_PATH`.
    pub cuda_home: Option<PathBuf>,
    /// Directories to search for Python packages, most likely first. The packages are in the directory itself or in its
    /// `lib/python3.*/site-packages`.
    pub python_roots: Vec<PathBuf>,
}

impl CudaEnv {
    /// Reads the variables that the fields name and, for [`python_roots`](Self::python_roots), `VIRTUAL_ENV`,
    /// `CONDA_PREFIX`, `PYTHONPATH`, `PYTHONHOME`, `PATH` and `HOME`. A variable that is set but empty counts as not
    /// set.
    pub fn from_env() -> Self {
        Self::from_lookup(|key| std::env::var_os(key))
    }

    fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> Self {
        let path = |key: &str| lookup(key).filter(|value| !value.is_empty()).map(PathBuf::from);
        // The XDG Base Directory Specification says to ignore relative paths.
        let caches = || {
            let xdg = path("XDG_CACHE_HOME").filter(|dir| dir.is_absolute());
            xdg.or_else(|| Some(path("HOME")?.join(".cache")))
        };
        Self {
            nvrtc: path("HYBRID_EP_NVRTC"),
            cache_dir: path("HYBRID_EP_KERNEL_CACHE").or_else(|| Some(caches()?.join("hybrid-ep"))),
            cuda_home: path("CUDA_HOME").or_else(|| path("CUDA_PATH")),
            python_roots: python_roots(&path),
        }
    }
}

/// The directories in this order: active environments, the directories that Python's variables name, the prefixes of the `bin`
/// directories on the `PATH` (an environment may be used without being activated), the user's packages, the system's.
fn python_roots(path: &impl Fn(&str) -> Option<PathBuf>) -> Vec<PathBuf> {
    let list = |key: &str| -> Vec<PathBuf> {
        path(key).map(|value| std::env::split_paths(&value).collect()).unwrap_or_default()
    };
    let mut roots: Vec<PathBuf> = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(path).collect();
    roots.extend(list("PYTHONPATH"));
    roots.extend(path("PYTHONHOME"));
    for dir in list("PATH") {
        if dir.ends_with("bin") {
            roots.extend(dir.parent().map(PathBuf::from));
        }
    }
    roots.extend(path("HOME").map(|home| home.join(".local")));
    roots.extend(["/usr/local", "/usr"].map(PathBuf::from));
    // The meaning of a relative entry would depend on the current directory.
    roots.retain(|root| root.is_absolute());
    let mut seen = std::collections::BTreeSet::new();
    roots.retain(|root| seen.insert(root.clone()));
    roots
}

#[cfg(test)]
mod tests {
    use super::super::tests::env;
    use super::*;

    fn cuda(pairs: &[(&str, &str)]) -> CudaEnv {
        CudaEnv::from_lookup(|key| env(pairs)(key).map(OsString::from))
    }

    #[test]
    fn the_kernel_cache_is_where_the_user_says_else_in_the_users_cache_directory() {
        let cache = |pairs: &[(&str, &str)]| cuda(pairs).cache_dir;
        let (own, xdg, home) =
            (("HYBRID_EP_KERNEL_CACHE", "/k"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/home/a"));
        assert_eq!(cache(&[own, xdg, home]), Some("/k".into()));
        assert_eq!(cache(&[xdg, home]), Some("/x/hybrid-ep".into()));
        assert_eq!(cache(&[home]), Some("/home/a/.cache/hybrid-ep".into()));
        assert_eq!(cache(&[("XDG_CACHE_HOME", "x"), home]), cache(&[home]));
        assert_eq!(cache(&[("HYBRID_EP_KERNEL_CACHE", ""), xdg]), cache(&[xdg]));
        assert_eq!(cache(&[]), None);
    }

    #[test]
    fn compilers_are_looked_for_where_python_and_toolkits_are() {
        let found = cuda(&[
            ("HYBRID_EP_NVRTC", "/n/libnvrtc.so.13"),
            ("CUDA_PATH", "/cuda"),
            ("VIRTUAL_ENV", "/venv"),
            ("PYTHONPATH", "/packages:relative:"),
            ("PATH", "/usr/bin:/venv/bin:/opt/conda/bin:/opt/tools"),
            ("HOME", "/home/a"),
        ]);
        assert_eq!(found.nvrtc, Some("/n/libnvrtc.so.13".into()));
        assert_eq!(found.cuda_home, Some("/cuda".into()));
        let roots = ["/venv", "/packages", "/usr", "/opt/conda", "/home/a/.local", "/usr/local"];
        assert_eq!(found.python_roots, roots.map(PathBuf::from));
        let both = cuda(&[("CUDA_HOME", "/a"), ("CUDA_PATH", "/b")]);
        assert_eq!(both.cuda_home, Some("/a".into()));
        assert_eq!(both.python_roots, ["/usr/local", "/usr"].map(PathBuf::from));
    }
}
