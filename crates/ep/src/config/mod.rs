//! The tunables with their units, defaults and ranges.
//!
//! Only this module, `settings` and [`Secret::from_env`](crate::join::Secret::from_env) read environment variables.

mod compiler;
mod launch;

use std::ops::RangeInclusive;
use std::time::Duration;

pub use compiler::CudaEnv;
pub use launch::LaunchEnv;

use crate::error::{CallerError, PeerFault, Result};
use crate::interrupt::Interrupt;
use crate::settings;
use crate::transport::TransportOptions;

/// Tunables of a communicator: those that all backends have, and those of each backend. On the CPU backend, every rank must
/// use the same `chunk_tokens`, `host.slot_bytes`, `host.slots` and engine.
///
/// Each field names the environment variable that [`from_env`](Self::from_env) reads for it, and its range.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
///
/// use ep::Config;
///
/// let mut config = Config::from_env()?;
/// // One rank compiles for up to half an hour before its first operator.
/// config.timeout = Duration::from_secs(30 * 60);
/// config.host.workers = 4;
/// config.check()?;
///
/// config.host.slots = 0;
/// assert_eq!(config.check().unwrap_err().to_string(), "host.slots = 0: must be a whole number from 1 to 1024");
/// # Ok::<(), ep::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Config {
    /// Entry bound: how long a rank waits for a live peer to join or to enter an operator. Must cover a checkpoint or a
    /// compilation on one rank. Default 10 min. `HYBRID_EP_TIMEOUT_MS`, 1 ms to 1 day.
    pub timeout: Duration,
    /// Stall bound: how long a peer inside an operator may make no progress, or its heartbeat may be silent. The
    /// shorter of this and `timeout` applies. Default 30 s. `HYBRID_EP_STALL_TIMEOUT_MS`, 1 ms to 1 day.
    pub stall_timeout: Duration,
    /// Lets the program stop a waiting operator. Default none. Not read from the environment.
    pub interrupt: Interrupt,
    /// Maximum number of tokens of a chunk. Default 64. A chunk has fewer tokens when a slot cannot hold this many. The CUDA
    /// backend uses at most 4 (fewer on a rank with fewer than 1024 tokens), or more if a rank would otherwise have
    /// over 1024 chunks. `HYBRID_EP_CHUNK_TOKENS`, 1..=65,536.
    pub chunk_tokens: usize,
    /// A name for this rank's machine, at most 64 printable characters without spaces. Ranks share memory only if their
    /// names are equal. Default none: the system's identifiers tell machines apart. `HYBRID_EP_MACHINE`.
    pub machine: Option<String>,
    /// Tunables of the host backend.
    pub host: HostConfig,
    /// Tunables of the CUDA backend.
    pub cuda: CudaConfig,
}

/// Tunables of the host backend, a part of [`Config`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostConfig {
    /// Worker threads of this rank; 0 = the machine's cores divided by the ranks on it. Default 0.
    /// `HYBRID_EP_WORKERS`, 0..=256.
    pub workers: usize,
    /// Bytes of one slot, which bounds a message between domains. Default 128 KiB. `HYBRID_EP_SLOT_BYTES`,
    /// 4 KiB..=1 GiB, rounded up to a multiple of 64.
    pub slot_bytes: usize,
    /// Slots, and thus messages in flight, per pair of domains and direction. Default 16. `HYBRID_EP_SLOTS`, 1..=1,024.
    pub slots: usize,
    /// Whether a rank writes messages directly into a peer's window if the engine maps that window
    /// ([`Transport::lend`](crate::Transport::lend)). If false, a rank packs each message in its own window and the
    /// engine carries it, as over a network. Default true. `HYBRID_EP_LEND`, 0 or 1.
    pub lend: bool,
    /// The engine that carries bytes between domains. [`TransportOptions`] names its variables.
    pub transport: TransportOptions,
    /// A rank writes outputs larger than this many bytes with stores that bypass the caches. Default 4 MiB.
    /// `HYBRID_EP_STREAMING_BYTES`, any number.
    pub streaming_bytes: usize,
}

