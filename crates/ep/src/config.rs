//! Every tunable, with its unit, default and range; the only reader of the environment.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use crate::error::{CallerError, Result};

/// Tunables of a communicator. The defaults suit most uses; every rank must use the same chunk and slot
/// values.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Config {
    /// Worker threads of this rank. 0 = cores of the machine divided by the ranks on it. `HYBRID_EP_WORKERS`, 0..=256.
    pub workers: usize,
    /// A wait without any progress for this long is an error that names the peer. `HYBRID_EP_TIMEOUT_MS`, 1 ms to 1 day.
    pub timeout: Duration,
    /// Tokens that move through the stages as a unit, at most; fewer where a slot is too small for as many. On GPUs 4, or
    /// fewer where a rank has less than 1024, if this is not less still; and more where there would be over 1024 chunks.
    /// `HYBRID_EP_CHUNK_TOKENS`, 1..=65,536.
    pub chunk_tokens: usize,
    /// Bytes of one slot of the scale-out window: the largest message between domains. `HYBRID_EP_SLOT_BYTES`, 4 KiB..=1 GiB.
    pub slot_bytes: usize,
    /// Messages in flight per pair of domains and direction. `HYBRID_EP_SLOTS`, 1..=1,024.
    pub slots: usize,
    /// Whether a rank may write into a peer's window in place where the engine lends it. Off, every message is packed
    /// here and then carried, as over a network. `HYBRID_EP_LEND`, 0 or 1.
    pub lend: bool,
    /// Outputs larger than this many bytes a rank are written past the caches. `HYBRID_EP_STREAMING_BYTES`, any.
    pub streaming_bytes: usize,
    /// SMs that dispatch and combine of the CUDA backend run on. 0 = chosen by the backend. `HYBRID_EP_SMS`, 0..=1,024.
    pub sms: usize,
    /// Whether the CUDA backend copies rows by plain loads and stores, as on GPUs without a bulk copy engine.
    /// `HYBRID_EP_PLAIN_COPIES`, 0 or 1.
    pub plain_copies: bool,
    /// Streams of one process that the CUDA driver runs at once on a GPU, as it was told.
    /// `CUDA_DEVICE_MAX_CONNECTIONS`, 1..=32.
    pub device_connections: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            workers: 0,
            timeout: Duration::from_secs(30),
            chunk_tokens: 64,
            slot_bytes: 128 << 10,
            slots: 16,
            lend: true,
            streaming_bytes: 4 << 20,
            sms: 0,
            plain_copies: false,
            device_connections: 8,
        }
    }
}

impl Config {
    /// The defaults, overridden by the environment variables that are set.
    ///
    /// # Errors
    /// [`CallerError::Config`] for a variable that is no number or out of range.
    pub fn from_env() -> Result<Self> {
        Self::from_lookup(|key| std::env::var(key).ok())
    }

    /// Checks what a program may have set and no backend can work with.
    ///
    /// # Errors
    /// [`CallerError::Config`].
    pub fn check(&self) -> Result<()> {
        if self.slots == 0 || self.slots > 1024 || self.chunk_tokens == 0 {
            return Err(CallerError::Config {
                key: "slots, chunk_tokens",
                value: format!("{}, {}", self.slots, self.chunk_tokens),
                problem: "slots must be 1..=1024, chunk_tokens at least 1".into(),
            }
            .into());
        }
        Ok(())
    }

    fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let read = |key: &'static str, default: usize, min: usize, max: usize| -> Result<usize> {
            let Some(value) = lookup(key) else { return Ok(default) };
            match value.trim().parse() {
                Ok(number) if (min..=max).contains(&number) => Ok(number),
                _ => Err(CallerError::Config {
                    key,
                    value,
                    problem: format!("must be a whole number from {min} to {max}"),
                }
                .into()),
            }
        };
        let default = Self::default();
        let timeout_ms = default.timeout.as_millis() as usize;
        Ok(Self {
            workers: read("HYBRID_EP_WORKERS", default.workers, 0, 256)?,
            timeout: Duration::from_millis(read("HYBRID_EP_TIMEOUT_MS", timeout_ms, 1, 86_400_000)? as u64),
            chunk_tokens: read("HYBRID_EP_CHUNK_TOKENS", default.chunk_tokens, 1, 1 << 16)?,
            slot_bytes: read("HYBRID_EP_SLOT_BYTES", default.slot_bytes, 4 << 10, 1 << 30)?
                .next_multiple_of(64),
            slots: read("HYBRID_EP_SLOTS", default.slots, 1, 1024)?,
            lend: read("HYBRID_EP_LEND", default.lend.into(), 0, 1)? == 1,
            streaming_bytes: read("HYBRID_EP_STREAMING_BYTES", default.streaming_bytes, 0, usize::MAX)?,
            sms: read("HYBRID_EP_SMS", default.sms, 0, 1024)?,
            plain_copies: read("HYBRID_EP_PLAIN_COPIES", default.plain_copies.into(), 0, 1)? == 1,
            device_connections: read("CUDA_DEVICE_MAX_CONNECTIONS", default.device_connections, 1, 32)?,
        })
    }
}