/// Tunables of the CUDA backend, a part of [`Config`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaConfig {
    /// SMs that dispatch and combine use; 0 = the backend chooses. Default 0. `HYBRID_EP_SMS`, 0..=1,024.
    pub sms: usize,
    /// Whether kernels copy rows by plain loads and stores, as on GPUs without a bulk copy engine. Default false.
    /// `HYBRID_EP_PLAIN_COPIES`, 0 or 1.
    pub plain_copies: bool,
    /// Streams of one process that the CUDA driver runs concurrently on a GPU. The driver reads the same variable.
    /// Default 8. `CUDA_DEVICE_MAX_CONNECTIONS`, 1..=32.
    pub device_connections: usize,
    /// Between NVLink domains: maximum number of tokens of a rank. If ranks differ in this field or in one of the next two, the
    /// largest value applies. Default 4,096. `HYBRID_EP_CUDA_RAIL_TOKENS`, 1..=1,048,576.
    pub rail_tokens: usize,
    /// Between NVLink domains: maximum average number of experts of one other domain that a token chooses. Default 8.
    /// `HYBRID_EP_CUDA_RAIL_CHOICES`, 1..=1,024.
    pub rail_choices: usize,
    /// Between NVLink domains: bytes of a lane, which holds the rows that a rank sends to one other domain in an operator.
    /// A rank has four lanes per domain, in pinned host memory or in GPU memory. Default 64 MiB. `HYBRID_EP_CUDA_LANE_BYTES`,
    /// 4 KiB..=16 GiB.
    pub lane_bytes: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(600),
            stall_timeout: Duration::from_secs(30),
            interrupt: Interrupt::default(),
            chunk_tokens: 64,
            machine: None,
            host: HostConfig::default(),
            cuda: CudaConfig::default(),
        }
    }
}

impl Default for HostConfig {
    fn default() -> Self {
        Self {
            workers: 0,
            slot_bytes: 128 << 10,
            slots: 16,
            lend: true,
            transport: TransportOptions::default(),
            streaming_bytes: 4 << 20,
        }
    }
}

impl Default for CudaConfig {
    fn default() -> Self {
        Self {
            sms: 0,
            plain_copies: false,
            device_connections: 8,
            rail_tokens: 4096,
            rail_choices: 8,
            lane_bytes: 64 << 20,
        }
    }
}

impl CudaConfig {
    /// Raises the bounds between NVLink domains, where they are lower, so that a rank may have `tokens` tokens, and rows may
    /// have `hidden` elements of bf16. `None`: nothing is raised for it.
    pub fn raise_rails(&mut self, tokens: Option<usize>, hidden: Option<usize>) {
        const PAGE: usize = 4096;
        self.rail_tokens = self.rail_tokens.max(tokens.unwrap_or(0));
        let Some(hidden) = hidden else { return };
        // A row is rounded up to 16 bytes, and has a weight of 4 bytes for each choice.
        let weights = self.rail_choices.saturating_mul(4);
        let row = hidden.saturating_mul(2).saturating_add(14).saturating_add(weights);
        // Sections of a lane begin at multiples of 128 bytes, and lanes are whole pages.
        let lane = self.rail_tokens.saturating_mul(row).saturating_add(2 * PAGE);
        self.lane_bytes = self.lane_bytes.max(lane / PAGE * PAGE);
    }
}

impl Config {
    /// The defaults, overridden by the environment variables that are set. Names on stderr, once per process, the variables
    /// that begin with `HYBRID_EP_` but are not settings.
    ///
    /// # Errors
    /// [`CallerError::Config`] for a variable that is not a number or is out of range.
    pub fn from_env() -> Result<Self> {
        settings::tell_unknown();
        Self::from_lookup(settings::variable)
    }

    /// The stall bound that applies: the shorter of `stall_timeout` and `timeout`.
    pub fn stall_bound(&self) -> Duration {
        self.stall_timeout.min(self.timeout)
    }

    /// How long the machine of a peer may acknowledge nothing before the peer counts as unreachable: three quarters of the
    /// stall bound, so that such a peer is not reported as stalled.
    pub fn network_timeout(&self) -> Duration {
        self.stall_bound().mul_f64(0.75)
    }

    /// Both bounds in words, and what to do, for the error of a rank whose wait exceeded one of them.
    pub fn bounds(&self, fault: PeerFault) -> String {
        let remedy = match fault {
            PeerFault::Stalled => {
                "check whether the rank's process is stopped (by a signal or a debugger) or its machine or GPU hangs, and \
                 raise the bound if the rank is only slow"
            }
            _ => {
                "raise the bound if the rank is only slow, or find where the ranks' calls differ: some rank may have left out \
                 an operator, or another collective in which the late rank waits"
            }
        };
        format!(
            "timeout = {} s to enter an operator, stall_timeout = {} s without progress; {remedy}",
            self.timeout.as_secs_f64(),
            self.stall_bound().as_secs_f64()
        )
    }

    /// Checks the fields against the ranges of the environment variables. Backends call it for a config that a program
    /// has changed.
    ///
    /// # Errors
    /// [`CallerError::Config`] that names the first field outside its range, and the range.
    pub fn check(&self) -> Result<()> {
        let Self { host, cuda, .. } = self;
        let fields = [
            ("timeout (ms)", millis_up(self.timeout), ranges::TIMEOUT_MS),
            ("stall_timeout (ms)", millis_up(self.stall_timeout), ranges::TIMEOUT_MS),
            ("chunk_tokens", self.chunk_tokens, ranges::CHUNK_TOKENS),
            ("host.workers", host.workers, ranges::WORKERS),
            ("host.slot_bytes", host.slot_bytes, ranges::SLOT_BYTES),
            ("host.slots", host.slots, ranges::SLOTS),
            ("cuda.sms", cuda.sms, ranges::SMS),
            ("cuda.device_connections", cuda.device_connections, ranges::DEVICE_CONNECTIONS),
            ("cuda.rail_tokens", cuda.rail_tokens, ranges::RAIL_TOKENS),
            ("cuda.rail_choices", cuda.rail_choices, ranges::RAIL_CHOICES),
            ("cuda.lane_bytes", cuda.lane_bytes, ranges::LANE_BYTES),
        ];
        for (key, value, range) in fields {
            if !range.contains(&value) {
                return Err(out_of(key, value.to_string(), &range).into());
            }
        }
        if let Some(name) = &self.machine
            && !((1..=64).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic()))
        {
            let problem = "must be 1 to 64 printable ASCII characters without spaces".into();
            let (key, value) = ("HYBRID_EP_MACHINE", name.escape_debug().to_string());
            return Err(CallerError::Config { key, value, problem }.into());
        }
        Ok(())
    }

    fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let read = |key: &'static str, default: usize, range: RangeInclusive<usize>| -> Result<usize> {
            let Some(value) = lookup(key) else { return Ok(default) };
            match value.trim().parse() {
                Ok(number) if range.contains(&number) => Ok(number),
                _ => Err(out_of(key, value, &range).into()),
            }
        };
        let millis = |key, default: Duration| -> Result<Duration> {
            Ok(Duration::from_millis(read(key, millis_up(default), ranges::TIMEOUT_MS)? as u64))
        };
        let Self { timeout, stall_timeout, interrupt, chunk_tokens, machine: _, host, cuda } =
            Self::default();
        Ok(Self {
            timeout: millis("HYBRID_EP_TIMEOUT_MS", timeout)?,
            stall_timeout: millis("HYBRID_EP_STALL_TIMEOUT_MS", stall_timeout)?,
            interrupt,
            chunk_tokens: read("HYBRID_EP_CHUNK_TOKENS", chunk_tokens, ranges::CHUNK_TOKENS)?,
            machine: lookup("HYBRID_EP_MACHINE").filter(|name| !name.is_empty()),
            host: HostConfig {
                workers: read("HYBRID_EP_WORKERS", host.workers, ranges::WORKERS)?,
                slot_bytes: read("HYBRID_EP_SLOT_BYTES", host.slot_bytes, ranges::SLOT_BYTES)?
                    .next_multiple_of(64),
                slots: read("HYBRID_EP_SLOTS", host.slots, ranges::SLOTS)?,
                lend: read("HYBRID_EP_LEND", host.lend.into(), 0..=1)? == 1,
                transport: TransportOptions::from_lookup(&lookup)?,
                streaming_bytes: read("HYBRID_EP_STREAMING_BYTES", host.streaming_bytes, 0..=usize::MAX)?,
            },
            cuda: CudaConfig {
                sms: read("HYBRID_EP_SMS", cuda.sms, ranges::SMS)?,
                plain_copies: read("HYBRID_EP_PLAIN_COPIES", cuda.plain_copies.into(), 0..=1)? == 1,
                device_connections: read(
                    "CUDA_DEVICE_MAX_CONNECTIONS",
                    cuda.device_connections,
                    ranges::DEVICE_CONNECTIONS,
                )?,
                rail_tokens: read("HYBRID_EP_CUDA_RAIL_TOKENS", cuda.rail_tokens, ranges::RAIL_TOKENS)?,
                rail_choices: read("HYBRID_EP_CUDA_RAIL_CHOICES", cuda.rail_choices, ranges::RAIL_CHOICES)?,
                lane_bytes: read("HYBRID_EP_CUDA_LANE_BYTES", cuda.lane_bytes, ranges::LANE_BYTES)?,
            },
        })
    }
}