/// Where this process stands among its peers, as `torchrun` or SLURM says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchEnv {
    /// This process's rank.
    pub rank: u32,
    /// Number of processes.
    pub world_size: u32,
    /// `host:port` where rank 0 gathers the others.
    pub store: String,
}

impl LaunchEnv {
    /// Reads `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` (torchrun), or `SLURM_PROCID` and `SLURM_NTASKS`.
    /// The store listens on `MASTER_PORT` + 1, since torchrun keeps `MASTER_PORT` to itself; `HYBRID_EP_STORE`
    /// (`host:port`) overrides it. A lone rank needs neither. `None` when neither launcher left its variables.
    ///
    /// # Errors
    /// [`CallerError::Config`] for a variable that is missing beside the others, or malformed.
    pub fn from_env() -> Result<Option<Self>> {
        Self::from_lookup(|key| std::env::var(key).ok())
    }

    fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let (rank_key, size_key) = match (lookup("RANK"), lookup("SLURM_PROCID")) {
            (Some(_), _) => ("RANK", "WORLD_SIZE"),
            (None, Some(_)) => ("SLURM_PROCID", "SLURM_NTASKS"),
            (None, None) => return Ok(None),
        };
        let config = |key, value: Option<String>, problem: String| CallerError::Config {
            key,
            value: value.unwrap_or_else(|| "(not set)".into()),
            problem,
        };
        let number = |key: &'static str, max: u32| -> Result<u32> {
            let value = lookup(key);
            match value.as_deref().map(str::trim).map(str::parse) {
                Some(Ok(number)) if number <= max => Ok(number),
                _ => Err(config(key, value, format!("must be a whole number up to {max}")).into()),
            }
        };
        let world_size = number(size_key, 1 << 20)?;
        let rank = number(rank_key, 1 << 20)?;
        if rank >= world_size {
            return Err(config(
                rank_key,
                Some(rank.to_string()),
                format!("must be below {size_key} = {world_size}"),
            )
            .into());
        }
        let store = match (lookup("HYBRID_EP_STORE"), lookup("MASTER_PORT")) {
            (Some(store), _) => store,
            // A port of the system's choice: nobody asks for it.
            (None, None) if world_size == 1 => "127.0.0.1:0".into(),
            (None, None) => {
                let problem = match rank_key {
                    "RANK" => "is needed beside RANK, or HYBRID_EP_STORE=host:port",
                    _ => {
                        "is needed, and SLURM does not set it: export it in the job's script, or HYBRID_EP_STORE=host:port"
                    }
                };
                return Err(config("MASTER_PORT", None, problem.into()).into());
            }
            (None, Some(_)) => {
                let host = lookup("MASTER_ADDR").unwrap_or_else(|| "127.0.0.1".into());
                format!("{host}:{}", number("MASTER_PORT", 65_534)? + 1)
            }
        };
        Ok(Some(Self { rank, world_size, store }))
    }
}

/// Where the run-time compiler of GPU kernels (NVRTC) may lie, and where compiled kernels are kept.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CudaEnv {
    /// The compiler to take, and no other: the library, or the directory that it is in. `HYBRID_EP_NVRTC`.
    pub nvrtc: Option<PathBuf>,
    /// Where compiled kernels are kept. `HYBRID_EP_CACHE_DIR`, else `hybrid-ep` in `XDG_CACHE_HOME`, else in
    /// `HOME/.cache`. `None`: they live as long as the process.
    pub cache_dir: Option<PathBuf>,
    /// A CUDA toolkit. `CUDA_HOME`, else `CUDA_PATH`.
    pub cuda_home: Option<PathBuf>,
    /// Directories that may hold Python packages, either themselves or in their `lib/python3.*/site-packages`, the
    /// likeliest first.
    pub python_roots: Vec<PathBuf>,
}

impl CudaEnv {
    /// Reads the variables above and, for Python, `VIRTUAL_ENV`, `CONDA_PREFIX`, `PYTHONPATH`, `PYTHONHOME`, `PATH`
    /// and `HOME`. A variable that is set but empty counts as not set.
    pub fn from_env() -> Self {
        Self::from_lookup(|key| std::env::var_os(key))
    }

    fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> Self {
        let path = |key: &str| lookup(key).filter(|value| !value.is_empty()).map(PathBuf::from);
        // The XDG specification wants relative paths ignored.
        let caches = || {
            let xdg = path("XDG_CACHE_HOME").filter(|dir| dir.is_absolute());
            xdg.or_else(|| Some(path("HOME")?.join(".cache")))
        };
        Self {
            nvrtc: path("HYBRID_EP_NVRTC"),
            cache_dir: path("HYBRID_EP_CACHE_DIR").or_else(|| Some(caches()?.join("hybrid-ep"))),
            cuda_home: path("CUDA_HOME").or_else(|| path("CUDA_PATH")),
            python_roots: python_roots(&path),
        }
    }
}