/// The ranges of the settings, for environment variables and for fields that a program sets.
mod ranges {
    use std::ops::RangeInclusive;

    pub(super) const WORKERS: RangeInclusive<usize> = 0..=256;
    pub(super) const TIMEOUT_MS: RangeInclusive<usize> = 1..=86_400_000;
    pub(super) const CHUNK_TOKENS: RangeInclusive<usize> = 1..=1 << 16;
    pub(super) const SLOT_BYTES: RangeInclusive<usize> = 4 << 10..=1 << 30;
    pub(super) const SLOTS: RangeInclusive<usize> = 1..=1024;
    pub(super) const SMS: RangeInclusive<usize> = 0..=1024;
    pub(super) const DEVICE_CONNECTIONS: RangeInclusive<usize> = 1..=32;
    pub(super) const RAIL_TOKENS: RangeInclusive<usize> = 1..=1 << 20;
    pub(super) const RAIL_CHOICES: RangeInclusive<usize> = 1..=1024;
    pub(super) const LANE_BYTES: RangeInclusive<usize> = 4 << 10..=16 << 30;
}

/// Milliseconds of a duration, rounded up so that a duration above 0 does not become 0.
fn millis_up(duration: Duration) -> usize {
    usize::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(usize::MAX)
}

fn out_of(key: &'static str, value: String, range: &RangeInclusive<usize>) -> CallerError {
    let problem = format!("must be a whole number from {} to {}", range.start(), range.end());
    CallerError::Config { key, value, problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_of_rails_are_raised_and_never_lowered() {
        let raised = |tokens, hidden| {
            let mut cuda = CudaConfig::default();
            cuda.raise_rails(tokens, hidden);
            (cuda.rail_tokens, cuda.lane_bytes)
        };
        let (tokens, bytes) = (4096, 64 << 20);
        assert_eq!(raised(None, None), (tokens, bytes));
        assert_eq!(raised(Some(100), Some(1024)), (tokens, bytes));
        assert_eq!(raised(Some(8192), None), (8192, bytes));
        assert_eq!(raised(Some(8192), Some(1024)), (8192, bytes));
        let (more, lane) = raised(Some(8192), Some(7168));
        assert_eq!(more, 8192);
        assert!(
            (8192 * (2 * 7168 + 4 * 8) + 384..8192 * (2 * 7168 + 64)).contains(&lane)
                && lane.is_multiple_of(4096)
        );
        // Values out of range are refused by `Config::check`, like those of the environment.
        assert_eq!(raised(Some(usize::MAX), Some(usize::MAX)).0, usize::MAX);
    }

    pub(super) fn env<'a>(pairs: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<String> + 'a {
        move |key| pairs.iter().find(|(k, _)| *k == key).map(|(_, v)| v.to_string())
    }

    #[test]
    fn fields_outside_their_ranges_are_refused() {
        assert_eq!(Config::default().check(), Ok(()));
        type Spoil = fn(&mut Config);
        let spoils: [(&str, Spoil); 12] = [
            ("host.slots", |config| config.host.slots = 0),
            ("host.slots", |config| config.host.slots = 1025),
            ("chunk_tokens", |config| config.chunk_tokens = 0),
            ("chunk_tokens", |config| config.chunk_tokens = usize::MAX),
            ("host.slot_bytes", |config| config.host.slot_bytes = usize::MAX),
            ("host.slot_bytes", |config| config.host.slot_bytes = 4095),
            ("host.workers", |config| config.host.workers = 257),
            ("cuda.sms", |config| config.cuda.sms = usize::MAX),
            ("cuda.device_connections", |config| config.cuda.device_connections = 33),
            ("timeout", |config| config.timeout = Duration::ZERO),
            ("timeout", |config| config.timeout = Duration::MAX),
            ("stall_timeout", |config| config.stall_timeout = Duration::from_secs(86_401)),
        ];
        for (name, spoil) in spoils {
            let mut config = Config::default();
            spoil(&mut config);
            match config.check() {
                Err(crate::Error::Caller(CallerError::Config { key, problem, .. })) => {
                    assert!(key.starts_with(name) && problem.contains(" to "), "{key}: {problem}");
                }
                other => panic!("{name}: {other:?}"),
            }
        }
    }

    #[test]
    fn the_stall_bound_is_at_most_the_entry_bound() {
        let (short, long) = (Duration::from_secs(1), Duration::from_secs(9));
        let bound =
            |timeout, stall_timeout| Config { timeout, stall_timeout, ..Config::default() }.stall_bound();
        assert_eq!((bound(long, short), bound(short, long)), (short, short));
    }

    #[test]
    fn the_network_bound_and_the_text_of_errors_follow_the_bounds() {
        let (timeout, stall_timeout) = (Duration::from_secs(90), Duration::from_secs(20));
        let config = Config { timeout, stall_timeout, ..Config::default() };
        assert_eq!(config.network_timeout(), Duration::from_secs(15));
        for (fault, remedy) in
            [(PeerFault::Late, "the ranks' calls differ"), (PeerFault::Stalled, "is stopped")]
        {
            let text = config.bounds(fault);
            for part in
                ["timeout = 90 s to enter an operator", "stall_timeout = 20 s without progress", remedy]
            {
                assert!(text.contains(part), "{text}");
            }
        }
    }

    #[test]
    fn names_of_machines_are_printable_and_have_at_most_64_characters() {
        let check = |name: &str| Config { machine: Some(name.into()), ..Config::default() }.check();
        for name in ["a", "host-1.rack_2!", &"n".repeat(64)] {
            assert_eq!(check(name), Ok(()), "{name}");
        }
        for name in ["", "two words", "tab\t", "ä", &"n".repeat(65)] {
            let error = check(name).unwrap_err().to_string();
            assert!(error.starts_with("HYBRID_EP_MACHINE = ") && error.contains("1 to 64"), "{error}");
        }
    }

    #[test]
    fn a_fraction_of_a_millisecond_counts_as_one() {
        assert_eq!(millis_up(Duration::ZERO), 0);
        assert_eq!(millis_up(Duration::from_nanos(1)), 1);
        assert_eq!(millis_up(Duration::from_millis(5)), 5);
    }

    #[test]
    fn environment_overrides_defaults() {
        assert_eq!(Config::from_lookup(env(&[])).unwrap(), Config::default());
        let config =
            Config::from_lookup(env(&[("HYBRID_EP_TIMEOUT_MS", "1500"), ("HYBRID_EP_SLOTS", " 2 ")]))
                .unwrap();
        assert_eq!(
            config,
            Config {
                timeout: Duration::from_millis(1500),
                host: HostConfig { slots: 2, ..HostConfig::default() },
                ..Config::default()
            }
        );
        let config = Config::from_lookup(env(&[("HYBRID_EP_STALL_TIMEOUT_MS", "7")])).unwrap();
        assert_eq!(config, Config { stall_timeout: Duration::from_millis(7), ..Config::default() });
        // An empty name counts as not set.
        for (name, machine) in [("rack-1", Some("rack-1".into())), ("", None)] {
            let config = Config::from_lookup(env(&[("HYBRID_EP_MACHINE", name)])).unwrap();
            assert_eq!(config, Config { machine, ..Config::default() });
        }
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
}