/// Active environments, then what Python itself is told to search, then the prefixes of the programs on the `PATH`
/// (an environment that is used without being activated), the user's packages and the system's.
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
    // A relative entry would depend on where the program happens to be started.
    roots.retain(|root| root.is_absolute());
    let mut seen = std::collections::BTreeSet::new();
    roots.retain(|root| seen.insert(root.clone()));
    roots
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env<'a>(pairs: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<String> + 'a {
        move |key| pairs.iter().find(|(k, _)| *k == key).map(|(_, v)| v.to_string())
    }

    #[test]
    fn what_no_backend_can_work_with_is_refused() {
        assert_eq!(Config::default().check(), Ok(()));
        for spoil in [
            |config: &mut Config| config.slots = 0,
            |config: &mut Config| config.slots = 1025,
            |config: &mut Config| config.chunk_tokens = 0,
        ] {
            let mut config = Config::default();
            spoil(&mut config);
            assert!(matches!(config.check(), Err(crate::Error::Caller(CallerError::Config { .. }))));
        }
    }

    #[test]
    fn environment_overrides_defaults() {
        assert_eq!(Config::from_lookup(env(&[])).unwrap(), Config::default());
        let config =
            Config::from_lookup(env(&[("HYBRID_EP_TIMEOUT_MS", "1500"), ("HYBRID_EP_SLOTS", " 2 ")]))
                .unwrap();
        assert_eq!(config, Config { timeout: Duration::from_millis(1500), slots: 2, ..Config::default() });
    }

    #[test]
    fn bad_settings_are_named() {
        for (key, value) in
            [("HYBRID_EP_SLOTS", "0"), ("HYBRID_EP_WORKERS", "many"), ("HYBRID_EP_TIMEOUT_MS", "-1")]
        {
            let message = Config::from_lookup(env(&[(key, value)])).unwrap_err().to_string();
            assert!(
                message.starts_with(&format!("{key} = {value}: must be a whole number from")),
                "{message}"
            );
        }
    }

    #[test]
    fn launchers_are_understood() {
        assert_eq!(LaunchEnv::from_lookup(env(&[])).unwrap(), None);
        let torchrun =
            [("RANK", "1"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")];
        let found = LaunchEnv::from_lookup(env(&torchrun)).unwrap().unwrap();
        assert_eq!(found, LaunchEnv { rank: 1, world_size: 4, store: "localhost:29501".into() });
        let slurm = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2"), ("HYBRID_EP_STORE", "node1:77")];
        assert_eq!(LaunchEnv::from_lookup(env(&slurm)).unwrap().unwrap().store, "node1:77");
        let message = |pairs| LaunchEnv::from_lookup(env(pairs)).unwrap_err().to_string();
        assert!(message(&[("RANK", "0")]).contains("WORLD_SIZE = (not set)"));
        assert!(message(&[("RANK", "4"), ("WORLD_SIZE", "4")]).contains("must be below WORLD_SIZE = 4"));
        assert!(
            message(&[("RANK", "0"), ("WORLD_SIZE", "4")]).contains("MASTER_PORT = (not set): is needed")
        );
        let slurm = message(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")]);
        assert!(
            slurm.contains("MASTER_PORT = (not set)") && slurm.contains("SLURM does not set it"),
            "{slurm}"
        );
        let port = message(&[("RANK", "0"), ("WORLD_SIZE", "4"), ("MASTER_PORT", "x")]);
        assert!(port.contains("MASTER_PORT = x: must be a whole number"), "{port}");
        // Nobody else looks for a lone rank.
        let alone = LaunchEnv::from_lookup(env(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1")])).unwrap();
        assert_eq!(alone.unwrap().store, "127.0.0.1:0");
    }

    fn cuda(pairs: &[(&str, &str)]) -> CudaEnv {
        CudaEnv::from_lookup(|key| env(pairs)(key).map(OsString::from))
    }

    #[test]
    fn kernels_are_kept_where_the_user_says_or_caches_belong() {
        let cache = |pairs: &[(&str, &str)]| cuda(pairs).cache_dir;
        let (own, xdg, home) = (("HYBRID_EP_CACHE_DIR", "/k"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/home/a"));
        assert_eq!(cache(&[own, xdg, home]), Some("/k".into()));
        assert_eq!(cache(&[xdg, home]), Some("/x/hybrid-ep".into()));
        assert_eq!(cache(&[home]), Some("/home/a/.cache/hybrid-ep".into()));
        assert_eq!(cache(&[("XDG_CACHE_HOME", "x"), home]), cache(&[home]));
        assert_eq!(cache(&[("HYBRID_EP_CACHE_DIR", ""), xdg]), cache(&[xdg]));
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
